"""Run the notebooks from top to bottom, and record what they print.

    python -m benchmarks notebooks compiler

It needs nbclient and ipykernel. A notebook is written once all of its cells have run.
Exit status: 0 ok, 1 a cell failed, 2 usage, 130 interrupted.
"""
import argparse
import importlib
from importlib.util import find_spec

from benchmarks.notebooks import every
from common.command_line import Parser, early_ends, mistakes, tell
from common.outcome import EXIT

NAME = "notebooks"


def parser() -> Parser:
    """The command line."""
    made = Parser(NAME, prog=f"python -m benchmarks {NAME}", description=__doc__,
                  formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", metavar="NOTEBOOK", help="which (default: all of them)")
    return made


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    chosen = parser().parse_args(argv)
    by_name = {path.stem: path for path in every()}
    with mistakes(NAME):
        for name in chosen.names:
            if name not in by_name:
                raise ValueError(f"{name}: there is no such notebook; give one of {', '.join(by_name)}")
        missing = [name for name in ("nbclient", "ipykernel") if find_spec(name) is None]
        if missing:
            raise ValueError(f"it needs {' and '.join(missing)}: pip install nbclient ipykernel")
    running = importlib.import_module("benchmarks.notebooks.running")
    with early_ends(NAME):
        for name in chosen.names or by_name:
            tell(f"running {name}")
            running.record(by_name[name])
    return EXIT["ok"]
