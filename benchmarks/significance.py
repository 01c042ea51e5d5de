"""How far off may a recorded time be, and when do two of them differ by more?

Statistics of benchmarks.compare, whose docstring has the rules in words. A time is held against what a matmul and a
copy took meanwhile; what is left scatters within a process, and from one process of the same code to another.
"""
import math
import statistics
from dataclasses import dataclass

from common import timing

from . import records
from .records import Run

RESOLUTION = 0.05                     # the noise that SAME allows; the difference is known to within that
NO_FLOOR = 0.10                       # what is assumed of processes where fewer than five have been recorded
PROCESSES = 5                         # of the same code, at the least, for a floor
REACH = 2.5                           # standard deviations of one process: at 2, one row in twenty would be called


@dataclass(frozen=True)
class What:
    """What a row measures. Rows are compared where all of this is the same."""
    step: str
    mode: str
    launch: str
    shape: str
    dtype: str                        # of the matmuls, then of the parameters
    gpu: str


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


def what(line: dict) -> What:
    """What a latency record measures."""
    info = line["benchmark"]["extra_info"]
    return What(records.label(line, engine=False), line["benchmark"]["mode"], line["metric"]["extra_info"]["launch"],
                line["model"]["name"], f"{line['benchmark']['dtype']}, {info['parameter_dtype']}",
                line["runners"][0]["name"])


def rows(lines: list[dict]) -> dict[What, list[Run]]:
    """What was measured -> its runs, one a process, of those that ended well and share the `origin` of the latest."""
    return of_the_latest(all_rows(lines))


def of_the_latest(found: dict[What, list[tuple[tuple, Run]]]) -> dict[What, list[Run]]:
    return {where: [run for came, run in taken if came == taken[-1][0]] for where, taken in found.items()}


def all_rows(lines: list[dict]) -> dict[What, list[tuple[tuple, Run]]]:
    """What was measured -> (origin, run) of all that ended well, in the order of the file; each process once."""
    found: dict[What, list[tuple[tuple, Run]]] = {}
    for run in records.runs(lines):
        if run.status == "ok":
            for where, came in {what(line): origin(line) for line in run.lines if _is_timing(line)}.items():
                found.setdefault(where, []).append((came, run))
    return found


def _is_timing(line: dict) -> bool:
    metric = line["metric"]
    return metric["name"] == "latency" and bool(metric["benchmark_values"]) and not metric["extra_info"].get("emulated")


def origin(line: dict) -> tuple:
    """What processes have in common that measured the same code in the same way."""
    info = line["benchmark"]["extra_info"]
    return info.get("git"), info["engine"], info.get("study"), line["metric"]["extra_info"].get("clock")


def measured(where: What, runs: list[Run]) -> Measured:
    """One row from the runs that measured it."""
    medians, widths, shares, calibrations, reaches = [], [], [], [], []
    launch_bound = where.launch == "eager" and sum(bool(run.launch_bound(where.mode)) for run in runs) > len(runs) / 2
    for run in runs:
        line = run.find(where.mode, "latency", where.launch)
        samples, calibration = line["metric"]["benchmark_values"], line["metric"]["extra_info"].get("calibration") or {}
        medians.append(statistics.median(samples))
        widths.append(reach(samples))
        calibrations.append({name: statistics.median(taken) for name, taken in calibration.items() if taken})
        reaches.append({name: reach(taken) for name, taken in calibration.items() if taken})
        if parts := run.parts(where.mode):
            shares.append((parts["GEMM"] + parts["attention"]) / sum(parts.values()))
    names = set.intersection(*map(set, calibrations))
    middle = {name: statistics.median(one[name] for one in calibrations) for name in names}
    share = statistics.median(shares) if shares else None
    between = None
    if len(runs) >= PROCESSES:
        scaled = [median / expected_ratio(where, middle, one, share)
                  for median, one in zip(medians, calibrations, strict=True)]
        between = REACH * statistics.stdev(scaled) / statistics.mean(scaled)
    weighed = weights(where, names, share).items()
    off = statistics.median(sum(weight * one[name] for name, weight in weighed) for one in reaches)
    return Measured(statistics.median(medians), middle, share, statistics.median(widths), off, between,
                    line["metric"]["extra_info"].get("clock", ""), launch_bound)


def reach(samples: list[float]) -> float:
    """Of the 95 % interval of their median, relative; of fewer than six, how far they are apart."""
    low, high = timing.median_interval(samples)
    if math.isinf(high):
        low, high = min(samples), max(samples)
    return (high - low) / 2 / statistics.median(samples)


def expected_ratio(where: What, old: dict[str, float], new: dict[str, float], share: float | None) -> float:
    """How much longer the new machine should take for a row, from how much longer its matmul and its copy take."""
    return math.prod((new[name] / old[name]) ** weight
                     for name, weight in weights(where, old.keys() & new.keys(), share).items())


def weights(where: What, names: set[str], share: float | None) -> dict[str, float]:
    """How much of a row goes by which of the calibrations `names`; none where the matmul or the copy is missing."""
    gemm = "gemm float32" if where.dtype.startswith("float32") and "gemm float32" in names else "gemm"
    share = 0.5 if share is None else share
    return {gemm: share, "copy": 1 - share} if {gemm, "copy"} <= names else {}


def floors(lines: list[dict]) -> dict[What, float]:
    """What was measured -> the floor between processes, from records that hold at least five of them.

    Five processes tell a row's own spread badly: none is taken for less than the median of all rows of its shape.
    """
    found: dict[str, dict[What, float]] = {}
    for where, runs in rows(lines).items():
        if (floor := measured(where, runs).between) is not None:
            found.setdefault(where.shape, {})[where] = floor
    return {where: max(floor, statistics.median(alike.values())) for alike in found.values()
            for where, floor in alike.items()}


def noise_of(side: Measured, floor: float) -> float:
    """How far the row may be off, relative: as one process, since several on one machine share what is its own."""
    return max(side.within, floor)


def comparable(old: Measured, new: Measured) -> bool:
    """Whether calibrations and a floor hold for the two: sampled in the same way, and not by how fast the host is."""
    return old.clock == new.clock and not (old.launch_bound or new.launch_bound)


def floor_of(old: Measured, new: Measured, floor: float | None) -> tuple[float, bool]:
    """(floor, whether it is assumed) for two rows: the recorded one is of what calibrations leave over, and holds where
    these do."""
    if floor and comparable(old, new):
        return floor, False
    return max(NO_FLOOR, floor or 0.0), True


def verdict(where: What, old: Measured, new: Measured, floor: float, assumed: bool) -> tuple[float, float, str]:
    """(difference, noise of both, verdict), with what `floor_of` said: the difference relative to old, + is slower.

    Its logarithm is held against the noise: it is the same difference whichever file is called old.
    """
    difference, noise = math.log(new.ms / old.ms), math.hypot(noise_of(old, floor), noise_of(new, floor))
    if comparable(old, new):
        known = [share for share in (old.share, new.share) if share is not None]
        difference -= math.log(expected_ratio(where, old.calibration, new.calibration,
                                              statistics.mean(known) if known else None))
        if assumed:                                    # a known floor holds that of the calibrations
            noise = math.hypot(noise, old.calibration_within, new.calibration_within)
    word = "SAME" if noise <= RESOLUTION else "UNSURE"
    if abs(difference) > noise:
        word = "SLOWER" if difference > 0 else "FASTER"
    return math.expm1(difference), noise, word
