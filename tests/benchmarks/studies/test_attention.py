"""The study of attention by hand, rung by rung: what it runs, checks, shows and refuses."""
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import studies
from benchmarks.kernels.cuda import series
from benchmarks.kernels.cuda.series import BACKWARD_RUNGS, RUNGS
from benchmarks.records.read import read, runs
from benchmarks.show.tables import NO_ANSWER
from benchmarks.studies.attention import stalls, subjects, tables
from common.block import oracle

unit, integration = pytest.mark.unit, pytest.mark.integration
STUDY = studies.load("attention")
SMALL = ["--device", "cpu", "--preset", "tiny", "--rounds", "6", "--width", "64", "--hidden-size", "64", "--num-heads",
         "1"]
STAND_IN = {"registers": 128, "shared_bytes": 65536, "blocks": 2}


def by_library(rung, q, k, v, causal):
    """What a rung returns, here without a GPU."""
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    heads = [[subjects.exact([each[b, h] for each in (q, k, v)], causal)[1] for h in range(q.size(1))]
             for b in range(q.size(0))]
    return y, torch.stack([torch.stack(of) for of in heads]).float()


def gradients_by_library(rung, q, k, v, y, log_sum, dy, causal):
    given = [each.detach().requires_grad_() for each in (q, k, v)]
    with torch.enable_grad():
        y = F.scaled_dot_product_attention(*given, is_causal=causal)
    return torch.autograd.grad(y, given, dy)


@pytest.fixture
def rungs(monkeypatch):
    """Rungs that run on a CPU."""
    monkeypatch.setattr(series, "missing", lambda: "")
    monkeypatch.setattr(series, "facts", lambda rung, width, dtype: SimpleNamespace(**STAND_IN))
    monkeypatch.setattr(series, "attention", by_library)
    monkeypatch.setattr(series, "gradients", gradients_by_library)


@integration
def test_without_a_gpu_libraries_are_timed_and_rungs_say_why_not(study_main):
    status, out, _ = study_main("attention", *SMALL, "--lengths", "16", "--mask", "causal")
    assert status == 0, out
    assert re.search(r"^FlashAttention +\d\.\de-\d\d +\S+$", out, re.MULTILINE), out
    rungs = ", ".join(dict.fromkeys(rung.name for rung in (*RUNGS, *BACKWARD_RUNGS)))
    assert f"\n{rungs}: skipped: {series.missing()}\n" in out
    assert "\ncuDNN, Triton, FlexAttention: skipped: its kernels need a GPU\n" in out


@integration
def test_each_rung_stands_beside_the_one_before(study_main, rungs, tmp_path):
    path = tmp_path / "records.jsonl"
    status, out, _ = study_main("attention", *SMALL, "--lengths", "16,32", "--way", "1 tiles", "--way",
                                "2 online softmax", "--way", "4 copies ahead", "--json", str(path), "--chart",
                                str(tmp_path / "chart"))
    assert status == 0, out
    lines = read(path)
    assert STUDY.report(lines) in out and (tmp_path / "chart-rungs.png").exists()
    for mask in subjects.MASKS:
        backward = out.partition(f"backward, {mask}, D 64, S 32")[2].partition("\n\n")[0]
        (only,) = re.findall(r"^\d [a-z ]+  .*$", backward, re.MULTILINE)
        assert only.startswith("1 tiles ") and not re.search(r"\[", only)
        rows = out.partition(f"{mask}, D 64, S 32")[2].partition("\n\n")[0]
        first, second, fourth = re.findall(r"^\d [a-z ]+  .*$", rows, re.MULTILINE)
        assert not re.search(r"\[", first) and re.search(r"[\d.]+ \[[\d.,]+, [\d.,]+\]", second), rows
        assert not re.search(r"\[", fourth), "the rung before it was not timed"
        assert re.search(r"128 +64 +2$", second)
    timed = [(tables.pass_of(run.variant), run.variant["way"], run.variant["mask"], run.variant["size"][2])
             for run in runs(lines)]
    ways = [("forward", way) for way in ("1 tiles", "2 online softmax", "4 copies ahead")] + [("backward", "1 tiles")]
    assert len(timed) == len(set(timed)) and set(timed) == {
        (mode, way, mask, length) for mode, way in ways for mask in subjects.MASKS for length in (16, 32)}


@integration
@pytest.mark.parametrize("what", ["y", "log sum"])
def test_a_rung_that_is_wrong_fails(what, study_main, rungs, monkeypatch):
    def wrong(*given):
        y, log_sum = by_library(*given)
        return (y * 1.05, log_sum) if what == "y" else (y, log_sum * 1.05)
    monkeypatch.setattr(series, "attention", wrong)
    status, out, _ = study_main("attention", *SMALL, "--lengths", "16", "--way", "1 tiles", "--mask", "full")
    assert status == 1 and f"1 tiles: failed: the {what} is off by" in out, out


@integration
@pytest.mark.parametrize("place", range(3))
def test_a_rung_of_the_backward_that_is_wrong_fails(place, study_main, rungs, monkeypatch):
    def wrong(*given):
        gradients = list(gradients_by_library(*given))
        gradients[place] = gradients[place] * 1.05
        return gradients
    monkeypatch.setattr(series, "gradients", wrong)
    status, out, _ = study_main("attention", *SMALL, "--lengths", "16", "--way", "4 producer", "--mask", "full")
    assert status == 1 and f"4 producer: failed: the {('dq', 'dk', 'dv')[place]} is off by" in out, out


@integration
def test_a_backward_is_timed_alone(study_main, rungs, tmp_path):
    """The forward ran once, before it."""
    path = tmp_path / "records.jsonl"
    ways = "--way", "4 producer", "--way", "9 ping pong", "--way", "FlashAttention"
    status, out, _ = study_main("attention", *SMALL, "--lengths", "16", "--mask", "causal", "--pass", "backward", *ways,
                                "--json", str(path))
    assert status == 0 and "backward, causal, D 64 " in out and "9 ping pong" not in out, out
    found = {run.variant["way"]: run for run in runs(read(path))}
    assert found.keys() == {"4 producer", "FlashAttention"}
    assert all(run.best_ms("backward") and not run.best_ms("forward") for run in found.values())
    assert found["FlashAttention"].errors().keys() == {"dq", "dk", "dv"}


@unit
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_truth_of_a_backward_is_autograds(is_causal, monkeypatch):
    monkeypatch.setattr(subjects, "ROWS", 8)
    *given, dy = torch.randn(4, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [each.requires_grad_() for each in given]
    right = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=is_causal), leaves, dy)
    found = subjects.exact_gradients([*(each.detach() for each in given), dy], is_causal)
    assert all(oracle.relative_error(one, other) < 1e-13 for one, other in zip(found, right, strict=True))


@unit
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_truth_is_attention(is_causal, monkeypatch):
    monkeypatch.setattr(subjects, "ROWS", 8)
    q, k, v = torch.randn(3, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, log_sum = subjects.exact([q, k, v], is_causal)
    assert oracle.relative_error(y, F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)) < 1e-14
    scores = q @ k.mT / 4
    seen = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf) if is_causal else scores
    assert torch.allclose(log_sum, seen.exp().sum(-1).log())


@unit
def test_half_of_all_pairs_are_under_a_causal_mask():
    size = 2, 3, 100, 64
    assert subjects.flops(size, "full", "backward") == 2.5 * subjects.flops(size, "full")
    assert subjects.flops(size, "full") == 2 * subjects.flops(size, "causal") == 4 * 2 * 3 * 100 * 100 * 64


@unit
@pytest.mark.parametrize("ms, launch_bound, said", [(1.0, False, "1.07"), (1.0, True, "1.07*"), (1.0, None, "1.07"),
                                                    (None, None, "")])
def test_a_time_that_is_the_hosts_is_marked(ms, launch_bound, said):
    run = SimpleNamespace(best_ms=lambda mode: ms, launch_bound=lambda mode: launch_bound,
                          variant={"size": [1, 1, 2048, 128], "mask": "causal"})
    assert tables._rate(run) == said


@unit
def test_the_longest_length_that_most_rungs_have_is_shown():
    timed = {512: ["1 tiles", "2 online softmax"], 2048: ["1 tiles", "2 online softmax"], 8192: ["2 online softmax"]}
    assert tables._longest_of_most("forward", {length: dict.fromkeys(ways) for length, ways in timed.items()}) == 2048
    assert tables._longest_of_most("backward", {length: dict.fromkeys(ways) for length, ways in timed.items()}) == 2048


@unit
def test_the_answer_is_where_the_last_rung_is_farthest_from_cudnn_and_nearest(monkeypatch):
    last, last_of_backward = RUNGS[-1].name, BACKWARD_RUNGS[-1].name
    kinds = {("forward", "full", 128): {512: {"cuDNN": 0.94, last: 1}},
             ("forward", "causal", 64): {512: {"cuDNN": 1.1}},
             ("forward", "causal", 128): {256: {"cuDNN": 0.5, last: 1}, 512: {"cuDNN": 1.05, last: 1}}}
    monkeypatch.setattr(tables, "_timed", lambda lines: [])
    monkeypatch.setattr(tables, "paired", lambda a, b, mode: (a, a, a) if a and b else None)
    backward = {("backward", "full", 64): {256: {"cuDNN": 0.7, last_of_backward: 1}}}
    monkeypatch.setattr(tables, "_kinds", lambda every: kinds | backward)
    forward = f"of cuDNN's speed the last rung reaches 0.94 to 1.05 (forward, {len(RUNGS)} rungs)"
    assert STUDY.answer([]) == (
        f"{forward}, 0.70 to 0.70 (backward, {len(BACKWARD_RUNGS)} rungs), at the longest lengths")
    monkeypatch.setattr(tables, "_kinds", lambda every: kinds)
    assert STUDY.answer([]) == f"{forward}, at the longest lengths"


@unit
def test_of_an_ncu_run_each_rung_says_what_its_warps_wait_for(tmp_path):
    path = tmp_path / "ncu.csv"
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    metrics = {stalls.MILLISECONDS: "2,500,000", stalls.CONFLICTS: "3,000,000", stalls.TENSOR: "60.4",
               **{f"{stalls.STALL}{reason}_per_issue_active.ratio": value for reason, value in
                  {"selected": "1", "not_selected": "2", "barrier": "4", "wait": "2", "sleeping": "1"}.items()}}
    kernels = range(len(RUNGS) + len(BACKWARD_RUNGS))
    rows = [f'"{kernel}","attention","{name}","","{value}"' for kernel in kernels for name, value in metrics.items()]
    path.write_text("\n".join(["==PROF== Connected", head, *rows]))
    row = stalls.text(path).splitlines()[2]
    assert re.fullmatch(
        r"1 tiles +2\.50 +60 +3\.0 +30% +other warps 40%, its own last instruction 20%", row.strip()), row
    assert stalls.text(path).splitlines()[-1].strip().startswith(f"backward {BACKWARD_RUNGS[-1].name} ")
    path.write_text("\n".join([head, *rows[:len(metrics)]]))
    with pytest.raises(ValueError, match="zip"):
        stalls.text(path)


@unit
def test_without_records_there_is_no_answer():
    assert STUDY.answer([]) == NO_ANSWER and STUDY.charts([]) == {}


@unit
@pytest.mark.parametrize("wrong, said", [
    (["--way", "11 magic"], "--way"), (["--mask", "window"], "--mask"), (["--width", "32"], "--width"),
    (["--lengths", "0"], "--lengths"), (["--pass", "sideways"], "--pass"),
    (["--pass", "backward", "--way", "10 causal"], "--pass backward: no --way has it; give 1 tiles, 2 tensor cores"),
    (["--width", "128", "--hidden-size", "192", "--num-heads", "1"], "the hidden size 192 is no multiple of it"),
    (["--hidden-size", "96", "--num-heads", "1"], "--width 64: the hidden size 96 is no multiple of it")])
def test_wrong_options_are_reported(wrong, said, study_main):
    status, _, out = study_main("attention", *wrong)
    assert status == 2 and said in out
