"""The one configuration: what it refuses and with which fix, its copies, the published shapes."""
import math
import re

import pytest
import torch

from benchmarks.kernels.cuda import series
from common import PRESETS, BlockConfig
from common.block.config import SERIES_WIDTHS, default_preset, dtype_name

pytestmark = pytest.mark.unit

GOOD = {"batch_size": 2, "seq_len": 64, "hidden_size": 64, "num_heads": 4}
SIZES = (*GOOD, "ffn_hidden_size")
NO_SIZES = (0, -3, 10**9, 2.0, True, "64")


@pytest.mark.parametrize("change, named", [
    ({"hidden_size": 65}, "65"), ({"num_heads": 128}, "128"), ({"hidden_size": 2, "num_heads": 1}, "2"),
    *(({field: value}, str(value)) for field in SIZES for value in NO_SIZES),
    ({"dropout": 1.0}, "1.0"), ({"dropout": -0.1}, "-0.1"), ({"dropout": math.nan}, "nan"), ({"dropout": 7}, "7"),
    ({"amp_dtype": torch.float32}, "torch.float32"), ({"amp_dtype": torch.float64}, "torch.float64"),
    ({"amp_dtype": "float16"}, "float16"), ({"fp8_weights": "sometimes"}, "sometimes"), ({"attention": "mine"}, "mine"),
], ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_wrong_config_is_refused_with_its_value_and_a_fix(change, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        BlockConfig(**GOOD | change)
    assert re.search(r"try|give", str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize("hidden_size, num_heads", [(65, 4), (1000, 48), (64, 128), (40, 3), (2**22, 3), (33, 32)])
def test_the_fix_of_a_width_that_heads_do_not_divide_is_one(hidden_size, num_heads):
    """Each of the fixes it names is accepted, and wide enough for TF32 and 16 bits."""
    with pytest.raises(ValueError, match="not divisible by num_heads") as error:
        BlockConfig(**GOOD | {"hidden_size": hidden_size, "num_heads": num_heads})
    fixes = re.findall(r"(hidden_size|num_heads) (\d+)", str(error.value).partition(": try ")[2])
    assert fixes
    for field, value in fixes:
        fixed = BlockConfig(**GOOD | {"hidden_size": hidden_size, "num_heads": num_heads, field: int(value)})
        fixed.check_width()


@pytest.mark.parametrize("change, field, value, fix", [
    ({"batch_size": 1, "seq_len": 65}, "batch_size * seq_len", 65, 80),
    ({"hidden_size": 72}, "hidden_size", 72, 80),
    ({"ffn_hidden_size": 100}, "ffn_hidden_size", 100, 112),
])
def test_dimensions_that_fp8_cannot_take_are_named(change, field, value, fix):
    config = BlockConfig(**GOOD | change)                    # a good shape without FP8
    with pytest.raises(ValueError, match=re.escape(f"{field} divisible by 16, not {value}: try {fix}")):
        config.check_fp8()


@pytest.mark.parametrize("change, dtype, said", [
    ({}, "float32", "in 16 bits, not float32: leave out --amp-dtype none"),
    ({"hidden_size": 512, "num_heads": 16}, "float16", "heads of 64 or 128, not 32: try num_heads 8 or 4"),
    ({"hidden_size": 320, "num_heads": 10}, "float16", "not 32: try num_heads 5$"),
    ({"hidden_size": 96, "num_heads": 1}, "float16", "not 96: try a hidden_size divisible by 64"),
    ({"dropout": 0.1}, "bfloat16", "no dropout: leave out --dropout")])
def test_what_attention_by_the_series_does_not_take_is_named(change, dtype, said):
    with pytest.raises(ValueError, match=said):
        BlockConfig(**GOOD | {"hidden_size": 128, "num_heads": 2} | change).check_series(dtype)


def test_attention_by_the_series_takes_its_widths_in_16_bits():
    assert SERIES_WIDTHS == series.WIDTHS
    for width in SERIES_WIDTHS:
        for dtype in ("float16", "bfloat16"):
            BlockConfig(**GOOD | {"hidden_size": 2 * width, "num_heads": 2}).check_series(dtype)


def test_a_width_whose_roundings_hardly_average_is_named():
    BlockConfig(**GOOD | {"hidden_size": 32}).check_width()
    with pytest.raises(ValueError, match=r"hidden_size 28.*try 32 or more"):
        BlockConfig(**GOOD | {"hidden_size": 28}).check_width()


def test_the_config_is_immutable_and_its_copies_are_checked():
    config = BlockConfig(**GOOD)
    with pytest.raises(AttributeError):
        config.batch_size = 3
    assert config.replace(batch_size=3).batch_size == 3
    with pytest.raises(ValueError, match="63"):
        config.replace(hidden_size=63)
    assert config.ffn_hidden_size == 256 and config.head_dim == 16 and config.tokens == 128
    assert str(config) == "B2 S64 E64 H4 D16 F256"


@pytest.mark.parametrize("name, shape", [
    ("gpt2", (32, 1024, 768, 12, 3072)), ("te-tutorial", (8, 2048, 4096, 32, 16384)), ("cpu", (4, 512, 768, 12, 3072)),
])
def test_published_shapes(name, shape):
    p = PRESETS[name]
    assert (p.batch_size, p.seq_len, p.hidden_size, p.num_heads, p.ffn_hidden_size) == shape


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_in_every_step(name):
    preset = PRESETS[name]
    preset.check_fp8()
    preset.check_width()
    assert preset.dropout == 0.0 and preset.head_dim * preset.num_heads == preset.hidden_size


def test_each_machine_has_a_preset_where_none_is_asked_for():
    assert (default_preset("cuda"), default_preset("cpu")) == ("te-tutorial", "cpu")


def test_a_dtype_has_the_name_that_users_give():
    assert (dtype_name(torch.bfloat16), dtype_name(None)) == ("bfloat16", "none")
