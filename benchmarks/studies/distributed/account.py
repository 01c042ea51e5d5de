"""What a training step moves between ranks and what each rank keeps: counted as it runs, and by formula.

The bytes of a collective are those of its whole tensor: what an all-gather gives, what a reduce-scatter takes. On a
ring of N each rank sends (N - 1) / N of them, and twice that for an all-reduce.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.studies.distributed.layout import Layout
from benchmarks.studies.distributed.parallel import Sharding, dealt_along
from common import parameters
from common.block.config import BlockConfig

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
KINDS = {"allgather": GATHER, "all_gather": GATHER, "reduce_scatter": SCATTER, "allreduce": REDUCE,
         "all_reduce": REDUCE}             # what the names of operators hold
NOTHING = ("wait_tensor", "_wrap_tensor_autograd")         # of one that was counted when it began
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
            sizes = {bytes_of(each) for each in (*args, result)} - {0}
            is_alone = kind in (GATHER, SCATTER) and len(sizes) == 1       # torch 2.9 calls it in a group of one, too
            if not is_alone:
                self.moved[kind] = self.moved.get(kind, Moved()) + Moved(1, max(sizes, default=0))
        return result


def kind_of(name: str) -> str | None:
    """Of an operator of torch.distributed: its own name where no formula knows it. None where it moves nothing."""
    if any(words in name for words in NOTHING):
        return None
    return next((kind for words, kind in KINDS.items() if words in name), name)


def bytes_of(argument: Any) -> int:
    """Of a tensor, or of several."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Tensor))


def expected(config: BlockConfig, layers: int, layout: Layout, sharding: Sharding, dtype: torch.dtype,
             fp8: bool = False) -> dict[str, Moved]:
    """What so many layers with parameters of that dtype must move.

    FSDP gathers each layer's parameters for the forward, and once more for the backward where they were freed between.
    It reduces its gradients once. Shards are equal: rows are padded to a multiple of the ranks.
    """
    moved: dict[str, Moved] = {}

    def add(kind: str, calls: int, size: int) -> None:
        moved[kind] = moved.get(kind, Moved()) + Moved(calls, calls * size)
    gathered, reduced = bytes_of_layer(config, layout, sharding, dtype)
    if layout.shard > 1:
        add(GATHER, layers * (2 if sharding.reshard else 1), gathered)
        add(SCATTER, layers, reduced)
    if layout.replicate > 1:
        add(REDUCE, layers, reduced // layout.shard)
    if layout.tensor > 1:
        _add_tensor(add, config, layers, layout, sharding, dtype, fp8)
    return moved


def bytes_of_layer(config: BlockConfig, layout: Layout, sharding: Sharding, dtype: torch.dtype) -> tuple[int, int]:
    """Of its parameters when they are gathered, and of its gradients when they are reduced, padding included."""
    padded = elements_of_layer(config, layout) * layout.shard
    policy = sharding.policy(config, dtype)
    gathered_in, reduced_in = policy.param_dtype or dtype, policy.reduce_dtype or dtype
    return padded * gathered_in.itemsize, padded * reduced_in.itemsize


def _add_tensor(add: Callable[[str, int, int], None], config: BlockConfig, layers: int, layout: Layout,
                sharding: Sharding, dtype: torch.dtype, fp8: bool) -> None:
    """Of tensor parallelism: both halves of a block begin and end with a collective, forward and backward.

    What goes in is LayerNorm's output, what comes out a matmul's. Under autocast the latter is in 16 bits; in FP8 so
    is the gradient of the former.
    """
    cast_to = sharding.policy(config, dtype).param_dtype or dtype
    multiplied_in = config.amp_dtype if config.amp_dtype and dtype == torch.float32 else dtype
    elements = config.tokens * config.hidden_size
    into, out_of = elements * (multiplied_in if fp8 else cast_to).itemsize, elements * multiplied_in.itemsize
    if not layout.sequence:
        add(REDUCE, 2 * layers, out_of)                    # forward: partial sums behind each half
        add(REDUCE, 2 * layers, into)                      # backward: partial gradients before it
        return
    for kind, size in ((GATHER, into), (SCATTER, out_of), (GATHER, out_of), (SCATTER, into)):
        add(kind, 2 * layers, size)
    add(GATHER, 1, elements * cast_to.itemsize)            # the stack's output, and the gradient of its input
    add(GATHER, 1, elements * dtype.itemsize)
    norms = [shape for name, shape in parameters.shapes(config).items() if parameters.is_of_layer_norm(name)]
    for shape in norms:                                    # each rank has seen a part of S
        add(REDUCE, layers, math.prod(shape) * cast_to.itemsize)


def elements_of_layer(config: BlockConfig, layout: Layout) -> int:
    """How many elements of its parameters one rank has, padding included."""
    shapes = parameters.shapes(config)
    return sum(layout.elements_of(shape, dealt_along(name)) for name, shape in shapes.items())


def expected_state(config: BlockConfig, layers: int, layout: Layout, dtype: torch.dtype) -> int:
    """Bytes that the first rank keeps."""
    return layers * elements_of_layer(config, layout) * dtype.itemsize * COPIES


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
