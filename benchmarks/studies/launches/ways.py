"""The ways to launch a step's kernels, and the case of each: built, checked against FP64, its graphs recorded."""
import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.studies.launches.counting import reasons
from common import steps
from common.block.config import BlockConfig
from common.measure.cases import Case, Setting, step_case
from common.measure.measurement import NOT_A_GPU
from common.measure.subject import BlockSubject, Subject
from common.report.result import Result
from common.runtime import engine, replay
from common.runtime.iteration import MODES

ONE_BY_ONE, CALLABLES = "one by one", "make_graphed_callables"
REDUCE_OVERHEAD, NO_GRAPHS, MAX_AUTOTUNE = "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"
BY_HAND = "captured by hand"               # the session's own second way of launching: no case, a row of one
COMPILED = (REDUCE_OVERHEAD, NO_GRAPHS, MAX_AUTOTUNE)      # modes of torch.compile; its default is step 3, one by one
OF_ITS_OWN = (CALLABLES, REDUCE_OVERHEAD, MAX_AUTOTUNE)    # a call that replays graphs without being asked
WAYS = (ONE_BY_ONE, BY_HAND, CALLABLES, *COMPILED)
COMPILED_STEP = 3
STEPS = {2: (ONE_BY_ONE, CALLABLES), COMPILED_STEP: (ONE_BY_ONE, *COMPILED), 4: (ONE_BY_ONE, CALLABLES)}


class Launched:
    """A block that is called in some way; it stands for the block itself wherever that is asked for.

    A replay overwrites what the last one returned. So y is cloned while it is checked, and not while it is timed.
    """

    def __init__(self, block: nn.Module, way: str):
        self.block, self.way = block, way
        self.clones_output = True

    def __call__(self, x: Tensor) -> Tensor:
        if self.way in (REDUCE_OVERHEAD, MAX_AUTOTUNE):
            torch.compiler.cudagraph_mark_step_begin()     # what the last call returned may be overwritten
        y = self.block(x)
        return y.clone() if self.clones_output else y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)


def build(number: int, way: str, config: BlockConfig, values: dict[str, Tensor], device: torch.device) -> Launched:
    """A step's block that is launched that way. Raises NotImplementedError where its graphs can't be captured."""
    block = steps.load(number).build(config, values, device)
    if way != ONE_BY_ONE and engine.of_block(block).is_emulated:
        raise NotImplementedError("FP8 is emulated here: its kernels are not those that a graph would hold")
    if way in COMPILED:
        block.compile(mode=way, fullgraph=True, dynamic=False)
    if way == CALLABLES:
        shape = config.batch_size, config.seq_len, config.hidden_size
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))     # of zeros FP8 would learn no scale
        captured(block, x.to(device).requires_grad_())
    return Launched(block, way)


def captured(block: nn.Module, x: Tensor) -> None:
    """Replace its forward and backward by graphs, in place. Raises NotImplementedError with why that can't be."""
    replay.give_own_workspace()
    try:
        torch.cuda.make_graphed_callables(cast(Any, block), (x,))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        replay.end_failed_capture()
        raise NotImplementedError(f"it can't be captured: {str(error).splitlines()[0]}") from None


@dataclass
class LaunchedSubject(BlockSubject):
    """A block that is launched in some way, and the bytes that its graphs keep, by pass; "" for all passes at once."""
    kept: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)       # why torch.compile recorded no graph

    @property
    def way(self) -> str:
        return cast(Launched, self.call).way

    def replay(self, mode: str, captured: Callable[[], None] = lambda: None) -> tuple[Callable | None, str]:
        if self.way in OF_ITS_OWN:
            return None, ""                            # nothing to report: one row is all there is of it
        before = held_by_graphs(self.inputs[0].device)
        replayed = super().replay(mode, captured)
        self.kept[mode] = held_by_graphs(self.inputs[0].device) - before
        return replayed


def held_by_graphs(device: torch.device) -> int:
    """Bytes of a GPU's memory in the pools of graphs: nothing else may use them while a graph lives; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()                           # those of graphs that are gone
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] != (0, 0))


def case_of(number: int, way: str, config: BlockConfig, device: torch.device) -> Case:
    """A step at one size, launched one way."""
    step = steps.load(number)
    missing = NOT_A_GPU if device.type != "cuda" and way != ONE_BY_ONE else ""

    def build_it(config: BlockConfig, values: dict[str, Tensor], device: torch.device) -> nn.Module:
        return cast(nn.Module, build(number, way, config, values, device))
    of_step = step_case(step, config, device, missing=missing, build=build_it)

    def prepare(setting: Setting, result: Result) -> Subject:
        before = held_by_graphs(setting.device)
        with reasons() as skipped:
            checked = cast(BlockSubject, of_step.prepare(setting, result))
            fields = {each.name: getattr(checked, each.name) for each in dataclasses.fields(checked)}
            subject = LaunchedSubject(**fields, skipped=skipped)
            cast(Launched, subject.call).clones_output = False
            if way in OF_ITS_OWN:
                record_graphs(subject)
        if way in OF_ITS_OWN:
            subject.kept[""] = held_by_graphs(setting.device) - before
        return subject
    return dataclasses.replace(of_step, prepare=prepare, variant={"way": way})


def record_graphs(subject: Subject) -> None:
    """Run both passes often enough: a compiled call warms up, records, and replays from the third time on."""
    for mode in MODES:
        iteration = subject.iteration(mode)
        for _ in range(3):
            iteration.between()
            iteration.run()
        iteration.between()
    for tensor in subject.inputs:
        tensor.requires_grad_(False)               # as the forward alone will find it: else it is compiled once more
