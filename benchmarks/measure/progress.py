"""Where the wall time of a process goes, shown while it goes on and told at its end."""
import sys
import time

from tqdm import tqdm

from common import exclusive

MEASURING = ("building", "compiling", "calibrating", "checking", "warming", "sampling")       # what a run is for


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

    def finish(self) -> dict[str, float]:
        """The seconds of each phase, once there are no more."""
        self.say("done")
        self._bar.close()
        return self.seconds

    def overhead(self) -> float:
        """Seconds of what no run is for."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase not in MEASURING)

    def in_words(self) -> str:
        """What a run is for, and the rest, in two lines."""
        total = sum(self.seconds.values())
        return (f"{total:.0f} s: {self._longest(True) or 'nothing was left to measure'};\n"
                f"overhead {100 * self.overhead() / total:.0f} %: {self._longest(False) or 'less than a second'}")

    def _longest(self, measuring: bool) -> str:
        """The phases of that kind which took half a second or more, the longest first."""
        ordered = sorted(self.seconds.items(), key=lambda item: -item[1])
        return ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in ordered
                         if seconds >= 0.5 and (phase in MEASURING) == measuring)
