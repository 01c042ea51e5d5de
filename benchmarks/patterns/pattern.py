"""Which keys each query sees, and what is done to its scores before the softmax, as one value.

The ways to compute it need it in three forms: as a predicate of positions (`mask_of`: a dense mask, FlexAttention), as
the first key that a query sees and the one behind the last (`interval_of`: block-sparse kernels), and as the fields
themselves, which libraries take. Where keys are longer than queries, the last query
stands beside the last key, as in decoding; `scaled_dot_product_attention(is_causal=True)` aligns the first ones.
"""
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKETS, MAX_DISTANCE = 32, 128        # of T5's relative bias (arXiv:1910.10683, its published code)


@dataclass(frozen=True)
class Pattern:
    """A query sees the keys that all of its parts allow. Raises ValueError for parts that contradict each other."""
    name: str
    causal: bool = False               # only keys up to its own position
    window: int | None = None          # of these only the last so many, its own among them
    prefix: int = 0                    # and besides always the first so many: they see each other
    documents: tuple[int, ...] = ()    # lengths of texts that stand behind each other: each sees only itself
    lengths: tuple[int, ...] = ()      # keys that count in each sequence of the batch; padding stands behind them
    alibi: bool = False                # scores fall linearly with the distance, by a slope a head (arXiv:2108.12409)
    table: Tensor | None = None        # [BUCKETS, H]: T5's learned bias of relative positions
    cap: float | None = None           # scores go through cap * tanh(score / cap)
    differential: float | None = None  # of two heads beside each other, the second's weights so many times subtracted

    def __post_init__(self) -> None:
        if self.window is not None:
            _require_whole("window", self.window, 1)
        _require_whole("prefix", self.prefix, 0)
        for what, sizes in (("documents", self.documents), ("lengths", self.lengths)):
            for size in sizes:
                _require_whole(f"a length in {what}", size, 1)
        if self.cap is not None and not 0 < self.cap < math.inf:
            raise ValueError(f"cap is {self.cap}: give a positive number")
        if self.differential is not None and not math.isfinite(self.differential):
            raise ValueError(f"differential is {self.differential}: give a number")
        if self.differential is not None and self.has_bias:
            raise ValueError("differential beside a bias: the heads of a pair would have different ones")
        if (self.window is not None or self.prefix) and not self.causal:
            raise ValueError("a window or a prefix of a pattern that is not causal: give causal=True")
        if self.prefix and (self.window is not None or self.documents):
            raise ValueError("a prefix beside a window or documents: a query would see two ranges of keys")
        if self.alibi and self.table is not None:
            raise ValueError("alibi and table: give one bias")
        if self.table is not None and (self.table.ndim != 2 or self.table.size(0) != BUCKETS):
            raise ValueError(f"table is {tuple(self.table.shape)}: give [{BUCKETS}, heads]")

    @property
    def has_mask(self) -> bool:
        """Whether some query does not see some key."""
        return self.causal or bool(self.documents or self.lengths)

    @property
    def may_see_nothing(self) -> bool:
        """Whether some query may see no key at all: padding, where a window or a document lies beyond what counts."""
        return bool(self.lengths) and (self.window is not None or bool(self.documents))

    @property
    def has_bias(self) -> bool:
        """Whether something is added to the scores."""
        return self.alibi or self.table is not None

    @property
    def learned(self) -> list[Tensor]:
        """What takes a gradient beside q, k and v."""
        return [] if self.table is None else [self.table]

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise ValueError where it does not fit to these sizes."""
        if self.causal and queries > keys:
            raise ValueError(f"{queries} queries and {keys} keys: a causal query needs a key at its own position")
        if self.documents and (queries != keys or sum(self.documents) != keys):
            raise ValueError(f"documents of {sum(self.documents)} positions in all, {queries} queries and {keys} keys: "
                             "lengths must add up to both")
        if self.lengths and len(self.lengths) != batch:
            raise ValueError(f"lengths of {len(self.lengths)} sequences, a batch of {batch}: give one for each")
        if self.lengths and max(self.lengths) > keys:
            raise ValueError(f"a length of {max(self.lengths)}, and {keys} keys: give at most as many")
        if self.differential is not None and heads % 2:
            raise ValueError(f"{heads} heads of queries: give an even number, for differential attention takes pairs")
        if self.prefix > keys:
            raise ValueError(f"prefix is {self.prefix}, and there are {keys} keys: give at most as many")
        if self.table is not None and self.table.size(1) != heads:
            raise ValueError(f"table is {tuple(self.table.shape)}, and there are {heads} heads: give "
                             f"[{BUCKETS}, {heads}]")

    def is_plain_causal(self, queries: int, keys: int) -> bool:
        """Whether its mask, at these lengths, is the triangle that libraries call causal."""
        is_whole = self.window is None or self.window >= keys
        return self.causal and is_whole and not (self.prefix or self.documents or self.lengths) and queries == keys


def _require_whole(what: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {value!r}: give a whole number from {least} on")


# ------------------------------------------------------------------------------------------------------ who sees what

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]       # (b, h, q, k) -> whether it is seen


def mask_of(pattern: Pattern, queries: int, keys: int, device: torch.device) -> MaskMod | None:
    """The predicate, as FlexAttention takes it; None where every query sees every key."""
    if not pattern.has_mask:
        return None
    parts: list[MaskMod] = []
    if pattern.causal:
        parts.append(_causal(pattern, keys - queries))
    if pattern.documents:
        document = torch.repeat_interleave(torch.arange(len(pattern.documents)), torch.tensor(pattern.documents))
        document = document.to(device, torch.int32)
        parts.append(lambda b, h, q, k: document[q] == document[k])
    if pattern.lengths:
        lengths = torch.tensor(pattern.lengths, device=device, dtype=torch.int32)
        parts.append(lambda b, h, q, k: k < lengths[b])

    def allows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = parts[0](b, h, q, k)
        for part in parts[1:]:
            seen = seen & part(b, h, q, k)
        return seen
    return allows


def _causal(pattern: Pattern, ahead: int) -> MaskMod:
    """Of queries that stand so many positions further than they count."""
    window, prefix = pattern.window, pattern.prefix
    if window is not None:
        return lambda b, h, q, k: (k <= q + ahead) & (q + ahead - k < window)
    if prefix:
        return lambda b, h, q, k: (k <= q + ahead) | (k < prefix)
    return lambda b, h, q, k: k <= q + ahead


def slopes_of(heads: int, device: torch.device) -> Tensor:
    """[heads] of ALiBi: 2^(-8 i / heads), i from 1 on."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)


def buckets_of(queries: int, keys: int, causal: bool, device: torch.device) -> Tensor:
    """[queries + keys - 1]: T5's bucket of each k - q + queries - 1, from the first key beside the last query on.

    Half of the buckets are for one distance each, the others grow with its logarithm up to MAX_DISTANCE. Where keys on
    both sides are seen, each side has half of them all.
    """
    ahead = torch.arange(queries + keys - 1) - (queries - 1) - (keys - queries)       # of the key: positive, behind q
    count, first = (BUCKETS, 0) if causal else (BUCKETS // 2, BUCKETS // 2)
    distance = (-ahead).clamp(min=0) if causal else ahead.abs()
    exact = count // 2
    grown = torch.log(distance.clamp(min=1) / exact) / math.log(MAX_DISTANCE / exact) * (count - exact)
    bucket = torch.where(distance < exact, distance, (exact + grown.long()).clamp(max=count - 1))
    return (bucket + first * (ahead > 0)).to(device, torch.int32)


def interval_of(pattern: Pattern, batch: int, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(first key, key behind the last) that each query sees, both [batch or 1, queries], int32; neither ever falls."""
    position = torch.arange(keys - queries, keys)
    low, high = torch.zeros(queries, dtype=torch.long), torch.full((queries,), keys)
    if pattern.causal:
        high = (position + 1).clamp(min=pattern.prefix)
    if pattern.window is not None:
        low = (position + 1 - pattern.window).clamp(min=0)
    if pattern.documents:
        sizes = torch.tensor(pattern.documents)
        ends = sizes.cumsum(0)
        low = torch.maximum(low, torch.repeat_interleave(ends - sizes, sizes))
        high = torch.minimum(high, torch.repeat_interleave(ends, sizes))
    low, high = low[None], high[None]
    if pattern.lengths:
        high = torch.minimum(high, torch.tensor(pattern.lengths)[:, None])
        low = low.expand(batch, -1)
    return low.to(device, torch.int32), high.to(device, torch.int32)


def allowed_pairs(pattern: Pattern, batch: int, queries: int, keys: int) -> int:
    """How many pairs of a query and a key a head computes, over the batch."""
    low, high = interval_of(pattern, batch, queries, keys, torch.device("cpu"))
    pairs = int((high.long() - low).clamp(min=0).sum())
    return pairs if pattern.lengths else pairs * batch


# ------------------------------------------------------------------------------------------------------ by their names


def random_documents(length: int, seed: int = 0, mean: int = 512) -> tuple[int, ...]:
    """Lengths of documents that add up to `length`: exponentially distributed around `mean`, at least one each."""
    generator = torch.Generator().manual_seed(seed)
    sizes: list[int] = []
    while (left := length - sum(sizes)) > 0:
        size = 1 + int(-mean * math.log1p(-float(torch.rand((), generator=generator, dtype=torch.float64))))
        sizes.append(min(size, left))
    return tuple(sizes)


NAMED: Mapping[str, Mapping[str, bool]] = {        # name -> what it fixes
    "full": {},
    "causal": {"causal": True},
    "sliding_window": {"causal": True},
    "prefix": {"causal": True},
    "documents": {"causal": True},
    "key_padding": {},
    "alibi": {"causal": True, "alibi": True},
    "relative_bias": {},
    "soft_cap": {"causal": True},
    "differential": {"causal": True},
}
NEEDED: Mapping[str, Sequence[str]] = {            # name -> what a person must give
    "sliding_window": ("window",), "prefix": ("prefix",), "documents": ("documents",), "key_padding": ("lengths",),
    "relative_bias": ("table",), "soft_cap": ("cap",), "differential": ("differential",)}


def pattern_named(name: str, **options) -> Pattern:
    """One of `NAMED`, with what it needs; any other part of a Pattern may be added (`soft_cap` with a `window`).

    Raises ValueError for an unknown name or option, and where something that it needs is missing.
    """
    if name not in NAMED:
        raise ValueError(f"{name!r} is no pattern: give one of {', '.join(NAMED)}")
    fields = set(Pattern.__dataclass_fields__) - {"name"}
    for option in options:
        if option not in fields:
            raise ValueError(f"{name}: there is no option {option}; there are {', '.join(sorted(fields))}")
    for option in NEEDED.get(name, ()):
        if options.get(option) is None:
            raise ValueError(f"{name} needs {option}: give {option}=...")
    for option in ("documents", "lengths"):
        if option in options:
            options[option] = tuple(map(_whole, options[option]))
    return Pattern(name, **{**NAMED[name], **options})


def _whole(value: object) -> int:
    """An element of a tensor or of a list as a whole number."""
    return int(value) if isinstance(value, Tensor) and not value.is_floating_point() else value       # type: ignore[return-value]
