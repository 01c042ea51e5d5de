"""The frame of a study: what it says of itself, the registry, its command, its tables around a session.

`Study` holds all of it: the question (the module's docstring), the cases, the table's columns, the chart.
"""
import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.measure import options
from benchmarks.show import charts as drawing
from benchmarks.show import tables
from benchmarks.show.charts import Charts
from benchmarks.show.tables import Column
from common.command_line import Parser, early_ends, tell
from common.measure.cases import Group
from common.measure.session import Session
from common.outcome import EXIT
from common.phases import Phase
from common.report.record import Record
from common.runtime import compiler, exclusive

Options = argparse.Namespace


@dataclass(frozen=True)
class Study:
    """A question, and what answers it. Tables and charts are drawn from records alone, those of this run or recorded
    ones.
    """
    name: str                                               # of its module: the command
    doc: str                                                # it begins with the question
    groups: Callable[[Options], Iterable[Group]]            # its cases; those of a group are timed in the same rounds
    columns: Sequence[Column] = ()                          # of its table, a row a case
    text: Callable[[list[Record], int | None], str] | None = None     # all it prints, where that is more than one table
    charts: Callable[[list[Record]], Charts] = lambda lines: {}
    no_chart: str = "there is nothing to draw"              # why, where `charts` has none
    add_arguments: Callable[[Parser], None] = lambda parser: None
    refine: Callable[[Options], None] = lambda options: None          # may change them, or raise ValueError
    run: Callable[["Study", Options], int] | None = None    # in place of `run_here`
    compiles_anew: bool = False                             # what was compiled for a group goes with it
    place: int = 100                                        # among the questions: a learner asks the smallest first
    introduction: str = ""                                  # what stands above its recorded tables
    long: bool = False                                      # its tables stand in a file beside the records
    answer: Callable[[list[Record]], str] = lambda lines: tables.NO_ANSWER            # in one recorded figure
    parts: Mapping[str, Callable[[], str]] = field(default_factory=dict)    # of pages, besides its tables

    @property
    def question(self) -> str:
        """The first sentence of its docstring."""
        return self.doc.partition("?")[0] + "?"

    def report(self, lines: list[Record], width: int | None = None) -> str:
        """Everything it prints, from records."""
        return self.text(lines, width) if self.text else tables.text(self.columns, lines, width)


registered: dict[str, Study] = {}


def register(study: Study) -> Study:
    """Make it a command. A study does this at the end of its module."""
    registered[study.name] = study
    return study


def main(study: Study, argv: list[str] | None = None) -> int:
    """The command of a study; returns its exit status (a mistake on the command line raises SystemExit)."""
    parser = options.parser(study.name, study.doc)
    study.add_arguments(parser)
    with early_ends(study.name):
        chosen = options.parse(parser, argv, study.refine)
    with early_ends(study.name, chosen.file):
        return (study.run or run_here)(study, chosen)


def open_session(study: Study, chosen: Options) -> Session:
    """A session of that study on the device that was asked for."""
    compiler.use_private_caches()
    return Session(study.name, chosen.device, chosen.rounds, chosen.seed, chosen.launches, chosen.file,
                   getattr(chosen, "slow_down", 0.0))


def run_here(study: Study, chosen: Options) -> int:
    """Measure every group in this process, and show it; the exit status."""
    with exclusive.alone(chosen.device, study.name):
        session = open_session(study, chosen)
        try:
            for group in study.groups(chosen):
                session.measure(group)
                if study.compiles_anew:
                    torch.compiler.reset()
        except KeyboardInterrupt:
            _show_what_is_done(study, session)
            raise
        return show(study, chosen, session)


def _show_what_is_done(study: Study, session: Session) -> None:
    """The tables of the groups that were finished, where there are some."""
    session.progress.clear()
    timed = any(row.timing for entry in session.entries for row in entry.result.rows.values())
    with contextlib.suppress(LookupError, ValueError, TypeError):          # a table may need what was not reached
        if timed:
            tell(study.report(session.lines))


def show(study: Study, chosen: Options, session: Session, lines: list[Record] | None = None) -> int:
    """Print the tables, draw the charts that were asked for, and say where the time went; the exit status.

    `lines` are the records to show, where they are not just the session's.
    """
    lines = [*session.lines, *session.peak_lines(chosen.config)] if lines is None else lines
    session.say(Phase.SHOWING)
    session.progress.clear()
    tell(study.report(lines))
    draw(study, chosen.chart, lines)
    print(session.finish(chosen.config), file=sys.stderr)
    return exit_status([entry.result.status for entry in session.entries])


def draw(study: Study, stem: str | None, lines: list[Record]) -> None:
    """Draw the charts of these records, or say why there are none; without a stem nothing."""
    if not stem:
        return
    drawn = study.charts(lines)
    drawing.draw(drawn, stem, lines)
    if not drawn:
        print(f"{study.name}: no chart: {study.no_chart}", file=sys.stderr)


def exit_status(statuses: Iterable[str]) -> int:
    """Failed where a case failed or did not fit, skipped where this machine could time none."""
    ended = set(statuses)
    if ended & {"failed", "oom"}:
        return EXIT["failed"]
    return EXIT["skipped"] if ended == {"skipped"} else EXIT["ok"]
