"""What is predicted of a technique before it runs: from times, bytes and rates that are given here."""
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.assistant import look, optimize
from benchmarks.assistant.predicting import Basis, Prediction, share_of_fused
from benchmarks.assistant.program import read
from benchmarks.assistant.spending import ATTENTION, BY_HAND, MATMUL, PASSES, Spending, Spent
from benchmarks.assistant.techniques import (
    autocast,
    compiled,
    cuda_graph,
    fused_qkv,
    library_gelu,
    library_norm,
    sdpa,
    tf32,
)
from benchmarks.examples import gpt
from benchmarks.measure.calls import Inputs
from benchmarks.records.read import miss, runs
from benchmarks.show import assistants
from common.block.evidence import Evidence
from common.report.record import PREDICTED_MEMORY, record, row_records
from common.report.record_file import RecordFile
from common.report.result import Result, Row
from common.runtime.iteration import BOTH
from common.runtime.machine import facts
from common.runtime.timing import Timing
from tests.helpers import activation_spellings, attention_spellings

unit = pytest.mark.unit
RATES = {"float32": 1e9, "tf32": 2e9, "bfloat16": 4e9}


def basis_of(model, x, *spent, total=10.0, bandwidth=1e9):
    """With so many milliseconds a kind of work, at its first place where the technique is given."""
    program = read(model, Inputs.of(x))
    return Basis(program, Spending(total, list(spent)), RATES.__getitem__, lambda: bandwidth)


def spent(kind, ms, place=None):
    return Spent(kind, place, "", 1, ms)


def predicted(technique, model, x, kind=PASSES, ms=4.0, inference=False):
    """Where all of that time is at the place where the technique applies."""
    basis = basis_of(model, x)
    found = technique.find(basis.program)
    basis.spending.spent = [spent(kind, ms, found[0].place)]
    basis.program.is_inference = inference
    return technique.predict(basis, found)


@unit
@pytest.mark.parametrize("ms, least, most", [(4.0, 6.0, 8.0), (-4.0, 12.0, 14.0), (20.0, 0.1, 0.1), (0.0, 10.0, 10.0)])
def test_the_other_end_is_half_of_what_is_saved(ms, least, most):
    prediction = basis_of(nn.Linear(4, 4), torch.randn(2, 4)).saves(ms)
    assert (prediction.least_ms, prediction.most_ms, prediction.before_ms) == pytest.approx((least, most, 10.0))
    assert prediction.gain == pytest.approx((10 / most, 10 / least))


@unit
@pytest.mark.parametrize("gain, holds", [
    (1.244, False), (1.246, True), (1.4, True), (1.671, True), (1.672, False)])
def test_a_gain_lies_within_to_a_hundredth(gain, holds):
    assert Prediction(6.0, 8.0, 10.0).holds(gain) == holds
    assert str(Prediction(6.0, 8.0, 10.0)) == "1.25 to 1.67" and str(Prediction(10.0, 10.0, 10.0)) == "1.00"


@unit
def test_a_gelu_by_hand_keeps_two_of_eighteen_tensors_that_are_moved():
    x = torch.randn(2, 4, activation_spellings.WIDTH)
    prediction = predicted(library_gelu.TECHNIQUE, activation_spellings.NewGELU(), x)
    assert (prediction.least_ms, prediction.most_ms) == pytest.approx((10 - 4 * 8 / 9, 10 - 2 * 8 / 9))


@unit
def test_a_norm_by_hand_keeps_what_it_is_given_and_gives():
    """[4, 8]: four of its tensors are of one number a row, and the weight is of one row."""
    norm = gpt.LayerNorm(8)
    prediction = predicted(library_norm.TECHNIQUE, norm, torch.randn(4, 8))
    whole, row, weight = 32, 4, 8
    # mean, x - mean, its square, the mean of these, + epsilon, its root, x - mean, / root, * weight, + bias
    of_rows = 2 * (whole + row) + 3 * (2 * whole + row) + 2 * 2 * row
    moved = of_rows + 2 * whole + 2 * (2 * whole + weight)
    share = (2 * whole + 2 * weight) / moved
    assert 10 - prediction.least_ms == pytest.approx(4 * (1 - share))


@unit
@pytest.mark.parametrize("inference, causal, times", [(False, False, 3.5), (True, False, 1.0), (False, True, 1.75)])
def test_of_attention_by_hand_its_matmuls_are_left(inference, causal, times):
    """At the best by the rate of a large matmul, at the worst by a fourth of it."""
    spelling = attention_spellings.NanoGPT if causal else attention_spellings.Unmasked
    length, width = attention_spellings.LENGTH, attention_spellings.WIDTH
    x = torch.randn(2, length, width)
    prediction = predicted(sdpa.TECHNIQUE, spelling().eval(), x, BY_HAND, inference=inference)
    best = 1e3 * times * 2 * (2 * 2 * length * length * width) / RATES["float32"]
    assert (prediction.least_ms, prediction.most_ms) == pytest.approx((6 + best, 6 + 4 * best))


class OfALearnedBias(attention_spellings.Unmasked):
    """A mask that takes a gradient: on a CPU no fused kernel takes it."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(attention_spellings.LENGTH, attention_spellings.LENGTH))

    def attend(self, q, k, v):
        return (q @ k.mT * self.scale + self.bias).softmax(-1) @ v


@unit
@pytest.mark.parametrize("inference", [True, False])
def test_of_attention_that_no_fused_kernel_takes_nothing_is_predicted(inference):
    x = torch.randn(2, attention_spellings.LENGTH, attention_spellings.WIDTH)
    prediction = predicted(sdpa.TECHNIQUE, OfALearnedBias().eval(), x, BY_HAND, inference=inference)
    assert (prediction is not None) == inference


@unit
def test_of_attention_that_is_that_function_nothing_is_predicted():
    basis = basis_of(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 4, 8))
    assert sdpa.predict(basis, sdpa.find(basis.program)) is None
    assert library_norm.predict(basis, []) is None


@unit
def test_of_autocast_matmuls_are_faster_and_weights_are_cast():
    """At most passes over memory have half of their bytes; at the least half of that is saved, and casts take time."""
    model = nn.Linear(1000, 500)
    basis = basis_of(model, torch.randn(2, 1000), spent(MATMUL, 4.0), spent(ATTENTION, 2.0), spent(PASSES, 1.0))
    prediction = autocast.predict(basis, [])
    assert prediction.least_ms == pytest.approx(10 - 6 * 0.75 - 0.5)
    assert prediction.most_ms == pytest.approx(10 - 6 * 0.75 / 2 + 1e3 * 1.5 * 4 * 500_000 / 1e9)


@unit
def test_where_16_bits_are_slower_it_is_predicted():
    basis = replace(basis_of(nn.Linear(8, 8), torch.randn(2, 8), spent(MATMUL, 4.0)),
                    rate={"float32": 1e9, "bfloat16": 5e8}.__getitem__)
    least, most = autocast.predict(basis, []).gain
    assert least == pytest.approx(10 / 14) and most < 1


@unit
def test_of_tf32_nothing_is_cast(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_tf32_supported", lambda: True)
    monkeypatch.setattr("benchmarks.assistant.techniques.tf32.arithmetic_of",
                        lambda plan, device: lambda call: "tf32" if plan.matmul_precision else "float32")
    basis = basis_of(nn.Linear(8, 8), torch.randn(2, 8), spent(MATMUL, 4.0), spent(PASSES, 4.0))
    prediction = tf32.predict(basis, [])
    assert (prediction.least_ms, prediction.most_ms) == pytest.approx((8.0, 9.0))


class Passes(nn.Module):
    """Two passes between matmuls; with `kept` a matmul reads what is between the two, in another shape."""

    def __init__(self, keeps: bool = False):
        super().__init__()
        self.up, self.down, self.side = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 16)
        self.keeps = keeps

    def forward(self, x):
        inner = torch.relu(self.up(x))
        y = self.down(torch.tanh(inner))
        return (y, self.side(inner.view(2, 2, 16))) if self.keeps else y


@unit
@pytest.mark.parametrize("keeps, share", [(False, 2 / 4), (True, 3 / 4)])
def test_a_tensor_that_passes_alone_read_is_not_written(keeps, share):
    assert share_of_fused(read(Passes(keeps), Inputs.of(torch.randn(4, 8))).graphs) == share


@unit
def test_of_compiling_passes_are_fused_and_at_most_nothing_is_idle():
    basis = basis_of(Passes(), torch.randn(4, 8), spent(PASSES, 4.0), spent(MATMUL, 5.0))
    prediction = compiled.predict(basis, [])
    assert (prediction.least_ms, prediction.most_ms) == pytest.approx((10 - 2 - 1, 10 - 1))
    prediction = cuda_graph.predict(basis, [])
    assert (prediction.least_ms, prediction.most_ms) == pytest.approx((9.0, 9.5))


@unit
@pytest.mark.parametrize("inference, times", [(True, 1), (False, 3)])
def test_of_compiling_passes_inside_of_attention_by_hand_are_fused_at_most(inference, times):
    """Its matmuls stay; what is left of its time is passes."""
    length, width = attention_spellings.LENGTH, attention_spellings.WIDTH
    basis = basis_of(attention_spellings.Unmasked().eval(), torch.randn(2, length, width), spent(BY_HAND, 4.0))
    basis.program.is_inference = inference
    products = 1e3 * times * 2 * (2 * 2 * length * length * width) / RATES["float32"]
    fused = 1 - share_of_fused(basis.program.graphs)
    prediction = compiled.predict(basis, [])
    assert (prediction.least_ms, prediction.most_ms) == pytest.approx((10 - fused * (4 - products) - 6, 10))
    basis.spending.spent = [spent(BY_HAND, products / 2), spent(MATMUL, 10 - products / 2)]
    assert compiled.predict(basis, []).least_ms == pytest.approx(10)


@unit
@pytest.mark.parametrize("inference, times", [(True, 1), (False, 2)])
def test_of_layers_on_one_input_that_is_read_once(inference, times):
    model = attention_spellings.Unmasked()
    x = torch.randn(2, attention_spellings.LENGTH, attention_spellings.WIDTH)
    prediction = predicted(fused_qkv.TECHNIQUE, model, x, MATMUL, inference=inference)
    saved = 1e3 * times * 2 * x.nbytes / 1e9
    assert (10 - prediction.least_ms, prediction.most_ms) == pytest.approx((saved, 10.0))


@pytest.mark.integration
def test_a_look_predicts_and_the_report_says_how_many_held(studies_in_seconds):
    model, inputs, _ = gpt.of_size(vocabulary=64, width=32, heads=2, layers=2, batch=2, length=16)
    looked = look(model, inputs)
    assert {"sdpa", "library-norm", "compile"} <= {each.name for each in looked.predicted}
    assert " times as fast" in str(looked)
    result = optimize(model, inputs, quick=True, techniques=(sdpa.TECHNIQUE, library_norm.TECHNIQUE))
    assert "predicted" in str(result) and "of 2 gains that were measured alone lie where they were predicted" in str(
        result).replace("\n", " ")


@pytest.mark.integration
def test_the_page_holds_what_was_predicted_beside_what_was_measured(studies_in_seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(assistants, "RESULTS", tmp_path)
    assert assistants.models() == "Models by their configurations: not recorded."
    assert assistants.predicted() == "Predictions beside measured gains: not recorded."
    (tmp_path / "cpu").mkdir()
    path = tmp_path / "cpu" / "assistant-norm.jsonl"
    norm = nn.Sequential(gpt.LayerNorm(64), nn.Linear(64, 64))
    result = optimize(norm, (torch.randn(32, 64),), quick=True, file=RecordFile(str(path)),
                      techniques=(library_norm.TECHNIQUE, fused_qkv.TECHNIQUE))
    predicted, [one] = result.predictions["library-norm"], result.opportunities
    *_, row, _, count = assistants.predicted().splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    least, most = predicted.gain
    assert cells[:3] == ["cpu, norm", "library-norm", f"{least:.2f} to {most:.2f}"]
    off = 0.0 if predicted.holds(one.speedup) else miss(one.speedup, predicted.gain)
    *_, of_the_model = assistants.models().splitlines()
    where, mode, ms, fastest, *_ = [cell.strip() for cell in of_the_model.strip("|").split("|")]
    assert (where, mode) == ("cpu, norm", "forward+backward") and float(fastest) <= float(ms)
    assert ("library-norm" in of_the_model) == (one.verdict in ("take", "by hand"))
    assert cells[3].startswith(f"{one.speedup:.2f} [") and cells[4] == f"{100 * off:.0f} %"
    assert count == (f"{int(predicted.holds(one.speedup))} of 1 gains lie where they were predicted, "
                     f"{int(off <= assistants.NEAR)} within 15 % of it.")


@unit
@pytest.mark.parametrize("gain, off", [(1.3, 0.0), (1.0, 0.2), (1.68, 0.05), (1.25, 0.0), (1.6, 0.0)])
def test_a_gain_misses_by_its_distance_from_the_nearer_end(gain, off):
    assert miss(gain, (1.25, 1.6)) == pytest.approx(off)


@pytest.mark.integration
def test_a_prediction_that_breaks_is_a_fault_and_no_end(studies_in_seconds):
    broken = replace(library_norm.TECHNIQUE, predict=lambda basis, found: 1 / 0)
    result = optimize(gpt.LayerNorm(8), (torch.randn(4, 8),), quick=True, techniques=(broken,))
    assert any("ZeroDivisionError" in each for each in result.failures)


@unit
@pytest.mark.parametrize("profiled, counted", [((3.0, 5.0), 3.0), ((3.0, 7.0), 3.0), ((6.0, 14.0), 3.0),
                                               ((30.0, 0.0), 10.0)])
def test_what_the_profiler_adds_is_not_saved(profiled, counted):
    """10 ms by the clock: of 20 that it saw each counts half."""
    basis = basis_of(nn.Linear(4, 4), torch.randn(2, 4), spent(PASSES, profiled[0]), spent(MATMUL, profiled[1]))
    assert basis.ms_of({PASSES}) == pytest.approx(counted)
    assert basis.saves(basis.ms_of({PASSES}) / 2).before_ms == 10.0


@unit
def test_the_page_holds_the_memory_that_was_predicted_where_a_peak_was_read():
    """A CPU has none, and older records have no prediction of it."""
    gib = 2.0**30
    result = Result("tf32", None, "float32", facts(torch.device("cpu")))
    result.rows[BOTH, "eager"] = Row(timing=Timing([1.0] * 6, True, "rounds"), peak_bytes=int(3 * gib))
    result.evidence[BOTH] = Evidence(Counter(), Counter(), "unproven", "nothing was looked at")
    lines = [record(result, PREDICTED_MEMORY, "bytes", [0.5 * gib, 1.5 * gib], BOTH), *row_records(result, BOTH)]
    before = Result("as it is", None, "float32", result.facts, evidence=result.evidence)
    before.rows[BOTH, "eager"] = replace(result.rows[BOTH, "eager"], peak_bytes=int(4 * gib))
    [run], [as_it_is] = runs(lines), runs(row_records(before, BOTH))
    assert assistants._memory(run, as_it_is, BOTH) == ("0.50 to 1.50", "1.00")
    assert assistants._memory(run, None, BOTH) == ("", "")
    assert assistants._memory(as_it_is, as_it_is, BOTH) == ("", "")
