"""Attention by hand, in many spellings: it is found, rewritten, the same function, and its advice can be pasted."""
import contextlib
import inspect
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.techniques import sdpa
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import kind_of, observe
from tests.helpers import attention_spellings as spellings
from tests.helpers.pasting import pasted

X = torch.randn(2, spellings.LENGTH, spellings.WIDTH, generator=torch.Generator().manual_seed(0))


def made(spelling, evaluated=True):
    torch.manual_seed(1)
    return spelling().train(not evaluated)


def kinds_of(call):
    call()                                               # what Dynamo does the first time is no evidence
    return {kind_of(name) for name in observe(call, torch.device("cpu"))}


@pytest.mark.integration
@pytest.mark.parametrize("spelling", spellings.RIGHT, ids=lambda spelling: spelling.__name__)
def test_it_is_the_same_function_and_a_fused_kernel_runs(spelling):
    model = made(spelling)
    rung = Rung(model, [sdpa.TECHNIQUE])
    judgement = validate(rung, model, (X,))
    assert judgement.passed and judgement.outputs_proven, judgement
    with torch.no_grad():
        kinds = kinds_of(lambda: rung(X))
    assert "softmax" not in kinds and "FlashAttention" in kinds, kinds


@pytest.mark.integration
@pytest.mark.parametrize("spelling", spellings.RIGHT, ids=lambda spelling: spelling.__name__)
def test_it_is_found_where_it_stands(spelling):
    (found,) = sdpa.find(read(made(spelling), Inputs.of(X)))
    lines, first = inspect.getsourcelines(spelling.attend)
    assert found.place.file == spellings.__file__ and not found.why_not
    assert first < found.place.line <= found.place.last < first + len(lines)
    assert found.place.function == f"{spelling.__name__}.attend"
    assert found.count == 1


@pytest.mark.integration
@pytest.mark.parametrize("spelling, evaluated", [
    *((each, True) for each in spellings.RIGHT),
    (spellings.BatchedWithABias, True), (spellings.BatchedWithARow, True),
    (spellings.StepZero, False), (spellings.NanoGPT, False)])
def test_its_advice_can_be_pasted(spelling, evaluated, tmp_path):
    model = made(spelling, evaluated)
    program = read(model, Inputs.of(X))
    (found,) = sdpa.find(program)
    advice = sdpa.advice(program, found)
    other = made(getattr(pasted(advice, spellings, tmp_path / "pasted.py"), spelling.__name__), evaluated)
    judgement = validate(other, model, (X,))
    assert judgement.passed and judgement.outputs_proven, f"{advice.code}\n{judgement}"
    if evaluated:                                          # a CPU has no fused kernel with dropout
        assert "softmax" not in kinds_of(lambda: other(X)), advice.code


@pytest.mark.integration
def test_what_fills_a_causal_mask_goes_with_it():
    program = read(made(spellings.FilledWithANamedNumber), Inputs.of(X))
    (found,) = sdpa.find(program)
    assert sdpa.advice(program, found).code == "return F.scaled_dot_product_attention(q, k, v, is_causal=True)"


@pytest.mark.integration
@pytest.mark.parametrize("spelling, operands", [
    (spellings.ScoresInFloat32, "q.to(v.dtype), k.to(v.dtype), v, is_causal"),
    (spellings.ScoresInFloat32AtOnce, "q.to(v.dtype), k.to(v.dtype), v)"),
    (spellings.ValuesInFloat32, "q.to(torch.float32), k.to(torch.float32), v.float())"),
    (spellings.InFloat32, "q, k, v, is_causal"), (spellings.NanoGPT, "q, k, v, is_causal")])
def test_a_model_in_16_bits_may_compute_scores_or_values_in_float32(spelling, operands, tmp_path):
    """The function takes one dtype alone."""
    x, model = X.bfloat16(), made(spelling).bfloat16()
    program = read(model, Inputs.of(x))
    (found,) = sdpa.find(program)
    judgement = validate(Rung(model, [sdpa.TECHNIQUE]), model, (x,))
    assert judgement.passed and judgement.outputs_proven, judgement
    advice = sdpa.advice(program, found)
    assert operands in advice.code
    other = made(getattr(pasted(advice, spellings, tmp_path / "pasted.py"), spelling.__name__)).bfloat16()
    judgement = validate(other, model, (x,))
    assert judgement.passed and judgement.outputs_proven, f"{advice.code}\n{judgement}"


@pytest.mark.integration
@pytest.mark.filterwarnings("error:Raw SymInt")
@pytest.mark.parametrize("spelling", [spellings.OneHeadOfKeys, spellings.InGroups, spellings.InBlocks,
                                      spellings.Batched], ids=lambda spelling: spelling.__name__)
def test_sizes_that_vary_are_no_numbers_of_the_graph(spelling):
    model = made(spelling)
    rung = Rung(model, [sdpa.TECHNIQUE], dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = torch.randn(batch, *X.shape[1:])
            torch.testing.assert_close(rung(x), model(x))


@pytest.mark.integration
def test_a_mask_that_differs_between_five_dimensions_keeps_them(tmp_path):
    """Then no fused kernel runs, and that is said."""
    model = made(spellings.InBlocksWithABiasOfEachHead)
    program = read(model, Inputs.of(X))
    (found,) = sdpa.find(program)
    assert found.region.merged == 1 and validate(Rung(model, [sdpa.TECHNIQUE]), model, (X,)).passed
    other = made(pasted(sdpa.advice(program, found), spellings, tmp_path / "pasted.py").InBlocksWithABiasOfEachHead)
    assert validate(other, model, (X,)).passed
    why_not = sdpa.fired(program, None, SimpleNamespace(kinds=Counter()))
    assert "tensors of 5 dimensions; with all before the heads as one, FlashAttention ran" in why_not


@pytest.mark.integration
def test_a_number_by_arithmetic_of_ones_is_a_number_too():
    """A statement of its own makes it, which needs the scores: a person writes the code."""
    model = made(spellings.FilledWithOnesTimesANumber)
    program = read(model, Inputs.of(X))
    (found,) = sdpa.find(program)
    judgement = validate(Rung(model, [sdpa.TECHNIQUE]), model, (X,))
    assert judgement.passed and judgement.outputs_proven, judgement
    with pytest.raises(NotWritten):
        sdpa.advice(program, found)


@pytest.mark.unit
@pytest.mark.parametrize("spelling, why_not", [
    (spellings.FilledWithZeros, "its mask puts in 0, which hides nothing"),
    (spellings.FilledWithMoreThanThat, "its mask puts in -319, which hides nothing"),
    (spellings.FilledWithLessThanAll, ""), (spellings.FilledWithATensor, "its mask puts in a tensor")])
def test_what_does_not_hide_is_no_mask(spelling, why_not):
    (found,) = sdpa.find(read(made(spelling), Inputs.of(X)))
    assert found.why_not == why_not


@pytest.mark.unit
@pytest.mark.parametrize("spelling", [
    spellings.OneMoreInItsSum, spellings.SumsOfColumns, spellings.SumsOfOthers, spellings.SumOfAll,
    spellings.LessTheLogarithmOfColumns, spellings.LessAnothersLogarithm, spellings.OfALogSoftmaxOfColumns,
    spellings.DividedLateByMore, spellings.DividedLateByAll,
], ids=lambda spelling: spelling.__name__)
def test_exponentials_of_another_sum_are_no_softmax(spelling):
    assert sdpa.find(read(made(spelling), Inputs.of(X))) == []


class Wrapping(nn.Module):
    """A model of transformers, as people hold one in their own."""

    def __init__(self, inner, name: str = "inner"):
        super().__init__()
        self.name = name
        self.add_module(name, inner)

    def forward(self, input_ids):
        return getattr(self, self.name)(input_ids)


@pytest.mark.integration
@pytest.mark.parametrize("wrapped, called", [
    (lambda inner: inner, "model"), (Wrapping, "model.inner"),
    (lambda inner: Wrapping(Wrapping(inner), "0"), 'model.get_submodule("0.inner")')])
def test_a_model_of_transformers_is_told_its_own_switch(wrapped, called, fresh_dynamo):
    """Its attention stands in an installed file. What is advised is the same function, and runs a fused kernel."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager", use_cache=False)
    model, tokens = wrapped(transformers.LlamaForCausalLM(config)).eval(), torch.randint(32, (2, 16))
    program = read(model, Inputs.of({"input_ids": tokens}))
    (found,) = sdpa.find(program)
    assert found.place.file.endswith("modeling_llama.py") and not found.why_not
    advice = sdpa.advice(program, found)
    assert advice.place is None and advice.code == f'{called}.set_attn_implementation("sdpa")'
    expected = model(tokens).logits
    exec(advice.code, {"model": model})
    assert torch.allclose(model(tokens).logits, expected, atol=1e-5)
    with torch.no_grad():
        assert "softmax" not in kinds_of(lambda: model(tokens))


@pytest.mark.integration
def test_a_model_of_transformers_without_the_switch_is_not_told_it(fresh_dynamo):
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    program = read(transformers.DebertaV2Model(config).eval(), Inputs.of({"input_ids": torch.randint(32, (2, 16))}))
    (found,) = sdpa.find(program)
    with contextlib.suppress(NotWritten):
        assert sdpa.advice(program, found).place is not None


@pytest.mark.integration
@pytest.mark.parametrize("spelling, why", spellings.REFUSED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_it_can_not_rewrite_says_why(spelling, why):
    model = made(spelling)
    (found,) = sdpa.find(read(model, Inputs.of(X)))
    assert why in found.why_not, found.why_not
    assert validate(Rung(model, [sdpa.TECHNIQUE]), model, (X,)).passed


class Padded(nn.Module):
    """Attention by hand under a mask that a test makes of which tokens there are."""

    def __init__(self, mask):
        super().__init__()
        self.project, self.mask = nn.Linear(8, 24), mask

    def forward(self, x, present):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / 2).masked_fill(~self.mask(present), torch.finfo(x.dtype).min)
        return scores.softmax(-1) @ v


@pytest.mark.unit
@pytest.mark.parametrize("mask, said", [
    (lambda present: present[:, None, None, :] & present[:, None, :, None],
     "; 4 of 20 queries see no key, where the two may differ"),
    (lambda present: present[:, None, None, :], ""),
    (lambda present: present[:, None, None, :] & torch.ones(5, 5, dtype=torch.bool).tril(), "")])
def test_queries_that_see_no_key_are_said(mask, said):
    present = torch.ones(2, 5, dtype=torch.bool)
    present[1, 3:] = False
    [found] = sdpa.find(read(Padded(mask), Inputs.of((torch.randn(2, 5, 8), present))))
    assert not found.why_not and found.reason.endswith("and reads them again" + said)
