"""What one iteration asks of the driver: so many graphs, so many kernels one by one, so many copies."""
import contextlib
import logging
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LAUNCHED, KEPT = "graphs launched", "kept by graphs"       # the metrics: calls, bytes
HOST, OF_ONE_TOKEN = "host in a row", "host"               # ms to launch on a GPU; ms of one token on a CPU
ROWS, IN_A_ROW = 12, 6                     # of iterations whose launches are timed
_GRAPH = re.compile(r"^cu(da)?GraphLaunch")
_KERNEL = re.compile(r"^cu(da)?LaunchKernel")
_COPY = re.compile(r"Memcpy DtoD|copy", re.IGNORECASE)


@dataclass(frozen=True)
class Launches:
    """Of one iteration on a GPU."""
    graphs: int                            # calls that launch a whole graph
    kernels: int                           # calls that launch one kernel
    copy_ms: float                         # the GPU's time in kernels that copy


def count(run: Callable[[], object]) -> Launches:
    """Run an iteration under the profiler. A graph that was skipped shows here: nobody says so else."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return of_events(profiler.events())


def host_ms(run: Callable[[], object], between: Callable[[], None]) -> float:
    """The host's median time to launch an iteration amid others, in ms. It never waits for the GPU meanwhile.

    Behind a wait it would be slower: its caches are cold then. Few enough are launched in a row for the GPU's queue.
    """
    times = []
    for _ in range(ROWS):
        torch.cuda.synchronize()
        for place in range(IN_A_ROW):
            between()
            start = time.perf_counter_ns()
            run()
            if place:
                times.append((time.perf_counter_ns() - start) / 1e6)
    torch.cuda.synchronize()
    between()
    return statistics.median(times)


@contextlib.contextmanager
def reasons() -> Iterator[list[str]]:
    """Why torch.compile skipped graphs meanwhile: it tells its log alone, and that is not shown unless it is asked for.
    """
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage().splitlines()[0])
    log = torch._logging.getArtifactLogger("torch._inductor.cudagraph_utils", "cudagraphs")
    handler, level = Kept(), log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def of_events(events: Iterable[Any]) -> Launches:
    """The same from what a profiler saw: calls of the driver on the CPU, and kernels and copies on the GPU."""
    calls: list[Any] = []
    on_gpu: list[Any] = []
    for event in events:
        (on_gpu if event.device_type == DeviceType.CUDA else calls).append(event)
    copied = [event.time_range.elapsed_us() for event in on_gpu if _COPY.search(event.name)]
    return Launches(sum(bool(_GRAPH.match(call.name)) for call in calls),
                    sum(bool(_KERNEL.match(call.name)) for call in calls), sum(copied) / 1e3)
