"""How much less memory an iteration should need with a technique, before it runs: from what autograd saves of a graph.

At the peak of a training step most of the memory is what the forward has saved for the backward. Which tensors an
operation saves stands in torch's derivatives.yaml.
"""
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from benchmarks.assistant.fusing import is_fused
from benchmarks.assistant.graph import Region
from benchmarks.assistant.normal import name_of
from benchmarks.assistant.predicting import Freed, bytes_of, is_pass, source_of
from benchmarks.assistant.program import Program
from benchmarks.assistant.technique import Found
from benchmarks.measure.calls import named_parameters
from benchmarks.measure.fitting import saved_tensors
from benchmarks.measure.keeping import kept
from common.runtime.compiler import holds_compiled

OF_BOTH_FACTORS = frozenset({"mul", "matmul", "bmm", "mm", "baddbmm", "einsum", "dot", "linear"})
OF_THEIR_RESULT = frozenset({"tanh", "exp", "sigmoid", "softmax", "_softmax", "log_softmax", "_log_softmax", "sqrt",
                             "rsqrt", "relu", "reciprocal", "elu"})
OF_THEIR_INPUT = frozenset({"pow", "square", "log", "log1p", "erf", "sin", "cos", "abs", "gelu", "silu", "softplus",
                            "norm", "linalg_vector_norm", "var", "std", "clamp", "logsumexp", "layer_norm", "rms_norm"})


def in_regions(program: Program, found: Sequence[Found]) -> Freed | None:
    """Where each becomes one operation, which saves what it is given: what is saved within is not, or half of that.

    None where something else is changed, and in inference, where the peak is another.
    """
    regions = [(each.count, each.region) for each in found if each.region]
    if program.is_inference or len(regions) < len(found):
        return None
    most = sum(count * saved_within(region) for count, region in regions)
    return Freed(most / 2, most)


def under_autocast(program: Program, found: Sequence[Found]) -> Freed | None:
    """At most half of what is saved, and of the largest result, which the backward has beside it, and all weights of
    attention that a fused kernel computes in 16 bits alone. At the least it needs more: the parameters in 16 bits.

    None where the model is compiled in part, which the count would compile anew.
    """
    if program.is_inference or holds_compiled(program.model):
        return None
    parameters = {id(t): t.nbytes for t in named_parameters(program.model).values()}
    largest = max((bytes_of(node) for graph in program.graphs for node in graph.nodes), default=0)
    with kept(program.model):
        saved = saved_bytes(program.model, program)
    weights = _attention_weights(program, fused_in=torch.bfloat16)
    return Freed(-sum(parameters.values()) / 2, (saved + largest + weights) / 2)


def compiled(program: Program, found: Sequence[Found]) -> Freed | None:
    """At most all that passes over memory save of each other's results, which a compiler may compute again, and the
    weights of attention that no fused kernel computes, for which it may put one that does."""
    if program.is_inference:
        return None
    most = _attention_weights(program)
    for graph in program.graphs:
        most += len(graph.calls) * _bytes_of(filter(is_pass, saved_in(graph.nodes)))
    return Freed(0.0, most)


def unknown(program: Program, found: Sequence[Found]) -> None:
    """It is not predicted."""


def the_same(program: Program, found: Sequence[Found]) -> Freed:
    """What is saved stays as it is."""
    return Freed(0.0, 0.0)


def saved_bytes(model: nn.Module, program: Program) -> int:
    """What one forward saves for its backward, beside parameters, inputs and what modules hold."""
    inputs = program.inputs.as_trained()
    held = (*named_parameters(model).values(), *model.buffers(), *inputs.named().values())
    own = {t.untyped_storage().data_ptr() for t in held}
    with torch.enable_grad(), saved_tensors(own, lambda t: t.untyped_storage().nbytes()) as sizes:
        outputs = inputs.call(model)
    del outputs
    return sum(sizes.values())


def _attention_weights(program: Program, fused_in: torch.dtype | None = None) -> int:
    """Bytes of them that calls of the library's attention save where no fused kernel computes it; of those calls alone
    that one computes in `fused_in`, where that is given.
    """
    total = 0
    for call in program.trace.calls:
        given = replace(call.attends, trains=True) if call.attends else None
        if given and not is_fused(given) and (fused_in is None or is_fused(given.in_dtype(fused_in))):
            total += math.prod(given.query[:-1]) * given.key[-2] * given.dtype.itemsize
    return total


def saved_within(region: Region) -> int:
    """Bytes that operations of a region save of each other's results: not of what it is given, nor of what it gives."""
    return _bytes_of(saved_in(region.nodes) & set(region.nodes[:-1]))


def saved_in(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose results these operations save, each by the one that its memory comes from."""
    saved = set()
    for node in nodes:
        if not node.op.startswith("call_"):
            continue
        name = name_of(node)
        given = [each for each in node.args if isinstance(each, fx.Node)]
        is_product = name in OF_BOTH_FACTORS and len(given) > 1            # with a number it saves nothing
        is_division = name == "div" and node.args[-1] in given             # nor does one by a number
        if name in OF_THEIR_RESULT:
            saved.add(node)
        elif name in OF_THEIR_INPUT:
            saved |= set(given[:1])
        elif is_product or is_division:
            saved |= set(given)
    return {source_of(node) for node in saved}


def _bytes_of(nodes: Iterable[fx.Node]) -> int:
    return sum(map(bytes_of, nodes))
