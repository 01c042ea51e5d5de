"""Blocks one after the other, the ways to compile them, and what they must compute."""
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from common import parameters, steps
from common.block import oracle
from common.block.config import BlockConfig
from common.block.precision import float32_matmul_precision
from common.runtime import compiler

Call = Callable[[Tensor], Tensor]
WHOLE, BY_LAYER = "whole", "by layer"


class Stack(nn.Module):
    """Blocks of step 2, uncompiled, [B, S, E] -> [B, S, E]. Each has parameters of its own."""

    def __init__(self, config: BlockConfig, layers: int, seed: int, device: torch.device):
        super().__init__()
        own = config.replace(amp_dtype=None)                   # the parameters are FP32 in any case
        self.values = [parameters.seeded(own, seed + layer) for layer in range(layers)]
        self.blocks = nn.ModuleList(steps.load(2).build(config, values, device) for values in self.values)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)                               # their own __call__ would enter autocast once more
        return x


class InItsPrecision:
    """A call under the precision of the stack: TF32 and autocast, entered outside of what is compiled, as step 3 does.
    """

    def __init__(self, call: Call, config: BlockConfig):
        self.run, self.config = call, config
        self.matmul_precision = "high"

    @float32_matmul_precision("high")
    def __call__(self, x: Tensor) -> Tensor:
        dtype = self.config.amp_dtype
        with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
            return self.run(x)


def compiled(stack: Stack, form: str) -> Call:
    """By torch.compile as step 3 has it: all blocks as one graph, or each by itself."""
    compiler.allow_many_graphs()
    compile_it = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    if form == WHOLE:
        return compile_it(stack.forward)
    return InTurn([compile_it(block.forward) for block in stack.blocks])   # one piece of code: it is compiled once


class InTurn:
    """Calls, each on what the one before returned."""

    def __init__(self, calls: Sequence[Call]):
        self.first, self.others = calls[0], calls[1:]

    def __call__(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for call in self.others:
            x = call(x)
        return x


def sample(config: BlockConfig, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(x, dy), [B, S, E] each. dy is zero but for the last sequence: FP64 needs to know no other."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(config.batch_size, config.seq_len, config.hidden_size, generator=generator)
    dy = torch.zeros_like(x)
    dy[-1] = torch.randn(config.seq_len, config.hidden_size, generator=generator)
    return x.to(device), dy.to(device)


def errors(stack: Stack, x: Tensor, dy: Tensor, y: Tensor, with_gradients: bool) -> dict[str, float]:
    """Relative L2 errors against FP64 of the last sequence: branch, and where there are some of the gradients.

    Gradients are those in .grad of x and of the parameters; of the latter the worst is reported.
    """
    exact_x = x[-1:].detach().double().requires_grad_()
    layers, h = [], exact_x
    for values in stack.values:
        of_layer = {name: value.to(x.device, torch.float64).requires_grad_() for name, value in values.items()}
        layers.append(of_layer)
        h = oracle.block(h, of_layer, stack.config)
    branch = h.detach() - exact_x.detach()
    found = {"branch": oracle.relative_error(y[-1:].detach().double() - exact_x.detach(), branch)}
    if not with_gradients:
        return found
    h.backward(dy[-1:].double())
    assert exact_x.grad is not None
    found["input gradient"] = oracle.relative_error(None if x.grad is None else x.grad[-1:], exact_x.grad)
    worst = 0.0
    for block, of_layer in zip(stack.blocks, layers, strict=True):
        own = parameters.gradients(block)
        for name, parameter in of_layer.items():
            assert parameter.grad is not None
            worst = max(worst, oracle.relative_error(own.get(name), parameter.grad))
    found["parameter gradient"] = worst
    return found


def kind_of(config: BlockConfig, device: torch.device) -> str:
    """What its matmuls multiply in."""
    return steps.load(2).traits.arithmetic(config, torch.float32, device).matmul


def gates(kind: str, layers: int) -> dict[str, float]:
    """What these may be. Each layer rounds by itself, so errors add up as their squares do."""
    branch, gradient = oracle.GATES[kind]
    grown = layers ** 0.5
    return {"branch": branch * grown, "input gradient": gradient * grown, "parameter gradient": gradient * grown}
