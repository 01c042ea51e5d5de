"""The words of operands: in parentheses where they need them, permuted, transposed, and their sizes."""
import ast
from collections.abc import Sequence

from benchmarks.assistant.einsum import Order
from benchmarks.assistant.words import called, is_of_module


def permuted(words: str, order: Order) -> str:
    """With its dimensions in that order."""
    given = [dim for dim in order or () if dim is not None]
    if given != sorted(given):
        words = f"{grouped(words)}.permute({', '.join(map(str, given))})"
    lacking = [place for place, dim in enumerate(order or ()) if dim is None]
    return "".join([grouped(words) if lacking else words, *(f".unsqueeze({place})" for place in lacking)])


def grouped(words: str) -> str:
    """In parentheses, where an attribute behind it would belong to a part of it."""
    node = ast.parse(words, mode="eval").body
    return words if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({words})"


def as_operand(words: str) -> str:
    """In parentheses, where an operator beside it would bind more tightly."""
    return words if grouped(words) == words or words.startswith(("torch.where(", "~")) else f"({words})"


def transposed(words: str, dimensions: int) -> str:
    """With its last two dimensions the other way round; a transpose that is already there is taken back."""
    last_two = {"-2", "-1"}, {str(dimensions - 2), str(dimensions - 1)}
    node = ast.parse(words, mode="eval").body
    if isinstance(node, ast.Attribute) and node.attr in ("mT", "T"):
        return ast.unparse(node.value)
    if isinstance(node, ast.Call) and called(node) in ("transpose", "swapaxes"):
        given = [ast.unparse(argument) for argument in (*node.args, *(each.value for each in node.keywords))]
        if is_of_module(node) and set(given[1:]) in last_two:
            return given[0]
        if isinstance(node.func, ast.Attribute) and set(given) in last_two:
            return ast.unparse(node.func.value)
    return f"{grouped(words)}.transpose(-2, -1)"


def is_a_view(words: str) -> bool:
    """Whether they name a tensor or a view of one: asking for its shape computes nothing."""
    parts = list(ast.walk(ast.parse(words)))
    calls = {called(part) for part in parts if isinstance(part, ast.Call)}
    return not calls - {"permute", "transpose"} and not any(isinstance(part, ast.BinOp) for part in parts)


def size_of(words: str, dim: int) -> str:
    """Of what a tensor's words say, that of one dimension: before a permute it stands elsewhere."""
    node = ast.parse(words, mode="eval").body
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "permute":
        place = node.args[dim] if dim < len(node.args) else None
        if isinstance(place, ast.Constant):
            return f"{ast.unparse(node.func.value)}.size({ast.unparse(place)})"
    return f"{words}.size({dim})"


def product(scales: Sequence[str]) -> str:
    """Of " * x" and " / y", in words."""
    if not scales:
        return "1.0"
    first, *rest = scales
    return "".join([first.removeprefix(" * ") if first.startswith(" * ") else f"1{first}", *rest])
