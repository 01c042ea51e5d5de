"""What a block does besides computing: causality, dropout, adopting parameters, giving gradients back."""
import contextlib
import math
import subprocess
import sys
import types

import pytest
import torch
from conftest import NAMES, STEPS, case, on_each_device, results

from common import BlockConfig, attention, graph, harness, oracle, parameters, report, steps
from common.config import dtype_name
from common.harness import calibrate

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
def test_seeded_parameters_have_canonical_names_and_shapes():
    config = BlockConfig(1, 4, 8, 2, ffn_hidden_size=20)
    assert {name: tuple(value.shape) for name, value in parameters.seeded(config).items()} == {
        "ln_1.weight": (8,), "ln_1.bias": (8,), "attn.qkv.weight": (24, 8), "attn.qkv.bias": (24,),
        "attn.proj.weight": (8, 8), "attn.proj.bias": (8,), "ln_2.weight": (8,), "ln_2.bias": (8,),
        "mlp.fc.weight": (20, 8), "mlp.fc.bias": (20,), "mlp.proj.weight": (8, 20), "mlp.proj.bias": (8,)}


@pytest.mark.unit
def test_seeded_parameters_depend_on_the_seed_alone():
    """Not on the global generator, and drawing them leaves it where it was: x is the same with and without."""
    torch.manual_seed(1)
    first = parameters.seeded(CONFIG, 5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = parameters.seeded(CONFIG, 5), parameters.seeded(CONFIG, 6)
    assert torch.equal(torch.get_rng_state(), state)
    for name in NAMES:
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


@pytest.mark.unit
def test_seeded_parameters_are_the_same_on_every_machine():
    """torch's CPU generator is stable across versions and machines; records of two machines rely on it."""
    values = parameters.seeded(BlockConfig(1, 1, 4, 1))
    assert values["ln_1.weight"].tolist() == pytest.approx([1.308199, 0.941314, 0.564242, 1.113686], abs=1e-5)
    assert values["mlp.proj.weight"].flatten()[:3].tolist() == pytest.approx([0.292772, 0.024374, 0.240844], abs=1e-5)


@pytest.mark.unit
def test_every_seeded_parameter_is_random():
    """No zero, no one, no constant, and spread as documented: matrices 1 / sqrt(fan-in), the others 0.2."""
    config = BlockConfig(1, 1, 256, 4)
    for name, value in parameters.seeded(config).items():
        assert value.dtype == torch.float32 and value.device.type == "cpu"
        assert not (value == 0).any() and not (value == 1).any(), name
        assert value.unique().numel() > 0.98 * value.numel(), name        # FP32 draws collide now and then
        spread = value.shape[1] ** -0.5 if value.ndim == 2 else 0.2
        centre = float(name in ("ln_1.weight", "ln_2.weight"))
        assert value.std().item() == pytest.approx(spread, rel=0.2), name          # 256 draws: 4.4 %, so 4.5 sigma
        assert value.mean().item() == pytest.approx(centre, abs=5 * spread / math.sqrt(value.numel())), name


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


BROKEN = {
    "missing": (lambda v: v.pop("mlp.fc.bias"), "mlp.fc.bias"),
    "unknown": (lambda v: v.update({"mlp.gate.weight": torch.zeros(1)}), "mlp.gate.weight"),
    "another shape": (lambda v: v.update({"ln_1.weight": torch.zeros(31)}), r"ln_1\.weight is \(31,\), not \(32,\)"),
    "transposed": (lambda v: v.update({"mlp.fc.weight": v["mlp.fc.weight"].T}), r"mlp\.fc\.weight is \(32, 128\)"),
    "a scalar that would broadcast": (lambda v: v.update({"ln_1.bias": torch.zeros(())}), r"ln_1\.bias is \(\)"),
    "mixed dtypes": (lambda v: v.update({"ln_2.weight": v["ln_2.weight"].double()}), "float32.*float64"),
}


@pytest.mark.unit
@pytest.mark.parametrize("break_, message", BROKEN.values(), ids=BROKEN.keys())
@each_step
def test_parameters_that_do_not_fit_are_refused(step, break_, message):
    """With a ValueError that names what is wrong, in every step."""
    values = parameters.seeded(CONFIG)
    break_(values)
    with pytest.raises(ValueError, match=message):
        steps.load(step).build(CONFIG, values, "cpu")


@pytest.mark.unit
@each_step
def test_contract_of_the_design_page(step):
    """The six lines that users copy, in every step."""
    config = BlockConfig(batch_size=2, seq_len=16, hidden_size=32, num_heads=4, amp_dtype=None)
    p = parameters.seeded(config, seed=0)
    block = steps.load(step).build(config, p, device="cpu")
    x = torch.randn(2, 16, 32)
    y = block(x)
    y.backward(torch.randn(2, 16, 32))
    assert y.shape == x.shape and y.dtype == torch.float32
    assert all(math.isfinite(gradient.norm()) for gradient in parameters.gradients(block).values())
    assert block.config is config
    assert step != 4 or block.engine.startswith("emulated (")


@pytest.mark.unit
@each_step
def test_gradients_accumulate(step):
    """As in any module: a second backward adds, so microbatches work."""
    values, x, dy = case(CONFIG, dtype=torch.float64)
    block = steps.load(step).build(CONFIG, values, "cpu")
    once = {name: value.clone() for name, value in parameters.gradients(block).items() if value is not None}
    assert not once
    for _ in range(2):
        block(x).backward(dy)
    truth = oracle.reference(x, values, CONFIG, 2 * dy)
    for name, gradient in parameters.gradients(block).items():
        assert oracle.relative_error(gradient, truth[f"gradient of {name}"]) < 1e-9


@pytest.mark.unit
def test_an_iteration_is_what_the_row_is_called():
    """The forward builds no graph; the backward reaches x and every parameter, and starts from no gradients."""
    block, x, dy = torch.nn.Linear(3, 3), torch.randn(2, 3), torch.ones(2, 3)
    forward, between = harness.iterations(block, x, dy, backward=False)
    between()
    assert not forward().requires_grad and not x.requires_grad
    both, between = harness.iterations(block, x, dy, backward=True)
    for _ in range(2):
        between()
        assert x.grad is None and block.weight.grad is None
        y = both()
        assert not y.requires_grad and torch.equal(x.grad, dy @ block.weight)
        assert torch.equal(block.bias.grad, dy.sum(0))


@pytest.mark.unit
@pytest.mark.parametrize("training", [True, False])
def test_the_check_leaves_the_block_in_the_mode_it_was_in(training, uncompiled):
    """A block left in eval mode would be timed without its dropout."""
    config = CONFIG.replace(dropout=0.5)
    values, x, _ = case(config)
    block = steps.load(2).build(config, values, "cpu").train(training)
    result = report.Report("2_sdpa", config, "float32", {"device": "cpu"}, matmul="float32")
    harness.check(block, x, values, result)
    assert block.training == training


@pytest.mark.unit
def test_every_error_has_its_gate_in_the_check(monkeypatch):
    """Each alone beyond its gate fails the run and is named; of the parameters the one farthest beyond its own."""
    config = CONFIG.replace(amp_dtype=None)
    fine = {"output": 1.0, "branch": 1e-6, "input gradient": 1e-6, "gradient of attn.proj.bias": 1e-6,
            "gradient of mlp.fc.bias": 1e-6}
    for off in ("branch", "input gradient", "gradient of mlp.fc.bias"):
        result = report.Report("0_baseline", config, "float32", {"device": "cpu"}, matmul="float32")
        for both in (fine | {off: 1e-4}, fine), (fine, fine | {off: 1e-4}):       # one sequence, then all the same
            monkeypatch.setattr(oracle, "checks", lambda *_, both=both: both)
            with pytest.raises(harness.Failed, match=off.removeprefix("gradient of ")):
                block = torch.nn.Linear(1, 1)
                block.config = config
                harness.check(block, torch.zeros(1, 4, 6), {}, result)


@pytest.mark.unit
def test_each_run_of_the_check_has_the_gate_of_its_tokens(monkeypatch):
    """A CPU's LayerNorm adds up 16-bit gradients of all tokens: what many may be off by, those of one may not."""
    config = CONFIG.replace(amp_dtype=None)
    block, x = torch.nn.Linear(1, 1), torch.zeros(4, 256, 6, dtype=torch.float16)
    block.config = config
    one, all_of_them = (oracle.gate("float16", "gradient of ln_1.bias", x, tokens) for tokens in (256, 1024))
    assert all_of_them == 2 * one
    errors = dict.fromkeys(("output", "branch", "input gradient", "gradient of ln_1.bias"), 1e-6)

    def check(first, second):
        monkeypatch.setattr(oracle, "checks", lambda *_: (errors | {"gradient of ln_1.bias": first},
                                                          errors | {"gradient of ln_1.bias": second}))
        result = report.Report("2_sdpa", config, "float16", {"device": "cpu"}, matmul="float16")
        harness.check(block, x, {}, result)
        return result.errors["parameter gradient"]
    assert check(0.9 * one, 1.5 * one) == (0.9 * one, one)              # the nearer one to its gate
    assert check(0.1 * one, 1.5 * one) == (1.5 * one, all_of_them)
    with pytest.raises(harness.Failed, match=r"ln_1\.bias"):
        check(1.5 * one, 0.1 * one)


@pytest.mark.unit
def test_the_gates_of_the_branch_are_the_contract_and_gradients_have_three_times_theirs():
    branch = {"float64": 1e-9, "float32": 3e-6, "tf32": 1e-3, "float16": 1e-3, "bfloat16": 8e-3, "float8": 6e-2}
    for kind, gate in branch.items():
        assert oracle.GATES[kind] == (gate, pytest.approx(3 * gate))
    assert oracle.GATES.keys() - branch == {"float8, emulated"}


class Scaled(torch.nn.Module):
    """As a block of delayed scaling: two scales in use, which the third backward settles, and one that is not."""
    fresh, config = None, CONFIG

    def __init__(self, never=()):
        super().__init__()
        self.weight, self.calls, self.never = torch.nn.Parameter(torch.ones(())), 0, never
        self.state = types.SimpleNamespace(scale=torch.ones(3), amax_history=torch.tensor([[1.0, 1.0, 0.0]]))
        self.fp8_meta = {"scaling_fwd": self.state}

    def forward(self, x):
        y = x * self.weight
        y.register_hook(self.backward_ran)
        return y

    def backward_ran(self, gradient):
        self.calls += 1
        for place in {0, 1} - set(self.never):
            self.state.scale[place] = 7.0 if self.calls == 3 else 1.0


@pytest.mark.unit
def test_scales_are_calibrated_by_three_backwards_and_each_in_use_must_be():
    x = torch.ones(2)
    block = Scaled()
    calibrate(block, x, x)
    assert block.calls == 3 and block.weight.grad is None
    with pytest.raises(harness.Failed, match="an FP8 scale is still 1"):
        calibrate(Scaled(never=(1,)), x, x)


class Replayed:
    """Step 2 on a CPU, what would be captured of it, and what stands in for the replay of its graph."""

    def __init__(self, dtype=torch.float64):
        config = CONFIG.replace(amp_dtype=None)
        self.values, self.x, self.dy = case(config, dtype=dtype)
        self.x = self.x.detach().clone().requires_grad_()
        self.block = steps.load(2).build(config, self.values, "cpu")
        self.static = {}

    def iteration(self, block=None):
        y = (block or self.block)(self.x)
        y.backward(self.dy)
        return y

    def between(self):
        self.block.zero_grad(set_to_none=True)
        self.x.grad = None

    def verify(self, replay, matmul="float64"):
        result = report.Report("2_sdpa", self.block.config, "float64", {"device": "cpu"}, matmul=matmul)
        graph.verify(self.block, replay, self.iteration, self.between, self.static, self.x, result)


@pytest.mark.unit
def test_a_replay_that_is_the_iteration_is_accepted_and_leaves_everything_as_it_was():
    r = Replayed()
    before = [r.x.detach().clone()] + [p.detach().clone() for p in r.block.parameters()]
    r.verify(lambda: r.static.update(y=r.iteration()))
    after = [r.x.detach(), *(p.detach() for p in r.block.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _frozen_weights(r):
    copy = steps.load(2).build(r.block.config, r.values, "cpu")

    def replay():
        r.static["y"] = r.iteration(copy)
        for mine, its in zip(r.block.parameters(), copy.parameters(), strict=True):
            mine.grad, its.grad = its.grad, None
    return replay


def _frozen_input(r):
    x = r.x.detach().clone()

    def replay():
        now = r.x.detach().clone()
        r.x.detach().copy_(x)
        r.static["y"] = r.iteration().detach()
        r.x.detach().copy_(now)
    return replay


def _no_gradients(r):
    return lambda: r.static.update(y=r.block(r.x))


@pytest.mark.unit
@pytest.mark.parametrize("wrong, said", [(_frozen_weights, "its replay on another input"),
                                         (_frozen_input, "its replay on another input"),
                                         (_no_gradients, "the gradient of .* that it replays differs")])
def test_a_replay_that_misses_work_is_refused(wrong, said):
    r = Replayed()
    before = [p.detach().clone() for p in r.block.parameters()]
    with pytest.raises(RuntimeError, match=said):
        r.verify(wrong(r))
    assert all(torch.equal(a, b) for a, b in zip(before, r.block.parameters(), strict=True))


@pytest.mark.unit
@pytest.mark.parametrize("stale", [True, False])
def test_of_a_forward_its_output_is_what_there_is_to_compare(stale):
    r = Replayed()
    r.iteration = lambda: r.block(r.x).detach()
    y = r.iteration()
    replay = (lambda: r.static.update(y=y)) if stale else (lambda: r.static.update(y=r.iteration()))
    with pytest.raises(RuntimeError, match="its replay on another input") if stale else contextlib.nullcontext():
        r.verify(replay)


@pytest.mark.unit
@pytest.mark.parametrize("error, said", [(None, ""), (RuntimeError("no\nmore"), "graph: no"),
                                         (torch.OutOfMemoryError("much"), "graph: out of memory, the eager run's")])
def test_what_can_not_be_captured_is_a_reason(error, said, monkeypatch):
    r, row = Replayed(), report.Row()

    def capture(iteration, between):
        if error:
            raise error
        return iteration
    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(graph.machine, "memory_peak", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    result = report.Report("2_sdpa", r.block.config, "float64", {"device": "cpu"}, matmul="float64")
    replay = graph.verified(r.block, r.x, r.iteration, r.between, row, result)
    assert (replay is None) == bool(error) and row.peak_bytes == (None if error else 7)
    assert row.reason.startswith(said) and "\n" not in row.reason if error else not row.reason


@pytest.mark.unit
@pytest.mark.parametrize("eager, replayed, accepted", [
    ((0, 1), (0, 1), True), ((0, 1), (0,), False), ((0, 1), (), False), ((0,), (0,), True), ((), (), True),
], ids=["all in use", "one of two", "none: the graph updates other tensors", "cached weights stay", "no scale moves"])
def test_a_replay_must_move_every_fp8_scale_that_an_eager_run_moves(eager, replayed, accepted):
    r = Replayed()
    state = types.SimpleNamespace(scale=torch.tensor([5.0, 5.0, 1.0]), amax_history=torch.tensor([[1.0, 1.0, 0.0]]))
    r.block.mlp.fp8_meta = {"scaling_fwd": state}
    inner = r.iteration

    def iteration(places=eager):
        y = inner()
        for place in places:
            state.scale[place], state.amax_history[0, place] = 5.0, 1.0
        return y
    r.iteration = iteration

    def replay():
        r.static["y"] = iteration(replayed)
    if accepted:
        r.verify(replay, "float8")
    else:
        with pytest.raises(RuntimeError, match="FP8 scales do not move"):
            r.verify(replay, "float8")
    assert state.scale.tolist() == [5.0, 5.0, 1.0] and state.amax_history.tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.unit
@pytest.mark.parametrize("changes", [{}, {"fp8_weights": "cached"}, {"fp8_weights": "kept"}])
def test_a_replay_of_kept_weights_need_not_follow_them_and_fp8_without_delayed_scaling_has_no_scales(changes):
    r = Replayed()
    r.block.config = r.block.config.replace(**changes)
    if changes:
        r.verify(_frozen_weights(r), "float8")
    else:
        r.verify(lambda: r.static.update(y=r.iteration()), "float8")        # torchao's


@pytest.mark.unit
def test_an_interrupted_check_of_a_replay_leaves_the_weights_as_they_were(monkeypatch):
    r = Replayed()
    before = [p.detach().clone() for p in r.block.parameters()]

    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(torch.Tensor, "normal_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        r.verify(None)
    assert all(torch.equal(a, b) for a, b in zip(before, r.block.parameters(), strict=True))


@pytest.mark.unit
@pytest.mark.parametrize("step", [2, 3])
def test_building_lets_torch_choose_its_order_of_backends_first(step, monkeypatch):
    """Before `sdpa_kernel` is entered for the first time; on a GPU alone, where there is a choice."""
    seen = []
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", lambda q, k, v, **_: seen.append(q.device.type))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, inner=torch.zeros, **_: inner(*sizes, device="meta"))
    attention.settle_backend_order("cpu")
    assert seen == []
    attention.settle_backend_order("cuda")
    assert seen == ["meta"]
    module, settled = steps.load(step), []
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
def test_other_attention_of_the_process_runs_what_it_would_without_our_steps():
    """Peers and users' own modules: `sdpa_kernel` must not leave them another order of backends than torch's own."""
    def kernels(step):
        done = subprocess.run([sys.executable, "-c", _PLAIN_ATTENTION.format(root=str(steps.ROOT), step=step)],
                              capture_output=True, text=True, check=True)
        return next(line for line in done.stdout.splitlines() if line.startswith("ran"))
    alone = kernels(0)
    assert "[]" not in alone and {kernels(2), kernels(3)} == {alone}


@pytest.mark.unit
def test_compiling_is_timed_from_nothing_twice_and_of_both_passes(monkeypatch):
    seen = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: seen.append("reset"))
    module, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    module.register_forward_hook(lambda *_: seen.append("both" if torch.is_grad_enabled() else "forward"))
    took = harness.compilation_time(module, x, x)
    assert seen == ["reset", "forward", "both"] * 2 and took.cold_s > 0 and took.warm_s > 0
