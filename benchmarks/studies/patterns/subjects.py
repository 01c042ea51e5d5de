"""What the study of patterns times: a task, computed in one way; and what that way makes beforehand."""
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.patterns.ways import SDPA, Attend
from benchmarks.studies.patterns.tasks import Task
from common.block import evidence
from common.measure.subject import REPLAY_GATES, Subject
from common.outcome import in_a_line
from common.report.record import Record, record
from common.report.result import Result
from common.runtime.iteration import FORWARD

MASK, FIRST_CALLS = "mask", "first calls"  # the metrics beside time
BACKENDS = {"FlashAttention": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
            "memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION}
T = TypeVar("T")


@dataclass(frozen=True)
class Beforehand:
    """What was seen of a way before it was timed."""
    mask_ms: float                         # to make the mask that it keeps
    first_calls_s: float                   # of the first forward and backward, compiling included
    kernel: str = ""                       # of scaled_dot_product_attention: the kind that ran
    rejected: Mapping[str, str] = field(default_factory=dict)        # backend of it -> why it can't take the pattern


class PatternSubject(Subject):
    """A pattern by one way."""

    def __init__(self, call: Attend, inputs: Sequence[Tensor], task: Task, cotangent: Tensor, has_backward: bool,
                 beforehand: Beforehand):
        super().__init__(call, [t.detach() for t in inputs], [cotangent], {}, REPLAY_GATES, task.workload())
        self.has_backward, self.beforehand = has_backward, beforehand

    def has(self, mode: str) -> bool:
        """Some have no backward."""
        return mode == FORWARD or self.has_backward


def first_calls(attend: Attend, given: Sequence[Tensor], has_backward: bool, device: torch.device) -> float:
    """Seconds by which the first forward and backward take longer than the second: compiling."""
    def step() -> None:
        with torch.set_grad_enabled(has_backward):
            y = attend(*given)
        if has_backward:
            torch.autograd.grad(y, list(given), torch.ones_like(y))
    first, again = (timed(step, device)[1] for _ in range(2))
    return max(0.0, first - again)


def built(way: str, task: Task) -> tuple[Attend, float]:
    """(the function, milliseconds for making what it keeps: the second time, as in a process that goes on)."""
    for _ in range(2):
        attend, seconds = timed(lambda: task.build(way), task.shape.device)
    return attend, 1e3 * seconds


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """(what it gives, seconds until the device has done it)."""
    began = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def kernel_of(attend: Attend, given: Sequence[Tensor], device: torch.device) -> str:
    """The kind of attention kernel that a forward runs: "FlashAttention", or "by hand" where it is its formula."""
    def forward() -> None:
        with torch.no_grad():
            attend(*given)
    return evidence.judge(evidence.observe(forward, device), None).attention


def rejected(task: Task, given: Sequence[Tensor]) -> dict[str, str]:
    """Backend of scaled_dot_product_attention -> why it can't compute this pattern, as torch warns; on a GPU.

    torch warns only where no backend is left. So each is the only one once: of the others it says that they are off.
    """
    found: dict[str, str] = {}
    attend = task.build(SDPA)
    for name, backend in BACKENDS.items() if task.shape.device.type == "cuda" else ():
        with warnings.catch_warnings(record=True) as caught, torch.no_grad(), sdpa_kernel(backend):
            warnings.simplefilter("always")
            try:
                attend(*given)
            except RuntimeError as error:
                found[name] = own_reason([str(each.message) for each in caught]) or in_a_line(error)
    return found


def own_reason(warned: Sequence[str]) -> str:
    """Of torch's warnings those that are neither headings nor about backends that are off, without their places."""
    sentences = [" ".join(text.partition(" (Triggered internally")[0].split()) for text in warned]
    return " ".join(text for text in sentences if not text.endswith(("because:", "runtime disabled.")))


def finish(timed_cases: list[tuple[Result, Subject]], mode: str) -> list[Record]:
    """The records of what was made beforehand; once, beside those of the forward."""
    records = []
    for result, subject in timed_cases if mode == FORWARD else ():
        assert isinstance(subject, PatternSubject)
        of = subject.beforehand
        records.append(record(result, MASK, "ms", [of.mask_ms], "check", kernel=of.kernel, rejected=dict(of.rejected)))
        records.append(record(result, FIRST_CALLS, "s", [of.first_calls_s], "check"))
    return records
