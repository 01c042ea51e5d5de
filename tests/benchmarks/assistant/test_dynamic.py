"""Inputs of several shapes: how often Dynamo compiles for them, and whether with dynamic=True it does so less often."""
from collections import deque

import pytest
import torch
from torch import nn
from torch._dynamo.utils import CompilationMetrics

from benchmarks.assistant import look
from benchmarks.assistant.program import read
from benchmarks.assistant.techniques import dynamic
from benchmarks.measure.calls import Inputs

unit = pytest.mark.unit


class Layer(nn.Module):
    """Of any length."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) * x.size(1)


class ByLength(Layer):
    """Each length is another program."""

    def forward(self, x):
        return self.layer(x) * [1, 2, 3, 4, 5, 6, 7, 8, 9][int(x.size(1))]


class Broken(Layer):
    """It can't be run at other lengths."""

    def forward(self, x):
        return self.layer(x.view(2, 4, 8))


def program_of(model, *lengths):
    first, *others = (Inputs.of(torch.randn(2, length, 8)) for length in lengths)
    program = read(model, first)
    program.others = others
    return program


@unit
@pytest.mark.parametrize("lengths, said", [
    ((4, 6), "inputs of 2 shapes: torch.compile compiles twice, as "),
    ((4, 6, 8, 4), "inputs of 3 shapes: torch.compile compiles twice, as ")])
def test_it_compiles_once_for_all_lengths(lengths, said):
    [found] = dynamic.find(program_of(Layer(), *lengths))
    assert found.reason.startswith(said) and "expected 4, actual 6" in found.reason
    assert found.reason.endswith("; with dynamic=True once: torch.compile(model, dynamic=True)") and not found.why_not


@unit
def test_the_guard_is_named_behind_any_number_of_compilations(monkeypatch):
    kept = torch._dynamo.utils._compilation_metrics
    monkeypatch.setattr(torch._dynamo.utils, "_compilation_metrics",
                        deque((CompilationMetrics() for _ in range(kept.maxlen)), kept.maxlen))
    [found] = dynamic.find(program_of(Layer(), 4, 6))
    assert "expected 4, actual 6" in found.reason


@unit
def test_what_is_another_program_for_each_length_is_compiled_for_each():
    [found] = dynamic.find(program_of(ByLength(), 4, 6, 8))
    assert "with dynamic=True 3 times" in found.reason and found.why_not == "it compiles no less often"


@unit
def test_what_can_not_run_at_other_lengths_is_said():
    [found] = dynamic.find(program_of(Broken(), 4, 6))
    assert found.why_not.startswith("Dynamo can't run it: ")


@unit
@pytest.mark.parametrize("lengths", [(4,), (4, 4)])
def test_of_one_shape_there_is_nothing(lengths):
    assert dynamic.find(program_of(Layer(), *lengths)) == []


@unit
def test_what_is_compiled_already_is_left(fresh_dynamo):
    program = program_of(Layer(), 4, 6)
    program.model.layer.compile(backend="eager")
    assert dynamic.find(program) == []


@unit
@pytest.mark.parametrize("inference", [False, True])
def test_alone_both_are_timed(inference, monkeypatch, fresh_dynamo):
    monkeypatch.setattr(dynamic, "BACKEND", "eager")
    monkeypatch.setattr(dynamic.compiler, "missing", lambda device: "")
    program = program_of(Layer(), 4, 6)
    program.is_inference = inference
    [(where, words)] = dynamic.seen_alone(program)
    assert where == "dynamic=True" and "then all inputs together are " in words


@unit
def test_a_list_of_inputs_is_looked_at():
    inputs = [torch.randn(2, length, 8) for length in (4, 6)]
    looked = look(lambda: (Layer(), inputs), techniques=[dynamic.TECHNIQUE])
    assert len(looked.found[dynamic.TECHNIQUE]) == 1
