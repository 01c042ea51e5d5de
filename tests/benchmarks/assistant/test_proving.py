"""Advice is pasted and tried before it is said: in both modes, on other sizes, with each optional mask left out."""
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.assistant import verdicts
from benchmarks.assistant.circumstances import circumstances
from benchmarks.assistant.combination import Combination
from benchmarks.assistant.loading import load
from benchmarks.assistant.proving import Prover
from benchmarks.assistant.source import Place
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Advice, Found
from benchmarks.assistant.trials import Opportunity, as_written
from benchmarks.measure.calls import Inputs

CPU = torch.device("cpu")


class Masked(nn.Module):
    """[B, S, E], [B, S] -> [B, S, E]; as many positions as it has room for."""

    def __init__(self, longest=64):
        super().__init__()
        self.linear, self.longest = nn.Linear(6, 6), longest

    def forward(self, x, mask=None):
        assert x.size(1) <= self.longest
        y = self.linear(x)
        return y if mask is None else y.masked_fill(mask[..., None], 0.0)


@pytest.mark.unit
def test_a_model_is_tried_in_both_modes_on_other_sizes_and_without_its_mask():
    found = circumstances(Masked().eval(), Inputs.of((torch.randn(4, 64, 6), torch.zeros(4, 64, dtype=torch.bool))))
    assert [each.words for each in found] == [
        "on other sizes", "in train mode", "on one sample", "without mask", "on a length of 30", "on a length of 1"]
    assert [tuple(each.inputs.args[0].shape) for each in found] == [
        (2, 61, 6), (2, 61, 6), (1, 61, 6), (2, 61, 6), (2, 30, 6), (2, 1, 6)]
    assert [each.training for each in found] == [False, True, False, False, False, False]
    assert found[3].inputs.args[1:] in ((), (None,))


@pytest.mark.unit
def test_what_a_model_does_not_take_is_left_out():
    class OneLength(nn.Linear):
        def forward(self, x):
            assert x.shape == (2, 5, 6)
            return super().forward(x)
    found = circumstances(OneLength(6, 6), Inputs.of(torch.randn(2, 5, 6)))
    assert [each.words for each in found] == ["", "in eval mode"]


@pytest.mark.unit
def test_one_query_beside_more_keys():
    class Cross(nn.Module):
        def forward(self, x, memory):
            return (x @ memory.mT).softmax(-1) @ memory
    found = circumstances(Cross(), Inputs.of((torch.randn(2, 9, 4), torch.randn(2, 7, 4))))
    [one] = [each for each in found if each.words == "with one query beside more keys"]
    assert [tuple(t.shape) for t in one.inputs.args] == [(2, 1, 4), (2, 7, 4)]


@pytest.mark.unit
def test_a_loss_is_not_asked_for_one_query():
    """Targets of the old length would be broadcast, and the sum would not show it."""
    class Loss(nn.Module):
        def forward(self, x, targets):
            return (x.log_softmax(-1) * targets).sum(-1).mean()
    found = circumstances(Loss(), Inputs.of((torch.randn(2, 9, 4), torch.randn(2, 9, 4))))
    assert "on a length of 1" in {each.words for each in found}
    assert "with one query beside more keys" not in {each.words for each in found}


SOURCE = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, mask=None):
            y = self.linear(x)
            return y if mask is None else y.masked_fill(mask[..., None], 0.0)

    def build():
        return Model(), (torch.randn(2, 9, 6), torch.zeros(2, 9, dtype=torch.bool))
"""


@pytest.mark.integration
@pytest.mark.parametrize("code, why", [
    ("y = nn.functional.linear(x, self.linear.weight, self.linear.bias)", ""),
    ("y = self.linear(x) * 1.01", "the output is off by 1.0e-02"),
    ("y = self.linear(x) * (1 if self.training else 2)", "in eval mode: the output is off by 1.0e+00"),
    ("y = self.linear(x) + (mask is None)", "without mask: the output is off by"),
    ("y = self.linear(x) + (x.size(1) == 1)", "on a length of 1: the output is off by"),
    ("y = self.linear(x) + x.size(0) - 2", "on one sample: the output is off by"),
    ("y = self.lnear(x)", "raises AttributeError: 'Model' object has no attribute 'lnear'"),
    ("y = (", "my_model.py can't be imported: SyntaxError"),
    ("y = self.linear(x).detach()", "takes no gradient")])
def test_what_is_wrong_somewhere_says_where(code, why, tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(textwrap.dedent(SOURCE))
    source = load(f"{path}:build")
    prover = Prover(source, Task.of(source()), CPU, seed=0)
    found = prover.why_not(Advice(code, Place(str(path), 11)))
    assert why in found and bool(why) == bool(found), found


@pytest.mark.integration
def test_what_nothing_was_held_against_is_not_proved(tmp_path, monkeypatch):
    path = tmp_path / "my_model.py"
    path.write_text(textwrap.dedent(SOURCE))
    source = load(f"{path}:build")
    prover = Prover(source, Task.of(source()), CPU, seed=0)
    monkeypatch.setattr("benchmarks.assistant.proving.Truth", lambda *given: 1 / 0)
    assert "can't be judged" in prover.why_not(Advice("y = self.linear(x)", Place(str(path), 11)))


# ----------------------------------------------------------------------------------------------------------- verdicts

ADVICE = Advice("y = x", Place("/f.py", 3))


def said(proofs, gain=None, status="", added=None, timed=True, alone=None):
    """The verdict on a piece of advice that was worth it, as it became."""
    technique = SimpleNamespace(name="sdpa")
    name = Combination(called=as_written("sdpa")).name
    results = {name: None} if timed else {}
    pieces = SimpleNamespace(results=results, why_not=lambda of, mode: status,
                             gain=lambda of, over, mode: gain if of.name == name else alone)
    ladder = [SimpleNamespace(technique=technique, gain=added)] if added else []
    result = SimpleNamespace(proofs=proofs, pieces=pieces, mode="forward", ladder=ladder, dropped=[], file_known=True,
                             others={})
    one = Opportunity("sdpa", Found(ADVICE.place, "", 1, ""), "take", speedup=1.5, advice=ADVICE)
    return verdicts._as_written(result, one)


@pytest.mark.unit
@pytest.mark.parametrize("given, verdict, why", [
    (({ADVICE: ""}, (1.5, 1.4, 1.6)), "take", ""),
    (({ADVICE: ""}, (1.03, 1.021, 1.04)), "take", ""),
    (({ADVICE: ""}, (1.02, 1.019, 1.03)), "no gain", "as it is written it is 1.02 times as fast, and 1.50 were"),
    (({ADVICE: ""}, (0.3, 0.2, 0.4)), "no gain", "0.30 times as fast"),
    (({ADVICE: ""}, (0.99, 0.9, 1.01), "", (1.2, 1.1, 1.3)), "take", ""),
    (({ADVICE: ""}, (0.9, 0.8, 0.99), "", (1.2, 1.1, 1.3)), "no gain", "0.90 times"),
    (({ADVICE: ""}, (1.5, 1.4, 1.6), "", None, True, (1.001, 0.99, 1.0)), "take", ""),
    (({ADVICE: ""}, (1.5, 1.4, 1.6), "", None, True, (0.98, 0.97, 0.999)), "no gain", "alone in its place, it is 0.98"),
    (({ADVICE: ""}, None, "failed: it is wrong"), "by hand", "as it is written: failed: it is wrong"),
    (({ADVICE: "in eval mode: off"},), "by hand", "its code was tried and is left out: in eval mode: off"),
    (({ADVICE: ""}, None, "", None, False), "take", ""),
    (({},), "take", "")])
def test_what_was_tried_decides(given, verdict, why):
    one = said(*given)
    assert one.verdict == verdict and why in one.why and bool(why) == bool(one.why)
    assert (one.advice is None) == (verdict in ("by hand", "no gain"))
