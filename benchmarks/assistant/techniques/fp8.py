"""Linear layers in FP8 by Transformer Engine or torchao: faster matmuls, for casts at each call.

Which of them, and by which library, is decided by the time of each size on this machine. Scales are of the tensor
itself (current scaling): a call depends on no call before.
"""
import functools

import torch

from benchmarks.assistant import fp8
from benchmarks.assistant.program import Program
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from common.block.evidence import Evidence

BY_TRANSFORMER_ENGINE = """\
from fnmatch import fnmatch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

class LinearInFP8(te.Linear):
    def forward(self, x):
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            return super().forward(x)

for name, layer in list(model.named_modules()):
    if isinstance(layer, torch.nn.Linear) and any(fnmatch(name, each) for each in {patterns}):
        has_bias = layer.bias is not None
        in_fp8 = LinearInFP8(layer.in_features, layer.out_features, bias=has_bias, params_dtype=layer.weight.dtype,
                             device=layer.weight.device)
        in_fp8.weight = layer.weight
        if has_bias:
            in_fp8.bias = layer.bias
        model.set_submodule(name, in_fp8)"""
BY_TORCHAO = """\
from fnmatch import fnmatch
from torchao.float8 import convert_to_float8_training

def is_in_fp8(layer, name):
    return any(fnmatch(name, each) for each in {patterns})

convert_to_float8_training(model, module_filter_fn=is_in_fp8)
for name, layer in model.named_modules():
    if isinstance(layer, torch.nn.Linear) and is_in_fp8(layer, name):
        layer.compile()"""
CODE = {fp8.TRANSFORMER_ENGINE.name: BY_TRANSFORMER_ENGINE, fp8.TORCHAO.name: BY_TORCHAO}


def find(program: Program) -> list[Found]:
    """All linear layers, as one finding at the call of the model; on a machine with FP8 each size timed."""
    layers = fp8.layers_of(program)
    possible = [layer for layer in layers if not layer.why_not]
    others = fp8.others_in_words(program)
    if not possible and not others:
        return []
    how_many = f"{len(possible)} of {len(layers)} linear layers can be in FP8" if layers else "no plain nn.Linear"
    if not possible:
        return [Found(None, "", 1, "; ".join([how_many, *fp8.left_out(layers)]), others)]
    if missing(program.inputs.device):
        return [Found(None, "", 1, "; ".join(filter(None, [how_many, others])))]
    by, failed = fp8.by_library(layers, program)
    if not by:
        return [Found(None, "", 1, "; ".join(filter(None, [how_many, others])), "; ".join(failed))]
    best, *slower = sorted(by, key=lambda name: -fp8.saved(layers, by[name]))
    chosen = tuple(layer.path for layer in fp8.paying(layers, by[best]))
    why_not = "" if chosen else "no linear layer is faster in it"
    in_words = fp8.in_words(layers, {name: by[name] for name in (best, *slower)})
    said = "; ".join(filter(None, [in_words, *failed, others]))
    return [Found(None, "", 1, said, why_not, modules=chosen, library=best)]


def missing(device: torch.device) -> str:
    """Why it can't run there."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return "FP8 matmuls need a GPU of compute capability 8.9 or later"
    errors = {name: library.import_error() for name, library in fp8.LIBRARIES.items()}
    return "; ".join(f"{name} does not import: {why}" for name, why in errors.items()) if all(errors.values()) else ""


def apply(plan: Plan) -> None:
    """To the layers that were chosen; their backward is in FP8, too."""
    for found in plan.found.get(TECHNIQUE.name, ()):
        if found.modules:
            plan.in_fp8 = found.modules
            plan.changes.append(functools.partial(fp8.convert, found.modules, fp8.LIBRARIES[found.library]))
    plan.numerics = "float8"


def advice(program: Program, found: Found) -> Advice | None:
    """Once, before the model is compiled; None where no layer was chosen."""
    if not found.modules:
        return None
    return Advice(CODE[found.library].format(patterns=fp8.patterns(found.modules, program.model)))


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why no matmul ran in FP8; "" where one did."""
    return "" if seen.kinds["FP8 matmul"] or seen.kinds["FP8 matmul with GELU"] else "no FP8 matmul ran"


TECHNIQUE = Technique("fp8", "linear layers -> FP8 by Transformer Engine or torchao", find, apply, advice, missing,
                      fired)
