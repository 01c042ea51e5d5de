"""Emulated recipes: scales, what shares them, the history, and that an error is as large as was derived; mutants."""
from dataclasses import replace
from unittest import mock

import pytest
import torch

from benchmarks.recipes import checking, emulated, quantizing, recipe
from benchmarks.recipes.emulated import Linear, State, products
from benchmarks.recipes.formats import E2M1, E4M3, INT8
from benchmarks.recipes.quantizing import Quantized, Quantizer, Scales, bits_a_value
from benchmarks.recipes.recipe import EVERY, RECIPES

pytestmark = pytest.mark.unit

TOKENS, K, N = 128, 256, 256
RANGE = checking.RANGE
by_name = pytest.mark.parametrize("recipe", EVERY, ids=lambda recipe: recipe.name)


def operands(outliers: float = 1.0, k: int = K):
    """x [tokens, K], weight [N, K], dy [tokens, N]; a few columns of x are so much larger, and their weights smaller.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(shape, generator=generator) for shape in ((TOKENS, k), (N, k), (TOKENS, N)))
    x[:, :4] *= outliers
    weight[:, :4] /= outliers
    return x, weight, dy


def error(product) -> float:
    """The L2 norm of the error over that of the product, against FP64."""
    exact = product.left.double() @ product.right.double().T
    return float((product.value().double() - exact).norm() / exact.norm())


# ------------------------------------------------------------------------------------------------------ what is derived


@by_name
@pytest.mark.parametrize("outliers", [1.0, 1e2, 1e4, 1e5])
def test_an_error_is_as_large_as_was_derived(recipe, outliers):
    for what, product in products(recipe, *operands(outliers)).items():
        expected = product.expected()
        if recipe.name == "FP16" and outliers == 1e5 and what != "dx":
            assert not product.value().isfinite().all()
            continue
        assert RANGE[0] < error(product) / expected < RANGE[1], (what, error(product), expected)


def test_outliers_cost_a_scale_of_the_whole_tensor_most():
    of = {name: error(products(RECIPES[name], *operands(1e5, 4 * K))["y"])
          for name in ("FP8 current", "FP8 row", "FP8 block 128", "MXFP8")}
    assert sorted(of, key=of.__getitem__, reverse=True) == list(of), of
    alike = [error(products(RECIPES[name], *operands())["y"]) for name in of]
    assert max(alike) < 1.02 * min(alike)


def _rounded_toward_zero(self, x):
    spacing = self.spacing(x)
    return torch.trunc(x / spacing) * spacing


def _inverted(self, amax):
    return 1.0 / amax


def _of_half(self, amax):
    return 0.5 * amax / self.format.largest


def _along_the_other_axis(self, x):
    return PARTED(replace(self, block=(self.block[1], self.block[0])), x)


def _of_all(self, x):
    return PARTED(replace(self, block=(0, 0)), x)


PARTED, QUANTIZED, TWO_OF_FOUR = Quantizer.parted, State.quantized, quantizing.two_of_four
MUTANTS = {
    "rounded toward zero": ("FP8 current", 1.0, mock.patch.object(type(E4M3), "round", _rounded_toward_zero)),
    "integers rounded toward zero": ("INT8 weights", 1.0, mock.patch.object(type(INT8), "round", _rounded_toward_zero)),
    "a scale is inverted": ("FP8 current", 1e4, mock.patch.object(Quantizer, "scale_of", _inverted)),
    "a scale is half as large": ("FP8 row", 1.0, mock.patch.object(Quantizer, "scale_of", _of_half)),
    "another tensor's magnitude": ("FP8 current", 1.0, mock.patch.object(
        State, "quantized", lambda self, operand, quantizer, matrix: quantizer(matrix, torch.tensor(0.5)))),
    "rows for columns": ("FP8 row", 1e5, mock.patch.object(Quantizer, "parted", _along_the_other_axis)),
    "blocks along the other axis": ("MXFP4", 1e4, mock.patch.object(Quantizer, "parted", _along_the_other_axis)),
    "one scale for all blocks": ("MXFP8", 1e5, mock.patch.object(Quantizer, "parted", _of_all)),
    "one scale for all rows": ("FP8 row", 1e5, mock.patch.object(Quantizer, "parted", _of_all)),
    "a scale is not multiplied back": ("FP8 block 128", 1.0, mock.patch.object(
        Quantized, "dequantized", lambda self: self.values)),
    "a power of two is rounded down": ("MXFP4", 1.0, mock.patch.object(
        quantizing, "power_of_two", lambda x: torch.exp2(torch.log2(x).floor()))),
    "an operand stays as it was": ("FP8 current", 1.0, mock.patch.object(
        emulated.Product, "value", lambda self: self.left @ self.right_rounded.dequantized().T)),
    "another two of four": ("BF16, weights 2:4", 1.0, mock.patch.object(
        quantizing, "two_of_four", lambda x: ~TWO_OF_FOUR(x))),
    "E5M2 in the forward": ("FP8 current", 1.0, mock.patch.object(
        State, "quantized", lambda self, operand, quantizer, matrix: QUANTIZED(
            self, operand, self.recipe.dy if operand == "x" else quantizer, matrix))),
    "dweight of another x": ("FP8 current", 1.0, mock.patch.object(
        State, "quantized", lambda self, operand, quantizer, matrix: QUANTIZED(
            self, operand, quantizer, matrix.roll(1, 0) if operand == "x again" else matrix))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_caught(mutant):
    """Against the error that the right recipe would have."""
    name, outliers, patched = MUTANTS[mutant]
    given = operands(outliers)
    expected = {what: product.expected() for what, product in products(RECIPES[name], *given).items()}
    with patched:
        found = {what: error(product) for what, product in products(RECIPES[name], *given).items()}
    assert any(not RANGE[0] < found[what] / expected[what] < RANGE[1] for what in found), found


# ---------------------------------------------------------------------------------------------------------- the scales


def test_a_scale_is_of_its_part_alone():
    x = torch.tensor([[1.0, 2.0, 300.0, 4.0], [0.0, 0.0, 5.0, 8.0]])
    assert Quantizer(INT8)(x).scale.unique().tolist() == [torch.tensor(300 / 127).item()]
    assert Quantizer(INT8, (1, 0))(x).scale[:, 0].tolist() == pytest.approx([300 / 127, 8 / 127])
    of_blocks = Quantizer(INT8, (1, 2))(x).scale[:, ::2].flatten()
    assert of_blocks.tolist() == pytest.approx([2 / 127, 300 / 127, 1, 8 / 127])
    assert Quantizer(INT8, (2, 2))(x).scale[0, ::2].tolist() == pytest.approx([2 / 127, 300 / 127])


def test_scales_of_nvfp4_are_e4m3_numbers_times_one_for_all():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    given = Quantizer(E2M1, (1, 16), Scales.E4M3)(x)
    whole = x.abs().max() / 6 / 448
    in_e4m3 = given.scale / whole
    assert torch.allclose(E4M3.round(in_e4m3), in_e4m3, rtol=1e-6) and in_e4m3.max().item() == pytest.approx(448)


def test_a_part_of_zeros_does_not_coarsen_the_scales_of_nvfp4():
    x = 1e-5 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([x, torch.zeros(4, 64)])
    quantizer = RECIPES["NVFP4"].x
    assert torch.equal(quantizer(padded).dequantized()[:4], quantizer(x).dequantized())


@pytest.mark.parametrize("recipe, bits", [("BF16", 16), ("FP8 row", 8 + 32 / 4096), ("MXFP8", 8.25), ("NVFP4", 4.5),
                                          ("FP8 block 128", 8 + 8 / 128**2), ("INT4 weights", 4.25),
                                          ("BF16, weights 2:4", 9)])
def test_what_a_value_takes(recipe, bits):
    assert bits_a_value(RECIPES[recipe].weight, 4096, 4096) == bits


@pytest.mark.parametrize("x, said", [
    (torch.full((2, 4), torch.inf), "a scale is inf: the tensor is not finite"),
    (torch.tensor([[torch.nan, 1.0]]), "a scale is nan: the tensor is not finite"),
    (torch.zeros(2), "x has 1 dimensions: give a matrix"),
    (torch.zeros(2, 48), "2 x 48 does not divide into blocks of 1 x 32")])
def test_what_can_not_be_quantized_is_a_line(x, said):
    quantizer = Quantizer(E4M3, (1, 32) if x.size(-1) == 48 else (0, 0))
    with pytest.raises(ValueError, match=said):
        quantizer(x)


def test_of_four_neighbours_the_two_largest_are_kept():
    x = torch.tensor([[1.0, -4.0, 3.0, 2.0, 0.0, 0.0, -1.0, 5.0]])
    assert RECIPES["BF16, weights 2:4"].weight(x).values.tolist() == [[0.0, -4.0, 3.0, 0.0, 0.0, 0.0, -1.0, 5.0]]
    with pytest.raises(ValueError, match="rows of 6 do not divide into fours"):
        quantizing.two_of_four(torch.zeros(2, 6))


def test_zeros_stay_zeros():
    for quantizer in (RECIPES[name].x for name in ("FP8 current", "MXFP4", "NVFP4")):
        assert not quantizer(torch.zeros(16, 64)).dequantized().any()


# ------------------------------------------------------------------------------------------------------ delayed scaling


def test_a_delayed_scale_is_of_the_calls_before():
    state = State(replace(RECIPES["FP8 delayed"], history=2))
    largest = []
    for size in (1.0, 4.0, 2.0, 2.0, 2.0):
        rounded = state.quantized("x", Quantizer(E4M3), torch.full((2, 2), size))
        largest.append(rounded.scale[0, 0].item() * 448)
    assert largest == pytest.approx([1.0, 1.0, 4.0, 4.0, 2.0])
    other = state.quantized("weight", Quantizer(E4M3), torch.full((2, 2), 9.0))
    assert other.scale[0, 0].item() * 448 == pytest.approx(9.0)


def test_a_step_is_a_call_of_each_operand():
    """As many magnitudes in the history as there were forwards and backwards."""
    layer = Linear(K, N, RECIPES["FP8 delayed"])
    for _ in range(3):
        layer(torch.randn(16, K, requires_grad=True)).sum().backward()
    assert {name: int((seen > 0).sum()) for name, seen in layer.state.seen.items()} == {
        "x": 4, "weight": 4, "dy": 4, "weight again": 4, "dy again": 4, "x again": 4}


def test_what_outgrows_the_history_saturates_and_the_error_is_known():
    state = State(RECIPES["FP8 delayed"])
    x, weight, dy = operands()
    products(state.recipe, x, weight, dy, state)
    grown = products(state.recipe, 8 * x, weight, dy, state)["y"]
    assert error(grown) > 0.3 and RANGE[0] < error(grown) / grown.expected() < 1.6
    again = products(state.recipe, 8 * x, weight, dy, state)["y"]
    assert error(again) < 0.05


def test_a_history_that_is_not_rolled_is_caught():
    """It would keep the first magnitude for good."""
    state = State(replace(RECIPES["FP8 delayed"], history=1))
    for size in (1.0, 64.0):
        state.quantized("x", Quantizer(E4M3), torch.full((2, 2), size))
        assert state.seen["x"].tolist() == [size]


# ------------------------------------------------------------------------------------------------------------ the layer


@by_name
def test_a_layer_computes_what_its_products_say(recipe):
    x, weight, dy = operands()
    layer = Linear(K, N, recipe)
    with torch.no_grad():
        layer.weight.copy_(weight)
    given = x.view(2, -1, K).requires_grad_(not recipe.is_inference)
    with torch.set_grad_enabled(not recipe.is_inference):
        y = layer(given)
    made = products(recipe, x, weight, dy)
    assert torch.equal(y.detach().view(-1, N), made["y"].value() + layer.bias)
    if not recipe.is_inference:
        y.backward(dy.view_as(y))
        assert torch.equal(given.grad.view(-1, K), made["dx"].value())
        assert torch.equal(layer.weight.grad, made["dweight"].value())
        assert torch.allclose(layer.bias.grad, dy.sum(0), atol=1e-4)


def test_names_are_unique_and_blocks_lie_along_the_sum():
    assert len(RECIPES) == len(EVERY)
    for each in recipe.EVERY:
        assert each.x.block in ((0, 0), (1, 0)) or each.x.block[0] == 1
