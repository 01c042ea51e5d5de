"""What the study of fusions tells of its records: a summary, a table for each operation and pass, a chart."""
import itertools
import math

from benchmarks.kernels.operations import TORCHSCRIPT
from benchmarks.records.provenance import commits
from benchmarks.records.read import Run, extra, info, metric, paired, runner, runs, shape, size_in_words, values
from benchmarks.show.charts import Charts, Points, panels_chart
from benchmarks.show.tables import framed
from benchmarks.studies.fusions.subjects import COPY
from common.report.metrics import SHARE
from common.report.record import Record
from common.runtime.iteration import BACKWARD, FORWARD, LAUNCHES
from common.runtime.peaks import BURST
from common.text import figures, only, table

PASSES = (FORWARD, BACKWARD)
UNSETTLED = "~"                        # beside a median that is not known to 0.5 %
OWN = ("eager", TORCHSCRIPT, "torch.compile", "Triton", "CUDA C++")        # levels; the others are libraries
SAME_SIZE = "% of same-size copy"       # timed in the same rounds
BEST = "% of best copy"                # the fastest copy of any size in these records
SUMMARY = """{} at the largest size (attention: % of the matmul rate), forward / backward, each level by
its faster way of launching, and the compiler's time over that of the Triton kernel."""
OF_THE_BEST = """{} at the largest size, the same rows. The best copy of this machine, of any size, ran at {} GB/s."""


def by_operation(lines: list[Record]) -> dict[str, list[Run]]:
    """Operation -> its runs, of those that were there to be timed."""
    of_operation: dict[str, list[Run]] = {}
    for run in runs(lines):
        of_operation.setdefault(run.case["name"], []).append(run)
    return of_operation


def at_the_largest_size(case_runs: list[Run]) -> dict[str, Run]:
    """Level -> its run at the largest size of an operation."""
    sized = [run for run in case_runs if run.variant["size"]]
    largest = max((math.prod(run.variant["size"]) for run in sized), default=0)
    return {run.variant["level"]: run for run in sized if math.prod(run.variant["size"]) == largest}


# --------------------------------------------------------------------------------------------------------- the summary


def summary(lines: list[Record], width: int | None = None) -> str:
    """How near each level comes to the memory's speed, by both yardsticks, a row for each operation; empty where no
    percents are known.
    """
    of_same_size = _of_same_size(lines, width)
    of_best = _of_best(lines, width)
    return "\n\n".join(filter(None, [of_same_size, of_best]))


def _of_same_size(lines: list[Record], width: int | None) -> str:
    rows = []
    for name, case_runs in by_operation(lines).items():
        levels = at_the_largest_size(case_runs)
        cells = [_percents(levels.get(level)) for level in OWN]
        if not any(cells):
            continue
        libraries, against = [], []
        for level, run in levels.items():
            if level not in (*OWN, COPY) and _percents(run):
                libraries.append(f"{level} {_percents(run)}")
                against.append(_over(run, levels.get("Triton")))
        rows.append([name, *cells, _over(levels.get("torch.compile"), levels.get("Triton")), ", ".join(libraries),
                     ", ".join(filter(None, against))])
    if not rows:
        return ""
    headers = ["experiment", "eager", "TorchScript", "compile", "Triton", "CUDA C++", "Triton vs compile", "libraries",
               "Triton vs these"]
    return f"{SUMMARY.format(SAME_SIZE)}\n\n{table(rows, headers, width)}"


def _of_best(lines: list[Record], width: int | None) -> str:
    best = best_copy(lines)
    if best is None:
        return ""
    rows = []
    for name, case_runs in by_operation(lines).items():
        levels = at_the_largest_size(case_runs)
        if _percents(levels.get(COPY), best):
            libraries = [f"{level} {_percents(run, best)}" for level, run in levels.items()
                         if level not in (*OWN, COPY) and _percents(run, best)]
            rows.append([name, *(_percents(levels.get(level), best) for level in (*OWN, COPY)), ", ".join(libraries)])
    headers = ["experiment", "eager", "TorchScript", "compile", "Triton", "CUDA C++", "copy", "libraries"]
    return f"{OF_THE_BEST.format(BEST, figures(best))}\n\n{table(rows, headers, width)}" if rows else ""


def best_copy(lines: list[Record]) -> float | None:
    """GB/s of the fastest copy of any size in these records; None where no copy went beyond the caches."""
    rates = []
    for case_runs in by_operation(lines).values():
        beyond_the_cache = {tuple(run.variant["size"]) for run in case_runs
                            if run.variant["size"] and any(_percent(run, mode) for mode in PASSES)}
        for run in case_runs:
            if run.variant["level"] == COPY and tuple(run.variant["size"]) in beyond_the_cache:
                rates += [values(line)[0] for line in run.lines if metric(line) == "work rate"]
    return max(rates, default=None)


def _percents(run: Run | None, best: float | None = None) -> str:
    """Forward / backward, of the faster way of launching: of the same-size copy, or of `best` GB/s. Empty without a
    forward.
    """
    if run is None:
        return ""
    percents = [_percent(run, mode, best) for mode in PASSES]
    return "" if percents[0] is None else " / ".join(f"{percent:.0f}" for percent in percents if percent is not None)


def _percent(run: Run, mode: str, best: float | None = None) -> float | None:
    """Of the limit in its record (the same-size copy, attention's matmul rate), or of a rate of `best` GB/s."""
    launch = run.best(mode)
    if launch is None:
        return None
    if best is None:
        return run.figure(SHARE[BURST], mode, launch)
    line = run.find(mode, "work rate", launch)
    return 100 * values(line)[0] / best if line and extra(line)["unit"] == "GB/s" else None


def _over(slow: Run | None, fast: Run | None) -> str:
    """How many times as fast, forward / backward: the median of the ratios of paired rounds."""
    ratios = [paired(slow, fast, mode) for mode in PASSES]
    return "" if ratios[0] is None else " / ".join(f"{times[0]:.3f}" for times in ratios if times is not None)


# ---------------------------------------------------------------------------------------------------------- the tables


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    on_gpu = runner(lines[0])["type"] == "cuda"
    blocks = [summary(lines, width)]
    several_processes = len({info(line)["run"] for line in lines}) > 1
    without_percent = False
    best = best_copy(lines)
    for name, case_runs in by_operation(lines).items():
        of = ""
        if several_processes:
            of = f" (commit {commits(itertools.chain.from_iterable(run.lines for run in case_runs))})"
        for mode in PASSES:
            if mode == FORWARD or any(run.best(mode) for run in case_runs):
                blocks.append(f"{name}, {mode}{of}\n\n{_of_pass(case_runs, mode, on_gpu, best, width)}")
            without_percent = without_percent or any(
                run.best(mode) and run.figure(SHARE[BURST], mode) is None for run in case_runs)
    if best is not None:
        blocks.append(f"% same: {SAME_SIZE}. % best: {BEST}, of any size, which ran at {figures(best)} GB/s.")
    if without_percent:
        blocks.append("No percentage where the tensors may stay in a cache (of a CPU's caches nothing is known).")
    if any(_is_unsettled(run) for run in runs(lines)):
        blocks.append(f"{UNSETTLED} these rounds do not tell the median to 0.5 %")
    blocks.append("\n".join(_skipped(lines)))
    return framed(lines, blocks, (run for run in runs(lines) if run.status != "skipped"))


def _skipped(lines: list[Record]) -> list[str]:
    """What could not be timed, a line a reason."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for run in runs(lines):
        if run.status == "skipped":
            levels = by_reason.setdefault(run.info["reason"], {})
            levels.setdefault(run.variant["level"], []).append(run.case["name"])
    sentences = []
    for reason, levels in by_reason.items():
        named = [f"{level} of {', '.join(names)}" for level, names in levels.items()]
        sentences.append(f"skipped: {reason}: {'; '.join(named)}")
    return sentences


def _of_pass(case_runs: list[Run], mode: str, on_gpu: bool, best: float | None, width: int | None) -> str:
    """A row a size and level; columns in which nothing stands, or only "ok", are left out."""
    unit = _unit(case_runs)
    headers = ["size", "level", "status", "error", "us, eager", "us, graph", unit,
               "% same" if unit == "GB/s" else "% of matmul", "% best", "kernels" if on_gpu else "operators"]
    rows = [_row(run, mode, best) for run in case_runs if run.variant["size"]]
    shown = [0, 1]
    for place in range(2, len(headers)):
        if not {row[place] for row in rows} <= {"", "n/a", "ok"}:
            shown.append(place)
    return table([only(row, shown) for row in rows], only(headers, shown), width, keys=2)


def _row(run: Run, mode: str, best_of_all: float | None) -> list[str]:
    kind = "output" if mode == FORWARD else "gradient"
    errors = [error for what, error in run.errors().items() if what.split()[0] == kind]      # "gradient 2"
    launch = run.best(mode)
    rate = run.value(mode, "work rate", launch)
    of_best = _percent(run, mode, best_of_all) if best_of_all else None
    kernels = run.value(mode, "launches")
    return [size_in_words(run.variant["size"]), run.variant["level"], run.status,
            f"{max(errors):.1e}" if errors else "", *(_microseconds(run, mode, each) for each in LAUNCHES),
            "" if rate is None else figures(rate), _rounded(_percent(run, mode)), _rounded(of_best),
            "" if kernels is None else f"{kernels / _copies(run, mode):.0f}"]


def _rounded(percent: float | None) -> str:
    return "" if percent is None else f"{percent:.0f}"


def _microseconds(run: Run, mode: str, launch: str) -> str:
    latency = run.find(mode, "latency", launch)
    if latency is None or not values(latency):
        return "n/a"
    return figures(1e3 * extra(latency)["median"]) + ("" if extra(latency)["settled"] else UNSETTLED)


def _is_unsettled(run: Run) -> bool:
    """Whether a median of its tables is not known to 0.5 %."""
    timed = [line for line in run.lines if metric(line) == "latency" and values(line)]
    return bool(run.variant["size"]) and not all(extra(line)["settled"] for line in timed)


def _copies(run: Run, mode: str) -> int:
    line = run.find(mode, "work rate", "eager")
    return extra(line)["copies"] if line else 1


def _unit(case_runs: list[Run]) -> str:
    for run in case_runs:
        for line in run.lines:
            if metric(line) == "work rate":
                return extra(line)["unit"]
    return "GB/s"


# ----------------------------------------------------------------------------------------------------------- the chart


def charts(lines: list[Record]) -> Charts:
    """GB/s against the size of the first tensor, forward, a panel for each operation; none without two sizes."""
    curves = _curves(lines)
    if not any(len(points) > 1 for levels in curves.values() for points in levels.values()):
        return {}
    title = (f"{runner(lines[0])['name']}, {shape(lines[0])}, {lines[0]['benchmark']['dtype']}: least bytes over the "
             "time of the faster launch")
    return {"bandwidth": lambda: panels_chart(curves, "million elements", "GB/s, forward", title, dashed=COPY)}


def _curves(lines: list[Record]) -> dict[str, dict[str, Points]]:
    """Operation -> level -> [(million elements, GB/s)]."""
    curves: dict[str, dict[str, Points]] = {}
    for run in runs(lines):
        rate = run.find(FORWARD, "work rate", run.best(FORWARD)) if run.best(FORWARD) else None
        if rate and extra(rate)["unit"] == "GB/s":
            point = math.prod(run.variant["size"]) / 1e6, values(rate)[0]
            curves.setdefault(run.case["name"], {}).setdefault(run.variant["level"], []).append(point)
    return curves


def answer(lines: list[Record]) -> str:
    """How near the compiler comes to a copy, at worst and at best."""
    percents = {}
    for name, case_runs in by_operation(lines).items():
        run = at_the_largest_size(case_runs).get("torch.compile")
        percent = run.figure(SHARE[BURST], FORWARD) if run and name != "attention" else None
        if percent:
            percents[name] = percent
    if not percents:
        return "not known where tensors may stay in a cache"
    least, most = min(percents, key=lambda name: percents[name]), max(percents, key=lambda name: percents[name])
    return (f"torch.compile reaches {percents[least]:.0f} % of a copy's speed ({least}) to {percents[most]:.0f} % "
            f"({most})")
