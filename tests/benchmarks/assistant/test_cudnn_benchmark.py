"""cuDNN times convolutions: where that applies, how long it holds, the same function, and what is written."""
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant import optimize
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.techniques import cudnn_benchmark, tf32
from benchmarks.assistant.written import AsWritten
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import Evidence

unit, integration = pytest.mark.unit, pytest.mark.integration
TECHNIQUE = cudnn_benchmark.TECHNIQUE
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Watched(torch.autograd.Function):
    """Notes cuDNN's setting in the forward and in the backward."""
    seen: list[bool] = []

    @staticmethod
    def forward(ctx, x):
        Watched.seen.append(torch.backends.cudnn.benchmark)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        Watched.seen.append(torch.backends.cudnn.benchmark)
        return dy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return Watched.apply(self.conv(x))


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(Watched, "seen", [])
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    yield
    torch.backends.cudnn.benchmark = before


@unit
@pytest.mark.parametrize("model, x", [(nn.Conv2d(3, 4, 3), X), (nn.Conv1d(3, 4, 3), X[:, :, 0]),
                                      (nn.ConvTranspose2d(3, 4, 3), X),
                                      (nn.Conv3d(3, 4, 3), X[:, :, None].repeat(1, 1, 4, 1, 1))])
def test_convolutions_in_any_number_of_dimensions_are_found(model, x):
    [found] = cudnn_benchmark.find(read(model, Inputs.of(x)))
    assert found.place is None and found.reason.startswith("1 convolution, ") and not found.why_not


@unit
def test_where_there_is_nothing_to_gain_it_is_not_found():
    assert cudnn_benchmark.find(read(nn.Linear(8, 8), Inputs.of(torch.randn(2, 8)))) == []
    program = read(nn.Conv2d(3, 4, 3), Inputs.of(X))
    torch.backends.cudnn.benchmark = True
    assert cudnn_benchmark.find(program) == []


@unit
def test_it_holds_in_both_passes_and_the_callers_own_is_back():
    rung = Rung(Net(), [TECHNIQUE])
    y = rung(X)
    assert Watched.seen == [True] and not torch.backends.cudnn.benchmark
    y.sum().backward()
    assert Watched.seen == [True, True] and not torch.backends.cudnn.benchmark


@unit
def test_beside_another_setting_both_hold():
    before, seen = torch.get_float32_matmul_precision(), []
    net = Net()
    net.conv.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    Rung(net, [tf32.TECHNIQUE, TECHNIQUE])(X).sum().backward()
    assert Watched.seen == [True, True] and seen == ["high"]
    assert torch.get_float32_matmul_precision() == before and not torch.backends.cudnn.benchmark


@unit
def test_without_it_the_setting_is_the_callers():
    torch.backends.cudnn.benchmark = True
    Rung(Net(), [])(X).sum().backward()
    assert Watched.seen == [True, True]


@unit
def test_what_is_written_holds_in_its_calls_alone():
    model = Net()
    written = AsWritten(model, cudnn_benchmark.CODE, "output = model(*inputs)")
    assert not torch.backends.cudnn.benchmark
    written(X).sum().backward()
    assert Watched.seen == [True, True] and not torch.backends.cudnn.benchmark


@integration
def test_it_is_the_same_function():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    judgement = validate(Rung(model, [TECHNIQUE]), model, (X,))
    assert judgement.passed and judgement.outputs_proven, judgement


class WrongWhenTimed(Net):
    """An algorithm that is fast and wrong: it leaves out a row of the kernel."""

    def forward(self, x):
        if not torch.backends.cudnn.benchmark:
            return super().forward(x)
        return F.conv2d(x, self.conv.weight * (torch.arange(3) < 2)[:, None], self.conv.bias)


@integration
def test_an_algorithm_that_is_wrong_is_unsafe():
    model = WrongWhenTimed()
    assert not validate(Rung(model, [TECHNIQUE]), model, (X,)).passed


@unit
@pytest.mark.parametrize("now, why", [(["conv_a", "relu"], "the same kernels ran"), (["conv_b", "relu"], "")])
def test_where_the_same_kernels_run_it_did_not_fire(now, why):
    before, seen = (Evidence(Counter(names), Counter(), "n/a", "") for names in (["relu", "conv_a"], now))
    assert cudnn_benchmark.fired(None, before, seen).startswith(why)
    assert bool(cudnn_benchmark.fired(None, before, seen)) == bool(why)


@integration
def test_on_a_cpu_it_is_not_here(studies_in_seconds):
    result = optimize(nn.Conv2d(3, 4, 3), (X,), quick=True, techniques=(TECHNIQUE,))
    [one] = result.opportunities
    assert one.verdict == "not here" and "cuDNN needs an NVIDIA GPU" in one.why
