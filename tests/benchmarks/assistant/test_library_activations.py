"""Activations by hand: found in any spelling, rewritten, the same function, and their advice can be pasted."""
import pytest
import torch

from benchmarks.assistant import activations, one_function
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.techniques import autocast, library_gelu, library_silu
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import observe
from tests.helpers import activation_spellings as spellings
from tests.helpers.pasting import pasted

pytestmark = pytest.mark.integration
X = torch.randn(2, 4, spellings.WIDTH, generator=torch.Generator().manual_seed(0))
GELU, SILU = library_gelu.TECHNIQUE, library_silu.TECHNIQUE
RIGHT = [*((GELU, each, "gelu") for each in spellings.GELUS), *((SILU, *each) for each in spellings.SILUS.items())]
NEAR = [*((GELU, each, "GELU") for each in spellings.NEAR_GELU), (SILU, spellings.NearlySwish, "SiLU")]
OTHERS = [*((GELU, each) for each in spellings.NO_GELU), *((SILU, each) for each in spellings.NO_SILU)]
BY_HAND = {"aten::tanh", "aten::erf", "aten::sigmoid", "aten::exp", "aten::softplus", "aten::hardtanh", "aten::clamp"}


def named(value):
    return getattr(value, "__name__", None) or getattr(value, "name", None)


def made(spelling):
    torch.manual_seed(1)
    return spelling()


def found_in(technique, model, x=X):
    program = read(model, Inputs.of(x))
    return program, technique.find(program)


def is_same(other, model, x=X, **how):
    judgement = validate(other, model, (x,), **how)
    assert judgement.passed and judgement.outputs_proven, judgement


@pytest.mark.parametrize("technique, spelling, function", RIGHT, ids=named)
def test_it_is_found_and_rewritten(technique, spelling, function):
    model = made(spelling)
    _, [found] = found_in(technique, model)
    assert found.place.file == spellings.__file__ and not found.why_not and found.count == 1
    rung = Rung(model, [technique])
    is_same(rung, model)
    rung(X)
    ran = observe(lambda: rung(X), X.device)
    assert ran[f"aten::{function}"] + ran[f"aten::{function}_"] and not any(ran[name] for name in BY_HAND), ran


@pytest.mark.parametrize("technique, spelling, function", RIGHT, ids=named)
def test_its_advice_can_be_pasted(technique, spelling, function, tmp_path):
    model = made(spelling)
    program, [found] = found_in(technique, model)
    advice = technique.advice(program, found)
    assert f"F.{function}(" in advice.code and any("F" in line for line in advice.imports), advice
    module = pasted(advice, spellings, tmp_path / "pasted.py")
    other = made(getattr(module, spelling.__name__))
    is_same(other, model)
    assert not found_in(technique, other)[1], advice.code


@pytest.mark.parametrize("technique, spelling, function", NEAR, ids=named)
def test_one_with_other_constants_is_told_and_left(technique, spelling, function):
    model = made(spelling)
    _, [found] = found_in(technique, model)
    assert f"away from the library's {function}" in found.why_not
    rung = Rung(model, [technique])
    is_same(rung, model)
    rung(X)
    assert not observe(lambda: rung(X), X.device)[f"aten::{function.lower()}"]


@pytest.mark.parametrize("technique, spelling", OTHERS, ids=named)
def test_another_function_is_not_found(technique, spelling):
    model = made(spelling)
    assert found_in(technique, model)[1] == []
    is_same(Rung(model, [technique]), model)


@pytest.mark.parametrize("apart, is_found, is_told", [(4.9e-6, True, False), (5.1e-6, False, True),
                                                      (9.9e-3, False, True), (1.01e-2, False, False)])
def test_how_far_it_may_be_away(apart, is_found, is_told, monkeypatch):
    expected = torch.nn.functional.gelu(activations._POINTS, approximate="tanh")
    monkeypatch.setattr(activations, "_values", lambda *_: expected + apart)
    _, found = found_in(GELU, made(spellings.NewGELU))
    assert [not each.why_not for each in found] == ([True] if is_found else [False] if is_told else [])


def test_in_16_bits_it_stays_in_16_bits():
    model = made(spellings.NewGELU).bfloat16()
    _, [found] = found_in(GELU, model, X.bfloat16())
    assert not found.why_not
    is_same(Rung(model, [GELU]), model, X.bfloat16())
    model = made(spellings.NewGELU)
    is_same(Rung(model, [autocast.TECHNIQUE, GELU]), model, numerics="bfloat16")


WRONG = {"the other form": lambda by_hand: setattr(by_hand, "function", activations.GELUS[1]),
         "of another value": lambda by_hand: setattr(by_hand, "x", by_hand.x.all_input_nodes[0])}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rewrite_is_unsafe(wrong, monkeypatch):
    right = activations.activation_at

    def spoilt(root, graph, functions):
        by_hand = right(root, graph, functions)
        WRONG[wrong](by_hand)
        return by_hand
    monkeypatch.setattr(one_function, "activation_at", spoilt)
    model = made(spellings.NewGELU)
    assert not validate(Rung(model, [GELU]), model, (X,)).passed


class Unrolled(torch.nn.Module):
    """A recurrence of many steps: each tanh has all earlier ones before it."""

    def forward(self, x):
        state = x
        for _ in range(100):
            state = 0.5 * state + 0.5 * torch.tanh(state + x)
        return state


def test_of_a_long_recurrence_a_part_is_looked_at(monkeypatch):
    """All that stands before each tanh would be a million operations."""
    program, found = found_in(GELU, Unrolled())
    assert found == []
    looked, evaluate = [], activations._evaluate
    monkeypatch.setattr(activations, "_evaluate", lambda *given: (looked.append(1), evaluate(*given)))
    [graph] = program.graphs
    activations.activations_in(graph, activations.GELUS)
    assert len(looked) < 1e6


def test_a_module_of_an_installed_package_gives_way_to_that_of_torch(studies_in_seconds):
    """GPT-2's GELU stands in transformers: nobody edits that, and its module computes nothing else."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    model, tokens = transformers.GPT2LMHeadModel(config).eval(), torch.randint(32, (2, 16))
    program = read(model, Inputs.of({"input_ids": tokens}))
    (found,) = library_gelu.TECHNIQUE.find(program)
    assert not found.place.is_yours and found.count == 2
    advice = library_gelu.TECHNIQUE.advice(program, found)
    assert advice.place is None and 'torch.nn.GELU(approximate="tanh")' in advice.code
    before = model(tokens).logits
    exec(advice.code, {"model": model, "torch": torch})
    assert torch.allclose(model(tokens).logits, before, atol=1e-6)
    assert not library_gelu.TECHNIQUE.find(read(model, Inputs.of({"input_ids": tokens})))


class Scaled(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return torch.nn.functional.silu(x) * self.scale


class Learned(Scaled):
    def __init__(self):
        super().__init__(1.0)
        self.weight = torch.nn.Parameter(torch.ones(()))


class OfTwo(torch.nn.Module):
    def forward(self, x, y):
        return torch.nn.functional.silu(x) * y


@pytest.mark.parametrize("module, is_it", [
    (Scaled(1.0), True), (Scaled(1.0001), False), (Learned(), False), (OfTwo(), False), (torch.nn.SiLU(), True),
    (torch.nn.GELU(), False)])
def test_a_module_is_of_a_function_if_it_computes_nothing_else(module, is_it):
    [silu] = [each for each in activations.SILUS if each.name == "silu"]
    assert activations.is_module_of(silu, module) == is_it
    assert all(activations.is_module_of(each, eval(f"torch.nn.{each.module}"))
               for each in (*activations.SILUS, *activations.GELUS))
