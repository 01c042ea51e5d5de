"""Modules of installed packages, whose lines nobody edits: code that puts torch's modules in their place."""
from collections.abc import Sequence

from torch import nn

from benchmarks.assistant.graph import Region, inner_module, paths_of
from benchmarks.assistant.program import Program
from benchmarks.measure.calls import clean


def modules_around(program: Program, region: Region) -> list[nn.Module]:
    """All modules of the class that a region ends in; none where it stands in a function alone, or in the model itself,
    which no other module holds.
    """
    kind = _class_around(program, region)
    modules = [each for each in program.model.modules() if type(each).__name__ == kind]
    return [] if program.model in modules else modules


def _class_around(program: Program, region: Region) -> str:
    """By name. Where a module was captured by itself, behind a graph break, Dynamo's stack of modules is empty."""
    last = region.nodes[-1]
    _, kind = inner_module(last)
    if kind:
        return kind
    modules = {clean(name): type(module).__name__ for name, module in program.model.named_modules()}
    return next((modules[path] for path in paths_of(region.graph, last) if path in modules), "")


def replacing(module: nn.Module, made: Sequence[str]) -> str:
    """Code that puts what these lines give, the last as an expression, in place of all modules of that class.

    They may read the `child` that it replaces.
    """
    *before, last = made
    lines = [*before, f"setattr(module, name, {last})"]
    return "\n".join([
        "for module in list(model.modules()):", "    for name, child in module.named_children():",
        f'        if type(child).__name__ == "{type(module).__name__}":', *(f"            {line}" for line in lines)])
