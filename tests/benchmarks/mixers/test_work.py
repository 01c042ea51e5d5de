"""The least that a mixer computes and moves, and from which length on chunks should beat attention."""
import pytest
import torch

from benchmarks.mixers import forms, work
from benchmarks.mixers.mixer import MIXERS
from common.block.workload import BOTH, FORWARD
from common.runtime.limit import Peaks

unit = pytest.mark.unit
SHAPE = 2, 3, 100, 16
FAST_MEMORY, SLOW_MEMORY = Peaks({"bfloat16": 1e12}, 1e15), Peaks({"bfloat16": 1e15}, 1e12)


@unit
@pytest.mark.parametrize("name, gates", [("linear attention, decay", 0), ("SSD", 1), ("gated delta rule", 2)])
def test_each_tensor_is_moved_once(name, gates):
    """q, k, v and y; with a backward dy and three gradients besides, and q, k, v again."""
    of, tensor = work.of_mixer(MIXERS[name], SHAPE, torch.bfloat16), 2 * 3 * 100 * 16 * 2
    moved = {mode: sum(each.bytes for each in of.operations(mode)) for mode in (FORWARD, BOTH)}
    gate = 2 * 3 * 100 * 4 * gates
    assert moved == {FORWARD: 4 * tensor + gate, BOTH: 11 * tensor + 3 * gate}
    assert of.flops(FORWARD) == 6 * forms.flops_of_recurrent(100, 16, 16, name == "gated delta rule")
    assert of.flops(BOTH) == 3 * of.flops(FORWARD) and of.tokens == 200


@unit
def test_attention_has_five_products_in_its_backward_and_two_in_its_forward():
    of = work.of_attention(SHAPE, torch.bfloat16)
    assert of.flops(FORWARD) == 6 * 2 * 100**2 * 16
    assert of.flops(BOTH) == 3.5 * of.flops(FORWARD)


@unit
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("peaks", [FAST_MEMORY, SLOW_MEMORY])
@pytest.mark.parametrize("name", MIXERS)
def test_at_the_crossover_chunks_take_no_longer_and_one_chunk_before_they_do(name, peaks, backward):
    given = 128, 2, peaks, "bfloat16", backward
    length = work.crossover(MIXERS[name], *given)
    assert length % forms.CHUNK == 0

    def apart(steps):
        return work.seconds_by_chunks(MIXERS[name], steps, *given) - work.seconds_of_attention(steps, *given)
    assert apart(length) <= 0 < apart(length - forms.CHUNK)


@unit
def test_where_only_products_count_it_is_where_they_are_as_few():
    """To a chunk: a length that is no multiple of it fills its last one for nothing."""
    mixer = MIXERS["SSD"]
    fewest = mixer.as_few_flops_from("chunks", 128)
    assert abs(work.crossover(mixer, 128, 2, FAST_MEMORY, "bfloat16", False) - fewest) < forms.CHUNK


@unit
def test_where_only_bytes_count_it_is_where_attentions_products_take_as_long_as_them():
    """Of width 128 in 16 bits: 3,584 bytes of a step and a head in chunks, 2 x 128 products a step of attention."""
    length = work.crossover(MIXERS["SSD"], 128, 2, SLOW_MEMORY, "bfloat16", False)
    assert (length - forms.CHUNK) * 2 * 128 / 1e15 < 3584 / 1e12 <= length * 2 * 128 / 1e15


@unit
def test_where_attention_is_always_faster_there_is_none():
    slow = Peaks({"bfloat16": 1e15}, 1e6)
    assert work.crossover(MIXERS["SSD"], 128, 2, slow, "bfloat16", False, longest=2**14) is None
