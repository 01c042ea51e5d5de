"""Charts know which records they show, and are drawn as they were; what each kind of them holds."""
import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks.records.provenance import provenance
from benchmarks.show import charts
from common import PRESETS
from common.report.record import record
from common.report.result import Result
from tests.helpers.made_records import FACTS, both, copied, made

pytestmark = pytest.mark.unit
LINES = made("0_baseline", both([8.0] * 6, [9.0] * 6)) + made("2_sdpa", both([1.0] * 6, [2.0] * 6))


@pytest.fixture(autouse=True)
def no_figure_left():
    yield
    charts.plt().close("all")


def a_figure():
    figure, axis = charts.plt().subplots()
    axis.plot([1, 2], label="a line")
    figure.legend()
    return figure


def drawn(folder: Path, lines=LINES) -> Path:
    """What the names of a drawn chart begin with."""
    charts.draw({"one": a_figure}, str(folder / "chart"), lines)
    return folder / "chart-one"


# ----------------------------------------------------------------------------------------------------- stale or not


def test_a_chart_is_of_the_records_it_was_drawn_from(tmp_path):
    stem = drawn(tmp_path)
    assert charts.is_of(stem, LINES) and charts.is_of(str(stem), copied(LINES))
    changed = copied(LINES)
    changed[-1]["metric"]["benchmark_values"][0] += 1e-6
    for others in (LINES[:-1], LINES[::-1], changed):
        assert not charts.is_of(stem, others)


def test_a_chart_is_stale_where_the_drawings_have_changed(tmp_path, monkeypatch):
    stem = drawn(tmp_path)
    monkeypatch.setattr(charts, "VERSION", charts.VERSION + 1)
    assert not charts.is_of(stem, LINES)
    assert charts.is_of(drawn(tmp_path), LINES)


def copy_of_the_module(folder: Path, change) -> object:
    """charts.py with its source changed, imported under another name."""
    path = folder / "changed.py"
    path.write_text(change(Path(charts.__file__).read_text()))
    spec = importlib.util.spec_from_file_location("changed_charts", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_comment_in_the_code_makes_no_chart_stale(tmp_path):
    stem = drawn(tmp_path)
    commented = copy_of_the_module(tmp_path, lambda source: source + "\n# A comment.\n")
    assert commented.is_of(stem, LINES)
    raised = copy_of_the_module(tmp_path, lambda source: re.sub(r"\nVERSION = (\d+)", r"\nVERSION = \g<1>1", source))
    assert not raised.is_of(stem, LINES)


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_a_chart_of_which_a_file_is_missing_is_stale(ending, tmp_path):
    stem = drawn(tmp_path)
    stem.with_name(stem.name + ending).unlink()
    assert not charts.is_of(stem, LINES)


def test_the_wall_time_of_a_run_makes_no_chart_stale(tmp_path):
    """It is known once the charts are drawn."""
    whole = Result("", PRESETS["tiny"], "float32", FACTS, study="ladder")
    later = [*LINES, record(whole, "wall time", "s", [9.0], "run")]
    assert charts.is_of(drawn(tmp_path), later)


# ----------------------------------------------------------------------------------------------------------- its files


def test_each_chart_is_a_png_and_an_svg_that_say_what_they_are_of(tmp_path):
    charts.draw({"one": a_figure, "two": a_figure}, str(tmp_path / "chart"), LINES)
    assert {path.name for path in tmp_path.iterdir()} == {"chart-one.png", "chart-one.svg", "chart-two.png",
                                                          "chart-two.svg"}
    assert (tmp_path / "chart-one.png").read_bytes()[:4] == b"\x89PNG"
    said = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "chart-one.svg").read_text())
    assert provenance(LINES) in said and "a line" in said
    assert not charts.plt().get_fignums()                  # closed: a study draws many


def test_what_a_chart_is_of_is_wrapped_where_it_is_long(tmp_path):
    long = made("0_baseline", both([8.0] * 6, []), facts=FACTS | {"name": "a CPU " * 40})
    said = re.findall(r"<text[^>]*>([^<]*)</text>", drawn(tmp_path, long).with_suffix(".svg").read_text())
    told = provenance(long)
    pieces = [line for line in said if line and line in " ".join(told.split())]
    assert len(pieces) > 1 and max(map(len, said)) <= 145


def test_a_chart_that_is_drawn_again_is_the_same_file(tmp_path):
    """A commit of charts shows what has changed."""
    (tmp_path / "again").mkdir()
    for ending in (".svg", ".png"):
        first, second = (drawn(folder).with_suffix(ending).read_bytes() for folder in (tmp_path, tmp_path / "again"))
        assert first == second


# --------------------------------------------------------------------------------------------------------------- kinds


def test_lines_have_a_colour_and_a_marker_each():
    series = {"before": [(64, 2.0), (32, 1.0)], "after": [(32, 3.0), (64, 0.5)], "not timed": []}
    (axis,) = charts.lines_chart(series, "S", "ms", "a title", {"from here on": 64}).axes
    before, after, _ = axis.lines
    assert before.get_color() != after.get_color()
    assert before.get_marker() != after.get_marker()
    assert "from here on" in {text.get_text().strip() for text in axis.texts}
    assert axis.get_title() == "a title"


def test_a_panel_each_has_its_curves_and_one_of_them_dashed():
    panels = {"SiLU": {"eager": [(1, 1.0), (2, 2.0)], "copy": [(1, 4.0), (2, 4.0)]},
              "SwiGLU": {"Triton": [(1, 3.0)]},
              "RMSNorm": {"eager": [(1, 1.0)]}}
    figure = charts.panels_chart(panels, "elements", "GB/s", "a title", dashed="copy")
    shown = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in shown] == list(panels)
    styles = {line.get_label(): line.get_linestyle() for line in shown[0].lines}
    assert styles == {"eager": "-", "copy": "--"}
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"eager", "copy", "Triton"}
    assert shown[0].lines[0].get_color() == shown[2].lines[0].get_color()          # the same in all panels


def test_a_dot_beyond_the_axis_is_an_arrow_with_its_figure():
    panels = {"float32": {"forward": {"near": (1.1, 1.0, 1.2), "far": (3.0, 2.9, 3.1)},
                          "backward": {"near": (0.9, 0.8, 1.0)}}}
    forward, backward = charts.dots_chart(panels, "ratio", line_at=1.0, most=1.6).axes
    assert forward.get_title(loc="left") == "float32, forward"
    assert backward.get_title(loc="left") == "backward"
    markers = [line.get_marker() for line in forward.lines if line.get_marker() in ("o", ">")]
    assert markers == ["o", ">"]
    assert [text.get_text().strip() for text in forward.texts] == ["1.100", "3.000"]


def test_markers_tell_series_apart_alike_in_all_panels():
    panels = {"short": {"window": {"SDPA": (0.3, 0.2, 0.4), "Triton": (2.0, 1.5, 2.5)}},
              "long": {"full": {"Triton": (0.5, 0.5, 0.5)}, "window": {"Triton": (12.0, 11.0, 13.0)}}}
    figure = charts.markers_chart(panels, "times", line_at=1)
    short, long = figure.axes
    assert [axis.get_title(loc="left") for axis in (short, long)] == list(panels)
    assert [label.get_text() for label in long.get_yticklabels()] == ["full", "window"]
    (legend,) = figure.legends
    looks = {line.get_label(): line.get_marker() for line in legend.legend_handles}
    places = {(line.get_xdata()[0], line.get_ydata()[0]): line.get_marker() for line in long.lines
              if line.get_marker() in looks.values()}
    assert places == {(0.5, 0): looks["Triton"], (12.0, 1): looks["Triton"]} and looks["SDPA"] != looks["Triton"]
    assert short.get_xscale() == "log"


def test_bars_show_their_figures():
    groups = {"MLP": {"tuned": (2.0, 1.5, 2.5), "compiled": (4.0, 4.0, 4.0)}, "block": {"tuned": (1.0, 1.0, 1.0)}}
    first, second = charts.bars_chart(groups, "times", digits=2, line_at=1).axes
    assert [axis.get_title(loc="left") for axis in (first, second)] == list(groups)
    assert [text.get_text().strip() for text in first.texts] == ["2.00", "4.00"]


def test_an_interval_reaches_from_its_low_end_to_its_high_one():
    """With its ends swapped it would say the opposite of how sure the figure is in each direction."""
    axis, = charts.bars_chart({"MLP": {"tuned": (2.0, 1.5, 3.5)}}, "times", digits=2).axes
    segment, = [segment for lines in axis.collections for segment in lines.get_segments()]
    assert sorted(segment[:, 0]) == [1.5, 3.5]
