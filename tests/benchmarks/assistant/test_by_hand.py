"""A version that a person wrote: it is judged, timed in the ladder's rounds, and what is missing to it is said."""
import copy
import time

import pytest
import torch
from torch import Tensor, nn

from benchmarks.assistant import ByHand, Task, optimize
from benchmarks.assistant.combination import BY_HAND
from benchmarks.assistant.technique import Found, Technique
from benchmarks.examples import by_hand, public
from benchmarks.measure.judge import validate
from benchmarks.show import assistants
from common.outcome import UserError
from common.report.record_file import RecordFile


class Sleeping(nn.Linear):
    """It takes so many seconds."""

    def __init__(self, seconds: float, off: float = 0.0):
        super().__init__(6, 6)
        self.seconds, self.off = seconds, off

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x) * (1 + self.off)


def quicker(name: str, seconds: float) -> Technique:
    """A technique that makes it so fast."""
    return Technique(name, "it sleeps less", lambda program: [Found(None, "", 1, "the call")],
                     lambda plan: plan.changes.append(lambda model: setattr(model, "seconds", seconds)))


def task(seconds: float, off: float = 0.0) -> Task:
    model = Sleeping(0.02)
    version = Sleeping(seconds, off)
    version.load_state_dict(model.state_dict())
    return Task(model, (torch.randn(2, 6),), by_hand=ByHand(version))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("seconds, share, is_missing", [(0.005, 0.5, True), (0.02, 2.0, False)])
@pytest.mark.parametrize("techniques", [["a"], ["a", "b"]])
def test_the_fastest_rung_is_held_against_it(techniques, seconds, share, is_missing, studies_in_seconds):
    every = [quicker(name, 0.01) for name in techniques]
    result = optimize(lambda: task(seconds), quick=True, inference=True, techniques=every)
    row = next(line for line in str(result).splitlines() if line.startswith(BY_HAND))
    assert float(row.removeprefix(BY_HAND).split()[0]) == pytest.approx(1e3 * seconds, rel=0.2)
    words = " ".join(str(result).split())
    assert ("ms are missing to it" in words) == is_missing
    gain = result.together.gain(result.fastest_rung(), result.version_by_hand(), result.mode)
    assert gain[0] == pytest.approx(share, rel=0.2)
    assert {technique.name for technique in result.fastest_rung().techniques} & set(techniques)


@pytest.mark.integration
def test_without_a_technique_the_model_as_it_is_is_held_against_it(studies_in_seconds):
    result = optimize(lambda: task(0.001), quick=True, inference=True, techniques=[])
    assert "the model as it is reaches 0." in " ".join(str(result).split())


@pytest.mark.integration
@pytest.mark.parametrize("off, is_right", [(0.0, True), (0.01, False)])
def test_one_that_is_wrong_is_not_timed_and_said(off, is_right, studies_in_seconds):
    result = optimize(lambda: task(0.001, off), quick=True, inference=True, techniques=[])
    words = " ".join(str(result).split())
    assert ("it was not timed: failed: the output is off by 1.0e-02" in words) != is_right
    assert (result.version_by_hand() is not None) == is_right


@pytest.mark.integration
def test_running_means_of_its_own_and_those_that_rungs_share_are_no_fault(studies_in_seconds):
    """All rungs move the model's own, between a call and the look at it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    given = [(torch.randn(32, 8),), (torch.randn(8, 8),)]
    built = Task(model, given, by_hand=ByHand(copy.deepcopy(model)))
    same = [Technique(name, "nothing", lambda program: [Found(None, "", 1, "the call")], lambda plan: None)
            for name in ("a", "b")]
    result = optimize(lambda: built, quick=True, techniques=same)
    assert not result.failures and result.version_by_hand()
    for each in built.models:                                  # both are restored
        assert not each[1].running_mean.any() and all(t.grad is None for t in each.parameters())
    assert {one.verdict for one in result.opportunities} <= {"by hand", "no gain"}, result.opportunities


@pytest.mark.integration
def test_the_page_shows_it_beside_the_fastest_rung(studies_in_seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(assistants, "RESULTS", tmp_path)
    path = tmp_path / "cpu" / "assistant-sleeping.jsonl"
    path.parent.mkdir()
    optimize(lambda: task(0.005), quick=True, inference=True, techniques=[quicker("a", 0.01)],
             file=RecordFile(str(path)))
    headers, _, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in
                       assistants.models().splitlines())
    cells = dict(zip(headers, row, strict=True))
    assert float(cells["by hand, ms"]) == pytest.approx(5, rel=0.2)
    assert float(cells["fastest"]) == pytest.approx(10, rel=0.2)
    assert float(cells["of its speed"].split()[0]) == pytest.approx(0.5, rel=0.2)


@pytest.mark.unit
def test_numerics_that_are_none_are_told():
    model = nn.Linear(6, 6)
    with pytest.raises(UserError, match="by_hand: numerics 'bf16': give one of tf32"):
        Task.of(Task(model, (torch.randn(2, 6),), by_hand=ByHand(model, "bf16")))


@pytest.mark.integration
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_transformers_by_hand_are_the_public_ones(name, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(by_hand, "compiled", lambda model: model)
    built = getattr(public, name)()
    tokens = {"input_ids": built.inputs["input_ids"][:, :32]}
    judgement = validate(built.by_hand.model, built.model, tokens, numerics=built.by_hand.numerics)
    assert judgement.passed and judgement.has_oracle, judgement


@pytest.mark.integration
def test_the_resnet_by_hand_is_the_public_one():
    resnet = pytest.importorskip("torchvision").models.resnet
    torch.manual_seed(0)
    model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
    judgement = validate(by_hand.ResNet(model), model, torch.randn(8, 3, 32, 32), numerics="bfloat16")
    assert judgement.passed and judgement.has_oracle, judgement
    assert next(model.parameters()).is_contiguous()
