"""Which rank holds up the others: each tells where it is, and whoever waits too long looks at all of them."""
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PAUSE = 0.5                            # seconds between two words of a rank
BUSY = 0.01                            # seconds of CPU time in between that show it at work
DEADLOCK = 15                          # seconds for which all ranks wait for each other, and none will ever go on
STUCK = 5                              # seconds in one phase, behind which a rank tells what it waits for
RECORDED = 2000                        # collectives that torch's flight recorder keeps: what newer versions keep
ALIKE = ("all_reduce", "_base")        # in the names of collectives whose tensors have one size on all ranks
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
    unfinished: dict[str, str] = field(default_factory=dict)       # which collective of which group -> what it is


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
                is_stuck = now - self.since > STUCK
                word = Word(self.phases, self.phase, *where(self.main), now - busy, unfinished() if is_stuck else {})
                self.store.set(f"watch/{self.rank}", json.dumps(astuple(word)))
                if is_stuck and (reason := mismatch(self._all())):
                    self.hung(reason)
                if now - busy > DEADLOCK and (reason := deadlock(self._all(), self.ranks)):
                    self.hung(reason)
                if now - self.since > self.timeout_s:
                    self.hung(verdict(self._all(), self.timeout_s, self.ranks))

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


def record_collectives() -> None:
    """Let torch's flight recorder run in the processes that this one starts: torch 2.9 does so on request alone."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


def unfinished() -> dict[str, str]:
    """The collectives that this rank has begun and not ended, as torch's flight recorder has them.

    GPUs wait for them, and hosts only much later, for something else.
    """
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")               # of Gloo, of NCCL
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in names]
    entries = [entry for dump in dumps if dump for entry in json.loads(dump(True, False)).get("entries", [])]
    return {f"{', '.join(entry['process_group'])}: {entry['collective_seq_id']}": _in_words(entry)
            for entry in entries if not entry.get("retired", True) and not entry.get("is_p2p")}


def _in_words(entry: dict[str, Any]) -> str:
    """"all_reduce [[3]] Float"; of a collective whose tensors may differ in size, its name alone."""
    _, _, name = entry["profiling_name"].partition(":")
    is_alike = any(words in name for words in ALIKE)
    return " ".join([name, str(entry["input_sizes"]), *entry["input_dtypes"]]) if is_alike else name


def mismatch(words: dict[int, Word]) -> str:
    """Which ranks are in different collectives where they should be in the same one; "" where that is not seen."""
    for which in dict.fromkeys(key for word in words.values() for key in word.unfinished):
        begun: dict[str, list[int]] = {}
        for rank, word in words.items():
            if which in word.unfinished:
                begun.setdefault(word.unfinished[which], []).append(rank)
        if len(begun) > 1:
            fewest_first = sorted(begun.items(), key=lambda item: len(item[1]))
            return f"{_named(fewest_first)}: their collectives do not match"
    return ""


def _named(what: list[tuple[str, list[int]]]) -> str:
    """"rank 1 in this; ranks 0, 2 in that"."""
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} in {each}" for each, ranks in what)


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
    return f"all wait for each other, {_named(fewest_first)}: their collectives do not match"


def verdict(words: dict[int, Word], timeout_s: float, ranks: int) -> str:
    """Who holds up the others, in a line. `ranks` are all that there are."""
    silent = [rank for rank in range(ranks) if rank not in words]
    if silent:
        named = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        where_it_is = "where they are" if silent[1:] else "where it is"
        return f"{named} never said {where_it_is}; the others have waited for {timeout_s:g} s"
    last = min(word.phases for word in words.values())
    behind = {rank: word for rank, word in words.items() if word.phases == last}
    busy = {rank: word for rank, word in behind.items() if word.line}
    held = busy if busy and len(busy) < len(words) else behind
    if len(held) == len(words):
        return f"all ranks are in '{words[0].phase}', for {timeout_s:g} s now; a longer --timeout lets them go on"
    rank, word = min(held.items())
    at = f" at {word.line}" if word.line else ""
    return f"rank {rank} hangs in '{word.phase}'{at}; the others have waited for it for {timeout_s:g} s"
