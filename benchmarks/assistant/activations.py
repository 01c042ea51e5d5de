"""Activations by hand, as they stand in a graph: in whichever spelling, they are compared with the library's."""
import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

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
from benchmarks.assistant.normal import CASTS, name_of

ELEMENTWISE = {"add", "sub", "mul", "div", "pow", "square", "neg", "tanh", "erf", "exp", "log", "log1p", "sigmoid",
               "softplus", "relu6", "hardtanh", "clamp", *CASTS}
EXACT, NEAR = 5e-6, 1e-2               # largest difference of the same function in FP32, and of one much like it
MOST = 32                              # operations around a root that are looked at: a GELU is a dozen
_POINTS = torch.linspace(-8, 8, 1001, dtype=torch.float64)


@dataclass(frozen=True)
class Function:
    """One of torch.nn.functional, of a tensor alone; by hand it has one of `roots` in it."""
    name: str                                          # there
    words: str                                         # as people write it
    roots: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict, compare=False)
    module: str = ""                                   # that computes it, as torch.nn has it

    def __call__(self, x: Tensor) -> Tensor:
        return getattr(F, self.name)(x, **self.options)

    def code(self, x: str) -> str:
        """The call of it."""
        options = "".join(f', {name}="{value}"' for name, value in self.options.items())
        return f"F.{self.name}({x}{options})"


GELUS = (Function("gelu", "GELU by tanh", ("tanh",), {"approximate": "tanh"}, 'GELU(approximate="tanh")'),
         Function("gelu", "GELU by erf", ("erf",), {"approximate": "none"}, "GELU()"))
# F.hardsigmoid is left out: its gradient has a constant in FP32, in FP64 too, so that no judge could hold it to FP64.
SILUS = (Function("silu", "SiLU", ("sigmoid", "exp"), module="SiLU()"),
         Function("mish", "Mish", ("tanh",), module="Mish()"),
         Function("hardswish", "Hardswish", ("relu6", "hardtanh", "clamp"), module="Hardswish()"))


@dataclass(eq=False)
class Activation(Region):
    """One such function by hand, of every element of x."""
    x: fx.Node
    output: fx.Node
    function: Function


def activations_in(graph: Captured, functions: Sequence[Function]) -> list[Activation | Refusal]:
    """Those by hand, and what is nearly one, with the reason why it is none."""
    return regions(graph, roots(graph, functions), lambda root, graph: activation_at(root, graph, functions))


def is_module_of(function: Function, module: nn.Module) -> bool:
    """Whether a module computes that function and nothing else."""
    if any(True for _ in (*module.parameters(), *module.buffers())):
        return False
    with torch.no_grad(), contextlib.suppress(Exception):
        given = module(_POINTS)
        return given.shape == _POINTS.shape and float((given - function(_POINTS)).abs().max()) <= EXACT
    return False


def roots(graph: Captured, functions: Sequence[Function]) -> list[fx.Node]:
    """Where one by hand may be."""
    names = {name for function in functions for name in function.roots}
    return [node for node in graph.nodes if node.op.startswith("call_") and name_of(node) in names]


def activation_at(root: fx.Node, graph: Captured, functions: Sequence[Function]) -> Activation | None:
    """The function around a root; None where it is none. Raises Refused where it is one with other constants."""
    name = name_of(root)
    expected = [(function, function(_POINTS)) for function in functions if name in function.roots]
    nearest, like = math.inf, expected[0][0]
    for output, x in itertools.product(reversed([root, *_behind(root)]), _before(root)):
        values = _values(output, x, graph)
        if values is None:
            continue
        for function, wanted in expected:
            apart = float((values - wanted).abs().max())
            if apart <= EXACT:
                nodes = between(x, output, graph)
                refuse_mixed_gradients(graph, nodes)
                return Activation(graph, nodes, x, output, function)
            if apart < nearest:
                nearest, like = apart, function
    if nearest <= NEAR:
        raise Refused(f"it is up to {nearest:.0e} away from the library's {like.words}")
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


def _values(output: fx.Node, x: fx.Node, graph: Captured) -> Tensor | None:
    """What it is of many x; None where it depends on something else, or is broadcast."""
    if shape_of(x) != shape_of(output):
        return None
    known: dict[fx.Node, Any] = {x: _POINTS}
    try:
        _evaluate(output, known, set(), graph)
    except (Unknown, RuntimeError, TypeError):
        return None
    value = known[output]
    return value if isinstance(value, Tensor) and value.shape == _POINTS.shape else None


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
