"""Convolutions on channels-last tensors (NHWC): tensor cores read them so, and else each call transposes them first."""
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.assistant.program import Program
from benchmarks.assistant.rung import why_it_raises
from benchmarks.assistant.spending import is_transpose
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from benchmarks.assistant.trace import Call
from common.block.evidence import Evidence

CODE = "model = model.to(memory_format=torch.channels_last)"
LEAST = 0.01                                           # of all FLOPs or bytes: below that a gain would be noise


def find(program: Program) -> list[Found]:
    """All convolutions in two dimensions, unless their weights are channels-last already."""
    convolutions = convolutions_of(program, dimensions=2)
    if not convolutions or not any(map(_is_nchw, program.model.parameters())):
        return []
    count, of_all, why_not = told_of(convolutions, program)
    said = f"{count} on NCHW tensors: {of_all}"
    if any(map(_is_nchw, program.inputs.named().values())):
        said += "; its time holds the transposes of inputs that come as NCHW"
    return [Found(None, "", 1, said, why_not or why_it_raises(program, TECHNIQUE))]


def convolutions_of(program: Program, dimensions: int | None = None) -> list[Call]:
    """The calls of convolutions in a forward; in so many dimensions, or in any."""
    return [call for call in program.trace.calls
            if any("conv" in product.operator and dimensions in (None, len(product.shapes[0]) - 2)
                   for product in call.products)]


def told_of(convolutions: Sequence[Call], program: Program) -> tuple[str, str, str]:
    """("3 convolutions", "12 % of all FLOPs", why they can't matter, or "")."""
    flops, bytes_moved = sum(call.flops for call in convolutions), sum(call.bytes for call in convolutions)
    share = flops / program.trace.flops
    matters = max(share, bytes_moved / program.trace.bytes) >= LEAST           # one by channels has few FLOPs
    count = "1 convolution" if len(convolutions) == 1 else f"{len(convolutions)} convolutions"
    return count, f"{100 * share:.0f} % of all FLOPs", "" if matters else "so small a share has nothing to gain"


def _is_nchw(t: Tensor) -> bool:
    """Whether images or a weight of convolutions lie as NCHW. A weight of 1 x 1 lies both ways."""
    return t.dim() == 4 and not t.is_contiguous(memory_format=torch.channels_last)


def apply(plan: Plan) -> None:
    """To the weights. What a convolution gives is then channels-last too, and so is all behind it."""
    plan.changes.append(convert)


def convert(model: nn.Module) -> None:
    """From here on the model has weights of its own, channels-last, under the names of those before."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() == 4:
                if id(weight) not in made:             # a tied one stays tied
                    own = weight.detach().clone(memory_format=torch.channels_last)
                    made[id(weight)] = nn.Parameter(own, requires_grad=weight.requires_grad)
                setattr(module, name, made[id(weight)])


def advice(program: Program, found: Found) -> Advice:
    """Once, before the model is compiled."""
    return Advice(CODE)


def remark(program: Program, before: Evidence, seen: Evidence) -> str:
    """Which transposes it causes: more than there were. A CPU's operators do not tell theirs."""
    more = _transposes(seen) - _transposes(before)
    return f"{more} transposes more than without it" if more > 0 else ""


def _transposes(seen: Evidence) -> int:
    return sum(count for name, count in seen.kernels.items() if is_transpose(name))


TECHNIQUE = Technique("channels-last", "convolutions on NCHW -> NHWC", find, apply, advice, remark=remark,
                      for_16_bits=True)
