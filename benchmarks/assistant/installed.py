"""Modules of installed packages, whose lines nobody edits: code that puts torch's modules in their place."""
from collections.abc import Sequence

from torch import fx, nn

from benchmarks.assistant.graph import inner_module
from benchmarks.assistant.program import Program


def modules_around(program: Program, node: fx.Node) -> list[nn.Module]:
    """All modules of the class that an operation ran in; none where it ran in a function alone, or in the model itself,
    which no other module holds.
    """
    _, kind = inner_module(node)
    modules = [each for each in program.model.modules() if type(each).__name__ == kind]
    return [] if program.model in modules else modules


def replacing(module: nn.Module, made: Sequence[str]) -> str:
    """Code that puts what these lines give, the last as an expression, in place of all modules of that class.

    They may read the `child` that it replaces.
    """
    *before, last = made
    lines = [*before, f"setattr(module, name, {last})"]
    return "\n".join([
        "for module in list(model.modules()):", "    for name, child in module.named_children():",
        f'        if type(child).__name__ == "{type(module).__name__}":', *(f"            {line}" for line in lines)])
