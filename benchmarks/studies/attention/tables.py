"""What the study of attention tells of its records: every way by length, what each rung buys, and a chart."""
from collections.abc import Sequence

from benchmarks.kernels.cuda.series import RUNGS
from benchmarks.records.read import Run, paired, runs, verdict
from benchmarks.show.charts import Charts, lines_chart
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.attention.subjects import CUDNN, RUNG, flops
from common.report.metrics import SHARE
from common.report.record import Record
from common.runtime.iteration import FORWARD
from common.runtime.peaks import BURST
from common.text import figures, only, ratio, table

SAID = """\
TFLOP/s, by the median. x cuDNN: how many times as fast, in the same rounds; its interval is in the records. Error: of
y, or of the logarithm of the rows' sums, against FP64. *: more than a fifth of its time is the host's, for
launching."""
STEPS = """\
x before: how many times as fast as the rung before it, in the same rounds. % of limit: of this machine's matmul rate.
Registers are of a thread when it starts, KiB of shared memory of a block, and blocks are those that a multiprocessor
holds at once."""

Kind = tuple[str, int]                     # a mask, and the width of a head
Timed = dict[int, dict[str, Run]]          # length -> way -> its run


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    every = _timed(lines)
    shown = [_by_length(kind, timed, width) for kind, timed in _kinds(every).items()]
    return framed(lines, [*shown, SAID if shown else "", *_steps(every, width), _without_time(lines)], every)


def summary(lines: list[Record], width: int | None = None) -> str:
    """What each rung buys, and where this was recorded."""
    return framed(lines, _steps(_timed(lines), width), [])


def _steps(every: Sequence[Run], width: int | None) -> list[str]:
    """A table for each mask and width of which rungs were timed."""
    found = [_by_rung(kind, timed, width) for kind, timed in _kinds(every).items()
             if set(RUNG) & set(timed[_longest_of_most(timed)])]
    return [*found, STEPS] if found else []


def _without_time(lines: list[Record]) -> str:
    """The ways that have none, by the reason for it."""
    found: dict[str, dict[str, None]] = {}
    for run in runs(lines):
        if run.status != "ok":
            found.setdefault(f"{run.status}: {run.info['reason']}", {})[run.variant["way"]] = None
    return "\n".join(f"{', '.join(ways)}: {reason}" for reason, ways in found.items())


def _kinds(every: Sequence[Run]) -> dict[Kind, Timed]:
    """What was timed, wider heads first."""
    found: dict[Kind, Timed] = {}
    for run in every:
        _, _, length, head_width = run.variant["size"]
        found.setdefault((run.variant["mask"], head_width), {}).setdefault(length, {})[run.variant["way"]] = run
    return {kind: dict(sorted(found[kind].items())) for kind in sorted(found, key=lambda kind: (-kind[1], kind[0]))}


def rate(run: Run) -> float | None:
    """TFLOP/s, by the median."""
    ms = run.best_ms(FORWARD)
    return flops(run.variant["size"], run.variant["mask"]) / ms / 1e9 if ms else None


def _rate(run: Run) -> str:
    found = rate(run)
    return figures(found) + "*" * bool(run.launch_bound(FORWARD)) if found else ""


def _by_length(kind: Kind, timed: Timed, width: int | None) -> str:
    mask, head_width = kind
    ways = dict.fromkeys(way for of in timed.values() for way in of)
    headers, rows = [f"{mask}, D {head_width}", "error"], []
    for way in ways:
        of_way = [of[way] for of in timed.values() if way in of]
        row = [way, f"{max(max(run.errors().values()) for run in of_way):.1e}"]
        for of in timed.values():
            run = of.get(way)
            times = paired(of.get(CUDNN), run, FORWARD) if way != CUDNN else None
            row += [_rate(run) if run else "", f"{times[0]:.2f}" if times else ""]
        rows.append(row)
    for length in timed:
        headers += [f"S {length:,} TFLOP/s", "x cuDNN"]
    shown = [place for place in range(len(headers)) if place < 2 or any(row[place] for row in rows)]
    return table([only(row, shown) for row in rows], only(headers, shown), width)


def _by_rung(kind: Kind, timed: Timed, width: int | None) -> str:
    """What each idea buys, at the longest length that most rungs have."""
    (mask, head_width), length = kind, _longest_of_most(timed)
    of, rows, before = timed[length], [], None
    for rung in RUNGS:
        if (run := of.get(rung.name)) is None:
            before = None
            continue
        takes = run.variant["takes"]
        times = paired(before, run, FORWARD)
        share = run.figure(SHARE[BURST], FORWARD)
        rows.append([rung.name, _rate(run),
                     ratio(times) + verdict(*times[1:]) if times else "", "" if share is None else f"{share:.0f}",
                     takes["registers"], f"{takes['shared_bytes'] / 1024:.0f}", takes["blocks"]])
        before = run
    title = f"{mask}, D {head_width}, S {length:,}"
    return table(rows, [title, "TFLOP/s", "x before", "% of limit", "registers", "KiB", "blocks"], width)


def _longest_of_most(timed: Timed) -> int:
    """The longest length at which as many rungs were timed as at any."""
    return max(timed, key=lambda length: (len(set(RUNG) & set(timed[length])), length))


def _timed(lines: list[Record]) -> list[Run]:
    """What an interrupted run did not get to has no time."""
    return [run for run in runs(lines) if run.status == "ok" and run.best_ms(FORWARD)]


def charts(lines: list[Record]) -> Charts:
    """TFLOP/s by rung, at the longest length."""
    series_of: dict[str, list[tuple[float, float]]] = {}
    for (mask, head_width), timed in _kinds(_timed(lines)).items():
        length = _longest_of_most(timed)
        of_rungs = [(rung.number, rate(timed[length][rung.name])) for rung in RUNGS if rung.name in timed[length]]
        points = [(float(number), found) for number, found in of_rungs if found]
        if len(points) > 1:
            series_of[f"{mask}, D {head_width}, S {length:,}"] = points
    if not series_of:
        return {}
    title = "Attention by hand, rung by rung"
    return {"rungs": lambda: lines_chart(series_of, "rung", "TFLOP/s", title, {}, logarithmic_x=False)}


def answer(lines: list[Record]) -> str:
    """The last rung beside cuDNN: where it is nearest and where it is farthest, of the longest lengths."""
    found = []
    for (mask, head_width), timed in _kinds(_timed(lines)).items():
        length = _longest_of_most(timed)
        if times := paired(timed[length].get(CUDNN), timed[length].get(RUNGS[-1].name), FORWARD):
            found.append((times[0], f"{times[0]:.2f} ({mask}, D {head_width}, S {length:,})"))
    ends = list(dict.fromkeys(said for _, said in (min(found), max(found)))) if found else []
    return f"the last of {len(RUNGS)} rungs reaches {' to '.join(ends)} of cuDNN's speed" if found else NO_ANSWER
