"""The limit of a row (its roofline): the block's work, a machine's peaks, and the time that follows.

The limit is the sum, over the operations that no implementation of the block can leave out, of
max(FLOPs / peak FLOP/s, bytes / peak bytes/s), each reading its inputs once and writing its outputs once.
Elementwise work that can ride on a matmul (bias, GELU, residual, casts) costs no pass here; a LayerNorm costs a pass of
its own, because a row must be complete before the matmul behind it can start.
"""
from dataclasses import dataclass

from .config import BlockConfig


@dataclass(frozen=True)
class Arithmetic:
    """What a block computes in, and how many bytes things have; its traits say so (`Traits.arithmetic`)."""
    matmul: str                # "float64", "float32", "tf32", "float16", "bfloat16" or "float8"
    attention: str
    parameter_bytes: int       # parameters, their gradients, x and y
    activation_bytes: int      # what travels between the matmuls
    operand_bytes: int         # the left operand of a matmul: 1 in FP8
    weight_bytes: int          # what a matmul reads of its weight: 1 where it was quantized before


@dataclass(frozen=True)
class Operation:
    """One unavoidable operation: its FLOPs, and the bytes it reads and writes at the least."""
    name: str
    kind: str                  # "matmul", "attention" or "memory"
    flops: float
    bytes: float


@dataclass(frozen=True)
class Peaks:
    """What a machine can do at most, by one yardstick: bytes/s of a copy (read plus written), and FLOP/s by name.

    "float16" is the rate of matmuls in that dtype. "float16 attention" and "float16 attention backward" are those of
    fused attention; where they are not known the matmuls' rate stands for them.
    """
    flops: dict[str, float]
    bandwidth: float


def flops(config: BlockConfig, backward: bool) -> float:
    """FLOPs of the block's matmuls, causal attention counted as the half it needs.

    Forward: 8 B S E^2 + 4 B S E F + 2 B S^2 E (for F = 4E: 24 B S E^2 + 2 B S^2 E); the backward is twice that more.
    """
    B, S, E, F = config.batch_size, config.seq_len, config.hidden_size, config.ffn_hidden_size
    forward = 8 * B * S * E**2 + 4 * B * S * E * F + 2 * B * S**2 * E
    return forward * (3 if backward else 1)


def operations(config: BlockConfig, a: Arithmetic, backward: bool) -> list[Operation]:
    """The unavoidable operations of one iteration."""
    N, E, F = config.tokens, config.hidden_size, config.ffn_hidden_size
    p, t = a.parameter_bytes, a.activation_bytes
    g, w = a.operand_bytes, a.weight_bytes
    attention = 2 * config.batch_size * config.seq_len**2 * E
    matmuls = {"qkv": (E, 3 * E), "attention projection": (E, E), "fc": (E, F), "mlp projection": (F, E)}
    # What a matmul reads and writes beyond its own weight: the residual joins, and leaves, the two projections.
    extra = {"qkv": 3 * E * t, "attention projection": 2 * E * min(p, t), "fc": F * g, "mlp projection": E * (t + p)}
    work = [Operation("layer norms", "memory", 0, N * E * (p + min(p, t) + 2 * g)),
            Operation("attention", "attention", attention, 4 * N * E * t)]
    for name, (inner, outer) in matmuls.items():
        moved = N * inner * g + inner * outer * w + N * extra[name]
        work.append(Operation(name, "matmul", 2 * N * inner * outer, moved))
    if backward:
        work.append(Operation("layer norms backward", "memory", 0, N * E * 2 * (2 * t + min(p, t))))
        work.append(Operation("attention backward", "attention", 2 * attention, 8 * N * E * t))
        for name, (inner, outer) in matmuls.items():
            for side, output in (("input", N * inner * t), ("weight", inner * outer * p)):
                # The weight once more, or a copy in the operands' dtype that the forward wrote.
                other = inner * outer * min(w, 2 * g) if side == "input" else N * inner * g
                work.append(Operation(f"{name}, {side} gradient", "matmul", 2 * N * inner * outer,
                                      N * outer * g + other + output))
    return work


def limit_ms(config: BlockConfig, a: Arithmetic, peaks: Peaks, backward: bool, names: tuple[str, ...] = ("",)) -> float:
    """The time in ms that one iteration must take at these peaks; of the operations whose names begin so alone."""
    seconds = 0.0
    for operation in operations(config, a, backward):
        if operation.name.startswith(names):
            seconds += max(_seconds(operation, a, peaks))
    return 1e3 * seconds


def ms_by_kind(config: BlockConfig, a: Arithmetic, peaks: Peaks, backward: bool) -> dict[str, float]:
    """The same of a whole iteration by kind of operation: "matmul", "attention" and "memory"."""
    times = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
    for operation in operations(config, a, backward):
        times[operation.kind] += 1e3 * max(_seconds(operation, a, peaks))
    return times


def flop_bound(config: BlockConfig, a: Arithmetic, peaks: Peaks, backward: bool) -> float:
    """The share, 0 to 1, of the matmuls' and attention's limit that the FLOPs set; the bytes set the rest."""
    set_by_flops = whole = 0.0
    for operation in operations(config, a, backward):
        if operation.kind == "memory":
            continue
        computing, moving = _seconds(operation, a, peaks)
        whole += max(computing, moving)
        if computing >= moving:
            set_by_flops += computing
    return set_by_flops / whole


def _seconds(operation: Operation, a: Arithmetic, peaks: Peaks) -> tuple[float, float]:
    """(to compute, to move its bytes), each at its peak."""
    moving = operation.bytes / peaks.bandwidth
    if operation.kind == "memory":
        return 0.0, moving
    if operation.kind == "matmul":
        rate = peaks.flops[a.matmul]
    else:
        fused = peaks.flops.get(f"{a.attention} {operation.name}")
        rate = peaks.flops[a.attention] if fused is None else fused
    return operation.flops / rate, moving
