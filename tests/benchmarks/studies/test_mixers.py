"""The study of mixers: what it records, shows and refuses."""
import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import studies
from benchmarks.mixers import forms
from benchmarks.mixers.mixer import MIXERS
from benchmarks.records.read import read, runs
from benchmarks.studies import mixers
from benchmarks.studies.mixers import ATTENTION, Sizes
from common.block.config import BlockConfig

unit, integration = pytest.mark.unit, pytest.mark.integration
STUDY = studies.load("mixers")
SHORT = ["--device", "cpu", "--preset", "tiny", "--rounds", "6", "--mixer", "SSD"]


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    """What a compiled form computes is the same."""
    mixers._truth.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda mix, **options: mix)


@integration
def test_each_form_is_timed_beside_attention(study_main, tmp_path):
    path = tmp_path / "records.jsonl"
    status, out, _ = study_main("mixers", *SHORT, "--lengths", "16,64", "--json", str(path))
    assert status == 0, out
    lines = read(path)
    assert {(run.case["name"], run.variant["way"]) for run in runs(lines) if run.status == "ok"} == {
        (ATTENTION, "SDPA"), *(("SSD", way) for way in ("a loop", "at once", "chunks", "chunks, compiled", mixers.STEP,
                                                        mixers.STEP_COMPILED))}
    assert STUDY.report(lines) in out and "S 64\n" in out
    assert "SSD, chunks, Triton: skipped: its Triton kernels need a GPU" in out
    rows = re.findall(r"^SSD +(a loop|at once|chunks(?:, compiled)?) +\d\.\de-0\d +\d", out, re.MULTILINE)
    assert not re.search("^f.b by chunks", out, re.MULTILINE)
    assert rows == 2 * ["a loop", "at once", "chunks", "chunks, compiled"]
    assert re.search(r"^SSD +a loop +\d\.\d\d +\d\.\d\d +(never|16|64) +32$", out, re.MULTILINE), out
    row = r"^SSD +a step(, compiled)? +\d\.\de-0\d +[\d.]+ +\d\.\d\d +[\d.]+ +\d\.\d\d +(?:never|16|64) +16$"
    steps = re.findall(row, out, re.MULTILINE)
    assert steps == ["", ", compiled"], out
    assert re.match(r"on a CPU at S 64 SSD \(.*\) is \d\.\d\d times as fast as causal attention", STUDY.answer(lines))


@integration
def test_other_chunks_are_held_beside_the_usual_ones(study_main):
    status, out, _ = study_main("mixers", *SHORT, "--lengths", "16,64", "--chunks", "8,32")
    assert status == 0, out
    headers = r"^f\+b by chunks +of 8, ms +of 32, ms +of 64, ms +fastest +fewest FLOPs$"
    assert re.search(headers, out, re.MULTILINE), out
    assert re.search(r"^SSD +[\d.]+ +[\d.]+ +[\d.]+ +(?:8|32|64) +8$", out, re.MULTILINE), out
    assert len(re.findall(r"^SSD +chunks of (?:8|32) +\d\.\de-0\d", out, re.MULTILINE)) == 4


@unit
def test_the_chunk_with_the_fewest_flops_grows_with_the_width():
    """Whatever the length."""
    def fewest(width, steps):
        flops = {size: MIXERS["SSD"].flops_by_chunks_of(size, steps, width) for size in (8, 16, 32, 64, 128, 256)}
        return min(flops, key=flops.__getitem__)
    assert [fewest(16, 4096), fewest(64, 4096), fewest(64, 16384), fewest(128, 16384)] == [16, 32, 32, 64]


@integration
def test_a_form_that_is_wrong_fails(study_main, monkeypatch):
    right = forms._decay_between
    monkeypatch.setattr(forms, "_decay_between", lambda g: right(g).tril(-1))
    status, out, _ = study_main("mixers", *SHORT, "--lengths", "16")
    assert status == 1 and re.search(r"^SSD, chunks: failed: the y is off by .* against FP64", out, re.MULTILINE), out
    assert re.search(r"^SSD +a loop ", out, re.MULTILINE)


@integration
@pytest.mark.parametrize("wrong, what", [(lambda state, y: y, "state"), (lambda state, y: y + state.mean(), "y")])
def test_a_step_of_decoding_that_is_wrong_fails(wrong, what, study_main, monkeypatch):
    """Its state stays, or its y is another."""
    right = mixers.step_of

    def step_of(mixer):
        def step(state, *inputs):
            own = state.clone()
            y = right(mixer)(own, *inputs)
            if what == "y":
                state.copy_(own)
            return wrong(state, y)
        return step
    monkeypatch.setattr(mixers, "step_of", step_of)
    status, out, _ = study_main("mixers", *SHORT, "--lengths", "16")
    assert status == 1, out
    assert re.search(rf"^SSD, a step: failed: the {what} is off by .* against FP64", out, re.MULTILINE), out


@unit
@pytest.mark.parametrize("way, length, why", [
    ("a loop", 2048, ""), ("a loop", 2049, "a loop over 2,049 steps: it is timed up to 2,048"),
    ("at once", 2**15, ""), ("at once", 2**15 + 1, "all pairs of steps would take 8 GiB"), ("chunks", 2**20, ""),
    ("chunks, Triton", 64, "its Triton kernels need a GPU")])
def test_what_would_take_too_long_or_can_not_run_is_a_line(way, length, why):
    assert Sizes(1, 2, length, 64).why_not(way, torch.device("cpu")) == why


@unit
def test_on_a_gpu_its_kernels_run():
    assert not Sizes(1, 2, 2**20, 64).why_not("chunks, Triton", torch.device("cuda"))


@unit
@pytest.mark.parametrize("device, dtype, lengths", [
    ("cuda", torch.bfloat16, (512, 2048, 8192, 16384)), ("cpu", None, (256, 1024))])
def test_on_a_gpu_it_computes_in_16_bits(device, dtype, lengths):
    options = SimpleNamespace(device=torch.device(device), config=BlockConfig(2, 512, 64, 4), lengths=None, quick=False)
    mixers.refine(options)
    assert (options.config.amp_dtype, options.lengths) == (dtype, lengths)
    assert Sizes.of(options.config, 512).dtype == (dtype or torch.float32)


@unit
def test_without_records_there_is_no_answer():
    assert STUDY.answer([]) == mixers.NO_ANSWER


@unit
@pytest.mark.parametrize("wrong", [["--mixer", "RWKV"], ["--lengths", "0"], ["--lengths", "long"]])
def test_wrong_options_are_told(wrong, study_main):
    status, _, said = study_main("mixers", *wrong)
    assert status == 2 and wrong[0] in said


@integration
def test_records_name_sizes_and_what_they_stand_beside(study_main, tmp_path):
    path = tmp_path / "records.jsonl"
    study_main("mixers", *SHORT, "--lengths", "16", "--json", str(path))
    variants = [json.loads(line)["benchmark"]["extra_info"]["case"]["variant"] for line in path.read_text().splitlines()
                if '"SSD"' in line]
    assert {tuple(each["size"]) for each in variants if each} == {(8, 4, 16, 16)}
