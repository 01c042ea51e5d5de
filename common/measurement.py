"""One row of a card: how it is timed, in which state the machine was meanwhile, and which kernels ran."""
import math
from collections.abc import Callable, Sequence

import torch

from . import compiler, energy, evidence, limit, machine, timing
from .iteration import BOTH, Iteration
from .outcome import Failed
from .peaks import BURST, MeasuredPeaks
from .result import Result, Row
from .subject import Subject
from .workload import Workload

NOT_A_GPU = "CUDA graphs need a GPU"


def time_row(subject: Subject, mode: str, launch: str, row: Row, result: Result, rule: timing.StopRule,
             progress: Callable[[int, float], None] | None = None) -> None:
    """Fill `row` with samples, or with the reason why there are none."""
    device = subject.inputs[0].device
    on_gpu = device.type == "cuda"
    if launch == "graph" and not on_gpu:
        row.reason = NOT_A_GPU
        return
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def read_peak_memory() -> None:
        row.peak_bytes = machine.memory_peak(device)

    iteration = subject.iteration(mode)
    run, between = iteration.run, iteration.between
    if launch == "graph":
        replay, row.reason = subject.replay(mode, read_peak_memory)
        if replay is None:
            return
        run, between = replay, timing.nothing
    for _ in range(2):
        between()
        run()
    if launch == "eager":
        read_peak_memory()
    with compiler.compiled_for_good(subject.call):
        row.timing = timing.measure(run, timing.clock_for(device), between, rule, progress,
                                    timing.calibration(device))
    if on_gpu:
        steadily(device, run, between, row, row.timing.median)
        throttled = {*result.state.get("throttled", ()), *row.state.get("throttled", ())}
        result.state = dict(row.state)
        if "throttled" in row.state:
            result.state["throttled"] = sorted(throttled)
        if launch == "eager":
            row.enqueue_ms = timing.enqueue_ms(run, between)
    between()


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


def steadily(device: torch.device, run: Callable, between: Callable, row: Row, ms: float) -> None:
    """Run what takes `ms` for a second or two without a pause: energy and machine state of `row`."""
    count = max(3, math.ceil(1e3 * energy.seconds_needed() / ms))

    def work() -> None:
        row.state = under_load(device, run, between, count)
    row.energy, row.energy_reason = energy.metered(device, work, count)
    if not row.state:                                      # there was nothing to meter
        row.state = under_load(device, run, between, 3)


def under_load(device: torch.device, run: Callable, between: Callable, count: int) -> dict:
    """The machine's state late in `count` iterations, with a fifth of them, or two, still to run.

    An idle GPU is never throttled, and its clocks need a moment to follow the work.
    """
    mostly_done = None
    for number in range(count):
        if number == count - max(2, count // 5) and device.type == "cuda":
            mostly_done = torch.cuda.Event()
            mostly_done.record()
        between()
        run()
    if mostly_done:
        mostly_done.synchronize()                          # the host is ahead by what the launch queue holds
    readings = machine.state(device)
    if device.type == "cuda":
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
        kernels = evidence.observe(clean_iteration, device, trace)
    except OSError as error:
        raise Failed(f"--profile {trace}: {error.strerror}") from None
    claims = result.traits.claims(result.matmul, device)
    uncompiled = None
    if claims and compiler.is_compiled(subject.call):
        with torch.compiler.set_stance("force_eager"):
            uncompiled = sum(evidence.observe(clean_iteration, device).values())
            if mode == BOTH and result.compilation and result.study == "step":
                result.compilation.uncompiled = _a_few_samples(iteration, device)
    iteration.between()
    result.evidence[mode] = evidence.judge(kernels, claims, uncompiled, result.emulated)


def _a_few_samples(iteration: Iteration, device: torch.device) -> list[float]:
    """Ten, in ms; a single one where ten would take long."""
    clock = timing.clock_for(device)
    samples = clock.sample(iteration.run, iteration.between, 1)
    if samples[0] < 500:
        samples += clock.sample(iteration.run, iteration.between, 9)
    return samples
