"""torch.compile: Inductor fuses what stands between the matmuls, and fewer kernels are launched."""
from collections.abc import Sequence

import torch

from benchmarks.assistant.predicting import Basis, Prediction, share_of_fused
from benchmarks.assistant.program import Program
from benchmarks.assistant.spending import PASSES
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from common.block.evidence import Evidence
from common.runtime import compiler

CODE = "model = torch.compile(model)"


def find(program: Program) -> list[Found]:
    """The call of the model."""
    trace = program.trace
    if program.is_compiled:
        return [Found(None, "", 1, "the model", why_not="it is compiled already")]
    if program.not_captured:
        return [Found(None, "", 1, "the model", why_not=f"Dynamo can't run it: {program.not_captured}")]
    passes = sum(call.bytes for call in trace.calls if not call.is_matmul)
    share = f"{100 * passes / trace.bytes:.0f} % of the bytes move outside of matmuls" if trace.bytes else "the model"
    breaks = len(program.breaks)
    count = "no graph break" if not breaks else "1 graph break" if breaks == 1 else f"{breaks} graph breaks"
    return [Found(None, "", 1, f"{share}; {count}")]


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    return compiler.missing(device) or ""


def apply(plan: Plan) -> None:
    """To the whole model."""
    plan.compiles = True


def advice(program: Program, found: Found) -> Advice:
    """Once, before the first call."""
    return Advice(CODE, wraps=True)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why no compiled code ran; "" where some did."""
    return "" if seen.kinds["compiled"] else "no compiled kernel ran"


def remark(program: Program, before: Evidence, seen: Evidence) -> str:
    """That as much is launched as before: nothing of it was fused."""
    fewer = seen.launches < before.launches
    return "" if fewer else f"it launches {seen.launches} kernels, and {before.launches} without it"


def predict(basis: Basis, found: Sequence[Found]) -> Prediction:
    """What is passed from one pass over memory to the next stays in registers; at most nothing is idle any more."""
    saved = (1 - share_of_fused(basis.program.graphs)) * basis.ms_of({PASSES})
    return basis.saves(saved + basis.spending.idle_ms, saved / 2)


TECHNIQUE = Technique("compile", "eager -> torch.compile", find, apply, advice, missing, fired, remark,
                      predict=predict)
