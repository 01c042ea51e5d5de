"""LayerNorm that writes FP8 and the largest value it saw, in one kernel in Triton: what stands before a product in FP8.

    y, amax, proxy = layer_norm_fp8(x, weight, bias, scale)

Apart, the LayerNorm would be written in 16 bits and read twice, for its largest value and to be rounded. Each program
raises the largest value, which a memset has set to 0, to its own by an atomic maximum: of maxima, unlike sums, the
order changes no bit.

Autograd would cast a gradient of y to y's dtype, without a scale: what is below 2^-10 would become 0. So y has none.
`proxy` carries y's gradient; its values are NaN so that misuse shows. It has the shape and dtype of x, in the memory of
one element. Who multiplies y takes both, and gives the gradient to `proxy`. Without it nothing that lies before y is
trained, and an error says so only where nothing else is.

    class Product(torch.autograd.Function):                   # y / scale @ w, of [..., E] and [E, N]
        @staticmethod
        def forward(ctx, proxy, y, scale, w):
            ctx.save_for_backward(y, scale, w)
            return (y.to(w.dtype) / scale).to(w.dtype) @ w    # or a product in FP8

        @staticmethod
        def backward(ctx, dz):
            y, scale, w = ctx.saved_tensors
            h = (y.to(w.dtype) / scale).to(w.dtype).flatten(0, -2)
            return dz @ w.t(), None, None, h.t() @ dz.flatten(0, -2)

The gradient passes straight through rounding and saturation: y / scale counts as the LayerNorm that it approximates.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..inputs import described
from .launch import launchable, stages
from .norms import as_rows, norm_backward, require_rows

PER_THREAD = 64                   # elements
PROGRAMS = 528                    # four for each multiprocessor of an H200
PIPELINE = 50 * 1024              # bytes of shared memory of each of them, of an H200's 227 KB for four


@triton.jit
def _forward(x_ptr, weight_ptr, bias_ptr, scale_ptr, y_ptr, amax_ptr, proxy_ptr, mean_ptr, rstd_ptr, rows, eps,
             width: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(scale_ptr)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0)
    largest = tl.full((), 0, tl.int32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):    # the next are on their way
        here = tl.cast(row, tl.int64) * width + columns
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=0) / width
        centred = tl.where(inside, x - mean, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + tl.cast(eps, tl.float32))
        h = centred * rstd * weight.to(tl.float32) + bias.to(tl.float32)
        # As integers, floats without a sign are in order, and NaN is above infinity: a maximum of floats would drop it.
        largest = tl.maximum(largest, tl.max(tl.abs(h).to(tl.int32, bitcast=True), axis=0))
        y = tl.clamp(h * scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y_ptr + here, y.to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
    tl.atomic_max(amax_ptr, largest, sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(proxy_ptr, float("nan"))


@triton_op("transformer_block::layer_norm_fp8", mutates_args={})
def _layer_norm_fp8(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, eps: float
                    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, amax [], proxy, mean [rows], rstd [rows]); all inputs contiguous, x [rows, width]."""
    rows, width = x.shape
    # Triton's interpreter rounds to FP8 wrongly and loses NaN: there PyTorch rounds.
    y = torch.empty_like(x, dtype=torch.float32 if triton.knobs.runtime.interpret else torch.float8_e4m3fn)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    amax = torch.zeros((), dtype=torch.int32, device=x.device)            # the bits of a float
    proxy = x.new_empty(())
    block = triton.next_power_of_2(width)
    if rows:
        launchable(_forward)[(min(rows, PROGRAMS),)](
            x, weight, bias, scale, y, amax, proxy, mean, rstd, rows, eps, width=width, BLOCK=block,
            num_warps=min(16, max(1, block // (32 * PER_THREAD))), STAGES=stages(block * x.element_size(), 4, PIPELINE))
    return y.to(torch.float8_e4m3fn), amax.view(torch.float32), proxy.expand(x.shape), mean, rstd


def _save(ctx, inputs, output):
    x, weight, *_ = inputs
    y, amax, _, mean, rstd = output
    ctx.mark_non_differentiable(y, amax, mean, rstd)
    ctx.set_materialize_grads(False)                          # or zeros are written for all of these
    ctx.save_for_backward(x, weight, mean, rstd)


def _differentiate(ctx, dy, damax, dproxy, *_):
    if dproxy is None:
        return (None,) * 5
    x, weight, mean, rstd = ctx.saved_tensors
    return *norm_backward(x, weight, None, mean, rstd, dproxy.contiguous(), None, False, False), None, None


_layer_norm_fp8.register_autograd(_differentiate, setup_context=_save)


def layer_norm_fp8(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, eps: float = 1e-5
                   ) -> tuple[Tensor, Tensor, Tensor]:
    """(y, amax, proxy): y is LayerNorm over the last dimension, times `scale`, in float8_e4m3fn.

    x [..., E], weight and bias [E], all of one dtype (float16, bfloat16, float32) on one GPU that knows FP8 (compute
    capability 8.9 or more); scale is one float32 element beside them. y [..., E] is rounded to nearest, and what is
    beyond +-448 becomes that; NaN stays NaN. amax [] is the largest |LayerNorm| before scaling, in float32. Neither has
    a gradient, nor has scale: proxy, like x and without values, takes that of the LayerNorm and passes it on to x,
    weight and bias (see above). Arithmetic is in FP32. Raises ValueError for anything else.
    """
    require_rows(x, weight=weight, bias=bias)
    if not isinstance(scale, Tensor) or scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device:
        raise ValueError(f"scale is {described(scale)}: give one float32 element on {x.device}")
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise ValueError(f"x is on {torch.cuda.get_device_name(x.device)}: FP8 needs compute capability 8.9 or more")
    y, amax, proxy, *_ = _layer_norm_fp8(as_rows(x), weight.contiguous(), bias.contiguous(), scale, eps)
    return y.view(x.shape), amax, proxy.view(x.shape)
