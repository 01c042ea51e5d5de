"""GPT-2, Llama and ResNet-50 as a person writes them for speed: what the assistant's ladder is held against.

    python -m benchmarks assistant benchmarks/examples/public.py:gpt2

Each has the parameters of the public model, takes what that takes, and is compiled. BF16 autocast leaves the residual
stream in FP32; here it is in BF16, too, so each pass over it moves half the bytes.
"""
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MULTIPLE = 128                             # of which a matmul's sizes should be


@contextmanager
def _in_bf16(weight: Tensor) -> Iterator[None]:
    """BF16 autocast, where the parameters are in FP32: a copy in FP64 says what the model means."""
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=weight.dtype == torch.float32):
        yield


def _narrow(x: Tensor) -> Tensor:
    """A residual stream that begins in FP32 goes on in BF16."""
    return x.bfloat16() if x.dtype == torch.float32 else x


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)                # [B, H, S, D]


class GPT2(nn.Module):
    """transformers' GPT2LMHeadModel for training without dropout. Tokens [B, S] -> logits [B, S, V].

    Its vocabulary of 50,257, which no tile of a matmul divides, is padded with zeros in the last matmul.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model: Any = model

    def forward(self, input_ids: Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions
        decoder = self.model.transformer
        table = decoder.wte.weight
        with _in_bf16(table):
            x = _narrow(F.embedding(input_ids, table) + decoder.wpe.weight[:input_ids.size(1)])
            for block in decoder.h:
                x = x + self._attention(block.attn, block.ln_1(x))
                x = x + _projected(F.gelu(_projected(block.ln_2(x), block.mlp.c_fc), approximate="tanh"),
                                   block.mlp.c_proj)
            padded = F.pad(table, (0, 0, 0, -len(table) % MULTIPLE))
            logits = F.linear(decoder.ln_f(x), padded)[..., :len(table)]
        return CausalLMOutputWithCrossAttentions(logits=logits)

    def _attention(self, attention: Any, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, attention.num_heads) for part in _projected(x, attention.c_attn).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return _projected(mixed.transpose(1, 2).flatten(2), attention.c_proj)


def _projected(x: Tensor, projection: Any) -> Tensor:
    """By a Conv1D of transformers, whose weight is [in, out]."""
    return F.linear(x, projection.weight.t(), projection.bias)


class Llama(nn.Module):
    """transformers' LlamaForCausalLM for training. Tokens [B, S] -> logits [B, S, V].

    Keys and values are not repeated for the query heads that share them, and one matmul makes queries, keys and values,
    another what goes into SwiGLU.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model: Any = model

    def forward(self, input_ids: Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast
        decoder, config = self.model.model, self.model.config
        table = decoder.embed_tokens.weight
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        angles = positions[:, None].to(table.dtype) * decoder.rotary_emb.inv_freq.to(table.dtype)
        with _in_bf16(table):
            x = _narrow(F.embedding(input_ids, table))
            cosine, sine = (t.repeat(1, 2).to(x.dtype) for t in (angles.cos(), angles.sin()))
            for layer in decoder.layers:
                y = _rms_norm(x, layer.input_layernorm)
                x = x + self._attention(layer.self_attn, y, cosine, sine, config)
                y = _rms_norm(x, layer.post_attention_layernorm)
                gate, up = F.linear(y, torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])).chunk(2, -1)
                x = x + layer.mlp.down_proj(F.silu(gate) * up)
            logits = self.model.lm_head(_rms_norm(x, decoder.norm))
        return CausalLMOutputWithPast(logits=logits)

    def _attention(self, attention: Any, x: Tensor, cosine: Tensor, sine: Tensor, config: Any) -> Tensor:
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        parts = F.linear(x, torch.cat([each.weight for each in projections])).split(
            [each.out_features for each in projections], -1)
        q, k, v = (_heads(part, part.size(-1) // attention.head_dim) for part in parts)
        q, k = (t * cosine + _rotated(t) * sine for t in (q, k))
        grouped = config.num_key_value_heads != config.num_attention_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return attention.o_proj(mixed.transpose(1, 2).flatten(2))


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.variance_epsilon)


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class ResNet(nn.Module):
    """torchvision's ResNet in channels-last and BF16 autocast. Images [B, 3, H, W] -> logits [B, classes]."""

    def __init__(self, model: nn.Module):
        """Of a copy: the weights of the model itself keep their layout."""
        super().__init__()
        self.model = copy.deepcopy(model).to(memory_format=torch.channels_last)       # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        with _in_bf16(next(self.model.parameters())):
            return self.model(x.contiguous(memory_format=torch.channels_last))


def compiled(model: nn.Module) -> nn.Module:
    """One of these, compiled in place; without CUDA graphs, which the assistant captures itself."""
    model.compile()
    return model
