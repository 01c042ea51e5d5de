"""LayerNorm and RMSNorm in one kernel with what stands around them, forward and backward, in Triton.

    y = layer_norm_gelu(x, weight, bias)
    y = rms_norm(x, weight)
    y, total = residual_layer_norm(x, residual, weight, bias)

Memory is what such an operation waits for. Eager PyTorch reads and writes the whole tensor once per operation; here a
program takes a row, reads it once, keeps it in registers in FP32, and writes it once. The backward reads x and dy and
computes what the forward had in registers anew, from the mean and the reciprocal deviation of the row. The gradients of
weight and bias are sums over all rows: each program adds up its own rows, and the programs' sums are added in a fixed
order, so that every run gives the same bits.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..inputs import require_like
from .launch import launchable, require_float, stages

WIDEST = 65536                    # elements of a row; a multiprocessor's registers hold one such, and the widest spill
FEW, MANY = 16, 32                # elements of a row for each thread; FEW where the weights wait in registers as well
PROGRAMS = 264                    # of the backward: two for each multiprocessor of an H200. Fixed, so that the order of
                                  # summation is.
PIPELINE = 100 * 1024             # bytes of shared memory of each of them, of an H200's 227 KB for two


@triton.jit
def _gate(h, square):
    """GELU's tanh form is h (1 + tanh z) / 2 = h sigmoid 2z, with 2z = 2 sqrt(2 / pi) (h + 0.044715 h^3): that sigmoid.

    exp2 and rsqrt are one instruction each (the factors have log2 e in them); a division would be five.
    """
    root = tl.rsqrt(1 + tl.exp2(h * (-2.302208198144325 - 0.1029432395800235 * square)))
    return root * root


@triton.jit
def gelu(h):
    return h * _gate(h, h * h)


@triton.jit
def gelu_slope(h):
    square = h * h
    gate = _gate(h, square)
    slope = h * (gate - gate * gate)                          # of a large h this is 0 before a factor is infinite
    return gate + slope * (1.5957691216057308 + 0.21406444881780076 * square)


@triton.jit
def _forward(x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr, eps,
             width: tl.constexpr, RESIDUAL: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
             BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)                       # 2^31 elements are reached before 2^31 rows
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    here = row * width + columns
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + here, mask=inside, other=0.0).to(tl.float32)
        x = x.to(total_ptr.dtype.element_ty).to(tl.float32)   # what the next layer sees is what is normalised
        tl.store(total_ptr + here, x, mask=inside)
    if not GELU:                                              # on its way during the sums, in registers of its own
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
        if BIAS:
            bias = tl.load(bias_ptr + columns, mask=inside, other=0.0)
    mean = 0.0 if RMS else tl.sum(x, axis=0) / width
    centred = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + tl.cast(eps, tl.float32))      # the compiler's is FP64
    if GELU:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
        if BIAS:
            bias = tl.load(bias_ptr + columns, mask=inside, other=0.0)
    h = centred * rstd * weight.to(tl.float32)
    if BIAS:
        h += bias.to(tl.float32)
    y = gelu(h) if GELU else h
    tl.store(y_ptr + here, y, mask=inside)
    # Behind y: with GELU fewer registers are needed, and a block more fits. (Before the weights' loads these stores
    # would keep the loads together, which is faster where a multiprocessor has a row or two.)
    if not RMS:
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward(x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dy_ptr, dtotal_ptr, dx_ptr, sums_ptr, rows,
              width: tl.constexpr, RESIDUAL: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr,
              GELU: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):     # the next rows are on their way
        here = tl.cast(row, tl.int64) * width + columns
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        dh = tl.load(dy_ptr + here, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if not RMS:
            x -= tl.load(mean_ptr + row)
        normal = tl.where(inside, x * rstd, 0.0)
        if GELU:
            h = normal * weight.to(tl.float32)
            if BIAS:
                h += bias.to(tl.float32)
            dh *= gelu_slope(h)
        dweight += dh * normal
        dnormal = dh * weight.to(tl.float32)
        if RMS:
            dx = dnormal * rstd - normal * (tl.sum(dnormal * normal, axis=0) / width * rstd)
        else:
            dbias += dh
            sums = tl.sum(tl.join(dnormal * normal, dnormal), axis=0) / width * rstd      # both at one barrier
            along, offset = tl.split(sums)
            dx = dnormal * rstd - (normal * along + offset)
        if RESIDUAL:
            dx += tl.load(dtotal_ptr + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + here, dx, mask=inside)
    if RMS:
        tl.store(sums_ptr + program * width + columns, dweight, mask=inside)
    else:
        tl.store(sums_ptr + 2 * program * width + columns, dweight, mask=inside)
        tl.store(sums_ptr + (2 * program + 1) * width + columns, dbias, mask=inside)


@triton.jit
def _add_up(sums_ptr, total_ptr, parts, length, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (column < length)[None, :]
        total += tl.sum(tl.load(sums_ptr + part[:, None] * length + column[None, :], mask=inside, other=0.0), axis=0)
    tl.store(total_ptr + column, total, mask=column < length)


def _warps(block: int, per_thread: int) -> int:
    return min(16, max(1, block // (32 * per_thread)))


@triton_op("transformer_block::norm", mutates_args={})
def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, rms: bool, gelu: bool
          ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, x + residual (empty without one), mean [rows], rstd [rows]); all inputs contiguous, x [rows, width]."""
    rows, width = x.shape
    y = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else x.new_empty(0)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    block = triton.next_power_of_2(width)
    if rows:
        launchable(_forward)[(rows,)](
            x, x if residual is None else residual, weight, weight if bias is None else bias, y,
            y if residual is None else total, mean, rstd, eps, width=width, RESIDUAL=residual is not None, RMS=rms,
            BIAS=bias is not None, GELU=gelu, BLOCK=block, num_warps=_warps(block, MANY if gelu else FEW))
    return y, total, mean, rstd


@triton_op("transformer_block::norm_backward", mutates_args={})
def _norm_backward(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, dy: Tensor,
                   dtotal: Tensor | None, rms: bool, gelu: bool) -> tuple[Tensor, Tensor]:
    """(dx, [dweight, dbias] as [2, width], for RMSNorm [dweight])."""
    rows, width = x.shape
    dx, programs = torch.empty_like(x), min(rows, PROGRAMS)
    sums = torch.empty(programs, 1 if rms else 2, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    if rows:
        launchable(_backward)[(programs,)](
            x, weight, weight if bias is None else bias, mean, rstd, dy, dy if dtotal is None else dtotal, dx, sums,
            rows, width=width, RESIDUAL=dtotal is not None, RMS=rms, BIAS=bias is not None, GELU=gelu, BLOCK=block,
            num_warps=_warps(block, MANY),
            STAGES=stages(block * x.element_size() * (2 if dtotal is None else 3), 5 if gelu else 3, PIPELINE))
    return dx, add_up(sums, weight.dtype)


def norm_backward(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, dy: Tensor,
                  dtotal: Tensor | None, rms: bool, gelu: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dweight [width], dbias [width], None for RMSNorm); x is what was normalised, residual included."""
    dx, vectors = _norm_backward(x, weight, bias, mean, rstd, dy, dtotal, rms, gelu)
    return dx, vectors[0], None if rms else vectors[1]


def add_up(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of [programs, ...], contiguous, over the programs, in an order that never changes."""
    total = torch.empty(sums.shape[1:], dtype=dtype, device=sums.device)
    launchable(_add_up)[(triton.cdiv(total.numel(), 32),)](sums, total, sums.size(0), total.numel(), PARTS=64,
                                                           COLUMNS=32, num_warps=4)
    return total


def _save(ctx, inputs, output):
    x, residual, weight, bias, _, ctx.rms, ctx.gelu = inputs
    _, total, mean, rstd = output
    ctx.residual = residual is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)                          # or zeros are written for mean and rstd
    ctx.save_for_backward(total if ctx.residual else x, weight, bias, mean, rstd)


def _differentiate(ctx, dy, dtotal, *_):
    x, weight, bias, mean, rstd = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy.contiguous()
    dtotal = dtotal.contiguous() if ctx.residual and dtotal is not None else None
    dx, dweight, dbias = norm_backward(x, weight, bias, mean, rstd, dy, dtotal, ctx.rms, ctx.gelu)
    return dx, dx if ctx.residual else None, dweight, None if bias is None else dbias, None, None, None


_norm.register_autograd(_differentiate, setup_context=_save)


def layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """GELU (tanh form) of LayerNorm over the last dimension.

    x [..., E], weight and bias [E], all of one dtype (float16, bfloat16, float32) on one GPU; the result is like x.
    Arithmetic is in FP32. Raises ValueError for anything else.
    """
    require_rows(x, weight=weight, bias=bias)
    return _norm(as_rows(x), None, weight.contiguous(), bias.contiguous(), eps, False, True)[0].view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; shapes, dtypes and errors as `layer_norm_gelu`'s."""
    require_rows(x, weight=weight)
    return _norm(as_rows(x), None, weight.contiguous(), None, eps, True, False)[0].view(x.shape)


def residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
                        ) -> tuple[Tensor, Tensor]:
    """(LayerNorm(x + residual), x + residual), both [..., E] like x.

    The sum is rounded to its dtype before it is normalised, as in eager PyTorch; dtypes and errors as
    `layer_norm_gelu`'s, and residual must be like x.
    """
    require_rows(x, weight=weight, bias=bias)
    require_like("residual", residual, x)
    y, total, *_ = _norm(as_rows(x), as_rows(residual), weight.contiguous(), bias.contiguous(), eps, False, False)
    return y.view(x.shape), total.view(x.shape)


def as_rows(x: Tensor) -> Tensor:
    """[rows, width], contiguous: a copy where x is not."""
    return x.contiguous().view(-1, x.size(-1))


def require_rows(x: Tensor, **vectors: Tensor) -> None:
    """Raise ValueError, naming what is wrong, for what the kernels can't take."""
    require_float("x", x)
    if not x.ndim or not 0 < x.size(-1) <= WIDEST:
        raise ValueError(f"x is {tuple(x.shape)}: give [..., E] with E from 1 to {WIDEST}")
    for name, vector in vectors.items():
        require_like(name, vector, x, x.shape[-1:])
