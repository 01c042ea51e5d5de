"""Two works that a finding turns on, timed in the same rounds while a model is read."""
import torch

from common.runtime import rounds, timing
from common.runtime.iteration import Iteration

Ratio = tuple[float, float, float]         # how many times as fast, and its 95 % interval
WORTH_IT = 1.02                            # of the lower end of that
ROUNDS, MILLISECONDS = 7, 20.0             # of each, and for each sample


def times_as_fast(before: Iteration, after: Iteration, device: torch.device) -> Ratio:
    """How many times as fast the other is."""
    return rounds.paired_ratio(*milliseconds(before, after, device))


def milliseconds(before: Iteration, after: Iteration, device: torch.device) -> tuple[list[float], list[float]]:
    """The samples of both; those at one place come from one round."""
    works = {"before": before, "after": after}
    clock = timing.clock_for(device)
    if isinstance(clock, timing.EventClock):
        clock.settle_ms = clock.burst_ms = MILLISECONDS
    samples = rounds.interleaved({name: work.run for name, work in works.items()}, clock, ROUNDS,
                                 {name: work.between for name, work in works.items()})
    return samples["before"][0], samples["after"][0]


def pays(gain: Ratio) -> bool:
    """Whether it is worth the work: so much faster, as far as the samples can tell."""
    return gain[1] >= WORTH_IT
