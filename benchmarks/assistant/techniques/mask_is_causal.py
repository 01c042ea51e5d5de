"""A dense mask that hides the future alone, or nothing: without it attention is faster. A person leaves it out.

It is so for the inputs that were given: a row with padding makes it another mask.
"""
import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.assistant.fusing import Given, Hidden, MaskGiven
from benchmarks.assistant.graph import with_stars
from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import Ratio, pays, times_as_fast
from benchmarks.assistant.source import Place
from benchmarks.assistant.technique import Found, Technique
from common.runtime import iteration
from common.runtime.iteration import BOTH, FORWARD

INSTEAD = {Hidden.NOTHING: "without it", Hidden.FUTURE: "with is_causal=True in its place"}
PADDED = "as padding does: is_causal alone would be another function"


def find(program: Program) -> list[Found]:
    """Every call of the library's attention with such a mask."""
    places: dict[Place | None, list[tuple[str, Given, Hidden]]] = {}
    for call in program.trace.calls:
        if call.attends and call.attends.mask and call.attends.mask.hides:
            places.setdefault(call.place, []).append((call.module, call.attends, call.attends.mask.hides))
    found = []
    for place, calls in places.items():
        _, given, hides = next((each for each in calls if each[2] is Hidden.MORE), calls[0])
        reason, why_not = f"{given.mask} hides {hides.value} for these inputs", PADDED
        if hides in INSTEAD:
            gain = _gain(given, program.trace.trains and not program.is_inference)
            interval = f"{gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}]"
            reason += f": {INSTEAD[hides]} attention is {interval} times as fast here; the same unless a row is padded"
            why_not = "" if pays(gain) else "it is no faster"
        found.append(Found(place, with_stars([module for module, _, _ in calls]), len(calls), reason, why_not))
    return found


@functools.cache
def _gain(given: Given, trains: bool) -> Ratio:
    """At these shapes, on random numbers."""
    before, after = (iteration_of(each, trains) for each in (given, without_mask(given)))
    return times_as_fast(before, after, given.device)


def without_mask(given: Given) -> Given:
    """The same function, as long as the mask hides what it hid."""
    assert given.mask is not None
    return replace(given, mask=None, is_causal=given.mask.hides is Hidden.FUTURE)


def iteration_of(given: Given, trains: bool) -> iteration.Iteration:
    """One call, and its backward where it trains."""
    inputs = [torch.randn(shape, dtype=given.dtype, device=given.device)
              for shape in (given.query, given.key, given.value)]
    mask = _values(given.mask, given) if given.mask else None
    options = {"enable_gqa": True} if given.enable_gqa else {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, given.dropout_p, given.is_causal, **options)
    dy = torch.randn(*given.query[:-1], given.value[-1], dtype=given.dtype, device=given.device)
    return iteration.of_call(attend, inputs, [dy], {}, BOTH if trains else FORWARD)


def _values(mask: MaskGiven, given: Given) -> Tensor:
    keeps = torch.ones(mask.shape, dtype=torch.bool, device=given.device)
    if mask.hides is Hidden.FUTURE:
        keeps = keeps.tril()
    if mask.dtype == torch.bool:
        return keeps
    return torch.zeros(mask.shape, dtype=mask.dtype, device=given.device).masked_fill(~keeps, float("-inf"))


TECHNIQUE = Technique("mask-is-causal", "a dense mask that is causal -> is_causal", find)
