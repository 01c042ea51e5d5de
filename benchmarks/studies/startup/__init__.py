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
from benchmarks.records.read import Run, case, extra, info, metric, paired, read, runner, runs, values
from benchmarks.show.charts import Charts, bars_chart
from benchmarks.show.study import Options, Study, exit_status, open_session, register, show
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.startup.cells import Cell, Measured, Processes, every_cell, form_in_words, spread
from benchmarks.studies.startup.keeping import COLD, NONE, PACKAGE, WARM, WAYS
from benchmarks.studies.startup.running import DYNAMIC, LENGTHS, PER_CALL, group, of_shapes
from benchmarks.studies.startup.stack import BY_LAYER, WHOLE, kind_of
from common import steps
from common.block.config import PRESETS
from common.command_line import SIZES, Parser, open_records, tell
from common.measure.session import Session
from common.outcome import Outcome, judged
from common.phases import Phase
from common.report.record import Record, check_records, record
from common.report.result import Compilation, Result
from common.runtime import compiler, exclusive, machine, sources
from common.runtime.iteration import BOTH, FORWARD, LAUNCHES, MODES
from common.runtime.timing import Timing
from common.text import NOT_AVAILABLE, figures, ratio, table

FIRST, KEPT, GRAPHS = "first result", "kept", "graphs"
TIMES = 3                                              # processes of a cell
MEASURED = [steps.load(2).path, *(Path(__file__).with_name(f"{name}.py") for name in ("stack", "keeping", "process"))]
QUICK = "--quick leaves out: the forward alone, 12 layers, mega-cache, aot_compile, package, shapes, the price per call"
Key = tuple[str, int, str, str]                        # way, layers, form, pass


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
                if not _timed(known):
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


def is_of_calls(line: Record) -> bool:
    """Whether it tells what a call takes once all is compiled."""
    return case(line)["variant"].get("measured") == PER_CALL


def key_of(line: Record) -> Key:
    """Which cell a record is of."""
    fields = case(line)
    variant = fields["variant"]
    return fields["name"], variant.get("layers", 0), variant.get("form", ""), line["benchmark"]["mode"]


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


# ------------------------------------------------------------------------------------------------------- what it shows


def by_key(lines: list[Record]) -> dict[Key, Record]:
    """The record of each cell's time."""
    return {key_of(line): line for line in lines if metric(line) == FIRST}


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    of_cells = by_key(lines)
    blocks = [_times(of_cells, mode, width) for mode in MODES]
    blocks += [_kept(lines, of_cells, width), _shapes(lines, width), _per_call(lines, width),
               "\n".join(findings(lines)), _why_not(lines)]
    return framed(lines, blocks, runs(filter(is_of_calls, lines)))


def _forms(of_cells: dict[Key, Record]) -> list[tuple[int, str]]:
    """(layers, form) of the columns."""
    return list(dict.fromkeys((layers, form) for _, layers, form, _ in of_cells))


def seconds(of_cells: dict[Key, Record], key: Key) -> float | None:
    """The median of a cell; None where it was not measured."""
    line = of_cells.get(key)
    return spread(values(line))[0] if line and values(line) else None


def _times(of_cells: dict[Key, Record], mode: str, width: int | None) -> str:
    """Seconds of each way and form, and how many times as fast as cold."""
    present = [way for way in WAYS if any(key[0] == way and key[3] == mode for key in of_cells)]
    if not present:
        return ""
    rows, headers = [], ["seconds to the first result"]
    for layers, form in _forms(of_cells):
        headers += [form_in_words(layers, form), "x cold"]
    for way in present:
        row = [way]
        for layers, form in _forms(of_cells):
            row += _cell(of_cells, way, layers, form, mode)
        rows.append(row)
    return f"{mode}\n\n" + table(rows, headers, width)


def _cell(of_cells: dict[Key, Record], way: str, layers: int, form: str, mode: str) -> list[str]:
    line = of_cells.get((way, layers, form, mode))
    if line is None:
        return ["not recorded", ""]
    if not values(line):
        return [NOT_AVAILABLE if info(line)["status"] == "skipped" else info(line)["status"], ""]
    own, cold = seconds(of_cells, (way, layers, form, mode)), seconds(of_cells, (COLD, layers, form, mode))
    assert own is not None
    return [figures(own), f"{cold / own:.1f}" if cold and way not in (COLD, NONE) else ""]


def _kept(lines: list[Record], of_cells: dict[Key, Record], width: int | None) -> str:
    """What is kept, what was found of it, and how good the first result is."""
    made = {key_of(line): line for line in lines if metric(line) == KEPT}
    rows = []
    for key, line in of_cells.items():
        if not values(line):
            continue
        counted, errors = extra(line).get("counted", {}), extra(line).get("errors", {})
        way, layers, form, mode = key
        of_kept = ["", ""]
        if kept := made.get(key):
            of_kept = [figures(extra(kept)["seconds_to_make"]), figures(values(kept)[0] / 1e6)]
        counts = [str(counted.get(each, 0)) for each in ("graphs", "hits", "misses", "autograd bypasses")]
        name, (error, gate) = max(errors.items(), key=lambda item: item[1][0] / item[1][1])
        rows.append([f"{way}, {form_in_words(layers, form)}, {mode}", *of_kept, *counts,
                     f"{error:.0e} of {gate:.0e}, {name}"])
    headers = ["of which", "made in s", "kept MB", "traced", "found", "compiled", "bypassed", "worst error of its gate"]
    return table(rows, headers, width) if rows else ""


def _shapes(lines: list[Record], width: int | None) -> str:
    rows, lengths = [], list(LENGTHS)
    for line in lines:
        if metric(line) != GRAPHS:
            continue
        lengths = extra(line)["lengths"]
        counts = [f"{count:.0f}" for count in values(line)] or [NOT_AVAILABLE] * len(lengths)
        rows.append([f"dynamic={case(line)['variant']['dynamic']}", *counts,
                     figures(sum(extra(line)["seconds"])) if values(line) else NOT_AVAILABLE])
    headers = ["graphs compiled, after", *(f"S{length}" for length in lengths), "s in all"]
    return table(rows, headers, width) if rows else ""


def _timed(lines: list[Record]) -> dict[tuple[str, str], Run]:
    """(name, form) -> what a call takes."""
    timed = runs(filter(is_of_calls, lines))
    return {(run.case["name"], run.variant["form"]): run for run in timed}


def _per_call(lines: list[Record], width: int | None) -> str:
    """Milliseconds once it is compiled, and after how many calls that is paid back."""
    timed, of_cells = _timed(lines), by_key(lines)
    uncompiled, whole = timed.get((NONE, WHOLE)), timed.get(("compiled", WHOLE))
    rows = []
    for launch in LAUNCHES:
        for (name, form), of_run in timed.items():
            if launch != "eager" and not any(of_run.samples(mode, launch) for mode in MODES):
                continue                                   # nothing but a GPU has graphs
            layers = of_run.variant["layers"]
            words = [name] if name == NONE else [name, form_in_words(layers, form)]
            if launch != "eager":
                words.append(f"by {launch}")
            cold = seconds(of_cells, (COLD, layers, form, BOTH))
            rows.append([", ".join(words), *_of_a_call(of_run, whole if form == BY_LAYER else None, launch),
                         _paid_back(uncompiled, of_run, cold, launch)])
    headers = ["a call", "forward ms", "x whole", "f+b ms", "x whole", "paid back, cold"]
    return table(rows, headers, width) if rows else ""


def _of_a_call(of_run: Run, whole: Run | None, launch: str) -> list[str]:
    """Its time in either pass, each with how many times as fast as `whole` it is where that is given."""
    missing = NOT_AVAILABLE if of_run.status == "ok" else of_run.status
    found = []
    for mode in MODES:
        ms, times = of_run.median(mode, launch), paired(whole, of_run, mode, launch)
        found += [figures(ms) if ms else missing, ratio(times) if times else ""]
    return found


def _paid_back(uncompiled: Run | None, of_run: Run, cold_s: float | None, launch: str) -> str:
    """After how many calls, launched that way before and after."""
    samples, before = of_run.samples(BOTH, launch), uncompiled.samples(BOTH, launch) if uncompiled else []
    if of_run is uncompiled or not samples or not before or cold_s is None:
        return ""
    return Compilation(cold_s, None, before).pays_after(Timing(samples, True, "", {}))


def findings(lines: list[Record]) -> list[str]:
    """How much faster a warm start is, and a cold one by layer."""
    of_cells, found = by_key(lines), []
    for mode in MODES:
        for layers, form in _forms(of_cells):
            what = f"{form_in_words(layers, form)}, {mode}: warm is"
            found.append(_finding(what, of_cells, (WARM, layers, form, mode), (COLD, layers, form, mode),
                                  "times as fast as cold"))
        for layers, form in _forms(of_cells):
            if form == BY_LAYER:
                what = f"{layers} layers, {mode}, cold: by layer is"
                found.append(_finding(what, of_cells, (COLD, layers, form, mode), (COLD, layers, WHOLE, mode),
                                      "times as fast as whole"))
    return [line for line in found if line]


def _finding(what: str, of_cells: dict[Key, Record], one: Key, over: Key, words: str) -> str:
    own, other = seconds(of_cells, one), seconds(of_cells, over)
    return f"{what} {other / own:.1f} {words}" if own and other else ""


def _why_not(lines: list[Record]) -> str:
    """A line for each reason that a figure is missing."""
    reasons: dict[str, list[str]] = {}
    for line in [*by_key(lines).values(), *(line for line in lines if metric(line) == GRAPHS)]:
        if not values(line):
            status, reason = info(line)["status"], info(line)["reason"]
            words = reason if status == "skipped" else f"{status}: {reason}"
            reasons.setdefault(words, []).append(case(line)["name"])
    return "\n".join(f"n/a, {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items())


def charts(lines: list[Record]) -> Charts:
    """Seconds to the first result of forward+backward, by way of keeping: a panel a form."""
    of_cells = by_key(lines)
    bars: dict[str, dict[str, tuple[float, float, float]]] = {}
    for (way, layers, form, mode), line in of_cells.items():
        if mode == BOTH and values(line):
            bars.setdefault(form_in_words(layers, form), {})[way] = spread(values(line))
    return {"seconds": lambda: bars_chart(bars, "seconds to the first result, forward+backward", 1)} if bars else {}


def answer(lines: list[Record]) -> str:
    """What a warm folder and compiling by layer save."""
    of_cells = by_key(lines)
    layers, _ = _forms(of_cells)[-1]
    cold, warm, by_layer = (seconds(of_cells, (way, layers, form, BOTH))
                            for way, form in ((COLD, WHOLE), (WARM, WHOLE), (COLD, BY_LAYER)))
    if not (cold and warm and by_layer):
        return NO_ANSWER
    where = "" if runner(lines[0])["type"] == "cuda" else "on a CPU "
    return (f"{where}{layers} layers start in {figures(cold)} s, from a warm folder in {figures(warm)}, "
            f"by repeated layer in {figures(by_layer)}")


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
