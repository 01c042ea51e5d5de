"""Inputs of several kinds, short ones and long ones: one is timed, all are judged."""
import textwrap

import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize
from benchmarks.assistant.loading import load
from benchmarks.assistant.proving import Prover
from benchmarks.assistant.source import Place
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Advice, Found, Technique
from common.outcome import UserError

SHORT, LONG = torch.randn(2, 5, 6), torch.randn(2, 9, 6)
SOURCE = """
    import torch
    from torch import nn

    def build():
        return nn.Sequential(Model()), [(torch.randn(2, 5, 6),), (torch.randn(2, 9, 6),)]

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(6, 6)

        def forward(self, x):
            return super().forward(x)
"""


def wrong_on_nine(plan):
    plan.changes.append(lambda model: model.register_forward_hook(
        lambda module, given, output: output * (1.01 if given[0].size(1) == 9 else 1.0)))


def of(change):
    return Technique("changed", "it changes something", lambda program: [Found(None, "", 1, "the call")], change)


@pytest.mark.integration
@pytest.mark.parametrize("given, is_wrong", [([(SHORT,), (LONG,)], True), ([(SHORT,), (SHORT[:1],)], False),
                                             ((SHORT,), False)])
def test_a_rung_is_judged_on_all_of_them(given, is_wrong, studies_in_seconds):
    result = optimize(nn.Linear(6, 6), given, quick=True, techniques=[of(wrong_on_nine)])
    [one] = result.opportunities
    assert (one.verdict == "unsafe") == is_wrong, one
    assert ("output on input 2 is off by 1.0e-02" in one.why) == is_wrong
    [line] = [line for line in str(result).splitlines() if line.startswith("inputs ")]
    assert line.endswith("float32 [2, 5, 6]") and ("judged too" in str(result)) == isinstance(given, list)


@pytest.mark.integration
def test_code_is_judged_on_all_of_them(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(textwrap.dedent(SOURCE))
    source = load(f"{path}:build")
    prover = Prover(source, Task.of(source()), torch.device("cpu"), seed=0)
    place = Place(str(path), 13)
    assert prover.why_not(Advice("return super().forward(x)", place)) == ""
    wrong = prover.why_not(Advice("return super().forward(x) + (x.size(1) == 9)", place))
    assert wrong.startswith("on input 2: the output is off by")


@pytest.mark.unit
@pytest.mark.parametrize("second, said", [((torch.randn(2, 5, 7),), "can't be called on these inputs"),
                                          ((3,), "hold no tensor"),
                                          ((SHORT.int().float().to(torch.float8_e4m3fn),), "inputs in float8")])
def test_a_second_that_is_no_input_is_told(second, said):
    with pytest.raises(UserError, match=said):
        optimize(nn.Linear(6, 6), [(SHORT,), second], quick=True)
