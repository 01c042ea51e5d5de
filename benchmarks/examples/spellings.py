"""Attention by hand in generated spellings: what people vary, in every combination."""
import itertools
import math
import random
from collections.abc import Collection
from dataclasses import dataclass

HEADS, LENGTH, WIDTH = 2, 10, 8                      # of a head

PRODUCTS = {
    "@": ("q @ k.transpose(-2, -1)", "w @ v"),
    "matmul": ("torch.matmul(q, k.mT)", "torch.matmul(w, v)"),
    "method": ("q.matmul(k.transpose(2, 3))", "w.matmul(v)"),
    "einsum": ('torch.einsum("bhid,bhjd->bhij", q, k)', 'torch.einsum("bhij,bhjd->bhid", w, v)'),
    "values first": ("q @ k.mT", "(v.transpose(-1, -2) @ w.transpose(-1, -2)).transpose(-1, -2)"),
    "bmm": ("torch.bmm(q, k.transpose(1, 2))", "torch.bmm(w, v)")}
SCALES = {
    "scores * number": (None, "s = s * self.scale"), "number * scores": (None, "s = self.scale * s"),
    "scores / root": (None, "s = s / math.sqrt(q.size(-1))"), "in place": (None, "s *= self.scale"),
    "queries before": ("q = q * self.scale", None),
    "both before": ("q, k = q * self.scale ** 0.5, k * self.scale ** 0.5", None), "none": (None, None)}
MASKS = {
    "none": [], "masked_fill": ["s = s.masked_fill(self.future, -math.inf)"],
    "masked_fill_": ["s.masked_fill_(self.future, float('-inf'))"],
    "by keyword": ["s = s.masked_fill(mask=self.future, value=-1e9)"],
    "where": ["s = torch.where(self.future, torch.finfo(s.dtype).min, s)"],
    "where not": ["s = torch.where(~self.future, s, -math.inf)"],
    "added": ["s = s + self.minus"], "on the left": ["s = self.minus + s"], "added in place": ["s += self.minus"],
    "optional": ["if mask is not None:", "    s = s.masked_fill(mask == 0, -1e9)"],
    "two": ["s = s + self.bias", "s = s.masked_fill(self.future, -math.inf)"]}
SOFTMAXES = ["F.softmax(s, dim=-1)", "s.softmax(-1)", "torch.softmax(input=s, dim=-1)", "self.softmax(s)",
             "F.softmax(s.float(), dim=-1).type_as(q)"]
DROPOUTS = {"none": None, "module": "w = self.drop(w)", "function": "w = F.dropout(w, 0.1, self.training)",
            "keywords": "w = F.dropout(w, p=self.rate, training=self.training)",
            "nn.functional": "w = nn.functional.dropout(w, p=self.drop.p, training=self.training)"}
HEAD = '''import math
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.softmax, self.drop = nn.Linear(16, 48), nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.scale, self.rate = 8 ** -0.5, 0.1
        self.bias = nn.Parameter(torch.randn(10, 10))
        self.register_buffer("future", torch.ones(10, 10, dtype=torch.bool).triu(1))
        self.register_buffer("minus", torch.full((10, 10), -math.inf).triu(1))
'''


@dataclass(frozen=True)
class Spelling:
    """One combination."""
    product: str
    scale: str
    mask: str
    softmax: str
    dropout: str
    mask_first: bool
    projected: bool

    def source(self, name: str) -> str:
        """A class of that name: [B, S, E], or queries, keys and values [B, H, S, D] -> [B, H, S, D] or [B H, S, D]."""
        scores, output = PRODUCTS[self.product]
        before, after = SCALES[self.scale]
        steps = [[after] if after else [], MASKS[self.mask]]
        lines = ["q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)"] if self.projected else []
        lines += ["q, k, v = (t.flatten(0, 1) for t in (q, k, v))"] if self.product == "bmm" else []
        lines += [before] if before else []
        lines += [f"s = {scores}", *itertools.chain(*(reversed(steps) if self.mask_first else steps))]
        lines += [f"w = {self.softmax}", *filter(None, [DROPOUTS[self.dropout]]), f"y = {output}", "return y"]
        given = "x" if self.projected else "q, k, v"
        body = "".join(f"        {line}\n" for line in lines)
        return f"\n\nclass {name}(Attention):\n    def forward(self, {given}, mask=None):\n{body}"


_CHOICES: tuple[Collection, ...] = PRODUCTS, SCALES, MASKS, SOFTMAXES, DROPOUTS, (False, True), (False, True)
EVERY = math.prod(map(len, _CHOICES))


def spellings(count: int, seed: int = 0) -> list[Spelling]:
    """So many of all, drawn without replacement."""
    every = list(itertools.product(*_CHOICES))
    return [Spelling(*chosen) for chosen in random.Random(seed).sample(every, count)]
