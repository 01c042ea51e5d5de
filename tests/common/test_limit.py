"""The limit of a row: FLOPs against PyTorch's own counter, bytes and maxima against numbers worked by hand, peaks."""
import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common import PRESETS, BlockConfig, limit, parameters, run, steps
from common.iteration import BOTH, FORWARD
from common.limit import Arithmetic, MeasuredPeaks, Peaks
from common.result import Result, Row
from common.subject import BlockSubject
from common.timing import Timing
from tests.helpers.made_results import CPU as CPU_FACTS

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SMALL = BlockConfig(batch_size=1, seq_len=16, hidden_size=16, num_heads=1)                     # F = 64
FP32 = Arithmetic("float32", "float32", parameter_bytes=4, activation_bytes=4, operand_bytes=4, weight_bytes=4)
FP16 = Arithmetic("float16", "float16", parameter_bytes=4, activation_bytes=2, operand_bytes=2, weight_bytes=4)
FP8 = Arithmetic("float8", "float16", parameter_bytes=4, activation_bytes=2, operand_bytes=1, weight_bytes=4)
NOTHING = Peaks({}, 0.0)


# --------------------------------------------------------------------------------------------------------- the formula


def test_flops_bound_what_bytes_do_not():
    """All of it where memory is endless, none where it hardly moves, and a part in between."""
    def share(bandwidth):
        return limit.flop_bound(SMALL, FP32, Peaks({"float32": 1e12}, bandwidth), backward=True)
    assert share(1e30) == 1.0 and share(1.0) == 0.0 and 0 < share(3e11) < 1


def test_attention_is_bound_by_its_own_flops_not_those_of_the_matmuls():
    """In 16 bits beside FP8 matmuls, at peaks of 1 a second: of one the FLOPs set the limit, of the other the bytes."""
    attention, moved_by_attention = 8192, 2048
    matmuls = moved_by_matmuls = 0
    for operation in limit.operations(SMALL, FP8, backward=False):
        if operation.kind == "matmul":
            matmuls += operation.flops
            moved_by_matmuls += operation.bytes
    slow_attention = Peaks({"float8": 1e30, "float16": 1.0}, 1.0)
    slow_matmuls = Peaks({"float8": 1.0, "float16": 1e30}, 1.0)
    share = limit.flop_bound(SMALL, FP8, slow_attention, backward=False)
    assert share == pytest.approx(attention / (attention + moved_by_matmuls))
    share = limit.flop_bound(SMALL, FP8, slow_matmuls, backward=False)
    assert share == pytest.approx(matmuls / (matmuls + moved_by_attention))


@pytest.mark.parametrize("config", [
    SMALL, BlockConfig(2, 48, 64, 4), BlockConfig(3, 32, 96, 6, ffn_hidden_size=160), PRESETS["gpt2"],
], ids=str)
def test_flops_are_those_that_torch_counts(config):
    """On the meta device, with the block by hand. It computes all of S x S; the formula counts the causal half."""
    p = {name: torch.empty(shape, device="meta") for name, shape in parameters.shapes(config).items()}
    block = steps.load(0).build(config, p, "meta")
    x = torch.empty(config.batch_size, config.seq_len, config.hidden_size, device="meta", requires_grad=True)
    not_needed = 2 * config.batch_size * config.seq_len**2 * config.hidden_size
    with FlopCounterMode(display=False) as counter:
        y = block(x)
        forward = counter.get_total_flops()
        y.backward(torch.empty_like(y))
    assert forward == limit.flops(config, backward=False) + not_needed
    assert counter.get_total_flops() == limit.flops(config, backward=True) + 3 * not_needed


def test_the_closed_form_for_the_usual_ffn():
    B, S, E = 8, 2048, 4096
    assert limit.flops(PRESETS["te-tutorial"], backward=False) == 24 * B * S * E**2 + 2 * B * S**2 * E


@pytest.mark.parametrize("a", [FP32, FP8], ids=["FP32", "FP8"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("config", [SMALL, *PRESETS.values()], ids=str)
def test_the_operations_add_up_to_the_flops(config, backward, a):
    work = limit.operations(config, a, backward)
    assert sum(o.flops for o in work) == limit.flops(config, backward)
    assert all(o.flops > 0 or o.kind == "memory" for o in work) and all(o.bytes > 0 for o in work)
    assert len({o.name for o in work}) == len(work) and {o.kind for o in work} == {"matmul", "attention", "memory"}


def test_the_limit_is_a_sum_of_maxima():
    """Worked by hand for N = 16 tokens, E = 16, F = 64, 4 bytes each, at 3072 FLOP/s and 1024 bytes/s.

    layer norms            4096 bytes                      4 s
    attention              8192 FLOPs,  4096 bytes         4 s: bound by memory
    qkv                   24576 FLOPs,  7168 bytes         8 s: bound by arithmetic, like fc and mlp projection
    attention projection   8192 FLOPs,  4096 bytes         4 s: bound by memory
    fc                    32768 FLOPs,  9216 bytes    10 2/3 s
    mlp projection        32768 FLOPs, 10240 bytes    10 2/3 s
    """
    work = {o.name: (o.flops, o.bytes) for o in limit.operations(SMALL, FP32, backward=False)}
    assert work == {"layer norms": (0, 4096), "attention": (8192, 4096), "qkv": (24576, 7168),
                    "attention projection": (8192, 4096), "fc": (32768, 9216), "mlp projection": (32768, 10240)}
    peaks = Peaks({"float32": 3072}, 1024)
    assert limit.limit_ms(SMALL, FP32, peaks, backward=False) == pytest.approx(1e3 * (4 + 4 + 8 + 4 + 32 / 3 + 32 / 3))
    assert limit.limit_ms(SMALL, FP32, peaks, False, names=("qkv", "attention")) == pytest.approx(1e3 * (8 + 4 + 4))


def test_the_bytes_of_fp8_with_its_backward():
    """Worked by hand for N = 16, E = 16, F = 64; x, y and parameters of 4 bytes, between the matmuls 2, operands 1.

    Forward: LayerNorm reads x (4) and the residual (2) and writes two operands; attention moves q, k, v and its result;
    a matmul reads its operand (1) and its weight (4), and writes 2, or 1 where GELU's result is the next operand; the
    projections add the residual (2 read, 2 written; in the end 2 and 4). Backward: each matmul reads dy as an operand
    (1) twice; beside it the weight, of which the forward has written a copy (1 + 1), to write dx (2), and the operand
    of the forward (1), to write dweight (4).
    """
    N, E, F, Q = 16, 16, 64, 48
    expected = {
        "layer norms": N * E * (4 + 2 + 1 + 1), "attention": 4 * N * E * 2,
        "qkv": N * E + 4 * E * Q + 2 * N * Q, "attention projection": N * E + 4 * E * E + N * E * (2 + 2),
        "fc": N * E + 4 * E * F + N * F, "mlp projection": N * F + 4 * F * E + N * E * (2 + 4),
        "layer norms backward": 2 * N * E * (2 + 2 + 2), "attention backward": 8 * N * E * 2,
        "qkv, input gradient": N * Q + 2 * E * Q + 2 * N * E, "qkv, weight gradient": N * Q + N * E + 4 * E * Q,
        "attention projection, input gradient": N * E + 2 * E * E + 2 * N * E,
        "attention projection, weight gradient": N * E + N * E + 4 * E * E,
        "fc, input gradient": N * F + 2 * E * F + 2 * N * E, "fc, weight gradient": N * F + N * E + 4 * E * F,
        "mlp projection, input gradient": N * E + 2 * E * F + 2 * N * F,
        "mlp projection, weight gradient": N * E + N * F + 4 * E * F}
    assert {o.name: o.bytes for o in limit.operations(SMALL, FP8, backward=True)} == expected


@pytest.mark.parametrize("backward", [False, True])
def test_the_limit_at_its_ends_is_arithmetic_alone_or_memory_alone(backward):
    work = limit.operations(SMALL, FP32, backward)
    no_memory = limit.limit_ms(SMALL, FP32, Peaks({"float32": 1e9}, math.inf), backward)
    no_arithmetic = limit.limit_ms(SMALL, FP32, Peaks({"float32": math.inf}, 1e9), backward)
    assert no_memory == pytest.approx(limit.flops(SMALL, backward) / 1e6)
    assert no_arithmetic == pytest.approx(sum(o.bytes for o in work) / 1e6)
    both = limit.limit_ms(SMALL, FP32, Peaks({"float32": 1e9}, 1e9), backward)
    assert max(no_memory, no_arithmetic) <= both <= no_memory + no_arithmetic


def test_attention_and_matmuls_have_their_own_peaks():
    """FP8 matmuls beside 16-bit attention: each at its own rate, and neither at the other's."""
    attention, matmuls = 8192, 98304
    peaks = Peaks({"float8": 1e3, "float16": 2e3}, math.inf)
    expected = 1e3 * (matmuls / 1e3 + attention / 2e3)
    assert limit.limit_ms(SMALL, FP8, peaks, backward=False) == pytest.approx(expected)


@pytest.mark.parametrize("field", ["batch_size", "seq_len", "hidden_size", "ffn_hidden_size"])
@pytest.mark.parametrize("a", [FP32, FP8], ids=["FP32", "FP8"])
@pytest.mark.parametrize("backward", [False, True])
def test_more_work_has_a_higher_limit(field, a, backward):
    peaks = Peaks({"float32": 5e13, "float16": 8e14, "float8": 1.5e15}, 4e12)
    config = BlockConfig(batch_size=1, seq_len=128, hidden_size=256, num_heads=4, ffn_hidden_size=1024)
    limits = []
    for times in (1, 2, 4, 8):
        larger = config.replace(**{field: getattr(config, field) * times})
        limits.append(limit.limit_ms(larger, a, peaks, backward))
    assert limits == sorted(limits) and len(set(limits)) == 4


@pytest.mark.parametrize("a", [FP32, FP8], ids=["FP32", "FP8"])
def test_the_backward_costs_more_than_the_forward(a):
    peaks = Peaks({"float32": 5e13, "float16": 8e14, "float8": 1.5e15}, 4e12)
    forward, both = (limit.limit_ms(PRESETS["gpt2"], a, peaks, backward) for backward in (False, True))
    assert 2 * forward < both < 4 * forward


# ----------------------------------------------------------------------------------------------------- measuring peaks


@pytest.fixture
def rates(monkeypatch):
    """A matmul's rate is the area of its result, a copy takes 1 ms. The value: which matmuls were asked for."""
    asked = []

    def rate(m, k, n, name, device):
        asked.append((name, m, k, n))
        return float(m * n)
    monkeypatch.setattr(limit, "_matmul_rate", rate)
    monkeypatch.setattr(limit, "_best_seconds", lambda work, device: 1e-3)
    return asked


def test_a_peak_is_of_the_best_shape_a_large_square_among_them(rates):
    """A copy reads and writes."""
    assert limit.measure_peaks(SMALL, FP32, CPU) == Peaks({"float32": 1024.0**2}, 2 * 4 * 2**26 / 1e-3)
    shapes = {(m, k, n) for _, m, k, n in rates}
    assert shapes == {(16, 16, 48), (16, 16, 64), (16, 64, 16), (1024, 1024, 1024)}


def test_each_arithmetic_of_a_block_has_a_peak(rates):
    found = limit.measure_peaks(SMALL, FP8, CPU, Peaks({}, 5.0))
    assert found.flops.keys() == {"float8", "float16"} and found.bandwidth == 5.0


def test_a_peak_that_is_known_is_not_measured_again(rates):
    known = Peaks({"float16": 7.0, "float64": 1.0}, 5.0)
    assert limit.measure_peaks(SMALL, FP16, CPU, known) == known and not rates
    found = limit.measure_peaks(SMALL, FP8, CPU, known)
    assert found == Peaks(known.flops | {"float8": 1024.0**2}, 5.0) and {name for name, *_ in rates} == {"float8"}


def test_the_best_sample_counts(monkeypatch):
    clock = SimpleNamespace(sample=lambda work, between, count: [3.0, 1.0, 2.0])
    monkeypatch.setattr(limit, "clock_for", lambda device: clock)
    assert limit._best_seconds(None, CPU) == 1e-3


@pytest.mark.parametrize("dtype, precision", [("float32", "highest"), ("tf32", "high")])
def test_the_peak_of_float32_and_of_tf32_is_of_its_own_matmul(dtype, precision, monkeypatch):
    """Each would else be credited with the other's rate, several times as high or as low."""
    seen = []

    def at_once(work, device):
        work()
        return 1.0
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append((a.dtype, torch.get_float32_matmul_precision())))
    monkeypatch.setattr(limit, "_best_seconds", at_once)
    torch.set_float32_matmul_precision("medium")
    try:
        assert limit._matmul_rate(4, 4, 4, dtype, CPU) == 2 * 4**3
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [(torch.float32, precision)]


def test_peaks_are_measured_for_what_the_step_computes_in():
    """One matmul rate for each dtype and the copy bandwidth; the caller's matmul precision is left as it was."""
    before = torch.get_float32_matmul_precision()
    peaks = limit.measure_peaks(SMALL, Arithmetic("bfloat16", "float32", 4, 2, 2, 4), CPU)
    assert peaks.flops.keys() == {"bfloat16", "float32"} and all(0 < rate < 1e16 for rate in peaks.flops.values())
    assert 0 < peaks.bandwidth < 1e14 and torch.get_float32_matmul_precision() == before


# ------------------------------------------------------------------------------------------ peaks that came out too low


@pytest.fixture
def measured(monkeypatch):
    """measured(peaks, ...): what measuring gives, one time after the other; the value grows by what it was asked."""
    def set_up(*found: Peaks) -> list:
        asked, remaining = [], iter(found)

        def measure_peaks(config, a, device, known=None):
            asked.append((a, known))
            return next(remaining)
        monkeypatch.setattr(limit, "measure_peaks", measure_peaks)
        return asked
    return set_up


def test_a_peak_is_measured_when_it_is_first_asked_for(measured):
    """That of another arithmetic comes to those that are known."""
    first, both = Peaks({"float16": 8e14}, 4e12), Peaks({"float16": 8e14, "float8": 1e15}, 4e12)
    asked = measured(first, both)
    peaks = MeasuredPeaks(CPU)
    assert asked == []
    assert peaks.of(SMALL, FP16) == peaks.of(SMALL, FP16) == first
    assert peaks.of(SMALL, FP8) == peaks.of(SMALL, FP16) == peaks.known == both
    assert asked == [(FP16, NOTHING), (FP8, first)]


def test_of_two_measurements_the_better_one_counts(measured):
    """Of each peak by itself. What is measured again is measured from nothing."""
    asked = measured(Peaks({"float8": 1.0, "float16": 9.0}, 3.0), Peaks({"float8": 5.0, "float16": 4.0}, 2.0))
    peaks = MeasuredPeaks(CPU)
    peaks.of(SMALL, FP8)
    assert peaks.again(SMALL, FP8)
    assert peaks.known == Peaks({"float8": 5.0, "float16": 9.0}, 3.0)
    assert asked == [(FP8, NOTHING), (FP8, None)]


def test_peaks_are_measured_again_once_for_each_arithmetic(measured):
    asked = measured(*[Peaks({"float16": 1.0, "float8": 1.0}, 1.0)] * 4)
    peaks = MeasuredPeaks(CPU)
    peaks.of(SMALL, FP8)
    assert [peaks.again(SMALL, a) for a in (FP16, FP16, FP8, FP16, FP8)] == [True, False, True, False, False]
    assert [a for a, _ in asked] == [FP8, FP16, FP8]


def test_peaks_in_words():
    peaks = MeasuredPeaks(CPU)
    peaks.known = Peaks({"float8": 1.31e15, "float16": 8.12e14, "float32": 2.5e12}, 4.1e12)
    assert peaks.in_words() == ("float16 812 TFLOP/s, float32 2.50 TFLOP/s, float8 1310 TFLOP/s; "
                                "copy 4.1 TB/s (read + written)")


def subject_of(arithmetic: Arithmetic | None) -> BlockSubject:
    """A block that computes so; nothing of it is called."""
    return BlockSubject(None, [], [], {}, (1.0, 1.0), arithmetic, tokens=SMALL.tokens, config=SMALL)


def timed(ms: float, **changes) -> Row:
    return Row(Timing([ms] * 6, True, "fake"), flops=1.0, **changes)


def memory_alone(bandwidth: float) -> Peaks:
    """Peaks at which nothing but the bytes takes time."""
    return Peaks({"float32": 1e30}, bandwidth)


def limit_at(peaks: Peaks, mode: str = FORWARD) -> float:
    return limit.limit_ms(SMALL, FP32, peaks, mode == BOTH)


def test_a_row_that_passes_its_limit_has_the_peaks_measured_again(measured):
    slow, fast = memory_alone(1e3), Peaks({"float32": 1.0}, 1e6)
    asked = measured(slow, fast)
    peaks, beyond = MeasuredPeaks(CPU), timed(0.99 * limit_at(slow))
    subject_of(FP32).hold_against_limit(beyond, FORWARD, peaks)
    better = Peaks({"float32": 1e30}, 1e6)
    assert len(asked) == 2 and peaks.known == better
    assert beyond.limit_ms == limit_at(better) and beyond.percent_of_limit < 100
    assert beyond.flop_bound == limit.flop_bound(SMALL, FP32, better, False)


@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_a_row_within_its_limit_leaves_the_peaks_alone(measured, mode):
    found = Peaks({"float32": 3e5}, 1e5)
    asked = measured(found)
    within = timed(1.01 * limit_at(found, mode))
    subject_of(FP32).hold_against_limit(within, mode, MeasuredPeaks(CPU))
    assert within.limit_ms == limit_at(found, mode) and 98 < within.percent_of_limit < 100
    assert within.flop_bound == limit.flop_bound(SMALL, FP32, found, mode == BOTH) and len(asked) == 1


def test_peaks_that_stay_too_low_are_measured_twice_and_no_more(measured):
    """Its second row, and that of another pass, are held against what is known."""
    slow = memory_alone(1e3)
    asked = measured(slow, slow)
    peaks = MeasuredPeaks(CPU)
    for mode in (FORWARD, FORWARD, BOTH):
        beyond = timed(0.5 * limit_at(slow, mode))
        subject_of(FP32).hold_against_limit(beyond, mode, peaks)
        assert beyond.percent_of_limit == pytest.approx(200)
    assert len(asked) == 2


def test_rows_before_one_that_passes_are_held_against_the_new_peaks(measured):
    slow, fast = memory_alone(1e3), memory_alone(2e3)
    measured(slow, fast)
    peaks, within, beyond = MeasuredPeaks(CPU), timed(1.5 * limit_at(slow)), timed(0.9 * limit_at(slow))

    def hold():
        for row in (within, beyond):
            subject_of(FP32).hold_against_limit(row, FORWARD, peaks)
    peaks.until_they_stay(hold)
    assert within.limit_ms == beyond.limit_ms == limit_at(fast)


def test_a_row_that_was_not_timed_has_a_limit_and_passes_none(measured):
    asked = measured(memory_alone(1e3))
    empty = Row(reason="CUDA graphs need a GPU")
    subject_of(FP32).hold_against_limit(empty, FORWARD, MeasuredPeaks(CPU))
    assert empty.limit_ms == limit_at(memory_alone(1e3)) and len(asked) == 1


def test_what_is_in_no_arithmetic_has_no_limit(measured):
    asked = measured()
    without = timed(1.0)
    subject_of(None).hold_against_limit(without, FORWARD, MeasuredPeaks(CPU))
    assert without.limit_ms is None and without.flop_bound is None and not asked


# --------------------------------------------------------------------------------------------------- said on the card


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
    run._hold_against_limit(subject_of(FP32), result, peaks)
    assert result.peaks == f"{peaks.in_words()}; measured twice, and too low for forward, eager"
    result.rows[BOTH, "eager"] = timed(0.9 * limit_at(slow, BOTH))
    run._hold_against_limit(subject_of(FP32), result, peaks)
    assert result.peaks == (f"{peaks.in_words()}; measured twice, and too low for "
                            "forward, eager and forward+backward, eager")


def test_better_peaks_are_those_of_the_rows_before_too(measured):
    """The first pass is held against them again: a card has one limit, and one line of peaks."""
    slow, fast = memory_alone(1e3), memory_alone(1e4)
    measured(slow, fast)
    peaks = MeasuredPeaks(CPU)
    result = result_of(forward=timed(1.5 * limit_at(slow)))
    run._hold_against_limit(subject_of(FP32), result, peaks)
    assert result.rows[FORWARD, "eager"].limit_ms == limit_at(slow)
    result.rows[BOTH, "eager"] = timed(0.5 * limit_at(slow, BOTH))
    run._hold_against_limit(subject_of(FP32), result, peaks)
    assert result.rows[FORWARD, "eager"].limit_ms == limit_at(fast)
    assert result.rows[BOTH, "eager"].limit_ms == limit_at(fast, BOTH)
    assert result.peaks == peaks.in_words() and "measured twice" not in result.peaks


def test_a_way_of_launching_that_was_not_asked_for_has_no_limit(measured):
    measured(memory_alone(1e3))
    result = result_of(forward=Row(reason="--launch graph"))
    run._hold_against_limit(subject_of(FP32), result, MeasuredPeaks(CPU))
    assert result.rows[FORWARD, "eager"].limit_ms is None
