"""The generated parts of the pages: tables, charts, diffs and the example card, from recorded runs and the scripts.

    python -m benchmarks pages             # writes them, redraws charts that are stale, and measures nothing

A part stands in a page between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""
import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records.files import compress_large, stem_of
from benchmarks.records.read import (
    BadRecords,
    read,
)
from benchmarks.show import charts
from benchmarks.show.page_parts import WIDTH, Parts, Question, parts_of, recorded
from common import steps
from common.command_line import Parser, early_ends
from common.outcome import EXIT

ROOT = steps.ROOT
PAGES = [ROOT / name for name in ("README.md", "common/README.md", "benchmarks/README.md",
                                  "benchmarks/results/README.md", "benchmarks/kernels/README.md",
                                  "benchmarks/kernels/cuda/attention/README.md")]
MARKER = re.compile(r"(<!-- begin (.+?) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)


# ------------------------------------------------------------------------------------------------------- what is there


def stale_charts(studies: Sequence[Question]) -> list[str]:
    """The charts of recorded runs that are missing or show other records."""
    stale = []
    for study in studies:
        for path in recorded(study.name):
            lines = read(path)
            stems = [f"{stem_of(path)}-{ending}" for ending in study.charts(lines)]
            stale += [stem for stem in stems if not charts.is_of(stem, lines)]
    return stale


def long_tables(studies: Sequence[Question]) -> dict[Path, str]:
    """File -> text of the tables that stand beside the records: a CPU's, and long ones."""
    tables = {}
    for study in studies:
        for path in recorded(study.name):
            if study.long or path.parent.name == "cpu":
                tables[stem_of(path).with_suffix(".txt")] = study.report(read(path), WIDTH) + "\n"
    return tables


# ---------------------------------------------------------------------------------------------------------- the pages


def rewritten(text: str, parts: Parts) -> str:
    """A page's text with every generated part replaced. Raises BadRecords for a part that there is not."""
    def replaced(match: re.Match) -> str:
        name = match[2]
        if name not in parts:
            raise BadRecords(f"a page has a place for '{name}': there is no such part")
        return f"{match[1]}{parts[name]()}\n{match[4]}"
    return MARKER.sub(replaced, text)


def write(studies: Sequence[Question]) -> None:
    """Rewrite the pages and the tables beside the records, and redraw the charts that are stale.

    Records that are large are compressed.
    """
    compress_large()
    for study in studies:
        for path in recorded(study.name):
            lines = read(path)
            drawn = study.charts(lines)
            stem = str(stem_of(path))
            charts.draw({ending: figure for ending, figure in drawn.items()
                         if not charts.is_of(f"{stem}-{ending}", lines)}, stem, lines)
    for file, text in long_tables(studies).items():
        file.write_text(text)
    parts = parts_of(studies)
    for page in PAGES:
        page.write_text(rewritten(page.read_text(), parts))


def main(argv: list[str] | None, studies: Sequence[Question]) -> int:
    """The command; returns its exit status."""
    Parser("pages", prog="python -m benchmarks pages", description=__doc__,
           formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    with early_ends("pages"):
        write(studies)
    return EXIT["ok"]
