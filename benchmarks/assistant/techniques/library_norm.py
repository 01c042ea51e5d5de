"""LayerNorm and RMSNorm by hand become the library's: one kernel that reads x once, in place of one an operation."""
import ast
import contextlib
from collections.abc import Sequence

import torch
from torch import fx
from torch.nn import functional as F

from benchmarks.assistant.graph import Captured, Refused, place_of
from benchmarks.assistant.norms import Norm, norm_at, roots
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Assumed, erase_unused
from benchmarks.assistant.source import Place, text_of
from benchmarks.assistant.statements import assigned, lines_with, needed_later, statements_of, with_code
from benchmarks.assistant.technique import Advice, Found, NotWritten, Plan, Technique, found_at, unique
from benchmarks.assistant.words import expression_of, words_for
from common.block.evidence import Evidence


def find(program: Program) -> list[Found]:
    """Every norm by hand; where it is another function than the library's, with the reason."""
    return unique(found_at(each, in_words(each) if isinstance(each, Norm) else "a norm by hand")
                  for each in program.analysis.norms)


def in_words(norm: Norm) -> str:
    """What it costs."""
    return f"{norm.function.replace('_', ' ')} by hand: {len(norm.nodes)} operations, each a pass over x"


def advice(program: Program, found: Found) -> Advice:
    """The library's function, in place of the expression of the last operation. Raises NotWritten.

    Statements that led to it alone go; those that something else needs stay.
    """
    norm = found.region
    assert isinstance(norm, Norm)
    start, end, whole = place_of(norm.nodes[0]), place_of(norm.output), expression_of(norm.output)
    if start is None or end is None or start.function != end.function:
        raise NotWritten("its operations stand in different functions")
    words = words_for(norm.nodes)
    needed = [node for node in (norm.x, norm.weight, norm.bias) if node is not None]
    if whole is None or any(node not in words for node in needed):
        raise NotWritten("its lines are not read")
    *before, last = statements_of(start, end)
    own = {place.line for node in norm.nodes if (place := place_of(node))}
    kept = _kept(before, own, last, whole, start.file)
    read = {name.id for node in needed for name in ast.walk(ast.parse(words[node])) if isinstance(name, ast.Name)}
    if read & {name for statement in kept for name in assigned(statement)}:
        raise NotWritten("what it normalises is assigned to in between")
    text = text_of(start.file).split("\n")
    lines = lines_with({each: [] for each in before if each not in kept}, (before or [last])[0], last, text)
    code = with_code(last, whole, _call(norm, [words[node] for node in needed]), text)
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


def _call(norm: Norm, words: Sequence[str]) -> str:
    """In words of x, weight and bias, as far as there are any."""
    x, *affine = words
    if norm.weight is None and norm.is_centred:
        affine = ["None"]
    return f"F.{norm.function}({', '.join([x, f'{x}.shape[-1:]', *affine, f'eps={norm.epsilon!r}'])})"


def rewrite(graph: Captured) -> list[Assumed]:
    """Put the library's function in place of every norm by hand."""
    for root in roots(graph):                                    # one at a time: each changes the graph
        with contextlib.suppress(Refused):
            if norm := norm_at(root, graph):
                _rewrite(norm, graph.module.graph)
    graph.module.recompile()
    return []


def _rewrite(norm: Norm, nodes: fx.Graph) -> None:
    function = F.layer_norm if norm.is_centred else F.rms_norm
    affine = (norm.weight, norm.bias) if norm.is_centred else (norm.weight,)
    with nodes.inserting_before(norm.output):
        fused = nodes.call_function(function, (norm.x, (norm.width,), *affine, norm.epsilon))
        value = norm.output.meta.get("example_value")
        fused.meta = dict(norm.output.meta)
        if isinstance(value, torch.Tensor):
            fused = nodes.call_method("to", (fused, value.dtype))
            fused.meta = dict(norm.output.meta)
    norm.output.replace_all_uses_with(fused)
    erase_unused(norm.output, nodes)


def apply(plan: Plan) -> None:
    """To every graph of the model."""
    plan.passes.append(rewrite)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why none of the library's norms ran; "" where one did."""
    return "" if any("norm" in name.lower() for name in seen.kernels) else "no kernel of a norm ran"


TECHNIQUE = Technique("library-norm", "norms by hand -> F.layer_norm, F.rms_norm", find, apply, advice, fired=fired)
