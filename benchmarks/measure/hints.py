"""What a wrong callable probably does wrong: each hint comes from a trial, and is given only where the trial fits."""
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.calls import Inputs, modules_of, outputs_of
from benchmarks.measure.checks import Check
from benchmarks.measure.observing import Work

CLOSE = {torch.float64: 1e-3, torch.float32: 1e-3}       # of a norm: two tensors that fit
CLOSE_IN_16_BITS = 2e-2


def hint(candidate: Callable, truth: Any, checks: Sequence[Check]) -> str:
    """The first that fits; "" where none does. `truth` has the reference (`plain`) and its `work`."""
    failed = [check for check in checks if not check.passed]
    if sentences := _mode(candidate, truth.plain):
        return sentences
    outputs = [check for check in failed if check.name.startswith("output") and check.question != "form"]
    if not outputs:
        return ""
    with contextlib.suppress(Exception), torch.no_grad():
        return _from_trials(candidate, truth.plain, truth.work, outputs)
    return ""


def _mode(candidate: Callable, reference: Callable) -> str:
    """One in train mode, the other in eval mode."""
    theirs = {module.training for module in modules_of(candidate)}
    ours = {module.training for module in modules_of(reference)}
    if theirs == {True} and ours == {False}:
        return "it is in train mode, the reference is not: is .eval() missing?"
    if theirs == {False} and ours == {True}:
        return "it is in eval mode, the reference is not: is .train() missing?"
    return ""


def _from_trials(candidate: Callable, reference: Callable, work: Work, failed: Sequence[Check]) -> str:
    theirs, ours = _first_output(candidate, work.inputs), _first_output(reference, work.inputs)
    if theirs.shape == ours.shape:
        factor = float((theirs.double() * ours.double()).sum() / ours.double().square().sum())
        if _fits(theirs, factor * ours):
            if abs(factor - 1) > _close(ours):
                return f"it is {factor:.4g} times the reference's everywhere"
            return "the difference is tiny: a constant such as an epsilon, or another form of GELU?"
    return (_causality(candidate, reference, work.inputs) or _scale(candidate, ours, work.inputs)
            or _transposed(candidate, ours, work.inputs))


def _first_output(call: Callable, inputs: Inputs) -> Tensor:
    return next(t for t in outputs_of(inputs.copies().call(call)).values() if t.is_floating_point())


def _close(t: Tensor) -> float:
    return CLOSE.get(t.dtype, CLOSE_IN_16_BITS)


def _fits(a: Tensor, b: Tensor) -> bool:
    return bool((a.double() - b.double()).norm() <= _close(b) * b.double().norm())


def _causality(candidate: Callable, reference: Callable, inputs: Inputs) -> str:
    """Whether positions before the last one see it, along dimension 1 or, of [B, H, S, D], 2."""
    seen = [_earlier_see_the_last(call, inputs) for call in (reference, candidate)]
    if seen == [False, True]:
        return "it sees later positions, the reference does not: the mask's polarity, its diagonal, or no mask?"
    return ""


def _earlier_see_the_last(call: Callable, inputs: Inputs) -> bool | None:
    """None where there is no dimension of positions."""
    changed, plain = inputs.copies(), inputs.copies()
    length = None
    for t in changed.named().values():
        if t.ndim < 2:
            continue
        place = 2 if t.ndim == 4 else 1
        length = length or t.size(place)
        if t.size(place) == length and length > 1:
            last = t.narrow(place, length - 1, 1)
            last.copy_(-last if t.is_floating_point() else last.roll(1, 0) if t.size(0) > 1 else torch.zeros_like(last))
    if not length or length < 2:
        return None
    before, after = _first_output(call, plain), _first_output(call, changed)
    place = 2 if before.ndim == 4 else 1
    if before.ndim < 2 or before.size(place) != length:
        return None
    earlier = slice(0, length - 1)
    return not _fits(after.movedim(place, 0)[earlier], before.movedim(place, 0)[earlier])


def _scale(candidate: Callable, ours: Tensor, inputs: Inputs) -> str:
    """Attention of (q, k, v): whether another scale of q makes it right."""
    q = next((t for t in inputs.named().values() if t.is_floating_point() and t.ndim >= 3), None)
    if q is None:
        return ""
    D = q.size(-1)
    trials = (D ** -0.5, "is the scale of 1/sqrt(D) missing?"), (D ** 0.5, "is a scale of 1/sqrt(D) too much?")
    for factor, sentences in trials:
        scaled = inputs.copies()
        first = next(t for t in scaled.named().values() if t.is_floating_point() and t.ndim >= 3)
        first.mul_(factor)
        if _fits(_first_output(candidate, scaled), ours):
            return sentences
    return ""


def _transposed(candidate: Callable, ours: Tensor, inputs: Inputs) -> str:
    """Whether a square weight is the wrong way round."""
    for module in modules_of(candidate):
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim != 2 or weight.size(0) != weight.size(1):
                continue
            kept = weight.detach().clone()
            weight.copy_(kept.T)
            try:
                if _fits(_first_output(candidate, inputs), ours):
                    return f"{name} of {type(module).__name__} is the wrong way round: transpose it"
            finally:
                weight.copy_(kept)
    return ""
