"""How blocks are spread over ranks: the words of --parallel, the mesh that they mean, what each of its dimensions deals
out and moves, and which layouts can't be.
"""
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.studies.distributed.sharding import Sharding
from common import parameters
from common.block.config import BlockConfig
from common.block.steps import Step

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"      # the dimensions of a mesh
EXAMPLES = "fsdp, hsdp:2x2, tp:2, tp:2+sp, or fsdp:2,tp:2"
# A plain fsdp shards over all ranks that are left, a plain hsdp:8 replicates over them.
_DATA = re.compile(r"fsdp(?::(\d+))?|hsdp:(?:(\d+)x)?(\d+)")
_TENSOR = re.compile(r"tp:(\d+)(\+sp)?")
# How tensor parallelism deals out a layer's parameters.
BY_ROWS = "attn.qkv.weight", "attn.qkv.bias", "mlp.fc.weight", "mlp.fc.bias"
BY_COLUMNS = "attn.proj.weight", "mlp.proj.weight"
GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"


@dataclass(frozen=True)
class Collective:
    """Of one kind over one dimension of the mesh: how often in a forward and backward, and the bytes of each.

    These are those of the whole tensor: what an all-gather gives, what a reduce-scatter takes. On a ring of N each rank
    sends (N - 1) / N of them, and twice that for an all-reduce.
    """
    kind: str
    over: str
    calls: int
    bytes: int


def dealt_along(name: str) -> int | None:
    """Along which tensor parallelism deals out a parameter; None where each rank has the whole."""
    return 0 if name in BY_ROWS else 1 if name in BY_COLUMNS else None


@dataclass(frozen=True)
class Layout:
    """Ranks as a mesh [replicate, shard, tensor].

    Parameters are sharded over `shard` and replicated over `replicate`, both with a batch of their own; `tensor` ranks
    share a batch and split the matmuls. With `sequence` these split what is between the matmuls along S, too.
    """
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Its dimensions, from the outermost in, and how many ranks each has."""
        return {REPLICATE: self.replicate, SHARD: self.shard, TENSOR: self.tensor}

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def batches(self) -> int:
        """How many batches a step takes: one for each rank, but for those that share one."""
        return self.replicate * self.shard

    @property
    def ranks_of_a_batch(self) -> int:
        """How many ranks share a batch, and its work."""
        return self.ranks // self.batches

    def batch_of(self, rank: int) -> int:
        """Which of them is that rank's: those that share one are neighbours."""
        return rank // self.ranks_of_a_batch

    @property
    def techniques(self) -> tuple[bool, ...]:
        """What it does, however many ranks there are."""
        is_split = self.ranks_of_a_batch > 1
        return self.replicate > 1, is_split, is_split and self.batches > 1, self.sequence

    def apart(self, dimension: str) -> int:
        """How many ranks lie between neighbours along it: the mesh's inner dimensions."""
        names = list(self.mesh)
        return math.prod(self.mesh[inner] for inner in names[names.index(dimension) + 1:])

    def elements_of(self, name: str, shape: Sequence[int]) -> int:
        """How many of a parameter's elements one rank has, padding included: rows are dealt out over the shards."""
        sizes, along = list(shape), dealt_along(name)
        if along is not None:
            sizes[along] //= self.tensor
        return math.ceil(sizes[0] / self.shard) * math.prod(sizes[1:])

    def elements_of_layer(self, config: BlockConfig) -> int:
        """How many elements of a layer's parameters one rank has, padding included."""
        return sum(self.elements_of(name, shape) for name, shape in parameters.shapes(config).items())

    def collectives(self, config: BlockConfig, layers: int, sharding: Sharding, dtype: torch.dtype, fp8: bool = False
                    ) -> list[Collective]:
        """What so many layers with parameters of that dtype move in a forward and backward, on one rank."""
        of_tensor = self._of_tensor(config, layers, sharding, dtype, fp8)
        moved = [*self._of_data(config, layers, sharding, dtype), *of_tensor]
        return [each for each in moved if self.mesh[each.over] > 1]

    def _of_data(self, config: BlockConfig, layers: int, sharding: Sharding, dtype: torch.dtype) -> list[Collective]:
        """FSDP gathers each layer's parameters for the forward, and once more for the backward where they were freed
        between. It reduces its gradients once. Shards are equal: rows are padded to a multiple of the ranks.
        """
        padded, policy = self.elements_of_layer(config) * self.shard, sharding.policy(config, dtype)
        gathered = padded * (policy.param_dtype or dtype).itemsize
        reduced = padded * (policy.reduce_dtype or dtype).itemsize
        return [Collective(GATHER, SHARD, layers * (2 if sharding.reshard else 1), gathered),
                Collective(SCATTER, SHARD, layers, reduced),
                Collective(REDUCE, REPLICATE, layers, reduced // self.shard)]

    def _of_tensor(self, config: BlockConfig, layers: int, sharding: Sharding, dtype: torch.dtype, fp8: bool
                   ) -> Iterator[Collective]:
        """Both halves of a block begin and end with a collective, forward and backward.

        What goes in is LayerNorm's output, what comes out a matmul's. Under autocast the latter is in 16 bits; in FP8
        so is the gradient of the former.
        """
        cast_to = sharding.policy(config, dtype).param_dtype or dtype
        multiplied_in = config.amp_dtype if config.amp_dtype and dtype == torch.float32 else dtype
        elements = config.tokens * config.hidden_size
        into, out_of = elements * (multiplied_in if fp8 else cast_to).itemsize, elements * multiplied_in.itemsize
        if not self.sequence:
            yield Collective(REDUCE, TENSOR, 2 * layers, out_of)           # forward: partial sums behind each half
            yield Collective(REDUCE, TENSOR, 2 * layers, into)             # backward: partial gradients before it
            return
        for kind, size in ((GATHER, into), (SCATTER, out_of), (GATHER, out_of), (SCATTER, into)):
            yield Collective(kind, TENSOR, 2 * layers, size)
        yield Collective(GATHER, TENSOR, 1, elements * cast_to.itemsize)   # the stack's output,
        yield Collective(GATHER, TENSOR, 1, elements * dtype.itemsize)     # and the gradient of its input
        for name, shape in parameters.shapes(config).items():
            if parameters.is_of_layer_norm(name):                          # each rank has seen a part of S
                yield Collective(REDUCE, TENSOR, layers, math.prod(shape) * cast_to.itemsize)

    def __str__(self) -> str:
        words = []
        if self.replicate > 1:
            words.append(f"hsdp:{self.replicate}x{self.shard}")
        elif self.shard > 1 or self.tensor == 1:
            words.append(f"fsdp:{self.shard}")
        if self.tensor > 1:
            words.append(f"tp:{self.tensor}" + "+sp" * self.sequence)
        return ",".join(words)

    @property
    def kind(self) -> str:
        """Its words without what grows with the ranks: "fsdp", "hsdp:8", "fsdp,tp:2"."""
        data = f"hsdp:{self.shard}" if self.replicate > 1 else "fsdp"
        return data + (f",tp:{self.tensor}" + "+sp" * self.sequence if self.tensor > 1 else "")

    def check(self, config: BlockConfig, step: Step) -> None:
        """Raise ValueError where blocks of that step and shape can't be spread so."""
        if self.sequence and step.traits.fp8:
            raise ValueError(f"--parallel {self}: Transformer Engine deals out the first dimension, and in "
                             f"{step.name} that is the batch; leave out +sp, or give another step")
        for what, size in (("num_heads", config.num_heads), ("ffn_hidden_size", config.ffn_hidden_size)):
            if size % self.tensor:
                fits = max(n for n in range(1, self.tensor) if size % n == 0)
                raise ValueError(f"--parallel {self}: {what} {size} is not divisible by {self.tensor}; try tp:{fits}")
        if step.traits.fp8 and config.amp_dtype is not None:
            self._check_fp8(config)
        if self.sequence and config.seq_len % self.tensor:
            raise ValueError(f"--parallel {self}: seq_len {config.seq_len} is not divisible by {self.tensor}; try "
                             f"--seq-len {config.seq_len + self.tensor - config.seq_len % self.tensor}")

    def _check_fp8(self, config: BlockConfig) -> None:
        """Raise ValueError where the block, or a rank's part of it, is none that FP8 GEMMs take."""
        config.check_fp8()
        for what, size in (("hidden_size", config.hidden_size), ("ffn_hidden_size", config.ffn_hidden_size)):
            if size % (16 * self.tensor):
                raise ValueError(f"--parallel {self}: a rank has {size // self.tensor} of {what} {size}; FP8 needs a "
                                 "multiple of 16")


def parsed(text: str, ranks: int) -> Layout:
    """"fsdp:2,tp:2" on so many ranks. Raises ValueError for other words, and where the ranks do not fit."""
    data, tensor = None, None
    for word in text.split(","):
        if (found := _DATA.fullmatch(word.strip())) and data is None:
            data = found
        elif (found := _TENSOR.fullmatch(word.strip())) and tensor is None:
            tensor = found
        else:
            raise ValueError(f"--parallel {text}: {word.strip() or 'nothing'!r} is no layout; give {EXAMPLES}")
    given = [int(number) for number in (*(data.groups() if data else ()), tensor and tensor[1]) if number]
    if min(given, default=1) < 1:
        raise ValueError(f"--parallel {text}: give numbers from 1 on")
    split = int(tensor[1]) if tensor else 1
    shard = int(data[1] or data[3] or ranks // split) if data else 1       # a plain fsdp takes what is left
    replicate = int(data[2] or ranks // split // shard) if data and data[3] else 1
    if ranks % split:
        raise ValueError(f"--parallel {text}: {ranks} ranks are not divisible by tp:{split}")
    layout = Layout(replicate, shard, split, bool(tensor and tensor[2]))
    if layout.ranks != ranks:
        raise ValueError(f"--parallel {text}: that is {layout.ranks} ranks, and there are {ranks}")
    return layout
