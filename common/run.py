"""What every step does when it is run: parse, build, check, time, look at the kernels, report."""
import argparse
import atexit
import contextlib
import logging
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from tqdm import tqdm

from . import device as machine
from . import evidence, oracle, parameters, report, roofline, steps, timing
from .config import DTYPES, FP8_WEIGHTS, PRESETS, BlockConfig, default_preset
from .report import Compilation, Report, Row

EXIT = {"ok": 0, "failed": 1, "usage": 2, "oom": 3, "skipped": 4, "interrupted": 130}
NOT_A_GPU = "CUDA graphs need a GPU"


class Failed(Exception):
    """A check failed: the run ends with status `failed` and this reason, and what was wrong is not timed."""


def run(script: str, argv: list[str] | None = None) -> None:
    """The main program of the step in file `script`; ends the process with one of `EXIT`."""
    sys.exit(main(Path(script), argv))


def main(script: Path, argv: list[str] | None = None) -> int:
    step = int(script.name[0])
    options, config, output = _parse(script, step, argv)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)       # warns of a missing GPU on a CPU
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")   # sets it
    result = Report(script.stem, config, str(options.parameter_dtype).removeprefix("torch."),
                    machine.facts(options.device))
    try:
        try:
            _run(step, options, config, result, output)
        except Failed as error:
            result.status, result.reason = "failed", str(error)
        except NotImplementedError as error:
            result.status, result.reason = "skipped", str(error)
        except (torch.OutOfMemoryError, MemoryError) as error:
            result.status, result.reason = "oom", _out_of_memory(step, options, config, error)
        if result.status != "ok":
            output.write([report.record(result, "status", "", [], "run")])
    except KeyboardInterrupt:
        print(f"\n{script.name}: interrupted; {output.count} finished records kept", file=sys.stderr)
        return EXIT["interrupted"]
    except OSError as error:
        print(f"{script.name}: error: --json {output.path}: {error.strerror}; {output.count} records were written",
              file=sys.stderr)
        return EXIT["failed"]
    print(report.card(result))
    if result.status != "ok":
        print(f"{script.name}: {result.status}: {result.reason}", file=sys.stderr)
    return EXIT[result.status]


def _parse(script: Path, step: int, argv: list[str] | None) -> tuple[argparse.Namespace, BlockConfig, report.Output]:
    """The command line, checked before anything is allocated. A mistake ends the process with one line and status 2."""
    parser = argparse.ArgumentParser(prog=script.name, formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                     description=(sys.modules["__main__"].__doc__ or "").strip().split("\n")[0],
                                     epilog="Exit status: 0 ok, 1 failed, 2 usage, 3 out of memory, 4 skipped, "
                                            "130 interrupted.")
    parser.error = lambda message: _usage(script, message)
    parser.add_argument("--preset", choices=PRESETS, help="named shape (default: te-tutorial on a GPU, cpu on a CPU)")
    for name, letter in (("batch-size", "B"), ("seq-len", "S"), ("hidden-size", "E"), ("num-heads", "H"),
                         ("ffn-hidden-size", "F")):
        parser.add_argument(f"--{name}", type=int, metavar=letter, help="in place of the preset's")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="on the attention weights, in training")
    parser.add_argument("--amp-dtype", choices=("auto", "float16", "bfloat16", "none"), default="auto",
                        help="autocast's dtype; auto: float16 on a GPU, bfloat16 on a CPU; none: no autocast, no FP8")
    parser.add_argument("--param-dtype", choices=("float32", "amp"), default="float32",
                        help="amp: parameters, x and y in 16 bits too; compare it with its like only")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run")
    parser.add_argument("--launch", choices=("eager", "graph", "both"), default="both",
                        help="launch kernel by kernel, replay a CUDA graph, or time both")
    parser.add_argument("--max-seconds", type=float, default=timing.StopRule.max_seconds, metavar="S",
                        help="at most this long for each row of samples")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and inputs")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line per metric")
    parser.add_argument("--profile", metavar="FILE", help="write a timeline of one forward+backward for Perfetto")
    if step == 4:
        parser.add_argument("--fp8-weights", choices=FP8_WEIGHTS, default="per-call",
                            help="quantize weights at every call, reuse the last call's, or keep them in FP8")
        parser.add_argument("--fp8-attention", action="store_true", help="attention in FP8 too")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        _usage(script, "--device cuda: no GPU is available to torch; run without it for the CPU")
    options.device = torch.device(options.device if options.device != "auto"
                                  else "cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = options.device.type == "cuda"
    if options.launch == "graph" and not on_gpu:
        _usage(script, f"--launch graph: {NOT_A_GPU}; use --launch eager")
    if not options.max_seconds > 0:
        _usage(script, f"--max-seconds {options.max_seconds:g}: give a positive number of seconds")
    amp = {"auto": torch.float16 if on_gpu else torch.bfloat16, "none": None}
    changes = {name: getattr(options, name) for name in
               ("batch_size", "seq_len", "hidden_size", "num_heads", "ffn_hidden_size")}
    changes = {name: value for name, value in changes.items() if value is not None}
    if "hidden_size" in changes:
        changes.setdefault("ffn_hidden_size", None)                       # 4 E of the new width
    try:
        config = PRESETS[options.preset or default_preset(options.device.type)].replace(
            **changes, dropout=options.dropout, fp8_weights=getattr(options, "fp8_weights", "per-call"),
            fp8_attention=getattr(options, "fp8_attention", False),
            amp_dtype=amp.get(options.amp_dtype, DTYPES.get(options.amp_dtype)))
        if step == 4 and config.amp_dtype is not None:
            config.check_fp8()
    except ValueError as error:
        _usage(script, str(error))
    if options.param_dtype == "amp" and config.amp_dtype is None:
        _usage(script, "--param-dtype amp: there is no 16-bit dtype with --amp-dtype none")
    options.parameter_dtype = config.amp_dtype if options.param_dtype == "amp" else torch.float32
    try:
        output = report.Output(options.json)
    except OSError as error:
        _usage(script, f"--json {options.json}: {error.strerror}")
    try:
        if options.profile:
            with open(options.profile, "a"):
                pass
    except OSError as error:
        _usage(script, f"--profile {options.profile}: {error.strerror}")
    return options, config, output


def _usage(script: Path, message: str):
    print(f"{script.name}: error: {message}", file=sys.stderr)
    sys.exit(EXIT["usage"])


def _run(step: int, options: argparse.Namespace, config: BlockConfig, result: Report, output: report.Output) -> None:
    """Build, check, time and observe; fills `result` as it goes and writes each record once it is final."""
    device = options.device
    progress = tqdm(bar_format="{desc}", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)
    needed = parameters.memory_needed(config, step, device)
    if device.type == "cpu" and needed > machine.memory_total(device):       # Linux would kill the process instead
        raise MemoryError(f"about {needed / 2**30:.0f} GiB needed")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    progress.set_description_str("building")
    values = parameters.seeded(config, options.seed)
    values = {name: value.to(options.parameter_dtype) for name, value in values.items()}
    block = steps.load(step).build(config, values, device)
    x, dy = (torch.randn(config.batch_size, config.seq_len, config.hidden_size,
                         generator=torch.Generator().manual_seed(options.seed + n)).to(device, options.parameter_dtype)
             for n in (1, 2))
    result.engine = getattr(block, "engine", "PyTorch")
    result.emulated = result.engine.startswith("emulated")
    result.neighbours = machine.neighbours(device)
    kinds = roofline.arithmetic(config, step, options.parameter_dtype, device)
    result.matmul = kinds.matmul
    residual = config.amp_dtype if step == 4 and config.amp_dtype else options.parameter_dtype
    result.residual = str(residual).removeprefix("torch.")

    if compiled(block):
        missing = machine.compiler_missing(device)
        if missing:
            raise NotImplementedError(missing)
        progress.set_description_str("compiling, cold and warm")
        result.compilation = _compile(block, x, dy)
    if step == 4 and config.amp_dtype is not None:
        progress.set_description_str("calibrating FP8 scales")
        calibrate(block, x, dy)
    progress.set_description_str("checking against FP64")
    _check(block, x, values, result)
    output.write(report.check_records(result))

    if not result.emulated:
        progress.set_description_str("measuring this machine's peaks")
        peaks = roofline.measure_peaks(config, kinds, device)
        result.peaks = ", ".join(f"{name} {rate / 1e12:.{0 if rate > 1e13 else 2}f} TFLOP/s"
                                 for name, rate in sorted(peaks.flops.items()))
        result.peaks += f"; copy {peaks.bandwidth / 1e12:.2f} TB/s (read + written)"
    for mode in report.MODES:
        backward = mode == "forward+backward"
        iteration, between = iterations(block, x, dy, backward)
        for launch in report.LAUNCHES:
            if options.launch not in (launch, "both"):
                result.rows[mode, launch] = Row(reason=f"--launch {options.launch}")
                continue
            row = Row(flops=roofline.flops(config, backward), tokens=config.tokens)
            if not result.emulated:
                row.limit_ms = roofline.limit_ms(config, kinds, peaks, backward)
            result.rows[mode, launch] = row
            _time(block, iteration, between, launch, row, options, x, result,
                  lambda count, ms, what=f"{mode}, {launch}": progress.set_description_str(
                      f"{what}: {count} samples, {ms:.3g} ms"))
        result.clock = timing.clock_for(device).name
        result.state = machine.state(device)
        progress.set_description_str(f"{mode}: which kernels run")
        _observe(step, block, iteration, between, mode, options, result)
        output.write(report.row_records(result, mode))
        if result.evidence[mode].verdict == "refuted":
            raise Failed(f"{mode} did not run as step {step} claims: {result.evidence[mode].because}")
    progress.close()


def compiled(block: torch.nn.Module) -> bool:
    """Whether the block has been compiled in place."""
    return block._compiled_call_impl is not None


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
        iteration()
    between()
    if block.fresh is not None:
        block.fresh = False                 # --fp8-weights cached: from here on, the weights of the last call
    for scale, amax_history in fp8_state(block):
        used = amax_history.amax(0) > 0
        if (scale[used] == 1).any():
            raise Failed("an FP8 scale is still 1 after three forward+backwards: delayed scaling is not calibrated")


def fp8_state(block: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(scale, amax_history) of every FP8 module, forward and backward, in Transformer Engine's own layout."""
    states = [module.fp8_meta[key] for module in block.modules() if getattr(module, "fp8_meta", None)
              for key in ("scaling_fwd", "scaling_bwd") if key in module.fp8_meta]
    return [(state.scale, state.amax_history) for state in states if hasattr(state, "amax_history")]


def _compile(block: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Compilation:
    """The time of the first calls of both passes, caches empty, and once more after dropping what is in memory."""
    caches = tempfile.mkdtemp(prefix="inductor-")          # new, so empty; mode 0700: what is in it gets executed
    atexit.register(shutil.rmtree, caches, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
    os.environ["TRITON_CACHE_DIR"] = os.path.join(caches, "triton")
    seconds = []
    for _ in ("cold", "warm"):
        torch._dynamo.reset()
        start = time.perf_counter()
        for backward in (False, True):
            iteration, between = iterations(block, x.detach().clone(), dy, backward)
            between()
            try:
                iteration()
            except (torch._dynamo.exc.BackendCompilerFailed, torch._inductor.exc.InductorError) as error:
                raise Failed(f"torch.compile: {str(error).strip().splitlines()[0]}") from None
            between()
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Compilation(*seconds)


def _check(block: torch.nn.Module, x: torch.Tensor, values: dict, result: Report) -> None:
    """Compare with FP64 and record the errors; raise Failed where one is over its gate. Dropout is off meanwhile."""
    training = block.training
    block.train(training and block.config.dropout == 0)
    errors = oracle.errors(block, x, values)
    block.train(training)
    branch, gradient = oracle.GATES[result.matmul]
    gradients = {name: error for name, error in errors.items() if name.startswith("gradient of ")}
    worst = max(gradients, key=gradients.get)
    result.worst_parameter = worst.removeprefix("gradient of ")
    result.errors = {"output": (errors["output"], None), "branch": (errors["branch"], branch),
                     "input gradient": (errors["input gradient"], gradient),
                     "parameter gradient": (gradients[worst], gradient)}
    for what, (error, gate) in result.errors.items():
        which = f"{what} of {result.worst_parameter}" if what == "parameter gradient" else what
        if not math.isfinite(error):
            hint = ": float16 overflows beyond 65504, try --amp-dtype bfloat16" if result.matmul == "float16" else ""
            raise Failed(f"the {which} is missing or not finite{hint}")
        if gate is not None and error > gate:
            raise Failed(f"the {which} is off by {error:.1e} against FP64, the gate is {gate:.1e}")


def _time(block, iteration, between, launch: str, row: Row, options, x, result: Report, progress) -> None:
    """Fill `row` with samples, or with the reason why there are none."""
    device, clock = options.device, timing.clock_for(options.device)
    on_gpu = device.type == "cuda"
    if launch == "graph" and not on_gpu:
        row.reason = NOT_A_GPU
        return
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if launch == "graph":
        static = {}
        try:
            replay = timing.capture(lambda: static.update(y=iteration()), between)
            _verify_replay(block, replay, iteration, between, static, x, result)
        except RuntimeError as error:
            row.reason = f"graph: {str(error).splitlines()[0]}"
            torch.cuda.synchronize()
            return
        iteration, between = replay, timing.nothing
    rule = timing.StopRule(max_seconds=options.max_seconds)
    stance = torch.compiler.set_stance("fail_on_recompile") if compiled(block) else contextlib.nullcontext()
    for _ in range(2):
        between()
        iteration()
    with stance:
        try:
            row.timing = timing.measure(iteration, clock, between, rule, progress)
        except RuntimeError as error:
            if "recompile" in str(error):
                raise Failed("the block was compiled again after warm-up: its timings are void") from None
            raise
    row.peak_bytes = machine.memory_peak(device)
    if on_gpu and launch == "eager":
        row.enqueue_ms = timing.enqueue_ms(iteration, between)
    between()


def _verify_replay(block, replay, iteration, between, static, x, result: Report) -> None:
    """Replay on a changed input and compare with an eager run of the same: a capture can silently miss work.

    FP8 scales must move with what is replayed. Raises RuntimeError where the graph is not the iteration.
    """
    state = [tensor for pair in fp8_state(block) for tensor in pair]
    kept = [x.detach().clone()] + [tensor.clone() for tensor in state]
    branch_gate, gradient_gate = oracle.GATES[result.matmul]
    try:
        x.detach().normal_()
        results = []
        for call in (replay, iteration):
            torch.cuda.manual_seed(0)                 # the same dropout mask, should there be dropout
            y = call()
            y = (static["y"] if call is replay else y).detach().double()
            results.append((y - x.detach().double(), {name: gradient.double() for name, gradient in
                                                      parameters.gradients(block).items() if gradient is not None}))
            between()
        (captured, captured_gradients), (eager, eager_gradients) = results
        if oracle.relative_error(captured, eager) > branch_gate:
            raise RuntimeError("its replay on a changed input differs from an eager run")
        for name, gradient in eager_gradients.items():
            if oracle.relative_error(captured_gradients.get(name), gradient) > gradient_gate:
                raise RuntimeError(f"the gradient of {name} that it replays differs from an eager run's")
        if eager_gradients and state:
            before = [tensor.clone() for tensor in state]
            x.detach().mul_(2)
            replay()
            if all(torch.equal(old, new) for old, new in zip(before, state, strict=True)):
                raise RuntimeError("FP8 scales do not move when it is replayed")
    finally:
        for tensor, value in zip([x.detach(), *state], kept, strict=True):
            tensor.copy_(value)


def _observe(step: int, block, iteration, between, mode: str, options, result: Report) -> None:
    """See which kernels ran; for a compiled block also what it would launch, and take, without the compiler."""
    def clean_iteration():
        between()
        iteration()
    backward = mode == "forward+backward"
    trace = options.profile if backward else None
    try:
        kernels = evidence.observe(clean_iteration, options.device, trace)
    except OSError as error:
        raise Failed(f"--profile {trace}: {error.strerror}") from None
    uncompiled = None
    if compiled(block):
        with torch.compiler.set_stance("force_eager"):
            uncompiled = sum(evidence.observe(clean_iteration, options.device).values())
            if backward:
                samples = timing.clock_for(options.device).sample(iteration, between, 10)
                result.compilation.uncompiled_ms = statistics.median(samples)
    between()
    result.evidence[mode] = evidence.judge(kernels, step, result.matmul, options.device, uncompiled, result.emulated)


def _out_of_memory(step: int, options: argparse.Namespace, config: BlockConfig, error: BaseException) -> str:
    """One line: the peak reached and a shape that fits."""
    total = machine.memory_total(options.device)
    peak = machine.memory_peak(options.device)
    smaller = parameters.largest_that_fits(config, step, options.device, total)
    fits = f"--batch-size {smaller.batch_size} --seq-len {smaller.seq_len} fits" if smaller else "no batch of it fits"
    return f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB in use at the peak; {fits}"
