"""How far from the memory's speed is each way to write a fused operation, and when is a kernel by hand worth it?

    python -m benchmarks.fusions --json fusions.jsonl --chart fusions
    python -m benchmarks.fusions --experiment RMSNorm --rows 64,16384
    python -m benchmarks.fusions --capture DIR && python -m benchmarks.fusions --explain DIR     # see capture.py

What stands between a block's matmuls, and attention itself, at five levels: eager PyTorch, TorchScript (which torch
deprecates), torch.compile, Triton and CUDA C++, beside what libraries have. Each is held against FP64, then all of a
size are timed in shared rounds, forward and backward, launched one by one and by graph replay, from a few rows to all
tokens of the shape. An iteration takes turns over so many copies of its tensors that no cache holds them; times are of
one copy. GB/s count the bytes that the operation must move at the least, TFLOP/s attention's FLOPs under its mask;
percent is of the copy bandwidth (of the matmul rate) that this machine reached in the same run, and is left out where
the copies do not go beyond four times the last cache. By hand, softmax and attention make their causal mask at every
call, which costs most where there are few rows.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import argparse
import contextlib
import functools
import importlib
import importlib.util
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import BlockConfig, harness, oracle, report, roofline, timing
from common import device as machine
from common.config import dtype_name
from common.evidence import judge, observe
from common.run import EXIT

from . import capture, charts, command, records
from .comparison import GATES
from .study import Study

MODES = ("forward", "backward")
MOST_COPIES = 64                       # of an operation's tensors: small ones stay in a cache all the same
BEYOND = 4                             # times the last cache, which keeps some of what is only a little larger than it


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


def softmax_dropout(scores: Tensor) -> Tensor:
    future = torch.ones(scores.size(-1), scores.size(-1), dtype=torch.bool, device=scores.device).triu(1)
    return F.dropout(torch.softmax(scores.masked_fill(future, float("-inf")), -1), 0.1)


def layer_norm_fp8(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(LayerNorm times scale in FP8, its largest absolute value before scaling); in FP64 nothing is rounded."""
    normal = F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    scaled = normal * scale.to(normal.dtype)
    if x.dtype != torch.float64:
        scaled = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return scaled, normal.abs().amax()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    return torch.softmax(scores.masked_fill(future, float("-inf")), -1) @ v


def _library_attention(backend: SDPBackend) -> Callable:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return call


def _liger_rms_norm() -> Callable:
    from liger_kernel.transformers.functional import liger_rms_norm
    return lambda x, weight: liger_rms_norm(x, weight, 1e-6, in_place=False)     # in place it overwrites dy


def _liger_swiglu() -> Callable:
    from liger_kernel.transformers.functional import liger_swiglu
    return lambda a, b: liger_swiglu(a.detach(), b.detach())             # its backward overwrites a and b: forward only


def _kernel(name: str, **constants) -> Callable[[], Callable]:
    """What imports "module.function" of benchmarks/kernels, and binds arguments that no level varies."""
    module, function = name.split(".")

    def load() -> Callable:
        found = getattr(importlib.import_module(f"{__package__}.kernels.{module}"), function)
        return functools.partial(found, **constants) if constants else found
    return load


def _two(load: Callable[[], Callable]) -> Callable[[], Callable]:
    """The same, giving the first two of its results."""
    return lambda: lambda *given: load()(*given)[:2]


def _forward_only(load: Callable[[], Callable]) -> Callable[[], Callable]:
    return lambda: lambda *given: load()(*(t.detach() for t in given))


@dataclass(frozen=True)
class Experiment:
    """An operation, and what it must move at the least."""
    plain: Callable                    # in PyTorch's operations: the truth, and what TorchScript and the compiler get
    inputs: str                        # x: the tensor, w: a vector [width], 1: one FP32 number; x, w get gradients
    shape: str                         # of x: "hidden" [rows, E], "ffn" [rows, F], "scores" [matrices, S, S], or
                                       # "heads" [B, H, S, D]
    moved: tuple[float, float | None]  # times x's elements read and written, forward and backward; None: not measured
    by_hand: dict[str, Callable[[], Callable]]           # level -> what imports it
    module: str                        # of benchmarks/kernels: where its Triton kernels are
    gate: float | None = None          # of the outputs, where it is not the dtype's


DROPOUT = {"p": 0.1, "seed": 1, "causal": True}
EXPERIMENTS = {
    "LayerNorm+GELU": Experiment(layer_norm_gelu, "xww", "hidden", (2, 3), {
        "Triton": _kernel("norms.layer_norm_gelu"), "CUDA C++": _kernel("cuda.layer_norm_gelu")}, "norms"),
    "RMSNorm": Experiment(rms_norm, "xw", "hidden", (2, 3), {
        "Triton": _kernel("norms.rms_norm"), "CUDA C++": _kernel("cuda.rms_norm"), "Liger": _liger_rms_norm}, "norms"),
    "residual+LayerNorm": Experiment(residual_layer_norm, "xxww", "hidden", (4, 4), {
        "Triton": _kernel("norms.residual_layer_norm")}, "norms"),
    "LayerNorm to FP8": Experiment(layer_norm_fp8, "xww1", "hidden", (1, None), {         # and a byte written
        "Triton": _two(_kernel("quantize.layer_norm_fp8"))}, "quantize", 4e-2),
    "SiLU": Experiment(silu, "x", "ffn", (2, 3), {"Triton": _kernel("activations.silu")}, "activations"),
    "SwiGLU": Experiment(swiglu, "xx", "ffn", (3, 5), {
        "Triton": _kernel("activations.swiglu"), "CUDA C++": _kernel("cuda.swiglu"),
        "Liger": _liger_swiglu}, "activations"),
    "bias+GELU": Experiment(bias_gelu, "xw", "ffn", (2, 3), {
        "Triton": _kernel("activations.bias_gelu")}, "activations"),
    # What is beyond the diagonal is written and not read.
    "softmax+dropout": Experiment(softmax_dropout, "x", "scores", (1.5, 2), {
        "Triton": _kernel("softmax.softmax_dropout", **DROPOUT),
        "CUDA C++": _kernel("cuda.softmax_dropout", **DROPOUT)}, "softmax"),
    "attention": Experiment(attention, "xxx", "heads", (4, 8), {
        "Triton": _kernel("attention.attention"), "CUDA C++": _forward_only(_kernel("cuda.attention")),
        "PyTorch's FlashAttention": lambda: _library_attention(SDPBackend.FLASH_ATTENTION),
        "cuDNN": lambda: _library_attention(SDPBackend.CUDNN_ATTENTION)}, "attention"),
}


def shape(config: BlockConfig, name: str, rows: int) -> tuple[int, ...]:
    """Of x for so many tokens; matrices and sequences are whole, at least one."""
    S, H = config.seq_len, config.num_heads
    return {"hidden": (rows, config.hidden_size), "ffn": (rows, config.ffn_hidden_size),
            "scores": (max(1, rows * H // S), S, S), "heads": (max(1, rows // S), H, S, config.head_dim)}[name]


def least_bytes(experiment: Experiment, moved: float, size: tuple[int, ...], dtype: torch.dtype) -> float:
    """What a pass must read and write; vectors are too small to count."""
    to_fp8 = math.prod(size) if experiment.plain is layer_norm_fp8 else 0
    return moved * math.prod(size) * dtype.itemsize + to_fp8


def levels(experiment: Experiment, device: torch.device) -> dict[str, Callable | str]:
    """Level -> the function, or why there is none here."""
    found: dict[str, Callable | str] = {"eager": experiment.plain}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)                   # deprecated: the level's name says so
        found["TorchScript (deprecated)"] = torch.jit.script(experiment.plain)
    torch._dynamo.config.recompile_limit = 1024                          # its 8 count over all sizes
    found["torch.compile"] = torch.compile(experiment.plain, fullgraph=True, dynamic=False)
    for level, load in experiment.by_hand.items():
        missing = "" if device.type == "cuda" else "it needs a GPU"
        if level == "Liger" and not importlib.util.find_spec("liger_kernel"):
            missing = missing or "liger_kernel is not installed"
        if level == "CUDA C++" and not missing:
            missing = importlib.import_module(f"{__package__}.kernels.extension").missing()
        try:
            found[level] = missing or load()
        except Exception as error:                                       # a library that is there and does not import
            found[level] = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return found


def tensors(experiment: Experiment, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
            ) -> list[Tensor]:
    """Random inputs; vectors are around 1. Floating ones ask for gradients where a backward is measured."""
    generator, found = torch.Generator(device).manual_seed(seed), []
    for kind in experiment.inputs:
        if kind == "1":
            found.append(torch.full((1,), 50.0, device=device))
        else:
            x = torch.randn(size if kind == "x" else size[-1:], generator=generator, device=device)
            found.append((x if kind == "x" else 1 + 0.3 * x).to(dtype).requires_grad_(experiment.moved[1] is not None))
    return found


def outputs(call: Callable, given: list[Tensor]) -> tuple[Tensor, ...]:
    found = call(*given)
    return found if isinstance(found, tuple) else (found,)


def check(call: Callable, experiment: Experiment, given: list[Tensor], seed: int) -> dict[str, float]:
    """What -> relative L2 error against FP64 of outputs and gradients. Raises harness.Failed beyond the gate.

    As they are timed: the outputs without gradients and at a third call, since a compiler may have other code for that.
    """
    inputs = [t for t in given if t.requires_grad]
    generator = torch.Generator(given[0].device).manual_seed(seed)
    gate, errors = experiment.gate or GATES[given[0].dtype], {}
    for backward in (False, True) if inputs else (False,):
        with torch.set_grad_enabled(backward):
            found = [outputs(call, given) for _ in range(3)][-1]
        if backward and not found[0].requires_grad:                      # what has no backward is measured without
            break
        dys = [torch.randn(y.shape, generator=generator, device=y.device) for y in found]
        truth = truth_of(experiment, given, found, dys)
        names = [f"output {n}" for n in range(len(found))]
        values = [y.detach() if y.dtype != torch.float8_e4m3fn else y.float() for y in found]
        if backward:
            names += [f"gradient {n}" for n in range(len(inputs))]
            values += torch.autograd.grad(found, inputs, [dy.to(y.dtype) for dy, y in zip(dys, found, strict=True)])
        for name, value, right in zip(names, values, truth, strict=False):
            error = oracle.relative_error(value, right)
            if not error <= (gate if name.startswith("output") else 3 * gate):
                raise harness.Failed(f"{name} is off by {error:.1e} against FP64")
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


def truth_of(experiment: Experiment, given: list[Tensor], found: tuple[Tensor, ...], dys: list[Tensor]
             ) -> list[Tensor]:
    """Outputs and gradients in FP64. Of dropout by the mask that `found` shows, whose share must be right."""
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    if experiment.plain is not softmax_dropout:
        truth = outputs(experiment.plain, exact)
        inputs = [t for t in exact if t.requires_grad]
        gradients = torch.autograd.grad(truth, inputs, [dy.double() for dy in dys]) if inputs else ()
        return [*(y.detach() for y in truth), *gradients]
    (scores,), (y,) = exact, found
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    kept, p = (y.detach() != 0), DROPOUT["p"]
    if kept[..., ~seen].any():
        raise harness.Failed("a query sees keys behind it")
    count = seen.sum().item() * (kept.numel() // seen.numel())
    share = kept[..., seen].double().mean().item()
    if abs(share - (1 - p)) > 5 * math.sqrt(p * (1 - p) / count):
        raise harness.Failed(f"dropout keeps {share:.4f} of {count} elements, not {1 - p:g}")
    mask = kept.double() / (1 - p)
    truth = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) * mask
    return [truth.detach(), torch.autograd.grad(truth, scores, dys[0].double())[0]]


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
            self.made = [outputs(self.call, given) for given in self.sets]
            generator = torch.Generator(self.sets[0][0].device).manual_seed(self.seed)
            self.dys = [[torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in ys]
                        for ys in self.made]

    def __call__(self) -> None:
        if self.mode == "forward":
            with torch.no_grad():
                self.found = [outputs(self.call, given) for given in self.sets]
        else:
            self.found = [torch.autograd.grad(ys, [t for t in given if t.requires_grad], dy, retain_graph=True)
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
    replay = timing.capture(one, timing.nothing, stream)
    kept, found = one.found, []                                          # `kept` is what a replay writes to
    with torch.cuda.stream(stream):                                      # or the replay would not wait for it
        one.change()
    for again in (replay, one):
        torch.cuda.manual_seed(seed)                                     # the same dropout
        with torch.cuda.stream(stream):
            again()
        torch.cuda.synchronize()
        found.append([t.float() for t in (kept if again is replay else one.found)[0]])
    if any((a - b).norm() > 1e-2 * b.norm() for a, b in zip(*found, strict=True)):
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
            raise harness.Failed(f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
                                 ) from error


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
    first = tensors(experiment, size, dtype, device, options.seed)
    for level, call in found.items():
        r = reports[level] = _report(study, f"{name}, {' x '.join(map(str, size))}, {level}")
        study.say(f"checking {r.step}")
        with alone(r):
            r.errors = {what: (error, None) for what, error in check(call, experiment, first, options.seed + 1).items()}
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else math.inf
    for mode, moved in zip(MODES, experiment.moved, strict=True):
        if moved is None:
            continue
        work = Work(least_bytes(experiment, moved, size, dtype), 0.0)
        if experiment.shape == "heads":                                  # causal: half of the S x S
            B, H, S, D = size
            work = Work(work.bytes, 2.0 * B * H * S * S * D * (1 if mode == "forward" else 2.5))
        copies = 1 if device.type == "cpu" else min(MOST_COPIES, math.ceil(BEYOND * cache / work.bytes))
        calls = {level: call for level, call in found.items() if reports[level].status == "ok" and (
            mode == "forward" or any(what.startswith("gradient") for what in reports[level].errors))}
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

    def limit_ms(self, peaks: roofline.Peaks, dtype: str, beyond: bool) -> float | None:
        """By this machine's matmul rate or its copy bandwidth; None where the bytes stay in a cache."""
        if self.flops:
            return self.flops / peaks.flops[dtype] * 1e3 if dtype in peaks.flops else None
        return self.bytes / peaks.bandwidth * 1e3 if beyond else None


def _time(study: Study, mode: str, calls: dict[str, Callable], reports: dict, sets: list[list[Tensor]], work: Work,
          beyond: bool) -> None:
    runs, seed = {}, study.options.seed
    for level, call in calls.items():
        r = reports[level]
        study.say(f"warming up {r.step}, {mode}")
        with alone(r):
            eager = Iteration(call, mode, sets, seed)
            for _ in range(3):
                eager()
            r.evidence[mode] = judge(observe(eager, study.device), None, r.matmul, study.device)
            runs[level, "eager"] = eager
            if study.device.type == "cuda":
                try:
                    runs[level, "graph"] = captured(call, mode, sets, seed)
                except (RuntimeError, ValueError) as error:
                    r.rows[mode, "graph"] = report.Row(reason=f"graph: {str(error).splitlines()[0]}")
                    torch.cuda.synchronize()
        if r.status != "ok":
            runs = {where: run for where, run in runs.items() if where[0] != level}
    taken, clock = _sample(study, mode, runs, calls, reports), timing.clock_for(study.device)
    for (level, launch), samples in taken.items():
        r, each = reports[level], [ms / len(sets) for ms in samples]
        r.rows[mode, launch] = report.Row(timing.Timing(each, timing.is_settled(each), clock.in_rounds),
                                          limit_ms=work.limit_ms(study.peaks, r.matmul, beyond))
        unit, rate = work.rate(statistics.median(each))
        study.write([report.record(r, "work rate", unit, [rate], mode, launch=launch, bytes=work.bytes,
                                   flops=work.flops, copies=len(sets))])


def _sample(study: Study, mode: str, runs: dict, calls: dict[str, Callable], reports: dict) -> dict:
    """(level, launch) -> samples. Levels that are compiled again fail; without memory for all, graphs are left out."""
    study.say(f"sampling {mode}")
    clock, seed = timing.clock_for(study.device), study.options.seed
    try:
        with harness.compiled_for_good(*(calls[level] for level, _ in runs)):
            timing.interleaved(runs, clock, 2, seed=seed)
            return timing.interleaved(runs, clock, study.options.rounds, seed=seed)
    except harness.Failed as error:
        again = {level for level, _ in runs if harness.holds_compiled(calls[level])}
        for level in again:
            reports[level].status, reports[level].reason = "failed", str(error)
        left = {where: run for where, run in runs.items() if where[0] not in again}
    except torch.OutOfMemoryError:
        left = {where: run for where, run in runs.items() if where[1] == "eager"}
        if len(left) == len(runs):
            raise
    runs.clear()
    return _sample(study, mode, left, calls, reports) if left else {}


def triton_kernels(name: str) -> dict[int, tuple[str, object]]:
    """What has been compiled so far of the module of an experiment: id -> (name, compiled kernel)."""
    module = sys.modules.get(f"{__package__}.kernels.{EXPERIMENTS[name].module}")
    return {id(kernel): (kernel_name, kernel) for kernel_name, kernel in capture.triton_kernels(module)}


def save(study: Study, name: str, size: tuple[int, ...], kernels: list[tuple[str, object]]) -> None:
    """Capture an experiment that has been measured at that size."""
    options, experiment = study.options, EXPERIMENTS[name]
    given = tensors(experiment, size, options.config.amp_dtype or torch.float32, study.device, options.seed)
    label = f"{name}, {' x '.join(map(str, size))}, "
    runs = {run.info["step"].removeprefix(label): run for run in records.runs(study.lines)
            if run.info["step"].startswith(label)}
    least = {mode: least_bytes(experiment, moved, size, given[0].dtype)
             for mode, moved in zip(MODES, experiment.moved, strict=True) if moved}
    if runs:
        capture.save(options.capture, name, experiment.plain, given, least, runs, kernels)


def text(lines: list[dict], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    runs = {run.info["step"]: run for run in records.runs(lines) if run.info["step"] != "fusions"}
    blocks, on_gpu = [records.provenance(lines)], lines[0]["runners"][0]["type"] == "cuda"
    for name in dict.fromkeys(step.split(", ")[0] for step in runs):
        for mode in MODES:
            some = {step: run for step, run in runs.items() if step.startswith(name + ", ")}
            if mode == "forward" or any(run.best(mode) for run in some.values()):
                headers = ["size", "level", "status", "error", "us, eager", "us, graph", _unit(some), "% of peak",
                           "kernels" if on_gpu else "operators"]
                blocks.append(f"{name}, {mode}\n\n" + command.table([_row(run, mode) for run in some.values()],
                                                                    headers, width, keys=2))
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
            "" if best is None else command.figures(run.value(mode, "work rate", best)),
            "" if percent is None else f"{percent:.0f}" + " ERROR: >100" * (percent > 100),
            "" if kernels is None else f"{kernels / _copies(run, mode):.0f}"]


def _copies(run: records.Run, mode: str) -> int:
    return run.find(mode, "work rate", "eager")["metric"]["extra_info"]["copies"]


def _unit(runs: dict[str, records.Run]) -> str:
    return next((line["metric"]["extra_info"]["unit"] for run in runs.values() for line in run.lines
                 if line["metric"]["name"] == "work rate"), "GB/s")


def chart_stems(lines: list[dict], stem: str) -> list[str]:
    """The one chart that `draw` makes; none without a sweep."""
    return [f"{stem}-bandwidth"] if any(len(points) > 1 for curves in _curves(lines).values()
                                        for points in curves.values()) else []


def draw(lines: list[dict], stem: str) -> None:
    """Draw `chart_stems`: GB/s against the size of the first tensor, forward, a panel for each experiment."""
    if chart_stems(lines, stem):
        charts.panels_chart(_curves(lines), f"{stem}-bandwidth", lines, "million elements", "GB/s, forward")


def _curves(lines: list[dict]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Experiment -> level -> [(million elements, GB/s)]; "copy" is what this machine copies at."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run in records.runs(lines):
        rate = run.find("forward", "work rate", run.best("forward")) if run.best("forward") else None
        if rate is None or rate["metric"]["extra_info"]["unit"] != "GB/s":
            continue
        name, size, level = run.info["step"].split(", ")
        at, value = math.prod(map(int, size.split(" x "))) / 1e6, rate["metric"]["benchmark_values"][0]
        curves = found.setdefault(name, {})
        curves.setdefault(level, []).append((at, value))
        if percent := run.value("forward", "percent of limit", run.best("forward")):
            curves.setdefault("copy", []).append((at, 100 * value / percent))
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
    parser.add_argument("--capture", type=Path, metavar="DIR", help="save what the compiler made of each")
    parser.add_argument("--explain", type=Path, metavar="DIR", help="measure nothing: tell what --capture saved")
    options = command.parse(parser, argv)
    if options.explain and options.capture:
        command.usage(parser, "--capture and --explain: give one of them")
    if options.explain:
        try:
            print(capture.explain(options.explain))
        except (ValueError, OSError) as error:
            command.usage(parser, f"--explain: {error}")
        return EXIT["ok"]
    if options.capture:
        try:
            options.capture.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            command.usage(parser, f"--capture {options.capture}: {error.strerror}; give a folder that can be written")
    on_gpu = options.device.type == "cuda"
    options.config = options.config.replace(amp_dtype=torch.bfloat16 if on_gpu else None)
    parts = (256, 64, 16, 4, 1) if on_gpu else (1,) if options.quick else (16, 1)
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
            for level, reason in levels(EXPERIMENTS[name], options.device).items():
                if isinstance(reason, str):
                    study.write(report.check_records(_report(study, f"{name}, all sizes, {level}", "skipped", reason)))
            before = triton_kernels(name)                                # other experiments' of the same module
            for size in dict.fromkeys(shape(options.config, EXPERIMENTS[name].shape, rows) for rows in sizes):
                found = levels(EXPERIMENTS[name], options.device)        # anew: TorchScript specializes for what it saw
                measure(study, name, {level: call for level, call in found.items() if not isinstance(call, str)}, size)
                study.release()
            if options.capture:
                study.say(f"capturing {name}")
                save(study, name, size, [kernel for key, kernel in triton_kernels(name).items() if key not in before])
        return study.show(text, draw)


if __name__ == "__main__":
    sys.exit(main())
