"""What the study of attention times: a rung or a library, held against FP64."""
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.kernels.cuda import series
from benchmarks.kernels.cuda.series import RUNGS
from benchmarks.mixers import forms
from benchmarks.show.study import Options
from common.block import oracle
from common.block.config import dtype_name
from common.block.workload import ATTENTION, Operation, Workload
from common.measure.cases import Case, Setting
from common.measure.subject import Subject, require
from common.phases import Phase
from common.report.result import Result
from common.runtime import compiler

FULL, CAUSAL = MASKS = ("full", "causal")
CUDNN, FLASH, TRITON, FLEX = LIBRARIES = ("cuDNN", "FlashAttention", "Triton", "FlexAttention")
RUNG = {rung.name: rung for rung in RUNGS}
BACKENDS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
ROWS = 1024                                # of FP64 scores at a time
FACTS = "registers", "shared_bytes", "blocks"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# ----------------------------------------------------------------------------------------------------------- the cases


def attend_by(way: str, mask: str) -> Attend:
    """Attention by a rung or a library that runs here."""
    is_causal = mask == CAUSAL
    if way in RUNG:
        return lambda q, k, v: series.attention(RUNG[way], q, k, v, is_causal)[0]
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
    if way in RUNG:
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


def errors(way: str, attend: Attend, inputs: Sequence[Tensor], mask: str) -> dict[str, float]:
    """Of y, and of what a rung returns beside it, in the first and the last head: no two share a result."""
    q, k, v = inputs
    results = series.attention(RUNG[way], q, k, v, mask == CAUSAL) if way in RUNG else (attend(q, k, v),)
    found = dict(zip(("y", "log sum"), results, strict=False))
    worst = dict.fromkeys(found, 0.0)
    for sample, head in sorted({(0, 0), (q.size(0) - 1, q.size(1) - 1)}):
        truth = exact([each[sample, head] for each in inputs], mask == CAUSAL)
        for (what, value), right in zip(found.items(), truth, strict=False):
            worst[what] = max(worst[what], oracle.relative_error(value[sample, head], right))
    return worst


def flops(size: Sequence[int], mask: str) -> float:
    """Of a forward: two products over all pairs, or over half of them."""
    B, H, S, D = size
    return B * H * forms.flops_of_attention(S, D, D) * (1 if mask == CAUSAL else 2)


def case(way: str, mask: str, size: tuple[int, int, int, int], options: Options) -> Case:
    """One row."""
    dtype = options.config.amp_dtype or torch.float32

    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        numbers_of = torch.Generator(setting.device).manual_seed(setting.seed)
        inputs = [torch.randn(size, generator=numbers_of, device=setting.device, dtype=dtype) for _ in range(3)]
        attend = attend_by(way, mask)
        if way in RUNG:
            of_kernel = series.facts(RUNG[way], size[3], dtype)
            result.variant["takes"] = {name: getattr(of_kernel, name) for name in FACTS}
        setting.say(Phase.CHECKING)
        gate, _ = oracle.MODULE_GATES[dtype]
        with torch.no_grad():
            found = errors(way, attend, inputs, mask)
        result.errors = {what: (error, gate) for what, error in found.items()}
        for what, error in found.items():
            require(what, error, gate)
        return Subject(attend, inputs, [torch.zeros_like(inputs[0])], {}, (gate, gate), workload)

    B, H, S, D = size
    forward = Operation("attention", ATTENTION, flops(size, mask), 4 * B * H * S * D * dtype.itemsize,
                        dtype_name(dtype), (B, S, H, D))
    workload = Workload(dtype_name(dtype), (forward,), (), B * S)
    return Case(f"attention, {mask}", prepare, parameter_dtype=dtype,
                variant={"way": way, "mask": mask, "size": list(size)}, missing=why_not(way, options.device),
                work={"q, k, v": f"{dtype_name(dtype)} {list(size)}"}, workload=workload,
                that_fits=lambda total: "give shorter ones by --lengths")
