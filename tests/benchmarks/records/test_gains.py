"""The time saved between two steps, and how much of it the parts explain."""
import pytest

from benchmarks.records.gains import gain
from benchmarks.records.read import runs
from common.report.record import PARTS
from common.runtime.iteration import FORWARD
from tests.helpers.made_records import both, made

pytestmark = pytest.mark.unit


def parts(**some: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | some


def run_of(name: str, ms: float, its_parts: dict[str, float], **more):
    (run,) = runs(made(name, both([ms] * 6, []), parts={FORWARD: its_parts}, **more))
    return run


def test_a_gain_is_that_of_the_parts_and_what_is_left():
    """All of what the clock says without a profiler; the profiler's share is named beside it."""
    before = run_of("1_cublas", 10.0, parts(GEMM=6.0, idle=4.2), clocked=10.4)
    after = run_of("2_sdpa", 5.0, parts(GEMM=3.0, attention=2.1), clocked=5.25)
    saved = gain(before, after, FORWARD)
    assert saved.whole == 5.0
    assert saved.by_part == pytest.approx(parts(GEMM=3.0, attention=-2.1, idle=4.2))
    assert saved.profiling == pytest.approx(5.0 - 5.15)
    assert saved.whole == pytest.approx(sum(saved.by_part.values()) + saved.unexplained)
    assert saved.unexplained == pytest.approx(5.0 - 5.1)


def test_without_a_clock_beside_the_profiler_the_rest_holds_its_cost():
    before, after = run_of("1_cublas", 10.0, parts(GEMM=10.2)), run_of("2_sdpa", 5.0, parts(GEMM=5.1), clocked=5.0)
    for one, other in ((before, after), (after, before)):
        saved = gain(one, other, FORWARD)
        assert saved.profiling is None and abs(saved.unexplained) == pytest.approx(0.1)


def test_a_gain_is_of_the_samples_right_before_the_profiled_ones():
    before = run_of("1_cublas", 10.0, parts(GEMM=10.5), clocked=10.5, timed=10.25)
    after = run_of("2_sdpa", 9.5, parts(GEMM=9.25), clocked=9.25, timed=9.0)
    saved = gain(before, after, FORWARD)
    assert (saved.whole, saved.profiling, saved.unexplained) == (1.25, 0.0, 0.0)


@pytest.mark.parametrize("ms_after, bound", [(5.0, 0.25), (9.9, 0.05), (10.1, 0.0505), (20.0, 0.5)])
def test_five_percent_of_a_gain_may_be_unexplained_or_half_a_percent(ms_after, bound):
    """Half a percent of the slower one, where that is more; a loss counts as a gain does."""
    before, after = run_of("1_cublas", 10.0, parts(GEMM=10.0)), run_of("2_sdpa", ms_after, parts(GEMM=ms_after))
    assert gain(before, after, FORWARD).bound == pytest.approx(bound)


@pytest.mark.parametrize("gemm, clocked, warning", [
    (5.0, 5.0, ""), (5.24, 5.0, ""), (5.26, 5.0, "EXCEEDED"), (4.74, 5.0, "EXCEEDED"),
    (5.2, 5.2, ""), (5.3, 5.3, "EXCEEDED"), (4.7, 4.7, "EXCEEDED"), (5.3, None, "EXCEEDED"),
])
def test_what_is_unexplained_beyond_the_bound_is_a_warning(gemm, clocked, warning):
    """The bound is 0.25 ms; what profiling changes is no excuse."""
    before = run_of("1_cublas", 10.0, parts(GEMM=10.0), clocked=10.0)
    after = run_of("2_sdpa", 5.0, parts(GEMM=gemm), clocked=clocked)
    assert gain(before, after, FORWARD).warning == warning
