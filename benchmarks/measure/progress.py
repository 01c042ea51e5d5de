"""Where the wall time of a process goes, shown while it goes on and told at its end."""
import sys
import time

from tqdm import tqdm

from common import exclusive

# What the time of a run is for -> the phases that it goes to: the first words of what `say` is told.
PURPOSES = {
    "timed samples": ("timed",), "warm-up": ("warming", "sampling"), "building": ("building",),
    "compiling": ("compiling",), "checking": ("checking",), "calibrating": ("calibrating",),
    "profiling": ("profiling", "observing", "attributing", "counting"), "energy and clocks": ("metering", "reading"),
}


class Progress:
    """Shows what is going on, on a terminal alone, and counts seconds by phase."""

    def __init__(self) -> None:
        self.seconds = {"starting": exclusive.process_seconds()}
        self._phase, self._since = "starting", time.perf_counter()
        self._bar = tqdm(bar_format="{desc}", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)

    def say(self, what: str) -> None:
        """Show what is going on, and count its time under its first word."""
        now = time.perf_counter()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = what.split()[0].rstrip(",:"), now
        self.show(what)

    def show(self, what: str) -> None:
        """Show it within the phase that goes on."""
        self._bar.set_description_str(what)

    def clear(self) -> None:
        """Make room for what is printed."""
        self._bar.clear()

    def sampled(self, timed_seconds: float) -> None:
        """So much of the phase "sampling" were timed samples; the rest of it warmed up for them."""
        self.say("sampling")                                     # what goes on until now counts
        timed_seconds = min(timed_seconds, self.seconds.get("sampling", 0.0))
        self.seconds["sampling"] = self.seconds.get("sampling", 0.0) - timed_seconds
        self.seconds["timed"] = self.seconds.get("timed", 0.0) + timed_seconds

    def finish(self) -> dict[str, float]:
        """The seconds of each phase, once there are no more."""
        self.say("done")
        self._bar.close()
        return self.seconds

    def by_purpose(self) -> dict[str, float]:
        """What the time was for -> seconds, without what is left over."""
        times = {}
        for purpose, phases in PURPOSES.items():
            times[purpose] = sum(self.seconds.get(phase, 0.0) for phase in phases)
        return times

    def left_over(self) -> float:
        """Seconds that no purpose accounts for."""
        return sum(self.seconds.values()) - sum(self.by_purpose().values())

    def in_words(self) -> str:
        """The wall time and what it was for, and what is left over, in two lines."""
        total = sum(self.seconds.values())
        known = {phase for phases in PURPOSES.values() for phase in phases}
        rest = {phase: seconds for phase, seconds in self.seconds.items() if phase not in known}
        return (f"wall time {total:.0f} s: {_listed(self.by_purpose()) or 'nothing was left to measure'};\n"
                f"left over {100 * self.left_over() / total:.0f} %: {_listed(rest) or 'less than a second'}")


def _listed(seconds: dict[str, float]) -> str:
    """Those of half a second or more, the longest first."""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {each:.0f}" for name, each in ordered if each >= 0.5)
