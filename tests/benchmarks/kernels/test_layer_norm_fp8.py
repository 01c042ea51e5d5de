"""LayerNorm that writes FP8, its largest value and its gradient, against FP64; without a GPU, in the interpreter."""
import functools
import math
import re
import textwrap

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
from benchmarks.kernels.triton import quantize
from benchmarks.kernels.triton.quantize import layer_norm_fp8
from tests.helpers import kernel_cases as cases

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


def plain(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def arguments(shape, dtype, scale=1.0):
    """x, weight around 1 and bias around 0; all ask for gradients."""
    x = cases.random(shape, dtype, scale)
    weight = 1 + cases.random(shape[-1:], dtype, 0.3, seed=1)
    bias = cases.random(shape[-1:], dtype, seed=2)
    return [t.requires_grad_() for t in (x, weight, bias)]


def scale_of(value):
    return torch.full((), value, device=cases.DEVICE)


def fp8_distance(y, exact):
    """How many FP8 numbers lie between y and `exact` rounded, at most; NaN against anything else is many."""
    def place(values):
        bits = values.to(torch.float8_e4m3fn).view(torch.uint8).int()
        return torch.where(bits < 128, bits, 128 - bits).masked_fill(values.isnan(), 1000)
    return (place(y.float()) - place(exact)).abs()


def assert_right(shape, scale, dtype):
    given = [t.detach() for t in arguments(shape, dtype)]
    y, amax, _ = layer_norm_fp8(*given, scale_of(scale))
    exact = plain(*(t.double() for t in given))
    distance = fp8_distance(y, (exact * scale).clamp(-448, 448))
    assert y.shape == shape and y.dtype == torch.float8_e4m3fn
    assert distance.max() <= 1 and (distance > 0).sum() <= 1 + 1e-3 * y.numel()        # a tie may fall either way
    assert math.isclose(amax.item(), exact.abs().max().item(), rel_tol=1e-5)


def assert_gradient_is_right(shape, dtype):
    given, dy = arguments(shape, dtype), cases.random(shape, dtype, seed=5)
    y, amax, proxy = layer_norm_fp8(*given, scale_of(300.0))
    assert not y.requires_grad and not amax.requires_grad
    doubles = [t.detach().double().requires_grad_() for t in given]
    gradients = torch.autograd.grad(proxy, given, dy)
    exact = torch.autograd.grad(plain(*doubles), doubles, dy.double())
    if shape[-1] == 1:                                      # nothing but the bias counts then
        gradients, exact = gradients[2:], exact[2:]
    cases.assert_close(gradients, exact, 3 * cases.GATES[dtype])


@pytest.mark.unit
@cases.each_case
@pytest.mark.parametrize("scale", [1.0, 300.0])             # the second saturates
def test_output_and_largest_value_are_right(shape, scale, dtype):
    assert_right(shape, scale, dtype)


@pytest.mark.unit
@cases.each_case
def test_the_gradient_is_layer_norm_s(shape, dtype):
    """Straight through: also where the forward saturates."""
    assert_gradient_is_right(shape, dtype)


@pytest.mark.unit
def test_the_proxy_has_no_values_and_no_memory():
    *_, proxy = layer_norm_fp8(*arguments((2, 3, 40), torch.float16), scale_of(1.0))
    assert proxy.shape == (2, 3, 40) and proxy.dtype == torch.float16 and proxy.isnan().all()
    assert proxy.untyped_storage().nbytes() == 2


def product():
    """The example of the module's docstring."""
    example = re.search(r"^    class Product.*?\n(?=\S)", quantize.__doc__, re.DOTALL | re.MULTILINE)[0]
    names = {"torch": torch}
    exec(textwrap.dedent(example), names)
    return names["Product"]


def through_a_product(given, w, scale, Product):
    y, _, proxy = layer_norm_fp8(*given, scale)
    return Product.apply(proxy, y, scale, w)


@pytest.mark.unit
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 40)], ids=str)
def test_before_a_product(shape):
    given = arguments(shape, torch.float32)
    w = cases.random((40, 24), seed=7).requires_grad_()
    z = through_a_product(given, w, scale_of(50.0), product())
    dz = cases.random(z.shape, seed=8)
    gradients = torch.autograd.grad(z, (*given, w), dz)
    doubles = [t.detach().double().requires_grad_() for t in (*given, w)]
    right = plain(*doubles[:3]) @ doubles[3]
    exact = torch.autograd.grad(right, doubles, dz.double())
    cases.assert_close(gradients[:3], exact[:3], 3 * cases.GATES[torch.float32])
    of_eight_bits = (z.detach(), gradients[3]), (right.detach(), exact[3])
    cases.assert_close(*of_eight_bits, 4e-2)


@pytest.mark.unit
def test_a_proxy_without_a_gradient_is_nothing_to_do():
    class Frozen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, proxy, w):
            return 2 * w

        @staticmethod
        def backward(ctx, dz):
            return None, 2 * dz
    given = arguments((6, 40), torch.float32)
    w = torch.ones((), device=cases.DEVICE, requires_grad=True)
    *_, proxy = layer_norm_fp8(*given, scale_of(1.0))
    Frozen.apply(proxy, w).backward()
    assert w.grad == 2
    assert all(t.grad is None for t in given)


@pytest.mark.unit
def test_the_proxy_takes_a_gradient_that_is_not_contiguous():
    given = arguments((6, 40), torch.float32)
    *_, proxy = layer_norm_fp8(*given, scale_of(1.0))
    dy = cases.random((40, 6), seed=5).t()
    gradients = torch.autograd.grad(proxy, given, dy, retain_graph=True)
    cases.assert_same_bits(gradients, torch.autograd.grad(proxy, given, dy.contiguous()))


@pytest.mark.unit
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_small_and_large_numbers(scale):
    given = [t.detach() for t in arguments((4, 100), torch.float32, scale)]
    y, amax, _ = layer_norm_fp8(*given, torch.full((1,), 10.0, device=cases.DEVICE))
    exact = plain(*(t.double() for t in given))
    assert fp8_distance(y, exact * 10).max() <= 1
    assert math.isclose(amax.item(), exact.abs().max().item(), rel_tol=1e-4)


@pytest.mark.unit
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_nan_in_its_row(bad):
    given = [t.detach() for t in arguments((4, 33), torch.float32)]
    given[0][2, 5] = bad
    y, amax, _ = layer_norm_fp8(*given, scale_of(1.0))
    assert torch.equal(y.float().isnan(), plain(*given).isnan())
    assert y.float().isnan().sum() == 33
    assert amax.isnan()


@pytest.mark.unit
def test_an_infinite_layer_norm_saturates_and_is_seen_in_amax():
    x, weight, bias = [t.detach() for t in arguments((4, 33), torch.float32)]
    bias[3], bias[7] = math.inf, -math.inf
    y, amax, _ = layer_norm_fp8(x, weight, bias, scale_of(1.0))
    assert y.float()[:, 3].eq(448).all() and y.float()[:, 7].eq(-448).all()
    assert amax.item() == math.inf


def everything(given):
    """FP8, the largest value and all gradients."""
    y, amax, proxy = layer_norm_fp8(*given, scale_of(1.0))
    dy = cases.random((12, 40), torch.float16, seed=5)[:len(y)]
    return y.float(), amax, *torch.autograd.grad(proxy, given, dy)


@pytest.mark.unit
def test_strided_input_and_many_rows_a_program(monkeypatch):
    given = arguments((12, 40), torch.float16)
    expected = everything(given)
    monkeypatch.setattr(quantize, "PROGRAMS", 5)
    cases.assert_same_bits(everything(given), expected)
    cases.assert_same_bits(everything(cases.strided(given)), expected)


@pytest.mark.unit
def test_no_rows_at_all():
    y, amax, dx, dweight, dbias = everything(arguments((0, 40), torch.float16))
    assert y.shape == dx.shape == (0, 40)
    assert amax.item() == 0
    assert not dweight.any() and not dbias.any()


@pytest.mark.unit
@pytest.mark.parametrize("call, said", [
    (lambda x: layer_norm_fp8(x, x[0], x[0, 1:], x[:1, 0]), r"bias is \(7,\) .*: give \(8,\)"),
    (lambda x: layer_norm_fp8(x, x[0], x[0], x[:, 0]), r"scale is \(4,\) .*: give one float32 element"),
    (lambda x: layer_norm_fp8(x, x[0], x[0], x[0, 0].half()), r"scale is \(\) torch.float16"),
    (lambda x: layer_norm_fp8(x, x[0], x[0], 50.0), "scale is 50.0: give one float32 element"),
])
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call(torch.randn(4, 8, device=cases.DEVICE))


@pytest.mark.stress
@pytest.mark.gpu
@cases.each_dtype
@pytest.mark.parametrize("shape", [(16384, 4096), (100_000, 96), (4097, 4097), (64, 65536)], ids=str)
def test_sizes_of_a_transformer(shape, dtype):
    assert_right(shape, 300.0, dtype)
    assert_gradient_is_right(shape, dtype)


@pytest.mark.integration
@pytest.mark.gpu
def test_under_the_compiler(fresh_dynamo):
    given = arguments((64, 256), torch.float16)
    w = cases.random((256, 32), torch.float16, seed=7).requires_grad_()
    call = functools.partial(through_a_product, w=w, scale=scale_of(50.0), Product=product())
    compiled = torch.compile(call, fullgraph=True)
    values = cases.outputs(lambda *given: compiled(given), given)
    cases.assert_close(values, cases.outputs(lambda *given: call(given), given), 1e-3)
