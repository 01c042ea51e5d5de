"""Where the milliseconds of an iteration go: profiled kernels by what they do, and the gaps between them.

Right behind a timed sample, on a machine in the state it was timed in, a few more iterations run under the profiler,
every other one with a marker kernel before and behind it. The timeline of one is the time between its markers; idle is
the timeline less the union of its kernels' intervals. The others are timed by the clock, so that what the kernels don't
explain is distinguished from what the profiler costs. On a CPU operators stand for kernels: an operator's own time,
without that of the operators it calls.
"""
import functools
import operator
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import profile, record_function

from ..outcome import in_a_line
from ..report.record import PARTS
from ..runtime import rounds, timing

# First match decides; what matches none is "residual and other". Kernel names as seen on Hopper with CUDA 13, those of
# torch.compile say which operations were fused: one that holds a LayerNorm or a GELU is counted there, with whatever
# casts and additions ride on it. It names attention too, where it fuses what stands beside it: only a template of its
# own (triton_tem) attends, multiplies or convolves. On a CPU the names are operators.
NO_FUSION_BY_INDUCTOR = r"^(?!triton_(poi|red|per)_).*"
CATEGORIES = {
    "attention": NO_FUSION_BY_INDUCTOR + r"(sdpa|flash_(fwd|bwd)|flash::|fmha|mem_eff|_attention|cudnn::fusion::"
                                         r"|fused_attn|\battention_(forward|backward))",
    "GEMM": r"gem[mv]|nvjet|splitKreduce|cutlass.*Kernel|^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$|mkldnn.*linear"
            r"|^triton_(tem_fused\w*_|)(add|b|badd)?mm_",
    "softmax and mask": r"softmax|masked_fill|triu|tril|dropout|BUnaryFunctor<.*MulFunctor",      # the scores' scaling
    "normalisation and activation": r"layer_?norm|GammaBeta|\bln_\w*(fwd|bwd)|normalization::|gelu",
    "casts and copies": r"^triton_[a-z]+_fused(__to_copy|_view|_clone|_permute|_cat)+_\d+$|_copy_kernel|Memcpy|CatArray"
                        r"|^aten::(_to_copy|to|copy_|contiguous|clone|cat)$|unary_kernel|transpose_(fusion|optimized)",
    "residual and other": r"",
}
OTHER, IDLE = "residual and other", "idle"
assert (*CATEGORIES, IDLE) == PARTS                  # what records hold
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


Pair = tuple[dict[str, float], float]     # (ms by part of an iteration between markers, ms by the clock of another)


class Profiled:
    """What the profiler saw of the cases of one pass: behind some of their samples a burst of pairs of iterations."""

    def __init__(self, device: torch.device):
        self._burst: type[GpuBurst] | type[CpuBurst] = GpuBurst if device.type == "cuda" else CpuBurst
        self._bursts: dict[Hashable, list[tuple[int, GpuBurst | CpuBurst]]] = {}
        self._unseen: dict[Hashable, str] = {}

    def burst(self, key: Hashable, number: int, iteration: Callable, between: Callable, expected_ms: float) -> None:
        """Run one behind sample `number` of the case, whose iterations take `expected_ms`; `between` runs before each.

        Where the profiler fails the case is not profiled again, and is timed all the same.
        """
        if key in self._unseen:
            return
        try:
            burst = self._burst(iteration, between, expected_ms, number)
        except RuntimeError as error:
            self._unseen[key] = f"not profiled any further: {in_a_line(error)}"
        else:
            self._bursts.setdefault(key, []).append((number, burst))

    def fields(self, key: Hashable, samples: list[float]) -> dict[str, Any]:
        """What a record holds of a case: `middle` of its bursts, how many there were, why some were not seen.

        To take them apart takes the host a while, in which a GPU would idle: so it is done after all is timed.
        """
        bursts, timed = [], []
        for number, burst in self._bursts.pop(key, ()):
            try:
                bursts.append(burst.pairs())
                timed.append(samples[number])
            except RuntimeError as error:
                self._unseen[key] = str(error)
        fields: dict[str, Any] = {}
        if key in self._unseen:
            fields["reason"] = self._unseen[key]
        if bursts:
            parts, clocked_ms, timed_ms = middle(bursts, timed)
            fields |= {"parts": parts, "clocked": clocked_ms, "timed": timed_ms, "rounds": len(bursts)}
        return fields


def middle(bursts: Sequence[list[Pair]], timed: Sequence[float]) -> tuple[dict[str, float], float, float]:
    """(ms by part of the bursts, ms of the bursts by the clock, ms of the samples before them by the clock).

    Means over the middle three fifths, by length, of the pairs of a burst and then of the bursts, the same for all
    three: what was disturbed is left out, the parts add up, and what differs from round to round differs for all.
    """
    of_bursts: list[tuple[dict[str, float], tuple[float, ...]]] = []
    for pairs, timed_ms in zip(bursts, timed, strict=True):
        parts, (clocked_ms,) = _middle([(parts, (clocked,)) for parts, clocked in pairs])
        of_bursts.append((parts, (clocked_ms, timed_ms)))
    parts, (clocked_ms, timed_ms) = _middle(of_bursts)
    return parts, clocked_ms, timed_ms


def _middle(observed: list[tuple[dict[str, float], tuple[float, ...]]]) -> tuple[dict[str, float], list[float]]:
    """Means of the middle three fifths of what was observed, which are ordered by the sum of their times."""
    ordered = sorted(observed, key=lambda observation: sum(observation[0].values()) + sum(observation[1]))
    fifth = len(ordered) // 5
    kept = ordered[fifth:len(ordered) - fifth]
    of_parts, of_clocks = zip(*kept, strict=True)
    parts = {part: statistics.mean(map(operator.itemgetter(part), of_parts)) for part in PARTS}
    times = [statistics.mean(each) for each in zip(*of_clocks, strict=True)]
    return parts, times


def gpu_intervals(profiler: profile) -> list[tuple[int, int, str]]:
    """(begin, end, name) of all that ran on the GPU, in nanoseconds and in order."""
    assert profiler.kineto_results
    events = profiler.kineto_results.events()              # profiler.function_events builds a tree of them: slow
    return sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events
                  if e.device_type() == DeviceType.CUDA)


class GpuBurst:
    """Pairs of iterations that ran under the profiler: one between two events, one between two marker kernels.

    Warm up as for timing, then profile for at most as long, so that the clocks match. There is always one pair.
    """
    MOST = 120, 10                                   # iterations before them, and pairs: the profiler keeps all kernels

    def __init__(self, iteration: Callable, between: Callable, expected_ms: float, number: int):
        timed, lead_in = rounds.burst(timing.EventClock(), expected_ms)
        lead_in, count = min(lead_in, self.MOST[0]), max(1, min(timed // 2, self.MOST[1]))
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        with profile(use_cpu=False, use_device="cuda", use_kineto=True) as self._profiler:
            for _ in range(lead_in):
                between()
                iteration()
            for pair, (start, end) in enumerate(events, number):        # neither is always the second of its pair, in
                for marked in (False, True) if pair % 2 else (True, False):     # bursts of a single one either
                    between()
                    if marked:
                        torch.cuda._sleep(1)
                        iteration()
                        torch.cuda._sleep(1)
                    else:
                        start.record()
                        iteration()
                        end.record()
            torch.cuda.synchronize()
        self._clocked = [start.elapsed_time(end) for start, end in events]

    def pairs(self) -> list[Pair]:
        """What was seen, pair by pair. Raises RuntimeError where the profiler did not see all of it."""
        kernels = gpu_intervals(self._profiler)
        marks = [place for place, (_, _, name) in enumerate(kernels) if _MARKER in name]
        if len(marks) != 2 * len(self._clocked):
            raise RuntimeError(f"the profiler saw {len(marks) // 2} of {len(self._clocked)} iterations")
        pairs = []
        for first, last, clocked_ms in zip(marks[::2], marks[1::2], self._clocked, strict=True):
            nanoseconds = credit(kernels[first + 1:last], kernels[first][1], kernels[last][0])
            pairs.append(({part: time / 1e6 for part, time in nanoseconds.items()}, clocked_ms))
        return pairs


class CpuBurst:
    """A pair of iterations that ran under the profiler: one by the clock, one in a named range."""
    _RANGE = "one iteration"

    def __init__(self, iteration: Callable, between: Callable, expected_ms: float, number: int):
        with profile() as self._profiler:
            self._clocked = timing.HostClock().sample(iteration, between, 1)
            between()
            with record_function(self._RANGE):
                iteration()

    def pairs(self) -> list[Pair]:
        """What was seen, pair by pair."""
        ranges = [e for e in self._profiler.function_events if e.name == self._RANGE]
        return [(self._own_times(e), ms) for e, ms in zip(ranges, self._clocked, strict=True)]

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
