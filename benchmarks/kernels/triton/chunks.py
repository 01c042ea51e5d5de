"""What the kernels over chunks of steps share: how a chunk is loaded and stored, its gates, decays and products."""
import triton
import triton.language as tl

CHUNK = 64                                          # steps
WIDTHS = (16, 32, 64, 128)                          # of keys, and of values

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a b in FP32."""
    if INTERPRETED:                        # the interpreter would multiply BF16 as the integers that hold its bits
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def rows(base, first, length, columns, C: tl.constexpr, D: tl.constexpr):
    """Steps of a chunk [C, columns], zeros behind the last one."""
    steps = first + tl.arange(0, C)
    at = base + tl.cast(steps, tl.int64)[:, None] * D + columns[None, :]
    return tl.load(at, mask=(steps < length)[:, None], other=0.0)


@triton.jit
def store_rows(base, value, first, length, columns, C: tl.constexpr, D: tl.constexpr):
    steps = first + tl.arange(0, C)
    at = base + tl.cast(steps, tl.int64)[:, None] * D + columns[None, :]
    tl.store(at, value, mask=(steps < length)[:, None])


@triton.jit
def gates(g_row, first, length, C: tl.constexpr):
    steps = first + tl.arange(0, C)
    return tl.load(g_row + steps, mask=steps < length, other=0.0)


@triton.jit
def kept(g_row, first, length, C: tl.constexpr):
    """[C]: what is left behind the chunk of what each step wrote."""
    steps = tl.arange(0, C)
    behind = tl.load(g_row + first + steps + 1, mask=(steps + 1 < C) & (first + steps + 1 < length), other=0.0)
    return tl.exp(tl.cumsum(behind, 0, reverse=True))


@triton.jit
def decay_between(g, C: tl.constexpr):
    """[C, C]: what is left behind step t of what step s wrote; 0 for s behind t."""
    steps = tl.arange(0, C)
    sums = tl.cumsum(tl.where(steps[:, None] > steps[None, :], g[:, None], 0.0), 0)
    return tl.where(steps[:, None] >= steps[None, :], tl.exp(sums), 0.0)
