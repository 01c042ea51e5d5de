"""SiLU in one kernel against FP64; without a GPU, in the interpreter."""
import pytest
import torch

pytest.importorskip("triton")
from benchmarks.kernels import operations
from benchmarks.kernels.triton import activations
from tests.helpers import kernel_cases as cases

pytestmark = [pytest.mark.filterwarnings("ignore:invalid value encountered"),
              pytest.mark.filterwarnings("ignore:overflow encountered")]
kernel, plain = activations.silu, operations.silu


def arguments(shape, dtype=torch.float32, scale=1.0):
    """x."""
    return cases.arguments(1, 0, shape, dtype, scale)


@pytest.mark.unit
@cases.each_case
def test_outputs_and_gradients_are_right(shape, dtype):
    off = cases.errors(kernel, plain, arguments(shape, dtype))
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
@cases.each_large_number
def test_gradients_at_large_values_are_eager_s(large):
    cases.assert_gradients_of_large_numbers(kernel, plain, arguments((4, 33)), large)


@pytest.mark.unit
@cases.each_dtype
@cases.each_strange_number
def test_strange_values_are_eager_s(strange, dtype):
    cases.assert_strange_as_in_eager(kernel, plain, arguments((4, 33), dtype), strange)


@pytest.mark.unit
def test_no_rows_at_all():
    for value in cases.outputs(kernel, arguments((0, 8))):
        assert value.shape == (0, 8)


@pytest.mark.unit
def test_every_run_gives_the_same_bits(monkeypatch):
    cases.few_programs(monkeypatch, 3)                      # fewer than tiles
    cases.small_tiles(monkeypatch, activations)
    given = arguments((22, 10), torch.float16)
    assert max(cases.errors(kernel, plain, given)) < 3 * cases.GATES[torch.float16]
    cases.assert_same_bits(cases.outputs(kernel, given), cases.outputs(kernel, given))


@pytest.mark.unit
@pytest.mark.parametrize("call, said", [
    (lambda x: kernel(x.double()), "x is torch.float64: give float16, bfloat16 or float32"),
    (lambda x: kernel(x[0, 0]), r"x is \(\): give \[..., F\] with F of at least 1"),
    (lambda x: kernel(x[:, :0]), r"x is \(4, 0\)"),
])
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call(torch.randn(4, 8, device=cases.DEVICE))


@pytest.mark.stress
@pytest.mark.gpu
@cases.each_dtype
@cases.each_size_of_an_activation
def test_sizes_of_a_transformer(shape, dtype):
    assert max(cases.errors(kernel, plain, arguments(shape, dtype))) < 3 * cases.GATES[dtype]


@pytest.mark.integration
@pytest.mark.gpu
def test_under_the_compiler(fresh_dynamo):
    cases.assert_same_under_the_compiler(kernel, arguments((16, 256), torch.float16))
