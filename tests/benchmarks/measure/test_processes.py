"""A command in processes of its own: their records, those that die, and what is left when all are told to end."""
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.measure import processes
from benchmarks.records.read import info, read
from common import signals, steps
from common.report.record_file import RecordFile
from tests.helpers.made_records import both, made

unit, integration = pytest.mark.unit, pytest.mark.integration
TIMED = both([1.0] * 6, [1.0] * 6)


@pytest.fixture
def of_each(monkeypatch, tmp_path):
    """of_each(first, second, ...): what each process does in place of running, called with its words and its file."""
    monkeypatch.setattr(signals, "end_in_order", lambda: None)

    def replace(*of_processes):
        remaining = iter(of_processes)

        def run_to_its_end(command):
            assert command[:3] == [sys.executable, "-m", "benchmarks"] and command[-2] == "--json"
            return next(remaining)(command[3:-2], RecordFile(command[-1]))
        monkeypatch.setattr(processes, "run_to_its_end", run_to_its_end)
    return replace


def ended(status: int, *runs: str):
    """A process that writes the records of those runs and ends so."""
    def run(words, file):
        for name in runs:
            file.write(made("0_baseline", TIMED, run=name))
        return status
    return run


def nothing_died(place, records, status):
    pytest.fail("no process died")


@unit
def test_the_records_of_all_processes_are_in_one_file(of_each, tmp_path):
    seen = []

    def second(words, file):
        seen.append(words)
        return ended(0, "b")(words, file)
    of_each(ended(0, "a"), second)
    path = tmp_path / "all.jsonl"
    lines = processes.in_turn([["ladder", "--steps", "0"], ["ladder", "--steps", "1"]], RecordFile(str(path)), "ladder",
                              nothing_died)
    assert seen == [["ladder", "--steps", "1"]]
    assert lines == read(path) and list(dict.fromkeys(info(line)["run"] for line in lines)) == ["a", "b"]


@unit
@pytest.mark.parametrize("status", [-9, 1, 3], ids=["killed", "a traceback", "out of memory"])
@pytest.mark.parametrize("finished", [[], ["b"]], ids=["no records", "some records"])
def test_of_a_process_that_ends_otherwise_the_rest_is_recorded(of_each, tmp_path, status, finished):
    """By what `died` gives for it, behind what it finished; the others run all the same."""
    of_each(ended(0, "a"), ended(status, *finished), ended(0, "c"))
    asked = []

    def died(place, records, its_status):
        asked.append((place, its_status, {info(line)["run"] for line in records}))
        return made("1_cublas", {}, status="failed", reason="it died", run="died")
    path = tmp_path / "all.jsonl"
    lines = processes.in_turn([["ladder"]] * 3, RecordFile(str(path)), "ladder", died)
    assert asked == [(1, status, set(finished))]
    assert list(dict.fromkeys(info(line)["run"] for line in lines)) == ["a", *finished, "died", "c"]
    assert lines == read(path)


@unit
def test_who_is_interrupted_keeps_what_the_last_process_finished(of_each, tmp_path, monkeypatch):
    def interrupted(words, file):
        ended(0, "b")(words, file)
        raise KeyboardInterrupt
    of_each(ended(0, "a"), interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "all.jsonl"
    with pytest.raises(KeyboardInterrupt):
        processes.in_turn([["ladder"]] * 3, RecordFile(str(path)), "ladder", nothing_died)
    assert list(dict.fromkeys(info(line)["run"] for line in read(path))) == ["a", "b"]
    assert list(tmp_path.iterdir()) == [path]


@unit
def test_who_runs_processes_ends_as_an_exception_does_when_reported(of_each, monkeypatch):
    """Without it SIGTERM would end this one at once, and leave the other measuring."""
    told = []
    monkeypatch.setattr(signals, "end_in_order", lambda: told.append(True))
    of_each()
    assert processes.in_turn([], RecordFile(None), "ladder", nothing_died) == [] and told == [True]


# ----------------------------------------------------------------------------------------------------- real processes

TELLS_ITS_PARENT = """
import os, shutil, signal, sys, time
folder, waiting = sys.argv[1:]
def clean_up(*_):
    os.rmdir(folder)
    sys.exit(7)
signal.signal(signal.SIGTERM, {handler})
os.mkdir(folder)
while not os.path.exists(waiting):
    time.sleep(0.01)
print(os.getpid(), file=sys.stderr, flush=True)
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(600)
"""


@pytest.fixture
def told_while_it_waits(monkeypatch, tmp_path):
    """told_while_it_waits(handler) -> the command of a process that makes `folder`, and tells this one to end.

    By SIGUSR1, which ends this process's work by SystemExit, as SIGTERM ends a command's; and not before this process
    waits for that one.
    """
    class Popen(subprocess.Popen):
        def wait(self, *arguments):
            (tmp_path / "waiting").touch()
            return super().wait(*arguments)

    def end(*_):
        raise SystemExit(143)
    monkeypatch.setattr(subprocess, "Popen", Popen)
    before = signal.signal(signal.SIGUSR1, end)
    yield lambda handler: [sys.executable, "-c", TELLS_ITS_PARENT.format(handler=handler), str(tmp_path / "folder"),
                           str(tmp_path / "waiting")]
    signal.signal(signal.SIGUSR1, before)


@integration
def test_a_process_that_runs_to_its_end_has_its_status(capfd):
    assert processes.run_to_its_end([sys.executable, "-c", "print('out'); raise SystemExit(4)"]) == 4
    assert processes.run_to_its_end([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == -9
    assert capfd.readouterr() == ("", "")


@integration
def test_who_is_told_to_end_gives_its_process_the_time_to_clean_up(told_while_it_waits, tmp_path):
    """Killed at once, that one would leave its files."""
    with pytest.raises(SystemExit) as end:
        processes.run_to_its_end(told_while_it_waits("clean_up"))
    assert end.value.code == 143 and left_in(tmp_path, "*") == [tmp_path / "waiting"]


@integration
def test_a_process_that_does_not_end_is_killed_in_the_end(told_while_it_waits, capfd, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    with pytest.raises(SystemExit):
        processes.run_to_its_end(told_while_it_waits("signal.SIG_IGN"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(capfd.readouterr().err), 0)


@integration
def test_a_ladder_whose_group_is_told_to_end_leaves_no_files(tmp_path):
    """As `timeout` or a scheduler tells it: the process, and the one that it runs, which gets it from both."""
    words = ["ladder", "--preset", "tiny", "--device", "cpu", "--steps", "0", "--rounds", "6", "--processes", "999"]
    ladder = subprocess.Popen([sys.executable, "-m", "benchmarks", *words], cwd=steps.ROOT, start_new_session=True,
                              env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("torchinductor_*/precompiled_headers")):        # made behind the private caches
        assert ladder.poll() is None and time.monotonic() < deadline, ladder.communicate()
        time.sleep(0.01)
    assert left_in(tmp_path, "inductor-*") and left_in(tmp_path, "ladder-*")
    os.killpg(ladder.pid, signal.SIGTERM)
    out, _ = ladder.communicate(timeout=120)                     # told twice, Python may speak of an ignored exception
    assert (ladder.returncode, out) == (143, "")
    assert not left_in(tmp_path, "inductor-*") and not left_in(tmp_path, "ladder-*")


def left_in(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))
