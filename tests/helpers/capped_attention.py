"""Attention by hand with a soft cap, spelt in several ways; each `attend` takes and gives [B, H, S, D]."""
import math

import torch
from torch import nn

WIDTH, HEADS, LENGTH = 64, 4, 48          # at 40 torch 2.14 compiles FlexAttention wrongly for a CPU with AVX2 alone


class Capped(nn.Module):
    """[B, S, E], and which positions count [B, S] -> [B, S, E]."""

    def __init__(self, cap=1.5):
        super().__init__()
        self.cap, self.scale = cap, (WIDTH // HEADS) ** -0.5
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x, counts):
        q, k, v = (layer(2 * x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.attend(q, k, v, counts).transpose(1, 2).flatten(2)

    def attend(self, q, k, v, counts):
        scores = self.cap * torch.tanh(q @ k.mT * self.scale / self.cap)
        return scores.softmax(-1) @ v


class Causal(Capped):
    def attend(self, q, k, v, counts):
        scores = q @ k.mT * self.scale
        scores = self.cap * torch.tanh(scores / self.cap)
        scores = scores.masked_fill(self.future, float("-inf"))
        return scores.softmax(-1) @ v


class AsGemma(Capped):
    """As transformers has it: step by step, and a mask that is added."""

    def attend(self, q, k, v, counts):
        weights = torch.matmul(q, k.transpose(2, 3)) * self.scale
        weights = weights / self.cap
        weights = torch.tanh(weights)
        weights = weights * self.cap
        mask = torch.full((LENGTH, LENGTH), -1e9, device=q.device, dtype=q.dtype).triu(1)
        weights = weights + mask[None, None]
        weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v)


class Padded(Capped):
    """A boolean mask of what the caller gives, and a causal one."""

    def attend(self, q, k, v, counts):
        scores = (q @ k.mT).mul(self.scale / self.cap).tanh().mul(self.cap)
        scores = scores.masked_fill(~counts[:, None, None, :], float("-inf"))
        scores = scores.masked_fill(self.future, float("-inf"))
        return scores.softmax(-1) @ v


class Biased(Capped):
    """A learned bias behind the cap."""

    def attend(self, q, k, v, counts):
        scores = torch.tanh(q @ k.mT * self.scale / self.cap) * self.cap + self.bias
        return scores.softmax(-1) @ v


class ScaledAgain(Capped):
    """What is behind the cap multiplies the scores and the mask."""

    def attend(self, q, k, v, counts):
        scores = torch.tanh(q @ k.mT / 3) * self.cap + self.bias
        return (scores * 0.5).softmax(-1) @ v


class ThreeDimensions(Capped):
    def attend(self, q, k, v, counts):
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        scores = self.cap * torch.bmm(q, k.mT).mul(self.scale).div(self.cap).tanh()
        scores = scores.masked_fill(self.future, -math.inf)
        return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, HEADS))


class ByEinsum(Capped):
    def attend(self, q, k, v, counts):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scale
        weights = (self.cap * torch.tanh(scores / self.cap)).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class UnderConditions(Capped):
    """As people write what a config may leave out; names that a score function would have are taken."""

    def attend(self, q, k, v, counts=None):
        b, h = q.shape[:2]
        scores = (q * 0.5) @ k.transpose(-2, -1)
        if self.cap is not None:
            scores = scores / self.cap
            scores = torch.tanh(scores)
            scores = scores * self.cap
        if counts is not None:
            scores = scores.masked_fill(~counts.view(b, 1, 1, -1), float("-inf"))
        assert h == HEADS
        return nn.functional.softmax(scores, dim=-1) @ v


class ScaledBehindACondition(Capped):
    def attend(self, q, k, v, counts):
        scores = q @ k.mT
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        return (scores * self.scale).softmax(-1) @ v


class InOneLine(Capped):
    def attend(self, q, k, v, counts): return (self.cap * torch.tanh(q @ k.mT / self.cap)).softmax(-1) @ v


class MaskedBefore(Capped):
    """The tanh makes a number of minus infinity: these positions are seen."""

    def attend(self, q, k, v, counts):
        scores = (q @ k.mT * self.scale).masked_fill(self.future, float("-inf"))
        return (self.cap * torch.tanh(scores / self.cap)).softmax(-1) @ v


class Twice(Capped):
    def attend(self, q, k, v, counts):
        return torch.tanh(torch.tanh(q @ k.mT * self.scale)).softmax(-1) @ v


class Dropped(Capped):
    def attend(self, q, k, v, counts):
        weights = (self.cap * torch.tanh(q @ k.mT * self.scale / self.cap)).softmax(-1)
        return nn.functional.dropout(weights, 0.1, True) @ v


class SharedKeys(Capped):
    """One head of keys and values for all."""

    def attend(self, q, k, v, counts):
        weights = (self.cap * torch.tanh(q @ k[:, :1].mT * self.scale / self.cap)).softmax(-1)
        return weights @ v[:, :1]


RIGHT = (Capped, Causal, AsGemma, Padded, Biased, ScaledAgain, ThreeDimensions, ByEinsum,
         UnderConditions)
NOT_WRITTEN = {
    InOneLine: "it shares a line with others",
    ThreeDimensions: "FlexAttention takes four dimensions",
    ScaledBehindACondition: "multiplied behind a soft cap that stands under a condition"}
NO_SOFT_CAP = {MaskedBefore: "its mask is put on before the tanh of its soft cap",
               Twice: "its scores go through a tanh twice"}
REFUSED = {Dropped: "FlexAttention has no dropout", SharedKeys: "its keys or values are broadcast"}
