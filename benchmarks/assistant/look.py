"""A look at a model before anything is changed: what it is, where its time goes, and what could be done where."""
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.assistant import memory
from benchmarks.assistant.predicting import Basis, Freed, Prediction
from benchmarks.assistant.program import Program, graphs_of_the_loss, read
from benchmarks.assistant.repeating import graphs_named
from benchmarks.assistant.sections import Said, Section, Shown, Table
from benchmarks.assistant.spending import Spending, spending
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Found, Technique
from benchmarks.assistant.workload import workload
from benchmarks.measure.calls import Inputs, named_parameters
from benchmarks.measure.modules import subject_of
from common.block.config import dtype_name
from common.measure.session import Session
from common.outcome import in_a_line, is_out_of_memory
from common.phases import Phase
from common.runtime.compiler import holds_compiled
from common.runtime.iteration import BOTH, FORWARD
from common.text import figures

LINES, WORTH_A_LINE = 4, 1                     # of each kind of work at most so many, of so many percent


@dataclass
class Looked(Shown):
    """What was seen of a model."""
    name: str
    program: Program
    mode: str                                          # the pass that counts: forward+backward, where there is one
    spending: Spending
    found: dict[Technique, list[Found]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)    # techniques that could not look, and why
    predicted: dict[Technique, Prediction] = field(default_factory=dict)       # of all places where one applies

    def missing(self, technique: Technique) -> str:
        """Why that can't run here."""
        return technique.missing(self.program.inputs.device)

    @property
    def parameters(self) -> int:
        """How many numbers it learns; a tied tensor counts once."""
        return sum({id(t): t.numel() for t in named_parameters(self.program.model).values()}.values())

    @property
    def repeated(self) -> str:
        """Its longest list of modules of one class: "12 x Block"."""
        layers = self.program.layers
        return f"{len(layers)} x {type(layers[0]).__name__}" if layers else ""

    def sections(self) -> list[Section]:
        return [self.model(), self.where(), self._opportunities()]

    def model(self, measured: Sequence[tuple[str, str]] = ()) -> Said:
        """What the model is, and what was measured of it."""
        program, trace = self.program, self.program.trace
        given = shapes_in_words(program.inputs)
        parts = [self.name, type(program.model).__name__, f"{scaled(self.parameters)} parameters", self.repeated,
                 "compiled" if program.is_compiled else "compiled in part" if holds_compiled(program.model) else ""]
        work = f"{scaled(trace.flops)}FLOP and {scaled(trace.bytes)}B a forward, in {len(trace.calls):,} calls"
        said = [("model", ", ".join(filter(None, parts))), ("inputs", given), ("work", work)]
        return Said("", [*said, *measured])

    def where(self) -> Table:
        """Each kind of work, and the lines that take most of it."""
        spending, rows = self.spending, []
        for kind, ms in spending.by_kind().items():
            if spending.percent(ms) >= 0.5:
                rows.append([f"{spending.percent(ms):.0f} %", kind, "", "", ""])
            worth = [each for each in spending.spent
                     if each.kind == kind and spending.percent(each.ms) >= WORTH_A_LINE][:LINES]
            for each in worth:
                place = each.place.name if each.place else each.elsewhere
                module = each.module or (each.place.function if each.place else "")
                rows.append([f"{spending.percent(each.ms):.0f} %", "", place, times(each.count), module])
        title = f"where the {figures(spending.total_ms)} ms of {self.mode} go"
        return Table(title, ["", "kind of work", "of it at", "", "module"], rows, keys=5)

    def _opportunities(self) -> Said:
        """What could be done, and where."""
        lines = []
        for technique, places in self.found.items():
            for found in places:
                words = in_words(found, self.missing(technique))
                if technique in self.predicted and found is places[-1]:
                    words += f"; predicted: {self.predicted[technique]} times as fast"
                lines.append((technique.name, f"{placed(found)}: {words}" if found.place else words))
        return Said("what could be done", lines or [("nothing", "was found that could be done")])


def shapes_in_words(inputs: Inputs) -> str:
    """Each tensor of a call: "int64 [8, 1024]"."""
    return ", ".join(f"{dtype_name(t.dtype)} {list(t.shape)}" for t in inputs.named().values())


def times(count: int) -> str:
    """How often, where that is more than once."""
    return f"{count} x" if count > 1 else ""


def scaled(value: float) -> str:
    """Three figures and a prefix: 9.81 M."""
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= unit:
            return f"{figures(value / unit)} {prefix}"
    return f"{value:.0f} "


def placed(found: Found) -> str:
    """Where it was found, and how often a forward comes there."""
    return ", ".join(filter(None, [found.place.name if found.place else "the call", times(found.count)]))


def in_words(found: Found, missing: str = "") -> str:
    """What can be seen there, and why nothing can be done."""
    why_not = missing or found.why_not
    return f"{found.reason}{f'; not here: {why_not}' if why_not else ''}"


def look_at(name: str, task: Task, session: Session, techniques: Sequence[Technique], inference: bool) -> Looked:
    """Read a model, profile one iteration of it, and let every technique look for where it applies."""
    session.say(Phase.READING)
    program = read(task.model, task.given, inference)
    subject = subject_of(task.model, task.work(1, session.seed, forward_only=inference), (0.0, 0.0))
    mode = FORWARD if inference or not subject.has(BOTH) else BOTH
    program.is_inference = mode == FORWARD
    if task.loss is not None and mode == BOTH:
        program.loss = task.loss
        program.graphs_of_the_loss = graphs_of_the_loss(task.loss, program.model, task.given)
    session.say(Phase.PROFILING)
    with graphs_named(task.model):
        spent = spending(task.model, program, subject.iteration(mode), session.device)
    program.others = list(task.others.values())
    program.iteration_ms, program.optimizer = spent.total_ms, None if inference else task.optimizer
    looked = Looked(name, program, mode, spent)
    basis = _basis(program, spent, session)
    for technique in techniques:
        try:
            looked.found[technique] = list(technique.find(program))
            if prediction := _predicted(technique, looked, basis):
                looked.predicted[technique] = prediction
        except Exception as error:                     # the others find what they find
            fault = f"a fault of this suite: {in_a_line(error)}"
            looked.found[technique] = [Found(None, "", 1, technique.what, why_not=fault)]
            looked.faults.append(f"{technique.name}: {fault}")
    return looked


def _predicted(technique: Technique, looked: Looked, basis: Basis) -> Prediction | None:
    """What it should buy where it applies; None where it can't, or where nothing is predicted."""
    places = [each for each in looked.found[technique] if each.can_be_tried]
    if not places or looked.missing(technique):
        return None
    prediction = technique.predict(basis, places)
    return replace(prediction, freed=_freed(technique, looked, places)) if prediction else None


def _freed(technique: Technique, looked: Looked, places: Sequence[Found]) -> Freed | None:
    """What it should free of the memory; None where that is not known, or does not fit."""
    try:
        return (technique.frees or memory.in_regions)(looked.program, places)
    except Exception as error:                         # its time is predicted all the same
        if not is_out_of_memory(error):
            looked.faults.append(f"{technique.name}: a fault of this suite: {in_a_line(error)}")
        return None


def _basis(program: Program, spent: Spending, session: Session) -> Basis:
    """Rates are measured when they are first asked for."""
    def rate(arithmetic: str) -> float:
        return session.peaks.of(workload(program, lambda call: arithmetic)).flops[arithmetic]

    def bandwidth() -> float:
        known = session.peaks.known.bandwidth
        return known or session.peaks.of(workload(program, lambda call: dtype_name(call.dtype))).bandwidth
    return Basis(program, spent, rate, bandwidth)
