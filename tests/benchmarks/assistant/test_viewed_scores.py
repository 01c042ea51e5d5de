"""Attention by hand in which batch and heads are one dimension for the products, and two for a mask."""
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant.attention import Attention
from benchmarks.assistant.attention_finding import attentions_in
from benchmarks.assistant.fusing import Given
from benchmarks.assistant.graph import Refusal
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.techniques import sdpa
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block import evidence

B, H, S, D = 2, 4, 12, 8


class Viewed(nn.Module):
    """q, k and v [B * H, S, D]; `scores` and `weights` say how the products are, and what is between."""

    def __init__(self, scores, weights=lambda p: p.view(B * H, S, S)):
        super().__init__()
        self.scores, self.weights = scores, weights
        self.qkv, self.proj = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)
        self.register_buffer("triangle", torch.full((S, S), -math.inf).triu(1))
        self.register_buffer("alibi", -torch.arange(S).flip(0).float() * torch.rand(B * H, 1, 1))

    def forward(self, x, padding):
        q, k, v = (t.view(B, S, H, D).transpose(1, 2).reshape(B * H, S, D) for t in self.qkv(x).chunk(3, -1))
        weights = F.softmax(self.scores(self, q, k, padding), -1)
        y = torch.bmm(self.weights(weights), v)
        return self.proj(y.view(B, H, S, D).transpose(1, 2).reshape(B, S, H * D))


def product(q, k):
    return torch.bmm(q, k.transpose(1, 2)) * D**-0.5


FORMS = {
    "a mask on the view": Viewed(lambda m, q, k, padding: product(q, k).view(B, H, S, S) + m.triangle),
    "padding on the view": Viewed(
        lambda m, q, k, padding: product(q, k).view(B, H, S, S).masked_fill(padding[:, None, None], -1e4)),
    "viewed back before the softmax": Viewed(
        lambda m, q, k, padding: (product(q, k).view(B, H, S, S) + m.triangle).view(B * H, S, S), lambda p: p),
    "one before, one behind": Viewed(
        lambda m, q, k, padding: (product(q, k) + m.alibi).view(B, H, S, S).masked_fill(padding[:, None, None], -1e4)),
    "added by the matmul": Viewed(
        lambda m, q, k, padding: m.alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=0.5, alpha=D**-0.5).view(
            B, H, S, S) + m.triangle),
    "scaled behind what is added": Viewed(
        lambda m, q, k, padding: (torch.baddbmm(m.alibi, q, k.transpose(1, 2)) * 0.3).reshape(B, H, S, S)),
    "no mask at all": Viewed(lambda m, q, k, padding: product(q, k).view(B, H, S, S)),
}


def given():
    torch.manual_seed(0)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1, 9:] = True
    return torch.randn(B, S, H * D), padding


@pytest.mark.integration
@pytest.mark.parametrize("name", FORMS)
def test_it_becomes_one_call_and_stays_the_function(name):
    model, inputs = FORMS[name], given()
    program = read(model, Inputs.of(inputs))
    [found] = program.analysis.attentions
    assert isinstance(found, Attention) and found.shape == (B, H, S, S) and found.is_viewed
    assert Given.of_region(found).query == (B, H, S, D)
    assert found.is_causal == (name in ("a mask on the view", "viewed back before the softmax"))
    rung = Rung(model, [sdpa.TECHNIQUE])
    judged = validate(rung, model, inputs)
    assert judged.passed and judged.proven, judged
    rung(*inputs)
    seen = evidence.observe(lambda: rung(*inputs), torch.device("cpu"))
    assert seen["aten::scaled_dot_product_attention"] and not seen["aten::softmax"], seen


class OfTheSameShape(nn.Module):
    """As Falcon: scores and weights are viewed in the shape that they have."""

    def __init__(self, swapped):
        super().__init__()
        self.qkv, self.swapped = nn.Linear(H * D, 3 * H * D), swapped
        self.register_buffer("alibi", -torch.arange(S).flip(0).float() * torch.rand(B * H, 1, 1))

    def forward(self, x):
        q, k, v = (t.view(B, S, H, D).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        product = (k @ q.transpose(-1, -2)).mT if self.swapped else q @ k.transpose(-1, -2)
        scores = product.reshape(B, H, S, S) + self.alibi.view(B, H, 1, S)
        scores *= D**-0.5
        return F.softmax(scores, -1).view(B, H, S, S) @ v


@pytest.mark.integration
@pytest.mark.parametrize("swapped", [False, True])
def test_a_view_of_the_same_shape_changes_nothing(swapped):
    torch.manual_seed(0)
    model, (x, _) = OfTheSameShape(swapped), given()
    [found] = read(model, Inputs.of(x)).analysis.attentions
    assert isinstance(found, Attention) and found.shape == (B, H, S, S) and not found.is_viewed
    judged = validate(Rung(model, [sdpa.TECHNIQUE]), model, (x,))
    assert judged.passed and judged.proven, judged


@pytest.mark.unit
def test_there_is_no_code_to_write_yet():
    program = read(FORMS["no mask at all"], Inputs.of(given()))
    [found] = sdpa.find(program)
    with pytest.raises(NotWritten, match="batch and heads are one dimension"):
        sdpa.advice(program, found)


REFUSED = {
    "scores in another shape": (
        Viewed(lambda m, q, k, padding: product(q, k).view(B, H, S * S).view(B * H, S, S), lambda p: p),
        "its scores are viewed in another shape"),
    "weights in another shape": (
        Viewed(lambda m, q, k, padding: product(q, k), lambda p: p.view(B, H, S * S).view(B * H, S, S)),
        "its weights are viewed in another shape"),
    "in two other shapes": (
        Viewed(lambda m, q, k, padding: product(q, k).view(H, B, S, S).view(B * H, S, S).view(B, H, S, S)),
        "its scores are viewed in several other shapes"),
    "transposed before": (
        Viewed(lambda m, q, k, padding: product(k, q).transpose(1, 2).view(B, H, S, S)),
        "its scores are viewed in another shape, and transposed"),
    "broadcast before": (
        Viewed(lambda m, q, k, padding: (product(q[:1], k[:1]) + m.alibi).view(B, H, S, S)),
        "its scores are viewed, and broadcast"),
    "in five dimensions": (
        Viewed(lambda m, q, k, padding: product(q, k).view(B, 2, H // 2, S, S)),
        "its scores are viewed in several other shapes"),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_split_of_batch_and_heads_is_refused(name):
    model, why = REFUSED[name]
    [graph] = read(model, Inputs.of(given())).graphs
    [refused] = attentions_in(graph)
    assert isinstance(refused, Refusal) and refused.why == why
