"""The work in a block, this machine's measured peaks, and the time that the work must take: a row's limit.

The limit is the sum, over the operations that no implementation of the block can leave out, of
max(FLOPs / peak FLOP/s, bytes / peak bytes/s), each reading its inputs once and writing its outputs once.
Elementwise work that can ride on a matmul (bias, GELU, residual, casts) costs no pass here; a LayerNorm costs a pass of
its own, because a row must be complete before the matmul behind it can start.
"""
import time
from dataclasses import dataclass

import torch

from .config import BlockConfig
from .timing import clock_for, nothing


@dataclass(frozen=True)
class Arithmetic:
    """What the step computes in, and how many bytes things have."""
    matmul: str                # "float32", "tf32", "float16", "bfloat16" or "float8"
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
    """Measured on this machine in this run: FLOP/s by dtype name, and bytes/s of a copy (read plus written)."""
    flops: dict[str, float]
    bandwidth: float


def arithmetic(config: BlockConfig, step: int, parameter_dtype: torch.dtype, device: torch.device) -> Arithmetic:
    """What step `step` computes in, from its place on the ladder."""
    mixed = step > 0 and config.amp_dtype is not None and parameter_dtype != torch.float64
    dtype = config.amp_dtype if mixed and parameter_dtype == torch.float32 else parameter_dtype
    name = str(dtype).removeprefix("torch.")
    if name == "float32" and step > 0 and device.type == "cuda" and torch.cuda.is_tf32_supported():
        name = "tf32"                                          # older GPUs ignore the switch
    fp8 = step == 4 and mixed
    return Arithmetic(matmul="float8" if fp8 else name, attention="float8" if fp8 and config.fp8_attention else name,
                      parameter_bytes=parameter_dtype.itemsize, activation_bytes=dtype.itemsize,
                      operand_bytes=1 if fp8 else dtype.itemsize,
                      weight_bytes=1 if fp8 and config.fp8_weights != "per-call" else parameter_dtype.itemsize)


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
    p, t, g, w = a.parameter_bytes, a.activation_bytes, a.operand_bytes, a.weight_bytes
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
    rates = {"matmul": peaks.flops[a.matmul], "attention": peaks.flops[a.attention], "memory": float("inf")}
    return 1e3 * sum(max(o.flops / rates[o.kind], o.bytes / peaks.bandwidth) for o in operations(config, a, backward)
                     if o.name.startswith(names))


def flop_bound(config: BlockConfig, a: Arithmetic, peaks: Peaks, backward: bool) -> float:
    """The share, 0 to 1, of the matmuls' and attention's limit that the FLOPs set; the bytes set the rest."""
    rates = {"matmul": peaks.flops[a.matmul], "attention": peaks.flops[a.attention]}
    sides = [(o.flops / rates[o.kind], o.bytes / peaks.bandwidth) for o in operations(config, a, backward)
             if o.kind in rates]
    return sum(work for work, moved in sides if work >= moved) / sum(max(pair) for pair in sides)


def measure_peaks(config: BlockConfig, a: Arithmetic, device: torch.device, known: Peaks = Peaks({}, 0.0)) -> Peaks:
    """The best matmul rate per dtype over the block's own shapes and a large square, and the copy bandwidth.

    What `known` holds already is taken from there. Best rates, each after a short rest: a GPU at its power limit
    multiplies slower, and how warm the last matmul left it must not decide what the next one is credited with. Random
    operands: zeros run faster than data.
    """
    side = 8192 if device.type == "cuda" else 1024
    E, F = config.hidden_size, config.ffn_hidden_size
    shapes = {(config.tokens, E, 3 * E), (config.tokens, E, F), (config.tokens, F, E), (side, side, side)}
    rates = known.flops | {name: max(_matmul_rate(*shape, name, device) for shape in sorted(shapes))
                           for name in sorted({a.matmul, a.attention} - known.flops.keys())}
    if known.bandwidth:
        return Peaks(rates, known.bandwidth)
    source = torch.randn(2**28 if device.type == "cuda" else 2**26, device=device)      # far beyond any cache
    target = torch.empty_like(source)
    return Peaks(rates, 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), device))


def _matmul_rate(m: int, k: int, n: int, dtype: str, device: torch.device) -> float:
    """FLOP/s of an [m, k] x [k, n] matmul."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        if dtype == "float8":
            a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
            b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
            one = torch.ones((), device=device)

            def multiply():
                torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
            a, b = torch.randn(m, k, device=device, dtype=kind), torch.randn(n, k, device=device, dtype=kind).t()

            def multiply():
                torch.mm(a, b)
        return 2 * m * k * n / _best_seconds(multiply, device)
    finally:
        torch.set_float32_matmul_precision(before)


def _best_seconds(work, device: torch.device) -> float:
    """The best of the samples that fit into about a tenth of a second, after a rest and a warm-up."""
    clock = clock_for(device)
    time.sleep(0.2 if device.type == "cuda" else 0)
    first = min(clock.sample(work, nothing, 2))
    return min(clock.sample(work, nothing, max(3, min(50, int(100 / first))))) / 1e3
