"""Where the wall time of a process goes."""
import time

import pytest

from benchmarks.measure.progress import Progress
from common import exclusive

pytestmark = pytest.mark.unit


@pytest.fixture
def at(monkeypatch):
    """at(0.0, 0.5, ...): what a new Progress, and then each of its phases, reads from the clock."""
    def read_at(*seconds) -> Progress:
        readings = iter(seconds)
        monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
        monkeypatch.setattr(exclusive, "process_seconds", lambda: 0.5)             # imports
        return Progress()
    return read_at


def test_the_time_outside_of_measuring_is_known(at):
    """What the run is not there for: a phase counts under its first word."""
    progress = at(0.0, 0.5, 3.5, 9.5, 11.5)
    for phase in ("building: 0", "sampling forward", "peaks of this machine"):
        progress.say(phase)
    assert progress.finish() == {"starting": 1.0, "building": 3.0, "sampling": 6.0, "peaks": 2.0}
    assert progress.overhead() == 3.0
    assert progress.in_words() == "12 s: sampling 6, building 3;\noverhead 25 %: peaks 2, starting 1"


def test_a_phase_that_comes_again_goes_on(at):
    progress = at(0.0, 1.0, 2.0, 4.0, 7.0)
    for phase in ("sampling forward", "reading clocks", "sampling, forward"):
        progress.say(phase)
    assert progress.finish() == {"starting": 1.5, "sampling": 4.0, "reading": 2.0}


def test_a_run_with_nothing_left_to_do_says_so(at):
    """A sweep that goes on where it had ended, say."""
    progress = at(0.0, 0.0)
    progress.seconds = {"starting": 0.3}
    progress.finish()
    assert progress.in_words() == "0 s: nothing was left to measure;\noverhead 100 %: less than a second"


def test_nothing_is_shown_where_stderr_is_no_terminal(capsys):
    progress = Progress()
    progress.say("building: 0_baseline")
    progress.show("forward: round 1 of 6")
    progress.clear()
    progress.finish()
    assert capsys.readouterr() == ("", "")
