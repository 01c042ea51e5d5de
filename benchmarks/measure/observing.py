"""One look at what a callable gives: outputs, gradients, buffers, and what it did to inputs and earlier outputs."""
import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import names
from benchmarks.measure.calls import Inputs, Step, off_by_a_rounding, outputs_of, takes_gradient
from benchmarks.measure.grouped import grouped_in_fp64
from benchmarks.measure.keeping import without_dropout
from benchmarks.measure.names import Kind, Named
from benchmarks.measure.state import Start
from common.outcome import Failed, in_a_line

Loss = Callable[[Any], Tensor]
PIECE = 2**24                              # elements that are compared at once
COTANGENT_SEED = 0x9E3779B9              # of 32 bits: a CPU generator takes no more
SMALL = 2**16                              # elements: of a larger gradient only the first cotangent's is kept


@dataclass(frozen=True)
class Work:
    """What is run to look at a callable: the same for a reference and its candidates."""
    inputs: Inputs
    loss: Loss | None = None               # maps what it returns to a scalar; else outputs get random cotangents
    cotangents: int = 3
    seed: int = 0
    forward_only: bool = False             # it will never train: no gradient is recorded, and none compared
    whole_state: bool = False              # a call depends on what earlier ones left in attributes, lists or dicts
    written: frozenset[str] = frozenset()  # parameters that a call writes to, as those of an encoder that follows

    def __post_init__(self) -> None:
        if self.cotangents < 1:
            raise ValueError(f"cotangents is {self.cotangents}: give 1 or more")

    def first(self, samples: int) -> "Work":
        """The same on the first so many samples. A loss is made for all of them: outputs get cotangents instead."""
        return replace(self, inputs=self.inputs.first(samples), loss=None)

    def loss_of(self, returned: Any, dtype: torch.dtype | None = None) -> Tensor | None:
        """That of what a call returned; in FP64 with its targets in FP64, wherever it keeps them."""
        with _TargetsInFP64() if dtype == torch.float64 else contextlib.nullcontext():
            return self.loss(returned) if self.loss else None

    def start_of(self, call: Callable) -> Start:
        """The state of a callable now, from which each run begins."""
        return Start(call, self.whole_state, self.written)


_IN_PLACE = re.compile(r"[^_]_$|^__(i(add|sub|mul|truediv|pow|matmul)|setitem)__$")       # names of such functions


class _TargetsInFP64(TorchFunctionMode):
    """Meanwhile what a function is given beside tensors in FP64 is in FP64, too: some losses have no backward of two
    dtypes. What is changed in place, or takes a gradient, stays as it is."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not _IN_PLACE.search(getattr(func, "__name__", "")) and any(t.dtype == torch.float64 for t in given):
            args, kwargs = pytree.tree_map_only(Tensor, _wider, (args, kwargs))
        return func(*args, **kwargs)


def _wider(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() and not t.requires_grad else t


@dataclass
class Observation:
    """What some runs of a callable gave, by name. A gradient is None where there is none."""
    outputs: dict[str, Tensor]                                                 # with gradients recorded
    forward_alone: dict[str, Tensor] = field(default_factory=dict)             # without
    takes_gradient: list[str] = field(default_factory=list)                    # the outputs that do
    gradients: dict[Named, list[Tensor] | None] = field(default_factory=dict)    # one a cotangent
    buffers: dict[str, Tensor] = field(default_factory=dict)                   # after one call
    changed_buffers: list[str] = field(default_factory=list)
    changed_inputs: list[str] = field(default_factory=list)
    overwritten: list[str] = field(default_factory=list)                       # outputs that a later call wrote to
    kinds: dict[str, type] = field(default_factory=dict)                       # of outputs that are no plain tensors
    backward_raises: str = ""                                                  # what, where its inputs were changed

    def of(self, named: Named) -> Sequence[Tensor] | None:
        """The tensors behind a check: an output, with or without gradients, a gradient, or a buffer."""
        if named.kind is Kind.OUTPUT:
            found = (self.forward_alone if named.alone else self.outputs).get(named.words)
        elif named.kind is Kind.BUFFER:
            found = next((t for name, t in self.buffers.items() if names.buffer(name) == named), None)
        else:
            return self.gradients.get(named)
        return None if found is None else [found]


def observe(call: Callable, work: Work, dtype: torch.dtype | None = None, overwrites_output: bool = False,
            alone: bool = True, draws: bool = True) -> Observation:
    """Run a callable a few times, each from the same state, on copies of its inputs, in `dtype` where that is given.

    Dropout is off. `alone`: without gradients, too. One that `draws` no random numbers then runs without the mode that
    turns functions of dropout off: torch leaves its fast paths under any such mode. Buffers and gradients change:
    `keeping.kept` puts them back.
    """
    start, seen = work.start_of(call), Observation({})
    for number in range(1 if work.loss else work.cotangents):
        start.begin(work.seed)
        _call_before(call, work, dtype)
        with torch.set_grad_enabled(not work.forward_only), without_dropout(call), exact_in(dtype):
            inputs = work.inputs.copies(dtype)
            returned = inputs.call(call)
            outputs = outputs_of(returned)
            if number == 0:
                _look_at(seen, outputs, inputs, work, dtype, start)
            if not seen.takes_gradient:
                break
            loss = work.loss_of(returned, dtype)
            try:
                _run_backward(outputs, seen.takes_gradient, loss, work.seed, number)
            except RuntimeError as error:
                if not seen.changed_inputs:
                    raise
                seen.backward_raises = in_a_line(error)
                break
            _add(seen.gradients, inputs, start.parameters, number)
        del inputs, returned, outputs, loss                            # before the next run fills the memory anew
    if alone:
        start.begin(work.seed)
        _call_before(call, work, dtype)
        with torch.no_grad(), without_dropout(call, functions=draws), exact_in(dtype):
            own = *start.parameters.values(), *start.buffers.values()
            _look_without_gradients(call, work, dtype, seen, overwrites_output, own)
    start.begin(work.seed)
    return seen


def _call_before(call: Callable, work: Work, dtype: torch.dtype | None) -> None:
    """Where calls depend on earlier ones: one on other inputs. What carries no state then gives something else."""
    if work.whole_state:
        with torch.no_grad(), without_dropout(call), exact_in(dtype):
            work.inputs.rolled().copies(dtype).call(call)


@contextlib.contextmanager
def exact_in(dtype: torch.dtype | None) -> Iterator[None]:
    """In FP64 attention is its formula: torch's fused one is wrong there on a CPU where the mask is FP32. Matmuls of
    experts are plain ones: theirs take no FP64. What a call makes without saying in which dtype, as a first state of
    zeros, is in FP64 then.
    """
    if dtype != torch.float64:
        yield
        return
    own = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with sdpa_kernel(SDPBackend.MATH), grouped_in_fp64(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")     # a norm in FP64
            yield
    finally:
        torch.set_default_dtype(own)


def _look_without_gradients(call: Callable, work: Work, dtype: torch.dtype | None, seen: Observation,
                            overwrites_output: bool, own: Sequence[Tensor]) -> None:
    """The outputs of a forward alone, and whether a later one writes over them."""
    for name, output in outputs_of(work.inputs.copies(dtype).call(call)).items():
        recorded = seen.outputs.get(name)                              # most often the very same: kept once
        is_same = recorded is not None and same_bits(output, recorded)
        seen.forward_alone[name] = recorded if recorded is not None and is_same else output.detach().clone()
    if not overwrites_output:
        seen.overwritten = _overwritten(call, work.inputs.copies(dtype), own)


def _look_at(seen: Observation, outputs: dict[str, Tensor], inputs: Inputs, work: Work, dtype: torch.dtype | None,
             start: Start) -> None:
    """What can be seen right after the forward."""
    seen.outputs = _cloned(outputs)
    seen.kinds = {name: type(t) for name, t in outputs.items() if type(t) not in (Tensor, torch.nn.Parameter)}
    seen.takes_gradient = [name for name, output in outputs.items() if output.requires_grad]
    seen.buffers = _cloned(start.buffers)
    seen.changed_buffers = [name for name, buffer in start.buffers.items()
                            if not same_values(buffer, start.before[name])]
    as_given = work.inputs.copies(dtype).named()
    seen.changed_inputs = [name for name, t in inputs.named().items() if not same_values(t, as_given[name])]


def _cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether they are equal element by element; NaN at the same places is."""
    return torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and every element are the same."""
    return a.dtype == b.dtype and torch.equal(a.detach(), b)


def cotangent(output: Tensor, place: int, number: int, seed: int) -> Tensor:
    """N(0, 1), rounded to BF16, so that every dtype has the same one.

    Drawn where the output is: a CPU takes seconds for the logits of a GPT. Its seeds are far from those that people
    take. An input drawn from the same one would be equal to it, and where both are parallel the gradient of a norm
    vanishes: it would tell nothing.

    It is channels-last where the output is, as the layers behind it would give it: transposing it would be timed, too.
    """
    generator = torch.Generator(output.device).manual_seed(COTANGENT_SEED + 1000 * seed + 100 * number + place)
    values = _normal(output, generator)
    if output.is_complex():
        return torch.complex(values.float(), _normal(output, generator).float()).to(output.dtype)
    return values.to(output.dtype).contiguous(memory_format=_layout_of(output))


def _layout_of(output: Tensor) -> torch.memory_format:
    """Channels-last, where it is that and nothing else."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(output.dim())
    if last and output.is_contiguous(memory_format=last) and not output.is_contiguous():
        return last
    return torch.contiguous_format


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    normal = torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return normal.bfloat16()                                           # of FP64 they would be others


def backward(call: Callable, inputs: Inputs, work: Work, number: int = 0) -> dict[str, Tensor]:
    """Run a forward and its backward, where it has one; the outputs."""
    returned = inputs.call(call)
    outputs = outputs_of(returned)
    taking = [name for name, output in outputs.items() if output.requires_grad]
    loss = work.loss_of(returned)
    if taking:
        _run_backward(outputs, taking, loss, work.seed, number)
    return outputs


def _run_backward(outputs: dict[str, Tensor], taking: Sequence[str], loss: Tensor | None, seed: int, number: int
                  ) -> None:
    if loss is not None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise Failed("loss gives no scalar: return a tensor of one element")
        loss.backward()
        return
    given = []
    for place, name in enumerate(outputs):
        if name in taking:
            given.append(cotangent(outputs[name], place, number, seed))
    torch.autograd.backward([outputs[name] for name in taking], given)


def _add(gradients: dict[Named, list[Tensor] | None], inputs: Inputs, parameters: dict[str, Tensor], number: int
         ) -> None:
    """Keep copies of the gradients that a backward left: a captured graph would write over them."""
    leaves = {names.gradient_of_input(name): t for name, t in inputs.named().items() if takes_gradient(t)}
    leaves |= {names.gradient_of(name): t for name, t in parameters.items()}
    for of, t in leaves.items():
        if t.grad is None:
            gradients.setdefault(of, None)
        elif number == 0 or t.numel() < SMALL:
            gradients[of] = [*(gradients.get(of) or []), t.grad.detach().to_dense().clone()]


def _wait_for_devices(outputs: dict[str, Tensor]) -> None:
    """Until all streams are done: a call may have left work on one of its own."""
    for device in {output.device for output in outputs.values() if output.is_cuda}:
        torch.cuda.synchronize(device)


def _overwritten(call: Callable, inputs: Inputs, own: Sequence[Tensor]) -> list[str]:
    """The outputs of a call that the next call writes to: what is put into them in between is gone.

    Memory that it shares with its inputs, parameters or buffers is left alone.
    """
    untouchable = {t.untyped_storage().data_ptr() for t in (*inputs.named().values(), *own)}
    outputs = {name: output for name, output in outputs_of(inputs.call(call)).items()
               if output.numel() and output.untyped_storage().data_ptr() not in untouchable}
    _wait_for_devices(outputs)                                         # else it would be this call that writes
    values = {name: output.clone() for name, output in outputs.items()}
    for output in outputs.values():
        with contextlib.suppress(RuntimeError):                        # an expanded tensor can't be written to
            output.copy_(torch.where(output == 1, 0, 1).to(output.dtype))              # differs from it everywhere
    marked = {name: output.clone() for name, output in outputs.items()}                # two may share their memory
    inputs.call(call)
    names = []
    for name, output in outputs.items():
        try:
            if not torch.equal(output, marked[name]):
                names.append(name)
        except RuntimeError:                                           # torch's own graph trees refuse to be read then
            names.append(name)
    for name, output in outputs.items():
        with contextlib.suppress(RuntimeError):
            output.copy_(values[name])
    return names


class _Rounding(TorchDispatchMode):
    """Sees the floating tensors below FP64 that operators make, and single numbers that were rounded to FP32."""
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and takes_gradient(leaf) and leaf.numel() > 1:
                self.dtypes.add(leaf.dtype.to_real())
                if leaf.dtype == torch.float64:
                    self._look_at_numbers((args, kwargs))
        return result

    def _look_at_numbers(self, given: Any) -> None:
        """Of those that one in FP64 is made with: torch.tensor(0.1) is off by a rounding, torch.tensor(0.5) is not."""
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.numel() == 1 and not leaf.is_meta:
                is_short = leaf.detach().half().float() == leaf.detach()
                if not is_short.all():
                    self.dtypes.add(torch.float32)


class RoundedAnew(TorchDispatchMode):
    """What operators make in FP32 is off by one rounding more, as another order of the same operators has it.

    Whole numbers and those of few digits were not rounded: positions and masks stay what they are.
    """
    supports_higher_order_operators = True

    def __init__(self, number: int) -> None:
        """Each number rounds in another way."""
        super().__init__()
        self.seed = 2**20 * number

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "is_view", False) or (func is torch.ops.aten._to_copy.default and _holds(result, args[0])):
            return result
        return pytree.tree_map_only(Tensor, self._rounded, result)

    def _rounded(self, t: Tensor) -> Tensor:
        if t.dtype != torch.float32 or t.is_meta or t.layout != torch.strided:
            return t
        self.seed += 1
        generator = torch.Generator(t.device).manual_seed(self.seed)
        moved = off_by_a_rounding(t, generator, Step())
        is_exact = (t.round() == t) | (t.bfloat16().float() == t)
        return t.copy_(torch.where(is_exact, t, moved))


def _holds(cast: Tensor, whole: Tensor) -> bool:
    """Whether a cast has lost nothing, as of a buffer that was in that dtype before."""
    return bool((cast == whole).all())


def rounding_in(call: Callable, work: Work) -> torch.dtype | None:
    """The coarsest dtype below FP64 that a callable in FP64 makes tensors of on its way; None where there is none.

    Compiled code is looked at as it was before.
    """
    inputs, seen = work.inputs.copies(torch.float64), _Rounding()
    start = work.start_of(call)
    start.begin(work.seed)
    with (torch.compiler.set_stance("force_eager"), torch.set_grad_enabled(not work.forward_only),
          without_dropout(call), exact_in(torch.float64)):
        with seen:
            returned = inputs.call(call)
            loss = work.loss_of(returned, torch.float64)
        outputs = outputs_of(returned)
        taking = [name for name, output in outputs.items() if output.requires_grad]
        given = [cotangent(outputs[name], 0, 0, work.seed) for name in taking]
        with seen:
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()
            elif taking:
                torch.autograd.backward([outputs[name] for name in taking], given)
    start.begin(work.seed)
    below = [dtype for dtype in seen.dtypes if dtype != torch.float64]
    return max(below, key=lambda dtype: torch.finfo(dtype).eps) if below else None


# ------------------------------------------------------------------------------------------------------------ distances


def norm(tensors: Sequence[Tensor]) -> float:
    """The L2 norm of a tensor, as the root mean square over several cotangents. What is infinite counts as zero."""
    total = sum(_sum_of_squares(part) for t in tensors for part in _parts(t))
    return math.sqrt(total / len(tensors)) if tensors else 0.0


def _sum_of_squares(t: Tensor) -> float:
    """In FP64. What is infinite or NaN counts as zero: it is looked for where the sum tells that there is some."""
    t = _wide(t)
    total = float(torch.linalg.vector_norm(t)) ** 2
    return total if math.isfinite(total) else float(t.nan_to_num(0.0, 0.0, 0.0).square().sum())


def distance(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The norm of the difference. Equal infinities and NaN at the same places count as equal; else it is infinite."""
    total = 0.0
    for whole_value, whole_truth in zip(values, exact, strict=False):
        for value, truth in zip(_parts(whole_value), _parts(whole_truth), strict=True):
            value, truth = _wide(value).to(truth.device), _wide(truth)
            squares = float(torch.linalg.vector_norm(value - truth)) ** 2
            total += squares if math.isfinite(squares) else _sum_where_some_are_not_finite(value, truth)
    return math.sqrt(total / len(exact)) if exact else 0.0


def _sum_where_some_are_not_finite(value: Tensor, truth: Tensor) -> float:
    """The squares of a difference in FP64, in which an element is infinite or NaN."""
    same = (value == truth) | (value.isnan() & truth.isnan())
    if not ((value.isfinite() & truth.isfinite()) | same).all():
        return math.inf
    return float(torch.where(same, 0.0, value - truth).square().sum())


def largest_difference(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Of one element; places where either is not finite count as equal."""
    largest = 0.0
    for whole_value, whole_truth in zip(values, exact, strict=False):
        for value, truth in zip(_parts(whole_value), _parts(whole_truth), strict=True):
            apart = (_wide(value).to(truth.device) - _wide(truth)).abs().nan_to_num(0.0, 0.0, 0.0)
            largest = max(largest, float(apart.amax())) if apart.numel() else largest
    return largest


def projection(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """How much of the truth a difference holds: 0.02 where values are 1.02 times the truth, about 0 for rounding."""
    along = total = 0.0
    for whole_value, whole_truth in zip(values, exact, strict=False):
        for value, truth in zip(_parts(whole_value), _parts(whole_truth), strict=True):
            value, truth = _wide(value).to(truth.device), _wide(truth)
            along += float(((value - truth) * truth).nan_to_num(0.0, 0.0, 0.0).sum())
            total += float(truth.square().nan_to_num(0.0, 0.0, 0.0).sum())
    return along / total if total else 0.0


def _parts(t: Tensor) -> Sequence[Tensor]:
    """It in pieces that fit beside it in FP64: of logits a copy each would fill the memory."""
    return t.flatten().split(PIECE)


def _wide(t: Tensor) -> Tensor:
    return torch.view_as_real(t.to(torch.complex128)) if t.is_complex() else t.double()
