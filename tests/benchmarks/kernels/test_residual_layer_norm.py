"""LayerNorm of a sum, and the sum itself, in one kernel against FP64; without a GPU, in the interpreter."""
import pytest
import torch

pytest.importorskip("triton")
from benchmarks.kernels import operations
from benchmarks.kernels.triton import norms
from tests.helpers import kernel_cases as cases

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
kernel, plain = norms.residual_layer_norm, operations.residual_layer_norm


def arguments(shape, dtype=torch.float32, scale=1.0):
    """x, residual, weight and bias."""
    return cases.arguments(2, 2, shape, dtype, scale)


@pytest.mark.unit
@cases.each_case
def test_outputs_and_gradients_are_right(shape, dtype):
    off = cases.errors(kernel, plain, arguments(shape, dtype))
    if shape[-1] == 1:                     # nothing depends on x then: its gradient is rounding and nothing else
        off = [*off[:2], off[-1]]
    assert max(off) < 3 * cases.GATES[dtype], off


@pytest.mark.unit
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_small_and_large_numbers(scale):
    assert max(cases.errors(kernel, plain, arguments((4, 100), scale=scale))) < 1e-5


@pytest.mark.unit
def test_inputs_that_are_not_contiguous():
    given = arguments((6, 40))
    cases.assert_same_bits(cases.outputs(kernel, cases.strided(given)), cases.outputs(kernel, given))


@pytest.mark.unit
def test_inputs_that_are_not_aligned():
    given = arguments((6, 40), torch.float16)
    gate = cases.GATES[torch.float16]                       # their sums are in another order
    cases.assert_close(cases.outputs(kernel, cases.unaligned(given)), cases.outputs(kernel, given), gate)


@pytest.mark.unit
@cases.each_dtype
@cases.each_width
@cases.each_bad_number
def test_what_is_not_finite_passes_through_its_row_alone(bad, width, dtype, monkeypatch):
    cases.few_programs(monkeypatch, 1)                      # it works on the other rows before and after
    given = arguments((4, width), dtype)
    with torch.no_grad():
        given[0][2, 5] = bad
    y, total, dx, *_ = cases.outputs(kernel, given)
    for value, right in zip((y, total), plain(*given), strict=True):
        cases.assert_equally_strange(value, right)
    for value in (y, total, dx):
        assert value[[0, 1, 3]].isfinite().all()


@pytest.mark.unit
def test_no_rows_at_all():
    y, total, dx, dresidual, dweight, dbias = cases.outputs(kernel, arguments((0, 8)))
    assert y.shape == total.shape == dx.shape == dresidual.shape == (0, 8)
    assert dweight.shape == dbias.shape == (8,)
    assert not dweight.any() and not dbias.any()


@pytest.mark.unit
@cases.each_dtype
@cases.each_width_of_a_sum
def test_every_run_gives_the_same_bits(width, dtype, monkeypatch):
    cases.few_programs(monkeypatch, 3)
    given = arguments((13, width), dtype)
    assert max(cases.errors(kernel, plain, given)) < 3 * cases.GATES[dtype]
    cases.assert_same_bits(cases.outputs(kernel, given), cases.outputs(kernel, given))


@pytest.mark.unit
def test_the_sum_is_the_sum_that_eager_makes():
    x, residual, weight, bias = arguments((5, 70), torch.float16)
    assert torch.equal(kernel(x, residual, weight, bias)[1], x + residual)


@pytest.mark.unit
@pytest.mark.parametrize("output", [0, 1], ids=["LayerNorm", "sum"])
def test_a_gradient_of_one_output_alone(output):
    given = arguments((3, 20))
    gradients = torch.autograd.grad(kernel(*given)[output].sum(), given[:2])
    right = torch.autograd.grad(plain(*given)[output].sum(), given[:2])
    for value, expected in zip(gradients, right, strict=True):
        assert torch.allclose(value, expected, atol=1e-5)


@pytest.mark.unit
@pytest.mark.parametrize("call, said", [
    (lambda x, w: kernel(x, x[:2], w, w), r"residual is \(2, 8\) .*: give \(4, 8\)"),
    (lambda x, w: kernel(x, x.half(), w, w), r"residual is \(4, 8\) torch.float16"),
    (lambda x, w: kernel(x, None, w, w), r"residual is None: give \(4, 8\) torch.float32"),
    (lambda x, w: kernel(x, x, w, w[1:]), r"bias is \(7,\) torch.float32 on .*: give \(8,\)"),
    (lambda x, w: kernel(x.double(), x.double(), w, w), "x is torch.float64: give float16, bfloat16 or float32"),
])
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call(torch.randn(4, 8, device=cases.DEVICE), torch.ones(8, device=cases.DEVICE))


@pytest.mark.stress
@pytest.mark.gpu
@cases.each_dtype
@cases.each_size_of_a_transformer
def test_sizes_of_a_transformer(shape, dtype):
    assert max(cases.errors(kernel, plain, arguments(shape, dtype))) < 3 * cases.GATES[dtype]


@pytest.mark.integration
@pytest.mark.gpu
def test_under_the_compiler(fresh_dynamo):
    cases.assert_same_under_the_compiler(kernel, arguments((16, 256), torch.float16))


@pytest.mark.unit
def test_what_is_normalised_is_the_sum_as_the_next_layer_sees_it():
    """In FP16 2048 and a half are 2048: the rounded rows are constant, and LayerNorm leaves the bias alone."""
    x = torch.full((2, 64), 2048.0, dtype=torch.float16, device=cases.DEVICE)
    residual = torch.tensor([0.5, -0.5] * 32, dtype=torch.float16, device=cases.DEVICE).expand(2, 64).contiguous()
    assert torch.equal(x + residual, x)
    weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])
    y, total = kernel(x, residual, weight, bias)
    assert torch.equal(total, x) and not y.any()
