"""The file of JSON lines that records are appended to, each by one write; what a full disk left of one is cut off."""
import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class WriteError(Exception):
    """A record could not be written; the message says why."""


_BEGINNING = b'{"benchmark"'           # of every line of a file of records


class RecordFile:
    """A JSON-lines file, appended to. Raises OSError at once where it can't be opened, or holds something else.

    Each record is one write of one whole line to a file opened for appending, while no other run writes to it, so that
    runs side by side, and a run that is interrupted, leave only whole lines. Without a path nothing is kept.
    """

    def __init__(self, path: str | None):
        self.path = path
        self.count = 0
        self._file: int | None = None
        self._pauses: tuple[float, ...] = (0, 0.01, 0.1, 1)          # s before each attempt to be alone at the file
        if path is None:
            return
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        target = Path(path).resolve()
        if target.is_file():
            self._refuse_other_files(path)
            with self._alone(self._file) as is_alone:
                if is_alone:
                    _end_the_last_line(self._file)
            self._refuse_a_full_disk(path, target.parent)

    def _refuse_other_files(self, path: str) -> None:
        assert self._file is not None
        beginning = os.pread(self._file, len(_BEGINNING), 0)
        if not _BEGINNING.startswith(beginning):
            raise OSError(errno.EEXIST, "it is no file of records, and these would be appended to it", path)

    def _refuse_a_full_disk(self, path: str, folder: Path) -> None:
        """Better now than after an hour of timing."""
        with contextlib.suppress(PermissionError), tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * 2**16)
            probe.flush()
        if shutil.disk_usage(folder).free < 2**20:
            raise OSError(errno.ENOSPC, "No space left on device", path)

    @contextlib.contextmanager
    def _alone(self, file: int) -> Iterator[bool]:
        """While no other run is at the file, which it holds for a moment: yields whether that is sure.

        Where the file can't be locked (a network's, a pipe), or somebody else keeps it locked, it goes without.
        """
        is_alone = False
        for pause in self._pauses:
            time.sleep(pause)
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True
                break
        if not is_alone:
            self._pauses = (0,)          # no run like this keeps the file so long: it is waited for once, not each time
        try:
            yield is_alone
        finally:
            if is_alone:
                fcntl.flock(file, fcntl.LOCK_UN)

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Append records. Raises WriteError where one could not be written whole."""
        if self._file is None:
            return
        for record in records:
            text = (json.dumps(record, allow_nan=False) + "\n").encode()
            try:
                with self._alone(self._file):
                    written = os.write(self._file, text)
            except OSError as error:
                raise WriteError(error.strerror) from None
            if written < len(text):
                raise WriteError("no space left for a whole record")
            self.count += 1


def _end_the_last_line(file: int) -> None:
    """The next record would be glued to one without an end. What a full disk left of a record is cut off."""
    size = os.fstat(file).st_size
    if not size:
        return
    with mmap.mmap(file, size, access=mmap.ACCESS_READ) as text:
        last = text[text.rfind(b"\n") + 1:]
    if not last:
        return
    if _is_half_a_record(last):
        os.ftruncate(file, size - len(last))
    else:
        os.write(file, b"\n")


def _is_half_a_record(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return line[:len(_BEGINNING)] == _BEGINNING[:len(line)]
    return False
