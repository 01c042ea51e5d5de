"""A forward that builds FlexAttention's block mask: once for a batch is enough, and packed documents need none.

What building takes is timed here, as it is and compiled. A person moves it to where a batch is made.
"""
import functools
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from benchmarks.assistant.block_masks import Built, block_masks_of
from benchmarks.assistant.program import Program, fresh_dynamo
from benchmarks.assistant.side_by_side import ROUNDS, WORTH_IT, milliseconds, pays
from benchmarks.assistant.technique import Found, Technique
from common.outcome import in_a_line, is_out_of_memory
from common.runtime import compiler, rounds, timing
from common.runtime.iteration import Iteration
from common.text import figures

VARLEN = "torch.nn.attention.varlen"


def find(program: Program) -> list[Found]:
    """Every line of a forward that builds one."""
    return [_found(program, built) for built in block_masks_of(program)]


def _found(program: Program, built: Built) -> Found:
    count, first = len(built.given), built.given[0]
    timed = _timed(program, built)
    ms = min(count * timed.ms, program.iteration_ms)           # alone it may take longer than amid the model's work
    share = min(0.99, ms / program.iteration_ms)
    said = [f"create_block_mask evaluates {first['Q_LEN']:,} x {first['KV_LEN']:,} scores in each forward: "
            f"{figures(ms)} ms of {figures(program.iteration_ms)}"]
    if timed.compiled_ms is not None:
        said.append(f"by torch.compile(create_block_mask) {figures(count * timed.compiled_ms)}, "
                    f"{timed.compiling_s:,.0f} s to compile")
    if timed.why_not_compiled:
        said.append(f"it can't be compiled: {timed.why_not_compiled}")
    if built.different < count:
        said.append(f"{built.different} of its {count} masks would do: the others are the same again")
    said.append("build it where a batch is made, and give it to the model")
    if built.separates_documents(program.inputs.device) and importlib.util.find_spec(VARLEN):
        said.append(f"it separates packed documents: {VARLEN}.varlen_attn takes their lengths instead, in 16 bits")
    why_not = "" if 1 / (1 - share) >= WORTH_IT else "so small a share has nothing to gain"
    return Found(built.place, "", count, "; ".join(said), why_not)


@dataclass(frozen=True)
class _Timed:
    """Milliseconds of building one mask."""
    ms: float                              # as the model does it
    compiled_ms: float | None = None       # where compiling makes it faster
    compiling_s: float = 0.0               # what the first compiled call took
    why_not_compiled: str = ""             # what the compiler raised


def _timed(program: Program, built: Built) -> _Timed:
    device = program.inputs.device
    as_written = _iteration(built, flex.create_block_mask)
    if compiler.missing(device):
        return _Timed(_alone(as_written, device))
    with fresh_dynamo():
        compiled = _iteration(built, torch.compile(flex.create_block_mask))
        began = time.perf_counter()
        try:
            compiled.run()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return _Timed(_alone(as_written, device), why_not_compiled=in_a_line(error))
        compiling_s = time.perf_counter() - began
        before, after = milliseconds(as_written, compiled, device)
    if built.is_compiled or program.is_compiled:
        return _Timed(median(after))
    return _Timed(median(before), median(after) if pays(rounds.paired_ratio(before, after)) else None, compiling_s)


def _alone(iteration: Iteration, device: torch.device) -> float:
    return median(timing.clock_for(device).sample(iteration.run, iteration.between, ROUNDS))


def _iteration(built: Built, create: Callable) -> Iteration:
    return Iteration(functools.partial(_built, built, create), timing.nothing, [], {})


def _built(built: Built, create: Callable) -> list[Tensor]:
    return [built.build(create).kv_indices]


TECHNIQUE = Technique("block-mask", "a block mask built in each forward -> once for a batch, or none", find)
