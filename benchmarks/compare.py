"""Is a change between two recorded runs real? Two files of records, row by row.

    python -m benchmarks.compare old.jsonl new.jsonl
    python -m benchmarks.compare old.jsonl new.jsonl --fail-above 5%

Milliseconds of different days can't be compared as they are: clocks and neighbours differ. So the change of each time
is held against that of a matmul (an FP32 row's against one in FP32) and a copy which were sampled in between, weighted
by the share of the row's time that goes to matmuls and attention (half where that was not profiled), and what is left
against the noise: the spread of the medians within a process, and between processes of the same code, from at least
five of them (`python -m benchmarks.ladder --processes 5`): in the files themselves, in --noise, or recorded for this
GPU. Where samples were taken in different ways (a script's, and those of interleaved rounds on a GPU) times are
compared as they are, and no floor is known. Of a file that holds several runs of a row the latest counts, with all
others of its commit, Transformer Engine, study and way of sampling. Verdicts:

    FASTER, SLOWER   the difference is beyond the noise
    SAME             it is not, and the noise is at most 5 %: what is larger would have been seen
    UNSURE           it is not, and the noise is too large to say more
    LOST             ok in the old file, and in the new one it failed

Exit status: 0 ok; 1, with --fail-above, a row is SLOWER by more, LOST, or only in the old file; 2 usage, files that
don't go together included.
"""
import argparse
import dataclasses
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from common import timing
from common.run import EXIT, hush

from . import command, records
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
    processes: int
    clock: str                        # how it was sampled


def what(line: dict) -> What:
    """What a latency record measures."""
    info = line["benchmark"]["extra_info"]
    return What(records.label(line, engine=False), line["benchmark"]["mode"], line["metric"]["extra_info"]["launch"],
                line["model"]["name"], f"{line['benchmark']['dtype']}, {info['parameter_dtype']}",
                line["runners"][0]["name"])


def rows(lines: list[dict]) -> dict[What, list[Run]]:
    """What was measured -> its runs, one a process, of those that ended well and share the `origin` of the latest."""
    return {where: [run for came, run in taken if came == taken[-1][0]] for where, taken in _all_rows(lines).items()}


def _all_rows(lines: list[dict]) -> dict[What, list[tuple[tuple, Run]]]:
    found: dict[What, list[tuple[tuple, Run]]] = {}
    for run in records.runs(lines):
        if run.status != "ok":
            continue
        for line in run.lines:
            extra = line["metric"]["extra_info"]
            if line["metric"]["name"] == "latency" and line["metric"]["benchmark_values"] and not extra.get("emulated"):
                found.setdefault(what(line), []).append((origin(line), run))
    return found


def origin(line: dict) -> tuple:
    """What processes have in common that measured the same code in the same way."""
    info = line["benchmark"]["extra_info"]
    return info.get("git"), info["engine"], info.get("study"), line["metric"]["extra_info"].get("clock")


def measured(where: What, runs: list[Run]) -> Measured:
    """One row from the runs that measured it."""
    medians, widths, shares, calibrations, reaches = [], [], [], [], []
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
    return Measured(statistics.median(medians), middle, share, statistics.median(widths), off, between, len(runs),
                    line["metric"]["extra_info"].get("clock", ""))


def reach(samples: list[float]) -> float:
    """Of the 95 % interval of their median, relative; of fewer than six, how far they are apart."""
    low, high = timing.median_interval(samples)
    if math.isinf(high):
        low, high = min(samples), max(samples)
    return (high - low) / 2 / statistics.median(samples)


def expected_ratio(where: What, old: dict[str, float], new: dict[str, float], share: float | None) -> float:
    """How much longer the new machine should take for a row, from how much longer its matmul and its copy take."""
    weighed = weights(where, old.keys() & new.keys(), share)
    return sum(weight * new[name] / old[name] for name, weight in weighed.items()) if weighed else 1.0


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
    """How far the row may be off, relative: a median over n processes is nearer than that of one."""
    one = max(side.within, floor)
    return one if side.processes < PROCESSES else 1.25 * one / math.sqrt(side.processes)


def verdict(where: What, old: Measured, new: Measured, floor: float | None) -> tuple[float, float, str]:
    """(difference, noise, verdict); difference and noise are relative to old, the difference positive where slower."""
    known = [share for share in (old.share, new.share) if share is not None]
    expected = 1.0
    if old.clock == new.clock:
        expected = expected_ratio(where, old.calibration, new.calibration, statistics.mean(known) if known else None)
    difference = new.ms / old.ms / expected - 1
    noise = math.hypot(noise_of(old, floor or NO_FLOOR), noise_of(new, floor or NO_FLOOR))
    if floor is None and old.clock == new.clock:           # a floor between processes holds that of the calibrations
        noise = math.hypot(noise, old.calibration_within, new.calibration_within)
    if abs(difference) > noise:
        return difference, noise, "SLOWER" if difference > 0 else "FASTER"
    return difference, noise, "SAME" if noise <= RESOLUTION else "UNSURE"


def together(old: dict[What, list], new: dict[What, list], force: bool) -> list[tuple[What, What]]:
    """Which rows of the two files measure the same. Raises ValueError where they differ in what must not.

    Of every step that both hold, the GPU, the shape and the dtype must agree; with `force` they need not, as long as
    it is clear which row is which.
    """
    ignored = []
    steps = [{where.step for where in side} for side in (old, new)]
    common = steps[0] & steps[1]
    if not common:
        if not force or max(map(len, steps)) > 1:
            raise ValueError(_differs("step", *steps, force))
        ignored.append("step")
    for name in ("gpu", "shape", "dtype"):
        for step in sorted(common):
            sides = [{getattr(where, name) for where in side if where.step == step} for side in (old, new)]
            if not sides[0] & sides[1]:
                if not force:
                    raise ValueError(_differs(f"{name} of {step}", *sides, force))
                ignored.append(name)
    if not common:
        ignored += ["gpu", "shape", "dtype"]
    blank = dict.fromkeys(ignored, "")
    keys = [{dataclasses.replace(where, **blank): where for where in side} for side in (old, new)]
    if any(len(known) < len(side) for known, side in zip(keys, (old, new), strict=True)):
        raise ValueError("--force: a file holds several rows that would count as the same; give files of one each")
    pairs = [(keys[0][key], where) for key, where in keys[1].items() if key in keys[0]]
    if not pairs:
        raise ValueError("no row of the one is in the other: steps, shapes, dtypes and ways of launching must agree")
    return pairs


def _differs(name: str, old: set[str], new: set[str], force: bool) -> str:
    sides = ["; ".join([*sorted(side)[:3], *(["..."] if len(side) > 3 else [])]) for side in (old, new)]
    return (f"{name} differs: {sides[0]} in the old, {sides[1]} in the new; "
            + ("even --force can't tell which goes with which" if force or (len(old) > 1 and len(new) > 1)
               else "--force compares them all the same"))


def versions(old: list[dict], new: list[dict]) -> list[str]:
    """What differs between two files' timings in software and in how samples were taken, one line each."""
    old, new = ([line for line in lines if line["metric"]["name"] == "latency"] for lines in (old, new))
    sides = [{name: {line["dependencies"].get(name, {}).get("version", "none") for line in lines}
              for name in {name for line in (*old, *new) for name in line["dependencies"]}} for lines in (old, new)]
    drivers = [{str(line["runners"][0].get("extra_info", {}).get("driver")) for line in lines} for lines in (old, new)]
    clocks = [{line["metric"]["extra_info"].get("clock", "none") for line in lines} for lines in (old, new)]
    sides = [side | {"driver": driver, "clock": clock_}
             for side, driver, clock_ in zip(sides, drivers, clocks, strict=True)]
    return [f"{name}: {' and '.join(sorted(sides[0][name]))} -> {' and '.join(sorted(sides[1][name]))}"
            for name in sorted(sides[0]) if sides[0][name] != sides[1][name]]


def compare(old: list[dict], new: list[dict], noise: list[dict], force: bool
            ) -> tuple[list[list], list[str], list[tuple[str, float]]]:
    """(rows, headers, (row in words, difference) of those SLOWER). Raises ValueError where files don't go together."""
    before, after = rows(old), rows(new)
    for side, name in ((before, "old"), (after, "new")):
        if not side:
            raise ValueError(f"the {name} file holds no timings")
    known = floors(noise) | floors(old) | floors(new)
    pairs = together(before, after, force)
    several = len({b.shape for _, b in pairs}) > 1
    found, slower = [], []
    for a, b in pairs:
        left, right = measured(a, before[a]), measured(b, after[b])
        floor = max((known[where] for where in (a, b) if where in known), default=None)
        if left.clock != right.clock:                      # it is what is left beside the calibrations
            floor = None
        difference, width, word = verdict(b, left, right, floor)
        if word == "SLOWER":
            slower.append((", ".join([b.step, *([b.shape] if several else []), b.mode, b.launch]), difference))
        own = [f"{100 * noise_of(side, floor or NO_FLOOR):.1f} %{'' if floor else '?'}" for side in (left, right)]
        found.append([b.step, *([b.shape] if several else []), b.mode, b.launch, f"{left.ms:.3f}", own[0],
                      f"{right.ms:.3f}", own[1], f"{right.ms - left.ms:+.3f}", f"{100 * difference:+.1f} %",
                      f"{100 * width:.1f} %", word])
    headers = ["step", *(["shape"] if several else []), "pass", "launch", "old ms", "noise", "new ms", "noise",
               "difference ms", "percent (by cal)", "seen from", "verdict"]
    return found, headers, slower


def unmatched(old: list[dict], new: list[dict], force: bool) -> tuple[list[str], list[str], list[str]]:
    """(rows only in the old file, rows only in the new one, steps that were ok and failed since), in words."""
    before, after = rows(old), rows(new)
    pairs = together(before, after, force)
    was, now = _cases(old), _cases(new)
    bad = {key: run.info["reason"] for key, runs in now.items() for run in runs
           if run.status in ("failed", "oom") and run.info.get("git") == runs[-1].info.get("git")    # not mended since
           and any(earlier.status == "ok" for earlier in was.get(key, []))}
    lost = [f"LOST: {step}, {shape}: {reason}" for (step, shape), reason in bad.items()]
    alone = []
    for side, place, name in ((before, 0, "old"), (after, 1, "new")):
        matched = {pair[place] for pair in pairs}
        alone.append([f"only in the {name} file: {where.step}, {where.shape}, {where.mode}, {where.launch}"
                      for where in side if where not in matched and (where.step, where.shape) not in bad])
    return *alone, lost


def _cases(lines: list[dict]) -> dict[tuple[str, str], list[Run]]:
    """(step, shape) -> its runs."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in records.runs(lines):
        found.setdefault((records.label(run.lines[-1], engine=False), run.lines[0]["model"]["name"]), []).append(run)
    return found


def summary(found: list[list]) -> str:
    """How many rows got which verdict."""
    words = [row[-1] for row in found]
    return ", ".join(f"{words.count(word)} {word}" for word in ("FASTER", "SLOWER", "SAME", "UNSURE") if word in words)


def text(old: list[dict], new: list[dict], found: list[list], headers: list[str], width: int | None = None) -> str:
    """The table, how many rows got which verdict, and what differs besides."""
    lines = [command.table(found, headers, width, keys=headers.index("old ms")), "", summary(found)]
    if any("?" in str(cell) for row in found for cell in row):
        lines.append(f"?: fewer than {PROCESSES} processes of the same code recorded, or samples taken in different "
                     f"ways: {100 * NO_FLOOR:.0f} % assumed")
    for side, name in ((old, "old"), (new, "new")):
        if count := sum(len(taken) for taken in _all_rows(side).values()) - sum(map(len, rows(side).values())):
            lines.append(f"left out of the {name} file: {count} timings of other commits, versions, studies or clocks "
                         "than the latest of their row")
    return "\n".join([*lines, *(f"differs: {line}" for line in versions(old, new))])


def fraction(text: str) -> float:
    """5% or 0.05 -> 0.05; what is 1 or more needs its percent sign. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < (10 if text.endswith("%") else 1):
        raise argparse.ArgumentTypeError(f"{text!r}: give a share such as 5% or 0.05")
    return value


def recorded_noise(lines: list[dict]) -> list[dict]:
    """The processes of the same code that were recorded for these GPUs, if any."""
    names = {line["runners"][0]["name"] for line in lines}
    return [line for path in sorted((Path(__file__).parent / "results").glob("*/noise*.jsonl"))
            for line in records.read(path) if line["runners"][0]["name"] in names]


def main(argv: list[str] | None = None) -> int:
    hush()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: command.usage(parser, message)
    parser.add_argument("old", help="JSON lines that --json of a step or a study wrote")
    parser.add_argument("new", help="the same of another day, driver, GPU or version")
    parser.add_argument("--noise", metavar="FILE", help="records of at least five processes of the same code "
                                                        "(default: the ones recorded for this GPU, if any)")
    parser.add_argument("--fail-above", type=fraction, metavar="P",
                        help="exit 1 where a row is SLOWER by more, as 5%%, LOST or gone")
    parser.add_argument("--force", action="store_true", help="compare across GPUs, shapes, dtypes or steps")
    options = parser.parse_args(argv)
    try:
        old, new = records.read(options.old), records.read(options.new)
        noise = records.read(options.noise) if options.noise else recorded_noise(new)
        found, headers, slower = compare(old, new, noise, options.force)
        gone, added, lost = unmatched(old, new, options.force)
    except ValueError as error:
        command.usage(parser, str(error))
    with command.shown_to_a_person("compare"):
        command.tell("\n".join([text(old, new, found, headers), *lost, *gone, *added]))
    words = [row[-1] for row in found]
    limit = options.fail_above
    if limit is None:
        return EXIT["ok"]
    for row, difference in slower:
        if difference > limit:
            print(f"compare: {row} is {100 * difference:.1f} % slower", file=sys.stderr)
    if "UNSURE" in words:
        print(f"compare: UNSURE of {words.count('UNSURE')} of {len(words)} rows: a slowdown could hide there",
              file=sys.stderr)
    if gone:
        print(f"compare: the new file lacks {len(gone)} rows of the old one", file=sys.stderr)
    return EXIT["failed" if lost or gone or any(difference > limit for _, difference in slower) else "ok"]


if __name__ == "__main__":
    sys.exit(main())
