"""Which rank holds up the others: each tells where it is, and whoever waits too long looks at all of them."""
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PAUSE = 0.5                            # seconds between two words of a rank
BUSY = 0.01                            # seconds of CPU time in between that show it at work
DEADLOCK = 15                          # seconds for which all ranks wait for each other, and none will ever go on
GRACE = 30                             # seconds that torch's own timeout comes after this one: this one names the rank
_OF_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = dist.distributed_c10d.__file__


@dataclass(frozen=True)
class Word:
    """What a rank has said last."""
    phases: int                        # how many it has begun: they are the same on all ranks
    phase: str
    line: str                          # of the suite's own code, which it runs; "" where it waits for other ranks
    waits_in: str = ""                 # the collective
    idle_s: float = 0.0                # since it has last done anything


class Watch:
    """Says in the store of all ranks where this one is. Where it stays too long, `hung` is called with the reason."""

    def __init__(self, rank: int, ranks: int, timeout_s: float, hung: Callable[[str], None]):
        self.rank, self.ranks, self.timeout_s, self.hung = rank, ranks, timeout_s, hung
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                                   timeout=timedelta(seconds=GRACE))
        self.main = threading.get_ident()
        self.phase, self.phases, self.since = "starting", 0, time.monotonic()
        self.done = threading.Event()

    def reached(self, phase: str) -> None:
        """This rank begins that phase."""
        self.phase, self.phases, self.since = phase, self.phases + 1, time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator["Watch"]:
        """While it lasts."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.done.set()
            thread.join()

    def _watch(self) -> None:
        clock = time.pthread_getcpuclockid(self.main)
        used, busy = time.clock_gettime(clock), time.monotonic()
        while not self.done.wait(PAUSE):
            before, used, now = used, time.clock_gettime(clock), time.monotonic()
            busy = now if used - before > BUSY else busy
            with contextlib.suppress(dist.DistError):              # the store has ended: so does the run
                word = Word(self.phases, self.phase, *where(self.main), now - busy)
                self.store.set(f"watch/{self.rank}", json.dumps(astuple(word)))
                if now - busy > DEADLOCK and (reason := deadlock(self._all(), self.ranks)):
                    self.hung(reason)
                if now - self.since > self.timeout_s:
                    self.hung(verdict(self._all(), self.timeout_s))

    def _all(self) -> dict[int, Word]:
        """The words of all ranks that have said any."""
        keys = {rank: f"watch/{rank}" for rank in range(self.ranks)}
        return {rank: Word(*json.loads(self.store.get(key))) for rank, key in keys.items() if self.store.check([key])}


def where(thread: int) -> tuple[str, str]:
    """(the line that a thread runs outside of torch, ""), or ("", the collective that it waits in)."""
    frame, waits_in = sys._current_frames().get(thread), ""
    while frame:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path == _COLLECTIVES:
            waits_in = name
        elif not path.startswith(_OF_TORCH):
            return ("", waits_in) if waits_in else (f"{Path(path).name}:{frame.f_lineno}", "")
        frame = frame.f_back
    return "", waits_in


def deadlock(words: dict[int, Word], ranks: int) -> str:
    """Why no rank will ever go on, in a line; "" where that is not sure."""
    if len(words) < ranks or any(word.line or word.idle_s < DEADLOCK for word in words.values()):
        return ""
    waiting: dict[str, list[int]] = {}
    for rank, word in words.items():
        waiting.setdefault(f"{word.waits_in} of '{word.phase}'", []).append(rank)
    if len(waiting) == 1:                                  # they may well move much over a slow network
        return ""
    fewest_first = sorted(waiting.items(), key=lambda item: len(item[1]))
    said = [f"rank{'s' * (len(which) > 1)} {', '.join(map(str, which))} in {what}" for what, which in fewest_first]
    return f"all wait for each other, {'; '.join(said)}: their collectives do not match"


def verdict(words: dict[int, Word], timeout_s: float) -> str:
    """Who holds up the others, in a line."""
    last = min(word.phases for word in words.values())
    behind = {rank: word for rank, word in words.items() if word.phases == last}
    busy = {rank: word for rank, word in behind.items() if word.line}
    held = busy if busy and len(busy) < len(words) else behind
    if len(held) == len(words):
        return f"all ranks are in '{words[0].phase}', for {timeout_s:g} s now; a longer --timeout lets them go on"
    rank, word = min(held.items())
    at = f" at {word.line}" if word.line else ""
    return f"rank {rank} hangs in '{word.phase}'{at}; the others have waited for it for {timeout_s:g} s"
