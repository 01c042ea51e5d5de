"""Why a technique does not apply or did not fire: what people ask for most, in one line each."""
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant import why
from benchmarks.assistant.techniques import EVERY
from common.outcome import UserError
from tests.helpers import attention_spellings as spellings

X = torch.randn(2, spellings.LENGTH, spellings.WIDTH, generator=torch.Generator().manual_seed(0))


class Already(spellings.Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Skipped(spellings.Attention):
    """A break in a loop: Dynamo runs the whole function as it is."""

    def attend(self, q, k, v):
        for _ in range(2):
            weights = F.softmax(q @ k.mT, dim=-1)
            print(end="")
            q = weights @ v
        return q


@pytest.mark.integration
@pytest.mark.parametrize("model, technique, said", [
    (spellings.NanoGPT().eval(), "sdpa", "it was applied, and ran: "),
    (spellings.NanoGPT(), "sdpa", "did not fire: no fused attention kernel ran: dropout 0.1 in train mode; without it"),
    (spellings.Attention, "tf32", "nothing was applied: TF32 needs an NVIDIA GPU"),
    (Already(), "library-norm", "nothing was applied: nothing was found (norms by hand -> F.layer_norm, F.rms_norm)"),
    (Already(), "sdpa", "nothing was applied: there is no place where it could be"),
    (Already(), "host-sync", "nothing was applied: nothing was found"),
    (Skipped(), "graph-break", "nothing was applied: a person mends it, by hand")])
def test_what_became_of_it(model, technique, said):
    model = Already() if isinstance(model, type) else model
    assert said in why(technique, model, (X,)).applied


@pytest.mark.unit
def test_attention_that_is_fused_already_says_so():
    (found,) = why("sdpa", Already(), (X,)).found
    assert found.why_not == "it is this function already" and found.place.function == "Already.attend"


@pytest.mark.unit
@pytest.mark.parametrize("spelling, reason", spellings.REFUSED.items())
def test_each_spelling_that_is_refused_has_its_reason(spelling, reason):
    assert reason in why("sdpa", spelling(), (X,)).found[0].why_not


@pytest.mark.integration
def test_a_function_that_dynamo_skips_names_the_break():
    said = why("sdpa", Skipped(), (X,))
    reasons = [found.why_not for found in said.found]
    assert any("Dynamo runs this function as it is" in each and "test_why.py" in each for each in reasons), reasons


@pytest.mark.integration
def test_what_fails_when_it_is_applied_is_said(monkeypatch):
    def broken(module, inputs):
        raise RuntimeError("no code for this")
    monkeypatch.setattr("benchmarks.assistant.rewriting.compile_fx", broken)
    assert "it was applied, and failed: " in why("compile", nn.Sequential(nn.Linear(32, 32), nn.GELU()), (X,)).applied


@pytest.mark.unit
def test_what_fails_when_it_is_timed_alone_is_said():
    def broken(program):
        raise RuntimeError("no code for this")
    technique = replace(EVERY[0], name="broken", seen_alone=broken)
    said = why("broken", nn.Linear(32, 32), (X,), techniques=[technique])
    assert said.seen_alone == [("the call", "it could not be timed: RuntimeError: no code for this")]


@pytest.mark.unit
def test_an_unknown_technique_names_the_known_ones():
    with pytest.raises(ValueError, match="give one of tf32, autocast"):
        why("fp4", Already(), (X,))


@pytest.mark.unit
@pytest.mark.parametrize("technique", EVERY, ids=lambda technique: technique.name)
def test_no_technique_raises_on_a_model_without_a_matmul(technique, without_inductor):
    said = why(technique.name, nn.ReLU(), (X,)).applied
    assert said
    with pytest.raises(UserError):
        why(technique.name, nn.Linear(3, 3), (X,))
