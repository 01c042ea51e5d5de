"""Techniques together, and what was measured of several such combinations in the same rounds."""
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import records
from benchmarks.assistant.technique import Technique
from common.report.result import Result, Row
from common.runtime import rounds
from common.runtime.peaks import BURST

Interval = tuple[float, float, float]              # a ratio, and the ends of its 95 % interval


@dataclass(frozen=True)
class Combination:
    """Some techniques at once; none: the model as it is."""
    techniques: tuple[Technique, ...] = ()
    called: str = ""                               # the name of a case that is made in another way
    launched: str = ""                             # that case's row, where it is another than "eager"

    @property
    def changing(self) -> tuple[Technique, ...]:
        """Those that change what runs, not only how it is launched."""
        return tuple(each for each in self.techniques if each.launch == "eager")

    @property
    def launch(self) -> str:
        """Which of a case's rows it is."""
        return self.launched or ("graph" if len(self.changing) < len(self.techniques) else "eager")

    @property
    def name(self) -> str:
        """That of its case."""
        return self.called or Combination(self.changing).words or records.AS_IT_IS

    @property
    def words(self) -> str:
        """Its techniques; "" where there are none."""
        return " + ".join(each.name for each in self.techniques)

    def without(self, technique: Technique) -> "Combination":
        """All the others."""
        return Combination(tuple(each for each in self.techniques if each is not technique))


AS_IT_IS, ON_THE_FIRST = Combination(), "on input 1"


def cases(combinations: Sequence[Combination]) -> list[Combination]:
    """One for each case that these need."""
    by_name: dict[str, Combination] = {}
    for each in combinations:
        by_name.setdefault(each.name, Combination(each.changing))
    return list(by_name.values())


@dataclass
class Measured:
    """Combinations that were timed in the same rounds."""
    results: dict[str, Result] = field(default_factory=dict)           # by name of the case

    def row(self, of: Combination, mode: str) -> Row | None:
        """What was measured of it; None where it was not, or did not end well."""
        result = self.results.get(of.name)
        return result.rows.get((mode, of.launch)) if result and result.status == "ok" else None

    def ms(self, of: Combination, mode: str) -> float | None:
        """Its median."""
        row = self.row(of, mode)
        return row.median if row else None

    def fastest(self, of: Sequence[Combination], mode: str) -> Combination | None:
        """The one with the lowest median; None where none was timed."""
        timed = {each: ms for each in of if (ms := self.ms(each, mode))}
        return min(timed, key=lambda each: timed[each], default=None)

    def why_not(self, of: Combination, mode: str) -> str:
        """Why it could not be timed, in words; "" where it was, and where the run ended before."""
        result = self.results.get(of.name)
        if result is None:
            return ""
        if result.status != "ok":
            return f"{result.status}: {result.reason}"
        row = result.rows.get((mode, of.launch))
        return row.reason if row and row.timing is None else ""

    def gain(self, of: Combination, over: Combination, mode: str) -> Interval | None:
        """How many times as fast it is as another one, sample by sample of the same round."""
        mine, others = self.row(of, mode), self.row(over, mode)
        if not (mine and others and mine.timing and others.timing):
            return None
        return rounds.paired_ratio(others.timing.samples, mine.timing.samples)

    def why_none(self, of: Combination, over: Combination, mode: str) -> str:
        """Why there is no such gain, in words; "" where the run ended before, and where there is one."""
        return self.why_not(of, mode) or self.why_not(over, mode)

    def percent_of_limit(self, of: Combination, mode: str) -> float | None:
        """How much of this machine's limit it reaches."""
        row = self.row(of, mode)
        return row.percent_of(BURST) if row else None


def gain_on_the_mix(on_each: Sequence[Measured], of: Combination, over: Combination, mode: str) -> Interval | None:
    """How many times as fast a combination is as another one on a call with each of several inputs, one after the
    other; None where one of them was not timed on some.
    """
    mine, others = ([measured.row(each, mode) for measured in on_each] for each in (of, over))
    timed = [[row.timing.samples for row in rows if row and row.timing] for rows in (mine, others)]
    if not on_each or any(len(samples) < len(on_each) for samples in timed):
        return None
    after, before = ([sum(calls) for calls in zip(*samples, strict=False)] for samples in timed)
    return rounds.paired_ratio(before, after)
