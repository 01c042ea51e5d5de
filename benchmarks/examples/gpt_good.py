"""The GPT of gpt.py as good as its author can write it: what `assistant` has left to find is how it is called.

    python -m benchmarks assistant benchmarks/examples/gpt_good.py:build
"""
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention, [B, S, E] -> [B, S, E]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        qkv = self.qkv(x).view(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)                                                # [B, H, S, D] each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, S, E))


class Block(nn.Module):
    """x + attention(LN(x)), then x + mlp(LN(x))."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    """Token numbers [B, S] -> logits [B, S, V]; the head is tied to the embedding."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
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
