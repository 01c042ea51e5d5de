"""What is judged of a rung once: its meaning, where others differ by a compiler or TF32 alone, and the passes that are
timed, as compiled code is compiled anew for each.
"""
import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize
from benchmarks.assistant.technique import Found, Plan, Technique
from benchmarks.measure.judge import Judge


def technique(name: str, apply) -> Technique:
    return Technique(name, "it is tried everywhere", lambda program: [Found(None, "", 1, "a model")], apply)


def in_tf32(plan: Plan) -> None:
    plan.matmul_precision = "high"


def in_bfloat16(plan: Plan) -> None:
    plan.autocast, plan.numerics = torch.bfloat16, "bfloat16"


def with_another_slope(slope: float) -> Technique:
    def change(model: nn.Module) -> None:
        model[1] = nn.LeakyReLU(slope)
    return technique(f"slope {slope}", lambda plan: plan.changes.append(change))


TF32, BFLOAT16 = technique("settings", in_tf32), technique("autocast", in_bfloat16)
SAME, OTHER = with_another_slope(0.01), with_another_slope(0.01 + 1e-8)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The techniques of each rung whose meaning was judged."""
    of, ask = [], Judge._ask_meaning

    def noting(self):
        of.append(" + ".join(each.name for each in self.candidate.techniques))
        ask(self)
    monkeypatch.setattr(Judge, "_ask_meaning", noting)
    return of


def run(model: nn.Module, *techniques: Technique, others: int = 0):
    inputs = [torch.randn(4 + number, 8) for number in range(1 + others)]
    return optimize(lambda: (model, inputs if others else inputs[0]), techniques=techniques, quick=True, rounds=6)


def a_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.01))


@pytest.mark.integration
def test_what_neither_rewrites_nor_casts_has_the_meaning_of_one_judged_before(studies_in_seconds, asked):
    result = run(a_model(), TF32, technique("more settings", in_tf32))
    assert asked == ["settings"]
    of_meaning = {name: [check for check in judged if check.question == "meaning"]
                  for name, judged in result.judgements.items()}
    assert of_meaning["more settings"] == of_meaning["settings"] != []
    assert result.judgements["more settings"].status == "ok"


@pytest.mark.integration
def test_each_rewrite_and_autocast_is_judged(studies_in_seconds, asked):
    """Under autocast a model may run other code, if it asks."""
    result = run(a_model(), SAME, BFLOAT16, TF32)
    assert asked[:3] == ["slope 0.01", "autocast", "settings"]
    assert len(asked) == len(set(map(frozenset, (each.split(" + ") for each in asked)))), asked
    assert all(judged.status == "ok" for judged in result.judgements.values())


class AsksForAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y + 1e-4 if torch.is_autocast_enabled(x.device.type) else y


@pytest.mark.integration
def test_another_function_under_autocast_is_found(studies_in_seconds):
    result = run(AsksForAutocast(), TF32, BFLOAT16)
    assert [one.verdict for one in result.opportunities if one.technique == "autocast"] == ["unsafe"]


@pytest.mark.integration
def test_a_wrong_meaning_is_never_taken_for_judged(studies_in_seconds, asked):
    result = run(a_model(), TF32, OTHER)
    assert asked == ["settings", "slope 0.01000001"]
    assert [one.verdict for one in result.opportunities if one.technique == OTHER.name] == ["unsafe"]


@pytest.mark.integration
def test_each_of_several_inputs_has_a_meaning_of_its_own(studies_in_seconds, asked):
    run(a_model(), TF32, technique("more settings", in_tf32), others=1)
    assert asked == ["settings"] * 2


class Noting(nn.LeakyReLU):
    """It notes whether it is called with gradients."""

    def __init__(self, noted: set[bool]):
        super().__init__(0.01)
        self.noted = noted

    def __deepcopy__(self, memo):
        return Noting(self.noted)

    def forward(self, x):
        self.noted.add(torch.is_grad_enabled())
        return super().forward(x)


@pytest.mark.integration
@pytest.mark.parametrize("inference", [False, True])
def test_on_the_ladder_the_pass_that_is_timed_is_called(studies_in_seconds, inference):
    """Alone each is timed with gradients and without."""
    noted: list[set[bool]] = []

    def apply(plan: Plan) -> None:
        noted.append(set())
        plan.changes.append(lambda model, of=noted[-1]: model.__setitem__(1, Noting(of)))

    def waiting(plan: Plan) -> None:
        plan.changes.append(lambda model: model.append(nn.Identity()))
    slow = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.01), nn.Identity())
    optimize(slow, torch.randn(4, 8), techniques=[technique("noting", apply), technique("other", waiting)],
             rounds=6, inference=inference)
    called = [each for each in noted if each]
    assert called[0] == ({False} if inference else {False, True})
    assert called[-1] == {not inference}
