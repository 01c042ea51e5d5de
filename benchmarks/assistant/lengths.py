"""Whether a number that a person's function computes is the same for inputs of every length."""
import ast
from collections.abc import Sequence

from benchmarks.assistant.statements import assigned
from benchmarks.assistant.words import called, literal

OF_WIDTHS = {"sqrt", "rsqrt", "pow", "float", "int", "tensor"}              # calls that make a scale of a width


def may_follow_a_length(expressions: Sequence[str], function: ast.AST | None) -> bool:
    """Whether expressions of a function may be other numbers on other inputs.

    They are not where they are made of sizes of last dimensions, roots of these, constants and what the module holds.
    """
    todo: list[ast.AST] = [ast.parse(expression) for expression in expressions]
    seen = set[str]()
    while todo:
        expression = todo.pop()
        if any(map(_reads_a_size, ast.walk(expression))):
            return True
        names = values_named(expression) - seen
        seen |= names
        for name in names:
            values = _values_given(name, function)
            if values is None:
                return True
            todo += values
    return False


def values_named(expression: ast.AST) -> set[str]:
    """The names whose values it reads, not only their sizes, device or dtype."""
    shapes = {id(node.value) for node in ast.walk(expression)
              if isinstance(node, ast.Attribute) and node.attr in ("size", "shape", "device", "dtype")}
    return {node.id for node in ast.walk(expression)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in shapes}


def _reads_a_size(node: ast.AST) -> bool:
    """Whether it may be one of another dimension than the last: a call that is no root, or another index."""
    if isinstance(node, ast.Call):
        if called(node) == "size":
            return not (node.args and literal(node.args[0]) == -1)
        return called(node) not in OF_WIDTHS
    return isinstance(node, ast.Subscript) and literal(node.slice) != -1


def _values_given(name: str, function: ast.AST | None) -> list[ast.expr] | None:
    """What a function's statements give to a name, the size of a last dimension left out; None where not all is seen.
    """
    if not isinstance(function, ast.FunctionDef):
        return None
    if name != "self" and name in {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}:
        return None
    if any(isinstance(node, ast.If) and name in assigned(node) for node in ast.walk(function)):
        return None                                                # its condition may be on a length
    stored = sum(isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
                 for node in ast.walk(function))
    values = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or name not in assigned(node) or len(node.targets) > 1:
            continue
        if isinstance(node.targets[0], ast.Name):
            values.append(node.value)
        elif _is_the_last_size(name, node.targets[0], node.value):
            stored -= 1
    return values if len(values) == stored else None               # else a loop, or something in place, gives it one


def _is_the_last_size(name: str, target: ast.expr, value: ast.expr) -> bool:
    """Whether a statement as `B, S, D = x.shape` gives a name the last of them."""
    is_last = isinstance(target, ast.Tuple) and isinstance(target.elts[-1], ast.Name) and target.elts[-1].id == name
    of_shape = isinstance(value, ast.Attribute) and value.attr == "shape"
    return is_last and (of_shape or (isinstance(value, ast.Call) and called(value) == "size" and not value.args))
