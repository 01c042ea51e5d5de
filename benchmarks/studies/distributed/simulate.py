"""The account of thousands of ranks in one process: no tensor holds data, and no message is sent.

What is seen is the first rank. Its blocks are built, sharded and run as real ones are, on tensors that know their shape
alone, in a group that answers by itself. No optimizer step is run: such a group leaves gradients as they are.
"""
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.studies.distributed import account
from benchmarks.studies.distributed.account import Counting, Moved
from benchmarks.studies.distributed.layout import Layout
from benchmarks.studies.distributed.parallel import Sharding, build, mesh_of
from common.block.config import BlockConfig
from common.block.steps import Step

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Seen:
    """What a step moves on the first rank, and what that keeps: the bytes of its shards, as often as it has copies."""
    moved: dict[str, Moved]
    state_bytes: int


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """As the first of so many ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def seen_at(step: Step, config: BlockConfig, layers: int, layout: Layout, sharding: Sharding) -> Seen:
    """One forward and backward of spread blocks."""
    fake = FakeTensorMode()
    with fake_group(layout.ranks):
        mesh = mesh_of(layout, CPU)

        def make(layer: int) -> nn.Module:
            with fake:                                     # it is sharded outside of that, and runs inside
                return step.module.Block(config)           # nothing is loaded: a fake tensor can't be moved
        stack = build(make, config, layers, layout, mesh, sharding, torch.float32)
        with fake, Counting() as counting:
            x = torch.empty(config.batch_size, config.seq_len, config.hidden_size, requires_grad=True)
            stack(x).square().mean().backward()
        kept = sum(account.own(parameter).nbytes for parameter in stack.parameters())
    return Seen(counting.moved, kept * account.COPIES)
