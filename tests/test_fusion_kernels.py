"""Activations, softmax with dropout, LayerNorm into FP8 against FP64: outputs, gradients, odd shapes, strange values.

Without a GPU they run through Triton's interpreter, which conftest.py switches on, on small shapes.
"""
import functools
import math
import re
import textwrap

import pytest
import torch
from kernel_cases import CASES, DEVICE, DTYPES, GATES
from torch.nn import functional as F

pytest.importorskip("triton")
from benchmarks import operations
from benchmarks.kernels import activations, quantize, softmax
from common import oracle

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:invalid value encountered"),
              pytest.mark.filterwarnings("ignore:overflow encountered")]


def random(shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, device=DEVICE)).to(dtype)


def outputs(function, given, seed=1):
    """The output, and the gradients of all arguments for a random cotangent of it."""
    found = function(*given)
    return [found.detach(), *torch.autograd.grad(found, given, random(found.shape, found.dtype, seed=seed))]


def errors(kernel, truth, given):
    cotangent = random(given[0].shape, given[0].dtype, seed=1)       # rounded to the kernel's dtype for both
    doubles = [t.detach().double().requires_grad_() for t in given]
    y = truth(*doubles)
    exact = [y.detach(), *torch.autograd.grad(y, doubles, cotangent.double())]
    return [oracle.relative_error(value, right) for value, right in zip(outputs(kernel, given), exact, strict=True)]


# activation -> (the kernel, what it computes, how many arguments have x's shape, how many are [F])
ACTIVATIONS = {
    "silu": (activations.silu, operations.silu, 1, 0),
    "swiglu": (activations.swiglu, operations.swiglu, 2, 0),
    "bias_gelu": (activations.bias_gelu, operations.bias_gelu, 1, 1),
}
each_activation = pytest.mark.parametrize("name", ACTIVATIONS)


def arguments(name, shape, dtype=torch.float32, scale=1.0):
    _, _, full, vectors = ACTIVATIONS[name]
    shapes = [shape] * full + [shape[-1:]] * vectors
    return [random(one, dtype, scale, seed=10 + i).requires_grad_() for i, one in enumerate(shapes)]


@each_activation
@pytest.mark.parametrize("shape, dtype", CASES, ids=str)
def test_activations_are_right(name, shape, dtype):
    found = errors(*ACTIVATIONS[name][:2], arguments(name, shape, dtype))
    assert max(found) < 3 * GATES[dtype], found


@each_activation
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_small_and_large_activations(name, scale):
    assert max(errors(*ACTIVATIONS[name][:2], arguments(name, (4, 100), scale=scale))) < 1e-5


@each_activation
def test_activations_of_inputs_that_are_not_contiguous(name):
    given = arguments(name, (6, 40))
    turned = [t.detach().t().contiguous().t().requires_grad_() if t.ndim == 2
              else torch.stack([t.detach()] * 2, 1)[:, 0].requires_grad_() for t in given]
    assert not any(t.is_contiguous() for t in turned)
    for a, b in zip(outputs(ACTIVATIONS[name][0], given), outputs(ACTIVATIONS[name][0], turned), strict=True):
        assert torch.equal(a, b)


@each_activation
@pytest.mark.parametrize("large", [1e14, -1e14, 1e16, -1e18])
def test_gradients_at_large_values_are_eager_s(name, large):
    kernel, eager, *_ = ACTIVATIONS[name]
    given = arguments(name, (4, 33))
    with torch.no_grad():
        given[0][2, 5] = large
    expected = outputs(eager, given)
    assert all(t.isfinite().all() for t in expected)
    for value, right in zip(outputs(kernel, given), expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)


@each_activation
@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_activations_of_strange_values_are_eager_s(name, bad, dtype):
    kernel, eager, *_ = ACTIVATIONS[name]
    given = [t.detach() for t in arguments(name, (4, 33), dtype)]
    given[0][2, 5] = bad
    # In 16 bits eager rounds what it writes between two operations.
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (5 * GATES[dtype],) * 2
    torch.testing.assert_close(kernel(*given), eager(*given), rtol=rtol, atol=atol, equal_nan=True)


@each_activation
def test_activations_of_no_rows(name):
    y, *gradients = outputs(ACTIVATIONS[name][0], arguments(name, (0, 8)))
    assert y.shape == gradients[0].shape == (0, 8) and not gradients[-1].any()


@each_activation
def test_every_run_of_an_activation_gives_the_same_bits(name, monkeypatch):
    monkeypatch.setattr(activations, "PROGRAMS", 3)         # fewer than tiles: each adds up several
    for tile in (activations.SMALL, activations.LARGE):
        monkeypatch.setitem(tile, "elements", 16)
    given = arguments(name, (22, 10), torch.float16)
    assert max(errors(*ACTIVATIONS[name][:2], given)) < 3 * GATES[torch.float16]
    for a, b in zip(outputs(ACTIVATIONS[name][0], given), outputs(ACTIVATIONS[name][0], given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("halves", [lambda x: x.chunk(2, -1), lambda x: (x[..., ::2], x[..., 1::2]),
                                    lambda x: (x[:1, :, :24].expand(2, 5, 24), x[..., 24:])],
                         ids=["halves", "strided", "expanded"])
def test_swiglu_of_one_tensor(halves, monkeypatch):
    x = random((2, 5, 48)).requires_grad_()
    found, exact = (outputs(lambda x, f=f: f(*halves(x)), [x]) for f in (activations.swiglu, ACTIVATIONS["swiglu"][1]))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_halves_of_one_tensor_are_not_copied():
    x = random((2, 5, 48))
    for half in x.chunk(2, -1):
        assert activations._evenly_spaced(half).data_ptr() == half.data_ptr()


@pytest.mark.parametrize("call, said", [
    (lambda x: activations.silu(x.double()), "x is torch.float64: give float16, bfloat16 or float32"),
    (lambda x: activations.silu(x[0, 0]), r"x is \(\): give \[..., F\] with F of at least 1"),
    (lambda x: activations.silu(x[:, :0]), r"x is \(4, 0\)"),
    (lambda x: activations.swiglu(x, x[:2]), r"b is \(2, 8\) .*: give \(4, 8\) .* as a has it"),
    (lambda x: activations.swiglu(x, x.half()), r"b is \(4, 8\) torch.float16"),
    (lambda x: activations.bias_gelu(x, x[0, 1:]), r"bias is \(7,\) .*: give \(8,\)"),
    (lambda x: activations.bias_gelu(x, x[0].to("meta")), r"bias is \(8,\) torch.float32 on meta"),
    (lambda x: softmax.softmax_dropout(x, 0.1, 1), r"scores is \(4, 8\): give \[..., S, S\] with S from 1 to"),
    (lambda x: softmax.softmax_dropout(x[:0, :0], 0.1, 1), r"scores is \(0, 0\)"),
    (lambda x: softmax.softmax_dropout(x[0], 0.1, 1), r"scores is \(8,\)"),
    (lambda x: softmax.softmax_dropout(x[:, :4].long(), 0.1, 1), "scores is torch.int64"),
    (lambda x: softmax.softmax_dropout(x[:, :4], 1.0, 1), "p is 1.0: give 0 <= p < 1"),
    (lambda x: softmax.softmax_dropout(x[:, :4], 0.999999, 1), "p is 0.999999: .* and 1 - p more than 1/131072"),
    (lambda x: softmax.softmax_dropout(x[:, :4], -0.1, 1), "p is -0.1"),
    (lambda x: softmax.softmax_dropout(x[:, :4], math.nan, 1), "p is nan"),
    (lambda x: softmax.softmax_dropout(x[:, :4], 0.1, 1.5), "seed is 1.5: give an int of 64 bits"),
    (lambda x: softmax.softmax_dropout(x[:, :4], 0.1, 2**63), "seed is 9223372036854775808"),
    (lambda x: softmax.softmax_dropout(x[:, :4], 0.1, x[0].long()), r"seed is \(8,\) torch.int64 .*: give one int64"),
    (lambda x: softmax.softmax_dropout(x[:, :4], 0.1, x[0, 0].int()), r"seed is \(\) torch.int32"),
    (lambda x: quantize.layer_norm_fp8(x, x[0], x[0, 1:], x[:1, 0]), r"bias is \(7,\) .*: give \(8,\)"),
    (lambda x: quantize.layer_norm_fp8(x, x[0], x[0], x[:, 0]), r"scale is \(4,\) .*: give one float32 element"),
    (lambda x: quantize.layer_norm_fp8(x, x[0], x[0], x[0, 0].half()), r"scale is \(\) torch.float16"),
    (lambda x: quantize.layer_norm_fp8(x, x[0], x[0], 50.0), "scale is 50.0: give one float32 element"),
])
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call(torch.randn(4, 8, device=DEVICE))


def kept(shape, p, seed):
    """The elements that dropout keeps: where the softmax of equal scores does not become 0."""
    return softmax.softmax_dropout(torch.zeros(shape, device=DEVICE), p, seed, causal=False) != 0


def plain_softmax(scores, causal, keep=None, p=0.0):
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    y = scores.softmax(-1)
    return y if keep is None else y * keep / (1 - p)


@each_dtype
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape, p", [((2, 1, 1), 0.3), ((3, 3), 0.5), ((1, 2, 34, 34), 0.1), ((2, 48, 48), 0.0)],
                         ids=str)
def test_softmax_is_right(shape, p, causal, dtype, monkeypatch):
    monkeypatch.setattr(softmax, "NARROWEST", 16)           # several bands in a small tensor
    monkeypatch.setattr(softmax, "TILE", 512)
    keep = kept(shape, p, 5) if p else None
    found = errors(lambda scores: softmax.softmax_dropout(scores, p, 5, causal),
                   lambda scores: plain_softmax(scores, causal, keep, p), [random(shape, dtype, 3.0).requires_grad_()])
    if shape[-1] == 1:                                      # the only weight is 1, whatever the score
        found = found[:1]
    assert max(found) < 3 * GATES[dtype], found


def test_softmax_of_a_thousand_keys(monkeypatch):
    monkeypatch.setattr(softmax, "TILE", 65536)             # fewer, larger programs: the interpreter's time is theirs
    given = [random((1000, 1000)).requires_grad_()]
    found = errors(lambda s: softmax.softmax_dropout(s, 0.0, 5), lambda s: plain_softmax(s, True), given)
    assert max(found) < 3 * GATES[torch.float32]


@pytest.mark.parametrize("offset, scale", [(0, 1e-3), (1e4, 3), (-1e6, 3)])
def test_softmax_of_small_and_large_scores(offset, scale):
    given = [(offset + random((2, 60, 60), scale=scale)).requires_grad_()]
    found = errors(lambda s: softmax.softmax_dropout(s, 0.0, 1), lambda s: plain_softmax(s, True), given)
    assert max(found) < 1e-5, found


def test_softmax_where_one_score_outweighs_all():
    x = random((2, 60, 60), scale=1e4).requires_grad_()
    y, dx = outputs(lambda s: softmax.softmax_dropout(s, 0.0, 1), [x])
    torch.testing.assert_close(y.double(), plain_softmax(x.detach().double(), True), rtol=1e-5, atol=1e-6)
    assert dx.abs().max() < 1e-3                            # in FP64, too, hardly any is left


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_softmax_of_strange_scores_is_eager_s(bad, p):
    x = random((24, 24))
    x[0, 0] = x[9, 4] = x[15, 20] = bad                     # the last is beyond the diagonal
    y, eager = softmax.softmax_dropout(x, p, 3), plain_softmax(x, True)
    if p:
        eager = eager * kept(x.shape, p, 3) * (1 / (1 - p))
    torch.testing.assert_close(y, eager, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_beyond_the_diagonal_are_zeros_that_nothing_reads(monkeypatch):
    monkeypatch.setattr(softmax, "NARROWEST", 16)
    beyond = torch.ones(100, 100, dtype=torch.bool, device=DEVICE).triu(1)
    x, dy = random((100, 100)), random((100, 100), seed=2)
    runs = []
    for filler in (0.0, math.nan):
        scores = x.masked_fill(beyond, filler).requires_grad_()
        y = softmax.softmax_dropout(scores, 0.2, 1)
        runs.append((y.detach(), *torch.autograd.grad(y, scores, dy.masked_fill(beyond, filler))))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b) and a[beyond].eq(0).all()


def test_softmax_of_scores_that_are_not_contiguous():
    x = random((4, 20, 20))
    for turned in (x.mT.contiguous().mT, torch.stack([x] * 2, -1)[..., 0]):
        assert not turned.is_contiguous()
        a, b = (outputs(lambda s: softmax.softmax_dropout(s, 0.3, 4), [t.detach().requires_grad_()])
                for t in (x, turned))
        assert all(map(torch.equal, a, b))
    assert softmax.softmax_dropout(x[:0], 0.3, 4).shape == (0, 20, 20)


def test_dropout_depends_on_the_seed_and_the_place_alone(monkeypatch):
    x = random((2, 50, 50))
    first = softmax.softmax_dropout(x, 0.3, 7)
    assert torch.equal(first, softmax.softmax_dropout(x, 0.3, torch.tensor([7], device=DEVICE)))
    assert not torch.equal(first, softmax.softmax_dropout(x, 0.3, 8))
    assert torch.equal(first != 0, (kept(x.shape, 0.3, 7) & (plain_softmax(x, True) != 0)))
    monkeypatch.setattr(softmax, "TILE", 256)
    monkeypatch.setattr(softmax, "NARROWEST", 32)
    torch.testing.assert_close(first, softmax.softmax_dropout(x, 0.3, 7))
    assert torch.equal(first != 0, softmax.softmax_dropout(x, 0.3, 7) != 0)


def test_the_bits_are_philox_s():
    """Counter 0 and key 0 give these four words, the known answer of Philox 4x32 with seven rounds."""
    words = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    for p in (0.2, 0.5, 0.7, 0.8):
        first = kept((8, 8), p, 0)[0].tolist()
        # Which half serves which neighbour is the kernel's own affair; how many stay is not.
        assert sum(first) == sum(half >= round(p * 65536) for half in halves)


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.double().flatten(), b.double().flatten()]))[0, 1].abs().item()


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_right_share_independently(p, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(softmax, "TILE", 65536)         # fewer, larger programs: the interpreter's time is theirs
    size = 2048 if DEVICE == "cuda" else 256
    keep = kept((size, size), p, 11)
    sigmas = 5 / size                                       # five standard errors of a correlation of size^2 pairs
    assert abs(keep.double().mean().item() - (1 - p)) < sigmas * math.sqrt(p * (1 - p))
    for step in (1, 2, 4, 7, 8, 16, 64):                    # eight neighbours share a call
        assert correlation(keep[:, step:], keep[:, :-step]) < 1.2 * sigmas
        assert correlation(keep[step:], keep[:-step]) < 1.2 * sigmas
        assert correlation(keep[step:, step:], keep[:-step, :-step]) < 1.5 * sigmas
    for seed in (12, 11 + 2**32):
        assert correlation(keep, kept((size, size), p, seed)) < sigmas
    places = keep.view(size, -1, 8).double().mean((0, 1))   # of the eight in a call, none is kept more often
    assert (places - (1 - p)).abs().max() < sigmas * math.sqrt(8 * p * (1 - p))


def test_every_run_of_softmax_gives_the_same_bits():
    given = [random((2, 40, 40), torch.float16).requires_grad_()]
    runs = [outputs(lambda s: softmax.softmax_dropout(s, 0.4, -3), given) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def norm_arguments(shape, dtype, scale=1.0):
    return [random(shape, dtype, scale), 1 + random(shape[-1:], dtype, 0.3, seed=1), random(shape[-1:], dtype, seed=2)]


def fp8_distance(y, exact):
    """How many FP8 numbers lie between y and `exact` rounded, at most; NaN against anything else is many."""
    def place(values):
        bits = values.to(torch.float8_e4m3fn).view(torch.uint8).int()
        return torch.where(bits < 128, bits, 128 - bits).masked_fill(values.isnan(), 1000)
    return (place(y.float()) - place(exact)).abs()


@pytest.mark.parametrize("shape, dtype", CASES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 300.0])             # the second saturates
def test_layer_norm_fp8_is_right(shape, scale, dtype):
    given = norm_arguments(shape, dtype)
    y, amax, _ = quantize.layer_norm_fp8(*given, torch.tensor(scale, device=DEVICE))
    exact = layer_norm(*(t.double() for t in given))
    distance = fp8_distance(y, (exact * scale).clamp(-448, 448))
    assert y.shape == shape and y.dtype == torch.float8_e4m3fn
    assert distance.max() <= 1 and (distance > 0).sum() <= 1 + 1e-3 * y.numel()        # a tie may fall either way
    assert math.isclose(amax.item(), exact.abs().max().item(), rel_tol=1e-5)


@pytest.mark.parametrize("shape, dtype", [case for case in CASES if case[0][-1] > 1], ids=str)
def test_the_gradient_of_layer_norm_fp8_is_layer_norm_s(shape, dtype):
    """Straight through: also where the forward saturates."""
    given = [t.requires_grad_() for t in norm_arguments(shape, dtype)]
    dy = random(shape, dtype, seed=5)
    y, amax, proxy = quantize.layer_norm_fp8(*given, torch.full((), 300.0, device=DEVICE))
    assert not y.requires_grad and not amax.requires_grad
    doubles = [t.detach().double().requires_grad_() for t in given]
    exact = torch.autograd.grad(layer_norm(*doubles), doubles, dy.double())
    assert max(map(oracle.relative_error, torch.autograd.grad(proxy, given, dy), exact)) < 3 * GATES[dtype]


def test_the_proxy_has_no_values_and_no_memory():
    *_, proxy = quantize.layer_norm_fp8(*norm_arguments((2, 3, 40), torch.float16), torch.ones(1, device=DEVICE))
    assert proxy.shape == (2, 3, 40) and proxy.dtype == torch.float16 and proxy.isnan().all()
    assert proxy.untyped_storage().nbytes() == 2


def product():
    """The example of the module's docstring."""
    found = {"torch": torch}
    exec(textwrap.dedent(re.search(r"^    class Product.*?\n(?=\S)", quantize.__doc__, re.DOTALL | re.MULTILINE)[0]),
         found)
    return found["Product"]


def through_a_product(given, w, scale, Product):
    y, _, proxy = quantize.layer_norm_fp8(*given, scale)
    return Product.apply(proxy, y, scale, w)


@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 40)], ids=str)
def test_layer_norm_fp8_before_a_product(shape):
    given = [t.requires_grad_() for t in norm_arguments(shape, torch.float32)]
    w, scale = random((40, 24), seed=7).requires_grad_(), torch.full((), 50.0, device=DEVICE)
    z = through_a_product(given, w, scale, product())
    dz = random(z.shape, seed=8)
    doubles = [t.detach().double().requires_grad_() for t in (*given, w)]
    right = layer_norm(*doubles[:3]) @ doubles[3]
    found, exact = torch.autograd.grad(z, (*given, w), dz), torch.autograd.grad(right, doubles, dz.double())
    assert max(map(oracle.relative_error, found[:3], exact[:3])) < 3 * GATES[torch.float32]
    assert oracle.relative_error(z.detach(), right.detach()) < 4e-2 and oracle.relative_error(found[3], exact[3]) < 4e-2


def test_a_proxy_without_a_gradient_is_nothing_to_do():
    class Frozen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, proxy, w):
            return 2 * w

        @staticmethod
        def backward(ctx, dz):
            return None, 2 * dz
    given = [t.requires_grad_() for t in norm_arguments((6, 40), torch.float32)]
    w = torch.ones((), device=DEVICE, requires_grad=True)
    Frozen.apply(quantize.layer_norm_fp8(*given, torch.ones(1, device=DEVICE))[2], w).backward()
    assert w.grad == 2 and all(t.grad is None for t in given)


def test_the_proxy_takes_a_gradient_that_is_not_contiguous():
    given = [t.requires_grad_() for t in norm_arguments((6, 40), torch.float32)]
    *_, proxy = quantize.layer_norm_fp8(*given, torch.ones(1, device=DEVICE))
    dy = random((40, 6), seed=5)
    found = [torch.autograd.grad(proxy, given, grad, retain_graph=True) for grad in (dy.t(), dy.t().contiguous())]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_layer_norm_fp8_of_small_and_large_numbers(scale):
    given = norm_arguments((4, 100), torch.float32, scale)
    y, amax, *_ = quantize.layer_norm_fp8(*given, torch.full((1,), 10.0, device=DEVICE))
    exact = layer_norm(*(t.double() for t in given))
    assert fp8_distance(y, exact * 10).max() <= 1 and math.isclose(amax.item(), exact.abs().max().item(), rel_tol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_nan_in_fp8(bad):
    given = norm_arguments((4, 33), torch.float32)
    given[0][2, 5] = bad
    y, amax, *_ = quantize.layer_norm_fp8(*given, torch.ones(1, device=DEVICE))
    assert torch.equal(y.float().isnan(), layer_norm(*given).isnan()) and amax.isnan()
    assert y.float().isnan().sum() == 33


def test_an_infinite_layer_norm_saturates_and_is_seen_in_amax():
    given = norm_arguments((4, 33), torch.float32)
    given[2][3], given[2][7] = math.inf, -math.inf
    y, amax, *_ = quantize.layer_norm_fp8(*given, torch.ones(1, device=DEVICE))
    assert y.float()[:, 3].eq(448).all() and y.float()[:, 7].eq(-448).all() and amax.item() == math.inf


def test_layer_norm_fp8_of_strided_input_of_no_rows_and_of_many_rows_a_program(monkeypatch):
    one = torch.ones((), device=DEVICE)
    given = [t.requires_grad_() for t in norm_arguments((12, 40), torch.float16)]
    dy = random((12, 40), torch.float16, seed=5)

    def all_of(given):
        y, amax, proxy = quantize.layer_norm_fp8(*given, one)
        return y.float(), amax, *torch.autograd.grad(proxy, given, dy[:len(y)])
    first = all_of(given)
    monkeypatch.setattr(quantize, "PROGRAMS", 5)
    for again in (given, [given[0].detach().t().contiguous().t().requires_grad_(), *given[1:]]):
        assert all(map(torch.equal, first, all_of(again)))
    y, amax, dx, dweight, dbias = all_of([given[0].detach()[:0].requires_grad_(), *given[1:]])
    assert y.shape == dx.shape == (0, 40) and amax.item() == 0 and not dweight.any() and not dbias.any()


@pytest.mark.gpu
@each_activation
@each_dtype
@pytest.mark.parametrize("shape", [(16384, 4096), (4096, 16384), (100_000, 96), (4097, 4097)], ids=str)
def test_activations_in_a_transformer_s_sizes(name, shape, dtype):
    assert max(errors(*ACTIVATIONS[name][:2], arguments(name, shape, dtype))) < 3 * GATES[dtype]


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(2, 4, 2048, 2048), (1, 1000, 1000), (1, 4097, 4097), (1, 16384, 16384)], ids=str)
def test_softmax_in_a_transformer_s_sizes(shape, causal, dtype):
    keep = kept(shape, 0.1, 5)
    found = errors(lambda s: softmax.softmax_dropout(s, 0.1, 5, causal), lambda s: plain_softmax(s, causal, keep, 0.1),
                   [random(shape, dtype, 3.0).requires_grad_()])
    assert max(found) < 3 * GATES[dtype], found


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("shape", [(16384, 4096), (100_000, 96), (4097, 4097), (64, 65536)], ids=str)
def test_layer_norm_fp8_in_a_transformer_s_sizes(shape, dtype):
    test_layer_norm_fp8_is_right(shape, 300.0, dtype)
    test_the_gradient_of_layer_norm_fp8_is_layer_norm_s(shape, dtype)


@pytest.mark.gpu
def test_a_captured_graph_draws_by_the_seed_it_finds():
    x, seed = random((2, 256, 256)), torch.tensor(1, device=DEVICE)
    softmax.softmax_dropout(x, 0.5, seed)                   # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax.softmax_dropout(x, 0.5, seed)
    for value in (1, 2):
        seed.fill_(value)
        graph.replay()
        assert torch.equal(y, softmax.softmax_dropout(x, 0.5, value))


@pytest.mark.gpu
@pytest.mark.parametrize("call, shape", [
    (lambda x: activations.silu(x), (16, 256)),
    (lambda x: activations.swiglu(*x.chunk(2, -1)), (16, 256)),
    (lambda x: activations.bias_gelu(x, x[0]), (16, 256)),
    (lambda x: softmax.softmax_dropout(x, 0.1, 5), (2, 300, 300)),
], ids=["silu", "swiglu", "bias_gelu", "softmax_dropout"])
def test_under_the_compiler(call, shape, fresh_dynamo):
    given = [random(shape, torch.float16).requires_grad_()]
    for a, b in zip(outputs(torch.compile(call, fullgraph=True), given), outputs(call, given), strict=True):
        assert oracle.relative_error(a, b.double()) < 1e-3          # its sums over the rows are in an order of its own


@pytest.mark.gpu
def test_layer_norm_fp8_under_the_compiler(fresh_dynamo):
    given = [t.requires_grad_() for t in norm_arguments((64, 256), torch.float16)]
    w, scale = random((256, 32), torch.float16, seed=7).requires_grad_(), torch.full((), 50.0, device=DEVICE)
    call = functools.partial(through_a_product, w=w, scale=scale, Product=product())
    for a, b in zip(outputs(lambda *given: torch.compile(call, fullgraph=True)(given), given),
                    outputs(lambda *given: call(given), given), strict=True):
        assert oracle.relative_error(a, b.double()) < 1e-3
