"""CUDA graphs: the host launches all kernels at once, where the GPU would wait for them one by one."""
import torch

from benchmarks.assistant.program import Program
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from common.measure.measurement import NOT_A_GPU


def find(program: Program) -> list[Found]:
    """The call of the model."""
    operators = sum(len(call.operators) for call in program.trace.calls)
    return [Found(None, "", 1, f"{operators} operators a forward are launched one by one")]


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    return "" if device.type == "cuda" else NOT_A_GPU


def apply(plan: Plan) -> None:
    """Nothing of the model changes: it is the same rung, launched as a graph."""


def advice(program: Program, found: Found) -> Advice:
    """Of one shape, captured once. Compiled code has a mode for it."""
    if program.inputs.kwargs:
        return Advice('model = torch.compile(model, mode="reduce-overhead")')
    return Advice("model = torch.cuda.make_graphed_callables(model, inputs)")


TECHNIQUE = Technique("cuda-graph", "launches one by one -> a captured graph", find, apply, advice, missing,
                      launch="graph")
