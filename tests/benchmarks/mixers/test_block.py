"""The block with a mixer in attention's place: each way is right against FP64, wrong ones are not, and its work."""
import pytest
import torch

from benchmarks.mixers import block, forms
from benchmarks.mixers.mixer import CHUNKS, LOOP, MIXERS, WAYS, form_of
from benchmarks.studies.mixers.subjects import traits
from common.block import block_work, oracle, parameters
from common.block.config import BlockConfig
from common.block.workload import ATTENTION, BOTH, FORWARD

unit = pytest.mark.unit
CPU = torch.device("cpu")
CONFIG = BlockConfig(2, 70, 64, 4, amp_dtype=None)


def values_of(mixer, seed=0):
    return parameters.seeded(CONFIG, seed) | block.seeded(CONFIG, mixer, seed)


def errors(mixer, mix, config=CONFIG):
    """Name -> the worse error of both checks; the output's, which the residual hides, is left out."""
    values = values_of(mixer)
    built = block.build(mixer, mix, config, values, CPU)
    x = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(1))
    one, whole = oracle.checks(built, x, values, mix=block.truth_of(mixer))
    return {name: max(error, whole[name]) for name, error in one.items() if name != "output"}


@unit
@pytest.mark.parametrize("way", [CHUNKS, LOOP])
@pytest.mark.parametrize("name", MIXERS)
def test_the_block_is_right_with_every_gradient(name, way):
    mixer = MIXERS[name]
    found = errors(mixer, mixer.by(form_of(way)))
    assert max(found.values()) < 3e-6, found
    gates = set(block.GATES) if mixer.gates else set()
    assert found.keys() == {"branch", "input gradient", *parameters.shapes(CONFIG)} | gates


@unit
@pytest.mark.parametrize("name", MIXERS)
def test_under_autocast_it_is_right_in_16_bits(name):
    """Its gates and states stay in FP32."""
    mixer = MIXERS[name]
    found = errors(mixer, mixer.by(form_of(CHUNKS)), CONFIG.replace(amp_dtype=torch.bfloat16))
    output, gradient = oracle.MODULE_GATES[torch.bfloat16]
    assert 1e-4 < found.pop("branch") < output and max(found.values()) < gradient, found


MUTANTS = {
    "gates in the other order": lambda mixer, q, k, v, *gates: mixer.given(q, k, v, *reversed(gates)),
    "the gate of the step behind": lambda mixer, q, k, v, *gates: mixer.given(q, k, v, *(g.roll(1, 2) for g in gates)),
    "the gate of another head": lambda mixer, q, k, v, *gates: mixer.given(q, k, v, *(g.roll(1, 1) for g in gates)),
    "queries for keys": lambda mixer, q, k, v, *gates: mixer.given(k, q, v, *gates),
    "values of another sequence": lambda mixer, q, k, v, *gates: mixer.given(q, k, v.flip(0), *gates),
    "gates without a gradient": lambda mixer, q, k, v, *gates: mixer.given(q, k, v, *(g.detach() for g in gates)),
}


@unit
@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_caught(mutant):
    mixer = MIXERS["gated delta rule"]
    assert max(errors(mixer, lambda *given: forms.chunked(MUTANTS[mutant](mixer, *given))[0]).values()) > 1e-3


@unit
@pytest.mark.parametrize("name", MIXERS)
def test_its_truth_in_chunks_is_the_recurrence(name):
    mixer = MIXERS[name]
    x, dy = (torch.randn(1, 70, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def step_by_step(q, k, v, gates):
        split = () if gates is None else block.by_head(gates, 4)
        return forms.recurrent(mixer.given(q, k, v, *split))[0]
    exact = oracle.reference(x, values_of(mixer), CONFIG, dy, step_by_step)
    for what, value in oracle.reference(x, values_of(mixer), CONFIG, dy, block.truth_of(mixer)).items():
        assert oracle.relative_error(value, exact[what]) < 1e-12, what


@unit
def test_a_decay_forgets_over_some_twenty_steps_and_retention_has_no_gates():
    assert block.seeded(CONFIG, MIXERS["linear attention, decay"], 0) == {}
    weight, bias = block.seeded(CONFIG, MIXERS["gated delta rule"], 0).values()
    assert weight.shape == (8, 64) and bias.shape == (8,)
    assert bias[:4].mean() < -2 < bias[4:].mean()
    assert block.seeded(CONFIG, MIXERS["SSD"], 0)["attn.gates.weight"].shape == (4, 64)


@unit
@pytest.mark.parametrize("name", MIXERS)
def test_its_work_is_the_blocks_with_the_mixers_in_place_of_attentions(name):
    mixer = MIXERS[name]
    plain = block_work.workload(CONFIG, traits(False), torch.float32, CPU)
    of = block.workload(plain, mixer, CONFIG, torch.float32)
    rows = 4 * mixer.gates
    products = forms.flops_of_recurrent(70, 16, 16, mixer.replaces) * 2 * 4
    for mode, times in ((FORWARD, 1), (BOTH, 3)):
        attention = sum(each.flops for each in plain.operations(mode) if each.kind == ATTENTION)
        own = times * (products + 2 * 140 * 64 * rows)
        assert of.flops(mode) == plain.flops(mode) - attention + own
        assert all(each.kind != ATTENTION for each in of.operations(mode))


@unit
def test_every_way_has_a_form():
    assert all(callable(form_of(way)) for way in WAYS[:-1])
