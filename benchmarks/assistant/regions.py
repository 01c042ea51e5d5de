"""Parts of a model that are slower compiled, and whether the whole is faster without them.

Each part is compiled by itself, on what the model gives it, and timed beside itself uncompiled.
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
from common.outcome import in_a_line
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
        if path in called:
            return
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
        inputs = replace(program.inputs, args=args, kwargs=kwargs)
        if inputs.named():
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


def gain_of(part: Part, program: Program) -> Ratio:
    """How many times as fast it is compiled."""
    module = part.module(program.model)
    with kept(program.model), fresh_dynamo(), parameters_kept(module, part.inputs):
        plain, _ = compiled_work(module, program, [part.inputs])
        compiled, _ = compiled_work(torch.compile(module, dynamic=False), program, [part.inputs])
        return times_as_fast(plain, compiled, program.inputs.device)


def slower_compiled(program: Program) -> list[tuple[str, str]]:
    """(the part, how fast it is compiled) of each that is slower so, or can't be timed; then of the whole without."""
    said: list[tuple[str, str]] = []
    paths: list[str] = []
    for part in parts_of(program):
        count = f"{len(part.paths)} x " if len(part.paths) > 1 else ""
        place = f"{part.paths[0]}, {count}{type(part.module(program.model)).__name__}"
        try:
            gain = gain_of(part, program)
        except Exception as error:                             # whatever a compiler or a module raises
            said.append((place, f"it could not be timed: {in_a_line(error)}"))
            continue
        if gain[2] * WORTH_IT <= 1:
            said.append((place, f"compiled by itself it is {ratio(gain)} times as fast as it is"))
            paths += part.paths
    return [*said, _without(paths, program)] if paths else said


def _without(paths: list[str], program: Program) -> tuple[str, str]:
    """The whole compiled without these, beside the whole compiled with them."""
    left_out = shared_copy(program.model)
    for path in paths:
        module: Any = left_out.get_submodule(path)
        module.forward = torch.compiler.disable(module.forward)
    with kept(program.model), fresh_dynamo(), parameters_kept(program.model, program.inputs):
        whole, _ = compiled_work(torch.compile(program.model, dynamic=False), program, [program.inputs])
        without, _ = compiled_work(torch.compile(left_out, dynamic=False), program, [program.inputs])
        gain = times_as_fast(whole, without, program.inputs.device)
    code = CODE.format(paths=paths) if pays(gain) else "leave them in"
    return "the model compiled without", f"{ratio(gain)} times as fast as with: {code}"
