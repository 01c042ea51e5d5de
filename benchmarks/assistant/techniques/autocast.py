"""Matmuls in BF16 under autocast: tensor cores, and half of the bytes. The parameters stay in FP32."""
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.assistant import memory
from benchmarks.assistant.predicting import Basis, Prediction
from benchmarks.assistant.program import Program
from benchmarks.assistant.rung import Rung, why_it_raises
from benchmarks.assistant.source import Place
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from benchmarks.assistant.trace import trace
from benchmarks.assistant.workload import arithmetic_of
from benchmarks.measure.keeping import kept
from benchmarks.measure.observing import Loss
from common.block.evidence import Evidence
from common.block.traits import amp_default
from common.outcome import in_a_line, is_out_of_memory

WORTH_NAMING = 1.0                     # percent of all FLOPs


@dataclass(frozen=True)
class Cast(Found):
    """Matmuls that autocast casts."""
    stay: frozenset[Place] = frozenset()   # lines whose matmuls stay in FP32: autocast does not know their operators
    output_too: bool = False               # the loss takes its output in FP32 alone


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
    return [_tried(program, each.reason) for each in found]


def _tried(program: Program, reason: str) -> Cast:
    """What the model raises under autocast, what stays in FP32, and whether the loss needs its output in FP32."""
    if why_not := why_it_raises(program, TECHNIQUE):
        return Cast(None, "", 1, reason, why_not)
    stay, in_words = _what_stays(program)
    why_cast = _why_the_loss_needs_float32(program)
    if why_cast:
        in_words += f"; the loss takes its output in FP32 alone: {why_cast}"
    return Cast(None, "", 1, reason + in_words, is_partial=bool(stay), stay=stay, output_too=bool(why_cast))


def _what_stays(program: Program) -> tuple[frozenset[Place], str]:
    """(the lines whose matmuls stay in FP32, in words where they count): operators that autocast has no list for."""
    seen = trace(Rung(program.model, [TECHNIQUE]), program.inputs)
    staying = [call for call in seen.calls if call.dtype == torch.float32 and call.place]
    flops: dict[Place, float] = {}
    for call in staying:
        if call.place:
            flops[call.place] = flops.get(call.place, 0.0) + call.flops
    percents = {place: 100 * each / seen.flops for place, each in flops.items()}
    lines = [place.name for place, percent in percents.items() if percent >= WORTH_NAMING]
    if not lines:
        return frozenset(), ""
    words = (f"; {sum(percents.values()):.0f} % stay in float32, as autocast casts no operand at {', '.join(lines)}; "
             "`model.to(torch.bfloat16)` would cast them")
    return frozenset(flops), words


def _why_the_loss_needs_float32(program: Program) -> str:
    """What the loss or its backward raises for an output tensor in 16 bits, where both take it in FP32; else "".

    Beside targets in FP32, some of torch's losses have no backward.
    """
    if program.loss is None:
        return ""
    with kept(program.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        output = program.inputs.copies().call(Rung(program.model, [TECHNIQUE]))
    if not isinstance(output, Tensor) or output.dtype != torch.bfloat16:
        return ""
    in_16_bits, in_fp32 = (_why_it_has_no_gradient(program.loss, each) for each in (output, output.float()))
    return in_16_bits if not in_fp32 else ""


def _why_it_has_no_gradient(loss: Loss, output: Tensor) -> str:
    """What the loss or its backward raises, in a line; "" where both run. No tensor keeps a gradient."""
    output = output.detach().requires_grad_()
    try:
        torch.autograd.grad(loss(output), output)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return in_a_line(error)
    return ""


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    dtype, _ = amp_default(device)
    return "" if dtype else "this CPU has no instructions for BF16"


def apply(plan: Plan) -> None:
    """Around every call; the backward computes in what its forward did."""
    plan.autocast = torch.bfloat16
    plan.numerics = plan.numerics if plan.in_fp8 else "bfloat16"
    plan.returns_float32 = any(_of(found).output_too for found in plan.found.get(TECHNIQUE.name, ()))


def _of(found: Found) -> Cast:
    """What is known of it: nothing where autocast was not tried."""
    return found if isinstance(found, Cast) else Cast(None, "", 1, found.reason)


def advice(program: Program, found: Found) -> Advice:
    """Around the forward, not the backward."""
    device, cast = program.inputs.device.type, ".float()" if _of(found).output_too else ""
    return Advice(f'with torch.autocast("{device}", torch.bfloat16):\n'
                  f"    output = model({arguments(program)}){cast}")


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
    as_it_is, under_autocast = arithmetic_of(Plan(), device), arithmetic_of(plan, device)
    stay = frozenset().union(*(_of(each).stay for each in found))
    return basis.with_arithmetic(
        as_it_is, lambda call: (as_it_is if call.place in stay else under_autocast)(call), 1.5 * weights)


TECHNIQUE = Technique("autocast", "FP32 matmuls -> BF16 under autocast", find, apply, advice, missing, fired,
                      predict=predict, frees=memory.under_autocast, instead_of="tf32")
