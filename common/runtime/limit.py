"""The limit of a row (its roofline): the work, a machine's peaks, and the time that follows.

The limit is the sum, over the operations that no implementation can leave out, of
max(FLOPs / peak FLOP/s, bytes / peak bytes/s), each reading its inputs once and writing its outputs once.
"""
from collections.abc import Iterable
from dataclasses import dataclass

from ..block.workload import KINDS, MEMORY, Operation


@dataclass(frozen=True)
class Peaks:
    """What a machine can do at most, by one yardstick: bytes/s of a copy (read plus written), and FLOP/s by name.

    "float16" is the rate of matmuls in that dtype. "float16 attention" and "float16 attention backward" are those of
    fused attention; where they are not known the matmuls' rate stands for them.
    """
    flops: dict[str, float]
    bandwidth: float


def ms_by_kind(operations: Iterable[Operation], peaks: Peaks) -> dict[str, float]:
    """The time in ms that these must take at these peaks, by kind of operation."""
    times = dict.fromkeys(KINDS, 0.0)
    for operation in operations:
        times[operation.kind] += 1e3 * max(_seconds(operation, peaks))
    return times


def flop_bound(operations: Iterable[Operation], peaks: Peaks) -> float:
    """The share, 0 to 1, of the matmuls' and attention's limit that the FLOPs set; the bytes set the rest."""
    set_by_flops = whole = 0.0
    for operation in operations:
        if operation.kind == MEMORY:
            continue
        computing, moving = _seconds(operation, peaks)
        whole += max(computing, moving)
        if computing >= moving:
            set_by_flops += computing
    return set_by_flops / whole if whole else 0.0


def _seconds(operation: Operation, peaks: Peaks) -> tuple[float, float]:
    """(to compute, to move its bytes), each at its peak."""
    moving = operation.bytes / peaks.bandwidth
    if operation.kind == MEMORY:
        return 0.0, moving
    rate = peaks.flops.get(operation.rate, peaks.flops.get(operation.arithmetic))
    assert rate, f"no peak is known of {operation.arithmetic}"
    return operation.flops / rate, moving
