"""A graph that Dynamo captured: its operations, the lines and modules they come from, and regions of it."""
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.assistant.normal import is_in_place, name_of
from benchmarks.assistant.source import Place, innermost

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential")
_OF_DYNAMO = re.compile(r"^L\['\w+'\]")      # its name for what was compiled: "L['self']", of a container "L['fn']"


@dataclass
class Captured:
    """One graph of torch-level calls, and with which tensors it ran."""
    module: fx.GraphModule
    buffers: dict[fx.Node, Tensor]                         # placeholder -> the buffer that it stood for
    calls: list[list[str]] = field(default_factory=list)   # of each, the names of the parameters and buffers it took
    named: list[fx.Node] = field(default_factory=list)     # the placeholders that these stand for

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)

    def names_of(self, node: Any) -> list[str]:
        """Of each call the parameter or buffer that a placeholder stood for; empty where it stands for none."""
        return [names[self.named.index(node)] for names in self.calls] if node in self.named else []

    def value_of(self, node: Any) -> Any:
        """The value of a node that depends on buffers and numbers alone. Raises Unknown for any other."""
        with _disable_current_modes(), torch.no_grad():
            return self._value(node, {})

    def value_where(self, node: fx.Node, known: dict[fx.Node, Any], gradients: bool = False) -> Any:
        """The same of a node that depends on some others too, whose values are given."""
        with _disable_current_modes(), torch.set_grad_enabled(gradients):
            return self._value(node, known)

    def _value(self, node: Any, known: dict[fx.Node, Any]) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node not in known:
            known[node] = self._computed(node, known)
        return known[node]

    def _computed(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            if node not in self.buffers:
                raise Unknown(f"{node.name} differs from call to call")
            return self.buffers[node]
        if node.op == "get_attr":
            return getattr(self.module, str(node.target))
        name = name_of(node)
        if node.op not in ("call_function", "call_method") or any(word in name for word in _RANDOM):
            raise Unknown(f"{name} is not the same twice")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda inner: self._value(inner, known))
        if is_in_place(node) and isinstance(args[0], Tensor):
            args = (args[0].clone(), *args[1:])            # it may be a buffer of the model
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def feeding(self, node: fx.Node) -> list[fx.Node]:
        """The placeholders that a node depends on."""
        needed = ancestors(node)
        return [inner for inner in self.nodes if inner in needed and inner.op == "placeholder"]


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node, and all that it is computed from."""
    seen, todo = {node}, [node]
    while todo:
        for inner in todo.pop().all_input_nodes:
            if inner not in seen:
                seen.add(inner)
                todo.append(inner)
    return seen


def between(x: fx.Node, output: fx.Node, graph: Captured) -> tuple[fx.Node, ...]:
    """Everything that leads from x to the output, in the order of the graph."""
    from_x = {x}
    for node in graph.nodes:
        if any(inner in from_x for inner in node.all_input_nodes):
            from_x.add(node)
    inside, todo = {output}, [output]
    while todo:
        for inner in todo.pop().all_input_nodes:
            if inner in from_x and inner is not x and inner not in inside:
                inside.add(inner)
                todo.append(inner)
    return tuple(node for node in graph.nodes if node in inside)


class Unknown(Exception):
    """A value that is not known before a call."""


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """What it is called with, of whatever types."""
    return node.args


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of a call, positional or by keyword."""
    if len(node.args) > place:
        return node.args[place]
    return node.kwargs.get(name, default)


def place_of(node: fx.Node) -> Place | None:
    """The line of a person's code that made the call; None where that is not known."""
    return innermost(node.meta.get("stack_trace") or "")


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of what a node gives; () where that is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def dtype_of(node: fx.Node) -> torch.dtype:
    """Of the tensor that a node gives."""
    return node.meta["example_value"].dtype


def given_to(module: fx.GraphModule, constant: set[int]) -> dict[fx.Node, Tensor]:
    """Placeholder -> the buffer that it stands for. Dynamo knows that while it calls its backend, and not later."""
    given = {}
    for node in module.graph.nodes:
        source = node.meta.get("grapharg")
        value = source.example if node.op == "placeholder" and source is not None else None
        if isinstance(value, Tensor) and id(value) in constant:
            given[node] = value
    return given


@dataclass(frozen=True)
class Settings:
    """What a node runs under, by the calls before it in its graph."""
    gradients: bool | None = None              # None: as the graph was called
    autocasts: tuple[fx.Node, ...] = ()        # that were entered, and not left


def settings_in(graph: Captured) -> dict[fx.Node, Settings]:
    """Of every node."""
    found, now = {}, Settings()
    for node in graph.nodes:
        name = name_of(node) if node.op == "call_function" else ""
        if name == "_set_grad_enabled":
            now = replace(now, gradients=bool(node.args[0]))
        elif name == "_enter_autocast":
            now = replace(now, autocasts=(*now.autocasts, node))
        elif name == "_exit_autocast":
            now = replace(now, autocasts=tuple(each for each in now.autocasts if each is not node.args[0]))
        found[node] = now
    return found


def refuse_mixed_gradients(graph: Captured, nodes: Iterable[fx.Node]) -> None:
    """Raise Refused where some of these run with gradients and some without."""
    settings = settings_in(graph)
    if len({settings[node].gradients is not False for node in nodes}) > 1:
        raise Refused("a part of it runs without gradients")


class Refused(Exception):
    """Why operations are not the thing that they look like, in words."""


@dataclass(eq=False)
class Region:
    """Operations of a graph that are one thing together, in the order of the graph."""
    graph: Captured
    nodes: tuple[fx.Node, ...]

    @cached_property
    def place(self) -> Place | None:
        """From the first to the last of their lines, as far as these stand in one function."""
        places = [place for node in self.nodes if (place := place_of(node))]
        whole = places[0] if places else None
        for place in places[1:]:
            assert whole is not None
            whole = whole.to(place)
        return whole

    @cached_property
    def module(self) -> str:
        """The path of the module that it ends in, with a star for each number that differs between calls."""
        return module_of(self.graph, self.nodes[-1])

    @property
    def count(self) -> int:
        """How often it ran in one forward."""
        return len(self.graph.calls)


@dataclass(eq=False)
class Refusal(Region):
    """What looks like a region of some kind, and why it is none."""
    why: str


Some = TypeVar("Some", bound=Region)


def regions(graph: Captured, roots: Iterable[fx.Node], at: Callable[[fx.Node, Captured], Some | None]
            ) -> list[Some | Refusal]:
    """What stands around each root: a region, why it is none, or nothing."""
    found: list[Some | Refusal] = []
    for root in roots:
        try:
            region = at(root, graph)
        except Refused as error:
            found.append(Refusal(graph, (root,), str(error)))
            continue
        if region is not None:
            found.append(region)
    return found


def inner_module(node: fx.Node) -> tuple[str, str]:
    """(its path as Dynamo names it, its class by name) of the module that a node ran in; "" where it ran in none."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1][:2] if stack else ("", None)
    return path, getattr(kind, "__name__", "")


def module_of(graph: Captured, node: fx.Node) -> str:
    """The path of the module that a node ran in, with a star for each number that differs between calls."""
    return with_stars(paths_of(graph, node))


def paths_of(graph: Captured, node: fx.Node) -> list[str]:
    """The path of the module that a node ran in, in each call of the graph; "" is the model itself."""
    inner, _ = inner_module(node)
    path = _OF_DYNAMO.sub("", inner).strip(".")
    prefixes = [prefix for names in graph.calls if (prefix := _prefix_of(names, graph, path)) is not None]
    return [".".join(filter(None, (prefix, path))) for prefix in prefixes]


def _prefix_of(names: Sequence[str], graph: Captured, path: str) -> str | None:
    """Where the module that was captured stands in the model, from the names of the parameters it took."""
    own = [node.name for node in graph.nodes if node.op == "placeholder"]
    if not own or not names:
        return ""
    first = names[0].split(".")
    for depth in range(len(first)):
        relative = "_modules_".join(first[depth:-1])
        wanted = f"_modules_{relative}_" if relative else "_self_"
        if any(wanted in name and name.rstrip("_").endswith(first[-1]) for name in own):
            return ".".join(first[:depth])
    return ""


def with_stars(paths: Sequence[str]) -> str:
    """One path for all, as long as the shortest of them: what differs is a star."""
    split = [path.split(".") for path in dict.fromkeys(paths)]
    if not split:
        return ""
    depth = min(map(len, split))
    split = [parts[:depth] for parts in split]
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))
