"""Which rows of two files measure the same, and which files don't go together."""
import dataclasses

import pytest
import torch

from benchmarks.records.matching import together
from benchmarks.records.significance import What, rows
from common import PRESETS
from common.runtime.iteration import BOTH, FORWARD
from tests.helpers.made_processes import process
from tests.helpers.made_records import CPU_CONFIG, FACTS, both, made

pytestmark = pytest.mark.unit
ONE = What("2_sdpa", FORWARD, "eager", "a shape", "float16, float32", "a GPU")
MS = both([2.0] * 9, [6.0] * 9)


def side(*found: What) -> dict[What, list]:
    return {where: [] for where in found}


def other(**changes) -> What:
    return dataclasses.replace(ONE, **changes)


def test_rows_that_agree_in_all_are_the_same():
    both_passes = side(ONE, other(mode=BOTH))
    assert together(both_passes, both_passes, force=False) == [(ONE, ONE), (other(mode=BOTH), other(mode=BOTH))]
    assert together(both_passes, side(other(mode=BOTH), other(case="5_more")), False) == [(other(mode=BOTH),) * 2]


@pytest.mark.parametrize("name, more", [
    ("gpu", {"facts": FACTS | {"name": "another CPU"}}), ("dtype", {"matmul": "float32"}),
    ("shape", {"config": PRESETS["cpu"].replace(amp_dtype=torch.bfloat16)}),
])
def test_what_must_not_differ_is_refused_unless_forced(name, more):
    old, new = rows(process(1)), rows(process(2, **more))
    with pytest.raises(ValueError, match=f"^{name} of 0_baseline differs: .* in the new; --force compares") as refused:
        together(old, new, force=False)
    assert "\n" not in str(refused.value)
    pairs = together(old, new, force=True)
    assert len(pairs) == 8 and all(a.case == b.case and a.mode == b.mode for a, b in pairs)


def test_one_step_of_another_dtype_is_refused_though_the_others_agree():
    new = [line for line in process(2) if line["model"]["backend"] != "2_sdpa"]
    new += made("2_sdpa", MS, matmul="float16", config=CPU_CONFIG)
    with pytest.raises(ValueError, match="dtype of 2_sdpa differs: bfloat16, float32 in the old, float16, float32 in"):
        together(rows(process(1)), rows(new), force=False)


def test_a_shape_that_both_files_hold_is_compared_beside_others():
    small, large = other(shape="S64"), other(shape="S128")
    assert together(side(small, large), side(large), force=False) == [(large, large)]


def test_other_steps_are_refused():
    old, new = rows(made("0_baseline", MS)), rows(made("2_sdpa", MS))
    with pytest.raises(ValueError, match=r"^step differs: 0_baseline in the old, 2_sdpa in the new; --force compares"):
        together(old, new, force=False)
    assert len(together(old, new, force=True)) == 2


def test_one_step_of_each_file_is_forced_together_whatever_they_ran_on():
    old, new = side(ONE), side(other(case="3_compile", shape="another", dtype="float8, float32", gpu="another"))
    (pair,) = together(old, new, force=True)
    assert pair == (*old, *new)


def test_force_does_not_guess_which_step_is_which():
    old, new = side(ONE, other(case="3_compile")), side(other(case="0_baseline"), other(case="1_cublas"))
    for force in (False, True):
        with pytest.raises(ValueError, match="even --force can't tell which goes with which"):
            together(old, new, force)


def test_force_does_not_guess_which_shape_is_which():
    """Two shapes a file, none in common."""
    old, new = side(ONE, other(shape="S64")), side(other(shape="S8"), other(shape="S16"))
    with pytest.raises(ValueError, match="a file holds several rows that would count as the same"):
        together(old, new, force=True)


def test_what_differs_is_named_and_of_many_the_first_three():
    old, new = side(ONE), side(*(other(shape=f"S{size}") for size in range(1, 6)))
    with pytest.raises(ValueError, match=r"shape of 2_sdpa differs: a shape in the old, S1; S2; S3; \.\.\. in the new"):
        together(old, new, force=False)


def test_ways_of_launching_alone_match_nothing():
    with pytest.raises(ValueError, match="no row of the one is in the other"):
        together(side(ONE), side(other(launch="graph")), force=True)
