"""The study of fused operations: every level is the operation, in both passes; tables, chart and command line."""
import functools

import pytest
import torch

from benchmarks import fusion_tables, fusions, operations, readme, records
from common import PRESETS, harness

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:.*torch.jit.script")]
CPU = torch.device("cpu")


@pytest.fixture
def no_inductor(monkeypatch, fresh_dynamo):
    """Compiled by Dynamo and AOTAutograd, to no C++: seconds instead of minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


SIZES = {"hidden": (3, 40), "ffn": (3, 40), "scores": (2, 30, 30), "heads": (2, 3, 20, 16)}


def made(name, seed=0):
    experiment = operations.EXPERIMENTS[name]
    return experiment, operations.tensors(experiment, SIZES[experiment.shape], torch.float32, CPU, seed)


@pytest.mark.parametrize("name", operations.EXPERIMENTS)
@pytest.mark.parametrize("level", ["eager", "TorchScript (deprecated)"])
def test_every_level_is_the_operation(name, level):
    experiment, given = made(name)
    errors = operations.check(operations.levels(experiment, CPU)[level], experiment, given, 1)
    gradients = [error for what, error in errors.items() if what.startswith("gradient")]
    assert len(gradients) == len(experiment.inputs.rstrip("1")) and max(gradients) < 1e-6
    assert len(errors) == len(gradients) + 1 + (name in ("residual+LayerNorm", "LayerNorm to FP8"))
    assert max(errors.values()) < (operations.FP8_GATE if experiment.fp8 else 1e-6)


@pytest.mark.parametrize("name", operations.EXPERIMENTS)
def test_every_operation_has_five_levels_or_says_why_not(name):
    found = operations.levels(operations.EXPERIMENTS[name], CPU)
    assert found.keys() >= {"eager", operations.TORCHSCRIPT, "torch.compile", "Triton", "CUDA C++"}
    by_hand = "CUDA C++" in operations.EXPERIMENTS[name].by_hand
    assert found["CUDA C++"] == ("timed on a GPU alone" if by_hand else "no kernel of it is written")


@pytest.mark.skipif(torch.cuda.is_available(), reason="each is checked and timed where there is a GPU")
def test_the_kernels_by_hand_are_the_operations():
    """Through Triton's interpreter, as levels() would give them on a GPU."""
    pytest.importorskip("triton")
    for name, experiment in operations.EXPERIMENTS.items():
        if name != "attention":                                          # in 16 bits alone
            call, given = experiment.by_hand["Triton"](), made(name)[1]
            found = operations.check(call, experiment, given, 1)
            assert sum(what.startswith("gradient") for what in found) == len(experiment.inputs.rstrip("1"))
            with torch.no_grad():                                        # all that a replay is compared by
                assert all(y.float().isfinite().all() for y in operations.outputs(call, given))


@pytest.mark.parametrize("wrong, said", [
    (lambda s: operations.F.dropout(s.softmax(-1), 0.1), "a query sees keys behind it"),
    (lambda s: s.masked_fill(torch.ones_like(s).triu(1) > 0, -torch.inf).softmax(-1), "dropout keeps 1.0000 of"),
    (lambda s: operations.softmax_dropout(s) * 0.9, "output 0 is off by 1.0e-01"),
    (lambda s: operations.softmax_dropout(s.detach()) + 0 * s, "gradient 0 is off by 1.0e"),
])
def test_wrong_dropout_is_refused(wrong, said):
    with pytest.raises(harness.Failed, match=said):
        operations.check(wrong, *made("softmax+dropout"), 1)


def test_sizes_follow_the_tokens():
    config = PRESETS["te-tutorial"]
    assert [operations.shape(config, name, 16384) for name in SIZES] == [
        (16384, 4096), (16384, 16384), (256, 2048, 2048), (8, 32, 2048, 128)]
    assert [operations.shape(config, name, 64)[0] for name in SIZES] == [64, 64, 1, 1]


@pytest.mark.parametrize("wrong, said", [
    (lambda x, w: operations.rms_norm(x, w) * 1.01, "output 0 is off by 1.0e-02"),
    (lambda x, w: operations.rms_norm(x, w.detach()) + 0 * w, "gradient 1 is off by 1.0e"),
    (lambda x, w: operations.rms_norm(x, w) + float("nan"), "output 0 is off by inf"),
    (lambda x, w: (operations.rms_norm(x, w), x), "it gives 2 tensors, not 1"),
])
def test_what_is_not_the_operation_is_refused(wrong, said):
    with pytest.raises(harness.Failed, match=said):
        operations.check(wrong, *made("RMSNorm"), 1)


@pytest.mark.parametrize("wrong, said", [
    (lambda y, amax, proxy: ((y.float() * 1.1).to(y.dtype), amax, proxy), "output 0 is off by"),
    (lambda y, amax, proxy: (y, amax * 1.001, proxy), "output 1 is off by 1.0e-03"),
    (lambda y, amax, proxy: (y, amax, proxy * 1.001 if torch.is_grad_enabled() else y), "gradient 0 is off by 1.0e-03"),
    (lambda y, amax, proxy: (y, amax), "it gives 2 tensors, not 3"),
])
def test_what_is_not_layer_norm_to_fp8_is_refused(wrong, said):
    with pytest.raises(harness.Failed, match=said):
        operations.check(lambda *given: wrong(*operations.layer_norm_fp8(*given)), *made("LayerNorm to FP8"), 1)


@pytest.mark.parametrize("mode", fusions.MODES)
def test_an_iteration_runs_once_on_each_copy_and_can_be_repeated(mode):
    iteration, found = fusions.Iteration(operations.swiglu, mode, [made("SwiGLU", seed)[1] for seed in range(3)], 0), []
    for _ in range(2):
        iteration()
        found.append(iteration.found)
    assert len(found[0]) == 3
    for n, (a, b) in enumerate(iteration.sets):
        expected = (operations.swiglu(a, b),) if mode == "forward" else torch.autograd.grad(
            operations.swiglu(a, b), (a, b), iteration.dys[n])
        for value, repeated, right in zip(found[0][n], found[1][n], expected, strict=True):
            assert torch.equal(value, right) and torch.equal(value, repeated)
    before = found[0][0][0].clone()
    iteration.change()
    iteration()
    assert not torch.equal(iteration.found[0][0], before) and torch.equal(iteration.found[1][0], found[0][1][0])
    assert all(t.grad is None for given in iteration.sets for t in given)


def test_a_copy_is_written_where_the_last_one_was_and_not_before_it_is_asked_for():
    """Memory of its own for each source. What is not copied is told by it: the check of a replay relies on that."""
    copying, sources = fusions.copying(), [torch.randn(40) for _ in range(3)]
    first = [copying(source) for source in sources]
    assert all(torch.equal(copy, source) for copy, source in zip(first, sources, strict=True))
    assert len({t.data_ptr() for t in (*first, *sources)}) == 6
    for source in sources:
        source.mul_(-0.5)
    assert not any(torch.equal(copy, source) for copy, source in zip(first, sources, strict=True))
    again = [copying(source) for source in sources]
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in first]
    assert all(torch.equal(copy, source) for copy, source in zip(again, sources, strict=True))


def test_the_study_on_a_cpu(study_main, no_inductor, tmp_path):
    path = tmp_path / "fusions.jsonl"
    status, out, err = study_main(fusions, "--experiment", "RMSNorm", "--experiment", "SwiGLU", "--rows", "4,16",
                                  "--rounds", 6, "--json", path, "--chart", tmp_path / "f")
    assert status == 0 and "Traceback" not in err, out
    lines = records.read(path)
    assert fusion_tables.text(lines) in out and (tmp_path / "f-bandwidth.png").exists()
    assert "us, eager" in out and "us, graph" not in out and "% of copy" not in out      # columns without numbers
    runs = {run.info["step"]: run for run in records.runs(lines)}
    for level in ("eager", "TorchScript (deprecated)", "torch.compile", "copy"):
        run = runs[f"RMSNorm, 16 x 64, {level}"]
        for mode in fusions.MODES:
            assert len(run.samples(mode, "eager")) == 6 and run.value(mode, "work rate", "eager") > 0
            assert run.value(mode, "percent of limit", "eager") is None          # no word on a CPU's caches
        assert run.value("forward", "throughput", "eager") is None
    assert runs["SwiGLU, all sizes, Triton"].status == "skipped" and "timed on a GPU alone" in out


def test_a_level_that_is_wrong_is_a_row_and_the_others_are_timed(study_main, no_inductor, monkeypatch):
    levels = fusions.levels
    def broken(x):
        raise KeyError("a library's own")
    monkeypatch.setattr(fusions, "levels", lambda *given: levels(*given) | {"Triton": lambda x: x * 2, "mine": broken})
    status, out, _ = study_main(fusions, "--experiment", "SiLU", "--rows", "4", "--rounds", 6)
    assert status == 1 and "SiLU, 4 x 256, Triton, no autocast: failed: output 0 is off by" in out
    assert "SiLU, 4 x 256, mine, no autocast: failed: KeyError: " in out
    assert any(line.split()[:5] == ["4", "x", "256", "eager", "ok"] for line in out.splitlines())


def test_the_summary_is_of_the_largest_size_and_empty_without_percents():
    lines = [records.read(path) for path in readme.recorded("fusions")]
    on_gpu, on_cpu = (next(some for some in lines if some[0]["runners"][0]["type"] == kind) for kind in ("cuda", "cpu"))
    assert fusion_tables.summary(on_cpu) == ""
    rows = {row.split("  ")[0]: row for row in fusion_tables.summary(on_gpu).splitlines()}
    assert rows.keys() > operations.EXPERIMENTS.keys()
    largest = next(run for run in records.runs(on_gpu) if run.info["step"] == "SiLU, 16384 x 16384, torch.compile")
    assert fusion_tables._percents(largest) in rows["SiLU"] and fusion_tables._percents(largest).count(" / ") == 1


def test_records_of_several_runs_say_which_commit_each_table_is_of():
    merged = next(lines for lines in map(records.read, readme.recorded("fusions"))
                  if len({line["benchmark"]["extra_info"]["run"] for line in lines}) > 1)
    first = merged[0]["benchmark"]["extra_info"]
    alone = [line for line in merged if line["benchmark"]["extra_info"]["run"] == first["run"]]
    name = first["step"].split(", ")[0]
    assert f"{name}, forward (commit {records.commits(alone)})\n" in fusion_tables.text(merged)
    assert f"{name}, forward\n" in fusion_tables.text(alone)


def test_what_memory_limits_is_timed_in_shorter_stretches():
    long, short = (fusions.clock_for(torch.device("cuda"), fusions.Work(1e9, flops)) for flops in (1e12, 0.0))
    assert 0 < short.settle_ms < long.settle_ms and 0 < short.burst_ms < long.burst_ms
    assert f"{short.burst_ms:g} ms behind {short.settle_ms:g} ms" in short.in_rounds


def test_the_kernels_alone_need_a_gpu(monkeypatch, capsys):
    pytest.importorskip("triton")
    from benchmarks.kernels import __main__ as kernels
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main([]) == 4 and capsys.readouterr() == ("", "kernels: skipped: there is no GPU\n")


@pytest.mark.gpu
def test_every_kernel_gives_the_same_bits(capsys):
    from benchmarks.kernels import __main__ as kernels
    assert kernels.main([]) == 0
    said = capsys.readouterr().out
    assert "DIFFER" not in said and all(f"{name}, Triton, " in said for name in operations.EXPERIMENTS)


def test_rows_that_no_memory_holds_are_one_line(study_main):
    status, _, err = study_main(fusions, "--experiment", "SwiGLU", "--rows", 10**12)
    assert status == 3 and err.count("\n") == 1
    assert "fusions: out of memory: SwiGLU of 1000000000000 x 256: about " in err and "give a smaller shape" in err


@pytest.mark.parametrize("flags, said", [
    (("--rows", "4,x"), "argument --rows: '4,x': give whole numbers such as 1,2,4"),
    (("--rows", "0"), "argument --rows"),
    (("--experiment", "dropout"), "argument --experiment: invalid choice"),
])
def test_wrong_flags_are_one_line(study_main, flags, said):
    status, _, err = study_main(fusions, *flags)
    assert status == 2 and said in err and err.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", operations.EXPERIMENTS)
def test_kernels_and_graphs_on_a_gpu(study_main, name, studies_in_seconds, tmp_path):
    status, out, _ = study_main(fusions, "--device", "cuda", "--num-heads", 1, "--experiment", name, "--rows", "64",
                                "--rounds", 6, "--json", tmp_path / "f.jsonl")        # heads that are 64 wide
    assert status == 0, out
    for run in records.runs(records.read(tmp_path / "f.jsonl")):
        if run.info["step"].endswith(("eager", "torch.compile", "Triton")):
            for mode in fusions.MODES:
                assert run.samples(mode, "graph") and run.samples(mode, "eager"), (run.info["step"], mode)
