"""Whether a way computes its pattern: output and gradients of a few heads against FP64.

Heads do not see each other, so a few of them say it all but which head is which; the scores of all in FP64 would be 69
GB a tensor at S 16384 and H 32. Queries are taken in pieces, for the same reason.
"""
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.patterns.pattern import Pattern
from benchmarks.patterns.ways import Attend, Bias, Shape, dense_mask, formula
from common.block import oracle
from common.outcome import Failed

PIECE = 2**26                              # scores in FP64 at once: half a gigabyte
OF_GRADIENTS = 3                           # times an output's gate: a gradient goes through two more roundings
OTHER_LAYOUT = "gradient where dy is laid out otherwise"


def inputs_of(pattern: Pattern, shape: Shape, seed: int) -> list[Tensor]:
    """Random q, k, v, and copies of what the pattern learns; all take gradients.

    They lie in memory as [B, S, H, D], which is how projections leave them.
    """
    generator = torch.Generator(shape.device).manual_seed(seed)
    made = []
    for heads, length in ((shape.heads, shape.queries), *2 * [(shape.kv_heads, shape.keys)]):
        size = shape.batch, length, heads, shape.width
        made.append(torch.randn(size, generator=generator, device=shape.device).to(shape.dtype).transpose(1, 2))
    learned = [t.detach().clone() for t in pattern.learned]
    return [t.requires_grad_() for t in (*made, *learned)]


def few_heads(shape: Shape) -> list[int]:
    """The heads of keys that are looked at: the first and the last, whose slopes and tables differ the most."""
    return sorted({0, shape.kv_heads - 1})


def errors(attend: Attend, pattern: Pattern, shape: Shape, given: Sequence[Tensor], seed: int, backward: bool = True
           ) -> dict[str, float]:
    """What -> relative L2 error against FP64: "output", "gradient of q" and so on. `given` is as of `inputs_of`.

    The output is that of the call without gradients where there is no backward. Raises Failed for another shape or
    dtype.
    """
    with torch.set_grad_enabled(backward):
        y = attend(*given)
    if y.shape != given[0].shape or y.dtype != shape.dtype:
        raise Failed(f"it gives {y.dtype} {tuple(y.shape)}, not {shape.dtype} {tuple(given[0].shape)}")
    dy = cotangent(y, seed)
    names = ["q", "k", "v", "table"][:len(given)]
    found = torch.autograd.grad(y, list(given), dy) if backward else []
    worst = dict.fromkeys(["output", *(f"gradient of {name}" for name in names[:len(found)])], 0.0)
    for head in few_heads(shape):
        of_queries = _of(shape, head)
        exact, gradients = _exact(pattern, shape, given, dy, head, backward)
        worst["output"] = max(worst["output"], oracle.relative_error(y.detach()[:, of_queries], exact))
        for name, own, truth in zip(names, found, gradients, strict=False):
            if name == "table":
                mine = own[:, of_queries]
            else:
                mine = own[:, of_queries] if name == "q" else own[:, head:head + 1]
            what = f"gradient of {name}"
            worst[what] = max(worst[what], oracle.relative_error(mine, truth))
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
    found = errors(attend, pattern, shape, given, seed, backward)
    for what, error in found.items():
        gate = oracle.MODULE_GATES[shape.dtype] * (1 if what == "output" else OF_GRADIENTS)
        if not error <= gate:
            raise Failed(f"the {what} is off by {error:.1e} against FP64, the gate is {gate:.1e}")
    return found


def _of(shape: Shape, head: int) -> slice:
    """The heads of queries that share a head of keys."""
    repeated = shape.heads // shape.kv_heads
    return slice(head * repeated, (head + 1) * repeated)


def _exact(pattern: Pattern, shape: Shape, given: Sequence[Tensor], dy: Tensor, head: int, backward: bool
           ) -> tuple[Tensor, list[Tensor]]:
    """The output of the queries' heads of one head of keys, and the gradients of q, k, v and what is learned there."""
    heads = _of(shape, head)
    exact = [t.detach().double() for t in given]
    q, k, v = exact[0][:, heads], exact[1][:, head:head + 1], exact[2][:, head:head + 1]
    leaves = [t.clone().requires_grad_(backward) for t in (q, k, v, *(t[:, heads] for t in exact[3:]))]
    wide = replace(shape, heads=q.size(1), kv_heads=1, dtype=torch.float64)
    mask, added = dense_mask(pattern, shape), Bias.of(pattern, shape)
    if mask is not None:
        mask = mask.expand(-1, -1, shape.queries, -1)      # of padding it has one row, for all queries
    if added is not None and added.slopes is not None:
        added = replace(added, slopes=added.slopes[heads].double())
    rows = max(1, PIECE // (shape.batch * wide.heads * shape.keys))
    outputs = []
    with torch.set_grad_enabled(backward):
        for begin in range(0, shape.queries, rows):
            some = slice(begin, begin + rows)
            own = None if added is None else added(*leaves[3:])[:, :, some]
            y = formula(pattern, wide, leaves[0][:, :, some], leaves[1], leaves[2],
                        mask[:, :, some] if mask is not None else None, own)
            if backward:
                (y * dy[:, heads, some].double()).sum().backward()
            outputs.append(y.detach())
    return torch.cat(outputs, 2), [leaf.grad for leaf in leaves if leaf.grad is not None]
