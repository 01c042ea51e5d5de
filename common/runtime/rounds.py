"""Several pieces of work timed side by side in interleaved rounds, and the ratio of two that shared them.

Clocks, heat and neighbours drift. Every round takes one sample of each, in a new random order, so that all drift alike.
On a GPU a sample is the median of a burst of iterations.
"""
import math
import random
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

import torch

from .timing import Clock, Samples, nothing, since_start

Key = TypeVar("Key", bound=Hashable)


def interleaved(iterations: Mapping[Key, Callable], clock: Clock, rounds: int,
                between: Mapping[Key, Callable] | None = None, seed: int = 0,
                progress: Callable[[int], None] | None = None, expected: Mapping[Key, float] | None = None,
                visit: Callable[[int, Key, Callable[[], None]], None] | None = None) -> dict[Key, Samples]:
    """Key -> `rounds` samples in ms and their offsets in seconds; sample i of every key comes from round i.

    `iterations` and `between` go from any key to a callable. A GPU at its power cap keeps for a moment the
    clocks of the work before, here of another key. So `clock.settle_ms` of the same work run before each sample.
    `expected` holds the ms of an iteration by key, where that is known. `progress` gets the number of each round as it
    begins. `visit` gets that number, a key and what takes its sample, which it must call once: so other work can come
    before a sample or behind it.
    """
    order, shuffle, between, expected = list(iterations), random.Random(seed), between or {}, dict(expected or {})
    samples: dict[Key, Samples] = {key: ([], []) for key in iterations}
    for number in range(rounds):
        if progress:
            progress(number)
        shuffle.shuffle(order)
        for key in order:
            work = iterations[key], between.get(key, nothing)
            if key not in expected:
                expected[key] = clock.sample(*work, 1)[0] if clock.settle_ms else math.inf

            def take(key: Key = key, work: tuple[Callable, Callable] = work) -> None:
                taken, offsets = samples[key]
                offsets.append(since_start())
                taken.append(statistics.median(clock.sample(*work, *burst(clock, expected[key]))))
            if visit:
                visit(number, key, take)
            else:
                take()
    return samples


def burst(clock: Clock, ms: float) -> tuple[int, int]:
    """(timed iterations, untimed ones before them) of one interleaved sample of work that takes `ms`."""
    ms = max(ms, 1e-3)
    timed = max(1, min(100, int(clock.burst_ms / ms)))
    untimed = max(clock.lead_in, min(500, round(clock.settle_ms / ms)))
    return timed, untimed


def paired_ratio(numerator: Iterable[float], denominator: Iterable[float], resamples: int = 2000,
                 seed: int = 0) -> tuple[float, float, float]:
    """(ratio, low, high): the median of the per-round ratios and its 95 % bootstrap interval.

    The two are the same speed, as far as these samples can tell, when the interval holds 1.
    """
    pairs = zip(numerator, denominator, strict=True)
    ratios = torch.tensor([above / below for above, below in pairs], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(ratios), (resamples, len(ratios)), generator=generator)
    medians = ratios[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return ratios.quantile(0.5).item(), low, high
