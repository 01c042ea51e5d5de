"""Which verdict a gain and a judgement lead to."""
import math
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.assistant import ladder as ladders
from benchmarks.assistant import optimize, optimized, rungs, spending, trials, verdicts
from benchmarks.assistant.combination import Combination, Measured
from benchmarks.assistant.optimized import Optimized
from benchmarks.assistant.payback import pays_after
from benchmarks.assistant.side_by_side import WORTH_IT
from benchmarks.assistant.technique import Advice, Found, Technique
from benchmarks.assistant.trials import SLOWER, Added
from benchmarks.measure.checks import Check, Judgement
from benchmarks.measure.names import gradient_of, output
from benchmarks.records import AS_IT_IS
from benchmarks.show import assistants
from common.report.record_file import RecordFile
from common.report.result import Compilation, Result, Row
from common.runtime.iteration import BOTH, FORWARD
from common.runtime.timing import Timing
from common.text import ratio

RIGHT = Check(output("output"), "precision", True, True, 1e-7, 2e-6, "rounding of float32")
ROUGH = Check(output("output"), "precision", True, True, 1e-3, 2e-6, "less accurate, as is float16", "float16")


def gain(low: float) -> tuple[float, float, float]:
    return (low + 0.01, low, low + 0.02)


@pytest.mark.unit
@pytest.mark.parametrize("checks, numerics, verdict", [
    ([RIGHT], None, "take"), ([RIGHT], "tf32", "different numerics"), ([RIGHT, ROUGH], None, "different numerics")])
def test_only_what_rounds_as_the_model_does_is_taken(checks, numerics, verdict):
    judgement = Judgement(checks, "FP64", numerics=numerics)
    assert verdicts._worth(judgement, gain(1.5), None)[0] == verdict


@pytest.mark.unit
@pytest.mark.parametrize("low, verdict", [(1.019, "no gain"), (1.021, "take")])
def test_a_gain_counts_from_its_lower_end(low, verdict):
    assert verdicts._worth(Judgement([RIGHT], "FP64"), gain(low), None)[0] == verdict


@pytest.mark.unit
@pytest.mark.parametrize("high, others, verdict, why", [
    (1.019, 0, "no gain", "measured twice, the two differ: in the ladder's rounds it is 1.10 [1.05, 1.15]"),
    (1.021, 0, "take", "not alone, but in the ladder's rounds"), (0.7, 1, "take", "not alone, but on top of t0")])
def test_what_is_slower_alone_and_faster_in_the_next_rounds_is_not_taken(high, others, verdict, why):
    """The first of the ladder is the same rung as alone: noise between two measurements is no gain."""
    techniques = tuple(Technique(f"t{place}", "", lambda program: ()) for place in range(others + 1))
    added = Added(techniques[-1], Combination(techniques), (1.1, 1.05, 1.15))
    assert verdicts._worth(Judgement([RIGHT], "FP64"), (0.65, 0.6, high), added) == (verdict, why)


@pytest.mark.unit
@pytest.mark.parametrize("others, why", [(1, "on top of t0 it is 0.78 [0.77, 0.79]"), (0, "")])
def test_what_gains_nothing_on_top_of_others_either_is_said(others, why):
    techniques = tuple(Technique(f"t{place}", "", lambda program: ()) for place in range(others + 1))
    added = Added(techniques[-1], Combination(techniques), (0.78, 0.77, 0.79))
    assert verdicts._worth(Judgement([RIGHT], "FP64"), (0.87, 0.86, 0.88), added) == ("no gain", why)


def ladder(*times: float | None) -> list[Added]:
    """Of so many techniques: how many times as fast all are as all but this one, at most."""
    made = []
    for place, high in enumerate(times):
        technique = Technique(f"t{place}", "", lambda program: ())
        left_out = None if high is None else (high - 0.01, high - 0.02, high)
        made.append(Added(technique, Combination((technique,)), None, left_out))
    return made


@pytest.mark.unit
@pytest.mark.parametrize("times, place", [
    ((0.98,), 0), ((0.981,), None), ((1.2, 0.9, 1.0), 1), ((0.8, 0.7), 1), ((None, 0.7, None), 1), ((None, None), None),
    ((), None)])
def test_one_that_slows_all_the_others_down_is_in_the_way(times, place):
    made = ladder(*times)
    found = verdicts._in_the_way(made)
    assert found is (None if place is None else made[place])


class Waiting(nn.Module):
    """It waits where it should not, far longer than what a busy machine adds to it."""

    def __init__(self):
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), 0.05

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


def at_once(plan):
    plan.changes.append(lambda model: setattr(model, "seconds", 0.0))


@pytest.mark.integration
@pytest.mark.parametrize("fired, verdict, why", [
    ("", "take", "it launches 3 more"),
    ("no fused kernel ran", "no gain",
     "it did not fire: no fused kernel ran; what was measured with it has another reason")])
def test_what_did_not_fire_is_no_take(fired, verdict, why, studies_in_seconds):
    technique = Technique("quick", "", lambda program: [Found(None, "", 1, "it waits")], at_once,
                          lambda program, found: Advice("model.seconds = 0"), fired=lambda *_: fired,
                          remark=lambda *_: "it launches 3 more")
    [one] = optimize(Waiting(), (torch.randn(4, 8),), quick=True, techniques=[technique]).opportunities
    assert (one.verdict, one.why) == (verdict, why) and one.speedup > 1.5
    assert bool(one.advice) == (verdict == "take")


class WaitingTwice(Waiting):
    """Once where it may."""

    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)


@pytest.mark.integration
def test_what_gains_nowhere_is_asked_alone_whether_it_fired(studies_in_seconds, monkeypatch):
    """On top of torch.compile the library's kernels are fused into others: there a name says nothing."""
    asked = {}

    def shown(result, technique, added):
        asked[technique.name] = added
        return "", ""
    monkeypatch.setattr(verdicts, "_kernels_show", shown)
    monkeypatch.setattr(verdicts, "WORTH_IT", 1.3)         # six rounds of a busy machine may all be slower by less
    quick = Technique("quick", "", lambda program: [Found(None, "", 1, "it waits")], at_once,
                      lambda program, found: Advice("model.seconds = 0"))
    still = Technique("still", "", lambda program: [Found(None, "", 1, "it is there")], lambda plan: None)
    found = optimize(WaitingTwice(), (torch.randn(4, 8),), quick=True, techniques=[quick, still]).opportunities
    assert {one.technique: one.verdict for one in found} == {"quick": "take", "still": "no gain"}
    assert asked == {"quick": None, "still": None}


@pytest.mark.unit
def test_the_tensor_that_is_less_accurate_is_named():
    worse = Check(gradient_of("w"), "precision", True, True, 1e-2, 2e-6, "less accurate, as is bfloat16", "bfloat16")
    assert verdicts._less_accurate(Judgement([RIGHT, ROUGH, worse], "FP64")) == str(worse)
    assert verdicts._less_accurate(Judgement([RIGHT], "FP64")) == verdicts._less_accurate(None) == ""
    zero = Check(output("output"), "precision", True, True, math.inf, 0.0, "less accurate", "float16")
    assert verdicts._less_accurate(Judgement([zero, ROUGH], "FP64"))


@pytest.mark.unit
@pytest.mark.parametrize("below, counts", [([], True), ([(0.96, 0.95, 0.981)], True), ([(0.9, 0.8, 0.979)], False),
                                           ([(1.2, 1.1, 1.3), (0.5, 0.4, 0.6)], False), ([None], True)])
def test_a_gain_on_top_of_what_slows_the_model_down_is_none(below, counts):
    """That one is not taken: without it there may be nothing to gain."""
    techniques = [Technique(f"t{place}", "", lambda program: ()) for place in range(len(below) + 1)]
    ladder = [Added(each, Combination((each,)), gain) for each, gain in zip(techniques, [*below, (1.5, 1.4, 1.6)],
                                                                            strict=True)]
    found = verdicts._on_top(SimpleNamespace(ladder=ladder, dropped=[]), techniques[-1].name)
    assert found is (ladder[-1] if counts else None)
    assert verdicts._on_top(SimpleNamespace(ladder=ladder, dropped=[]), "another") is None


def measured(ms_by_name: dict[str, float], as_graphs: dict[str, float] | None = None) -> Measured:
    """Each took that long in all of eight rounds."""
    results = {name: Result(name, None, "float32", {}) for name in ms_by_name}
    for launch, times in {"eager": ms_by_name, "graph": as_graphs or {}}.items():
        for name, ms in times.items():
            results[name].rows[BOTH, launch] = Row(timing=Timing([ms] * 8, True, "rounds"))
    return Measured(results)


@pytest.mark.unit
@pytest.mark.parametrize("low, others, gains", [(1.021, 1, True), (1.019, 1, False), (1.0, 0, True)])
def test_what_rounds_more_and_gains_nothing_on_top_of_others_is_not_written(low, others, gains, monkeypatch):
    monkeypatch.setattr(trials, "WORTH_IT", WORTH_IT)
    techniques = tuple(Technique(f"t{place}", "", lambda program: ()) for place in range(others + 1))
    said = verdicts._rounds_for_nothing(Added(techniques[-1], Combination(techniques), gain(low)))
    assert said == ("" if gains else "on top of t0 it gains nothing, 1.03 [1.02, 1.04], and is not written beside it")
    assert verdicts._rounds_for_nothing(None) == ""


@pytest.mark.unit
@pytest.mark.parametrize("autocast_ms, gains_on", [(97.0, "autocast"), (99.0, None)])
def test_a_graph_gains_on_top_of_one_that_gains_itself(autocast_ms, gains_on):
    """Whose kernels are so short that launching them takes longer."""
    autocast, unsafe, plain = (Technique(name, "", lambda program: ()) for name in ("autocast", "unsafe", "plain"))
    graph = Technique("cuda-graph", "", lambda program: (), launch="graph")
    alone = measured({AS_IT_IS: 100.0, "autocast": autocast_ms, "unsafe": 50.0, "plain": 100.0},
                     as_graphs={AS_IT_IS: 100.0, "autocast": 20.0, "unsafe": 5.0, "plain": 10.0})
    every: dict[Technique, list] = {each: [] for each in (autocast, unsafe, plain, graph)}

    def gain_alone(each):
        return alone.gain(Combination((each,)), Combination(), BOTH)
    result = SimpleNamespace(alone=alone, looked=SimpleNamespace(found=every), mode=BOTH, gain_alone=gain_alone,
                             why_unsafe=lambda each: "it is wrong" if each is unsafe else "")
    found = verdicts._on_top_of_one(result, graph)
    assert (found and found.combination) == (Combination((autocast, graph)) if gains_on else None)
    assert found is None or found.gain == (4.85, 4.85, 4.85)


@pytest.mark.unit
@pytest.mark.parametrize("as_it_is, on_autocast, at_the_top, verdict, why", [
    (100.0, None, (1.021, 1.021), "take", "not alone, but on top of autocast + compile"),
    (100.0, None, (1.019, 1.019), "no gain", ""), (100.0, None, (0.9, 1.3), "no gain", ""),
    (95.0, None, (1.0, 1.0), "take", ""), (100.0, 1.5, (1.019, 1.019), "no gain", ""),
    (100.0, 1.5, (0.9, 1.3), "take", "not alone, but on top of autocast")])
def test_capturing_is_judged_on_top_of_all_that_is_written(as_it_is, on_autocast, at_the_top, verdict, why,
                                                           monkeypatch):
    """The model as it is keeps its GPU busy; what is written needs less time there than its host takes to launch it. A
    compiler may launch so few kernels that capturing them gains nothing more.
    """
    for bound, value in (("SLOWER", SLOWER), ("WORTH_IT", WORTH_IT)):
        monkeypatch.setattr(trials, bound, value)
    here = Found(None, "", 1, "")
    autocast, compiled = (Technique(name, "", lambda program: ()) for name in ("autocast", "compile"))
    graph = Technique("cuda-graph", "", lambda program: [here], lambda plan: None, lambda *_: Advice("capture"),
                      launch="graph")
    alone = measured({AS_IT_IS: 100.0, "autocast": 50.0}, as_graphs={AS_IT_IS: as_it_is, "autocast": 30.0})
    together = measured({"autocast + compile": 10.0}, as_graphs={"autocast + compile": 10.0})
    one_by_one = together.results["autocast + compile"].rows[BOTH, "eager"].timing
    one_by_one.samples[:] = [10 * each for each in at_the_top] * 4
    order = [autocast, graph, compiled] if on_autocast else [graph, autocast, compiled]
    gains = {"cuda-graph": gain(on_autocast or 1.0), "autocast": gain(2.0), "compile": gain(1.3)}
    ladder = [Added(each, Combination(tuple(order[:place + 1])), gains[each.name])
              for place, each in enumerate(order)]
    looked = SimpleNamespace(mode=BOTH, found={autocast: [], compiled: [], graph: [here]}, missing=lambda technique: "",
                             program=SimpleNamespace(model=nn.Linear(1, 1), inputs=None))
    result = Optimized(looked, "", alone=alone, together=together, ladder=ladder)
    one = verdicts._judged(result, graph, here)
    shown = {row[0]: row[-1] for row in result._climbed().rows}["+ cuda-graph"]
    every = Combination((autocast, compiled, graph))
    assert shown == optimized.interval(together.gain(every, every.without(graph), BOTH))
    why = why or (f"on top of autocast + compile it is {shown.removesuffix(' UNSURE')}" if verdict == "no gain" else "")
    assert (one.verdict, one.why, bool(one.advice)) == (verdict, why, True)


@pytest.mark.unit
@pytest.mark.parametrize("captured, verdict", [(9.0, "take"), (9.9, "not here"), (None, "not here")])
def test_what_waits_for_the_gpu_is_captured_once_it_is_compiled(captured, verdict, monkeypatch):
    """Of GPT-2's mask the compiled code asks nothing."""
    monkeypatch.setattr(trials, "WORTH_IT", WORTH_IT)
    autocast, compiled = (Technique(name, "", lambda program: ()) for name in ("autocast", "compile"))
    waits = Found(None, "", 1, "", why_not="the host waits")
    graph = Technique("cuda-graph", "", lambda program: [waits], launch="graph", advice=lambda *_: Advice("capture"))
    together = measured({AS_IT_IS: 100.0, "autocast": 50.0, "autocast + compile": 10.0},
                        as_graphs={"autocast + compile": captured} if captured else {})
    ladder = [Added(autocast, Combination((autocast,)), None), Added(compiled, Combination((autocast, compiled)), None)]
    found = {autocast: [], compiled: [], graph: [waits]}
    looked = SimpleNamespace(mode=BOTH, found=found, program=None, missing=lambda technique: "")
    result = Optimized(looked, "", together=together, ladder=ladder)
    one = verdicts._judged(result, graph, waits)
    assert one.verdict == verdict and one.speedup is None
    assert bool(one.advice) == (verdict == "take")
    assert one.why == ("the host waits; on top of autocast + compile it can be captured, 1.11 [1.11, 1.11] times as "
                       "fast as the fastest rung" if verdict == "take" else "the host waits")
    rows = [row[:2] for row in result._climbed().rows]
    assert rows == [["as it is", "100"], ["+ autocast", "50.0"], ["+ compile", "10.0"],
                    *[["+ cuda-graph", "9.00"]] * (verdict == "take")]
    fastest = result.fastest_rung()
    assert fastest.techniques == ((autocast, compiled, graph) if captured else (autocast, compiled))
    together.results["autocast"].rows[BOTH, "eager"] = Row(timing=Timing([9.0] * 8, True, "rounds"))
    assert verdicts._judged(result, graph, waits).verdict == "not here"            # compiled it is slower
    result.ladder = ladder[:1]
    assert verdicts._judged(result, graph, waits).verdict == "not here"


def waiting(share):
    return lambda plan: plan.changes.append(lambda model: setattr(model, "seconds", share * model.seconds))


def technique(name, share, is_partial=False, **others):
    found = Found(None, "", 1, "it waits", is_partial=is_partial)
    return Technique(name, "", lambda program: [found], waiting(share),
                     lambda program, found: Advice(f"model.seconds *= {share}"), **others)


@pytest.mark.integration
def test_beside_what_leaves_some_as_it_is_nothing_is_needless(studies_in_seconds):
    """Autocast has no list of an expert's grouped matmul: it stays in FP32, and gains by TF32."""
    techniques = [technique("tf32", 0.5), technique("autocast", 0.6, is_partial=True, instead_of="tf32")]
    result = optimize(Waiting(), (torch.randn(4, 8),), quick=True, techniques=techniques)
    assert {added.technique.name for added in result.ladder} == {"tf32", "autocast"}
    assert {advice.code for advice in result.to_write()} == {"model.seconds *= 0.5", "model.seconds *= 0.6"}
    assert not any("needless" in one.why for one in result.opportunities)


@pytest.mark.integration
def test_what_is_needless_beside_another_is_neither_climbed_nor_written(studies_in_seconds):
    tf32, autocast, third = (technique("tf32", 0.3), technique("autocast", 0.1, instead_of="tf32"),
                             technique("third", 0.2))
    result = optimize(Waiting(), (torch.randn(4, 8),), rounds=6, techniques=[tf32, autocast, third])
    by_name = {one.technique: one for one in result.opportunities}
    assert "tf32" not in {added.technique.name for added in result.ladder}
    assert by_name["tf32"].verdict == "take" and by_name["tf32"].advice
    assert by_name["tf32"].why == "needless beside autocast; instead of it write `model.seconds *= 0.3`"
    assert {advice.code for advice in result.to_write()} == {"model.seconds *= 0.1", "model.seconds *= 0.2"}
    assert tf32 not in result.taken().techniques and autocast in result.taken().techniques
    alone = optimize(Waiting(), (torch.randn(4, 8),), rounds=6, techniques=[tf32])
    assert [advice.code for advice in alone.to_write()] == ["model.seconds *= 0.3"]
    assert alone.opportunities[0].why == ""


@pytest.mark.integration
@pytest.mark.parametrize("quick, ms, many_calls, alone", [
    (True, 20.1, 1, True), (False, 20.1, 0, False), (True, 19.9, 1, False), (True, 19.9, 0, True)])
def test_in_a_hurry_a_large_model_is_tried_in_the_pass_that_counts_alone(quick, ms, many_calls, alone,
                                                                         studies_in_seconds, monkeypatch):
    """The model as it is, and a small one, in both."""
    spent, looking = spending.spending, sys.modules["benchmarks.assistant.look"]   # whose name is also a function's
    monkeypatch.setattr(looking, "spending", lambda *given: replace(spent(*given), total_ms=ms))
    monkeypatch.setattr(rungs, "MANY_CALLS", many_calls)                           # a linear layer calls one
    same = Technique("same", "", lambda program: [Found(None, "", 1, "it is so")], lambda plan: None)
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=quick, rounds=2, techniques=[same])
    rung = Combination((same,))
    assert result.alone.ms(Combination(), FORWARD) and result.alone.ms(Combination(), BOTH)
    assert result.alone.ms(rung, BOTH) and bool(result.alone.ms(rung, FORWARD)) != alone
    assert any(check.of.alone for check in result.judgements["same"]) != alone


def waiting_on_top(alone, on_top):
    """How long the model waits with it, as a share: alone, and where another has changed it."""
    def change(model):
        model.seconds *= on_top if vars(model).get("is_changed") else alone
        vars(model)["is_changed"] = True
    return lambda plan: plan.changes.append(change)


@pytest.mark.integration
@pytest.mark.parametrize("numerics, verdict, why", [
    (None, "no gain", "alone it gains, but on top of first it is 0."),
    ("bfloat16", "different numerics", "on top of first it gains nothing, 0.")])
def test_the_ladder_goes_on_without_what_slows_it(numerics, verdict, why, studies_in_seconds, monkeypatch, tmp_path):
    """What comes after it gains beside the others, and is written. The page shows the last ladder."""
    for bound, value in (("SLOWER", SLOWER), ("WORTH_IT", WORTH_IT)):
        monkeypatch.setattr(trials, bound, value)
    monkeypatch.setattr(assistants, "RESULTS", tmp_path)
    (tmp_path / "cpu").mkdir()

    def technique(name, alone, on_top, numerics=None):
        def apply(plan):
            waiting_on_top(alone, on_top)(plan)
            plan.numerics = numerics
        return Technique(name, "", lambda program: [Found(None, "", 1, "it waits")], apply,
                         lambda program, found: Advice(name))
    techniques = [technique("first", 0.3, 0.3), technique("second", 0.4, 2.0, numerics), technique("third", 0.5, 0.5)]
    result = optimize(Waiting(), (torch.randn(4, 8),), quick=True, techniques=techniques,
                      file=RecordFile(str(tmp_path / "cpu" / "assistant-waiting.jsonl")))
    by_name = {one.technique: one for one in result.opportunities}
    assert [added.technique.name for added in result.ladder] == ["first", "third"]
    assert [added.technique.name for added in result.dropped] == ["second"]
    assert by_name["second"].verdict == verdict and by_name["second"].why.startswith(why), by_name["second"]
    assert {advice.code for advice in result.to_write()} == {"first", "third"}
    gain = result.together.gain(result.fastest_rung(), Combination(), BOTH)
    assert gain and ratio(gain) in assistants.models()


@pytest.mark.unit
@pytest.mark.parametrize("high, captured, order, better", [
    (0.97, None, "it other", None), (0.97, None, "first it other", "first other"),
    (0.99, None, "first it other", None),
    (0.97, (1.2, 1.1, 1.3), "first it other", "first other"), (0.97, None, "first it graph", "first graph"),
    (0.97, (1.2, 1.1, 1.3), "first it graph", "first graph it"), (0.97, (1.2, 0.9, 0.98), "it graph", "graph it"),
    (0.97, (0.9, 0.8, 0.97), "first it graph", "first graph"),
    (0.97, (1.2, 1.1, 1.3), "graph it other", "graph other")])
def test_what_slows_a_ladder_down(monkeypatch, high, captured, order, better):
    """It is left out; what gains captured is tried behind what captures before. Two at least are a ladder."""
    monkeypatch.setattr(trials, "SLOWER", SLOWER)
    order = [Technique(name, "", lambda program: (), launch="graph" if name == "graph" else "eager")
             for name in order.split()]
    result = Optimized(None, "")
    monkeypatch.setattr(result, "gain_captured", lambda technique: captured)
    for count, technique in enumerate(order, start=1):
        gain = (0.9, 0.8, high) if technique.name == "it" else (1.2, 1.1, 1.3)
        result.ladder.append(Added(technique, Combination(tuple(order[:count])), gain))
    found = ladders._faster(result, order)
    assert (found and " ".join(each.name for each in found)) == better
    is_left_out = better is not None and "it" not in better.split()
    assert [added.technique.name for added in result.dropped] == ["it"] * is_left_out


@pytest.mark.unit
def test_a_version_by_hand_without_a_ladder_has_rounds_of_its_own(monkeypatch):
    """Those of the ladder before, which clashed, are other rounds."""
    technique, measured = Technique("it", "", lambda program: ()), []
    rungs = SimpleNamespace(task=SimpleNamespace(by_hand="a version"), result=Optimized(None, ""), ladders=1)
    rungs.by_hand = lambda: [rungs.ladders]
    rungs.measure = lambda combinations, phase, together, others: measured.append(others)
    monkeypatch.setattr(ladders, "_in_order", lambda rungs, tried, aside: tried)
    monkeypatch.setattr(ladders, "_stands_aside", lambda rungs, technique: False)
    monkeypatch.setattr(ladders, "_climb_once", lambda rungs, order, beside: None)
    monkeypatch.setattr(ladders, "_without_a_clash", lambda result, order: [])
    ladders.climb(rungs, [technique])
    assert measured == [[2]]


@pytest.mark.unit
@pytest.mark.parametrize("numerics, low, place, slows", [
    ("bfloat16", 1.01, 1, True), ("bfloat16", 1.03, 1, False), (None, 1.01, 1, False), ("bfloat16", 1.01, 0, False)])
def test_what_rounds_more_and_gains_nothing_is_left_out(numerics, low, place, slows, monkeypatch):
    """It would not be written, and what stands on top of it would not be what was measured. The first stays."""
    monkeypatch.setattr(trials, "SLOWER", SLOWER)
    monkeypatch.setattr(trials, "WORTH_IT", WORTH_IT)
    techniques = [Technique(name, "", lambda program: ()) for name in ("first", "second")]
    judgements = {each.name: Judgement([RIGHT], "FP64", numerics=numerics) for each in techniques}
    result = Optimized(None, "", judgements=judgements)
    added = Added(techniques[place], Combination(tuple(techniques[:place + 1])), (1.1, low, 1.2))
    assert result.slows_down(added) == slows


@pytest.mark.unit
def test_what_compiling_took_is_won_back_alone_and_on_top_of_others():
    """By 1 ms a call alone, and by 50 ms on top of autocast."""
    autocast, compiled = (Technique(name, "", lambda program: ()) for name in ("autocast", "compile"))
    alone = measured({AS_IT_IS: 100.0, "compile": 99.0})
    alone.results["compile"].compilation = Compilation(10.0, None)
    together = measured({AS_IT_IS: 100.0, "autocast": 60.0, "autocast + compile": 10.0})
    added = Added(compiled, Combination((autocast, compiled)), (6.0, 6.0, 6.0))
    looked = SimpleNamespace(found={autocast: (), compiled: ()})
    result = SimpleNamespace(looked=looked, alone=alone, together=together, ladder=[])
    assert pays_after(result) == "10,000 forward+backward calls"
    result.ladder = [added]
    assert pays_after(result) == ("alone 10,000 forward+backward calls, "
                                  "on top of autocast 200 forward+backward calls")
    del together.results["autocast + compile"]
    assert pays_after(result) == "10,000 forward+backward calls"
    looked.found = {autocast: ()}
    assert pays_after(result) == ""


@pytest.mark.unit
@pytest.mark.parametrize("before, after, said", [
    ([100.0, 150.0] * 10, [80.0, 120.0] * 10, "400 forward+backward calls"),     # faster in each round, by a fifth
    ([100.0, 101.0] * 10, [101.0, 100.0] * 10, "n/a: the difference is within the noise"),
    ([80.0, 120.0] * 10, [100.0, 150.0] * 10, "never: it is not faster here")])
def test_whether_compiling_is_won_back_is_decided_round_by_round(before, after, said):
    """By the ratio of the table: where rounds differ by more than compiling saves, too."""
    compiled = Technique("compile", "", lambda program: ())
    alone = measured({AS_IT_IS: 0.0, "compile": 0.0})
    for name, samples in {AS_IT_IS: before, "compile": after}.items():
        alone.results[name].rows[BOTH, "eager"] = Row(timing=Timing(samples, True, "rounds"))
    alone.results["compile"].compilation = Compilation(10.0, None)
    result = SimpleNamespace(looked=SimpleNamespace(found={compiled: ()}), alone=alone, ladder=[])
    assert pays_after(result) == said
