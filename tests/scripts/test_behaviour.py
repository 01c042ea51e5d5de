"""What every step's block does besides computing: causality, dropout, adopting parameters, giving gradients back."""
import math
import subprocess
import sys

import pytest
import torch

from common import BlockConfig, parameters, steps
from common.block import oracle
from common.block.config import dtype_name
from tests.helpers.blocks import NAMES, STEPS, calibrate, case, results
from tests.helpers.devices import on_each_device

CONFIG = BlockConfig(batch_size=2, seq_len=16, hidden_size=32, num_heads=4, amp_dtype=None)
each_step = pytest.mark.parametrize("step", STEPS)
pytestmark = pytest.mark.usefixtures("uncompiled")


# ------------------------------------------------------- causality --------------------------------------------------


@pytest.mark.unit
@on_each_device
@pytest.mark.parametrize("amp_dtype", [None, torch.float16, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("token", [1, 7, 15])
@each_step
def test_no_token_sees_a_later_one(step, token, amp_dtype, device):
    """Change one token: what was before it stays to the bit, it and all after it change. no_grad freezes FP8 scales."""
    config = CONFIG.replace(amp_dtype=amp_dtype)
    values, x, dy = case(config, device)
    block = steps.load(step).build(config, values, device)
    if step == 4 and amp_dtype:
        calibrate(block, x, dy)
    changed = x.clone()
    changed[:, token] = dy[:, token]                # not + 1: LayerNorm would see no change
    with torch.no_grad():
        differs = (block(x) != block(changed)).any(-1)
    assert not differs[:, :token].any()
    assert differs[:, token:].all()


@pytest.mark.unit
@each_step
def test_no_gradient_reaches_a_later_token(step):
    """The backward is causal too: a loss on one token has a gradient of exactly 0 for every token after it."""
    values, x, dy = case(CONFIG)
    block = steps.load(step).build(CONFIG, values, "cpu")
    dy[:, :7] = dy[:, 8:] = 0
    reached = (results(block, x, dy)["input gradient"] != 0).any(-1)
    assert reached[:, :8].all() and not reached[:, 8:].any()


@pytest.mark.unit
@each_step
def test_no_sequence_sees_another(step):
    """Change one sequence of the batch: the other stays to the bit."""
    values, x, dy = case(CONFIG)
    block = steps.load(step).build(CONFIG, values, "cpu")
    changed = x.clone()
    changed[0] = dy[0]
    with torch.no_grad():
        differs = (block(x) != block(changed)).any(-1)
    assert differs[0].all() and not differs[1].any()


# ------------------------------------------------------- dropout ----------------------------------------------------

P = 0.3
DROPPING = CONFIG.replace(dropout=P)


def seeded_call(block, x, seed: int):
    torch.manual_seed(seed)
    return block(x)


@pytest.mark.unit
@on_each_device
@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16], ids=dtype_name)
@each_step
def test_dropout_follows_the_seed(step, amp_dtype, device):
    """The same seed drops the same weights, another seed others; step 4 with scales frozen, which would move too."""
    config = DROPPING.replace(amp_dtype=amp_dtype)
    values, x, _ = case(config, device)
    block = steps.load(step).build(config, values, device)
    with torch.no_grad():
        first, again, other = (seeded_call(block, x, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.unit
@each_step
def test_dropout_is_off_in_eval_mode_and_at_0(step):
    """Both are the block without dropout, to the bit, and draw no random numbers."""
    values, x, _ = case(CONFIG)
    build = steps.load(step).build
    plain, off, evaluating = (build(config, values, "cpu") for config in
                              (CONFIG, CONFIG.replace(dropout=0.0), DROPPING))
    evaluating.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        expected = plain(x)
        assert torch.equal(off(x), expected)
        assert torch.equal(evaluating(x), expected)
        assert torch.equal(torch.get_rng_state(), state)
        evaluating.train()
        assert not torch.equal(evaluating(x), expected)


def counting_block(step: int, config: BlockConfig, device="cpu"):
    """A block whose branch counts: token i of it is what its attention kept of i + 1 equal weights of 1 / (i + 1).

    No queries, so all scores are 0; V = 1 from its bias; the projection passes it on, and the MLP gives nothing.
    """
    values = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.seeded(config).items()}
    values["attn.qkv.bias"][2 * config.hidden_size:] = 1
    values["attn.proj.weight"] = torch.eye(config.hidden_size, dtype=torch.float64)
    return steps.load(step).build(config, values, device)


@pytest.mark.unit
@on_each_device
@each_step
def test_dropout_keeps_the_right_share_and_scales_it_up(step, device):
    """Each weight is kept with 1 - p, independently and per head, and divided by 1 - p."""
    config = BlockConfig(batch_size=4, seq_len=64, hidden_size=12, num_heads=4, dropout=P, amp_dtype=None)
    x = torch.zeros(4, 64, 12, dtype=torch.float64, device=device)
    with torch.no_grad():
        y = seeded_call(counting_block(step, config, device), x, 3)
    available = torch.arange(1, 65, dtype=torch.float64, device=device).view(1, -1, 1)
    kept = (y * available * (1 - P)).unflatten(-1, (4, 3))                 # [B, S, H, D]
    assert (kept - kept.round()).abs().max() < 1e-9, "not a count: the weights kept are not scaled by 1 / (1 - p)"
    assert torch.equal(kept.round(), kept[..., :1].round().expand_as(kept)), "one head's width shares one mask"
    kept = kept[..., 0].round()
    assert (kept >= 0).all() and (kept <= available).all()
    assert not any(torch.equal(kept[..., 0], kept[..., head]) for head in (1, 2, 3)), "heads share a mask"
    assert not any(torch.equal(kept[0], kept[sequence]) for sequence in (1, 2, 3)), "sequences share a mask"
    draws = 4 * 4 * 64 * 65 // 2
    deviation = math.sqrt(draws * P * (1 - P))
    assert abs(kept.sum().item() - draws * (1 - P)) < 5 * deviation        # wrong once in 2 million seeds


def directional_derivatives(block, x, dy, seeds):
    """(d<y, dy>/dx along a random direction from the gradient, the same from two forwards), with these two seeds."""
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(9))
    leaf = x.clone().requires_grad_()
    seeded_call(block, leaf, seeds[0]).backward(dy)
    step = 1e-5                # FP64: an error of 1e-10 from the third derivative, of 1e-11 from rounding
    with torch.no_grad():
        above, below = (seeded_call(block, x + sign * step * direction, seeds[1]) for sign in (1, -1))
    return (leaf.grad * direction).sum().item(), ((above - below) * dy).sum().item() / (2 * step)


def check_one_mask(step: int):
    values, x, dy = case(DROPPING, dtype=torch.float64)
    block = steps.load(step).build(DROPPING, values, "cpu")
    gradient, difference = directional_derivatives(block, x, dy, (5, 5))
    assert gradient == pytest.approx(difference, rel=1e-6)
    gradient, difference = directional_derivatives(block, x, dy, (5, 6))
    assert gradient != pytest.approx(difference, rel=1e-2), "another mask looks the same: this test sees nothing"


@pytest.mark.unit
@each_step
def test_forward_and_backward_drop_the_same_weights(step):
    """The gradient is that of the function with this seed's mask: in FP64 it agrees with finite differences."""
    check_one_mask(step)


@pytest.mark.integration
def test_compiled_forward_and_backward_drop_the_same_weights(cheap_backend):
    """As above with forward and backward traced and cut apart by the compiler, which may draw the mask twice."""
    check_one_mask(3)
    assert cheap_backend.frame_count > 0


# ------------------------------------------------------- parameters -------------------------------------------------


@pytest.mark.unit
@each_step
def test_block_has_exactly_the_canonical_parameters(step):
    """Each canonical name is one parameter of the block, and the block has no other; none is shared."""
    block = steps.load(step).build(CONFIG, case(CONFIG)[0], "cpu")
    named = parameters.named(block)
    assert tuple(named) == NAMES
    assert {id(value) for value in named.values()} == {id(value) for value in block.parameters()}
    assert len({id(value) for value in named.values()}) == len(NAMES)
    assert all(value.requires_grad and value.is_leaf for value in named.values())


@pytest.mark.unit
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_state_has_the_canonical_names(step):
    """Checkpoints of steps 0 to 3 are interchangeable, and compiling in place leaves no prefix."""
    block = steps.load(step).build(CONFIG, case(CONFIG)[0], "cpu")
    assert tuple(sorted(block.state_dict())) == tuple(sorted(NAMES))


@pytest.mark.unit
def test_state_of_step_4_has_transformer_engines_names():
    """The visible table: eight canonical names have others there, the other four are the same in both."""
    block = steps.load(4).build(CONFIG, case(CONFIG)[0], "cpu")
    assert len(block.parameter_names) == 8 and block.parameter_names.keys() < set(NAMES)
    assert {block.parameter_names.get(name, name) for name in NAMES} == {
        "attn.qkv.layer_norm_weight", "attn.qkv.layer_norm_bias", "attn.qkv.weight", "attn.qkv.bias",
        "attn.proj.weight", "attn.proj.bias", "mlp.layer_norm_weight", "mlp.layer_norm_bias",
        "mlp.fc1_weight", "mlp.fc1_bias", "mlp.fc2_weight", "mlp.fc2_bias"} == set(dict(block.named_parameters()))


@pytest.mark.unit
@each_step
def test_gradients_come_by_canonical_name(step):
    """None before a backward and after clearing; then each in its parameter's shape, and the parameter's own."""
    block = steps.load(step).build(CONFIG, case(CONFIG)[0], "cpu")
    assert parameters.gradients(block) == dict.fromkeys(NAMES)
    _, x, dy = case(CONFIG)
    block(x).backward(dy)
    gradients = parameters.gradients(block)
    assert {name: tuple(value.shape) for name, value in gradients.items()} == parameters.shapes(CONFIG)
    assert all(gradients[name] is value.grad for name, value in parameters.named(block).items())
    block.zero_grad(set_to_none=True)
    assert parameters.gradients(block) == dict.fromkeys(NAMES)


@pytest.mark.unit
@on_each_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)
@each_step
def test_parameters_are_adopted_as_they_are(step, dtype, device):
    """In value, dtype and device, in every step: nothing is rounded on the way in."""
    values = {name: value.to(dtype) for name, value in parameters.seeded(CONFIG).items()}
    block = steps.load(step).build(CONFIG, values, device)
    for name, parameter in parameters.named(block).items():
        assert parameter.dtype == dtype and parameter.device.type == device, name
        assert torch.equal(parameter.detach().cpu(), values[name]), name


@pytest.mark.unit
@each_step
def test_parameters_are_copied(step):
    """Training a block changes no tensor of the caller's, nor the caller a block; gradients stay with the block."""
    values = {name: value.requires_grad_() for name, value in parameters.seeded(CONFIG).items()}
    kept = {name: value.detach().clone() for name, value in values.items()}
    first, second = (steps.load(step).build(CONFIG, values, "cpu") for _ in range(2))
    _, x, dy = case(CONFIG)
    first(x).backward(dy)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1.0)
        for name, value in values.items():
            assert value.grad is None and torch.equal(value, kept[name]), name
            value.zero_()
    assert all(torch.equal(value, kept[name]) for name, value in parameters.named(second).items())


@pytest.mark.unit
@each_step
def test_gradients_accumulate(step):
    """As in any module: a second backward adds, so microbatches work."""
    values, x, dy = case(CONFIG, dtype=torch.float64)
    block = steps.load(step).build(CONFIG, values, "cpu")
    for _ in range(2):
        block(x).backward(dy)
    truth = oracle.reference(x, values, CONFIG, 2 * dy)
    for name, gradient in parameters.gradients(block).items():
        assert oracle.relative_error(gradient, truth[name]) < 1e-9


# ------------------------------------------------------- attention's backends ---------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize("step", [2, 3])
def test_building_lets_torch_choose_its_order_of_backends_first(step, monkeypatch):
    """Before `sdpa_kernel` is entered for the first time."""
    module, settled = steps.load(step).module, []
    monkeypatch.setattr(module, "settle_backend_order", settled.append)
    module.build(CONFIG, parameters.seeded(CONFIG), "cpu")
    assert settled == ["cpu"]


_PLAIN_ATTENTION = """
import sys, torch
sys.path.insert(0, {root!r})
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from common import BlockConfig, parameters, steps
if {step}:
    config = BlockConfig(batch_size=2, seq_len=128, hidden_size=256, num_heads=4)
    block = steps.load({step}).build(config, parameters.seeded(config), "cuda")
    block(torch.randn(2, 128, 256, device="cuda"))
q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16)
F.scaled_dot_product_attention(q, q, q, is_causal=True)
with profile(activities=[ProfilerActivity.CUDA]) as seen:
    F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.cuda.synchronize()
print("ran", sorted(event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA))
"""


@pytest.mark.gpu
@pytest.mark.integration
def test_other_attention_of_the_process_runs_as_without_steps():
    """Peers and users' own modules: `sdpa_kernel` must not leave them another order of backends than torch's own."""
    def kernels(step):
        done = subprocess.run([sys.executable, "-c", _PLAIN_ATTENTION.format(root=str(steps.ROOT), step=step)],
                              capture_output=True, text=True, check=True)
        return next(line for line in done.stdout.splitlines() if line.startswith("ran"))
    alone = kernels(0)
    assert "[]" not in alone and {kernels(2), kernels(3)} == {alone}
