"""What does torch.compile cost before it pays, and how is that kept for the next process?

    python -m benchmarks startup --json startup.jsonl

Each figure is the time from a model that lies ready on the device to its first result: in a process of its own, with
caches of its own, the median of three. The ways are: without a compiler, cold, from a folder that another process
filled, from a mega-cache, from a function that aot_compile saved, from an AOTInductor package. It is taken of one
block, of 12 that are compiled as a whole, and of 12 by repeated layer. That first result itself is checked against
FP64. Then: how often is a new shape compiled anew, and what does a call take afterwards? With --json a run that was
interrupted goes on where it stopped. Exit status: 0 ok, 1 failed, 2 usage, 4 skipped, 130 interrupted.
"""
import dataclasses
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.options import count
from benchmarks.records.read import extra, info, metric, read, runner, values
from benchmarks.show.study import Options, Study, exit_status, open_session, register, show
from benchmarks.studies.startup.cells import Cell, Measured, Processes, every_cell
from benchmarks.studies.startup.keeping import NONE, PACKAGE
from benchmarks.studies.startup.running import DYNAMIC, LENGTHS, group, of_shapes
from benchmarks.studies.startup.stack import kind_of
from benchmarks.studies.startup.tables import (
    FIRST,
    GRAPHS,
    KEPT,
    QUICK,
    answer,
    by_key,
    charts,
    is_of_calls,
    key_of,
    runs_of_calls,
    text,
)
from common import steps
from common.block.config import PRESETS
from common.command_line import SIZES, Parser, open_records, tell
from common.measure.session import Session
from common.outcome import Outcome, judged
from common.phases import Phase
from common.report.record import Record, check_records, record
from common.report.result import Result
from common.runtime import compiler, exclusive, machine, sources
from common.runtime.iteration import FORWARD

TIMES = 3                                              # processes of a cell
MEASURED = [steps.load(2).path, *(Path(__file__).with_name(f"{name}.py") for name in ("stack", "keeping", "process"))]


# ----------------------------------------------------------------------------------------------------------- measuring


def run(study: Study, options: Options) -> int:
    """Measure the cells that FILE does not hold yet."""
    with exclusive.alone(options.device, study.name):
        session = open_session(study, options)
        how = way_of(session, options)
        known = recorded(options.json, session.facts["name"], how)
        finished = {key for key, line in by_key(known).items() if values(line)}        # what failed is tried again
        every = every_cell(options.layers, options.quick)
        if known:
            session.note(f"{len(finished)} of {len(every)} cells are already in {options.json}")
        with tempfile.TemporaryDirectory(prefix="startup-", dir=options.folder) as folder:
            processes = Processes(Path(folder), options.config, options.device.type, options.seed,
                                  lambda detail: session.say(Phase.COMPILING, detail))

            def measure(cells: Sequence[Cell]) -> None:
                for cell in cells:
                    if (cell.way, cell.layers, cell.form, cell.mode) not in finished:
                        session.write(_records(cell, _measured(processes, cell, options), session, options, how))
            measure([cell for cell in every if cell.way != PACKAGE])
            if not options.quick:
                if not any(metric(line) == GRAPHS for line in known):
                    _measure_shapes(session, options, how)
                if not runs_of_calls(known):
                    session.measure(group(options.config, options.layers))
            measure([cell for cell in every if cell.way == PACKAGE])           # they take longest
        statuses = [info(line)["status"] for line in session.lines]            # before the run's own record joins them
        show(study, options, session, known + session.lines)
        if options.quick:
            tell(QUICK)
        return exit_status(statuses)


def way_of(session: Session, options: Options) -> dict[str, Any]:
    """What must agree for cells of two runs to stand in one table. Of the sources it is what a process runs."""
    facts = ("torch", "cuda", "driver", "cpu_threads")
    return {name: session.facts[name] for name in facts} | {
        "seed": options.seed, "shape": str(options.config), "layers": options.layers, "times": options.times,
        "autocast": str(options.config.amp_dtype), "sources": sources.digest_of(MEASURED)}


def recorded(path: str | None, name: str, how: dict[str, Any]) -> list[Record]:
    """The records that FILE holds of this machine, measured that way: of cells and shapes, and of calls behind them."""
    if not path or not Path(path).exists() or not Path(path).stat().st_size:
        return []
    lines = [line for line in read(path) if runner(line)["name"] == name]
    ended = {(info(line)["run"], key_of(line)) for line in lines
             if metric(line) in (FIRST, GRAPHS) and extra(line).get("how") == how}
    of_runs = {of_run for of_run, _ in ended}
    return [line for line in lines
            if (info(line)["run"], key_of(line)) in ended
            or (is_of_calls(line) and info(line)["run"] in of_runs)]


def _measured(processes: Processes, cell: Cell, options: Options) -> Measured | str:
    """What the processes said, or why there are none."""
    missing = compiler.missing(options.device) if cell.way != NONE else None
    return cell.why_not or missing or processes.measure(cell, options.times)


def _records(cell: Cell, measured: Measured | str, session: Session, options: Options, how: dict[str, Any]
             ) -> list[Record]:
    """Of a cell; the last tells that it is done."""
    result = Result(cell.way, options.config, "float32", session.facts, study=session.study, run=session.run,
                    variant=cell.variant, matmul=kind_of(options.config, options.device),
                    neighbours=session.neighbours)
    if isinstance(measured, str):
        result.status, result.reason = "skipped", measured
        return [record(result, FIRST, "s", [], cell.mode, how=how)]
    failed = measured.failed
    if failed:
        result.status, result.reason = failed.status, failed.reason
    worst = {name: (error, gate) for name, (error, gate) in measured.errors.items() if math.isfinite(error)}
    lines = []
    if made := measured.made:
        lines.append(record(result, KEPT, "bytes", [measured.kept_bytes], cell.mode, seconds_to_make=made.seconds))
    counted = measured.answers[-1].counted if measured.answers else {}
    seconds = [] if failed else measured.seconds
    lines.append(record(result, FIRST, "s", seconds, cell.mode, counted=counted, errors=worst, how=how))
    return lines


def _measure_shapes(session: Session, options: Options, how: dict[str, Any]) -> None:
    """How many graphs a list of lengths needs, by `dynamic`."""
    for dynamic in DYNAMIC:
        session.say(Phase.COMPILING, f"dynamic={dynamic}")
        result = Result("shapes", options.config, "float32", session.facts, study=session.study, run=session.run,
                        variant={"dynamic": str(dynamic)}, matmul=kind_of(options.config, options.device))
        outcome: Outcome = result
        found: list[tuple[int, int, float]] = []
        with judged(outcome, lambda error: "out of memory: give a smaller shape"):
            if missing := compiler.missing(options.device):
                raise NotImplementedError(missing)
            for each in of_shapes(options.config, options.device, options.seed, dynamic, result):
                found.append(each)
        graphs, seconds = [float(each[1]) for each in found], [each[2] for each in found]
        if result.status != "ok":
            graphs = seconds = []
        line = record(result, GRAPHS, "graphs", graphs, FORWARD, lengths=list(LENGTHS), seconds=seconds, how=how)
        session.write([*check_records(result), line])


# ------------------------------------------------------------------------------------------------------------ its flags


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    parser.add_argument("--layers", type=count, default=12, metavar="N", help="of the stacks (default: 12)")
    parser.add_argument("--folder", metavar="DIR", help="where caches and packages lie meanwhile (default: temporary)")


def refine(options: Options) -> None:
    """Raise ValueError for a folder that can't be used; set a shape where none was asked for, and how often."""
    if options.layers < 2:
        raise ValueError(f"--layers {options.layers}: give 2 or more, one block is measured in any case")
    if options.folder and not compiler.own_folder(options.folder):
        raise ValueError(f"--folder {options.folder}: give a folder that you can write to and nobody else can: what "
                         "lies in it gets executed")
    options.times = 1 if options.quick else TIMES
    if not (options.preset or any(getattr(options, name) for name in SIZES)):
        small = PRESETS["gpt2"].replace(batch_size=4) if options.device.type == "cuda" else PRESETS["tiny"]
        options.config = small.replace(amp_dtype=options.config.amp_dtype)
    options.config = dataclasses.replace(options.config, dropout=0.0)
    open_records(options.json)
    recorded(options.json, machine.facts(options.device)["name"], {})


INTRODUCTION = """\
The blocks are small, so that compiling is what takes the time. On a CPU the C++ compiler takes most of a cold start. A
mega-cache and aot_compile keep no machine code there, and save less. A warm start still imports the compiler and traces
the model: only what the compiler wrote is found again. Before torch loads a package, on a GPU too, it compiles a few
small programs to see which vector instructions the CPU has."""

register(Study("startup", __doc__, lambda options: [], text=text, charts=charts, run=run, add_arguments=add_arguments,
               refine=refine, answer=answer, no_chart="no cell has a time", place=8, introduction=INTRODUCTION))
