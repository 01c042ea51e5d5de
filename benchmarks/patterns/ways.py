"""The ways to compute attention under a pattern: each builds a function of (q, k, v, *learned), once for a shape.

What a way makes beforehand (a dense mask, FlexAttention's block mask) is kept in the function, as a model would keep it
for all of its layers. q is [B, H, S, D], k and v are [B, G, T, D] with H a multiple of G, and the result is
[B, H, S, D].
"""
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.patterns.pattern import Pattern, buckets_of, mask_of, slopes_of
from common.runtime import compiler, engine

Attend = Callable[..., Tensor]             # (q, k, v, *learned) -> the result


@dataclass(frozen=True)
class Shape:
    """Of one call: q [batch, heads, queries, width], k and v [batch, kv_heads, keys, width]."""
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "Shape":
        """That of q, k and v. Raises ValueError where they do not fit together."""
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.ndim != 4:
                raise ValueError(f"{name} is {tuple(t.shape)}: give [batch, heads, length, width]")
            if (t.dtype, t.device) != (q.dtype, q.device):
                raise ValueError(f"q is {q.dtype} on {q.device}, {name} {t.dtype} on {t.device}: give one of both")
        if k.shape != v.shape:
            raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}: give one shape")
        if (q.size(0), q.size(3)) != (k.size(0), k.size(3)):
            raise ValueError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}: give one batch and one width")
        if not q.numel() or not k.numel():
            raise ValueError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}: give no empty tensor")
        if q.size(1) % k.size(1):
            raise ValueError(f"{q.size(1)} heads of queries, {k.size(1)} of keys: give a multiple of these")
        return cls(q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), q.dtype, q.device)

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.width ** -0.5


# ------------------------------------------------------------------------------------------------------------- by hand


def _positions(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> list[Tensor]:
    """Indices b, h, q, k that broadcast to [batch, heads, queries, keys]."""
    b, h, q, k = (torch.arange(size, device=device) for size in (batch, heads, queries, keys))
    return [b[:, None, None, None], h[None, :, None, None], q[None, None, :, None], k[None, None, None, :]]


def dense_mask(pattern: Pattern, shape: Shape) -> Tensor | None:
    """[batch or 1, 1, queries, keys], true where a query sees a key; None where it sees all."""
    allows = mask_of(pattern, shape.queries, shape.keys, shape.device)
    if allows is None:
        return None
    batch = shape.batch if pattern.lengths else 1
    return allows(*_positions(batch, 1, shape.queries, shape.keys, shape.device))


def dense_bias(pattern: Pattern, shape: Shape) -> Callable[..., Tensor] | None:
    """learned -> [1, heads, queries, keys] that is added to scores, in FP32 or wider; None where nothing is."""
    _, _, q, k = _positions(1, 1, shape.queries, shape.keys, shape.device)
    if pattern.alibi:
        distance = (q + shape.keys - shape.queries - k).abs()
        bias = -slopes_of(shape.heads, shape.device)[None, :, None, None] * distance
        return lambda *learned: bias
    if pattern.table is not None:
        buckets = buckets_of(shape.queries, shape.keys, pattern.causal, shape.device)
        places = buckets[k - q + shape.queries - 1][0, 0]
        return lambda table: table[places].permute(2, 0, 1)[None]
    return None


def formula(pattern: Pattern, shape: Shape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
            ) -> Tensor:
    """softmax of scaled, capped, biased and masked scores, times v; zeros for a query that sees no key."""
    repeated = shape.heads // shape.kv_heads
    if repeated > 1:
        k, v = k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1)
    scores = q @ k.transpose(-2, -1) * shape.scale
    if pattern.cap is not None:
        scores = pattern.cap * torch.tanh(scores / pattern.cap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    if pattern.may_see_nothing:
        assert mask is not None
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return weights @ v


def by_hand(pattern: Pattern, shape: Shape) -> Attend:
    """Scores, mask, softmax and sum, one operator after the other; the mask is kept."""
    mask, bias = dense_mask(pattern, shape), dense_bias(pattern, shape)

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        return formula(pattern, shape, q, k, v, mask, bias(*learned) if bias else None)
    return attend


def compiled(pattern: Pattern, shape: Shape) -> Attend:
    """The same formula, its mask and bias computed inside, by torch.compile."""
    _require_compiler(shape.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        mask, bias = dense_mask(pattern, shape), dense_bias(pattern, shape)
        return formula(pattern, shape, q, k, v, mask, bias(*learned) if bias else None)
    return torch.compile(attend, fullgraph=True, dynamic=False)


def _require_compiler(device: torch.device) -> None:
    """Raise NotImplementedError where torch.compile can't work; let it compile as many as there are."""
    if reason := compiler.missing(device):
        raise NotImplementedError(reason)
    compiler.allow_many_graphs()


# ---------------------------------------------------------------------------------------------------------------- SDPA


def sdpa(pattern: Pattern, shape: Shape, backend: SDPBackend | None = None) -> Attend:
    """`scaled_dot_product_attention`, with `is_causal` where that says it all, else with a dense mask.

    `backend` is the only one that it may take; torch chooses where it is None.
    """
    if pattern.cap is not None:
        raise NotImplementedError("it can't cap scores: a tanh would stand between them and the softmax")
    options: dict[str, Any] = {"enable_gqa": True} if shape.heads != shape.kv_heads else {}
    is_causal = pattern.is_plain_causal(shape.queries, shape.keys) and not pattern.has_bias
    mask = None if is_causal else dense_mask(pattern, shape)
    bias = dense_bias(pattern, shape)
    kept = None if bias is None or pattern.learned else _added(bias(), mask, shape)

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        attn_mask = kept if kept is not None else mask
        if bias is not None and learned:
            attn_mask = _added(bias(*learned), mask, shape)
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, **options)
    if backend is None:
        return attend
    return sdpa_kernel(backend)(attend)


def _added(bias: Tensor, mask: Tensor | None, shape: Shape) -> Tensor:
    """[batch or 1, heads, queries, keys] in the dtype of the inputs, -inf where nothing is seen."""
    bias = bias.to(shape.dtype)
    return bias if mask is None else bias.masked_fill(~mask, float("-inf"))


# ------------------------------------------------------------------------------------------------------- FlexAttention


def block_mask(pattern: Pattern, shape: Shape) -> BlockMask | None:
    """FlexAttention's own form of the mask, by blocks; None where every query sees every key."""
    allows = mask_of(pattern, shape.queries, shape.keys, shape.device)
    if allows is None:
        return None
    batch = shape.batch if pattern.lengths else None
    return create_block_mask(allows, batch, None, shape.queries, shape.keys, device=shape.device)


def flex(pattern: Pattern, shape: Shape) -> Attend:
    """FlexAttention, compiled; its block mask is kept."""
    _require_compiler(shape.device)
    blocks, gqa = block_mask(pattern, shape), shape.heads != shape.kv_heads
    queries, ahead, cap = shape.queries, shape.keys - shape.queries, pattern.cap
    slopes = slopes_of(shape.heads, shape.device) if pattern.alibi else None
    buckets = None
    if pattern.table is not None:
        buckets = buckets_of(shape.queries, shape.keys, pattern.causal, shape.device)
    if not (pattern.has_bias or cap):
        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, block_mask=blocks, enable_gqa=gqa)
        return _compiled_flex(plain)

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        def modify(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if slopes is not None:
                score = score - slopes[h] * (query + ahead - key).abs()
            if buckets is not None:
                score = score + learned[0][buckets[key - query + queries - 1], h]
            return score
        return flex_attention(q, k, v, modify, blocks, enable_gqa=gqa)
    return _compiled_flex(attend)


def _compiled_flex(attend: Attend) -> Attend:
    """Compiled. On a CPU it refuses tensors that ask for gradients, even where none are recorded."""
    faster = torch.compile(attend, fullgraph=True, dynamic=False)

    def call(*given: Tensor) -> Tensor:
        return faster(*given) if torch.is_grad_enabled() else faster(*(t.detach() for t in given))
    return call


# ----------------------------------------------------------------------------------------- libraries that take a window


def transformer_engine(pattern: Pattern, shape: Shape) -> Attend:
    """Transformer Engine's attention, where causal, a window or ALiBi is all there is."""
    if reason := _on_a_gpu_in_16_bits(shape):
        raise NotImplementedError(reason)
    if pattern.prefix or pattern.documents or pattern.lengths or pattern.table is not None or pattern.cap is not None:
        raise NotImplementedError("it takes a window and ALiBi, no such pattern")
    if pattern.causal and shape.queries != shape.keys:
        raise NotImplementedError("its causal mask is for as many queries as keys")
    if error := engine.import_error():
        raise NotImplementedError(f"Transformer Engine does not import: {error}")
    te = engine.transformer_engine()
    window = (-1, 0) if pattern.causal else (-1, -1)
    if pattern.window is not None:
        window = (pattern.window - 1, 0)                   # it counts the neighbours on the left, not the query itself
    core = te.DotProductAttention(shape.heads, shape.width, num_gqa_groups=shape.kv_heads, attention_dropout=0.0,
                                  qkv_format="bshd", attn_mask_type="causal" if pattern.causal else "no_mask",
                                  window_size=window)
    options: dict[str, Any] = {}
    if pattern.alibi:
        options = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes_of(shape.heads, shape.device).float()}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                           # [B, S, H, D]
        return core(q, k, v, **options).unflatten(-1, (shape.heads, shape.width)).transpose(1, 2)
    return attend


def variable_length(pattern: Pattern, shape: Shape) -> Attend:
    """torch's `varlen_attn` on packed sequences: documents are as many, padding is left out; a window besides."""
    if reason := _on_a_gpu_in_16_bits(shape):
        raise NotImplementedError(reason)
    if pattern.prefix or pattern.has_bias or pattern.cap is not None:
        raise NotImplementedError("it takes lengths and a window, no such pattern")
    if shape.heads != shape.kv_heads:
        raise NotImplementedError("it takes as many heads of keys as of queries")
    if pattern.causal and shape.queries != shape.keys:
        raise NotImplementedError("its causal mask is for as many queries as keys")
    B, S, T, device = shape.batch, shape.queries, shape.keys, shape.device
    if pattern.documents and pattern.lengths:
        raise NotImplementedError("it takes documents or lengths, not both")
    of_queries = list(pattern.documents) * B if pattern.documents else [S] * B
    of_keys = list(pattern.lengths) or (of_queries if pattern.documents else [T] * B)
    ends_q, ends_k = (F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(device, torch.int32)
                      for sizes in (of_queries, of_keys))
    kept = None
    if pattern.lengths:
        kept = torch.cat([torch.arange(length) + b * T for b, length in enumerate(pattern.lengths)]).to(device)
    window = (-1, 0) if pattern.causal else (-1, -1)
    if pattern.window is not None:
        window = (pattern.window - 1, 0)

    def packed(t: Tensor) -> Tensor:
        return t.transpose(1, 2).flatten(0, 1)                                     # [B * length, H, D]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = map(packed, (q, k, v))
        if kept is not None:
            k, v = k[kept], v[kept]
        y = varlen.varlen_attn(q, k, v, ends_q, ends_k, max(of_queries), max(of_keys), window_size=window)
        assert isinstance(y, Tensor)                       # nothing else was asked for
        return y.unflatten(0, (B, S)).transpose(1, 2)
    return attend


def _on_a_gpu_in_16_bits(shape: Shape) -> str:
    """Why its kernels can't take these tensors; "" where they can."""
    if shape.device.type != "cuda":
        return "its kernels run on a GPU alone"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return "its kernels take float16 and bfloat16 alone"
    return ""


# ------------------------------------------------------------------------------------------------------------ all ways

Way = Callable[[Pattern, Shape], Attend]   # raises NotImplementedError with the reason

BY_HAND, SDPA, COMPILED, FLEX, TE, VARLEN = ("by hand", "SDPA", "compiled", "FlexAttention", "Transformer Engine",
                                             "varlen")
WAYS: Mapping[str, Way] = {BY_HAND: by_hand, SDPA: sdpa, COMPILED: compiled, FLEX: flex, TE: transformer_engine,
                           VARLEN: variable_length}


def why_no_backward(way: str, device: torch.device) -> str:
    """Why a way has no gradients there; "" where it has."""
    if way == FLEX and device.type == "cpu":
        return "FlexAttention has no backward on a CPU"
    return ""
