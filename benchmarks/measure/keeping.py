"""A caller's modules stay as they were, whatever a check does with them; dropout is off while they are compared."""
import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch_modes
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure.calls import Inputs, first_names, modules_of, named_parameters
from benchmarks.measure.state import State, random_numbers_kept
from common.runtime import compiler

_DROPOUT_P = {                                         # function -> place of its rate among the arguments
    F.dropout: 1, torch.dropout: 1, F.alpha_dropout: 1, F.dropout1d: 1, F.dropout2d: 1, F.dropout3d: 1,
    F.feature_alpha_dropout: 1, F.scaled_dot_product_attention: 4}


@contextlib.contextmanager
def kept(*calls: Callable) -> Iterator[None]:
    """Everything behind these is restored afterwards, after an error and Ctrl-C too; so are all random numbers.

    That is: mode, attributes, lists and dicts, buffers, gradients, and which parameters take one.
    """
    parameters = list({id(t): t for call in calls for t in named_parameters(call).values()}.values())
    gradients = [(t, t.grad, t.requires_grad) for t in parameters]
    state = State(*calls)
    try:
        with random_numbers_kept():
            yield
    finally:
        state.restore()
        for t, gradient, wanted in gradients:
            t.grad = gradient
            if t.is_leaf:
                t.requires_grad_(wanted)


@contextlib.contextmanager
def torch_modes_kept() -> Iterator[None]:
    """Those that are on now, and no others, are on afterwards: a signal between the lines of torch's tracer leaves its
    modes on, in which no tensor has values."""
    dispatching, of_functions = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    try:
        yield
    finally:
        while torch._C._len_torch_dispatch_stack() > dispatching:
            dispatch_modes._pop_mode()
        while torch._C._len_torch_function_stack() > of_functions:
            torch.overrides._pop_mode()


@contextlib.contextmanager
def loaded(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Meanwhile these parameters have those values, by name; gives the names of those whose own were others.

    A tensor of several names, as a tied one has, takes the value of the first.
    """
    own: dict[str, Tensor] = {}
    firsts = first_names({name: parameters[name] for name in values})
    with torch.no_grad():
        for name in dict.fromkeys(firsts.values()):
            value = values[name]
            value = value.to(parameters[name].device, parameters[name].dtype)
            if not torch.equal(parameters[name], value):
                own[name] = parameters[name].detach().clone()
                parameters[name].copy_(value)
    try:
        yield list(own)
    finally:
        with torch.no_grad():
            for name, value in own.items():
                parameters[name].copy_(value)


def materialised(inputs: Inputs, *calls: Callable) -> None:
    """Give lazy layers their shapes, as any first call does. What that call raises, the next one reports."""
    for call in calls:
        lazy = [module for module in modules_of(call) if isinstance(module, LazyModuleMixin)]
        if any(module.has_uninitialized_params() for module in lazy):
            with random_numbers_kept(), torch.no_grad(), contextlib.suppress(Exception):
                inputs.copies().call(call)


@contextlib.contextmanager
def parameters_kept(call: Callable, inputs: Inputs) -> Iterator[list[str]]:
    """Parameters that it writes to, as an embedding with `max_norm` does, are restored afterwards; gives their names.

    One call shows which those are: copies of all might not fit.
    """
    before = written_by(call, inputs)
    written = {id(t) for t, _ in before}
    try:
        yield [name for name, t in named_parameters(call).items() if id(t) in written]
    finally:
        _put_back(before)


def written_by(call: Callable, inputs: Inputs) -> list[tuple[Tensor, Tensor]]:
    """(parameter, its value) of each that a call without gradients writes to; they have that value again.

    It runs uncompiled: Dynamo of torch 2.11 never compiles a function again that it met under such a watch and a break.
    """
    parameters = list({id(t): t for t in named_parameters(call).values()}.values())
    aliases = [(t, t.detach()) for t in parameters if t.layout == torch.strided]
    watch, uncompiled = _BeforeItIsWritten(parameters), torch.compiler.set_stance("force_eager")
    with kept(call), torch.no_grad(), uncompiled, contextlib.suppress(Exception), watch:
        inputs.copies().call(call)                     # what it raises, it raises again where that is reported
    seen = {id(t) for t, _ in watch.values}
    moved = [(t, alias.clone()) for t, alias in aliases if t.data_ptr() != alias.data_ptr() and id(t) not in seen]
    values = [*watch.values, *moved]                   # t.data = ... writes to no memory: it takes other
    _put_back(values)
    return values


def _put_back(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for t, value in values:
            t.copy_(value)


class _BeforeItIsWritten(TorchDispatchMode):
    """Keeps the values that tensors have before an operator first writes to them."""
    supports_higher_order_operators = True                 # as that of flex_attention, which writes to none

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self.values: list[tuple[Tensor, Tensor]] = []
        self._untouched: dict[Any, list[Tensor]] = {}
        for t in {id(t): t for t in tensors}.values():
            if t.layout == torch.strided:
                self._untouched.setdefault(t.untyped_storage()._cdata, []).append(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, HigherOrderOperator) and func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(args[place] if place < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _keep(self, written: Any) -> None:
        for t in pytree.tree_leaves(written):
            if isinstance(t, Tensor) and t.layout == torch.strided:
                kept_now = self._untouched.pop(t.untyped_storage()._cdata, [])
                self.values += [(one, one.detach().clone()) for one in kept_now]


# ------------------------------------------------------------------------------------------------------------- dropout


def compiled_inside(call: Callable) -> bool:
    """Whether anything in it went through torch.compile."""
    return compiler.holds_compiled(call) or any(map(compiler.is_compiled, modules_of(call)))


def uncompiled_meanwhile(call: Callable) -> contextlib.AbstractContextManager:
    """Modules that went through torch.compile run as they were written, and so do the compiled functions that they
    call: what they mean is no matter of a compiler, and few of its kernels take FP64.

    What is compiled by an attribute of its own, as by a backend that rewrites it, is left as it is.
    """
    if compiler.holds_compiled(call) and not any(map(compiler.is_compiled, modules_of(call))):
        return contextlib.nullcontext()
    return _uncompiled()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Nothing is compiled; torch does not warn that a FlexAttention is not, which the model compiles."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"flex_attention called without torch\.compile")
        yield


def uncompiled_in_fp64(call: Callable, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """The same for a copy in FP64, which tells the meaning. Other dtypes need the memory that a compiler saves."""
    return uncompiled_meanwhile(call) if dtype == torch.float64 else contextlib.nullcontext()


@contextlib.contextmanager
def without_dropout(call: Callable, functions: bool = True) -> Iterator[None]:
    """Meanwhile it drops nothing, in train mode too: its modules do not, nor with `functions` the functions it calls.

    Compiled code does not see the functions; there the rate must be an attribute whose name holds "drop", of a module
    or of its config.
    """
    changed: list[tuple[Any, str, float]] = []
    for module in modules_of(call):
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                is_rate = isinstance(value, float) and 0 < value <= 1
                if is_rate and ("drop" in name or isinstance(module, nn.modules.dropout._DropoutNd)):
                    with contextlib.suppress(AttributeError):            # a frozen config: functions are seen below
                        setattr(holder, name, 0.0)
                        changed.append((holder, name, value))
    try:
        with NoDropout() if functions and not compiled_inside(call) else contextlib.nullcontext():
            yield
    finally:
        for holder, name, value in changed:
            setattr(holder, name, value)


class NoDropout(TorchFunctionMode):
    """Every rate of dropout that a function is called with becomes 0."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT_P:
            name = "dropout_p" if func is F.scaled_dot_product_attention else "p"
            place = _DROPOUT_P[func]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1:])
            else:
                kwargs[name] = 0.0
        return func(*args, **kwargs)
