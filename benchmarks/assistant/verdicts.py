"""What each technique is worth at each place, from what was measured until now."""
from benchmarks.assistant.combination import Combination, Interval
from benchmarks.assistant.optimized import VERDICTS, Added, Opportunity, Optimized
from benchmarks.assistant.technique import Advice, Found, Technique
from benchmarks.measure.checks import Judgement

WORTH_IT = 1.02                        # of the speed-up, the lower end of its interval


def opportunities(result: Optimized) -> list[Opportunity]:
    """All that was found, the best first."""
    judged = [_judged(result, technique, each) for technique, found in result.looked.found.items() for each in found]
    return sorted(judged, key=lambda one: (VERDICTS.index(one.verdict), -(one.speedup or 0.0)))


def _judged(result: Optimized, technique: Technique, found: Found) -> Opportunity:
    """The verdict on one place."""
    if reason := result.looked.missing(technique) or found.why_not:
        return Opportunity(technique.name, found, "not here", reason)
    advice, elsewhere = _advice(result, technique, found)
    if technique.apply is None:
        return Opportunity(technique.name, found, "by hand", elsewhere, advice=advice)
    rung = Combination((technique,))
    judgement = result.judgements.get(rung.name)
    if judgement and not judgement.passed:
        return Opportunity(technique.name, found, "unsafe", judgement.failure)
    gain = result.gain_alone(technique)
    if gain is None:
        return Opportunity(technique.name, found, "not here", result.alone.why_not(rung, result.mode))
    added = next((each for each in result.ladder if each.technique is technique), None)
    verdict, why = _worth(judgement, gain, added)
    why = "; ".join(filter(None, [why, elsewhere, _not_fired(result, technique), _less_accurate(judgement),
                                _unproven(judgement)]))
    return Opportunity(technique.name, found, verdict, why, gain[0], gain[1:], _error(judgement), advice)


def _advice(result: Optimized, technique: Technique, found: Found) -> tuple[Advice | None, str]:
    """(the code to write, why there is none)."""
    advice = technique.advice(result.looked.program, found)
    if advice and advice.place and not advice.place.is_yours:
        return None, "it stands in an installed package: there is nothing to write in your files"
    return advice, ""


def _worth(judgement: Judgement | None, alone: Interval, added: Added | None) -> tuple[str, str]:
    """(the verdict on what passed, why where that needs a word)."""
    rounds_otherwise = judgement and (judgement.numerics or judgement.less_accurate)
    kind = "different numerics" if rounds_otherwise else "take"
    if alone[1] >= WORTH_IT:
        return kind, ""
    if added and added.gain and added.gain[1] >= WORTH_IT:
        before = " + ".join(each.name for each in added.combination.techniques[:-1])
        return kind, f"not alone, but on top of {before}" if before else "not alone, but in the ladder's rounds"
    return "no gain", ""


def _not_fired(result: Optimized, technique: Technique) -> str:
    """Why it did not, though it was applied; "" where its kernels ran."""
    results = result.alone.results
    seen = [results[rung.name].evidence.get(result.mode) for rung in (Combination(), Combination((technique,)))]
    said = technique.fired(result.looked.program, seen[0], seen[1]) if seen[0] and seen[1] else ""
    return said and f"it did not fire: {said}"


def _less_accurate(judgement: Judgement | None) -> str:
    """The tensor that is furthest beyond its bound, where a lower precision explains that; "" where none is."""
    checks = judgement.less_accurate if judgement else []
    return str(max(checks, key=lambda check: check.error / max(check.bound, 1e-300))) if checks else ""


def _unproven(judgement: Judgement | None) -> str:
    """Of how many tensors it could not be told whether they are the same, and why; "" where it could of all."""
    checks = list(judgement or ())
    reasons = [check.reason for check in checks if not check.proven]
    return f"unproven in {len(reasons)} of {len(checks)} checks: {reasons[0]}" if reasons else ""


def _error(judgement: Judgement | None) -> float | None:
    """The largest of an output, at the dtype that it is timed in."""
    errors = [check.error for check in judgement or () if check.name.startswith("output")
              and check.question == "precision" and check.error == check.error]
    return max(errors, default=None)
