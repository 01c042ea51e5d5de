"""The figures of a row: named once, and found by card, record, table and compare alike."""
import dataclasses

import pytest

from benchmarks.records import compare
from benchmarks.records.read import runs
from benchmarks.show import tables
from benchmarks.show.tables import Context
from common.report import card, metrics, record
from common.report.card import card as printed
from common.report.metrics import METRICS, Metric
from common.report.record import row_records
from common.report.result import Row
from common.runtime.iteration import BOTH, FORWARD
from tests.helpers.made_results import finished, row

pytestmark = pytest.mark.unit


def test_names_and_labels_are_told_once():
    assert len({metric.name for metric in METRICS}) == len({metric.label for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_row_without_anything_has_no_figure_and_a_whole_one_has_all(metric):
    assert metric.of(Row()) is None and metric.shown(None) == "n/a"
    assert metric.of(row()) > 0 and float(metric.shown(metric.of(row())).replace(",", "")) > 0


def test_a_new_figure_is_found_by_all_that_shows_one(monkeypatch):
    """Added to the list alone: the card has its line, the record its metric, a table a column, and compare tells it."""
    wobble = Metric("wobble", "ms", lambda row: row.median and row.median / 2, "wobble us", ".1f", 1e3, compared=True)
    for module in (card, record, compare):
        monkeypatch.setattr(module, "METRICS", (*METRICS, wobble))
    result = finished(gpu=True)
    assert "wobble us                    3600.0         3600.0" in printed(result)
    (old,) = runs(row_records(result, FORWARD) + row_records(result, BOTH))
    assert old.figure(wobble, FORWARD, "eager") == 3.6 and old.shown(wobble, FORWARD) == "3600.0"
    assert tables.of_metric(wobble, "us").of(old, Context(FORWARD, [old])) == "3,600"
    result.rows = {key: row(timing=dataclasses.replace(row().timing, samples=[9.0] * 6)) for key in result.rows}
    (new,) = runs(row_records(result, FORWARD))
    where = dataclasses.make_dataclass("Where", ("case", "mode", "launch"))("a step", FORWARD, "eager")
    assert "a step, forward, eager: wobble us 3600.0 -> 4500.0 (+25 %)" in compare._changed(where, old, where, new)


@pytest.mark.parametrize("peak, told", [(3.0, []), (3.1, []), (2.0, ["peak memory GiB 3.00 -> 2.00 (-33 %)"]),
                                        (None, [])])
def test_compare_tells_of_memory_that_changed(peak, told):
    result = finished(gpu=True)
    (old,) = runs(row_records(result, FORWARD))
    result.rows = {key: row(peak_bytes=peak and int(peak * 2**30)) for key in result.rows}
    (new,) = runs(row_records(result, FORWARD))
    where = dataclasses.make_dataclass("Where", ("case", "mode", "launch"))("a step", FORWARD, "eager")
    assert compare._changed(where, old, where, new) == [f"a step, forward, eager: {line}" for line in told]


def test_the_share_of_a_limit_beyond_it_is_an_error():
    assert metrics.SHARE["burst"].shown(100.4) == "100 ERROR" and metrics.SHARE["burst"].shown(99.6) == "100"
