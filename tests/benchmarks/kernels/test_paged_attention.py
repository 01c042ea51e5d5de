"""One decode step over a paged cache, in Triton, against FP64. Without a GPU through the interpreter."""
import math

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels.triton import paged_attention as module
from benchmarks.kernels.triton.paged_attention import paged_attention
from common.block import oracle
from tests.helpers import kernel_cases as cases

pytestmark = [pytest.mark.unit]
PAGE, P = 64, 5


def given(H=4, G=2, D=64, dtype=torch.float16, lengths=(1, 64, 65, 320), page=PAGE):
    """q, pools, table, lengths; in the pool lies rubbish wherever no sequence has a key."""
    generator = torch.Generator().manual_seed(0)
    B = len(lengths)
    pool = B * P + 3
    table = torch.randperm(pool, generator=generator)[:B * P].view(B, P)
    q = torch.randn(B, H, 1, D, generator=generator)
    pools = [torch.full((pool, page, G, D), 100.0) for _ in range(2)]
    for b, length in enumerate(lengths):
        for place in range(length):
            for one in pools:
                one[table[b, place // page], place % page] = torch.randn(G, D, generator=generator)
    floats = (t.to(cases.DEVICE, dtype) for t in (q, *pools))
    return *floats, table.to(cases.DEVICE, torch.int32), torch.tensor(lengths, dtype=torch.int32, device=cases.DEVICE)


def exact(q, k, v, table, lengths, scale=None):
    """In FP64, a sequence after the other."""
    outputs = []
    for b, length in enumerate(lengths.tolist()):
        own = [pool[table[b].long()].flatten(0, 1)[:length].double().transpose(0, 1) for pool in (k, v)]
        keys, values = (t.repeat_interleave(q.size(1) // t.size(0), 0) for t in own)
        scores = q[b].double() @ keys.mT * (scale or 1 / math.sqrt(q.size(-1)))
        outputs.append(scores.softmax(-1) @ values)
    return torch.stack(outputs)


def error(tensors, **options):
    y = paged_attention(*tensors, **options)
    assert y.shape == tensors[0].shape and y.dtype == tensors[0].dtype
    return oracle.relative_error(y, exact(*tensors, **options))


@pytest.mark.parametrize("programs", [1, 24, 1000])
@pytest.mark.parametrize("H, G", [(4, 2), (4, 4), (20, 1)])
def test_every_split_is_right(H, G, programs, monkeypatch):
    """One share a sequence, some, and one a page; of heads that have a program alone, and that are more than a tile."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    assert error(given(H, G)) < cases.GATES[torch.float16]


@pytest.mark.parametrize("dtype, D, page", [(torch.bfloat16, 64, 64), (torch.float16, 128, 128)])
def test_dtypes_widths_and_pages(dtype, D, page):
    assert error(given(dtype=dtype, D=D, page=page)) < cases.GATES[dtype]


def test_a_scale_and_views():
    q, k, v, *rest = given()
    assert error((q, k, v, *rest), scale=0.5) < cases.GATES[torch.float16]
    turned = [pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (k, v)]
    assert error((q, *turned, *rest)) < cases.GATES[torch.float16]


@pytest.mark.parametrize("by", [-1, 1])
def test_one_key_less_or_more_shows(by):
    q, k, v, table, lengths = given(lengths=(63, 64, 65, 319))
    wrong = paged_attention(q, k, v, table, lengths + by)
    assert oracle.relative_error(wrong, exact(q, k, v, table, lengths)) > 10 * cases.GATES[torch.float16]


REFUSED = [
    (lambda q, k, v, table, lengths: (q[:, :, 0], k, v, table, lengths), r"give \[B, H, 1, D\]"),
    (lambda q, k, v, table, lengths: (q[..., :32], k, v, table, lengths), "D 64 or 128"),
    (lambda q, k, v, table, lengths: (q.float(), k, v, table, lengths), "give float16 or bfloat16"),
    (lambda q, k, v, table, lengths: (q, k[:, :60], v[:, :60], table, lengths), "PAGE a multiple of 64"),
    (lambda q, k, v, table, lengths: (q[:, :3], k, v, table, lengths), "3 heads one of G"),
    (lambda q, k, v, table, lengths: (q, k, v[:, :, :1], table, lengths), "v is"),
    (lambda q, k, v, table, lengths: (q, k.bfloat16(), v, table, lengths), "k is"),
    (lambda q, k, v, table, lengths: (q, k, v, table.long(), lengths), "table is"),
    (lambda q, k, v, table, lengths: (q, k, v, table[:2], lengths), "table is"),
    (lambda q, k, v, table, lengths: (q, k, v, table, lengths[:2]), "lengths is"),
]


@pytest.mark.parametrize("change, said", REFUSED)
def test_what_it_can_not_take_is_a_line(change, said):
    with pytest.raises(ValueError, match=said):
        paged_attention(*change(*given()))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_is_positive(scale):
    with pytest.raises(ValueError, match="give a positive number"):
        paged_attention(*given(), scale=scale)
