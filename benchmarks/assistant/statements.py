"""A person's statements: which stand between two lines, what each assigns and reads, and one with other code in it."""
import ast
import string
import textwrap
from collections.abc import Mapping, Sequence

from benchmarks.assistant.source import Place, function_node_at, statement_at
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.words import called

_CALLED = tuple(string.ascii_letters + string.digits + "_])")          # before a bracket: it is that of a call


def statements_of(start: Place, end: Place) -> list[ast.stmt]:
    """Those of one body, from the one at the first place to that at the second. Raises NotWritten."""
    first, last = statement_at(start), statement_at(end)
    function = function_node_at(start.file, start.line)
    for node in ast.walk(function) if function else ():
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list) and first in body:
                after = body[body.index(first):]
                if last in after:
                    return after[:after.index(last) + 1]
    raise NotWritten("its first and its last operation stand in different blocks")


def needed_later(names: set[str], kept: Sequence[ast.stmt], last: ast.stmt, replaced: ast.expr | None, file: str
                 ) -> set[str]:
    """Those of the names that something reads which stays: before the last statement, in it, or behind it."""
    function, end = function_node_at(file, last.lineno), last.end_lineno or last.lineno
    every = [each for each in ast.walk(function) if isinstance(each, ast.stmt)] if function else []
    later = sorted((each for each in every if each.lineno > end), key=lambda each: each.lineno)
    needed, set_anew = set[str](), set[str]()
    for statement in [*kept, last, *later]:
        needed |= loaded(statement, replaced) & names - set_anew
        set_anew |= assigned(statement)
    return needed


def is_returned_alone(name: str, last: ast.stmt, replaced: ast.expr, file: str) -> bool:
    """Whether a name is read from the last statement on as an element of what is returned, and nowhere else but within
    what is replaced.
    """
    function = function_node_at(file, last.lineno)
    if function is None:
        return False
    returns = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
    elements = [each for value in returns if isinstance(value, ast.Tuple) for each in value.elts]
    allowed = {_position(each) for each in (*elements, *ast.walk(replaced)) if isinstance(each, ast.Name)}
    read = [each for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
            and each.id == name and each.lineno >= last.lineno]
    return all(_position(each) in allowed for each in read)


def _position(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def target_of(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """(name, what it becomes) of a statement that gives one name a value, or changes it in place."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        return statement.target.id, statement.value
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, ast.BinOp(ast.Name(statement.target.id, ast.Load()), statement.op, statement.value)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        holder = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(holder, ast.Name) and called(call).endswith("_"):
            return holder.id, call
    return None


def first_of_two(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """(name, what both become) of the first of two names that a statement gives values, as `largest, place = ...`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    [target] = statement.targets
    names = target.elts if isinstance(target, ast.Tuple) else []
    if len(names) != 2 or not isinstance(names[0], ast.Name) or not isinstance(names[1], ast.Name):
        return None
    return names[0].id, statement.value


def assigned(statement: ast.stmt) -> set[str]:
    """The names that a statement, or one inside it, gives a value."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def loaded(statement: ast.stmt, but: ast.expr | None) -> set[str]:
    """The names that it reads, without those in one expression."""
    inside = {id(node) for node in ast.walk(but)} if but else set()
    return {node.id for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside}


def lines_of(statement: ast.stmt, text: Sequence[str]) -> list[str]:
    """As they are, without their indentation."""
    return [line.removeprefix(" " * statement.col_offset) for line in text[statement.lineno - 1:statement.end_lineno]]


def lines_with(instead: Mapping[ast.stmt, Sequence[str]], first: ast.stmt, last: ast.stmt, text: Sequence[str]
               ) -> list[str]:
    """The lines from one statement to before another, with other lines in place of some; comments in between stay."""
    starts = {statement.lineno: statement for statement in instead}
    lines: list[str] = []
    number = first.lineno
    while number < last.lineno:
        if statement := starts.get(number):
            lines += instead[statement]
            number = (statement.end_lineno or number) + 1
        else:
            lines.append(text[number - 1].removeprefix(" " * last.col_offset))
            number += 1
    return lines


def with_code(statement: ast.stmt, output: ast.expr, call: str, text: Sequence[str]) -> list[str]:
    """The lines of a statement, as they are but for one expression. Brackets around that alone go with it."""
    assert output.end_lineno and output.end_col_offset is not None and statement.end_lineno
    first, last = text[output.lineno - 1].encode(), text[output.end_lineno - 1].encode()
    before, behind = first[:output.col_offset].decode(), last[output.end_col_offset:].decode()
    if before.endswith("(") and behind.startswith(")") and not before[:-1].endswith(_CALLED):
        before, behind = before[:-1], behind[1:]
    lines = [*text[statement.lineno - 1:output.lineno - 1], before + call + behind,
             *text[output.end_lineno:statement.end_lineno]]
    return textwrap.dedent("\n".join([" " * statement.col_offset + lines[0].lstrip(), *lines[1:]])).split("\n")
