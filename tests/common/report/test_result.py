"""What follows from what a run has found: launch-bound, percent of the limit, the calls until compiling pays."""
import pytest
import torch

from common import BlockConfig, steps
from common.block.traits import Traits
from common.report.result import Compilation, Result, Row, launch_bound
from common.runtime.peaks import BURST, SUSTAINED
from common.runtime.timing import Timing
from tests.helpers.made_results import CPU, H200, SAMPLES, row

pytestmark = pytest.mark.unit
CONFIG = BlockConfig(2, 64, 64, 4, amp_dtype=torch.bfloat16)


@pytest.mark.parametrize("graph, enqueue, bound", [
    (None, None, None), (None, 0.5, False), (None, 5.6, False), (None, 6.0, True), (None, 9.0, True),
    (5.6, 0.5, True), (6.0, 0.5, False), (7.5, 9.0, False), (0.3, 5.6, True), (0.3, None, True)])
def test_launch_bound_is_a_much_faster_replay(graph, enqueue, bound):
    """Where there is no replay, an iteration that takes about as long to enqueue."""
    assert launch_bound(7.2, graph, enqueue) is bound
    assert launch_bound(None, graph, enqueue) is None


@pytest.mark.parametrize("state, percent", [({}, 90), ({"throttled": ["power cap", "software thermal"]}, 90),
                                            ({"throttled": []}, None), ({"throttled": ["software thermal"]}, None)])
def test_what_is_sustained_limits_a_row_at_the_power_cap_alone(state, percent):
    """Away from it a row may be faster, which is no error. Where nothing is known of a cap it is a yardstick too.
    """
    held = row(state=state)
    assert held.percent_of(SUSTAINED) == (pytest.approx(percent, abs=0.3) if percent else None)
    beyond = row(state=state, limits={SUSTAINED: {"matmul": 8.0}})
    assert beyond.beyond_its_limit == (percent is not None)
    assert held.percent_of(BURST) == pytest.approx(69.4, abs=0.1)


def test_percent_of_limit_is_the_limit_over_the_median():
    assert row(limits={BURST: {"matmul": 3.0, "memory": 0.6}}).percent_of(BURST) == pytest.approx(50)
    assert row().median == 7.2 and row(limits={}).percent_of(BURST) is None
    assert Row(limits={BURST: {"matmul": 3.6}}).percent_of(BURST) is None and Row().median is None


@pytest.mark.parametrize("uncompiled, said", [
    ([8.2, 8.3, 8.1] * 2, "15,000 forward+backward calls"),                      # 14.5 s at 1 ms a call, in two digits
    ([7.6, 7.7, 7.5] * 2, "36,000 forward+backward calls"),
    ([7.0, 6.9] * 3, "never: it is not faster here"),
    ([8.2, 7.2] * 3, "n/a: the difference is within the noise"),
    ([8.2], "n/a: too few samples"),
    (None, "n/a: too few samples"),
])
def test_compiling_pays_after_so_many_calls(uncompiled, said):
    assert Compilation(14.5, 2.3, uncompiled).pays_after(Timing(SAMPLES, True, "fake")) == said


def test_too_few_compiled_samples_say_nothing_either():
    assert Compilation(14.5, 2.3, [9.0] * 6).pays_after(Timing(SAMPLES[:5], True, "fake")) == "n/a: too few samples"


# ---------------------------------------------------------------------------------------------------- what a result is


def result(step: int | None = 1, facts=CPU, parameter_dtype="float32", config=CONFIG, traits=None) -> Result:
    traits = steps.load(step).traits if step is not None else traits
    return Result("a name", config, parameter_dtype, facts, step=step, traits=traits)


def test_autocast_is_on_over_fp32_parameters_alone():
    assert result().autocast == "bfloat16"
    assert result(parameter_dtype="bfloat16").autocast == "off"
    assert result(config=CONFIG.replace(amp_dtype=None)).autocast == "off"
    assert result(step=0).autocast == "off"                              # whatever its config says: it has none
    assert result(config=None).autocast == "off"


def test_a_run_has_one_number_of_its_own():
    first, second = result(), result()
    assert first.run != second.run and len(first.run) == 12


def test_settings_are_what_is_not_the_default():
    """The usual dtype of autocast is the device's."""
    assert result().settings == {} and result(config=None).settings == {}
    assert result(facts=H200).settings == {"amp_dtype": "bfloat16"}
    assert result(facts=H200, config=CONFIG.replace(amp_dtype=torch.float16)).settings == {}
    assert result(config=CONFIG.replace(amp_dtype=None)).settings == {"amp_dtype": "none"}
    assert result(step=0, config=CONFIG.replace(amp_dtype=None)).settings == {}       # it has no autocast to be off
    changed = CONFIG.replace(dropout=0.1, fp8_weights="kept", fp8_attention=True, attention="series")
    assert result(step=4, config=changed, parameter_dtype="bfloat16").settings == {
        "dropout": 0.1, "parameters": "bfloat16", "fp8_weights": "kept", "fp8_attention": True,
        "attention": "series"}


def test_parameters_of_a_part_without_autocast_are_no_setting():
    """An operation has a dtype; a block has FP32 parameters, or is a row of its own."""
    assert result(None, parameter_dtype="float16", traits=Traits()).settings == {}
    assert result(None, parameter_dtype="float16", traits=Traits(autocast=True)).settings == {"parameters": "float16"}
    assert result(0, parameter_dtype="float16").settings == {"parameters": "float16"}
