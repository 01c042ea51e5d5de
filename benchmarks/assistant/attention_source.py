"""Attention by hand in a person's own words, and the line that says the same by scaled_dot_product_attention."""
import ast
import copy
import math

from torch import fx

from benchmarks.assistant.attention import PRODUCTS, Attention, Mask, infinite
from benchmarks.assistant.program import name_of, place_of, shape_of
from benchmarks.assistant.source import Place, statement_at, statements_between
from benchmarks.assistant.technique import Advice

LAST_TWO = {"-2", "-1"}, {"2", "3"}          # dimensions, as people write them


def advice(attention: Attention, all_causal: bool) -> Advice | None:
    """The call, in place of the statements from the one matmul to the other; None where they can't be read.

    A statement in between that has no part in it stays, before the call.
    """
    first, last = _statement(attention.scores), _statement(attention.output)
    start, end = place_of(attention.scores), place_of(attention.output)
    if first is None or last is None or start is None or end is None or start.function != end.function:
        return None
    scores, output = _products(first, last)
    if scores is None or output is None:
        return None
    words = [_text(scores[0]), _without_transpose(scores[1]), _text(output[1]), *_options(attention, all_causal)]
    call = f"F.scaled_dot_product_attention({', '.join(words)})"
    line = ast.unparse(_Replaced(output[2], call).visit(copy.deepcopy(last)))
    place = Place(start.file, first.lineno, last.end_lineno or last.lineno)
    own = {spot.line for node in attention.chain if (spot := place_of(node))}
    between = [ast.unparse(statement) for statement in statements_between(place)
               if not any(statement.lineno <= line <= (statement.end_lineno or 0) for line in own)]
    return Advice("\n".join([*between, line]), place)


def _statement(node: fx.Node) -> ast.stmt | None:
    place = place_of(node)
    return statement_at(place) if place else None


Product = tuple[ast.expr, ast.expr, ast.expr]                # left, right, the whole


def _products(first: ast.stmt, last: ast.stmt) -> tuple[Product | None, Product | None]:
    """(queries times keys, weights times values), from their statements, which may be one."""
    in_first, in_last = _products_in(first), _products_in(last)
    if not in_first or not in_last:
        return None, None
    # ast.walk goes from the outside in: the weights' product holds that of the scores where both are in one statement.
    return in_first[-1], in_last[0]


def _products_in(statement: ast.stmt) -> list[Product]:
    found: list[Product] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found.append((node.left, node.right, node))
        elif isinstance(node, ast.Call) and (name := _called(node)) in PRODUCTS:
            operands = list(node.args)
            if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
                operands.insert(0, node.func.value)
            if name == "einsum" or name == "baddbmm" or len(operands) < 2:
                continue                                       # the words alone do not say which dimension is which
            found.append((operands[0], operands[1], node))
    return found


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "F")


class _Replaced(ast.NodeTransformer):
    """A statement with one expression replaced by code."""

    def __init__(self, old: ast.expr, code: str):
        self.old, self.new = ast.dump(old), ast.parse(code, mode="eval").body

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and ast.dump(node) == self.old:
            return self.new
        return self.generic_visit(node)


def _text(node: ast.expr) -> str:
    return ast.unparse(node)


def _without_transpose(key: ast.expr) -> str:
    """The keys as [..., S, D]."""
    if isinstance(key, ast.Attribute) and key.attr in ("mT", "T"):
        return _text(key.value)
    if isinstance(key, ast.Call) and isinstance(key.func, ast.Attribute) and key.func.attr in ("transpose", "swapaxes"):
        words = [_text(argument) for argument in key.args]
        if set(words) in LAST_TWO:
            return _text(key.func.value)
        if _is_module(key.func.value) and set(words[1:]) in LAST_TWO:
            return words[0]
    return f"({_text(key)}).transpose(-2, -1)"


def _options(attention: Attention, all_causal: bool) -> list[str]:
    options = []
    if all_causal:
        options.append("is_causal=True")
    elif attention.masks:
        all_block = all(mask.is_boolean and infinite(mask) for mask in attention.masks)
        masks = [_mask(mask, attention, all_block) for mask in attention.masks]
        options.append(f"attn_mask={(' & ' if all_block else ' + ').join(masks)}")
    if any(name_of(node) == "dropout" for node in attention.chain):
        options.append(f"dropout_p={_dropout(attention)}")
    width = shape_of(attention.query.node)[-1] if attention.query.order is None else 0
    if not width or not math.isclose(attention.scale, width ** -0.5, rel_tol=1e-6):
        options.append(f"scale={attention.scale!r}")
    return options


def _mask(mask: Mask, attention: Attention, all_block: bool) -> str:
    """A mask as the call takes it, from the words of the statement that puts it on.

    Where all of them block, True says what is seen; else each is added.
    """
    for node in attention.chain:
        statement = _statement(node) if mask.tensor in node.all_input_nodes else None
        for part in ast.walk(statement) if statement else ():
            if isinstance(part, ast.Call) and _called(part).rstrip("_") == "masked_fill" and part.args:
                return _boolean(_text(part.args[-2]), mask, all_block)
            if isinstance(part, ast.Call) and _called(part) == "where":
                return _boolean(_text(part.args[0]), mask, all_block)
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
                return _times(_text(part.right), mask.factor)
            if isinstance(part, ast.AugAssign):
                return _times(_text(part.value), mask.factor)
    return "mask"


def _boolean(words: str, mask: Mask, all_block: bool) -> str:
    if all_block:
        return f"~({words})" if mask.blocks else f"({words})"
    value = mask.factor * (mask.value or 0.0)
    blocked = 'float("-inf")' if math.isinf(value) else repr(value)
    return f"torch.where({words}, {blocked}, 0.0)" if mask.blocks else f"torch.where({words}, 0.0, {blocked})"


def _times(words: str, factor: float) -> str:
    return f"({words})" if factor == 1 else f"({words}) * {factor!r}"


def _dropout(attention: Attention) -> str:
    """The rate, in the words of the statement that drops weights."""
    node = next(node for node in attention.chain if name_of(node) == "dropout")
    statement = _statement(node)
    for call in ast.walk(statement) if statement else ():
        if not isinstance(call, ast.Call):
            continue
        if _called(call) == "dropout" and isinstance(call.func, ast.Attribute) and _is_module(call.func.value):
            words = {keyword.arg: _text(keyword.value) for keyword in call.keywords}
            rate = words.get("p", _text(call.args[1]) if len(call.args) > 1 else "0.5")
            training = words.get("training", _text(call.args[2]) if len(call.args) > 2 else "True")
            return f"{rate} if {training} else 0.0"
        if isinstance(call.func, ast.Attribute) and "drop" in call.func.attr:
            return f"{_text(call.func)}.p if self.training else 0.0"
    return repr(attention.dropout_p)
