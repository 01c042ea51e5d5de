"""`python -m benchmarks kernels` runs every kernel by hand twice and tells whether the bits are the same."""
import pytest
import torch

from benchmarks.kernels import __main__ as same_bits
from benchmarks.kernels import operations

SIZE = (3, 8)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The inputs are drawn on the CPU."""
    def tensors(experiment, size, dtype, device, seed):
        return operations.tensors(experiment, size, dtype, torch.device("cpu"), seed)
    monkeypatch.setattr(same_bits, "tensors", tensors)


def bits(call, name, dtype=torch.float32):
    return same_bits.results(call, operations.EXPERIMENTS[name], SIZE, dtype)


@pytest.mark.unit
def test_outputs_and_gradients_are_compared(on_a_cpu):
    y, dx, dweight = bits(operations.rms_norm, "RMSNorm")
    assert len(y) == len(dx) == 4 * 24 and len(dweight) == 4 * 8
    assert bits(operations.rms_norm, "RMSNorm") == [y, dx, dweight]
    assert bits(lambda x, w: 1 * operations.rms_norm(x, 2 * w) / 2, "RMSNorm") == [y, dx, dweight]
    other = bits(lambda x, w: operations.rms_norm(x, w.detach()) + 0 * w, "RMSNorm")
    assert other[:2] == [y, dx] and other[2] != dweight


@pytest.mark.unit
def test_a_bit_is_a_bit(on_a_cpu):
    """A zero has a sign, and NaN is what it is."""
    zero = bits(lambda x: x.detach() * 0.0 + 0.0, "SiLU")
    minus_zero = bits(lambda x: x.detach().abs() * -0.0, "SiLU")
    assert zero != minus_zero
    nan = bits(lambda x: x.detach() * float("nan"), "SiLU")
    assert nan == bits(lambda x: x.detach() * float("nan"), "SiLU")


@pytest.mark.unit
def test_what_has_no_gradient_is_compared_by_its_output(on_a_cpu):
    assert len(bits(lambda a, b: operations.swiglu(a.detach(), b.detach()), "SwiGLU")) == 1


@pytest.mark.unit
def test_fp8_is_compared_too(on_a_cpu):
    y, amax, proxy, *gradients = bits(operations.layer_norm_fp8, "LayerNorm to FP8")
    assert len(y) == 24 and len(amax) == 4 and len(proxy) == 4 * 24 and len(gradients) == 3


@pytest.mark.unit
def test_each_size_and_dtype_is_told_and_what_differs_counted(monkeypatch, capsys):
    """Of two calls each, by number."""
    runs = iter([[b"a"], [b"a"], [b"a"], [b"b"], [b"a"], [b"a"], [b"a"], [b"a", b"b"]])
    monkeypatch.setattr(same_bits, "results", lambda *_: next(runs))
    monkeypatch.setitem(same_bits.SIZES, "hidden", [(3, 1), (5, 1000)])
    assert same_bits._compare("RMSNorm", "Triton", None, operations.EXPERIMENTS["RMSNorm"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "RMSNorm, Triton, 3 x 1, bfloat16: same bits",
        "RMSNorm, Triton, 3 x 1, float32: BITS DIFFER",
        "RMSNorm, Triton, 5 x 1000, bfloat16: same bits",
        "RMSNorm, Triton, 5 x 1000, float32: BITS DIFFER",
    ]


@pytest.mark.unit
def test_attention_is_in_16_bits_alone(monkeypatch, capsys):
    monkeypatch.setattr(same_bits, "results", lambda *_: [])
    assert same_bits._compare("attention", "Triton", None, operations.EXPERIMENTS["attention"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(same_bits.SIZES["heads"])
    assert all("bfloat16" in line for line in lines)


@pytest.fixture
def a_gpu(monkeypatch):
    """torch says that there is one before Hopper, and CUDA C++ can be built; nothing is run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(same_bits.extension, "missing", lambda: "")
    loads = {name: {"Triton": lambda: None, "CUDA C++": lambda: None, "Liger": None} for name in ("SiLU", "RMSNorm")}
    experiments = {}
    for name, by_hand in loads.items():
        experiments[name] = operations.Experiment(operations.silu, "x", "ffn", (2, 3), by_hand, "activations")
    monkeypatch.setattr(same_bits, "EXPERIMENTS", experiments)


@pytest.mark.unit
def test_kernels_by_hand_are_run_and_no_library_s(a_gpu, monkeypatch):
    compared = []
    monkeypatch.setattr(same_bits, "_compare", lambda name, level, *_: compared.append((name, level)) or 0)
    assert same_bits.main([]) == 0
    assert compared == [("SiLU", "Triton"), ("SiLU", "CUDA C++"), ("RMSNorm", "Triton"), ("RMSNorm", "CUDA C++")]
    monkeypatch.setattr(same_bits.extension, "missing", lambda: "there is no nvcc")
    compared.clear()
    assert same_bits.main([]) == 0
    assert compared == [("SiLU", "Triton"), ("RMSNorm", "Triton")]


@pytest.mark.unit
def test_the_series_is_run_on_hopper(a_gpu, monkeypatch):
    compared = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(same_bits, "EXPERIMENTS", {"attention": same_bits.EXPERIMENTS["SiLU"]})
    monkeypatch.setattr(same_bits, "_compare", lambda name, level, *_: compared.append((name, level)) or 0)
    assert same_bits.main([]) == 0
    rungs = [f"rung {rung.name}" for rung in same_bits.series.RUNGS]
    rungs += [f"backward {rung.name}" for rung in same_bits.series.BACKWARD_RUNGS]
    assert compared == [("attention", level) for level in ["Triton", "CUDA C++", *rungs]]


@pytest.mark.unit
@pytest.mark.parametrize("only, compared", [("SiLU", {"SiLU"}), ("series", {"attention"})])
def test_one_operation_runs_alone(only, compared, a_gpu, monkeypatch):
    seen = set()
    monkeypatch.setitem(same_bits.EXPERIMENTS, "attention", same_bits.EXPERIMENTS["SiLU"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(same_bits, "_compare", lambda name, *_: seen.add(name) or 0)
    assert same_bits.main(["--only", only]) == 0
    assert seen == compared


@pytest.mark.unit
def test_bits_that_differ_fail(a_gpu, monkeypatch):
    monkeypatch.setattr(same_bits, "_compare", lambda name, *_: 2 if name == "SiLU" else 0)
    assert same_bits.main([]) == 1


@pytest.mark.unit
def test_without_a_gpu_it_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert same_bits.main([]) == 4
    assert capsys.readouterr() == ("", "kernels: skipped: there is no GPU\n")


@pytest.mark.unit
def test_a_mistake_ends_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        same_bits.main(["--preset", "tiny"])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kernels: error: ") and err.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.stress
def test_every_kernel_gives_the_same_bits(capsys):
    assert same_bits.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.endswith(": same bits") for line in lines)
    for name in operations.EXPERIMENTS:
        assert any(line.startswith(f"{name}, Triton, ") for line in lines)
