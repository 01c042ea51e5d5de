"""A decode step over a paged cache: one query a sequence, its keys in pages of a pool that all sequences share.

Each way is built once for a shape and then called with (q, k, v, table, lengths), for those two change from step to
step: what a mask or a list of blocks costs is part of a step here. q is [B, H, 1, D], k and v are pools [pages, PAGE,
G, D], `table` [B, P] has the pages of each sequence in order, `lengths` [B] how many of its keys count, both int32. The
result is [B, H, 1, D]. None has a gradient.
"""
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.patterns.checking import gated
from benchmarks.patterns.pattern import Pattern
from benchmarks.patterns.ways import (
    BY_HAND,
    COMPILED,
    FLEX,
    SDPA,
    TE,
    TRITON,
    VARLEN,
    Shape,
    formula,
    require_compiler,
    why_no_kernel,
)
from common.block import oracle
from common.outcome import Failed

PAGE = 128                                 # keys of a page: FlexAttention's blocks are as long
SPARE = 3                                  # pages of the pool that no sequence has
RUBBISH = 30.0                             # what lies where no sequence has a key: it shows where it is read
UNMASKED = Pattern("full")

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Way = Callable[[Shape], Step]              # raises NotImplementedError with the reason


def gathered(pool: Tensor, table: Tensor) -> Tensor:
    """[B, G, P * PAGE, D]: a copy of each sequence's pages, side by side."""
    return pool[table].flatten(1, 2).transpose(1, 2)


def _mask(keys: int, lengths: Tensor) -> Tensor:
    """[B, 1, 1, keys]: which of them count."""
    return (torch.arange(keys, device=lengths.device) < lengths[:, None])[:, None, None]


def by_hand(shape: Shape) -> Step:
    """Pages are gathered; then scores, mask, softmax and sum, one operator after the other."""
    def step(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        keys, values = gathered(k, table), gathered(v, table)
        return formula(UNMASKED, shape, q, keys, values, _mask(keys.size(2), lengths), None)
    return step


def compiled(shape: Shape) -> Step:
    """The same, by torch.compile."""
    require_compiler(shape.device)
    return torch.compile(by_hand(shape), fullgraph=True, dynamic=False)


def sdpa(shape: Shape) -> Step:
    """Pages are gathered; then `scaled_dot_product_attention` with a mask."""
    def step(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        keys, values = gathered(k, table), gathered(v, table)
        return F.scaled_dot_product_attention(q, keys, values, _mask(keys.size(2), lengths),
                                              enable_gqa=shape.heads != shape.kv_heads)
    return step


def flex(shape: Shape) -> Step:
    """FlexAttention over the whole pool: blocks are pages, and a sequence's list of blocks is its row of the table."""
    require_compiler(shape.device)

    def step(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        blocks = block_mask(table, lengths, k.size(0))
        keys, values = (pool.flatten(0, 1).transpose(0, 1)[None] for pool in (k, v))       # [1, G, all places, D]
        return flex_attention(q, keys, values, block_mask=blocks, enable_gqa=shape.heads != shape.kv_heads)
    return torch.compile(step, fullgraph=True, dynamic=False)


def block_mask(table: Tensor, lengths: Tensor, pages: int) -> BlockMask:
    """Full pages as full blocks, and the last one, where it is not full, as one whose places are compared."""
    full = lengths // PAGE
    last = table.gather(1, full.clamp(max=table.size(1) - 1)[:, None].long())
    listed = F.pad(table, (0, pages - table.size(1)))      # as wide as there are pages
    partial = F.pad(last, (0, pages - 1))

    def allows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k % PAGE < lengths[b] % PAGE                # computed here: what is captured must be in memory
    some, its_page, count, its_pages = (t[:, None, None] for t in ((lengths % PAGE > 0).int(), partial, full, listed))
    return BlockMask.from_kv_blocks(some, its_page, count, its_pages, BLOCK_SIZE=(128, PAGE), mask_mod=allows,
                                    seq_lengths=(1, pages * PAGE), compute_q_blocks=False)


def transformer_engine(shape: Shape) -> Step:
    """Not called here."""
    raise NotImplementedError("its pages are in a cache of its own (InferenceParams)")


def variable_length(shape: Shape) -> Step:
    """torch's `varlen_attn`, where it takes a table of pages."""
    if reason := why_no_kernel(shape):
        raise NotImplementedError(reason)
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        raise NotImplementedError(f"torch {torch.__version__} has no table of pages for it")
    starts = torch.arange(shape.batch + 1, device=shape.device, dtype=torch.int32)
    options: dict[str, Any] = {"enable_gqa": True} if shape.heads != shape.kv_heads else {}

    def step(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        y = varlen.varlen_attn(q[:, :, 0], k, v, starts, None, 1, shape.keys, seqused_k=lengths, block_table=table,
                               **options)
        assert isinstance(y, Tensor)                       # nothing else was asked for
        return y[:, :, None]
    return step


def triton_kernel(shape: Shape) -> Step:
    """Our own Triton kernel, which reads the pages where they lie."""
    if reason := why_no_kernel(shape):
        raise NotImplementedError(reason)
    if shape.width not in (64, 128):
        raise NotImplementedError(f"it takes heads 64 or 128 wide, not {shape.width}")
    return importlib.import_module("benchmarks.kernels.triton.paged_attention").paged_attention    # imports Triton


WAYS: Mapping[str, Way] = {BY_HAND: by_hand, SDPA: sdpa, COMPILED: compiled, FLEX: flex, TE: transformer_engine,
                           VARLEN: variable_length, TRITON: triton_kernel}


# --------------------------------------------------------------------------------------------------- inputs and truth


def lengths_of(shape: Shape) -> list[int]:
    """Of each sequence: from half of all keys to all, evenly spread."""
    return [shape.keys - shape.keys * b // (2 * shape.batch) for b in range(shape.batch)]


def inputs_of(shape: Shape, seed: int) -> list[Tensor]:
    """q, pools, a table in random order and lengths; rubbish wherever no key lies."""
    generator = torch.Generator(shape.device).manual_seed(seed)
    device, most = shape.device, shape.keys // PAGE
    pages = shape.batch * most + SPARE
    shuffled = torch.randperm(pages, generator=generator, device=device)
    table = shuffled[:shape.batch * most].view(shape.batch, most)
    lengths = torch.tensor(lengths_of(shape), device=device, dtype=torch.int32)
    q = torch.randn(shape.batch, shape.heads, 1, shape.width, generator=generator, device=device).to(shape.dtype)
    counts = _mask(shape.keys, lengths)[:, 0, 0].view(-1, PAGE)                            # [B * P, PAGE]
    holds_key = torch.zeros(pages, PAGE, dtype=torch.bool, device=device)
    holds_key[table.flatten()] = counts
    pools = []
    for _ in range(2):
        size = pages, PAGE, shape.kv_heads, shape.width
        pool = torch.randn(size, generator=generator, device=device).to(shape.dtype)
        pools.append(pool.masked_fill_(~holds_key[:, :, None, None], RUBBISH))
    return [q, *pools, table.int(), lengths]


def check(step: Step, shape: Shape, given: Sequence[Tensor]) -> dict[str, float]:
    """"output" -> relative L2 error of its first and last heads. Raises Failed where it is beyond its gate."""
    with torch.no_grad():
        y = step(*given)
    expected = shape.batch, shape.heads, 1, shape.width
    if y.shape != expected or y.dtype != shape.dtype:
        raise Failed(f"it gives {y.dtype} {tuple(y.shape)}, not {shape.dtype} {expected}")
    repeated = shape.heads // shape.kv_heads
    error = 0.0
    for head in sorted({0, shape.kv_heads - 1}):
        own = y[:, head * repeated:(head + 1) * repeated]
        error = max(error, oracle.relative_error(own, _exact(shape, given, head)))
    return gated({"output": error}, shape)


def _exact(shape: Shape, given: Sequence[Tensor], head: int) -> Tensor:
    """The result in FP64 for a head of keys and those of queries that share it, a sequence after the other."""
    q, k, v, table, lengths = given
    repeated = shape.heads // shape.kv_heads
    queries = q[:, head * repeated:(head + 1) * repeated].double()
    rows = []
    for b, length in enumerate(lengths.tolist()):
        keys, values = (gathered(pool[:, :, head:head + 1], table[b:b + 1])[:, :, :length].double()
                        for pool in (k, v))
        one = Shape(1, repeated, 1, 1, length, shape.width, torch.float64, shape.device)
        rows.append(formula(UNMASKED, one, queries[b:b + 1], keys, values, None, None))
    return torch.cat(rows)
