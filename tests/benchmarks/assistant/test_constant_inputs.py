"""Models that can't run on inputs which take a gradient: they are read and judged on such as take none."""
import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize
from benchmarks.assistant.task import Task
from benchmarks.assistant.techniques import compiled
from benchmarks.measure.names import Kind


class SetsIt(nn.Module):
    """As Wav2Vec2 in transformers does before it checkpoints."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        hidden = x[:, None]
        hidden.requires_grad = True
        return self.linear(hidden.relu())


class Raises(SetsIt):
    def forward(self, x):
        raise ValueError("never")


def given():
    torch.manual_seed(0)
    return torch.randn(4, 8),


@pytest.mark.unit
@pytest.mark.parametrize("model, is_constant", [(SetsIt(), True), (nn.Linear(8, 8), False), (Raises(), False)])
def test_inputs_are_constant_where_the_model_runs_on_such_alone(model, is_constant):
    task = Task(model, [given(), given()]).as_it_can_run()
    assert task.has_constant_inputs == is_constant
    for inputs in (task.given, *task.others.values(), task.given.first(2), task.given.off_by_a_rounding(0)):
        [x] = inputs.copies().named().values()
        assert x.requires_grad != is_constant


@pytest.mark.unit
def test_what_does_not_fit_is_no_reason(monkeypatch):
    model = nn.Linear(8, 8)
    monkeypatch.setattr(model, "forward", lambda x: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    assert not Task(model, given()).as_it_can_run().has_constant_inputs


@pytest.mark.integration
def test_such_a_model_is_judged_and_the_report_says_of_what_not(studies_in_seconds):
    found = optimize(SetsIt(), given(), techniques=[compiled.TECHNIQUE], rounds=4)
    assert "; without gradients of the inputs, which the model does not take" in str(found)
    judgement = found.judgements["compile"]
    kinds = {check.of.kind for check in judgement}
    assert judgement.passed and Kind.PARAMETER_GRADIENT in kinds
