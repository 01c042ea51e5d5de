"""How much a run needs, and which shape is suggested where that does not fit."""
import pytest
import torch

from benchmarks.records import RESULTS
from benchmarks.records.files import files, stem_of
from benchmarks.records.read import read, runs
from common import PRESETS, BlockConfig, steps
from common.block import memory
from common.block.config import DTYPES
from common.runtime.iteration import BOTH

pytestmark = pytest.mark.unit
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("gib", [0.001, 1, 16, 140])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_suggested_shape_fits(step, preset, gib):
    """By the same estimate that refuses one; and it is smaller than what was asked, in batch and length alone."""
    traits, total, config = steps.load(step).traits, int(gib * 2**30), PRESETS[preset]
    fits = memory.largest_that_fits(config, traits, CPU, total)
    if fits is None:
        smallest = config.replace(batch_size=1, seq_len=16)
        assert memory.needed(smallest, traits, CPU) > 0.9 * total
        assert memory.that_fits(config, traits, CPU, total) == "no batch of it fits"
    else:
        assert memory.needed(fits, traits, CPU) <= total and fits.tokens < config.tokens
        assert fits == config.replace(batch_size=fits.batch_size, seq_len=fits.seq_len)
        flags = f"--batch-size {fits.batch_size} --seq-len {fits.seq_len}"
        assert memory.that_fits(config, traits, CPU, total) == f"{flags} fits"


@pytest.mark.parametrize("batch_size, seq_len", [(2, 1000), (4, 100), (16, 24), (3, 48)])
def test_a_shape_suggested_to_step_4_is_one_that_fp8_takes(batch_size, seq_len):
    config = PRESETS["cpu"].replace(batch_size=batch_size, seq_len=seq_len)
    config.check_fp8()
    for gib in (0.5, 1, 4, 140):
        fits = memory.largest_that_fits(config, steps.load(4).traits, CPU, int(gib * 2**30))
        if fits is not None:
            fits.check_fp8()


def test_without_fp8_any_number_of_tokens_is_suggested():
    odd = PRESETS["tiny"].replace(batch_size=2, seq_len=37, amp_dtype=None)
    fits = memory.largest_that_fits(odd, steps.load(4).traits, GPU, 2**40)
    assert fits.tokens == 37 < odd.tokens


def test_what_a_cpu_holds_besides_the_block_is_counted():
    traits = steps.load(0).traits
    assert memory.needed(PRESETS["tiny"], traits, CPU) - memory.needed(PRESETS["tiny"], traits, GPU) > 2**30


def test_the_scores_of_an_attention_by_hand_are_counted():
    """Three of S x S kept and one gradient, in FP32; a CPU may keep those of any attention."""
    config = PRESETS["te-tutorial"].replace(batch_size=64)
    by_hand, fused = (memory.needed(config, steps.load(step).traits, GPU) for step in (0, 2))
    assert by_hand - fused == 4 * 4 * config.batch_size * config.num_heads * config.seq_len**2
    assert memory.needed(config, steps.load(0).traits, CPU) == memory.needed(config, steps.load(2).traits, CPU)


@pytest.mark.parametrize("path", files(RESULTS, "h200/ladder-*"), ids=lambda path: stem_of(path).name)
def test_no_recorded_run_took_more_memory_than_was_foretold(path):
    """The estimate decides what fits: it is to be high, and not by ten times."""
    shares = []
    for run in runs(read(path)):
        if peak := run.value(BOTH, "peak memory", "eager"):
            fields = run.info["config"]
            config = BlockConfig(**fields | {"amp_dtype": DTYPES.get(fields["amp_dtype"])})
            shares.append(peak / memory.needed(config, steps.load(run.step).traits, GPU))
    assert len(shares) >= 6 and min(shares) > 0.1 and max(shares) <= 1, shares


def test_a_shape_that_fits_leaves_a_tenth_of_the_memory():
    """The estimate and the allocator's blocks are not exact: what takes all of it does not fit."""
    config, traits = PRESETS["gpt2"], steps.load(2).traits
    half = config.replace(batch_size=config.batch_size // 2)
    total = int(memory.needed(half, traits, GPU) / 0.95)
    assert memory.largest_that_fits(config, traits, GPU, total).batch_size < half.batch_size
