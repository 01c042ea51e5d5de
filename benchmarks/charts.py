"""The charts of all studies, drawn from records: PNG and SVG, legible at 800 pixels and with any colour vision.

The digest of the records that a chart shows is in its file, so that a stale one can be told.
"""
import hashlib
import itertools
import json
import math
import textwrap
from pathlib import Path

from . import command, records
from .attribution import PARTS

# Okabe and Ito's palette, told apart with any kind of colour blindness (https://jfly.uni-koeln.de/color/, 2002).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#D55E00", "#000000")
PART_COLOURS = dict(zip(PARTS, (*COLOURS[:6], "#BBBBBB"), strict=True))
MODE = "forward+backward"                              # what the ladder's charts show
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "transformer block",
         "figure.dpi": 200, "svg.fonttype": "none", "font.family": "DejaVu Sans"}


def _plt():
    """matplotlib.pyplot, imported where something is drawn: most runs draw nothing, and need not wait for it."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def digest(lines: list[dict]) -> str:
    """Names a set of records and the code that draws them; it changes when any of them does."""
    lines = [line for line in lines if line["metric"]["name"] != "wall time"]        # known once the charts are drawn
    return hashlib.sha256(json.dumps(lines, sort_keys=True).encode() + Path(__file__).read_bytes()).hexdigest()[:16]


def save(figure, stem: str, lines: list[dict]) -> None:
    """Write STEM.png and STEM.svg, each with the digest of the records it shows; below it stands what they are of."""
    from matplotlib.transforms import Bbox
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for legend in figure.legends:              # to save a larger box would move one that stands outside of the axes
        legend.set_bbox_to_anchor((0, 0, 1, 1), figure.transFigure)
    width, height = figure.get_size_inches()
    caption = textwrap.wrap(records.provenance(lines), 145)              # characters in eight inches
    figure.text(0.05 / width, -0.02 / height, "\n".join(caption), va="top", fontsize=6.5, color="#444444")
    box = Bbox([[0, -0.05 - 0.12 * len(caption)], [width, height]])      # inches
    figure.savefig(f"{stem}.png", metadata={"Description": digest(lines)}, bbox_inches=box)
    figure.savefig(f"{stem}.svg", metadata={"Description": digest(lines), "Date": None}, bbox_inches=box)
    _plt().close(figure)


def is_of(stem: str | Path, lines: list[dict]) -> bool:
    """Whether STEM.png and STEM.svg are there and show these records."""
    paths = Path(f"{stem}.png"), Path(f"{stem}.svg")
    return all(path.exists() and digest(lines).encode() in path.read_bytes() for path in paths)


def ladder(lines: list[dict], stem: str) -> None:
    """STEM-parts: a stacked bar per step, the limit as a line. STEM-waterfall: from step to step, part by part."""
    timed = attributed(lines)
    with _plt().rc_context(STYLE):
        save(_stacked(timed), f"{stem}-parts", lines)
        save(_waterfalls(timed), f"{stem}-waterfall", lines)


def attributed(lines: list[dict]) -> list[tuple[records.Run, dict[str, float]]]:
    """The steps that were timed and profiled, forward+backward, each with its milliseconds by part."""
    return [(run, run.parts(MODE)) for run in records.latest(lines).values()
            if run.info["step"][0].isdigit() and run.status == "ok" and run.best(MODE) and run.attributed(MODE)]


def _name(run: records.Run) -> str:
    words = run.label.split(" (")[0].replace("_", " ").replace(", ", "\n")
    return words.replace("4 transformer engine", "4 transf.\nengine")


def _stacked(timed):
    """All steps, and beside them the fast ones on a scale of their own: the first would hide them."""
    slowest = timed[0][0].best_ms(MODE)
    fast = [one for one in timed if one[0].best_ms(MODE) < slowest / 3] or timed
    figure, axes = _plt().subplots(1, 2, figsize=(8, 4.2), layout="constrained", width_ratios=(len(timed), len(fast)))
    for axis, shown in zip(axes, (timed, fast), strict=True):
        for place, (run, parts) in enumerate(shown):
            bottom = 0.0
            for part in PARTS:
                axis.bar(place, parts[part], bottom=bottom, color=PART_COLOURS[part], width=0.7, edgecolor="white",
                         linewidth=0.4, label=part if place == 0 else None)
                bottom += parts[part]
            axis.text(place, bottom, command.figures(run.profiled_ms(MODE)), ha="center", va="bottom")
            limit = run.value(MODE, "limit", run.best(MODE))
            if limit:
                axis.plot((place - 0.42, place + 0.42), (limit, limit), color="black", linewidth=1.6,
                          label="limit of this machine" if place == 0 else None)
        axis.set_xticks(range(len(shown)), [f"{_name(run)}\n({run.profiled(MODE)})" for run, _ in shown], fontsize=6.5)
        axis.set_ylabel("ms, forward+backward (bars: under the profiler, figures: by the clock)", fontsize=7)
    axes[1].set_title("the fast ones, larger", fontsize=9)
    axes[0].legend(frameon=False, fontsize=7.5)
    return figure


def _waterfalls(timed):
    """One panel a pair: from the earlier step's time, part by part, to the later one's."""
    pairs = list(itertools.pairwise(timed))
    columns = min(3, max(1, len(pairs)))
    rows = max(1, math.ceil(len(pairs) / columns))
    figure, axes = _plt().subplots(rows, columns, figsize=(8, 0.4 + 2.3 * rows), layout="constrained", squeeze=False)
    for axis, pair in zip(axes.flat, pairs, strict=False):
        _waterfall(axis, *pair, labelled=axis in axes[:, 0])
    for axis in list(axes.flat)[len(pairs):]:
        axis.axis("off")
    return figure


def _waterfall(axis, before, after, labelled: bool) -> None:
    (a, parts_a), (b, parts_b) = before, after
    start, end = a.profiled_ms(MODE), b.profiled_ms(MODE)
    changes = [(part, parts_b[part] - parts_a[part]) for part in PARTS]
    profiling, unexplained = records.beside_the_parts(a, b, MODE)
    changes += [("while profiled", -profiling)] if profiling is not None else []
    changes += [("unexplained", -unexplained)]
    axis.barh(0, start, color="#444444")
    at = furthest = start
    for place, (part, change) in enumerate(changes, 1):
        axis.barh(place, change, left=at, color=PART_COLOURS.get(part, "white"), edgecolor="black", linewidth=0.4)
        axis.text(max(at, at + change), place, " " + command.figures(change, "+"), va="center", fontsize=7)
        axis.plot((at + change, at + change), (place - 0.4, place + 1.4), color="#888888", linewidth=0.5)
        at += change
        furthest = max(furthest, at)
    axis.barh(len(changes) + 1, end, color="#444444")
    for place, value in ((0, start), (len(changes) + 1, end)):
        axis.text(value, place, f" {command.figures(value)}", va="center", fontsize=7)
    axis.set_xlim(0, 1.25 * max(furthest, end))
    axis.set_yticks(range(len(changes) + 2), ["before", *(part for part, _ in changes), "after"] if labelled
                    else [""] * (len(changes) + 2), fontsize=7)
    axis.invert_yaxis()
    warning = records.beyond_the_bound(a, b, MODE)
    axis.set_title(f"{_name(a)} to {_name(b)}".replace("\n", " ") + (f"\n{warning}" if warning else ""), fontsize=7.5)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel(f"ms, forward+backward ({a.profiled(MODE)}, {b.profiled(MODE)})", fontsize=7)


def lines_chart(series: dict[str, list[tuple[float, float]]], stem: str, recorded: list[dict], x: str, y: str,
                title: str, marks: dict[str, float]) -> None:
    """STEM: name -> [(x, y), ...] as lines on two logarithmic axes; `marks`, text -> x, as dotted lines."""
    from matplotlib.ticker import LogLocator
    with _plt().rc_context(STYLE):
        figure, axis = _plt().subplots(figsize=(8, 4.2), layout="constrained")
        for (name, points), colour, marker in zip(series.items(), COLOURS * 2, "osD^vPX*" * 2, strict=False):
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker=marker, color=colour, label=name, markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = sorted({at for points in series.values() for at, _ in points})
        axis.set_xticks(ticks)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))            # all nine of a decade would collide
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(labelsize=7, which="both")
        axis.set_xlabel(f"{x}, logarithmic")
        axis.set_ylabel(f"{y}, logarithmic")
        axis.set_title(title, fontsize=9)
        for row, (word, at) in enumerate(marks.items()):
            axis.axvline(at, color="#888888", linewidth=0.8, linestyle=":")
            axis.text(at, 0.97 - 0.05 * row, f" {word} ", transform=axis.get_xaxis_transform(), fontsize=7,
                      ha="right" if at * at > ticks[0] * ticks[-1] else "left")
        axis.legend(frameon=False, fontsize=8)
        save(figure, stem, recorded)


def panels_chart(panels: dict[str, dict[str, list[tuple[float, float]]]], stem: str, recorded: list[dict], x: str,
                 y: str, title: str) -> None:
    """STEM: a panel for each of `panels` (its name -> name -> [(x, y), ...]), x logarithmic; "copy" is dashed."""
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves if name != "copy"))
    with _plt().rc_context(STYLE):
        rows = math.ceil(len(panels) / 2)
        figure, axes = _plt().subplots(rows, 2, figsize=(8, 0.5 + 2.2 * rows), layout="constrained", squeeze=False)
        figure.suptitle(title, fontsize=9)
        for axis, (panel, curves) in zip(axes.flat, panels.items(), strict=False):
            for above, (name, colour, marker) in enumerate(zip(names, COLOURS * 2, "osD^vPX*" * 2, strict=False)):
                if points := curves.get(name):               # where curves lie on each other, the first is seen
                    axis.plot(*zip(*sorted(points), strict=True), marker=marker, color=colour, label=name, markersize=4,
                              zorder=3 - above / 100)
            if points := curves.get("copy"):
                axis.plot(*zip(*sorted(points), strict=True), color="black", linestyle="--", linewidth=1,
                          label="copy", zorder=2)
            axis.set_xscale("log", base=2)
            axis.margins(y=0.1)
            axis.set_ylim(bottom=0)
            axis.set_xticks(sorted({at for points in curves.values() for at, _ in points}))
            axis.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}" if at >= 10 else f"{at:.2g}")
            axis.tick_params(labelsize=7)
            axis.set_title(panel, fontsize=9)
            axis.set_xlabel(x, fontsize=8)
            axis.set_ylabel(y, fontsize=8)
        for axis in list(axes.flat)[len(panels):]:
            axis.axis("off")
        drawn = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(),
                                                                               strict=True)}
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=7)
        save(figure, stem, recorded)


def dots_chart(panels: dict[str, dict[str, dict[str, tuple[float, float, float]]]], stem: str, recorded: list[dict],
               x: str, line_at: float, most: float) -> None:
    """STEM: a row of panels for each group, a panel for each column, in it (value, low, high) by name as dots.

    `panels` is group -> column -> name -> value. All share one axis, which ends at `most`: what lies beyond is an arrow
    there. Each value stands beside its dot.
    """
    with _plt().rc_context(STYLE):
        names = {group: list(dict.fromkeys(name for column in columns.values() for name in column))
                 for group, columns in panels.items()}
        columns = list(dict.fromkeys(column for group in panels.values() for column in group))
        tall = sum(map(len, names.values()))
        figure, axes = _plt().subplots(len(panels), len(columns), figsize=(8, 0.6 + 0.45 * len(panels) + 0.24 * tall),
                                       squeeze=False, sharex=True, layout="constrained",
                                       height_ratios=[len(some) + 1 for some in names.values()])
        lows = [low for group in panels.values() for column in group.values() for _, low, _ in column.values()]
        for row, (group, found) in zip(axes, panels.items(), strict=True):
            for axis, column in zip(row, columns, strict=True):
                for place, name in enumerate(names[group]):
                    if name not in found.get(column, {}):
                        continue
                    value, low, high = found[column][name]
                    axis.plot((min(low, most), min(high, most)), (place, place), color=COLOURS[0], linewidth=1.2)
                    axis.plot(min(value, most), place, ">" if value > most else "o", color=COLOURS[0], markersize=4)
                    axis.text(min(high, most), place, f"  {value:.3f}", va="center", fontsize=7)
                axis.axvline(line_at, color="black", linewidth=0.8)
                axis.set_xlim(min(line_at, *lows) - 0.02, most + 0.12 * (most - line_at))
                axis.set_ylim(len(names[group]) - 0.5, -0.5)
                axis.set_yticks(range(len(names[group])), names[group] if axis is row[0] else [], fontsize=7)
                axis.tick_params(axis="x", labelsize=7, labelbottom=True)
                axis.set_title(f"{group}, {column}" if axis is row[0] else column, fontsize=7.5, loc="left")
        figure.supxlabel(x, fontsize=8)
        save(figure, stem, recorded)


def bars_chart(groups: dict[str, list[tuple[str, float, float, float]]], stem: str, recorded: list[dict],
               x: str, digits: int, line_at: float | None = None) -> None:
    """STEM: a panel for each group of (name, value, low, high), as horizontal bars with their intervals.

    Values are shown with that many digits; `line_at` is where a line stands for comparison.
    """
    with _plt().rc_context(STYLE):
        tall = sum(len(bars) for bars in groups.values())
        figure, axes = _plt().subplots(len(groups), 1, figsize=(8, 0.7 * len(groups) + 0.32 * tall), squeeze=False,
                                       layout="constrained", height_ratios=[len(bars) + 1 for bars in groups.values()])
        for axis, (group, bars) in zip(axes[:, 0], groups.items(), strict=True):
            for place, (_, value, low, high) in enumerate(bars):
                axis.barh(place, value, color=COLOURS[0], height=0.6,
                          xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], error_kw={"linewidth": 1})
                axis.text(max(value, high), place, f" {value:.{digits}f}", va="center", fontsize=8)
            axis.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
            axis.invert_yaxis()
            if line_at is not None:
                axis.axvline(line_at, color="black", linewidth=0.8)
            axis.set_title(group, fontsize=9, loc="left")
            axis.set_xlabel(x, fontsize=8)
        save(figure, stem, recorded)


