"""Which combinations exist, that each is the same block, and how the speed-up is shared out."""
import itertools
import math
import random

import pytest
import torch
from conftest import case, errors, worst
from made_records import GPU, both, made

from benchmarks import ablation
from common import PRESETS, BlockConfig

pytestmark = pytest.mark.unit
ALL = ablation.combinations(tf32=True, fp8=True)


def test_every_combination_that_exists_is_there_once():
    assert len(ALL) == len(set(ALL)) == 20
    assert len([some for some in ALL if "FP8" not in some]) == 16
    assert all("autocast" in some and "compile" not in some for some in ALL if "FP8" in some)
    assert len(ablation.combinations(tf32=False, fp8=False)) == 8
    assert len(ablation.combinations(tf32=False, fp8=False, autocast=False)) == 4


@pytest.mark.parametrize("some", ALL, ids=ablation.name_of)
def test_every_combination_is_the_same_block(some, uncompiled):
    """In FP64, where no precision hides a difference."""
    config = BlockConfig(2, 16, 32, 2, amp_dtype=None)
    values, x, dy = case(config, dtype=torch.float64)
    block = ablation.build(some, config, values, "cpu")
    assert max(worst(errors(block, values, x, dy))) < 1e-12
    assert (block._compiled_call_impl is not None) == ("compile" in some)


@pytest.mark.parametrize("some", ALL, ids=ablation.name_of)
def test_the_switch_for_tf32_is_set_in_those_alone_that_have_it(some, uncompiled, monkeypatch):
    seen = []
    config = BlockConfig(1, 16, 32, 2, amp_dtype=None)
    values, x, _ = case(config)
    block = ablation.build(some, config, values, "cpu")
    block.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    block(x)
    assert seen == ["high" if "TF32" in some else "highest"]


def test_shares_of_independent_optimizations_are_their_own_factors():
    factors = {"TF32": 1.5, "autocast": 2.0, "SDPA": 3.0, "compile": 1.1}
    found = {some: 100 / math.prod(factors[name] for name in some) for some in ALL if "FP8" not in some}
    shares = ablation.shares(found, ablation.LADDERS["to step 3"])
    whole = math.log(math.prod(factors.values()))
    assert shares == pytest.approx({name: math.log(factor) / whole for name, factor in factors.items()})


def test_two_that_buy_the_same_share_it():
    found = {frozenset(): 10.0, frozenset("a"): 5.0, frozenset("b"): 5.0, frozenset("ab"): 5.0}
    assert ablation.shares(found, ("a", "b")) == pytest.approx({"a": 0.5, "b": 0.5})


def test_shares_add_up_over_the_orders_that_exist():
    """FP8 can only come after autocast: orders in which it comes before were not measured and do not count."""
    found = {some: 10.0 / (1 + len(some)) for some in ALL}
    shares = ablation.shares(found, ablation.LADDERS["to step 4"])
    assert sum(shares.values()) == pytest.approx(1) and shares["autocast"] > 0 and shares["FP8"] > 0
    assert ablation.shapley({frozenset(): 0.0, frozenset("a"): 1.0}.get, ("a", "b")) is None


def test_shapley_is_the_mean_over_all_orders():
    value = {frozenset(some): float(hash(some) % 97) for n in range(4) for some in itertools.combinations("abc", n)}

    def added(player, order):
        before = order[:order.index(player)]
        return value[frozenset((*before, player))] - value[frozenset(before)]
    expected = {player: sum(added(player, order) for order in itertools.permutations("abc")) / 6 for player in "abc"}
    assert ablation.shapley(value.get, tuple("abc")) == pytest.approx(expected)


def test_the_tables_are_told_from_records(tmp_path):
    lines = [line for some in ALL for line in made(
        ablation.name_of(some), both([10.0 / (1 + len(some))] * 6, [20.0 / (1 + len(some))] * 6), facts=GPU,
        config=PRESETS["tiny"], study="ablation")]
    text = ablation.text(lines)
    assert "the ladder to step 3" in text and "the ladder to step 4" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("SDPA   "))
    assert row == ["SDPA", "ok", "eager", "5.00", "2.00", "by", "hand", "3", "2.0e-07"]
    assert ablation.times(lines, "forward")[frozenset()] == 10.0
    ablation.draw(lines, str(tmp_path / "a"))
    assert (tmp_path / "a-shares.png").exists()


def test_a_cpu_has_neither_tf32_nor_fp8():
    names = [case.name for case in ablation.cases(PRESETS["tiny"], torch.device("cpu"))]
    assert names[0] == "FP32" and len(names) == 8 and not any("TF32" in name or "FP8" in name for name in names)


def test_a_combination_is_judged_by_the_arithmetic_it_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    cases = ablation.cases(PRESETS["tiny"], torch.device("cuda"))
    found = {case.name: (case.step, case.config.amp_dtype) for case in cases}
    half = PRESETS["tiny"].amp_dtype
    assert found["FP32"] == (0, None) and found["SDPA + compile"] == (0, None)
    assert found["TF32 + SDPA"] == (2, None) and found["autocast"] == (2, half)
    assert found["autocast + SDPA + FP8"] == (4, half) and len(found) == 20


def test_a_share_of_next_to_nothing_has_no_interval():
    """A whole of 6 % that noise takes below 5 in many a draw: those left would be the lucky ones."""
    draw = random.Random(0)
    taken = {frozenset(some): [ms * draw.gauss(1, 0.03) for _ in range(8)]
             for some, ms in {"": 1.06, "a": 1.03, "b": 1.03, "ab": 1.0}.items()}
    assert ablation.intervals(taken, ("a", "b")) == {} and ablation.shares(
        {some: math.fsum(one) / 8 for some, one in taken.items()}, ("a", "b"))
    taken[frozenset("ab")] = [0.5] * 8
    assert set(ablation.intervals(taken, ("a", "b"))) == {"a", "b"}


def test_a_ladder_says_what_it_was_measured_without():
    players = ablation.LADDERS["to step 3"]
    found = {frozenset(some): 1.0 for n in range(5) for some in itertools.combinations(players[1:], n)}
    assert list(ablation.ladders(found)) == [f"to step 3 without {players[0]}"]
    assert not ablation.ladders({some: ms for some, ms in found.items() if "SDPA" not in some})


@pytest.mark.unit
def test_a_whole_that_failed_is_not_nothing_to_share_out():
    taken = {frozenset(): [4.0] * 6, frozenset({"TF32"}): [2.0] * 6, frozenset({"SDPA"}): [3.0] * 6}
    assert ablation.ladder_of(taken, ("TF32", "SDPA"))[-1][-1] == "n/a"
    assert ablation.ladder_of(taken | {frozenset({"TF32", "SDPA"}): [4.0] * 6}, ("TF32", "SDPA"))[-1][-1] == (
        "nothing to share out")
