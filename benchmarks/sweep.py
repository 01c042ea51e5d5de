"""From which size on does each step pay? Sweeps of batch, sequence and width, and the map of where the steps cross.

    python -m benchmarks.sweep --json sweep.jsonl                          # all three axes
    python -m benchmarks.sweep --axis seq_len --values 512,1024,2048 --json sweep.jsonl --chart sweep

Every step is checked against FP64 at every size, then all are timed in interleaved rounds. A size that does not fit is
a point of its own (oom). With --json a run that was interrupted goes on where it stopped: sizes that FILE already
holds, of this machine, these versions and this commit, are not measured again. Exit status: 0 ok, 1 nothing could be
measured, 2 usage, 130 interrupted.
"""
import argparse
import itertools
import math
import sys
from pathlib import Path

from common import BlockConfig, harness, parameters, report, timing
from common import device as machine
from common.config import PRESETS, dtype_name
from common.report import Report
from common.run import EXIT

from . import charts, command, ladder, records
from .attribution import IDLE
from .records import Run
from .study import Study

AXES = {"batch_size": "B", "seq_len": "S", "hidden_size": "E"}
GPU_SIZES = {"batch_size": (1, 2, 4, 8, 16, 32), "seq_len": (128, 256, 512, 1024, 2048, 4096, 8192, 16384),
             "hidden_size": (256, 512, 768, 1024, 2048, 4096)}
CPU_SIZES = {"batch_size": (1, 2, 4), "seq_len": (128, 256, 512, 1024), "hidden_size": (256, 512, 768)}
QUICK_SIZES = {"batch_size": (1, 2), "seq_len": (64, 128, 256), "hidden_size": (128, 256)}
ROWS = ("0", "1", "2", "3", "4")
DONE = "size done"                                    # the metric that ends the records of a size


def sizes(axis: str, options: argparse.Namespace) -> tuple[int, ...]:
    if options.values:
        return options.values
    return (QUICK_SIZES if options.quick else GPU_SIZES if options.device.type == "cuda" else CPU_SIZES)[axis]


def shapes(options: argparse.Namespace) -> list[tuple[str, BlockConfig]]:
    """(axis, shape) of every point. Heads keep their width when the block gets wider. Raises ValueError."""
    base, found = options.config, []
    for axis in options.axes:
        for size in sizes(axis, options):
            changes = {axis: size}
            if axis == "hidden_size":
                if size > base.head_dim and size % base.head_dim:
                    if not options.values:
                        continue
                    raise ValueError(f"--values {size}: heads keep their width, give multiples of {base.head_dim}")
                changes |= {"ffn_hidden_size": None, "num_heads": max(1, size // base.head_dim)}
            found.append((axis, base.replace(**changes)))
            if base.amp_dtype is not None:
                found[-1][1].check_width()
    if not found:
        raise ValueError(f"--axis hidden_size: heads are {base.head_dim} wide, give --values")
    return found


def recorded(path: str | None, gpu: str) -> list[dict]:
    """The records of the sizes that FILE holds completely, of this machine's GPU or CPU."""
    if not path or not Path(path).exists() or not Path(path).stat().st_size:
        return []
    lines = [line for line in records.read(path) if line["runners"][0]["name"] == gpu]
    return lines if any(line["metric"]["name"] == DONE for line in lines) else []


def done(lines: list[dict], how: dict) -> set[tuple[str, str]]:
    """(axis, shape) of every size whose records are complete and were measured in that way."""
    return {(line["metric"]["extra_info"]["axis"], line["model"]["name"]) for line in lines
            if line["metric"]["name"] == DONE and line["metric"]["extra_info"].get("how") == how}


def way(study: Study) -> dict:
    """What must agree for sizes of two runs to stand in one map."""
    return {"rounds": study.options.rounds, "seed": study.options.seed,
            "clock": timing.clock_for(study.device).in_rounds,
            "amp_dtype": dtype_name(study.options.config.amp_dtype),
            **{name: study.facts[name]
               for name in ("torch", "cuda", "driver", "transformer_engine", "cpu_threads", "git")}}


def of_points(lines: list[dict], points: set[tuple[str, str]], how: dict) -> list[dict]:
    """Of the records of an earlier call those of `points`, (axis, shape), which were complete and measured that way.

    A shape may have been measured along another axis, where the two cross.
    """
    shapes_ = {shape for _, shape in points}
    complete = {(_run(line), line["model"]["name"]) for line in lines if line["metric"]["name"] == DONE
                and line["model"]["name"] in shapes_ and line["metric"]["extra_info"].get("how") == how}
    return [line for line in lines if (_run(line), line["model"]["name"]) in complete
            and (line["metric"]["name"] != DONE
                 or (line["metric"]["extra_info"]["axis"], line["model"]["name"]) in points)]


def _run(line: dict) -> str | None:
    return line["benchmark"]["extra_info"].get("run")


def measure(study: Study, points: list[tuple[str, BlockConfig]], known: set[tuple[str, str]]) -> None:
    """Measure the points that are not known; each size ends with a record of its own."""
    for axis, config in points:
        if (axis, str(config)) in known:
            continue
        where = {"axis": axis, "size": getattr(config, axis), "how": way(study)}
        if all(shape != str(config) for _, shape in known):           # two axes share the shape where they cross
            for case in ladder.cases(config, study.device, ROWS):
                study.prepare(case)
            for mode in report.MODES:
                try:
                    study.time(mode, profiled=1 if study.device.type == "cuda" else 0)    # which are bound by launches
                except (RuntimeError, MemoryError) as error:
                    if not harness.is_out_of_memory(error):
                        raise
                    study.out_of_memory(mode)
            study.release()
        r = Report(study.name, config, "float32", study.facts, study=study.name, run=study.run)
        study.write([report.record(r, DONE, "", [], "run", **where)])
        known = known | {(axis, str(config))}


def points_of(lines: list[dict]) -> dict[str, list[tuple[int, dict[str, Run]]]]:
    """Axis -> [(size, {step: run}), ...] by size, from records."""
    runs: dict[str, dict[str, Run]] = {}
    for run in records.runs(lines):
        if run.info["step"][0].isdigit():
            runs.setdefault(run.lines[0]["model"]["name"], {})[run.info["step"]] = run
    found: dict[str, dict[int, dict[str, Run]]] = {}
    for line in lines:
        extra = line["metric"]["extra_info"]
        if line["metric"]["name"] == DONE:
            found.setdefault(extra["axis"], {})[extra["size"]] = runs.get(line["model"]["name"], {})
    return {axis: sorted(sizes_.items()) for axis, sizes_ in found.items()}


def crossovers(points: list[tuple[int, dict[str, Run]]], mode: str) -> dict[str, tuple[int | None, list[int]]]:
    """Step -> (the smallest size from which on it stays faster than the step before, larger ones that are unsure).

    None for a size where there is none. Faster is by the median of the paired ratio, at the smallest by its whole
    interval; at sizes that are unsure the interval holds 1, at all of them where no size is named.
    """
    found = {}
    names = list(dict.fromkeys(name for _, runs in points for name, run in runs.items() if run.best(mode)))
    for before, after in itertools.pairwise(sorted(names)):
        ahead: list[tuple[int, bool]] = []                                     # size, surely; the largest size first
        for size, runs in reversed(points):
            both = [runs[name] for name in (before, after) if name in runs and runs[name].status == "ok"]
            if after in runs and runs[after].status == "oom" and both:         # where the one before it fits
                break
            ratio = records.paired(*both, mode) if len(both) == 2 else None
            if ratio is None:
                continue
            if ratio[0] <= 1:
                break
            ahead.append((size, ratio[1] > 1))
        smallest = min((size for size, sure in ahead if sure), default=None)
        found[after] = smallest, [size for size, sure in reversed(ahead) if not sure and size > (smallest or 0)]
    return found


def launch_bound(points: list[tuple[int, dict[str, Run]]], mode: str) -> dict[str, tuple[str, str]]:
    """Step -> (largest size at which eager is launch-bound, the same by graph replay), in words.

    From the smallest size on. Eager: as on the card, see report.launch_bound. Graph: the kernels fill less than 80 % of
    the time.
    """
    found: dict[str, dict[str, list[tuple[int, bool]]]] = {}
    for size, runs in points:
        for name, run in runs.items():
            own = found.setdefault(name, {"eager": [], "graph": []})
            if (bound := run.launch_bound(mode)) is not None:
                own["eager"].append((size, bound))
            parts, graph = run.parts(mode), run.median(mode, "graph")
            if parts and graph:
                own["graph"].append((size, sum(parts.values()) - parts[IDLE] < report.LAUNCH_BOUND * graph))

    def largest(sizes_):
        bound = [size for size, _ in itertools.takewhile(lambda one: one[1], sizes_)]
        return "n/a" if not sizes_ else f"up to {bound[-1]}" if bound else "nowhere"
    return {name: (largest(own["eager"]), largest(own["graph"])) for name, own in found.items()}


def exponent(points: list[tuple[float, float]]) -> float | None:
    """The slope of log y over log x, fitted to the three largest x: y grows as x to that power. None below three."""
    logs = [(math.log(x), math.log(y)) for x, y in sorted(points)[-3:] if y > 0]
    if len(logs) < 3:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def growth(points: list[tuple[int, dict[str, Run]]], mode: str, axis: str
           ) -> dict[str, tuple[float | None, float | None]]:
    """Step -> (exponent of time, exponent of memory): how both grow with the size at its large end.

    Memory is what an iteration adds to parameters, gradients, x and dy. There is no such exponent by width: gradients
    grow with it too, and how many of them live at the peak changes.
    """
    found = {}
    for name in {name for _, runs in points for name in runs}:
        timed = [(size, runs[name]) for size, runs in points if name in runs and runs[name].best(mode)]
        memory = [(size, added) for size, run in timed if (added := added_memory(run, mode)) is not None
                  and axis != "hidden_size"]
        found[name] = exponent([(size, run.best_ms(mode)) for size, run in timed]), exponent(memory)
    return found


def added_memory(run: Run, mode: str) -> float | None:
    """Bytes at the peak beyond parameters, their gradients, x and dy; None where the peak is unknown."""
    peak = run.value(mode, "peak memory", "eager")
    if peak is None:
        return None
    config = {name: value for name, value in run.info["config"].items() if name in BlockConfig.__dataclass_fields__}
    shape = BlockConfig(**config | {"amp_dtype": None})
    weights = sum(math.prod(one) for one in parameters.shapes(shape).values())
    itemsize = 4 if run.info["parameter_dtype"] == "float32" else 2
    return peak - itemsize * ((2 if mode == "forward+backward" else 1) * weights + 2 * shape.tokens * shape.hidden_size)


def _cell(run: Run | None, mode: str) -> str:
    if run is None:
        return "n/a"
    ms = run.best_ms(mode)
    if run.status != "ok":
        return run.status
    return "not timed" if ms is None else command.figures(ms)


def _from(letter: str, crossed: tuple[int | None, list[int]]) -> str:
    size, unsure = crossed
    return (f"from {letter} = {size} on" if size else "nowhere here") + _unsure_at(unsure)


def _unsure_at(sizes: list[int]) -> str:
    return f", unsure at {', '.join(map(str, sizes))}" if sizes else ""


def _shape(points: list[tuple[int, dict[str, Run]]]) -> str:
    """What the shapes of a sweep have in common: B4 S* E768 ..., with a star for what differs."""
    names = [run.lines[0]["model"]["name"].split() for _, runs in points for run in runs.values()]
    return " ".join(parts[0] if len(set(parts)) == 1 else f"{parts[0][0]}*" for parts in zip(*names, strict=True))


def text(lines: list[dict], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    blocks = [records.provenance(lines)]
    for axis, points in points_of(lines).items():
        letter, others = AXES[axis], _shape(points)
        names = sorted({name for _, runs in points for name in runs})
        for mode in report.MODES:
            rows = [[size, *(_cell(runs.get(name), mode) for name in names)] for size, runs in points]
            blocks.append(f"ms of {mode} by {axis} ({others}), each by its faster way of launching\n\n"
                          + command.table(rows, [letter, *names], width))
            crossed, bound, grown = crossovers(points, mode), launch_bound(points, mode), growth(points, mode, axis)
            rows = [[name, _from(letter, crossed[name]) if name in crossed else "", *bound.get(name, ("n/a", "n/a")),
                     *("n/a" if value is None else f"{letter}^{value:.2f}" for value in grown[name])]
                    for name in names]
            blocks.append(f"{mode} by {axis}: where each step pays, and how it grows over the three largest sizes\n\n"
                          + command.table(rows, ["step", "faster than the one before", "launch-bound, eager",
                                                 "launch-bound, graph", "time", "memory"], width))
    blocks.append("\n".join(records.cautions(records.runs(lines))))
    return "\n\n".join(filter(None, blocks))


def chart_stems(lines: list[dict], stem: str) -> list[str]:
    """The charts that `draw` makes: one an axis."""
    return [f"{stem}-{axis}" for axis in points_of(lines)]


def draw(lines: list[dict], stem: str) -> None:
    """Draw `chart_stems`: time of forward+backward over the size, a line a step, and where one overtakes another."""
    for axis, points in points_of(lines).items():
        names = sorted({name for _, runs in points for name in runs})
        series = {name: [(size, runs[name].best_ms("forward+backward")) for size, runs in points
                         if name in runs and runs[name].best("forward+backward")] for name in names}
        crossed = {f"from here on {name[0]} is faster than the one before" + _unsure_at(found[1]): found[0]
                   for name, found in crossovers(points, "forward+backward").items()
                   if found[0] and found[0] > points[0][0]}             # ahead from the smallest on: nothing to be seen
        charts.lines_chart(series, f"{stem}-{axis}", lines, f"{axis} ({AXES[axis]})", "ms, forward+backward",
                           f"{lines[0]['runners'][0]['name']}, {_shape(points)}", crossed)


def main(argv: list[str] | None = None) -> int:
    parser = command.parser("sweep", __doc__)
    parser.add_argument("--axis", choices=AXES, help="which size (default: all three)")
    parser.add_argument("--values", type=command.numbers, metavar="LIST",
                        help="its values (default: by machine); needs --axis")
    options = command.parse(parser, argv)
    options.axes = (options.axis,) if options.axis else tuple(AXES)
    if options.values and not options.axis:
        command.usage(parser, "--values: say of which size, by --axis")
    sized = options.preset or any(getattr(options, name) for name in ("batch_size", "seq_len", "hidden_size",
                                                                      "num_heads", "ffn_hidden_size"))
    if not sized:                                   # a shape at which launches matter, so that there is a crossing
        small = PRESETS["gpt2"].replace(batch_size=4) if options.device.type == "cuda" else PRESETS["cpu"]
        if options.quick:
            small = small.replace(batch_size=1, seq_len=128, hidden_size=256, num_heads=4, ffn_hidden_size=None)
        options.config = small.replace(amp_dtype=options.config.amp_dtype)
    with command.shown_to_a_person("sweep", options.output):
        try:
            points = shapes(options)
            known = recorded(options.json, machine.facts(options.device)["name"])
        except ValueError as error:
            command.usage(parser, str(error))
        with machine.alone(options.device, "sweep"):
            harness.use_private_caches()
            study = Study("sweep", options)
            finished = done(known, way(study))
            asked = {(axis, str(config)) for axis, config in points}
            if known:
                print(f"sweep: {len(asked & finished)} of {len(asked)} sizes are already in {options.json}",
                      file=sys.stderr)
            measure(study, points, finished)
            lines = of_points(known, asked, way(study)) + study.lines
            study.show(text, draw, lines)                   # a size that does not fit is a point, no failure
            timed = any(run.best(mode) for run in records.runs(lines) for mode in report.MODES)
            return EXIT["ok" if timed else "failed"]


if __name__ == "__main__":
    sys.exit(main())
