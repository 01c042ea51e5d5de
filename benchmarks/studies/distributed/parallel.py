"""Blocks of a step, one after the other, spread over ranks by torch.distributed's own means.

What tensor parallelism is in step 4 is its engine's: Transformer Engine makes modules that are parts of whole ones.
"""
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.studies.distributed.layout import REPLICATE, SHARD, TENSOR, Layout, dealt_along
from benchmarks.studies.distributed.sharding import Sharding
from common import parameters
from common.block.config import BlockConfig
from common.block.steps import Step
from common.runtime import engine

FUSED = ("attn.qkv.weight", "attn.qkv.bias")
Make = Callable[[int], nn.Module]                          # the number of a layer -> its block


class Layer(nn.Module):
    """A block, as FSDP takes it: the hooks of this one stand outside of what step 3 compiles. [B, S, E] -> the same."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Stack(nn.Module):
    """Layers one after the other, [B, S, E] -> [B, S, E]; with `sequence`, a mesh, each rank has a part of S inside."""

    def __init__(self, layers: Sequence[nn.Module], sequence: DeviceMesh | None = None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.sequence = sequence

    def forward(self, x: Tensor) -> Tensor:
        x = self._turned(x, Replicate(), Shard(1))
        for layer in self.layers:
            x = layer(x)
        return self._turned(x, Shard(1), Replicate()).clone()              # FSDP's hooks take no view

    def _turned(self, x: Tensor, held: Placement, wanted: Placement) -> Tensor:
        if self.sequence is None:
            return x
        spread = DTensor.from_local(x, self.sequence, [held], run_check=False)
        return spread.redistribute(placements=[wanted]).to_local()

    @property
    def blocks(self) -> list[nn.Module]:
        return [cast(Layer, layer).block for layer in self.layers]


def dealt(values: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """The rows [Q | K | V] of the fused projection as [Q_r | K_r | V_r] of one rank after the other.

    Each rank gets as many rows in a row. Of [Q | K | V] itself two ranks would have Q and half of K, and the rest.
    """
    return {name: value.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2) if name in FUSED else value
            for name, value in values.items()}


def part_of(values: dict[str, Tensor], ranks: int, rank: int) -> dict[str, Tensor]:
    """What one rank has of them: [Q_r | K_r | V_r] of the fused projection, whose rows must be dealt already."""
    return {name: value if (along := dealt_along(name)) is None else value.chunk(ranks, along)[rank]
            for name, value in values.items()}


def joined(name: str, part: Tensor, block: nn.Module) -> Tensor:
    """The whole of what an engine has dealt out, which DTensor knows nothing of. Every rank must call it."""
    group, along = getattr(block, "dealt_over", None), dealt_along(name)
    if group is None or along is None:
        return part
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group)
    return torch.cat(parts, along)


def gathered(name: str, whole: Tensor, ranks: int) -> Tensor:
    """The rows of a parameter or its gradient in canonical order again."""
    return whole.unflatten(0, (ranks, 3, -1)).transpose(0, 1).flatten(0, 2) if name in FUSED else whole


def split(block: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Deal out a block's heads and its MLP's hidden units over the ranks of `mesh`, in place.

    With `sequence` what is between the matmuls is dealt out along S too, [B, S / ranks, E] on each rank. Step 4's
    engine has dealt out its modules itself.
    """
    attention: Any = block.attn
    attention.num_heads //= mesh.size()
    if hasattr(block, "engine"):
        return
    into = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan: dict[str, ParallelStyle] = {"attn.qkv": ColwiseParallel(), "attn.proj": into, "mlp.fc": ColwiseParallel(),
                                      "mlp.proj": into}
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"ln_1": SequenceParallel(), "ln_2": SequenceParallel(), "attn": whole, "mlp": whole}
    parallelize_module(block, mesh, plan)


def values_of(config: BlockConfig, layer: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The canonical parameters of a layer: each has values of its own."""
    return {name: value.to(dtype) for name, value in parameters.seeded(config, seed + layer).items()}


def mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    """All ranks, by the dimensions of the layout. Every rank must call it."""
    return init_device_mesh(device.type, tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh))


def seeded(step: Step, config: BlockConfig, layout: Layout, seed: int, dtype: torch.dtype, device: torch.device,
           mesh: DeviceMesh | None = None) -> Make:
    """Makes the blocks of a step, each with values of its own, its rows dealt to the ranks that split it.

    `mesh` is that of all ranks, which tensor parallelism of step 4 needs: an engine makes its modules as parts.
    """
    def make(layer: int) -> nn.Module:
        values = dealt(values_of(config, layer, seed, dtype), layout.tensor)
        if layout.tensor == 1 or not step.traits.fp8:
            return step.build(config, values, device)
        assert mesh is not None
        group, rank = mesh[TENSOR].get_group(), mesh[TENSOR].get_local_rank()
        with engine.split_over(group):
            block: Any = step.build(config, part_of(values, layout.tensor, rank), device)
        block.dealt_over = group
        return block
    return make


def build(make: Make, config: BlockConfig, layers: int, layout: Layout, mesh: DeviceMesh, sharding: Sharding,
          dtype: torch.dtype) -> Stack:
    """So many blocks on this rank. One is made and sharded after the other: whole they may not fit."""
    of_data = mesh[REPLICATE, SHARD] if layout.replicate > 1 else mesh[SHARD]
    policy = sharding.policy(config, dtype)
    every = []
    for number in range(layers):
        block = make(number)
        if layout.tensor > 1:
            split(block, mesh[TENSOR], layout.sequence)
        layer: nn.Module = Layer(block)
        fully_shard(layer, mesh=of_data, reshard_after_forward=sharding.reshard, mp_policy=policy)
        every.append(layer)
    stack = Stack(every, mesh[TENSOR] if layout.sequence else None)
    whole = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=policy.reduce_dtype, output_dtype=dtype,
                                 cast_forward_inputs=True)
    fully_shard(stack, mesh=of_data, reshard_after_forward=False, mp_policy=whole)         # it has none of its own
    _set(stack, layout, sharding, mesh.device_type)
    return stack


def share_scales(stack: Stack, is_shared: bool) -> None:
    """Whether Transformer Engine takes FP8's scales from the largest values of all ranks, by collectives of its own.

    It does so by default wherever there is a process group. The emulation never does: its recipe has no such field.
    """
    for block in stack.blocks:
        recipe: Any = getattr(block, "recipe", None)
        if hasattr(recipe, "reduce_amax"):
            recipe.reduce_amax = is_shared


def _set(stack: Stack, layout: Layout, sharding: Sharding, device_type: str) -> None:
    """Tell each layer what its gradients are divided by, and which layers to gather ahead."""
    layers: list[FSDPModule] = [layer for layer in stack.layers if isinstance(layer, FSDPModule)]
    for place, layer in enumerate(layers):
        layer.set_force_sum_reduction_for_comms(device_type == "cpu")      # Gloo knows no other, and divides apart
        if layout.shard > 1:                                               # else torch 2.14 would divide twice
            layer.set_gradient_divide_factor(sharding.divide_by or layout.batches)
        if sharding.prefetch:
            layer.set_modules_to_forward_prefetch(layers[place + 1:place + 1 + sharding.prefetch])
            layer.set_modules_to_backward_prefetch(layers[max(0, place - sharding.prefetch):place][::-1])
