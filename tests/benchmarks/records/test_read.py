"""Reading records: what is refused, what is left out, what is put together, and the figures of a run."""
import json

import pytest
import torch

from benchmarks.records import RESULTS, read
from benchmarks.records.files import files
from benchmarks.records.read import BadRecords, label, latest, paired, runs, verdict
from common.block.traits import Traits
from common.report.metrics import SHARE
from common.report.record import PARTS
from common.runtime.iteration import BOTH, FORWARD
from common.runtime.peaks import BURST, SUSTAINED
from tests.helpers.made_records import CPU_CONFIG, FACTS, GPU, both, copied, made, write

pytestmark = pytest.mark.unit
LINES = made("0_baseline", both([4.0] * 6, [8.0] * 6)) + made("2_sdpa", both([1.0] * 6, [4.0] * 6))
SCHEMA_1 = """{"benchmark": {"name": "transformer block", "mode": "compile", "dtype": "bfloat16", "extra_info": \
{"step": "3_compile", "status": "ok", "reason": "", "config": {"batch_size": 4, "seq_len": 512, "hidden_size": 768, \
"num_heads": 12, "ffn_hidden_size": 3072, "dropout": 0.0, "amp_dtype": "bfloat16", "fp8_weights": "per-call", \
"fp8_attention": false}, "parameter_dtype": "float32", "autocast": "bfloat16", "residual": "float32", "engine": \
"PyTorch", "device": "cpu", "git": "82b0e0c", "caches": "as the previous iteration left it", "study": "ladder", "run": \
"5a14f4fd96a6"}}, "model": {"name": "B4 S512 E768 H12 D64 F3072", "type": "transformer block", "backend": "3_compile", \
"origins": ["seeded"]}, "metric": {"name": "compile cold", "benchmark_values": [18.12458648000029], "target_value": \
null, "extra_info": {"unit": "s"}}, "runners": [{"name": "AMD EPYC", "type": "cpu", "gpu_info": "", "gpu_count": 0, \
"gpu_mem_info": "", "extra_info": {"driver": null, "compute_capability": null, "cpu_threads": 2, "neighbours": []}}], \
"dependencies": {"torch": {"version": "2.15.0+cu132"}, "triton": {"version": "3.9.0"}, "python": {"version": \
"3.11.7"}}}"""                                 # as benchmarks/results/cpu/ladder-cpu.jsonl had it before schema 2


# ----------------------------------------------------------------------------------------------------- files, folders


def test_a_file_is_read_whole_and_in_order(tmp_path):
    assert read.read(write(tmp_path / "a", LINES)) == LINES


def test_a_folder_of_files_reads_as_one_set_of_records(tmp_path):
    """In the order of the files' names; what is no *.jsonl in it is none of them."""
    write(tmp_path / "2.jsonl", LINES[:3])
    write(tmp_path / "1.jsonl", LINES[3:])
    (tmp_path / "notes.txt").write_text("no records")
    assert read.read(tmp_path) == LINES[3:] + LINES[:3]
    assert read.read(str(tmp_path)) == read.read(tmp_path)


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(BadRecords, match=r"holds no \*\.jsonl; give a file that --json wrote, or a folder of such"):
        read.read(tmp_path)


def test_a_bad_line_in_a_folder_is_named_with_its_file(tmp_path):
    write(tmp_path / "1.jsonl", LINES)
    write(tmp_path / "2.jsonl", LINES, end="\n{}\n")
    with pytest.raises(BadRecords, match=rf"2\.jsonl, line {len(LINES) + 1}: "):
        read.read(tmp_path)


def test_a_last_line_that_was_cut_off_is_left_out_and_named(tmp_path, capsys):
    path = write(tmp_path / "a", LINES, end="\n" + json.dumps(LINES[0])[:70])
    assert read.read(path) == LINES
    assert capsys.readouterr().err == f"{path}, line {len(LINES) + 1}: cut off, left out\n"


@pytest.mark.parametrize("bad", ["{", "7", "null", "[]", '{"a": 1}', '{"benchmark": {}}', "text", '"benchmark"'])
def test_a_line_that_is_no_record_is_refused_by_its_number(tmp_path, bad):
    path = tmp_path / "a"
    path.write_text(json.dumps(LINES[0]) + "\n" + bad + "\n" + json.dumps(LINES[1]) + "\n")
    with pytest.raises(BadRecords, match=r"a, line 2: .*give a file that --json wrote"):
        read.read(path)


@pytest.mark.parametrize("place", [0, 1], ids=["the first", "behind one of now"])
def test_records_of_the_old_shape_are_refused_by_their_schema(tmp_path, place):
    """In one line that says which schema they have, and which there is now."""
    path = tmp_path / "old.jsonl"
    path.write_text("\n".join([*map(json.dumps, LINES[:place]), SCHEMA_1, json.dumps(LINES[0])]) + "\n")
    with pytest.raises(BadRecords) as refused:
        read.read(path)
    assert str(refused.value) == (f"{path}, line {place + 1}: is of the schema 'transformer block, 1', "
                                  "this suite reads 'transformer block, 2'; record it anew")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"], ids=["empty", "blank", "binary"])
def test_a_file_without_records_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(BadRecords):
        read.read(tmp_path / "a")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(BadRecords, match="a: No such file"):
        read.read(tmp_path / "a")


@pytest.mark.parametrize("path", files(RESULTS, "**/*"),
                         ids=lambda path: str(path.relative_to(RESULTS)))
def test_what_was_recorded_is_read(path):
    assert runs(read.read(path))


# -------------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("facts, config, dtype, matmul, words", [
    (FACTS, {}, "float32", "bfloat16", "2_sdpa"),
    (GPU, {"amp_dtype": torch.float16}, "float32", "float16", "2_sdpa"),
    (GPU, {}, "float32", "bfloat16", "2_sdpa, bfloat16"),
    (GPU, {"amp_dtype": None}, "float32", "tf32", "2_sdpa, TF32 alone"),
    (FACTS, {"amp_dtype": None}, "float32", "float32", "2_sdpa, no autocast"),
    (FACTS, {"dropout": 0.5}, "bfloat16", "bfloat16", "2_sdpa, dropout 0.5, all 16-bit"),
    (FACTS, {"fp8_weights": "kept", "fp8_attention": True}, "float32", "float8", "2_sdpa, weights kept, FP8 attention"),
    (FACTS, {"attention": "series"}, "float32", "bfloat16", "2_sdpa, attention by the series"),
])
def test_a_label_names_what_is_not_the_default(facts, config, dtype, matmul, words):
    config = CPU_CONFIG.replace(**config)
    line = made("2_sdpa", {}, facts=facts, config=config, parameter_dtype=dtype, matmul=matmul)[0]
    assert label(line) == words
    assert label(line, settings=False) == "2_sdpa"


def test_step_0_has_no_autocast_to_name():
    line = made("0_baseline", {}, config=CPU_CONFIG.replace(amp_dtype=None), matmul="float32")[0]
    assert label(line) == "0_baseline"


@pytest.mark.parametrize("variant, words", [
    ({"precision": "FP8", "output": "y in float32"}, "a case, FP8, y in float32"),
    ({"compiled": True}, "a case, compiled"),
    ({"optimizations": ["autocast", "SDPA"]}, "a case, autocast + SDPA"),
    ({"optimizations": []}, "a case"),
    ({"size": [64, 4096], "level": "eager"}, "a case, 64 x 4096, eager"),
    ({"size": None, "level": "Triton"}, "a case, all sizes, Triton"),
])
def test_a_label_names_what_tells_cases_of_one_name_apart(variant, words):
    line = made("a case", {}, variant=variant, traits=Traits())[0]
    assert label(line) == words
    assert label(line, settings=False) == words            # none of these is a setting


def test_a_label_names_the_version_of_transformer_engine():
    line = made("4_transformer_engine", {}, engine="Transformer Engine 2.9.0", matmul="float8")[0]
    assert label(line) == "4_transformer_engine (TE 2.9.0)"
    assert label(line, engine=False) == "4_transformer_engine"


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_run_knows_its_figures():
    (run,) = runs(made("2_sdpa", both([3.0, 1.0, 2.0], [6.0] * 3) | {(FORWARD, "graph"): [1.5] * 3}))
    assert run.median(FORWARD, "eager") == 2.0 and run.best(FORWARD) == "graph" and run.best_ms(FORWARD) == 1.5
    assert run.best(BOTH) == "eager" and run.samples(BOTH, "graph") == []
    assert run.value("check", "branch error") == 2e-7 and run.value(FORWARD, "launches") == 3
    assert run.value(FORWARD, "no such metric") is None
    assert (run.step, run.variant, run.shape) == (2, {}, str(CPU_CONFIG))


def test_each_process_is_a_run_of_its_own_and_the_latest_counts():
    lines = made("2_sdpa", both([1.0], [1.0]), run="a") + made("2_sdpa", both([2.0], [2.0]), run="b")
    assert [run.best_ms(FORWARD) for run in runs(lines)] == [1.0, 2.0]
    assert latest(lines)["2_sdpa"].best_ms(FORWARD) == 2.0


def test_studies_shapes_and_variants_are_runs_of_their_own():
    lines = made("2_sdpa", both([1.0], [])) + made("2_sdpa", both([2.0], []), study="peers")
    lines += made("2_sdpa", both([3.0], []), config=CPU_CONFIG.replace(seq_len=32))
    lines += made("2_sdpa", both([4.0], []), parameter_dtype="bfloat16")
    assert [run.best_ms(FORWARD) for run in runs(lines)] == [1.0, 2.0, 3.0, 4.0]


def test_a_record_of_a_whole_process_is_in_no_run():
    lines = copied(made("2_sdpa", both([1.0], [1.0])))
    for line in lines:
        line["benchmark"]["extra_info"]["case"]["name"] = None
    assert runs(lines) == [] and latest(lines) == {}


def test_times_of_what_failed_are_none():
    """A step can fail in its second pass: what it took in the first is nobody's time."""
    (run,) = runs(made("2_sdpa", both([1.0], [1.0])) + made("2_sdpa", {}, status="failed", reason="why"))
    assert run.best(FORWARD) is None and run.best_ms(FORWARD) is None


def test_the_last_status_is_the_status():
    (run,) = runs(made("2_sdpa", both([1.0], [1.0]), status="failed", reason="why"))
    assert (run.status, run.info["reason"]) == ("failed", "why")


def test_of_an_older_record_the_profiled_way_of_launching_tells_the_time():
    lines = made("0_baseline", both([4.0] * 6, []) | {(FORWARD, "graph"): [3.0] * 6}, of="eager",
                 parts={FORWARD: dict.fromkeys(PARTS, 1.0)})
    (run,) = runs(lines)
    assert (run.best_ms(FORWARD), run.profiled_ms(FORWARD), run.clocked_ms(FORWARD)) == (3.0, 4.0, None)


def test_what_was_not_profiled_has_no_parts():
    (run,) = runs(made("0_baseline", both([4.0] * 6, [])))
    assert run.parts(FORWARD) is None and not run.attributed(FORWARD)


# -------------------------------------------------------------------------------------------------------------- ratios


def test_only_samples_of_the_same_rounds_are_paired():
    a, b = runs(made("0_baseline", both([4.0] * 6, []), run="x") + made("2_sdpa", both([2.0] * 6, []), run="x"))
    assert paired(a, b, FORWARD) == (2.0, 2.0, 2.0)
    assert paired(a, b, FORWARD, "eager") == (2.0, 2.0, 2.0) and paired(a, b, FORWARD, "graph") is None
    assert paired(a, b, FORWARD, None, "eager") == (2.0, 2.0, 2.0) and paired(a, b, FORWARD, None, "graph") is None
    assert paired(a, b, BOTH) is None and paired(a, None, FORWARD) is None and paired(None, b, FORWARD) is None
    (c,) = runs(made("2_sdpa", both([2.0] * 6, []), run="y"))
    assert paired(a, c, FORWARD) is None
    (fewer,) = runs(made("3_compile", both([2.0] * 5, []), run="x"))
    assert paired(a, fewer, FORWARD) is None


@pytest.mark.parametrize("low, high, word", [
    (0.96, 1.04, " SAME"), (0.95, 1.05, " SAME"), (1.0, 1.0, " SAME"),
    (0.99, 1.2, " UNSURE"), (0.8, 1.01, " UNSURE"), (0.5, 2.0, " UNSURE"),     # one end beyond 5 %, the other, both
    (1.01, 1.02, ""), (0.97, 0.99, ""), (1.5, 2.5, ""),
])
def test_same_is_an_interval_that_stays_within_five_percent_of_one(low, high, word):
    assert verdict(low, high) == word


@pytest.mark.parametrize("state, share", [({"throttled": ["power cap"]}, 50.0), ({}, 50.0), ({"throttled": []}, None)])
def test_the_share_of_what_is_sustained_is_that_of_a_row_at_the_power_cap(state, share):
    """Older records have it of all rows."""
    lines = made("0_baseline", both([4.0] * 6, []), facts=GPU, limits={SUSTAINED: {"matmul": 2.0}})
    for line in lines:
        line["runners"][0]["extra_info"] |= state
    (run,) = runs(lines)
    assert run.figure(SHARE[SUSTAINED], FORWARD) == share and run.shown(SHARE[SUSTAINED], FORWARD) == (
        "50" if share else "n/a")
    assert run.figure(SHARE[BURST], FORWARD) == 50.0 and run.at_power_cap(BOTH, "eager") is None
