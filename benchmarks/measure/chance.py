"""Callables that draw random numbers: whether they do, and whether two of them draw from the same distribution.

Both are called many times, each time from another seed. Where they draw from one distribution it does not matter which
of them a draw came from: a statistic of the two groups must then lie among those of the same draws dealt into groups at
random (a permutation test, Pitman 1937). That holds however the elements of an output depend on each other. Three
statistics are asked, since each misses what another finds: each element's mean, each element's variance, and how
elements vary together (one dropout mask for all samples leaves mean and variance as they are).
"""
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.measure.bounds import Rounding
from benchmarks.measure.calls import outputs_of, takes_gradient
from benchmarks.measure.checks import Check
from benchmarks.measure.keeping import kept
from benchmarks.measure.names import Kind, Named
from benchmarks.measure.observing import Work, backward, distance, norm
from benchmarks.measure.refreshing import fresh
from benchmarks.measure.state import Start, State
from common.phases import Phase

DRAWS, WITH_BACKWARD = 32, 12              # of each callable: forwards alone, and forwards with their backwards
ELEMENTS = 2**16                           # that are looked at: more say no more, and would fill the memory
TOO_OFTEN = 7                              # of 12 draws, beside none: by chance C(12, 7) / C(24, 7) = 0.002
PERMUTATIONS = 2000
P_VALUE = 0.003                            # twice below it, by draws of their own, is a difference
EFFECT = 0.1**2                            # of a variance: by less, rounding may move means or variances
TELLS_FROM = 4                             # times what outputs are off by must an element vary to tell anything
TIMES_OFF_BY = 2                           # what outputs are off by without dropout: it scales what it leaves, too
SEEDS = 64                                 # tried until outputs differ: all miss what happens in a tenth of the calls
                                           # with probability 0.9**63
OF_FP32 = 1e-5                             # rounding of a dtype in which random numbers hardly coincide
MORE_OFTEN, FEW = 2, 0.02                  # than the reference's may draws coincide, and so many of them besides
_OUTPUT = Named(Kind.OUTPUT, "output with dropout")
_GRADIENTS = Named(Kind.PARAMETER_GRADIENT, "gradients with dropout")
NO_DRAW = 1e-6                             # of an output's norm, by which another seed moves it at most
_SAME = 1e-3                               # of an output's norm: atomics of a GPU, in 16 bits
EXPLAINED = 10                             # times what a GPU's sums in no fixed order explain, two calls are apart
_THEIRS, _OURS = 1000, 500_000             # where the seeds of candidate and reference begin


def _outputs(call: Callable, start: Start, work: Work, seed: int, with_gradients: bool = False) -> list[Tensor]:
    """What one call returns."""
    start.begin(seed)
    with torch.set_grad_enabled(with_gradients):
        returned = outputs_of(work.inputs.copies().call(call))
    return [t.detach() for t in returned.values() if takes_gradient(t)]


def _apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """How far, as a share of the norm."""
    return distance(a, b) / max(norm(a), 1e-300)


@dataclass(frozen=True)
class Randomness:
    """Whether the outputs of a callable differ from seed to seed, and whether its calls take random numbers at all."""
    is_seen: bool
    takes_numbers: bool


def draws(call: Callable, work: Work, with_gradients: bool = False) -> bool:
    """Whether another seed gives other outputs."""
    return randomness(call, work, with_gradients).is_seen


def randomness(call: Callable, work: Work, with_gradients: bool = False) -> Randomness:
    """Of a callable. One that takes random numbers may drop rarely, as layers by a small rate: then more seeds are
    tried, until one gives other outputs.
    """
    start = work.start_of(call)
    start.begin(0)
    before = start.random_states()
    first = _outputs(call, start, work, 0, with_gradients)
    takes_numbers = start.random_states() != before

    def differs(seed: int) -> bool:
        other = _apart(first, _outputs(call, start, work, seed, with_gradients))
        if other <= NO_DRAW:
            return False
        return other > 3 * _apart(first, _outputs(call, start, work, 0, with_gradients))
    is_seen = any(map(differs, range(1, SEEDS if takes_numbers else 2)))
    start.begin(0)
    return Randomness(is_seen, takes_numbers)


def same_twice(call: Callable, work: Work) -> bool:
    """Whether the same seed gives the same outputs again."""
    start = work.start_of(call)
    apart = _apart(_outputs(call, start, work, 0), _outputs(call, start, work, 0))
    start.begin(0)
    return apart <= _SAME


def keeps_state(call: Callable, work: Work) -> bool:
    """Whether a call depends on what one on other inputs left behind in attributes, lists or dicts."""
    start, buffers_alone = (Start(call, whole, work.written) for whole in (True, False))
    _outputs(call, buffers_alone, work, 0)                 # here are made what is made once
    state = State(call)
    _outputs(call, buffers_alone, work, 0)
    depends = state.has_changed() and _depends_on(start, buffers_alone, call, work)
    start.begin(0)
    return depends


def _depends_on(start: Start, buffers_alone: Start, call: Callable, work: Work) -> bool:
    """Whether other inputs give something else behind a call on the usual ones than as a first call."""
    other = replace(work, inputs=next(fresh(work.inputs, 1), work.inputs))
    first, again = (_outputs(call, start, other, 0) for _ in range(2))
    _outputs(call, start, work, 0)
    behind = _outputs(call, buffers_alone, other, 0)
    if [t.shape for t in first] != [t.shape for t in behind]:
        return True
    return _apart(first, behind) > EXPLAINED * _apart(first, again)


def depends_on_earlier_calls(call: Callable, work: Work) -> bool:
    """Whether a second call on the same inputs gives other outputs, as buffers have changed."""
    start = work.start_of(call)
    first = _outputs(call, start, work, 0)
    apart = _apart(first, _outputs(call, work.start_of(call), work, 0))
    start.begin(0)
    return apart > max(1e-6, 3 * _apart(first, _outputs(call, start, work, 0)))


@dataclass(frozen=True)
class Side:
    """A callable whose draws are looked at, and the parameters whose gradients are, in the order of both."""
    call: Callable
    parameters: Sequence[Tensor]
    drawn: dict[tuple[int, bool], list[Tensor]] = field(default_factory=dict)      # by first seed and kind

    def rows(self, work: Work, first_seed: int, with_backward: bool) -> list[Tensor]:
        """Some elements of what each call gives, for each tensor [calls, elements] in FP64: drawn once."""
        key = first_seed, with_backward
        if key not in self.drawn:
            self.drawn[key] = self._draw(work, first_seed, with_backward)
        return self.drawn[key]

    def _draw(self, work: Work, first_seed: int, with_backward: bool) -> list[Tensor]:
        start = work.start_of(self.call)
        rows: list[list[Tensor]] = []
        for number in range(WITH_BACKWARD if with_backward else DRAWS):
            seed = first_seed + number
            given = self._with_gradients(start, work, seed) if with_backward else _outputs(self.call, start, work, seed)
            rows.append([_some(t, len(given)) for t in given])
        start.begin(0)
        return [torch.stack(draws_of_one).nan_to_num(0.0, 0.0, 0.0) for draws_of_one in zip(*rows, strict=True)]

    def _with_gradients(self, start: Start, work: Work, seed: int) -> list[Tensor]:
        start.begin(seed)
        with torch.enable_grad():
            inputs = work.inputs.copies()
            outputs = backward(self.call, inputs, work)
        leaves = [t for t in (*inputs.named().values(), *self.parameters) if takes_gradient(t)]
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad.to_dense() for t in leaves]
        return [t.detach() for t in (*outputs.values(), *gradients) if takes_gradient(t)]


def _some(t: Tensor, tensors: int) -> Tensor:
    """The elements that are looked at, of one of so many tensors: all, or some at places that a seed chose."""
    if t.is_complex():
        t = torch.view_as_real(t)
    count = max(64, ELEMENTS // tensors)
    flat = t.flatten()
    if flat.numel() > count:
        places = torch.randint(flat.numel(), (count,), generator=torch.Generator().manual_seed(flat.numel()))
        flat = flat[places.to(flat.device)]
    return flat.double()


def checks(candidate: Side, reference: Side, drawing: tuple[Randomness, Randomness], work: Work, has_gradients: bool,
           rounding: Rounding, say: Callable[..., None]) -> list[Check]:
    """Whether both draw from one distribution, dropout as they have it; none where neither draws.

    `drawing`: of the candidate, and of the reference. One that takes numbers, and was not seen to draw, may drop
    rarely: their draws tell.
    """
    theirs, ours = drawing
    if not theirs.is_seen and not ours.is_seen:
        return []
    if not all(one.is_seen or one.takes_numbers for one in drawing):
        reason = "its outputs are random, the reference's are not" if theirs.is_seen else "its dropout is gone"
        return [Check(_OUTPUT, "chance", False, True, float("nan"), float("nan"), reason)]
    with kept(candidate.call, reference.call):
        say(Phase.CHECKING, "dropout")
        found = _compared(_OUTPUT, candidate, reference, work, False, rounding)
        if has_gradients and all(check.passed for check in found):
            say(Phase.CHECKING, "dropout, backward")
            found += _compared(_GRADIENTS, candidate, reference, work, True, rounding)
    return found


def _compared(of: Named, candidate: Side, reference: Side, work: Work, with_backward: bool, rounding: Rounding
              ) -> list[Check]:
    """The checks of one kind of draws. What fails is tried once more with other seeds: chance fails no one twice."""
    def look(seeds_from: int) -> list[Check]:
        theirs = candidate.rows(work, _THEIRS + seeds_from, with_backward)
        ours = reference.rows(work, _OURS + seeds_from, with_backward)
        if with_backward:
            theirs, ours = _beyond_rounding(theirs, ours, reference.parameters, rounding.of_all)
            if missing := _missing(of, theirs, ours):
                return missing
        off_by = rounding.gradients_off_by if with_backward else rounding.outputs_off_by
        return of_draws(of, *_in_proportion(theirs, ours), rounding.share, off_by)
    first = look(0)
    failed = {check.of for check in first if not check.passed}
    if not failed:
        return first
    return [check for check in look(100_000) if check.passed or check.of in failed]


def _missing(of: Named, theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> list[Check]:
    """The failed check of a gradient that one side has in no draw, and the other too often for chance."""
    for of_candidate, of_reference in zip(theirs, ours, strict=True):
        there, expected = (int(side.any(1).sum()) for side in (of_candidate, of_reference))
        if min(there, expected) == 0 and max(there, expected) >= TOO_OFTEN:
            reason = f"a gradient is there in {there} of {len(of_candidate)} draws, the reference's in {expected}"
            return [Check(_and(of, "which there are"), "chance", False, True, float("nan"), float("nan"), reason)]
    return []


def _and(of: Named, what: str) -> Named:
    return replace(of, words=f"{of.words}, {what}")


def _beyond_rounding(theirs: Sequence[Tensor], ours: Sequence[Tensor], parameters: Sequence[Tensor], of_all: float
                     ) -> tuple[list[Tensor], list[Tensor]]:
    """Both without those gradients of parameters that are nothing but rounding of all of them, as a key bias's is.

    Those of parameters come last. In units of its own such a gradient varies as its dtype rounds.
    """
    counts = [t.numel() for t in parameters if takes_gradient(t)]
    first = len(ours) - len(counts)

    def norms(side: Sequence[Tensor]) -> list[float]:
        return [math.sqrt(count) * _size(t) for t, count in zip(side[first:], counts, strict=True)]
    largest = [max(norms_of_both) for norms_of_both in zip(norms(theirs), norms(ours), strict=True)]
    least = of_all * math.hypot(*norms(ours))
    kept_ones = [place < first or largest[place - first] > least for place in range(len(ours))]
    return list(itertools.compress(theirs, kept_ones)), list(itertools.compress(ours, kept_ones))


def _size(t: Tensor) -> float:
    return float(t.square().mean().sqrt())


def _in_proportion(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """All tensors of both side by side, each in units of its root mean square in the reference."""
    sizes = [max(_size(t), 1e-300) for t in ours]
    return tuple(torch.cat([t / size for t, size in zip(side, sizes, strict=True)], dim=1)     # type: ignore[return-value]
                 for side in (theirs, ours))


def of_draws(of: Named, theirs: Tensor, ours: Tensor, rounding: float = 1e-9, off_by: float = 0.0) -> list[Check]:
    """The checks of mean and variance, and where both pass of how elements vary together, from [draws, elements] each.

    Elements that vary by less than `rounding`, or than four times `off_by`, which both are apart without dropout, count
    as constant: those are compared without it. None, where all are. By twice `off_by` rounding may move the mean of the
    others, and by twice that their variance. Raises ValueError where the numbers of draws or elements differ.
    """
    if theirs.shape != ours.shape:
        raise ValueError(f"draws of {tuple(theirs.shape)} and {tuple(ours.shape)}: give as many of both")
    together = torch.cat([theirs, ours])
    least = max(rounding, TELLS_FROM * off_by)
    moves = torch.maximum(theirs.std(0), ours.std(0)) > least
    if not moves.any():
        return []
    centred = together[:, moves] - together[:, moves].mean(0)
    centred = centred / centred.std(0)
    elements = max(1, int(moves.sum()))
    squares = centred.square() - 1
    of_means, of_squares = centred @ centred.T / elements, squares @ squares.T / elements
    count = f"{len(ours)} draws of {ours.size(1)} elements"
    ratio = float(theirs.var(0).mean() / ours.var(0).mean().clamp_min(1e-300))
    can_tell = _can_tell(ours[:, moves])
    moved_by_rounding = float((TIMES_OFF_BY * off_by / together[:, moves].std(0)).square().mean())
    found = [_check(_and(of, "its mean"), of_means, f"the mean of each element over {count}", can_tell,
                    least=max(EFFECT, moved_by_rounding)),
             _check(_and(of, "its variance"), of_squares, f"{ratio:.2f} times the reference's over {count}", can_tell,
                    least=max(EFFECT, 2**2 * moved_by_rounding))]
    if rounding <= OF_FP32:
        found.append(_values(of, theirs[:, moves], ours[:, moves]))
    if all(check.passed for check in found):
        reason = f"how elements vary together, {count}"
        found.append(_check(_and(of, "together"), of_means.square(), reason, can_tell, least=0.0))
    return found


def _values(of: Named, theirs: Tensor, ours: Tensor) -> Check:
    """Whether draws of one element are as often the very same: random numbers of 16 bits have few values."""
    same = [float((side.sort(0).values.diff(dim=0) == 0).double().mean()) for side in (theirs, ours)]
    bound = MORE_OFTEN * same[1] + FEW
    reason = f"{same[0]:.1%} of draws coincide, {same[1]:.1%} of the reference's: random numbers of fewer bits?"
    return Check(_and(of, "its values"), "chance", same[0] <= bound, True, same[0], bound, reason)


def _check(of: Named, similarity: Tensor, reason: str, can_tell: bool, least: float = EFFECT) -> Check:
    """Whether candidate and reference are further apart than their draws dealt at random, and by `least` at least."""
    apart, at_random = _permuted(similarity)
    p_value = (1 + int((at_random >= apart).sum())) / (1 + len(at_random))
    bound = max(float(at_random.quantile(1 - P_VALUE)), least)
    passed = p_value > P_VALUE or float(apart) <= least
    return Check(of, "chance", passed, can_tell or not passed, float(apart), bound, reason)


def _permuted(similarity: Tensor) -> tuple[Tensor, Tensor]:
    """(how far the first half of all draws is from the second, the same of halves dealt at random)."""
    similarity = similarity - similarity.diag().diag()
    dealt = _dealt(similarity.size(0)).to(similarity.device)
    apart = ((dealt @ similarity) * dealt).sum(1) / (similarity.size(0) / 2) ** 2
    return apart[0], apart[1:]


@functools.cache
def _dealt(draws_of_both: int) -> Tensor:
    """1 or -1 for the side of each draw, [1 + PERMUTATIONS, draws]: first as they came, then at random."""
    sides = torch.ones(draws_of_both, dtype=torch.float64)
    sides[draws_of_both // 2:] = -1
    generator = torch.Generator().manual_seed(0)
    at_random = [sides[torch.randperm(draws_of_both, generator=generator)] for _ in range(PERMUTATIONS)]
    return torch.stack([sides, *at_random])


def _can_tell(ours: Tensor) -> bool:
    """Whether so many draws would show a spread that is twice the reference's."""
    first, second = ours[::2], ours[1::2]
    wider = second.mean(0) + 2 * (second - second.mean(0))
    together = torch.cat([first, wider[:len(first)]])
    squares = ((together - together.mean(0)) / together.std(0).clamp_min(1e-300)).square() - 1
    apart, at_random = _permuted(squares @ squares.T)
    return bool((at_random >= apart).double().mean() <= 10 * P_VALUE)
