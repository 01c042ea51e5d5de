"""States of all steps, written one beside the other: the running sum of outer products, as in linear attention."""
import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from benchmarks.assistant.graph import Captured, Region, args_of, argument, shape_of
from benchmarks.assistant.normal import CASTS, name_of

LARGER = 4                                 # times the larger operand, at least: an outer product, and no broadcast bias
LAID_OUT = (*CASTS, "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "movedim")


@dataclass(eq=False)
class RunningSum(Region):
    """A running sum over the steps of a sequence, from the outer product to the sum."""
    steps: int
    state: tuple[int, ...]                 # shape of what each step has, of one sample and head

    @property
    def nbytes(self) -> int:
        """Of the states of all steps."""
        return self.nodes[-1].meta["example_value"].nbytes


def running_sums_in(graph: Captured) -> list[RunningSum]:
    """Those of outer products: each writes a whole state a step. A sum of what is no larger than its inputs is none."""
    found = []
    for node in graph.nodes:
        if not (node.op.startswith("call_") and name_of(node) == "cumsum"):
            continue
        way = _way_to_the_product(node)
        dim = argument(node, 1, "dim", None)
        shape = shape_of(node)
        if way and isinstance(dim, int) and dim % len(shape) < len(shape) - 2:
            found.append(RunningSum(graph, (*reversed(way), node), shape[dim], shape[-2:]))
    return found


def _way_to_the_product(node: fx.Node) -> list[fx.Node]:
    """From what a sum is given up to an outer product; empty where there is none."""
    way: list[fx.Node] = []
    above: Any = args_of(node)[0]
    while isinstance(above, fx.Node) and above.op.startswith("call_"):
        way.append(above)
        if name_of(above) not in LAID_OUT:
            return way if _is_outer(above) else []
        above = args_of(above)[0]
    return []


def _is_outer(node: fx.Node) -> bool:
    """Whether it multiplies each number of one tensor with each of another, and adds none up."""
    operands = [each for each in node.all_input_nodes if shape_of(each)]
    sizes = [math.prod(shape_of(each)) for each in operands]
    is_large = len(sizes) == 2 and math.prod(shape_of(node)) >= LARGER * max(sizes)
    name = name_of(node)
    if name == "einsum":
        given, _, kept = str(node.args[0]).partition("->")
        return is_large and set(given) - {",", " "} == set(kept) - {" "}
    return is_large and (name == "mul" or (name in ("matmul", "bmm") and shape_of(operands[0])[-1] == 1))
