"""Models that ask whether they are compiled: what is read, and what a rung runs, is the branch that runs in it."""
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.techniques import compiled, host_sync, library_gelu
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import observe

pytestmark = pytest.mark.integration
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
GELU = library_gelu.TECHNIQUE


class Branching(nn.Module):
    """By hand where it is not compiled; with a sine more where it is, which no right model would have."""

    def __init__(self, asks=torch.compiler.is_compiling):
        super().__init__()
        self.linear, self.asks = nn.Linear(8, 8), asks

    def forward(self, x):
        x = self.linear(x)
        if self.asks():
            return F.gelu(x, approximate="tanh") + 0.1 * torch.sin(x)
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def operations(program):
    return {str(node.target) for graph in program.graphs for node in graph.nodes}


@pytest.mark.parametrize("asks", [torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling],
                         ids=["compiling", "by Dynamo"])
def test_the_branch_that_runs_is_read_and_rewritten(asks):
    model = Branching(asks)
    program = read(model, Inputs.of(X))
    assert program.has_branches and len(GELU.find(program)) == 1
    rung = Rung(model, [GELU])
    assert validate(rung, model, (X,)).passed
    rung(X)
    ran = observe(lambda: rung(X), X.device)
    assert ran["aten::gelu"] and not ran["aten::tanh"] and not ran["aten::sin"], ran


def test_what_is_compiled_takes_its_own_branch(monkeypatch):
    monkeypatch.setattr("benchmarks.assistant.rewriting.compile_fx", lambda module, inputs: module.forward)
    model = Branching()
    rung = Rung(model, [compiled.TECHNIQUE])
    assert observe(lambda: rung(X), X.device)["aten::sin"]
    assert not validate(rung, model, (X,)).passed
    [found] = compiled.TECHNIQUE.find(read(model, Inputs.of(X)))
    assert "the model asks whether it is being compiled" in found.reason


@pytest.mark.parametrize("compile_it", [lambda model: model.compile() or model,
                                        lambda model: nn.Sequential(torch.compile(model))], ids=["whole", "in part"])
def test_of_a_model_that_came_compiled_the_compiled_branch_is_read(compile_it):
    program = read(compile_it(Branching()), Inputs.of(X))
    assert program.has_branches and GELU.find(program) == []
    assert any("sin" in name for name in operations(program))


def test_a_break_that_only_uncompiled_code_has_is_none():
    class Talking(nn.Linear):
        def forward(self, x):
            if not torch.compiler.is_compiling() and float(x.sum()) > 1e9:
                print("large")
            return super().forward(x)
    program = read(Talking(8, 8), Inputs.of(X))
    assert program.has_branches and not program.breaks and not program.not_captured
    assert any(call.name == "float" or "item" in call.name or call.name == "__float__" for call in program.trace.calls)
    [wait] = host_sync.find(program)
    assert wait.reason.endswith("the host waits for it; compiled code takes another branch, and does not wait there")


def test_of_a_wait_that_breaks_the_graph_compiled_code_is_not_named():
    class Waiting(nn.Linear):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) < 1e9 else x
    program = read(Waiting(8, 8), Inputs.of(X))
    [wait] = host_sync.find(program)
    assert program.breaks and wait.reason.endswith("the host waits for it")


def test_a_copy_to_the_host_is_compiled_too():
    class Copying(nn.Linear):
        def forward(self, x):
            return super().forward(x).cpu() + 1
    program = read(Copying(8, 8), Inputs.of(X))
    [wait] = host_sync.find(program)
    assert not program.breaks and wait.reason.endswith("the host waits for it")


class ByHand(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


@torch.library.custom_op("test_branches::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x):
    raise RuntimeError("Expected BFloat16")


twice.register_autograd(lambda ctx, gradient: 2 * gradient)


class OfAnOperatorWithoutAFake(nn.Module):
    """Runs, and can't be captured whole; with `asks`, what is compiled takes another way, and can."""

    def __init__(self, asks):
        super().__init__()
        self.linear, self.gelu, self.asks = nn.Linear(8, 8), ByHand(), asks

    def forward(self, x):
        x = self.gelu(self.linear(x))
        return 2 * x if self.asks and torch.compiler.is_compiling() else twice(x)


@pytest.mark.parametrize("asks", [True, False])
def test_around_an_operator_that_cannot_be_captured_the_rest_is_read_and_rewritten(asks, fresh_dynamo):
    model = OfAnOperatorWithoutAFake(asks)
    program = read(model, Inputs.of(X))
    assert [found.place.function for found in GELU.find(program)] == ["ByHand.forward"]
    assert bool(program.not_captured) != asks, "what torch.compile itself can't run is said"
    rung = Rung(model, [GELU])
    assert validate(rung, model, (X,)).passed
    rung(X)
    ran = observe(lambda: rung(X), X.device)
    assert ran["aten::gelu"] and not ran["aten::tanh"], ran


def test_torchs_own_code_is_answered_as_ever():
    """FlexAttention compiles itself where nobody else does."""
    class Flexible(nn.Linear):
        def forward(self, x):
            x = super().forward(x)[:, None]
            return flex_attention(x, x, x)
    with torch.no_grad():
        program = read(Flexible(16, 16), Inputs.of(torch.randn(2, 8, 16)), inference=True)
    assert not program.has_branches and len(program.graphs) == 1


def test_afterwards_dynamo_answers_yes():
    read(Branching(), Inputs.of(X))
    seen = []
    torch.compile(Branching(), backend=lambda module, inputs: seen.append(module) or module.forward)(X)
    assert any("sin" in str(node.target) for node in seen[0].graph.nodes)
