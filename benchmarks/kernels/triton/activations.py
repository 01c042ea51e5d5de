"""SiLU, SwiGLU and GELU of x + bias, forward and backward, in Triton.

    y = silu(x)
    y = swiglu(a, b)                       # silu(a) * b
    y = bias_gelu(x, bias)                 # gelu(x + bias), tanh form

Each reads its inputs once and writes its result once; what is between stays in registers, in FP32. A program takes a
tile of a few rows, so that no element needs its row by a division and a bias is read once for all of them. The backward
computes the sigmoid anew rather than reading it. The gradient of a bias is a sum over all rows: each program of the
backward adds up its own, and the programs' sums are added in a fixed order, so that every run gives the same bits.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..inputs import require_like
from .launch import launchable, require_float
from .norms import add_up, as_rows, gelu, gelu_slope

# What a program reads at a time of each tensor; in 16 bits, 8 elements are one access of 16 bytes. LARGE for SwiGLU's
# backward, which has five tensors, and for GELU's forward, which reads its bias once for a tile's rows.
SMALL = dict(elements=1024, rows_of_a_tile=1, per_thread=8)
LARGE = dict(elements=4096, rows_of_a_tile=4, per_thread=16)
PROGRAMS = 1056                   # that add up rows: eight for each multiprocessor of an H200. Fixed, so that the order
                                  # of summation is.


@triton.jit
def _place(tile, rows, width: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row numbers [ROWS, 1], column numbers [1, COLUMNS], which elements exist) of a tile, counted along the rows."""
    across: tl.constexpr = (width + COLUMNS - 1) // COLUMNS
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit
def _silu_forward(a_ptr, b_ptr, y_ptr, rows, width: tl.constexpr, a_stride: tl.constexpr, b_stride: tl.constexpr,
                  GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, inside = _place(tl.program_id(0), rows, width, ROWS, COLUMNS)
    a = tl.load(a_ptr + row * a_stride + column, mask=inside).to(tl.float32)
    y = a / (1 + tl.exp(-a))
    if GATED:
        y *= tl.load(b_ptr + row * b_stride + column, mask=inside).to(tl.float32)
    # Where there are many tensors, the result is the first that the caches drop.
    tl.store(y_ptr + row * width + column, y, mask=inside, cache_modifier=".cs" if GATED else "")


@triton.jit
def _silu_backward(a_ptr, b_ptr, dy_ptr, da_ptr, db_ptr, rows, width: tl.constexpr, a_stride: tl.constexpr,
                   b_stride: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, inside = _place(tl.program_id(0), rows, width, ROWS, COLUMNS)
    here = row * width + column
    a = tl.load(a_ptr + row * a_stride + column, mask=inside).to(tl.float32)
    dsilu = tl.load(dy_ptr + here, mask=inside).to(tl.float32)
    gate = tl.sigmoid(a)
    if GATED:
        b = tl.load(b_ptr + row * b_stride + column, mask=inside).to(tl.float32)
        tl.store(db_ptr + here, dsilu * a * gate, mask=inside, cache_modifier=".cs")
        dsilu *= b
    tl.store(da_ptr + here, dsilu * gate * (1 + a * (1 - gate)), mask=inside, cache_modifier=".cs")


@triton.jit
def _gelu_forward(x_ptr, bias_ptr, y_ptr, rows, width: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, inside = _place(tl.program_id(0), rows, width, ROWS, COLUMNS)
    here = row * width + column
    x = tl.load(x_ptr + here, mask=inside).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < width).to(tl.float32)
    tl.store(y_ptr + here, gelu(x + bias), mask=inside)


@triton.jit
def _gelu_backward(x_ptr, bias_ptr, dy_ptr, dx_ptr, dbias_ptr, rows, width: tl.constexpr, ROWS: tl.constexpr,
                        COLUMNS: tl.constexpr):
    across: tl.constexpr = (width + COLUMNS - 1) // COLUMNS
    tile, programs = tl.program_id(0), tl.num_programs(0)   # a multiple of `across`: a program keeps its columns
    _, column, _ = _place(tile, rows, width, ROWS, COLUMNS)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    while tile // across * ROWS < rows:
        row, column, inside = _place(tile, rows, width, ROWS, COLUMNS)
        here = row * width + column
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + here, mask=inside, other=0.0).to(tl.float32)
        dx = dy * gelu_slope(x + bias)
        dbias += dx
        tl.store(dx_ptr + here, dx, mask=inside)
        tile += programs
    program = tl.program_id(0)
    columns = program % across * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(dbias_ptr + program // across * width + columns, tl.sum(dbias, axis=0), mask=columns < width)


def _tiles(rows: int, width: int, elements: int, rows_of_a_tile: int, per_thread: int
           ) -> tuple[int, int, dict[str, int]]:
    """How many tiles lie (beside, below) each other, and the tile as a kernel takes it."""
    high = triton.next_power_of_2(rows)
    columns = min(triton.next_power_of_2(width), elements // min(rows_of_a_tile, high))
    high = min(high, elements // columns)
    warps = max(1, high * columns // (32 * per_thread))
    return triton.cdiv(width, columns), triton.cdiv(rows, high), dict(ROWS=high, COLUMNS=columns, num_warps=warps)


@triton_op("transformer_block::silu_mul", mutates_args={})
def _silu_mul(a: Tensor, b: Tensor | None) -> Tensor:
    """silu(a), times b where there is one; [rows, width] in rows of any stride."""
    rows, width = a.shape
    y = a.new_empty(rows, width)
    if rows:
        gate = a if b is None else b
        across, down, tile = _tiles(rows, width, **SMALL)
        launchable(_silu_forward)[(across * down,)](
            a, gate, y, rows, width=width, a_stride=a.stride(0), b_stride=gate.stride(0), GATED=b is not None, **tile)
    return y


@triton_op("transformer_block::silu_mul_backward", mutates_args={})
def _silu_mul_backward(a: Tensor, b: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(da, db (empty without b)); a and b in rows of any stride, dy contiguous."""
    rows, width = a.shape
    da = a.new_empty(rows, width)
    db = a.new_empty(0) if b is None else a.new_empty(rows, width)
    if rows:
        gate = a if b is None else b
        across, down, tile = _tiles(rows, width, **(SMALL if b is None else LARGE))
        launchable(_silu_backward)[(across * down,)](
            a, gate, dy, da, da if b is None else db, rows, width=width, a_stride=a.stride(0),
            b_stride=gate.stride(0), GATED=b is not None, **tile)
    return da, db


def _save_silu_mul(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate_silu_mul(ctx, dy):
    a, b = ctx.saved_tensors
    da, db = _silu_mul_backward(a, b, dy.contiguous())
    return da, None if b is None else db


_silu_mul.register_autograd(_differentiate_silu_mul, setup_context=_save_silu_mul)


@triton_op("transformer_block::bias_gelu", mutates_args={})
def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """All contiguous, x [rows, width]."""
    rows, width = x.shape
    y = torch.empty_like(x)
    if rows:
        across, down, tile = _tiles(rows, width, **LARGE)
        launchable(_gelu_forward)[(across * down,)](x, bias, y, rows, width=width, **tile)
    return y


@triton_op("transformer_block::bias_gelu_backward", mutates_args={})
def _bias_gelu_backward(x: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dbias [width])."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    if not rows:
        return dx, torch.zeros_like(bias)
    across, down, tile = _tiles(rows, width, **SMALL)
    down = min(down, max(1, PROGRAMS // across))
    dbias = torch.empty(down, width, dtype=torch.float32, device=x.device)
    launchable(_gelu_backward)[(across * down,)](x, bias, dy, dx, dbias, rows, width=width, **tile)
    return dx, add_up(dbias, bias.dtype)


def _save_bias_gelu(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate_bias_gelu(ctx, dy):
    return _bias_gelu_backward(*ctx.saved_tensors, dy.contiguous())


_bias_gelu.register_autograd(_differentiate_bias_gelu, setup_context=_save_bias_gelu)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x); x [..., F], in float16, bfloat16 or float32 on a GPU. Raises ValueError for anything else."""
    _require_elements("x", x)
    return _silu_mul(_evenly_spaced(x), None).view(x.shape)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b; a and b [..., F] of one dtype (float16, bfloat16, float32) on one GPU. Raises ValueError otherwise.

    They may be the halves of one [..., 2F] tensor: rows that are contiguous in themselves and evenly spaced are read
    where they are, anything else is copied first.
    """
    _require_elements("a", a)
    require_like("b", b, a, name_of_x="a")
    return _silu_mul(_evenly_spaced(a), _evenly_spaced(b)).view(a.shape)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh form) of x + bias; x [..., F], bias [F], dtypes and errors as `swiglu`'s."""
    _require_elements("x", x)
    require_like("bias", bias, x, x.shape[-1:])
    return _bias_gelu(as_rows(x), bias.contiguous()).view(x.shape)


def _evenly_spaced(x: Tensor) -> Tensor:
    """[rows, width] with contiguous rows: a view where x allows one, else a copy."""
    rows = x.reshape(-1, x.size(-1))
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _require_elements(name: str, x: Tensor) -> None:
    require_float(name, x)
    if not x.ndim or not x.size(-1):
        raise ValueError(f"{name} is {tuple(x.shape)}: give [..., F] with F of at least 1")
