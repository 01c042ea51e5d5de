"""The clock and the stop rule, on clocks whose readings are scripted: nothing here depends on the machine's speed."""
import math
import random
import statistics
from types import SimpleNamespace

import numpy
import pytest
import torch

from common.runtime import timing
from common.runtime.timing import EventClock, HostClock, StopRule, Timing
from tests.helpers.devices import CYCLES, asleep

pytestmark = pytest.mark.unit


class ScriptedClock:
    """Reads out `chunk(n, count)` for the n-th call, and remembers every reading it gave.

    Of what it was asked to time with offsets it remembers those too: the k-th such chunk begins at k seconds.
    """
    name, lead_in, settle_ms, burst_ms = "scripted", 0, 0, 0

    def __init__(self, chunk):
        self.chunk = chunk
        self.chunks: list[list[float]] = []
        self.measured: list[tuple[list[float], list[float]]] = []

    def sample(self, iteration, between, count, lead_in=0):
        for _ in range(count):
            between()
            iteration()
        self.chunks.append(self.chunk(len(self.chunks), count))
        return list(self.chunks[-1])

    def timed(self, iteration, between, count, lead_in=0):
        samples = self.sample(iteration, between, count, lead_in)
        offsets = [len(self.measured) + place / 1e4 for place in range(count)]
        self.measured.append((samples, offsets))
        return list(samples), list(offsets)


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
    counts = []
    for noise in (0.01, 0.2, 0.4):
        result = measure(noisy(lambda rng, spread=noise: rng.gauss(10, spread)))
        counts.append(len(result.samples))
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
    assert told[-1] == (len(result.samples), 10.0)
    counts = [count for count, _ in told]
    assert counts == sorted(set(counts))


# -------------------------------------------------------------------------------------------------- rounds and offsets


def test_a_samples_round_is_the_chunk_it_was_taken_in():
    """Between two chunks the calibrations are sampled. They and the warm-up are no rounds of their own."""
    clock = noisy(lambda rng: rng.gauss(10, 0.4))
    result = timing.measure(timing.nothing, clock, calibrations={"copy": timing.nothing})
    expected = []
    for number, (samples, _) in enumerate(clock.measured):
        expected += [number] * len(samples)
    assert result.rounds == expected and len(clock.measured) > 2


def test_each_sample_has_the_offset_at_which_it_was_taken():
    clock = noisy(lambda rng: rng.gauss(10, 0.4))
    result = measure(clock)
    samples, offsets = [], []
    for chunk, began in clock.measured:
        samples += chunk
        offsets += began
    assert result.samples == samples and result.offsets_s == offsets
    assert result.offsets_s == sorted(result.offsets_s)


def test_offsets_lie_within_the_measurement_one_behind_the_other():
    """By the real clock: an iteration begins once the one before has ended."""
    rule = StopRule(min_samples=20, min_seconds=0.0, max_seconds=1e-3, warmup_seconds=0.0)
    before = timing.since_start()
    result = timing.measure(lambda: sum(range(1000)), HostClock(), rule=rule)
    after = timing.since_start()
    assert len(result.offsets_s) == len(result.rounds) == len(result.samples) > 1
    ends = [offset + ms / 1e3 for offset, ms in zip(result.offsets_s, result.samples, strict=True)]
    assert before <= result.offsets_s[0] and ends[-1] <= after + 1e-6              # s: two clocks' rounding
    for end, following in zip(ends, result.offsets_s[1:], strict=False):
        assert end <= following + 1e-6


def test_a_timing_made_elsewhere_has_neither():
    result = Timing([1.0], True, "scripted")
    assert result.rounds is None and result.offsets_s is None and result.calibration == {}


# -------------------------------------------------------------------------------------------------------- calibrations


def test_calibrations_are_warm_and_at_least_five():
    clock, calls = constant(3000.0), []
    result = timing.measure(timing.nothing, clock, rule=StopRule(max_seconds=1.0),
                            calibrations={"gemm": lambda: calls.append("gemm"), "copy": lambda: calls.append("copy")})
    assert {name: len(taken) for name, taken in result.calibration.items()} == {"gemm": 5, "copy": 5}
    assert calls.count("gemm") == calls.count("copy") == 6              # the first one is not kept


def test_a_cpu_runs_once_untimed_behind_the_calibrations():
    """They leave their own data in the caches; on a GPU every chunk begins with untimed iterations anyway."""
    calls = []
    result = timing.measure(lambda: calls.append("run"), HostClock(), rule=StopRule(max_seconds=1e-9),
                            calibrations={"gemm": lambda: calls.append("gemm")})
    assert calls[::-1].index("gemm") == len(result.samples) + 1 == 2


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
    work = timing.calibration("cuda")
    assert work.keys() == {"gemm", "copy", "gemm float32"}
    for name in ("gemm float32", "gemm", "copy"):
        work[name]()
    assert seen == [(torch.float32, "highest"), (torch.float16, "highest")]


# ---------------------------------------------------------------------------------------------------------- statistics


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


# ------------------------------------------------------------------------------------------------------ the host clock


class Host:
    """A host whose calls take as long as a test says. `calls` is what it did, in that order."""

    def __init__(self):
        self.now_ns = 10**9
        self.calls: list[str] = []

    def does(self, name, ms):
        def call():
            self.calls.append(name)
            self.now_ns += ms * 10**6
        return call


@pytest.fixture
def host(monkeypatch):
    host = Host()
    clocks = SimpleNamespace(perf_counter_ns=lambda: host.now_ns, perf_counter=lambda: host.now_ns / 1e9)
    monkeypatch.setattr(timing, "time", clocks)
    monkeypatch.setattr(timing, "_BEGAN", 1.0)
    return host


def test_the_host_clock_times_the_iteration_alone(host):
    """What happens between two iterations comes before each of them, and outside the timed region."""
    samples, offsets = HostClock().timed(host.does("iteration", 2), host.does("between", 5), 4)
    assert samples == [2.0] * 4
    assert host.calls == ["between", "iteration"] * 4
    assert offsets == pytest.approx([0.005, 0.012, 0.019, 0.026])          # where each iteration began
    assert HostClock().sample(host.does("iteration", 3), timing.nothing, 2) == [3.0] * 2


def test_the_host_clock_times_many_repetitions_as_one(host):
    """What is called meanwhile comes behind them, outside the timed region."""
    assert HostClock().together(host.does("work", 2), 3, host.does("look", 50)) == 6.0
    assert host.calls == ["work"] * 3 + ["look"]


@pytest.mark.parametrize("ms, repeats, elements", [(2.0, 1, 0.5), (4.0, 1, 1.0), (10.0, 3, 10 / 12), (1e-9, 1, 0)])
def test_copies_take_as_long_as_they_are_asked_to(ms, repeats, elements, monkeypatch):
    """Here a copy of the whole buffer takes 4 ms."""
    copied = []

    class Buffer(torch.Tensor):
        def copy_(self, source):
            copied.append(source.numel())
    monkeypatch.setattr(torch, "empty_like", lambda source: torch.zeros_like(source).as_subclass(Buffer))
    monkeypatch.setattr(timing, "clock_for", lambda device: SimpleNamespace(sample=lambda *_: [4.0] * 5))
    timing.copying_for("cpu", ms)()
    assert copied == [max(1, round(2**22 * elements))] * repeats


def test_each_device_has_its_clock():
    assert isinstance(timing.clock_for("cpu"), HostClock) and timing.clock_for("cpu").name == "perf_counter"
    assert isinstance(timing.clock_for(torch.device("cuda", 1)), EventClock)


def test_records_of_rounds_say_how_long_a_burst_was():
    assert HostClock().in_rounds == "perf_counter"
    assert EventClock().in_rounds == "CUDA events, 100 ms behind 100 ms of the same work"


# ----------------------------------------------------------------------------------------------------- the event clock


class FakeGpu:
    """One stream: an event is a moment in it. `calls` is what the host asked for, `now` is in ms."""

    def __init__(self):
        self.now = 0.0
        self.is_waited_for = True
        self.calls: list[str] = []

    def launches(self, name, ms):
        def launch():
            self.calls.append(name)
            self.now += ms
        return launch

    def synchronize(self):
        self.calls.append("wait")
        self.is_waited_for = True

    def event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    """Read before it was waited for, a real one raises."""

    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.gpu.calls.append("event")
        self.gpu.is_waited_for = False
        self.at = self.gpu.now

    def elapsed_time(self, end):
        assert self.gpu.is_waited_for
        return end.at - self.at


@pytest.fixture
def gpu(monkeypatch):
    """A made-up GPU whose host looks at its clock at 10 s."""
    gpu = FakeGpu()

    def since_start():
        gpu.calls.append("clock")
        return 10.0
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(timing, "since_start", since_start)
    return gpu


def test_the_event_clock_times_the_iteration_alone(gpu):
    """Behind untimed iterations: the first event would else wait on an empty queue for its first kernel."""
    samples, offsets = EventClock().timed(gpu.launches("iteration", 2.0), gpu.launches("between", 5.0), 3, 2)
    assert samples == [2.0] * 3
    untimed = ["between", "iteration"]
    timed = ["between", "event", "iteration", "event"]
    assert gpu.calls == [*untimed, *untimed, "clock", *timed, *timed, *timed, "wait"]
    assert offsets == pytest.approx([10.0, 10.007, 10.014])                # the first, and what the events say of it


def test_every_chunk_of_the_event_clock_has_a_lead_in(gpu):
    for sampled in (EventClock().sample, EventClock().timed):
        gpu.calls.clear()
        sampled(gpu.launches("iteration", 2.0), timing.nothing, 1)
        assert gpu.calls == ["iteration", "clock", "event", "iteration", "event", "wait"]


def test_the_event_clock_times_many_repetitions_as_one(gpu):
    """What is called meanwhile comes while they run: before the host waits for them."""
    assert EventClock().together(gpu.launches("work", 2.0), 3, gpu.launches("look", 0.0)) == 6.0
    assert gpu.calls == ["event", "work", "work", "work", "event", "look", "wait"]


def test_offsets_of_the_event_clock_follow_its_samples(gpu):
    lengths = iter([9.0, 1.0, 2.0, 4.0])                                    # the first is untimed

    def iteration():
        gpu.now += next(lengths)
    samples, offsets = EventClock().timed(iteration, timing.nothing, 3)
    assert samples == [1.0, 2.0, 4.0]
    assert offsets == pytest.approx([10.0, 10.001, 10.003])


def test_the_lead_in_counts_for_the_time_limit():
    """A GPU's chunk is longer by it; the limit is of all that was run."""
    clock = constant(100.0)
    clock.lead_in = 1
    result = measure(clock, max_seconds=1.0, min_seconds=0.1)
    chunks = len(clock.measured)
    assert len(result.samples) * 0.1 < 1.0 <= (len(result.samples) + chunks) * 0.1


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
def test_on_a_gpu_offsets_are_at_least_a_sample_apart():
    before = timing.since_start()
    samples, offsets = EventClock().timed(asleep(CYCLES), asleep(CYCLES), 5)
    assert before < offsets[0] < timing.since_start()
    for ms, offset, following in zip(samples, offsets, offsets[1:], strict=False):
        assert following - offset >= ms / 1e3          # others on this GPU make any single iteration longer


# ------------------------------------------------------------------------------------------------------------- enqueue


@pytest.fixture
def waits(monkeypatch, host):
    """To wait for the GPU takes 20 ms."""
    monkeypatch.setattr(torch.cuda, "synchronize", host.does("wait", 20))


def test_enqueueing_is_timed_on_an_idle_gpu(host, waits):
    """Waited for before each: where its queue is full, the host's time would be the GPU's."""
    assert timing.enqueue_ms(host.does("run", 2), host.does("between", 5)) == 2.0
    warm, timed = ["between", "run"], ["between", "wait", "run"]
    assert host.calls == [*warm, "wait", *10 * timed, "wait"]


@pytest.mark.parametrize("run_ms, times", [(2, 10), (100, 9), (400, 3), (9000, 1)])
def test_slow_enqueueing_is_timed_fewer_times(run_ms, times, host, waits):
    """As often as begins within a second."""
    assert timing.enqueue_ms(host.does("run", run_ms), timing.nothing) == run_ms
    assert host.calls.count("run") == 1 + times


@pytest.mark.parametrize("other", [1.008, 0.992])
def test_settled_is_told_by_the_farther_end_of_the_interval(other):
    """Half of its width would call a median known to 0.4 % whose one side reaches 0.8 %."""
    samples = [1.0] * 55 + [other] * 45
    low, high = timing.median_interval(samples)
    assert (high - low) / 2 < 0.005 < max(high - 1.0, 1.0 - low)
    assert not timing.is_settled(samples, 0.005)


def test_a_medians_interval_is_that_of_95_percent():
    """Of 101 samples 0 to 100: by the binomial the 40th to the 61st, or one more at either end; of 90 % the 42nd on."""
    low, high = timing.median_interval([float(number) for number in range(101)])
    assert low in (39.0, 40.0) and high in (60.0, 61.0)


def test_a_gpus_copy_is_beyond_the_reach_of_its_cache(monkeypatch):
    """Of 64 MiB much would come from the cache: a B200's holds 126 MB."""
    made = []

    def ones(elements, device):
        made.append(elements)
        return torch.zeros(1)
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.zeros(1))
    timing.calibration("cuda")
    assert min(made) * 4 >= 4 * 126e6
