"""Ranks as processes: who starts them, what a rank knows of itself, and the line that reports one that fails."""
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.studies.distributed import watch
from benchmarks.studies.distributed.watch import Watch
from common import signals
from common.block.steps import ROOT
from common.outcome import EXIT, in_a_line, is_out_of_memory
from common.runtime import compiler

FROM_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")     # what torchrun sets
OURS = "DISTRIBUTED_HAS_LAUNCHER"      # set for ranks that `start` has started
PROGRAM = ("-m", "benchmarks", "distributed")
SAID = ".said"                         # behind the name of a rank's error file: the line that it ends with
NO_FILE = "<N/A>"                      # of a failure's error file: the process has left none
SECONDARY = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "remote process")
PATIENCE = 3                           # seconds that a rank waits to be ended where another one seems to have failed


class Hung(Exception):
    """A rank holds up the others; which one, and where."""


@dataclass(frozen=True)
class Place:
    """Which of the ranks this process is."""
    rank: int
    local: int                             # among those of this machine
    ranks: int


def place() -> Place | None:
    """Of this process; None where nobody has started it as one of several."""
    if any(name not in os.environ for name in FROM_LAUNCHER):
        return None
    return Place(*(int(os.environ[name]) for name in FROM_LAUNCHER[:3]))


def check_port(own: Place) -> None:
    """Raise ValueError where the ranks are to meet at a port that somebody else has. torchrun brings its own."""
    if own.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    port = os.environ["MASTER_PORT"]
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(f"MASTER_PORT {port}: {error}; give a free port") from None


@contextlib.contextmanager
def process_group(device: torch.device, timeout_s: int) -> Iterator[Watch]:
    """All ranks in one group while it lasts: NCCL's on GPUs, Gloo's on CPUs."""
    backend, of_device = "gloo", None
    if device.type == "cuda":
        backend, of_device = "nccl", torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s + watch.GRACE), device_id=of_device)
    with Watch(dist.get_rank(), dist.get_world_size(), timeout_s, _hung).watching() as watched:
        yield watched
    dist.destroy_process_group()


@contextlib.contextmanager
def failing_in_a_line() -> Iterator[None]:
    """What a rank fails by goes where the launcher finds it. Then the process ends: the others wait for it in vain."""
    hush()
    compiler.use_private_caches()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_quietly)
    try:
        yield
    except Exception as error:
        if any(words in str(error) for words in SECONDARY):        # it lost another rank, which is the cause
            time.sleep(PATIENCE)
        end(error)


def end(error: Exception) -> NoReturn:
    """Of this rank, at once: to leave the group in order would wait for the others."""
    get_error_handler().record_exception(error)
    said = str(error) if isinstance(error, Hung) else f"rank {os.environ['RANK']} failed: {in_a_line(error)}"
    if OURS in os.environ:                                 # the launcher says it
        with contextlib.suppress(OSError):                 # a full disk: then it says the exception alone
            Path(os.environ["TORCHELASTIC_ERROR_FILE"] + SAID).write_text(said)
    else:
        print(f"distributed: {said}", file=sys.stderr, flush=True)
    compiler.remove_private_caches()
    os._exit(EXIT["oom" if is_out_of_memory(error) else "failed"])


def _hung(reason: str) -> None:
    end(Hung(reason))


def hush() -> None:
    """Of what torch.distributed warns of, what no reader can act on."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)   # gathers, to compare


def _end_quietly(number: int, _: object) -> None:
    """The launcher ends the ranks that are left. It says why, for all of them."""
    compiler.remove_private_caches()
    os._exit(128 + number)


def start(ranks: int, words: Sequence[str]) -> int:
    """Run `python -m benchmarks distributed` with these words on so many ranks of this machine; the exit status.

    It is that of the rank that failed first, which is reported in a line.
    """
    with tempfile.TemporaryDirectory(prefix="distributed-") as folder:
        quiet = {rank: Std.ALL for rank in range(1, ranks)}        # rank 0 speaks for all
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id="distributed", rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=quiet))
        os.environ[OURS] = "1"
        watch.record_collectives()
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        for name in logging.root.manager.loggerDict:               # each has a level of its own
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)         # what they say is said below
        try:
            elastic_launch(config, sys.executable)(*PROGRAM, *words)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise signals.Terminated(error.sigval) from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if rank or failure.exitcode < 0 or failure.error_file != NO_FILE:      # else rank 0 has shown why
                print(f"distributed: {in_words(rank, failure)}", file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return EXIT["ok"]


def in_words(rank: int, failure: ProcessFailure) -> str:
    """How a rank ended."""
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}"
    if failure.error_file == NO_FILE:
        return f"rank {rank} ended with status {failure.exitcode}"
    if (said := Path(failure.error_file + SAID)).exists():
        return said.read_text()
    raised: Any = failure.message
    message = (raised["message"] if isinstance(raised, dict) else raised).strip().splitlines()[0]
    return f"rank {rank} failed: {message}"
