"""Which lines are records: what is read of one must be there, and of its type."""
import json

import pytest

from benchmarks.records.schema import NotARecord, checked
from common import PRESETS
from common.report.record import PARTS, SCHEMA, record
from common.report.result import Result
from common.runtime.iteration import BACKWARD, FORWARD
from tests.helpers.made_records import FACTS, both, copied, made

pytestmark = pytest.mark.unit
PARTS_OF_ONE = dict.fromkeys(PARTS, 1.0)
LINES = made("2_sdpa", both([1.0] * 6, [4.0] * 6), calibration={"gemm": [1.0], "copy": [1.0]},
             parts={FORWARD: PARTS_OF_ONE}, clocked=7.0, timed=7.0)
NOT_OURS = "is no record of this suite; give a file that --json wrote"


def first(metric: str) -> dict:
    """The first record of that metric, which a test may change."""
    return copied([next(line for line in LINES if line["metric"]["name"] == metric)])[0]


def set_field(line: dict, field: str, value) -> None:
    """Set "a.b.c" of a record."""
    *path, name = field.split(".")
    place = line
    for key in path:
        place = place[key]
    place[name] = value


def refusal(line) -> str:
    """What is said of a record that is none."""
    with pytest.raises(NotARecord) as refused:
        checked(json.dumps(line))
    return str(refused.value)


# ---------------------------------------------------------------------------------------------------------- what is one


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['metric']['name']} {line['benchmark']['mode']}")
def test_what_a_study_writes_is_a_record(line):
    assert checked(json.dumps(line)) == line


def test_a_record_of_a_whole_process_is_one():
    whole = Result("", PRESETS["tiny"], "float32", FACTS, study="sweep")
    line = record(whole, "wall time", "s", [1.0], "run", phases={"sampling": 1.0})
    assert checked(json.dumps(line))["benchmark"]["extra_info"]["case"]["name"] is None


def test_a_record_of_what_is_no_block_is_one():
    """It has no config, and a backward alone is a pass of its own."""
    line = record(Result("RMSNorm", None, "float32", FACTS, study="fusions"), "work rate", "GB/s", [1.0], BACKWARD)
    assert checked(json.dumps(line))["benchmark"]["extra_info"]["config"] == {}


def test_a_latency_without_samples_needs_no_way_of_launching():
    line = first("latency")
    line["metric"]["benchmark_values"] = []
    line["benchmark"]["extra_info"]["case"]["launch"] = None
    assert checked(json.dumps(line)) == line


def test_the_run_of_a_machine_without_git_or_engine_is_one():
    line = first("latency")
    line["benchmark"]["extra_info"] |= {"git": None, "run": None}
    assert checked(json.dumps(line)) == line


# --------------------------------------------------------------------------------------------------------- what is none


@pytest.mark.parametrize("text", ["", "{", "7", "null", "[]", "text", '"benchmark"', "[" * 100_000,
                                  '{"benchmark": []}', '{"benchmark": {"extra_info": null}}'])
def test_what_is_no_record_at_all_is_refused(text):
    with pytest.raises(NotARecord, match=NOT_OURS):
        checked(text)


@pytest.mark.parametrize("field", ["benchmark", "benchmark.mode", "benchmark.extra_info.case.study", "model", "runners",
                                   "benchmark.extra_info.config.dropout", "metric.benchmark_values", "dependencies",
                                   "benchmark.extra_info.case.variant", "benchmark.extra_info.status"])
def test_a_field_that_is_not_there_is_named(field):
    line = first("latency")
    *path, name = field.split(".")
    place = line
    for key in path:
        place = place[key]
    del place[name]
    assert refusal(line) == f"has no '{name}'; give a file that --json wrote"


@pytest.mark.parametrize("schema", ["transformer block, 1", "transformer block, 3", "another suite, 2"])
def test_another_schema_is_named_beside_ours(schema):
    line = first("latency")
    line["benchmark"]["extra_info"]["schema"] = schema
    assert refusal(line) == f"is of the schema '{schema}', this suite reads '{SCHEMA}'; record it anew"


def test_a_record_without_a_schema_is_of_the_first():
    line = first("latency")
    del line["benchmark"]["extra_info"]["schema"]
    assert refusal(line).startswith("is of the schema 'transformer block, 1', ")


FIELDS = [
    ("dependencies", None), ("dependencies.torch", "2.9"), ("runners", []), ("runners", [7]), ("model.name", None),
    ("benchmark.dtype", 16), ("benchmark.extra_info.reason", 7), ("benchmark.extra_info.run", 7),
    ("benchmark.extra_info.config.dropout", "0"), ("benchmark.extra_info.config", []),
    ("benchmark.extra_info.config.amp_dtype", None), ("benchmark.extra_info.config.fp8_attention", "yes"),
    ("benchmark.extra_info.case", []), ("benchmark.extra_info.case.study", None),
    ("benchmark.extra_info.case.step", "2"), ("benchmark.extra_info.case.name", 2),
    ("benchmark.extra_info.case.variant", []), ("benchmark.extra_info.case.pass", "sideways"),
    ("benchmark.extra_info.case.launch", "rocket"), ("benchmark.extra_info.case.launch", []),
    ("benchmark.extra_info.case.launch", None),                    # samples that say not how they were launched
    ("metric.name", None), ("metric.extra_info", None), ("metric.extra_info.calibration", None),
    ("metric.extra_info.calibration", {"gemm": ["x"]}), ("metric.extra_info.calibration", {"gemm": [0.0]}),
    ("metric.extra_info.clock", None), ("metric.extra_info.reason", 7), ("metric.benchmark_values", 1.0),
]


@pytest.mark.parametrize("field, value", FIELDS, ids=str)
def test_a_field_of_another_type_is_refused(field, value):
    line = first("latency")
    set_field(line, field, value)
    assert refusal(line) == NOT_OURS


@pytest.mark.parametrize("values", [["fast"], [float("nan")], [float("inf")], [True], [0.0], [-1.0], [None], [10**400]])
def test_samples_that_are_no_times_are_refused(values):
    line = first("latency")
    line["metric"]["benchmark_values"] = values
    assert refusal(line) == NOT_OURS


@pytest.mark.parametrize("values", [["fast"], [float("nan")], [True], [10**400]])
def test_figures_that_are_no_numbers_are_refused(values):
    line = first("rate")
    line["metric"]["benchmark_values"] = values
    assert refusal(line) == NOT_OURS


@pytest.mark.parametrize("parts", [{"GEMM": 1.0}, {"GEMM": float("nan")}, {"GEMM": -1.0}, {"GEMM": 0.0},
                                   {"GEMM": "most"}])
def test_parts_that_add_up_to_no_time_are_refused(parts):
    others = {} if parts == {"GEMM": 1.0} else dict.fromkeys(PARTS, 0.0)        # one part alone is no whole either
    line = first("time by part")
    line["metric"]["extra_info"]["parts"] = others | parts
    assert refusal(line).endswith("; give a file that --json wrote")


@pytest.mark.parametrize("name", ["clocked", "timed"])
@pytest.mark.parametrize("ms", ["fast", float("nan"), [1.0]])
def test_parts_with_a_time_that_is_none_are_refused(name, ms):
    line = first("time by part")
    line["metric"]["extra_info"][name] = ms
    assert refusal(line) == NOT_OURS


def test_parts_that_do_not_say_of_what_are_refused():
    line = first("time by part")
    del line["metric"]["extra_info"]["of"]
    assert refusal(line) == "has no 'of'; give a file that --json wrote"


@pytest.mark.parametrize("variant", [{"axis": "seq_len", "size": "64"}, {"axis": None, "size": 64}])
def test_the_end_of_a_sweeps_size_says_which(variant):
    end = Result("", PRESETS["tiny"], "float32", FACTS, study="sweep", variant=variant)
    assert refusal(record(end, "size done", "", [], "run")) == NOT_OURS
    end.variant = {"axis": "seq_len"}
    assert "has no 'size'" in refusal(record(end, "size done", "", [], "run"))
    end.variant = {"axis": "seq_len", "size": 64}
    assert checked(json.dumps(record(end, "size done", "", [], "run")))
