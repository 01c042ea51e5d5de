"""What the study of attention times: a rung or a library, held against FP64."""
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.kernels.cuda import series
from benchmarks.kernels.cuda.series import BACKWARD_RUNGS, RUNGS, Rung
from benchmarks.show.study import Options
from common.block import oracle
from common.block.config import dtype_name
from common.block.workload import (
    ATTENTION,
    BACKWARD,
    FORWARD,
    Operation,
    Workload,
    attention_flops,
    causal_attention_flops,
)
from common.measure.cases import Case, Setting
from common.measure.subject import Subject, require
from common.phases import Phase
from common.report.result import Result
from common.runtime import compiler, timing
from common.runtime.iteration import Iteration

FULL, CAUSAL = MASKS = ("full", "causal")
CUDNN, FLASH, TRITON, FLEX = LIBRARIES = ("cuDNN", "FlashAttention", "Triton", "FlexAttention")
PASSES = FORWARD, BACKWARD
RUNGS_OF: dict[str, dict[str, Rung]] = {FORWARD: {rung.name: rung for rung in RUNGS},
                                        BACKWARD: {rung.name: rung for rung in BACKWARD_RUNGS}}
WAYS = tuple(dict.fromkeys([*RUNGS_OF[FORWARD], *RUNGS_OF[BACKWARD], *LIBRARIES]))     # some rungs share a name
BACKENDS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
ROWS = 1024                                # of FP64 scores at a time
FACTS = "registers", "shared_bytes", "blocks"
TENSORS = {FORWARD: 4, BACKWARD: 8}        # q, k, v and y; with dy and three gradients

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# ----------------------------------------------------------------------------------------------------------- the cases


def attend_by(way: str, mask: str) -> Attend:
    """Attention by a rung or a library that runs here; a library's can be differentiated."""
    is_causal = mask == CAUSAL
    if rung := RUNGS_OF[FORWARD].get(way):
        return lambda q, k, v: series.attention(rung, q, k, v, is_causal)[0]
    if way == TRITON:
        kernel = importlib.import_module("benchmarks.kernels.triton.attention").attention
        return functools.partial(kernel, causal=is_causal)
    if way == FLEX:
        compiler.allow_many_graphs()
        return Flex(torch.compile(flex_attention, dynamic=False), is_causal)

    def by_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([BACKENDS[way]]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return by_library


def differentiate_by(way: str, mask: str, inputs: Sequence[Tensor], dy: Tensor) -> Callable[[], list[Tensor]]:
    """A backward alone, by a rung or a library: a call gives dq, dk and dv. The forward has run once, before it."""
    if rung := RUNGS_OF[BACKWARD].get(way):
        q, k, v = inputs
        y, log_sum = series.attention(RUNGS[-1], q, k, v, mask == CAUSAL)
        return lambda: list(series.gradients(rung, q, k, v, y, log_sum, dy, mask == CAUSAL))
    leaves = [each.detach().requires_grad_() for each in inputs]

    def differentiate() -> list[Tensor]:
        return list(torch.autograd.grad(output, leaves, dy, retain_graph=True))
    with torch.enable_grad(), torch._functorch.config.patch(donated_buffer=False):     # or no compiled one runs twice
        output = attend_by(way, mask)(*leaves)
        differentiate()
    return differentiate


@dataclass
class Differentiated(Subject):
    """A backward alone: `call` takes nothing, and returns the gradients."""

    def iteration_on(self, inputs: Sequence[Tensor], mode: str) -> Iteration:
        """On the inputs that it was made for."""
        return Iteration(self.call, timing.nothing, list(self.cotangents), {})


@dataclass(frozen=True)
class Flex:
    """FlexAttention. What is compiled stays an attribute, so that it can be seen."""
    compiled: Callable[..., Tensor]
    is_causal: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.compiled(q, k, v, block_mask=causal_blocks(q.size(2)) if self.is_causal else None)


@functools.lru_cache(maxsize=1)
def causal_blocks(length: int) -> BlockMask:
    """Made once for all calls, as a model would."""
    return create_block_mask(lambda b, h, query, key: query >= key, None, None, length, length)


def why_not(way: str, device: torch.device) -> str:
    """Why it can't run there; "" where it can."""
    if way not in LIBRARIES:
        return series.missing()
    return "its kernels need a GPU" if device.type != "cuda" and way != FLASH else ""


def exact(head: Sequence[Tensor], is_causal: bool) -> tuple[Tensor, Tensor]:
    """(y, the logarithm of each row's sum of exp(score)) of q, k and v of one head [S, D], in FP64."""
    q, k, v = (each.double() for each in head)
    every, keys = [], torch.arange(k.size(0), device=k.device)
    for rows, place in zip(q.split(ROWS), keys.split(ROWS), strict=True):
        scores = rows @ k.mT / math.sqrt(q.size(1))
        if is_causal:
            scores = scores.masked_fill(keys > place.unsqueeze(1), -math.inf)
        every.append((scores.softmax(-1) @ v, scores.logsumexp(-1)))
    ys, log_sums = zip(*every, strict=True)
    return torch.cat(ys), torch.cat(log_sums)


def exact_gradients(head: Sequence[Tensor], is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of q, k, v and dy of one head [S, D], in FP64."""
    q, k, v, dy = (each.double() for each in head)
    root, keys = math.sqrt(q.size(1)), torch.arange(k.size(0), device=k.device)
    dqs, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows, of_y, place in zip(q.split(ROWS), dy.split(ROWS), keys.split(ROWS), strict=True):
        scores = rows @ k.mT / root
        if is_causal:
            scores = scores.masked_fill(keys > place.unsqueeze(1), -math.inf)
        weights = scores.softmax(-1)
        of_weights = of_y @ v.mT
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) / root
        dqs.append(of_scores @ k)
        dk += of_scores.mT @ rows
        dv += weights.mT @ of_y
    return torch.cat(dqs), dk, dv


def errors(found: Mapping[str, Tensor], inputs: Sequence[Tensor], truth: Callable[..., Sequence[Tensor]], mask: str
           ) -> dict[str, float]:
    """Of each result, in the first and the last head: no two share a result."""
    worst = dict.fromkeys(found, 0.0)
    for sample, head in sorted({(0, 0), (inputs[0].size(0) - 1, inputs[0].size(1) - 1)}):
        exact_ones = truth([each[sample, head] for each in inputs], mask == CAUSAL)
        for (what, value), right in zip(found.items(), exact_ones, strict=False):
            worst[what] = max(worst[what], oracle.relative_error(value[sample, head], right))
    return worst


def flops(size: Sequence[int], mask: str, mode: str = FORWARD) -> float:
    """Of a pass: its products over all pairs, or over half of them."""
    B, H, S, D = size
    of_a_head = causal_attention_flops(S, D, D, mode) if mask == CAUSAL else attention_flops(S**2, D, D, mode)
    return float(B * H * of_a_head)


def case(way: str, mask: str, size: tuple[int, int, int, int], options: Options, mode: str = FORWARD) -> Case:
    """One row: a pass by a rung or a library."""
    dtype = options.config.amp_dtype or torch.float32

    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        numbers_of = torch.Generator(setting.device).manual_seed(setting.seed)
        q, k, v, dy = (torch.randn(size, generator=numbers_of, device=setting.device, dtype=dtype) for _ in range(4))
        if rung := RUNGS_OF[mode].get(way):
            of_kernel = series.facts(rung, size[3], dtype)
            result.variant["takes"] = {name: getattr(of_kernel, name) for name in FACTS}
        if mode == BACKWARD:
            return differentiated(q, k, v, dy, setting, result)
        attend = attend_by(way, mask)
        setting.say(Phase.CHECKING)
        with torch.no_grad():
            given = series.attention(rung, q, k, v, mask == CAUSAL) if rung else (attend(q, k, v),)
            found = dict(zip(("y", "log sum"), given, strict=False))
            check(errors(found, (q, k, v), exact, mask), result)
        return Subject(attend, (q, k, v), [torch.zeros_like(q)], {}, (gate, gate), workload)

    def differentiated(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, setting: Setting, result: Result) -> Subject:
        differentiate = differentiate_by(way, mask, (q, k, v), dy)
        setting.say(Phase.CHECKING)
        found = dict(zip(("dq", "dk", "dv"), differentiate(), strict=True))
        check(errors(found, (q, k, v, dy), exact_gradients, mask), result)
        return Differentiated(differentiate, (q, k, v), [dy], {}, (gate, gate), workload)

    def check(found: Mapping[str, float], result: Result) -> None:
        result.errors = {what: (error, gate) for what, error in found.items()}
        for what, error in found.items():
            require(what, error, gate)

    B, H, S, D = size
    gate = oracle.MODULE_GATES[dtype][mode == BACKWARD]
    moved = TENSORS[mode] * B * H * S * D * dtype.itemsize
    operation = Operation("attention", ATTENTION, flops(size, mask, mode), moved, dtype_name(dtype), (B, S, H, D), mode)
    forward, backward = ((operation,), ()) if mode == FORWARD else ((), (operation,))
    workload = Workload(dtype_name(dtype), forward, backward, B * S)
    of_backward = {"pass": BACKWARD} if mode == BACKWARD else {}
    return Case(f"attention, {mask}", prepare, parameter_dtype=dtype,
                variant={"way": way, "mask": mask, "size": list(size), **of_backward},
                missing=why_not(way, options.device), work={"q, k, v": f"{dtype_name(dtype)} {list(size)}"},
                workload=workload, that_fits=lambda total: "give shorter ones by --lengths")
