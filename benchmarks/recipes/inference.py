"""Linear layers for inference alone: whole numbers for weights, and sparse weights. They have no backward."""
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recipes.formats import INT4, INT8
from benchmarks.recipes.quantizing import two_of_four
from benchmarks.recipes.recipe import Recipe
from common.runtime import compiler

ROW_TILES = 8                          # of 16 columns each, which torch's kernel for 4 bits takes at once
MULTIPLE = 16                          # of rows
MIDDLE = 8                             # it stores a number of 4 bits as 0 to 15


def _multiplied(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """x @ weight.T; values INT8 [N, K], scale FP32 [N]. It scales y, which is smaller than the weight."""
    return (F.linear(x, values.to(x.dtype)) * scale).to(x.dtype)


# By this option Inductor makes of one row a sum that converts weights on the way: it reads them once, in 8 bits.
_compiled: Any = torch.compile(_multiplied, dynamic=False, options={"coordinate_descent_tuning": True})


class WeightsIn8Bits(nn.Module):
    """Weights as whole numbers of 8 bits, converted in each call: a GPU reads half as much."""

    def __init__(self, weight: Tensor, recipe: Recipe):
        super().__init__()
        compiler.allow_many_graphs()
        with torch.no_grad():
            rounded = recipe.weight(weight.float())
            self.values = rounded.values.to(torch.int8)
            self.scale = rounded.scale[:, 0].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        multiplied = _compiled if x.is_cuda else _multiplied
        return multiplied(x, self.values, self.scale)


class WeightsIn4Bits(nn.Module):
    """Weights as whole numbers of 4 bits, packed for torch's kernel that converts them as it multiplies; x is BF16."""

    def __init__(self, weight: Tensor, recipe: Recipe):
        super().__init__()
        if weight.size(0) % MULTIPLE:
            raise ValueError(f"weight has {weight.size(0)} rows: numbers of 4 bits take multiples of {MULTIPLE}")
        self.group = recipe.weight.block[1]
        with torch.no_grad():
            rounded = recipe.weight(weight.float())
            self.values = _packed(rounded.values.to(torch.int32) + MIDDLE)
            scale = rounded.scale[:, ::self.group].T.to(torch.bfloat16)
            self.scale_and_zero = torch.stack([scale, torch.zeros_like(scale)], -1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        of_device = torch.ops.aten._weight_int4pack_mm if x.is_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
        y: Tensor = of_device(x, self.values, self.group, self.scale_and_zero)
        return y


def _packed(numbers: Tensor) -> Tensor:
    """Numbers from 0 to 15, INT32 [N, K], in the order in which the kernel of their device reads them."""
    if numbers.is_cuda:
        pairs = numbers[:, ::2] << 4 | numbers[:, 1::2]
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs.to(torch.uint8), ROW_TILES)
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, ROW_TILES)
    return packed


def weights_alone(weight: Tensor, recipe: Recipe) -> nn.Module:
    """The layer whose weights are whole numbers. Raises NotImplementedError where the recipe's are not."""
    if recipe.weight.format is INT8:
        return WeightsIn8Bits(weight, recipe)
    if recipe.weight.format is INT4:
        return WeightsIn4Bits(weight, recipe)
    raise NotImplementedError("its weights are no whole numbers")


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
