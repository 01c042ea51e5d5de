"""Where the time of spread blocks goes beside that of whole ones, from two GPUs to four, from records."""
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import RESULTS
from benchmarks.records.files import file_of
from benchmarks.records.read import Run, extra, read, values
from benchmarks.studies.distributed.tables import (
    ALONE,
    EXPOSED,
    LATENCY,
    efficiency_of,
    laid_out,
    latest_of_each_row,
    row_name,
)
from common.report.record import Record
from common.runtime.iteration import BOTH
from common.text import figures, markdown, ratio


@dataclass(frozen=True)
class Lost:
    """What spread blocks take longer than their share of the time of whole ones, in ms of a forward and backward."""
    total: float
    waiting: float                     # only communication went on
    slower: float                      # their kernels take longer than their share of those of whole blocks

    @property
    def rest(self) -> float:
        """Nothing ran, or what a timeline of one pass and the timed ones differ by."""
        return self.total - self.waiting - self.slower


def lost(run: Run) -> Lost | None:
    """None where it was not timed beside whole blocks."""
    timed, whole, talked = run.find(BOTH, LATENCY, "eager"), run.find(BOTH, ALONE), run.find(BOTH, EXPOSED)
    if not timed or not whole or not talked or not extra(talked).get("computation_alone"):
        return None
    sharing = extra(timed)["ranks_of_a_batch"]
    computing, alone = extra(talked)["computation"], extra(talked)["computation_alone"]
    total = statistics.median(values(timed)) - statistics.median(values(whole)) / sharing
    return Lost(total, values(talked)[0], computing - alone / sharing)


def recorded() -> str:
    """Of the H200s, two and four in one host."""
    files = [file_of(RESULTS / machine / "distributed-te-tutorial") for machine in ("h200x2", "h200x4")]
    return text([read(path) for path in files])


def text(every: Sequence[list[Record]]) -> str:
    """A row for each way to spread each stack; those that differ by their GPUs alone stand together."""
    found = [run for lines in every for run in latest_of_each_row(lines) if lost(run)]
    order = list(dict.fromkeys(_kind(run) for run in found))
    rows = []
    for run in sorted(found, key=lambda run: (order.index(_kind(run)), laid_out(run.variant["parallel"])[0])):
        loss, speed = lost(run), efficiency_of(run)
        assert loss and speed
        rows.append([row_name(run), str(laid_out(run.variant["parallel"])[0]), ratio(speed),
                     *(_ms(part) for part in (loss.total, loss.waiting, loss.slower, loss.rest))])
    return markdown(rows, ["blocks", "GPUs", "efficiency [95 %]", "lost ms", "waiting for others", "slower kernels",
                           "the rest"])


def _ms(part: float) -> str:
    """Less than a tenth of a millisecond is noise."""
    return figures(part) if math.fabs(part) >= 0.1 else "0"


def _kind(run: Run) -> tuple[Any, ...]:
    """What two rows have in common that differ by how many GPUs there are."""
    layout = laid_out(run.variant["parallel"])[1]
    others = {name: value for name, value in run.variant.items() if name != "parallel"}
    return run.step, run.lines[0]["benchmark"]["dtype"], tuple(sorted(others.items())), layout.techniques
