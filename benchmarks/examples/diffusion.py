"""A diffusion transformer as people write one from the paper: it is right, and slow in every way that is planted here.

    python -m benchmarks assistant benchmarks/examples/diffusion.py:build
"""
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def layer_norm(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / torch.sqrt(variance + 1e-6)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Embedding(nn.Module):
    """Time steps [B] -> [B, E]."""

    def __init__(self, width: int, waves: int = 256):
        super().__init__()
        self.waves = waves
        self.fc = nn.Linear(waves, width)
        self.proj = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        half = self.waves // 2
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=t.device) / half)
        angles = t[:, None] * frequencies
        h = self.fc(torch.cat([angles.cos(), angles.sin()], -1))
        h = h * torch.sigmoid(h)
        return self.proj(h)


class Attention(nn.Module):
    """Self-attention, [B, S, E] -> [B, S, E]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        q = self.to_q(x).reshape(B, S, self.heads, -1)
        k = self.to_k(x).reshape(B, S, self.heads, -1)
        v = self.to_v(x).reshape(B, S, self.heads, -1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(E // self.heads)
        weights = scores.softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out(y.reshape(B, S, E))


class Block(nn.Module):
    """Attention and an MLP; the time step says how each is shifted, scaled and weighed."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = Attention(width, heads)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(time * torch.sigmoid(time)).chunk(6, -1)
        x = x + gate_1.unsqueeze(1) * self.attention(modulate(layer_norm(x), shift_1, scale_1))
        h = self.fc(modulate(layer_norm(x), shift_2, scale_2))
        h = 0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h ** 3)))
        return x + gate_2.unsqueeze(1) * self.proj(h)


class DiT(nn.Module):
    """Noisy latents [B, 4, H, W] and time steps [B] -> the noise in them, [B, 4, H, W]."""

    def __init__(self, width: int, heads: int, layers: int, size: int, patch: int = 2):
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(4, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.time = Embedding(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, 4 * patch * patch)

    def forward(self, latents: Tensor, t: Tensor) -> Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        if (t > 1000).any():
            raise ValueError("a time step beyond 1000")
        time = self.time(t)
        for block in self.blocks:
            x = block(x, time)
        x = self.out(layer_norm(x))
        return F.fold(x.transpose(1, 2), latents.shape[2:], self.patch, stride=self.patch)


def of_size(width: int, heads: int, layers: int, batch: int, size: int, device: str = "cpu"):
    """(model, inputs, loss) of that size, the same every time."""
    torch.manual_seed(0)
    model = DiT(width, heads, layers, size).to(device)
    latents, noise = torch.randn(2, batch, 4, size, size).to(device)
    t = 1000 * torch.rand(batch).to(device)

    def loss(predicted: Tensor) -> Tensor:
        return F.mse_loss(predicted, noise)
    return model, (latents, t), loss


def build():
    """DiT-B/2 on latents of 32 x 32 on a GPU; on a CPU one that two cores run in less than a second."""
    if torch.cuda.is_available():
        return of_size(width=768, heads=12, layers=12, batch=32, size=32, device="cuda")
    return of_size(width=192, heads=3, layers=6, batch=2, size=32)
