"""Sizes that tensor cores do not like: which layers, and when there is something to gain."""
import pytest
import torch
from torch import nn

from benchmarks.assistant import optimize
from benchmarks.assistant.program import read
from benchmarks.assistant.techniques import alignment
from benchmarks.measure.calls import Inputs

unit, integration = pytest.mark.unit, pytest.mark.integration
X = torch.randn(4, 32)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if this were one."""
    measured, asked = {torch.float32: (1.3, 1.2, 1.4), torch.bfloat16: (1.5, 1.4, 1.6)}, []

    def gain(size, padded, dtype, *others):
        asked.append((size, padded, dtype, *others))
        return measured[dtype]
    monkeypatch.setattr(alignment, "missing", lambda device: "")
    monkeypatch.setattr(alignment, "_gain", gain)
    return measured, asked


def found_in(model, x=X):
    return alignment.find(read(model, Inputs.of(x)))


@unit
def test_a_vocabulary_that_8_does_not_divide_is_told_with_its_time(on_a_gpu):
    _, asked = on_a_gpu
    [found] = found_in(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 257)))
    assert found.reason == ("257 outputs, which 8 does not divide: 89 % of all FLOPs; padded to 64 x 320 it is 1.30 "
                            "[1.20, 1.40] (float32) and 1.50 [1.40, 1.60] (bfloat16) times as fast here")
    assert found.module == "1" and not found.why_not
    assert asked == [((4, 64, 257), (4, 64, 320), dtype, "forward+backward", torch.device("cpu"))
                     for dtype in (torch.float32, torch.bfloat16)]


@unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain, why_not", [((1.1, 1.02, 1.2), ""), ((1.1, 1.019, 1.2), "it is not worth it")])
def test_it_must_be_faster_in_the_own_dtype_or_under_autocast(gain, why_not, dtype, on_a_gpu):
    measured, _ = on_a_gpu
    measured |= {torch.float32: (1.0, 1.0, 1.0), torch.bfloat16: (1.0, 1.0, 1.0)} | {dtype: gain}
    assert found_in(nn.Linear(32, 33))[0].why_not == why_not


@unit
def test_a_model_in_16_bits_is_asked_in_these_alone(on_a_gpu):
    [found] = found_in(nn.Linear(32, 33).bfloat16(), X.bfloat16())
    assert found.reason.endswith("it is 1.50 [1.40, 1.60] (bfloat16) times as fast here") and len(on_a_gpu[1]) == 1


@unit
@pytest.mark.parametrize("model", [nn.Linear(32, 40), nn.Identity()])
def test_sizes_that_are_fine_are_left(model):
    assert found_in(model) == []


@unit
@pytest.mark.parametrize("width, count", [(400, 1), (700, 0)])
def test_a_layer_counts_from_its_share_of_the_flops(width, count):
    """2.2 % and 1.3 % of them."""
    model = nn.ModuleDict({"wide": nn.Linear(32, 8 * (width // 8)), "odd": nn.Linear(32, 9)})
    model.forward = lambda x: model["wide"](x).sum() + model["odd"](x).sum()
    assert len(found_in(model)) == count


@unit
def test_layers_of_one_size_at_one_line_are_one_finding(on_a_gpu):
    """Each alone would have too few of the FLOPs to count, and all of them a row each."""
    model = nn.Sequential(*(nn.Linear(33, 33) for _ in range(100)), nn.Linear(33, 40))
    [found] = found_in(model, torch.randn(4, 33))
    assert (found.module, found.count) == ("*", 100) and "99 % of all FLOPs" in found.reason
    assert len(on_a_gpu[1]) == 2                                 # one size, in FP32 and in BF16


@unit
def test_both_sides_are_named():
    [found] = found_in(nn.Linear(31, 33), torch.randn(4, 31))
    assert found.reason.startswith("31 inputs and 33 outputs, which 8 does not divide: 100 % of all FLOPs")


@integration
def test_on_a_cpu_there_is_nothing_to_gain(studies_in_seconds):
    [one] = optimize(nn.Linear(32, 33), (X,), quick=True, techniques=(alignment.TECHNIQUE,)).opportunities
    assert one.verdict == "not here" and one.why == "tensor cores ask for it, and this is a CPU"


@unit
def test_a_layer_is_timed_at_both_sizes(monkeypatch):
    seen = []
    monkeypatch.setattr(alignment, "gain_on_device", lambda *given: seen.append(given) or (1.0, 1.0, 1.0))
    alignment._gain((4, 31, 33), (4, 64, 64), torch.float32, "forward+backward", torch.device("cpu"))
    [(before, after, _)] = seen
    assert [tuple(each.run()[0].shape) for each in (before, after)] == [(4, 33), (4, 64)]
