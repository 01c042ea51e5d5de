"""Cross-entropies by hand: found in any spelling, rewritten, the same function, and their advice can be pasted."""
import dataclasses

import pytest
import torch

from benchmarks.assistant import losses
from benchmarks.assistant.optimize import optimize, why
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.techniques import autocast, library_loss
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import observe
from tests.helpers import loss_spellings as spellings
from tests.helpers.pasting import pasted

pytestmark = pytest.mark.integration
TECHNIQUE = library_loss.TECHNIQUE
_generator = torch.Generator().manual_seed(0)
X = torch.randn(2, 5, spellings.WIDTH, generator=_generator)
TARGETS = torch.randint(0, spellings.CLASSES, (2, 5), generator=_generator)


def named(value):
    return getattr(value, "__name__", None)


def made(spelling):
    torch.manual_seed(1)
    return spelling()


def found_in(model, x=X):
    program = read(model, Inputs.of((x, TARGETS)))
    return program, TECHNIQUE.find(program)


def is_same(other, model, x=X, **how):
    judgement = validate(other, model, (x, TARGETS), **how)
    assert judgement.passed and judgement.outputs_proven, judgement


@pytest.mark.parametrize("spelling", spellings.RIGHT, ids=named)
def test_it_is_found_rewritten_and_its_advice_can_be_pasted(spelling, tmp_path):
    model = made(spelling)
    program, [found] = found_in(model)
    assert found.place.file == spellings.__file__ and not found.why_not and found.count == 1
    rung = Rung(model, [TECHNIQUE])
    is_same(rung, model)
    rung(X, TARGETS)
    ran = observe(lambda: rung(X, TARGETS), X.device)
    assert any("nll_loss" in name for name in ran) and not ran["aten::gather"] and not ran["aten::exp"], ran
    advice = TECHNIQUE.advice(program, found)
    assert "F.cross_entropy(" in advice.code
    other = made(getattr(pasted(advice, spellings, tmp_path / "pasted.py"), spelling.__name__))
    is_same(other, model)
    assert not found_in(other)[1], advice.code


@pytest.mark.parametrize("spelling", spellings.NEAR, ids=named)
def test_what_the_library_has_no_call_for_is_told_and_left(spelling):
    model = made(spelling)
    _, [found] = found_in(model)
    assert spellings.NEAR[spelling] in found.why_not
    is_same(Rung(model, [TECHNIQUE]), model)


@pytest.mark.parametrize("spelling", spellings.OTHERS, ids=named)
def test_another_function_and_what_is_as_fast_is_not_found(spelling):
    model = made(spelling)
    assert found_in(model)[1] == []
    is_same(Rung(model, [TECHNIQUE]), model)


@pytest.mark.parametrize("apart, is_found, is_told", [(0.9e-5, True, False), (1.1e-5, False, True),
                                                      (0.99e-2, False, True), (1.01e-2, False, False)])
def test_how_far_it_may_be_away(apart, is_found, is_told, monkeypatch):
    monkeypatch.setattr(losses, "_how_far_apart", lambda *_: apart)
    _, found = found_in(made(spellings.Gathered))
    assert [not each.why_not for each in found] == ([True] if is_found else [False] if is_told else [])


def test_in_16_bits_it_is_computed_in_what_it_was():
    model = made(spellings.InFloat32).bfloat16()
    program, [found] = found_in(model, X.bfloat16())
    is_same(Rung(model, [TECHNIQUE]), model, X.bfloat16())
    assert "logits.to(torch.float32)" in TECHNIQUE.advice(program, found).code
    model = made(spellings.Gathered)
    is_same(Rung(model, [autocast.TECHNIQUE, TECHNIQUE]), model, numerics="bfloat16")


WRONG = {"negative": {"is_negative": True}, "summed": {"reduction": "sum"},
         "at other targets": {"index": "the next row's"}}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rewrite_is_unsafe(wrong, monkeypatch):
    right, changes = losses.loss_at, dict(WRONG[wrong])
    if changes.pop("index", None):
        monkeypatch.setattr(library_loss, "by_library", lambda logits, index, **options: losses.by_library(
            logits, index.roll(1), **options))
    monkeypatch.setattr(library_loss, "loss_at", lambda *given: dataclasses.replace(right(*given), **changes))
    model = made(spellings.Indexed)
    assert not validate(Rung(model, [TECHNIQUE]), model, (X, TARGETS)).passed


def test_the_rest_of_the_model_may_need_the_logits():
    class WithLogits(spellings.Gathered):
        def forward(self, x, targets):
            logits = self.head(x)
            return logits, self.loss(logits, targets)
    model = made(WithLogits)
    assert len(found_in(model)[1]) == 1
    is_same(Rung(model, [TECHNIQUE]), model)


def given_beside(logits):
    log_probabilities = torch.log(torch.softmax(logits, dim=-1))
    return -log_probabilities.gather(-1, TARGETS.unsqueeze(-1)).mean()


def smoothed_beside(logits):
    return spellings.Smoothed.loss(None, logits, TARGETS)


def library_beside(logits):
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), TARGETS.flatten())


@pytest.mark.parametrize("loss, verdicts, words", [
    (given_beside, ["by hand"], "F.cross_entropy(logits.flatten(0, -2), TARGETS.flatten())"),
    (smoothed_beside, ["not here"], "label_smoothing"), (library_beside, [], "")], ids=named)
def test_a_loss_beside_the_model_is_named_and_left(loss, verdicts, words, studies_in_seconds):
    torch.manual_seed(1)
    model = torch.nn.Linear(spellings.WIDTH, spellings.CLASSES)
    result = optimize(model, (X,), quick=True, techniques=[TECHNIQUE], loss=loss)
    assert [one.verdict for one in result.opportunities] == verdicts and not result.faults
    assert all(words in one.why for one in result.opportunities), result.opportunities[0].why
    assert why("library-loss", model, (X,), loss=loss).applied.startswith("nothing was applied")


def binary(logits, targets):
    likely = torch.sigmoid(logits)
    return -(targets * torch.log(likely) + (1 - targets) * torch.log(1 - likely)).mean()


def binary_with_an_epsilon(logits, targets):
    likely = logits.sigmoid()
    return -(targets * (likely + 1e-7).log() + (1.0 - targets) * (1.0 - likely + 1e-7).log()).mean()


def binary_within_bounds(logits, targets):
    likely = torch.sigmoid(logits).clamp(1e-6, 1 - 1e-6)
    return -(targets * likely.log() + (1 - targets) * (1 - likely).log()).mean()


def entropy_of_a_gate(logits, targets):
    gate = torch.sigmoid(logits)
    return (gate * torch.log(gate)).mean() + ((1 - gate) * targets).mean()


def library_with_logits(logits, targets):
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)


@pytest.mark.parametrize("loss, count", [
    (binary, 1), (binary_with_an_epsilon, 1), (binary_within_bounds, 1), (entropy_of_a_gate, 0),
    (library_with_logits, 0)], ids=named)
def test_a_binary_one_is_named_for_a_person(loss, count):
    class Model(torch.nn.Linear):
        def forward(self, x):
            return loss(super().forward(x), (x > 0).to(x.dtype))
    found = TECHNIQUE.find(read(Model(spellings.WIDTH, spellings.WIDTH), Inputs.of(X)))
    assert [each.by_hand for each in found] == [library_loss.OF_LOGITS] * count
    assert all(each.place.function == loss.__name__ for each in found)


def test_the_librarys_stays_finite_where_a_sigmoid_is_one():
    logits, targets = torch.tensor([200.0, -200.0]), torch.tensor([1.0, 0.0])
    assert binary(logits, targets).isnan() and library_with_logits(logits, targets) == 0
