"""One call in place of an attention by hand, in a graph: its operands, and one mask made of all of them."""
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from benchmarks.assistant.attention import (
    Attention,
    Causal,
    Mask,
    causal,
    infinite,
    is_causal,
)
from benchmarks.assistant.attention_finding import attention_at
from benchmarks.assistant.constants import number_of
from benchmarks.assistant.graph import Captured, Refused, shape_of
from benchmarks.assistant.rewriting import Assumed, erase_unused, same_buffers
from benchmarks.assistant.softmaxes import softmaxes

# (the attention, [query, key, value] of four dimensions, the mask or None where it is causal or has none, where the
# nodes are put) -> the call
Call = Callable[[Attention, list[Any], fx.Node | None, fx.Graph], fx.Node]


def rewrite_attention(graph: Captured, can_take: Callable[[Attention], bool], call: Call) -> list[Assumed]:
    """Put the call in place of every attention by hand that it can take; what that assumes of the buffers."""
    assumed: list[Assumed] = []
    for softmax in softmaxes(graph):                             # one at a time: each changes the graph
        with contextlib.suppress(Refused):
            attention = attention_at(softmax, graph)
            if can_take(attention):
                assumed += _rewrite(attention, call)
    graph.module.recompile()
    return assumed


def _rewrite(attention: Attention, call: Call) -> list[Assumed]:
    graph, shape, nodes = attention.graph, attention.shape, attention.graph.module.graph
    masks, assumed = attention.masks, []
    if attention.is_causal:
        for mask in masks:
            by_values = causal(mask, graph, shape)
            assert by_values is not None
            assumed.append(_assumed(mask, by_values, graph, shape[-1]))
    with nodes.inserting_before(attention.output):
        operands = [operand.put_into(nodes) for operand in attention.operands]
        for tensor, power in attention.temperatures:
            function = torch.mul if power > 0 else torch.div
            operands[0] = nodes.call_function(function, (operands[0], tensor))
        if attention.mixes_dtypes:
            query, key, value = operands
            operands = [nodes.call_method("type_as", (t, value)) for t in (query, key)] + [value]
        if attention.is_viewed:
            operands = [_split_operand(t, operand.shape, attention.leading, nodes)
                        for t, operand in zip(operands, attention.operands, strict=True)]
            masks = [_split(mask, attention.leading, nodes) for mask in masks]
        else:
            operands = [_whole(t, operand.is_broadcast(attention.leading), attention.leading, nodes)
                        for t, operand in zip(operands, attention.operands, strict=True)]
        mask_node = None if attention.is_causal else _one_mask(masks, operands[0], nodes)
        if attention.merged > 1:
            operands = [nodes.call_method("flatten", (t, 0, attention.merged - 1)) for t in operands]
            beyond = attention.dimensions_of_the_mask - 4        # each of size 1
            if mask_node is not None and beyond > 0:
                mask_node = nodes.call_method("flatten", (mask_node, 0, beyond))
        if len(shape) == 3:                                      # the fused kernels take four dimensions alone
            operands = [nodes.call_method("unsqueeze", (t, 0)) for t in operands]
        fused = call(attention, operands, mask_node, nodes)
        fused.meta = dict(attention.output.meta)
        result = fused
        if len(shape) == 3:
            result = nodes.call_method("squeeze", (fused, 0))
        elif attention.is_viewed and len(shape_of(attention.output)) == 3:
            result = nodes.call_method("flatten", (fused, 0, 1))
        elif attention.merged > 1:
            result = nodes.call_method("unflatten", (fused, 0, _sizes(attention.leading[:attention.merged])))
        if attention.order:
            result = nodes.call_method("permute", (result, *attention.order))
    attention.output.replace_all_uses_with(result)
    for node in reversed(attention.nodes):
        _erase(node, nodes)
    for mask in attention.masks:
        erase_unused(mask.tensor, nodes)
    return assumed


def _whole(operand: Any, is_broadcast: list[bool], leading: tuple[int, ...], nodes: fx.Graph) -> Any:
    """A tensor [..., S, D], expanded where it is broadcast: a GPU's fused kernels broadcast nothing."""
    if not any(is_broadcast):
        return operand
    sizes = [size if one else -1 for one, size in zip(is_broadcast, leading, strict=True)]
    return nodes.call_method("expand", (operand, *sizes, -1, -1))


def _erase(node: fx.Node, nodes: fx.Graph) -> None:
    """With the numbers that have its shape; it stays where somebody else reads one of these."""
    for user in list(node.users):
        if number_of(user) is not None:
            _erase(user, nodes)
    if not node.users:
        nodes.erase_node(node)


def _split_operand(operand: Any, shape: tuple[int, ...], leading: tuple[int, ...], nodes: fx.Graph) -> Any:
    """A tensor of that shape with batch and heads as two dimensions."""
    if len(shape) == 3:
        return nodes.call_method("unflatten", (operand, 0, _sizes(leading)))
    return operand if shape[:-2] == leading else nodes.call_method("reshape", (operand, *leading, *shape[-2:]))


def _split(mask: Mask, leading: tuple[int, ...], nodes: fx.Graph) -> Mask:
    """The mask of scores whose batch and heads are two dimensions."""
    if not mask.splits(leading):
        return mask
    return replace(mask, tensor=nodes.call_method("unflatten", (mask.tensor, 0, _sizes(leading))))


def _sizes(leading: tuple[int, ...]) -> tuple[int, ...]:
    """As a graph holds them: one that varies from call to call, of which it has no number, is what is left."""
    varies = [type(size) is not int for size in leading]
    return leading if sum(varies) > 1 else tuple(-1 if one else size
                                                 for one, size in zip(varies, leading, strict=True))


def _assumed(mask: Mask, by_values: Causal, graph: Captured, length: int) -> Assumed:
    """That the buffers behind a mask still make it causal, in whichever module this graph runs."""
    return same_buffers(graph, mask.tensor, by_values.sources, lambda values: is_causal(mask, values, length))


def _one_mask(masks: list[Mask], query: Any, nodes: fx.Graph) -> Any:
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
