"""How the kernels in Triton are launched, and where they can run."""
import pytest
import torch

pytest.importorskip("triton")
import triton

from benchmarks.kernels.triton import launch

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("step, most, room, stages", [
    (1024, 4, 102_400, 4),
    (25_600, 4, 102_400, 4),
    (25_601, 4, 102_400, 3),
    (60_000, 4, 102_400, 1),
    (200_000, 4, 102_400, 1),              # a loop without a pipeline has one stage
], ids=str)
def test_as_many_stages_as_fit(step, most, room, stages):
    assert launch.stages(step, most, room) == stages


@triton.jit
def nothing():
    pass


def test_the_interpreter_takes_a_kernel_as_it_is(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert launch.launchable(nothing) is nothing


def test_the_compiler_sees_a_kernel_that_is_wrapped(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(launch, "wrap_triton", lambda kernel: ("wrapped", kernel))
    assert launch.launchable(nothing) == ("wrapped", nothing)


def test_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    launch.require_float("x", torch.ones(2))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError) as error:
        launch.require_float("x", torch.ones(2))
    assert str(error.value) == "x is on cpu: a Triton kernel needs a GPU (with TRITON_INTERPRET=1 it runs on a CPU)"


def test_another_dtype_is_named_first(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"x is torch\.float64: give float16 or bfloat16"):
        launch.require_float("x", torch.ones(2).double(), (torch.float16, torch.bfloat16))


@pytest.mark.gpu
def test_a_gpu_runs_all_of_them():
    for dtype in launch.FLOATS:
        launch.require_float("x", torch.ones(2, dtype=dtype, device="cuda"))
