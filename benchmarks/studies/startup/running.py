"""What does not need a process of its own: how often shapes are compiled anew, and what a call takes once that is done.
"""
import time
from collections.abc import Iterator, Sequence

import torch

from benchmarks.measure.modules import Checked
from benchmarks.studies.startup.keeping import NONE
from benchmarks.studies.startup.stack import (
    BY_LAYER,
    WHOLE,
    InItsPrecision,
    Stack,
    compiled,
    errors,
    gates,
    kind_of,
    sample,
)
from common import steps
from common.block.config import BlockConfig
from common.measure.cases import Case, Group, Setting
from common.measure.subject import Subject, require
from common.phases import Phase
from common.report.result import Result
from common.runtime import compiler, iteration
from common.runtime.iteration import BOTH

LENGTHS = (80, 96, 112, 144, 1)        # of sequences; none is a width: torch takes equal sizes for the same
DYNAMIC = (None, False, True)
PER_CALL = "per call"


def of_shapes(config: BlockConfig, device: torch.device, seed: int, dynamic: bool | None, result: Result
              ) -> Iterator[tuple[int, int, float]]:
    """(length, graphs so far, seconds of its first call) of each, by one block compiled so. Raises Failed."""
    torch._dynamo.reset()
    compiler.allow_many_graphs()
    stack = Stack(config, 1, seed, device)
    call = InItsPrecision(torch.compile(stack.forward, fullgraph=True, dynamic=dynamic), config)
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    gate = gates(kind_of(config, device), 1)["branch"]
    for length in LENGTHS:
        x, dy = sample(config.replace(seq_len=length), seed, device)
        began = time.perf_counter()
        with torch.no_grad():
            y = call(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        error = errors(stack, x, dy, y, with_gradients=False)["branch"]
        result.errors["branch"] = max((error, gate), result.errors.get("branch", (0.0, gate)))
        require(f"branch at {length} tokens", error, gate)
        yield length, counted["unique_graphs"] - before, seconds


def group(config: BlockConfig, layers: int) -> Group:
    """So many layers without a compiler, compiled whole, and by layer: what a call takes, in the same rounds."""
    ways: Sequence[tuple[str, str]] = ((NONE, WHOLE), ("compiled", WHOLE), ("compiled", BY_LAYER))
    return Group([_case(name, config, layers, form) for name, form in ways], limited=False, may_not_fit=True)


def _case(name: str, config: BlockConfig, layers: int, form: str) -> Case:
    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        if name != NONE and (missing := compiler.missing(setting.device)):
            raise NotImplementedError(missing)
        stack = Stack(config, layers, setting.seed, setting.device)
        x, dy = sample(config, setting.seed, setting.device)
        call = InItsPrecision(stack.forward if name == NONE else compiled(stack, form), config)
        result.matmul = kind_of(config, setting.device)
        setting.say(Phase.CHECKING, "against FP64")
        allowed = gates(result.matmul, layers)
        subject = Checked(call, [x], [dy], dict(stack.named_parameters()),
                          (allowed["branch"], allowed["parameter gradient"]))
        once = iteration.of_call(call, [x], [dy], subject.parameters, BOTH)
        once.between()
        (y,) = once.run()
        for what, error in errors(stack, x, dy, y, with_gradients=True).items():
            result.errors[what] = error, allowed[what]
            require(what, error, allowed[what])
        once.between()
        return subject
    return Case(name, prepare, config, steps.load(2).traits,
                variant={"layers": layers, "form": form, "measured": PER_CALL})
