"""The study of fused operations: every level is the operation, in both passes; tables, chart and command line."""
import pytest
import torch

from benchmarks import fusions, records
from common import harness

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:.*torch.jit.script")]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", fusions.EXPERIMENTS)
@pytest.mark.parametrize("level", ["eager", "TorchScript"])
def test_every_level_is_the_operation(name, level):
    experiment = fusions.EXPERIMENTS[name]
    call = fusions.levels(experiment, CPU)[level]
    errors = fusions.check(call, experiment, fusions.tensors(experiment, 3, 40, torch.float32, CPU, 0), 1)
    assert {what.split()[0] for what in errors} == {"output", "gradient"}
    assert len(errors) == len(experiment.inputs) + 1 + (name == "residual+LayerNorm") and max(errors.values()) < 1e-6


@pytest.mark.parametrize("wrong, said", [
    (lambda x, w: fusions.rms_norm(x, w) * 1.01, "output 0 is off by 1.0e-02"),
    (lambda x, w: fusions.rms_norm(x, w.detach()) + 0 * w, "gradient 1 is off by 1.0e"),
    (lambda x, w: fusions.rms_norm(x, w) + float("nan"), "output 0 is off by inf"),
])
def test_what_is_not_the_operation_is_refused(wrong, said):
    experiment = fusions.EXPERIMENTS["RMSNorm"]
    with pytest.raises(harness.Failed, match=said):
        fusions.check(wrong, experiment, fusions.tensors(experiment, 3, 40, torch.float32, CPU, 0), 1)


@pytest.mark.parametrize("mode", fusions.MODES)
def test_an_iteration_runs_once_on_each_copy_and_can_be_repeated(mode):
    experiment = fusions.EXPERIMENTS["SwiGLU"]
    sets = [fusions.tensors(experiment, 2, 8, torch.float32, CPU, seed) for seed in range(3)]
    iteration = fusions.iteration(fusions.swiglu, mode, sets, [torch.ones(2, 8)])
    first, second = iteration(), iteration()
    assert len(first) == 3
    for (a, b), one, again in zip(sets, first, second, strict=True):
        expected = (fusions.swiglu(a, b),) if mode == "forward" else torch.autograd.grad(
            fusions.swiglu(a, b), (a, b), torch.ones(2, 8))
        for value, repeated, right in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (one, again)),
                                          expected, strict=True):
            assert torch.equal(value, right) and torch.equal(value, repeated)
    assert all(t.grad is None for given in sets for t in given)


def test_the_study_on_a_cpu(study_main, uncompiled, tmp_path):
    path = tmp_path / "fusions.jsonl"
    status, out, err = study_main(fusions, "--experiment", "RMSNorm", "--experiment", "SwiGLU", "--rows", "4,16",
                                  "--rounds", 6, "--json", path, "--chart", tmp_path / "f")
    assert status == 0 and "Traceback" not in err, out
    lines = records.read(path)
    assert fusions.text(lines) in out and (tmp_path / "f-bandwidth.png").exists()
    runs = {run.info["step"]: run for run in records.runs(lines)}
    for level in ("eager", "TorchScript", "torch.compile"):
        run = runs[f"RMSNorm, 16 x 64, {level}"]
        for mode in fusions.MODES:
            assert len(run.samples(mode, "eager")) == 6 and run.value(mode, "bandwidth", "eager") > 0
            assert run.value(mode, "percent of limit", "eager") is None          # no word on a CPU's caches
    assert runs["SwiGLU, all sizes, Triton"].status == "skipped" and "interpreter" in out


def test_a_level_that_is_wrong_is_a_row_and_the_others_are_timed(study_main, uncompiled, monkeypatch):
    levels = fusions.levels
    monkeypatch.setattr(fusions, "levels", lambda *given: levels(*given) | {"Triton": lambda x: x * 2})
    status, out, _ = study_main(fusions, "--experiment", "SiLU", "--rows", "4", "--rounds", 6)
    assert status == 1 and "SiLU, 4 x 256, Triton, no autocast: failed: output 0 is off by" in out
    assert any(line.split()[:5] == ["4", "x", "256", "eager", "ok"] for line in out.splitlines())


@pytest.mark.parametrize("flags, said", [
    (("--rows", "4,x"), "argument --rows: '4,x' is no list of positive numbers"),
    (("--rows", "0"), "argument --rows"),
    (("--experiment", "dropout"), "argument --experiment: invalid choice"),
])
def test_wrong_flags_are_one_line(study_main, flags, said):
    status, _, err = study_main(fusions, *flags)
    assert status == 2 and said in err and err.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", fusions.EXPERIMENTS)
def test_kernels_and_graphs_on_a_gpu(study_main, name, studies_in_seconds, tmp_path):
    status, out, _ = study_main(fusions, "--device", "cuda", "--experiment", name, "--rows", "64", "--rounds", 6,
                                "--json", tmp_path / "f.jsonl")
    assert status == 0, out
    for run in records.runs(records.read(tmp_path / "f.jsonl")):
        if run.info["step"].endswith(("eager", "torch.compile", "Triton")):
            for mode in fusions.MODES:
                assert run.samples(mode, "graph") and run.samples(mode, "eager"), (run.info["step"], mode)
