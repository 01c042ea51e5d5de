"""What is missing to a version by hand: milliseconds of kernels, by kind of work."""
from collections.abc import Mapping

from benchmarks.assistant.spending import kind_of
from common.text import figures

SEEN = 0.005                                           # of all that the kernels take: less is no line


def missing_by_kind(ms: Mapping[str, float], by_hand: Mapping[str, float]) -> str:
    """In words, the most first: how many milliseconds more than by hand each kind of work takes. Both are kernel name
    -> ms; "" where either is not known.
    """
    if not (ms and by_hand):
        return ""
    more: dict[str, float] = {}
    for kernels, sign in ((ms, 1), (by_hand, -1)):
        for name, each in kernels.items():
            more[kind_of(name)] = more.get(kind_of(name), 0.0) + sign * each
    least = SEEN * sum(ms.values())
    kinds = sorted((kind for kind in more if abs(more[kind]) >= least), key=lambda kind: -more[kind])
    return ", ".join(f"{kind} {figures(more[kind])}" for kind in kinds)
