"""GELU by hand becomes the library's: one pass over x, in place of one an operation."""
import contextlib

from torch.nn import functional as F

from benchmarks.assistant.activations import Gelu, gelu_at, roots
from benchmarks.assistant.graph import Captured, Refused
from benchmarks.assistant.one_call import in_one_call
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Assumed, put_in_place
from benchmarks.assistant.technique import Advice, Found, Plan, Technique, found_at, unique
from common.block.evidence import Evidence


def find(program: Program) -> list[Found]:
    """Every GELU by hand; where it is another function than the library's, with the reason."""
    return unique(found_at(each, in_words(each) if isinstance(each, Gelu) else "much like a GELU by hand")
                  for each in program.analysis.gelus)


def in_words(gelu: Gelu) -> str:
    """What it costs."""
    form = "by tanh" if gelu.approximate == "tanh" else "by erf"
    return f"GELU {form} by hand: {len(gelu.nodes)} operations, each a pass over x"


def advice(program: Program, found: Found) -> Advice:
    """The library's function, in place of the expression of the last operation. Raises NotWritten."""
    gelu = found.region
    assert isinstance(gelu, Gelu)
    form = ', approximate="tanh"' if gelu.approximate == "tanh" else ""
    return in_one_call(gelu.nodes, gelu.output, [gelu.x], lambda words: f"F.gelu({words[0]}{form})")


def rewrite(graph: Captured) -> list[Assumed]:
    """Put the library's function in place of every GELU by hand."""
    for root in roots(graph):                                    # one at a time: each changes the graph
        with contextlib.suppress(Refused):
            if root in graph.nodes and (gelu := gelu_at(root, graph)):
                put_in_place(gelu.output, graph.module.graph, F.gelu, (gelu.x,), {"approximate": gelu.approximate})
    graph.module.recompile()
    return []


def apply(plan: Plan) -> None:
    """To every graph of the model."""
    plan.passes.append(rewrite)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why none of the library's ran; "" where one did."""
    return "" if any("gelu" in name.lower() for name in seen.kernels) else "no kernel of a GELU ran"


TECHNIQUE = Technique("library-gelu", "GELU by hand -> F.gelu", find, apply, advice, fired=fired)
