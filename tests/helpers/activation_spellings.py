"""GELU, SiLU and their kind by hand, as people spell them, and functions that look like them."""
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
        return self.down(self.activation(self.up(x)))


class NewGELU(Spelt):
    """minGPT's."""

    def activation(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class OfScratch(Spelt):
    """LLMs-from-scratch's."""

    def activation(self, x):
        return 0.5 * x * (1 + torch.tanh(
            torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        ))


class ByErf(Spelt):
    """BERT's."""

    def activation(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class FastGELU(Spelt):
    """GPT-J's."""

    def activation(self, x):
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


class BySteps(Spelt):
    def activation(self, x):
        cube = x ** 3
        inner = x + 0.044715 * cube
        # The constant is sqrt(2 / pi).
        inner = inner * 0.7978845608028654
        cdf = 0.5 * (1 + inner.tanh())
        return x * cdf


class InPlace(Spelt):
    def activation(self, x):
        y = torch.erf(x * 0.7071067811865476)
        y += 1
        y *= 0.5
        return y * x


class WithABias(Spelt):
    """Megatron's: a bias is added first, and the residual behind it."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def activation(self, x):
        y = x + self.bias
        return y * 0.5 * (1.0 + torch.erf(y / 1.41421356237)) + x


class InAnExpression(Spelt):
    def forward(self, x):
        h = self.up(x)
        return self.down(0.5 * h * (1.0 + torch.erf(h / 2 ** 0.5))) + x


GELUS = [NewGELU, OfScratch, ByErf, FastGELU, BySteps, InPlace, WithABias, InAnExpression]


class OtherConstant(Spelt):
    """0.04 for 0.044715."""

    def activation(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.04 * x ** 3)))


class RoughConstant(Spelt):
    def activation(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.798 * (x + 0.044715 * x ** 3)))


NEAR_GELU = [OtherConstant, RoughConstant]


class Tanh(Spelt):
    def activation(self, x):
        return torch.tanh(x)


class WithoutOne(Spelt):
    def activation(self, x):
        return 0.5 * x * torch.erf(x / math.sqrt(2.0))


class OfTwo(Spelt):
    """Gated by another value: no function of one."""

    def activation(self, x):
        return 0.5 * self.down(x) * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Twice(Spelt):
    def activation(self, x):
        return x * (1.0 + torch.erf(x / math.sqrt(2.0)))


NO_GELU = [Tanh, WithoutOne, OfTwo, Twice]


# ---------------------------------------------------------------------------------------------------- SiLU and its kind


class Swish(Spelt):
    """Of latent diffusion, whose name is `nonlinearity`."""

    def activation(self, x):
        return x * torch.sigmoid(x)


class SwishInPlace(Spelt):
    """EfficientNet's."""

    def activation(self, x):
        return x.mul_(x.sigmoid())


class ByExp(Spelt):
    def activation(self, x):
        return x / (1 + torch.exp(-x))


class MishBySoftplus(Spelt):
    def activation(self, x):
        return x * torch.tanh(nn.functional.softplus(x))


class MishByLog(Spelt):
    def activation(self, x):
        return x * torch.tanh(torch.log1p(torch.exp(x)))


class HSwish(Spelt):
    """MobileNetV3's, of two modules."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU6(inplace=True)

    def activation(self, x):
        return x * (self.relu(x + 3) / 6)


class HSwishByFunction(Spelt):
    def activation(self, x):
        return x * nn.functional.relu6(x + 3.0) * 0.16666666666666666


SILUS = {Swish: "silu", SwishInPlace: "silu", ByExp: "silu", MishBySoftplus: "mish", MishByLog: "mish",
         HSwish: "hardswish", HSwishByFunction: "hardswish"}


class NearlySwish(Spelt):
    def activation(self, x):
        return x * torch.sigmoid(1.001 * x)


class QuickGELU(Spelt):
    """CLIP's: torch has none."""

    def activation(self, x):
        return x * torch.sigmoid(1.702 * x)


class Gated(Spelt):
    """By another value: no function of one."""

    def activation(self, x):
        return self.down(x) * torch.sigmoid(x)


class Sigmoid(Spelt):
    def activation(self, x):
        return torch.sigmoid(x)


class HSigmoid(Spelt):
    """The library's has a gradient that is off in FP64."""

    def activation(self, x):
        return torch.clamp(x / 6 + 0.5, 0, 1)


class OfKeras(Spelt):
    """Its slope is another one."""

    def activation(self, x):
        return torch.clamp(0.2 * x + 0.5, 0, 1)


class GateIsKept(Spelt):
    def activation(self, x):
        gate = torch.sigmoid(x)
        return x * gate + self.down(gate)


NO_SILU = [QuickGELU, Gated, Sigmoid, HSigmoid, OfKeras, GateIsKept]
