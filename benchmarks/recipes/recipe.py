"""Recipes: in which format each operand of a linear layer's three matmuls is, and what shares a scale.

    y = x @ weight.T + bias        dx = dy @ weight        dweight = dy.T @ x

A matmul sums over the last axis of both operands as they are given to it, and blocks lie along that axis.
"""
from dataclasses import dataclass, replace

from benchmarks.recipes.formats import BF16, E2M1, E4M3, E5M2, FP16, INT4, INT8
from benchmarks.recipes.quantizing import Quantizer, Scales


@dataclass(frozen=True)
class Recipe:
    """How x, weight and dy are rounded before they are multiplied."""
    name: str
    x: Quantizer
    weight: Quantizer
    dy: Quantizer
    of_weight_gradient: Quantizer | None = None            # of both operands of dweight, where it has one of its own
    history: int = 0                   # delayed scaling: the scale is of the largest magnitude of so many calls before
    is_inference: bool = False         # it has no backward
    hardware: str = ""                 # that multiplies in it, where an H100 or H200 does not


BLACKWELL = "a Blackwell GPU"
_BF16, _FP16 = (Quantizer(form, scales=Scales.NONE) for form in (BF16, FP16))
_BLOCKS, _TILES = (Quantizer(E4M3, block, Scales.POWER_OF_TWO) for block in ((1, 128), (128, 128)))
CURRENT = Recipe("FP8 current", Quantizer(E4M3), Quantizer(E4M3), Quantizer(E5M2))


def _alike(name: str, quantizer: Quantizer, hardware: str = "") -> Recipe:
    """All operands in the same way."""
    return Recipe(name, quantizer, quantizer, quantizer, hardware=hardware)


EVERY = (
    _alike("BF16", _BF16),
    _alike("FP16", _FP16),
    replace(CURRENT, name="FP8 delayed", history=1024),
    CURRENT,
    replace(CURRENT, name="FP8 current, dweight in BF16", of_weight_gradient=_BF16),
    _alike("FP8 row", Quantizer(E4M3, (1, 0))),
    Recipe("FP8 block 128", _BLOCKS, _TILES, _BLOCKS),
    _alike("MXFP8", Quantizer(E4M3, (1, 32), Scales.POWER_OF_TWO), BLACKWELL),
    _alike("MXFP4", Quantizer(E2M1, (1, 32), Scales.POWER_OF_TWO), BLACKWELL),
    _alike("NVFP4", Quantizer(E2M1, (1, 16), Scales.E4M3), BLACKWELL),
    Recipe("BF16, weights 2:4", _BF16, replace(_BF16, is_sparse=True), _BF16, is_inference=True),
    Recipe("INT8 weights", _BF16, Quantizer(INT8, (1, 0)), _BF16, is_inference=True),
    Recipe("INT4 weights", _BF16, Quantizer(INT4, (1, 128)), _BF16, is_inference=True),
)
RECIPES = {recipe.name: recipe for recipe in EVERY}
