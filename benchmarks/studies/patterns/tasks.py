"""The rows of the study of patterns: what each computes, made for a length; how it is built, checked and counted."""
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.patterns import checking, paged
from benchmarks.patterns.pattern import BUCKETS, Pattern, allowed_pairs, pattern_named, random_documents
from benchmarks.patterns.ways import WAYS, Attend, Shape, why_no_backward
from common.block.config import BlockConfig, dtype_name
from common.block.workload import ATTENTION, BACKWARD, Operation, Workload, attention_flops
from common.runtime.iteration import BOTH, FORWARD


@dataclass(frozen=True)
class Task(ABC):
    """What all ways of a row compute: how it is built, what it is called with, checked by and held against."""
    shape: Shape

    @property
    def length(self) -> int:
        """S, as people call it: of the queries, or of the longest cache."""
        return self.shape.queries

    @abstractmethod
    def build(self, way: str) -> Attend:
        """The function, with what it keeps. Raises NotImplementedError with the reason."""

    @abstractmethod
    def has_backward(self, way: str) -> bool:
        """Whether it has one there."""

    @abstractmethod
    def inputs(self, seed: int) -> list[Tensor]:
        """What the function is called with."""

    @abstractmethod
    def check(self, attend: Attend, given: Sequence[Tensor], seed: int, has_backward: bool) -> dict[str, float]:
        """What -> error against FP64. Raises Failed where one is beyond its gate."""

    @abstractmethod
    def least_flops(self, mode: str) -> float:
        """Of an iteration: of pairs that are seen alone."""

    @abstractmethod
    def least_bytes(self, mode: str) -> float:
        """That an iteration must read and write."""

    @abstractmethod
    def control(self) -> "Task":
        """Plain attention of the same sizes, by `scaled_dot_product_attention` without a mask."""

    def workload(self) -> Workload:
        """At the matmul rate of this machine, and of the bytes; on a CPU it has no limit."""
        dtype = dtype_name(self.shape.dtype)
        if self.shape.device.type != "cuda":
            return Workload(dtype)
        flops, moved = self.least_flops(FORWARD), self.least_bytes(FORWARD)
        forward = Operation(FORWARD, ATTENTION, flops, moved, dtype)
        backward = Operation(BACKWARD, ATTENTION, self.least_flops(BOTH) - flops, self.least_bytes(BOTH) - moved, dtype)
        return Workload(dtype, (forward,), (backward,), self.shape.batch * self.shape.queries)


@dataclass(frozen=True)
class PatternTask(Task):
    """Attention under a pattern."""
    pattern: Pattern
    trains: bool = True

    def build(self, way: str) -> Attend:
        return WAYS[way](self.pattern, self.shape)

    def has_backward(self, way: str) -> bool:
        return self.trains and not why_no_backward(way, self.shape.device)

    def inputs(self, seed: int) -> list[Tensor]:
        return checking.inputs_of(self.pattern, self.shape, seed)

    def check(self, attend: Attend, given: Sequence[Tensor], seed: int, has_backward: bool) -> dict[str, float]:
        return checking.check(attend, self.pattern, self.shape, given, seed, has_backward)

    def least_flops(self, mode: str) -> float:
        shape = self.shape
        pairs = shape.heads * allowed_pairs(self.pattern, shape.batch, shape.queries, shape.keys)
        return float(attention_flops(pairs, shape.width, shape.of_values, mode))

    def least_bytes(self, mode: str) -> float:
        """q, k, v and the result once; with a backward once more, and their gradients."""
        shape = self.shape
        of_queries = shape.batch * shape.heads * shape.queries * shape.width
        of_keys = shape.batch * shape.kv_heads * shape.keys * shape.width
        return (1 if mode == FORWARD else 3) * 2.0 * (of_queries + of_keys) * shape.dtype.itemsize

    def control(self) -> Task:
        """Causal, of as many keys as queries."""
        heads, length = self.shape.heads, self.shape.queries
        return PatternTask(replace(self.shape, kv_heads=heads, keys=length, value_width=None), pattern_named("causal"))


@dataclass(frozen=True)
class PagedTask(Task):
    """A decode step over a paged cache."""

    @property
    def length(self) -> int:
        return self.shape.keys

    def build(self, way: str) -> Attend:
        return paged.WAYS[way](self.shape)

    def has_backward(self, way: str) -> bool:
        return False

    def inputs(self, seed: int) -> list[Tensor]:
        return paged.inputs_of(self.shape, seed)

    def check(self, attend: Attend, given: Sequence[Tensor], seed: int, has_backward: bool) -> dict[str, float]:
        return paged.check(attend, self.shape, given)

    def least_flops(self, mode: str) -> float:
        pairs = self.shape.heads * sum(paged.lengths_of(self.shape))
        return float(attention_flops(pairs, self.shape.width, self.shape.width))

    def least_bytes(self, mode: str) -> float:
        """The keys and values that count, once; queries and results."""
        shape = self.shape
        of_keys = shape.kv_heads * shape.width * sum(paged.lengths_of(shape))
        return 2.0 * (of_keys + shape.batch * shape.heads * shape.width) * shape.dtype.itemsize

    def control(self) -> Task:
        """Over a cache in one piece that is full."""
        return PatternTask(self.shape, pattern_named("full"), trains=False)


@dataclass(frozen=True)
class Question:
    """A row of the study: a pattern that is made for a length, and how many heads and keys it has."""
    make: Callable[[Shape], Pattern]
    grouped: int = 1                       # heads of queries that share one of keys
    longer: int = 1                        # keys for each query

    def at(self, length: int, config: BlockConfig, dtype: torch.dtype, device: torch.device) -> Task:
        """The task: of as many tokens as the config has, at least one sequence.

        Raises ValueError where the pattern means nothing else than another at that length.
        """
        shape = Shape(_sequences(config, length), config.num_heads, _shared(config.num_heads, self.grouped), length,
                      self.longer * length, config.head_dim, dtype, device)
        pattern = self.make(shape)
        if pattern.differential is not None:
            shape = replace(shape, value_width=2 * shape.width)
        pattern.check(shape.batch, shape.heads, shape.queries, shape.keys)
        if pattern.window is not None and pattern.window >= length:
            raise ValueError(f"a window of {pattern.window} is not shorter than S {length}: it would be causal")
        return PatternTask(shape, pattern)


@dataclass(frozen=True)
class PagedQuestion:
    """A decode step: of so many sequences for each that a pattern has, for its queries are few."""
    sequences: int = 8
    grouped: int = 4

    def at(self, length: int, config: BlockConfig, dtype: torch.dtype, device: torch.device) -> Task:
        """Caches of up to `length` keys. Raises ValueError where that is no whole number of pages."""
        if length % paged.PAGE:
            raise ValueError(f"S {length} is no multiple of {paged.PAGE}, the keys of a page")
        heads = config.num_heads
        return PagedTask(Shape(self.sequences * _sequences(config, length), heads, _shared(heads, self.grouped), 1,
                               length, config.head_dim, dtype, device))


def _sequences(config: BlockConfig, length: int) -> int:
    return max(1, config.tokens // length)


def _shared(heads: int, grouped: int) -> int:
    """Heads of keys. Raises ValueError where they can't be shared."""
    if heads % grouped:
        raise ValueError(f"{heads} heads are no multiple of {grouped}, as many as share one of keys")
    return heads // grouped


def _window(size: int) -> Question:
    return Question(lambda shape: pattern_named("sliding_window", window=size))


def _padded(shape: Shape) -> Pattern:
    """Half of the keys at least, evenly spread over the batch; the first sequence has all."""
    lengths = [shape.keys - shape.keys * b // (2 * shape.batch) for b in range(shape.batch)]
    return pattern_named("key_padding", lengths=lengths)


def _biased(shape: Shape) -> Pattern:
    generator = torch.Generator(shape.device).manual_seed(0)
    table = torch.randn(BUCKETS, shape.heads, generator=generator, device=shape.device)
    return pattern_named("relative_bias", table=table)


PATTERNS: Mapping[str, Question | PagedQuestion] = {
    "causal": Question(lambda shape: pattern_named("causal")),
    "full": Question(lambda shape: pattern_named("full")),
    "window 256": _window(256),
    "window 1024": _window(1024),
    "prefix": Question(lambda shape: pattern_named("prefix", prefix=shape.keys // 4)),
    "documents": Question(lambda shape: pattern_named("documents", documents=random_documents(shape.keys))),
    "key padding": Question(_padded),
    "ALiBi": Question(lambda shape: pattern_named("alibi")),
    "relative bias": Question(_biased),
    "soft cap": Question(lambda shape: pattern_named("soft_cap", cap=50.0)),
    "grouped queries": Question(lambda shape: pattern_named("causal"), grouped=4),
    "differential": Question(lambda shape: pattern_named("differential", differential=0.8)),
    "cross-attention": Question(lambda shape: pattern_named("full"), longer=2),
    "paged decode": PagedQuestion(),
}
