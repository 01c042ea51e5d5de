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
from pathlib import Path


class WriteError(Exception):
    """A record could not be written; the message says why."""


_RECORD = b'{"benchmark"'              # what every line of a file of records begins with


class Output:
    """A JSON-lines file, appended to. Raises OSError at once where it can't be opened, or holds something else.

    Each record is one write of one whole line to a file opened for appending, while no other run writes to it, so that
    runs side by side, and a run that is interrupted, leave only whole lines.
    """

    def __init__(self, path: str | None):
        self.path, self.count, self._file = path, 0, None
        self._pauses = (0, 0.01, 0.1, 1)                   # s before each attempt to be alone at the file
        if path is None:
            return
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        target = Path(path).resolve()
        if target.is_file():
            begins = os.pread(self._file, len(_RECORD), 0)
            if not _RECORD.startswith(begins):
                raise OSError(errno.EEXIST, "it is no file of records, and these would be appended to it", path)
            with self._alone() as sure:
                if sure:
                    self._end_the_last_line()
            with contextlib.suppress(PermissionError), tempfile.TemporaryFile(dir=target.parent) as probe:
                probe.write(b"\0" * 2**16)                 # finds a full disk before an hour of timing
                probe.flush()
            if shutil.disk_usage(target.parent).free < 2**20:
                raise OSError(errno.ENOSPC, "No space left on device", path)

    @contextlib.contextmanager
    def _alone(self):
        """While no other run is at the file, which it holds for a moment: yields whether that is sure.

        Where the file can't be locked (a network's, a pipe), or somebody else keeps it locked, it goes without.
        """
        sure = False
        for pause in self._pauses:
            time.sleep(pause)
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sure = True
                break
        self._pauses = self._pauses if sure else (0,)      # who kept it that long is no run like this: waited for once
        try:
            yield sure
        finally:
            if sure:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _end_the_last_line(self) -> None:
        """The next record would be glued to one without an end. What a full disk left of a record is cut off."""
        size = os.fstat(self._file).st_size
        if not size:
            return
        with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as text:
            last = text[text.rfind(b"\n") + 1:]
        if not last:
            return
        try:
            json.loads(last)
            half = False
        except ValueError:
            half = last[:len(_RECORD)] == _RECORD[:len(last)]
        if half:
            os.ftruncate(self._file, size - len(last))
        else:
            os.write(self._file, b"\n")

    def write(self, records: list[dict]) -> None:
        if self._file is None:
            return
        for line in records:
            text = (json.dumps(line, allow_nan=False) + "\n").encode()
            try:
                with self._alone():
                    written = os.write(self._file, text)
            except OSError as error:
                raise WriteError(error.strerror) from None
            if written < len(text):
                raise WriteError("no space left for a whole record")
            self.count += 1
