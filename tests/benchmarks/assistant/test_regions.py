"""Parts of a model that are slower compiled: which there are, and whether the whole is faster without them."""
import pytest
import torch
from torch import nn

from benchmarks.assistant import regions
from benchmarks.assistant.program import read
from benchmarks.assistant.techniques import compiled
from benchmarks.measure.calls import Inputs

unit, integration = pytest.mark.unit, pytest.mark.integration


class Part(nn.Linear):
    def forward(self, x, scale=1.0, add=None):
        y = super().forward(x) * scale
        return y if add is None else y + add


class Model(nn.Module):
    """Three parts alike in a list, one of another width, one that is called otherwise, and one that is not called."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part(8, 8) for _ in range(3))
        self.wide, self.head, self.unused = Part(8, 32), Part(32, 4), Part(8, 8)
        self.activation = nn.GELU()

    def forward(self, x):
        for part in self.parts:
            x = self.activation(part(x, scale=2.0))
        return self.head(self.wide(x), add=x.new_ones(4))


def program_of(model=Model):
    torch.manual_seed(0)
    return read(model(), Inputs.of(torch.randn(4, 8)))


@unit
def test_parts_alike_are_one_and_what_is_not_called_is_none():
    program = program_of()
    parts = regions.parts_of(program)
    assert {part.paths for part in parts} == {("parts.0", "parts.1", "parts.2"), ("wide",), ("head",)}
    assert all(not module._forward_pre_hooks for module in program.model.modules())
    head = next(part for part in parts if part.paths == ("head",))
    assert list(head.inputs.kwargs) == ["add"] and tuple(head.inputs.args[0].shape) == (4, 32)


@unit
def test_no_more_than_so_many_are_compiled(monkeypatch):
    monkeypatch.setattr(regions, "MOST", 1)
    [part] = regions.parts_of(program_of())
    assert part.paths == ("wide",), "the one with most parameters"


def timed(monkeypatch, ratios):
    """So many times as fast, in the order of the questions; nothing is compiled."""
    answers = iter(ratios)
    monkeypatch.setattr(regions, "times_as_fast", lambda *works: next(answers))
    monkeypatch.setattr(regions, "compiled_work", lambda call, program, every: (call, 0.0))


@unit
@pytest.mark.parametrize("high, is_slower", [(0.97, True), (0.99, False)])
def test_what_is_slower_compiled_as_far_as_samples_can_tell(high, is_slower, monkeypatch):
    timed(monkeypatch, [(1.3, 1.2, 1.4), (0.95, 0.9, high), (1.3, 1.2, 1.4), (1.0, 0.9, 1.1)])
    said = regions.slower_compiled(program_of())
    assert [place for place, _ in said] == (["head, Part", "the model compiled without"] if is_slower else [])


@unit
@pytest.mark.parametrize("low, code", [
    (1.03, "for name in ['parts.0', 'parts.1', 'parts.2']: part = model.get_submodule(name); "
           "part.forward = torch.compiler.disable(part.forward)"), (1.01, "leave them in")])
def test_the_whole_is_timed_without_it(low, code, monkeypatch):
    timed(monkeypatch, [(1.3, 1.2, 1.4), (1.3, 1.2, 1.4), (0.8, 0.7, 0.9), (1.1, low, 1.2)])
    (part, of_it), (whole, words) = regions.slower_compiled(program_of())
    assert (part, of_it) == ("parts.0, 3 x Part", "compiled by itself it is 0.80 [0.70, 0.90] times as fast as it is")
    assert whole == "the model compiled without"
    assert words == f"1.10 [{low:.2f}, 1.20] times as fast as with: {code}"


@unit
def test_a_part_that_can_not_be_compiled_is_said(monkeypatch):
    def broken(call, program, every):
        raise RuntimeError("no code for this")
    monkeypatch.setattr(regions, "compiled_work", broken)
    said = dict(regions.slower_compiled(program_of()))
    assert set(said) == {"wide, Part", "head, Part", "parts.0, 3 x Part"}
    assert set(said.values()) == {"it could not be timed: RuntimeError: no code for this"}


@integration
def test_parts_are_compiled_and_timed_for_real(monkeypatch):
    monkeypatch.setattr(regions, "MOST", 1)
    monkeypatch.setattr(regions, "WORTH_IT", 1e-9)             # whatever the clock says counts as slower
    said = compiled.seen_alone(program_of())
    assert [place for place, _ in said] == ["each of 3 Part compiled by itself", "wide, Part",
                                            "the model compiled without"]


@unit
def test_what_fails_is_told_beside_the_other(monkeypatch):
    timed(monkeypatch, [(1.3, 1.2, 1.4)] * 2 + [(0.8, 0.7, 0.9), (1.1, 1.0, 1.2)])
    monkeypatch.setattr(compiled, "_by_layer", lambda program: 1 / 0)
    said = dict(compiled.seen_alone(program_of()))
    assert said["each layer compiled by itself"] == "it could not be timed: ZeroDivisionError: division by zero"
    assert said["the model compiled without"].endswith("leave them in")


@integration
def test_the_model_without_it_is_the_same_function(monkeypatch):
    seen = []
    timed(monkeypatch, [(0.5, 0.4, 0.6)] * 4)
    monkeypatch.setattr(regions, "compiled_work", lambda call, program, every: seen.append(call) or (call, 0.0))
    program = program_of()
    regions.slower_compiled(program)
    x = torch.randn(4, 8)
    torch._dynamo.reset()
    assert torch.allclose(seen[-1](x), program.model(x), atol=1e-5)
    assert all("forward" not in vars(module) for module in program.model.modules())
