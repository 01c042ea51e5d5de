"""Fewer heads of keys than of queries, where no fused kernel takes that: repeat keys and values. A person does."""
import functools
from dataclasses import replace

import torch

from benchmarks.assistant.fusing import EVERY_BACKEND, Given, fused_or_why_not
from benchmarks.assistant.graph import with_stars
from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import Ratio, gain_on_device, pays
from benchmarks.assistant.technique import Found, Technique


def find(program: Program) -> list[Found]:
    """Every call of the library's attention with grouped heads that is computed by hand."""
    trains = program.trace.trains and not program.is_inference
    found = []
    calls = [(call, replace(call.attends, trains=trains)) for call in program.trace.calls
             if call.attends and call.attends.enable_gqa and call.attends.query[-3] != call.attends.key[-3]
             and call.attends.backends == EVERY_BACKEND]           # else that is why, and sdpa says so
    for place in dict.fromkeys(call.place for call, _ in calls):
        here = [(call, given) for call, given in calls if call.place == place]
        given = next((given for _, given in here if not fused_or_why_not(given)[0]), None)
        if given is None:
            continue
        gain = _gain(given)
        queries, keys = given.query[-3], given.key[-3]
        times = f"{gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}] times as fast here, repeating included"
        heads = f"{queries} heads of queries and {keys} of keys"
        reason = (f"no fused kernel computes {heads}; with keys and values repeated attention is {times}: "
                  f"key.repeat_interleave({queries // keys}, -3)")
        under_autocast = fused_or_why_not(given.in_dtype(torch.bfloat16))[0] if given.dtype == torch.float32 else ""
        if under_autocast:
            reason += f"; under autocast in bfloat16 it is not needed: {under_autocast} runs"
        why_not = "" if pays(gain) else "it is not worth it"
        found.append(Found(place, with_stars([call.module for call, _ in here]), len(here), reason, why_not))
    return found


@functools.cache
def _gain(given: Given) -> Ratio:
    """At these shapes, on random numbers; on a CPU, which takes long, for one sample."""
    given = given if given.device.type == "cuda" else given.of_one_sample()
    return gain_on_device(given.iteration(), given.iteration(repeats=True), given.device)


TECHNIQUE = Technique("repeat-kv", "grouped heads that no fused kernel takes -> repeated", find)
