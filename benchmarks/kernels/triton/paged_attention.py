"""One decode step over a paged cache, in Triton: a query a sequence attends to keys that lie in pages of a pool.

Few queries leave a GPU idle, so each sequence's pages are split among programs, as flash-decoding does; a second kernel
joins their shares. A program serves all heads of queries that share one of keys, so each key is read once. The step is
bound by the bytes of the cache: nothing else of it is large.
"""
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..inputs import described, require_like
from .attention import LOG2_E, _dot
from .launch import require_float

ROWS = 16                                  # of queries that a tensor core's tile has at least
BLOCK_N = 64                               # keys at once
PROGRAMS = 4 * 132                         # four for each processor of an H100


@triton.jit
def _attend(q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, part_ptr, lse_ptr, slope, pages, per_split, q_batch, q_head,
            kv_page, kv_row, kv_head, R: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr):
    batch, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups, splits = tl.num_programs(1), tl.num_programs(2)
    length = tl.load(lengths_ptr + batch)
    rows, columns, offsets = tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
    heads = group * R + rows
    is_head = rows < R
    q = tl.load(q_ptr + tl.cast(batch, tl.int64) * q_batch + heads[:, None] * q_head + columns[None, :],
                mask=is_head[:, None], other=0.0)
    slope = tl.cast(slope, tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    start = split * per_split * PAGE
    stop = tl.minimum(start + per_split * PAGE, length)
    for first in range(start, stop, BLOCK_N):
        page = tl.cast(tl.load(table_ptr + batch * pages + first // PAGE), tl.int64)
        places = (first % PAGE + offsets)[:, None]
        inside = first + offsets < length
        tile = page * kv_page + places * kv_row + group * kv_head + columns[None, :]
        k = tl.load(k_ptr + tile, mask=inside[:, None], other=0.0)
        s = _dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * slope
        s = tl.where(inside[None, :], s, -float("inf"))
        risen = tl.maximum(top, tl.max(s, 1))              # finite: each block has a key inside
        p = tl.exp2(s - risen[:, None])
        shrink = tl.exp2(top - risen)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + tile, mask=inside[:, None], other=0.0)
        acc = _dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = risen
    is_empty = total == 0
    share = (tl.cast(batch, tl.int64) * groups * R + heads) * splits + split
    tl.store(part_ptr + share[:, None] * D + columns[None, :], acc / tl.where(is_empty, 1.0, total)[:, None],
             mask=is_head[:, None])
    tl.store(lse_ptr + share, tl.where(is_empty, -float("inf"), top + tl.log2(tl.where(is_empty, 1.0, total))),
             mask=is_head)


@triton.jit
def _join(part_ptr, lse_ptr, o_ptr, splits, SPLITS: tl.constexpr, D: tl.constexpr):
    row = tl.cast(tl.program_id(0), tl.int64)
    places, columns = tl.arange(0, SPLITS), tl.arange(0, D)
    given = places < splits
    lse = tl.load(lse_ptr + row * splits + places, mask=given, other=-float("inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))                # the first split always has a key
    weights = weights / tl.sum(weights, 0)
    part = tl.load(part_ptr + (row * splits + places)[:, None] * D + columns[None, :], mask=given[:, None], other=0.0)
    tl.store(o_ptr + row * D + columns, tl.sum(part * weights[:, None], 0))


def paged_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, scale: float | None = None
                    ) -> Tensor:
    """softmax(scale q k^T) v for the one query of each sequence, over its keys in pages of the pool.

    q [B, H, 1, D]; k and v [pages of the pool, PAGE, G, D] with H a multiple of G and PAGE of 64, all of one dtype
    (float16, bfloat16) on one GPU, D 64 or 128. `table` [B, P] has the pages of each sequence in order, `lengths` [B]
    how many of its keys count: from 1 to P * PAGE, which is not looked at, for that would wait for the GPU; both int32.
    The result is [B, H, 1, D]. It has no gradient. Raises ValueError for anything else.
    """
    require_float("q", q, (torch.float16, torch.bfloat16))
    if q.ndim != 4 or not q.numel() or q.size(2) != 1 or q.size(3) not in (64, 128):
        raise ValueError(f"q is {tuple(q.shape)}: give [B, H, 1, D], none of them 0, and D 64 or 128")
    B, H, _, D = q.shape
    if not isinstance(k, Tensor) or k.ndim != 4 or not k.numel() or k.size(1) % BLOCK_N or H % k.size(2):
        raise ValueError(f"k is {described(k)}: give [pages, PAGE, G, D], PAGE a multiple of {BLOCK_N}, and {H} heads "
                         "one of G")
    require_like("k", k, q, (*k.shape[:3], D), name_of_x="q")
    require_like("v", v, k, name_of_x="k")
    for name, given, ndim in (("table", table, 2), ("lengths", lengths, 1)):
        is_one = isinstance(given, Tensor) and given.dtype == torch.int32 and given.device == q.device
        if not is_one or given.ndim != ndim or given.size(0) != B or not given.numel():
            raise ValueError(f"{name} is {described(given)}: give int32 {'[B, P]' if ndim == 2 else '[B]'} on "
                             f"{q.device}, and B is {B}")
    scale = D ** -0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}: give a positive number")
    q, k, v, table, lengths = (t.contiguous() for t in (q, k, v, table, lengths))
    page, G, pages = k.size(1), k.size(2), table.size(1)
    per_split = triton.cdiv(pages, min(pages, triton.cdiv(PROGRAMS, B * G)))
    splits = triton.cdiv(pages, per_split)
    part = q.new_empty(B, H, splits, D, dtype=torch.float32)
    lse = q.new_empty(B, H, splits, dtype=torch.float32)
    o = torch.empty_like(q)
    # Not wrapped for torch.compile, which takes the host time at every launch.
    _attend[(B, G, splits)](
        q, k, v, table, lengths, part, lse, scale * LOG2_E, pages, per_split, *q.stride()[:2], *k.stride()[:3],
        R=H // G, D=D, PAGE=page, BLOCK_M=max(ROWS, triton.next_power_of_2(H // G)), BLOCK_N=BLOCK_N, num_warps=4,
        num_stages=3)
    _join[(B * H,)](part, lse, o, splits, SPLITS=triton.next_power_of_2(splits), D=D, num_warps=4)
    return o
