"""Batch norms folded into the convolutions before them, for inference: their statistics are constants by then."""
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from benchmarks.assistant.fp8 import HOOKS
from benchmarks.assistant.graph import Captured, argument
from benchmarks.assistant.normal import name_of
from benchmarks.assistant.program import Program
from benchmarks.assistant.technique import Advice, Found, Plan, Technique
from common.block.evidence import Evidence

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CODE = """\
from torch.nn.utils.fusion import fuse_conv_bn_eval

model.eval()
for conv, norm in [
{pairs}
]:
    model.set_submodule(conv, fuse_conv_bn_eval(model.get_submodule(conv), model.get_submodule(norm)))
    model.set_submodule(norm, torch.nn.Identity())"""


def find(program: Program) -> list[Found]:
    """All of them, as one finding at the call of the model."""
    if not program.is_inference:
        return []
    pairs = pairs_in(program)
    norms = sum(call.name == "batch_norm" for call in program.trace.calls)
    if not pairs:
        return []
    reason = f"{len(pairs)} of {norms} batch norms follow a convolution that nothing else reads"
    return [Found(None, "", 1, reason, modules=tuple(path for pair in pairs.items() for path in pair))]


def pairs_in(program: Program) -> Mapping[str, str]:
    """The path of a convolution -> that of the norm behind it, where both are always called one after the other."""
    following: dict[str, set[str]] = {}                    # convolution -> what reads it; "" is no norm
    before: dict[str, set[str]] = {}                       # norm -> what it reads
    for graph in program.graphs:
        for node in graph.nodes:
            if node.op == "call_function" and "conv" in name_of(node):
                for conv, norm in _called_with(graph, node, next(iter(node.users)) if len(node.users) == 1 else None):
                    following.setdefault(conv, set()).add(norm)
            elif _is_norm(node):
                x = argument(node, 0, "input")
                for norm, conv in _called_with(graph, node, x):
                    before.setdefault(norm, set()).add(conv)
    return {conv: norm for conv, norms in following.items() if len(norms) == 1 for norm in norms
            if before.get(norm) == {conv} and _can_be_folded(program.model, conv, norm)}


def _is_norm(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and name_of(node) == "batch_norm"


def _called_with(graph: Captured, node: fx.Node, other: Any) -> Iterator[tuple[str, str]]:
    """In each call the path of the module whose weight, or statistics, the one reads, and the other; "" of no other."""
    paths = _paths(graph, node)
    others = _paths(graph, other) if isinstance(other, fx.Node) else []
    for number, path in enumerate(paths):
        yield path, others[number] if number < len(others) else ""


def _paths(graph: Captured, node: fx.Node) -> list[str]:
    if node.op != "call_function":
        return []
    return [name.rpartition(".")[0] for name in graph.names_of(argument(node, 1, "weight"))]       # of a norm the mean


def _can_be_folded(model: nn.Module, conv_path: str, norm_path: str) -> bool:
    """Whether both are torch's own modules without hooks, the norm is in eval mode, and the weight is not shared."""
    try:
        conv, norm = model.get_submodule(conv_path), model.get_submodule(norm_path)
    except AttributeError:
        return False
    if type(conv) not in CONVOLUTIONS or type(norm) not in NORMS or norm.training or norm.running_mean is None:
        return False
    holders = sum(weight is conv.weight for module in model.modules() for weight in module.parameters(recurse=False))
    hooked = any(getattr(module, hooks) for module in (conv, norm) for hooks in HOOKS)
    return holders == 1 and not hooked


def apply(plan: Plan) -> None:
    """To the pairs that were found."""
    paths = [path for found in plan.found.get(TECHNIQUE.name, ()) for path in found.modules]
    plan.changes.append(lambda model: fold(model, dict(zip(paths[::2], paths[1::2], strict=True))))


def fold(model: nn.Module, pairs: Mapping[str, str]) -> None:
    """From here on each of these convolutions does what its norm did, which gives what it gets."""
    for conv_path, norm_path in pairs.items():
        conv, norm = model.get_submodule(conv_path), model.get_submodule(norm_path)
        vars(conv)["forward"] = Folded(conv, norm)         # parameters, and so their names, stay where they are
        vars(norm)["forward"] = _same


def _same(x: Tensor) -> Tensor:
    return x


class Folded:
    """A convolution with the weights of both; folded anew where its parameters have come to another dtype."""

    def __init__(self, conv: Any, norm: Any):
        self.conv, self.norm = conv, norm
        self.weights = self._folded()

    def _folded(self) -> tuple[Tensor, Tensor]:
        conv, norm = self.conv, self.norm
        weight, bias = fuse_conv_bn_weights(conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps,
                                            norm.weight, norm.bias)
        return weight.detach(), bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        if self.weights[0].dtype != self.conv.weight.dtype:
            self.weights = self._folded()
        return self.conv._conv_forward(x, *self.weights)


def advice(program: Program, found: Found) -> Advice:
    """Once, before the model is compiled."""
    pairs = zip(found.modules[::2], found.modules[1::2], strict=True)
    return Advice(CODE.format(pairs="\n".join(f'    ("{conv}", "{norm}"),' for conv, norm in pairs)))


def fired(program: Program, before: Evidence, seen: Evidence) -> str:
    """Why it did not: as many norms ran as without it."""
    left, there = (sum(count for name, count in each.kernels.items() if _normalises(name)) for each in (seen, before))
    return f"{left} kernels of batch norms ran, and {there} without it" if left >= there > 0 else ""


def _normalises(name: str) -> bool:
    return any(word in name.lower() for word in ("batch_norm", "batchnorm", "bn_fw"))


TECHNIQUE = Technique("fold-batchnorm", "convolution, batch norm -> one convolution", find, apply, advice, fired=fired)
