"""The block as a workload: the operations that no implementation of it can leave out.

Elementwise work that can ride on a matmul (bias, GELU, residual, casts) costs no pass here; a LayerNorm costs a pass of
its own, because a row must be complete before the matmul behind it can start.
"""
import torch

from . import memory
from .config import BlockConfig
from .traits import Arithmetic, Traits
from .workload import ATTENTION, MATMUL, MEMORY, Operation, Workload, causal_attention_flops


def workload(config: BlockConfig, traits: Traits, parameter_dtype: torch.dtype, device: torch.device) -> Workload:
    """What a block with those traits has to do on that device."""
    return work_in(traits.arithmetic(config, parameter_dtype, device), config, memory.needed(config, traits, device))


def work_in(a: Arithmetic, config: BlockConfig, bytes_needed: int = 0) -> Workload:
    """The block's work in that arithmetic. Causal attention is counted as the half it needs.

    Forward: 8 B S E^2 + 4 B S E F + 2 B S^2 E FLOPs (for F = 4E: 24 B S E^2 + 2 B S^2 E); a backward is twice that.
    """
    return Workload(a.matmul, _forward(a, config), _backward(a, config), config.tokens, bytes_needed)


def _matmuls(config: BlockConfig) -> dict[str, tuple[int, int]]:
    """Name -> (inner, outer) of [N, inner] x [inner, outer]."""
    E, F = config.hidden_size, config.ffn_hidden_size
    return {"qkv": (E, 3 * E), "attention projection": (E, E), "fc": (E, F), "mlp projection": (F, E)}


def _attention(name: str, layout: str, a: Arithmetic, config: BlockConfig, times: int) -> Operation:
    """Of q, k, v and the result forward; of twice as much backward, which need not compute the scores again."""
    B, S, E, D = config.batch_size, config.seq_len, config.hidden_size, config.head_dim
    flops = B * config.num_heads * causal_attention_flops(S, D, D)
    return Operation(name, ATTENTION, times * flops, times * 4 * B * S * E * a.activation_bytes, a.attention,
                     (B, S, config.num_heads, D), layout)


def _forward(a: Arithmetic, config: BlockConfig) -> tuple[Operation, ...]:
    N, E, F = config.tokens, config.hidden_size, config.ffn_hidden_size
    p, t = a.parameter_bytes, a.activation_bytes
    g, w = a.operand_bytes, a.weight_bytes
    # What a matmul reads and writes beyond its own weight: the residual joins, and leaves, the two projections.
    extra = {"qkv": 3 * E * t, "attention projection": 2 * E * min(p, t), "fc": F * g, "mlp projection": E * (t + p)}
    work = [Operation("layer norms", MEMORY, 0, N * E * (p + min(p, t) + 2 * g)),
            _attention("attention", "forward", a, config, 1)]
    for name, (inner, outer) in _matmuls(config).items():
        moved = N * inner * g + inner * outer * w + N * extra[name]
        work.append(Operation(name, MATMUL, 2 * N * inner * outer, moved, a.matmul, (N, inner, outer)))
    return tuple(work)


def _backward(a: Arithmetic, config: BlockConfig) -> tuple[Operation, ...]:
    N, E = config.tokens, config.hidden_size
    p, t = a.parameter_bytes, a.activation_bytes
    g, w = a.operand_bytes, a.weight_bytes
    work = [Operation("layer norms backward", MEMORY, 0, N * E * 2 * (2 * t + min(p, t))),
            _attention("attention backward", "backward", a, config, 2)]
    for name, (inner, outer) in _matmuls(config).items():
        # The weight once more, or a copy in the operands' dtype that the forward wrote.
        of_input = N * outer * g + inner * outer * min(w, 2 * g) + N * inner * t
        of_weight = N * outer * g + N * inner * g + inner * outer * p
        for layout, moved, shape in (("input gradient", of_input, (N, outer, inner)),
                                     ("weight gradient", of_weight, (outer, N, inner))):
            work.append(Operation(f"{name}, {layout}", MATMUL, 2 * N * inner * outer, moved, a.matmul, shape, layout))
    return tuple(work)
