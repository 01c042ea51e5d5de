"""Attention by hand becomes scaled_dot_product_attention: one fused kernel, and no scores in memory."""
import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from benchmarks.assistant import attention_source
from benchmarks.assistant.attention import Attention, Causal, Mask, attention_at, causal, infinite, is_causal, softmaxes
from benchmarks.assistant.fusing import Given, fused_or_why_not
from benchmarks.assistant.graph import Captured, Refused, place_of, with_stars
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Assumed, erase_unused, same_buffers
from benchmarks.assistant.technique import Advice, Found, Plan, Technique, found_at, unique
from common.block.evidence import FUSED_ATTENTION, Evidence


def find(program: Program) -> list[Found]:
    """Every attention by hand; where it can't be rewritten, with the reason."""
    found = [found_at(each, in_words(each) if isinstance(each, Attention) else "a softmax")
             for each in program.analysis.softmaxes]
    return unique([*_called_already(program), *found, *_not_captured(program)])


def _called_already(program: Program) -> list[Found]:
    """Where the function itself is called."""
    calls = [call for call in program.trace.calls if call.attends]
    return [Found(place, with_stars([call.module for call in calls if call.place == place]),
                  sum(call.place == place for call in calls), "attention", why_not="it is this function already")
            for place in dict.fromkeys(call.place for call in calls)]


def _not_captured(program: Program) -> list[Found]:
    """Where a softmax runs that is in no graph: Dynamo ran that function as it is."""
    captured = {place_of(softmax) for graph in program.graphs for softmax in softmaxes(graph)}
    calls = [call for call in program.trace.calls if call.name == "softmax" and call.place not in captured]
    breaks = ", ".join(str(each.place.name) for each in program.breaks if each.place and each.skips)
    why = "Dynamo runs this function as it is, so its graph can't be changed"
    return [Found(place, with_stars([call.module for call in calls if call.place == place]),
                  sum(call.place == place for call in calls), "a softmax",
                  why_not=why + (f": mend the graph break at {breaks}" if breaks else ""))
            for place in dict.fromkeys(call.place for call in calls)]


def in_words(attention: Attention) -> str:
    """What it keeps in memory, and how it is masked."""
    kind = "causal" if attention.is_causal else "masked" if attention.masks else "unmasked"
    return f"{kind} attention by hand writes its scores {list(attention.shape)}, and reads them again"


def advice(program: Program, found: Found) -> Advice | None:
    """The call in place of the lines from the one matmul to the other; a model of transformers has a switch for it."""
    if hasattr(program.model, "set_attn_implementation") and found.place and not found.place.is_yours:
        return Advice('model.set_attn_implementation("sdpa")')
    assert isinstance(found.region, Attention)
    return attention_source.advice(found.region)


def rewrite(graph: Captured) -> list[Assumed]:
    """Put the fused function in place of every attention by hand; what that assumes of the buffers."""
    assumed: list[Assumed] = []
    for softmax in softmaxes(graph):                             # one at a time: each changes the graph
        with contextlib.suppress(Refused):
            assumed += _rewrite(attention_at(softmax, graph))
    graph.module.recompile()
    return assumed


def _rewrite(attention: Attention) -> list[Assumed]:
    graph, shape, nodes = attention.graph, attention.shape, attention.graph.module.graph
    masks, assumed = attention.masks, []
    if attention.is_causal:
        for mask in masks:
            by_values = causal(mask, graph, shape)
            assert by_values is not None
            assumed.append(_assumed(mask, by_values, graph, shape[-1]))
    with nodes.inserting_before(attention.output):
        operands = [operand.put_into(nodes) for operand in (attention.query, attention.key, attention.value)]
        mask_node = None if attention.is_causal else _mask(masks, operands[0], nodes)
        for _ in range(attention.dimensions_of_the_mask, 2 if mask_node is not None else 0):
            mask_node = nodes.call_method("unsqueeze", (mask_node, 0))
        if len(shape) == 3:                                      # the fused kernels take four dimensions alone
            operands = [nodes.call_method("unsqueeze", (t, 0)) for t in operands]
        options = {"attn_mask": mask_node, "dropout_p": attention.dropout_p, "is_causal": attention.is_causal,
                   "scale": attention.scale}
        fused = nodes.call_function(F.scaled_dot_product_attention, tuple(operands), options)
        fused.meta = dict(attention.output.meta)
        result = nodes.call_method("squeeze", (fused, 0)) if len(shape) == 3 else fused
        if attention.order:
            result = nodes.call_method("permute", (result, *attention.order))
    attention.output.replace_all_uses_with(result)
    for node in reversed(attention.nodes):
        nodes.erase_node(node)
    for mask in masks:
        erase_unused(mask.tensor, nodes)
    return assumed


def _assumed(mask: Mask, by_values: Causal, graph: Captured, length: int) -> Assumed:
    """That the buffers behind a mask still make it causal, in whichever module this graph runs."""
    return same_buffers(graph, mask.tensor, by_values.sources, lambda values: is_causal(mask, values, length))


def _mask(masks: list[Mask], query: Any, nodes: fx.Graph) -> Any:
    """One mask from all: boolean, True where a position is seen, where all of them block; else added to the scores."""
    combined = None
    if all(map(infinite, masks)):
        for mask in masks:
            seen = nodes.call_method("bool", (mask.tensor,))
            if mask.blocks:
                seen = nodes.call_method("logical_not", (seen,))
            combined = seen if combined is None else nodes.call_method("logical_and", (combined, seen))
        return combined
    for mask in masks:
        added = _added(mask, nodes)
        combined = added if combined is None else nodes.call_method("add", (combined, added))
    return nodes.call_method("to", (combined, query))


def _added(mask: Mask, nodes: fx.Graph) -> fx.Node:
    """What it adds to the scores."""
    if not mask.is_boolean:
        return nodes.call_function(torch.mul, (mask.tensor, mask.factor)) if mask.factor != 1 else mask.tensor
    blocked = nodes.call_method("bool", (mask.tensor,))
    if not mask.blocks:
        blocked = nodes.call_method("logical_not", (blocked,))
    zeros = nodes.call_function(torch.zeros_like, (blocked,), {"dtype": torch.float64})
    return nodes.call_method("masked_fill", (zeros, blocked, mask.factor * (mask.value or 0.0)))


def apply(plan: Plan) -> None:
    """To every graph of the model."""
    plan.passes.append(rewrite)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why no fused kernel ran, or softmax still does; "" where all is fused."""
    if not any(seen.kinds[kind] for kind in FUSED_ATTENTION):
        tried = [_fused_or_why_not(Given.of_region(each), program) for each in program.analysis.attentions]
        reasons = dict.fromkeys(why_not for _, why_not in tried if why_not)
        return "no fused attention kernel ran" + "".join(f": {reason}" for reason in reasons)
    left = seen.kinds["softmax"]                           # that of a loss, too
    return f"{left} softmax kernels ran, and no fewer before" if left >= before.kinds["softmax"] else ""


def seen_alone(program: Program) -> list[tuple[str, str]]:
    """Of each call of the function the kernel that computes it, or why there is none."""
    said: dict[tuple[str, str], None] = {}
    for call in program.trace.calls:
        if call.attends and call.place:
            ran, why_not = _fused_or_why_not(replace(call.attends, trains=program.trace.trains), program)
            said[call.place.name, f"{ran} computes it" if ran else f"no fused kernel computes it: {why_not}"] = None
    return list(said)


def _fused_or_why_not(given: Given, program: Program) -> tuple[str, str]:
    return fused_or_why_not(given.without_gradients() if program.is_inference else given)


TECHNIQUE = Technique("sdpa", "attention by hand -> scaled_dot_product_attention", find, apply, advice, fired=fired,
                      seen_alone=seen_alone)
