"""How far each step is from FP64 in the precision it runs in, and that it does run in that precision.

Meaning is settled elsewhere (tests/scripts/test_meaning.py); here the question is what the rounding costs. Gates are
those of `oracle.GATES`, which a run applies too, and for the steps in 16 bits 1.25 times the plain block's own error.
"""
import functools
import math

import pytest
import torch

from common import BlockConfig, parameters, steps
from common.block import oracle
from common.block.config import dtype_name
from tests.helpers.blocks import STEPS, calibrate, case, collect, decibels, differences, results, worst
from tests.helpers.devices import on_each_device
from tests.helpers.precisions import Interrupted, interrupt, interrupt_backward, watched

HALF = (torch.float16, torch.bfloat16)
each_half = pytest.mark.parametrize("dtype", HALF, ids=dtype_name)
each_step = pytest.mark.parametrize("step", STEPS)

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
    draws = [errors_of(block, device, seed) for seed in SEEDS]
    mean = {}
    for name in draws[0]:
        squares = [errors[name] ** 2 for errors in draws]
        mean[name] = math.sqrt(sum(squares) / len(squares))
    return mean


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
@each_step
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
    kind = steps.load(step).traits.arithmetic(config, torch.float32, torch.device(device)).matmul
    forward_gate, gradient_gate = oracle.GATES[kind]
    assert forward < forward_gate and gradient < gradient_gate


@pytest.mark.unit
@on_each_device
@each_half
@each_step
def test_16_bit_parameters_are_within_the_gates(step, dtype, device, uncompiled):
    """`--param-dtype amp`: x, y, parameters and gradients in 16 bits, judged against FP64 on the rounded parameters."""
    config = CONFIG.replace(amp_dtype=dtype)
    values, x, dy, true = truth(0, dtype)
    block, x, dy = steps.load(step).build(config, values, device), x.to(device), dy.to(device)
    if step == 4:
        calibrate(block, x, dy)
    found = results(block, x, dy)
    assert {tensor.dtype for name, tensor in found.items() if name != "branch"} == {dtype}
    kind = steps.load(step).traits.arithmetic(config, dtype, torch.device(device)).matmul
    for what, error in differences(found, true).items():
        assert error < oracle.gate(kind, what, x, CONFIG.tokens), what


# ------------------------------------------------------- autocast ---------------------------------------------------


@pytest.mark.unit
@on_each_device
@pytest.mark.parametrize("amp_dtype, parameter_dtype, mixed", [
    (torch.float16, torch.float32, True), (torch.bfloat16, torch.float32, True), (None, torch.float32, False),
    (torch.float16, torch.float16, False), (torch.bfloat16, torch.bfloat16, False),
    (torch.float16, torch.float64, False),
], ids=str)
@each_step
def test_autocast_is_for_fp32_parameters_alone(step, amp_dtype, parameter_dtype, mixed, device, uncompiled):
    """Over 16 bits it would compute LayerNorm in FP32 and cast its result back, which no all-16-bit block does."""
    values, x, _ = case(CONFIG.replace(batch_size=1), device, parameter_dtype)
    block = steps.load(step).build(CONFIG.replace(amp_dtype=amp_dtype), values, device)
    seen = []

    def see(module, args):
        on = torch.is_autocast_enabled(device)
        seen.append(torch.get_autocast_dtype(device) if on else None)

    block.attn.register_forward_pre_hook(see)
    block(x)
    expected = amp_dtype if mixed and steps.load(step).traits.autocast else None
    assert seen == [expected]
    assert not torch.is_autocast_enabled(device)


# ------------------------------------------------------- FP8 --------------------------------------------------------


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


class FakeGpu:
    """What step 4 takes for a GPU, where all tensors stay on the CPU."""
    type = "cuda"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class TorchWithAGpu:
    """The module torch, in which every device is a FakeGpu."""
    device = staticmethod(lambda _: FakeGpu())

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.mark.unit
def test_what_step_4_compiles_is_for_static_shapes(monkeypatch, fresh_dynamo):
    """Left to itself torch compiles a second shape for all shapes, and a sweep would time other code than a run."""
    step, asked = steps.load(4), {}

    def record(function, **options):
        asked[function] = options
        return functools.partial(function)

    monkeypatch.setattr(step.module, "torch", TorchWithAGpu())
    monkeypatch.setattr(torch, "compile", record)
    block = step.build(CONFIG, truth(0)[0], "cpu")
    helpers = (step.module.fork, step.module.add, torch.Tensor.float)
    assert tuple(asked) == helpers and all(options == {"dynamic": False} for options in asked.values())
    assert (block.fork.func, block.add.func, block.to_float32.func) == helpers       # it calls the compiled ones
    assert torch._dynamo.config.recompile_limit == 1024


@pytest.mark.unit
def test_on_a_cpu_step_4_compiles_nothing(monkeypatch):
    """It runs on the emulation there, and needs no compiler."""
    monkeypatch.setattr(torch, "compile", None)
    block = steps.load(4).build(CONFIG, truth(0)[0], "cpu")
    assert (block.fork, block.add) == (steps.load(4).module.fork, steps.load(4).module.add)
    assert not hasattr(block, "to_float32")


# ------------------------------------------------------- the TF32 switch -------------------------------------------

OWN = {0: "highest", 1: "high", 2: "high", 3: "high", 4: "high"}
SMALL = BlockConfig(batch_size=2, seq_len=8, hidden_size=16, num_heads=2, amp_dtype=None)


def built_and_watched(step: int, device="cpu", config=SMALL):
    """(the step's block, precisions seen in its forward, and in its backward)."""
    block = steps.load(step).build(config, case(config)[0], device)
    return block, *watched(block, parameters.named(block)["ln_1.weight"])


def leaf(config=SMALL, device="cpu"):
    """(an input that asks for a gradient, a cotangent)."""
    _, x, dy = case(config, device)
    return x.requires_grad_(), dy


@pytest.mark.unit
@each_step
def test_forward_and_backward_run_in_the_steps_own_precision(step, callers, uncompiled):
    """And the caller's setting is back after the call, after the backward, and after a call without gradients."""
    block, forward, backward = built_and_watched(step)
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
    block, _, backward = built_and_watched(0, device, config)
    other, _, others_backward = built_and_watched(between, device, config)
    x, dy = x.to(device, copy=True).requires_grad_(), dy.to(device)
    y = block(x)
    other(x.detach()).backward(dy)
    y.backward(dy)
    assert backward == ["highest"] * 3 and others_backward == ["high"] * 3
    forward, gradient = worst(differences(collect(block, x, y), true))
    assert forward < 3e-6 and gradient < 9e-6


@pytest.mark.unit
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_chained_steps_each_see_their_own_precision(order, callers):
    """One graph through both: each backward in its own, and the caller's afterwards."""
    chain = [built_and_watched(step) for step in order]
    h, dy = leaf()
    for block, _, _ in chain:
        h = block(h)
    h.backward(dy)
    seen = [(forward, backward) for _, forward, backward in chain]
    assert seen == [([OWN[step]] * 2, [OWN[step]] * 3) for step in order]
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
@each_step
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_is_interrupted_leaves_the_callers_setting(step, where, callers, uncompiled):
    block, _, _ = built_and_watched(step)
    if where == "forward":
        block.mlp.register_forward_pre_hook(interrupt)
    else:
        interrupt_backward(block.attn)
    x, dy = leaf()
    with pytest.raises(Interrupted):
        block(x).backward(dy)
    assert torch.get_float32_matmul_precision() == callers
