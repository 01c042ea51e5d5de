"""CUDA graphs: the host launches all kernels at once, where the GPU would wait for them one by one."""
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.assistant.predicting import Basis, Prediction
from benchmarks.assistant.program import Program
from benchmarks.assistant.technique import Advice, Found, NotWritten, Plan, Technique
from benchmarks.assistant.techniques import compiled
from common.measure.measurement import NOT_A_GPU


def find(program: Program) -> list[Found]:
    """The call of the model."""
    operators = sum(len(call.operators) for call in program.trace.calls)
    reason = f"a forward launches {operators} operators one by one"
    if program.breaks:
        reason += "; measured as one graph, of which torch.compile captures what lies between its graph breaks"
    waits = [wait.place.name for wait in program.analysis.waits]
    why_not = f"the host waits for the GPU at {', '.join(waits[:3])}, which no graph can capture" if waits else ""
    return [Found(None, "", 1, reason, why_not)]


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    return "" if device.type == "cuda" else NOT_A_GPU


def apply(plan: Plan) -> None:
    """Nothing of the model changes: it is the same rung, launched as a graph."""


def advice(program: Program, found: Found) -> Advice:
    """The compiler's own mode, which captures forward and backward, and captures anew where a shape changes.

    Raises NotWritten where Dynamo leaves out what would be captured.
    """
    recurrent = next((type(each).__name__ for each in program.model.modules() if isinstance(each, nn.RNNBase)), "")
    is_left_out = recurrent and any(each.skips for each in program.breaks)
    if program.not_captured or is_left_out:
        why = f"Dynamo leaves out nn.{recurrent}" if is_left_out else f"Dynamo can't run it: {program.not_captured}"
        raise NotWritten(f"{why}, so torch.compile captures nothing of that; `torch.cuda.make_graphed_callables` "
                         "captures a module without Dynamo, under autocast with cache_enabled=False")
    return Advice('model = torch.compile(model, mode="reduce-overhead")', instead_of=compiled.CODE, wraps=True)


def predict(basis: Basis, found: Sequence[Found]) -> Prediction:
    """Nothing is idle any more."""
    return basis.saves(basis.spending.idle_ms)


TECHNIQUE = Technique("cuda-graph", "launches one by one -> a captured graph", find, apply, advice, missing,
                      predict=predict, launch="graph")
