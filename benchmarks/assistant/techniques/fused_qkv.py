"""Linear layers on one input become one: a larger matmul, and the input is read once."""
import ast
import copy
import dataclasses

import torch
from torch import fx
from torch.nn import functional as F

from benchmarks.assistant.program import Captured, Program, argument, name_of, place_of, shape_of
from benchmarks.assistant.rewriting import Assumed
from benchmarks.assistant.source import Place
from benchmarks.assistant.technique import Advice, Found, Plan, Technique, found_in, unique
from benchmarks.assistant.words import Replaced, called, statement_of
from common.block.evidence import Evidence

Siblings = list[fx.Node]                       # linear layers on one input, in the order of the graph


def siblings(graph: Captured) -> list[Siblings]:
    """The groups of two or more linear layers of a module on the same tensor, all with a bias or all without."""
    groups: dict[tuple, Siblings] = {}
    for node in graph.nodes:
        if node.op == "call_function" and name_of(node) == "linear" and isinstance(node.args[0], fx.Node):
            weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
            if all(each is None or each.op == "placeholder" for each in (weight, bias)):
                groups.setdefault((node.args[0], _owner(node), bias is None), []).append(node)
    return [group for group in groups.values() if len({argument(node, 1, "weight") for node in group}) > 1]


def find(program: Program) -> list[Found]:
    """Every group of them."""
    found = []
    for graph in program.graphs:
        for group in siblings(graph):
            widths = " + ".join(str(shape_of(node)[-1]) for node in group)
            each = found_in(program, graph, group, f"{len(group)} linear layers on one input, {widths} wide")
            found.append(dataclasses.replace(each, module=each.module.rpartition(".")[0]))
    return unique(found)


def advice(program: Program, found: Found) -> Advice | None:
    """One product with the weights side by side: the parameters, and every checkpoint, stay as they are."""
    calls: list[ast.expr] = []
    statements: list[ast.stmt] = []
    for node in found.nodes:
        statement = statement_of(node)
        layer = _layer(node)
        call = next((each for each in ast.walk(statement) if isinstance(each, ast.Call) and called(each) == layer),
                    None) if statement else None
        if statement is None or call is None:
            return None
        calls.append(call)
        if statement not in statements:
            statements.append(statement)
    places = [place for node in found.nodes if (place := place_of(node))]
    if len({place.function for place in places}) > 1 or len({ast.unparse(call.args[0]) for call in calls}) > 1:  # type: ignore[attr-defined]
        return None
    layers = [ast.unparse(call.func) for call in calls]                # type: ignore[attr-defined]
    names = [f"{layer.rpartition('.')[2]}_out" for layer in layers]
    kinds = ["weight"] if argument(found.nodes[0], 2, "bias") is None else ["weight", "bias"]
    together = [f"torch.cat([{', '.join(f'{layer}.{kind}' for layer in layers)}])" for kind in kinds]
    widths = [shape_of(node)[-1] for node in found.nodes]
    split = f"chunk({len(widths)}, dim=-1)" if len(set(widths)) == 1 else f"split({widths}, dim=-1)"
    fused = f"F.linear({', '.join([ast.unparse(calls[0].args[0]), *together])})"       # type: ignore[attr-defined]
    lines = [f"{', '.join(names)} = {fused}.{split}"]
    code = {ast.dump(call): name for call, name in zip(calls, names, strict=True)}
    lines += [ast.unparse(Replaced(code).visit(copy.deepcopy(statement))) for statement in statements]
    last = max(statement.end_lineno or statement.lineno for statement in statements)
    return Advice("\n".join(lines), Place(places[0].file, min(statement.lineno for statement in statements), last))


def _owner(node: fx.Node) -> str:
    """The path of the module that a linear layer belongs to: others would need its weights from elsewhere."""
    return _path(node).rpartition(".")[0]


def _layer(node: fx.Node) -> str:
    """The name that the module of a linear layer has where it is used."""
    return _path(node).rstrip("']").rpartition(".")[2]


def _path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


def rewrite(graph: Captured) -> list[Assumed]:
    """One product for each group, split again."""
    for group in siblings(graph):
        _rewrite(group, graph.module.graph)
    graph.module.recompile()
    return []


def _rewrite(group: Siblings, nodes: fx.Graph) -> None:
    weights = [argument(node, 1, "weight") for node in group]
    biases = [argument(node, 2, "bias") for node in group]
    with nodes.inserting_before(group[0]):
        weight = nodes.call_function(torch.cat, (weights,))
        bias = nodes.call_function(torch.cat, (biases,)) if biases[0] is not None else None
        fused = nodes.call_function(F.linear, (group[0].args[0], weight, bias))
        parts = nodes.call_method("split", (fused, [shape_of(node)[-1] for node in group]), {"dim": -1})
        for node in (weight, fused, parts):
            node.meta = {key: value for key, value in group[0].meta.items() if key != "example_value"}
        for place, node in enumerate(group):
            part = nodes.call_function(_item, (parts, place))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    for node in group:
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


TECHNIQUE = Technique("fused-qkv", "linear layers on one input -> one", find, apply, advice, fired=fired)
