"""Every step computes the same function: held against plain mathematics in FP64, where no rounding can hide a mistake.

1e-9 is a million times FP64's rounding (1e-15 is what correct code shows) and below everything a wrong block does
(tests/common/block/test_wrong_blocks.py): an epsilon of 1e-6 for 1e-5, the mildest of these, is off by 1e-6.
"""
import pytest
import torch
from torch.nn.attention import SDPBackend

from common import BlockConfig, parameters, steps
from common.block import oracle
from tests.helpers.blocks import SHAPES, STEPS, case, differences, each_shape, errors, results
from tests.helpers.devices import on_each_device

TOLERANCE = 1e-9
each_step = pytest.mark.parametrize("step", STEPS)


@pytest.mark.unit
@on_each_device
@each_shape
@each_step
def test_step_is_the_function(step, config, device, uncompiled):
    """Output, branch, input gradient and every parameter gradient of the whole batch."""
    values, x, dy = case(config, device, torch.float64)
    block = steps.load(step).build(config, values, device)
    off = errors(block, values, x, dy)
    assert block(x).dtype == torch.float64
    assert max(off.values()) < TOLERANCE, off
    assert oracle.relative_error(without_gradients(block, x), block(x)) < TOLERANCE


def without_gradients(block, x):
    """What the forward alone is timed on: another path through step 4, another graph of step 3."""
    with torch.no_grad():
        return block(x)


@pytest.mark.unit
@each_step
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_step_is_the_function_for_other_parameters(step, seed, uncompiled):
    """No step has the luck of one draw."""
    config = SHAPES["everything odd"]
    values, x, dy = case(config, dtype=torch.float64, seed=seed)
    block = steps.load(step).build(config, values, "cpu")
    assert max(errors(block, values, x, dy).values()) < TOLERANCE


@pytest.mark.unit
@each_step
def test_check_of_a_run_agrees(step, uncompiled):
    """`oracle.errors`, which a run relies on, looks at one sequence of the batch, whichever: same verdict."""
    config = SHAPES["odd S, F below 4E"]
    values, x, _ = case(config, dtype=torch.float64)
    block = steps.load(step).build(config, values, "cpu")
    for sequence in (0, 1, -1):
        found = oracle.errors(block, x, values, sequence)
        assert list(found) == list(oracle.reference(x, values, config, x))
        assert max(found.values()) < TOLERANCE, (sequence, found)
    assert all(gradient is None for gradient in parameters.gradients(block).values()), "left behind for the timing"


def fused_attention_traces_in_fp64() -> bool:
    """torch 2.9 takes the log-sum-exp of the CPU's fused attention for FP32 always, and then compiles that."""
    q = torch.empty(1, 1, 2, 2, dtype=torch.float64, device="meta")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[1].dtype == torch.float64


@pytest.mark.integration
@on_each_device
def test_compiled_step_is_the_function(device, compiler, fresh_dynamo, monkeypatch):
    """What Inductor generates for step 3, forward and backward, on a shape where nothing divides anything."""
    config = SHAPES["everything odd"]
    values, x, dy = case(config, device, torch.float64)
    if device == "cpu" and not fused_attention_traces_in_fp64():
        monkeypatch.setattr(steps.load(3).module, "BACKENDS", [SDPBackend.MATH])
    block = steps.load(3).build(config, values, device)
    torch._dynamo.utils.counters.clear()
    off = errors(block, values, x, dy)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "the block ran without being compiled"
    assert max(off.values()) < TOLERANCE, off
    assert oracle.relative_error(without_gradients(block, x), block(x)) < TOLERANCE


TEN_SHAPES = [BlockConfig(1 + n % 3, 3 + 2 * n, 6 * (1 + n % 4), (1, 2, 3)[n % 3], amp_dtype=None) for n in range(10)]


@pytest.mark.stress
def test_ten_shapes_in_one_process_all_compiled(cheap_backend):
    """A sweep: each shape is compiled once for either pass, none falls back, all agree with step 2.

    What ten shapes put to the test is Dynamo's limit on recompilations, and that is the same whatever generates code.
    """
    for count, config in enumerate(TEN_SHAPES, start=1):
        values, x, dy = case(config, dtype=torch.float64)
        compiled, plain = (steps.load(step).build(config, values, "cpu") for step in (3, 2))
        off = differences(results(compiled, x, dy), results(plain, x, dy))
        assert max(off.values()) < TOLERANCE, (config, off)
        with torch.no_grad():
            assert oracle.relative_error(compiled(x), plain(x)) < TOLERANCE
        assert cheap_backend.frame_count == 2 * count, f"{config}: {cheap_backend.frame_count} graphs"


@pytest.mark.stress
def test_ten_shapes_need_the_raised_limit(cheap_backend):
    """The sweep above proves something: with torch's own limit of 8 it ends in an error."""
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for config in TEN_SHAPES:
            values, x, _ = case(config, dtype=torch.float64)
            block = steps.load(3).build(config, values, "cpu")
            with torch._dynamo.config.patch(recompile_limit=8), torch.no_grad():
                block(x)


@pytest.mark.unit
@pytest.mark.parametrize("with_gradients", [False, True])
def test_step_4s_branch_is_in_16_bits_with_gradients_and_without(with_gradients):
    """In FP32 a forward under no_grad would be another, slower block than the one with gradients."""
    config = BlockConfig(batch_size=2, seq_len=32, hidden_size=64, num_heads=4, amp_dtype=torch.bfloat16)
    block = steps.load(4).build(config, parameters.seeded(config, 0), torch.device("cpu"))
    seen = []
    block.attn.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    block.mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    with torch.set_grad_enabled(with_gradients):
        y = block(torch.randn(2, 32, 64))
    assert seen == [torch.bfloat16] * 2 and y.dtype == torch.float32


@pytest.mark.unit
@pytest.mark.parametrize("number", [2, 3])
def test_the_attention_backends_have_the_order_that_they_are_listed_in(number, monkeypatch):
    """Without `set_priority` torch takes its own order, and another kernel runs than the step claims."""
    asked = []
    step = steps.load(number)
    real = step.module.sdpa_kernel

    def sdpa_kernel(backends, set_priority=False):
        asked.append((list(backends), set_priority))
        return real(backends, set_priority=set_priority)
    monkeypatch.setattr(step.module, "sdpa_kernel", sdpa_kernel)
    config = BlockConfig(batch_size=2, seq_len=16, hidden_size=32, num_heads=2, amp_dtype=None)
    with torch.compiler.set_stance("force_eager"):
        step.build(config, parameters.seeded(config, 0), torch.device("cpu"))(torch.randn(2, 16, 32))
    assert asked == [(step.module.BACKENDS, True)]
