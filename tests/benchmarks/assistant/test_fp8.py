"""FP8 by Transformer Engine, whose modules are made up here, and by torchao: which layers, by which times, and what is
written."""
import contextlib
import copy
import functools
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.assistant import fp8 as layers_in_fp8
from benchmarks.assistant import optimize
from benchmarks.assistant.fp8 import LAST, TORCHAO, TRANSFORMER_ENGINE, Layer, layers_of, patterns, pays
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import plan_of
from benchmarks.assistant.techniques import autocast, compiled, fp8
from benchmarks.assistant.workload import arithmetic_of, bytes_of
from benchmarks.assistant.written import AsWritten
from benchmarks.measure.calls import Inputs
from benchmarks.measure.names import Kind
from benchmarks.recipes import emulated
from benchmarks.recipes.recipe import CURRENT
from benchmarks.study import validate
from common.runtime import engine

unit, integration = pytest.mark.unit, pytest.mark.integration
WIDTH, TOKENS = 64, 32


class Made:
    """What of Transformer Engine the technique uses: its numerics, and an error outside of its autocast."""
    is_inside = False

    class Float8CurrentScaling:
        pass

    class Linear(nn.Module):
        def __init__(self, in_features, out_features, bias=True, params_dtype=None, device=None):
            super().__init__()
            made = emulated.Linear(in_features, out_features, CURRENT, bias).to(device, params_dtype)
            self.weight, self.use_bias, self.state = made.weight, bias, made.state
            self.bias = made.bias if bias else torch.empty(0)

        def forward(self, x):
            assert Made.is_inside and x.dtype != torch.float64, "not in FP8"
            y = emulated._Linear.apply(x.flatten(0, -2).float(), self.weight.float(), self.state)
            y = y.unflatten(0, x.shape[:-1]).to(x.dtype)
            return y + self.bias.to(x.dtype) if self.use_bias else y

    @staticmethod
    @contextlib.contextmanager
    def autocast(enabled, recipe):
        assert enabled and isinstance(recipe, Made.Float8CurrentScaling)
        Made.is_inside = True
        yield
        Made.is_inside = False


MODULES = SimpleNamespace(Linear=Made.Linear, autocast=Made.autocast,
                          quantization=SimpleNamespace(Float8CurrentScaling=Made.Float8CurrentScaling))


@pytest.fixture
def has_fp8(monkeypatch):
    """A machine with FP8, on which layers with more than WIDTH outputs are faster in it."""
    monkeypatch.setattr(engine, "transformer_engine", lambda: MODULES)
    monkeypatch.setattr(fp8, "missing", lambda device: "")
    monkeypatch.setattr(engine, "import_error", lambda: None)
    monkeypatch.setattr(layers_in_fp8, "LIBRARIES", {each.name: each for each in (TRANSFORMER_ENGINE,)})
    monkeypatch.setattr(layers_in_fp8, "timed", lambda size, mode, device, library: (
        (1.5, 1.4, 1.6) if size[2] > WIDTH else (0.9, 0.8, 0.95)))
    layers_in_fp8._linear_by_transformer_engine.cache_clear()
    yield
    layers_in_fp8._linear_by_transformer_engine.cache_clear()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, classes=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made():
    torch.manual_seed(0)
    return Model(), torch.randn(2, TOKENS // 2, WIDTH)


def program_of(model, x):
    return read(model, Inputs.of(x))


@unit
def test_a_layer_is_what_a_forward_called():
    model, x = made()
    found = layers_of(program_of(model, x))
    assert [layer.path for layer in found] == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
    assert found[0] == Layer("blocks.0.up", (TOKENS, WIDTH, 4 * WIDTH), 2 * TOKENS * WIDTH * 4 * WIDTH)
    assert [layer.why_not for layer in found] == [""] * 4 + [LAST]


class Own(nn.Linear):
    pass


@unit
@pytest.mark.parametrize("change, why", [
    (lambda model: setattr(model.blocks[0], "up", Own(WIDTH, 4 * WIDTH)), None),
    (lambda model: setattr(model.blocks[0], "up", nn.utils.parametrizations.weight_norm(model.blocks[0].up)), None),
    (lambda model: model.blocks[0].up.register_forward_hook(lambda *_: None), "with hooks"),
    (lambda model: model.blocks[0].up.register_full_backward_hook(lambda *_: None), "with hooks")])
def test_a_layer_that_does_more_is_left_as_it_is(change, why):
    model, x = made()
    change(model)
    layer = next((each for each in layers_of(program_of(model, x)) if each.path == "blocks.0.up"), None)
    assert layer is None if why is None else layer.why_not.startswith(why)


@unit
@pytest.mark.parametrize("tokens, why", [
    (16, ""), (24, "a size of 24: no multiple of 16"), (15, "a size of 15: no multiple of 16")])
def test_sizes_that_fp8_takes(tokens, why):
    model, _ = made()
    assert layers_of(program_of(model, torch.randn(tokens, WIDTH)))[0].why_not == why
    odd = nn.Sequential(nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), nn.Linear(WIDTH, WIDTH))
    assert [each.why_not for each in layers_of(program_of(odd, torch.randn(16, WIDTH)))] == [
        "a size of 40: no multiple of 16", "a size of 40: no multiple of 16", LAST]


@unit
def test_what_pays_is_chosen_and_the_rest_is_said(has_fp8):
    model, x = made()
    [found] = fp8.find(program_of(model, x))
    assert found.modules == ("blocks.0.up", "blocks.1.up") and not found.why_not
    assert found.reason == (
        "2 of 5 linear layers by Transformer Engine, 49 % of their FLOPs; times as fast as in BF16, by tokens x inputs "
        "x outputs: 32 x 64 x 256 1.50, 32 x 256 x 64 0.90 (left out); without head, the last: its errors are the "
        "output's")


class Conv1D(nn.Module):
    """As GPT-2's in transformers: its matrix is [in, out]."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(x.shape)


@unit
def test_a_matrix_in_a_module_of_its_own_kind_is_named(has_fp8):
    _, x = made()
    own = nn.Sequential(Conv1D(WIDTH), Own(WIDTH, WIDTH), Conv1D(WIDTH), nn.ReLU())
    why = "2 Conv1D and 1 Own multiply by a matrix of their own: only a plain nn.Linear is replaced"
    [found] = fp8.find(program_of(own, x))
    assert (found.reason, found.why_not) == ("no plain nn.Linear", why)
    [found] = fp8.find(program_of(nn.Sequential(own, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)), x))
    assert found.reason.endswith(f"; {why}") and found.modules == ("1",) and not found.why_not
    assert fp8.find(program_of(nn.ReLU(), x)) == []


@unit
@pytest.mark.parametrize("gain, is_faster", [((1.04, 1.02, 1.05), True), ((1.04, 1.019, 1.05), False)])
def test_a_size_pays_where_its_interval_does(gain, is_faster):
    assert pays(gain) == is_faster


@unit
def test_where_none_pays_there_is_nothing_to_write(has_fp8, monkeypatch):
    monkeypatch.setattr(layers_in_fp8, "timed", lambda size, mode, device, library: (0.9, 0.8, 0.95))
    model, x = made()
    [found] = fp8.find(program_of(model, x))
    assert found.why_not == "no linear layer is faster in it" and found.modules == ()


@unit
def test_a_machine_without_it_says_so():
    model, x = made()
    [found] = fp8.find(program_of(model, x))
    assert found.reason == "4 of 5 linear layers can be in FP8"
    assert "8.9" in fp8.missing(torch.device("cpu"))
    assert fp8.find(program_of(nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8))) == []


def rung_of(model, x, techniques=(fp8.TECHNIQUE,)):
    found = {"fp8": fp8.find(program_of(model, x))}
    return Rung(model, techniques, found=found)


def is_the_model_in_fp8(rung, model, x):
    """With its parameters, of the same meaning, and further off than BF16 explains."""
    assert rung.plan.numerics == "float8"
    assert set(dict(rung.named_parameters())) == {f"module.{name}" for name, _ in model.named_parameters()}
    judgement = validate(rung, model, (x,), numerics=rung.plan.numerics)
    assert judgement.passed, judgement
    asked = {check.question for check in judgement if check.of.kind is Kind.OUTPUT}
    assert "meaning" in asked and all(check.proven for check in judgement if check.question == "meaning")
    assert not validate(rung, model, (x,), numerics="bfloat16").passed


@integration
@pytest.mark.parametrize("others", [(), (autocast.TECHNIQUE,)])
@pytest.mark.parametrize("first", [False, True])
def test_it_is_the_same_model_in_fp8(others, first, has_fp8):
    model, x = made()
    rung = rung_of(model, x, (fp8.TECHNIQUE, *others) if first else (*others, fp8.TECHNIQUE))
    assert rung.plan.in_fp8 == ("blocks.0.up", "blocks.1.up")
    assert type(rung.module.blocks[0].up).__name__ == "LinearInFP8" and type(model.blocks[0].up) is nn.Linear
    is_the_model_in_fp8(rung, model, x)


@unit
def test_a_copy_has_parameters_of_its_own(has_fp8):
    for layer in (nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False).eval()):
        made = layers_in_fp8.by_transformer_engine(layer)
        other, x = copy.deepcopy(made), torch.randn(16, WIDTH)
        assert made.weight is layer.weight and other.weight is not layer.weight and other.training == layer.training
        assert torch.equal(other(x), made(x)) and other.use_bias == (layer.bias is not None)
        assert torch.allclose(copy.deepcopy(made).double()(x.double()), layer(x).double(), atol=1e-5)


def times_one_and_a_half(layer):
    layer.register_forward_hook(lambda module, given, y: 1.5 * y)


def without_its_weights_gradient(layer):
    forward = type(layer).forward
    layer.forward = lambda x: forward(layer, x).detach() + 0 * x.sum()


WRONG = {"without its bias": lambda layer: setattr(layer, "use_bias", False),
         "scaled": times_one_and_a_half, "without gradients": without_its_weights_gradient}


@unit
@pytest.mark.parametrize("paths, expected", [
    (("blocks.0.up", "blocks.1.up"), ["blocks.*.up"]), (("blocks.0.up",), ["blocks.0.up"]),
    (("blocks.0.up", "blocks.1.up", "blocks.0.down", "blocks.1.down"), ["blocks.*.up", "blocks.*.down"])])
def test_a_star_stands_for_what_was_chosen_alone(paths, expected):
    model, _ = made()
    assert patterns(paths, model) == expected


@integration
def test_what_is_written_is_what_was_tried(has_fp8, monkeypatch):
    recipes = SimpleNamespace(Float8CurrentScaling=Made.Float8CurrentScaling)
    for name, module in {"transformer_engine": SimpleNamespace(pytorch=MODULES), "transformer_engine.pytorch": MODULES,
                         "transformer_engine.common": SimpleNamespace(recipe=recipes),
                         "transformer_engine.common.recipe": recipes}.items():
        monkeypatch.setitem(sys.modules, name, module)
    model, x = made()
    program = program_of(model, x)
    [found] = fp8.find(program)
    code = fp8.advice(program, found)
    assert "['blocks.*.up']" in code.code and not code.wraps
    rung = rung_of(model, x)
    written = AsWritten(made()[0], code.code, "output = model(*inputs)")
    assert type(written.module.blocks[1].up).__name__ == "LinearInFP8"
    assert torch.equal(written(x), rung(x))


@pytest.fixture
def has_torchao(has_fp8, monkeypatch):
    """Beside Transformer Engine, faster where that is slower, and emulated: a CPU multiplies nothing in FP8. Dynamo
    captures its layers, and no test waits for Inductor."""
    torchao = pytest.importorskip("torchao.float8")
    compile_by = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_by(module, backend="eager"))
    right = layers_in_fp8.by_torchao
    emulated_there = torchao.Float8LinearConfig(emulate=True)
    monkeypatch.setattr(layers_in_fp8, "by_torchao", lambda layer: right(layer, emulated_there))
    monkeypatch.setattr(layers_in_fp8, "LIBRARIES", {each.name: each for each in (TRANSFORMER_ENGINE, TORCHAO)})
    of_the_other = layers_in_fp8.timed
    monkeypatch.setattr(layers_in_fp8, "timed", lambda size, mode, device, library: (
        (1.6, 1.5, 1.7) if library is TORCHAO else of_the_other(size, mode, device, library)))


@unit
@pytest.mark.parametrize("of_other, chosen, layers, beside", [
    (1.3, "torchao", 4, "by Transformer Engine: 1.50, 0.90"), (1.1, "Transformer Engine", 2, "by torchao: 1.10, 1.10")])
def test_the_library_that_saves_most_is_chosen(of_other, chosen, layers, beside, has_fp8, monkeypatch):
    """One has half of the layers 1.5 times as fast, the other one all of them."""
    other, of_the_engine = replace(TORCHAO, import_error=lambda: ""), layers_in_fp8.timed
    monkeypatch.setattr(layers_in_fp8, "LIBRARIES", {each.name: each for each in (TRANSFORMER_ENGINE, other)})
    monkeypatch.setattr(layers_in_fp8, "timed", lambda size, mode, device, library: (
        (of_other, of_other - 0.02, of_other + 0.02) if library is other
        else of_the_engine(size, mode, device, library)))
    model, x = made()
    [found] = fp8.find(program_of(model, x))
    assert found.library == chosen and len(found.modules) == layers
    assert f"linear layers by {chosen}, " in found.reason and beside in found.reason


@unit
@pytest.mark.parametrize("failing", [["torchao"], ["Transformer Engine", "torchao"]], ids=["one", "both"])
def test_a_library_that_does_not_run_leaves_the_other(failing, has_fp8, monkeypatch):
    libraries = TRANSFORMER_ENGINE, replace(TORCHAO, import_error=lambda: "")
    monkeypatch.setattr(layers_in_fp8, "LIBRARIES", {each.name: each for each in libraries})

    def timed(size, mode, device, library):
        if library.name in failing:
            raise RuntimeError(f"{library.name} was built for another torch")
        return 1.5, 1.4, 1.6
    monkeypatch.setattr(layers_in_fp8, "timed", timed)
    model, x = made()
    [found] = fp8.find(program_of(model, x))
    in_words = "torchao: RuntimeError: torchao was built for another torch"
    if len(failing) == 1:
        assert found.library == "Transformer Engine" and found.can_be_tried and in_words in found.reason
    else:
        assert not found.can_be_tried and found.why_not.endswith(in_words) and found.reason.startswith("4 of 5")


@unit
@pytest.mark.parametrize("errors, said", [
    (("gone", "none"), "Transformer Engine does not import: gone; torchao does not import: none"),
    (("gone", ""), ""), (("", "none"), "")])
def test_one_of_the_libraries_is_enough(errors, said, monkeypatch):
    libraries = (replace(each, import_error=lambda error=error: error)
                 for each, error in zip((TRANSFORMER_ENGINE, TORCHAO), errors, strict=True))
    monkeypatch.setattr(layers_in_fp8, "LIBRARIES", {each.name: each for each in libraries})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert fp8.missing(torch.device("cuda")) == said


@integration
@pytest.mark.parametrize("others", [(), (autocast.TECHNIQUE,)])
def test_it_is_the_same_model_by_torchao(others, has_torchao):
    model, x = made()
    rung = rung_of(model, x, (*others, fp8.TECHNIQUE))
    assert len(rung.plan.in_fp8) == 4
    is_the_model_in_fp8(rung, model, x)


@integration
@pytest.mark.parametrize("library, wrong", [
    *(("by_transformer_engine", wrong) for wrong in WRONG),
    ("by_torchao", "scaled"), ("by_torchao", "without gradients")])
def test_a_wrong_one_is_unsafe(library, wrong, request, monkeypatch):
    request.getfixturevalue("has_torchao" if library == "by_torchao" else "has_fp8")
    right = getattr(layers_in_fp8, library)

    def spoilt(layer):
        made = right(layer)
        WRONG[wrong](made)
        return made
    monkeypatch.setattr(layers_in_fp8, library, spoilt)
    model, x = made()
    rung = rung_of(model, x)
    assert not validate(rung, model, (x,), numerics=rung.plan.numerics).passed


@integration
def test_what_is_written_for_torchao_is_what_was_tried(has_torchao, monkeypatch):
    torchao = sys.modules["torchao.float8"]
    monkeypatch.setattr(torchao, "convert_to_float8_training", functools.partial(
        torchao.convert_to_float8_training, config=torchao.Float8LinearConfig(emulate=True)))
    model, x = made()
    program = program_of(model, x)
    [found] = fp8.find(program)
    code = fp8.advice(program, found)
    assert "['blocks.*.up', 'blocks.*.down']" in code.code and not code.wraps
    written = AsWritten(made()[0], code.code, "output = model(*inputs)")
    assert type(written.module.blocks[1].up).__name__ == "Float8Linear" and type(written.module.head) is nn.Linear
    assert torch.equal(written(x), rung_of(model, x)(x))


@integration
def test_the_whole_assistant_with_it(has_fp8):
    """How fast the emulation is tells nothing: it was judged, timed and told."""
    model, x = made()
    result = optimize(model, x, quick=True, techniques=(replace(fp8.TECHNIQUE, missing=lambda device: ""),))
    [one] = result.opportunities
    assert one.verdict in ("no gain", "different numerics") and one.speedup and not result.failures, result
    assert one.error and result.judgements["fp8"].numerics == "float8"


@integration
def test_it_is_written_before_the_model_is_compiled(has_fp8):
    model, x = made()
    program = program_of(model, x)
    [wrapping] = [compiled.advice(program, each) for each in compiled.find(program)]
    [found] = fp8.find(program)
    assert wrapping.wraps and not fp8.advice(program, found).wraps
    assert fp8.advice(program, replace(found, modules=())) is None


@unit
def test_its_work_is_counted_in_fp8():
    model, x = made()
    program = program_of(model, x)
    plan = plan_of([autocast.TECHNIQUE])
    plan.in_fp8 = ("blocks.0.up",)
    arithmetic = arithmetic_of(plan, torch.device("cpu"))
    calls = [call for call in program.trace.calls if call.name == "linear"]
    assert [arithmetic(call) for call in calls] == ["float8", *["bfloat16"] * 4] and bytes_of("float8") == 1
