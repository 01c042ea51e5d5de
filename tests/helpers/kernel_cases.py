"""What the tests of the kernels share: the two implementations, inputs, and errors against FP64.

Without a GPU the kernels in Triton run through its interpreter, which conftest.py switches on; those in CUDA C++ do not
run.
"""
import math

import pytest
import torch

from common.block import oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = tuple(GATES)


def implementations(triton, cuda, gpu=True):
    """The test runs with the kernel in Triton and with the one in CUDA C++, as its argument `kernel`.

    CUDA C++ needs a GPU to be built and run. What it refuses it refuses anywhere: that needs none, `gpu=False`.
    """
    in_cuda = pytest.param(cuda, id="CUDA C++", marks=[pytest.mark.gpu] if gpu else [])
    return pytest.mark.parametrize("kernel", [pytest.param(triton, id="Triton"), in_cuda])


def on_a_gpu(*values):
    """A case that would take the interpreter seconds."""
    return pytest.param(*values, marks=pytest.mark.gpu)


SMALL = [(3, 1), (3, 1000), (2, 5, 64), (1, 1), (7,)]
LARGE = [(40, 24), (3, 8200), (2, 8193), (3, 16384)]
CASES = [(shape, dtype) for shape in SMALL for dtype in DTYPES]
CASES.append(((3, 4097), torch.float32))                     # the dtype of the tightest gate
CASES += [on_a_gpu((3, 4097), torch.float16), on_a_gpu((3, 4097), torch.bfloat16)]
CASES += [on_a_gpu(shape, dtype) for shape in LARGE for dtype in DTYPES]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_case = pytest.mark.parametrize("shape, dtype", CASES, ids=str)
each_large_number = pytest.mark.parametrize("large", [1e14, -1e14, 1e16, -1e18])
each_strange_number = pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e30, -1e30])
each_bad_number = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
each_width = pytest.mark.parametrize("width", [33, on_a_gpu(4096), on_a_gpu(16384)])
# Rows that wait in shared memory, and rows that are too wide or too odd for it.
each_width_of_a_sum = pytest.mark.parametrize(
    "width", [24, *(on_a_gpu(width) for width in (33, 4096, 8192, 8200, 9001, 16384))])
each_size_of_an_activation = pytest.mark.parametrize(
    "shape", [(16384, 4096), (4096, 16384), (100_000, 96), (4097, 4097)], ids=str)
each_size_of_a_transformer = pytest.mark.parametrize("shape", [(16384, 4096), (4096, 16384), (100_000, 96)], ids=str)


def random(shape, dtype=torch.float32, scale=1.0, seed=0):
    """The same numbers on every machine; so many that drawing them takes long are the GPU's own."""
    device = "cpu" if math.prod(shape) < 2**22 else DEVICE
    generator = torch.Generator(device).manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, device=device)
    return (scale * numbers).to(DEVICE, dtype)


def arguments(full, vectors, shape, dtype=torch.float32, scale=1.0):
    """So many tensors of `shape`, times `scale`, and then so many [E] around 1; all ask for gradients."""
    given = [random(shape, dtype, scale, seed=10 + number) for number in range(full)]
    for number in range(vectors):
        around_0 = random(shape[-1:], scale=0.3, seed=20 + number)
        given.append((1 + around_0).to(dtype))
    return [t.requires_grad_() for t in given]


def outputs(function, given, rounded_to=None):
    """Outputs, and gradients of all arguments for a random cotangent of each output.

    Cotangents are rounded to the dtype of the outputs, or to another.
    """
    ys = function(*given)
    ys = ys if isinstance(ys, tuple) else (ys,)
    cotangents = []
    for number, y in enumerate(ys):
        cotangent = random(y.shape, rounded_to or y.dtype, seed=1 + number)
        cotangents.append(cotangent.to(y.dtype))
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, given, cotangents)]


def errors(kernel, plain, given):
    """Of everything in `outputs`, relative to what `plain` gives in FP64 for the same numbers."""
    doubles = [t.detach().double().requires_grad_() for t in given]
    exact = outputs(plain, doubles, rounded_to=given[0].dtype)
    return [oracle.relative_error(value, right) for value, right in zip(outputs(kernel, given), exact, strict=True)]


def strided(given):
    """The same values: matrices transposed in memory and vectors with gaps, none of them contiguous."""
    spread = []
    for t in given:
        values = t.detach()
        turned = values.t().contiguous().t() if values.ndim == 2 else torch.stack([values] * 2, 1)[:, 0]
        assert not turned.is_contiguous()
        spread.append(turned.requires_grad_())
    return spread


def unaligned(given):
    """The same values at addresses that 16 does not divide."""
    shifted = []
    for t in given:
        with_one_before = torch.cat([t.new_zeros(1), t.detach().flatten()])
        values = with_one_before[1:].view(t.shape)
        assert values.data_ptr() % 16
        shifted.append(values.requires_grad_())
    return shifted


def few_programs(monkeypatch, count):
    """Of a backward that adds up rows there are so many programs: each adds up several rows."""
    monkeypatch.setattr("benchmarks.kernels.triton.norms.PROGRAMS", count)
    monkeypatch.setattr("benchmarks.kernels.triton.activations.PROGRAMS", count)
    monkeypatch.setattr("benchmarks.kernels.cuda.operators.BLOCKS", count)


def small_tiles(monkeypatch, activations):
    """The kernels of that module take several tiles of a small tensor."""
    for tile in (activations.SMALL, activations.LARGE):
        monkeypatch.setitem(tile, "elements", 16)


def assert_same_bits(values, expected):
    for value, right in zip(values, expected, strict=True):
        assert torch.equal(value, right)


def assert_close(values, expected, gate):
    for value, right in zip(values, expected, strict=True):
        assert oracle.relative_error(value, right.double()) < gate


def assert_gradients_of_large_numbers(kernel, plain, given, large):
    """They are finite, and eager PyTorch's."""
    with torch.no_grad():
        given[0][2, 5] = large
    expected = outputs(plain, given)
    for value, right in zip(outputs(kernel, given), expected, strict=True):
        assert right.isfinite().all()
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)


def assert_strange_as_in_eager(kernel, plain, given, strange):
    """NaN, infinities, and numbers of which the exponential is one."""
    given = [t.detach() for t in given]
    given[0][2, 5] = strange
    dtype = given[0].dtype
    # In 16 bits eager rounds what it writes between two operations.
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (5 * GATES[dtype],) * 2
    torch.testing.assert_close(kernel(*given), plain(*given), rtol=rtol, atol=atol, equal_nan=True)


def assert_equally_strange(value, right):
    """NaN and infinity are in the same places."""
    assert torch.equal(value.isnan(), right.isnan())
    assert torch.equal(value.isinf(), right.isinf())


def assert_same_under_the_compiler(kernel, given):
    """But for rounding: the compiler adds up the programs' sums in an order of its own."""
    compiled = torch.compile(kernel, fullgraph=True)
    assert_close(outputs(compiled, given), outputs(kernel, given), 1e-3)


def assert_same_in_a_graph(kernel, given):
    """A replayed CUDA graph gives the bits of a call."""
    given = [t.detach() for t in given]
    eager = kernel(*given)                                   # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = kernel(*given)
    graph.replay()
    assert torch.equal(replayed, eager)
