"""The study of the judge: its findings, and its tables from records."""
import re

import pytest
import torch

from benchmarks.examples.cheats import CHEATS
from benchmarks.examples.pairs import RIGHT, WRONG
from benchmarks.measure.checks import Check, Judgement
from benchmarks.measure.names import gradient_of, output
from benchmarks.records.read import latest, metric
from benchmarks.studies import judge
from benchmarks.studies.judge import cheating
from tests.benchmarks.studies.test_studies import cpu_records

unit = pytest.mark.unit
NAN = float("nan")


@unit
def test_meaning_tells_what_16_bits_do_not():
    """An epsilon shows in FP64 and in FP32, and not in BF16."""
    name = "an epsilon of 1e-6"
    in_fp64 = judge.judged(WRONG[name](torch.float32), meaning=True)
    in_fp32 = judge.judged(WRONG[name](torch.float32), meaning=False)
    in_bf16 = judge.judged(WRONG[name](torch.bfloat16), meaning=False)
    assert (in_fp64.passed, in_fp32.passed, in_bf16.passed) == (False, False, True)
    assert in_fp64.times_the_bound > 1000 * in_fp32.times_the_bound > 1000 > in_bf16.times_the_bound * 1000


@unit
def test_the_finding_is_the_check_that_failed_even_where_another_has_no_figure():
    missing = Check(gradient_of("w"), "form", False, True, NAN, NAN, "it has none")
    small = Check(output("output"), "meaning", True, True, 1e-12, 1e-9, "in FP64")
    found = judge.finding(Judgement([small, missing], "FP64"), "meaning")
    assert (found.passed, found.tensor, found.times_the_bound) == (False, "gradient of w", None)
    assert judge.finding(Judgement([small], "FP64"), "meaning").times_the_bound == pytest.approx(1e-3)
    other = Check(output("output"), "precision", True, True, 1.0, 2.0, "")
    assert judge.finding(Judgement([small, other], "FP64"), "meaning").times_the_bound == pytest.approx(1e-3)


@unit
def test_every_pair_was_recorded_and_the_judge_was_right_about_all():
    lines = [line for line in cpu_records("judge") if metric(line).startswith("error by ")]
    runs = latest(lines)
    assert set(runs) == {f"{name}, right" for name in RIGHT} | {f"{name}, wrong" for name in WRONG}
    assert all(run.status == "ok" and len(run.lines) == len(judge.QUESTIONS) for run in runs.values())
    assert judge.answer(lines) == (f"{len(WRONG)} of {len(WRONG)} mistakes refused, "
                                   f"{len(RIGHT)} of {len(RIGHT)} right modules passed")


@unit
def test_the_tables_name_what_can_not_be_reported():
    said = judge.text(cpu_records("judge"), 120)
    row = next(line.split() for line in said.splitlines() if line.startswith("GELU without tanh"))
    assert row.count("passes") == 2 and "FP64" in said
    assert next(line for line in said.splitlines() if line.startswith("no_grad inside")).count("form") == 4


# ---------------------------------------------------------------------------------------- cheats, honest ones, the cost


@unit
def test_every_cheat_was_recorded_and_refused():
    lines = cpu_records("judge")
    cheats = {run.case["name"]: run for run in latest(lines).values() if run.variant["kind"] == "cheat"}
    assert cheats.keys() == CHEATS.keys()
    for name, run in cheats.items():
        assert run.status == ("skipped" if CHEATS[name].needs_gpu else "ok"), name
    assert f"{len(CHEATS) - 1} of {len(CHEATS) - 1} cheats refused" in judge.answer(lines)


@unit
def test_more_than_a_hundred_honest_modules_were_recorded_and_none_refused():
    (line,) = [line for line in cpu_records("judge") if metric(line) == judge.HONEST]
    (passed,) = line["metric"]["benchmark_values"]
    assert passed == line["metric"]["extra_info"]["of"] >= 100
    assert len(list(cheating.honest())) == passed > 4 * len(list(cheating.honest(quick=True)))


@unit
def test_the_defences_cost_less_than_a_third():
    said = judge.text(cpu_records("judge"), 400)
    (percent,) = re.findall(r"The defences add (-?\d+) % to the wall time", said)
    assert int(percent) < 35
    row = next(line for line in said.splitlines() if line.startswith("an output cached by address"))
    assert "a timed call (forward) returned another result" in row and row.rstrip().endswith("passes")


@pytest.mark.integration
def test_a_cheat_is_held_against_a_common_check_too():
    found = cheating.of_cheat("zeros below an absolute tolerance", CHEATS["zeros below an absolute tolerance"],
                              torch.device("cpu"))
    assert found.refused and found.passes_allclose and found.times_as_fast is None
    found = cheating.of_cheat("a constant", CHEATS["a constant"], torch.device("cpu"))
    assert found.refused and not found.passes_allclose
