"""The lines that are advised in place of attention by hand: right for each mask, mode and length; or there are none."""
import importlib.util

import pytest
import torch

from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.techniques import sdpa
from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import validate
from tests.helpers import attention_statements as statements
from tests.helpers.pasting import pasted

pytestmark = pytest.mark.integration
X = torch.randn(2, statements.LENGTH, statements.WIDTH, generator=torch.Generator().manual_seed(0))
PADDING = torch.zeros(2, 1, 1, statements.LENGTH, dtype=torch.bool)
PADDING[1, ..., -3:] = True


def made(kind):
    torch.manual_seed(0)
    return kind()


def inputs_of(kind):
    """With a mask and without, and on a length that a bias of all lengths has no place for."""
    shorter = [] if kind is statements.BiasOnTheLeft else [(X[:, :7], PADDING[..., :7])]
    return [(X, PADDING), (X,), *shorter]


@pytest.mark.parametrize("kind", statements.WRITTEN, ids=lambda kind: kind.__name__)
def test_one_piece_of_code_holds_with_a_mask_and_without_in_both_modes_and_on_other_lengths(kind, tmp_path):
    model = made(kind)
    written = {}
    for given in ((X, PADDING), (X,)):
        program = read(model, Inputs.of(given))
        [found] = sdpa.find(program)
        written[sdpa.advice(program, found)] = given
    [advice] = written                                         # found in either way, it is the same code
    other = made(getattr(pasted(advice, statements, tmp_path / "pasted.py"), kind.__name__))
    assert "softmax" not in advice.code
    for training in (True, False):
        model.train(training)
        other.train(training)
        for inputs in inputs_of(kind):
            judgement = validate(other, model, inputs, cotangents=1)
            assert judgement.passed, f"{advice.code}\n{judgement.failure}"


SCALED = """
import math
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 0.5

    def forward(self, q, k, v, given=None):
        BEFORE
        scores = q @ k.mT SCALE
        return scores.softmax(-1) @ v
"""


@pytest.mark.parametrize("scale, before, said", [
    ("* 0.5", "", ""),
    ("* self.scale", "", ""),
    ("/ math.sqrt(q.size(-1))", "", ""),
    ("/ math.sqrt(k.shape[-1])", "", ""),
    ("/ math.sqrt(d)", "B, S, d = q.shape", ""),
    ("/ math.sqrt(d)", "d = q.size(-1)", ""),
    ("* 1.0 * scale", "d = q.size(-1); scale = d ** -0.5", ""),
    ("/ math.sqrt(S)", "B, S, d = q.shape", ", scale=1 / math.sqrt(S)"),
    ("/ math.sqrt(q.size(1))", "", ", scale=1 / math.sqrt(q.size(1))"),
    ("/ math.sqrt(q.shape[-2])", "", ", scale=1 / math.sqrt(q.shape[-2])"),
    ("/ math.sqrt(len(q[0]))", "", ", scale=1 / math.sqrt(len(q[0]))"),
    ("* 0.5 * math.log(q.size(1), 4)", "", ", scale=0.5 * math.log(q.size(1), 4)"),
    ("* scale", "scale = 0.5; scale *= math.log(q.size(1), 4)", ", scale=scale"),
    ("* scale", "scale = 0.5 * math.log(q.size(1), 4)", ", scale=scale"),
    ("* scale", "scale = 0.5\n        if q.size(1) > 512:\n            scale = 0.25", ", scale=scale"),
    ("* scale", "scale = 0.5 if given is None else given", ", scale=scale"),
    ("* 0.25", "", ", scale=0.25")])
def test_a_scale_is_left_out_where_it_is_that_by_default_for_inputs_of_any_length(scale, before, said, tmp_path):
    """Queries are 4 wide, and here are 4 of them."""
    path = tmp_path / "scaled.py"
    path.write_text(SCALED.replace("SCALE", scale).replace("BEFORE", before or "pass"))
    spec = importlib.util.spec_from_file_location("scaled", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = read(module.Attention(), Inputs.of(torch.randn(3, 2, 4, 4).unbind()))
    [found] = sdpa.find(program)
    assert f"v.unsqueeze(0){said}).squeeze(0)" in sdpa.advice(program, found).code


@pytest.mark.parametrize("kind", statements.NOT_WRITTEN, ids=lambda kind: kind.__name__)
def test_what_can_not_be_written_so_says_why_and_is_rewritten_in_the_graph_all_the_same(kind):
    model = made(kind)
    program = read(model, Inputs.of((X, PADDING)))
    [found] = sdpa.find(program)
    with pytest.raises(NotWritten, match=statements.NOT_WRITTEN[kind]):
        sdpa.advice(program, found)
    assert validate(Rung(model, [sdpa.TECHNIQUE]), model, (X, PADDING)).passed


@pytest.mark.parametrize("kind, kept", [
    (statements.MaskInBetween, []),
    (statements.MaskIsReadAgain, ["seen = torch.ones(S, S, dtype=torch.bool)", "seen = seen.tril()"]),
    (statements.MaskInALoop, ["seen = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()"]),
    (statements.MaskByAFunctionOfItsOwn, ["seen = self.seen(q.size(-2))"])])
def test_a_causal_mask_that_nothing_else_needs_goes(kind, kept, tmp_path):
    """But for one whose function may do more, and one that stands in a loop."""
    model = made(kind)
    program = read(model, Inputs.of((X,)))
    [found] = sdpa.find(program)
    advice = sdpa.advice(program, found)
    *lines, call = advice.code.splitlines()
    assert "is_causal=True" in call and lines == kept
    other = made(getattr(pasted(advice, statements, tmp_path / "pasted.py"), kind.__name__))
    judgement = validate(other, model, (X,), cotangents=1)
    assert judgement.passed, judgement.failure


def test_comments_and_what_something_else_needs_stay(tmp_path):
    def code_of(kind):
        program = read(made(kind), Inputs.of((X, PADDING)))
        return sdpa.advice(program, *sdpa.find(program)).code.splitlines()
    assert code_of(statements.CausalAlone) == ["return F.scaled_dot_product_attention(q, k, v, is_causal=True)"]
    assert code_of(statements.CausalAsAnArgument) == ["return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)"]
    assert code_of(statements.AddedWhereItIsGiven) == [
        "return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)"]
    assert code_of(statements.OptionalMask) == [
        "# Padding is never looked at.", "attn_mask = None", "if padding is not None:",
        "    attn_mask = torch.where(padding, -1e9, 0.0)",
        "return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)"]
    assert "v = v * 1.5                                      # it stays, with what is said of it" in code_of(
        statements.NamesAreUsedAgain)
    assert code_of(statements.NamesThatTheCallHas)[:4] == [
        "query_ = query", "attn_mask_ = None", "if attn_mask is not None:", "    attn_mask_ = ~attn_mask"]
    assert code_of(statements.QueryChanges)[:2] == ["query = q", "q = q + 1"]
