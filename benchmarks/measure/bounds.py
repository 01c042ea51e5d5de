"""How far a tensor may be from the truth, and why so far: the bounds of both questions, for one tensor at a time."""
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure.calls import Step
from benchmarks.measure.checks import CHANNELS_LAST, DRAWN, MEANING, PRECISION, Check
from benchmarks.measure.names import Named
from benchmarks.measure.observing import distance, largest_difference, norm, projection
from common.block.config import dtype_name
from common.block.oracle import TIMES_OF_A_GRADIENT

# How far a right callable may be off, in FP64 and by the dtype that it computes in: (share of the tensor's own norm,
# share of the norm of all gradients). Found by experiment, on models of many kinds.
BOUNDS = {torch.float64: (1e-9, 1e-12), torch.float32: (2e-6, 1.2e-7), torch.float16: (4e-3, 5e-4),
          torch.bfloat16: (3e-2, 4e-3)}
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9}
WITH_FP32_INSIDE = 3e-6, 1e-8              # in FP64, of code that computes something in FP32
TIMES_THE_REFERENCE = 4                    # its own error
TIMES_A_LOWER_ONE = 2                      # the error of the reference in a lower precision: what that explains
TIMES_ITS_LARGEST = 4                      # that of its worst element: rounding is spread over a tensor
# Roundings: a factor beyond is a mistake, if the rest is at most half of it. In FP32 fast exponentials
# and long sums are off one way by several.
MULTIPLE_FROM, MULTIPLE_FROM_IN_FP32 = 4, 32
ELEMENTS_OF_A_MULTIPLE = 256               # of fewer elements, roundings may happen to look like a factor
PROVES_NOTHING = 0.5                       # a bound of so much of the tensor
NUMERICS = {"tf32": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16, "float8": torch.bfloat16,
            "int8": torch.bfloat16}        # its activations: the weights are rounded in the reference, too
FP8_OUTPUT, FP8_GRADIENT = 10 ** (-20 / 20), 10 ** (-17 / 20)          # 20 and 17 dB
FP64, FP32 = torch.float64, torch.float32
NOT_TWICE = "the reference does not give the same twice"
DRAWS_OTHERS = "the reference draws random numbers, and it draws others"


def step_in(numerics: str | None, device: torch.device) -> Step:
    """That of what FP32 is multiplied in there."""
    return Step(epsilon_of(numerics, device))


def epsilon_of(numerics: str | None, device: torch.device) -> float:
    """The relative step of what FP32 is multiplied in there; 0 where it is multiplied as it is.

    A GPU's convolutions round to TF32 by cuDNN's default.
    """
    if numerics is not None:
        return torch.finfo(NUMERICS[numerics]).eps
    return torch.finfo(NUMERICS["tf32"]).eps if device.type == "cuda" and torch.backends.cudnn.allow_tf32 else 0.0


def rounding_of(dtype: torch.dtype, numerics: str | None) -> float:
    """What rounding explains, as a share of an output's norm, by the dtype or by the numerics that were declared."""
    if numerics == "float8":
        return FP8_OUTPUT
    share, _ = BOUNDS[NUMERICS[numerics] if numerics else dtype]
    return share


@dataclass(frozen=True)
class Rounding:
    """What may move between a candidate and its reference."""
    share: float                           # of an output's norm
    of_all: float                          # any gradient of a parameter, as a share of the norm of all of them
    outputs_off_by: float = 0.0            # without dropout: an output at most, as a share of its norm
    gradients_off_by: float = 0.0          # without dropout: a gradient in root mean square, as a share of its norm


def rounding_between(dtype: torch.dtype, numerics: str | None) -> Rounding:
    """What rounding explains where random numbers are drawn."""
    _, of_all = BOUNDS[NUMERICS[numerics] if numerics else dtype]
    return Rounding(rounding_of(dtype, numerics), of_all)


def is_nothing_of(size: float, whole: float, fp32_inside: bool) -> bool:
    """Whether a norm in FP64 is no more than rounding leaves of zero, beside the norm of all."""
    _, of_all = WITH_FP32_INSIDE if fp32_inside else BOUNDS[FP64]
    return size <= of_all * whole


Others = Callable[[Named], Iterable[tuple[str, Sequence[Tensor]]]]       # (CHANNELS_LAST or a precision, the tensors)


@dataclass(frozen=True)
class Explained:
    """How far a tensor may be off where the reference, run in another way, is off too."""
    error: float
    largest: float                         # that of its worst element

    @classmethod
    def by(cls, kind: str, rough: Sequence[Tensor], truth: Sequence[Tensor], size: float, of_all: float) -> "Explained":
        """By what it gives in channels-last or a lower precision. `size` is the truth's norm, `of_all` that of all."""
        error, largest = distance(rough, truth), largest_difference(rough, truth)
        if kind == CHANNELS_LAST:
            return cls(TIMES_THE_REFERENCE * error, TIMES_ITS_LARGEST * largest)
        rounding = ROUNDING[getattr(torch, kind, torch.float16)]                    # TF32 has FP16's mantissa
        largest_of_truth = max(float(t.abs().max()) for t in truth)
        return cls(TIMES_A_LOWER_ONE * max(error, rounding * size, rounding * 1e-2 * of_all),
                   TIMES_ITS_LARGEST * max(largest, rounding * largest_of_truth))


@dataclass(frozen=True)
class Standard:
    """By what tensors are compared: which question, in which dtype, and what is known of the reference."""
    question: str                          # MEANING, DRAWN or PRECISION
    dtype: torch.dtype                     # that the candidate computes in
    outputs_norm: float                    # of all outputs of the truth together
    gradients_norm: float                  # of all gradients of parameters
    fp32_inside: bool = False              # in FP64, something is computed in FP32
    numerics: str | None = None            # declared
    gate: float | None = None              # relative error that a caller allows instead
    meaning_is_known: bool = False         # the meaning was compared in FP64
    unreliable: str = ""                   # why the reference itself tells nothing
    others: Others = lambda of: ()         # a tensor -> what the reference gives for it in other ways, best first
    off_by: Callable[[Named], float] = lambda of: 0.0      # -> how far what counts as the truth is off: of its norm,
    is_zero: Callable[[Named], bool] = lambda of: False    # or of all, where its true value is known to be zero

    def gradient(self, of: Named, seen: Sequence[Tensor] | None, truth: Sequence[Tensor] | None,
                 own: Sequence[Tensor] | None) -> Check | None:
        """The check of a gradient, from one tensor a cotangent; None where neither has one. None is not 0.

        Where the reference leaves layers out at random, the draws of gradients tell whether one is missing for good.
        """
        if seen is None and truth is None:
            return None
        is_missing = seen is None or truth is None or own is None
        if is_missing and self.unreliable == DRAWS_OTHERS:
            return Check(of, self.question, True, False, math.nan, math.nan, DRAWS_OTHERS)
        if seen is None or truth is None or own is None:
            reason = "it has none, the reference has one" if seen is None else "it has one, the reference has none"
            return Check(of, self.question, False, True, math.nan, math.nan, reason)
        return self.tensor(of, seen, truth, own)

    def tensor(self, of: Named, seen: Sequence[Tensor], truth: Sequence[Tensor], own: Sequence[Tensor]) -> Check:
        """The check of a tensor: what was seen, the truth, and what the reference gives at its own dtype."""
        if seen[0].shape != truth[0].shape:
            reason = f"its shape is {tuple(seen[0].shape)}, not {tuple(truth[0].shape)}"
            return Check(of, self.question, False, True, math.nan, math.nan, reason)
        if truth[0].is_floating_point() or truth[0].is_complex():
            return self._floating(of, seen, truth, own)
        return self._exact(of, seen[0], truth[0], own[0])

    def _exact(self, of: Named, seen: Tensor, truth: Tensor, own: Tensor) -> Check:
        """Integers: exact where the reference is; else at most three times its own mismatches."""
        count = max(1, truth.numel())
        differ = int((seen.to(truth.device) != truth).sum())
        may = 0 if self.question in (MEANING, DRAWN) else 3 * int((own.to(truth.device) != truth).sum())
        passed, proven, reason = differ <= may, may < PROVES_NOTHING * count, f"{differ} of {count} differ, {may} may"
        if not passed and self.unreliable:
            passed, proven, reason = True, False, self.unreliable
        return Check(of, self.question, passed, proven, differ / count, may / count, reason)

    def _floating(self, of: Named, seen: Sequence[Tensor], truth: Sequence[Tensor], own: Sequence[Tensor]) -> Check:
        is_gradient = of.kind.is_gradient
        whole = self.gradients_norm if is_gradient else self.outputs_norm
        size, error = norm(truth), distance(seen, truth)
        counts_as_zero = is_nothing_of(size, whole, self.fp32_inside) or self.is_zero(of)
        of_the_reference = distance(own, truth) + self.off_by(of) * (whole if counts_as_zero else size)
        bound, reason = self._bound(is_gradient, counts_as_zero, size, whole, of_the_reference)
        unit = whole if counts_as_zero else size
        if counts_as_zero:
            reason += ", of the norm of all: its true value is zero"
        explained_by = ""
        passed, proven = error <= bound, bound < PROVES_NOTHING * unit or not unit
        if truth[0].numel() and not truth[0].isfinite().any():
            proven, reason = False, "the reference is finite nowhere"
        if self.unreliable and (not passed or self.unreliable == NOT_TWICE):
            passed, proven, reason = True, False, self.unreliable
        elif not counts_as_zero and not norm(seen):
            passed, reason = False, "it is all zero, the reference's is not"
        elif (not counts_as_zero and (factor := self._factor(seen, truth, own, error, size))
              and not self._explained_by(of, seen, truth, error, size, whole, by_layout_alone=True)):
            passed, reason = False, f"it is {factor:.4g} times the truth, which no rounding makes of it"
        elif not passed and (explained_by := self._explained_by(of, seen, truth, error, size, whole)):
            in_words = f"less accurate, within what {explained_by} rounds"
            if explained_by == CHANNELS_LAST:
                in_words = f"as the reference in {explained_by}"
            passed, reason = True, f"{in_words}; {reason}"
        elif passed and not proven and unit:
            reason = f"the bound is as large as the tensor: {reason}"
        unit = unit or 1.0                                             # the truth is exactly zero
        return Check(of, self.question, passed, proven, error / unit, bound / unit, reason, explained_by)

    def _explained_by(self, of: Named, seen: Sequence[Tensor], truth: Sequence[Tensor], error: float, size: float,
                      whole: float, by_layout_alone: bool = False) -> str:
        """In what the reference is as far off, as a whole and at its worst element: channels-last, a precision; or "".

        Only where the meaning is right: what is timed is then the function that its copy was found to be. A layout
        explains a factor, too: a batch norm of few values divides a whole tensor by what is rounded otherwise.
        """
        if self.question != PRECISION or not self.meaning_is_known or not math.isfinite(error):
            return ""
        of_all = whole if of.kind.is_gradient else size
        largest_error = largest_difference(seen, truth)
        for kind, rough in self.others(of):
            if rough[0].shape != truth[0].shape or (by_layout_alone and kind != CHANNELS_LAST):
                continue
            as_far = Explained.by(kind, rough, truth, size, of_all)
            if error <= as_far.error and largest_error <= as_far.largest:
                return kind
        return ""

    def _factor(self, seen: Sequence[Tensor], truth: Sequence[Tensor], own: Sequence[Tensor], error: float, size: float
                ) -> float | None:
        """The factor of what is a multiple of the truth: rounding goes every way, and a factor one way. Else None."""
        least = self._least_factor()
        is_asked = self.question == PRECISION and self.gate is None and truth[0].numel() >= ELEMENTS_OF_A_MULTIPLE
        if not is_asked or not math.isfinite(error) or error <= least * size:
            return None
        along = projection(seen, truth)
        rest = math.sqrt(max(0.0, error**2 - (along * size)**2))
        if abs(along) <= max(least, 8 * abs(projection(own, truth))) or rest > abs(along) * size / 2:
            return None
        return 1 + along

    def _least_factor(self) -> float:
        """Up to how much, less one, a factor is rounding: one value all over a tensor is rounded one way."""
        if self.numerics:
            return MULTIPLE_FROM * max(ROUNDING.get(self.dtype, 0.0), ROUNDING[NUMERICS[self.numerics]])
        return (MULTIPLE_FROM_IN_FP32 if self.dtype == FP32 else MULTIPLE_FROM) * ROUNDING.get(self.dtype, 0.0)

    def _bound(self, is_gradient: bool, counts_as_zero: bool, size: float, whole: float, of_the_reference: float
               ) -> tuple[float, str]:
        """(how far it may be off, why so far)."""
        if self.gate is not None:
            gate = self.gate * (TIMES_OF_A_GRADIENT if is_gradient else 1)
            return gate * max(size, BOUNDS[FP64][1] * whole), "a gate of your own"
        if self.dtype == FP64:
            share, of_all = WITH_FP32_INSIDE if self.fp32_inside else BOUNDS[FP64]
            reason = "in FP64, something computed in FP32" if self.fp32_inside else "in FP64"
            own = TIMES_THE_REFERENCE * of_the_reference if self.fp32_inside else 0.0
            return max(share * size + of_all * whole, own), reason
        if self.numerics == "float8":
            share = FP8_GRADIENT if is_gradient else FP8_OUTPUT
            return max(share * size, BOUNDS[torch.bfloat16][1] * whole), f"FP8, {17 if is_gradient else 20} dB"
        share, of_all = BOUNDS[NUMERICS[self.numerics] if self.numerics else self.dtype]
        kind = self.numerics or dtype_name(self.dtype)
        reasons = {f"rounding of {kind}": share * size}
        if math.isfinite(of_the_reference):
            reasons[f"{TIMES_THE_REFERENCE} times the reference's own"] = TIMES_THE_REFERENCE * of_the_reference
        if is_gradient or counts_as_zero:
            reasons[f"rounding of {kind}, of all {'gradients' if is_gradient else 'outputs'}"] = of_all * whole
        reason = max(reasons, key=lambda each: reasons[each])
        return reasons[reason], reason
