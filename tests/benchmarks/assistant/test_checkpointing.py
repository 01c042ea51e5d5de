"""Layers that are computed again in the backward: what they save, what that costs, and that gradients are the same."""
import copy
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.assistant.program import read
from benchmarks.assistant.techniques import checkpointing
from benchmarks.measure.calls import Inputs

unit = pytest.mark.unit
WIDTH, TOKENS, LAYERS = 32, 64, 6
X = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
A_TENSOR = 4 * WIDTH * TOKENS


class Layer(nn.Module):
    """It saves its input, what goes into the activation, and what comes out; and a mask where it drops."""

    def __init__(self, p: float = 0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(torch.sigmoid(self.up(x).cos())))


class Other(nn.Module):
    """Each call of a layer adds something else: computed again, it is another function."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return x * torch.sigmoid(self.layer(x) * self.calls)


def stack(layer=Layer, count: int = LAYERS, **how) -> nn.Module:
    return nn.Sequential(*(layer(**how) for _ in range(count)))


def program_of(model, ms: float = 1.0):
    program = read(model, Inputs.of(X))
    program.iteration_ms = ms
    return program


@unit
def test_what_is_saved_is_counted():
    """By a layer cosine's argument, sigmoid's result and its input; the input of the first is the model's."""
    program = program_of(stack())
    assert checkpointing.saved_bytes(program.model, program) == (3 * LAYERS - 1) * A_TENSOR
    with checkpointing.checkpointed(program.layers):
        assert checkpointing.saved_bytes(program.model, program) == (LAYERS - 1) * A_TENSOR


@unit
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_it_is_the_same_and_costs_time(p):
    model = stack(p=p)
    before = copy.deepcopy(model.state_dict())
    [found] = checkpointing.find(program_of(model))
    said = r"6 x Layer: [\d.]+ MiB are saved for the backward; with it [\d.]+ MiB, at 0\."
    assert re.search(said, found.reason), found.reason
    assert found.why_not == "it costs time, and the memory suffices without it"
    assert str(before) == str(model.state_dict()) and not any("forward" in vars(layer) for layer in model)


@unit
def test_what_is_another_function_when_computed_again_is_refused():
    [found] = checkpointing.find(program_of(stack(Other, 2)))
    assert found.why_not == "computed again, it gives other gradients"


class Noisy(Layer):
    """A bias gets a gradient that is another one in each call, as a GPU's sums in no fixed order make of zero."""

    def __init__(self, size: float):
        super().__init__()
        self.noise, self.bias = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(()))
        self.size = size

    def forward(self, x):
        moved = self.bias * self.size * torch.randn((), generator=self.noise)
        return super().forward(x) + (moved - moved.detach())


@unit
@pytest.mark.parametrize("size, same", [(1e-5, True), (0.1, False)])
def test_what_is_rounding_of_all_gradients_may_differ_from_call_to_call(size, same):
    [found] = checkpointing.find(program_of(stack(Noisy, 2, size=size)))
    assert ("of the speed here" in found.reason) == same and ("other gradients" in found.why_not) != same, found


def iteration_with(*calls):
    """Its calls leave these gradients, one after the other; the output is the same each time."""
    left = iter(calls)
    found = {}

    def run():
        found["gradients"] = dict(enumerate(next(left)))
        return [torch.ones(4)]
    return SimpleNamespace(run=run, between=lambda: None, gradients=lambda: found["gradients"])


@unit
@pytest.mark.parametrize("by_itself, checkpointed, same", [
    (0.0, 0.0, True), (0.0, 1e-3, False), (1e-4, 0.9e-3, True), (1e-4, 1.1e-3, False), (1e-5, 0.9e-4, True),
    (1e-5, 1.1e-4, False), (1e-2, 1.1e-3, False), (1e-2, 0.9e-3, True)])
def test_a_small_gradient_may_differ_as_far_as_by_itself(by_itself, checkpointed, same):
    """Ten times as far, and by a thousandth of all gradients at most; here these have a norm of one."""
    large, small = torch.ones(1), torch.full((1,), 1e-6)
    before = iteration_with([large, small], [large, small + by_itself])
    after = iteration_with([large, small + checkpointed])
    assert checkpointing.give_the_same(before, after) == same


@unit
@pytest.mark.parametrize("share, worth_it", [(0.49, False), (0.51, True)])
def test_it_is_worth_time_where_memory_is_short(share, worth_it, monkeypatch):
    program = program_of(stack())
    monkeypatch.setattr(checkpointing, "memory_total", lambda device: (3 * LAYERS - 1) * A_TENSOR / share)
    [found] = checkpointing.find(program)
    assert (found.why_not == "") == worth_it


@unit
@pytest.mark.parametrize("share, ms, timed", [(0.1, 290.0, True), (0.1, 300.0, False), (0.9, 1760.0, True),
                                              (0.9, 1770.0, False)])
def test_what_takes_long_is_not_timed(share, ms, timed, monkeypatch):
    """34 iterations may take ten seconds, and a minute where memory is short."""
    monkeypatch.setattr(checkpointing, "memory_total", lambda device: (3 * LAYERS - 1) * A_TENSOR / share)
    [found] = checkpointing.find(program_of(stack(), ms))
    assert ("of the speed here" in found.reason) == timed
    assert ("not measured: that would take more than" in found.reason) != timed


@unit
@pytest.mark.parametrize("model", [stack(count=1), nn.Linear(WIDTH, WIDTH)])
def test_without_several_layers_there_is_nothing(model):
    assert checkpointing.find(program_of(model)) == []


@unit
def test_in_inference_there_is_nothing():
    program = program_of(stack())
    program.is_inference = True
    assert checkpointing.find(program) == []


@unit
def test_compiled_layers_are_left(fresh_dynamo):
    model = stack()
    program = program_of(model)
    model[0].compile(backend="eager")
    assert checkpointing.find(program)[0].why_not == "they are compiled"
