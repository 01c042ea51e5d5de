"""What a person gets: the fastest way that is right, its reason, and a line for each mistake."""
import pytest
import torch

from benchmarks.patterns import attention, choosing, ways
from benchmarks.patterns.ways import by_hand
from common.outcome import Failed


def tensors(*sizes, gradients=False):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, length, 16, generator=generator).requires_grad_(gradients) for heads, length in sizes]


@pytest.fixture
def made(monkeypatch):
    """made(name -> (builder, milliseconds)): these are all ways, and take so long."""
    def put(of_name):
        monkeypatch.setattr(choosing, "WAYS", {name: build for name, (build, _) in of_name.items()})
        times = iter([milliseconds for _, milliseconds in of_name.values() if milliseconds is not None])
        monkeypatch.setattr(choosing, "_milliseconds", lambda *given: next(times))
    return put


def off_by_one(pattern, shape):
    return by_hand(choosing.pattern_named("sliding_window", window=pattern.window + 1), shape)


def missing(pattern, shape):
    raise NotImplementedError("there is none here")


def too_large(pattern, shape):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")


@pytest.mark.unit
def test_the_fastest_of_those_that_are_right_is_taken(made):
    made({"slow": (by_hand, 3.0), "fast": (by_hand, 1.0), "wrong": (off_by_one, None), "absent": (missing, None),
          "large": (too_large, None)})
    attend, (q, k, v) = attention("sliding_window", window=5), tensors((4, 30), (2, 30), (2, 30))
    y = attend(q, k, v)
    (tried,) = attend.tried.values()
    assert [one.way for one in tried] == ["fast", "slow", "wrong", "absent", "large"]
    assert y.shape == q.shape and not y.requires_grad
    said = str(attend)
    assert said.startswith("sliding_window at q [2, 4, 30, 16], k [2, 2, 30, 16], forward: fast\n")
    for line in ("wrong here: the output is off by", "there is none here", "out of memory"):
        assert line in said


@pytest.mark.unit
@pytest.mark.parametrize("window, leaves_none_out", [(29, False), (30, True), (999, True)])
def test_a_window_that_leaves_no_key_out_says_so(window, leaves_none_out, made):
    """It is causal attention, as a model with a long window has it on a short prompt."""
    made({"one": (by_hand, 1.0)})
    attend, given = attention("sliding_window", window=window), tensors((4, 30), (2, 30), (2, 30))
    y = attend(*given)
    assert (f"a window of {window} over 30 keys leaves none out" in str(attend)) == leaves_none_out
    causal = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    assert torch.allclose(y, causal, atol=1e-5) == leaves_none_out


@pytest.mark.unit
def test_it_is_tried_once_for_a_shape_and_anew_for_another(made):
    """A mask of the length before would be stale."""
    built = []

    def counted(pattern, shape):
        built.append(shape.queries)
        return by_hand(pattern, shape)
    made({"one": (counted, 1.0), "two": (by_hand, 2.0)})
    attend = attention("causal")
    for _ in range(3):
        attend(*tensors((4, 30), (4, 30), (4, 30)))
    made({"one": (counted, 1.0), "two": (by_hand, 2.0)})
    attend(*tensors((4, 31), (4, 31), (4, 31)))
    assert built == [30, 31] and len(attend.tried) == 2


@pytest.mark.unit
@pytest.mark.parametrize("pattern, options", [
    ("sliding_window", {"window": 5}), ("key_padding", {"lengths": [30, 4]}), ("documents", {"documents": [11, 19]}),
    ("relative_bias", {"table": torch.randn(32, 4).requires_grad_()})])
def test_gradients_flow_through_it(pattern, options):
    attend = attention(pattern, way=ways.SDPA, **options)
    q, k, v = tensors((4, 30), (4, 30), (4, 30), gradients=True)
    y = attend(q, k, v)
    y.sum().backward()
    assert all(t.grad is not None for t in (q, k, v, *attend.pattern.learned))
    with torch.no_grad():
        assert not attend(q, k, v).requires_grad
    assert [trains for _, trains in attend.tried] == [True, False]


@pytest.mark.unit
def test_differential_attention_has_wider_values():
    attend = attention("differential", differential=0.8, way=ways.SDPA)
    q, k, _ = tensors((4, 30), (4, 30), (4, 30), gradients=True)
    v = torch.randn(2, 2, 30, 32, requires_grad=True)
    attend(q, k, v).sum().backward()
    assert v.grad is not None and q.grad is not None
    with pytest.raises(ValueError, match=r"give a v of \(2, 2, 30, 32\)"):
        attend(q, k, k)


@pytest.mark.unit
def test_a_mask_follows_the_length(made):
    attend = attention("sliding_window", window=5, way=ways.BY_HAND)
    long = tensors((4, 40), (4, 40), (4, 40))
    short = [t[:, :, :30] for t in long]
    assert torch.allclose(attend(*long)[:, :, :30], attend(*short), atol=1e-6)
    decoded = attend(long[0][:, :, -1:], *long[1:])
    assert torch.allclose(decoded, attend(*long)[:, :, -1:], atol=1e-6)


@pytest.mark.unit
def test_where_none_is_right_every_reason_is_said(made):
    made({"wrong": (off_by_one, None), "absent": (missing, None)})
    with pytest.raises(Failed) as raised:
        attention("sliding_window", window=5)(*tensors((4, 30), (4, 30), (4, 30)))
    assert "no way computes it here: wrong: wrong here: the output is off" in str(raised.value)
    assert "absent: there is none here" in str(raised.value)


@pytest.mark.unit
def test_a_way_without_a_backward_is_not_taken_for_training(made):
    attend = attention("causal")
    taken = {}
    for gradients, times in ((True, [5.0]), (False, [1.0, 5.0])):
        made({ways.FLEX: (by_hand, times[0]), "other": (by_hand, times[1] if times[1:] else None)})
        attend(*tensors((4, 30), (4, 30), (4, 30), gradients=gradients))
        taken[gradients] = next(reversed(attend.tried.values()))[0].way
    assert taken == {True: "other", False: ways.FLEX}


@pytest.mark.unit
def test_only_what_is_used_is_kept(made, monkeypatch):
    """Each way and each shape may hold a mask of S x S."""
    monkeypatch.setattr(choosing, "SHAPES", 2)
    attend = attention("causal")
    for length in (30, 31, 32):
        made({"one": (by_hand, 1.0), "two": (by_hand, 2.0)})
        attend(*tensors((4, length), (4, length), (4, length)))
    assert [shape.queries for shape, _ in attend.tried] == [31, 32]
    assert [[one.attend is None for one in tried] for tried in attend.tried.values()] == [[False, True]] * 2
    assert "two" in str(attend)


@pytest.mark.unit
def test_a_table_on_another_device_is_a_line():
    attend = attention("relative_bias", table=torch.zeros(32, 4, device="meta"))
    with pytest.raises(ValueError, match="table is on meta, q on cpu: move them to one device"):
        attend(*tensors((4, 30), (4, 30), (4, 30)))


@pytest.mark.unit
def test_before_it_is_called_it_has_nothing_to_say():
    assert str(attention("causal")) == "causal: not called yet"


@pytest.mark.unit
@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, ImportError])
def test_what_another_error_says_is_the_reason(made, kind):
    def broken(pattern, shape):
        raise kind("first line\nsecond line")
    made({"broken": (broken, None), "right": (by_hand, 1.0)})
    attend = attention("causal")
    attend(*tensors((4, 30), (4, 30), (4, 30)))
    assert "first line" in str(attend) and "right\n" in str(attend)


@pytest.mark.unit
@pytest.mark.parametrize("options, said", [
    ({"name": "causal", "way": "flash"}, "'flash' is no way: give one of by hand, SDPA"),
    ({"name": "windowed"}, "'windowed' is no pattern"), ({"name": "soft_cap"}, "soft_cap needs cap: give cap=")])
def test_a_mistake_is_a_line(options, said):
    with pytest.raises(ValueError) as raised:
        attention(**options)
    assert said in str(raised.value)


@pytest.mark.unit
def test_what_does_not_fit_is_refused_before_anything_is_tried():
    attend = attention("documents", documents=[10, 10])
    with pytest.raises(ValueError, match="documents of 20 positions in all, 30 queries"):
        attend(*tensors((4, 30), (4, 30), (4, 30)))
    assert not attend.tried


@pytest.mark.unit
def test_autocast_around_it_changes_nothing():
    attend = attention("causal", way=ways.BY_HAND)
    q, k, v = tensors((4, 30), (4, 30), (4, 30))
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(q, k, v)
    assert y.dtype == torch.float32 and torch.equal(y, attend(q, k, v)) and len(attend.tried) == 1


@pytest.mark.integration
def test_a_compiled_model_calls_it_as_it_is(fresh_dynamo):
    attend = attention("sliding_window", window=5, way=ways.SDPA)
    q, k, v = tensors((4, 30), (4, 30), (4, 30))
    compiled = torch.compile(lambda q, k, v: attend(q * 2, k, v) + 1, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v), attend(q * 2, k, v) + 1, atol=1e-6)
