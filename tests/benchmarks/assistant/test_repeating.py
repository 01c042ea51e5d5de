"""A model that can't be called again and again, as timing does, is refused in a line that names what it keeps."""
import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize
from benchmarks.assistant.repeating import graphs_named, refuse_growing
from benchmarks.assistant.task import Task
from benchmarks.measure.calls import Inputs
from common.outcome import UserError

unit = pytest.mark.unit
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Growing(nn.Module):
    """Every call works on all rows that came before."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows = nn.Linear(4, 4), []

    def forward(self, x):
        self.rows.append(x.detach())
        return self.layer(torch.cat(self.rows)).sum(0)


class Logging(nn.Module):
    """A list grows, and the work stays the same."""

    def __init__(self):
        super().__init__()
        self.layer, self.norms = nn.Linear(4, 4), []

    def forward(self, x):
        y = self.layer(x)
        self.norms.append(y.detach().norm())
        return y


class Recurrent(nn.Module):
    """Its state has the graph of the call before."""

    def __init__(self):
        super().__init__()
        self.layer, self.h = nn.Linear(4, 4), None

    def forward(self, x):
        self.h = torch.tanh(self.layer(x) + (0 if self.h is None else self.h))
        return self.h


@unit
@pytest.mark.parametrize("inference", [False, True])
def test_a_model_whose_work_grows_is_refused(inference):
    model = Growing()
    with pytest.raises(UserError, match=r"each call works on more than the one before \(rows\): empty it where"):
        optimize(model, (X,), inference=inference)
    assert model.rows == []


@unit
@pytest.mark.parametrize("model", [Logging(), Recurrent(), nn.BatchNorm1d(4)])
def test_one_whose_work_stays_the_same_is_not(model):
    refuse_growing(model, Inputs.of((X,)))
    Task(model, (X,)).check_calls()


@unit
def test_a_graph_that_is_kept_is_named():
    model = Recurrent()
    with pytest.raises(UserError, match=r"a second backward fails: the model keeps a graph between its calls \(h\);"):
        optimize(model, (X,))
    assert model.h is None


@unit
def test_another_error_of_a_backward_passes():
    with pytest.raises(RuntimeError, match="of its own"), graphs_named(Logging()):
        raise RuntimeError("of its own")
