"""Running sums of outer products: each state of linear attention is written, where chunks write the last ones alone."""
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant import optimize
from benchmarks.assistant.program import read
from benchmarks.assistant.techniques import running_sum
from benchmarks.measure.calls import Inputs

unit = pytest.mark.unit
X = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))


class LinearAttention(nn.Module):
    """Two heads of eight; `states` gives what each step has seen, [B, H, S, D, D]."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def states(self, k, v):
        return (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return torch.einsum("bhsd,bhsde->bhse", q, self.states(k, v)).transpose(1, 2).flatten(2)


class ByEinsum(LinearAttention):
    def states(self, k, v):
        return torch.cumsum(torch.einsum("bhsd,bhse->bhsde", k, v), dim=-3)


class ByMatmul(LinearAttention):
    """In FP32, as a library for 16 bits has it."""

    def states(self, k, v):
        return torch.cumsum((k[..., None] @ v[..., None, :]).float(), 2)


class OfSteps(LinearAttention):
    """A running mean of what is no larger than its inputs."""

    def forward(self, x):
        return self.qkv(x).cumsum(1)


class OfABias(LinearAttention):
    """A product, with numbers that all rows share."""

    def forward(self, x):
        return (self.qkv(x)[:, None] * torch.rand(2, 1, 1)).cumsum(1)


class OverColumns(LinearAttention):
    """Along the state itself, as a rank has it, and not over steps."""

    def states(self, k, v):
        return (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(-1)


@unit
@pytest.mark.parametrize("kind", [LinearAttention, ByEinsum, ByMatmul])
def test_the_states_of_all_steps_are_named(kind):
    [found] = running_sum.find(read(kind(), Inputs.of(X)))
    assert found.place.function == f"{kind.__name__}.states" and found.count == 1
    nbytes = 4 * 2 * 2 * 12 * 8 * 8
    assert found.reason.startswith(f"a state of 8 x 8 for each of 12 steps, {nbytes / 2**20:.3g} MiB together")


class OfScores(LinearAttention):
    """Larger than queries and keys, and summed over these: what other heads have seen, too."""

    def forward(self, x):
        q, k = self.qkv(x.repeat(1, 8, 1)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)[:2]
        return self.scores(q, k).cumsum(1)

    def scores(self, q, k):
        return q @ k.mT


class OfScoresByEinsum(OfScores):
    def scores(self, q, k):
        return torch.einsum("bhsd, bhtd -> bhst", q, k)


@unit
@pytest.mark.parametrize("kind", [OfSteps, OfABias, OverColumns, OfScores, OfScoresByEinsum])
def test_other_running_sums_are_none(kind):
    assert running_sum.find(read(kind(), Inputs.of(X))) == []


@unit
@pytest.mark.parametrize("width, is_one", [(3, False), (4, True)])
def test_an_outer_product_is_four_times_as_large_as_its_operands(width, is_one):
    class Narrow(nn.Linear):
        def forward(self, x):
            return (super().forward(x)[..., None] * x[..., None, :width]).cumsum(1)
    assert bool(running_sum.find(read(Narrow(16, 16), Inputs.of(X)))) == is_one


@pytest.mark.integration
def test_it_is_a_persons_to_write(studies_in_seconds):
    result = optimize(LinearAttention(), (X,), quick=True, techniques=(running_sum.TECHNIQUE,))
    [one] = result.opportunities
    assert (one.technique, one.verdict) == ("running-sum", "by hand") and not result.to_write()
