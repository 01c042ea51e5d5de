"""What a model does as it is, call by call: every torch-level call of a forward with its line, module, FLOPs and bytes.

Dynamo sees the program between two graph breaks; this sees all of it, and what waits for the device.
"""
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.assistant.fusing import Given
from benchmarks.assistant.source import OURS, WRAPPERS, Place
from benchmarks.measure.calls import BLOCKING, Inputs, clean
from benchmarks.measure.keeping import kept

TORCHS_OWN = "aten", "prim", "prims"                                   # namespaces of operators
ATTENTION = "scaled_dot_product_attention"
INDEX_BY_MASK, ON_THE_HOST = "index by a mask:", "on the host:"              # before the name of an operator
_WITHOUT_GRADIENT = re.compile(r"^aten\.(detach|new_)|_like\b")       # operators that give none to what they are given
Shape = Sequence[int]
_HERE = str(Path(__file__).parent) + os.sep


@dataclass(frozen=True)
class Product:
    """An operator that multiplies: matmul, convolution, attention, recurrent layer."""
    operator: str
    flops: float
    dtype: torch.dtype | None              # of its operands
    shapes: tuple[tuple[int, ...], ...]    # of its operands, in their order: of a linear layer input and weight
    trains: bool                           # a gradient flows back into its first operand
    trains_weight: bool                    # and into one of the others


@dataclass
class Call:
    """One call of a torch function, from a line of somebody's code."""
    name: str                              # "linear", "softmax", "item"
    place: Place | None
    module: str                            # path of the innermost module that it was made in; "" of the model itself
    bytes: float = 0.0                     # that its operators read and write
    operators: list[str] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    through: frozenset[Place] = frozenset()                            # lines of libraries, between that line and it
    attends: Given | None = None           # of attention by torch's function
    blind: tuple[int, int] = (0, 0)        # rows of a softmax in which everything is masked, of how many
    is_batched: bool = False               # of a softmax: over matrices, as scores of attention are
    device: str = ""                       # the kind of device of the first tensor that it is given; "" of none
    is_told_its_size: bool = False         # of a result whose size it would else read from the device

    @property
    def flops(self) -> float:
        """Of matmuls, convolutions and attention, forward alone."""
        return sum(product.flops for product in self.products)

    @property
    def dtype(self) -> torch.dtype | None:
        """That its matmuls multiply."""
        return next((product.dtype for product in self.products), None)

    @property
    def is_matmul(self) -> bool:
        """Whether it multiplies matrices, in whatever form."""
        return bool(self.products)


@dataclass
class Trace:
    """The calls of one forward, in their order."""
    calls: list[Call] = field(default_factory=list)
    device: str = ""                       # the kind of device of what the model is given
    made_on_host: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, repr=False)
    # tensors that would lie on the host wherever the model is: of numbers, without a device, and what follows from them

    @property
    def trains(self) -> bool:
        """Whether it has a backward."""
        return any(product.trains or product.trains_weight for call in self.calls for product in call.products)

    @property
    def flops(self) -> float:
        return sum(call.flops for call in self.calls)

    @property
    def bytes(self) -> float:
        return sum(call.bytes for call in self.calls)


def trace(model: nn.Module, inputs: Inputs) -> Trace:
    """Run a forward and keep what it called, of what is compiled too. The model is restored afterwards."""
    recorded = Trace(device=inputs.device.type)
    paths = {id(module): clean(name) for name, module in model.named_modules()}
    given = inputs.as_trained()
    with (kept(model), torch.no_grad(), torch.compiler.set_stance("force_eager"), modules_running(paths) as inside,
          _Operators(recorded), Functions(recorded, inside, looks=True)):
        given.call(model)
    return recorded


@contextlib.contextmanager
def modules_running(paths: dict[int, str]) -> Iterator[list[str]]:
    """Meanwhile the paths of the modules that are being called, the innermost last."""
    inside = [""]

    def enter(module: nn.Module, *_: Any) -> None:
        inside.append(paths.get(id(module), inside[-1]))

    def leave(module: nn.Module, *_: Any) -> None:
        inside.pop()

    hooks = torch.nn.modules.module
    first, last = hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(
        leave, always_call=True)
    try:
        yield inside
    finally:
        first.remove()
        last.remove()


def here(frame: FrameType | None = None) -> tuple[Place | None, frozenset[Place]]:
    """(the innermost line that is no wrapper's, the lines of wrappers behind it), of a frame or of who calls this.

    The line is None where the suite itself called, not somebody's model.
    """
    frame, through = frame or sys._getframe(1), []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(WRAPPERS):
            through.append(Place(file, frame.f_lineno))
        elif not file.startswith((_HERE, "<")):
            place = None if file.startswith(OURS) else Place(os.path.abspath(file), frame.f_lineno)
            return place, frozenset(through)
        frame = frame.f_back
    return None, frozenset(through)


class Functions(TorchFunctionMode):
    """Sees the outermost torch functions. With `looks` it looks at what a softmax is given, too."""

    def __init__(self, recorded: Trace, inside: list[str], looks: bool = False):
        super().__init__()
        self.recorded, self.inside, self.looks = recorded, inside, looks

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = function_name(func)
        if name.startswith("__get__"):                                 # an attribute: shape, device, grad
            return func(*args, **(kwargs or {}))
        place, through = here()
        attends = Given.of_call(args, kwargs or {}) if name == ATTENTION else None
        device = next((t.device.type for t in tensors_in(args)), "")
        call = Call(name, place, self.inside[-1], through=through, attends=attends, device=device,
                    is_told_its_size=_is_told_its_size(name, args, kwargs or {}))
        if self.looks and name == "softmax":
            scores = args[0] if args else (kwargs or {}).get("input")
            call.blind = _blind_rows(scores)
            call.is_batched = isinstance(scores, Tensor) and scores.ndim > 2
        self.recorded.calls.append(call)
        result = self.called(func, args, kwargs or {})
        self._note_where(name, args, kwargs or {}, result)
        return result

    def _note_where(self, name: str, args: tuple, kwargs: dict, result: Any) -> None:
        """What is made of numbers alone lies on the host, until it is brought to where a device or a tensor says."""
        on_host, made = self.recorded.made_on_host, tensors_in(result)
        given = [*args[1:], *kwargs.values()]
        if name == "cuda" or (name == "to" and any(isinstance(each, (torch.device, str, Tensor)) for each in given)):
            for t in made:
                on_host.pop(t, None)
        elif "device" not in kwargs and not tensors_in((args, kwargs)):
            on_host.update(dict.fromkeys(made))

    def called(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Call it."""
        return func(*args, **kwargs)


def _is_told_its_size(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether one_hot is given its number of classes, or repeat_interleave what its repeats add up to.

    A CPU's one_hot reads its values then all the same, to check them; a GPU's does not.
    """
    if name == "one_hot":
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        return isinstance(classes, int) and classes >= 0
    return name == "repeat_interleave" and kwargs.get("output_size") is not None


def _blind_rows(scores: Any) -> tuple[int, int]:
    """(rows along the last dimension in which every score is masked, all rows)."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or not scores.ndim or not scores.numel():
        return 0, 0
    with _disable_current_modes():
        largest = scores.detach().amax(-1)
        return int((largest <= BLOCKING).sum()), largest.numel()


def function_name(func: Callable) -> str:
    """"softmax" of torch.softmax and of Tensor.softmax."""
    name = getattr(func, "__name__", "") or (resolve_name(func) or str(func)).rpartition(".")[2]
    return name.rstrip("_") if not name.startswith("__") else name


class _Operators(TorchDispatchMode):
    """Counts what the operators behind a function do."""
    supports_higher_order_operators = True                 # as that of flex_attention

    def __init__(self, recorded: Trace):
        super().__init__()
        self.recorded = recorded
        self.taking = WeakIdKeyDictionary()                    # tensors that a gradient would flow into

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        is_whole = torch.is_inference_mode_enabled() and isinstance(func, OpOverload)
        if is_whole and func.overloadpacket not in flop_registry:
            with self:                                         # there nothing has taken a linear layer apart before
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        given = tensors_in((args, kwargs))
        result, multiplied = _called(func, args, kwargs, given)
        given_back = tensors_in(result)
        if any(map(self.takes_a_gradient, given)) and not _WITHOUT_GRADIENT.search(str(func)):
            self.taking.update({t: None for t in given_back if t.is_floating_point() or t.is_complex()})
        if self.recorded.calls:
            call = self.recorded.calls[-1]
            is_on_host = bool(given) and all(map(self.lies_on_host, given))
            if is_on_host:
                self.recorded.made_on_host.update(dict.fromkeys(given_back))
            call.operators.append(operator_name(func, given, is_on_host))
            call.products += [_product(one, given, self.takes_a_gradient) for one in multiplied]
            call.bytes += _bytes_moved(func, given, given_back)
        return result

    def lies_on_host(self, t: Tensor) -> bool:
        """Whether it does beside a model on a GPU: what is read there is no wait."""
        return t in self.recorded.made_on_host or (self.recorded.device not in ("", "cpu") and t.device.type == "cpu")

    def takes_a_gradient(self, t: Tensor) -> bool:
        """It would, were the forward not run without gradients."""
        return t.requires_grad or t in self.taking


@dataclass(frozen=True)
class _Multiplied:
    """An operator that multiplies, and what it was given."""
    func: Any
    flops: float
    given: Sequence[Tensor]
    is_inside: bool                        # of an operator that somebody defined


class _Inside(TorchDispatchMode):
    """Sees what multiplies inside of an operator that somebody defined."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied: list[_Multiplied] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if flops := flops_of(func, args, kwargs or {}, result):
            self.multiplied.append(_Multiplied(func, flops, tensors_in((args, kwargs)), is_inside=True))
        return result


def _called(func: Any, args: tuple, kwargs: dict, given: Sequence[Tensor]) -> tuple[Any, list[_Multiplied]]:
    """(what it returns, what multiplied in it): itself, or operators inside of one that no formula is known of."""
    key = _key_of(func, given)
    if key is not None:
        with _Inside() as inside:                              # a call would leave it out: no mode sees its own calls
            result = func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        if inside.multiplied:
            return result, inside.multiplied
    else:
        result = func(*args, **kwargs)
    flops = flops_of(func, args, kwargs, result)
    return result, [_Multiplied(func, flops, given, is_inside=False)] if flops else []


def _key_of(func: Any, given: Sequence[Tensor]) -> torch._C.DispatchKey | None:
    """The device whose kernel of an operator runs that somebody defined; None of torch's own, or of other tensors."""
    if not isinstance(func, OpOverload) or func.namespace in TORCHS_OWN:
        return None
    if not all(map(_is_plain, given)) or not given:
        return None
    name = torch._C._dispatch_key_for_device(given[0].device.type)
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), name)
    return torch._C._parse_dispatch_key(name) if has_kernel else None


def _is_plain(t: Tensor) -> bool:
    """Whether a device's own kernels take it."""
    is_dense = t.layout == torch.strided and not (t.is_nested or t.is_quantized)
    return is_dense and type(t) in (Tensor, nn.Parameter)


def _bytes_moved(func: Any, given: Sequence[Tensor], given_back: Sequence[Tensor]) -> int:
    """What an operator reads and writes; a view does neither."""
    storages = set(map(_memory, given))
    is_view = all(_memory(t) in storages for t in given_back) and not _is_mutable(func)
    return 0 if is_view else sum(t.nbytes for t in (*given, *given_back))


def _is_mutable(func: Any) -> bool:
    return not isinstance(func, HigherOrderOperator) and func._schema.is_mutable


def _memory(t: Tensor) -> int:
    """What it shares with its views."""
    return t.untyped_storage().data_ptr()


def _product(one: _Multiplied, given: Sequence[Tensor], takes: Callable[[Tensor], bool]) -> Product:
    """`given` to the operator that was called: where it is another, any of these that takes a gradient counts."""
    name = one.func.name().rpartition("::")[2].partition(".")[0]
    operands = one.given[1:3] if name in ("addmm", "baddbmm", "addmv") else one.given        # behind the bias
    dtype = next((t.dtype for t in operands if t.is_floating_point()), None)
    first, others = (given, given) if one.is_inside else (operands[:1], operands[1:])
    return Product(name, one.flops, dtype, tuple(tuple(t.shape) for t in operands), any(map(takes, first)),
                   any(map(takes, others)))


def operator_name(func: Any, given: Sequence[Tensor], is_on_host: bool) -> str:
    """Marked where it indexes by a mask, and where all tensors that it is given lie on the host."""
    name = str(func)
    if is_on_host:
        return f"{ON_THE_HOST} {name}"
    by_mask = name.startswith("aten.index") and any(t.dtype == torch.bool for t in given[1:])
    return f"{INDEX_BY_MASK} {name}" if by_mask else name


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def flops_of(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
    """Of an operator: 2 for a multiplication and its addition, 8 of complex numbers, half of causal attention; 0 of any
    but matmuls.
    """
    packet = getattr(func, "overloadpacket", func)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    if packet in _ATTENDING:
        flops = float(_of_attention(*(each.shape for each in args[:3])))
    else:
        flops = float(formula(*args, **kwargs, out_val=result))
    if isinstance(result, Tensor) and result.is_complex():     # four real multiplications, four additions
        flops *= 4
    if isinstance(func, HigherOrderOperator):
        return flops
    is_causal = any(argument.name == "is_causal" and _given(func, args, kwargs, place)
                    for place, argument in enumerate(func._schema.arguments))
    return flops / 2 if is_causal else flops


def _of_attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Grouped heads of keys and values count as often as they are read; before torch 2.12 its formula refuses them."""
    batch, heads = query[:2]
    return sdpa_flop_count(query, (batch, heads, *key[2:]), (batch, heads, *value[2:]))


def _of_recurrent(x: Shape, weights: Sequence[Shape]) -> int:
    """Of every token with every weight; biases have one dimension."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) == 2)


def _of_grouped(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Of each group's rows or columns with its own matrix; where neither has a dimension of groups, inner ones are cut.

    A matrix of [S, K] and groups [G, K, N]; groups [G, M, K] and [K, S]; both as groups; [M, S] and [S, N].
    """
    rows = left[1:] if len(left) > len(right) else left
    return 2 * math.prod(rows) * right[-1]


_FORMULAS: dict[Any, Any] = {          # torch's counter does not know these
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_attention,
    torch.ops.aten.mkldnn_rnn_layer: lambda x, *weights, **_: _of_recurrent(x, weights[:2]),
    torch.ops.aten._cudnn_rnn: lambda x, weights, *_, **__: _of_recurrent(x, weights),
    torch.ops.aten._grouped_mm: _of_grouped,
    torch.ops.aten._scaled_grouped_mm: _of_grouped,
}
_ATTENDING = frozenset({
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention, torch.ops.aten._scaled_dot_product_cudnn_attention})
for packet, own_formula in _FORMULAS.items():
    if packet not in flop_registry:
        register_flop_formula(packet)(own_formula)


def _given(func: Any, args: tuple, kwargs: dict, place: int) -> Any:
    argument = func._schema.arguments[place]
    return args[place] if len(args) > place else kwargs.get(argument.name, argument.default_value)
