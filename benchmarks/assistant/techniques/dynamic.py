"""Inputs of several shapes under torch.compile: how often it compiles, as which guard fails, and with dynamic=True.

`build()` returns a list of inputs for that. Graphs are counted without Inductor, which is what takes the time; `--why
dynamic` compiles and times both. A person decides.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._dynamo.utils import get_compilation_metrics

from benchmarks.assistant.program import Program, fresh_dynamo
from benchmarks.assistant.side_by_side import compiled_work, times_as_fast
from benchmarks.assistant.technique import Found, Technique
from benchmarks.measure.calls import Inputs
from benchmarks.measure.keeping import kept
from common.outcome import in_a_line
from common.runtime import compiler
from common.runtime.compiler import guard_in, holds_compiled

BACKEND = "inductor"                       # that is timed
CODE = "torch.compile(model, dynamic=True)"


@dataclass(frozen=True)
class Compiled:
    """What Dynamo made of a model for several inputs."""
    graphs: int
    guard: str                             # the first that failed
    why_not: str = ""                      # why it is not known


def find(program: Program) -> list[Found]:
    """The call, where inputs have several shapes."""
    every = [program.inputs, *program.others]
    count = len({_shapes(inputs) for inputs in every})
    if count < 2 or program.not_captured or holds_compiled(program.model):
        return []
    usual, dynamic = (compiled_for(program, every, is_dynamic) for is_dynamic in (None, True))
    reason = f"inputs of {count} shapes"
    if usual.why_not or dynamic.why_not:
        return [Found(None, "", 1, reason, usual.why_not or dynamic.why_not)]
    since = f", as {usual.guard}" if usual.guard else ""
    reason += f": torch.compile compiles {_times(usual.graphs)}{since}; with dynamic=True {_times(dynamic.graphs)}"
    fewer = dynamic.graphs < usual.graphs
    return [Found(None, "", 1, f"{reason}: {CODE}" if fewer else reason, "" if fewer else "it compiles no less often")]


def compiled_for(program: Program, every: Sequence[Inputs], is_dynamic: bool | None) -> Compiled:
    """How many graphs Dynamo captures for all of these, one call after the other."""
    graphs = []

    def keep(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        graphs.append(module)
        return module.forward
    with kept(program.model), fresh_dynamo(), torch.set_grad_enabled(not program.is_inference):
        before = get_compilation_metrics()         # torch keeps the last 64 alone: no count tells which are new
        call = torch.compile(program.model, backend=keep, dynamic=is_dynamic)
        try:
            for inputs in every:
                inputs.as_trained().call(call)
        except Exception as error:
            return Compiled(len(graphs), "", f"Dynamo can't run it: {in_a_line(error)}")
        reasons = [getattr(each, "recompile_reason", None) for each in get_compilation_metrics()
                   if all(each is not former for former in before)]
    return Compiled(len(graphs), next((guard_in(reason) for reason in reasons if reason), ""))


def seen_alone(program: Program) -> list[tuple[str, str]]:
    """The time of first calls, and of all inputs together."""
    if not find(program) or compiler.missing(program.inputs.device):
        return []
    works, firsts = [], []
    with kept(program.model), fresh_dynamo():
        for is_dynamic in (None, True):
            call = torch.compile(program.model, backend=BACKEND, dynamic=is_dynamic)
            work, seconds = compiled_work(call, program, [program.inputs, *program.others])
            works.append(work)
            firsts.append(f"{seconds:.0f} s")
        gain = times_as_fast(works[0], works[1], program.inputs.device)
    words = (f"first calls take {firsts[0]}, with dynamic=True {firsts[1]}; then all inputs together are "
             f"{gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}] times as fast")
    return [("dynamic=True", words)]


def _shapes(inputs: Inputs) -> tuple:
    return tuple((name, tuple(t.shape)) for name, t in inputs.named().items())


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


TECHNIQUE = Technique("dynamic", "inputs of several shapes -> compiled for all of them", find, seen_alone=seen_alone)
