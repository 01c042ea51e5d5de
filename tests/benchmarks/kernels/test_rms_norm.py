"""RMSNorm in one kernel, in Triton and in CUDA C++, against FP64; without a GPU, in the interpreter alone."""
import pytest
import torch

pytest.importorskip("triton")
import triton

from benchmarks.kernels import cuda, operations
from benchmarks.kernels.triton import norms
from tests.helpers import kernel_cases as cases

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
plain = operations.rms_norm
each_kernel = cases.implementations(norms.rms_norm, cuda.rms_norm)
each_refusal = cases.implementations(norms.rms_norm, cuda.rms_norm, gpu=False)


def arguments(shape, dtype=torch.float32, scale=1.0):
    """x and weight."""
    return cases.arguments(1, 1, shape, dtype, scale)


@pytest.mark.unit
@each_kernel
@cases.each_case
def test_outputs_and_gradients_are_right(kernel, shape, dtype):
    off = cases.errors(kernel, plain, arguments(shape, dtype))
    if shape[-1] == 1:                     # nothing depends on x then: its gradient is rounding and nothing else
        off = [off[0], off[-1]]
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
    gate = cases.GATES[torch.float16]                       # their sums are in another order
    cases.assert_close(cases.outputs(kernel, cases.unaligned(given)), cases.outputs(kernel, given), gate)


@pytest.mark.unit
@each_kernel
@cases.each_dtype
@cases.each_width
@cases.each_bad_number
def test_what_is_not_finite_passes_through_its_row_alone(kernel, bad, width, dtype, monkeypatch):
    cases.few_programs(monkeypatch, 1)                      # it works on the other rows before and after
    given = arguments((4, width), dtype)
    with torch.no_grad():
        given[0][2, 5] = bad
    y, dx, *_ = cases.outputs(kernel, given)
    cases.assert_equally_strange(y, plain(*given))
    assert y[[0, 1, 3]].isfinite().all() and dx[[0, 1, 3]].isfinite().all()


@pytest.mark.unit
@each_kernel
def test_no_rows_at_all(kernel):
    y, dx, dweight = cases.outputs(kernel, arguments((0, 8)))
    assert y.shape == dx.shape == (0, 8)
    assert dweight.shape == (8,) and not dweight.any()


@pytest.mark.unit
@each_kernel
@cases.each_dtype
@cases.each_width_of_a_sum
def test_every_run_gives_the_same_bits(kernel, width, dtype, monkeypatch):
    cases.few_programs(monkeypatch, 3)
    given = arguments((13, width), dtype)
    assert max(cases.errors(kernel, plain, given)) < 3 * cases.GATES[dtype]
    cases.assert_same_bits(cases.outputs(kernel, given), cases.outputs(kernel, given))


@pytest.mark.unit
@each_refusal
@pytest.mark.parametrize("call, said", [
    (lambda kernel, x, w: kernel(x.double(), w.double()), "x is torch.float64: give float16, bfloat16 or float32"),
    (lambda kernel, x, w: kernel(x.long(), w), "x is torch.int64"),
    (lambda kernel, x, w: kernel([1.0, 2.0], w), r"x is \[1.0, 2.0\]: give a tensor"),
    (lambda kernel, x, w: kernel(x[:, :0], w[:0]), r"x is \(4, 0\): give \[..., E\] with E from 1"),
    (lambda kernel, x, w: kernel(x[0, 0], w), r"x is \(\): give"),
    (lambda kernel, x, w: kernel(x, w[1:]), r"weight is \(7,\) torch.float32 on .*: give \(8,\)"),
    (lambda kernel, x, w: kernel(x, w.half()), r"weight is \(8,\) torch.float16"),
])
def test_bad_input_is_named(kernel, call, said):
    with pytest.raises(ValueError, match=said):
        call(kernel, torch.randn(4, 8, device=cases.DEVICE), torch.ones(8, device=cases.DEVICE))


@pytest.mark.unit
@pytest.mark.parametrize("kernel, widest", [(norms.rms_norm, 65536), (cuda.rms_norm, 16384)],
                         ids=["Triton", "CUDA C++"])
def test_a_row_that_is_too_wide_is_named(kernel, widest):
    x = torch.empty(2, widest + 1, device=cases.DEVICE)
    with pytest.raises(ValueError, match=rf"x is \(2, {widest + 1}\): give \[..., E\] with E from 1 to {widest}"):
        kernel(x, x[0])


@pytest.mark.unit
def test_more_rows_than_a_launch_has_blocks_are_named():
    x = torch.ones(1, 1, device=cases.DEVICE).expand(2**31, 1)
    with pytest.raises(ValueError, match="give at most 2147483647 rows"):
        cuda.rms_norm(x, x[0])


@pytest.mark.unit
@each_refusal
def test_a_tensor_that_is_not_on_a_gpu_is_named(kernel, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"x is .*on cpu: a (Triton|CUDA) kernel needs a GPU"):
        kernel(torch.zeros(2, 64), torch.zeros(64))


@pytest.mark.stress
@pytest.mark.gpu
@each_kernel
@cases.each_dtype
@cases.each_size_of_a_transformer
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
def test_in_a_cuda_graph(kernel):
    cases.assert_same_in_a_graph(kernel, arguments((5, 48)))
