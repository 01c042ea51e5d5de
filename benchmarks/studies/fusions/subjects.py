"""What the study times: an operation on so many copies of its tensors that no cache holds them, and a plain copy."""
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.kernels.operations import Experiment, least_bytes, least_flops
from common.block.config import dtype_name
from common.block.workload import ATTENTION, COPY, Operation, Workload
from common.measure.subject import Subject
from common.report.record import Record, record
from common.report.result import Result
from common.runtime import iteration, replay, timing
from common.runtime.iteration import BACKWARD, FORWARD, Iteration
from common.runtime.peaks import BURST

MOST_COPIES = 64                       # of an operation's tensors: small ones stay in a cache all the same
BEYOND = 4                             # times the last cache, which keeps some of what is only a little larger than it


class OperationSubject(Subject):
    """One level of an operation on `inputs`, of which x is the first; forward and backward apart."""

    def __init__(self, call: Callable, experiment: Experiment, inputs: Sequence[Tensor], seed: int,
                 has_backward: bool = True):
        self.x = inputs[0]
        super().__init__(call, inputs, [], {}, gates=(1e-2, 1e-2), workload=workload_of(experiment, self.x))
        self.experiment, self.seed, self.has_backward = experiment, seed, has_backward
        self.cache = math.inf                              # bytes; of a CPU's caches nothing is known
        if self.x.is_cuda:
            self.cache = torch.cuda.get_device_properties(self.x.device).L2_cache_size

    def has(self, mode: str) -> bool:
        """Some have no backward."""
        return mode != BACKWARD or self.has_backward

    def least_bytes(self, mode: str) -> float:
        """What one call must read and write."""
        return least_bytes(self.experiment, mode, self.x)

    def calls(self, mode: str) -> int:
        """One on each copy of its tensors."""
        if not self.x.is_cuda:
            return 1
        return min(MOST_COPIES, math.ceil(BEYOND * self.cache / self.least_bytes(mode)))

    def is_beyond_the_cache(self, mode: str) -> bool:
        """Whether no cache holds these copies."""
        return self.calls(mode) * self.least_bytes(mode) >= BEYOND * self.cache

    def iteration(self, mode: str) -> Iteration:
        """On copies of its own."""
        copies = [list(map(copied, self.inputs)) for _ in range(self.calls(mode))]
        return iteration.of_copies(self.call, copies, mode, self.seed)

    def proof(self) -> replay.Proof:
        """A replay must follow other values of what it reads."""
        return replay.Proof(*self.gates, change=lambda tensor: tensor.mul_(-0.5))

    def replay(self, mode: str, captured: Callable[[], None] = lambda: None) -> tuple[Callable | None, str]:
        """All of it is made on the stream of the capture: a backward runs where its forward did."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            iterate = self.iteration(mode)
        return replay.verified(iterate, self.proof(), stream, captured)


def workload_of(experiment: Experiment, x: Tensor) -> Workload | None:
    """Attention's FLOPs, at the matmul rate of a GPU; the limit of all others is the copy's time, see `finish`."""
    if not (x.is_cuda and least_flops(experiment, FORWARD, x)):
        return None
    dtype = dtype_name(x.dtype)
    forward, backward = (Operation(mode, ATTENTION, least_flops(experiment, mode, x), 0.0, dtype)
                         for mode in (FORWARD, BACKWARD))
    return Workload(dtype, (forward,), (backward,))


def copied(tensor: Tensor) -> Tensor:
    """Another leaf with the same values, taking a gradient where the first does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class CopySubject(OperationSubject):
    """A copy of as many bytes as the operation moves: of a backward's bytes it is a forward, too."""

    def iteration(self, mode: str) -> Iteration:
        """On copies of what takes as many bytes to copy."""
        elements = round(self.least_bytes(mode) / 2 / self.x.dtype.itemsize)
        sources = [[torch.ones(elements, dtype=self.x.dtype, device=self.x.device)] for _ in range(self.calls(mode))]
        return iteration.of_copies(self.call, sources, FORWARD, self.seed)


def copying() -> Callable:
    """x -> a copy of it, in the same memory at every call: to allocate can take a CPU longer than to copy."""
    target_of = functools.cache(torch.empty_like)
    return lambda source: target_of(source).copy_(source)


def clock_for(experiment: Experiment, device: torch.device) -> timing.Clock:
    """In shorter stretches where memory is the limit: such work is not expected to reach a GPU's power cap."""
    clock = timing.clock_for(device)
    if experiment.shape != "heads":
        clock.settle_ms, clock.burst_ms = clock.settle_ms / 5, clock.burst_ms / 10
    return clock


def finish(timed: list[tuple[Result, Subject]], mode: str) -> list[Record]:
    """Hold all levels against the copy, and give the records of their rates."""
    rows = [(result, subject, launch, row) for result, subject in timed for (of, launch), row in result.rows.items()
            if of == mode and row.median]
    copied = [row.median for result, _, _, row in rows if result.variant["level"] == COPY]
    records = []
    for result, subject, launch, row in rows:
        assert isinstance(subject, OperationSubject) and row.median
        if copied and subject.is_beyond_the_cache(mode) and result.variant["level"] != COPY:
            row.limits[BURST] = {COPY: min(filter(None, copied))}
        moved, flops = subject.least_bytes(mode), least_flops(subject.experiment, mode, subject.x)
        unit, rate = ("TFLOP/s", flops / row.median / 1e9) if flops else ("GB/s", moved / row.median / 1e6)
        records.append(record(result, "work rate", unit, [rate], mode, launch, bytes=moved, flops=flops,
                              copies=subject.calls(mode)))
    return records
