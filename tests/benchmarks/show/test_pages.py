"""The generated parts of the pages: what they tell of records, and that the pages hold what they give."""
from types import SimpleNamespace

import pytest

from benchmarks import studies
from benchmarks.records.read import BadRecords
from benchmarks.show import page_parts, pages
from benchmarks.show import study as frame
from benchmarks.show.tables import NO_ANSWER
from common import steps
from tests.helpers.made_records import FACTS, both, copied, made, write

unit, integration = pytest.mark.unit, pytest.mark.integration
ANEW = "run python -m benchmarks pages"


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its headings."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


# ------------------------------------------------------------------------------------------- what stands in the pages


@integration
@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(steps.ROOT)))
def test_a_page_is_what_the_records_and_scripts_say(page):
    text = page.read_text()
    assert pages.rewritten(text, page_parts.parts_of(studies.every())) == text, ANEW


@integration
def test_the_tables_beside_the_records_are_what_these_say():
    tables = pages.long_tables(studies.every())
    assert tables
    for path, text in tables.items():
        assert path.exists() and path.read_text() == text, ANEW


@integration
def test_the_charts_show_the_recorded_runs():
    assert pages.stale_charts(studies.every()) == [], ANEW


# -------------------------------------------------------------------------------------------------------- their places


@unit
def test_what_stands_between_two_markers_alone_is_rewritten():
    page = "above\n<!-- begin a b -->\nold\nlines\n<!-- end a b -->\nbetween\n<!-- begin c -->\n<!-- end c -->\nbelow\n"
    rewritten = pages.rewritten(page, {"a b": lambda: "new", "c": lambda: "more"})
    assert rewritten == ("above\n<!-- begin a b -->\nnew\n<!-- end a b -->\nbetween\n"
                         "<!-- begin c -->\nmore\n<!-- end c -->\nbelow\n")
    assert pages.rewritten("no markers at all", {}) == "no markers at all"


@unit
def test_a_place_for_what_there_is_not_is_named():
    with pytest.raises(BadRecords, match="a page has a place for 'diff 7 8': there is no such part"):
        pages.rewritten("<!-- begin diff 7 8 -->\n<!-- end diff 7 8 -->\n", {"diff 0 1": lambda: "new"})


# ---------------------------------------------------------------------------------------------------------- the tables


@unit
def test_the_scripts_are_told_in_ratios():
    """Times the first, and of the ladder's own rows times the previous."""
    lines = made("0_baseline", both([10.0], [40.0]), run=None, study="step")
    lines += made("1_cublas", both([5.0], [10.0]), run=None, study="step")
    lines += made("1_cublas", both([4.0], [20.0]), run=None, study="step", parameter_dtype="bfloat16")
    lines += made("2_sdpa", both([2.5], [5.0]), run=None, study="step")
    first, second, in_16_bits, third = cells(page_parts.scripts_table(lines))
    assert first == ["0_baseline", "10.00", "n/a", "40.00", "n/a", "1.0 / 1.0", "", "n/a / n/a",
                     "50 / 50", "n/a", "1.00", "2.0e-07"]
    assert second[0] == "1_cublas" and second[5:7] == ["2.0 / 4.0", "4.00"]
    assert in_16_bits[0] == "1_cublas, all 16-bit" and in_16_bits[5:7] == ["2.5 / 2.0", ""]
    assert third[0] == "2_sdpa" and third[5:7] == ["4.0 / 8.0", "2.00"]


@unit
def test_a_run_that_failed_is_a_row_of_the_scripts_table():
    lines = made("0_baseline", both([1.0], [2.0])) + made("1_cublas", {}, status="failed", reason="why")
    _, failed = cells(page_parts.scripts_table(lines))
    assert failed == ["1_cublas"] + ["n/a"] * 11


@unit
def test_the_first_table_is_the_ladders_by_the_faster_launch(tmp_path, monkeypatch):
    """A row for each step that was timed."""
    lines = made("0_baseline", both([8.0] * 6, [24.0] * 6)) + made("1_cublas", {}, status="oom", reason="why")
    lines += made("2_sdpa", both([4.0] * 6, [12.0] * 6) | both([3.0] * 6, [8.0] * 6, launch="graph"))
    path = write(tmp_path / "ladder.jsonl", lines)
    monkeypatch.setattr(page_parts, "recorded", lambda name: [path])
    told, table = page_parts.summary().split("\n\n")
    assert told.startswith("a CPU, ")
    assert cells(table) == [["0_baseline", "8.00", "24.00", "1.0", "", "n/a", "50", "n/a", "2e-07"],
                            ["2_sdpa", "3.00", "8.00", "3.0", "3.00 [3.00, 3.00]", "n/a", "50", "n/a",
                             "2e-07"]]


@unit
def test_a_question_is_answered_by_the_first_run_that_holds_the_answer(tmp_path, monkeypatch):
    part = write(tmp_path / "part.jsonl", made("0_baseline", both([8.0] * 6, [8.0] * 6)))
    whole = write(tmp_path / "whole.jsonl", made("2_sdpa", both([4.0] * 6, [4.0] * 6)))

    def answer(lines):
        return NO_ANSWER if "0_baseline" in str(lines) else "twice as fast"
    study = SimpleNamespace(name="a", question="What?", answer=answer)
    for paths, said in (([part, whole], "twice as fast"), ([part], NO_ANSWER)):
        monkeypatch.setattr(page_parts, "recorded", lambda name, paths=paths: paths)
        assert cells(page_parts.questions([study]))[0][2] == said


@unit
def test_the_first_table_is_of_the_commit_that_was_timed(tmp_path, monkeypatch):
    """The counters' runs, of another one, time nothing."""
    lines = made("0_baseline", both([8.0] * 6, [24.0] * 6), facts=FACTS | {"git": "1111111"})
    counted = copied(made("0_baseline", both([1.0] * 6, [1.0] * 6), run="two", facts=FACTS | {"git": "2222222"}))
    for line in counted:
        line["metric"]["name"] = "dram traffic"
    path = write(tmp_path / "ladder.jsonl", lines + counted)
    monkeypatch.setattr(page_parts, "recorded", lambda name: [path])
    told, table = page_parts.summary().split("\n\n")
    assert told.endswith("commit 1111111.")
    assert [row[:3] for row in cells(table)] == [["0_baseline", "8.00", "24.00"]]


@unit
def test_a_diff_has_the_lines_in_which_two_steps_differ():
    count, text = page_parts.diff(steps.load(1), steps.load(2)).split(" lines, docstrings aside:\n\n")
    lines = text.removeprefix("```diff\n").removesuffix("\n```").splitlines()
    assert int(count) == len(lines) > 0
    assert all(line[0] in "+-" for line in lines)


# --------------------------------------------------------------------------------------------------------- what is old


@pytest.fixture
def one_study(tmp_path, monkeypatch):
    """one_study(lines): a study of which these are recorded, and which draws one chart; the value is its chart's stem.
    """
    def set_up(lines):
        path = write(tmp_path / "study.jsonl", lines)
        monkeypatch.setattr(pages, "recorded", lambda name: [path])
        study = frame.Study(name="made up", doc="What is it?", groups=lambda chosen: [], columns=[],
                              charts=lambda lines: {"speed": None})
        return study, f"{tmp_path}/study-speed"
    return set_up


@unit
def test_a_chart_that_is_missing_or_of_other_records_is_stale(one_study, monkeypatch):
    study, stem = one_study(made("0_baseline", both([8.0] * 6, [24.0] * 6)))
    asked = []

    def is_of(name, lines):
        asked.append((name, len(lines)))
        return len(asked) > 1
    monkeypatch.setattr(pages.charts, "is_of", is_of)
    assert pages.stale_charts([study]) == [stem]
    assert pages.stale_charts([study]) == []
    assert asked[0] == asked[1] and asked[0][0] == stem
