"""Cross-entropy by hand becomes the library's: fewer passes over the logits, which are the largest tensor of a GPT."""
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.assistant.graph import Captured, Refusal, Refused
from benchmarks.assistant.losses import CrossEntropy, binary_losses_in, by_library, loss_at, losses_in, picks
from benchmarks.assistant.one_call import in_one_call
from benchmarks.assistant.predicting import Basis, Prediction, in_one_pass
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Assumed, put_in_place
from benchmarks.assistant.technique import Advice, Found, NotWritten, Plan, Technique, found_at, unique
from common.block.evidence import Evidence

BESIDE = "the loss is given beside the model, and no rung changes it; the same function"
OF_LOGITS = ("F.binary_cross_entropy_with_logits takes what the sigmoid is taken of, and stays finite where a sigmoid "
             "is 0 or 1")


def find(program: Program) -> list[Found]:
    """Every one by hand; where it is another function than the library's, with the reason."""
    every = [each for graph in program.graphs for each in losses_in(graph)]
    beside = [each for graph in program.graphs_of_the_loss for each in losses_in(graph)]
    found = [replace(found_at(each, in_words(each)), by_hand=_beside(each)) for each in beside]
    return [*unique(found_at(each, in_words(each)) for each in every), *unique([*found, *_of_two_classes(program)])]


def _of_two_classes(program: Program) -> list[Found]:
    """Every binary one, which a person writes: the library's takes what the sigmoid is taken of."""
    graphs = *program.graphs, *program.graphs_of_the_loss
    found = [found_at(each, "binary cross-entropy by hand") for graph in graphs for each in binary_losses_in(graph)]
    return [replace(each, by_hand=OF_LOGITS) for each in found]


def _beside(found: CrossEntropy | Refusal) -> str:
    """Why a person does it, with the code to write where that is one line."""
    if isinstance(found, Refusal):
        return ""
    with contextlib.suppress(NotWritten):
        code = _code_for(found).code
        return f"{BESIDE}: {code}" if "\n" not in code else BESIDE
    return BESIDE


def in_words(found: CrossEntropy | Refusal) -> str:
    """What it costs."""
    if isinstance(found, Refusal):
        return "much like a cross-entropy by hand"
    return f"cross-entropy by hand: {len(found.nodes)} operations, most of them a pass over the logits"


def rewrite(graph: Captured) -> list[Assumed]:
    """Put the library's in place of every one by hand."""
    for pick in picks(graph):                                    # one at a time: each changes the graph
        with contextlib.suppress(Refused):
            if pick in graph.nodes and (by_hand := loss_at(pick, graph)):
                given = by_hand.logits, by_hand.index
                put_in_place(by_hand.output, graph.module.graph, by_library, given, by_hand.options)
    graph.module.recompile()
    return []


def apply(plan: Plan) -> None:
    """To every graph of the model."""
    plan.passes.append(rewrite)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why none of the library's ran; "" where one did."""
    return "" if any("nll_loss" in kernel.lower() for kernel in seen.kernels) else "no kernel of nll_loss ran"


def predict(basis: Basis, found: Sequence[Found]) -> Prediction | None:
    """One pass in place of one an operation."""
    return in_one_pass(basis, [each.region for each in found if each.region])


def advice(program: Program, found: Found) -> Advice:
    """The library's, in place of the expression of the last operation. Raises NotWritten."""
    assert isinstance(found.region, CrossEntropy)
    return _code_for(found.region)


def _code_for(by_hand: CrossEntropy) -> Advice:
    """Raises NotWritten."""
    return in_one_call(by_hand.nodes, by_hand.output, [by_hand.logits, by_hand.index],
                       lambda words: by_hand.code(*words))


TECHNIQUE = Technique("library-loss", "cross-entropy by hand -> F.cross_entropy", find, apply, advice, fired=fired,
                      predict=predict)
