"""What the commands of all studies share: flags, mistakes in one line, early ends, and tables that fit the terminal."""
import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from tabulate import tabulate

from common import device, report, run
from common.output import Output, WriteError
from common.run import EXIT

from . import records


def parser(name: str, doc: str) -> argparse.ArgumentParser:
    """The command line of study `name`, whose docstring is `doc`; `parse` reads it."""
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    run.shape_arguments(found)
    found.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run (default: auto)")
    found.add_argument("--rounds", type=int, metavar="N",
                       help="interleaved samples of each case (default: 20 on a GPU, 12 on a CPU)")
    found.add_argument("--quick", action="store_true", help="6 rounds, in sweeps fewer and smaller sizes too: "
                       "a look, not a measurement")
    found.add_argument("--seed", type=int, default=0, help="of parameters, inputs and order (default: 0)")
    found.add_argument("--json", metavar="FILE", help="append one JSON line per metric")
    found.add_argument("--chart", metavar="STEM", help="draw STEM-*.png and STEM-*.svg")
    return found


def parse(found: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options, checked; with `device`, `config`, `launches`, `rounds` and `output` ready for use.

    A mistake ends the process with one line and status 2.
    """
    run.hush()
    found.error = lambda message: usage(found, message)
    options = found.parse_args(argv)
    try:
        options.device = run.device_of(options.device)
        on_gpu = options.device.type == "cuda"
        options.config = run.config_of(options).replace(amp_dtype=device.amp_default(options.device)[0])
        if options.config.amp_dtype is not None:
            options.config.check_width()
        if options.rounds is None:
            options.rounds = 6 if options.quick else 20 if on_gpu else 12
        if options.rounds < 6:
            raise ValueError(f"--rounds {options.rounds}: give at least 6, fewer bound no median")
        if abs(options.seed) >= 10**18:
            raise ValueError(f"--seed {options.seed}: give a number of at most 18 digits")
        if options.chart:
            if options.chart.endswith((".png", ".svg")):
                raise ValueError(f"--chart {options.chart}: give what the charts' names begin with, no .png or .svg")
            _try_to_write_beside(options.chart)
    except ValueError as error:
        usage(found, str(error))
    options.launches = report.LAUNCHES if on_gpu else report.LAUNCHES[:1]
    try:
        options.output = Output(options.json)
    except OSError as error:
        usage(found, f"--json {options.json}: {error.strerror}; give a file that can be written")
    return options


def _try_to_write_beside(stem: str) -> None:
    """Raise ValueError where no chart can be written; to ask for the permission is not enough (a full disk, /proc)."""
    try:
        with tempfile.TemporaryFile(dir=Path(f"{stem}-name").resolve().parent) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ValueError(f"--chart {stem}: {error.strerror}; give a folder that can be written") from None


def count(text_: str) -> int:
    """"3" -> 3. Raises argparse.ArgumentTypeError."""
    if not text_.isdecimal() or not 1 <= int(text_) < 1000:
        raise argparse.ArgumentTypeError(f"{text_!r}: give a whole number from 1 to 999")
    return int(text_)


def numbers(text_: str) -> tuple[int, ...]:
    """"1,2,4" -> (1, 2, 4). Raises argparse.ArgumentTypeError."""
    try:
        found = tuple(int(word) for word in text_.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text_!r}: give whole numbers such as 1,2,4")
    return found


def usage(found: argparse.ArgumentParser, message: str):
    """End the process with one line on stderr and status 2."""
    print(f"{found.prog.split('.')[-1]}: error: {message}", file=sys.stderr)
    sys.exit(EXIT["usage"])


def exit_status(statuses: Iterable[str]) -> int:
    """Of a study: failed where a case of it failed or did not fit, skipped where this machine could time none."""
    found = set(statuses)
    return EXIT["failed" if found & {"failed", "oom"} else "skipped" if found == {"skipped"} else "ok"]


@contextlib.contextmanager
def shown_to_a_person(name: str, output: Output | None = None):
    """What ends a study early is one line and an exit status, and the finished records stay."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"; {output.count} finished records kept" if output and output.path else ""
        print(f"\n{name}: interrupted{kept}", file=sys.stderr)
        sys.exit(EXIT["interrupted"])
    except WriteError as error:
        print(f"{name}: error: --json {output.path}: {error}; {output.count} records were written, give a file with "
              "room for more", file=sys.stderr)
        sys.exit(EXIT["failed"])
    except (torch.OutOfMemoryError, MemoryError) as error:
        print(f"{name}: out of memory: {(str(error) or 'no message').splitlines()[0]}; give a smaller shape",
              file=sys.stderr)
        sys.exit(EXIT["oom"])
    except (OSError, ValueError) as error:         # a full disk, under the compiler's caches too; a bad recorded file
        if not isinstance(error, OSError | records.BadRecords):
            raise
        print(f"{name}: error: {error}", file=sys.stderr)
        run.say_no_more()
        sys.exit(EXIT["failed"])


def tell(text_: str) -> None:
    """Print it. Who has seen enough of it (`| head`) ends neither the study nor its charts."""
    try:
        print(text_, flush=True)
    except BrokenPipeError:
        run.say_no_more()


def no_chart(name: str, why: str) -> None:
    """Say that a chart which was asked for can't be drawn."""
    print(f"{name}: no chart: {why}", file=sys.stderr)


def figures(value: float, sign: str = "") -> str:
    """Three figures, without an exponent: 0.123, 1.23, 12.3, 123, 1,234; with sign "+" that of any number is shown."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:{sign},.{digits}f}"


def table(rows: list[list], headers: list[str], width: int | None = None, keys: int = 1) -> str:
    """A table in plain text. Where it is wider than the terminal it is split; its first `keys` columns begin each part.

    `width` is in characters; None asks the terminal (no limit where the output is no terminal).
    """
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    parts, columns = [], list(range(keys, len(headers)))
    while columns:
        count = len(columns)
        while True:
            picked = [*range(keys), *columns[:count]]
            text = tabulate([[row[c] for c in picked] for row in rows], [headers[c] for c in picked],
                            disable_numparse=True, colalign=("left",) * keys + ("right",) * count)
            if count == 1 or max(map(len, text.splitlines())) <= width:
                break
            count -= 1
        parts.append(text)
        columns = columns[count:]
    return "\n\n".join(parts)
