"""What a user of the five scripts meets: every mistake as one line, every failure as a status, and the card."""
import collections
import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from common import PRESETS, parameters, run, steps
from common.block import block_work, evidence, memory, oracle
from common.measure import measurement, subject
from common.measure.session import Session
from common.report.record_file import RecordFile, WriteError
from common.report.result import Result
from common.runtime import compiler, limit, machine, timing
from common.runtime.iteration import BOTH, MODES
from tests.helpers.made_results import sustained
from tests.helpers.said import card_value, one_line

pytestmark = pytest.mark.integration

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without a GPU says")
CPU = torch.device("cpu")
TINY = ["--preset", "tiny", "--device", "cpu"]
PEAKS = limit.Peaks(dict.fromkeys(("float64", "float32", "tf32", "float16", "bfloat16", "float8"), 1e12), 1e11)


@pytest.fixture
def main(capsys, monkeypatch):
    """Run a step, or a copy of one, in this process: main(step or file, *argv) -> (exit status, stdout, stderr)."""
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):         # set by a compiling run
        monkeypatch.setenv(variable, os.environ.get(variable, ""))

    def call(step: int | Path, *argv):
        script = step if isinstance(step, Path) else steps.load(step).path
        try:
            status = run.main(script, [str(argument) for argument in argv])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()
    return call


def few_samples(iteration, clock, between, *_) -> timing.Timing:
    """In place of `timing.measure`: six real samples, no warm-up, no stop rule."""
    return timing.Timing(clock.sample(iteration, between, 6), False, clock.name)


@pytest.fixture
def quick(monkeypatch):
    """Known peaks and a few real samples: a run in a second."""
    monkeypatch.setattr("common.runtime.peaks.measure_burst", lambda *_: PEAKS)
    monkeypatch.setattr("common.runtime.peaks.measure_sustained", lambda workload, name, device: sustained(name))
    monkeypatch.setattr(timing, "calibration", lambda device: {})
    monkeypatch.setattr(timing, "measure", few_samples)


@pytest.fixture
def nothing_timed(monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda *_, **__: pytest.fail("samples were taken"))


@pytest.fixture
def nothing_allocated(monkeypatch, nothing_timed):
    monkeypatch.setattr(parameters, "seeded", lambda *_: pytest.fail("parameters were made"))


def records_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def name_of(record: dict) -> str:
    return record["benchmark"]["extra_info"]["case"]["name"]


# ---------------------------------------------------------------------------------------------------- usage errors


SIZES = ("batch-size", "seq-len", "hidden-size", "num-heads", "ffn-hidden-size")
MISTAKES = [
    (0, ["--hidden-size", "65"], "65", "try hidden_size 64 or num_heads 5"),
    (0, ["--num-heads", "128"], "128", "try"),
    (4, ["--batch-size", "1", "--seq-len", "65"], "65", "try 80"),
    (4, ["--hidden-size", "72"], "72", "try 80"),
    (4, ["--ffn-hidden-size", "100"], "100", "try 112"),
    (0, ["--preset", "huge"], "huge", "gpt2"),
    (1, ["--amp-dtype", "float8"], "float8", "bfloat16"),
    (1, ["--param-dtype", "float64"], "float64", "amp"),
    (4, ["--fp8-weights", "never"], "never", "per-call"),
    (0, ["--batch-size", "two"], "two", "int"),
    (0, ["--batch-size", "1.5"], "1.5", "int"),
    (1, ["--hidden-size", "16"], "16", "try 32 or more"),
    (1, ["--hidden-size", "18"], "18", "try hidden_size 32$"),
    (0, ["--hidden-size", "16", "--param-dtype", "amp"], "16", "try 32 or more"),
    (0, ["--hidden-size", "2", "--num-heads", "1"], "2", "hidden_size is 2: give a whole number from 3"),
    (0, ["--num-heads", "16777213"], "16777213", "try num_heads"),
    (0, ["--seed", "99999999999999999999"], "99999999999999999999", "give a number of at most 18 digits"),
    (1, ["--param-dtype", "amp", "--amp-dtype", "none"], "--param-dtype amp", "--amp-dtype"),
    (2, ["--fp8-weights", "cached"], "--fp8-weights", "unrecognized"),
    (2, ["--fp8-attention"], "--fp8-attention", "unrecognized"),
    (1, ["--attention", "series"], "--attention", "unrecognized"),
    (4, ["--attention", "series"], "--attention", "unrecognized"),
    (2, ["--attention", "mine"], "mine", "'sdpa', 'series'"),
]
for size, wrong in itertools.product(SIZES, ("0", "-3", "1000000000")):
    MISTAKES.append((0, [f"--{size}", wrong], wrong, "give a whole number"))
for wrong in ("1.0", "-0.1", "nan"):
    MISTAKES.append((2, ["--dropout", wrong], wrong, "give a probability"))
for wrong in ("0", "-1", "nan", "1e306"):
    MISTAKES.append((0, ["--max-seconds", wrong], f"{float(wrong):g}", "give a positive number"))


@pytest.mark.parametrize("step, argv, value, fix", MISTAKES,
                         ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_mistake_is_one_line_with_its_value_and_the_fix(main, nothing_allocated, step, argv, value, fix):
    status, out, err = main(step, *TINY, *argv)
    line = one_line(err)
    assert (status, out) == (2, "")
    assert line.startswith(f"{steps.load(step).path.name}: error: ")
    assert value in line and re.search(fix, line)


def test_a_narrow_block_runs_where_nothing_is_rounded_to_16_bits(main, quick):
    assert main(1, *TINY, "--hidden-size", "16", "--amp-dtype", "none")[0] == 0
    assert main(0, *TINY, "--hidden-size", "16")[0] == 0


def test_ctrl_c_before_there_is_anything_to_keep(main, monkeypatch):
    """While the command line is read, which waits for a file that another run holds."""
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(run, "parse", interrupted)
    assert main(0, *TINY) == (130, "", "\n0_baseline.py: interrupted\n")


@no_gpu
@pytest.mark.parametrize("argv", ["--device cuda", "--launch graph"])
def test_what_needs_a_gpu_says_so(main, nothing_allocated, argv):
    status, out, err = main(2, "--preset", "tiny", *argv.split())
    assert (status, out) == (2, "")
    assert argv in one_line(err) and "GPU" in err and re.search("run without|use", err)


@pytest.mark.parametrize("option", ["--json", "--profile"])
@pytest.mark.parametrize("path", ["", "missing/out", "file/out"], ids=["a folder", "in no folder", "below a file"])
def test_a_file_that_cannot_be_written_is_refused(main, nothing_allocated, tmp_path, option, path):
    (tmp_path / "file").write_text("")
    status, out, err = main(2, *TINY, option, tmp_path / path)
    line = one_line(err)
    assert (status, out) == (2, "")
    assert f"{option} {tmp_path / path}" in line and line.endswith("give a file that can be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("option", ["--json", "--profile"])
def test_a_file_without_permission_is_refused(main, nothing_allocated, tmp_path, option):
    tmp_path.chmod(0o500)
    status, out, err = main(2, *TINY, option, tmp_path / "out")
    assert (status, out) == (2, "") and "Permission denied" in one_line(err)


def test_records_and_timeline_are_two_files(main, nothing_allocated, tmp_path):
    path = tmp_path / "both"
    path.write_text("mine\n")
    for same in (path, tmp_path / "x" / ".." / "both"):
        status, out, err = main(2, *TINY, "--json", path, "--profile", same)
        assert (status, out) == (2, "") and "give a file of its own" in one_line(err)
        assert path.read_text() == "mine\n"
    assert main(2, *TINY, "--json", tmp_path / "new", "--profile", tmp_path / "new")[0] == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flag, holds", [
    ("--json", "# a README"), ("--json", "{}"), ("--profile", '"""A script."""'), ("--profile", '{"benchmark": {}}'),
])
def test_a_file_that_holds_something_else_is_left_alone(main, flag, holds, tmp_path):
    path = tmp_path / "something"
    path.write_text(holds)
    status, _, err = main(0, *TINY, flag, path)
    assert status == 2 and f"{flag} {path}: it " in one_line(err) and path.read_text() == holds


# -------------------------------------------------------------------------------------------------------- full disks


def test_a_full_disk_is_noticed_before_timing(main, nothing_timed, tmp_path, full_disk):
    status, out, err = main(2, *TINY, "--json", tmp_path / "records")
    assert status == 1 and card_value(out, "status").startswith("failed: --json")
    assert f"--json {tmp_path / 'records'}: No space left on device" in one_line(err)


def test_a_disk_that_fills_up_leaves_what_was_measured_on_the_card(main, quick, monkeypatch, tmp_path):
    real = RecordFile.write

    def write(self, lines):
        if any(line["benchmark"]["mode"] == BOTH for line in lines):
            raise WriteError("No space left on device")
        real(self, lines)
    monkeypatch.setattr(RecordFile, "write", write)
    status, out, err = main(0, *TINY, "--json", tmp_path / "records")
    assert status == 1 and "No space left" in one_line(err)
    assert float(card_value(out, "median ms").split()[0]) > 0


def test_a_card_that_meets_a_full_disk_is_one_line(main, nothing_timed, monkeypatch, full_stdout):
    monkeypatch.setattr(Session, "_time_alone", lambda *_: None)
    with full_stdout:
        status, _, err = main(2, *TINY)
    assert status == 1 and one_line(err) == "2_sdpa.py: error: [Errno 28] No space left on device"


def test_another_files_error_is_not_blamed_on_json(main, nothing_timed, monkeypatch):
    def broken(*_, **__):
        raise OSError(5, "Input/output error", "/somewhere/else")
    monkeypatch.setattr(oracle, "checks", broken)
    status, out, err = main(2, *TINY)
    assert status == 1 and "Input/output error" in one_line(err) and "--json" not in err


def test_a_compiler_without_room_names_the_folder_and_the_fix(main, nothing_timed, monkeypatch):
    """TMPDIR is full: what torch.compile raises then begins with its C++ compiler's command."""
    def no_room(*_, **__):
        told = RuntimeError("C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\nfatal error: error writing to "
                            "/tmp/ccX.s: No space left on device\ncompilation terminated.")
        raise torch._dynamo.exc.BackendCompilerFailed(test_a_compiler_without_room_names_the_folder_and_the_fix, told,
                                                      None)
    monkeypatch.setattr(oracle, "checks", no_room)
    status, out, err = main(2, *TINY)
    assert status == 1 and card_value(out, "status").startswith("failed: torch.compile: no space left on device")
    assert one_line(err).endswith("set TMPDIR to a folder with room") and "C++" not in err


# ----------------------------------------------------------------------------------------- what a machine can't do


def test_without_a_cpp_compiler_step_3_is_skipped(main, nothing_timed, monkeypatch):
    """Before anything is compiled, with exit status 4 and the reason on the card."""
    monkeypatch.setattr(subject, "compilation_time", lambda *_: pytest.fail("something was compiled"))
    for environment in ({"CXX": "/nonexistent"}, {"CXX": "", "PATH": "/nonexistent"}):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        status, out, err = main(3, *TINY)
        assert status == 4
        assert re.search(r"skipped: no C\+\+ compiler found: .*CXX", one_line(err))
        assert card_value(out, "status").startswith("skipped: no C++ compiler found")


@no_gpu
def test_attention_in_fp8_is_skipped_where_it_is_only_emulated(main, nothing_timed):
    status, out, err = main(4, *TINY, "--fp8-attention")
    assert status == 4 and "needs Transformer Engine" in one_line(err)
    assert card_value(out, "status").startswith("skipped: ")


@no_gpu
@pytest.mark.parametrize("step", [2, 3])
def test_attention_by_the_series_is_skipped_without_a_gpu(main, nothing_timed, step):
    status, out, err = main(step, *TINY, "--attention", "series")
    assert status == 4 and "attention by the series: there is no GPU" in one_line(err)
    assert card_value(out, "status").startswith("skipped: ")


@no_gpu
def test_a_cpu_without_16_bit_matmuls_has_no_autocast_and_says_why(main, quick, a_cpu_without_bfloat16):
    """PyTorch's own loops would take minutes; FP8 is emulated, which multiplies in FP32."""
    _, out, _ = main(2, *TINY)
    assert re.search(r"^precision +matmuls float32; .*autocast off \(this CPU has no fast", out, re.MULTILINE)
    _, out, _ = main(0, *TINY)
    assert "this CPU" not in out                                  # step 0 would have none anyway
    _, out, _ = main(2, *TINY, "--amp-dtype", "none")
    assert "autocast off" in out and "this CPU has" not in out    # as asked for
    _, out, _ = main(2, *TINY, "--amp-dtype", "bfloat16")
    assert "autocast bfloat16" in out
    _, out, _ = main(4, *TINY)
    assert "matmuls float8" in out and "autocast bfloat16" in out


@no_gpu
def test_without_16_bit_matmuls_no_parameters_are_in_16_bits(main, nothing_allocated, a_cpu_without_bfloat16):
    status, _, err = main(2, *TINY, "--param-dtype", "amp")
    assert status == 2
    assert one_line(err).endswith("there is no 16-bit dtype with --amp-dtype auto (this CPU has no fast 16-bit "
                                  "matmuls; --amp-dtype bfloat16 takes the slow ones)")


# ---------------------------------------------------------------------------------------------------- failed checks


@pytest.fixture
def large_activations(monkeypatch):
    """An attention output of about 1e6: within FP32 and BF16, beyond FP16's 65504. All that follows is linear or LN."""
    seeded = parameters.seeded

    def large(config, seed=0):
        values = seeded(config, seed)
        return values | {"attn.proj.weight": values["attn.proj.weight"] * 1e6}
    monkeypatch.setattr(parameters, "seeded", large)


def test_fp16_overflow_is_named_with_its_way_out(main, nothing_timed, large_activations):
    status, out, err = main(1, *TINY, "--amp-dtype", "float16")
    assert status == 1 and "float16 overflows beyond 65504, try --amp-dtype bfloat16" in one_line(err)
    assert card_value(out, "status").startswith("failed: ") and "not finite" in out


@pytest.mark.parametrize("dtype", ["none", "bfloat16"])
def test_what_overflows_fp16_passes_elsewhere(main, quick, large_activations, dtype):
    assert main(1, *TINY, "--amp-dtype", dtype)[0] == 0


@pytest.mark.parametrize("change, said", [
    (lambda block: block.attn.proj.bias.data.zero_(), "the output|the branch"),
    (lambda block: block.mlp.fc.bias.requires_grad_(False), "gradient of mlp.fc.bias is missing or not finite"),
    (lambda block: block.ln_2.bias.register_hook(torch.zeros_like), "gradient of ln_2.bias is off by 1.0e"),
    (lambda block: block.ln_1.bias.register_hook(lambda g: g / 0), "gradient of ln_1.bias is missing or not finite"),
], ids=["a dropped bias", "a missing gradient", "a wrong gradient", "an infinite gradient"])
def test_a_failed_check_says_what_is_wrong(main, nothing_timed, monkeypatch, tmp_path, change, said):
    script = steps.load(0).module
    build = script.build

    def broken(config, values, device):
        block = build(config, values, device)
        change(block)
        return block
    monkeypatch.setattr(script, "build", broken)
    status, out, err = main(0, *TINY, "--json", tmp_path / "out.jsonl")
    assert status == 1 and re.search(said, one_line(err))
    assert re.search(said, card_value(out, "status")) and card_value(out, "median ms") == "n/a n/a n/a n/a"
    ended = {record["benchmark"]["extra_info"]["status"] for record in records_in(tmp_path / "out.jsonl")}
    assert ended == {"failed"}


def test_a_second_compilation_voids_the_run(main, quick, fresh_dynamo, monkeypatch):
    """Real graphs, of the backend that generates no code; what they were guarded on changes once timing starts."""
    blocks = []

    def compile_without_code(block, **options):
        blocks.append(block)
        torch.nn.Module.compile(block, backend="eager", **options)

    def change_and_measure(*arguments):
        blocks[-1].attn.dropout = 0.25
        return few_samples(*arguments)
    monkeypatch.setattr(steps.load(3).module.Block, "compile", compile_without_code)
    monkeypatch.setattr(compiler, "missing", lambda device: None)
    monkeypatch.setattr(timing, "measure", change_and_measure)
    status, out, err = main(3, *TINY)
    assert status == 1 and "compiled again after warm-up" in one_line(err)
    assert card_value(out, "status").startswith("failed: ")
    assert card_value(out, "burst peaks").endswith("copy 0.1 TB/s (read + written)")


def test_a_kernel_of_another_mechanism_fails_the_run(main, quick, monkeypatch):
    """As if, on a GPU, step 2 had fallen back to attention by hand."""
    kernels = collections.Counter({"nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT": 4, "cunn_SoftMaxForwardSmem": 1})
    on_gpu = steps.load(2).traits.claims("bfloat16", torch.device("cuda"))
    judge = evidence.judge
    monkeypatch.setattr(evidence, "judge", lambda seen, claims, *rest: judge(kernels, on_gpu, *rest))
    status, out, err = main(2, *TINY)
    assert status == 1
    assert "forward did not run as 2_sdpa claims: softmax ran: cunn_SoftMaxForwardSmem" in one_line(err)
    assert card_value(out, "forward") == "refuted: softmax ran: cunn_SoftMaxForwardSmem"


def test_an_fp8_scale_that_never_moved_fails(main, quick, monkeypatch):
    monkeypatch.setattr("common.block.emulation._Scaling.update", lambda self: None)
    status, out, err = main(4, *TINY)
    assert status == 1 and "delayed scaling is not calibrated" in one_line(err)


# ----------------------------------------------------------------------------------------------------- out of memory


def suggestion(text: str, preset: str):
    """The config of the shape that a message suggests."""
    batch_size, seq_len = map(int, re.search(r"--batch-size (\d+) --seq-len (\d+) fits", text).groups())
    return PRESETS[preset].replace(batch_size=batch_size, seq_len=seq_len)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("step", [0, 2, 4])
def test_out_of_memory_names_the_peak_and_a_shape_that_fits(main, nothing_timed, monkeypatch, step, error):
    def exhausted(*_, **__):
        raise error("a long message of the allocator")
    monkeypatch.setattr(oracle, "checks", exhausted)
    status, out, err = main(step, *TINY)
    fits = suggestion(one_line(err), "tiny")
    assert status == 3 and re.search(r"oom: [\d.]+ of [\d.]+ GiB in use at the peak", err)
    assert fits.tokens < PRESETS["tiny"].tokens
    assert card_value(out, "status").startswith("oom: ") and "--batch-size" in card_value(out, "status")


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_shape_no_machine_holds_is_refused_before_it_is_allocated(main, nothing_allocated, step):
    """Linux would otherwise promise the memory, and kill the process once it is touched."""
    status, out, err = main(step, "--preset", "cpu", "--device", "cpu", "--batch-size", "100000")
    fits = suggestion(one_line(err), "cpu")
    assert status == 3 and memory.needed(fits, steps.load(step).traits, CPU) <= machine.memory_total(CPU)
    assert re.search(r"about [\d,.]+ GiB", err), "how much it would need is what a refusal has to say"
    assert card_value(out, "status").startswith("oom: ")


# -------------------------------------------------------------------------------------------------------- a good run


@pytest.mark.parametrize("step, argv", [
    (0, "--batch-size 1 --seq-len 1"), (0, "--launch eager"), (0, "--seed -7"), (1, "--amp-dtype float16"),
    (2, "--seq-len 37 --num-heads 1"), (2, "--dropout 0.5"), (2, "--param-dtype amp"), (4, "--param-dtype amp"),
    (4, "--amp-dtype none"), (4, "--fp8-weights cached"), (4, "--fp8-weights kept"),
])
def test_every_option_runs(main, quick, step, argv):
    status, out, err = main(step, *TINY, *argv.split())
    assert (status, err) == (0, "") and card_value(out, "status") == "ok"


@pytest.mark.parametrize("argv, words", [
    (["--amp-dtype", "bfloat16"], "autocast off (--amp-dtype bfloat16 is for the later steps)"),
    (["--amp-dtype", "none"], "autocast off"), ([], "autocast off")])
def test_step_0_says_that_it_has_no_autocast(main, quick, argv, words):
    status, out, _ = main(0, *TINY, *argv)
    assert status == 0
    assert card_value(out, "precision") == f"matmuls float32; {words} x, y and parameters float32; residual float32"


@no_gpu
@pytest.mark.parametrize("step, dtype, gates", [(1, "bfloat16", ("6.8e-02|9.6e-02", "2.4e-02|3.4e-02")),
                                                (2, "float16", ("8.5e-03|1.2e-02", "3.0e-03|4.2e-03"))])
def test_all_16_bit_passes_its_check_on_a_cpu_at_a_real_sequence(main, quick, step, dtype, gates):
    """PyTorch's LayerNorm there sums its own gradients in 16 bits: the gate knows, and stays tight on short ones.

    It is that of one sequence's tokens, or of two sequences', whichever run came nearer to its own.
    """
    for seq_len, gate in zip((512, 64), gates, strict=True):
        status, out, _ = main(step, *TINY, "--seq-len", seq_len, "--param-dtype", "amp", "--amp-dtype", dtype)
        assert status == 0 and re.search(rf"^parameter gradient +\S+ +({gate})", out, re.MULTILINE)


def test_each_pass_has_its_own_work_and_its_own_limit(main, quick, tmp_path):
    """FLOPs and tokens from the recorded rates; the backward is twice the forward more."""
    assert main(0, *TINY, "--json", tmp_path / "out")[0] == 0
    timed = {}
    for record in records_in(tmp_path / "out"):
        if record["benchmark"]["extra_info"]["case"]["launch"] == "eager":
            timed[record["benchmark"]["mode"], record["metric"]["name"]] = record["metric"]
    config = PRESETS["tiny"]
    work = block_work.workload(config, steps.load(0).traits, torch.float32, CPU)
    for mode in MODES:
        seconds = timed[mode, "latency"]["extra_info"]["median"] / 1e3
        (rate,), (throughput,) = (timed[mode, name]["benchmark_values"] for name in ("rate", "throughput"))
        assert rate * seconds == pytest.approx(work.flops(mode))
        assert throughput * seconds == pytest.approx(config.tokens)
        by_kind = limit.ms_by_kind(work.operations(mode), PEAKS)
        assert timed[mode, "limit"]["benchmark_values"] == [sum(by_kind.values())]
    assert work.flops(BOTH) == 3 * work.flops("forward")
    assert timed["forward", "limit"] != timed[BOTH, "limit"]


def test_a_row_beyond_its_limit_has_the_peaks_measured_again(main, quick, monkeypatch):
    """What ran beside it had made them too low; where they still are, the card says so."""
    measured = []
    slow, fast = limit.Peaks(dict(PEAKS.flops, float32=1e3), 1e11), PEAKS
    monkeypatch.setattr("common.runtime.peaks.measure_sustained",
                        lambda config, name, device: sustained(name, rate=measured[-1].flops["float32"]))

    def measure(second):
        def peaks(*_):
            measured.append(slow if not measured else second)
            return measured[-1]
        measured.clear()
        monkeypatch.setattr("common.runtime.peaks.measure_burst", peaks)
        return main(0, *TINY)
    status, out, _ = measure(fast)
    assert status == 0 and len(measured) == 2 and "ERROR" not in out
    assert card_value(out, "burst peaks").startswith("bfloat16 1.00 TFLOP/s, float16 1.00")
    status, out, _ = measure(slow)
    assert status == 0 and len(measured) == 2 and "ERROR" in out
    for yardstick in ("sustained", "burst"):
        assert card_value(out, f"{yardstick} peaks").endswith(
            "measured twice, and too low for forward, eager and forward+backward, eager")


def test_a_seed_and_the_seconds_are_those_that_were_asked_for(main, quick, monkeypatch):
    """Two seeds are two inputs, and the rule by which sampling ends is the user's."""
    rules = []

    def measure(iteration, clock, between, rule, *_):
        rules.append(rule)
        return few_samples(iteration, clock, between)
    monkeypatch.setattr(timing, "measure", measure)
    errors = []
    for seed in (0, 1, 0):
        _, card, _ = main(0, *TINY, "--seed", seed, "--max-seconds", "1.25")
        errors.append([card_value(card, label) for label in ("output", "branch", "parameter gradient")])
    assert errors[0] == errors[2] != errors[1] and {rule.max_seconds for rule in rules} == {1.25}


def test_no_two_seeds_share_a_tensor(monkeypatch):
    """Parameters, x, dy and the check's own gradient: a gradient that is x itself, say, would be a special case."""
    seeds = []

    class Spy(torch.Generator):
        def manual_seed(self, seed):
            seeds.append(seed)
            return super().manual_seed(seed)
    monkeypatch.setattr(torch, "Generator", Spy)
    step, config = steps.load(0), PRESETS["tiny"].replace(amp_dtype=None)
    for seed in (0, 1, 2):
        subject._seeded.cache_clear()
        result = Result(step.name, config, "float32", machine.facts(CPU), step=0, traits=step.traits)
        subject.prepare(step.build, torch.float32, CPU, seed, result, lambda *what: None)
    of_parameters, of_inputs, of_check = seeds[0::4], seeds[1::4], seeds[3::4]
    assert len(seeds) == 12 and len({*of_parameters, *of_inputs}) == 6
    assert not {*of_check} & {*of_parameters, *of_inputs}


def test_without_a_stderr_there_is_a_card_and_nothing_else(main, quick, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    status, out, _ = main(0, *TINY)
    assert status == 0 and card_value(out, "status") == "ok"
    monkeypatch.setattr(sys, "stderr", None)
    assert main(0, "--preset", "nope") == (2, "", "")


def test_a_card_that_nobody_reads_to_its_end_is_no_error(main, quick, monkeypatch):
    """`| head` has seen enough: its end of the pipe is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed, contextlib.redirect_stdout(closed):
        status, _, err = main(0, *TINY)
    assert (status, err) == (0, "")


# --------------------------------------------------------------------------------------------------------- timelines


def test_a_timeline_is_written_on_request(main, quick, tmp_path):
    status, _, _ = main(2, *TINY, "--profile", tmp_path / "timeline.json")
    assert status == 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)
    assert main(0, *TINY, "--profile", tmp_path / "timeline.json.gz")[0] == 0
    assert json.loads(gzip.decompress((tmp_path / "timeline.json.gz").read_bytes()))["traceEvents"]


def test_a_timeline_goes_into_what_is_there(main, quick, tmp_path):
    """A link is followed, and a pipe is written to once: the profiler itself would put a file in their place."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    for path in ("link", "pipe"):
        assert main(0, *TINY, "--profile", tmp_path / path)[0] == 0
    reader.join(60)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "pipe").is_fifo()
    (from_pipe,) = read
    for text in ((tmp_path / "target").read_text(), from_pipe):
        assert json.loads(text)["traceEvents"]


def test_a_timeline_that_could_not_be_written_fails(main, quick, tmp_path, monkeypatch):
    """The profiler itself says nothing of a full disk."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: open(path, "w").close())
    status, out, err = main(0, *TINY, "--profile", tmp_path / "timeline.json")
    assert status == 1 and "the profiler left no whole timeline" in one_line(err)


def test_a_timeline_is_replaced_and_records_are_appended_to(main, quick, tmp_path):
    counts = []
    for _ in range(2):
        assert main(0, *TINY, "--profile", tmp_path / "timeline.json", "--json", tmp_path / "out")[0] == 0
        counts.append(len(records_in(tmp_path / "out")))
    json.loads((tmp_path / "timeline.json").read_text())
    first, both = counts
    assert both == 2 * first


# ------------------------------------------------------------------------------------------------- copies of a script


def test_a_copy_of_a_step_runs_with_the_traits_of_that_step(main, quick, tmp_path):
    """`2_mine.py` is timed, checked and judged as step 2 is, and its card has its own name."""
    copy = tmp_path / "2_mine.py"
    copy.write_text(steps.load(2).path.read_text())
    cards = []
    for script in (2, copy):
        status, out, err = main(script, *TINY, "--json", tmp_path / "out.jsonl")
        assert (status, err) == (0, "")
        cards.append(out)
    original, changed = cards
    assert card_value(original, "step") == "2_sdpa" and card_value(changed, "step") == "2_mine"
    for label in ("precision", "attention", "branch", "forward", "forward+backward"):
        assert card_value(changed, label) == card_value(original, label)
    records = records_in(tmp_path / "out.jsonl")
    assert {record["benchmark"]["extra_info"]["case"]["step"] for record in records} == {2}
    assert {name_of(record) for record in records} == {"2_sdpa", "2_mine"}


def test_a_copy_whose_name_says_no_step_is_told_how_to_be_named(main, nothing_allocated, tmp_path):
    copy = tmp_path / "mine.py"
    copy.write_text(steps.load(2).path.read_text())
    assert main(copy, *TINY) == (
        2, "", "mine.py: error: mine.py: name it after the step that it is a copy of, as 0_mine.py\n")


def test_a_stray_copy_beside_the_scripts_harms_no_command(tmp_path):
    """In a tree of its own: each of the five is still known by its name, and every command is there."""
    for script in steps.ALL:
        (tmp_path / script.path.name).symlink_to(script.path)
    shutil.copytree(steps.ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "benchmarks").symlink_to(steps.ROOT / "benchmarks")
    for name in ("2_mine.py", "2_yours.py"):                      # in the order of names before `2_sdpa.py` and behind
        (tmp_path / name).write_text("raise SystemExit('it is no step')")
    told = subprocess.run([sys.executable, "-c", """
import torch
from benchmarks.studies import ladder
from common import PRESETS, steps
import dataclasses
print(*(step.module.__file__ for step in steps.ALL))
print(*(case.name for case in ladder.cases(PRESETS["tiny"], torch.device("cpu"))))
"""], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (told.returncode, told.stderr) == (0, "")
    files, cases = told.stdout.splitlines()
    assert files.split() == [str(tmp_path / script.path.name) for script in steps.ALL]
    assert list(dict.fromkeys(cases.split())) == [script.name for script in steps.ALL]


# --------------------------------------------------------------------------------------------------- whole processes


def start(step: int, *argv, cwd) -> subprocess.Popen:
    """One thread each: several processes whose threads wait for one another on few cores take minutes.

    With Ctrl-C as a terminal would send it: what starts the tests in the background may have had it ignored.
    """
    return subprocess.Popen([sys.executable, steps.load(step).path, *map(str, argv)], cwd=cwd, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


INTERRUPTED, TO_ITS_END = 0, 4              # .ci/run runs all five


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two steps side by side in another folder, both appending to one file: ({step: (status, out, err)}, its path).

    One gets Ctrl-C as it begins to time the second pass, which takes half a second at least.
    """
    folder = tmp_path_factory.mktemp("runs")
    path = folder / "all.jsonl"
    ends = start(TO_ITS_END, *TINY, "--max-seconds", "0.2", "--json", path, cwd=folder)
    interrupted = start(INTERRUPTED, *TINY, "--max-seconds", "1", "--json", path, cwd=folder)
    deadline = time.monotonic() + 100
    while not (path.exists() and has_timed_a_pass(path.read_text())):
        assert interrupted.poll() is None and time.monotonic() < deadline, interrupted.communicate()
        time.sleep(0.01)
    interrupted.send_signal(signal.SIGINT)
    return {INTERRUPTED: finish(interrupted), TO_ITS_END: finish(ends)}, path


def has_timed_a_pass(text: str) -> bool:
    return any("0_baseline" in line and '"launches"' in line for line in text.splitlines())


def own_words(step: int, err: str) -> str:
    """Without the line that says that it waited for the other one, which may not have said its name yet."""
    name = re.escape(steps.load(step).path.name)
    return re.sub(name + r": waiting for (another run|\S+ \(process \d+\)) on this device to end\n", "", err)


def own_records(step: int, runs) -> list[dict]:
    return [record for record in records_in(runs[1]) if name_of(record) == steps.load(step).name]


def test_a_script_runs(runs):
    """Exit status 0, a card within 100 columns, and nothing on stderr."""
    status, out, err = runs[0][TO_ITS_END]
    assert status == 0 and own_words(TO_ITS_END, err) == ""
    assert card_value(out, "step") == steps.load(TO_ITS_END).name and card_value(out, "status") == "ok"
    assert max(map(len, out.splitlines())) <= 100
    values = re.findall(r"[\d.]+", card_value(out, "median ms"))
    assert len(values) == 2 and all(float(value) > 0 for value in values)


def test_of_an_emulation_no_rate_is_reported(runs):
    _, out, _ = runs[0][TO_ITS_END]
    assert "means nothing" in card_value(out, "timing") and "emulated" in card_value(out, "engine")
    for label in ("tokens/s", "TFLOP/s", "sustained limit", "burst limit", "% of sustained", "% of burst"):
        assert card_value(out, label) == "n/a n/a n/a n/a"
    assert card_value(out, "burst peaks") == "n/a"                  # nothing is held against them
    metrics = {record["metric"]["name"] for record in own_records(TO_ITS_END, runs)}
    assert "latency" in metrics and not metrics & {"rate", "throughput", "limit", "percent of limit"}


def test_an_interrupted_run_keeps_its_finished_records(runs):
    """The first pass's records are whole."""
    status, out, err = runs[0][INTERRUPTED]
    own = own_records(INTERRUPTED, runs)
    assert (status, out) == (130, "")
    assert one_line(own_words(INTERRUPTED, err)) == f"0_baseline.py: interrupted; {len(own)} finished records kept"
    assert {record["benchmark"]["mode"] for record in own} == {"check", "forward"}


def test_runs_at_once_leave_only_whole_records(runs):
    """Whatever the order in which they wrote."""
    assert runs[1].read_text().endswith("\n")
    own = own_records(TO_ITS_END, runs)
    names = collections.Counter(record["metric"]["name"] for record in own)
    assert names["latency"] == 4 and names["launches"] == 2 and names["parameter gradient error"] == 1
    in_turn = itertools.groupby(own, lambda record: record["benchmark"]["mode"])
    assert [mode for mode, _ in in_turn] == ["check", "forward", "forward+backward", "run"]
    assert names["wall time"] == 1 and own[-1]["metric"]["benchmark_values"][0] > 0
    timed = [record["metric"]["benchmark_values"] for record in own if record["metric"]["name"] == "latency"]
    assert sum(map(bool, timed)) == 2 and all(ms > 0 for samples in timed for ms in samples)


def test_help_says_what_each_step_is(monkeypatch, capsys):
    for step in steps.ALL:
        monkeypatch.setattr(sys, "argv", [str(step.path), "--help"])
        with pytest.raises(SystemExit) as ended:             # in this process: five of their own take a while
            runpy.run_path(str(step.path), run_name="__main__")
        out, err = capsys.readouterr()
        assert (ended.value.code, err) == (0, "")
        assert f"usage: {step.path.name}" in out and f"Step {step.number}: {step.title}." in out
        assert ("--fp8-weights" in out) == (step.number == 4)
        for option in ("--preset", "--amp-dtype", "--json", "--profile", "--max-seconds", "Exit status"):
            assert option in out


def test_a_mistake_ends_the_process_with_one_line(tmp_path):
    """Across the process boundary as inside: exit status 2, nothing on stdout, no traceback."""
    status, out, err = finish(start(0, *TINY, "--hidden-size", "66", cwd=tmp_path))
    assert (status, out) == (2, "")
    assert one_line(err) == ("0_baseline.py: error: hidden_size 66 is not divisible by num_heads 4: "
                             "try hidden_size 64 or num_heads 3")


def test_a_claim_that_the_backward_alone_refutes_fails_the_run(main, quick, monkeypatch):
    """The forward may run what it claims while the backward does not."""
    see = measurement.see_kernels

    def see_kernels(subject_, iteration, mode, result, trace=None):
        see(subject_, iteration, mode, result, trace)
        if mode == BOTH:
            result.evidence[mode] = dataclasses.replace(result.evidence[mode], verdict="refuted", because="it cheated")
    monkeypatch.setattr(measurement, "see_kernels", see_kernels)
    status, out, err = main(0, *TINY)
    assert status == 1 and "forward+backward did not run as 0_baseline claims: it cheated" in one_line(err)
    assert card_value(out, "status").startswith("failed")
