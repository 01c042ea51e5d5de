"""One measurement: warm-up, stop rule, clock; and how to compare two of them.

A sample is one whole iteration, on a GPU in interleaved rounds the median of a burst of them, and every sample is kept.
Nothing is flushed between samples: an iteration starts with the caches as the one before left them (`CACHE_STATE`), as
it does in training.
"""
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

CACHE_STATE = "as the previous iteration left it"


@dataclass(frozen=True)
class StopRule:
    """When a row has been measured: times in seconds of iterations, not of the wall clock."""
    min_samples: int = 30
    min_seconds: float = 0.5
    max_seconds: float = 4.0
    precision: float = 0.005            # half-width of the median's 95 % interval, relative to the median
    warmup_chunk: float = 0.1           # one look at the median while warming up
    warmup_seconds: float = 2.0         # at most; ends earlier once two looks agree within 1 %


@dataclass(frozen=True)
class Timing:
    """Samples in ms, in the order they were taken."""
    samples: list[float]
    settled: bool
    clock: str
    calibration: dict[str, list[float]] = field(default_factory=dict)      # name -> its samples, taken in between

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def quantile(self, q: float) -> float:
        """The q-quantile, 0 to 1, by linear interpolation."""
        ordered = sorted(self.samples)
        position = q * (len(ordered) - 1)
        below = math.floor(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (position - below) * (ordered[above] - ordered[below])


class EventClock:
    """GPU time between two CUDA events around each iteration, in ms.

    The stream is what is timed, so a stream that starves while the host prepares the next launch is timed too. Each
    chunk starts with untimed iterations: the first event would otherwise wait on an empty queue for its first kernel.
    """
    name = "CUDA events"
    lead_in = 1                         # untimed iterations before each chunk, at least
    settle_ms = 100.0                   # of the same work, until a GPU at its power cap runs at the clocks of that work
    burst_ms = 100.0                    # of work whose median is one sample of an interleaved round

    @property
    def in_rounds(self) -> str:
        """What records of interleaved rounds say."""
        return f"{self.name}, {self.burst_ms:g} ms behind {self.settle_ms:g} ms of the same work"

    def sample(self, iteration: Callable, between: Callable, count: int, lead_in: int = lead_in) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for _ in range(lead_in):
            between()
            iteration()
        for start, stop in pairs:
            between()
            start.record()
            iteration()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]


class HostClock:
    """Wall-clock time of each iteration by perf_counter_ns, in ms: for work that runs on the CPU itself."""
    name = in_rounds = "perf_counter"
    lead_in = 0
    settle_ms = burst_ms = 0.0

    def sample(self, iteration: Callable, between: Callable, count: int, lead_in: int = lead_in) -> list[float]:
        samples = []
        for _ in range(count):
            between()
            start = time.perf_counter_ns()
            iteration()
            samples.append((time.perf_counter_ns() - start) / 1e6)
        return samples


def clock_for(device: torch.device | str) -> EventClock | HostClock:
    """The clock for work that runs on `device`."""
    return EventClock() if torch.device(device).type == "cuda" else HostClock()


def nothing() -> None:
    """What happens between two iterations when nothing must."""


def calibration(device: torch.device | str) -> dict[str, Callable]:
    """Work that no step changes, matmuls and a copy: how fast the machine is at that moment.

    The time of a step over theirs can be compared between days on which the clocks differ, and between two machines of
    one kind. On a GPU "gemm" is an FP16 matmul of 8192 cubed, "gemm float32" one in IEEE FP32 of 4096 cubed, for
    rows that multiply in it, and "copy" one of 512 MiB; on a CPU they are an FP32 matmul of 1024 cubed and a copy of 64
    MiB.
    """
    def matmul(side: int, dtype: torch.dtype) -> Callable:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        product = torch.empty_like(a)

        def multiply() -> None:
            before = torch.get_float32_matmul_precision()            # an environment may allow TF32
            torch.set_float32_matmul_precision("highest")
            torch.mm(a, b, out=product)
            torch.set_float32_matmul_precision(before)
        return multiply

    on_gpu = torch.device(device).type == "cuda"
    source = torch.ones(2**27 if on_gpu else 2**24, device=device)
    target = torch.empty_like(source)
    found = {"gemm": matmul(8192, torch.float16) if on_gpu else matmul(1024, torch.float32),
             "copy": lambda: target.copy_(source)}
    return found | {"gemm float32": matmul(4096, torch.float32)} if on_gpu else found


def measure(iteration: Callable, clock, between: Callable = nothing, rule: StopRule = StopRule(),
            progress: Callable[[int, float], None] | None = None,
            calibrations: dict[str, Callable] | None = None) -> Timing:
    """Time `iteration` until the median is known to `rule.precision`, or `rule.max_seconds` have been measured.

    `between` runs before each iteration, outside the timed region. `progress` gets (samples so far, their median).
    Each of `calibrations` is sampled before every chunk of samples, five times at the least in all.
    Looking at the interval repeatedly makes its 95 % somewhat optimistic: compare runs by `paired_ratio` instead.
    """
    others: dict[str, list[float]] = {name: [] for name in calibrations or {}}
    for work in (calibrations or {}).values():
        clock.sample(work, nothing, 1)                               # the first one touches its memory
    look = statistics.median(clock.sample(iteration, between, 1))
    warmed = 0.0
    while warmed < rule.warmup_seconds:
        samples = clock.sample(iteration, between, _count(rule.warmup_chunk, look))
        warmed += sum(samples) / 1e3
        previous, look = look, statistics.median(samples)
        if abs(look - previous) <= 0.01 * previous:
            break
    taken: list[float] = []
    seconds = 0.0
    while True:
        for name, found in others.items():
            found += clock.sample(calibrations[name], nothing, 1 if found else 5)
        if others and not clock.lead_in:                   # on a CPU: the calibrations have filled its caches
            clock.sample(iteration, between, 1)
        left = math.ceil((rule.max_seconds - seconds) * 1e3 / max(look, 1e-6))
        chunk = clock.sample(iteration, between, max(1, min(left, _count(rule.min_seconds / 4, look, at_least=8))))
        taken += chunk
        middle = statistics.median(taken)
        seconds += (sum(chunk) + clock.lead_in * middle) / 1e3
        settled = is_settled(taken, rule.precision)
        if progress:
            progress(len(taken), middle)
        enough = len(taken) >= rule.min_samples and seconds >= rule.min_seconds
        if (enough and settled) or seconds >= rule.max_seconds:
            return Timing(taken, settled, clock.name, others)


def is_settled(samples: list[float], precision: float = StopRule.precision) -> bool:
    """Whether the median is known to `precision`: the reach of its 95 % interval on either side, relative to it."""
    middle, (low, high) = statistics.median(samples), median_interval(samples)
    return max(high - middle, middle - low) <= precision * middle


def _count(seconds: float, iteration_ms: float, at_least: int = 1) -> int:
    """How many iterations fill `seconds`."""
    return max(at_least, min(1000, round(seconds * 1e3 / max(iteration_ms, 1e-6))))


def median_interval(samples: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median from order statistics: no distribution is assumed.

    Fewer than six samples bound no median at 95 %: the interval is then infinite.
    """
    ordered, n = sorted(samples), len(samples)
    if n < 6:
        return -math.inf, math.inf
    reach = 1.96 * math.sqrt(n) / 2
    low, high = math.floor(n / 2 - reach), math.ceil(n / 2 + reach)
    return ordered[max(0, low)], ordered[min(n - 1, high)]


def interleaved(iterations: dict, clock, rounds: int, between: dict | None = None, seed: int = 0,
                progress: Callable[[int], None] | None = None, expected: dict | None = None,
                behind: Callable | None = None) -> dict:
    """`rounds` samples in ms of each iteration, in a new random order every round: clocks and heat drift alike for all.

    `iterations` and `between` go from any key to a callable. Sample i of every key comes from round i, so that ratios
    can be paired. A GPU at its power cap runs a moment at the clocks that the work before left it, another's here: so
    there a sample is the median of some iterations behind `clock.settle_ms` of the same. `expected` holds the ms of an
    iteration by key, where that is known. `progress` gets the number of each round as it begins; `behind` gets that
    number and a key behind each of its samples.
    """
    order, shuffle, between, expected = list(iterations), random.Random(seed), between or {}, dict(expected or {})
    samples: dict = {name: [] for name in iterations}
    for number in range(rounds):
        if progress:
            progress(number)
        shuffle.shuffle(order)
        for name in order:
            work = iterations[name], between.get(name, nothing)
            if name not in expected:
                expected[name] = clock.sample(*work, 1)[0] if clock.settle_ms else math.inf
            samples[name].append(statistics.median(clock.sample(*work, *burst(clock, expected[name]))))
            if behind:
                behind(number, name)
    return samples


def burst(clock, ms: float) -> tuple[int, int]:
    """(timed iterations, untimed ones before them) of one interleaved sample of work that takes `ms`."""
    ms = max(ms, 1e-3)
    return max(1, min(100, int(clock.burst_ms / ms))), max(clock.lead_in, min(500, round(clock.settle_ms / ms)))


def paired_ratio(numerator: Iterable[float], denominator: Iterable[float], resamples: int = 2000,
                 seed: int = 0) -> tuple[float, float, float]:
    """Median of the per-round ratios and its 95 % bootstrap interval (ratio, low, high).

    The two are the same speed, as far as these samples can tell, when the interval holds 1.
    """
    ratios = torch.tensor([a / b for a, b in zip(numerator, denominator, strict=True)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(ratios), (resamples, len(ratios)), generator=generator)
    medians = ratios[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return ratios.quantile(0.5).item(), low, high


def enqueue_ms(iteration: Callable, between: Callable, budget_s: float = 0.5) -> float:
    """Median host time to enqueue one iteration on an idle GPU, in ms: what the GPU waits for where it is faster.

    Of ten iterations, or of as many, at least three, as begin within `budget_s`, behind three more.
    """
    for _ in range(3):
        between()
        iteration()
    torch.cuda.synchronize()
    times, since = [], time.perf_counter()
    while len(times) < 3 or (len(times) < 10 and time.perf_counter() - since < budget_s):
        between()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        iteration()
        times.append((time.perf_counter_ns() - start) / 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)
