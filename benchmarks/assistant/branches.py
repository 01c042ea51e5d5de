"""Code that asks whether it is being compiled, as `torch.compiler.is_compiling()`, and does something else there.

Dynamo answers yes wherever it captures a graph. A graph that then runs eagerly, as of a model that nobody compiles, is
to be of the branch that runs there: the answer has to be no. torch's own code keeps the answer that it needs.
"""
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.variables import torch as dynamo

from benchmarks.assistant.source import WRAPPERS

ASKED = tuple(function for function in (
    torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, getattr(torch._utils, "is_compiling", None),
    getattr(torch._dynamo.external_utils, "is_compiling", None)) if function is not None)


class Asking:
    """Whether somebody's code has asked, meanwhile."""

    def __init__(self) -> None:
        self.asked = False


_listening: list[Asking] = []
_as_uncompiled: list[bool] = [False]


@contextlib.contextmanager
def asking() -> Iterator[Asking]:
    """Meanwhile whoever asks is noticed."""
    _install()
    _listening.append(Asking())
    try:
        yield _listening[-1]
    finally:
        _listening.pop()


@contextlib.contextmanager
def as_uncompiled() -> Iterator[None]:
    """Meanwhile the answer is no, for all code but torch's."""
    _install()
    _as_uncompiled.append(True)
    try:
        yield
    finally:
        _as_uncompiled.pop()


def around_what_cannot_be_captured() -> contextlib.AbstractContextManager[Any]:
    """Meanwhile a function that Dynamo can't capture runs as it is, and those that it calls are captured.

    Some operators run, and have no fake implementation for their dtype, as `grouped_mm` in FP32.
    """
    return torch._dynamo.config.patch(suppress_errors=True)


def _install() -> None:
    """Stand between Dynamo and its own answers, once. Where Dynamo keeps them elsewhere, it answers as ever."""
    handlers: dict[Any, Any] = getattr(dynamo.TorchInGraphFunctionVariable, "_get_handlers", dict)()
    for function in ASKED if hasattr(dynamo, "tracing_state_functions") else ():
        if function in handlers and not hasattr(handlers[function], "answers_as_told"):
            handlers[function] = _answering(handlers[function])


def _answering(own: Callable) -> Callable:
    def answer(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if tx.f_code.co_filename.startswith(WRAPPERS):
            return own(variable, tx, *args, **kwargs)
        for each in _listening:
            each.asked = True
        if not _as_uncompiled[-1]:
            return own(variable, tx, *args, **kwargs)
        states = dynamo.tracing_state_functions()
        before = states[variable.value]
        states[variable.value] = False
        try:
            return own(variable, tx, *args, **kwargs)
        finally:
            states[variable.value] = before
    vars(answer)["answers_as_told"] = True
    return answer
