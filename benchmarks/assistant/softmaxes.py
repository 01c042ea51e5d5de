"""Softmaxes as they stand in a graph: the library's, and those by hand, however they are spelt."""
import itertools
from typing import Any

from torch import fx

from benchmarks.assistant.graph import Captured, args_of, argument, shape_of
from benchmarks.assistant.normal import name_of

SOFTMAX = ("softmax", "_softmax")
LOG_SOFTMAX = ("log_softmax", "_log_softmax")


def softmaxes(graph: Captured) -> list[fx.Node]:
    """Those of the library, and the last operation of each by hand; exponentials where only the output is divided."""
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    return [node for node in calls if name_of(node) in SOFTMAX or softmax_by_hand(node) or divided_late(node)]


def softmax_by_hand(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """What stands between scores and a softmax by hand; the first is a function of the scores. None where it is none.

    Exponentials over the sum of their row; the exponential of scores less their logsumexp, or of a log_softmax.
    """
    given = args_of(node)
    if node.kwargs or not all(isinstance(each, fx.Node) for each in given):
        return None
    if name_of(node) == "div" and len(given) == 2:
        above, below = given
        return (above, below) if name_of(above) == "exp" and _is_of_rows(below, "sum", above) else None
    if name_of(node) != "exp" or len(given) != 1:
        return None
    [logarithm] = given
    if name_of(logarithm) in LOG_SOFTMAX and is_last(argument(logarithm, 1, "dim"), logarithm):
        return (logarithm,)
    if name_of(logarithm) != "sub" or logarithm.kwargs or len(logarithm.args) != 2:
        return None
    scores, subtracted = args_of(logarithm)
    return (subtracted, logarithm) if _is_of_rows(subtracted, "logsumexp", scores) else None


def divided_late(exponentials: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(their sums, their product with the values, the quotient), as where e @ v is divided by the sum of each row of e.

    None where they are used otherwise.
    """
    if name_of(exponentials) != "exp" or len(exponentials.users) != 2:
        return None
    for sums, product in itertools.permutations(exponentials.users):
        quotients = [*product.users]
        if name_of(product) not in ("matmul", "bmm") or args_of(product)[0] is not exponentials or len(quotients) != 1:
            continue
        [quotient] = quotients
        is_quotient = quotient.op.startswith("call_") and name_of(quotient) == "div" and not quotient.kwargs
        if is_quotient and args_of(quotient) == (product, sums) and _is_of_rows(sums, "sum", exponentials):
            return sums, product, quotient
    return None


def _is_of_rows(node: Any, name: str, of: Any) -> bool:
    """Whether it is that reduction of each row of something, and keeps its dimension."""
    if not isinstance(node, fx.Node) or name_of(node) != name or args_of(node)[0] is not of:
        return False
    return is_last(argument(node, 1, "dim"), of) and bool(argument(node, 2, "keepdim", False))


def is_last(dim: Any, of: fx.Node) -> bool:
    """Whether that is the last dimension of what a node gives, or a tuple of it alone."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return dim in (-1, len(shape_of(of)) - 1)


def row_maximum_of(node: Any, scores: Any) -> list[fx.Node]:
    """The operations that give the largest of each row of the scores, the last first; none for another value."""
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.op.startswith("call_"):
        chain.append(node)
        name = name_of(node)
        if name in ("amax", "max"):
            is_of_rows = argument(node, 1, "dim") in (-1, len(shape_of(scores)) - 1)
            is_kept = argument(node, 2, "keepdim", False)
            return chain if is_of_rows and is_kept and node.args[0] is scores else []
        if name != "detach" and not (name == "getitem" and node.args[1] == 0):
            return []
        node = node.args[0]
    return []
