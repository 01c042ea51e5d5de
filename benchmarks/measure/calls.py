"""What a person passes, taken apart: inputs and outputs of any structure, and the tensors behind any callable."""
import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from common.outcome import Failed

PERTURBATIONS = 8                          # runs whose inputs are off by a rounding
BLOCKING = -1e4                            # added to a score it leaves a weight of zero, in FP64 too; so does less

# --------------------------------------------------------------------------------------------------- inputs and outputs


@dataclass(frozen=True)
class Step:
    """The relative step of a rounding: that of a tensor's own dtype, or a coarser one of what is computed in."""
    coarse: float = 0.0
    dtype: torch.dtype = torch.float32     # whose tensors are rounded so: others have their own

    def of(self, dtype: torch.dtype) -> float:
        own = torch.finfo(dtype).eps
        return max(own, self.coarse) if dtype == self.dtype else own


@dataclass(frozen=True)
class Inputs:
    """What a module is called with: positional values and values by keyword, of any structure that holds tensors."""
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    are_constant: bool = False             # no gradient flows into them
    need_gradients: bool = False           # the module computes some itself: it can't be called under no_grad

    @classmethod
    def of(cls, given: Any) -> "Inputs":
        """From one tensor, a tuple or list of positional values, or a dict of values by keyword.

        Raises ValueError where it is something else, or holds no tensor.
        """
        if isinstance(given, Inputs):
            return given
        if isinstance(given, Tensor):
            inputs = cls((given,))
        elif isinstance(given, Mapping):
            inputs = cls((), dict(given))
        elif isinstance(given, (tuple, list)):
            inputs = cls(tuple(given))
        else:
            raise ValueError(f"inputs: a {type(given).__name__} was given; give a tensor, a tuple of them, or a dict")
        if not inputs.named():
            raise ValueError("inputs: they hold no tensor; give a tensor, a tuple of tensors, or a dict by keyword")
        return inputs

    def named(self) -> dict[str, Tensor]:
        """Name -> tensor: "input 0", "input attention_mask", "input 1[0]"."""
        named = {}
        for place, value in (*enumerate(self.args), *self.kwargs.items()):
            for path, leaf in leaves_of(value):
                if isinstance(leaf, Tensor):
                    named[f"input {place}{path}"] = leaf
        return named

    def copies(self, dtype: torch.dtype | None = None) -> "Inputs":
        """Copies of which the floating ones take gradients, unless they are constant; in `dtype`, where that is given.
        """
        def copied(t: Tensor) -> Tensor:
            t = in_dtype(t.detach().clone(), dtype)
            return t.requires_grad_() if takes_gradient(t) and not self.are_constant else t
        args, kwargs = pytree.tree_map_only(Tensor, copied, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def as_trained(self) -> "Inputs":
        """Copies as a training step has them: floating masks beside other inputs take no gradients."""
        copies = self.copies()
        tensors = list(copies.named().values())
        for t, is_constant in zip(tensors, floating_masks(tensors), strict=True):
            if is_constant:
                t.requires_grad_(False)
        return copies

    def first(self, samples: int) -> "Inputs":
        """The first so many samples: of every tensor whose first dimension is the batch's."""
        return self._narrowed(lambda size: 0, samples)

    def last(self, samples: int) -> "Inputs":
        """The last so many."""
        return self._narrowed(lambda size: size - samples, samples)

    def _narrowed(self, begin: Callable[[int], int], samples: int) -> "Inputs":
        tensors = list(self.named().values())
        total = next((t for t in tensors if t.ndim > 1), tensors[0]).size(0)

        def narrowed(t: Tensor) -> Tensor:
            return t.narrow(0, begin(total), samples) if t.ndim and t.size(0) == total else t
        args, kwargs = pytree.tree_map_only(Tensor, narrowed, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    @property
    def device(self) -> torch.device:
        """That of the first tensor."""
        return next(iter(self.named().values())).device

    def off_by_a_rounding(self, seed: int, step: Step) -> "Inputs":
        """Copies of which each floating element is a rounding larger, smaller or neither."""
        generator = torch.Generator(self.device).manual_seed(seed)
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: off_by_a_rounding(t, generator, step),
                                            (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def rolled(self) -> "Inputs":
        """Others of the same kind: each tensor is rolled by one along its last dimension, but for masks."""
        tensors = list(self.named().values())
        masks = [t for t, is_mask in zip(tensors, floating_masks(tensors), strict=True) if is_mask]

        def rolled(t: Tensor) -> Tensor:
            is_mask = t.dtype == torch.bool or any(t is mask for mask in masks)
            return t if is_mask or not t.ndim else t.roll(1, -1)
        args, kwargs = pytree.tree_map_only(Tensor, rolled, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def call(self, module: Callable) -> Any:
        """module(*args, **kwargs)."""
        with torch.enable_grad() if self.need_gradients else contextlib.nullcontext():
            return module(*self.args, **self.kwargs)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the first floating tensor; of a complex one that of its parts; None where there is none."""
        return next((t.dtype.to_real() for t in self.named().values() if takes_gradient(t)), None)


def off_by_a_rounding(t: Tensor, generator: torch.Generator, step: Step) -> Tensor:
    """A copy of which each element is a rounding larger, smaller or neither; whole numbers are left as they are.

    The generator is of the tensor's own device: a host draws for millions of pixels as long as a GPU takes for a model.
    """
    if not takes_gradient(t):
        return t
    steps = torch.randint(-1, 2, t.shape, generator=generator, device=generator.device).to(t.device, t.dtype)
    return t.detach() * (1 + steps * step.of(t.dtype))


@contextlib.contextmanager
def meanwhile_off_by_a_rounding(tensors: Sequence[Tensor], seed: int, step: Step) -> Iterator[None]:
    """Meanwhile these are; restored afterwards."""
    before = [t.detach().clone() for t in tensors]
    with torch.no_grad():
        for t in tensors:
            t.copy_(off_by_a_rounding(t, torch.Generator(t.device).manual_seed(seed), step))
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in zip(tensors, before, strict=True):
                t.copy_(value)


def are_looked_up(inputs: Sequence[Tensor]) -> bool:
    """Whether none of them is floating, but for masks."""
    masks = floating_masks(inputs)
    return not any(takes_gradient(t) and not is_mask for t, is_mask in zip(inputs, masks, strict=True))


def tables_of(call: Callable) -> list[Tensor]:
    """What whole numbers are looked up in: the weights of its embeddings; all its parameters, where it has none."""
    weights = [module.weight for module in modules_of(call) if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    every = [t for t in named_parameters(call).values() if takes_gradient(t)]
    return list({id(t): t for t in weights or every}.values())


def takes_gradient(t: Tensor) -> bool:
    """Whether its dtype does: a floating or a complex one."""
    return t.is_floating_point() or t.is_complex()


def floating_masks(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each is a floating mask: its values are 0 and 1, or 0 and at most `BLOCKING`, and both kinds occur.

    Beside nothing but boolean masks none is one: then they are the data.
    """
    found = [_has_the_values_of_a_mask(t) for t in tensors]
    has_data = any(not is_mask and t.dtype != torch.bool for t, is_mask in zip(tensors, found, strict=True))
    return found if has_data else [False] * len(found)


def _has_the_values_of_a_mask(t: Tensor) -> bool:
    if not t.is_floating_point() or not t.numel():
        return False
    values = t.detach()
    is_zero, smallest, largest = values == 0, float(values.min()), float(values.max())
    if (smallest, largest) == (0.0, 1.0):
        return bool((is_zero | (values == 1)).all())
    return smallest <= BLOCKING and largest == 0 and bool((is_zero | (values <= BLOCKING)).all())


def in_dtype(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in a real dtype, or where it is complex in the one whose parts have that dtype; others as they are.

    Complex numbers of 16 bits hardly exist in torch: there the parts are FP32.
    """
    if dtype is None or not takes_gradient(t):
        return t
    if t.is_complex():
        return t.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return t.to(dtype)


def leaves_of(value: Any) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of tuples, lists, dicts, dataclasses and whatever else pytree knows, in order: ("[0].loss", ...)."""
    leaves, _ = pytree.tree_flatten_with_path(value)
    for keys, leaf in leaves:
        path = pytree.keystr(keys)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for each in dataclasses.fields(leaf):
                for below, inner in leaves_of(getattr(leaf, each.name)):
                    yield f"{path}.{each.name}{below}", inner
        else:
            yield path, leaf


def outputs_of(returned: Any) -> dict[str, Tensor]:
    """Name -> tensor of what a call returned: "output", "output[0]", "output['logits']", "output.loss".

    A number counts as a tensor, None and text as nothing. Raises Failed where something in it can't be compared.
    """
    outputs = {}
    for path, leaf in leaves_of(returned):
        if isinstance(leaf, Tensor):
            outputs[f"output{path}"] = leaf if leaf.layout == torch.strided else leaf.to_dense()
        elif isinstance(leaf, (bool, int, float)):
            outputs[f"output{path}"] = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
        elif leaf is not None and not isinstance(leaf, str):
            raise Failed(f"the output{path} is a {type(leaf).__name__}, which can't be compared: return tensors")
    if not outputs:
        raise Failed("it returns no tensor")
    return outputs


# -------------------------------------------------------------------------------------------- what is behind a callable


def uncompiled(call: Callable) -> Callable:
    """The function that torch.compile was given; a module as it is."""
    while not isinstance(call, nn.Module) and hasattr(call, "_torchdynamo_orig_callable"):
        call = call._torchdynamo_orig_callable
    return call


def held_by(call: Callable, seen: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Name -> module or tensor that a callable holds: of a module itself, of a function what it closes over.

    `seen` are the callables on the way to it: functions may refer to each other.
    """
    call = uncompiled(call)
    if isinstance(call, nn.Module):
        return {"": call}
    held = {}
    for name, value in _names_in(call).items():
        for path, leaf in _held_leaves(value):
            if isinstance(leaf, (nn.Module, Tensor)):
                held[f"{name}{path}"] = leaf
            elif isinstance(leaf, _HOLDERS) and not any(leaf is one for one in (call, *seen)):
                below = held_by(leaf, (*seen, call))
                held |= {f"{name}{path}.{inner}".rstrip("."): value for inner, value in below.items()}
    return held


_HOLDERS = types.FunctionType, types.MethodType, functools.partial         # callables that may hold tensors
_LONGEST = 1000                                                            # longer lists hold data, not layers


def _held_leaves(value: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of a list, tuple or dict of what may hold tensors; of anything else itself."""
    if not isinstance(value, (list, tuple, dict)) or len(value) > _LONGEST:
        return [("", value)]
    paths = value.items() if isinstance(value, dict) else enumerate(value)
    return [(f".{key}", leaf) for key, leaf in paths]


def _names_in(call: Callable) -> dict[str, Any]:
    """Name -> value of everything that a function, a method, a partial or a callable object refers to."""
    if isinstance(call, functools.partial):
        return {"func": call.func, **{str(place): value for place, value in enumerate(call.args)}, **call.keywords}
    if isinstance(call, types.MethodType):
        owner = call.__self__
        return {"self": owner} if isinstance(owner, nn.Module) else dict(getattr(owner, "__dict__", {}))
    if not isinstance(call, types.FunctionType):
        return dict(getattr(call, "__dict__", {}))
    with_cells = inspect.getclosurevars(call) if _is_whole(call) else None
    return {**with_cells.nonlocals, **with_cells.globals} if with_cells else {}


def _is_whole(function: types.FunctionType) -> bool:
    """Whether all that it closes over has a value by now."""
    try:
        return all(cell.cell_contents is not cell for cell in function.__closure__ or ())
    except ValueError:
        return False


def modules_of(call: Callable) -> list[nn.Module]:
    """Every module behind a callable, each once."""
    found: dict[int, nn.Module] = {}
    for value in held_by(call).values():
        if isinstance(value, nn.Module):
            found |= {id(module): module for module in value.modules()}
    return list(found.values())


def named_parameters(call: Callable) -> dict[str, Tensor]:
    """Name -> parameter behind a callable. A tied one stands there under each of its names.

    A module may say in `parameter_names` which names others have for its own: other name -> own.
    """
    named: dict[str, Tensor] = {}
    for name, value in held_by(call).items():
        if isinstance(value, nn.Module):
            others = {own: other for other, own in getattr(value, "parameter_names", {}).items()}
            for below, parameter in value.named_parameters(remove_duplicate=False):
                named[clean(f"{name}.{others.get(below, below)}")] = parameter
        elif value.requires_grad and value.is_leaf:
            named[name] = value
    return named


def named_buffers(call: Callable) -> dict[str, Tensor]:
    """Name -> buffer behind a callable."""
    named = {}
    for name, value in held_by(call).items():
        if isinstance(value, nn.Module):
            for below, buffer in value.named_buffers(remove_duplicate=False):
                named[clean(f"{name}.{below}")] = buffer
    return named


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the first name of the same tensor."""
    first: dict[int, str] = {}
    for name, t in tensors.items():
        first.setdefault(id(t), name)
    return {name: first[id(t)] for name, t in tensors.items()}


def clean(name: str) -> str:
    """The name without what torch.compile and data-parallel wrappers put into it."""
    parts = [part for part in name.strip(".").split(".") if part != "_orig_mod"]
    while parts[1:] and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


# ------------------------------------------------------------------------------------------------------------- partners


def partners(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], given: Mapping[str, str]) -> dict[str, str]:
    """Their name -> our name: as `given`, else by name, with or without a wrapper's prefix, else by identity.

    Raises ValueError where `given` names a tensor that is not there.
    """
    for their, our in given.items():
        if their not in theirs or our not in ours:
            missing, side = (their, theirs) if their not in theirs else (our, ours)
            raise ValueError(f"parameters: there is no {missing}; there are {', '.join(list(side)[:20])}")
    by_name = max((_with_prefixes(ours, theirs, *prefixes) for prefixes in _prefixes(ours, theirs)), key=len)
    by_identity: dict[int, str] = {}
    for name, t in ours.items():
        by_identity.setdefault(id(t), name)
    found = {}
    for their, t in theirs.items():
        if partner := given.get(their) or by_name.get(their) or by_identity.get(id(t)):
            found[their] = partner
    return found


def _prefixes(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """(of ours, of theirs): none first, then what a wrapper around either may have put before its names."""
    every = [("", "")]
    for names, place in ((theirs, 1), (ours, 0)):
        prefixes = dict.fromkeys(name.rsplit(".", name.count(".") - depth)[0] + "."
                                 for name in names for depth in range(2) if name.count(".") > depth)
        every += [("", prefix) if place else (prefix, "") for prefix in prefixes]
    return every


def _with_prefixes(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], our_prefix: str, their_prefix: str
                   ) -> dict[str, str]:
    """Their name -> our name, both without a prefix."""
    short = {name.removeprefix(our_prefix): name for name in ours}
    found = {}
    for name in theirs:
        if name.removeprefix(their_prefix) in short:
            found[name] = short[name.removeprefix(their_prefix)]
    return found
