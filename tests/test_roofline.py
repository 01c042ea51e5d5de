"""The arithmetic of the limit: FLOPs against PyTorch's own counter, bytes and maxima against numbers worked by hand."""
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common import PRESETS, BlockConfig, oracle, parameters, roofline, steps
from common.roofline import Arithmetic, Peaks

pytestmark = pytest.mark.unit

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = BlockConfig(batch_size=1, seq_len=16, hidden_size=16, num_heads=1)                     # F = 64
FP32 = Arithmetic("float32", "float32", parameter_bytes=4, activation_bytes=4, operand_bytes=4, weight_bytes=4)
FP8 = Arithmetic("float8", "float16", parameter_bytes=4, activation_bytes=2, operand_bytes=1, weight_bytes=4)


@pytest.fixture(autouse=True)
def gpu_with_tf32(monkeypatch):
    """A GPU is asked for by name alone here; whether the one at hand has TF32 must not matter."""
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)


def test_flops_bound_what_bytes_do_not():
    """All of it where memory is endless, none where it hardly moves, and a part in between."""
    def share(bandwidth):
        return roofline.flop_bound(SMALL, FP32, Peaks({"float32": 1e12}, bandwidth), backward=True)
    assert share(1e30) == 1.0 and share(1.0) == 0.0 and 0 < share(3e11) < 1


def test_a_gpu_without_tf32_multiplies_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: False)
    assert roofline.arithmetic(SMALL.replace(amp_dtype=None), 1, torch.float32, GPU).matmul == "float32"


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
    assert forward == roofline.flops(config, backward=False) + not_needed
    assert counter.get_total_flops() == roofline.flops(config, backward=True) + 3 * not_needed


def test_the_closed_form_for_the_usual_ffn():
    B, S, E = 8, 2048, 4096
    assert roofline.flops(PRESETS["te-tutorial"], backward=False) == 24 * B * S * E**2 + 2 * B * S**2 * E


@pytest.mark.parametrize("a", [FP32, FP8], ids=["FP32", "FP8"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("config", [SMALL, *PRESETS.values()], ids=str)
def test_the_operations_add_up_to_the_flops(config, backward, a):
    work = roofline.operations(config, a, backward)
    assert sum(o.flops for o in work) == roofline.flops(config, backward)
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
    work = {o.name: (o.flops, o.bytes) for o in roofline.operations(SMALL, FP32, backward=False)}
    assert work == {"layer norms": (0, 4096), "attention": (8192, 4096), "qkv": (24576, 7168),
                    "attention projection": (8192, 4096), "fc": (32768, 9216), "mlp projection": (32768, 10240)}
    limit = roofline.limit_ms(SMALL, FP32, Peaks({"float32": 3072}, 1024), backward=False)
    assert limit == pytest.approx(1e3 * (4 + 4 + 8 + 4 + 32 / 3 + 32 / 3))


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
    assert {o.name: o.bytes for o in roofline.operations(SMALL, FP8, backward=True)} == expected


@pytest.mark.parametrize("backward", [False, True])
def test_the_limit_at_its_ends_is_arithmetic_alone_or_memory_alone(backward):
    work = roofline.operations(SMALL, FP32, backward)
    no_memory = roofline.limit_ms(SMALL, FP32, Peaks({"float32": 1e9}, math.inf), backward)
    no_arithmetic = roofline.limit_ms(SMALL, FP32, Peaks({"float32": math.inf}, 1e9), backward)
    assert no_memory == pytest.approx(roofline.flops(SMALL, backward) / 1e6)
    assert no_arithmetic == pytest.approx(sum(o.bytes for o in work) / 1e6)
    both = roofline.limit_ms(SMALL, FP32, Peaks({"float32": 1e9}, 1e9), backward)
    assert max(no_memory, no_arithmetic) <= both <= no_memory + no_arithmetic


def test_attention_and_matmuls_have_their_own_peaks():
    """FP8 matmuls beside 16-bit attention: each at its own rate, and neither at the other's."""
    def limit(float8, float16):
        return roofline.limit_ms(SMALL, FP8, Peaks({"float8": float8, "float16": float16}, math.inf), backward=False)
    attention, matmuls = 8192, 98304
    assert limit(1e3, 2e3) == pytest.approx(1e3 * (matmuls / 1e3 + attention / 2e3))


@pytest.mark.parametrize("field", ["batch_size", "seq_len", "hidden_size", "ffn_hidden_size"])
@pytest.mark.parametrize("a", [FP32, FP8], ids=["FP32", "FP8"])
@pytest.mark.parametrize("backward", [False, True])
def test_more_work_has_a_higher_limit(field, a, backward):
    peaks = Peaks({"float32": 5e13, "float16": 8e14, "float8": 1.5e15}, 4e12)
    config = BlockConfig(batch_size=1, seq_len=128, hidden_size=256, num_heads=4, ffn_hidden_size=1024)
    limits = [roofline.limit_ms(config.replace(**{field: getattr(config, field) * n}), a, peaks, backward)
              for n in (1, 2, 4, 8)]
    assert limits == sorted(limits) and len(set(limits)) == 4


@pytest.mark.parametrize("a", [FP32, FP8], ids=["FP32", "FP8"])
def test_the_backward_costs_more_than_the_forward(a):
    peaks = Peaks({"float32": 5e13, "float16": 8e14, "float8": 1.5e15}, 4e12)
    forward, both = (roofline.limit_ms(PRESETS["gpt2"], a, peaks, backward) for backward in (False, True))
    assert 2 * forward < both < 4 * forward


@pytest.mark.parametrize("step, parameter_dtype, amp_dtype, device, expected", [
    (0, torch.float32, torch.float16, GPU, Arithmetic("float32", "float32", 4, 4, 4, 4)),
    (1, torch.float32, None, GPU, Arithmetic("tf32", "tf32", 4, 4, 4, 4)),
    (1, torch.float32, None, CPU, Arithmetic("float32", "float32", 4, 4, 4, 4)),        # a CPU has no TF32
    (1, torch.float32, torch.float16, GPU, Arithmetic("float16", "float16", 4, 2, 2, 4)),
    (2, torch.float32, torch.bfloat16, CPU, Arithmetic("bfloat16", "bfloat16", 4, 2, 2, 4)),
    (3, torch.float16, torch.float16, GPU, Arithmetic("float16", "float16", 2, 2, 2, 2)),
    (4, torch.float32, torch.float16, GPU, Arithmetic("float8", "float16", 4, 2, 1, 4)),
    (4, torch.bfloat16, torch.bfloat16, GPU, Arithmetic("float8", "bfloat16", 2, 2, 1, 2)),
    (4, torch.float32, None, GPU, Arithmetic("tf32", "tf32", 4, 4, 4, 4)),              # no autocast, no FP8
    (4, torch.float64, None, GPU, Arithmetic("float64", "float64", 8, 8, 8, 8)),
])
def test_what_a_step_computes_in(step, parameter_dtype, amp_dtype, device, expected):
    assert roofline.arithmetic(SMALL.replace(amp_dtype=amp_dtype), step, parameter_dtype, device) == expected


def test_weights_quantized_before_are_read_in_one_byte():
    for weights, expected in (("per-call", 4), ("cached", 1), ("kept", 1)):
        assert roofline.arithmetic(SMALL.replace(fp8_weights=weights), 4, torch.float32, GPU).weight_bytes == expected


def test_attention_in_fp8_is_limited_by_fp8():
    config = SMALL.replace(fp8_attention=True)
    assert roofline.arithmetic(config, 4, torch.float32, GPU).attention == "float8"
    assert roofline.arithmetic(config, 2, torch.float32, GPU).attention == "float16"


@pytest.mark.parametrize("step", range(steps.COUNT))
@pytest.mark.parametrize("preset", PRESETS)
def test_every_presets_arithmetic_is_known_to_the_gates(preset, step):
    """Whatever a run may multiply in has a gate for its error and a sum for its limit."""
    for amp_dtype in (None, torch.float16, torch.bfloat16):
        for parameter_dtype in {torch.float32, amp_dtype or torch.float32}:
            for device in (CPU, GPU):
                a = roofline.arithmetic(PRESETS[preset].replace(amp_dtype=amp_dtype), step, parameter_dtype, device)
                assert a.matmul in oracle.GATES and a.attention in oracle.GATES
                assert 1 <= a.operand_bytes <= a.activation_bytes <= a.parameter_bytes
                peaks = Peaks({a.matmul: 1e14, a.attention: 1e14}, 1e12)
                forward, both = (roofline.limit_ms(PRESETS[preset], a, peaks, backward) for backward in (False, True))
                assert 0 < forward < both < math.inf


def test_peaks_are_the_best_that_was_seen(monkeypatch):
    """The best sample of the best shape, a large square among them; a copy reads and writes."""
    asked = []

    class Clock:
        def sample(self, work, between, count):
            return [3.0, 1.0, 2.0]
    monkeypatch.setattr(roofline, "clock_for", lambda device: Clock())
    assert roofline._best_seconds(None, CPU) == 1e-3
    monkeypatch.setattr(roofline, "_matmul_rate", lambda m, k, n, name, device: asked.append((m, k, n)) or float(m * n))
    peaks = roofline.measure_peaks(SMALL, FP32, CPU)
    assert peaks == Peaks({"float32": 1024.0**2}, 2 * 4 * 2**26 / 1e-3)
    assert set(asked) == {(16, 16, 48), (16, 16, 64), (16, 64, 16), (1024, 1024, 1024)}


@pytest.mark.parametrize("dtype, precision", [("float32", "highest"), ("tf32", "high")])
def test_the_peak_of_float32_and_of_tf32_is_of_its_own_matmul(dtype, precision, monkeypatch):
    """Each would else be credited with the other's rate, several times as high or as low."""
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append((a.dtype, torch.get_float32_matmul_precision())))
    monkeypatch.setattr(roofline, "_best_seconds", lambda work, device: work() or 1.0)
    torch.set_float32_matmul_precision("medium")
    try:
        assert roofline._matmul_rate(4, 4, 4, dtype, CPU) == 2 * 4**3
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [(torch.float32, precision)]


def test_peaks_are_measured_for_what_the_step_computes_in():
    """One matmul rate for each dtype and the copy bandwidth; the caller's matmul precision is left as it was."""
    before = torch.get_float32_matmul_precision()
    peaks = roofline.measure_peaks(SMALL, Arithmetic("bfloat16", "float32", 4, 2, 2, 4), CPU)
    assert peaks.flops.keys() == {"bfloat16", "float32"} and all(0 < rate < 1e16 for rate in peaks.flops.values())
    assert 0 < peaks.bandwidth < 1e14 and torch.get_float32_matmul_precision() == before
