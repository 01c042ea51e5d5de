"""Interleaved rounds and the ratio of two that shared them, on clocks whose readings a test makes up."""
import itertools
import math
import random
import time
from types import SimpleNamespace

import pytest

from common.runtime import rounds, timing
from common.runtime.timing import EventClock, HostClock
from tests.helpers.devices import CYCLES, asleep

pytestmark = pytest.mark.unit


class DriftingClock:
    """Iterations return their true ms; a reading adds 2 % noise of its own and a drift of 20 % that all share."""
    name, lead_in, settle_ms, burst_ms = "drifting", 0, 0, 0

    def __init__(self, seed=0):
        self.rng, self.reading = random.Random(seed), 0

    def sample(self, iteration, between, count, lead_in=0):
        readings = []
        for _ in range(count):
            between()
            drift = 1 + 0.2 * math.sin(self.reading / 40)
            readings.append(iteration() * drift * self.rng.gauss(1, 0.02))
            self.reading += 1
        return readings


def clock_of(sample, lead_in=0, settle_ms=0, burst_ms=0):
    return SimpleNamespace(sample=sample, lead_in=lead_in, settle_ms=settle_ms, burst_ms=burst_ms)


def compare(slowdown, seed):
    work = {"a": lambda: 5.0, "b": lambda: 5.0 * slowdown}
    samples = rounds.interleaved(work, DriftingClock(seed), 100, seed=seed)
    return rounds.paired_ratio(samples["b"][0], samples["a"][0], resamples=500)


# -------------------------------------------------------------------------------------------------------------- ratios


def test_a_against_a_is_the_same():
    ratio, low, high = compare(1.0, seed=0)
    assert low <= 1 <= high and low <= ratio <= high
    held = 0
    for seed in range(60):
        _, low, high = compare(1.0, seed)
        held += low <= 1 <= high
    assert held >= 52                                       # a 95 % interval misses 3 of 60; more than 8 is a wrong one


@pytest.mark.parametrize("slowdown", [1.03, 1 / 1.03])
def test_three_percent_are_seen(slowdown):
    for seed in range(20):
        ratio, low, high = compare(slowdown, seed)
        assert not low <= 1 <= high
        assert ratio == pytest.approx(slowdown, abs=0.012)


def test_drift_would_look_like_a_difference_were_nothing_interleaved():
    """The same two clocks, all of A before all of B, are never "the same"."""
    clock = DriftingClock()
    a, b = (clock.sample(lambda: 5.0, timing.nothing, 100) for _ in "ab")
    _, low, high = rounds.paired_ratio(b, a, resamples=500)
    assert not low <= 1 <= high


def test_ratios_need_a_partner_for_every_sample():
    with pytest.raises(ValueError):
        rounds.paired_ratio([1.0, 2.0, 3.0], [1.0, 2.0])


def test_a_comparison_is_the_same_every_time_it_is_computed():
    assert compare(1.0, seed=3) == compare(1.0, seed=3)


# -------------------------------------------------------------------------------------------------------------- rounds


def test_interleaving_shuffles_every_round_and_pairs_by_round():
    calls, readings = [], itertools.count()

    def sample(iteration, between, *_):
        between()
        iteration()
        return [next(readings)]
    names = "abcde"
    work = {name: lambda name=name: calls.append(name) for name in names}
    found = rounds.interleaved(work, clock_of(sample), 20, between={"c": lambda: calls.append("before c")})
    for place in [place for place, call in enumerate(calls) if call == "before c"]:
        assert calls[place + 1] == "c"                      # its own clean-up, and only before it
    order = [call for call in calls if call != "before c"]
    orders = ["".join(order[place:place + 5]) for place in range(0, 100, 5)]
    assert all(sorted(one) == sorted(names) for one in orders) and len(set(orders)) > 10
    for samples, _ in found.values():
        assert [reading // 5 for reading in samples] == list(range(20))            # sample i comes from round i


def test_offsets_show_that_the_rounds_were_interleaved(monkeypatch):
    """Each sample's offset is the moment before it: here, how many samples there were until then."""
    calls = []

    def sample(iteration, between, *_):
        iteration()
        return [1.0]
    monkeypatch.setattr(rounds, "since_start", lambda: len(calls))
    work = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = rounds.interleaved(work, clock_of(sample), rounds=8)
    seen = set()
    for name, (samples, offsets) in found.items():
        assert len(samples) == len(offsets) == 8
        assert [calls[offset] for offset in offsets] == [name] * 8
        assert [offset // 3 for offset in offsets] == list(range(8))
        seen.update(offsets)
    assert seen == set(range(24))


def test_offsets_are_of_the_burst_and_not_of_the_look_before_it(monkeypatch):
    """Where it is not known how long an iteration takes, one is looked at before the first burst."""
    taken = []

    def sample(iteration, between, count, lead_in=1):
        taken.append(count)
        return [10.0] * count
    monkeypatch.setattr(rounds, "since_start", lambda: len(taken))
    found = rounds.interleaved({"a": timing.nothing}, clock_of(sample, 1, 100, 50), rounds=2)
    assert taken == [1, 5, 5] and found == {"a": ([10.0, 10.0], [1, 2])}


def test_offsets_of_rounds_are_seconds_of_the_process():
    before = timing.since_start()
    found = rounds.interleaved(dict.fromkeys("ab", lambda: time.sleep(1e-3)), HostClock(), rounds=3)
    after = timing.since_start()
    begun = []
    for round_of_both in zip(*(offsets for _, offsets in found.values()), strict=True):
        begun += sorted(round_of_both)
    assert begun == sorted(begun) and before <= begun[0] and begun[-1] <= after
    for offset, following in itertools.pairwise(begun):
        assert following - offset >= 0.999e-3                          # what the work takes at the least


def test_what_comes_beside_a_sample_knows_its_round_and_whose_it_is():
    """It may come before the sample or behind it."""
    calls = []

    def visit(number, name, take):
        if number == 2:
            calls.append((number, name))
        take()
        if number != 2:
            calls.append((number, name))

    def sample(iteration, *_):
        iteration()
        return [1.0]
    work = {name: lambda name=name: calls.append(name) for name in "ab"}
    samples = rounds.interleaved(work, clock_of(sample), rounds=3, visit=visit)
    assert calls[0:8:2] == [name for _, name in calls[1:8:2]] and calls[9::2] == [name for _, name in calls[8::2]]
    assert [number for number, _ in (*calls[1:8:2], *calls[8::2])] == [0, 0, 1, 1, 2, 2]
    assert [len(taken) for taken, _ in samples.values()] == [3, 3]


def test_progress_tells_each_round_as_it_begins():
    told = []
    rounds.interleaved({"a": lambda: told.append("a")}, HostClock(), rounds=3, progress=told.append)
    assert told == [0, "a", 1, "a", 2, "a"]


def test_on_a_gpu_a_sample_follows_a_tenth_of_a_second_of_its_own_work():
    taken = []

    def sample(iteration, between, count, lead_in=1):
        ms = iteration()
        taken.append((ms, count, lead_in))
        return [ms] if count == 1 else [ms] * (count - 1) + [1e9]                  # the last was disturbed
    work = {"short": lambda: 5.0, "long": lambda: 400.0}
    found = rounds.interleaved(work, clock_of(sample, 1, 100, 30), 3, expected={"long": 400.0})
    assert found["short"][0] == [5.0] * 3                       # the median of a burst
    assert [one for one in taken if one[0] == 400.0] == [(400.0, 1, 1)] * 3
    assert [one for one in taken if one[0] == 5.0] == [(5.0, 1, 1)] + [(5.0, 6, 20)] * 3       # one look, then bursts


@pytest.mark.parametrize("ms, expected", [(0.0, (100, 500)), (0.05, (100, 500)), (3.0, (33, 33)), (20.0, (5, 5)),
                                          (445.0, (1, 1)), (math.inf, (1, 1))])
def test_bursts_are_bounded(ms, expected):
    assert rounds.burst(EventClock(), ms) == expected
    assert rounds.burst(HostClock(), ms) == (1, 0)              # a CPU: one iteration, nothing before it


@pytest.mark.gpu
def test_on_a_gpu_a_against_a_is_the_same_and_three_percent_are_seen():
    """A kernel of known length. One 95 % interval in twenty misses 1 rightly: two of three comparisons must hold it."""
    clock, held, seen = EventClock(), 0, 0
    clock.settle_ms = clock.burst_ms = 10                    # a sleeping GPU is far below its power cap
    for seed in range(3):
        kernels = {"a": asleep(CYCLES), "a again": asleep(CYCLES), "slower": asleep(1.03 * CYCLES)}
        found = rounds.interleaved(kernels, clock, rounds=20, seed=seed)
        samples = {name: taken for name, (taken, _) in found.items()}
        _, low, high = rounds.paired_ratio(samples["a again"], samples["a"])
        held += low <= 1 <= high
        _, low, high = rounds.paired_ratio(samples["slower"], samples["a"])
        seen += low > 1
    assert held >= 2 and seen == 3


@pytest.mark.unit
def test_a_ratios_interval_is_that_of_95_percent():
    """It misses the true ratio in a twentieth of all cases, and not in a tenth."""
    draw = random.Random(0)
    missed = 0
    for number in range(600):
        ratios = [draw.gauss(1, 0.1) for _ in range(25)]
        _, low, high = rounds.paired_ratio(ratios, [1.0] * 25, resamples=400, seed=number)
        missed += not low <= 1 <= high
    assert 0.025 < missed / 600 < 0.078
