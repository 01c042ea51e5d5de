"""The command line of a study: flags that all studies share, checked before anything is allocated."""
import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.block.config import LARGEST
from common.block.traits import amp_default
from common.command_line import (
    Parser,
    check_seed,
    config_of,
    device_of,
    hush,
    mistakes,
    open_records,
    shape_arguments,
)
from common.runtime.iteration import LAUNCHES


def parser(name: str, doc: str) -> Parser:
    """The command line of study `name`, whose docstring is `doc`; `parse` reads it."""
    of_study = Parser(name, prog=f"python -m benchmarks {name}", description=doc,
                      formatter_class=argparse.RawDescriptionHelpFormatter)
    shape_arguments(of_study)
    add = of_study.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run (default: auto)")
    add("--rounds", type=int, metavar="N",
        help="interleaved samples of each case (default: 20 on a GPU, 12 on a CPU)")
    add("--quick", action="store_true",
        help="6 rounds, in sweeps fewer and smaller sizes too: a look, not a measurement")
    add("--seed", type=int, default=0, help="of parameters, inputs and order (default: 0)")
    add("--json", metavar="FILE", help="append one JSON line per metric")
    add("--chart", metavar="STEM", help="draw STEM-*.png and STEM-*.svg")
    return of_study


def parse(of_study: Parser, argv: list[str] | None,
          refine: Callable[[argparse.Namespace], None] = lambda options: None) -> argparse.Namespace:
    """The options, checked; with `device`, `config`, `launches`, `rounds`, `file` (the records') and `argv` set.

    `refine` is what a study adds: it changes the options, or raises ValueError. A mistake ends the process with one
    line and status 2.
    """
    hush()
    options = of_study.parse_args(argv)
    options.argv = sys.argv[1:] if argv is None else argv
    with mistakes(of_study.name):
        options.device = device_of(options.device)
        on_gpu = options.device.type == "cuda"
        options.config = config_of(options).replace(amp_dtype=amp_default(options.device)[0])
        if options.config.amp_dtype is not None:
            options.config.check_width()
        if options.rounds is None:
            options.rounds = 6 if options.quick else 20 if on_gpu else 12
        if options.rounds < 6:
            raise ValueError(f"--rounds {options.rounds}: give at least 6, fewer bound no median")
        check_seed(options.seed)
        _check_chart(options.chart)
        options.launches = LAUNCHES if on_gpu else LAUNCHES[:1]
        refine(options)
        options.file = open_records(options.json)
    return options


def _check_chart(stem: str | None) -> None:
    """Raise ValueError where no chart can be written; to ask for the permission is not enough (a full disk, /proc)."""
    if not stem:
        return
    if stem.endswith((".png", ".svg")):
        raise ValueError(f"--chart {stem}: give what the charts' names begin with, no .png or .svg")
    try:
        with tempfile.TemporaryFile(dir=Path(f"{stem}-name").resolve().parent) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ValueError(f"--chart {stem}: {error.strerror}; give a folder that can be written") from None


def count(text: str) -> int:
    """"3" -> 3. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text) < 1000:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 to 999")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """"1,2,4" -> (1, 2, 4). Raises argparse.ArgumentTypeError."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= 1 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers such as 1,2,4")
    return tuple(int(word) for word in words)


def lengths(text: str) -> tuple[int, ...]:
    """The same, each at most what a `BlockConfig` takes."""
    found = numbers(text)
    if max(found) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers up to {LARGEST}")
    return found
