"""The limit of a row (its roofline): the block's work, this machine's measured peaks, and the time that follows.

The limit is the sum, over the operations that no implementation of the block can leave out, of
max(FLOPs / peak FLOP/s, bytes / peak bytes/s), each reading its inputs once and writing its outputs once.
Elementwise work that can ride on a matmul (bias, GELU, residual, casts) costs no pass here; a LayerNorm costs a pass of
its own, because a row must be complete before the matmul behind it can start.
"""
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .config import BlockConfig
from .timing import clock_for, nothing


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
    """Measured on this machine in this run: FLOP/s by dtype name, and bytes/s of a copy (read plus written)."""
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
    return operation.flops / peaks.flops[a.matmul if operation.kind == "matmul" else a.attention], moving


def measure_peaks(config: BlockConfig, a: Arithmetic, device: torch.device, known: Peaks = Peaks({}, 0.0)) -> Peaks:
    """The best matmul rate per dtype over the block's own shapes and a large square, and the copy bandwidth.

    What `known` holds already is taken from there. Best rates, each after a short rest: a GPU at its power limit
    multiplies slower, and how warm the last matmul left it must not decide what the next one is credited with. Random
    operands: zeros run faster than data.
    """
    side = 8192 if device.type == "cuda" else 1024
    E, F = config.hidden_size, config.ffn_hidden_size
    shapes = sorted({(config.tokens, E, 3 * E), (config.tokens, E, F), (config.tokens, F, E), (side, side, side)})
    rates = dict(known.flops)
    for name in sorted({a.matmul, a.attention} - rates.keys()):
        rates[name] = max(_matmul_rate(*shape, name, device) for shape in shapes)
    if known.bandwidth:
        return Peaks(rates, known.bandwidth)
    source = torch.randn(2**28 if device.type == "cuda" else 2**26, device=device)      # far beyond any cache
    target = torch.empty_like(source)
    return Peaks(rates, 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), device))


class MeasuredPeaks:
    """This machine's peaks, each measured when it is first asked for, and once more where a row passes it.

    Whatever else ran meanwhile made them too low: the better of two measurements counts.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.known = Peaks({}, 0.0)
        self._twice: set[Arithmetic] = set()

    def of(self, config: BlockConfig, a: Arithmetic) -> Peaks:
        """Those known so far, with those of this arithmetic."""
        if not {a.matmul, a.attention} <= self.known.flops.keys():
            self.known = measure_peaks(config, a, self.device, self.known)
        return self.known

    def again(self, config: BlockConfig, a: Arithmetic) -> bool:
        """Measure those of this arithmetic once more. False where that has been done."""
        if a in self._twice:
            return False
        self._twice.add(a)
        second = measure_peaks(config, a, self.device)
        rates = dict(self.known.flops)
        for name, rate in second.flops.items():
            rates[name] = max(rate, rates.get(name, 0.0))
        self.known = Peaks(rates, max(self.known.bandwidth, second.bandwidth))
        return True

    def until_they_stay(self, hold: Callable[[], None]) -> None:
        """Hold rows against these peaks; all of them again where one had the peaks measured once more."""
        held_against = None
        while held_against != self.known:
            held_against = self.known
            hold()

    def in_words(self) -> str:
        """float16 812 TFLOP/s; copy 4.1 TB/s (read + written)."""
        rates = []
        for name, rate in sorted(self.known.flops.items()):
            rates.append(f"{name} {rate / 1e12:.{0 if rate > 1e13 else 2}f} TFLOP/s")
        return f"{', '.join(rates)}; copy {self.known.bandwidth / 1e12:.3g} TB/s (read + written)"


def _matmul_rate(m: int, k: int, n: int, dtype: str, device: torch.device) -> float:
    """FLOP/s of an [m, k] x [k, n] matmul."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        if dtype == "float8":
            a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
            b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
            scale = torch.ones((), device=device)

            def multiply():
                torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True)
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
