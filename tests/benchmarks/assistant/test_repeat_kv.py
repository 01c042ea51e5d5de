"""Grouped heads that no fused kernel takes: found where that is so, and timed with keys and values repeated."""
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant import optimize
from benchmarks.assistant.fusing import MaskGiven
from benchmarks.assistant.program import read
from benchmarks.assistant.techniques import repeat_kv, sdpa
from benchmarks.measure.calls import Inputs

unit, integration = pytest.mark.unit, pytest.mark.integration
X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
WHY_NOT = "4 heads of queries and 2 of keys; keys and values repeated, flash ran"


class Net(nn.Module):
    def __init__(self, groups=2):
        super().__init__()
        self.q, self.kv, self.groups = nn.Linear(32, 32), nn.Linear(32, 16 * groups), groups

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (each.unflatten(-1, (self.groups, 8)).transpose(1, 2) for each in self.kv(x).chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups < 4)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """What it has kernels for, and measures."""
    it = {"gain": (2.5, 2.4, 2.6), "kernel": ("", WHY_NOT), "in 16 bits": ("", WHY_NOT)}
    repeat_kv._gain.cache_clear()

    def kernel(given):
        return it["kernel" if given.dtype == torch.float32 else "in 16 bits"] if given.enable_gqa else ("flash", "")
    for module in (repeat_kv, sdpa):
        monkeypatch.setattr(module, "fused_or_why_not", kernel)
    monkeypatch.setattr(repeat_kv, "gain_on_device", lambda before, after, device: it["gain"])
    return it


def found_in(model):
    return repeat_kv.find(read(model, Inputs.of(X)))


@unit
def test_a_call_that_is_computed_by_hand_is_told_with_its_time():
    [found] = found_in(Net())
    assert found.reason == ("no fused kernel computes 4 heads of queries and 2 of keys; with keys and values repeated "
                            "attention is 2.50 [2.40, 2.60] times as fast here, repeating included: "
                            "key.repeat_interleave(2, -3)")
    [already] = sdpa.find(read(Net(), Inputs.of(X)))
    assert already.why_not == f"it is this function already; no fused kernel computes it: {WHY_NOT}"


@unit
def test_where_autocast_would_make_one_run_that_is_said(machine):
    machine["in 16 bits"] = "flash", ""
    assert found_in(Net())[0].reason.endswith("; under autocast in bfloat16 it is not needed: flash runs")
    machine["kernel"], machine["in 16 bits"] = ("flash", ""), ("", WHY_NOT)
    assert found_in(Net()) == []


@unit
def test_where_a_kernel_takes_them_there_is_nothing_to_do(machine):
    machine["kernel"] = "flash", ""
    assert found_in(Net()) == []
    assert sdpa.find(read(Net(), Inputs.of(X)))[0].why_not == "it is this function already"
    assert found_in(Net(groups=4)) == []


@unit
@pytest.mark.parametrize("gain, why_not", [((1.1, 1.02, 1.2), ""), ((1.1, 1.019, 1.2), "it is not worth it")])
def test_it_must_be_faster(gain, why_not, machine):
    machine["gain"] = gain
    assert found_in(Net())[0].why_not == why_not


@unit
def test_what_is_timed_is_the_same_function():
    [given] = [call.attends for call in read(Net(), Inputs.of(X)).trace.calls if call.attends]
    seen = []
    for repeats in (False, True):
        torch.manual_seed(0)
        seen.append(replace(given, trains=True).iteration(repeats).run())
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*seen, strict=True))


@unit
@pytest.mark.parametrize("largest, said", [(4 * 4 * 36, True), (4 * 4 * 36 - 1, False)])
def test_the_search_for_a_kernel_ends_where_scores_are_too_many(largest, said, monkeypatch):
    monkeypatch.setattr(sdpa, "LARGEST", largest)
    [already] = sdpa.find(read(Net(), Inputs.of(X)))
    assert ("no fused kernel" in already.why_not) == said


@unit
def test_one_sample_stands_for_a_batch():
    [given] = [call.attends for call in read(Net(), Inputs.of(X)).trace.calls if call.attends]
    given = replace(given, mask=MaskGiven((2, 1, 6, 6), torch.bool))
    assert given.of_one_sample().query == (1, 4, 6, 8) and given.of_one_sample().mask.shape == (1, 1, 6, 6)


@integration
def test_a_person_repeats_them(studies_in_seconds):
    [one] = optimize(Net(), (X,), quick=True, techniques=(repeat_kv.TECHNIQUE,)).opportunities
    assert one.verdict == "by hand" and "2.50" in one.found.reason


@unit
def test_grouped_heads_have_the_work_of_repeated_ones():
    """In every torch: before 2.12 its counter refuses them."""
    flops = [call.flops for call in read(Net(), Inputs.of(X)).trace.calls if call.attends]
    assert flops == [2 * 4 * (6 * 6 * 8 + 6 * 6 * 8) * 2 / 2]          # samples, heads, both matmuls; causal: half
