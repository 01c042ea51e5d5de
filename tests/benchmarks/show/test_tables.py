"""Tables of runs by columns, from made-up records."""
import sys

import pytest

from benchmarks.records.read import latest
from benchmarks.show import tables
from benchmarks.show.tables import Column, Context
from common import text
from common.runtime.iteration import BOTH, FORWARD, MODES
from tests.helpers.made_records import CPU_CONFIG, GPU, both, made

pytestmark = pytest.mark.unit
READY_MADE = [tables.CASE, tables.STATUS, tables.ERROR, tables.WORST_ERROR, tables.LAUNCH, tables.MS, tables.QUANTILES,
              tables.TIMES_FIRST, tables.PAIRED_WITH_FIRST, tables.RATE, tables.SUSTAINED_LIMIT, tables.LIMIT,
              tables.JOULES, tables.MHZ, tables.MEMORY,
              tables.LAUNCHES, tables.COMPILE]


def cells(lines: list[dict], *columns: Column, mode: str = FORWARD) -> list[list[str]]:
    """A row for each run."""
    return tables.rows_of(columns, Context(mode, list(latest(lines).values())))


# ------------------------------------------------------------------------------------------------------------ columns


def test_a_run_that_was_timed_has_all_its_figures():
    lines = made("0_baseline", both([8.0] * 6, [9.0] * 6), facts=GPU, joules=2.0,
                 limits={"sustained": {"matmul": 4.0, "memory": 1.0}})
    lines += made("2_sdpa", both([4.0, 3.0, 4.0, 4.0, 5.0, 4.0], [9.0] * 6), facts=GPU, matmul="float16")
    headers = [column.header for column in READY_MADE]
    first, second = (dict(zip(headers, row, strict=True)) for row in cells(lines, *READY_MADE))
    assert first == {
        "case": "0_baseline", "status": "ok", "error": "2.0e-07", "launch": "eager", "ms": "8.00",
        "p20 to p80": "8.00 to 8.00", "x first": "1.00", "x first [95 %]": "", "TFLOP/s": "0.125",
        "% sustained": "62", "% burst": "50", "J": "2.00", "MHz": "n/a", "GiB": "1.00", "launches": "3",
        "compile s": "n/a"}
    assert (second["case"], second["ms"], second["x first"]) == ("2_sdpa", "4.00", "2.00")
    assert second["x first [95 %]"].startswith("2.00 [") and second["p20 to p80"] == "4.00 to 4.00"


def test_the_worst_error_is_that_of_all_that_was_checked():
    (row,) = cells(made("0_baseline", both([8.0] * 6, [])), tables.ERROR, tables.WORST_ERROR)
    assert row == ["2.0e-07", "2.0e-07"]
    lines = made("0_baseline", both([8.0] * 6, []))
    for line in lines:
        if line["metric"]["name"] == "output error":
            line["metric"]["benchmark_values"] = [3e-5]
    assert cells(lines, tables.ERROR, tables.WORST_ERROR) == [["2.0e-07", "3.0e-05"]]


def test_a_run_that_was_not_timed_says_how_it_ended_and_no_figure():
    lines = made("0_baseline", both([8.0] * 6, [9.0] * 6))
    lines += made("4_transformer_engine", {}, status="skipped", reason="why")
    _, skipped = cells(lines, *READY_MADE)
    assert skipped == ["4_transformer_engine", "skipped", "2.0e-07", "2.0e-07", *[""] * (len(READY_MADE) - 4)]


def test_more_than_the_limit_is_an_error_as_on_the_card():
    lines = made("0_baseline", both([8.0] * 6, [9.0] * 6))
    for line in lines:
        if line["metric"]["name"] == "percent of limit":
            line["metric"]["benchmark_values"] = [182.0]
    assert cells(lines, tables.LIMIT) == [["182 ERROR"]]


def test_what_no_record_holds_is_not_available():
    lines = [line for line in made("a peer", both([8.0] * 6, []))
             if line["metric"]["name"] not in ("rate", "percent of limit", "peak memory")]
    assert cells(lines, tables.RATE, tables.LIMIT, tables.MEMORY) == [["n/a", "n/a", "n/a"]]


def test_the_clock_is_that_of_the_row_that_is_shown():
    lines = made("0_baseline", both([8.0] * 6, [9.0] * 6) | {(FORWARD, "graph"): [5.0] * 6})
    assert cells(lines, tables.MHZ) == [["n/a"]]
    for line in lines:
        graph = line["benchmark"]["extra_info"]["case"]["launch"] == "graph"
        line["runners"][0]["extra_info"] = line["runners"][0]["extra_info"] | {"sm_mhz": 1425 if graph else 1980}
    assert [cells(lines, tables.MHZ, mode=mode) for mode in MODES] == [[["1425"]], [["1980"]]]


def test_the_faster_way_of_launching_is_the_rows():
    lines = made("0_baseline", both([8.0] * 6, []) | {(FORWARD, "graph"): [5.0] * 6})
    assert cells(lines, tables.LAUNCH, tables.MS) == [["graph", "5.00"]]


def test_the_first_and_the_previous_are_those_that_were_timed():
    lines = made("0_baseline", {}, status="failed", reason="why")
    lines += made("1_cublas", both([8.0] * 6, [])) + made("2_sdpa", {}, status="oom", reason="why")
    lines += made("3_compile", both([2.0] * 6, []))
    runs = list(latest(lines).values())
    context = Context(FORWARD, runs)
    assert context.first is runs[1]
    assert [context.previous(run) for run in runs] == [None, None, runs[1], runs[1]]


# ------------------------------------------------------------------------------------------------------------- the text


def test_a_study_of_one_table_prints_provenance_tables_and_cautions():
    lines = made("0_baseline", both([8.0] * 6, [9.0] * 6))
    lines += made("1_cublas", {}, status="skipped", reason="why")
    columns = [tables.CASE, tables.STATUS, tables.MS]
    provenance, first, forward, second, backward, cautions = tables.text(columns, lines).split("\n\n")
    assert provenance.startswith(f"a CPU, {CPU_CONFIG}; torch 2.9") and cautions == "1_cublas: skipped: why"
    assert (first, second) == (FORWARD, BOTH)
    assert forward.splitlines()[0].split() == ["case", "status", "ms"]
    timed, skipped = backward.splitlines()[2:]
    assert timed.split() == ["0_baseline", "ok", "9.00"] and skipped.split() == ["1_cublas", "skipped"]


def test_a_table_is_split_where_the_terminal_is_narrow():
    rows, headers = [["a step", "1" * 30, "2" * 30, "3" * 30]], ["step", "one", "two", "three"]
    assert len(text.table(rows, headers, 200).split("\n\n")) == 1
    for width in (80, 120):
        told = text.table(rows, headers, width)
        assert max(map(len, told.splitlines())) <= width
        assert all(part.startswith("step") for part in told.split("\n\n"))
    assert all(digit * 30 in text.table(rows, headers, 80) for digit in "123")


def test_each_part_of_a_split_table_begins_with_all_its_keys():
    rows, headers = [["a part", "eager", "1" * 30, "2" * 30]], ["part", "launch", "one", "two"]
    first, second = text.table(rows, headers, 60, keys=2).split("\n\n")
    for part in (first, second):
        assert part.split()[:2] == ["part", "launch"] and "a part" in part and "eager" in part


def test_a_table_that_goes_into_a_file_has_any_width(monkeypatch, capsys):
    rows, headers = [["a step", *["1" * 30] * 9]], ["step", *"abcdefghi"]
    assert "\n\n" not in text.table(rows, headers)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert "\n\n" in text.table(rows, headers)
