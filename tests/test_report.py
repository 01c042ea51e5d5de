"""The card and the records, from reports built by hand: a CPU's, an H200's, and runs that ended early."""
import copy
import fcntl
import json
import math
import os
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import PRESETS, evidence, output, report
from common import device as machine
from common.output import Output, WriteError
from common.report import LAUNCHES, MODES, Compilation, Report, Row
from common.timing import Timing

pytestmark = pytest.mark.unit

CPU = {"device": "cpu", "name": "A CPU whose name is as long as makers of CPUs like it, 64-Core Processor @ 3.70GHz",
       "cpu_threads": 2, "torch": "2.15.0+cu132", "cuda": None, "cudnn": None, "driver": None, "triton": "3.9.0",
       "transformer_engine": None, "python": "3.12.3", "git": "f0fad18+1a2b3c4d"}
H200 = CPU | {"device": "cuda", "name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132,
              "memory_gib": 139.8, "cuda": "13.0", "cudnn": 91900, "driver": "580.159.03",
              "transformer_engine": "2.20.2+cu13.torch2.11.0"}
STATE = {"load_average": 0.5, "sm_mhz": 1980, "sm_mhz_max": 1980, "memory_mhz": 3201, "power_w": 600.0,
         "power_limit_w": 700.0, "temperature_c": 61, "throttled": []}
SAMPLES = [7.2, 7.1, 7.4, 7.3, 7.1, 7.2]
KERNELS = {"nvjet_sm90_hsh_192x192_64x4_2x1_v_bz_coopB_bias_TNN": 4, "cudnn_generated_fort_native_sdpa_flash_fprop": 1}


def row(**changes) -> Row:
    return replace(Row(Timing(SAMPLES, True, "CUDA events"), flops=1.2e12, tokens=16384, limit_ms=5.0,
                       peak_bytes=3 * 2**30, enqueue_ms=0.9), **changes)


def finished(gpu: bool, **changes) -> Report:
    reason = "CUDA graphs need a GPU"
    rows = {(mode, launch): row() if gpu or launch == "eager" else Row(reason=reason, limit_ms=5.0)
            for mode in MODES for launch in LAUNCHES}
    if not gpu:
        rows = {key: replace(value, enqueue_ms=None) for key, value in rows.items()}
    kinds = Counter({"16-bit matmul": 4, "cuDNN attention": 1})
    seen = evidence.Evidence(Counter(KERNELS), kinds, "proven", "4 16-bit matmul, 1 cuDNN attention")
    return Report(
        "2_sdpa", PRESETS["te-tutorial" if gpu else "cpu"], "float32", H200 if gpu else CPU, matmul="float16",
        peaks="float16 790 TFLOP/s; copy 4.30 TB/s (read + written)",
        errors={"output": (3e-4, None), "branch": (5e-4, 1e-3), "input gradient": (5e-4, 3e-3),
                "parameter gradient": (9e-4, 3e-3)},
        worst_parameter="attn.proj.weight", rows=rows, evidence=dict.fromkeys(MODES, seen),
        clock="CUDA events" if gpu else "perf_counter", state=STATE if gpu else {"load_average": 0.5}, **changes)


def ended(status: str, reason: str, gpu: bool = True) -> Report:
    return Report("0_baseline", PRESETS["gpt2"], "float32", H200 if gpu else CPU, status=status, reason=reason)


EMULATED = "emulated (Transformer Engine does not import: FileNotFoundError: Could not find shared object file)"
NO_COMPILER = "no C++ compiler found (g++, clang++): install g++, or name one in the variable CXX"
REPORTS = {
    "CPU": finished(gpu=False),
    "H200": finished(gpu=True),
    "H200, a graph that can't be captured": finished(True, compilation=Compilation(14.5, 2.3, [9.0])),
    "H200, throttled beside others": finished(True, neighbours=[f"python (pid {pid})" for pid in range(70000, 70009)]),
    "CPU, compiled": finished(False, compilation=Compilation(14.5, 2.3, [7.0])),
    "CPU, emulated": finished(False, engine=EMULATED, emulated=True, residual="bfloat16"),
    "skipped": ended("skipped", NO_COMPILER, gpu=False),
    "oom": ended("oom", "133.1 of 139.8 GiB in use at the peak; --batch-size 16 --seq-len 1024 fits"),
    "failed": ended("failed", "the gradient of mlp.fc.bias is off by 1.0e+00 against FP64, the gate is 3.0e-03"),
}
failed_graph = REPORTS["H200, a graph that can't be captured"]
for mode in MODES:
    failed_graph.rows[mode, "graph"] = Row(reason="graph: " + "CUDA error: operation not permitted when capturing " * 3)
REPORTS["H200, throttled beside others"].state = STATE | {"throttled": ["power cap", "software thermal"]}
each_report = pytest.mark.parametrize("r", REPORTS.values(), ids=REPORTS.keys())


def labels(card: str) -> list[str]:
    """What stands in the first 20 columns, where values begin; wrapped lines have nothing there."""
    return [label for line in card.splitlines() if (label := line[:20].rstrip())]


@each_report
def test_labels_are_the_same_in_the_same_order_everywhere(r):
    assert labels(report.card(r)) == labels(report.card(REPORTS["H200"]))


@each_report
def test_the_card_is_at_most_100_columns_wide(r):
    lines = report.card(r).splitlines()
    table = next(n for n, line in enumerate(lines) if line.startswith("median ms"))
    assert max(map(len, lines)) <= 100 and max(map(len, lines[table - 2:table + 12])) <= 80


def test_even_a_word_without_spaces_is_kept_within_the_card():
    card = report.card(ended("failed", "path " + "x" * 300))
    assert max(map(len, card.splitlines())) <= 100


@each_report
def test_cards_of_the_same_data_are_the_same(r):
    assert report.card(copy.deepcopy(r)) == report.card(r)


@each_report
def test_nothing_in_the_card_changes_without_meaning(r):
    """No dates, times, addresses or process numbers, no commit: a diff of two cards shows what differs."""
    card = report.card(r)
    assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d|0x[0-9a-f]+|\bpid\b|/tmp/", card)
    assert CPU["git"] not in card


@each_report
def test_what_is_not_known_is_said_and_nothing_is_nan(r):
    card = report.card(r)
    assert not re.search(r"\b(nan|inf|None)\b", card, re.IGNORECASE)
    if r.status != "ok":
        assert f"{r.status}: " in card and "n/a" in card


def test_two_versions_of_cudnn_are_told(monkeypatch):
    def mixed():
        raise RuntimeError("cuDNN version incompatibility")
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=2**37,
                          L2_cache_size=60 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.backends.cudnn, "version", mixed)
    assert machine.facts(torch.device("cuda"))["cudnn"] == "two versions"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for paths, told in ((("a/1", "a/2"), 91900), (("a/1", "b/2"), "two versions"), ((), 91900)):
        monkeypatch.setattr(machine, "cudnn_libraries", lambda paths=paths: list(map(Path, paths)))
        assert machine.facts(torch.device("cuda"))["cudnn"] == told


def test_the_reason_is_on_the_card():
    for r in REPORTS.values():
        flat = " ".join(" ".join(line[20:] for line in report.card(r).splitlines()).split())
        assert r.reason in flat
        assert all(" ".join(row.reason.split()) in flat for row in r.rows.values() if not row.timing)


def test_an_error_that_is_not_finite_is_a_word():
    r = ended("failed", "the output is missing or not finite")
    r.errors = {"output": (math.inf, None), "branch": (math.nan, 1e-3)}
    assert report.card(r).count("not finite") == 3 and "nan" not in report.card(r)


# -------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("graph, enqueue, bound", [
    (None, None, None), (None, 0.5, False), (None, 5.6, False), (None, 6.0, True), (None, 9.0, True),
    (5.6, 0.5, True), (6.0, 0.5, False), (7.5, 9.0, False), (0.3, 5.6, True), (0.3, None, True)])
def test_launch_bound_is_a_much_faster_replay_or_without_one_enqueueing_about_as_long(graph, enqueue, bound):
    assert report.launch_bound(7.2, graph, enqueue) is bound
    assert report.launch_bound(None, graph, enqueue) is None


def test_the_card_says_launch_bound_of_the_eager_column():
    r = finished(gpu=True)
    r.rows["forward", "graph"] = row(timing=Timing([1.0] * 9, True, "CUDA events"))
    line = next(line for line in report.card(r).splitlines() if line.startswith("launch-bound"))
    assert line.split() == ["launch-bound", "launch-bound", "n/a", "no", "n/a"]


def test_the_cards_figures_are_those_of_its_rows():
    """Worked by hand: of 7.2 ms, 1.2 TFLOP, 16384 tokens, a limit of 5 ms, 3 GiB."""
    r = finished(gpu=True)
    r.rows["forward+backward", "eager"] = row(timing=Timing([20.0, 30.0, 10.0, 40.0, 50.0, 60.0], False, "CUDA events"),
                                              flops=3e12, limit_ms=7.0, peak_bytes=2**29, enqueue_ms=1.5)
    r.evidence = dict(r.evidence) | {"forward+backward": evidence.Evidence(Counter({"a": 2}), Counter(), "proven", "")}
    lines = {line[:20].rstrip(): line[20:].split() for line in report.card(r).splitlines()}
    assert lines["median ms"] == ["7.200", "7.200", "35.000", "7.200"]
    assert lines["p20 ms"] == ["7.100", "7.100", "20.000", "7.100"]
    assert lines["p80 ms"] == ["7.300", "7.300", "50.000", "7.300"]
    assert lines["samples"] == ["6"] * 4 and lines["settled"] == ["yes", "yes", "unsettled", "yes"]
    assert lines["tokens/s"] == ["2,275,556", "2,275,556", "468,114", "2,275,556"]
    assert lines["TFLOP/s"] == ["166.67", "166.67", "85.71", "166.67"]
    assert lines["limit ms"] == ["5.000", "5.000", "7.000", "5.000"] and lines["% of limit"] == ["69", "69", "20", "69"]
    assert lines["peak memory GiB"] == ["3.00", "3.00", "0.50", "3.00"] and lines["launches"] == ["5", "2"]
    assert lines["enqueue ms"][::2] == ["0.90", "1.50"]


def test_the_records_figures_are_those_of_their_rows():
    r = finished(gpu=True)
    found = {line["metric"]["name"]: line["metric"] for line in report.row_records(r, "forward")
             if line["metric"]["extra_info"].get("launch") == "eager"}
    assert (found["latency"]["extra_info"]["p20"], found["latency"]["extra_info"]["p80"]) == pytest.approx((7.1, 7.3))
    values = {name: metric["benchmark_values"] for name, metric in found.items() if name != "latency"}
    assert values == {"throughput": [pytest.approx(16384 / 7.2e-3)], "rate": [pytest.approx(1.2e12 / 7.2e-3)],
                      "limit": [5.0], "percent of limit": [pytest.approx(69.44, abs=0.01)],
                      "peak memory": [3 * 2**30], "enqueue": [0.9]}


def test_percent_of_limit_is_the_limit_over_the_median():
    assert row(limit_ms=3.6).percent_of_limit == pytest.approx(50)
    assert row(limit_ms=None).percent_of_limit is None and Row(limit_ms=3.6).percent_of_limit is None


@pytest.mark.parametrize("limit, wrong", [(7.2, False), (7.3, True), (14.4, True)])
def test_more_than_the_limit_is_shown_as_an_error(limit, wrong):
    """Faster than the machine can be: the model of the limit is wrong, not the step good."""
    r = finished(gpu=True)
    r.rows["forward", "eager"] = row(limit_ms=limit)
    line = next(line for line in report.card(r).splitlines() if line.startswith("% of limit"))
    assert ("ERROR" in line.split()) == wrong and len(line) <= 100


def test_an_unsettled_row_says_so():
    r = finished(gpu=True)
    r.rows["forward", "graph"] = row(timing=Timing(SAMPLES, False, "CUDA events"))
    line = next(line for line in report.card(r).splitlines() if line.startswith("settled"))
    assert line.split() == ["settled", "yes", "unsettled", "yes", "yes"]


@pytest.mark.parametrize("compilation, said", [
    (Compilation(14.5, 2.3, [8.2, 8.3, 8.1] * 2), "15,000 forward+backward calls"),     # 14.5 s at 1 ms a call
    (Compilation(14.5, 2.3, [7.0, 6.9] * 3), "never"), (Compilation(14.5, 2.3, [8.2, 7.2] * 3), "n/a: the difference"),
    (Compilation(14.5, 2.3, [8.2]), "n/a: too few samples"),
    (Compilation(14.5, 2.3), "n/a"), (None, "n/a"),
])
def test_the_price_of_compiling_is_told_in_calls(compilation, said):
    card = report.card(finished(True, compilation=compilation))
    line = next(line for line in card.splitlines() if line.startswith("compile pays after"))
    assert line.removeprefix("compile pays after").strip().startswith(said)


# ----------------------------------------------------------------------------------------------------------- records


def records(r: Report) -> list[dict]:
    lines = report.check_records(r)
    return lines + [line for mode in MODES if mode in r.evidence for line in report.row_records(r, mode)]


@each_report
def test_records_follow_the_schema(r):
    for record in records(r):
        assert record.keys() == {"benchmark", "model", "metric", "runners", "dependencies"}
        assert {"name", "mode", "dtype", "extra_info"} <= record["benchmark"].keys()
        assert {"name", "benchmark_values", "target_value", "extra_info"} <= record["metric"].keys()
        assert {"name", "type", "gpu_count"} <= record["runners"][0].keys()
        assert record["dependencies"]["torch"] == {"version": "2.15.0+cu132"}
        assert record["benchmark"]["extra_info"]["config"]["amp_dtype"] in ("none", "float16", "bfloat16")
        assert record["metric"]["extra_info"]["unit"] is not None
        text = json.dumps(record, allow_nan=False)
        assert json.loads(text) == record and "\n" not in text


def test_every_raw_sample_is_kept_in_order():
    latency = [line["metric"] for line in records(finished(gpu=True)) if line["metric"]["name"] == "latency"]
    assert len(latency) == len(MODES) * len(LAUNCHES)
    assert all(metric["benchmark_values"] == SAMPLES for metric in latency)
    assert latency[0]["extra_info"]["median"] == 7.2 and latency[0]["extra_info"]["settled"] is True


def test_a_row_without_samples_leaves_its_reason():
    metrics = [line["metric"] for line in records(REPORTS["CPU"])]
    lines = [metric for metric in metrics if metric["extra_info"].get("launch") == "graph"]
    assert [line["benchmark_values"] for line in lines] == [[], []]
    assert all(line["extra_info"]["reason"] == "CUDA graphs need a GPU" for line in lines)


def test_the_kernels_that_ran_are_in_the_record():
    line = next(line["metric"] for line in records(REPORTS["H200"]) if line["metric"]["name"] == "launches")
    assert line["benchmark_values"] == [5] and line["extra_info"]["kernels"] == KERNELS
    assert line["extra_info"]["verdict"] == "proven"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(value, tmp_path):
    with pytest.raises(ValueError, match="latency is not finite"):
        report.record(REPORTS["H200"], "latency", "ms", [1.0, value], "forward")
    with pytest.raises(ValueError):
        Output(str(tmp_path / "out.jsonl")).write([{"value": value}])
    assert (tmp_path / "out.jsonl").read_text() == ""


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_dtypes_are_words_in_a_record(dtype):
    r = replace(REPORTS["CPU"], config=REPORTS["CPU"].config.replace(amp_dtype=dtype))
    config = report.record(r, "status", "", [], "run")["benchmark"]["extra_info"]["config"]
    assert config["amp_dtype"] == ("none" if dtype is None else "bfloat16")


# ------------------------------------------------------------------------------------------------------------ output


def test_output_appends_to_what_is_there(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"benchmark": 0}\n')
    output = Output(str(path))
    output.write([{"benchmark": 1}, {"benchmark": 2}])
    output.write([{"benchmark": 3}])
    assert output.count == 3
    assert [json.loads(line)["benchmark"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


def test_no_file_asked_for_is_no_file_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Output(None).write([{"n": 1}])
    assert not list(tmp_path.iterdir())


def test_writers_side_by_side_leave_whole_lines(tmp_path):
    """Four files opened on one path, 100 records each of about 20 kB: many pages, and still never a torn line."""
    path = tmp_path / "runs.jsonl"

    def write(name):
        Output(str(path)).write([{"benchmark": 0, "name": name, "n": n, "samples": [0.123456789] * 1500}
                                 for n in range(100)])
    writers = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert Counter(line["name"] for line in lines) == dict.fromkeys("abcd", 100)
    assert all([line["n"] for line in lines if line["name"] == name] == list(range(100)) for name in "abcd")


@pytest.mark.parametrize("path", ["", "missing/out", "file/out"], ids=["a folder", "in no folder", "below a file"])
def test_a_path_that_cannot_be_written_raises_at_once(path, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Output(str(tmp_path / path))


def test_half_a_record_is_cut_off_before_the_next_one(tmp_path):
    """A full disk left it: the next record would be glued to it, and the file unreadable from then on."""
    path = tmp_path / "records"
    path.write_text('{"benchmark": 1}\n{"benchmark": {"na')
    Output(str(path)).write([{"benchmark": 2}])
    assert path.read_text() == '{"benchmark": 1}\n{"benchmark": 2}\n'


@pytest.mark.parametrize("text", ["a note without an end", "one\ntwo", '{"mine": 1}'])
def test_a_file_of_something_else_is_refused_and_text_behind_records_is_never_cut(tmp_path, text):
    path = tmp_path / "records"
    path.write_text(text)
    with pytest.raises(OSError, match="no file of records"):
        Output(str(path))
    assert path.read_text() == text
    path.write_text('{"benchmark": 1}\n' + text)
    Output(str(path))
    assert path.read_text() == '{"benchmark": 1}\n' + text + "\n"        # or the next record would be glued to it


def test_a_whole_last_record_without_an_end_stays(tmp_path):
    path = tmp_path / "records"
    path.write_text('{"benchmark": 1}\n{"benchmark": 2}')
    Output(str(path)).write([{"benchmark": 3}])
    assert path.read_text() == '{"benchmark": 1}\n{"benchmark": 2}\n{"benchmark": 3}\n'


def test_half_a_record_of_any_length_is_cut_off(tmp_path):
    path = tmp_path / "records"
    path.write_text('{"benchmark": 1}\n{"benchmark": {"samples": [' + 2**20 * "1.5, ")
    Output(str(path))
    assert path.read_text() == '{"benchmark": 1}\n'


def test_nobody_else_is_at_the_file_while_it_is_written_or_mended(tmp_path, monkeypatch):
    """Half a line that another run is still writing is no half line that a full disk left."""
    path, seen = tmp_path / "records", []
    path.write_text('{"benchmark": 1}')

    def spy(real):
        def call(*args):
            with open(path) as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    seen.append(real.__name__)
            return real(*args)
        return call
    monkeypatch.setattr(output.os, "write", spy(os.write))
    Output(str(path)).write([{"benchmark": 2}])
    assert seen == ["write", "write"] and path.read_text() == '{"benchmark": 1}\n{"benchmark": 2}\n'


def test_a_file_that_somebody_keeps_locked_is_written_to_all_the_same(tmp_path, monkeypatch):
    """As by `flock FILE command`; what is half a record then may be one that is being written, and stays."""
    slept = []
    monkeypatch.setattr(output.time, "sleep", slept.append)
    path = tmp_path / "records"
    path.write_text('{"benchmark": ')
    with open(path) as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        Output(str(path)).write([{"benchmark": 2}, {"benchmark": 3}])
    assert path.read_text() == '{"benchmark": {"benchmark": 2}\n{"benchmark": 3}\n'
    assert slept.count(1) == 1                               # it is waited for once, not at every record


def test_a_full_disk_raises_at_the_first_record(tmp_path, full_disk):
    with pytest.raises(WriteError, match="No space left"):
        Output(str(tmp_path / "records")).write([{"n": 1}])


def test_throttling_is_named_as_nvml_numbers_it():
    import pynvml
    named = {"power cap": "SwPowerCap", "hardware slowdown": "HwSlowdown", "software thermal": "SwThermalSlowdown",
             "hardware thermal": "HwThermalSlowdown", "power brake": "HwPowerBrakeSlowdown"}
    assert {word: bit for bit, word in machine._THROTTLE.items()} == {
        word: getattr(pynvml, f"nvmlClocksThrottleReason{name}") for word, name in named.items()}


@pytest.mark.parametrize("load, threads, told", [(2.9, 2, "n/a"), (3.1, 2, "load beyond its threads"),
                                                 (9.0, 8, "n/a")])
def test_a_card_says_that_a_cpu_had_more_to_do(load, threads, told):
    busy = finished(gpu=False)
    busy.facts, busy.state = CPU | {"cpu_threads": threads}, {"load_average": load}
    assert f"throttled           {told}\n" in report.card(busy)


def test_a_gpus_card_says_nothing_of_the_host():
    busy = finished(gpu=True)
    busy.state = {"load_average": 99.0}                                          # no NVML
    assert "throttled           n/a\n" in report.card(busy)


def test_each_row_is_recorded_with_its_own_clocks():
    """The run's are those of its last row, with what throttled any of them."""
    r = finished(gpu=True)
    r.state = STATE | {"throttled": ["power cap"]}
    r.rows["forward", "eager"].state = STATE | {"sm_mhz": 1425}
    found = {line["metric"]["extra_info"]["launch"]: line["runners"][0]["extra_info"]
             for line in report.row_records(r, "forward") if line["metric"]["name"] == "latency"}
    assert [(found[launch]["sm_mhz"], found[launch]["throttled"]) for launch in LAUNCHES] == [
        (1425, []), (1980, ["power cap"])]


def test_what_a_cpus_memory_does_not_hold_is_refused_and_a_gpu_says_so_itself(monkeypatch):
    monkeypatch.setattr(machine, "memory_total", lambda device: 2 * 2**30)
    machine.refuse_beyond_memory(2 * 2**30, torch.device("cpu"))
    machine.refuse_beyond_memory(9 * 2**30, torch.device("cuda"))
    with pytest.raises(MemoryError, match=r"^a part: about 3 GiB needed, this machine has 2$"):
        machine.refuse_beyond_memory(3 * 2**30, torch.device("cpu"), "a part: ")
