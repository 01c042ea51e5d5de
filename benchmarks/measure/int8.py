"""Weights rounded to INT8, one scale for each output, and a reference that multiplies by such weights."""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LARGEST = 127                              # both signs have it


def in_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weight [out, in] in INT8, scale [out] in its dtype): their product is the weight, rounded."""
    rows = weight.detach().double() if weight.dtype == torch.float64 else weight.detach().float()
    scale = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
    return (rows / scale[:, None]).round().to(torch.int8), scale.to(weight.dtype)


class WithInt8Weights(TorchFunctionMode):
    """Meanwhile each linear layer multiplies by its weight rounded to INT8; that has the gradient as if it were not.

    It calls F.linear, or torch.addmm with a parameter [in, out].
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.addmm and not kwargs and isinstance(args[2], nn.Parameter):
            bias, x, weight = args
            return _linear(x, weight.t(), bias)
        return (_linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    values, scale = in_int8(weight)
    product = F.linear(input, values.to(weight.dtype))
    y = product * scale.to(product.dtype)
    if weight.requires_grad and torch.is_grad_enabled():
        unrounded = F.linear(input.detach(), weight)
        y = y + (unrounded - unrounded.detach())
    return y if bias is None else y + bias.to(y.dtype)
