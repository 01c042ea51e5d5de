"""Each way computes each pattern, and a wrong mask never passes for the right one."""
import functools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.patterns import checking, ways
from benchmarks.patterns.pattern import BUCKETS, pattern_named
from benchmarks.patterns.ways import Shape
from common.block import oracle
from common.outcome import Failed

VECTORS = True                         # of a CPU: FlexAttention is compiled with them alone

CPU = torch.device("cpu")
S = 70
TABLE = torch.randn(BUCKETS, 4, generator=torch.Generator().manual_seed(0))
PATTERNS = [
    pattern_named("full"), pattern_named("causal"), pattern_named("sliding_window", window=9),
    pattern_named("prefix", prefix=20), pattern_named("documents", documents=(1, 30, 17, 22)),
    pattern_named("key_padding", lengths=(70, 13)), pattern_named("alibi"),
    pattern_named("relative_bias", table=TABLE), pattern_named("soft_cap", cap=1.5),
    pattern_named("soft_cap", cap=1.5, window=9), pattern_named("documents", documents=(40, 30), window=9),
    pattern_named("causal", lengths=(70, 13), window=9),
]
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)


def shape(kv_heads=4, queries=S, keys=S, dtype=torch.float32, device=CPU):
    return Shape(2, 4, kv_heads, queries, keys, 16, dtype, device)


def checked(way, pattern, where):
    """What is off, of a way at a shape."""
    backward = not ways.why_no_backward(way, where.device)
    given = checking.inputs_of(pattern, where, seed=0)
    if not backward:
        given = [t.detach() for t in given]
    return checking.check(ways.WAYS[way](pattern, where), pattern, where, given, seed=1, backward=backward)


@pytest.mark.unit
@pytest.mark.parametrize("where", [shape(), shape(kv_heads=2), shape(kv_heads=1)], ids=["", "grouped", "one head"])
@each_pattern
@pytest.mark.parametrize("way", [ways.BY_HAND, ways.SDPA])
def test_a_dense_way_is_right(way, pattern, where):
    if way == ways.SDPA and pattern.cap:
        pytest.skip("it can't cap scores")
    found = checked(way, pattern, where)
    names = ["output", "gradient of q", "gradient of k", "gradient of v"]
    assert list(found) == [*names, *["gradient of table"] * len(pattern.learned), checking.OTHER_LAYOUT]


@pytest.mark.unit
@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if not pattern.documents],
                         ids=lambda pattern: pattern.name)
@pytest.mark.parametrize("queries", [1, 33])
def test_fewer_queries_than_keys_stand_at_the_end(pattern, queries):
    checked(ways.BY_HAND, pattern, shape(queries=queries))
    if not pattern.cap:
        checked(ways.SDPA, pattern, shape(queries=queries))


@pytest.mark.integration
@pytest.mark.parametrize("way", [ways.COMPILED, ways.FLEX])
@pytest.mark.parametrize("pattern", [PATTERNS[place] for place in (2, 4, 7, 9, 11)], ids=lambda pattern: pattern.name)
def test_a_compiled_way_is_right(way, pattern):
    checked(way, pattern, shape(kv_heads=2))


@pytest.mark.unit
def test_a_query_that_sees_nothing_gives_zeros():
    pattern, where = pattern_named("causal", lengths=(70, 13), window=9), shape()
    given = [t.detach() for t in checking.inputs_of(pattern, where, seed=0)]
    y = ways.by_hand(pattern, where)(*given)
    assert (y[1, :, 21:] == 0).all() and y[1, :, :21].count_nonzero() == y[1, :, :21].numel()


@pytest.mark.unit
@each_pattern
def test_pieces_of_queries_make_the_same_truth(pattern, monkeypatch):
    """Which FP64 takes where all scores would not fit."""
    where = shape(kv_heads=2)
    given = checking.inputs_of(pattern, where, seed=0)
    attend = ways.by_hand(pattern, where)
    whole = checking.errors(attend, pattern, where, given, seed=1)
    monkeypatch.setattr(checking, "PIECE", 2 * 2 * S * 11)
    assert checking.errors(attend, pattern, where, given, seed=1) == pytest.approx(whole, rel=1e-6)


PAIRED = pattern_named("differential", differential=0.8)


@pytest.mark.unit
@pytest.mark.parametrize("way", [ways.BY_HAND, ways.SDPA])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_differential_attention_is_right(way, kv_heads):
    """v and the result have half of the heads, twice as wide."""
    where = replace(shape(kv_heads=kv_heads), value_width=32)
    assert ways.WAYS[way](PAIRED, where)(*checking.inputs_of(PAIRED, where, seed=0)).shape == (2, 2, S, 32)
    checked(way, PAIRED, where)


@pytest.mark.integration
@pytest.mark.parametrize("way", [ways.COMPILED, ways.FLEX])
def test_differential_attention_is_right_compiled(way):
    checked(way, replace(PAIRED, window=9), replace(shape(), value_width=32))


@pytest.mark.unit
def test_the_difference_is_as_the_paper_has_it():
    """(softmax(q1 k1) - share softmax(q2 k2)) v, for each two heads that stand beside each other."""
    where = replace(shape(), value_width=32)
    q, k, v = (t.detach().double() for t in checking.inputs_of(PAIRED, where, seed=0))
    past = torch.ones(S, S, dtype=torch.bool).tril()
    weights = (q @ k.mT / 4).masked_fill(~past, -torch.inf).softmax(-1)
    y = ways.WAYS[ways.BY_HAND](PAIRED, replace(where, dtype=torch.float64))(q, k, v)
    for head in range(2):
        exact = (weights[:, 2 * head] - 0.8 * weights[:, 2 * head + 1]) @ v[:, head]
        torch.testing.assert_close(y[:, head], exact)


# -------------------------------------------------------------------------------------------------------- what is wrong


def top_left(q, k, v):
    """The mask that is_causal means, where keys are longer than queries."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def inverted(q, k, v):
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, seen.triu(1).mT | ~seen)


def tiled_heads(q, k, v):
    """Heads 0, 1, 0, 1 of the keys in place of 0, 0, 1, 1."""
    return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), is_causal=True)


def unscaled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def of(pattern, where=None):
    """A right function of another pattern."""
    return ways.by_hand(pattern, where or shape())


def of_twice_the_heads(q, k, v):
    doubled = (t.repeat(1, 2, 1, 1) for t in (q, k, v))
    return of(pattern_named("alibi"), replace(shape(), heads=8, kv_heads=8))(*doubled)[:, :4]


causal, window = pattern_named("causal"), pattern_named("sliding_window", window=9)
documents = pattern_named("documents", documents=(1, 30, 17, 22))
padding, learned = pattern_named("key_padding", lengths=(70, 13)), pattern_named("relative_bias", table=TABLE)
WRONG = {
    "a window of one key less": (window, of(replace(window, window=8))),
    "a window of one key more": (window, of(replace(window, window=10))),
    "a mask that blocks what is seen": (causal, inverted),
    "full in place of causal": (causal, of(pattern_named("full"))),
    "without its own position": (causal, lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(S, S, dtype=torch.bool).tril(-1).logical_or(F.one_hot(torch.tensor(0), S).bool()))),
    "one key of the document before": (documents, of(replace(documents, documents=(2, 29, 17, 22)))),
    "another batch's documents": (documents, of(replace(documents, documents=(22, 17, 30, 1)))),
    "no documents": (documents, of(causal)),
    "the padding of the other sequence": (padding, of(replace(padding, lengths=(13, 70)))),
    "one key of padding": (padding, of(replace(padding, lengths=(70, 14)))),
    "a prefix of one key less": (pattern_named("prefix", prefix=20), of(pattern_named("prefix", prefix=19))),
    "slopes without a bias": (pattern_named("alibi"), of(causal)),
    "the slopes of twice the heads": (pattern_named("alibi"), of_twice_the_heads),
    "buckets of a causal bias": (learned, of(replace(learned, causal=True))),
    "scores without their cap": (pattern_named("soft_cap", cap=1.5), of(causal)),
    "scores without their scale": (causal, unscaled),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mask_is_caught(name):
    pattern, attend = WRONG[name]
    given = checking.inputs_of(pattern, shape(), seed=0)
    with pytest.raises(Failed, match="is off by"):
        checking.check(attend, pattern, shape(), given, seed=1)


@pytest.mark.unit
@pytest.mark.parametrize("where, attend", [(shape(queries=33), top_left), (shape(kv_heads=2), tiled_heads)],
                         ids=["top-left for bottom-right", "the other heads of keys"])
def test_what_is_right_at_another_shape_is_caught(where, attend):
    given = checking.inputs_of(causal, where, seed=0)
    with pytest.raises(Failed, match="the output is off by"):
        checking.check(attend, causal, where, given, seed=1)


@pytest.mark.unit
@pytest.mark.parametrize("wrong", [
    replace(PAIRED, differential=0.79), replace(PAIRED, differential=-0.8), replace(PAIRED, window=69)])
def test_another_difference_is_caught(wrong):
    where = replace(shape(), value_width=32)
    given = checking.inputs_of(PAIRED, where, seed=0)
    with pytest.raises(Failed, match="the output is off by"):
        checking.check(ways.WAYS[ways.BY_HAND](wrong, where), PAIRED, where, given, seed=1)


@pytest.mark.unit
@pytest.mark.parametrize("share, passes", [(0.5, True), (2.0, False)])
def test_the_gate_is_that_of_the_dtype(share, passes):
    gate, _ = oracle.MODULE_GATES[torch.float32]
    right = ways.by_hand(causal, shape())
    given = checking.inputs_of(causal, shape(), seed=0)

    def scaled(q, k, v):
        return right(q, k, v) * (1 + share * gate)
    if passes:
        checking.check(scaled, causal, shape(), given, seed=1)
    else:
        with pytest.raises(Failed, match="the output is off by"):
            checking.check(scaled, causal, shape(), given, seed=1)


@pytest.mark.unit
@pytest.mark.parametrize("device, dtype, allowed, gate", [
    ("cuda", torch.float32, True, 2e-3), ("cuda", torch.float32, False, 1e-5), ("cpu", torch.float32, True, 1e-5),
    ("cuda", torch.bfloat16, True, 1.6e-2), ("cuda", torch.float64, True, 1e-9)])
def test_fp32_may_be_off_by_tf32_where_that_is_allowed(device, dtype, allowed, gate):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        assert checking.gates_of(shape(dtype=dtype, device=torch.device(device))) == (gate, pytest.approx(3 * gate))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.unit
@pytest.mark.parametrize("share, passes", [(0.8, True), (1.2, False)])
def test_a_gradient_may_be_three_times_as_far(share, passes):
    _, gate = oracle.MODULE_GATES[torch.float32]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return dx * (1 + share * gate)
    right = ways.by_hand(causal, shape())
    given = checking.inputs_of(causal, shape(), seed=0)
    check = functools.partial(checking.check, lambda q, k, v: right(q, Scaled.apply(k), v), causal, shape(), given, 1)
    if passes:
        check()
    else:
        with pytest.raises(Failed, match="the gradient of k is off by"):
            check()


@pytest.mark.unit
def test_a_backward_that_trusts_the_layout_of_the_cotangent_is_caught():
    """As a kernel that was made for the first one it saw."""
    class Trusting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            lies = dy.transpose(1, 2) if dy.transpose(1, 2).is_contiguous() else dy
            return lies.reshape(dy.shape)                  # its memory, as if it lay in the order of the other
    right = ways.by_hand(causal, shape())
    given = checking.inputs_of(causal, shape(), seed=0)
    with pytest.raises(Failed, match="the gradient where dy is laid out otherwise is off by"):
        checking.check(lambda q, k, v: Trusting.apply(right(q, k, v).contiguous()), causal, shape(), given, seed=1)


@pytest.mark.unit
def test_another_shape_or_dtype_is_no_result():
    given = checking.inputs_of(causal, shape(), seed=0)
    with pytest.raises(Failed, match="it gives"):
        checking.check(lambda q, k, v: q.sum(1), causal, shape(), given, seed=1)
    with pytest.raises(Failed, match=r"it gives torch\.float64"):
        checking.check(lambda q, k, v: q.double(), causal, shape(), given, seed=1)


# ---------------------------------------------------------------------------------------------------- what is not there


@pytest.mark.unit
@pytest.mark.parametrize("way, pattern, reason", [
    (ways.SDPA, PATTERNS[8], "a tanh would stand between them"), (ways.TE, window, "on a GPU alone"),
    (ways.VARLEN, documents, "on a GPU alone")])
def test_what_a_way_lacks_is_its_reason(way, pattern, reason):
    with pytest.raises(NotImplementedError, match=reason):
        ways.WAYS[way](pattern, shape())


@pytest.mark.unit
@pytest.mark.parametrize("way", [ways.COMPILED, ways.FLEX])
def test_without_a_compiler_nothing_is_compiled(way, monkeypatch):
    monkeypatch.setattr("common.runtime.compiler.missing", lambda device: "no C++ compiler found")
    with pytest.raises(NotImplementedError, match="no C"):
        ways.WAYS[way](window, shape())


@pytest.mark.unit
@pytest.mark.parametrize("tensors, said", [
    ([(2, 4, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16)], "give a multiple of these"),
    ([(2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 9, 16)], r"give a v of \(2, 4, 8, 16\)"),
    ([(2, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16)], "give one batch and one width"),
    ([(4, 8, 16), (4, 8, 16), (4, 8, 16)], r"give \[batch, heads, length, width\]"),
    ([(2, 4, 0, 16), (2, 4, 8, 16), (2, 4, 8, 16)], "give no empty tensor")])
def test_tensors_that_do_not_fit_are_said_in_a_line(tensors, said):
    with pytest.raises(ValueError, match=said):
        Shape.of(*map(torch.zeros, tensors))


@pytest.mark.unit
def test_whole_numbers_are_refused():
    q = torch.zeros(1, 1, 2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"q is torch\.int64: give float64, float32"):
        Shape.of(q, q, q)


@pytest.mark.unit
def test_a_dtype_beside_another_is_said():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"v torch\.float64 on cpu: give one of both"):
        Shape.of(q, q, q.double())


@pytest.mark.unit
def test_a_learned_bias_sums_its_gradient_in_fp32():
    """In BF16 it would be off by 0.05: each distance sums as many numbers as there are places on it."""
    pattern = pattern_named("relative_bias", table=TABLE)
    where = replace(shape(queries=256), keys=256, dtype=torch.bfloat16)
    given = checking.inputs_of(pattern, where, seed=0)
    found = checking.errors(ways.WAYS[ways.SDPA](pattern, where), pattern, where, given, seed=1)
    assert found["gradient of table"] < 0.02


# ---------------------------------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("way", [way for way in ways.WAYS if way != ways.BY_HAND])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_each_way_is_right_on_a_gpu(way, pattern):
    if pattern.learned:
        pattern = replace(pattern, table=TABLE.cuda())
    for kv_heads in (4, 2):
        where = Shape(2, 4, kv_heads, S, S, 64, torch.bfloat16, torch.device("cuda"))
        try:
            checked(way, pattern, where)
        except NotImplementedError as reason:
            may_lack_it = {ways.TE: True, ways.VARLEN: True, ways.SDPA: pattern.cap is not None,
                           ways.TRITON: bool(pattern.learned)}
            assert may_lack_it.get(way), reason
