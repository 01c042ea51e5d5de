"""Linear layers whose sizes tensor cores do not like, as a vocabulary of 50,257: a person pads them.

Kernels for tensor cores read rows in pieces of 16 bytes. A size that 8 does not divide takes others, or a copy first.
"""
import functools

import torch
from torch import nn

from benchmarks.assistant.fp8 import Layer, layers_of
from benchmarks.assistant.graph import with_stars
from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import Ratio, dtypes_to_time, gain_on_device, in_words, pays
from benchmarks.assistant.technique import Found, Technique
from common.runtime import iteration
from common.runtime.iteration import BOTH, FORWARD

MULTIPLE, PADDED = 8, 64                   # what sizes should be divisible by; to a multiple of which they are padded
SHARE = 0.02                               # of all FLOPs that such layers must have


def find(program: Program) -> list[Found]:
    """The linear layers of each such size at each line, where their matmuls count."""
    mode = FORWARD if program.is_inference or not program.trace.trains else BOTH
    calls = {call.module: call for call in program.trace.calls if call.name == "linear"}
    alike: dict[tuple, list[Layer]] = {}
    for layer in layers_of(program):
        call = calls[layer.path]
        alike.setdefault((call.place, layer.size, call.dtype or torch.float32), []).append(layer)
    found = []
    for (place, (tokens, *sides), dtype), layers in alike.items():
        flops = sum(layer.flops for layer in layers)
        if not any(side % MULTIPLE for side in sides) or flops < SHARE * program.trace.flops:
            continue
        padded = [side + -side % PADDED for side in sides]
        odd = [f"{side:,} {name}{'s' * (side > 1)}" for side, name in zip(sides, ("input", "output"), strict=True)
               if side % MULTIPLE]
        share = f"{100 * flops / program.trace.flops:.0f} % of all FLOPs"
        reason, why_not = f"{' and '.join(odd)}, which {MULTIPLE} does not divide: {share}", ""
        if not missing(program.inputs.device):
            gains = {each: _gain((tokens, *sides), (tokens, *padded), each, mode, program.inputs.device)
                     for each in dtypes_to_time(dtype)}
            sizes = " x ".join(f"{side:,}" for side in padded)
            reason += f"; padded to {sizes} it is {in_words(gains)}"
            why_not = "" if any(map(pays, gains.values())) else "it is not worth it"
        found.append(Found(place, with_stars([layer.path for layer in layers]), len(layers), reason, why_not))
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
    return gain_on_device(works[0], works[1], device)


TECHNIQUE = Technique("alignment", "sizes that 8 does not divide -> padded", find, missing=missing)
