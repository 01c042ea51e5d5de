"""One line for input that a kernel can't take: what is wrong, and what to give."""
import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def described(given) -> str:
    """Shape, dtype and device, for a message; what is no tensor is itself."""
    return f"{tuple(given.shape)} {given.dtype} on {given.device}" if isinstance(given, Tensor) else repr(given)


def require_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise ValueError unless `tensor` is one, and has one of `dtypes`."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is {described(tensor)}: give a tensor")
    if tensor.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}: give {', '.join(others)} or {last}")


def require_like(name: str, tensor: Tensor, x: Tensor, shape: tuple[int, ...] | None = None, *, name_of_x: str = "x"
                 ) -> None:
    """Raise ValueError unless `tensor` has x's dtype and device, and `shape` (x's where none is given)."""
    shape = tuple(x.shape if shape is None else shape)
    if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
        raise ValueError(f"{name} is {described(tensor)}: give {shape} {x.dtype} on {x.device}, as {name_of_x} has it")
