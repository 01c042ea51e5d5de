"""LayerNorm and RMSNorm by hand, as they stand in a graph."""
import math
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from benchmarks.assistant.graph import (
    Captured,
    Refusal,
    Refused,
    Region,
    args_of,
    argument,
    between,
    place_of,
    refuse_mixed_gradients,
    regions,
    shape_of,
)
from benchmarks.assistant.normal import CASTS, name_of


@dataclass(eq=False)
class Norm(Region):
    """One norm by hand, over one dimension."""
    x: fx.Node
    output: fx.Node
    epsilon: float
    is_centred: bool                         # a LayerNorm; else an RMSNorm
    dim: int                                 # that it goes over, from 0 on
    weight: fx.Node | None = None            # along that dimension, in whatever shape
    bias: fx.Node | None = None
    with_epsilon: fx.Node | None = None      # the sum of a variance and it, where there is one
    alone: "Norm | None" = None              # without casts, weight and bias, which may stand in another function

    @property
    def width(self) -> int:
        return shape_of(self.x)[self.dim]

    @property
    def is_over_the_last(self) -> bool:
        return self.dim == len(shape_of(self.x)) - 1

    @property
    def function(self) -> str:
        return "layer_norm" if self.is_centred else "rms_norm"


OUTSIDE_OF_THE_ROOT = "its epsilon is added outside of the root: the library's stands inside"
LENGTHS = ("norm", "linalg_norm", "linalg_vector_norm")        # of rows


def roots(graph: Captured) -> list[fx.Node]:
    """Every square root of a mean and every length that is kept as a dimension, and what is scaled to length 1: where a
    norm by hand may be.
    """
    found = []
    for node in graph.nodes:
        is_root = _calls(node, "sqrt", "rsqrt", "std", *LENGTHS) or _is_power(node, (0.5, -0.5))
        if (is_root and 1 in shape_of(node)) or _calls(node, "normalize"):
            found.append(node)
    return found


def norms_in(graph: Captured) -> list[Norm | Refusal]:
    """The norm around every root, or why it is another function than the library's."""
    return regions(graph, roots(graph), norm_at)


def norm_at(root: fx.Node, graph: Captured) -> Norm | None:
    """The norm around a root; None where it is none. Raises Refused where it is another function than the library's."""
    if _calls(root, "normalize"):
        return _of_length_one(root, graph)
    if _calls(root, *LENGTHS):
        return _by_length(root, graph)
    added = _bare(root.args[0])
    if not _calls(added, "add") or _calls(root, "std"):
        _refuse_a_root_alone(root, added)
        return None
    variance, epsilon = added.args[0], argument(added, 1, "other")
    if isinstance(variance, (int, float)):
        variance, epsilon = epsilon, variance
    if not isinstance(epsilon, (int, float)):
        return None
    squared = _mean_of_squares(_bare(variance))
    if squared is None:
        return None
    x, is_centred, dim = squared
    user = _divided(root)
    if user is None:
        return None
    norm = Norm(graph, (), x, user, float(epsilon), is_centred, dim, with_epsilon=added)
    rest = _without_weight(norm, next(inner for inner in user.args if inner is not root))
    if not _is_normalised(rest, norm):
        return None
    if norm.weight is None:
        norm.alone = replace(norm, nodes=between(x, user, graph))
    _with_affine(norm)
    norm.x = _uncast(x, root, norm.output)
    norm.nodes = between(norm.x, norm.output, graph)
    refuse_mixed_gradients(graph, norm.nodes)
    return norm


def _of_length_one(normalized: fx.Node, graph: Captured) -> Norm | None:
    """The RMSNorm that scales x to length 1 and multiplies it by the root of its width; None for another multiple.

    Its epsilon is the least length. Of a mean of squares that is its square over the width.
    """
    x, shape = args_of(normalized)[0], shape_of(normalized)
    dim, least = argument(normalized, 2, "dim", 1), argument(normalized, 3, "eps", 1e-12)
    if argument(normalized, 1, "p", 2.0) != 2 or not isinstance(dim, int) or not isinstance(least, float):
        return None
    dim %= len(shape)
    norm = Norm(graph, (), x, normalized, least**2 / shape[dim], False, dim)
    return _between_both_ends(norm) if _is_multiplied_by(norm.width**0.5, norm) else None


def _is_multiplied_by(factor: float, norm: Norm) -> bool:
    """Whether what a norm gives until now is multiplied by that number, and maybe a weight; the norm gets both."""
    is_multiplied = False
    while len(norm.output.users) == 1:
        (user,) = norm.output.users
        if not _calls(user, "mul"):
            break
        other = next((each for each in args_of(user) if each is not norm.output), None)
        if isinstance(other, fx.Node) and norm.weight is None and _is_along(other, norm):
            norm.weight = other
        elif isinstance(other, (int, float)) and not is_multiplied and math.isclose(other, factor):
            is_multiplied = True
        else:
            break
        norm.output = user
    return is_multiplied


def _between_both_ends(norm: Norm) -> Norm:
    """The norm with all that stands between its input and its output. Raises Refused where it can't be replaced."""
    norm.nodes = between(norm.x, norm.output, norm.graph)
    refuse_mixed_gradients(norm.graph, norm.nodes)
    return norm


def _by_length(length: fx.Node, graph: Captured) -> Norm | None:
    """The RMSNorm that divides x by its length over the root of its width, or multiplies by that root behind it; None
    for another multiple. Its epsilon is that of `_of_length_one`. Raises Refused where one is added to the length.
    """
    x, shape = args_of(length)[0], shape_of(length)
    dim, power = argument(length, 2, "dim"), argument(length, 1, "p", argument(length, 1, "ord", 2))
    if power not in (2, None, "fro") or not isinstance(dim, int) or not argument(length, 3, "keepdim", False):
        return None
    node, share, least = length, 1.0, 0.0
    while len(node.users) == 1:
        (user,) = node.users
        other = next((each for each in args_of(user) if each is not node), None)
        if _calls(user, "div") and user.args[1] is node:
            break
        if _calls(user, "add") and any(_calls(each, "div") and each.args[1] is user for each in user.users):
            raise Refused(OUTSIDE_OF_THE_ROOT)
        bound = argument(user, 1, "min") if _calls(user, "clamp", "clamp_min", "clip") else None
        if isinstance(bound, (int, float)) and argument(user, 2, "max") is None and not least:
            least = bound / share
        elif isinstance(other, (int, float)) and other > 0 and _calls(user, "mul"):
            share *= other
        elif isinstance(other, (int, float)) and other > 0 and _calls(user, "div"):
            share /= other
        else:
            return None
        node = user
    divided = next(iter(node.users)) if len(node.users) == 1 else None
    dim %= len(shape)
    width = shape_of(x)[dim]
    if divided is None or not _same(_bare(divided.args[0]), _bare(x)):
        return None
    norm = Norm(graph, (), x, divided, least**2 / width, False, dim)
    if math.isclose(share, width**-0.5):
        _with_affine(norm)
    elif not _is_multiplied_by(share * width**0.5, norm):
        return None
    norm.x = _uncast(x, length, norm.output)
    return _between_both_ends(norm)


def _refuse_a_root_alone(root: fx.Node, squared: Any) -> None:
    """Raise Refused where something is divided by a deviation that an epsilon is added to behind the root."""
    is_deviation = (_calls(root, "std") and _over(root) is not None) or _mean_of_squares(squared) is not None
    added = [user for user in root.users if _calls(user, "add")]
    if is_deviation and any(_calls(user, "div") and user.args[1] is each for each in added for user in each.users):
        raise Refused(OUTSIDE_OF_THE_ROOT)


def _mean_of_squares(node: Any) -> tuple[fx.Node, bool, int] | None:
    """(x, whether its mean is taken off first, over which dimension), where a node is the mean of squares, or the
    variance, of x.
    """
    node = _of_var_mean(node)
    if _calls(node, "var", "var_mean"):
        dim = _over(node)
        if dim is None:
            return None
        unbiased = argument(node, 2, "unbiased", True) if "correction" not in node.kwargs else node.kwargs["correction"]
        if unbiased not in (False, 0):
            raise Refused("its variance is unbiased: the library's divides by the width, not by one less")
        return node.args[0], True, dim
    if _calls(node, "sub") and _calls(_base_of_square(node.args[1]), "mean"):
        squares, mean = node.args[0], _base_of_square(node.args[1])
        x, dim = mean.args[0], _over(mean)
        if dim is None or not _calls(squares, "mean") or _over(squares) != dim:
            return None
        return (x, True, dim) if _same(_base_of_square(squares.args[0]), x) else None
    dim = _over(node) if _calls(node, "mean") else None
    if dim is None:
        return None
    base = _base_of_square(_bare(node.args[0]))
    if base is None:
        return None
    if _calls(base, "sub") and _is_mean_of(base.args[1], base.args[0], dim):
        return base.args[0], True, dim
    return base, False, dim


def _of_var_mean(node: Any) -> Any:
    """The call of var_mean, where a node is the variance that it gives."""
    of_both = _calls(node, "getitem") and node.args[1] == 0 and _calls(node.args[0], "var_mean")
    return node.args[0] if of_both else node


def _base_of_square(node: Any) -> Any:
    """x, where a node is its square."""
    if _calls(node, "square") or _is_power(node, (2, 2.0)):
        return node.args[0]
    if _calls(node, "mul") and _same(node.args[0], node.args[1]):
        return node.args[0]
    return None


def _divided(root: fx.Node) -> fx.Node | None:
    """What is divided by the root, or multiplied by its inverse."""
    inverse = name_of(root) == "rsqrt" or _is_power(root, (-0.5,))
    wanted = "mul" if inverse else "div"
    users = [user for user in root.users if _calls(user, wanted) and (inverse or user.args[1] is root)]
    return users[0] if len(root.users) == 1 and users else None


def _without_weight(norm: Norm, node: Any) -> Any:
    """What is divided by the root; the norm gets the weight that it was multiplied by before."""
    if _calls(node, "mul") and len(node.users) == 1:
        for place, factor in enumerate(node.args):
            if isinstance(factor, fx.Node) and _is_along(factor, norm):
                norm.weight = factor
                return node.args[1 - place]
    return node


def _is_along(node: Any, norm: Norm) -> bool:
    """Whether it has a number for each place of the norm's dimension, and stands along it."""
    shape, ndim = shape_of(node), len(shape_of(norm.x))
    wanted = tuple(norm.width if dim == norm.dim else 1 for dim in range(ndim))
    return bool(shape) and (1,) * (ndim - len(shape)) + shape == wanted


def _is_normalised(node: Any, norm: Norm) -> bool:
    if norm.is_centred:
        return _calls(node, "sub") and _same(node.args[0], norm.x) and _is_mean_of(node.args[1], norm.x, norm.dim)
    return _same(_bare(node), _bare(norm.x))               # squared in FP32, and divided as it is: that gives FP32


def _is_mean_of(node: Any, x: Any, dim: int) -> bool:
    if _calls(node, "getitem") and node.args[1] == 1 and _calls(node.args[0], "var_mean"):
        node = node.args[0]
    is_mean = _calls(node, "mean", "var_mean") and _over(node) == dim
    return is_mean and _same(node.args[0], x)


def _over(node: fx.Node) -> int | None:
    """The one dimension that a mean or variance is over, and keeps; None where it is another mean."""
    dim = argument(node, 1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    place = 3 if name_of(node) in ("var", "var_mean", "std") else 2
    if not isinstance(dim, int) or not argument(node, place, "keepdim", False):
        return None
    return dim % len(shape_of(node.args[0]))


def _with_affine(norm: Norm) -> None:
    """The weight and the bias behind it, where there are any."""
    for name, wanted in (("mul", "weight"), ("add", "bias"))[norm.weight is not None:]:
        node, only = norm.output, norm.output.users
        while len(only) == 1 and next(iter(only)).op.startswith("call_") and name_of(next(iter(only))) in CASTS:
            node = next(iter(only))
            only = node.users
        user = next(iter(only)) if len(only) == 1 else None
        if user is None or not _calls(user, name) or (wanted == "bias" and norm.weight is None):
            return
        other = next((inner for inner in user.args if inner is not node), None)
        if not isinstance(other, fx.Node) or not _is_along(other, norm):
            return
        if wanted == "bias" and not norm.is_centred:
            return                                       # the library's RMSNorm has none
        setattr(norm, wanted, other)
        norm.output = user


# --------------------------------------------------------------------------------------------------------------- nodes


def _calls(node: Any, *names: str) -> bool:
    return isinstance(node, fx.Node) and node.op.startswith("call_") and name_of(node) in names


def _is_power(node: Any, exponents: tuple[float, ...]) -> bool:
    return _calls(node, "pow") and argument(node, 1, "exponent") in exponents


def _bare(node: Any) -> Any:
    """A node without the casts around it."""
    while isinstance(node, fx.Node) and node.op.startswith("call_") and name_of(node) in CASTS:
        node = node.args[0]
    return node


def _uncast(x: fx.Node, *of_the_norm: fx.Node) -> fx.Node:
    """What was cast to FP32 for the norm's sake: the library's does that itself. A cast in another function than these
    nodes is none of its own.
    """
    functions = set(map(_function_of, of_the_norm))
    while (_calls(x, "float") or (_calls(x, "to") and len(x.args) == 2)) and _function_of(x) in functions:
        x = args_of(x)[0]
    return x


def _function_of(node: fx.Node) -> tuple[str, str] | None:
    """(the file, the function) that a node stands in."""
    place = place_of(node)
    return (place.file, place.function) if place else None


def _same(a: Any, b: Any, depth: int = 6) -> bool:
    """Whether two nodes are the same operations on the same values."""
    if a is b:
        return True
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or depth == 0 or a.op != b.op or a.op == "placeholder":
        return not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b
    same_call = a.target == b.target and len(a.args) == len(b.args) and a.kwargs == b.kwargs
    return same_call and all(_same(mine, other, depth - 1) for mine, other in zip(a.args, b.args, strict=True))
