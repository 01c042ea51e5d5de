"""What a user meets: the five scripts as programs, every mistake as one line, every failure as a status."""
import collections
import gzip
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from common import PRESETS, device, evidence, harness, oracle, parameters, report, roofline, run, steps, timing
from common.output import Output, WriteError

pytestmark = pytest.mark.integration

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without a GPU says")
TINY = ["--preset", "tiny", "--device", "cpu"]


@pytest.fixture
def main(capsys, monkeypatch):
    """Run a step in this process: main(step, *argv) -> (exit status, stdout, stderr)."""
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):         # set by a compiling run
        monkeypatch.setenv(variable, os.environ.get(variable, ""))

    def call(step: int, *argv: str):
        try:
            status = run.main(steps.path(step), [str(argument) for argument in argv])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()
    return call


@pytest.fixture
def quick(monkeypatch):
    """Known peaks, and a few real samples without a warm-up or a stop rule: a run in a second."""
    peaks = roofline.Peaks(collections.defaultdict(lambda: 1e12), 1e11)
    monkeypatch.setattr(roofline, "measure_peaks", lambda *_: peaks)
    monkeypatch.setattr(timing, "measure", lambda iteration, clock, between, *_: timing.Timing(
        clock.sample(iteration, between, 6), False, clock.name))


@pytest.fixture
def nothing_timed(monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda *_, **__: pytest.fail("samples were taken"))


@pytest.fixture
def nothing_allocated(monkeypatch, nothing_timed):
    monkeypatch.setattr(parameters, "seeded", lambda *_: pytest.fail("parameters were made"))


def one_line(err: str) -> str:
    line = err.strip()
    assert line and "\n" not in line and "Traceback" not in err
    return line


def card_value(card: str, label: str) -> str:
    """The value beside `label`, wrapped lines joined."""
    lines = card.splitlines()
    start = next(n for n, line in enumerate(lines) if line[:20].rstrip() == label)
    wrapped = itertools.takewhile(lambda line: line.startswith(" " * 20), lines[start + 1:])
    return " ".join(" ".join([lines[start][20:], *wrapped]).split())


# ---------------------------------------------------------------------------------------------------- usage errors


@pytest.mark.parametrize("step, argv, value, fix", [
    (0, ["--hidden-size", "65"], "65", "try hidden_size 64 or num_heads 5"),
    (0, ["--num-heads", "128"], "128", "try"),
    (4, ["--batch-size", "1", "--seq-len", "65"], "65", "try 80"),
    (4, ["--hidden-size", "72"], "72", "try 80"),
    (4, ["--ffn-hidden-size", "100"], "100", "try 112"),
    (0, ["--preset", "huge"], "huge", "gpt2"),
    (1, ["--amp-dtype", "float8"], "float8", "bfloat16"),
    (1, ["--param-dtype", "float64"], "float64", "amp"),
    (4, ["--fp8-weights", "never"], "never", "per-call"),
    *((0, [f"--{name}", value], value, "give a whole number") for value in ("0", "-3", "1000000000")
      for name in ("batch-size", "seq-len", "hidden-size", "num-heads", "ffn-hidden-size")),
    (0, ["--batch-size", "two"], "two", "int"),
    (0, ["--batch-size", "1.5"], "1.5", "int"),
    *((2, ["--dropout", value], value, "give a probability") for value in ("1.0", "-0.1", "nan")),
    *((0, ["--max-seconds", value], f"{float(value):g}", "give a positive number")
      for value in ("0", "-1", "nan", "1e306")),
    (1, ["--hidden-size", "16"], "16", "try 32 or more"),
    (1, ["--hidden-size", "18"], "18", "try hidden_size 32$"),
    (0, ["--hidden-size", "16", "--param-dtype", "amp"], "16", "try 32 or more"),
    (0, ["--seed", "99999999999999999999"], "99999999999999999999", "give|try"),
    (1, ["--param-dtype", "amp", "--amp-dtype", "none"], "--param-dtype amp", "--amp-dtype"),
    (2, ["--fp8-weights", "cached"], "--fp8-weights", "unrecognized"),
    (2, ["--fp8-attention"], "--fp8-attention", "unrecognized"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_mistake_is_one_line_with_its_value_and_the_fix(main, nothing_allocated, step, argv, value, fix):
    status, out, err = main(step, *TINY, *argv)
    line = one_line(err)
    assert (status, out) == (2, "")
    assert line.startswith(f"{steps.path(step).name}: error: ") and value in line and re.search(fix, line)


def test_a_narrow_block_runs_where_nothing_is_rounded_to_16_bits(main, quick):
    assert main(1, *TINY, "--hidden-size", "16", "--amp-dtype", "none")[0] == 0
    assert main(0, *TINY, "--hidden-size", "16")[0] == 0


def test_ctrl_c_before_there_is_anything_to_keep(main, monkeypatch):
    """While the command line is read, which waits for a file that another run holds."""
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(run, "_parse", interrupted)
    assert main(0, *TINY) == (130, "", "\n0_baseline.py: interrupted\n")


def test_a_changed_checkout_is_told_apart_by_how(tmp_path, monkeypatch):
    """Two edits are two versions of the code, the same edit is one; what runs write, and README, is no code."""
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=b", *words], check=True,
                       capture_output=True)
    (tmp_path / "common").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    files = code, *others = [tmp_path / "common" / "device.py", tmp_path / "README.md",
                             tmp_path / "benchmarks" / "results" / "a.jsonl"]
    for file in files:
        file.write_text("a")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(device, "__file__", str(code))
    commit = device._git_commit()
    for file in others:
        file.write_bytes(b"caf\xe9")
    assert re.fullmatch("[0-9a-f]+", commit) and device._git_commit() == commit
    seen = []
    for text in (b"b", b"\xe9", b"b"):
        code.write_bytes(text)
        seen.append(device._git_commit())
    assert seen[0] == seen[2] != seen[1] and all(one.startswith(f"{commit}+") for one in seen)


@no_gpu
@pytest.mark.parametrize("argv", ["--device cuda", "--launch graph"])
def test_what_needs_a_gpu_says_so(main, nothing_allocated, argv):
    status, out, err = main(2, "--preset", "tiny", *argv.split())
    assert (status, out) == (2, "")
    assert argv in one_line(err) and "GPU" in err and re.search("run without|use", err)


@pytest.mark.parametrize("option", ["--json", "--profile"])
@pytest.mark.parametrize("path", ["", "missing/out", "file/out"], ids=["a folder", "in no folder", "below a file"])
def test_a_file_that_cannot_be_written_is_found_at_once(main, nothing_allocated, tmp_path, option, path):
    (tmp_path / "file").write_text("")
    status, out, err = main(2, *TINY, option, tmp_path / path)
    line = one_line(err)
    assert (status, out) == (2, "")
    assert f"{option} {tmp_path / path}" in line and line.endswith("give a file that can be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("option", ["--json", "--profile"])
def test_a_file_without_permission_is_found_at_once(main, nothing_allocated, tmp_path, option):
    tmp_path.chmod(0o500)
    status, out, err = main(2, *TINY, option, tmp_path / "out")
    assert (status, out) == (2, "") and "Permission denied" in one_line(err)


def test_a_full_disk_is_found_before_timing(main, nothing_timed, tmp_path, full_disk):
    status, out, err = main(2, *TINY, "--json", tmp_path / "records")
    assert status == 1 and card_value(out, "status").startswith("failed: --json")
    assert f"--json {tmp_path / 'records'}: No space left on device" in one_line(err)


def test_what_was_measured_until_the_disk_was_full_is_on_the_card(main, quick, monkeypatch, tmp_path):
    real = Output.write

    def write(self, lines):
        if any(line["benchmark"]["mode"] == "forward+backward" for line in lines):
            raise WriteError("No space left on device")
        real(self, lines)
    monkeypatch.setattr(Output, "write", write)
    status, out, err = main(0, *TINY, "--json", tmp_path / "records")
    assert status == 1 and "No space left" in one_line(err) and float(card_value(out, "median ms").split()[0]) > 0


def test_a_card_that_finds_the_disk_full_is_one_line(main, nothing_timed, monkeypatch, full_stdout):
    monkeypatch.setattr(run, "_run", lambda *_: None)
    with full_stdout:
        status, _, err = main(2, *TINY)
    assert status == 1 and one_line(err) == "2_sdpa.py: error: [Errno 28] No space left on device"


def test_another_files_error_is_not_blamed_on_json(main, nothing_timed, monkeypatch):
    def broken(*_, **__):
        raise OSError(5, "Input/output error", "/somewhere/else")
    monkeypatch.setattr(oracle, "checks", broken)
    status, out, err = main(2, *TINY)
    assert status == 1 and "Input/output error" in one_line(err) and "--json" not in err


# ----------------------------------------------------------------------------------------- what a machine can't do


def test_without_a_cpp_compiler_step_3_is_skipped(main, nothing_timed, monkeypatch):
    """Before anything is compiled, with exit status 4 and the reason on the card."""
    monkeypatch.setattr(harness, "compilation_time", lambda *_: pytest.fail("something was compiled"))
    for environment in ({"CXX": "/nonexistent"}, {"CXX": "", "PATH": "/nonexistent"}):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        status, out, err = main(3, *TINY)
        assert status == 4
        assert re.search(r"skipped: no C\+\+ compiler found: .*CXX", one_line(err))
        assert card_value(out, "status").startswith("skipped: no C++ compiler found")


@pytest.mark.skipif(sys.platform == "darwin", reason="there clang++ is what Inductor takes")
def test_a_compiler_that_inductor_does_not_look_for_is_none(main, nothing_timed, monkeypatch, tmp_path):
    """With clang++ alone, and no CXX, Inductor looks for g++ and fails: step 3 must say so instead of trying."""
    monkeypatch.setattr(harness, "compilation_time", lambda *_: pytest.fail("something was compiled"))
    (tmp_path / "clang++").write_text("")
    (tmp_path / "clang++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(3, *TINY)[0] == 4


@no_gpu
def test_attention_in_fp8_is_skipped_where_it_is_only_emulated(main, nothing_timed):
    status, out, err = main(4, *TINY, "--fp8-attention")
    assert status == 4 and "needs Transformer Engine" in one_line(err)
    assert card_value(out, "status").startswith("skipped: ")


# ---------------------------------------------------------------------------------------------------- failed checks


def large_activations(monkeypatch):
    """An attention output of about 1e6: within FP32 and BF16, beyond FP16's 65504. All that follows is linear or LN."""
    seeded = parameters.seeded

    def large(config, seed=0):
        values = seeded(config, seed)
        return values | {"attn.proj.weight": values["attn.proj.weight"] * 1e6}
    monkeypatch.setattr(parameters, "seeded", large)


def test_fp16_overflow_is_named_with_its_way_out(main, nothing_timed, monkeypatch):
    large_activations(monkeypatch)
    status, out, err = main(1, *TINY, "--amp-dtype", "float16")
    assert status == 1 and "float16 overflows beyond 65504, try --amp-dtype bfloat16" in one_line(err)
    assert card_value(out, "status").startswith("failed: ") and "not finite" in out


@pytest.mark.parametrize("dtype", ["none", "bfloat16"])
def test_what_overflows_fp16_passes_elsewhere(main, quick, monkeypatch, dtype):
    large_activations(monkeypatch)
    assert main(1, *TINY, "--amp-dtype", dtype)[0] == 0


@pytest.mark.parametrize("wrong, said", [
    (lambda block: block.attn.proj.bias.data.zero_(), "the output|the branch"),
    (lambda block: block.mlp.fc.bias.requires_grad_(False), "gradient of mlp.fc.bias is missing or not finite"),
    (lambda block: block.ln_2.bias.register_hook(torch.zeros_like), "gradient of ln_2.bias is off by 1.0e"),
    (lambda block: block.ln_1.bias.register_hook(lambda g: g / 0), "gradient of ln_1.bias is missing or not finite"),
], ids=["a dropped bias", "a missing gradient", "a wrong gradient", "an infinite gradient"])
def test_a_failed_check_says_what_is_wrong(main, nothing_timed, monkeypatch, tmp_path, wrong, said):
    script = steps.load(0)
    build = script.build

    def broken(config, values, device):
        block = build(config, values, device)
        wrong(block)
        return block
    monkeypatch.setattr(script, "build", broken)
    status, out, err = main(0, *TINY, "--json", tmp_path / "out.jsonl")
    assert status == 1 and re.search(said, one_line(err))
    assert re.search(said, card_value(out, "status")) and card_value(out, "median ms") == "n/a n/a n/a n/a"
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["benchmark"]["extra_info"]["status"] for r in records] == ["failed"]


def test_a_second_compilation_voids_the_run(main, quick, fresh_dynamo, monkeypatch):
    """Real graphs, of the backend that generates no code; what they were guarded on changes once timing starts."""
    script, measure, blocks = steps.load(3), timing.measure, []

    def compile_without_code(block, **options):
        blocks.append(block)
        torch.nn.Module.compile(block, backend="eager", **options)

    def changed(*arguments):
        blocks[-1].attn.dropout = 0.25
        return measure(*arguments)
    monkeypatch.setattr(script.Block, "compile", compile_without_code)
    monkeypatch.setattr(device, "compiler_missing", lambda _: None)
    monkeypatch.setattr(timing, "measure", changed)
    status, out, err = main(3, *TINY)
    assert status == 1 and "compiled again after warm-up" in one_line(err)
    assert card_value(out, "status").startswith("failed: ")


def test_a_kernel_of_another_mechanism_fails_the_run(main, quick, monkeypatch):
    """As if, on a GPU, step 2 had fallen back to attention by hand."""
    kernels = collections.Counter({"nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT": 4, "cunn_SoftMaxForwardSmem": 1})
    judge = evidence.judge
    monkeypatch.setattr(evidence, "judge", lambda _, step, matmul, device, *rest: judge(
        kernels, step, matmul, torch.device("cuda"), *rest))
    status, out, err = main(2, *TINY)
    assert status == 1
    assert "did not run as step 2 claims: softmax ran: cunn_SoftMaxForwardSmem" in one_line(err)
    assert card_value(out, "forward") == "refuted: softmax ran: cunn_SoftMaxForwardSmem"


# ----------------------------------------------------------------------------------------------------- out of memory


def suggestion(text: str, preset: str, **changes):
    """The config of the shape that a message suggests."""
    batch_size, seq_len = map(int, re.search(r"--batch-size (\d+) --seq-len (\d+) fits", text).groups())
    return PRESETS[preset].replace(**changes).replace(batch_size=batch_size, seq_len=seq_len)


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
def test_a_shape_no_machine_holds_is_refused_before_anything_is_allocated(main, nothing_allocated, step):
    """Linux would otherwise promise the memory, and kill the process once it is touched."""
    status, out, err = main(step, "--preset", "cpu", "--device", "cpu", "--batch-size", "100000")
    fits = suggestion(one_line(err), "cpu")
    total = device.memory_total(torch.device("cpu"))
    assert status == 3 and parameters.memory_needed(fits, step, torch.device("cpu")) <= total
    assert re.search(r"about [\d,.]+ GiB", err), "how much it would need is what a refusal has to say"
    assert card_value(out, "status").startswith("oom: ")


@pytest.mark.parametrize("gib", [0.001, 1, 16, 140])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_suggested_shape_fits(step, preset, gib):
    """By the same estimate that refuses one; and it is smaller than what was asked, in batch and length alone."""
    cpu, total, config = torch.device("cpu"), int(gib * 2**30), PRESETS[preset]
    fits = parameters.largest_that_fits(config, step, cpu, total)
    if fits is None:
        smallest = config.replace(batch_size=1, seq_len=16)
        assert parameters.memory_needed(smallest, step, cpu) > 0.9 * total
    else:
        assert parameters.memory_needed(fits, step, cpu) <= total and fits.tokens < config.tokens
        assert fits == config.replace(batch_size=fits.batch_size, seq_len=fits.seq_len)


@pytest.mark.parametrize("batch_size, seq_len", [(2, 1000), (4, 100), (16, 24), (3, 48)])
def test_a_shape_suggested_to_step_4_is_one_that_fp8_takes(batch_size, seq_len):
    config = PRESETS["cpu"].replace(batch_size=batch_size, seq_len=seq_len)
    config.check_fp8()
    for gib in (0.5, 1, 4, 140):
        fits = parameters.largest_that_fits(config, 4, torch.device("cpu"), int(gib * 2**30))
        if fits is not None:
            fits.check_fp8()


# --------------------------------------------------------------------------------------------------- whole processes


def start(step: int, *argv, cwd) -> subprocess.Popen:
    """One thread each: several processes whose threads wait for one another on few cores take minutes.

    With Ctrl-C as a terminal would send it: what starts the tests in the background may have had it ignored.
    """
    return subprocess.Popen([sys.executable, steps.path(step), *map(str, argv)], cwd=cwd, text=True,
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
    interrupted = start(INTERRUPTED, *TINY, "--json", path, cwd=folder)
    deadline = time.monotonic() + 100
    while not (path.exists() and any("0_baseline" in line and '"launches"' in line
                                     for line in path.read_text().splitlines())):
        assert interrupted.poll() is None and time.monotonic() < deadline, interrupted.communicate()
        time.sleep(0.01)
    interrupted.send_signal(signal.SIGINT)
    return {INTERRUPTED: finish(interrupted), TO_ITS_END: finish(ends)}, path


def own_words(step: int, err: str) -> str:
    """Without the line that says that it waited for the other one to end."""
    waits = re.escape(steps.path(step).name) + r": waiting for \S+ \(process \d+\) on this device to end\n"
    return re.sub(waits, "", err)


def test_a_script_runs(runs):
    """Exit status 0, a card within 100 columns, and nothing on stderr."""
    status, out, err = runs[0][TO_ITS_END]
    assert status == 0 and own_words(TO_ITS_END, err) == ""
    assert card_value(out, "step") == steps.path(TO_ITS_END).stem and card_value(out, "status") == "ok"
    assert max(map(len, out.splitlines())) <= 100
    values = re.findall(r"[\d.]+", card_value(out, "median ms"))
    assert len(values) == 2 and all(float(value) > 0 for value in values)
    assert "means nothing" in out and "emulated" in card_value(out, "engine")


def test_a_rows_work_is_its_own(runs):
    """FLOPs and tokens of each pass, from the recorded rates: the backward is twice the forward more."""
    own = {(r["benchmark"]["mode"], r["metric"]["name"]): r["metric"] for r in records_of(runs)
           if r["model"]["backend"] == steps.path(TO_ITS_END).stem
           and r["metric"]["extra_info"].get("launch") != "graph"}
    config = PRESETS["tiny"]
    for mode, backward in (("forward", False), ("forward+backward", True)):
        seconds = own[mode, "latency"]["extra_info"]["median"] / 1e3
        assert own[mode, "rate"]["benchmark_values"][0] * seconds == pytest.approx(roofline.flops(config, backward))
        assert own[mode, "throughput"]["benchmark_values"][0] * seconds == pytest.approx(config.tokens)


def test_each_pass_has_its_own_limit(main, quick, tmp_path):
    assert main(0, *TINY, "--json", tmp_path / "out")[0] == 0
    limits = {r["benchmark"]["mode"]: r["metric"]["benchmark_values"]
              for r in map(json.loads, (tmp_path / "out").read_text().splitlines()) if r["metric"]["name"] == "limit"}
    a = roofline.arithmetic(PRESETS["tiny"], 0, torch.float32, torch.device("cpu"))
    peaks = roofline.measure_peaks()
    assert limits == {mode: [roofline.limit_ms(PRESETS["tiny"], a, peaks, mode != "forward")] for mode in report.MODES}
    assert limits["forward"] != limits["forward+backward"]


def test_an_interrupted_run_keeps_its_finished_records(runs):
    """The first pass's records are whole."""
    status, out, err = runs[0][INTERRUPTED]
    own = [r for r in records_of(runs) if r["model"]["backend"] == steps.path(INTERRUPTED).stem]
    assert (status, out) == (130, "")
    assert one_line(own_words(INTERRUPTED, err)) == f"0_baseline.py: interrupted; {len(own)} finished records kept"
    assert {r["benchmark"]["mode"] for r in own} == {"check", "forward"}


def records_of(runs) -> list[dict]:
    return [json.loads(line) for line in runs[1].read_text().splitlines()]


def test_one_run_at_a_time_measures(monkeypatch, tmp_path):
    """The second waits until the first has ended, and says for whom; where no lock can be had, it goes on without."""
    monkeypatch.setattr(device.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(device, "_waited", [])
    cpu, order, told, said = torch.device("cpu"), [], [], threading.Event()

    def tell(message, **_):
        told.append(message)
        said.set()
    monkeypatch.setattr(device, "print", tell, raising=False)

    def second():
        with device.alone(cpu, "second"):
            order.append("second")
    waiting = threading.Thread(target=second)
    with device.alone(cpu, "first"):
        waiting.start()
        assert said.wait(60)
        order.append("first")
    waiting.join(60)
    assert order == ["first", "second"]
    assert told == [f"second: waiting for first (process {os.getpid()}) on this device to end"]
    assert len(device._waited) == 1 and device._waited[0] >= 0
    ran = device.process_seconds()
    device._waited.append(ran / 2)
    assert ran / 2 <= device.process_seconds() < ran
    monkeypatch.setattr(device.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    with device.alone(cpu, "third"), device.alone(cpu, "fourth"):
        assert len(told) == 1


@pytest.mark.parametrize("found, inside, trusted", [
    (None, None, True), (0o755, None, True), (0o755, 0o700, True), (0o775, None, False), (0o777, None, False),
    (0o755, 0o775, False), ("a file", None, False), ("a link", None, False)])
def test_precompiled_headers_are_used_from_a_folder_of_ones_own(found, inside, trusted, monkeypatch, tmp_path):
    """Inductor keeps them in the temporary folder that all users share, under a path that any of them can make."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
    from torch._inductor import config
    from torch._inductor.runtime.runtime_utils import default_cache_dir
    folder = Path(default_cache_dir())
    if found == "a file":
        folder.touch()
    elif found == "a link":
        folder.symlink_to(tmp_path)
    for place, mode in ((folder, found), (folder / "precompiled_headers", inside)):
        if isinstance(mode, int):
            place.mkdir()
            place.chmod(mode)
    with config.patch(cpp_cache_precompile_headers=True):
        harness.use_private_caches()
        assert config.cpp_cache_precompile_headers == trusted
    assert not os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(folder))


def test_a_folder_of_another_user_or_none_is_not_ones_own(monkeypatch, tmp_path):
    assert device.own_folder(str(tmp_path)) and not device.own_folder(str(tmp_path / "missing" / "folder"))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert not device.own_folder(str(tmp_path))


def test_runs_at_once_leave_only_whole_records(runs):
    """Whatever the order in which they wrote."""
    assert runs[1].read_text().endswith("\n")
    own = [r for r in records_of(runs) if r["model"]["backend"] == steps.path(TO_ITS_END).stem]
    names = collections.Counter(r["metric"]["name"] for r in own)
    assert names["latency"] == 4 and names["launches"] == 2 and names["parameter gradient error"] == 1
    assert [mode for mode, _ in itertools.groupby(own, lambda r: r["benchmark"]["mode"])] == [
        "check", "forward", "forward+backward", "run"]
    assert names["wall time"] == 1 and own[-1]["metric"]["benchmark_values"][0] > 0
    samples = [r["metric"]["benchmark_values"] for r in own if r["metric"]["name"] == "latency"]
    assert sum(map(bool, samples)) == 2 and all(s > 0 for values in samples for s in values)


def test_help_says_what_each_step_is(monkeypatch, capsys):
    for step in range(steps.COUNT):
        monkeypatch.setattr(sys, "argv", [str(steps.path(step)), "--help"])
        with pytest.raises(SystemExit) as ended:             # in this process: five of their own take a while
            runpy.run_path(str(steps.path(step)), run_name="__main__")
        out, err = capsys.readouterr()
        assert (ended.value.code, err) == (0, "")
        assert f"usage: {steps.path(step).name}" in out and f"Step {step}: " in out
        assert ("--fp8-weights" in out) == (step == 4)
        for option in ("--preset", "--amp-dtype", "--json", "--profile", "--max-seconds", "Exit status"):
            assert option in out


def test_a_mistake_ends_the_process_with_one_line(tmp_path):
    """Across the process boundary as inside: exit status 2, nothing on stdout, no traceback."""
    status, out, err = finish(start(0, *TINY, "--hidden-size", "66", cwd=tmp_path))
    assert (status, out) == (2, "")
    assert one_line(err) == ("0_baseline.py: error: hidden_size 66 is not divisible by num_heads 4: "
                             "try hidden_size 64 or num_heads 3")


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
    assert all(json.loads(text)["traceEvents"] for text in [(tmp_path / "target").read_text(), *read]) and read


def test_a_timeline_that_could_not_be_written_fails(main, quick, tmp_path, monkeypatch):
    """The profiler itself says nothing of a full disk."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: open(path, "w").close())
    status, out, err = main(0, *TINY, "--profile", tmp_path / "timeline.json")
    assert status == 1 and "the profiler left no whole timeline" in one_line(err)


def test_records_and_timeline_are_two_files(main, nothing_allocated, tmp_path):
    path = tmp_path / "both"
    path.write_text("mine\n")
    for same in (path, tmp_path / "x" / ".." / "both"):
        status, out, err = main(2, *TINY, "--json", path, "--profile", same)
        assert (status, out) == (2, "") and "give a file of its own" in one_line(err) and path.read_text() == "mine\n"
    assert main(2, *TINY, "--json", tmp_path / "new", "--profile", tmp_path / "new")[0] == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("argv, words", [
    (["--amp-dtype", "bfloat16"], "autocast off (--amp-dtype bfloat16 is for the later steps)"),
    (["--amp-dtype", "none"], "autocast off;"), ([], "autocast off;")])
def test_step_0_says_that_it_has_no_autocast(main, quick, argv, words):
    status, out, _ = main(0, *TINY, *argv)
    assert status == 0 and words in " ".join(out.split())


def test_without_a_stderr_there_is_a_card_and_nothing_else(main, quick, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    status, out, _ = main(0, *TINY)
    assert status == 0 and card_value(out, "status") == "ok"
    monkeypatch.setattr(sys, "stderr", None)
    assert main(0, "--preset", "nope") == (2, "", "")


def test_another_error_is_no_lack_of_memory():
    assert harness.is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert harness.is_out_of_memory(MemoryError()) and not harness.is_out_of_memory(RuntimeError("a shape is wrong"))


@pytest.mark.parametrize("argv, words", [
    (["--hidden-size", "2", "--num-heads", "1"], "hidden_size is 2: give a whole number from 3"),
    (["--num-heads", "16777213"], "try num_heads")])
def test_a_width_that_is_none_is_neither_taken_nor_suggested(main, nothing_allocated, argv, words):
    status, _, err = main(0, *TINY, *argv)
    assert status == 2 and words in one_line(err)


def test_what_a_cpu_holds_besides_the_block_is_counted():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert parameters.memory_needed(PRESETS["tiny"], 0, cpu) - parameters.memory_needed(PRESETS["tiny"], 0, gpu) > 2**30
    odd = PRESETS["tiny"].replace(batch_size=2, seq_len=37, amp_dtype=None)
    assert parameters.largest_that_fits(odd, 4, gpu, 2**40).tokens < odd.tokens


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_removes_the_private_caches(number, tmp_path):
    """As `timeout`, a scheduler or a closed terminal tells it."""
    done = subprocess.run([sys.executable, "-c", f"""
import os, signal
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
from common import harness
harness.use_private_caches()
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], flush=True)
os.kill(os.getpid(), {int(number)})
print("went on")
"""], cwd=steps.ROOT, capture_output=True, text=True, timeout=120, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 128 + number and "went on" not in done.stdout and not done.stderr
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path and not folder.exists()


def test_ctrl_c_does_not_import_the_compiler():
    """An exception's clauses are looked at one by one: one that names the compiler's would load it, in its seconds."""
    told = subprocess.run([sys.executable, "-c", """
import sys
from common import harness
try:
    with harness.judged(None, None):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("torch._dynamo" in sys.modules)
"""], cwd=steps.ROOT, capture_output=True, text=True, timeout=120)
    assert told.stdout == "False\n", told.stderr


@pytest.mark.parametrize("study", ["ladder", "compare"])
def test_a_study_that_is_run_as_a_file_says_how_to_run_it(study, tmp_path):
    told = subprocess.run([sys.executable, steps.ROOT / "benchmarks" / f"{study}.py"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == f"run it from the project's folder as: python -m benchmarks.{study}\n"


def test_a_study_imports_no_matplotlib_before_it_draws():
    told = subprocess.run([sys.executable, "-c", """
import sys
from benchmarks import ablation, compare, components, fusions, ladder, peers, sweep
print("matplotlib" in sys.modules)
"""], cwd=steps.ROOT, capture_output=True, text=True, timeout=120)
    assert told.stdout == "False\n", told.stderr


def test_a_seed_and_the_seconds_are_those_that_were_asked_for(main, monkeypatch):
    """Two seeds are two inputs, and the rule by which sampling ends is the user's."""
    rules = []
    peaks = roofline.Peaks(collections.defaultdict(lambda: 1e12), 1e11)
    monkeypatch.setattr(roofline, "measure_peaks", lambda *_: peaks)
    monkeypatch.setattr(timing, "measure", lambda iteration, clock, between, rule, *_: (
        rules.append(rule), timing.Timing(clock.sample(iteration, between, 2), False, clock.name))[1])
    cards = [main(0, *TINY, "--seed", seed, "--max-seconds", "1.25")[1] for seed in (0, 1, 0)]
    errors = [[card_value(card, label) for label in ("output", "branch", "parameter gradient")] for card in cards]
    assert errors[0] == errors[2] != errors[1] and {rule.max_seconds for rule in rules} == {1.25}


def test_no_two_seeds_share_a_tensor(monkeypatch):
    """Parameters, x, dy and the check's own gradient: a gradient that is x itself, say, would be a special case."""
    seen, real = [], torch.Generator.manual_seed

    class Spy:
        def __new__(cls, *args):
            generator = torch._C.Generator(*args)
            return type("G", (), {"manual_seed": lambda self, seed: (seen.append(seed), real(generator, seed))[1]})()
    monkeypatch.setattr(torch, "Generator", Spy)
    config = PRESETS["tiny"].replace(amp_dtype=None)
    for seed in (0, 1, 2):
        harness._seeded.cache_clear()
        result = report.Report("0_baseline", config, "float32", device.facts(torch.device("cpu")))
        harness.prepare(steps.load(0).build, 0, torch.float32, torch.device("cpu"), seed, result, lambda what: None)
    harness._seeded.cache_clear()
    of_check = [seen[place] for place in range(3, len(seen), 4)]
    others = [value for place, value in enumerate(seen) if place % 4 < 2]                    # parameters and x
    assert len(seen) == 12 and len(set(others)) == 6 and not set(of_check) & set(others)


@pytest.mark.parametrize("flag, holds", [
    ("--json", "# a README"), ("--json", "{}"), ("--profile", '"""A script."""'), ("--profile", '{"benchmark": {}}'),
])
def test_a_file_that_holds_something_else_is_left_alone(main, flag, holds, tmp_path):
    path = tmp_path / "something"
    path.write_text(holds)
    status, _, err = main(0, *TINY, flag, path)
    assert status == 2 and f"{flag} {path}: it " in one_line(err) and path.read_text() == holds


def test_a_timeline_is_replaced_and_records_are_appended_to(main, quick, tmp_path):
    for _ in range(2):
        assert main(0, *TINY, "--profile", tmp_path / "timeline.json", "--json", tmp_path / "out")[0] == 0
    json.loads((tmp_path / "timeline.json").read_text())
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) % 2 == 0 and all(json.loads(line)["benchmark"] for line in lines)


def test_an_fp8_scale_that_never_moved_fails(main, quick, monkeypatch):
    monkeypatch.setattr("common.te_emulation._Scaling.update", lambda self: None)
    status, out, err = main(4, *TINY)
    assert status == 1 and "delayed scaling is not calibrated" in one_line(err)


@pytest.mark.parametrize("step, argv", [
    (0, "--batch-size 1 --seq-len 1"), (0, "--launch eager"), (0, "--seed -7"), (1, "--amp-dtype float16"),
    (2, "--seq-len 37 --num-heads 1"), (2, "--dropout 0.5"), (2, "--param-dtype amp"), (4, "--param-dtype amp"),
    (4, "--amp-dtype none"), (4, "--fp8-weights cached"), (4, "--fp8-weights kept"),
])
def test_every_option_runs(main, quick, step, argv):
    status, out, err = main(step, *TINY, *argv.split())
    assert (status, err) == (0, "") and card_value(out, "status") == "ok"


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


@no_gpu
def test_a_cpu_without_16_bit_matmuls_runs_without_autocast_and_says_why(main, quick, a_cpu_without_bfloat16):
    """PyTorch's own loops would take minutes; FP8 is emulated, which multiplies in FP32."""
    _, out, _ = main(2, *TINY)
    assert re.search(r"^precision +matmuls float32; .* autocast off \(this CPU has no fast", out, re.MULTILINE)
    _, out, _ = main(0, *TINY)
    assert "this CPU" not in out                                  # step 0 would have none anyway
    _, out, _ = main(2, *TINY, "--amp-dtype", "none")
    assert "autocast off" in out and "this CPU has" not in out    # as asked for
    _, out, _ = main(2, *TINY, "--amp-dtype", "bfloat16")
    assert "autocast bfloat16" in out
    _, out, _ = main(4, *TINY)
    assert "matmuls float8" in out and "autocast bfloat16" in out
    status, _, err = main(2, *TINY, "--param-dtype", "amp")
    assert status == 2 and "no 16-bit dtype with --amp-dtype auto (this CPU has no" in one_line(err)
