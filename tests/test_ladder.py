"""The ladder's tables from made-up records, and the command on shapes of a second; what all studies share besides."""
import contextlib
import functools
import json
import statistics
import subprocess
import types
from pathlib import Path

import pytest
import torch
from made_records import GPU, both, made

from benchmarks import attribution, charts, command, counters, ladder, records, study
from benchmarks.attribution import PARTS
from common import PRESETS, evidence, harness, report, roofline, steps, timing
from common.output import Output

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without a GPU says")
unit, integration = pytest.mark.unit, pytest.mark.integration
GPU_CONFIG = PRESETS["tiny"]


def parts(**some):
    return dict.fromkeys(PARTS, 0.0) | some


def rows_of(lines, mode="forward"):
    rows, headers = ladder.ladder(lines, mode)
    return [dict(zip(headers, row, strict=True)) for row in rows]


@unit
def test_the_table_tells_times_the_first_and_the_previous_by_paired_rounds():
    """The second step takes half the time in every round, though the machine slows down on the way."""
    drift = [1.0 + 0.1 * n for n in range(10)]
    lines = (made("0_baseline", both([8 * d for d in drift], []), config=GPU_CONFIG, facts=GPU)
             + made("1_cublas", both([4 * d for d in drift], []), config=GPU_CONFIG, facts=GPU)
             + made("2_sdpa", both([4 * d * (1.01 if n % 2 else 0.99) for n, d in enumerate(drift)], []),
                    config=GPU_CONFIG, facts=GPU))
    first, second, third = rows_of(lines)
    assert first["x first"] == "1.00" and first["x previous [95 %]"] == ""
    assert second["x first"] == "2.00" and second["x previous [95 %]"] == "2.000 [2.000, 2.000]"
    assert third["x previous [95 %]"].endswith(" SAME")
    noisy = [4 * d * (1.2 if n % 2 else 0.8) for n, d in enumerate(drift)]
    lines += made("3_compile", both(noisy, []), config=GPU_CONFIG, facts=GPU)
    assert rows_of(lines)[-1]["x previous [95 %]"].endswith(" UNSURE")
    assert [first[name] for name in ("GiB", "% limit", "error", "launches")] == ["1.0", "34", "2.0e-07", "3"]


@unit
def test_more_than_the_limit_is_an_error_as_on_the_card():
    lines = made("0_baseline", both([8.0] * 6, [9.0] * 6))
    for line in lines:
        if line["metric"]["name"] == "percent of limit":
            line["metric"]["benchmark_values"] = [182.0]
    assert rows_of(lines)[0]["% limit"] == "182 ERROR"


@unit
def test_the_clock_is_that_of_the_row_that_is_shown():
    lines = made("0_baseline", both([8.0] * 6, [9.0] * 6) | {("forward", "graph"): [5.0] * 6})
    assert rows_of(lines)[0]["MHz"] == "n/a"
    for line in lines:
        graph = line["metric"]["extra_info"].get("launch") == "graph"
        line["runners"][0]["extra_info"] = line["runners"][0]["extra_info"] | {"sm_mhz": 1425 if graph else 1980}
    assert [rows_of(lines, mode)[0]["MHz"] for mode in report.MODES] == ["1425", "1980"]


@unit
def test_the_faster_way_of_launching_is_the_rows():
    (row,) = rows_of(made("0_baseline", both([8.0] * 6, []) | {("forward", "graph"): [5.0] * 6}))
    assert (row["launch"], row["ms"]) == ("graph", "5.00")


@unit
def test_rows_that_cannot_run_are_there_with_their_reason():
    lines = made("0_baseline", both([8.0] * 6, [9.0] * 6))
    lines += made("4_transformer_engine", {}, status="skipped", reason="why")
    assert [row["status"] for row in rows_of(lines)] == ["ok", "skipped"]
    assert "4_transformer_engine: skipped: why" in ladder.text(lines)


@unit
def test_ratios_between_processes_are_called_unpaired():
    lines = made("0_baseline", both([8.0] * 6, [8.0] * 6), run="a")
    lines += made("1_cublas", both([2.0] * 6, [2.0] * 6), run="b")
    assert rows_of(lines)[1]["x previous [95 %]"] == "4.00 (unpaired)"
    assert "unpaired" in ladder.text(lines).splitlines()[-1]


@unit
@pytest.mark.parametrize("some, more, word", [
    ({"GEMM": 6.0, "idle": 1.0, "casts and copies": 3.0}, {}, "compute"),
    ({"attention": 3.0, "GEMM": 3.0, "softmax and mask": 4.0}, {}, "compute"),
    ({"GEMM": 4.0, "softmax and mask": 6.0}, {}, "memory"),
    ({"GEMM": 4.0, "idle": 6.0}, {}, "launch"),
    ({"GEMM": 10.0}, {"enqueue": 9.6}, "launch"),
    ({"GEMM": 10.0}, {"enqueue": 7.0}, "compute"),
    ({"GEMM": 10.0}, {"flop_bound": 0.4}, "memory"),                       # matmuls that their bytes bound
])
def test_what_a_step_is_bound_by(some, more, word):
    (run,) = records.runs(made("0_baseline", both([10.0] * 6, []), parts={"forward": parts(**some)}, **more))
    assert ladder.bound_by(run, "forward") == word


@unit
def test_attribution_adds_up_and_shows_what_it_can_not_explain():
    before, after = parts(GEMM=6.0, idle=4.0), parts(GEMM=3.0, attention=1.9)
    lines = (made("1_cublas", both([10.0] * 6, []), parts={"forward": before})
             + made("2_sdpa", both([9.0] * 6, []) | {("forward", "graph"): [5.0] * 6}, parts={"forward": after},
                    of="graph"))
    rows, headers = ladder.attribution(lines, "forward")
    row = dict(zip(headers, rows[0], strict=True))
    assert [row[name] for name in ("pair", "launch", "gained ms", "GEMM", "attention", "idle")] == [
        "1 -> 2", "eager, graph", "+5.00", "+3.00", "-1.90", "+4.00"]
    assert (row["unexplained"], row["bound"]) == ("-0.100", "0.250")        # 5 % of the 5 ms gained
    assert row["while profiled"] == "n/a"
    lines = (made("1_cublas", both([10.0] * 6, []), parts={"forward": before})
             + made("2_sdpa", both([9.9] * 6, []), parts={"forward": before}))
    assert ladder.attribution(lines, "forward")[0][0][-1] == "0.050 EXCEEDED"      # 0.5 % of the slower step


@unit
def test_what_profiling_changes_is_told_apart_from_what_is_unexplained():
    lines = (made("1_cublas", both([10.0] * 6, []), parts={"forward": parts(GEMM=10.4)}, clocked=10.5)
             + made("2_sdpa", both([9.0] * 6, []), parts={"forward": parts(GEMM=9.19)}, clocked=9.2))
    rows, headers = ladder.attribution(lines, "forward")
    row = dict(zip(headers, rows[0], strict=True))
    assert [row[name] for name in ("gained ms", "GEMM", "while profiled", "unexplained", "bound")] == [
        "+1.00", "+1.21", "-0.300", "+0.090", "0.050 EXCEEDED"]
    lines = (made("1_cublas", both([10.0] * 6, []), parts={"forward": parts(GEMM=10.4)}, clocked=10.4)
             + made("2_sdpa", both([9.0] * 6, []), parts={"forward": parts(GEMM=9.3)}, clocked=9.3))
    assert ladder.attribution(lines, "forward")[0][0][-3:] == ["-0.100", "+0.000", "0.050 EXCEEDED with profiling"]


@unit
def test_the_parts_are_held_against_the_samples_right_before_them():
    """Not against the median of all rounds: at a power cap what one round takes another does not."""
    lines = (made("1_cublas", both([10.0] * 6, []), parts={"forward": parts(GEMM=10.5)}, clocked=10.5, timed=10.25)
             + made("2_sdpa", both([9.5] * 6, []), parts={"forward": parts(GEMM=9.25)}, clocked=9.25, timed=9.0))
    rows, headers = ladder.attribution(lines, "forward")
    row = dict(zip(headers, rows[0], strict=True))
    assert [row[name] for name in ("gained ms", "while profiled", "unexplained", "bound")] == [
        "+1.25", "+0.000", "+0.000", "0.062"]


@unit
def test_a_table_is_split_where_the_terminal_is_narrow():
    rows, headers = [["a step", "1" * 30, "2" * 30, "3" * 30]], ["step", "one", "two", "three"]
    assert len(command.table(rows, headers, 200).split("\n\n")) == 1
    for width in (80, 120):
        text = command.table(rows, headers, width)
        assert max(map(len, text.splitlines())) <= width
        assert all(block.startswith("step") for block in text.split("\n\n"))
    assert all(digit * 30 in command.table(rows, headers, 80) for digit in "123")


@unit
def test_charts_know_which_records_they_show(tmp_path):
    lines = [line for step, ms in (("0_baseline", 90.0), ("1_cublas", 20.0), ("2_sdpa", 10.0))
             for line in made(step, both([ms] * 6, [ms] * 6), parts={"forward+backward": parts(GEMM=ms - 1, idle=1.0)})]
    stem = str(tmp_path / "ladder")
    ladder.draw(lines, stem)
    assert ladder.chart_stems(lines, stem) == [f"{stem}-parts", f"{stem}-waterfall"]
    assert all(charts.is_of(one, lines) for one in ladder.chart_stems(lines, stem))
    assert not any(charts.is_of(one, lines[:-1]) for one in ladder.chart_stems(lines, stem))
    assert (tmp_path / "ladder-parts.png").read_bytes()[:4] == b"\x89PNG"
    assert not charts.is_of(f"{stem}-other", lines)
    assert all(records.provenance(lines) in Path(f"{one}.svg").read_text() for one in ladder.chart_stems(lines, stem))


NCU = '''==PROF== Connected to process 7
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","byte","byte"
"0","7","layer_norm","1,000","500"
"1","7","nvjet_hsh_qkv","100","10"
"2","7","nvjet_hsh_scores","20","2"
"3","7","masked_fill_kernel","3","4"
"4","7","softmax_warp_forward","5","6"
"5","7","nvjet_hsh_values","7","8"
"6","7","nvjet_hsh_projection","100","10"
'''


@unit
def test_counters_are_read_and_attention_is_what_stands_between_the_projections():
    kernels = counters.parse(NCU)
    assert kernels[0] == {"name": "layer_norm", "read": 1000.0, "written": 500.0} and len(kernels) == 7
    by_hand = counters.attention(kernels, by_hand=True)
    assert [kernel["read"] for kernel in by_hand] == [20, 3, 5, 7]
    fused = [kernel for kernel in kernels if kernel["read"] not in (20, 3, 5)]                 # one kernel between
    fused[2]["name"] = "cudnn_generated_sdpa"
    assert [kernel["name"] for kernel in counters.attention(fused, by_hand=False)] == ["cudnn_generated_sdpa"]


@unit
@pytest.mark.parametrize("text, words", [
    ("", "it saw no kernel"), ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
    ("\n".join(NCU.splitlines()[:3]), "it saw no kernel"), (NCU.replace("dram__bytes_read.sum", "other"), "no kernel"),
])
def test_counters_that_say_nothing_are_a_reason(text, words):
    with pytest.raises(RuntimeError, match=words):
        counters.parse(text)


@unit
def test_dram_traffic_is_a_table_or_its_reason():
    lines = made("1_cublas", both([1.0] * 6, []))
    r = report.Report("1_cublas", GPU_CONFIG, "float32", GPU, study="ladder", run="one")
    part = {"read": 2.0**30, "written": 2.0**29, "launches": 3}
    counted = [report.record(r, "dram traffic", "bytes", [1.5 * 2**30], "forward", block=part, attention=part)]
    assert "1.00" in counters.table(lines + counted, "forward") and counters.table(lines, "forward") == ""
    missing = [report.record(r, "dram traffic", "bytes", [], "forward", reason="ncu is not there")]
    assert counters.table(lines + missing, "forward").endswith("n/a because: ncu is not there")
    r.run = "two"                                           # a later run without ncu takes nothing away
    missing = [report.record(r, "dram traffic", "bytes", [], "forward", reason="ncu is not there")]
    assert counters.table(lines + counted + missing, "forward") == counters.table(lines + counted, "forward")
    other = made("2_sdpa", both([1.0] * 6, []))
    assert counters.table(lines + counted + other, "forward").endswith("n/a because: not counted in this run")
    part["kernels"] = part.pop("launches")                  # as records were before copies were counted
    assert counters.table(lines + counted, "forward").endswith("without copies and fills: 1_cublas")


# The command.

@pytest.fixture
def main(study_main):
    """The ladder in this process: main(*argv) -> (status, stdout, stderr)."""
    return functools.partial(study_main, ladder)


@integration
def test_steps_are_checked_timed_and_explained_together(main, tmp_path):
    path = tmp_path / "ladder.jsonl"
    status, out, err = main("--steps", "0,1-tf32,1,2", "--rounds", 6, "--json", path, "--chart", tmp_path / "chart")
    assert status == 0 and "%: starting" in err
    lines = records.read(path)
    runs = records.latest(lines)
    assert list(runs) == ["0_baseline", "1_cublas, no autocast", "1_cublas", "2_sdpa", "ladder"]
    assert runs["ladder"].lines[0]["metric"]["name"] == "wall time"
    timed = [runs[name] for name in ("0_baseline", "1_cublas", "2_sdpa")]
    for mode in report.MODES:
        assert all(len(run.samples(mode, "eager")) == 6 for run in timed)
        assert all(records.paired(timed[0], run, mode) for run in timed)
        assert all(sum(run.parts(mode).values()) > 0 for run in timed)
        flops = roofline.flops(GPU_CONFIG, mode == "forward+backward")
        assert all(run.value(mode, "rate", "eager") * run.median(mode, "eager") == pytest.approx(1e3 * flops)
                   for run in timed)
        calibration = timed[0].find(mode, "latency", "eager")["metric"]["extra_info"]["calibration"]
        assert {name: len(samples) for name, samples in calibration.items()} == {"gemm": 6, "copy": 6}
        assert timed[0].find(mode, "launches")["metric"]["extra_info"]["verdict"] == "proven"
    assert all(run.value("forward+backward", "limit", "eager") > 2 * run.value("forward", "limit", "eager")
               for run in timed)
    assert runs["1_cublas, no autocast"].status == "skipped" and "no TF32" in out
    assert ladder.text(lines).strip() == out.strip()
    assert charts.is_of(tmp_path / "chart-parts", lines)


@unit
@pytest.mark.parametrize("ms, count", [(12.5, 12), (0.4, 375), (444.0, 3)])
def test_clocks_are_read_in_150_ms_of_work_on_a_gpu(ms, count, monkeypatch):
    found = []
    monkeypatch.setattr(harness, "under_load", lambda device, iteration, between, count: found.append(count))
    for device in ("cuda", "cpu"):
        study.Study.look(types.SimpleNamespace(device=torch.device(device), say=lambda what: None), None, None, ms)
    assert found == [count, 0]


@unit
@pytest.mark.parametrize("count, still_to_run", [(3, 2), (10, 2), (375, 75)])
def test_clocks_are_read_with_work_still_to_run(count, still_to_run, monkeypatch):
    """The host is ahead of a GPU: what counts is where in the queue of launches the event stands."""
    queue, read = [], []

    class Event:
        def record(self):
            self.behind = len(queue)

        def synchronize(self):
            read.append(self.behind)
    monkeypatch.setattr(harness.torch.cuda, "Event", Event)
    monkeypatch.setattr(harness.torch.cuda, "synchronize", lambda device: read.append("all"))
    monkeypatch.setattr(harness.machine, "state", lambda device: read.append("state") or {"sm_mhz": 1425})
    found = harness.under_load(torch.device("cuda"), lambda: queue.append(1), lambda: None, count)
    assert found == {"sm_mhz": 1425} and len(queue) == count
    assert read == [count - still_to_run, "state", "all"]


@integration
def test_right_behind_its_samples_a_step_is_profiled_and_in_the_last_round_its_clocks_are_read(main, monkeypatch):
    """Taken apart is what was seen when all is timed: the host needs a while, in which a GPU would raise its clocks."""
    order, look, pairs = [], harness.under_load, attribution.CpuBurst.pairs

    class Burst(attribution.CpuBurst):
        def __init__(self, *work):
            order.append(f"profile in {work[-1]}")
            super().__init__(*work)

        def pairs(self):
            order.append("take apart")
            return pairs(self)
    monkeypatch.setattr(harness, "under_load", lambda *a: (order.append("look"), look(*a))[1])
    monkeypatch.setattr(attribution, "CpuBurst", Burst)
    assert main("--steps", "0,2", "--rounds", 6, "--profiled", 4)[0] == 0
    one_pass = [f"profile in {number}" for number in range(4) for _ in range(2)] + 2 * ["look"]
    assert order == 2 * (one_pass + 8 * ["take apart"])


@integration
def test_the_parts_of_a_row_are_of_its_own_profiled_rounds(main, tmp_path):
    path = tmp_path / "ladder.jsonl"
    assert main("--steps", "0,2", "--rounds", 8, "--profiled", 4, "--json", path)[0] == 0
    for run in list(records.latest(records.read(path)).values())[:2]:
        for mode in report.MODES:
            extra = run.find(mode, "time by part")["metric"]["extra_info"]
            assert (extra["of"], extra["rounds"]) == ("eager", 4) and not run.attributed(mode)
            assert extra["timed"] == pytest.approx(statistics.mean(run.samples(mode, "eager")[:4]))
            assert extra["clocked"] > 0 and extra["clocked"] != extra["timed"]


@integration
def test_gradients_do_not_add_up_while_a_step_is_profiled(main, monkeypatch):
    blocks, seen, build = [], [], steps.load(0).build

    class Burst(attribution.CpuBurst):
        def __init__(self, iteration, between, *more):
            def gradients():
                return any(parameter.grad is not None for parameter in blocks[-1].parameters())
            iteration()
            had = gradients()
            between()
            seen.append((had, gradients()))
            super().__init__(iteration, between, *more)
    monkeypatch.setattr(steps.load(0), "build", lambda *of: blocks.append(build(*of)) or blocks[-1])
    monkeypatch.setattr(attribution, "CpuBurst", Burst)
    assert main("--steps", "0", "--rounds", 6, "--profiled", 2)[0] == 0
    assert seen == 2 * [(False, False)] + 2 * [(True, False)]


@unit
def test_what_is_profiled_is_the_faster_way_of_launching():
    ms = {("a", "eager"): 2.0, ("a", "graph"): 1.0, ("b", "eager"): 1.0, ("b", "graph"): 2.0, ("c", "eager"): 5.0,
          (None, "copy"): 0.1}
    some = types.SimpleNamespace(subjects=dict.fromkeys("abc"))
    assert study.Study._faster(some, ms) == {"a": "graph", "b": "eager", "c": "eager"}


@integration
def test_a_case_that_the_profiler_did_not_see_whole_says_so_and_is_timed(main, monkeypatch, tmp_path):
    def unseen(self):
        raise RuntimeError("the profiler saw 0 of 1 iterations")
    monkeypatch.setattr(attribution.CpuBurst, "pairs", unseen)
    path = tmp_path / "ladder.jsonl"
    status, out, _ = main("--steps", "0,2", "--rounds", 6, "--json", path)
    assert status == 0 and "2_sdpa, forward: the profiler saw 0 of 1 iterations" in out and "->" not in out
    assert all(run.best_ms(mode) > 0 and run.parts(mode) is None for mode in report.MODES
               for run in list(records.latest(records.read(path)).values())[:2])


@integration
def test_the_clocks_of_a_row_are_read_while_its_own_work_runs(main, monkeypatch, tmp_path):
    """Clocks follow the work: those of an idle GPU, or of another step, would tell nothing of a row."""
    running, build = [], steps.load(0).build

    def marked(config, values, device):
        block = build(config, values, device)
        block.register_forward_pre_hook(lambda *_: running.append(block))
        return block

    def under_load(device, iteration, between, count, read=harness.under_load):
        running.clear()
        return read(device, iteration, between, 1)

    monkeypatch.setattr(steps.load(0), "build", marked)
    monkeypatch.setattr(study.machine, "state", lambda device: {"sm_mhz": 1300 if running else 1980})
    monkeypatch.setattr(harness, "under_load", under_load)
    path = tmp_path / "ladder.jsonl"
    assert main("--steps", "0,2", "--rounds", 6, "--json", path)[0] == 0
    for run in list(records.latest(records.read(path)).values())[:2]:
        for mode in report.MODES:
            read = run.find(mode, "latency", "eager")["runners"][0]["extra_info"]["sm_mhz"]
            assert read == (1300 if run.label.startswith("0") else 1980), (run.label, mode)


@integration
def test_a_step_that_fails_its_check_is_a_row_and_the_others_are_timed(main, monkeypatch):
    def build(config, values, device):
        block = steps.load(0).build(config, values, device)
        block.ln_1.eps = 0.5
        return block
    real = ladder.cases
    monkeypatch.setattr(ladder, "cases", lambda *args: [
        study.Case(case.name, build if case.step == 2 else case.build, case.step, case.config) for case in real(*args)])
    status, out, _ = main("--steps", "0,2", "--rounds", 6)
    assert status == 1 and "2_sdpa: failed: the " in out and "the gate is" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("0_baseline", "2_sdpa  "))]
    assert [row[1] for row in rows] == ["ok", "failed", "ok", "failed"]


@integration
def test_a_step_that_did_not_run_as_it_claims_fails(main, monkeypatch):
    real = evidence.judge

    def refuted(kernels, step, *rest):
        found = real(kernels, step, *rest)
        return found if step == 0 else evidence.Evidence(found.kernels, found.kinds, "refuted", "it cheated")
    monkeypatch.setattr(evidence, "judge", refuted)
    status, out, _ = main("--steps", "0,1", "--rounds", 6)
    assert status == 1 and "1_cublas: failed: forward: it cheated" in out


@integration
def test_memory_that_does_not_hold_a_step_is_a_row(main, monkeypatch):
    def build(*_):
        raise torch.OutOfMemoryError("no")
    real = ladder.cases
    monkeypatch.setattr(ladder, "cases", lambda *args: [
        study.Case(case.name, build if case.step == 1 else case.build, case.step, case.config) for case in real(*args)])
    status, out, _ = main("--steps", "0,1", "--rounds", 6)
    assert status == 1 and "1_cublas: oom: " in out and "fits" in out


@integration
def test_what_does_not_fit_together_is_timed_without_the_largest_graphs():
    """A GPU's memory that holds each case alone: captured graphs go, the largest first."""
    options = command.parse(command.parser("ladder", "doc"), ["--preset", "tiny", "--device", "cpu", "--rounds", "6"])
    some, calls = study.Study("ladder", options), []
    for case in ladder.cases(options.config, options.device, ("0", "1", "2")):
        some.prepare(case)
    keys = list(some.subjects)
    for key, peak in zip(keys, (2, 3, 1), strict=True):
        some.reports[key].rows["forward", "eager"] = report.Row(peak_bytes=peak)
        some.reports[key].rows["forward", "graph"] = report.Row()

    def full():
        if len([where for where in runs if where[1] == "graph"]) > 1:
            raise torch.OutOfMemoryError("no")
        calls.append("eager")
    runs = {(key, launch): full if launch == "eager" else lambda: None for key in keys for launch in report.LAUNCHES}
    expected = some._warm_up("forward", runs, {}, timing.HostClock())
    left = [*((key, "eager") for key in keys), (keys[2], "graph")]
    assert expected.keys() == set(left) == set(runs) and expected[keys[0], "eager"] > 0
    assert len(calls) == study.WARM_UP_ROUNDS * len(keys)
    reasons = [some.reports[key].rows["forward", "graph"].reason for key in keys]
    assert ["out of memory beside" in (reason or "") for reason in reasons] == [True, True, False]

    def never():
        raise torch.OutOfMemoryError("no")
    with pytest.raises(torch.OutOfMemoryError):
        some._warm_up("forward", {(keys[0], "eager"): never}, {}, timing.HostClock())


@integration
def test_a_block_that_is_compiled_again_fails_alone(main, monkeypatch, tmp_path):
    """Its samples would hold a compilation: it is a failed row, and the others are timed."""
    real, blocks = study.harness.compiled_for_good, []

    @contextlib.contextmanager
    def once(*some):
        blocks.append(len(some))
        with real(*some):
            yield
        if len(blocks) == 1:
            raise study.harness.Failed("the block was compiled again after warm-up: its timings are void")
    monkeypatch.setattr(study.harness, "compiled_for_good", once)
    monkeypatch.setattr(study.harness, "compiled", lambda block: type(block).__module__ == "step_2_sdpa")
    monkeypatch.setattr(study.harness, "compilation_time", lambda *_: report.Compilation(1.0, 1.0))
    path = tmp_path / "ladder.jsonl"
    status, out, _ = main("--steps", "0,2", "--rounds", 6, "--json", path)
    assert status == 1 and blocks == [2, 1, 1, 1] and "2_sdpa: failed: the block was compiled again" in out
    (timed,) = [run for run in records.runs(records.read(path)) if run.status == "ok" and run.label[0] == "0"]
    assert all(timed.attributed(mode) for mode in report.MODES)


@unit
def test_of_two_compiled_blocks_that_one_fails_which_is_compiled_again(monkeypatch):
    def again(block):
        if block == "changed":
            raise study.harness.Failed("compiled again")
        return contextlib.nullcontext()
    monkeypatch.setattr(study.harness, "compiled_for_good", again)
    monkeypatch.setattr(study.harness, "holds_compiled", lambda block: block != "eager")
    options = command.parse(command.parser("ladder", "doc"), ["--preset", "tiny", "--device", "cpu"])
    some = study.Study("ladder", options)
    runs = {(key, "eager"): timing.nothing for key in "abc"}

    def would(**blocks):
        some.subjects = {key: types.SimpleNamespace(block=block) for key, block in blocks.items()}
        return some._compiled_again(runs, runs)
    assert would(a="eager", b="changed", c="as it was") == ["b"]
    assert would(a="eager", b="as it was", c="as it was") == ["b", "c"]                # it was one of them


@integration
@pytest.mark.parametrize("claims, raised", [(None, None), (2, TypeError)])
def test_another_librarys_error_is_a_row_and_ours_is_an_error(claims, raised):
    def build(*_):
        raise TypeError("unexpected keyword\nand more")
    options = command.parse(command.parser("peers", "doc"), ["--preset", "tiny", "--device", "cpu"])
    some = study.Study("peers", options)
    case = study.Case("theirs", build, 2, options.config, claims=claims)
    if raised:
        with pytest.raises(raised):
            some.prepare(case)
    else:
        assert not some.prepare(case)
        (result,) = some.reports.values()
        assert (result.status, result.reason) == ("failed", "TypeError: unexpected keyword")


@integration
def test_a_process_that_dies_leaves_a_row(main, monkeypatch):
    real = subprocess.run
    monkeypatch.setattr(ladder.subprocess, "run", lambda argv, **more: subprocess.CompletedProcess(argv, -9)
                        if "benchmarks.ladder" in argv else real(argv, **more))
    status, out, _ = main("--steps", "0,2", "--processes", 2)
    assert status == 1 and "0_baseline: failed: its process ended with -9" in out and "2_sdpa: failed" in out


@unit
@pytest.mark.parametrize("dies, status", [(0, -9), (1, 1)], ids=["the first", "the second, by a traceback"])
def test_a_process_that_dies_beside_one_that_does_not_fails_the_run(main, monkeypatch, dies, status):
    """Python's status for a traceback is that of a failed step: what the process left tells them apart."""
    begun = []

    def run(argv, **more):
        begun.append(argv)
        if len(begun) - 1 == dies:
            return subprocess.CompletedProcess(argv, status)
        path = argv[argv.index("--json") + 1]
        Output(path).write(made("0_baseline", both([1.0] * 6, [1.0] * 6), run="other"))
        return subprocess.CompletedProcess(argv, 0)
    monkeypatch.setattr(ladder.subprocess, "run", run)
    monkeypatch.setattr(ladder.machine, "facts", lambda device: GPU)
    found, out, _ = main("--steps", "0", "--processes", 2)
    assert found == 1 and f"0_baseline: failed: its process ended with {status}" in out and len(begun) == 2


@integration
def test_a_study_that_timed_nothing_is_no_success(main):
    status, out, err = main("--steps", "4")
    assert status == 4 and "4_transformer_engine: skipped" in out and "\noverhead " in err


@unit
def test_processes_that_could_run_nothing_are_no_success(main, monkeypatch):
    """What each leaves of its wall time is no step."""
    def run(argv, **more):
        path = argv[argv.index("--json") + 1]
        Output(path).write(made("4_transformer_engine", {}, status="skipped", reason="no FP8", run=str(path))
                           + made("ladder", {}, run=str(path)))
        return subprocess.CompletedProcess(argv, 4)
    monkeypatch.setattr(ladder.subprocess, "run", run)
    monkeypatch.setattr(ladder.machine, "facts", lambda device: GPU)
    status, out, _ = main("--steps", "4", "--processes", 2)
    assert status == 4 and "4_transformer_engine" in out and "its process ended" not in out


@unit
def test_of_a_process_that_died_what_it_finished_stays():
    """A step that failed by itself keeps its reason; TF32 alone and autocast are two rows of one name."""
    options = command.parse(command.parser("ladder", "doc"), ["--preset", "tiny", "--device", "cpu"])
    options.config = options.config.replace(amp_dtype=torch.bfloat16)
    found = made("0_baseline", {}, status="failed", reason="the branch is off", config=options.config)
    found += made("1_cublas", both([1.0] * 6, [1.0] * 6), config=options.config)
    found += made("2_sdpa", {("forward", "eager"): [1.0] * 6}, config=options.config)
    died = ladder._died(options, ("0", "1-tf32", "1", "2"), found, 1)
    assert [(records.label(line), line["benchmark"]["extra_info"]["reason"]) for line in died] == [
        ("1_cublas, no autocast", "its process ended with 1"), ("2_sdpa", "its process ended with 1")]


@unit
def test_a_row_behind_one_that_failed_says_what_it_is_held_against():
    lines = made("0_baseline", both([8.0] * 6, [])) + made("1_cublas", {}, status="failed", reason="why")
    *_, last = rows_of(lines + made("2_sdpa", both([2.0] * 6, [])))
    assert last["x previous [95 %]"] == "4.000 [4.000, 4.000] (to 0)"


@unit
def test_a_chart_that_nothing_can_fill_is_named(capsys, tmp_path):
    ladder.draw(made("0_baseline", both([8.0] * 6, [8.0] * 6)), str(tmp_path / "a"))
    assert capsys.readouterr().err.startswith("ladder: no chart: it needs a step with 5")
    assert list(tmp_path.iterdir()) == []


@unit
def test_where_too_few_rounds_were_profiled_the_parts_say_so():
    lines = [line for step, ms in (("0_baseline", 8.0), ("1_cublas", 4.0))
             for line in made(step, both([ms] * 6, []), parts={"forward": parts(GEMM=ms)})]
    assert "went, step to step" in ladder.text(lines)
    for line in lines:
        line["metric"]["extra_info"]["rounds"] = 1
    assert "where the ms of forward went: n/a, it takes 5 profiled rounds" in ladder.text(lines)


@unit
@pytest.mark.parametrize("clocked, title", [(8.0, "0 baseline to 1 cublas"), (9.0, "0 baseline to 1 cublas\nEXCEEDED"),
                                            (None, "0 baseline to 1 cublas\nEXCEEDED")])
def test_a_waterfall_warns_of_parts_beyond_their_bound(clocked, title):
    lines = (made("0_baseline", both([], [8.0] * 6), parts={"forward+backward": parts(GEMM=8.0)}, clocked=8.0)
             + made("1_cublas", both([], [4.0] * 6), clocked=clocked and 4.0,
                    parts={"forward+backward": parts(GEMM=4.0 + 8.0 - (clocked or 7.0))}))
    figure = charts._waterfalls(charts.attributed(lines))
    assert figure.axes[0].get_title() == title


@unit
@pytest.mark.parametrize("argv, rounds", [([], 20), (["--quick"], 6), (["--rounds", "9"], 9)])
def test_how_many_rounds_there_are_on_a_gpu(argv, rounds, monkeypatch):
    monkeypatch.setattr(command.run, "device_of", lambda name: torch.device("cuda"))
    monkeypatch.setattr(command.device, "amp_default", lambda device: (torch.float16, ""))
    assert command.parse(command.parser("ladder", "doc"), ["--preset", "tiny", *argv]).rounds == rounds


@unit
@pytest.mark.parametrize("extra, enough", [({}, True), ({"pairs": 4}, False), ({"pairs": 5}, True),
                                           ({"pairs": 50, "rounds": 4}, False), ({"rounds": 5}, True)])
def test_five_profiled_rounds_tell_where_the_time_goes(extra, enough):
    lines = made("0_baseline", both([10.0] * 6, []), parts={"forward": parts(GEMM=10.0)})
    for line in lines:
        if line["metric"]["name"] == "time by part":
            line["metric"]["extra_info"] |= extra
    (run,) = records.runs(lines)
    assert run.attributed("forward") == enough


@unit
@pytest.mark.parametrize("argv, profiled", [([], 12), (["--quick"], 5), (["--profiled", "7"], 7),
                                            (["--rounds", "9"], 9)])
def test_how_many_rounds_are_profiled(argv, profiled, main, monkeypatch):
    seen = []
    monkeypatch.setattr(study.Study, "prepare", lambda self, case: True)
    monkeypatch.setattr(study.Study, "time", lambda self, mode, profiled: seen.append(profiled))
    monkeypatch.setattr(ladder, "text", lambda lines: "")
    main("--steps", "0", *argv)
    assert seen == [profiled] * 2


@integration
def test_several_processes_are_recorded_one_after_the_other(main, tmp_path, monkeypatch):
    """The first in a process of its own, the second in this one, which has torch already."""
    real, begun = subprocess.run, []

    def run(argv, **more):
        if "benchmarks.ladder" in argv:
            begun.append(argv)
        if "benchmarks.ladder" not in argv or len(begun) == 1:
            return real(argv, **more)
        return subprocess.CompletedProcess(argv, ladder.main([str(argument) for argument in argv[3:]]))
    monkeypatch.setattr(ladder.subprocess, "run", run)
    path = tmp_path / "noise.jsonl"
    status, out, _ = main("--steps", "0", "--rounds", 6, "--processes", 2, "--json", path)
    assert status == 0 and "0_baseline" in out
    assert len({run.info["run"] for run in records.runs(records.read(path))}) == len(begun) == 2
    assert all(argv[argv.index("--profiled") + 1] == "1" for argv in begun)


@integration
@no_gpu
def test_counters_say_why_there_are_none(main):
    status, out, _ = main("--steps", "0", "--rounds", 6, "--counters")
    assert status == 0 and "n/a because: a CPU has no such counters" in out


@unit
@pytest.mark.parametrize("argv, words", [
    (["--steps", "7"], "no row '7'"), (["--steps", ""], "no row ''"), (["--rounds", "5"], "at least 6"),
    (["--rounds", "many"], "invalid int"), (["--processes", "0"], "from 1 to 999"), (["--what"], "--what"),
    (["--profiled", "two"], "from 1 to 999"), (["--rounds", "0"], "at least 6"),
    (["--hidden-size", "65"], "divisible"), (["--json", "/nowhere/at/all"], "No such file"),
    (["--chart", "a.png"], "no .png"), (["--chart", "a.svg"], "no .png"),
    (["--chart", "/nowhere/at/all"], "give a folder that"), (["--chart", f"{__file__}/x"], "give a folder that"),
    (["--seed", str(10**30)], "at most 18 digits"),
    (["--preset", "huge"], "invalid choice"),
])
def test_mistakes_are_one_line_and_status_two(main, argv, words):
    status, out, err = main(*argv)
    assert (status, out) == (2, "") and words in err and err.startswith("ladder: error: ") and err.count("\n") == 1


@unit
@no_gpu
def test_no_gpu_is_a_mistake_where_one_is_asked_for(main):
    status, _, err = main("--device", "cuda")
    assert status == 2 and "no GPU is available" in err


@integration
def test_an_interrupted_ladder_keeps_what_is_finished(main, ctrl_c, tmp_path):
    """Interrupted while it samples: what was recorded before is whole."""
    ctrl_c(timing, "interleaved", 2)                             # the first is the warm-up
    path = tmp_path / "out.jsonl"
    status, out, err = main("--steps", "0", "--rounds", 8, "--json", path)
    assert (status, out) == (130, "") and "4 finished records kept" in err and "Traceback" not in err
    assert len(records.read(path)) == 4


@integration
def test_a_full_disk_is_one_line(main, full_disk, tmp_path):
    status, out, err = main("--steps", "0", "--rounds", 6, "--json", tmp_path / "out")
    assert (status, out) == (1, "") and "No space left on device" in err and "Traceback" not in err


@unit
def test_a_study_with_nothing_left_to_do_says_so(monkeypatch):
    """A sweep that goes on where it had ended, say."""
    some = study.Study("sweep", command.parse(command.parser("sweep", "doc"), ["--preset", "tiny", "--device", "cpu"]))
    monkeypatch.setattr(some, "say", lambda what: None)
    some.seconds = {"starting": 0.3}
    assert some.finish() == "0 s: nothing was left to measure;\noverhead 100 %: less than a second"


@unit
def test_the_time_outside_of_measuring_is_known(monkeypatch):
    """What the run is not there for: a phase counts under its first word."""
    clock = iter([0.0, 0.5, 3.5, 9.5, 11.5])
    monkeypatch.setattr(study.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(study.machine, "process_seconds", lambda: 0.5)             # imports
    options = command.parse(command.parser("ladder", "doc"), ["--preset", "tiny", "--device", "cpu"])
    some = study.Study("ladder", options)
    for phase in ("building: 0", "sampling forward", "peaks of this machine"):
        some.say(phase)
    line = some.finish()
    assert line == "12 s: sampling 6, building 3;\noverhead 25 %: peaks 2, starting 1"
    assert some.seconds == {"starting": 1.0, "building": 3.0, "sampling": 6.0, "peaks": 2.0}
    assert json.loads(json.dumps(some.lines[-1]))["metric"]["extra_info"]["rest"] == 3.0


@unit
def test_all_steps_are_on_the_ladder_in_order():
    cases = ladder.cases(PRESETS["cpu"], torch.device("cpu"))
    assert [case.name for case in cases] == ["0_baseline", "1_cublas", "1_cublas", "2_sdpa", "3_compile",
                                             "4_transformer_engine"]
    assert [case.claims for case in cases] == [0, 1, 1, 2, 3, 4]
    assert [bool(case.config.amp_dtype) for case in cases] == [True, False, True, True, True, True]
    assert "divisible by 16" in ladder.cases(PRESETS["tiny"].replace(seq_len=7), torch.device("cpu"))[-1].missing


@pytest.mark.gpu
@integration
def test_a_graph_and_its_eager_run_are_timed_in_the_same_rounds(tmp_path, studies_in_seconds):
    path = tmp_path / "out"
    argv = ["--preset", "gpt2", "--batch-size", "2", "--steps", "1,2", "--rounds", "10", "--json", str(path)]
    assert ladder.main(argv) == 0
    for run in list(records.latest(records.read(path)).values())[:2]:
        for mode in report.MODES:
            assert all(len(run.samples(mode, launch)) == 10 for launch in report.LAUNCHES)
            assert run.value(mode, "peak memory", "eager") > 0
            assert run.parts(mode)["GEMM"] > 0


@unit
def test_a_cpu_without_16_bit_matmuls_has_one_row_of_step_1():
    config = GPU_CONFIG.replace(amp_dtype=None)
    cases = ladder.cases(config, torch.device("cpu"))
    assert [case.name for case in cases] == ["0_baseline", "1_cublas", "2_sdpa", "3_compile", "4_transformer_engine"]
    # Emulated FP8 is multiplied in FP32: as in the script, step 4 has the autocast that its residual needs.
    assert [case.config.amp_dtype for case in cases] == 4 * [None] + [torch.bfloat16]


@pytest.mark.unit
def test_copies_and_fills_stand_between_the_kernels_that_ncu_counts():
    kernels = [{"name": name, "read": 8.0, "written": 4.0} for name in ("gemm 1", "fill", "gemm 2")]
    seen = [{"name": "gemm 1", "cat": "kernel", "bytes": 0}, {"name": "Memcpy", "cat": "gpu_memcpy", "bytes": 100},
            {"name": "fill", "cat": "kernel", "bytes": 0}, {"name": "Memset", "cat": "gpu_memset", "bytes": 10},
            {"name": "gemm 2", "cat": "kernel", "bytes": 0}]
    assert counters.with_copies(kernels, seen) == [
        kernels[0], {"name": "Memcpy", "read": 100, "written": 100}, kernels[1],
        {"name": "Memset", "read": 0, "written": 10}, kernels[2]]
    with pytest.raises(RuntimeError, match="ncu saw 2 kernels, the profiler 3"):
        counters.with_copies(kernels[1:], seen)


@pytest.mark.unit
def test_a_claim_that_is_not_borne_out_is_said():
    lines = made("3_compile", both([1.0] * 6, [1.0] * 6))
    (run,) = records.runs(lines)
    assert records.cautions([run]) == []
    for line in lines:
        if line["metric"]["name"] == "launches" and line["benchmark"]["mode"] == "forward":
            line["metric"]["extra_info"] |= {"verdict": "unproven", "because": "57 launches, and 52 without"}
    assert records.cautions([run]) == ["3_compile, forward: unproven: 57 launches, and 52 without"]
    for line in lines:
        line["benchmark"]["extra_info"]["engine"] = "emulated (no GPU)"
    assert records.cautions([run]) == []                    # says so elsewhere


@unit
def test_what_is_counted_is_kernels_and_copies(monkeypatch):
    """From the study's blocks and ncu to the table, without either."""
    (run,) = records.runs(made("1_cublas", both([1.0] * 6, [1.0] * 6), config=GPU_CONFIG, facts=GPU))
    result = report.Report("1_cublas", GPU_CONFIG, "float32", GPU, study="ladder", run="one")
    gib = 2.0**30
    names = ["gemm 1", "softmax", "gemm 2", "gemm 3", "gemm 4"]
    seen = [{"name": name, "cat": "kernel", "bytes": 0} for name in names]
    seen.insert(1, {"name": "Memcpy", "cat": "gpu_memcpy", "bytes": 4 * gib})
    written = []
    study_ = types.SimpleNamespace(device=torch.device("cuda"), subjects={"a": None}, reports={"a": result},
                                   cases={"a": types.SimpleNamespace(step=1)}, release=lambda: None,
                                   write=written.extend)
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(counters, "activities", lambda subject, mode: seen)
    monkeypatch.setattr(counters, "_count", lambda *_: [{"name": name, "read": gib, "written": gib} for name in names])
    counters.measure(study_)
    table = counters.table(run.lines + written, "forward").splitlines()
    assert table[-1].split()[-5:] == ["9.00", "9.00", "7.00", "7.00", "4"]

    def full(subject, mode):
        raise torch.OutOfMemoryError("full\nand more")
    written.clear()
    monkeypatch.setattr(counters, "activities", full)
    counters.measure(study_)
    assert [line["metric"]["extra_info"]["reason"] for line in written] == ["OutOfMemoryError: full"] * 2


@unit
def test_readme_is_rewritten_by_a_command_that_does_nothing_else(tmp_path, capsys):
    for argv in (["--readme", "--quick"], ["--json", str(tmp_path / "some"), "--readme"]):
        with pytest.raises(SystemExit) as ended:
            ladder.main(argv)
        assert ended.value.code == 2 and not (tmp_path / "some").exists()
        assert capsys.readouterr() == ("", "ladder: error: --readme measures nothing: give it alone\n")
