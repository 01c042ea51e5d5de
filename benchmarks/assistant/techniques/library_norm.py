"""LayerNorm and RMSNorm by hand become the library's: one kernel that reads x once, in place of one an operation."""
import contextlib
from collections.abc import Sequence

from torch import fx
from torch.nn import functional as F

from benchmarks.assistant.graph import Captured, Refused
from benchmarks.assistant.norms import Norm, norm_at, roots
from benchmarks.assistant.one_call import in_one_call
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Assumed, put_in_place
from benchmarks.assistant.technique import Advice, Found, Plan, Technique, found_at, unique
from common.block.evidence import Evidence


def find(program: Program) -> list[Found]:
    """Every norm by hand; where it is another function than the library's, with the reason."""
    return unique(found_at(each, in_words(each) if isinstance(each, Norm) else "a norm by hand")
                  for each in program.analysis.norms)


def in_words(norm: Norm) -> str:
    """What it costs."""
    return f"{norm.function.replace('_', ' ')} by hand: {len(norm.nodes)} operations, each a pass over x"


def advice(program: Program, found: Found) -> Advice:
    """The library's function, in place of the expression of the last operation. Raises NotWritten."""
    norm = found.region
    assert isinstance(norm, Norm)
    needed = [node for node in (norm.x, norm.weight, norm.bias) if node is not None]
    return in_one_call(norm.nodes, norm.output, needed, lambda words: _call(norm, words))


def _call(norm: Norm, words: Sequence[str]) -> str:
    """In words of x, weight and bias, as far as there are any."""
    x, *affine = words
    if norm.weight is None and norm.is_centred:
        affine = ["None"]
    return f"F.{norm.function}({', '.join([x, f'{x}.shape[-1:]', *affine, f'eps={norm.epsilon!r}'])})"


def rewrite(graph: Captured) -> list[Assumed]:
    """Put the library's function in place of every norm by hand."""
    for root in roots(graph):                                    # one at a time: each changes the graph
        with contextlib.suppress(Refused):
            if norm := norm_at(root, graph):
                _rewrite(norm, graph.module.graph)
    graph.module.recompile()
    return []


def _rewrite(norm: Norm, nodes: fx.Graph) -> None:
    function = F.layer_norm if norm.is_centred else F.rms_norm
    affine = (norm.weight, norm.bias) if norm.is_centred else (norm.weight,)
    put_in_place(norm.output, nodes, function, (norm.x, (norm.width,), *affine, norm.epsilon))


def apply(plan: Plan) -> None:
    """To every graph of the model."""
    plan.passes.append(rewrite)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why none of the library's norms ran; "" where one did."""
    return "" if any("norm" in name.lower() for name in seen.kernels) else "no kernel of a norm ran"


TECHNIQUE = Technique("library-norm", "norms by hand -> F.layer_norm, F.rms_norm", find, apply, advice, fired=fired)
