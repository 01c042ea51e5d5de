"""A call of any structure as one on tensors alone, which is what a clock and a graph take."""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.measure.calls import Inputs, outputs_of
from benchmarks.measure.observing import Loss, Work


class Flat:
    """A call on tensors alone, that returns tensors alone: of whatever structure a module takes and gives."""

    def __init__(self, module: Callable, inputs: Inputs, loss: Loss | None, wanted: Sequence[str]):
        self.module, self.loss, self.wanted, self.need_gradients = module, loss, wanted, inputs.need_gradients
        leaves, self.structure = pytree.tree_flatten((inputs.args, dict(inputs.kwargs)))
        self.rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        leaves = list(self.rest)
        for place, t in zip(self.places, tensors, strict=True):
            leaves[place] = t
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        returned = Inputs(args, kwargs, need_gradients=self.need_gradients).call(self.module)
        if self.loss:
            return [self.loss(returned)]
        outputs = outputs_of(returned)
        return [outputs[name] for name in self.wanted]


def flat_of(module: Callable, work: Work) -> tuple[Flat, dict[str, Tensor]]:
    """(the call on tensors alone, the outputs of one call by name, in which gradients were recorded)."""
    inputs, start = work.inputs.as_trained(), work.start_of(module)
    with torch.set_grad_enabled(not work.forward_only):
        returned = inputs.call(module)
        outputs = outputs_of(work.loss(returned) if work.loss else returned)
    start.begin(work.seed)
    taking = [name for name, output in outputs.items() if output.requires_grad]
    return Flat(module, inputs, work.loss, taking or list(outputs)), outputs
