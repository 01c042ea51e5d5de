"""Pairs of modules: the same function written in two ways, and the same function with a mistake in it.

`RIGHT` and `WRONG` go from a name to what makes a `Pair` in a dtype. The mistakes are those that people make when they
write a block faster. `LIBRARY` has pairs of whole models of transformers and torchvision, small, by configuration.
"""
import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

B, S, E, H = 2, 12, 16, 4                  # batch, sequence, width, heads
VOCABULARY = 24


@dataclass(frozen=True)
class Pair:
    """What is judged, what it is held against, and what both are called with."""
    candidate: Callable
    reference: Callable
    inputs: Any

    def to(self, device: torch.device) -> "Pair":
        """The same on that device. Its modules move there themselves."""
        for call in (self.candidate, self.reference):
            if isinstance(call, nn.Module):
                call.to(device)
        return Pair(self.candidate, self.reference, pytree.tree_map_only(Tensor, lambda t: t.to(device), self.inputs))


Make = Callable[[torch.dtype], Pair]


# -------------------------------------------------------------------------------------------------------- a GPT's parts


class Attention(nn.Module):
    """Causal self-attention, [B, S, E] -> [B, S, E]. `core` maps q, k, v [B, H, S, D] to [B, H, S, D]."""

    def __init__(self, core: Callable, dropout: float = 0.0):
        super().__init__()
        self.core, self.dropout = core, dropout
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, E // H).permute(2, 0, 3, 1, 4)
        y = self.core(q, k, v, self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).flatten(2))


def by_hand(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, scale: float | None = None, diagonal: int = 1,
            keep_future: bool = False) -> Tensor:
    """Attention as it is taught; the last three make it wrong."""
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(diagonal)
    hidden = ~future if keep_future else future
    return F.dropout(scores.masked_fill(hidden, -math.inf).softmax(-1), dropout) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


class LayerNorm(nn.Module):
    """By hand, over the last dimension."""

    def __init__(self, eps: float = 1e-5, unbiased: bool = False):
        super().__init__()
        self.eps, self.unbiased = eps, unbiased
        self.weight, self.bias = nn.Parameter(torch.ones(E)), nn.Parameter(torch.zeros(E))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.var(-1, unbiased=self.unbiased, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) * (variance + self.eps).rsqrt() * self.weight + self.bias


class MLP(nn.Module):
    """[B, S, E] -> [B, S, E]."""

    def __init__(self, approximate: str = "tanh"):
        super().__init__()
        self.approximate = approximate
        self.fc, self.proj = nn.Linear(E, 4 * E), nn.Linear(4 * E, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate=self.approximate))


class Block(nn.Module):
    """A transformer block of these parts."""

    def __init__(self, core: Callable = by_hand, norm: Callable = LayerNorm, mlp: Callable = MLP, dropout: float = 0.0):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(), Attention(core, dropout), norm(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token numbers [B, S] -> logits [B, S, VOCABULARY], the head tied to the embedding."""

    def __init__(self, core: Callable = by_hand, tied: bool = True):
        super().__init__()
        self.wte, self.block, self.head = nn.Embedding(VOCABULARY, E), Block(core), nn.Linear(E, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight
        if not tied:
            self.head.weight = nn.Parameter(self.wte.weight.detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.wte(tokens)))


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and ReLU, [B, 8, height, width] -> the same."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.conv_1, self.conv_2 = (nn.Conv2d(8, 8, 3, padding=1, bias=bias) for _ in range(2))
        self.bn_1, self.bn_2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn_2(self.conv_2(F.relu(self.bn_1(self.conv_1(x))))))


def random(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With every parameter and statistic random: zero biases and unit gains would hide what is wrong with them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.3 * torch.rand(buffer.shape, generator=generator))
    return module.to(dtype)


def alike(reference: nn.Module, candidate: nn.Module, dtype: torch.dtype, inputs: Any) -> Pair:
    """Both with the reference's random values, as far as names agree."""
    random(reference, dtype)
    candidate.to(dtype).load_state_dict(reference.state_dict(), strict=False)
    return Pair(candidate, reference, inputs)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(size: int = VOCABULARY) -> Tensor:
    return torch.randint(size, (B, S), generator=torch.Generator().manual_seed(0))


def changed_block(**parts: Any) -> Make:
    """A block with other parts, held against the block by hand."""
    def make(dtype: torch.dtype) -> Pair:
        torch.manual_seed(0)
        return alike(Block(), Block(**parts), dtype, tensor(B, S, E, dtype=dtype))
    return make


def changed_function(candidate: Callable, reference: Callable, *shape: int) -> Make:
    def make(dtype: torch.dtype) -> Pair:
        return Pair(candidate, reference, tensor(*(shape or (B, S, E)), dtype=dtype))
    return make


# ----------------------------------------------------------------------------------------------------------- right ones


def _residual_blocks(train: bool, bias: bool = False, channels_last: bool = False) -> Make:
    def make(dtype: torch.dtype) -> Pair:
        torch.manual_seed(0)
        pair = alike(ResidualBlock(bias), ResidualBlock(bias), dtype, tensor(8, 8, 6, 6, dtype=dtype))
        for module in (pair.candidate, pair.reference):
            module.train(train)                                             # type: ignore[attr-defined]
        if channels_last:
            pair.candidate.to(memory_format=torch.channels_last)            # type: ignore[attr-defined]
        return pair
    return make


def _frozen_and_unused(dtype: torch.dtype) -> Pair:
    torch.manual_seed(0)
    reference, candidate = Block(), Block(fused)
    for module in (reference, candidate):
        module.ln_1.weight.requires_grad_(False)
        module.unused = nn.Linear(2, 2)
    return alike(reference, candidate, dtype, tensor(B, S, E, dtype=dtype))


def _tied(dtype: torch.dtype) -> Pair:
    torch.manual_seed(0)
    return alike(GPT(), GPT(fused), dtype, tokens())


class LSTM(nn.Module):
    """By hand, one layer, with the library's names: [S, B, E] -> [S, B, E]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_ih_l0, self.weight_hh_l0 = (nn.Parameter(torch.empty(4 * E, E)) for _ in range(2))
        self.bias_ih_l0, self.bias_hh_l0 = (nn.Parameter(torch.empty(4 * E)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = c = x.new_zeros(x.size(1), E)
        states = []
        for row in x:
            gates = F.linear(row, self.weight_ih_l0, self.bias_ih_l0) + F.linear(h, self.weight_hh_l0, self.bias_hh_l0)
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states), (h[None], c[None])


def _lstm(dtype: torch.dtype) -> Pair:
    torch.manual_seed(0)
    return alike(nn.LSTM(E, E), LSTM(), dtype, tensor(S, B, E, dtype=dtype))


class _Sigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-x))


def _one_element(dtype: torch.dtype) -> Pair:
    """Logistic regression: its bias has one element."""
    torch.manual_seed(0)
    reference, candidate = nn.Sequential(nn.Linear(E, 1), nn.Sigmoid()), nn.Sequential(nn.Linear(E, 1), _Sigmoid())
    return alike(reference, candidate, dtype, tensor(32, E, dtype=dtype))


class _Centred(nn.Module):
    """Subtracts a mean that every call moves on, before a linear layer or behind it."""
    mean: Tensor

    def __init__(self, behind: bool = False):
        super().__init__()
        self.linear, self.behind = nn.Linear(E, E), behind
        self.register_buffer("mean", torch.zeros(E))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        if self.behind:
            return self.linear(x) - self.mean @ self.linear.weight.T
        return self.linear(x - self.mean)


def _moving_mean(dtype: torch.dtype) -> Pair:
    return alike(_Centred(), _Centred(behind=True), dtype, tensor(B, S, E, dtype=dtype))


def _spectral_norm(dtype: torch.dtype) -> Pair:
    """Each call in train mode goes on with the iteration that estimates the norm."""
    torch.manual_seed(0)
    reference, candidate = (nn.utils.parametrizations.spectral_norm(nn.Linear(E, E)) for _ in range(2))
    return alike(reference, candidate, dtype, tensor(B, S, E, dtype=dtype))


class _Deep(nn.Module):
    """Many ReLUs behind each other: a rounding before one moves the gradients. Split, each sum is one of two halves."""

    def __init__(self, is_split: bool = False):
        super().__init__()
        self.layers, self.is_split = nn.ModuleList(nn.Linear(E, E, bias=False) for _ in range(30)), is_split

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer.weight, Tensor)
            x = F.relu(self._product(x, layer.weight))
        return x

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        half = E // 2
        if self.is_split:
            return x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T
        return F.linear(x, weight)


def _kinks(dtype: torch.dtype) -> Pair:
    torch.manual_seed(0)
    reference, candidate = _Deep(), _Deep(is_split=True)
    for layer in reference.layers:
        assert isinstance(layer.weight, Tensor)
        nn.init.kaiming_normal_(layer.weight)
    candidate.load_state_dict(reference.state_dict())
    return Pair(candidate.to(dtype), reference.to(dtype), tensor(B, S, E, dtype=dtype))


class _Wrapped(nn.Module):
    """A module inside another."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.inner(x)}


class _AsDict(Block):
    def forward(self, x: Tensor) -> dict[str, Tensor]:                      # type: ignore[override]
        return {"y": super().forward(x)}


def _wrapped(dtype: torch.dtype) -> Pair:
    torch.manual_seed(0)
    reference, inner = random(_AsDict(), dtype), Block(fused)
    inner.to(dtype).load_state_dict(reference.state_dict())
    return Pair(_Wrapped(inner), reference, {"x": tensor(B, S, E, dtype=dtype)})


RIGHT: dict[str, Make] = {
    "a block with SDPA": changed_block(core=fused),
    "the library's LayerNorm": changed_block(norm=lambda: nn.LayerNorm(E)),
    "a block with SDPA and dropout": lambda dtype: _with_dropout(fused, 0.1, dtype),
    "a residual block in train mode": _residual_blocks(train=True),
    "a residual block in eval mode": _residual_blocks(train=False),
    "channels_last": _residual_blocks(train=True, channels_last=True),
    "a convolution's bias before BatchNorm": _residual_blocks(train=True, bias=True),
    "frozen and unused parameters": _frozen_and_unused,
    "a head tied to the embedding": _tied,
    "an LSTM by hand": _lstm,
    "a bias of one element": _one_element,
    "a module in a wrapper, dicts": _wrapped,
    "a mean that every call moves": _moving_mean,
    "spectral normalization": _spectral_norm,
    "thirty ReLUs behind each other": _kinks,
}


def _with_dropout(core: Callable, rate: float, dtype: torch.dtype) -> Pair:
    torch.manual_seed(0)
    return alike(Block(dropout=0.1), Block(core, dropout=rate), dtype, tensor(B, S, E, dtype=dtype))


# ----------------------------------------------------------------------------------------------------------- wrong ones


class _Backward(torch.autograd.Function):
    """GELU whose gradient goes through `change`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable) -> Tensor:
        ctx.save_for_backward(x)
        ctx.change = change
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:           # type: ignore[override]
        x, = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            gradient, = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, dy)
        return ctx.change(gradient), None


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_whose_gradient(change: Callable) -> Make:
    return changed_function(lambda x: _Backward.apply(x, change), gelu)


def _repeated_heads(repeat: Callable) -> Callable:
    """Attention in which two heads of k and v serve four of q."""
    def attention(q: Tensor, kv: Tensor) -> Tensor:
        k, v = (repeat(t) for t in kv.unbind(1))
        return by_hand(q, k, v)
    return attention


def _wrong_repeat(dtype: torch.dtype) -> Pair:
    inputs = tensor(B, 4, S, 8, dtype=dtype), tensor(B, 2, 2, S, 8, dtype=dtype, seed=1)
    return Pair(_repeated_heads(lambda t: t.repeat(1, 2, 1, 1)),
                _repeated_heads(lambda t: t.repeat_interleave(2, 1)), inputs)


class _Transposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def _transposed(dtype: torch.dtype) -> Pair:
    torch.manual_seed(0)
    return alike(nn.Linear(E, E), _Transposed(E, E), dtype, tensor(B, S, E, dtype=dtype))


class _Stale(nn.BatchNorm2d):
    """Always by its running statistics, which stay what they are."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class _NotUpdated(nn.BatchNorm2d):
    """By the batch's statistics, without keeping them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


def _batch_norm(kind: type[nn.BatchNorm2d]) -> Make:
    def make(dtype: torch.dtype) -> Pair:
        return alike(nn.BatchNorm2d(8), kind(8), dtype, tensor(8, 8, 6, 6, dtype=dtype))
    return make


def _untied(dtype: torch.dtype) -> Pair:
    torch.manual_seed(0)
    return alike(GPT(), GPT(tied=False), dtype, tokens())


class _Lost(MLP):
    """The weight of `fc` gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(gelu(F.linear(x, self.fc.weight.detach(), self.fc.bias)))


class _NoGradInside(MLP):
    """A wrapper whose first half runs under no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.fc(x)
        return self.proj(gelu(h))


def _other_mlp(kind: type[MLP]) -> Make:
    def make(dtype: torch.dtype) -> Pair:
        torch.manual_seed(0)
        return alike(MLP(), kind(), dtype, tensor(B, S, E, dtype=dtype))
    return make


def _detached_keys(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    return by_hand(q, k.detach(), v, dropout)


def _in_place(x: Tensor) -> Tensor:
    y = gelu(x)
    with torch.no_grad():
        x.mul_(2)
    return y


class _Overwriting(nn.Module):
    """Writes its output into memory that the next call writes to again."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = gelu(x)
        if torch.is_grad_enabled():
            return y
        if self.kept is None or self.kept.dtype != y.dtype:
            self.kept = torch.empty_like(y)
        return self.kept.copy_(y)


_OTHER = {torch.float16: torch.bfloat16}

WRONG: dict[str, Make] = {
    "the polarity of a mask": changed_block(core=functools.partial(by_hand, keep_future=True)),
    "the scale left out": changed_block(core=functools.partial(by_hand, scale=1.0)),
    "1/D for a scale": changed_block(core=lambda q, k, v, p: by_hand(q, k, v, p, scale=1 / q.size(-1))),
    "the diagonal of a mask": changed_block(core=functools.partial(by_hand, diagonal=2)),
    "no mask": changed_block(core=lambda q, k, v, p: F.scaled_dot_product_attention(q, k, v)),
    "dropout that is gone": lambda dtype: _with_dropout(fused, 0.0, dtype),
    "dropout of twice the rate": lambda dtype: _with_dropout(fused, 0.2, dtype),
    "heads repeated in another order": _wrong_repeat,
    "an epsilon of 1e-6": changed_block(norm=lambda: LayerNorm(eps=1e-6)),
    "the unbiased variance": changed_block(norm=lambda: LayerNorm(unbiased=True)),
    "GELU without tanh": changed_block(mlp=lambda: MLP("none")),
    "a transposed weight": _transposed,
    "stale statistics of BatchNorm": _batch_norm(_Stale),
    "statistics that are not kept": _batch_norm(_NotUpdated),
    "a head that is not tied": _untied,
    "another dtype": changed_function(lambda x: gelu(x).to(_OTHER.get(x.dtype, torch.float16)), gelu),
    "a parameter's gradient lost": _other_mlp(_Lost),
    "no_grad inside": _other_mlp(_NoGradInside),
    "keys detached": changed_block(core=_detached_keys),
    "a gradient halved": _gelu_whose_gradient(lambda g: g / 2),
    "a gradient of zeros": _gelu_whose_gradient(torch.zeros_like),
    "a gradient off by 3 %": _gelu_whose_gradient(lambda g: 1.03 * g),
    "a gradient of another sequence": _gelu_whose_gradient(lambda g: g.roll(1, 0)),
    "a detached input": changed_function(lambda x: gelu(x.detach()), gelu),
    "its input changed in place": changed_function(_in_place, gelu),
    "an output that is written over": lambda dtype: Pair(_Overwriting(), gelu, tensor(B, S, E, dtype=dtype)),
    "a token number off by one": changed_function(lambda x: x.argmax(-1) + (x[..., 0] > 1.5), lambda x: x.argmax(-1)),
}


# --------------------------------------------------------------------------------------------------------- of libraries


def _of_transformers(name: str, kind: str, inputs: Callable[[], dict[str, Tensor]], **settings: Any) -> Make:
    """SDPA against eager attention."""
    def make(dtype: torch.dtype) -> Pair:
        import transformers
        config = getattr(transformers, f"{name}Config")(**settings)
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}{kind}")
        reference = model._from_config(config, attn_implementation="eager")
        candidate = model._from_config(copy.deepcopy(config), attn_implementation="sdpa")
        given = {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs().items()}
        return alike(reference.train(), candidate.train(), dtype, given)
    return make


def _padded() -> dict[str, Tensor]:
    mask = torch.ones(B, S, dtype=torch.long)
    mask[0, S - 4:] = 0
    return {"input_ids": tokens(64), "attention_mask": mask}


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LIBRARY: dict[str, Make] = {
    "GPT-2": _of_transformers("GPT2", "LMHeadModel", lambda: {"input_ids": tokens(64)}, n_embd=32, n_layer=2, n_head=4,
                              vocab_size=64, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                              use_cache=False),
    "Llama": _of_transformers("Llama", "ForCausalLM", lambda: {"input_ids": tokens(64)}, num_key_value_heads=2,
                              max_position_embeddings=32, use_cache=False, vocab_size=64, **_SMALL),
    "BERT with padding": _of_transformers("Bert", "Model", _padded, max_position_embeddings=32, vocab_size=64, **_SMALL,
                                          **_NO_DROPOUT),
    "ViT": _of_transformers("ViT", "Model", lambda: {"pixel_values": tensor(B, 3, 16, 16)}, image_size=16, patch_size=4,
                            **_SMALL, **_NO_DROPOUT),
}


def resnet_50(train: bool, channels_last: bool) -> Make:
    """torchvision's, held against itself in another memory format."""
    def make(dtype: torch.dtype) -> Pair:
        import torchvision
        torch.manual_seed(0)
        models = [torchvision.models.resnet50().train(train) for _ in range(2)]
        pair = alike(models[0], models[1], dtype, tensor(8 if train else 2, 3, 32, 32, dtype=dtype))
        if channels_last:
            pair.candidate.to(memory_format=torch.channels_last)            # type: ignore[attr-defined]
        return pair
    return make
