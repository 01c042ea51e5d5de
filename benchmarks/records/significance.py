"""How far off may a recorded time be, and when do two of them differ by more?

Statistics of compare, whose docstring has the rules in words. A time is held against what a matmul and a copy took
meanwhile; what is left scatters within a process, and from one process of the same code to another.
"""
import math
import statistics
from dataclasses import dataclass

from benchmarks.records.read import Run, case, extra, info, label, metric, runner, runs, shape, values
from common.report.record import Record
from common.runtime import timing

RESOLUTION = 0.05                     # the noise that SAME allows; the difference is known to within that
NO_FLOOR = 0.10                       # what is assumed of processes where fewer than five have been recorded
PROCESSES = 5                         # of the same code, at the least, for a floor
REACH = 2.5                           # standard deviations of one process: at 2, one row in twenty would be called


@dataclass(frozen=True)
class What:
    """What a row measures. Rows are compared where all of this is the same."""
    case: str
    mode: str
    launch: str
    shape: str
    dtype: str                        # of the matmuls, then of the parameters
    gpu: str


@dataclass(frozen=True)
class Spread:
    """Samples in short: their median in ms, and the reach of its 95 % interval, relative to it."""
    median: float
    reach: float


@dataclass(frozen=True)
class Process:
    """What one process says of a row."""
    time: Spread
    calibrations: dict[str, Spread]   # of what was sampled in between, by name
    share: float | None               # of its time that goes to matmuls and attention; None where it was not profiled


@dataclass(frozen=True)
class Measured:
    """One row of a file, over all processes that measured it; times in ms."""
    ms: float                         # the median of their medians
    calibration: dict[str, float]     # the same of each calibration, by name; of those that all processes sampled
    share: float | None               # of its time that goes to matmuls and attention; None where it was not profiled
    within: float                     # reach of the 95 % interval of the median within a process, relative
    calibration_within: float         # the same of the calibrations, weighed as the row is held against them
    between: float | None             # reach of one process's median, relative; None with fewer than five
    clock: str                        # how it was sampled
    launch_bound: bool                # most processes were: its time is the host's, against which nothing is held
    runs: frozenset[str | None] = frozenset()      # which processes


def what(line: Record) -> What:
    """What a latency record measures."""
    fields = case(line)
    dtypes = f"{line['benchmark']['dtype']}, {info(line)['parameter_dtype']}"
    return What(label(line, engine=False), fields["pass"], fields["launch"], shape(line), dtypes, runner(line)["name"])


def rows(lines: list[Record]) -> dict[What, list[Run]]:
    """What was measured -> its runs, one a process, of those that ended well and share the `origin` of the latest."""
    return of_the_latest(all_rows(lines))


def of_the_latest(taken: dict[What, list[tuple[tuple, Run]]]) -> dict[What, list[Run]]:
    """Of each row those runs that share the origin of its last one."""
    latest = {}
    for where, came in taken.items():
        last_origin = came[-1][0]
        latest[where] = [run for run_origin, run in came if run_origin == last_origin]
    return latest


def all_rows(lines: list[Record]) -> dict[What, list[tuple[tuple, Run]]]:
    """What was measured -> (origin, run) of all that ended well, in the order of the file; each process once."""
    taken: dict[What, list[tuple[tuple, Run]]] = {}
    for run in runs(lines):
        if run.status == "ok":
            origins = {what(line): origin(line) for line in run.lines if _is_timing(line)}
            for where, run_origin in origins.items():
                taken.setdefault(where, []).append((run_origin, run))
    return taken


def _is_timing(line: Record) -> bool:
    return metric(line) == "latency" and bool(values(line)) and not extra(line).get("emulated")


def origin(line: Record) -> tuple:
    """What processes have in common that measured the same code in the same way."""
    return info(line).get("git"), info(line)["engine"], case(line)["study"], extra(line).get("clock")


def process_of(where: What, run: Run) -> Process:
    """What one run says of a row that it holds."""
    line = run.find(where.mode, "latency", where.launch)
    assert line is not None
    calibrations = {}
    for name, samples in (extra(line).get("calibration") or {}).items():
        if samples:
            calibrations[name] = spread(samples)
    share = None
    if parts := run.parts(where.mode):
        share = (parts["GEMM"] + parts["attention"]) / sum(parts.values())
    return Process(spread(values(line)), calibrations, share)


def spread(samples: list[float]) -> Spread:
    """Median, and the reach of its 95 % interval; of fewer than six, how far they are apart."""
    low, high = timing.median_interval(samples)
    if math.isinf(high):
        low, high = min(samples), max(samples)
    median = statistics.median(samples)
    return Spread(median, (high - low) / 2 / median)


def measured(where: What, case_runs: list[Run]) -> Measured:
    """One row from the runs that measured it."""
    processes = [process_of(where, run) for run in case_runs]
    names = set.intersection(*(set(process.calibrations) for process in processes))
    calibration = {}
    for name in names:
        of_processes = [process.calibrations[name].median for process in processes]
        calibration[name] = statistics.median(of_processes)
    shares = [process.share for process in processes if process.share is not None]
    share = statistics.median(shares) if shares else None
    weight = weights(where, names, share)
    scaled, calibrations_within = [], []
    for process in processes:
        own = {name: process.calibrations[name].median for name in names}
        scaled.append(process.time.median / expected_ratio(where, calibration, own, share))
        calibrations_within.append(sum(weight[name] * process.calibrations[name].reach for name in weight))
    between = None
    if len(processes) >= PROCESSES:
        between = REACH * statistics.stdev(scaled) / statistics.mean(scaled)
    held_up = [run for run in case_runs if where.launch == "eager" and run.launch_bound(where.mode)]
    last = case_runs[-1].find(where.mode, "latency", where.launch)
    return Measured(
        ms=statistics.median(process.time.median for process in processes), calibration=calibration, share=share,
        within=statistics.median(process.time.reach for process in processes),
        calibration_within=statistics.median(calibrations_within), between=between,
        clock=extra(last).get("clock", "") if last else "", launch_bound=len(held_up) > len(case_runs) / 2,
        runs=frozenset(run.info["run"] for run in case_runs))


def expected_ratio(where: What, old: dict[str, float], new: dict[str, float], share: float | None) -> float:
    """How much longer the new machine should take for a row, from how much longer its matmul and its copy take."""
    ratio = 1.0
    for name, weight in weights(where, old.keys() & new.keys(), share).items():
        ratio *= (new[name] / old[name]) ** weight
    return ratio


def weights(where: What, names: set[str], share: float | None) -> dict[str, float]:
    """How much of a row goes by which of the calibrations `names`; none where the matmul or the copy is missing."""
    gemm = "gemm float32" if where.dtype.startswith("float32") and "gemm float32" in names else "gemm"
    share = 0.5 if share is None else share
    return {gemm: share, "copy": 1 - share} if {gemm, "copy"} <= names else {}


def floors(lines: list[Record]) -> dict[What, float]:
    """What was measured -> the floor between processes, from records that hold at least five of them.

    Five processes tell a row's own spread badly: none is taken for less than the median of all rows of its shape.
    """
    by_shape: dict[str, dict[What, float]] = {}
    for where, case_runs in rows(lines).items():
        if (floor := measured(where, case_runs).between) is not None:
            by_shape.setdefault(where.shape, {})[where] = floor
    raised = {}
    for alike in by_shape.values():
        least = statistics.median(alike.values())
        for where, floor in alike.items():
            raised[where] = max(floor, least)
    return raised


def comparable(old: Measured, new: Measured) -> bool:
    """Whether calibrations and a floor hold for the two: sampled in the same way, and not by how fast the host is."""
    return old.clock == new.clock and not (old.launch_bound or new.launch_bound)


def floor_of(old: Measured, new: Measured, floor: float | None) -> tuple[float, bool]:
    """(floor, whether it is assumed) for two rows: the recorded one is of what calibrations leave over, and holds where
    these do.
    """
    if floor and comparable(old, new):
        return floor, False
    return max(NO_FLOOR, floor or 0.0), True


def noises_of(old: Measured, new: Measured, floor: float, assumed: bool) -> tuple[float, float]:
    """How far each side may be off, relative. Several processes count as one: they share what is their machine's own.

    A known floor holds the noise of the calibrations; beside an assumed one it is added. The same runs in both files
    share their calibrations, which then cancel.
    """
    add_calibrations = assumed and comparable(old, new) and old.runs != new.runs
    noises = []
    for side in (old, new):
        own = max(side.within, floor)
        noises.append(math.hypot(own, side.calibration_within) if add_calibrations else own)
    return noises[0], noises[1]


def verdict(where: What, old: Measured, new: Measured, noises: tuple[float, float]) -> tuple[float, float, str]:
    """(difference, noise of both, verdict), with what `noises_of` said: the difference relative to old, + is slower.

    Its logarithm is held against the noise: it is the same difference whichever file is called old.
    """
    difference, noise = math.log(new.ms / old.ms), math.hypot(*noises)
    if comparable(old, new):
        known = [share for share in (old.share, new.share) if share is not None]
        share = statistics.mean(known) if known else None
        difference -= math.log(expected_ratio(where, old.calibration, new.calibration, share))
    return math.expm1(difference), noise, word_for(difference, noise)


def word_for(difference: float, noise: float) -> str:
    """FASTER or SLOWER beyond the noise; within it SAME, or where the noise is large UNSURE."""
    if abs(difference) > noise:
        return "SLOWER" if difference > 0 else "FASTER"
    return "SAME" if noise <= RESOLUTION else "UNSURE"
