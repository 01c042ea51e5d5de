"""GELU by hand: found in any spelling, rewritten, the same function, and its advice can be pasted."""
import pytest
import torch

from benchmarks.assistant import activations
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.techniques import autocast, library_gelu
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import observe
from tests.helpers import gelu_spellings as spellings
from tests.helpers.pasting import pasted

pytestmark = pytest.mark.integration
X = torch.randn(2, 4, spellings.WIDTH, generator=torch.Generator().manual_seed(0))
TECHNIQUE = library_gelu.TECHNIQUE


def named(spelling):
    return spelling.__name__


def made(spelling):
    torch.manual_seed(1)
    return spelling()


def found_in(model, x=X):
    program = read(model, Inputs.of(x))
    return program, library_gelu.find(program)


def is_same(other, model, x=X, **how):
    judgement = validate(other, model, (x,), **how)
    assert judgement.passed and judgement.outputs_proven, judgement


@pytest.mark.parametrize("spelling", spellings.RIGHT, ids=named)
def test_it_is_found_and_rewritten(spelling):
    model = made(spelling)
    _, [found] = found_in(model)
    assert found.place.file == spellings.__file__ and not found.why_not and found.count == 1
    rung = Rung(model, [TECHNIQUE])
    is_same(rung, model)
    rung(X)
    ran = observe(lambda: rung(X), X.device)
    assert ran["aten::gelu"] and not ran["aten::tanh"] and not ran["aten::erf"]


@pytest.mark.parametrize("spelling", spellings.RIGHT, ids=named)
def test_its_advice_can_be_pasted(spelling, tmp_path):
    model = made(spelling)
    program, [found] = found_in(model)
    advice = library_gelu.advice(program, found)
    assert "F.gelu(" in advice.code and any("F" in line for line in advice.imports), advice
    module = pasted(advice, spellings, tmp_path / "pasted.py")
    other = made(getattr(module, spelling.__name__))
    is_same(other, model)
    assert not found_in(other)[1], advice.code


@pytest.mark.parametrize("spelling", spellings.NEAR, ids=named)
def test_one_with_other_constants_is_told_and_left(spelling):
    model = made(spelling)
    _, [found] = found_in(model)
    assert "away from the library's GELU" in found.why_not
    rung = Rung(model, [TECHNIQUE])
    is_same(rung, model)
    rung(X)
    assert not observe(lambda: rung(X), X.device)["aten::gelu"]


@pytest.mark.parametrize("spelling", spellings.OTHERS, ids=named)
def test_another_function_is_not_found(spelling):
    model = made(spelling)
    assert found_in(model)[1] == []
    is_same(Rung(model, [TECHNIQUE]), model)


@pytest.mark.parametrize("apart, is_found, is_told", [(4.9e-6, True, False), (5.1e-6, False, True),
                                                      (9.9e-3, False, True), (1.01e-2, False, False)])
def test_how_far_it_may_be_away(apart, is_found, is_told, monkeypatch):
    monkeypatch.setattr(activations, "_apart", lambda *_: apart)
    _, found = found_in(made(spellings.NewGELU))
    assert [not each.why_not for each in found] == ([True] if is_found else [False] if is_told else [])


def test_in_16_bits_it_stays_in_16_bits():
    model = made(spellings.NewGELU).bfloat16()
    _, [found] = found_in(model, X.bfloat16())
    assert not found.why_not
    is_same(Rung(model, [TECHNIQUE]), model, X.bfloat16())
    model = made(spellings.NewGELU)
    is_same(Rung(model, [autocast.TECHNIQUE, TECHNIQUE]), model, numerics="bfloat16")


WRONG = {"the other form": lambda gelu: setattr(gelu, "approximate", "none"),
         "of another value": lambda gelu: setattr(gelu, "x", gelu.x.all_input_nodes[0])}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rewrite_is_unsafe(wrong, monkeypatch):
    right = activations.gelu_at

    def spoilt(root, graph):
        gelu = right(root, graph)
        WRONG[wrong](gelu)
        return gelu
    monkeypatch.setattr(library_gelu, "gelu_at", spoilt)
    model = made(spellings.NewGELU)
    assert not validate(Rung(model, [TECHNIQUE]), model, (X,)).passed


class Unrolled(torch.nn.Module):
    """A recurrence of many steps: each tanh has all earlier ones before it."""

    def forward(self, x):
        state = x
        for _ in range(100):
            state = 0.5 * state + 0.5 * torch.tanh(state + x)
        return state


def test_of_a_long_recurrence_a_part_is_looked_at(monkeypatch):
    """All that stands before each tanh would be a million operations."""
    program, found = found_in(Unrolled())
    assert found == []
    looked, evaluate = [], activations._evaluate
    monkeypatch.setattr(activations, "_evaluate", lambda *given: (looked.append(1), evaluate(*given)))
    [graph] = program.graphs
    activations.gelus_in(graph)
    assert len(looked) < 1e6
