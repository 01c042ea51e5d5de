"""Causal softmax and dropout in one kernel, forward and backward, in Triton: what attention by hand does to its scores.

    y = softmax_dropout(scores, p=0.1, seed=1)

Eager PyTorch writes S x S elements for the masked scores, the softmax, the mask of dropout and the result. Here a
program reads a few rows up to the diagonal, keeps them in registers in FP32, and writes them once. Dropout is drawn by
Philox, a function of the seed and of an element's place: the backward draws the same bits anew, so no mask is stored,
and the launch grid changes nothing. One call gives 128 random bits, of which each of eight neighbours gets 16. Its
rounds are the seven in which its authors found no fault (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
2011), where PyTorch takes the ten that they advise for safety: fewer rounds are fewer instructions.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..inputs import described
from .launch import launchable, require_float

WIDEST = 16384                    # keys of a query: what the registers of one program hold
NARROWEST = 256                   # keys in the first band of a causal launch; each further band has twice as many
TILE = 2048                       # elements of one program, or one row where that is more
ROUNDS = tl.constexpr(7)          # of Philox
PER_THREAD = {"forward": 32, "backward": 16}               # elements


@triton.jit
def _place(first, last, S: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row numbers in the whole tensor [ROWS], do they exist, offsets, which keys count, which to read)."""
    tiles = tl.cdiv(last - first, ROWS)
    query = first + tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    row = (tl.program_id(0) // tiles).to(tl.int64) * S + query
    exist = query < last
    key = tl.arange(0, COLUMNS)[None, :]
    counts = exist[:, None] & (key < S)
    read = counts
    if CAUSAL:
        counts &= key <= query[:, None]
        read &= key // 8 <= query[:, None] // 8             # by whole vectors: else each element is a load of its own
    return row, exist, row[:, None] * S + key, counts, read


@triton.jit
def _keep(seed_ptr, row, threshold, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which elements dropout keeps: those whose 16 random bits reach the threshold."""
    # Groups of eight start anew in each row: the neighbours that share a call are then in one thread, whatever S is.
    group = row[:, None] * ((S + 7) // 8) + tl.arange(0, COLUMNS // 8)[None, :]
    # By halves: from a 64-bit counter some versions of Triton draw 64-bit words.
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed_ptr), low, high, low * 0, low * 0, ROUNDS)
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (ROWS, COLUMNS // 2))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, COLUMNS)) >= threshold


@triton.jit
def _exp(x):
    """By exp2, which is one instruction; tl.exp spends three more on results that are not normal numbers."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _store(y_ptr, y, beyond, row, exist, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first COLUMNS keys from y, from there on the row's `beyond` [ROWS]."""
    for start in range(0, S, COLUMNS):
        key = start + tl.arange(0, COLUMNS)[None, :]
        tl.store(y_ptr + row[:, None] * S + key, y, mask=exist[:, None] & (key < S))
        y = tl.broadcast_to(beyond[:, None], (ROWS, COLUMNS))


@triton.jit
def _forward(scores_ptr, seed_ptr, y_ptr, maximum_ptr, inverse_ptr, first, last, threshold, scale, S: tl.constexpr,
             CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, exist, here, counts, read = _place(first, last, S, CAUSAL, ROWS, COLUMNS)
    x = tl.load(scores_ptr + here, mask=read, other=0.0).to(tl.float32)
    x = tl.where(counts, x, float("-inf"))
    maximum = tl.max(x, axis=1)
    y = _exp(x - maximum[:, None])
    inverse = 1 / tl.sum(y, axis=1)
    factor = inverse[:, None]
    if DROPOUT:                                             # times 0, as in eager: a NaN stays one, dropped or not
        kept = tl.cast(scale, tl.float32) * factor          # a float is FP64 when the compiler launches this
        factor = tl.where(_keep(seed_ptr, row, threshold, S, ROWS, COLUMNS), kept, 0.0 * factor)
    beyond = 0.0 * inverse                                  # in eager a row with a NaN is NaN behind the diagonal too
    _store(y_ptr, tl.where(counts, y * factor, beyond[:, None]), beyond, row, exist, S, ROWS, COLUMNS)
    tl.store(maximum_ptr + row, maximum, mask=exist)
    tl.store(inverse_ptr + row, inverse, mask=exist)


@triton.jit
def _backward(scores_ptr, seed_ptr, maximum_ptr, inverse_ptr, dy_ptr, dscores_ptr, first, last, threshold, scale,
              S: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, exist, here, counts, read = _place(first, last, S, CAUSAL, ROWS, COLUMNS)
    x = tl.load(scores_ptr + here, mask=read, other=0.0).to(tl.float32)
    dp = tl.load(dy_ptr + here, mask=read, other=0.0).to(tl.float32)
    maximum = tl.load(maximum_ptr + row, mask=exist, other=0.0)
    inverse = tl.load(inverse_ptr + row, mask=exist, other=0.0)
    p = _exp(x - maximum[:, None]) * inverse[:, None]
    if DROPOUT:
        dp *= tl.where(_keep(seed_ptr, row, threshold, S, ROWS, COLUMNS), tl.cast(scale, tl.float32), 0.0)
    mean = tl.sum(tl.where(counts, p * dp, 0.0), axis=1)    # of dp, weighted by p
    dscores = p * (dp - mean[:, None])
    _store(dscores_ptr, tl.where(counts, dscores, 0.0), tl.zeros((ROWS,), tl.float32), row, exist, S, ROWS, COLUMNS)


def _launch(kernel, tensors: tuple[Tensor, ...], scores: Tensor, p: float, causal: bool, per_thread: int) -> None:
    """The kernel over all queries: at once, or in bands that reach twice as far each.

    The queries up to w of a causal softmax need w keys or fewer: beyond, a band only writes zeros.
    """
    matrices, S, _ = scores.shape
    threshold = round(p * 65536)
    columns = triton.next_power_of_2(max(S, 8))
    first = 0
    if causal:
        columns = min(columns, NARROWEST)
    while matrices and first < S:
        last = min(columns, S) if causal else S
        rows = min(max(1, TILE // columns), triton.next_power_of_2(last - first))
        launchable(kernel)[(matrices * triton.cdiv(last - first, rows),)](
            *tensors, first, last, threshold, 1 / (1 - p), S=S, CAUSAL=causal, DROPOUT=threshold > 0,
            ROWS=rows, COLUMNS=columns, num_warps=min(32, max(1, rows * columns // (32 * per_thread))))
        first, columns = last, 2 * columns


@triton_op("transformer_block::softmax_dropout", mutates_args={})
def _softmax_dropout(scores: Tensor, seed: Tensor, p: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(y, largest score of each row, reciprocal of its sum); scores [matrices, S, S], contiguous."""
    y = torch.empty_like(scores)
    maximum, inverse = (torch.empty(scores.shape[:2], dtype=torch.float32, device=scores.device) for _ in range(2))
    _launch(_forward, (scores, seed, y, maximum, inverse), scores, p, causal, PER_THREAD["forward"])
    return y, maximum, inverse


@triton_op("transformer_block::softmax_dropout_backward", mutates_args={})
def _softmax_dropout_backward(scores: Tensor, seed: Tensor, maximum: Tensor, inverse: Tensor, dy: Tensor, p: float,
                              causal: bool) -> Tensor:
    dscores = torch.empty_like(scores)
    _launch(_backward, (scores, seed, maximum, inverse, dy, dscores), scores, p, causal, PER_THREAD["backward"])
    return dscores


def _save(ctx, inputs, output):
    # The scores rather than the softmax: the backward reads as much either way, the forward has S x S less to write,
    # and no rounding to 16 bits comes between. Maximum and sum are apart, as their one logarithm is too coarse in FP32
    # where scores are large.
    scores, seed, ctx.p, ctx.causal = inputs
    _, maximum, inverse = output
    ctx.mark_non_differentiable(maximum, inverse)
    ctx.set_materialize_grads(False)                        # or zeros are written for maximum and inverse
    ctx.save_for_backward(scores, seed, maximum, inverse)


def _differentiate(ctx, dy, *_):
    return _softmax_dropout_backward(*ctx.saved_tensors, dy.contiguous(), ctx.p, ctx.causal), None, None, None


_softmax_dropout.register_autograd(_differentiate, setup_context=_save)


def softmax_dropout(scores: Tensor, p: float, seed: int | Tensor, causal: bool = True) -> Tensor:
    """Dropout, at probability p, of the softmax of `scores` over their last dimension, in FP32.

    scores [..., S, S] (queries by keys) in float16, bfloat16 or float32 on a GPU; the result is like it. Causal: query
    q sees keys 0 to q, and what is beyond is exactly 0 even in a row that holds NaN. An element is dropped with p
    rounded to a multiple of 1/65536, the others are divided by 1 - p. `seed` is an int of 64 bits, or an int64 tensor
    of one element beside the scores, which may change between replays of a captured graph. Raises ValueError for
    anything else.
    """
    require_float("scores", scores)
    S = scores.size(-1) if scores.ndim else 0
    if scores.ndim < 2 or scores.size(-2) != S or not 0 < S <= WIDEST:
        raise ValueError(f"scores is {tuple(scores.shape)}: give [..., S, S] with S from 1 to {WIDEST}")
    if not 0 <= p < 1 or round(p * 65536) == 65536:
        raise ValueError(f"p is {p}: give 0 <= p < 1, and 1 - p more than 1/131072")
    if not isinstance(seed, Tensor):
        if not isinstance(seed, int) or not -2**63 <= seed < 2**63:
            raise ValueError(f"seed is {seed!r}: give an int of 64 bits, or an int64 tensor of one element")
        seed = torch.full((), seed, dtype=torch.int64, device=scores.device)
    elif seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != scores.device:
        raise ValueError(f"seed is {described(seed)}: give one int64 element on {scores.device}")
    return _softmax_dropout(scores.contiguous().view(-1, S, S), seed, p, causal)[0].view(scores.shape)
