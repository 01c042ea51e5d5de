"""How many bytes does each step move through DRAM? Nsight Compute's counters over one iteration.

    python -m benchmarks ladder --counters             # this module is its part; ncu must be on the machine

Each step runs in a process of its own under ncu, with the caches as the kernel before left them. ncu counts kernels
alone; copies and fills come from PyTorch's profiler, with the bytes that they move. Attention is everything between the
QKV projection and the output projection, forward: where it is done by hand, its two matmuls and the passes over the
S x S scores; where it is fused, one kernel and small ones beside it. The casts of the output projection's parameters
under autocast, and of its input to FP8, are in there too.
"""
import csv
import dataclasses
import io
import json
import operator
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from common import parameters, steps
from common.block.config import DTYPES, BlockConfig, dtype_name
from common.block.traits import BY_HAND
from common.measure import attribution
from common.measure.session import Entry, Session
from common.measure.subject import BlockSubject, Subject, calibrate
from common.outcome import in_a_line
from common.report.record import record
from common.runtime import compiler
from common.runtime.iteration import BOTH, FORWARD, MODES

METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}
Launch = dict[str, Any]                # of a kernel, copy or fill: name, bytes read, bytes written


def measure(session: Session) -> None:
    """Write a record "dram traffic" for every step and pass that was timed: bytes, or why there are none."""
    ncu = shutil.which("ncu")
    missing = None
    if session.device.type != "cuda":
        missing = "a CPU has no such counters"
    elif ncu is None:
        missing = "ncu is not on the PATH: install Nsight Compute"
    seen: dict[tuple[Entry, str], list[dict] | str] = {}
    for entry in session.alive():
        for mode in MODES:
            seen[entry, mode] = missing or _activities_or_why_not(entry, mode)
    session.release()                                      # the child needs the memory
    for (entry, mode), activities in seen.items():
        try:
            if isinstance(activities, str):
                raise RuntimeError(activities)
            assert ncu is not None
            traffic = _traffic(ncu, entry, mode, activities)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            session.write([record(entry.result, "dram traffic", "bytes", [], mode, reason=str(error))])
            continue
        whole = traffic["block"]["read"] + traffic["block"]["written"]
        session.write([record(entry.result, "dram traffic", "bytes", [whole], mode, **traffic)])


def _activities_or_why_not(entry: Entry, mode: str) -> list[dict] | str:
    assert entry.subject is not None
    try:
        return activities(entry.subject, mode)
    except RuntimeError as error:                          # out of memory, too
        return in_a_line(error)


def _traffic(ncu: str, entry: Entry, mode: str, seen: list[dict]) -> dict[str, Any]:
    """Part -> bytes read and written, and launches. Raises RuntimeError with the reason where they can't be counted."""
    case = entry.case
    assert case.step is not None and case.config is not None
    launches = with_copies(_count(ncu, case.step, case.config, mode), seen)
    traffic = {"block": _sums(launches)}
    if mode == FORWARD:
        traffic["attention"] = _sums(attention(launches, by_hand=case.traits.attention == BY_HAND))
    return traffic


def _sums(launches: list[Launch]) -> dict[str, float]:
    sums = {way: sum(map(operator.itemgetter(way), launches)) for way in METRICS}
    return sums | {"launches": len(launches)}


def activities(subject: Subject, mode: str) -> list[dict]:
    """Kernels, copies and fills of one iteration, in order: name, category, bytes (of copies and fills)."""
    for tensor in subject.inputs:
        tensor.requires_grad_(mode == BOTH)                # as it was timed: another x, and compiled code is another
    iteration = subject.iteration(mode)
    iteration.between()
    iteration.run()
    iteration.between()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        iteration.run()
        torch.cuda.synchronize()
    iteration.between()
    with tempfile.TemporaryDirectory(prefix="counters-") as folder:           # only an exported trace holds the bytes
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    on_gpu.sort(key=lambda event: event["ts"])
    return [{"name": event["name"], "cat": event["cat"], "bytes": event["args"].get("bytes", 0)} for event in on_gpu]


def _count(ncu: str, step: int, config: BlockConfig, mode: str) -> list[Launch]:
    """The kernels of one iteration, in order. Raises RuntimeError with the reason."""
    shape = dataclasses.asdict(config) | {"amp_dtype": dtype_name(config.amp_dtype)}
    with tempfile.TemporaryDirectory(prefix="counters-") as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "demangled",
                   "--log-file", str(log), "--metrics", ",".join(METRICS.values()), "--profile-from-start", "off",
                   "--cache-control", "none", "--clock-control", "none",
                   sys.executable, "-m", "benchmarks.measure.counters", str(step), mode, json.dumps(shape)]
        done = subprocess.run(command, cwd=steps.ROOT, capture_output=True, text=True, timeout=600)
        text = log.read_text() if log.exists() else ""
    if done.returncode:
        last_lines = done.stderr.strip().splitlines() or ["ncu: no message"]
        raise RuntimeError(_reason(text + done.stdout) or last_lines[-1])
    return parse(text)


def parse(text: str) -> list[Launch]:
    """Kernels from ncu's raw CSV page. Raises RuntimeError where there are none."""
    quoted = [line for line in text.splitlines() if line.startswith('"')]
    header, *rest = csv.reader(io.StringIO("\n".join(quoted))) if quoted else ([],)
    rows = rest[1:]                                                                    # the first holds units
    if not rows or not {"Kernel Name", *METRICS.values()} <= set(header):
        raise RuntimeError(_reason(text) or "ncu: it saw no kernel")
    launches = []
    for row in rows:
        cells = dict(zip(header, row, strict=False))
        try:
            counted = {way: float(cells[metric].replace(",", "")) for way, metric in METRICS.items()}
            launches.append({"name": cells["Kernel Name"]} | counted)
        except (ValueError, KeyError):
            raise RuntimeError("ncu: it counted no bytes of some kernels") from None
    return launches


def with_copies(kernels: list[Launch], seen: list[dict]) -> list[Launch]:
    """ncu's kernels with the profiler's copies and fills between them. Raises RuntimeError where the two disagree."""
    count = sum(activity["cat"] == "kernel" for activity in seen)
    if count != len(kernels):
        raise RuntimeError(f"ncu saw {len(kernels)} kernels, the profiler {count}")
    rest = iter(kernels)
    launches = []
    for activity in seen:
        if activity["cat"] == "kernel":
            launches.append(next(rest))
        else:
            read = activity["bytes"] if activity["cat"] == "gpu_memcpy" else 0
            launches.append({"name": activity["name"], "read": read, "written": activity["bytes"]})
    return launches


def _reason(text: str) -> str | None:
    """ncu's own error line."""
    for line in text.splitlines():
        if "==ERROR==" in line:
            return f"ncu: {line.removeprefix('==ERROR== ')}"
    return None


def attention(launches: list[Launch], by_hand: bool) -> list[Launch]:
    """The launches of a forward between the QKV projection and the output projection."""
    matmuls = [place for place, launch in enumerate(launches)
               if attribution.category(launch["name"]) == "GEMM" and "splitKreduce" not in launch["name"]]
    last = 3 if by_hand else 1
    if len(matmuls) <= last:
        raise RuntimeError("the projections are not among the kernels that ncu named")
    return launches[matmuls[0] + 1:matmuls[last]]


def main(argv: list[str]) -> None:
    """The process that ncu watches: one iteration of one step between cudaProfilerStart and cudaProfilerStop."""
    compiler.use_private_caches()
    step, mode, shape = steps.load(int(argv[0])), argv[1], json.loads(argv[2])
    shape["amp_dtype"] = DTYPES.get(shape["amp_dtype"])
    config, device = BlockConfig(**shape), torch.device("cuda")
    block = step.build(config, parameters.seeded(config), device)
    x, dy = (torch.randn(config.batch_size, config.seq_len, config.hidden_size, device=device) for _ in range(2))
    subject = BlockSubject(block, [x], [dy], dict(block.named_parameters()), (0.0, 0.0), config=config)
    if step.traits.needs_calibration(config):
        calibrate(subject)
    iteration = subject.iteration(mode)
    for _ in range(3):
        iteration.between()
        iteration.run()
    iteration.between()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    iteration.run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
