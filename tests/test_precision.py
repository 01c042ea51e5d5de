"""How far each step is from FP64 in the precision it runs in, and that it does run in that precision.

Meaning is settled elsewhere (tests/test_meaning.py); here the question is what the rounding costs. Gates are those of
`oracle.GATES`, which a run applies too, and for the steps in 16 bits 1.25 times the plain block's own error.
"""
import functools
import math

import pytest
import torch
from conftest import STEPS, case, collect, decibels, differences, on_each_device, results, worst

from common import BlockConfig, graph, harness, oracle, parameters, precision, steps
from common.config import dtype_name
from common.harness import calibrate
from common.roofline import arithmetic

HALF = (torch.float16, torch.bfloat16)
each_half = pytest.mark.parametrize("dtype", HALF, ids=dtype_name)

# Large enough that errors average out (a gate is a statement about typical rounding), small enough to take no time;
# every dimension is one that FP8 GEMMs take.
CONFIG = BlockConfig(batch_size=4, seq_len=64, hidden_size=64, num_heads=4)
SEEDS = range(8)


@functools.cache
def truth(seed: int, dtype=torch.float32):
    """(values, x, dy, what FP64 makes of them) of CONFIG."""
    values, x, dy = case(CONFIG, dtype=dtype, seed=seed)
    return values, x, dy, oracle.reference(x, values, CONFIG, dy)


def errors_of(block, device: str, seed: int, dtype=torch.float32) -> dict[str, float]:
    """Errors of `block`, given the parameters of `seed`, against FP64."""
    values, x, dy, true = truth(seed, dtype)
    parameters.load(block, values, device)
    return differences(results(block, x.to(device), dy.to(device)), true)


def rms_errors(step: int, amp_dtype: torch.dtype, device: str) -> dict[str, float]:
    """Root mean square over SEEDS: one draw of a bias's 64 gradients is too few to compare two roundings by."""
    block = steps.load(step).build(CONFIG.replace(amp_dtype=amp_dtype), truth(0)[0], device)
    found = [errors_of(block, device, seed) for seed in SEEDS]
    return {name: math.sqrt(sum(error[name] ** 2 for error in found) / len(found)) for name in found[0]}


plain_rms_errors = functools.cache(functools.partial(rms_errors, 1))


@pytest.mark.unit
@on_each_device
@each_half
@pytest.mark.parametrize("step", [2, 3])
def test_16_bit_error_is_that_of_the_plain_block(step, dtype, device, uncompiled):
    """Fused attention costs no accuracy: RMSE at most 1.25 times step 1's, on every tensor (0.89 to 1.04 when seen)."""
    plain, found = plain_rms_errors(dtype, device), rms_errors(step, dtype, device)
    ratios = {name: found[name] / plain[name] for name in plain}
    assert max(ratios.values()) < 1.25, ratios


@pytest.mark.integration
@on_each_device
def test_compiled_error_is_that_of_the_plain_block(device, compiler, fresh_dynamo):
    """Nor does what Inductor fuses, in bfloat16, where it keeps FP32 between what it fuses."""
    plain, found = plain_rms_errors(torch.bfloat16, device), rms_errors(3, torch.bfloat16, device)
    ratios = {name: found[name] / plain[name] for name in plain}
    assert max(ratios.values()) < 1.25, ratios


@pytest.mark.unit
@on_each_device
@pytest.mark.parametrize("amp_dtype", [None, *HALF], ids=dtype_name)
@pytest.mark.parametrize("step", STEPS)
def test_step_is_within_the_gates(step, amp_dtype, device, uncompiled):
    """With FP32 parameters: the gate of what the step multiplies in, on every tensor; all results come in FP32."""
    config = CONFIG.replace(amp_dtype=amp_dtype)
    values, x, dy, true = truth(0)
    block, x, dy = steps.load(step).build(config, values, device), x.to(device), dy.to(device)
    if step == 4 and amp_dtype:
        calibrate(block, x, dy)
    found = results(block, x, dy)
    assert {tensor.dtype for name, tensor in found.items() if name != "branch"} == {torch.float32}
    forward, gradient = worst(differences(found, true))
    forward_gate, gradient_gate = oracle.GATES[arithmetic(config, step, torch.float32, torch.device(device)).matmul]
    assert forward < forward_gate and gradient < gradient_gate


@pytest.mark.unit
@on_each_device
@each_half
@pytest.mark.parametrize("step", STEPS)
def test_16_bit_parameters_are_within_the_gates(step, dtype, device, uncompiled):
    """`--param-dtype amp`: x, y, parameters and gradients in 16 bits, judged against FP64 on the rounded parameters."""
    config = CONFIG.replace(amp_dtype=dtype)
    values, x, dy, true = truth(0, dtype)
    block, x, dy = steps.load(step).build(config, values, device), x.to(device), dy.to(device)
    if step == 4:
        calibrate(block, x, dy)
    found = results(block, x, dy)
    assert {tensor.dtype for name, tensor in found.items() if name != "branch"} == {dtype}
    kind = arithmetic(config, step, dtype, torch.device(device)).matmul
    for what, error in differences(found, true).items():
        assert error < oracle.gate(kind, what, x, CONFIG.tokens), what


@pytest.mark.unit
@each_half
@pytest.mark.parametrize("what", ["input gradient", "gradient of mlp.fc.weight", "gradient of ln_2.bias"])
def test_no_gate_lets_a_missing_gradient_pass(what, dtype):
    """A gradient of zeros is off by 1, at any length."""
    x = torch.zeros(1, 1, 1, dtype=dtype)
    for kind in ("float8, emulated", dtype_name(dtype)):
        assert oracle.gate(kind, what, x, tokens=16384) < 0.5


@pytest.mark.unit
@on_each_device
@each_half
@pytest.mark.parametrize("seed", range(4))
def test_fp8_signal_to_noise(dtype, device, seed):
    """Step 4 once calibrated: 20 dB on the branch, where no residual flatters it, and 15 dB on each gradient."""
    values, x, dy, _ = truth(seed)
    block = steps.load(4).build(CONFIG.replace(amp_dtype=dtype), values, device)
    calibrate(block, x.to(device), dy.to(device))
    noise = errors_of(block, device, seed)
    assert decibels(noise.pop("branch")) >= 20
    assert min(map(decibels, noise.values())) >= 15, noise


@pytest.mark.unit
@pytest.mark.parametrize("fp8_weights", ["cached", "kept"])
def test_fp8_signal_to_noise_with_reused_weights(fp8_weights):
    """Weights quantized once are as good as weights quantized at every call, as long as they don't change."""
    values, x, dy, true = truth(0)
    block = steps.load(4).build(CONFIG.replace(fp8_weights=fp8_weights), values, "cpu")
    calibrate(block, x, dy)
    noise = differences(results(block, x, dy), true)
    assert decibels(noise.pop("branch")) >= 20
    assert min(map(decibels, noise.values())) >= 15, noise


# ------------------------------------------------------- the TF32 switch -------------------------------------------

OWN = {0: "highest", 1: "high", 2: "high", 3: "high", 4: "high"}
SMALL = BlockConfig(batch_size=2, seq_len=8, hidden_size=16, num_heads=2, amp_dtype=None)


@pytest.fixture(params=["highest", "high", "medium"])
def callers(request, monkeypatch):
    """What the caller has set, and wants back."""
    monkeypatch.setattr(precision, "_outside", None, raising=False)   # a failure here is not to fail the next test
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def watched(step: int, device="cpu", config=SMALL):
    """(block, precisions seen in its forward, and in its backward), from within both branches of the block."""
    forward, backward = [], []
    block = steps.load(step).build(config, case(config)[0], device)

    def watch(module, args, y):
        forward.append(torch.get_float32_matmul_precision())
        if y.requires_grad:
            y.register_hook(lambda gradient: backward.append(torch.get_float32_matmul_precision()))

    for module in block.children():
        if not isinstance(module, torch.nn.LayerNorm):
            module.register_forward_hook(watch)
    first = next(iter(parameters.named(block).values()))        # its gradient is computed after all else
    first.register_hook(lambda gradient: backward.append(torch.get_float32_matmul_precision()))
    return block, forward, backward


def leaf(config=SMALL, device="cpu"):
    _, x, dy = case(config, device)
    return x.requires_grad_(), dy


@pytest.mark.unit
@pytest.mark.parametrize("step", STEPS)
def test_forward_and_backward_run_in_the_steps_own_precision(step, callers, uncompiled):
    """And the caller's setting is back after the call, after the backward, and after a call without gradients."""
    block, forward, backward = watched(step)
    x, dy = leaf()
    y = block(x)
    assert torch.get_float32_matmul_precision() == callers
    y.backward(dy)
    assert torch.get_float32_matmul_precision() == callers
    assert forward == [OWN[step]] * 2 and backward == [OWN[step]] * 3
    with torch.no_grad():
        block(x)
    assert torch.get_float32_matmul_precision() == callers
    assert forward == [OWN[step]] * 4


@pytest.mark.unit
@on_each_device
@pytest.mark.parametrize("between", [1, 2, 3, 4])
def test_backward_of_step_0_is_fp32_between_tf32_steps(between, device, uncompiled):
    """Its forward, then another step's forward and backward, then its backward: FP32's errors, on every gradient."""
    config = CONFIG.replace(amp_dtype=None)
    values, x, dy, true = truth(0)
    block, _, backward = watched(0, device, config)
    other, _, others_backward = watched(between, device, config)
    x, dy = x.to(device, copy=True).requires_grad_(), dy.to(device)
    y = block(x)
    other(x.detach()).backward(dy)
    y.backward(dy)
    assert backward == ["highest"] * 3 and others_backward == ["high"] * 3
    forward, gradient = worst(differences(collect(block, x, y), true))
    assert forward < 3e-6 and gradient < 9e-6


@pytest.mark.unit
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0), (0, 0)], ids=str)
def test_chained_blocks_each_see_their_own_precision(order, callers):
    """One graph through blocks of several precisions: each backward in its own, and the caller's afterwards."""
    chain = [watched(step) for step in order]
    h, dy = leaf()
    for block, _, _ in chain:
        h = block(h)
        assert torch.get_float32_matmul_precision() == callers
    h.backward(dy)
    assert [(forward, backward) for _, forward, backward in chain] == [([OWN[n]] * 2, [OWN[n]] * 3) for n in order]
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
def test_blocks_side_by_side_each_see_their_own_precision(callers):
    """Two branches of one graph, from one input to one loss."""
    pair = [watched(step) for step in (0, 1)]
    x, dy = leaf()
    sum(block(x) for block, _, _ in pair).backward(dy)
    assert [backward for _, _, backward in pair] == [["highest"] * 3, ["high"] * 3]
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
@pytest.mark.parametrize("step", [0, 1])
def test_gradients_of_parameters_alone_run_in_the_steps_own_precision(step, callers):
    """An input that needs no gradient, and torch.autograd.grad in place of backward()."""
    block, _, backward = watched(step)
    _, dy = leaf()
    torch.autograd.grad(block(leaf()[0].detach()), list(block.parameters()), dy)
    assert backward == [OWN[step]] * 3
    assert torch.get_float32_matmul_precision() == callers


class Interrupted(Exception):
    pass


def interrupt(*_):
    raise Interrupted


@pytest.mark.unit
@pytest.mark.parametrize("step", [0, 1])
def test_precision_is_restored_when_the_forward_raises(step, callers):
    block, _, _ = watched(step)
    block.mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        block(leaf()[0])
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
@pytest.mark.parametrize("step", [0, 1])
def test_precision_is_restored_when_the_backward_raises(step, callers):
    """A KeyboardInterrupt or running out of memory in the backward leaves the process as it was, too."""
    block, _, _ = watched(step)
    block.attn.register_forward_hook(lambda module, args, y: y.register_hook(interrupt) and None)
    x, dy = leaf()
    with pytest.raises(Interrupted):
        block(x).backward(dy)
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
@pytest.mark.parametrize("step", [0, 1])
def test_next_backward_after_one_that_raised(step, callers):
    """What an interrupted backward left behind reaches neither the next one nor what the caller has set since."""
    broken, _, _ = watched(step)
    broken.attn.register_forward_hook(lambda module, args, y: y.register_hook(interrupt) and None)
    x, dy = leaf()
    torch.set_float32_matmul_precision("medium" if callers == "high" else "high")
    with pytest.raises(Interrupted):
        broken(x).backward(dy)
    torch.set_float32_matmul_precision(callers)
    block, _, backward = watched(step)
    block(x).backward(dy)
    assert backward == [OWN[step]] * 3
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
def test_decorated_call_keeps_its_name_and_docstring():
    @precision.float32_matmul_precision("high")
    def call(block, x):
        """What it does."""
    assert (call.__name__, call.__doc__) == ("call", "What it does.")


class HalfGradient(torch.autograd.Function):
    """x @ w.T in BF16, as a library's own matmul under autocast: its gradients are in BF16."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.bfloat16() @ w.bfloat16().T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w.bfloat16(), dy.T @ x.bfloat16()


@pytest.mark.unit
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
def test_gradients_cast_by_compiled_code_are_the_same(uncompiled):
    """The first, the sum with a second, and those of the next iteration; biases are left to autograd."""
    x, layers = torch.randn(5, 8), [torch.nn.Linear(8, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    precision.compile_gradient_casts(layers[1])
    assert layers[1].weight.grad_dtype is None and layers[1].bias.grad_dtype == torch.float32
    for scale in (1.0, 0.3, None, 0.7):
        for layer in layers:
            if scale is None:
                layer.weight.grad = None
            else:
                (scale * HalfGradient.apply(x, layer.weight)).sum().backward()
        if scale is not None:
            assert layers[1].weight.grad.dtype == torch.float32
            assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)


@pytest.mark.integration
@pytest.mark.transformer_engine
def test_step_4s_gradients_are_the_same_with_and_without_compiled_casts(monkeypatch):
    """Eager, a sum of two, and replayed from a graph."""
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.float16)
    values, x, dy = case(config, "cuda")
    found = []
    for casts in (True, False):
        module = steps.load(4)
        with monkeypatch.context() as patched:
            if not casts:
                patched.setattr(module, "compile_gradient_casts", lambda block: None)
            block = module.build(config, values, "cuda")
        assert (block.attn.qkv.weight.grad_dtype is None) == casts
        calibrate(block, x, dy)
        iteration, clear = harness.iterations(block, x, dy, True)
        taken = []
        for clean in (True, False):
            if clean:
                clear()
            iteration()
            taken.append([gradient.clone() for gradient in parameters.gradients(block).values()])
        replay = graph.capture(iteration, clear)
        replay()
        found.append([*taken, [gradient.clone() for gradient in parameters.gradients(block).values()]])
    for with_, without in zip(*found, strict=True):
        for a, b in zip(with_, without, strict=True):
            assert a.dtype == b.dtype == torch.float32
            assert oracle.relative_error(a, b.double()) < 2e-2         # cuDNN's attention adds up in any order
