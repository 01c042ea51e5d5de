"""What was tried on a model, and what follows from it."""
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.assistant.combination import (
    AS_IT_IS,
    ON_THE_FIRST,
    Combination,
    Interval,
    Measured,
    gain_on_the_mix,
)
from benchmarks.assistant.look import Looked
from benchmarks.assistant.predicting import Prediction
from benchmarks.assistant.side_by_side import WORTH_IT
from benchmarks.assistant.source import Place
from benchmarks.assistant.technique import Advice, Found, Technique, needless_beside, plan_of
from benchmarks.assistant.techniques import compiled
from benchmarks.assistant.written import WrittenOut
from benchmarks.measure.calls import Inputs
from benchmarks.measure.checks import Judgement
from benchmarks.records import BY_HAND
from common.report.record import Record
from common.runtime.compiler import holds_compiled
from common.runtime.iteration import LAUNCHES
from common.text import ratio

VERDICTS = ("take", "different numerics", "by hand", "no gain", "unsafe", "not here", "not reached")
TO_WRITE = VERDICTS[:3]                                # after these there is something to write
SLOWER = 0.98                                          # times as fast, at most: a technique is slower, and no noise


@dataclass(frozen=True)
class Opportunity:
    """What one technique is worth at one place of a model."""
    technique: str
    found: Found
    verdict: str                                       # one of VERDICTS
    why: str = ""                                      # the verdict, where that needs a word
    speedup: float | None = None                       # of the pass that counts, alone, on all inputs together
    interval: tuple[float, float] | None = None        # 95 %, of the ratio of paired samples
    error: float | None = None                         # the worst output's, against the truth
    advice: Advice | None = None                       # the code to write there

    @property
    def is_to_write(self) -> bool:
        """Whether there is code for it, which is worth writing."""
        return bool(self.advice) and self.verdict in TO_WRITE

    @property
    def file(self) -> str | None:
        return self.found.place.file if self.found.place else None

    @property
    def line(self) -> int | None:
        return self.found.place.line if self.found.place else None

    @property
    def module(self) -> str:
        return self.found.module

    @property
    def count(self) -> int:
        return self.found.count

    @property
    def reason(self) -> str:
        return self.found.reason


@dataclass(frozen=True)
class Added:
    """One technique more on the ladder."""
    technique: Technique
    combination: Combination                           # with those before it
    gain: Interval | None                              # over those before it
    left_out: Interval | None = None                   # of all over all but this one


@dataclass
class Trials:
    """All that was found and tried."""
    looked: Looked
    truth: str                                         # what the rungs were held against, in words
    opportunities: list[Opportunity] = field(default_factory=list)     # the best first
    judgements: dict[str, Judgement] = field(default_factory=dict)     # by case
    alone: Measured = field(default_factory=Measured)
    together: Measured = field(default_factory=Measured)
    ladder: list[Added] = field(default_factory=list)
    is_climbed: bool = True                            # the ladder has come to its end: no Ctrl-C, no fault on the way
    clashes: dict[str, str] = field(default_factory=dict)              # technique -> on top of which it fails, and why
    postponed: dict[str, str] = field(default_factory=dict)            # technique -> why a hurry leaves it out
    dropped: list[Added] = field(default_factory=list)                 # what gained nothing on a ladder, or beside it
    proofs: dict[Advice, str] = field(default_factory=dict)            # code that was pasted -> what is wrong with it
    file_known: bool = False                           # what is to be written can be pasted into a copy of it
    pieces: Measured = field(default_factory=Measured)                 # the code for each technique, as it is written
    payback: str = ""                                  # after how many calls what compiling took is won back, in words
    written: WrittenOut | None = None                  # what all that is to be written makes of it
    lines: list[Record] = field(default_factory=list)                  # everything that was measured
    times: str = ""                                    # where the wall time went
    others: dict[str, Inputs] = field(default_factory=dict)            # "on input 2" -> what it is called with there
    on_others: dict[str, Measured] = field(default_factory=dict)       # what was timed there, each technique alone
    judgements_on_others: dict[tuple[str, str], Judgement] = field(default_factory=dict)   # by case, and where
    faults: dict[str, None] = field(default_factory=dict)              # what broke on the way, in words

    @property
    def mode(self) -> str:
        """The pass that counts."""
        return self.looked.mode

    @property
    def found(self) -> dict[str, list[Found]]:
        """What each technique has found, by its name."""
        return {technique.name: found for technique, found in self.looked.found.items()}

    @property
    def failures(self) -> list[str]:
        """What should have ended well, and did not; what the judge refused did."""
        results = [*self.alone.results.items(), *self.together.results.items(), *self.pieces.results.items()]
        broken = {f"{name}: {result.reason}": None for name, result in results
                  if result.status == "failed" and (name not in self.judgements or self.judgements[name].passed)}
        for words, measured in self.on_others.items():
            for name, result in measured.results.items():
                judgement = self.judgements_on_others.get((name, words))
                if result.status == "failed" and (judgement is None or judgement.passed):
                    broken[f"{name}, {words}: {result.reason}"] = None
        return [*self.looked.faults, *self.faults, *broken]

    @property
    def predictions(self) -> dict[str, Prediction]:
        """What each technique should buy alone, by its name: known before it ran."""
        return {technique.name: each for technique, each in self.looked.predicted.items()}

    def freed(self, technique: Technique) -> int | None:
        """Bytes less that an iteration needs at its peak with it alone; None where that was not measured."""
        rows = [self.alone.row(rung, self.mode) for rung in (AS_IT_IS, Combination((technique,)))]
        before, after = (row.peak_bytes if row else None for row in rows)
        return None if before is None or after is None else before - after

    def gain_alone(self, technique: Technique) -> Interval | None:
        """How many times as fast it alone makes the model: a call with each of its inputs."""
        of, over = Combination((technique,)), self.base_of(technique)
        return gain_on_the_mix(list(self.timed_on_each.values()), of, over, self.mode)

    def gain_captured(self, technique: Technique) -> Interval | None:
        """How many times as fast it makes the model where both are launched as a graph: a host that launches slower
        than its GPU runs hides a gain. None where they can't be.
        """
        graph = self._graph()
        if graph is None or technique is graph:
            return None
        over = Combination((*self.base_of(technique).techniques, graph))
        return self.alone.gain(Combination((technique, graph)), over, self.mode)

    def gains_measured(self, technique: Technique) -> list[Interval]:
        """All that it gains: launched one by one, captured, and, where it captures, of each technique alone."""
        gains = [self.gain_alone(technique), self.gain_captured(technique)]
        if technique is self._graph():
            rungs = [Combination((each,)) for each in self.looked.found if each is not technique]
            gains += [self.alone.gain(Combination((*rung.techniques, technique)), rung, self.mode) for rung in rungs]
        return [gain for gain in gains if gain]

    def most_gained(self, technique: Technique) -> float | None:
        """The most of these."""
        return max((gain[0] for gain in self.gains_measured(technique)), default=None)

    def may_gain(self, technique: Technique) -> bool:
        """Whether it gains in one of these ways, or may on top of others: what it was predicted to save at most counts
        beside the shortest time that another technique has led to, as 16 bits leave less time to what saves passes.
        """
        predicted = self.predictions.get(technique.name)
        if any(gain[1] >= WORTH_IT for gain in self.gains_measured(technique)):
            return True
        if predicted is None:
            return False
        timed = [row.median for result in self.alone.results.values() if result.status == "ok"
                 for (mode, _), row in result.rows.items() if mode == self.mode and row.median]
        shortest = min([predicted.before_ms, *timed])
        return shortest >= WORTH_IT * (shortest - (predicted.before_ms - predicted.least_ms))

    def launching_hides(self, technique: Technique) -> bool:
        """Whether it gains more where both are captured than where both are launched one by one."""
        alone, captured = self.gain_alone(technique), self.gain_captured(technique)
        return bool(alone and captured and captured[1] > alone[2])

    def is_slower(self, technique: Technique) -> bool:
        """Whether the model is slower with it, in each way that this was measured."""
        gains = self.gains_measured(technique)
        return bool(gains) and all(gain[2] < SLOWER for gain in gains)

    def slows_down(self, added: Added) -> bool:
        """Whether those before it on the ladder are faster without it, or as fast where it rounds more."""
        if added.gain is None:
            return False
        judgement = self.judgements.get(Combination((added.technique,)).name)
        rounds_for_nothing = self.gains_nothing_on_top(added) and judgement and judgement.rounds_more
        return added.gain[2] < SLOWER or bool(rounds_for_nothing)

    @staticmethod
    def gains_nothing_on_top(added: Added) -> bool:
        """Whether others come before it, and it makes them no faster."""
        return added.gain is not None and added.gain[1] < WORTH_IT and len(added.combination.techniques) > 1

    def may_gain_captured(self, added: Added) -> bool:
        """Whether it is launched one by one on the ladder, and captured it makes the model no slower."""
        captured = self.gain_captured(added.technique) if added.combination.launch == "eager" else None
        return captured is not None and captured[2] >= SLOWER

    def added(self, technique: str) -> Added | None:
        """How it stood on the ladder, or on one before from which it was dropped."""
        return next((each for each in (*self.ladder, *self.dropped) if each.technique.name == technique), None)

    def _graph(self) -> Technique | None:
        """The technique that captures, where it was found possible."""
        found = self.looked.found.items()
        return next((each for each, places in found if each.launch == "graph"
                     and any(place.can_be_tried for place in places)), None)

    @property
    def timed_on_each(self) -> dict[str, Measured]:
        """Of each of the inputs, what was timed there."""
        return {ON_THE_FIRST: self.alone, **{words: self.on_others.get(words, Measured()) for words in self.others}}

    def gains_on_each(self, technique: Technique) -> dict[str, Interval]:
        """The same of each of several inputs; of one alone nothing more."""
        of, over = Combination((technique,)), self.base_of(technique)
        gains = {words: measured.gain(of, over, self.mode) for words, measured in self.timed_on_each.items()}
        return {words: gain for words, gain in gains.items() if gain} if self.others else {}

    def why_not_timed(self, technique: Technique) -> str:
        """Why it could not be timed on one of the inputs, in words; "" where the run ended before."""
        of, over = Combination((technique,)), self.base_of(technique)
        for words, measured in self.timed_on_each.items():
            if why_not := measured.why_none(of, over, self.mode):
                return f"{words}: {why_not}" if self.others else why_not
        return ""

    def why_unsafe(self, technique: Technique) -> str:
        """What the judge found wrong with it alone, on any of the inputs; "" where it passed."""
        name = Combination((technique,)).name
        judged = [self.judgements.get(name), *(self.judgements_on_others.get((name, words)) for words in self.others)]
        return next((judgement.failure for judgement in judged if judgement and not judgement.passed), "")

    def where_it_loses(self, technique: Technique) -> str:
        """The inputs on which it is slower, and between which sizes the crossover lies; "" where it is on none or all.
        """
        gains = self.gains_on_each(technique)
        slower = [f"it loses {words}: {ratio(gain)}" for words, gain in gains.items() if gain[2] < 1.0]
        if not slower or len(slower) == len(self.every_input):
            return ""
        sizes = {words: _elements(inputs) for words, inputs in self.every_input.items()}
        by_size = sorted(gains, key=lambda words: sizes[words])
        for smaller, larger in itertools.pairwise(by_size):
            ends = gains[smaller], gains[larger]
            if min(high for _, _, high in ends) < 1.0 < max(low for _, low, _ in ends):
                slower.append(f"the crossover lies between {sizes[smaller]:,} and {sizes[larger]:,} elements of input")
        return "; ".join(slower)

    @property
    def every_input(self) -> dict[str, Inputs]:
        """What the model is called with, the first and the others."""
        return {ON_THE_FIRST: self.looked.program.inputs, **self.others}

    def base_of(self, technique: Technique) -> Combination:
        """What it is held against: the model as it is, or compiled, where its rung alone is compiled whole."""
        program = self.looked.program
        in_part = holds_compiled(program.model) and not program.is_compiled
        return Combination((compiled.TECHNIQUE,)) if in_part and self._rewrites_graphs(technique) else AS_IT_IS

    def _rewrites_graphs(self, technique: Technique) -> bool:
        if technique.apply is None:
            return False
        try:
            return bool(plan_of((technique,), found=self.found).passes)
        except Exception:                                      # its own rung will fail by it, and say so
            return False

    def _to_be_written(self) -> list[Opportunity]:
        """Those whose code is worth it; not what is needless beside another of them."""
        needless = needless_beside_what_is_written(self.opportunities, self.looked.found)
        return [one for one in self.opportunities if one.is_to_write and one.technique not in needless]

    def placed(self, technique: str = "") -> list[Advice]:
        """The code that stands at a line of a file, of those that are worth it: all, or one technique's."""
        return [one.advice for one in self._to_be_written() if one.advice and one.advice.place
                and technique in ("", one.technique)]

    def to_write(self) -> list[Advice]:
        """The code for each that is worth it, in the order in which it is to be written at one place.

        What changes the model comes first, then what wraps it, then the call.

        Code that stands at a line was pasted there first, and is right.
        """
        advices = [one.advice for one in self._to_be_written() if one.advice]
        advices = [advice for advice in advices if not advice.place or self.proofs.get(advice) == ""]
        needless = {advice.instead_of for advice in advices}
        left = (advice for advice in advices if advice.code not in needless)
        return sorted(left, key=lambda advice: (advice.is_call, advice.wraps))

    def taken(self) -> Combination:
        """Those of them that were applied, in the order of the ladder: what they promise together was measured."""
        wanted = {one.technique for one in self._to_be_written() if one.speedup}
        order = [added.technique for added in self.ladder] or list(self.looked.found)
        return Combination(tuple(each for each in order if each.name in wanted))

    def gains(self) -> dict[str, dict[str, Interval]]:
        """How many times as fast each technique makes it, in the ways that this was measured."""
        ways: dict[str, dict[str, Interval]] = {"alone": {}, "on top of those above": {}, "left out of all": {}}
        for one in self.opportunities:
            if one.speedup and one.interval:
                ways["alone"][one.technique] = (one.speedup, *one.interval)
        for added in self.ladder:
            for way, gain in (("on top of those above", added.gain), ("left out of all", added.left_out)):
                if gain:
                    ways[way][added.technique.name] = gain
        return {way: gains for way, gains in ways.items() if gains}

    def version_by_hand(self) -> Combination | None:
        """What a person wrote, as it is launched fastest; None where there is none, or it was not timed."""
        ways = [Combination(called=BY_HAND, launched=launch) for launch in LAUNCHES]
        return self.together.fastest(ways, self.mode)

    def captured_at_the_top(self) -> Added | None:
        """All of the ladder as a graph, over the same launched one by one; None where nothing on it captures."""
        graph = next((added.technique for added in self.ladder if added.technique.launch == "graph"), None)
        if graph is None:
            return None
        every = self.ladder[-1].combination
        return Added(graph, every, self.together.gain(every, every.without(graph), self.mode))

    def captured_where_compiled(self, graph: Technique) -> Added | None:
        """The last compiled rung as a graph, where the model as it is can't be captured: compiled code waits for no
        mask, say. Its gain is over the fastest rung of the ladder; None where it is no gain.
        """
        rungs = [each.combination for each in self.ladder]
        compiled_ones = [rung for rung in rungs if compiled.TECHNIQUE.name in [each.name for each in rung.techniques]]
        if not compiled_ones or self.others or any(graph in rung.techniques for rung in rungs):
            return None
        fastest = self.together.fastest([AS_IT_IS, *rungs], self.mode) or AS_IT_IS
        captured = Combination((*compiled_ones[-1].techniques, graph))
        gain = self.together.gain(captured, fastest, self.mode)
        return Added(graph, captured, gain) if gain and gain[1] >= WORTH_IT else None

    def fastest_rung(self) -> Combination:
        """Of the ladder, as it is launched fastest, by what was timed beside the version by hand."""
        rungs = [AS_IT_IS, *(added.combination for added in self.ladder)]
        graphs = [each for each in self.looked.found if each.launch == "graph"]
        rungs += [Combination((*rung.techniques, graph)) for graph in graphs for rung in rungs
                  if graph not in rung.techniques]
        return self.together.fastest(rungs, self.mode) or AS_IT_IS


def needless_beside_what_is_written(opportunities: Iterable[Opportunity], found: Mapping[Technique, Sequence[Found]]
                                    ) -> dict[str, str]:
    """A technique -> another, whose code is to be written, and beside which it is needless."""
    written = {one.technique for one in opportunities if one.is_to_write}
    pairs = {needless_beside(each, places): each.name for each, places in found.items() if each.name in written}
    return {needless: name for needless, name in pairs.items() if needless}


def _elements(inputs: Inputs) -> int:
    """Of the largest tensor that a call is given."""
    return max(t.numel() for t in inputs.named().values())


def as_written(technique: str, place: Place | None = None) -> str:
    """The name of the case of all that is to be written for a technique, or of what stands at one place alone."""
    return f"{technique}, as written{f' at {place.name} alone' if place else ''}"
