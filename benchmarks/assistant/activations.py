"""GELU by hand, as it stands in a graph: in whichever spelling, what it computes is compared with the library's."""
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.nn import functional as F

from benchmarks.assistant.attention import CASTS
from benchmarks.assistant.graph import (
    Captured,
    Refusal,
    Refused,
    Region,
    Unknown,
    between,
    refuse_mixed_gradients,
    regions,
    shape_of,
)
from benchmarks.assistant.normal import name_of

ROOTS = {"tanh": "tanh", "erf": "none"}                # the function in the middle -> what F.gelu calls its form
ELEMENTWISE = {"add", "sub", "mul", "div", "pow", "square", "neg", "tanh", "erf", *CASTS}
EXACT, NEAR = 5e-6, 1e-2               # largest difference of the same function in FP32, and of one much like it
_POINTS = torch.linspace(-8, 8, 1001, dtype=torch.float64)


@dataclass(eq=False)
class Gelu(Region):
    """One GELU by hand, of every element of x."""
    x: fx.Node
    output: fx.Node
    approximate: str                                   # as F.gelu has it


def gelus_in(graph: Captured) -> list[Gelu | Refusal]:
    """The GELU around every tanh and erf, or why it is another function than the library's."""
    return regions(graph, roots(graph), gelu_at)


def roots(graph: Captured) -> list[fx.Node]:
    """Where a GELU by hand may be."""
    return [node for node in graph.nodes if node.op.startswith("call_") and name_of(node) in ROOTS]


def gelu_at(root: fx.Node, graph: Captured) -> Gelu | None:
    """The GELU around a tanh or erf; None where it is none. Raises Refused where it is one with other constants."""
    form, nearest = ROOTS[name_of(root)], float("inf")
    expected = F.gelu(_POINTS, approximate=form)
    for output in reversed(list(_behind(root))):
        for x in _before(root):
            if shape_of(x) != shape_of(output):
                continue
            apart = _apart(output, x, graph, expected)
            nearest = min(nearest, apart)
            if apart <= EXACT:
                nodes = between(x, output, graph)
                refuse_mixed_gradients(graph, nodes)
                return Gelu(graph, nodes, x, output, form)
    if nearest <= NEAR:
        raise Refused(f"it is up to {nearest:.0e} away from the library's GELU")
    return None


def _behind(root: fx.Node) -> Iterator[fx.Node]:
    """What is computed from it element by element, as long as nothing else is."""
    node = root
    while len(node.users) == 1 and _is_elementwise(user := next(iter(node.users))):
        yield user
        node = user


def _before(root: fx.Node) -> list[fx.Node]:
    """What it is computed from element by element, the nearest first."""
    found, todo = dict.fromkeys(root.all_input_nodes), list(root.all_input_nodes)
    while todo:
        node = todo.pop(0)
        if _is_elementwise(node):
            todo += [inner for inner in node.all_input_nodes if inner not in found]
            found |= dict.fromkeys(node.all_input_nodes)
    return list(found)


def _is_elementwise(node: fx.Node) -> bool:
    return node.op.startswith("call_") and name_of(node) in ELEMENTWISE


def _apart(output: fx.Node, x: fx.Node, graph: Captured, expected: torch.Tensor) -> float:
    """The largest difference of what it is of many x; infinite where it depends on something else."""
    known = {x: _POINTS}
    for node in between(x, output, graph):
        if name_of(node) in CASTS and isinstance(node.args[0], fx.Node) and node.args[0] in known:
            known[node] = known[node.args[0]]          # what the function means, not how it rounds
    try:
        value = graph.value_where(output, known)
    except (Unknown, RuntimeError, TypeError):
        return float("inf")
    if not isinstance(value, torch.Tensor) or value.shape != expected.shape:
        return float("inf")
    return float((value - expected).abs().max())
