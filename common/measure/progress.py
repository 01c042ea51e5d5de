"""Where the wall time of a process goes, shown while it goes on and reported at its end."""
import sys
import time

from tqdm import tqdm

from ..phases import Phase
from ..runtime import exclusive

# What the time of a run is for -> the phases that it goes to.
PURPOSES = {
    "timed samples": (Phase.TIMED,), "warm-up": (Phase.WARMING_UP, Phase.SAMPLING), "building": (Phase.BUILDING,),
    "compiling": (Phase.COMPILING,), "checking": (Phase.CHECKING, Phase.JUDGING), "calibrating": (Phase.CALIBRATING,),
    "profiling": (Phase.PROFILING, Phase.OBSERVING, Phase.ATTRIBUTING, Phase.COUNTING),
    "energy and clocks": (Phase.METERING, Phase.READING_CLOCKS),
}


class Progress:
    """Shows what is going on, on a terminal alone, and counts seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Phase, 0.0)
        self.seconds[Phase.STARTING] = exclusive.process_seconds()
        self._phase, self._since = Phase.STARTING, time.perf_counter()
        self._bar = tqdm(bar_format="{desc}", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)

    def say(self, phase: Phase, detail: str = "") -> None:
        """Show what is going on, and count its time under that phase."""
        self._count(phase)
        self.show(phase.said(detail))

    def _count(self, next_phase: Phase) -> None:
        """What goes on until now counts under its phase."""
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = next_phase, now

    def show(self, what: str) -> None:
        """Show it within the phase that goes on."""
        self._bar.set_description_str(what)

    def note(self, line: str) -> None:
        """Leave a line above it."""
        if not self._bar.disable:
            self._bar.write(line, file=sys.stderr)

    def clear(self) -> None:
        """Make room for what is printed."""
        self._bar.clear()

    def sampled(self, timed_seconds: float) -> None:
        """So much of the sampling were timed samples; the rest of it warmed up for them."""
        self._count(Phase.SAMPLING)
        timed_seconds = min(timed_seconds, self.seconds[Phase.SAMPLING])
        self.seconds[Phase.SAMPLING] -= timed_seconds
        self.seconds[Phase.TIMED] += timed_seconds

    def finish(self) -> dict[str, float]:
        """The seconds of each phase that there was, by what a record calls it, once there are no more."""
        self._count(self._phase)
        self._bar.close()
        return {phase.value: seconds for phase, seconds in self.seconds.items() if seconds}

    def by_purpose(self) -> dict[str, float]:
        """What the time was for -> seconds, without what is left over."""
        times = {}
        for purpose, phases in PURPOSES.items():
            times[purpose] = sum(self.seconds[phase] for phase in phases)
        return times

    def left_over(self) -> float:
        """Seconds that no purpose accounts for."""
        return sum(self.seconds.values()) - sum(self.by_purpose().values())

    def in_words(self) -> str:
        """The wall time and what it was for, and what is left over, in two lines."""
        total = sum(self.seconds.values())
        known = {phase for phases in PURPOSES.values() for phase in phases}
        rest = {phase.value: seconds for phase, seconds in self.seconds.items() if phase not in known}
        purposes = self.by_purpose()
        short = "less than a second each" if any(purposes.values()) else "nothing was left to measure"
        return (f"wall time {total:.0f} s: {_listed(purposes) or short};\n"
                f"left over {100 * self.left_over() / total:.0f} %: {_listed(rest) or 'less than a second'}")


def _listed(seconds: dict[str, float]) -> str:
    """Those of half a second or more, the longest first."""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {each:.0f}" for name, each in ordered if each >= 0.5)
