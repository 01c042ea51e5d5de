"""Attention by hand, softmax(scale * q k^T + masks), dropout, times v: its operands and its masks, in a graph.

Scores may be capped before the masks: cap * tanh(scale * q k^T).
"""
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.assistant import einsum
from benchmarks.assistant.graph import Captured, Region, Unknown, args_of, dtype_of, place_of, shape_of
from benchmarks.assistant.normal import name_of
from benchmarks.assistant.source import Place
from benchmarks.measure.calls import BLOCKING


@dataclass(frozen=True)
class Mask:
    """One mask on the scores.

    Boolean: where `tensor` is `blocks`, the scores become `value`. Else it is added to the scores, times `factor`.
    """
    tensor: fx.Node
    factor: float                            # what the scores are multiplied by after it
    value: float | None = None               # of a boolean one
    blocks: bool = True
    leading: tuple[int, ...] = ()            # of the scores where it is put on, all dimensions but the last two

    def splits(self, leading: tuple[int, ...]) -> bool:
        """Whether its first dimension is that of all heads of a batch, which are two dimensions elsewhere."""
        shape = shape_of(self.tensor)
        return len(self.leading) < len(leading) and len(shape) == 3 and shape[0] != 1

    @property
    def is_boolean(self) -> bool:
        return self.value is not None

    @property
    def blocks_for_sure(self) -> bool:
        """Whether what it blocks is left out of the softmax, whatever the scores are."""
        return self.value is not None and self.factor * self.value <= BLOCKING


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph, and in which order its dimensions are [..., S, D]; None: as they are."""
    node: Any
    order: einsum.Order = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., S, D], 1 where a dimension is lacking."""
        shape = shape_of(self.node)
        return tuple(1 if dim is None else shape[dim] for dim in self.order) if self.order else shape

    def is_broadcast(self, leading: tuple[int, ...]) -> list[bool]:
        """Of each dimension of the scores but the last two, whether it is lacking here, or of size 1."""
        own = self.shape[:-2]
        lacking = len(leading) - len(own)
        return [dim < lacking or own[dim - lacking] != size for dim, size in enumerate(leading)]

    @property
    def needs_a_copy(self) -> bool:
        """Whether the numbers of one row lie apart in memory: the fused kernels take only what is dense there."""
        value = self.node.meta.get("example_value")
        last = self.order[-1] if self.order else -1
        assert last is not None                                # a batch alone may be lacking
        return isinstance(value, Tensor) and value.shape[last] > 1 and value.stride(last) != 1

    def put_into(self, nodes: fx.Graph) -> Any:
        """The node of it as [..., S, D], dense in D; a transpose that is already there is taken back."""
        as_rows = self._as_rows(nodes)
        return nodes.call_method("contiguous", (as_rows,)) if self.needs_a_copy else as_rows

    def _as_rows(self, nodes: fx.Graph) -> Any:
        if self.order is None:
            return self.node
        if swaps_the_last(self.node, len(self.order)) and self.order == swapped(len(self.order)):
            return self.node.args[0]
        given, t = [dim for dim in self.order if dim is not None], self.node
        if given != sorted(given):
            t = nodes.call_method("permute", (t, *given))
        for place, dim in enumerate(self.order):
            if dim is None:
                t = nodes.call_method("unsqueeze", (t, place))
        return t


@dataclass(eq=False)
class Attention(Region):
    """One attention by hand: all nodes from the one matmul to the other, both included."""
    softmax: fx.Node
    scores: fx.Node                          # the matmul of queries and keys
    output: fx.Node                          # the matmul of weights and values
    query: Operand
    key: Operand
    value: Operand
    order: einsum.Order                      # of [..., S, D] in the output; None: as it is
    scale: float
    masks: list[Mask]
    dropout: tuple[float, bool]              # rate, and whether it is in training
    cap: float | None = None                 # before the masks scores become cap * tanh(scale * q k^T)
    leading: tuple[int, ...] = ()            # of the scores: batch and heads, split where they are anywhere
    temperatures: tuple[tuple[fx.Node, int], ...] = ()       # tensors that the scores are multiplied by, and the power

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its scores, [..., S, S of the keys]."""
        return *self.leading, *shape_of(self.softmax)[-2:]

    @property
    def is_viewed(self) -> bool:
        """Whether batch and heads are one dimension in some of it, and two in the rest."""
        return len(self.leading) == 2 and any(len(shape_of(each)) == 3 for each in (self.scores, self.output))

    @property
    def lines(self) -> set[Place | None]:
        """Of its two matmuls."""
        return {place_of(self.scores), place_of(self.output)}

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def mixes_dtypes(self) -> bool:
        """Whether the scores are computed in another dtype than the values have: in FP32, say, of a model in 16 bits.
        The fused functions take one dtype alone.
        """
        return len({dtype_of(operand.node) for operand in self.operands}) > 1

    @property
    def merged(self) -> int:
        """How many of the first dimensions become one: the fused kernels take four alone. 1 where none do, as where a
        mask differs between them.
        """
        differs = any(size != 1 for mask in self.masks for size in shape_of(mask.tensor)[:-3])
        return 1 if differs and not self.is_causal else max(1, len(self.shape) - 3)

    @property
    def operand_shapes(self) -> list[tuple[int, ...]]:
        """Of these, as the fused function gets them: with batch and heads where the scores have them anywhere."""
        leading = math.prod(self.leading[:self.merged]), *self.leading[self.merged:]
        return [(*leading, *operand.shape[-2:]) for operand in self.operands]

    @property
    def device(self) -> torch.device:
        return self.softmax.meta["example_value"].device

    @property
    def dimensions_of_the_mask(self) -> int:
        """Of all masks together, as the fused function gets them."""
        def count(mask: Mask) -> int:
            splits = self.is_viewed and mask.splits(self.leading)
            return len(shape_of(mask.tensor)) + int(splits)
        return max(map(count, self.masks), default=0)

    @cached_property
    def is_causal(self) -> bool:
        """Whether its masks, by their values, say nothing but is_causal."""
        return bool(self.masks) and all(causal(mask, self.graph, self.shape) for mask in self.masks)

    @property
    def dropout_p(self) -> float:
        rate, training = self.dropout
        return rate if training else 0.0


def missing_dimensions(attention: Attention, whole: int) -> int:
    """How many its mask lacks: the function wants two, and a fused kernel on a CPU two or all that queries have."""
    own = attention.dimensions_of_the_mask
    return (2 if own <= 2 else whole) - own


def swapped(ndim: int) -> tuple[int, ...]:
    """The order of dimensions with the last two the other way round."""
    return (*range(ndim - 2), ndim - 1, ndim - 2)


def swaps_the_last(node: Any, ndim: int) -> bool:
    """Whether a node is a transpose of the last two dimensions."""
    if not isinstance(node, fx.Node):
        return False
    if name_of(node) in ("transpose", "swapaxes", "swapdims"):
        exchanged = set(args_of(node)[1:])
        return {dim % ndim for dim in exchanged if isinstance(dim, int)} == {ndim - 1, ndim - 2}
    if name_of(node) == "permute":
        dims: Any = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return tuple(dim % ndim for dim in dims) == swapped(ndim)
    return name_of(node) == "mT"


# ------------------------------------------------------------------------------------------------------------ masks


@dataclass(frozen=True)
class Causal:
    """A mask that is causal by its values; which tensors they come from."""
    sources: tuple[fx.Node, ...]


def causal(mask: Mask, graph: Captured, shape: tuple[int, ...]) -> Causal | None:
    """Whether a mask lets each position see itself and those before it alone; None where it does not, or none knows."""
    try:
        values = graph.value_of(mask.tensor)
    except Unknown:
        return None
    if not isinstance(values, Tensor) or shape[-1] != shape[-2] or not is_causal(mask, values, shape[-1]):
        return None
    return Causal(tuple(graph.feeding(mask.tensor)))


def is_causal(mask: Mask, values: Tensor, length: int) -> bool:
    """By its values, [..., S, S]."""
    if values.shape[-2:] != (length, length):
        return False
    visible = torch.ones(length, length, dtype=torch.bool, device=values.device).tril()
    if mask.is_boolean:
        seen = ~values.bool() if mask.blocks else values.bool()
        return mask.blocks_for_sure and bool((seen == visible).all())
    if not values.is_floating_point():
        return False
    allowed, blocked = values.masked_select(visible), values.masked_select(~visible)
    return bool((allowed == 0).all()) and bool((mask.factor * blocked <= BLOCKING).all())


def infinite(mask: Mask) -> bool:
    """Whether what a boolean mask blocks is minus infinity."""
    return mask.value is not None and math.isinf(mask.value)
