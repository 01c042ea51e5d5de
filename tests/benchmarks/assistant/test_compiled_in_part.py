"""Models of which a part is compiled, runs in inference mode, or compiles itself: they are read as they are written."""
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.assistant import look, optimize
from benchmarks.assistant.combination import Combination
from benchmarks.assistant.optimize import _Assistant
from benchmarks.assistant.optimized import Optimized
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.rungs import Rungs
from benchmarks.assistant.techniques import autocast, compiled, library_gelu, loop, sdpa
from benchmarks.measure.calls import Inputs
from benchmarks.measure.fitting import _forward
from benchmarks.measure.observing import Work

unit = pytest.mark.unit
WIDTH, TOKENS = 8, 4
X = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
FLOPS = 2 * 2 * TOKENS * WIDTH * WIDTH


class Two(nn.Module):
    """Two layers; how the inner one is called is a test's."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.outer(self.inner(x))


class Serving(Two):
    """Both in inference mode, whoever calls."""

    def forward(self, x):
        with torch.inference_mode():
            return super().forward(x)


class Flexible(nn.Module):
    """A mask that is made in each call, and attention that compiles itself."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x):
        q = self.project(x)[None]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, x.size(1), x.size(1), device="cpu")
        return flex_attention(q, q, q, block_mask=mask)[0]


def in_place() -> Two:
    model = Two()
    model.inner.compile(backend="eager")
    return model


def wrapped() -> Two:
    model = Two()
    model.inner = torch.compile(model.inner, backend="eager")
    return model


@unit
@pytest.mark.parametrize("make", [Two, in_place, wrapped, Serving])
def test_all_of_its_work_is_counted(make):
    assert read(make(), Inputs.of(X), inference=True).trace.flops == FLOPS


def cut_off(profiler, path):
    """What a full disk leaves of a timeline."""
    Path(path).write_text('{"name": "Torch-Compiled Region')


def not_written(profiler, path):
    raise OSError("no space left on device")


@unit
@pytest.mark.parametrize("disk", [None, cut_off, not_written])
@pytest.mark.parametrize("make, in_part", [(Two, False), (in_place, True), (wrapped, True)])
def test_its_time_is_that_of_compiled_code(make, in_part, disk, fresh_dynamo, monkeypatch):
    if disk:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", disk)
    looked = look(make(), (X,))
    table = "\n".join(" ".join(row) for row in looked.where().rows)
    assert ("compiled code" in table) == in_part
    assert ("compiled in part" in str(looked.model())) == in_part


@unit
@pytest.mark.parametrize("make, compiles", [(Two, False), (in_place, True), (wrapped, True)])
def test_where_its_graphs_are_rewritten_it_is_compiled(make, compiles):
    """Else what a technique buys would be held against compiled code; what rewrites none leaves it as it is."""
    assert Rung(make(), (sdpa.TECHNIQUE,)).plan.compiles == compiles
    assert not Rung(make(), (autocast.TECHNIQUE,)).plan.compiles


@unit
@pytest.mark.parametrize("make, technique, base", [
    (Two, sdpa, None), (in_place, sdpa, compiled), (wrapped, library_gelu, compiled), (in_place, autocast, None),
    (in_place, compiled, None), (in_place, loop, None)])
def test_a_technique_alone_is_held_against_what_it_runs_in(make, technique, base):
    """Of a whole model that is compiled, compiling is no gain of a rewritten graph."""
    result = Optimized(look(make(), (X,), techniques=[]), "")
    expected = Combination((base.TECHNIQUE,)) if base else Combination()
    assert result.base_of(technique.TECHNIQUE) == expected


@unit
def test_what_it_is_held_against_is_measured_though_nobody_asked(monkeypatch, fresh_dynamo):
    asked = []
    monkeypatch.setattr(Rungs, "measure", lambda self, of, *_: asked.append([each.name for each in of]))
    monkeypatch.setattr(_Assistant, "_can_try", lambda self, *_: True)
    optimize(in_place(), (X,), techniques=[sdpa.TECHNIQUE])
    assert asked[0] == ["as it is", "compile", "sdpa"]


@unit
def test_in_inference_what_has_no_line_is_no_backward():
    table = "\n".join(" ".join(row) for row in look(Serving(), (X,), inference=True).where().rows)
    assert "the backward alone" not in table


@unit
def test_attention_that_compiles_itself_is_read_in_inference(fresh_dynamo):
    """On a CPU it has no backward."""
    x = torch.randn(2, 128, 16)
    program = read(Flexible(), Inputs.of(x), inference=True)
    assert not program.not_captured and any(call.name == "flex_attention" for call in program.trace.calls)
    assert _forward(Flexible(), Work(Inputs.of(x), forward_only=True))[0] > 0
    assert look(Flexible(), (x,), inference=True).spending.total_ms > 0
