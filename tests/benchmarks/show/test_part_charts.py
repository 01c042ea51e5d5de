"""The charts of the steps: which bars they have, and how long these are."""
import pytest

from benchmarks.records.gains import gain
from benchmarks.records.read import Run, runs
from benchmarks.show import part_charts
from benchmarks.show.charts import plt
from common.report.metrics import SHARE
from common.report.record import PARTS
from common.runtime.iteration import BOTH, MODES
from common.runtime.peaks import BURST
from tests.helpers.made_records import both, copied, made

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def no_figure_left():
    yield
    plt().close("all")


def parts(**some: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | some


def run_of(name: str, ms: float, its_parts: dict | None = None, **more) -> Run:
    """A run that takes so long, all of it in matmuls unless its parts are given."""
    (run,) = runs(made(name, both([], [ms] * 6), parts={BOTH: its_parts or parts(GEMM=ms)}, **more))
    return run


def lengths(axis) -> list[float]:
    """Of its horizontal bars, from the top."""
    return [bar.get_width() for bar in axis.patches]


def test_the_steps_at_a_glance_have_a_bar_each_for_time_and_limit():
    figure = part_charts.limits([run_of("0_baseline", 8.0), run_of("2_sdpa", 4.0)])
    time, limit = figure.axes
    assert lengths(time) == [8.0, 4.0] and lengths(limit) == [50.0] * 4
    assert [label.get_text() for label in time.get_yticklabels()] == ["0 baseline", "2 sdpa"]
    assert {"8.00", "4.00"} <= {text.get_text().strip() for text in time.texts}


def test_a_step_is_a_bar_of_its_parts_and_its_limit_a_line():
    run = run_of("0_baseline", 8.0, parts(GEMM=5.0, attention=2.0, idle=1.0))
    axis = part_charts.stacked([run]).axes[0]
    heights = {bars.get_label(): bars.patches[0].get_height() for bars in axis.containers}
    assert heights == parts(GEMM=5.0, attention=2.0, idle=1.0)
    assert max(bar.get_y() + bar.get_height() for bar in axis.patches) == 8.0
    (line,) = axis.lines
    assert list(line.get_ydata()) == [4.0, 4.0]


def test_fast_steps_are_shown_again_on_a_scale_of_their_own():
    slow, fast = run_of("0_baseline", 90.0), run_of("2_sdpa", 10.0)
    whole, larger = part_charts.stacked([slow, fast]).axes
    assert len(whole.get_xticks()) == 2 and len(larger.get_xticks()) == 1
    assert larger.get_xticklabels()[0].get_text().startswith("2 sdpa")
    _, same = part_charts.stacked([slow, run_of("2_sdpa", 60.0)]).axes
    assert len(same.get_xticks()) == 2                     # none is fast


def test_a_waterfall_goes_from_one_step_to_the_next_part_by_part():
    before = run_of("0_baseline", 8.0, parts(GEMM=6.0, idle=2.0), clocked=8.0)
    after = run_of("1_cublas", 4.0, parts(GEMM=3.0, attention=1.0), clocked=4.0)
    axis = part_charts.waterfalls([before, after]).axes[0]
    first, *changes, last = lengths(axis)
    saved = gain(before, after, BOTH)
    assert (first, last) == (8.0, 4.0) and sum(changes) == pytest.approx(last - first)
    assert changes == [*(-saved.by_part[part] for part in PARTS), -saved.unexplained]


def test_there_is_a_panel_for_each_pair_and_no_empty_one():
    all_of_them = [run_of(name, ms) for name, ms in (("0_baseline", 8.0), ("1_cublas", 4.0), ("2_sdpa", 3.0),
                                                     ("3_compile", 2.0), ("4_transformer_engine", 1.0))]
    panels = part_charts.waterfalls(all_of_them).axes
    shown = [axis for axis in panels if axis.axison]
    assert len(shown) == 4 and len(panels) == 6
    assert [axis.get_title().split(" to ")[1][:1] for axis in shown] == list("1234")
    assert not [axis for axis in part_charts.waterfalls(all_of_them[:1]).axes if axis.axison]


@pytest.mark.parametrize("clocked, title", [(8.0, "0 baseline to 1 cublas"), (9.0, "0 baseline to 1 cublas\nEXCEEDED"),
                                            (None, "0 baseline to 1 cublas\nEXCEEDED")])
def test_a_waterfall_warns_of_parts_beyond_their_bound(clocked, title):
    before = run_of("0_baseline", 8.0, clocked=8.0)
    gemm = 4.0 + 8.0 - (clocked or 7.0)
    after = run_of("1_cublas", 4.0, parts(GEMM=gemm), clocked=clocked and 4.0)
    figure = part_charts.waterfalls([before, after])
    assert figure.axes[0].get_title() == title


def test_time_and_joules_stand_side_by_side():
    figure = part_charts.energy([run_of("0_baseline", 8.0, joules=5.0), run_of("2_sdpa", 4.0, joules=2.5)])
    time, used = figure.axes
    assert lengths(time) == [8.0, 4.0] and lengths(used) == [5.0, 2.5]


def test_the_sustained_limit_lies_behind_that_of_a_burst():
    run = run_of("0_baseline", 8.0, limits={"sustained": {"matmul": 6.0}})
    _, limit = part_charts.limits([run]).axes
    assert lengths(limit) == [75.0, 50.0] and {text.get_text().strip() for text in limit.texts} == {"75 %", "50 %"}


def test_what_is_unexplained_leads_to_the_later_steps_time():
    """With the wrong sign the waterfall would end beside it."""
    before = run_of("0_baseline", 8.0, parts(GEMM=6.0, idle=1.5), clocked=8.0)
    after = run_of("1_cublas", 4.0, parts(GEMM=3.0, attention=0.9), clocked=4.0)
    axis = part_charts.waterfalls([before, after]).axes[0]
    *_, unexplained, last = axis.patches
    assert gain(before, after, BOTH).unexplained != 0
    assert unexplained.get_x() + unexplained.get_width() == pytest.approx(last.get_width()) == pytest.approx(4.0)


def replayed() -> Run:
    """A run whose replay is the faster way: its limit, and how much of it is reached, are others than the eager row's.
    """
    ms = both([8.0] * 6, [8.0] * 6) | both([4.0] * 6, [4.0] * 6, "graph")
    lines = copied(made("0_baseline", ms, parts=dict.fromkeys(MODES, parts(GEMM=4.0)), of="graph"))
    for line in lines:
        if line["metric"]["name"] == "percent of limit":
            case = line["benchmark"]["extra_info"]["case"]
            line["metric"]["benchmark_values"] = [80.0 if case["launch"] == "graph" else 30.0]
    (run,) = runs(lines)
    return run


def test_where_the_replay_is_shown_so_is_its_limit():
    run = replayed()
    (line,) = part_charts.stacked([run]).axes[0].lines
    assert list(line.get_ydata()) == [2.0, 2.0]                    # `made` has half of the first sample
    _, limit = part_charts.limits([run]).axes
    assert lengths(limit)[0] == 80.0 and run.figure(SHARE[BURST], BOTH) == 80.0
