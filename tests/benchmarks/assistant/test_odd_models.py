"""Models of every form are read without a traceback, and nothing is found in one that is as good as it gets."""
import pytest

from benchmarks.assistant import look, why
from benchmarks.assistant.techniques import EVERY, fused_qkv, graph_break, host_sync, library_norm, sdpa
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
