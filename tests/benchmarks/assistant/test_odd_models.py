"""Models of every form are read without a traceback, and nothing is found in one that is as good as it gets."""
import pytest
import torch
from torch import nn

from benchmarks.assistant import look, optimize, why
from benchmarks.assistant.techniques import EVERY, compiled, fused_qkv, graph_break, host_sync, library_norm, sdpa
from benchmarks.examples import gpt_good
from tests.helpers.odd_models import MODELS


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_any_form_is_read(name):
    model, inputs = MODELS[name]()
    looked = look(model, inputs)
    assert not looked.faults and set(looked.found) == set(EVERY)
    assert "work" in str(looked) and str(why("sdpa", model, inputs))


@pytest.mark.integration
def test_nothing_is_found_where_all_is_done():
    program = look(*gpt_good.build()[:2]).program
    assert not program.breaks and not program.analysis.attentions
    for technique in (library_norm, fused_qkv, graph_break, host_sync):
        assert not technique.find(program)
    assert all(found.why_not for found in sdpa.find(program))


class Routed(nn.Module):
    """Two experts, each for the tokens that it is chosen for: how many differs from call to call."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        chosen, y = x[:, 0] > 0, torch.zeros_like(x)
        for mask, expert in zip((chosen, ~chosen), self.experts, strict=True):
            y[mask] = torch.relu(expert(x[mask]))
        return y


@pytest.mark.integration
def test_sizes_that_depend_on_data_are_compiled_once_for_all(studies_in_seconds):
    """Compiled for each size its timings would hold compilations."""
    result = optimize(Routed(), (torch.randn(64, 8),), quick=True, inference=True, techniques=[compiled.TECHNIQUE])
    [one] = result.opportunities
    assert one.speedup and one.verdict in ("take", "no gain") and not result.failures, result.failures
    assert result.looked.program.dynamic is None
    fixed = look(nn.Linear(8, 8), (torch.randn(64, 8),))
    assert fixed.program.dynamic is False
