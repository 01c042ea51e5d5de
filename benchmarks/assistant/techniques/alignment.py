"""Linear layers whose sizes tensor cores do not like, as a vocabulary of 50,257: a person pads them.

Kernels for tensor cores read rows in pieces of 16 bytes. A size that 8 does not divide takes others, or a copy first.
"""
import functools

import torch
from torch import nn

from benchmarks.assistant.fp8 import layers_of
from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import Ratio, pays, times_as_fast
from benchmarks.assistant.technique import Found, Technique
from common.block.config import dtype_name
from common.runtime import iteration
from common.runtime.iteration import BOTH, FORWARD

MULTIPLE, PADDED = 8, 64                   # what sizes should be divisible by; to a multiple of which they are padded
SHARE = 0.02                               # of all FLOPs that a layer must have


def find(program: Program) -> list[Found]:
    """Every linear layer of such a size, where its matmul counts."""
    mode = FORWARD if program.is_inference or not program.trace.trains else BOTH
    dtypes = {call.module: call.dtype for call in program.trace.calls if call.name == "linear"}
    places = {call.module: call.place for call in program.trace.calls if call.name == "linear"}
    found = []
    for layer in layers_of(program):
        tokens, *sides = layer.size
        if not any(side % MULTIPLE for side in sides) or layer.flops < SHARE * program.trace.flops:
            continue
        padded = [side + -side % PADDED for side in sides]
        odd = [f"{side:,} {name}{'s' * (side > 1)}" for side, name in zip(sides, ("input", "output"), strict=True)
               if side % MULTIPLE]
        share = f"{100 * layer.flops / program.trace.flops:.0f} % of all FLOPs"
        reason, why_not = f"{' and '.join(odd)}, which {MULTIPLE} does not divide: {share}", ""
        if not missing(program.inputs.device):
            dtype = dtypes[layer.path] or torch.float32
            gain = _gain((tokens, *sides), (tokens, *padded), dtype, mode, program.inputs.device)
            times = f"{gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}] times as fast here in {dtype_name(dtype)}"
            reason += f"; padded to {' x '.join(f'{side:,}' for side in padded)} it is {times}"
            why_not = "" if pays(gain) else "it is not worth it"
        found.append(Found(places[layer.path], layer.path, 1, reason, why_not))
    return found


def missing(device: torch.device) -> str:
    """Why it can't matter there."""
    return "" if device.type == "cuda" else "tensor cores ask for it, and this is a CPU"


@functools.cache
def _gain(size: tuple[int, ...], padded: tuple[int, ...], dtype: torch.dtype, mode: str, device: torch.device) -> Ratio:
    """Of one layer, without what pads and cuts."""
    works = []
    for tokens, inputs, outputs in (size, padded):
        layer = nn.Linear(inputs, outputs, device=device, dtype=dtype)
        x, dy = (torch.randn(tokens, width, device=device, dtype=dtype) for width in (inputs, outputs))
        works.append(iteration.of_call(layer, [x], [dy], dict(layer.named_parameters()), mode))
    return times_as_fast(works[0], works[1], device)


TECHNIQUE = Technique("alignment", "sizes that 8 does not divide -> padded", find, missing=missing)
