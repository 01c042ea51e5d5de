"""What a host hides that launches slower than its GPU runs: each technique is ranked by what it gains captured, too."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.assistant import ladder, optimize, rungs, trials, verdicts
from benchmarks.assistant.combination import Combination, Measured
from benchmarks.assistant.optimized import Optimized
from benchmarks.assistant.predicting import Prediction
from benchmarks.assistant.side_by_side import WORTH_IT
from benchmarks.assistant.technique import Found, Technique
from benchmarks.assistant.techniques import EVERY, compiled, cuda_graph
from benchmarks.assistant.trials import SLOWER, Added
from common.block import oracle
from common.report.result import Result, Row
from common.runtime.iteration import BOTH, FORWARD
from common.runtime.timing import Timing


def same(name: str, launch: str = "eager", why_not: str = "") -> Technique:
    """A technique that changes nothing."""
    return Technique(name, "nothing", lambda program: [Found(None, "", 1, "the call", why_not)], lambda plan: None,
                     launch=launch)


def timed(result: Optimized, eager: dict[str, float], graph: dict[str, float]) -> Optimized:
    """The same result, as if those times of each technique alone had been measured."""
    for launch, ms in (("eager", eager), ("graph", graph)):
        for case, each in ms.items():
            rows = result.alone.results[case].rows
            row = rows[result.mode, "eager"]
            rows[result.mode, launch] = replace(row, timing=replace(row.timing, samples=[each] * 6))
    result.opportunities = verdicts.opportunities(result)
    return result


GRAPH, FIRST, SECOND = same("graph", "graph"), same("first"), same("second")
EAGER, CAPTURED = {"as it is": 10.0, "first": 12.0, "second": 8.0}, {"as it is": 9.0, "first": 3.0, "second": 7.5}


@pytest.mark.integration
def test_a_gain_that_launching_hides_is_seen_captured(studies_in_seconds):
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, inference=True,
                      techniques=[GRAPH, FIRST, SECOND])
    timed(result, EAGER, CAPTURED)
    assert result.gain_captured(FIRST) == pytest.approx((3.0, 3.0, 3.0))
    assert [result.most_gained(each) for each in (GRAPH, FIRST, SECOND)] == pytest.approx([4.0, 3.0, 10 / 8])
    said = {one.technique: one.why for one in result.opportunities}
    assert "captured in a graph it is 3.00 [3.00, 3.00]" in said["first"] and "captured" not in said["second"]


@pytest.mark.integration
@pytest.mark.parametrize("captured, is_climbed, verdict", [
    (1.021, False, "not reached"), (1.019, False, "no gain"), (1.021, True, "no gain")])
def test_what_may_gain_on_a_ladder_that_was_interrupted_is_undecided(captured, is_climbed, verdict, studies_in_seconds,
                                                                     monkeypatch):
    """Launched one by one it gains nothing; captured it is so many times as fast."""
    monkeypatch.setattr(trials, "WORTH_IT", WORTH_IT)
    monkeypatch.setattr(verdicts, "WORTH_IT", WORTH_IT)
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, inference=True,
                      techniques=[GRAPH, FIRST, SECOND])
    result.ladder, result.is_climbed = [], is_climbed
    timed(result, {"as it is": 10.0, "first": 10.0, "second": 8.0}, {"as it is": 9.0 * captured, "first": 9.0})
    one = next(each for each in result.opportunities if each.technique == "first")
    assert one.verdict == verdict
    assert ("on top of others was not measured" in one.why) == (verdict == "not reached")


@pytest.mark.integration
@pytest.mark.parametrize("graph", [None, same("graph", "graph", "the host waits")])
def test_what_can_not_be_captured_is_ranked_by_its_launches(graph, studies_in_seconds):
    techniques = [each for each in (graph, FIRST, SECOND) if each]
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, inference=True, techniques=techniques)
    timed(result, EAGER, CAPTURED)
    assert result.gain_captured(FIRST) is None and result.most_gained(FIRST) == pytest.approx(10 / 12)


@pytest.mark.integration
@pytest.mark.parametrize("first, stays, clashing", [(2.6, "graph", "first"), (2.4, "first", "graph")])
def test_where_one_can_not_be_captured_what_gains_more_stays(first, stays, clashing, studies_in_seconds):
    """Alone it makes the model 10 / first times as fast, and capturing makes the other one 4 times as fast."""
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, inference=True,
                      techniques=[GRAPH, FIRST, SECOND])
    timed(result, {"as it is": 10.0, "first": first, "second": 8.0}, {"as it is": 9.0, "second": 2.0})
    together, mode = result.together, result.mode
    together.results = {each.name: result.alone.results[each.name]
                        for each in (Combination(), Combination((FIRST,)), Combination((SECOND,)))}
    failed = together.results["first"].rows[mode, "eager"]
    together.results["first"].rows[mode, "graph"] = replace(failed, timing=None, reason="graph: it waits")
    assert [each.name for each in ladder._without_a_clash(result, [GRAPH, FIRST])] == [stays]
    assert result.clashes == {clashing: f"on top of {stays} it can't run: graph: it waits"}


@pytest.mark.integration
def test_what_is_slower_one_by_one_and_faster_captured_is_not_slower(studies_in_seconds, monkeypatch):
    monkeypatch.setattr(trials, "SLOWER", SLOWER)
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, inference=True,
                      techniques=[GRAPH, FIRST, SECOND])
    timed(result, EAGER | {"second": 12.0}, CAPTURED | {"second": 12.0})
    assert not result.is_slower(FIRST) and result.is_slower(SECOND)


@pytest.mark.integration
@pytest.mark.parametrize("quick, order", [
    (True, ["second", "first", "as fast", "compiling", "in FP8"]),
    (False, ["in FP8", "compiling", "second", "first", "as fast", "slow"])])
def test_in_a_hurry_one_rung_is_compiled_and_what_is_slower_is_left_out(quick, order, studies_in_seconds, monkeypatch):
    compiling = replace(same("compiling"), apply=lambda plan: setattr(plan, "compiles", True))
    in_fp8 = replace(same("in FP8"), apply=lambda plan: setattr(plan, "in_fp8", ("0",)))
    monkeypatch.setattr(trials, "SLOWER", SLOWER)
    gains = {"first": 1.1, "second": 1.2, "compiling": 1.3, "in FP8": 1.4, "as fast": 0.981, "slow": 0.979}
    monkeypatch.setattr(Optimized, "gains_measured", lambda result, technique: [(gains[technique.name],) * 3])
    monkeypatch.setattr(Optimized, "slows_down", lambda result, added: False)              # whatever the noise is
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=quick, rounds=2, inference=True,
                      techniques=[FIRST, same("slow"), same("as fast"), compiling, in_fp8, SECOND])
    assert [added.technique.name for added in result.ladder] == order


@pytest.mark.integration
@pytest.mark.parametrize("captured, order", [(7.0, ["second", "graph", "first"]), (8.0, ["second", "first", "graph"])])
def test_what_captures_comes_before_what_launching_hides(captured, order, studies_in_seconds):
    """The first gains 1.25 launched one by one. On top of the second, which needs half the time, the host would hide
    that, and the ladder would be climbed again."""
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, inference=True,
                      techniques=[GRAPH, FIRST, SECOND])
    timed(result, {"as it is": 10.0, "first": 8.0, "second": 5.0},
          {"as it is": 9.9, "first": captured, "second": 5.0})
    rung_of = SimpleNamespace(result=result, quick=True)
    assert [each.name for each in ladder._in_order(rung_of, [GRAPH, FIRST, SECOND], [])] == order


@pytest.mark.integration
@pytest.mark.parametrize("in_16_bits, on_top, captured, order", [
    (True, 1.021, 0.9, ["first", "autocast", "layout", "graph"]), (True, 1.019, 0.9, ["first", "autocast", "graph"]),
    (True, 0.9, 1.021, ["first", "autocast", "layout", "graph"]), (False, 1.5, 1.5, ["first", "autocast", "graph"])])
@pytest.mark.parametrize("for_16_bits", [True, False])
def test_what_is_slower_in_fp32_is_tried_in_16_bits(for_16_bits, in_16_bits, on_top, captured, order,
                                                    studies_in_seconds, monkeypatch):
    """A layout of convolutions, which pays on tensor cores; alone it is measured in FP32. It is tried once."""
    autocast = replace(same("autocast"), apply=lambda plan: setattr(plan, "autocast", in_16_bits or None))
    layout = replace(same("layout"), for_16_bits=for_16_bits)
    gains = {"first": 1.4, "autocast": 1.3, "graph": 1.2, "layout": 0.9}
    climbed = []

    def gain(measured, of, over, mode):
        last = of.techniques[-1].name if of.techniques else ""
        return ((captured if of.launch == "graph" else on_top) if "layout" in of.words else gains.get(last, 1.0),) * 3

    def climb_once(rung_of, order, beside):
        climbed.append(([each.name for each in order], [each.words for each in beside]))
        rung_of.result.ladder.extend(Added(each, Combination(tuple(order[:place + 1])), (1.1,) * 3)
                                   for place, each in enumerate(order))
    for bound, value in (("SLOWER", SLOWER), ("WORTH_IT", WORTH_IT)):
        monkeypatch.setattr(trials, bound, value)
    monkeypatch.setattr(Optimized, "gains_measured", lambda result, technique: [(gains[technique.name],) * 3])
    techniques = [FIRST, autocast, layout, GRAPH]
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, rounds=2, inference=True, techniques=[])
    result.looked.found = {each: [Found(None, "", 1, "the call")] for each in techniques}
    monkeypatch.setattr(ladder, "_climb_once", climb_once)
    monkeypatch.setattr(Measured, "gain", gain)
    ladder.climb(SimpleNamespace(result=result, quick=True, task=SimpleNamespace(by_hand=False), ladders=1), techniques)
    without = [each for each in order if each != "layout"]
    wanted = [(without, ["first + autocast + layout"] if in_16_bits and for_16_bits else [])]
    if for_16_bits and "layout" in order:
        wanted.append((order, []))
    assert climbed == wanted
    assert [each.technique.name for each in result.dropped] == ["layout"] * (for_16_bits and on_top == 1.019)


@pytest.mark.unit
@pytest.mark.parametrize("shortest, may", [(25.0, True), (26.0, False), (None, False)])
def test_what_saves_little_of_the_model_may_save_much_of_it_in_16_bits(shortest, may, monkeypatch):
    """0.5 ms of 100, say, of which 25 are left: 2 %."""
    monkeypatch.setattr(trials, "WORTH_IT", WORTH_IT)
    monkeypatch.setattr(Optimized, "gains_measured", lambda result, technique: [(1.0, 1.0, 1.0)])
    monkeypatch.setattr(Optimized, "predictions", {"it": Prediction(99.5, 100.0, 100.0)})
    monkeypatch.setattr(Optimized, "mode", BOTH)
    result = Optimized(None, "")
    for name, samples in (("as it is", [100.0] * 6), ("autocast", [shortest or 100.0] * 6)):
        timed_one = Result(name, None, "float32", {})
        timed_one.rows[BOTH, "eager"] = Row(timing=Timing(samples, True, "rounds"))
        timed_one.rows[FORWARD, "eager"] = Row(timing=Timing([1.0] * 6, True, "rounds"))
        result.alone.results[name] = timed_one
    assert result.may_gain(same("it")) == may


@pytest.mark.integration
@pytest.mark.parametrize("low, predicted, is_slower, for_16_bits, quick, aside", [
    (1.019, None, False, False, True, True), (1.021, None, False, False, True, False),
    (1.0, 1.019, False, False, True, True), (1.0, 1.021, False, False, True, False),
    (1.0, None, False, False, False, False), (0.9, None, True, False, True, False),
    (0.9, None, True, True, False, True)])
def test_in_a_hurry_what_gains_nothing_and_was_not_predicted_to_stands_aside(low, predicted, is_slower, for_16_bits,
                                                                             quick, aside, monkeypatch):
    """On the ladder the others would be measured on top of what is not written."""
    for bound, value in (("SLOWER", SLOWER), ("WORTH_IT", WORTH_IT)):
        monkeypatch.setattr(trials, bound, value)
    high = 0.97 if is_slower else 1.2
    monkeypatch.setattr(Optimized, "gains_measured", lambda result, technique: [(low, low, high)])
    expected = {"it": Prediction(1.0 / predicted, 1.0, 1.0)} if predicted else {}
    monkeypatch.setattr(Optimized, "predictions", expected)
    monkeypatch.setattr(Optimized, "mode", BOTH)
    technique = replace(same("it"), for_16_bits=for_16_bits)
    assert ladder._stands_aside(SimpleNamespace(result=Optimized(None, ""), quick=quick), technique) == aside
    assert not ladder._stands_aside(SimpleNamespace(result=Optimized(None, ""), quick=quick), GRAPH)


@pytest.mark.unit
@pytest.mark.parametrize("last, stays", [(0.97, 2), (0.985, 3)])
def test_what_slows_the_end_of_a_ladder_leaves_it(last, stays, monkeypatch):
    """FP8 behind what compiles, say: nothing stands on it, and nothing is measured again."""
    monkeypatch.setattr(trials, "SLOWER", SLOWER)
    techniques = [FIRST, SECOND, same("third")]
    added = [Added(each, Combination(tuple(techniques[:place + 1])), (gain,) * 3)
             for place, (each, gain) in enumerate(zip(techniques, (0.9, 1.2, last), strict=True))]
    result = Optimized(None, "", ladder=list(added))
    ladder._end_before_what_slows(result)
    assert (result.ladder, result.dropped) == (added[:stays], added[stays:])
    result = Optimized(None, "", ladder=added[:1])
    ladder._end_before_what_slows(result)
    assert result.ladder == added[:1]


@pytest.mark.unit
def test_a_layout_is_for_16_bits():
    assert [each.name for each in EVERY if each.for_16_bits] == ["channels-last"]


@pytest.mark.integration
@pytest.mark.parametrize("order, captured, wanted", [
    ([GRAPH, FIRST, SECOND], "first + second", ["first", "second", "graph"]),
    ([FIRST, GRAPH, SECOND], "first + second", ["first", "second", "graph"]),
    ([GRAPH, FIRST, SECOND], "", ["graph", "second"])])
def test_what_captures_comes_behind_what_lets_it(order, captured, wanted, studies_in_seconds):
    """A rung that can't be captured need not leave the ladder: one with a technique more was."""
    result = optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, inference=True,
                      techniques=[GRAPH, FIRST, SECOND])
    timed(result, {"as it is": 10.0, "first": 9.0, "second": 8.0}, {"as it is": 5.0, "second": 2.0})
    row, together = result.alone.results["second"].rows[result.mode, "eager"], result.together
    failed = replace(row, timing=None, reason="graph: it differs")
    together.results = {}
    for name in ("as it is", "first", "first + second"):
        rows = {(result.mode, "eager"): row, (result.mode, "graph"): row if name in ("as it is", captured) else failed}
        together.results[name] = replace(result.alone.results["second"], name=name, rows=rows)
    assert [each.name for each in ladder._without_a_clash(result, order)] == wanted
    assert bool(result.clashes) == (not captured)


@pytest.mark.integration
def test_two_orders_that_are_better_than_each_other_end(studies_in_seconds, monkeypatch):
    climbed = []
    monkeypatch.setattr(ladder, "_climb_once", lambda rungs, order, beside: climbed.append(list(order)))
    monkeypatch.setattr(ladder, "_faster", lambda result, order: list(reversed(order)))
    optimize(nn.Linear(6, 6), (torch.randn(2, 6),), quick=True, rounds=2, inference=True, techniques=[FIRST, SECOND])
    assert len(climbed) == 2 and climbed[0] == climbed[1][::-1]


class Convolved(nn.Sequential):
    """A convolution and a linear layer."""

    def __init__(self):
        super().__init__(nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(32, 4))


@pytest.mark.integration
@pytest.mark.parametrize("model, allowed, gate", [
    (Convolved, True, torch.float16), (Convolved, False, torch.float32),
    (lambda: nn.Linear(4, 4), True, torch.float32)])
def test_a_replay_may_round_as_convolutions_in_tf32_do(model, allowed, gate, studies_in_seconds, monkeypatch):
    """Another rounding before them becomes one of TF32 behind them, in a graph and launched one by one."""
    seen = []
    subject_of = rungs.subject_of
    monkeypatch.setattr(rungs, "subject_of",
                        lambda module, work, gates, *others, **more: seen.append(gates) or subject_of(
                            module, work, gates, *others, **more))
    monkeypatch.setattr(rungs, "arithmetic_of", lambda plan, device: lambda call: (
        "tf32" if allowed and call.name == "conv2d" else "float32"))
    optimize(model(), (torch.randn(2, 2, 4, 4),), quick=True, rounds=2, inference=True, techniques=[FIRST])
    assert seen and set(seen) == {(oracle.MODULE_GATES[gate][1],) * 2}


@pytest.mark.gpu
@pytest.mark.integration
def test_a_model_of_small_operations_is_captured_first(studies_in_seconds):
    """Then what the others gain is not hidden by the launches of hundreds of kernels."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(64))).cuda()
    result = optimize(layers, (torch.randn(8, 64, device="cuda"),), quick=True,
                      techniques=[compiled.TECHNIQUE, cuda_graph.TECHNIQUE])
    assert result.ladder[0].technique is cuda_graph.TECHNIQUE and result.ladder[-1].combination.launch == "graph"
