"""Step 0: a transformer block by hand, in FP32.

Attention makes every tensor it is taught with: the S x S scores, the causal mask, the softmax and, with dropout, what
is left of it each travel to memory and back. Matmuls are IEEE FP32 on the ordinary cores: no tensor core runs.

    python 0_baseline.py
"""
import math

from common import BlockConfig, parameters
from common.block.config import LAYER_NORM_EPS
from common.block.precision import float32_matmul_precision
from common.run import run

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal multi-head self-attention, [B, S, E] -> [B, S, E]."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        qkv = self.qkv(x).view(B, S, 3, self.num_heads, -1)       # [B, S, 3, H, D]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                      # [B, H, S, D] each
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # [B, H, S, S]
        future = torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        y = F.dropout(weights, self.dropout, self.training) @ v   # [B, H, S, D]
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a GELU (tanh approximation) between them, [B, S, E] -> [B, S, E]."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.fc = nn.Linear(config.hidden_size, config.ffn_hidden_size)
        self.proj = nn.Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))  # [B, S, F] between


class Block(nn.Module):
    """One pre-LN transformer block; x and the result are [B, S, E], in the dtype of the parameters."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.mlp = MLP(config)

    @float32_matmul_precision("highest")   # IEEE FP32, in the backward too
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def build(config: BlockConfig, values: dict[str, Tensor], device: torch.device | str) -> Block:
    """The block on `device`, with a copy of the canonical parameters `values` in the dtype they come in."""
    with torch.device(device):
        block = Block(config)
    return parameters.load(block, values, device)


if __name__ == "__main__":
    run(__file__)
