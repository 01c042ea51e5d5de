"""Where the wall time of a process goes."""
import time

import pytest

from common.measure.progress import PURPOSES, Progress
from common.phases import Phase
from common.runtime import exclusive

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


def test_the_wall_time_is_told_by_what_it_was_for(at):
    """What has no purpose is left over."""
    progress = at(0.0, 0.5, 3.5, 9.5, 11.5)
    progress.say(Phase.BUILDING, "0")
    progress.say(Phase.SAMPLING, "forward")
    progress.say(Phase.CALIBRATING, "peaks of this machine")
    assert progress.finish() == {"starting": 1.0, "building": 3.0, "sampling": 6.0, "calibrating": 2.0}
    assert progress.left_over() == 1.0
    assert progress.in_words() == ("wall time 12 s: warm-up 6, building 3, calibrating 2;\n"
                                   "left over 8 %: starting 1")


def test_timed_samples_are_told_apart_from_the_warm_up_before_them(at):
    """They can't be more than the time in which they were taken."""
    progress = at(0.0, 0.0, 6.0, 6.0, 8.0, 8.0)
    progress.say(Phase.SAMPLING, "forward")
    progress.sampled(4.0)
    progress.say(Phase.SAMPLING, "forward+backward")
    progress.sampled(9.0)
    seconds = progress.finish()
    assert seconds["timed"] == 4.0 + 4.0 and "sampling" not in seconds
    assert progress.by_purpose()["timed samples"] == 8.0 and sum(seconds.values()) == 8.5


def test_what_it_was_for_and_what_is_left_over_are_the_whole(at):
    progress = at(0.0, 0.0)
    of_purposes = [phase for phases in PURPOSES.values() for phase in phases]
    progress.seconds = dict.fromkeys(Phase, 1.0)
    progress.finish()
    assert sum(progress.by_purpose().values()) == len(of_purposes) == len(set(of_purposes))
    assert progress.left_over() == len(Phase) - len(of_purposes)


def test_a_phase_that_comes_again_goes_on(at):
    progress = at(0.0, 1.0, 2.0, 4.0, 7.0)
    for phase in (Phase.SAMPLING, Phase.READING_CLOCKS, Phase.SAMPLING):
        progress.say(phase)
    assert progress.finish() == {"starting": 1.5, "sampling": 4.0, "reading clocks": 2.0}


def test_a_run_with_nothing_left_to_do_says_so(at):
    """A sweep that goes on where it had ended, say."""
    progress = at(0.0, 0.0)
    progress.seconds = dict.fromkeys(Phase, 0.0) | {Phase.STARTING: 0.3}
    progress.finish()
    assert progress.in_words() == "wall time 0 s: nothing was left to measure;\nleft over 100 %: less than a second"
    progress.seconds[Phase.SAMPLING] = 0.4
    assert progress.in_words().startswith("wall time 1 s: less than a second each;\n")


def test_nothing_is_shown_where_stderr_is_no_terminal(capsys):
    progress = Progress()
    progress.say(Phase.BUILDING, "0_baseline")
    progress.show("forward: round 1 of 6")
    progress.clear()
    progress.finish()
    assert capsys.readouterr() == ("", "")
