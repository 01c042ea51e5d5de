"""Is it the same function? Any callable against a reference, tensor by tensor: two questions, two answers.

    from benchmarks.study import validate
    print(validate(candidate, reference, (x,)))

*Meaning*: deep copies of both in FP64. Right and wrong are many orders of magnitude apart there, so nothing is tuned.
*Precision*: the very object that would be timed, at its own dtype, as a multiple of what the reference itself loses.
What can't be decided is `unproven`, with the reason.
"""
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import bounds, chance, hints, names
from benchmarks.measure.apart import apart_where_finite, gradients_too_far_apart
from benchmarks.measure.bounds import DRAWS_OTHERS, FP32, FP64, NOT_TWICE, NUMERICS, Standard
from benchmarks.measure.calls import (
    PERTURBATIONS,
    Inputs,
    first_names,
    named_buffers,
    named_parameters,
    partners,
    tables_of,
    takes_gradient,
)
from benchmarks.measure.checks import DRAWN, MEANING, PRECISION, Check, Judgement
from benchmarks.measure.flat import flat_of
from benchmarks.measure.keeping import (
    NoDropout,
    compiled_inside,
    kept,
    loaded,
    materialised,
    parameters_kept,
    uncompiled_meanwhile,
    without_dropout,
)
from benchmarks.measure.names import THE_CALL, Kind, Named
from benchmarks.measure.observing import Loss, Observation, RoundedAnew, Work, distance, norm, observe, rounding_in
from benchmarks.measure.process_state import Globals
from benchmarks.measure.referee import NOT_PLAIN, TIMES_ROUNDING, TIMES_THE_REFERENCE, Referee
from benchmarks.measure.refreshing import fresh, unguessable_seed
from benchmarks.measure.state import only_written
from benchmarks.measure.truth import (
    CONTRADICTS,
    Truth,
    copied,
    free_memory,
    further_in_all,
    furthest_output,
    multiplying_in,
    norms_of_all,
    quick_collections,
    why_not,
    working_dtype,
)
from common.block.config import dtype_name
from common.block.oracle import TIMES_OF_A_GRADIENT
from common.block.precision import without_tf32
from common.outcome import Failed, in_a_line, is_out_of_memory
from common.phases import Phase
from common.runtime import machine

FRESH = 2                                  # inputs that a candidate had not seen
DEPENDS_ON_STATE = "a call depends on what earlier ones left in attributes: each is the second from the same state"



def check_numerics(numerics: str | None) -> None:
    """Raise ValueError unless they are known, or None."""
    if numerics is not None and numerics not in NUMERICS:
        raise ValueError(f"numerics {numerics!r}: give one of {', '.join(NUMERICS)}, or None")


class Judge:
    """Holds one candidate against a truth. Without `meaning`, or with a gate, by its precision alone."""

    def __init__(self, candidate: Callable, truth: Truth, numerics: str | None = None,
                 parameters: Mapping[str, str] | None = None, overwrites_output: bool = False,
                 gate: float | None = None, meaning: bool = True, fresh: bool = True,
                 proven: Sequence[Check] | None = None, forward_alone: bool = True):
        """`proven`: the checks by which the meaning of this very code passed before; none are shown where it was on
        other inputs. Without `forward_alone` it is called without gradients only where it draws random numbers, as it
        would be compiled anew for that.
        """
        check_numerics(numerics)
        self.candidate, self.truth, self.numerics, self.gate = candidate, truth, numerics, gate
        self.overwrites_output = overwrites_output
        self.forward_alone = forward_alone or truth.work.forward_only
        self.asks_meaning = meaning and gate is None and proven is None
        self.asks_fresh = fresh and gate is None
        self.parameters = named_parameters(candidate)
        self.buffers = named_buffers(candidate) | only_written(self.parameters, truth.work.written)
        self.partners = partners(truth.parameters, self.parameters, parameters or {})
        self.buffer_partners = partners(truth.buffers, self.buffers, {})
        self.dtype = working_dtype(candidate, truth.work.inputs)
        self.checks: list[Check] = list(proven or ())
        self.notes: list[str] = []
        self.meaning_is_known, self.has_noted_no_fp64 = proven is not None and truth.has_meaning, False
        self.randomness = chance.Randomness(True, True)          # until it has been asked

    def judge(self) -> Judgement:
        """All checks. Whatever the candidate raises passes, but for a Failed: that is a check that failed."""
        hint = ""
        before = Globals()
        self.truth.begin()
        with kept(self.candidate, self.truth.plain):
            try:
                with (parameters_kept(self.candidate, self.truth.work.inputs),
                      loaded(self.parameters | self.buffers, self._values()) as others):
                    self._note_values(others)
                    self.randomness = self._randomness()
                    with NoDropout() if self._hides_dropout() else contextlib.nullcontext():
                        self._ask()
                    if self._failed():
                        with without_dropout(self.candidate), without_dropout(self.truth.plain):
                            hint = hints.hint(self.candidate, self.truth, self.checks)
                    else:
                        self._ask_chance()
            except Failed as error:
                self._wrong(THE_CALL, str(error))
            finally:
                changed = before.changed()
        if changed:
            self._wrong(THE_CALL, f"{changed}, for everybody in this process")
        if self.truth.work.whole_state:
            self.notes.append(DEPENDS_ON_STATE)
        if self.truth.is_few:
            self.notes.append(f"{self.truth.in_short}: {self.truth.why_few}; the whole batch is held "
                              f"against the reference in {dtype_name(self.truth.dtype)}")
        return Judgement(self.checks, self._truth_in_words(), self.notes, self.numerics, hint,
                         has_oracle=self.truth.has_meaning, truth_in_short=self.truth.in_short)

    def again(self, before: Judgement) -> Judgement:
        """What was found of the same code before, without another look; timed calls are held against it."""
        self.checks = before.checks
        return before

    @property
    def meaning(self) -> list[Check] | None:
        """The checks of its meaning in FP64, once it has passed; None where FP64 could not decide it."""
        of_meaning = [check for check in self.checks if check.question in (MEANING, DRAWN)]
        return of_meaning if self.meaning_is_known and all(each.passed and each.proven for each in of_meaning) else None

    def _hides_dropout(self) -> bool:
        """Whether it is compiled and drops by a rate that no attribute shows: then its functions are patched, and it is
        compiled anew for that."""
        if not self.draws or self.truth.draws or not compiled_inside(self.candidate):
            return False
        with without_dropout(self.candidate):
            return self._randomness().is_seen

    @property
    def draws(self) -> bool:
        """Whether another seed gives other outputs."""
        return self.randomness.is_seen

    def _randomness(self) -> chance.Randomness:
        return chance.randomness(self.candidate, self.truth.work, with_gradients=not self.forward_alone)

    def _ask(self) -> None:
        truth = self.truth
        if self.asks_meaning:
            truth.say(Phase.CHECKING, "the meaning")
            self._ask_meaning()
        if self._failed():
            return
        truth.say(Phase.CHECKING, "the precision")
        seen = observe(self.candidate, truth.work, overwrites_output=self.overwrites_output, alone=self.forward_alone,
                       draws=self.draws)
        own = truth.own(self.numerics)
        self._check_form(seen, own)
        if not self._failed():
            self._compare_precision(seen, own)
        if not self._failed() and self.asks_fresh:
            truth.say(Phase.CHECKING, "fresh inputs")
            self._ask_fresh()

    def _ask_fresh(self) -> None:
        """Whether what it gives depends on its inputs as the reference's does: on others, that nobody knew before.

        The candidate runs first: there is no answer that it could find. Kinks and rounding may move what is compared;
        what was kept from another call is further off. A gradient must be so each time.
        """
        truth, times = self.truth, 0
        with kept(self.candidate, truth.plain):
            for inputs in fresh(truth.work.inputs, FRESH):
                work = replace(truth.work, inputs=inputs, cotangents=1, seed=unguessable_seed())
                seen = observe(self.candidate, work, overwrites_output=True, alone=False, draws=self.draws)
                try:
                    own = truth.own_on(work, self.numerics)
                except Exception as error:                             # it has no answer for such inputs
                    self.notes.append(f"not judged on fresh inputs: {why_not(error)}")
                    return
                self._compare_fresh_outputs(seen, own, work)
                if self._failed():
                    return
                moved = self._gradients_moved(seen, own, work)
                times += bool(moved)
                if times == FRESH:
                    self.checks += moved

    def _compare_fresh_outputs(self, seen: Observation, own: Observation, work: Work) -> None:
        if not self.truth.same_twice or self.truth.draws:
            return
        for name, output in own.outputs.items():
            if takes_gradient(output):
                mine, bound = seen.outputs.get(name), self.allowed_between * norm([output])
                if self._fresh_check(names.output(name), mine, output, bound):
                    bound = max(bound, TIMES_THE_REFERENCE * self._output_moves(name, output, work))
                self.checks += self._fresh_check(names.output(name), mine, output, bound)

    def _output_moves(self, name: str, own: Tensor, work: Work) -> float:
        """How far rounding the inputs moves an output of the reference at most: a sum that is nearly zero moves far."""
        moved = [distance([seen.outputs[name]], [own])
                 for seen in self.truth.off_by_a_rounding(work, self._multiplies_in)]
        return max(filter(math.isfinite, moved), default=0.0)

    def _gradients_moved(self, seen: Observation, own: Observation, work: Work) -> list[Check]:
        """A failed check of each gradient that is another one."""
        if not self.truth.same_twice or self.truth.draws:
            return []
        pairs = {}
        for our, their in self._gradient_names(own).items():
            mine, exact = seen.gradients.get(their), own.gradients[our]
            if mine is not None and exact is not None:
                pairs[our] = mine[0], exact[0]
        moved = functools.partial(self._gradients_off_by_a_rounding, work)
        found = gradients_too_far_apart(pairs, self.allowed_between, norms_of_all(own)[1], moved)
        return [check for wrong in found for check in self._fresh_check(wrong.of, *pairs[wrong.of], wrong.bound)]

    def _gradients_off_by_a_rounding(self, work: Work) -> Iterator[dict[Named, Tensor]]:
        """The reference's own, several times, of inputs that are off by a rounding."""
        for seen in self.truth.off_by_a_rounding(work, self._multiplies_in):
            yield {of: tensors[0] for of, tensors in seen.gradients.items() if tensors is not None}

    def _gradient_names(self, own: Observation) -> dict[Named, Named]:
        """A gradient of the reference -> the candidate's."""
        pairs = {of: of for of in own.gradients if of.kind is Kind.INPUT_GRADIENT}
        for our, their in self._pairs().items():
            if names.gradient_of(our) in own.gradients:
                pairs[names.gradient_of(our)] = names.gradient_of(their)
        return pairs

    def _fresh_check(self, of: Named, mine: Tensor | None, own: Tensor, bound: float) -> list[Check]:
        """The check that failed, if it did."""
        size = norm([own])
        error = math.inf if mine is None else apart_where_finite(mine, own)
        if not size or error <= bound:
            return []
        reason = "on inputs that it had not seen it gives something else than the reference"
        return [Check(of, "fresh inputs", False, True, error / size, bound / size, reason)]

    @property
    def _multiplies_in(self) -> str | None:
        """What was declared, or the coarsest precision that explains an error; None where it is its dtype."""
        if self.numerics:
            return self.numerics
        found = {check.explained_by for check in self.checks if check.is_less_accurate}
        return max(found, key=lambda kind: bounds.epsilon_of(kind, self.truth.work.inputs.device), default=None)

    @property
    def allowed_between(self) -> float:
        """How far its outputs may be from the reference's, as a share of their norm, beyond FP64."""
        rough = max((check.error for check in self.checks if check.explained_by), default=0.0)
        rounding = max(bounds.rounding_of(self.dtype, self.numerics), rough)
        return TIMES_ROUNDING * rounding + TIMES_THE_REFERENCE * self.truth.own_error_in(self.numerics)

    def referee(self) -> Referee:
        """Who looks at its timed calls, once it has passed."""
        truth = self.truth
        flat, _ = flat_of(truth.plain, truth.work)
        parameters = named_parameters(truth.plain)
        pairs = [(their, parameters[our]) for their, our in self.partners.items()
                 if parameters[our].shape == self.parameters[their].shape]
        buffers = self._buffers_that_change()
        moves_on = truth.work.whole_state or bool(truth.work.written)          # with each timed call
        no_values = truth.has_dropout or truth.draws or moves_on or not truth.same_twice
        draws = no_values or self._has_state_of_its_own(len(buffers))
        gate = self.gate or 0.0
        allowed_of_gradients = max(self.allowed_between, TIMES_OF_A_GRADIENT * gate)
        in_its_numerics = None
        if self.numerics not in (None, "float8"):
            in_its_numerics = multiplying_in(self.numerics, truth.work.inputs)(flat)
        return Referee(flat, pairs, max(self.allowed_between, gate), allowed_of_gradients, draws, buffers, self.checks,
                       in_its_numerics=in_its_numerics, numerics=self._multiplies_in,
                       tables=tables_of(truth.plain))

    def _buffers_that_change(self) -> list[tuple[Tensor, Tensor]]:
        """(the candidate's, the reference's) of each that a call of the reference changes."""
        ours = named_buffers(self.truth.plain)
        return [(self.buffers[their], ours[our]) for their, our in self.buffer_partners.items()
                if our in self.truth.exact.changed_buffers and our in ours
                and ours[our].shape == self.buffers[their].shape]

    def _has_state_of_its_own(self, known: int) -> bool:
        """Whether results depend on earlier calls through buffers that are no pair: then values can't be compared."""
        if known == len(self.truth.exact.changed_buffers):
            return False
        with kept(self.truth.plain), without_dropout(self.truth.plain):
            return chance.depends_on_earlier_calls(self.truth.plain, self.truth.work)

    @contextlib.contextmanager
    def with_the_references_values(self) -> Iterator[None]:
        """Meanwhile its parameters and buffers have the reference's values, as when it was judged."""
        with (parameters_kept(self.candidate, self.truth.work.inputs),
              loaded(self.parameters | self.buffers, self._values())):
            yield

    def _ask_chance(self) -> None:
        truth = self.truth
        pairs = {our: their for our, their in self._pairs().items()
                 if truth.parameters[our].shape == self.parameters[their].shape}
        theirs = chance.Side(self.candidate, [self.parameters[their] for their in pairs.values()])
        drawing = self.randomness, truth.randomness
        rounding = bounds.rounding_between(self.dtype, self.numerics)
        outputs, gradients = self._off_by()
        rounding = replace(rounding, outputs_off_by=outputs, gradients_off_by=gradients)
        self.checks += chance.checks(theirs, truth.drawing(tuple(pairs)), drawing,
                                     truth.work, bool(truth.exact.takes_gradient), rounding, truth.say)

    def _off_by(self) -> tuple[float, float]:
        """(how far an output at most, and a gradient in root mean square, is off without dropout, as shares of norms).

        A deep network rounds in each layer.
        """
        if self.truth.draws:                   # without dropout, too: they are apart by what each draws
            return 0.0, 0.0
        compared = [check for check in self.checks if check.question == PRECISION and math.isfinite(check.error)]
        outputs = [check.error for check in compared if check.of.kind is Kind.OUTPUT]
        gradients = [check.error for check in compared if check.of.kind.is_gradient]
        return max(outputs, default=0.0), math.hypot(*gradients) / math.sqrt(max(1, len(gradients)))

    def _pairs(self) -> dict[str, str]:
        """Our parameter -> theirs, each pair once; a tied one stands under its first name."""
        ours_first, theirs_first = first_names(self.truth.parameters), first_names(self.parameters)
        return {ours_first[our]: theirs_first[their] for their, our in self.partners.items()}

    def _compare_precision(self, seen: Observation, own: Observation) -> None:
        """Where the meaning is right and gradients alone are far off, the reference is asked how far its own may be:
        a lower precision explains only what kinks do not."""
        standard = self._standard(PRECISION, self.dtype, self.truth.rounds_to == FP32)
        of_meaning = list(self.checks)
        self._compare(seen, own, standard)
        if self.meaning_is_known:
            self._compare_with_rounding(seen, standard, of_meaning, self.truth.further(self.numerics))

    def _compare_with_rounding(self, seen: Observation, standard: Standard, before: list[Check],
                               further: Iterator[Observation]) -> None:
        """Where nothing but gradients is far off, as where a rounding moves what is near a kink to its other side:
        compared again with the reference's own, further and further off, as long as one is too far. In FP64 an output
        may be far off as well, where many roundings to FP32 on the way add up."""
        while True:
            beyond = [check for check in self.checks if not check.passed or check.is_less_accurate]
            may_be = standard.dtype == FP64 or all(check.of.kind.is_gradient for check in beyond)
            own = next(further, None) if beyond and may_be else None
            if own is None:
                return
            self.checks = list(before)
            self._compare(seen, own, standard)

    def _failed(self) -> bool:
        return any(not check.passed for check in self.checks)

    # ------------------------------------------------------------------------------------------------- values and names

    def _values(self, drawn: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Their name -> the reference's value, or what was drawn in its place, where it has the same shape."""
        values, of_the_reference = {}, {**self.truth.values, **(drawn or {})}
        tensors = self.parameters | self.buffers
        for their, our in (self.partners | self.buffer_partners).items():
            value = of_the_reference.get(our)
            if value is not None and value.shape == tensors[their].shape:
                values[their] = value
        return values

    def _note_values(self, others: Sequence[str]) -> None:
        if others:
            self.notes.append(f"{len(others)} of its parameters started from other values: judged with the reference's")
        for their, our in self.partners.items():
            shapes = tuple(self.parameters[their].shape), tuple(self.truth.values[our].shape)
            if shapes[0] != shapes[1]:
                self.notes.append(f"{their} is {shapes[0]}, the reference's {shapes[1]}: it keeps its own values")
        self._note_ties()
        without = [name for name in self.parameters if name not in self.partners]
        if without:
            self.notes.append(f"{len(without)} of its parameters have no partner in the reference "
                              f"({', '.join(without[:3])}{', ...' if len(without) > 3 else ''})")

    def _note_ties(self) -> None:
        """Those of one side alone: then one holds a value that the other has not, and trains otherwise."""
        ours_first, theirs_first = first_names(self.truth.parameters), first_names(self.parameters)
        for their, our in self.partners.items():
            their_first = theirs_first[their]
            our_first = self.partners.get(their_first)
            if their != their_first and our_first and ours_first[our_first] != ours_first[our]:
                self.notes.append(f"{their_first} and {their} are one tensor here, two in the reference")

    def _truth_in_words(self) -> str:
        if self.gate is not None:
            return f"{self.truth.in_words}, by a gate of your own"
        return self.truth.in_words

    # --------------------------------------------------------------------------------------------------------- meaning

    def _ask_meaning(self) -> None:
        """In FP64 where both run there; what computes in 16 bits by default is tried in FP32 too.

        A kernel for weights in INT8 runs in FP32, and rounds there as well.
        """
        if not self.truth.has_meaning:
            return self._no_fp64(self.truth.why_not_fp64)
        tries_fp32 = self.dtype in (torch.float16, torch.bfloat16) and self.numerics != "int8"
        for dtype in (FP64, FP32)[:2 if tries_fp32 else 1]:
            try:
                rounds_to, seen = self._seen_in(dtype)
            except Failed:
                raise
            except Exception as error:
                self._no_fp64(why_not(error))
                continue
            finally:
                free_memory()
            if rounds_to not in (None, FP32):
                return self._no_fp64(f"it rounds to {dtype_name(rounds_to)} on its way")
            own = self.truth.exact if dtype == FP64 else self.truth.in_dtype(dtype)
            self._check_form(seen, own, dtypes=False)
            if not self._failed():
                self.meaning_is_known = dtype == FP64
                fp32_inside = FP32 in (rounds_to, self.truth.rounds_to)
                self._compare_meaning(seen, own, dtype, fp32_inside)
                if self.meaning_is_known and not self._failed():
                    self._ask_with_drawn_values(fp32_inside)
            return

    def _ask_with_drawn_values(self, fp32_inside: bool) -> None:
        """Zeros that hide what is behind them, as of a head before training, are drawn in both copies. Values that the
        candidate has made of the reference's would not follow."""
        drawn = self.truth.drawn
        if drawn is None:
            return
        if self._has_values_of_its_own():
            self.notes.append("zeros among the parameters hide others, and it has values of its own: not judged with "
                              "other values")
            return
        try:
            _, seen = self._seen_in(FP64, drawn.values)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.notes.append("zeros among the parameters hide others: other values do not fit beside these")
            return
        self._check_form(seen, drawn.seen, dtypes=False)
        if not self._failed():
            self._compare(seen, drawn.seen, self._standard(DRAWN, FP64, fp32_inside))

    def _seen_in(self, dtype: torch.dtype, drawn: Mapping[str, Tensor] | None = None
                 ) -> tuple[torch.dtype | None, Observation]:
        """(what a copy of the candidate in that dtype rounds to on its way, what it gives); with other values where
        some are drawn for the reference's parameters.

        Compiled modules run as they were written. Precision is that of the object itself, and so is whether a later
        call writes over its outputs.
        """
        copy, few = copied(self.candidate, self.truth.few, dtype)
        tensors = named_parameters(copy) | named_buffers(copy)
        with without_tf32(), uncompiled_meanwhile(copy), loaded(tensors, self._values(drawn)):
            rounds_to = rounding_in(copy, few) if dtype == FP64 else None
            if rounds_to not in (None, FP32):
                return rounds_to, Observation({})
            return rounds_to, observe(copy, few, dtype, overwrites_output=True, alone=self.forward_alone,
                                      draws=self.draws)

    def _compare_meaning(self, seen: Observation, own: Observation, dtype: torch.dtype, fp32_inside: bool) -> None:
        """Values of its own, folded or split from the reference's, were rounded to its dtype when they were made."""
        before, standard = list(self.checks), self._standard(MEANING, dtype, fp32_inside)
        self._compare(seen, own, standard)
        if not self._failed() or dtype != FP64:
            return
        if fp32_inside:
            self._compare_with_rounding(seen, standard, before, self.truth.further_in_fp64())
            if self._failed():
                self._compare_with_rounding(seen, standard, before, self._further_by_its_own_rounding(seen))
            if not self._failed():
                return
        if self._is_contradicted(seen):
            self.checks.clear()
            self.meaning_is_known = False
            self._no_fp64("its FP64 copy is another function than it is itself")
            return
        if not self._has_values_of_its_own():
            return
        if self.dtype == FP32 and not fp32_inside:
            self.checks.clear()
            self._compare(seen, own, self._standard(MEANING, dtype, True))
        elif self.dtype in (torch.float16, torch.bfloat16):
            self.checks.clear()
            self.meaning_is_known = False
            self._no_fp64(f"parameters without a partner are rounded to {dtype_name(self.dtype)}")

    def _further_by_its_own_rounding(self, seen: Observation) -> Iterator[Observation]:
        """The truth, and what the candidate itself makes of a rounding of its FP32, further and further off."""
        exact = found = self.truth.exact
        names_of_both = self._gradient_names(exact)
        for number in range(PERTURBATIONS):
            with RoundedAnew(number):
                _, other = self._seen_in(FP64)
            gradients = {our: _moved(exact.gradients[our], seen.gradients.get(their), other.gradients.get(their))
                         for our, their in names_of_both.items()}
            moved = replace(exact, outputs=_all_moved(exact.outputs, seen.outputs, other.outputs), gradients=gradients,
                            forward_alone=_all_moved(exact.forward_alone, seen.forward_alone, other.forward_alone))
            found = further_in_all(found, moved, exact)
            yield found

    def _is_contradicted(self, in_fp64: Observation) -> bool:
        """Whether the candidate itself gives what the reference gives, and its FP64 copy something else.

        Then the copy says nothing of what is timed. Only FP32 is near enough to FP64 to say so.
        """
        if self.dtype != FP32 or furthest_output(in_fp64, self.truth.exact) <= CONTRADICTS[FP32]:
            return False
        with uncompiled_meanwhile(self.candidate), without_tf32():
            own = observe(self.candidate, self.truth.few, overwrites_output=True, draws=self.draws)
        of_reference = self.truth.in_dtype(FP32)
        return (furthest_output(own, in_fp64) > CONTRADICTS[FP32]
                and furthest_output(own, of_reference) <= CONTRADICTS[FP32] / 100)

    def _has_values_of_its_own(self) -> bool:
        """Whether a parameter or buffer is neither loaded from the reference nor a constant that is equal there."""
        loaded_here, constants = self._values(), self.truth.buffers
        for name, tensor in (self.parameters | self.buffers).items():
            theirs = constants.get(self.buffer_partners.get(name, ""))
            if name not in loaded_here and (theirs is None or not torch.equal(tensor, theirs)):
                return True
        return False

    def _no_fp64(self, why: str) -> None:
        if not self.has_noted_no_fp64:
            self.notes.append(f"no FP64 ({why}): small differences can't be seen")
        self.has_noted_no_fp64 = True

    # ------------------------------------------------------------------------------------------------------------ form

    def _check_form(self, seen: Observation, own: Observation, dtypes: bool = True) -> None:
        """What must be so before any figure is compared."""
        for name in own.outputs:
            if name not in seen.outputs:
                self._wrong(names.output(name), f"it is missing; it returns {', '.join(seen.outputs)}")
        for name, output in seen.outputs.items():
            expected, of = own.outputs.get(name), names.output(name)
            if expected is None:
                self._wrong(of, f"the reference returns none; it returns {', '.join(own.outputs)}")
            elif output.shape != expected.shape:
                self._wrong(of, f"its shape is {tuple(output.shape)}, the reference's {tuple(expected.shape)}")
            elif dtypes and not self._may_have(output.dtype, expected.dtype):
                self._wrong(of, f"it is {dtype_name(output.dtype)}, the reference's {dtype_name(expected.dtype)}: "
                                "declare that by numerics")
            elif name in own.takes_gradient and name not in seen.takes_gradient:
                self._wrong(of, "it takes no gradient, the reference's does")
        for name, kind in seen.kinds.items():
            if kind is not own.kinds.get(name):
                self._wrong(names.output(name), f"it is a {kind.__name__}{NOT_PLAIN}")
        for name in sorted({*seen.changed_inputs} - {*own.changed_inputs}):
            reason = f"it is changed in place; backward then raises {seen.backward_raises}"
            self._wrong(names.changed_input(name), reason if seen.backward_raises else "it is changed in place")
        for name in sorted({*seen.overwritten} - {*own.overwritten}):
            self._wrong(names.output(name), "a later call writes over it: declare that by overwrites_output=True")
        if not own.takes_gradient:
            note = "the reference's outputs take no gradient: forward alone is compared"
            self.notes += [] if note in self.notes else [note]

    def _may_have(self, dtype: torch.dtype, expected: torch.dtype) -> bool:
        """Whether an output may be so: as the reference's, or another where numerics are declared. A reference that
        answers in FP64 whatever it is given says nothing of dtypes."""
        if dtype == expected:
            return True
        if dtype.is_complex and expected.is_complex:
            dtype, expected = dtype.to_real(), expected.to_real()
        floating = dtype.is_floating_point and expected.is_floating_point
        return floating and (self.numerics is not None or expected == FP64 != self.truth.work.inputs.dtype)

    # --------------------------------------------------------------------------------------------------------- figures

    def _standard(self, question: str, dtype: torch.dtype, fp32_inside: bool) -> Standard:
        truth = self.truth
        unreliable = "" if truth.same_twice else NOT_TWICE
        if truth.draws and not unreliable:
            unreliable = DRAWS_OTHERS
        numerics = self.numerics if question == PRECISION else None
        norms = truth.norms_of_whole if question == PRECISION else norms_of_all(self._held_against(question))
        standard = Standard(question, dtype, *norms, fp32_inside, numerics, self.gate, self.meaning_is_known,
                            unreliable, self._others)
        if question != PRECISION:
            return standard
        return replace(standard, off_by=truth.off_by, is_zero=truth.is_zero)

    def _held_against(self, question: str) -> Observation:
        """The meaning against FP64 of as many samples as fit, the precision against all samples."""
        if question == DRAWN and self.truth.drawn is not None:
            return self.truth.drawn.seen
        return self.truth.exact if question == MEANING else self.truth.whole

    def _others(self, of: Named) -> Iterator[tuple[str, Sequence[Tensor]]]:
        """What the reference gives for a tensor in channels-last and in each lower precision."""
        for kind, rough in self.truth.others():
            if tensors := rough.of(of):
                yield kind, tensors

    def _compare(self, seen: Observation, own: Observation, standard: Standard) -> None:
        exact = self._held_against(standard.question)
        for name, truth in exact.outputs.items():
            self.checks.append(standard.tensor(names.output(name), [seen.outputs[name]], [truth], [own.outputs[name]]))
            if name in seen.forward_alone and name in own.forward_alone:
                alone = [[given.forward_alone[name]] for given in (seen, exact, own)]
                self.checks.append(standard.tensor(names.output(name, alone=True), *alone))
        if own.takes_gradient:
            for of, gradient in exact.gradients.items():
                if of.kind is Kind.INPUT_GRADIENT:
                    self._keep(standard.gradient(of, seen.gradients.get(of), gradient, own.gradients.get(of)))
            self._compare_parameters(standard, seen, own)
        self._compare_buffers(standard, seen, own)

    def _compare_parameters(self, standard: Standard, seen: Observation, own: Observation) -> None:
        ours_first, theirs_first = first_names(self.truth.parameters), first_names(self.parameters)
        pairs = dict.fromkeys((ours_first[our], theirs_first[their]) for their, our in self.partners.items())
        exact = self._held_against(standard.question).gradients
        for our, their in pairs:
            of = names.gradient_of(our)
            if self.truth.values[our].shape != self.parameters[their].shape:
                self._unproven(of, standard.question, f"its {their} has another shape")
                continue
            theirs = seen.gradients.get(names.gradient_of(their))
            self._keep(standard.gradient(of, theirs, exact.get(of), own.gradients.get(of)))
        for our in dict.fromkeys(ours_first.values()):
            of = names.gradient_of(our)
            if our not in {our for our, _ in pairs} and exact.get(of) is not None:
                self._unproven(of, standard.question, "it has no parameter of that name")
        for their in dict.fromkeys(theirs_first.values()):
            of = names.gradient_of(their)
            if their not in {their for _, their in pairs} and seen.gradients.get(of) is not None:
                self._unproven(of, standard.question, "the reference has no parameter of that name")

    def _compare_buffers(self, standard: Standard, seen: Observation, own: Observation) -> None:
        """Those that a call changes, of either: constants may be kept in any way."""
        exact = self._held_against(standard.question)
        for their, our in self.buffer_partners.items():
            changed = our in exact.changed_buffers or their in seen.changed_buffers
            if changed and seen.buffers[their].shape == own.buffers[our].shape:
                tensors = [seen.buffers[their]], [exact.buffers[our]], [own.buffers[our]]
                self.checks.append(standard.tensor(names.buffer(our), *tensors))
        for our in exact.changed_buffers:
            if our not in self.buffer_partners.values():
                self._unproven(names.buffer(our), standard.question, "it has no buffer of that name")

    def _keep(self, check: Check | None) -> None:
        if check is not None:
            self.checks.append(check)

    def _unproven(self, of: Named, question: str, reason: str) -> None:
        self.checks.append(Check(of, question, True, False, math.nan, math.nan, reason))

    def _wrong(self, of: Named, reason: str) -> None:
        self.checks.append(Check(of, "form", False, True, math.nan, math.nan, reason))


# --------------------------------------------------------------------------------------------------------- for a person


def validate(candidate: Callable, reference: Callable, inputs: Any, loss: Loss | None = None,
             numerics: str | None = None, cotangents: int = 3, *, parameters: Mapping[str, str] | None = None,
             overwrites_output: bool = False, seed: int = 0) -> Judgement:
    """Whether a module or function gives what a reference gives: outputs, gradients and buffers, tensor by tensor.

    `inputs` is a tensor, a tuple of positional values or a dict of values by keyword, of any shapes and dtypes. Both
    are judged in the mode that they are in, train or eval. `loss` maps an output to a scalar; without it outputs get
    `cotangents` random ones. `numerics` declares what a candidate multiplies in: "tf32", "float16",
    "bfloat16", "float8", or "int8" for the weights of linear layers. `parameters` (its name -> the reference's) pairs
    what names do not. Both are restored afterwards. Raises ValueError where the reference or the arguments can't be
    used; what the candidate raises is a failed check.
    """
    given = Inputs.of(inputs)
    materialised(given, reference, candidate)
    with parameters_kept(reference, given), quick_collections():
        return _validated(candidate, Truth(reference, Work(given, loss, cotangents, seed)), numerics, parameters or {},
                          overwrites_output)


def _all_moved(truths: dict[str, Tensor], before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of outputs, by their names."""
    found = {name: _moved([truth], [before[name]], [after[name]]) or [truth]
             for name, truth in truths.items() if name in before and name in after}
    return truths | {name: moved for name, (moved,) in found.items()}


def _moved(truth: list[Tensor] | None, before: list[Tensor] | None, after: list[Tensor] | None) -> list[Tensor] | None:
    """The truth, as far off as one of a candidate's tensors has moved."""
    if not (truth and before and after) or [t.shape for t in truth] != [t.shape for t in before]:
        return truth
    return [exact + (moved - t) for exact, t, moved in zip(truth, before, after, strict=False)]


def _validated(candidate: Callable, truth: Truth, numerics: str | None, parameters: Mapping[str, str],
               overwrites_output: bool) -> Judgement:
    """The judgement; what the candidate raises is a failed check."""
    judge = Judge(candidate, truth, numerics, parameters, overwrites_output)
    try:
        return judge.judge()
    except Exception as error:
        reason = f"it raises {in_a_line(error)}"
        does_not_fit = is_out_of_memory(error)
    free_memory()
    if does_not_fit:
        reason = f"out of memory: {machine.peak_in_words(truth.work.inputs.device)}"
    return Judgement([Check(THE_CALL, "form", False, True, math.nan, math.nan, reason)], truth.in_words, [], numerics,
                     does_not_fit=does_not_fit, has_oracle=truth.has_meaning, truth_in_short=truth.in_short)
