"""Attention weights that nobody reads are not made: the graph without them, and the call that says so."""
import ast

from benchmarks.assistant.graph import Captured
from benchmarks.assistant.multihead import OPTION, UnreadWeights, weights_in
from benchmarks.assistant.rewriting import Assumed
from benchmarks.assistant.source import Place, statement_at, text_of
from benchmarks.assistant.statements import with_code
from benchmarks.assistant.technique import Advice, NotWritten
from benchmarks.assistant.words import called

PLACE_OF_OPTION = 4                        # among the arguments of the module's forward


def in_words(found: UnreadWeights) -> str:
    """What it costs."""
    return f"nn.MultiheadAttention makes its weights {list(found.shape)}, which nobody reads: no fused kernel has any"


def without_weights(graph: Captured) -> list[Assumed]:
    """Ask for none where nobody reads them."""
    for region in weights_in(graph):
        if isinstance(region, UnreadWeights):
            [node] = region.nodes
            node.kwargs = {**node.kwargs, OPTION: False}
    return []


def advice(found: UnreadWeights) -> Advice:
    """The call of the module with `need_weights=False`. Raises NotWritten."""
    statement = statement_at(found.place) if found.place else None
    if found.place is None or statement is None:
        raise NotWritten("its lines are not read")
    call = _call_in(statement, found.module)
    text = text_of(found.place.file)
    code = "\n".join(with_code(statement, call, _without_weights(call, text), text.split("\n")))
    return Advice(code, Place(found.place.file, statement.lineno, statement.end_lineno or statement.lineno))


def _call_in(statement: ast.stmt, module: str) -> ast.Call:
    """Of the module at that path. Raises NotWritten."""
    name = module.rpartition(".")[2]
    every = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    by_name = [call for call in every if called(call) == name]
    by_inputs = [call for call in every if len(call.args) + len(call.keywords) >= 3]       # query, key and value
    for calls in (by_name, by_inputs):
        if len(calls) == 1:
            return calls[0]
    raise NotWritten("which of its calls it is can't be seen")


def _without_weights(call: ast.Call, text: str) -> str:
    """Its source, with the option."""
    if len(call.args) > PLACE_OF_OPTION or any(isinstance(each, ast.Starred) for each in call.args):
        raise NotWritten(f"{OPTION} is given by its place")
    if any(keyword.arg == OPTION for keyword in call.keywords):
        kept = [keyword for keyword in call.keywords if keyword.arg != OPTION]
        return ast.unparse(ast.Call(call.func, call.args, [*kept, ast.keyword(OPTION, ast.Constant(False))]))
    source = ast.get_source_segment(text, call) or ast.unparse(call)
    before = source[:-1].rstrip().removesuffix(",")
    if "#" in before:                                          # a comment may stand before the bracket
        before = ast.unparse(call)[:-1]
    return f"{before}, {OPTION}=False)"
