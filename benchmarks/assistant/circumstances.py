"""In which other circumstances the edited code of a model must be the same function: modes, sizes, what is left out.

A model is measured on one input, and used on others: in eval mode too, on shorter texts, one sample at a time, on one
new token beside the keys of many, without its mask.
"""
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.measure.calls import Inputs, outputs_of
from benchmarks.measure.keeping import kept

SAMPLES, LENGTH = 2, 61                    # at most; a length that no power of two divides


@dataclass(frozen=True)
class Circumstance:
    """What a model is called with, and in which mode. `words` follow what went wrong: "in eval mode"."""
    words: str
    inputs: Inputs
    training: bool

    @contextlib.contextmanager
    def entered(self, *modules: nn.Module) -> Iterator[None]:
        """Meanwhile these are in its mode."""
        with kept(*modules):
            for module in modules:
                module.train(self.training)
            yield


def circumstances(model: nn.Module, given: Inputs) -> list[Circumstance]:
    """Those in which this model runs, the smallest inputs that it takes in the one mode and in the other first."""
    inputs, mode = _smallest(model, given), model.training
    wanted = [Circumstance("on other sizes" if inputs is not given else "", inputs, mode),
              Circumstance(f"in {'eval' if mode else 'train'} mode", inputs, not mode)]
    with contextlib.suppress(RuntimeError):                # a tensor that has no dimension
        wanted.append(Circumstance("on one sample", inputs.first(1), mode))
    wanted += [Circumstance(f"without {name}", others, mode) for name, others in left_out(model, inputs)]
    shapes = [outputs(model, each) for each in wanted]
    found = [each for each, shape in zip(wanted, shapes, strict=True) if shape is not None]
    others = [(f"on a length of {length}", of_length(inputs, length), length) for length in (LENGTH // 2, 1)]
    if any(shapes[0] or []):                               # a loss alone would hide that targets were broadcast
        others.append(("with one query beside more keys", with_one_query(inputs), 1))
    for words, narrowed, length in others:
        # What comes out must be as long: a mask of the old length may only happen to broadcast.
        expected = _cut(shapes[0] or [], _length_of(inputs), length)
        if narrowed and outputs(model, each := Circumstance(words, narrowed, mode)) == expected:
            found.append(each)
    return found


def outputs(model: nn.Module, circumstance: Circumstance) -> list[tuple[int, ...]] | None:
    """The shapes of what it gives there; None where it raises."""
    try:
        with circumstance.entered(model), torch.no_grad():
            return [tuple(t.shape) for t in outputs_of(circumstance.inputs.copies().call(model)).values()]
    except Exception:                      # whatever it raises, it does not take this
        return None


def _cut(shapes: Sequence[tuple[int, ...]], own: int | None, length: int) -> list[tuple[int, ...]]:
    """Shapes with another length in place of their own, in each dimension behind the first."""
    return [tuple(length if dim and size == own else size for dim, size in enumerate(shape)) for shape in shapes]


def _smallest(model: nn.Module, given: Inputs) -> Inputs:
    """The first few samples, the first few of a length, as far as the model takes that."""
    smallest = given
    for shrink in (_fewer, functools.partial(of_length, length=LENGTH)):
        smaller = shrink(smallest)
        if smaller and outputs(model, Circumstance("", smaller, model.training)) is not None:
            smallest = smaller
    return smallest


def _fewer(inputs: Inputs) -> Inputs | None:
    """The first few samples; None where there are no more."""
    tensors = list(inputs.named().values())
    total = next((t for t in tensors if t.ndim > 1), tensors[0])
    return inputs.first(SAMPLES) if total.ndim and total.size(0) > SAMPLES else None


def of_length(inputs: Inputs, length: int) -> Inputs | None:
    """Every dimension that is as long as the second of the first tensor, cut off there; None where none is longer."""
    own = _length_of(inputs)
    return _narrowed(inputs, lambda place, size: size == own, length) if own and own > length else None


def with_one_query(inputs: Inputs) -> Inputs | None:
    """The first position of the first tensor, the others as they are; None where it is the only tensor."""
    own = _length_of(inputs)
    if not own or own == 1 or len(inputs.named()) < 2:
        return None
    return _narrowed(inputs, lambda place, size: place == 0 and size == own, 1)


def _length_of(inputs: Inputs) -> int | None:
    """The second dimension of tokens [B, S] or of what has more than two, [B, S, E]. Of features [N, E] None."""
    first = next(iter(inputs.named().values()))
    return first.size(1) if first.ndim > (2 if first.is_floating_point() else 1) else None


def _narrowed(inputs: Inputs, wanted: Callable[[int, int], bool], length: int) -> Inputs:
    """Dimensions behind the first one, by the place of their tensor and their size, cut off."""
    places = iter(range(len(inputs.named())))

    def cut(t: Tensor) -> Tensor:
        place = next(places)
        for dim, size in enumerate(t.shape[1:], 1):
            if wanted(place, size):
                t = t.narrow(dim, 0, length)
                if place == 0:
                    break                              # a width may happen to be as large
        return t
    args, kwargs = pytree.tree_map_only(Tensor, cut, (inputs.args, dict(inputs.kwargs)))
    return replace(inputs, args=args, kwargs=kwargs)


def left_out(model: nn.Module, inputs: Inputs) -> list[tuple[str, Inputs]]:
    """(name, the inputs without it) of each tensor that the forward need not be given: its default is None."""
    try:
        signature = inspect.signature(model.forward)
        given = signature.bind(*inputs.args, **inputs.kwargs)
    except (TypeError, ValueError):
        return []
    found = []
    for name, value in list(given.arguments.items()):
        if isinstance(value, Tensor) and signature.parameters[name].default is None:
            given.arguments[name] = None
            found.append((name, replace(inputs, args=given.args, kwargs=given.kwargs)))
            given.arguments[name] = value
    return found
