"""A technique that cheats: the assistant refuses it and names what was found, before or while it is timed."""
import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize
from benchmarks.assistant.technique import Found, Plan, Technique
from benchmarks.examples.cheats import CHEATS, Cheat, given, reference_of
from tests.helpers.cheats import is_named


def putting_in(cheat: Cheat) -> Technique:
    """Puts a cheat in place of a model's only layer, with its parameters."""
    def change(model: nn.Module) -> None:
        made = cheat.make()
        for name, parameter in model[0].named_parameters():
            setattr(made, name, parameter)
        model[0] = made

    def apply(plan: Plan) -> None:
        plan.changes.append(change)
    return Technique("cheat", "looks right", lambda program: [Found(None, "", 1, "a layer")], apply)


@pytest.mark.integration
@pytest.mark.parametrize("name", CHEATS)
def test_a_technique_that_cheats_is_unsafe(name):
    cheat = CHEATS[name]
    if cheat.needs_gpu:
        pytest.skip("streams are a GPU's")
    try:
        result = optimize(nn.Sequential(reference_of(name)), given(torch.device("cpu")), techniques=[putting_in(cheat)],
                          quick=True, rounds=20)
    finally:
        cheat.undo()
    [one] = result.opportunities
    assert one.verdict == "unsafe" and one.speedup is None
    assert is_named(name, one.why)
