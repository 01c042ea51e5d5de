"""Which kernels ran, and whether they prove the mechanism that a step claims.

A kernel's name is the one witness that cannot be talked into anything: a fallback to FP32, to unfused attention or to
uncompiled code gives the right numbers, and shows here.
"""
import errno
import gzip
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")      # the profiler's own chatter; read when it first starts

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

# Inductor names a kernel of its own by all operators whose passes it fuses: one that makes a mask, by attention.
NOT_COMPILED = r"^(?!triton_).*"
# First match decides. GPU names as seen on Hopper with CUDA 13 (nvjet: cuBLAS's own; q and r are E4M3 and E5M2, h is
# FP16, t is BF16); xmma, cutlass and s16816 are older GPUs' and libraries'. Names on a CPU are operators.
KINDS = {
    "FP8 matmul with GELU": r"nvjet_\w*?_q[qr]\w*gelu",
    "FP8 matmul": r"nvjet_\w*?_q[qr]|gemm.*(e4m3|e5m2)|(e4m3|e5m2).*gemm",
    "16-bit matmul": r"nvjet_\w*?_[ht][hst][hst]_|[hs](16816|884)gemm|h1688|fp16.*gemm|bf16.*gemm|gemm.*(bf16|f16f16)"
                     r"|gemv.*(__half|bfloat16)",
    "TF32 matmul": r"gemm.*tf32|tf32.*gemm|s1688",
    "FP32 matmul": r"ffma|simt_sgemm|[^a-z]sgemm|gemmSN|gemv|gemm.*f32f32_f32f32",
    "FP64 matmul": r"dgemm|d884|gemm.*f64",
    "fused attention in FP8": r"sdpa.*(e4m3|e5m2|fp8|_f8)",
    "CUDA C++ attention": r"namespace\)::attention_(forward|backward)<",
    "cuDNN attention": NOT_COMPILED + r"(cudnn_generated.*sdpa|cudnn.*(flash|mha|fmha))",
    "FlashAttention": NOT_COMPILED + r"(flash_(fwd|bwd)|flash::|_scaled_dot_product_flash_attention)",
    "memory-efficient attention": NOT_COMPILED + r"(fmha_cutlass|mem_eff|_efficient_attention)",
    "softmax": r"softmax",
    "mask": r"masked_fill",
    "LayerNorm to FP8": r"ln_fwd.*fp8_e4m3",
    "cuDNN LayerNorm": r"^ln_\w*fwd\w*$",             # compiled at run time: its name tells no types
    "GELU to FP8": r"gelu.*fp8_e4m3",
    "cast to FP8": r"(unary_kernel|cast_transpose).*fp8_e4m3",
    "compiled": r"^triton_|CompiledFxGraph",
    "matmul": r"gemm|nvjet|cutlass.*Kernel|^aten::(mm|addmm|bmm|baddbmm)$|mkldnn.*(matmul|linear)",
}
FUSED_ATTENTION = ("cuDNN attention", "FlashAttention", "memory-efficient attention", "fused attention in FP8")
SERIES_ATTENTION = "CUDA C++ attention"               # of benchmarks/kernels/cuda/attention
BY_HAND = "by hand"            # no fused kernel computes the attention, if there is one
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in KINDS.items()}


@dataclass(frozen=True)
class Evidence:
    """What one iteration launched. `kernels`: name -> how often, on a CPU the operators that were called."""
    kernels: Counter
    kinds: Counter
    verdict: str                  # "proven", "unproven" or "refuted"; "n/a" where nothing is claimed
    because: str
    ms: Mapping[str, float] = field(default_factory=dict)      # name -> of all its launches, as they were seen

    @property
    def launches(self) -> int:
        return sum(self.kernels.values())

    @property
    def attention(self) -> str:
        return next((kind for kind in (*FUSED_ATTENTION, SERIES_ATTENTION) if self.kinds[kind]), BY_HAND)


def observe(iteration: Callable, device: torch.device, trace: str | None = None) -> Counter:
    """Run an iteration under the profiler: kernel name -> launches (operators on a CPU)."""
    return Counter(event.name for event in observed(iteration, device, trace))


def ms_by_name(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Name -> what all of them took: a kernel on a GPU; an operator on a CPU, without those that it calls."""
    taken: dict[str, float] = {}
    for event in events:
        us = event.time_range.elapsed_us() if _is_kernel(event) else event.self_cpu_time_total
        taken[event.name] = taken.get(event.name, 0.0) + us / 1e3
    return taken


def observed(iteration: Callable, device: torch.device, trace: str | None = None) -> list[FunctionEvent]:
    """The kernels of an iteration that runs under the profiler (operators on a CPU).

    `trace` names a file for the timeline, in the Chrome format that Perfetto reads.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu and not trace else list(_activities(on_gpu))
    if on_gpu:                             # what only a first iteration launches; a CPU has been through it
        iteration()
    with profile(activities=activities, acc_events=True) as profiler:
        iteration()
        if on_gpu:
            torch.cuda.synchronize()
    if trace:
        _save_timeline(profiler, trace)
    if on_gpu:
        return [event for event in profiler.events() if _is_kernel(event)]
    return [event for event in profiler.events() if event.name.startswith(("aten::", "## Call CompiledFxGraph"))]


def _is_kernel(event: FunctionEvent) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA


def _save_timeline(profiler, path: str) -> None:
    """Write it into what is at `path`, which the profiler itself would replace. Raises OSError, where it is silent."""
    with tempfile.TemporaryDirectory(prefix="timeline-") as folder:
        written = Path(folder) / "timeline.json"
        profiler.export_chrome_trace(str(written))
        text = written.read_bytes() if written.exists() else b""
        if not text.rstrip().endswith(b"}"):
            raise OSError(errno.ENOSPC, f"the profiler left no whole timeline under {tempfile.gettempdir()}")
        Path(path).write_bytes(gzip.compress(text) if path.endswith(".gz") else text)


def _activities(on_gpu: bool):
    yield ProfilerActivity.CPU
    if on_gpu:
        yield ProfilerActivity.CUDA


def kind_of(name: str) -> str | None:
    """What a kernel is, by its name; None where the name says nothing that a claim rests on."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), None)


@dataclass(frozen=True)
class Claims:
    """What must and what must not be among the kernels of one iteration."""
    needed: list[tuple[str, ...]]          # of each tuple one kind
    forbidden: list[str]
    fewer_launches: bool = False           # than the same block has under torch.compiler.set_stance("force_eager")
    writes_fp8: bool = False               # LayerNorm and GELU write FP8 themselves
    remark: str = ""                       # what a reader must know of the proof


def judge(kernels: Counter, claims: Claims | None, uncompiled_launches: int | None = None, emulated: bool = False
          ) -> Evidence:
    """Whether what ran proves the claims.

    A forbidden kernel refutes. A needed one that is not seen leaves the claims unproven, since another GPU's libraries
    may use names not known here; so do launches that the compiler did not make fewer. Without claims what ran is only
    counted.
    """
    kinds: Counter = Counter()
    for name, count in kernels.items():
        if kind := kind_of(name):
            kinds[kind] += count

    def evidence(verdict: str, because: str) -> Evidence:
        return Evidence(kernels, kinds, verdict, because)

    if claims is None:
        return evidence("n/a", "nothing is claimed")
    if emulated:
        return evidence("unproven", "emulated")
    if ran := [kind for kind in claims.forbidden if kinds[kind]]:
        names = sorted(name[:60] for name in kernels if kind_of(name) in ran)
        return evidence("refuted", f"{', '.join(ran)} ran: {', '.join(names[:3])}")
    launches = sum(kernels.values())
    if claims.fewer_launches and uncompiled_launches is not None and launches >= uncompiled_launches:
        return evidence("unproven", f"{launches} launches, and {uncompiled_launches} without the compiler")
    if claims.writes_fp8 and kinds["cuDNN LayerNorm"] and _casts_apart(kinds):
        return evidence("unproven", f"{kinds['cast to FP8']} casts to FP8: one may be of LayerNorm's output")
    seen, missing = [], []
    for alternatives in claims.needed:
        ran = [kind for kind in alternatives if kinds[kind]]
        if ran:
            seen.append(f"{kinds[ran[0]]} {ran[0]}")
        else:
            missing.append(" or ".join(alternatives))
    if missing:
        return evidence("unproven", f"not seen: {', '.join(missing)}")
    return evidence("proven", ", ".join(seen) + claims.remark)


def _casts_apart(kinds: Counter) -> bool:
    """Whether more tensors are cast to FP8 by kernels of their own than should be, where LayerNorm writes FP8 itself.

    Those are the four weights, unless they are kept, and attention's output; with attention in FP8 one more.
    """
    casts = kinds["cast to FP8"]
    return (casts - 4 if casts > 4 else casts) > 2
