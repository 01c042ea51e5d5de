"""What the kernels here share: how Triton's are launched, and one line for input that they can't take."""
import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def launchable(kernel):
    """The kernel as torch.compile can see it; Triton's interpreter, which older torch can't wrap, takes it as it is."""
    return kernel if triton.knobs.runtime.interpret else wrap_triton(kernel)


def stages(step: int, most: int, room: int) -> int:
    """Of the pipeline of a loop that loads `step` bytes at a time: as many as fit in `room` bytes of shared memory."""
    return max(1, min(most, room // step))


def described(given) -> str:
    """Shape, dtype and device, for a message; what is no tensor is itself."""
    return f"{tuple(given.shape)} {given.dtype} on {given.device}" if isinstance(given, Tensor) else repr(given)


def require_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise ValueError unless `tensor` is one, and has one of `dtypes`."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is {described(tensor)}: give a tensor")
    if tensor.dtype not in dtypes:
        *some, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}: give {', '.join(some)} or {last}")


def require_float(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise ValueError unless `tensor` has one of `dtypes` and is where Triton runs: a GPU, or its interpreter."""
    require_dtype(name, tensor, dtypes)
    if not (tensor.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"{name} is on {tensor.device}: a Triton kernel needs a GPU (with TRITON_INTERPRET=1 it runs "
                         "on a CPU)")


def require_like(name: str, tensor: Tensor, x: Tensor, shape: tuple[int, ...] | None = None, *, name_of_x: str = "x"
                 ) -> None:
    """Raise ValueError unless `tensor` has x's dtype and device, and `shape` (x's where none is given)."""
    shape = tuple(x.shape if shape is None else shape)
    if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
        raise ValueError(f"{name} is {described(tensor)}: give {shape} {x.dtype} on {x.device}, as {name_of_x} has it")
