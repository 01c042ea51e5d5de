"""Linear attention with decay, SSD and the gated delta rule: one recurrence, step by step, at once, and in chunks.

    S[t] = a[t] S[t-1] + k[t] u[t]^T        y[t] = S[t]^T q[t]        a[t] = exp(g[t])
    u[t] = v[t]                                         linear attention with decay: a is the same at each step
                                                        (retention), or depends on the input (SSD of Mamba-2)
    u[t] = b[t] (v[t] - a[t] S[t-1]^T k[t])             gated delta rule: what S holds under k is replaced by b of v

q, k [B, H, S, K]; v and y [B, H, S, V]; g, b [B, H, S]; states [B, H, K, V]. g is at most 0, b in [0, 1].
Sources: RetNet (arXiv 2307.08621), Mamba-2 (2405.21060), Gated Delta Networks (2412.06464).
"""
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64


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
        return self.q.new_zeros(*self.q.shape[:2], self.q.size(-1), self.v.size(-1))


Form = Callable[[Given, Tensor | None], tuple[Tensor, Tensor]]           # (y, the state behind the last step)


def recurrent(given: Given, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Step by step, as it is defined: 3 S K V multiplications, and S launches in a row of each."""
    state, every = given.no_state() if state is None else state, []
    for t in range(given.steps):
        q, k, v = (each[:, :, t] for each in (given.q, given.k, given.v))
        state = given.g[:, :, t, None, None].exp() * state
        if given.b is not None:
            held = (k.unsqueeze(-2) @ state).squeeze(-2)
            v = given.b[:, :, t, None] * (v - held)
        state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        every.append((q.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(every, 2), state


def parallel(given: Given, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All steps at once, as attention: S * S (K + V) multiplications; with a delta rule a triangular system too."""
    return chunked(given, state, given.steps)


def chunked(given: Given, state: Tensor | None = None, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """At once within each chunk of steps; from chunk to chunk the state is handed on: S C (K + V) + 2 S K V."""
    if chunk < 1:
        raise ValueError(f"chunks of {chunk} steps: give a whole number from 1 on")
    state, steps = given.no_state() if state is None else state, given.steps
    given = _filled(given, -steps % chunk)
    q, k, v = (each.unflatten(2, (-1, chunk)) for each in (given.q, given.k, given.v))          # [B, H, N, C, K or V]
    g = given.g.unflatten(2, (-1, chunk))
    between = _decay_between(g)
    scores = (q @ k.mT) * between
    since = g.cumsum(-1)                                           # from before the chunk to behind each step
    into, out_of = since.exp().unsqueeze(-1), between[..., -1, :].unsqueeze(-1)
    forgotten = None
    if given.b is not None:
        b = given.b.unflatten(2, (-1, chunk)).unsqueeze(-1)
        system = b * (k @ k.mT) * between                          # its diagonal is not read: taken as ones
        solved = torch.linalg.solve_triangular(system, torch.cat([b * v, b * into * k], -1), upper=False,
                                               unitriangular=True)
        v, forgotten = solved.split([v.size(-1), k.size(-1)], -1)
    every = []
    for n in range(q.size(2)):
        u = v[:, :, n]
        if forgotten is not None:
            u = u - forgotten[:, :, n] @ state
        every.append((into[:, :, n] * q[:, :, n]) @ state + scores[:, :, n] @ u)
        state = since[:, :, n, -1, None, None].exp() * state + (out_of[:, :, n] * k[:, :, n]).mT @ u
    return torch.cat(every, 2)[:, :, :steps], state


def flops_of_recurrent(steps: int, K: int, V: int, delta: bool) -> int:
    """Of a forward of one head: what is written, what is read, and with a delta rule what was held."""
    return steps * (3 if delta else 2) * 2 * K * V


def flops_of_chunked(steps: int, K: int, V: int, delta: bool, chunk: int = CHUNK) -> int:
    """Of a forward of one head: scores and their sum, the state read and written; with a delta rule also the products
    of keys, the triangular system, and what the state held."""
    each = chunk**2 * 2 * (K + V) + 4 * chunk * K * V
    if delta:
        each += chunk**2 * (2 * K + K + V) + 2 * chunk * K * V
    return -(-steps // chunk) * each


def flops_of_attention(steps: int, K: int, V: int) -> int:
    """Of a forward of one head, over the pairs that causal attention has."""
    return steps**2 * (K + V)


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
