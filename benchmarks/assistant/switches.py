"""Settings of the process that a rung holds in its calls and in their backward. Code that is written may set them."""
import functools
from collections.abc import Callable
from typing import Any

import torch

from common.block.precision import FLOAT32_MATMUL, Switch


def _set_benchmark(on: bool) -> None:
    torch.backends.cudnn.benchmark = on


CUDNN_BENCHMARK = Switch(lambda: torch.backends.cudnn.benchmark, _set_benchmark)
EVERY = FLOAT32_MATMUL, CUDNN_BENCHMARK
Settings = tuple[Any, ...]                             # of each of EVERY, the value to hold; None: the caller's own


def held(settings: Settings, call: Callable) -> Callable:
    """`call` in these settings, forward and backward; its first argument is passed on."""
    for switch, value in zip(EVERY, settings, strict=True):
        if value is not None:
            call = switch.around(functools.partial(_same, value))(call)
    return call


def _same(value: Any, of: Any) -> Any:
    return value
