"""A model's work as its operations: what no rung can leave out, and what its limit on a machine follows from.

Matmuls, convolutions and attention alone: what stands between them can ride on them, so it costs nothing here.
"""
import math
from collections.abc import Collection, Iterator, Sequence

import torch

from benchmarks.assistant.graph import place_of
from benchmarks.assistant.predicting import Arithmetic
from benchmarks.assistant.program import Program
from benchmarks.assistant.technique import Plan
from benchmarks.assistant.trace import Call, Product
from common.block.config import dtype_name
from common.block.workload import ATTENTION, MATMUL, Operation, Workload


def workload(program: Program, arithmetic: Arithmetic, in_int8: Collection[str] = ()) -> Workload:
    """The work of one call, and of its backward: what leads to no parameter that is trained has none.

    Attention by hand counts as the attention it is: causal half, and without its scores in memory. The weights of the
    modules `in_int8` are one byte each.
    """
    forward: list[Operation] = []
    backward: list[Operation] = []
    for one, product in _operations(program, arithmetic, in_int8):
        forward.append(one)
        backward += _backward(one, product)
    flops: dict[str, float] = {}
    for one in forward:
        flops[one.arithmetic] = flops.get(one.arithmetic, 0.0) + one.flops
    most = max(flops, key=lambda name: flops[name], default="")
    return Workload(most, tuple(forward), tuple(backward))


def _operations(program: Program, arithmetic: Arithmetic, in_int8: Collection[str]
                ) -> Iterator[tuple[Operation, Product]]:
    """One for each matmul and convolution, and one for both matmuls of an attention by hand."""
    by_hand = {place_of(attention.scores): attention for attention in program.analysis.attentions}
    scores = None
    for call in program.trace.calls:
        if not call.is_matmul or call.dtype is None:
            continue
        if call.attends:
            yield _called_attention(call, arithmetic), call.products[0]
        elif scores is None and call.place in by_hand:
            scores = call
        elif scores is not None and call.place == place_of(by_hand[scores.place].output):
            yield _attention(scores, call, by_hand[scores.place].is_causal, arithmetic), scores.products[0]
            scores = None
        else:
            for product in call.products:
                yield _matmul(call, product, arithmetic, call.module in in_int8), product


def _called_attention(call: Call, arithmetic: Arithmetic) -> Operation:
    """By whatever operators it then runs."""
    assert call.attends is not None
    shapes = call.attends.query, call.attends.key, call.attends.value
    return _of_attention(f"{call.name}, {call.module}", call.flops, shapes, arithmetic(call))


def _attention(scores: Call, output: Call, causal: bool, arithmetic: Arithmetic) -> Operation:
    """From the matmul of queries and keys, and that of weights and values."""
    shapes = *scores.products[0].shapes[:2], output.products[0].shapes[1]
    flops = (scores.flops + output.flops) / (2 if causal else 1)
    return _of_attention(f"attention, {scores.module}", flops, shapes, arithmetic(scores))


def _of_attention(name: str, flops: float, shapes: Sequence[tuple[int, ...]], kind: str) -> Operation:
    queries, keys, values = shapes
    elements = 2 * math.prod(queries) + math.prod(keys) + math.prod(values)
    return Operation(name, ATTENTION, flops, elements * bytes_of(kind), kind, queries)


def _matmul(call: Call, product: Product, arithmetic: Arithmetic, has_int8_weight: bool) -> Operation:
    kind = arithmetic(call)
    left, right = product.shapes[:2]
    if "conv" in product.operator:
        k, n = math.prod(right[1:]), right[0]
        m = round(product.flops / (2 * k * n))
    else:
        k = left[-1]
        m = math.prod(left) // k
        n = round(product.flops / (2 * m * k))
    of_a_weight = 1 if has_int8_weight else bytes_of(kind)
    moved = (math.prod(left) + m * n) * bytes_of(kind) + math.prod(right) * of_a_weight
    return Operation(f"{call.name}, {call.module}", MATMUL, product.flops, moved, kind, (m, k, n))


def _backward(one: Operation, product: Product) -> Iterator[Operation]:
    """What its backward computes: of a matmul the gradients of both factors, of attention twice its forward."""
    def like(name: str, times: int, shape: tuple[int, ...], layout: str) -> Operation:
        return Operation(f"{one.name}, {name}", one.kind, times * one.flops, times * one.bytes, one.arithmetic, shape,
                         layout)
    if one.kind == ATTENTION:
        if product.trains or product.trains_weight:
            yield like("backward", 2, one.shape, "backward")
        return
    m, k, n = one.shape
    if product.trains:
        yield like("input gradient", 1, (m, n, k), "input gradient")
    if product.trains_weight:
        yield like("weight gradient", 1, (k, m, n), "weight gradient")


def bytes_of(arithmetic: str) -> int:
    """Bytes of an element."""
    names = {"tf32": "float32", "float8": "float8_e4m3fn"}
    return getattr(torch, names.get(arithmetic, arithmetic)).itemsize


def arithmetic_of(plan: Plan, device: torch.device) -> Arithmetic:
    """What the model multiplies in by that plan. By default cuDNN rounds the operands of a convolution to TF32."""
    precision = plan.matmul_precision or torch.get_float32_matmul_precision()

    def arithmetic(call: Call) -> str:
        assert call.dtype is not None
        if call.name == "linear" and call.module in plan.in_fp8:
            return "float8"
        if call.dtype == torch.float32 and plan.autocast:
            return dtype_name(plan.autocast)
        is_convolution = any("convolution" in operator for operator in call.operators)
        allowed = torch.backends.cudnn.allow_tf32 if is_convolution else precision != "highest"
        has_tf32 = device.type == "cuda" and torch.cuda.is_tf32_supported()
        return "tf32" if call.dtype == torch.float32 and allowed and has_tf32 else dtype_name(call.dtype)
    return arithmetic
