"""Rungs: techniques applied to the model, each held against the truth and then timed in rounds with others."""
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from benchmarks.assistant.combination import Combination, Measured, cases
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Found, Plan, Technique, plan_of
from benchmarks.assistant.trials import Trials
from benchmarks.assistant.workload import arithmetic_of, workload
from benchmarks.assistant.written import AsWritten
from benchmarks.measure.checks import Check, Judgement
from benchmarks.measure.judge import Judge
from benchmarks.measure.keeping import kept
from benchmarks.measure.modules import record_checks, subject_of, work_in_words
from benchmarks.measure.observing import Work
from benchmarks.measure.truth import Truth, working_dtype
from benchmarks.records import BY_HAND
from common.block import oracle
from common.block.config import dtype_name
from common.measure.cases import Case, Group, Setting
from common.measure.session import Session
from common.measure.subject import Subject, on_a_copy
from common.phases import Phase
from common.report.record import PREDICTED, PREDICTED_MEMORY, record
from common.report.result import Compilation, Result
from common.runtime.iteration import FORWARD, MODES

# The groups of rungs that share their rounds.
ALONE, TOGETHER, PIECES, WRITTEN = "alone", "together", "each as written", "written out"
ITERATIONS = 30                        # a guess: compiling, judging and warming up a rung takes as long as so many
GRADIENTS = 3                          # recorded of each rung, those nearest to their bounds
LONG_MS = 20.0                         # an iteration of a large model: each pass of a rung is compiled and judged anew
MANY_CALLS = 100                       # of torch functions in a forward: compiling as many takes long, however small


@dataclass(frozen=True)
class Meaning:
    """What decides what a rung means in FP64: neither a compiler nor TF32 does."""
    rewriting: tuple[str, ...]             # the techniques that change the model or its graphs, in their order
    autocast: torch.dtype | None           # which a model may ask for
    inputs: str                            # on which of them


@dataclass
class Rungs:
    """Builds, judges and times the rungs of one model; `result` gets the judgements.

    The truths are those of the inputs that are given first, of which `work` is, and of all others. `values` keeps the
    reference's in each rung until it is closed.
    """
    task: Task
    session: Session
    work: Work
    truth: Truth
    other_truths: Mapping[str, Truth]
    result: Trials
    quick: bool
    values: contextlib.ExitStack
    meanings: dict[Meaning, list[Check]] = field(default_factory=dict)     # judged before, and by which checks
    ladders: int = 1                                                       # that were begun
    seconds_a_rung: float | None = None                                    # in the rounds before

    def measure(self, combinations: Sequence[Combination], phase: str, measured: Measured,
                others: Sequence[Case] = ()) -> None:
        """All of them in the same rounds. `measured` gets what there is when it ends, in whatever way."""
        ways: dict[str, set[str]] = {}                         # of launching, by name: each is shown with its joules
        for each in combinations:
            ways.setdefault(each.name, set()).add(each.launch)
        own = [replace(self._case(each, phase), metered=ways[each.name]) for each in cases(combinations)]
        wanted = [*own, *others]
        self.session.note(f"{len(wanted)} rungs {phase}, {self.session.rounds} rounds: {self._estimate(len(wanted))}")
        began, before = time.perf_counter(), len(self.session.entries)
        on_gpu = self.session.device.type == "cuda"
        try:
            self.session.measure(Group(wanted, modes=self._modes_of(phase), calibrated=False,
                                       limited=phase not in self.other_truths,
                                       metered=on_gpu and phase == TOGETHER, may_not_fit=True))
        finally:
            measured.results.update({entry.result.name: entry.result for entry in self.session.entries[before:]})
        self.seconds_a_rung = (time.perf_counter() - began) / len(wanted)

    def _modes_of(self, phase: str) -> tuple[str, ...]:
        """The passes of the model as it is that are timed in it."""
        every = (FORWARD,) if self.work.forward_only else MODES
        return every if phase == ALONE else (self.result.mode,)

    def _modes_of_rungs(self, phase: str) -> tuple[str, ...]:
        """Those of a rung: of a large model that must be quick, the one that verdicts go by."""
        looked = self.result.looked
        is_large = looked.spending.total_ms > LONG_MS or len(looked.program.trace.calls) > MANY_CALLS
        return (self.result.mode,) if self.quick and is_large else self._modes_of(phase)

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
                subject = subject_of(self.task.model, self._work_in(phase), self._gates(Plan()), is_refreshed=True)
                own = workload(self.result.looked.program, arithmetic_of(Plan(), setting.device))
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
        variant: dict[str, Any] = {"measured": phase}
        if phase == TOGETHER and self.ladders > 1:             # in other rounds than the one before
            variant["ladder"] = self.ladders
        return Case(name, prepare, parameter_dtype=self.truth.dtype, work=work, variant=variant)

    def _work_in(self, phase: str) -> Work:
        """On the inputs that are given first, or on those that a phase is about."""
        return self.other_truths[phase].work if phase in self.other_truths else self.work

    def _rung(self, combination: Combination, setting: Setting, result: Result) -> Subject:
        phase, found = _phase_of(result), self.result.found
        rung = Rung(self.task.model, combination.changing, setting.device, found, self.result.looked.program.dynamic)
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
        own = workload(self.result.looked.program, arithmetic_of(plan, setting.device), plan.in_int8)
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
        before = self._passed_before(result.name) if phase == TOGETHER else None
        judgement = self._judged(judge, meaning) if before is None else judge.again(before)
        if on_others:
            judgement.checks[:] = _there(judgement, phase)     # in place: timed calls add theirs
            self.result.judgements_on_others[result.name, phase] = judgement
        else:
            self.result.judgements[result.name] = judgement
            if phase != ALONE and before is None:              # each of them has its own rounds
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

    def _passed_before(self, name: str) -> Judgement | None:
        """The judgement of the same rung in other rounds, where it passed on all inputs."""
        judged = self.result.judgements.get(name)
        elsewhere = [self.result.judgements_on_others.get((name, words)) for words in self.other_truths]
        return judged if all(each is not None and each.passed for each in [judged, *elsewhere]) else None

    def _judged(self, judge: Judge, meaning: Meaning | None) -> Judgement:
        """What a judge says; what it found of the meaning is kept for other rungs."""
        judgement = judge.judge()
        if meaning and judge.meaning:
            self.meanings[meaning] = judge.meaning
        return judgement

    def _gates(self, plan: Plan) -> tuple[float, float]:
        """Of a replay."""
        dtype = working_dtype(self.task.model, self.work.inputs)
        arithmetic = arithmetic_of(plan, self.session.device)
        in_tf32 = any(arithmetic(call) == "tf32" for call in self.result.looked.program.trace.calls if call.dtype)
        _, gate = oracle.MODULE_GATES[_multiplying_in(plan, dtype, in_tf32)]
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

    def by_hand(self) -> list[Case]:
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

    def written_case(self, written: AsWritten, promised: Combination, name: str, phase: str, is_proven: bool = False
                      ) -> Case:
        """It may round as the techniques that it spells out do."""
        def prepare(setting: Setting, result: Result) -> Subject:
            return self._judged_subject(written, plan_of(promised.changing, found=self.result.found), result, setting,
                                        overwrites_output=promised.launch == "graph", is_proven=is_proven)
        return self._case_of(name, prepare, phase)


def _there(judgement: Judgement, words: str) -> list[Check]:
    """Its checks, which say on what they were."""
    return [replace(check, of=replace(check.of, words=f"{check.of.words} {words}")) for check in judgement]


def _phase_of(result: Result) -> str:
    """In which rounds it was measured."""
    return str(result.variant["measured"])


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


def _multiplying_in(plan: Plan, dtype: torch.dtype, in_tf32: bool) -> torch.dtype:
    """What a rung rounds to: a graph may take other algorithms than eager calls. TF32, which convolutions in FP32 round
    to by default, has the mantissa of FP16."""
    if plan.autocast:
        return plan.autocast
    return torch.float16 if (plan.numerics or in_tf32) and dtype == torch.float32 else dtype
