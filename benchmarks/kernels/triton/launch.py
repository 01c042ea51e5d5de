"""What the Triton kernels share: how they are launched, and where they can run."""
import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from ..inputs import FLOATS, require_dtype


def launchable(kernel):
    """The kernel as torch.compile can see it; Triton's interpreter, which older torch can't wrap, takes it as it is."""
    return kernel if triton.knobs.runtime.interpret else wrap_triton(kernel)


def stages(step: int, most: int, room: int) -> int:
    """Of the pipeline of a loop that loads `step` bytes at a time: as many as fit in `room` bytes of shared memory."""
    return max(1, min(most, room // step))


def require_float(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise ValueError unless `tensor` has one of `dtypes` and is where Triton runs: a GPU, or its interpreter."""
    require_dtype(name, tensor, dtypes)
    if not (tensor.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(f"{name} is on {tensor.device}: a Triton kernel needs a GPU (with TRITON_INTERPRET=1 it runs "
                         "on a CPU)")
