"""FP32 matmuls on tensor cores: they read the first 10 bits of each mantissa, and add up in FP32."""
from collections.abc import Sequence

import torch

from benchmarks.assistant import memory
from benchmarks.assistant.predicting import Basis, Prediction
from benchmarks.assistant.program import Program
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from benchmarks.assistant.techniques.autocast import matmuls_in_float32
from benchmarks.assistant.workload import arithmetic_of
from common.block.evidence import Evidence


def find(program: Program) -> list[Found]:
    """All FP32 matmuls at once, unless TF32 is allowed already."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        return []
    return matmuls_in_float32(program, f"at float32_matmul_precision {precision!r}")


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    if device.type != "cuda":
        return "TF32 needs an NVIDIA GPU"
    return "" if torch.cuda.is_tf32_supported() else "this GPU has no TF32"


def apply(plan: Plan) -> None:
    """Around every call, and its backward."""
    plan.matmul_precision = "high"
    plan.numerics = plan.numerics or "tf32"


def advice(program: Program, found: Found) -> Advice:
    """Once, before the model is called."""
    return Advice('torch.set_float32_matmul_precision("high")')


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why no matmul ran in it; "" where one did."""
    return "" if seen.kinds["TF32 matmul"] else "no TF32 matmul ran"


def predict(basis: Basis, found: Sequence[Found]) -> Prediction:
    """Matmuls at the rate of TF32."""
    plan, device = Plan(), basis.program.inputs.device
    apply(plan)
    return basis.with_arithmetic(arithmetic_of(Plan(), device), arithmetic_of(plan, device))


TECHNIQUE = Technique("tf32", "FP32 matmuls -> TF32 on tensor cores", find, apply, advice, missing, fired,
                      predict=predict, frees=memory.the_same)
