"""A machine's peaks: measured in a burst, sustained, of a data sheet; and what happens where they came out too low."""
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from common import BlockConfig, steps
from common.block.block_work import work_in
from common.block.traits import Arithmetic
from common.block.workload import ATTENTION, MATMUL, Operation, Workload
from common.measure import measurement
from common.measure.cases import Case
from common.measure.session import Entry, Session
from common.measure.subject import BlockSubject
from common.report.result import Result, Row
from common.runtime import data_sheets, limit, pieces
from common.runtime import peaks as peaks_module
from common.runtime.data_sheets import data_sheet
from common.runtime.iteration import BOTH, FORWARD
from common.runtime.limit import Peaks
from common.runtime.peaks import (
    BURST,
    DATA_SHEET,
    METHODS,
    SUSTAINED,
    MeasuredPeaks,
    Sustained,
    _best_seconds,
    _look,
    _matmul_rate,
    _work,
    filling,
    measure_burst,
    measure_sustained,
    square,
    steady,
)
from common.runtime.pieces import Work, attention_work, matmul_work, multiplies
from common.runtime.timing import Timing, calibration
from tests.helpers.made_results import CPU as CPU_FACTS

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SMALL = BlockConfig(batch_size=1, seq_len=16, hidden_size=16, num_heads=1)                     # F = 64
FP32 = work_in(Arithmetic("float32", "float32", 4, 4, operand_bytes=4, weight_bytes=4), SMALL)
FP16 = work_in(Arithmetic("float16", "float16", 4, 2, operand_bytes=2, weight_bytes=4), SMALL)
FP8 = work_in(Arithmetic("float8", "float16", 4, 2, operand_bytes=1, weight_bytes=4), SMALL)
NOTHING = Peaks({}, 0.0)


# ----------------------------------------------------------------------------------------------------------- in a burst



@pytest.fixture
def rates(monkeypatch):
    """A matmul's rate is the area of its result, a copy takes 1 ms. The value: which matmuls were asked for."""
    asked = []

    def rate(shape, name, device):
        asked.append((name, *shape))
        return float(shape[0] * shape[2])
    monkeypatch.setattr("common.runtime.peaks._matmul_rate", rate)
    monkeypatch.setattr("common.runtime.peaks._best_seconds", lambda work, device: 1e-3)
    return asked


def test_a_peak_is_of_the_best_shape_a_large_square_among_them(rates):
    """A copy reads and writes."""
    assert measure_burst(FP32, CPU) == Peaks({"float32": 1024.0**2}, 2 * 4 * 2**26 / 1e-3)
    shapes = {(m, k, n) for _, m, k, n in rates}
    assert shapes == {(16, 16, 16), (16, 16, 48), (16, 16, 64), (16, 64, 16), (1024, 1024, 1024)}


def test_of_many_shapes_the_largest_are_measured(rates):
    """A ResNet has two dozen: each takes a rest of its own."""
    shapes = [(2**k, 2, 4) for k in range(6)]
    operations = tuple(Operation("mm", MATMUL, 1.0, 1.0, "float32", shape) for shape in [*shapes, *shapes])
    measure_burst(Workload("float32", operations), CPU)
    assert {(m, k, n) for _, m, k, n in rates} == {*shapes[2:], (1024, 1024, 1024)}


def test_each_arithmetic_of_a_block_has_a_peak(rates):
    found = measure_burst(FP8, CPU, Peaks({}, 5.0))
    assert found.flops.keys() == {"float8", "float16"} and found.bandwidth == 5.0


def test_a_peak_that_is_known_is_not_measured_again(rates):
    known = Peaks({"float16": 7.0, "float64": 1.0}, 5.0)
    assert measure_burst(FP16, CPU, known) == known and not rates
    found = measure_burst(FP8, CPU, known)
    assert found == Peaks(known.flops | {"float8": 1024.0**2}, 5.0) and {name for name, *_ in rates} == {"float8"}


def test_the_best_sample_counts(monkeypatch):
    clock = SimpleNamespace(sample=lambda work, between, count: [3.0, 1.0, 2.0])
    monkeypatch.setattr("common.runtime.peaks.clock_for", lambda device: clock)
    assert _best_seconds(None, CPU) == 1e-3


@pytest.mark.parametrize("dtype, precision", [("float32", "highest"), ("tf32", "high")])
def test_the_peak_of_float32_and_of_tf32_is_of_its_own_matmul(dtype, precision, monkeypatch):
    """Each would else be credited with the other's rate, several times as high or as low."""
    seen = []

    def at_once(work, device):
        work()
        return 1.0
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append((a.dtype, torch.get_float32_matmul_precision())))
    monkeypatch.setattr("common.runtime.peaks._best_seconds", at_once)
    torch.set_float32_matmul_precision("medium")
    try:
        assert _matmul_rate((4, 4, 4), dtype, CPU) == 2 * 4**3
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [(torch.float32, precision)]


def test_peaks_are_measured_for_what_the_step_computes_in():
    """One matmul rate for each dtype and the copy bandwidth; the caller's matmul precision is left as it was."""
    before = torch.get_float32_matmul_precision()
    peaks = measure_burst(work_in(Arithmetic("bfloat16", "float32", 4, 2, 2, 4), SMALL), CPU)
    assert peaks.flops.keys() == {"bfloat16", "float32"} and all(0 < rate < 1e16 for rate in peaks.flops.values())
    assert 0 < peaks.bandwidth < 1e14 and torch.get_float32_matmul_precision() == before


# ------------------------------------------------------------------------------------------ peaks that came out too low


@pytest.fixture
def measured(monkeypatch):
    """measured(peaks, ...): what measuring gives, one time after the other; the value grows by what it was asked."""
    def set_up(*found: Peaks) -> list:
        asked, remaining = [], iter(found)

        def measure_burst(workload, device, known=None):
            asked.append((workload, known))
            return next(remaining)
        monkeypatch.setattr("common.runtime.peaks.measure_burst", measure_burst)
        return asked
    return set_up


def test_a_peak_is_measured_when_it_is_first_asked_for(measured):
    """That of another arithmetic comes to those that are known."""
    first, both = Peaks({"float16": 8e14}, 4e12), Peaks({"float16": 8e14, "float8": 1e15}, 4e12)
    asked = measured(first, both)
    peaks = MeasuredPeaks(CPU)
    assert asked == []
    assert peaks.of(FP16) == peaks.of(FP16) == first
    assert peaks.of(FP8) == peaks.of(FP16) == peaks.known == both
    assert asked == [(FP16, NOTHING), (FP8, first)]


def test_of_two_measurements_the_better_one_counts(measured):
    """Of each peak by itself. What is measured again is measured from nothing."""
    asked = measured(Peaks({"float8": 1.0, "float16": 9.0}, 3.0), Peaks({"float8": 5.0, "float16": 4.0}, 2.0))
    peaks = MeasuredPeaks(CPU)
    peaks.of(FP8)
    assert peaks.again(FP8)
    assert peaks.known == Peaks({"float8": 5.0, "float16": 9.0}, 3.0)
    assert asked == [(FP8, NOTHING), (FP8, None)]


def test_peaks_are_measured_again_once_for_each_kind_of_work(measured):
    asked = measured(*[Peaks({"float16": 1.0, "float8": 1.0}, 1.0)] * 4)
    peaks = MeasuredPeaks(CPU)
    peaks.of(FP8)
    assert [peaks.again(work) for work in (FP16, FP16, FP8, FP16, FP8)] == [True, False, True, False, False]
    assert [work for work, _ in asked] == [FP8, FP16, FP8]


def test_peaks_in_words():
    peaks = MeasuredPeaks(CPU)
    peaks.known = Peaks({"float8": 1.31e15, "float16": 8.12e14, "float32": 2.5e12}, 4.1e12)
    assert peaks.in_words() == ("float16 812 TFLOP/s, float32 2.50 TFLOP/s, float8 1310 TFLOP/s; "
                                "copy 4.1 TB/s (read + written)")


def hold(peaks: MeasuredPeaks, *rows: Row, mode: str = FORWARD, work: Workload = FP32) -> None:
    measurement.hold_against_limits([(row, work, mode) for row in rows], peaks)


def timed(ms: float, **changes) -> Row:
    return Row(Timing([ms] * 6, True, "fake"), flops=1.0, **changes)


def memory_alone(bandwidth: float) -> Peaks:
    """Peaks at which nothing but the bytes takes time."""
    return Peaks({"float32": 1e30}, bandwidth)


def limit_at(peaks: Peaks, mode: str = FORWARD) -> float:
    return sum(limit.ms_by_kind(FP32.operations(mode), peaks).values())


def bound_at(peaks: Peaks, mode: str = FORWARD) -> float:
    return limit.flop_bound(FP32.operations(mode), peaks)


def test_a_row_that_passes_its_limit_has_the_peaks_measured_again(measured):
    slow, fast = memory_alone(1e3), Peaks({"float32": 1.0}, 1e6)
    asked = measured(slow, fast)
    peaks, beyond = MeasuredPeaks(CPU), timed(0.99 * limit_at(slow))
    hold(peaks, beyond)
    better = Peaks({"float32": 1e30}, 1e6)
    assert len(asked) == 2 and peaks.known == better
    assert beyond.limit_by(BURST) == limit_at(better) and beyond.percent_of(BURST) < 100
    assert beyond.flop_bound == bound_at(better)


@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_a_row_within_its_limit_leaves_the_peaks_alone(measured, mode):
    found = Peaks({"float32": 3e5}, 1e5)
    asked = measured(found)
    within = timed(1.01 * limit_at(found, mode))
    hold(MeasuredPeaks(CPU), within, mode=mode)
    assert within.limit_by(BURST) == limit_at(found, mode) and 98 < within.percent_of(BURST) < 100
    assert within.flop_bound == bound_at(found, mode) and len(asked) == 1


def test_peaks_that_stay_too_low_are_measured_twice_and_no_more(measured):
    """Its second row, and that of another pass, are held against what is known."""
    slow = memory_alone(1e3)
    asked = measured(slow, slow)
    peaks = MeasuredPeaks(CPU)
    for mode in (FORWARD, FORWARD, BOTH):
        beyond = timed(0.5 * limit_at(slow, mode))
        hold(peaks, beyond, mode=mode)
        assert beyond.percent_of(BURST) == pytest.approx(200)
    assert len(asked) == 2


def test_rows_before_one_that_passes_are_held_against_the_new_peaks(measured):
    slow, fast = memory_alone(1e3), memory_alone(2e3)
    measured(slow, fast)
    peaks, within, beyond = MeasuredPeaks(CPU), timed(1.5 * limit_at(slow)), timed(0.9 * limit_at(slow))
    hold(peaks, within, beyond)
    assert within.limit_by(BURST) == beyond.limit_by(BURST) == limit_at(fast)


def test_a_row_that_was_not_timed_has_a_limit_and_passes_none(measured):
    asked = measured(memory_alone(1e3))
    empty = Row(reason="CUDA graphs need a GPU")
    hold(MeasuredPeaks(CPU), empty)
    assert empty.limit_by(BURST) == limit_at(memory_alone(1e3)) and len(asked) == 1


def test_each_row_that_passes_has_the_peaks_of_its_own_work_measured_again(measured):
    """Both in one go: then all rows are held once more."""
    asked = measured(*[Peaks({"float32": 1.0, "float16": 1.0}, 1.0)] * 3)
    peaks = MeasuredPeaks(CPU)
    measurement.hold_against_limits([(timed(1e-9), FP32, FORWARD), (timed(1e-9), FP16, BOTH)], peaks)
    assert [work for work, _ in asked] == [FP32, FP32, FP16]


def test_work_that_computes_nothing_needs_the_copy_alone(rates):
    """A LayerNorm's: no matmul is timed for it, in a burst or sustained."""
    norms = FP32.part(("layer norms",))
    assert MeasuredPeaks(CPU).of(norms) == Peaks({}, 2 * 4 * 2**26 / 1e-3) and not rates
    assert peaks_module._rates(norms) == {"copy"} and peaks_module._rates(FP32) == {"copy", "float32"}
    assert peaks_module._rates(FP8) == {"copy", "float8", "float16 attention", "float16 attention backward"}


# --------------------------------------------------------------------------------------------------- said on the card


def held(result: Result, peaks: MeasuredPeaks) -> None:
    """As a session does: what was not timed is not held."""
    session = Session("step", CPU, 1)
    session.peaks = peaks
    block = BlockSubject(None, [], [], {}, (1.0, 1.0), FP32, config=SMALL)                # nothing of it is called
    session.entries = [Entry(Case("0_baseline", prepare=None), result, block)]
    session._hold_against_limits()


def result_of(**rows: Row) -> Result:
    """Of step 0, with eager rows; `both` is of the second pass."""
    modes = {"forward": FORWARD, "both": BOTH}
    found = {(modes[name], "eager"): row for name, row in rows.items()}
    return Result("0_baseline", SMALL, "float32", CPU_FACTS, step=0, traits=steps.load(0).traits, rows=found)


def test_peaks_that_stay_too_low_are_said_beside_the_peaks(measured):
    """With the rows that pass 100 % of them."""
    slow = memory_alone(1e3)
    measured(slow, slow)
    peaks = MeasuredPeaks(CPU)
    result = result_of(forward=timed(0.9 * limit_at(slow)), both=timed(1.1 * limit_at(slow, BOTH)))
    held(result, peaks)
    assert result.peaks[BURST] == f"{peaks.in_words()}; measured twice, and too low for forward, eager"
    result.rows[BOTH, "eager"] = timed(0.9 * limit_at(slow, BOTH))
    held(result, peaks)
    assert result.peaks[BURST] == (f"{peaks.in_words()}; measured twice, and too low for "
                            "forward, eager and forward+backward, eager")


def test_better_peaks_are_those_of_the_rows_before_too(measured):
    """The first pass is held against them again: a card has one limit, and one line of peaks."""
    slow, fast = memory_alone(1e3), memory_alone(1e4)
    measured(slow, fast)
    peaks = MeasuredPeaks(CPU)
    result = result_of(forward=timed(1.5 * limit_at(slow)))
    held(result, peaks)
    assert result.rows[FORWARD, "eager"].limit_by(BURST) == limit_at(slow)
    result.rows[BOTH, "eager"] = timed(0.5 * limit_at(slow, BOTH))
    held(result, peaks)
    assert result.rows[FORWARD, "eager"].limit_by(BURST) == limit_at(fast)
    assert result.rows[BOTH, "eager"].limit_by(BURST) == limit_at(fast, BOTH)
    assert result.peaks[BURST] == peaks.in_words() and "measured twice" not in result.peaks[BURST]


def test_a_way_of_launching_that_was_not_asked_for_has_no_limit(measured):
    measured(memory_alone(1e3))
    result = result_of(forward=Row(reason="--launch graph"))
    held(result, MeasuredPeaks(CPU))
    assert result.rows[FORWARD, "eager"].limits == {}


# ------------------------------------------------------------------------------------------------------------- the work


@pytest.mark.parametrize("layout, strides", [
    ("forward", ((5, 1), (1, 5))), ("input gradient", ((5, 1), (6, 1))), ("weight gradient", ((1, 4), (6, 1)))])
@pytest.mark.parametrize("dtype, precision", [("float32", "highest"), ("tf32", "high"), ("bfloat16", "highest")])
def test_operands_lie_in_memory_as_in_the_block(layout, strides, dtype, precision, monkeypatch):
    """[m, k] x [k, n]; a linear layer holds its weight [n, k], and its gradient is dy.T @ x."""
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append((a, b, torch.get_float32_matmul_precision())))
    before = torch.get_float32_matmul_precision()
    matmul_work(layout, 4, 5, 6, dtype, CPU)()
    (a, b, used), = seen
    assert (a.shape, b.shape) == ((4, 5), (5, 6)) and (a.stride(), b.stride()) == strides
    assert a.dtype == b.dtype == getattr(torch, dtype.replace("tf32", "float32")) and used == precision
    assert a.float().std() > 0.3 and b.float().std() > 0.3 and torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("shape, can", [((3, 16, 32), True), ((16, 24, 32), False), ((16, 32, 40), False)])
def test_fp8_multiplies_sides_in_multiples_of_16(shape, can):
    assert multiplies(shape, "float8") == can and multiplies(shape, "bfloat16")


def test_the_peak_of_fp8_is_that_of_shapes_that_it_can_have(monkeypatch):
    """A vocabulary of 30,522 stays in BF16 beside layers in FP8."""
    layer, vocabulary = (Operation(name, MATMUL, 2.0 * 64 * 32 * n, 1.0, arithmetic, (64, 32, n))
                         for name, n, arithmetic in (("layer", 48, "float8"), ("vocabulary", 30522, "bfloat16")))
    asked = []
    monkeypatch.setattr(peaks_module, "_matmul_rate", lambda shape, dtype, device: asked.append((dtype, shape)) or 1.0)
    work = Workload("float8", (layer, vocabulary), ())
    measure_burst(work, CPU, Peaks({}, 1.0))
    assert [shape for dtype, shape in asked if dtype == "float8"] == [(64, 32, 48), square(CPU)]
    assert ("bfloat16", (64, 32, 30522)) in asked
    assert [each.what.partition(":")[0] for each in _work(work, "bfloat16", CPU)] == ["layer", "vocabulary"]
    monkeypatch.setattr(peaks_module, "matmul_work", lambda *of: None)
    assert [each.what.partition(":")[0] for each in _work(work, "float8", CPU)] == ["layer"]


def test_float8_operands_fill_its_range_and_are_read_along_k(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **how: seen.append((a, b, how)))
    matmul_work("weight gradient", 64, 128, 32, "float8", CPU)()
    (a, b, how), = seen
    assert a.dtype == b.dtype == torch.float8_e4m3fn and (a.shape, b.shape) == ((64, 128), (128, 32))
    assert (a.stride(), b.stride()) == ((128, 1), (1, 128)) and how["use_fast_accum"]
    assert 300 < a.float().abs().max() <= 448 and 90 < a.float().std() < 130


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_causal_and_of_the_blocks_shape(backward, monkeypatch):
    asked, real = [], pieces.scaled_dot_product_attention

    def attention(q, k, v, **how):
        asked.append((q.shape, q.stride(), torch.is_grad_enabled(), how))
        return real(q, k, v, **how)
    monkeypatch.setattr(pieces, "scaled_dot_product_attention", attention)
    work = attention_work((2, 8, 2, 8), "bfloat16", backward, None, CPU)
    made = len(asked)
    work()
    shape, stride, graded, how = asked[-1]
    assert shape == (2, 2, 8, 8) and stride == (8 * 48, 8, 48, 1) and how == {"is_causal": True}
    assert graded == backward and len(asked) == made + (not backward)        # a backward alone has no forward in it


@pytest.mark.parametrize("kind, layout, shape, filled", [
    (MATMUL, "forward", (16, 16, 48), (16384, 16, 48)), (MATMUL, "forward", (48, 16, 64), (48 * 342, 16, 64)),
    (MATMUL, "input gradient", (16, 48, 16), (16384, 48, 16)),
    (MATMUL, "weight gradient", (16, 16, 64), (16, 16384, 64)),
    (MATMUL, "forward", (4096, 64, 64), (4096, 64, 64)), (ATTENTION, "backward", (2, 16, 1, 16), (1024, 16, 1, 16)),
    (ATTENTION, "forward", (64, 64, 1, 64), (64, 64, 1, 64))])
def test_a_small_shape_gets_more_tokens(kind, layout, shape, filled):
    """As many times more FLOPs; what it is named, and what else it has, stays."""
    operation = Operation("a", kind, 8.0, 1.0, "float32", shape, layout)
    times = math.prod(filled) / math.prod(shape)
    assert filling(operation, CPU) == Operation("a", kind, 8.0 * times, 1.0, "float32", filled, layout)


# ------------------------------------------------------------------------------------------------------------ sustained


@pytest.fixture
def looks(monkeypatch):
    """looks(...): the seconds that a repetition takes, look by look; the value: the works that were looked at."""
    def set_up(*seconds):
        remaining, asked = iter(seconds), []

        def look(work, duration, device):
            asked.append((work.what, duration))
            return next(remaining), {"sm_mhz": 1000 + len(asked)}
        monkeypatch.setattr(peaks_module, "_look", look)
        return asked
    return set_up


def work_of(what: str, amount: float = 1.0) -> Work:
    return Work(what, None, amount)


@pytest.mark.parametrize("seconds, rate, settled", [
    ((1.0, 1.0), 1.0, True), ((1.0, 2.0, 2.0), 0.5, True), ((1.0, 1.009), 1 / 1.0045, True),
    ((1.0, 1.02, 1.04), 1 / 1.03, False), ((1.0, 2.0, 4.0), 1 / 3.0, False)])
def test_a_rate_is_sustained_once_two_looks_agree(looks, seconds, rate, settled):
    """The mean of the last two counts, whether they do or not."""
    asked = looks(*seconds)
    sustained = steady(work_of("a"), CPU)
    assert sustained.rate == pytest.approx(rate) and sustained.settled == settled and len(asked) == len(seconds)
    assert sustained.seconds == 2 * METHODS["cpu"].look and sustained.state == {"sm_mhz": 1000 + len(asked)}


def test_the_best_of_all_work_counts_among_those_close_to_it(looks, monkeypatch):
    """Trials: b is best, c within 5 % of it, a is not; looked at longer, c is better than b."""
    monkeypatch.setattr(peaks_module, "_work", lambda *_: iter([work_of("a"), work_of("b"), work_of("c")]))
    asked = looks(1.0, 0.5, 0.51, 0.6, 0.6, 0.55, 0.55, 2.0, 2.0)
    best = measure_sustained(FP32, "float32", CPU)
    assert best.work.what == "c" and best.rate == pytest.approx(1 / 0.55)
    square = "square: [1024, 1024, 1024]"                              # the best of the block's own is held against it
    assert [what for what, _ in asked] == ["a", "b", "c", "b", "b", "c", "c", square, square]
    assert [duration for _, duration in asked] == [METHODS["cpu"].trial] * 3 + [METHODS["cpu"].look] * 6
    assert best.square == 2 * 1024**3 / 2.0


@pytest.mark.parametrize("name, pieces, amount", [
    ("float32", 12, None), ("copy", 1, 2 * 4 * 2**26), ("bfloat16 attention", 1, 2 * 16**2 * 16 * 1024),
    ("bfloat16 attention backward", 1, 4 * 16**2 * 16 * 1024)])
def test_what_is_repeated_for_each_rate(name, pieces, amount):
    in_bfloat16 = work_in(Arithmetic("float32", "bfloat16", 4, 2, 2, 4), SMALL)
    works = list(_work(in_bfloat16, name, CPU))
    assert len(works) == pieces and (amount is None or works[0].amount == amount)
    assert all(callable(work.call) and work.amount > 0 for work in works)


def test_an_attention_backend_that_has_no_kernel_is_left_out(monkeypatch):
    def attention(shape, dtype, backward, backend, device):
        if backend is SDPBackend.CUDNN_ATTENTION:
            raise RuntimeError("No available kernel")
        return backend
    monkeypatch.setattr(peaks_module, "attention_work", attention)
    backends = [work.call for work in _work(FP16, "float16 attention", torch.device("cuda"))]
    assert backends == [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def test_a_look_is_as_long_as_it_is_told_and_reads_the_machine(monkeypatch):
    counts = []

    def together(work, count, meanwhile):
        counts.append(count)
        meanwhile()
        return 40.0 * count
    clock = SimpleNamespace(sample=lambda *_: [50.0, 25.0], together=together)
    monkeypatch.setattr(peaks_module, "clock_for", lambda device: clock)
    monkeypatch.setattr(peaks_module.machine, "state", lambda device: {"power_w": 600.0})
    assert _look(work_of("a"), 1.0, CPU) == (0.04, {"power_w": 600.0}) and counts == [40]


@pytest.fixture
def sustaining(monkeypatch):
    """sustaining(rate, ...): what measuring gives, one time after the other; the value: the names asked for."""
    def set_up(*rates):
        remaining, asked = iter(rates), []

        def measure(workload, name, device):
            asked.append(name)
            return Sustained(next(remaining), work_of(name), 1.0, True)
        monkeypatch.setattr(peaks_module, "measure_sustained", measure)
        monkeypatch.setattr(peaks_module, "measure_burst", lambda workload, device, known=None: Peaks(
            dict.fromkeys(peaks_module.arithmetics(workload), 9.0), 7.0))
        return asked
    return set_up


def test_sustained_rates_are_measured_once_each(sustaining):
    """Fused attention apart, where there is one; in FP32 its matmuls' rate stands for it."""
    asked = sustaining(*range(1, 9))
    peaks = MeasuredPeaks(CPU)
    assert peaks.by_yardstick(FP16).keys() == {BURST}
    peaks.sustain(FP16)
    assert sorted(asked) == ["copy", "float16", "float16 attention", "float16 attention backward"]
    peaks.sustain(FP8)
    peaks.sustain(FP32)
    assert asked[4:] == ["float8", "float32"]


def test_released_work_holds_no_tensors():
    """A script keeps rates alone: the tensors would count as its block's."""
    peaks, tensor = MeasuredPeaks(CPU), torch.zeros(4)
    held = weakref.ref(tensor)
    peaks.sustained["copy"] = Sustained(1.0, Work("a copy", tensor.clone, 2.0), 1.0, True)
    del tensor
    assert held() is not None
    peaks.release()
    assert held() is None and peaks.sustained["copy"].work.what == "a copy"


def test_the_better_rate_counts_wherever_it_was_seen(sustaining):
    """Measured again, or in the rounds; and what can be sustained can be had in a burst."""
    asked = sustaining(*[3.0] * 2, *[5.0] * 2)
    peaks = MeasuredPeaks(CPU)
    peaks.of(FP32)
    peaks.sustain(FP32)
    peaks.took_part("float32", [2000.0, 1000.0, 500.0])                # 0.5, 1 and 2 a second: slower than alone
    assert peaks.sustained["float32"].rate == 3.0 and peaks.sustained["float32"].in_rounds == [0.5, 1.0, 2.0]
    assert peaks.again(FP32) and len(asked) == 4
    assert peaks.sustained["float32"].rate == 5.0 and peaks.sustained["float32"].in_rounds == [0.5, 1.0, 2.0]
    peaks.took_part("float32", [50.0] * 9)
    assert peaks.sustained["float32"].rate == 20.0 == peaks.known.flops["float32"] and peaks.known.bandwidth == 7.0
    peaks.took_part("copy", [50.0] * 9)
    assert peaks.known.bandwidth == 20.0
    assert peaks.by_yardstick(FP32)[SUSTAINED] == Peaks({"float32": 20.0}, 20.0)


def test_a_row_beyond_what_is_sustained_has_the_peaks_measured_again(sustaining):
    """Within its limit by the burst's rates, too."""
    asked = sustaining(*[1e-6] * 2, *[8.0] * 2)
    peaks = MeasuredPeaks(CPU)
    peaks.sustain(FP32)
    row = timed(1.0001 * limit_at(Peaks({"float32": 9.0}, 7.0)))
    hold(peaks, row)
    assert len(asked) == 4
    assert row.percent_of(SUSTAINED) > 100 and row.beyond_its_limit and row.percent_of(BURST) < 100
    assert row.limit_by(DATA_SHEET) is None and row.percent_of(DATA_SHEET) is None


# ------------------------------------------------------------------------------------------------------- the data sheet


@pytest.mark.parametrize("name", sorted(data_sheets._SHEETS))
def test_a_data_sheets_rates_are_dense_and_have_a_source(name):
    """Of tensor cores FP16 has twice TF32's rate, FP8 twice FP16's; with sparsity a rate would be twice too high."""
    peaks, source = data_sheet(name)
    assert "data sheet" in source and 1e11 < peaks.bandwidth < 1e13
    assert peaks.flops["float16"] == peaks.flops["bfloat16"] == pytest.approx(2 * peaks.flops["tf32"], rel=0.02)
    assert peaks.flops.get("float8", 2 * peaks.flops["float16"]) == pytest.approx(2 * peaks.flops["float16"], rel=0.02)
    assert peaks.flops["float32"] < peaks.flops["tf32"] and peaks.flops["float16"] < 1e15


def test_an_unknown_gpu_has_no_data_sheet(sustaining):
    sustaining()
    peaks = MeasuredPeaks(CPU)
    assert data_sheet("a GPU") is None and peaks.sheet is None and peaks.in_words(DATA_SHEET) == "n/a: not known here"
    peaks.sheet = data_sheet("NVIDIA A100-SXM4-80GB")
    assert DATA_SHEET in peaks.by_yardstick(FP16) and DATA_SHEET not in peaks.by_yardstick(FP8)


def test_peaks_of_every_yardstick_fit_on_the_card():
    """The sustained ones in a line, or the cards of two steps would differ by a line."""
    peaks = MeasuredPeaks(CPU)
    assert peaks.in_words(SUSTAINED) == "n/a"
    for name, rate in (("float8", 1.337e15), ("bfloat16 attention", 4.5e14), ("copy", 4.2e12),
                       ("bfloat16 attention backward", 3.02e14)):
        peaks.sustained[name] = Sustained(rate, work_of(name), 1.0, True)
    said = peaks.in_words(SUSTAINED)
    assert said == "bfloat16 attention 450 and 302 (backward), float8 1337 TFLOP/s; copy 4.2 TB/s" and len(said) <= 80
    peaks.sheet = data_sheet("NVIDIA H200")
    assert "float16 989 TFLOP/s" in peaks.in_words(DATA_SHEET) and peaks.in_words(DATA_SHEET).endswith("sheet, SXM")


@pytest.mark.unit
@pytest.mark.parametrize("call", [
    lambda: pieces.multiply(torch.ones(2, 3), torch.ones(2, 3), "tf32"),
    lambda: calibration("cpu")["gemm"]()])
def test_the_callers_precision_is_back_after_an_error(call, monkeypatch):
    """Else TF32 would leak into what follows."""
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "mm", lambda *given, **more: 1 / 0)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ZeroDivisionError):
            call()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.unit
def test_work_of_attention_alone_in_fp32_is_held_against_a_square(monkeypatch):
    """It has no matmul of its own to repeat."""
    monkeypatch.setattr(peaks_module, "square", lambda device: (64, 64, 64))
    operation = Operation("attention", "attention", 1e6, 1e3, "float32", (1, 16, 2, 8))
    workload = Workload("float32", (operation,), tokens=16)
    found = peaks_module.measure_sustained(workload, "float32", torch.device("cpu"))
    assert found.rate > 0 and found.work.what == "square: [64, 64, 64]"
