"""A version that a person wrote: it is judged, timed in the ladder's rounds, and what is missing to it is said."""
import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.assistant import ByHand, Task, optimize
from benchmarks.assistant.combination import Combination
from benchmarks.assistant.missing import missing_by_kind
from benchmarks.assistant.optimized import Optimized
from benchmarks.assistant.technique import Found, Technique
from benchmarks.examples import by_hand, public
from benchmarks.measure.judge import validate
from benchmarks.records import BY_HAND
from benchmarks.show import assistants
from common.outcome import UserError
from common.report.record_file import RecordFile
from common.text import figures, ratio


class Version(nn.Linear):
    """A linear layer, or one that is off by a factor."""

    def __init__(self, off: float = 0.0):
        super().__init__(6, 6)
        self.off = off

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.off)


def same(name: str) -> Technique:
    """A technique that changes nothing."""
    return Technique(name, "nothing", lambda program: [Found(None, "", 1, "the call")], lambda plan: None)


def task(off: float = 0.0) -> Task:
    model, version = nn.Linear(6, 6), Version(off)
    version.load_state_dict(model.state_dict())
    return Task(model, (torch.randn(2, 6),), by_hand=ByHand(version))


def timed(result: Optimized, ms: dict[str, float]) -> Optimized:
    """The same result, as if those times of cases on the ladder had been measured."""
    for case, each in ms.items():
        row = result.together.results[case].rows[result.mode, "eager"]
        assert row.timing is not None
        row.timing = replace(row.timing, samples=[each] * len(row.timing.samples))
    return result


@pytest.mark.integration
@pytest.mark.parametrize("ms, share, said", [
    (5.0, 0.5, "reaches 0.50 [0.50, 0.50] of its speed: 5.00 ms are missing to it"),
    (10.0, 1.0, "reaches 1.00 [1.00, 1.00] SAME of its speed; it launches "),
    (20.0, 2.0, "reaches 2.00 [2.00, 2.00] of its speed; it launches ")])
@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_the_fastest_rung_is_held_against_it(names, ms, share, said, studies_in_seconds):
    result = optimize(task, quick=True, inference=True, techniques=[same(name) for name in names])
    timed(result, {"as it is": 30.0, **{rung.combination.name: 10.0 + place for place, rung in
                                        enumerate(result.ladder)}, BY_HAND: ms})
    words = " ".join(str(result).split())
    first = result.ladder[0].technique.name
    assert f"{first} {said}" in words and f"{BY_HAND} {figures(ms)} {30 / ms:.2f}" in words
    assert result.fastest_rung() == result.ladder[0].combination
    gain = result.together.gain(result.fastest_rung(), result.version_by_hand(), result.mode)
    assert gain == (share, share, share)


@pytest.mark.unit
@pytest.mark.parametrize("ms, by_hand, words", [
    ({"sgemm": 8.0, "relu": 2.0}, {"sgemm": 5.0, "cutlass_gemm": 1.0, "relu": 2.5},
     "matmul 2.00, passes over memory -0.500"),
    ({"sgemm": 8.0, "relu": 2.0}, {"sgemm": 8.0, "relu": 1.951}, ""),
    ({"sgemm": 8.0, "relu": 2.0}, {"sgemm": 8.0, "relu": 1.949}, "passes over memory 0.051"),
    ({}, {"sgemm": 5.0}, ""), ({"sgemm": 5.0}, {}, "")])
def test_what_is_missing_is_said_by_kind_of_work(ms, by_hand, words):
    assert missing_by_kind(ms, by_hand) == words


@pytest.mark.integration
@pytest.mark.parametrize("ms, said", [(5.0, ": 5.00 ms are missing to it, in kernels: matmul 3.00; it launches"),
                                      (20.0, " of its speed; it launches")])
def test_what_kernels_are_missing_is_said_where_some_are(ms, said, studies_in_seconds):
    result = optimize(task, quick=True, inference=True, techniques=[same("a")])
    timed(result, {"as it is": 30.0, "a": 10.0, BY_HAND: ms})
    for name, each in (("a", 8.0), (BY_HAND, 5.0)):
        evidence = result.together.results[name].evidence
        evidence[result.mode] = replace(evidence[result.mode], ms={"sgemm": each})
    words = " ".join(str(result).split())
    assert said in words and ("in kernels" in words) == (ms == 5.0)


@pytest.mark.integration
def test_without_a_technique_the_model_as_it_is_is_held_against_it(studies_in_seconds):
    result = optimize(task, quick=True, inference=True, techniques=[])
    assert "the model as it is reaches " in " ".join(str(result).split())


@pytest.mark.integration
@pytest.mark.parametrize("off, is_right", [(0.0, True), (0.01, False)])
def test_one_that_is_wrong_is_not_timed_and_said(off, is_right, studies_in_seconds):
    result = optimize(lambda: task(off), quick=True, inference=True, techniques=[])
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
    result = optimize(lambda: built, quick=True, techniques=[same("a"), same("b")])
    assert not result.failures and result.version_by_hand()
    for each in built.models:                                  # both are restored
        assert not each[1].running_mean.any() and all(t.grad is None for t in each.parameters())
    assert {one.verdict for one in result.opportunities} <= {"by hand", "no gain"}, result.opportunities


@pytest.mark.integration
def test_the_page_shows_it_beside_the_fastest_rung(studies_in_seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(assistants, "RESULTS", tmp_path)
    path = tmp_path / "cpu" / "assistant-sleeping.jsonl"
    path.parent.mkdir()
    result = optimize(task, quick=True, inference=True, techniques=[same("a")], file=RecordFile(str(path)))
    headers, _, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in
                       assistants.models().splitlines())
    cells = dict(zip(headers, row, strict=True))
    by_hand, rung = result.version_by_hand(), result.fastest_rung()
    assert cells["ms"] == figures(result.together.ms(Combination(), result.mode))
    assert cells["by hand, ms"] == figures(result.together.ms(by_hand, result.mode))
    assert cells["fastest"] == figures(result.together.ms(rung, result.mode))
    assert cells["of its speed"] == ratio(result.together.gain(rung, by_hand, result.mode))


@pytest.mark.unit
@pytest.mark.parametrize("version", [lambda x: x, ByHand(lambda x: x)])
def test_one_that_is_no_module_is_reported(version):
    with pytest.raises(UserError, match=r"by_hand is a \w+: give a torch\.nn\.Module, or ByHand"):
        Task.of(Task(nn.Linear(6, 6), (torch.randn(2, 6),), by_hand=version))


@pytest.mark.unit
def test_a_module_alone_multiplies_in_its_dtype():
    version = nn.Linear(6, 6)
    task = Task.of(Task(nn.Linear(6, 6), (torch.randn(2, 6),), by_hand=version))
    assert task.by_hand == ByHand(version) and task.models[1] is version


@pytest.mark.unit
def test_numerics_that_are_none_are_reported():
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
