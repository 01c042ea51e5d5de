"""A model's work as its operations: what no rung can leave out, and what its limit on a machine follows from.

Matmuls, convolutions and attention alone: what stands between them can ride on them, so it costs nothing here.
"""
import math
from collections.abc import Callable, Iterator

import torch

from benchmarks.assistant.program import Program, place_of
from benchmarks.assistant.technique import Plan
from benchmarks.assistant.techniques import sdpa
from benchmarks.assistant.trace import Call
from common.block.config import dtype_name
from common.block.workload import ATTENTION, MATMUL, Operation, Workload

Arithmetic = Callable[[Call], str]                     # what a rung multiplies a call's operands in


def workload(program: Program, arithmetic: Arithmetic) -> Workload:
    """The work of one call, and of its backward where every parameter takes a gradient.

    Attention by hand counts as the attention it is: causal half, and without its scores in memory.
    """
    forward: list[Operation] = []
    backward: list[Operation] = []
    trains = all(parameter.requires_grad for parameter in program.model.parameters())
    for one in _operations(program, arithmetic):
        forward.append(one)
        if trains:
            backward += _backward(one)
    flops: dict[str, float] = {}
    for one in forward:
        flops[one.arithmetic] = flops.get(one.arithmetic, 0.0) + one.flops
    most = max(flops, key=lambda name: flops[name], default="")
    return Workload(most, tuple(forward), tuple(backward))


def _operations(program: Program, arithmetic: Arithmetic) -> Iterator[Operation]:
    """One for each matmul and convolution, and one for both matmuls of an attention by hand."""
    ends = {}                                          # line of the scores -> (line of the output, whether causal)
    for found in sdpa.find(program):
        if not found.why_not and found.nodes:
            causal = found.reason.startswith("causal")
            ends[place_of(found.nodes[0])] = place_of(found.nodes[-1]), causal
    scores = None
    for call in program.trace.calls:
        if not call.is_matmul or call.dtype is None:
            continue
        if scores is None and call.place in ends:
            scores = call
        elif scores is not None and call.place == ends[scores.place][0]:
            yield _attention(scores, call, ends[scores.place][1], arithmetic)
            scores = None
        else:
            yield _matmul(call, arithmetic)


def _attention(scores: Call, output: Call, causal: bool, arithmetic: Arithmetic) -> Operation:
    """From the matmul of queries and keys, and that of weights and values."""
    (queries, keys), (_, values) = scores.shapes[:2], output.shapes[:2]
    elements = 2 * math.prod(queries) + math.prod(keys) + math.prod(values)
    flops = (scores.flops + output.flops) / (2 if causal else 1)
    kind = arithmetic(scores)
    return Operation(f"attention, {scores.module}", ATTENTION, flops, elements * bytes_of(kind), kind, queries)


def _matmul(call: Call, arithmetic: Arithmetic) -> Operation:
    kind = arithmetic(call)
    name = f"{call.name}, {call.module}"
    if call.name == "scaled_dot_product_attention":
        queries, keys, values = call.shapes[:3]
        elements = 2 * math.prod(queries) + math.prod(keys) + math.prod(values)
        return Operation(name, ATTENTION, call.flops, elements * bytes_of(kind), kind, queries)
    left, right = [shape for shape in call.shapes if len(shape) > 1][:2]
    if any("convolution" in operator for operator in call.operators):
        k, n = math.prod(right[1:]), right[0]
        m = round(call.flops / (2 * k * n))
    else:
        k = left[-1]
        m = math.prod(left) // k
        n = round(call.flops / (2 * m * k))
    elements = math.prod(left) + math.prod(right) + m * n
    return Operation(name, MATMUL, call.flops, elements * bytes_of(kind), kind, (m, k, n))


def _backward(one: Operation) -> Iterator[Operation]:
    """What its backward computes: of a matmul the gradients of both factors, of attention twice its forward."""
    def like(name: str, times: int, shape: tuple[int, ...], layout: str) -> Operation:
        return Operation(f"{one.name}, {name}", one.kind, times * one.flops, times * one.bytes, one.arithmetic, shape,
                         layout)
    if one.kind == ATTENTION:
        yield like("backward", 2, one.shape, "backward")
    else:
        m, k, n = one.shape
        yield like("input gradient", 1, (m, n, k), "input gradient")
        yield like("weight gradient", 1, (k, m, n), "weight gradient")


def bytes_of(arithmetic: str) -> int:
    """Bytes of an element."""
    return getattr(torch, "float32" if arithmetic == "tf32" else arithmetic).itemsize


def arithmetic_of(plan: Plan, device: torch.device) -> Arithmetic:
    """What the model multiplies in by that plan. By default cuDNN rounds the operands of a convolution to TF32."""
    precision = plan.matmul_precision or torch.get_float32_matmul_precision()

    def arithmetic(call: Call) -> str:
        assert call.dtype is not None
        if call.dtype == torch.float32 and plan.autocast:
            return dtype_name(plan.autocast)
        is_convolution = any("convolution" in operator for operator in call.operators)
        allowed = torch.backends.cudnn.allow_tf32 if is_convolution else precision != "highest"
        has_tf32 = device.type == "cuda" and torch.cuda.is_tf32_supported()
        return "tf32" if call.dtype == torch.float32 and allowed and has_tf32 else dtype_name(call.dtype)
    return arithmetic
