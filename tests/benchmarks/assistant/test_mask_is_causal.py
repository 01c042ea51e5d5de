"""A dense mask that hides the future alone: found by its values, and refused where a row is padded."""
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant import optimize
from benchmarks.assistant.fusing import Hidden, hidden_by
from benchmarks.assistant.program import read
from benchmarks.assistant.techniques import mask_is_causal
from benchmarks.measure.calls import Inputs

unit, integration = pytest.mark.unit, pytest.mark.integration
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
LOWER = torch.ones(6, 6, dtype=torch.bool).tril()


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """What a machine would measure."""
    measured = {torch.float32: (1.8, 1.7, 1.9), torch.bfloat16: (2.8, 2.7, 2.9)}
    mask_is_causal._gain.cache_clear()
    monkeypatch.setattr(mask_is_causal, "gain_on_device", lambda before, after, device: measured[before.reads[0].dtype])
    return measured


class Net(nn.Module):
    """As a decoder of a library has it: a mask of ones for padding and a triangle become numbers that are added."""

    def __init__(self, lowest=-math.inf, boolean=False):
        super().__init__()
        self.qkv, self.lowest, self.boolean = nn.Linear(16, 48), lowest, boolean

    def forward(self, x, padding=None):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        keeps = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        if padding is not None:
            keeps = keeps & padding[:, None, None, :].bool()
        mask = keeps if self.boolean else torch.zeros(keeps.shape).masked_fill(~keeps, self.lowest)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def found_in(model, *inputs):
    return mask_is_causal.find(read(model, Inputs.of(inputs)))


@unit
@pytest.mark.parametrize("model", [Net(), Net(torch.finfo(torch.float32).min), Net(boolean=True)])
@pytest.mark.parametrize("padding", [None, torch.ones(2, 6)])
def test_a_mask_that_is_causal_is_told_with_its_time(model, padding):
    [found] = found_in(model, X) if padding is None else found_in(model, X, padding)
    said = ("hides the future alone for these inputs: with is_causal=True in its place attention is 1.80 "
            "[1.70, 1.90] (float32) and 2.80 [2.70, 2.90] (bfloat16) times as fast here; the same unless")
    assert said in found.reason and not found.why_not and found.place.file == __file__


@unit
def test_one_padded_row_refuses():
    padding = torch.ones(2, 6)
    padding[1, 4:] = 0
    [found] = found_in(Net(), X, padding)
    assert found.reason.endswith("hides the future and more for these inputs") and "another function" in found.why_not


@unit
@pytest.mark.parametrize("gain, why_not", [((1.1, 1.02, 1.2), ""), ((1.1, 1.019, 1.2), "it is not worth it")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_must_be_faster_in_the_own_dtype_or_under_autocast(gain, why_not, dtype, faster):
    faster |= {torch.float32: (1.0, 1.0, 1.0), torch.bfloat16: (1.0, 1.0, 1.0)} | {dtype: gain}
    assert found_in(Net(), X)[0].why_not == why_not


class Biased(Net):
    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(6.0).log()[None])


class Causal(Net):
    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@unit
@pytest.mark.parametrize("net", [Biased, Causal])
def test_other_attention_is_left(net):
    assert found_in(net(), X) == []


def added(keeps, lowest=-math.inf):
    return torch.zeros(keeps.shape).masked_fill(~keeps, lowest)


@unit
@pytest.mark.parametrize("mask, hides", [
    (LOWER, Hidden.FUTURE), (added(LOWER), Hidden.FUTURE),
    (added(LOWER, -1e5)[None, None].expand(2, 2, 6, 6), Hidden.FUTURE),
    (torch.ones(6, 6, dtype=torch.bool), Hidden.NOTHING), (torch.zeros(2, 1, 1, 6), Hidden.NOTHING),
    (LOWER & (torch.arange(6) > 0), Hidden.MORE), (LOWER.triu(-2), Hidden.MORE),
    (LOWER.T, None), (added(LOWER) + 0.1, None), (added(LOWER, -9.9e3), None), (added(LOWER, -1.1e4), Hidden.FUTURE),
    (torch.ones(6, 6, dtype=torch.bool).tril(1), None)])
def test_what_a_mask_hides_is_in_its_values(mask, hides):
    assert hidden_by(mask, 6, 6) is hides


@unit
def test_the_future_of_more_keys_than_queries_is_another():
    assert hidden_by(torch.ones(4, 6, dtype=torch.bool).tril(), 4, 6) is None
    assert hidden_by(torch.ones(1, 6, dtype=torch.bool), 1, 6) is Hidden.NOTHING


@unit
@pytest.mark.parametrize("model", [Net(), Net(boolean=True)])
def test_what_is_timed_is_the_same_function(model):
    [given] = [call.attends for call in read(model, Inputs.of(X)).trace.calls if call.attends]
    given, seen = replace(given, trains=True), []
    for each in (given, mask_is_causal.without_mask(given)):
        torch.manual_seed(0)
        seen += each.iteration().run()
    assert torch.allclose(*seen) and mask_is_causal.without_mask(given).is_causal


@integration
def test_a_person_leaves_it_out(studies_in_seconds):
    [one] = optimize(Net(), (X,), quick=True, techniques=(mask_is_causal.TECHNIQUE,)).opportunities
    assert one.verdict == "by hand" and "1.80" in one.found.reason, one
