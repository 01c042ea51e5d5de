"""Where the time of an iteration goes: by a person's line and module, by kind of work, and what is left idle.

One iteration runs under the profiler. Every torch-level call of the forward is a named range there, and an operator of
the backward has the sequence number of the forward's operator that it belongs to.
"""
import contextlib
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.assistant.graph import with_stars
from benchmarks.assistant.program import Program
from benchmarks.assistant.source import Place
from benchmarks.assistant.trace import Call, Functions, Trace, modules_running
from benchmarks.measure.calls import clean
from common.measure.attribution import NO_FUSION_BY_INDUCTOR, category
from common.runtime import timing
from common.runtime.iteration import Iteration

BY_HAND, ATTENTION, MATMUL, CONVOLUTION = "attention by hand", "attention", "matmul", "convolution"
TRANSPOSES, PASSES, IDLE = "layout transposes", "passes over memory", "idle"
COMPILED, BACKWARD, NO_LINE = "compiled code", "the backward alone", "no line of the model"
# Kernels of cuDNN that turn NCHW into NHWC and back: its convolutions on tensor cores take NHWC alone.
_TRANSPOSE = re.compile(r"nchwtonhwc|nhwctonchw", re.IGNORECASE)
_CONVOLUTION = re.compile(NO_FUSION_BY_INDUCTOR + r"(conv(?!ert)|[fdw](prop|grad)_)", re.IGNORECASE)
_RANGE = "call "
_STEP = "autograd::engine::evaluate_function"
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")       # names of events that hold compiled code
_NO_WORK = ("autograd::", _RANGE, "cuda", "Optimizer", "Activity")     # names of events that compute nothing themselves
_SAMPLES = 3


@dataclass(frozen=True)
class Spent:
    """The time of one kind of work at one line."""
    kind: str
    place: Place | None                        # its line
    module: str
    count: int                                 # calls in one forward
    ms: float                                  # of forward and backward together, where there is one
    elsewhere: str = ""                        # where it is, without a line


@dataclass(frozen=True)
class _Where:
    """What is one row of a kind of work."""
    place: Place | None = None                 # a line
    elsewhere: str = ""                        # where it is, without a line
    modules: str = ""                          # and of which modules there


@dataclass
class Spending:
    """Where the time of an iteration goes."""
    total_ms: float                            # by the clock, without the profiler
    spent: list[Spent] = field(default_factory=list)                   # the most first

    @property
    def idle_ms(self) -> float:
        """In which nothing was computed: on a GPU it waits for the host, on a CPU that is Python's."""
        return max(0.0, self.total_ms - sum(each.ms for each in self.spent))

    def by_kind(self) -> dict[str, float]:
        """ms by kind of work, the most first; idle at the end."""
        times: dict[str, float] = {}
        for each in self.spent:
            times[each.kind] = times.get(each.kind, 0.0) + each.ms
        return dict(sorted(times.items(), key=lambda item: -item[1])) | {IDLE: self.idle_ms}

    def percent(self, ms: float) -> float:
        """Of the whole; more than by the clock would be the profiler's own."""
        return 100 * ms / max(self.total_ms, sum(each.ms for each in self.spent))

    def by_the_clock(self, ms: float) -> float:
        """So much by the profiler, without its own time: in proportion, where it saw more than the clock."""
        return self.percent(ms) / 100 * self.total_ms


def spending(model: nn.Module, program: Program, iteration: Iteration, device: torch.device) -> Spending:
    """Run an iteration a few times by the clock, and once under the profiler.

    Compiled code is no row of lines: its time is known by kind alone. Where some runs, ranges are left out: Dynamo
    would compile them, too.
    """
    iteration.between()
    iteration.run()
    is_compiled = _runs_compiled_code(iteration)
    total_ms = statistics.median(timing.clock_for(device).sample(iteration.run, iteration.between, _SAMPLES))
    recorded = Trace()
    paths = {id(module): clean(name) for name, module in model.named_modules()}
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    iteration.between()
    with profile(activities=activities, acc_events=True) as profiler, contextlib.ExitStack() as stack:
        if not is_compiled:
            inside = stack.enter_context(modules_running(paths))
            stack.enter_context(_Ranges(recorded, inside))
        iteration.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    iteration.between()
    by_hand = [attention.place for attention in program.analysis.attentions if attention.place]
    return Spending(total_ms, _spent(list(profiler.events()), recorded, by_hand, device))


def _runs_compiled_code(iteration: Iteration) -> bool:
    """Whether any runs in it. The timeline is searched as a text: making events of it takes longer, of long loops most
    of the time that reading takes.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        iteration.between()
        iteration.run()
    with tempfile.TemporaryDirectory(prefix="timeline-") as folder, contextlib.suppress(OSError):
        written = Path(folder) / "timeline.json"
        profiler.export_chrome_trace(str(written))
        text = written.read_bytes()
        if text.rstrip().endswith(b"}"):                       # whole: the profiler is silent where a disk is full
            return any(name.encode() in text for name in _COMPILED)
    return any(event.name.startswith(_COMPILED) for event in profiler.events())


class _Ranges(Functions):
    """Each torch-level call is a range of the profiler's."""

    def called(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        with record_function(f"{_RANGE}{len(self.recorded.calls) - 1}"):
            return func(*args, **kwargs)


def _spent(events: Iterable[FunctionEvent], recorded: Trace, by_hand: list[Place], device: torch.device
           ) -> list[Spent]:
    events = list(events)
    owners = _owners(events, recorded.calls)
    times: dict[tuple[str, _Where], float] = {}
    for event in events:
        for name, ms in _own_work(event, device):
            call = owners(event)
            where = _where(call, by_hand) if call else _Where(elsewhere=_outside(event))
            kind = BY_HAND if where.place in by_hand else kind_of(name)
            times[kind, where] = times.get((kind, where), 0.0) + ms
    calls: dict[_Where, list[Call]] = {}
    for call in recorded.calls:
        calls.setdefault(_where(call, by_hand), []).append(call)
    spent = [_row(kind, where, calls.get(where, []), ms) for (kind, where), ms in times.items()]
    return sorted(spent, key=lambda each: -each.ms)


def _where(call: Call, by_hand: list[Place]) -> _Where:
    """A line; what a library calls has none, and is told by its module, of all layers one path."""
    if place := _line(call, by_hand):
        return _Where(place)
    return _Where(None, NO_LINE, ".".join("*" if part.isdigit() else part for part in call.module.split(".")))


def _outside(event: FunctionEvent) -> str:
    """Where an event is that belongs to no call."""
    around: FunctionEvent | None = event
    while around is not None:
        if around.name.startswith(_COMPILED):
            return COMPILED
        if around.name.startswith(_STEP):
            return BACKWARD
        around = around.cpu_parent
    return NO_LINE


def _row(kind: str, where: _Where, calls: list[Call], ms: float) -> Spent:
    counts = Counter((call.name, call.place) for call in calls)
    count = min(counts.values(), default=1)                            # a function may be called twice in one line
    return Spent(kind, where.place, with_stars([call.module for call in calls]), count, ms, where.elsewhere)


def _line(call: Call, by_hand: list[Place]) -> Place | None:
    """Its line; all lines of an attention by hand are one."""
    if call.place is None:
        return None
    around = [each for each in by_hand if each.holds(call.place)]
    return around[0] if around else call.place


def kind_of(name: str) -> str:
    """What a kernel does (an operator on a CPU), by its name."""
    known = category(name)
    if known == "attention":                               # cuDNN's has fprop in its name, too
        return ATTENTION
    if is_transpose(name):
        return TRANSPOSES
    if _CONVOLUTION.search(name):
        return CONVOLUTION
    return MATMUL if known == "GEMM" else PASSES


def is_transpose(kernel: str) -> bool:
    """Whether it lays a tensor out for a convolution, or back."""
    return bool(_TRANSPOSE.search(kernel))


def _own_work(event: FunctionEvent, device: torch.device) -> list[tuple[str, float]]:
    """(name, ms) of what it computes itself: on a GPU the kernels that it launched."""
    if device.type == "cuda":
        return [(kernel.name, kernel.duration / 1e3) for kernel in event.kernels]
    if event.name.startswith(_NO_WORK):
        return []
    return [(event.name, event.self_cpu_time_total / 1e3)]


def _owners(events: list[FunctionEvent], calls: list[Call]) -> Callable[[FunctionEvent], Call | None]:
    """Event -> the call of the forward that it belongs to."""
    by_sequence: dict[int, Call] = {}
    for event in events:
        around = _around(event)
        if around and around.name.startswith(_RANGE) and around is not event and event.sequence_nr >= 0:
            by_sequence[event.sequence_nr] = _call_of(around, calls)   # the last one of a number made the backward's

    def owner(event: FunctionEvent) -> Call | None:
        around = _around(event)
        if around is None:
            return None
        if around.name.startswith(_RANGE):
            return _call_of(around, calls)
        return by_sequence.get(around.sequence_nr)
    return owner


def _call_of(around: FunctionEvent, calls: list[Call]) -> Call:
    return calls[int(around.name.removeprefix(_RANGE))]


def _around(event: FunctionEvent | None) -> FunctionEvent | None:
    """The innermost call of the forward or step of the backward that it lies in; autograd itself is such a call."""
    while event is not None and not event.name.startswith((_RANGE, _STEP)):
        event = event.cpu_parent
    return event
