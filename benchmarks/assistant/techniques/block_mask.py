"""A forward that builds FlexAttention's block mask: once for a batch is enough, and packed documents need none.

What building takes is timed here, as it is and compiled. A person moves it to where a batch is made.
"""
import functools
import importlib.util
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from benchmarks.assistant.block_masks import Built, built_in
from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import WORTH_IT, milliseconds, pays
from benchmarks.assistant.technique import Found, Technique
from common.outcome import in_a_line, is_out_of_memory
from common.runtime import compiler, rounds, timing
from common.runtime.iteration import Iteration
from common.text import figures

VARLEN = "torch.nn.attention.varlen"


def find(program: Program) -> list[Found]:
    """Every line of a forward that builds one."""
    return [_found(program, built) for built in built_in(program)]


def _found(program: Program, built: Built) -> Found:
    count = len(built.identities)
    queries, keys = built.given["Q_LEN"], built.given["KV_LEN"]
    as_it_is, faster = _times(program, built)
    share = min(0.99, count * as_it_is / program.iteration_ms)
    took = f"{figures(count * as_it_is)} ms of {figures(program.iteration_ms)}"
    said = [f"create_block_mask evaluates {queries:,} x {keys:,} scores in each forward: {took}", faster]
    if built.different < count:
        said.append(f"the same mask is built {count // built.different} times: hand it on")
    said.append("build it where a batch is made, and give it to the model")
    if built.separates_documents(program.inputs.device) and importlib.util.find_spec(VARLEN):
        said.append(f"it separates packed documents: {VARLEN}.varlen_attn takes their lengths instead, in 16 bits")
    why_not = "" if 1 / (1 - share) >= WORTH_IT else "so small a share has nothing to gain"
    return Found(built.place, "", count, "; ".join(filter(None, said)), why_not)


def _times(program: Program, built: Built) -> tuple[float, str]:
    """(milliseconds of building one, what compiling that makes of it in words)."""
    device, why_not = program.inputs.device, compiler.missing(program.inputs.device)
    as_written, compiled = (Iteration(functools.partial(_built, built, create), timing.nothing, [], {})
                            for create in (flex.create_block_mask, torch.compile(flex.create_block_mask)))
    if not why_not:
        try:
            compiled.run()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            why_not = in_a_line(error)
    if why_not:
        return median(milliseconds(as_written, as_written, device)[0]), ""
    before, after = milliseconds(as_written, compiled, device)
    if built.is_compiled or program.is_compiled:
        return median(after), ""
    is_faster = pays(rounds.paired_ratio(before, after))
    words = f"by torch.compile(create_block_mask) {figures(len(built.identities) * median(after))}" if is_faster else ""
    return median(before), words


def _built(built: Built, create: Callable) -> list[Tensor]:
    return [built.build(create).kv_indices]


TECHNIQUE = Technique("block-mask", "a block mask built in each forward -> once for a batch, or none", find)
