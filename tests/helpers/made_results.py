"""What runs found, made up: a CPU's, an H200's, and runs that ended early."""
from collections import Counter
from dataclasses import replace

from common import PRESETS, steps
from common.block.evidence import Evidence
from common.block.workload import COPY
from common.report.result import Compilation, Result, Row
from common.runtime.energy import Energy
from common.runtime.iteration import LAUNCHES, MODES
from common.runtime.peaks import BURST, DATA_SHEET, SUSTAINED, Sustained
from common.runtime.pieces import Work
from common.runtime.timing import Timing

CPU_NAME = "A CPU whose name is as long as makers of CPUs like it, 64-Core Processor @ 3.70GHz"
CPU = {"device": "cpu", "name": CPU_NAME, "cpu_model": CPU_NAME, "cpu_threads": 2, "gpu_uuid": None,
       "torch": "2.15.0+cu132", "cuda": None, "cudnn": None, "driver": None, "triton": "3.9.0",
       "transformer_engine": None, "python": "3.12.3", "git": "f0fad18+1a2b3c4d", "sources": 8 * "0f1e2d3c"}
H200 = CPU | {"device": "cuda", "name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132,
              "memory_gib": 139.8, "gpu_uuid": "GPU-5f6e7d8c-0001-0002-0003-000000000004", "cuda": "13.0",
              "cudnn": 91900, "driver": "580.159.03", "transformer_engine": "2.20.2+cu13.torch2.11.0"}
STATE = {"load_average": 0.5, "sm_mhz": 1980, "sm_mhz_max": 1980, "memory_mhz": 3201, "power_w": 600.0,
         "power_limit_w": 700.0, "temperature_c": 61, "throttled": []}
SAMPLES = [7.2, 7.1, 7.4, 7.3, 7.1, 7.2]
ROUNDS = [0, 0, 0, 1, 1, 1]
OFFSETS = [1.5, 1.5074, 1.5149, 2.25, 2.25750000001, 2.265]           # s; what comes of rounding is in records too
KERNELS = {"nvjet_sm90_hsh_192x192_64x4_2x1_v_bz_coopB_bias_TNN": 4, "cudnn_generated_fort_native_sdpa_flash_fprop": 1}
EMULATED = "emulated (Transformer Engine does not import: FileNotFoundError: Could not find shared object file)"
NO_COMPILER = "no C++ compiler found (g++, clang++): install g++, or name one in the variable CXX"


LIMITS = {SUSTAINED: {"matmul": 5.0, "attention": 1.0, "memory": 0.5},
          BURST: {"matmul": 4.0, "attention": 0.5, "memory": 0.5},
          DATA_SHEET: {"matmul": 3.0, "attention": 0.5, "memory": 0.4}}
ENERGY = Energy(joules=4.8, watts=666.7, sampled_watts=670.0, seconds=1.1)


def row(**changes) -> Row:
    """Of a GPU, eager: a median of 7.2 ms, 1.2 TFLOP, 16384 tokens."""
    timed = Timing(SAMPLES, True, "CUDA events", {"copy": [0.5, 0.6]}, ROUNDS, OFFSETS)
    return replace(Row(timed, flops=1.2e12, tokens=16384, limits=dict(LIMITS), peak_bytes=3 * 2**30,
                       enqueue_ms=0.9, energy=ENERGY), **changes)


def sustained(name: str, call=None, rate: float = 1e12) -> Sustained:
    """That rate of FLOPs, or 0.1 TB/s; in rounds such work is never faster."""
    return Sustained(1e11 if name == COPY else rate, Work(f"made-up {name}", call, 1e-9), 1.0, True)


PEAKS = {SUSTAINED: "float16 660 TFLOP/s; copy 4.24 TB/s", DATA_SHEET: "n/a: not known here",
         BURST: "float16 790 TFLOP/s; copy 4.30 TB/s (read + written)"}


def finished(gpu: bool, **changes) -> Result:
    """A run of step 2 that came to its end."""
    rows = {}
    for mode in MODES:
        for launch in LAUNCHES:
            if gpu:
                rows[mode, launch] = row()
            elif launch == "eager":
                rows[mode, launch] = row(enqueue_ms=None, energy=None)
            else:
                rows[mode, launch] = Row(reason="CUDA graphs need a GPU", limits=dict(LIMITS))
    kinds = Counter({"16-bit matmul": 4, "cuDNN attention": 1})
    seen = Evidence(Counter(KERNELS), kinds, "proven", "4 16-bit matmul, 1 cuDNN attention")
    step = steps.load(2)
    result = Result(
        step.name, PRESETS["te-tutorial" if gpu else "cpu"], "float32", H200 if gpu else CPU, step=step.number,
        traits=step.traits, matmul="float16", peaks=PEAKS,
        errors={"output": (3e-4, None), "branch": (5e-4, 1e-3), "input gradient": (5e-4, 3e-3),
                "parameter gradient": (9e-4, 3e-3)},
        worst_parameter="attn.proj.weight", rows=rows, evidence=dict.fromkeys(MODES, seen),
        clock="CUDA events" if gpu else "perf_counter", state=STATE if gpu else {"load_average": 0.5})
    return replace(result, **changes)


def emulated() -> Result:
    """A run of step 4 on a CPU: there are times, and no rates."""
    step, result = steps.load(4), finished(gpu=False)
    for timed in result.rows.values():
        timed.flops, timed.tokens, timed.limits = 0.0, 0, {}
    return replace(result, name=step.name, step=step.number, traits=step.traits, matmul="float8", engine=EMULATED,
                   emulated=True, residual="bfloat16", peaks={})


def ended(status: str, reason: str, gpu: bool = True) -> Result:
    """A run of step 0 that ended before anything was measured."""
    step = steps.load(0)
    return Result(step.name, PRESETS["gpt2"], "float32", H200 if gpu else CPU, step=step.number, traits=step.traits,
                  status=status, reason=reason)


def without_graphs() -> Result:
    """A run on a GPU of what can't be captured."""
    result = finished(gpu=True, compilation=Compilation(14.5, 2.3, [9.0]))
    for mode in MODES:
        reason = "graph: " + "CUDA error: operation not permitted when capturing " * 3
        result.rows[mode, "graph"] = Row(reason=reason)
    return result


RESULTS = {
    "CPU": finished(gpu=False),
    "H200": finished(gpu=True),
    "H200, a graph that can't be captured": without_graphs(),
    "H200, throttled beside others": finished(
        gpu=True, state=STATE | {"throttled": ["power cap", "software thermal"]},
        neighbours=[f"python (pid {pid})" for pid in range(70000, 70009)]),
    "CPU, compiled": finished(gpu=False, compilation=Compilation(14.5, 2.3, [7.0])),
    "CPU, emulated": emulated(),
    "skipped": ended("skipped", NO_COMPILER, gpu=False),
    "oom": ended("oom", "133.1 of 139.8 GiB in use at the peak; --batch-size 16 --seq-len 1024 fits"),
    "failed": ended("failed", "the gradient of mlp.fc.bias is off by 1.0e+00 against FP64, the gate is 3.0e-03"),
}
