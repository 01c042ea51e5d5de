"""One look at a callable: the cotangents that its outputs get."""
import pytest
import torch
from torch import nn

from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import validate
from benchmarks.measure.names import gradient_of_input
from benchmarks.measure.observing import Work, cotangent, distance, norm, rounding_in
from benchmarks.measure.truth import Truth

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("seed", [0, 1, 7, 42, 1000, 1234])
def test_a_cotangent_is_no_input_that_somebody_draws(seed):
    """After `torch.manual_seed(0)` the first tensor of the output's shape would be it, with the obvious seeds."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    for own in range(3):
        given = cotangent(x, 0, 0, own)
        cosine = (given * x).sum() / (given.norm() * x.norm())
        assert abs(cosine) < 0.5 and torch.equal(given, given.bfloat16().float())


@pytest.mark.parametrize("shape, last", [
    ((2, 3, 4, 5), torch.channels_last), ((2, 3, 4, 5, 6), torch.channels_last_3d)])
def test_a_cotangent_is_laid_out_as_the_output_is(shape, last):
    """Its values are the same: a layer behind a channels-last one would give it so."""
    output = torch.randn(shape)
    plain, given = (cotangent(y, 0, 0, 0) for y in (output, output.contiguous(memory_format=last)))
    assert given.is_contiguous(memory_format=last) and not given.is_contiguous() and torch.equal(given, plain)
    assert plain.is_contiguous() and cotangent(output.transpose(0, 1), 0, 0, 0).is_contiguous()
    assert cotangent(torch.randn(2, 1, 4, 1), 0, 0, 0).is_contiguous()         # both at once


def test_the_gradient_of_a_norm_is_told_whatever_seed_its_input_has():
    """Parallel to its input a cotangent leaves a gradient that is all rounding."""
    torch.manual_seed(0)
    x, norm = torch.randn(512, 256), nn.RMSNorm(256, eps=1e-6, elementwise_affine=False)
    judgement = validate(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), norm, x)
    precision = {check.name: check.error for check in judgement if check.question == "precision"}
    assert judgement.proven and precision["gradient of input 0"] < 1e-6


def test_cotangents_differ_by_output_number_and_seed():
    output = torch.zeros(4, 4)
    drawn = [cotangent(output, *which) for which in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_reference_near_a_kink_says_how_far_its_own_gradients_may_be_off():
    """A rounding of the input moves a ReLU to its other side: who lands there makes no mistake."""
    x = torch.tensor([[1.0, -1.0 + 2**-24]])
    truth = Truth(lambda x: torch.relu(x.sum(-1)), Work(Inputs.of(x)))
    name = gradient_of_input("input 0")
    exact = truth.exact.gradients[name]
    assert distance(truth.own(None).gradients[name], exact) == 0
    *_, furthest = truth.further(None)
    assert distance(furthest.gradients[name], exact) == pytest.approx(norm(exact))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("value, truth, apart", [
    ([3.0, 4.0], [0.0, 0.0], 5.0), ([INF, 4.0], [INF, 1.0], 3.0), ([NAN, 4.0], [NAN, 1.0], 3.0),
    ([INF, 0.0], [-INF, 0.0], INF), ([INF, 0.0], [1.0, 0.0], INF), ([NAN, 0.0], [1.0, 0.0], INF),
    ([1.0, 0.0], [NAN, 0.0], INF), ([3 + 4j, 0.0], [0.0, 0.0], 5.0), ([2**40, 0], [0, 0], 2.0**40),
    ([True, True], [True, False], 1.0)])
def test_what_is_not_finite_on_both_sides_alike_is_no_distance(value, truth, apart):
    kind = torch.complex64 if isinstance(value[0], complex) else None
    given = torch.tensor(value, dtype=kind), torch.tensor(truth, dtype=kind)
    assert distance([given[0]], [given[1]]) == pytest.approx(apart)


@pytest.mark.parametrize("values, size", [([3.0, 4.0], 5.0), ([3.0, NAN, 4.0], 5.0), ([3.0, -INF], 3.0),
                                          ([3 + 4j], 5.0), ([3, 4], 5.0), ([], 0.0)])
def test_the_norm_of_what_is_not_finite_is_that_of_the_rest(values, size):
    assert norm([torch.tensor(values)]) == pytest.approx(size)


@pytest.mark.parametrize("allowed, numerics, off_by, reached", [
    (True, None, 2**-12, False), (False, None, 2**-12, False), (False, "tf32", 2**-12, True),
    (False, "float16", 2**-12, True), (False, "float16", 2**-8, False), (False, "bfloat16", 2**-8, True)])
def test_a_kink_is_as_wide_as_a_rounding_of_what_is_multiplied_in(allowed, numerics, off_by, reached, monkeypatch):
    """TF32 on a GPU alone, or where it is declared: a rounding of FP32 would not reach the other side."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    x = torch.tensor([[1.0, -1.0 + off_by]])
    truth = Truth(lambda x: torch.relu(x.sum(-1)), Work(Inputs.of(x)))
    name = gradient_of_input("input 0")
    *_, furthest = truth.further(numerics)
    off = distance(furthest.gradients[name], truth.exact.gradients[name])
    assert (off > 0) == reached


def in_fp32(value) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


@pytest.mark.parametrize("call, expected", [
    (lambda x: in_fp32(0.1) * x, torch.float32), (lambda x: in_fp32(0.5) * x, None),
    (lambda x: torch.sqrt(in_fp32(2.0 / torch.pi)) * x, torch.float32), (lambda x: 0.1 * x, None),
    (lambda x: torch.tensor(0.1) * x, None), (lambda x: x + torch.tensor([0.1]), None),
    (lambda x: torch.tensor(0.1, dtype=torch.float64) * x, None), (lambda x: x + in_fp32([0.1]), torch.float32)])
def test_a_number_that_was_rounded_to_fp32_counts(call, expected):
    """Without a dtype it is in FP64 where all else is."""
    assert rounding_in(call, Work(Inputs.of(torch.randn(3, 4)))) == expected


def test_the_library_is_right_in_place_of_a_formula_with_a_rounded_number():
    def by_hand(x):
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * x**3)))
    x = torch.randn(8, 16)
    assert validate(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), by_hand, (x,)).proven
    assert not validate(lambda x: torch.nn.functional.gelu(x), by_hand, (x,)).passed
