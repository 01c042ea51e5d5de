"""Rounding to 8 and 4 bits, bit for bit against tables of the formats' codes that share no code with it."""
import itertools
import math
from fractions import Fraction

import pytest
import torch

from benchmarks.recipes.formats import BF16, E2M1, E4M3, E5M2, FP16, INT4, INT8, Float, power_of_two

pytestmark = pytest.mark.unit


def decoded(code: int, exponent_bits: int, mantissa_bits: int) -> Fraction:
    """What the bits of a code without its sign mean, by the specification."""
    exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    if exponent == 0:
        return Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)


# Format -> how many of its codes are finite numbers: E4M3 has one NaN, E5M2 infinity and three NaNs, E2M1 neither.
CODES = {E4M3: 127, E5M2: 124, E2M1: 8}
VALUES = {each: [decoded(code, each.exponent_bits, each.mantissa_bits) for code in range(count)]
          for each, count in CODES.items()}
VALUES |= {each: [Fraction(number) for number in range(2 ** (each.bits - 1))] for each in (INT8, INT4)}
FORMATS = pytest.mark.parametrize("form", VALUES, ids=lambda form: form.name)


def nearest(form, x: float) -> float:
    """By a search among all values: of two as near that with the even code, which is its place."""
    exact = Fraction(x)
    place = min(range(len(VALUES[form])), key=lambda place: (abs(VALUES[form][place] - abs(exact)), place % 2))
    return math.copysign(float(VALUES[form][place]), x)


def rounded(form, numbers):
    return form.round(torch.tensor(numbers, dtype=torch.float32)).tolist()


@FORMATS
def test_its_ends_are_those_of_its_codes(form):
    assert form.largest == float(VALUES[form][-1])
    assert not isinstance(form, Float) or form.least == float(VALUES[form][1])


@FORMATS
def test_each_of_its_values_is_kept(form):
    numbers = [float(value) for value in VALUES[form]]
    assert rounded(form, numbers) == numbers and rounded(form, [-x for x in numbers]) == [-x for x in numbers]


@FORMATS
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearer_value(form):
    ties = [float((low + high) / 2) for low, high in itertools.pairwise(VALUES[form])]
    below, above = ([float(torch.nextafter(torch.tensor(x), torch.tensor(to))) for x in ties] for to in (0.0, 1e9))
    numbers = [*ties, *below, *above]
    assert rounded(form, numbers) == [nearest(form, x) for x in numbers]
    assert rounded(form, [-x for x in numbers]) == [-nearest(form, x) for x in numbers]


@FORMATS
def test_all_else_goes_to_the_nearest_value(form):
    torch.manual_seed(0)
    spread = torch.randn(2000) * torch.logspace(-9, 6, 2000, base=10)
    numbers = [*spread.tolist(), 1e-45, 1e-38, 3e38, -3e38]
    assert rounded(form, numbers) == [nearest(form, x) for x in numbers]


@FORMATS
def test_what_is_no_number_stays_so_and_infinity_saturates(form):
    assert math.isnan(rounded(form, [math.nan])[0])
    assert rounded(form, [math.inf, -math.inf]) == [form.largest, -form.largest]


@pytest.mark.parametrize("form, dtype", [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2),
                                         (FP16, torch.float16), (BF16, torch.bfloat16)], ids=str)
def test_it_rounds_as_torch_casts(form, dtype):
    bits = torch.randint(0, 2**31, (20000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    x = torch.cat([bits.to(torch.int32).view(torch.float32), torch.randn(20000)]).nan_to_num(0.0)
    expected = (x.clamp(-form.largest, form.largest) if form.saturates else x).to(dtype).float()
    assert torch.equal(form.round(x), expected)


@FORMATS
def test_the_spacing_is_that_of_the_values_around(form):
    for low, high in itertools.pairwise(VALUES[form]):
        middle = float((low + high) / 2)
        assert form.spacing(torch.tensor([middle, -middle])).tolist() == [float(high - low)] * 2


@pytest.mark.parametrize("x, power", [
    (1.0, 1.0), (1.0000001, 2.0), (0.9999999, 1.0), (2.0, 2.0), (3.0, 4.0), (448.0, 512.0), (0.25, 0.25),
    (2.0**-127, 2.0**-127), (2.0**-140, 2.0**-127), (3e38, 2.0**127), (2.0**127, 2.0**127)])
def test_a_scale_is_rounded_up_to_a_power_of_two(x, power):
    assert power_of_two(torch.tensor([x])).item() == power


def test_every_power_of_two_of_a_scale_is_kept():
    powers = [2.0**exponent for exponent in range(-127, 128)]
    assert power_of_two(torch.tensor(powers)).tolist() == powers


def test_a_format_that_is_made_up_has_the_ends_of_its_bits():
    assert Float("E3M2", 3, 2, 28.0).least == 0.0625
