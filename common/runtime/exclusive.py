"""One run at a time on a device, since two would slow each other; and how long this process has been at work itself."""
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

_waited: list[float] = []                # seconds that `alone` has waited for other runs


@contextlib.contextmanager
def alone(device: torch.device, name: str) -> Iterator[None]:
    """While it lasts, no other run of this user measures on `device`.

    A second one, `diff <(python 1_cublas.py) <(python 2_sdpa.py)` say, tells on stderr for whom `name` waits, and
    waits.
    """
    which = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else "cpu"
    try:
        import fcntl
        path = Path(tempfile.gettempdir()) / f"transformer-block-{os.getuid()}-{which}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except (ImportError, OSError):                 # not this system, or not this folder: then as best it goes
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace") or "another run"
            print(f"{name}: waiting for {holder} on this device to end", file=sys.stderr, flush=True)
            began = time.monotonic()
            fcntl.flock(lock, fcntl.LOCK_EX)
            _waited.append(time.monotonic() - began)
        with contextlib.suppress(OSError):                         # a full disk: then who waits is told less
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{name} (process {os.getpid()})".encode(), 0)
        yield
    finally:
        os.close(lock)


def process_seconds() -> float:
    """Seconds since this process began, imports included, waits in `alone` not; 0 where the system will not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        began = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began - sum(_waited))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
