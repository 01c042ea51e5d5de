"""Weights of linear layers in INT8, for inference on few tokens: there the time is that of reading the weights.

A scale for each output takes them back; activations stay as they are. Which layers is decided by the time of each size
on this machine.
"""
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.assistant.fp8 import HOOKS, patterns
from benchmarks.assistant.predicting import Basis, Prediction
from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import Ratio, gain_on_device, pays
from benchmarks.assistant.spending import MATMUL
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from benchmarks.assistant.techniques.cast_once import IN_16_BITS
from benchmarks.measure.int8 import in_int8
from common.block.config import dtype_name
from common.block.evidence import Evidence
from common.outcome import in_a_line, is_out_of_memory
from common.runtime.iteration import Iteration

MOST_TOKENS = 64                           # of more no layer is timed
MULTIPLE = 64                              # of inputs: of others torch's CPU kernel reads beyond a row's end, and gives
# garbage or crashes
CACHES = 128 * 2**20                       # bytes of weights that are read in turn: an H100's cache holds 50 MB
Size = tuple[int, int, int]                # tokens, inputs, outputs
CODE = """\
from fnmatch import fnmatch
{imports}
class Int8Weights(torch.nn.Module):
    def __init__(self, layer, dtype={dtype}):
        super().__init__()
        weight = {weight}
        scale = weight.float().abs().amax(1).clamp_min(1e-30) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8).contiguous())
        self.register_buffer("scale", scale.to(dtype))
        self.bias = layer.bias

    def forward(self, x):
        rows = x.to(self.scale.dtype).reshape(-1, x.size(-1))
        y = torch._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

for name, layer in list(model.named_modules()):
    if isinstance(layer, {kinds}) and any(fnmatch(name, each) for each in {patterns}):
        model.set_submodule(name, Int8Weights(layer))"""


def find(program: Program) -> list[Found]:
    """All that have few tokens, as one finding at the call of the model, each size timed."""
    if not program.is_inference:
        return []
    found = []
    for dtype, layers in layers_of(program).items():
        few = f"{len(layers)} linear layers on few tokens"
        try:
            gains = {size: gain_of(size, dtype, program.inputs.device) for size in dict.fromkeys(layers.values())}
        except RuntimeError as error:                      # not every device has the kernel, nor it every size
            if is_out_of_memory(error):
                raise
            found.append(Found(None, "", 1, few, f"torch can't multiply so here: {in_a_line(error)}"))
            continue
        chosen = tuple(path for path, size in layers.items() if pays(gains[size]))
        sizes = [f"{' x '.join(f'{each:,}' for each in size)} {gain[0]:.2f}{'' if pays(gain) else ' (left out)'}"
                 for size, gain in gains.items()]
        reason = (f"{len(chosen)} of {few}; times as fast as in {dtype_name(dtype)}, by tokens x inputs x outputs: "
                  f"{', '.join(sizes)}")
        found.append(Found(None, "", 1, reason, "" if chosen else "none is faster with them", modules=chosen,
                           dtype=dtype))
    return found


def layers_of(program: Program) -> dict[torch.dtype, dict[str, Size]]:
    """What they multiply in -> path and size of each linear layer that is called once, on few tokens, and whose inputs
    the kernel can take.
    """
    sizes: dict[str, list[tuple[torch.dtype | None, Size]]] = {}
    for call in program.trace.calls:
        module: Any = program.module_at(call.module)
        if call.is_matmul and type(module) in kinds_of_layer() and not any(getattr(module, hooks) for hooks in HOOKS):
            outputs, inputs = weight_of(module).shape
            tokens = round(call.flops / (2 * inputs * outputs))
            sizes.setdefault(call.module, []).append((call.dtype, (tokens, inputs, outputs)))
    chosen: dict[torch.dtype, dict[str, Size]] = {}
    for path, calls in sizes.items():
        [(dtype, size), *others] = calls
        is_one = not others and size[0] <= MOST_TOKENS and size[1] % MULTIPLE == 0
        if is_one and dtype in IN_16_BITS:
            chosen.setdefault(dtype, {})[path] = size
    return chosen


def kinds_of_layer() -> tuple[type, ...]:
    """nn.Linear, and that of transformers whose weight is [in, out], once somebody has imported it."""
    library = sys.modules.get("transformers.pytorch_utils")
    return (nn.Linear, library.Conv1D) if library else (nn.Linear,)


def weight_of(layer: Any) -> Tensor:
    """[out, in], of either kind."""
    return layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()


@functools.cache
def gain_of(size: Size, dtype: torch.dtype, device: torch.device) -> Ratio:
    """How many times as fast a layer of that size is, one after another of so many that no cache holds them."""
    tokens, inputs, outputs = size
    count = min(64, max(1, math.ceil(CACHES / (inputs * outputs * dtype.itemsize))))
    layers = [nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype) for _ in range(count)]
    x = torch.randn(tokens, inputs, device=device, dtype=dtype)
    works = [_one_after_the_other(calls, x) for calls in (layers, [InInt8(layer, dtype) for layer in layers])]
    return gain_on_device(works[0], works[1], device)


def _one_after_the_other(calls: Sequence[Any], x: Tensor) -> Iteration:
    def run() -> list[Tensor]:
        with torch.no_grad():
            return [call(x) for call in calls]
    return Iteration(run, lambda: None, [], {})


def apply(plan: Plan) -> None:
    """To the layers that pay."""
    plan.numerics = plan.numerics if plan.in_fp8 else "int8"
    for found in plan.found.get(TECHNIQUE.name, ()):
        assert found.dtype is not None
        plan.in_int8 += found.modules
        plan.changes.append(functools.partial(convert, paths=found.modules, dtype=found.dtype))


def convert(model: nn.Module, paths: Sequence[str], dtype: torch.dtype) -> None:
    """From here on these layers multiply by weights in INT8."""
    for path in paths:
        module = model.get_submodule(path)
        vars(module)["forward"] = InInt8(module, dtype)    # parameters stay where they are: FP64 says what they mean


class InInt8:
    """A linear layer that has its weight in INT8, too. In FP64, which asks what a model means, it is a plain one."""

    def __init__(self, module: Any, dtype: torch.dtype):
        self.module, self.dtype = module, dtype
        weight, scale = in_int8(weight_of(module))
        self.weight, self.scale = weight.contiguous(), scale.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        if module.weight.dtype == torch.float64:
            return type(module).forward(module, x)
        rows = x.to(self.dtype).reshape(-1, x.size(-1))
        y = torch._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], -1)
        return y if module.bias is None else y + module.bias.to(y.dtype)


def advice(program: Program, found: Found) -> Advice:
    """Once, before the model is compiled. In transformers' GPT-2 the weight of a layer is [in, out]."""
    words = {"imports": "", "kinds": "torch.nn.Linear", "weight": "layer.weight.detach()"}
    if {type(program.model.get_submodule(path)) for path in found.modules} != {nn.Linear}:
        words = {"imports": "from transformers.pytorch_utils import Conv1D\n", "kinds": "(torch.nn.Linear, Conv1D)",
                 "weight": "layer.weight.detach() if isinstance(layer, torch.nn.Linear) else layer.weight.detach().T"}
    names = patterns(found.modules, program.model, kinds_of_layer())
    return Advice(CODE.format(patterns=names, dtype=found.dtype, **words))


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why no layer multiplied by INT8; "" where one did, or a compiler made its own kernel of it."""
    ran = seen.kinds["compiled"] or any("int8" in name.lower() for name in seen.kernels)
    return "" if ran else "no matmul with weights in INT8 ran"


def predict(basis: Basis, found: Sequence[Found]) -> Prediction:
    """Each layer's share of the matmuls' time, by its bytes, shrinks as its size alone did."""
    matmuls = [call for call in basis.program.trace.calls if call.is_matmul]
    device = basis.program.inputs.device
    sizes = {path: (size, dtype) for dtype, layers in layers_of(basis.program).items() for path, size in layers.items()}
    chosen = {path for each in found for path in each.modules}
    saved = sum(call.bytes * (1 - 1 / gain_of(*sizes[call.module], device)[0])
                for call in matmuls if call.module in chosen)
    share = saved / sum(call.bytes for call in matmuls)
    return basis.saves(share * basis.ms_of({MATMUL}))


TECHNIQUE = Technique("int8-weights", "weights of linear layers -> INT8, for few tokens", find, apply, advice,
                      fired=fired, predict=predict)
