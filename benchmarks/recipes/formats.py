"""Number formats of 16, 8 and 4 bits, and rounding to them as hardware does: to the nearest value, ties to even.

In 8 and 4 bits what is too large becomes the largest value, in 16 bits infinity. Everything is computed in FP32, which
holds each value of each of these formats.
Source: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) Specification 1.0.
"""
import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXPONENT = 0x7F800000                  # its bits in an FP32 number


@dataclass(frozen=True)
class Float:
    """Sign, exponent and mantissa. Below the least normal value its values are as far apart as just above it."""
    name: str
    exponent_bits: int
    mantissa_bits: int
    largest: float                     # of its finite values
    saturates: bool = True             # what is beyond it becomes it, else infinity

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def least_exponent(self) -> int:
        """Of a normal value."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def least(self) -> float:
        """The smallest value above zero."""
        return 2.0 ** (self.least_exponent - self.mantissa_bits)

    def spacing(self, x: Tensor) -> Tensor:
        """How far apart its values are around each of x."""
        power = (x.float().view(torch.int32) & EXPONENT).view(torch.float32)       # of two, at or below |x|
        return power.clamp(min=2.0 ** self.least_exponent) * 2.0 ** -self.mantissa_bits

    def round(self, x: Tensor) -> Tensor:
        """The nearest value to each of x, FP32; of two as near the even one."""
        given = x.float()
        clamped = given.clamp(-self.largest, self.largest) if self.saturates else given
        spacing = self.spacing(clamped)
        rounded = torch.round(clamped / spacing) * spacing
        if self.saturates:
            return rounded
        rounded = torch.where(clamped.isfinite(), rounded, clamped)
        return torch.where(rounded.abs() > self.largest, given * math.inf, rounded)


@dataclass(frozen=True)
class Integer:
    """Whole numbers, as many below zero as above."""
    name: str
    bits: int

    @property
    def largest(self) -> float:
        return 2.0 ** (self.bits - 1) - 1

    def spacing(self, x: Tensor) -> Tensor:
        """How far apart its values are: 1."""
        return torch.ones_like(x, dtype=torch.float32)

    def round(self, x: Tensor) -> Tensor:
        """The nearest value to each of x, FP32: of two as near the even one, and beyond the largest the largest."""
        return torch.round(x.float().clamp(-self.largest, self.largest))


Format = Float | Integer
E4M3 = Float("E4M3", 4, 3, 448.0)      # it has no infinity: that code is one value more
E5M2 = Float("E5M2", 5, 2, 57344.0)
E2M1 = Float("E2M1", 2, 1, 6.0)
FP16 = Float("FP16", 5, 10, 65504.0, saturates=False)
BF16 = Float("BF16", 8, 7, torch.finfo(torch.bfloat16).max, saturates=False)
INT8, INT4 = Integer("INT8", 8), Integer("INT4", 4)

LEAST_POWER, LARGEST_POWER = -127, 127                     # of two, in E8M0


def power_of_two(x: Tensor) -> Tensor:
    """The least power of two that is not below each of x > 0, within E8M0.

    Rounded down, as the MX specification has it, the largest value of a block would saturate.
    """
    mantissa, exponent = torch.frexp(x.float())            # x = mantissa * 2 ** exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(mantissa), exponent.clamp(LEAST_POWER, LARGEST_POWER))
