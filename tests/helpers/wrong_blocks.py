"""Blocks that are wrong in one way each: what a check must catch to be worth running.

Each is step 0's block with one part exchanged. Attention and MLP are written out once more with their mistakes as
arguments; called with none of them they are right, and the tests prove that too. The bias of K is missing here on
purpose: softmax cancels it, no check can see it.
"""
import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import BlockConfig, steps


def attention(self: nn.Module, x: Tensor, hidden: int | None = 1, scale: float = 1.0, swap: bool = False,
              layout: str = "3HD", merge: str = "SHD", bias: Tensor | float = 1.0, mix: int = 0) -> Tensor:
    """Step 0's attention. `hidden`: the first diagonal the mask hides; `bias`: what the QKV bias is multiplied with;
    `layout`, `merge`: how heads are cut out of the projection, and put together again; `mix`: sequences to roll by."""
    B, S, E = x.shape
    H = self.num_heads
    sizes = {"3": 3, "H": H, "D": E // H}
    qkv = F.linear(x, self.qkv.weight, self.qkv.bias * bias).view(B, S, *(sizes[axis] for axis in layout))
    q, k, v = qkv.permute(*(("BS" + layout).index(axis) for axis in "3BHSD"))
    if swap:
        q, k = k, q
    scores = scale * q @ k.mT / math.sqrt(E // H)
    if hidden is not None:
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool, device=x.device).triu(hidden), -math.inf)
    y = scores.softmax(dim=-1) @ v.roll(mix, 0)                               # [B, H, S, D]
    y = y.permute(0, *("BHSD".index(axis) for axis in merge)).reshape(B, S, E)
    return self.proj(y)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def mlp(self: nn.Module, x: Tensor, activation=gelu_tanh) -> Tensor:
    """Step 0's MLP; `activation` is what stands between its layers."""
    return self.proj(activation(self.fc(x)))


def residuals(self: nn.Module, x: Tensor, first: str = "x", second: str = "h") -> Tensor:
    """Step 0's block; `first` and `second` say what each branch is added to."""
    values = {"x": x, "ln_1": self.ln_1(x), "nothing": torch.zeros_like(x)}
    h = values[first] + self.attn(self.ln_1(x))
    values |= {"h": h, "ln_2": self.ln_2(h)}
    return values[second] + self.mlp(self.ln_2(h))


def exchange(path: str, function, **mistakes):
    """Give the submodule at `path` the forward `function` with these mistakes."""
    def change(block: nn.Module):
        module = block.get_submodule(path)
        module.forward = functools.partial(function, module, **mistakes)
    return change


def drop(name: str, value: float = 0.0):
    """Compute with `value` in place of the parameter `name`, which stays and gets no gradient."""
    def change(block: nn.Module):
        path, _, leaf = name.rpartition(".")
        module = block.get_submodule(path)
        parameter = module._parameters.pop(leaf)
        module.register_parameter(f"{leaf}_unused", parameter)
        setattr(module, leaf, torch.full_like(parameter, value).detach())
        block.parameter_names = {name: f"{name}_unused"}
    return change


def drop_qkv_bias(part: int):
    """Drop the bias of Q (0) or V (2)."""
    def change(block: nn.Module):
        keep = torch.ones_like(block.attn.qkv.bias.detach())
        keep.chunk(3)[part].zero_()
        exchange("attn", attention, bias=keep)(block)
    return change


class LastAlone(torch.autograd.Function):
    """A linear layer that does the last sequence of the batch alone: in its forward, or in its weights' gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, where):
        ctx.save_for_backward(x, weight)
        ctx.where = where
        y = F.linear(x, weight, bias)
        if where == "forward":
            y[:-1] = 0
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if ctx.where == "forward":
            dy = torch.cat((torch.zeros_like(dy[:-1]), dy[-1:]))
        last = dy[-1:]
        return dy @ weight, last.flatten(0, 1).T @ x[-1:].flatten(0, 1), last.sum((0, 1)), None


def lazy(where: str):
    """Linear layers of which the check of one sequence sees nothing wrong."""
    def change(block: nn.Module):
        for module in (m for m in block.modules() if isinstance(m, nn.Linear)):
            module.forward = lambda x, module=module: LastAlone.apply(x, module.weight, module.bias, where)
    return change


def epsilon(value: float):
    def change(block: nn.Module):
        block.ln_1.eps = block.ln_2.eps = value
    return change


RIGHT = {
    "attention, no mistake": exchange("attn", attention),
    "mlp, no mistake": exchange("mlp", mlp),
    "residuals, no mistake": exchange("", residuals),
}
WRONG = {
    "mask off": exchange("attn", attention, hidden=None),
    "mask off by one": exchange("attn", attention, hidden=2),
    "softmax scale doubled": exchange("attn", attention, scale=2.0),
    "softmax not scaled": exchange("attn", attention, scale=8 ** 0.5),         # CONFIG's D is 8
    "Q and K swapped": exchange("attn", attention, swap=True),
    "QKV interleaved per head": exchange("attn", attention, layout="H3D"),
    "heads interleaved": exchange("attn", attention, layout="3DH"),
    "heads merged in the wrong order": exchange("attn", attention, merge="SDH"),
    "heads merged without transposing": exchange("attn", attention, merge="HSD"),
    "V from the next sequence of the batch": exchange("attn", attention, mix=1),
    "exact GELU": exchange("mlp", mlp, activation=F.gelu),
    "ReLU": exchange("mlp", mlp, activation=F.relu),
    "no first LayerNorm": exchange("ln_1", lambda self, x: x),
    "no second LayerNorm": exchange("ln_2", lambda self, x: x),
    "epsilon 1e-6": epsilon(1e-6),
    "epsilon 1e-12": epsilon(1e-12),
    "first residual after its LayerNorm": exchange("", residuals, first="ln_1"),
    "second residual after its LayerNorm": exchange("", residuals, second="ln_2"),
    "second residual from the block's input": exchange("", residuals, second="x"),
    "no first residual": exchange("", residuals, first="nothing"),
    "bias of Q dropped": drop_qkv_bias(0),
    "bias of V dropped": drop_qkv_bias(2),
    **{f"{name} dropped": drop(name) for name in
       ("attn.proj.bias", "mlp.fc.bias", "mlp.proj.bias", "ln_1.bias", "ln_2.bias")},
    **{f"{name} taken for 1": drop(name, 1.0) for name in ("ln_1.weight", "ln_2.weight")},
}

CONFIG = BlockConfig(batch_size=2, seq_len=17, hidden_size=32, num_heads=4, amp_dtype=None)


def build(change, values: dict[str, Tensor], device="cpu", config: BlockConfig = CONFIG, step: int = 0) -> nn.Module:
    """Step `step`'s block on `values`, then changed by one entry of RIGHT or WRONG."""
    block = steps.load(step).build(config, values, device)
    change(block)
    return block
