"""Joules of an iteration, by the GPU's own energy counter, held against its power readings of the same time.

The counter of a data-centre GPU moves every tenth of a second. So energy is counted from one of its moves to another,
two seconds or more apart, while the same work runs without a pause.
"""
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import machine

SECONDS = 2.0              # between the two moves, at the least: a power controller swings with a period of about one
SETTLE_SECONDS = 0.2       # before the first: the clocks follow the work, and a move tells of the time before it
_WAIT_SECONDS = 0.25       # until the counter has moved, at either end
_POLL_SECONDS = 0.005
_AGREE = 0.1               # counter and power readings must not differ by more
_MARGIN = 1.1              # of a second try: it is to take so many times the seconds that are needed


class NoEnergy(Exception):
    """The counter can't be believed; the message says why."""


@dataclass(frozen=True)
class Energy:
    """What steady iterations took."""
    joules: float                      # of one iteration
    watts: float                       # on average, by the counter
    sampled_watts: float | None        # by power readings of the same time; None without a sensor
    seconds: float                     # from the first move of the counter to the last


@dataclass(frozen=True)
class Reading:
    """What the GPU said at `seconds`, by any clock."""
    seconds: float
    joules: float
    watts: float | None


def seconds_needed() -> float:
    """How long the work must run."""
    return SETTLE_SECONDS + SECONDS + 2 * _WAIT_SECONDS


def metered(device: torch.device, work: Callable[[int], None], count: int) -> tuple[Energy | None, str]:
    """(what one of the iterations takes, so many of which `work` runs and waits for, why that is not known).

    `count` of them should take `seconds_needed`. Where the counter can't be believed it is done once more, with as many
    as take so long by what the first try took.
    """
    reason = ""
    with machine.power_meter(device) as meter:
        if meter is None:
            return None, "no energy counter"
        for _ in range(2):
            with _Watch(meter) as watch:
                began = time.perf_counter()
                work(count)
                ended = time.perf_counter()
            try:
                return energy_of(watch.readings, began, ended, (ended - began) / count, meter.averaged), ""
            except NoEnergy as error:
                reason = str(error)
                count = max(count, math.ceil(_MARGIN * count * seconds_needed() / (ended - began)))
    return None, reason


def energy_of(readings: list[Reading], began: float, ended: float, iteration_seconds: float, averaged: bool) -> Energy:
    """What an iteration took that ran over and over from `began` to `ended`. Raises NoEnergy.

    `averaged`: a power reading is the mean of the second before it.
    """
    if ended - began < SETTLE_SECONDS + SECONDS:
        raise NoEnergy(f"the work took {ended - began:.2g} s, and {seconds_needed():.2g} s are needed")
    moves: list[Reading] = []
    for before, after in itertools.pairwise(readings):
        if after.joules < before.joules:
            raise NoEnergy("the energy counter went back")
        if after.joules > before.joules and began + SETTLE_SECONDS <= after.seconds <= ended:
            moves.append(after)
    if len(moves) < 3 or moves[-1].seconds - moves[0].seconds < SECONDS:
        raise NoEnergy("the energy counter stood still")
    seconds = moves[-1].seconds - moves[0].seconds
    watts = (moves[-1].joules - moves[0].joules) / seconds
    from_here = moves[0].seconds + (1.0 if averaged else 0.0)
    powers = [move.watts for move in moves[1:] if move.watts is not None and move.seconds >= from_here]
    sampled = None
    if powers:
        sampled = statistics.mean(powers)
        if abs(watts - sampled) > _AGREE * sampled:
            raise NoEnergy(f"the energy counter says {watts:.0f} W, the power readings {sampled:.0f} W")
    return Energy(watts * iteration_seconds, watts, sampled, seconds)


class _Watch:
    """Reads a meter all the while, in a thread of its own; keeps the moves of its counter, and the first reading."""

    def __init__(self, meter: machine.PowerMeter):
        self.readings: list[Reading] = []
        self._meter = meter
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            joules = self._meter.joules()
            if joules is None:
                return
            if not self.readings or joules != self.readings[-1].joules:
                self.readings.append(Reading(time.perf_counter(), joules, self._meter.watts()))
