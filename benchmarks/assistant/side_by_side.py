"""Two works that a finding turns on, timed in the same rounds while a model is read."""
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.assistant.program import Program
from benchmarks.measure.calls import Inputs
from benchmarks.measure.modules import subject_of
from benchmarks.measure.observing import Work
from common.block.config import dtype_name
from common.runtime import replay, rounds, timing
from common.runtime.iteration import BOTH, FORWARD, Iteration

Ratio = tuple[float, float, float]         # how many times as fast, and its 95 % interval
WORTH_IT = 1.02                            # of the lower end of that
ROUNDS, MILLISECONDS = 7, 20.0             # of each, and for each sample


def times_as_fast(before: Iteration, after: Iteration, device: torch.device) -> Ratio:
    """How many times as fast the other is."""
    return rounds.paired_ratio(*milliseconds(before, after, device))


def gain_on_device(before: Iteration, after: Iteration, device: torch.device) -> Ratio:
    """How many times as fast the other piece of a model is, without what the host takes to launch it.

    On a GPU both are replayed as CUDA graphs: launched alone, a small piece waits for the host, which in a model runs
    ahead. Where one of them can't be captured both are launched as they are.
    """
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            before, after = _replayed(before), _replayed(after)
    return times_as_fast(before, after, device)


def dtypes_to_time(dtype: torch.dtype) -> list[torch.dtype]:
    """Its own, and of FP32 also BF16, which autocast would use."""
    return [dtype, torch.bfloat16] if dtype == torch.float32 else [dtype]


def in_words(gains: Mapping[torch.dtype, Ratio]) -> str:
    """"1.00 [0.99, 1.01] (float32) and 1.50 [1.40, 1.60] (bfloat16) times as fast here"."""
    each = [f"{gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}] ({dtype_name(dtype)})" for dtype, gain in gains.items()]
    return f"{' and '.join(each)} times as fast here"


def _replayed(iteration: Iteration) -> Iteration:
    """The same as a CUDA graph. Raises RuntimeError where it can't be captured."""
    call, written = replay.capture(iteration)
    replayed = replay.Replay(call, iteration, written)

    def run() -> list[Tensor]:
        replayed()
        return written
    return Iteration(run, timing.nothing, iteration.reads, iteration.receives)


def milliseconds(before: Iteration, after: Iteration, device: torch.device) -> tuple[list[float], list[float]]:
    """The samples of both; those at one place come from one round."""
    works = {"before": before, "after": after}
    clock = timing.clock_for(device)
    if isinstance(clock, timing.EventClock):
        clock.settle_ms = clock.burst_ms = MILLISECONDS
    samples = rounds.interleaved({name: work.run for name, work in works.items()}, clock, ROUNDS,
                                 {name: work.between for name, work in works.items()})
    return samples["before"][0], samples["after"][0]


def compiled_work(call: Callable, program: Program, every: Sequence[Inputs]) -> tuple[Iteration, float]:
    """(an iteration on all of these inputs in turn, the seconds of its first: `call` is compiled in that)."""
    mode = FORWARD if program.is_inference or not program.trace.trains else BOTH
    began = time.perf_counter()
    each = [subject_of(call, Work(inputs, cotangents=1, forward_only=program.is_inference), (0.0, 0.0)).iteration(mode)
            for inputs in every]

    def run() -> list[Tensor]:
        for iteration in each:
            iteration.run()
            iteration.between()
        return []
    run()
    return Iteration(run, each[0].between, [], {}), time.perf_counter() - began


def pays(gain: Ratio) -> bool:
    """Whether it is worth the work: so much faster, as far as the samples can tell."""
    return gain[1] >= WORTH_IT
