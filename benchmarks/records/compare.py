"""Is a change between two recorded runs real? Two files of records, row by row.

    python -m benchmarks compare old.jsonl new.jsonl
    python -m benchmarks compare old.jsonl new.jsonl --fail-above 5%

Milliseconds of different days can't be compared as they are: clocks and neighbours differ. So the change of each time
is held against that of a matmul (an FP32 row's against one in FP32) and a copy which were sampled in between, weighted
by the share of the row's time that goes to matmuls and attention (half where that was not profiled), and what is left
against the noise: the spread of the medians within a process, and between processes of the same code, from at least
five of them (`python -m benchmarks ladder --processes 5`): in the files themselves, in --noise, or recorded for this
GPU. Where samples were taken in different ways (a script's, and those of interleaved rounds on a GPU), and where a row
is launch-bound, its time the host's, times are compared as they are, and at least 10 % is assumed. Of a file that holds
several runs of a row the latest counts, with all others of its commit, Transformer Engine, study and way of sampling.
Verdicts:

    FASTER, SLOWER   the difference is beyond the noise
    SAME             it is not, and the noise, "seen from", is at most 5 %: what is larger would have been seen
    UNSURE           it is not, and the noise is too large to say more
    LOST             ok in the old file, and in the new one it failed

Joules and peak memory that are more than 5 % apart stand below the table.

Exit status: 0 ok; 1, with --fail-above, a row is SLOWER by more, LOST, or only in the old file; 2 usage, files that
don't go together included.
"""
import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.records import RESULTS, significance
from benchmarks.records.files import files
from benchmarks.records.matching import together
from benchmarks.records.read import Run, extra, label, metric, read, runner, runs, shape, versions
from benchmarks.records.significance import Measured, What, all_rows, floors, measured, of_the_latest
from common.command_line import Parser, early_ends, hush, mistakes, tell
from common.outcome import EXIT
from common.report.metrics import METRICS
from common.report.record import Record
from common.text import table

SIDES = ("old", "new")
NOTABLE = 0.05                # of joules and bytes, relative


# --------------------------------------------------------------------------------------------------------- row by row


@dataclass(frozen=True)
class Row:
    """One row of both files."""
    where: What
    old: Measured
    new: Measured
    noises: tuple[float, float]       # of the old side and of the new one, relative
    assumed: bool                     # no floor is known: that is why one is assumed in the noises
    difference: float                 # relative, by the calibrations; + is slower
    resolution: float                 # a difference of more would have been seen
    verdict: str

    def name(self, with_shape: bool) -> list[str]:
        """What tells it from the others."""
        where = self.where
        return [where.case, *([where.shape] if with_shape else []), where.mode, where.launch]


@dataclass(frozen=True)
class Comparison:
    """Two files of records, row by row, and what is in one of them alone, in words."""
    rows: list[Row]
    lost: list[str] = field(default_factory=list)        # cases that were ok in the old file and failed since
    gone: list[str] = field(default_factory=list)        # rows only in the old file
    added: list[str] = field(default_factory=list)       # rows only in the new one
    notes: list[str] = field(default_factory=list)       # what a reader must know besides

    @property
    def several_shapes(self) -> bool:
        return len({row.where.shape for row in self.rows}) > 1

    def count(self, verdict: str) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    def slower(self) -> list[tuple[str, float]]:
        """(row, relative difference) of those SLOWER."""
        slower = [row for row in self.rows if row.verdict == "SLOWER"]
        return [(", ".join(row.name(self.several_shapes)), row.difference) for row in slower]


def compare(old: list[Record], new: list[Record], noise: list[Record], force: bool = False) -> Comparison:
    """Raises ValueError where the files don't go together."""
    old_taken, new_taken = all_rows(old), all_rows(new)
    before, after = of_the_latest(old_taken), of_the_latest(new_taken)
    for rows, name in zip((before, after), SIDES, strict=True):
        if not rows:
            raise ValueError(f"the {name} file holds no timings")
    known = _known_floors(old, new, noise)
    pairs = together(before, after, force)
    compared = [_row(a, b, measured(a, before[a]), measured(b, after[b]), known) for a, b in pairs]
    changed = []
    for a, b in pairs:
        changed += _changed(a, before[a][-1], b, after[b][-1])
    bad = failed_since(old, new)
    return Comparison(
        compared, lost=[f"LOST: {case}, {its_shape}: {reason}" for (case, its_shape), reason in bad.items()],
        gone=_only_in("old", before, [a for a, _ in pairs], bad),
        added=_only_in("new", after, [b for _, b in pairs], bad),
        notes=[*_notes(compared), *changed, *_left_out("old", old_taken, before), *_left_out("new", new_taken, after),
               *(f"differs: {line}" for line in software_differences(old, new))])


def _changed(a: What, old: Run, b: What, new: Run) -> list[str]:
    """The other figures of a row that are more than 5 % apart, of those that hardly scatter."""
    lines = []
    for figure in METRICS:
        was, now = old.figure(figure, a.mode, a.launch), new.figure(figure, b.mode, b.launch)
        if figure.compared and was and now and abs(now / was - 1) > NOTABLE:
            lines.append(f"{b.case}, {b.mode}, {b.launch}: {figure.label} {figure.shown(was)} -> {figure.shown(now)} "
                         f"({100 * (now / was - 1):+.0f} %)")
    return lines


def _known_floors(old: list[Record], new: list[Record], noise: list[Record]) -> dict[What, float]:
    """The floors between processes. Those of the two files, the larger of each, come before those of other days."""
    known = floors(noise)
    own: dict[What, float] = {}
    for side in (old, new):
        for where, floor in floors(side).items():
            own[where] = max(floor, own.get(where, 0.0))
    return known | own


def _row(a: What, b: What, old: Measured, new: Measured, known: dict[What, float]) -> Row:
    recorded = max((known[where] for where in (a, b) if where in known), default=None)
    floor, assumed = significance.floor_of(old, new, recorded)
    noises = significance.noises_of(old, new, floor, assumed)
    difference, resolution, verdict = significance.verdict(b, old, new, noises)
    return Row(b, old, new, noises, assumed, difference, resolution, verdict)


def _only_in(name: str, rows: dict[What, list], matched: Sequence[What], bad: dict[tuple[str, str], str]) -> list[str]:
    """The rows that the other file has not, in words, without those of cases that failed since."""
    return [f"only in the {name} file: {where.case}, {where.shape}, {where.mode}, {where.launch}"
            for where in rows if where not in matched and (where.case, where.shape) not in bad]


def _notes(rows: list[Row]) -> list[str]:
    notes = []
    if any(row.assumed for row in rows):
        notes.append(f"?: fewer than {significance.PROCESSES} processes of the same code recorded (--noise), samples "
                     "taken in different ways,\n   or a launch-bound row, whose time is the host's: at least "
                     f"{100 * significance.NO_FLOOR:.0f} % assumed")
    if all(row.old.runs == row.new.runs for row in rows):
        notes.append("Both files hold the same runs: the table tells what could be seen, and nothing of a change.")
    return notes


def _left_out(name: str, taken: dict[What, list], kept: dict[What, list]) -> list[str]:
    count = sum(map(len, taken.values())) - sum(map(len, kept.values()))
    if not count:
        return []
    return [f"left out of the {name} file: {count} timings of other commits, versions, studies or clocks than the "
            "latest of their row"]


def software_differences(old: list[Record], new: list[Record]) -> list[str]:
    """What differs between two files' timings in software and in how samples were taken, one line each."""
    of_old, of_new = _software(old), _software(new)
    lines = []
    for name in sorted(of_old | of_new):
        before, after = of_old.get(name, {"none"}), of_new.get(name, {"none"})
        if before != after:
            lines.append(f"{name}: {' and '.join(sorted(before))} -> {' and '.join(sorted(after))}")
    return lines


def _software(lines: list[Record]) -> dict[str, set[str]]:
    """Library, driver or clock -> its versions in the timings of a file."""
    of_timings = []
    for line in lines:
        if metric(line) == "latency":
            used = {"driver": str(runner(line)["extra_info"].get("driver")), "clock": extra(line).get("clock", "none")}
            of_timings.append(used | versions(line))
    its_versions: dict[str, set[str]] = {}
    for name in set().union(*of_timings):
        its_versions[name] = {used.get(name, "none") for used in of_timings}
    return its_versions


def failed_since(old: list[Record], new: list[Record]) -> dict[tuple[str, str], str]:
    """(case, shape) of what was ok in the old file and failed in the new one -> why."""
    was, now = _cases(old), _cases(new)
    reasons = {}
    for key, case_runs in now.items():
        if not any(run.status == "ok" for run in was.get(key, [])):
            continue
        latest_commit = case_runs[-1].info.get("git")                         # what failed before may be mended since
        for run in case_runs:
            if run.status in ("failed", "oom") and run.info.get("git") == latest_commit:
                reasons[key] = run.info["reason"]
    return reasons


def _cases(lines: list[Record]) -> dict[tuple[str, str], list[Run]]:
    """(case, shape) -> its runs."""
    cases: dict[tuple[str, str], list[Run]] = {}
    for run in runs(lines):
        cases.setdefault((label(run.lines[-1], engine=False), run.shape), []).append(run)
    return cases


# ------------------------------------------------------------------------------------------------------------ in words


def summary(seen: Comparison) -> str:
    """How many rows got which verdict."""
    counts = {word: seen.count(word) for word in ("FASTER", "SLOWER", "SAME", "UNSURE")}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def text(seen: Comparison, width: int | None = None) -> str:
    """The table, how many rows got which verdict, and what differs besides."""
    headers = ["step", *(["shape"] if seen.several_shapes else []), "pass", "launch"]
    keys = len(headers)
    headers += ["old ms", "noise", "new ms", "noise", "difference ms", "percent (by cal)", "seen from", "verdict"]
    cells = []
    for row in seen.rows:
        noises = [f"{100 * noise:.1f} %{'?' if row.assumed else ''}" for noise in row.noises]
        cells.append([*row.name(seen.several_shapes), f"{row.old.ms:.3f}", noises[0], f"{row.new.ms:.3f}", noises[1],
                      f"{row.new.ms - row.old.ms:+.3f}", f"{100 * row.difference:+.1f} %",
                      f"{100 * row.resolution:.1f} %", row.verdict])
    return "\n".join([table(cells, headers, width, keys), "", summary(seen), *seen.notes])


# --------------------------------------------------------------------------------------------------------- the command


def fraction(text: str) -> float:
    """5% or 0.05 -> 0.05; what is 1 or more needs its percent sign. Raises argparse.ArgumentTypeError."""
    percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < (10 if percent else 1):
        raise argparse.ArgumentTypeError(f"{text!r}: give a share such as 5% or 0.05")
    return value


def recorded_noise(lines: list[Record]) -> list[Record]:
    """The processes of the same code that were recorded for these GPUs, if any."""
    names = {runner(line)["name"] for line in lines}
    noise: list[Record] = []
    for path in sorted([*files(RESULTS, "*/noise-*"), *RESULTS.glob("*/noise-*/")]):
        noise += [line for line in read(path) if runner(line)["name"] in names]
    return noise


def refuse_useless(noise: list[Record], name: str, new: list[Record]) -> None:
    """Raise ValueError where the file of noise that was given tells no floor of any shape that is compared."""
    held = {where.shape for where in floors(noise)}
    if not held:
        raise ValueError(f"--noise {name}: it holds fewer than {significance.PROCESSES} processes of the same code; "
                         "without it the recorded ones count")
    if held.isdisjoint(shape(line) for line in new):
        raise ValueError(f"--noise {name}: it is of {', '.join(sorted(held))}, the new file of other shapes; "
                         "`python -m benchmarks ladder --processes 5` records the noise of one")


def parser() -> Parser:
    """The command line."""
    of_compare = Parser("compare", prog="python -m benchmarks compare", description=__doc__,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = of_compare.add_argument
    add("old", help="JSON lines that --json of a step or a study wrote")
    add("new", help="the same of another day, driver, GPU or version")
    add("--noise", metavar="FILE", help="records of at least five processes of the same code (default: the ones "
                                        "recorded for this GPU, if any)")
    add("--fail-above", type=fraction, metavar="P", help="exit 1 where a row is SLOWER by more, as 5%%, LOST or gone")
    add("--force", action="store_true", help="compare across GPUs, shapes, dtypes or steps")
    return of_compare


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    hush()
    options = parser().parse_args(argv)
    with early_ends("compare"):
        with mistakes("compare"):
            old, new = read(options.old), read(options.new)
            noise = read(options.noise) if options.noise else recorded_noise(old + new)
            if options.noise:
                refuse_useless(noise, options.noise, new)
            seen = compare(old, new, noise, options.force)
        tell("\n".join([text(seen), *seen.lost, *seen.gone, *seen.added]))
    return EXIT["ok"] if options.fail_above is None else _judge(seen, options.fail_above)


def _judge(seen: Comparison, limit: float) -> int:
    """The exit status of --fail-above, and on stderr what it rests on."""
    too_slow = [(row, difference) for row, difference in seen.slower() if difference > limit]
    for row, difference in too_slow:
        print(f"compare: {row} is {100 * difference:.1f} % slower", file=sys.stderr)
    if unsure := seen.count("UNSURE"):
        print(f"compare: UNSURE of {unsure} of {len(seen.rows)} rows: a slowdown could hide there", file=sys.stderr)
    if seen.gone:
        print(f"compare: the new file lacks {len(seen.gone)} rows of the old one", file=sys.stderr)
    return EXIT["failed" if seen.lost or seen.gone or too_slow else "ok"]
