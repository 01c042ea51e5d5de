"""The block from other libraries, with the canonical parameters."""
import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import parameters, steps
from common.block.config import LAYER_NORM_EPS, BlockConfig
from common.block.precision import compile_gradient_casts, float32_matmul_precision
from common.runtime import compiler, engine


def names_of(prefixes: dict[str, str]) -> dict[str, str]:
    """Canonical name -> a library's own, from how both begin: each has a weight and a bias."""
    return {f"{ours}.{kind}": theirs + kind for ours, theirs in prefixes.items() for kind in ("weight", "bias")}


class Peer(nn.Module):
    """Another library's layer with the canonical parameters; x [B, S, E] -> [B, S, E], under autocast as a step is."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config

    @float32_matmul_precision("high")
    def __call__(self, x: Tensor) -> Tensor:
        mixed = self.config.amp_dtype is not None and x.dtype == torch.float32
        with torch.autocast(x.device.type, self.config.amp_dtype, enabled=mixed):
            return super().__call__(x)


class EncoderLayer(Peer):
    """torch.nn.TransformerEncoderLayer, pre-LN and causal."""

    parameter_names = names_of({"ln_1": "layer.norm1.", "attn.qkv": "layer.self_attn.in_proj_",
                                "attn.proj": "layer.self_attn.out_proj.", "ln_2": "layer.norm2.",
                                "mlp.fc": "layer.linear1.", "mlp.proj": "layer.linear2."})

    def __init__(self, config: BlockConfig, dtype: torch.dtype):
        super().__init__(config)
        self.layer = nn.TransformerEncoderLayer(
            config.hidden_size, config.num_heads, config.ffn_hidden_size, config.dropout,
            activation=functools.partial(F.gelu, approximate="tanh"), layer_norm_eps=LAYER_NORM_EPS, batch_first=True,
            norm_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(config.seq_len), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, src_mask=self.mask, is_causal=True)


class GPT2(Peer):
    """transformers' GPT2Block, attention by scaled_dot_product_attention."""

    parameter_names = names_of({"ln_1": "layer.ln_1.", "attn.qkv": "layer.attn.c_attn.",
                                "attn.proj": "layer.attn.c_proj.", "ln_2": "layer.ln_2.",
                                "mlp.fc": "layer.mlp.c_fc.", "mlp.proj": "layer.mlp.c_proj."})
    transposed = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")       # Conv1D: [in, out]

    def __init__(self, config: BlockConfig, dtype: torch.dtype):
        super().__init__(config)
        from transformers import GPT2Config, __version__  # optional, as all other libraries here
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block
        self.engine = engine.Engine("transformers", __version__)
        settings: dict[str, Any] = {                   # it takes more than its signature names
            "n_positions": config.seq_len, "n_embd": config.hidden_size, "n_head": config.num_heads,
            "n_inner": config.ffn_hidden_size, "layer_norm_epsilon": LAYER_NORM_EPS, "attn_pdrop": config.dropout,
            "resid_pdrop": 0.0, "attn_implementation": "sdpa"}
        self.layer = GPT2Block(GPT2Config(**settings), layer_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


class TransformerLayer(Peer):
    """Transformer Engine's layer; y is [B, S, E] in `output_dtype`. With `fp8` its weights are quantized every call.

    `tuned`: its LayerNorm is what step 4's is, else Transformer Engine's own.
    """

    parameter_names = names_of({"ln_1": "layer.self_attention.layernorm_qkv.layer_norm_",
                                "attn.qkv": "layer.self_attention.layernorm_qkv.",
                                "attn.proj": "layer.self_attention.proj.", "ln_2": "layer.layernorm_mlp.layer_norm_",
                                "mlp.fc": "layer.layernorm_mlp.fc1_", "mlp.proj": "layer.layernorm_mlp.fc2_"})
    fresh = None           # as in step 4: quantize the weights at every call

    def __init__(self, config: BlockConfig, dtype: torch.dtype, output_dtype: torch.dtype, fp8: bool,
                 tuned: bool = False):
        super().__init__(config)
        te = engine.transformer_engine()
        self.output_dtype, self.fp8, self.tuned = output_dtype, fp8, tuned
        self.engine = engine.Engine(engine.TRANSFORMER_ENGINE, engine.version())
        self.recipe, self.autocast = te.quantization.DelayedScaling(), te.autocast
        self.layer = te.TransformerLayer(
            config.hidden_size, config.ffn_hidden_size, config.num_heads, layernorm_epsilon=LAYER_NORM_EPS,
            hidden_dropout=0.0, attention_dropout=config.dropout, self_attn_mask_type="causal", fuse_qkv_params=True,
            qkv_weight_interleaved=False, attn_input_format="bshd", params_dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        choose_layer_norm(self.tuned)
        with self.autocast(enabled=self.fp8, recipe=self.recipe):
            y = self.layer(x)
        return y.to(self.output_dtype)


def choose_layer_norm(tuned: bool) -> None:
    """From here on Transformer Engine normalises as step 4 has it (`tuned`), or by its own kernels.

    Its setting is one of the whole process, taken from environment variables at the first use. So each of its blocks
    here sets it whenever it is called, by the functions that override those variables; its backward finds it so.
    """
    engine.ask_for_cudnn_layer_norm(torch.device("cuda"))      # in a process without a step 4 nobody else has
    for direction, set_direction in _layer_norm_setters().items():
        set_direction(ctypes.c_bool(tuned and os.environ.get(f"NVTE_NORM_{direction}_USE_CUDNN") == "1"))


@functools.cache
def _layer_norm_setters() -> dict:
    library = ctypes.CDLL(None)            # Transformer Engine has loaded its own for all to see
    return {direction: library[f"nvte_enable_cudnn_norm_{direction.lower()}"] for direction in ("FWD", "BWD")}


def build_step_4(config: BlockConfig, values: dict[str, Tensor], device) -> nn.Module:
    """Step 4, whose LayerNorm is its own whatever else of Transformer Engine runs in this process."""
    block: Any = steps.load(4).build(config, values, device)
    if not block.engine.is_emulated:
        block.register_forward_pre_hook(lambda *_: choose_layer_norm(True))
    return block


def build(kind: Callable, compiled: bool, config: BlockConfig, values: dict[str, Tensor], device, casts: bool = False
          ) -> nn.Module:
    """A peer with the canonical parameters, compiled in place as step 3 is where `compiled`; `casts`: as in step 4."""
    with torch.device(device):
        block = kind(config, values["mlp.fc.weight"].dtype)
    if compiled:
        compiler.compile_in_place(block)
    if casts:
        compile_gradient_casts(block)
    return parameters.load(block, values, device)


def keep_residual_in_16_bits(block: nn.Module, config: BlockConfig) -> None:
    """From here on the block's residual is in autocast's dtype, as step 4's is; y comes back in the dtype of x."""
    plain = block.forward

    def forward(x: Tensor) -> Tensor:
        return plain(x.to(config.amp_dtype)).to(x.dtype)

    block.forward = forward


def build_torchao(recipe: str, config: BlockConfig, values: dict[str, Tensor], device, residual_in_16_bits: bool = False
                  ) -> nn.Module:
    """Step 2's block, its linear layers converted to torchao's float8 training, compiled."""
    from torchao import __version__
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    block: Any = steps.load(2).build(config, values, device)
    convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(recipe))
    if residual_in_16_bits:
        keep_residual_in_16_bits(block, config)
    compiler.compile_in_place(block)
    block.engine = engine.Engine("torchao", __version__)
    return block
