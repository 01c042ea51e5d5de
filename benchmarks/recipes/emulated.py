"""A linear layer by a recipe, its matmuls emulated: operands rounded as the recipe says, products and sums in FP32.

It says what a recipe costs in accuracy, on any machine, and nothing of its speed. FP32 rounds off far less than the
formats do. Beside what it computes it can say how large the error should be: see `expected`.
"""
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.recipes.formats import Format
from benchmarks.recipes.quantizing import Quantized, Quantizer
from benchmarks.recipes.recipe import Recipe


@dataclass
class State:
    """Of delayed scaling: operand -> the largest magnitudes of the calls before, the latest first; 0 for none."""
    recipe: Recipe
    seen: dict[str, Tensor] = field(default_factory=dict)

    def quantized(self, operand: str, quantizer: Quantizer, matrix: Tensor) -> Quantized:
        """The operand as it is multiplied. The first call has no history, and takes its own magnitude."""
        if not self.recipe.history:
            return quantizer(matrix)
        amax = matrix.detach().abs().amax().float()
        history = self.seen.get(operand)
        if history is None:
            history = torch.zeros(self.recipe.history, device=matrix.device)
            history[0] = amax
        before = history.amax()
        history = history.roll(1)
        history[0] = amax
        self.seen[operand] = history
        return quantizer(matrix, before)


@dataclass(frozen=True)
class Product:
    """left @ right.T of two matrices, as they are and as they are rounded."""
    left: Tensor
    right: Tensor
    left_rounded: Quantized
    right_rounded: Quantized

    def value(self) -> Tensor:
        """[rows of left, rows of right], FP32."""
        return self.left_rounded.dequantized() @ self.right_rounded.dequantized().T

    def expected(self, given_in: Format | None = None) -> float:
        """The L2 norm of the error that is to be expected, over that of the product; FP64.

        `given_in`: the format that the operands already are in. Rounding errors of different elements are independent
        and zero on average, so their squares add up.
        """
        left, right = self.left.double(), self.right.double()
        of_left, of_right = (rounded.expected_error(operand, is_exact=rounded.format == given_in)
                             for operand, rounded in ((left, self.left_rounded), (right, self.right_rounded)))
        squares = of_left @ (right**2).T + (left**2 + of_left) @ of_right.T
        return float((squares.sum() / (left @ right.T).square().sum()).sqrt())


def products(recipe: Recipe, x: Tensor, weight: Tensor, dy: Tensor, state: State | None = None) -> dict[str, Product]:
    """y, and where the recipe trains dx and dweight; x [tokens, K], weight [N, K], dy [tokens, N]."""
    state = state or State(recipe)
    made = {"y": output(state, x, weight)}
    return made if recipe.is_inference else made | gradients(state, x, weight, dy)


def output(state: State, x: Tensor, weight: Tensor) -> Product:
    """y."""
    return _product(state, ("x", state.recipe.x, x), ("weight", state.recipe.weight, weight))


def gradients(state: State, x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Product]:
    """dx and dweight."""
    recipe = state.recipe
    of_dy, of_x = recipe.of_weight_gradient or recipe.dy, recipe.of_weight_gradient or recipe.x
    return {"dx": _product(state, ("dy", recipe.dy, dy), ("weight again", recipe.weight, weight.T)),
            "dweight": _product(state, ("dy again", of_dy, dy.T), ("x again", of_x, x.T))}


def _product(state: State, left: tuple[str, Quantizer, Tensor], right: tuple[str, Quantizer, Tensor]) -> Product:
    return Product(left[2], right[2], state.quantized(*left), state.quantized(*right))


class _Linear(torch.autograd.Function):
    """y = x @ weight.T, and its gradients, by a recipe."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, state: State) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.state = state
        return output(state, x, weight).value()

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        made = gradients(ctx.state, x, weight, dy)
        return made["dx"].value(), made["dweight"].value(), None


class Linear(nn.Linear):
    """In place of nn.Linear, with its parameters: x [..., in] -> [..., out], FP32."""

    def __init__(self, in_features: int, out_features: int, recipe: Recipe, bias: bool = True):
        super().__init__(in_features, out_features, bias)
        self.state = State(recipe)

    def forward(self, x: Tensor) -> Tensor:
        y = _Linear.apply(x.flatten(0, -2), self.weight, self.state).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
