"""Channels-last: where it applies, the same function, the model left as it was, and what is written."""
from collections import Counter

import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.techniques import channels_last, compiled
from benchmarks.assistant.written import AsWritten
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import Evidence

unit, integration = pytest.mark.unit, pytest.mark.integration
TECHNIQUE = channels_last.TECHNIQUE
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LAST = torch.channels_last


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.third.weight = self.second.weight
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(self.third(self.second(x)).mean((2, 3)))


def made(net=Net):
    torch.manual_seed(0)
    return net()


def found_in(model, x=X):
    return channels_last.find(read(model, Inputs.of(x)))


@unit
def test_convolutions_are_counted():
    [found] = found_in(made())
    assert found.reason.startswith("3 convolutions on NCHW tensors: ") and found.place is None


@unit
@pytest.mark.parametrize("x, is_told", [(X, True), (X.to(memory_format=LAST), False)], ids=["NCHW", "NHWC"])
def test_images_that_come_as_nchw_are_told(x, is_told):
    """A loader could give them channels-last."""
    [found] = found_in(made(), x)
    assert ("the transposes of inputs that come as NCHW" in found.reason) == is_told


@unit
def test_where_there_is_nothing_to_gain_it_is_not_found():
    assert found_in(made().to(memory_format=LAST)) == []
    assert found_in(nn.Linear(8, 8), torch.randn(2, 8)) == []
    assert found_in(nn.Conv1d(3, 4, 3), torch.randn(2, 3, 8)) == []
    assert found_in(nn.Conv2d(3, 4, 1)) == []


class Patches(nn.Module):
    """A convolution, and matmuls behind it."""

    def __init__(self, layers, groups):
        super().__init__()
        self.patches = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))

    def forward(self, x):
        return self.layers(self.patches(x).flatten(2))


@unit
@pytest.mark.parametrize("layers, groups, matters", [(1, 1, True), (400, 1, False), (30, 4, True)])
def test_of_a_small_share_it_is_not_tried(layers, groups, matters):
    """With groups it has 1 % of the FLOPs, and 2 % of the bytes."""
    [found] = found_in(Patches(layers, groups), torch.randn(2, 8, 8, 8))
    assert bool(found.why_not) != matters, found


@pytest.mark.parametrize("flops, moved, matters", [(0.0099, 0.0, False), (0.01, 0.0, True), (0.0, 0.0099, False),
                                                   (0.0, 0.01, True)])
@unit
def test_what_a_small_share_is(flops, moved, matters, monkeypatch):
    program = read(nn.Conv2d(3, 4, 3), Inputs.of(X))
    [call] = [call for call in program.trace.calls if call.products]
    monkeypatch.setattr(type(program.trace), "flops", 1e6)
    monkeypatch.setattr(type(program.trace), "bytes", 1e6)
    monkeypatch.setattr(type(call), "flops", flops * 1e6)
    call.bytes = moved * 1e6
    [found] = channels_last.find(program)
    assert bool(found.why_not) != matters


@integration
@pytest.mark.parametrize("training", [True, False])
def test_it_is_the_same_function_and_the_model_stays_as_it_was(training):
    model = made().train(training)
    rung = Rung(model, [TECHNIQUE])
    assert rung.module.second.weight.is_contiguous(memory_format=LAST)
    assert rung.module.third.weight is rung.module.second.weight
    assert rung.module.first(X).is_contiguous(memory_format=LAST)
    judgement = validate(rung, model, (X,))
    assert judgement.passed and judgement.outputs_proven, judgement
    assert model.second.weight.is_contiguous() and model.third.weight is model.second.weight


class Flat(Net):
    """Its view of NCHW is none of NHWC."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8 * 64, 4)

    def forward(self, x):
        return self.head(self.second(self.first(x)).view(x.size(0), -1))


@integration
def test_a_view_that_it_breaks_is_said(studies_in_seconds):
    result = optimize(made(Flat), (X,), quick=True, techniques=(TECHNIQUE,))
    [one] = result.opportunities
    assert one.verdict in ("not here", "unsafe") and "view" in one.why, one


class Strided(Net):
    """What it gives depends on how its tensor lies in memory."""

    def forward(self, x):
        return super().forward(x) * (2 if self.first(x).is_contiguous() else 1)


@integration
def test_a_model_that_asks_for_strides_is_another_function():
    model = made(Strided)
    assert not validate(Rung(model, [TECHNIQUE]), model, (X,)).passed


@integration
def test_what_is_written_is_what_was_tried():
    model = made()
    program = read(model, Inputs.of(X))
    code = channels_last.advice(program, *channels_last.find(program))
    assert not code.wraps and compiled.advice(program, compiled.find(program)[0]).wraps
    written = AsWritten(made(), code.code, "output = model(*inputs)")
    assert torch.equal(written(X), Rung(model, [TECHNIQUE])(X))


@unit
@pytest.mark.parametrize("before, seen, said", [
    ({}, {}, ""), ({"nchwToNhwcKernel": 2}, {"nchwToNhwcKernel": 2}, ""),
    ({}, {"nchwToNhwcKernel": 2, "nhwcToNchwKernel": 1}, "3 transposes more than without it")])
def test_transposes_that_it_causes_are_counted(before, seen, said):
    of_both = [Evidence(Counter(kernels), Counter(), "n/a", "") for kernels in (before, seen)]
    assert channels_last.remark(None, *of_both) == said
