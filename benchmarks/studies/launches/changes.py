"""What a way of launching does where something moves that its graphs have seen.

A graph holds addresses. What lies elsewhere afterwards is copied, recorded anew, refused, or missed without a word.
Each change is tried once, in the forward alone.
"""
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.studies.launches.ways import BY_HAND, CALLABLES, ONE_BY_ONE, REDUCE_OVERHEAD, build
from common import parameters, steps
from common.block import oracle
from common.block.config import BlockConfig
from common.measure.measurement import NOT_A_GPU
from common.measure.session import Session
from common.outcome import Failed, Outcome, in_a_line, judged
from common.phases import Phase
from common.report.record import Record, record
from common.report.result import Result
from common.runtime import iteration, replay
from common.runtime.iteration import FORWARD

ASKED = ((2, BY_HAND), (2, CALLABLES), (3, REDUCE_OVERHEAD))
IN_PLACE, ELSEWHERE = "parameters, in place", "parameters, elsewhere"
OTHER_INPUT, ONE_SEQUENCE = "another input", "one sequence of the batch"
CHANGES = (IN_PLACE, ELSEWHERE, OTHER_INPUT, ONE_SEQUENCE)
FOLLOWS, MISSED = "follows", "missed, silently"
FACTOR = 1.25                              # of the parameters: enough to change the branch by far more than rounding
APART = 0.1                                # relative error of a branch from which on two are not the same
BATCH, SEQ_LEN = 4, 128                    # of the shape that they are tried at
CHANGED = "after a change"                 # the metric: ms of a call before, of the first one behind it, of later ones
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Happened:
    """What became of a change."""
    what: str                              # it follows, it missed it, or why it refused
    usual_ms: float                        # of a call before
    first_ms: float | None = None          # of the first call behind it
    later_ms: float | None = None


def after(number: int, way: str, change: str, config: BlockConfig, seed: int, device: torch.device) -> Happened:
    """Build it, record its graphs, change something, and call it. Raises Failed where it is wrong without a change."""
    values = parameters.seeded(config.replace(amp_dtype=None), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    shape = config.batch_size, config.seq_len, config.hidden_size
    x, other = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    block = build(number, way if way != BY_HAND else ONE_BY_ONE, config, values, device)
    plain = steps.load(2).build(config, values, device)
    with torch.no_grad():
        call = by_hand(block, x) if way == BY_HAND else block
        for _ in range(3):                                       # it warms up, records, replays
            y = call(x)
        if _apart(x, y, plain(x)) > APART:
            raise Failed("it is wrong before anything was changed")
        usual_ms = statistics.median(_timed(call, x)[1] for _ in range(10))
        before = [parameter.data for parameter in block.parameters()]      # nothing else may come to lie there
        x = _changed(change, block, x, other)
        parameters.load(plain, {name: parameter.detach() for name, parameter in block.named_parameters()}, device)
        try:
            y, first_ms = _timed(call, x)
        except RuntimeError as error:
            return Happened(f"refused: {in_a_line(error)}", usual_ms)
        what = FOLLOWS if _apart(x, y, plain(x)) <= APART else MISSED
        later_ms = statistics.median(_timed(call, x)[1] for _ in range(10))
        del before
    return Happened(what, usual_ms, first_ms, later_ms)


def by_hand(call: Call, x: Tensor) -> Call:
    """A call that replays what was captured of x. It takes an input, and has no way to look at it."""
    launch, written = replay.capture(iteration.of_call(call, [x], [], {}, FORWARD))
    (y,) = written

    def replay_it(x: Tensor) -> Tensor:
        launch()
        return y
    return replay_it


def measure(session: Session, base: BlockConfig, of_steps: Sequence[int], of_ways: Sequence[str]) -> None:
    """Try every change on those of `ASKED` that are of these steps and ways, and write a record of each."""
    config = base.replace(batch_size=BATCH, seq_len=min(base.seq_len, SEQ_LEN))
    for number, way in ASKED:
        if number not in of_steps or way not in of_ways:
            continue
        step = steps.load(number)
        for change in CHANGES:
            session.say(Phase.CHECKING, f"step {number}, {way}: {change}")
            result = Result(step.name, config, "float32", session.facts, step=number, traits=step.traits,
                            variant={"way": way, "change": change}, study=session.study, run=session.run)
            outcome: Outcome = result
            happened = None
            with judged(outcome, lambda error: "out of memory: give a smaller shape", foreign=True):
                if session.device.type != "cuda":
                    raise NotImplementedError(NOT_A_GPU)
                happened = after(number, way, change, config, session.seed, session.device)
            session.write([_record(result, happened)])


def _record(result: Result, happened: Happened | None) -> Record:
    if happened is None:
        return record(result, CHANGED, "ms", [], FORWARD)
    taken = [each for each in (happened.usual_ms, happened.first_ms, happened.later_ms) if each is not None]
    return record(result, CHANGED, "ms", taken, FORWARD, happened=happened.what)


def _changed(change: str, block: Callable, x: Tensor, other: Tensor) -> Tensor:
    """Change the parameters, or give another input."""
    for parameter in block.parameters() if change in (IN_PLACE, ELSEWHERE) else ():        # type: ignore[attr-defined]
        if change == IN_PLACE:
            parameter.mul_(FACTOR)
        else:
            parameter.data = parameter.data * FACTOR
    if change == OTHER_INPUT:
        return other
    return other[:1].clone() if change == ONE_SEQUENCE else x


def _timed(call: Call, x: Tensor) -> tuple[Tensor, float]:
    """(what a call returned, its milliseconds to the end)."""
    wait = functools.partial(torch.cuda.synchronize, x.device) if x.is_cuda else lambda: None
    wait()
    began = time.perf_counter()
    y = call(x)
    wait()
    return y, 1e3 * (time.perf_counter() - began)


def _apart(x: Tensor, y: Tensor, expected: Tensor) -> float:
    """How far two branches are from each other; far apart where their shapes differ."""
    if y.shape != expected.shape:
        return float("inf")
    return oracle.relative_error(y - x, (expected - x).double())
