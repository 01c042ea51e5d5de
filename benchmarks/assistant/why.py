"""Why a technique does or does not apply to a model, and whether its kernels ran where it was applied."""
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.assistant.look import Looked, in_words, placed
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.sections import Said, Section, Shown
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Found, Technique
from benchmarks.measure.modules import subject_of
from common.block import evidence
from common.block.evidence import Evidence
from common.measure.session import Session
from common.outcome import UserError, in_a_line
from common.phases import Phase

BY_HAND = "nothing was applied: a person mends it, by hand"


@dataclass
class Why(Shown):
    """What one technique finds in a model, and what became of it where it was applied."""
    technique: Technique
    looked: Looked
    found: list[Found]
    applied: str                               # in words
    seen_alone: Sequence[tuple[str, str]] = ()     # (place, what running it alone shows)

    def sections(self) -> list[Section]:
        title = f"{self.technique.name}: {self.technique.what}, on {self.looked.name}, {self.looked.mode}"
        where = [("where", f"{placed(found)}: {in_words(found)}") for found in self.found]
        alone = [("alone", f"{place}: {words}") for place, words in self.seen_alone]
        return [Said(title, [*where, *alone, ("then", self.applied)])]


def explain(technique: Technique, looked: Looked, task: Task, session: Session) -> Why:
    """Apply one technique, run an iteration as it is and one with it, and look at their kernels."""
    found = looked.found[technique]
    applied = _applied(technique, looked, found, task, session)
    return Why(technique, looked, found, applied, _seen_alone(technique, looked))


def _seen_alone(technique: Technique, looked: Looked) -> Sequence[tuple[str, str]]:
    try:
        return technique.seen_alone(looked.program)
    except UserError:
        raise
    except Exception as error:                                     # whatever a compiler or a model raises
        return [("the call", f"it could not be timed: {in_a_line(error)}")]


def _applied(technique: Technique, looked: Looked, found: list[Found], task: Task, session: Session) -> str:
    if not found:
        return f"nothing was applied: nothing was found ({technique.what})"
    if missing := looked.missing(technique):
        return f"nothing was applied: {missing}"
    if any(each.by_hand for each in found) and not any(each.can_be_tried for each in found):
        return BY_HAND
    if not any(each.can_be_tried for each in found):
        return "nothing was applied: there is no place where it could be"
    if technique.apply is None:
        return BY_HAND
    before = _seen(task.model, looked, task, session)
    try:
        rung = Rung(task.model, [technique], session.device, {technique.name: found}, looked.program.dynamic)
        seen = _seen(rung, looked, task, session)
    except UserError:
        raise
    except Exception as error:                                     # whatever a compiler or a model raises
        return f"it was applied, and failed: {in_a_line(error)}"
    if reason := technique.fired(looked.program, before, seen):
        return f"it was applied, and did not fire: {reason}"
    said = technique.remark(looked.program, before, seen)
    return f"it was applied, and ran: {_difference(before, seen)}" + (f"; {said}" if said else "")


def _seen(call, looked: Looked, task: Task, session: Session) -> Evidence:
    """The kernels of an iteration."""
    session.say(Phase.OBSERVING)
    iteration = subject_of(call, task.work(cotangents=1, seed=session.seed), (0.0, 0.0)).iteration(looked.mode)

    def clean_iteration() -> None:
        iteration.between()
        iteration.run()
    clean_iteration()
    seen = evidence.judge(evidence.observe(clean_iteration, session.device), None)
    iteration.between()
    return seen


def _difference(before: Evidence, seen: Evidence) -> str:
    """Which kinds of kernels there are more or fewer of."""
    words = [f"{seen.launches:,} launches in place of {before.launches:,}"]
    for kind in {**seen.kinds, **before.kinds}:
        if seen.kinds[kind] != before.kinds[kind]:
            words.append(f"{seen.kinds[kind]} {kind} in place of {before.kinds[kind]}")
    return ", ".join(words)
