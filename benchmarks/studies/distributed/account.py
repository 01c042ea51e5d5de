"""What a training step moves between ranks and what each rank keeps: counted as it runs, and by formula."""
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.studies.distributed.layout import GATHER, REDUCE, SCATTER, Layout
from benchmarks.studies.distributed.sharding import Sharding
from common.block.config import BlockConfig

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
    """What so many layers with parameters of that dtype must move, by the kind of the collective."""
    moved: dict[str, Moved] = {}
    for each in layout.collectives(config, layers, sharding, dtype, fp8):
        moved[each.kind] = moved.get(each.kind, Moved()) + Moved(each.calls, each.calls * each.bytes)
    return moved


def expected_state(config: BlockConfig, layers: int, layout: Layout, dtype: torch.dtype) -> int:
    """Bytes that the first rank keeps."""
    return layers * layout.elements_of_layer(config) * dtype.itemsize * COPIES


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
