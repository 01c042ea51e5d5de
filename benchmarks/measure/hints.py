"""What a wrong callable probably does wrong: each hint comes from a trial, and is given only where the trial fits."""
import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.measure.calls import Inputs, modules_of, named_parameters, outputs_of
from benchmarks.measure.checks import MEANING, Check
from benchmarks.measure.copying import deep_copy
from benchmarks.measure.keeping import without_dropout
from benchmarks.measure.observing import exact_in
from benchmarks.measure.state import Start

CLOSE = {torch.float64: 1e-8, torch.float32: 1e-3}       # of a norm: two tensors that fit
CLOSE_IN_16_BITS = 2e-2
MOST_TRIALS = 8                                          # of weights that are transposed: each is a forward


def hint(candidate: Callable, truth: Any, checks: Sequence[Check]) -> str:
    """The first that fits; "" where none does. `truth` has the reference (`plain`) and its `work`.

    Trials run in FP64 where the meaning failed: what is wrong by little shows there alone.
    """
    failed = [check for check in checks if not check.passed and check.question != "form"]
    with contextlib.suppress(Exception), torch.no_grad():
        if any(check.question == MEANING for check in failed) and truth.has_meaning:
            copy, reference = deep_copy(candidate, torch.float64), deep_copy(truth.plain, torch.float64)
            with without_dropout(copy), without_dropout(reference), exact_in(torch.float64):
                return _from_trials(copy, reference, Inputs(*_in_fp64(truth.few.inputs)))
        return _from_trials(candidate, truth.plain, truth.work.inputs) if failed else ""
    return ""


def _in_fp64(inputs: Inputs) -> tuple[tuple, Any]:
    copies = inputs.copies(torch.float64)
    return copies.args, copies.kwargs


def _from_trials(candidate: Callable, reference: Callable, inputs: Inputs) -> str:
    theirs, ours = _first_output(candidate, inputs), _first_output(reference, inputs)
    if theirs.shape != ours.shape or _fits(theirs, ours):                      # no trial could make that go away
        return ""
    factor = float((theirs.double() * ours.double()).sum() / ours.double().square().sum())
    if factor and abs(factor - 1) > _close(ours) and _fits(theirs, factor * ours):
        return f"it is {factor:.4g} times the reference's everywhere"
    trials = _mode, _epsilon, _gelu, _scale, _transposed
    found = next(filter(None, (trial(candidate, reference, ours, inputs) for trial in trials)), "")
    return found or _causality(candidate, reference, inputs)


def _first_output(call: Callable, inputs: Inputs) -> Tensor:
    start = Start(call)
    try:
        return next(t for t in outputs_of(inputs.copies().call(call)).values() if t.is_floating_point())
    finally:
        start.begin(0)


def _close(t: Tensor) -> float:
    return CLOSE.get(t.dtype, CLOSE_IN_16_BITS)


def _fits(a: Tensor, b: Tensor) -> bool:
    return bool((a.double() - b.double()).norm() <= _close(b) * b.double().norm())


def _mode(candidate: Callable, reference: Callable, ours: Tensor, inputs: Inputs) -> str:
    """One in train mode, the other in eval mode: whether it is right in the other's."""
    theirs = {module.training for module in modules_of(candidate)}
    of_reference = {module.training for module in modules_of(reference)}
    if theirs == of_reference or len(theirs) != 1 or len(of_reference) != 1:
        return ""
    own, wanted = theirs.pop(), of_reference.pop()
    try:
        _set_modes(candidate, wanted)
        fits = _fits(_first_output(candidate, inputs), ours)
    finally:
        _set_modes(candidate, own)
    if not fits:
        return ""
    mode, call = ("train", ".eval()") if own else ("eval", ".train()")
    return f"it is in {mode} mode, the reference is not: is {call} missing?"


def _set_modes(call: Callable, training: bool) -> None:
    for module in modules_of(call):
        module.training = training


def _epsilon(candidate: Callable, reference: Callable, ours: Tensor, inputs: Inputs) -> str:
    """Whether the reference's epsilon in place of its own makes it right."""
    wanted = {value for _, _, value in _epsilons(reference)} or {1e-5, 1e-6, 1e-8, 1e-12}
    held = _epsilons(candidate)
    for value in sorted(wanted - {own for _, _, own in held}):
        try:
            for module, name, _ in held:
                setattr(module, name, value)
            if _fits(_first_output(candidate, inputs), ours):
                module, name, own = held[0]
                return f"{name} of {type(module).__name__} is {own:g}, the reference's is {value:g}"
        finally:
            for module, name, own in held:
                setattr(module, name, own)
    return ""


def _epsilons(call: Callable) -> list[tuple[nn.Module, str, float]]:
    """(module, name, value) of each attribute that is an epsilon."""
    return [(module, name, value) for module in modules_of(call) for name, value in vars(module).items()
            if "eps" in name and isinstance(value, float)]


class _OtherGelu(TorchFunctionMode):
    """Every GELU in its other form."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.gelu:
            approximate = (kwargs or {}).get("approximate", "none")
            return func(*args, **{**(kwargs or {}), "approximate": "none" if approximate == "tanh" else "tanh"})
        return func(*args, **(kwargs or {}))


def _gelu(candidate: Callable, reference: Callable, ours: Tensor, inputs: Inputs) -> str:
    """Whether the other form of GELU makes it right."""
    with _OtherGelu():
        if _first_output(reference, inputs).equal(ours):                     # it has none
            return ""
        fits = _fits(_first_output(candidate, inputs), ours)
    return "the reference has the other form of GELU: see its `approximate`" if fits else ""


def _causality(candidate: Callable, reference: Callable, inputs: Inputs) -> str:
    """Whether positions before the last one see it, along dimension 1 or, of [B, H, S, D], 2."""
    seen = [_earlier_see_the_last(call, inputs) for call in (reference, candidate)]
    if seen == [False, True]:
        return "it sees later positions, the reference does not"
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


def _scale(candidate: Callable, reference: Callable, ours: Tensor, inputs: Inputs) -> str:
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


def _transposed(candidate: Callable, reference: Callable, ours: Tensor, inputs: Inputs) -> str:
    """Whether a square weight is the wrong way round, in all layers that have one of that name."""
    for name, weights in list(_square_weights(candidate).items())[:MOST_TRIALS]:
        _transpose(weights)
        try:
            if _fits(_first_output(candidate, inputs), ours):
                return f"{name} is the wrong way round: transpose it"
        finally:
            _transpose(weights)
    return ""


def _square_weights(call: Callable) -> dict[str, list[Tensor]]:
    """By name, without the numbers of layers; a tied one once."""
    found: dict[str, list[Tensor]] = {}
    seen = set[int]()
    for path, weight in named_parameters(call).items():
        if weight.ndim == 2 and weight.size(0) == weight.size(1) and id(weight) not in seen:
            seen.add(id(weight))
            found.setdefault(re.sub(r"\b\d+\b", "*", path), []).append(weight)
    return found


def _transpose(weights: Sequence[Tensor]) -> None:
    for weight in weights:
        weight.copy_(weight.detach().clone().T)
