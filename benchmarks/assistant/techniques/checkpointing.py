"""What repeated layers save for the backward, against computing it again there: memory for time. A person decides.

A layer that is checkpointed keeps its inputs alone, and runs once more in the backward.
"""
import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.assistant.memory import saved_bytes
from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import times_as_fast
from benchmarks.assistant.technique import Found, Technique
from benchmarks.measure.keeping import kept
from benchmarks.measure.modules import subject_of
from benchmarks.measure.observing import Work, distance, norm
from common.block.oracle import MODULE_GATES
from common.runtime.compiler import holds_compiled
from common.runtime.iteration import BOTH, Iteration
from common.runtime.machine import memory_total
from common.text import figures

SHORT = 0.5                                # of a device's memory: what is saved beyond is worth time
ITERATIONS = 34                            # that comparing the two takes on a GPU; on a CPU fewer
BY_ITSELF, ROUNDING_OF_ALL = 10, 1e-3      # times what two calls differ by, if that is so small a share of all
SECONDS, WHERE_SHORT = 10, 60              # that it may take; where memory is short the speed matters more


def find(program: Program) -> list[Found]:
    """The longest list of layers, in training."""
    layers = program.layers
    if program.is_inference or not program.trace.trains or not layers:
        return []
    what = f"{len(layers)} x {type(layers[0]).__name__}"
    if holds_compiled(program.model) or any(isinstance(layer, torch.jit.ScriptModule) for layer in layers):
        return [Found(None, "", 1, what, "they are compiled")]
    with kept(program.model):
        whole = saved_bytes(program.model, program)
        with checkpointed(layers):
            left = saved_bytes(program.model, program)
        of_a_layer = max(whole - left, 0) / len(layers)              # while it is computed again
        reason = f"{what}: {_memory(whole)} are saved for the backward; with it {_memory(left + of_a_layer)}"
        is_short = whole > SHORT * memory_total(program.inputs.device)
        seconds = WHERE_SHORT if is_short else SECONDS
        if ITERATIONS * program.iteration_ms > 1e3 * seconds:
            reason += f"; its speed is not measured: that would take more than {seconds} s"
        else:
            work = Work(program.inputs, cotangents=1)
            before, plain = (subject_of(program.model, work, (0.0, 0.0)).iteration(BOTH) for _ in range(2))
            after = _entered(plain, layers)
            if not give_the_same(before, after):
                return [Found(None, "", 1, what, "computed again, it gives other gradients")]
            gain = times_as_fast(before, after, program.inputs.device)
            reason += f", at {gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}] of the speed here"
    return [Found(None, "", 1, reason, "" if is_short else "it costs time, and the memory suffices without it")]


def _memory(size: float) -> str:
    """Three figures of it: 12.3 MiB, 1.23 GiB."""
    return f"{figures(size / 2**30)} GiB" if size >= 2**30 else f"{figures(size / 2**20)} MiB"


@contextlib.contextmanager
def checkpointed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Meanwhile each of them is computed again in the backward."""
    own = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = _again(layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = forward


def _again(forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return run


def _entered(iteration: Iteration, layers: Sequence[nn.Module]) -> Iteration:
    """The same, with these layers checkpointed."""
    def run() -> list[Tensor]:
        with checkpointed(layers):
            return iteration.run()
    return Iteration(run, iteration.between, iteration.reads, iteration.receives)


def give_the_same(before: Iteration, after: Iteration) -> bool:
    """Whether outputs and gradients are the same to rounding, from the same random numbers.

    A gradient that is nothing but rounding, as a key bias's is, differs from call to call where a GPU adds up in no
    fixed order.
    """
    outputs, gradients = _given_by(before)
    _, of_a_second_call = _given_by(before)
    outputs_checkpointed, gradients_checkpointed = _given_by(after)
    for one, other in zip(outputs, outputs_checkpointed, strict=True):
        if distance([other], [one]) > _gate(one):
            return False
    rounding = ROUNDING_OF_ALL * math.hypot(*(norm([t]) for t in gradients))
    for one, second, other in zip(gradients, of_a_second_call, gradients_checkpointed, strict=True):
        by_itself = min(BY_ITSELF * distance([second], [one]), rounding)
        if distance([other], [one]) > max(_gate(one), by_itself):
            return False
    return True


def _gate(t: Tensor) -> float:
    """How far another call's may be from it, by norms."""
    return MODULE_GATES[t.dtype][1] * norm([t])


def _given_by(iteration: Iteration) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, gradients) of one call, the floating ones."""
    torch.manual_seed(0)
    iteration.between()
    given = [t.clone() for t in iteration.run()], [t.clone() for t in iteration.gradients().values()]
    iteration.between()
    outputs, gradients = ([t for t in tensors if t.is_floating_point()] for tensors in given)
    return outputs, gradients


TECHNIQUE = Technique("checkpointing", "layers that are computed again in the backward", find)
