"""The layers that multiply in hardware, side by side: each recipe by each way to have it, at a shape."""
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.recipes import layers
from benchmarks.recipes.checking import RANGE
from benchmarks.recipes.quantizing import bits_a_value
from benchmarks.recipes.recipe import RECIPES, Recipe
from benchmarks.studies.recipes import split
from benchmarks.studies.recipes.speed import LAYER, MAP, SERVED
from common.block.config import BlockConfig, dtype_name
from common.block.workload import MATMUL, Operation, Workload
from common.measure.cases import Case, Group, Setting
from common.measure.subject import CALLS_TO_CALIBRATE, REPLAY_GATES, Subject
from common.phases import Phase
from common.report.result import Result
from common.runtime.iteration import BOTH, FORWARD

Shape = tuple[int, int, int]           # tokens, K, N
GRID = [(tokens, width, width) for width in (1024, 4096, 8192) for tokens in (128, 512, 2048, 8192, 16384)]
# The first weight fits into the L2 of an H100, 50 MB, in 16 bits; the second, of Llama 70B, does not in 4.
GRID_SERVED = [(tokens, *of_weight) for of_weight in ((4096, 4096), (8192, 28672))
               for tokens in (1, 16, 128, 1024, 16384)]
SMALL_GRID = [(tokens, width, width) for width in (256, 512) for tokens in (128, 512)]
SMALL_SERVED = [(tokens, 512, 512) for tokens in (1, 128)]


@dataclass
class LayerSubject(Subject):
    """A layer, which may be for inference alone."""
    is_inference: bool = field(kw_only=True)

    def has(self, mode: str) -> bool:
        return mode == FORWARD or not self.is_inference


def shapes_of(config: BlockConfig) -> list[Shape]:
    """Of the four linear layers of a block."""
    width, inner = config.hidden_size, config.ffn_hidden_size
    return [(config.tokens, k, n) for k, n in ((width, 3 * width), (width, width), (width, inner), (inner, width))]


def workload(shape: Shape, recipe: Recipe, device: torch.device) -> Workload:
    """Three matmuls, in FP8 where both operands are; one for inference alone. On a CPU without a limit."""
    in_8_bits = recipe.x.format.bits <= 8
    arithmetic = "float8" if in_8_bits else dtype_name(layers.dtype_of(recipe))
    if device.type != "cuda":
        return Workload(arithmetic, tokens=shape[0])
    tokens, k, n = shape

    def product(layout: str, rows: int, summed: int, columns: int) -> Operation:
        flops = 2.0 * rows * summed * columns * (0.5 if recipe.weight.is_sparse else 1.0)
        moved = 2.0 * (rows * summed + rows * columns) + of_weight / 8 * summed * columns       # else of 16 bits
        return Operation(layout, MATMUL, flops, moved, arithmetic, (rows, summed, columns), layout)
    of_weight = bits_a_value(recipe.weight, n, k) if recipe.is_inference else 16
    backward: tuple[Operation, ...] = product("input gradient", tokens, n, k), product("weight gradient", n, tokens, k)
    needed = 8 * (tokens * k + n * k + tokens * n) * 8         # the check is in FP64, with some copies
    if recipe.is_inference:
        backward = ()
    return Workload(arithmetic, (product("forward", tokens, k, n),), backward, tokens, needed)


def operands(shape: Shape, dtype: torch.dtype, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, dy) of normal numbers."""
    tokens, k, n = shape
    numbers = torch.Generator(device).manual_seed(seed)
    x, weight, dy = (torch.randn(size, generator=numbers, device=device).to(dtype)
                     for size in ((tokens, k), (n, k), (tokens, n)))
    return x, weight, dy


def case(shape: Shape, recipe: Recipe, way: str, device: torch.device, data: str = LAYER) -> Case:
    """One of them, a row of `data`."""
    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        x, weight, dy = operands(shape, layers.dtype_of(recipe), setting.seed, setting.device)
        with _sizes_recorded():
            layer = layers.WAYS[way](weight, recipe)
            setting.say(Phase.COMPILING)
            for _ in range(CALLS_TO_CALIBRATE):
                _step(layer, recipe, x, dy)
        setting.say(Phase.CHECKING)
        found = layers.errors(layer, recipe, x, weight, dy)
        result.errors = {what: (of.found, RANGE[1] * of.expected) for what, of in found.items()}
        result.matmul = work_of_layer.matmul
        parameters = dict(layer.named_parameters())
        return LayerSubject(layer, [x], [dy], parameters, REPLAY_GATES, work_of_layer, is_inference=recipe.is_inference)
    work_of_layer, dtype = workload(shape, recipe, device), layers.dtype_of(recipe)
    tokens, k, n = shape
    work = {"x": f"{dtype_name(dtype)} [{tokens}, {k}]", "weight": f"{dtype_name(dtype)} [{n}, {k}]"}
    variant = {"data": data, "by": way, "size": list(shape)}
    return Case(recipe.name, prepare, parameter_dtype=dtype, variant=variant, work=work,
                workload=work_of_layer, that_fits=lambda total: "give a smaller one by --shapes")


@contextlib.contextmanager
def _sizes_recorded() -> Iterator[None]:
    """Raises NotImplementedError for sizes that a layer does not take, with the reason."""
    try:
        yield
    except (AssertionError, ValueError) as error:          # Transformer Engine's and ours
        said = str(error).strip() or type(error).__name__
        raise NotImplementedError(said.splitlines()[0]) from None


def _step(layer: nn.Module, recipe: Recipe, x: Tensor, dy: Tensor) -> None:
    """A call, and its backward where it has one."""
    with torch.set_grad_enabled(not recipe.is_inference):
        y = layer(x.detach().requires_grad_())
    if not recipe.is_inference:
        y.backward(dy)
    layer.zero_grad()


def group(shape: Shape, chosen: Sequence[Recipe], device: torch.device) -> Group:
    """All recipes by all ways, and 16 bits beside them."""
    cases = [case(shape, recipe, way, device) for way in layers.WAYS for recipe in layers.recipes_of(way)
             if way == layers.PLAIN or recipe in chosen]
    on_gpu = device.type == "cuda"
    return Group(cases, calibrated=False, watched=on_gpu, metered=on_gpu, may_not_fit=True, timed=split.records)


def groups_of_map(shapes: Sequence[Shape], served: Sequence[Shape], chosen: Sequence[Recipe], device: torch.device
                  ) -> Iterator[Group]:
    """Those that train at `shapes`, and those for inference alone at those `served`, beside BF16: times alone."""
    for data, mode, sizes, ways in ((MAP, BOTH, shapes, (layers.TORCH, layers.TE)),
                                    (SERVED, FORWARD, served, (layers.WEIGHTS, layers.SPARSE))):
        of_ways = [(recipe, way) for way in ways for recipe in layers.recipes_of(way) if recipe in chosen]
        for shape in sizes if of_ways else ():
            cases = [case(shape, recipe, way, device, data)
                     for recipe, way in [(RECIPES["BF16"], layers.PLAIN), *of_ways]]
            yield Group(cases, [mode], calibrated=False, limited=False, watched=False, may_not_fit=True)
