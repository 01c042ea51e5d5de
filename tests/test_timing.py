"""The clock and the stop rule, on clocks whose readings are scripted: nothing here depends on the machine's speed."""
import itertools
import math
import random
import statistics
from types import SimpleNamespace

import numpy
import pytest
import torch

from common import graph, timing
from common.timing import EventClock, HostClock, StopRule, Timing

pytestmark = pytest.mark.unit


class ScriptedClock:
    """Reads out `chunk(n, count)` for the n-th call, and remembers every reading it gave."""
    name, lead_in, settle_ms, burst_ms = "scripted", 0, 0, 0

    def __init__(self, chunk):
        self.chunk, self.chunks = chunk, []

    def sample(self, iteration, between, count, lead_in=0):
        for _ in range(count):
            between()
            iteration()
        self.chunks.append(self.chunk(len(self.chunks), count))
        return list(self.chunks[-1])


def constant(ms):
    return ScriptedClock(lambda n, count: [ms] * count)


def noisy(draw, seed=0):
    rng = random.Random(seed)
    return ScriptedClock(lambda n, count: [draw(rng) for _ in range(count)])


def measure(clock, **rule):
    return timing.measure(timing.nothing, clock, rule=StopRule(**rule))


def seconds(clock, samples):
    """What the stop rule counts of `samples` from a clock that runs no untimed iterations."""
    assert clock.lead_in == 0
    return sum(samples) / 1e3


# ----------------------------------------------------------------------------------------------- warm-up and stop rule


def test_warm_up_is_not_in_the_result():
    looks = [100.0, 50.0, 25.0, 12.0, 10.1, 10.1]          # settles at the sixth look; all after it is measured
    clock = ScriptedClock(lambda n, count: [looks[n] if n < len(looks) else 10.0] * count)
    assert set(measure(clock).samples) == {10.0}


def test_every_sample_after_the_warm_up_is_kept_in_order():
    clock = noisy(lambda rng: rng.gauss(10, 1))
    samples = measure(clock).samples
    given = [reading for chunk in clock.chunks for reading in chunk]
    assert samples == given[-len(samples):] and len(given) > len(samples)


def test_calibrations_are_warm_and_at_least_five():
    clock, calls = constant(3000.0), []
    found = timing.measure(timing.nothing, clock, rule=StopRule(max_seconds=1.0),
                           calibrations={"gemm": lambda: calls.append("gemm"), "copy": lambda: calls.append("copy")})
    assert {name: len(taken) for name, taken in found.calibration.items()} == {"gemm": 5, "copy": 5}
    assert calls.count("gemm") == calls.count("copy") == 6              # the first one is not kept


def test_a_cpu_runs_once_untimed_behind_the_calibrations():
    """They leave their own data in the caches; on a GPU every chunk begins with untimed iterations anyway."""
    calls = []
    found = timing.measure(lambda: calls.append("run"), HostClock(), rule=StopRule(max_seconds=1e-9),
                           calibrations={"gemm": lambda: calls.append("gemm")})
    assert calls[::-1].index("gemm") == len(found.samples) + 1 == 2


def test_calibration_is_ieee_fp32_whatever_the_process_has_set(monkeypatch):
    """An environment variable may allow TF32 from the start."""
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append((a.dtype, torch.get_float32_matmul_precision())))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        timing.calibration("cpu")["gemm"]()
        assert seen == [(torch.float32, "highest")] and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
def test_calibrations_on_a_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append((a.dtype, torch.get_float32_matmul_precision())))
    found = timing.calibration("cuda")
    found["gemm float32"](), found["gemm"](), found["copy"]()
    assert seen == [(torch.float32, "highest"), (torch.float16, "highest")]


def test_a_warm_up_that_never_settles_ends():
    clock = ScriptedClock(lambda n, count: [10.0 if n % 2 else 20.0] * count)
    samples = measure(clock, warmup_seconds=2.0, max_seconds=1.0).samples
    warmed = sum(map(sum, clock.chunks)) - sum(samples)
    assert 2000 <= warmed <= 2000 + 500                     # ms: the limit, and less than a few chunks beyond it


@pytest.mark.parametrize("ms", [2**-6, 1.0, 8.0, 64.0])
def test_a_steady_clock_stops_at_thirty_samples_and_half_a_second(ms):
    clock = constant(ms)
    result = measure(clock)
    assert len(result.samples) >= 30 and seconds(clock, result.samples) >= 0.5
    before = result.samples[:-len(clock.chunks.pop())]
    assert len(before) < 30 or seconds(clock, before) < 0.5              # not a chunk more than that needs
    assert result.settled and result.median == ms and result.clock == "scripted"


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.03])
def test_settled_means_that_the_interval_is_within_the_precision(noise):
    result = measure(noisy(lambda rng: rng.gauss(1, noise)), precision=0.005)
    low, high = timing.median_interval(result.samples)
    assert result.settled and max(high - result.median, result.median - low) <= 0.005 * result.median


def test_more_noise_takes_more_samples():
    counts = [len(measure(noisy(lambda rng, s=noise: rng.gauss(10, s))).samples) for noise in (0.01, 0.2, 0.4)]
    assert counts[0] < counts[1] < counts[2]


def test_a_bimodal_clock_never_settles_and_says_so():
    """Half of the readings 10 % above the other half: no median in between is known to 0.5 %."""
    clock = noisy(lambda rng: rng.choice((10.0, 11.0)))
    result = measure(clock, max_seconds=4.0)
    assert not result.settled
    assert 4.0 <= seconds(clock, result.samples) <= 4.0 + 0.1


@pytest.mark.parametrize("ms", [500.0, 1000.0, 3000.0, 9000.0])
def test_slow_iterations_stop_at_the_time_limit(ms):
    """Before thirty samples, and less than two iterations beyond the limit."""
    clock = constant(ms)
    result = measure(clock, max_seconds=8.0)
    assert len(result.samples) < 30
    assert 8.0 <= seconds(clock, result.samples) < 8.0 + 2 * ms / 1e3


@pytest.mark.parametrize("ms", [3000.0, 9000.0])
def test_fewer_than_six_iterations_are_not_a_settled_median(ms):
    """However steady they look: they bound no median at 95 %."""
    result = measure(constant(ms), max_seconds=8.0)
    assert len(result.samples) < 6 and not result.settled


def test_a_time_limit_below_the_minimum_ends_the_row():
    clock = noisy(lambda rng: rng.choice((1.0, 2.0)))
    result = measure(clock, max_seconds=0.05)
    assert 0.05 <= seconds(clock, result.samples) < 0.5 and not result.settled


def test_progress_tells_the_samples_so_far_and_their_median():
    told = []
    result = timing.measure(timing.nothing, constant(10.0), progress=lambda *both: told.append(both))
    assert told[-1] == (len(result.samples), 10.0) and [n for n, _ in told] == sorted({n for n, _ in told})


# -------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("n", [1, 2, 5, 30, 101])
def test_median_and_quantiles_are_the_usual_ones(n):
    samples = random.Random(n).sample(range(1000), n)
    result = Timing(samples, True, "scripted")
    assert result.median == statistics.median(samples)
    for q in (0, 0.2, 0.5, 0.8, 1):
        assert result.quantile(q) == pytest.approx(numpy.quantile(samples, q))


@pytest.mark.parametrize("n", [6, 7, 10, 30, 101, 400])
@pytest.mark.parametrize("draw, true", [(lambda rng: rng.gauss(0, 1), 0.0),
                                        (lambda rng: rng.expovariate(1), math.log(2))], ids=["normal", "skewed"])
def test_the_medians_interval_holds_the_true_median(draw, true, n):
    """In 95 % of 1500 simulated runs, whatever the distribution; less 1.5 % for the simulation's own error."""
    rng, held = random.Random(n), 0
    for _ in range(1500):
        low, high = timing.median_interval([draw(rng) for _ in range(n)])
        held += low <= true <= high
    assert held / 1500 >= 0.935


@pytest.mark.parametrize("n", range(1, 6))
def test_too_few_samples_bound_nothing(n):
    assert timing.median_interval([1.0] * n) == (-math.inf, math.inf)


# ------------------------------------------------------------------------------------------------------- comparisons


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


def compare(slowdown, seed):
    samples = timing.interleaved({"a": lambda: 5.0, "b": lambda: 5.0 * slowdown}, DriftingClock(seed), 100, seed=seed)
    return timing.paired_ratio(samples["b"], samples["a"], resamples=500)


def test_a_against_a_is_the_same():
    ratio, low, high = compare(1.0, seed=0)
    assert low <= 1 <= high and low <= ratio <= high
    held = sum(low <= 1 <= high for _, low, high in (compare(1.0, seed) for seed in range(60)))
    assert held >= 52                                       # a 95 % interval misses 3 of 60; more than 8 is a wrong one


@pytest.mark.parametrize("slowdown", [1.03, 1 / 1.03])
def test_three_percent_are_seen(slowdown):
    for seed in range(20):
        ratio, low, high = compare(slowdown, seed)
        assert not low <= 1 <= high
        assert ratio == pytest.approx(slowdown, abs=0.012)


def test_one_after_the_other_the_drift_would_have_looked_like_a_difference():
    """Why comparisons are interleaved: the same two clocks, all of A before all of B, are never 'the same'."""
    clock = DriftingClock()
    a, b = (clock.sample(lambda: 5.0, timing.nothing, 100) for _ in "ab")
    _, low, high = timing.paired_ratio(b, a, resamples=500)
    assert not low <= 1 <= high


def test_ratios_need_a_partner_for_every_sample():
    with pytest.raises(ValueError):
        timing.paired_ratio([1.0, 2.0, 3.0], [1.0, 2.0])


def test_a_comparison_is_the_same_every_time_it_is_computed():
    assert compare(1.0, seed=3) == compare(1.0, seed=3)


def test_interleaving_shuffles_every_round_and_pairs_by_round():
    calls, readings = [], itertools.count()
    clock = SimpleNamespace(sample=lambda iteration, between, *_: [between(), iteration(), next(readings)][2:],
                            lead_in=0, settle_ms=0, burst_ms=0)
    names = "abcde"
    samples = timing.interleaved({n: lambda n=n: calls.append(n) for n in names}, clock, rounds=20,
                                 between={"c": lambda: calls.append("before c")})
    for place in [i for i, call in enumerate(calls) if call == "before c"]:
        assert calls[place + 1] == "c"                      # its own clean-up, and only before it
    order = [call for call in calls if call != "before c"]
    rounds = ["".join(order[i:i + 5]) for i in range(0, 100, 5)]
    assert all(sorted(one) == sorted(names) for one in rounds) and len(set(rounds)) > 10
    assert all(samples[n][i] // 5 == i for n in names for i in range(20))      # sample i comes from round i


def test_what_comes_behind_a_sample_knows_its_round_and_whose_it_is():
    calls = []
    clock = SimpleNamespace(sample=lambda iteration, *_: [iteration()], lead_in=0, settle_ms=0, burst_ms=0)
    timing.interleaved({n: lambda n=n: calls.append(n) or 1.0 for n in "ab"}, clock, rounds=3,
                       behind=lambda number, name: calls.append((number, name)))
    assert calls[::2] == [name for _, name in calls[1::2]]
    assert [number for number, _ in calls[1::2]] == [0, 0, 1, 1, 2, 2]


def test_on_a_gpu_each_sample_follows_a_tenth_of_a_second_of_its_own_work():
    taken = []

    def sample(iteration, between, count, lead_in=1):
        taken.append((iteration(), count, lead_in))
        return [iteration()] if count == 1 else [iteration()] * (count - 1) + [1e9]      # the last was disturbed
    clock = SimpleNamespace(sample=sample, lead_in=1, settle_ms=100, burst_ms=30)
    samples = timing.interleaved({"short": lambda: 5.0, "long": lambda: 400.0}, clock, 3,
                                 expected={"long": 400.0})
    assert samples["short"] == [5.0] * 3                        # the median of a burst
    assert [one for one in taken if one[0] == 400.0] == [(400.0, 1, 1)] * 3
    assert [one for one in taken if one[0] == 5.0] == [(5.0, 1, 1)] + [(5.0, 6, 20)] * 3       # one look, then bursts


@pytest.mark.parametrize("ms, expected", [(0.0, (100, 500)), (0.05, (100, 500)), (3.0, (33, 33)), (20.0, (5, 5)),
                                          (445.0, (1, 1)), (math.inf, (1, 1))])
def test_bursts_are_bounded(ms, expected):
    assert timing.burst(EventClock, ms) == expected
    assert timing.burst(HostClock, ms) == (1, 0)                # a CPU: one iteration, nothing before it


# ------------------------------------------------------------------------------------------------------------ clocks


def test_the_host_clock_times_the_iteration_alone(monkeypatch):
    """What happens between two iterations comes before each of them, and outside the timed region."""
    now, calls = [0], []

    def spend(name, ms):
        calls.append(name)
        now[0] += ms * 10**6
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    samples = HostClock().sample(lambda: spend("iteration", 2), lambda: spend("between", 5), 4)
    assert samples == [2.0] * 4
    assert calls == ["between", "iteration"] * 4


def test_each_device_has_its_clock():
    assert isinstance(timing.clock_for("cpu"), HostClock) and timing.clock_for("cpu").name == "perf_counter"
    assert isinstance(timing.clock_for(torch.device("cuda", 1)), EventClock)


CYCLES = 2_000_000               # about a millisecond: far above the resolution of an event, half a microsecond


def asleep(cycles):
    return lambda: torch.cuda._sleep(int(cycles))


@pytest.mark.gpu
def test_on_a_gpu_a_against_a_is_the_same_and_three_percent_are_seen():
    """A kernel of known length. One 95 % interval in twenty misses 1 rightly: two of three comparisons must hold it."""
    clock, held, seen = EventClock(), 0, 0
    clock.settle_ms = clock.burst_ms = 10                    # a sleeping GPU is far below its power cap
    for seed in range(3):
        kernels = {"a": asleep(CYCLES), "a again": asleep(CYCLES), "slower": asleep(1.03 * CYCLES)}
        samples = timing.interleaved(kernels, clock, rounds=20, seed=seed)
        _, low, high = timing.paired_ratio(samples["a again"], samples["a"])
        held += low <= 1 <= high
        _, low, high = timing.paired_ratio(samples["slower"], samples["a"])
        seen += low > 1
    assert held >= 2 and seen == 3


@pytest.mark.gpu
def test_the_event_clock_is_linear_in_the_kernels_length():
    clock = EventClock()
    clock.sample(asleep(10 * CYCLES), timing.nothing, 3)    # leaves the idle clocks
    short, long = (statistics.median(clock.sample(asleep(n * CYCLES), timing.nothing, 20)) for n in (1, 4))
    assert long / short == pytest.approx(4, rel=0.05)


@pytest.mark.gpu
def test_the_event_clock_leaves_out_what_happens_between():
    bare = statistics.median(EventClock().sample(asleep(CYCLES), timing.nothing, 20))
    beside = statistics.median(EventClock().sample(asleep(CYCLES), asleep(4 * CYCLES), 20))
    assert beside / bare == pytest.approx(1, rel=0.1)


@pytest.mark.gpu
def test_a_captured_iteration_replays_on_changed_input():
    """All of it, gradients included, which a replay overwrites instead of accumulating."""
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    x, kept = torch.randn(8, 64, device="cuda"), {}

    def iteration():
        y = (x @ weight).tanh()
        y.sum().backward()
        kept["y"] = y.detach()

    def between():
        weight.grad = None
    replay = graph.capture(iteration, between)
    y, gradient = kept["y"], weight.grad
    for seed in (1, 2):
        x.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)))
        replay()
        replay()
        truth = weight.detach().clone().requires_grad_()
        expected = (x @ truth).tanh()
        expected.sum().backward()
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(gradient, truth.grad)


@pytest.mark.gpu
def test_what_cannot_be_captured_raises():
    """And leaves the GPU's random numbers as usable as they were."""
    with pytest.raises(RuntimeError):
        graph.capture(lambda: torch.ones(1, device="cuda").item(), timing.nothing)
    assert torch.randn(8, device="cuda").isfinite().all()
