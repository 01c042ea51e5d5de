"""What the study of patterns times: each pattern at a length, computed in one way; what that way makes beforehand."""
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.patterns.pattern import BUCKETS, Pattern, allowed_pairs, pattern_named, random_documents
from benchmarks.patterns.ways import SDPA, WAYS, Attend, Shape, Way
from common.block import evidence
from common.block.config import BlockConfig, dtype_name
from common.block.workload import ATTENTION, BACKWARD, Operation, Workload
from common.measure.subject import Subject
from common.outcome import in_a_line
from common.report.record import Record, record
from common.report.result import Result
from common.runtime.iteration import BOTH, FORWARD

MASK, FIRST_CALLS = "mask", "first calls"  # the metrics beside time
BACKENDS = {"FlashAttention": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
            "memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION}
GATES = 1e-2, 1e-2                         # of a replay: output, gradient
Made = tuple[Pattern, Shape]
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A row of the study: a pattern that is made for a length, and how many heads and keys it has."""
    make: Callable[[Shape], Pattern]
    grouped: int = 1                       # heads of queries that share one of keys
    longer: int = 1                        # keys for each query

    def at(self, length: int, config: BlockConfig, dtype: torch.dtype, device: torch.device) -> Made:
        """The pattern and the shape of its tensors: as many tokens as the config has, at least one sequence.

        Raises ValueError where the pattern means nothing else than another at that length.
        """
        H = config.num_heads
        shape = Shape(max(1, config.tokens // length), H, max(1, H // self.grouped), length, self.longer * length,
                      config.head_dim, dtype, device)
        pattern = self.make(shape)
        if pattern.differential is not None:
            shape = replace(shape, value_width=2 * shape.width)
        pattern.check(shape.batch, H, shape.queries, shape.keys)
        if pattern.window is not None and pattern.window >= length:
            raise ValueError(f"a window of {pattern.window} is not shorter than S {length}: it would be causal")
        return pattern, shape


def _window(size: int) -> Question:
    return Question(lambda shape: pattern_named("sliding_window", window=size))


def _padded(shape: Shape) -> Pattern:
    """Half of the keys at least, evenly spread over the batch; the first sequence has all."""
    lengths = [shape.keys - shape.keys * b // (2 * shape.batch) for b in range(shape.batch)]
    return pattern_named("key_padding", lengths=lengths)


def _biased(shape: Shape) -> Pattern:
    generator = torch.Generator(shape.device).manual_seed(0)
    table = torch.randn(BUCKETS, shape.heads, generator=generator, device=shape.device)
    return pattern_named("relative_bias", table=table)


PATTERNS: Mapping[str, Question] = {
    "causal": Question(lambda shape: pattern_named("causal")),
    "full": Question(lambda shape: pattern_named("full")),
    "window 256": _window(256),
    "window 1024": _window(1024),
    "prefix": Question(lambda shape: pattern_named("prefix", prefix=shape.keys // 4)),
    "documents": Question(lambda shape: pattern_named("documents", documents=random_documents(shape.keys))),
    "key padding": Question(_padded),
    "ALiBi": Question(lambda shape: pattern_named("alibi")),
    "relative bias": Question(_biased),
    "soft cap": Question(lambda shape: pattern_named("soft_cap", cap=50.0)),
    "grouped queries": Question(lambda shape: pattern_named("causal"), grouped=4),
    "differential": Question(lambda shape: pattern_named("differential", differential=0.8)),
    "cross-attention": Question(lambda shape: pattern_named("full"), longer=2),
}


# --------------------------------------------------------------------------------------------------------- the subject


@dataclass(frozen=True)
class Beforehand:
    """What was seen of a way before it was timed."""
    mask_ms: float                         # to make the mask that it keeps
    first_calls_s: float                   # of the first forward and backward, compiling included
    kernel: str = ""                       # of scaled_dot_product_attention: the kind that ran
    rejected: Mapping[str, str] = field(default_factory=dict)        # backend of it -> why it can't take the pattern


class PatternSubject(Subject):
    """A pattern by one way."""

    def __init__(self, call: Attend, inputs: Sequence[Tensor], made: Made, cotangent: Tensor, has_backward: bool,
                 beforehand: Beforehand):
        super().__init__(call, [t.detach() for t in inputs], [cotangent], {}, GATES, workload_of(*made))
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


def built(way: Way, made: Made) -> tuple[Attend, float]:
    """(the function, milliseconds for making what it keeps: the second time, as in a process that goes on)."""
    for _ in range(2):
        attend, seconds = timed(lambda: way(*made), made[1].device)
    return attend, 1e3 * seconds


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """(what it gives, seconds until the device has done it)."""
    began = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def least_flops(pattern: Pattern, shape: Shape, mode: str) -> float:
    """Of each pair that is seen a product with a key and one with a value; a backward has three more and two more."""
    pairs = shape.heads * allowed_pairs(pattern, shape.batch, shape.queries, shape.keys)
    with_keys, with_values = (1, 1) if mode == FORWARD else (4, 3)
    return 2.0 * pairs * (with_keys * shape.width + with_values * shape.of_values)


def least_bytes(shape: Shape, mode: str) -> float:
    """q, k, v and the result once; with a backward once more, and their gradients."""
    of_queries = shape.batch * shape.heads * shape.queries * shape.width
    of_keys = shape.batch * shape.kv_heads * shape.keys * shape.width
    return (1 if mode == FORWARD else 3) * 2.0 * (of_queries + of_keys) * shape.dtype.itemsize


def workload_of(pattern: Pattern, shape: Shape) -> Workload:
    """Of the pairs that are seen, at the matmul rate of this machine, and of the bytes; on a CPU it has no limit."""
    dtype = dtype_name(shape.dtype)
    if shape.device.type != "cuda":
        return Workload(dtype)
    flops, moved = least_flops(pattern, shape, FORWARD), least_bytes(shape, FORWARD)
    forward = Operation(FORWARD, ATTENTION, flops, moved, dtype)
    backward = Operation(BACKWARD, ATTENTION, least_flops(pattern, shape, BOTH) - flops,
                         least_bytes(shape, BOTH) - moved, dtype)
    return Workload(dtype, (forward,), (backward,), shape.batch * shape.queries)


def kernel_of(attend: Attend, given: Sequence[Tensor], device: torch.device) -> str:
    """The kind of attention kernel that a forward runs: "FlashAttention", or "by hand" where it is its formula."""
    def forward() -> None:
        with torch.no_grad():
            attend(*given)
    return evidence.judge(evidence.observe(forward, device), None).attention


def rejected(made: Made, given: Sequence[Tensor]) -> dict[str, str]:
    """Backend of scaled_dot_product_attention -> why it can't compute this pattern, as torch warns; on a GPU.

    torch warns only where no backend is left. So each is the only one once: of the others it says that they are off.
    """
    pattern, shape = made
    found: dict[str, str] = {}
    attend = WAYS[SDPA](pattern, shape)
    for name, backend in BACKENDS.items() if shape.device.type == "cuda" else ():
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
