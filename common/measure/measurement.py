"""One row: what is timed, its limit, in which state the machine was meanwhile, and which kernels ran."""
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..block import evidence
from ..block.config import SDPA
from ..block.workload import Workload
from ..outcome import Failed
from ..report.result import Result, Row
from ..runtime import compiler, energy, limit, machine, timing
from ..runtime.iteration import BOTH, Iteration
from ..runtime.peaks import BURST, DATA_SHEET, YARDSTICKS, MeasuredPeaks
from .subject import Subject

NOT_A_GPU = "CUDA graphs need a GPU"


@dataclass(frozen=True)
class Work:
    """What is timed for one row."""
    run: Callable
    between: Callable[[], None] = timing.nothing
    iteration: Iteration | None = None     # launched eagerly, of which nothing is looked at; None for a replay
    is_watched: bool = False               # something looks at its results in between

    @property
    def unwatched(self) -> "Work":
        """What a profiler and a power meter see of it: not what looks at its results in between."""
        if not self.is_watched:
            return self
        return Work(self.iteration.run, self.iteration.between) if self.iteration else Work(self.run)


def ready(subject: Subject, mode: str, launch: str, row: Row, alone: bool = False, watched: bool = True) -> Work | None:
    """What is timed for one row, warm; None, with the reason in the row, where that can't be.

    Where it is `watched`, the row gets its peak memory: that of the process where the work is `alone` in it, and else
    what an iteration adds to the parameters and inputs.
    """
    device = subject.inputs[0].device
    on_gpu = device.type == "cuda"
    if launch == "graph" and not on_gpu:
        row.reason = NOT_A_GPU
        return None
    if alone and on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def read_peak_memory() -> None:
        if alone:
            row.peak_bytes = machine.memory_peak(device)

    if launch == "graph":                                  # beside others its memory is the pool, for all of them
        replay, row.reason = subject.replay(mode, read_peak_memory)
        if replay is None:
            return None
        between = subject.between_replays(mode, replay)
        return Work(replay, between, is_watched=between is not timing.nothing)
    iteration = subject.iteration(mode)
    for _ in range(2):
        iteration.between()
        iteration.run()
    read_peak_memory()
    iteration.between()
    if watched and on_gpu and not alone:
        row.peak_bytes = _peak_memory(subject, iteration, device)
    return Work(iteration.run, iteration.between, iteration.plain or iteration, iteration.plain is not None)


def _peak_memory(subject: Subject, iteration: Iteration, device: torch.device) -> int:
    """Bytes of parameters, inputs and whatever an iteration adds at its peak: what it would need alone."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    iteration.run()
    peak = torch.cuda.max_memory_allocated(device) - before + subject.own_bytes
    iteration.between()
    return peak


def read_state(work: Work, row: Row, result: Result, device: torch.device, ms: float, metered: bool) -> None:
    """The machine's state while it does what takes `ms`, and where the row is `metered` the joules of that.

    On a GPU the work runs for 150 ms or three times: clocks follow it. Metered it runs for some three seconds. A run is
    throttled by what throttled any of its rows.
    """
    if device.type != "cuda":
        result.state = machine.state(device)
        return
    work = work.unwatched
    if metered:
        _steadily(device, work, row, ms)
    else:
        row.state = under_load(device, work, max(3, math.ceil(150 / ms)))
    throttled = {*result.state.get("throttled", ()), *row.state.get("throttled", ())}
    result.state = dict(row.state)
    if "throttled" in row.state:
        result.state["throttled"] = sorted(throttled)


def row_of(subject: Subject, mode: str) -> Row:
    """An empty one of that pass."""
    workload = subject.workload
    return Row(flops=workload.flops(mode), tokens=workload.tokens) if workload else Row()


def hold_against_limits(rows: Sequence[tuple[Row, Workload, str]], peaks: MeasuredPeaks) -> None:
    """Set the limits of (row, its work, pass) by every yardstick.

    Where a row passes its limit, the peaks came out too low. They are measured once more, and all rows are held again.
    """
    while True:
        beyond = []
        for row, workload, mode in rows:
            operations = list(workload.operations(mode))
            if not operations:
                continue
            yardsticks = peaks.by_yardstick(workload)
            for yardstick, known in yardsticks.items():
                row.limits[yardstick] = limit.ms_by_kind(operations, known)
            row.flop_bound = limit.flop_bound(operations, yardsticks[BURST])
            if row.beyond_its_limit:
                beyond.append(workload)
        measured_again = [peaks.again(workload) for workload in beyond]
        if not any(measured_again):
            return


def say_peaks(result: Result, peaks: MeasuredPeaks) -> None:
    """Put the peaks in words into a result, with the rows that pass what they allow."""
    for yardstick in YARDSTICKS:
        words = peaks.in_words(yardstick)
        beyond = []
        for (mode, launch), row in result.rows.items():
            if yardstick != DATA_SHEET and (row.percent_of(yardstick) or 0.0) > 100:
                beyond.append(f"{mode}, {launch}")
        if beyond:
            words += f"; measured twice, and too low for {' and '.join(beyond)}"
        result.peaks[yardstick] = words


def _steadily(device: torch.device, work: Work, row: Row, ms: float) -> None:
    """Run what takes `ms` for some three seconds without a pause: energy and machine state of `row`."""
    count = max(3, math.ceil(1e3 * energy.seconds_needed() / ms))

    def repeat(times: int) -> None:
        row.state = under_load(device, work, times)
    row.energy, row.energy_reason = energy.metered(device, repeat, count)
    if not row.state:                                      # there was nothing to meter
        row.state = under_load(device, work, 3)


def under_load(device: torch.device, work: Work, count: int) -> dict:
    """The machine's state late in `count` iterations on a GPU, with a fifth of them, or two, still to run.

    An idle GPU is never throttled, and its clocks need a moment to follow the work.
    """
    mostly_done = torch.cuda.Event()
    for number in range(count):
        if number == count - max(2, count // 5):
            mostly_done.record()
        work.between()
        work.run()
    mostly_done.synchronize()                              # the host is ahead by what the launch queue holds
    readings = machine.state(device)
    torch.cuda.synchronize(device)
    return readings


def see_kernels(subject: Subject, iteration: Iteration, mode: str, result: Result, trace: str | None = None) -> None:
    """See which kernels ran, and whether they prove what the traits of `result` claim.

    Of a compiled block also what it would launch, and take, without the compiler. `trace` names a file for the
    timeline.
    """
    device = subject.inputs[0].device

    def clean_iteration() -> None:
        iteration.between()
        iteration.run()

    try:
        events = evidence.observed(clean_iteration, device, trace)
    except OSError as error:
        raise Failed(f"--profile {trace}: {error.strerror}") from None
    claims = result.traits.claims(result.matmul, device, result.config.attention if result.config else SDPA)
    uncompiled = None
    if claims and compiler.is_compiled(subject.call):
        with torch.compiler.set_stance("force_eager"):
            uncompiled = len(evidence.observed(clean_iteration, device))
            if mode == BOTH and result.compilation and result.study == "step":
                result.compilation.uncompiled = _a_few_samples(iteration, device)
    iteration.between()
    kernels = Counter(event.name for event in events)
    seen = evidence.judge(kernels, claims, uncompiled, result.emulated)
    result.evidence[mode] = replace(seen, ms=evidence.ms_by_name(events))


def _a_few_samples(iteration: Iteration, device: torch.device) -> list[float]:
    """Ten, in ms; a single one where ten would take long."""
    clock = timing.clock_for(device)
    samples = clock.sample(iteration.run, iteration.between, 1)
    if samples[0] < 500:
        samples += clock.sample(iteration.run, iteration.between, 9)
    return samples
