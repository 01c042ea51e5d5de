"""The technique that puts one function of the library in place of an activation by hand: one pass over x."""
import contextlib
from collections.abc import Sequence

from torch.nn import functional as F

from benchmarks.assistant.activations import (
    Activation,
    Function,
    activation_at,
    activations_in,
    is_module_of,
    roots,
)
from benchmarks.assistant.graph import Captured, Refused
from benchmarks.assistant.installed import modules_around, replacing
from benchmarks.assistant.one_call import in_one_call
from benchmarks.assistant.predicting import Basis, Prediction, in_one_pass
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Assumed, put_in_place
from benchmarks.assistant.technique import Advice, Found, Plan, Technique, found_at, unique
from common.block.evidence import Evidence


def technique_of(name: str, words: str, functions: Sequence[Function]) -> Technique:
    """The technique of these functions."""
    called = {function.name for function in functions}
    like = f"much like {functions[0].words.partition(' ')[0]} by hand"

    def find(program: Program) -> list[Found]:
        """Every one by hand; where it is another function than the library's, with the reason."""
        every = [each for graph in program.graphs for each in activations_in(graph, functions)]
        return unique(found_at(each, in_words(each) if isinstance(each, Activation) else like) for each in every)

    def rewrite(graph: Captured) -> list[Assumed]:
        """Put the library's function in place of every one by hand."""
        for root in roots(graph, functions):                     # one at a time: each changes the graph
            with contextlib.suppress(Refused):
                if root in graph.nodes and (by_hand := activation_at(root, graph, functions)):
                    own = by_hand.function
                    put_in_place(by_hand.output, graph.module.graph, getattr(F, own.name), (by_hand.x,), own.options)
        graph.module.recompile()
        return []

    def apply(plan: Plan) -> None:
        """To every graph of the model."""
        plan.passes.append(rewrite)

    def fired(program: Program, before: Evidence, seen: Evidence) -> str:
        """Why none of the library's ran; "" where one did."""
        ran = any(function in kernel.lower() for kernel in seen.kernels for function in called)
        return "" if ran else f"no kernel of {' or '.join(sorted(called))} ran"
    return Technique(name, words, find, apply, advice, fired=fired, predict=predict)


def predict(basis: Basis, found: Sequence[Found]) -> Prediction | None:
    """One pass in place of one an operation."""
    return in_one_pass(basis, [each.region for each in found if each.region])


def in_words(by_hand: Activation) -> str:
    """What it costs."""
    count = len(by_hand.nodes)
    return f"{by_hand.function.words} by hand: {count} operations, each a pass over x"


def advice(program: Program, found: Found) -> Advice:
    """The library's function, in place of the expression of the last operation; its module in place of one that stands
    in an installed package. Raises NotWritten.
    """
    by_hand = found.region
    assert isinstance(by_hand, Activation)
    if found.place and not found.place.is_yours:
        modules = modules_around(program, by_hand)
        if modules and all(is_module_of(by_hand.function, each) for each in modules):
            return Advice(replacing(modules[0], [f"torch.nn.{by_hand.function.module}"]))
    return in_one_call(by_hand.nodes, by_hand.output, [by_hand.x], lambda words: by_hand.function.code(words[0]))
