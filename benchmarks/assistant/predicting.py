"""What a technique should buy, before it runs: from where the time goes, what a graph says, and this machine's rates.

A prediction is a range. One end is what the technique can buy at most: what it takes away costs nothing any more, and
what it puts there runs at the machine's best rate. The other end is cautious: each technique says how, and most take
half of the saving. Nothing is fitted to what was measured.
"""
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from benchmarks.assistant.graph import Captured, Region
from benchmarks.assistant.normal import VIEWS, name_of
from benchmarks.assistant.program import Program
from benchmarks.assistant.source import Place
from benchmarks.assistant.spending import ATTENTION, CONVOLUTION, MATMUL, PASSES, Spending
from benchmarks.assistant.trace import Call
from benchmarks.records.read import lies_within
from common.text import number

# What a compiler can't fuse into its neighbours: it multiplies, or moves no number.
PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d",
                      "conv_transpose2d", "scaled_dot_product_attention", "embedding"})


Arithmetic = Callable[[Call], str]                     # what a call's operands are multiplied in


@dataclass(frozen=True)
class Freed:
    """Bytes less at the peak of an iteration, between two ends; below zero it needs more."""
    least: float
    most: float

    def __str__(self) -> str:
        least, most = (number(size / 2**30, ".2f") for size in (self.least, self.most))
        return least if least == most else f"{least} to {most}"


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of an iteration with one technique alone, between two ends; what it took as it was."""
    least_ms: float
    most_ms: float
    before_ms: float
    freed: Freed | None = None                 # None: nothing is known of its memory

    @property
    def gain(self) -> tuple[float, float]:
        """How many times as fast, between two ends."""
        return self.before_ms / self.most_ms, self.before_ms / self.least_ms

    def holds(self, gain: float) -> bool:
        """Whether a measured gain lies within."""
        return lies_within(gain, self.gain)

    def __str__(self) -> str:
        least, most = (number(gain, ".2f") for gain in self.gain)
        return least if least == most else f"{least} to {most}"


@dataclass(frozen=True)
class Basis:
    """What predictions go by."""
    program: Program
    spending: Spending
    rate: Callable[[str], float]               # FLOP/s of matmuls in that arithmetic, on this machine
    bandwidth: Callable[[], float]             # bytes/s that are read and written

    def saves(self, ms: float, at_least: float | None = None) -> Prediction:
        """Where `ms` milliseconds are saved at most, and `at_least` at the least: by default half of that. Where either
        is negative the technique costs time.
        """
        total = self.spending.total_ms
        other = ms / 2 if at_least is None else at_least
        least, most = sorted(max(total - saved, 0.01 * total) for saved in (ms, other))
        return Prediction(least, most, total)

    def with_arithmetic(self, before: Arithmetic, after: Arithmetic, bytes_cast: float = 0.0) -> Prediction:
        """Where matmuls are in another arithmetic, and casts move `bytes_cast` in an iteration. Where there are casts,
        passes over memory may move half of their bytes, too: that counts into the most that is saved.
        """
        calls = [call for call in self.program.trace.calls if call.is_matmul and call.dtype is not None]
        seconds = [sum(call.flops / self.rate(arithmetic(call)) for call in calls) for arithmetic in (before, after)]
        saved = self.ms_of({MATMUL, CONVOLUTION, ATTENTION}) * (1 - seconds[1] / seconds[0])
        casts = 1e3 * bytes_cast / self.bandwidth()
        return self.saves(saved + (self.ms_of({PASSES}) / 2 if bytes_cast else 0.0), saved / 2 - casts)

    def matmuls_ms(self, lines: Collection[Place | None], arithmetic: Arithmetic) -> float:
        """Of the matmuls at these lines, in a forward and by the rate of a large one."""
        calls = [call for call in self.program.trace.calls if call.place in lines and call.is_matmul]
        return 1e3 * sum(call.flops / self.rate(arithmetic(call)) for call in calls)

    def ms_of(self, kinds: Collection[str], places: Iterable[Place] | None = None) -> float:
        """Of these kinds of work; at these lines alone, where some are given."""
        within = None if places is None else list(places)
        profiled = sum(each.ms for each in self.spending.spent if each.kind in kinds
                       and (within is None or (each.place and any(place.holds(each.place) for place in within))))
        return self.spending.by_the_clock(profiled)


def in_one_pass(basis: Basis, regions: Sequence[Region]) -> Prediction | None:
    """Where each of these becomes one kernel that reads what they are given, and writes their result."""
    places = [region.place for region in regions if region.place]
    if not places:
        return None
    ratios = [_share_of_one_pass(region) for region in regions]
    share = sum(ratios) / len(ratios)
    return basis.saves((1 - share) * basis.ms_of({PASSES}, places))


def _share_of_one_pass(region: Region) -> float:
    """Bytes that one kernel moves, of those that its operations move one by one."""
    inside = set(region.nodes)
    one_by_one = sum(bytes_moved(node) for node in region.nodes)
    given = {each for node in region.nodes for each in node.all_input_nodes if each not in inside}
    return min(1.0, (sum(map(bytes_of, given)) + bytes_of(region.nodes[-1])) / max(one_by_one, 1))


def share_of_fused(graphs: Sequence[Captured]) -> float:
    """Bytes that are still moved where each chain of passes over memory is fused, of those moved one by one.

    A tensor that only passes read is not written; one that a product reads is.
    """
    one_by_one = fused = 0.0
    for graph in graphs:
        passes = {node for node in graph.nodes if is_pass(node)}
        for node in passes:
            one_by_one += len(graph.calls) * bytes_moved(node)
            if any(user not in passes for user in _readers(node)):
                fused += len(graph.calls) * bytes_of(node)
        given = {each for node in passes for each in map(source_of, node.all_input_nodes) if each not in passes}
        fused += len(graph.calls) * sum(map(bytes_of, given))
    return min(1.0, fused / one_by_one) if one_by_one else 1.0


def is_pass(node: fx.Node) -> bool:
    """Whether an operation is no product and no view: a compiler may fuse it, or compute it again."""
    return node.op.startswith("call_") and name_of(node) not in PRODUCTS | VIEWS and bytes_of(node) > 0


def source_of(node: fx.Node) -> fx.Node:
    """What a view is a view of."""
    while node.op.startswith("call_") and name_of(node) in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads it, through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if user.op.startswith("call_") and name_of(user) in VIEWS else [user]
    return found


def bytes_moved(node: fx.Node) -> int:
    """That an operation reads and writes by itself; a view moves none."""
    if name_of(node) in VIEWS:
        return 0
    return bytes_of(node) + sum(map(bytes_of, node.all_input_nodes))


def bytes_of(node: fx.Node) -> int:
    """Of the tensor that a node gives."""
    value = node.meta.get("example_value")
    return value.nbytes if isinstance(value, Tensor) else 0
