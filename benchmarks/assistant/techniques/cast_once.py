"""Weights that autocast casts at each call are cast once, for inference: the same bits, and fewer passes."""
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.assistant.fp8 import HOOKS, patterns
from benchmarks.assistant.program import Program
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from common.block.config import dtype_name
from common.block.evidence import Evidence

IN_16_BITS = (torch.bfloat16, torch.float16)
MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CODE = """\
from fnmatch import fnmatch

for name, module in model.named_modules():
    if isinstance(module, {classes}) and any(fnmatch(name, each) for each in {patterns}):
        module.to({dtype})"""


def find(program: Program) -> list[Found]:
    """All of them, as one finding at the call of the model."""
    if not program.is_inference:
        return []
    found = []
    for dtype, paths in cast_at_each_call(program).items():
        size = sum(each.nbytes for path in paths for each in program.model.get_submodule(path).parameters())
        count = "1 layer" if len(paths) == 1 else f"{len(paths)} layers"
        reason = f"autocast casts {size / 1e6:,.1f} MB of weights of {count} to {dtype_name(dtype)} at each call"
        found.append(Found(None, "", 1, reason, modules=tuple(paths), dtype=dtype))
    return found


def cast_at_each_call(program: Program) -> dict[torch.dtype, list[str]]:
    """16 bits -> the paths of the layers with weights in FP32 of their own that multiply in them, and in no other."""
    dtypes: dict[str, set[torch.dtype | None]] = {}
    for call in program.trace.calls:
        if call.is_matmul and _is_a_layer(program.module_at(call.module)):
            dtypes.setdefault(call.module, set()).add(call.dtype)
    layers = {path: program.model.get_submodule(path) for path in dtypes}
    holders = Counter(id(parameter) for module in program.model.modules()
                      for parameter in module.parameters(recurse=False))
    chosen: dict[torch.dtype, list[str]] = {}
    for path, module in layers.items():
        [dtype, *others] = dtypes[path]
        is_its_own = all(holders[id(parameter)] == 1 for parameter in module.parameters())
        if dtype in IN_16_BITS and not others and is_its_own:
            chosen.setdefault(dtype, []).append(path)
    return chosen


def _is_a_layer(module: Any) -> bool:
    return (type(module) in MODULES and module.weight.dtype == torch.float32
            and not any(getattr(module, hooks) for hooks in HOOKS))


def apply(plan: Plan) -> None:
    """To the layers that were found."""
    for found in plan.found.get(TECHNIQUE.name, ()):
        assert found.dtype is not None
        plan.changes.append(functools.partial(cast_once, paths=found.modules, dtype=found.dtype))


def cast_once(model: nn.Module, paths: Sequence[str], dtype: torch.dtype) -> None:
    """From here on these layers have weights in 16 bits, too, and use them where autocast would cast."""
    for path in paths:
        module = model.get_submodule(path)
        vars(module)["forward"] = Cast(module, dtype)      # parameters stay where they are: FP64 says what they mean


class Cast:
    """A layer that has its weights in 16 bits for autocast."""

    def __init__(self, module: Any, dtype: torch.dtype):
        self.module, self.dtype = module, dtype
        self.weight = module.weight.detach().to(dtype)
        self.bias = None if module.bias is None else module.bias.detach().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        kind, module = x.device.type, self.module
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.dtype
        if not casts or module.weight.dtype != torch.float32:
            return type(module).forward(module, x)
        if isinstance(module, nn.Linear):
            return F.linear(x, self.weight, self.bias)
        return module._conv_forward(x, self.weight, self.bias)


def advice(program: Program, found: Found) -> Advice:
    """Once, before the model is compiled."""
    kinds = {type(program.model.get_submodule(path)).__name__ for path in found.modules}
    classes = ", ".join(f"torch.nn.{name}" for name in sorted(kinds))
    names = patterns(found.modules, program.model, tuple(each for each in MODULES if each.__name__ in kinds))
    return Advice(CODE.format(classes=f"({classes})" if len(kinds) > 1 else classes, patterns=names, dtype=found.dtype))


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why it did not: as much was copied as without it."""
    left, there = (sum(count for name, count in each.kernels.items() if "copy" in name.lower())
                   for each in (seen, before))
    return f"{left} copies ran, and {there} without it" if left >= there > 0 else ""


TECHNIQUE = Technique("cast-once", "weights cast by autocast at each call -> once", find, apply, advice, fired=fired)
