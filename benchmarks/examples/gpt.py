"""A GPT as many people write their first one: it is right, and it is slow in every way that `assistant` knows.

    python -m benchmarks assistant benchmarks/examples/gpt.py:build
"""
import logging
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

log = logging.getLogger(__name__)


class LayerNorm(nn.Module):
    """Over the last dimension, [..., E]."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class RMSNorm(nn.Module):
    """Over the last dimension, [..., E]."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Causal self-attention, [B, S, E] -> [B, S, E]."""

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        q = self.query(x).view(B, S, self.heads, -1).transpose(1, 2)           # [B, H, S, D]
        k = self.key(x).view(B, S, self.heads, -1).transpose(1, 2)
        v = self.value(x).view(B, S, self.heads, -1).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))               # [B, H, S, S]
        scores = scores.masked_fill(~self.mask[:S, :S], -math.inf)
        weights = F.softmax(scores, dim=-1)
        y = weights @ v
        return self.proj(y.transpose(1, 2).reshape(B, S, E))


class Block(nn.Module):
    """x + attention(LN(x)), then x + mlp(LN(x))."""

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        self.ln_1 = LayerNorm(width)
        self.attn = Attention(width, heads, length)
        self.ln_2 = LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.proj(F.gelu(self.fc(self.ln_2(x))))
        if x.abs().max().item() > 1e6:
            raise ValueError("the activations diverge")
        return x


class GPT(nn.Module):
    """Token numbers [B, S] -> logits [B, S, V]; the head is tied to the embedding."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, length) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        log.debug("embedded %d tokens", tokens.numel())
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def of_size(vocabulary: int, width: int, heads: int, layers: int, batch: int, length: int, device: str = "cpu"):
    """(model, inputs, loss) of that size, the same every time."""
    torch.manual_seed(0)
    model = GPT(vocabulary, width, heads, layers, length).to(device)
    tokens = torch.randint(vocabulary, (batch, length + 1)).to(device)
    targets = tokens[:, 1:].flatten()

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets)
    return model, (tokens[:, :-1],), loss


def build():
    """GPT-2's smallest size on a GPU; on a CPU one that two cores run in half a second."""
    if torch.cuda.is_available():
        return of_size(vocabulary=50304, width=768, heads=12, layers=12, batch=8, length=1024, device="cuda")
    return of_size(vocabulary=1024, width=256, heads=4, layers=12, batch=2, length=256)
