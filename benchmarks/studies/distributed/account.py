"""What a training step moves between ranks and what each rank keeps: counted as it runs, and by formula.

The bytes of a collective are those of its whole tensor: what an all-gather gives, what a reduce-scatter takes. On a
ring of N each rank sends (N - 1) / N of them, and twice that for an all-reduce.
"""
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.studies.distributed.layout import Layout
from benchmarks.studies.distributed.parallel import Sharding
from common import parameters
from common.block.config import BlockConfig

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
KINDS = {"allgather": GATHER, "all_gather": GATHER, "reduce_scatter": SCATTER, "allreduce": REDUCE,
         "all_reduce": REDUCE}             # what the names of operators hold
STATE = "parameters, gradients, AdamW"     # what a rank keeps from step to step
COPIES = 4                                 # of the parameters: they, their gradients, both of AdamW's averages


@dataclass(frozen=True)
class Moved:
    """By one kind of collective, in one forward and backward, on one rank."""
    calls: int = 0
    bytes: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.calls + other.calls, self.bytes + other.bytes)


class Counting(TorchDispatchMode):
    """Counts what collectives move while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[str, Moved] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace and (kind := kind_of(func.__name__)):
            most = max(map(bytes_of, (*args, result)))
            self.moved[kind] = self.moved.get(kind, Moved()) + Moved(1, most)
        return result


def kind_of(name: str) -> str | None:
    """Of an operator of torch.distributed; None where it moves nothing that is counted."""
    return next((kind for words, kind in KINDS.items() if words in name), None)


def bytes_of(argument: Any) -> int:
    """Of a tensor, or of several."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Tensor))


def expected(config: BlockConfig, layers: int, layout: Layout, sharding: Sharding, dtype: torch.dtype
             ) -> dict[str, Moved]:
    """What FSDP must move for so many layers with parameters of that dtype.

    Each layer's parameters are gathered for the forward, and once more for the backward where they were freed between.
    Its gradients are reduced once. Shards are equal: rows are padded to a multiple of the ranks.
    """
    padded = sum(sizes_of(config, layout.shard)) * layout.shard
    policy = sharding.policy(config, dtype)
    gathered_in, reduced_in = policy.param_dtype or dtype, policy.reduce_dtype or dtype
    moved = {}
    if layout.shard > 1:
        gathers = layers * (2 if sharding.reshard else 1)
        moved[GATHER] = Moved(gathers, gathers * padded * gathered_in.itemsize)
        moved[SCATTER] = Moved(layers, layers * padded * reduced_in.itemsize)
    if layout.replicate > 1:
        moved[REDUCE] = Moved(layers, layers * padded // layout.shard * reduced_in.itemsize)
    return moved


def sizes_of(config: BlockConfig, ranks: int) -> Iterator[int]:
    """How many elements of each parameter one rank has, padding included: rows are dealt out."""
    for rows, *others in parameters.shapes(config).values():
        yield math.ceil(rows / ranks) * math.prod(others)


def expected_state(config: BlockConfig, layers: int, layout: Layout, dtype: torch.dtype) -> int:
    """Bytes that the first rank keeps."""
    return layers * sum(sizes_of(config, layout.shard)) * dtype.itemsize * COPIES


def state_of(stack: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The same, of what there is on this rank behind an optimizer step. AdamW's count of steps is left out."""
    kept: list[Any] = []
    for parameter in stack.parameters():
        kept += [parameter, parameter.grad]
        kept += [each for each in optimizer.state[parameter].values() if isinstance(each, Tensor) and each.ndim]
    return sum(own(each).nbytes for each in kept if each is not None)


def own(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
