"""Cross-entropy by hand, as it stands in a graph: the logarithm of a softmax at the targets, however it is spelt.

It is taken in two parts. What gives the target's entry of each row (an index, a product with one-hot rows) is read from
the graph; what it is taken from is evaluated, and is held against log_softmax with its gradient.
"""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from benchmarks.assistant.graph import (
    Captured,
    Refusal,
    Refused,
    Region,
    Unknown,
    args_of,
    argument,
    between,
    dtype_of,
    refuse_mixed_gradients,
    regions,
    shape_of,
)
from benchmarks.assistant.normal import CASTS, name_of
from benchmarks.assistant.softmaxes import LOG_SOFTMAX, is_last
from benchmarks.measure.observing import largest_difference

EXACT, NEAR = 1e-5, 1e-2               # largest difference of the same function in FP32, and of one much like it
MOST = 16                              # operations before a pick that are looked at
_BOUNDED = ("clamp", "clamp_min", "clip")
_VIEWS = ("squeeze", "view", "reshape", "flatten")


@dataclass(frozen=True)
class Pick:
    """The operation that takes one entry of each row, at the targets: `index` [..., 1] or [...] of `rows` [..., V]."""
    output: fx.Node
    rows: fx.Node
    index: fx.Node
    of_index: tuple[fx.Node, ...] = ()                 # that bring it into the form that the pick takes
    reduction: str = "none"
    is_library: bool = False           # as fast as the library's: an index, and no product over all of a row
    is_negated: bool = False           # it gives the negative of the entry


@dataclass(eq=False)
class CrossEntropy(Region):
    """Of logits [..., V] and targets [...], by hand; the output is that, or its negative."""
    logits: fx.Node
    index: fx.Node
    output: fx.Node
    reduction: str
    is_negative: bool                  # the output is the logarithm of the probability
    dtype: torch.dtype                 # that it is computed in

    @property
    def options(self) -> dict[str, Any]:
        """What `by_library` takes besides logits and index."""
        return {"dtype": self.dtype, "reduction": self.reduction, "is_negative": self.is_negative,
                "shape": shape_of(self.output)}

    def code(self, logits: str, index: str) -> str:
        """The call of it."""
        if self.dtype != dtype_of(self.logits):
            logits = f"{logits}.to({self.dtype})"
        is_flat = len(shape_of(self.logits)) == 2
        rows = logits if is_flat else f"{logits}.flatten(0, -2)"
        targets = index if len(shape_of(self.index)) == 1 else f"{index}.flatten()"
        reduction = "" if self.reduction == "mean" else f', reduction="{self.reduction}"'
        sign = "-" if self.is_negative else ""
        call = f"{sign}F.cross_entropy({rows}, {targets}{reduction})"
        if len(shape_of(self.output)) < 2:
            return call
        each = f"({call})" if sign else call
        ends_in_one = len(shape_of(self.output)) == len(shape_of(self.logits))
        return f"{each}.view(*{logits}.shape[:-1], 1)" if ends_in_one else f"{each}.view({logits}.shape[:-1])"


def by_library(logits: Tensor, index: Tensor, dtype: torch.dtype, reduction: str, is_negative: bool,
               shape: Sequence[int]) -> Tensor:
    """What the library gives in its place."""
    losses = F.cross_entropy(logits.to(dtype).flatten(0, -2), index.flatten(), reduction=reduction)
    return (-losses if is_negative else losses).reshape(shape)


def losses_in(graph: Captured) -> list[CrossEntropy | Refusal]:
    """Those by hand, and what is nearly one, with the reason why it is none."""
    return regions(graph, picks(graph), loss_at)


def binary_losses_in(graph: Captured) -> list[Region]:
    """The two logarithms of each binary cross-entropy by hand: of a sigmoid, and of what it leaves of 1."""
    found = []
    for node in graph.nodes:
        if node.op.startswith("call_") and name_of(node) == "sigmoid":
            rest = [user for each in _kept_from_zero(node) for user in each.users
                    if name_of(user) in ("sub", "rsub") and 1 in args_of(user)]
            in_it, in_the_rest = _logarithms_of([node]), _logarithms_of(rest)
            if in_it and in_the_rest:
                found.append(Region(graph, tuple(each for each in graph.nodes if each in in_it | in_the_rest)))
    return found


def _kept_from_zero(node: fx.Node) -> list[fx.Node]:
    """It, and it with an epsilon or within bounds."""
    return [node, *(user for user in node.users if name_of(user) in ("add", *_BOUNDED))]


def _logarithms_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    return {user for node in nodes for each in _kept_from_zero(node) for user in each.users if name_of(user) == "log"}


def picks(graph: Captured) -> list[fx.Node]:
    """Where one by hand may be."""
    return [node for node in graph.nodes if node.op.startswith("call_") and pick_at(node, graph)]


def loss_at(node: fx.Node, graph: Captured) -> CrossEntropy | None:
    """The cross-entropy around a pick; None where there is none, or the library has no faster one. Raises Refused where
    it is nearly one.
    """
    pick = pick_at(node, graph)
    if pick is None:
        return None
    found = _of_logarithms(pick, graph) or _of_probabilities(pick, graph) or _less_the_sum(pick, graph)
    if found is None:
        return None
    logits, inner, is_negative = found
    output, reduction, is_negative = _whole(inner, pick.reduction, is_negative)
    nodes = between(logits, output, graph)
    if any(user not in nodes for each in nodes if each is not output for user in each.users):
        raise Refused("something else needs a part of it, such as a smoothing of the targets: F.cross_entropy has "
                      "label_smoothing")
    refuse_mixed_gradients(graph, nodes)
    nodes = tuple(node for node in graph.nodes if node in {*nodes, *pick.of_index})
    return CrossEntropy(graph, nodes, logits, pick.index, output, reduction, is_negative, dtype_of(output))


# ------------------------------------------------------------------------------------------------ the target's entries


def pick_at(node: fx.Node, graph: Captured) -> Pick | None:
    """The pick that a node is; None where it is none."""
    name, given = name_of(node), args_of(node)
    if not given or not isinstance(given[0], fx.Node) or len(shape_of(given[0])) < 2:
        return None
    rows = given[0]
    if name == "gather":
        index = argument(node, 2, "index")
        is_of_rows = is_last(argument(node, 1, "dim"), rows)
        is_whole = isinstance(index, fx.Node) and shape_of(index) == (*shape_of(rows)[:-1], 1)
        if not is_of_rows or not is_whole:
            return None
        inner = _unsqueezed(index)
        return Pick(node, rows, inner, () if inner is index else (index,), is_library=True)
    if name == "getitem":
        return _by_index(node, graph)
    if name == "nll_loss":
        return _by_library(node)
    if name == "sum":
        return _by_one_hot(node, graph)
    return None


def _unsqueezed(index: fx.Node) -> fx.Node:
    """The same numbers before they got a last dimension of one."""
    inner = args_of(index)[0] if args_of(index) else None
    is_view = index.op.startswith("call_") and name_of(index) in ("unsqueeze", "view", "reshape")
    return inner if is_view and isinstance(inner, fx.Node) else index


def _unviewed(rows: fx.Node) -> fx.Node:
    """The same rows before they were flattened."""
    while rows.op.startswith("call_") and name_of(rows) in ("view", "reshape", "flatten"):
        inner = args_of(rows)[0]
        if shape_of(inner)[-1:] != shape_of(rows)[-1:]:
            break
        rows = inner
    return rows


def _by_index(node: fx.Node, graph: Captured) -> Pick | None:
    """rows[arange(N), index]."""
    rows, places = args_of(node)
    if not isinstance(places, tuple) or len(places) != 2 or len(shape_of(rows)) != 2:
        return None
    numbers, index = places
    if not isinstance(index, fx.Node) or shape_of(index) != shape_of(rows)[:1] or dtype_of(index) != torch.int64:
        return None
    try:
        every = torch.as_tensor(graph.value_of(numbers))
    except (Unknown, RuntimeError, TypeError, ValueError):
        return None
    is_every = every.tolist() == list(range(shape_of(rows)[0]))
    return Pick(node, rows, index, is_library=True) if is_every else None


def _by_library(node: fx.Node) -> Pick | None:
    """F.nll_loss(rows, index) without weights."""
    rows, index = args_of(node)[0], argument(node, 1, "target")
    given = {name: value for name, value in node.kwargs.items() if value is not None}
    reduction = str(given.pop("reduction", "mean"))
    is_plain = given.pop("ignore_index", -100) == -100 and not given.keys() - {"target"} and len(node.args) < 3
    if not is_plain or not isinstance(index, fx.Node) or len(shape_of(rows)) != 2:
        return None
    return Pick(node, rows, index, reduction=reduction, is_library=True, is_negated=True)


def _by_one_hot(node: fx.Node, graph: Captured) -> Pick | None:
    """(rows * one_hot(index)).sum(-1)."""
    product = args_of(node)[0]
    if name_of(product) != "mul" or argument(node, 2, "keepdim", False):
        return None
    factors = args_of(product)
    if not is_last(argument(node, 1, "dim"), product) or not all(isinstance(each, fx.Node) for each in factors):
        return None
    for rows, hot in (factors, factors[::-1]):
        index = _one_hot_of(hot, graph)
        if index is not None and shape_of(rows) == shape_of(hot) == shape_of(product):
            return Pick(node, rows, index, between(index, hot, graph))
    return None


def _one_hot_of(node: fx.Node, graph: Captured) -> fx.Node | None:
    """The index whose one-hot rows a node gives, of whatever dtype."""
    while name_of(node) in CASTS and node.op.startswith("call_"):
        node = args_of(node)[0]
    name, given = name_of(node), args_of(node)
    if name == "one_hot" and isinstance(given[0], fx.Node):
        return given[0]
    if name != "scatter" or len(given) != 4 or given[3] != 1 or not is_last(given[1], node):
        return None
    zeros, _, index, _ = given
    is_zero = isinstance(zeros, fx.Node) and name_of(zeros) in ("zeros_like", "zeros", "new_zeros")
    return _unsqueezed(index) if is_zero and isinstance(index, fx.Node) else None


# ---------------------------------------------------------------------------------------- what the entries are taken of


Around = tuple[fx.Node, fx.Node, bool]                 # logits; the last operation; whether it gives the negative


def _of_logarithms(pick: Pick, graph: Captured) -> Around | None:
    """Of log_softmax(logits)."""
    rows = _unviewed(pick.rows)
    if name_of(rows) in LOG_SOFTMAX and pick.is_library:               # the library's own kernels already
        return None
    logits = _logits_of(rows, F.log_softmax, graph)
    return (logits, pick.output, not pick.is_negated) if logits is not None else None


def _of_probabilities(pick: Pick, graph: Captured) -> Around | None:
    """Of softmax(logits), and the logarithm is taken of the entries."""
    if pick.is_negated or pick.reduction != "none":
        return None
    _, logarithm = _past_views(pick.output)
    if logarithm is None or name_of(logarithm) not in ("log", "add", "clamp", "clamp_min"):
        return None
    logits = _logits_of(_unviewed(pick.rows), F.softmax, graph)
    if logits is None:
        return None
    if name_of(logarithm) != "log":
        raise Refused("what it takes the logarithm of is kept from zero: the library's needs no such constant, and is "
                      "another function where a probability is small")
    return logits, logarithm, True


def _less_the_sum(pick: Pick, graph: Captured) -> Around | None:
    """logsumexp(logits) - logits[index]."""
    if pick.is_negated or pick.reduction != "none":
        return None
    entries, user = _past_views(pick.output)
    if user is None or name_of(user) != "sub" or len(user.args) != 2 or user.kwargs:
        return None
    before, less = args_of(user)
    sums = before if less is entries else less
    if not isinstance(sums, fx.Node) or shape_of(sums) != shape_of(entries):
        return None
    apart = _how_far_apart(sums, pick.rows, torch.logsumexp, graph)
    return (pick.rows, user, less is not entries) if apart <= EXACT else None


def _past_views(entries: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(the same entries in their last shape, who uses them alone)."""
    user = _only_user(entries)
    while user is not None and name_of(user) in _VIEWS:
        entries, user = user, _only_user(user)
    return entries, user


def _logits_of(rows: fx.Node, function: Callable, graph: Captured) -> fx.Node | None:
    """What `rows` are that function of, the first in the graph. Raises Refused where it is much like it."""
    best, nearest = None, math.inf
    for logits in _before(rows):
        apart = _how_far_apart(rows, logits, function, graph)
        if apart <= EXACT:
            best = logits
        nearest = min(nearest, apart)
    if best is None and nearest <= NEAR:
        raise Refused(f"it is up to {nearest:.0e} away from the library's")
    return best


def _before(rows: fx.Node) -> list[fx.Node]:
    """What it is computed from, of its shape, the nearest first. A cast ends it: what comes before has another
    precision.
    """
    found: list[fx.Node] = []
    todo, seen = [rows], {rows}
    while todo and len(seen) < MOST:
        node = todo.pop(0)
        for inner in node.all_input_nodes if node.op.startswith("call_") and name_of(node) not in CASTS else ():
            if inner in seen:
                continue
            seen.add(inner)
            todo.append(inner)
            if shape_of(inner) == shape_of(rows):
                found.append(inner)
    return found


def _how_far_apart(node: fx.Node, x: fx.Node, function: Callable, graph: Captured) -> float:
    """How far it is from that function of x along the last dimension, in values and in gradients, on a few rows of
    random numbers; infinite where it depends on something else.
    """
    rank = len(shape_of(x))
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(*[2] * (rank - 1), 7, generator=generator, dtype=torch.float64).mul(3).requires_grad_()
    try:
        wanted = function(given, dim=-1)
        value = graph.value_where(node, {x: given}, gradients=True).reshape(wanted.shape)
        weights = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
        [own] = torch.autograd.grad((value * weights).sum(), given)
        [right] = torch.autograd.grad((wanted * weights).sum(), given)
    except (Unknown, RuntimeError, TypeError, ValueError, AttributeError):
        return math.inf
    return max(largest_difference([value.detach()], [wanted.detach()]), largest_difference([own], [right]))


# ----------------------------------------------------------------------------------------------------------- its output


def _whole(output: fx.Node, reduction: str, is_negative: bool) -> tuple[fx.Node, str, bool]:
    """With the sign and the mean or sum over everything that stand behind it."""
    while (user := _only_user(output)) is not None:
        name = name_of(user)
        if name == "neg":
            is_negative = not is_negative
        elif reduction == "none" and name in ("mean", "sum") and len(user.args) == 1 and not user.kwargs:
            reduction = name
        elif reduction != "none" or name not in _VIEWS:
            break
        output = user
    return output, reduction, is_negative


def _only_user(node: fx.Node) -> fx.Node | None:
    users: Sequence[fx.Node] = list(node.users)
    return users[0] if len(users) == 1 and users[0].op.startswith("call_") else None
