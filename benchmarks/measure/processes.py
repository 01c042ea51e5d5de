"""The same command in processes of their own, one after another, and the records of all."""
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.records.read import read
from common import signals
from common.block.steps import ROOT
from common.outcome import EXIT
from common.report.record import Record
from common.report.record_file import RecordFile

PATIENCE = 60                # seconds that a process has to end by itself, and to remove its files, when it is told to


def in_turn(commands: Sequence[Sequence[str]], file: RecordFile, name: str,
            died: Callable[[int, list[Record], int], list[Record]]) -> list[Record]:
    """Run `python -m benchmarks ...` for each of `commands`, the words behind it; the records of all, also in `file`.

    `died(place, records, status)` gives the records of what a process that ended with `status` did not finish. Who is
    interrupted keeps what the last process finished.
    """
    lines: list[Record] = []
    signals.end_in_order()
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        for place, words in enumerate(commands):
            path = Path(folder) / f"{place}.jsonl"
            command = [sys.executable, "-m", "benchmarks", *words, "--json", str(path)]
            status = None
            try:
                status = run_to_its_end(command)
            finally:
                records = read(path) if path.exists() and path.stat().st_size else []
                if status not in (None, EXIT["ok"]):       # Python's own status for a traceback is that of "failed"
                    assert status is not None
                    records += died(place, records, status)
                file.write(records)
                lines += records
    return lines


def run_to_its_end(command: Sequence[str]) -> int:
    """The exit status of a process. Where this one is told to end, so is that one, and it gets the time to clean up."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        process.kill()
        process.wait()
        raise
