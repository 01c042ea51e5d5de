"""One iteration of a pass: what is timed, what happens between two of them, and what a replay of it must give again."""
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..block.workload import BACKWARD as BACKWARD
from ..block.workload import BOTH, FORWARD
from .timing import nothing

MODES = (FORWARD, BOTH)                   # the passes of a block
LAUNCHES = ("eager", "graph")


@dataclass(frozen=True)
class Iteration:
    """One call of `run` is one iteration. It returns what it computed: outputs, or where it is a backward alone
    gradients. `between` runs before each, outside the timed region.
    """
    run: Callable[[], list[Tensor]]
    between: Callable[[], None]
    reads: list[Tensor]                   # changed while a replay is proved: the replay must follow them
    receives: Mapping[str, Tensor]        # name -> what finds its gradient in .grad
    plain: "Iteration | None" = None      # the same without what looks at its results in between, where something does

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that the last `run` left, by name, without those that are None."""
        return {name: tensor.grad for name, tensor in self.receives.items() if tensor.grad is not None}


def as_list(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a call, which may be a single one."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def of_call(call: Callable, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], parameters: Mapping[str, Tensor],
            mode: str, constants: Collection[int] = ()) -> Iteration:
    """call(*inputs) under no_grad, or with its backward, which ends in .grad of the floating inputs and `parameters`.

    `constants` are the places of floating inputs that take no gradient, as masks do not.
    Gradients are set to None between iterations: accumulating them would add a read and a write of each.
    """
    floating = [t for t in inputs if t.is_floating_point()]
    if mode == FORWARD:
        def forward() -> list[Tensor]:
            with torch.no_grad():
                return as_list(call(*inputs))
        return Iteration(forward, nothing, floating, {})
    receives = {f"input {place}": t.requires_grad_() for place, t in enumerate(inputs)
                if t.is_floating_point() and place not in constants}
    receives.update(parameters)
    cleared = list(receives.values())

    def forward_backward() -> list[Tensor]:
        outputs = as_list(call(*inputs))
        torch.autograd.backward(outputs, cotangents)
        return [y.detach() for y in outputs]           # undetached they would keep the graph alive

    def clear_gradients() -> None:
        for tensor in cleared:
            tensor.grad = None
    return Iteration(forward_backward, clear_gradients, floating, receives)


def of_copies(call: Callable, copies: Sequence[Sequence[Tensor]], mode: str, seed: int) -> Iteration:
    """One call on each of several copies of its inputs, so that no cache holds them: forward, or backward alone.

    The results of all copies live until the last is done: each has memory of its own, as the inputs have. A backward
    has random cotangents, and returns the gradients of the first copy's inputs first, then of the second's, and so on.
    """
    if mode == FORWARD:
        def forward() -> list[Tensor]:
            with torch.no_grad():
                results = [as_list(call(*inputs)) for inputs in copies]
            return [y for outputs in results for y in outputs]
        return Iteration(forward, nothing, list(copies[0]), {})
    generator = torch.Generator(copies[0][0].device).manual_seed(seed)
    passes: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = []          # outputs, inputs, cotangents
    for inputs in copies:
        outputs = taking_gradients(as_list(call(*inputs)))
        cotangents = [torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in outputs]
        passes.append((outputs, taking_gradients(inputs), cotangents))

    def backward() -> list[Tensor]:
        results: list[Tensor] = []
        for outputs, inputs, cotangents in passes:
            results += torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True)
        return results
    return Iteration(backward, nothing, passes[0][2], {})


def taking_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those inputs or outputs that take a gradient."""
    return [t for t in tensors if t.requires_grad]
