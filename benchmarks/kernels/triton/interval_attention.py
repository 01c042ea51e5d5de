"""Attention in which each query sees one range of keys, in Triton, forward and backward: windows, documents, padding.

A window, documents behind each other, a prefix and padding at the end all give a query an interval of keys, and both of
its ends only ever rise from query to query. So a block of queries walks over the blocks of keys between the first key
of its first query and the last key of its last one, and compares positions only where not all of its queries see all
of a block. For a key the same holds of its queries: they are an interval too, which the host finds by a binary search.

The rest is as in `attention.py`: scores exist in blocks alone, a query's sum grows with the maximum seen so far, and
the backward computes the scores twice, once for dq and once for dk and dv. Heads of queries may share one of keys: a
program for dk and dv then walks over the queries of all of them. Scores may be capped by a tanh, and may fall with the
distance (ALiBi); where neither is wanted no instruction of it is compiled.
"""
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..inputs import require_like
from .attention import LOG2_E, Tile, _dot, _load, _load_row, _readable
from .launch import launchable, require_float

FORWARD = {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 3)}
BACKWARD_DQ = {64: Tile(64, 32, 4, 3), 128: Tile(64, 64, 4, 2)}
BACKWARD_DK_DV = {64: Tile(32, 64, 4, 3), 128: Tile(64, 64, 4, 2)}


class Intervals(NamedTuple):
    """Who sees whom, int32 each, none of them ever falling along its last dimension."""
    low: Tensor                            # [1 or B, S]: the first key that a query sees
    high: Tensor                           # [1 or B, S]: the key behind the last one
    first: Tensor                          # [1 or B, T]: the first query that sees a key
    last: Tensor                           # [1 or B, T]: the query behind the last one


def intervals(low: Tensor, high: Tensor, keys: int) -> Intervals:
    """Of the ends that queries have, [1 or B, S], the same for keys."""
    places = torch.arange(keys, device=low.device, dtype=torch.int32).expand(low.size(0), -1).contiguous()
    first = torch.searchsorted(high.contiguous(), places, right=True, out_int32=True)
    last = torch.searchsorted(low.contiguous(), places, right=True, out_int32=True)
    return Intervals(low.contiguous(), high.contiguous(), first, torch.maximum(first, last))


@triton.jit
def _scores(s, lows, highs, others, needed):
    """Scores with -inf where `others` are outside of [lows, highs); blocks that are whole skip the work."""
    if needed:
        s = tl.where((others >= lows) & (others < highs), s, -float("inf"))
    return s


@triton.jit
def _tanh(x):
    """Off by a rounding of 1 at most, which is what it is added to."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def _changed(s, away, scale, cap, fall, CAPPED: tl.constexpr, ALIBI: tl.constexpr):
    """(scores that are scaled, capped, and fall with how far `away` a key is; the tanh). As they are without both."""
    t = s
    if CAPPED:
        t = _tanh(s * (scale / cap))
        s = cap * t
    elif ALIBI:
        s = s * scale
    if ALIBI:
        s = s - fall * tl.abs(away).to(tl.float32)
    return s, t


@triton.jit
def _forward(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, low_ptr, high_ptr, falls_ptr, scale, cap, heads, repeated, queries,
             keys, of_batch, q_batch, q_head, k_batch, k_head, v_batch, v_head, q_row: tl.constexpr,
             k_row: tl.constexpr, v_row: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, CAPPED: tl.constexpr,
             ALIBI: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    blocks = tl.cdiv(queries, BLOCK_M)
    sequence = tl.cast(tl.program_id(0) // blocks, tl.int64)
    batch = sequence // heads
    head = sequence % heads
    begin = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M             # long rows first: short ones fill the gaps
    end = min(begin + BLOCK_M, queries) - 1                                # its last query
    rows = begin + tl.arange(0, BLOCK_M)
    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, D)[None, :]
    low_ptr += batch * of_batch
    high_ptr += batch * of_batch
    lows = _load_row(low_ptr + rows, rows, queries, 0, EVEN)
    highs = _load_row(high_ptr + rows, rows, queries, 0, EVEN)
    start = tl.load(low_ptr + begin) // BLOCK_N * BLOCK_N
    stop = tl.load(high_ptr + end)
    whole_from, whole_to = tl.load(low_ptr + end), tl.load(high_ptr + begin)       # what all of its queries see
    q_tile = q_ptr + batch * q_batch + head * q_head + tl.cast(rows, tl.int64)[:, None] * q_row + columns
    skipped = tl.cast(start, tl.int64)
    k_tile = k_ptr + batch * k_batch + head // repeated * k_head + (skipped + offsets)[:, None] * k_row + columns
    v_tile = v_ptr + batch * v_batch + head // repeated * v_head + (skipped + offsets)[:, None] * v_row + columns
    q = _load(q_tile, rows, queries, EVEN)
    scale, cap = tl.cast(scale, tl.float32), tl.cast(cap, tl.float32)
    slope = LOG2_E if CAPPED or ALIBI else scale * LOG2_E
    fall = tl.load(falls_ptr + head) if ALIBI else 0.0
    ahead = keys - queries                                                         # the last ones stand side by side
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for first in range(start, stop, BLOCK_N):
        places = first + offsets
        k = _load(k_tile, places, keys, EVEN)
        s = _dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        s, t = _changed(s, rows[:, None] + ahead - places[None, :], scale, cap, fall, CAPPED, ALIBI)
        s = _scores(s, lows[:, None], highs[:, None], places[None, :],
                    (first < whole_from) | (first + BLOCK_N > whole_to))
        risen = tl.maximum(top, tl.max(s, 1) * slope)
        base = tl.where(risen == -float("inf"), 0.0, risen)                # of a query that has seen nothing yet
        p = tl.exp2(s * slope - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = _load(v_tile, places, keys, EVEN)
        acc = _dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = risen
        k_tile += BLOCK_N * k_row
        v_tile += BLOCK_N * v_row
    inside = rows < queries
    sees_nothing = total == 0
    o_tile = o_ptr + ((batch * queries + rows) * heads + head)[:, None] * D + columns
    tl.store(o_tile, acc / tl.where(sees_nothing, 1.0, total)[:, None], mask=inside[:, None])
    lse = tl.where(sees_nothing, float("inf"), top + tl.log2(tl.where(sees_nothing, 1.0, total)))
    tl.store(lse_ptr + sequence * queries + rows, lse, mask=inside)


@triton.jit
def _backward_dq(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, low_ptr, high_ptr, falls_ptr, scale,
                 cap, heads, repeated, queries, keys, of_batch, q_batch, q_head, k_batch, k_head, v_batch, v_head,
                 do_batch, do_head, q_row: tl.constexpr, k_row: tl.constexpr, v_row: tl.constexpr, do_row: tl.constexpr,
                 D: tl.constexpr, EVEN: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr):
    blocks = tl.cdiv(queries, BLOCK_M)
    sequence = tl.cast(tl.program_id(0) // blocks, tl.int64)
    batch = sequence // heads
    head = sequence % heads
    begin = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    end = min(begin + BLOCK_M, queries) - 1
    rows = begin + tl.arange(0, BLOCK_M)
    inside = rows < queries
    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, D)[None, :]
    low_ptr += batch * of_batch
    high_ptr += batch * of_batch
    lows = _load_row(low_ptr + rows, rows, queries, 0, EVEN)
    highs = _load_row(high_ptr + rows, rows, queries, 0, EVEN)
    start = tl.load(low_ptr + begin) // BLOCK_N * BLOCK_N
    stop = tl.load(high_ptr + end)
    whole_from, whole_to = tl.load(low_ptr + end), tl.load(high_ptr + begin)
    wide = tl.cast(rows, tl.int64)[:, None]
    skipped = tl.cast(start, tl.int64)
    q_tile = q_ptr + batch * q_batch + head * q_head + wide * q_row + columns
    k_tile = k_ptr + batch * k_batch + head // repeated * k_head + (skipped + offsets)[:, None] * k_row + columns
    v_tile = v_ptr + batch * v_batch + head // repeated * v_head + (skipped + offsets)[:, None] * v_row + columns
    do_tile = do_ptr + batch * do_batch + head * do_head + wide * do_row + columns
    here = ((batch * queries + rows) * heads + head)[:, None] * D + columns        # of o and dq
    q = _load(q_tile, rows, queries, EVEN)
    do = _load(do_tile, rows, queries, EVEN)
    o = _load(o_ptr + here, rows, queries, EVEN)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + sequence * queries + rows, delta, mask=inside)
    lse = _load_row(lse_ptr + sequence * queries + rows, rows, queries, float("inf"), EVEN)
    scale, cap = tl.cast(scale, tl.float32), tl.cast(cap, tl.float32)
    slope = LOG2_E if CAPPED or ALIBI else scale * LOG2_E
    fall = tl.load(falls_ptr + head) if ALIBI else 0.0
    ahead = keys - queries
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for first in range(start, stop, BLOCK_N):
        places = first + offsets
        k = _load(k_tile, places, keys, EVEN)
        v = _load(v_tile, places, keys, EVEN)
        s = _dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        s, t = _changed(s, rows[:, None] + ahead - places[None, :], scale, cap, fall, CAPPED, ALIBI)
        s = _scores(s, lows[:, None], highs[:, None], places[None, :],
                    (first < whole_from) | (first + BLOCK_N > whole_to))
        dp = _dot(do, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        p = tl.exp2(s * slope - lse[:, None])
        ds = p * (dp - delta[:, None])
        if CAPPED:
            ds = ds * (1.0 - t * t)
        dq = _dot(ds.to(k.dtype), k, dq)
        k_tile += BLOCK_N * k_row
        v_tile += BLOCK_N * v_row
    tl.store(dq_ptr + here, dq * scale, mask=inside[:, None])


@triton.jit
def _backward_dk_dv(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, first_ptr, last_ptr, falls_ptr,
                    scale, cap, heads, repeated, queries, keys, of_batch, q_batch, q_head, k_batch, k_head, v_batch,
                    v_head, do_batch, do_head, q_row: tl.constexpr, k_row: tl.constexpr, v_row: tl.constexpr,
                    do_row: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, CAPPED: tl.constexpr,
                    ALIBI: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    kv_heads = heads // repeated
    blocks = tl.cdiv(keys, BLOCK_N)
    sequence = tl.cast(tl.program_id(0) // blocks, tl.int64)
    batch = sequence // kv_heads
    kv_head = sequence % kv_heads
    begin = tl.program_id(0) % blocks * BLOCK_N
    end = min(begin + BLOCK_N, keys) - 1
    places = begin + tl.arange(0, BLOCK_N)
    offsets = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D)[None, :]
    first_ptr += batch * of_batch
    last_ptr += batch * of_batch
    firsts = _load_row(first_ptr + places, places, keys, 0, EVEN)
    lasts = _load_row(last_ptr + places, places, keys, 0, EVEN)
    start = tl.load(first_ptr + begin) // BLOCK_M * BLOCK_M
    stop = tl.load(last_ptr + end)
    whole_from, whole_to = tl.load(first_ptr + end), tl.load(last_ptr + begin)     # the queries that see them all
    wide = tl.cast(places, tl.int64)[:, None]
    skipped = tl.cast(start, tl.int64)
    k = _load(k_ptr + batch * k_batch + kv_head * k_head + wide * k_row + columns, places, keys, EVEN)
    v = _load(v_ptr + batch * v_batch + kv_head * v_head + wide * v_row + columns, places, keys, EVEN)
    scale, cap = tl.cast(scale, tl.float32), tl.cast(cap, tl.float32)
    slope = LOG2_E if CAPPED or ALIBI else scale * LOG2_E
    ahead = keys - queries
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for shared in range(0, repeated):
        head = kv_head * repeated + shared
        of_head = (batch * heads + head) * queries
        fall = tl.load(falls_ptr + head) if ALIBI else 0.0
        q_tile = q_ptr + batch * q_batch + head * q_head + (skipped + offsets)[:, None] * q_row + columns
        do_tile = do_ptr + batch * do_batch + head * do_head + (skipped + offsets)[:, None] * do_row + columns
        for first in range(start, stop, BLOCK_M):
            rows = first + offsets
            q = _load(q_tile, rows, queries, EVEN)
            do = _load(do_tile, rows, queries, EVEN)
            lse = _load_row(lse_ptr + of_head + rows, rows, queries, float("inf"), EVEN)   # p = 0 past the end
            delta = _load_row(delta_ptr + of_head + rows, rows, queries, 0.0, EVEN)
            s = _dot(k, tl.trans(q), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))     # the block turned: ready for p^T do
            s, t = _changed(s, rows[None, :] + ahead - places[:, None], scale, cap, fall, CAPPED, ALIBI)
            s = _scores(s, firsts[:, None], lasts[:, None], rows[None, :],
                        (first < whole_from) | (first + BLOCK_M > whole_to))
            dp = _dot(v, tl.trans(do), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
            p = tl.exp2(s * slope - lse[None, :])
            dv = _dot(p.to(do.dtype), do, dv)
            ds = p * (dp - delta[None, :])
            if CAPPED:
                ds = ds * (1.0 - t * t)
            dk = _dot(ds.to(q.dtype), q, dk)
            q_tile += BLOCK_M * q_row
            do_tile += BLOCK_M * do_row
    here = ((batch * keys + places) * kv_heads + kv_head)[:, None] * D + columns
    tl.store(dk_ptr + here, dk * scale, mask=(places < keys)[:, None])
    tl.store(dv_ptr + here, dv, mask=(places < keys)[:, None])


@triton_op("transformer_block::interval_attention", mutates_args={})
def _attention(q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, first: Tensor, last: Tensor, scale: float,
               cap: float, falls: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o [B, H, S, D], base-2 logarithm of each row's sum of exponentials [B, H, S] in FP32)."""
    B, H, S, D = q.shape
    tile = FORWARD[D]
    o = q.new_empty(B, S, H, D)
    lse = q.new_empty(B, H, S, dtype=torch.float32)
    launchable(_forward)[(B * H * triton.cdiv(S, tile.queries),)](
        q, k, v, o, lse, low, high, low if falls is None else falls, scale, cap, H, H // k.size(1), S, k.size(2),
        _of_batch(low), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], q_row=q.stride(2), k_row=k.stride(2),
        v_row=v.stride(2), **_constants(S, k.size(2), D, tile, cap, falls))
    return o.transpose(1, 2), lse


@triton_op("transformer_block::interval_attention_backward", mutates_args={})
def _attention_backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, low: Tensor, high: Tensor,
                        first: Tensor, last: Tensor, scale: float, cap: float, falls: Tensor | None
                        ) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [B, H, S, D], dk and dv [B, G, T, D]); o as the forward left it."""
    B, H, S, D = q.shape
    G, T = k.shape[1:3]
    dq, dk, dv = q.new_empty(B, S, H, D), k.new_empty(B, T, G, D), v.new_empty(B, T, G, D)
    delta = torch.empty_like(lse)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2])
    rows = dict(q_row=q.stride(2), k_row=k.stride(2), v_row=v.stride(2), do_row=do.stride(2))
    of_falls = low if falls is None else falls             # without them a pointer that nobody reads
    tile = BACKWARD_DQ[D]
    launchable(_backward_dq)[(B * H * triton.cdiv(S, tile.queries),)](
        q, k, v, o.transpose(1, 2).contiguous(), do, lse, delta, dq, low, high, of_falls, scale, cap, H, H // G, S, T,
        _of_batch(low), *strides, **rows, **_constants(S, T, D, tile, cap, falls))
    tile = BACKWARD_DK_DV[D]
    launchable(_backward_dk_dv)[(B * G * triton.cdiv(T, tile.keys),)](
        q, k, v, do, lse, delta, dk, dv, first, last, of_falls, scale, cap, H, H // G, S, T, _of_batch(first), *strides,
        **rows, **_constants(S, T, D, tile, cap, falls))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _of_batch(ends: Tensor) -> int:
    """The distance from one sequence's ends to the next one's: none where all have the same."""
    return ends.stride(0) if ends.size(0) > 1 else 0


def _constants(S: int, T: int, D: int, tile: Tile, cap: float, falls: Tensor | None) -> dict:
    """What a kernel is compiled for, apart from the distances between rows."""
    largest = max(tile.queries, tile.keys)
    return dict(D=D, EVEN=S % largest == 0 and T % largest == 0, CAPPED=cap > 0, ALIBI=falls is not None,
                BLOCK_M=tile.queries, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages)


def _save(ctx, inputs, output):
    q, k, v, low, high, first, last, ctx.scale, ctx.cap, falls = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, low, high, first, last, falls)


def _differentiate(ctx, do, _):
    q, k, v, o, lse, *ends, falls = ctx.saved_tensors
    gradients = _attention_backward(q, k, v, o, lse, _readable(do), *ends, ctx.scale, ctx.cap, falls)
    return *gradients, None, None, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def interval_attention(q: Tensor, k: Tensor, v: Tensor, ends: Intervals, scale: float | None = None,
                       cap: float | None = None, falls: Tensor | None = None) -> Tensor:
    """softmax(scale q k^T) v for each head, over the keys that each query sees; zeros where it sees none.

    Scores go through cap * tanh(score / cap), and `falls` [H] in FP32 times the distance is subtracted from them, where
    these are given; the last query stands beside the last key.

    q [B, H, S, D], k and v [B, G, T, D] with H a multiple of G, all of one dtype (float16, bfloat16) on one GPU, D 64
    or 128; of any strides (copied where the last dimension is not contiguous). `ends` are as of `intervals`. `scale` is
    positive, 1 / sqrt(D) where None. The result lies in memory as [B, S, H, D]. Raises ValueError for anything else.
    """
    require_float("q", q, (torch.float16, torch.bfloat16))
    if q.ndim != 4 or not q.numel() or q.size(3) not in FORWARD:
        raise ValueError(f"q is {tuple(q.shape)}: give [B, H, S, D], none of them 0, and D 64 or 128")
    if not isinstance(k, Tensor) or k.ndim != 4 or not k.numel() or q.size(1) % k.size(1):
        raise ValueError(f"k is {tuple(k.shape) if isinstance(k, Tensor) else k!r}: give [B, G, T, D], of which "
                         f"{q.size(1)} heads are a multiple of G")
    require_like("k", k, q, (q.size(0), *k.shape[1:3], q.size(3)), name_of_x="q")
    require_like("v", v, k, name_of_x="k")
    for name, given, length in (("low", ends.low, q.size(2)), ("high", ends.high, q.size(2)),
                                ("first", ends.first, k.size(2)), ("last", ends.last, k.size(2))):
        if given.shape not in ((1, length), (q.size(0), length)) or given.dtype != torch.int32:
            raise ValueError(f"{name} is {tuple(given.shape)} {given.dtype}: give int32 [1 or {q.size(0)}, {length}]")
    scale = q.size(3) ** -0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}: give a positive number")
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"cap is {cap}: give a positive number")
    if falls is not None and (falls.shape != (q.size(1),) or falls.dtype != torch.float32):
        raise ValueError(f"falls is {tuple(falls.shape)} {falls.dtype}: give float32 [{q.size(1)}]")
    return _attention(_readable(q), _readable(k), _readable(v), *ends, scale, cap or 0.0, falls)[0]
