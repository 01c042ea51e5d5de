"""How a signal ends a command: in one line, from its first moments on."""
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from common import signals, steps

unit, integration = pytest.mark.unit, pytest.mark.integration
SAID = {signal.SIGINT: "\n{}: interrupted\n", signal.SIGTERM: "{}: terminated\n", signal.SIGHUP: "{}: hung up\n"}
by_signal = pytest.mark.parametrize("number", SAID, ids=lambda number: number.name)


@pytest.fixture
def usual_signals():
    """Those of a process that nobody has told anything; afterwards they are as before."""
    before = {number: signal.getsignal(number) for number in SAID}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start(*words, torch: str, folder) -> subprocess.Popen:
    """A process in which torch is a module of this text; signals as a terminal would have them."""
    (folder / "torch.py").write_text(torch)

    def as_usual() -> None:
        for number in SAID:
            signal.signal(number, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=steps.ROOT, text=True, preexec_fn=as_usual,
                            env=os.environ | {"PYTHONPATH": str(folder)}, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


@integration
@by_signal
@pytest.mark.parametrize("words, name", [
    *[([step.path.name], step.path.name) for step in steps.ALL], (["-m", "benchmarks"], "benchmarks"),
    (["-m", "benchmarks", "ladder", "--quick"], "ladder"),
    (["-m", "benchmarks", "compare"], "compare")], ids=lambda value: value if isinstance(value, str) else "")
def test_a_signal_while_torch_is_imported_is_one_line(words, name, number, tmp_path):
    """In place of torch there is a module that says that it is being imported, and is never done.

    It sleeps in short pieces: a signal that comes right before a sleep is seen behind it.
    """
    module = "import time\nprint('torch', flush=True)\nwhile True:\n    time.sleep(0.1)\n"
    process = start(*words, torch=module, folder=tmp_path)
    assert process.stdout.readline() == "torch\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (128 + number, "", SAID[number].format(name))


@integration
@by_signal
def test_who_ignores_a_signal_goes_on_ignoring_it(number, tmp_path):
    """A process in the background of a shell without job control; one under nohup."""
    (tmp_path / "torch.py").write_text(f"import os, sys\nos.kill(os.getpid(), {int(number)})\nsys.exit(7)\n")
    process = subprocess.run([sys.executable, "0_baseline.py"], cwd=steps.ROOT, capture_output=True, text=True,
                             preexec_fn=lambda: signal.signal(number, signal.SIG_IGN), timeout=120,
                             env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (process.returncode, process.stdout, process.stderr) == (7, "", "")


@unit
def test_in_another_program_nothing_is_changed(usual_signals):
    """As pytest is one."""
    assert signals.command() is None
    signals._watch()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not signals.is_early()


@unit
def test_from_early_to_in_order(usual_signals, monkeypatch):
    monkeypatch.setattr(signals, "command", lambda: "a_script.py")
    signals._watch()
    assert signals.is_early()
    signals.end_in_order()
    assert not signals.is_early() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(signals.Terminated) as end:
            signal.raise_signal(number)
        assert end.value.code == 128 + number


@unit
def test_a_signal_that_somebody_handles_or_ignores_stays_so(usual_signals, monkeypatch):
    def handler(*_):
        """A program's own."""
    monkeypatch.setattr(signals, "command", lambda: "a_script.py")
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)               # under nohup
    signals._watch()
    signals.end_in_order()
    assert signal.getsignal(signal.SIGTERM) is handler and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@unit
@by_signal
def test_a_signal_that_comes_in_a_finalizer_is_not_lost(number, usual_signals, monkeypatch):
    """Python drops what is raised there. Behind a backward autograd's callbacks are deleted before any code of ours."""
    passed_on = []
    monkeypatch.setattr(sys, "unraisablehook", passed_on.append)
    monkeypatch.setattr(signals, "command", lambda: "a_script.py")
    signals._watch()
    signals.end_in_order()
    signals.end_in_order()

    class Finalized:
        def __init__(self, last):
            self.last = last

        def __del__(self):
            self.last()
    Finalized(lambda: 1 / 0)
    assert [type(dropped.exc_value) for dropped in passed_on] == [ZeroDivisionError]
    with pytest.raises((KeyboardInterrupt, signals.Terminated)):
        Finalized(lambda: signal.raise_signal(number))
        time.sleep(60)
    assert len(passed_on) == 1


@unit
@by_signal
def test_a_signal_that_comes_again_too_early_is_not_lost(number, usual_signals, monkeypatch):
    """As on a busy machine: the thread that sends it runs before the hook is over."""
    class Busy(threading.Timer):
        def start(self):
            super().start()
            time.sleep(0.05)
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    monkeypatch.setattr(signals, "command", lambda: "a_script.py")
    monkeypatch.setattr(signals.threading, "Timer", Busy)
    signals._watch()
    signals.end_in_order()

    class Finalized:
        def __del__(self):
            signal.raise_signal(number)
    with pytest.raises((KeyboardInterrupt, signals.Terminated)):
        Finalized()
        time.sleep(5)
