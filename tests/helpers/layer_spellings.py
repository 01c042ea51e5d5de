"""Norms by hand and linear layers on one input, spelt in many ways. Each is a class, as a person writes it."""
import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 32


class Norm(nn.Module):
    """[..., E] -> [..., E]"""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.rand(WIDTH))
        self.eps = 1e-5


class LayerNormByMeans(Norm):
    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt(variance + self.eps) + self.bias


class LayerNormByVar(Norm):
    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normalised = (x - mean) * torch.rsqrt(variance + self.eps)
        return normalised * self.weight + self.bias


class LayerNormBare(Norm):
    def forward(self, x):
        centred = x - x.mean(-1, True)
        return centred / (centred.square().mean(-1, True) + self.eps).sqrt()


class RMSNormOfLlama(Norm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class RMSNormByPowers(Norm):
    def forward(self, x):
        mean_square = torch.mean(x * x, dim=-1, keepdim=True)
        return x * (mean_square + self.eps) ** -0.5 * self.weight


class RMSNormInHuggingFacesManner(Norm):
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class LayerNormByBoth(Norm):
    def forward(self, x):
        variance, mean = torch.var_mean(x, dim=-1, keepdim=True, unbiased=False)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class LayerNormByMoments(Norm):
    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class LayerNormThatKeepsItsMean(Norm):
    """The mean is returned, too, and a statement in between is another's."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        # It is added below.
        twice = 2 * x
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        y = (x - mean) / torch.sqrt(variance + self.eps)
        return y * self.weight + self.bias + twice, mean


class RMSNormUnderItsOwnName(Norm):
    def forward(self, x):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        x = x * self.weight
        return x + self.bias


class OverTheSequence(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps)


class LayerNorm2d(nn.Module):
    """ConvNeXt's and Segment Anything's, over the channels of an image."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.rand(8))
        self.eps = 1e-6

    def forward(self, x):
        x = x.unflatten(-1, (4, -1))
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        x = self.weight[:, None, None] * x + self.bias[:, None, None]
        return x


class ChannelNorm(nn.Module):
    """Its parameters have the shape of an image; lucidrains' way."""

    def __init__(self):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.rand(1, 8, 1, 1) + 0.5), nn.Parameter(torch.rand(1, 8, 1, 1))

    def forward(self, x):
        x = x.unflatten(-1, (4, -1))
        var = torch.var(x, dim=1, unbiased=False, keepdim=True)
        mean = torch.mean(x, dim=1, keepdim=True)
        return (x - mean) * (var + 1e-5).rsqrt() * self.g + self.b


class RMSNorm2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x):
        x = x.unflatten(-1, (4, -1))
        return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6) * self.weight.view(1, -1, 1, 1)


class LastByThree(Norm):
    """Over the last dimension, with a weight of three dimensions."""

    def forward(self, x):
        y = (x - x.mean(2, keepdim=True)) / torch.sqrt(x.var(2, keepdim=True, unbiased=False) + self.eps)
        return y * self.weight.view(1, 1, -1) + self.bias


class RMSNormByLength(Norm):
    """As lucidrains' code has it."""

    def forward(self, x):
        return F.normalize(x, dim=-1) * WIDTH**0.5 * self.weight


class RMSNormByLengthWithOne(Norm):
    """Its weight is what is beyond 1, and the root comes last."""

    def __init__(self):
        super().__init__()
        self.scale = WIDTH**0.5

    def forward(self, x):
        x = F.normalize(x, p=2.0, dim=2, eps=1e-6)
        return x * (self.weight + 1) * self.scale


class RMSNormByItsLength(Norm):
    """The least length that it divides by is no epsilon of the mean."""

    def forward(self, x):
        length = torch.norm(x, dim=-1, keepdim=True) * WIDTH**-0.5
        return x / length.clamp(min=1e-8) * self.weight


class RMSNormByItsLengthBare(Norm):
    def forward(self, x):
        return x / (x.norm(p=2, dim=2, keepdim=True) / WIDTH**0.5)


class RMSNormByTheLibrarysLength(Norm):
    def forward(self, x):
        return self.weight * (x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-6) / WIDTH**0.5))


class RMSNormByLengthAndRoot(Norm):
    def forward(self, x):
        unit = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-6)
        return unit * self.weight * WIDTH**0.5


class RMSNormOfT5(Norm):
    """Only what it is divided by is in FP32."""

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x


class RMSNormByLength2d(nn.Module):
    """Over the channels of an image."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(1, 8, 1, 1) + 0.5)

    def forward(self, x):
        x = x.unflatten(-1, (4, -1))
        return F.normalize(x, dim=1) * self.g * (x.shape[1] ** 0.5)


NORMS = (LayerNormByMeans, LayerNormByVar, LayerNormBare, RMSNormOfLlama, RMSNormByPowers, RMSNormInHuggingFacesManner,
         LayerNormByBoth, LayerNormByMoments, LayerNormThatKeepsItsMean, RMSNormUnderItsOwnName,
         OverTheSequence, LayerNorm2d, ChannelNorm, RMSNorm2d, LastByThree, RMSNormByLength,
         RMSNormByLengthWithOne, RMSNormByLength2d, RMSNormByItsLength, RMSNormByItsLengthBare,
         RMSNormByTheLibrarysLength, RMSNormByLengthAndRoot, RMSNormOfT5)


class UnbiasedLayerNorm(Norm):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


class EpsilonOutside(Norm):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class StandardDeviation(Norm):
    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias


class OfAnotherMean(Norm):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class OverTwo(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + self.eps)


class OfTwoDimensions(Norm):
    """The mean goes over one dimension, the variance over another."""

    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + self.eps)


class OfLengthOne(Norm):
    def forward(self, x):
        return F.normalize(x, dim=-1) * self.weight


class OfAnotherLength(Norm):
    def forward(self, x):
        return F.normalize(x, dim=-1) * 1.001 * WIDTH**0.5


class OfAnotherNorm(Norm):
    def forward(self, x):
        return F.normalize(x, p=1.0, dim=-1) * WIDTH**0.5 * self.weight


class OfItsLengthAlone(Norm):
    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-8) * self.weight


class OfItsLengthAndMore(Norm):
    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) * WIDTH**-0.5 + 1e-2) * self.weight


class OfItsLengthUpToALimit(Norm):
    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) * WIDTH**-0.5).clamp(1e-8, 1.0)


class OfItsAbsoluteValues(Norm):
    def forward(self, x):
        return x / (x.norm(p=1, dim=-1, keepdim=True) * WIDTH**-0.5)


class OfAnothersLength(Norm):
    def forward(self, x):
        return x.sin() / (x.norm(dim=-1, keepdim=True) * WIDTH**-0.5)


class OfItsLengthTimesMore(Norm):
    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * (1.001 * WIDTH**0.5) * self.weight


OTHER_FUNCTIONS = (OfItsLengthTimesMore, OfItsLengthAlone, OfItsLengthAndMore, OfItsLengthUpToALimit,
                   OfItsAbsoluteValues, OfAnothersLength, UnbiasedLayerNorm, EpsilonOutside, StandardDeviation,
                   OfAnotherMean, OverTwo, OfTwoDimensions, OfLengthOne, OfAnotherLength, OfAnotherNorm)


class Three(nn.Module):
    """Three projections of one input."""
    bias = True

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=self.bias)
        self.k = nn.Linear(WIDTH, WIDTH // 2, bias=self.bias)
        self.v = nn.Linear(WIDTH, WIDTH // 2, bias=self.bias)

    def forward(self, x):
        q = self.q(x).relu()
        k, v = self.k(x), self.v(x)
        return q + torch.cat([k, v], -1).sin()


class ThreeWithoutBias(Three):
    bias = False


class ThreeOfWhichOneIsScaled(Three):
    """In place, as in Longformer."""

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q /= 3.0
        return q + torch.cat([k, v], -1).sin()


class ThreeOfWhichAViewIsClamped(Three):
    """In place, too."""

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        k.unflatten(-1, (2, -1)).transpose(-2, -1).clamp_(max=0.25)
        return q + torch.cat([k, v], -1).sin()


class Gated(nn.Module):
    """As in Llama's MLP."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


SIBLINGS = (Three, ThreeWithoutBias, ThreeOfWhichOneIsScaled, ThreeOfWhichAViewIsClamped, Gated)


class OneWeightTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.only(x) * self.only(x)
