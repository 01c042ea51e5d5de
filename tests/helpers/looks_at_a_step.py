"""Finds conditions that look at which step it is: its number, name, title or file. A condition may ask its traits.

Only common/block/steps.py knows the scripts. Elsewhere a condition is whatever decides: the tests of if, while, assert,
conditional expressions, comprehensions and `match`, every comparison, what `not`, `and` and `or` join, what any(),
all(), bool() and filter() are given, and the key of a look-up.

In a condition these are a look at a step, unless they are held against None:
- .number, .title, and .step, the number that results, cases and records carry, also as ["step"] and get("step")
- a step itself, and any attribute of one but .traits and .build. A step is what is named `step`, what is annotated as
  `Step`, what steps.load or steps.of gave, and what a loop over steps.ALL runs through
- a variable that one of these was put in, or a part of it, or its text
- a text that is a step's name or file, or begins as one; a digit where a name begins; name[0].isdigit(), int(name[0])
`or` before a constant is no condition, but what stands in the place of None: (run.step or 0) is a key to sort by.
"""
import ast
import re
from collections.abc import Iterator

IDENTITY = {"number", "title", "step"}
DIGITS = {"isdigit", "isdecimal", "isnumeric"}
OF_EVERY_STEP = ("traits", "build")
OF_A_STEP = re.compile(r"[0-4]+(_\w*)?(\.py)?|.*\b[0-4]_(baseline|cublas|sdpa|compile|transformer_engine)\b.*")
ASKED_FOR_TRUTH = {"any", "all", "bool", "filter"}


def looks_at_a_step(tree: ast.Module, digits: bool = True) -> list[str]:
    """The conditions in `tree` that look at a step, as "line: text", in the order of the lines.

    `digits`: whether a text of digits is taken for the names of rows of the ladder ("0", "1").
    """
    _set_parents(tree)
    names = _steps_in(tree)
    found = {}
    for condition in _conditions(tree):
        if any(_looks(node, names, digits) for node in ast.walk(condition)):
            found[condition.lineno] = f"{condition.lineno}: {ast.unparse(condition)}"
    return [found[line] for line in sorted(found)]


def _set_parents(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node


def _conditions(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
                yield test
            case ast.comprehension(ifs=tests):
                yield from tests
            case ast.Compare():
                yield node
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield operand
            case ast.BoolOp() if not _stands_in_for_none(node):
                yield node
            case ast.Match(subject=subject, cases=cases):
                yield subject
                yield from (one.pattern for one in cases)
                yield from (one.guard for one in cases if one.guard)
            case ast.Call(func=ast.Name(id=name)) if name in ASKED_FOR_TRUTH:
                yield node
            case ast.Subscript(slice=key, ctx=ast.Load()) if not isinstance(key, (ast.Constant, ast.Slice)):
                yield key


def _stands_in_for_none(node: ast.BoolOp) -> bool:
    return isinstance(node.op, ast.Or) and len(node.values) == 2 and isinstance(node.values[1], ast.Constant)


def _steps_in(tree: ast.Module) -> set[str]:
    """The names of variables that hold a step, or what says which one it is."""
    names = {"step"}
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                if re.fullmatch(r"(steps\.)?Step( \| None)?", ast.unparse(annotation)):
                    names.add(name)
            case ast.For(target=target, iter=iterable) | ast.comprehension(target=target, iter=iterable):
                if re.search(r"\bsteps\.ALL\b|^ALL\b", ast.unparse(iterable)):
                    names |= _targets(target)
    size = -1
    while size < len(names):                              # until no variable is given what another one holds
        size = len(names)
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=targets, value=value) if _identifies(value, names):
                    for target in targets:
                        names |= _targets(target)
                case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                    if value is not None and _identifies(value, names):
                        names |= _targets(target)
    return names


def _targets(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _identifies(value: ast.expr, names: set[str]) -> bool:
    """Whether an expression is a step, or its number, name, title or file, or a part or the text of these."""
    match value:
        case ast.Name(id=name):
            return name in names
        case ast.Attribute(value=whole, attr=attr):
            return attr in IDENTITY or (attr not in OF_EVERY_STEP and _identifies(whole, names))
        case ast.Subscript(value=whole, slice=key):
            return _is_step_key(key) or _identifies(whole, names) or ast.unparse(whole) == "steps.ALL"
        case ast.Call(func=ast.Name(id="str" | "int" | "repr" | "Path" | "len"), args=[given, *_]):
            return _identifies(given, names)
        case ast.Call(func=ast.Attribute(value=whole, attr=attr), args=arguments):
            if ast.unparse(value.func) in ("steps.load", "steps.of"):
                return True
            if attr == "get" and arguments and _is_step_key(arguments[0]):
                return True
            return attr not in OF_EVERY_STEP and _identifies(whole, names)
        case ast.BinOp(left=left, right=right):
            return _identifies(left, names) or _identifies(right, names)
        case ast.BoolOp(values=values):
            return any(_identifies(one, names) for one in values)
        case ast.JoinedStr(values=values):
            return any(_identifies(one.value, names) for one in values if isinstance(one, ast.FormattedValue))
    return False


def _is_step_key(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == "step"


def _looks(node: ast.AST, names: set[str], digits: bool) -> bool:
    match node:
        case ast.Name(id=name) if name in names:
            return not _may_be_asked(node)
        case ast.Attribute(attr=attr) if attr in IDENTITY:
            return not _may_be_asked(node)
        case ast.Attribute(value=ast.Subscript(), attr=attr) if attr in DIGITS:
            return True
        case ast.Subscript(slice=key) if _is_step_key(key):
            return not _may_be_asked(node)
        case ast.Call(func=ast.Attribute(attr="get"), args=[key, *_]) if _is_step_key(key):
            return not _may_be_asked(node)
        case ast.Call(func=function) if ast.unparse(function) in ("steps.load", "steps.of"):
            return True
        case ast.Call(func=ast.Name(id="int"), args=[ast.Subscript(slice=ast.Constant(value=0))]):
            return True
        case ast.Constant(value=str(text)) if OF_A_STEP.fullmatch(text):
            return not text.isdigit() or (digits and not _of_the_environment(node))
    return False


def _may_be_asked(node: ast.AST) -> bool:
    """Whether it is asked for its traits, or for being there at all."""
    parent = node.parent
    if isinstance(parent, ast.Attribute):
        return parent.attr in OF_EVERY_STEP and not isinstance(parent.parent, ast.Compare)
    if not isinstance(parent, ast.Compare) or not isinstance(parent.ops[0], (ast.Is, ast.IsNot)):
        return False
    others = [part for part in (parent.left, *parent.comparators) if part is not node]
    return all(isinstance(part, ast.Constant) and part.value is None for part in others)


def _of_the_environment(node: ast.AST) -> bool:
    """Whether it is held against a variable of the environment, which says yes or no by 1 or 0."""
    return isinstance(node.parent, ast.Compare) and "os.environ" in ast.unparse(node.parent)
