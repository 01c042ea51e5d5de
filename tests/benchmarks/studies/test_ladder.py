"""The ladder: its tables and charts from made-up records, and the command on shapes of a second."""
import contextlib
import functools
import io
import itertools
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch

from benchmarks import studies
from benchmarks.measure import options, processes
from benchmarks.records.provenance import cautions, provenance
from benchmarks.records.read import label, latest, metric, read, runs
from benchmarks.show import charts, tables
from benchmarks.show import study as frame
from benchmarks.show.tables import Context
from benchmarks.studies import ladder
from common import PRESETS, steps
from common.block import block_work
from common.report.record import PARTS
from common.report.record_file import RecordFile
from common.runtime import machine, rounds
from common.runtime.iteration import BOTH, FORWARD, LAUNCHES, MODES
from tests.helpers.made_records import CPU_CONFIG, FACTS, GPU, both, made
from tests.helpers.said import one_line

unit, integration = pytest.mark.unit, pytest.mark.integration
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without a GPU says")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GPU_CONFIG = PRESETS["tiny"]
STUDY = studies.load("ladder")


def parts(**some: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | some


def rows_of(lines: list[dict], mode: str = FORWARD) -> list[dict[str, str]]:
    """The table of one pass: header -> cell of each row."""
    rows = tables.rows_of(ladder.COLUMNS, Context(mode, list(latest(lines).values())))
    headers = [column.header for column in ladder.COLUMNS]
    return [dict(zip(headers, row, strict=True)) for row in rows]


def gains_of(lines: list[dict]) -> list[dict[str, str]]:
    """Where the milliseconds of the forward went: header -> cell of each pair."""
    rows, headers = ladder.gains(lines, FORWARD)
    return [dict(zip(headers, row, strict=True)) for row in rows]


def parsed(*argv: str, device: str = "cpu"):
    """The options of a command line."""
    parser = options.parser(STUDY.name, STUDY.doc)
    STUDY.add_arguments(parser)
    return options.parse(parser, ["--preset", "tiny", "--device", device, *argv], STUDY.refine)


# ------------------------------------------------------------------------------------------------------------ its table


@unit
def test_the_table_tells_times_the_first_and_the_previous_by_rounds():
    """The second step takes half the time in every round, though the machine slows down on the way."""
    on_gpu = functools.partial(made, config=GPU_CONFIG, facts=GPU)
    drift = [1.0 + 0.1 * number for number in range(10)]
    uneven = [1.01 if number % 2 else 0.99 for number in range(10)]
    lines = on_gpu("0_baseline", both([8 * d for d in drift], []))
    lines += on_gpu("1_cublas", both([4 * d for d in drift], []))
    lines += on_gpu("2_sdpa", both([4 * d * u for d, u in zip(drift, uneven, strict=True)], []))
    first, second, third = rows_of(lines)
    assert first["x first"] == "1.00" and first["x previous [95 %]"] == ""
    assert second["x first"] == "2.00" and second["x previous [95 %]"] == "2.000 [2.000, 2.000]"
    assert third["x previous [95 %]"].endswith(" SAME")
    noisy = [4 * d * (1.2 if number % 2 else 0.8) for number, d in enumerate(drift)]
    lines += on_gpu("3_compile", both(noisy, []))
    assert rows_of(lines)[-1]["x previous [95 %]"].endswith(" UNSURE")
    assert [first[name] for name in ("GiB", "% burst", "error", "launches")] == ["1.00", "34", "2.0e-07", "3"]


@unit
def test_rows_that_cannot_run_are_there_with_their_reason():
    lines = made("0_baseline", both([8.0] * 6, [9.0] * 6))
    lines += made("4_transformer_engine", {}, status="skipped", reason="why")
    assert [row["status"] for row in rows_of(lines)] == ["ok", "skipped"]
    assert "4_transformer_engine: skipped: why" in STUDY.report(lines)


@unit
def test_a_row_behind_one_that_failed_says_what_it_is_held_against():
    lines = made("0_baseline", both([8.0] * 6, [])) + made("1_cublas", {}, status="failed", reason="why")
    *_, last = rows_of(lines + made("2_sdpa", both([2.0] * 6, [])))
    assert last["x previous [95 %]"] == "4.000 [4.000, 4.000] (to 0)"


@unit
def test_ratios_between_processes_are_called_unpaired():
    lines = made("0_baseline", both([8.0] * 6, [8.0] * 6), run="a")
    lines += made("1_cublas", both([2.0] * 6, [2.0] * 6), run="b")
    assert rows_of(lines)[1]["x previous [95 %]"] == "4.00 (unpaired)"
    assert "unpaired" in STUDY.report(lines).splitlines()[-1]


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
    (run,) = runs(made("0_baseline", both([10.0] * 6, []), parts={FORWARD: parts(**some)}, **more))
    assert ladder.bound_by(run, FORWARD) == word


@unit
def test_what_a_replay_is_bound_by_is_no_launch():
    """Launched one by one it is: a replay, which is faster then, has its own kernels alone."""
    lines = made("2_sdpa", both([10.0] * 6, []), facts=GPU, enqueue=9.6)
    lines += made("2_sdpa", both([5.0] * 6, [], launch="graph"), facts=GPU, parts={FORWARD: parts(GEMM=5.0)})
    (run,) = runs(lines)
    assert run.launch_bound(FORWARD) and run.best(FORWARD) == "graph"
    assert ladder.bound_by(run, FORWARD) == "compute"


@unit
def test_what_was_not_profiled_is_bound_by_nothing_known():
    (run,) = runs(made("0_baseline", both([10.0] * 6, [])))
    assert ladder.bound_by(run, FORWARD) == "n/a"


@unit
def test_a_claim_that_is_not_borne_out_is_said():
    lines = made("3_compile", both([1.0] * 6, [1.0] * 6))
    (run,) = runs(lines)
    assert cautions([run]) == []
    for line in lines:
        if metric(line) == "launches" and line["benchmark"]["mode"] == FORWARD:
            line["metric"]["extra_info"] |= {"verdict": "unproven", "because": "57 launches, and 52 without"}
    said = "3_compile, forward: unproven: 57 launches, and 52 without"
    assert cautions([run]) == [said] and STUDY.report(lines).endswith(f"\n{said}")
    for line in lines:
        line["benchmark"]["extra_info"]["engine"] = "emulated (no GPU)"
    assert cautions([run]) == []                    # says so elsewhere


# --------------------------------------------------------------------------------------------- where milliseconds went


@unit
def test_attribution_adds_up_and_shows_what_it_can_not_explain():
    before, after = parts(GEMM=6.0, idle=4.0), parts(GEMM=3.0, attention=1.9)
    first = made("1_cublas", both([10.0] * 6, []), parts={FORWARD: before})
    (row,) = gains_of(first + made("2_sdpa", both([9.0] * 6, []) | {(FORWARD, "graph"): [5.0] * 6},
                                   parts={FORWARD: after}, of="graph"))
    assert [row[name] for name in ("pair", "launch", "gained ms", "GEMM", "attention", "idle")] == [
        "1 -> 2", "eager, graph", "+5.00", "+3.00", "-1.90", "+4.00"]
    assert (row["unexplained"], row["bound"]) == ("-0.100", "0.250")        # 5 % of the 5 ms gained
    assert row["by the profiler"] == "n/a"
    (row,) = gains_of(first + made("2_sdpa", both([9.9] * 6, []), parts={FORWARD: before}))
    assert row["bound"] == "0.050 EXCEEDED"                                 # 0.5 % of the slower step


@unit
def test_what_profiling_changes_is_told_beside_what_is_unexplained():
    first = functools.partial(made, "1_cublas", both([10.0] * 6, []), parts={FORWARD: parts(GEMM=10.4)})
    second = functools.partial(made, "2_sdpa", both([9.0] * 6, []))
    (row,) = gains_of(first(clocked=10.5) + second(parts={FORWARD: parts(GEMM=9.19)}, clocked=9.2))
    assert [row[name] for name in ("gained ms", "GEMM", "unexplained", "by the profiler", "bound")] == [
        "+1.00", "+1.21", "-0.210", "-0.300", "0.050 EXCEEDED"]
    (row,) = gains_of(first(clocked=10.4) + second(parts={FORWARD: parts(GEMM=9.3)}, clocked=9.3))
    assert [row[name] for name in ("unexplained", "by the profiler", "bound")] == [
        "-0.100", "-0.100", "0.050 EXCEEDED"]


@unit
def test_the_parts_are_held_against_the_samples_right_before_them():
    """Not against the median of all rounds: at a power cap what one round takes another does not."""
    lines = made("1_cublas", both([10.0] * 6, []), parts={FORWARD: parts(GEMM=10.5)}, clocked=10.5, timed=10.25)
    lines += made("2_sdpa", both([9.5] * 6, []), parts={FORWARD: parts(GEMM=9.25)}, clocked=9.25, timed=9.0)
    (row,) = gains_of(lines)
    assert [row[name] for name in ("gained ms", "by the profiler", "unexplained", "bound")] == [
        "+1.25", "+0.000", "+0.000", "0.062"]


@unit
@pytest.mark.parametrize("fields, enough", [({}, True), ({"rounds": 4}, False), ({"rounds": 5}, True)])
def test_five_profiled_rounds_tell_where_the_time_goes(fields, enough):
    lines = made("0_baseline", both([10.0] * 6, []), parts={FORWARD: parts(GEMM=10.0)})
    for line in lines:
        if metric(line) == "time by part":
            line["metric"]["extra_info"] |= fields
    (run,) = runs(lines)
    assert run.attributed(FORWARD) == enough


@unit
def test_where_too_few_rounds_were_profiled_the_parts_say_so():
    lines = []
    for name, ms in (("0_baseline", 8.0), ("1_cublas", 4.0)):
        lines += made(name, both([ms] * 6, []), parts={FORWARD: parts(GEMM=ms)})
    assert "went, step to step" in STUDY.report(lines)
    for line in lines:
        line["metric"]["extra_info"]["rounds"] = 1
    assert "where the ms of forward went: n/a, it takes 5 profiled rounds" in STUDY.report(lines)


# ------------------------------------------------------------------------------------------------- charts and an answer


@unit
def test_charts_know_which_records_they_show(tmp_path):
    lines = []
    for name, ms in (("0_baseline", 90.0), ("1_cublas", 20.0), ("2_sdpa", 10.0)):
        lines += made(name, both([ms] * 6, [ms] * 6), parts={BOTH: parts(GEMM=ms - 1, idle=1.0)})
    stem = str(tmp_path / "ladder")
    frame.draw(STUDY, stem, lines)
    stems = [f"{stem}-{ending}" for ending in ("steps", "parts", "waterfall")]
    written = {f"{one}{suffix}" for one, suffix in itertools.product(stems, (".png", ".svg"))}
    assert written == set(map(str, tmp_path.iterdir()))
    for one in stems:
        assert charts.is_of(one, lines) and not charts.is_of(one, lines[:-1])
        with open(f"{one}.svg") as file:
            assert provenance(lines) in file.read()
    assert (tmp_path / "ladder-parts.png").read_bytes()[:4] == b"\x89PNG"
    assert not charts.is_of(f"{stem}-other", lines)


@unit
def test_a_chart_that_nothing_can_fill_is_named(capsys, tmp_path):
    lines = made("0_baseline", both([8.0] * 6, [8.0] * 6))
    frame.draw(STUDY, str(tmp_path / "a"), lines)
    assert capsys.readouterr().err.startswith("ladder: no chart: it needs a step with 5")
    assert list(tmp_path.iterdir()) == []
    frame.draw(STUDY, None, lines)
    assert capsys.readouterr().err == ""


@unit
def test_the_answer_is_the_whole_ladder():
    lines = made("0_baseline", both([9.0] * 6, [8.0] * 6)) + made("1_cublas", {}, status="failed")
    lines += made("2_sdpa", both([1.0] * 6, [3.2] * 6))
    assert STUDY.answer(lines) == "step 2 is 2.5 times as fast as step 0, forward+backward"


# ------------------------------------------------------------------------------------------------------------ its cases


@unit
def test_all_steps_are_on_the_ladder_in_order():
    cases = ladder.cases(PRESETS["cpu"], CPU)
    assert [case.name for case in cases] == ["0_baseline", "1_cublas", "1_cublas", "2_sdpa", "3_compile",
                                             "4_transformer_engine"]
    assert [case.step for case in cases] == [0, 1, 1, 2, 3, 4]
    assert [case.traits for case in cases] == [steps.load(case.step).traits for case in cases]
    assert [bool(case.config.amp_dtype) for case in cases] == [True, False, True, True, True, True]
    assert "no TF32: it would be step 0 again" in cases[1].missing
    assert "divisible by 16" in ladder.cases(PRESETS["tiny"].replace(seq_len=7), CPU)[-1].missing


@unit
def test_a_cpu_without_16_bit_matmuls_has_one_row_of_step_1():
    cases = ladder.cases(GPU_CONFIG.replace(amp_dtype=None), CPU)
    assert [case.name for case in cases] == ["0_baseline", "1_cublas", "2_sdpa", "3_compile", "4_transformer_engine"]
    # Emulated FP8 is multiplied in FP32: as in the script, step 4 has the autocast that its residual needs.
    assert [case.config.amp_dtype for case in cases] == 4 * [None] + [torch.bfloat16]


@unit
@pytest.mark.parametrize("argv, profiled", [([], 12), (["--quick"], 5), (["--profiled", "7"], 7),
                                            (["--rounds", "9"], 9)])
def test_how_many_rounds_are_profiled(argv, profiled):
    (group,) = ladder.groups(parsed("--steps", "0", *argv))
    assert group.profiled == profiled and group.modes == MODES and [case.name for case in group.cases] == ["0_baseline"]


@unit
@pytest.mark.parametrize("gib, fits", [(0.001, False), (100, True)])
def test_all_steps_are_timed_together_where_memory_holds_them(gib, fits, monkeypatch):
    monkeypatch.setattr(machine, "memory_total", lambda device: gib * 2**30)
    chosen = SimpleNamespace(device=CUDA, config=GPU_CONFIG, steps=("0", "1", "2"))
    assert ladder.holds_all(chosen) == fits


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def main(study_main):
    """The ladder in this process: main(*argv) -> (status, stdout, stderr)."""
    return functools.partial(study_main, "ladder")


@integration
def test_steps_are_checked_timed_and_explained_together(main, tmp_path):
    path = tmp_path / "ladder.jsonl"
    status, out, err = main("--steps", "0,1-tf32,1,2", "--rounds", 6, "--json", path)
    assert status == 0 and "%: " in err and "starting" in err
    lines = read(path)
    by_label = latest(lines)
    assert list(by_label) == ["0_baseline", "1_cublas, no autocast", "1_cublas", "2_sdpa"]
    assert metric(lines[-1]) == "wall time"
    timed = [by_label[name] for name in ("0_baseline", "1_cublas", "2_sdpa")]
    for run, mode in itertools.product(timed, MODES):
        assert len(run.samples(mode, "eager")) == 6 and sum(run.parts(mode).values()) > 0
        flops = block_work.workload(PRESETS["tiny"], steps.load(0).traits, torch.float32, CPU).flops(mode)
        assert run.value(mode, "rate", "eager") * run.median(mode, "eager") == pytest.approx(1e3 * flops)
    assert by_label["1_cublas, no autocast"].status == "skipped" and "no TF32" in out
    assert STUDY.report(lines).strip() == out.strip()


@integration
def test_a_step_that_fails_its_check_is_a_row_and_the_others_are_timed(main, monkeypatch):
    script = steps.load(2).module
    build = script.build

    def broken(config, values, device):
        block = build(config, values, device)
        block.ln_1.eps = 0.5
        return block
    monkeypatch.setattr(script, "build", broken)
    status, out, _ = main("--steps", "0,2", "--rounds", 6)
    assert status == 1 and "2_sdpa: failed: the " in out and "the gate is" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("0_baseline", "2_sdpa  "))]
    assert [row[1] for row in rows] == ["ok", "failed", "ok", "failed"]


@integration
def test_a_study_that_timed_nothing_is_no_success(main):
    status, out, err = main("--steps", "4")
    assert status == 4 and "4_transformer_engine: skipped" in out and "\nleft over " in err


@integration
def test_an_interrupted_ladder_keeps_what_is_finished(main, ctrl_c, tmp_path):
    """Interrupted while it samples: what was recorded before is whole."""
    ctrl_c(rounds, "interleaved", 3)                             # behind two of warm-up
    path = tmp_path / "out.jsonl"
    status, out, err = main("--steps", "0", "--rounds", 8, "--json", path)
    assert (status, out) == (130, "") and "4 finished records kept" in err and "Traceback" not in err
    assert len(read(path)) == 4


@integration
def test_a_full_disk_is_one_line(main, full_disk, tmp_path):
    status, out, err = main("--steps", "0", "--rounds", 6, "--json", tmp_path / "out")
    assert (status, out) == (1, "") and "No space left on device" in err and "Traceback" not in err


@integration
@no_gpu
def test_counters_say_why_there_are_none(main):
    status, out, _ = main("--steps", "0", "--rounds", 6, "--counters")
    assert status == 0 and "n/a because: a CPU has no such counters" in out


@unit
@pytest.mark.parametrize("argv, words", [
    (["--steps", "7"], "no row '7'; give some of 0,1-tf32,1,2,3,4"), (["--steps", ""], "no row ''"),
    (["--processes", "0"], "from 1 to 999"), (["--profiled", "two"], "from 1 to 999"),
    (["--rounds", "5"], "at least 6"),
    (["--what"], "--what"),
])
def test_mistakes_are_one_line_and_status_two(main, argv, words):
    status, out, err = main(*argv)
    assert (status, out) == (2, "") and words in err and err.startswith("ladder: error: ") and err.count("\n") == 1


# ------------------------------------------------------------------------------------------------- in several processes


@pytest.fixture
def of_each(monkeypatch):
    """of_each(call): what each process does, called with its words and its file, in place of running."""
    def replace(call):
        monkeypatch.setattr(processes, "run_to_its_end", lambda command: call(command[3:], RecordFile(command[-1])))
        monkeypatch.setattr(machine, "facts", lambda device: FACTS)
    return replace


@integration
def test_several_processes_are_recorded_one_after_the_other(main, tmp_path, monkeypatch):
    """The first in a process of its own, the second in this one, which has torch already."""
    real, begun = processes.run_to_its_end, []

    def run_to_its_end(command):
        begun.append(command)
        if len(begun) == 1:
            return real(command)
        with redirect_stdout(io.StringIO()):
            return frame.main(STUDY, command[4:])
    monkeypatch.setattr(processes, "run_to_its_end", run_to_its_end)
    path = tmp_path / "noise.jsonl"
    status, out, _ = main("--steps", "0", "--rounds", 6, "--processes", 2, "--json", path)
    assert status == 0 and "0_baseline" in out and "unpaired" not in out
    assert len({run.info["run"] for run in runs(read(path))}) == len(begun) == 2
    for command in begun:
        assert command[3] == "ladder" and command[command.index("--profiled") + 1] == "1"


@unit
def test_what_memory_does_not_hold_together_is_timed_in_turn(of_each, monkeypatch, capsys):
    """A process for each step, with all that it was told."""
    seen, names = [], iter(["0_baseline", "1_cublas"])

    def call(words, file):
        seen.append(words[:-2])
        file.write(made(next(names), both([1.0] * 6, [1.0] * 6)))
        return 0
    of_each(call)
    argv = ["--preset", "tiny", "--steps", "0,1", "--rounds", "6"]
    monkeypatch.setattr(options, "device_of", lambda name: CUDA)
    monkeypatch.setattr(ladder, "holds_all", lambda chosen: False)
    assert frame.main(STUDY, argv) == 0
    assert seen == [["ladder", *argv, "--steps", row, "--processes", "1", "--chart", ""] for row in ("0", "1")]
    assert "1_cublas" in capsys.readouterr().out


@unit
def test_a_process_that_dies_leaves_a_row(main, of_each):
    of_each(lambda words, file: -9)
    status, out, _ = main("--steps", "0,2", "--processes", 2)
    assert status == 1 and "0_baseline: failed: its process ended with -9" in out and "2_sdpa: failed" in out


@unit
@pytest.mark.parametrize("dies, status", [(0, -9), (1, 1)], ids=["the first", "the second, by a traceback"])
def test_a_process_that_dies_beside_one_that_does_not_fails_the_run(main, of_each, dies, status):
    """Python's status for a traceback is that of a failed step: what the process left tells them apart."""
    begun = []

    def call(words, file):
        begun.append(words)
        if len(begun) - 1 == dies:
            return status
        file.write(made("0_baseline", both([1.0] * 6, [1.0] * 6), run="other"))
        return 0
    of_each(call)
    ended, out, _ = main("--steps", "0", "--processes", 2)
    assert ended == 1 and f"0_baseline: failed: its process ended with {status}" in out and len(begun) == 2


@unit
def test_processes_that_could_run_nothing_are_no_success(main, of_each):
    def call(words, file):
        file.write(made("4_transformer_engine", {}, status="skipped", reason="no FP8", run=file.path))
        return 4
    of_each(call)
    status, out, _ = main("--steps", "4", "--processes", 2)
    assert status == 4 and "4_transformer_engine" in out and "its process ended" not in out


@unit
def test_of_a_process_that_died_what_it_finished_stays():
    """A step that failed by itself keeps its reason; TF32 alone and autocast are two rows of one name."""
    finished = made("0_baseline", {}, status="failed", reason="the branch is off")
    finished += made("1_cublas", both([1.0] * 6, [1.0] * 6))
    finished += made("2_sdpa", {(FORWARD, "eager"): [1.0] * 6})
    chosen = SimpleNamespace(device=CPU, config=CPU_CONFIG)
    died = ladder._died(chosen, ("0", "1-tf32", "1", "2"), finished, 1)
    assert [(label(line), line["benchmark"]["extra_info"]["reason"]) for line in died] == [
        ("1_cublas, no autocast", "its process ended with 1"), ("2_sdpa", "its process ended with 1")]


@pytest.mark.gpu
@integration
def test_on_a_gpu_a_graph_and_its_eager_run_share_their_rounds(tmp_path, studies_in_seconds):
    path = tmp_path / "out"
    argv = ["--preset", "gpt2", "--batch-size", "2", "--steps", "1,2", "--rounds", "10", "--json", str(path)]
    assert frame.main(STUDY, argv) == 0
    for run in latest(read(path)).values():
        for mode in MODES:
            assert all(len(run.samples(mode, launch)) == 10 for launch in LAUNCHES)
            assert run.value(mode, "peak memory", "eager") > 0
            assert run.parts(mode)["GEMM"] > 0


# ------------------------------------------------------------------------------------------------------ from the limit


LIMITS = {"burst": {"matmul": 4.0, "attention": 1.0, "memory": 0.5},
          "sustained": {"matmul": 5.0, "attention": 2.0, "memory": 0.5}}


def beyond(its_parts: dict, **more) -> list[dict]:
    lines = made("2_sdpa", both([10.0] * 6, []), parts={FORWARD: its_parts}, **more)
    rows, headers = ladder.beyond_the_limit(lines, FORWARD)
    return [dict(zip(headers, row, strict=True)) for row in rows]


@unit
def test_from_its_limit_to_its_time_a_row_adds_up():
    (row,) = beyond(parts(GEMM=5.5, attention=2.5, idle=0.3) | {"casts and copies": 1.2}, limits=LIMITS)
    assert row == {"step": "2", "launch": "eager", "burst limit": "5.50", "power": "+1.00", "matmuls": "+0.500",
                   "attention": "+1.50", "passes": "+0.700", "launches": "+0.300", "unexplained": "+0.500",
                   "ms": "10.0"}


@unit
def test_attention_by_hand_is_softmax_and_mask_its_matmuls_are_with_the_others():
    (row,) = beyond(parts(GEMM=7.0) | {"softmax and mask": 1.5, "residual and other": 1.0}, limits=LIMITS)
    assert [row[name] for name in ("matmuls", "attention", "passes", "ms")] == ["+1.00", "+1.50", "+0.500", "10.0"]
    times = [float(row[name]) for name in ("burst limit", "power", "matmuls", "attention", "passes", "launches",
                                           "unexplained")]
    assert sum(times) == pytest.approx(10.0)


@unit
def test_away_from_the_power_cap_power_takes_nothing():
    """What a GPU could not sustain at its cap is no loss of a row that ran at full clocks."""
    lines = made("2_sdpa", both([10.0] * 6, []), limits=LIMITS,
                 parts={FORWARD: parts(GEMM=5.5, attention=2.5, idle=0.3) | {"casts and copies": 1.2}})
    for line in lines:
        line["runners"][0]["extra_info"]["throttled"] = []
    ((step, _, burst, lost, matmuls, *_, ms),), _ = ladder.beyond_the_limit(lines, FORWARD)
    assert (step, burst, lost, matmuls, ms) == ("2", "5.50", "+0.000", "+1.50", "10.0")


@unit
def test_records_without_a_sustained_limit_have_no_way_from_it():
    assert beyond(parts(GEMM=9.0)) == []
    assert beyond(parts(GEMM=9.0), limits={"burst": LIMITS["burst"]}) == []
    told = STUDY.report(made("2_sdpa", both([10.0] * 6, []), parts={FORWARD: parts(GEMM=9.0)}, limits=LIMITS))
    assert "from the limit to the ms of forward (+ is beyond it)" in told


@unit
@pytest.mark.parametrize("percent, fits", [("-1", False), ("101", False), ("nan", False), ("0", True), ("5", True)])
def test_rows_are_slowed_down_by_a_percentage(percent, fits, capsys):
    with contextlib.nullcontext() if fits else pytest.raises(SystemExit):
        assert parsed("--slow-down", percent).slow_down == float(percent)
    assert fits or f"--slow-down {percent}: give a percentage" in one_line(capsys.readouterr().err)


@unit
def test_there_is_a_chart_of_energy_where_it_was_metered():
    metered = made("0_baseline", both([], [10.0] * 6), parts={BOTH: parts(GEMM=9.0)}, joules=7.0)
    without = made("0_baseline", both([], [10.0] * 6), parts={BOTH: parts(GEMM=9.0)})
    assert "energy" in STUDY.charts(metered) and "energy" not in STUDY.charts(without)
