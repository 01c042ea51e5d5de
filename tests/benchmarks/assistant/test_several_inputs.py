"""Inputs of several kinds, short ones and long ones: all are judged and timed, and a verdict is on all of them."""
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize, verdicts
from benchmarks.assistant.loading import load
from benchmarks.assistant.proving import Prover
from benchmarks.assistant.rungs import Rungs
from benchmarks.assistant.source import Place
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Advice, Found, Technique
from benchmarks.measure.checks import Check, Judgement
from benchmarks.measure.names import THE_CALL
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


def same(plan):
    """Nothing is changed."""


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


def timed(result, ms):
    """The same result, as if those times had been measured: (where, case) -> milliseconds."""
    for (where, case), each in ms.items():
        row = result.timed_on_each[where].results[case].rows[result.mode, "eager"]
        row.timing = replace(row.timing, samples=[each] * len(row.timing.samples))
    result.opportunities = verdicts.opportunities(result)
    return result


@pytest.mark.integration
@pytest.mark.parametrize("short, long, verdict", [
    (2.0, 16.0, "by hand"),                # it gains on both
    (8.0, 8.0, "by hand"),                 # on the long one, and more than it loses on the short one
    (1.0, 64.0, "no gain"),                # on the short one, and less than it loses on the long one
    (6.0, 40.0, "no gain")])               # on none
def test_a_verdict_is_on_a_call_with_each_of_them(short, long, verdict, studies_in_seconds):
    result = optimize(nn.Linear(6, 6), [(SHORT,), (LONG,)], quick=True, inference=True, techniques=[of(same)])
    timed(result, {("on input 1", "as it is"): 4.0, ("on input 2", "as it is"): 32.0,
                   ("on input 1", "changed"): short, ("on input 2", "changed"): long})
    [one] = result.opportunities
    assert one.verdict == verdict and one.speedup == pytest.approx(36 / (short + long)), one
    gains = result.gains_on_each(next(iter(result.looked.found)))
    assert [gains[f"on input {number}"][0] for number in (1, 2)] == pytest.approx([4 / short, 32 / long])
    only_one = (short > 4) != (long > 32)
    assert ("it loses on input 1: 0.50 [0.50, 0.50]" in one.why) == (only_one and short > 4)
    assert ("it loses on input 2: 0.50 [0.50, 0.50]" in one.why) == (only_one and long > 32)
    assert ("the crossover lies between 60 and 108 elements of input" in one.why) == only_one
    assert "on each of the inputs, alone" in str(result)


@pytest.mark.integration
@pytest.mark.parametrize("ms, verdict", [(3.9, "by hand"), (3.95, "no gain")])
def test_a_gain_on_all_of_them_counts_from_two_percent(ms, verdict, studies_in_seconds):
    """Whatever the ladder says, which stands on the first."""
    techniques = [of(same), replace(of(same), name="other")]
    result = optimize(nn.Linear(6, 6), [(SHORT,), (LONG,)], quick=True, inference=True, techniques=techniques)
    result.ladder = [replace(added, gain=(2.0, 1.9, 2.1), left_out=(0.5, 0.4, 0.6)) for added in result.ladder]
    timed(result, {(where, case): ms if case == "changed" else 4.0 for where in ("on input 1", "on input 2")
                   for case in ("changed", "as it is", "other")})
    one = next(each for each in result.opportunities if each.technique == "changed")
    assert one.verdict == verdict
    assert ("in the ladder's rounds it is 2.00 [1.90, 2.10] on input 1" in one.why) == (verdict == "no gain")


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
def test_a_second_that_is_no_input_is_reported(second, said):
    with pytest.raises(UserError, match=said):
        optimize(nn.Linear(6, 6), [(SHORT,), second], quick=True)


@pytest.mark.unit
@pytest.mark.parametrize("passed, elsewhere, known", [(True, True, True), (True, False, False), (True, None, False),
                                                      (False, True, False)])
def test_a_rung_is_judged_again_unless_it_passed_on_all_inputs(passed, elsewhere, known):
    """Where it is wrong on the second of two, another rung on top of it would be blamed."""
    def judgement(is_right):
        return Judgement([Check(THE_CALL, "meaning", is_right, True, 0.0, 1.0, "")], "FP64")
    result = SimpleNamespace(judgements={"a": judgement(passed)}, judgements_on_others={})
    if elsewhere is not None:
        result.judgements_on_others["a", "on input 2"] = judgement(elsewhere)
    rungs = SimpleNamespace(result=result, other_truths={"on input 2": None})
    assert (Rungs._passed_before(rungs, "a") is result.judgements["a"]) == known
    assert Rungs._passed_before(rungs, "b") is None
