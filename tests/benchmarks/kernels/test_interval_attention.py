"""Attention over one range of keys for each query, in Triton, against FP64: forward and gradients.

Without a GPU through the interpreter, in small blocks on short sequences.
"""
import math

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels.triton import interval_attention as module
from benchmarks.kernels.triton.attention import Tile
from benchmarks.kernels.triton.interval_attention import interval_attention, intervals
from common.block import oracle
from tests.helpers import kernel_cases as cases

pytestmark = [pytest.mark.filterwarnings("ignore:invalid value encountered"),
              pytest.mark.filterwarnings("ignore:All-NaN slice")]
B, H, T, D = 2, 2, 150, 64


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """As they are on a GPU; in the interpreter small ones of unlike sides, so that short inputs take several."""
    if cases.DEVICE == "cpu":
        for name, tile in (("FORWARD", Tile(64, 32, 4, 2)), ("BACKWARD_DQ", Tile(32, 64, 4, 2)),
                           ("BACKWARD_DK_DV", Tile(32, 64, 4, 2))):
            monkeypatch.setattr(module, name, {64: tile, 128: tile})


def causal(S):
    position = torch.arange(T - S, T)
    return torch.zeros_like(position)[None], position[None] + 1


def window(S, width=37):
    low, high = causal(S)
    return (high - width).clamp(min=0), high


def full(S):
    return torch.zeros(1, S), torch.full((1, S), T)


def documents(S):
    """Of 1, 60, 70 and 19 positions."""
    sizes = torch.tensor([1, 60, 70, 19])
    begin = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)[None, T - S:]
    return begin, causal(S)[1]


def padded(S):
    """All keys, and 33 of them."""
    return torch.zeros(B, S), torch.tensor([[T], [33]]).expand(B, S)


def nothing_at_the_end(S):
    """The last queries of the second sequence see no key at all."""
    low, high = window(S, 9)
    return low.expand(B, S), torch.minimum(high, torch.tensor([[T], [33]]))


RANGES = [full, causal, window, documents, padded, nothing_at_the_end]


def ends_of(made, S):
    low, high = (t.to(cases.DEVICE, torch.int32) for t in made(S))
    return intervals(low, high, T)


def given(S, G=H, dtype=torch.float16, width=D):
    """q, k, v and the cotangent of the output."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(B, H, S, width), (B, G, T, width), (B, G, T, width), (B, H, S, width)]
    q, k, v, do = (torch.randn(size, generator=generator).to(cases.DEVICE, dtype) for size in sizes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def plain(q, k, v, made, cap=None, falls=None):
    """As mathematics, zeros where a query sees nothing."""
    low, high = (t.to(q.device)[:, None, :, None] for t in made(q.size(2)))
    places = torch.arange(T, device=q.device)
    seen = (places >= low) & (places < high)
    repeated = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1)
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if falls is not None:
        position = torch.arange(T - q.size(2), T, device=q.device)
        scores = scores - falls.double()[:, None, None] * (position[:, None] - places).abs()
    scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0) @ v


def errors(q, k, v, do, ends, made, **options):
    """Of the output, dq, dk and dv, relative to FP64."""
    o = interval_attention(q, k, v, ends, **options)
    found = [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    y = plain(*wide, made, **options)
    exact = [y.detach(), *torch.autograd.grad(y, wide, do.double())]
    return [oracle.relative_error(mine, right) for mine, right in zip(found, exact, strict=True)]


def assert_right(tensors, made, **options):
    output, *gradients = errors(*tensors, ends_of(made, tensors[0].size(2)), made, **options)
    gate = cases.GATES[tensors[0].dtype]
    assert output < gate and all(error < 2 * gate for error in gradients), (output, gradients)


@pytest.mark.unit
@pytest.mark.parametrize("made", RANGES)
@pytest.mark.parametrize("S, G", [(T, H), (T, 1), (70, H), (1, 1)])
def test_every_range_is_right(made, S, G):
    assert_right(given(S, G), made)


@pytest.mark.unit
@pytest.mark.parametrize("width, dtype", [(128, torch.float16), (64, torch.bfloat16)])
def test_widths_and_dtypes(width, dtype):
    assert_right(given(T, dtype=dtype, width=width), window)


@pytest.mark.unit
@pytest.mark.parametrize("made", [full, window, nothing_at_the_end])
@pytest.mark.parametrize("S, G", [(T, H), (70, 1)])
@pytest.mark.parametrize("cap, falls", [(1.5, False), (None, True), (1.5, True)])
def test_scores_that_are_capped_or_fall(made, S, G, cap, falls):
    options = {"cap": cap, "falls": torch.tensor([0.5, 0.01], device=cases.DEVICE) if falls else None}
    assert_right(given(S, G), made, **options)


@pytest.mark.unit
def test_a_large_cap_is_none():
    q, k, v, do = given(T)
    without, capped = (interval_attention(q, k, v, ends_of(window, T), cap=cap) for cap in (None, 1e4))
    assert oracle.relative_error(capped.detach(), without.detach().double()) < cases.GATES[torch.float16]


@pytest.mark.unit
def test_a_view_is_read_as_it_lies():
    q, k, v, do = given(T)
    turned = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    assert_right((*turned, do.transpose(1, 2).contiguous().transpose(1, 2)), window)
    columns = [t.detach().mT.contiguous().mT.requires_grad_() for t in (q, k, v)]
    assert_right((*columns, do), window)


@pytest.mark.unit
@pytest.mark.parametrize("what, by", [("low", 1), ("low", -1), ("high", 1), ("high", -1)])
def test_an_end_that_is_off_by_one_shows(what, by):
    low, high = window(T)
    moved = {"low": (low + by).clamp(0), "high": (high + by).clamp(1, T)}[what]
    ends = [t.to(cases.DEVICE, torch.int32) for t in ((moved, high) if what == "low" else (low, moved))]
    found = errors(*given(T), intervals(*ends, T), window)
    assert min(found) > 10 * cases.GATES[torch.float16]


@pytest.mark.unit
def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient():
    q, k, v, do = given(T)
    o = interval_attention(q, k, v, ends_of(nothing_at_the_end, T))
    (dq,) = torch.autograd.grad(o, [q], do)
    blind = nothing_at_the_end(T)[0][1] >= nothing_at_the_end(T)[1][1]
    assert blind.any() and (o[1][:, blind.to(o.device)] == 0).all() and (dq[1][:, blind.to(o.device)] == 0).all()
    assert o.isfinite().all() and dq.isfinite().all()


@pytest.mark.unit
@pytest.mark.parametrize("made", RANGES)
@pytest.mark.parametrize("S", [T, 70])
def test_a_key_is_seen_by_a_range_of_queries(made, S):
    low, high, first, last = (t.cpu().long() for t in ends_of(made, S))
    keys, queries = torch.arange(T), torch.arange(S)
    by_query = (keys >= low[..., None]) & (keys < high[..., None])
    by_key = (queries >= first[..., None]) & (queries < last[..., None])
    assert torch.equal(by_query, by_key.mT)


REFUSED = [
    (lambda q, k, v, ends: (q[0], k, v, ends), r"give \[B, H, S, D\]"),
    (lambda q, k, v, ends: (q[:, :, :0], k, v, ends), "none of them 0"),
    (lambda q, k, v, ends: (q[..., :32], k[..., :32], v[..., :32], ends), "D 64 or 128"),
    (lambda q, k, v, ends: (q.float(), k.float(), v.float(), ends), "give float16 or bfloat16"),
    (lambda q, k, v, ends: (q, k[:, :1].expand(-1, 3, -1, -1), v, ends), "2 heads are a multiple of G"),
    (lambda q, k, v, ends: (q, k.bfloat16(), v, ends), "k is"), (lambda q, k, v, ends: (q, k, v[:, :1], ends), "v is"),
    (lambda q, k, v, ends: (q, k, v, ends._replace(low=ends.low[:, 1:])), "low is"),
    (lambda q, k, v, ends: (q, k, v, ends._replace(last=ends.last.long())), "last is"),
]


@pytest.mark.unit
@pytest.mark.parametrize("change, said", REFUSED)
def test_what_it_can_not_take_is_a_line(change, said):
    q, k, v, _ = (t.detach() for t in given(T))
    with pytest.raises(ValueError, match=said):
        interval_attention(*change(q, k, v, ends_of(window, T)))


@pytest.mark.unit
@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["scale", "cap"])
def test_a_scale_and_a_cap_are_positive(name, number):
    q, k, v, _ = (t.detach() for t in given(T))
    with pytest.raises(ValueError, match=f"{name} is .*: give a positive number"):
        interval_attention(q, k, v, ends_of(window, T), **{name: number})


@pytest.mark.unit
@pytest.mark.parametrize("falls", [torch.ones(3), torch.ones(2, dtype=torch.float64)])
def test_a_fall_is_one_number_a_head(falls):
    q, k, v, _ = (t.detach() for t in given(T))
    with pytest.raises(ValueError, match=r"give float32 \[2\]"):
        interval_attention(q, k, v, ends_of(window, T), falls=falls)
