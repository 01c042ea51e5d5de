"""Whether a way computes its pattern: output and gradients of a few heads against FP64.

Heads do not see each other, so a few of them say it all but which head is which; the scores of all in FP64 would be 69
GB a tensor at S 16384 and H 32. Queries are taken in pieces, for the same reason.
"""
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.patterns.pattern import Pattern
from benchmarks.patterns.ways import Attend, Bias, Shape, dense_mask, formula, spread
from common.block import oracle
from common.outcome import Failed

PIECE = 2**26                              # scores in FP64 at once: half a gigabyte
OTHER_LAYOUT = "gradient where dy is laid out otherwise"


def inputs_of(pattern: Pattern, shape: Shape, seed: int) -> list[Tensor]:
    """Random q, k, v, and copies of what the pattern learns; all take gradients.

    They lie in memory as [B, S, H, D], which is how projections leave them.
    """
    generator = torch.Generator(shape.device).manual_seed(seed)
    of_values = shape.kv_heads if pattern.differential is None else shape.kv_heads // 2
    sizes = [(shape.queries, shape.heads, shape.width), (shape.keys, shape.kv_heads, shape.width),
             (shape.keys, of_values, shape.of_values)]
    made = []
    for length, heads, width in sizes:
        size = shape.batch, length, heads, width
        made.append(torch.randn(size, generator=generator, device=shape.device).to(shape.dtype).transpose(1, 2))
    learned = [t.detach().clone() for t in pattern.learned]
    return [t.requires_grad_() for t in (*made, *learned)]


def gates_of(shape: Shape) -> tuple[float, float]:
    """Relative errors of (an output, a gradient): its dtype's; of FP32 those of as many bits where TF32 is allowed."""
    tf32 = shape.dtype == torch.float32 and shape.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return oracle.MODULE_GATES[torch.float16 if tf32 else shape.dtype]


class Few(NamedTuple):
    """Heads that depend on each other and on no others: of queries, of keys, and of values and the result."""
    queries: slice
    keys: slice
    values: slice
    results: slice


def few_heads(pattern: Pattern, shape: Shape) -> list[Few]:
    """Those of the first and the last head of values, whose slopes and tables differ the most."""
    of_keys = 1 if pattern.differential is None else 2     # that share one of values
    repeated = shape.heads // shape.kv_heads
    found = []
    for head in sorted({0, shape.kv_heads // of_keys - 1}):
        begin, end = head * of_keys, (head + 1) * of_keys
        found.append(Few(slice(begin * repeated, end * repeated), slice(begin, end), slice(head, head + 1),
                         slice(head * repeated, (head + 1) * repeated)))
    return found


def errors(attend: Attend, pattern: Pattern, shape: Shape, given: Sequence[Tensor], seed: int, backward: bool = True
           ) -> dict[str, float]:
    """What -> relative L2 error against FP64: "output", "gradient of q" and so on. `given` is as of `inputs_of`.

    The output is that of the call without gradients where there is no backward. Raises Failed for another shape or
    dtype.
    """
    with torch.set_grad_enabled(backward):
        y = attend(*given)
    heads = shape.heads if pattern.differential is None else shape.heads // 2
    expected = shape.batch, heads, shape.queries, shape.of_values
    if y.shape != expected or y.dtype != shape.dtype:
        raise Failed(f"it gives {y.dtype} {tuple(y.shape)}, not {shape.dtype} {expected}")
    dy = cotangent(y, seed)
    names = ["q", "k", "v", "table"][:len(given)]
    found = torch.autograd.grad(y, list(given), dy) if backward else []
    worst = dict.fromkeys(["output", *(f"gradient of {name}" for name in names[:len(found)])], 0.0)
    for few in few_heads(pattern, shape):
        exact, gradients = _exact(pattern, shape, given, dy, few, backward)
        worst["output"] = max(worst["output"], oracle.relative_error(y.detach()[:, few.results], exact))
        of_them = few.queries, few.keys, few.values, few.queries
        for name, own, truth, taken in zip(names, found, gradients, of_them, strict=False):
            what = f"gradient of {name}"
            worst[what] = max(worst[what], oracle.relative_error(own[:, taken], truth))
    if backward:
        worst[OTHER_LAYOUT] = _apart_by_layout(attend, given, dy, found)
    return worst


def cotangent(y: Tensor, seed: int) -> Tensor:
    """N(0, 1) in the layout of y, which is what the layer behind it leaves."""
    generator = torch.Generator(y.device).manual_seed(seed)
    return torch.empty_like(y).normal_(generator=generator)


def _apart_by_layout(attend: Attend, given: Sequence[Tensor], dy: Tensor, found: Sequence[Tensor]) -> float:
    """The furthest gradient where the same cotangent lies in memory in the other order of heads and positions."""
    is_plain = dy.is_contiguous()
    turned = dy.transpose(1, 2).contiguous().transpose(1, 2) if is_plain else dy.contiguous()
    again = torch.autograd.grad(attend(*given), list(given), turned)
    return max(oracle.relative_error(other, own.double()) for other, own in zip(again, found, strict=True))


def check(attend: Attend, pattern: Pattern, shape: Shape, given: Sequence[Tensor], seed: int, backward: bool = True
          ) -> dict[str, float]:
    """The same errors; raises Failed where one is beyond its gate, or no number."""
    return gated(errors(attend, pattern, shape, given, seed, backward), shape)


def gated(found: dict[str, float], shape: Shape) -> dict[str, float]:
    """The errors as they are; raises Failed where one is beyond its gate, or no number."""
    of_output, of_gradient = gates_of(shape)
    for what, error in found.items():
        gate = of_output if what == "output" else of_gradient
        if not error <= gate:
            raise Failed(f"the {what} is off by {error:.1e} against FP64, the gate is {gate:.1e}")
    return found


def _exact(pattern: Pattern, shape: Shape, given: Sequence[Tensor], dy: Tensor, few: Few, backward: bool
           ) -> tuple[Tensor, list[Tensor]]:
    """The output of a few heads, and the gradients of q, k, v and what is learned there."""
    of_them = few.queries, few.keys, few.values, few.queries
    leaves = [t.detach()[:, heads].double().clone().requires_grad_(backward)
              for t, heads in zip(given, of_them, strict=False)]
    mask, added = dense_mask(pattern, shape), Bias.of(pattern, shape)
    if mask is not None:
        mask = mask.expand(-1, -1, shape.queries, -1)      # of padding it has one row, for all queries
    if added is not None and added.slopes is not None:
        added = replace(added, slopes=added.slopes[few.queries].double())
    queries, keys = shape.queries, shape.keys
    rows = max(1, PIECE // (shape.batch * leaves[0].size(1) * keys))
    outputs = []
    with torch.set_grad_enabled(backward):
        for begin in range(0, queries, rows):
            end = min(begin + rows, queries)
            some = slice(begin, end)
            q, k, v = leaves[0][:, :, some], *leaves[1:3]
            bias = None
            if added is not None:
                bias = spread(added.by_distance(*leaves[3:])[:, queries - end:queries - begin + keys - 1], keys)
            y = _truth(pattern, q, k, v, None if mask is None else mask[:, :, some], bias)
            if backward:
                (y * dy[:, few.results, some].double()).sum().backward()
            outputs.append(y.detach())
    return torch.cat(outputs, 2), [leaf.grad for leaf in leaves if leaf.grad is not None]


def _truth(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """The formula in FP64; in differential attention of the even heads, minus that of the odd ones."""
    def attended(first: int, every: int) -> Tensor:
        queries, keys = q[:, first::every], k[:, first::every]
        shape = Shape(q.size(0), queries.size(1), keys.size(1), q.size(2), k.size(2), q.size(3), q.dtype, q.device)
        return formula(pattern, shape, queries, keys, v, mask, bias)
    if pattern.differential is None:
        return attended(0, 1)
    return attended(0, 2) - pattern.differential * attended(1, 2)
