"""Inputs that were never there before, of the same kind as those that were given."""
import math
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.measure.calls import (
    Inputs,
    floating_masks,
    takes_gradient,
)
from common.runtime.iteration import Iteration

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)      # of which torch knows the least
LEAST_ONES = 4                             # of a row: no more than one of so many becomes padding
NOISE = 0.5                                # of each element of a floating input: another input, of the same kind
MOST_AHEAD, BYTES_AHEAD = 64, 2**24        # calls whose inputs are made at once, as long as they are no larger


def unguessable_seed() -> int:
    """Of the system's own randomness: no seed that is written into a candidate."""
    return int.from_bytes(os.urandom(4), "little")


class Refresher:
    """Gives inputs other values of the same kind, in place, each time others. It never waits for a GPU: the host would
    lose its lead, and the next call would be timed as it is launched, kernel by kernel.

    A floating tensor gets noise of half of each element: zeros stay, unless there is nothing else, infinities, and most
    signs. Its norm stays about the same, and no element exceeds the largest one of before: a scale that was calibrated
    for it still fits. Ones beside other data may be a mask that hides nothing: some at the end of the last dimension
    become zeros, as padding has them. A tensor of whole numbers with more than one dimension is shifted along its last
    one, so that it holds the same numbers. What is boolean, a mask of other numbers beside data, or a list of whole
    numbers has a structure that this would break: it stays.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors, self.base = tensors, [t.detach().clone() for t in tensors]
        device = tensors[0].device if tensors else torch.device("cpu")
        self.numbers = torch.Generator().manual_seed(unguessable_seed())
        self.noise = torch.Generator(device).manual_seed(unguessable_seed())
        can_change = list(map(_can_change, tensors))
        masks = zip(floating_masks(tensors), map(_is_whole_mask, tensors), strict=True)
        without_masks = [can and not any(kinds) for can, kinds in zip(can_change, masks, strict=True)]
        self.changing = without_masks if any(without_masks) else can_change      # or an answer from memory would do
        of_ones = list(map(_is_of_ones, tensors))
        has_data = any(changes and not ones for changes, ones in zip(self.changing, of_ones, strict=True))
        self.padding = [ones and has_data for ones in of_ones]
        nbytes = max((t.nbytes for t in tensors), default=1)
        self.ahead = max(1, min(MOST_AHEAD, BYTES_AHEAD // max(1, nbytes)))
        self.is_zero, self.largest = list(map(_is_zero, self.base)), list(map(_largest, self.base))
        self.made: list[list[Tensor]] = []               # values for the next calls, of every tensor

    def refresh(self) -> None:
        """Give them others. Those of several calls are made at once: in between, a copy is all that is launched."""
        with torch.no_grad():
            if not self.made:
                every = [self._values(place) for place in range(len(self.base))]
                self.made = [list(values) for values in zip(*every, strict=True)]
            for t, value, changes in zip(self.tensors, self.made.pop(), self.changing, strict=True):
                if changes:
                    t.copy_(value)

    def _values(self, place: int) -> list[Tensor]:
        """What that tensor has in so many calls."""
        if not self.changing[place]:
            return [self.base[place]] * self.ahead
        return self._padded(self.base[place]) if self.padding[place] else self._others(place)

    def _padded(self, ones: Tensor) -> list[Tensor]:
        """With zeros at the end of the last dimension, so many times."""
        made = []
        for count in torch.randint(1, ones.size(-1) // LEAST_ONES + 1, (self.ahead,), generator=self.numbers).tolist():
            made.append(ones.clone())
            made[-1][..., -count:] = 0
        return made

    def _others(self, place: int) -> list[Tensor]:
        """Values for so many calls."""
        base, largest = self.base[place], self.largest[place]
        if not takes_gradient(base):
            shifts = torch.randint(1, base.size(-1), (self.ahead,), generator=self.numbers)
            return [base.roll(int(shift), -1) for shift in shifts]
        wide = torch.complex64 if base.is_complex() else torch.float32
        noise = torch.randn(self.ahead, *base.shape, generator=self.noise, device=base.device, dtype=wide).mul_(NOISE)
        if self.is_zero[place]:                          # noise of a share would leave it so
            return list(noise.to(base.dtype))
        others = base * (1 + noise).div_((1 + NOISE**2)**0.5).to(base.dtype)
        return list(others if largest is None else others.clamp_(-largest, largest))


def _is_zero(t: Tensor) -> bool:
    return not t.count_nonzero()


def _largest(t: Tensor) -> Tensor | None:
    """Of a floating tensor the largest magnitude that is a number."""
    return t.abs().nan_to_num(nan=0.0, posinf=math.inf).amax() if t.is_floating_point() and t.numel() else None


def _is_of_ones(t: Tensor) -> bool:
    """Whether it is floating, has as many as padding needs, and all are 1."""
    return t.is_floating_point() and t.ndim > 0 and t.size(-1) >= LEAST_ONES and bool((t == 1).all())


def _is_whole_mask(t: Tensor) -> bool:
    """Whether it holds whole numbers, zeros and ones alone, and both. Shifted, padding would come first."""
    return t.dtype in _WHOLE and t.numel() > 0 and (int(t.min()), int(t.max())) == (0, 1)


def _can_change(t: Tensor) -> bool:
    return takes_gradient(t) or (t.dtype != torch.bool and t.ndim > 1 and t.size(-1) > 1)


def fresh(inputs: Inputs, count: int) -> Iterator[Inputs]:
    """So many times the inputs with other values each time, always in the same memory."""
    own = inputs.copies()
    refresher = Refresher([t.detach() for t in own.named().values()])
    for _ in range(count if any(refresher.changing) else 0):
        refresher.refresh()
        yield own


def refreshed(work: Iteration, inputs: Sequence[Tensor]) -> Iteration:
    """The same iteration, with other inputs each time."""
    refresher = Refresher(inputs)

    def between() -> None:
        work.between()
        refresher.refresh()
    return Iteration(work.run, between, work.reads, work.receives, work)
