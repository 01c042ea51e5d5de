"""A decode step over a paged cache: every way against FP64, at changing tables and lengths; wrong ones are caught."""
import pytest
import torch

from benchmarks.patterns import paged
from benchmarks.patterns.paged import PAGE, WAYS, check, inputs_of, lengths_of
from benchmarks.patterns.ways import BY_HAND, COMPILED, FLEX, SDPA, TE, TRITON, VARLEN, Shape
from common.outcome import Failed

VECTORS = True                         # of a CPU: FlexAttention is compiled with them alone

CPU = torch.device("cpu")
PLAIN, COMPILING = [BY_HAND, SDPA], [COMPILED, FLEX]


def shape(batch=3, heads=4, kv_heads=2, pages=3, width=16, dtype=torch.float32, device=CPU):
    return Shape(batch, heads, kv_heads, 1, pages * PAGE, width, dtype, device)


def later(given, lengths):
    """The same pool and queries, with other lengths."""
    return [*given[:4], torch.tensor(lengths, dtype=torch.int32, device=given[4].device)]


def is_right(way, of):
    """At all lengths at once: one key, a page, one more, all; then with every sequence's pages in another one's."""
    step, given = WAYS[way](of), inputs_of(of, 0)
    assert check(step, of, given).keys() == {"output"}
    full = [pool.clone().masked_fill_(pool == paged.RUBBISH, 0.5) for pool in given[1:3]]
    given = [given[0], *full, given[3].flip(0), given[4]]
    for lengths in ([1, PAGE, PAGE + 1], [3 * PAGE, 3 * PAGE - 1, 2 * PAGE]):
        check(step, of, later(given, lengths))


@pytest.mark.unit
@pytest.mark.parametrize("way", PLAIN)
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (3, 3)])
def test_a_way_is_right(way, heads, kv_heads):
    is_right(way, shape(heads=heads, kv_heads=kv_heads))


@pytest.mark.integration
@pytest.mark.parametrize("way", COMPILING)
def test_a_compiled_way_is_right(way):
    is_right(way, shape())


@pytest.mark.integration
@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_heads, width", [(2, 64), (8, 128)])
def test_each_way_is_right_on_a_gpu(way, kv_heads, width):
    """Transformer Engine's pages are its own; the packed attention of torch 2.11 has none."""
    of = shape(heads=8, kv_heads=kv_heads, width=width, dtype=torch.bfloat16, device=torch.device("cuda"))
    try:
        is_right(way, of)
    except NotImplementedError:
        assert way in (TE, VARLEN)


@pytest.mark.unit
def test_lengths_are_from_half_to_all():
    of = shape(batch=64, pages=16)
    lengths = lengths_of(of)
    assert lengths[0] == of.keys and of.keys // 2 < lengths[-1] < of.keys * 0.52
    assert any(length % PAGE for length in lengths) and lengths_of(shape(batch=1)) == [3 * PAGE]


@pytest.mark.unit
def test_rubbish_lies_where_no_key_is():
    of = shape()
    _, k, v, table, lengths = inputs_of(of, 0)
    for pool in (k, v):
        keys = paged.gathered(pool, table)
        for b, length in enumerate(lengths.tolist()):
            assert not (keys[b, :, :length] == paged.RUBBISH).any() and (keys[b, :, length:] == paged.RUBBISH).all()
    assert len(set(table.flatten().tolist())) == table.numel()


def of_other_pages(q, k, v, table, lengths):
    return WAYS[BY_HAND](shape())(q, k, v, table.roll(1, 0), lengths)


def of_pages_out_of_order(q, k, v, table, lengths):
    """Softmax does not ask for an order, but which page is the last one does."""
    return WAYS[BY_HAND](shape())(q, k, v, table.flip(1), lengths)


def of_one_key_less(q, k, v, table, lengths):
    return WAYS[BY_HAND](shape())(q, k, v, table, lengths - 1)


def of_one_key_more(q, k, v, table, lengths):
    return WAYS[BY_HAND](shape())(q, k, v, table, (lengths + 1).clamp(max=3 * PAGE))


def of_whole_pages(q, k, v, table, lengths):
    return WAYS[BY_HAND](shape())(q, k, v, table, -(-lengths // PAGE) * PAGE)


def of_others_heads(q, k, v, table, lengths):
    return WAYS[BY_HAND](shape())(q, k.flip(2), v.flip(2), table, lengths)


@pytest.mark.unit
@pytest.mark.parametrize("wrong", [of_other_pages, of_pages_out_of_order, of_one_key_less, of_one_key_more,
                                   of_whole_pages, of_others_heads], ids=lambda wrong: wrong.__name__)
def test_wrong_pages_are_caught(wrong):
    with pytest.raises(Failed, match="the output is off by"):
        check(wrong, shape(), inputs_of(shape(), 0))


@pytest.mark.unit
def test_another_shape_is_caught():
    with pytest.raises(Failed, match=r"it gives torch.float32 \(3, 4, 16\)"):
        check(lambda *given: WAYS[SDPA](shape())(*given)[:, :, 0], shape(), inputs_of(shape(), 0))


@pytest.mark.unit
@pytest.mark.parametrize("way, said", [(TE, "a cache of its own"), (VARLEN, "on a GPU alone"),
                                       (TRITON, "on a GPU alone")])
def test_what_a_cpu_lacks_is_a_reason(way, said):
    with pytest.raises(NotImplementedError, match=said):
        WAYS[way](shape())
