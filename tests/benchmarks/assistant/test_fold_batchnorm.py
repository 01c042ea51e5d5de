"""Batch norms folded into convolutions: where, the same function, and what must stay as it is."""
import copy

import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.techniques import channels_last, compiled, fold_batchnorm
from benchmarks.assistant.written import AsWritten
from benchmarks.measure.calls import Inputs

unit, integration = pytest.mark.unit, pytest.mark.integration
TECHNIQUE = fold_batchnorm.TECHNIQUE
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width=4, bias=False, **norm):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(width, **norm)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Two norms that fold, and a third whose convolution is read twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.block = Block(bias=True)
        self.read_twice, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.read_twice(self.block(self.stem(x)))
        return y + self.norm(y)


def made(net=Net, **arguments):
    torch.manual_seed(0)
    model = net(**arguments)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 2.0)
                nn.init.normal_(module.bias)
            if module.running_mean is not None:
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def found_in(model, x=X, is_inference=True):
    program = read(model, Inputs.of(x))
    program.is_inference = is_inference
    return fold_batchnorm.find(program)


@unit
def test_norms_behind_a_convolution_that_nothing_else_reads_are_found():
    [found] = found_in(made())
    assert found.modules == ("stem.0", "stem.1", "block.conv", "block.norm")
    assert found.reason == "2 of 3 batch norms follow a convolution that nothing else reads"


class SharedNorm(Block):
    """Its norm is behind two convolutions."""

    def __init__(self):
        super().__init__(width=3)
        self.other = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.norm(self.other(self.norm(self.conv(x))))


class SharedConvolution(Block):
    """Its convolution has two norms."""

    def __init__(self):
        super().__init__(width=3)
        self.other = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(x)) + self.other(self.conv(x))


class Tied(nn.Module):
    """Two convolutions have one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(width=3), Block(width=3)
        self.second.conv.weight = self.first.conv.weight

    def forward(self, x):
        return self.second(self.first(x))


class Own(nn.Conv2d):
    """A class of its own, that may do more."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    model = Block(width=3)
    model.conv.register_forward_hook(lambda module, given, y: 2 * y)
    return model


def of_its_own():
    model = Block(width=3)
    model.conv = Own(3, 3, 3, padding=1)
    return model


@unit
@pytest.mark.parametrize("net", [SharedNorm, SharedConvolution, Tied, hooked, of_its_own,
                                 lambda: Block(width=3, track_running_stats=False)])
def test_what_can_not_be_folded_is_left(net):
    assert found_in(made(net)) == []


@unit
def test_where_parameters_still_change_nothing_is_folded():
    assert found_in(made(), is_inference=False) == []
    assert found_in(made().train()) == []


def folded(model, *others, x=X):
    return Rung(model, [TECHNIQUE, *others], found={TECHNIQUE.name: found_in(model, x)})


@integration
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("net", [Net, lambda: nn.Sequential(Block(width=3, affine=False))])
def test_it_is_the_same_function_and_the_model_stays_as_it_was(net, dtype, studies_in_seconds):
    model = made(net).to(dtype)
    before = copy.deepcopy(model.state_dict())
    result = optimize(model, (X.to(dtype),), quick=True, inference=True, techniques=(TECHNIQUE,))
    judgement = result.judgements[TECHNIQUE.name]
    assert judgement.passed and judgement.outputs_proven, judgement
    [one] = result.opportunities
    assert one.verdict in ("take", "no gain") and one.speedup, one
    rung = folded(model, x=X.to(dtype))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert list(dict(rung.named_parameters())) == [f"module.{name}" for name, _ in model.named_parameters()]
    assert "forward" not in vars(next(each for each in model.modules() if isinstance(each, nn.BatchNorm2d)))


WRONG = {
    "the mean is lost": lambda w, b, mean, var, eps, gain, bias: (w, b, torch.zeros_like(mean), var, eps, gain, bias),
    "eps is lost": lambda w, b, mean, var, eps, gain, bias: (w, b, mean, var, 0.0, gain, bias),
    "the variance of another": lambda w, b, mean, var, eps, gain, bias: (w, b, mean, var.roll(1), eps, gain, bias),
    "the bias of the convolution is lost":
        lambda w, b, mean, var, eps, gain, bias: (w, None, mean, var, eps, gain, bias),
    "the gain is lost": lambda w, b, mean, var, eps, gain, bias: (w, b, mean, var, eps, None, bias),
}


@integration
@pytest.mark.parametrize("wrong", WRONG)
def test_a_fold_that_is_wrong_is_unsafe(wrong, monkeypatch, studies_in_seconds):
    right = fold_batchnorm.fuse_conv_bn_weights
    monkeypatch.setattr(fold_batchnorm, "fuse_conv_bn_weights", lambda *given: right(*WRONG[wrong](*given)))
    [one] = optimize(made(), (X,), quick=True, inference=True, techniques=(TECHNIQUE,)).opportunities
    assert one.verdict == "unsafe", one


@integration
def test_what_is_written_is_what_was_tried():
    model = made()
    program = read(model, Inputs.of(X))
    program.is_inference = True
    code = fold_batchnorm.advice(program, *fold_batchnorm.find(program))
    assert not code.wraps and compiled.advice(program, compiled.find(program)[0]).wraps
    written = AsWritten(made(), code.code, "output = model(*inputs)")
    with torch.no_grad():
        assert torch.equal(written(X), folded(model)(X))


@integration
def test_with_channels_last_the_folded_weights_are_so_too():
    rung = Rung(made(), [channels_last.TECHNIQUE, TECHNIQUE], found={TECHNIQUE.name: found_in(made())})
    weight, _ = vars(rung.module.block.conv)["forward"].weights
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


@integration
def test_nothing_is_offered_where_parameters_train(studies_in_seconds):
    assert optimize(made(), (X,), quick=True, techniques=(TECHNIQUE,)).opportunities == []
