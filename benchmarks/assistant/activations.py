"""GELU by hand, as it stands in a graph: in whichever spelling, what it computes is compared with the library's."""
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
MOST = 32                              # operations around a tanh or erf that are looked at: a GELU is a dozen
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
    form, nearest = ROOTS[name_of(root)], math.inf
    expected = F.gelu(_POINTS, approximate=form)
    for output, x in itertools.product(reversed(list(_behind(root))), _before(root)):
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
    for _ in range(MOST):
        if len(node.users) != 1 or not _is_elementwise(user := next(iter(node.users))):
            return
        yield user
        node = user


def _before(root: fx.Node) -> list[fx.Node]:
    """What it is computed from element by element, the nearest first."""
    found, todo = dict.fromkeys(root.all_input_nodes), list(root.all_input_nodes)
    while todo and len(found) < MOST:
        node = todo.pop(0)
        if _is_elementwise(node):
            todo += [inner for inner in node.all_input_nodes if inner not in found]
            found |= dict.fromkeys(node.all_input_nodes)
    return list(found)


def _is_elementwise(node: fx.Node) -> bool:
    return node.op.startswith("call_") and name_of(node) in ELEMENTWISE


def _apart(output: fx.Node, x: fx.Node, graph: Captured, expected: torch.Tensor) -> float:
    """The largest difference of what it is of many x; infinite where it depends on something else, or is broadcast."""
    if shape_of(x) != shape_of(output):
        return math.inf
    known: dict[fx.Node, Any] = {x: _POINTS}
    try:
        _evaluate(output, known, set(), graph)
    except (Unknown, RuntimeError, TypeError):
        return math.inf
    value = known[output]
    if not isinstance(value, torch.Tensor) or value.shape != expected.shape:
        return math.inf
    return float((value - expected).abs().max())


def _evaluate(node: fx.Node, known: dict[fx.Node, Any], entered: set[fx.Node], graph: Captured) -> None:
    """Put its value into `known`. Raises Unknown where it depends on more than what is known, and single numbers."""
    if node in known:
        return
    entered.add(node)
    if len(entered) > MOST:
        raise Unknown("it is more than an activation")
    if not _is_elementwise(node):
        if math.prod(shape_of(node)) != 1:
            raise Unknown(f"{node.name} differs from call to call")
        known[node] = graph.value_of(node)
        return
    for inner in node.all_input_nodes:
        _evaluate(inner, known, entered, graph)
    of_cast = node.args[0] if name_of(node) in CASTS else None             # what it means, not how it rounds
    known[node] = known[of_cast] if isinstance(of_cast, fx.Node) else graph.value_where(node, known)
