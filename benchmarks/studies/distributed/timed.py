"""What a forward and backward of spread blocks takes on GPUs, beside the same blocks on each GPU alone.

Both are timed in the same rounds, on all ranks at once. How often each runs is decided by the first rank and told to
the others: where each decides for itself they end up with different numbers of collectives, and hang.
"""
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile

from benchmarks.studies.distributed import exposed, proof
from benchmarks.studies.distributed.exposed import Interval
from benchmarks.studies.distributed.parallel import Stack
from common.measure import attribution
from common.outcome import is_out_of_memory
from common.runtime import iteration, rounds
from common.runtime.iteration import BOTH, Iteration
from common.runtime.timing import clock_for

WARM_UP, LOOKS, PROFILED = 3, 3, 3     # iterations that warm up, that tell how long one takes, under the profiler
COMMUNICATION = "nccl"                 # in the name of each kernel that talks to other GPUs
RANGES = ("FSDP::", "nccl:", "c10d::") # begin the names of what the profiler shows as running and is no kernel


@dataclass
class Timed:
    """Of this rank: ms by round, spread and alone; ms of communication, and what of it no computation covers; ms of
    computation.
    """
    spread: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)       # empty: whole they do not fit on one GPU
    communication_ms: float = 0.0
    exposed_ms: float = 0.0
    computation_ms: float = 0.0
    computation_alone_ms: float = 0.0
    peak_bytes: int = 0                    # of a training step, AdamW's too: the most that was allocated at once


def agreed(value: Any) -> Any:
    """The first rank's, on all of them. Every rank must call it."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def all_can(can: bool) -> bool:
    """Whether every rank can. Every rank must call it."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, can)
    return all(said)


def timed(stack: Stack, make_alone: Callable[[], Stack], x: Tensor, dy: Tensor, count: int, seed: int,
          reached: Callable[[str], None]) -> Timed:
    """`count` rounds of a forward and backward, x and dy [B, S, E] of this rank's batch. Every rank must call it.

    `make_alone` makes the same blocks whole, on this GPU. `reached` hears of each phase.
    """
    times = Timed()
    reached("measuring memory")
    times.peak_bytes = peak_bytes(stack, x, dy) if x.is_cuda else 0
    works = {"spread": iteration_of(stack, x, dy)}
    reached("warming up")
    run(works["spread"], WARM_UP)
    reached("warming up alone")
    if not all_can(_add_alone(works, make_alone, x, dy)):
        works.pop("alone", None)
    clock = clock_for(x.device)
    runs = {name: work.run for name, work in works.items()}
    between = {name: work.between for name, work in works.items()}
    expected = {name: statistics.median(clock.sample(runs[name], between[name], LOOKS)) for name in works}
    samples = rounds.interleaved(runs, clock, count, between, seed, lambda number: reached(f"round {number}"),
                                 agreed(expected))
    times.spread = samples["spread"][0]
    times.alone = samples["alone"][0] if "alone" in works else []
    if not x.is_cuda:
        return times
    reached("profiling")
    talking, working = kernels(works["spread"])
    times.communication_ms = exposed.length(talking) / 1e6 / PROFILED
    times.exposed_ms = exposed.exposed(talking, working) / 1e6 / PROFILED
    times.computation_ms = exposed.length(working) / 1e6 / PROFILED
    if "alone" in works:
        _, working = kernels(works["alone"])
        times.computation_alone_ms = exposed.length(working) / 1e6 / PROFILED
    return times


def peak_bytes(stack: nn.Module, x: Tensor, dy: Tensor) -> int:
    """The most that this GPU holds at once during a training step with AdamW, whose averages are there already."""
    optimizer = proof.adamw(list(stack.parameters()))
    work = iteration_of(stack, x, dy)
    for last in (False, True):
        if last:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        work.between()
        work.run()
        optimizer.step()
    torch.cuda.synchronize()
    work.between()
    return torch.cuda.max_memory_allocated()


def kernels(work: Iteration) -> tuple[list[Interval], list[Interval]]:
    """(those that talk to other GPUs, those that compute) of some iterations, each as (begin, end) in nanoseconds."""
    run(work, 1)
    with profile(use_cpu=False, use_device="cuda", use_kineto=True) as profiler:
        run(work, PROFILED)
    talking: list[Interval] = []
    working: list[Interval] = []
    for begin, end, name in attribution.gpu_intervals(profiler):
        if not name.startswith(RANGES):
            which = talking if COMMUNICATION in name.lower() else working
            which.append((begin, end))
    return talking, working


def iteration_of(stack: nn.Module, x: Tensor, dy: Tensor) -> Iteration:
    """A forward and backward of it."""
    return iteration.of_call(stack, [x], [dy], dict(stack.named_parameters()), BOTH)


def run(work: Iteration, times: int) -> None:
    """So many times, to the end."""
    for _ in range(times):
        work.between()
        work.run()
    if work.reads[0].is_cuda:
        torch.cuda.synchronize()


def _add_alone(works: dict[str, Iteration], make_alone: Callable[[], Stack], x: Tensor, dy: Tensor) -> bool:
    """Whether the whole blocks fit beside the spread ones, and run."""
    try:
        works["alone"] = iteration_of(make_alone(), x, dy)
        run(works["alone"], WARM_UP)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
