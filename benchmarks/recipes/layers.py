"""The ways to have a linear layer by a recipe that multiplies in hardware, and whether one computes what it should.

y = x @ weight.T without a bias; x [tokens, K], weight [N, K] and dy [tokens, N] are of 16 bits, y and gradients too.
"""
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recipes.checking import Error, gate
from benchmarks.recipes.emulated import Product, products
from benchmarks.recipes.formats import BF16, FP16
from benchmarks.recipes.inference import SemiStructured, weights_alone
from benchmarks.recipes.quantizing import Quantizer, Scales
from benchmarks.recipes.recipe import RECIPES, Recipe
from benchmarks.recipes.scaled import Scaled
from common.runtime import engine

PLAIN, TORCH, TE = "16 bits", "torch", "Transformer Engine"
WEIGHTS, SPARSE = "torch, weights alone", "torch, sparse"
IN_TRANSFORMER_ENGINE: dict[str, tuple[str, dict[str, Any]]] = {       # recipe -> its class there, and arguments
    "FP8 delayed": ("DelayedScaling", {}),
    "FP8 current": ("Float8CurrentScaling", {}),
    "FP8 block 128": ("Float8BlockScaling", {}),
    "MXFP8": ("MXFP8BlockScaling", {}),
    "NVFP4": ("NVFP4BlockScaling", {"disable_rht": True, "disable_stochastic_rounding": True,      # what is emulated
                                    "disable_2d_quantization": True}),
}
DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
FORMATS = {torch.bfloat16: BF16, torch.float16: FP16}


class Plain(nn.Module):
    """In 16 bits, as nn.Linear has it."""

    def __init__(self, weight: Tensor, recipe: Recipe):
        super().__init__()
        if recipe.name not in DTYPES:
            raise NotImplementedError("it is no recipe of 16 bits")
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def recipe_of_transformer_engine(recipe: Recipe, device: torch.device) -> Any:
    """What its autocast takes. Raises NotImplementedError where it has none there."""
    if recipe.name not in IN_TRANSFORMER_ENGINE:
        raise NotImplementedError("Transformer Engine has no such recipe")
    if device.type != "cuda":
        raise NotImplementedError("its kernels run on a GPU alone")
    if recipe.hardware and torch.cuda.get_device_capability(device) < (10, 0):
        raise NotImplementedError(f"it needs {recipe.hardware}")
    name, arguments = IN_TRANSFORMER_ENGINE[recipe.name]
    try:
        return getattr(engine.transformer_engine().quantization, name)(**arguments)
    except (ImportError, AttributeError, TypeError) as error:
        raise NotImplementedError(str(error)) from None


class OfTransformerEngine(nn.Module):
    """Its Linear, under its autocast. Raises NotImplementedError where it can't be had."""

    def __init__(self, weight: Tensor, recipe: Recipe):
        super().__init__()
        self.recipe = recipe_of_transformer_engine(recipe, weight.device)
        te = engine.transformer_engine()
        self.autocast = te.autocast
        self.linear = te.Linear(weight.size(1), weight.size(0), bias=False, params_dtype=weight.dtype)
        with torch.no_grad():
            self.linear.weight.copy_(weight)

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast(enabled=True, recipe=self.recipe):
            return self.linear(x)


WAYS: dict[str, Callable[[Tensor, Recipe], nn.Module]] = {
    PLAIN: Plain, TORCH: Scaled, TE: OfTransformerEngine, WEIGHTS: weights_alone, SPARSE: SemiStructured}


def dtype_of(recipe: Recipe) -> torch.dtype:
    """Of x, weight and dy."""
    return DTYPES.get(recipe.name, torch.bfloat16)


def recipes_of(way: str) -> list[Recipe]:
    """Those that it has on some machine."""
    names: dict[str, Iterable[str]] = {
        PLAIN: DTYPES, TE: IN_TRANSFORMER_ENGINE, SPARSE: ("BF16, weights 2:4",),
        TORCH: ("FP8 current", "FP8 current, dweight in BF16", "FP8 row", "FP8 block 128"),
        WEIGHTS: ("INT8 weights", "INT4 weights")}
    return [RECIPES[name] for name in names[way]]


# -------------------------------------------------------------------------------------------------------- its check


def errors(layer: nn.Module, recipe: Recipe, x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Error]:
    """What -> its error, of y, and where it trains of dx and dweight, each beside the one that rounding explains.

    The operands are exact as they are given, in 16 bits; y and gradients are rounded to these once more. Raises Failed
    beyond RANGE.
    """
    values = _values(layer, recipe, x, dy)
    made = products(recipe, x.float(), weight.float(), dy.float())
    found = {what: _error(value, made[what]) for what, value in values.items()}
    gate(found)
    return found


def _values(layer: nn.Module, recipe: Recipe, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What it gives."""
    if recipe.is_inference:
        with torch.no_grad():
            return {"y": layer(x)}
    given = x.detach().clone().requires_grad_()
    y = layer(given)
    [weight] = layer.parameters()
    [dx, dweight] = torch.autograd.grad(y, [given, weight], dy)
    return {"y": y.detach(), "dx": dx, "dweight": dweight}


def _error(value: Tensor, product: Product) -> Error:
    exact = product.left.double() @ product.right.double().T
    size = exact.norm()
    form = FORMATS[value.dtype]
    rounded = Quantizer(form, scales=Scales.NONE)(exact.float())
    of_output = float(rounded.expected_error(exact).sum().sqrt() / size)
    of_operands = product.expected(given_in=form)
    return Error(float((value.double() - exact).norm() / size), math.hypot(of_output, of_operands))
