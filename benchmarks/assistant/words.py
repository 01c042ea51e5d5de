"""A person's words for the values of a graph: which expression of a statement stands for which operation."""
import ast
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from benchmarks.assistant.graph import place_of
from benchmarks.assistant.normal import name_of
from benchmarks.assistant.source import statement_at

_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul"}
MODULES = ("torch", "F", "math", "nn", "functional")


def statement_of(node: fx.Node) -> ast.stmt | None:
    """The statement that made a node; None where it can't be read."""
    place = place_of(node)
    return statement_at(place) if place else None


def called(node: ast.expr) -> str:
    """The name of what is called: "softmax" of F.softmax(x) and of x.softmax(-1); "" of what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def literal(node: ast.expr) -> Any:
    """Its value; None where it is no literal."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def is_of_module(node: ast.expr) -> bool:
    """Whether a call is one of a module's functions: torch.matmul, F.softmax, nn.functional.softmax."""
    holder = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    while isinstance(holder, ast.Attribute):
        holder = holder.value
    return isinstance(holder, ast.Name) and holder.id in MODULES


def operands_of(node: ast.expr) -> list[ast.expr]:
    """What an expression is computed from, in the order of the operation's arguments; of a method its object first."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    if not isinstance(node, ast.Call):
        return []
    operands = list(node.args)
    if isinstance(node.func, ast.Attribute) and not is_of_module(node):
        operands.insert(0, node.func.value)
    return operands


def words_for(chain: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Node -> how the statements behind a chain of operations call it, the earliest statement first."""
    words: dict[fx.Node, str] = {}
    for node in chain:
        statement = statement_of(node)
        for expression in ast.walk(statement) if statement else ():
            if isinstance(expression, ast.expr) and _is(node, expression) and _fits(node, expression):
                for inner, part in _parts(node, expression):
                    words.setdefault(inner, ast.unparse(part))
                break
    return words


def expression_of(node: fx.Node) -> ast.expr | None:
    """The expression that made a node, in its statement."""
    statement = statement_of(node)
    for expression in ast.walk(statement) if statement else ():
        if isinstance(expression, ast.expr) and _is(node, expression) and _fits(node, expression):
            return expression
    return None


def _is(node: fx.Node, expression: ast.expr) -> bool:
    """Whether an expression may be that operation."""
    if isinstance(expression, ast.BinOp):
        return _OPERATORS.get(type(expression.op)) == name_of(node)
    if isinstance(expression, ast.UnaryOp):
        return isinstance(expression.op, ast.USub) and name_of(node) == "neg"
    if isinstance(expression, ast.Subscript):
        return name_of(node) == "getitem"
    return called(expression).rstrip("_") == name_of(node)


def _parts(node: fx.Node, expression: ast.expr) -> Iterator[tuple[fx.Node, ast.expr]]:
    """(node, expression) of what an operation is computed from, all the way down in one statement."""
    for inner, part in zip(node.args, operands_of(expression), strict=False):
        if isinstance(inner, tuple) and isinstance(part, ast.Tuple):
            yield from ((each, own) for each, own in zip(inner, part.elts, strict=False) if isinstance(each, fx.Node))
        if isinstance(inner, fx.Node):
            yield inner, part
            if _is(inner, part):
                yield from _parts(inner, part)


def _fits(node: fx.Node, expression: ast.expr) -> bool:
    """Whether everything that is known below an expression is what the node is computed from."""
    for inner, part in zip(node.args, operands_of(expression), strict=False):
        computed = isinstance(part, ast.BinOp)
        if isinstance(inner, fx.Node) and computed and not (_is(inner, part) and _fits(inner, part)):
            return False
    return True


class Replaced(ast.NodeTransformer):
    """A statement with expressions replaced by code."""

    def __init__(self, code: dict[str, str]):
        self.new = {dump: ast.parse(text, mode="eval").body for dump, text in code.items()}

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and (new := self.new.get(ast.dump(node))):
            return new
        return self.generic_visit(node)
