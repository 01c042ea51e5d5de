"""Matmuls in BF16 under autocast: tensor cores, and half of the bytes. The parameters stay in FP32."""
import dataclasses
from collections.abc import Sequence

import torch

from benchmarks.assistant import memory
from benchmarks.assistant.predicting import Basis, Prediction
from benchmarks.assistant.program import Program
from benchmarks.assistant.rung import why_it_raises
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from benchmarks.assistant.workload import arithmetic_of
from common.block.evidence import Evidence
from common.block.traits import amp_default


def matmuls_in_float32(program: Program, how: str) -> list[Found]:
    """All of them, as one finding at the call of the model."""
    matmuls = [call for call in program.trace.calls if call.is_matmul]
    slow = [call for call in matmuls if call.dtype == torch.float32]
    if not slow:
        return []
    percent = 100 * sum(call.flops for call in slow) / program.trace.flops
    count = "1 matmul" if len(slow) == 1 else f"{len(slow)} matmuls"
    return [Found(None, "", 1, f"{count} in float32 {how}: {percent:.0f} % of all FLOPs")]


def find(program: Program) -> list[Found]:
    """All FP32 matmuls at once."""
    found = matmuls_in_float32(program, "without autocast")
    if missing(program.inputs.device):
        return found
    return [dataclasses.replace(each, why_not=why_it_raises(program, TECHNIQUE)) for each in found]


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    dtype, _ = amp_default(device)
    return "" if dtype else "this CPU has no instructions for BF16"


def apply(plan: Plan) -> None:
    """Around every call; the backward computes in what its forward did."""
    plan.autocast = torch.bfloat16
    plan.numerics = plan.numerics if plan.in_fp8 else "bfloat16"


def advice(program: Program, found: Found) -> Advice:
    """Around the forward and the loss, not the backward."""
    device = program.inputs.device.type
    return Advice(f'with torch.autocast("{device}", torch.bfloat16):\n    output = model({arguments(program)})')


def arguments(program: Program) -> str:
    """What the model is called with, in words."""
    return "**inputs" if program.inputs.kwargs else "*inputs"


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why no matmul ran in 16 bits; "" where one did. A CPU's operators do not tell their arithmetic."""
    on_gpu = program.inputs.device.type == "cuda"
    return "no 16-bit matmul ran" if on_gpu and not seen.kinds["16-bit matmul"] else ""


def predict(basis: Basis, found: Sequence[Found]) -> Prediction:
    """Matmuls at the rate of 16 bits; each weight is read in FP32 and written in 16 bits."""
    plan, device = Plan(), basis.program.inputs.device
    apply(plan)
    weights = sum(t.nbytes for t in basis.program.model.parameters() if t.ndim > 1)
    return basis.with_arithmetic(arithmetic_of(Plan(), device), arithmetic_of(plan, device), 1.5 * weights)


TECHNIQUE = Technique("autocast", "FP32 matmuls -> BF16 under autocast", find, apply, advice, missing, fired,
                      predict=predict, frees=memory.under_autocast, instead_of="tf32")
