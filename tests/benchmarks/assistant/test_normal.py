"""A call is read alike, however it is spelt: by place or keyword, as method or function, in place or not."""
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant.attention_finding import attention_at
from benchmarks.assistant.normal import is_in_place, name_of
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.softmaxes import softmaxes
from benchmarks.assistant.techniques import fused_qkv, library_norm, sdpa
from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import validate

pytestmark = pytest.mark.unit
Q, MASK, BIAS = torch.randn(2, 3, 5, 4), torch.rand(5, 5) < 0.3, torch.randn(5, 5)
MASK.fill_diagonal_(False)


class Called(nn.Module):
    """A function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function, self.w, self.u = function, nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, *given):
        return self.function(self, *given)


def attention_of(function, *given):
    program = read(Called(function), Inputs.of(given))
    [graph] = program.graphs
    [softmax] = softmaxes(graph)
    return attention_at(softmax, graph)


def positional(self, q, mask):
    scores = torch.matmul(q, q.transpose(-2, -1)) / 2
    return torch.matmul(torch.softmax(scores.masked_fill(mask, -math.inf), -1), q)


def keywords(self, q, mask):
    scores = torch.div(input=torch.matmul(input=q, other=q.transpose(dim0=-2, dim1=-1)), other=2)
    weights = torch.softmax(input=torch.masked_fill(input=scores, mask=mask, value=-math.inf), dim=-1)
    return torch.matmul(input=weights, other=q)


def in_place(self, q, mask):
    scores = q @ q.mT
    scores /= 2
    scores.masked_fill_(mask, -math.inf)
    return scores.softmax(-1) @ q


def methods(self, q, mask):
    scores = q.matmul(q.swapaxes(axis0=-2, axis1=-1)).div_(2).masked_fill_(mask=mask, value=-math.inf)
    return F.softmax(dim=-1, input=scores).matmul(other=q)


def where(self, q, mask):
    scores = q.matmul(other=q.permute(dims=(0, 1, 3, 2))).mul(other=0.5)
    return torch.where(condition=mask, input=torch.full((), -math.inf), other=scores).softmax(dim=-1) @ q


def where_as_a_method(self, q, mask):
    return (q @ q.mT * 0.5).where(~mask, torch.full((), -math.inf)).softmax(dim=-1) @ q


@pytest.mark.parametrize("spelling", [positional, keywords, in_place, methods, where, where_as_a_method])
def test_a_mask_by_value_is_read_alike(spelling):
    attention = attention_of(spelling, Q, MASK)
    [mask] = attention.masks
    assert attention.scale == 0.5 and mask.value == -math.inf
    assert mask.blocks == (spelling is not where_as_a_method)


def added(self, q, bias):
    return (torch.add(q @ q.mT, bias, alpha=0.5)).softmax(-1) @ q


def added_on_the_left(self, q, bias):
    return (0.5 * bias + q @ q.mT).softmax(-1) @ q


def added_in_place(self, q, bias):
    scores = q @ q.mT
    scores.add_(other=bias, alpha=0.5)
    return scores.softmax(-1) @ q


def taken_away(self, q, bias):
    scores = q @ q.mT
    scores -= -0.5 * bias
    return scores.softmax(-1) @ q


def scaled_afterwards(self, q, bias):
    scores = q @ q.mT
    scores *= 2
    scores += bias
    scores *= 0.5
    return scores.softmax(-1) @ q


@pytest.mark.parametrize("spelling", [added, added_on_the_left, added_in_place, taken_away, scaled_afterwards])
def test_a_mask_that_is_added_is_rewritten_right(spelling):
    attention = attention_of(spelling, Q, BIAS)
    assert len(attention.masks) == 1 and attention.scale == 1.0
    model = Called(spelling)
    judgement = validate(Rung(model, [sdpa.TECHNIQUE]), model, (Q, BIAS))
    assert judgement.passed and judgement.outputs_proven, judgement


def rounded(self, q):
    return torch.div(q @ q.mT, 2, rounding_mode="floor").softmax(-1) @ q


def taken_from_a_tensor(self, q, bias):
    return (bias - q @ q.mT).softmax(-1) @ q


def twice_as_much(self, q, bias):
    return torch.add(bias, q @ q.mT, alpha=2).softmax(-1) @ q


@pytest.mark.parametrize("spelling, given, why", [
    (rounded, (Q,), "rounded"), (taken_from_a_tensor, (Q, BIAS), "taken from"), (twice_as_much, (Q, BIAS), "taken")])
def test_what_is_another_function_of_the_scores_is_refused(spelling, given, why):
    [found] = sdpa.find(read(Called(spelling), Inputs.of(given)))
    assert why in found.why_not


def test_linear_layers_and_norms_by_keyword_are_found():
    def layers(self, x):
        x = x * torch.rsqrt(input=torch.mean(input=torch.pow(input=x, exponent=2), dim=-1, keepdim=True) + 1e-6)
        return F.linear(input=x, weight=self.w) * F.linear(weight=self.u, input=x)
    program = read(Called(layers), Inputs.of((torch.randn(6, 4),)))
    assert [each.why_not for each in fused_qkv.find(program)] == [""]
    assert [each.why_not for each in library_norm.find(program)] == [""]


def test_a_buffer_that_is_changed_in_place_is_not_changed_by_reading():
    class Fills(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("blocked", torch.ones(5, 5).triu(1))

        def forward(self, q):
            self.blocked.mul_(2)
            return (q @ q.mT).masked_fill(self.blocked > 0, -math.inf).softmax(-1) @ q
    model = Fills()
    before = model.blocked.clone()
    sdpa.find(read(model, Inputs.of((Q,))))
    assert torch.equal(model.blocked, before)


@pytest.mark.parametrize("function, name, changes", [
    (lambda x: x.add_(1), "add", True), (lambda x: x + 1, "add", False), (lambda x: torch.relu_(x), "relu", True),
    (lambda x: F.relu(x, inplace=True), "relu", True), (lambda x: x.__rsub__(1), "__rsub__", False)])
def test_names_and_what_works_in_place(function, name, changes):
    graph = torch.fx.symbolic_trace(function).graph
    [node] = [node for node in graph.nodes if node.op.startswith("call_")]
    assert (name_of(node), is_in_place(node)) in ((name, changes), ("sub", changes))
