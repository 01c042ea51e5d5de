"""nn.MultiheadAttention whose weights nobody reads: found in any spelling, the same function without, in one kernel."""
import pytest
import torch

from benchmarks.assistant import multihead
from benchmarks.assistant.optimize import optimize
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.techniques import sdpa
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import observe
from tests.helpers import multihead_spellings as spellings
from tests.helpers.pasting import pasted

pytestmark = pytest.mark.integration
TECHNIQUE = sdpa.TECHNIQUE
_generator = torch.Generator().manual_seed(0)
X, MEMORY = (torch.randn(2, length, spellings.WIDTH, generator=_generator) for length in (5, 7))
PADDING = torch.arange(7) >= torch.tensor([[7], [4]])
GIVEN = X, MEMORY, PADDING


def named(value):
    return getattr(value, "__name__", None)


def made(spelling):
    torch.manual_seed(1)
    return spelling()


def found_in(model):
    program = read(model, Inputs.of(GIVEN))
    return program, TECHNIQUE.find(program)


def is_same(other, model):
    judgement = validate(other, model, GIVEN)
    assert judgement.passed and judgement.outputs_proven, judgement


@pytest.mark.parametrize("spelling", spellings.RIGHT, ids=named)
def test_it_is_found_rewritten_and_its_advice_can_be_pasted(spelling, tmp_path):
    model = made(spelling)
    program, [found] = found_in(model)
    assert found.place.file == spellings.__file__ and not found.why_not
    keys = 5 if spelling is spellings.Causal else 7
    assert f"its weights [2, 5, {keys}], which nobody reads" in found.reason
    assert found.count == (2 if spelling is spellings.InALoop else 1)
    rung = Rung(model, [TECHNIQUE])
    is_same(rung, model)
    rung(*GIVEN)
    ran = observe(lambda: rung(*GIVEN), X.device)
    assert any("scaled_dot_product" in name for name in ran) and not ran["aten::baddbmm"], ran
    advice = TECHNIQUE.advice(program, found)
    assert advice.code.count("need_weights=False") == 1
    other = made(getattr(pasted(advice, spellings, tmp_path / "pasted.py"), spelling.__name__))
    is_same(other, model)
    assert not found_in(other)[1], advice.code


@pytest.mark.parametrize("spelling", spellings.READ, ids=named)
def test_weights_that_are_read_stay(spelling):
    model = made(spelling)
    _, [found] = found_in(model)
    assert found.why_not == "its attention weights are read" and not found.can_be_tried
    is_same(Rung(model, [TECHNIQUE]), model)


def test_where_none_are_made_nothing_is_found():
    assert not found_in(made(spellings.WithoutWeights))[1]


def test_an_option_by_its_place_is_left_to_a_person():
    program, [found] = found_in(made(spellings.ByPlace))
    with pytest.raises(NotWritten, match="need_weights is given by its place"):
        TECHNIQUE.advice(program, found)


def test_what_is_written_is_tried(studies_in_seconds):
    result = optimize(made(spellings.Indexed), GIVEN, quick=True, techniques=[TECHNIQUE])
    [one] = result.opportunities
    assert one.speedup and one.verdict in ("take", "no gain") and not result.failures


def without_mask(node):
    node.kwargs = {**node.kwargs, "attn_mask": None, "is_causal": False}


def with_other_heads(node):
    node.update_arg(4, 2 * spellings.HEADS)


@pytest.mark.parametrize("change", [without_mask, with_other_heads], ids=named)
def test_a_wrong_rewrite_is_unsafe(change, monkeypatch):
    def wrong(graph):
        for region in multihead.weights_in(graph):
            [node] = region.nodes
            node.kwargs = {**node.kwargs, "need_weights": False}
            change(node)
        return []
    monkeypatch.setattr("benchmarks.assistant.multihead_rewriting.without_weights", wrong)
    model = made(spellings.Causal)
    assert not validate(Rung(model, [TECHNIQUE]), model, GIVEN).passed
