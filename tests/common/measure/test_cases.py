"""What a study names: a step as its script runs it, any other block, and whatever else."""
import pytest
import torch

from common import PRESETS, steps
from common.block import memory
from common.block.traits import Traits
from common.measure import cases
from common.measure.cases import Case, Group, Setting, block_case, step_case
from common.report.result import Result
from common.runtime import timing
from common.runtime.iteration import MODES
from tests.helpers.made_records import CPU_CONFIG, FACTS

pytestmark = pytest.mark.unit
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("step", steps.ALL, ids=lambda step: step.name)
def test_a_steps_case_has_all_that_the_step_has(step):
    case = step_case(step, CPU_CONFIG, CPU)
    assert (case.name, case.step, case.traits, case.config) == (step.name, step.number, step.traits, CPU_CONFIG)
    assert (case.parameter_dtype, case.missing, case.variant) == (torch.float32, "", {})
    assert case.bytes_needed == memory.needed(CPU_CONFIG, step.traits, CPU) > 0


def test_fp8_is_emulated_where_a_cpu_has_no_autocast():
    """Its FP8 is multiplied in FP32, and its residual needs the dtype of autocast. No other step has one there."""
    config = CPU_CONFIG.replace(amp_dtype=None)
    dtypes = [step_case(step, config, CPU).config.amp_dtype for step in steps.ALL]
    assert dtypes == 4 * [None] + [torch.bfloat16]
    assert step_case(steps.load(4), config, GPU).config.amp_dtype is None          # as asked for


def test_a_shape_that_fp8_does_not_take_is_missing_with_the_reason():
    config = CPU_CONFIG.replace(seq_len=7)
    assert "divisible by 16" in step_case(steps.load(4), config, CPU).missing
    assert step_case(steps.load(4), config, CPU, missing="no FP8").missing == "no FP8"
    assert step_case(steps.load(2), config, CPU).missing == ""


def test_a_block_is_prepared_as_a_step_is(monkeypatch):
    """With the dtype, the seed and the device that it is measured with."""
    asked = []
    monkeypatch.setattr(cases, "prepare", lambda *arguments: asked.append(arguments))

    def build(config, values, device):
        """A peer's block."""

    def say(what):
        """Nobody listens."""
    case = block_case("a peer", build, CPU_CONFIG, Traits(autocast=True), CPU, parameter_dtype=torch.bfloat16,
                      variant={"size": [1]})
    result = Result("a peer", CPU_CONFIG, "bfloat16", FACTS)
    case.prepare(Setting(CPU, 7, say, time_compiler=False), result)
    assert asked == [(build, torch.bfloat16, CPU, 7, result, say, False)]
    assert case.step is None and case.variant == {"size": [1]}


def test_a_step_may_be_built_in_another_way():
    def build(config, values, device):
        raise NotImplementedError("in another way")
    case = step_case(steps.load(2), CPU_CONFIG, CPU, build=build)
    with pytest.raises(NotImplementedError, match="in another way"):
        case.prepare(Setting(CPU, 0, lambda *what: None, False), Result("2_sdpa", CPU_CONFIG, "float32", FACTS))


def test_what_is_no_block_needs_no_config():
    case = Case("an operation", prepare=None)
    assert case.config is None and case.bytes_needed == 0 and not case.traits.claimed


def test_a_group_is_timed_in_both_passes_by_the_devices_clock():
    group = Group([step_case(steps.load(0), PRESETS["tiny"], CPU)])
    assert group.modes == MODES and isinstance(group.clock(CPU), timing.HostClock)
    assert group.profiled == 0 and group.timed([], "forward") == []
