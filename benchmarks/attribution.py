"""Where the milliseconds of an iteration go: profiled kernels by what they do, and the gaps between them.

Iterations are profiled as they are timed, in interleaved rounds, with a marker kernel before and behind each. The
timeline of one is the time between its markers; idle is the timeline less the union of its kernels' intervals. Between
two of them one is timed by the clock: what the kernels don't explain is told apart from what the profiler, or a GPU at
its power cap, changes from one round to another. On a CPU operators stand for kernels: an operator's own time, without
that of the operators it calls.
"""
import functools
import itertools
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from common import timing

# First match decides; what matches none is "residual and other". Kernel names as seen on Hopper with CUDA 13, those of
# torch.compile say which operations were fused: one that holds a LayerNorm or a GELU is counted there, with whatever
# casts and additions ride on it. On a CPU the names are operators.
CATEGORIES = {
    "attention": r"sdpa|flash_(fwd|bwd)|flash::|fmha|mem_eff|_attention|cudnn::fusion::|fused_attn",
    "GEMM": r"gemm|nvjet|splitKreduce|cutlass.*Kernel|^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$|mkldnn.*linear",
    "softmax and mask": r"softmax|masked_fill|triu|tril|dropout|BUnaryFunctor<.*MulFunctor",      # the scores' scaling
    "normalisation and activation": r"layer_?norm|GammaBeta|\bln_\w*(fwd|bwd)|normalization::|gelu",
    "casts and copies": r"^triton_[a-z]+_fused(__to_copy|_view|_clone|_permute|_cat)+_\d+$|_copy_kernel|Memcpy|CatArray"
                        r"|^aten::(_to_copy|to|copy_|contiguous|clone|cat)$|unary_kernel|transpose_(fusion|optimized)",
    "residual and other": r"",
}
OTHER, IDLE = "residual and other", "idle"
PARTS = (*CATEGORIES, IDLE)
_PATTERNS = {category: re.compile(pattern, re.IGNORECASE) for category, pattern in CATEGORIES.items()}
_MARKER = "spin_kernel"                              # what torch.cuda._sleep launches; no step does


@functools.cache                                     # names of hundreds of characters, each kernel's thousands of times
def category(name: str) -> str:
    """What a kernel (an operator on a CPU) does, by its name."""
    return next(category for category, pattern in _PATTERNS.items() if pattern.search(name))


def credit(intervals: Iterable[tuple[float, float, str]], start: float, end: float) -> dict[str, float]:
    """Time by part between `start` and `end`, from (start, end, name) of every kernel, all in one unit.

    Time that two kernels share is credited once, to the one that began first; what no kernel covers is idle.
    """
    parts, covered = dict.fromkeys(PARTS, 0.0), start
    for begin, finish, name in sorted(intervals):
        begin, finish = max(begin, covered), min(finish, end)
        if finish > begin:
            parts[category(name)] += finish - begin
            parts[IDLE] += begin - covered
            covered = finish
    parts[IDLE] += max(0.0, end - covered)
    return parts


@dataclass
class Profiled:
    """What was seen of one case under the profiler, in ms: pairs of iterations, one behind the other."""
    parts: list[dict[str, float]] = field(default_factory=list)            # of the profiled one
    clocked: list[float] = field(default_factory=list)                     # the other one, by the clock

    def middle(self) -> tuple[dict[str, float], float]:
        """(ms by part, ms by the clock): means over the middle three fifths of the pairs by length, the same for both.

        What was disturbed is left out, and the parts still add up.
        """
        pairs = sorted(zip(self.parts, self.clocked, strict=True), key=lambda pair: sum(pair[0].values()) + pair[1])
        kept = pairs[len(pairs) // 5:len(pairs) - len(pairs) // 5]
        return ({part: statistics.mean(parts[part] for parts, _ in kept) for part in PARTS},
                statistics.mean(clocked for _, clocked in kept))


def profiled(runs: dict, between: dict, expected: dict, device: torch.device, rounds: int, say: Callable[[str], None],
             seed: int = 0) -> dict[object, Profiled]:
    """`rounds` bursts of each of `runs` (key -> callable) under the profiler, interleaved; key -> what was seen.

    `between` (key -> callable) runs before each iteration; `expected` (key -> ms of one) tells how many fill a burst,
    up to a cap: the profiler must keep them all. `say` is told when they are over.
    Raises RuntimeError where the profiler did not see them all.
    """
    sampler = _Gpu() if device.type == "cuda" else _Cpu()
    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as profiler:
        timing.interleaved({key: (key, call) for key, call in runs.items()}, sampler, rounds, between, seed,
                           expected=expected)
    say("attributing")
    seen, ran = sampler.iterations(profiler), sum(len(taken) for _, taken in sampler.bursts)
    if len(seen) != ran:
        raise RuntimeError(f"the profiler saw {len(seen)} of {ran} iterations")
    by_key, rest = {key: Profiled() for key in runs}, iter(seen)
    for key, taken in sampler.bursts:
        by_key[key].parts += itertools.islice(rest, len(taken))
        by_key[key].clocked += taken
    return by_key


class _Gpu(timing.EventClock):
    """In the place of the clock: runs (key, iteration) by turns between two events and two marker kernels."""
    MOST = 120, 10                                   # iterations before them, and pairs: the profiler keeps all kernels
    burst_ms = 200.0                                 # of each of the two: their difference is a small one

    def __init__(self):
        self.bursts: list[tuple[object, list[float]]] = []                 # key, ms by events

    def sample(self, run: tuple[object, Callable], between: Callable, count: int, lead_in: int = 1) -> list[float]:
        key, iteration = run
        lead_in, count = min(lead_in, self.MOST[0]), min(count, self.MOST[1])
        for _ in range(lead_in):
            between()
            iteration()
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for number, (start, end) in enumerate(pairs):
            for profiled_now in (False, True) if number % 2 else (True, False):    # neither is always the second
                between()
                if profiled_now:
                    torch.cuda._sleep(1)
                    iteration()
                    torch.cuda._sleep(1)
                else:
                    start.record()
                    iteration()
                    end.record()
        torch.cuda.synchronize()
        taken = [start.elapsed_time(end) for start, end in pairs]
        self.bursts.append((key, taken))
        return taken

    def iterations(self, profiler) -> list[dict[str, float]]:
        """Milliseconds by part of every iteration, in the order they ran."""
        events = profiler.profiler.kineto_results.events()      # profiler.events() would take seconds to build a tree
        kernels = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events
                         if e.device_type() == DeviceType.CUDA)
        marks = [place for place, (_, _, name) in enumerate(kernels) if _MARKER in name]
        found = [credit(kernels[first + 1:last], kernels[first][1], kernels[last][0])
                 for first, last in zip(marks[::2], marks[1::2], strict=False)]
        return [{part: nanoseconds / 1e6 for part, nanoseconds in parts.items()} for parts in found]


class _Cpu(timing.HostClock):
    """In the place of the clock: runs (key, iteration) once by the clock, once in a named range of the profiler."""
    _RANGE = "one iteration"

    def __init__(self):
        self.bursts: list[tuple[object, list[float]]] = []                 # key, ms by the clock

    def sample(self, run: tuple[object, Callable], between: Callable, count: int, lead_in: int = 0) -> list[float]:
        key, iteration = run
        taken = super().sample(iteration, between, 1)
        between()
        with record_function(self._RANGE):
            iteration()
        self.bursts.append((key, taken))
        return taken

    def iterations(self, profiler) -> list[dict[str, float]]:
        ranges = (e for e in profiler.events() if e.name == self._RANGE)
        return [self._own_times(e) for e in sorted(ranges, key=lambda e: e.time_range.start)]

    def _own_times(self, whole) -> dict[str, float]:
        """An operator whose own name says nothing passes its time to the one that called it."""
        parts = dict.fromkeys(PARTS, 0.0)
        parts[IDLE] = whole.self_cpu_time_total / 1e3                      # Python between two operators
        todo = [(event, OTHER) for event in whole.cpu_children]
        while todo:
            event, caller = todo.pop()
            own = category(event.name)
            own = caller if own == OTHER else own
            parts[own] += event.self_cpu_time_total / 1e3
            todo += [(inner, own) for inner in event.cpu_children]
        return parts
