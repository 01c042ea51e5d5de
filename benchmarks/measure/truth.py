"""What a reference means: its outputs and gradients in FP64, or in the best dtype that it runs in."""
import contextlib
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import chance, fitting
from benchmarks.measure.bounds import FP32, FP64, is_nothing_of, step_in
from benchmarks.measure.calls import (
    PERTURBATIONS,
    Inputs,
    Step,
    are_looked_up,
    meanwhile_off_by_a_rounding,
    named_buffers,
    named_parameters,
    tables_of,
    takes_gradient,
)
from benchmarks.measure.checks import CHANNELS_LAST
from benchmarks.measure.copying import deep_copy, deep_copy_with
from benchmarks.measure.int8 import WithInt8Weights
from benchmarks.measure.keeping import kept, parameters_kept, uncompiled_in_fp64, uncompiled_meanwhile, without_dropout
from benchmarks.measure.names import Kind, Named
from benchmarks.measure.observing import Observation, RoundedAnew, Work, distance, norm, observe, rounding_in
from benchmarks.measure.state import State, only_written
from common.block.config import dtype_name
from common.block.precision import multiplying_float32_in, without_tf32
from common.outcome import Failed, in_a_line, is_out_of_memory
from common.phases import Phase

LOWER = {FP32: ("float16", "bfloat16"), torch.float16: ("bfloat16",)}
OBJECTS_A_COLLECTION = 10_000          # made before Python collects by itself; 700 by default
DRAWN_SCALE = 0.1                      # of values that are drawn in place of zeros
# Of an output's norm, what no rounding of a dtype explains.
CONTRADICTS = {FP64: 1e-6, FP32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.3}
MOST_OF_FP32 = 1e-3                    # of an output's norm in FP64, what roundings to FP32 on the way explain


@dataclass(frozen=True)
class Drawn:
    """What a reference means with other values in place of parameters that are zero and hide what is behind them."""
    values: Mapping[str, Tensor]           # parameter -> the value that was drawn
    seen: Observation


class Truth:
    """What a reference means: its outputs and gradients in FP64, or in the best dtype that it runs in.

    Where FP64 of all samples does not fit, or would take too long, `exact` is of the first few (`few`) and `whole`, by
    which the whole batch is judged, is what the reference gives at its own dtype. Raises ValueError where the reference
    can't be called on these inputs.
    """

    def __init__(self, reference: Callable, work: Work, say: Callable[..., None] = lambda *what: None):
        self.reference, self.work, self.say = reference, work, say
        self.few = work
        self.dtype = working_dtype(reference, work.inputs)
        self.parameters, self.buffers = named_parameters(reference), named_buffers(reference)
        self.why_not_fp64 = self.why_few = ""
        self.rounds_to: torch.dtype | None = None
        self.drawn: Drawn | None = None
        self._own: dict[str | None, Observation] = {}          # by what it multiplies in
        self._lower: dict[tuple[Callable, str], Observation | None] = {}       # by how and in which precision
        self._drawing: dict[tuple[str, ...], chance.Side] = {}
        with parameters_kept(reference, work.inputs) as written, kept(reference):
            self.plain = self._as_given()
        if written:
            self.work = self.few = work = dataclasses.replace(work, written=frozenset(written))
            self.buffers |= only_written(self.parameters, written)
        with kept(reference, self.plain), without_dropout(self.plain):
            if chance.keeps_state(self.plain, work):
                self.work = self.few = dataclasses.replace(work, whole_state=True)
        self._state = State(self.plain) if self.work.whole_state else None
        with kept(reference, self.plain):
            with without_dropout(self.plain):
                self.draws = chance.draws(self.plain, self.work)
                self.same_twice = chance.same_twice(self.plain, self.work)
            self.randomness = chance.randomness(self.plain, self.work)
            self.has_dropout = self.randomness.is_seen
            self._find()
            self._own_of_few = self.own_on_few() if self.is_few else None
        self.values = {name: t.detach() for name, t in named_parameters(self.plain).items()}
        self._written = only_written(named_parameters(self.plain), self.work.written)
        self.values |= {name: t.detach().clone() for name, t in self._written.items()}
        for name, buffer in named_buffers(self.plain).items():           # constants may be kept in any way
            if name in self.exact.changed_buffers or name.rpartition(".")[2].startswith("running_"):
                self.values[name] = buffer.detach().clone()

    def begin(self) -> None:
        """Give the reference back the state of when it was looked at: calls since then may have changed it."""
        if self._state is not None:
            self._state.restore()
        with torch.no_grad():
            for name, t in self._written.items():
                t.copy_(self.values[name])

    @property
    def is_few(self) -> bool:
        """Whether `exact` is of fewer samples than the work has."""
        return self.few is not self.work

    @property
    def whole(self) -> Observation:
        """What the whole batch is held against."""
        return self.own(None) if self.is_few else self.exact

    @functools.cached_property
    def own_error(self) -> float:
        """How far its outputs are from FP64, as a share of their norm."""
        return _finite(furthest_output(self._own_of_few or self.own(None), self.exact))

    def own_error_in(self, numerics: str | None) -> float:
        """The same where it multiplies in what was declared: behind many layers BF16 is off by percents."""
        if numerics in (None, "float8"):
            return self.own_error
        return max(self.own_error, _finite(furthest_output(self.own(numerics), self.whole)))

    @functools.cached_property
    def norms_of_exact(self) -> tuple[float, float]:
        """(of all outputs, of all gradients) of what a meaning is held against."""
        return norms_of_all(self.exact)

    @functools.cached_property
    def norms_of_whole(self) -> tuple[float, float]:
        """(of all outputs, of all gradients) of what a precision is held against."""
        return norms_of_all(self.whole) if self.is_few else self.norms_of_exact

    def own_on(self, work: Work, numerics: str | None) -> Observation:
        """What it gives on other inputs, multiplying in what was declared."""
        kind = None if numerics == "float8" else numerics
        with multiplying_in(kind, work.inputs):
            return observe(self.plain, work, alone=False, draws=self.has_dropout)

    def drawing(self, names: tuple[str, ...]) -> chance.Side:
        """The reference as what draws random numbers, beside the gradients of these parameters."""
        if names not in self._drawing:
            parameters = named_parameters(self.plain)
            self._drawing[names] = chance.Side(self.plain, [parameters[name] for name in names])
        return self._drawing[names]

    def off_by(self, of: Named) -> float:
        """How far the reference itself is from FP64, as a share of a tensor's norm, or of that of all where `is_zero`:
        of few samples, where `whole` is what it gives itself; else 0, as the distance from `whole` tells."""
        own = self._own_of_few.of(of) if self._own_of_few else None
        exact = self.exact.of(of)
        if own is None or exact is None or own[0].shape != exact[0].shape:
            return 0.0
        unit = self._norm_of_all(of) if self.is_zero(of) else norm(exact)
        apart = distance(own, exact) / max(unit, 1e-300)
        return apart if math.isfinite(apart) else 0.0

    def is_zero(self, of: Named) -> bool:
        """Whether few samples tell that its true value is zero, of which `whole` has rounding alone."""
        exact = self.exact.of(of) if self.is_few and self.has_meaning else None
        if exact is None or not takes_gradient(exact[0]):
            return False
        return is_nothing_of(norm(exact), self._norm_of_all(of), self.rounds_to == FP32)

    def _norm_of_all(self, of: Named) -> float:
        """Of all gradients, or of all outputs, that few samples have in FP64."""
        outputs, gradients = self.norms_of_exact
        return gradients if of.kind.is_gradient else outputs

    def _as_given(self) -> Callable:
        """The reference, where it runs on the inputs; else, and where it is in FP64 itself, a copy in their dtype."""
        inputs = self.work.inputs.dtype
        is_oracle = self.dtype == FP64 and inputs not in (FP64, None)
        if not is_oracle:
            try:
                with kept(self.reference), torch.no_grad():
                    self.work.inputs.copies().call(self.reference)
                return self.reference
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                why = in_a_line(error)
                if inputs in (None, self.dtype):
                    raise ValueError(f"the reference can't be called on these inputs: {why}") from None
        assert inputs is not None
        self.dtype = inputs
        return deep_copy(self.reference, inputs)

    def _find(self) -> None:
        """The truth, and in which dtype and of how many samples it could be had."""
        for dtype in dict.fromkeys((FP64, FP32, self.dtype)):
            self.say(Phase.CHECKING, f"the truth in {dtype_name(dtype)}")
            try:
                self._look_in(dtype)
                if dtype != FP64 or not self._is_contradicted():
                    return
            except Failed as error:
                raise ValueError(f"the reference can't be judged by: {error}") from None
            except Exception as error:
                self.why_not_fp64 = self.why_not_fp64 or why_not(error)
                self.few = self.work
            free_memory()
        self.exact_dtype, self.few = self.dtype, self.work
        self.rounds_to = None
        try:
            self.exact = self.own(None)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(f"the reference can't be judged by: {in_a_line(error)}") from None

    def _look_in(self, dtype: torch.dtype) -> None:
        """Observe a copy in that dtype, of all samples or as many as fit."""
        copy, work = copied(self.plain, self.work, dtype)
        total = fitting.samples_of(self.work.inputs)
        samples, self.why_few = fitting.that_fit(copy, self.plain, self.work, dtype, self.has_dropout)
        while True:
            self.few = self.work if samples == total else self.work.first(samples)
            few = dataclasses.replace(self.few, loss=work.loss if self.few.loss else None)
            try:
                self.rounds_to = rounding_in(copy, few) if dtype == FP64 else None
                with without_tf32():
                    self.exact = self._meaning(copy, few, dtype)
                break
            except Exception as error:
                fewer = samples // 2
                if not is_out_of_memory(error) or not fewer:
                    raise
                self.why_few = f"{fitting.words(dtype)} of {samples} samples does not fit"
            samples = fewer
            free_memory()
            if samples < fitting.LEAST_TOGETHER and not fitting.stand_alone(self.plain, self.work, samples,
                                                                            self.has_dropout):
                raise fitting.DoesNotFit(f"{self.why_few}, and its samples depend on each other")
        if self.rounds_to in (torch.float16, torch.bfloat16):
            self.why_not_fp64 = f"the reference rounds to {dtype_name(self.rounds_to)} on its way"
        self.exact_dtype = dtype
        self.drawn = self._with_zeros_drawn(copy, few) if dtype == FP64 else None

    def _with_zeros_drawn(self, copy: Callable, few: Work) -> Drawn | None:
        """Where outputs or gradients are all zero, as before a head or behind a gate that begins with zeros, what the
        copy gives once those zeros are drawn; None where nothing is hidden, or it can't run.

        A candidate that is wrong there gives the same zeros.
        """
        gradients = [g for g in self.exact.gradients.values() if g is not None]
        outputs = [[t] for t in self.exact.outputs.values() if takes_gradient(t)]
        zeros = {name: t for name, t in named_parameters(copy).items() if takes_gradient(t) and not t.any()}
        if all(map(norm, [*outputs, *gradients])) or not zeros:
            return None
        generator = torch.Generator().manual_seed(self.work.seed)
        with torch.no_grad():
            for t in {id(t): t for t in zeros.values()}.values():
                t.copy_(DRAWN_SCALE * torch.randn(t.shape, generator=generator, dtype=FP64))
        try:
            seen = self._meaning(copy, few)
        except Exception:
            return None
        return Drawn({name: t.detach() for name, t in zeros.items()}, seen)

    def _meaning(self, copy: Callable, work: Work, dtype: torch.dtype = FP64) -> Observation:
        """What a copy gives in a dtype that says what the reference means; in FP64 it runs uncompiled."""
        with uncompiled_in_fp64(copy, dtype):
            return observe(copy, work, dtype, overwrites_output=True, draws=self.has_dropout)

    def _observed(self, call: Callable, work: Work, dtype: torch.dtype | None = None, eager: bool = False
                  ) -> Observation:
        with uncompiled_meanwhile(call) if eager else contextlib.nullcontext():
            return observe(call, work, dtype, draws=self.has_dropout)

    def _is_contradicted(self) -> bool:
        """Whether the reference at its own dtype gives something else than rounding makes of its FP64 copy's outputs,
        or has gradients where that has none.

        Then something in the copy is another function: a library's kernel that is wrong in FP64, or a mask of FP64's
        least number in a softmax in FP32. What 16 bits can't tell is asked in FP32, and what TF32 can't, which cuDNN's
        convolutions round to by default, without it.
        """
        own = self.own_on_few()
        lost = next((of for of, gradient in self.exact.gradients.items()
                     if not _is_finite(gradient) and _is_finite(own.gradients.get(of))), None)
        if lost is not None:
            self.why_not_fp64 = f"the {lost} is not finite in FP64, and finite in {dtype_name(self.dtype)}"
            return True
        apart = furthest_output(own, self.exact)
        if apart <= CONTRADICTS[self.dtype]:
            return False
        dtype = FP32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
        if dtype == FP32:
            apart = furthest_output(self.in_dtype(FP32), self.exact)
            if apart <= CONTRADICTS[FP32]:
                return False
        self.why_not_fp64 = f"its outputs in FP64 are {apart:.1e} from those in {dtype_name(dtype)}"
        return True

    def own_on_few(self) -> Observation:
        """What it gives at its own dtype, of as many samples as `exact`."""
        return self._observed(self.plain, self.few, eager=True) if self.is_few else self.own(None)

    @property
    def has_meaning(self) -> bool:
        """Whether it is known in FP64."""
        return self.exact_dtype == FP64 and self.rounds_to in (None, FP32)

    @property
    def in_short(self) -> str:
        """What it is: FP64, or the reference itself."""
        kind = "FP64" if self.exact_dtype == FP64 else f"the reference in {dtype_name(self.exact_dtype)}"
        return f"{kind}{self._of_few()}"

    @property
    def in_words(self) -> str:
        if self.has_meaning:
            return self.in_short + (", which computes something in FP32 on its way" if self.rounds_to else "")
        return f"{self.in_short}, no oracle: {self.why_not_fp64}"

    def _of_few(self) -> str:
        if not self.is_few:
            return ""
        return f" of {fitting.samples_of(self.few.inputs)} of {fitting.samples_of(self.work.inputs)} samples"

    def own(self, numerics: str | None) -> Observation:
        """What the reference gives at its own dtype, multiplying in what was declared."""
        kind = None if numerics == "float8" else numerics
        if kind not in self._own:
            with kept(self.plain), multiplying_in(kind, self.work.inputs):
                self._own[kind] = self._observed(self.plain, self.work)
        return self._own[kind]

    def further(self, numerics: str | None) -> Iterator[Observation]:
        """As `own`, of each gradient the one furthest from the truth among runs whose inputs are off by a rounding: of
        one run, of two, and so on."""
        found = self.own(numerics)
        for other in self.off_by_a_rounding(self.work, numerics):
            found = _further(found, other, self.whole)
            yield found

    def further_in_fp64(self) -> Iterator[Observation]:
        """The same as `exact`, where something is computed in FP32 on its way: by a rounding of that."""
        copy, few = copied(self.plain, self.few, FP64)
        found = self.exact
        step = Step(torch.finfo(FP32).eps, FP64)
        work = dataclasses.replace(few, inputs=few.inputs.copies(FP64))
        for number in range(PERTURBATIONS):
            with _off_by_a_rounding(copy, work, number, step) as off, RoundedAnew(number):
                other = self._meaning(copy, off)
            found = further_in_all(found, other, self.exact)
            yield found

    def off_by_a_rounding(self, work: Work, numerics: str | None) -> Iterator[Observation]:
        """What it gives where the inputs are off by a rounding, several times.

        A ReLU or a max-pool near its kink falls to the other side then, and moves whole gradients: nobody's mistake.
        So does what many layers make of a rounding in 16 bits. By default cuDNN may round what a convolution in FP32
        takes to TF32, and does for one memory format alone.
        """
        step = step_in(numerics, work.inputs.device)
        for number in range(PERTURBATIONS):
            with kept(self.plain), _off_by_a_rounding(self.plain, work, number, step) as off:
                seen = self.own_on(off, numerics)
            yield seen

    def forget_others(self) -> None:
        """Let go of what it gives in other precisions than its own: of a large model each has gradients as large as its
        parameters, and what is timed next needs the memory. Asked again, it is looked at again."""
        self._own = {kind: seen for kind, seen in self._own.items() if kind is None}
        self._lower.clear()
        vars(self).pop("_channels_last", None)

    def others(self) -> Iterator[tuple[str, Observation]]:
        """What it gives in channels-last and in each precision below its own, best first: autocast, a copy in it."""
        if self._channels_last is not None:
            yield CHANNELS_LAST, self._channels_last
        if self.dtype == FP32 and self.work.inputs.device.type == "cuda":
            yield "tf32", self.own("tf32")
        for kind in LOWER.get(self.dtype, ()):
            for way in (self.own, self._copied_in):
                if (seen := self._once(way, kind)) is not None:
                    yield kind, seen

    def _once(self, way: Callable[[str], Observation], kind: str) -> Observation | None:
        """What it gives so in a lower precision, looked at once for all tensors; None where it does not run."""
        if (way, kind) not in self._lower:
            self._lower[way, kind] = None
            with contextlib.suppress(Exception):
                self._lower[way, kind] = way(kind)
        return self._lower[way, kind]

    @functools.cached_property
    def _channels_last(self) -> Observation | None:
        """What a copy with channels-last weights gives; None where it has none or does not run.

        A CPU's batch norm adds them up one by one in FP32, where it adds NCHW up in FP64: torch has no other. What
        TF32 makes of them on a GPU is a lower precision.
        """
        copy, work = copied(self.plain, self.work)
        weights = [t for t in named_parameters(copy).values() if t.dim() == 4]
        if not weights:
            return None
        with torch.no_grad():
            for weight in weights:
                weight.data = weight.contiguous(memory_format=torch.channels_last)
        with contextlib.suppress(Exception), without_tf32():
            return self._observed(copy, work)
        return None

    def _copied_in(self, kind: str) -> Observation:
        dtype = getattr(torch, kind)
        return self._observed(*copied(self.plain, self.work, dtype), dtype)

    def in_dtype(self, dtype: torch.dtype) -> Observation:
        """What a copy of it gives in that dtype, without TF32, of as many samples as `exact`."""
        with without_tf32():
            return self._observed(*copied(self.plain, self.few, dtype), dtype)


def copied(call: Callable, work: Work, dtype: torch.dtype | None = None) -> tuple[Callable, Work]:
    """Deep copies of a callable and of the loss that its work has, in `dtype` where that is given."""
    call, loss = deep_copy_with(call, work.loss, dtype)
    return call, dataclasses.replace(work, loss=loss)


@contextlib.contextmanager
def _off_by_a_rounding(call: Callable, work: Work, number: int, step: Step) -> Iterator[Work]:
    """Its inputs are; where they are whole numbers, meanwhile what these are looked up in."""
    if not are_looked_up(list(work.inputs.named().values())):
        yield dataclasses.replace(work, inputs=work.inputs.off_by_a_rounding(number, step))
        return
    with meanwhile_off_by_a_rounding(tables_of(call), number, step):
        yield work


def _is_finite(gradient: list[Tensor] | None) -> bool:
    """Whether each of its numbers is; one that is lacking has none that is not."""
    return all(bool(g.isfinite().all()) for g in gradient or ())


def _finite(apart: float) -> float:
    return apart if math.isfinite(apart) else 0.0


def _further(a: Observation, b: Observation, exact: Observation) -> Observation:
    """`a` with each gradient of `b` that is further from the exact one."""
    gradients = dict(a.gradients)
    for name, truth in exact.gradients.items():
        mine, other = a.gradients.get(name), b.gradients.get(name)
        if truth and mine and other and distance(other, truth) > distance(mine, truth):
            gradients[name] = other
    return dataclasses.replace(a, gradients=gradients)


def further_in_all(a: Observation, b: Observation, exact: Observation) -> Observation:
    """The same, and with each output that is further, but for what no rounding explains."""
    a, further = _further(a, b, exact), []
    for mine, others, truths in ((a.outputs, b.outputs, exact.outputs),
                                 (a.forward_alone, b.forward_alone, exact.forward_alone)):
        further.append(dict(mine))
        for name, truth in truths.items():
            if takes_gradient(truth) and name in others and others[name].shape == truth.shape:
                apart = distance([others[name]], [truth])
                if distance([mine[name]], [truth]) < apart <= MOST_OF_FP32 * norm([truth]):
                    further[-1][name] = others[name]
    return dataclasses.replace(a, outputs=further[0], forward_alone=further[1])


def furthest_output(a: Observation, b: Observation) -> float:
    """How far an output of one run is from the other's, as a share of its norm; 0 where there are no such outputs."""
    apart = [0.0]
    for mine, other in ((a.outputs, b.outputs), (a.forward_alone, b.forward_alone)):
        for name, exact in other.items():
            if takes_gradient(exact) and name in mine and mine[name].shape == exact.shape:
                apart.append(distance([mine[name]], [exact]) / max(norm([exact]), 1e-300))
    return max(apart)


@contextlib.contextmanager
def multiplying_in(numerics: str | None, inputs: Inputs) -> Iterator[None]:
    """TF32, autocast or weights rounded to INT8, as declared."""
    if numerics is None:
        yield
    elif numerics == "int8":
        with WithInt8Weights():
            yield
    elif numerics == "tf32":
        with multiplying_float32_in("high"):
            yield
    else:
        with torch.autocast(inputs.device.type, getattr(torch, numerics)):
            yield


def norms_of_all(seen: Observation) -> tuple[float, float]:
    """(of all outputs, of all gradients of parameters together; of the inputs' where there are none)."""
    gradients = {of: g for of, g in seen.gradients.items() if g is not None}
    of_parameters = [g for of, g in gradients.items() if of.kind is Kind.PARAMETER_GRADIENT]
    outputs = math.hypot(*(norm([t]) for t in seen.outputs.values() if takes_gradient(t)))
    return outputs, math.hypot(*(norm(g) for g in of_parameters or gradients.values()))


def working_dtype(call: Callable, inputs: Inputs) -> torch.dtype:
    """Of most of its parameters; without any, of the inputs."""
    elements: dict[torch.dtype, int] = {}
    for t in named_parameters(call).values():
        if takes_gradient(t):
            dtype = t.dtype.to_real()
            elements[dtype] = elements.get(dtype, 0) + t.numel()
    return max(elements, key=lambda dtype: elements[dtype]) if elements else inputs.dtype or FP32


def why_not(error: Exception) -> str:
    """Why something could not run, in a line."""
    if isinstance(error, fitting.DoesNotFit):
        return str(error)
    return "out of memory" if is_out_of_memory(error) else in_a_line(error)


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Meanwhile collections look only at objects made since, as torch alone makes hundreds of thousands, and come less
    often by themselves.

    Where somebody has frozen objects already, theirs stay frozen.
    """
    is_ours, thresholds = not somebody_froze(), gc.get_threshold()
    gc.set_threshold(max(thresholds[0], OBJECTS_A_COLLECTION) if thresholds[0] else 0, *thresholds[1:])
    if is_ours:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_ours:
            gc.unfreeze()


def somebody_froze() -> bool:
    """Whether there are objects that no collection looks at."""
    return gc.get_freeze_count() > 0


def free_memory() -> None:
    """Give back what nothing refers to any longer, before as much is allocated again."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
