"""Attention, in Triton (with gradients) and in CUDA C++ (without), against FP64.

Without a GPU Triton's alone runs, through the interpreter, in small blocks on small shapes.
"""
import math

import pytest
import torch

pytest.importorskip("triton")
import triton

from benchmarks.kernels import cuda
from benchmarks.kernels.triton import attention as in_triton
from benchmarks.kernels.triton.attention import Tile
from common.block import oracle
from tests.helpers import kernel_cases as cases

pytestmark = [pytest.mark.filterwarnings("ignore:invalid value encountered"),
              pytest.mark.filterwarnings("ignore:All-NaN slice")]
each_kernel = cases.implementations(in_triton.attention, cuda.attention)
each_refusal = cases.implementations(in_triton.attention, cuda.attention, gpu=False)
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
each_mask = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_width = pytest.mark.parametrize("D", [64, 128])


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Blocks as they are on a GPU; in the interpreter small ones of unlike sides, so that short inputs take several."""
    if cases.DEVICE == "cpu":
        cut(monkeypatch, Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(32, 64, 4, 2))


def cut(monkeypatch, forward, backward_dq, backward_dk_dv):
    for name, tile in (("FORWARD", forward), ("BACKWARD_DQ", backward_dq), ("BACKWARD_DK_DV", backward_dk_dv)):
        monkeypatch.setattr(in_triton, name, {64: tile, 128: tile})


def plain(q, k, v, causal=True, scale=None):
    """Attention as mathematics, in the dtype of its inputs."""
    S, D = q.shape[-2:]
    scores = q @ k.mT * (1 / math.sqrt(D) if scale is None else scale)
    if causal:
        scores = scores + torch.full((S, S), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    return scores.softmax(-1) @ v


def arguments(shape, dtype=torch.float16, scale=1.0):
    """q, k, v and the cotangent of the output; q and k times `scale`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(shape, generator=generator).to(cases.DEVICE, dtype) for _ in range(4))
    return [(scale * q).requires_grad_(), (scale * k).requires_grad_(), v.requires_grad_(), do]


def results(kernel, q, k, v, do, **options):
    """Output, dq, dk and dv; of CUDA C++, which has no backward, the output alone."""
    if kernel is cuda.attention:
        return [kernel(q.detach(), k.detach(), v.detach(), **options)]
    o = kernel(q, k, v, **options)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def errors(values, q, k, v, do, **options):
    """Of what `results` has given, relative to FP64."""
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = results(plain, *doubles, do.double(), **options)
    if q.size(2) == 1:                     # dq and dk are 0: what is left is rounding
        for zeros in (values[1:3], exact[1:3]):
            assert all(float(t.abs().max()) < cases.GATES[q.dtype] * float(do.norm()) for t in zeros)
        values, exact = values[::3], exact[::3]
    return [oracle.relative_error(value, right) for value, right in zip(values, exact, strict=False)]


def assert_right(kernel, given, **options):
    output, *gradients = errors(results(kernel, *given, **options), *given, **options)
    gate = cases.GATES[given[0].dtype]
    assert output < gate
    assert all(error < 2 * gate for error in gradients), gradients


SHAPES = [((1, 1, S), torch.float16) for S in (1, 3, 64, 100)] + [((1, 1, 100), torch.bfloat16)]
SHAPES += [cases.on_a_gpu((2, 3, S), dtype) for S in (1, 7, 63, 64, 65, 128, 129, 200, 321)
           for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.unit
@each_kernel
@pytest.mark.parametrize("shape, dtype", SHAPES, ids=str)
@each_mask
@each_width
def test_outputs_and_gradients_are_right(kernel, shape, dtype, D, causal):
    assert_right(kernel, arguments((*shape, D), dtype), causal=causal)


@pytest.mark.unit
@each_kernel
@each_mask
def test_every_batch_and_head_has_its_own(kernel, causal, monkeypatch):
    if cases.DEVICE == "cpu":
        cut(monkeypatch, *[Tile(32, 32, 4, 2)] * 3)                # two blocks of each
    assert_right(kernel, arguments((2, 2, 35, 64)), causal=causal)


@pytest.mark.unit
@each_mask
@pytest.mark.parametrize("tile", [Tile(16, 32, 4, 2), Tile(32, 16, 4, 2), Tile(16, 16, 4, 2)],
                         ids=["wide", "tall", "square"])
@pytest.mark.skipif(cases.DEVICE == "cuda", reason="blocks that a GPU's wide matrix instructions are not made for")
def test_blocks_of_any_sides_in_triton(tile, causal, monkeypatch):
    cut(monkeypatch, tile, tile, tile)
    assert_right(in_triton.attention, arguments((1, 1, 50, 64)), causal=causal)


@pytest.mark.unit
def test_a_scale_of_ones_own_in_triton():
    assert_right(in_triton.attention, arguments((1, 2, 40, 64)), scale=0.3)


@pytest.mark.unit
@each_kernel
@each_dtype
@each_mask
def test_scores_of_about_a_hundred(kernel, causal, dtype):
    given = arguments((1, 1, 100, 64), dtype, scale=10.0)
    assert (given[0] @ given[1].mT / 8).std() > 90
    of_kernel = errors(results(kernel, *given, causal=causal), *given, causal=causal)
    of_eager = errors(results(plain, *given, causal=causal), *given, causal=causal)
    for error, by_rounding in zip(of_kernel, of_eager, strict=False):
        assert error < max(2 * cases.GATES[dtype], by_rounding)     # of one-hot rows the gradient is rounding


@pytest.mark.unit
@each_kernel
@each_mask
@each_width
def test_scores_of_several_thousand(kernel, D, causal):
    q, k, v = [t.detach() for t in arguments((1, 2, 150, D), scale=30.0)[:3]]
    exact = plain(q.double(), k.double(), v.double(), causal)
    assert oracle.relative_error(kernel(q, k, v, causal), exact) < 2e-3


def views(qkv, B, S, H, D):
    """q, k, v [B, H, S, D] of one [B, S, 3 H D], as a fused projection leaves them."""
    return [part.view(B, S, H, D).transpose(1, 2) for part in qkv.chunk(3, dim=-1)]


def laid_out(given, order, back):
    """The same values, in memory in that order of dimensions."""
    return [t.permute(order).contiguous().permute(back) for t in given]


@pytest.mark.unit
@each_kernel
def test_inputs_that_are_not_contiguous(kernel):
    B, H, S, D = shape = 2, 2, 35, 64
    given = arguments(shape)
    values = [t.detach() for t in given]
    bshd = laid_out(values, (0, 2, 1, 3), (0, 2, 1, 3))
    sbhd = laid_out(values, (2, 0, 1, 3), (1, 2, 0, 3))
    turned = laid_out(values, (0, 1, 3, 2), (0, 1, 3, 2))
    side_by_side = torch.cat([t.transpose(1, 2).reshape(B, S, H * D) for t in values[:3]], -1)
    of_one = [*views(side_by_side, B, S, H, D), bshd[3]]
    mixed = [bshd[0], sbhd[1], of_one[2], turned[3]]
    expected = results(kernel, *given)
    for inputs in (bshd, sbhd, of_one, turned, mixed):
        for t, right in zip(inputs, values, strict=True):
            assert torch.equal(t, right) and not t.is_contiguous()
        qkv = [t.detach().requires_grad_() for t in inputs[:3]]
        cases.assert_same_bits(results(kernel, *qkv, inputs[3]), expected)


@pytest.mark.gpu
@pytest.mark.integration
@each_mask
@each_width
def test_inputs_that_are_not_aligned_in_cuda(D, causal):
    given = [t.detach() for t in arguments((1, 2, 150, D))[:3]]
    shifted = [t.detach() for t in cases.unaligned(given)]
    assert torch.equal(cuda.attention(*shifted, causal=causal), cuda.attention(*given, causal=causal))


@pytest.mark.unit
def test_the_gradient_of_a_sum_in_triton():
    q, k, v, _ = arguments((1, 2, 33, 64))                    # its cotangent is one number, repeated by strides of 0
    gradients = torch.autograd.grad(in_triton.attention(q, k, v).sum(), (q, k, v))
    cases.assert_same_bits(gradients, results(in_triton.attention, q, k, v, torch.ones_like(q))[1:])


@pytest.mark.unit
@each_kernel
def test_no_heads_at_all(kernel):
    for value in results(kernel, *arguments((2, 0, 5, 64))):
        assert value.shape == (2, 0, 5, 64)


@pytest.mark.unit
@each_kernel
@each_mask
def test_every_run_gives_the_same_bits(kernel, causal):
    given = arguments((1, 1, 100, 64))
    cases.assert_same_bits(results(kernel, *given, causal=causal), results(kernel, *given, causal=causal))


@pytest.mark.unit
@each_kernel
@each_mask
@cases.each_bad_number
@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float16, cases.on_a_gpu(torch.bfloat16)], ids=str)
def test_what_is_not_finite_reaches_the_rows_that_depend_on_it(kernel, which, bad, causal, dtype):
    given = [t.detach() for t in arguments((1, 1, 160, 64), dtype)[:3]]
    given[which][0, 0, 140, 5] = bad
    o, exact = kernel(*given, causal=causal), plain(*(t.double() for t in given), causal=causal)
    reached = slice(140, None) if causal else slice(None)     # 0 times NaN: the block on the diagonal may hold more
    assert not exact[..., reached, :].isfinite().all()
    assert torch.equal(o[..., reached, :].isfinite(), exact[..., reached, :].isfinite())
    if causal or which == 0:
        assert o[..., :128, :].isfinite().all()


@pytest.mark.unit
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_what_is_not_finite_reaches_gradients_in_triton(which):
    given = arguments((1, 1, 160, 64))
    with torch.no_grad():
        given[which][0, 0, 140, 5] = math.nan
    _, dq, dk, dv = results(in_triton.attention, *given)
    queries = slice(140, 141) if which in (0, 3) else slice(140, 160)
    assert not dq[..., queries, :].isfinite().any() and dq[..., :128, :].isfinite().all()
    assert not dk[..., :160 if which in (1, 2) else 141, :].isfinite().any()
    if which in (0, 1):                                       # v's own value is no part of its gradient
        assert not dv[..., :141, :].isfinite().any()


@pytest.mark.gpu
@pytest.mark.integration
@cases.each_bad_number
@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_the_last_row_alone_sees_what_is_not_finite_in_cuda(which, bad):
    given = [t.detach() for t in arguments((1, 2, 70, 64), torch.bfloat16)[:3]]
    given[which][0, 1, 69, 3] = bad
    o, eager = cuda.attention(*given), plain(*given)
    assert torch.equal(o[0, 1, 69].isfinite(), eager[0, 1, 69].isfinite())
    assert o[0, 0].isfinite().all()
    if which < 2:                                             # 0 times NaN: a block of queries shares its values
        assert o[0, 1, :64].isfinite().all()


@pytest.mark.gpu
@pytest.mark.integration
def test_where_the_first_keys_have_no_weight_in_cuda():
    q, k, v = [t.detach() for t in arguments((1, 1, 130, 64), torch.bfloat16)[:3]]
    q[:] = 1
    k[..., :64, :] = -math.inf
    exact = plain(q.double(), k.double(), v.double(), causal=False)
    assert oracle.relative_error(cuda.attention(q, k, v, causal=False), exact) < cases.GATES[torch.bfloat16]


@pytest.mark.unit
@each_refusal
@pytest.mark.parametrize("call, said", [
    (lambda kernel, x: kernel(x.float(), x.float(), x.float()), "q is torch.float32: give float16 or bfloat16"),
    (lambda kernel, x: kernel(x[0], x[0], x[0]), r"q is \(2, 8, 64\): give \[B, H, S, D\] with S .* and D 64 or 128"),
    (lambda kernel, x: kernel(*[x[..., :32]] * 3), r"q is \(1, 2, 8, 32\)"),
    (lambda kernel, x: kernel(*[x.new_empty(1, 1, 4, 96)] * 3), r"q is \(1, 1, 4, 96\): give .* D 64 or 128"),
    (lambda kernel, x: kernel(*[x[:, :, :0]] * 3), r"q is \(1, 2, 0, 64\): give .* with S (at least|from) 1"),
    (lambda kernel, x: kernel(x, x[:, :1], x), r"k is \(1, 1, 8, 64\) torch.float16 on .*: give \(1, 2, 8, 64\)"),
    (lambda kernel, x: kernel(x, x, x.bfloat16()), r"v is \(1, 2, 8, 64\) torch.bfloat16"),
    (lambda kernel, x: kernel(x, x, x.to("meta")), "v is .* on meta"),
])
def test_bad_input_is_named(kernel, call, said):
    with pytest.raises(ValueError, match=said):
        call(kernel, torch.randn(1, 2, 8, 64, device=cases.DEVICE).half())


@pytest.mark.unit
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_a_bad_scale_in_triton_is_named(scale):
    x = torch.randn(1, 2, 8, 64, device=cases.DEVICE).half()
    with pytest.raises(ValueError, match=f"scale is {scale}: give a positive number"):
        in_triton.attention(x, x, x, scale=scale)


@pytest.mark.unit
def test_a_gradient_that_cuda_does_not_have_is_named():
    x = torch.randn(1, 1, 4, 64, device=cases.DEVICE).half().requires_grad_()
    with pytest.raises(ValueError, match="no backward"):
        cuda.attention(x, x, x)


@pytest.mark.unit
@each_refusal
def test_a_tensor_that_is_not_on_a_gpu_is_named(kernel, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    x = torch.zeros(1, 1, 2, 64).half()
    with pytest.raises(ValueError, match=r"q is .*on cpu: a (Triton|CUDA) kernel needs a GPU"):
        kernel(x, x, x)


@pytest.mark.gpu
@pytest.mark.stress
@each_kernel
@each_dtype
@each_mask
@each_width
@pytest.mark.parametrize("S", [2048, 2047])
def test_sizes_of_a_transformer(kernel, S, D, causal, dtype):
    given = arguments((2, 4, S, D), dtype)
    assert_right(kernel, given, causal=causal)
    cases.assert_same_bits(results(kernel, *given, causal=causal), results(kernel, *given, causal=causal))


@pytest.mark.gpu
@pytest.mark.integration
@each_width
def test_under_the_compiler_in_triton(D, fresh_dynamo):
    B, S, H = 2, 300, 4

    def layer(qkv):
        return in_triton.attention(*views(qkv, B, S, H, D)).transpose(1, 2).reshape(B, S, H * D)

    generator = torch.Generator().manual_seed(0)
    qkv, do = (torch.randn(B, S, n * H * D, generator=generator).to(cases.DEVICE, torch.float16) for n in (3, 1))
    qkv.requires_grad_()
    runs = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        o = function(qkv)
        runs.append((o.detach(), *torch.autograd.grad(o, qkv, do)))
    cases.assert_same_bits(*runs)


@pytest.mark.gpu
@pytest.mark.integration
@each_kernel
def test_in_a_cuda_graph(kernel):
    cases.assert_same_in_a_graph(kernel, arguments((1, 1, 80, 64))[:3])
