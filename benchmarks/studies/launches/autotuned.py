"""torch.compile's max-autotune, in several processes: it chooses kernels by timing them, so its choice is noise too."""
import functools
import re
import statistics

from benchmarks.measure.processes import in_turn
from benchmarks.records.read import Run, extra, paired, runs
from benchmarks.show.study import Options
from benchmarks.studies.launches.ways import COMPILED_STEP, MAX_AUTOTUNE, NO_GRAPHS, ONE_BY_ONE
from common import steps
from common.report.record import Record, status_record
from common.report.result import Result
from common.runtime import compiler, machine
from common.runtime.iteration import BOTH, MODES
from common.text import NOT_AVAILABLE, figures, ratio, table

AUTOTUNED_MODES = (NO_GRAPHS, MAX_AUTOTUNE)
_TEMPLATE = re.compile(r"^triton_tem_")    # a matmul that Inductor wrote from its template, in place of cuBLAS's


def measure(options: Options, name: str) -> list[Record]:
    """Time it beside the default in processes of their own, one after another; the records of all.

    Each chooses anew. Compiling takes longest and gives the same each time: the next ones find what one has compiled.
    """
    words = [name, *options.argv, "--tokens", ",".join(map(str, options.autotuned)), "--steps", str(COMPILED_STEP),
             "--ways", ",".join([ONE_BY_ONE, *(way for way in AUTOTUNED_MODES if way in options.ways)]),
             "--processes", "1", "--chart", ""]
    with compiler.sharing_kernels():
        return in_turn([words] * options.processes, options.file, name, functools.partial(_died, options))


def _died(options: Options, place: int, records: list[Record], status: int) -> list[Record]:
    """A record of a process that ended before it had any of them."""
    if any(run.variant.get("way") in AUTOTUNED_MODES for run in runs(records)):
        return []
    step = steps.load(COMPILED_STEP)
    result = Result(step.name, options.config, "float32", machine.facts(options.device), step.number, step.traits,
                    status="failed", reason=f"process {place + 1} ended with {status}", study="launches",
                    variant={"way": NO_GRAPHS})
    return [status_record(result, "run")]


def of_processes(lines: list[Record]) -> list[list[Run]]:
    """The runs of each process that has tried it, in the order in which they began."""
    by_process: dict[str, list[Run]] = {}
    for run in runs(lines):
        if "way" in run.variant and "change" not in run.variant:
            by_process.setdefault(run.info["run"], []).append(run)
    return [of_process for of_process in by_process.values() if any(_is_tried(run) for run in of_process)]


def _is_tried(run: Run) -> bool:
    return run.variant["way"] in AUTOTUNED_MODES and run.best(BOTH) is not None


def text(lines: list[Record], width: int | None = None) -> str:
    """A row for each process, mode and size: how it compares with the default, and what it chose."""
    rows, ratios = [], []
    chosen: dict[str, list[str]] = {}
    for number, of_process in enumerate(of_processes(lines), start=1):
        default = {(run.step, run.shape): run for run in of_process if run.variant["way"] == ONE_BY_ONE}
        for run in of_process:
            if not _is_tried(run):
                continue
            row = [f"process {number}, {run.shape}, {run.variant['way']}"]
            for mode in MODES:
                ms = run.median(mode, "eager")
                times = paired(default.get((run.step, run.shape)), run, mode, "eager")
                row += [figures(ms) if ms else NOT_AVAILABLE, ratio(times) if times else NOT_AVAILABLE]
                if times and mode == BOTH and run.variant["way"] == NO_GRAPHS:
                    ratios.append(times[0])
                    chosen.setdefault(run.shape, []).append(_templates(run))
            rows.append([*row, _templates(run)])
    if not rows:
        return ""
    headers = ["max-autotune", "forward ms", "x default", "f+b ms", "x default", "matmuls in Triton"]
    found = [table(rows, headers, width)]
    if len(ratios) > 1:
        found.append(f"{NO_GRAPHS}, {BOTH}: {min(ratios):.2f} to {max(ratios):.2f} times as fast as the default, "
                     f"{statistics.median(ratios):.2f} in the middle")
    if any(len(set(each)) > 1 for each in chosen.values()):
        each_chose = "; ".join(f"{', '.join(each)} at {shape}" for shape, each in chosen.items())
        found.append(f"the processes chose differently, matmuls in Triton: {each_chose}")
    return "\n\n".join(found)


def _templates(run: Run) -> str:
    """How many of the kernels of a forward+backward are such."""
    line = run.find(BOTH, "launches")
    if not line:
        return NOT_AVAILABLE
    return str(sum(count for name, count in extra(line)["kernels"].items() if _TEMPLATE.match(name)))
