"""Where the time of an iteration in 8 bits goes: kernels by what they do, on a CPU operators."""
import re
from collections import defaultdict

import torch
from torch.autograd.profiler import profile

from common.measure.attribution import category, gpu_intervals
from common.measure.subject import Subject, on_a_copy
from common.report.record import Record, record
from common.report.result import Result
from common.runtime.iteration import BOTH, FORWARD

ITERATIONS = 10                        # that are profiled, after as many more
SPLIT = "time by kind of kernel"       # the metric
KINDS = MATMULS, ATTENTION, CASTS, SCALES, REST = (
    "matmuls", "attention", "casts and transposes", "amax and scales", "rest")

# First match decides. Inductor names a kernel by the operations that it fuses. One that normalises or has a GELU would
# be there without FP8, too, and what rides on it costs no pass. One that looks for the largest magnitude and casts in
# the same pass is a cast.
_NAMES = (
    (REST, r"layer_?norm|normalization|\bln_\w*(fwd|bwd)|^(?!nvjet|cublas).*gelu"),
    (CASTS, r"^triton_.*clamp"),
    (SCALES, r"amax|scale_update|delayed_scaling|compute_scale|^aten::abs$"),
    (CASTS, r"^triton_[a-z]+_fused(__to_copy|_view|_clone|_permute|_transpose|_t)+_\d+$"),
    (MATMULS, r"^aten::_(scaled_mm|weight_int4pack_mm)"),
    (CASTS, r"^(?!triton_|nvjet|.*gemm).*(cast|quantize|transpose|fp8_e[45]m)|^aten::(clamp|div)$"),
)
_OF_ALL = {"attention": ATTENTION, "GEMM": MATMULS, "casts and copies": CASTS}         # as of every other model
_PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _NAMES]


def kind_of(name: str) -> str:
    """What a kernel, or on a CPU an operator, of that name does."""
    own = next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)
    return own or _OF_ALL.get(category(name), REST)


def split(subject: Subject, mode: str) -> dict[str, float]:
    """Kind -> ms in one iteration, the mean of several. What runs on two streams at once counts twice."""
    work, on_gpu = on_a_copy(subject, mode), subject.inputs[0].is_cuda

    def run() -> None:
        for _ in range(ITERATIONS):
            work.between()
            work.run()
        if on_gpu:
            torch.cuda.synchronize()
    run()
    with profile(use_cpu=not on_gpu, use_device="cuda" if on_gpu else None, use_kineto=True) as profiler:
        run()
    work.between()
    spent = dict.fromkeys(KINDS, 0.0)
    for name, milliseconds in (_on_a_gpu(profiler) if on_gpu else _on_a_cpu(profiler)).items():
        spent[kind_of(name)] += milliseconds / ITERATIONS
    return spent


def _on_a_gpu(profiler: profile) -> dict[str, float]:
    """Name -> ms of all its launches."""
    spent: defaultdict[str, float] = defaultdict(float)
    for began, ended, name in gpu_intervals(profiler):
        spent[name] += (ended - began) / 1e6
    return spent


def _on_a_cpu(profiler: profile) -> dict[str, float]:
    """Name -> ms of all its calls, without the operators that they call."""
    spent: defaultdict[str, float] = defaultdict(float)
    for event in profiler.function_events:
        spent[event.name] += event.self_cpu_time_total / 1e3
    return spent


def records(timed: list[tuple[Result, Subject]], mode: str) -> list[Record]:
    """One for each case, of its forward+backward, or of its forward where it has no backward."""
    lines = []
    for result, subject in timed:
        shown = BOTH if subject.has(BOTH) else FORWARD
        if result.status == "ok" and mode == shown:
            spent = split(subject, mode)
            lines.append(record(result, SPLIT, "ms", [sum(spent.values())], mode, parts=spent))
    return lines
