"""Whether a model can be called again and again: what it keeps between its calls may grow, or hold a graph."""
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure.calls import Inputs, modules_of
from benchmarks.measure.keeping import kept
from common.outcome import UserError

CALLS = 3                              # each of which must work on more than the one before


class _Counting(TorchDispatchMode):
    """How many elements the operators make."""
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements += sum(leaf.numel() for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor))
        return made


def refuse_growing(model: nn.Module, inputs: Inputs) -> None:
    """Raises UserError where every call works on more than the one before: no two times could be compared."""
    counts, sizes = [], []
    with kept(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for _ in range(CALLS):
            with _Counting() as counting:
                inputs.copies().call(model)
            counts.append(counting.elements)
            sizes.append({name: _size(value) for name, value in _attributes(model)})
    if sorted(set(counts)) != counts:
        return
    grown = [name for name, size in sizes[-1].items() if size > sizes[0].get(name, size)]
    raise UserError(f"each call works on more than the one before{_listed(grown)}: empty it where forward begins, or "
                    "take it as an input")


@contextlib.contextmanager
def graphs_named(model: nn.Module) -> Iterator[None]:
    """A backward that fails since attributes hold the graph of an earlier call raises UserError with their names."""
    try:
        yield
    except RuntimeError:
        holding = [name for name, value in _attributes(model) if _holds_a_graph(value)]
        if not holding:
            raise
        raise UserError(f"a second backward fails: the model keeps a graph between its calls{_listed(holding)}; keep "
                        "what is detached, or add --inference") from None


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that its modules hold, but for parameters, buffers and hooks."""
    for module in modules_of(model):
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and not name.endswith("_hooks"):
                yield name, value


def _holds_a_graph(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(value))


def _size(value: Any) -> int:
    """Elements of all tensors in there."""
    return sum(leaf.numel() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _listed(names: list[str]) -> str:
    return f" ({', '.join(dict.fromkeys(names))})" if names else ""
