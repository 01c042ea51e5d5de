"""Tables of runs by columns: a study names its columns, and has these ready-made ones to pick from."""
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.records.provenance import cautions, provenance
from benchmarks.records.read import Run, extra, label, latest, paired, runner, verdict
from common.report import metrics
from common.report.metrics import Metric
from common.report.record import Record
from common.runtime import iteration
from common.runtime.iteration import MODES
from common.runtime.peaks import BURST, SUSTAINED
from common.text import NOT_AVAILABLE, figures, number, ratio, table

NO_ANSWER = "see the tables"           # of records that do not hold the figure which answers a study's question


@dataclass(frozen=True)
class Context:
    """What a cell may ask besides its own run: the pass, and the runs of the whole table in their order."""
    mode: str
    runs: Sequence[Run]

    @property
    def first(self) -> Run:
        """The first run that was timed."""
        return next(run for run in self.runs if run.best(self.mode))

    def previous(self, run: Run) -> Run | None:
        """The last run before this one that was timed; None where there is none."""
        timed = [other for other in self.runs[:self.runs.index(run)] if other.best(self.mode)]
        return timed[-1] if timed else None


@dataclass(frozen=True)
class Column:
    """One column: its header, and what it says of a run. Of a run that was not timed most say nothing."""
    header: str
    cell: Callable[[Run, Context], str]
    untimed: bool = False

    def of(self, run: Run, context: Context) -> str:
        return self.cell(run, context) if self.untimed or run.best(context.mode) else ""


def rows_of(columns: Sequence[Column], context: Context) -> list[list[str]]:
    """A row for each run."""
    rows = []
    for run in context.runs:
        rows.append([column.of(run, context) for column in columns])
    return rows


def of_runs(columns: Sequence[Column], runs: Sequence[Run], mode: str, width: int | None = None, keys: int = 1) -> str:
    """The table of one pass."""
    return table(rows_of(columns, Context(mode, runs)), [column.header for column in columns], width, keys)


def text(columns: Sequence[Column], lines: list[Record], width: int | None = None) -> str:
    """Everything that a study with one table a pass prints, from records."""
    runs = list(latest(lines).values())
    blocks = [f"{mode}\n\n{of_runs(columns, runs, mode, width)}" for mode in MODES]
    return framed(lines, blocks, runs)


def framed(lines: list[Record], blocks: Sequence[str], runs: Iterable[Run]) -> str:
    """Blocks of text between where the records are from and what is to be known of the runs; empty ones left out."""
    return "\n\n".join(filter(None, [provenance(lines), *blocks, "\n".join(cautions(runs))]))


def timing_of(run: Run, mode: str) -> Record:
    """The record of the faster way of launching."""
    line = run.find(mode, "latency", run.best(mode))
    assert line is not None
    return line


def _quantiles(run: Run, context: Context) -> str:
    timing = extra(timing_of(run, context.mode))
    return f"{number(timing['p20'], ',.2f')} to {number(timing['p80'], ',.2f')}"


def _times_first(run: Run, context: Context) -> str:
    first_ms, own_ms = context.first.best_ms(context.mode), run.best_ms(context.mode)
    assert first_ms and own_ms
    return f"{first_ms / own_ms:.2f}"


def _paired_with_first(run: Run, context: Context) -> str:
    times = paired(context.first, run, context.mode)
    return ratio(times) + verdict(*times[1:]) if times and run is not context.first else ""


def branch_error(run: Run) -> str:
    """The error of the branch against FP64; empty where it was not checked."""
    error = run.error("branch")
    return f"{error:.1e}" if error else ""


def _worst_error(run: Run, context: Context) -> str:
    errors = run.errors().values()
    return f"{max(errors):.1e}" if errors else ""


def joules(run: Run, mode: str) -> float | None:
    """Of an iteration, by the way of launching that was metered; None where none was."""
    for launch in iteration.LAUNCHES:
        if used := run.figure(metrics.ENERGY, mode, launch):
            return used
    return None


def of_metric(metric: Metric, header: str, launch: str | None = None) -> Column:
    """A column of any figure of a row, by the faster way of launching or that one."""
    def cell(run: Run, context: Context) -> str:
        value = run.figure(metric, context.mode, launch)
        return metric.shown(value) if value is None or metric.unit == "%" else figures(metric.scale * value)
    return Column(header, cell)


def _joules(run: Run, context: Context) -> str:
    used = joules(run, context.mode)
    return NOT_AVAILABLE if used is None else figures(used)


CASE = Column("case", lambda run, _: label(run.lines[-1], engine=False, settings=False), untimed=True)
STATUS = Column("status", lambda run, _: run.status, untimed=True)
ERROR = Column("error", lambda run, _: branch_error(run), untimed=True)
WORST_ERROR = Column("error", _worst_error, untimed=True)
LAUNCH = Column("launch", lambda run, context: run.best(context.mode) or "")
MS = Column("ms", lambda run, context: number(run.best_ms(context.mode), ",.2f"))
QUANTILES = Column("p20 to p80", _quantiles)
TIMES_FIRST = Column("x first", _times_first)
PAIRED_WITH_FIRST = Column("x first [95 %]", _paired_with_first)
RATE = of_metric(metrics.RATE, "TFLOP/s")
SUSTAINED_LIMIT = of_metric(metrics.SHARE[SUSTAINED], "% sustained")
LIMIT = of_metric(metrics.SHARE[BURST], "% burst")
JOULES = Column("J", _joules)
MHZ = Column("MHz", lambda run, context: str(runner(timing_of(run, context.mode))["extra_info"].get("sm_mhz", "n/a")))
MEMORY = of_metric(metrics.PEAK_MEMORY, "GiB", "eager")
LAUNCHES = Column("launches", lambda run, context: number(run.value(context.mode, "launches"), ",.0f"))
COMPILE = Column("compile s", lambda run, _: number(run.value("compile", "compile cold"), ",.0f"))
