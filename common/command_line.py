"""What every command line of the suite shares: flags of a shape, mistakes in one line, early ends, quiet libraries."""
import argparse
import contextlib
import errno
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch

from . import signals
from .block.config import PRESETS, BlockConfig, default_preset
from .outcome import EXIT, UserError
from .report.record_file import RecordFile, WriteError

SIZES = {"batch_size": "B", "seq_len": "S", "hidden_size": "E", "num_heads": "H", "ffn_hidden_size": "F"}


class Parser(argparse.ArgumentParser):
    """A mistake ends the process with one line on stderr and status 2. `name` begins that line."""

    def __init__(self, name: str, **options):
        super().__init__(**options)
        self.name = name

    def error(self, message: str) -> NoReturn:
        usage(self.name, message)


def usage(name: str, message: str) -> NoReturn:
    """End the process with one line on stderr and status 2."""
    print(f"{name}: error: {message}", file=sys.stderr)
    sys.exit(EXIT["usage"])


@contextlib.contextmanager
def mistakes(name: str) -> Iterator[None]:
    """A ValueError inside is a mistake on the command line of `name`."""
    try:
        yield
    except ValueError as error:
        usage(name, str(error))


def shape_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that give a shape; `config_of` reads them."""
    parser.add_argument("--preset", choices=PRESETS, help="named shape (default: te-tutorial on a GPU, cpu on a CPU)")
    for name, letter in SIZES.items():
        more = "; F becomes 4 E" if letter == "E" else ""
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar=letter,
                            help=f"in place of the preset's{more}")


def config_of(options: argparse.Namespace) -> BlockConfig:
    """The shape that `shape_arguments` and the device ask for. Raises ValueError for sizes that do not go together."""
    changes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    if "hidden_size" in changes:
        changes.setdefault("ffn_hidden_size", None)                       # 4 E of the new width
    return PRESETS[options.preset or default_preset(options.device.type)].replace(**changes)


def device_of(name: str) -> torch.device:
    """The device of --device auto, cuda or cpu. Raises ValueError where there is no such."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU is available to torch; run without it for the CPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that torch's generators do not take."""
    if abs(seed) >= 10**18:
        raise ValueError(f"--seed {seed}: give a number of at most 18 digits")


def open_records(path: str | None) -> RecordFile:
    """The file of --json. Raises ValueError where it can't be written."""
    try:
        return RecordFile(path)
    except OSError as error:
        raise ValueError(f"--json {path}: {error.strerror}; give a file that can be written") from None


def try_timeline(path: str | None, records: str | None) -> None:
    """Raise ValueError where --profile can't write there, or would replace something else, as the file of --json."""
    if path is None or path == os.devnull:
        return
    if records and os.path.realpath(records) == os.path.realpath(path):
        raise ValueError(f"--profile {path}: --json writes there; give a file of its own")
    if Path(path).is_fifo():                                              # whose reader would see its end here
        return
    try:
        with open(path, "a+b") as file:
            if Path(path).is_file() and not _is_timeline(file):
                raise OSError(errno.EEXIST, "it holds something else than a timeline")
    except OSError as error:
        raise ValueError(f"--profile {path}: {error.strerror}; give a file that can be written") from None


def _is_timeline(file) -> bool:
    """Whether a file of bytes is empty, or the profiler's: its JSON, or gzip's."""
    file.seek(0)
    beginning = file.read(200)
    return not beginning or b'"schemaVersion"' in beginning or beginning.startswith(b"\x1f\x8b")


def no_room(file: RecordFile, error: WriteError) -> str:
    """What to say where a record could not be written."""
    return f"--json {file.path}: {error}; {file.count} records were written, give a file with room for more"


@contextlib.contextmanager
def early_ends(name: str, file: RecordFile | None = None) -> Iterator[None]:
    """What ends a command early is one line and an exit status, and the finished records stay."""
    try:
        if signals.is_early():
            signals.end_in_order()
        yield
    except KeyboardInterrupt:
        sys.exit(ended(signal.SIGINT, name, file))
    except signals.Terminated as error:
        sys.exit(ended(error.number, name, file))
    except WriteError as error:
        reason = no_room(file, error) if file else str(error)
        print(f"{name}: error: {reason}", file=sys.stderr)
        sys.exit(EXIT["failed"])
    except (torch.OutOfMemoryError, MemoryError) as error:
        message = str(error) or "no message"
        print(f"{name}: out of memory: {message.splitlines()[0]}; give a smaller shape", file=sys.stderr)
        sys.exit(EXIT["oom"])
    except (OSError, UserError) as error:      # a full disk, under the compiler's caches too; a bad recorded file
        print(f"{name}: error: {error}", file=sys.stderr)
        say_no_more()
        sys.exit(EXIT["failed"])


def ended(number: int, name: str, file: RecordFile | None) -> int:
    """Say on stderr which signal ended it, and what is kept; the exit status."""
    kept = f"; {file.count} finished records kept" if file and file.path else ""
    print(f"{signals.in_words(number, name)}{kept}", file=sys.stderr)
    return 128 + number


def tell(text: str) -> None:
    """Print it. Who has seen enough of it (`| head`) ends nothing else."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        say_no_more()


def say_no_more() -> None:
    """What standard output still holds goes nowhere: at the end of the process Python would try again, and complain."""
    with contextlib.suppress(OSError):             # something in its place that is no file has no end to complain at
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def hush() -> None:
    """Silence what libraries print in every run and no reader can act on, so that stderr holds this run's own news.

    A closed stderr (2>&-) goes nowhere: `print` would take stdout in its place.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")                                        # noqa: SIM115, to the process's end
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)       # a CPU has no GPU
    logging.getLogger("DotProductAttention").setLevel(logging.ERROR)             # other attention packages exist
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)             # torchao uses what torch deprecates
    for message in ("Attempting to run cuBLAS, but there was no current CUDA context",      # and makes one
                    "Relying on pointer-based detection of packed q/k/v layouts",           # 2.9 has no other way
                    "TensorFloat32 tensor cores for float32 matrix multiplication available",       # it is measured
                    "Synchronization debug mode is a prototype",
                    "Warning: Profiler clears events at the end of each cycle",     # each profile is of one
                    r"Using `torch\.compile\(module\)` when there are global hooks",       # while it is read
                    "Dynamo detected a call to a `functools.lru_cache`-wrapped function",   # in a library, mostly
                    r"Error detected in \w+Backward",       # while a compiler traces it: what fails is raised, too
                    "The AccumulateGrad node's stream does not match"):     # of a forward before: captures are proved
        warnings.filterwarnings("ignore", message)
