"""Whether a linear layer in 8 or 4 bits has the error that rounding explains: not more, and not less."""
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.recipes.emulated import Product, State, products
from benchmarks.recipes.recipe import Recipe
from common.outcome import Failed

# Of the expected error, which is an average. The largest number of each block is nearly exact, which makes it less; the
# numbers of a trained layer are not independent, which makes it more.
RANGE = 0.7, 1.15
TOKENS, K, N = 512, 1024, 512          # of the layer that is asked
OUTLIERS = 4                           # columns of x

Operands = tuple[Tensor, Tensor, Tensor]                   # x [tokens, K], weight [N, K], dy [tokens, N]


@dataclass(frozen=True)
class Error:
    """Relative L2 against FP64: of a product, and as it is to be expected. Infinite where the product overflows."""
    found: float
    expected: float


def operands(outliers: float, seed: int, device: torch.device) -> Operands:
    """x [TOKENS, K], weight [N, K], dy [TOKENS, N] of normal numbers.

    OUTLIERS columns of x are so many times as large, and the weights that they meet as much smaller, so that they count
    no more than others in y.
    """
    numbers = torch.Generator().manual_seed(seed)
    x, weight, dy = (torch.randn(shape, generator=numbers) for shape in ((TOKENS, K), (N, K), (TOKENS, N)))
    x[:, :OUTLIERS] *= outliers
    weight[:, :OUTLIERS] /= outliers
    return x.to(device), weight.to(device), dy.to(device)


def error(product: Product) -> Error:
    """Of what it gives."""
    value = product.value()
    if not value.isfinite().all():
        return Error(math.inf, math.inf)
    exact = product.left.double() @ product.right.double().T
    return Error(float((value.double() - exact).norm() / exact.norm()), product.expected())


def errors(recipe: Recipe, given: Operands, before: Operands | None = None) -> dict[str, Error]:
    """What -> its error, of y, and where the recipe trains of dx and dweight. Raises Failed beyond RANGE.

    `before` are the operands of an earlier call, from which delayed scaling takes its scales.
    """
    state = State(recipe)
    if before is not None:
        products(recipe, *before, state)
    found = {what: error(product) for what, product in products(recipe, *given, state).items()}
    gate({what: of for what, of in found.items() if math.isfinite(of.found)})
    return found


def gate(found: Mapping[str, Error]) -> None:
    """Raises Failed where an error is beyond RANGE, and where it is not finite."""
    for what, of in found.items():
        least, most = (share * of.expected for share in RANGE)
        if not least <= of.found <= most:
            raise Failed(f"the error of {what} is {of.found:.1e}, and rounding explains {least:.1e} to {most:.1e}")
