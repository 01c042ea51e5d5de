"""SwiGLU, in Triton and in CUDA C++, against FP64; without a GPU, in the interpreter alone."""
import pytest
import torch

pytest.importorskip("triton")
import triton

from benchmarks.kernels import cuda, operations
from benchmarks.kernels.triton import activations
from tests.helpers import kernel_cases as cases

pytestmark = [pytest.mark.filterwarnings("ignore:invalid value encountered"),
              pytest.mark.filterwarnings("ignore:overflow encountered")]
plain = operations.swiglu
each_kernel = cases.implementations(activations.swiglu, cuda.swiglu)
each_refusal = cases.implementations(activations.swiglu, cuda.swiglu, gpu=False)


def arguments(shape, dtype=torch.float32, scale=1.0):
    """a and b."""
    return cases.arguments(2, 0, shape, dtype, scale)


@pytest.mark.unit
@each_kernel
@cases.each_case
def test_outputs_and_gradients_are_right(kernel, shape, dtype):
    off = cases.errors(kernel, plain, arguments(shape, dtype))
    assert max(off) < 3 * cases.GATES[dtype], off


@pytest.mark.unit
@each_kernel
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_small_and_large_numbers(kernel, scale):
    assert max(cases.errors(kernel, plain, arguments((4, 100), scale=scale))) < 1e-5


@pytest.mark.unit
@each_kernel
def test_inputs_that_are_not_contiguous(kernel):
    given = arguments((6, 40))
    cases.assert_same_bits(cases.outputs(kernel, cases.strided(given)), cases.outputs(kernel, given))


@pytest.mark.unit
@each_kernel
def test_inputs_that_are_not_aligned(kernel):
    given = arguments((6, 40), torch.float16)
    gate = cases.GATES[torch.float16]
    cases.assert_close(cases.outputs(kernel, cases.unaligned(given)), cases.outputs(kernel, given), gate)


@pytest.mark.unit
@each_kernel
@pytest.mark.parametrize("halves", [
    lambda x: x.chunk(2, -1),
    lambda x: (x[..., ::2], x[..., 1::2]),
    lambda x: (x[:1, :, :24].expand(2, 5, 24), x[..., 24:]),
], ids=["halves", "strided", "expanded"])
def test_parts_of_one_tensor(kernel, halves):
    x = cases.random((2, 5, 48)).requires_grad_()
    values = cases.outputs(lambda x: kernel(*halves(x)), [x])
    expected = cases.outputs(lambda x: plain(*halves(x)), [x])
    for value, right in zip(values, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-6)


@pytest.mark.unit
def test_halves_of_one_tensor_are_not_copied():
    for half in cases.random((2, 5, 48)).chunk(2, -1):
        assert activations._evenly_spaced(half).data_ptr() == half.data_ptr()


@pytest.mark.unit
@each_kernel
@cases.each_large_number
def test_gradients_at_large_values_are_eager_s(kernel, large):
    cases.assert_gradients_of_large_numbers(kernel, plain, arguments((4, 33)), large)


@pytest.mark.unit
@each_kernel
@cases.each_dtype
@cases.each_strange_number
def test_strange_values_are_eager_s(kernel, strange, dtype):
    cases.assert_strange_as_in_eager(kernel, plain, arguments((4, 33), dtype), strange)


@pytest.mark.unit
@each_kernel
@cases.each_dtype
@cases.each_width
@cases.each_bad_number
def test_what_is_not_finite_stays_in_its_row(kernel, bad, width, dtype):
    given = arguments((4, width), dtype)
    with torch.no_grad():
        given[0][2, 5] = bad
    y, da, db = cases.outputs(kernel, given)
    cases.assert_equally_strange(y, plain(*given))
    for value in (y, da, db):
        assert value[[0, 1, 3]].isfinite().all()


@pytest.mark.unit
@each_kernel
def test_no_rows_at_all(kernel):
    for value in cases.outputs(kernel, arguments((0, 8))):
        assert value.shape == (0, 8)


@pytest.mark.unit
@each_kernel
@cases.each_dtype
@cases.each_width_of_a_sum
def test_every_run_gives_the_same_bits(kernel, width, dtype, monkeypatch):
    cases.small_tiles(monkeypatch, activations)
    given = arguments((13, width), dtype)
    assert max(cases.errors(kernel, plain, given)) < 3 * cases.GATES[dtype]
    cases.assert_same_bits(cases.outputs(kernel, given), cases.outputs(kernel, given))


@pytest.mark.unit
@each_refusal
@pytest.mark.parametrize("call, said", [
    (lambda kernel, x: kernel(2.0, x), "a is 2.0: give a tensor"),
    (lambda kernel, x: kernel(x.int(), x.int()), "a is torch.int32: give float16, bfloat16 or float32"),
    (lambda kernel, x: kernel(x, x[:2]), r"b is \(2, 8\) .*: give \(4, 8\)"),
    (lambda kernel, x: kernel(x, x.half()), r"b is \(4, 8\) torch.float16"),
])
def test_bad_input_is_named(kernel, call, said):
    with pytest.raises(ValueError, match=said):
        call(kernel, torch.randn(4, 8, device=cases.DEVICE))


@pytest.mark.unit
def test_the_triton_kernel_says_whose_shape_it_wants():
    with pytest.raises(ValueError, match="as a has it"):
        activations.swiglu(torch.ones(4, 8, device=cases.DEVICE), torch.ones(2, 8, device=cases.DEVICE))


@pytest.mark.unit
@each_refusal
def test_a_tensor_that_is_not_on_a_gpu_is_named(kernel, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"a is .*on cpu: a (Triton|CUDA) kernel needs a GPU"):
        kernel(torch.zeros(2, 64), torch.zeros(2, 64))


@pytest.mark.stress
@pytest.mark.gpu
@each_kernel
@cases.each_dtype
@cases.each_size_of_an_activation
def test_sizes_of_a_transformer(kernel, shape, dtype):
    assert max(cases.errors(kernel, plain, arguments(shape, dtype))) < 3 * cases.GATES[dtype]


@pytest.mark.integration
@pytest.mark.gpu
@each_kernel
def test_under_the_compiler(kernel, fresh_dynamo):
    cases.assert_same_under_the_compiler(kernel, arguments((16, 256), torch.float16))


@pytest.mark.integration
@pytest.mark.gpu
@each_kernel
def test_halves_of_one_tensor_under_the_compiler(kernel, fresh_dynamo):
    given = [cases.random((16, 256), torch.float16).requires_grad_()]
    cases.assert_same_under_the_compiler(lambda x: kernel(*x.chunk(2, -1)), given)
