"""Weights in INT8 for few tokens: where, what the judge allows them, and what is wrong."""
import copy
import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant import optimize
from benchmarks.assistant.predicting import Basis
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.spending import MATMUL, Spending, Spent
from benchmarks.assistant.technique import Found
from benchmarks.assistant.techniques import int8_weights
from benchmarks.assistant.workload import workload
from benchmarks.assistant.written import AsWritten
from benchmarks.measure.calls import Inputs
from benchmarks.measure.int8 import WithInt8Weights, in_int8
from benchmarks.measure.judge import Judge
from benchmarks.measure.observing import Work
from benchmarks.measure.truth import Truth
from common.block.evidence import Evidence

unit, integration = pytest.mark.unit, pytest.mark.integration
TECHNIQUE = int8_weights.TECHNIQUE
WIDTH, LAYERS = 128, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        with torch.no_grad():              # rows of other sizes, as training leaves them
            self.fc.weight *= torch.logspace(-0.5, 0.5, 2 * WIDTH)[torch.randperm(2 * WIDTH)][:, None]

    def forward(self, x):
        return x + self.out(F.gelu(self.fc(self.norm(x))))


def made(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 64, bias=False)).to(dtype).eval()


def given(tokens=2, dtype=torch.bfloat16):
    return torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def found_in(model, x, is_inference=True):
    program = read(model, Inputs.of(x))
    program.is_inference = is_inference
    return int8_weights.find(program)


@pytest.fixture
def gain(monkeypatch):
    """How many times as fast each size is: 2, but for what a test says."""
    gains = {}
    monkeypatch.setattr(int8_weights, "gain_of", lambda size, dtype, device: gains.get(size, (2.0, 1.9, 2.1)))
    return gains


@unit
def test_the_layers_that_pay_are_found(gain):
    gain[2, WIDTH, 64] = (1.05, 1.01, 1.1)
    [found] = found_in(made(), given())
    assert found.modules == tuple(f"{block}.{name}" for block in range(LAYERS) for name in ("fc", "out"))
    assert found.dtype == torch.bfloat16 and found.can_be_tried
    assert found.reason == ("12 of 13 linear layers on few tokens; times as fast as in bfloat16, by tokens x inputs x "
                            "outputs: 2 x 128 x 256 2.00, 2 x 256 x 128 2.00, 2 x 128 x 64 1.05 (left out)")


@unit
def test_where_none_pays_that_is_said(gain):
    gain |= dict.fromkeys([(2, WIDTH, 2 * WIDTH), (2, 2 * WIDTH, WIDTH), (2, WIDTH, 64)], (0.9, 0.8, 1.0))
    [found] = found_in(made(), given())
    assert found.why_not == "none is faster with them" and found.modules == ()


@unit
def test_a_device_without_the_kernel_is_said(monkeypatch):
    def missing(size, dtype, device):
        raise RuntimeError("no kernel for that")
    monkeypatch.setattr(int8_weights, "gain_of", missing)
    [found] = found_in(made(), given())
    assert found.reason == "13 linear layers on few tokens" and not found.can_be_tried
    assert found.why_not == "torch can't multiply so here: RuntimeError: no kernel for that"


@unit
@pytest.mark.parametrize("inputs, count", [(64, 1), (96, 0), (65, 0), (32, 0), (128, 1)])
def test_inputs_that_the_kernel_reads_beyond_are_left_alone(inputs, count, gain):
    model = nn.Sequential(nn.Linear(inputs, 33)).bfloat16().eval()
    assert len(found_in(model, torch.randn(2, inputs).bfloat16())) == count


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(self.inner(x))


@unit
@pytest.mark.parametrize("model, x, is_inference, count", [
    (made, given(64), True, 1), (made, given(65), True, 0), (made, given(2), False, 0),
    (functools.partial(made, torch.float32), given(2, torch.float32), True, 0),
    (lambda: Twice().bfloat16(), given(2), True, 0)])
def test_few_tokens_in_16_bits_once_in_inference(model, x, is_inference, count, gain):
    assert len(found_in(model(), x, is_inference)) == count


@unit
def test_a_size_is_timed_with_weights_that_no_cache_holds(monkeypatch):
    """One layer after another."""
    monkeypatch.setattr(int8_weights, "CACHES", 5 * 96 * 96)
    monkeypatch.setattr(int8_weights, "gain_on_device", lambda before, after, device: (before.run(), after.run()))
    for width, count in ((64, 6), (128, 2), (1024, 1)):
        plain, narrow = int8_weights.gain_of((3, width, width), torch.bfloat16, torch.device("cpu"))
        assert len(plain) == len(narrow) == count
        off = torch.cat(plain) - torch.cat(narrow)
        assert 0 < off.norm() < 0.02 * torch.cat(plain).norm()
    monkeypatch.setattr(int8_weights, "CACHES", 10**9)
    plain, _ = int8_weights.gain_of((1, 64, 64), torch.bfloat16, torch.device("cpu"))
    assert len(plain) == 64, "no more, where they are small"
    int8_weights.gain_of.cache_clear()


@unit
def test_a_weight_is_off_by_half_a_step_of_its_row():
    weight = torch.randn(16, 64, dtype=torch.float64) * torch.logspace(-3, 3, 16, dtype=torch.float64)[:, None]
    weight[3] = 0.0
    values, scale = in_int8(weight)
    assert values.dtype == torch.int8 and int(values.abs().max()) == 127 and not values[3].any()
    off = (values * scale[:, None] - weight).abs()
    assert (off <= 0.5000001 * weight.abs().amax(1, keepdim=True) / 127).all()


@unit
def test_a_reference_with_weights_in_int8_multiplies_as_the_kernel_does():
    layer, x = nn.Linear(64, 32), given(4, torch.float32)[0, :, :64]
    with WithInt8Weights():
        rounded = layer(x)
    by_kernel = int8_weights.InInt8(layer, torch.float32)(x)
    assert (rounded - by_kernel).norm() < 1e-3 * (rounded - layer(x)).norm()


@unit
def test_gradients_are_those_of_the_weight():
    layer = nn.Linear(8, 4)
    x = torch.randn(3, 8)
    with WithInt8Weights():
        layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, x.sum(0).expand(4, 8))


def rung_of(model, x):
    return Rung(model, [TECHNIQUE], found={TECHNIQUE.name: found_in(model, x)})


def judged(candidate, model, x):
    return Judge(candidate, Truth(model, Work(Inputs.of(x), forward_only=True)), "int8").judge()


@integration
def test_it_is_right_and_as_far_off_as_int8_is(gain):
    model, x = made(), given()
    judgement = judged(rung_of(model, x), model, x)
    assert judgement.passed and judgement.has_oracle, judgement
    truth = Truth(model, Work(Inputs.of(x), forward_only=True))
    assert truth.own_error_in("int8") > 1.5 * truth.own_error_in(None)


def few_bits(weight):
    scale = weight.float().abs().amax(1) / 7
    return (weight / scale[:, None]).round().to(torch.int8), scale.to(weight.dtype)


def scale_of_the_next_row(weight):
    values, scale = in_int8(weight)
    return values, scale.roll(1)


def one_scale_too_large(weight):
    values, scale = in_int8(weight)
    return values, scale * torch.where(torch.arange(len(scale)) == 0, 2.0, 1.0).to(scale.dtype)


def rounded_down(weight):
    values, scale = in_int8(weight)
    return (weight.float() / scale[:, None].float()).floor().clamp(-128, 127).to(torch.int8), scale


@integration
@pytest.mark.parametrize("wrong", [few_bits, scale_of_the_next_row, one_scale_too_large, rounded_down])
def test_what_is_wrong_is_unsafe(wrong, gain, monkeypatch):
    monkeypatch.setattr(int8_weights, "in_int8", wrong)
    model, x = made(), given()
    assert not judged(rung_of(model, x), model, x).passed


@integration
def test_one_without_its_bias_is_unsafe(gain, monkeypatch):
    call = int8_weights.InInt8.__call__

    def without_bias(self, x):
        y = call(self, x)
        return y if self.module.bias is None else y - self.module.bias.to(y.dtype)
    monkeypatch.setattr(int8_weights.InInt8, "__call__", without_bias)
    model, x = made(), given()
    assert not judged(rung_of(model, x), model, x).passed


@integration
def test_another_function_than_the_reference_is_found_in_fp64(gain):
    model, x = made(), given()
    rung = rung_of(model, x)
    rung.module[0].norm.eps = 1.0
    assert not judged(rung, model, x).passed


@integration
def test_it_is_tried_and_its_code_is_right(gain, studies_in_seconds):
    model, x = made(), given()
    result = optimize(model, (x,), quick=True, inference=True, techniques=[TECHNIQUE])
    [one] = result.opportunities
    assert one.verdict in ("different numerics", "no gain") and "did not fire" not in one.why, one
    [found] = found_in(model, x)
    code = int8_weights.advice(read(model, Inputs.of(x)), found).code
    written = AsWritten(made(), code, "output = model(*inputs)")
    with torch.no_grad():
        assert torch.equal(written(x), rung_of(model, x)(x))
    judgement = judged(written, model, x)
    assert judgement.passed, judgement


@integration
def test_the_layers_of_gpt_2_have_their_weights_the_other_way_round(gain):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100, use_cache=False, bos_token_id=0,
                                     eos_token_id=0)
    model, x = transformers.GPT2LMHeadModel(config).bfloat16().eval(), {"input_ids": torch.arange(3)[None]}
    program = read(model, Inputs.of(x))
    program.is_inference = True
    [found] = int8_weights.find(program)
    assert len(found.modules) == 4 + 1 and "3 x 64 x 192 2.00" in found.reason
    rung = Rung(model, [TECHNIQUE], found={TECHNIQUE.name: [found]})
    judgement = judged(rung, model, x)
    assert judgement.passed and judgement.has_oracle, judgement
    truth = Truth(model, Work(Inputs.of(x), forward_only=True))
    assert truth.own_error_in("int8") > 1.3 * truth.own_error_in(None)
    code = int8_weights.advice(program, found).code
    own = copy.deepcopy(model)
    written = AsWritten(own, code, "output = model(**inputs)")
    assert not any(type(module).__name__ == "Conv1D" for module in own.modules())
    with torch.no_grad():
        assert torch.equal(written(**x).logits, rung(**x).logits)


@unit
@pytest.mark.parametrize("times, least", [(2.0, 6.0), (1.0, 10.0), (4.0, 4.0)])
def test_what_it_saves_is_predicted_from_its_sizes(times, least, gain):
    """All matmuls take 8 of 10 ms."""
    gain |= dict.fromkeys([(2, WIDTH, 2 * WIDTH), (2, 2 * WIDTH, WIDTH), (2, WIDTH, 64)], (times, 0.9 * times, times))
    program = read(made(), Inputs.of(given()))
    program.is_inference = True
    basis = Basis(program, Spending(10.0, [Spent(MATMUL, None, "", 1, 8.0)]), lambda arithmetic: 1e9, lambda: 1e9)
    every = tuple(call.module for call in program.trace.calls if call.is_matmul)
    prediction = int8_weights.predict(basis, [Found(None, "", 1, "", modules=every)])
    assert (prediction.least_ms, prediction.most_ms) == pytest.approx((least, (least + 10) / 2))


@unit
def test_its_weights_are_a_byte_each(gain):
    model, x = made(), given()
    program = read(model, Inputs.of(x))
    plain, narrow = (sum(one.bytes for one in workload(program, lambda call: "bfloat16", paths).forward)
                     for paths in ((), ("0.fc", "0.out")))
    assert plain - narrow == 2 * WIDTH * 2 * WIDTH


@unit
@pytest.mark.parametrize("kernels, kinds, says", [
    ({"aten::_weight_int8pack_mm": 1}, {}, ""), ({"aten::mm": 1}, {}, "no matmul with weights in INT8 ran"),
    ({"f": 1}, {"compiled": 1}, "")])
def test_whether_it_fired(kernels, kinds, says):
    seen = Evidence(Counter(kernels), Counter(kinds), "n/a", "")
    assert int8_weights.fired(None, seen, seen) == says
