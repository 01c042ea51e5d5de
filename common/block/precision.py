"""Which arithmetic FP32 matmuls use in one block's forward and backward, and how its gradients become FP32.

torch.set_float32_matmul_precision is one switch for the whole process, and cuBLAS reads it at every matmul, those of
the backward included. A block that sets it around its forward alone computes its gradients in whatever another block
set last.
"""
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Switch:
    """A setting of the whole process that kernels read when they are launched, those of a backward included."""

    def __init__(self, get: Callable[[], Any], set_to: Callable[[Any], None]):
        self.get, self.set_to = get, set_to
        self.outside: Any = None                     # what the caller had set, while a backward is running

    @contextlib.contextmanager
    def at(self, value: Any) -> Iterator[None]:
        """Meanwhile it is at `value`; the caller's setting is back after errors too."""
        before = self.get()
        self.set_to(value)
        try:
            yield
        finally:
            self.set_to(before)

    def around(self, value_of: Callable[[Any], Any]):
        """Decorate a call whose first argument says the value: it holds in the forward and in the backward.

        The caller's own setting is back when the call returns, and again when the backward ends.
        """
        def decorate(call):
            @functools.wraps(call)
            def wrapped(block: Any, *args: Any, **kwargs: Any) -> Any:
                value = value_of(block)
                with self.at(value):
                    y = call(block, *args, **kwargs)
                for output in [y] if isinstance(y, Tensor) else pytree.tree_leaves(y):
                    if isinstance(output, Tensor) and output.requires_grad:
                        # Runs when the gradient of y arrives: before any kernel of this block's backward.
                        output.register_hook(lambda gradient: self._hold_until_backward_ends(value))
                return y
            return wrapped
        return decorate

    def _hold_until_backward_ends(self, value: Any) -> None:
        if self.outside is None:             # the first block of this backward; later ones only switch
            self.outside = self.get()
            torch.autograd.Variable._execution_engine.queue_callback(_Restore(self))       # as DDP and FSDP do
        self.set_to(value)


class _Restore:
    """Puts the caller's setting back, once: when the backward ends, or when an error drops its callbacks uncalled."""

    def __init__(self, switch: Switch):
        self.switch, self.done = switch, False

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            if self.switch.outside is not None:
                self.switch.set_to(self.switch.outside)
            self.switch.outside = None

    __del__ = __call__


FLOAT32_MATMUL = Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
CUDNN_TF32 = Switch(lambda: torch.backends.cudnn.allow_tf32,
                    lambda allowed: setattr(torch.backends.cudnn, "allow_tf32", allowed))


def multiplying_float32_in(precision: str) -> contextlib.AbstractContextManager[None]:
    """Meanwhile FP32 matmuls run in `precision`, "highest" or "high"; the caller's setting is back after errors too."""
    return FLOAT32_MATMUL.at(precision)


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Meanwhile neither matmuls in FP32 nor cuDNN's convolutions, which do by default, round to TF32."""
    with multiplying_float32_in("highest"), CUDNN_TF32.at(False):
        yield


def float32_matmul_precision(precision: str):
    """Decorate a block's __call__ so that its FP32 matmuls run in `precision`, forward and backward.

    "highest" is IEEE FP32, "high" allows TF32 on tensor cores (and on the few CPUs that have it). A block with a
    `matmul_precision` of its own runs in that.
    """
    return FLOAT32_MATMUL.around(lambda block: getattr(block, "matmul_precision", precision))


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it; without them PyTorch's loops take many times as long as FP32."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def compile_gradient_casts(block: nn.Module) -> None:
    """Let compiled code cast the 16-bit gradients of the block's FP32 matrices to FP32.

    Under autocast a matmul leaves its weight's gradient in 16 bits, and autograd casts it. Here autograd hands it on as
    it is, and a hook casts it; the study of peers has a row for what that gives. After backward() the gradients are the
    same, bit for bit, where each weight is used once; the gradients of several uses in one backward are added in 16
    bits, and torch.autograd.grad returns these. Does nothing where torch has no Tensor.grad_dtype, and to weights that
    are kept in FP8.
    """
    to_float32: Any = torch.compile(Tensor.float, dynamic=False)
    block.to_float32 = to_float32                            # where it can be seen that the block holds compiled code

    def cast(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != torch.float32:      # a sum with an earlier gradient is already
            parameter.grad = to_float32(gradient)

    for parameter in block.parameters():
        if (hasattr(parameter, "grad_dtype") and parameter.dtype == torch.float32 and parameter.ndim == 2
                and type(parameter) is nn.Parameter):
            parameter.grad_dtype = None
            parameter.register_post_accumulate_grad_hook(cast)
