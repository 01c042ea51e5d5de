"""Attention by hand whose scores are capped becomes FlexAttention: one kernel, compiled for this score function."""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.assistant import attention_source
from benchmarks.assistant.attention import Attention
from benchmarks.assistant.attention_rewriting import rewrite_attention
from benchmarks.assistant.fusing import softmax_left
from benchmarks.assistant.graph import Captured
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Assumed, traced_again
from benchmarks.assistant.technique import Advice, Found, Plan, Technique, found_at, unique
from common.block.evidence import Evidence
from common.runtime import compiler

KERNEL = "flex_attention"                  # in the names of its kernels on a GPU


def find(program: Program) -> list[Found]:
    """Every attention by hand with a soft cap; where it can't be rewritten, with the reason."""
    capped = [each for each in program.analysis.attentions if each.cap is not None]
    return unique(found_at(each, in_words(each), _why_not(each, program)) for each in capped)


def in_words(attention: Attention) -> str:
    """What it keeps in memory."""
    return f"attention by hand with a soft cap writes its scores {list(attention.shape)}, and reads them again"


def _why_not(attention: Attention, program: Program) -> str:
    """Why this program can't have it there; "" where it can."""
    if not _can_take(attention):
        return "FlexAttention has no dropout" if attention.dropout_p else "its keys or values are broadcast"
    if attention.device.type == "cpu" and program.trace.trains and not program.is_inference:
        return "FlexAttention has no backward on a CPU: with --inference it can be tried"
    return ""


def _can_take(attention: Attention) -> bool:
    is_whole = all(operand.shape[:-2] == attention.leading for operand in attention.operands)
    return attention.cap is not None and not attention.dropout_p and is_whole


def advice(program: Program, found: Found) -> Advice | None:
    """A score function and the call, in place of the lines from the one matmul to the other. Raises NotWritten."""
    return attention_source.advice(program, found, "flex_attention")


def rewrite(graph: Captured) -> list[Assumed]:
    """Put FlexAttention in place of every attention with a soft cap; what that assumes of the buffers."""
    return rewrite_attention(graph, _can_take, _call)


def _call(attention: Attention, operands: list[Any], mask: fx.Node | None, nodes: fx.Graph) -> fx.Node:
    assert attention.cap is not None
    blocks = causal_blocks(attention.shape[-1], attention.device) if attention.is_causal else None
    return nodes.call_function(capped_attention(attention.cap, attention.scale, blocks), (*operands, mask))


def causal_blocks(length: int, device: torch.device) -> BlockMask:
    """Of as many keys as queries."""
    return flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)


_compiled: Any = torch.compile(flex.flex_attention, dynamic=False)


def capped_attention(cap: float, scale: float, blocks: BlockMask | None) -> Callable[..., Tensor]:
    """A function of query, key, value [B, H, S, D], and a mask that [B, H, S, S] broadcasts to, boolean or added.

    `blocks` stand for a mask that is causal. What no kernel of FlexAttention can compute is computed by hand: FP64, and
    on a CPU what records gradients.
    """
    def modify(score: Tensor, mask: Tensor | None) -> Tensor:
        score = cap * torch.tanh(score)
        if mask is None:
            return score
        return torch.where(mask, score, -float("inf")) if mask.dtype == torch.bool else score + mask

    @traced_again
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        kind = query.device.type
        if torch.is_autocast_enabled(kind):                # which knows no FlexAttention
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
        if query.dtype == torch.float64 or (kind == "cpu" and torch.is_grad_enabled()):
            if blocks is not None:
                mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
            return modify(query @ key.mT * scale, mask).softmax(-1) @ value
        if kind == "cpu":                                  # it refuses what asks for gradients, recorded or not,
            operands = query, key, value                   # and views of a matmul's output
            query, key, value = (operand.detach().contiguous() for operand in operands)
        if mask is not None:
            mask = mask.expand(*query.shape[:-1], key.size(-2))

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return modify(score, None if mask is None else mask[b, h, q, k])
        return _compiled(query, key, value, score_mod, blocks, scale)
    return attend


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    return compiler.missing(device) or ""


def apply(plan: Plan) -> None:
    """To every graph of the model."""
    plan.passes.append(rewrite)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why its kernel did not run; on a CPU, whose compiled kernels have no names, whether a softmax still does."""
    if any(KERNEL in name for name in seen.kernels):
        return ""
    if any(each.device.type == "cuda" for each in program.analysis.attentions):
        return "no kernel of FlexAttention ran"
    return softmax_left(before, seen)


TECHNIQUE = Technique("flex-attention", "attention by hand with a soft cap -> FlexAttention", find, apply, advice,
                      missing, fired)
