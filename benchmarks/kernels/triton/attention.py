"""Attention that never writes its scores to memory, forward and backward, in Triton: FlashAttention's two ideas.

    o = attention(q, k, v)                     # softmax(q k^T / sqrt(D)) v, causal; all [B, H, S, D]

A program takes a block of queries and walks over the keys. The softmax of a row needs its maximum and its sum, both of
which the walk keeps as running values, rescaling what it has summed whenever the maximum rises. The forward saves one
number a row, the logarithm of that sum; from it the backward computes the probabilities anew, block by block. With
p = softmax(s) and o = p v, what flows back is dp = do v^T and ds = p (dp - delta), delta = rowsum(do * o).

The backward has two kernels: one walks over the keys for dq, one over the queries for dk and dv. That computes the
scores twice, and in exchange every sum has one owner and one order, so that every run gives the same bits. Causal
programs skip the blocks above the diagonal and compare positions only in the blocks on it.
"""
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..inputs import require_like
from .launch import launchable, require_float


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys of a block (powers of two), warps of a program, stages of its pipeline."""
    queries: int
    keys: int
    warps: int
    stages: int


# By D. The accumulators live in registers: (queries or keys) x D x 4 bytes each, one of them in the forward and for dq,
# two for dk and dv. The stages live in shared memory: what a step of the walk loads, in 16 bits, once per stage.
FORWARD = {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 3)}
BACKWARD_DQ = {64: Tile(64, 32, 4, 3), 128: Tile(128, 64, 8, 3)}
BACKWARD_DK_DV = {64: Tile(32, 64, 4, 3), 128: Tile(64, 64, 4, 2)}

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(math.log2(math.e))            # exp(x) is exp2(x log2 e), and exp2 is what the hardware has


@triton.jit
def _dot(a, b, total):
    """total + a b, in FP32."""
    if INTERPRETED:                        # the interpreter would multiply BF16 as the integers that hold its bits
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)


@triton.jit
def _load(tile, positions, length, EVEN: tl.constexpr):
    """Rows of q, k, v or do, zeros past the end of the sequence."""
    if EVEN:
        return tl.load(tile)
    return tl.load(tile, mask=positions[:, None] < length, other=0.0)


@triton.jit
def _load_row(row, positions, length, other, EVEN: tl.constexpr):
    """One number a position, `other` past the end of the sequence."""
    if EVEN:
        return tl.load(row)
    return tl.load(row, mask=positions < length, other=other)


@triton.jit
def _mask(s, queries, keys, length, needed, CAUSAL: tl.constexpr, EVEN: tl.constexpr):
    """Scores with -inf where a query sees no key; blocks without such a place are not `needed` and skip the work."""
    if EVEN and not CAUSAL:
        pass                               # decided when the kernel is compiled, `needed` when it runs
    elif needed:
        if CAUSAL:                         # no query inside sees a key past the end, and what others see is not used
            s = tl.where(queries >= keys, s, -float("inf"))
        else:
            s = tl.where((queries >= 0) & (keys < length), s, -float("inf"))
    return s


# The distance between rows is a constant of the kernels: a thread's addresses in a tile then differ by constants, and
# take no registers.
@triton.jit
def _forward(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, scale, heads, length, q_batch, q_head, k_batch, k_head, v_batch,
             v_head, q_row: tl.constexpr, k_row: tl.constexpr, v_row: tl.constexpr, D: tl.constexpr,
             CAUSAL: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    blocks = tl.cdiv(length, BLOCK_M)
    sequence = tl.cast(tl.program_id(0) // blocks, tl.int64)
    batch = sequence // heads
    head = sequence % heads
    begin = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M     # long rows first: the short ones fill the gaps
    queries = begin + tl.arange(0, BLOCK_M)
    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, D)[None, :]
    q_tile = q_ptr + batch * q_batch + head * q_head + tl.cast(queries, tl.int64)[:, None] * q_row + columns
    k_tile = k_ptr + batch * k_batch + head * k_head + offsets[:, None] * k_row + columns
    v_tile = v_ptr + batch * v_batch + head * v_head + offsets[:, None] * v_row + columns
    q = _load(q_tile, queries, length, EVEN)
    scale = tl.cast(scale, tl.float32)                        # FP64 where the compiler launches this
    slope = scale * LOG2_E
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    stop = min(begin + BLOCK_M, length) if CAUSAL else length
    masked = (begin if CAUSAL else length) // BLOCK_N * BLOCK_N                  # all queries see all keys before it
    for first in range(0, stop, BLOCK_N):
        keys = first + offsets
        k = _load(k_tile, keys, length, EVEN)
        s = _dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        s = _mask(s, queries[:, None], keys[None, :], length, first >= masked, CAUSAL, EVEN)
        risen = tl.maximum(top, tl.max(s, 1) * slope)
        p = tl.exp2(s * slope - risen[:, None])
        shrink = tl.exp2(top - risen)
        total = total * shrink + tl.sum(p, 1)
        v = _load(v_tile, keys, length, EVEN)
        acc = _dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = risen
        k_tile += BLOCK_N * k_row
        v_tile += BLOCK_N * v_row
    inside = queries < length
    o_tile = o_ptr + ((batch * length + queries) * heads + head)[:, None] * D + columns
    tl.store(o_tile, acc / total[:, None], mask=inside[:, None])
    tl.store(lse_ptr + sequence * length + queries, top + tl.log2(total), mask=inside)


@triton.jit
def _backward_dq(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, scale, heads, length, q_batch, q_head,
                 k_batch, k_head, v_batch, v_head, do_batch, do_head, q_row: tl.constexpr, k_row: tl.constexpr,
                 v_row: tl.constexpr, do_row: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    blocks = tl.cdiv(length, BLOCK_M)
    sequence = tl.cast(tl.program_id(0) // blocks, tl.int64)
    batch = sequence // heads
    head = sequence % heads
    begin = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    queries = begin + tl.arange(0, BLOCK_M)
    inside = queries < length
    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, D)[None, :]
    rows = tl.cast(queries, tl.int64)[:, None]
    q_tile = q_ptr + batch * q_batch + head * q_head + rows * q_row + columns
    k_tile = k_ptr + batch * k_batch + head * k_head + offsets[:, None] * k_row + columns
    v_tile = v_ptr + batch * v_batch + head * v_head + offsets[:, None] * v_row + columns
    do_tile = do_ptr + batch * do_batch + head * do_head + rows * do_row + columns
    here = ((batch * length + queries) * heads + head)[:, None] * D + columns    # of o and dq
    q = _load(q_tile, queries, length, EVEN)
    do = _load(do_tile, queries, length, EVEN)
    o = _load(o_ptr + here, queries, length, EVEN)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + sequence * length + queries, delta, mask=inside)
    lse = _load_row(lse_ptr + sequence * length + queries, queries, length, float("inf"), EVEN)
    scale = tl.cast(scale, tl.float32)                        # FP64 where the compiler launches this
    slope = scale * LOG2_E
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    stop = min(begin + BLOCK_M, length) if CAUSAL else length
    masked = (begin if CAUSAL else length) // BLOCK_N * BLOCK_N
    for first in range(0, stop, BLOCK_N):
        keys = first + offsets
        k = _load(k_tile, keys, length, EVEN)
        v = _load(v_tile, keys, length, EVEN)
        s = _dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        s = _mask(s, queries[:, None], keys[None, :], length, first >= masked, CAUSAL, EVEN)
        dp = _dot(do, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))      # first: p is computed beside it
        p = tl.exp2(s * slope - lse[:, None])
        ds = p * (dp - delta[:, None])
        dq = _dot(ds.to(k.dtype), k, dq)
        k_tile += BLOCK_N * k_row
        v_tile += BLOCK_N * v_row
    tl.store(dq_ptr + here, dq * scale, mask=inside[:, None])


@triton.jit
def _backward_dk_dv(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, scale, heads, length, q_batch,
                    q_head, k_batch, k_head, v_batch, v_head, do_batch, do_head, q_row: tl.constexpr,
                    k_row: tl.constexpr, v_row: tl.constexpr, do_row: tl.constexpr, D: tl.constexpr,
                    CAUSAL: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    blocks = tl.cdiv(length, BLOCK_N)
    sequence = tl.cast(tl.program_id(0) // blocks, tl.int64)
    batch = sequence // heads
    head = sequence % heads
    begin = tl.program_id(0) % blocks * BLOCK_N               # the first keys are seen by the most queries
    keys = begin + tl.arange(0, BLOCK_N)
    start = begin // BLOCK_M * BLOCK_M if CAUSAL else 0       # the first query that sees a key of this block
    offsets = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D)[None, :]
    rows = tl.cast(keys, tl.int64)[:, None]
    skipped = tl.cast(start, tl.int64)
    q_tile = q_ptr + batch * q_batch + head * q_head + skipped * q_row + offsets[:, None] * q_row + columns
    k_tile = k_ptr + batch * k_batch + head * k_head + rows * k_row + columns
    v_tile = v_ptr + batch * v_batch + head * v_head + rows * v_row + columns
    do_tile = do_ptr + batch * do_batch + head * do_head + skipped * do_row + offsets[:, None] * do_row + columns
    lse_ptr += sequence * length
    delta_ptr += sequence * length
    k = _load(k_tile, keys, length, EVEN)
    v = _load(v_tile, keys, length, EVEN)
    scale = tl.cast(scale, tl.float32)                        # FP64 where the compiler launches this
    slope = scale * LOG2_E
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for first in range(start, length, BLOCK_M):
        queries = first + offsets
        q = _load(q_tile, queries, length, EVEN)
        do = _load(do_tile, queries, length, EVEN)
        lse = _load_row(lse_ptr + queries, queries, length, float("inf"), EVEN)     # p = 0 past the end
        delta = _load_row(delta_ptr + queries, queries, length, 0.0, EVEN)
        s = _dot(k, tl.trans(q), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))        # the block turned: ready for p^T do
        s = _mask(s, queries[None, :], keys[:, None], length, first < begin + BLOCK_N, CAUSAL, True)
        dp = _dot(v, tl.trans(do), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        p = tl.exp2(s * slope - lse[None, :])
        dv = _dot(p.to(do.dtype), do, dv)
        ds = p * (dp - delta[None, :])
        dk = _dot(ds.to(q.dtype), q, dk)
        q_tile += BLOCK_M * q_row
        do_tile += BLOCK_M * do_row
    here = ((batch * length + keys) * heads + head)[:, None] * D + columns
    tl.store(dk_ptr + here, dk * scale, mask=(keys < length)[:, None])
    tl.store(dv_ptr + here, dv, mask=(keys < length)[:, None])


@triton_op("transformer_block::attention", mutates_args={})
def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(o [B, H, S, D], base-2 logarithm of each row's sum of exponentials [B, H, S] in FP32)."""
    B, H, S, D = q.shape
    tile = FORWARD[D]
    o = q.new_empty(B, S, H, D)
    lse = q.new_empty(B, H, S, dtype=torch.float32)
    if B * H:
        launchable(_forward)[(B * H * triton.cdiv(S, tile.queries),)](
            q, k, v, o, lse, scale, H, S, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], q_row=q.stride(2),
            k_row=k.stride(2), v_row=v.stride(2), **_constants(S, D, causal, tile))
    return o.transpose(1, 2), lse


@triton_op("transformer_block::attention_backward", mutates_args={})
def _attention_backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
                        ) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each [B, H, S, D]; o as the forward left it."""
    B, H, S, D = q.shape
    dq, dk, dv = (q.new_empty(B, S, H, D) for _ in range(3))
    delta = torch.empty_like(lse)
    if B * H:
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2])
        rows = dict(q_row=q.stride(2), k_row=k.stride(2), v_row=v.stride(2), do_row=do.stride(2))
        tile = BACKWARD_DQ[D]
        launchable(_backward_dq)[(B * H * triton.cdiv(S, tile.queries),)](
            q, k, v, o.transpose(1, 2).contiguous(), do, lse, delta, dq, scale, H, S, *strides, **rows,
            **_constants(S, D, causal, tile))
        tile = BACKWARD_DK_DV[D]
        launchable(_backward_dk_dv)[(B * H * triton.cdiv(S, tile.keys),)](
            q, k, v, do, lse, delta, dk, dv, scale, H, S, *strides, **rows, **_constants(S, D, causal, tile))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _constants(S: int, D: int, causal: bool, tile: Tile) -> dict:
    """What a kernel is compiled for, apart from the distances between rows."""
    return dict(D=D, CAUSAL=causal, EVEN=S % max(tile.queries, tile.keys) == 0, BLOCK_M=tile.queries,
                BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages)


def _save(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx, do, _):
    return *_attention_backward(*ctx.saved_tensors, _readable(do), ctx.causal, ctx.scale), None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """softmax(scale q k^T) v for each head; under `causal` a query sees the keys up to its own position.

    q, k, v [B, H, S, D], all of one dtype (float16, bfloat16) on one GPU, S at least 1, D 64 or 128; of any strides
    (copied where the last dimension is not contiguous). `scale` is positive, 1 / sqrt(D) where None. Scores, sums and
    accumulators are in FP32; the probabilities are rounded to the inputs' dtype before they multiply v. The result
    [B, H, S, D] lies in memory as [B, S, H, D], which the projection after it reads. Raises ValueError for anything
    else.
    """
    require_float("q", q, (torch.float16, torch.bfloat16))
    if q.ndim != 4 or q.size(2) < 1 or q.size(3) not in FORWARD:
        raise ValueError(f"q is {tuple(q.shape)}: give [B, H, S, D] with S at least 1 and D 64 or 128")
    require_like("k", k, q)
    require_like("v", v, q)
    scale = q.size(3) ** -0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}: give a positive number")
    return _attention(_readable(q), _readable(k), _readable(v), causal, scale)[0]


def _readable(x: Tensor) -> Tensor:
    """x with its last dimension contiguous: a copy where it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()
