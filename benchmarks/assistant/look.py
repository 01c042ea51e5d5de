"""A look at a model before anything is changed: what it is, where its time goes, and what could be done where."""
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from benchmarks.assistant.program import Program, read
from benchmarks.assistant.spending import Spending, spending
from benchmarks.assistant.task import Task
from benchmarks.assistant.technique import Advice, Found, Technique
from benchmarks.measure.calls import named_parameters
from benchmarks.measure.modules import subject_of
from common.measure.session import Session
from common.phases import Phase
from common.runtime.iteration import BOTH, FORWARD


@dataclass
class Looked:
    """What was seen of a model."""
    name: str
    program: Program
    mode: str                                          # the pass that counts: forward+backward, where there is one
    spending: Spending
    found: dict[Technique, list[Found]] = field(default_factory=dict)

    def missing(self, technique: Technique) -> str:
        """Why that can't run here."""
        return technique.missing(self.program.inputs.device)

    def advice(self, technique: Technique, found: Found) -> Advice | None:
        """The code to write at that place."""
        return technique.advice(self.program, found)

    @property
    def parameters(self) -> int:
        """How many numbers it learns; a tied tensor counts once."""
        return sum({id(t): t.numel() for t in named_parameters(self.program.model).values()}.values())

    @property
    def repeated(self) -> str:
        """Its longest list of modules of one class: "12 x Block"."""
        lists = [list(module) for module in self.program.model.modules()
                 if isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(each) for each in module}) == 1]
        longest = max(lists, key=len, default=[])
        return f"{len(longest)} x {type(longest[0]).__name__}" if len(longest) > 1 else ""


def look_at(name: str, task: Task, session: Session, techniques: Sequence[Technique], inference: bool) -> Looked:
    """Read a model, profile one iteration of it, and let every technique look for where it applies."""
    session.say(Phase.READING)
    program = read(task.model, task.given)
    subject = subject_of(task.model, task.work(cotangents=1, seed=session.seed), (0.0, 0.0))
    mode = FORWARD if inference or not subject.has(BOTH) else BOTH
    session.say(Phase.PROFILING)
    spent = spending(task.model, program, subject.iteration(mode), session.device)
    found = {technique: list(technique.find(program)) for technique in techniques}
    return Looked(name, program, mode, spent, found)
