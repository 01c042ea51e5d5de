"""The ways to compute attention under a pattern: each builds a function of (q, k, v, *learned), once for a shape.

What a way makes beforehand (a dense mask, FlexAttention's block mask) is kept in the function, as a model would keep it
for all of its layers. q is [B, H, S, D], k and v are [B, G, T, D] with H a multiple of G, and the result is
[B, H, S, D].
"""
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.patterns.pattern import MaskMod, Pattern, buckets_of, interval_of, mask_of, slopes_of
from common.block.oracle import MODULE_GATES
from common.runtime import compiler, engine

Attend = Callable[..., Tensor]             # (q, k, v, *learned) -> the result


@dataclass(frozen=True)
class Shape:
    """Of one call: q [batch, heads, queries, width], k and v [batch, kv_heads, keys, width].

    In differential attention v is [batch, kv_heads / 2, keys, 2 width]: two heads of scores share one of values.
    """
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    dtype: torch.dtype
    device: torch.device
    value_width: int | None = None         # where values are not as wide as keys

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, paired: bool = False) -> "Shape":
        """That of q, k and v; `paired` as differential attention has them. Raises ValueError where they do not fit."""
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.ndim != 4:
                raise ValueError(f"{name} is {tuple(t.shape)}: give [batch, heads, length, width]")
            if (t.dtype, t.device) != (q.dtype, q.device):
                raise ValueError(f"q is {q.dtype} on {q.device}, {name} {t.dtype} on {t.device}: give one of both")
        if q.dtype not in MODULE_GATES:
            raise ValueError(f"q is {q.dtype}: give float64, float32, float16 or bfloat16")
        of_values = (k.size(0), k.size(1) // 2, k.size(2), 2 * k.size(3)) if paired else tuple(k.shape)
        if tuple(v.shape) != of_values:
            raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}: give a v of {of_values}")
        if (q.size(0), q.size(3)) != (k.size(0), k.size(3)):
            raise ValueError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}: give one batch and one width")
        if not q.numel() or not k.numel():
            raise ValueError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}: give no empty tensor")
        if q.size(1) % k.size(1):
            raise ValueError(f"{q.size(1)} heads of queries, {k.size(1)} of keys: give a multiple of these")
        return cls(q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), q.dtype, q.device,
                   v.size(3) if paired else None)

    @property
    def of_values(self) -> int:
        """How wide they are."""
        return self.value_width or self.width

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
    """[batch or 1, 1, queries or 1, keys], true where a query sees a key; None where it sees all."""
    allows = mask_of(pattern, shape.queries, shape.keys, shape.device)
    return None if allows is None else _evaluated(allows, pattern, shape)


def _evaluated(allows: MaskMod, pattern: Pattern, shape: Shape) -> Tensor:
    batch = shape.batch if pattern.lengths else 1
    return allows(*_positions(batch, 1, shape.queries, shape.keys, shape.device))


@dataclass(frozen=True)
class Bias:
    """What is added to scores. It depends on the distance of key and query alone, so it is kept as one row a head.

    Indexing [heads, queries, keys] would give the same, but its gradient would add up queries * keys numbers into a
    few buckets, one after the other.
    """
    shape: Shape
    slopes: Tensor | None                  # [heads]
    buckets: Tensor | None                 # [queries + keys - 1], of k - q + queries - 1

    @classmethod
    def of(cls, pattern: Pattern, shape: Shape) -> "Bias | None":
        """None where nothing is added."""
        if pattern.alibi:
            return cls(shape, slopes_of(shape.heads, shape.device), None)
        if pattern.table is not None:
            return cls(shape, None, buckets_of(shape.queries, shape.keys, pattern.causal, shape.device))
        return None

    def by_distance(self, *learned: Tensor) -> Tensor:
        """[heads, queries + keys - 1], of k - q + queries - 1, in FP32 or wider."""
        if self.slopes is not None:
            distance = torch.arange(1 - self.shape.keys, self.shape.queries, device=self.shape.device).abs()
            return -self.slopes[:, None] * distance
        assert self.buckets is not None
        return learned[0].mT[:, self.buckets]

    def __call__(self, *learned: Tensor) -> Tensor:
        """[1, heads, queries, keys] in the dtype of the inputs."""
        by_distance, dtype = self.by_distance(*learned), self.shape.dtype
        if learned:                                        # widened before it is spread: its gradient sums in FP32
            return spread(by_distance, self.shape.keys).to(dtype)
        return spread(by_distance.to(dtype), self.shape.keys)


def spread(by_distance: Tensor, keys: int) -> Tensor:
    """[1, heads, queries, keys] of `Bias.by_distance`: the row of a query begins one place before that of the last."""
    return by_distance.unfold(-1, keys, 1).flip(1)[None]


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
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    if pattern.may_see_nothing:
        assert mask is not None
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return weights @ v


def by_hand(pattern: Pattern, shape: Shape) -> Attend:
    """Scores, mask, softmax and sum, one operator after the other; the mask is kept."""
    mask, added = dense_mask(pattern, shape), Bias.of(pattern, shape)
    kept = None if added is None or pattern.learned else added()

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        bias = added(*learned) if added is not None and learned else kept
        return formula(pattern, shape, q, k, v, mask, bias)
    return attend


def compiled(pattern: Pattern, shape: Shape) -> Attend:
    """The same formula, its mask and bias computed inside, by torch.compile."""
    require_compiler(shape.device)
    allows, added = mask_of(pattern, shape.queries, shape.keys, shape.device), Bias.of(pattern, shape)

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        mask = None if allows is None else _evaluated(allows, pattern, shape)
        return formula(pattern, shape, q, k, v, mask, None if added is None else added(*learned))
    return torch.compile(attend, fullgraph=True, dynamic=False)


def require_compiler(device: torch.device) -> None:
    """Raise NotImplementedError where torch.compile can't work; let it compile as many as there are."""
    if reason := compiler.missing(device):
        raise NotImplementedError(reason)
    compiler.allow_many_graphs()


# ---------------------------------------------------------------------------------------------------------------- SDPA


def sdpa(pattern: Pattern, shape: Shape) -> Attend:
    """`scaled_dot_product_attention`, with `is_causal` where that says it all, else with a dense mask."""
    if pattern.cap is not None:
        raise NotImplementedError("it can't cap scores: a tanh would stand between them and the softmax")
    options: dict[str, Any] = {"enable_gqa": True} if shape.heads != shape.kv_heads else {}
    is_causal = is_causal_to_sdpa(pattern, shape)
    blind = None
    if pattern.may_see_nothing:                            # not every backend gives zeros, or gradients, for these
        seen = dense_mask(pattern, shape)
        blind = None if seen is None else ~seen.any(-1, keepdim=True)
    mask, added = _mask_of_sdpa(pattern, shape, blind), Bias.of(pattern, shape)
    kept = mask if added is None or pattern.learned else _masked(added(), mask)

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        attn_mask = _masked(added(*learned), mask) if added is not None and learned else kept
        y = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, **options)
        if y.requires_grad and y.is_cuda:
            y.register_hook(functools.partial(_laid_out, y.stride()))
        return y if blind is None else y.masked_fill(blind, 0.0)
    return attend


def _laid_out(strides: tuple[int, ...], dy: Tensor) -> Tensor:
    """The gradient in the layout of the output: with another one cuDNN's backward was seen to be wrong (torch 2.11)."""
    if dy.stride() == strides:
        return dy
    return torch.empty_strided(dy.shape, strides, dtype=dy.dtype, device=dy.device).copy_(dy)


def is_causal_to_sdpa(pattern: Pattern, shape: Shape) -> bool:
    """Whether its flag says it all."""
    return pattern.is_plain_causal(shape.queries, shape.keys) and not pattern.has_bias


def _mask_of_sdpa(pattern: Pattern, shape: Shape, blind: Tensor | None) -> Tensor | None:
    """The dense mask; who is `blind` sees all, so that softmax has something to work on."""
    mask = None if is_causal_to_sdpa(pattern, shape) else dense_mask(pattern, shape)
    return mask if mask is None or blind is None else mask | blind


def _masked(bias: Tensor, mask: Tensor | None) -> Tensor:
    """[batch or 1, heads, queries, keys], -inf where nothing is seen."""
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
    require_compiler(shape.device)
    blocks, added, cap = block_mask(pattern, shape), Bias.of(pattern, shape), pattern.cap
    queries, ahead = shape.queries, shape.keys - shape.queries
    options: dict[str, Any] = {"enable_gqa": shape.heads > shape.kv_heads,
                               "kernel_options": _kernel_options(pattern, shape)}
    if added is None and cap is None:
        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, block_mask=blocks, **options)
        return _compiled_flex(plain)
    slopes = None if added is None else added.slopes

    def attend(q: Tensor, k: Tensor, v: Tensor, *by_distance: Tensor) -> Tensor:
        def modify(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if slopes is not None:
                score = score - slopes[h] * (query + ahead - key).abs()
            if by_distance:
                score = score + by_distance[0][h, key - query + queries - 1]
            return score
        return flex_attention(q, k, v, modify, blocks, **options)
    faster = _compiled_flex(attend)
    if added is None or not pattern.learned:
        return faster
    return lambda q, k, v, table: faster(q, k, v, added.by_distance(table))        # it takes memory, no expression


def _kernel_options(pattern: Pattern, shape: Shape) -> dict[str, Any]:
    """What its own choice of tiles does not see to."""
    options: dict[str, Any] = {}
    if shape.device.type != "cuda":
        return options
    if shape.queries < 128 < shape.queries * shape.heads // shape.kv_heads:        # no decoding kernel has such a tile
        options["FORCE_USE_FLEX_ATTENTION"] = True
    # With more stages the tiles do not fit into an H100's shared memory: a tile of the bias is kept in each.
    if shape.of_values > 128 or pattern.learned:
        options["bwd_num_stages"] = 1
    if shape.width <= 64 and pattern.learned:
        options["fwd_num_stages"] = 2
    return options


def _compiled_flex(attend: Attend) -> Attend:
    """Compiled. On a CPU it refuses tensors that ask for gradients, even where none are recorded."""
    faster = torch.compile(attend, fullgraph=True, dynamic=False)

    def call(*given: Tensor) -> Tensor:
        return faster(*given) if torch.is_grad_enabled() else faster(*(t.detach() for t in given))
    return call


# ----------------------------------------------------------------------------------------- libraries that take a window


def transformer_engine(pattern: Pattern, shape: Shape) -> Attend:
    """Transformer Engine's attention, where causal, a window or ALiBi is all there is."""
    if reason := why_no_kernel(shape):
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
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))              # [B, S, H, D]: it mistakes views
        return core(q, k, v, **options).unflatten(-1, (shape.heads, shape.width)).transpose(1, 2)
    return attend


def variable_length(pattern: Pattern, shape: Shape) -> Attend:
    """torch's `varlen_attn` on packed sequences: documents are as many, padding is left out; a window besides."""
    if reason := why_no_kernel(shape):
        raise NotImplementedError(reason)
    if pattern.prefix or pattern.has_bias or pattern.cap is not None:
        raise NotImplementedError("it takes lengths and a window, no such pattern")
    if shape.heads != shape.kv_heads:
        raise NotImplementedError("it takes as many heads of keys as of queries")
    if pattern.causal and shape.queries != shape.keys:
        raise NotImplementedError("its causal mask is for as many queries as keys")
    B, S, T, device = shape.batch, shape.queries, shape.keys, shape.device
    if pattern.lengths and pattern.causal:
        raise NotImplementedError("where keys are fewer than queries its causal mask begins elsewhere")
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


def triton_kernel(pattern: Pattern, shape: Shape) -> Attend:
    """Our own Triton kernel, where each query sees one range of keys; with ALiBi or a cap, without a learned bias."""
    if pattern.learned:
        raise NotImplementedError("it has no gradient of a learned bias")
    if reason := why_no_kernel(shape):
        raise NotImplementedError(reason)
    if shape.width not in (64, 128):
        raise NotImplementedError(f"it takes heads 64 or 128 wide, not {shape.width}")
    kernels = importlib.import_module("benchmarks.kernels.triton.interval_attention")      # imports Triton
    low, high = interval_of(pattern, shape.batch, shape.queries, shape.keys, shape.device)
    ends = kernels.intervals(low, high, shape.keys)
    falls = slopes_of(shape.heads, shape.device).float() if pattern.alibi else None
    return lambda q, k, v: kernels.interval_attention(q, k, v, ends, cap=pattern.cap, falls=falls)


def why_no_kernel(shape: Shape) -> str:
    """Why kernels for 16 bits and one width can't take these tensors; "" where they can."""
    if shape.device.type != "cuda":
        return "its kernels run on a GPU alone"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return "its kernels take float16 and bfloat16 alone"
    if shape.of_values != shape.width:
        return "it is called here with values as wide as keys alone"
    return ""


# ------------------------------------------------------------------------------------------------------------ all ways

Way = Callable[[Pattern, Shape], Attend]   # raises NotImplementedError with the reason

BY_HAND, SDPA, COMPILED, FLEX, TE, VARLEN, TRITON = ("by hand", "SDPA", "compiled", "FlexAttention",
                                                     "Transformer Engine", "varlen", "Triton")


def of_pairs(way: Way) -> Way:
    """The same way, for differential attention (arXiv:2410.05258) too: it attends twice, to the same values."""
    def build(pattern: Pattern, shape: Shape) -> Attend:
        share = pattern.differential
        if share is None:
            return way(pattern, shape)
        one = replace(shape, heads=shape.heads // 2, kv_heads=shape.kv_heads // 2)
        attend = way(replace(pattern, differential=None), one)
        return lambda q, k, v: attend(q[:, 0::2], k[:, 0::2], v) - share * attend(q[:, 1::2], k[:, 1::2], v)
    return build


WAYS: Mapping[str, Way] = {name: of_pairs(way) for name, way in (
    (BY_HAND, by_hand), (SDPA, sdpa), (COMPILED, compiled), (FLEX, flex), (TE, transformer_engine),
    (VARLEN, variable_length), (TRITON, triton_kernel))}


def why_no_backward(way: str, device: torch.device) -> str:
    """Why a way has no gradients there; "" where it has."""
    if way == FLEX and device.type == "cpu":
        return "FlexAttention has no backward on a CPU"
    return ""
