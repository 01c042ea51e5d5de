"""Tensors in 8 or 4 bits: the values of a format, and scales that each hold for a part of the tensor.

What is called a scale here multiplies the values back. They are along the last axis what a matmul sums over.
Source: Transformer Engine's recipes; OCP Microscaling Formats (MX) Specification 1.0 for blocks of 32; NVIDIA's NVFP4,
blocks of 16 whose scales are E4M3 numbers times one FP32 number for the whole tensor.
"""
import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from benchmarks.recipes.formats import E4M3, Format, power_of_two


class Scales(Enum):
    """What a scale is kept in; NONE: it is 1."""
    NONE = "none"
    FP32 = "FP32"
    POWER_OF_TWO = "E8M0"
    E4M3 = "E4M3"


@dataclass(frozen=True)
class Quantized:
    """values: FP32, as the format rounds them; scale: FP32, of a shape that broadcasts to theirs."""
    values: Tensor
    scale: Tensor
    format: Format

    def dequantized(self) -> Tensor:
        """What the values stand for, FP32."""
        return self.values * self.scale

    def expected_error(self, x: Tensor, is_exact: bool = False) -> Tensor:
        """The square of each error of rounding x to this, as it is to be expected; FP64.

        `is_exact`: x was given in this format, so that no number lies between two of its values.
        Between two values q apart a number is off by up to q/2, and squared by q**2/12 on average. Of one beyond the
        largest value, and of one that became 0, it is known how far off it is.
        """
        scaled = x.double() / self.scale.double()
        size, largest = scaled.abs(), self.format.largest
        spread = self.format.spacing(scaled.clamp(-largest, largest)).double() ** 2 / 12
        spread = spread * (not is_exact)
        known = torch.where(size > largest, size - largest, size) ** 2
        is_known = (size > largest) | (self.values == 0)
        return torch.where(is_known, known, spread) * self.scale.double() ** 2


@dataclass(frozen=True)
class Quantizer:
    """A format, and which part of a matrix [rows, columns] shares a scale: `block` is (rows, columns) of it.

    A 0 in `block` stands for all of them. `is_sparse`: of four neighbours in a row the two largest are kept, the others
    become 0 (2:4).
    """
    format: Format
    block: tuple[int, int] = (0, 0)
    scales: Scales = Scales.FP32
    is_sparse: bool = False

    def __call__(self, x: Tensor, amax: Tensor | None = None) -> Quantized:
        """x [rows, columns] -> what it is rounded to. `amax` in place of the largest magnitude of each part.

        A part of zeros has some scale. Raises ValueError where a scale would not be finite, or blocks do not fit.
        """
        parts = self.parted(x)
        if amax is None:
            amax = parts.abs().amax((1, 3), keepdim=True).float()
        scale = self.scale_of(amax)
        if not scale.isfinite().all():
            raise ValueError(f"a scale is {scale[~scale.isfinite()][0].item()}: the tensor is not finite")
        values = self.format.round(parts.float() / scale).view(x.shape)
        if self.is_sparse:
            values = torch.where(two_of_four(x), values, 0.0)
        return Quantized(values, scale.expand(parts.shape).reshape(x.shape), self.format)

    def parted(self, x: Tensor) -> Tensor:
        """x as [rows of blocks, rows of one, columns of blocks, columns of one]."""
        if x.dim() != 2:
            raise ValueError(f"x has {x.dim()} dimensions: give a matrix")
        rows, columns = (of_block or size for size, of_block in zip(x.shape, self.block, strict=True))
        if x.size(0) % rows or x.size(1) % columns:
            raise ValueError(f"{x.size(0)} x {x.size(1)} does not divide into blocks of {rows} x {columns}")
        return x.reshape(x.size(0) // rows, rows, x.size(1) // columns, columns)

    def scale_of(self, amax: Tensor) -> Tensor:
        """By which the values of a part are multiplied back."""
        if self.scales is Scales.NONE:
            return torch.where(amax.isfinite(), torch.ones_like(amax), amax)
        scale = torch.where(amax == 0, 1.0, amax / self.format.largest)
        if self.scales is Scales.POWER_OF_TWO:
            return torch.where(scale.isfinite(), power_of_two(scale), scale)
        if self.scales is Scales.E4M3:
            whole = torch.where(amax.amax() == 0, 1.0, amax.amax() / self.format.largest / E4M3.largest)
            return E4M3.round(scale / whole).clamp(min=E4M3.least) * whole
        return scale


def two_of_four(x: Tensor) -> Tensor:
    """Where the two largest of each four neighbours in a row are. Raises ValueError where 4 does not divide a row."""
    if x.size(-1) % 4:
        raise ValueError(f"rows of {x.size(-1)} do not divide into fours")
    fours = x.abs().unflatten(-1, (-1, 4))
    kept = torch.zeros_like(fours, dtype=torch.bool)
    return kept.scatter_(-1, fours.topk(2, -1).indices, True).flatten(-2)


def bits_a_value(quantizer: Quantizer, rows: int, columns: int) -> float:
    """What a value of such a matrix takes: its share of the scales, and where it is sparse the places of those kept."""
    sizes = [of_block or size for size, of_block in zip((rows, columns), quantizer.block, strict=True)]
    of_scale = {Scales.NONE: 0, Scales.FP32: 32, Scales.POWER_OF_TWO: 8, Scales.E4M3: 8}[quantizer.scales]
    own = quantizer.format.bits / 2 + 1 if quantizer.is_sparse else quantizer.format.bits      # 2 bits for each place
    return own + of_scale / math.prod(sizes)
