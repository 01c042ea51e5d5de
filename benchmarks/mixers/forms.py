"""Linear attention with decay, SSD and the gated delta rule: one recurrence, step by step, at once, and in chunks.

    S[t] = a[t] S[t-1] + k[t] u[t]^T        y[t] = S[t]^T q[t]        a[t] = exp(g[t])
    u[t] = v[t]                                         linear attention with decay: a is the same at each step
                                                        (retention), or depends on the input (SSD of Mamba-2)
    u[t] = b[t] (v[t] - a[t] S[t-1]^T k[t])             gated delta rule: what S holds under k is replaced by b of v

q, k [B, H, S, K]; v and y [B, H, S, V]; g, b [B, H, S]; states [B, H, K, V]. g is at most 0, b in [0, 1]. Where q, k
and v have 16 bits, g, b and states are in FP32: what is multiplied is rounded to 16 bits, a state is not.
Sources: RetNet (arXiv 2307.08621), Mamba-2 (2405.21060), Gated Delta Networks (2412.06464).
"""
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64                                 # steps
GROUP = 64                                 # chunks whose states follow from each other at once


@dataclass(frozen=True)
class Given:
    """What a mixer is called with; b is None without a delta rule."""
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for shapes that do not go together."""
        B, H, S, K = self.q.shape
        wanted = {"k": (self.k, (B, H, S, K)), "v": (self.v, (B, H, S, self.v.size(-1))), "g": (self.g, (B, H, S))}
        if self.b is not None:
            wanted["b"] = self.b, (B, H, S)
        for name, (tensor, shape) in wanted.items():
            if tensor.shape != shape:
                raise ValueError(f"{name} is {list(tensor.shape)} beside q {list(self.q.shape)}: give {list(shape)}")

    @property
    def steps(self) -> int:
        return self.q.size(2)

    def no_state(self) -> Tensor:
        """Zeros [B, H, K, V]."""
        return self.g.new_zeros(*self.q.shape[:2], self.q.size(-1), self.v.size(-1))


Form = Callable[[Given, Tensor | None], tuple[Tensor, Tensor]]           # (y, the state behind the last step)


def recurrent(given: Given, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Step by step, as it is defined: 3 S K V multiplications, and S launches in a row of each."""
    state, every = given.no_state() if state is None else state, []
    for t in range(given.steps):
        q, k, v = (each[:, :, t].to(state.dtype) for each in (given.q, given.k, given.v))
        state = given.g[:, :, t, None, None].exp() * state
        if given.b is not None:
            held = (k.unsqueeze(-2) @ state).squeeze(-2)
            v = given.b[:, :, t, None] * (v - held)
        state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        every.append((q.unsqueeze(-2) @ state).squeeze(-2).to(given.v.dtype))
    return torch.stack(every, 2), state


def parallel(given: Given, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All steps at once, as attention: S * S (K + V) multiplications; with a delta rule a triangular system too."""
    return chunked(given, state, given.steps)


def chunked(given: Given, state: Tensor | None = None, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """At once within each chunk of steps; from chunk to chunk the state is handed on: see `flops_of_chunked`."""
    if chunk < 1:
        raise ValueError(f"chunks of {chunk} steps: give a whole number from 1 on")
    state, steps = given.no_state() if state is None else state, given.steps
    given = _filled(given, -steps % chunk)
    q, k, v = (each.unflatten(2, (-1, chunk)) for each in (given.q, given.k, given.v))          # [B, H, N, C, K or V]
    g = given.g.unflatten(2, (-1, chunk))
    between = _decay_between(g)
    since = g.cumsum(-1)                                           # from before the chunk to behind each step
    kept = (between[..., -1, :].unsqueeze(-1) * k).to(k.dtype)     # what is left of each key behind the chunk
    if given.b is None:
        states, state = _states(since[..., -1], kept.mT @ v, state)
    else:
        v, forgotten = _without_what_was_held(k, v, between, since, given.b.unflatten(2, (-1, chunk)))
        as_it_was = since[..., -1].exp()[..., None, None] * torch.eye(k.size(-1), dtype=g.dtype, device=g.device)
        states, state = _states_moved(as_it_was - kept.mT @ forgotten, kept.mT @ v, state)
        v = v - forgotten @ states.to(v.dtype)
    read = (since.exp().unsqueeze(-1) * q).to(q.dtype)
    y = read @ states.to(q.dtype) + ((q @ k.mT) * between).to(v.dtype) @ v
    return y.flatten(2, 3)[:, :, :steps], state


def _without_what_was_held(k: Tensor, v: Tensor, between: Tensor, since: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(v, f) of chunks [B, H, N, C, V and K]: a triangular system says what the steps of one do to each other."""
    b = b.unsqueeze(-1)
    system = b * (k @ k.mT) * between                              # its diagonal is not read: taken as ones
    sides = torch.cat([b * v, b * since.exp().unsqueeze(-1) * k], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).to(v.dtype)
    written, forgotten = solved.split([v.size(-1), k.size(-1)], -1)
    return written, forgotten


def _states(g: Tensor, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The states before each chunk [B, H, N, K, V], and the one behind the last.

    `g` [B, H, N] is the log of what a chunk leaves of a state, `written` [B, H, N, K, V] what it adds. At once within a
    group of chunks, as the steps are within a chunk.
    """
    before = []
    for decays, sums in zip(g.split(GROUP, 2), written.split(GROUP, 2), strict=True):
        between = _decay_between(decays).to(sums.dtype)
        behind = (between @ sums.flatten(-2)).to(g.dtype).unflatten(-1, sums.shape[-2:])
        behind = behind + decays.cumsum(-1).exp()[..., None, None] * state.unsqueeze(2)
        before += [state.unsqueeze(2), behind[:, :, :-1]]
        state = behind[:, :, -1]
    return torch.cat(before, 2), state


def _states_moved(moves: Tensor, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same where a chunk multiplies a state by a matrix [K, K]: one product a chunk, in a row."""
    before = []
    for move, added in zip(moves.unbind(2), written.unbind(2), strict=True):
        before.append(state)
        state = added + move @ state
    return torch.stack(before, 2), state


def flops_of_recurrent(steps: int, K: int, V: int, delta: bool) -> int:
    """Of a forward of one head: what is written, what is read, and with a delta rule what was held."""
    return steps * (3 if delta else 2) * 2 * K * V


def flops_of_chunked(steps: int, K: int, V: int, delta: bool, chunk: int = CHUNK) -> int:
    """Of a forward of one head: scores and their sum, the state read and written, and from chunk to chunk.

    With a delta rule also the products of keys, the triangular system, and what the state held.
    """
    chunks = -(-steps // chunk)
    each = chunk**2 * 2 * (K + V) + 4 * chunk * K * V
    if delta:
        each += chunk**2 * (2 * K + K + V) + 2 * chunk * K * (K + V) + 2 * K * K * V
        return chunks * each
    groups, rest = divmod(chunks, GROUP)
    return chunks * each + (groups * GROUP**2 + rest**2) * 2 * K * V


def _decay_between(g: Tensor) -> Tensor:
    """[..., C] -> [..., C, C]: by what a state decays from behind step s to behind step t; 0 for s behind t.

    Each is a sum of its own, not a difference of two: where much is forgotten nothing would be left of the gradient.
    """
    ones = torch.ones(g.size(-1), g.size(-1), dtype=torch.bool, device=g.device)
    sums = g.unsqueeze(-1).expand(*g.shape, g.size(-1)).masked_fill(~ones.tril(-1), 0.0).cumsum(-2)
    return sums.masked_fill(~ones.tril(), -math.inf).exp()


def _filled(given: Given, count: int) -> Given:
    """With so many steps behind that change no state: nothing is written, and nothing decays."""
    if not count:
        return given
    q, k, v = (F.pad(each, (0, 0, 0, count)) for each in (given.q, given.k, given.v))
    return Given(q, k, v, F.pad(given.g, (0, count)), None if given.b is None else F.pad(given.b, (0, count)))
