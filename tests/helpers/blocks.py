"""A block's inputs and results, and how far these are from FP64."""
import math
import sys

import pytest
import torch

from common import parameters, steps
from common.block import oracle
from common.block.config import BlockConfig
from common.measure import subject
from common.measure.subject import BlockSubject

STEPS = tuple(step.number for step in steps.ALL)
NAMES = tuple(parameters.shapes(BlockConfig(1, 1, 4, 1)))

SHAPES = {
    "usual": BlockConfig(2, 16, 32, 4, amp_dtype=None),
    "odd S, F below 4E": BlockConfig(3, 7, 24, 4, ffn_hidden_size=40, amp_dtype=None),
    "one token": BlockConfig(2, 1, 16, 2, amp_dtype=None),
    "one sequence, one head": BlockConfig(1, 5, 8, 1, amp_dtype=None),
    "D = 3": BlockConfig(2, 9, 24, 8, amp_dtype=None),
    "D = 1": BlockConfig(1, 6, 4, 4, amp_dtype=None),
    "one above a power of two, F above 4E": BlockConfig(2, 33, 24, 2, ffn_hidden_size=104, amp_dtype=None),
    "everything odd": BlockConfig(3, 17, 15, 3, ffn_hidden_size=31, amp_dtype=None),
}
each_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())


def case(config: BlockConfig, device="cpu", dtype=torch.float32, seed=0):
    """(canonical parameters, x, dy) of `config`, all random, the same on every machine; x and dy are [B, S, E]."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (config.batch_size, config.seq_len, config.hidden_size)
    x, dy = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    return {name: value.to(dtype) for name, value in parameters.seeded(config, seed).items()}, x, dy


def results(block, x, dy) -> dict[str, torch.Tensor | None]:
    """One forward and backward of the whole batch, under the names that `oracle.reference` uses."""
    block.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = block(x)
    y.backward(dy)
    return collect(block, x, y)


def collect(block, x, y) -> dict[str, torch.Tensor | None]:
    """What a backward from y = block(x) has left, under the names that `oracle.reference` uses."""
    tensors = {"output": y.detach(), "branch": y.detach().double() - x.detach().double(), "input gradient": x.grad}
    for name, gradient in parameters.gradients(block).items():
        tensors[name] = gradient
    return tensors


def errors(block, values, x, dy) -> dict[str, float]:
    """Relative L2 error against FP64 of everything in `results`."""
    truth = oracle.reference(x, values, block.config, dy)
    return differences(results(block, x, dy), truth)


def differences(tensors: dict, truth: dict) -> dict[str, float]:
    """Relative L2 error of everything in `truth`, on whichever devices the two are; what is None is infinitely off."""
    def off(value, true):
        return oracle.relative_error(value if value is None else value.cpu(), true.cpu().double())
    return {name: off(tensors[name], true) for name, true in truth.items()}


def worst(errors_of: dict[str, float]) -> tuple[float, float]:
    """(largest error of output and branch, largest of all gradients)."""
    forward = {"output", "branch"}
    gradients = [error for name, error in errors_of.items() if name not in forward]
    return max(errors_of[name] for name in forward), max(gradients)


def decibels(error: float) -> float:
    """Signal-to-noise ratio of a relative L2 error."""
    return -20 * math.log10(max(error, sys.float_info.min))


def subject_of(block, x, dy, kind: str = "float64") -> BlockSubject:
    """The block as what is timed; its gates are those of what it multiplies in, `kind`."""
    named = dict(block.named_parameters())
    return BlockSubject(block, [x], [dy], named, oracle.GATES[kind], config=block.config)


def calibrate(block, x, dy) -> None:
    """Let its FP8 scales see three forward+backwards, as a run does."""
    subject.calibrate(subject_of(block, x, dy))
