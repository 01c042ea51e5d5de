"""The cells of the table: each is a process of its own, several times, with caches of its own."""
import json
import multiprocessing
import signal
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.measure.processes import PATIENCE as TO_END
from benchmarks.studies.startup import process
from benchmarks.studies.startup.keeping import COLD, MEGA, NONE, OF_A_CACHE, WARM, WAYS, why_not
from benchmarks.studies.startup.process import Answer, Work
from benchmarks.studies.startup.stack import BY_LAYER, WHOLE
from common.block.config import BlockConfig
from common.runtime.iteration import BOTH, MODES

PATIENCE = 900                         # seconds that a process may take
Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """A way of keeping, of so many layers, for one pass."""
    way: str
    layers: int
    form: str
    mode: str

    def __str__(self) -> str:
        return f"{self.way}, {form_in_words(self.layers, self.form)}, {self.mode}"

    @property
    def variant(self) -> dict[str, Any]:
        """What tells it from others of its way."""
        return {"layers": self.layers, "form": self.form}

    @property
    def why_not(self) -> str:
        """Why it has no figure; "" where it is to be measured."""
        return why_not(self.way, self.form, self.mode == BOTH)


def form_in_words(layers: int, form: str) -> str:
    return "one block" if layers == 1 else f"{layers} {form}"


def every_cell(layers: int, quick: bool) -> list[Cell]:
    """All of them, those that share what is kept side by side."""
    if quick:
        return [Cell(way, 1, WHOLE, BOTH) for way in (COLD, WARM)]
    forms = [(1, WHOLE), (layers, WHOLE), (layers, BY_LAYER)]
    return [Cell(way, count, form, mode) for count, form in forms for mode in MODES for way in WAYS]


@dataclass
class Measured:
    """What the processes of a cell said."""
    answers: list[Answer]
    made: Answer | None = None             # by the process that made what is kept
    kept_bytes: int = 0

    @property
    def failed(self) -> Answer | None:
        """The first that did not end well."""
        said = [self.made, *self.answers] if self.made else self.answers
        return next((answer for answer in said if answer.status != "ok"), None)

    @property
    def seconds(self) -> list[float]:
        return [answer.seconds for answer in self.answers if answer.seconds is not None]

    @property
    def errors(self) -> dict[str, tuple[float, float]]:
        """The worst of each tensor."""
        worst: dict[str, tuple[float, float]] = {}
        for answer in self.answers:
            for name, found in answer.errors.items():
                error, gate = found                            # of JSON, a list
                worst[name] = max((error, gate), worst.get(name, (0.0, gate)))
        return worst


class Processes:
    """Starts them, one after another. What is kept lies in `folder`.

    Each is forked from a server that has imported torch, and nothing of its compiler: importing torch is no part of
    what is asked, and would take most of the time.
    """

    def __init__(self, folder: Path, config: BlockConfig, device: str, seed: int, say: Say):
        self.server = multiprocessing.get_context("forkserver")
        self.server.set_forkserver_preload([process.__name__])
        self.folder, self.config, self.device, self.seed, self.say = folder, config, device, seed, say
        self.made: dict[tuple, tuple[Path, Path, Answer]] = {}         # (folder of what is kept, of its cache, answer)

    def measure(self, cell: Cell, times: int) -> Measured:
        """Start a process so many times."""
        kept, cache, made = self._make(cell)
        measured = Measured([], made, size_of(cache if cell.way == WARM else kept) if made else 0)
        for number in range(times if measured.failed is None else 0):
            self.say(f"{cell}: {number + 1} of {times}")
            own = cache if cell.way == WARM else self._new()
            measured.answers.append(self._run(cell, kept, own, makes=False))
            if measured.failed:
                break
        return measured

    def _make(self, cell: Cell) -> tuple[Path, Path, Answer | None]:
        """What the processes of the cell start from. A cold process fills both kinds of cache."""
        if cell.way in (NONE, COLD):
            return self.folder, self.folder, None
        key = OF_A_CACHE if cell.way in OF_A_CACHE else cell.way, cell.layers, cell.form, cell.mode
        if key not in self.made:
            self.say(f"{cell}: making what is kept")
            kept, cache = self._new(), self._new()
            making = Cell(MEGA, cell.layers, cell.form, cell.mode) if cell.way in OF_A_CACHE else cell
            answer = self._run(making, kept, cache, makes=True)
            self.made[key] = kept, cache, answer
        return self.made[key]

    def _new(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def _run(self, cell: Cell, kept: Path, cache: Path, makes: bool) -> Answer:
        """One process; where it died, what it said last."""
        work = Work(cell.way, cell.form, cell.mode, cell.layers, self.config, self.device, self.seed, str(kept), makes)
        own = self._new()
        (own / process.WORK).write_text(work.written())
        one = self.server.Process(target=process.main, args=(own, cache))
        one.start()
        try:
            one.join(PATIENCE)
        finally:
            took_too_long = one.is_alive()
            _end(one)
        if took_too_long:
            return Answer("failed", f"it took longer than {PATIENCE} s")
        if one.exitcode:
            said = (own / process.ERRORS).read_text(errors="replace").strip().splitlines()
            return Answer("failed", f"the process {_ended(one.exitcode)}: {said[-1] if said else 'no message'}")
        return Answer(**json.loads((own / process.ANSWER).read_text()))


def _end(one: BaseProcess) -> None:
    """It gets the time to clean up."""
    if one.is_alive():
        one.terminate()
        one.join(TO_END)
        one.kill()
    one.join()


def _ended(status: int) -> str:
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def size_of(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def spread(seconds: list[float]) -> tuple[float, float, float]:
    """(median, least, most)."""
    return statistics.median(seconds), min(seconds), max(seconds)
