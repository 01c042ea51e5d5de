"""How far from the memory's speed is each way to write a fused operation, and when is a kernel by hand worth it?

    python -m benchmarks.fusions --json fusions.jsonl --chart fusions
    python -m benchmarks.fusions --experiment RMSNorm --rows 64,16384
    python -m benchmarks.fusions --capture DIR && python -m benchmarks.fusions --explain DIR     # see capture.py

What stands between a block's matmuls, and attention itself, at five levels: eager PyTorch, TorchScript (which torch
deprecates), torch.compile, Triton and CUDA C++, beside what libraries have. Each is held against FP64, then all of a
size are timed in shared rounds, forward and backward, launched one by one and by graph replay, from a few rows to all
tokens of the shape. An iteration takes turns over so many copies of its tensors that no cache holds them; times are of
one copy. GB/s count the bytes that the operation must move at the least, TFLOP/s attention's FLOPs under its mask. The
row "copy" copies as many bytes, in the same rounds: percent are of its speed (of attention's, of the matmul rate that
the machine reached), and left out where the copies do not go beyond four times the last cache. More than 100 is no
error: memory reads faster than it writes, and a copy does as much of either. By hand, softmax and attention make their
causal mask at every call, which costs most where there are few rows.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import contextlib
import functools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._functorch.config
from torch import Tensor

from common import device as machine
from common import graph, harness, report, roofline, timing
from common.config import dtype_name
from common.evidence import judge, observe
from common.run import EXIT

from . import capture, command, records
from .fusion_tables import COPY, MODES, draw, text
from .fusion_tables import chart_stems as chart_stems  # for readme.py, as every study has it
from .operations import EXPERIMENTS, check, differentiable, least_bytes, levels, outputs, shape, tensors
from .study import Study

MOST_COPIES = 64                       # of an operation's tensors: small ones stay in a cache all the same
BEYOND = 4                             # times the last cache, which keeps some of what is only a little larger than it


@dataclass
class Iteration:
    """One call on each copy of the tensors, forward or backward alone; `found` is what the last one gave.

    Outputs of all copies live as long as those of the last: each has memory of its own, as the tensors have.
    """
    call: Callable
    mode: str
    sets: list[list[Tensor]]                                             # copies of the inputs, of this iteration alone
    seed: int

    def __post_init__(self):
        if self.mode == "backward":
            self.made = [differentiable(outputs(self.call, given)) for given in self.sets]
            generator = torch.Generator(self.sets[0][0].device).manual_seed(self.seed)
            self.dys = [[torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in ys]
                        for ys in self.made]

    def __call__(self) -> None:
        if self.mode == "forward":
            with torch.no_grad():
                self.found = [outputs(self.call, given) for given in self.sets]
        else:
            self.found = [torch.autograd.grad(ys, differentiable(given), dy, retain_graph=True)
                          for ys, given, dy in zip(self.made, self.sets, self.dys, strict=True)]

    def change(self) -> None:
        """Other values, in place, in what it reads: a replay must follow them."""
        with torch.no_grad():
            for t in self.sets[0] if self.mode == "forward" else self.dys[0]:
                t.mul_(-0.5)


def captured(call: Callable, mode: str, sets: list[list[Tensor]], seed: int) -> Callable:
    """The iteration on copies of its own as a CUDA graph. Raises RuntimeError where it can't be captured, or where its
    replay on changed values is not what a call gives.

    All of it is made on the stream of the capture: a backward runs where its forward did.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one = Iteration(call, mode, copies_of(sets[0], len(sets)), seed)
    replay = graph.capture(one, timing.nothing, stream)
    kept, found = one.found, []                                          # `kept` is what a replay writes to
    with torch.cuda.stream(stream):                                      # or the replay would not wait for it
        one.change()
    for again in (replay, one):
        torch.cuda.manual_seed(seed)                                     # the same dropout
        with torch.cuda.stream(stream):
            again()
        torch.cuda.synchronize()
        found.append([t.float() for t in (kept if again is replay else one.found)[0]])
    if not all((a - b).norm() <= 1e-2 * b.norm() for a, b in zip(*found, strict=True)):          # NaN is not either
        raise RuntimeError("its replay on changed values differs from a call")
    one.found = kept
    return lambda: (replay(), one)[0]                                    # a graph keeps no tensor alive


def copies_of(given: list[Tensor], count: int) -> list[list[Tensor]]:
    return [[t.detach().clone().requires_grad_(t.requires_grad) for t in given] for _ in range(count)]


@contextlib.contextmanager
def alone(r: report.Report):
    """Whatever goes wrong inside is the status of that level, and the others go on."""
    with harness.judged(r, lambda: "it does not fit beside the others"):
        try:
            yield
        except (harness.Failed, NotImplementedError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:                                       # another library's, of any kind
            raise harness.Failed(harness.in_a_line(error)) from error


def _report(study: Study, step: str, status: str = "ok", reason: str = "") -> report.Report:
    dtype = dtype_name(study.options.config.amp_dtype or torch.float32)
    r = study.reports[step] = report.Report(step, study.options.config, dtype, study.facts, status, reason, dtype,
                                            residual=dtype, study=study.name, run=study.run,
                                            neighbours=study.neighbours)
    return r


def measure(study: Study, name: str, found: dict[str, Callable], size: tuple[int, ...]) -> None:
    """Check and time all levels of one experiment at one size, and write their records."""
    options, device, experiment = study.options, study.device, EXPERIMENTS[name]
    dtype, reports = options.config.amp_dtype or torch.float32, {}
    needed = 40 * math.prod(size) * experiment.inputs.count("x")                              # FP64 and its gradients
    machine.refuse_beyond_memory(needed, device, f"{name} of {' x '.join(map(str, size))}: ")
    first = tensors(experiment, size, dtype, device, options.seed)
    for level, call in found.items():
        r = reports[level] = _report(study, f"{name}, {' x '.join(map(str, size))}, {level}")
        study.say(f"checking {r.step}")
        with alone(r):
            r.errors = {what: (error, None) for what, error in check(call, experiment, first, options.seed + 1).items()}
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else math.inf
    for mode in MODES:
        work = Work(least_bytes(experiment, mode, first[0]), 0.0)
        if experiment.shape == "heads":                                  # causal: half of the S x S
            B, H, S, D = size
            work = Work(work.bytes, 2.0 * B * H * S * S * D * (1 if mode == "forward" else 2.5))
        copies = 1 if device.type == "cpu" else min(MOST_COPIES, math.ceil(BEYOND * cache / work.bytes))
        calls = {level: call for level, call in found.items() if reports[level].status == "ok" and (
            mode == "forward" or any(what.startswith("gradient") for what in reports[level].errors))}
        if not work.flops and COPY not in reports:
            reports[COPY] = _report(study, f"{name}, {' x '.join(map(str, size))}, {COPY}")
        _time(study, mode, calls, reports, copies_of(first, copies), work, beyond=copies * work.bytes >= BEYOND * cache)
    for r in reports.values():
        study.write(report.check_records(r))
        for mode in r.evidence:
            study.write(report.row_records(r, mode))


@dataclass(frozen=True)
class Work:
    """What an operation does at the least: bytes moved, and FLOPs where these and not the bytes are its limit."""
    bytes: float
    flops: float

    def rate(self, ms: float) -> tuple[str, float]:
        """(unit, value)"""
        return ("TFLOP/s", self.flops / ms / 1e9) if self.flops else ("GB/s", self.bytes / ms / 1e6)

    def source(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What takes as many bytes to copy."""
        return torch.ones(round(self.bytes / 2 / dtype.itemsize), dtype=dtype, device=device)


def copying() -> Callable:
    """x -> a copy of it, in the same memory at every call: to allocate can take a CPU longer than to copy."""
    target_of = functools.cache(torch.empty_like)
    return lambda source: target_of(source).copy_(source)


def clock_for(device: torch.device, work: Work) -> timing.EventClock | timing.HostClock:
    """In shorter stretches where memory is the limit: such work is not expected to reach a GPU's power cap."""
    clock = timing.clock_for(device)
    if not work.flops:
        clock.settle_ms, clock.burst_ms = clock.settle_ms / 5, clock.burst_ms / 10
    return clock


def _time(study: Study, mode: str, calls: dict[str, Callable], reports: dict, sets: list[list[Tensor]], work: Work,
          beyond: bool) -> None:
    runs, seed, clock = {}, study.options.seed, clock_for(study.device, work)
    works = {level: (call, mode, sets) for level, call in calls.items()}
    if not work.flops:
        source = work.source(sets[0][0].dtype, study.device)
        works[COPY] = (copying(), "forward", copies_of([source], len(sets)))
    for level, given in works.items():
        r = reports[level]
        study.say(f"warming up {r.step}, {mode}")
        with alone(r):
            eager = Iteration(*given, seed)
            for _ in range(3):
                eager()
            r.evidence[mode] = judge(observe(eager, study.device), None, r.matmul, study.device)
            runs[level, "eager"] = eager
            if study.device.type == "cuda":
                try:
                    runs[level, "graph"] = captured(*given, seed)
                except (RuntimeError, ValueError) as error:
                    r.rows[mode, "graph"] = report.Row(reason=f"graph: {str(error).splitlines()[0]}")
                    torch.cuda.synchronize()
        if r.status != "ok":
            runs = {where: run for where, run in runs.items() if where[0] != level}
    taken = {where: [ms / len(sets) for ms in samples]
             for where, samples in _sample(study, mode, runs, calls, reports, clock).items()}
    rate = study.peaks.flops.get(dtype_name(sets[0][0].dtype))
    limit = work.flops / rate * 1e3 if work.flops and rate else None
    if beyond and (copied := [statistics.median(each) for (level, _), each in taken.items() if level == COPY]):
        limit = min(copied)
    for (level, launch), each in taken.items():
        r = reports[level]
        r.rows[mode, launch] = report.Row(timing.Timing(each, timing.is_settled(each), clock.in_rounds),
                                          limit_ms=None if level == COPY else limit)
        unit, rate = work.rate(statistics.median(each))
        study.write([report.record(r, "work rate", unit, [rate], mode, launch=launch, bytes=work.bytes,
                                   flops=work.flops, copies=len(sets))])


def _sample(study: Study, mode: str, runs: dict, calls: dict[str, Callable], reports: dict, clock) -> dict:
    """(level, launch) -> samples. Levels that are compiled again fail; without memory for all, graphs are left out."""
    study.say(f"sampling {mode}")
    seed = study.options.seed
    try:
        with harness.compiled_for_good(*(calls[level] for level, _ in runs if level != COPY)):
            timing.interleaved(runs, clock, 2, seed=seed)
            return timing.interleaved(runs, clock, study.options.rounds, seed=seed)
    except harness.Failed as error:
        again = {level for level, call in calls.items() if harness.holds_compiled(call)}
        for level in again:
            reports[level].status, reports[level].reason = "failed", str(error)
        left = {where: run for where, run in runs.items() if where[0] not in again}
    except torch.OutOfMemoryError:
        left = {where: run for where, run in runs.items() if where[1] == "eager"}
        if len(left) == len(runs):
            raise
    runs.clear()
    return _sample(study, mode, left, calls, reports, clock) if left else {}


def compiled_so_far(name: str) -> dict[int, tuple[str, object]]:
    """The Triton kernels in the module of an experiment."""
    return capture.triton_kernels(sys.modules.get(f"{__package__}.kernels.{EXPERIMENTS[name].module}"))


def save(study: Study, name: str, size: tuple[int, ...], kernels: list[tuple[str, object]]) -> None:
    """Capture an experiment that has been measured at that size."""
    options, experiment = study.options, EXPERIMENTS[name]
    given = tensors(experiment, size, options.config.amp_dtype or torch.float32, study.device, options.seed)
    label = f"{name}, {' x '.join(map(str, size))}, "
    runs = {run.info["step"].removeprefix(label): run for run in records.runs(study.lines)
            if run.info["step"].startswith(label)}
    least = {mode: least_bytes(experiment, mode, given[0]) for mode in MODES}
    if runs:
        capture.save(options.capture, name, experiment.plain, given, least, runs, kernels)


def main(argv: list[str] | None = None) -> int:
    parser = command.parser("fusions", __doc__)
    parser.add_argument("--experiment", choices=EXPERIMENTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--rows", type=command.numbers, metavar="LIST",
                        help="sizes, in rows (tokens) of x, of which attention and softmax take whole sequences, at "
                             "least one (default: up to the tokens of the shape)")
    parser.add_argument("--capture", type=Path, metavar="DIR", help="save what the compiler made of each")
    parser.add_argument("--explain", type=Path, metavar="DIR", help="measure nothing: tell what --capture saved")
    options = command.parse(parser, argv)
    if options.explain and options.capture:
        command.usage(parser, "--capture and --explain: give one of them")
    if options.explain:
        try:
            told = capture.explain(options.explain)
        except (ValueError, OSError) as error:
            command.usage(parser, f"--explain: {error}")
        with command.shown_to_a_person("fusions"):
            command.tell(told)
        return EXIT["ok"]
    if options.capture:
        try:
            options.capture.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            command.usage(parser, f"--capture {options.capture}: {error.strerror}; give a folder that can be written")
    on_gpu = options.device.type == "cuda"
    options.config = options.config.replace(amp_dtype=torch.bfloat16 if on_gpu else None)
    parts = (256, 64, 16, 4, 1) if on_gpu else (16, 1)
    sizes = options.rows or tuple(dict.fromkeys(max(1, options.config.tokens // part) for part in parts))
    with command.shown_to_a_person("fusions", options.output), machine.alone(options.device, "fusions"), \
            torch._functorch.config.patch(donated_buffer=False):          # or no compiled backward could run twice
        harness.use_private_caches()
        study = Study("fusions", options)
        if on_gpu and "attention" in (options.experiment or EXPERIMENTS):
            study.measure_peaks(options.config, roofline.arithmetic(options.config, 2, torch.bfloat16, options.device))
        for name in options.experiment or EXPERIMENTS:
            for level, reason in levels(EXPERIMENTS[name], options.device).items():
                if isinstance(reason, str):
                    study.write(report.check_records(_report(study, f"{name}, all sizes, {level}", "skipped", reason)))
            before = compiled_so_far(name)                                # other experiments' of the same module
            for size in dict.fromkeys(shape(options.config, EXPERIMENTS[name].shape, rows) for rows in sizes):
                found = levels(EXPERIMENTS[name], options.device)        # anew: TorchScript specializes for what it saw
                measure(study, name, {level: call for level, call in found.items() if not isinstance(call, str)}, size)
                study.release()
            if options.capture:
                study.say(f"capturing {name}")
                save(study, name, size, [kernel for key, kernel in compiled_so_far(name).items() if key not in before])
        return study.show(text, draw)


if __name__ == "__main__":
    sys.exit(main())
