"""A GPT that trains in seconds, and a language for it whose best loss is known.

The language is a Markov chain: each symbol depends on the two before it. A model that has learned it whole has the
chain's entropy as its loss.
"""
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SYMBOLS, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 16, 128, 4, 2, 64, 16
RATE = 2e-3                            # of AdamW
LIKELY = 0.85                          # the share of the likeliest of the symbols that may follow
FOLLOWERS = 4                          # how many may

MakeLinear = Callable[[int, int], nn.Module]


@functools.cache
def _chain() -> tuple[Tensor, Tensor]:
    """(what may follow two symbols, [SYMBOLS, SYMBOLS, FOLLOWERS]; how likely each of these is, [FOLLOWERS])."""
    numbers = torch.Generator().manual_seed(0)
    followers = torch.rand(SYMBOLS, SYMBOLS, SYMBOLS, generator=numbers).argsort(-1)[..., :FOLLOWERS]
    rest = (1 - LIKELY) / (FOLLOWERS - 1)
    return followers, torch.tensor([LIKELY] + [rest] * (FOLLOWERS - 1))


def entropy() -> float:
    """Of a symbol whose two predecessors are known, in nats: the least loss that a model can have."""
    likely = _chain()[1]
    return float(-(likely * likely.log()).sum())


def batches(seed: int, count: int) -> Iterator[Tensor]:
    """So many batches of symbols, [BATCH, LENGTH + 1]."""
    followers, likely = _chain()
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(count):
        symbols = torch.randint(SYMBOLS, (BATCH, 2), generator=numbers)
        drawn = torch.multinomial(likely, BATCH * (LENGTH - 1), replacement=True, generator=numbers)
        for choice in drawn.view(LENGTH - 1, BATCH):
            nexts = followers[symbols[:, -2], symbols[:, -1], choice]
            symbols = torch.cat([symbols, nexts[:, None]], 1)
        yield symbols


class Block(nn.Module):
    """x + attention(LayerNorm(x)), then x + MLP(LayerNorm(x)), [B, S, E] -> [B, S, E]."""

    def __init__(self, linear: MakeLinear):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(B, S, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, S, E))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class TinyGPT(nn.Module):
    """Symbols [B, S] -> logits [B, S, SYMBOLS]. Its blocks' linear layers are made by `linear`."""

    def __init__(self, linear: MakeLinear, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(linear) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        places = torch.arange(symbols.size(1), device=symbols.device)
        x = self.blocks(self.symbols(symbols) + self.places(places))
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        """Of predicting each symbol that has two before it, in nats."""
        logits = self(batch[:, :-1])[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 2:].flatten())


def trained(linear: MakeLinear, seed: int, steps: int, device: torch.device) -> tuple[TinyGPT, list[float]]:
    """(a model, the loss of each step). Models of one seed begin with the same parameters, and see the same batches."""
    model = TinyGPT(linear, seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    losses = []
    for batch in batches(seed, steps):
        loss = model.loss(batch.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return model, losses
