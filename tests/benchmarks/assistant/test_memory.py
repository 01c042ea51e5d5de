"""How much less memory a technique should need: held against what autograd saves with it and without."""
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.assistant import look, memory
from benchmarks.assistant.look import _freed
from benchmarks.assistant.optimized import Optimized
from benchmarks.assistant.predicting import Freed, Prediction
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import Technique
from benchmarks.assistant.techniques import (
    autocast,
    compiled,
    fused_qkv,
    library_gelu,
    library_norm,
    sdpa,
    tf32,
)
from benchmarks.examples import cnn_good
from benchmarks.measure.calls import Inputs
from common.report.result import Result, Row
from common.runtime.iteration import BOTH
from tests.helpers import layer_spellings

GIB = 2**30
X = torch.randn(64, 64, layer_spellings.WIDTH, generator=torch.Generator().manual_seed(0))


class ByHand(nn.Module):
    """Attention, a norm and a GELU by hand."""

    def __init__(self):
        super().__init__()
        self.norm = layer_spellings.LayerNormByMeans()
        self.qkv = nn.Linear(layer_spellings.WIDTH, 3 * layer_spellings.WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        y = torch.softmax(q @ k.mT / q.shape[-1]**0.5, dim=-1) @ v
        return x + 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y.pow(3))))


def program_of(model, x=X):
    return read(model, Inputs.of((x,)))


def saved_less(program, technique, found) -> int:
    """Bytes, counted."""
    rung = Rung(program.model, [technique], found={technique.name: found})
    return memory.saved_bytes(program.model, program) - memory.saved_bytes(rung, program)


@pytest.mark.integration
@pytest.mark.parametrize("technique", [library_norm.TECHNIQUE, library_gelu.TECHNIQUE, sdpa.TECHNIQUE],
                         ids=lambda technique: technique.name)
def test_what_autograd_saves_less_is_predicted(technique):
    program = program_of(ByHand())
    found = list(technique.find(program))
    predicted, counted = memory.in_regions(program, found), saved_less(program, technique, found)
    assert counted > 0 and predicted.least <= counted <= predicted.most, (predicted, counted)
    assert predicted.most <= 1.2 * counted                     # not just any large number
    program.is_inference = True
    assert memory.in_regions(program, found) is None


@pytest.mark.integration
@pytest.mark.parametrize("technique", [autocast.TECHNIQUE, compiled.TECHNIQUE], ids=lambda technique: technique.name)
def test_what_the_whole_model_saves_less_is_predicted(technique):
    program = program_of(ByHand())
    found = list(technique.find(program))
    predicted, counted = technique.frees(program, found), saved_less(program, technique, found)
    assert counted > 0 and predicted.least <= counted <= predicted.most, (predicted, counted)
    assert predicted.most < memory.saved_bytes(program.model, program)
    program.is_inference = True
    assert technique.frees(program, found) is None


class Called(nn.Module):
    """The library's attention, which no fused kernel of a CPU computes with dropout."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x):
        q, k, v = x.view(16, 4, 64, -1).unbind(0)[:3]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.p)


@pytest.mark.unit
@pytest.mark.parametrize("p, weights", [(0.0, 0), (0.1, 4 * 4 * 64 * 64)])
def test_the_weights_of_attention_that_no_fused_kernel_computes_may_be_freed(p, weights, monkeypatch):
    """By a compiler in any case, and under autocast where a kernel computes it in 16 bits."""
    model = nn.Sequential(nn.Linear(layer_spellings.WIDTH, layer_spellings.WIDTH), Called(p))
    program = program_of(model)
    assert [bool(call.attends) for call in program.trace.calls].count(True) == 1
    fused = memory.is_fused
    most = [compiled.TECHNIQUE.frees(program, []).most, autocast.TECHNIQUE.frees(program, []).most]
    monkeypatch.setattr(memory, "is_fused", lambda given: given.dtype == torch.bfloat16 or fused(given))
    assert autocast.TECHNIQUE.frees(program, []).most - most[1] == weights / 2
    monkeypatch.setattr(memory, "is_fused", lambda given: True)
    assert most[0] - compiled.TECHNIQUE.frees(program, []).most == weights


@pytest.mark.unit
def test_of_tf32_it_is_nothing_and_of_side_by_side_it_is_not_known():
    program = program_of(nn.Linear(layer_spellings.WIDTH, 8))
    assert tf32.TECHNIQUE.frees(program, []) == Freed(0.0, 0.0)
    assert fused_qkv.TECHNIQUE.frees(program, []) is None


@pytest.mark.unit
@pytest.mark.parametrize("operation, count", [
    (lambda x: (x * 2).sin() * 3, 1), (lambda x: (x * 2) * (x + 1), 2), (lambda x: (x + 1).tanh() + 1, 1),
    (lambda x: (x + 1) / (x + 2), 2), (lambda x: (x + 1) / 2 + 1, 0), (lambda x: (x + 1).mean(-1, keepdim=True) + x, 0),
    (lambda x: (x + 1).view(-1).exp().view(x.shape) * (x + 1), 2)])
def test_what_an_operation_saves(operation, count):
    """Of each other's results, in tensors; each as often as its memory is there."""
    class Model(nn.Linear):
        def forward(self, x):
            return operation(super().forward(x))
    model = Model(8, 8, bias=False)
    program = program_of(model, torch.randn(4, 8))
    [graph] = program.graphs
    inner = {node for node in memory.saved_in(graph.nodes) if node.op.startswith("call_")}
    size = 4 * 8 * 4
    assert sum(map(memory.bytes_of, inner)) == count * size == memory.saved_bytes(model, program)


@pytest.mark.unit
def test_what_does_not_fit_is_not_predicted_and_a_fault_is_said():
    def raising(error):
        def frees(program, found):
            raise error
        return Technique("t", "", lambda program: (), frees=frees)
    looked = SimpleNamespace(program=None, faults=[])
    assert _freed(raising(torch.OutOfMemoryError("CUDA out of memory")), looked, []) is None and not looked.faults
    assert _freed(raising(KeyError("w")), looked, []) is None
    assert looked.faults == ["t: a fault of this suite: KeyError: 'w'"]


@pytest.mark.unit
def test_the_report_has_what_was_measured_beside_it():
    """On a GPU alone: a CPU has no peak to read."""
    technique = Technique("library-norm", "", lambda program: ())
    rows = {"as it is": 5 * GIB, "library-norm": 3.5 * GIB}
    results = {name: Result(name, None, "float32", {}) for name in rows}
    looked = SimpleNamespace(predicted={technique: Prediction(1.0, 2.0, 3.0, Freed(1.0 * GIB, 2.0 * GIB))})
    result = Optimized(looked, "FP64")
    looked.mode = BOTH
    for name, peak in rows.items():
        results[name].rows[BOTH, "eager"] = Row(peak_bytes=peak)
    result.alone.results.update(results)
    assert result.freed(technique) == 1.5 * GIB
    table = result._memory()
    assert table.rows == [["library-norm", "1.00 to 2.00", "1.50"]]
    results["as it is"].rows[BOTH, "eager"].peak_bytes = None
    assert result.freed(technique) is None and result._memory() is None


@pytest.mark.unit
@pytest.mark.parametrize("freed, words", [(Freed(GIB, 2 * GIB), "1.00 to 2.00"), (Freed(0.0, 0.0), "0.00")])
def test_it_is_said_in_gib(freed, words):
    assert str(freed) == words


@pytest.mark.integration
def test_a_look_predicts_it_before_anything_runs():
    model, inputs, _ = cnn_good.build()
    looked = look(model, inputs, techniques=(compiled.TECHNIQUE,))
    [prediction] = looked.predicted.values()
    assert prediction.freed.least == 0.0 < prediction.freed.most
