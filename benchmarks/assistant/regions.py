"""Parts of a model that are slower compiled, and whether the whole is faster without them.

Inductor's own kernels lose at times to a library's: to a norm or a convolution of a certain shape, say. Each part is
compiled by itself, on what the model gives it, and timed beside itself uncompiled.
"""
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.assistant.program import Program, fresh_dynamo
from benchmarks.assistant.side_by_side import WORTH_IT, Ratio, compiled_work, pays, times_as_fast
from benchmarks.measure.calls import Inputs
from benchmarks.measure.copying import shared_copy
from benchmarks.measure.keeping import kept, parameters_kept
from common.text import ratio

MOST = 8                                   # parts that are compiled by themselves, those with most parameters first
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
CODE = "for name in {paths}: part = model.get_submodule(name); part.forward = torch.compiler.disable(part.forward)"


@dataclass(frozen=True)
class Part:
    """A module of a model, and all that are like it: of one class, with one shape of parameters and inputs."""
    paths: tuple[str, ...]
    inputs: Inputs                         # of a call of the first

    def module(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.paths[0])


def parts_of(program: Program) -> list[Part]:
    """The modules right below the model, and those in its lists, by what they are called with."""
    called: dict[str, Inputs] = {}
    handles = []

    def keep(path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
        inputs = replace(program.inputs, args=args, kwargs=kwargs)
        if path not in called and inputs.named():
            called[path] = inputs
    with kept(program.model), torch.no_grad() if program.is_inference else contextlib.nullcontext():
        try:
            for path, module in _below(program.model):
                handles.append(module.register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: keep(path, args, kwargs), with_kwargs=True))
            program.inputs.copies().call(program.model)
        finally:
            for handle in handles:
                handle.remove()
    alike: dict[tuple, list[str]] = {}
    for path, inputs in called.items():
        module = program.model.get_submodule(path)
        shapes = tuple(tuple(t.shape) for t in (*module.parameters(), *inputs.named().values()))
        alike.setdefault((type(module), shapes), []).append(path)
    parts = [Part(tuple(paths), called[paths[0]]) for paths in alike.values()]
    return sorted(parts, key=lambda part: -sum(t.numel() for t in part.module(program.model).parameters()))[:MOST]


def _below(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of those with parameters."""
    for name, module in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, CONTAINERS):
            yield from _below(module, f"{path}.")
        elif any(True for _ in module.parameters()):
            yield path, module


def slower_compiled(program: Program) -> list[tuple[Part, Ratio]]:
    """The parts that are slower compiled, and how many times as fast they are so. What can't be timed is left out."""
    found = []
    for part in parts_of(program):
        with contextlib.suppress(Exception), kept(program.model), fresh_dynamo():
            module = part.module(program.model)
            with parameters_kept(module, part.inputs):
                plain, _ = compiled_work(module, program, [part.inputs])
                compiled, _ = compiled_work(torch.compile(module, dynamic=False), program, [part.inputs])
                gain = times_as_fast(plain, compiled, program.inputs.device)
            if gain[2] * WORTH_IT <= 1:
                found.append((part, gain))
    return found


def without_them(program: Program) -> list[tuple[str, str]]:
    """(the part, how it is compiled, and the whole model without it), of each that is slower compiled; then of all."""
    slower = slower_compiled(program)
    if not slower:
        return []
    paths = [path for part, _ in slower for path in part.paths]
    left_out = shared_copy(program.model)
    for path in paths:
        module: Any = left_out.get_submodule(path)
        module.forward = torch.compiler.disable(module.forward)
    with kept(program.model), fresh_dynamo(), parameters_kept(program.model, program.inputs):
        whole, _ = compiled_work(torch.compile(program.model, dynamic=False), program, [program.inputs])
        without, _ = compiled_work(torch.compile(left_out, dynamic=False), program, [program.inputs])
        gain = times_as_fast(whole, without, program.inputs.device)
    said = [(f"{part.paths[0]}, {_count(part)}{type(part.module(program.model)).__name__}",
             f"compiled by itself it is {ratio(of_it)} times as fast as it is") for part, of_it in slower]
    code = CODE.format(paths=paths) if pays(gain) else "leave them in"
    return [*said, ("the model compiled without", f"{ratio(gain)} times as fast as with: {code}")]


def _count(part: Part) -> str:
    return f"{len(part.paths)} x " if len(part.paths) > 1 else ""
