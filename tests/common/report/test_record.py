"""Records: one metric a line, with a case in fields, every sample, and what they were measured on."""
import dataclasses
import json
import math
from dataclasses import replace

import pytest
import torch

from common import BlockConfig, steps
from common.block.traits import Traits
from common.report import record
from common.report.metrics import FLOPS_COUNTED
from common.report.record import check_records, peak_records, row_records, status_record
from common.report.result import Compilation, Result
from common.runtime import limit
from common.runtime.data_sheets import data_sheet
from common.runtime.iteration import BACKWARD, BOTH, FORWARD, LAUNCHES, MODES
from common.runtime.peaks import BURST, COPY, DATA_SHEET, SUSTAINED, MeasuredPeaks
from common.runtime.timing import Timing
from tests.helpers.made_results import (
    CPU,
    H200,
    KERNELS,
    LIMITS,
    OFFSETS,
    RESULTS,
    ROUNDS,
    SAMPLES,
    STATE,
    emulated,
    ended,
    finished,
    row,
    sustained,
)

pytestmark = pytest.mark.unit

each_result = pytest.mark.parametrize("r", RESULTS.values(), ids=RESULTS.keys())


def records(r: Result) -> list[dict]:
    """All that a run writes."""
    lines = check_records(r)
    for mode in MODES:
        if mode in r.evidence:
            lines += row_records(r, mode)
    return [*lines, status_record(r, "run")]


def case_of(line: dict) -> dict:
    return line["benchmark"]["extra_info"]["case"]


def metrics(lines: list[dict], name: str) -> list[dict]:
    """The metric of every record of that name."""
    return [line["metric"] for line in lines if line["metric"]["name"] == name]


def eager(lines: list[dict]) -> dict[str, dict]:
    """Name -> metric of what was launched eagerly."""
    return {line["metric"]["name"]: line["metric"] for line in lines if case_of(line)["launch"] == "eager"}


# -------------------------------------------------------------------------------------------------------------- schema


@each_result
def test_records_follow_the_schema(r):
    for line in records(r):
        assert line.keys() == {"benchmark", "model", "metric", "runners", "dependencies"}
        assert {"name", "mode", "dtype", "extra_info"} <= line["benchmark"].keys()
        assert {"name", "benchmark_values", "target_value", "extra_info"} <= line["metric"].keys()
        assert {"name", "type", "gpu_count"} <= line["runners"][0].keys()
        assert line["dependencies"]["torch"] == {"version": "2.15.0+cu132"}
        assert line["benchmark"]["extra_info"]["schema"] == record.SCHEMA == "transformer block, 2"
        assert line["benchmark"]["extra_info"]["config"]["amp_dtype"] in ("none", "float16", "bfloat16")
        assert line["metric"]["extra_info"]["unit"] is not None
        text = json.dumps(line, allow_nan=False)
        assert json.loads(text) == line and "\n" not in text


@each_result
def test_every_record_says_on_what_and_of_which_sources_it_is(r):
    """Two cards of one kind are told apart, two kinds of CPU too, and any change of a source."""
    facts = H200 if r.on_gpu else CPU
    for line in records(r):
        info, machine = line["benchmark"]["extra_info"], line["runners"][0]["extra_info"]
        assert (info["sources"], info["git"]) == (CPU["sources"], CPU["git"])
        assert machine["cpu_model"] == CPU["cpu_model"] and machine["cpu_threads"] == 2
        assert machine["gpu_uuid"] == facts["gpu_uuid"] and (machine["gpu_uuid"] is not None) == r.on_gpu
        assert machine["driver"] == facts["driver"] and line["runners"][0]["name"] == facts["name"]
        assert info["device"] == line["runners"][0]["type"] == facts["device"]
        assert (info["run"], info["status"], info["reason"]) == (r.run, r.status, r.reason)


def test_a_gpu_is_a_runner_with_its_memory_and_a_cpu_has_none():
    on_gpu, on_cpu = (status_record(RESULTS[name])["runners"][0] for name in ("H200", "CPU"))
    assert (on_gpu["gpu_info"], on_gpu["gpu_count"], on_gpu["gpu_mem_info"]) == ("NVIDIA H200", 1, "140 GiB")
    assert (on_cpu["gpu_info"], on_cpu["gpu_count"], on_cpu["gpu_mem_info"]) == ("", 0, "")


def test_what_is_not_installed_is_no_dependency():
    assert status_record(RESULTS["CPU"])["dependencies"].keys() == {"torch", "triton", "python"}
    assert status_record(RESULTS["H200"])["dependencies"]["cudnn"] == {"version": "91900"}


def test_a_library_that_only_this_case_uses_is_a_dependency():
    r = dataclasses.replace(RESULTS["CPU"], libraries={"torchao": "0.18.0"})
    assert status_record(r)["dependencies"]["torchao"] == {"version": "0.18.0"}


def test_a_record_says_when_its_process_began():
    r = dataclasses.replace(RESULTS["CPU"], facts=RESULTS["CPU"].facts | {"began": "2026-11-23 10:00:00+00:00"})
    assert status_record(r)["benchmark"]["extra_info"]["began"] == "2026-11-23 10:00:00+00:00"
    assert status_record(RESULTS["CPU"])["benchmark"]["extra_info"]["began"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="latency is not finite"):
        record.record(RESULTS["H200"], "latency", "ms", [1.0, value], "forward")


@pytest.mark.parametrize("dtype, name", [(None, "none"), (torch.bfloat16, "bfloat16")])
def test_dtypes_are_words_in_a_record(dtype, name):
    r = finished(gpu=False)
    info = status_record(replace(r, config=r.config.replace(amp_dtype=dtype)))["benchmark"]["extra_info"]
    assert info["config"]["amp_dtype"] == name and info["parameter_dtype"] == info["residual"] == "float32"


# ---------------------------------------------------------------------------------------------------------------- case


@each_result
def test_a_case_is_in_fields_and_no_reader_takes_a_name_apart(r):
    for line in records(r):
        case = case_of(line)
        assert case.keys() == {"study", "step", "name", "variant", "pass", "launch"}
        assert (case["study"], case["step"], case["name"]) == ("step", r.step, r.name)
        mode = line["benchmark"]["mode"]
        assert case["pass"] == (mode if mode in MODES else None)
        assert "step" not in line["benchmark"]["extra_info"] and "study" not in line["benchmark"]["extra_info"]
        assert "launch" not in line["metric"]["extra_info"]


def test_a_case_has_the_launch_of_what_was_launched():
    """What is of both ways, the kernels, has none; so has a check."""
    lines = records(RESULTS["CPU"])
    launches = {}
    for line in lines:
        launches.setdefault(line["metric"]["name"], set()).add(case_of(line)["launch"])
    assert launches["latency"] == {"eager", "graph"} and launches["rate"] == {"eager"}
    assert launches["launches"] == launches["branch error"] == launches["status"] == {None}


@pytest.mark.parametrize("mode, expected", [
    (FORWARD, FORWARD), (BOTH, BOTH), (BACKWARD, BACKWARD), ("check", None), ("compile", None), ("run", None)])
def test_a_pass_is_a_pass_and_no_stage_of_a_run(mode, expected):
    line = record.record(RESULTS["CPU"], "status", "", [], mode)
    assert case_of(line)["pass"] == expected and line["benchmark"]["mode"] == mode


def test_a_variant_holds_what_tells_a_case_from_its_like():
    """What a study has set, and what of the config is not the default."""
    r = finished(gpu=True)
    assert case_of(status_record(r))["variant"] == {}
    changed = replace(r, variant={"without": "graph"}, parameter_dtype="float16",
                      config=r.config.replace(amp_dtype=None, dropout=0.1))
    assert case_of(status_record(changed))["variant"] == {
        "without": "graph", "amp_dtype": "none", "dropout": 0.1, "parameters": "float16"}


def test_a_case_of_a_study_may_be_no_step_no_block_or_the_whole_run():
    peer = Result("te.TransformerLayer", RESULTS["H200"].config, "float32", H200, traits=Traits(autocast=True),
                  variant={"precision": "FP8"}, study="peers")
    assert case_of(status_record(peer)) == {"study": "peers", "step": None, "name": "te.TransformerLayer",
                                            "variant": {"precision": "FP8"}, "pass": None, "launch": None}
    operation = Result("rms_norm", None, "float16", H200, study="fusions")
    line = status_record(operation)
    assert line["model"]["name"] == "not a block" and line["benchmark"]["extra_info"]["config"] == {}
    assert case_of(status_record(replace(operation, name="")))["name"] is None


# ------------------------------------------------------------------------------------------------------------- samples


def test_every_raw_sample_is_kept_in_order():
    latency = metrics(records(finished(gpu=True)), "latency")
    assert len(latency) == len(MODES) * len(LAUNCHES)
    for metric in latency:
        assert metric["benchmark_values"] == SAMPLES
        assert metric["extra_info"]["median"] == 7.2 and metric["extra_info"]["settled"] is True
        assert metric["extra_info"]["clock"] == "CUDA events"
        assert metric["extra_info"]["calibration"] == {"copy": [0.5, 0.6]}


def test_each_sample_has_its_round_and_its_offset():
    """In seconds, to microseconds."""
    for metric in metrics(records(finished(gpu=True)), "latency"):
        assert metric["extra_info"]["rounds"] == ROUNDS
        assert metric["extra_info"]["offsets_s"] == [1.5, 1.5074, 1.5149, 2.25, 2.2575, 2.265] != OFFSETS
    r = finished(gpu=True)
    r.rows[FORWARD, "eager"] = row(timing=Timing(SAMPLES, True, "CUDA events"))
    extra = eager(row_records(r, FORWARD))["latency"]["extra_info"]
    assert extra["rounds"] is None and extra["offsets_s"] is None


def test_the_records_figures_are_those_of_their_rows():
    found = eager(row_records(finished(gpu=True), FORWARD))
    extra = found["latency"]["extra_info"]
    assert (extra["p20"], extra["p80"]) == pytest.approx((7.1, 7.3))
    values = {name: metric["benchmark_values"] for name, metric in found.items() if name != "latency"}
    assert values == {"throughput": [pytest.approx(16384 / 7.2e-3)], "rate": [pytest.approx(1.2e12 / 7.2e-3)],
                      "limit": [5.0], "percent of limit": [pytest.approx(69.44, abs=0.01)],
                      "sustained limit": [6.5], "percent of sustained limit": [pytest.approx(90.28, abs=0.01)],
                      "data sheet limit": [3.9], "percent of data sheet limit": [pytest.approx(54.17, abs=0.01)],
                      "energy": [4.8], "peak memory": [3 * 2**30], "enqueue": [0.9]}
    assert found["energy"]["extra_info"] | {"unit": "J", "emulated": False} == {
        "unit": "J", "emulated": False, "watts": 666.7, "sampled_watts": 670.0, "seconds": 1.1,
        "joules_per_1000_tokens": pytest.approx(1e3 * 4.8 / 16384)}
    for name, yardstick in (("limit", BURST), ("sustained limit", SUSTAINED), ("data sheet limit", DATA_SHEET)):
        assert found[name]["extra_info"]["by_kind"] == LIMITS[yardstick]
    assert found["rate"]["extra_info"]["counted"] == FLOPS_COUNTED


def test_each_peak_is_a_record_that_says_how_it_came_about():
    peaks = MeasuredPeaks(torch.device("cpu"))
    peaks.known = limit.Peaks({"float16": 8e14}, 4e12)
    peaks.sustained = {name: sustained(name) for name in ("float16", COPY)}
    peaks.sustained[COPY].in_rounds = [1.0, 2.0]
    peaks.sheet = data_sheet("NVIDIA H200")
    lines = peak_records(finished(gpu=True), peaks)
    told = {(line["metric"]["extra_info"]["yardstick"], line["metric"]["extra_info"]["of"]): line["metric"]
            for line in lines}
    assert len(told) == len(lines) == 2 + 2 + 6
    assert told[BURST, "float16"]["benchmark_values"] == [8e14] and told[BURST, COPY]["benchmark_values"] == [4e12]
    extra = told[SUSTAINED, COPY]["extra_info"]
    assert (extra["unit"], extra["work"], extra["seconds"], extra["settled"]) == ("bytes/s", "made-up copy", 1.0, True)
    assert extra["in_rounds"] == [1.0, 2.0] and told[SUSTAINED, "float16"]["extra_info"]["unit"] == "FLOP/s"
    assert "data sheet" in told[DATA_SHEET, "tf32"]["extra_info"]["source"]


def test_a_limit_says_how_much_of_it_flops_have_set():
    r = finished(gpu=True)
    r.rows[FORWARD, "eager"] = row(flop_bound=0.75)
    assert eager(row_records(r, FORWARD))["limit"]["extra_info"]["flop_bound"] == 0.75


def test_of_an_emulation_there_are_times_and_no_rates():
    lines = records(emulated())
    names = {line["metric"]["name"] for line in lines}
    assert "latency" in names and not names & {"throughput", "rate", "limit", "percent of limit"}
    assert eager(lines)["latency"]["extra_info"]["emulated"] is True


def test_a_row_without_samples_leaves_its_reason():
    lines = [line for line in records(RESULTS["CPU"]) if case_of(line)["launch"] == "graph"]
    assert [line["metric"]["name"] for line in lines] == ["latency", "latency"]
    for line in lines:
        assert line["metric"]["benchmark_values"] == [] and line["metric"]["extra_info"]["status"] == "n/a"
        assert line["metric"]["extra_info"]["reason"] == "CUDA graphs need a GPU"


def test_each_row_is_recorded_with_its_own_clocks():
    """The run's are those of its last row, with what throttled any of them."""
    r = finished(gpu=True, state=STATE | {"throttled": ["power cap"]})
    r.rows[FORWARD, "eager"].state = STATE | {"sm_mhz": 1425}
    found = {}
    for line in row_records(r, FORWARD):
        if line["metric"]["name"] == "latency":
            state = line["runners"][0]["extra_info"]
            found[case_of(line)["launch"]] = state["sm_mhz"], state["throttled"]
    assert found == {"eager": (1425, []), "graph": (1980, ["power cap"])}


def test_the_kernels_that_ran_are_in_the_record():
    (launches,) = metrics(row_records(RESULTS["H200"], FORWARD), "launches")
    assert launches["benchmark_values"] == [5] and launches["extra_info"]["kernels"] == KERNELS
    assert launches["extra_info"]["verdict"] == "proven" and launches["extra_info"]["unit"] == "kernels"
    assert launches["extra_info"]["attention"] == "cuDNN attention"
    (operators,) = metrics(row_records(RESULTS["CPU"], FORWARD), "launches")
    assert operators["extra_info"]["unit"] == "operators"


# -------------------------------------------------------------------------------------------------------------- checks


def test_errors_are_recorded_with_their_gates_and_the_worst_parameter():
    found = {}
    for line in check_records(finished(gpu=True)):
        extra = line["metric"]["extra_info"]
        found[line["metric"]["name"]] = line["metric"]["benchmark_values"], extra["gate"], extra["worst"]
    assert found == {
        "output error": ([3e-4], None, None), "branch error": ([5e-4], 1e-3, None),
        "input gradient error": ([5e-4], 3e-3, None),
        "parameter gradient error": ([9e-4], 3e-3, "attn.proj.weight")}


def test_the_price_of_compiling_is_recorded_in_seconds():
    lines = check_records(finished(gpu=True, compilation=Compilation(14.5, 2.3)))
    found = {line["metric"]["name"]: line["metric"]["benchmark_values"] for line in lines
             if line["benchmark"]["mode"] == "compile"}
    assert found == {"compile cold": [14.5], "compile warm": [2.3]}


@pytest.mark.parametrize("errors", [{}, {"output": (math.inf, None), "branch": (math.nan, 1e-3)}])
def test_where_nothing_can_be_told_in_numbers_the_status_is(errors):
    r = ended("failed", "the output is missing or not finite")
    r.errors = errors
    (line,) = check_records(r)
    assert (line["metric"]["name"], line["metric"]["benchmark_values"]) == ("status", [])
    assert line["benchmark"]["extra_info"]["status"] == "failed"
    assert line["benchmark"]["extra_info"]["reason"] == "the output is missing or not finite"


def test_a_way_of_launching_that_was_not_run_leaves_no_record():
    r = finished(gpu=True, rows={(FORWARD, "eager"): row()})
    assert {case_of(line)["launch"] for line in row_records(r, FORWARD)} == {"eager", None}


def test_a_script_writes_the_step_it_is():
    step = steps.load(4)
    r = Result(step.name, BlockConfig(2, 64, 64, 4, fp8_attention=True), "float32", H200, step=step.number,
               traits=step.traits)
    assert case_of(status_record(r)) == {"study": "step", "step": 4, "name": "4_transformer_engine",
                                         "variant": {"fp8_attention": True}, "pass": None, "launch": None}
