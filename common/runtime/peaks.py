"""A machine's peaks by three yardsticks: what it sustains, what it reaches in a burst, what its data sheet says.

`SUSTAINED`: the block's own work, back to back until the clocks have settled. A GPU at its power cap stays there.
`BURST`: the best short sample after a rest. No work of a second keeps that up where power is short.
`DATA_SHEET`: the vendor's dense figures, where they are known.
"""
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ..block.workload import ATTENTION, COPY, MATMUL, MEMORY, Operation, Workload
from . import machine
from .data_sheets import data_sheet
from .iteration import BOTH
from .limit import Peaks
from .pieces import Work, attention_work, copy_work, matmul_work, multiplies
from .timing import clock_for, nothing

SUSTAINED, BURST, DATA_SHEET = YARDSTICKS = ("sustained", "burst", "data sheet")
LARGEST_SHAPES = 4                         # of the work's matmuls whose rates are measured: smaller ones are slower
_FUSED = ("float16", "bfloat16")           # dtypes in which fused attention is measured apart
_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


# ----------------------------------------------------------------------------------------------------------- in a burst


def measure_burst(workload: Workload, device: torch.device, known: Peaks | None = None) -> Peaks:
    """The best matmul rate per dtype over the work's largest shapes and a large square, and the copy bandwidth.

    What `known` holds already is taken from there. Best rates, each after a short rest: a GPU at its power limit
    multiplies slower, and how warm the last matmul left it must not decide what the next one is credited with. Random
    operands: zeros run faster than data.
    """
    own = {operation.shape for operation in workload.forward if operation.kind == MATMUL}
    shapes = {*sorted(own, key=math.prod)[-LARGEST_SHAPES:], square(device)}
    rates = dict(known.flops) if known else {}
    for name in sorted(arithmetics(workload) - rates.keys()):
        rates[name] = max(_matmul_rate(shape, name, device) for shape in sorted(shapes) if multiplies(shape, name))
    if known and known.bandwidth:
        return Peaks(rates, known.bandwidth)
    return Peaks(rates, _copy_rate(device))


def square(device: torch.device) -> tuple[int, int, int]:
    """The shape that every peak of a matmul is held against: a slow peak of the work's own shapes would flatter it."""
    side = 8192 if device.type == "cuda" else 1024
    return side, side, side


def _matmul_rate(shape: tuple[int, ...], dtype: str, device: torch.device) -> float:
    """FLOP/s of an [m, k] x [k, n] matmul."""
    m, k, n = shape
    return 2 * m * k * n / _best_seconds(matmul_work("forward", m, k, n, dtype, device), device)


def _copy_rate(device: torch.device) -> float:
    """Bytes/s that are read and written."""
    copy, moved = copy_work(device)
    return moved / _best_seconds(copy, device)


def _best_seconds(work: Callable, device: torch.device) -> float:
    """The best of the samples that fit into about a tenth of a second, after a rest and a warm-up."""
    clock = clock_for(device)
    time.sleep(0.2 if device.type == "cuda" else 0)
    first = min(clock.sample(work, nothing, 2))
    return min(clock.sample(work, nothing, max(3, min(50, int(100 / first))))) / 1e3


# ------------------------------------------------------------------------------------------------------------ sustained


@dataclass(frozen=True)
class Method:
    """How a sustained rate is measured, in seconds: fixed before anything is compared with it."""
    look: float                    # a look is that much work with nothing in between
    trial: float                   # of each piece of work; those within `close` of the best are looked at
    elements: int                  # of an input at the least: a smaller one gets more tokens
    close: float = 0.95
    finalists: int = 2             # at most
    agree: float = 0.01            # looks that differ by no more have settled
    most_looks: int = 3            # the rate is the mean of the last two


# The power controller of an H200 swings with a period of about a second: a look takes all of it in.
METHODS = {"cuda": Method(look=1.0, trial=0.1, elements=2**24), "cpu": Method(look=0.05, trial=0.01, elements=2**18)}


@dataclass
class Sustained:
    """A sustained rate, in FLOP/s or bytes/s, and how it came about."""
    rate: float
    work: Work
    seconds: float                                               # of the last two looks
    settled: bool
    state: dict[str, Any] = field(default_factory=dict)          # the machine's in the last look
    in_rounds: list[float] = field(default_factory=list)         # rates in the same rounds as the steps'
    square: float | None = None                                  # the rate of a large square, of a matmul


def filling(operation: Operation, device: torch.device) -> Operation:
    """The same on so many tokens, or sequences, that launching it takes no time beside it."""
    place = 1 if operation.layout == "weight gradient" else 0            # of the tokens, or the sequences
    shape = list(operation.shape)
    others = shape[:place] + shape[place + 1:]
    elements = shape[place] * (math.prod(others) if operation.kind == ATTENTION else min(others))
    times = max(1, math.ceil(METHODS[device.type].elements / elements))
    shape[place] *= times
    return dataclasses.replace(operation, shape=tuple(shape), flops=times * operation.flops)


def measure_sustained(workload: Workload, name: str, device: torch.device) -> Sustained:
    """The sustained rate of `name`, an operation's. The best of all work of that kind counts."""
    method = METHODS[device.type]
    trials = []
    for work in list(_work(workload, name, device)) or [_square_work(name, device)]:     # attention by hand alone
        seconds, _ = _look(work, method.trial, device)
        trials.append((work.amount / seconds, work))
    trials.sort(key=lambda trial: -trial[0])
    best_rate, _ = trials[0]
    finals = [steady(work, device) for rate, work in trials[:method.finalists] if rate >= method.close * best_rate]
    best = max(finals, key=lambda sustained: sustained.rate)
    if name != COPY and " " not in name:
        best.square = steady(_square_work(name, device), device).rate
    return best


def _square_work(name: str, device: torch.device) -> Work:
    shape = square(device)
    return Work(f"square: {list(shape)}", matmul_work("forward", *shape, name, device), 2.0 * math.prod(shape))


def _work(workload: Workload, name: str, device: torch.device) -> Iterator[Work]:
    if name == COPY:
        call, moved = copy_work(device)
        yield Work(f"copy of {moved / 2**31:g} GiB", call, moved)
        return
    dtype, _, fused = name.partition(" ")
    for operation in workload.operations(BOTH):
        if fused and operation.rate == name:
            yield from _attentions(filling(operation, device), device)
        elif not fused and operation.kind == MATMUL:
            filled = filling(operation, device)
            if not multiplies(filled.shape, dtype):
                continue
            m, k, n = filled.shape
            yield Work(f"{operation.name}: [{m}, {k}] x [{k}, {n}]",
                       matmul_work(operation.layout, m, k, n, dtype, device), filled.flops)


def _attentions(operation: Operation, device: torch.device) -> Iterator[Work]:
    """By every backend that has a kernel for it."""
    for backend in _BACKENDS if device.type == "cuda" else (None,):
        try:
            call = attention_work(operation.shape, operation.arithmetic, operation.layout == "backward", backend,
                                  device)
        except RuntimeError:
            continue
        kind = backend.name.lower() if backend else "torch's choice"
        yield Work(f"{operation.name}, {kind}: {list(operation.shape)}", call, operation.flops)


def steady(work: Work, device: torch.device) -> Sustained:
    """Repeat it with nothing in between, look by look, until two looks in a row agree; the rate of those two."""
    method = METHODS[device.type]
    looks: list[float] = []
    while True:
        seconds, state = _look(work, method.look, device)
        looks.append(seconds)
        settled = len(looks) > 1 and abs(looks[-1] - looks[-2]) <= method.agree * looks[-2]
        if settled or len(looks) == method.most_looks:
            rate = work.amount / statistics.mean(looks[-2:])
            return Sustained(rate, work, 2 * method.look, settled, state)


def _look(work: Work, seconds: float, device: torch.device) -> tuple[float, dict[str, Any]]:
    """(seconds of a repetition over about that long, the machine's state meanwhile)."""
    clock = clock_for(device)
    first = min(clock.sample(work.call, nothing, 2)) / 1e3
    count = max(1, round(seconds / max(first, 1e-6)))
    state: dict[str, Any] = {}
    total_ms = clock.together(work.call, count, lambda: state.update(machine.state(device)))
    return total_ms / 1e3 / count, state


# ------------------------------------------------------------------------------------------------------ of this machine


class MeasuredPeaks:
    """This machine's peaks, each measured when it is first asked for, and once more where a row passes it.

    Whatever else ran meanwhile made them too low: the better of two measurements counts. Sustained ones are those of
    the work that first asked for them by `sustain`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.known = Peaks({}, 0.0)                              # in a burst
        self.sustained: dict[str, Sustained] = {}                # as `Peaks.flops` has the names, and COPY
        name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""
        self.sheet = data_sheet(name)
        self._twice: set[frozenset[str]] = set()

    def of(self, workload: Workload) -> Peaks:
        """Those in a burst that are known so far, with those of this work."""
        if not (arithmetics(workload) <= self.known.flops.keys() and self.known.bandwidth):
            self.known = measure_burst(workload, self.device, self.known)
        return self.known

    def sustain(self, workload: Workload) -> None:
        """Measure what of this work is not known yet to be sustained."""
        for name in sorted(_rates(workload) - self.sustained.keys()):
            self.sustained[name] = measure_sustained(workload, name, self.device)
            self._is_a_peak(name)

    def release(self) -> None:
        """Free the tensors of the sustained work, where nothing runs it again: they would count as the block's."""
        for sustained in self.sustained.values():
            sustained.work = dataclasses.replace(sustained.work, call=nothing)

    def by_yardstick(self, workload: Workload) -> dict[str, Peaks]:
        """Yardstick -> peaks, of those that know this work."""
        yardsticks = {BURST: self.of(workload)}
        if _rates(workload) <= self.sustained.keys():
            rates = {name: sustained.rate for name, sustained in self.sustained.items()}
            yardsticks[SUSTAINED] = Peaks(rates, rates.pop(COPY))
        if self.sheet and arithmetics(workload) <= self.sheet[0].flops.keys():
            yardsticks[DATA_SHEET] = self.sheet[0]
        return yardsticks

    def again(self, workload: Workload) -> bool:
        """Measure those of this work once more. False where that has been done."""
        names = frozenset(_rates(workload))
        if names in self._twice:
            return False
        self._twice.add(names)
        second = measure_burst(workload, self.device)
        rates = dict(self.known.flops)
        for name, rate in second.flops.items():
            rates[name] = max(rate, rates.get(name, 0.0))
        self.known = Peaks(rates, max(self.known.bandwidth, second.bandwidth))
        for name in sorted(names & self.sustained.keys()):
            self.raise_to(name, measure_sustained(workload, name, self.device))
        return True

    def raise_to(self, name: str, second: Sustained) -> None:
        """The better of two counts."""
        if second.rate > self.sustained[name].rate:
            second.in_rounds = self.sustained[name].in_rounds
            self.sustained[name] = second
            self._is_a_peak(name)

    def took_part(self, name: str, milliseconds: list[float]) -> None:
        """What a sustained piece of work took in the same rounds as the steps. Were it faster there, that counts."""
        sustained = self.sustained[name]
        sustained.in_rounds += [1e3 * sustained.work.amount / ms for ms in milliseconds]
        sustained.rate = max(sustained.rate, statistics.median(sustained.in_rounds))
        self._is_a_peak(name)

    def _is_a_peak(self, name: str) -> None:
        """What is sustained can be had in a burst, too: it looked at more shapes."""
        rate = self.sustained[name].rate
        if name == COPY:
            self.known = Peaks(self.known.flops, max(self.known.bandwidth, rate))
        elif name in self.known.flops:
            self.known = Peaks(self.known.flops | {name: max(self.known.flops[name], rate)}, self.known.bandwidth)

    def in_words(self, yardstick: str = BURST) -> str:
        """float16 812 TFLOP/s; copy 4.1 TB/s (read + written)."""
        if yardstick == DATA_SHEET:
            return f"{_in_words(self.sheet[0])}; {self.sheet[1]}" if self.sheet else "n/a: not known here"
        if yardstick == BURST:
            return _in_words(self.known)
        if not self.sustained:
            return "n/a"
        rates: list[str] = []
        for name, sustained in sorted(self.sustained.items()):
            if name.endswith(" backward"):                        # stands beside its forward
                rates[-1] += f" and {_terascale(sustained.rate)} (backward)"
            elif name != COPY:
                rates.append(f"{name} {_terascale(sustained.rate)}")
        return f"{', '.join(rates)} TFLOP/s; copy {self.sustained[COPY].rate / 1e12:.3g} TB/s"


def arithmetics(workload: Workload) -> set[str]:
    """What its FLOPs are in."""
    return {operation.arithmetic for operation in workload.operations(BOTH) if operation.kind != MEMORY}


def _rates(workload: Workload) -> set[str]:
    """The sustained rates that it asks for."""
    rates = {COPY}
    for operation in workload.operations(BOTH):
        fused = operation.kind == ATTENTION and operation.arithmetic in _FUSED
        rates.add(operation.rate if fused else operation.arithmetic or COPY)
    return rates


def _terascale(rate: float) -> str:
    """In units of 1e12."""
    return f"{rate / 1e12:.0f}" if rate > 1e13 else f"{rate / 1e12:.2f}"


def _in_words(peaks: Peaks) -> str:
    rates = []
    for name, rate in sorted(peaks.flops.items()):
        rates.append(f"{name} {_terascale(rate)} TFLOP/s")
    return f"{', '.join(rates)}; copy {peaks.bandwidth / 1e12:.3g} TB/s (read + written)"
