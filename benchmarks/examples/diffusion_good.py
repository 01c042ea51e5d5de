"""The diffusion transformer of diffusion.py as good as its author can write it.

    python -m benchmarks assistant benchmarks/examples/diffusion_good.py:build
"""
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


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
        return self.proj(F.silu(h))


class Attention(nn.Module):
    """Self-attention, [B, S, E] -> [B, S, E]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        q, k, v = self.to_qkv(x).view(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)    # [B, H, S, D] each
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(B, S, E))


class Block(nn.Module):
    """Attention and an MLP; the time step says how each is shifted, scaled and weighed."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = Attention(width, heads)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(F.silu(time)).chunk(6, -1)
        x = x + gate_1.unsqueeze(1) * self.attention(modulate(layer_norm(x), shift_1, scale_1))
        h = self.fc(modulate(layer_norm(x), shift_2, scale_2))
        return x + gate_2.unsqueeze(1) * self.proj(F.gelu(h, approximate="tanh"))


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
