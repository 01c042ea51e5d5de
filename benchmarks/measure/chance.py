"""Callables that draw random numbers: whether they do, and whether two of them draw from the same distribution.

Two tests, since each alone misses half of what is wrong. The squared z-scores of the means are 1 on average where the
means are the same. The ratio of the variances is 1 where these are. What the reference's own draws scatter by widens
both bounds.
"""
import itertools
import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure.calls import named_buffers, outputs_of
from benchmarks.measure.checks import Check
from benchmarks.measure.keeping import kept
from benchmarks.measure.observing import Work, from_a_state
from common.phases import Phase

DRAWS, GROUPS = 64, 8                      # of each; the reference's fall into so many groups, to see their scatter
Z_SQUARED, RATIO = 2.5, 1.33               # the bounds, at the least
NOTHING_TOLD = 4.5, 2.0                    # bounds as wide as this tell nothing
_SAME = 1e-3                               # of an output's norm: atomics of a GPU, in 16 bits


def outputs(call: Callable, work: Work, seed: int) -> Tensor:
    """All floating outputs of one call without gradients, in a row, in FP64."""
    buffers = named_buffers(call)
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    with from_a_state(buffers, before, {}, seed), torch.no_grad():
        returned = outputs_of(work.inputs.copies().call(call))
        row = [t.detach().double().flatten() for t in returned.values() if t.is_floating_point()]
    with from_a_state(buffers, before, {}, seed):
        return torch.cat(row) if row else torch.zeros(0, dtype=torch.float64)


def _apart(a: Tensor, b: Tensor) -> float:
    """How far, as a share of the norm."""
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).nan_to_num()
    return float(difference.norm() / a.nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-300))


def draws(call: Callable, work: Work) -> bool:
    """Whether another seed gives other outputs."""
    first = outputs(call, work, 0)
    again, other = _apart(first, outputs(call, work, 0)), _apart(first, outputs(call, work, 1))
    return other > max(1e-6, 3 * again)


def same_twice(call: Callable, work: Work) -> bool:
    """Whether the same seed gives the same outputs again."""
    return _apart(outputs(call, work, 0), outputs(call, work, 0)) <= _SAME


def checks(candidate: Callable, reference: Callable, reference_draws: bool, work: Work, say: Callable[..., None]
           ) -> list[Check]:
    """Mean and variance of both over `DRAWS` calls, dropout as they have it; none where neither draws."""
    with kept(candidate, reference):
        drawing = draws(candidate, work), reference_draws
        if not any(drawing):
            return []
        if not all(drawing):
            reason = "its outputs are random, the reference's are not" if drawing[0] else "its dropout is gone"
            return [Check("output with dropout", "chance", False, True, math.nan, math.nan, reason)]
        say(Phase.CHECKING, "dropout")
        theirs = [outputs(candidate, work, 1000 + seed) for seed in range(DRAWS)]
        ours = [outputs(reference, work, 5000 + seed) for seed in range(DRAWS)]
    groups = [torch.stack(ours[first:first + DRAWS // GROUPS]) for first in range(0, DRAWS, DRAWS // GROUPS)]
    return _of_draws(torch.stack(theirs), torch.stack(ours), groups)


def _of_draws(theirs: Tensor, ours: Tensor, groups: list[Tensor]) -> list[Check]:
    """The two checks, from draws [number, elements]."""
    scatter = max(z_squared(a, b) for a, b in itertools.combinations(groups, 2))
    bound = max(Z_SQUARED, 1.5 * scatter)
    z = z_squared(theirs, ours)
    mean = Check("output with dropout, its mean", "chance", z <= bound, bound < NOTHING_TOLD[0], z, bound,
                 f"squared z-scores of the mean over {DRAWS} draws")
    logs = [math.log(max(_variance(group), 1e-300)) for group in groups]
    widest = 4 * math.sqrt(2 / GROUPS) * statistics.stdev(logs)
    bound = max(RATIO, math.exp(min(widest, 100.0)))
    ratio = _variance(theirs) / _variance(ours)
    worse = max(ratio, 1 / ratio) if ratio else math.inf
    variance = Check("output with dropout, its variance", "chance", worse <= bound, bound < NOTHING_TOLD[1], worse,
                     bound, f"{ratio:.2f} times the reference's over {DRAWS} draws")
    return [mean, variance]


def z_squared(a: Tensor, b: Tensor) -> float:
    """The mean over elements of (difference of the means)^2 / its variance, from draws [number, elements] each."""
    variance = a.var(0) / a.size(0) + b.var(0) / b.size(0)
    random = variance > 0
    return float(((a.mean(0) - b.mean(0))[random].square() / variance[random]).mean()) if random.any() else 0.0


def _variance(drawn: Tensor) -> float:
    """The mean over elements."""
    return float(drawn.nan_to_num(0.0, 0.0, 0.0).var(0).mean())
