"""The canonical parameters: their names and shapes, their seeded values, what a block adopts and gives back."""
import math

import pytest
import torch
from torch import nn

from common import BlockConfig, parameters, steps
from tests.helpers.blocks import NAMES, STEPS

pytestmark = pytest.mark.unit
CONFIG = BlockConfig(batch_size=2, seq_len=16, hidden_size=32, num_heads=4, amp_dtype=None)


def test_seeded_parameters_have_canonical_names_and_shapes():
    config = BlockConfig(1, 4, 8, 2, ffn_hidden_size=20)
    assert {name: tuple(value.shape) for name, value in parameters.seeded(config).items()} == {
        "ln_1.weight": (8,), "ln_1.bias": (8,), "attn.qkv.weight": (24, 8), "attn.qkv.bias": (24,),
        "attn.proj.weight": (8, 8), "attn.proj.bias": (8,), "ln_2.weight": (8,), "ln_2.bias": (8,),
        "mlp.fc.weight": (20, 8), "mlp.fc.bias": (20,), "mlp.proj.weight": (8, 20), "mlp.proj.bias": (8,)}


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


def test_seeded_parameters_are_the_same_on_every_machine():
    """torch's CPU generator is stable across versions and machines; records of two machines rely on it."""
    values = parameters.seeded(BlockConfig(1, 1, 4, 1))
    assert values["ln_1.weight"].tolist() == pytest.approx([1.308199, 0.941314, 0.564242, 1.113686], abs=1e-5)
    assert values["mlp.proj.weight"].flatten()[:3].tolist() == pytest.approx([0.292772, 0.024374, 0.240844], abs=1e-5)


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


BROKEN = {
    "missing": (lambda v: v.pop("mlp.fc.bias"), "mlp.fc.bias"),
    "unknown": (lambda v: v.update({"mlp.gate.weight": torch.zeros(1)}), "mlp.gate.weight"),
    "another shape": (lambda v: v.update({"ln_1.weight": torch.zeros(31)}), r"ln_1\.weight is \(31,\), not \(32,\)"),
    "transposed": (lambda v: v.update({"mlp.fc.weight": v["mlp.fc.weight"].T}), r"mlp\.fc\.weight is \(32, 128\)"),
    "a scalar that would broadcast": (lambda v: v.update({"ln_1.bias": torch.zeros(())}), r"ln_1\.bias is \(\)"),
    "mixed dtypes": (lambda v: v.update({"ln_2.weight": v["ln_2.weight"].double()}), "float32.*float64"),
}


@pytest.mark.parametrize("break_, message", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("step", STEPS)
def test_parameters_that_do_not_fit_are_refused(step, break_, message):
    """With a ValueError that names what is wrong, in every step."""
    values = parameters.seeded(CONFIG)
    break_(values)
    with pytest.raises(ValueError, match=message):
        steps.load(step).build(CONFIG, values, "cpu")


class Conv1D(nn.Module):
    """A linear layer as GPT-2 holds it, its matrix [in, out]."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.matrix = nn.Parameter(linear.weight.detach().T.contiguous())

    def forward(self, x):
        return x @ self.matrix


def test_a_block_may_have_other_names_and_hold_matrices_turned():
    """Values are turned on their way in and gradients on their way out: to the caller both look as in any block."""
    block = steps.load(0).build(CONFIG, parameters.seeded(CONFIG), "cpu")
    block.mlp.fc = Conv1D(block.mlp.fc)
    bias = nn.Parameter(torch.zeros(CONFIG.ffn_hidden_size))
    block.register_parameter("fc_bias", bias)
    block.parameter_names = {"mlp.fc.weight": "mlp.fc.matrix", "mlp.fc.bias": "fc_bias"}
    block.transposed = ("mlp.fc.weight",)
    values = parameters.seeded(CONFIG, seed=1)
    parameters.load(block, values, "cpu")
    assert torch.equal(block.mlp.fc.matrix, values["mlp.fc.weight"].T) and torch.equal(bias, values["mlp.fc.bias"])
    block.mlp.fc(torch.eye(CONFIG.hidden_size)).sum().backward()
    gradients = parameters.gradients(block)
    assert gradients["mlp.fc.weight"].shape == values["mlp.fc.weight"].shape
    assert torch.equal(gradients["mlp.fc.weight"], torch.ones_like(values["mlp.fc.weight"]))
    assert gradients["mlp.fc.bias"] is None


def test_weights_that_are_kept_in_fp8_start_from_a_scale_that_fits():
    """The largest value becomes E4M3's largest, 448: from the uncalibrated 1 small weights would round to nothing."""
    class Quantizer:
        scale = torch.ones(1)

    block = steps.load(0).build(CONFIG, parameters.seeded(CONFIG), "cpu")
    block.mlp.fc.weight._quantizer = Quantizer
    values = parameters.seeded(CONFIG, seed=1)
    parameters.load(block, values, "cpu")
    assert Quantizer.scale.item() == pytest.approx(448 / values["mlp.fc.weight"].abs().max().item())
