"""Wrong rewrites in place of the right ones: the judge calls each unsafe, and none of them is timed."""
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from benchmarks.assistant import optimize
from benchmarks.assistant.program import Captured
from benchmarks.assistant.technique import Plan, Technique
from benchmarks.assistant.techniques import fused_qkv, library_norm, sdpa
from benchmarks.examples import gpt

WIDTH, HEADS, LENGTH = 32, 2, 16


def keyword(name: str, value) -> Callable[[fx.Node], None]:
    """That argument is another."""
    def change(node: fx.Node) -> None:
        node.kwargs = {**node.kwargs, name: value}
    return change


def places(*order: int) -> Callable[[fx.Node], None]:
    """Its positional arguments stand in another order; -1 is None."""
    def change(node: fx.Node) -> None:
        node.args = tuple(None if place < 0 else node.args[place] for place in order)
    return change


def epsilon(node: fx.Node) -> None:
    node.args = (*node.args[:-1], 1e-2)


def no_mean(node: fx.Node) -> None:
    x, width, weight, _, eps = node.args
    node.target, node.args = rms_norm_of, (x, width, weight, eps)


def rms_norm_of(x, width, weight, eps):
    return F.rms_norm(x, width, weight, eps)


def detached(place: int) -> Callable[[fx.Node], None]:
    """The output is right; that argument gets no gradient."""
    def change(node: fx.Node) -> None:
        with node.graph.inserting_before(node):
            node.update_arg(place, node.graph.call_method("detach", (node.args[place],)))
    return change


def with_gradient_of(factor: float) -> Callable[[fx.Node], None]:
    """The output is right; the gradient of the first argument is not."""
    def change(node: fx.Node) -> None:
        with node.graph.inserting_before(node):
            node.update_arg(0, node.graph.call_function(scaled_backward, (node.args[0], factor)))
    return change


def scaled_backward(t: torch.Tensor, factor: float) -> torch.Tensor:
    return t.detach() * (1 - factor) + t * factor


def swapped(node: fx.Node) -> None:
    """The first of the parts is the second, and the other way about."""
    first, second, *_ = node.users
    first.args, second.args = second.args, first.args


def in_half(node: fx.Node) -> None:
    """Its first argument is rounded to sixteen bits on the way: no more than a few roundings wrong."""
    with node.graph.inserting_before(node):
        node.update_arg(0, node.graph.call_function(rounded, (node.args[0],)))


def rounded(t: torch.Tensor) -> torch.Tensor:
    return t.bfloat16().to(t.dtype)


ATTENTION, NORM, LINEAR, SPLIT = F.scaled_dot_product_attention, F.layer_norm, F.linear, "split"
WRONG = [
    ("not causal", sdpa, ATTENTION, keyword("is_causal", False)),
    ("scale missing", sdpa, ATTENTION, keyword("scale", 1.0)),
    ("values for keys", sdpa, ATTENTION, places(0, 2, 1)),
    ("values detached", sdpa, ATTENTION, detached(2)),
    ("gradient of the query negated", sdpa, ATTENTION, with_gradient_of(-1.0)),
    ("gradient one per cent off", sdpa, ATTENTION, with_gradient_of(1.01)),
    ("query rounded to 16 bits", sdpa, ATTENTION, in_half),
    ("epsilon", library_norm, NORM, epsilon),
    ("bias of the norm missing", library_norm, NORM, places(0, 1, 2, -1, 4)),
    ("mean not subtracted", library_norm, NORM, no_mean),
    ("query and key swapped", fused_qkv, SPLIT, swapped),
    ("weights detached", fused_qkv, LINEAR, detached(1)),
]


def wrong(name: str, module, target, change: Callable[[fx.Node], None]) -> Technique:
    """The technique of a module with every call of `target` that it put in changed."""
    def rewrite(graph: Captured) -> list:
        before = set(graph.nodes)
        assumed = module.rewrite(graph)
        put_in = [node for node in graph.module.graph.nodes if node not in before and node.target == target]
        for node in put_in:
            change(node)
        graph.module.recompile()
        return assumed

    def apply(plan: Plan) -> None:
        plan.passes.append(rewrite)
    return dataclasses.replace(module.TECHNIQUE, name=name, apply=apply)


@pytest.mark.integration
def test_wrong_rewrites_are_unsafe(studies_in_seconds):
    """All of them. The reason names a tensor and its error, and none is timed."""
    techniques = [wrong(*each) for each in WRONG]
    model = nn.Sequential(gpt.LayerNorm(WIDTH), gpt.Attention(WIDTH, HEADS, LENGTH))
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():                 # zeros and ones would hide a bias or a weight
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=random)
    found = optimize(model, (x,), quick=True, techniques=techniques, device="cpu").opportunities
    assert {one.technique for one in found} == {name for name, *_ in WRONG}
    for one in found:
        assert one.verdict == "unsafe", one
        assert one.speedup is None and one.interval is None
        assert "output" in one.why or "gradient" in one.why, one.why
