"""Numbers and tables in plain text."""
import io
import math
import os
import sys

import pytest

from common import text

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("value, form, expected", [
    (None, ".3f", "n/a"), (1.23456, ".3f", "1.235"), (0.0, ".1e", "0.0e+00"), (1234567.0, ",.0f", "1,234,567"),
    (7, "d", "7"), (math.inf, ".3f", "not finite"), (math.nan, ".1e", "not finite"),
])
def test_a_number_that_there_is_not_is_said(value, form, expected):
    assert text.number(value, form) == expected


@pytest.mark.parametrize("value, expected", [(None, "n/a"), (68.6, "69"), (100.0, "100"), (100.1, "100 ERROR"),
                                             (250.0, "250 ERROR")])
def test_more_than_100_percent_of_a_limit_is_an_error(value, expected):
    assert text.percent(value) == expected


@pytest.mark.parametrize("value, expected", [
    (0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (1234.5, "1,234"), (-1.234, "-1.23"),
    (-123.4, "-123"), (0.0, "0.000"),
])
def test_figures_are_three(value, expected):
    assert text.figures(value) == expected
    if value >= 0:
        assert text.figures(value, "+") == "+" + expected


def test_a_ratio_has_its_interval():
    assert text.ratio((1.234, 1.2, 1.27)) == "1.23 [1.20, 1.27]"
    assert text.ratio((1.2344, 1.2, 1.27), digits=3) == "1.234 [1.200, 1.270]"


# ------------------------------------------------------------------------------------------------------------ wrapping


def test_words_are_wrapped_and_a_longer_word_is_cut():
    assert text.wrap("one two three", 8) == ["one two", "three"]
    assert text.wrap("one two three", 7) == ["one two", "three"]
    assert text.wrap("one two three", 6) == ["one", "two", "three"]
    assert text.wrap("a " + "x" * 9, 4) == ["a", "xxxx"]


def test_what_fits_is_one_line_and_nothing_is_one_too():
    assert text.wrap("one two", 80) == ["one two"]
    assert text.wrap("", 80) == [""]


# -------------------------------------------------------------------------------------------------------------- tables

ROWS = [["0_baseline", "8.00", "1.00"], ["2_sdpa", "4.00", "2.00"]]
HEADERS = ["case", "ms", "x first"]


def test_a_table_has_its_keys_on_the_left_and_figures_on_the_right():
    assert text.table(ROWS, HEADERS, width=80).splitlines() == [
        "case          ms    x first",
        "----------  ----  ---------",
        "0_baseline  8.00       1.00",
        "2_sdpa      4.00       2.00"]


def test_figures_are_printed_as_they_were_given():
    """A table's library would else read them as numbers: 1.00 as 1, and 12e3 as 12000."""
    assert text.table([["a", "1.00"], ["b", "12e3"]], ["case", "x"], width=80).splitlines()[2:] == [
        "a       1.00", "b       12e3"]


def test_a_table_that_is_too_wide_is_split_and_keeps_its_keys():
    parts = text.table(ROWS, HEADERS, width=20).split("\n\n")
    assert [part.splitlines()[0].split() for part in parts] == [["case", "ms"], ["case", "x", "first"]]
    for part in parts:
        assert [line.split()[0] for line in part.splitlines()[2:]] == ["0_baseline", "2_sdpa"]
    both = text.table([["a", "b", "1", "2"]], ["one", "two", "three", "four"], width=15, keys=2).split("\n\n")
    assert [part.splitlines()[0].split() for part in both] == [["one", "two", "three"], ["one", "two", "four"]]


def test_a_table_of_keys_alone_is_one():
    assert text.table([["a", "b"]], ["one", "two"], width=80, keys=2).splitlines()[2] == "a      b"


def test_a_column_that_fits_nowhere_is_a_part_of_its_own():
    parts = text.table(ROWS, HEADERS, width=1).split("\n\n")
    assert len(parts) == 2 and len(parts[0].splitlines()) == 4


class Terminal(io.StringIO):
    """Standard output that a person looks at."""

    def isatty(self):
        return True


def test_a_table_is_as_wide_as_the_terminal_and_elsewhere_not_split(monkeypatch):
    whole = text.table(ROWS, HEADERS, width=80)
    monkeypatch.setattr(text.shutil, "get_terminal_size", lambda: os.terminal_size((20, 24)))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert text.table(ROWS, HEADERS) == whole
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert text.table(ROWS, HEADERS) == text.table(ROWS, HEADERS, width=20)


def test_a_table_in_markdown_keeps_its_figures():
    head, rule, *rows = text.markdown(ROWS, HEADERS).splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-1]] == HEADERS and set(rule) == set("|-")
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows] == ROWS
