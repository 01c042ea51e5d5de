"""Is a change between two recorded runs real? Two files of records, row by row.

    python -m benchmarks.compare old.jsonl new.jsonl
    python -m benchmarks.compare old.jsonl new.jsonl --fail-above 5%

Milliseconds of different days can't be compared as they are: clocks and neighbours differ. So each run's median is
divided by the time of a matmul and a copy that were sampled in between (`cal`), and the difference is held against the
noise: the spread of the medians within the runs, and the floor between processes of the same code, from at least five
of them (`python -m benchmarks.ladder --processes 5`): in the files themselves, or in --noise. The verdict is

    FASTER, SLOWER   the difference is beyond the noise
    SAME             it is not, and a difference of 5 % would have been
    UNSURE           it is not, and the noise is too large to say more

Exit status: 0 ok, 1 something is SLOWER by more than --fail-above, 2 usage, files that don't go together included.
"""
import argparse
import dataclasses
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from common import timing
from common.run import EXIT

from . import command, records

RESOLUTION = 0.05                     # a difference that SAME excludes
NO_FLOOR = 0.05                       # what is assumed of processes where fewer than five have been recorded
PROCESSES = 5                         # of the same code, at the least, for a floor


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
    """One row of a file: over all processes that measured it."""
    ms: float                         # the median of their medians
    scaled: float                     # the same of median / calibration; `ms` where there is no calibration
    within: float                     # half-width of the 95 % interval of the median within a process, relative
    between: float | None             # the same of the median over processes, relative; None with fewer than five
    calibrated: bool


def rows(lines: list[dict]) -> dict[What, list[dict]]:
    """What was measured -> its latency records, one a process."""
    found: dict[What, list[dict]] = {}
    for line in lines:
        extra, info = line["metric"]["extra_info"], line["benchmark"]["extra_info"]
        if line["metric"]["name"] != "latency" or not line["metric"]["benchmark_values"] or extra.get("emulated"):
            continue
        what = What(records.label(line), line["benchmark"]["mode"], extra["launch"], line["model"]["name"],
                    f"{line['benchmark']['dtype']}, {info['parameter_dtype']}", line["runners"][0]["name"])
        found.setdefault(what, []).append(line)
    return found


def measured(latencies: list[dict]) -> Measured:
    """One row from the latency records of all processes that measured it."""
    medians, scaled, widths = [], [], []
    calibrated = all(all(line["metric"]["extra_info"].get("calibration", {}).get(name) for name in ("gemm", "copy"))
                     for line in latencies)
    for line in latencies:
        samples, extra = line["metric"]["benchmark_values"], line["metric"]["extra_info"]
        median = statistics.median(samples)
        low, high = timing.median_interval(samples)
        if math.isinf(high):                              # fewer than six samples: as wide as they are apart
            low, high = min(samples), max(samples)
        medians.append(median)
        widths.append((high - low) / 2 / median)
        unit = sum(statistics.median(extra["calibration"][name]) for name in ("gemm", "copy")) if calibrated else 1.0
        scaled.append(median / unit)
    return Measured(statistics.median(medians), statistics.median(scaled), statistics.median(widths), spread(scaled),
                    calibrated)


def spread(values: list[float]) -> float | None:
    """How far one process may be from the median of all, relative: twice the standard deviation. None below five."""
    return 2 * statistics.stdev(values) / statistics.mean(values) if len(values) >= PROCESSES else None


def floors(lines: list[dict]) -> dict[What, float]:
    """What was measured -> the floor between processes, from records that hold at least five of them.

    Five processes tell a row's own spread badly: none is taken for less than the median of all rows of the file.
    """
    found = {what: measured(latencies).between for what, latencies in rows(lines).items()}
    found = {what: floor for what, floor in found.items() if floor is not None}
    return {what: max(floor, statistics.median(found.values())) for what, floor in found.items()}


def verdict(old: Measured, new: Measured, floor: float) -> tuple[float, float, str]:
    """(difference, noise, verdict); difference and noise are relative to old, the difference positive where slower."""
    calibrated = old.calibrated and new.calibrated
    before, after = (old.scaled, new.scaled) if calibrated else (old.ms, new.ms)
    difference = after / before - 1
    noise = math.sqrt(old.within**2 + new.within**2 + 2 * floor**2)
    if abs(difference) > noise:
        return difference, noise, "SLOWER" if difference > 0 else "FASTER"
    return difference, noise, "SAME" if abs(difference) + noise <= RESOLUTION or noise <= RESOLUTION / 2 else "UNSURE"


def together(old: dict[What, list], new: dict[What, list], force: bool) -> list[tuple[What, What]]:
    """Which rows of the two files measure the same. Raises ValueError where they differ in what must not.

    With `force` what differs between the files as wholes, the GPU say, does not count.
    """
    ignored = []
    for name in ("gpu", "shape", "dtype", "step"):
        sides = [{getattr(what, name) for what in side} for side in (old, new)]
        if not sides[0] & sides[1]:
            if not force:
                raise ValueError(f"{name} differs: {' and '.join(sorted(sides[0]))} in the old, "
                                 f"{' and '.join(sorted(sides[1]))} in the new; --force compares them all the same")
            ignored.append(name)
    blank = dict.fromkeys(ignored, "")
    known = {dataclasses.replace(what, **blank): what for what in old}
    pairs = [(known[key], what) for what in new if (key := dataclasses.replace(what, **blank)) in known]
    if not pairs:
        raise ValueError("no row of the one is in the other: steps, shapes, dtypes and ways of launching must agree")
    return pairs


def versions(old: list[dict], new: list[dict]) -> list[str]:
    """What software differs between two files, one line each."""
    sides = [{name: {line["dependencies"].get(name, {}).get("version", "none") for line in lines}
              for name in {name for line in (*old, *new) for name in line["dependencies"]}} for lines in (old, new)]
    drivers = [{str(line["runners"][0].get("extra_info", {}).get("driver")) for line in lines} for lines in (old, new)]
    sides = [side | {"driver": driver} for side, driver in zip(sides, drivers, strict=True)]
    return [f"{name}: {' and '.join(sorted(sides[0][name]))} -> {' and '.join(sorted(sides[1][name]))}"
            for name in sorted(sides[0]) if sides[0][name] != sides[1][name]]


def compare(old: list[dict], new: list[dict], noise: list[dict], force: bool) -> tuple[list[list], list[str], float]:
    """(rows, headers, the largest SLOWER difference). Raises ValueError where the files don't go together."""
    before, after = rows(old), rows(new)
    for side, name in ((before, "old"), (after, "new")):
        if not side:
            raise ValueError(f"the {name} file holds no timings")
    known = floors(noise) | floors(old) | floors(new)
    found, worst = [], 0.0
    for a, b in together(before, after, force):
        left, right = measured(before[a]), measured(after[b])
        floor = max((known[what] for what in (a, b) if what in known), default=NO_FLOOR)
        difference, width, word = verdict(left, right, floor)
        if word == "SLOWER":
            worst = max(worst, difference)
        own = [_noise(side, known.get(what)) for side, what in ((left, a), (right, b))]
        found.append([b.step, b.mode, b.launch, f"{left.ms:.3f}", own[0], f"{right.ms:.3f}", own[1],
                      f"{right.ms - left.ms:+.3f}", f"{100 * difference:+.1f} %", f"{100 * width:.1f} %", word])
    headers = ["step", "pass", "launch", "old ms", "noise", "new ms", "noise", "difference ms", "percent (by cal)",
               "seen from", "verdict"]
    return found, headers, worst


def _noise(side: Measured, floor: float | None) -> str:
    return f"{100 * math.hypot(side.within, floor or NO_FLOOR):.1f} %" + ("" if floor else "?")


def fraction(text: str) -> float:
    """5% or 0.05 -> 0.05. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share such as 5% or 0.05")
    return value


def recorded_noise(lines: list[dict]) -> Path | None:
    """The processes of the same code that were recorded for this GPU, if any."""
    names = {line["runners"][0]["name"] for line in lines}
    for path in sorted((Path(__file__).parent / "results").glob("*/noise*.jsonl")):
        if {line["runners"][0]["name"] for line in records.read(path)} == names:
            return path
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: command.usage(parser, message)
    parser.add_argument("old", help="JSON lines that --json of a step or a study wrote")
    parser.add_argument("new", help="the same of another day, driver, GPU or version")
    parser.add_argument("--noise", metavar="FILE", help="records of at least five processes of the same code "
                                                        "(default: the ones recorded for this GPU, if any)")
    parser.add_argument("--fail-above", type=fraction, metavar="P", help="exit 1 where a row is SLOWER by more, as 5%%")
    parser.add_argument("--force", action="store_true", help="compare across GPUs, shapes, dtypes or steps")
    options = parser.parse_args(argv)
    try:
        old, new = records.read(options.old), records.read(options.new)
        path = options.noise or recorded_noise(new)
        noise = records.read(path) if path else []
        found, headers, worst = compare(old, new, noise, options.force)
    except ValueError as error:
        command.usage(parser, str(error))
    with command.shown_to_a_person("compare"):
        print(command.table(found, headers))
        words = [row[-1] for row in found]
        print("\n" + ", ".join(f"{words.count(word)} {word}" for word in ("FASTER", "SLOWER", "SAME", "UNSURE")
                               if word in words))
        if any("?" in str(cell) for row in found for cell in row):
            print(f"?: fewer than {PROCESSES} processes of the same code recorded: {100 * NO_FLOOR:.0f} % is assumed")
        for line in versions(old, new):
            print(f"differs: {line}")
    return EXIT["failed" if options.fail_above is not None and worst > options.fail_above else "ok"]


if __name__ == "__main__":
    sys.exit(main())
