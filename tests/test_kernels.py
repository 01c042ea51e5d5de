"""Kernels written by hand against FP64: every output and gradient, odd shapes, strange values, bad input.

Without a GPU they run through Triton's interpreter, which conftest.py switches on, on small shapes.
"""
import math

import kernel_cases
import pytest
import torch
from kernel_cases import CASES, DEVICE, DTYPES, GATES, assert_same_bits, outputs

pytest.importorskip("triton")
from benchmarks import operations
from benchmarks.kernels import norms
from common import oracle

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:invalid value encountered")]


# kernel -> (what it computes, which of its arguments have x's shape, which are [E])
KERNELS = {
    "layer_norm_gelu": (norms.layer_norm_gelu, operations.layer_norm_gelu, 1, 2),
    "rms_norm": (norms.rms_norm, operations.rms_norm, 1, 1),
    "residual_layer_norm": (norms.residual_layer_norm, operations.residual_layer_norm, 2, 2),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)


def arguments(name, *shape_and_dtype, **more):
    return kernel_cases.arguments(*KERNELS[name][2:], *shape_and_dtype, **more)


def errors(name, given):
    return kernel_cases.errors(*KERNELS[name][:2], given)



@each_kernel
@pytest.mark.parametrize("shape, dtype", CASES, ids=str)
def test_outputs_and_gradients_are_right(name, shape, dtype):
    given = arguments(name, shape, dtype)
    found = errors(name, given)
    if shape[-1] == 1:                     # nothing depends on x then: its gradient is rounding and nothing else
        found = [found[0], found[-1]]
    assert max(found) < 3 * GATES[dtype], found


@each_kernel
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_small_and_large_numbers(name, scale):
    assert max(errors(name, arguments(name, (4, 100), scale=scale))) < 1e-5


@each_kernel
def test_inputs_that_are_not_contiguous(name):
    given = arguments(name, (6, 40))
    turned = kernel_cases.turned(given, KERNELS[name][2])
    assert_same_bits(outputs(KERNELS[name][0], turned), outputs(KERNELS[name][0], given))


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_passes_through_its_row_alone(name, bad, dtype):
    given = [t.detach() for t in arguments(name, (4, 33), dtype)]
    given[0][2, 5] = bad
    found, eager = (function(*given) for function in KERNELS[name][:2])
    for value, right in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, eager)), strict=True):
        assert torch.equal(value.isnan(), right.isnan()) and torch.equal(value.isinf(), right.isinf())
        assert value[[0, 1, 3]].isfinite().all()


@each_kernel
def test_no_rows_at_all(name):
    given = arguments(name, (0, 8))
    first, *_, last = outputs(KERNELS[name][0], given)
    assert first.shape == (0, 8) and last.shape == (8,) and not last.any()


@each_kernel
def test_every_run_gives_the_same_bits(name, monkeypatch):
    monkeypatch.setattr(norms, "PROGRAMS", 3)               # fewer than rows: each adds up several
    given = arguments(name, (8, 24), torch.float16)
    assert max(errors(name, given)) < 3 * GATES[torch.float16]
    assert_same_bits(outputs(KERNELS[name][0], given), outputs(KERNELS[name][0], given))


def test_the_sum_is_the_sum_that_eager_makes():
    x, residual, weight, bias = arguments("residual_layer_norm", (5, 70), torch.float16)
    assert torch.equal(norms.residual_layer_norm(x, residual, weight, bias)[1], x + residual)


def test_a_gradient_of_one_output_alone():
    given = arguments("residual_layer_norm", (3, 20))
    for pick in (0, 1):
        found = torch.autograd.grad(norms.residual_layer_norm(*given)[pick].sum(), given[:2])
        exact = torch.autograd.grad(operations.residual_layer_norm(*given)[pick].sum(), given[:2])
        for a, b in zip(found, exact, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("call, said", [
    (lambda x, w: norms.rms_norm(x.double(), w.double()), "x is torch.float64: give float16, bfloat16 or float32"),
    (lambda x, w: norms.rms_norm(x.long(), w), "x is torch.int64"),
    (lambda x, w: norms.rms_norm(x[:, :0], w[:0]), r"x is \(4, 0\): give \[..., E\] with E from 1"),
    (lambda x, w: norms.rms_norm(x.new_empty(2, norms.WIDEST + 1), w), r"x is \(2, 65537\)"),
    (lambda x, w: norms.rms_norm(x[0, 0], w), r"x is \(\): give"),
    (lambda x, w: norms.rms_norm(x, w[1:]), r"weight is \(7,\) torch.float32 on .*: give \(8,\)"),
    (lambda x, w: norms.rms_norm(x, w.half()), r"weight is \(8,\) torch.float16"),
    (lambda x, w: norms.layer_norm_gelu(x, w, w.to("meta")), r"bias is \(8,\) torch.float32 on meta"),
    (lambda x, w: norms.layer_norm_gelu(x, w, None), r"bias is None: give \(8,\) torch.float32"),
    (lambda x, w: norms.rms_norm([1.0, 2.0], w), r"x is \[1.0, 2.0\]: give a tensor"),
    (lambda x, w: norms.residual_layer_norm(x, x[:2], w, w), r"residual is \(2, 8\) .*: give \(4, 8\)"),
])
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call(torch.randn(4, 8, device=DEVICE), torch.ones(8, device=DEVICE))


def test_a_cpu_without_the_interpreter_is_named(monkeypatch):
    monkeypatch.setattr(norms.triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="needs a GPU"):
        norms.rms_norm(torch.randn(2, 4), torch.ones(4))


@pytest.mark.gpu
@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16384, 4096), (4096, 16384), (100_000, 96)], ids=str)
def test_sizes_of_a_transformer(name, shape, dtype):
    assert max(errors(name, arguments(name, shape, dtype))) < 3 * GATES[dtype]


@pytest.mark.gpu
@each_kernel
def test_under_the_compiler(name, fresh_dynamo):
    kernel = KERNELS[name][0]
    given = arguments(name, (16, 256), torch.float16)
    for a, b in zip(outputs(torch.compile(kernel, fullgraph=True), given), outputs(kernel, given), strict=True):
        assert oracle.relative_error(a, b.double()) < 1e-3          # its sums over the rows are in an order of its own
