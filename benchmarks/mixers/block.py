"""The transformer block with a mixer in attention's place: its parameters, its FP64 truth, its work.

Parameters have the canonical names of `common.block.parameters`; the layer of the gates is "attn.gates", whose rows
are ordered [decay | strength], a row a head, as far as the mixer has them.
"""
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mixers import forms
from benchmarks.mixers.mixer import Mix, Mixer
from benchmarks.mixers.work import of_mixer
from common import steps
from common.block import oracle
from common.block.config import BlockConfig
from common.block.workload import ATTENTION, MATMUL, Operation, Workload

GATES = "attn.gates.weight", "attn.gates.bias"
FORGETS_AT = -3.0                          # mean of a decay's gate: over some twenty steps


class MixerLayer(nn.Module):
    """Its projections around a mixer, [B, S, E] -> [B, S, E]."""

    def __init__(self, config: BlockConfig, mixer: Mixer, mix: Mix):
        super().__init__()
        self.num_heads, self.mix = config.num_heads, mix
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.gates = nn.Linear(config.hidden_size, mixer.gates * config.num_heads) if mixer.gates else None
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        qkv = self.qkv(x).view(B, S, 3, self.num_heads, -1)       # [B, S, 3, H, D]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                      # [B, H, S, D] each
        gates = () if self.gates is None else by_head(self.gates(x), self.num_heads)
        with torch.autocast(x.device.type, enabled=False):        # which would round states
            y = self.mix(q, k, v, *gates)
        return self.proj(y.transpose(1, 2).flatten(2))


def by_head(gates: Tensor, heads: int) -> tuple[Tensor, ...]:
    """[B, S, G H] -> G of [B, H, S], in FP32 at least."""
    wide = gates.to(torch.promote_types(gates.dtype, torch.float32))
    return tuple(each.transpose(1, 2) for each in wide.split(heads, -1))


def seeded(config: BlockConfig, mixer: Mixer, seed: int) -> dict[str, Tensor]:
    """Values of the gates' layer, beside those of `parameters.seeded`; none where it has no gates."""
    if not mixer.gates:
        return {}
    E, rows = config.hidden_size, mixer.gates * config.num_heads
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, E, generator=generator) * E**-0.5
    bias = 0.2 * torch.randn(rows, generator=generator)
    bias[:config.num_heads] += FORGETS_AT * mixer.decays
    return dict(zip(GATES, (weight, bias), strict=True))


def build(mixer: Mixer, mix: Mix, config: BlockConfig, values: dict[str, Tensor], device: torch.device) -> nn.Module:
    """Step 2's block with that mixer. `values` are the canonical ones and those of `seeded`."""
    gates = {name: value for name, value in values.items() if name in GATES}
    block: Any = steps.load(2).build(config, {name: values[name] for name in values.keys() - gates.keys()}, device)
    with torch.device(device):
        layer = MixerLayer(config, mixer, mix)
    layer.qkv, layer.proj = block.attn.qkv, block.attn.proj
    block.attn = layer
    block.beside_canonical = tuple(gates)
    with torch.no_grad():
        for name, value in gates.items():
            block.get_parameter(name).copy_(value)
    return block


def truth_of(mixer: Mixer) -> oracle.Mix:
    """What `oracle.reference` is given: in chunks, which the tests hold against the recurrence in FP64.

    Step by step, all states of a long sequence would not fit.
    """
    def mix(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> Tensor:
        split = () if gates is None else by_head(gates, q.size(1))
        return forms.chunked(mixer.given(q, k, v, *split))[0]
    return mix


def workload(of_block: Workload, mixer: Mixer, config: BlockConfig, dtype: torch.dtype) -> Workload:
    """The block's, with the mixer's work in place of attention's, and the gates' projection."""
    own = of_mixer(mixer, (config.batch_size, config.num_heads, config.seq_len, config.head_dim), dtype)
    N, E, rows = config.tokens, config.hidden_size, mixer.gates * config.num_heads
    flops, moved, shape = 2 * N * E * rows, N * rows * dtype.itemsize, (N, E, rows)

    def in_place(operations: tuple[Operation, ...], of_mixer: tuple[Operation, ...], name: str, times: int
                 ) -> tuple[Operation, ...]:
        others = tuple(operation for operation in operations if operation.kind != ATTENTION)
        gates = (Operation(name, MATMUL, times * flops, times * moved, own.matmul, shape),) if rows else ()
        return others + of_mixer + gates
    return dataclasses.replace(of_block, forward=in_place(of_block.forward, own.forward, "gates", 1),
                               backward=in_place(of_block.backward, own.backward, "gates backward", 2))
