"""Bytes through DRAM: what ncu says of kernels, what the profiler says of copies, and what attention is of both."""
import dataclasses
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure import counters
from benchmarks.records.read import case, extra, values
from common import steps
from common.measure.cases import step_case
from common.measure.session import Entry
from common.report.result import Result
from common.runtime.iteration import BOTH, FORWARD, MODES
from tests.helpers.made_records import CPU_CONFIG, GPU

pytestmark = pytest.mark.unit
CUDA = torch.device("cuda")
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


def launch(name: str, read: float = 8.0, written: float = 4.0) -> dict:
    return {"name": name, "read": read, "written": written}


def activity(name: str, kind: str = "kernel", moved: float = 0) -> dict:
    return {"name": name, "cat": kind, "bytes": moved}


# ------------------------------------------------------------------------------------------------------ what ncu says


def test_kernels_and_their_bytes_are_read_from_ncus_page():
    kernels = counters.parse(NCU)
    assert kernels[0] == launch("layer_norm", 1000.0, 500.0) and len(kernels) == 7


@pytest.mark.parametrize("text, words", [
    ("", "it saw no kernel"), ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ncu: ERR_NVGPUCTRPERM"),
    ("\n".join(NCU.splitlines()[:3]), "it saw no kernel"), (NCU.replace("dram__bytes_read.sum", "other"), "no kernel"),
    (NCU.replace('"1,000"', '"n/a"'), "it counted no bytes of some kernels"),
])
def test_a_page_that_says_nothing_is_a_reason(text, words):
    with pytest.raises(RuntimeError, match=words):
        counters.parse(text)


def test_attention_is_what_stands_between_the_projections():
    kernels = counters.parse(NCU)
    by_hand = counters.attention(kernels, by_hand=True)
    assert [kernel["name"] for kernel in by_hand] == [
        "nvjet_hsh_scores", "masked_fill_kernel", "softmax_warp_forward", "nvjet_hsh_values"]
    fused = [*kernels[:2], launch("cudnn_generated_sdpa"), kernels[-1]]
    assert counters.attention(fused, by_hand=False) == [launch("cudnn_generated_sdpa")]
    with pytest.raises(RuntimeError, match="the projections are not among the kernels"):
        counters.attention(fused, by_hand=True)


def test_a_matmul_in_two_kernels_is_one_projection():
    kernels = [launch("nvjet_hsh_qkv"), launch("splitKreduce_kernel"), launch("sdpa"), launch("nvjet_hsh_projection")]
    assert counters.attention(kernels, by_hand=False) == kernels[1:3]


def test_copies_and_fills_stand_between_the_kernels_that_ncu_counts():
    kernels = [launch("gemm 1"), launch("fill"), launch("gemm 2")]
    seen = [activity("gemm 1"), activity("Memcpy", "gpu_memcpy", 100), activity("fill"),
            activity("Memset", "gpu_memset", 10), activity("gemm 2")]
    assert counters.with_copies(kernels, seen) == [
        kernels[0], launch("Memcpy", 100, 100), kernels[1], launch("Memset", 0, 10), kernels[2]]
    with pytest.raises(RuntimeError, match="ncu saw 2 kernels, the profiler 3"):
        counters.with_copies(kernels[1:], seen)


@pytest.mark.parametrize("written, printed, told, reason", [
    (NCU, "", "", None), ("==ERROR== no permission\n", "", "why", "ncu: no permission"),
    (None, "==ERROR== no driver\n", "", "ncu: no driver"), (None, "", "a traceback\nIts last line\n", "Its last line"),
    (None, "", "", "ncu: no message"),
])
def test_a_counted_process_gives_kernels_or_its_reason(written, printed, told, reason, monkeypatch):
    """It runs one step and one pass under ncu, with the shape that was timed."""
    def run(command, **options):
        assert command[0] == "/bin/ncu" and command[-5:-3] == ["-m", "benchmarks.measure.counters"]
        assert command[-3:-1] == ["2", BOTH] and '"amp_dtype": "bfloat16"' in command[-1]
        if written is not None:
            with open(command[command.index("--log-file") + 1], "w") as log:
                log.write(written)
        return subprocess.CompletedProcess(command, int(reason is not None), printed, told)
    monkeypatch.setattr(counters.subprocess, "run", run)
    if reason is None:
        assert counters._count("/bin/ncu", 2, CPU_CONFIG, BOTH) == counters.parse(NCU)
    else:
        with pytest.raises(RuntimeError, match=f"^{reason}$"):
            counters._count("/bin/ncu", 2, CPU_CONFIG, BOTH)


# ------------------------------------------------------------------------------------------------------- its records


@pytest.fixture
def counted(monkeypatch):
    """counted(number, device): the records of a session that timed this one step, with ncu on the machine."""
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)

    def measure(number: int, device: torch.device = CUDA) -> list[dict]:
        step = steps.load(number)
        result = Result(step.name, CPU_CONFIG, "float32", GPU, step=number, traits=step.traits, study="ladder")
        entry = Entry(step_case(step, CPU_CONFIG, device), result, SimpleNamespace())
        lines = []
        counters.measure(SimpleNamespace(device=device, alive=lambda: [entry], release=lambda: None,
                                         write=lines.extend))
        return lines
    return measure


def test_what_is_counted_is_kernels_and_copies(counted, monkeypatch):
    """From a session's subjects and ncu to the records, without either."""
    names = ["gemm 1", "softmax", "gemm 2", "gemm 3", "gemm 4"]
    seen = [activity(name) for name in names]
    seen.insert(1, activity("Memcpy", "gpu_memcpy", 4))
    monkeypatch.setattr(counters, "activities", lambda subject, mode: seen)
    monkeypatch.setattr(counters, "_count", lambda *_: [launch(name, 1, 1) for name in names])
    forward, backward = counted(1)
    assert case(forward)["pass"] == FORWARD and case(backward)["pass"] == BOTH
    assert values(forward) == [18]
    assert extra(forward)["block"] == {"read": 9, "written": 9, "launches": 6}
    assert extra(forward)["attention"] == {"read": 7, "written": 7, "launches": 4}
    assert "attention" not in extra(backward)


def test_why_nothing_is_counted_is_a_record(counted, monkeypatch):
    def full(subject, mode):
        raise torch.OutOfMemoryError("full\nand more")
    monkeypatch.setattr(counters, "activities", full)
    assert [extra(line)["reason"] for line in counted(1)] == ["OutOfMemoryError: full"] * 2
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    assert [extra(line)["reason"] for line in counted(1)] == [
        "ncu is not on the PATH: install Nsight Compute"] * 2
    assert [extra(line)["reason"] for line in counted(1, torch.device("cpu"))] == ["a CPU has no such counters"] * 2


def test_a_count_that_takes_too_long_is_a_reason(counted, monkeypatch):
    def late(*_):
        raise subprocess.TimeoutExpired(["ncu"], 600)
    monkeypatch.setattr(counters, "activities", lambda subject, mode: [])
    monkeypatch.setattr(counters, "_count", late)
    assert all("timed out after 600 seconds" in extra(line)["reason"] for line in counted(2))


def test_counting_leaves_the_caches_as_the_iteration_before_left_them(monkeypatch):
    """ncu would flush them before each kernel, and the clocks would be its own: other traffic than what was timed."""
    def run(command, **options):
        for flag in ("--cache-control", "--clock-control"):
            assert command[command.index(flag) + 1] == "none"
        with open(command[command.index("--log-file") + 1], "w") as log:
            log.write(NCU)
        return subprocess.CompletedProcess(command, 0, "", "")
    monkeypatch.setattr(counters.subprocess, "run", run)
    assert counters._count("/bin/ncu", 2, CPU_CONFIG, BOTH)


class Events(list):
    """What happened, in order, on a machine that only seems to have a GPU."""

    def torch(self) -> SimpleNamespace:
        profiler = SimpleNamespace(start=lambda: self.append("counting"), stop=lambda: self.append("counted"))
        return SimpleNamespace(device=lambda name: torch.device("cpu"), randn=torch.randn,
                               cuda=SimpleNamespace(synchronize=lambda: None, profiler=profiler))

    def iteration(self, mode: str) -> SimpleNamespace:
        return SimpleNamespace(run=lambda: self.append("run"), between=lambda: None)


def test_the_iteration_that_ncu_counts_is_warm(monkeypatch):
    """The first ones compile, choose algorithms and fill caches."""
    events = Events()
    step = SimpleNamespace(build=lambda config, values, device: torch.nn.Identity(),
                           traits=SimpleNamespace(needs_calibration=lambda config: False))
    monkeypatch.setattr(counters, "torch", events.torch())
    monkeypatch.setattr(counters.compiler, "use_private_caches", lambda: None)
    monkeypatch.setattr(counters.steps, "load", lambda number: step)
    monkeypatch.setattr(counters, "BlockSubject", lambda *_, **__: SimpleNamespace(iteration=events.iteration))
    shape = dataclasses.asdict(CPU_CONFIG) | {"amp_dtype": "none"}
    counters.main(["2", BOTH, json.dumps(shape)])
    warm = events.index("counting")
    assert warm >= 2 and events[warm:] == ["counting", "run", "counted"]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_seen_is_a_warm_iteration_on_an_x_as_it_was_timed(mode, monkeypatch):
    """Under no_grad an x that asks for gradients makes other compiled code run."""
    events, x = Events(), torch.zeros(1, requires_grad=mode != BOTH)
    seen = []

    class Profiler:
        def __enter__(self):
            events.append("watching")
            return self

        def __exit__(self, *_):
            events.append("seen")

        def export_chrome_trace(self, path):
            with open(path, "w") as file:
                json.dump({"traceEvents": []}, file)
    fake = events.torch()
    monkeypatch.setattr(counters, "torch", fake)
    monkeypatch.setattr(counters, "profile", lambda activities: Profiler())

    def iteration(mode):
        seen.append(x.requires_grad)
        return events.iteration(mode)
    assert counters.activities(SimpleNamespace(inputs=[x], iteration=iteration), mode) == []
    assert events[0] == "run" and events[-3:] == ["watching", "run", "seen"] and seen == [mode == BOTH]
