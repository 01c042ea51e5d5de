"""Synchronisations: lines at which the host waits until the GPU has done all that it was given. A person mends them."""
import ast
import copy

from benchmarks.assistant.analysis import IS_SIZED, READS, Wait
from benchmarks.assistant.graph import with_stars
from benchmarks.assistant.program import Program
from benchmarks.assistant.source import Place, statement_at
from benchmarks.assistant.technique import Advice, Found, Technique

_ELEMENTWISE = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)     # give a tensor where one side is one


def find(program: Program) -> list[Found]:
    """Every line at which the host waits."""
    is_captured_whole = not (program.breaks or program.not_captured or program.is_compiled)
    return [Found(wait.place, with_stars(wait.modules), len(wait.modules), in_words(wait, is_captured_whole))
            for wait in program.analysis.waits]


def in_words(wait: Wait, is_captured_whole: bool) -> str:
    """Why the host waits. No graph holds a value or a size that Python reads: where one holds the whole model, another
    branch was compiled. A copy to the host may be in it.
    """
    words = f"{spelt(wait.call)} {wait.why}: the host waits for it"
    is_another_branch = is_captured_whole and wait.why in (READS, IS_SIZED)
    return f"{words}; compiled code takes another branch, and does not wait there" if is_another_branch else words


def spelt(name: str) -> str:
    """A call, as a person writes it."""
    return {"__bool__": "a condition on a tensor", "__int__": "int()", "__float__": "float()",
            "__getitem__": "an index that is a mask", "__setitem__": "an index that is a mask"}.get(name, f".{name}()")


def advice(program: Program, found: Found) -> Advice | None:
    """A check by .item() can be done on the device."""
    return checked_on_the_device(found.place) if found.place else None


def checked_on_the_device(place: Place) -> Advice | None:
    """`if x.item() > limit: raise E(message)` -> an assertion that the device checks, and that no host waits for."""
    statement = statement_at(place)
    if not (isinstance(statement, ast.If) and len(statement.body) == 1 and isinstance(statement.body[0], ast.Raise)):
        return None
    raised = statement.body[0].exc
    condition = _on_the_device(statement.test)
    if statement.orelse or not isinstance(raised, ast.Call) or not condition:
        return None
    message = ast.unparse(raised.args[0]) if raised.args and isinstance(raised.args[0], ast.Constant) else "'it failed'"
    return Advice(f"torch._assert_async({condition}, {message})",
                  Place(place.file, statement.lineno, statement.end_lineno or statement.lineno))


def _on_the_device(test: ast.expr) -> str:
    """What must hold, as a tensor, where this is what must not; "" where a test can't be put so."""
    is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    compared = test.operand if isinstance(test, ast.UnaryOp) else test
    if not isinstance(compared, ast.Compare) or not all(isinstance(op, _ELEMENTWISE) for op in compared.ops):
        return ""
    operands = [compared.left, *compared.comparators]
    read = [_WithoutItem().visit(copy.deepcopy(operand)) for operand in operands]
    is_read = [ast.dump(new) != ast.dump(old) for new, old in zip(read, operands, strict=True)]
    parts = []
    for place, op in enumerate(compared.ops):              # a chain of comparisons asks each tensor for its truth
        if not (is_read[place] or is_read[place + 1]):
            return ""
        parts.append(ast.unparse(ast.Compare(read[place], [op], [read[place + 1]])))
    if ".item()" in "".join(parts):
        return ""
    whole = parts[0] if len(parts) == 1 else " & ".join(f"({part})" for part in parts)
    return whole if is_negated else f"~({whole})"


class _WithoutItem(ast.NodeTransformer):
    """x.item() -> x."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            return node.func.value
        return node


TECHNIQUE = Technique("host-sync", "the host waits for the device -> it does not", find, None, advice)
