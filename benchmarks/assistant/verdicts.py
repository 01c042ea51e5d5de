"""What each technique is worth at each place, from what was measured until now."""
import dataclasses
from collections.abc import Sequence

from benchmarks.assistant.combination import ON_THE_FIRST, Combination, Interval
from benchmarks.assistant.side_by_side import WORTH_IT
from benchmarks.assistant.technique import Advice, Found, NotWritten, Technique
from benchmarks.assistant.trials import (
    SLOWER,
    TO_WRITE,
    VERDICTS,
    Added,
    Opportunity,
    Trials,
    as_written,
    needless_beside_what_is_written,
)
from benchmarks.measure.checks import Judgement
from benchmarks.measure.names import Kind
from common.outcome import in_a_line
from common.text import number, ratio

IN_A_PACKAGE = "it stands in an installed package: there is nothing to write in your files"


def opportunities(result: Trials) -> list[Opportunity]:
    """All that was found, the best first."""
    judged = [_unless_it_breaks(result, technique, each)
              for technique, found in result.looked.found.items() for each in found]
    needless = needless_beside_what_is_written(judged, result.looked.found)
    judged = [_or_instead(one, needless[one.technique]) if one.technique in needless else one for one in judged]
    return sorted(judged, key=lambda one: (VERDICTS.index(one.verdict), -(one.speedup or 0.0)))


def _or_instead(one: Opportunity, other: str) -> Opportunity:
    """What is needless beside another, with its code in words, for a person who wants it instead."""
    if not one.is_to_write or one.advice is None:
        return one
    why = f"needless beside {other}; instead of it write `{one.advice.code}`"
    return dataclasses.replace(one, why="; ".join(filter(None, [one.why, why])))


def _unless_it_breaks(result: Trials, technique: Technique, found: Found) -> Opportunity:
    """The verdict on one place, as its code was seen to be; the others have theirs without it."""
    try:
        return _as_written(result, _judged(result, technique, found))
    except Exception as error:
        fault = f"a fault of this suite: {in_a_line(error)}"
        result.faults[f"{technique.name}: {fault}"] = None
        return Opportunity(technique.name, found, "not here", fault)


def _judged(result: Trials, technique: Technique, found: Found) -> Opportunity:
    """The verdict on one place."""
    if reason := result.looked.missing(technique) or found.why_not:
        not_here = Opportunity(technique.name, found, "not here", reason)
        return _where_compiled(result, technique, found) or not_here
    if found.by_hand:
        return Opportunity(technique.name, found, "by hand", found.by_hand)
    advice, elsewhere = _advice(result, technique, found)
    if technique.apply is None:
        return Opportunity(technique.name, found, "by hand", elsewhere, advice=advice)
    rung = Combination((technique,))
    judgement = result.judgements.get(rung.name)
    if wrong := result.why_unsafe(technique):
        return Opportunity(technique.name, found, "unsafe", wrong)
    gain = result.gain_alone(technique)
    if gain is None:
        if postponed := result.postponed.get(technique.name):
            return Opportunity(technique.name, found, "not reached", postponed)
        reason = result.why_not_timed(technique)
        return Opportunity(technique.name, found, "not here" if reason else "not reached", reason)
    added = result.added(technique.name)
    on_top = _captured_on_top(result, technique) if technique.launch == "graph" else _on_top(result, technique.name)
    verdict, why = _worth(judgement, gain, None if result.others else on_top)
    if verdict == "no gain" and not (result.is_climbed or result.others or added) and result.may_gain(technique):
        verdict, why = "not reached", "what it gains on top of others was not measured"
    if result.others and verdict == "no gain" and added and added.gain and added.gain[1] >= WORTH_IT:
        why = f"in the ladder's rounds it is {ratio(added.gain)} {ON_THE_FIRST}, and was timed on no other"
    if verdict in TO_WRITE and (clash := result.clashes.get(technique.name)):
        return Opportunity(technique.name, found, "not here", clash, gain[0], gain[1:], _error(judgement))
    if verdict == "take" and added in result.dropped and added.gain and not result.others:
        before = added.combination.without(technique).words
        why = f"alone it gains, but on top of {before} it is {ratio(added.gain)}"
        return Opportunity(technique.name, found, "no gain", why, gain[0], gain[1:], _error(judgement))
    in_the_way = None if result.others else _in_the_way(result.ladder)         # which stands on the first of several
    if verdict in TO_WRITE and added and added.left_out and added is in_the_way:
        why = f"alone it gains, but all together are {number(added.left_out[0], '.2f')} times as fast with it"
        return Opportunity(technique.name, found, "no gain", why, gain[0], gain[1:], _error(judgement))
    gains_on_top = verdict in TO_WRITE and gain[1] < WORTH_IT
    not_fired, remark = _kernels_show(result, technique, on_top if gains_on_top else None)
    if not_fired and verdict in TO_WRITE:
        why = f"it did not fire: {not_fired}; what was measured with it has another reason"
        return Opportunity(technique.name, found, "no gain", why, gain[0], gain[1:], _error(judgement))
    if verdict in TO_WRITE and advice is None:
        verdict = "by hand"
    elif verdict == "different numerics" and not result.others and (for_nothing := _rounds_for_nothing(on_top)):
        advice, elsewhere = None, for_nothing
    loses = result.where_it_loses(technique)
    said = [why, _where_captured(result, technique), loses, elsewhere,
            not_fired and f"it did not fire: {not_fired}", remark, _less_accurate(judgement), _unproven(judgement)]
    why = "; ".join(filter(None, said))
    return Opportunity(technique.name, found, verdict, why, gain[0], gain[1:], _error(judgement), advice)


def _where_compiled(result: Trials, technique: Technique, found: Found) -> Opportunity | None:
    """A graph of a compiled rung, where the model as it is can't be captured."""
    captured = result.captured_where_compiled(technique) if technique.launch == "graph" else None
    if captured is None or captured.gain is None:
        return None
    advice, elsewhere = _advice(result, technique, found)
    rung = captured.combination.without(technique)
    on_top = f"on top of {rung.words} it can be captured, {ratio(captured.gain)} times as fast as the fastest rung"
    why = "; ".join(filter(None, [found.why_not, on_top, elsewhere]))
    return Opportunity(technique.name, found, "take" if advice else "by hand", why, advice=advice)


def _as_written(result: Trials, one: Opportunity) -> Opportunity:
    """The same, once its code was pasted: code that is wrong is not said, and code that gains nothing is no gain."""
    if not one.advice or not one.advice.place or one.verdict not in TO_WRITE:
        return one
    if one.advice not in result.proofs:
        why = "" if result.file_known else "its code was not tried: its file is not known, give FILE:FUNCTION"
        return dataclasses.replace(one, why="; ".join(filter(None, [one.why, why])))
    if wrong := result.proofs[one.advice]:
        why = f"its code was tried and is left out: {wrong}"
        return dataclasses.replace(one, verdict="by hand", why="; ".join(filter(None, [one.why, why])), advice=None)
    return _if_it_gains(result, one)


def _if_it_gains(result: Trials, one: Opportunity) -> Opportunity:
    """No gain, where the code of its technique was timed and gains nothing."""
    written = Combination(called=as_written(one.technique))
    if written.name not in result.pieces.results:          # it was not timed: a person applies it, or Ctrl-C came
        return one
    if result.others:
        why = f"as it is written it was timed {ON_THE_FIRST} alone"
        return dataclasses.replace(one, why="; ".join(filter(None, [one.why, why])))
    if reason := result.pieces.why_not(written, result.mode):
        return dataclasses.replace(one, verdict="by hand", why=f"as it is written: {reason}", advice=None)
    assert one.advice is not None
    alone = result.pieces.gain(Combination(called=as_written(one.technique, one.advice.place)), Combination(),
                               result.mode)
    if alone and alone[2] < 1.0:
        why = f"as it is written, alone in its place, it is {number(alone[0], '.2f')} times as fast"
        return dataclasses.replace(one, verdict="no gain", why=why, advice=None)
    gain = result.pieces.gain(written, Combination(), result.mode)
    if gain is None or gain[1] >= WORTH_IT:
        return one
    added = _on_top(result, one.technique)
    if gain[2] >= 1.0 and added and added.gain and added.gain[1] >= WORTH_IT:      # it gains on top of others alone
        return one
    promised = f", and {number(one.speedup, '.2f')} were promised" if one.speedup else ""
    return dataclasses.replace(one, verdict="no gain", advice=None,
                               why=f"as it is written it is {number(gain[0], '.2f')} times as fast{promised}")


def _advice(result: Trials, technique: Technique, found: Found) -> tuple[Advice | None, str]:
    """(the code to write, why there is none)."""
    is_elsewhere = found.place is not None and not found.place.is_yours
    try:
        advice = technique.advice(result.looked.program, found)
    except NotWritten as error:
        return None, IN_A_PACKAGE if is_elsewhere else f"no code is written for it: {error}"
    except Exception as error:                             # one that is missing loses nothing that was measured
        fault = f"the code for it could not be written, a fault of this suite: {in_a_line(error)}"
        result.faults[f"{technique.name}: {fault}"] = None
        return None, fault
    if advice and advice.place and not advice.place.is_yours:
        return None, IN_A_PACKAGE
    if advice is not None or technique.apply is None:
        return advice, ""
    return None, IN_A_PACKAGE if is_elsewhere else "no code is written for it: its lines are not read"


def _on_top(result: Trials, technique: str) -> Added | None:
    """What was measured of it on top of others. None where one of those slows the model down: it is not taken, so a
    gain on top of it is none of the model's.
    """
    for added in result.ladder:
        if added.technique.name == technique:
            return added
        if added.gain and added.gain[2] < SLOWER:
            return None
    return next((each for each in result.dropped if each.technique.name == technique), None)


def _captured_on_top(result: Trials, technique: Technique) -> Added | None:
    """What capturing was measured to gain on top of others. What is written is launched with all of the ladder: where
    that gains nothing captured, an earlier rung's gain is none of the model's.
    """
    at_its_place, at_the_top = _on_top(result, technique.name), result.captured_at_the_top()
    if at_its_place is None:
        return _on_top_of_one(result, technique)
    if at_the_top is None or at_the_top.gain is None:
        return at_its_place
    if at_the_top.gain[2] < WORTH_IT or at_its_place.gain is None or at_its_place.gain[1] < WORTH_IT:
        return at_the_top
    return at_its_place


def _on_top_of_one(result: Trials, technique: Technique) -> Added | None:
    """Of what captures, on top of the one technique where that gains most."""
    rungs: dict[Interval, Combination] = {}
    for each in result.looked.found:
        both = Combination((each, technique))
        alone, gain = result.gain_alone(each), result.alone.gain(both, Combination((each,)), result.mode)
        if alone and gain and alone[1] >= WORTH_IT and not result.why_unsafe(each):
            rungs[gain] = both
    best = max(rungs, key=lambda gain: gain[1], default=None)
    return Added(technique, rungs[best], best) if best else None


def _rounds_for_nothing(added: Added | None) -> str:
    """That what rounds more than the model does gains nothing on top of the others; "" where it does."""
    if added is None or added.gain is None or not Trials.gains_nothing_on_top(added):
        return ""
    before = added.combination.without(added.technique).words
    return f"on top of {before} it gains nothing, {ratio(added.gain)}, and is not written beside it"


def _worth(judgement: Judgement | None, alone: Interval, added: Added | None) -> tuple[str, str]:
    """(the verdict on what passed, why where that needs a word)."""
    kind = "different numerics" if judgement and judgement.rounds_more else "take"
    if alone[1] >= WORTH_IT:
        return kind, ""
    before = added.combination.without(added.technique).words if added else ""
    if added and added.gain and added.gain[1] >= WORTH_IT:
        if before:
            return kind, f"not alone, but on top of {before}"
        if alone[2] >= WORTH_IT:
            return kind, "not alone, but in the ladder's rounds"
        return "no gain", f"measured twice, the two differ: in the ladder's rounds it is {ratio(added.gain)}"
    if added and added.gain and before:
        return "no gain", f"on top of {before} it is {ratio(added.gain)}"
    return "no gain", ""


def _where_captured(result: Trials, technique: Technique) -> str:
    """What it gains as a graph, where launching hides that; "" where it does not."""
    captured = result.gain_captured(technique) if result.launching_hides(technique) else None
    return f"captured in a graph it is {ratio(captured)}" if captured else ""


def _in_the_way(ladder: Sequence[Added]) -> Added | None:
    """The one without which all the others together are fastest, if they are faster without it than with it.

    One alone: whether a second would still be in the way without the first was not measured.
    """
    measured = [each for each in ladder if each.left_out]
    worst = min(measured, key=lambda each: each.left_out[0], default=None)               # type: ignore[index]
    return worst if worst and worst.left_out and worst.left_out[2] * WORTH_IT <= 1 else None


def _kernels_show(result: Trials, technique: Technique, added: Added | None) -> tuple[str, str]:
    """(why it did not fire, what else its kernels show): alone, or where it was `added` to others."""
    results, before, after = result.alone.results, Combination(), Combination((technique,))
    if added:
        results, after = result.together.results, added.combination
        before = after.without(technique)
    runs = [results.get(rung.name) for rung in (before, after)]
    seen = [run.evidence.get(result.mode) if run else None for run in runs]
    if not (seen[0] and seen[1]):
        return "", ""
    program = result.looked.program
    return technique.fired(program, seen[0], seen[1]), technique.remark(program, seen[0], seen[1])


def _less_accurate(judgement: Judgement | None) -> str:
    """The tensor that is furthest beyond its bound, where a lower precision explains that; "" where none is."""
    checks = judgement.less_accurate if judgement else []
    return str(max(checks, key=lambda check: check.error / max(check.bound, 1e-300))) if checks else ""


def _unproven(judgement: Judgement | None) -> str:
    """Of how many tensors it could not be decided whether they are the same, and why; "" where it could of all."""
    checks = list(judgement or ())
    reasons = [check.reason for check in checks if not check.proven]
    return f"unproven in {len(reasons)} of {len(checks)} checks: {reasons[0]}" if reasons else ""


def _error(judgement: Judgement | None) -> float | None:
    """The largest of an output, at the dtype that it is timed in."""
    errors = [check.error for check in judgement or () if check.of.kind is Kind.OUTPUT
              and check.question == "precision" and check.error == check.error]
    return max(errors, default=None)
