"""The dimensions of a product by einsum, as attention has them: [..., S, D]."""
from collections.abc import Sequence

Order = tuple[int | None, ...] | None        # of dimensions, None for one that is lacking; None: as they are


class NoProduct(Exception):
    """The equation is that of another product."""


def letters(equation: str) -> tuple[str, str, str]:
    """(of the first operand, of the second, of the result). Raises NoProduct."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    first, _, second = operands.partition(",")
    if not (arrow and second and (first + second + result).isalpha()):
        raise NoProduct(equation)
    return first, second, result


def of_scores(equation: str) -> tuple[bool, Order, Order]:
    """(whether the keys come first, the order of the queries as [..., S, D], that of the keys, which may lack
    dimensions of the batch). Raises NoProduct.
    """
    first, second, result = letters(equation)
    *batch, row, column = list(result)
    inner = [letter for letter in first if letter not in result]
    keys_first = row not in first
    if keys_first:
        first, second = second, first
    wanted = [*batch, row, *inner], [*batch, column, *inner]
    if sorted(first) != sorted(wanted[0]) or not _has(second, batch, (column, *inner)):
        raise NoProduct(equation)
    return keys_first, order_of(first, wanted[0]), order_of(second, wanted[1])


def of_output(equation: str, weights_first: bool = True) -> tuple[Order, Order]:
    """(the order of the values as [..., S, D], which may lack dimensions of the batch, that of such an output in the
    result). Raises NoProduct.
    """
    weights, values, result = letters(equation)
    if not weights_first:
        weights, values = values, weights
    *batch, row, column = list(weights)
    width = [letter for letter in values if letter not in weights]
    wanted = [*batch, column, *width]
    if not _has(values, batch, (column, *width)) or sorted(result) != sorted([*batch, row, *width]):
        raise NoProduct(equation)
    return order_of(values, wanted), order_of([*batch, row, *width], result)


def _has(given: Sequence[str], batch: Sequence[str], others: Sequence[str]) -> bool:
    """Whether the letters given are all others, and some of the batch, each once."""
    own = [letter for letter in given if letter not in batch]
    return sorted(own) == sorted(others) and len(set(given)) == len(given)


def order_of(names: Sequence[str], wanted: Sequence[str]) -> Order:
    """Where each wanted letter stands; None where all stand there already."""
    order = tuple(names.index(letter) if letter in names else None for letter in wanted)
    return None if order == tuple(range(len(order))) else order
