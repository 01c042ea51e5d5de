"""Which combinations exist, that each is the same block, and how the speed-up is shared out."""
import itertools
import math
import random
import statistics

import pytest
import torch

from benchmarks import studies
from benchmarks.measure import options
from benchmarks.show import study as frame
from benchmarks.studies import ablation
from common import PRESETS, BlockConfig
from common.block.traits import BY_HAND, FUSED, Traits
from common.runtime import machine
from common.runtime.iteration import BOTH, FORWARD, LAUNCHES, MODES
from tests.helpers.blocks import case, errors, worst
from tests.helpers.made_records import GPU, both, made

unit, integration = pytest.mark.unit, pytest.mark.integration
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STUDY = studies.load("ablation")
ALL = ablation.combinations(tf32=True, fp8=True)
TO_STEP_3, TO_STEP_4 = ablation.LADDERS.values()


def name_of(combination) -> str:
    return " + ".join(ablation.ordered(combination)) or "FP32"


def recorded(samples: dict, **more) -> list[dict]:
    """Combination -> samples of both passes, as records."""
    lines = []
    for combination, taken in samples.items():
        variant = {"optimizations": ablation.ordered(combination)}
        config = PRESETS["tiny"] if "autocast" in combination else PRESETS["tiny"].replace(amp_dtype=None)
        lines += made("block", both(taken, [2 * ms for ms in taken]), facts=GPU, config=config, study="ablation",
                      variant=variant, traits=ablation.traits_of(combination), **more)
    return lines


def evenly(there=ALL) -> dict:
    """Each optimization buys as much more."""
    return {combination: [10.0 / (1 + len(combination))] * 6 for combination in there}


# ----------------------------------------------------------------------------------------------------------- the cases


@unit
def test_every_combination_that_exists_is_there_once():
    assert len(ALL) == len(set(ALL)) == 20
    assert len([combination for combination in ALL if "FP8" not in combination]) == 16
    for combination in ALL:
        assert "FP8" not in combination or ("autocast" in combination and "compile" not in combination)
    assert len(ablation.combinations(tf32=False, fp8=False)) == 8
    assert len(ablation.combinations(tf32=False, fp8=False, autocast=False)) == 4


@unit
@pytest.mark.parametrize("combination", ALL, ids=name_of)
def test_every_combination_is_the_same_block(combination, uncompiled):
    """In FP64, where no precision hides a difference."""
    config = BlockConfig(2, 16, 32, 2, amp_dtype=None)
    values, x, dy = case(config, dtype=torch.float64)
    block = ablation.build(combination, config, values, "cpu")
    assert max(worst(errors(block, values, x, dy))) < 1e-12
    assert (block._compiled_call_impl is not None) == ("compile" in combination)


@unit
@pytest.mark.parametrize("combination", ALL, ids=name_of)
def test_the_switch_for_tf32_is_set_in_those_alone_that_have_it(combination, uncompiled):
    seen = []
    config = BlockConfig(1, 16, 32, 2, amp_dtype=None)
    values, x, _ = case(config)
    block = ablation.build(combination, config, values, "cpu")
    block.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    block(x)
    assert seen == ["high" if "TF32" in combination else "highest"]


@unit
def test_a_cpu_has_neither_tf32_nor_fp8():
    cases = ablation.cases(PRESETS["tiny"], CPU)
    names = [name_of(case.variant["optimizations"]) for case in cases]
    assert names[0] == "FP32" and len(names) == 8 and not any("TF32" in name or "FP8" in name for name in names)


@unit
def test_a_cpu_without_16_bit_matmuls_has_no_autocast_either():
    cases = ablation.cases(PRESETS["tiny"].replace(amp_dtype=None), CPU)
    assert [name_of(case.variant["optimizations"]) for case in cases] == ["FP32", "SDPA", "compile", "SDPA + compile"]


@unit
def test_a_combination_is_judged_by_what_it_has(monkeypatch):
    """By its arithmetic and its attention; it claims no kernels."""
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    found = {}
    for case_ in ablation.cases(PRESETS["tiny"], CUDA):
        arithmetic = case_.traits.arithmetic(case_.config, torch.float32, CUDA)
        found[name_of(case_.variant["optimizations"])] = arithmetic.matmul, case_.traits.attention
        assert case_.step is None and not case_.traits.claimed and case_.bytes_needed > 0
    assert len(found) == 20
    assert found["FP32"] == ("float32", BY_HAND) and found["SDPA + compile"] == ("float32", FUSED)
    assert found["TF32 + SDPA"] == ("tf32", FUSED) and found["autocast"] == ("float16", BY_HAND)
    assert found["autocast + SDPA + FP8"] == ("float8", FUSED)
    assert found["TF32 + autocast + compile"] == ("float16", BY_HAND)


@unit
def test_all_combinations_are_timed_in_the_same_rounds():
    (group,) = ablation.groups(options.parse(options.parser(STUDY.name, STUDY.doc),
                                             ["--preset", "tiny", "--device", "cpu"]))
    assert len(group.cases) == 8 and group.modes == MODES and group.calibrated


@unit
@pytest.mark.parametrize("gib, launches", [(0.001, LAUNCHES[:1]), (100, LAUNCHES)])
def test_captured_graphs_are_left_out_where_memory_does_not_hold_them(gib, launches, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    monkeypatch.setattr(machine, "memory_total", lambda device: gib * 2**30)
    chosen = options.parse(options.parser(STUDY.name, STUDY.doc), ["--preset", "tiny", "--device", "cpu"])
    chosen.device, chosen.launches = CUDA, LAUNCHES
    STUDY.refine(chosen)
    assert chosen.launches == launches


# ---------------------------------------------------------------------------------------------------------- the shares


@unit
def test_shares_of_independent_optimizations_are_their_own_factors():
    factors = {"TF32": 1.5, "autocast": 2.0, "SDPA": 3.0, "compile": 1.1}
    medians = {}
    for combination in ALL:
        if "FP8" not in combination:
            medians[combination] = 100 / math.prod(factors[name] for name in combination)
    shares = ablation.shares(medians, TO_STEP_3)
    whole = math.log(math.prod(factors.values()))
    assert shares == pytest.approx({name: math.log(factor) / whole for name, factor in factors.items()})


@unit
def test_two_that_buy_the_same_share_it():
    medians = {frozenset(): 10.0, frozenset("a"): 5.0, frozenset("b"): 5.0, frozenset("ab"): 5.0}
    assert ablation.shares(medians, ("a", "b")) == pytest.approx({"a": 0.5, "b": 0.5})


@unit
def test_shares_add_up_over_the_orders_that_exist():
    """FP8 can only come after autocast: orders in which it comes before were not measured and do not count."""
    medians = {combination: 10.0 / (1 + len(combination)) for combination in ALL}
    shares = ablation.shares(medians, TO_STEP_4)
    assert sum(shares.values()) == pytest.approx(1) and shares["autocast"] > 0 and shares["FP8"] > 0
    assert ablation.shapley({frozenset(): 0.0, frozenset("a"): 1.0}.get, ("a", "b")) is None


@unit
def test_shapley_is_the_mean_over_all_orders():
    draw, value = random.Random(0), {}
    for count in range(4):
        for picked in itertools.combinations("abc", count):
            value[frozenset(picked)] = draw.uniform(0, 100)

    def added(player, order):
        before = order[:order.index(player)]
        return value[frozenset((*before, player))] - value[frozenset(before)]
    expected = {}
    for player in "abc":
        expected[player] = statistics.mean(added(player, order) for order in itertools.permutations("abc"))
    assert ablation.shapley(value.get, tuple("abc")) == pytest.approx(expected)


@unit
@pytest.mark.parametrize("whole_ms, shared", [(9.6, False), (9.5, True), (10.0, False), (11.0, False)])
def test_less_than_five_percent_is_nothing_to_share_out(whole_ms, shared):
    medians = {frozenset(): 10.0, frozenset("a"): whole_ms}
    assert (ablation.shares(medians, ("a",)) is not None) == shared


@unit
def test_a_share_of_next_to_nothing_has_no_interval():
    """A whole of 6 % that noise takes below 5 in many a draw: those left would be the lucky ones."""
    draw, taken = random.Random(0), {}
    for combination, ms in {"": 1.06, "a": 1.03, "b": 1.03, "ab": 1.0}.items():
        taken[frozenset(combination)] = [ms * draw.gauss(1, 0.03) for _ in range(8)]
    means = {combination: statistics.mean(times) for combination, times in taken.items()}
    assert ablation.intervals(taken, ("a", "b")) == {} and ablation.shares(means, ("a", "b"))
    taken[frozenset("ab")] = [0.5] * 8
    assert set(ablation.intervals(taken, ("a", "b"))) == {"a", "b"}


@unit
def test_an_interval_is_drawn_over_the_rounds_that_all_share():
    """What drifts alike in all of them moves no share."""
    drift = [1.0, 1.3, 0.8, 2.0, 1.1, 0.9, 1.7, 1.2]
    taken = {frozenset(): [8 * d for d in drift], frozenset("a"): [2 * d for d in drift],
             frozenset("b"): [4 * d for d in drift], frozenset("ab"): [d for d in drift]}
    found = ablation.intervals(taken, ("a", "b"))
    assert found == {"a": pytest.approx((2 / 3, 2 / 3)), "b": pytest.approx((1 / 3, 1 / 3))}


@unit
def test_a_ladder_says_what_it_was_measured_without():
    there = []
    for count in range(5):
        there += map(frozenset, itertools.combinations(TO_STEP_3[1:], count))
    assert list(ablation.ladders(there)) == [f"to step 3 without {TO_STEP_3[0]}"]
    assert not ablation.ladders([combination for combination in there if "SDPA" not in combination])
    assert list(ablation.ladders(ALL)) == ["to step 3", "to step 4"]


@unit
def test_a_whole_that_failed_is_not_nothing_to_share_out():
    taken = {frozenset(): [4.0] * 6, frozenset({"TF32"}): [2.0] * 6, frozenset({"SDPA"}): [3.0] * 6}
    assert ablation.ladder_of(taken, ("TF32", "SDPA"))[-1][-1] == "n/a"
    taken[frozenset({"TF32", "SDPA"})] = [4.0] * 6
    assert ablation.ladder_of(taken, ("TF32", "SDPA"))[-1][-1] == "nothing to share out"


@unit
def test_a_rows_share_stands_beside_it_alone_and_all_without_it():
    taken = {frozenset(): [8.0] * 6, frozenset("a"): [2.0] * 6, frozenset("b"): [4.0] * 6, frozenset("ab"): [1.0] * 6}
    assert ablation.ladder_of(taken, ("a", "b")) == [
        ["a", "4.00", "4.00", "67 % [67, 67]"], ["b", "2.00", "2.00", "33 % [33, 33]"], ["all", "8.00", "", "100 %"]]
    del taken[frozenset("b")]                              # a can only come first: what is left is b's
    assert ablation.ladder_of(taken, ("a", "b"))[:2] == [
        ["a", "4.00", "n/a", "67 % [67, 67]"], ["b", "n/a", "2.00", "33 % [33, 33]"]]


# ------------------------------------------------------------------------------------------------------- what it shows


@unit
def test_the_tables_are_told_from_records():
    lines = recorded(evenly())
    text = STUDY.report(lines)
    assert "forward, the ladder to step 3\n" in text and "forward+backward, the ladder to step 4\n" in text
    assert "forward: every combination, 6 rounds\n" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("SDPA   "))
    assert row == ["SDPA", "ok", "eager", "5.00", "2.00", "by", "hand", "3", "2.0e-07"]
    medians = ablation.medians_of(ablation.samples(lines, FORWARD))
    assert medians[frozenset()] == 10.0 and len(medians) == 20


@unit
def test_of_each_combination_the_latest_run_that_is_ok_counts():
    lines = recorded({frozenset(): [9.0] * 6}, run="first") + recorded({frozenset(): [8.0] * 6}, run="second")
    lines += recorded({frozenset({"SDPA"}): [1.0] * 6}, status="failed", reason="why")
    assert ablation.samples(lines, FORWARD) == {frozenset(): [8.0] * 6}
    assert ablation.samples(lines, BOTH) == {frozenset(): [16.0] * 6}


@unit
def test_where_nothing_was_timed_the_tables_say_so():
    lines = made("block", {}, status="failed", reason="why", study="ablation", variant={"optimizations": []},
                 traits=Traits())
    text = STUDY.report(lines)
    assert "forward: nothing was timed" in text and "forward+backward: nothing was timed" in text
    assert text.endswith("failed: why")
    assert STUDY.charts(lines) == {}


@unit
def test_the_chart_has_the_shares_of_both_ladders(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(ablation, "bars_chart", lambda *drawing: drawn.append(drawing))
    STUDY.charts(recorded(evenly()))["shares"]()
    ((bars, axis, digits),) = drawn
    assert list(bars) == ["the ladder to step 3", "the ladder to step 4"] and "forward+backward" in axis and digits == 0
    for players in bars.values():
        assert sum(value for value, _, _ in players.values()) == pytest.approx(100)
        assert all(low <= value <= high for value, low, high in players.values())
    monkeypatch.undo()
    frame.draw(STUDY, str(tmp_path / "a"), recorded(evenly()))
    assert {path.name for path in tmp_path.iterdir()} == {"a-shares.png", "a-shares.svg"}


@unit
def test_no_speed_up_is_no_chart_and_says_so(tmp_path, capsys):
    lines = recorded({combination: [10.0] * 6 for combination in ALL})
    frame.draw(STUDY, str(tmp_path / "a"), lines)
    assert "no chart: there is no speed-up of forward+backward to share out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()) and "nothing to share out" in STUDY.report(lines)


def by_factors(there, **factors: float) -> list[dict]:
    """Records in which each optimization makes everything so many times as fast."""
    taken = {}
    for combination in there:
        taken[combination] = [64.0 / math.prod(factors[name] for name in combination)] * 6
    return recorded(taken)


@unit
def test_the_answer_is_the_largest_share_of_the_longest_ladder():
    factors = {"TF32": 2.0, "autocast": 2.0, "SDPA": 4.0, "compile": 2.0, "FP8": 1.0}
    assert STUDY.answer(by_factors(ALL, **factors)) == "SDPA: 50 % of the speed-up to step 4"
    on_a_cpu = ablation.combinations(tf32=False, fp8=False)
    factors["compile"] = 32.0
    assert STUDY.answer(by_factors(on_a_cpu, **factors)) == "compile: 62 % of the speed-up to step 3 without TF32"


@integration
def test_the_study_on_a_cpu(study_main, monkeypatch):
    """Of two optimizations: each of the eight blocks is tested above, and compiling them takes seconds."""
    monkeypatch.setattr(ablation, "OPTIMIZATIONS", ("autocast", "SDPA"))
    status, out, err = study_main("ablation", "--rounds", 6)
    assert status == 0 and "Traceback" not in err
    rows = [line.split("  ")[0] for line in out.splitlines() if " ok " in line]
    assert rows == 2 * ["FP32", "autocast", "SDPA", "autocast + SDPA"]
    assert "forward+backward: every combination, 6 rounds" in out
    assert "the ladder" not in out                         # neither was measured whole
