"""A linear layer by a recipe on hardware that multiplies in it: operands packed in FP8, torch's own matmul of them.

torch hands `scaled_mm` to cuBLASLt on a GPU. Hopper multiplies two operands in FP8 that both lie along what is summed
over, so each backward needs transposed copies of them: they are part of what FP8 costs.
"""
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recipes.formats import E4M3, E5M2, Format
from benchmarks.recipes.quantizing import Quantizer
from benchmarks.recipes.recipe import Recipe
from common.runtime import compiler

DTYPES: dict[Format, torch.dtype] = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
KINDS = {(0, 0): "TensorWise", (1, 0): "RowWise", (1, 128): "BlockWise1x128", (128, 128): "BlockWise128x128"}


@functools.cache
def on_a_cpu() -> bool:
    """Whether this torch multiplies FP8 there, too."""
    values, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    kind = F.ScalingType.TensorWise
    try:
        F.scaled_mm(values, values.t(), one, kind, one, kind)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def why_not(recipe: Recipe, device: torch.device) -> str:
    """Why torch can't multiply in it there; "" where it can."""
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm"
    operands = recipe.x, recipe.weight, recipe.dy
    if recipe.history:
        return "torch has no delayed scaling"
    if recipe.hardware:
        return f"it needs {recipe.hardware}"
    if any(each.format not in DTYPES or each.block not in KINDS for each in operands):
        return "torch has no matmul of such operands"
    if device.type != "cuda" and not on_a_cpu():
        return f"torch {torch.__version__} multiplies FP8 on a GPU alone"
    if device.type != "cuda" and any(each.block not in ((0, 0), (1, 0)) for each in operands):
        return "its blocks need a GPU"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "FP8 needs an Ada, Hopper or Blackwell GPU"
    return ""


@dataclass(frozen=True)
class Packed:
    """values: FP8 [rows, columns], whose last axis a matmul sums over; scale: FP32 of each block, `laid_out`."""
    values: Tensor
    scale: Tensor
    block: tuple[int, int]


def _scaled(matrix: Tensor, quantizer: Quantizer, dtype: torch.dtype, of_transposed: bool) -> tuple[Tensor, Tensor]:
    """(FP8 values, the scale of each part, [rows of parts, columns of parts]): two passes, one for the magnitudes."""
    if of_transposed:
        matrix = matrix.t().contiguous()
    parts = quantizer.parted(matrix)
    scale = quantizer.scale_of(parts.abs().amax((1, 3), keepdim=True).float())
    largest = quantizer.format.largest
    values = (parts.float() / scale).clamp(-largest, largest).to(dtype)
    return values.view(matrix.shape), scale[:, 0, :, 0]


def _moved(values: Tensor) -> Tensor:
    """FP8 values transposed, in a new tensor."""
    return values.view(torch.uint8).t().contiguous().view(values.dtype)


# Compiled: torch's own copy of a transposed matrix of bytes is several times as slow as its cast.
_compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(_scaled, dynamic=False)
_compiled_moved: Callable[[Tensor], Tensor] = torch.compile(_moved, dynamic=False)


def packed(quantizer: Quantizer, matrix: Tensor, of_transposed: bool = False) -> Packed:
    """The matrix, or the transposed one, in the format, with the scales of its parts."""
    scaled = _compiled if matrix.is_cuda else _scaled
    values, scale = scaled(matrix, quantizer, DTYPES[quantizer.format], of_transposed)
    return Packed(values, laid_out(scale, quantizer.block), quantizer.block)


def laid_out(scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The scales [rows of parts, columns of parts] as cuBLASLt reads them."""
    if block == (0, 0):
        return scale.view(())
    if block == (1, 128):                                  # [rows, columns], those of a column side by side
        return scale.t().contiguous().t()
    if block == (128, 128):                                # [columns, rows], the columns filled up to a multiple of 4
        return F.pad(scale, (0, -scale.size(1) % 4)).contiguous().t()
    return scale


def transposed(quantizer: Quantizer, matrix: Tensor, known: Packed) -> Packed:
    """The transposed matrix packed, of which the one that is not is known: with one scale only its values move."""
    if quantizer.block == (0, 0):
        moved = _compiled_moved if known.values.is_cuda else _moved
        return Packed(moved(known.values), known.scale, known.block)
    return packed(quantizer, matrix, of_transposed=True)


def _to_transpose(quantizer: Quantizer, matrix: Tensor, known: Packed) -> tuple[Tensor | None, ...]:
    """(the matrix, its values, its scale), of these what `transposed` reads: a backward keeps no more."""
    return (None, known.values, known.scale) if quantizer.block == (0, 0) else (matrix, None, None)


def _multiplied(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, blocks: Sequence[int],
                dtype: torch.dtype, fast: bool) -> Tensor:
    """left @ right.T of FP8 values with their scales `laid_out`; blocks: those of left and of right, two numbers each.

    `fast`: sums are kept in fewer bits, as is usual in a forward. Blocks have no such.
    """
    block, of_other = (blocks[0], blocks[1]), (blocks[2], blocks[3])
    scale = of_right.t() if of_other == (1, 0) else of_right
    fast = fast and block in ((0, 0), (1, 0))
    return F.scaled_mm(left, right.t(), of_left, _kind(block), scale, _kind(of_other), output_dtype=dtype,
                       use_fast_accum=fast)


def _kind(block: tuple[int, int]) -> Any:
    """As torch names it."""
    return getattr(F.ScalingType, KINDS[block])


_in_a_graph = torch.library.custom_op(
    "transformer_block::scaled_mm", _multiplied, mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor of_left, Tensor of_right, int[] blocks, ScalarType dtype, bool fast)"
           " -> Tensor")


@_in_a_graph.register_fake
def _(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, blocks: Sequence[int], dtype: torch.dtype,
      fast: bool) -> Tensor:
    return left.new_empty(left.size(0), right.size(0), dtype=dtype)


def matmul(left: Packed, right: Packed, dtype: torch.dtype, fast: bool) -> Tensor:
    """left @ right.T in `dtype`."""
    multiplied = _in_a_graph if torch.compiler.is_compiling() else _multiplied     # torch 2.11 traces no scaled_mm
    return multiplied(left.values, right.values, left.scale, right.scale, [*left.block, *right.block], dtype, fast)


class _Linear(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        of_x, of_weight = packed(recipe.x, x), packed(recipe.weight, weight)
        of_x_again = (x, None, None) if recipe.of_weight_gradient else _to_transpose(recipe.x, x, of_x)
        ctx.save_for_backward(*of_x_again, *_to_transpose(recipe.weight, weight, of_weight))
        ctx.recipe, ctx.dtype = recipe, dtype
        ctx.dtypes = x.dtype, weight.dtype
        return matmul(of_x, of_weight, dtype, fast=True)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, x_values, x_scale, weight, weight_values, weight_scale = ctx.saved_tensors
        recipe, dtype = ctx.recipe, ctx.dtype
        x_dtype, weight_dtype = ctx.dtypes
        of_dy = packed(recipe.dy, dy)
        weight_again = transposed(recipe.weight, weight, Packed(weight_values, weight_scale, recipe.weight.block))
        dx = matmul(of_dy, weight_again, dtype, fast=False).to(x_dtype)
        if recipe.of_weight_gradient:
            dweight = dy.t() @ x.to(dtype)
        else:
            x_again = transposed(recipe.x, x, Packed(x_values, x_scale, recipe.x.block))
            dweight = matmul(transposed(recipe.dy, dy, of_dy), x_again, dtype, fast=False)
        return dx, dweight.to(weight_dtype), None, None


class Scaled(nn.Module):
    """y = x @ weight.T + bias by a recipe, [..., K] -> [..., N], in the dtype of x, or in autocast's.

    Raises NotImplementedError where torch can't multiply so, and ValueError for dimensions that 16 does not divide.
    """

    def __init__(self, weight: Tensor, recipe: Recipe, bias: Tensor | None = None):
        super().__init__()
        if reason := why_not(recipe, weight.device):
            raise NotImplementedError(reason)
        if any(size % 16 for size in weight.shape):
            raise ValueError(f"the weight is {weight.size(0)} x {weight.size(1)}: FP8 takes multiples of 16")
        compiler.allow_many_graphs()
        self.weight, self.recipe = nn.Parameter(weight.detach().clone()), recipe
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if rows.size(0) % 16:
            raise ValueError(f"x has {rows.size(0)} rows: FP8 takes multiples of 16")
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y = _Linear.apply(rows, self.weight, self.recipe, dtype).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(dtype)


def convert(module: nn.Module, recipe: Recipe) -> None:
    """From here on its linear layers multiply by that recipe; their parameters keep their names. Raises as Scaled."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, Scaled(child.weight, recipe, child.bias))
        else:
            convert(child, recipe)
