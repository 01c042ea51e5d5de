"""Inputs of several kinds, short ones and long ones: all are judged and timed, and a verdict is on all of them."""
import textwrap
import time

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
    assert line.endswith("float32 [2, 5, 6]") and ("on input 2" in str(result)) == isinstance(given, list)


class Sleeping(nn.Linear):
    """It takes so many seconds on inputs of each length."""

    def __init__(self, seconds):
        super().__init__(6, 6)
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds[x.size(1)])
        return super().forward(x)


def sleeping(seconds):
    """A technique that changes them."""
    return of(lambda plan: plan.changes.append(lambda model: setattr(model, "seconds", seconds)))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("short, long, verdict", [
    (0.002, 0.016, "by hand"),             # it gains on both
    (0.008, 0.008, "by hand"),             # on the long one, and more than it loses on the short one
    (0.001, 0.064, "no gain"),             # on the short one, and less than it loses on the long one
    (0.004, 0.032, "no gain")])            # on none
def test_a_verdict_is_on_a_call_with_each_of_them(short, long, verdict, studies_in_seconds):
    before, after = {5: 0.004, 9: 0.032}, {5: short, 9: long}
    result = optimize(Sleeping(before), [(SHORT,), (LONG,)], quick=True, inference=True, techniques=[sleeping(after)])
    [one] = result.opportunities
    assert one.verdict == verdict, one
    assert one.speedup == pytest.approx(0.036 / (short + long), rel=0.2)
    gains = result.gains_on_each(next(iter(result.looked.found)))
    assert gains["on input 1"][0] == pytest.approx(0.004 / short, rel=0.3)
    assert gains["on input 2"][0] == pytest.approx(0.032 / long, rel=0.3)
    assert ("it loses on input 1: 0.5" in one.why) == (short > 0.004)
    assert ("it loses on input 2: 0.5" in one.why) == (long > 0.032)
    crosses = (short > 0.004) != (long > 0.032)
    assert ("the crossover lies between 60 and 108 elements of input" in one.why) == crosses
    assert "on each of the inputs, alone" in str(result)


@pytest.mark.integration
def test_what_is_wrong_in_a_timed_call_on_one_of_them_is_unsafe(studies_in_seconds):
    """From its eighth call on the long one: until then it was judged."""
    def cheats(plan):
        calls = []

        def hook(module, given, output):
            if given[0].size(1) == 9:
                calls.append(1)
            return output * (2.0 if len(calls) > 7 else 1.0)
        plan.changes.append(lambda model: model.register_forward_hook(hook))
    result = optimize(nn.Linear(6, 6), [(SHORT,), (LONG,)], quick=True, techniques=[of(cheats)])
    [one] = result.opportunities
    assert one.verdict == "unsafe" and "a timed call" in one.why, one


class Refusing(nn.Linear):
    def forward(self, x):
        if x.size(1) == 9 and getattr(self, "refuses", False):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().forward(x)


@pytest.mark.integration
def test_what_fails_on_one_of_them_is_told_with_it(studies_in_seconds):
    refuses = of(lambda plan: plan.changes.append(lambda model: setattr(model, "refuses", True)))
    result = optimize(Refusing(6, 6), [(SHORT,), (LONG,)], quick=True, techniques=[refuses])
    [one] = result.opportunities
    assert one.verdict == "not here" and one.why.startswith("on input 2: oom"), one


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
