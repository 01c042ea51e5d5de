"""The project's source files as syntax trees: which modules of the project each imports, and from where."""
import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from common.block.steps import ROOT

PACKAGES = ("common", "benchmarks")


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def sources(folder: str) -> list[Path]:
    """Every Python file under a folder of the project."""
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """common/text.py -> "common.text"; a package is its __init__.py."""
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


def is_module(name: str) -> bool:
    """Whether a module or package of the project has that name."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imported(path: Path) -> dict[str, bool]:
    """Every module that a file imports -> whether inside a function alone.

    Relative names are resolved. `from common import text` imports common.text, where that is a module.
    """
    inside: dict[str, bool] = {}
    for node, in_function in _imports(parse(path), False):
        for name in _names(node, path):
            inside[name] = in_function and inside.get(name, True)
    return inside


def _imports(tree: ast.AST, in_function: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, in_function
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports(node, in_function or is_function)


def _names(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = ["", *path.parent.relative_to(ROOT).parts]
        above = package[1:len(package) - node.level + 1]
        base = ".".join(filter(None, [*above, base]))
    names = []
    for alias in node.names:
        submodule = f"{base}.{alias.name}"
        names.append(submodule if is_module(submodule) else base)
    return names
