"""The table of bytes through DRAM, from made-up records."""
import pytest

from benchmarks.show.traffic import traffic
from common import PRESETS
from common.report.record import record
from common.report.result import Result
from common.runtime.iteration import BOTH, FORWARD
from tests.helpers.made_records import GPU, both, made

pytestmark = pytest.mark.unit
TIMED = made("1_cublas", both([1.0] * 6, []))
PART = {"read": 2.0**30, "written": 2.0**29, "launches": 3}


def counted(run: str = "one", mode: str = FORWARD, **fields) -> list[dict]:
    """The record of one step's traffic."""
    result = Result("1_cublas", PRESETS["tiny"], "float32", GPU, step=1, study="ladder", run=run)
    return [record(result, "dram traffic", "bytes", [] if "reason" in fields else [1.5 * 2**30], mode, **fields)]


def test_without_counters_there_is_no_table():
    assert traffic(TIMED, FORWARD) == ""


def test_what_was_counted_is_told_in_gibibytes():
    told = traffic(TIMED + counted(block=PART, attention=PART), FORWARD).splitlines()
    assert told[0] == "DRAM traffic of forward"
    assert told[-1].split() == ["1_cublas", "1.00", "0.50", "1.00", "0.50", "3"]


def test_of_a_backward_the_block_alone_is_counted():
    told = traffic(TIMED + counted(mode=BOTH, block=PART), BOTH).splitlines()
    assert told[-1].split() == ["1_cublas", "1.00", "0.50", "n/a", "n/a", "n/a"]


def test_why_nothing_was_counted_stands_below():
    told = traffic(TIMED + counted(reason="ncu is not there"), FORWARD)
    assert told.splitlines()[-2].split() == ["1_cublas", *["n/a"] * 5]
    assert told.endswith("n/a because: ncu is not there")


def test_a_later_run_without_ncu_takes_nothing_away():
    lines = TIMED + counted(block=PART, attention=PART)
    assert traffic(lines + counted("two", reason="ncu is not there"), FORWARD) == traffic(lines, FORWARD)


def test_a_step_that_was_not_counted_says_so():
    lines = TIMED + counted(block=PART, attention=PART) + made("2_sdpa", both([1.0] * 6, []))
    assert traffic(lines, FORWARD).endswith("n/a because: not counted in this run")
