"""A function whose forward and backward are timed apart: what a study of operations, not of blocks, measures."""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.block.workload import Workload
from common.measure.subject import Subject
from common.runtime import iteration, replay
from common.runtime.iteration import BACKWARD, Iteration

GATES = 1e-2, 1e-2                         # of a replay: output, gradient


class ApartSubject(Subject):
    """call(*inputs), forward and backward apart, on copies of `inputs`; some have no backward."""

    def __init__(self, call: Callable, inputs: Sequence[Tensor], seed: int, has_backward: bool = True,
                 workload: Workload | None = None):
        super().__init__(call, inputs, [], {}, GATES, workload)
        self.seed, self.has_backward = seed, has_backward

    def has(self, mode: str) -> bool:
        """Some have no backward."""
        return mode != BACKWARD or self.has_backward

    def iteration(self, mode: str) -> Iteration:
        """On copies of its own, one for each call."""
        copies = [list(map(copied, self.inputs)) for _ in range(self.calls(mode))]
        return iteration.of_copies(self.call, copies, mode, self.seed)

    def proof(self) -> replay.Proof:
        """A replay must follow other values of what it reads."""
        return replay.Proof(*self.gates, change=lambda tensor: tensor.mul_(-0.5))

    def replay(self, mode: str, captured: Callable[[], None] = lambda: None) -> tuple[Callable | None, str]:
        """All of it is made on the stream of the capture: a backward runs where its forward did."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            iterate = self.iteration(mode)
        return replay.verified(iterate, self.proof(), stream, captured)


def copied(tensor: Tensor) -> Tensor:
    """Another leaf with the same values, taking a gradient where the first does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
