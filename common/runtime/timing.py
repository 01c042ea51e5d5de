"""One measurement: warm-up, stop rule, clock.

A sample is one whole iteration, and every sample is kept. Nothing is flushed between samples: an iteration starts with
the caches as the one before left them (`CACHE_STATE`), as it does in training.
"""
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..block.precision import multiplying_float32_in

CACHE_STATE = "as the previous iteration left it"
_BEGAN = time.perf_counter()            # offsets of samples count from here: when this process imported its clock


def since_start() -> float:
    """Seconds since this process imported its clock; the offsets of samples are such."""
    return time.perf_counter() - _BEGAN


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
    """Samples in ms, in the order they were taken.

    `rounds` says of each sample in which round it was taken: between two rounds come other rows, or the calibrations.
    `offsets_s` says when it began, in seconds (`since_start`).
    """
    samples: list[float]
    settled: bool
    clock: str
    calibration: dict[str, list[float]] = field(default_factory=dict)      # name -> its samples, taken in between
    rounds: list[int] | None = None
    offsets_s: list[float] | None = None

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


Samples = tuple[list[float], list[float]]      # ms, and the offsets in seconds at which they began


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
        """The ms of `count` iterations."""
        return self.timed(iteration, between, count, lead_in)[0]

    def timed(self, iteration: Callable, between: Callable, count: int, lead_in: int = lead_in) -> Samples:
        """(ms, offset in seconds) of `count` iterations. The GPU may begin a little after the first one's offset."""
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for _ in range(lead_in):
            between()
            iteration()
        offset = since_start()
        for start, stop in pairs:
            between()
            start.record()
            iteration()
            stop.record()
        torch.cuda.synchronize()
        first, _ = pairs[0]
        offsets = [offset + first.elapsed_time(start) / 1e3 for start, _ in pairs]
        return [start.elapsed_time(stop) for start, stop in pairs], offsets

    def together(self, work: Callable, count: int, meanwhile: Callable[[], None]) -> float:
        """The ms of `count` repetitions with nothing in between; `meanwhile` is called while they run."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            work()
        stop.record()
        meanwhile()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)


class HostClock:
    """Wall-clock time of each iteration by perf_counter_ns, in ms: for work that runs on the CPU itself."""
    name = in_rounds = "perf_counter"
    lead_in = 0
    settle_ms = burst_ms = 0.0

    def sample(self, iteration: Callable, between: Callable, count: int, lead_in: int = lead_in) -> list[float]:
        """The ms of `count` iterations."""
        return self.timed(iteration, between, count, lead_in)[0]

    def timed(self, iteration: Callable, between: Callable, count: int, lead_in: int = lead_in) -> Samples:
        """(ms, offset in seconds) of `count` iterations."""
        samples, offsets = [], []
        for _ in range(count):
            between()
            offsets.append(since_start())
            start = time.perf_counter_ns()
            iteration()
            samples.append((time.perf_counter_ns() - start) / 1e6)
        return samples, offsets

    def together(self, work: Callable, count: int, meanwhile: Callable[[], None]) -> float:
        """The ms of `count` repetitions with nothing in between; `meanwhile` is called behind them."""
        start = time.perf_counter_ns()
        for _ in range(count):
            work()
        milliseconds = (time.perf_counter_ns() - start) / 1e6
        meanwhile()
        return milliseconds


Clock = EventClock | HostClock


def clock_for(device: torch.device | str) -> Clock:
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
            with multiplying_float32_in("highest"):                  # an environment may allow TF32
                torch.mm(a, b, out=product)
        return multiply

    on_gpu = torch.device(device).type == "cuda"
    source = torch.ones(2**27 if on_gpu else 2**24, device=device)
    target = torch.empty_like(source)
    work: dict[str, Callable] = {"copy": lambda: target.copy_(source)}
    if on_gpu:
        return {"gemm": matmul(8192, torch.float16)} | work | {"gemm float32": matmul(4096, torch.float32)}
    return {"gemm": matmul(1024, torch.float32)} | work


def copying_for(device: torch.device | str, milliseconds: float) -> Callable[[], None]:
    """Copies that take that long. A copy is bound by memory, whose clock stays when a GPU's power is short."""
    source = torch.ones(2**27 if torch.device(device).type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    whole_ms = statistics.median(clock_for(device).sample(lambda: target.copy_(source), nothing, 5))
    repeats = math.ceil(milliseconds / whole_ms)
    elements = max(1, round(source.numel() * milliseconds / (whole_ms * repeats)))

    def copy() -> None:
        for _ in range(repeats):
            target[:elements].copy_(source[:elements])
    return copy


def measure(iteration: Callable, clock: Clock, between: Callable = nothing, rule: StopRule = StopRule(),
            progress: Callable[[int, float], None] | None = None,
            calibrations: dict[str, Callable] | None = None) -> Timing:
    """Time `iteration` until the median is known to `rule.precision`, or `rule.max_seconds` have been measured.

    `between` runs before each iteration, outside the timed region. `progress` gets (samples so far, their median).
    Each of `calibrations` is sampled before every chunk of samples, five times at the least in all.
    Looking at the interval repeatedly makes its 95 % somewhat optimistic: compare runs by `rounds.paired_ratio`.
    """
    others = calibrations or {}
    calibrated: dict[str, list[float]] = {name: [] for name in others}
    for work in others.values():
        clock.sample(work, nothing, 1)                               # the first one touches its memory
    look = _warm_up(iteration, clock, between, rule)
    taken: list[float] = []
    rounds: list[int] = []
    offsets: list[float] = []
    seconds, number = 0.0, 0
    while True:
        for name, work in others.items():
            calibrated[name] += clock.sample(work, nothing, 1 if number else 5)
        if others and not clock.lead_in:                   # on a CPU: the calibrations have filled its caches
            clock.sample(iteration, between, 1)
        left = math.ceil((rule.max_seconds - seconds) * 1e3 / max(look, 1e-6))
        count = max(1, min(left, _count(rule.min_seconds / 4, look, at_least=8)))
        chunk, began = clock.timed(iteration, between, count)
        taken += chunk
        offsets += began
        rounds += [number] * len(chunk)
        number += 1
        middle = statistics.median(taken)
        seconds += (sum(chunk) + clock.lead_in * middle) / 1e3
        settled = is_settled(taken, rule.precision)
        if progress:
            progress(len(taken), middle)
        enough = len(taken) >= rule.min_samples and seconds >= rule.min_seconds
        if (enough and settled) or seconds >= rule.max_seconds:
            return Timing(taken, settled, clock.name, calibrated, rounds, offsets)


def _warm_up(iteration: Callable, clock: Clock, between: Callable, rule: StopRule) -> float:
    """Run until two looks at the median agree within 1 %, or `rule.warmup_seconds` are over; the last look, in ms."""
    look = statistics.median(clock.sample(iteration, between, 1))
    warmed = 0.0
    while warmed < rule.warmup_seconds:
        samples = clock.sample(iteration, between, _count(rule.warmup_chunk, look))
        warmed += sum(samples) / 1e3
        previous, look = look, statistics.median(samples)
        if abs(look - previous) <= 0.01 * previous:
            break
    return look


def is_settled(samples: list[float], precision: float = StopRule.precision) -> bool:
    """Whether the median is known to `precision`: the reach of its 95 % interval on either side, relative to it."""
    middle = statistics.median(samples)
    low, high = median_interval(samples)
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


def enqueue_ms(iteration: Callable, between: Callable, budget_s: float = 1.0) -> float:
    """Median host time to enqueue one iteration on an idle GPU, in ms: what the GPU waits for where it is faster.

    One runs before. Then ten are timed, or as many as begin within `budget_s`.
    """
    between()
    iteration()
    torch.cuda.synchronize()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 10 and time.perf_counter() - began < budget_s:
        between()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        iteration()
        times.append((time.perf_counter_ns() - start) / 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)
