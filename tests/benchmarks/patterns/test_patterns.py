"""Who sees what: each pattern in all of its forms, against definitions that are written out pair by pair."""
import math

import pytest
import torch

from benchmarks.patterns.pattern import (
    BUCKETS,
    NAMED,
    Pattern,
    allowed_pairs,
    buckets_of,
    interval_of,
    pattern_named,
    random_documents,
    slopes_of,
)
from benchmarks.patterns.ways import Bias, Shape, block_mask, dense_mask

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
TABLE = torch.randn(BUCKETS, 2, generator=torch.Generator().manual_seed(0))
S = 24
DOCUMENTS = (1, 9, 5, 9)


def document(place):
    """Which one a position stands in."""
    return next(number for number in range(4) if place < sum(DOCUMENTS[:number + 1]))


SEEN = {  # name -> (options, whether query at position p of sequence b sees key k)
    "full": ({}, lambda b, p, k: True),
    "causal": ({}, lambda b, p, k: k <= p),
    "sliding_window": ({"window": 5}, lambda b, p, k: k in range(p - 4, p + 1)),
    "prefix": ({"prefix": 7}, lambda b, p, k: k < 7 or k <= p),
    "documents": ({"documents": DOCUMENTS}, lambda b, p, k: k <= p and document(p) == document(k)),
    "key_padding": ({"lengths": (24, 3)}, lambda b, p, k: k < (24, 3)[b]),
    "alibi": ({}, lambda b, p, k: k <= p),
    "relative_bias": ({"table": TABLE}, lambda b, p, k: True),
    "soft_cap": ({"cap": 2.0}, lambda b, p, k: k <= p),
    "differential": ({"differential": 0.8}, lambda b, p, k: k <= p),
}
COMBINED = [
    ("documents", {"documents": DOCUMENTS, "window": 3},
     lambda b, p, k: k in range(p - 2, p + 1) and document(p) == document(k)),
    ("soft_cap", {"cap": 2.0, "window": 30}, lambda b, p, k: k <= p),
    ("causal", {"lengths": (20, 2)}, lambda b, p, k: k <= p and k < (20, 2)[b]),
    ("causal", {"lengths": (20, 2), "window": 4}, lambda b, p, k: k in range(p - 3, p + 1) and k < (20, 2)[b]),
]
EVERY = [(name, options, sees) for name, (options, sees) in SEEN.items()] + COMBINED


def shape(queries=S, keys=S, heads=2):
    return Shape(2, heads, heads, queries, keys, 8, torch.float32, CPU)


def pair_by_pair(sees, queries, keys):
    """[2, queries, keys]; the last query stands beside the last key."""
    return torch.tensor([[[sees(b, q + keys - queries, k) for k in range(keys)] for q in range(queries)]
                         for b in range(2)])


def test_every_name_is_tried():
    assert SEEN.keys() == NAMED.keys()


@pytest.mark.parametrize("queries", [S, 10, 1])
@pytest.mark.parametrize("name, options, sees", EVERY)
def test_each_form_says_who_sees_what(name, options, sees, queries):
    if options.get("documents") and queries != S:
        pytest.skip("documents are of as many queries as keys")
    pattern = pattern_named(name, **options)
    expected = pair_by_pair(sees, queries, S)
    mask = dense_mask(pattern, shape(queries))
    assert expected.all() if mask is None else torch.equal(mask.expand(2, 1, queries, S)[:, 0], expected)
    low, high = interval_of(pattern, 2, queries, S, CPU)
    places = torch.arange(S)
    assert torch.equal(((places >= low[..., None]) & (places < high[..., None])).expand(2, queries, S), expected)
    assert (low.diff(dim=-1) >= 0).all() and (high.diff(dim=-1) >= 0).all()
    assert allowed_pairs(pattern, 2, queries, S) == int(expected.sum())


@pytest.mark.parametrize("name, options, sees", EVERY)
def test_no_block_that_somebody_needs_is_skipped(name, options, sees):
    """Of 300 positions, in blocks of 128."""
    options = dict(options)
    if options.get("documents"):
        options["documents"] = (100, 28, 150, 22)
    if options.get("lengths"):
        options["lengths"] = (300, 129)
    pattern, wide = pattern_named(name, **options), shape(300, 300)
    blocks, mask = block_mask(pattern, wide), dense_mask(pattern, wide)
    assert (blocks is None) == (mask is None)
    if blocks is not None:
        every = mask.float().expand(-1, -1, 300, -1)
        needed = torch.nn.functional.pad(every, (0, 84, 0, 84)).unfold(2, 128, 128).unfold(3, 128, 128)
        assert torch.equal(blocks.to_dense().bool().expand(2, 1, 3, 3), needed.amax((-1, -2)).bool().expand(2, 1, 3, 3))


@pytest.mark.parametrize("heads", [2, 8])
def test_alibi_falls_with_the_distance(heads):
    """The slopes of the paper: 1/2 to 1/256 for eight heads."""
    bias = Bias.of(pattern_named("alibi"), shape(3, 5, heads))()
    for h in range(heads):
        for q in range(3):
            for k in range(5):
                assert math.isclose(bias[0, h, q, k], -2.0**(-8 * (h + 1) / heads) * abs(q + 2 - k), rel_tol=1e-6)
    assert slopes_of(8, CPU).tolist() == [2.0**-i for i in range(1, 9)]


def bucket(distance, causal):
    """T5's, of key minus query: half of the buckets for one distance each, the others by logarithms."""
    first, count, away = 0, BUCKETS, max(0, -distance)
    if not causal:
        count, away = BUCKETS // 2, abs(distance)
        first = count if distance > 0 else 0
    exact = count // 2
    if away < exact:
        return first + away
    return first + min(count - 1, exact + int(math.log(away / exact) / math.log(128 / exact) * (count - exact)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(9, 9), (3, 200), (1, 140), (150, 150)])
def test_t5_has_a_bias_a_bucket(queries, keys, causal):
    buckets = buckets_of(queries, keys, causal, CPU)
    ahead = keys - queries
    for k in range(keys):
        for q in (0, queries // 2, queries - 1):
            assert buckets[k - q + queries - 1] == bucket(k - (q + ahead), causal)
    pattern = Pattern("one", causal=causal, table=TABLE)
    bias = Bias.of(pattern, shape(queries, keys))(TABLE)
    assert bias.shape == (1, 2, queries, keys)
    assert torch.equal(bias[0, :, queries - 1, 0], TABLE[bucket(1 - keys, causal)])


def test_random_documents_add_up():
    for length in (1, 100, 2048):
        sizes = random_documents(length, seed=3)
        assert sum(sizes) == length and min(sizes) >= 1
    assert random_documents(2048, 0) != random_documents(2048, 1)
    assert 200 < sum(random_documents(100_000)) / len(random_documents(100_000)) < 900


@pytest.mark.parametrize("name, options, said", [
    ("windowed", {}, "'windowed' is no pattern: give one of full, causal"),
    ("causal", {"width": 3}, "there is no option width; there are alibi"),
    ("sliding_window", {}, "sliding_window needs window"),
    ("sliding_window", {"window": 0}, "window is 0: give a whole number from 1 on"),
    ("sliding_window", {"window": 2.0}, "window is 2.0"), ("sliding_window", {"window": True}, "window is True"),
    ("prefix", {"prefix": -1}, "prefix is -1"), ("soft_cap", {"cap": 0.0}, "cap is 0.0: give a positive number"),
    ("soft_cap", {"cap": math.inf}, "cap is inf"), ("documents", {"documents": (4, 0)}, "a length in documents is 0"),
    ("documents", {"documents": (4, 2.5)}, "a length in documents is 2.5"),
    ("key_padding", {"lengths": (0, 4)}, "a length in lengths is 0"), ("full", {"window": 4}, "give causal=True"),
    ("prefix", {"prefix": 4, "window": 2}, "a query would see two ranges of keys"),
    ("differential", {"differential": math.nan}, "differential is nan: give a number"),
    ("differential", {"differential": 0.8, "alibi": True}, "would have different ones"),
    ("alibi", {"table": TABLE}, "give one bias"), ("relative_bias", {"table": TABLE[:31]}, "give [32, heads]")])
def test_what_is_no_pattern_is_said_in_a_line(name, options, said):
    with pytest.raises(ValueError) as raised:
        pattern_named(name, **options)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name, options, sizes, said", [
    ("causal", {}, (2, 2, 9, 8), "9 queries and 8 keys"),
    ("documents", {"documents": (3, 4)}, (2, 2, 8, 8), "documents of 7 positions in all, 8 queries and 8 keys"),
    ("documents", {"documents": (4, 4)}, (2, 2, 4, 8), "must add up to both"),
    ("key_padding", {"lengths": (3, 4)}, (1, 2, 8, 8), "lengths of 2 sequences, a batch of 1"),
    ("key_padding", {"lengths": (3, 9)}, (2, 2, 8, 8), "a length of 9, and 8 keys"),
    ("differential", {"differential": 0.8}, (2, 3, 8, 8), "3 heads of queries: give an even number"),
    ("prefix", {"prefix": 9}, (2, 2, 8, 8), "prefix is 9, and there are 8 keys"),
    ("relative_bias", {"table": TABLE}, (2, 3, 8, 8), "give [32, 3]")])
def test_what_does_not_fit_is_said_in_a_line(name, options, sizes, said):
    with pytest.raises(ValueError) as raised:
        pattern_named(name, **options).check(*sizes)
    assert said in str(raised.value)


def test_what_just_fits_does():
    pattern_named("key_padding", lengths=torch.tensor([3, 8])).check(2, 2, 8, 8)
    pattern_named("prefix", prefix=8).check(2, 2, 8, 8)
    pattern_named("causal").check(2, 2, 8, 8)
    pattern_named("documents", documents=torch.tensor([3, 5])).check(2, 2, 8, 8)


@pytest.mark.parametrize("name, options, queries, is_plain", [
    ("causal", {}, 8, True), ("causal", {}, 7, False), ("sliding_window", {"window": 8}, 8, True),
    ("sliding_window", {"window": 7}, 8, False), ("full", {}, 8, False), ("prefix", {"prefix": 1}, 8, False),
    ("causal", {"lengths": (8, 8)}, 8, False)])
def test_when_a_pattern_is_plain_causal(name, options, queries, is_plain):
    assert pattern_named(name, **options).is_plain_causal(queries, 8) == is_plain
