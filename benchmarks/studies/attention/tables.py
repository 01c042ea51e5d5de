"""What the study of attention tells of its records: every way by length, what each rung buys, and a chart."""
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.records.read import Run, case, paired, runs, verdict
from benchmarks.show.charts import Charts, lines_chart
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.attention.subjects import CUDNN, PASSES, RUNGS_OF, flops
from common.report.metrics import SHARE
from common.report.record import Record
from common.runtime.iteration import FORWARD
from common.runtime.peaks import BURST
from common.text import figures, only, ratio, table

SAID = """\
TFLOP/s, by the median. x cuDNN: how many times as fast, in the same rounds; its interval is in the records. Error
against FP64: of y or of the logarithm of the rows' sums, in the backward of the worst gradient. *: more than a fifth of
its time is the host's, for launching."""
NOT_RECORDED = "Not recorded yet."
STEPS = """\
x before: how many times as fast as the rung before it, in the same rounds. % of limit: of this machine's matmul rate.
Registers are of a thread when it starts, KiB of shared memory of a block, and blocks are those that a multiprocessor
holds at once."""

Kind = tuple[str, str, int]                # a pass, a mask, and the width of a head
Timed = dict[int, dict[str, Run]]          # length -> way -> its run


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    every = _timed(lines)
    shown = [_by_length(kind, timed, width) for kind, timed in _kinds(every).items()]
    return framed(lines, [*shown, SAID if shown else "", *_steps(every, width), _without_time(lines)], every)


def summary(lines: list[Record], mode: str, width: int | None = None) -> str:
    """What each rung of a pass buys, and where this was recorded."""
    of_pass = [line for line in lines if pass_of(case(line)["variant"]) == mode]
    return framed(of_pass, _steps(_timed(of_pass), width), []) if of_pass else NOT_RECORDED


def _steps(every: Sequence[Run], width: int | None) -> list[str]:
    """A table for each mask and width of which rungs were timed."""
    found = [_by_rung(kind, timed, width) for kind, timed in _kinds(every).items()
             if RUNGS_OF[kind[0]].keys() & timed[_longest_of_most(kind[0], timed)].keys()]
    return [*found, STEPS] if found else []


def _without_time(lines: list[Record]) -> str:
    """The ways that have none, by the reason for it."""
    found: dict[str, dict[str, None]] = {}
    for run in runs(lines):
        if run.status != "ok":
            found.setdefault(f"{run.status}: {run.info['reason']}", {})[run.variant["way"]] = None
    return "\n".join(f"{', '.join(ways)}: {reason}" for reason, ways in found.items())


def _kinds(every: Sequence[Run]) -> dict[Kind, Timed]:
    """What was timed, the forward first, and wider heads."""
    found: dict[Kind, Timed] = {}
    for run in every:
        _, _, length, head_width = run.variant["size"]
        kind = pass_of(run.variant), run.variant["mask"], head_width
        found.setdefault(kind, {}).setdefault(length, {})[run.variant["way"]] = run
    order = sorted(found, key=lambda kind: (PASSES.index(kind[0]), -kind[2], kind[1]))
    return {kind: dict(sorted(found[kind].items())) for kind in order}


def pass_of(variant: Mapping[str, Any]) -> str:
    """The pass that a row is of."""
    return variant.get("pass", FORWARD)


def _title(kind: Kind) -> str:
    mode, mask, head_width = kind
    return f"{mask}, D {head_width}" if mode == FORWARD else f"{mode}, {mask}, D {head_width}"


def rate(run: Run) -> float | None:
    """TFLOP/s, by the median."""
    mode = pass_of(run.variant)
    ms = run.best_ms(mode)
    return flops(run.variant["size"], run.variant["mask"], mode) / ms / 1e9 if ms else None


def _rate(run: Run) -> str:
    found = rate(run)
    return figures(found) + "*" * bool(run.launch_bound(pass_of(run.variant))) if found else ""


def _by_length(kind: Kind, timed: Timed, width: int | None) -> str:
    ways = dict.fromkeys(way for of in timed.values() for way in of)
    headers, rows = [_title(kind), "error"], []
    for way in ways:
        of_way = [of[way] for of in timed.values() if way in of]
        row = [way, f"{max(max(run.errors().values()) for run in of_way):.1e}"]
        for of in timed.values():
            run = of.get(way)
            times = paired(of.get(CUDNN), run, kind[0]) if way != CUDNN else None
            row += [_rate(run) if run else "", f"{times[0]:.2f}" if times else ""]
        rows.append(row)
    for length in timed:
        headers += [f"S {length:,} TFLOP/s", "x cuDNN"]
    shown = [place for place in range(len(headers)) if place < 2 or any(row[place] for row in rows)]
    return table([only(row, shown) for row in rows], only(headers, shown), width)


def _by_rung(kind: Kind, timed: Timed, width: int | None) -> str:
    """What each idea buys, at the longest length that most rungs have."""
    mode, length = kind[0], _longest_of_most(kind[0], timed)
    of, rows, before = timed[length], [], None
    for rung in RUNGS_OF[mode].values():
        if (run := of.get(rung.name)) is None:
            before = None
            continue
        takes = run.variant["takes"]
        times = paired(before, run, mode)
        share = run.figure(SHARE[BURST], mode)
        rows.append([rung.name, _rate(run),
                     ratio(times) + verdict(*times[1:]) if times else "", "" if share is None else f"{share:.0f}",
                     takes["registers"], f"{takes['shared_bytes'] / 1024:.0f}", takes["blocks"]])
        before = run
    title = f"{_title(kind)}, S {length:,}"
    return table(rows, [title, "TFLOP/s", "x before", "% of limit", "registers", "KiB", "blocks"], width)


def _longest_of_most(mode: str, timed: Timed) -> int:
    """The longest length at which as many rungs were timed as at any."""
    return max(timed, key=lambda length: (len(RUNGS_OF[mode].keys() & timed[length].keys()), length))


def _timed(lines: list[Record]) -> list[Run]:
    """What an interrupted run did not get to has no time."""
    return [run for run in runs(lines) if run.status == "ok" and run.best_ms(pass_of(run.variant))]


def charts(lines: list[Record]) -> Charts:
    """TFLOP/s by rung, at the longest length; the backward apart."""
    drawn: dict[str, Callable[[], Any]] = {}
    for mode, name in zip(PASSES, ("rungs", "backward"), strict=True):
        series_of: dict[str, list[tuple[float, float]]] = {}
        for kind, timed in _kinds(_timed(lines)).items():
            if kind[0] == mode and len(points := _points(mode, timed)) > 1:
                _, mask, head_width = kind
                series_of[f"{mask}, D {head_width}, S {_longest_of_most(mode, timed):,}"] = points
        if series_of:
            title = f"Attention by hand, rung by rung: {mode}"
            drawn[name] = functools.partial(lines_chart, series_of, "rung", "TFLOP/s", title, {}, logarithmic_x=False)
    return drawn


def _points(mode: str, timed: Timed) -> list[tuple[float, float]]:
    """(rung, TFLOP/s), at the longest length."""
    of = timed[_longest_of_most(mode, timed)]
    found = [(rung.number, rate(of[rung.name])) for rung in RUNGS_OF[mode].values() if rung.name in of]
    return [(float(number), rate_of_rung) for number, rate_of_rung in found if rate_of_rung]


def answer(lines: list[Record]) -> str:
    """The last rung of each pass beside cuDNN, at the longest lengths: where it is farthest and where it is nearest."""
    said = [f"{found} ({mode}, {len(RUNGS_OF[mode])} rungs)" for mode in PASSES if (found := _last_rung(mode, lines))]
    if not said:
        return NO_ANSWER
    return f"of cuDNN's speed the last rung reaches {', '.join(said)}, at the longest lengths"


def _last_rung(mode: str, lines: list[Record]) -> str:
    """ "0.94 to 1.08"; "" where it was not timed beside cuDNN."""
    last, found = list(RUNGS_OF[mode])[-1], []
    for kind, timed in _kinds(_timed(lines)).items():
        of = timed[_longest_of_most(kind[0], timed)]
        if kind[0] == mode and (times := paired(of.get(CUDNN), of.get(last), mode)):
            found.append(times[0])
    return f"{min(found):.2f} to {max(found):.2f}" if found else ""
