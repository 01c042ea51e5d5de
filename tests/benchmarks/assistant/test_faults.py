"""What breaks on the way, in a technique, a rung or the report: what was measured is told, and it counts as failed."""
import importlib

import pytest
import torch
from torch import nn

from benchmarks.assistant import Optimized, look, optimize
from benchmarks.assistant.technique import Advice, Found, Technique
from benchmarks.assistant.techniques import fused_qkv

pytestmark = pytest.mark.integration


class Three(nn.Module):
    """Three layers on one input."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.query(x) * self.key(x) + self.value(x)


def breaks(*_):
    raise KeyError("nowhere")


def rewrite(graph):
    raise ZeroDivisionError("no place")


FOUND = Found(None, "", 1, "the call")
BROKEN = {
    "find": Technique("broken", "it breaks", breaks),
    "advice": Technique("broken", "it breaks", lambda program: [FOUND], None, breaks),
    "apply": Technique("broken", "it breaks", lambda program: [FOUND], breaks),
    "rewrite": Technique("broken", "it breaks", lambda program: [FOUND], lambda plan: plan.passes.append(rewrite),
                         lambda program, found: Advice("model = model")),
    "fired": Technique("broken", "it breaks", lambda program: [FOUND], lambda plan: None, fired=breaks)}


def optimized(*techniques):
    return optimize(Three(), (torch.randn(4, 8),), quick=True, inference=True, techniques=techniques)


@pytest.mark.parametrize("where", BROKEN)
def test_what_a_technique_breaks_by_is_its_own_status(where, studies_in_seconds):
    result = optimized(BROKEN[where], fused_qkv.TECHNIQUE)
    verdicts = {one.technique: one for one in result.opportunities}
    assert verdicts["fused-qkv"].speedup and "ms as it is" in str(result)
    assert verdicts["broken"].verdict in ("not here", "by hand")
    assert len(result.failures) == 1 and "broken" in result.failures[0]
    assert "what failed" in str(result)


def test_a_technique_that_breaks_leaves_a_model_that_is_compiled_in_part(studies_in_seconds):
    model = nn.Sequential(torch.compile(nn.Linear(8, 8), backend="eager"), Three())
    result = optimize(model, (torch.randn(4, 8),), quick=True, inference=True,
                      techniques=[BROKEN["apply"], fused_qkv.TECHNIQUE])
    [broken, fused] = sorted(result.opportunities, key=lambda one: one.technique)
    assert broken.verdict == "not here" and fused.speedup and len(result.failures) == 1


def test_a_part_of_the_report_that_breaks_leaves_the_others(studies_in_seconds, monkeypatch):
    result = optimized(fused_qkv.TECHNIQUE)
    assert not result.failures
    monkeypatch.setattr(Optimized, "_ranked", breaks)
    assert "fused-qkv" in str(result) and "a part of the report, a fault of this suite: KeyError" in str(result)
    assert result.failures


def test_a_stage_that_breaks_leaves_those_before(studies_in_seconds, monkeypatch):
    monkeypatch.setattr(importlib.import_module("benchmarks.assistant.optimize"), "climb", breaks)
    result = optimized(fused_qkv.TECHNIQUE)
    [one] = result.opportunities
    assert one.speedup and result.failures == ["the rungs: KeyError: 'nowhere'"]


def test_a_refused_rung_is_no_failure(studies_in_seconds):
    def halved(plan):
        plan.changes.append(lambda model: model.register_forward_hook(lambda module, given, output: output / 2))
    result = optimized(Technique("wrong", "it halves", lambda program: [FOUND], halved))
    assert result.opportunities[0].verdict == "unsafe" and not result.failures


def alone(name):
    """A technique that changes nothing, and can't stand another such one."""
    def change(model):
        if vars(model).get("is_changed"):
            raise RuntimeError("there is one already")
        vars(model)["is_changed"] = True
    return Technique(name, "", lambda program: [FOUND], lambda plan: plan.changes.append(change),
                     lambda program, found: Advice("model = model"))


def test_what_can_not_run_on_top_of_the_others_is_left_out(studies_in_seconds, monkeypatch):
    monkeypatch.setattr("benchmarks.assistant.verdicts.WORTH_IT", 0.0)
    result = optimized(alone("one"), alone("another"), fused_qkv.TECHNIQUE)
    [clashing] = result.clashes
    assert clashing in ("one", "another") and "there is one already" in result.clashes[clashing]
    assert {each.technique.name for each in result.ladder} == {"one", "another", "fused-qkv"} - {clashing}
    assert all(each.gain for each in result.ladder)
    verdicts = {one.technique: one for one in result.opportunities}
    said = verdicts.pop(clashing)
    assert said.verdict == "not here" and said.speedup and said.why == result.clashes[clashing]
    assert "not here" not in {one.verdict for one in verdicts.values()}
    assert clashing not in {each.name for each in result.taken().techniques}


def test_the_exit_status_says_that_something_failed(assistant, monkeypatch):
    only = "--inference", "--only", "compile"
    assert assistant(SOURCE, *only)[0] == 0
    monkeypatch.setattr("benchmarks.assistant.rewriting.compile_fx", breaks)
    status, out, _ = assistant(SOURCE, *only)
    assert status == 1 and "ms as it is" in out and "what failed" in out


def test_a_look_goes_on_without_a_technique_that_breaks():
    looked = look(Three(), (torch.randn(4, 8),), techniques=[BROKEN["find"], fused_qkv.TECHNIQUE])
    assert looked.faults == ["broken: a fault of this suite: KeyError: 'nowhere'"]
    assert "3 linear layers" in str(looked)


SOURCE = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x)
def build():
    return Model(), (torch.randn(4, 8),)
"""
