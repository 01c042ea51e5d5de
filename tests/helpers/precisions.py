"""Blocks that are watched: which precision of FP32 matmuls their forward and their backward run in."""
import torch
from torch import Tensor, nn


class Interrupted(Exception):
    """What stands in for a Ctrl-C, or for running out of memory."""


def interrupt(*_):
    """A hook that ends what it hangs on."""
    raise Interrupted


def watched(block: nn.Module, last: Tensor) -> tuple[list[str], list[str]]:
    """(precisions seen in its forward, and in its backward), from within both branches of the block.

    `last` is the parameter whose gradient is computed after all else.
    """
    forward: list[str] = []
    backward: list[str] = []

    def seen_in_backward(gradient):
        backward.append(torch.get_float32_matmul_precision())

    def watch(module, args, y):
        forward.append(torch.get_float32_matmul_precision())
        if y.requires_grad:
            y.register_hook(seen_in_backward)

    for module in block.children():
        if not isinstance(module, nn.LayerNorm):
            module.register_forward_hook(watch)
    last.register_hook(seen_in_backward)
    return forward, backward


def interrupt_backward(module: nn.Module) -> None:
    """From here on its backward raises Interrupted."""
    def hang(module, args, y):
        y.register_hook(interrupt)
    module.register_forward_hook(hang)
