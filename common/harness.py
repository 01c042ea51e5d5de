"""Runs one block: build, calibrate, compile, check, time and observe it."""
import atexit
import contextlib
import functools
import getpass
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import device as machine
from . import evidence, graph, oracle, parameters, roofline, te_emulation, timing
from .config import BlockConfig, dtype_name
from .report import Compilation, Report, Row

NOT_A_GPU = "CUDA graphs need a GPU"


class Failed(Exception):
    """A check failed: the run ends with status `failed` and this reason, and what was wrong is not timed."""


@dataclass
class Subject:
    """A block that was built, calibrated and checked, with what it is called on: x and dy are [B, S, E]."""
    block: torch.nn.Module
    x: torch.Tensor
    dy: torch.Tensor
    kinds: roofline.Arithmetic
    result: Report

    def iterations(self, backward: bool):
        """As the function of that name."""
        return iterations(self.block, self.x, self.dy, backward)


def prepare(build: Callable, step: int, parameter_dtype: torch.dtype, device: torch.device, seed: int,
            result: Report, say: Callable[[str], None], time_compiler: bool = True) -> Subject:
    """Build a block by `build(config, values, device)`, compile, calibrate and check it; fills `result` as it goes.

    `step` is the step whose arithmetic it has. `say` is told what is going on. Call `use_private_caches` first; the
    compiler's time is cold for the first block of a process alone. A block whose y or residual is not in the dtype that
    a step's would be in names its own in `output_dtype` and `residual_dtype`. Raises Failed where the check fails,
    NotImplementedError with the reason where this machine can't run it.
    """
    config, kinds = result.config, roofline.arithmetic(result.config, step, parameter_dtype, device)
    result.matmul = kinds.matmul
    say("building")
    seed *= 3                                    # parameters, x and dy have one each, and no other run has the same
    values = {name: value.to(parameter_dtype, copy=True)
              for name, value in _seeded(config.replace(amp_dtype=None), seed).items()}
    block = build(config, values, device)
    shape = (config.batch_size, config.seq_len, config.hidden_size)
    x, dy = (torch.randn(shape, generator=torch.Generator().manual_seed(seed + n)).to(device, parameter_dtype)
             for n in (1, 2))
    dy = dy.to(getattr(block, "output_dtype", dy.dtype))
    subject = Subject(block, x, dy, kinds, result)
    result.engine = getattr(block, "engine", "PyTorch")
    result.emulated = result.engine.startswith("emulated")
    residual = config.amp_dtype if step == 4 and config.amp_dtype else parameter_dtype
    result.residual = dtype_name(getattr(block, "residual_dtype", residual))
    if (compiled(block) or (step == 4 and device.type == "cuda")) and (missing := machine.compiler_missing(device)):
        raise NotImplementedError(missing)
    if compiled(block) and time_compiler:
        say("compiling, cold and warm")
        result.compilation = compilation_time(block, x, dy)
    if step == 4 and config.amp_dtype is not None and hasattr(block, "fresh"):       # torchao's scales are dynamic
        say("calibrating FP8 scales")
        calibrate(block, x, dy)
    say("checking against FP64")
    check(block, x, values, result)
    return subject


@functools.lru_cache(maxsize=1)                # the same for all cases of a study, and 200 million of them take seconds
def _seeded(config: BlockConfig, seed: int) -> dict[str, torch.Tensor]:
    return parameters.seeded(config, seed)


@contextlib.contextmanager
def judged(result: Report, out_of_memory: Callable[[], str]):
    """Turn what a block can fail by into the status and reason of `result`; any other error passes."""
    try:
        yield
    except Failed as error:
        result.status, result.reason = "failed", str(error)
    except NotImplementedError as error:
        result.status, result.reason = "skipped", str(error)
    except (torch.OutOfMemoryError, MemoryError):
        result.status, result.reason = "oom", out_of_memory()
    except RuntimeError as error:
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):    # in a clause above, Ctrl-C would import it too
            result.status, result.reason = "failed", f"torch.compile: {str(error).strip().splitlines()[0]}"
        elif is_out_of_memory(error):
            result.status, result.reason = "oom", out_of_memory()
        else:
            raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is why it was raised: the CPU's allocator and cuBLAS have no exception of their own."""
    return (isinstance(error, torch.OutOfMemoryError | MemoryError)
            or re.search("can't allocate memory|out of memory|ALLOC_FAILED", str(error)) is not None)


def in_a_line(error: BaseException) -> str:
    """Kind and first line of an error of another library."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def compile_in_place(block: torch.nn.Module) -> None:
    """As step 3 does it: the whole graph, static shapes."""
    torch._dynamo.config.recompile_limit = 1024              # its 8 count over all blocks of a process
    block.compile(fullgraph=True, dynamic=False)


def compiled(module: Callable) -> bool:
    """Whether a module or function went through torch.compile, in place or not."""
    return (getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_torchdynamo_orig_callable")
            or isinstance(module, torch._dynamo.eval_frame.OptimizedModule))


def holds_compiled(module: Callable) -> bool:
    """Whether it was compiled, or has a compiled function among its attributes, as step 4 has."""
    return compiled(module) or any(map(compiled, getattr(module, "__dict__", {}).values()))


def iterations(block: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, backward: bool):
    """(one iteration, what happens between two): forward under no_grad, or forward+backward with the input's gradient.

    The iteration returns y. Gradients are set to None between iterations, outside the timed region: accumulating them
    would add a read and a write of each.
    """
    if not backward:
        def forward():
            with torch.no_grad():
                return block(x)
        return forward, timing.nothing
    x.requires_grad_()

    def forward_backward():
        y = block(x)
        y.backward(dy)
        return y.detach()                   # y itself would keep the graph alive, and a capture would trip over it

    def clear_gradients():
        x.grad = None
        for parameter in block.parameters():
            parameter.grad = None
    return forward_backward, clear_gradients


def calibrate(block: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Three forward+backwards: delayed scaling starts with every scale at 1. Raises Failed if one in use still is."""
    iteration, between = iterations(block, x.detach().clone(), dy, backward=True)
    for _ in range(3):
        between()
        try:
            iteration()
        except ValueError as error:         # Transformer Engine has no kernel for FP8 attention at this shape
            if not block.config.fp8_attention:
                raise
            raise NotImplementedError(str(error).strip().splitlines()[0]) from None
    between()
    if block.fresh is not None:
        block.fresh = False                 # --fp8-weights cached: from here on, the weights of the last call
    scales = _used_scales(block)
    if not scales or any((scale[used] == 1).any() for scale, used in scales):
        raise Failed("an FP8 scale is still 1 after three forward+backwards: delayed scaling is not calibrated")


def _used_scales(block: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(scale, which of its entries some tensor has gone through) of every FP8 state that has been used."""
    seen = [(scale, amax_history.amax(0) > 0) for scale, amax_history in te_emulation.fp8_state(block)]
    return [(scale, used) for scale, used in seen if used.any()]


def _inductor_folder() -> str:
    """Where Inductor keeps its files unless told otherwise; asking it would take the seconds of its import."""
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ModuleNotFoundError, OSError):          # a container's user without a name
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")


def use_private_caches() -> None:
    """Point Inductor and Triton at a new, empty folder that this process removes when it ends.

    Their default is a predictable path that all users share, and what lies in it gets executed. One thing stays there:
    the C++ headers that Inductor precompiles for a CPU, once for each user and compiler; where somebody else could have
    put them, it does without.
    """
    caches = tempfile.mkdtemp(prefix="inductor-")          # mode 0700
    atexit.register(shutil.rmtree, caches, ignore_errors=True)
    for number in (signal.SIGTERM, signal.SIGHUP):         # of `timeout`, a scheduler, a closed terminal: no atexit
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
    os.environ["TRITON_CACHE_DIR"] = os.path.join(caches, "triton")
    folder = _inductor_folder()
    if not (machine.own_folder(folder) and machine.own_folder(os.path.join(folder, "precompiled_headers"))):
        torch._inductor.config.cpp_cache_precompile_headers = False


def compilation_time(block: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Compilation:
    """The time of the first calls of both passes: cold, and once more in this process from the caches that filled.

    Call `use_private_caches` first: cold means that they are empty.
    """
    seconds = []
    for _ in ("cold", "warm"):
        torch._dynamo.reset()
        start = time.perf_counter()
        for backward in (False, True):
            iteration, between = iterations(block, x.detach().clone(), dy, backward)
            between()
            iteration()
            between()
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Compilation(*seconds)


def check(block: torch.nn.Module, x: torch.Tensor, values: dict[str, torch.Tensor], result: Report) -> None:
    """Compare with FP64 and record the errors; raise Failed where one is over its gate. Dropout is off meanwhile."""
    training = block.training
    block.train(training and block.config.dropout == 0)
    both = oracle.checks(block, x, values)
    block.train(training)
    kind = f"{result.matmul}, emulated" if result.emulated and result.matmul == "float8" else result.matmul
    found = {}                                             # name -> (error, gate) of the run that is worse
    for errors, tokens in zip(both, (x.size(1), x.size(0) * x.size(1)), strict=True):
        for name, error in errors.items():
            gate = oracle.gate(kind, name, x, tokens)
            if name not in found or error / gate > found[name][0] / found[name][1]:
                found[name] = error, gate
    worst = max((name for name in found if name.startswith("gradient of ")), key=lambda n: found[n][0] / found[n][1])
    result.worst_parameter = worst.removeprefix("gradient of ")
    result.errors = {"output": (found["output"][0], None), "branch": found["branch"],
                     "input gradient": found["input gradient"], "parameter gradient": found[worst]}
    for what, (error, gate) in result.errors.items():
        which = f"{what} of {result.worst_parameter}" if what == "parameter gradient" else what
        if not math.isfinite(error):
            hint = ": float16 overflows beyond 65504, try --amp-dtype bfloat16" if result.matmul == "float16" else ""
            raise Failed(f"the {which} is missing or not finite{hint}")
        if gate is not None and error > gate:
            raise Failed(f"the {which} is off by {error:.1e} against FP64, the gate is {gate:.1e}")


def time_row(block: torch.nn.Module, x: torch.Tensor, iteration: Callable, between: Callable, launch: str, row: Row,
             result: Report, rule: timing.StopRule, progress: Callable | None = None) -> None:
    """Fill `row` with samples, or with the reason why there are none."""
    on_gpu = x.is_cuda
    if launch == "graph" and not on_gpu:
        row.reason = NOT_A_GPU
        return
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(x.device)
    if launch == "graph":
        replay = graph.verified(block, x, iteration, between, row, result)
        if replay is None:
            return
        iteration, between = replay, timing.nothing
    for _ in range(2):
        between()
        iteration()
    if launch == "eager":
        row.peak_bytes = machine.memory_peak(x.device)
    with compiled_for_good(block):
        row.timing = timing.measure(iteration, timing.clock_for(x.device), between, rule, progress,
                                    timing.calibration(x.device))
    if on_gpu:
        row.state = under_load(x.device, iteration, between, 3)
        throttled = {*result.state.get("throttled", ()), *row.state.get("throttled", ())}
        result.state = row.state | ({"throttled": sorted(throttled)} if "throttled" in row.state else {})
        if launch == "eager":
            row.enqueue_ms = timing.enqueue_ms(iteration, between)
    between()


@contextlib.contextmanager
def compiled_for_good(*blocks: Callable):
    """Raise Failed where one of these is compiled again meanwhile: what was timed would hold a compilation."""
    stance = torch.compiler.set_stance("fail_on_recompile") if any(map(holds_compiled, blocks)) else None
    with stance or contextlib.nullcontext():
        try:
            yield
        except RuntimeError as error:
            if "recompile" in str(error):
                raise Failed("the block was compiled again after warm-up: its timings are void") from None
            raise


def under_load(device: torch.device, iteration: Callable, between: Callable, count: int) -> dict:
    """The machine's state late in `count` iterations, with a fifth of them, or two, still to run: an idle GPU is never
    throttled, and its clocks need a moment to follow the work."""
    most = None
    for number in range(count):
        if number == count - max(2, count // 5) and device.type == "cuda":
            most = torch.cuda.Event()
            most.record()
        between()
        iteration()
    if most:
        most.synchronize()                                 # the host is ahead by what the launch queue holds
    found = machine.state(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found


def observe(step: int | None, block: torch.nn.Module, device: torch.device, iteration: Callable, between: Callable,
            mode: str, result: Report, trace: str | None = None) -> None:
    """See which kernels ran, and whether they prove what `step` claims (None: a peer, which claims nothing).

    For a compiled block also what it would launch, and take, without the compiler.
    """
    def clean_iteration():
        between()
        iteration()
    backward = mode == "forward+backward"
    try:
        kernels = evidence.observe(clean_iteration, device, trace)
    except OSError as error:
        raise Failed(f"--profile {trace}: {error.strerror}") from None
    uncompiled = None
    if compiled(block) and step is not None:
        with torch.compiler.set_stance("force_eager"):
            uncompiled = sum(evidence.observe(clean_iteration, device).values())
            if backward and result.study == "step":
                clock = timing.clock_for(device)
                samples = clock.sample(iteration, between, 1)
                if samples[0] < 500:                             # ms; ten slower ones would take long
                    samples += clock.sample(iteration, between, 9)
                result.compilation.uncompiled = samples
    between()
    result.evidence[mode] = evidence.judge(kernels, step, result.matmul, device, uncompiled, result.emulated)
