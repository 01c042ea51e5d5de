"""An optimizer's step: where a fused form is the same, how fast it is beside the model, and where there is none."""
import copy

import pytest
import torch
from torch import nn

from benchmarks.assistant import look
from benchmarks.assistant.program import read
from benchmarks.assistant.task import Task
from benchmarks.assistant.techniques import optimizer as technique
from benchmarks.measure.calls import Inputs

unit = pytest.mark.unit
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95)),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:1], "weight_decay": 0.0}, {"params": p[1:], "lr": 1e-2}])}


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def program_with(optimizer, model, ms: float = 1e-3):
    program = read(model, Inputs.of(X))
    program.optimizer, program.iteration_ms = optimizer, ms
    return program


@unit
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_fused_step_is_the_same(make):
    model = model_of()
    optimizer = make(list(model.parameters()))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    [found] = technique.find(program_with(optimizer, model))
    assert "of 4 tensors: a step takes" in found.reason and "with fused=True it is" in found.reason
    after = model.state_dict(), optimizer.state_dict()
    assert str(after) == str(before), "the task's own is left alone"


@unit
@pytest.mark.parametrize("change", [{"lr": 2e-3}, {"weight_decay": 0.5}, {"betas": (0.5, 0.95)}])
def test_a_fused_step_that_is_another_is_refused(change, monkeypatch):
    model = model_of()
    form = technique.form
    monkeypatch.setattr(technique, "form", lambda group, fused: form(group, fused) | (change if fused else {}))
    [found] = technique.find(program_with(KINDS["AdamW"](list(model.parameters())), model))
    assert found.why_not == "fused, it gives other parameters here"


class Own(torch.optim.Optimizer):
    def step(self, closure=None):
        """Nothing."""


@unit
@pytest.mark.parametrize("make, why_not", [
    (lambda p: torch.optim.AdamW(p, fused=True), "it is fused already"),
    (lambda p: torch.optim.RMSprop(p), "torch has no fused form of it"),
    (lambda p: Own(p, {}), "it is none of torch's"),
    (lambda p: torch.optim.Adam(p, differentiable=True), "it is differentiable, which a fused one is not")])
def test_where_there_is_no_fused_form_it_is_said(make, why_not):
    model = model_of()
    [found] = technique.find(program_with(make(list(model.parameters())), model))
    assert found.why_not == why_not


@unit
@pytest.mark.parametrize("iteration_ms, was, then, why_not", [
    (10.0, 1.0, 0.5, ""), (100.0, 1.0, 0.5, "it is not worth it"), (0.0, 1.0, 0.999, "it is not worth it")])
def test_it_is_worth_it_by_what_the_whole_step_gains(iteration_ms, was, then, why_not, monkeypatch):
    """Half of a step of 1 ms is 4.8 % beside 10 ms, and 0.5 % beside 100."""
    monkeypatch.setattr(technique, "milliseconds", lambda *_: ([was] * 9, [then] * 9))
    model = model_of()
    [found] = technique.find(program_with(KINDS["SGD"](list(model.parameters())), model, iteration_ms))
    assert found.why_not == why_not


@unit
@pytest.mark.parametrize("free, count", [(8 * 2 * 512, 1), (8 * 2 * 512 - 16, 0), (8 * 2 * (512 + 64), 2), (1e9, 4)])
def test_only_as_many_parameters_as_fit_are_copied(free, count, monkeypatch):
    """The first has 8 x 16 x 4 bytes."""
    monkeypatch.setattr(technique, "memory_free", lambda device: free)
    optimizer = torch.optim.SGD(model_of().parameters())
    assert len(technique.parameters_of(optimizer)) == count
    assert bool(technique.why_not_fused(optimizer)) == (count == 0)


@unit
def test_a_task_names_its_optimizer_and_inference_has_none():
    model = model_of()
    task = Task(model, (X,), optimizer=torch.optim.AdamW(model.parameters()))
    found = {inference: look(lambda: task, inference=inference, techniques=[technique.TECHNIQUE]).found
             for inference in (False, True)}
    assert len(found[False][technique.TECHNIQUE]) == 1 and not found[True][technique.TECHNIQUE]
