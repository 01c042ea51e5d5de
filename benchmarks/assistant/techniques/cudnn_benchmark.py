"""Convolutions by the fastest of cuDNN's algorithms: all are timed at the first call of a shape, and the best is kept.

Without it cuDNN chooses by a rule. Each new shape is timed anew, so that it pays where shapes are few.
"""
import torch

from benchmarks.assistant.program import Program
from benchmarks.assistant.switches import CUDNN_BENCHMARK
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from benchmarks.assistant.techniques.channels_last import convolutions_of, told_of
from common.block.evidence import Evidence

CODE = "torch.backends.cudnn.benchmark = True"


def find(program: Program) -> list[Found]:
    """All convolutions at once, unless cuDNN times them already."""
    convolutions = convolutions_of(program)
    if not convolutions or CUDNN_BENCHMARK.get():
        return []
    count, of_all, why_not = told_of(convolutions, program)
    reason = f"{count}, {of_all}, by the algorithm that cuDNN expects to be fastest; each new shape is timed anew"
    return [Found(None, "", 1, reason, why_not)]


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    return "" if device.type == "cuda" and torch.backends.cudnn.is_available() else "cuDNN needs an NVIDIA GPU"


def apply(plan: Plan) -> None:
    """In every call, and its backward, which reads the setting anew."""
    plan.times_convolutions = True


def advice(program: Program, found: Found) -> Advice:
    """Once, before the model is called."""
    return Advice(CODE)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why it changed nothing; "" where other kernels ran than before."""
    same = before.kernels.keys() == seen.kernels.keys()
    return "the same kernels ran: what cuDNN chose by its rule is the fastest" if same else ""


TECHNIQUE = Technique("cudnn-benchmark", "convolutions -> the fastest algorithm of cuDNN", find, apply, advice, missing,
                      fired)
