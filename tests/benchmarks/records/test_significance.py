"""How far off a recorded time may be, and when two of them differ by more."""
import math

import pytest

from benchmarks.records import significance
from benchmarks.records.significance import (
    Measured,
    What,
    expected_ratio,
    floor_of,
    floors,
    measured,
    noises_of,
    rows,
    spread,
    verdict,
    weights,
    word_for,
)
from common.report.record import PARTS
from common.runtime import timing
from common.runtime.iteration import FORWARD
from tests.helpers.made_processes import NOISE, process, several
from tests.helpers.made_records import CPU_CONFIG, FACTS, both, copied, made

pytestmark = pytest.mark.unit
WHERE = What("2_sdpa", FORWARD, "eager", "shape", "float16, float32", "gpu")
IN_FP32 = What("0_baseline", FORWARD, "eager", "shape", "float32, float32", "gpu")


def of_row(ms: float, within=0.004, calibration=None, calibration_within=0.0, clock="fake", launch_bound=False,
           runs=frozenset("a"), share=None) -> Measured:
    """A row as one process or several have measured it."""
    return Measured(ms, calibration or {"gemm": 1.0, "copy": 1.0}, share, within, calibration_within, None, clock,
                    launch_bound, runs)


# -------------------------------------------------------------------------------------------------- which runs count


def test_emulated_and_failed_rows_are_not_compared():
    fine = both([1.0] * 6, [2.0] * 6)
    assert len(rows(made("2_sdpa", fine))) == 2
    assert rows(made("2_sdpa", fine, status="failed", reason="refuted")) == {}
    lines = copied(made("4_transformer_engine", fine))
    for line in lines:
        if line["metric"]["name"] == "latency":
            line["metric"]["extra_info"]["emulated"] = True
    assert rows(lines) == {}


@pytest.mark.parametrize("differs", ["git", "engine", "study", "clock"])
def test_processes_of_other_code_are_no_rows_beside_the_latest(differs):
    """Of another commit, engine, study or clock."""
    new = copied(process(1))
    for line in new:
        info = line["benchmark"]["extra_info"]
        if differs == "study":
            info["case"]["study"] = "another"
        elif differs != "clock":
            info[differs] = "another"
        elif line["metric"]["name"] == "latency":
            line["metric"]["extra_info"]["clock"] = "another"
    for its_runs in rows(process(2) + new).values():
        assert [run.info["run"] for run in its_runs] == ["run 1"]
    for its_runs in rows(new + process(2)).values():
        assert [run.info["run"] for run in its_runs] == ["run 2"]
    assert all(len(its_runs) == 2 for its_runs in rows(process(2) + process(1)).values())


def test_of_each_row_the_latest_commit_counts():
    """Rows may be of different commits: each has its own latest."""
    older = process(1, facts=FACTS | {"git": "older"})
    newer = [line for line in process(2, facts=FACTS | {"git": "newer"}) if line["model"]["backend"] == "2_sdpa"]
    for where, (run,) in rows(older + newer).items():
        assert run.info["git"] == ("newer" if where.case == "2_sdpa" else "older")


def test_a_process_that_stands_in_a_file_twice_is_one():
    """The same records five times are no five processes, and no floor."""
    once = process(1)
    assert all(len(its_runs) == 1 for its_runs in rows(once * 5).values()) and not floors(once * 5)


def test_a_row_is_told_by_case_shape_dtype_and_gpu():
    ms = both([1.0] * 6, [])
    lines = made("2_sdpa", ms) + made("2_sdpa", ms, config=CPU_CONFIG.replace(seq_len=32))
    lines += made("2_sdpa", ms, matmul="float32") + made("2_sdpa", ms, facts=FACTS | {"name": "another CPU"})
    lines += made("2_sdpa", both([], [1.0] * 6)) + made("2_sdpa", both([1.0] * 6, [], launch="graph"))
    lines += made("2_sdpa", ms, parameter_dtype="bfloat16")
    assert len(rows(lines)) == 7
    assert next(iter(rows(lines))) == What("2_sdpa", FORWARD, "eager", str(CPU_CONFIG), "bfloat16, float32", "a CPU")


# ------------------------------------------------------------------------------------------------------------- one row


def test_a_spread_is_the_median_and_how_far_its_interval_reaches():
    samples = [float(ms) for ms in range(1, 41)]
    low, high = timing.median_interval(samples)
    assert spread(samples) == significance.Spread(20.5, (high - low) / 2 / 20.5)
    assert spread([1.0, 3.0, 2.0]) == significance.Spread(2.0, 0.5)            # fewer than six: how far they are apart


def test_a_row_of_several_processes_is_their_middle():
    lines = []
    for run, ms in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        lines += made("2_sdpa", both([ms] * 9, []), run=run, calibration={"gemm": [ms] * 9, "copy": [1.0] * 9})
    ((where, its_runs),) = rows(lines).items()
    row = measured(where, its_runs)
    assert (row.ms, row.calibration, row.share) == (2.0, {"gemm": 2.0, "copy": 1.0}, None)
    assert row.within == row.calibration_within == 0.0 and row.between is None and not row.launch_bound
    assert row.runs == {"a", "b", "c"} and row.clock == "fake"


def test_calibrations_that_not_all_processes_took_are_left_out():
    lines = made("2_sdpa", both([1.0] * 9, []), run="a", calibration={"gemm": [1.0] * 9, "copy": [1.0] * 9})
    lines += made("2_sdpa", both([1.0] * 9, []), run="b", calibration={"gemm": [1.0] * 9, "copy": []})
    ((where, its_runs),) = rows(lines).items()
    assert measured(where, its_runs).calibration == {"gemm": 1.0}


def test_the_share_of_matmuls_and_attention_is_that_of_the_parts():
    parts = dict.fromkeys(PARTS, 0.0) | {"GEMM": 2.0, "attention": 1.0, "idle": 1.0}
    ((where, its_runs),) = rows(made("2_sdpa", both([4.0] * 9, []), parts={FORWARD: parts})).items()
    assert measured(where, its_runs).share == 0.75


def test_most_processes_must_be_launch_bound_for_the_row_to_be():
    def file(bound: int) -> list[dict]:
        lines = []
        for number in range(5):
            lines += made("2_sdpa", both([10.0] * 9, []), run=str(number), enqueue=9.0 if number < bound else 1.0)
        return lines
    for bound, expected in ((2, False), (3, True)):
        ((where, its_runs),) = rows(file(bound)).items()
        assert measured(where, its_runs).launch_bound == expected


# -------------------------------------------------------------------------------------------------------- calibrations


def test_a_row_goes_by_matmul_and_copy_as_its_time_does():
    slower = {"gemm": 2.0, "copy": 3.0}
    assert weights(WHERE, {"gemm", "copy"}, 0.75) == {"gemm": 0.75, "copy": 0.25}
    assert weights(WHERE, {"gemm", "copy"}, None) == {"gemm": 0.5, "copy": 0.5}          # half where it is not known
    assert weights(WHERE, {"gemm"}, 0.75) == weights(WHERE, {"copy"}, 0.75) == {}
    once = {"gemm": 1.0, "copy": 1.0}
    assert expected_ratio(WHERE, once, slower, 0.75) == pytest.approx(2**0.75 * 3**0.25)
    assert expected_ratio(WHERE, once, {"gemm": 2.0}, 0.75) == 1.0


def test_a_row_in_fp32_is_held_against_a_matmul_in_fp32():
    """Where both sides have one: in older files the only matmul is in FP16."""
    once = {"gemm": 1.0, "gemm float32": 1.0, "copy": 1.0}
    in_fp32 = once | {"gemm float32": 2.0}
    assert expected_ratio(IN_FP32, once, in_fp32, 1.0) == 2.0
    assert expected_ratio(WHERE, once, in_fp32, 1.0) == 1.0
    older = {"gemm": 1.0, "copy": 1.0}
    assert expected_ratio(IN_FP32, older, in_fp32, 1.0) == 1.0


# -------------------------------------------------------------------------------------------------------------- floors


def test_a_floor_takes_five_processes():
    assert floors(several(0, 4)) == {}
    five = floors(several(0, 5))
    assert len(five) == 8 and all(0.001 < floor < 0.02 for floor in five.values())


def test_processes_of_other_commits_are_no_floor():
    """Five commits, each faster than the one before, are not five processes of the same code."""
    history = []
    for number in range(5):
        history += process(number, clock=1.3 - 0.07 * number, facts=FACTS | {"git": f"commit{number}"})
    assert floors(history) == {}


def test_another_clock_between_processes_is_no_floor():
    """Their calibrations take it out: what is left is the floor."""
    lines = []
    for seed in range(5):
        lines += process(seed, clock=1.0 + 0.1 * seed)
    assert all(floor < 0.02 for floor in floors(lines).values())


def test_a_rows_floor_is_no_less_than_that_of_most_of_its_shape():
    """Five processes tell one row's own spread badly."""
    lines = []
    for number in range(5):
        for step, part in (("0_baseline", 1e-5), ("1_cublas", 1e-3), ("2_sdpa", 1e-2)):
            samples = [10 * (1 + part * number)] * 9
            lines += made(step, both(samples, samples), run=str(number))
    found = {where.case: floor for where, floor in floors(lines).items()}
    assert found["0_baseline"] == pytest.approx(found["1_cublas"]) and found["2_sdpa"] > 9 * found["1_cublas"]


def test_a_shape_has_floors_of_its_own():
    """The rows of one shape raise no floor of another."""
    lines = []
    for number in range(5):
        for size, part in ((32, 1e-5), (64, 1e-2)):
            samples = [10 * (1 + part * number)] * 9
            lines += made("2_sdpa", both(samples, []), run=str(number), config=CPU_CONFIG.replace(seq_len=size))
    small, large = floors(lines).values()
    assert large > 100 * small


@pytest.mark.parametrize("floor, changes, expected", [
    (0.01, {}, (0.01, False)), (None, {}, (0.10, True)), (0.01, {"clock": "another"}, (0.10, True)),
    (0.01, {"launch_bound": True}, (0.10, True)), (0.2, {"launch_bound": True}, (0.2, True)),
])
def test_a_floor_holds_where_calibrations_do_and_is_assumed_elsewhere(floor, changes, expected):
    assert floor_of(of_row(1.0), of_row(1.0, **changes), floor) == expected
    assert floor_of(of_row(1.0, **changes), of_row(1.0), floor) == expected


# --------------------------------------------------------------------------------------------------- noise and verdict


@pytest.mark.parametrize("floor, expected", [(0.001, (0.02, 0.004)), (0.01, (0.02, 0.01)), (0.05, (0.05, 0.05))])
def test_a_sides_noise_is_its_own_or_the_floor(floor, expected):
    sides = of_row(1.0, within=0.02, calibration_within=0.3), of_row(1.0, runs=frozenset("b"))
    assert noises_of(*sides, floor, assumed=False) == expected


def test_calibrations_add_their_noise_beside_an_assumed_floor():
    """A known floor holds it. So do the same runs, whose calibrations cancel, and what is held against none."""
    old, new = of_row(1.0, calibration_within=0.03), of_row(1.0, calibration_within=0.04, runs=frozenset("b"))
    assert noises_of(old, new, 0.1, assumed=True) == pytest.approx((math.hypot(0.1, 0.03), math.hypot(0.1, 0.04)))
    assert noises_of(old, new, 0.1, assumed=False) == (0.1, 0.1)
    assert noises_of(old, old, 0.1, assumed=True) == (0.1, 0.1)
    another_clock = of_row(1.0, calibration_within=0.04, clock="another", runs=frozenset("b"))
    assert noises_of(old, another_clock, 0.1, assumed=True) == (0.1, 0.1)


def test_a_difference_is_what_calibrations_leave_of_it():
    """The noise of both is the root of the sum of both squares."""
    old, new = of_row(10.0, share=1.0), of_row(12.0, share=1.0, calibration={"gemm": 1.1, "copy": 1.0})
    difference, noise, word = verdict(WHERE, old, new, (0.03, 0.04))
    assert difference == pytest.approx(12 / 11 - 1) and noise == pytest.approx(0.05) and word == "SLOWER"
    another_clock = of_row(12.0, share=1.0, calibration={"gemm": 1.1, "copy": 1.0}, clock="another")
    assert verdict(WHERE, old, another_clock, (0.03, 0.04))[0] == pytest.approx(0.2)


def test_the_share_is_of_those_that_were_profiled():
    old, new = of_row(10.0, share=1.0), of_row(20.0, calibration={"gemm": 2.0, "copy": 1.0})
    assert verdict(WHERE, old, new, (0.0, 0.0))[0] == pytest.approx(0.0)
    halves = of_row(20.0, share=0.0, calibration={"gemm": 2.0, "copy": 1.0})
    assert verdict(WHERE, old, halves, (0.0, 0.0))[0] == pytest.approx(math.sqrt(2) - 1)


@pytest.mark.parametrize("difference, noise, word", [
    (0.02, 0.01, "SLOWER"), (-0.02, 0.01, "FASTER"), (0.01, 0.01, "SAME"), (0.0, 0.05, "SAME"), (0.05, 0.06, "UNSURE"),
    (0.2, 0.1, "SLOWER"), (-0.09, 0.1, "UNSURE"),
])
def test_a_verdict_is_the_difference_beside_the_noise(difference, noise, word):
    assert word_for(difference, noise) == word


def test_the_noise_of_tests_is_that_of_a_machine():
    """Six processes: the floors that other tests rest on."""
    assert len(floors(NOISE)) == 8 and max(floors(NOISE).values()) < 0.02
