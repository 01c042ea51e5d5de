"""The block's work and its limit: FLOPs against PyTorch's own counter, bytes and maxima against numbers worked by hand.
"""
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common import PRESETS, BlockConfig, parameters, steps
from common.block.block_work import work_in
from common.block.traits import Arithmetic
from common.block.workload import KINDS, MATMUL, Operation, Workload
from common.runtime import limit
from common.runtime.iteration import BACKWARD, BOTH, FORWARD
from common.runtime.limit import Peaks

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SMALL = BlockConfig(batch_size=1, seq_len=16, hidden_size=16, num_heads=1)                     # F = 64
FP32 = Arithmetic("float32", "float32", parameter_bytes=4, activation_bytes=4, operand_bytes=4, weight_bytes=4)
FP16 = Arithmetic("float16", "float16", parameter_bytes=4, activation_bytes=2, operand_bytes=2, weight_bytes=4)
FP8 = Arithmetic("float8", "float16", parameter_bytes=4, activation_bytes=2, operand_bytes=1, weight_bytes=4)


def work(a: Arithmetic, config: BlockConfig = SMALL) -> Workload:
    return work_in(a, config)


def ms(workload: Workload, peaks: Peaks, mode: str) -> float:
    return sum(limit.ms_by_kind(workload.operations(mode), peaks).values())


# --------------------------------------------------------------------------------------------------------- the formula


def test_flops_bound_what_bytes_do_not():
    """All of it where memory is endless, none where it hardly moves, and a part in between."""
    def share(bandwidth):
        return limit.flop_bound(work(FP32).operations(BOTH), Peaks({"float32": 1e12}, bandwidth))
    assert share(1e30) == 1.0 and share(1.0) == 0.0 and 0 < share(3e11) < 1


def test_attention_is_bound_by_its_own_flops_not_those_of_the_matmuls():
    """In 16 bits beside FP8 matmuls, at peaks of 1 a second: of one the FLOPs set the limit, of the other the bytes."""
    attention, moved_by_attention = 8192, 2048
    matmuls = moved_by_matmuls = 0
    for operation in work(FP8).operations(FORWARD):
        if operation.kind == "matmul":
            matmuls += operation.flops
            moved_by_matmuls += operation.bytes
    slow_attention = Peaks({"float8": 1e30, "float16": 1.0}, 1.0)
    slow_matmuls = Peaks({"float8": 1.0, "float16": 1e30}, 1.0)
    share = limit.flop_bound(work(FP8).operations(FORWARD), slow_attention)
    assert share == pytest.approx(attention / (attention + moved_by_matmuls))
    share = limit.flop_bound(work(FP8).operations(FORWARD), slow_matmuls)
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
    assert forward == work(FP32, config).flops(FORWARD) + not_needed
    assert counter.get_total_flops() == work(FP32, config).flops(BOTH) + 3 * not_needed


def test_the_closed_form_for_the_usual_ffn():
    B, S, E = 8, 2048, 4096
    assert work(FP32, PRESETS["te-tutorial"]).flops(FORWARD) == 24 * B * S * E**2 + 2 * B * S**2 * E


@pytest.mark.parametrize("a", [FP32, FP8], ids=["FP32", "FP8"])
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD, BOTH])
@pytest.mark.parametrize("config", [SMALL, *PRESETS.values()], ids=str)
def test_the_operations_add_up_to_the_flops(config, mode, a):
    of_block = list(work(a, config).operations(mode))
    B, S, E, F = config.batch_size, config.seq_len, config.hidden_size, config.ffn_hidden_size
    forward = 8 * B * S * E**2 + 4 * B * S * E * F + 2 * B * S**2 * E
    assert work(a, config).flops(mode) == forward * {FORWARD: 1, BACKWARD: 2, BOTH: 3}[mode]
    assert all(o.flops > 0 or o.kind == "memory" for o in of_block) and all(o.bytes > 0 for o in of_block)
    assert len({o.name for o in of_block}) == len(of_block) and {o.kind for o in of_block} == set(KINDS)


def test_the_limit_is_a_sum_of_maxima():
    """Worked by hand for N = 16 tokens, E = 16, F = 64, 4 bytes each, at 3072 FLOP/s and 1024 bytes/s.

    layer norms            4096 bytes                      4 s
    attention              8192 FLOPs,  4096 bytes         4 s: bound by memory
    qkv                   24576 FLOPs,  7168 bytes         8 s: bound by arithmetic, like fc and mlp projection
    attention projection   8192 FLOPs,  4096 bytes         4 s: bound by memory
    fc                    32768 FLOPs,  9216 bytes    10 2/3 s
    mlp projection        32768 FLOPs, 10240 bytes    10 2/3 s
    """
    found = {o.name: (o.flops, o.bytes) for o in work(FP32).operations(FORWARD)}
    assert found == {"layer norms": (0, 4096), "attention": (8192, 4096), "qkv": (24576, 7168),
                     "attention projection": (8192, 4096), "fc": (32768, 9216), "mlp projection": (32768, 10240)}
    peaks = Peaks({"float32": 3072}, 1024)
    assert ms(work(FP32), peaks, FORWARD) == pytest.approx(1e3 * (4 + 4 + 8 + 4 + 32 / 3 + 32 / 3))
    assert ms(work(FP32).part(("qkv", "attention")), peaks, FORWARD) == pytest.approx(1e3 * (8 + 4 + 4))


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
    assert {o.name: o.bytes for o in work(FP8).operations(BOTH)} == expected


@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_the_limit_at_its_ends_is_arithmetic_alone_or_memory_alone(mode):
    no_memory = ms(work(FP32), Peaks({"float32": 1e9}, math.inf), mode)
    no_arithmetic = ms(work(FP32), Peaks({"float32": math.inf}, 1e9), mode)
    assert no_memory == pytest.approx(work(FP32).flops(mode) / 1e6)
    assert no_arithmetic == pytest.approx(sum(o.bytes for o in work(FP32).operations(mode)) / 1e6)
    both = ms(work(FP32), Peaks({"float32": 1e9}, 1e9), mode)
    assert max(no_memory, no_arithmetic) <= both <= no_memory + no_arithmetic


def test_attention_and_matmuls_have_their_own_peaks():
    """FP8 matmuls beside 16-bit attention: each at its own rate, and neither at the other's."""
    attention, matmuls = 8192, 98304
    peaks = Peaks({"float8": 1e3, "float16": 2e3}, math.inf)
    expected = 1e3 * (matmuls / 1e3 + attention / 2e3)
    assert ms(work(FP8), peaks, FORWARD) == pytest.approx(expected)


@pytest.mark.parametrize("field", ["batch_size", "seq_len", "hidden_size", "ffn_hidden_size"])
@pytest.mark.parametrize("a", [FP32, FP8], ids=["FP32", "FP8"])
@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_more_work_has_a_higher_limit(field, a, mode):
    peaks = Peaks({"float32": 5e13, "float16": 8e14, "float8": 1.5e15}, 4e12)
    config = BlockConfig(batch_size=1, seq_len=128, hidden_size=256, num_heads=4, ffn_hidden_size=1024)
    limits = []
    for times in (1, 2, 4, 8):
        larger = config.replace(**{field: getattr(config, field) * times})
        limits.append(ms(work(a, larger), peaks, mode))
    assert limits == sorted(limits) and len(set(limits)) == 4


@pytest.mark.parametrize("a", [FP32, FP8], ids=["FP32", "FP8"])
def test_the_backward_costs_more_than_the_forward(a):
    peaks = Peaks({"float32": 5e13, "float16": 8e14, "float8": 1.5e15}, 4e12)
    forward, both = (ms(work(a, PRESETS["gpt2"]), peaks, mode) for mode in (FORWARD, BOTH))
    assert 2 * forward < both < 4 * forward


def test_attention_has_its_own_rate_where_one_is_known():
    own = Peaks({"float16": 4.0, "float16 attention": 2.0, "float16 attention backward": 1.0}, math.inf)
    plain = Peaks({"float16": 4.0}, math.inf)
    slower, faster = (limit.ms_by_kind(work(FP16).operations(BOTH), peaks) for peaks in (own, plain))
    flops = 2 * 16**2 * 16
    assert slower["attention"] == pytest.approx(1e3 * (flops / 2 + 2 * flops)) and slower["memory"] == 0.0
    assert faster["attention"] == pytest.approx(1e3 * 3 * flops / 4) and slower["matmul"] == faster["matmul"]
    assert sum(slower.values()) == pytest.approx(ms(work(FP16), own, BOTH))


# ---------------------------------------------------------------------------------------------------- of any workload


def test_an_operation_names_the_rate_that_it_goes_by():
    rates = {operation.name: operation.rate for operation in work(FP8).operations(BOTH)}
    assert rates["layer norms"] == rates["layer norms backward"] == "copy" and rates["fc, weight gradient"] == "float8"
    assert rates["attention"] == "float16 attention" and rates["attention backward"] == "float16 attention backward"


def test_the_shape_of_a_matmul_is_that_of_its_flops():
    for operation in work(FP16, PRESETS["gpt2"]).operations(BOTH):
        if operation.kind == MATMUL:
            assert operation.flops == 2 * math.prod(operation.shape) and operation.layout in (
                "forward", "input gradient", "weight gradient")
    assert [operation.layout for operation in work(FP16).backward if operation.kind == MATMUL] == [
        "input gradient", "weight gradient"] * 4


@pytest.mark.parametrize("mode, flops", [(FORWARD, 4.0), (BACKWARD, 10.0), (BOTH, 14.0)])
def test_any_work_has_flops_and_a_limit(mode, flops):
    """Each operation in an arithmetic of its own; what has no FLOPs takes the time of its bytes."""
    mixed = Workload("float16", (Operation("a", "matmul", 4.0, 0.0, "float16"), Operation("b", "memory", 0, 3.0)),
                     (Operation("c", "matmul", 10.0, 1.0, "float32"),))
    peaks = Peaks({"float16": 2.0, "float32": 1.0}, 1.0)
    assert mixed.flops(mode) == flops
    assert ms(mixed, peaks, mode) == 1e3 * {FORWARD: 2 + 3, BACKWARD: 10, BOTH: 15}[mode]
    assert limit.flop_bound(mixed.operations(mode), peaks) == 1.0
    assert limit.flop_bound([mixed.forward[1]], peaks) == 0.0 and Workload("float32").flops(BOTH) == 0.0


def test_a_share_of_a_part_of_the_work():
    half = work(FP32).part(("layer norms",), 1 / 2)
    assert [(o.name, o.bytes) for o in half.operations(BOTH)] == [("layer norms", 2048), ("layer norms backward", 3072)]
    assert half.flops(BOTH) == 0.0 and half.tokens == 16 and half.matmul == "float32"
