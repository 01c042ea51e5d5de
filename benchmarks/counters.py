"""How many bytes does each step move through DRAM? Nsight Compute's counters over one iteration.

    python -m benchmarks.ladder --counters             # this module is its part; ncu must be on the machine

Each step runs in a process of its own under ncu, with the caches as the kernel before left them. ncu counts kernels
alone; copies and fills come from PyTorch's profiler, with the bytes that they move. Attention is everything between the
QKV projection and the output projection, forward: where it is done by hand, its two matmuls and the passes over the
S x S scores; where it is fused, one kernel and small ones beside it. The casts of the output projection's parameters
under autocast, and of its input to FP8, are in there too.
"""
import csv
import io
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from common import BlockConfig, harness, parameters, report, steps
from common.config import DTYPES, dtype_name

from . import attribution, command, records

METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}


def measure(study) -> None:
    """Write a record "dram traffic" for every step and pass that was timed: bytes, or why there are none."""
    on_gpu, ncu = study.device.type == "cuda", shutil.which("ncu")
    seen: dict[tuple, list[dict]] = {}
    unseen: dict[tuple, str] = {}
    for key, mode in itertools.product(study.subjects if on_gpu and ncu else (), report.MODES):
        try:
            seen[key, mode] = activities(study.subjects[key], mode)
        except RuntimeError as error:                      # out of memory, too
            unseen[key, mode] = harness.in_a_line(error)
    study.release()                                        # the child needs the memory
    for key, result in study.reports.items():
        if result.status != "ok":
            continue
        for mode in report.MODES:
            try:
                if not on_gpu:
                    raise RuntimeError("a CPU has no such counters")
                if ncu is None:
                    raise RuntimeError("ncu is not on the PATH: install Nsight Compute")
                if (key, mode) in unseen:
                    raise RuntimeError(unseen[key, mode])
                launches = with_copies(_count(ncu, study.cases[key].step, result.config, mode), seen[key, mode])
                parts = {"block": launches}
                if mode == "forward":
                    parts["attention"] = attention(launches, by_hand=study.cases[key].step < 2)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                study.write([report.record(result, "dram traffic", "bytes", [], mode, reason=str(error))])
                continue
            extra = {part: {way: sum(launch[way] for launch in some) for way in METRICS} | {"launches": len(some)}
                     for part, some in parts.items()}
            study.write([report.record(result, "dram traffic", "bytes",
                                       [extra["block"]["read"] + extra["block"]["written"]], mode, **extra)])


def activities(subject: harness.Subject, mode: str) -> list[dict]:
    """Kernels, copies and fills of one iteration, in order: name, category, bytes (of copies and fills)."""
    subject.x.requires_grad_(mode == "forward+backward")   # as it was timed: another x, and compiled code is another
    iteration, between = subject.iterations(mode == "forward+backward")
    between()
    iteration()
    between()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        iteration()
        torch.cuda.synchronize()
    between()
    with tempfile.TemporaryDirectory(prefix="counters-") as folder:           # only an exported trace holds the bytes
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    return [{"name": event["name"], "cat": event["cat"], "bytes": event["args"].get("bytes", 0)}
            for event in sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
                                key=lambda event: event["ts"])]


def _count(ncu: str, step: int, config: BlockConfig, mode: str) -> list[dict]:
    """The kernels of one iteration, in order: name, bytes read and written. Raises RuntimeError with the reason."""
    shape = {name: getattr(config, name) for name in
             ("batch_size", "seq_len", "hidden_size", "num_heads", "ffn_hidden_size")}
    shape["amp_dtype"] = dtype_name(config.amp_dtype)
    with tempfile.TemporaryDirectory(prefix="counters-") as folder:
        log = Path(folder) / "ncu.csv"
        options = {"--page": "raw", "--print-units": "base", "--print-kernel-base": "demangled", "--log-file": str(log),
                   "--metrics": ",".join(METRICS.values()), "--profile-from-start": "off", "--cache-control": "none",
                   "--clock-control": "none"}
        watched = [sys.executable, "-m", "benchmarks.counters", str(step), mode, json.dumps(shape)]
        done = subprocess.run([ncu, "--csv", *(word for option in options.items() for word in option), *watched],
                              cwd=steps.ROOT, capture_output=True, text=True, timeout=600)
        text = log.read_text() if log.exists() else ""
    if done.returncode:
        raise RuntimeError(_reason(text + done.stdout) or (done.stderr.strip().splitlines() or ["ncu: no message"])[-1])
    return parse(text)


def parse(text: str) -> list[dict]:
    """Kernels from ncu's raw CSV page: [{"name", "read", "written"}, ...]. Raises RuntimeError where there are none."""
    table = [row for row in csv.reader(io.StringIO("\n".join(line for line in text.splitlines() if line[:1] == '"')))]
    if len(table) < 3 or not {"Kernel Name", *METRICS.values()} <= set(table[0]):
        raise RuntimeError(_reason(text) or "ncu: it saw no kernel")
    rows = [dict(zip(table[0], row, strict=False)) for row in table[2:]]               # the second row holds units
    try:
        return [{"name": row["Kernel Name"]}
                | {way: float(row[metric].replace(",", "")) for way, metric in METRICS.items()} for row in rows]
    except (ValueError, KeyError):
        raise RuntimeError("ncu: it counted no bytes of some kernels") from None


def with_copies(kernels: list[dict], seen: list[dict]) -> list[dict]:
    """ncu's kernels with the profiler's copies and fills between them. Raises RuntimeError where the two disagree."""
    count = sum(activity["cat"] == "kernel" for activity in seen)
    if count != len(kernels):
        raise RuntimeError(f"ncu saw {len(kernels)} kernels, the profiler {count}")
    rest = iter(kernels)
    return [next(rest) if activity["cat"] == "kernel" else
            {"name": activity["name"], "read": activity["bytes"] if activity["cat"] == "gpu_memcpy" else 0,
             "written": activity["bytes"]} for activity in seen]


def _reason(text: str) -> str | None:
    """ncu's own error line."""
    line = next((line for line in text.splitlines() if "==ERROR==" in line), None)
    return line and f"ncu: {line.removeprefix('==ERROR== ')}"


def attention(kernels: list[dict], by_hand: bool) -> list[dict]:
    """The kernels of a forward between the QKV projection and the output projection."""
    matmuls = [place for place, kernel in enumerate(kernels)
               if attribution.category(kernel["name"]) == "GEMM" and "splitKreduce" not in kernel["name"]]
    last = 3 if by_hand else 1
    if len(matmuls) <= last:
        raise RuntimeError("the projections are not among the kernels that ncu named")
    return kernels[matmuls[0] + 1:matmuls[last]]


def table(lines: list[dict], mode: str, width: int | None = None) -> str:
    """GiB through DRAM per step, from the latest run that counted them; empty where none did."""
    counted: dict[str, dict] = {}
    for run in records.runs(lines):
        line = run.find(mode, "dram traffic")
        if line and ("reason" not in line["metric"]["extra_info"] or run.label not in counted):
            counted[run.label] = line["metric"]["extra_info"]
    if counted:
        counted |= {name: {"reason": "not counted in this run"} for name, run in records.latest(lines).items()
                    if name not in counted and run.status == "ok" and run.best(mode)}
    rows, reasons, kernels_alone = [], {}, []
    for name, extra in counted.items():
        if "reason" in extra:
            reasons[extra["reason"]] = None
            rows.append([name, *["n/a"] * 5])
            continue
        cells = []
        for part in ("block", "attention"):
            some = extra.get(part)
            cells += [f"{some[way] / 2**30:.2f}" for way in METRICS] if some else ["n/a", "n/a"]
        count = "launches" if "launches" in extra["block"] else "kernels"                # of records from before
        if count == "kernels":
            kernels_alone.append(name)
        rows.append([name, *cells, extra.get("attention", {}).get(count, "n/a")])
    if not rows:
        return ""
    headers = ["step", "block reads GiB", "writes", "attention reads GiB", "writes", "launches of it"]
    notes = [f"n/a because: {reason}" for reason in reasons]
    if kernels_alone:
        notes.append(f"of kernels alone, without copies and fills: {', '.join(kernels_alone)}")
    return "\n".join([f"DRAM traffic of {mode}\n\n{command.table(rows, headers, width)}", *notes])


def main(argv: list[str]) -> None:
    """The process that ncu watches: one iteration of one step between cudaProfilerStart and cudaProfilerStop."""
    harness.use_private_caches()
    step, mode, shape = int(argv[0]), argv[1], json.loads(argv[2])
    shape["amp_dtype"] = DTYPES.get(shape["amp_dtype"])
    config, device = BlockConfig(**shape), torch.device("cuda")
    block = steps.load(step).build(config, parameters.seeded(config), device)
    x, dy = (torch.randn(config.batch_size, config.seq_len, config.hidden_size, device=device) for _ in range(2))
    if step == 4 and config.amp_dtype is not None:
        harness.calibrate(block, x, dy)
    iteration, between = harness.iterations(block, x, dy, mode == "forward+backward")
    for _ in range(3):
        between()
        iteration()
    between()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    iteration()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
