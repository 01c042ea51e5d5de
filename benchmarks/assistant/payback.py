"""When what compiling took is won back."""
from dataclasses import replace

from benchmarks.assistant.combination import Combination, Measured
from benchmarks.assistant.optimized import Optimized
from common.runtime.iteration import BOTH


def pays_after(result: Optimized) -> str:
    """By that alone, and on the ladder, in words; "" where it was not tried."""
    compiled = next((each for each in result.looked.found if each.name == "compile"), None)
    if compiled is None:
        return ""
    alone = _paid_back(result, result.alone, Combination((compiled,)), Combination())
    for added in result.ladder:
        others = added.combination.without(compiled)
        if added.technique is compiled and others.techniques:
            on_top = _paid_back(result, result.together, added.combination, others)
            if alone and on_top:
                return f"alone {alone}, on top of {others.words} {on_top}"
    return alone


def _paid_back(result: Optimized, measured: Measured, compiled: Combination, before: Combination) -> str:
    """After how many calls, by what was timed of both; "" where one was not."""
    alone = result.alone.results.get("compile")
    row, base = measured.row(compiled, BOTH), measured.row(before, BOTH)
    if not (alone and alone.compilation and row and row.timing and base and base.timing):
        return ""
    return replace(alone.compilation, uncompiled=base.timing.samples).pays_after(row.timing)
