"""What every step does when it is run: parse, build, check, time, look at the kernels, report."""
import argparse
import sys
from pathlib import Path

import torch

from .block import steps
from .block.config import ATTENTIONS, DTYPES, FP8_WEIGHTS, SDPA, SERIES
from .block.steps import Step
from .block.traits import FUSED, amp_default
from .command_line import (
    Parser,
    check_seed,
    config_of,
    device_of,
    early_ends,
    hush,
    mistakes,
    no_room,
    open_records,
    shape_arguments,
    tell,
    try_timeline,
)
from .measure import measurement
from .measure.cases import Group, block_case
from .measure.session import Session
from .outcome import EXIT
from .report.card import card
from .report.record import peak_records, record
from .report.record_file import RecordFile, WriteError
from .runtime import compiler, timing
from .runtime.exclusive import alone, process_seconds
from .runtime.iteration import LAUNCHES

MAX_SECONDS = {"cuda": timing.StopRule.max_seconds, "cpu": 3.0}           # a card should come within a minute


def run(script: str, argv: list[str] | None = None) -> None:
    """The main program of the step in file `script`; ends the process with one of `EXIT`."""
    sys.exit(main(Path(script), argv))


def main(script: Path, argv: list[str] | None = None) -> int:
    """The same as `run`, returning the exit status (a mistake, and what ends it early, still raise SystemExit)."""
    hush()
    with early_ends(script.name):
        with mistakes(script.name):
            step = steps.of(script)
        options = parse(step, argv)
    with early_ends(script.name, options.file):
        return _measure_and_report(step, options)


# ---------------------------------------------------------------------------------------------------- the command line


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parser(step: Step) -> Parser:
    """The command line of a step's script."""
    of_step = Parser(step.path.name, prog=step.path.name, formatter_class=_Help,
                     description=f"Step {step.number}: {step.title}.",
                     epilog="Exit status: 0 ok, 1 failed, 2 usage, 3 out of memory, 4 skipped, 130 interrupted.")
    seconds = "{cuda:g} on a GPU, {cpu:g} on a CPU".format(**MAX_SECONDS)
    shape_arguments(of_step)
    add = of_step.add_argument
    add("--dropout", type=float, default=0.0, metavar="P", help="on the attention weights, in training")
    add("--amp-dtype", choices=("auto", "float16", "bfloat16", "none"), default="auto",
        help="autocast's dtype; auto: float16 on a GPU, bfloat16 on a CPU that multiplies it, or none; none: no "
             "autocast, no FP8")
    add("--param-dtype", choices=("float32", "amp"), default="float32",
        help="amp: parameters, x and y in 16 bits too; compare it with its like only")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run")
    add("--launch", choices=(*LAUNCHES, "both"), default="both",
        help="launch kernel by kernel, replay a CUDA graph, or time both")
    add("--max-seconds", type=float, metavar="S",
        help=f"at most this long for each row of samples (default: {seconds})")
    add("--seed", type=int, default=0, help="of parameters and inputs")
    add("--json", metavar="FILE", help="append one JSON line per metric")
    add("--profile", metavar="FILE", help="write a timeline of one forward+backward for Perfetto")
    if step.traits.attention == FUSED:
        add("--attention", choices=ATTENTIONS, default=SDPA,
            help="by PyTorch's fused kernels, or by the last rung of those in benchmarks/kernels/cuda/attention")
    if step.traits.fp8:
        add("--fp8-weights", choices=FP8_WEIGHTS, default="per-call",
            help="quantize weights at every call, reuse the last call's, or keep them in FP8")
        add("--fp8-attention", action="store_true", help="attention in FP8 too")
    return of_step


def parse(step: Step, argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked before anything is allocated. A mistake ends the process with one line and status 2.

    Beside the flags the result holds `config`, `parameter_dtype`, `autocast_off` and `file`, the records'.
    """
    options = parser(step).parse_args(argv)
    with mistakes(step.path.name):
        options.device = device_of(options.device)
        if options.launch == "graph" and options.device.type != "cuda":
            raise ValueError(f"--launch graph: {measurement.NOT_A_GPU}; use --launch eager")
        if options.max_seconds is None:
            options.max_seconds = MAX_SECONDS[options.device.type]
        if not 0 < options.max_seconds <= 1e6:
            raise ValueError(f"--max-seconds {options.max_seconds:g}: give a positive number of seconds, at most 1e6")
        check_seed(options.seed)
        _precision(step, options)
        try_timeline(options.profile, options.json)
        options.file = open_records(options.json)
    return options


def _precision(step: Step, options: argparse.Namespace) -> None:
    """Set `config`, `parameter_dtype` and `autocast_off`. Raises ValueError for what does not go together."""
    amp_dtype, why_none = amp_default(options.device, step.traits)
    if options.amp_dtype != "auto":
        amp_dtype, why_none = DTYPES.get(options.amp_dtype), ""
    config = config_of(options).replace(
        dropout=options.dropout, amp_dtype=amp_dtype, fp8_weights=getattr(options, "fp8_weights", "per-call"),
        fp8_attention=getattr(options, "fp8_attention", False), attention=getattr(options, "attention", SDPA))
    options.parameter_dtype = torch.float32
    if options.param_dtype == "amp":
        if amp_dtype is None:
            because = f" ({why_none})" if why_none else ""
            raise ValueError("--param-dtype amp: there is no 16-bit dtype with --amp-dtype "
                             f"{options.amp_dtype}{because}")
        options.parameter_dtype = amp_dtype
    arithmetic = step.traits.arithmetic(config, options.parameter_dtype, options.device)
    if arithmetic.matmul != "float32":
        config.check_width()
    if config.attention == SERIES and options.device.type == "cuda":
        config.check_series(arithmetic.attention)
    if step.traits.fp8 and amp_dtype is not None:
        config.check_fp8()
    options.config = config
    options.autocast_off = why_none if step.traits.autocast else ""
    asked_in_vain = amp_dtype is not None and options.amp_dtype != "auto" and options.param_dtype == "float32"
    if asked_in_vain and not step.traits.autocast:
        options.autocast_off = f"--amp-dtype {options.amp_dtype} is for the later steps"


# ------------------------------------------------------------------------------------------------------------- the run


def _measure_and_report(step: Step, options: argparse.Namespace) -> int:
    """Run, print the card, and return the exit status."""
    file: RecordFile = options.file
    script, on_gpu = step.path.name, options.device.type == "cuda"
    compiler.use_private_caches()
    rule = timing.StopRule(max_seconds=options.max_seconds, warmup_seconds=2 if on_gpu else 0.5)
    refused = {launch: f"--launch {options.launch}" for launch in LAUNCHES if options.launch not in (launch, "both")}
    session = Session("step", options.device, rule, options.seed, file=file, refused=refused, trace=options.profile)
    case = block_case(step.name, step.build, options.config, step.traits, options.device,
                      parameter_dtype=options.parameter_dtype, step=step.number)
    no_room_left = ""
    try:
        with alone(options.device, script):
            session.measure(Group([case], metered=True, sustained=True, times_emulation=True))
        _write_the_last(session)
    except WriteError as error:               # the card tells what was measured until then
        no_room_left = no_room(file, error)
    session.progress.finish()
    result = session.entries[0].result
    if no_room_left:
        result.status, result.reason = "failed", no_room_left
    result.autocast_off = options.autocast_off
    tell(card(result))
    if result.status != "ok":
        print(f"{script}: {result.status}: {result.reason}", file=sys.stderr)
    return EXIT[result.status]


def _write_the_last(session: Session) -> None:
    """What is known at the end of a run that went well: the peaks, and the seconds from the process's start."""
    result = session.entries[0].result
    if result.status != "ok":
        return
    session.write(peak_records(result, session.peaks))
    if seconds := process_seconds():
        session.write([record(result, "wall time", "s", [seconds], "run")])
