"""The charts of all studies, drawn from records: PNG and SVG, legible at 800 pixels and with any colour vision.

The digest of the records that a chart shows is in its file, so that a stale one is recognised.
"""
import hashlib
import json
import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records.provenance import OF_THE_RUN, provenance
from common.report.record import Record

VERSION = 2                            # of the drawings: raise it when one looks different, and all are drawn anew

# Okabe and Ito's palette, distinguishable with any kind of colour blindness (https://jfly.uni-koeln.de/color/, 2002).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#D55E00", "#000000")
MARKERS = "osD^vPX*"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "transformer block",
         "figure.dpi": 200, "svg.fonttype": "none", "font.family": "DejaVu Sans"}
Charts = Mapping[str, Callable[[], Any]]             # what a chart's file name ends in -> what draws its figure
Points = list[tuple[float, float]]
Interval = tuple[float, float, float]                # value, low, high


def plt():
    """matplotlib.pyplot, imported where something is drawn: most runs draw nothing, and need not wait for it."""
    import matplotlib
    if "MPLBACKEND" not in os.environ:                     # a notebook has set it, and shows figures inline
        matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def digest(lines: list[Record]) -> str:
    """Names a set of records and the version of the drawings; it changes when one of them does."""
    lines = [line for line in lines if line["metric"]["name"] not in OF_THE_RUN]
    return hashlib.sha256(f"{VERSION}{json.dumps(lines, sort_keys=True)}".encode()).hexdigest()[:16]


def draw(charts: Charts, stem: str, lines: list[Record]) -> None:
    """Draw STEM-<ending>.png and .svg for each of `charts`."""
    for ending, figure in charts.items():
        with plt().rc_context(STYLE):
            save(figure(), f"{stem}-{ending}", lines)


def save(figure, stem: str, lines: list[Record]) -> None:
    """Write STEM.png and STEM.svg, each with the digest of the records it shows; below it stands what they are of."""
    from matplotlib.transforms import Bbox
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for legend in figure.legends:              # to save a larger box would move one that stands outside of the axes
        legend.set_bbox_to_anchor((0, 0, 1, 1), figure.transFigure)
    width, height = figure.get_size_inches()
    caption = textwrap.wrap(provenance(lines), 145)              # characters in eight inches
    figure.text(0.05 / width, -0.02 / height, "\n".join(caption), va="top", fontsize=6.5, color="#444444")
    box = Bbox([[0, -0.05 - 0.12 * len(caption)], [width, height]])      # inches
    figure.savefig(f"{stem}.png", metadata={"Description": digest(lines)}, bbox_inches=box)
    figure.savefig(f"{stem}.svg", metadata={"Description": digest(lines), "Date": None}, bbox_inches=box)
    plt().close(figure)


def is_of(stem: str | Path, lines: list[Record]) -> bool:
    """Whether STEM.png and STEM.svg are there and show these records."""
    wanted = digest(lines).encode()
    for path in (Path(f"{stem}.png"), Path(f"{stem}.svg")):
        if not path.exists() or wanted not in path.read_bytes():
            return False
    return True


def plot_series(axis, series: Mapping[str, Points], names: Sequence[str]) -> None:
    """Lines by name; each of `names` has its own colour and marker. Where lines lie on each other the first is seen."""
    for place, name in enumerate(names):
        if points := series.get(name):
            marker, colour = MARKERS[place % len(MARKERS)], COLOURS[place % len(COLOURS)]
            axis.plot(*zip(*sorted(points), strict=True), marker=marker, color=colour, label=name, markersize=4,
                      zorder=3 - place / 100)


def lines_chart(series: Mapping[str, Points], x: str, y: str, title: str, marks: Mapping[str, float],
                logarithmic_x: bool = True):
    """Name -> [(x, y), ...] as lines over logarithmic y; `marks`, text -> x, as dotted lines."""
    from matplotlib.ticker import LogLocator
    figure, axis = plt().subplots(figsize=(8, 4.2), layout="constrained")
    plot_series(axis, series, list(series))
    if logarithmic_x:
        axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({at for points in series.values() for at, _ in points})
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))            # all nine of a decade would collide
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.tick_params(labelsize=7, which="both")
    axis.set_xlabel(f"{x}, logarithmic" if logarithmic_x else x)
    axis.set_ylabel(f"{y}, logarithmic")
    axis.set_title(title, fontsize=9)
    for row, (word, at) in enumerate(marks.items()):
        axis.axvline(at, color="#888888", linewidth=0.8, linestyle=":")
        side = "right" if at * at > ticks[0] * ticks[-1] else "left"
        axis.text(at, 0.97 - 0.05 * row, f" {word} ", transform=axis.get_xaxis_transform(), fontsize=7, ha=side)
    axis.legend(frameon=False, fontsize=8)
    return figure


def panels_chart(panels: Mapping[str, Mapping[str, Points]], x: str, y: str, title: str, dashed: str):
    """A panel for each of `panels` (its name -> name -> [(x, y), ...]), x logarithmic; the curve `dashed` is so."""
    curves_of_all = {name: None for curves in panels.values() for name in curves if name != dashed}
    rows = math.ceil(len(panels) / 2)
    figure, axes = plt().subplots(rows, 2, figsize=(8, 0.5 + 2.2 * rows), layout="constrained", squeeze=False)
    figure.suptitle(title, fontsize=9)
    for axis, (panel, curves) in zip(axes.flat, panels.items(), strict=False):
        plot_series(axis, curves, list(curves_of_all))
        if points := curves.get(dashed):
            axis.plot(*zip(*sorted(points), strict=True), color="black", linestyle="--", linewidth=1, label=dashed,
                      zorder=2)
        axis.set_xscale("log", base=2)
        axis.margins(y=0.1)
        axis.set_ylim(bottom=0)
        axis.set_xticks(sorted({at for points in curves.values() for at, _ in points}))
        axis.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}" if at >= 10 else f"{at:.2g}")
        axis.tick_params(labelsize=7)
        axis.set_title(panel, fontsize=9)
        axis.set_xlabel(x, fontsize=8)
        axis.set_ylabel(y, fontsize=8)
    _hide(list(axes.flat)[len(panels):])
    drawn: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        drawn.update(zip(labels, handles, strict=True))
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=7)
    return figure


def _hide(axes: Sequence) -> None:
    for axis in axes:
        axis.axis("off")


def dots_chart(panels: Mapping[str, Mapping[str, Mapping[str, Interval]]], x: str, line_at: float, most: float):
    """A row of panels for each group, a panel for each column, in it (value, low, high) by name as dots.

    `panels` is group -> column -> name -> value. All share one axis, which ends at `most`: what lies beyond is an arrow
    there. Each value stands beside its dot.
    """
    names: dict[str, list[str]] = {}
    columns: dict[str, None] = {}
    lows = [line_at]
    for group, of_group in panels.items():
        in_group: dict[str, None] = {}
        for column, values in of_group.items():
            columns[column] = None
            in_group |= dict.fromkeys(values)
            lows += [low for _, low, _ in values.values()]
        names[group] = list(in_group)
    heights = [len(in_group) + 1 for in_group in names.values()]
    figure, axes = plt().subplots(len(panels), len(columns), squeeze=False, sharex=True, layout="constrained",
                                  figsize=(8, 0.6 + 0.21 * len(panels) + 0.24 * sum(heights)), height_ratios=heights)
    for row, (group, of_group) in zip(axes, panels.items(), strict=True):
        for axis, column in zip(row, columns, strict=True):
            _dots(axis, of_group.get(column, {}), names[group], most)
            axis.axvline(line_at, color="black", linewidth=0.8)
            axis.set_xlim(min(lows) - 0.02, most + 0.12 * (most - line_at))
            first = axis is row[0]
            axis.set_yticks(range(len(names[group])), names[group] if first else [], fontsize=7)
            axis.tick_params(axis="x", labelsize=7, labelbottom=True)
            axis.set_title(f"{group}, {column}" if first else column, fontsize=7.5, loc="left")
    figure.supxlabel(x, fontsize=8)
    return figure


def _dots(axis, values: Mapping[str, Interval], names: Sequence[str], most: float) -> None:
    for place, name in enumerate(names):
        if name in values:
            value, low, high = values[name]
            axis.plot((min(low, most), min(high, most)), (place, place), color=COLOURS[0], linewidth=1.2)
            axis.plot(min(value, most), place, ">" if value > most else "o", color=COLOURS[0], markersize=4)
            axis.text(min(high, most), place, f"  {value:.3f}", va="center", fontsize=7)
    axis.set_ylim(len(names) - 0.5, -0.5)


def markers_chart(panels: Mapping[str, Mapping[str, Mapping[str, Interval]]], x: str, line_at: float):
    """A panel for each group: a row for each name, and on it a marker for each series, on a logarithmic axis.

    `panels` is group -> name -> series -> (value, low, high); a series looks alike in all of them.
    """
    series = list(dict.fromkeys(one for rows in panels.values() for values in rows.values() for one in values))
    heights = [len(rows) + 1 for rows in panels.values()]
    figure, axes = plt().subplots(len(panels), 1, squeeze=False, sharex=True, layout="constrained",
                                  height_ratios=heights, figsize=(8, 0.9 + 0.3 * sum(heights)))
    for axis, (group, rows) in zip(axes[:, 0], panels.items(), strict=True):
        for place, values in enumerate(rows.values()):
            axis.axhline(place, color="#dddddd", linewidth=0.6, zorder=0)
            for name, (value, low, high) in values.items():
                look = series.index(name)
                axis.plot((low, high), (place, place), color=COLOURS[look], linewidth=1)
                axis.plot(value, place, MARKERS[look], color=COLOURS[look], markersize=5)
        axis.axvline(line_at, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
        axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.tick_params(axis="x", labelbottom=True)
        axis.set_title(group, fontsize=9, loc="left")
    figure.supxlabel(x, fontsize=8)
    handles = [plt().Line2D([], [], color=COLOURS[look], marker=MARKERS[look], linestyle="", label=name)
               for look, name in enumerate(series)]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def bars_chart(groups: Mapping[str, Mapping[str, Interval]], x: str, digits: int, line_at: float | None = None):
    """A panel for each group of name -> (value, low, high), as horizontal bars with their intervals.

    Values are shown with that many digits; `line_at` is where a line stands for comparison.
    """
    heights = [len(bars) + 1 for bars in groups.values()]
    figure, axes = plt().subplots(len(groups), 1, squeeze=False, layout="constrained", height_ratios=heights,
                                  figsize=(8, 0.38 * len(groups) + 0.32 * sum(heights)))
    for axis, (group, bars) in zip(axes[:, 0], groups.items(), strict=True):
        for place, (value, low, high) in enumerate(bars.values()):
            reach = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axis.barh(place, value, color=COLOURS[0], height=0.6, xerr=reach, error_kw={"linewidth": 1})
            axis.text(max(value, high), place, f" {value:.{digits}f}", va="center", fontsize=8)
        axis.set_yticks(range(len(bars)), list(bars), fontsize=8)
        axis.invert_yaxis()
        if line_at is not None:
            axis.axvline(line_at, color="black", linewidth=0.8)
        axis.set_title(group, fontsize=9, loc="left")
        axis.set_xlabel(x, fontsize=8)
    return figure
