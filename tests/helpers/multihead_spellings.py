"""Calls of nn.MultiheadAttention that make attention weights, as people write them."""
import torch
from torch import Tensor, nn

WIDTH, HEADS = 16, 2


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        return x + self.attention(x, memory, memory, padding)[0]


class Unpacked(Indexed):
    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        y, weights = self.attention(query=x, key=memory, value=memory, key_padding_mask=padding, need_weights=True)
        return x + y


class SeveralLines(Indexed):
    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        y, _ = self.attention(
            x, memory, memory,
            key_padding_mask=padding,                      # True where a key is padding
        )
        return x + y


class Causal(Indexed):
    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        return x + self.attention(x, x, x, attn_mask=mask, is_causal=True, average_attn_weights=False)[0]


class InALoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, dropout=0.0) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        for layer in self.layers:
            x = x + layer(self.norm(x), memory, memory, key_padding_mask=padding)[0]
        return x.transpose(0, 1)


class Reads(Indexed):
    """Its weights are part of what it returns."""

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        y, weights = self.attention(x, memory, memory, padding)
        return x + y * weights.amax(-1, keepdim=True)


class ReturnsBoth(Indexed):
    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, memory, memory, padding)


class WithoutWeights(Indexed):
    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        return x + self.attention(x, memory, memory, padding, need_weights=False)[0]


class ByPlace(Indexed):
    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        return x + self.attention(x, memory, memory, padding, True)[0]


RIGHT = [Indexed, Unpacked, SeveralLines, Causal, InALoop]
READ = [Reads, ReturnsBoth]
