"""Softmax and dropout in one kernel, in Triton and in CUDA C++, against FP64; without a GPU, the interpreter alone."""
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton

from benchmarks.kernels import cuda
from benchmarks.kernels.triton import softmax
from common.block import oracle
from tests.helpers import kernel_cases as cases

pytestmark = [pytest.mark.filterwarnings("ignore:invalid value encountered"),
              pytest.mark.filterwarnings("ignore:overflow encountered")]
each_kernel = cases.implementations(softmax.softmax_dropout, cuda.softmax_dropout)
each_refusal = cases.implementations(softmax.softmax_dropout, cuda.softmax_dropout, gpu=False)
each_mask = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
P, SEED = 0.3, -7


def plain(scores, causal, factors=1.0):
    """In the dtype of scores, and dropout by what it multiplies with."""
    if causal:
        scores = scores.masked_fill(beyond_the_diagonal(scores), -math.inf)
    return scores.softmax(-1) * factors


def beyond_the_diagonal(scores):
    return torch.ones_like(scores, dtype=torch.bool).triu(1)


def kept(kernel, shape, p, seed, dtype=torch.float32):
    """The elements that dropout keeps: where the softmax of equal scores does not become 0."""
    return kernel(torch.zeros(shape, dtype=dtype, device=cases.DEVICE), p, seed, False) != 0


def dropout_factors(kernel, shape, p, seed):
    """What dropout multiplies with: CUDA C++'s as it is defined, Triton's by what it keeps of equal scores."""
    if kernel is cuda.softmax_dropout:
        return torch.from_numpy(defined_factors(math.prod(shape), p, seed)).view(shape).to(cases.DEVICE)
    return kept(kernel, shape, p, seed).double() / (1 - p)


def philox(seed, counters):
    """Philox4x32-7 of [n] counters: [n, 4] 32-bit words."""
    low32, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    counters, key = counters.astype(np.uint64), [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    state = [counters & low32, counters >> word, np.zeros_like(counters), np.zeros_like(counters)]
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * state[0], np.uint64(0xCD9E8D57) * state[2]
        state = [b >> word ^ state[1] ^ np.uint64(key[0]), b & low32,
                 a >> word ^ state[3] ^ np.uint64(key[1]), a & low32]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(state, -1).astype(np.uint32)


def philox_bits(count, seed):
    """16 bits of Philox for each of elements 0 to count - 1, eight elements a call."""
    words = philox(seed, np.arange(-(-count // 8)))
    return words.astype("<u4").view("<u2").reshape(-1)[:count]


def defined_factors(count, p, seed):
    """What dropout in CUDA C++ multiplies elements 0 to count - 1 with."""
    threshold = round(p * 65536)
    return np.where(philox_bits(count, seed) < threshold, 0.0, 65536 / (65536 - threshold))


def errors(kernel, given, p, causal):
    """Of the output and the gradient, with dropout by SEED."""
    factors = dropout_factors(kernel, given.shape, p, SEED) if p else 1.0
    return cases.errors(lambda scores: kernel(scores, p, SEED, causal),
                        lambda scores: plain(scores, causal, factors), [given])


def several_bands(monkeypatch):
    """In Triton a small tensor takes several programs, and a causal one several launches."""
    monkeypatch.setattr(softmax, "NARROWEST", 16)
    monkeypatch.setattr(softmax, "TILE", 512)


def large_programs(monkeypatch):
    """Fewer of them: the interpreter's time is theirs."""
    if cases.DEVICE == "cpu":
        monkeypatch.setattr(softmax, "TILE", 65536)


@pytest.mark.unit
@each_kernel
@each_mask
@cases.each_dtype
@pytest.mark.parametrize("shape, p", [
    ((2, 1, 1), 0.3), ((3, 3), 0.5), ((1, 2, 34, 34), 0.1), ((2, 48, 48), 0.0), cases.on_a_gpu((7, 7), 0.3),
    cases.on_a_gpu((3, 65, 65), 0.3), cases.on_a_gpu((2, 5, 64, 64), 0.3), cases.on_a_gpu((40, 24, 24), 0.3),
    cases.on_a_gpu((3, 65, 65), 0.0)], ids=str)
def test_outputs_and_gradients_are_right(kernel, shape, p, causal, dtype, monkeypatch):
    several_bands(monkeypatch)
    off = errors(kernel, cases.random(shape, dtype, 3.0).requires_grad_(), p, causal)
    if shape[-1] == 1:                                      # the only weight is 1, whatever the score
        off = off[:1]
    assert max(off) < 3 * cases.GATES[dtype], off


@pytest.mark.unit
@each_kernel
def test_a_thousand_keys(kernel, monkeypatch):
    large_programs(monkeypatch)
    off = errors(kernel, cases.random((1000, 1000)).requires_grad_(), 0.0, True)
    assert max(off) < 3 * cases.GATES[torch.float32]


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
@cases.each_dtype
@pytest.mark.parametrize("length", [264, 1031, 2056])
def test_a_diagonal_through_many_vectors_and_warps(kernel, length, dtype):
    off = errors(kernel, cases.random((2, length, length), dtype).requires_grad_(), P, True)
    assert max(off) < 3 * cases.GATES[dtype], off


@pytest.mark.gpu
@pytest.mark.integration
@cases.each_dtype
@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("shape", [*cases.SMALL, (3, 4097), *cases.LARGE], ids=str)
def test_rows_of_any_width_in_cuda(shape, p, dtype):
    off = errors(cuda.softmax_dropout, cases.random(shape, dtype).requires_grad_(), p, False)
    if shape[-1] == 1:
        off = off[:1]
    assert max(off) < 3 * cases.GATES[dtype], off


@pytest.mark.unit
@each_kernel
@pytest.mark.parametrize("offset, scale", [(0, 1e-3), (1e4, 3), (-1e6, 3)])
def test_small_and_large_scores(kernel, offset, scale):
    scores = offset + cases.random((2, 60, 60), scale=scale)
    off = errors(kernel, scores.requires_grad_(), 0.0, True)
    assert max(off) < 1e-5, off


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("p", [0.0, P])
def test_small_scores_of_rows_of_any_width_in_cuda(p):
    off = errors(cuda.softmax_dropout, cases.random((4, 100), scale=1e-3).requires_grad_(), p, False)
    assert max(off) < 1e-5, off


@pytest.mark.unit
@each_kernel
@each_mask
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_one_score_that_outweighs_all(kernel, p, causal):
    scores = cases.random((2, 60, 60), scale=1e4).requires_grad_()
    factors = dropout_factors(kernel, scores.shape, p, SEED) if p else 1.0
    y, dscores = cases.outputs(lambda scores: kernel(scores, p, SEED, causal), [scores])
    doubles = [scores.detach().double().requires_grad_()]
    exact, slope = cases.outputs(lambda scores: plain(scores, causal, factors), doubles, rounded_to=torch.float32)
    assert oracle.relative_error(y, exact) < 1e-5
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dscores.double(), slope, rtol=0, atol=1e-3)        # hardly any is left


@pytest.mark.unit
@each_kernel
@cases.each_bad_number
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_strange_scores_are_eager_s(kernel, bad, p):
    x = cases.random((24, 24))
    x[0, 0] = x[9, 4] = x[15, 20] = bad                     # the last is beyond the diagonal
    factors = kept(kernel, x.shape, p, 3) / (1 - p)         # times 0, as in eager: a NaN stays one
    y = kernel(x, p, 3, True)
    torch.testing.assert_close(y, plain(x, True, factors), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.integration
@cases.each_dtype
@cases.each_bad_number
@pytest.mark.parametrize("shape, p, causal", [
    ((4, 33), 0.0, False), ((4, 33), P, False), ((4, 4096), 0.0, False), ((4, 4096), P, False),
    ((4, 16384), 0.0, False), ((4, 16384), P, False), ((4, 33, 33), P, True), ((4, 65, 65), P, True)], ids=str)
def test_what_is_not_finite_stays_in_its_row_in_cuda(shape, p, causal, bad, dtype):
    scores = cases.random(shape, dtype)
    scores[2, ..., 5] = bad
    scores.requires_grad_()
    y, dscores = cases.outputs(lambda scores: cuda.softmax_dropout(scores, p, SEED, causal), [scores])
    factors = dropout_factors(cuda.softmax_dropout, shape, p, SEED).to(dtype)
    cases.assert_equally_strange(y, plain(scores, causal, factors))
    assert y[[0, 1, 3]].isfinite().all() and dscores[[0, 1, 3]].isfinite().all()


@pytest.mark.unit
@each_kernel
def test_a_row_of_minus_infinities_is_what_eager_makes_of_it(kernel):
    scores = torch.zeros(4, 4, device=cases.DEVICE)
    scores[2] = -math.inf
    assert torch.equal(kernel(scores, 0.0, 0, False).isnan(), torch.softmax(scores, -1).isnan())


@pytest.mark.unit
@each_kernel
@pytest.mark.parametrize("size", [4, 100])
def test_beyond_the_diagonal_are_zeros_that_nothing_reads(kernel, size, monkeypatch):
    monkeypatch.setattr(softmax, "NARROWEST", 16)
    x, dy = cases.random((size, size)), cases.random((size, size), seed=2)
    beyond = beyond_the_diagonal(x)
    runs = []
    for filler in (0.0, math.nan):
        scores = x.masked_fill(beyond, filler).requires_grad_()
        y = kernel(scores, 0.2, 1, True)
        runs.append((y.detach(), *torch.autograd.grad(y, scores, dy.masked_fill(beyond, filler))))
    cases.assert_same_bits(*runs)
    for value in runs[0]:
        assert value.isfinite().all() and not value[beyond].any()


@pytest.mark.unit
@each_kernel
def test_scores_that_are_not_contiguous(kernel):
    x = cases.random((4, 20, 20))
    expected = cases.outputs(lambda scores: kernel(scores, P, 4, True), [x.requires_grad_()])
    for strided in (x.detach().mT.contiguous().mT, torch.stack([x.detach()] * 2, -1)[..., 0]):
        assert not strided.is_contiguous()
        values = cases.outputs(lambda scores: kernel(scores, P, 4, True), [strided.requires_grad_()])
        cases.assert_same_bits(values, expected)


@pytest.mark.unit
@each_kernel
@each_mask
@pytest.mark.parametrize("p", [P, cases.on_a_gpu(0.0)])
def test_scores_that_are_not_aligned(kernel, p, causal):
    def call(scores):
        return kernel(scores, p, SEED, causal)

    given = [cases.random((2, 24, 24), torch.float16).requires_grad_()]
    gate = cases.GATES[torch.float16]                       # their sums are in another order
    cases.assert_close(cases.outputs(call, cases.unaligned(given)), cases.outputs(call, given), gate)


@pytest.mark.unit
@each_kernel
@each_mask
def test_no_rows_at_all(kernel, causal):
    given = [cases.random((0, 20, 20)).requires_grad_()]
    for value in cases.outputs(lambda scores: kernel(scores, P, 4, causal), given):
        assert value.shape == (0, 20, 20)


@pytest.mark.unit
@each_kernel
def test_dropout_depends_on_the_seed_and_the_place_alone(kernel):
    x = cases.random((2, 50, 50))
    first = kernel(x, P, 7, True)
    assert not torch.equal(first, kernel(x, P, 8, True))
    seen = plain(x, True) != 0
    assert torch.equal(first != 0, kept(kernel, x.shape, P, 7) & seen)


@pytest.mark.unit
def test_dropout_in_triton_takes_its_seed_from_the_device_too():
    x = cases.random((2, 20, 20))
    seed = torch.tensor([7], device=cases.DEVICE)
    assert torch.equal(softmax.softmax_dropout(x, P, seed), softmax.softmax_dropout(x, P, 7))


@pytest.mark.unit
def test_the_launch_changes_nothing_in_triton(monkeypatch):
    x = cases.random((2, 50, 50))
    first = softmax.softmax_dropout(x, P, 7)
    monkeypatch.setattr(softmax, "TILE", 256)
    monkeypatch.setattr(softmax, "NARROWEST", 32)
    second = softmax.softmax_dropout(x, P, 7)
    torch.testing.assert_close(first, second)
    assert torch.equal(first != 0, second != 0)


@pytest.mark.unit
@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, cases.on_a_gpu(torch.float16)], ids=str)
@pytest.mark.parametrize("matrices, S", [(20, 5), (10, 12), (1, 252)])
def test_neighbouring_rows_share_no_bits(kernel, matrices, S, dtype):
    """A call of Philox serves eight keys, also where 8 does not divide the keys of a row.

    Rounded down, the calls of a row would be too few: its last keys and the first of the next row had the same bits.
    """
    shared = S % 8                                          # below 8 keys that is the whole row
    keep = kept(kernel, (matrices, S, S), 0.5, SEED, dtype).view(-1, S)
    last, first = keep[:-1, -shared:], keep[1:, :shared]
    equal = (last == first).double().mean().item()
    assert abs(equal - 0.5) < 5 * math.sqrt(0.25 / last.numel())


@pytest.mark.unit
def test_philox_is_philox():
    """Against the first of the known answers that its authors publish (Salmon et al., Random123)."""
    assert [f"{word:08x}" for word in philox(0, np.zeros(1))[0]] == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]


@pytest.mark.unit
@each_kernel
@pytest.mark.parametrize("seed", [0, 1, SEED, 2**63 - 1, -2**63])
def test_the_bits_are_philox_s(kernel, seed):
    """Which half serves which neighbour is a kernel's own affair; how many of the eight stay is not."""
    bits = philox_bits(16 * 16, seed).reshape(-1, 8)
    for p in (0.2, 0.5, 0.7, 0.8):
        right = (bits >= round(p * 65536)).sum(-1)
        assert kept(kernel, (16, 16), p, seed).view(-1, 8).sum(-1).tolist() == right.tolist()


@pytest.mark.gpu
@pytest.mark.integration
@cases.each_dtype
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -2**63])
def test_dropout_in_cuda_drops_by_seed_and_place(seed, dtype):
    dropped = ~kept(cuda.softmax_dropout, (5, 1000), 0.25, seed, dtype)
    assert torch.equal(dropped.cpu().flatten(), torch.from_numpy(defined_factors(5000, 0.25, seed) == 0))


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.double().flatten(), b.double().flatten()]))[0, 1].abs().item()


@pytest.mark.unit
@each_kernel
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_right_share_independently(kernel, p, monkeypatch):
    large_programs(monkeypatch)
    size = 2048 if cases.DEVICE == "cuda" else 256
    keep = kept(kernel, (size, size), p, 11)
    sigmas = 5 / size                                       # five standard errors of a correlation of size^2 pairs
    assert abs(keep.double().mean().item() - (1 - p)) < sigmas * math.sqrt(p * (1 - p))
    for step in (1, 2, 4, 7, 8, 16, 64):                    # eight neighbours share a call
        assert correlation(keep[:, step:], keep[:, :-step]) < 1.2 * sigmas
        assert correlation(keep[step:], keep[:-step]) < 1.2 * sigmas
        assert correlation(keep[step:, step:], keep[:-step, :-step]) < 1.5 * sigmas
    for seed in (12, 11 + 2**32):
        assert correlation(keep, kept(kernel, (size, size), p, seed)) < sigmas
    places = keep.view(size, -1, 8).double().mean((0, 1))   # of the eight in a call, none is kept more often
    assert (places - (1 - p)).abs().max() < sigmas * math.sqrt(8 * p * (1 - p))


@pytest.mark.unit
@each_kernel
@each_mask
@pytest.mark.parametrize("size", [40, cases.on_a_gpu(24), cases.on_a_gpu(33), cases.on_a_gpu(65)])
def test_every_run_gives_the_same_bits(kernel, size, causal):
    given = [cases.random((2, size, size), torch.float16).requires_grad_()]
    runs = [cases.outputs(lambda scores: kernel(scores, 0.4, -3, causal), given) for _ in range(2)]
    cases.assert_same_bits(*runs)


@pytest.mark.gpu
@pytest.mark.integration
@cases.each_dtype
@pytest.mark.parametrize("p", [0.0, P])
@cases.each_width_of_a_sum
def test_every_run_in_cuda_gives_the_same_bits(width, p, dtype):
    scores = cases.random((13, width), dtype).requires_grad_()
    assert max(errors(cuda.softmax_dropout, scores, p, False)) < 3 * cases.GATES[dtype]
    runs = [cases.outputs(lambda scores: cuda.softmax_dropout(scores, p, SEED), [scores]) for _ in range(2)]
    cases.assert_same_bits(*runs)


@pytest.mark.unit
@each_refusal
@pytest.mark.parametrize("call, said", [
    (lambda kernel, x: kernel(x, 0.1, 1, True), r"scores is \(4, 8\): .*\[..., S, S\]"),
    (lambda kernel, x: kernel(x[:0, :0], 0.1, 1, True), r"scores is \(0, 0\): give"),
    (lambda kernel, x: kernel(x[0], 0.1, 1, True), r"scores is \(8,\): "),
    (lambda kernel, x: kernel(x[:, :4].long(), 0.1, 1, True), "scores is torch.int64"),
    (lambda kernel, x: kernel(x[:, :4], 1.0, 1, True), "p is 1.0: give 0 <= p < 1"),
    (lambda kernel, x: kernel(x[:, :4], 0.999999, 1, True), "p is 0.999999: .* and 1 - p more than 1/131072"),
    (lambda kernel, x: kernel(x[:, :4], -0.1, 1, True), "p is -0.1"),
    (lambda kernel, x: kernel(x[:, :4], math.nan, 1, True), "p is nan"),
    (lambda kernel, x: kernel(x[:, :4], 0.1, 2**63, True), "seed is 9223372036854775808"),
])
def test_bad_input_is_named(kernel, call, said):
    with pytest.raises(ValueError, match=said):
        call(kernel, torch.randn(4, 8, device=cases.DEVICE))


@pytest.mark.unit
@pytest.mark.parametrize("seed, said", [
    (lambda x: 1.5, "seed is 1.5: give an int of 64 bits"),
    (lambda x: x[0].long(), r"seed is \(4,\) torch.int64 .*: give one int64"),
    (lambda x: x[0, 0].int(), r"seed is \(\) torch.int32"),
])
def test_a_bad_seed_in_triton_is_named(seed, said):
    x = torch.randn(4, 4, device=cases.DEVICE)
    with pytest.raises(ValueError, match=said):
        softmax.softmax_dropout(x, 0.1, seed(x))


@pytest.mark.unit
@each_refusal
def test_a_tensor_that_is_not_on_a_gpu_is_named(kernel, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"scores is .*on cpu: a (Triton|CUDA) kernel needs a GPU"):
        kernel(torch.zeros(4, 4), 0.1, 1, True)


@pytest.mark.gpu
@pytest.mark.stress
@each_kernel
@each_mask
@cases.each_dtype
@pytest.mark.parametrize("shape", [(2, 4, 2048, 2048), (1, 1000, 1000), (1, 4097, 4097), (1, 16384, 16384)], ids=str)
def test_sizes_of_a_transformer(kernel, shape, causal, dtype):
    keep = kept(kernel, shape, 0.125, 5)                    # a p that 16 bits can hold: both divide by 1 - p itself
    off = cases.errors(lambda scores: kernel(scores, 0.125, 5, causal),
                       lambda scores: plain(scores, causal, keep / 0.875),
                       [cases.random(shape, dtype, 3.0).requires_grad_()])
    assert max(off) < 3 * cases.GATES[dtype], off


@pytest.mark.gpu
@pytest.mark.stress
@cases.each_dtype
@pytest.mark.parametrize("shape, p, causal", [
    ((16384, 4096), 0.0, False), ((16384, 4096), P, False), ((4096, 16384), 0.0, False), ((4096, 16384), P, False),
    ((100_000, 96), 0.0, False), ((100_000, 96), P, False), ((1000, 65, 65), P, True)], ids=str)
def test_sizes_of_a_transformer_in_cuda(shape, p, causal, dtype):
    off = errors(cuda.softmax_dropout, cases.random(shape, dtype).requires_grad_(), p, causal)
    assert max(off) < 3 * cases.GATES[dtype], off


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
@pytest.mark.parametrize("p, causal", [(0.0, False), (0.1, False), (0.1, True)])
def test_under_the_compiler(kernel, p, causal, fresh_dynamo):
    given = [cases.random((2, 300, 300), torch.float16).requires_grad_()]
    cases.assert_same_under_the_compiler(lambda scores: kernel(scores, p, 5, causal), given)


@pytest.mark.gpu
@pytest.mark.integration
def test_a_captured_graph_in_triton_draws_by_the_seed_it_finds():
    x, seed = cases.random((2, 256, 256)), torch.tensor(1, device=cases.DEVICE)
    softmax.softmax_dropout(x, 0.5, seed)                   # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax.softmax_dropout(x, 0.5, seed)
    for value in (1, 2):
        seed.fill_(value)
        graph.replay()
        assert torch.equal(y, softmax.softmax_dropout(x, 0.5, value))


@pytest.mark.unit
def test_the_threshold_of_dropout_is_exact():
    """Of 65536 values of the bits it drops those below p * 65536. At the largest p one is left, which is kept."""
    scores = torch.zeros(64, 64, 64, device=cases.DEVICE)
    kept = {}
    for left in (1, 2):
        kept[left] = softmax.softmax_dropout(scores, 1 - left / 65536, 3, causal=False) != 0
    expected = scores.numel() / 65536
    assert 0 < kept[1].sum() < 4 * expected and kept[1].sum() < kept[2].sum() and (kept[1] & ~kept[2]).sum() == 0
