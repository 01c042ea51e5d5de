"""Linear layers on one input, as they stand in a graph."""
import itertools
from dataclasses import dataclass

from torch import fx

from benchmarks.assistant.graph import Captured, Region, args_of, argument, inner_module, settings_in, shape_of
from benchmarks.assistant.normal import is_changed_later, name_of


@dataclass(eq=False)
class ProjectionGroup(Region):
    """Two or more linear layers of one module on one tensor, all with a bias or all without, in one grad mode."""

    @property
    def x(self) -> fx.Node:
        """What they project."""
        return self.nodes[0].args[0]                                   # type: ignore[return-value]

    @property
    def widths(self) -> list[int]:
        """Of their outputs."""
        return [shape_of(node)[-1] for node in self.nodes]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where each begins and ends among their outputs side by side."""
        ends = list(itertools.accumulate(self.widths))
        return list(zip([0, *ends], ends, strict=False))

    @property
    def weights(self) -> list[fx.Node]:
        return [argument(node, 1, "weight") for node in self.nodes]

    @property
    def layers(self) -> set[tuple[str, fx.Node]]:
        """The module and the weight of each: tied ones are two, one that is called twice is one."""
        return {(path_of(node), weight) for node, weight in zip(self.nodes, self.weights, strict=True)}

    @property
    def biases(self) -> list[fx.Node]:
        """None of layers without."""
        return [bias for node in self.nodes if (bias := argument(node, 2, "bias")) is not None]

    @property
    def is_changed(self) -> bool:
        """Whether one of their outputs is changed in place later on: torch forbids that of what a split gives."""
        return any(map(is_changed_later, self.nodes))

    @property
    def module(self) -> str:                                           # type: ignore[override]
        """The path of the module whose layers they are."""
        return super().module.rpartition(".")[0]


def projections_in(graph: Captured) -> list[ProjectionGroup]:
    """Those whose weights a module owns: others would be computed anew at each call."""
    groups: dict[tuple, list[fx.Node]] = {}
    settings = settings_in(graph)
    for node in graph.nodes:
        if node.op == "call_function" and name_of(node) == "linear" and isinstance(node.args[0], fx.Node):
            weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
            if all(each is None or each.op == "placeholder" for each in (weight, bias)):
                owner = path_of(node).rpartition(".")[0]               # others would need its weights from elsewhere
                groups.setdefault((node.args[0], owner, bias is None, settings[node]), []).append(node)
    found = [ProjectionGroup(graph, tuple(nodes)) for nodes in groups.values()]
    # One layer that is called again and again on one input has one product: a concatenation would have it twice.
    return [group for group in found if len(set(group.weights)) > 1 and len(group.layers) == len(group.nodes)]


def products_with_parameters(graph: Captured) -> list[Region]:
    """Two or more products of one tensor, each with a parameter of its own that belongs to no layer."""
    groups: dict[tuple, list[fx.Node]] = {}
    settings = settings_in(graph)
    for node in graph.nodes:
        if node.op.startswith("call_") and name_of(node) in ("matmul", "einsum"):
            *equation, x, weight = args_of(node) if len(args_of(node)) > 1 else (None, None)
            if weight in graph.named and x not in graph.named and len(shape_of(weight)) > 1:
                groups.setdefault((x, *equation, len(shape_of(weight)), settings[node]), []).append(node)
    return [Region(graph, tuple(nodes)) for nodes in groups.values()
            if len({args_of(node)[-1] for node in nodes}) == len(nodes) > 1]


def path_of(node: fx.Node) -> str:
    """Of the module that an operation ran in, as Dynamo names it."""
    path, _ = inner_module(node)
    return path
