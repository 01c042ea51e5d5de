"""A dense mask that hides the future alone, or nothing: without it attention is faster. A person leaves it out.

It is so for the inputs that were given: a row with padding makes it another mask.
"""
import functools
from dataclasses import replace

from benchmarks.assistant.fusing import Given, Hidden
from benchmarks.assistant.graph import with_stars
from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import Ratio, dtypes_to_time, gain_on_device, in_words, pays
from benchmarks.assistant.source import Place
from benchmarks.assistant.technique import Found, Technique

INSTEAD = {Hidden.NOTHING: "without it", Hidden.FUTURE: "with is_causal=True in its place"}
PADDED = "as padding or a window does: is_causal alone would be another function"


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
            trains = program.trace.trains and not program.is_inference
            gains = {dtype: _gain(given.in_dtype(dtype), trains) for dtype in dtypes_to_time(given.dtype)}
            reason += f": {INSTEAD[hides]} attention is {in_words(gains)}; the same unless a row is padded"
            why_not = "" if any(map(pays, gains.values())) else "it is not worth it"
        found.append(Found(place, with_stars([module for module, _, _ in calls]), len(calls), reason, why_not))
    return found


@functools.cache
def _gain(given: Given, trains: bool) -> Ratio:
    """At these shapes, on random numbers; on a CPU, which takes long, for one sample."""
    given = given if given.device.type == "cuda" else given.of_one_sample()
    given = replace(given, trains=trains)
    return gain_on_device(given.iteration(), without_mask(given).iteration(), given.device)


def without_mask(given: Given) -> Given:
    """The same function, as long as the mask hides what it hid."""
    assert given.mask is not None
    return replace(given, mask=None, is_causal=given.mask.hides is Hidden.FUTURE)


TECHNIQUE = Technique("mask-is-causal", "a dense mask that is causal -> is_causal", find)
