"""Linear layers on one input become one: a larger matmul, and the input is read once."""
import ast
import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import fx
from torch.nn import functional as F

from benchmarks.assistant import memory
from benchmarks.assistant.graph import Captured, place_of
from benchmarks.assistant.predicting import Basis, Prediction, bytes_of
from benchmarks.assistant.program import Program
from benchmarks.assistant.projections import ProjectionGroup, path_of, products_with_parameters, projections_in
from benchmarks.assistant.rewriting import Assumed
from benchmarks.assistant.source import Place
from benchmarks.assistant.technique import Advice, Found, Plan, Technique, found_at, unique
from benchmarks.assistant.words import Replaced, called, statement_of
from common.block.evidence import Evidence

SIDE_BY_SIDE = "with these side by side in one parameter it is one product, split again: checkpoints change with it"


def find(program: Program) -> list[Found]:
    """Every group of them; of products with a module's own parameters a person makes one."""
    layers = unique(found_at(group, in_words(group)) for group in program.analysis.projections)
    of_parameters = [region for graph in program.graphs for region in products_with_parameters(graph)]
    products = [found_at(region, f"{len(region.nodes)} products of one tensor, each with a parameter of its own")
                for region in of_parameters]
    return [*layers, *(dataclasses.replace(each, by_hand=SIDE_BY_SIDE) for each in unique(products))]


def in_words(group: ProjectionGroup) -> str:
    """How many, and how wide."""
    return f"{len(group.nodes)} linear layers on one input, {' + '.join(map(str, group.widths))} wide"


def advice(program: Program, found: Found) -> Advice | None:
    """One product with the weights side by side: the parameters, and every checkpoint, stay as they are."""
    group = found.region
    assert isinstance(group, ProjectionGroup)
    calls: list[ast.expr] = []
    statements: list[ast.stmt] = []
    for node in group.nodes:
        statement = statement_of(node)
        layer = _layer(node)
        call = next((each for each in ast.walk(statement) if isinstance(each, ast.Call) and called(each) == layer),
                    None) if statement else None
        if statement is None or call is None:
            return None
        calls.append(call)
        if statement not in statements:
            statements.append(statement)
    places = [place for node in group.nodes if (place := place_of(node))]
    if len({place.function for place in places}) > 1 or len({ast.unparse(call.args[0]) for call in calls}) > 1:  # type: ignore[attr-defined]
        return None
    layers = [ast.unparse(call.func) for call in calls]                # type: ignore[attr-defined]
    names = [f"{layer.rpartition('.')[2]}_out" for layer in layers]
    kinds = ["weight", "bias"] if group.biases else ["weight"]
    together = [f"torch.cat([{', '.join(f'{layer}.{kind}' for layer in layers)}])" for kind in kinds]
    fused = f"F.linear({', '.join([ast.unparse(calls[0].args[0]), *together])})"       # type: ignore[attr-defined]
    if group.is_changed:
        slices = [f"{name} = fused_out[..., {begin}:{end}]"
                  for name, (begin, end) in zip(names, group.places, strict=True)]
        lines = [f"fused_out = {fused}", *slices]
    else:
        is_even = len(set(group.widths)) == 1
        split = f"chunk({len(group.nodes)}, dim=-1)" if is_even else f"split({group.widths}, dim=-1)"
        lines = [f"{', '.join(names)} = {fused}.{split}"]
    code = {ast.dump(call): name for call, name in zip(calls, names, strict=True)}
    lines += [ast.unparse(Replaced(code).visit(copy.deepcopy(statement))) for statement in statements]
    last = max(statement.end_lineno or statement.lineno for statement in statements)
    return Advice("\n".join(lines), Place(places[0].file, min(statement.lineno for statement in statements), last))


def _layer(node: fx.Node) -> str:
    """The name that the module of a linear layer has where it is used."""
    return path_of(node).rstrip("']").rpartition(".")[2]


def rewrite(graph: Captured) -> list[Assumed]:
    """One product for each group, split again."""
    for group in projections_in(graph):
        _rewrite(group, graph.module.graph)
    graph.module.recompile()
    return []


def _rewrite(group: ProjectionGroup, nodes: fx.Graph) -> None:
    first, biases = group.nodes[0], group.biases
    with nodes.inserting_before(first):
        weight = nodes.call_function(torch.cat, (group.weights,))
        bias = nodes.call_function(torch.cat, (biases,)) if biases else None
        fused = nodes.call_function(F.linear, (group.x, weight, bias))
        made = [weight, fused]
        if group.is_changed:
            parts = [nodes.call_method("narrow", (fused, -1, begin, end - begin)) for begin, end in group.places]
        else:
            made.append(nodes.call_method("split", (fused, group.widths), {"dim": -1}))
            parts = [nodes.call_function(_item, (made[-1], place)) for place in range(len(group.nodes))]
        for node in made:
            node.meta = {key: value for key, value in first.meta.items() if key != "example_value"}
        for part, node in zip(parts, group.nodes, strict=True):
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    for node in group.nodes:
        nodes.erase_node(node)


def _item(parts, place: int):
    return parts[place]


def apply(plan: Plan) -> None:
    """To every graph of the model."""
    plan.passes.append(rewrite)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why it did not: as many matmuls ran as without it."""
    fewer = _matmuls(seen) < _matmuls(before)
    return "" if fewer else f"{_matmuls(seen)} matmuls ran, and {_matmuls(before)} without it"


def _matmuls(seen: Evidence) -> int:
    return sum(count for kind, count in seen.kinds.items() if "matmul" in kind)


def predict(basis: Basis, found: Sequence[Found]) -> Prediction:
    """The input is read once, in the forward and for the weights' gradients; at the least that was for nothing."""
    groups = [(each.region, each.count) for each in found if isinstance(each.region, ProjectionGroup)]
    times = 1 if basis.program.is_inference else 2
    moved = sum(times * count * (len(group.nodes) - 1) * bytes_of(group.x) for group, count in groups)
    return basis.saves(1e3 * moved / basis.bandwidth(), 0.0)


TECHNIQUE = Technique("fused-qkv", "linear layers on one input -> one", find, apply, advice, fired=fired,
                      predict=predict, frees=memory.unknown)
