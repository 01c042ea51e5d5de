"""Code that computes in one call what an expression, and statements before it, compute by hand."""
import ast
from collections.abc import Callable, Sequence

from torch import fx

from benchmarks.assistant.graph import place_of
from benchmarks.assistant.source import Place, text_of
from benchmarks.assistant.statements import assigned, lines_with, needed_later, statements_of, with_code
from benchmarks.assistant.technique import Advice, NotWritten
from benchmarks.assistant.words import expression_of, words_for


def in_one_call(nodes: Sequence[fx.Node], output: fx.Node, needed: Sequence[fx.Node],
                call: Callable[[Sequence[str]], str]) -> Advice:
    """The call, of what is needed in words, in place of the expression of `output`. Raises NotWritten.

    Statements that led to it alone go; those that something else needs stay.
    """
    start, end, whole = place_of(nodes[0]), place_of(output), expression_of(output)
    if start is None or end is None or start.function != end.function:
        raise NotWritten("its operations stand in different functions")
    words = words_for(nodes)
    if whole is None or any(node not in words for node in needed):
        raise NotWritten("its lines are not read")
    *before, last = statements_of(start, end)
    own = {place.line for node in nodes if (place := place_of(node))}
    kept = _kept(before, own, last, whole, start.file)
    read = {name.id for node in needed for name in ast.walk(ast.parse(words[node])) if isinstance(name, ast.Name)}
    if read & {name for statement in kept for name in assigned(statement)}:
        raise NotWritten("what it is computed from is assigned to in between")
    text = text_of(start.file).split("\n")
    lines = lines_with({each: [] for each in before if each not in kept}, (before or [last])[0], last, text)
    code = with_code(last, whole, call([words[node] for node in needed]), text)
    return Advice("\n".join([*lines, *code]),
                  Place(start.file, (before or [last])[0].lineno, last.end_lineno or last.lineno))


def _kept(before: Sequence[ast.stmt], own: set[int], last: ast.stmt, whole: ast.expr, file: str) -> list[ast.stmt]:
    """The statements that stay: those with no part in it, and what they and the rest still read."""
    kept = [each for each in before if not any(each.lineno <= line <= (each.end_lineno or 0) for line in own)]
    while True:
        gone = [each for each in before if each not in kept]
        needed = needed_later({name for each in gone for name in assigned(each)}, kept, last, whole, file)
        more = [each for each in gone if assigned(each) & needed]
        if not more:
            return kept
        kept = [each for each in before if each in kept or each in more]
