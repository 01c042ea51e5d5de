"""A model as a program: its calls as it runs, the graphs that Dynamo captures, and where it leaves them."""
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.assistant.breaks import Break, breaks_told
from benchmarks.assistant.normal import is_in_place, name_of, normalise
from benchmarks.assistant.source import Place, innermost
from benchmarks.assistant.trace import Trace, trace
from benchmarks.measure.calls import Inputs, clean
from benchmarks.measure.keeping import kept
from common.outcome import in_a_line, is_out_of_memory
from common.runtime import compiler

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential")


@dataclass
class Captured:
    """One graph of torch-level calls, and with which tensors it ran."""
    module: fx.GraphModule
    buffers: dict[fx.Node, Tensor]                         # placeholder -> the buffer that it stood for
    calls: list[list[str]] = field(default_factory=list)   # of each, the names of the parameters and buffers it took

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)

    def value_of(self, node: Any) -> Any:
        """The value of a node that depends on buffers and numbers alone. Raises Unknown for any other."""
        with _disable_current_modes(), torch.no_grad():
            return self._value(node, {})

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
        seen, todo = {node}, [node]
        while todo:
            for inner in todo.pop().all_input_nodes:
                if inner not in seen:
                    seen.add(inner)
                    todo.append(inner)
        return [inner for inner in self.nodes if inner in seen and inner.op == "placeholder"]


class Unknown(Exception):
    """A value that is not known before a call."""


@dataclass
class Program:
    """What was read of a model."""
    model: nn.Module
    inputs: Inputs
    trace: Trace                                           # of a forward as it is
    is_compiled: bool = False                              # it came compiled
    graphs: list[Captured] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    not_captured: str = ""                                 # why Dynamo can't run it


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


def given_to(module: fx.GraphModule, constant: set[int]) -> dict[fx.Node, Tensor]:
    """Placeholder -> the buffer that it stands for. Dynamo knows that while it calls its backend, and not later."""
    given = {}
    for node in module.graph.nodes:
        source = node.meta.get("grapharg")
        value = source.example if node.op == "placeholder" and source is not None else None
        if isinstance(value, Tensor) and id(value) in constant:
            given[node] = value
    return given


def constants_of(model: nn.Module) -> set[int]:
    """The ids of its buffers."""
    return {id(buffer) for buffer in model.buffers()}


def as_written(model: nn.Module) -> nn.Module:
    """The model that was compiled, before that; itself where it was not. Its parameters are the same tensors."""
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return model._orig_mod
    if compiler.is_compiled(model):                        # in place
        model = copy.copy(model)
        model._compiled_call_impl = None
    return model


def read(model: nn.Module, inputs: Inputs) -> Program:
    """Run a model once as it is and once under Dynamo, without compiling anything. It is then as before."""
    is_compiled = compiler.is_compiled(model)
    model = as_written(model)
    program = Program(model, inputs, trace(model, inputs), is_compiled)
    names = names_by_id(model)
    constant = constants_of(model)

    def collect(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        normalise(module)
        captured = Captured(module, given_to(module, constant))
        program.graphs.append(captured)

        def run(*values: Any) -> Any:
            captured.calls.append([names[id(value)] for value in values if id(value) in names])
            return module.forward(*values)
        return run

    with kept(model), fresh_dynamo(), torch.enable_grad(), breaks_told() as program.breaks:
        try:
            inputs.copies().call(torch.compile(model, backend=collect, dynamic=False))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            program.not_captured = in_a_line(error)
    program.breaks = [_where_it_is_called(each, program.trace) for each in program.breaks]
    return program


def _where_it_is_called(found: Break, trace: Trace) -> Break:
    """A break inside of a library at the line that called it, as the forward showed."""
    if found.place or not found.inside:
        return found
    calls = (call.place for call in trace.calls if call.place and found.inside in call.through)
    return replace(found, place=next(calls, None))


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Nothing that was captured before is used meanwhile, nor what is captured meanwhile afterwards."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def names_by_id(model: nn.Module) -> Mapping[int, str]:
    """Tensor's id -> the name of that parameter or buffer."""
    return {id(t): clean(name) for name, t in (*model.named_parameters(), *model.named_buffers())}
