"""Is a change between two recorded runs real? Two files of records, row by row.

    python -m benchmarks.compare old.jsonl new.jsonl
    python -m benchmarks.compare old.jsonl new.jsonl --fail-above 5%

Milliseconds of different days can't be compared as they are: clocks and neighbours differ. So the change of each time
is held against that of a matmul (an FP32 row's against one in FP32) and a copy which were sampled in between, weighted
by the share of the row's time that goes to matmuls and attention (half where that was not profiled), and what is left
against the noise: the spread of the medians within a process, and between processes of the same code, from at least
five of them (`python -m benchmarks.ladder --processes 5`): in the files themselves, in --noise, or recorded for this
GPU. Where samples were taken in different ways (a script's, and those of interleaved rounds on a GPU), and where a row
is launch-bound, its time the host's, times are compared as they are, and at least 10 % is assumed. Of a file that holds
several runs of a row the latest counts, with all others of its commit, Transformer Engine, study and way of sampling.
Verdicts:

    FASTER, SLOWER   the difference is beyond the noise
    SAME             it is not, and the noise, "seen from", is at most 5 %: what is larger would have been seen
    UNSURE           it is not, and the noise is too large to say more
    LOST             ok in the old file, and in the new one it failed

Exit status: 0 ok; 1, with --fail-above, a row is SLOWER by more, LOST, or only in the old file; 2 usage, files that
don't go together included.
"""
import argparse
import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from common.run import EXIT, hush

from . import command, records, significance
from .records import Run
from .significance import What, all_rows, floors, measured, noise_of, of_the_latest, verdict


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
            + ("even --force can't tell which goes with which" if force or len(old) > 1 or len(new) > 1
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


@dataclass(frozen=True)
class Comparison:
    """Two files of records, row by row, and what is in one of them alone; all in words but `slower`."""
    headers: list[str]
    rows: list[list[str]]
    slower: list[tuple[str, float]]   # (row, relative difference) of those SLOWER
    lost: list[str]                   # steps that were ok in the old file and failed since
    gone: list[str]                   # rows only in the old file
    added: list[str]                  # rows only in the new one
    notes: list[str]                  # what a reader must know besides


def compare(old: list[dict], new: list[dict], noise: list[dict], force: bool) -> Comparison:
    """Raises ValueError where the files don't go together."""
    everything = [all_rows(lines) for lines in (old, new)]
    before, after = map(of_the_latest, everything)
    for side, name in ((before, "old"), (after, "new")):
        if not side:
            raise ValueError(f"the {name} file holds no timings")
    own = floors(old), floors(new)                         # before those of other days
    known = floors(noise) | {where: max(side.get(where, 0.0) for side in own) for side in own for where in side}
    pairs = together(before, after, force)
    several = len({b.shape for _, b in pairs}) > 1
    found, slower, assumed = [], [], False
    for a, b in pairs:
        left, right = measured(a, before[a]), measured(b, after[b])
        floor, guessed = significance.floor_of(
            left, right, max((known[where] for where in (a, b) if where in known), default=None))
        difference, width, word = verdict(b, left, right, floor, guessed)
        assumed |= guessed
        if word == "SLOWER":
            slower.append((", ".join([b.step, *([b.shape] if several else []), b.mode, b.launch]), difference))
        own = [f"{100 * noise_of(side, floor):.1f} %{'?' if guessed else ''}" for side in (left, right)]
        found.append([b.step, *([b.shape] if several else []), b.mode, b.launch, f"{left.ms:.3f}", own[0],
                      f"{right.ms:.3f}", own[1], f"{right.ms - left.ms:+.3f}", f"{100 * difference:+.1f} %",
                      f"{100 * width:.1f} %", word])
    headers = ["step", *(["shape"] if several else []), "pass", "launch", "old ms", "noise", "new ms", "noise",
               "difference ms", "percent (by cal)", "seen from", "verdict"]
    bad = failed_since(old, new)
    matched = [set(side) for side in zip(*pairs, strict=True)]
    gone, added = ([f"only in the {name} file: {where.step}, {where.shape}, {where.mode}, {where.launch}"
                    for where in side if where not in matched[place] and (where.step, where.shape) not in bad]
                   for place, (side, name) in enumerate(((before, "old"), (after, "new"))))
    notes = []
    if assumed:
        notes.append(f"?: fewer than {significance.PROCESSES} processes of the same code recorded (--noise), samples "
                     "taken in different ways,\n   or a launch-bound row, whose time is the host's: at least "
                     f"{100 * significance.NO_FLOOR:.0f} % assumed")
    for taken, kept, name in zip(everything, (before, after), ("old", "new"), strict=True):
        if count := sum(map(len, taken.values())) - sum(map(len, kept.values())):
            notes.append(f"left out of the {name} file: {count} timings of other commits, versions, studies or clocks "
                         "than the latest of their row")
    notes += [f"differs: {line}" for line in versions(old, new)]
    lost = [f"LOST: {step}, {shape}: {reason}" for (step, shape), reason in bad.items()]
    return Comparison(headers, found, slower, lost, gone, added, notes)


def failed_since(old: list[dict], new: list[dict]) -> dict[tuple[str, str], str]:
    """(step, shape) of what was ok in the old file and failed in the new one -> why."""
    was, now = _cases(old), _cases(new)
    return {key: run.info["reason"] for key, runs in now.items() for run in runs
            if run.status in ("failed", "oom") and run.info.get("git") == runs[-1].info.get("git")    # not mended since
            and any(earlier.status == "ok" for earlier in was.get(key, []))}


def _cases(lines: list[dict]) -> dict[tuple[str, str], list[Run]]:
    """(step, shape) -> its runs."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in records.runs(lines):
        found.setdefault((records.label(run.lines[-1], engine=False), run.lines[0]["model"]["name"]), []).append(run)
    return found


def summary(seen: Comparison) -> str:
    """How many rows got which verdict."""
    words = [row[-1] for row in seen.rows]
    return ", ".join(f"{words.count(word)} {word}" for word in ("FASTER", "SLOWER", "SAME", "UNSURE") if word in words)


def text(seen: Comparison, width: int | None = None) -> str:
    """The table, how many rows got which verdict, and what differs besides."""
    table = command.table(seen.rows, seen.headers, width, keys=seen.headers.index("old ms"))
    return "\n".join([table, "", summary(seen), *seen.notes])


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


def refuse_useless(noise: list[dict], name: str, new: list[dict]) -> None:
    """Raise ValueError where the file of noise that was given tells no floor of any shape that is compared."""
    held = {where.shape for where in floors(noise)}
    if not held:
        raise ValueError(f"--noise {name}: it holds fewer than {significance.PROCESSES} processes of the same code; "
                         "without it the recorded ones count")
    if held.isdisjoint(line["model"]["name"] for line in new):
        raise ValueError(f"--noise {name}: it is of {', '.join(sorted(held))}, the new file of other shapes; "
                         "`python -m benchmarks.ladder --processes 5` records the noise of one")


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
    with command.shown_to_a_person("compare"):
        try:
            old, new = records.read(options.old), records.read(options.new)
            noise = records.read(options.noise) if options.noise else recorded_noise(old + new)
            if options.noise:
                refuse_useless(noise, options.noise, new)
            seen = compare(old, new, noise, options.force)
        except ValueError as error:
            command.usage(parser, str(error))
        command.tell("\n".join([text(seen), *seen.lost, *seen.gone, *seen.added]))
    limit = options.fail_above
    if limit is None:
        return EXIT["ok"]
    too_slow = [(row, difference) for row, difference in seen.slower if difference > limit]
    for row, difference in too_slow:
        print(f"compare: {row} is {100 * difference:.1f} % slower", file=sys.stderr)
    if unsure := sum(row[-1] == "UNSURE" for row in seen.rows):
        print(f"compare: UNSURE of {unsure} of {len(seen.rows)} rows: a slowdown could hide there", file=sys.stderr)
    if seen.gone:
        print(f"compare: the new file lacks {len(seen.gone)} rows of the old one", file=sys.stderr)
    return EXIT["failed" if seen.lost or seen.gone or too_slow else "ok"]


if __name__ == "__main__":
    sys.exit(main())
