"""Linear layers of a model in FP8, by Transformer Engine or torchao: which it could have so, which pay, and the model
with these.

Whether FP8 pays depends on a layer's size: casting grows with its sides, multiplying with their product. So each size
is timed where the model runs, by each library that is there, and no rule of thumb decides.
"""
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import Ratio, gain_on_device, pays
from benchmarks.assistant.trace import Call
from common.outcome import in_a_line, is_out_of_memory
from common.runtime import engine, iteration
from common.runtime.iteration import BOTH, FORWARD
from common.runtime.pieces import FP8_MULTIPLE

Size = tuple[int, int, int]                # tokens, inputs, outputs
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LAST = "the last: its errors are the output's"


@dataclass(frozen=True)
class Layer:
    """A linear layer as a forward called it."""
    path: str
    size: Size
    flops: float
    why_not: str = ""                      # why FP8 can't have it


def layers_of(program: Program) -> list[Layer]:
    """All that a forward called, each once, in the order of their first calls."""
    called: dict[str, list[Call]] = {}
    for call in program.trace.calls:
        is_plain = type(program.module_at(call.module)) is nn.Linear           # a class of its own may do more
        if is_plain and call.name == "linear" and len(call.products) == 1:
            called.setdefault(call.module, []).append(call)
    last = next(reversed(called), "")
    return [_layer(program.model.get_submodule(path), path, calls, path == last) for path, calls in called.items()]


def other_matmuls_of(program: Program) -> dict[str, int]:
    """Class -> how many modules of it multiply by a matrix of their own, and are no plain nn.Linear."""
    found: dict[str, int] = {}
    for path in dict.fromkeys(call.module for call in program.trace.calls if call.is_matmul):
        module = program.module_at(path)
        has_matrix = module is not None and any(t.ndim == 2 for t in module.parameters(recurse=False))
        if has_matrix and type(module) is not nn.Linear:
            name = type(module).__name__
            found[name] = found.get(name, 0) + 1
    return found


def _layer(module: nn.Module, path: str, calls: Sequence[Call], is_last: bool) -> Layer:
    assert isinstance(module, nn.Linear)
    tokens = {round(call.flops / (2 * module.weight.numel())) for call in calls}
    size = (min(tokens), module.in_features, module.out_features)          # the fewest: there FP8 gains least
    odd = [value for value in (*tokens, *size[1:]) if value % FP8_MULTIPLE]
    why_not = LAST if is_last else ""
    if odd:
        why_not = f"a size of {odd[0]:,}: no multiple of {FP8_MULTIPLE}"
    elif any(getattr(module, hooks) for hooks in HOOKS):
        why_not = "with hooks, which another module would not have"
    return Layer(path, size, sum(call.flops for call in calls), why_not)


# ------------------------------------------------------------------------------------------------ a layer in FP8


@functools.cache
def _linear_by_transformer_engine() -> type[nn.Module]:
    te = engine.transformer_engine()
    base: type[nn.Module] = te.Linear

    class LinearInFP8(base):                                   # type: ignore[valid-type, misc]
        """Transformer Engine's, in FP8 at each call. In FP64, which asks what a model means, it is a plain one."""

        def forward(self, x: Tensor) -> Tensor:
            if self.weight.dtype == torch.float64:
                return F.linear(x, self.weight, self.bias if self.use_bias else None)
            with te.autocast(enabled=True, recipe=te.quantization.Float8CurrentScaling()):
                return super().forward(x)

        def __deepcopy__(self, memo: dict) -> nn.Module:
            """With copies of its parameters; what Transformer Engine keeps besides is made anew."""
            bias = copy.deepcopy(self.bias, memo) if self.use_bias else None
            return _made(copy.deepcopy(self.weight, memo), bias, self.training)
    return LinearInFP8


def _made(weight: Tensor, bias: Tensor | None, is_training: bool) -> nn.Module:
    outputs, inputs = weight.shape
    made = _linear_by_transformer_engine()(inputs, outputs, bias=bias is not None, params_dtype=weight.dtype,
                                           device=weight.device)
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made.train(is_training)


def by_transformer_engine(layer: nn.Linear) -> nn.Module:
    """The same layer in FP8 by Transformer Engine, with its parameters."""
    return _made(layer.weight, layer.bias, layer.training)


@functools.cache
def _linear_by_torchao() -> type[nn.Module]:
    from torchao.float8.float8_linear import Float8Linear
    base: type[nn.Module] = Float8Linear

    class LinearInFP8(base):                                   # type: ignore[valid-type, misc]
        """torchao's, in FP8 at each call. In FP64, which asks what a model means, it is a plain one."""

        def forward(self, x: Tensor) -> Tensor:
            if self.weight.dtype == torch.float64:
                return F.linear(x, self.weight, self.bias)
            return super().forward(x)
    return LinearInFP8


def by_torchao(layer: nn.Linear, config: object = None) -> nn.Module:
    """The same layer in FP8 by torchao, with its parameters; compiled, since its casts are operations of their own."""
    made = _linear_by_torchao().from_float(layer, config).train(layer.training)     # type: ignore[attr-defined]
    made.compile()
    return made


def _why_torchao_does_not_import() -> str:
    try:
        import torchao.float8  # noqa: F401
    except Exception as error:                                 # built for another torch, say
        return in_a_line(error)
    return ""


@dataclass(frozen=True)
class Library:
    """What computes a linear layer in FP8."""
    name: str
    import_error: Callable[[], str]            # why it does not import, in a line; "" where it does
    in_fp8: Callable[[nn.Linear], nn.Module]   # the same layer, with its parameters


TRANSFORMER_ENGINE = Library("Transformer Engine", lambda: engine.import_error() or "",
                             lambda layer: by_transformer_engine(layer))
TORCHAO = Library("torchao", functools.cache(_why_torchao_does_not_import), lambda layer: by_torchao(layer))
LIBRARIES = {each.name: each for each in (TRANSFORMER_ENGINE, TORCHAO)}


# --------------------------------------------------------------------------------------------------------- what it buys


def timed(size: Size, mode: str, device: torch.device, library: Library) -> Ratio:
    """How many times as fast a layer of that size is in FP8 as in BF16, by the GPU's time."""
    tokens, inputs, outputs = size
    plain = nn.Linear(inputs, outputs, device=device, dtype=torch.bfloat16)
    x, dy = (torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for width in (inputs, outputs))
    before, after = (iteration.of_call(layer, [x.clone()], [dy], dict(layer.named_parameters()), mode)
                     for layer in (plain, library.in_fp8(plain)))
    return gain_on_device(before, after, device)


def gains(layers: Sequence[Layer], program: Program, library: Library) -> dict[Size, Ratio]:
    """Of each size that FP8 can have."""
    mode = FORWARD if program.is_inference or not program.trace.trains else BOTH
    sizes = dict.fromkeys(layer.size for layer in layers if not layer.why_not)
    return {size: timed(size, mode, program.inputs.device, library) for size in sizes}


def paying(layers: Sequence[Layer], gains: Mapping[Size, Ratio]) -> list[Layer]:
    """Those that FP8 makes faster."""
    return [layer for layer in layers if not layer.why_not and pays(gains[layer.size])]


def saved(layers: Sequence[Layer], gains: Mapping[Size, Ratio]) -> float:
    """What the layers that pay save of the time of all, where time goes by FLOPs."""
    return sum(layer.flops * (1 - 1 / gains[layer.size][0]) for layer in paying(layers, gains))


def by_library(layers: Sequence[Layer], program: Program) -> tuple[dict[str, dict[Size, Ratio]], list[str]]:
    """(library -> what each size gains by it, why others that import do not run)."""
    by, failed = {}, []
    for name, library in LIBRARIES.items():
        if library.import_error():
            continue
        try:
            by[name] = gains(layers, program, library)
        except Exception as error:                             # built for another torch, or without a compiler
            if is_out_of_memory(error):
                raise
            failed.append(f"{name}: {in_a_line(error)}")
    return by, failed


# ------------------------------------------------------------------------------------------------ a model in FP8


def convert(paths: Sequence[str], library: Library, model: nn.Module) -> None:
    """From here on these linear layers of the model are in FP8."""
    for path in paths:
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        model.set_submodule(path, library.in_fp8(layer))


def patterns(paths: Sequence[str], model: nn.Module, kinds: tuple[type, ...] = (nn.Linear,)) -> list[str]:
    """Names with a star for each number, which stand for these modules and for no other of these kinds; else all names.
    """
    starred = dict.fromkeys(".".join("*" if part.isdigit() else part for part in path.split(".")) for path in paths)
    every = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    meant = {name for name in every if any(fnmatchcase(name, pattern) for pattern in starred)}
    return list(starred) if meant == set(paths) else list(paths)


# ------------------------------------------------------------------------------------------------------------ in words


def others_in_words(program: Program) -> str:
    """The modules that FP8 leaves as they are, as no one knows how they hold their matrix; "" where there are none."""
    others = other_matmuls_of(program)
    listed = " and ".join(f"{count} {name}" for name, count in others.items())
    return f"{listed} multiply by a matrix of their own: only a plain nn.Linear is replaced" if others else ""


def in_words(layers: Sequence[Layer], by: Mapping[str, Mapping[Size, Ratio]]) -> str:
    """By the first library: how many pay, what share of the FLOPs they have, and how much faster each size is; then how
    much faster by the others.
    """
    (library, gains), *others = by.items()
    faster_ones = paying(layers, gains)
    share = 100 * sum(layer.flops for layer in faster_ones) / sum(layer.flops for layer in layers)
    sizes = [f"{' x '.join(f'{each:,}' for each in size)} {gain[0]:.2f}{'' if pays(gain) else ' (left out)'}"
             for size, gain in gains.items()]
    how_many = f"{len(faster_ones)} of {len(layers)} linear layers by {library}, {share:.0f} % of their FLOPs"
    faster = f"times as fast as in BF16, by tokens x inputs x outputs: {', '.join(sizes)}"
    beside = [f"by {other}: {', '.join(f'{gain:.2f}' for gain, *_ in its.values())}" for other, its in others]
    return "; ".join([how_many, faster, *beside, *left_out(layers)])


def left_out(layers: Sequence[Layer]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        if layer.why_not:
            reasons.setdefault(layer.why_not, []).append(layer.path)
    return [f"without {paths[0] if len(paths) == 1 else f'{len(paths)} layers'}, {why_not}"
            for why_not, paths in reasons.items()]
