"""Tensors of a graph that hold one number in all their elements, for sure."""
import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from benchmarks.assistant.graph import argument
from benchmarks.assistant.normal import CASTS, name_of

# Operation -> which of its arguments a tensor has in all its elements.
_FILLED_WITH = {"tensor": 0, "scalar_tensor": 0, "full": 1, "full_like": 1, "new_tensor": 1, "new_full": 2}
_FILLED = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
_OF_NUMBERS: dict[str, Callable[..., float]] = {"mul": operator.mul, "add": operator.add, "sub": operator.sub,
                                                "neg": operator.neg}


def number_of(value: Any) -> float | None:
    """A number, or that of a tensor in the graph that holds it in every element for sure: full([], v) and the like."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, fx.Node):
        return None
    name = name_of(value)
    if name in _FILLED:
        return _FILLED[name]
    if name in _FILLED_WITH:
        return number_of(argument(value, _FILLED_WITH[name], "fill_value"))
    if name in CASTS:
        return number_of(value.args[0])
    numbers = [number_of(inner) for inner in value.args] if name in _OF_NUMBERS and not value.kwargs else [None]
    return None if None in numbers else _OF_NUMBERS[name](*numbers)
