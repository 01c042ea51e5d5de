"""How far from the memory's speed is each way to write a fused operation, and when is a kernel by hand worth it?

    python -m benchmarks.fusions --json fusions.jsonl --chart fusions
    python -m benchmarks.fusions --experiment RMSNorm --rows 64,16384

What stands between a block's matmuls, at several levels: eager PyTorch, TorchScript (which torch deprecates),
torch.compile and Triton, and Liger-Kernel where it is installed. Each is held against FP64, then all of a size are
timed in shared rounds, forward and backward, launched one by one and by graph replay, from a few rows to all tokens of
the shape. An iteration takes turns over so many copies of its tensors that no cache holds them; times are of one copy.
GB/s count the bytes that the operation must move at the least; percent is of the copy bandwidth that this machine
reached in the same run, and is left out where the copies do not go beyond twice the last cache.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import argparse
import importlib
import importlib.util
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional as F

from common import device as machine
from common import harness, oracle, report, roofline, timing
from common.config import dtype_name
from common.evidence import judge, observe

from . import charts, command, records
from .comparison import GATES
from .study import Study

MODES = ("forward", "backward")
MOST_COPIES = 64                       # of an operation's tensors: small ones stay in a cache all the same


def layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5), approximate="tanh")


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()                  # squares of FP16 overflow
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, 1e-5), total


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _liger_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm
    return liger_rms_norm(x, weight, 1e-6, in_place=False)               # in place it overwrites dy


@dataclass(frozen=True)
class Experiment:
    """An operation on tensors [rows, width] and vectors [width]."""
    plain: Callable                    # in PyTorch's operations: the truth, and what TorchScript and the compiler get
    inputs: str                        # x: [rows, width], w: [width]; all get gradients
    size: str                          # which of the config's sizes the width is
    moved: tuple[int, int]             # tensors [rows, width] that forward and backward read and write at the least
    module: str                        # of benchmarks/kernels; the kernel has the plain function's name
    liger: Callable | None = None


EXPERIMENTS = {
    "LayerNorm+GELU": Experiment(layer_norm_gelu, "xww", "hidden_size", (2, 3), "norms"),
    "RMSNorm": Experiment(rms_norm, "xw", "hidden_size", (2, 3), "norms", _liger_rms_norm),
    "residual+LayerNorm": Experiment(residual_layer_norm, "xxww", "hidden_size", (4, 4), "norms"),
    "SiLU": Experiment(silu, "x", "ffn_hidden_size", (2, 3), "activations"),
    "SwiGLU": Experiment(swiglu, "xx", "ffn_hidden_size", (3, 5), "activations"),
    "bias+GELU": Experiment(bias_gelu, "xw", "ffn_hidden_size", (2, 3), "activations"),
}


def levels(experiment: Experiment, device: torch.device) -> dict[str, Callable | str]:
    """Level -> the function, or why there is none here."""
    found: dict[str, Callable | str] = {"eager": experiment.plain}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)                   # deprecated: that is in the docstring
        found["TorchScript"] = torch.jit.script(experiment.plain)
    torch._dynamo.config.recompile_limit = 1024                          # its 8 count over all sizes
    found["torch.compile"] = torch.compile(experiment.plain, fullgraph=True, dynamic=False)
    if device.type != "cuda":
        found["Triton"] = "a CPU runs it in Triton's interpreter alone: its time would mean nothing"
    else:
        found["Triton"] = getattr(importlib.import_module(f"{__package__}.kernels.{experiment.module}"),
                                  experiment.plain.__name__)
    if experiment.liger:
        found["Liger"] = (experiment.liger if device.type == "cuda" and importlib.util.find_spec("liger_kernel")
                          else "liger_kernel is not installed" if device.type == "cuda" else "it needs a GPU")
    return found


def tensors(experiment: Experiment, rows: int, width: int, dtype: torch.dtype, device: torch.device, seed: int
            ) -> list[Tensor]:
    """Random inputs that ask for gradients; vectors around 1."""
    generator = torch.Generator(device).manual_seed(seed)
    return [(torch.randn((rows, width) if kind == "x" else (width,), generator=generator, device=device)
             * (1.0 if kind == "x" else 0.3) + (kind == "w")).to(dtype).requires_grad_() for kind in experiment.inputs]


def outputs(call: Callable, given: list[Tensor]) -> tuple[Tensor, ...]:
    found = call(*given)
    return found if isinstance(found, tuple) else (found,)


def check(call: Callable, experiment: Experiment, given: list[Tensor], seed: int) -> dict[str, float]:
    """What -> relative L2 error against FP64 of outputs and gradients. Raises harness.Failed beyond the gate."""
    exact = [t.detach().double().requires_grad_() for t in given]
    truth, found = outputs(experiment.plain, exact), outputs(call, given)
    generator = torch.Generator(given[0].device).manual_seed(seed)
    dys = [torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in found]
    errors = {f"output {n}": oracle.relative_error(a.detach(), b.detach())
              for n, (a, b) in enumerate(zip(found, truth, strict=True))}
    gradients = zip(torch.autograd.grad(found, given, dys),
                    torch.autograd.grad(truth, exact, [dy.double() for dy in dys]), strict=True)
    errors |= {f"gradient {n}": oracle.relative_error(a, b) for n, (a, b) in enumerate(gradients)}
    gate = GATES[given[0].dtype]
    for what, error in errors.items():
        if not error <= (gate if what.startswith("output") else 3 * gate):
            raise harness.Failed(f"{what} is off by {error:.1e} against FP64")
    return errors


def iteration(call: Callable, mode: str, sets: list[list[Tensor]], dys: list[Tensor]) -> Callable[[], list]:
    """One call on each copy; the outputs of all live as long as those of the last: each has memory of its own."""
    if mode == "forward":
        def forward():
            with torch.no_grad():
                return [call(*given) for given in sets]
        return forward
    made = [outputs(call, given) for given in sets]
    return lambda: [torch.autograd.grad(ys, given, dys, retain_graph=True)
                    for ys, given in zip(made, sets, strict=True)]


def captured(make: Callable[[], Callable[[], list]]) -> Callable:
    """What `make` returns, as a CUDA graph. Raises RuntimeError where it can't be captured.

    `make` runs on the stream of the capture: a backward runs where its forward did.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = make()
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        kept.append(call())
    return lambda: (graph.replay(), kept)[0]


def _report(study: Study, step: str, status: str = "ok", reason: str = "") -> report.Report:
    dtype = dtype_name(study.options.config.amp_dtype or torch.float32)
    r = study.reports[step] = report.Report(step, study.options.config, dtype, study.facts, status, reason, dtype,
                                            residual=dtype, study=study.name, run=study.run,
                                            neighbours=study.neighbours)
    return r


def measure(study: Study, name: str, found: dict[str, Callable], rows: int) -> None:
    """Check and time all levels of one experiment at one size, and write their records."""
    options, device, experiment = study.options, study.device, EXPERIMENTS[name]
    dtype, width = options.config.amp_dtype or torch.float32, getattr(options.config, experiment.size)
    reports, calls = {}, {}
    first = tensors(experiment, rows, width, dtype, device, options.seed)
    for level, call in found.items():
        r = reports[level] = _report(study, f"{name}, {rows} x {width}, {level}")
        study.say(f"checking {r.step}")
        with harness.judged(r, lambda: "it does not fit beside the others"):
            r.errors = {what: (error, None) for what, error in check(call, experiment, first, options.seed + 1).items()}
            calls[level] = call
    for mode, moved in zip(MODES, experiment.moved, strict=True):
        bytes_moved = moved * rows * width * dtype.itemsize
        cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else math.inf
        copies = 1 if device.type == "cpu" else min(MOST_COPIES, math.ceil(2 * cache / bytes_moved))
        sets = [first] + [[t.detach().clone().requires_grad_() for t in first] for _ in range(copies - 1)]
        _time(study, mode, calls, reports, sets, bytes_moved, beyond=copies * bytes_moved >= 2 * cache)
    for r in reports.values():
        study.write(report.check_records(r) if r.errors or r.status != "ok" else [])
        for mode in r.evidence:
            study.write(report.row_records(r, mode))


def _time(study: Study, mode: str, calls: dict[str, Callable], reports: dict, sets: list[list[Tensor]],
          bytes_moved: int, beyond: bool) -> None:
    runs = {}
    for level, call in list(calls.items()):
        r, dys = reports[level], [torch.randn_like(y) for y in outputs(call, sets[0])]

        def make(call=call, dys=dys):
            return iteration(call, mode, sets, dys)
        study.say(f"warming up {r.step}, {mode}")
        with harness.judged(r, lambda: "it does not fit beside the others"):
            runs[level, "eager"] = make()
            for _ in range(3):
                runs[level, "eager"]()
            r.evidence[mode] = judge(observe(runs[level, "eager"], study.device), None, r.matmul, study.device)
            if study.device.type == "cuda":
                try:
                    runs[level, "graph"] = captured(make)
                except RuntimeError as error:
                    r.rows[mode, "graph"] = report.Row(reason=f"graph: {str(error).splitlines()[0]}")
        if r.status != "ok":
            runs = {where: run for where, run in runs.items() if where[0] != level}
            del calls[level]
    study.say(f"sampling {mode}")
    clock = timing.clock_for(study.device)
    timing.interleaved(runs, clock, 2, seed=study.options.seed)
    taken = timing.interleaved(runs, clock, study.options.rounds, seed=study.options.seed)
    for (level, launch), samples in taken.items():
        each = [ms / len(sets) for ms in samples]
        row = reports[level].rows[mode, launch] = report.Row(
            timing.Timing(each, timing.is_settled(each), clock.in_rounds), tokens=sets[0][0].size(0))
        if beyond:
            row.limit_ms = bytes_moved / study.peaks.bandwidth * 1e3
        study.write([report.record(reports[level], "bandwidth", "GB/s", [bytes_moved / statistics.median(each) / 1e6],
                                   mode, launch=launch, bytes=bytes_moved, copies=len(sets))])


def text(lines: list[dict], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    runs = {run.info["step"]: run for run in records.runs(lines) if run.info["step"] != "fusions"}
    blocks = [records.provenance(lines)]
    for name in dict.fromkeys(step.split(", ")[0] for step in runs):
        for mode in MODES:
            rows = [_row(run, mode) for step, run in runs.items() if step.startswith(name + ", ")]
            blocks.append(f"{name}, {mode}\n\n" + command.table(
                rows, ["size", "level", "status", "error", "us, eager", "us, graph", "GB/s", "% of copy", "kernels"],
                width))
    blocks.append("\n".join(records.cautions(runs.values())))
    return "\n\n".join(filter(None, blocks))


def _row(run: records.Run, mode: str) -> list[str]:
    _, size, level = run.info["step"].split(", ")
    errors = [line["metric"]["benchmark_values"][0] for line in run.lines if line["metric"]["name"].endswith(" error")
              and line["metric"]["name"].startswith("output" if mode == "forward" else "gradient")]
    best = run.best(mode)
    times = [run.median(mode, launch) for launch in report.LAUNCHES]
    kernels, percent = run.value(mode, "launches"), run.value(mode, "percent of limit", best)
    return [size, level, run.status, f"{max(errors):.1e}" if errors else "",
            *("n/a" if ms is None else command.figures(1e3 * ms) for ms in times),
            "" if best is None else command.figures(run.value(mode, "bandwidth", best)),
            "" if percent is None else f"{percent:.0f}",
            "" if kernels is None else f"{kernels / _copies(run, mode):.0f}"]


def _copies(run: records.Run, mode: str) -> int:
    return run.find(mode, "bandwidth", "eager")["metric"]["extra_info"]["copies"]


def chart_stems(lines: list[dict], stem: str) -> list[str]:
    """The one chart that `draw` makes; none without a sweep."""
    return [f"{stem}-bandwidth"] if any(len(points) > 1 for curves in _curves(lines).values()
                                        for points in curves.values()) else []


def draw(lines: list[dict], stem: str) -> None:
    """Draw `chart_stems`: GB/s against rows, forward, a panel for each experiment."""
    if chart_stems(lines, stem):
        charts.panels_chart(_curves(lines), f"{stem}-bandwidth", lines, "rows", "GB/s, forward")


def _curves(lines: list[dict]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Experiment -> level -> [(rows, GB/s)]; "copy" is what this machine copies at."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run in records.runs(lines):
        if run.info["step"] == "fusions" or not (best := run.best("forward")):
            continue
        name, size, level = run.info["step"].split(", ")
        rows, rate = int(size.split(" x ")[0]), run.value("forward", "bandwidth", best)
        curves = found.setdefault(name, {})
        curves.setdefault(level, []).append((rows, rate))
        if percent := run.value("forward", "percent of limit", best):
            curves.setdefault("copy", []).append((rows, 100 * rate / percent))
    return found


def rows_of(text_: str) -> tuple[int, ...]:
    """"64,4096" -> (64, 4096). Raises argparse.ArgumentTypeError."""
    try:
        found = tuple(int(number) for number in text_.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text_!r} is no list of positive numbers, as in 64,4096")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = command.parser("fusions", __doc__)
    parser.add_argument("--experiment", choices=EXPERIMENTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--rows", type=rows_of, metavar="LIST", help="sizes (default: up to the tokens of the shape)")
    options = command.parse(parser, argv)
    on_gpu = options.device.type == "cuda"
    options.config = options.config.replace(amp_dtype=torch.bfloat16 if on_gpu else None)
    parts = (256, 64, 16, 4, 1) if on_gpu else (16, 1)
    sizes = options.rows or tuple(dict.fromkeys(max(1, options.config.tokens // part) for part in parts))
    with command.shown_to_a_person("fusions", options.output), machine.alone(options.device, "fusions"), \
            torch._functorch.config.patch(donated_buffer=False):          # or no compiled backward could run twice
        harness.use_private_caches()
        study = Study("fusions", options)
        if on_gpu:
            study.say("peaks of this machine")
            study.peaks = roofline.measure_peaks(
                options.config, roofline.arithmetic(options.config, 2, torch.bfloat16, options.device), options.device)
        for name in options.experiment or EXPERIMENTS:
            found = levels(EXPERIMENTS[name], options.device)
            for level in [level for level, call in found.items() if isinstance(call, str)]:
                r = _report(study, f"{name}, all sizes, {level}", "skipped", found.pop(level))
                study.write(report.check_records(r))
            for rows in sizes:
                measure(study, name, found, rows)
                study.release()
        return study.show(text, draw)


if __name__ == "__main__":
    sys.exit(main())
