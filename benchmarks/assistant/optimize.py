"""The ladder on a person's own model: each technique found, applied, judged, timed and ranked.

    from benchmarks.assistant import optimize
    result = optimize(build)                     # or optimize(model, inputs)
    for o in result.opportunities: print(o.technique, o.file, o.line, o.speedup, o.verdict)
"""
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.assistant.combination import Combination, Measured
from benchmarks.assistant.ladder import climb
from benchmarks.assistant.loading import Source
from benchmarks.assistant.look import Looked, look_at
from benchmarks.assistant.optimized import Optimized
from benchmarks.assistant.payback import pays_after
from benchmarks.assistant.proving import Prover
from benchmarks.assistant.rungs import ALONE, PIECES, WRITTEN, Rungs
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Found, Technique, plan_of
from benchmarks.assistant.techniques import EVERY
from benchmarks.assistant.trials import as_written
from benchmarks.assistant.verdicts import opportunities
from benchmarks.assistant.why import Why, explain
from benchmarks.assistant.written import WrittenOut, written_out
from benchmarks.measure.judge import DEPENDS_ON_STATE
from benchmarks.measure.keeping import kept, materialised, parameters_kept, torch_modes_kept
from benchmarks.measure.truth import Truth, free_memory, quick_collections
from common import signals
from common.command_line import hush
from common.measure.session import Session
from common.outcome import UserError, in_a_line, is_out_of_memory
from common.phases import Phase
from common.report.record import VERDICT, Record, record
from common.report.record_file import RecordFile
from common.report.result import Result

QUICK_ROUNDS, ROUNDS = 6, {"cuda": 20, "cpu": 12}
WARMS_AGAIN = 3                        # times; where a mixture of experts sends one token, its code is compiled for one
MOST_UNROLLED = 1500                   # operations of loops: of 1,900 Inductor compiled for minutes on one CPU core


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
    session = Session("assistant", where, count, seed, file=file, warms_again=WARMS_AGAIN)
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


class _Assistant:
    """One run on one model."""

    def __init__(self, task: Task, session: Session, techniques: Sequence[Technique], inference: bool,
                 quick: bool, source: Source | None):
        self.task, self.session, self.techniques, self.quick = task, session, techniques, quick
        self.inference = inference
        self.source = source                                   # what is to be written is tried there, if it is known
        self.prover = Prover(source, task, session.device, session.seed, inference) if source else None

    def run(self, name: str) -> Optimized:
        session, task = self.session, self.task
        session.say(Phase.CHECKING, "the model")
        work = task.work(cotangents=1, seed=session.seed, forward_only=self.inference)
        if not self.inference:
            task.refuse_shapes_by_values()
        with _callable():
            truth = Truth(task.model, work, session.say)
            others = {words: Truth(task.model, replace(work, inputs=inputs, loss=None), session.say)
                      for words, inputs in task.others.items()}
        looked = look_at(name, task, session, self.techniques, self.inference)
        in_words = truth.in_words
        if task.has_constant_inputs:
            in_words += "; without gradients of the inputs, which the model does not take"
        if truth.work.whole_state:
            in_words += f"; {DEPENDS_ON_STATE}"
        self.result = Optimized(looked, in_words, file_known=self.source is not None, others=task.others)
        interrupted: BaseException | None = None
        with contextlib.ExitStack() as values:
            self.rungs = Rungs(task, session, work, truth, others, self.result, self.quick, values)
            try:
                with torch_modes_kept():
                    for what, stage in (("the rungs", self._try_all), ("the code to write", self._prove),
                                        ("all of it, written", self._write_out)):
                        self._unless_it_breaks(what, stage)
            except (KeyboardInterrupt, signals.Terminated) as ended:
                interrupted = ended
        self._recorded()
        self.result.times = session.finish(None)
        if interrupted:
            raise Interrupted(self.result, interrupted)
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
        self.result.postponed = self._postponed(tried)
        tried = [technique for technique in tried if technique.name not in self.result.postponed]
        self.result.is_climbed = False
        alone = [Combination((each,)) for each in tried]
        bases = [self.result.base_of(each) for each in tried]
        wanted = list(dict.fromkeys([Combination(), *bases, *alone]))
        self.rungs.measure(wanted, ALONE, self.result.alone)
        for words in self.rungs.other_truths:
            self.result.on_others[words] = Measured()
            self.rungs.measure([each for each in wanted if self.result.alone.row(each, self.result.mode)], words,
                               self.result.on_others[words])
        climb(self.rungs, tried)
        self.result.is_climbed = True

    def _concluded(self) -> Optimized:
        """With the verdicts on what was measured so far."""
        result = self.result
        result.payback = pays_after(result)
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

    def _postponed(self, tried: Sequence[Technique]) -> dict[str, str]:
        """Those that somebody in a hurry would wait for: what compiles loops over many steps, and why in words."""
        unrolled = sum(len(loop.nodes) for loop in self.result.looked.program.analysis.loops)
        if not self.quick or unrolled <= MOST_UNROLLED:
            return {}
        why = f"its loops are {unrolled:,} operations for a compiler, and may take it minutes: --quick leaves it out"
        return {each.name: why for each in tried if plan_of((each,), found=self.result.found).compiles}

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
                        combination = Combination((each,))
                        wanted.append(self.rungs.written_case(written, combination, name, PIECES, is_proven))
                    except (UserError, OSError) as error:
                        self.result.proofs |= dict.fromkeys(advices, f"{name}: {str(error).splitlines()[0]}")
            self.rungs.measure([Combination()], PIECES, self.result.pieces, wanted)

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
            case = self.rungs.written_case(written, promised, WRITTEN, WRITTEN)
            self.rungs.measure([promised], WRITTEN, measured, [case])
        done = Combination(called=WRITTEN)
        gain, why_not = measured.gain(done, promised, mode), measured.why_not(done, mode)
        by_hand = [one.technique for one in result.opportunities if one.verdict == "by hand" and one.advice]
        result.written = WrittenOut(measured.ms(promised, mode), measured.ms(done, mode), gain, why_not,
                                    list(dict.fromkeys(by_hand)), left_out)


def _verdicts(result: Optimized, as_it_is: Result) -> list[Record]:
    """A record of each opportunity's, with the case of the model as it is."""
    lines = []
    for one in result.opportunities:
        where = one.found.place.name if one.found.place else ""
        lines.append(record(as_it_is, VERDICT, "", [], result.mode, technique=one.technique, verdict=one.verdict,
                            where=where, count=one.count, why=one.why, reason=one.reason, times=one.speedup,
                            interval=one.interval))
    return lines
