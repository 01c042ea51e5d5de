"""What power decides: data that is put in place of what was checked, and what is said of it."""
import functools
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import studies
from benchmarks.records.read import read, runs
from benchmarks.studies import power
from common import BlockConfig, parameters, steps
from common.block.traits import Traits
from common.measure.cases import Setting
from common.outcome import Failed
from common.report.record import record
from common.report.result import Result
from common.runtime import pieces
from common.runtime.iteration import BOTH, FORWARD, MODES
from tests.helpers.blocks import case, subject_of
from tests.helpers.made_records import FACTS, GPU, both, made

unit, integration = pytest.mark.unit, pytest.mark.integration
STUDY = studies.load("power")
CPU = torch.device("cpu")
CONFIG = BlockConfig(2, 16, 32, 4, amp_dtype=None)
CAPPED = {"throttled": ["power cap"], "sm_mhz": 1400}


def setting() -> Setting:
    return Setting(CPU, 0, lambda *what: None, time_compiler=False)


# ------------------------------------------------------------------------------------------------------------- the data


@pytest.fixture
def block():
    values, x, dy = case(CONFIG)
    return subject_of(steps.load(2).build(CONFIG, values, "cpu"), x, dy)


@unit
def test_random_data_stay_as_they_were_checked(block):
    before = {name: value.clone() for name, value in block.parameters.items()}
    power.change(block, power.RANDOM)
    assert all(torch.equal(before[name], value) for name, value in block.parameters.items())


@unit
def test_initial_weights_are_small_and_gains_are_one(block):
    x = block.inputs[0].clone()
    power.change(block, power.INITIAL)
    for name, value in block.parameters.items():
        if value.ndim == 2:
            assert 0.015 < value.std() < 0.025, name
        else:
            assert set(value.tolist()) == {1.0 if name.endswith("weight") else 0.0}, name
    assert torch.equal(block.inputs[0], x)


@unit
def test_zeros_are_everywhere_and_the_block_runs_on_them(block):
    power.change(block, power.ZEROS)
    tensors = [*block.parameters.values(), *block.inputs, *block.cotangents]
    assert not any(tensor.any() for tensor in tensors) and len(block.parameters) == len(parameters.shapes(CONFIG))
    iteration = block.iteration(BOTH)
    (y,) = iteration.run()
    assert not y.any() and not any(gradient.any() for gradient in iteration.gradients().values())


# ------------------------------------------------------------------------------------------------------------ the cases


@unit
@pytest.mark.parametrize("data", [power.RANDOM, power.ZEROS])
def test_a_matmul_is_checked_on_random_data_and_timed_on_its_own(data):
    case_ = power.case_of_matmul("bfloat16", data, CONFIG, "")
    result = Result("matmul", CONFIG, "float32", FACTS, matmul="bfloat16")
    subject = case_.prepare(setting(), result)
    error, gate = result.errors["output"]
    assert 0 < error < gate and subject.workload.flops(FORWARD) == 2 * 32 * 32 * 128
    left, right = subject.inputs
    assert (left.shape, right.shape) == ((32, 32), (32, 128)) and right.stride() == (1, 32)       # as a weight lies
    assert bool(left.any()) == bool(right.any()) == (data == power.RANDOM)
    (product,) = subject.iteration(FORWARD).run()
    assert product.shape == (32, 128) and bool(product.any()) == (data == power.RANDOM) and not subject.has(BOTH)


@unit
def test_a_wrong_matmul_is_not_timed(monkeypatch):
    monkeypatch.setattr(pieces, "multiply", lambda left, right, dtype: 1.01 * (left @ right))
    result = Result("matmul", CONFIG, "float32", FACTS, matmul="float32")
    with pytest.raises(Failed, match=r"the product is off by 1\.0e-02"):
        power.case_of_matmul("float32", power.RANDOM, CONFIG, "").prepare(setting(), result)


@unit
@pytest.mark.parametrize("capability, tf32, missing", [
    ((9, 0), True, []), ((8, 9), True, []), ((8, 0), True, ["float8"]), ((7, 0), False, ["tf32", "float8"])])
def test_what_a_gpu_can_not_multiply_is_missing(capability, tf32, missing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: tf32)
    why = power.arithmetics(torch.device("cuda"))
    assert [name for name, reason in why.items() if reason] == missing and len(why) == 5
    assert [name for name, reason in power.arithmetics(CPU).items() if reason] == ["tf32", "float8"]


@unit
def test_block_and_matmul_have_rounds_of_their_own_and_no_limit():
    """On zeros a row may pass what random data sustain."""
    options = SimpleNamespace(config=CONFIG, device=CPU)
    block, alone = power.groups(options)
    assert len(block.cases) == 6 and len(alone.cases) == 10 and alone.modes == [FORWARD] and block.modes == MODES
    assert all(group.metered and not group.limited for group in (block, alone))
    power.refine(options)
    assert options.launches == ("eager",)


@integration
def test_the_study_on_a_cpu_says_that_nothing_is_known_of_power(study_main, cheap_backend, tmp_path):
    status, out, _ = study_main("power", "--rounds", 6, "--json", tmp_path / "power.jsonl")
    assert status == 0 and out.count("not known") == 4 and "matmul, float32, zeros" in out
    lines = read(tmp_path / "power.jsonl")
    assert STUDY.report(lines) in out
    timed = {(run.case["name"], run.variant["in"], run.variant["data"]): run for run in runs(lines)}
    alone = timed["matmul", "float32", "random"]
    of_rate = alone.value(FORWARD, "rate", "eager") * alone.median(FORWARD, "eager") / 1e3
    assert alone.value(FORWARD, "work") == pytest.approx(of_rate)
    assert not alone.find(FORWARD, "limit", "eager") and alone.value(BOTH, "work") is None


# ------------------------------------------------------------------------------------------------------------- findings


def row(name: str, dtype: str, data: str, ms: float, joules: float | None, state=None, mode=FORWARD) -> list[dict]:
    """Records of a case on a GPU, in that state."""
    samples = both([ms] * 6, [ms] * 6) if name == power.BLOCK else {(mode, "eager"): [ms] * 6}
    of_case = functools.partial(made, facts=GPU, study="power", joules=joules, config=CONFIG, matmul=dtype)
    lines = of_case(name, samples, variant={"in": dtype, "data": data})
    for line in lines:
        line["runners"][0]["extra_info"] |= CAPPED if state is None else state
    r = Result(name, CONFIG, "float32", GPU, variant={"in": dtype, "data": data}, study="power", run="one",
               traits=Traits(autocast=True))
    return lines + [record(r, "work", "FLOP", [2e12], each) for each in MODES]


def found(lines: list[dict]) -> list[str]:
    return power.findings(lines)


@unit
def test_at_the_power_cap_fewer_bits_are_faster_and_take_fewer_joules():
    lines = row(power.BLOCK, "float16", "random", 10.0, 7.0) + row(power.BLOCK, "bfloat16", "random", 8.0, 5.6)
    lines += row(power.BLOCK, "float16", "zeros", 5.0, 3.5)
    first, second, *_ = found(lines)
    assert first == ("block, forward+backward: BF16 against FP16, on random data: 1.25 [1.25, 1.25] times as fast, "
                     "20 % fewer joules")
    assert second.endswith("zeros against random data, in float16: 2.00 [2.00, 2.00] times as fast, 50 % fewer joules")
    assert STUDY.answer(lines) == "BF16 is 1.25 times as fast as FP16, zeros are 2.00 times as fast as random numbers"


@unit
@pytest.mark.parametrize("state, said", [({"throttled": []}, "there is no power cap in the way"),
                                         ({}, "whether a power cap is in the way is not known")])
def test_without_a_cap_power_decides_nothing(state, said):
    lines = row(power.ALONE, "float16", "random", 10.0, None, state) + row(power.ALONE, "bfloat16", "random", 8.0, None)
    assert found(lines)[2] == f"matmul, forward: BF16 against FP16, on random data: n/a, {said}"
    assert found(lines)[3].endswith("n/a, not timed side by side")


@unit
def test_a_row_tells_watts_clocks_and_joules_by_the_work():
    lines = row(power.ALONE, "float16", "random", 10.0, 7.0)
    told = STUDY.report(lines).splitlines()
    (table_row,) = [line.split() for line in told if line.startswith("matmul, float16, random ")]
    assert table_row[3:] == ["ok", "10.00", "0.100", "1", "1400", "yes", "7.00", "3.50", "2.0e-07"]
    (run,) = runs(lines)
    assert math.isclose(power.joules_per_teraflop(run, FORWARD), 3.5) and power.joules_per_teraflop(run, BOTH) is None


@unit
def test_the_chart_has_a_bar_for_each_kind_of_data(monkeypatch):
    drawn = []
    monkeypatch.setattr(power, "bars_chart", lambda *drawing: drawn.append(drawing[0]))
    lines = row(power.ALONE, "float16", "random", 10.0, 7.0) + row(power.ALONE, "float16", "zeros", 5.0, 3.0)
    STUDY.charts(lines)["joules"]()
    assert drawn == [{"matmul": {"float16, random": (3.5, 3.5, 3.5), "float16, zeros": (1.5, 1.5, 1.5)}}]
    assert STUDY.charts(row(power.ALONE, "float16", "random", 10.0, None)) == {}
