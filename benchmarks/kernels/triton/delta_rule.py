"""What the steps of one chunk do to each other under a gated delta rule, all chunks beside each other.

Step i writes b[i] (v[i] - what the state holds under k[i]). The state holds what the chunk found, decayed, and what the
steps before i wrote. So what is written, as a function of the state S before the chunk, solves

    (I + A) u = b v - b exp(g[0] + ... + g[i]) k S        A[i, j] = b[i] (k[i] k[j]) exp(g[j + 1] + ... + g[i]), j < i

and u = w - f S with w = T (b v), f = T (b exp(...) k), T = (I + A)^-1. T is found by doubling: the inverse of a block
triangle is that of its two halves and a product, from single steps up to the chunk.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..inputs import require_like
from .chunks import CHUNK, WIDTHS, decay_between, dot, gates, rows, store_rows
from .launch import launchable, require_float

DOUBLINGS = CHUNK.bit_length() - 1                  # from single steps to the chunk
VALUES = 64                                         # columns that a program has at once


@triton.jit
def _strength(b_row, first, length, C: tl.constexpr):
    steps = first + tl.arange(0, C)
    return tl.load(b_row + steps, mask=steps < length, other=0.0)


@triton.jit
def _below(values, C: tl.constexpr):
    """[C, C] without its diagonal and what is above it."""
    steps = tl.arange(0, C)
    return tl.where(steps[:, None] > steps[None, :], values, 0.0)


@triton.jit
def _inverse(below, C: tl.constexpr, DOUBLINGS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + below)^-1 [C, C]. Within blocks twice as wide, T is T - T L T, L being what is between their halves."""
    steps = tl.arange(0, C)
    inverse = tl.where(steps[:, None] == steps[None, :], 1.0, 0.0)
    for level in range(DOUBLINGS):
        half = steps >> level
        between = (half[:, None] != half[None, :]) & ((half >> 1)[:, None] == (half >> 1)[None, :])
        halves = tl.where(between, below, 0.0)
        inverse -= dot(inverse, dot(halves, inverse, PRECISION), PRECISION)
    return inverse


@triton.jit
def _solve(k_ptr, v_ptr, g_ptr, b_ptr, w_ptr, f_ptr, inverse_ptr, length, chunks, K: tl.constexpr, V: tl.constexpr,
           C: tl.constexpr, BV: tl.constexpr, DOUBLINGS: tl.constexpr, PRECISION: tl.constexpr,
           INVERSE: tl.constexpr):
    """w, f and T of one chunk."""
    sequence, n = tl.cast(tl.program_id(0) // chunks, tl.int64), tl.program_id(0) % chunks
    first, keys, steps = n * C, tl.arange(0, K), tl.arange(0, C)
    k = rows(k_ptr + sequence * length * K, first, length, keys, C, K)
    g = gates(g_ptr + sequence * length, first, length, C)
    b = _strength(b_ptr + sequence * length, first, length, C)
    below = _below(b[:, None] * dot(k, tl.trans(k), PRECISION) * decay_between(g, C), C)
    inverse = _inverse(below, C, DOUBLINGS, INVERSE).to(k.dtype)
    here = tl.cast(tl.program_id(0), tl.int64) * C * C
    tl.store(inverse_ptr + here + steps[:, None] * C + steps[None, :], inverse)
    forgetting = ((b * tl.exp(tl.cumsum(g, 0)))[:, None] * k).to(k.dtype)
    store_rows(f_ptr + sequence * length * K, dot(inverse, forgetting, PRECISION), first, length, keys, C, K)
    for begin in tl.static_range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        v = rows(v_ptr + sequence * length * V, first, length, columns, C, V)
        w = dot(inverse, (b[:, None] * v).to(v.dtype), PRECISION)
        store_rows(w_ptr + sequence * length * V, w, first, length, columns, C, V)


@triton.jit
def _solve_back(k_ptr, v_ptr, g_ptr, b_ptr, w_ptr, f_ptr, inverse_ptr, dw_ptr, df_ptr, dk_ptr, dv_ptr, dg_ptr, db_ptr,
                length, chunks, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
                PRECISION: tl.constexpr):
    """dk, dv, dg and db of one chunk."""
    sequence, n = tl.cast(tl.program_id(0) // chunks, tl.int64), tl.program_id(0) % chunks
    first, keys, steps = n * C, tl.arange(0, K), tl.arange(0, C)
    here = tl.cast(tl.program_id(0), tl.int64) * C * C
    g = gates(g_ptr + sequence * length, first, length, C)
    b = _strength(b_ptr + sequence * length, first, length, C)
    turned = tl.load(inverse_ptr + here + steps[None, :] * C + steps[:, None])                 # T, transposed
    dbelow = tl.zeros((C, C), tl.float32)
    db = tl.zeros((C,), tl.float32)
    for begin in tl.static_range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        v = rows(v_ptr + sequence * length * V, first, length, columns, C, V)
        w = rows(w_ptr + sequence * length * V, first, length, columns, C, V)
        dw = rows(dw_ptr + sequence * length * V, first, length, columns, C, V)
        dside = dot(turned, dw, PRECISION)                                                     # of b v
        store_rows(dv_ptr + sequence * length * V, b[:, None] * dside, first, length, columns, C, V)
        db += tl.sum(dside * v, 1)
        dbelow -= dot(dside.to(w.dtype), tl.trans(w), PRECISION)
    k = rows(k_ptr + sequence * length * K, first, length, keys, C, K)
    f = rows(f_ptr + sequence * length * K, first, length, keys, C, K)
    df = rows(df_ptr + sequence * length * K, first, length, keys, C, K)
    dside = dot(turned, df, PRECISION)                                                         # of b exp(...) k
    dbelow = _below(dbelow - dot(dside.to(f.dtype), tl.trans(f), PRECISION), C)
    into = tl.exp(tl.cumsum(g, 0))
    by_strength = into * tl.sum(dside * k, 1)
    products, decays = dot(k, tl.trans(k), PRECISION), decay_between(g, C)
    db += by_strength + tl.sum(dbelow * products * decays, 1)
    scaled = b[:, None] * dbelow * decays
    dk = (b * into)[:, None] * dside + dot(scaled.to(k.dtype), k, PRECISION)
    dk += dot(tl.trans(scaled.to(k.dtype)), k, PRECISION)
    store_rows(dk_ptr + sequence * length * K, dk, first, length, keys, C, K)
    # A gate is part of the decay between each step before it and each from it on, and from before the chunk.
    moved = scaled * products                                                  # by each decay's logarithm
    before = (steps[:, None] < steps[None, :]).to(tl.float32)                  # row: step, column: gate
    pairs = dot(moved, before, PRECISION)
    dg = tl.sum(tl.where(steps[:, None] >= steps[None, :], pairs, 0.0), 0)
    dg += tl.cumsum(b * by_strength, 0, reverse=True)
    store = first + steps < length
    tl.store(dg_ptr + sequence * length + first + steps, dg, mask=store)
    tl.store(db_ptr + sequence * length + first + steps, db, mask=store)


@triton_op("transformer_block::delta_rule", mutates_args={})
def _delta_rule(k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(w, f, T [B, H, N, C, C])."""
    B, H, S, _ = k.shape
    chunks = triton.cdiv(S, CHUNK)
    w, f, inverse = torch.empty_like(v), torch.empty_like(k), k.new_empty(B, H, chunks, CHUNK, CHUNK)
    launchable(_solve)[(B * H * chunks,)](
        k, v, g, b, w, f, inverse, S, chunks, **_constants(k, v), DOUBLINGS=DOUBLINGS, INVERSE=_of_an_inverse(k.dtype))
    return w, f, inverse


@triton_op("transformer_block::delta_rule_backward", mutates_args={})
def _backward(k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, f: Tensor, inverse: Tensor, dw: Tensor, df: Tensor
              ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dk, dv, dg, db."""
    B, H, S, _ = k.shape
    dk, dv, dg, db = (torch.empty_like(each) for each in (k, v, g, b))
    chunks = inverse.size(2)
    launchable(_solve_back)[(B * H * chunks,)](
        k, v, g, b, w, f, inverse, dw, df, dk, dv, dg, db, S, chunks, **_constants(k, v))
    return dk, dv, dg, db


def _constants(k: Tensor, v: Tensor) -> dict:
    """What a kernel is compiled for. FP32 is multiplied as FP32, not as TF32."""
    widest = max(k.size(-1), v.size(-1))
    return dict(K=k.size(-1), V=v.size(-1), C=CHUNK, BV=min(VALUES, v.size(-1)),
                PRECISION="ieee" if k.dtype == torch.float32 else "tf32", num_warps=8 if widest > 64 else 4)


def _of_an_inverse(dtype: torch.dtype) -> str:
    """Twelve products after one another. TF32 is coarse, but BF16, to which the result is rounded, is coarser.

    Elsewhere three TF32 products make one: a product in FP32 would be unrolled into code that compiles for minutes.
    """
    return "tf32" if dtype == torch.bfloat16 else "tf32x3"


def _save(ctx, inputs, output):
    w, f, inverse = output
    ctx.mark_non_differentiable(inverse)
    ctx.save_for_backward(*inputs, w, f, inverse)


def _differentiate(ctx, dw, df, _):
    return _backward(*ctx.saved_tensors, dw.contiguous(), df.contiguous())


_delta_rule.register_autograd(_differentiate, setup_context=_save)


def delta_rule(k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(w [B, H, S, V], f [B, H, S, K]): at each step w - f S is written, S being the state before its chunk of `CHUNK`.

    k [B, H, S, K] and v [B, H, S, V] of one dtype (float16, bfloat16, float32), K and V of 16, 32, 64 or 128; g and b
    [B, H, S] in FP32: the logarithm of what each step leaves of the state, at most 0, and the strength, 0 to 1. Keys
    should have length 1. Raises ValueError for anything else.
    """
    require_float("k", k)
    if k.ndim != 4 or k.size(2) < 1 or k.size(3) not in WIDTHS:
        raise ValueError(f"k is {tuple(k.shape)}: give [B, H, S, K] with S at least 1 and K one of {WIDTHS}")
    if not isinstance(v, Tensor) or v.ndim != 4 or v.size(3) not in WIDTHS:
        raise ValueError(f"v is {tuple(getattr(v, 'shape', ()))}: give [B, H, S, V] with V one of {WIDTHS}")
    require_like("v", v, k, (*k.shape[:3], v.size(3)), name_of_x="k")
    like_g = k.new_empty(0, dtype=torch.float32)
    for name, gate in (("g", g), ("b", b)):
        require_like(name, gate, like_g, tuple(k.shape[:3]), name_of_x="a state")
    if not k.size(0) * k.size(1):
        return torch.empty_like(v), torch.empty_like(k)
    return _delta_rule(*(each.contiguous() for each in (k, v, g, b)))[:2]
