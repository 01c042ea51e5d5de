"""How a signal ends a command of this project: in one line, from its first moments on.

Importing this module is enough, and `common` does it before all else: importing torch takes seconds. Until
`end_in_order` is called there is nothing to keep, and the process ends at once.
"""
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AGAIN_SECONDS = 1e-3                   # until a dropped signal comes once more: what dropped it is over by then
WORDS = {signal.SIGINT: "\n{name}: interrupted", signal.SIGTERM: "{name}: terminated", signal.SIGHUP: "{name}: hung up"}


class Terminated(SystemExit):
    """Raised where SIGTERM or SIGHUP came; its code is the exit status."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def command() -> str | None:
    """What runs, where it is this project's: a script in its folder, or `python -m benchmarks NAME`; else None."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program is None:
        return None
    path = Path(program).resolve()
    if path == ROOT / "benchmarks" / "__main__.py":
        return sys.argv[1] if len(sys.argv) > 1 else "benchmarks"
    return path.name if path.parent == ROOT else None


def in_words(number: int, name: str) -> str:
    """The line that says which signal ended it."""
    return WORDS[signal.Signals(number)].format(name=name)


def _end_at_once(number: int, _: object) -> None:
    with contextlib.suppress(OSError):                     # the terminal may be gone
        print(in_words(number, command() or ""), file=sys.stderr, flush=True)
    os._exit(128 + number)


def _raise(number: int, _: object) -> None:
    raise Terminated(number)


def is_early() -> bool:
    """Whether a signal still ends the process at once."""
    return signal.getsignal(signal.SIGINT) is _end_at_once or signal.getsignal(signal.SIGTERM) is _end_at_once


def end_in_order() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, and SIGTERM and SIGHUP Terminated: what removes files runs.

    `timeout`, a scheduler and a closed terminal send these. A signal that somebody handles or ignores stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, _end_at_once):
            signal.signal(number, _raise)
    if not isinstance(sys.unraisablehook, _Again):
        sys.unraisablehook = _Again(sys.unraisablehook)


class _Again:
    """Sends a signal once more whose exception Python drops, as it does in a finalizer.

    Behind a backward on a GPU a finalizer can be the first Python code to run, and gets the Ctrl-C that came meanwhile.
    """

    def __init__(self, otherwise: Callable[[Any], object]):
        self.otherwise = otherwise

    def __call__(self, dropped: Any) -> None:
        number, seconds = _number_of(dropped.exc_value), AGAIN_SECONDS
        if number is None:
            self.otherwise(dropped)
            return
        while True:
            try:                                           # by another thread: in here it would be dropped again
                threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
                return
            except (KeyboardInterrupt, Terminated):        # so it was: this machine is busy
                seconds *= 10


def _number_of(error: BaseException | None) -> int | None:
    """The signal that raised it; None where none did."""
    if isinstance(error, Terminated):
        return error.number
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else None


def _watch() -> None:
    """End at once by a signal that nobody handles or ignores."""
    if command() is None or threading.current_thread() is not threading.main_thread():
        return
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, _end_at_once)


_watch()
