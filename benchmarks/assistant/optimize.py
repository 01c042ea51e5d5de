"""The ladder on a person's own model: each technique found, applied, judged, timed and ranked.

    from benchmarks.assistant import optimize
    result = optimize(build)                     # or optimize(model, inputs)
    for o in result.opportunities: print(o.technique, o.file, o.line, o.speedup, o.verdict)
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.assistant.program import Program, read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Advice, Found, Technique
from benchmarks.assistant.techniques import EVERY
from benchmarks.measure.checks import Judgement
from benchmarks.measure.judge import Judge
from benchmarks.measure.keeping import kept
from benchmarks.measure.modules import record_checks, subject_of, work_in_words
from benchmarks.measure.truth import Truth
from benchmarks.records.read import Run, paired, runs
from common.block import oracle
from common.command_line import hush
from common.measure.cases import Case, Group, Setting
from common.measure.session import Session
from common.measure.subject import Subject
from common.outcome import Told
from common.phases import Phase
from common.report.record import Record
from common.report.record_file import RecordFile
from common.report.result import Result
from common.runtime.iteration import BOTH, FORWARD, MODES

AS_IT_IS = "as it is"
WORTH_IT = 1.02                        # of the speed-up, the lower end of its interval
VERDICTS = ("take", "different numerics", "by hand", "no gain", "unsafe", "not here")
QUICK_ROUNDS, ROUNDS = 6, {"cuda": 20, "cpu": 12}


@dataclass(frozen=True)
class Opportunity:
    """What one technique is worth at one place of a model."""
    technique: str
    found: Found
    verdict: str                                       # one of VERDICTS
    why: str = ""                                      # the verdict, where that needs a word
    speedup: float | None = None                       # of the pass that is asked for, alone on the model as it is
    interval: tuple[float, float] | None = None        # 95 %, of the ratio of paired samples
    error: float | None = None                         # the worst output's, against the truth
    advice: Advice | None = None                       # the code to write there

    @property
    def file(self) -> str | None:
        return self.found.place.file if self.found.place else None

    @property
    def line(self) -> int | None:
        return self.found.place.line if self.found.place else None

    @property
    def module(self) -> str:
        return self.found.module

    @property
    def count(self) -> int:
        return self.found.count

    @property
    def reason(self) -> str:
        return self.found.reason


@dataclass
class Optimized:
    """What `optimize` found."""
    name: str
    program: Program
    truth: str                                         # what the rungs were held against, in words
    mode: str                                          # the pass that counts
    opportunities: list[Opportunity]                   # the best first
    judgements: dict[str, Judgement]                   # by rung
    lines: list[Record]                                # everything that was measured
    times: str = ""                                    # where the wall time went

    def run(self, name: str) -> Run | None:
        """What was measured of a rung."""
        return next((run for run in runs(self.lines) if run.case["name"] == name), None)


def optimize(model: nn.Module | Callable[[], Any], inputs: Any = None, *, name: str = "", inference: bool = False,
             quick: bool = False, rounds: int | None = None, seed: int = 0, device: torch.device | str | None = None,
             file: RecordFile | None = None, techniques: Sequence[Technique] = EVERY, loss: Callable | None = None
             ) -> Optimized:
    """Read a model, try every technique on it, and rank what each buys.

    `model` is a module, which `inputs` go with (and `loss`, which maps its output to a scalar), or a function that
    returns both, or a Task. `inference` leaves the backward out. Without `device` the model stays where it is. The
    model is afterwards as it was. Raises Told where there is nothing that could be measured.
    """
    hush()
    task = Task.of(model() if not isinstance(model, nn.Module) else (model, inputs, loss))
    if device is not None:
        task = task.on(torch.device(device))
    where = next(iter(task.devices))
    count = rounds or (QUICK_ROUNDS if quick else ROUNDS[where.type])
    session = Session("assistant", where, count, seed, file=file)
    with kept(task.model):
        return _Assistant(task, session, techniques, (FORWARD,) if inference else MODES, name).run(seed)


class _Assistant:
    """One run on one model."""

    def __init__(self, task: Task, session: Session, techniques: Sequence[Technique], modes: Sequence[str], name: str):
        self.task, self.session, self.techniques, self.modes = task, session, techniques, modes
        self.name = name or type(task.model).__name__
        self.judgements: dict[str, Judgement] = {}

    def run(self, seed: int) -> Optimized:
        session, task = self.session, self.task
        session.say(Phase.CHECKING, "the model")
        self.work = task.work(cotangents=1, seed=seed)
        try:
            self.truth = Truth(task.model, self.work, session.say)
        except ValueError as error:
            raise Told(str(error)) from None
        session.say(Phase.READING)
        program = read(task.model, task.given)
        found = {technique: list(technique.find(program)) for technique in self.techniques}
        tried = [technique for technique in self.techniques if self._can_try(technique, found[technique])]
        cases = [self._case(AS_IT_IS, ())] + [self._case(technique.name, [technique]) for technique in tried]
        session.measure(Group(cases, modes=self.modes, calibrated=False, limited=False, watched=False))
        self.timed = {run.case["name"]: run for run in runs(session.lines)}
        opportunities = [self._judged(technique, each, program) for technique in self.techniques
                         for each in found[technique]]
        opportunities.sort(key=lambda one: (VERDICTS.index(one.verdict), -(one.speedup or 0.0)))
        return Optimized(self.name, program, self.truth.in_words, self._mode(), opportunities, self.judgements,
                         session.lines, session.finish(None))

    def _can_try(self, technique: Technique, found: Sequence[Found]) -> bool:
        possible = technique.apply is not None and not technique.missing(self.session.device)
        return possible and any(not each.why_not for each in found)

    def _case(self, name: str, techniques: Sequence[Technique]) -> Case:
        """A rung; without techniques the model as it is, which there is nothing to hold against."""
        def prepare(setting: Setting, result: Result) -> Subject:
            setting.say(Phase.BUILDING)
            rung = Rung(self.task.model, techniques, self.session.device) if techniques else self.task.model
            gate = 3 * oracle.MODULE_GATES[self.truth.dtype]
            if isinstance(rung, Rung):
                judge = Judge(rung, self.truth, rung.plan.numerics)
                self.judgements[name] = judge.judge()
                record_checks(self.judgements[name], result)
                gate = 3 * oracle.MODULE_GATES[judge.dtype]
            return subject_of(rung, self.work, (gate, gate))
        work = work_in_words(self.task.model, self.task.given)
        return Case(name, prepare, parameter_dtype=self.truth.dtype, work=work)

    def _mode(self) -> str:
        """The pass that counts: forward+backward, where there is one."""
        return BOTH if BOTH in self.modes and self.timed[AS_IT_IS].best(BOTH) else FORWARD

    def _judged(self, technique: Technique, found: Found, program: Program) -> Opportunity:
        """The verdict on one place."""
        advice = technique.advice(program, found)
        if reason := technique.missing(self.session.device) or found.why_not:
            return Opportunity(technique.name, found, "not here", reason)
        if technique.apply is None:
            return Opportunity(technique.name, found, "by hand", advice=advice)
        run, judgement = self.timed[technique.name], self.judgements.get(technique.name)
        if judgement and not judgement.passed:
            return Opportunity(technique.name, found, "unsafe", judgement.failure)
        if run.status != "ok":
            return Opportunity(technique.name, found, "not here", f"{run.status}: {run.info['reason']}")
        gain = paired(self.timed[AS_IT_IS], run, self._mode())
        assert gain is not None and judgement is not None
        speedup, *interval = gain
        verdict = "no gain"
        if interval[0] >= WORTH_IT:
            verdict = "different numerics" if judgement.numerics else "take"
        worst = judgement.worst
        return Opportunity(technique.name, found, verdict, "", speedup, (interval[0], interval[1]),
                           worst.error if worst else None, advice)
