"""Charts of the steps: milliseconds and share of the limit, bars of their parts, and from one step to the next."""
import itertools
import math
from collections.abc import Sequence

from benchmarks.records.gains import gain
from benchmarks.records.read import Run, label
from benchmarks.show.charts import COLOURS, plt
from benchmarks.show.tables import joules
from common.report.metrics import LIMIT, SHARE
from common.report.record import PARTS
from common.runtime.iteration import BOTH
from common.runtime.peaks import BURST, SUSTAINED
from common.text import figures

PART_COLOURS = dict(zip(PARTS, (*COLOURS[:6], "#BBBBBB"), strict=True))


def _name(run: Run) -> str:
    """In lines that fit below a bar."""
    words = label(run.lines[-1], engine=False).replace("_", " ").replace(", ", "\n")
    return words.replace("transformer engine", "transf.\nengine")


def limits(runs: Sequence[Run]):
    """The time of each step, and beside it how much of its limit it reaches, by sustained and by burst peaks."""
    figure, axes = _two_panels(runs)
    for place, run in enumerate(runs):
        of_burst, of_sustained = run.figure(SHARE[BURST], BOTH) or 0.0, run.figure(SHARE[SUSTAINED], BOTH)
        share = of_burst if of_sustained is None else of_sustained
        axes[1].barh(place, share, color=COLOURS[4], height=0.6)
        axes[1].barh(place, of_burst, color=COLOURS[2], height=0.6)
        axes[1].text(of_burst, place, f"{of_burst:.0f} % ", va="center", ha="right", color="white", fontsize=8)
        if of_sustained is not None:
            axes[1].text(of_sustained + 1.5, place, f"{of_sustained:.0f} %", va="center", fontsize=8,
                         bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes[1].set_xlim(0, 115)
    axes[1].axvline(100, color="black", linewidth=1.2, zorder=1)
    axes[1].set_xlabel("% of the limit in the step's own arithmetic:\nby burst peaks (dark), by sustained ones (light)",
                       fontsize=8)
    return figure


def energy(runs: Sequence[Run]):
    """The time of each step, and beside it the joules of an iteration."""
    figure, axes = _two_panels(runs)
    for place, run in enumerate(runs):
        used = joules(run, BOTH) or 0.0
        axes[1].barh(place, used, color=COLOURS[6], height=0.6)
        axes[1].text(used, place, f" {figures(used)}", va="center", fontsize=8)
    axes[1].margins(x=0.15)
    axes[1].set_xlabel("joules an iteration, by the GPU's energy counter", fontsize=8)
    return figure


def _two_panels(runs: Sequence[Run]):
    """(figure, axes): a row a step; the left panel shows its milliseconds, the right one is empty."""
    names = [_name(run).replace("\n", " ") for run in runs]
    figure, axes = plt().subplots(1, 2, figsize=(8, 0.9 + 0.32 * len(runs)), layout="constrained", sharey=True)
    for place, run in enumerate(runs):
        ms = run.best_ms(BOTH) or 0.0
        axes[0].barh(place, ms, color=COLOURS[0], height=0.6)
        axes[0].text(ms, place, f" {figures(ms)}", va="center", fontsize=8)
    axes[0].margins(x=0.15)
    axes[0].set_xlabel("ms, forward+backward", fontsize=8)
    axes[0].set_yticks(range(len(runs)), names, fontsize=8)
    axes[0].invert_yaxis()
    return figure, axes


def stacked(runs: Sequence[Run]):
    """A bar a step, part by part, with its limit as a line. The fast ones again on a scale of their own."""
    slowest = runs[0].best_ms(BOTH) or 0.0
    fast = [run for run in runs if (run.best_ms(BOTH) or 0.0) < slowest / 3] or runs
    figure, axes = plt().subplots(1, 2, figsize=(8, 4.2), layout="constrained", width_ratios=(len(runs), len(fast)))
    for axis, shown in zip(axes, (runs, fast), strict=True):
        for place, run in enumerate(shown):
            _bar(axis, place, run)
        names = [f"{_name(run)}\n({run.profiled(BOTH)})" for run in shown]
        axis.set_xticks(range(len(shown)), names, fontsize=6.5)
        axis.set_ylabel("ms, forward+backward (bars: under the profiler, figures: by the clock)", fontsize=7)
    axes[1].set_title("the fast ones, larger", fontsize=9)
    axes[0].legend(frameon=False, fontsize=7.5)
    return figure


def _bar(axis, place: int, run: Run) -> None:
    bottom = 0.0
    for part, ms in (run.parts(BOTH) or {}).items():
        axis.bar(place, ms, bottom=bottom, color=PART_COLOURS[part], width=0.7, edgecolor="white", linewidth=0.4,
                 label=part if place == 0 else None)
        bottom += ms
    axis.text(place, bottom, figures(run.profiled_ms(BOTH)), ha="center", va="bottom")
    if limit := run.figure(LIMIT[BURST], BOTH):
        axis.plot((place - 0.42, place + 0.42), (limit, limit), color="black", linewidth=1.6,
                  label="limit of this machine" if place == 0 else None)


def waterfalls(runs: Sequence[Run]):
    """One panel a pair: from the earlier step's time, part by part, to the later one's."""
    pairs = list(itertools.pairwise(runs))
    columns = min(3, max(1, len(pairs)))
    rows = max(1, math.ceil(len(pairs) / columns))
    figure, axes = plt().subplots(rows, columns, figsize=(8, 0.4 + 2.3 * rows), layout="constrained", squeeze=False)
    panels = list(axes.flat)
    for axis, (before, after) in zip(panels, pairs, strict=False):
        _waterfall(axis, before, after, labelled=axis in axes[:, 0])
    for axis in panels[len(pairs):]:
        axis.axis("off")
    return figure


def _waterfall(axis, before: Run, after: Run, labelled: bool) -> None:
    saved = gain(before, after, BOTH)
    start, end = before.profiled_ms(BOTH), after.profiled_ms(BOTH)
    changes = {part: -ms for part, ms in saved.by_part.items()}
    changes["unexplained"] = -saved.unexplained
    last = len(changes) + 1
    axis.barh(0, start, color="#444444")
    at = furthest = start
    for place, (part, change) in enumerate(changes.items(), 1):
        axis.barh(place, change, left=at, color=PART_COLOURS.get(part, "white"), edgecolor="black", linewidth=0.4)
        axis.text(max(at, at + change), place, " " + figures(change, "+"), va="center", fontsize=7)
        axis.plot((at + change, at + change), (place - 0.4, place + 1.4), color="#888888", linewidth=0.5)
        at += change
        furthest = max(furthest, at)
    axis.barh(last, end, color="#444444")
    axis.text(start, 0, f" {figures(start)}", va="center", fontsize=7)
    axis.text(end, last, f" {figures(end)}", va="center", fontsize=7)
    axis.set_xlim(0, 1.25 * max(furthest, end))
    axis.set_yticks(range(last + 1), ["before", *changes, "after"] if labelled else [""] * (last + 1), fontsize=7)
    axis.invert_yaxis()
    title = f"{_name(before)} to {_name(after)}".replace("\n", " ")
    axis.set_title(f"{title}\n{saved.warning}".rstrip(), fontsize=7.5)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel(f"ms, forward+backward ({before.profiled(BOTH)}, {after.profiled(BOTH)})", fontsize=7)
