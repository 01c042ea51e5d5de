"""Every step computes the same function: held against plain mathematics in FP64, where no rounding can hide a mistake.

1e-9 is a million times FP64's rounding (1e-15 is what correct code shows) and below everything a wrong block does
(tests/test_wrong_blocks.py): an epsilon of 1e-6 for 1e-5, the mildest of these, is off by 1e-6.
"""
import pytest
import torch
from conftest import NAMES, STEPS, case, differences, errors, on_each_device, results
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from common import BlockConfig, oracle, parameters, steps

TOLERANCE = 1e-9

SHAPES = {
    "usual": BlockConfig(2, 16, 32, 4, amp_dtype=None),
    "odd S, F below 4E": BlockConfig(3, 7, 24, 4, ffn_hidden_size=40, amp_dtype=None),
    "one token": BlockConfig(2, 1, 16, 2, amp_dtype=None),
    "one sequence, one head": BlockConfig(1, 5, 8, 1, amp_dtype=None),
    "D = 3": BlockConfig(2, 9, 24, 8, amp_dtype=None),
    "D = 1": BlockConfig(1, 6, 4, 4, amp_dtype=None),
    "one above a power of two, F above 4E": BlockConfig(2, 33, 24, 2, ffn_hidden_size=104, amp_dtype=None),
    "everything odd": BlockConfig(3, 17, 15, 3, ffn_hidden_size=31, amp_dtype=None),
}
each_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())


def torch_functional_block(x, p, config):
    """The block once more, from torch.nn.functional: shares no line with the oracle or with a step."""
    def norm(t, name):
        return F.layer_norm(t, (config.hidden_size,), p[f"{name}.weight"], p[f"{name}.bias"], eps=1e-5)

    def linear(t, name):
        return F.linear(t, p[f"{name}.weight"], p[f"{name}.bias"])

    q, k, v = (t.unflatten(-1, (config.num_heads, -1)).transpose(1, 2)
               for t in linear(norm(x, "ln_1"), "attn.qkv").tensor_split(3, dim=-1))
    attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + linear(attention, "attn.proj")
    return x + linear(F.gelu(linear(norm(x, "ln_2"), "mlp.fc"), approximate="tanh"), "mlp.proj")


@pytest.mark.unit
@each_shape
def test_oracle_is_the_block_of_torch_functional(config):
    """The judge is judged first: output and every gradient, to FP64's rounding."""
    values, x, dy = case(config, dtype=torch.float64)
    p = {name: value.clone().requires_grad_() for name, value in values.items()}
    leaf = x.clone().requires_grad_()
    y = torch_functional_block(leaf, p, config)
    y.backward(dy)
    found = {"output": y.detach(), "branch": y.detach() - x, "input gradient": leaf.grad}
    found |= {f"gradient of {name}": value.grad for name, value in p.items()}
    off = differences(found, oracle.reference(x, values, config, dy))
    assert max(off.values()) < 1e-13, off


@pytest.mark.unit
def test_oracle_reports_everything_in_fp64_and_leaves_its_arguments_alone():
    """Also for arguments in 16 bits that require gradients themselves."""
    config = SHAPES["usual"]
    values, x, dy = case(config, dtype=torch.bfloat16)
    values = {name: value.requires_grad_() for name, value in values.items()}
    x.requires_grad_()
    truth = oracle.reference(x, values, config, dy)
    assert list(truth) == ["output", "branch", "input gradient", *(f"gradient of {name}" for name in NAMES)]
    assert {tensor.dtype for tensor in truth.values()} == {torch.float64}
    assert not any(tensor.requires_grad for tensor in truth.values())
    assert x.grad is None and all(value.grad is None for value in values.values())


@pytest.mark.unit
@on_each_device
@each_shape
@pytest.mark.parametrize("step", STEPS)
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
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_step_is_the_function_for_other_parameters(step, seed, uncompiled):
    """No step has the luck of one draw."""
    values, x, dy = case(SHAPES["everything odd"], dtype=torch.float64, seed=seed)
    block = steps.load(step).build(SHAPES["everything odd"], values, "cpu")
    assert max(errors(block, values, x, dy).values()) < TOLERANCE


@pytest.mark.unit
@pytest.mark.parametrize("step", STEPS)
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
        monkeypatch.setattr(steps.load(3), "BACKENDS", [SDPBackend.MATH])
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
