"""The ladder: one technique on top of the other, in an order in which each gains."""
from collections.abc import Sequence

from benchmarks.assistant.combination import Combination
from benchmarks.assistant.rungs import TOGETHER, Rungs
from benchmarks.assistant.technique import Plan, Technique, needless_beside, plan_of
from benchmarks.assistant.trials import Added, Trials


def climb(rungs: Rungs, tried: Sequence[Technique]) -> None:
    """Measure the ladder: one technique after the other, the one that gains most first.

    Where one fails or slows down what is below it, it is measured again, without it or in another order.
    """
    aside = [each for each in tried if _stands_aside(rungs, each)]
    order, climbed = _in_order(rungs, tried, aside), []
    least = 1 if rungs.task.by_hand else 2                 # one alone is measured already
    while len(order) >= least:
        _climb_once(rungs, order, _tried_in_16_bits(rungs.result, order, aside))
        climbed.append(order)
        with_more = _with_what_gains_in_16_bits(rungs.result, order, aside)
        better = _without_a_clash(rungs.result, order)
        if better is None:                                 # an empty one is another: what was alone has failed
            better = _faster(rungs.result, order) or with_more
        if better is None or better in climbed:            # two orders may each be better by what is measured of one
            if rungs.quick:
                _end_before_what_slows(rungs.result)
            return
        order = better
        rungs.result.ladder.clear()
        rungs.ladders += 1
    if rungs.task.by_hand:
        rungs.measure([Combination()], TOGETHER, rungs.result.together, rungs.by_hand())


def _stands_aside(rungs: Rungs, technique: Technique) -> bool:
    """Whether it is tried once beside the ladder: what is made for 16 bits and slower in FP32, and in a hurry what
    gains nothing and was not predicted to.
    """
    result = rungs.result
    if result.is_slower(technique):
        return technique.for_16_bits
    return rungs.quick and technique.launch == "eager" and not result.may_gain(technique)


def _in_order(rungs: Rungs, tried: Sequence[Technique], aside: Sequence[Technique]) -> list[Technique]:
    """Those that can be on it, the one that gains most first. What captures comes before what launching hides."""
    result = rungs.result
    gains = {each: gain for each in tried if (gain := result.most_gained(each))}
    order = sorted(gains, key=lambda each: -gains[each])
    if rungs.quick:                                        # each rung on top of what compiles is compiled anew
        order = [each for each in order if each not in aside and not result.is_slower(each)]
        order.sort(key=lambda each: _is_late(plan_of((each,), found=result.found)))
    needless = {needless_beside(each, result.found[each.name]) for each in order}
    order = [each for each in order if each.name not in needless]
    graph, hidden = _graph_in(order), next(filter(result.launching_hides, order), None)
    return _captured_before(order, graph, hidden) if graph and hidden else order


def _is_late(plan: Plan) -> tuple[bool, bool]:
    """What comes last on a ladder in a hurry: what compiles, and behind it FP8, which mostly gains nothing on top of 16
    bits and leaves the end again.
    """
    return bool(plan.in_fp8), plan.compiles


def _captured_before(order: Sequence[Technique], graph: Technique, technique: Technique) -> list[Technique]:
    """The order in which that technique is captured."""
    others = _without(order, graph)
    place = min(order.index(graph), others.index(technique))
    return [*others[:place], graph, *others[place:]]


def _climb_once(rungs: Rungs, order: Sequence[Technique], beside: Sequence[Combination]) -> None:
    """Measure one ladder, whatever fails on it, and other combinations in its rounds."""
    result, combinations = rungs.result, _combinations(order)
    every = combinations[-1]
    others = [] if rungs.quick else [every.without(each) for each in order]
    measured, mode = result.together, result.mode
    rungs.measure([*combinations, *others, *beside], TOGETHER, measured, rungs.by_hand())
    for before, rung, technique in zip(combinations, combinations[1:], order, strict=False):
        left_out = None if rungs.quick else measured.gain(every, every.without(technique), mode)
        result.ladder.append(Added(technique, rung, measured.gain(rung, before, mode), left_out))


def _combinations(order: Sequence[Technique]) -> list[Combination]:
    """The model as it is, and one technique more in each."""
    return [Combination(tuple(order[:count])) for count in range(len(order) + 1)]


def _tried_in_16_bits(result: Trials, order: Sequence[Technique], aside: Sequence[Technique]) -> list[Combination]:
    """Each of those that stand aside, on top of the rung of the ladder that is the first in 16 bits."""
    tried = [*order, *(added.technique for added in result.dropped)]
    untried = [each for each in aside if each not in tried and result.most_gained(each)]
    for below in _combinations(order) if untried else []:
        if plan_of(below.techniques, found=result.found).autocast:
            return [Combination((*below.techniques, each)) for each in untried]
    return []


def _with_what_gains_in_16_bits(result: Trials, order: Sequence[Technique], aside: Sequence[Technique]
                                ) -> list[Technique] | None:
    """The order with the first of them that gains in 16 bits, behind what computes in them. None where none does: those
    are dropped.
    """
    graph = _graph_in(order)
    for beside in _tried_in_16_bits(result, order, aside):
        technique = beside.techniques[-1]
        captured = [Combination((*beside.techniques, graph))] if graph and graph not in beside.techniques else []
        gains = {gain: rung for rung in (beside, *captured)
                 if (gain := result.together.gain(rung, rung.without(technique), result.mode))}
        if not gains:
            continue
        best, place = max(gains, key=lambda gain: gain[1]), len(beside.techniques) - 1
        added = Added(technique, gains[best], best)
        if not result.gains_nothing_on_top(added):
            return [*order[:place], technique, *order[place:]]
        result.dropped.append(added)
    return None


def _without(order: Sequence[Technique], technique: Technique) -> list[Technique]:
    return [each for each in order if each is not technique]


def _without_a_clash(result: Trials, order: Sequence[Technique]) -> list[Technique] | None:
    """The order without the first that fails on top of those before it, which do not: all after it would fail by it,
    too. None where none does."""
    measured, mode, combinations = result.together, result.mode, _combinations(order)
    for before, rung, technique in zip(combinations, combinations[1:], order, strict=False):
        why_not = measured.why_not(rung, mode)
        if not why_not or measured.why_not(before, mode):
            continue
        if captured_later := _captured_later(result, order, rung):
            return captured_later
        clashing = _better_without(result, rung, technique) or technique
        others = rung.without(clashing).words or "the model as it is"
        result.clashes[clashing.name] = f"on top of {others} it can't run: {why_not}"
        return _without(order, clashing)
    return None


def _captured_later(result: Trials, order: Sequence[Technique], rung: Combination) -> list[Technique] | None:
    """The order with what captures further behind, where this rung can't be captured and one with more techniques can:
    FP32 attention may differ too far from itself, say, and 16 bits allow that. None where none can.
    """
    graph = _graph_in(rung.techniques)
    if graph is None:
        return None
    others = _without(order, graph)
    for count in range(len(rung.techniques), len(others) + 1):         # one more than this rung has beside the graph
        if result.together.ms(Combination((*others[:count], graph)), result.mode):
            return [*others[:count], graph, *others[count:]]
    return None


def _better_without(result: Trials, rung: Combination, technique: Technique) -> Technique | None:
    """What captures this rung, where it runs launched one by one, and its last technique gains more so."""
    graph = _graph_in(rung.techniques)
    if graph is None or graph is technique or not result.together.ms(rung.without(graph), result.mode):
        return None
    alone, captured = result.gain_alone(technique), result.most_gained(graph)
    return graph if alone and captured and alone[0] > captured else None


def _faster(result: Trials, order: Sequence[Technique]) -> list[Technique] | None:
    """Another order, where one slows down what is below it and others follow: they were measured on what nobody would
    write. None where none does.

    Launching hides what a technique gains: what gains captured comes behind what captures, and is left out only where
    it is slower there, too.
    """
    slowing = next(filter(result.slows_down, result.ladder[:-1]), None)
    if slowing is None:
        return None
    technique, graph = slowing.technique, _graph_in(order)
    if graph and result.may_gain_captured(slowing):
        return _captured_before(order, graph, technique)
    if len(order) == 2:                                    # without it there would be no ladder
        return None
    result.dropped.append(slowing)
    return _without(order, technique)


def _end_before_what_slows(result: Trials) -> None:
    """What slows the ladder down leaves its end: nothing stands on it, so nothing is measured again."""
    while len(result.ladder) > 1 and result.slows_down(result.ladder[-1]):
        result.dropped.append(result.ladder.pop())


def _graph_in(techniques: Sequence[Technique]) -> Technique | None:
    """The one that captures."""
    return next((each for each in techniques if each.launch == "graph"), None)
