"""How far from the memory's speed is each way to write a fused operation, and when is a kernel by hand worth it?

    python -m benchmarks fusions --json fusions.jsonl --chart fusions
    python -m benchmarks fusions --experiment RMSNorm --rows 64,16384
    python -m benchmarks fusions --capture DIR && python -m benchmarks fusions --explain DIR     # see kernels/README.md

What stands between a block's matmuls, and attention itself, at five levels: eager PyTorch, TorchScript (which torch
deprecates), torch.compile, Triton and CUDA C++, beside what libraries have. Each is held against FP64, then all of a
size are timed in shared rounds, forward and backward, launched one by one and by graph replay, from a few rows to all
tokens of the shape. An iteration takes turns over so many copies of its tensors that no cache holds them; times are of
one copy. GB/s count the bytes that the operation must move at the least, TFLOP/s attention's FLOPs under its mask. The
row "copy" copies as many bytes, in the same rounds. Percent are of its speed ("% same") and of the best copy of any
size ("% best"); attention's are of the matmul rate that the machine reached. They are left out where the copies do not
go beyond four times the last cache. More than 100 is no error: memory reads faster than it writes, and a copy does as
much of either. By hand, softmax and attention make their causal mask at every call, which costs most where rows are
few.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from benchmarks.kernels import captured
from benchmarks.kernels.operations import EXPERIMENTS, TRITON, check, least_bytes, levels, shape, tensors
from benchmarks.measure.options import numbers
from benchmarks.records import RESULTS
from benchmarks.records.read import Run, extra, read, runner, runs, size_in_words, versions
from benchmarks.show.study import Options, Study, open_session, register, show
from benchmarks.studies.fusions import tables
from benchmarks.studies.fusions.subjects import COPY, CopySubject, OperationSubject, clock_for, copying, finish
from common.block.config import dtype_name
from common.block.workload import Workload
from common.command_line import Parser, tell
from common.measure.cases import Case, Group, Setting
from common.outcome import EXIT
from common.phases import Phase
from common.report.record import Record
from common.report.result import Result
from common.runtime import exclusive, machine
from common.runtime.iteration import LAUNCHES

Size = tuple[int, ...]


# ----------------------------------------------------------------------------------------------------------- the cases


@functools.lru_cache(maxsize=1)                            # of the size that is measured; the one before is let go of
def _inputs(name: str, size: Size, dtype: torch.dtype, device: torch.device, seed: int) -> list[torch.Tensor]:
    return tensors(EXPERIMENTS[name], size, dtype, device, seed)


def case(name: str, level: str, call: Callable | str, size: Size, options: Options) -> Case:
    """One level of one operation at one size. Where `call` is a string, it says why there is none, at any size."""
    experiment, dtype = EXPERIMENTS[name], options.config.amp_dtype or torch.float32

    def prepare(setting: Setting, result: Result) -> OperationSubject:
        assert not isinstance(call, str)
        inputs = _inputs(name, size, dtype, setting.device, setting.seed)
        if level == COPY:
            return CopySubject(call, experiment, [inputs[0].detach()], setting.seed)
        setting.say(Phase.CHECKING)
        errors, has_backward = check(call, experiment, inputs, setting.seed + 1)
        result.errors = {what: (error, None) for what, error in errors.items()}
        return OperationSubject(call, experiment, inputs, setting.seed, has_backward)

    missing = call if isinstance(call, str) else ""
    return Case(name, prepare, options.config, parameter_dtype=dtype, missing=missing,
                variant={"size": None if missing else list(size), "level": level},
                workload=Workload(dtype_name(dtype)), that_fits=lambda total: "give fewer rows by --rows")


def group(name: str, size: Size, options: Options) -> Group:
    """All levels of an operation at one size."""
    experiment = EXPERIMENTS[name]
    needed = 40 * math.prod(size) * experiment.inputs.count("x")                               # FP64 and its gradients
    machine.refuse_beyond_memory(needed, options.device, f"{name} of {size_in_words(list(size))}: ")
    calls = levels(experiment, options.device)             # anew for each size: TorchScript specializes for what it saw
    if experiment.shape != "heads":
        calls[COPY] = copying()
    is_first = size == sizes(name, options)[0]             # what is missing is reported once
    cases = [case(name, level, call, size, options) for level, call in calls.items()
             if is_first or not isinstance(call, str)]
    return Group(cases, tables.PASSES, calibrated=False, watched=False, timed=finish,
                 clock=functools.partial(clock_for, experiment))


def groups(options: Options) -> Iterator[Group]:
    """One group a size of each operation."""
    for name in options.experiment or EXPERIMENTS:
        for size in sizes(name, options):
            yield group(name, size, options)


def sizes(name: str, options: Options) -> list[Size]:
    """The sizes of x, from few rows to all tokens."""
    of_rows = [shape(options.config, EXPERIMENTS[name].shape, rows) for rows in options.rows_of_x]
    return list(dict.fromkeys(of_rows))


# ------------------------------------------------------------------------------------------------------- how it is run


def run(study: Study, options: Options) -> int:
    """Measure, and save what the compiler made where that was asked for; or tell what was saved."""
    if options.explain:
        tell(options.explained)
        return EXIT["ok"]
    with (exclusive.alone(options.device, study.name),
          torch._functorch.config.patch(donated_buffer=False)):          # or no compiled backward could run twice
        session = open_session(study, options)
        for name in options.experiment or EXPERIMENTS:
            before = compiled_so_far(name)                                # other experiments' of the same module
            for size in sizes(name, options):
                session.measure(group(name, size, options))
            if options.capture:
                session.say(Phase.CAPTURING, name)
                kernels = [kernel for key, kernel in compiled_so_far(name).items() if key not in before]
                save(session.lines, options, name, size, kernels)
        return show(study, options, session)


def compiled_so_far(name: str) -> dict[int, tuple[str, Any]]:
    """The Triton kernels in the module of an experiment."""
    return captured.triton_kernels(sys.modules.get(f"{TRITON}.{EXPERIMENTS[name].module}"))


def save(lines: list[Record], options: Options, name: str, size: Size, kernels: list[tuple[str, Any]]) -> None:
    """Capture an experiment that has been measured at that size."""
    experiment = EXPERIMENTS[name]
    inputs = tensors(experiment, size, options.config.amp_dtype or torch.float32, options.device, options.seed)
    case_runs = [run for run in runs(lines) if run.case["name"] == name and run.variant["size"] == list(size)]
    if case_runs:
        line = case_runs[0].lines[-1]
        least = {mode: least_bytes(experiment, mode, inputs[0]) for mode in tables.PASSES}
        measured = {"device": runner(line)["name"], "versions": versions(line), "bytes at the least": least,
                    "levels": {run.variant["level"]: _times_of(run) for run in case_runs}}
        captured.save(options.capture, name, experiment.plain, inputs, measured, kernels)


def _times_of(run: Run) -> dict[str, dict[str, Any]]:
    """Pass -> ms by way of launching, rate, kernels of a call; of the passes that were timed."""
    times = {}
    for mode in tables.PASSES:
        rate = run.find(mode, "work rate", "eager")
        if run.best(mode) and rate:
            ms = {launch: run.median(mode, launch) for launch in LAUNCHES if run.samples(mode, launch)}
            times[mode] = {"ms": ms, "rate": run.value(mode, "work rate", run.best(mode)),
                           "kernels": (run.value(mode, "launches") or 0.0) / extra(rate)["copies"]}
    return times


# ------------------------------------------------------------------------------------------------------------ its flags


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    add = parser.add_argument
    add("--experiment", choices=EXPERIMENTS, action="append", help="only this one; may be repeated")
    add("--rows", type=numbers, metavar="LIST",
        help="sizes, in rows (tokens) of x, of which attention and softmax take whole sequences, at least one "
             "(default: up to the tokens of the shape)")
    add("--capture", type=Path, metavar="DIR", help="save what the compiler made of each")
    add("--explain", type=Path, metavar="DIR", help="measure nothing: tell what --capture saved")


def refine(options: Options) -> None:
    """Set `rows_of_x`, and `explained` for --explain. Raises ValueError for flags that do not go together."""
    if options.explain and options.capture:
        raise ValueError("--capture and --explain: give one of them")
    if options.explain:
        try:
            options.explained = captured.explain(options.explain)
        except (ValueError, OSError) as error:
            raise ValueError(f"--explain: {error}") from None
    if options.capture:
        try:
            options.capture.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--capture {options.capture}: {error.strerror}; give a folder that can be written"
                             ) from None
    on_gpu = options.device.type == "cuda"
    options.config = options.config.replace(amp_dtype=torch.bfloat16 if on_gpu else None)
    parts = (256, 64, 16, 4, 1) if on_gpu else (16, 1)
    options.rows_of_x = options.rows or [max(1, options.config.tokens // part) for part in parts]


PARTS = {
    "fusions summary": lambda: f"```\n{tables.summary(read(RESULTS / 'h200' / 'fusions-te-tutorial'), 120)}\n```",
    "captured": lambda: f"```\n{captured.explain(RESULTS / 'h200' / 'captured', 120)}\n```",
}

register(Study("fusions", __doc__, groups, text=tables.text, charts=tables.charts, answer=tables.answer, run=run,
               add_arguments=add_arguments, refine=refine, long=True, parts=PARTS,
               no_chart="it needs two sizes of an experiment",
               place=6))
