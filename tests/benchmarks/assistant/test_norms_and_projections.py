"""Norms by hand and linear layers on one input: found, rewritten, the same function, and their advice can be pasted."""
import copy
import dataclasses
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: F401 - what is pasted in here calls it

from benchmarks.assistant import optimize, source
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.techniques import compiled, fused_qkv, library_norm, sdpa
from benchmarks.measure.calls import Inputs
from benchmarks.study import validate
from common.block.evidence import observe
from tests.helpers import layer_spellings as spellings
from tests.helpers.pasting import pasted

X = torch.randn(2, 8, spellings.WIDTH, generator=torch.Generator().manual_seed(0))
RIGHT = [*((spelling, library_norm.TECHNIQUE) for spelling in spellings.NORMS),
         *((spelling, fused_qkv.TECHNIQUE) for spelling in spellings.SIBLINGS)]
EACH = pytest.mark.parametrize("spelling, technique", RIGHT, ids=lambda value: getattr(value, "__name__", ""))


def made(spelling):
    torch.manual_seed(1)
    return spelling()


def is_same(other, model):
    judgement = validate(other, model, (X,))
    assert judgement.passed and judgement.outputs_proven, judgement


@pytest.mark.integration
@EACH
def test_it_is_found_and_rewritten(spelling, technique):
    model = made(spelling)
    program = read(model, Inputs.of(X))
    (found,) = technique.find(program)
    assert found.place.file == spellings.__file__ and not found.why_not and found.count == 1
    assert found.place.function.partition(".")[0] in {each.__name__ for each in spelling.__mro__}
    is_same(Rung(model, [technique]), model)


@pytest.mark.integration
@EACH
def test_its_advice_can_be_pasted(spelling, technique, tmp_path):
    model = made(spelling)
    program = read(model, Inputs.of(X))
    (found,) = technique.find(program)
    advice = technique.advice(program, found)
    if spelling is spellings.RMSNormOfLlama:             # its cast stands in another function
        return
    other = made(getattr(pasted(advice, spellings, tmp_path / "pasted.py"), spelling.__name__))
    is_same(other, model)
    if spelling is not spellings.LayerNormThatKeepsItsMean:            # the mean is still there
        assert not technique.find(read(other, Inputs.of(X))), advice.code


@pytest.mark.integration
@pytest.mark.parametrize("spelling, cast", [(spellings.RMSNormOfT5, True), (spellings.RMSNormByPowers, False)])
def test_in_16_bits_what_it_gives_keeps_its_dtype(spelling, cast, tmp_path):
    model, x = made(spelling).bfloat16(), X.bfloat16()
    program = read(model, Inputs.of(x))
    (found,) = library_norm.TECHNIQUE.find(program)
    advice = library_norm.advice(program, found)
    assert advice.code.endswith(".to(torch.float32)") == cast
    other = made(getattr(pasted(advice, spellings, tmp_path / "pasted.py"), spelling.__name__)).bfloat16()
    judgement = validate(other, model, (x,))
    assert judgement.passed and judgement.outputs_proven, f"{advice.code}\n{judgement}"


def not_written(program, found):
    raise NotWritten("its norm is used more than once")


@pytest.mark.integration
@pytest.mark.parametrize("advice", [library_norm.advice, not_written, lambda program, found: None],
                         ids=["written", "not written", "not read"])
def test_nobody_is_told_to_edit_an_installed_file(monkeypatch, studies_in_seconds, advice):
    """Nor why there is no code for lines that nobody edits."""
    monkeypatch.setattr(source, "_INSTALLED", (spellings.__file__,))
    technique = dataclasses.replace(library_norm.TECHNIQUE, advice=advice)
    result = optimize(made(spellings.LayerNormByMeans), (X,), quick=True, techniques=(technique,))
    (one,) = result.opportunities
    assert one.speedup and one.advice is None
    assert "stands in an installed package" in one.why and "no code is written" not in one.why
    assert "write this" not in str(result)


@pytest.mark.integration
def test_the_librarys_norm_runs():
    rung = Rung(made(spellings.LayerNormByMeans), [library_norm.TECHNIQUE])
    rung(X)
    assert "aten::native_layer_norm" in observe(lambda: rung(X), X.device)


@pytest.mark.integration
@pytest.mark.parametrize("spelling", spellings.OTHER_FUNCTIONS, ids=lambda spelling: spelling.__name__)
def test_another_function_is_left_as_it_is(spelling):
    model = made(spelling)
    found = library_norm.find(read(model, Inputs.of(X)))
    assert all(each.why_not for each in found)
    is_same(Rung(model, [library_norm.TECHNIQUE]), model)


@pytest.mark.unit
def test_an_unbiased_variance_says_so():
    (found,) = library_norm.find(read(made(spellings.UnbiasedLayerNorm), Inputs.of(X)))
    assert "unbiased" in found.why_not


@pytest.mark.unit
@pytest.mark.parametrize("spelling", [spellings.EpsilonOutside, spellings.StandardDeviation,
                                      spellings.OfItsLengthAndMore])
def test_an_epsilon_outside_of_the_root_says_so(spelling):
    (found,) = library_norm.find(read(made(spelling), Inputs.of(X)))
    assert "outside of the root" in found.why_not


@pytest.mark.unit
def test_statements_that_something_else_needs_stay_with_their_comments():
    program = read(made(spellings.LayerNormThatKeepsItsMean), Inputs.of(X))
    lines = library_norm.advice(program, *library_norm.find(program)).code.splitlines()
    assert lines == ["mean = x.mean(-1, keepdim=True)",
                     "# It is added below.", "twice = 2 * x",
                     "return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps=self.eps) + twice, mean"]


class OfTwoEpsilons(torch.nn.Module):
    """One helper with an epsilon that its callers give."""

    @staticmethod
    def norm(x, epsilon=1e-6):
        return x * torch.rsqrt(epsilon + x.pow(2).mean(-1, keepdim=True))

    def forward(self, x):
        return self.norm(x) + self.norm(0.01 * x, 0.1)


class OfTheModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.variance_epsilon = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.integration
@pytest.mark.parametrize("kind, epsilon, how_many", [
    (OfTwoEpsilons, "epsilon", 2), (OfTheModule, "self.variance_epsilon", 1)])
def test_an_epsilon_with_a_name_keeps_it(kind, epsilon, how_many, tmp_path):
    program = read(kind(), Inputs.of(X))
    [found] = library_norm.find(program)
    advice = library_norm.advice(program, found)
    assert found.count == how_many and advice.code == f"return F.rms_norm(x, x.shape[-1:], eps={epsilon})"
    written = pasted(advice, sys.modules[__name__], tmp_path / "named.py")
    is_same(getattr(written, kind.__name__)(), kind())


class WithAHelper(torch.nn.Module):
    """The weight stands in another function than the norm."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(spellings.WIDTH)), 1e-6

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self.norm(x) * self.weight


class WithAHelperAndCasts(WithAHelper):
    """As Llama's reference has it: the function that calls does the casts, and so all of the norm."""

    def forward(self, x):
        return self.norm(x.float()).type_as(x) * self.weight


@pytest.mark.integration
@pytest.mark.parametrize("kind, code", [
    (WithAHelper, "return F.rms_norm(x, x.shape[-1:], eps=self.eps)"),
    (WithAHelperAndCasts, "return F.rms_norm(x, x.shape[-1:], self.weight, eps=1e-06)")])
def test_a_norm_in_a_function_of_its_own_is_written_where_all_of_it_stands(kind, code, tmp_path):
    torch.manual_seed(0)
    model = kind()
    program = read(model, Inputs.of(X))
    [found] = library_norm.find(program)
    advice = library_norm.advice(program, found)
    assert advice.code == code
    written = getattr(pasted(advice, sys.modules[__name__], tmp_path / "helper.py"), kind.__name__)()
    written.load_state_dict(model.state_dict())
    is_same(written, model)


class CalledWithACast(torch.nn.Module):
    """As Mamba's block has it: what calls the norm casts for reasons of its own."""

    def __init__(self):
        super().__init__()
        self.norm = spellings.RMSNormOfT5()

    def forward(self, x):
        return self.norm(x.to(dtype=torch.float32))


@pytest.mark.integration
def test_a_cast_in_another_function_is_none_of_the_norms_lines():
    [found] = library_norm.find(read(CalledWithACast(), Inputs.of(X.double())))
    assert found.place.function == "RMSNormOfT5.forward"
    model = CalledWithACast().eval()
    is_same(Rung(model, [library_norm.TECHNIQUE]), model)


@pytest.mark.unit
def test_layers_of_several_modules_are_no_group():
    """Each module would need the weights of the others."""
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.value = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, memory):
            return self.key(memory) * self.value(memory)

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

        def forward(self, memory):
            return sum(layer(memory) for layer in self.layers)
    model = Decoder()
    found = fused_qkv.find(read(model, Inputs.of(torch.randn(4, 8))))
    assert {each.reason for each in found} == {"2 linear layers on one input, 8 + 8 wide"}
    assert sum(each.count for each in found) == 3
    judgement = validate(Rung(model, [fused_qkv.TECHNIQUE]), model, (torch.randn(4, 8),))
    assert judgement.passed, judgement


def every_other(y):
    """Of the last dimension, read by the strides that it has: Dynamo writes them into its graph."""
    return y.as_strided((*y.shape[:-1], y.size(-1) // 2), (*y.stride()[:-1], 2 * y.stride(-1)))


class OneIsReadByStrides(spellings.Three):
    """As Longformer's overlapping chunks are."""

    def forward(self, x):
        return torch.cat([every_other(self.q(x)), self.k(x), self.v(x)], -1).sin()


class NormReadByStrides(nn.Module):
    def forward(self, x):
        x = x.transpose(0, 1)
        return every_other(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).sin()


class AttentionReadByStrides(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return every_other((q @ q.transpose(-1, -2) / q.size(-1)**0.5).softmax(-1) @ q).sin()


@pytest.mark.integration
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("kind, technique", [
    (OneIsReadByStrides, fused_qkv.TECHNIQUE), (NormReadByStrides, library_norm.TECHNIQUE),
    (AttentionReadByStrides, sdpa.TECHNIQUE)], ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_read_by_strides_lies_as_it_did(kind, technique, compiles, fresh_dynamo):
    model = made(kind)
    assert any(each.can_be_tried for each in technique.find(read(model, Inputs.of(X))))
    is_same(Rung(model, [technique, *[compiled.TECHNIQUE] * compiles]), model)


@pytest.mark.unit
def test_layers_under_other_settings_are_no_group():
    """One without gradients, one in BF16, and the two that are alike."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.target, self.low, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            with torch.no_grad():
                target = self.target(x)
            with torch.autocast("cpu", torch.bfloat16):
                low = self.low(x)
            return self.key(x) * self.value(x) + target + low
    [found] = fused_qkv.find(read(Model(), Inputs.of(X[..., :8])))
    assert found.reason == "2 linear layers on one input, 8 + 8 wide"


@pytest.mark.unit
def test_one_weight_that_is_used_twice_is_no_group():
    assert not fused_qkv.find(read(made(spellings.OneWeightTwice), Inputs.of(X)))


@pytest.mark.unit
def test_a_layer_that_is_called_in_each_step_of_a_loop_is_no_group():
    class Called(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.value = torch.nn.Linear(X.size(-1), 8), torch.nn.Linear(X.size(-1), 8)

        def forward(self, x):
            return self.value(x) + sum(self.key(x)[:, step].mean() for step in range(4))
    assert not fused_qkv.find(read(Called(), Inputs.of(X)))


class OfParameters(torch.nn.Module):
    """Queries, keys and values by parameters that belong to no layer."""
    shapes = ((spellings.WIDTH, 8),) * 3

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(shape) for shape in self.shapes)

    def forward(self, x):
        q, k, v = (x @ weight for weight in self.weights)
        return q + k * v


class OfHeads(OfParameters):
    shapes = ((2, spellings.WIDTH, 4),) * 2 + ((1, spellings.WIDTH, 4),)

    def forward(self, x):
        q, k, v = (torch.einsum("bsd,hde->bhse", x, weight) for weight in self.weights)
        return q + k * v


class OfOne(OfParameters):
    """The products are of other tensors, of one parameter twice, or no product of x and a parameter."""

    def forward(self, x):
        first, second, _ = self.weights
        y = x @ first + (x + 1) @ second
        return y + x.sin() @ first + x.sin() @ first + (x @ x.mT) @ y


@pytest.mark.integration
@pytest.mark.parametrize("kind, counts", [(OfParameters, [3]), (OfHeads, [3]), (OfOne, [])])
def test_products_with_parameters_of_a_module_are_named_for_a_person(kind, counts):
    found = fused_qkv.find(read(made(kind), Inputs.of(X)))
    assert [each.reason for each in found] == [
        f"{count} products of one tensor, each with a parameter of its own" for count in counts]
    assert all("side by side" in each.by_hand and not each.can_be_tried for each in found)


@pytest.mark.integration
def test_an_rms_norm_of_an_installed_package_gives_way_to_that_of_torch():
    """Llama's stands in transformers: nobody edits that."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=1, use_cache=False, rms_norm_eps=1e-4)
    model, tokens = transformers.LlamaForCausalLM(config), torch.randint(32, (2, 8))
    for weight in (each.weight for each in model.modules() if type(each).__name__ == "LlamaRMSNorm"):
        weight.data.uniform_(0.5, 1.5)
    program = read(model, Inputs.of({"input_ids": tokens}))
    (found,) = library_norm.find(program)
    advice = library_norm.TECHNIQUE.advice(program, found)
    assert advice.place is None and "torch.nn.RMSNorm(child.weight.shape, eps=0.0001)" in advice.code
    before, names = copy.deepcopy(model), list(dict(model.named_parameters()))
    exec(advice.code, {"model": model, "torch": torch})
    assert validate(model, before, {"input_ids": tokens}).passed
    assert list(dict(model.named_parameters())) == names                       # checkpoints stay as they are
    assert not library_norm.find(read(model, Inputs.of({"input_ids": tokens})))


@pytest.mark.unit
def test_a_model_that_is_itself_of_an_installed_package_is_held_by_nothing(monkeypatch):
    monkeypatch.setattr(source, "_INSTALLED", (spellings.__file__,))
    for model, is_held in ((OfT5(), False), (torch.nn.Sequential(OfT5()), True)):
        program = read(model, Inputs.of(X))
        (found,) = library_norm.find(program)
        assert not found.place.is_yours
        assert (library_norm.TECHNIQUE.advice(program, found).place is None) == is_held


class OfT5(spellings.RMSNormOfT5):
    def __init__(self):
        super().__init__()
        del self.bias


class NotCaptured(nn.Module):
    """What it calls is captured, each module by itself."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(OfT5() for _ in range(2))

    @torch.compiler.disable(recursive=False)
    def forward(self, x):
        for norm in self.norms:
            x = norm(x) + x
        return x


@pytest.mark.unit
def test_a_module_that_is_captured_by_itself_is_held_by_the_model(monkeypatch):
    """Dynamo's stack of modules does not name it."""
    monkeypatch.setattr(source, "_INSTALLED", (spellings.__file__,))
    program = read(NotCaptured(), Inputs.of(X))
    (found,) = library_norm.find(program)
    assert found.count == 2 and 'type(child).__name__ == "OfT5"' in library_norm.TECHNIQUE.advice(program, found).code


class FromOne(OfT5):
    """As Gemma's: its weight is what is beyond 1."""

    def forward(self, x):
        return super().forward(x) * (1 + 1 / self.weight)


@pytest.mark.unit
@pytest.mark.parametrize("module, epsilon, is_it", [
    (OfT5(), 1e-5, True), (OfT5(), 1.1e-5, False), (spellings.RMSNormOfT5(), 1e-5, False), (FromOne(), 1e-5, False),
    (torch.nn.RMSNorm(8, eps=1e-6), 1e-6, True), (torch.nn.LayerNorm(8), 1e-5, False),
    (torch.nn.RMSNorm(8, eps=1e-6, elementwise_affine=False), 1e-6, False), (torch.nn.PReLU(8), 1e-6, False)])
def test_a_module_is_an_rms_norm_if_it_computes_nothing_else(module, epsilon, is_it):
    assert library_norm._is_rms_norm(module, epsilon) == is_it
