"""Linear layers for inference alone: whole numbers for weights, and sparse weights. They have no backward."""
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recipes.formats import INT4, INT8
from benchmarks.recipes.quantizing import two_of_four
from benchmarks.recipes.recipe import Recipe
from common.runtime import compiler


def packed_in_pairs(values: Tensor) -> Tensor:
    """Whole numbers of 4 bits [rows, columns] -> bytes [rows, columns / 2]: the first of a pair in the lower bits."""
    low, high = (values[:, place::2].to(torch.int16) & 0xF for place in (0, 1))
    return (low | high << 4).to(torch.uint8)


def unpacked(pairs: Tensor) -> Tensor:
    """The numbers of such bytes, INT8 [rows, columns]."""
    low, high = pairs & 0xF, pairs >> 4
    numbers = torch.stack([low, high], -1).flatten(-2).to(torch.int8)
    return torch.where(numbers > 7, numbers - 16, numbers)


def _multiplied(x: Tensor, values: Tensor, scale: Tensor, is_paired: bool) -> Tensor:
    """x @ weight.T, the weight in the dtype of x; values [N, K] or pairs of them, scale FP32 [N, parts of a row]."""
    numbers = unpacked(values) if is_paired else values
    parts = numbers.unflatten(-1, (scale.size(-1), -1)).float() * scale.unsqueeze(-1)
    return F.linear(x, parts.flatten(-2).to(x.dtype))


# By this option Inductor makes of one row a sum that multiplies weights back on the way: it reads them once, in 8 bits.
_compiled: Any = torch.compile(_multiplied, dynamic=False, options={"coordinate_descent_tuning": True})


class WeightOnly(nn.Module):
    """Weights as whole numbers of 8 or 4 bits, multiplied back in each call: a GPU reads less."""

    def __init__(self, weight: Tensor, recipe: Recipe):
        super().__init__()
        quantizer = recipe.weight
        if quantizer.format not in (INT8, INT4):
            raise NotImplementedError("its weights are no whole numbers")
        compiler.allow_many_graphs()
        with torch.no_grad():
            rounded = quantizer(weight.float())
            numbers = rounded.values.to(torch.int8)
            self.is_paired = quantizer.format is INT4
            self.values = packed_in_pairs(numbers) if self.is_paired else numbers
            self.scale = rounded.scale[:, ::quantizer.block[1] or weight.size(1)].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        multiplied = _compiled if x.is_cuda else _multiplied
        return multiplied(x, self.values, self.scale, self.is_paired)


class SemiStructured(nn.Module):
    """Weights of which two of four neighbours are kept, by torch's kernels for sparse tensor cores."""

    def __init__(self, weight: Tensor, recipe: Recipe):
        super().__init__()
        if not recipe.weight.is_sparse:
            raise NotImplementedError("its weights are not sparse")
        if weight.device.type != "cuda":
            raise NotImplementedError("its kernels run on a GPU alone")
        kept = torch.where(two_of_four(weight), weight.detach(), 0)
        self.values: Any = torch.sparse.to_sparse_semi_structured(kept)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.values)
