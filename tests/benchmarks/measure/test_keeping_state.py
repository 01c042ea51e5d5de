"""Modules whose calls depend on earlier ones through attributes, lists and dicts: judged from the same state."""
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measure import chance
from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import validate
from benchmarks.measure.observing import Work
from benchmarks.measure.state import State

pytestmark = pytest.mark.unit

WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """A cell whose state is an attribute."""

    def __init__(self, carries: bool = True, detaches: bool = True):
        super().__init__()
        self.cell, self.carries, self.detaches = nn.GRUCell(WIDTH, WIDTH), carries, detaches
        self.h = None

    def forward(self, x):
        h = self.cell(x, self.h if self.h is not None and self.carries else torch.zeros_like(x))
        self.h = h.detach() if self.detaches else h
        return h


class Annealed(nn.Module):
    """A layer that is scaled by how often it was called."""

    def __init__(self, by: int = 1):
        super().__init__()
        self.layer, self.by, self.calls = nn.Linear(WIDTH, WIDTH), by, 0

    def forward(self, x):
        self.calls += self.by
        return self.layer(x) * min(1.0, self.calls / 1000)


class Growing(nn.Module):
    """Attention to all rows that came before, which a list holds."""

    def __init__(self, newest: int | None = None):
        super().__init__()
        self.layer, self.newest = nn.Linear(WIDTH, WIDTH), newest
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        self.seen.append(self.layer(x))
        rows = torch.cat(self.seen[-self.newest:] if self.newest else self.seen)
        return F.scaled_dot_product_attention(x[None], rows[None], rows[None])[0]


class Smoothed(nn.Module):
    """A mean over calls, in a tensor that is no buffer, written in place."""

    def __init__(self, rate: float = 0.1):
        super().__init__()
        self.layer, self.rate, self.mean = nn.Linear(WIDTH, WIDTH), rate, torch.zeros(WIDTH)

    def forward(self, x):
        self.mean = self.mean.to(x.dtype)
        self.mean.lerp_(x.detach().mean(0), self.rate)
        return self.layer(x - self.mean)


class Counting(nn.Module):
    """What it keeps, its results do not depend on."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.norms = nn.Linear(WIDTH, WIDTH), 0, []

    def forward(self, x):
        self.calls += 1
        y = self.layer(x)
        self.norms.append(y.norm().item())
        return y


class Lazy(nn.Module):
    """A table that the first call makes."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=x.dtype)
        return self.layer(x) + self.table.to(x.dtype)


STATEFUL = {
    "recurrent": (Recurrent(), Recurrent(carries=False)),
    "with its graph": (Recurrent(detaches=False), Recurrent(carries=False)),
    "annealed": (Annealed(), Annealed(by=2)), "growing": (Growing(), Growing(newest=1)),
    "smoothed": (Smoothed(), Smoothed(rate=0.2))}


def given_its_values(wrong: nn.Module, reference: nn.Module) -> nn.Module:
    wrong.load_state_dict(reference.state_dict())
    return wrong


@pytest.mark.parametrize("reference, wrong", STATEFUL.values(), ids=STATEFUL)
def test_a_stateful_module_is_judged_from_the_same_state(reference, wrong):
    before = State(reference)
    right = validate(copy.deepcopy(reference), reference, X)
    assert right.status == "ok" and all(check.proven for check in right.checks), right
    assert "a call depends on what earlier ones left in attributes" in str(right)
    assert not before.has_changed()
    assert not validate(given_its_values(wrong, reference), reference, X).passed, "its state is another"


@pytest.mark.parametrize("module", [
    Counting(), Lazy(), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH).eval(), nn.Linear(WIDTH, WIDTH)])
def test_what_keeps_no_state_that_matters_is_judged_as_usual(module):
    assert not chance.keeps_state(module, Work(Inputs.of(X)))


@pytest.mark.parametrize("reference, wrong", STATEFUL.values(), ids=STATEFUL)
def test_what_calls_leave_behind_is_seen(reference, wrong):
    assert chance.keeps_state(reference, Work(Inputs.of(X)))


def test_other_inputs_are_rolled_and_masks_stay():
    mask, kept, steps = torch.tensor([[0.0, 1.0]]), torch.tensor([True, False]), torch.tensor(3)
    rolled = Inputs.of((X, mask, torch.arange(3), kept, steps)).rolled().args
    assert torch.equal(rolled[0], X.roll(1, -1)) and torch.equal(rolled[2], torch.tensor([2, 0, 1]))
    assert rolled[1] is mask and rolled[3] is kept and rolled[4] is steps
