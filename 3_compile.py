"""Step 3: the same block compiled.

torch.compile traces the block once and generates kernels that fuse what stood between the matmuls: casts, GELU,
LayerNorm and residual adds pass through memory once instead of once each. The choice of attention backends has to stand
inside of what is compiled: AOTAutograd's cache, which it turns off, would not know it.

    python 3_compile.py
"""
from common import BlockConfig, parameters
from common.block.config import LAYER_NORM_EPS
from common.block.precision import float32_matmul_precision
from common.block.sdpa_backends import series_attention, settle_backend_order
from common.run import run

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# The first that supports the GPU, dtype and shape runs: cuDNN, FlashAttention, memory-efficient, by hand in C++.
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(nn.Module):
    """Causal multi-head self-attention, [B, S, E] -> [B, S, E]."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.attend = series_attention(config) or F.scaled_dot_product_attention     # ours by --attention series
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        qkv = self.qkv(x).view(B, S, 3, self.num_heads, -1)       # [B, S, 3, H, D]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                      # [B, H, S, D] each
        dropout = self.dropout if self.training else 0.0
        with sdpa_kernel(BACKENDS, set_priority=True):
            y = self.attend(q, k, v, dropout_p=dropout, is_causal=True)
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
        self.amp_dtype = config.amp_dtype
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.mlp = MLP(config)

    @float32_matmul_precision("high")      # TF32, in the backward too
    def __call__(self, x: Tensor) -> Tensor:
        mixed = self.amp_dtype is not None and x.dtype == torch.float32
        with torch.autocast(x.device.type, self.amp_dtype, enabled=mixed):
            return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def build(config: BlockConfig, values: dict[str, Tensor], device: torch.device | str) -> Block:
    """The block on `device`, with a copy of the canonical parameters `values` in the dtype they come in."""
    settle_backend_order(device)           # what the process runs besides keeps torch's own order
    with torch.device(device):
        block = Block(config)
    torch._dynamo.config.recompile_limit = 1024            # counts over all instances: its 8 would end a sweep
    block.compile(fullgraph=True, dynamic=False)           # in place: parameter names stay
    return parameters.load(block, values, device)


if __name__ == "__main__":
    run(__file__)
