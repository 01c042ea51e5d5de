"""The study of mixers: what it records, shows and refuses."""
import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import studies
from benchmarks.mixers import forms
from benchmarks.mixers.mixer import MIXERS
from benchmarks.records.read import extra, metric, read, runs, values
from benchmarks.show.tables import NO_ANSWER
from benchmarks.studies import mixers
from benchmarks.studies.mixers import subjects, tables
from benchmarks.studies.mixers.subjects import ATTENTION, NO_BACKWARD, Sizes
from common.block.config import BlockConfig
from common.block.workload import COPY
from common.measure.cases import Setting
from common.outcome import Failed
from common.report.result import Result
from common.runtime import compiler
from common.runtime.iteration import BOTH, FORWARD
from common.runtime.peaks import BURST

unit, integration = pytest.mark.unit, pytest.mark.integration
STUDY = studies.load("mixers")
SHORT = ["--device", "cpu", "--preset", "tiny", "--rounds", "6", "--mixer", "SSD"]
ALONE = [*SHORT, "--part", "mixer"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    """What a compiled form computes is the same."""
    subjects._truth.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda mix, **options: mix)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **options: None)
    monkeypatch.setattr(compiler, "compile_in_place", lambda block: None)


@integration
def test_each_form_is_timed_beside_attention(study_main, tmp_path):
    path = tmp_path / "records.jsonl"
    status, out, _ = study_main("mixers", *SHORT, "--part", "mixer", "--part", "decoding", "--lengths", "16,64",
                                "--json", str(path), "--chart", str(tmp_path / "chart"))
    assert status == 0, out
    lines = read(path)
    assert {(run.case["name"], run.variant["way"]) for run in runs(lines) if run.status == "ok"} == {
        (ATTENTION, "SDPA"), *(("SSD", way) for way in ("a loop", "at once", "chunks", "chunks, compiled", mixers.STEP,
                                                        mixers.STEP_COMPILED))}
    assert (tmp_path / "chart-time.png").exists() and [*tables.charts(lines)] == ["time"]
    assert "SSD, mamba-ssm: skipped: its kernels need a GPU" in out
    assert STUDY.report(lines) in out and "S 64\n" in out
    assert "SSD, chunks, Triton: skipped: its Triton kernels need a GPU" in out
    ways, error = "(a loop|at once|chunks(?:, compiled)?)", r"\d\.\de-0\d"
    rows = re.findall(rf"^SSD +{ways} +{error} +[\d.,]+ +[\d.,]+", out, re.MULTILINE)
    assert not re.search("^f.b by chunks", out, re.MULTILINE)
    assert rows == 2 * ["a loop", "at once", "chunks", "chunks, compiled"]
    errors = re.findall(rf"^SSD +{ways} +{error} +{error}$", out, re.MULTILINE)
    assert errors == ["a loop", "at once", "chunks", "chunks, compiled"]
    assert len(re.findall(r"^SSD +chunks +[\d.]+ +[\d.]+$", out, re.MULTILINE)) == 2, out       # f+b, and forward
    crossed = r"^SSD +a loop +(?:never|16|64) +(?:never|16|64) +32$"
    assert len(re.findall(crossed, out, re.MULTILINE)) == 1, out
    crossed = r"^SSD +chunks +(?:never|16|64) +(?:never|[\d,]+) +(?:never|16|64) +(?:never|[\d,]+) +204$"
    assert len(re.findall(crossed, out, re.MULTILINE)) == 1, out
    row = r"^SSD +a step(, compiled)? +\d\.\de-0\d +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +(?:never|16|64) +0 of 2 +16$"
    steps = re.findall(row, out, re.MULTILINE)
    assert steps == ["", ", compiled"], out
    assert re.fullmatch(r"on a CPU forward\+backward: SSD (from S (16|64)|at none up to S 64)", STUDY.answer(lines))


@integration
def test_other_chunks_are_held_beside_the_usual_ones(study_main):
    status, out, _ = study_main("mixers", *ALONE, "--lengths", "16,64", "--chunks", "8,32")
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
    status, out, _ = study_main("mixers", *ALONE, "--lengths", "16")
    assert status == 1 and re.search(r"^SSD, chunks: failed: the y is off by .* against FP64", out, re.MULTILINE), out
    assert re.search(r"^SSD +a loop ", out, re.MULTILINE)


@integration
@pytest.mark.parametrize("wrong, what", [(lambda state, y: y, "state"), (lambda state, y: y + state.mean(), "y")])
def test_a_step_of_decoding_that_is_wrong_fails(wrong, what, study_main, monkeypatch):
    """Its state stays, or its y is another."""
    right = subjects.step_of

    def step_of(mixer):
        def step(state, following, *inputs):
            y = right(mixer)(state, following, *inputs)
            if what == "state":
                following.copy_(state)
            return wrong(state, y)
        return step
    monkeypatch.setattr(subjects, "step_of", step_of)
    status, out, _ = study_main("mixers", *SHORT, "--part", "decoding", "--lengths", "16")
    assert status == 1, out
    assert re.search(rf"^SSD, a step: failed: the {what} is off by .* against FP64", out, re.MULTILINE), out


@unit
@pytest.mark.parametrize("name, way, length, why", [
    ("SSD", "a loop", 2048, ""), ("SSD", "a loop", 2049, "a loop over 2,049 steps: it is timed up to 2,048"),
    ("SSD", "at once", 2**15, ""), ("SSD", "at once", 2**15 + 1, "all pairs of steps would take 8 GiB"),
    ("SSD", "chunks", 2**20, ""), ("SSD", "chunks, compiled", 2**20, ""), ("gated delta rule", "chunks", 2**20, ""),
    ("gated delta rule", "chunks, compiled", 4096, ""),
    ("gated delta rule", "chunks, compiled", 4097,
     "its graph holds a product for each chunk in a row: it is compiled up to 4,096 steps"),
    ("SSD", "chunks, Triton", 64, "its Triton kernels need a GPU")])
def test_what_would_take_too_long_or_can_not_run_is_a_line(name, way, length, why):
    assert Sizes(1, 2, length, 64).why_not(MIXERS[name], way, torch.device("cpu")) == why


@unit
def test_on_a_gpu_its_kernels_run():
    assert not Sizes(1, 2, 2**20, 64).why_not(MIXERS["SSD"], "chunks, Triton", torch.device("cuda"))


@unit
@pytest.mark.parametrize("device, dtype, lengths", [
    ("cuda", torch.bfloat16, (512, 2048, 8192, 16384)), ("cpu", None, (256, 1024))])
def test_on_a_gpu_it_computes_in_16_bits(device, dtype, lengths):
    options = SimpleNamespace(device=torch.device(device), config=BlockConfig(2, 512, 64, 4), lengths=None, quick=False,
                              mixer=None, part=None, way=None)
    mixers.refine(options)
    assert (options.config.amp_dtype, options.lengths) == (dtype, lengths)
    assert Sizes.of(options.config).dtype == (dtype or torch.float32)
    assert (options.mixer, options.part) == ([*MIXERS], [*subjects.PARTS])


@unit
@pytest.mark.parametrize("asked, expected", [(None, ["mixer", "decoding"]), (["block"], ["block"])])
def test_a_quick_run_leaves_out_the_block_unless_it_is_asked_for(asked, expected):
    options = SimpleNamespace(device=CPU, config=BlockConfig(2, 512, 64, 4), lengths=None, quick=True, mixer=None,
                              part=asked, way=None)
    mixers.refine(options)
    assert (options.part, options.mixer, options.lengths) == (expected, ["SSD", "gated delta rule"], (64, 256))


@unit
def test_a_quick_run_loops_at_the_shortest_length_and_compiles_ssd_at_the_longest():
    options = SimpleNamespace(device=CPU, config=BlockConfig(2, 512, 64, 4), lengths=None, quick=True, mixer=None,
                              part=None, way=None, chunks=())
    mixers.refine(options)
    ways = {}
    for group in mixers.groups(options):
        for case in group.cases:
            if case.name != ATTENTION:
                ways.setdefault((case.name, case.variant["size"][2]), set()).add(case.variant["way"])
    looped = {of for of, names in ways.items() if "a loop" in names}
    compiled = {of for of, names in ways.items() if {"chunks, compiled", subjects.STEP_COMPILED} & names}
    assert looped == {("SSD", 64), ("gated delta rule", 64)} and compiled == {("SSD", 256)}
    assert {"chunks, compiled", subjects.STEP_COMPILED} <= ways["SSD", 256]


@unit
def test_a_quick_run_takes_the_way_that_is_asked_for():
    options = SimpleNamespace(device=CPU, config=BlockConfig(2, 512, 64, 4), lengths=None, quick=True, mixer=None,
                              part=["mixer"], way=["a loop", "chunks, compiled"], chunks=())
    mixers.refine(options)
    for group in mixers.groups(options):
        assert [case.variant["way"] for case in group.cases] == ["SDPA", "a loop", "chunks, compiled"]


@unit
def test_a_block_by_a_library_is_reported(study_main):
    status, _, said = study_main("mixers", "--part", "block", "--way", "mamba-ssm")
    assert status == 2 and "--way: a block is built by a loop, at once," in said


@unit
@pytest.mark.parametrize("length, sequences", [(64, 16), (1000, 1), (4096, 1)])
def test_as_many_sequences_as_there_are_tokens_for(length, sequences):
    config = subjects.of_length(BlockConfig(2, 512, 64, 4), length)
    assert (config.batch_size, config.seq_len) == (sequences, length)


@integration
def test_a_block_is_timed_beside_one_with_attention_that_is_compiled_where_it_is(study_main, tmp_path):
    path = tmp_path / "records.jsonl"
    status, out, _ = study_main("mixers", *SHORT, "--part", "block", "--lengths", "16", "--json", str(path))
    assert status == 0, out
    assert re.findall(r"^(causal attention, beside SSD|SSD) +(.+?) +\d\.\de-0\d +\d", out, re.MULTILINE) == [
        ("causal attention, beside SSD", "SDPA"), ("causal attention, beside SSD", "SDPA, compiled"),
        ("SSD", "a loop"), ("SSD", "at once"), ("SSD", "chunks"), ("SSD", "chunks, compiled")]
    every = [run for run in runs(read(path)) if run.status == "ok"]
    loop, compiled = every[2], every[5]
    assert tables._beside_attention(every, loop, BOTH) == tables.paired(every[0], loop, BOTH)
    assert tables._beside_attention(every, compiled, BOTH) == tables.paired(every[1], compiled, BOTH)


@integration
def test_a_block_that_is_wrong_fails(study_main, monkeypatch):
    right = subjects.block.by_head
    monkeypatch.setattr(subjects.block, "by_head", lambda gates, heads: tuple(
        each.roll(1, 1) if gates.dtype == torch.float32 else each for each in right(gates, heads)))
    status, out, _ = study_main("mixers", *SHORT, "--part", "block", "--way", "chunks", "--lengths", "16")
    assert status == 1, out
    assert re.search(r"^SSD, chunks: failed: the (branch|.* gradient.*) is off by .* against FP64", out, re.MULTILINE)


def prepared_peer(monkeypatch, mix):
    """(the subject, its result) of a library that computes so."""
    monkeypatch.setattr(subjects, "peer", lambda name, mixer: mix)
    of = subjects.peer_case(MIXERS["SSD"], "flash-linear-attention", Sizes(1, 2, 20, 8), torch.device("cuda"))
    result = Result("SSD", None, "float32", {}, variant=dict(of.variant))
    return of.prepare(Setting(CPU, 0, lambda *said: None, False), result), result


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, reason):
        ctx.reason = reason
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        raise RuntimeError(ctx.reason)


def refusing(reason, times=1.0):
    right = MIXERS["SSD"].by(forms.chunked)
    return lambda *inputs: _Refuses.apply(times * right(*inputs), reason)


@unit
def test_a_library_whose_backward_refuses_is_timed_forward(monkeypatch):
    subject, result = prepared_peer(monkeypatch, refusing("this Triton has a bug"))
    assert subject.has(FORWARD) and not subject.has(BOTH)
    assert result.errors.keys() == {"y"} and result.variant[NO_BACKWARD] == "RuntimeError: this Triton has a bug"


@unit
@pytest.mark.parametrize("mix, error, said", [
    (refusing("this Triton has a bug", 1.1), Failed, "the y is off by"),
    (refusing("CUDA out of memory"), RuntimeError, "out of memory"),
    (lambda *inputs: 1.1 * MIXERS["SSD"].by(forms.chunked)(*inputs), Failed, "the y is off by")])
def test_a_library_that_is_wrong_or_out_of_memory_is_not_timed(monkeypatch, mix, error, said):
    with pytest.raises(error, match=said):
        prepared_peer(monkeypatch, mix)


@unit
def test_a_library_that_is_right_is_timed_with_its_backward(monkeypatch):
    subject, result = prepared_peer(monkeypatch, MIXERS["SSD"].by(forms.chunked))
    assert subject.has(BOTH) and {*result.errors} == {"y", "dq", "dk", "dv", "dg"} and NO_BACKWARD not in result.variant
    assert not subject.inputs[0].is_contiguous() and subject.cotangents[0].stride() == subject.inputs[0].stride()


@integration
def test_a_row_stands_beside_attention_of_its_own_run(study_main, tmp_path):
    """A file may hold several runs of one mixer and length."""
    path = tmp_path / "records.jsonl"
    for way in ("chunks", "at once"):
        study_main("mixers", *ALONE, "--way", way, "--lengths", "16", "--json", str(path))
    lines = read(path)
    every = [run for run in runs(lines) if run.status == "ok"]
    assert [run.variant["way"] for run in every] == ["SDPA", "chunks", "SDPA", "at once"]
    measured = [tables._peaks(lines, run).bandwidth for run in (every[1], every[3])]
    assert measured == [values(line)[0] for line in lines if metric(line) == "peak" and extra(line)["of"] == COPY
                        and extra(line)["yardstick"] == BURST]
    for control, run in (every[:2], every[2:]):
        assert tables._beside_attention(every, run, BOTH) == tables.paired(control, run, BOTH) is not None


@unit
def test_a_step_of_decoding_is_captured_too_and_nothing_else():
    """It is a few kernels, which a host launches more slowly than they run."""
    options = SimpleNamespace(mixer=["SSD"], part=list(subjects.PARTS), way=["chunks"], chunks=(), lengths=(64,),
                              quick=False, config=BlockConfig(2, 64, 64, 4), device=torch.device("cuda"))
    by_part = {group.cases[-1].variant["part"]: group for group in mixers.groups(options)}
    assert {part: group.launches for part, group in by_part.items()} == {
        subjects.MIXER: ("eager",), subjects.BLOCK: ("eager",), subjects.DECODING: None}
    assert by_part[subjects.MIXER].metered and by_part[subjects.BLOCK].metered, "joules of both"


def launched(by, bound):
    """A run whose faster way of launching is that one, with eager runs that are launch-bound or not."""
    return SimpleNamespace(best=lambda mode: by, launch_bound=lambda mode: bound)


@unit
@pytest.mark.parametrize("every, said", [
    ([launched("eager", True), launched("eager", True)], "2 of 2"),
    ([launched("eager", True), launched("eager", False)], "1 of 2"),
    ([launched("graph", True), launched("eager", None)], "0 of 2")])
def test_lengths_at_which_a_step_is_launch_bound_are_counted(every, said):
    assert tables._launch_bound(every) == said


SLOW, SAME, FAST = (0.9, 0.8, 0.95), (1.1, 0.9, 1.3), (2.0, 1.9, 2.1)


@unit
@pytest.mark.parametrize("times, said", [
    ({("SSD", "chunks"): {64: SLOW, 256: FAST}}, "SSD from S 256"),
    ({("SSD", "chunks"): {64: FAST, 256: FAST}}, "SSD from S 64"),
    ({("SSD", "chunks"): {64: SLOW, 256: FAST}, ("SSD", "at once"): {64: FAST, 256: FAST}}, "SSD from S 64"),
    ({("SSD", "chunks"): {64: FAST, 256: FAST}, ("SSD", "at once"): {64: SLOW, 256: FAST}}, "SSD from S 64"),
    ({("SSD", "chunks"): {64: FAST, 256: SAME}}, "SSD at none up to S 256"),
    ({("SSD", "chunks"): {64: SLOW, 256: SAME}, ("gated delta rule", "chunks"): {64: FAST, 256: FAST}},
     "gated delta rule from S 64; SSD at none up to S 256")])
def test_the_answer_is_from_where_on_each_mixer_pays(times, said, monkeypatch):
    run = SimpleNamespace(info={"device": "cuda"}, variant={"part": "mixer", "size": (1, 1, 256, 16)})
    monkeypatch.setattr(tables, "runs", lambda lines: [run])
    monkeypatch.setattr(tables, "_mixer_ways", lambda by_length: {key: key for key in times})
    monkeypatch.setattr(tables, "_all_times", lambda by_length, of, mode: times[of])
    assert tables.answer([]) == f"forward+backward: {said}"


@unit
@pytest.mark.parametrize("lengths, marks", [
    ({"SSD": 1000, "gated delta rule": 1099}, {"predicted": 1000}),
    ({"SSD": 1000, "gated delta rule": 1101}, {"predicted: SSD": 1000, "predicted: gated delta rule": 1101}),
    ({"SSD": 2000, "gated delta rule": 1000, "linear attention, decay": 2100},
     {"predicted: gated delta rule": 1000, "predicted: SSD, linear attention, decay": 2000}),
    ({"SSD": None}, {})])
def test_predictions_that_are_nearly_one_are_marked_once(lengths, marks, monkeypatch):
    monkeypatch.setattr(tables, "_ways", lambda by_length, wanted: {(name, "chunks"): {64: name} for name in lengths})
    monkeypatch.setattr(tables, "_peaks", lambda lines, run: None)
    monkeypatch.setattr(tables, "_predicted", lambda name, backward, peaks: lengths[name])
    assert tables._marks({}, []) == marks


@unit
def test_without_records_there_is_no_answer():
    assert STUDY.answer([]) == NO_ANSWER


@unit
@pytest.mark.parametrize("wrong", [["--mixer", "RWKV"], ["--way", "by magic"], ["--part", "model"],
                                   ["--lengths", "0"], ["--lengths", "long"], ["--lengths", "16777217"]])
def test_wrong_options_are_reported(wrong, study_main):
    status, _, said = study_main("mixers", *wrong)
    assert status == 2 and wrong[0] in said


@integration
def test_records_name_sizes_and_what_they_stand_beside(study_main, tmp_path):
    path = tmp_path / "records.jsonl"
    study_main("mixers", *ALONE, "--lengths", "16", "--json", str(path))
    variants = [json.loads(line)["benchmark"]["extra_info"]["case"]["variant"] for line in path.read_text().splitlines()
                if '"SSD"' in line]
    assert {tuple(each["size"]) for each in variants if each} == {(8, 4, 16, 16)}


@unit
def test_lengths_with_other_counts_of_tokens_are_drawn_per_token(monkeypatch):
    def timed(batch, length):
        return SimpleNamespace(variant={"size": [batch, 8, length, 64]}, best_ms=lambda mode: 2.0)
    every = {("SSD", "chunks"): {512: timed(4, 512), 1024: timed(1, 1024)}}
    monkeypatch.setattr(tables, "_ways", lambda by_length, kept: every)
    assert tables._fastest_by_length({}) == {"SSD": [(512.0, 2e6 / 2048), (1024.0, 2e6 / 1024)]}
