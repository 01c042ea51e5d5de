"""Transformer Engine's modules in plain PyTorch, with FP8 emulated: its numerics on any machine, never its speed.

The interface is the part of `transformer_engine.pytorch` that step 4 uses, under the same names. Every matmul rounds
its operands to FP8 as the hardware would be given them (E4M3 for inputs and weights, E5M2 for gradients, per-tensor
delayed scaling over the same state) and multiplies the rounded values in FP32, which is exact per product.
Without FP8 (autocast off) the modules compute in the dtype of their parameters.
"""
import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class DelayedScaling:
    """Scales from the largest magnitude of the last `amax_history_len` calls. Defaults as Transformer Engine's."""
    amax_history_len: int = 1024
    fp8_dpa: bool = False


class _Scaling:
    """Scale and history of several tensors that share one FP8 format, laid out as Transformer Engine's fp8_meta.

    scale: [n]; amax_history: [amax_history_len, n], row 0 the running maximum since the last update.
    """

    def __init__(self, dtype: torch.dtype, count: int, history: int, device: torch.device):
        self.dtype = dtype
        self.scale = torch.ones(count, device=device)
        self.amax_history = torch.zeros(history, count, device=device)

    def quantize(self, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """x -> (its FP8 values as FP32, scaled up; what to divide them by), with the scale of earlier calls."""
        amax = x.detach().abs().amax().float()
        self.amax_history[0, index] = torch.maximum(self.amax_history[0, index], amax)
        scale = self.scale[index].clone()
        return _round_to(self.dtype, x.float() * scale), scale

    def update(self) -> None:
        """Take new scales from the history, and open a new row in it."""
        amax = self.amax_history.amax(0)
        scale = torch.full_like(amax, torch.finfo(self.dtype).max) / amax      # a number / amax would round twice
        scale = torch.where((amax > 0) & amax.isfinite(), scale, self.scale)
        self.scale = scale.clamp(max=torch.finfo(torch.float32).max)
        self.amax_history = self.amax_history.roll(-1, 0)
        self.amax_history[0] = 0


def _round_to(dtype: torch.dtype, x: Tensor) -> Tensor:
    largest = torch.finfo(dtype).max       # saturate first: what the cast does beyond it changed between versions
    return x.clamp(-largest, largest).to(dtype).float()


class _Region:
    """What te.autocast and te.quantized_model_init have set, and the modules that ran inside the former."""
    enabled = False
    recipe = DelayedScaling()
    keep_weights = False
    modules: list["_FP8Module"] = []


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: DelayedScaling | None = None):
    """Run the modules inside in FP8; on leaving, update the forward scales (as there: only with gradients on)."""
    before = _Region.enabled, _Region.recipe, _Region.modules
    _Region.enabled, _Region.recipe, _Region.modules = enabled, recipe or DelayedScaling(), []
    try:
        yield
        if enabled and torch.is_grad_enabled():
            for module in _Region.modules:
                module.fp8_meta["scaling_fwd"].update()
    finally:
        _Region.enabled, _Region.recipe, _Region.modules = before


@contextlib.contextmanager
def quantized_model_init(enabled: bool = True, recipe: DelayedScaling | None = None):
    """Modules made inside keep their weights in FP8: here, rounded once, at the first call."""
    before, _Region.keep_weights = _Region.keep_weights, enabled
    try:
        yield
    finally:
        _Region.keep_weights = before


class _Matmul(torch.autograd.Function):
    """y = Q(x) Q(weight)^T + bias, with dx and dweight from the rounded gradient.

    Products and sums are FP32; gradients are rounded to `dtype`, y to `output`.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, module: "_FP8Module", gemm: int, dtype: torch.dtype,
                output: torch.dtype, fresh: bool | None) -> Tensor:
        x_q, x_scale = module.fp8_meta["scaling_fwd"].quantize(x, 3 * gemm)
        w_q, w_scale = module.quantized_weight(weight, gemm, fresh)
        ctx.save_for_backward(x_q, w_q, x_scale, w_scale)
        ctx.module, ctx.gemm, ctx.dtype, ctx.dtypes = module, gemm, dtype, (x.dtype, weight.dtype, bias.dtype)
        ctx.region = _Region.modules if _Region.modules[0] is module and gemm == 0 else []
        with torch.autocast(x.device.type, enabled=False):
            y = F.linear(x_q, w_q) / (x_scale * w_scale)
        return (y + bias.to(dtype)).to(output)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x_q, w_q, x_scale, w_scale = ctx.saved_tensors
        dy_q, dy_scale = ctx.module.fp8_meta["scaling_bwd"].quantize(dy, 2 * ctx.gemm)
        dx = (dy_q @ w_q) / (dy_scale * w_scale)
        dweight = dy_q.flatten(0, -2).T @ x_q.flatten(0, -2) / (dy_scale * x_scale)
        dbias = dy.flatten(0, -2).float().sum(0)
        for module in ctx.region:          # this was the first module forward, so the last one backward
            module.fp8_meta["scaling_bwd"].update()
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        return (dx.to(ctx.dtype).to(x_dtype), dweight.to(ctx.dtype).to(weight_dtype),
                dbias.to(ctx.dtype).to(bias_dtype), None, None, None, None, None)


class _GELU(torch.autograd.Function):
    """GELU (tanh approximation) of a matmul's FP32 result h, keeping `dtype` for the backward.

    `fused`, it rides on the matmul and sees h itself; apart, it sees what the matmul has written. Result and gradient
    stay FP32: the kernels round both straight to FP8.
    """

    @staticmethod
    def forward(ctx, h: Tensor, dtype: torch.dtype, fused: bool) -> Tensor:
        written = h.to(dtype)
        ctx.save_for_backward(written)
        return F.gelu(h if fused else written.float(), approximate="tanh")

    @staticmethod
    def backward(ctx, dy: Tensor):
        written, = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(dy.float(), written.float(), approximate="tanh"), None, None


class _FP8Module(nn.Module):
    """`gemms` matmuls whose operands can be rounded to FP8; three forward tensors a GEMM and two backward, as there."""

    tp_group: "dist.ProcessGroup | None" = None      # of ranks that hold a part of its weights each

    def __init__(self, gemms: int):
        super().__init__()
        self.gemms = gemms
        self.fp8_meta: dict[str, _Scaling] = {}
        self.weights: dict[int, tuple[Tensor, Tensor]] = {}
        self.keep_weights = _Region.keep_weights

    def prepare(self, x: Tensor) -> torch.dtype:
        """Join the FP8 region; the dtype that results are rounded to."""
        if not self.fp8_meta:
            history = _Region.recipe.amax_history_len
            self.fp8_meta = {"scaling_fwd": _Scaling(E4M3, 3 * self.gemms, history, x.device),
                             "scaling_bwd": _Scaling(E5M2, 2 * self.gemms, history, x.device)}
        _Region.modules.append(self)
        return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, fresh: bool | None, gemm: int = 0,
               output: torch.dtype | None = None) -> Tensor:
        return _Matmul.apply(x, weight, bias, self, gemm, dtype, output or dtype, fresh)

    def row_parallel(self, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, fresh: bool | None,
                     gemm: int = 0) -> Tensor:
        """A matmul, of which each rank of a group has a part of the inner dimension. The bias comes behind the sum."""
        if self.tp_group is None:
            return self.matmul(x, weight, bias, dtype, fresh, gemm) if _Region.enabled else F.linear(x, weight, bias)
        nothing = torch.zeros_like(bias)
        part = self.matmul(x, weight, nothing, dtype, fresh, gemm) if _Region.enabled else F.linear(x, weight)
        return _Summed.apply(part, self.tp_group) + bias.to(dtype)

    def shared(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x, of which each rank of a group multiplies the whole by other columns."""
        return x if self.tp_group is None else _Shared.apply(x, self.tp_group, dtype)

    def quantized_weight(self, weight: Tensor, gemm: int, fresh: bool | None) -> tuple[Tensor, Tensor]:
        """The weight's FP8 values and scale: rounded now, or those of an earlier call where these are reused."""
        if gemm in self.weights and (self.keep_weights or fresh is False):
            return self.weights[gemm]
        if self.keep_weights:
            scale = torch.finfo(E4M3).max / weight.abs().amax().float()
            self.weights[gemm] = _round_to(E4M3, weight.float() * scale), scale
            return self.weights[gemm]
        rounded = self.fp8_meta["scaling_fwd"].quantize(weight, 3 * gemm + 1)
        if fresh:
            self.weights[gemm] = rounded
        return rounded


class _Shared(torch.autograd.Function):
    """x, which all ranks of a group have: its gradient is the sum of what they make of it, in `dtype`."""

    @staticmethod
    def forward(ctx, x: Tensor, group: "dist.ProcessGroup", dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        whole = dy.to(ctx.dtype, copy=True)
        dist.all_reduce(whole, group=ctx.group)
        return whole.to(dy.dtype), None, None


class _Summed(torch.autograd.Function):
    """The sum of what the ranks of a group have each."""

    @staticmethod
    def forward(ctx, y: Tensor, group: "dist.ProcessGroup") -> Tensor:
        whole = y.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


def _ranks(group: "dist.ProcessGroup | None") -> int:
    return dist.get_world_size(group) if group else 1


class Linear(_FP8Module):
    """x [..., in] -> [..., out]. A rank of `tp_group` has a part of `in`."""

    def __init__(self, in_features: int, out_features: int, params_dtype: torch.dtype | None = None,
                 parallel_mode: str = "row", tp_group: "dist.ProcessGroup | None" = None):
        super().__init__(gemms=1)
        if parallel_mode != "row":
            raise ValueError(f"parallel_mode is {parallel_mode!r}: the emulation has only 'row'")
        self.tp_group = tp_group
        self.weight = nn.Parameter(torch.empty(out_features, in_features // _ranks(tp_group), dtype=params_dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        dtype = self.prepare(x) if _Region.enabled else x.dtype
        return self.row_parallel(x, self.weight, self.bias, dtype, is_first_microbatch)


class LayerNormLinear(_FP8Module):
    """LayerNorm, then Linear: x [..., in] -> [..., out]. A rank of `tp_group` has a part of `out`."""

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, params_dtype: torch.dtype | None = None,
                 parallel_mode: str = "column", tp_group: "dist.ProcessGroup | None" = None):
        super().__init__(gemms=1)
        if parallel_mode != "column":
            raise ValueError(f"parallel_mode is {parallel_mode!r}: the emulation has only 'column'")
        self.eps, self.tp_group = eps, tp_group
        out_features //= _ranks(tp_group)
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features, dtype=params_dtype))
        self.layer_norm_bias = nn.Parameter(torch.empty(in_features, dtype=params_dtype))
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        if not _Region.enabled:
            return F.linear(self.shared(_layer_norm(self, x), x.dtype), self.weight, self.bias)
        dtype = self.prepare(x)
        normed = self.shared(_layer_norm(self, x.float(), dtype), dtype)
        return self.matmul(normed, self.weight, self.bias, dtype, is_first_microbatch)


class LayerNormMLP(_FP8Module):
    """LayerNorm, Linear, GELU (tanh approximation), Linear: x [..., E] -> [..., E].

    A rank of `tp_group` has a part of the hidden units.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, activation: str = "gelu",
                 params_dtype: torch.dtype | None = None, set_parallel_mode: bool = True,
                 tp_group: "dist.ProcessGroup | None" = None):
        super().__init__(gemms=2)
        if activation != "gelu" or not set_parallel_mode:
            raise ValueError(f"activation is {activation!r}, set_parallel_mode {set_parallel_mode}: the emulation has "
                             "only 'gelu' and True")
        self.eps, self.gemm_gelu_fusion, self.tp_group = eps, False, tp_group
        ffn_hidden_size //= _ranks(tp_group)
        self.layer_norm_weight = nn.Parameter(torch.empty(hidden_size, dtype=params_dtype))
        self.layer_norm_bias = nn.Parameter(torch.empty(hidden_size, dtype=params_dtype))
        self.fc1_weight = nn.Parameter(torch.empty(ffn_hidden_size, hidden_size, dtype=params_dtype))
        self.fc1_bias = nn.Parameter(torch.empty(ffn_hidden_size, dtype=params_dtype))
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size, dtype=params_dtype))
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size, dtype=params_dtype))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        fresh = is_first_microbatch
        if not _Region.enabled:
            normed = self.shared(_layer_norm(self, x), x.dtype)
            h = F.gelu(F.linear(normed, self.fc1_weight, self.fc1_bias), approximate="tanh")
            return self.row_parallel(h, self.fc2_weight, self.fc2_bias, x.dtype, fresh)
        dtype = self.prepare(x)
        normed = self.shared(_layer_norm(self, x.float(), dtype), dtype)
        h = self.matmul(normed, self.fc1_weight, self.fc1_bias, dtype, fresh, output=torch.float32)
        h = _GELU.apply(h, dtype, self.gemm_gelu_fusion)
        return self.row_parallel(h, self.fc2_weight, self.fc2_bias, dtype, fresh, gemm=1)


def _layer_norm(module: Any, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """LayerNorm in the dtype of x, its gain and bias first rounded to `dtype`."""
    weight, bias = (p.to(dtype or x.dtype).to(x.dtype) for p in (module.layer_norm_weight, module.layer_norm_bias))
    return F.layer_norm(x, x.shape[-1:], weight, bias, module.eps)


class DotProductAttention(nn.Module):
    """Causal attention in the dtype of its inputs: q, k, v [B, S, H, D] -> [B, S, H * D]."""

    def __init__(self, num_attention_heads: int, kv_channels: int, attention_dropout: float = 0.0,
                 qkv_format: str = "bshd", attn_mask_type: str = "causal", tp_group: "dist.ProcessGroup | None" = None):
        super().__init__()
        if (qkv_format, attn_mask_type) != ("bshd", "causal"):
            raise ValueError(f"{qkv_format}, {attn_mask_type}: the emulation has only bshd, causal")
        self.dropout = attention_dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if _Region.enabled and _Region.recipe.fp8_dpa:
            raise NotImplementedError("attention in FP8 is not emulated: it needs Transformer Engine on a Hopper GPU")
        dropout = self.dropout if self.training else 0.0
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                     # [B, H, S, D]
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2).flatten(2)


class SplitAlongDim:
    """Transformer Engine's split whose backward avoids a concatenation; here the ordinary one."""
    apply = staticmethod(lambda x, dim, sizes: x.split(sizes, dim))


quantization = SimpleNamespace(DelayedScaling=DelayedScaling)
utils = SimpleNamespace(SplitAlongDim=SplitAlongDim)
