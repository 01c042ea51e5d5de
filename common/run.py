"""What every step does when it is run: parse, build, check, time, look at the kernels, report."""
import argparse
import errno
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from tqdm import tqdm

from . import device as machine
from . import harness, parameters, report, roofline, steps, timing
from .config import DTYPES, FP8_WEIGHTS, PRESETS, BlockConfig, default_preset
from .harness import Failed
from .output import Output, WriteError
from .report import Report, Row

EXIT = {"ok": 0, "failed": 1, "usage": 2, "oom": 3, "skipped": 4, "interrupted": 130}


MAX_SECONDS = {"cuda": timing.StopRule.max_seconds, "cpu": 3.0}           # a card should come within a minute
_SIZES = {"batch_size": "B", "seq_len": "S", "hidden_size": "E", "num_heads": "H", "ffn_hidden_size": "F"}


def run(script: str, argv: list[str] | None = None) -> None:
    """The main program of the step in file `script`; ends the process with one of `EXIT`."""
    sys.exit(main(Path(script), argv))


def main(script: Path, argv: list[str] | None = None) -> int:
    """The same as `run`, returning the exit status (a mistake on the command line still raises SystemExit)."""
    hush()
    output = None
    try:
        options, config, output = _parse(script, int(script.name[0]), argv)
        return _main(script, options, config, output)
    except KeyboardInterrupt:
        kept = f"; {output.count} finished records kept" if output and output.path else ""
        print(f"\n{script.name}: interrupted{kept}", file=sys.stderr)
        return EXIT["interrupted"]


def _main(script: Path, options: argparse.Namespace, config: BlockConfig, output: Output) -> int:
    step = int(script.name[0])
    try:
        result = Report(script.stem, config, str(options.parameter_dtype).removeprefix("torch."),
                        machine.facts(options.device))
        if step and options.amp_dtype == "auto":
            result.autocast_off = options.autocast_off
        elif not step and config.amp_dtype and options.amp_dtype != "auto" and options.param_dtype == "float32":
            result.autocast_off = f"--amp-dtype {options.amp_dtype} is for the later steps"
        with (machine.alone(options.device, script.name),
              harness.judged(result, lambda: _out_of_memory(step, options, config))):
            _run(step, options, config, result, output)
        if result.status != "ok":
            output.write([report.record(result, "status", "", [], "run")])
        elif seconds := machine.process_seconds():          # from the process's start to the card
            output.write([report.record(result, "wall time", "s", [seconds], "run")])
    except WriteError as error:               # the card tells what was measured until then
        result.status = "failed"
        result.reason = (f"--json {output.path}: {error}; {output.count} records were written, give a file with room "
                         "for more")
    except OSError as error:                         # a full disk under the compiler's caches, say
        print(f"{script.name}: error: {error}", file=sys.stderr)
        return EXIT["failed"]
    try:
        print(report.card(result), flush=True)
    except BrokenPipeError:                        # `| head` has seen enough
        say_no_more()
    except OSError as error:                       # a full disk
        print(f"{script.name}: error: {error}", file=sys.stderr)
        say_no_more()
        return EXIT["failed"]
    if result.status != "ok":
        print(f"{script.name}: {result.status}: {result.reason}", file=sys.stderr)
    return EXIT[result.status]


def say_no_more() -> None:
    """What standard output still holds goes nowhere: at the end of the process Python would try again, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help if action.default is None else super()._get_help_string(action)


def _parse(script: Path, step: int, argv: list[str] | None) -> tuple[argparse.Namespace, BlockConfig, Output]:
    """The command line, checked before anything is allocated. A mistake ends the process with one line and status 2."""
    parser = argparse.ArgumentParser(prog=script.name, formatter_class=_Help,
                                     description=(sys.modules["__main__"].__doc__ or "").strip().split("\n")[0],
                                     epilog="Exit status: 0 ok, 1 failed, 2 usage, 3 out of memory, 4 skipped, "
                                            "130 interrupted.")
    parser.error = lambda message: _usage(script, message)
    shape_arguments(parser)
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="on the attention weights, in training")
    parser.add_argument("--amp-dtype", choices=("auto", "float16", "bfloat16", "none"), default="auto",
                        help="autocast's dtype; auto: float16 on a GPU, bfloat16 on a CPU that multiplies it, or none; "
                             "none: no autocast, no FP8")
    parser.add_argument("--param-dtype", choices=("float32", "amp"), default="float32",
                        help="amp: parameters, x and y in 16 bits too; compare it with its like only")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run")
    parser.add_argument("--launch", choices=("eager", "graph", "both"), default="both",
                        help="launch kernel by kernel, replay a CUDA graph, or time both")
    parser.add_argument("--max-seconds", type=float, metavar="S",
                        help="at most this long for each row of samples (default: {cuda:g} on a GPU, {cpu:g} on a CPU)"
                        .format(**MAX_SECONDS))
    parser.add_argument("--seed", type=int, default=0, help="of parameters and inputs")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line per metric")
    parser.add_argument("--profile", metavar="FILE", help="write a timeline of one forward+backward for Perfetto")
    if step == 4:
        parser.add_argument("--fp8-weights", choices=FP8_WEIGHTS, default="per-call",
                            help="quantize weights at every call, reuse the last call's, or keep them in FP8")
        parser.add_argument("--fp8-attention", action="store_true", help="attention in FP8 too")
    options = parser.parse_args(argv)
    try:
        options.device = device_of(options.device)
    except ValueError as error:
        _usage(script, str(error))
    on_gpu = options.device.type == "cuda"
    if options.launch == "graph" and not on_gpu:
        _usage(script, f"--launch graph: {harness.NOT_A_GPU}; use --launch eager")
    if options.max_seconds is None:
        options.max_seconds = MAX_SECONDS[options.device.type]
    if not 0 < options.max_seconds <= 1e6:
        _usage(script, f"--max-seconds {options.max_seconds:g}: give a positive number of seconds, at most 1e6")
    if abs(options.seed) >= 10**18:
        _usage(script, f"--seed {options.seed}: give a number of at most 18 digits")
    auto, options.autocast_off = machine.amp_default(options.device, step)
    amp = {"auto": auto, "none": None}
    try:
        config = config_of(options).replace(
            dropout=options.dropout, fp8_weights=getattr(options, "fp8_weights", "per-call"),
            fp8_attention=getattr(options, "fp8_attention", False),
            amp_dtype=amp.get(options.amp_dtype, DTYPES.get(options.amp_dtype)))
        if options.param_dtype == "amp" and config.amp_dtype is None:
            raise ValueError(f"--param-dtype amp: there is no 16-bit dtype with --amp-dtype {options.amp_dtype}"
                             + (f" ({options.autocast_off})" if options.amp_dtype == "auto" else ""))
        options.parameter_dtype = config.amp_dtype if options.param_dtype == "amp" else torch.float32
        if roofline.arithmetic(config, step, options.parameter_dtype, options.device).matmul != "float32":
            config.check_width()
        if step == 4 and config.amp_dtype is not None:
            config.check_fp8()
    except ValueError as error:
        _usage(script, str(error))
    files = [os.path.realpath(path) for path in (options.json, options.profile) if path and path != os.devnull]
    if len(set(files)) < len(files):
        _usage(script, f"--profile {options.profile}: --json writes there; give a file of its own")
    try:
        output = Output(options.json)
    except OSError as error:
        _usage(script, f"--json {options.json}: {error.strerror}; give a file that can be written")
    try:
        if options.profile is not None and not Path(options.profile).is_fifo():   # whose reader would see its end here
            with open(options.profile, "a+b") as file:
                if Path(options.profile).is_file() and not _is_timeline(file):
                    raise OSError(errno.EEXIST, "it holds something else than a timeline")
    except OSError as error:
        _usage(script, f"--profile {options.profile}: {error.strerror}; give a file that can be written")
    return options, config, output


def _is_timeline(file) -> bool:
    """Whether a file of bytes is empty, or the profiler's: its JSON, or gzip's."""
    file.seek(0)
    begins = file.read(200)
    return not begins or b'"schemaVersion"' in begins or begins.startswith(b"\x1f\x8b")


def shape_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that give a shape; `config_of` reads them."""
    parser.add_argument("--preset", choices=PRESETS, help="named shape (default: te-tutorial on a GPU, cpu on a CPU)")
    for name, letter in _SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar=letter, help="in place of the preset's" + (
            "; F becomes 4 E" if letter == "E" else ""))


def device_of(name: str) -> torch.device:
    """The device of --device auto, cuda or cpu. Raises ValueError where there is no such."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU is available to torch; run without it for the CPU")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def config_of(options: argparse.Namespace) -> BlockConfig:
    """The shape that `shape_arguments` and the device ask for. Raises ValueError for sizes that do not go together."""
    changes = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    if "hidden_size" in changes:
        changes.setdefault("ffn_hidden_size", None)                       # 4 E of the new width
    return PRESETS[options.preset or default_preset(options.device.type)].replace(**changes)


def hush() -> None:
    """Silence what libraries print in every run and no reader can act on, so that stderr holds this run's own news.

    A closed stderr (2>&-) goes nowhere: `print` would take stdout in its place.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")                                        # noqa: SIM115, to the process's end
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)       # a CPU has no GPU
    logging.getLogger("DotProductAttention").setLevel(logging.ERROR)             # other attention packages exist
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)             # torchao uses what torch deprecates
    for message in ("Attempting to run cuBLAS, but there was no current CUDA context",      # and makes one
                    "Relying on pointer-based detection of packed q/k/v layouts"):          # 2.9 has no other way
        warnings.filterwarnings("ignore", message)


def _usage(script: Path, message: str):
    print(f"{script.name}: error: {message}", file=sys.stderr)
    sys.exit(EXIT["usage"])


def _run(step: int, options: argparse.Namespace, config: BlockConfig, result: Report, output: Output) -> None:
    """Build, check, time and observe; fills `result` as it goes and writes each record once it is final."""
    device = options.device
    result.neighbours = machine.neighbours(device)         # before this process is on the GPU itself
    progress = tqdm(bar_format="{desc}", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)
    try:
        machine.refuse_beyond_memory(parameters.memory_needed(config, step, device), device)
    except MemoryError as error:
        result.status, result.reason = "oom", f"{error}; {_that_fits(step, options, config)}"
        return
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    harness.use_private_caches()
    subject = harness.prepare(steps.load(step).build, step, options.parameter_dtype, device, options.seed, result,
                              progress.set_description_str)
    block, x, kinds = subject.block, subject.x, subject.kinds
    output.write(report.check_records(result))

    if not result.emulated:
        progress.set_description_str("measuring this machine's peaks")
        peaks = roofline.measure_peaks(config, kinds, device)
        result.peaks = ", ".join(f"{name} {rate / 1e12:.{0 if rate > 1e13 else 2}f} TFLOP/s"
                                 for name, rate in sorted(peaks.flops.items()))
        result.peaks += f"; copy {peaks.bandwidth / 1e12:.3g} TB/s (read + written)"
    on_gpu = device.type == "cuda"                         # on a CPU less: the card should come within a minute
    for mode in report.MODES:
        backward = mode == "forward+backward"
        iteration, between = subject.iterations(backward)
        for launch in report.LAUNCHES:
            if options.launch not in (launch, "both"):
                result.rows[mode, launch] = Row(reason=f"--launch {options.launch}")
                continue
            row = Row(flops=roofline.flops(config, backward), tokens=config.tokens)
            if not result.emulated:
                row.limit_ms = roofline.limit_ms(config, kinds, peaks, backward)
            result.rows[mode, launch] = row
            harness.time_row(block, x, iteration, between, launch, row, result,
                             timing.StopRule(max_seconds=options.max_seconds, warmup_seconds=2 if on_gpu else 0.5),
                             lambda count, ms, what=f"{mode}, {launch}": progress.set_description_str(
                                 f"{what}: {count} samples, {ms:.3g} ms"))
        result.clock = timing.clock_for(device).name
        if device.type == "cpu":
            result.state = machine.state(device)
        progress.set_description_str(f"{mode}: which kernels run")
        harness.observe(step, block, device, iteration, between, mode, result, options.profile if backward else None)
        output.write(report.row_records(result, mode))
        if result.evidence[mode].verdict == "refuted":
            raise Failed(f"{mode} did not run as step {step} claims: {result.evidence[mode].because}")
    progress.close()


def _out_of_memory(step: int, options: argparse.Namespace, config: BlockConfig) -> str:
    """One line: the peak reached and a shape that fits."""
    total = machine.memory_total(options.device)
    peak = machine.memory_peak(options.device)
    return (f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB in use at the peak; "
            f"{_that_fits(step, options, config)}")


def _that_fits(step: int, options: argparse.Namespace, config: BlockConfig) -> str:
    smaller = parameters.largest_that_fits(config, step, options.device, machine.memory_total(options.device))
    return f"--batch-size {smaller.batch_size} --seq-len {smaller.seq_len} fits" if smaller else "no batch of it fits"
