"""Which fused kernel torch has for an attention; where it has none, the smallest change with which it has one.

torch says why only if no backend is left to run; here each change is made, and the kernels that then run decide.
"""
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.assistant.attention import Attention, infinite
from common.block import evidence
from common.block.config import dtype_name
from common.block.evidence import BY_HAND
from common.outcome import in_a_line
from common.runtime.iteration import BOTH, FORWARD, Iteration, of_call

WIDTHS, MULTIPLE = (256, 128), 8           # of a head, that fused kernels take
EVERY_BACKEND = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
                 SDPBackend.MATH)


def softmax_left(before: evidence.Evidence, seen: evidence.Evidence) -> str:
    """That as many kernels of a softmax ran as before, that of a loss among them; "" where fewer did, or none.

    Compiled ones have other names: beside compiled code there were none before.
    """
    left = seen.kinds["softmax"]
    return f"{left} softmax kernels ran, and no more before" if left and left >= before.kinds["softmax"] else ""


def backends_allowed() -> tuple[SDPBackend, ...]:
    """Those that may run here, by sdpa_kernel or torch.backends.cuda; a CPU asks for the same flags."""
    cuda = torch.backends.cuda
    flags = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(),
             cuda.math_sdp_enabled())
    return tuple(itertools.compress(EVERY_BACKEND, flags))


class Hidden(Enum):
    """What a mask keeps queries from."""
    NOTHING = "nothing"
    FUTURE = "the future alone"
    MORE = "the future and more"


@dataclass(frozen=True)
class MaskGiven:
    """A mask, as the function gets it."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool = False                   # a gradient flows into it
    hides: "Hidden | None" = None          # by its values; None where it does not only hide, or was not looked at

    def values(self, device: torch.device) -> Tensor:
        """One that hides the same, or nothing."""
        keeps = torch.ones(self.shape, dtype=torch.bool, device=device)
        if self.hides is Hidden.FUTURE:
            keeps = keeps.tril()
        if self.dtype == torch.bool:
            return keeps
        return torch.zeros(self.shape, dtype=self.dtype, device=device).masked_fill(~keeps, float("-inf"))

    def __str__(self) -> str:
        return f"a mask {dtype_name(self.dtype)} {list(self.shape)}{' that takes a gradient' if self.trains else ''}"


@dataclass(frozen=True)
class Given:
    """What one call of scaled_dot_product_attention is given: shapes [B, H, S, D], and all that decides on a kernel."""
    device: torch.device
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: MaskGiven | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    strided: bool = False                  # elements of one head do not stand side by side
    trains: bool = False
    backends: tuple[SDPBackend, ...] = field(default_factory=backends_allowed)      # where it is called

    @classmethod
    def of_region(cls, attention: Attention) -> "Given":
        """What the function would get for an attention by hand."""
        query, key, value = attention.operand_shapes
        example = attention.query.node.meta["example_value"]
        mask = None if attention.is_causal or not attention.masks else _combined(attention, example.dtype)
        return cls(example.device, query, key, value, example.dtype, mask, attention.dropout_p, attention.is_causal,
                   trains=example.requires_grad)

    @classmethod
    def of_call(cls, args: tuple, kwargs: dict) -> "Given":
        """What it was called with."""
        named: dict[str, Any] = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        query, key, value = tensors = [named[name] for name in _ARGUMENTS[:3]]
        mask = named.get("attn_mask")
        is_strided = any(t.stride(-1) != 1 for t in tensors)
        return cls(query.device, tuple(query.shape), tuple(key.shape), tuple(value.shape), query.dtype,
                   None if mask is None else MaskGiven(tuple(mask.shape), mask.dtype, _takes_a_gradient(mask),
                                                            hidden_by(mask, query.size(-2), key.size(-2))),
                   named.get("dropout_p", 0.0), named.get("is_causal", False), named.get("enable_gqa", False),
                   is_strided, any(map(_takes_a_gradient, tensors)))

    @property
    def scores_bytes(self) -> int:
        """Of the scores of one sample in FP32, which the math backend writes."""
        return 4 * math.prod(self.query[-3:-2]) * self.query[-2] * self.key[-2]

    def of_one_sample(self) -> "Given":
        """The first of a batch."""
        shapes = ((1, *shape[1:]) if len(shape) == 4 else shape for shape in (self.query, self.key, self.value))
        query, key, value = shapes
        mask = self.mask
        if mask and len(mask.shape) == 4:
            mask = replace(mask, shape=(1, *mask.shape[1:]))
        return replace(self, query=query, key=key, value=value, mask=mask)

    def without_gradients(self) -> "Given":
        """The same in inference."""
        return replace(self, trains=False, mask=replace(self.mask, trains=False) if self.mask else None)

    def kernel(self) -> str:
        """The kind of fused kernel that computes it here; "" where there is none. Raises what torch raises."""
        query, key, value = (self._tensor(shape) for shape in (self.query, self.key, self.value))
        mask = self._mask()
        options = {"enable_gqa": True} if self.enable_gqa else {}

        def attend() -> None:
            y = F.scaled_dot_product_attention(query, key, value, mask, self.dropout_p, self.is_causal, **options)
            if self.trains:
                y.sum().backward()
        with sdpa_kernel(list(self.backends)):
            attend()
            kind = evidence.judge(evidence.observe(attend, self.device), None).attention
        return "" if kind == BY_HAND else kind

    def iteration(self, repeats: bool = False) -> Iteration:
        """One call at these shapes on random numbers, and its backward where it trains.

        `repeats`: keys and values of grouped heads are repeated in it.
        """
        inputs = [torch.randn(shape, dtype=self.dtype, device=self.device)
                  for shape in (self.query, self.key, self.value)]
        mask = self.mask.values(self.device) if self.mask else None
        grouped = {"enable_gqa": True} if self.enable_gqa and not repeats else {}
        times = self.query[-3] // self.key[-3] if repeats else 1

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = (each.repeat_interleave(times, -3) if times > 1 else each for each in (key, value))
            return F.scaled_dot_product_attention(query, key, value, mask, self.dropout_p, self.is_causal, **grouped)
        dy = torch.randn(*self.query[:-1], self.value[-1], dtype=self.dtype, device=self.device)
        return of_call(attend, inputs, [dy], {}, BOTH if self.trains else FORWARD)

    def _tensor(self, shape: tuple[int, ...]) -> Tensor:
        """Of one sample: how many there are decides nothing."""
        shape = (1, *shape[1:]) if len(shape) == 4 else shape
        if self.strided:
            t = torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=self.dtype, device=self.device).mT
        else:
            t = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return t.requires_grad_(self.trains)

    def _mask(self) -> Tensor | None:
        if self.mask is None:
            return None
        shape = (1, *self.mask.shape[1:]) if len(self.mask.shape) == 4 else self.mask.shape
        return torch.ones(shape, dtype=self.mask.dtype, device=self.device).requires_grad_(self.mask.trains)

    def with_heads_of(self, width: int) -> "Given":
        """The same with all heads so wide."""
        return replace(self, query=(*self.query[:-1], width), key=(*self.key[:-1], width),
                       value=(*self.value[:-1], width))

    def in_dtype(self, dtype: torch.dtype) -> "Given":
        """The same in another dtype, with its mask where that had the same one."""
        mask = replace(self.mask, dtype=dtype) if self.mask and self.mask.dtype == self.dtype else self.mask
        return replace(self, dtype=dtype, mask=mask)

    def changes(self) -> Iterator["Change"]:
        """Each that may matter, those that leave the function as it is first."""
        mask = self.mask
        if self.backends != EVERY_BACKEND:
            allowed = " and ".join(backend.name for backend in self.backends)
            yield Change(f"sdpa_kernel or torch.backends.cuda allows {allowed} alone there", "with all allowed",
                         replace(self, backends=EVERY_BACKEND))
        if self.strided:
            yield Change("the elements of a head do not stand side by side", "contiguous", replace(self, strided=False))
        if mask and len(mask.shape) == 3 and len(self.query) == 4:
            yield Change(str(mask), "with four dimensions", replace(self, mask=replace(mask, shape=(1, *mask.shape))))
        if mask and mask.dtype not in (torch.bool, self.dtype):
            yield Change(str(mask), f"in {dtype_name(self.dtype)}", replace(self, mask=replace(mask, dtype=self.dtype)))
        if len(self.key) == 4 and self.query[-3] != self.key[-3]:
            every = [(*shape[:-3], self.query[-3], *shape[-2:]) for shape in (self.key, self.value)]
            yield Change(f"{self.query[-3]} heads of queries and {self.key[-3]} of keys", "keys and values repeated",
                         replace(self, key=every[0], value=every[1], enable_gqa=False))
        if len(self.query) > 4:
            count = math.prod(self.query[:-3])
            merged = [(count, *shape[-3:]) for shape in (self.query, self.key, self.value)]
            of_four = replace(mask, shape=(count, *mask.shape[-3:])) if mask and len(mask.shape) > 3 else mask
            yield Change(f"tensors of {len(self.query)} dimensions", "with all before the heads as one",
                         replace(self, query=merged[0], key=merged[1], value=merged[2], mask=of_four))
        if len(self.query) == 3:
            batched = [(1, *shape) for shape in (self.query, self.key, self.value)]
            yield Change("tensors of three dimensions", "with a batch of one before them",
                         replace(self, query=batched[0], key=batched[1], value=batched[2]))
        if self.key[-1] % MULTIPLE:
            width = self.key[-1] + -self.key[-1] % MULTIPLE
            yield Change(f"heads {self.key[-1]} wide", f"with zeros up to {width} and the scale of {self.key[-1]}",
                         self.with_heads_of(width))
        if self.value[-1] != self.key[-1]:
            yield Change(f"values {self.value[-1]} wide beside keys {self.key[-1]} wide", "with zeros up to one width",
                         replace(self, value=(*self.value[:-1], self.key[-1])))
        if mask and mask.trains:
            yield Change(str(mask), "with one that takes none", replace(self, mask=replace(mask, trains=False)), False)
        for dtype in (torch.float32, torch.bfloat16):
            if self.dtype.itemsize > dtype.itemsize:
                yield Change(dtype_name(self.dtype), f"in {dtype_name(dtype)}", self.in_dtype(dtype), False)
        if self.dropout_p:
            yield Change(f"dropout {self.dropout_p:g} in train mode", "without it", replace(self, dropout_p=0.0), False)
        for width in WIDTHS:
            if self.key[-1] > width:
                yield Change(f"heads {self.key[-1]} wide", f"with {width}", self.with_heads_of(width), False)
        if mask:
            yield Change(str(mask), "without it", replace(self, mask=None), False)


@dataclass(frozen=True)
class Change:
    """A condition with its value, what to change, and what the function then gets."""
    condition: str
    words: str
    given: Given
    is_same: bool = True                   # it can be the same function


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@functools.cache
def fused_or_why_not(given: Given) -> tuple[str, str]:
    """(the kind of fused kernel that computes it, why there is none and what makes one run)."""
    ran, error = _tried(given)
    if ran:
        return ran, ""
    for made in _fewest_changes(given):
        if ran := _tried(made.given)[0]:
            return "", f"{made.condition}; {made.words}, {ran} ran"
    return "", error or "no change of mask, dtype, width or stride helps"


@functools.cache
def is_fused(given: Given) -> bool:
    """Whether a fused kernel computes it."""
    return bool(_tried(given)[0])


def _fewest_changes(given: Given) -> list[Change]:
    """One at a time, then two; before all others those that leave the function as it is."""
    one = list(given.changes())
    two = [Change(f"{first.condition}, {second.condition}", f"{first.words} and {second.words}", second.given,
                  first.is_same and second.is_same)
           for place, first in enumerate(one) for second in first.given.changes()
           if any((second.condition, second.words) == (other.condition, other.words) for other in one[place + 1:])]
    return sorted([*one, *two], key=lambda change: not change.is_same)


def _tried(given: Given) -> tuple[str, str]:
    """(the fused kernel that ran, what it raised)."""
    try:
        return given.kernel(), ""
    except Exception as error:             # a change may leave what torch refuses altogether
        return "", in_a_line(error)


LEAST_HIDDEN = -1e4                        # of what is added to a score: what is below hides it


def hidden_by(mask: Tensor, queries: int, keys: int) -> Hidden | None:
    """What a mask of zeros and large negative numbers, or of True and False, hides; None of any other."""
    with _disable_current_modes(), torch.no_grad():
        keeps = mask if mask.dtype == torch.bool else mask == 0
        if mask.dtype != torch.bool and not (keeps | (mask < LEAST_HIDDEN)).all():
            return None
        if keeps.all():
            return Hidden.NOTHING
        past = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
        if queries != keys or (keeps & ~past).any():
            return None
        return Hidden.FUTURE if (keeps == past).all() else Hidden.MORE


def _takes_a_gradient(t: Tensor) -> bool:
    """It, or what it is a view of: a forward without gradients makes views that take none."""
    return t.requires_grad or (t._base is not None and t._base.requires_grad)


def _combined(attention: Attention, dtype: torch.dtype) -> MaskGiven:
    """One mask from all, as the rewritten graph makes it."""
    values = [mask.tensor.meta["example_value"] for mask in attention.masks]
    is_boolean = all(map(infinite, attention.masks))
    shapes = [(*attention.leading, *value.shape[1:]) if mask.splits(attention.leading) else tuple(value.shape)
              for mask, value in zip(attention.masks, values, strict=True)]
    shape = torch.broadcast_shapes((1, 1), *shapes)
    if attention.merged > 1:
        shape = shape[-4:]
    return MaskGiven(tuple(shape), torch.bool if is_boolean else dtype, any(value.requires_grad for value in values))
