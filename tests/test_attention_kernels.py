"""The attention kernels against FP64: outputs and gradients, odd lengths, strides, strange values, bad input.

Without a GPU they run through Triton's interpreter, which conftest.py switches on, in small blocks on small shapes.
"""
import math

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.kernels import attention as kernels
from benchmarks.kernels.attention import Tile, attention
from common import oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
each_dtype = pytest.mark.parametrize("dtype", GATES, ids=str)
each_mask = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_width = pytest.mark.parametrize("D", [64, 128])
pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice)")]


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Blocks as they are on a GPU; in the interpreter small ones of unlike sides, so that short inputs take several."""
    if DEVICE == "cpu":
        cut(monkeypatch, Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(32, 64, 4, 2))


def cut(monkeypatch, *tiles):
    for name, tile in zip(("FORWARD", "BACKWARD_DQ", "BACKWARD_DK_DV"), tiles, strict=True):
        monkeypatch.setattr(kernels, name, {64: tile, 128: tile})


def plain(q, k, v, causal=True, scale=None):
    """Attention as mathematics, in the dtype of its inputs."""
    S, D = q.shape[-2:]
    scores = q @ k.mT * (1 / math.sqrt(D) if scale is None else scale)
    if causal:
        scores = scores + torch.full((S, S), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    return scores.softmax(-1) @ v


def arguments(shape, dtype=torch.float16, scale=1.0, seed=0):
    """q, k, v and the cotangent of the output."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(4))
    return [(scale * q).requires_grad_(), (scale * k).requires_grad_(), v.requires_grad_(), do]


def results(function, q, k, v, do, **options):
    """Output, dq, dk and dv."""
    o = function(q, k, v, **options)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def errors(found, q, k, v, do, **options):
    """Of everything in `results`, relative to FP64; for a row alone, dq and dk are 0: relative to do then."""
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = results(plain, *exact, do.double(), **options)
    if q.size(2) == 1:
        assert max(float(t.abs().max()) for t in (*truth[1:3], *found[1:3])) < GATES[q.dtype] * float(do.norm())
        found, truth = found[::3], truth[::3]
    return [oracle.relative_error(value, right) for value, right in zip(found, truth, strict=True)]


def worst(*given, **options):
    return max(errors(results(attention, *given, **options), *given, **options))


@pytest.mark.parametrize("S, dtype", [(1, torch.float16), (3, torch.float16), (64, torch.float16), (100, torch.float16),
                                      (100, torch.bfloat16)], ids=str)
@each_mask
@each_width
def test_outputs_and_gradients_are_right(S, dtype, D, causal):
    assert worst(*arguments((1, 1, S, D), dtype), causal=causal) < 2 * GATES[dtype]


@each_mask
def test_every_batch_and_head_has_its_own(causal, monkeypatch):
    if DEVICE == "cpu":
        cut(monkeypatch, *[Tile(32, 32, 4, 2)] * 3)                # two blocks of each
    assert worst(*arguments((2, 2, 35, 64)), causal=causal) < 2e-3


@each_mask
@pytest.mark.parametrize("tiles", [[Tile(16, 32, 4, 2)] * 3, [Tile(32, 16, 4, 2)] * 3, [Tile(16, 16, 4, 2)] * 3],
                         ids=["wide", "tall", "square"])
@pytest.mark.skipif(DEVICE == "cuda", reason="blocks that a GPU's wide matrix instructions are not made for")
def test_blocks_of_any_sides(tiles, causal, monkeypatch):
    cut(monkeypatch, *tiles)
    assert worst(*arguments((1, 1, 50, 64)), causal=causal) < 2e-3


def test_a_scale_of_ones_own():
    assert worst(*arguments((1, 2, 40, 64)), scale=0.3) < 2e-3


@each_dtype
@each_mask
def test_scores_of_about_a_hundred(causal, dtype):
    given = arguments((1, 1, 100, 64), dtype, scale=10.0)
    assert (given[0] @ given[1].mT / 8).std() > 90
    eager = errors(results(plain, *given, causal=causal), *given, causal=causal)
    for error, of_eager in zip(errors(results(attention, *given, causal=causal), *given, causal=causal), eager,
                               strict=True):
        assert error < max(2 * GATES[dtype], of_eager)       # of one-hot rows the gradient is what rounding leaves


def views(qkv, B, S, H, D):
    """q, k, v [B, H, S, D] of one [B, S, 3 H D], as a fused projection leaves them."""
    return [part.view(B, S, H, D).transpose(1, 2) for part in qkv.chunk(3, dim=-1)]


def test_inputs_that_are_not_contiguous():
    B, H, S, D = shape = 2, 2, 35, 64
    given = arguments(shape)
    plainly = [t.detach() for t in given]
    bshd, sbhd, turned = ([t.permute(order).contiguous().permute(back) for t in plainly] for order, back in (
        ((0, 2, 1, 3), (0, 2, 1, 3)), ((2, 0, 1, 3), (1, 2, 0, 3)), ((0, 1, 3, 2), (0, 1, 3, 2))))
    of_one = [*views(torch.cat([t.transpose(1, 2).reshape(B, S, H * D) for t in plainly[:3]], -1), B, S, H, D), bshd[3]]
    expected = results(attention, *given)
    for laid in (bshd, sbhd, of_one, turned, [bshd[0], sbhd[1], of_one[2], turned[3]]):
        assert all(torch.equal(a, b) and not a.is_contiguous() for a, b in zip(laid, plainly, strict=True))
        laid = [*(t.detach().requires_grad_() for t in laid[:3]), laid[3]]
        assert all(map(torch.equal, results(attention, *laid), expected))


def test_the_gradient_of_a_sum():
    q, k, v, _ = arguments((1, 2, 33, 64))                    # its cotangent is one number, repeated by strides of 0
    found = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    for a, b in zip(found, results(attention, q, k, v, torch.ones_like(q))[1:], strict=True):
        assert torch.equal(a, b)


def test_no_heads_at_all():
    o, *gradients = results(attention, *arguments((2, 0, 5, 64)))
    assert o.shape == (2, 0, 5, 64) and all(g.shape == o.shape for g in gradients)


@each_mask
def test_every_run_gives_the_same_bits(causal):
    given = arguments((1, 1, 100, 64))
    for a, b in zip(results(attention, *given, causal=causal), results(attention, *given, causal=causal), strict=True):
        assert torch.equal(a, b)


@each_mask
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_reaches_the_rows_that_depend_on_it(which, bad, causal):
    given = [t.detach() for t in arguments((1, 1, 160, 64))]
    given["qkv".index(which)][0, 0, 140, 5] = bad
    found, exact = attention(*given[:3], causal=causal), plain(*(t.double() for t in given[:3]), causal=causal)
    reached = slice(140, None) if causal else slice(None)     # 0 times NaN: the block on the diagonal may hold more
    assert not exact[..., reached, :].isfinite().all()
    assert torch.equal(found[..., reached, :].isfinite(), exact[..., reached, :].isfinite())
    if causal or which == "q":
        assert found[..., :128, :].isfinite().all()


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_what_is_not_finite_reaches_the_gradients_that_depend_on_it(which):
    given = arguments((1, 1, 160, 64))
    with torch.no_grad():
        given[which][0, 0, 140, 5] = math.nan
    _, dq, dk, dv = results(attention, *given)
    queries = slice(140, 141) if which in (0, 3) else slice(140, 160)
    assert not dq[..., queries, :].isfinite().any() and dq[..., :128, :].isfinite().all()
    assert not dk[..., :160 if which in (1, 2) else 141, :].isfinite().any()
    if which in (0, 1):                                       # v's own value is no part of its gradient
        assert not dv[..., :141, :].isfinite().any()


@pytest.mark.parametrize("call, said", [
    (lambda x: attention(x.float(), x.float(), x.float()), "q is torch.float32: give float16 or bfloat16"),
    (lambda x: attention(x[0], x[0], x[0]), r"q is \(2, 8, 64\): give \[B, H, S, D\] with S at least 1 and D 64 or"),
    (lambda x: attention(*[x[..., :32]] * 3), r"q is \(1, 2, 8, 32\)"),
    (lambda x: attention(*[x[:, :, :0]] * 3), r"q is \(1, 2, 0, 64\)"),
    (lambda x: attention(x, x[:, :1], x), r"k is \(1, 1, 8, 64\) torch.float16 on .*: give \(1, 2, 8, 64\)"),
    (lambda x: attention(x, x, x.bfloat16()), r"v is \(1, 2, 8, 64\) torch.bfloat16"),
    (lambda x: attention(x, x, x.to("meta")), "v is .* on meta"),
    (lambda x: attention(x, x, x, scale=0.0), "scale is 0.0: give a positive number"),
    (lambda x: attention(x, x, x, scale=-1.0), "scale is -1.0"),
    (lambda x: attention(x, x, x, scale=math.nan), "scale is nan"),
])
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call(torch.randn(1, 2, 8, 64, device=DEVICE).half())


@pytest.mark.gpu
@each_dtype
@each_mask
@each_width
@pytest.mark.parametrize("S", [2048, 2047])
def test_sizes_of_a_transformer(S, D, causal, dtype):
    given = arguments((2, 4, S, D), dtype)
    assert worst(*given, causal=causal) < 2 * GATES[dtype]
    for a, b in zip(results(attention, *given, causal=causal), results(attention, *given, causal=causal), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@each_width
def test_under_the_compiler(D, fresh_dynamo):
    B, S, H = 2, 300, 4

    def layer(qkv):
        return attention(*views(qkv, B, S, H, D)).transpose(1, 2).reshape(B, S, H * D)

    generator = torch.Generator().manual_seed(0)
    qkv, do = (torch.randn(B, S, n * H * D, generator=generator).to(DEVICE, torch.float16) for n in (3, 1))
    qkv.requires_grad_()
    for function in (layer, torch.compile(layer, fullgraph=True)):
        o = function(qkv)
        found = o.detach(), *torch.autograd.grad(o, qkv, do)
        if function is layer:
            eager = found
    for a, b in zip(found, eager, strict=True):
        assert torch.equal(a, b)
