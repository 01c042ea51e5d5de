"""When what compiling took is won back."""
from benchmarks.assistant.combination import Combination, Measured
from benchmarks.assistant.trials import Trials
from common.runtime.iteration import BOTH


def pays_after(result: Trials) -> str:
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


def _paid_back(result: Trials, measured: Measured, compiled: Combination, before: Combination) -> str:
    """After how many calls, by the ratio that the ladder shows, too; "" where one of them was not timed."""
    alone = result.alone.results.get("compile")
    ms, gain = measured.ms(before, BOTH), measured.gain(compiled, before, BOTH)
    if not (alone and alone.compilation and ms and gain):
        return ""
    ratio, low, high = gain
    return alone.compilation.won_back(ms - ms / ratio, is_slower=high < 1, is_faster=low > 1)
