"""Weights that autocast casts at each call are cast once: where, the same bits, and what must stay as it is."""
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant import optimize
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.techniques import cast_once
from benchmarks.assistant.written import AsWritten
from benchmarks.measure.calls import Inputs

unit, integration = pytest.mark.unit, pytest.mark.integration
TECHNIQUE = cast_once.TECHNIQUE
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Its head has the weight of an embedding, and its last layer runs without autocast."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.LayerNorm(8)
        self.inner = nn.ModuleList(nn.Linear(8, 8, bias=bias) for bias in (True, False))
        self.table, self.head, self.last = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False), nn.Linear(16, 2)
        self.head.weight = self.table.weight

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.norm(self.conv(x).mean((2, 3)))
            for layer in self.inner:
                x = layer(x)
            x = self.head(x + self.table.weight[0])
        return self.last(x.to(self.last.weight.dtype))


def made(net=Net):
    torch.manual_seed(0)
    return net().eval()


def read_for_inference(model, x=X):
    program = read(model, Inputs.of(x))
    program.is_inference = True
    return program


def rung_of(model, x=X):
    return Rung(model, [TECHNIQUE], found={TECHNIQUE.name: cast_once.find(read_for_inference(model, x))})


@unit
def test_layers_with_weights_of_their_own_are_found():
    [found] = cast_once.find(read_for_inference(made()))
    assert found.modules == ("conv", "inner.0", "inner.1") and found.dtype == torch.bfloat16
    assert found.reason.endswith("MB of weights of 3 layers to bfloat16 at each call")


class Twice(nn.Module):
    """One layer, under autocast and without."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(x)
        return self.layer(x) + y


class Own(nn.Linear):
    """A class of its own, that may do more."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, self.weight + 1)


@unit
@pytest.mark.parametrize("net", [
    Twice, lambda: Own(8, 8), lambda: nn.Linear(8, 8), lambda: torch.jit.script(nn.Linear(8, 8))])
def test_other_layers_are_left(net):
    assert cast_once.find(read_for_inference(made(net), torch.randn(2, 8))) == []


@unit
def test_where_weights_still_change_nothing_is_found():
    assert cast_once.find(read(made(), Inputs.of(X))) == []


@integration
def test_it_gives_the_same_bits():
    model = made()
    rung = rung_of(model)
    with torch.no_grad():
        assert torch.equal(rung(X), model(X))
        assert torch.equal(copy.deepcopy(rung).double()(X.double()), made().double()(X.double()))
    assert rung.module.conv.weight is model.conv.weight and "forward" not in vars(model.conv)


@integration
def test_it_is_judged_and_what_it_casts_no_more_is_counted(studies_in_seconds):
    result = optimize(made(), (X,), quick=True, inference=True, techniques=(TECHNIQUE,))
    judgement = result.judgements[TECHNIQUE.name]
    assert judgement.passed and judgement.outputs_proven, judgement
    [one] = result.opportunities
    assert one.verdict in ("take", "no gain") and one.speedup and "did not fire" not in one.why, one


class Rolled(cast_once.Cast):
    def __init__(self, module, dtype):
        super().__init__(module, dtype)
        self.weight = self.weight.roll(1, 0)


class WithoutBias(cast_once.Cast):
    def __init__(self, module, dtype):
        super().__init__(module, dtype)
        self.bias = None


class Coarse(cast_once.Cast):
    def __init__(self, module, dtype):
        super().__init__(module, dtype)
        self.weight = (self.weight.float() * 16).round().div(16).to(dtype)


@integration
@pytest.mark.parametrize("wrong", [Rolled, WithoutBias, Coarse])
def test_a_cast_that_is_wrong_is_unsafe(wrong, monkeypatch, studies_in_seconds):
    monkeypatch.setattr(cast_once, "Cast", wrong)
    [one] = optimize(made(), (X,), quick=True, inference=True, techniques=(TECHNIQUE,)).opportunities
    assert one.verdict == "unsafe", one


@integration
def test_what_is_written_is_what_was_tried():
    model = made()
    program = read_for_inference(model)
    code = cast_once.advice(program, *cast_once.find(program))
    assert not code.wraps and "'inner.*'" in code.code
    written = AsWritten(made(), code.code, "output = model(*inputs)")
    with torch.no_grad():
        assert torch.equal(written(X), rung_of(model)(X))
