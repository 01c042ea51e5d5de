"""Deep copies of any callable, in another dtype: a module, or a function with all that it closes over."""
import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure.calls import held_by, in_dtype, uncompiled
from benchmarks.measure.state import State
from common.outcome import is_out_of_memory


def deep_copy(call: Callable, dtype: torch.dtype | None = None) -> Callable:
    """A copy with tensors of its own, in `dtype` where that is given. Ties stay ties; tensor hooks are lost.

    A function is made anew over copies of what it closes over; one that holds no tensor is returned as it is.
    Raises whatever a module's deepcopy raises.
    """
    return _Copies(dtype).of(call)


def deep_copy_with(call: Callable, loss: Callable | None, dtype: torch.dtype | None = None
                   ) -> tuple[Callable, Callable | None]:
    """As `deep_copy`, with a loss: parameters that it refers to are the copy's, and tensors of its own in `dtype`.

    A loss that can't be copied stays as it is.
    """
    copies = _Copies(dtype)
    copied = copies.of(call)
    if loss is None:
        return copied, None
    try:
        return copied, copies.of(loss)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return copied, loss


def shared_copy(module: nn.Module) -> nn.Module:
    """Other modules with the same parameters and buffers: ties, hooks and what is frozen stay.

    Raises whatever a module's deepcopy raises.
    """
    copies = _Copies(None)
    copies.memo |= {id(t): t for t in (*module.parameters(), *module.buffers())}
    copied = copies.of(module)
    assert isinstance(copied, nn.Module)
    return copied


class _Copies:
    """Everything that was copied so far, so that what was shared is shared again."""

    def __init__(self, dtype: torch.dtype | None):
        self.dtype = dtype
        self.memo: dict[int, Any] = {}                   # of copy.deepcopy
        self.made: dict[int, Any] = {}                   # id -> copy, of what is made here
        self.kept: list[Any] = []                        # while these live, their ids stay theirs

    def of(self, value: Any) -> Any:
        """The copy of a value; itself where it holds no tensor."""
        inner: Any = uncompiled(value) if callable(value) else value
        if id(inner) in self.made:
            return self.made[id(inner)]
        if isinstance(inner, nn.Module):
            return self._module(inner)
        if isinstance(inner, Tensor):
            return self._keep(inner, self._tensor(inner))
        if type(inner) in (list, tuple):
            return type(inner)(map(self.of, inner))
        if type(inner) is dict:
            return {key: self.of(value) for key, value in inner.items()}
        if not callable(inner) or isinstance(inner, type) or not held_by(inner):
            return value
        if isinstance(inner, types.FunctionType):
            return self._function(inner)
        if isinstance(inner, functools.partial):
            return functools.partial(self.of(inner.func), *self.of(inner.args), **self.of(inner.keywords))
        if isinstance(inner, types.MethodType):
            value = inner.__self__
            return types.MethodType(inner.__func__, self.of(value) if callable(value) else self._object(value))
        return self._object(inner)

    def _keep(self, value: Any, copied: Any) -> Any:
        self.made[id(value)] = copied
        self.kept.append(value)
        return copied

    def _tensor(self, t: Tensor) -> Tensor:
        return _tensor_in(copy.deepcopy(t, self.memo) if t.is_leaf else t.detach().clone(), self.dtype)

    def _module(self, module: nn.Module) -> nn.Module:
        """Functions that were set on it, as a `forward` of its own, refer to the copy too."""
        if id(module) in self.memo:                      # inside one that was copied
            return self.memo[id(module)]
        state = State(module)
        for result in state.results:                        # kept for others, as by a hook: only leaves can be copied
            self.memo.setdefault(id(result), result.detach().clone())
        for generator in state.generators:                  # nor can torch's own
            if isinstance(generator, torch.Generator):
                self.memo.setdefault(id(generator), torch.Generator(generator.device).set_state(generator.get_state()))
        copied = converted(copy.deepcopy(module, self.memo), self.dtype)
        self._keep(module, copied)
        for inner in copied.modules():
            for name, value in list(vars(inner).items()):
                if isinstance(value, types.FunctionType) and uncompiled(value) is value:      # the others are made anew
                    setattr(inner, name, self.of(value))
                elif name.endswith("_hooks"):
                    for key, hook in (value or {}).items():
                        if isinstance(hook, types.FunctionType):       # methods were copied with what they belong to
                            value[key] = self.of(hook)
        return copied

    def _function(self, function: types.FunctionType) -> Callable:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        names = dict(function.__globals__)
        made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        self._keep(function, made)                       # before what it refers to: that may refer to it
        for cell, own in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self.of(own.cell_contents)
        for name in inspect.getclosurevars(function).globals:
            names[name] = self.of(names[name])
        return made

    def _object(self, value: Any) -> Any:
        """A callable object, or one whose method it is, with copies of what it holds."""
        made = self._keep(value, copy.copy(value))
        for name, inner in vars(value).items():
            setattr(made, name, self.of(inner))
        return made


def converted(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module with everything floating in `dtype`, tensors that are no buffers too."""
    if dtype is None:
        return module
    module._apply(lambda t: in_dtype(t, dtype))          # `to` would drop what is imaginary
    for parameter in module.parameters():
        if not parameter.is_leaf:                        # a scripted module's, which then has a history
            parameter.detach_().requires_grad_()
    for inner in module.modules():
        for name, value in vars(inner).items():
            if isinstance(value, Tensor):
                setattr(inner, name, _tensor_in(value, dtype))
    return module


def _tensor_in(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    converted_t = in_dtype(t, dtype)
    return t if converted_t is t else converted_t.detach().requires_grad_(t.requires_grad)
