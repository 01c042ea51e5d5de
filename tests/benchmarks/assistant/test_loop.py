"""Python loops over steps: which are found, what a step hands on, and which form is named."""
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant import optimize
from benchmarks.assistant.program import read
from benchmarks.assistant.techniques import compiled, loop
from benchmarks.assistant.techniques.loop import BATCHED, CHUNKED, IN_MEMORY, RECURRENT, SCANNED
from benchmarks.measure.calls import Inputs

unit = pytest.mark.unit
X = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
        self.cell = nn.RNNCell(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))


class Scan(Net):
    """As a minimal Mamba has it, number by number."""

    def forward(self, x):
        a, b, h, every = torch.sigmoid(self.gate(x)), self.up(x), 0, []
        for t in range(x.size(1)):
            h = a[:, t] * h + b[:, t]
            every.append(F.silu(h))
        return torch.stack(every, 1)


class ScanOfLines(Net):
    """The same on several lines, by methods, with a helper."""

    def step(self, h, a, b):
        h = h.mul(a)
        return torch.add(h, b)

    def forward(self, x):
        a, b = torch.sigmoid(self.gate(x)), self.up(x)
        h = torch.zeros_like(b[:, 0])
        out = []
        for t in range(x.size(1)):
            h = self.step(h, a[:, t], b[:, t])
            out += [h.unsqueeze(1)]
        return torch.cat(out, 1)


class LinearAttention(Net):
    """The state is a matrix, and a decay forgets."""

    def forward(self, x):
        q, k, v, out = self.gate(x), self.up(x), x, []
        state = x.new_zeros(x.size(0), 8, 8)
        for t in range(x.size(1)):
            state = 0.9 * state + torch.einsum("bi,bj->bij", k[:, t], v[:, t])
            out.append(torch.einsum("bi,bij->bj", q[:, t], state))
        return torch.stack(out, 1)


class WithoutDecay(Net):
    """What it hands on is a sum, and each step reads it."""

    def forward(self, x):
        q, k, state, out = self.gate(x), self.up(x), 0, []
        for t in range(x.size(1)):
            state = state + torch.einsum("bi,bj->bij", k[:, t], x[:, t])
            out.append(torch.einsum("bi,bij->bj", q[:, t], state))
        return torch.stack(out, 1)


class Prefixes(Net):
    """Each sum is given back."""

    def forward(self, x):
        h, out = 0, []
        for t in range(x.size(1)):
            h = h + x[:, t] * 2
            out.append(h)
        return torch.stack(out, 1)


class Alternating(Net):
    """The sign of what it hands on turns at each step."""

    def forward(self, x):
        h = x[:, 0]
        for t in range(x.size(1)):
            h = x[:, t] * 2 - h
        return h


class DeltaRule(Net):
    """What the state holds under a key is taken out first."""

    def forward(self, x):
        q, k, v, out = self.gate(x), F.normalize(self.up(x), dim=-1), x, []
        state = x.new_zeros(x.size(0), 8, 8)
        for t in range(x.size(1)):
            held = torch.einsum("bi,bij->bj", k[:, t], state)
            state = state + torch.einsum("bi,bj->bij", k[:, t], v[:, t] - held)
            out.append(torch.einsum("bi,bij->bj", q[:, t], state))
        return torch.stack(out, 1)


class Recurrent(Net):
    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.size(1)):
            h = torch.tanh(self.gate(x[:, t]) + self.up(h))
            out.append(h)
        return torch.stack(out, 1)


class Squared(Net):
    """It looks linear, and multiplies what it is handed by itself."""

    def forward(self, x):
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h * h + x[:, t]
        return h


class Gated(Net):
    """Linear at a glance, and its gate looks at what it is handed."""

    def forward(self, x):
        h = x[:, 0]
        for t in range(x.size(1)):
            h = torch.sigmoid(self.gate(h)) * h + x[:, t]
        return h


class Divided(Net):
    """It divides by what it is handed."""

    def forward(self, x):
        h = x[:, 0]
        for t in range(x.size(1)):
            h = x[:, t] / h
        return h


class Halved(Net):
    """It divides what it is handed."""

    def forward(self, x):
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h / 2 + x[:, t]
        return h


class Tied(Net):
    """One layer, again and again: each call needs the one before."""

    def forward(self, x):
        for _ in range(12):
            x = x + torch.relu(self.gate(x))
        return x


class Heads(Net):
    """No step needs another."""

    def forward(self, x):
        out = []
        for h in range(x.size(1)):
            scores = x[:, h] @ x[:, h].T
            out.append(scores.softmax(-1) @ x[:, h])
        return torch.stack(out, 1)


class Experts(Net):
    """What the steps give is added up."""

    def forward(self, x):
        y = 0
        for e in range(12):
            y = y + torch.sigmoid(x[:, e, :1]) * (x[:, e] @ self.up.weight)
        return y


class ExpertsOfTheirOwn(Net):
    """The same, each a module."""

    def forward(self, x):
        y = 0
        for e, layer in enumerate(self.layers):
            y = y + x[:, e, :1] * torch.relu(layer(x[:, e]))
        return y


class InMemory(Net):
    """Each step reads what the one before wrote into a tensor."""

    def forward(self, x):
        h = torch.zeros(x.size(0), x.size(1) + 1, x.size(2))
        for t in range(x.size(1)):
            h[:, t + 1] = torch.sigmoid(x[:, t]) * h[:, t] + x[:, t]
        return h


@unit
@pytest.mark.parametrize("net, form", [
    (Scan, SCANNED), (ScanOfLines, SCANNED), (LinearAttention, CHUNKED), (DeltaRule, CHUNKED),
    (WithoutDecay, CHUNKED), (Prefixes, SCANNED), (Alternating, SCANNED), (Recurrent, RECURRENT),
    (Squared, RECURRENT), (Gated, RECURRENT),
    (Divided, RECURRENT), (Halved, SCANNED), (Tied, RECURRENT), (Heads, BATCHED), (Experts, BATCHED),
    (ExpertsOfTheirOwn, BATCHED), (InMemory, IN_MEMORY)])
def test_what_a_step_hands_on_says_which_form_there_is(net, form):
    found = loop.find(read(net(), Inputs.of(X)))
    [one] = found
    assert one.reason.startswith("12 steps of ") and form in (one.why_not, one.reason.partition(": ")[2])
    assert bool(one.why_not) == (form in (RECURRENT, IN_MEMORY))


@unit
def test_the_loop_is_named_by_its_lines():
    [found] = loop.find(read(Scan(), Inputs.of(X)))
    lines = Path(__file__).read_text().split("\n")
    assert found.place.file == __file__ and lines[found.place.line - 1].strip() == "for t in range(x.size(1)):"
    assert lines[found.place.last - 1].strip() == "every.append(F.silu(h))"


class Layers(Net):
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class HelperInLayers(Net):
    """A function is called eight times in each of two layers."""

    def forward(self, x):
        for layer in self.layers[:2]:
            x = self.mixed(torch.tanh(layer(x)))
        return x

    def mixed(self, x):
        x = halved(halved(halved(halved(x))))
        return halved(halved(halved(halved(x))))


def halved(x):
    return torch.relu(x * 0.5 + 1)


class Short(Net):
    def forward(self, x):
        h = 0
        for t in range(7):
            h = x[:, t] * h + x[:, t]
        return h


class Begun(Net):
    """Some operations of the first step alone beside 48 of all steps."""

    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def forward(self, x):
        h = x[:, 0]
        for t in range(12):
            h = torch.tanh(h * 0.5 + x[:, t])
            if t == 0:
                h = h.relu().exp() if self.extra == 2 else h.relu().exp().sin()
        return h


@unit
@pytest.mark.parametrize("extra, count", [(2, 1), (3, 0)])
def test_a_step_may_have_a_little_of_its_own(extra, count):
    assert len(loop.find(read(Begun(extra), Inputs.of(X)))) == count


class Moved(Net):
    """Nothing is computed in it."""

    def forward(self, x):
        return self.up(torch.stack([x[:, t] for t in range(12)], 1))


@unit
@pytest.mark.parametrize("net", [Layers, HelperInLayers, Short, Moved])
def test_other_loops_are_none(net):
    assert loop.find(read(net(), Inputs.of(X))) == []


@unit
def test_long_steps_are_no_trouble():
    """More operations in a row than Python can call into one another."""
    class Long(Net):
        def forward(self, x):
            h = x[:, 0]
            for t in range(8):
                h = torch.tanh(h + x[:, t])
                for _ in range(200):
                    h = h * 0.5
                    h = h + 1
            return h
    found = loop.find(read(Long(), Inputs.of(X)))
    assert found and all(not each.why_not or each.why_not == RECURRENT for each in found)


@unit
def test_eight_steps_are_enough():
    class Eight(Net):
        def forward(self, x):
            h = 0
            for t in range(8):
                h = x[:, t] * h + x[:, t]
            return h
    assert len(loop.find(read(Eight(), Inputs.of(X)))) == 1


@pytest.mark.integration
@pytest.mark.parametrize("more, quick, waits", [(-1, True, True), (0, True, False), (-1, False, False)])
def test_in_a_hurry_a_long_loop_is_not_compiled(more, quick, waits, studies_in_seconds, without_inductor, monkeypatch):
    """Unrolled, its operations keep a compiler busy for minutes."""
    (found,) = read(Scan(), Inputs((X,), {})).analysis.loops
    monkeypatch.setattr(sys.modules["benchmarks.assistant.optimize"], "MOST_UNROLLED", len(found.nodes) + more)
    (one,) = optimize(Scan(), (X,), quick=quick, rounds=2, techniques=[compiled.TECHNIQUE]).opportunities
    assert (one.verdict == "not reached") == waits, one
    assert (f"its loops are {len(found.nodes)} operations for a compiler" in one.why) == waits
