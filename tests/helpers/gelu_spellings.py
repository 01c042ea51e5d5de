"""GELU by hand, as people spell it, and functions that look like it."""
import math

import torch
from torch import nn

WIDTH = 8


class Spelt(nn.Module):
    """Between two linear layers, as in an MLP."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.gelu(self.up(x)))


class NewGELU(Spelt):
    """minGPT's."""

    def gelu(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class OfScratch(Spelt):
    """LLMs-from-scratch's."""

    def gelu(self, x):
        return 0.5 * x * (1 + torch.tanh(
            torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        ))


class ByErf(Spelt):
    """BERT's."""

    def gelu(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class FastGELU(Spelt):
    """GPT-J's."""

    def gelu(self, x):
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


class BySteps(Spelt):
    def gelu(self, x):
        cube = x ** 3
        inner = x + 0.044715 * cube
        # The constant is sqrt(2 / pi).
        inner = inner * 0.7978845608028654
        cdf = 0.5 * (1 + inner.tanh())
        return x * cdf


class InPlace(Spelt):
    def gelu(self, x):
        y = torch.erf(x * 0.7071067811865476)
        y += 1
        y *= 0.5
        return y * x


class WithABias(Spelt):
    """Megatron's: a bias is added first, and the residual behind it."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def gelu(self, x):
        y = x + self.bias
        return y * 0.5 * (1.0 + torch.erf(y / 1.41421356237)) + x


class InAnExpression(Spelt):
    def forward(self, x):
        h = self.up(x)
        return self.down(0.5 * h * (1.0 + torch.erf(h / 2 ** 0.5))) + x


RIGHT = [NewGELU, OfScratch, ByErf, FastGELU, BySteps, InPlace, WithABias, InAnExpression]


class OtherConstant(Spelt):
    """0.04 for 0.044715."""

    def gelu(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.04 * x ** 3)))


class RoughConstant(Spelt):
    def gelu(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.798 * (x + 0.044715 * x ** 3)))


NEAR = [OtherConstant, RoughConstant]


class Tanh(Spelt):
    def gelu(self, x):
        return torch.tanh(x)


class WithoutOne(Spelt):
    def gelu(self, x):
        return 0.5 * x * torch.erf(x / math.sqrt(2.0))


class OfTwo(Spelt):
    """Gated by another value: no function of one."""

    def gelu(self, x):
        return 0.5 * self.down(x) * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Twice(Spelt):
    def gelu(self, x):
        return x * (1.0 + torch.erf(x / math.sqrt(2.0)))


OTHERS = [Tanh, WithoutOne, OfTwo, Twice]
