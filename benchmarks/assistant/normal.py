"""Every call of a graph in one form, however it was spelt: arguments by place, and what works in place by its result.

Whoever reads a graph then asks for `node.args` alone, and follows a value through `scores += bias` as through a sum.
"""
import operator

import torch
from torch import fx

# Operation -> the arguments that stand by place, in their order. Others stay keywords.
_PLACES: dict[str, tuple[str, ...]] = {
    "add": ("input", "other"), "sub": ("input", "other"), "mul": ("input", "other"), "div": ("input", "other"),
    "pow": ("input", "exponent"), "matmul": ("input", "other"), "mm": ("input", "mat2"), "bmm": ("input", "mat2"),
    "addmm": ("input", "mat1", "mat2"), "baddbmm": ("input", "batch1", "batch2"), "linear": ("input", "weight", "bias"),
    "softmax": ("input", "dim"), "log_softmax": ("input", "dim"), "masked_fill": ("input", "mask", "value"),
    "where": ("condition", "input", "other"), "dropout": ("input", "p", "training"),
    "mean": ("input", "dim", "keepdim"),
    "transpose": ("input", "dim0", "dim1"), "swapaxes": ("input", "axis0", "axis1"), "permute": ("input", "dims"),
    "swapdims": ("input", "dim0", "dim1"),
    "scaled_dot_product_attention": ("query", "key", "value")}
_OTHER_NAMES = {"train": "training", "axis": "dim"}
CASTS = ("to", "float", "half", "bfloat16", "double", "type_as", "type", "contiguous")
VIEWS = frozenset({"view", "reshape", "transpose", "permute", "getitem", "unsqueeze", "squeeze", "expand", "chunk",
                   "split", "flatten", "unflatten", "size", "select", "movedim", "mT", "t", "detach", "unbind"})
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul, operator.ipow)
_SPELT = {"imul": "mul", "iadd": "add", "isub": "sub", "itruediv": "div", "imatmul": "matmul", "ipow": "pow",
          "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}


def name_of(node: fx.Node) -> str:
    """What a node calls, whichever way it is spelt: "mul" for a * b, torch.mul, a.mul and a *= b."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    name = name.rstrip("_") if not name.startswith("__") else name
    return _SPELT.get(name, name)


def is_changed_later(node: fx.Node) -> bool:
    """Whether what it gives, or a view of that, is changed in place."""
    for user in node.users:
        if is_in_place(user) and user.args[:1] == (node,):
            return True
        if user.op.startswith("call_") and name_of(user) in VIEWS and is_changed_later(user):
            return True
    return False


def is_in_place(node: fx.Node) -> bool:
    """Whether it changes its first argument, and gives that."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return node.target in _IN_PLACE or node.kwargs.get("inplace") is True or (
        name.endswith("_") and not name.endswith("__"))


def normalise(module: fx.GraphModule) -> None:
    """Bring every call of a graph into this form, in place. It computes what it did."""
    for node in list(module.graph.nodes):
        if node.op in ("call_function", "call_method"):
            _by_place(node)
            if node.op == "call_method" and node.target == "where":
                _as_function(node)
            if is_in_place(node) and node.args and isinstance(node.args[0], fx.Node):
                _follow(node.args[0], node)
    module.recompile()


def _by_place(node: fx.Node) -> None:
    """Put keywords where their arguments stand, as far as none is left out before them."""
    places = _PLACES.get(name_of(node), ("input",))
    given = {_OTHER_NAMES.get(name, name) if name not in places else name: (name, value)
             for name, value in node.kwargs.items()}
    args, used = list(node.args), set()
    for name in places[len(args):]:
        if name not in given:
            break
        own_name, value = given[name]
        args.append(value)
        used.add(own_name)
    node.args = tuple(args)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name not in used}


def _as_function(node: fx.Node) -> None:
    """x.where(condition, other) -> torch.where(condition, x, other)."""
    if len(node.args) == 3 and not node.kwargs:
        x, condition, other = node.args
        node.op, node.target, node.args = "call_function", torch.where, (condition, x, other)


def _follow(changed: fx.Node, result: fx.Node) -> None:
    """Whoever uses what was changed in place, later on, uses the result: they are one tensor."""
    later = set()
    node = result.next
    while node.op != "root":
        later.add(node)
        node = node.next
    for user in list(changed.users):
        if user in later:
            user.replace_input_with(changed, result)
