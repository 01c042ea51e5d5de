"""Attention by hand with a soft cap: it is found, and FlexAttention in its place is the same function."""
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.techniques import autocast, compiled, flex_attention, sdpa
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import kind_of, observe
from tests.helpers import capped_attention as spellings
from tests.helpers.pasting import pasted

VECTORS = True                         # of a CPU: FlexAttention is compiled with them alone

X = torch.randn(2, spellings.LENGTH, spellings.WIDTH, generator=torch.Generator().manual_seed(0))
COUNTS = torch.arange(spellings.LENGTH).expand(2, -1) < torch.tensor([[spellings.LENGTH], [23]])
FLEX = flex_attention.TECHNIQUE
named = pytest.mark.parametrize


def of_name(kind):
    return kind.__name__


def made(spelling):
    torch.manual_seed(1)
    return spelling()


def found_by(technique, model, inference=True):
    program = replace(read(model, Inputs.of((X, COUNTS))), is_inference=inference)
    return technique.find(program)


@pytest.mark.integration
@named("spelling", spellings.RIGHT, ids=of_name)
def test_it_is_the_same_function(spelling, monkeypatch):
    """Uncompiled: what its kernel computes is held beside the model's below, and by its lines."""
    monkeypatch.setattr(flex_attention, "_compiled", flex.flex_attention)
    model = made(spelling)
    judgement = validate(Rung(model, [FLEX]), model, (X, COUNTS))
    assert judgement.passed and judgement.outputs_proven, judgement


@pytest.mark.integration
@named("spelling", [spellings.Capped, spellings.UnderConditions], ids=of_name)
def test_no_softmax_runs(spelling):
    """Without gradients; with them a CPU computes by hand."""
    model = made(spelling)
    rung = Rung(model, [FLEX])
    with torch.no_grad():
        difference = (rung(X, COUNTS) - model(X, COUNTS)).abs().max()
        kinds = {kind_of(name) for name in observe(lambda: rung(X, COUNTS), torch.device("cpu"))}
    assert difference < 1e-5 and "softmax" not in kinds, kinds


@pytest.mark.integration
@named("techniques", [[compiled], [autocast, compiled], [autocast]], ids=["compile", "both", "autocast"])
def test_on_top_of_others_it_is_the_same_function(techniques):
    """Where the scores are compiled with all the rest, a CPU's kernel can't read a mask that is computed there."""
    model = made(spellings.Causal if compiled in techniques else spellings.Padded)
    rung = Rung(model, [*(module.TECHNIQUE for module in techniques), FLEX])
    assert validate(rung, model, (X, COUNTS), numerics="bfloat16" if autocast in techniques else None).passed


@pytest.mark.integration
def test_on_top_of_compile_the_rest_is_compiled_as_well():
    """Dynamo takes torch.compile off what a backend gives to it."""
    rung = Rung(made(spellings.Causal), [compiled.TECHNIQUE, FLEX])
    with torch.no_grad():
        rung(X, COUNTS)
        names = set(observe(lambda: rung(X, COUNTS), torch.device("cpu")))
    assert "aten::linear" not in names and "aten::softmax" not in names, names


@pytest.mark.unit
@named("spelling", spellings.RIGHT, ids=of_name)
def test_it_is_found_where_it_stands(spelling):
    (found,) = found_by(flex_attention, made(spelling))
    assert not found.why_not and found.place.function == f"{spelling.__name__}.attend"
    assert found.region.cap == pytest.approx(0.75 if spelling is spellings.ScaledAgain else 1.5)
    (found,) = found_by(sdpa, made(spelling))
    assert found.why_not == "it can't cap scores: see flex-attention"


@pytest.mark.integration
@named("spelling", [each for each in spellings.RIGHT if each not in spellings.NOT_WRITTEN], ids=of_name)
def test_its_lines_are_the_same_function(spelling, tmp_path):
    """Pasted into a copy of its file; on a CPU without gradients, for there it has no backward. Two are compiled, for
    that takes ten seconds.
    """
    model, is_compiled = made(spelling), spelling in (spellings.Capped, spellings.UnderConditions)
    (found,) = found_by(flex_attention, model)
    advice = FLEX.advice(replace(read(model, Inputs.of((X, COUNTS))), is_inference=True), found)
    other = made(getattr(pasted(advice, spellings, tmp_path / "pasted.py"), spelling.__name__))
    with torch.no_grad(), torch.compiler.set_stance("default" if is_compiled else "force_eager"):
        difference = (other(X, COUNTS) - model(X, COUNTS)).abs().max()
        kinds = {kind_of(name) for name in observe(lambda: other(X, COUNTS), torch.device("cpu"))}
    assert difference < 1e-5 and ("softmax" in kinds) != is_compiled, advice.code


@pytest.mark.integration
def test_its_lines_are_compiled_with_what_stands_around_them(tmp_path):
    """On a CPU Inductor can't take FlexAttention of views of a matmul's output, so it is given copies."""
    model = made(spellings.Causal)
    (found,) = found_by(flex_attention, model)
    advice = FLEX.advice(replace(read(model, Inputs.of((X, COUNTS))), is_inference=True), found)
    other = torch.compile(made(pasted(advice, spellings, tmp_path / "pasted.py").Causal))
    with torch.no_grad():
        assert (other(X, COUNTS) - model(X, COUNTS)).abs().max() < 1e-5


@pytest.mark.unit
@named("spelling", spellings.NOT_WRITTEN, ids=of_name)
def test_what_is_not_written_says_why(spelling):
    model = made(spelling)
    (found,) = found_by(flex_attention, model)
    with pytest.raises(NotWritten, match=spellings.NOT_WRITTEN[spelling]):
        FLEX.advice(read(model, Inputs.of((X, COUNTS))), found)


@pytest.mark.integration
def test_an_optional_mask_may_be_left_out_of_its_lines(tmp_path):
    model = made(spellings.UnderConditions)
    (found,) = found_by(flex_attention, model)
    advice = FLEX.advice(read(model, Inputs.of((X, COUNTS))), found)
    other = made(pasted(advice, spellings, tmp_path / "pasted.py").UnderConditions)
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert (other.attend(q, k, v) - model.attend(q, k, v)).abs().max() < 1e-5
        for one in (other, model):
            one.cap = None
        assert (other.attend(q, k, v) - model.attend(q, k, v)).abs().max() < 1e-5


@pytest.mark.unit
@named("spelling", [*spellings.REFUSED, *spellings.NO_SOFT_CAP], ids=of_name)
def test_what_it_can_not_take_says_why(spelling):
    reason = {**spellings.REFUSED, **spellings.NO_SOFT_CAP}[spelling]
    (found,) = found_by(flex_attention if spelling in spellings.REFUSED else sdpa, made(spelling))
    assert found.why_not == reason


@pytest.mark.unit
def test_a_cpu_has_no_backward_of_it():
    (found,) = found_by(flex_attention, made(spellings.Causal), inference=False)
    assert found.why_not == "FlexAttention has no backward on a CPU: with --inference it can be tried"


@pytest.mark.integration
def test_a_model_of_transformers_is_told_its_own_switch(fresh_dynamo):
    """Its attention stands in an installed file. What is advised is the same function, without a softmax."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, sliding_window=8, attn_implementation="eager", use_cache=False)
    model, tokens = transformers.Gemma2ForCausalLM(config).eval(), torch.randint(32, (2, 16))
    program = replace(read(model, Inputs.of({"input_ids": tokens})), is_inference=True)
    (found,) = flex_attention.find(program)
    assert found.place.file.endswith("modeling_gemma2.py") and not found.why_not and found.region.cap == 50.0
    advice = FLEX.advice(program, found)
    assert advice.place is None
    with torch.no_grad():
        expected = model(tokens).logits
        exec(advice.code, {"model": model})
        assert torch.allclose(model(tokens).logits, expected, atol=1e-5)


@pytest.mark.unit
def test_attention_without_a_cap_is_none_of_it():
    assert not found_by(flex_attention, made(Plain))


class Plain(spellings.Capped):
    def attend(self, q, k, v, counts):
        return (q @ k.mT * self.scale).softmax(-1) @ v
