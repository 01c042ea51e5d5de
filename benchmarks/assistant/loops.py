"""Python loops over steps in a graph: lines that ran many times in one call of a module, and what a step needs."""
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from benchmarks.assistant.graph import Captured, Region, place_of, shape_of
from benchmarks.assistant.normal import is_in_place, name_of
from benchmarks.assistant.projections import path_of
from benchmarks.assistant.source import Place, frames_of, loop_around

LEAST = 8                                  # steps of a loop that is worth a word
SELDOM = 0.05                              # share of its operations that not all steps have, at most
_NUMBER = re.compile(r"\b\d+\b|(?<=_)\d+(?=_|\b)")      # of a layer, in a path as Dynamo has it
# What only moves numbers, and what adds them.
MOVING = frozenset({
    "getitem", "setitem", "cat", "stack", "clone", "contiguous", "to", "float", "type_as", "unsqueeze", "squeeze",
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "expand", "repeat", "select", "narrow", "chunk",
    "split", "unbind", "detach", "copy", "index_copy", "size", "new_zeros", "zeros_like"})
ADDING = frozenset({"add", "sub", "neg", "sum", "rsub"})
MULTIPLYING = frozenset({"mul", "div", "addcmul", "lerp"})
PARTS = frozenset({"getitem", "select", "narrow", "view", "unsqueeze", "squeeze"})     # of a tensor
OF_MATRICES = frozenset({"matmul", "mm", "bmm", "einsum", "baddbmm", "addmm", "linear", "outer", "mv", "tensordot"})


Kind = tuple[str, Place | None, str]       # of operations: module, line and name


@dataclass(eq=False)
class Loop(Region):
    """Operations of all steps, in their order."""
    lines: Place                           # of the loop, as it is written
    steps: int
    carried: tuple[fx.Node, ...]           # of one step: those on the way from a step's result to the next one's
    in_memory: bool                        # what a step hands on is written into a tensor

    @property
    def place(self) -> Place | None:                                   # type: ignore[override]
        """All of its lines."""
        return self.lines

    @property
    def is_independent(self) -> bool:
        """Whether no step needs another: at most their results are added up, and only the last sum is read."""
        adds = all(name_of(node) in MOVING | {"add"} for node in self.carried)
        return adds and all(kind_of(user) in self._kinds for node in self.carried for user in node.users)

    @property
    def is_linear(self) -> bool:
        """Whether a step hands on a linear function of what it was handed."""
        products = [node for node in self.carried if name_of(node) in MULTIPLYING | OF_MATRICES]
        by_itself = any(len(self._handed_to(node)) > 1 for node in products)
        divisors = [node.args[1] for node in products if name_of(node) == "div"]
        divides = any(isinstance(each, fx.Node) and kind_of(each) in self._kinds for each in divisors)
        return self._names <= ADDING | MULTIPLYING | OF_MATRICES and not by_itself and not divides

    @property
    def of_matrices(self) -> bool:
        """Whether it is linear by matmuls, or a matmul reads a state that is multiplied by less than one number each.
        """
        if self._names & OF_MATRICES:
            return True
        is_read = any(name_of(node) in OF_MATRICES and self._handed_to(node) for node in self.nodes)
        factors = [(each, node) for node in self.carried if name_of(node) in MULTIPLYING
                   for each in node.all_input_nodes if kind_of(each) not in self._kinds]
        return is_read and all(math.prod(shape_of(each)) < math.prod(shape_of(node)) for each, node in factors)

    @cached_property
    def _kinds(self) -> set[Kind]:
        return {kind_of(node) for node in self.carried}

    @property
    def _names(self) -> set[str]:
        """What is done to what a step hands on."""
        return {name_of(node) for node in self.carried} - MOVING

    def _handed_to(self, node: fx.Node) -> list[fx.Node]:
        """The operands that were handed on, each as often as it is given: h * h has two."""
        operands: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), operands.append)
        return [each for each in operands if kind_of(each) in self._kinds]


def kind_of(node: fx.Node) -> Kind:
    """Alike in every step."""
    return path_of(node), place_of(node), name_of(node)


def loops_in(graph: Captured) -> list[Loop]:
    """Those of at least LEAST steps that compute something, and not by layers of their own."""
    found = []
    for place, nodes in _runs(graph):
        steps = _steps(place, nodes)
        carried = _carried(nodes, steps, graph) if steps >= LEAST else None
        if carried is not None:
            found.append(Loop(graph, nodes, place, steps, carried, _hands_on_in_memory(nodes)))
    return found


def _steps(place: Place, nodes: Sequence[fx.Node]) -> int:
    """How many: the most that all but a few of its operations ran. A line may have several of one kind. 0 where none
    ran in it.
    """
    alike = Counter(map(_of_any_number, nodes))
    counts = {alike[_of_any_number(node)] for node in nodes if name_of(node) not in MOVING
              and _loops_of(node)[-1] == place}                                            # not of a loop inside
    for steps in sorted(counts, reverse=True):
        seldom = sum(alike[_of_any_number(node)] < steps - 1 for node in nodes)            # the first may have one less
        if seldom <= SELDOM * len(nodes):
            return steps
    return 0


def _of_any_number(node: fx.Node) -> Kind:
    """Its kind, alike for all layers of a list."""
    path, place, name = kind_of(node)
    return _NUMBER.sub("*", path), place, name


def _runs(graph: Captured) -> Iterator[tuple[Place, tuple[fx.Node, ...]]]:
    """(a loop as it is written, all that ran in it without a break); of a loop that runs in each layer one for each."""
    running: dict[Place, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        inside = _loops_of(node)
        for loop in list(running):
            if loop not in inside:
                yield loop, tuple(running.pop(loop))
        for loop in dict.fromkeys(inside):
            running.setdefault(loop, []).append(node)
    for loop, nodes in running.items():
        yield loop, tuple(nodes)


def _loops_of(node: fx.Node) -> list[Place]:
    """The loops that it ran in, the innermost last."""
    return [loop for frame in frames_of(node.meta.get("stack_trace") or "") if (loop := loop_around(frame))]


def _carried(nodes: Sequence[fx.Node], steps: int, graph: Captured) -> tuple[fx.Node, ...] | None:
    """Operations whose result in one step leads to their own in the next; None where layers of their own lie between.
    """
    kinds: dict[Kind, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        kinds[_of_any_number(node)].append(node)
    own = Counter(map(kind_of, nodes))
    every = graph.nodes
    order = {node: number for number, node in enumerate(every)}
    carried = []
    for alike in kinds.values():
        in_a_step = round(len(alike) / steps)              # the first step may have one less
        middle = len(alike) // 2
        for number in range(middle, middle + in_a_step):
            source, node = alike[number - in_a_step], alike[number]
            way = _way(source, node, every[order[source] + 1:order[node] + 1])
            if any(own[kind_of(node)] < steps / 2 for node in way):
                return None
            if way:
                carried.append(alike[number])
    return tuple(carried)


def _way(source: fx.Node, node: fx.Node, between: Sequence[fx.Node]) -> set[fx.Node]:
    """All that leads from one operation to another, both included; empty where it does not lead there.

    `between`: what ran from the one to the other, in its order.
    """
    reached = {source}
    for each in between:
        if any(inner in reached for inner in each.all_input_nodes):
            reached.add(each)
    if node not in reached:
        return set()
    needed = {node}
    for each in reversed(between):
        if each in needed:
            needed.update(each.all_input_nodes)
    return reached & needed


def _hands_on_in_memory(nodes: Sequence[fx.Node]) -> bool:
    """Whether it writes into a part of a tensor that it also reads: a graph does not show who reads what."""
    writes = [node for node in nodes if name_of(node) == "setitem" or is_in_place(node)]
    written = {_whole(node.args[0]) for node in writes
               if name_of(node) == "setitem" or _whole(node.args[0]) is not node.args[0]}
    reads = [node for node in nodes if name_of(node) == "getitem"
             and any(user not in writes or user.args[0] is not node for user in node.users)]
    return any(_whole(node) in written for node in reads)


def _whole(node: Any) -> Any:
    """The tensor that this is a part of."""
    while isinstance(node, fx.Node) and name_of(node) in PARTS and node.args:
        node = node.args[0]
    return node
