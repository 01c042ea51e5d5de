"""Changing a model's graphs while Dynamo captures them: passes edit each graph, which then runs eagerly or compiled."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx

from benchmarks.assistant.graph import Captured, ancestors, given_to
from benchmarks.assistant.normal import name_of, normalise
from benchmarks.assistant.program import constants_of
from common.runtime.compiler import allow_many_graphs


@dataclass(frozen=True)
class Assumed:
    """What a pass took for granted of the buffers that a graph is given: Dynamo uses one graph for many modules."""
    places: tuple[int, ...]                    # of these buffers among what the graph is called with
    holds: Callable[[Sequence[Any]], bool]     # of the values that it is called with


Pass = Callable[[Captured], list[Assumed]]


def traced_again(function: Callable) -> Callable:
    """A function that a pass puts into graphs, and that calls what torch.compile must read in Python: Dynamo reads it.

    A graph that calls it is given to torch.compile again, in place of being handed to Inductor as it is.
    """
    vars(function)["traced_again"] = True
    return function


def same_buffers(graph: Captured, node: fx.Node, sources: Sequence[fx.Node], test: Callable[[Tensor], bool]) -> Assumed:
    """That what `node` is computed from, whichever buffers the graph is called with, passes the test."""
    whole = Captured(fx.GraphModule(graph.module, fx.Graph()), {})
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = [inner for inner in graph.nodes if inner.op == "placeholder"]
    needed = ancestors(node)
    for inner in graph.nodes:
        if inner in needed:
            copies[inner] = whole.module.graph.node_copy(inner, lambda old: copies[old])
    places = tuple(placeholders.index(source) for source in sources)
    own = [copies[source] for source in sources]

    def holds(values: Sequence[Any]) -> bool:
        whole.buffers = {copy: values[place] for copy, place in zip(own, places, strict=True)}
        try:
            return test(whole.value_of(copies[node]))
        finally:
            whole.buffers = {}
    return Assumed(places, holds)


def erase_unused(node: Any, nodes: fx.Graph) -> None:
    """A node, and what leads to it alone."""
    if isinstance(node, fx.Node) and not node.users and node.op in ("call_function", "call_method"):
        inputs = node.all_input_nodes
        nodes.erase_node(node)
        for inner in inputs:
            erase_unused(inner, nodes)


def put_in_place(output: fx.Node, nodes: fx.Graph, function: Callable, args: tuple, kwargs: dict | None = None) -> None:
    """Whoever uses `output` gets that call's result in its dtype; what led to it alone goes."""
    value = output.meta.get("example_value")
    with nodes.inserting_before(output):
        made = nodes.call_function(function, args, kwargs)
        made.meta = dict(output.meta)
        if isinstance(value, Tensor):
            made = nodes.call_method("to", (made, value.dtype))
            made.meta = dict(output.meta)
    output.replace_all_uses_with(made)
    erase_unused(output, nodes)


def keep_strides(nodes: fx.Graph) -> None:
    """Dynamo has written strides into the graph: what `as_strided` reads by them is to lie in memory as it did then,
    whatever a pass puts in its place."""
    reads = [node for node in nodes.nodes if node.op.startswith("call_") and name_of(node) == "as_strided"]
    for node in reads:
        x: Any = node.args[0]
        value = x.meta.get("example_value")
        if isinstance(value, Tensor) and all(isinstance(each, int) for each in value.stride()):
            with nodes.inserting_before(node):
                kept = nodes.call_function(with_strides, (x, value.stride()))
            kept.meta = dict(x.meta)
            node.replace_input_with(x, kept)


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor that lies so in memory: itself, or a copy."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


class Rewritten:
    """A backend of torch.compile: every graph goes through the passes, and then to Inductor where that is asked for."""

    def __init__(self, model: nn.Module, passes: Sequence[Pass], compiles: bool):
        self.passes, self.compiles = passes, compiles
        self.constant = constants_of(model)
        self.graphs = 0

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        self.graphs += 1
        normalise(module)
        as_it_was = fx.GraphModule(module, fx.Graph())
        as_it_was.graph.output(as_it_was.graph.graph_copy(module.graph, {}))
        as_it_was.recompile()
        captured = Captured(module, given_to(module, self.constant))
        keep_strides(module.graph)
        assumed = [one for edit in self.passes for one in edit(captured)]
        run: Any = self._compiled(module, example_inputs) if self.compiles else module.forward
        return _guarded(run, as_it_was, assumed) if assumed else run

    @staticmethod
    def _compiled(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if any(getattr(node.target, "traced_again", False) for node in module.graph.nodes):
            plain = fx.GraphModule(module, module.graph)           # Dynamo's own has a forward that Dynamo can't read
            run = torch.compile(lambda *values: plain(*values), fullgraph=True, dynamic=False)
            return lambda *values: run(*values)                    # Dynamo takes torch.compile off what a backend gives
        return compile_fx(module, list(example_inputs))


def _guarded(run: Callable, as_it_was: fx.GraphModule, assumed: Sequence[Assumed]) -> Callable:
    """Run the edited graph where what was assumed holds, and elsewhere the one before."""
    known: dict[tuple, bool] = {}

    def choose(*values: Any) -> Any:
        key = tuple((id(values[place]), values[place]._version) for one in assumed for place in one.places)
        if key not in known:
            known[key] = all(one.holds(values) for one in assumed)
        return run(*values) if known[key] else as_it_was.forward(*values)
    return torch.compiler.disable(choose)


def rewritten(model: nn.Module, passes: Sequence[Pass], compiles: bool, dynamic: bool | None = False) -> nn.Module:
    """The model with its graphs changed by the passes; its parameters are the same tensors."""
    allow_many_graphs()
    compiled: Any = torch.compile(model, backend=Rewritten(model, passes, compiles), dynamic=dynamic)
    return compiled
