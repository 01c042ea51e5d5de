"""The last rungs of attention in CUDA C++ as a PyTorch operation: under autograd, autocast and torch.compile.

    y = scaled_dot_product_attention(q, k, v, is_causal=True)

`python 2_sdpa.py --attention series` runs a step with it. It is built at the first call ever, which takes seconds.
"""
import torch
from torch import Tensor
from torch.library import custom_op

from . import series

missing = series.missing                                    # asked before it is called


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False
                                 ) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, [B, H, S, D], with gradients.

    What it takes, and errors, as `series.attention`'s; it drops nothing, and raises ValueError for dropout_p > 0.
    """
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}: the series has no dropout, give 0")
    return attention_series(q, k, v, is_causal)[0]


@custom_op("transformer_block::attention_series", mutates_args=())
def attention_series(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """(y, the logarithm of each row's sum)."""
    return series.attention(series.RUNGS[-1], q.detach(), k.detach(), v.detach(), is_causal)


@custom_op("transformer_block::attention_series_backward", mutates_args=())
def attention_series_backward(q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor, dy: Tensor, is_causal: bool
                              ) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    return series.gradients(series.BACKWARD_RUNGS[-1], q, k, v, y, log_sum, dy, is_causal)


@attention_series.register_fake
def _(q, k, v, is_causal):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@attention_series_backward.register_fake
def _(q, k, v, y, log_sum, dy, is_causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, _):
    return *attention_series_backward(*ctx.saved_tensors, dy, ctx.is_causal), None


attention_series.register_autograd(_differentiate, setup_context=_save)
