"""The lines of a person's files: where an operation stands, in which function, and what is written there."""
import ast
import functools
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_PACKAGES = [Path(torch.__file__).parents[1], Path(sysconfig.get_path("purelib"))]
_STANDARD = Path(sysconfig.get_path("stdlib"))
# Libraries that only wrap operators, and Python's own: what they call, the line that called them calls.
WRAPPERS = (*{str(folder / name) + os.sep for folder in _PACKAGES
              for name in ("torch", "numpy", "einops", "opt_einsum", "functorch", "triton")},
            str(_STANDARD / "logging") + os.sep,
            *(str(_STANDARD / f"{name}.py") for name in ("contextlib", "copy", "functools", "warnings")))
_SUITE = Path(__file__).parents[2]
OURS = tuple(str(_SUITE / name) + os.sep for name in ("benchmarks/assistant", "benchmarks/measure", "common"))
_INSTALLED = tuple({str(Path(sysconfig.get_path(name))) + os.sep for name in ("purelib", "platlib", "stdlib")})
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in ', re.MULTILINE)


@dataclass(frozen=True, order=True)
class Place:
    """A line of a file, or several in a row."""
    file: str
    line: int
    last: int = 0                            # line; 0 where there is one alone

    @property
    def function(self) -> str:
        """The function that it stands in, with its classes: "Attention.forward"; "" outside of any."""
        return function_at(self.file, self.line)

    @property
    def is_yours(self) -> bool:
        """Whether it stands in no installed package."""
        return not is_installed(self.file)

    def __str__(self) -> str:
        """As a person would name it from here: "my_gpt.py:30-36"."""
        lines = f"{self.line}-{self.last}" if self.last > self.line else str(self.line)
        return f"{self.path}:{lines}"

    @property
    def path(self) -> str:
        """The file as a person would name it from here."""
        relative = os.path.relpath(self.file)
        return self.file if relative.startswith("..") else relative

    @property
    def name(self) -> str:
        """Without the folder: "my_gpt.py:30-36"."""
        return os.path.basename(str(self))

    def holds(self, line: "Place") -> bool:
        """Whether that line is one of its own."""
        return self.file == line.file and self.line <= line.line <= max(self.line, self.last)

    def to(self, other: "Place") -> "Place":
        """From this line to that one, of the same function; itself where that is in another."""
        if (self.file, self.function) != (other.file, other.function):
            return self
        return Place(self.file, min(self.line, other.line), max(self.line, other.line, self.last, other.last))


def is_installed(file: str) -> bool:
    """Whether it belongs to an installed package, or to Python."""
    return file.startswith(_INSTALLED)


def frames_of(trace: str) -> list[Place]:
    """The frames of a stack trace that are no wrapper's, the innermost last; those behind this suite's own alone."""
    places: list[Place] = []
    for frame in _FRAME.finditer(trace):
        if frame["file"].startswith(OURS):
            places = []                                    # before it somebody called the suite
        elif not frame["file"].startswith(WRAPPERS):
            places.append(Place(os.path.abspath(frame["file"]), int(frame["line"])))   # as a trace of the call has it
    return places


def innermost(trace: str) -> Place | None:
    """The last of them; None where there is none."""
    return next(reversed(frames_of(trace)), None)


# ------------------------------------------------------------------------------------------------------- syntax

IMPORTS = {"functools": "import functools", "torch": "import torch", "nn": "from torch import nn",
           "F": "from torch.nn import functional as F", "flex": "from torch.nn.attention import flex_attention as flex"}


def imports_for(code: str, file: str) -> list[str]:
    """The imports that this code needs and the file does not have: of names before a dot."""
    tree = tree_of(file) or ast.Module([], [])
    bound = {alias.asname or alias.name.partition(".")[0] for node in tree.body
             if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    used = set(re.findall(r"(?<![\w.])(\w+)\.", code))
    return [line for name, line in IMPORTS.items() if name in used and name not in bound]


def line_of_imports(text: str) -> int:
    """The line of a file before which an import may be written: below its docstring and what is from __future__."""
    for node in ast.parse(text).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and getattr(node, "module", "") != "__future__":
            return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return len(text.splitlines()) + 1


def line_of_definitions(text: str) -> int:
    """The line of a file before which a definition may be written that its functions use: behind its imports."""
    tree = ast.parse(text)
    imports = [node.end_lineno or node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return max([line_of_imports(text), *(line + 1 for line in imports)])


@functools.cache
def tree_of(file: str) -> ast.Module | None:
    """Its syntax tree; None where it can't be read."""
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


@functools.cache
def text_of(file: str) -> str:
    """All of it, as it was when it was first read."""
    return Path(file).read_text(encoding="utf-8")


def function_node_at(file: str, line: int) -> ast.AST | None:
    """The innermost function around a line; None outside of any."""
    node: ast.AST | None = tree_of(file)
    found = None
    while node is not None:
        node = next(_definitions_at(node, line), None)
        found = node or found
    return found


def function_at(file: str, line: int) -> str:
    """The names of the classes and functions around a line, joined by dots."""
    names: list[str] = []
    node: ast.AST | None = tree_of(file)
    while node is not None:
        node = next(_definitions_at(node, line), None)
        if node is not None:
            names.append(node.name)                                    # type: ignore[attr-defined]
    return ".".join(names)


def _definitions_at(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """The definition below `node` that the line stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.lineno <= line <= (child.end_lineno or 0):
                yield child
        else:
            yield from _definitions_at(child, line)


def statement_at(place: Place) -> ast.stmt | None:
    """The innermost statement that a line stands in."""
    found = None
    for node in ast.walk(tree_of(place.file) or ast.Module([], [])):
        holds = isinstance(node, ast.stmt) and node.lineno <= place.line <= (node.end_lineno or 0)
        if isinstance(node, ast.stmt) and holds and (found is None or node.lineno >= found.lineno):
            found = node
    return found


_LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.DictComp)


@functools.cache
def loop_around(place: Place) -> Place | None:
    """The innermost loop or comprehension of its function that a line stands in."""
    function = function_node_at(place.file, place.line)
    around = [node for node in ast.walk(function) if isinstance(node, _LOOPS)
              and node.lineno <= place.line <= (node.end_lineno or node.lineno)] if function else []
    inner = max(around, key=lambda node: (node.lineno, -(node.end_lineno or node.lineno)), default=None)
    return Place(place.file, inner.lineno, inner.end_lineno or inner.lineno) if inner else None


def statements_between(place: Place) -> list[ast.stmt]:
    """The statements of one body that begin in these lines."""
    found: list[ast.stmt] = []
    for node in ast.walk(tree_of(place.file) or ast.Module([], [])):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                inside = [one for one in body if isinstance(one, ast.stmt) and place.line <= one.lineno <= place.last]
                found = inside if len(inside) > len(found) else found
    return found
