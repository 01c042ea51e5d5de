"""Reading records: what is refused, what is left out, and what is put together."""
import json

import pytest
import torch
from made_records import CPU_CONFIG, FACTS, GPU, both, made

from benchmarks import records
from benchmarks.attribution import PARTS
from benchmarks.records import BadRecords

pytestmark = pytest.mark.unit
LINES = made("0_baseline", both([4.0] * 6, [8.0] * 6)) + made("2_sdpa", both([1.0] * 6, [4.0] * 6))


def write(path, lines, end="\n"):
    path.write_text("\n".join(map(json.dumps, lines)) + end)
    return path


def test_a_file_is_read_whole_and_in_order(tmp_path):
    assert records.read(write(tmp_path / "a", LINES)) == LINES


def test_a_last_line_that_was_cut_off_is_left_out_and_named(tmp_path, capsys):
    path = write(tmp_path / "a", LINES, end="\n" + json.dumps(LINES[0])[:70])
    assert records.read(path) == LINES
    assert capsys.readouterr().err == f"{path}, line {len(LINES) + 1}: cut off, left out\n"


@pytest.mark.parametrize("bad", ["{", "7", "null", "[]", '{"a": 1}', '{"benchmark": {}}', "text", '"benchmark"'])
def test_a_line_that_is_no_record_is_refused_by_its_number(tmp_path, bad):
    path = tmp_path / "a"
    path.write_text(json.dumps(LINES[0]) + "\n" + bad + "\n" + json.dumps(LINES[1]) + "\n")
    with pytest.raises(BadRecords, match=r"a, line 2: .*give a file that --json wrote"):
        records.read(path)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"], ids=["empty", "blank", "binary"])
def test_a_file_without_records_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(BadRecords):
        records.read(tmp_path / "a")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(BadRecords, match="No such file"):
        records.read(tmp_path / "a")
    with pytest.raises(BadRecords, match="directory"):
        records.read(tmp_path)


@pytest.mark.parametrize("values", [["fast"], [float("nan")], [True], [0.0], [-1.0], [None]])
def test_samples_that_are_no_times_are_refused(tmp_path, values):
    line = json.loads(json.dumps(next(line for line in LINES if line["metric"]["name"] == "latency")))
    line["metric"]["benchmark_values"] = values
    with pytest.raises(BadRecords, match="line 1"):
        records.read(write(tmp_path / "a", [line]))


@pytest.mark.parametrize("extra", [{"launch": "rocket"}, {"launch": "eager", "calibration": {"gemm": ["x"]}}, {}])
def test_a_latency_that_says_not_how_is_refused(tmp_path, extra):
    line = json.loads(json.dumps(next(line for line in LINES if line["metric"]["name"] == "latency")))
    line["metric"]["extra_info"] = extra
    with pytest.raises(BadRecords, match="line 1"):
        records.read(write(tmp_path / "a", [line]))


def test_what_a_reader_must_know_besides_is_said():
    lines = made("0_baseline", both([1.0] * 6, [1.0] * 6)) + made("1_cublas", {}, status="oom", reason="80 GiB")
    assert records.cautions(records.runs(lines[:3])) == []
    for line in lines:
        line["runners"][0]["extra_info"] |= {"throttled": ["power cap"], "neighbours": ["python (pid 7)"]}
    lines[0]["metric"]["extra_info"]["reason"] = "graph: not captured"
    assert records.cautions(records.runs(lines)) == [
        "0_baseline, check: graph: not captured", "throttled meanwhile: power cap",
        "other processes were on this GPU: python (pid 7)", "1_cublas: oom: 80 GiB"]


@pytest.mark.parametrize("facts, config, dtype, matmul, words", [
    (FACTS, {}, "float32", "bfloat16", "2_sdpa"),
    (GPU, {"amp_dtype": torch.float16}, "float32", "float16", "2_sdpa"),
    (GPU, {}, "float32", "bfloat16", "2_sdpa, bfloat16"),
    (GPU, {"amp_dtype": None}, "float32", "tf32", "2_sdpa, TF32 alone"),
    (FACTS, {"amp_dtype": None}, "float32", "float32", "2_sdpa, no autocast"),
    (FACTS, {"dropout": 0.5}, "bfloat16", "bfloat16", "2_sdpa, dropout 0.5, all 16-bit"),
    (FACTS, {"fp8_weights": "kept", "fp8_attention": True}, "float32", "float8", "2_sdpa, weights kept, FP8 attention"),
])
def test_a_label_names_what_is_not_the_default(facts, config, dtype, matmul, words):
    config = CPU_CONFIG.replace(**config)
    (line, *_) = made("2_sdpa", {}, facts=facts, config=config, parameter_dtype=dtype, matmul=matmul)
    assert records.label(line) == words


def test_a_run_knows_its_figures():
    (run,) = records.runs(made("2_sdpa", both([3.0, 1.0, 2.0], [6.0] * 3) | {("forward", "graph"): [1.5] * 3}))
    assert run.median("forward", "eager") == 2.0 and run.best("forward") == "graph" and run.best_ms("forward") == 1.5
    assert run.best("forward+backward") == "eager" and run.samples("forward+backward", "graph") == []
    assert run.value("check", "branch error") == 2e-7 and run.value("forward", "launches") == 3
    assert run.value("forward", "no such metric") is None


def test_each_process_is_a_run_of_its_own_and_the_latest_counts():
    lines = made("2_sdpa", both([1.0], [1.0]), run="a") + made("2_sdpa", both([2.0], [2.0]), run="b")
    assert [run.best_ms("forward") for run in records.runs(lines)] == [1.0, 2.0]
    assert records.latest(lines)["2_sdpa"].best_ms("forward") == 2.0


def test_times_of_what_failed_are_none():
    """A step can fail in its second pass: what it took in the first is nobody's time."""
    (run,) = records.runs(made("2_sdpa", both([1.0], [1.0])) + made("2_sdpa", {}, status="failed", reason="why"))
    assert run.best("forward") is None and run.best_ms("forward") is None


def test_only_samples_of_the_same_rounds_are_paired():
    a, b = records.runs(made("0_baseline", both([4.0] * 6, []), run="x") + made("2_sdpa", both([2.0] * 6, []), run="x"))
    assert records.paired(a, b, "forward") == (2.0, 2.0, 2.0)
    assert records.paired(a, b, "forward+backward") is None
    (c,) = records.runs(made("2_sdpa", both([2.0] * 6, []), run="y"))
    assert records.paired(a, c, "forward") is None


def test_the_last_status_is_the_status():
    (run,) = records.runs(made("2_sdpa", both([1.0], [1.0]), status="failed", reason="why"))
    assert (run.status, run.info["reason"]) == ("failed", "why")


FIELDS = [("dependencies", None), ("dependencies.torch", "2.9"), ("runners", []), ("benchmark.extra_info.reason", 7),
          ("benchmark.extra_info.config.dropout", "0"), ("benchmark.extra_info.config", []), ("model.name", None),
          ("metric.extra_info.calibration", None), ("metric.extra_info.clock", None), ("metric.extra_info.reason", 7),
          ("metric.benchmark_values", [10**400]), ("metric.extra_info.launch", []), ("metric.benchmark_values", 1.0)]


@pytest.mark.parametrize("field, value", FIELDS, ids=str)
def test_a_field_of_another_type_is_refused(tmp_path, field, value):
    line = json.loads(json.dumps(next(line for line in LINES if line["metric"]["name"] == "latency")))
    *path, name = field.split(".")
    place = line
    for key in path:
        place = place[key]
    place[name] = value
    with pytest.raises(BadRecords, match="line 1"):
        records.read(write(tmp_path / "a", [line]))


@pytest.mark.parametrize("parts", [{"GEMM": 1.0}, {"GEMM": float("nan")}, {"GEMM": -1.0}, {"GEMM": 0.0}])
def test_parts_that_add_up_to_no_time_are_refused(tmp_path, parts):
    others = {} if parts == {"GEMM": 1.0} else dict.fromkeys(PARTS, 0.0)        # one part alone is no whole either
    lines = made("2_sdpa", both([1.0] * 6, [1.0] * 6), parts={"forward": dict.fromkeys(PARTS, 1.0)})
    line = next(line for line in lines if line["metric"]["name"] == "time by part")
    line["metric"]["extra_info"]["parts"] = others | parts
    with pytest.raises(BadRecords, match="line 1"):
        records.read(write(tmp_path / "a", [line]))


@pytest.mark.parametrize("name", ["clocked", "timed"])
@pytest.mark.parametrize("ms", ["fast", float("nan"), [1.0]])
def test_parts_with_a_time_that_is_none_are_refused(tmp_path, name, ms):
    lines = made("0_baseline", both([4.0] * 6, []), parts={"forward": dict.fromkeys(PARTS, 1.0)}, **{name: ms})
    with pytest.raises(BadRecords):
        records.read(write(tmp_path / "a", lines))


def test_of_an_older_record_the_profiled_way_of_launching_tells_the_time():
    lines = made("0_baseline", both([4.0] * 6, []) | {("forward", "graph"): [3.0] * 6}, of="eager",
                 parts={"forward": dict.fromkeys(PARTS, 1.0)})
    (run,) = records.runs(lines)
    assert (run.best_ms("forward"), run.profiled_ms("forward")) == (3.0, 4.0)


@pytest.mark.parametrize("gits, said", [("", ""), ("a", "a"), ("aab", "a and b"), ("abac", "a, b and c"),
                                        (" a", "not recorded and a")])
def test_the_commits_of_records_are_told_in_words(gits, said):
    lines = [{"benchmark": {"extra_info": {"git": git.strip() or None}}} for git in gits]
    assert records.commits(lines) == said
