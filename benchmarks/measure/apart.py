"""Which gradients are further from a reference's than rounding and kinks explain."""
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from benchmarks.measure.bounds import BOUNDS
from benchmarks.measure.observing import distance, norm

GROSS = 0.05                               # of a gradient's norm: a kink may move it, what is stale is further off
TIMES_MOVED = 2                            # what a rounding of the inputs does to a gradient of the reference, at most
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Apart(Generic[Key]):
    """A gradient that is further from the reference's own than anything explains, by norms."""
    of: Key
    apart: float
    size: float
    bound: float


def gradients_too_far_apart(pairs: Mapping[Key, tuple[Tensor, Tensor]], allowed: float, whole: float,
                            moved: Callable[[], Iterable[Mapping[Key, Tensor]]]) -> list[Apart[Key]]:
    """Of a gradient -> (a candidate's gradient, the reference's): those too far apart for the same function.

    `allowed` is a share of its norm, `whole` the norm of all the reference's gradients. `moved()`
    gives the reference's gradients for inputs that are off by a rounding, several times. It is asked only as long as
    something is too far apart otherwise: where a ReLU falls to the other side, a whole gradient moves, now this one and
    now that.
    """
    of_all = BOUNDS[torch.bfloat16][1] * whole
    wrong = []
    for of, (mine, own) in pairs.items():
        apart, size = apart_where_finite(mine, own), norm([own])
        bound = max(GROSS, allowed) * size + of_all
        if not apart <= bound:
            wrong.append(Apart(of, apart, size, bound))
    if any(math.isfinite(each.apart) for each in wrong):
        for gradients in moved():
            share = TIMES_MOVED * _furthest_moved(pairs, of_all, gradients)
            wrong = [replace(each, bound=max(each.bound, share * (each.size + of_all))) for each in wrong]
            wrong = [each for each in wrong if not each.apart <= each.bound]
            if not wrong:
                break
    return wrong


def _furthest_moved(pairs: Mapping[Key, tuple[Tensor, Tensor]], of_all: float, moved: Mapping[Key, Tensor]) -> float:
    """How far a gradient of the reference is moved at most, as a share of its norm."""
    shares = [0.0]
    for of, other in moved.items():
        if of in pairs:
            own = pairs[of][1]
            shares.append(apart_where_finite(other, own) / max(norm([own]) + of_all, 1e-300))
    return max(share for share in shares if math.isfinite(share))


def apart_where_finite(mine: Tensor, own: Tensor) -> float:
    """The norm of the difference, where the reference's own value is a number: noise may take it beyond its dtype."""
    if mine.shape != own.shape:
        return math.inf
    return distance([torch.where(own.isfinite(), mine.to(own.device), own)], [own])
