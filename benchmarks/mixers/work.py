"""What a mixer has to compute and to move at the least, and what its form in chunks moves: limits and a crossover."""
from collections.abc import Sequence

import torch

from benchmarks.mixers import forms
from benchmarks.mixers.mixer import Mixer
from common.block.config import dtype_name
from common.block.workload import (
    ATTENTION,
    BACKWARD,
    BOTH,
    FORWARD,
    MATMUL,
    Operation,
    Workload,
    causal_attention_flops,
)
from common.runtime.limit import Peaks

GATE_BYTES = STATE_BYTES = 4               # FP32 each
TIMES_OF_A_BACKWARD = 2.5                  # a mixer's forward; a fused backward of attention has as many


def of_mixer(mixer: Mixer, shape: Sequence[int], dtype: torch.dtype) -> Workload:
    """Of one call on [B, H, S, D]: the products of the recurrence, which no form undercuts, and each tensor once."""
    B, H, S, D = shape
    flops = B * H * forms.flops_of_recurrent(S, D, D, mixer.replaces)
    gates = GATE_BYTES * mixer.gates
    forward, backward = (B * H * S * (tensors * D * dtype.itemsize + times * gates)
                         for tensors, times in ((4, 1), (7, 2)))     # q, k, v, y; q, k, v, dy and three gradients
    name = dtype_name(dtype)
    return Workload(name, (Operation(mixer.name, MATMUL, flops, forward, name, (B * H * S, D, D)),),
                    (Operation(f"{mixer.name} backward", MATMUL, 2 * flops, backward, name, (B * H * S, D, D)),),
                    B * S)


def of_attention(shape: Sequence[int], dtype: torch.dtype) -> Workload:
    """Of causal attention on the same."""
    B, H, S, D = shape
    forward, backward = (B * H * causal_attention_flops(S, D, D, mode) for mode in (FORWARD, BACKWARD))
    moved, name, place = B * H * S * 4 * D * dtype.itemsize, dtype_name(dtype), (B, S, H, D)
    return Workload(name, (Operation("attention", ATTENTION, forward, moved, name, place),),
                    (Operation("attention backward", ATTENTION, backward, 2 * moved, name, place, "backward"),), B * S)


def seconds_by_chunks(mixer: Mixer, steps: int, width: int, itemsize: int, peaks: Peaks, arithmetic: str,
                      backward: bool, chunk: int = forms.CHUNK) -> float:
    """Of one head, where each product is at the matmul rate, or each tensor at the rate of a copy: the longer of both.

    A forward reads k and v for the states and writes these; then it reads q, k, v and the states, and writes y. A
    backward reads q and dy for the gradients of the states; then it reads all of them, writes dq, dk and dv.
    """
    tensor, states = steps * width * itemsize, -(-steps // chunk) * width**2 * STATE_BYTES
    moved = 6 * tensor + 2 * states
    flops: float = mixer.flops_by_chunks_of(chunk, steps, width)
    if backward:
        moved += 9 * tensor + 3 * states
        flops *= 1 + TIMES_OF_A_BACKWARD
    return max(flops / peaks.flops[arithmetic], moved / peaks.bandwidth)


def seconds_of_attention(steps: int, width: int, itemsize: int, peaks: Peaks, arithmetic: str, backward: bool) -> float:
    """The same of causal attention."""
    flops = causal_attention_flops(steps, width, width, BOTH if backward else FORWARD)
    moved = (12 if backward else 4) * steps * width * itemsize
    return max(flops / peaks.flops[arithmetic], moved / peaks.bandwidth)


def crossover(mixer: Mixer, width: int, itemsize: int, peaks: Peaks, arithmetic: str, backward: bool,
              longest: int = 2**20) -> int | None:
    """The fewest whole chunks of steps that take no longer than attention over as many; None where none do."""
    given = width, itemsize, peaks, arithmetic, backward
    for steps in range(forms.CHUNK, longest + 1, forms.CHUNK):
        if seconds_by_chunks(mixer, steps, *given) <= seconds_of_attention(steps, *given):
            return steps
    return None


