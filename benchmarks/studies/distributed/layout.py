"""How blocks are spread over ranks: the words of --parallel, the mesh they mean, and which of them can't be."""
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from common.block.config import BlockConfig
from common.block.steps import Step

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"      # the dimensions of a mesh
EXAMPLES = "fsdp, hsdp:2x2, tp:2, tp:2+sp, or fsdp:2,tp:2"
# A plain fsdp shards over all ranks that are left, a plain hsdp:8 replicates over them.
_DATA = re.compile(r"fsdp(?::(\d+))?|hsdp:(?:(\d+)x)?(\d+)")
_TENSOR = re.compile(r"tp:(\d+)(\+sp)?")


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

    def elements_of(self, shape: Sequence[int], dealt_along: int | None) -> int:
        """How many of a parameter's elements one rank has, padding included: rows are dealt out over the shards."""
        sizes = list(shape)
        if dealt_along is not None:
            sizes[dealt_along] //= self.tensor
        return math.ceil(sizes[0] / self.shard) * math.prod(sizes[1:])

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
