"""What was recognised in a program, once, for all who ask: regions of its graphs, by type, and where the host waits."""
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.assistant.attention import Attention
from benchmarks.assistant.attention_finding import attentions_in
from benchmarks.assistant.graph import Captured, Refusal
from benchmarks.assistant.loops import Loop, loops_in
from benchmarks.assistant.multihead import UnreadWeights, weights_in
from benchmarks.assistant.norms import Norm, norms_in
from benchmarks.assistant.projections import ProjectionGroup, projections_in
from benchmarks.assistant.running_sums import RunningSum, running_sums_in
from benchmarks.assistant.source import Place
from benchmarks.assistant.trace import INDEX_BY_MASK, Trace

READS, IS_SIZED = "reads a value of the device", "has a size that the host must read first"
WAITING = {                                # operator that needs a value on the host, or a size that is in the data
    **dict.fromkeys(("aten._local_scalar_dense", "aten.equal", "aten.allclose"), READS),
    **dict.fromkeys((INDEX_BY_MASK, "aten.nonzero", "aten.masked_select", "aten._unique2", "aten.unique_consecutive",
                     "aten.unique_dim", "aten.bincount", "aten.repeat_interleave.Tensor"), IS_SIZED),
    "aten._linalg_check_errors": "reads whether it has failed",
}
TO_HOST = {"cpu", "numpy", "tolist"}       # calls that copy to the host; on a CPU nothing is copied


@dataclass
class Wait:
    """A line at which the host waits until the device has done all that it was given."""
    place: Place
    call: str                              # "item"
    why: str
    modules: list[str] = field(default_factory=list)       # a path for each time in one forward


@dataclass
class Analysis:
    """What a program is made of."""
    softmaxes: list[Attention | Refusal] = field(default_factory=list)
    weights: list[UnreadWeights | Refusal] = field(default_factory=list)
    norms: list[Norm | Refusal] = field(default_factory=list)
    projections: list[ProjectionGroup] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    running_sums: list[RunningSum] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    @property
    def attentions(self) -> list[Attention]:
        """Those by hand that could be rewritten."""
        return [each for each in self.softmaxes if isinstance(each, Attention)]


def analysed(graphs: Sequence[Captured], trace: Trace) -> Analysis:
    """Read all graphs, and the calls of a forward."""
    found = Analysis(waits=waits_in(trace))
    for graph in graphs:
        found.softmaxes += attentions_in(graph)
        found.weights += weights_in(graph)
        found.norms += norms_in(graph)
        found.projections += projections_in(graph)
        found.loops += loops_in(graph)
        found.running_sums += running_sums_in(graph)
    return found


def waits_in(trace: Trace) -> list[Wait]:
    """Each line once. What is on the host itself, as lengths are at times, it has at once."""
    found: dict[tuple, Wait] = {}
    for call in trace.calls:
        if call.device not in ("", trace.device) or call.is_told_its_size:
            continue
        why = next((words for name, words in WAITING.items() if any(o.startswith(name) for o in call.operators)), "")
        if call.name in TO_HOST:
            why = "copies to the host"
        if why and call.place:
            wait = found.setdefault((call.place, call.name, why), Wait(call.place, call.name, why))
            wait.modules.append(call.module)
    return list(found.values())
