"""What a person's file, model or patience can do to the assistant: a line, or a stated status, each."""
import re
import signal

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.assistant import optimize
from benchmarks.assistant.optimize import Interrupted
from benchmarks.assistant.technique import Found, Technique
from benchmarks.assistant.techniques import fused_qkv
from common.measure.session import Session
from common.signals import Terminated

ONE = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
    def forward(self, x):
        {}
def build():
    return Model(), (torch.randn(4, 8),)
"""


@pytest.mark.unit
@pytest.mark.parametrize("source, said", [
    ("def build():\n    return [][3]", ["build() of", "IndexError: list index out of range", "my_model.py:2 in build"]),
    ("def build():\n    return 3", ["build() returned a int"]),
    ("import torch\ndef build():\n    return torch.nn.Linear(2, 2), (3,)", ["hold no tensor"]),
    ("import torch\ndef build():\n    return torch.sin, (torch.ones(2),)", ["give a torch.nn.Module"]),
    ("import torch\ndef build():\n    return torch.nn.Linear(3, 2), (torch.ones(2, 2),)", ["can't be called"]),
    ("import torch\ndef build():\n    return torch.nn.Linear(2, 2, device='meta'), (torch.ones(2, 2),)",
     ["cpu, meta: move them to one device"]),
    ("import torch\ndef build():\n    return torch.nn.Linear(2, 2), (torch.ones(2, 2),), lambda y: y",
     ["loss gives no scalar"]),
    (ONE.format("return {self}"), ["the output", "can't be compared"]),
    (ONE.format("return self.linear(x.mul_(2))"), ["changes input 0 in place"]),
    (ONE.format("self.calls += 1\n        return self.linear(x)[:self.calls % 3]"),
     ["of shape (1, 8), and of (2, 8) in the next call"]),
    (ONE.format("return self.linear(x[x[:, 0] < x[:, 1]])").replace("randn(4, 8)", "arange(32.0).view(4, 8)"),
     ["of shape (4, 8), and of (0, 8) for other values of the inputs: give a loss"]),
    ("import torch\ndef build():\n    x = torch.eye(2).to_sparse()\n    return torch.nn.Linear(2, 2), (x,)",
     ["input 0 is of layout torch.sparse_coo: give dense inputs, and that one as a buffer"]),
])
def test_what_build_gets_wrong_is_reported(assistant, source, said):
    status, out, err = assistant(source)
    assert status == 1 and not out
    assert all(words in err for words in said), err


@pytest.mark.unit
def test_a_file_that_can_not_be_imported_says_where(assistant):
    status, _, err = assistant("import nothing_of_that_name\ndef build():\n    pass")
    assert status == 2 and "can't be imported: ModuleNotFoundError" in err and "my_model.py:1" in err
    assert "loading.py" not in err and "frozen" not in err


@pytest.mark.unit
def test_a_model_larger_than_memory_has_the_status_of_that(assistant):
    status, out, err = assistant(ONE.format("return self.linear(x) + torch.empty(1 << 45)[:8]"))
    assert status == 3 and not out
    assert "the model does not fit" in err and err.count("\n") == 1


@pytest.mark.integration
@pytest.mark.parametrize("body, said", [
    ("if x.dtype == torch.float64: raise RuntimeError('no double')\n        return self.linear(x)",
     "the reference in float32, no oracle: RuntimeError: no double"),
    ("build.calls = getattr(build, 'calls', 0) + 1\n        return self.linear(x) * build.calls", "unproven in "),
    ("self.calls = getattr(self, 'calls', 0) + 1\n        return self.linear(x) * self.calls",
     "truth FP64; a call depends on what earlier ones left in attributes"),
    ("return torch.softmax(x @ x.mT, -1) @ x + 0 * self.linear.weight.sum()", "its scores have no batch"),
])
def test_what_can_not_be_told_is_stated(assistant, body, said):
    status, out, err = assistant(ONE.format(body), "--only", "sdpa", "--only", "autocast")
    assert status == 0, err
    assert said in " ".join(out.split())


class Branches(nn.Module):
    """A tied layer, a frozen one, and one with a hook, on one input."""

    def __init__(self):
        super().__init__()
        self.tied, self.other, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.tied.weight
        self.frozen.requires_grad_(False)
        self.frozen.register_forward_hook(lambda module, given, returned: 2 * returned)

    def forward(self, x):
        return self.tied(x).tanh() + self.other(x).sin() + self.frozen(x)


@pytest.mark.integration
def test_ties_frozen_parameters_and_hooks_are_kept(studies_in_seconds):
    torch.manual_seed(0)
    model = Branches()
    before = {name: t.detach().clone() for name, t in model.named_parameters()}
    (one,) = optimize(model, (torch.randn(4, 8),), quick=True, techniques=[fused_qkv.TECHNIQUE]).opportunities
    assert one.verdict in ("take", "no gain"), one
    assert model.other.weight is model.tied.weight and not model.frozen.weight.requires_grad
    assert len(model.frozen._forward_hooks) == 1
    assert all(torch.equal(t, before[name]) and t.grad is None for name, t in model.named_parameters())


@pytest.mark.integration
def test_a_model_without_parameters_is_taken(studies_in_seconds):
    result = optimize(nn.Softmax(-1), (torch.randn(4, 8),), quick=True, techniques=[fused_qkv.TECHNIQUE])
    assert result.opportunities == [] and "0 parameters" in str(result)


@pytest.mark.integration
def test_what_ctrl_c_did_not_let_be_timed_was_not_reached(assistant, monkeypatch):
    """No verdict says of a technique that it can't run here, or that it gains nothing."""
    def interrupted(self, group, keep=False):
        raise KeyboardInterrupt
    monkeypatch.setattr(Session, "measure", interrupted)
    status, out, err = assistant(ONE.format("return self.linear(x).sin()"), "--only", "autocast", "--only", "compile")
    assert status == 130, err
    for technique in ("autocast", "compile"):
        assert re.search(rf"^{technique} +the call .* not reached$", out, re.MULTILINE), out


@pytest.mark.integration
@pytest.mark.parametrize("by, is_climbed", [(KeyboardInterrupt(), False), (ValueError("a fault"), False), (None, True)])
def test_a_ladder_that_did_not_come_to_its_end_is_known(by, is_climbed, studies_in_seconds, monkeypatch):
    """What may gain on it is undecided then."""
    measure = Session.measure

    def measured(self, group, keep=False):
        if by and group.cases[0].variant["measured"] == "together":
            raise by
        measure(self, group, keep)
    monkeypatch.setattr(Session, "measure", measured)
    same = [Technique(name, "", lambda program: [Found(None, "", 1, "it is so")], lambda plan: None) for name in "ab"]
    try:
        result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, techniques=same)
    except Interrupted as ended:
        result = ended.result
    assert result.is_climbed == is_climbed
    assert bool(result.ladder) == is_climbed and bool(result.faults) == isinstance(by, ValueError)


@pytest.mark.integration
@pytest.mark.parametrize("by, status, word", [
    (KeyboardInterrupt(), 130, "interrupted"), (Terminated(signal.SIGTERM), 143, "terminated")],
    ids=["Ctrl-C", "timeout"])
def test_what_is_done_is_kept(assistant, monkeypatch, tmp_path, by, status, word):
    """Here amid the ladder, while the compiler traces: what each technique gains alone is there."""
    measure = Session.measure

    def interrupted(self, group, keep=False):
        if group.cases[0].variant["measured"] == "together":
            FakeTensorMode().__enter__()                   # which a signal can leave on
            raise by
        measure(self, group, keep)
    monkeypatch.setattr(Session, "measure", interrupted)
    ended, out, err = assistant(ONE.format("return self.linear(x) + self.linear(x).sin()"), "--only", "autocast",
                                "--only", "compile", "--report", tmp_path / "report.md")
    assert ended == status and f"assistant: {word}" in err
    assert "| autocast " in (tmp_path / "report.md").read_text()
    assert re.search(r"^it was interrupted: .*\nwall time \d+ s: ", out, re.MULTILINE) and "fault" not in out
    for technique in ("autocast", "compile"):
        assert re.search(rf"^{technique} +the call .*\d+\.\d\d \[", out, re.MULTILINE), out
