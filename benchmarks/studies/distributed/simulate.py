"""The account of thousands of ranks in one process: no tensor holds data, and no message is sent.

What is seen is the first rank. Its blocks are built, sharded and run as real ones are, on tensors that know their shape
alone, in a group that answers by itself. What such a group gathers and reduces means nothing: only sizes are looked at.
"""
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.studies.distributed import account, timed
from benchmarks.studies.distributed.account import Counting, Moved
from benchmarks.studies.distributed.layout import Layout
from benchmarks.studies.distributed.parallel import build, mesh_of, seeded
from benchmarks.studies.distributed.proof import adamw
from benchmarks.studies.distributed.sharding import Sharding
from common.block.config import BlockConfig
from common.block.steps import Step

CPU = torch.device("cpu")
SOFTMAX = torch.Tensor.softmax, torch.softmax, torch.nn.functional.softmax
SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default
NO_GROUP = "Could not resolve the process group"           # fsdp with tp+sp in torch 2.9


@dataclass(frozen=True)
class Seen:
    """What a step moves on the first rank, what that keeps (the bytes of its shards, as often as it has copies), and
    the most that it holds at once in a training step with AdamW.
    """
    moved: dict[str, Moved]
    state_bytes: int
    peak_bytes: int


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """As the first of so many ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class AutocastOfGPU(TorchFunctionMode):
    """A GPU's autocast has softmax in FP32, made of FP16 without a copy; a CPU's has it in 16 bits.

    Memory is to be foreseen for GPUs. Source: softmax in ATen's SoftMax.cpp.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        is_asked = bool((kwargs or {}).get("dtype"))       # for a dtype: it is no matter of autocast
        if function not in SOFTMAX or is_asked or not torch.is_autocast_enabled("cpu"):
            return function(*args, **(kwargs or {}))
        scores, dim = _of_softmax(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            if scores.dtype == torch.float16:
                return torch.ops.aten._softmax(scores, dim, True)
            return scores.float().softmax(dim)


def _of_softmax(scores: Tensor, dim: int, **_: Any) -> tuple[Tensor, int]:
    """As softmax takes them, by place or by name. torch.nn.functional's passes on what else it was not given."""
    return scores, dim


class ProductInSoftmax(TorchDispatchMode):
    """A GPU's backward of softmax holds gradient times output meanwhile, of all scores. A CPU's does not.

    Source: softmax_backward_cuda_out in ATen's SoftMax.cu.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        meanwhile = args[0] * args[1] if function is SOFTMAX_BACKWARD else None
        gradient = function(*args, **(kwargs or {}))
        del meanwhile
        return gradient


def seen_at(step: Step, config: BlockConfig, layers: int, layout: Layout, sharding: Sharding) -> Seen:
    """A forward and backward of spread blocks, and a training step. Raises NotImplementedError where torch can't."""
    try:
        return _seen_at(step, config, layers, layout, sharding)
    except RuntimeError as error:
        if NO_GROUP not in str(error):
            raise
        raise NotImplementedError(f"torch {torch.__version__} does not find its groups when it simulates this layout"
                                  ) from None


def _seen_at(step: Step, config: BlockConfig, layers: int, layout: Layout, sharding: Sharding) -> Seen:
    fake = FakeTensorMode(allow_non_fake_inputs=True)      # the tensors that become fake are not yet
    with fake_group(layout.ranks):
        mesh = mesh_of(layout, CPU)

        def make(layer: int) -> nn.Module:
            with torch.device("meta"):                     # to shard fake tensors takes long at 1024 ranks
                return step.module.Block(config)
        stack = build(make, config, layers, layout, mesh, sharding, torch.float32)
        with fake:
            stack.to_empty(device="cpu")
        optimizer = adamw(list(stack.parameters()))
        with fake, AutocastOfGPU():
            x = torch.empty(config.batch_size, config.seq_len, config.hidden_size, requires_grad=True)
            dy = torch.empty_like(x)
            with Counting() as counting:
                stack(x).backward(dy)
            optimizer.step()                               # what AdamW keeps is there from here on
            stack.zero_grad(set_to_none=True)
            x.grad = None
            with FSDPMemTracker(stack, optimizer) as tracker, ProductInSoftmax():
                tracker.track_inputs((x, dy))
                stack(x).backward(dy)
                optimizer.step()
            peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
        kept = sum(account.own(parameter).nbytes for parameter in stack.parameters())
    return Seen(counting.moved, kept * account.COPIES, peak)


def measured_peak(step: Step, config: BlockConfig, layers: int, layout: Layout, sharding: Sharding,
                  device: torch.device) -> int:
    """The most that a GPU holds at once when it really runs what the first rank runs. It needs the memory."""
    with fake_group(layout.ranks):
        make = seeded(step, config, layout, 0, torch.float32, device)
        stack = build(make, config, layers, layout, mesh_of(layout, device), sharding, torch.float32)
        shape = config.batch_size, config.seq_len, config.hidden_size
        x, dy = (torch.randn(shape, device=device) for _ in range(2))
        return timed.peak_bytes(stack, x, dy)
