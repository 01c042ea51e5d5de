"""Attention whose state does not grow, by chunks of steps, forward and backward: retention, SSD, gated delta rule.

    S[t] = exp(g[t]) S[t-1] + k[t] u[t]^T         y[t] = S[t]^T q[t]         u = v, or v - f S[before its chunk]

Within a chunk all pairs of steps are computed at once, as in attention. From chunk to chunk only the state is handed
on: one kernel walks over the chunks and writes the state before each, and the next computes the outputs of all chunks
beside each other. The backward does the same from the end: what flows back from within the chunks, a walk that hands on
the gradient of the state, and then the rest beside each other.

A decay from step s to step t is a sum of its own over the gates between them. The difference of two running sums would
lose all digits of a gradient where much has been forgotten; so would the difference of two running sums of gradients.
"""
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..inputs import require_like
from .chunks import CHUNK, WIDTHS, decay_between, dot, gates, kept, rows, store_rows
from .launch import launchable, require_float, stages

WALKED = 32                                         # columns of a state that one program walks with
VALUES = 64                                         # columns of values that a program has at once
SHARED = 2**17                                      # bytes that the stages of a walk may take together


@triton.jit
def _scores(q_ptr, k_ptr, g_ptr, sequence, first, length, K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """(q [C, K], gates [C], decayed scores [C, C]) of one chunk."""
    keys = tl.arange(0, K)
    g = gates(g_ptr + sequence * length, first, length, C)
    q = rows(q_ptr + sequence * length * K, first, length, keys, C, K)
    k = rows(k_ptr + sequence * length * K, first, length, keys, C, K)
    return q, g, dot(q, tl.trans(k), PRECISION) * decay_between(g, C)


@triton.jit
def _walk(k_ptr, v_ptr, g_ptr, f_ptr, begin_ptr, u_ptr, states_ptr, end_ptr, length, chunks, K: tl.constexpr,
          V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr):
    """The state before each chunk, in columns of BV, and behind the last; under a delta rule also u."""
    sequence = tl.cast(tl.program_id(0), tl.int64)
    keys, columns = tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    places = keys[:, None] * V + columns[None, :]
    g_row = g_ptr + sequence * length
    state = tl.load(begin_ptr + sequence * K * V + places)
    for n in range(chunks):
        first = n * C
        tl.store(states_ptr + (sequence * chunks + n) * K * V + places, state)
        k = rows(k_ptr + sequence * length * K, first, length, keys, C, K)
        u = rows(v_ptr + sequence * length * V, first, length, columns, C, V)
        if DELTA:
            f = rows(f_ptr + sequence * length * K, first, length, keys, C, K)
            u = (u - dot(f, state.to(f.dtype), PRECISION)).to(k.dtype)
            store_rows(u_ptr + sequence * length * V, u, first, length, columns, C, V)
        left = (k * kept(g_row, first, length, C)[:, None]).to(k.dtype)
        whole = tl.exp(tl.sum(gates(g_row, first, length, C), 0))
        state = whole * state + dot(tl.trans(left), u, PRECISION)
    tl.store(end_ptr + sequence * K * V + places, state)


@triton.jit
def _outputs(q_ptr, k_ptr, u_ptr, g_ptr, states_ptr, y_ptr, length, chunks, K: tl.constexpr, V: tl.constexpr,
             C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):
    """y of one chunk, in columns of BV."""
    sequence, n = tl.cast(tl.program_id(0) // chunks, tl.int64), tl.program_id(0) % chunks
    first, keys, columns = n * C, tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    q, g, scores = _scores(q_ptr, k_ptr, g_ptr, sequence, first, length, K, C, PRECISION)
    u = rows(u_ptr + sequence * length * V, first, length, columns, C, V)
    state = tl.load(states_ptr + tl.cast(tl.program_id(0), tl.int64) * K * V + keys[:, None] * V + columns[None, :])
    into = tl.exp(tl.cumsum(g, 0))
    y = into[:, None] * dot(q, state, PRECISION) + dot(scores.to(u.dtype), u, PRECISION)
    store_rows(y_ptr + sequence * length * V, y, first, length, columns, C, V)


@triton.jit
def _back_within(q_ptr, k_ptr, g_ptr, dy_ptr, du_ptr, length, chunks, K: tl.constexpr, V: tl.constexpr,
                 C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):
    """Of one chunk, what flows back to u from its own outputs, in columns of BV."""
    sequence, n = tl.cast(tl.program_id(0) // chunks, tl.int64), tl.program_id(0) % chunks
    first, columns = n * C, tl.program_id(1) * BV + tl.arange(0, BV)
    _, _, scores = _scores(q_ptr, k_ptr, g_ptr, sequence, first, length, K, C, PRECISION)
    dy = rows(dy_ptr + sequence * length * V, first, length, columns, C, V)
    du = dot(tl.trans(scores.to(dy.dtype)), dy, PRECISION)
    store_rows(du_ptr + sequence * length * V, du, first, length, columns, C, V)


@triton.jit
def _walk_back(q_ptr, k_ptr, g_ptr, f_ptr, dy_ptr, within_ptr, dend_ptr, du_ptr, dstates_ptr, dbegin_ptr, length,
               chunks, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
               PRECISION: tl.constexpr):
    """The gradient of the state behind each chunk, in columns of BV, and before the first; and that of u."""
    sequence = tl.cast(tl.program_id(0), tl.int64)
    keys, columns = tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    places = keys[:, None] * V + columns[None, :]
    g_row = g_ptr + sequence * length
    dstate = tl.load(dend_ptr + sequence * K * V + places)
    for back in range(chunks):
        n = chunks - 1 - back
        first = n * C
        tl.store(dstates_ptr + (sequence * chunks + n) * K * V + places, dstate)
        g = gates(g_row, first, length, C)
        q = rows(q_ptr + sequence * length * K, first, length, keys, C, K)
        k = rows(k_ptr + sequence * length * K, first, length, keys, C, K)
        dy = rows(dy_ptr + sequence * length * V, first, length, columns, C, V)
        du = rows(within_ptr + sequence * length * V, first, length, columns, C, V)
        left = (k * kept(g_row, first, length, C)[:, None]).to(k.dtype)
        du += dot(left, dstate.to(left.dtype), PRECISION)
        store_rows(du_ptr + sequence * length * V, du, first, length, columns, C, V)
        read = (q * tl.exp(tl.cumsum(g, 0))[:, None]).to(q.dtype)
        dstate = tl.exp(tl.sum(g, 0)) * dstate + dot(tl.trans(read), dy, PRECISION)
        if DELTA:
            f = rows(f_ptr + sequence * length * K, first, length, keys, C, K)
            dstate -= dot(tl.trans(f), du.to(f.dtype), PRECISION)
    tl.store(dbegin_ptr + sequence * K * V + places, dstate)


@triton.jit
def _back_rest(q_ptr, k_ptr, u_ptr, g_ptr, states_ptr, dy_ptr, du_ptr, dstates_ptr, dq_ptr, dk_ptr, dg_ptr, df_ptr,
               length, chunks, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
               DELTA: tl.constexpr, PRECISION: tl.constexpr):
    """dq, dk, dg and df of one chunk: sums over the columns of values, BV at a time."""
    sequence, n = tl.cast(tl.program_id(0) // chunks, tl.int64), tl.program_id(0) % chunks
    first, keys, steps = n * C, tl.arange(0, K), tl.arange(0, C)
    g_row = g_ptr + sequence * length
    g = gates(g_row, first, length, C)
    here = tl.cast(tl.program_id(0), tl.int64) * K * V
    dscores = tl.zeros((C, C), tl.float32)
    read, written = tl.zeros((C, K), tl.float32), tl.zeros((C, K), tl.float32)
    df = tl.zeros((C, K), tl.float32)
    by_state = tl.zeros((K,), tl.float32)
    for begin in tl.static_range(0, V, BV):
        columns = begin + tl.arange(0, BV)
        u = rows(u_ptr + sequence * length * V, first, length, columns, C, V)
        dy = rows(dy_ptr + sequence * length * V, first, length, columns, C, V)
        places = here + keys[:, None] * V + columns[None, :]
        state, dstate = tl.load(states_ptr + places), tl.load(dstates_ptr + places)
        dscores += dot(dy, tl.trans(u), PRECISION)
        read += dot(dy, tl.trans(state), PRECISION)
        written += dot(u, tl.trans(dstate), PRECISION)
        by_state += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        if DELTA:
            du = rows(du_ptr + sequence * length * V, first, length, columns, C, V)
            df -= dot(du, tl.trans(state), PRECISION)
    q = rows(q_ptr + sequence * length * K, first, length, keys, C, K)
    k = rows(k_ptr + sequence * length * K, first, length, keys, C, K)
    dscores *= decay_between(g, C)
    read *= tl.exp(tl.cumsum(g, 0))[:, None]
    written *= kept(g_row, first, length, C)[:, None]
    dq = read + dot(dscores.to(k.dtype), k, PRECISION)
    dk = written + dot(tl.trans(dscores.to(q.dtype)), q, PRECISION)
    store_rows(dq_ptr + sequence * length * K, dq, first, length, keys, C, K)
    store_rows(dk_ptr + sequence * length * K, dk, first, length, keys, C, K)
    if DELTA:
        store_rows(df_ptr + sequence * length * K, df, first, length, keys, C, K)
    # A gate is part of the decay between each step before it and each from it on.
    moved = dscores * dot(q, tl.trans(k), PRECISION)                          # by each decay's logarithm
    before = (steps[:, None] < steps[None, :]).to(tl.float32)                  # row: step, column: gate
    pairs = dot(moved, before, PRECISION)
    dg = tl.sum(tl.where(steps[:, None] >= steps[None, :], pairs, 0.0), 0)
    dg += tl.cumsum(tl.sum(read * q, 1), 0, reverse=True)
    dg += tl.sum(before * tl.sum(written * k, 1)[:, None], 0)
    dg += tl.exp(tl.sum(g, 0)) * tl.sum(by_state, 0)
    tl.store(dg_ptr + sequence * length + first + steps, dg, mask=first + steps < length)


@triton_op("transformer_block::linear_attention", mutates_args={})
def _linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, f: Tensor | None, state: Tensor
                      ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, the state behind the last step, u, the states before each chunk)."""
    B, H, S, K = q.shape
    V, chunks = v.size(-1), triton.cdiv(S, CHUNK)
    y, end, states = torch.empty_like(v), torch.empty_like(state), q.new_empty(B, H, chunks, K, V)
    u = v.new_empty(0) if f is None else torch.empty_like(v)
    constants = _constants(q, v)
    walked, columns = min(WALKED, V), min(VALUES, V)
    launchable(_walk)[(B * H, V // walked)](
        k, v, g, k if f is None else f, state, u, states, end, S, chunks, BV=walked, DELTA=f is not None, **constants,
        num_stages=_stages(q, (1 if f is None else 2) * K + walked))
    launchable(_outputs)[(B * H * chunks, V // columns)](
        q, k, v if f is None else u, g, states, y, S, chunks, BV=columns, **constants)
    return y, end, u, states


@triton_op("transformer_block::linear_attention_backward", mutates_args={})
def _backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, f: Tensor | None, u: Tensor, states: Tensor, dy: Tensor,
              dend: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, df (empty where there is no f), and the gradient of the first state."""
    B, H, S, K = q.shape
    V, chunks = v.size(-1), states.size(2)
    dq, dk, dv, dg = (torch.empty_like(each) for each in (q, k, v, g))
    within, dstates, dbegin = torch.empty_like(v), torch.empty_like(states), torch.empty_like(dend)
    df = q.new_empty(0) if f is None else torch.empty_like(f)
    constants, delta = _constants(q, v), f is not None
    walked, columns = min(WALKED, V), min(VALUES, V)
    launchable(_back_within)[(B * H * chunks, V // columns)](
        q, k, g, dy, within, S, chunks, BV=columns, **constants)
    launchable(_walk_back)[(B * H, V // walked)](
        q, k, g, k if f is None else f, dy, within, dend, dv, dstates, dbegin, S, chunks, BV=walked, DELTA=delta,
        **constants, num_stages=_stages(q, (3 if delta else 2) * K + 2 * walked))
    launchable(_back_rest)[(B * H * chunks,)](
        q, k, u if delta else v, g, states, dy, dv, dstates, dq, dk, dg, df, S, chunks, BV=columns, DELTA=delta,
        **constants)
    return dq, dk, dv, dg, df, dbegin


def _constants(q: Tensor, v: Tensor) -> dict:
    """What a kernel is compiled for. FP32 is multiplied as FP32, not as TF32."""
    widest = max(q.size(-1), v.size(-1))
    return dict(K=q.size(-1), V=v.size(-1), C=CHUNK, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
                num_warps=8 if widest > 64 else 4)


def _stages(q: Tensor, columns: int) -> int:
    """Of a walk that loads so many columns of a chunk at a time."""
    return stages(CHUNK * columns * q.element_size(), 3, SHARED)


def _save(ctx, inputs, output):
    q, k, v, g, f, _ = inputs
    _, _, u, states = output
    ctx.mark_non_differentiable(u, states)
    ctx.save_for_backward(q, k, v, g, f, u, states)


def _differentiate(ctx, dy, dend, *_):
    *gradients, df, dbegin = _backward(*ctx.saved_tensors, dy.contiguous(), dend.contiguous())
    return *gradients, df if df.numel() else None, dbegin


_linear_attention.register_autograd(_differentiate, setup_context=_save)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, f: Tensor | None = None, state: Tensor | None = None
                     ) -> tuple[Tensor, Tensor]:
    """(y [B, H, S, V], the state [B, H, K, V] behind the last step).

    q, k [B, H, S, K] and v [B, H, S, V] of one dtype (float16, bfloat16, float32), K and V of 16, 32, 64 or 128; g
    [B, H, S] in FP32, at most 0: the logarithm of what each step leaves of the state. f [B, H, S, K], of a delta rule:
    v - f S is written in place of v, S being the state before the chunk of `CHUNK` steps that a step is in. State and
    sums are in FP32; what is multiplied is rounded to the dtype of q. Raises ValueError for anything else.
    """
    require_float("q", q)
    if q.ndim != 4 or q.size(2) < 1 or q.size(3) not in WIDTHS:
        raise ValueError(f"q is {tuple(q.shape)}: give [B, H, S, K] with S at least 1 and K one of {WIDTHS}")
    require_like("k", k, q, name_of_x="q")
    if not isinstance(v, Tensor) or v.ndim != 4 or v.size(3) not in WIDTHS:
        raise ValueError(f"v is {tuple(getattr(v, 'shape', ()))}: give [B, H, S, V] with V one of {WIDTHS}")
    require_like("v", v, q, (*q.shape[:3], v.size(3)), name_of_x="q")
    like_g = q.new_empty(0, dtype=torch.float32)
    require_like("g", g, like_g, tuple(q.shape[:3]), name_of_x="a state")
    if f is not None:
        require_like("f", f, q, name_of_x="q")
    whole = *q.shape[:2], q.size(3), v.size(3)
    state = like_g.new_zeros(whole) if state is None else state
    require_like("state", state, like_g, whole, name_of_x="a state")
    if not math.prod(whole):
        return torch.empty_like(v), state.clone()
    f = None if f is None else f.contiguous()
    q, k, v, g, state = (each.contiguous() for each in (q, k, v, g, state))
    return _linear_attention(q, k, v, g, f, state)[:2]
