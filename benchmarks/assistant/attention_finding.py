"""Attention by hand is found in a graph: from its softmax up to one matmul, and down to the other."""
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from benchmarks.assistant import einsum
from benchmarks.assistant.attention import Attention, Mask, Operand, swapped, swaps_the_last
from benchmarks.assistant.constants import number_of
from benchmarks.assistant.graph import (
    Captured,
    Refusal,
    Refused,
    ancestors,
    args_of,
    argument,
    refuse_mixed_gradients,
    regions,
    shape_of,
)
from benchmarks.assistant.normal import CASTS, name_of
from benchmarks.assistant.softmaxes import SOFTMAX, divided_late, row_maximum_of, softmax_by_hand, softmaxes
from benchmarks.measure.calls import BLOCKING

PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
VIEWS = ("view", "reshape")
HIDING = -40.0                             # a score of so much or less has a weight below the rounding of FP64


def attentions_in(graph: Captured) -> list[Attention | Refusal]:
    """The attention around every softmax, or why it is none that could be rewritten."""
    return regions(graph, softmaxes(graph), attention_at)


def attention_at(softmax: fx.Node, graph: Captured) -> Attention:
    """The attention around a softmax. Raises Refused with the reason where it is none that could be rewritten."""
    ndim, by_hand = len(shape_of(softmax)), softmax_by_hand(softmax)
    dim = -1 if name_of(softmax) not in SOFTMAX else argument(softmax, 1, "dim", -1)
    if dim not in (-1, ndim - 1):
        raise Refused(f"its softmax goes over dimension {dim}, not over the last one")
    if ndim < 3:
        raise Refused("its scores have no batch")
    up = _Upwards(shape_of(softmax))
    scores = up.walk(by_hand[0].args[0] if by_hand else softmax.args[0])
    if scores is None:
        raise Refused(up.why or "no matmul of queries and keys leads to it")
    late = divided_late(softmax)
    product, dropout, down = (late[1], (0.0, False), []) if late else _downwards(softmax)
    query, key = _queries_and_keys(scores)
    if up.is_transposed:
        query, key = key, query
    value, order = _values(product, (*down, softmax))
    output = late[2] if late else product
    chain = scores, *reversed(up.chain), *(by_hand or ()), softmax, *(late[:2] if late else ()), *down, output
    masks = [*up.masks, *_added_by_the_matmul(scores, up)]
    between = *up.chain, *down
    if (up.is_transposed or order or up.temperatures) and any(map(_is_other_shape, between)):
        raise Refused("its scores are viewed in another shape, and transposed")
    leading = _leading(softmax, between)
    users = {user for node in chain[:-1] for user in node.users if number_of(user) is None}      # not for its shape
    if users - set(chain):
        raise Refused("its scores are used more than once")
    refuse_mixed_gradients(graph, chain)
    return Attention(graph, chain, softmax, scores, output, query, key, value, order, up.scale * _own_scale(scores),
                     masks, dropout, up.cap, leading, tuple(up.temperatures))


def _is_other_shape(node: fx.Node) -> bool:
    """Whether it is a view, and not of the shape that its tensor has."""
    return name_of(node) in VIEWS and shape_of(node) != shape_of(args_of(node)[0])


def _leading(softmax: fx.Node, between: tuple[fx.Node, ...]) -> tuple[int, ...]:
    """All dimensions of the scores but the last two, where views make these most. Raises Refused where there are two
    ways.
    """
    views = list(filter(_is_other_shape, between))
    if not views:
        return shape_of(softmax)[:-2]
    every = {shape_of(node)[:-2] for view in views for node in (view, view.args[0])}
    split = {leading for leading in every if len(leading) == 2}
    if len(split) != 1 or {len(leading) for leading in every} != {1, 2}:
        raise Refused("its scores are viewed in several other shapes")
    [leading] = split
    if any(math.prod(shape_of(node)[:-2]) != math.prod(leading) for node in (softmax, *between)):
        raise Refused("its scores are viewed, and broadcast")
    return leading


def _added_by_the_matmul(scores: fx.Node, up: "_Upwards") -> list[Mask]:
    """The tensor that a baddbmm adds to its product."""
    beta: Any = scores.kwargs.get("beta", 1) if name_of(scores) == "baddbmm" else 0
    if beta == 0:
        return []
    added = argument(scores, 0, "input")
    if up.is_transposed or up.cap is not None or not isinstance(added, fx.Node):
        raise Refused("its baddbmm adds a tensor to the scores")
    return [Mask(added, beta * up.scale, leading=shape_of(scores)[:-2])]


class _Upwards:
    """From the softmax up to the matmul of queries and keys."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape, self.scale, self.why = shape, 1.0, ""
        self.masks: list[Mask] = []
        self.chain: list[fx.Node] = []
        self.is_transposed = False               # the product is that of keys and queries
        self.cap: float | None = None
        self.temperatures: list[tuple[fx.Node, int]] = []

    def walk(self, node: Any) -> fx.Node | None:
        """The matmul; None, with the reason in `why`, where something else comes first."""
        while isinstance(node, fx.Node):
            name = name_of(node) if node.op.startswith("call_") else node.op
            if name in PRODUCTS:
                return node
            step: Callable[[fx.Node], Any] | None = getattr(self, f"_{name}", None)
            if name in CASTS:
                step = _first
            if step is None:
                above = (each for each in ancestors(node) if each.op.startswith("call_"))
                if any(name_of(each) in PRODUCTS for each in above):
                    self.why = self.why or f"between the matmul of queries and keys and the softmax stands {name}"
                return None
            self.chain.append(node)
            node = step(node)
        return None

    def _mul(self, node: fx.Node) -> Any:
        scores, factor = self._scores_and(node)
        return self._scaled(scores, factor, 1)

    def _div(self, node: fx.Node) -> Any:
        if node.kwargs:                                        # rounding_mode
            self.why = "its scores are rounded"
            return None
        return self._scaled(node.args[0], node.args[1], -1)

    def _scaled(self, scores: Any, factor: Any, power: int) -> Any:
        if self._is_a_temperature(factor):
            self.temperatures.append((factor, power))
            return scores
        if not isinstance(factor, (int, float)):
            self.why = "its scores are multiplied by a tensor"
            return None
        self.scale *= factor ** power
        return scores

    def _is_a_temperature(self, factor: Any) -> bool:
        """Whether all scores of a head are multiplied by the same number of that tensor: then its queries can be."""
        if not isinstance(factor, fx.Node) or "example_value" not in factor.meta or self.is_transposed:
            return False
        shape = shape_of(factor)
        return len(shape) <= len(self.shape) and all(size == 1 for size in shape[-2:])

    def _view(self, node: fx.Node) -> Any:
        before = shape_of(node.args[0])
        if before[-2:] != self.shape[-2:]:
            self.why = "its scores are viewed in another shape"
            return None
        self.shape = before
        return node.args[0]

    _reshape = _view

    def _tanh(self, node: fx.Node) -> Any:
        if self.temperatures:
            self.why = "its scores go through a tanh, and are multiplied by a tensor"
            return None
        if self.cap is not None:
            self.why = "its scores go through a tanh twice"
            return None
        self.cap, self.scale = self.scale, 1.0
        return node.args[0]

    def _add(self, node: fx.Node) -> Any:
        scores, other = self._scores_and(node)
        return self._with_a_mask(node, scores, other, 1.0)

    def _sub(self, node: fx.Node) -> Any:
        scores, other = node.args[0], node.args[1]
        if row_maximum := row_maximum_of(other, scores):       # a softmax takes no notice of it
            self.chain += row_maximum
            return scores
        scores, other = self._scores_and(node)
        return self._with_a_mask(node, scores, other, -1.0)

    def _transpose(self, node: fx.Node) -> Any:
        if not swaps_the_last(node, len(self.shape)):
            self.why = "its scores have other dimensions before"
            return None
        self.is_transposed = not self.is_transposed
        self.shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return node.args[0]

    _swapaxes = _swapdims = _permute = _mT = _transpose

    def _with_a_mask(self, node: fx.Node, scores: Any, other: Any, sign: float) -> Any:
        alpha: Any = node.kwargs.get("alpha", 1)
        if scores is not node.args[0] and (sign < 0 or alpha != 1):
            self.why = "its scores are taken from something"
            return None
        if not isinstance(other, fx.Node):
            return self._shifted(scores)
        return self._masked(Mask(other, sign * alpha * self.scale), scores)

    def _shifted(self, scores: Any) -> Any:
        """By one number: a softmax takes no notice of it, a tanh does."""
        if self.cap is not None:
            self.why = "a number is added to its scores before the tanh of its soft cap"
            return None
        return scores

    def _max(self, node: fx.Node) -> Any:
        scores, least = self._scores_and(node)
        return self._at_least(scores, number_of(least))

    _maximum = _max

    def _clamp(self, node: fx.Node) -> Any:
        least, most = argument(node, 1, "min"), argument(node, 2, "max")
        return self._at_least(node.args[0], number_of(least) if most is None else None)

    _clip = _clamp_min = _clamp

    def _at_least(self, scores: Any, least: float | None) -> Any:
        """Scores of infinity become large ones, whose weights are zero as well."""
        if least is None or self.cap is not None or self.scale * least > BLOCKING:
            self.why = "its scores are cut off"
            return None
        return scores

    def _masked(self, mask: Mask, scores: Any) -> Any:
        if self.is_transposed:
            self.why = "its mask is put on the transposed scores"
            return None
        if self.cap is not None:
            self.why = "its mask is put on before the tanh of its soft cap"
            return None
        if self.temperatures:
            self.why = "its mask is put on before they are multiplied by a tensor"
            return None
        self.masks.append(replace(mask, leading=self.shape[:-2]))
        return scores

    def _masked_fill(self, node: fx.Node) -> Any:
        scores, mask, value = args_of(node)
        return self._filled(scores, mask, value, True)

    def _where(self, node: fx.Node) -> Any:
        condition, yes, no = args_of(node)
        if shape_of(yes) == self.shape and number_of(yes) is None:
            return self._filled(yes, condition, no, False)
        return self._filled(no, condition, yes, True)

    def _filled(self, scores: Any, mask: Any, value: Any, blocks: bool) -> Any:
        value = number_of(value)
        if value is None or not isinstance(mask, fx.Node):
            self.why = "its mask puts in a tensor"
            return None
        if self.scale * value > HIDING:
            self.why = f"its mask puts in {value:g}, which hides nothing"
            return None
        return self._masked(Mask(mask, self.scale, value, blocks), scores)

    def _scores_and(self, node: fx.Node) -> tuple[Any, Any]:
        """(the operand that has the shape of the scores, the other one)."""
        first, second = args_of(node)
        for leads in (_leads_to_a_matmul, _depends_on_a_matmul):
            if shape_of(first) == self.shape and leads(first):
                return first, second
            if leads(second):
                return second, first
        return (first, second) if isinstance(first, fx.Node) else (second, first)


def _leads_to_a_matmul(node: Any, depth: int = 12) -> bool:
    if not isinstance(node, fx.Node) or depth == 0 or not node.op.startswith("call_"):
        return False
    if name_of(node) in PRODUCTS:
        return True
    passed = (*CASTS, "mul", "div", "add", "masked_fill", "tanh")
    if name_of(node) == "where":
        return any(_leads_to_a_matmul(inner, depth - 1) for inner in node.args[1:])
    return name_of(node) in passed and any(_leads_to_a_matmul(inner, depth - 1) for inner in node.args)


def _depends_on_a_matmul(node: Any) -> bool:
    """Through whatever operations."""
    seen, todo = set[fx.Node](), [node] if isinstance(node, fx.Node) else []
    while todo:
        one = todo.pop()
        if one.op.startswith("call_") and name_of(one) in PRODUCTS:
            return True
        todo += [inner for inner in one.all_input_nodes if inner not in seen]
        seen.update(one.all_input_nodes)
    return False


def _first(node: fx.Node) -> Any:
    return node.args[0]


def _queries_and_keys(scores: fx.Node) -> tuple[Operand, Operand]:
    """The factors of that product."""
    name = name_of(scores)
    if name == "einsum":
        return _of_einsum(scores)
    if name == "baddbmm":
        query, key = argument(scores, 1, "batch1"), argument(scores, 2, "batch2")
    else:
        query, key = args_of(scores)
    return Operand(query), Operand(key, swapped(len(shape_of(key))))


def _of_einsum(scores: fx.Node) -> tuple[Operand, Operand]:
    left, right = _operands(scores)
    try:
        keys_first, of_queries, of_keys = einsum.of_scores(str(scores.args[0]))
    except einsum.NoProduct as error:
        raise Refused(f"its scores are einsum({str(error)!r})") from None
    queries, keys = (right, left) if keys_first else (left, right)
    return Operand(queries, of_queries), Operand(keys, of_keys)


def _operands(product: fx.Node) -> list[Any]:
    """Its tensors, in their order."""
    given = list(product.args[1:] if name_of(product) == "einsum" else product.args)
    return list(given[0]) if isinstance(given[0], (tuple, list)) else given


def _values(output: fx.Node, weights: Sequence[fx.Node]) -> tuple[Operand, einsum.Order]:
    """(the values, the order of [..., S, D] in the output), where some of `weights` is the other factor."""
    first, second = _operands(output)
    are_first = first in weights
    if name_of(output) != "einsum":
        transposed = swapped(len(shape_of(first)))
        return (Operand(second), None) if are_first else (Operand(first, transposed), transposed)
    try:
        of_values, of_result = einsum.of_output(str(output.args[0]), are_first)
    except einsum.NoProduct as error:
        raise Refused(f"its output is einsum({str(error)!r})") from None
    return Operand(second if are_first else first, of_values), of_result


def _own_scale(scores: fx.Node) -> float:
    alpha: Any = scores.kwargs.get("alpha", 1)
    return float(alpha) if name_of(scores) == "baddbmm" else 1.0


def _downwards(softmax: fx.Node) -> tuple[fx.Node, tuple[float, bool], list[fx.Node]]:
    """(the matmul of weights and values, dropout on the way, the nodes between softmax and it)."""
    node, dropout = softmax, (0.0, False)
    is_transposed = False
    down: list[fx.Node] = []
    while True:
        if len(node.users) != 1:
            raise Refused("its weights are used more than once, as where they are returned")
        (user,) = node.users
        name = name_of(user) if user.op.startswith("call_") else user.op
        if name in ("matmul", "bmm", "einsum"):
            _refuse_other_products(user, node, is_transposed)
            return user, dropout, down
        if swaps_the_last(user, len(shape_of(node))):
            is_transposed = not is_transposed
            node = user
            down.append(node)
            continue
        if name == "dropout":
            dropout = float(argument(user, 1, "p", 0.5)), bool(argument(user, 2, "training", True))
        elif name == "output":
            raise Refused("its weights are returned")
        elif name in VIEWS:
            if shape_of(user)[-2:] != shape_of(node)[-2:]:
                raise Refused("its weights are viewed in another shape")
        elif name not in CASTS:
            raise Refused(f"between the softmax and the matmul with the values stands {name}")
        node = user
        down.append(node)


def _refuse_other_products(product: fx.Node, weights: fx.Node, is_transposed: bool) -> None:
    """Raise Refused but where it is weights @ values, or values^T @ weights^T."""
    first, second = _operands(product)
    if first is second:
        raise Refused("its weights are multiplied by themselves")
    if is_transposed and name_of(product) == "einsum":
        raise Refused("its weights are transposed, and multiplied by einsum")
    if name_of(product) != "einsum" and (first is weights) == is_transposed:
        why = "its weights are transposed" if is_transposed else "its weights are the second factor of a matmul"
        raise Refused(why)
