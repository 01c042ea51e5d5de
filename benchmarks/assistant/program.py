"""A model as a program: its calls as it runs, the graphs that Dynamo captures, and where it leaves them."""
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from benchmarks.assistant.analysis import Analysis, analysed
from benchmarks.assistant.branches import around_what_cannot_be_captured, as_uncompiled, asking
from benchmarks.assistant.breaks import Break, breaks_reported
from benchmarks.assistant.graph import Captured, given_to
from benchmarks.assistant.normal import normalise
from benchmarks.assistant.trace import Trace, trace
from benchmarks.measure.calls import Inputs, clean
from benchmarks.measure.keeping import kept
from benchmarks.measure.observing import Loss
from common.outcome import in_a_line, is_out_of_memory
from common.runtime import compiler


@dataclass
class Program:
    """What was read of a model."""
    model: nn.Module
    inputs: Inputs
    trace: Trace                                           # of a forward as it is
    is_compiled: bool = False                              # it came compiled
    is_inference: bool = False                             # its forward alone counts
    iteration_ms: float = 0.0                              # of what counts, as it is
    optimizer: torch.optim.Optimizer | None = None         # that steps behind it
    others: Sequence[Inputs] = ()                          # that it is called with, too
    graphs: list[Captured] = field(default_factory=list)
    loss: Loss | None = None                               # that is given beside the model, where its backward counts
    graphs_of_the_loss: list[Captured] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    not_captured: str = ""                                 # why Dynamo can't run it
    has_branches: bool = False                             # it does something else where it is compiled
    analysis: Analysis = field(default_factory=Analysis)   # what was recognised in all of that

    @property
    def dynamic(self) -> bool | None:
        """As torch.compile takes it. Where the host reads a value or a size of the device, sizes may be others at each
        call, as of the tokens of an expert: what is dynamic is then left to Dynamo, or it would compile for each.
        """
        return None if self.analysis.waits else False

    @property
    def layers(self) -> list[nn.Module]:
        """Its longest list of modules of one class, each once, where it has more than one."""
        lists = [list(dict.fromkeys(module)) for module in self.model.modules()
                 if isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(each) for each in module}) == 1]
        longest = max(lists, key=len, default=[])
        return longest if len(longest) > 1 else []

    def module_at(self, path: str) -> nn.Module | None:
        """Its module of that path; None where there is none: it was compiled under another name, or is a script."""
        try:
            return self.model.get_submodule(path)
        except (AttributeError, RuntimeError):
            return None


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


def read(model: nn.Module, inputs: Inputs, inference: bool = False) -> Program:
    """Run a model once as it is and once under Dynamo, without compiling anything. It is restored afterwards.

    Graph breaks are those of the compiled model. Graphs are of the code that runs as the model is. One that is not
    compiled is captured again where it takes another branch then, or could not be captured whole; then what can be is.

    In `inference` it runs without gradients: it may have no backward.
    """
    is_compiled = compiler.is_compiled(model)
    model = as_written(model)
    program = Program(model, inputs, trace(model, inputs), is_compiled)
    names = names_by_id(model)
    constant, graphs = constants_of(model), list[Captured]()

    def collect(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        normalise(module)
        captured = Captured(module, given_to(module, constant))
        graphs.append(captured)

        def run(*values: Any) -> Any:
            placeholders = [node for node in captured.nodes if node.op == "placeholder"]
            captured.named = [node for node, value in zip(placeholders, values, strict=True) if id(value) in names]
            captured.calls.append([names[id(value)] for value in values if id(value) in names])
            return module.forward(*values)
        return run

    def capture() -> str:
        """What it raises; "" where it runs."""
        with kept(model), fresh_dynamo(), torch.set_grad_enabled(not inference):
            try:
                inputs.as_trained().call(torch.compile(model, backend=collect, dynamic=False))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                return in_a_line(error)
        return ""

    with asking() as asks, breaks_reported() as program.breaks:
        program.not_captured = capture()
    program.graphs, program.has_branches = list(graphs), asks.asked
    differs = program.has_branches or program.not_captured
    if differs and not is_compiled and not compiler.holds_compiled(model):
        graphs.clear()
        with as_uncompiled(), around_what_cannot_be_captured():
            capture()
        program.graphs = list(graphs) or program.graphs
    program.breaks = [_where_it_is_called(each, program.trace) for each in program.breaks]
    program.analysis = analysed(program.graphs, program.trace)
    return program


def graphs_of_the_loss(loss: Callable, model: nn.Module, inputs: Inputs) -> list[Captured]:
    """What Dynamo captures of a loss that is given beside the model; none where it can't run it."""
    graphs: list[Captured] = []

    def collect(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        normalise(module)
        graphs.append(Captured(module, {}, calls=[[]]))
        return module.forward

    with kept(model), fresh_dynamo(), as_uncompiled():
        try:
            torch.compile(loss, backend=collect, dynamic=False)(inputs.as_trained().call(model))
        except Exception as error:
            if is_out_of_memory(error):
                raise
    return graphs


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
