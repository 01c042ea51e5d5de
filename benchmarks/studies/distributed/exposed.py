"""How much of the time that ranks talk is hidden behind compute: by unions of intervals, as HTA has it.

Communication and computation are each merged into intervals that do not overlap. Exposed is what is left of the former
without the latter. Sums of the kernels' own times would count twice what runs side by side.
"""
from collections.abc import Iterable

Interval = tuple[float, float]             # (begin, end), in any one unit


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in intervals that do not touch, in order. Empty ones are left out."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of their union."""
    return sum(end - begin for begin, end in merged(intervals))


def exposed(communication: Iterable[Interval], computation: Iterable[Interval]) -> float:
    """How long only communication went on."""
    talking, working = merged(communication), merged(computation)
    both = 0.0
    for begin, end in talking:
        both += sum(max(0.0, min(end, other_end) - max(begin, other)) for other, other_end in working)
    return length(talking) - both
