"""A linear layer that multiplies in FP8 is the emulated one, and each way to have one has the error that is derived."""
from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.recipes import inference, layers, scaled
from benchmarks.recipes.checking import operands
from benchmarks.recipes.emulated import products
from benchmarks.recipes.recipe import EVERY, RECIPES
from benchmarks.recipes.scaled import Scaled, why_not
from common.outcome import Failed

unit = pytest.mark.unit
CPU = torch.device("cpu")
RUNS = [name for name in RECIPES if not why_not(RECIPES[name], CPU)]
needs_fp8 = pytest.mark.skipif(not RUNS, reason="this torch multiplies FP8 on a GPU alone")
ROUNDED = 3e-3                         # relative L2, of an output in BF16: 2**-9 at the most for each value


def apart(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@unit
def test_scales_lie_as_the_library_reads_them():
    scale = torch.arange(12.0).view(2, 6)
    assert scaled.laid_out(torch.ones(1, 1), (0, 0)).shape == () and scaled.laid_out(scale, (1, 0)) is scale
    columns = scaled.laid_out(scale, (1, 128))
    assert columns.shape == (2, 6) and columns.stride() == (1, 2) and torch.equal(columns, scale)
    tiles = scaled.laid_out(scale, (128, 128))
    assert tiles.shape == (8, 2) and tiles.stride() == (1, 8)
    assert torch.equal(tiles[:6], scale.t()) and not tiles[6:].any()


def checked(recipe, device, outliers=1.0):
    """Its output and gradients beside those that are emulated."""
    x, weight, dy = (each.bfloat16() for each in operands(outliers, 0, device))
    layer, given = Scaled(weight, recipe), x.clone().requires_grad_()
    y = layer(given)
    y.backward(dy)
    made = products(recipe, x.float(), weight.float(), dy.float())
    found = {"y": y, "dx": given.grad, "dweight": layer.weight.grad}
    return {what: apart(found[what], made[what].value()) for what in found}


@unit
@pytest.mark.parametrize("outliers", [1.0, 1e4])
@pytest.mark.parametrize("name", RUNS)
def test_it_computes_what_is_emulated(name, outliers):
    found = checked(RECIPES[name], CPU, outliers)
    assert max(found.values()) < ROUNDED, found


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("outliers", [1.0, 1e4])
@pytest.mark.parametrize("name", RECIPES)
def test_it_computes_what_is_emulated_on_a_gpu(name, outliers):
    device = torch.device("cuda")
    if reason := why_not(RECIPES[name], device):
        pytest.skip(reason)
    found = checked(RECIPES[name], device, outliers)
    assert max(found.values()) < ROUNDED, found


@needs_fp8
@unit
@pytest.mark.parametrize("autocast", [False, True])
def test_it_stands_where_a_linear_layer_stood(autocast):
    """With a bias, axes before the last one, and under autocast parameters and gradients in FP32."""
    recipe, dtype = RECIPES["FP8 row"], torch.float32 if autocast else torch.bfloat16
    x, weight, dy = (each.to(dtype) for each in operands(1.0, 0, CPU))
    model = torch.nn.Sequential(torch.nn.Linear(weight.size(1), weight.size(0)).to(dtype))
    model[0].weight.data.copy_(weight)
    bias = model[0].bias.detach().clone()
    scaled.convert(model, recipe)
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias"] and torch.equal(model[0].bias, bias)
    given = x.unflatten(0, (4, -1)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(given)
    assert y.dtype == torch.bfloat16 and y.shape == (4, x.size(0) // 4, weight.size(0))
    y.backward(dy.to(y.dtype).view(y.shape))
    assert {each.grad.dtype for each in (given, *model.parameters())} == {dtype}
    made = products(recipe, x.float(), weight.float(), dy.bfloat16().float())
    assert apart(y.flatten(0, 1) - bias, made["y"].value()) < 2 * ROUNDED
    assert apart(given.grad.flatten(0, 1), made["dx"].value()) < ROUNDED
    assert apart(model[0].weight.grad, made["dweight"].value()) < ROUNDED
    assert apart(model[0].bias.grad, dy.sum(0)) < ROUNDED


@needs_fp8
@unit
@pytest.mark.parametrize("name, kept", [("FP8 current", {"float8_e4m3fn": 2}), ("FP8 row", {"bfloat16": 2}),
                                        ("FP8 current, dweight in BF16", {"float8_e4m3fn": 1, "bfloat16": 1})])
def test_a_backward_keeps_what_it_reads(name, kept):
    x, weight, _ = (each.bfloat16() for each in operands(1.0, 0, CPU))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        Scaled(weight, RECIPES[name])(x)
    matrices = [str(t.dtype).removeprefix("torch.") for t in saved if t.numel() > 1]
    assert dict(Counter(matrices)) == kept


BY_WAY = [(way, each.name) for way in layers.WAYS for each in layers.recipes_of(way)]


def errors_of(way, name, device, outliers):
    recipe = RECIPES[name]
    x, weight, dy = (each.to(layers.dtype_of(recipe)) for each in operands(outliers, 0, device))
    layer = layers.WAYS[way](weight, recipe)
    for _ in range(0 if recipe.is_inference else 2):       # delayed scaling: the first call finds no history
        layer(x.requires_grad_()).backward(dy)
    layer.zero_grad()
    return layers.errors(layer, recipe, x.detach(), weight, dy)


@unit
@pytest.mark.parametrize("way, name", [
    (way, name) for way, name in BY_WAY
    if way in (layers.PLAIN, layers.WEIGHTS) or (way == layers.TORCH and name in RUNS)])
def test_each_way_has_the_error_that_is_derived(way, name):
    gradients = set() if RECIPES[name].is_inference else {"dx", "dweight"}
    assert set(errors_of(way, name, CPU, 1.0)) == {"y"} | gradients


@unit
@pytest.mark.parametrize("name, apart_by", [("INT8 weights", 1e-6), ("INT4 weights", 2**-8)])
def test_weights_alone_are_what_they_stand_for(name, apart_by):
    weight, x = torch.randn(32, 256), torch.randn(5, 256).bfloat16().float()
    layer = inference.weights_alone(weight, RECIPES[name])
    expected = x @ RECIPES[name].weight(weight).dequantized().T
    given = x if name == "INT8 weights" else x.bfloat16()
    assert apart(layer(given), expected) < apart_by
    assert layer.values.nbytes * 8 == weight.numel() * RECIPES[name].weight.format.bits


@unit
def test_each_number_of_4_bits_keeps_its_place_and_its_sign():
    weight = torch.arange(-7, 8).repeat(16, 18)[:, :256].float().contiguous()
    weight[:, ::128] = 7                                   # the scale of each group is 1
    layer = inference.weights_alone(weight, RECIPES["INT4 weights"])
    assert layer(torch.eye(256).bfloat16()).T.tolist() == weight.tolist()
    with pytest.raises(ValueError, match="weight has 24 rows: numbers of 4 bits take multiples of 16"):
        inference.weights_alone(weight.repeat(2, 1)[:24], RECIPES["INT4 weights"])


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("outliers", [1.0, 1e4])
@pytest.mark.parametrize("way, name", BY_WAY)
def test_each_way_has_the_error_that_is_derived_on_a_gpu(way, name, outliers):
    if (name, outliers) == ("FP16", 1e4):
        pytest.skip("its dweight overflows")
    try:
        errors_of(way, name, torch.device("cuda"), outliers)
    except NotImplementedError as reason:
        pytest.skip(str(reason))


@pytest.mark.integration
def test_what_a_gpu_gets_compiled_is_the_same():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in ("FP8 current", "FP8 row", "FP8 block 128"):
        for quantizer in {RECIPES[name].x, RECIPES[name].weight}:
            for of_transposed in (False, True):
                given = x, quantizer, torch.float8_e4m3fn, of_transposed
                plain, compiled = scaled._scaled(*given), scaled._compiled(*given)
                assert torch.equal(plain[1], compiled[1]) and compiled[0].is_contiguous()
                assert (plain[0].float() != compiled[0].float()).float().mean() < 1e-3   # a division rounds otherwise
    values = plain[0]
    assert torch.equal(scaled._compiled_moved(values).view(torch.uint8), values.t().contiguous().view(torch.uint8))
    layer = inference.weights_alone(x, RECIPES["INT8 weights"])
    given = x[:3], layer.values, layer.scale
    assert apart(inference._compiled(*given), inference._multiplied(*given)) < 1e-2


@needs_fp8
@unit
def test_a_way_that_rounds_nothing_or_more_fails(monkeypatch):
    given = [each.bfloat16() for each in operands(1.0, 0, CPU)]
    plain, recipe = layers.Plain(given[1], RECIPES["BF16"]), RECIPES["FP8 current"]
    with pytest.raises(Failed, match=r"of y is 1\.7e-03, and rounding explains 2\.6e-02 to 4\.3e-02"):
        layers.errors(plain, recipe, *given)
    with pytest.raises(Failed, match=r"and rounding explains 1\.2e-03 to 1\.9e-03"):
        layers.errors(Scaled(given[1], recipe), RECIPES["BF16"], *given)


@unit
@pytest.mark.parametrize("way, name, why", [
    (layers.PLAIN, "FP8 row", "it is no recipe of 16 bits"), (layers.TE, "FP8 row", "has no such recipe"),
    (layers.TE, "FP8 current", "its kernels run on a GPU alone"), (layers.TORCH, "MXFP8", "a Blackwell GPU"),
    (layers.WEIGHTS, "BF16", "no whole numbers"), (layers.SPARSE, "BF16", "are not sparse"),
    (layers.SPARSE, "BF16, weights 2:4", "run on a GPU alone")])
def test_what_a_way_can_not_do_is_a_line(way, name, why):
    with pytest.raises(NotImplementedError, match=why):
        layers.WAYS[way](torch.zeros(32, 32), RECIPES[name])


@needs_fp8
@unit
def test_which_recipes_torch_multiplies_in(monkeypatch):
    assert RUNS == ["FP8 current", "FP8 current, dweight in BF16", "FP8 row"]
    why = {each.name: why_not(each, CPU) for each in EVERY}
    assert why["FP8 delayed"] == "torch has no delayed scaling" and why["MXFP8"] == "it needs a Blackwell GPU"
    assert why["FP8 block 128"] == "its blocks need a GPU"
    assert why["BF16"] == why["INT8 weights"] == "torch has no matmul of such operands"
    monkeypatch.delattr(scaled.F, "scaled_mm")
    assert "has no scaled_mm" in why_not(RECIPES["FP8 row"], CPU)


@unit
def test_a_torch_without_it_is_reported(monkeypatch):
    monkeypatch.setattr(scaled, "on_a_cpu", lambda: False)
    assert why_not(RECIPES["FP8 row"], CPU) == f"torch {torch.__version__} multiplies FP8 on a GPU alone"


@needs_fp8
@unit
def test_what_it_can_not_take_is_a_line():
    recipe = RECIPES["FP8 row"]
    with pytest.raises(ValueError, match="the weight is 24 x 32: FP8 takes multiples of 16"):
        Scaled(torch.zeros(24, 32), recipe)
    with pytest.raises(ValueError, match="x has 8 rows: FP8 takes multiples of 16"):
        Scaled(torch.zeros(32, 32), recipe)(torch.zeros(8, 32))
    with pytest.raises(NotImplementedError, match="torch has no delayed scaling"):
        Scaled(torch.zeros(32, 32), RECIPES["FP8 delayed"])


MUTANTS = {
    "dx of the weight that is not transposed": ("transposed", lambda quantizer, matrix, known: known),
    "a scale of another operand": ("matmul", lambda left, right, dtype, fast: MATMUL(
        replace(left, scale=right.scale.flatten()[0].expand_as(left.scale).contiguous()), right, dtype, fast)),
}
MATMUL = scaled.matmul


@needs_fp8
@unit
@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_caught(mutant, monkeypatch):
    monkeypatch.setattr(scaled, *MUTANTS[mutant])
    try:
        found = checked(RECIPES["FP8 current"], CPU)
    except (RuntimeError, ValueError):
        return
    assert max(found.values()) > ROUNDED
