"""Where Dynamo leaves the graph, and why: each graph break with its line.

`torch._dynamo.explain` misses a break before the first operation; this listens to what Dynamo reports for its own
structured trace, and counts what it did not report there.
"""
import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch._dynamo.utils import counters

from benchmarks.assistant.source import Place, innermost

_ARTIFACT = "dynamo_graph_break_reason"
_TRACE = logging.getLogger("torch.__trace")
_PARTS = re.compile(r"at (?P<file>[^\n]+):(?P<line>\d+)\n(?:Graph Break )?Reason: (?P<reason>.*?)\n"
                    r"\s*User code traceback:(?P<trace>.*)", re.DOTALL)


@dataclass(frozen=True)
class Break:
    """One place where a graph ends."""
    place: Place | None                    # None: Dynamo did not say, or it stands in a library
    reason: str                            # in a line
    skips: bool = False                    # all of the function around it runs uncompiled, as for a break in a loop
    inside: Place | None = None            # the line of a library


class _Listener(logging.Handler):
    """Keeps the graph breaks of Dynamo's structured trace."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.breaks: list[Break] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None) or {}
        if metadata.get("artifact", {}).get("name") == _ARTIFACT:
            self.breaks.append(_parsed(str(getattr(record, "payload", ""))))


def _parsed(text: str) -> Break:
    found = _PARTS.search(text)
    if found is None:
        return Break(None, text.strip().partition("\n")[0])
    inside = Place(found["file"], int(found["line"]))
    skips = "Skipping the function" in found["reason"]
    return Break(innermost(found["trace"]), in_a_line(found["reason"]), skips, inside)


def in_a_line(reason: str) -> str:
    """What Dynamo says in paragraphs: its explanation where there is one, else the first line."""
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")]
    return (explained or lines or ["no reason"])[0]


def _each_once(breaks: Iterable[Break]) -> list[Break]:
    """One for each place and reason; Dynamo tries a function again after it was skipped."""
    merged: dict[tuple, Break] = {}
    for each in breaks:
        key = each.place or each.inside, each.reason
        merged[key] = replace(each, skips=each.skips or (key in merged and merged[key].skips))
    return list(merged.values())


@contextlib.contextmanager
def breaks_reported() -> Iterator[list[Break]]:
    """Meanwhile the graph breaks, each place once. Those that only Dynamo's counters know come at the end."""
    listener = _Listener()
    found: list[Break] = []
    before = dict(counters["graph_break"])
    level, handlers = _TRACE.level, list(_TRACE.handlers)
    _TRACE.handlers = [listener]                       # whoever traces to a file gets no trace of our own reading
    _TRACE.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        _TRACE.handlers = handlers
        _TRACE.setLevel(level)
        found += _each_once(listener.breaks)
        known = {each.reason for each in found}
        for reason, count in counters["graph_break"].items():
            if count > before.get(reason, 0) and in_a_line(reason) not in known:
                found.append(Break(None, in_a_line(reason)))
