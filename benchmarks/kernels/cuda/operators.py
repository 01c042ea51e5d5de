"""The kernels written in CUDA C++ as PyTorch operations: under autograd and torch.compile, in CUDA graphs.

    y = layer_norm_gelu(x, weight, bias)
    y = rms_norm(x, weight)
    y = swiglu(a, b)
    y = softmax_dropout(scores, p=0.1, seed=7, causal=True)
    y = attention(q, k, v)

What each kernel does, and why it is fast, is at the top of its .cu file. They are built at the first call ever, by
extension.py: that takes a minute or so. Where they can't run, `extension.missing()` says why and a call raises a
RuntimeError with that reason.
"""
import torch
from torch import Tensor
from torch.library import custom_op

from ..inputs import described, require_dtype, require_like
from . import extension

WIDEST = 16384                    # elements of a row: what the registers of one block hold
BLOCKS = 264                      # of the norms' backward: two for each multiprocessor of an H200. Fixed, so that the
                                  # order of summation is.
MOST_ROWS = 2**31 - 1             # a block each, of most kernels
HEAD_WIDTHS = (64, 128)


def layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """GELU (tanh form) of LayerNorm over the last dimension.

    x [..., E], weight and bias [E], all of one dtype (float16, bfloat16, float32) on one GPU; the result is like x.
    Arithmetic is in FP32. Raises ValueError for anything else.
    """
    _require_rows("x", x)
    require_like("weight", weight, x, x.shape[-1:])
    require_like("bias", bias, x, x.shape[-1:])
    _require_gpu("x", x)
    return _layer_norm_gelu(_rows(x), weight.contiguous(), bias.contiguous(), eps)[0].view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; shapes, dtypes and errors as `layer_norm_gelu`'s."""
    _require_rows("x", x)
    require_like("weight", weight, x, x.shape[-1:])
    _require_gpu("x", x)
    return _rms_norm(_rows(x), weight.contiguous(), eps)[0].view(x.shape)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b, element by element, with silu(a) = a * sigmoid(a).

    a and b of one shape, one dtype (float16, bfloat16, float32) and one GPU; the result is like a. Arithmetic is in
    FP32. Raises ValueError for anything else.
    """
    require_dtype("a", a)
    require_like("b", b, a)
    _require_gpu("a", a)
    return _swiglu(a.contiguous(), b.contiguous())


def softmax_dropout(scores: Tensor, p: float = 0.0, seed: int = 0, causal: bool = False) -> Tensor:
    """dropout(softmax(scores)) over the last dimension.

    scores [..., E] of float16, bfloat16 or float32 on a GPU; the result is like it, arithmetic is in FP32. `causal`,
    for scores [..., S, S], hides from row i all columns behind i. `p` is the probability of a zero, rounded to 1/65536;
    what is kept is divided by 1 - p. Which elements are kept depends on `seed` (a signed 64-bit integer) and on their
    place alone: equal calls, replays of a CUDA graph among them, drop the same. Raises ValueError for anything else.
    """
    _require_rows("scores", scores)
    if causal and (scores.ndim < 2 or scores.size(-2) != scores.size(-1)):
        raise ValueError(f"scores is {tuple(scores.shape)}: a causal mask needs [..., S, S]")
    threshold = round(p * 65536) if 0 <= p < 1 else 65536
    if threshold == 65536:
        raise ValueError(f"p is {p}: give 0 <= p < 1, and 1 - p more than 1/131072")
    if not -2**63 <= seed < 2**63:
        raise ValueError(f"seed is {seed}: give a signed 64-bit integer")
    _require_gpu("scores", scores)
    return _softmax_dropout(_rows(scores), threshold, seed, causal)[0].view(scores.shape)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each head, forward only: the result has no gradient, and none may be asked for.

    q, k and v [B, H, S, D] of one shape with D 64 or 128, one dtype (float16 or bfloat16) and one GPU; the result is
    like q. `causal` hides from query i all keys behind i. Scores and sums are in FP32. Raises ValueError for anything
    else.
    """
    require_dtype("q", q, (torch.float16, torch.bfloat16))
    if q.ndim != 4 or q.size(-1) not in HEAD_WIDTHS or not 0 < q.size(2) < 2**24:
        raise ValueError(f"q is {tuple(q.shape)}: give [B, H, S, D] with S from 1 to {2**24 - 1} and D 64 or 128")
    require_like("k", k, q)
    require_like("v", v, q)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise ValueError("attention has no backward: call it under torch.no_grad(), or detach q, k and v")
    _require_gpu("q", q)
    return _attention(q.contiguous(), k.contiguous(), v.contiguous(), causal)


def _require_rows(name: str, x: Tensor) -> None:
    """Raise ValueError, naming what is wrong, unless x is of rows that the kernels take."""
    require_dtype(name, x)
    if not x.ndim or not 0 < x.size(-1) <= WIDEST:
        raise ValueError(f"{name} is {tuple(x.shape)}: give [..., E] with E from 1 to {WIDEST}")
    if x.numel() // x.size(-1) > MOST_ROWS:
        raise ValueError(f"{name} is {tuple(x.shape)}: give at most {MOST_ROWS} rows")


def _require_gpu(name: str, tensor: Tensor) -> None:
    if not tensor.is_cuda:
        raise ValueError(f"{name} is {described(tensor)}: a CUDA kernel needs a GPU")


def _rows(x: Tensor) -> Tensor:
    """[rows, width], contiguous: a copy where x is not."""
    return x.contiguous().view(-1, x.size(-1))


def _per_row(x: Tensor) -> Tensor:
    """One FP32 number for each row, not filled."""
    return torch.empty(x.size(0), dtype=torch.float32, device=x.device)


def _sums(x: Tensor, vectors: int) -> tuple[Tensor, Tensor]:
    """Room for each block's sums, [blocks, vectors, width] in FP32, and for their totals, [vectors, width] like x."""
    sums = torch.empty(min(x.size(0), BLOCKS), vectors, x.size(1), dtype=torch.float32, device=x.device)
    make = x.new_empty if len(x) else x.new_zeros            # of no rows no kernel runs
    return sums, make(vectors, x.size(1))


@custom_op("transformer_block::cuda_layer_norm_gelu", mutates_args=())
def _layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean [rows], rstd [rows]); all inputs contiguous, x [rows, width]."""
    y, mean, rstd = torch.empty_like(x), _per_row(x), _per_row(x)
    if x.numel():
        extension.load().layer_norm_gelu_forward(x, weight, bias, y, mean, rstd, eps)
    return y, mean, rstd


@custom_op("transformer_block::cuda_layer_norm_gelu_backward", mutates_args=())
def _layer_norm_gelu_backward(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor
                              ) -> tuple[Tensor, Tensor]:
    """(dx, [dweight, dbias] as [2, width])."""
    dx, (sums, vectors) = torch.empty_like(x), _sums(x, 2)
    if x.numel():
        extension.load().layer_norm_gelu_backward(x, weight, bias, mean, rstd, dy, dx, sums, vectors)
    return dx, vectors


@custom_op("transformer_block::cuda_rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, rstd [rows])."""
    y, rstd = torch.empty_like(x), _per_row(x)
    if x.numel():
        extension.load().rms_norm_forward(x, weight, y, rstd, eps)
    return y, rstd


@custom_op("transformer_block::cuda_rms_norm_backward", mutates_args=())
def _rms_norm_backward(x: Tensor, weight: Tensor, rstd: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight as [1, width])."""
    dx, (sums, vectors) = torch.empty_like(x), _sums(x, 1)
    if x.numel():
        extension.load().rms_norm_backward(x, weight, rstd, dy, dx, sums, vectors)
    return dx, vectors


@custom_op("transformer_block::cuda_swiglu", mutates_args=())
def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    y = torch.empty_like(a)
    if a.numel():
        extension.load().swiglu_forward(a, b, y)
    return y


@custom_op("transformer_block::cuda_swiglu_backward", mutates_args=())
def _swiglu_backward(a: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(da, db)."""
    da, db = torch.empty_like(a), torch.empty_like(b)
    if a.numel():
        extension.load().swiglu_backward(a, b, dy, da, db)
    return da, db


@custom_op("transformer_block::cuda_softmax_dropout", mutates_args=())
def _softmax_dropout(scores: Tensor, threshold: int, seed: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(y, the highest score [rows], the sum of exp(score - highest) [rows])."""
    y, peak, total = torch.empty_like(scores), _per_row(scores), _per_row(scores)
    if scores.numel():
        extension.load().softmax_dropout_forward(scores, y, peak, total, threshold, seed, causal)
    return y, peak, total


@custom_op("transformer_block::cuda_softmax_dropout_backward", mutates_args=())
def _softmax_dropout_backward(scores: Tensor, peak: Tensor, total: Tensor, dy: Tensor, threshold: int, seed: int,
                              causal: bool) -> Tensor:
    dscores = torch.empty_like(scores)
    if scores.numel():
        extension.load().softmax_dropout_backward(scores, peak, total, dy, dscores, threshold, seed, causal)
    return dscores


@custom_op("transformer_block::cuda_attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    y = torch.empty_like(q)
    if q.numel():
        q, k, v = (t.clone() if t.data_ptr() % 16 else t for t in (q, k, v))     # it copies 16 bytes at a time
        extension.load().attention(q, k, v, y, causal)
    return y


# What torch.compile must know of a result: its shape and dtype.

@_layer_norm_gelu.register_fake
def _(x, weight, bias, eps):
    return torch.empty_like(x), _per_row(x), _per_row(x)


@_layer_norm_gelu_backward.register_fake
def _(x, weight, bias, mean, rstd, dy):
    return torch.empty_like(x), x.new_empty(2, x.size(1))


@_rms_norm.register_fake
def _(x, weight, eps):
    return torch.empty_like(x), _per_row(x)


@_rms_norm_backward.register_fake
def _(x, weight, rstd, dy):
    return torch.empty_like(x), x.new_empty(1, x.size(1))


@_swiglu.register_fake
def _(a, b):
    return torch.empty_like(a)


@_swiglu_backward.register_fake
def _(a, b, dy):
    return torch.empty_like(a), torch.empty_like(b)


@_softmax_dropout.register_fake
def _(scores, threshold, seed, causal):
    return torch.empty_like(scores), _per_row(scores), _per_row(scores)


@_softmax_dropout_backward.register_fake
def _(scores, peak, total, dy, threshold, seed, causal):
    return torch.empty_like(scores)


@_attention.register_fake
def _(q, k, v, causal):
    return torch.empty_like(q)


# How a result is differentiated: what the forward saves, and what the backward makes of it.

def _save_layer_norm_gelu(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate_layer_norm_gelu(ctx, dy, *_):
    dx, vectors = _layer_norm_gelu_backward(*ctx.saved_tensors, dy.contiguous())
    return dx, *vectors, None


def _save_rms_norm(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate_rms_norm(ctx, dy, *_):
    dx, vectors = _rms_norm_backward(*ctx.saved_tensors, dy.contiguous())
    return dx, *vectors, None


def _save_swiglu(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx, dy):
    return _swiglu_backward(*ctx.saved_tensors, dy.contiguous())


def _save_softmax_dropout(ctx, inputs, output):
    scores, *ctx.options = inputs
    ctx.save_for_backward(scores, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate_softmax_dropout(ctx, dy, *_):
    return _softmax_dropout_backward(*ctx.saved_tensors, dy.contiguous(), *ctx.options), None, None, None


_layer_norm_gelu.register_autograd(_differentiate_layer_norm_gelu, setup_context=_save_layer_norm_gelu)
_rms_norm.register_autograd(_differentiate_rms_norm, setup_context=_save_rms_norm)
_swiglu.register_autograd(_differentiate_swiglu, setup_context=_save_swiglu)
_softmax_dropout.register_autograd(_differentiate_softmax_dropout, setup_context=_save_softmax_dropout)
