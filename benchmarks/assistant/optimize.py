"""The ladder on a person's own model: each technique found, applied, judged, timed and ranked.

    from benchmarks.assistant import optimize
    result = optimize(build)                     # or optimize(model, inputs)
    for o in result.opportunities: print(o.technique, o.file, o.line, o.speedup, o.verdict)
"""
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.assistant.combination import Combination, Measured, cases
from benchmarks.assistant.loading import Source
from benchmarks.assistant.look import Looked, look_at
from benchmarks.assistant.optimized import Added, Optimized, as_written
from benchmarks.assistant.proving import Prover
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Found, Plan, Technique, plan_of
from benchmarks.assistant.techniques import EVERY
from benchmarks.assistant.verdicts import opportunities
from benchmarks.assistant.why import Why, explain
from benchmarks.assistant.workload import arithmetic_of, workload
from benchmarks.assistant.written import AsWritten, WrittenOut, written_out
from benchmarks.measure.checks import Check, Judgement
from benchmarks.measure.judge import DEPENDS_ON_STATE, Judge
from benchmarks.measure.keeping import kept, materialised, parameters_kept, torch_modes_kept
from benchmarks.measure.modules import record_checks, subject_of, work_in_words
from benchmarks.measure.observing import Work
from benchmarks.measure.truth import Truth, free_memory, quick_collections, working_dtype
from benchmarks.records import BY_HAND
from common import signals
from common.block import oracle
from common.block.config import dtype_name
from common.command_line import hush
from common.measure.cases import Case, Group, Setting
from common.measure.session import Session
from common.measure.subject import Subject, on_a_copy
from common.outcome import UserError, in_a_line, is_out_of_memory
from common.phases import Phase
from common.report.record import PREDICTED, PREDICTED_MEMORY, VERDICT, Record, record
from common.report.record_file import RecordFile
from common.report.result import Compilation, Result
from common.runtime.iteration import BOTH, FORWARD, MODES
from common.runtime.timing import EventClock

# The groups of rungs that share their rounds.
ALONE, TOGETHER, PIECES, WRITTEN = "alone", "together", "each as written", "written out"
ITERATIONS = 30                        # a guess: compiling, judging and warming up a rung takes as long as so many
GRADIENTS = 3                          # recorded of each rung, those nearest to their bounds
LONG_MS = EventClock.burst_ms          # an iteration that fills a sample by itself: each pass of a rung takes seconds
QUICK_ROUNDS, ROUNDS = 6, {"cuda": 20, "cpu": 12}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or what `timeout` and a scheduler send; `result` is what was found until then, `by` what was raised."""

    def __init__(self, result: Optimized, by: BaseException):
        super().__init__()
        self.result, self.by = result, by


def optimize(model: nn.Module | Callable[[], Any], inputs: Any = None, *, name: str = "", inference: bool = False,
             quick: bool = False, rounds: int | None = None, seed: int = 0, device: torch.device | str | None = None,
             file: RecordFile | None = None, techniques: Sequence[Technique] = EVERY, loss: Callable | None = None
             ) -> Optimized:
    """Read a model, try every technique on it, and rank what each buys.

    `model` is a module, which `inputs` go with (and `loss`, which maps its output to a scalar), or a function that
    returns both, or a Task. What `load("my_model.py:build")` gives is such a function, whose file is known: unless this
    is `quick`, all that is to be written is tried in a copy of it. `inference` leaves the backward out. Without
    `device` the model stays where it is. The model is restored afterwards. Raises UserError where there is nothing that
    could be measured.
    """
    task = _task(model, inputs, loss, device)
    where = next(iter(task.devices))
    count = rounds or (QUICK_ROUNDS if quick else ROUNDS[where.type])
    session = Session("assistant", where, count, seed, file=file)
    with kept(*task.models), parameters_kept(task.model, task.given), quick_collections(), _fits():
        source = model if isinstance(model, Source) else None
        assistant = _Assistant(task, session, techniques, inference, quick, source)
        return assistant.run(name or type(task.model).__name__)


def look(model: nn.Module | Callable[[], Any], inputs: Any = None, *, name: str = "", inference: bool = False,
         seed: int = 0, device: torch.device | str | None = None, techniques: Sequence[Technique] = EVERY,
         loss: Callable | None = None) -> Looked:
    """Read a model and say where its time goes, and where each technique could apply; takes what `optimize` takes."""
    task = _task(model, inputs, loss, device)
    session = Session("assistant", next(iter(task.devices)), 1, seed)
    with kept(task.model), parameters_kept(task.model, task.given), _callable():
        looked = look_at(name or type(task.model).__name__, task, session, techniques, inference)
    session.progress.finish()
    return looked


def why(technique: str, model: nn.Module | Callable[[], Any], inputs: Any = None, *, name: str = "",
        inference: bool = False, seed: int = 0, device: torch.device | str | None = None,
        techniques: Sequence[Technique] = EVERY, loss: Callable | None = None) -> Why:
    """Where one technique applies, where not, and whether its kernels run; takes what `optimize` takes.

    Raises ValueError where there is no technique of that name.
    """
    wanted = [each for each in techniques if each.name == technique]
    if not wanted:
        raise ValueError(f"{technique}: give one of {', '.join(each.name for each in techniques)}")
    task = _task(model, inputs, loss, device)
    session = Session("assistant", next(iter(task.devices)), 1, seed)
    with kept(task.model), parameters_kept(task.model, task.given), _callable():
        looked = look_at(name or type(task.model).__name__, task, session, wanted, inference)
        said = explain(wanted[0], looked, task, session)
    session.progress.finish()
    return said


def _task(model: nn.Module | Callable[[], Any], inputs: Any, loss: Callable | None, device: torch.device | str | None
          ) -> Task:
    hush()
    task = Task.of(model() if not isinstance(model, nn.Module) else (model, inputs, loss))
    task = task if device is None else task.on(torch.device(device))
    materialised(task.given, task.model)
    with _callable(), parameters_kept(task.model, task.given):
        task = task.as_it_can_run()
        task.check_calls()
        return task


@contextlib.contextmanager
def _callable() -> Iterator[None]:
    """What a model raises on its own inputs is reported in a line."""
    try:
        with _fits():
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"the model can't be called on these inputs: {in_a_line(error)}") from None


@contextlib.contextmanager
def _fits() -> Iterator[None]:
    """Raises MemoryError where a model does not fit: a CPU's allocator has no exception of its own."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"the model does not fit: {in_a_line(error)}") from None


@dataclass(frozen=True)
class Meaning:
    """What decides what a rung means in FP64: neither a compiler nor TF32 does."""
    rewriting: tuple[str, ...]             # the techniques that change the model or its graphs, in their order
    autocast: torch.dtype | None           # which a model may ask for
    inputs: str                            # on which of them


class _Assistant:
    """One run on one model."""

    def __init__(self, task: Task, session: Session, techniques: Sequence[Technique], inference: bool,
                 quick: bool, source: Source | None):
        self.task, self.session, self.techniques, self.quick = task, session, techniques, quick
        self.inference, self.modes = inference, (FORWARD,) if inference else MODES
        self.judgements: dict[str, Judgement] = {}
        self.meanings: dict[Meaning, list[Check]] = {}         # of which rungs it was judged, and by which checks
        self.seconds_a_rung: float | None = None               # in the rounds before
        self.source = source                                   # what is to be written is tried there, if it is known
        self.prover = Prover(source, task, session.device, session.seed, inference) if source else None

    def run(self, name: str) -> Optimized:
        session, task = self.session, self.task
        session.say(Phase.CHECKING, "the model")
        self.work = task.work(cotangents=1, seed=session.seed, forward_only=self.inference)
        if not self.inference:
            task.refuse_shapes_by_values()
        with _callable():
            self.truth = Truth(task.model, self.work, session.say)
            self.other_truths = {words: Truth(task.model, replace(self.work, inputs=inputs, loss=None), session.say)
                                 for words, inputs in task.others.items()}
        looked = look_at(name, task, session, self.techniques, self.inference)
        self.program = looked.program
        truth = self.truth.in_words
        if task.has_constant_inputs:
            truth += "; without gradients of the inputs, which the model does not take"
        if self.truth.work.whole_state:
            truth += f"; {DEPENDS_ON_STATE}"
        self.result = Optimized(looked, truth, judgements=self.judgements,
                                file_known=self.source is not None, others=task.others)
        with contextlib.ExitStack() as self.values:
            try:
                with torch_modes_kept():
                    for what, stage in (("the rungs", self._try_all), ("the code to write", self._prove),
                                        ("all of it, written", self._write_out)):
                        self._unless_it_breaks(what, stage)
            except (KeyboardInterrupt, signals.Terminated) as ended:
                raise Interrupted(self._recorded(), ended) from None
        self._recorded()
        self.result.times = session.finish(None)
        return self._concluded()

    def _unless_it_breaks(self, what: str, stage: Callable[[], None]) -> None:
        """A part of the run; what was measured until then is reported all the same."""
        try:
            stage()
        except Exception as error:
            self.result.faults[f"{what}: {in_a_line(error)}"] = None
            free_memory()

    def _try_all(self) -> None:
        """Every technique that can be tried here, alone and then on top of each other."""
        found = self.result.looked.found
        tried = [technique for technique in self.techniques if self._can_try(technique, found[technique])]
        alone = [Combination((each,)) for each in tried]
        bases = [self.result.base_of(each) for each in tried]
        wanted = list(dict.fromkeys([Combination(), *bases, *alone]))
        self._measure(wanted, ALONE, self.result.alone)
        for words in self.other_truths:
            self.result.on_others[words] = Measured()
            self._measure([each for each in wanted if self.result.alone.row(each, self.result.mode)], words,
                          self.result.on_others[words])
        self._climb(tried)

    def _concluded(self) -> Optimized:
        """With the verdicts on what was measured so far."""
        result = self.result
        result.payback = self._payback()
        result.opportunities = opportunities(result)
        result.lines = self.session.lines
        return result

    def _recorded(self) -> Optimized:
        """The same, its verdicts written as records of the model as it is; none where that was not measured."""
        result = self._concluded()
        as_it_is = result.alone.results.get(Combination().name)
        if as_it_is is not None:
            self.session.write(_verdicts(result, as_it_is))
        return result

    def _can_try(self, technique: Technique, found: Sequence[Found]) -> bool:
        possible = technique.apply is not None and not technique.missing(self.session.device)
        return possible and any(each.can_be_tried for each in found)

    # ------------------------------------------------------------------------------------------------------- measuring

    def _measure(self, combinations: Sequence[Combination], phase: str, measured: Measured,
                 others: Sequence[Case] = ()) -> None:
        """All of them in the same rounds. `measured` gets what there is when it ends, in whatever way."""
        wanted = [*(self._case(each, phase) for each in cases(combinations)), *others]
        self.session.note(f"{len(wanted)} rungs {phase}, {self.session.rounds} rounds: {self._estimate(len(wanted))}")
        began, before = time.perf_counter(), len(self.session.entries)
        on_gpu = self.session.device.type == "cuda"
        try:
            self.session.measure(Group(wanted, modes=self._modes_of(phase), calibrated=False,
                                       limited=phase not in self.other_truths,
                                       metered=on_gpu and phase == TOGETHER and not self.quick, may_not_fit=True))
        finally:
            measured.results.update({entry.result.name: entry.result for entry in self.session.entries[before:]})
        self.seconds_a_rung = (time.perf_counter() - began) / len(wanted)

    def _modes_of(self, phase: str) -> tuple[str, ...]:
        """The passes of the model as it is that are timed in it."""
        return self.modes if phase == ALONE else (self.result.mode,)

    def _modes_of_rungs(self, phase: str) -> tuple[str, ...]:
        """Those of a rung: of a large model that must be quick, the one that verdicts go by."""
        is_long = self.result.looked.spending.total_ms > LONG_MS
        return (self.result.mode,) if self.quick and is_long else self._modes_of(phase)

    def _estimate(self, rungs: int) -> str:
        """How long measuring them takes, in words."""
        seconds = self.seconds_a_rung
        if seconds is None:
            seconds = 1e-3 * self.result.looked.spending.total_ms * (ITERATIONS + 2 * self.session.rounds)
        minutes = rungs * seconds / 60
        return f"about {minutes:.0f} min" if minutes >= 1 else "less than a minute"

    def _case(self, combination: Combination, phase: str) -> Case:
        """A rung; without techniques the model as it is, which there is nothing to hold against."""
        def prepare(setting: Setting, result: Result) -> Subject:
            setting.say(Phase.BUILDING)
            if not combination.changing:
                _, gate = oracle.MODULE_GATES[self.truth.dtype]
                subject = subject_of(self.task.model, self._work_in(phase), (gate, gate), is_refreshed=True)
                own = workload(self.program, arithmetic_of(Plan(), setting.device))
                result.matmul = own.matmul
                subject.workload = None if phase in self.other_truths else own
                return subject
            return self._rung(combination, setting, result)
        return self._case_of(combination.name, prepare, phase)

    def _record_prediction(self, result: Result) -> None:
        """Of a technique alone, before it runs; what it computes in is known."""
        predicted = self.result.predictions.get(result.name)
        if predicted and _phase_of(result) == ALONE:
            ends, mode = [predicted.least_ms, predicted.most_ms], self.result.mode
            lines = [record(result, PREDICTED, "ms", ends, mode, before=predicted.before_ms)]
            if predicted.freed:
                freed = [predicted.freed.least, predicted.freed.most]
                lines.append(record(result, PREDICTED_MEMORY, "bytes", freed, mode))
            self.session.write(lines)

    def _case_of(self, name: str, prepare: Callable[[Setting, Result], Subject], phase: str) -> Case:
        work = work_in_words(self.task.model, self._work_in(phase).inputs)
        variant = {"measured": phase}
        left_out = [*self.result.clashes, *(each.technique.name for each in self.result.dropped)]
        if phase == TOGETHER and left_out:                     # another ladder than the one before, in other rounds
            variant["without"] = ", ".join(left_out)
        return Case(name, prepare, parameter_dtype=self.truth.dtype, work=work, variant=variant)

    def _work_in(self, phase: str) -> Work:
        """On the inputs that are given first, or on those that a phase is about."""
        return self.other_truths[phase].work if phase in self.other_truths else self.work

    def _rung(self, combination: Combination, setting: Setting, result: Result) -> Subject:
        phase, found = _phase_of(result), self.result.found
        rung = Rung(self.task.model, combination.changing, setting.device, found, self.program.dynamic)
        if rung.plan.compiles and phase == ALONE:
            setting.say(Phase.COMPILING)
            result.compilation = Compilation(self._first_calls(rung, phase), None)
        if rung.plan.compiles and phase in self.other_truths:  # for the first inputs, as a person's model is before
            setting.say(Phase.COMPILING)
            self._first_calls(rung, phase)
        rewriting = tuple(each.name for each in combination.changing if _rewrites(each, found))
        return self._judged_subject(rung, rung.plan, result, setting, rewriting=rewriting)

    def _judged_subject(self, module: nn.Module, plan: Plan, result: Result, setting: Setting,
                        overwrites_output: bool = False, is_proven: bool = False,
                        rewriting: tuple[str, ...] | None = None) -> Subject:
        """The model changed in some way, as it is timed, once it has passed the judge. Raises Failed where it did not.

        `plan` says what it computes in. `is_proven`: what its code means was judged before, on other inputs;
        `rewriting`: these techniques alone make that another code than the model's.
        """
        own = workload(self.program, arithmetic_of(plan, setting.device), plan.in_int8)
        phase = _phase_of(result)
        result.matmul, result.runs_under = own.matmul, dtype_name(plan.autocast) if plan.autocast else ""
        self._record_prediction(result)
        setting.say(Phase.CHECKING)
        on_others = phase in self.other_truths
        truth = self.other_truths[phase] if on_others else self.truth
        judge_by = functools.partial(
            Judge, module, numerics=plan.numerics, overwrites_output=overwrites_output,
            forward_alone=FORWARD in self._modes_of_rungs(phase) or phase in (PIECES, WRITTEN))
        meaning = None if rewriting is None else Meaning(rewriting, plan.autocast, phase if on_others else "")
        proven = () if is_proven else self._judged_before(meaning)
        judge = judge_by(truth, fresh=not on_others, proven=proven)
        judgement = self._judged(judge, meaning)
        if on_others:
            judgement.checks[:] = _there(judgement, phase)     # in place: timed calls add theirs
            self.result.judgements_on_others[result.name, phase] = judgement
        else:
            self.judgements[result.name] = judgement
            if phase != ALONE:                                 # each of them has its own rounds
                self._judge_on_others(judge_by, judgement, meaning)
        try:
            record_checks(judgement, result, GRADIENTS)
            referee = judge.referee()                          # it sees what its next calls change
        finally:
            truth.forget_others()
        self.values.enter_context(judge.with_the_references_values())
        subject = subject_of(module, self._work_in(phase), self._gates(plan), referee)
        subject.passes = self._modes_of_rungs(phase)
        subject.workload = None if on_others else own
        return subject

    def _judge_on_others(self, judge_by: Callable[..., Judge], judgement: Judgement, meaning: Meaning | None) -> None:
        """Add the checks of the inputs that are not timed, as long as all passed."""
        for words, truth in self.other_truths.items():
            if judgement.passed:
                there = replace(meaning, inputs=words) if meaning else None
                judge = judge_by(truth, fresh=False, proven=self._judged_before(there))
                judgement.checks.extend(_there(self._judged(judge, there), words))

    def _judged_before(self, meaning: Meaning | None) -> list[Check] | None:
        """The checks by which another rung of the same meaning passed."""
        return self.meanings.get(meaning) if meaning else None

    def _judged(self, judge: Judge, meaning: Meaning | None) -> Judgement:
        """What a judge says; what it found of the meaning is kept for other rungs."""
        judgement = judge.judge()
        if meaning and judge.meaning:
            self.meanings[meaning] = judge.meaning
        return judgement

    def _gates(self, plan: Plan) -> tuple[float, float]:
        """Of a replay."""
        _, gate = oracle.MODULE_GATES[_multiplying_in(plan, working_dtype(self.task.model, self.work.inputs))]
        return gate, gate

    def _first_calls(self, rung: Rung, phase: str) -> float:
        """Seconds of the first calls, in which it is compiled for the passes of a phase."""
        began = time.perf_counter()
        with kept(rung):
            subject = subject_of(rung, self.work, self._gates(rung.plan))
            for mode in self._modes_of_rungs(phase):
                if subject.has(mode):
                    iteration = on_a_copy(subject, mode)
                    iteration.between()
                    iteration.run()
        if self.session.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def _climb(self, tried: Sequence[Technique]) -> None:
        """Measure the ladder: one technique after the other, the one that gains most first."""
        gains = {each: gain for each in tried if (gain := self.result.most_gained(each))}
        order = sorted(gains, key=lambda each: -gains[each])
        if self.quick:                                         # each rung on top of what compiles is compiled anew
            order = [each for each in order if not self.result.is_slower(each)]
            order.sort(key=lambda each: plan_of((each,), found=self.result.found).compiles)
        needless = {each.instead_of for each in order}
        order = [each for each in order if each.name not in needless]
        least = 1 if self.task.by_hand else 2                  # one alone is measured already
        while len(order) >= least:
            self._climb_once(order)
            left_out = self._clashing(order) or self._dropped(order)
            if left_out is None:
                return
            order.remove(left_out)
            self.result.ladder.clear()
        if self.task.by_hand:
            self._measure([Combination()], TOGETHER, self.result.together, self._by_hand())

    def _climb_once(self, order: Sequence[Technique]) -> None:
        """Measure one ladder, whatever fails on it."""
        rungs = _rungs(order)
        every = rungs[-1]
        others = [] if self.quick else [every.without(each) for each in order]
        measured = self.result.together
        self._measure([*rungs, *others], TOGETHER, measured, self._by_hand())
        mode = self.result.mode
        for before, rung, technique in zip(rungs, rungs[1:], order, strict=False):
            left_out = None if self.quick else measured.gain(every, every.without(technique), mode)
            self.result.ladder.append(Added(technique, rung, measured.gain(rung, before, mode), left_out))

    def _by_hand(self) -> list[Case]:
        """The version that a person wrote, if there is one."""
        version = self.task.version_by_hand
        if version is None:
            return []

        def prepare(setting: Setting, result: Result) -> Subject:
            setting.say(Phase.BUILDING)
            subject = self._judged_subject(version.model, _plan_of_numerics(version.numerics), result, setting)
            if version.numerics in ("float8", "int8"):         # which of its matmuls are so is not known
                subject.workload = None
            return subject
        return [self._case_of(BY_HAND, prepare, TOGETHER)]

    def _clashing(self, order: Sequence[Technique]) -> Technique | None:
        """The first that fails on top of those before it, which do not: all after it would fail by it, too."""
        measured, mode = self.result.together, self.result.mode
        for before, rung, technique in zip(_rungs(order), _rungs(order)[1:], order, strict=False):
            why_not = measured.why_not(rung, mode)
            if not why_not or measured.why_not(before, mode):
                continue
            clashing = self._better_without(rung, technique) or technique
            others = rung.without(clashing).words or "the model as it is"
            self.result.clashes[clashing.name] = f"on top of {others} it can't run: {why_not}"
            return clashing
        return None

    def _dropped(self, order: Sequence[Technique]) -> Technique | None:
        """The first that slows the ladder down, if others follow: those were measured on what nobody would write."""
        slowing = next(filter(self.result.slows_down, self.result.ladder[:-1]), None)
        if slowing is None or len(order) == 2:                 # without it there would be no ladder
            return None
        self.result.dropped.append(slowing)
        return slowing.technique

    def _better_without(self, rung: Combination, technique: Technique) -> Technique | None:
        """What captures this rung, where it runs launched one by one, and its last technique gains more so."""
        graph = next((each for each in rung.techniques if each.launch == "graph"), None)
        if graph is None or graph is technique or not self.result.together.ms(rung.without(graph), self.result.mode):
            return None
        alone, captured = self.result.gain_alone(technique), self.result.most_gained(graph)
        return graph if alone and captured and alone[0] > captured else None

    def _prove(self) -> None:
        """Paste each piece of advice into a copy of the files: is it right, and do those of a technique gain?"""
        if not self.prover:
            return
        result = self._concluded()
        for advice in result.placed():
            self.session.say(Phase.CHECKING, f"the code for {advice.place.name}")     # type: ignore[union-attr]
            result.proofs[advice] = self.prover.why_not(advice)
        self._concluded()
        applied = [each for each in self.techniques if each.apply is not None and result.placed(each.name)]
        if applied:
            self._time_as_written(applied)

    def _time_as_written(self, techniques: Sequence[Technique]) -> None:
        """What is to be written for each of them, together and alone in its place, beside the model as it is."""
        assert self.source is not None
        wanted = []
        with contextlib.ExitStack() as stack:
            for each in techniques:
                together = self.result.placed(each.name)
                alone = {as_written(each.name, advice.place): [advice] for advice in together if len(together) > 1}
                for name, advices in {as_written(each.name): together, **alone}.items():
                    try:
                        written, _ = stack.enter_context(written_out(self.source, advices, self.session.device))
                        is_proven = len(advices) == 1                      # by the prover: this very code
                        wanted.append(self._written_case(written, Combination((each,)), name, PIECES, is_proven))
                    except (UserError, OSError) as error:
                        self.result.proofs |= dict.fromkeys(advices, f"{name}: {str(error).splitlines()[0]}")
            self._measure([Combination()], PIECES, self.result.pieces, wanted)

    def _write_out(self) -> None:
        """Paste what is to be written into a copy of the files, and time it beside what its techniques promised."""
        result = self._concluded()
        advices, promised, mode = result.to_write(), result.taken(), result.mode
        if not self.source or self.quick or not advices:
            return
        with contextlib.ExitStack() as stack:
            try:
                written, left_out = stack.enter_context(written_out(self.source, advices, self.session.device))
            except (UserError, OSError) as error:                   # a full disk, say
                result.written = WrittenOut(why_not=str(error))
                return
            measured = Measured()
            self._measure([promised], WRITTEN, measured, [self._written_case(written, promised, WRITTEN, WRITTEN)])
        done = Combination(called=WRITTEN)
        gain, why_not = measured.gain(done, promised, mode), measured.why_not(done, mode)
        by_hand = [one.technique for one in result.opportunities if one.verdict == "by hand" and one.advice]
        result.written = WrittenOut(measured.ms(promised, mode), measured.ms(done, mode), gain, why_not,
                                    list(dict.fromkeys(by_hand)), left_out)

    def _written_case(self, written: AsWritten, promised: Combination, name: str, phase: str, is_proven: bool = False
                      ) -> Case:
        """It may round as the techniques that it spells out do."""
        def prepare(setting: Setting, result: Result) -> Subject:
            return self._judged_subject(written, plan_of(promised.changing, found=self.result.found), result, setting,
                                        overwrites_output=promised.launch == "graph", is_proven=is_proven)
        return self._case_of(name, prepare, phase)

    def _payback(self) -> str:
        """When what compiling took is won back by that alone, and on the ladder; "" where it was not tried."""
        compiled = next((each for each in self.techniques if each.name == "compile"), None)
        if compiled is None:
            return ""
        alone = self._paid_back(self.result.alone, Combination((compiled,)), Combination())
        for added in self.result.ladder:
            others = added.combination.without(compiled)
            if added.technique is compiled and others.techniques:
                on_top = self._paid_back(self.result.together, added.combination, others)
                if alone and on_top:
                    return f"alone {alone}, on top of {others.words} {on_top}"
        return alone

    def _paid_back(self, measured: Measured, compiled: Combination, before: Combination) -> str:
        """After how many calls, by what was timed of both; "" where one was not."""
        result = self.result.alone.results.get("compile")
        row, base = measured.row(compiled, BOTH), measured.row(before, BOTH)
        if not (result and result.compilation and row and row.timing and base and base.timing):
            return ""
        return replace(result.compilation, uncompiled=base.timing.samples).pays_after(row.timing)


def _verdicts(result: Optimized, as_it_is: Result) -> list[Record]:
    """A record of each opportunity's, with the case of the model as it is."""
    lines = []
    for one in result.opportunities:
        where = one.found.place.name if one.found.place else ""
        lines.append(record(as_it_is, VERDICT, "", [], result.mode, technique=one.technique, verdict=one.verdict,
                            where=where, count=one.count, why=one.why, reason=one.reason, times=one.speedup,
                            interval=one.interval))
    return lines


def _there(judgement: Judgement, words: str) -> list[Check]:
    """Its checks, which say on what they were."""
    return [replace(check, of=replace(check.of, words=f"{check.of.words} {words}")) for check in judgement]


def _phase_of(result: Result) -> str:
    """In which rounds it was measured."""
    return str(result.variant["measured"])


def _rungs(order: Sequence[Technique]) -> list[Combination]:
    """The model as it is, and one technique more in each."""
    return [Combination(tuple(order[:count])) for count in range(len(order) + 1)]


def _rewrites(technique: Technique, found: Mapping[str, Sequence[Found]]) -> bool:
    """Whether it changes the model or its graphs."""
    plan = plan_of((technique,), found=found)
    return bool(plan.passes or plan.changes)


def _plan_of_numerics(numerics: str | None) -> Plan:
    """What a model multiplies in that chooses that itself."""
    if numerics == "tf32":
        return Plan(matmul_precision="high", numerics=numerics)
    dtypes = {None: None, "int8": None, "float16": torch.float16, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}
    return Plan(autocast=dtypes[numerics], numerics=numerics)


def _multiplying_in(plan: Plan, dtype: torch.dtype) -> torch.dtype:
    """What a rung rounds to: a graph may take other algorithms than eager calls. TF32 has the mantissa of FP16."""
    if plan.autocast:
        return plan.autocast
    return torch.float16 if plan.numerics and dtype == torch.float32 else dtype
