"""From which size on does each step pay? Sweeps of batch, sequence and width, and the map of where the steps cross.

    python -m benchmarks sweep --json sweep.jsonl                          # all three axes
    python -m benchmarks sweep --axis seq_len --values 512,1024,2048 --json sweep.jsonl --chart sweep

Every step is checked against FP64 at every size, then all are timed in interleaved rounds. A size that does not fit is
a point of its own (oom). With --json a run that was interrupted goes on where it stopped: sizes that FILE already
holds, of this machine, these versions and this commit, are not measured again. Exit status: 0 ok, 1 nothing could be
measured, 2 usage, 130 interrupted.
"""
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.options import numbers
from benchmarks.records.read import Run, case, extra, info, metric, paired, read, runner, runs, shape
from benchmarks.show.charts import Charts, lines_chart
from benchmarks.show.study import Options, Study, open_session, register, show
from benchmarks.show.tables import framed, joules
from common import parameters, steps
from common.block.config import PRESETS, BlockConfig, dtype_name
from common.command_line import SIZES, Parser, open_records
from common.measure.cases import Group, step_case
from common.measure.session import Session
from common.outcome import EXIT
from common.report.metrics import PEAK_MEMORY
from common.report.record import Record, record
from common.report.result import LAUNCH_BOUND, Result
from common.runtime import exclusive, machine, timing
from common.runtime.iteration import BOTH, MODES
from common.text import NOT_AVAILABLE, figures, table

AXES = {"batch_size": "B", "seq_len": "S", "hidden_size": "E"}
GPU_SIZES = {"batch_size": (1, 2, 4, 8, 16, 32), "seq_len": (128, 256, 512, 1024, 2048, 4096, 8192, 16384),
             "hidden_size": (256, 512, 768, 1024, 2048, 4096)}
CPU_SIZES = {"batch_size": (1, 2, 4), "seq_len": (128, 256, 512, 1024), "hidden_size": (256, 512, 768)}
QUICK_SIZES = {"batch_size": (1, 2), "seq_len": (64, 128, 256), "hidden_size": (128, 256)}
DONE = "size done"                                    # the metric that ends the records of a size
Points = list[tuple[int, dict[str, Run]]]             # (size, step -> its run), by size


# ----------------------------------------------------------------------------------------------------------- the sizes


def sizes(axis: str, options: Options) -> tuple[int, ...]:
    """The values of an axis."""
    if options.values:
        return options.values
    if options.quick:
        return QUICK_SIZES[axis]
    return (GPU_SIZES if options.device.type == "cuda" else CPU_SIZES)[axis]


def shapes(options: Options) -> list[tuple[str, BlockConfig]]:
    """(axis, shape) of every point. Heads keep their width when the block gets wider. Raises ValueError."""
    base, points = options.config, []
    for axis in options.axes:
        for size in sizes(axis, options):
            changes: dict[str, Any] = {axis: size}
            if axis == "hidden_size":
                if size > base.head_dim and size % base.head_dim:
                    if not options.values:
                        continue
                    raise ValueError(f"--values {size}: heads keep their width, give multiples of {base.head_dim}")
                changes |= {"ffn_hidden_size": None, "num_heads": max(1, size // base.head_dim)}
            config = base.replace(**changes)
            if base.amp_dtype is not None:
                config.check_width()
            points.append((axis, config))
    if not points:
        raise ValueError(f"--axis hidden_size: heads are {base.head_dim} wide, give --values")
    return points


def groups(options: Options) -> list[Group]:
    """One group a size; where two axes share a shape, where they cross, it is measured once."""
    by_name = {str(config): config for _, config in shapes(options)}
    return [_group(config, options) for config in by_name.values()]


def _group(config: BlockConfig, options: Options) -> Group:
    profiled = 1 if options.device.type == "cuda" else 0                       # it tells which are bound by launches
    every = [step_case(step, config, options.device) for step in steps.ALL]
    return Group(every, profiled=profiled, may_not_fit=True, metered=True)


# ------------------------------------------------------------------------------------------------- going on with a file


def recorded(path: str | None, name: str) -> list[Record]:
    """The records that FILE holds of this machine's GPU or CPU, where a size of them is complete."""
    if not path or not Path(path).exists() or not Path(path).stat().st_size:
        return []
    lines = [line for line in read(path) if runner(line)["name"] == name]
    return lines if any(metric(line) == DONE for line in lines) else []


def done(lines: list[Record], how: dict[str, Any]) -> set[tuple[str, str]]:
    """(axis, shape) of every size whose records are complete and were measured in that way."""
    return {(case(line)["variant"]["axis"], shape(line)) for line in lines
            if metric(line) == DONE and extra(line).get("how") == how}


def way(session: Session, options: Options) -> dict[str, Any]:
    """What must agree for sizes of two runs to stand in one map."""
    facts = ("torch", "cuda", "driver", "transformer_engine", "cpu_threads", "git")
    how = {name: session.facts[name] for name in facts}
    return how | {"rounds": options.rounds, "seed": options.seed, "clock": timing.clock_for(session.device).in_rounds,
                  "amp_dtype": dtype_name(options.config.amp_dtype)}


def of_points(lines: list[Record], points: set[tuple[str, str]], how: dict[str, Any]) -> list[Record]:
    """Of the records of an earlier call those of `points`, (axis, shape), which were complete and measured that way.

    A shape may have been measured along another axis, where the two cross.
    """
    wanted = {its_shape for _, its_shape in points}
    complete = {(info(line)["run"], shape(line)) for line in lines
                if metric(line) == DONE and shape(line) in wanted and extra(line).get("how") == how}
    kept = []
    for line in lines:
        if (info(line)["run"], shape(line)) not in complete:
            continue
        if metric(line) != DONE or (case(line)["variant"]["axis"], shape(line)) in points:
            kept.append(line)
    return kept


def run(study: Study, options: Options) -> int:
    """Measure the sizes that FILE does not hold yet; each ends with a record of its own."""
    points = shapes(options)
    with exclusive.alone(options.device, study.name):
        known = recorded(options.json, machine.facts(options.device)["name"])
        session = open_session(study, options)
        how = way(session, options)
        finished = done(known, how)
        asked = {(axis, str(config)) for axis, config in points}
        if known:
            print(f"sweep: {len(asked & finished)} of {len(asked)} sizes are already in {options.json}",
                  file=sys.stderr)
        for axis, config in points:
            if (axis, str(config)) in finished:
                continue
            if all(its_shape != str(config) for _, its_shape in finished):       # two axes share it where they cross
                session.measure(_group(config, options))
            end = Result("", config, "float32", session.facts, study=study.name, run=session.run,
                         variant={"axis": axis, "size": getattr(config, axis)})
            session.write([record(end, DONE, "", [], "run", how=how)])
            finished.add((axis, str(config)))
        lines = of_points(known, asked, how) + session.lines
        show(study, options, session, lines)                     # a size that does not fit is a point, no failure
    return EXIT["ok" if any(run.best(mode) for run in runs(lines) for mode in MODES) else "failed"]


# ---------------------------------------------------------------------------------------------------------- the points


def points_of(lines: list[Record]) -> dict[str, Points]:
    """Axis -> its points by size, from records."""
    by_shape: dict[str, dict[str, Run]] = {}
    for case_run in runs(lines):
        by_shape.setdefault(case_run.shape, {})[case_run.case["name"]] = case_run
    by_axis: dict[str, dict[int, dict[str, Run]]] = {}
    for line in lines:
        if metric(line) == DONE:
            point = case(line)["variant"]
            by_axis.setdefault(point["axis"], {})[point["size"]] = by_shape.get(shape(line), {})
    return {axis: sorted(by_axis[axis].items()) for axis in AXES if axis in by_axis}


def names_of(points: Points) -> list[str]:
    """The steps that any of them has, in the order of the ladder."""
    names = {name: None for _, by_step in points for name in by_step}
    return sorted(names, key=steps.place_of)


def crossovers(points: Points, mode: str) -> dict[str, tuple[int | None, list[int]]]:
    """Step -> (the smallest size from which on it stays faster than the step before, larger ones that are unsure).

    None for a size where there is none. Faster is by the median of the paired ratio, at the smallest by its whole
    interval; at sizes that are unsure the interval holds 1, at all of them where no size is named.
    """
    crossed = {}
    timed = [name for name in names_of(points) if any(name in by and by[name].best(mode) for _, by in points)]
    for before, after in itertools.pairwise(timed):
        ahead = _ahead(points, before, after, mode)
        smallest = min((size for size, is_sure in ahead if is_sure), default=None)
        unsure = [size for size, is_sure in reversed(ahead) if not is_sure and size > (smallest or 0)]
        crossed[after] = smallest, unsure
    return crossed


def _ahead(points: Points, before: str, after: str, mode: str) -> list[tuple[int, bool]]:
    """(size, surely?) of each size from the largest down at which `after` is ahead, until it is not."""
    ahead = []
    for size, by_step in reversed(points):
        a, b = by_step.get(before), by_step.get(after)
        if b is not None and b.status == "oom" and a is not None and a.status == "ok":      # where the one before fits
            break
        ratio = paired(a, b, mode)
        if ratio is None:
            continue
        if ratio[0] <= 1:
            break
        ahead.append((size, ratio[1] > 1))
    return ahead


def launch_bound(points: Points, mode: str) -> dict[str, tuple[str, str]]:
    """Step -> (largest size at which eager is launch-bound, the same by graph replay), in words.

    From the smallest size on. Eager: as on the card, see `result.launch_bound`. Graph: the kernels fill less than 80 %
    of the time.
    """
    shown = {}
    for name in names_of(points):
        eager, graph = [], []
        for size, by_step in points:
            case_run = by_step.get(name)
            if case_run is None:
                continue
            if (bound := case_run.launch_bound(mode)) is not None:
                eager.append((size, bound))
            parts, replay_ms = case_run.parts(mode), case_run.median(mode, "graph")
            if parts and replay_ms:
                busy_ms = sum(parts.values()) - parts["idle"]
                graph.append((size, busy_ms < LAUNCH_BOUND * replay_ms))
        shown[name] = _up_to(eager), _up_to(graph)
    return shown


def _up_to(bound: Sequence[tuple[int, bool]]) -> str:
    """Up to which size, from the smallest on."""
    if not bound:
        return "n/a"
    held_up = [size for size, _ in itertools.takewhile(lambda size_and_bound: size_and_bound[1], bound)]
    return f"up to {held_up[-1]}" if held_up else "nowhere"


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of log y over log x, fitted to the three largest x: y grows as x to that power. None below three."""
    logs = [(math.log(x), math.log(y)) for x, y in sorted(points)[-3:] if y > 0]
    if len(logs) < 3:
        return None
    mean_x = sum(x for x, _ in logs) / 3
    mean_y = sum(y for _, y in logs) / 3
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def growth(points: Points, mode: str, axis: str) -> dict[str, tuple[float | None, float | None]]:
    """Step -> (exponent of time, exponent of memory): how both grow with the size at its large end.

    Memory is what an iteration adds to parameters, gradients, x and dy. There is no such exponent by width: gradients
    grow with it too, and how many of them live at the peak changes.
    """
    grown = {}
    for name in names_of(points):
        times, memory = [], []
        for size, by_step in points:
            if name in by_step and (ms := by_step[name].best_ms(mode)):
                times.append((size, ms))
                added = added_memory(by_step[name], mode)
                if added is not None and axis != "hidden_size":
                    memory.append((size, added))
        grown[name] = exponent(times), exponent(memory)
    return grown


def added_memory(case_run: Run, mode: str) -> float | None:
    """Bytes at the peak beyond parameters, their gradients, x and dy; None where the peak is unknown."""
    peak = case_run.figure(PEAK_MEMORY, mode, "eager")
    if peak is None:
        return None
    sizes_of = {name: case_run.info["config"][name] for name in SIZES}
    config = BlockConfig(**sizes_of, amp_dtype=None)
    weights = sum(math.prod(its_shape) for its_shape in parameters.shapes(config).values())
    itemsize = 4 if case_run.info["parameter_dtype"] == "float32" else 2
    copies = 2 if mode == BOTH else 1                            # the gradients, too
    return peak - itemsize * (copies * weights + 2 * config.tokens * config.hidden_size)


# ------------------------------------------------------------------------------------------------------- what it shows


def _cell(case_run: Run | None, mode: str) -> str:
    if case_run is None:
        return "n/a"
    if case_run.status != "ok":
        return case_run.status
    ms = case_run.best_ms(mode)
    return "not timed" if ms is None else figures(ms)


def _from(letter: str, smallest: int | None, unsure: list[int]) -> str:
    return (f"from {letter} = {smallest} on" if smallest else "nowhere here") + _unsure_at(unsure)


def _unsure_at(unsure: list[int]) -> str:
    return f", unsure at {', '.join(map(str, unsure))}" if unsure else ""


def _shape(points: Points) -> str:
    """What the shapes of a sweep have in common: B4 S* E768 ..., with a star for what differs."""
    sizes: dict[str, set[int]] = {}
    for _, by_step in points:
        for case_run in by_step.values():
            for letter, size in case_run.config.dimensions.items():
                sizes.setdefault(letter, set()).add(size)
    words = [f"{letter}{min(seen)}" if len(seen) == 1 else f"{letter}*" for letter, seen in sizes.items()]
    return " ".join(words)


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    blocks: list[str] = []
    for axis, points in points_of(lines).items():
        for mode in MODES:
            blocks += _of_axis(axis, points, mode, width)
    return framed(lines, blocks, runs(lines))


def _of_axis(axis: str, points: Points, mode: str, width: int | None) -> list[str]:
    """The two tables of one axis and pass: times, and where each step pays."""
    letter, names = AXES[axis], names_of(points)
    rows: list[list] = []
    for size, by_step in points:
        rows.append([size, *(_cell(by_step.get(name), mode) for name in names)])
    times = (f"ms of {mode} by {axis} ({_shape(points)}), each by its faster way of launching\n\n"
             + table(rows, [letter, *names], width))
    crossed, bound, grown = crossovers(points, mode), launch_bound(points, mode), growth(points, mode, axis)
    rows = []
    for name in names:
        powers = ["n/a" if power is None else f"{letter}^{power:.2f}" for power in grown[name]]
        rows.append([name, _from(letter, *crossed[name]) if name in crossed else "", *bound[name], *powers])
    headers = ["step", "faster than the one before", "launch-bound, eager", "launch-bound, graph", "time", "memory"]
    pays = (f"{mode} by {axis}: where each step pays, and how it grows over the three largest sizes\n\n"
            + table(rows, headers, width))
    return [times, *_energy(axis, points, mode, width), pays]


def _energy(axis: str, points: Points, mode: str, width: int | None) -> list[str]:
    """The table of joules of one axis and pass; none where nothing was metered."""
    names = names_of(points)
    rows, any_metered = [], False
    for size, by_step in points:
        row: list = [size]
        for name in names:
            used = joules(by_step[name], mode) if name in by_step else None
            any_metered = any_metered or used is not None
            row.append(NOT_AVAILABLE if used is None else figures(used))
        rows.append(row)
    title = f"joules of an iteration, {mode} by {axis}\n\n"
    return [title + table(rows, [AXES[axis], *names], width)] if any_metered else []


def charts(lines: list[Record]) -> Charts:
    """A chart an axis: time of forward+backward over the size, a line a step, and where one overtakes another."""
    drawn = {}
    for axis, points in points_of(lines).items():
        drawn[axis] = lambda axis=axis, points=points: _chart(axis, points, runner(lines[0])["name"])  # type: ignore[misc]
    return drawn


def _chart(axis: str, points: Points, machine_name: str):
    series: Mapping[str, list] = {name: [] for name in names_of(points)}
    for size, by_step in points:
        for name, case_run in by_step.items():
            if ms := case_run.best_ms(BOTH):
                series[name].append((size, ms))
    marks = {}
    for name, (smallest, unsure) in crossovers(points, BOTH).items():
        if smallest and smallest > points[0][0]:                 # ahead from the smallest on: nothing to be seen
            number_of = next(by_step[name].step for _, by_step in points if name in by_step)
            marks[f"from here on {number_of} is faster than the one before{_unsure_at(unsure)}"] = smallest
    return lines_chart(series, f"{axis} ({AXES[axis]})", "ms, forward+backward", f"{machine_name}, {_shape(points)}",
                       marks)


def answer(lines: list[Record]) -> str:
    """From which sequence on the last step pays."""
    points = points_of(lines)["seq_len"]
    name, (smallest, unsure) = list(crossovers(points, BOTH).items())[-1]
    return f"{name} pays {_from('S', smallest, unsure)} ({_shape(points)})"


# ------------------------------------------------------------------------------------------------------------ its flags


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    parser.add_argument("--axis", choices=AXES, help="which size (default: all three)")
    parser.add_argument("--values", type=numbers, metavar="LIST",
                        help="its values (default: by machine); needs --axis")


def refine(options: Options) -> None:
    """Raise ValueError for flags that do not go together; set `axes`, and a shape where none was asked for."""
    options.axes = (options.axis,) if options.axis else tuple(AXES)
    if options.values and not options.axis:
        raise ValueError("--values: say of which size, by --axis")
    sized = options.preset or any(getattr(options, name) for name in SIZES)
    if not sized:                                   # a shape at which launches matter, so that there is a crossing
        small = PRESETS["gpt2"].replace(batch_size=4) if options.device.type == "cuda" else PRESETS["cpu"]
        if options.quick:
            small = small.replace(batch_size=1, seq_len=128, hidden_size=256, num_heads=4, ffn_hidden_size=None)
        options.config = small.replace(amp_dtype=options.config.amp_dtype)
    shapes(options)
    open_records(options.json)                      # it cuts off half a record, which would be refused
    recorded(options.json, "")


INTRODUCTION = """\
The H200's sweeps go from GPT-2's width at batch 4, with 8 rounds along the sequence and 6 along batch and width."""

register(Study("sweep", __doc__, groups, text=text, charts=charts, run=run, add_arguments=add_arguments, refine=refine,
               answer=answer,
               place=3, introduction=INTRODUCTION))
