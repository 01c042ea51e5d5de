"""What benchmarks.fusions tells of its records: a summary, a table for each operation and pass, a chart."""
import math

from common import report

from . import charts, command, records
from .operations import TORCHSCRIPT

MODES = ("forward", "backward")
COPY = "copy"                          # the row that the others are percent of
UNSETTLED = "~"                        # beside a median that is not known to 0.5 %
SUMMARY = """Percent of a copy of as many bytes (attention: of the matmul rate) at the largest size, forward / backward,
each level by its faster way of launching, and the compiler's time over that of the Triton kernel"""


def summary(lines: list[dict], width: int | None = None) -> str:
    """How near each level comes to the memory's speed, a row for each experiment; empty where no percents are known."""
    largest: dict[str, dict[str, records.Run]] = {}
    for run in records.runs(lines):
        if len(parts := run.info["step"].split(", ")) == 3 and "x" in parts[1]:
            name, size, level = parts
            sizes = largest.setdefault(name, {})
            if sizes.get("size", (0,))[0] < (count := math.prod(map(int, size.split(" x ")))):
                sizes.clear()
                sizes["size"] = (count, size)
            if sizes["size"][1] == size:
                sizes[level] = run
    rows = []
    for name, found in largest.items():
        del found["size"]
        own = ("eager", TORCHSCRIPT, "torch.compile", "Triton", "CUDA C++", COPY)
        libraries = {level: cell for level, run in found.items() if level not in own and (cell := _percents(run))}
        cells = [_percents(found[level]) if level in found else "" for level in own[:-1]]
        if any(cells):
            rows.append([name, *cells, _over(found.get("torch.compile"), found.get("Triton")),
                         ", ".join(f"{level} {cell}" for level, cell in libraries.items()),
                         ", ".join(filter(None, (_over(found[level], found.get("Triton")) for level in libraries)))])
    headers = ["experiment", "eager", "TorchScript", "compile", "Triton", "CUDA C++", "Triton vs compile", "libraries",
               "Triton vs these"]
    copies = [line["metric"]["benchmark_values"][0] for line in lines if line["metric"]["name"] == "work rate"
              and line["benchmark"]["extra_info"]["step"].endswith(f", {COPY}")]
    fastest = f" The fastest copy here, of any size, ran at {command.figures(max(copies))} GB/s." if copies else ""
    return f"{SUMMARY}.{fastest}\n\n{command.table(rows, headers, width)}" if rows else ""


def _percents(run: records.Run) -> str:
    """Forward / backward, of the faster way of launching; empty without a forward."""
    found = [run.value(mode, "percent of limit", run.best(mode)) if run.best(mode) else None for mode in MODES]
    return "" if found[0] is None else " / ".join(f"{percent:.0f}" for percent in found if percent is not None)


def _over(slow: records.Run | None, fast: records.Run | None) -> str:
    """How many times as fast, forward / backward: the median of the ratios of paired rounds."""
    found = [records.paired(slow, fast, mode) for mode in MODES] if slow and fast else [None]
    return "" if found[0] is None else " / ".join(f"{ratio[0]:.3f}" for ratio in found if ratio is not None)


def text(lines: list[dict], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    runs = {run.info["step"]: run for run in records.runs(lines) if run.info["step"] != "fusions"}
    blocks, on_gpu = [records.provenance(lines)], lines[0]["runners"][0]["type"] == "cuda"
    blocks.append(summary(lines, width))
    merged = len({line["benchmark"]["extra_info"]["run"] for line in lines}) > 1
    for name in dict.fromkeys(step.split(", ")[0] for step in runs):
        some = {step: run for step, run in runs.items() if step.startswith(name + ", ")}
        of = f" (commit {records.commits([line for run in some.values() for line in run.lines])})" if merged else ""
        for mode in MODES:
            if mode == "forward" or any(run.best(mode) for run in some.values()):
                headers = ["size", "level", "status", "error", "us, eager", "us, graph", _unit(some), _of(some),
                           "kernels" if on_gpu else "operators"]
                rows = [_row(run, mode) for run in some.values()]
                told = [n for n in range(len(headers)) if n < 2 or any(row[n] not in ("", "n/a") for row in rows)]
                headers, rows = [headers[n] for n in told], [[row[n] for n in told] for row in rows]
                blocks.append(f"{name}, {mode}{of}\n\n" + command.table(rows, headers, width, keys=2))
    if any(run.best(mode) and run.value(mode, "percent of limit", run.best(mode)) is None
           for run in runs.values() for mode in MODES):
        blocks.append("No percentage where the tensors may stay in a cache (of a CPU's caches nothing is known).")
    if any(UNSETTLED in block for block in blocks):
        blocks.append(f"{UNSETTLED} these rounds do not tell the median to 0.5 %")
    blocks.append("\n".join(records.cautions(runs.values())))
    return "\n\n".join(filter(None, blocks))


def _row(run: records.Run, mode: str) -> list[str]:
    _, size, level = run.info["step"].split(", ")
    errors = [line["metric"]["benchmark_values"][0] for line in run.lines if line["metric"]["name"].endswith(" error")
              and line["metric"]["name"].startswith("output" if mode == "forward" else "gradient")]
    best = run.best(mode)
    times = [run.find(mode, "latency", launch) for launch in report.LAUNCHES]
    kernels, percent = run.value(mode, "launches"), run.value(mode, "percent of limit", best)
    return [size, level, run.status, f"{max(errors):.1e}" if errors else "",
            *map(_microseconds, times),
            "" if best is None else command.figures(run.value(mode, "work rate", best)),
            "" if percent is None else f"{percent:.0f}",
            "" if kernels is None else f"{kernels / _copies(run, mode):.0f}"]


def _microseconds(latency: dict | None) -> str:
    if latency is None or not latency["metric"]["benchmark_values"]:
        return "n/a"
    found = latency["metric"]["extra_info"]
    return command.figures(1e3 * found["median"]) + UNSETTLED * (not found["settled"])


def _copies(run: records.Run, mode: str) -> int:
    return run.find(mode, "work rate", "eager")["metric"]["extra_info"]["copies"]


def _unit(runs: dict[str, records.Run]) -> str:
    return next((line["metric"]["extra_info"]["unit"] for run in runs.values() for line in run.lines
                 if line["metric"]["name"] == "work rate"), "GB/s")


def _of(runs: dict[str, records.Run]) -> str:
    return "% of copy" if _unit(runs) == "GB/s" else "% of matmul"


def chart_stems(lines: list[dict], stem: str) -> list[str]:
    """The one chart that `draw` makes; none without a sweep."""
    return [f"{stem}-bandwidth"] if any(len(points) > 1 for curves in _curves(lines).values()
                                        for points in curves.values()) else []


def draw(lines: list[dict], stem: str) -> None:
    """Draw `chart_stems`: GB/s against the size of the first tensor, forward, a panel for each experiment."""
    if not chart_stems(lines, stem):
        command.no_chart("fusions", "it needs two sizes of an experiment")
    else:
        charts.panels_chart(_curves(lines), f"{stem}-bandwidth", lines, "million elements", "GB/s, forward",
                            f"{lines[0]['runners'][0]['name']}, {lines[0]['model']['name']}, "
                            f"{lines[0]['benchmark']['dtype']}: least bytes over the time of the faster launch")


def _curves(lines: list[dict]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Experiment -> level -> [(million elements, GB/s)]."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run in records.runs(lines):
        rate = run.find("forward", "work rate", run.best("forward")) if run.best("forward") else None
        if rate is None or rate["metric"]["extra_info"]["unit"] != "GB/s":
            continue
        name, size, level = run.info["step"].split(", ")
        at, value = math.prod(map(int, size.split(" x "))) / 1e6, rate["metric"]["benchmark_values"][0]
        found.setdefault(name, {}).setdefault(level, []).append((at, value))
    return found
