"""The same mixers by libraries that are installed apart: flash-linear-attention and mamba-ssm.

Both take [B, S, H, D], so that is how their inputs must lie in memory: as other strides they would be copied first.
"""
import importlib
import math

import torch
from torch import Tensor

from benchmarks.mixers.mixer import Mix, Mixer

FLA, MAMBA = PEERS = ("flash-linear-attention", "mamba-ssm")


def by_steps(t: Tensor) -> Tensor:
    """[B, H, S, ...], lying in memory as [B, S, H, ...]."""
    return t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(t.requires_grad)


def peer(name: str, mixer: Mixer) -> Mix:
    """That library's kernels in chunks. Raises NotImplementedError where it is not installed, or has no such mixer."""
    if name == MAMBA and not mixer.discretizes:
        raise NotImplementedError(f"{MAMBA} has no {mixer.name}")
    if name == MAMBA:
        return _mamba(_imported("mamba_ssm.ops.triton.ssd_combined", name).mamba_chunk_scan_combined)
    if mixer.replaces:
        return _delta(mixer, _imported("fla.ops.gated_delta_rule", name).chunk_gated_delta_rule)
    if mixer.decays:
        return _gated(mixer, _imported("fla.ops.simple_gla", name).chunk_simple_gla)
    return _retention(_imported("fla.ops.retention", name).chunk_retention)


def _imported(module: str, name: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotImplementedError(f"{name} can't be imported: {error}") from None


def _turned(*tensors: Tensor) -> list[Tensor]:
    """[B, H, S, ...] to [B, S, H, ...]."""
    return [t.transpose(1, 2) for t in tensors]


def _retention(chunk_retention) -> Mix:
    """Its decays are `mixer.constant_decay`, and its scale is 1 / sqrt(D)."""
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunk_retention(*_turned(q, k, v))[0].transpose(1, 2)
    return mix


def _gated(mixer: Mixer, chunk_simple_gla) -> Mix:
    """It scales queries itself: `mixer.given` would do it first, in a kernel more."""
    def mix(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        g = mixer.decay(q, *gates)
        return chunk_simple_gla(*_turned(q, k, mixer.values(v, g)), g=g.transpose(1, 2))[0].transpose(1, 2)
    return mix


def _delta(mixer: Mixer, chunk_gated_delta_rule) -> Mix:
    def mix(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        given = mixer.given(q, k, v, *gates)
        assert given.b is not None
        return chunk_gated_delta_rule(*_turned(given.q, given.k, given.v, given.g, given.b), scale=1.0
                                      )[0].transpose(1, 2)
    return mix


def _mamba(mamba_chunk_scan_combined, chunk: int = 256) -> Mix:
    """It takes gates as they come, and its A is -1 here; its own layer's chunk is 256."""
    def mix(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        q, k, v, gate = _turned(q / math.sqrt(q.size(-1)), k, v, gate)
        A = -torch.ones(q.size(2), device=q.device)
        return mamba_chunk_scan_combined(v, gate, A, k, q, chunk, dt_softplus=True).transpose(1, 2)
    return mix
