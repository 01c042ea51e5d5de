"""LayerNorm and RMSNorm by hand become the library's: one kernel that reads x once, in place of one an operation."""
import ast
import copy

import torch
from torch import fx
from torch.nn import functional as F

from benchmarks.assistant.norms import Norm, Refused, norm_at, roots
from benchmarks.assistant.program import Captured, Program, place_of
from benchmarks.assistant.rewriting import Assumed, erase_unused
from benchmarks.assistant.source import Place
from benchmarks.assistant.technique import Advice, Found, Plan, Technique, found_in, unique
from benchmarks.assistant.words import Replaced, expression_of, statement_of, words_for
from common.block.evidence import Evidence


def find(program: Program) -> list[Found]:
    """Every norm by hand; where it is another function than the library's, with the reason."""
    found = []
    for graph in program.graphs:
        for root in roots(graph):
            try:
                norm = norm_at(root, graph)
            except Refused as error:
                found.append(found_in(program, graph, [root], "a norm by hand", why_not=str(error)))
                continue
            if norm:
                reason = f"{norm.function.replace('_', ' ')} by hand: {len(norm.chain)} operations, each a pass over x"
                found.append(found_in(program, graph, norm.chain, reason))
    return unique(found)


def advice(program: Program, found: Found) -> Advice | None:
    """The library's function, in place of the statements from the first operation to the last."""
    assert found.graph is not None
    norms = [norm for root in roots(found.graph) if (norm := norm_at(root, found.graph))]
    norm = next(norm for norm in norms if tuple(norm.chain) == found.nodes)
    words = words_for(norm.chain)
    first, last, whole = statement_of(norm.chain[0]), statement_of(norm.output), expression_of(norm.output)
    needed = [node for node in (norm.x, norm.weight, norm.bias) if node is not None]
    start, end = place_of(norm.chain[0]), place_of(norm.output)
    if None in (first, last, whole, start, end) or any(node not in words for node in needed):
        return None
    assert first and last and whole and start and end
    if start.function != end.function:
        return None
    x = words[norm.x]
    options = [x, f"{x}.shape[-1:]", *(words[node] for node in needed[1:])]
    if norm.weight is None and norm.is_centred:
        options.append("None")
    options.append(f"eps={norm.epsilon!r}")
    call = f"F.{norm.function}({', '.join(options)})"
    line = ast.unparse(Replaced({ast.dump(whole): call}).visit(copy.deepcopy(last)))
    return Advice(line, Place(start.file, first.lineno, last.end_lineno or last.lineno))


def rewrite(graph: Captured) -> list[Assumed]:
    """Put the library's function in place of every norm by hand."""
    for root in roots(graph):
        try:
            norm = norm_at(root, graph)
        except Refused:
            continue
        if norm:
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
