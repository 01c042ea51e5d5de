"""Models that can't run on inputs which take a gradient: they are read and judged on such as take none."""
import pytest
import torch
from torch import nn

from benchmarks.assistant import look, optimize, why
from benchmarks.assistant.task import Task
from benchmarks.assistant.techniques import autocast, channels_last, compiled
from benchmarks.measure.calls import Step
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
    for inputs in (task.given, *task.others.values(), task.given.first(2), task.given.off_by_a_rounding(0, Step())):
        [x] = inputs.copies().named().values()
        assert x.requires_grad != is_constant


class Derivative(nn.Module):
    """Of its own output by its input, as a network that solves an equation has it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x = x.requires_grad_()
        value = self.layers(x)
        derivative, = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value + derivative.sum(-1, keepdim=True)


@pytest.mark.integration
@pytest.mark.parametrize("inference", [False, True])
def test_a_model_that_computes_gradients_itself_always_has_them(inference, studies_in_seconds):
    task = Task(Derivative(), given()).as_it_can_run()
    assert task.needs_gradients and task.given.copies().need_gradients
    assert not Task(nn.Linear(8, 8), given()).as_it_can_run().needs_gradients
    found = optimize(Derivative(), given(), techniques=[autocast.TECHNIQUE], quick=True, inference=inference)
    assert not found.failures
    assert found.judgements["autocast"].passed and found.truth.startswith("FP64")


class Follows(nn.Module):
    """A target follows the online layer with a momentum, in place or in other memory."""

    def __init__(self, moves):
        super().__init__()
        self.online, self.target, self.moves = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), moves

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                followed = own.data * 0.9 + other.data * 0.1
                if self.moves:
                    own.data = followed
                else:
                    own.data.copy_(followed)
            follows = self.target(x)
        return self.online(x) - follows


@pytest.mark.integration
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("called", [
    lambda model: optimize(model, given(), techniques=[autocast.TECHNIQUE], quick=True),
    lambda model: look(model, given()), lambda model: why("autocast", model, given())], ids=["optimize", "look", "why"])
def test_a_model_whose_calls_write_to_its_parameters_is_measured_and_restored(called, moves, studies_in_seconds):
    model = Follows(moves)
    before = {name: t.detach().clone() for name, t in model.named_parameters()}
    found = called(model)
    assert all(torch.equal(t, before[name]) for name, t in model.named_parameters())
    if hasattr(found, "judgements"):
        [one] = found.opportunities
        assert not found.failures and one.speedup and found.judgements["autocast"].passed


class KeepsResults(nn.Module):
    """A hook keeps what a layer gave, with its graph."""

    def __init__(self):
        super().__init__()
        self.conv, self.seen = nn.Conv2d(3, 8, 3), {}
        self.conv.register_forward_hook(lambda module, given, output: self.seen.__setitem__("conv", output))

    def forward(self, x):
        self.conv(x)
        return self.seen["conv"].mean((2, 3))


@pytest.mark.integration
def test_a_model_that_keeps_results_with_their_graph_is_copied(studies_in_seconds):
    model, x = KeepsResults(), torch.randn(2, 3, 8, 8)
    model(x)
    found = optimize(model, (x,), techniques=[channels_last.TECHNIQUE], quick=True)
    assert not found.failures and found.judgements["channels-last"].passed


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
