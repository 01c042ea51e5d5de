"""Each mixer by each form against its recurrence in FP64, and the gates that make it."""
import pytest
import torch

from benchmarks.mixers import forms
from benchmarks.mixers.mixer import (
    AT_ONCE,
    CHUNKS,
    COMPILED,
    LOOP,
    MIXERS,
    TRITON,
    WAYS,
    Decoder,
    bytes_of_a_cache,
    bytes_of_a_step,
    constant_decay,
    errors,
    exact,
    form_of,
    looked_at,
    step_errors,
    step_of,
)
from common.block import oracle
from common.block.workload import causal_attention_flops
from common.runtime import compiler

unit = pytest.mark.unit
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")          # Triton's interpreter without a GPU
SHAPE = 2, 3, 70, 16


def found(name, mix=None, shape=SHAPE, dtype=torch.float32):
    mixer = MIXERS[name]
    inputs = mixer.inputs(shape, 0, DEVICE, dtype)
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    return errors(mix or mixer.by(form_of(CHUNKS)), mixer, inputs, dy, exact(mixer, inputs, dy))


@unit
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MIXERS)
def test_each_form_of_each_mixer_is_right(name, way):
    errors_of_it = found(name, MIXERS[name].by(form_of(way)), (1, 2, 70, 16))
    assert max(errors_of_it.values()) < 3e-6, errors_of_it
    assert list(errors_of_it) == ["y", "dq", "dk", "dv", *["dg"] * MIXERS[name].decays, *["db"] * MIXERS[name].replaces]


@unit
@pytest.mark.parametrize("way", [CHUNKS, AT_ONCE, LOOP, TRITON])
@pytest.mark.parametrize("name", MIXERS)
def test_each_form_is_right_in_16_bits(name, way):
    output, gradient = oracle.MODULE_GATES[torch.bfloat16]
    errors_of_it = found(name, MIXERS[name].by(form_of(way)), (1, 2, 70, 16), torch.bfloat16)
    assert errors_of_it.pop("y") < output and max(errors_of_it.values()) < gradient, errors_of_it


@unit
def test_gates_and_states_stay_in_fp32():
    inputs = MIXERS["gated delta rule"].inputs(SHAPE, 0, CPU, torch.bfloat16)
    assert [each.dtype for each in inputs] == 3 * [torch.bfloat16] + 2 * [torch.float32]
    for form in (forms.recurrent, forms.chunked):
        y, state = form(MIXERS["gated delta rule"].given(*inputs))
        assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@unit
def test_heads_at_both_ends_are_looked_at():
    assert looked_at(torch.zeros(2, 3, 1, 1)) == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert looked_at(torch.zeros(1, 1, 1, 1)) == [(0, 0)]
    assert found("SSD", shape=(1, 1, 5, 4))["y"] < 3e-6


@unit
def test_a_decay_is_at_most_one_and_keys_that_replace_have_length_one():
    for mixer in MIXERS.values():
        given = mixer.given(*mixer.inputs(SHAPE, 0, CPU))
        assert (given.g <= 0).all() and (given.b is not None) == mixer.replaces
    assert torch.allclose(given.k.norm(dim=-1), torch.ones(SHAPE[:3])) and given.b.min() > 0 and given.b.max() < 1
    kept = constant_decay(torch.zeros(SHAPE)).exp()[0, :, 0].tolist()
    assert kept == pytest.approx([1 - 2**-5, 1 - 2**-6, 1 - 2**-7])


MUTANTS = {
    "the gate of another step": lambda mixer, q, k, v, *gates: mixer.given(q, k, v, *(g.roll(1, -1) for g in gates)),
    "heads of another": lambda mixer, q, k, v, *gates: mixer.given(q.roll(1, 1), k, v, *gates),
    "no scale": lambda mixer, q, k, v, *gates: mixer.given(q * 8**0.5, k, v, *gates),
    "values of another sample": lambda mixer, q, k, v, *gates: mixer.given(q, k, v.roll(1, 0), *gates),
}


@unit
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", ["SSD", "gated delta rule"])
def test_each_mutant_is_caught(name, mutant):
    def mix(*inputs):
        return forms.chunked(MUTANTS[mutant](MIXERS[name], *inputs))[0]
    assert max(found(name, mix).values()) > 1e-3


@unit
@pytest.mark.parametrize("name, way, length", [
    ("SSD", LOOP, 128), ("SSD", AT_ONCE, None), ("SSD", CHUNKS, 289), ("SSD", COMPILED, 289),
    ("gated delta rule", LOOP, 192), ("gated delta rule", CHUNKS, 608)])
def test_from_some_length_on_a_form_has_fewer_flops_than_attention(name, way, length):
    mixer = MIXERS[name]
    assert mixer.as_few_flops_from(way, 64) == length
    for steps in (64, 128, 192, 256, 288, 289, 512, 640, 8192):
        fewer = mixer.flops(way, steps, 64) <= causal_attention_flops(steps, 64, 64)
        assert fewer == (length is not None and steps >= length), steps


@unit
@pytest.mark.parametrize("name", MIXERS)
def test_steps_of_decoding_go_on_where_a_sequence_ended(name):
    mixer, steps = MIXERS[name], 3
    with torch.no_grad():
        inputs = [each.double() for each in mixer.inputs(SHAPE, 0, CPU)]
        expected, end = forms.recurrent(mixer.given(*inputs))
        _, state = forms.chunked(mixer.given(*(each[:, :, :-steps] for each in inputs)))
        step = step_of(mixer)
        for place in range(SHAPE[2] - steps, SHAPE[2]):
            one = [each[:, :, place:place + 1] for each in inputs]
            assert max(step_errors(step, mixer, state, one).values()) < 1e-12
            y = step(state, state, *one)
            assert (y - expected[:, :, place:place + 1]).norm() < 1e-12 * expected.norm()
    assert (state - end).norm() < 1e-12 * end.norm()


@unit
def test_a_state_read_and_written_is_as_large_as_a_cache_of_as_many_steps_as_it_is_wide():
    assert bytes_of_a_step(64) == bytes_of_a_cache(64, 64) == 2 * 64 * 64 * 4


@unit
def test_a_compiled_step_is_seen_to_be_compiled():
    """Else nobody would notice that it was compiled again while it was timed."""
    step, state = step_of(MIXERS["SSD"]), torch.zeros(2, 3, 8, 8)
    assert compiler.holds_compiled(Decoder(torch.compile(step), state, state.clone()))
    assert not compiler.holds_compiled(Decoder(step, state, state.clone()))


@unit
@pytest.mark.parametrize("name", MIXERS)
def test_a_step_that_is_repeated_computes_the_same(name):
    """A replay of a CUDA graph is compared with an eager run: both must start from the same state."""
    mixer = MIXERS[name]
    q, *others = (each.detach()[:, :, :1] for each in mixer.inputs(SHAPE, 0, CPU))
    state = torch.randn(*SHAPE[:2], SHAPE[3], SHAPE[3], generator=torch.Generator().manual_seed(1))
    decoder = Decoder(step_of(mixer), state, torch.empty_like(state))
    assert torch.equal(decoder(q, *others), decoder(q, *others))
    assert not torch.equal(decoder.following, state)
