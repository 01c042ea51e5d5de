"""Step 4: the same block from Transformer Engine's modules, its matmuls in FP8.

Inputs and weights are scaled by their largest recent values (delayed scaling) and rounded to 8 bits, E4M3 in the
forward and E5M2 for gradients: LayerNorm (cuDNN's) and GELU round what they write, all else takes a pass of its own.
As in Transformer Engine's own layer, the residual is in autocast's 16 bits; y comes back in the dtype of x.

    python 4_transformer_engine.py
"""
from types import ModuleType

from common import BlockConfig, parameters
from common.block.config import LAYER_NORM_EPS
from common.block.precision import compile_gradient_casts, float32_matmul_precision
from common.run import run
from common.runtime import engine

import torch
from torch import Tensor, nn


def fork(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in `dtype` for the residual and for the branch, written twice: then one pass adds and casts their gradients."""
    return x.to(dtype), x.to(dtype)


def add(residual: Tensor, branch: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum in `dtype`. Compiled it is one pass over memory; eager PyTorch needs one to add and one to cast."""
    return (residual + branch).to(dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention behind its LayerNorm, [B, S, E] -> [B, S, E]."""

    def __init__(self, config: BlockConfig, te: ModuleType, dtype: torch.dtype):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = te.LayerNormLinear(config.hidden_size, 3 * config.hidden_size, LAYER_NORM_EPS, params_dtype=dtype)
        self.split = te.utils.SplitAlongDim.apply        # its backward finds dQ, dK, dV in one tensor: no concatenation
        self.core = te.DotProductAttention(config.num_heads, config.head_dim, attention_dropout=config.dropout,
                                           qkv_format="bshd", attn_mask_type="causal")
        self.proj = te.Linear(config.hidden_size, config.hidden_size, params_dtype=dtype)

    def forward(self, x: Tensor, fresh: bool | None) -> Tensor:
        B, S, E = x.shape
        qkv = self.qkv(x, is_first_microbatch=fresh).view(B, S, 3 * self.num_heads, -1)    # [B, S, 3H, D]
        q, k, v = self.split(qkv, 2, [self.num_heads] * 3)                                 # [B, S, H, D] each
        return self.proj(self.core(q, k, v), is_first_microbatch=fresh)


class Block(nn.Module):
    """One pre-LN transformer block; x and the result are [B, S, E], in the dtype of the parameters."""

    parameter_names = {  # canonical -> Transformer Engine's; attn.qkv and attn.proj have the same names in both
        "ln_1.weight": "attn.qkv.layer_norm_weight",
        "ln_1.bias": "attn.qkv.layer_norm_bias",
        "ln_2.weight": "mlp.layer_norm_weight",
        "ln_2.bias": "mlp.layer_norm_bias",
        "mlp.fc.weight": "mlp.fc1_weight",
        "mlp.fc.bias": "mlp.fc1_bias",
        "mlp.proj.weight": "mlp.fc2_weight",
        "mlp.proj.bias": "mlp.fc2_bias",
    }

    def __init__(self, config: BlockConfig, te: ModuleType, dtype: torch.dtype, recipe):
        super().__init__()
        self.config = config
        self.amp_dtype = config.amp_dtype
        self.recipe = recipe
        self.autocast = te.autocast
        self.fresh = True if config.fp8_weights == "cached" else None    # None: quantize the weights at every call
        self.attn = Attention(config, te, dtype)
        self.mlp = te.LayerNormMLP(config.hidden_size, config.ffn_hidden_size, LAYER_NORM_EPS, activation="gelu",
                                   params_dtype=dtype)
        self.mlp.gemm_gelu_fusion = True                                 # GELU and its cast ride on the matmul before

    @float32_matmul_precision("high")      # TF32, in the backward too
    def __call__(self, x: Tensor) -> Tensor:
        fp8 = self.amp_dtype is not None and x.dtype != torch.float64
        mixed = fp8 and x.dtype == torch.float32
        with torch.autocast(x.device.type, self.amp_dtype, enabled=mixed), self.autocast(fp8, recipe=self.recipe):
            return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.amp_dtype is None or x.dtype != torch.float32:
            h = branch = x
        elif torch.is_grad_enabled():
            h, branch = self.fork(x, self.amp_dtype)                     # from here on the residual is in 16 bits
        else:
            h = branch = x.to(self.amp_dtype)
        h = h + self.attn(branch, self.fresh)
        return self.add(h, self.mlp(h, is_first_microbatch=self.fresh), x.dtype)


def build(config: BlockConfig, values: dict[str, Tensor], device: torch.device | str) -> Block:
    """The block on `device`, with a copy of the canonical parameters `values` in the dtype they come in.

    `block.engine` says which engine it runs on: Transformer Engine, or its emulation and why.
    """
    te, chosen = engine.choose(config, values, device)
    dtype = values["mlp.fc.weight"].dtype
    recipe = te.quantization.DelayedScaling(fp8_dpa=config.fp8_attention)
    with torch.device(device), te.quantized_model_init(enabled=config.fp8_weights == "kept", recipe=recipe):
        block = Block(config, te, dtype, recipe)
    block.engine, block.fork, block.add = chosen, fork, add
    if torch.device(device).type == "cuda":
        torch._dynamo.config.recompile_limit = 1024          # its 8 count over all blocks of a process
        block.fork = torch.compile(fork, dynamic=False)
        block.add = torch.compile(add, dynamic=False)
        compile_gradient_casts(block)
    return parameters.load(block, values, device)


if __name__ == "__main__":
    run(__file__)
