"""What the tests of the kernels share: where they run, how exact they are, inputs, errors against FP64."""
import torch

from common import oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = tuple(GATES)
SHAPES = [(3, 1), (3, 1000), (3, 4097), (2, 5, 64), (1, 1), (7,)]
# The interpreter takes seconds for the widest: there, the dtype of the tightest gate alone.
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES
         if DEVICE == "cuda" or shape != (3, 4097) or dtype == torch.float32]


def arguments(full, vectors, shape, dtype=torch.float32, scale=1.0, seed=0):
    """So many tensors of `shape` and then so many [E], around 1; all ask for gradients."""
    generator = torch.Generator().manual_seed(seed)
    found = [scale * torch.randn(shape, generator=generator) for _ in range(full)]
    found += [1 + 0.3 * torch.randn(shape[-1:], generator=generator) for _ in range(vectors)]
    return [t.to(DEVICE, dtype).requires_grad_() for t in found]


def outputs(function, given, seed=1):
    """Outputs and gradients of all arguments, for a random cotangent of each output."""
    found = function(*given)
    found = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(y.shape, generator=generator).to(y) for y in found]
    return [*(y.detach() for y in found), *torch.autograd.grad(found, given, cotangents)]


def errors(kernel, truth, given):
    """Of everything in `outputs`, relative to what `truth` gives in FP64."""
    exact = outputs(truth, [t.detach().double().requires_grad_() for t in given])
    return [oracle.relative_error(value, right) for value, right in zip(outputs(kernel, given), exact, strict=True)]


def turned(given, full):
    """The same values, the first `full` of them transposed in memory and the rest strided: none is contiguous."""
    found = [t.detach().t().contiguous().t().requires_grad_() for t in given[:full]] + [
        torch.stack([t.detach()] * 2, 1)[:, 0].requires_grad_() for t in given[full:]]
    assert not any(t.is_contiguous() for t in found)
    return found


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
