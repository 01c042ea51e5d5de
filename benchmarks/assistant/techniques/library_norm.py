"""LayerNorm and RMSNorm by hand become the library's: one kernel that reads x once, in place of one an operation."""
import ast
import contextlib
import copy
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from benchmarks.assistant.graph import Captured, Refused, dtype_of, place_of, shape_of
from benchmarks.assistant.installed import modules_around, replacing
from benchmarks.assistant.norms import Norm, norm_at, roots
from benchmarks.assistant.one_call import in_one_call
from benchmarks.assistant.operands import grouped
from benchmarks.assistant.predicting import Basis, Prediction, in_one_pass
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Assumed, put_in_place
from benchmarks.assistant.technique import Advice, Found, NotWritten, Plan, Technique, found_at, unique
from benchmarks.assistant.words import expression_of, operands_of
from common.block.evidence import Evidence
from common.block.oracle import relative_error

EXACT = 1e-5                           # of a norm that is computed in FP32 in between
SCALES = 1.0, 1e-2, 1e-3, 1e-4         # of rows: an epsilon shows in small ones


def find(program: Program) -> list[Found]:
    """Every norm by hand; where it is another function than the library's, with the reason."""
    return unique(found_at(each, in_words(each) if isinstance(each, Norm) else "a norm by hand")
                  for each in program.analysis.norms)


def in_words(norm: Norm) -> str:
    """What it costs."""
    over = "" if norm.is_over_the_last else f" over dimension {norm.dim}"
    return f"{norm.function.replace('_', ' ')}{over} by hand: {len(norm.nodes)} operations, each a pass over x"


def advice(program: Program, found: Found) -> Advice:
    """The library's function, in place of the expression of the last operation; its module in place of one that stands
    in an installed package. Raises NotWritten.
    """
    norm = found.region
    assert isinstance(norm, Norm)
    if found.place and not found.place.is_yours:
        modules = modules_around(program, norm)
        if modules and all(_is_rms_norm(each, norm.epsilon) for each in modules):
            made = f"torch.nn.RMSNorm(child.weight.shape, eps={norm.epsilon!r})"
            return Advice(replacing(modules[0], [f"norm = {made}", "norm.weight = child.weight", "norm"]))
    try:
        return _in_one_call(norm)
    except NotWritten:
        if norm.alone is None:
            raise
    return _in_one_call(norm.alone)


def _is_rms_norm(module: nn.Module, epsilon: float) -> bool:
    """Whether a module is an RMSNorm with a weight and nothing else, of that epsilon."""
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    if list(tensors) != ["weight"] or tensors["weight"].ndim != 1:
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(tensors["weight"].shape, generator=generator, dtype=torch.float64) + 0.5
    x = torch.randn(len(SCALES), len(weight), generator=generator, dtype=torch.float64) * torch.tensor(SCALES)[:, None]
    other = copy.deepcopy(module).to("cpu", torch.float64)
    with torch.no_grad(), contextlib.suppress(Exception):
        other.weight.copy_(weight)                             # type: ignore[operator]
        expected = F.rms_norm(x, weight.shape, weight, epsilon)
        return relative_error(other(x), expected) <= EXACT
    return False


def _in_one_call(norm: Norm) -> Advice:
    needed = [norm.x, *_affine(norm)]
    gives = dtype_of(norm.output)                          # FP32, where x in 16 bits is multiplied by an FP32 tensor
    cast = "" if gives is dtype_of(norm.x) else f".to({gives})"
    return in_one_call(norm.nodes, norm.output, needed, lambda words: _call(norm, words) + cast)


def _affine(norm: Norm) -> list[fx.Node]:
    return [node for node in (norm.weight, norm.bias) if node is not None]


def _call(norm: Norm, words: Sequence[str]) -> str:
    """In words of x, weight and bias, as far as there are any."""
    x, *affine = words
    affine = [word if _is_flat(node) else _flattened(word) for word, node in zip(affine, _affine(norm), strict=True)]
    if norm.weight is None and norm.is_centred:
        affine = ["None"]
    options = [*affine, f"eps={_epsilon(norm)}"]
    if norm.is_over_the_last:
        return f"F.{norm.function}({', '.join([x, f'{x}.shape[-1:]', *options])})"
    rows, width = f"{grouped(x)}.movedim({norm.dim}, -1)", f"{grouped(x)}.shape[{norm.dim}:{norm.dim + 1}]"
    return f"F.{norm.function}({', '.join([rows, width, *options])}).movedim(-1, {norm.dim})"


def _epsilon(norm: Norm) -> str:
    """By its name, where it has one in the function that is edited: the next module may have another value."""
    added, edited = norm.with_epsilon, place_of(norm.output)
    own = place_of(added) if added else None
    if added and own and edited and own.function == edited.function:
        whole = expression_of(added)
        words = operands_of(whole) if whole else []
        place = 1 if isinstance(added.args[0], fx.Node) else 0
        if len(words) == 2 and isinstance(words[place], ast.Name | ast.Attribute):
            return ast.unparse(words[place])
    return repr(float(f"{norm.epsilon:.6g}"))                              # the square of 1e-8 is no round number


def _flattened(word: str) -> str:
    """Of what stands along a dimension, as weight[:, None, None], the vector."""
    node = ast.parse(word, mode="eval").body
    if isinstance(node, ast.Subscript):
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if all(ast.unparse(index) in (":", "None", "...") for index in indices):
            return ast.unparse(node.value)
    return f"{grouped(word)}.flatten()"


def _is_flat(node: fx.Node) -> bool:
    return len(shape_of(node)) == 1


def rewrite(graph: Captured) -> list[Assumed]:
    """Put the library's function in place of every norm by hand."""
    for root in roots(graph):                                    # one at a time: each changes the graph
        with contextlib.suppress(Refused):
            if norm := norm_at(root, graph):
                _rewrite(norm, graph.module.graph)
    graph.module.recompile()
    return []


def _rewrite(norm: Norm, nodes: fx.Graph) -> None:
    if norm.is_over_the_last and all(map(_is_flat, _affine(norm))):
        function = F.layer_norm if norm.is_centred else F.rms_norm
        affine = (norm.weight, norm.bias) if norm.is_centred else (norm.weight,)
        put_in_place(norm.output, nodes, function, (norm.x, (norm.width,), *affine, norm.epsilon))
    else:
        over = layer_norm_over if norm.is_centred else rms_norm_over
        put_in_place(norm.output, nodes, over, (norm.x, norm.dim, norm.weight, norm.bias, norm.epsilon))


def layer_norm_over(x: Tensor, dim: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The library's LayerNorm over any dimension; weight and bias [E], in whatever shape."""
    weight, bias = (None if each is None else each.flatten() for each in (weight, bias))
    return F.layer_norm(x.movedim(dim, -1), x.shape[dim:dim + 1], weight, bias, eps).movedim(-1, dim)


def rms_norm_over(x: Tensor, dim: int, weight: Tensor | None, bias: None, eps: float) -> Tensor:
    """The same of RMSNorm, which has no bias."""
    weight = None if weight is None else weight.flatten()
    return F.rms_norm(x.movedim(dim, -1), x.shape[dim:dim + 1], weight, eps).movedim(-1, dim)


def apply(plan: Plan) -> None:
    """To every graph of the model."""
    plan.passes.append(rewrite)


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why none of the library's norms ran; "" where one did."""
    return "" if any("norm" in name.lower() for name in seen.kernels) else "no kernel of a norm ran"


def predict(basis: Basis, found: Sequence[Found]) -> Prediction | None:
    """One pass in place of one an operation."""
    return in_one_pass(basis, [each.region for each in found if each.region])


TECHNIQUE = Technique("library-norm", "norms by hand -> F.layer_norm, F.rms_norm", find, apply, advice, fired=fired,
                      predict=predict)
