"""Graph breaks: where Dynamo leaves the graph, and the compiler sees two halves. A person mends them."""
import ast
import textwrap

from torch import nn

from benchmarks.assistant.breaks import Break
from benchmarks.assistant.graph import with_stars
from benchmarks.assistant.program import Program
from benchmarks.assistant.source import Place, statement_at
from benchmarks.assistant.technique import Advice, Found, Technique
from benchmarks.assistant.techniques import host_sync
from benchmarks.assistant.techniques.compiled import ALLOW_RNN

# Calls that only tell something: compiled code may leave them out.
TALKING = ("print", "debug", "info", "warning", "warn", "error", "log", "write")


def find(program: Program) -> list[Found]:
    """Every line that breaks the graph."""
    found = []
    for each in program.breaks:
        calls = [call for call in program.trace.calls if call.place == each.place] if each.place else []
        names = [call.name for call in calls]
        count = max(map(names.count, names), default=1)
        modules = [call.module for call in calls]
        recurrent = [module for path in modules if isinstance(module := program.module_at(path), nn.RNNBase)]
        why = f"{reason(each)}; {of_recurrent(recurrent[0])}" if recurrent else reason(each)
        found.append(Found(each.place, with_stars(modules), count, why))
    return found


def of_recurrent(module: nn.Module) -> str:
    """How Dynamo captures it all the same, and what that costs."""
    return (f"with `{ALLOW_RNN}` Dynamo captures nn.{type(module).__name__}: its steps are compiled one by one, which "
            "takes long for many; `--why compile` times it")


def reason(each: Break) -> str:
    """What Dynamo says, in a line, and what that costs."""
    words = each.reason.rstrip(".")
    if each.inside and not each.place:
        words = f"{words}, in {each.inside.name}"
    return f"{words}; the whole function around it is not compiled" if each.skips else words


def advice(program: Program, found: Found) -> Advice | None:
    """Of a statement that only tells something: not while compiled. Of a check by .item(): one on the device."""
    statement = statement_at(found.place) if found.place else None
    if statement is None or found.place is None:
        return None
    place = Place(found.place.file, statement.lineno, statement.end_lineno or statement.lineno)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in TALKING:
            inner = textwrap.indent(ast.unparse(statement), "    ")
            return Advice(f"if not torch.compiler.is_compiling():\n{inner}", place)
    return host_sync.checked_on_the_device(found.place)


TECHNIQUE = Technique("graph-break", "a graph break -> one graph", find, None, advice)
