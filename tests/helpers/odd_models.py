"""Models of many forms, each with what it is called with: what may be anywhere in what people bring."""
import dataclasses

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
TOKENS = torch.arange(12).view(3, 4)


class Of(nn.Module):
    """A function of a module with some layers."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear, self.other = function, nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


@dataclasses.dataclass
class Output:
    """What some libraries return."""
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Double(torch.autograd.Function):
    """An operation of one's own, with its backward."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight / 2


def parametrized():
    model = nn.Linear(8, 8)
    parametrize.register_parametrization(model, "weight", Halved())
    return model


def hooked():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].register_forward_hook(lambda module, given, output: output + 1)
    model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    return model


def loop(self, x):
    for _ in range(3):
        x = torch.tanh(self.linear(x))
    return x


def branch(self, x):
    return self.linear(x) if x.sum() > 0 else self.other(x)


def caught(self, x):
    try:
        return self.linear(x[:, :, :3])
    except RuntimeError:
        return self.linear(x)


def attention_over_rows(self, x):
    return F.softmax(x @ x.mT, dim=-2) @ x


def attention_twice(self, x):
    weights = F.softmax(x @ x.mT, dim=-1)
    return weights @ x, weights


def attention_of_one_token(self, x):
    return F.softmax(x[:, :1] @ x.mT + 0 * self.linear.bias[0], dim=-1) @ x


def in_place(self, x):
    y = self.linear(x)
    y += 1
    y.mul_(2).clamp_(min=0)
    return y


def no_grad_inside(self, x):
    with torch.no_grad():
        target = self.other(x)
    return self.linear(x) - target


def closed_over(self, x):
    def inner(y):
        return self.linear(y) * len(X)
    return inner(x)


MODELS = {
    "multi-head attention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), (X, X, X)),
    "an encoder": lambda: (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), (X,)),
    "an encoder in eval mode": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (X,)),
    "a decoder": lambda: (nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), (X, X)),
    "an LSTM": lambda: (nn.LSTM(8, 5, 2, bidirectional=True), (X,)), "a GRU": lambda: (nn.GRU(8, 5), (X,)),
    "a cell": lambda: (nn.LSTMCell(8, 5), (X[0],)), "a bilinear layer": lambda: (nn.Bilinear(8, 8, 3), (X, X)),
    "a convolution": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (IMAGE,)),
    "a transposed one": lambda: (nn.ConvTranspose2d(3, 4, 3, stride=2), (IMAGE,)),
    "a grouped one": lambda: (nn.Conv1d(6, 6, 3, groups=3), (X,)),
    "an embedding": lambda: (nn.Embedding(12, 4), (TOKENS,)),
    "a bag of embeddings": lambda: (nn.EmbeddingBag(12, 4), (TOKENS,)),
    "a sparse embedding": lambda: (nn.Embedding(12, 4, sparse=True), (TOKENS,)),
    "no parameters": lambda: (nn.Softmax(-1), (X,)), "an identity": lambda: (nn.Identity(), (X,)),
    "dropout of everything": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0)), (X,)),
    "bfloat16": lambda: (nn.Linear(8, 8).bfloat16(), (X.bfloat16(),)),
    "float64": lambda: (nn.Linear(8, 8).double(), (X.double(),)),
    "complex values inside": lambda: (Of(lambda self, x: torch.fft.rfft(self.linear(x)).abs()), (X,)),
    "whole numbers out": lambda: (Of(lambda self, x: self.linear(x).argmax(-1)), (X,)),
    "a scalar out": lambda: (Of(lambda self, x: self.linear(x).mean()), (X,)),
    "a dict out": lambda: (Of(lambda self, x: {"y": self.linear(x), "none": None}), (X,)),
    "a list out": lambda: (Of(lambda self, x: [self.linear(x), (self.other(x),)]), (X,)),
    "a dataclass out": lambda: (Of(lambda self, x: Output(self.linear(x))), (X,)),
    "a view of the input out": lambda: (Of(lambda self, x: x.transpose(0, 1)), (X,)),
    "one sample": lambda: (nn.Linear(8, 8), (X[:1],)), "one dimension": lambda: (nn.Linear(8, 8), (X[0, 0],)),
    "strided input": lambda: (nn.Linear(6, 8), (X.mT,)),
    "keywords": lambda: (Of(lambda self, x, flag=False: self.linear(x)), {"x": X, "flag": True}),
    "nested inputs": lambda: (Of(lambda self, given: self.linear(given["x"][0])), ({"x": [X]},)),
    "an optional input": lambda: (Of(lambda self, x, mask=None: self.linear(x)), (X, None)),
    "a loop": lambda: (Of(loop), (X,)), "a branch on data": lambda: (Of(branch), (X,)),
    "an exception that is caught": lambda: (Of(caught), (X,)), "changed in place": lambda: (Of(in_place), (X,)),
    "no_grad inside": lambda: (Of(no_grad_inside), (X,)), "a closure": lambda: (Of(closed_over), (X,)),
    "softmax over rows": lambda: (Of(attention_over_rows), (X,)),
    "weights that are returned": lambda: (Of(attention_twice), (X,)),
    "attention of one token": lambda: (Of(attention_of_one_token), (X,)),
    "a print": lambda: (Of(lambda self, x: print(end="") or self.linear(x)), (X,)),
    "numpy inside": lambda: (Of(lambda self, x: self.linear(x) * float(x.detach().numpy().max())), (X,)),
    "a random number of Python's": lambda: (Of(lambda self, x: self.linear(x) + torch.rand(())), (X,)),
    "a function of one's own": lambda: (Of(lambda self, x: Double.apply(self.linear(x))), (X,)),
    "a checkpoint": lambda: (Of(lambda self, x: checkpoint(self.linear, x, use_reentrant=False)), (X,)),
    "einsum": lambda: (Of(lambda self, x: torch.einsum("bsi,oi->bso", x, self.linear.weight)), (X,)),
    "a product of three": lambda: (Of(lambda self, x: torch.einsum("bsi,oi,o->bso", x, self.linear.weight,
                                                                   self.scale)), (X,)),
    "vmap": lambda: (Of(lambda self, x: torch.vmap(self.linear)(x)), (X,)),
    "autocast inside": lambda: (Of(lambda self, x: torch.autocast("cpu", torch.bfloat16)(self.linear)(x)), (X,)),
    "scripted": lambda: (torch.jit.script(nn.Linear(8, 8)), (X,)),
    "compiled": lambda: (torch.compile(nn.Linear(8, 8), backend="eager"), (X,)),
    "parametrized": lambda: (parametrized(), (X,)),
    "weight norm": lambda: (parametrizations.weight_norm(nn.Linear(8, 8)), (X,)),
    "spectral norm": lambda: (parametrizations.spectral_norm(nn.Linear(8, 8)), (X,)), "hooks": lambda: (hooked(), (X,)),
    "lazy": lambda: (nn.LazyLinear(4), (X,)), "frozen": lambda: (nn.Linear(8, 8).requires_grad_(False), (X,)),
    "a list of modules": lambda: (nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), (X,)),
    "the same module twice": lambda: (nn.Sequential(*[nn.Linear(8, 8)] * 2), (X,)),
    "a loss as the model": lambda: (nn.CrossEntropyLoss(), (X[:, 0], torch.tensor([1, 2, 3, 4]))),
    "padding": lambda: (nn.Sequential(nn.ReflectionPad1d(1), nn.AvgPool1d(2), nn.Upsample(scale_factor=2)), (X,)),
    "norms": lambda: (nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 6), nn.InstanceNorm1d(6)), (X,))}
