"""Is it the same function, and which is faster? Any modules against a reference: checked, then timed in shared rounds.

    from benchmarks.study import compare, validate
    print(compare({"eager": norm, "compiled": torch.compile(norm)}, (x,), reference=norm))
    print(validate(candidate, reference, (x,)))                    # the check alone, tensor by tensor
"""
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.bounds import BOUNDS
from benchmarks.measure.calls import Inputs, named_parameters
from benchmarks.measure.checks import MEANING, PRECISION, Judgement
from benchmarks.measure.flat import flat_of
from benchmarks.measure.judge import Judge, check_numerics, validate
from benchmarks.measure.keeping import kept, materialised, parameters_kept
from benchmarks.measure.observing import Loss, Work, cotangent
from benchmarks.measure.referee import Referee
from benchmarks.measure.refreshing import Refresher, refreshed
from benchmarks.measure.truth import Truth
from benchmarks.records.read import Run, paired, runs, verdict
from common.block import oracle
from common.block.config import dtype_name
from common.command_line import hush
from common.measure.cases import Case, Group, Setting
from common.measure.session import Session
from common.measure.subject import Subject
from common.outcome import Failed
from common.phases import Phase
from common.report.result import Result
from common.runtime import replay
from common.runtime.iteration import FORWARD, MODES, Iteration
from common.text import figures, html, number, ratio, table

__all__ = ["Comparison", "compare", "validate"]


@dataclass
class Checked(Subject):
    """What passed, as it is timed. Without a gradient it has a forward alone. A referee looks at its timed calls.

    Without one each timed call may still get inputs of its own: what is timed beside it has them.
    """
    takes_gradient: bool = field(default=True, kw_only=True)
    referee: Referee | None = field(default=None, kw_only=True)
    is_refreshed: bool = field(default=False, kw_only=True)
    passes: Sequence[str] = field(default=MODES, kw_only=True)

    def has(self, mode: str) -> bool:
        return mode in self.passes and (self.takes_gradient or mode == FORWARD)

    def refused(self) -> str:
        if self.referee is None:
            return ""
        self.referee.look_at_last()
        return self.referee.found

    def iteration(self, mode: str) -> Iteration:
        own = super().iteration(mode)
        if self.referee:
            return self.referee.watched(own, self.inputs, self.cotangents, mode)
        return refreshed(own, self.inputs) if self.is_refreshed else own

    def replay(self, mode: str, captured: Callable[[], None] = lambda: None) -> tuple[Callable | None, str]:
        return replay.verified(super().iteration(mode), self.proof(), captured=captured)

    def between_replays(self, mode: str, replayed: Callable) -> Callable[[], None]:
        if not isinstance(replayed, replay.Replay):
            return super().between_replays(mode, replayed)
        if self.referee is None:
            return Refresher(self.inputs).refresh if self.is_refreshed else super().between_replays(mode, replayed)
        return self.referee.between_replays(replayed, replayed.writes, self.inputs, mode)

    def forget_replay(self, mode: str) -> None:
        if self.referee:
            self.referee.forget_replay(mode)


def work_in_words(module: Callable, inputs: Inputs) -> dict[str, str]:
    """Input -> dtype and shape, and how many parameters there are: what tells one work from another in a record."""
    words = {}
    for name, t in inputs.named().items():
        words[name] = f"{dtype_name(t.dtype)} {list(t.shape)}"
    unique = {id(t): t.numel() for t in named_parameters(module).values()}
    if unique:
        words["parameters"] = f"{sum(unique.values()):,}"
    return words


def record_checks(judgement: Judgement, result: Result, gradients: int | None = None) -> None:
    """Put errors and bounds into a result, by tensor; raise Failed where a check failed.

    `gradients`: of a model that has hundreds only so many, those nearest to their bounds.
    """
    compared = {check.of: (check.error, check.bound) for check in judgement
                if check.error == check.error and check.question in (MEANING, PRECISION)}      # no NaN
    of_gradients = sorted((of for of in compared if of.kind.is_gradient),
                          key=lambda of: compared[of][0] / max(compared[of][1], 1e-300), reverse=True)
    left_out = set() if gradients is None else set(of_gradients[gradients:])
    result.errors |= {str(of): errors for of, errors in compared.items() if of not in left_out}
    if not judgement.passed:
        raise Failed(judgement.failure)


def subject_of(module: Callable, work: Work, gates: tuple[float, float], referee: Referee | None = None,
               is_refreshed: bool = False) -> Checked:
    """A module that was checked, on copies of the inputs. `gates` are those of a replay."""
    inputs = work.inputs.as_trained()
    flat, outputs = flat_of(module, work)
    taking = [name for name, output in outputs.items() if output.requires_grad]
    plain = list(outputs) == ["output"] and not work.loss and not inputs.kwargs
    direct = plain and not inputs.need_gradients and all(isinstance(value, Tensor) for value in inputs.args)
    call = module if direct else flat
    given = [cotangent(outputs[name], place, 0, work.seed) for place, name in enumerate(taking)]
    if work.loss:
        given = [torch.ones_like(outputs[name]) for name in taking]
    tensors = inputs.named().values()
    constants = [place for place, t in enumerate(tensors) if not t.requires_grad]
    parameters = {name: t for name, t in named_parameters(module).items() if t.requires_grad}
    return Checked(call, [t.detach() for t in tensors], given, parameters, gates, constants=constants,
                   takes_gradient=bool(taking), referee=referee, is_refreshed=is_refreshed)


# ------------------------------------------------------------------------------------------------------------ comparing


@dataclass
class Comparison:
    """What `compare` found: a run of records and a judgement for each module; printed, a table."""
    results: dict[str, Run]
    judgements: dict[str, Judgement]

    def rows(self) -> tuple[list[list[str]], list[str]]:
        """(the rows, their headers): how each was judged, its time, and the first one's time over it."""
        headers = ["module", "status", "worst error", "of", "held against", "compared"]
        for mode in ("forward", "f+b"):
            headers += [f"{mode} ms", "x first [95 %]", "launches"]
        timed = [run for run in self.results.values() if run.best(FORWARD)]
        rows = []
        for name, run in self.results.items():
            row = [name, self._status(name), *self._judged(name)]
            for mode in MODES:
                times = paired(timed[0], run, mode) if timed and run is not timed[0] else None
                row += [figures(run.best_ms(mode) or 0.0) if run.best(mode) else "n/a",
                        ratio(times) + verdict(*times[1:]) if times else "",
                        number(run.value(mode, "launches"), ".0f")]
            rows.append(row)
        return rows, headers

    def _status(self, name: str) -> str:
        run, judgement = self.results[name], self.judgements.get(name)
        if run.status != "ok" or judgement is None:
            return run.status
        if not judgement.outputs_proven:
            return "unproven"
        if judgement.numerics:
            return "ok, different numerics"
        return "ok, less accurate" if judgement.less_accurate else "ok"

    def _judged(self, name: str) -> list[str]:
        judgement = self.judgements.get(name)
        if judgement is None:
            return ["", "", "", ""]
        worst = judgement.worst
        error = f"{worst.error:.1e}" if worst and worst.error == worst.error else ""
        return [error, worst.name if worst else "", judgement.truth_in_short, judgement.counted()]

    def lines(self) -> list[str]:
        """What is to be said below the table."""
        sentences = []
        for name, run in self.results.items():
            if run.status != "ok":
                sentences.append(f"{name}: {run.status}: {run.info['reason']}")
            judgement = self.judgements.get(name)
            if judgement is None:
                continue
            sentences += [f"{name}: {note}" for note in judgement.notes]
            sentences += [f"{name}: {check}" for check in judgement.less_accurate]
            if not judgement.has_oracle:
                sentences.append(f"{name}: held against {judgement.truth}")
        return sentences

    def table(self, width: int | None = None) -> str:
        """A row a module, and a line for everything that has to be said of one."""
        return "\n".join([table(*self.rows(), width), *self.lines()])

    __str__ = table

    def _repr_html_(self) -> str:
        return html(*self.rows(), self.lines())


def compare(modules: Mapping[str, Callable], inputs: Any, reference: Callable, rounds: int = 20,
            gates: Mapping[str, float] | None = None, seed: int = 0, *, loss: Loss | None = None,
            numerics: str | Mapping[str, str] | None = None, parameters: Mapping[str, str] | None = None,
            overwrites_output: Collection[str] = (), cotangents: int = 3, defended: bool = True) -> Comparison:
    """Hold every module against `reference` by `validate`, then time those that passed, forward and forward+backward.

    `modules` go from a name to a module or function. `inputs` is a tensor, a tuple of positional values or a dict of
    values by keyword, on one device. `numerics` declares what modules multiply in, all or by name; `parameters` pairs
    theirs with the reference's where names do not; `overwrites_output` names the modules whose output lives until the
    next call. `gates` (name -> relative L2 error) replaces the judge's bounds; a gradient may have three times as much.
    With `loss` that is what is timed, too. On a GPU each is timed eager and as a captured graph. Each timed call gets
    inputs of its own, and some of its results are held against the reference; `defended=False` leaves that out, to
    measure what it costs. Where a module fails or does not fit, that is its status. All modules are restored
    afterwards. Raises ValueError where modules or inputs can't be compared.
    """
    hush()
    given = Inputs.of(inputs)
    materialised(given, reference, *modules.values())
    declared = numerics if isinstance(numerics, Mapping) else dict.fromkeys(modules, numerics)
    for name in (*(gates or {}), *overwrites_output, *declared):
        if name not in modules:
            raise ValueError(f"{name}: there is no such module; there are {', '.join(modules) or 'none'}")
    for kind in declared.values():
        check_numerics(kind)
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: give 1 or more")
    device = _device(modules, reference, given)
    _check_pairs(parameters or {}, modules, reference)
    work = Work(given, loss, cotangents, seed)
    judgements: dict[str, Judgement] = {}
    with kept(reference, *modules.values()), parameters_kept(reference, given), contextlib.ExitStack() as values:
        session = Session("compare", device, rounds, seed)
        session.say(Phase.CHECKING, "the reference")
        truth = Truth(reference, work, session.say)

        def prepare(setting: Setting, result: Result) -> Subject:
            module, name = modules[result.name], result.name
            names = named_parameters(module)
            pairs = {their: our for their, our in (parameters or {}).items() if their in names}
            judge = Judge(module, truth, declared.get(name), pairs, name in overwrites_output, (gates or {}).get(name),
                          fresh=defended)
            judgements[name] = judge.judge()
            record_checks(judgements[name], result)
            _, gate = oracle.MODULE_GATES[judge.dtype]
            referee = judge.referee() if defended else None            # it sees what its next calls change
            values.enter_context(judge.with_the_references_values())
            return subject_of(module, work, (gate, gate), referee)

        cases = []
        for name, module in modules.items():
            cases.append(Case(name, prepare, parameter_dtype=truth.dtype, work=work_in_words(module, given)))
        session.measure(Group(cases, calibrated=False, watched=False))
        session.progress.finish()
    return Comparison({run.case["name"]: run for run in runs(session.lines)}, judgements)


def _check_pairs(pairs: Mapping[str, str], modules: Mapping[str, Callable], reference: Callable) -> None:
    """Raise ValueError for a pair of parameters whose names no module and the reference have."""
    theirs = {name for module in modules.values() for name in named_parameters(module)}
    for their, our in pairs.items():
        if their not in theirs:
            raise ValueError(f"parameters: no module has a {their}")
        if our not in named_parameters(reference):
            raise ValueError(f"parameters: the reference has no {our}")


def _device(modules: Mapping[str, Callable], reference: Callable, inputs: Inputs) -> torch.device:
    """The one device of all. Raises ValueError."""
    if not modules:
        raise ValueError("no modules: give at least one, name -> module")
    dtype = inputs.dtype
    if dtype not in (*BOUNDS, None):
        raise ValueError(f"inputs in {dtype_name(dtype)}: give float64, float32, float16 or bfloat16")
    devices = {t.device for t in inputs.named().values()}
    for module in (reference, *modules.values()):
        devices |= {parameter.device for parameter in named_parameters(module).values()}
    if len(devices) > 1:
        raise ValueError(f"modules and inputs are on {', '.join(sorted(map(str, devices)))}: move them to one device")
    return devices.pop()
