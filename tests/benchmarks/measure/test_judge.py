"""The judge, on modules that are right and modules that are wrong: by the name of the tensor."""
import copy
import itertools
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.examples import pairs
from benchmarks.examples.pairs import LIBRARY, RIGHT, WRONG, Pair, fused, gelu, random, tensor
from benchmarks.measure import hints, judge, refreshing
from benchmarks.measure.bounds import DRAWS_OTHERS, NOT_TWICE, Standard
from benchmarks.measure.calls import Inputs, Step, are_looked_up, meanwhile_off_by_a_rounding, tables_of
from benchmarks.measure.checks import CHANNELS_LAST, Check, Judgement
from benchmarks.measure.judge import Judge, validate
from benchmarks.measure.keeping import uncompiled_meanwhile
from benchmarks.measure.names import buffer, gradient_of, output
from benchmarks.measure.observing import Observation, RoundedAnew, Work, exact_in
from benchmarks.measure.truth import CONTRADICTS, Truth, further_in_all
from common import BlockConfig, parameters, steps
from tests.helpers.deep_network import Deep

DTYPES = [torch.float32, torch.bfloat16]

# The tensor by which each mistake is found, in FP32 and in BF16.
FOUND_BY = {
    "the polarity of a mask": "output", "the scale left out": "output", "1/D for a scale": "output",
    "the diagonal of a mask": "output", "no mask": "output", "dropout that is gone": "output with dropout",
    "dropout of twice the rate": "output with dropout, its variance", "heads repeated in another order": "output",
    "an epsilon of 1e-6": "output", "the unbiased variance": "output", "GELU without tanh": "output",
    "a transposed weight": "output", "stale statistics of BatchNorm": "output",
    "statistics that are not kept": "buffer running_mean", "a head that is not tied": "gradient of wte.weight",
    "another dtype": "output", "a parameter's gradient lost": "gradient of fc.weight",
    "no_grad inside": "gradient of input 0", "keys detached": "gradient of attn.qkv.weight",
    "a gradient halved": "gradient of input 0", "a gradient of zeros": "gradient of input 0",
    "a gradient off by 3 %": "gradient of input 0", "a gradient of another sequence": "gradient of input 0",
    "a detached input": "output", "its input changed in place": "input 0",
    "an output that is written over": "output", "a token number off by one": "output",
}


def judged(pair: Pair, **options) -> Judgement:
    return validate(pair.candidate, pair.reference, pair.inputs, **options)


def failed(judgement: Judgement) -> set[str]:
    return {check.name for check in judgement if not check.passed}


# ------------------------------------------------------------------------------------------------------ right and wrong


@pytest.mark.unit
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name, dtype):
    judgement = judged(RIGHT[name](dtype))
    assert judgement.passed and judgement.outputs_proven, judgement
    meant = [check for check in judgement if check.question == "meaning"]
    assert meant and all(check.proven for check in meant)
    assert {check.question for check in judgement} >= {"meaning", "precision"}


class WithoutBackward(nn.Module):
    """2 x + b, times a factor, where no gradient is recorded; it raises where one is."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor, self.bias = factor, nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("it has no backward")
        return self.factor * (2 * x + self.bias)


class Plain(WithoutBackward):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + self.bias


@pytest.mark.unit
@pytest.mark.parametrize("factor, wrong", [(1.0, set()), (1.001, {"output"})])
def test_what_has_no_backward_is_judged_where_the_forward_alone_counts(factor, wrong):
    candidate, x = WithoutBackward(factor), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    alone = Work(Inputs.of((x,)), forward_only=True)
    judgement = Judge(candidate, Truth(Plain(1.0), alone)).judge()
    assert {check.of.words for check in judgement if not check.passed} == wrong, judgement
    assert not any("gradient of" in check.name for check in judgement)
    with pytest.raises(RuntimeError, match="it has no backward"):
        Judge(candidate, Truth(Plain(1.0), replace(alone, forward_only=False))).judge()


class WithGradientsAlone(nn.Linear):
    def forward(self, x):
        assert torch.is_grad_enabled()
        return super().forward(x)


@pytest.mark.unit
def test_what_is_not_timed_without_gradients_is_not_called_so():
    truth = Truth(nn.Linear(8, 8), Work(Inputs.of(tensor(4, 8))))
    with pytest.raises(AssertionError):
        Judge(WithGradientsAlone(8, 8), truth).judge()
    judgement = Judge(WithGradientsAlone(8, 8), truth, forward_alone=False).judge()
    assert judgement.proven
    assert not any("alone" in check.name for check in judgement)


@pytest.mark.unit
def test_every_mistake_has_its_tensor_here():
    assert FOUND_BY.keys() == WRONG.keys() and len(WRONG) >= 20 and len(RIGHT) >= 12


@pytest.mark.unit
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_by_the_name_of_the_tensor(name, dtype):
    judgement = judged(WRONG[name](dtype))
    assert not judgement.passed and FOUND_BY[name] in failed(judgement)
    assert judgement.worst.name in failed(judgement) and f"the {judgement.worst.name}" in judgement.failure


@pytest.mark.unit
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_does_not_fail_the_reference_against_itself(name):
    """What makes a wrong pair wrong is the candidate: the reference passes in its place."""
    pair = WRONG[name](torch.float32)
    judgement = validate(copy.deepcopy(pair.reference), pair.reference, pair.inputs)
    assert judgement.passed and judgement.proven, judgement


@pytest.mark.integration
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LIBRARY)
def test_models_of_transformers_pass_with_sdpa_against_eager(name, dtype):
    pytest.importorskip("transformers")
    judgement = judged(LIBRARY[name](dtype))
    assert judgement.passed and judgement.outputs_proven, judgement


@pytest.mark.stress
@pytest.mark.parametrize("train, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_resnet_50_passes_in_channels_last(dtype, train):
    pytest.importorskip("torchvision")
    judgement = judged(pairs.resnet_50(train, channels_last=True)(dtype), cotangents=1)
    assert judgement.passed, judgement.failure


@pytest.mark.integration
@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "in place"])
def test_a_compiled_module_passes(in_place):
    torch.manual_seed(0)
    pair = pairs.alike(pairs.LayerNorm(), pairs.LayerNorm(), torch.float32, tensor(4, 16))
    if in_place:
        pair.candidate.compile()
    compiled = pair.candidate if in_place else torch.compile(pair.candidate)
    judgement = validate(compiled, pair.reference, pair.inputs)
    assert judgement.passed and judgement.proven, judgement
    assert judgement.counted() == "1 output, 3 gradients"


# -------------------------------------------------------------------------------------------------- two questions apart


@pytest.mark.unit
def test_a_wrong_precision_fails_where_the_meaning_is_right():
    """What is timed is another function than its FP64 copy: only the object itself shows it."""
    def halves_in_fp32(x: Tensor) -> Tensor:
        return gelu(x) if x.dtype == torch.float64 else 1.5 * gelu(x)
    judgement = validate(halves_in_fp32, gelu, tensor(4, 8))
    assert failed(judgement) == {"output", "output without gradients", "gradient of input 0"}
    assert all(check.passed for check in judgement if check.question == "meaning")


class Masked(nn.Module):
    """With a constant buffer, as most GPTs have one; `factor` makes it wrong."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.linear(x) @ self.mask.to(x.dtype)


@pytest.mark.unit
@pytest.mark.parametrize("factor, passes", [(1.0, True), (1 + 1e-7, False)])
def test_a_constant_that_both_have_widens_nothing(factor, passes):
    """An error that FP32 would hide is one in FP64."""
    assert validate(Masked(factor), Masked(1.0), tensor(4, 8)).passed == passes


@pytest.mark.unit
def test_a_rougher_one_of_the_right_meaning_is_less_accurate_and_passes():
    def rough(x: Tensor) -> Tensor:
        return gelu(x) if x.dtype == torch.float64 else gelu(x.bfloat16()).float()
    judgement = validate(rough, gelu, tensor(64, 64))
    assert judgement.passed
    assert judgement.less_accurate and all(1e-4 < check.error < 0.1 for check in judgement.less_accurate)


@pytest.mark.unit
def test_hooks_of_the_object_itself_are_judged():
    """A deep copy drops the hooks of tensors: the object that is timed has them."""
    pair = RIGHT["a block with SDPA"](torch.float32)
    pair.candidate.mlp.fc.weight.register_hook(lambda gradient: gradient / 2)
    assert failed(judged(pair)) == {"gradient of mlp.fc.weight"}


@pytest.mark.unit
@pytest.mark.parametrize("change", [torch.zeros_like, lambda gradient: gradient / 2, lambda gradient: -gradient])
def test_a_wrong_gradient_is_no_kink(change):
    """A block of ReLUs is asked how far a rounding moves its gradients; that excuses no gradient that is wrong."""
    pair = RIGHT["a residual block in train mode"](torch.float32)
    pair.candidate.conv_1.weight.register_hook(change)
    assert failed(judged(pair)) == {"gradient of conv_1.weight"}


@pytest.mark.unit
def test_a_kink_that_rounding_reaches_is_not_less_accurate():
    """FP16 falls to the same side of it as the candidate; so does FP32, off by a rounding."""
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    x[3] = torch.tensor([1.0, -1.0 + 2**-24])
    judgement = validate(lambda x: torch.relu((x.sum(-1) + 1) - 1), lambda x: torch.relu(x.sum(-1)), x)
    assert judgement.passed and not judgement.less_accurate, judgement
    [gradient] = [check for check in judgement if check.of.kind.is_gradient and check.question == "precision"]
    assert gradient.error > 0.05


@pytest.mark.unit
@pytest.mark.parametrize("numerics", ["bfloat16", "float8"])
def test_declared_numerics_widen_the_precision_and_not_the_meaning(numerics):
    class Autocast(pairs.Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
                return super().forward(x)
    pair = pairs.alike(pairs.Block(), Autocast(), torch.float32, tensor(2, 12, 16))
    assert judged(pair, numerics=numerics).passed
    wrong = pairs.alike(pairs.Block(), Autocast(mlp=lambda: pairs.MLP("none")), torch.float32, tensor(2, 12, 16))
    assert not judged(wrong, numerics=numerics).passed


@pytest.mark.unit
def test_a_dtype_that_changes_passes_where_it_is_declared():
    pair = WRONG["another dtype"](torch.float32)
    assert "declare that by numerics" in judged(pair).failure
    assert judged(pair, numerics="float16").passed


# ----------------------------------------------------------------------------------------------- what has no FP64 truth


def only_in_16_bits(x: Tensor) -> Tensor:
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("only for 16 bits")
    return gelu(x)


@pytest.mark.unit
def test_a_kernel_for_16_bits_is_judged_there_and_that_is_said():
    judgement = validate(only_in_16_bits, gelu, tensor(16, 32, dtype=torch.bfloat16))
    assert judgement.passed and any("no FP64 (RuntimeError: only for 16 bits)" in note for note in judgement.notes)
    assert {check.question for check in judgement} == {"precision"}
    wrong = validate(lambda x: only_in_16_bits(x) * 1.5, gelu, tensor(16, 32, dtype=torch.bfloat16))
    assert failed(wrong) == {"output", "output without gradients", "gradient of input 0"}


@pytest.mark.unit
def test_a_reference_without_fp64_is_no_oracle():
    judgement = validate(gelu, only_in_16_bits, tensor(16, 32, dtype=torch.bfloat16))
    assert judgement.passed and judgement.truth.startswith("the reference in bfloat16, no oracle: RuntimeError: only")


@pytest.mark.unit
def test_a_module_that_can_not_be_copied_is_judged_all_the_same():
    class HoldsALock(nn.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(width, width)
            self.lock = threading.Lock()
    torch.manual_seed(0)
    reference = random(nn.Linear(8, 8), torch.float32)
    candidate = HoldsALock(8)
    candidate.load_state_dict(reference.state_dict())
    judgement = validate(candidate, reference, tensor(4, 8))
    assert judgement.passed and any(note.startswith("no FP64 (TypeError: cannot pickle") for note in judgement.notes)


@pytest.mark.unit
def test_a_bound_as_large_as_the_tensor_is_unproven():
    """In 16 bits a small difference of large numbers is lost, by the reference too."""
    def cancels(x: Tensor) -> Tensor:
        return (x + 1000) - 1000
    judgement = validate(cancels, lambda x: (x + 1000) - 1000, tensor(16, 16, dtype=torch.bfloat16))
    output = next(check for check in judgement if (check.name, check.question) == ("output", "precision"))
    assert output.passed and not output.proven and "as large as the tensor" in output.reason


@pytest.mark.unit
def test_a_reference_that_changes_from_call_to_call_proves_nothing():
    """By what can't be put back."""
    counted = itertools.count(1)
    judgement = validate(gelu, lambda x: x * next(counted), tensor(4, 4))
    assert judgement.passed and not judgement.proven and not judgement.outputs_proven
    assert all("not give the same twice" in check.reason for check in judgement if check.name == "output")


@pytest.mark.unit
def test_other_random_numbers_are_told_as_such():
    def draws_one_more(x: Tensor) -> Tensor:
        torch.rand(1)
        return x + torch.rand_like(x)
    judgement = validate(draws_one_more, lambda x: x + torch.rand_like(x), tensor(4, 4))
    assert judgement.passed and not judgement.outputs_proven
    assert any("draws random numbers" in check.reason for check in judgement)


# ----------------------------------------------------------------------------------------------------- what is compared


@pytest.mark.unit
def test_outputs_of_every_structure_are_compared_by_path():
    def nested(x: Tensor) -> dict:
        return {"logits": x + 1, "more": (x * 2, [x.argmax(-1), None]), "count": 3}

    def off_by_one(x: Tensor) -> dict:
        return {"logits": x + 1, "more": (x * 2, [x.argmax(-1) + 1, None]), "count": 3}
    assert validate(nested, nested, tensor(4, 4)).proven
    assert failed(validate(off_by_one, nested, tensor(4, 4))) >= {"output['more'][1][0]"}


@pytest.mark.unit
@pytest.mark.parametrize("returned, said", [
    (lambda x: {"y": x}, "it is missing; it returns output['y']"), (lambda x: object(), "is a object"),
    (lambda x: None, "it returns no tensor"), (lambda x: x[:2], "its shape is (2, 4), the reference's (4, 4)"),
])
def test_outputs_that_can_not_be_compared_fail(returned, said):
    judgement = validate(returned, lambda x: x * 1, tensor(4, 4))
    assert not judgement.passed and said in judgement.failure


@pytest.mark.unit
def test_none_is_not_zero():
    """A gradient of zeros where the reference has none is a difference, and the other way round."""
    module = nn.Linear(4, 4)
    unused = copy.deepcopy(module)
    unused.forward = lambda x: F.linear(x, unused.weight)
    with_zero = copy.deepcopy(module)
    with_zero.forward = lambda x: F.linear(x, with_zero.weight) + 0 * with_zero.bias
    assert failed(validate(with_zero, unused, tensor(2, 4))) == {"gradient of bias"}
    assert failed(validate(unused, with_zero, tensor(2, 4))) == {"gradient of bias"}


@pytest.mark.unit
def test_a_parameter_without_a_partner_is_unproven_and_counted():
    class Renamed(nn.Module):
        def __init__(self, of: nn.Linear):
            super().__init__()
            self.w, self.bias = nn.Parameter(of.weight.detach().clone()), nn.Parameter(of.bias.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.w, self.bias)
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    judgement = validate(Renamed(reference), reference, tensor(2, 4))
    assert judgement.passed and not judgement.proven and "gradients" in judgement.counted()
    assert "2 of 4 gradients" in judgement.counted()
    paired = validate(Renamed(reference), reference, tensor(2, 4), parameters={"w": "weight"})
    assert paired.proven and paired.counted() == "1 output, 3 gradients"
    with pytest.raises(ValueError, match="parameters: there is no v; there are w, bias"):
        validate(Renamed(reference), reference, tensor(2, 4), parameters={"v": "weight"})


@pytest.mark.unit
def test_functions_are_compared_by_what_they_close_over():
    weight = tensor(4, 4).requires_grad_()
    loses = validate(lambda x: x @ weight.detach(), lambda x: x @ weight, tensor(2, 4))
    assert failed(loses) == {"gradient of weight"}
    assert validate(lambda x: (weight.mT @ x.mT).mT, lambda x: x @ weight, tensor(2, 4)).proven


@pytest.mark.unit
def test_other_values_are_replaced_by_the_references_and_that_is_said():
    torch.manual_seed(0)
    reference, candidate = random(pairs.Block(), torch.float32), pairs.Block(fused)
    own = {name: value.clone() for name, value in candidate.state_dict().items()}
    judgement = validate(candidate, reference, tensor(2, 12, 16))
    assert judgement.proven and any("started from other values" in note for note in judgement.notes)
    assert all(torch.equal(value, own[name]) for name, value in candidate.state_dict().items())


@pytest.mark.unit
def test_overwritten_outputs_pass_where_they_are_declared():
    pair = WRONG["an output that is written over"](torch.float32)
    assert judged(pair, overwrites_output=True).passed


# ------------------------------------------------------------------------------------------------- what a person passes


@pytest.mark.unit
@pytest.mark.parametrize("inputs", [tensor(2, 4), (tensor(2, 4),), [tensor(2, 4)], {"x": tensor(2, 4)}])
def test_inputs_in_every_form(inputs):
    assert validate(lambda x: gelu(x), lambda x: gelu(x), inputs).proven


@pytest.mark.unit
def test_integers_and_booleans_and_a_loss():
    torch.manual_seed(0)
    reference = random(pairs.GPT(), torch.float32)
    candidate = pairs.GPT(fused)
    candidate.load_state_dict(reference.state_dict())
    judgement = validate(candidate, reference, (pairs.tokens(),), loss=lambda logits: logits.logsumexp(-1).mean())
    assert judgement.proven and "gradient of wte.weight" in {check.name for check in judgement}
    masked = validate(lambda x, keep: x.where(keep, 0), lambda x, keep: x * keep, (tensor(4, 4), tensor(4, 4) > 0))
    assert masked.proven


@pytest.mark.unit
def test_without_gradients_the_forward_alone_is_compared():
    def labels(x: Tensor) -> Tensor:
        return x.argmax(-1)
    judgement = validate(labels, labels, tensor(4, 4))
    assert judgement.proven and judgement.counted() == "1 output"
    assert any("forward alone" in note for note in judgement.notes)


@pytest.mark.unit
def test_a_reference_under_no_grad_is_compared_by_its_forward():
    """Also where the candidate takes gradients."""
    layer = nn.Linear(4, 4)

    def without(x: Tensor) -> Tensor:
        with torch.no_grad():
            return layer(x)
    judgement = validate(layer, without, tensor(2, 4))
    assert judgement.proven and judgement.counted() == "1 output"


@pytest.mark.unit
def test_a_reference_that_is_finite_nowhere_proves_nothing():
    judgement = validate(gelu, gelu, torch.full((4, 4), torch.nan))
    assert judgement.passed and not judgement.outputs_proven


@pytest.mark.unit
def test_sparse_outputs_are_compared_as_dense_ones():
    assert validate(lambda x: x.relu().to_sparse(), lambda x: x.relu().to_sparse(), tensor(4, 4)).proven
    assert not validate(lambda x: x.to_sparse(), lambda x: x.relu().to_sparse(), tensor(4, 4)).passed


class Folded(nn.Module):
    """Its weight is kept as direction and length, each rounded to its dtype."""

    def __init__(self, of: nn.Linear, mistake: float = 0.0):
        super().__init__()
        length = of.weight.detach().norm(dim=1, keepdim=True)
        self.length, self.direction = nn.Parameter(length * (1 + mistake)), nn.Parameter(of.weight.detach() / length)
        self.bias = nn.Parameter(of.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.length * self.direction, self.bias)


@pytest.mark.unit
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_its_own_are_as_exact_as_they_were_rounded(dtype):
    """What is folded or split from the reference's parameters can't equal them in FP64."""
    torch.manual_seed(0)
    reference = nn.Linear(16, 16).to(dtype)
    inputs = tensor(8, 16, dtype=dtype)
    assert validate(Folded(reference), reference, inputs).passed
    wrong = validate(Folded(reference, 0.2), reference, inputs)
    assert "output" in failed(wrong)


@pytest.mark.unit
def test_a_scripted_module_passes():
    layer = nn.Linear(4, 4)
    assert validate(torch.jit.script(copy.deepcopy(layer)), layer, tensor(2, 4)).proven


@pytest.mark.unit
def test_a_frozen_reference_has_no_gradients_to_compare_but_the_inputs():
    reference = nn.Linear(4, 4).requires_grad_(False)
    judgement = validate(copy.deepcopy(reference), reference, tensor(2, 4))
    assert judgement.proven and judgement.counted() == "1 output, 1 gradient"


@pytest.mark.unit
@pytest.mark.parametrize("raises, said", [
    (lambda x: x.view(-1)[:3].view(7), "it raises RuntimeError: shape '[7]'"),
    (lambda: 1, "it raises TypeError: "), (lambda x: 1 / 0, "it raises ZeroDivisionError: division by zero")])
def test_what_a_candidate_raises_is_a_failed_check(raises, said):
    judgement = validate(raises, gelu, tensor(4, 4))
    assert not judgement.passed and said in judgement.failure


@pytest.mark.unit
@pytest.mark.parametrize("arguments, said", [
    ((gelu, gelu, "x"), "inputs: a str was given"), ((gelu, gelu, ()), "inputs: they hold no tensor"),
    ((gelu, lambda x, y: x, tensor(2, 2)), "the reference can't be called on these inputs: TypeError"),
])
def test_what_can_not_be_judged_is_one_line(arguments, said):
    with pytest.raises(ValueError, match=said):
        validate(*arguments)


@pytest.mark.unit
def test_unknown_numerics_name_the_known_ones():
    with pytest.raises(ValueError, match=r"numerics 'fp8': give one of tf32, float16, bfloat16, float8, int8, or None"):
        validate(gelu, gelu, tensor(2, 2), numerics="fp8")


# ---------------------------------------------------------------------------------------------------------------- state


def state_of(module: nn.Module) -> dict:
    tensors = {name: t.clone() for name, t in module.state_dict().items()}
    gradients = {name: None if t.grad is None else t.grad.clone() for name, t in module.named_parameters()}
    wanted = {name: t.requires_grad for name, t in module.named_parameters()}
    modes = {name: inner.training for name, inner in module.named_modules()}
    return {"tensors": tensors, "gradients": gradients, "wanted": wanted, "modes": modes,
            "p": [inner.p for inner in module.modules() if isinstance(inner, nn.Dropout)]}


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


class Everything(nn.Module):
    """BatchNorm, dropout, tied weights, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.norm(self.first(x))))


@pytest.mark.unit
@pytest.mark.parametrize("ends_by", ["success", "failure", "KeyboardInterrupt"])
def test_everything_is_afterwards_as_it_was(ends_by):
    torch.manual_seed(0)
    reference = Everything()
    candidate = copy.deepcopy(reference)
    for module in (reference, candidate):
        module(tensor(8, 8)).sum().backward()                      # a gradient from before
        module.second.eval()
    hooked = []
    candidate.norm.register_forward_hook(lambda *given: hooked.append(1))
    calls = {"number": 0}

    def changed(*given):
        calls["number"] += 1
        if ends_by == "KeyboardInterrupt" and calls["number"] == 3:
            raise KeyboardInterrupt
        return given[-1] * (2 if ends_by == "failure" else 1)
    candidate.first.register_forward_hook(changed)
    before = state_of(reference), state_of(candidate)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    if ends_by == "KeyboardInterrupt":
        with pytest.raises(KeyboardInterrupt):
            validate(candidate, reference, tensor(8, 8))
    else:
        assert validate(candidate, reference, tensor(8, 8)).passed == (ends_by == "success")
    assert same(state_of(reference), before[0]) and same(state_of(candidate), before[1])
    assert torch.equal(torch.rand(3), expected)
    assert candidate.second.weight is candidate.first.weight and hooked and len(candidate.norm._forward_hooks) == 1


@pytest.mark.unit
def test_the_callers_inputs_stay_as_they_are():
    x = tensor(4, 4).requires_grad_()
    given = x.detach().clone()
    validate(WRONG["its input changed in place"](torch.float32).candidate, gelu, x)
    assert torch.equal(x, given) and x.grad is None and x.requires_grad


# --------------------------------------------------------------------------------------------------------------- chance


@pytest.mark.unit
def test_dropout_by_a_function_is_off_for_the_comparison():
    class ByFunction(nn.Module):
        def __init__(self, p: float):
            super().__init__()
            self.p = p

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(gelu(x), self.p, self.training)
    right, wrong = ByFunction(0.3), ByFunction(0.1)
    inputs = tensor(16, 32)
    assert validate(copy.deepcopy(right), right, inputs).proven
    assert failed(validate(wrong, right, inputs)) == {"output with dropout, its variance"}
    assert validate(wrong.eval(), copy.deepcopy(right).eval(), inputs).proven


@pytest.mark.unit
def test_a_mode_that_differs_is_hinted_at():
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    in_eval = copy.deepcopy(module).eval()
    assert ".eval() missing" in validate(module, in_eval, tensor(8, 8)).failure
    assert ".train() missing" in validate(in_eval, module, tensor(8, 8)).failure


@pytest.mark.unit
@pytest.mark.parametrize("name, said", [
    ("the polarity of a mask", "it sees later positions"), ("a transposed weight", "transpose it"),
    ("GELU without tanh", "the other form of GELU"),
    ("an epsilon of 1e-6", "eps of LayerNorm is 1e-06, the reference's is 1e-05")])
def test_known_mistakes_are_hinted_at(name, said):
    assert said in judged(WRONG[name](torch.float32)).failure


@pytest.mark.unit
def test_a_scale_is_hinted_at():
    q, k, v = (tensor(2, 4, 12, 16, seed=seed) for seed in range(3))
    failure = validate(lambda q, k, v: pairs.by_hand(q, k, v, scale=1.0), fused, (q, k, v)).failure
    assert "is the scale of 1/sqrt(D) missing?" in failure
    assert "2 times the reference's" in validate(lambda q, k, v: 2 * fused(q, k, v), fused, (q, k, v)).failure


class FromZeros(nn.Module):
    """Its first state is made in whatever dtype is the default, as most recurrent models have it."""

    def __init__(self, first: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.first = nn.GRUCell(6, 8), first

    def forward(self, x):
        state = torch.zeros(x.size(0), 8) + self.first
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


@pytest.mark.unit
def test_a_state_in_the_default_dtype_is_in_fp64_where_all_else_is():
    judgement = validate(FromZeros(), FromZeros(), tensor(3, 5, 6))
    assert judgement.passed and judgement.has_oracle and judgement.truth == "FP64"
    assert not validate(FromZeros(1e-6), FromZeros(), tensor(3, 5, 6)).passed
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.unit
def test_the_default_dtype_is_restored_after_an_error():
    with pytest.raises(ZeroDivisionError), exact_in(torch.float64):
        assert torch.zeros(1).dtype == torch.float64
        1 / 0                                                                  # noqa: B018
    assert torch.get_default_dtype() == torch.float32
    with exact_in(torch.float32), exact_in(None):
        assert torch.zeros(1).dtype == torch.float32


class Mixing(nn.Module):
    """x -> x w, in each of several layers; with `turned` by the transposed weight."""

    def __init__(self, layers: int, turned: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(layers))
        self.turned = turned

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(x @ layer.weight if self.turned else layer(x))
        return x


@pytest.mark.unit
def test_a_weight_that_is_turned_in_each_layer_is_hinted_at():
    judgement = validate(Mixing(3, turned=True), Mixing(3), tensor(4, 8))
    assert "layers.*.weight is the wrong way round: transpose it" in judgement.failure


@pytest.mark.unit
@pytest.mark.parametrize("names", [3, hints.MOST_TRIALS, 20])
def test_no_more_than_a_few_weights_are_turned(names, monkeypatch):
    """A forward of a large model is not for nothing."""
    module = nn.Module()
    for place in range(names):
        setattr(module, f"weight_{'abcdefghijklmnopqrstuvwxyz'[place]}", nn.Parameter(torch.randn(8, 8)))
    module.forward = lambda x: x
    tried = []
    monkeypatch.setattr(hints, "_first_output", lambda *_: tried.append(1) or torch.ones(4))
    with torch.no_grad():
        assert hints._transposed(module, module, torch.zeros(4), None) == ""
    assert len(tried) == min(names, 8)


@pytest.mark.unit
def test_the_other_gelu_is_tried_only_where_the_reference_has_one(monkeypatch):
    tried, right = [], hints._first_output
    monkeypatch.setattr(hints, "_first_output", lambda call, inputs: tried.append(call) or right(call, inputs))
    plain, wrong = nn.Linear(8, 8), nn.Linear(8, 8)
    inputs = Inputs.of(tensor(4, 8))
    with torch.no_grad():
        assert hints._gelu(wrong, plain, plain(tensor(4, 8)), inputs) == ""
    assert tried == [plain]


# ------------------------------------------------------------------------------------------------------- the five steps


def step_against_the_first(step: steps.Step, amp_dtype: torch.dtype | None, numerics: str | None) -> Judgement:
    config = BlockConfig(batch_size=2, seq_len=32, hidden_size=64, num_heads=4, amp_dtype=amp_dtype)
    values = parameters.seeded(config, seed=0)
    reference = steps.load(0).build(config.replace(amp_dtype=None), values, torch.device("cpu"))
    candidate = step.build(config, values, torch.device("cpu"))
    return validate(candidate, reference, tensor(2, 32, 64), numerics=numerics)


STEPS = [pytest.param(step, marks=pytest.mark.integration if step.traits.compiled else pytest.mark.unit, id=step.name)
         for step in steps.ALL]


@pytest.mark.parametrize("step", STEPS)
def test_each_step_is_step_0_where_nothing_is_rounded(step):
    judgement = step_against_the_first(step, None, None)
    assert judgement.proven and judgement.counted() == "1 output, 13 gradients"


@pytest.mark.parametrize("step", STEPS[1:])
def test_each_step_is_step_0_in_the_numerics_that_it_declares(step):
    judgement = step_against_the_first(step, torch.bfloat16, "float8" if step.traits.fp8 else "bfloat16")
    assert judgement.passed and judgement.outputs_proven, judgement


@pytest.mark.unit
def test_16_bits_that_are_not_declared_are_less_accurate():
    judgement = step_against_the_first(steps.load(1), torch.bfloat16, None)
    assert judgement.passed and "output" in {check.name for check in judgement.less_accurate}


# ------------------------------------------------------------------------------------- less accurate, and by how much


LARGE = tensor(64, 64)


def of_fp32(change):
    """GELU, and in FP32 what `change` makes of it: right in its FP64 copy alone."""
    return lambda x: change(gelu(x)) if x.dtype == torch.float32 else gelu(x)


@pytest.mark.unit
@pytest.mark.parametrize("change", [
    lambda y: y * 1.05, lambda y: y * 1.02, lambda y: y * 1.002, lambda y: y + 0.01, lambda y: y * 0.95,
    lambda y: torch.cat([1.2 * y[:1], y[1:]]), lambda y: y.clamp(max=2), lambda y: y + 0.05 * y.flip(0)],
    ids=["1.05", "1.02", "1.002", "plus 0.01", "0.95", "a row", "clamped", "another's"])
def test_what_no_lower_precision_explains_is_refused(change):
    judgement = validate(of_fp32(change), gelu, LARGE)
    assert "output" in failed(judgement), judgement


@pytest.mark.unit
@pytest.mark.parametrize("change, kind", [
    (lambda y: y.half().float(), "float16"), (lambda y: y.bfloat16().float(), "bfloat16")])
def test_what_is_less_accurate_names_the_precision_that_explains_it(change, kind):
    judgement = validate(of_fp32(change), gelu, LARGE)
    assert judgement.passed and {check.explained_by for check in judgement.less_accurate} == {kind}


@pytest.mark.unit
@pytest.mark.parametrize("times, passes", [(1.9, True), (2.6, False)])
def test_the_error_that_a_lower_precision_explains_has_two_sides(times, passes):
    """An error in every element's own direction, as rounding has it, on either side of twice BF16's."""
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))

    def noisy(x: Tensor) -> Tensor:
        y = gelu(x)
        if x.dtype != torch.float32:
            return y
        rounded = (gelu(x.bfloat16()).float() - y).norm() / y.norm()
        return y + times * rounded * y.norm() * noise / noise.norm()
    assert validate(noisy, gelu, LARGE).passed == passes


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor, passes", [(1.0, True), (1.03, False), (0.97, False)])
def test_a_factor_within_16_bits_bound_is_no_rounding(dtype, factor, passes):
    """A bound of 3 % would hide it, and its FP64 copy does not have it."""
    judgement = validate(lambda x: factor * gelu(x) if x.dtype == dtype else gelu(x), gelu, LARGE.to(dtype))
    assert judgement.passed == passes
    assert passes or "times the truth, which no rounding makes of it" in judgement.failure


@pytest.mark.unit
@pytest.mark.parametrize("factor, passes", [(1 + 1e-6, True), (1 + 4e-6, False)])
def test_fast_exponentials_are_off_one_way_by_several_roundings_of_fp32(factor, passes):
    """The bound is no help where the reference's own error is large: the values on either side of it are a factor."""
    truth = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    far = truth + 1e-5 * torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    standard = Standard("precision", torch.float32, float(truth.norm()), 0.0)
    assert standard.tensor(output("output"), [truth * factor], [truth], [far]).passed == passes


@pytest.mark.unit
@pytest.mark.parametrize("numerics, passes, fails", [
    ("float8", 1 + 7e-3, 1 + 9e-3), ("bfloat16", 1 - 7e-3, 1 - 9e-3), ("tf32", 1 + 1.8e-3, 1 + 2.1e-3)])
def test_a_factor_is_held_against_the_roundings_of_what_is_declared(numerics, passes, fails):
    """A gradient that is one value all over, a bias's behind a head of zeros say, is rounded one way all over."""
    truth = torch.full((1000,), 1 / 64000, dtype=torch.float64)
    size = float(truth.norm())
    standard = Standard("precision", torch.float32, size, size, numerics=numerics)
    assert standard.tensor(gradient_of("head.bias"), [truth * passes], [truth], [truth]).passed
    judged = standard.tensor(gradient_of("head.bias"), [truth * fails], [truth], [truth])
    assert not judged.passed and "no rounding makes of it" in judged.reason


@pytest.mark.unit
@pytest.mark.parametrize("share, passes", [(1.1e-7, True), (1.3e-7, False)])
@pytest.mark.parametrize("of", [output("output"), buffer("running_mean"), gradient_of("bias")], ids=lambda of: of.words)
def test_what_is_zero_may_be_off_by_a_rounding_of_all(of, share, passes):
    """A mean of what a batch norm centred before, say."""
    zero = torch.full((8, 8), 1e-17, dtype=torch.float64)
    norm_of_all = 5.0
    seen = zero + share * norm_of_all / 8
    standard = Standard("precision", torch.float32, norm_of_all, norm_of_all)
    assert standard.tensor(of, [seen], [zero], [zero]).passed == passes


@pytest.mark.unit
@pytest.mark.parametrize("kind, passes", [(CHANNELS_LAST, True), ("float16", False), (None, False)])
def test_a_factor_that_the_reference_has_in_another_layout_is_rounding(kind, passes):
    """A batch norm of few values. That a lower precision is as far off says nothing of a factor."""
    truth = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    size = float(truth.norm())
    others = [(kind, [0.9912 * truth])] if kind else []
    standard = Standard("precision", torch.float32, size, size, meaning_is_known=True, others=lambda of: others)
    judged = standard.tensor(gradient_of("fc1.weight"), [0.9909 * truth], [truth], [truth * (1 + 2e-4)])
    assert judged.passed == passes and ("as the reference in channels-last" in judged.reason) == passes, judged


# -------------------------------------------------------------------------- kinks beside what is computed in FP32


class NearKinks(nn.Module):
    """Computes in FP32 on its way, whatever dtype it is in, and then 32 ReLUs at their kinks."""

    def __init__(self, takes_tokens: bool, divides: bool = False, wrong: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.divides, self.wrong = divides, wrong
        self.first = nn.Embedding(32, 64) if takes_tokens else nn.Identity()
        self.up, self.down = nn.Linear(64, 32), nn.Linear(32, 64)
        with torch.no_grad():
            self.up.bias -= self.up(self.normed(near_kinks(takes_tokens))).diagonal()

    def normed(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mean = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() / mean.sqrt() if self.divides else x.float() * mean.rsqrt()).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.normed(x))
        hidden = hidden.detach() + self.wrong * (hidden - hidden.detach())
        return self.down(torch.relu(hidden))


def near_kinks(takes_tokens: bool) -> Tensor:
    return torch.arange(32) if takes_tokens else tensor(32, 64)


@pytest.mark.unit
@pytest.mark.parametrize("wrong, passes", [(1.0, True), (1.6, False)])
@pytest.mark.parametrize("takes_tokens", [True, False], ids=["tokens", "values"])
def test_what_rounds_to_fp32_on_its_way_is_judged_beside_its_kinks(takes_tokens, wrong, passes):
    """A rounding in FP32 moves a whole gradient of the FP64 copy. Whole numbers have none: their tables are rounded."""
    candidate = NearKinks(takes_tokens, divides=True, wrong=wrong)
    judgement = validate(candidate, NearKinks(takes_tokens), near_kinks(takes_tokens))
    assert judgement.passed == passes and judgement.has_oracle, judgement


@pytest.mark.unit
def test_a_table_is_off_by_a_rounding_meanwhile():
    model = NearKinks(True)
    before = model.first.weight.detach().clone()
    assert [t is model.first.weight for t in tables_of(model)] == [True]
    assert len(tables_of(NearKinks(False))) == 4
    with meanwhile_off_by_a_rounding(tables_of(model), 0, Step()):
        moved = (model.first.weight.detach() / before - 1).abs()
        assert 1e-7 < float(moved.max()) < 2.5e-7
    assert torch.equal(model.first.weight, before)
    assert not are_looked_up([tensor(2, 4)]) and are_looked_up([torch.arange(3)])
    assert are_looked_up([torch.arange(3)[None], torch.tensor([[0.0, 1.0, 1.0]])])          # beside a floating mask


@pytest.mark.unit
def test_what_a_reference_gives_in_other_precisions_is_let_go_of_and_asked_again():
    truth = Truth(nn.Conv2d(2, 4, 3), Work(Inputs.of(tensor(2, 2, 8, 8)), None, 1, 0))
    before = dict(truth.others()) | {"own": truth.own(None), "declared": truth.own("bfloat16")}
    truth.forget_others()
    assert truth.own(None) is before["own"] and truth.own("bfloat16") is not before["declared"]
    again = dict(truth.others())
    assert list(again) == [CHANNELS_LAST, "float16", "bfloat16"] and again["float16"] is not before["float16"]
    assert torch.equal(again["bfloat16"].outputs["output"], before["bfloat16"].outputs["output"])


@pytest.mark.unit
def test_a_lower_precision_is_looked_at_once_for_all_tensors(monkeypatch):
    """Also where the reference does not run in it: a large model takes seconds to say so."""
    looked = []

    def copied(self, kind):
        looked.append(kind)
        raise RuntimeError("not in this one")
    monkeypatch.setattr(Truth, "_copied_in", copied)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    factor = torch.tensor(1.3)
    judgement = validate(lambda x: model(x) * (factor if x.dtype == torch.float32 else 1), model, tensor(32, 16))
    assert not judgement.passed and sum(not check.passed for check in judgement) > 3
    assert looked == ["float16", "bfloat16"]


# ------------------------------------------------------------------------------ zeros that hide what is behind them


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


class HeadOfZeros(nn.Module):
    """As a head begins before training: the output is zero, and so is each gradient behind it."""

    def __init__(self, change=lambda hidden: hidden):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.change = change
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(torch.relu(self.body(x))))


def of_a_forward(candidate: nn.Module, forward_only: bool) -> Judgement:
    reference = HeadOfZeros()
    judgement = Judge(candidate, Truth(reference, Work(Inputs.of(tensor(8, 16)), forward_only=forward_only))).judge()
    assert not reference.head.weight.any() and not reference.head.bias.any()
    return judgement


@pytest.mark.unit
@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("change, passes", [
    (lambda hidden: hidden * 1.0, True), (torch.tanh, False), (lambda hidden: hidden + 1e-6, False)],
    ids=["right", "tanh", "a little more"])
def test_what_zeros_hide_is_judged_with_others_in_their_place(forward_only, change, passes):
    judgement = of_a_forward(HeadOfZeros(change), forward_only)
    assert judgement.passed == passes, judgement
    assert not passes or "meaning, zeros drawn" in {check.question for check in judgement}


@pytest.mark.unit
def test_a_backward_that_zeros_hide_is_judged_too():
    judgement = of_a_forward(HeadOfZeros(WrongBackward.apply), forward_only=False)
    assert failed(judgement) == {"gradient of body.weight", "gradient of body.bias", "gradient of input 0"}


@pytest.mark.unit
def test_zeros_that_hide_nothing_are_not_drawn():
    linear = nn.Linear(16, 4)
    nn.init.zeros_(linear.bias)
    judgement = validate(copy.deepcopy(linear), linear, tensor(8, 16))
    assert judgement.proven and {check.question for check in judgement} == {"meaning", "precision"}


@pytest.mark.unit
def test_a_candidate_with_values_of_its_own_is_not_judged_with_others():
    class Folded(nn.Module):
        def __init__(self, of: HeadOfZeros):
            super().__init__()
            self.body = copy.deepcopy(of.body)
            self.register_buffer("made", torch.cat([of.head.weight, of.head.bias[:, None]], dim=1).detach())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.relu(self.body(x)), self.made[:, :-1], self.made[:, -1])
    judgement = of_a_forward(Folded(HeadOfZeros()), forward_only=True)
    assert judgement.passed and any("not judged with other values" in note for note in judgement.notes)


# ------------------------------------------------------------------------- the same sums, in the order of channels-last


class ChannelsLast(nn.Module):
    """A network on channels-last weights; in FP32 what it gives is changed too."""

    def __init__(self, network: nn.Module, change=lambda y: y):
        super().__init__()
        self.network = copy.deepcopy(network).to(memory_format=torch.channels_last)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.network(x)
        return self.change(y) if x.dtype == torch.float32 else y


def normalised() -> nn.Module:
    """Its batch norms, where they are channels-last, add up 57,600 numbers one by one on a CPU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))


@pytest.fixture
def one_thread():
    """Threads add up less each, and are the nearer for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(2))
def test_a_batch_norm_that_adds_up_in_another_order_is_not_less_accurate(one_thread, seed):
    network = normalised()
    images = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    names = {f"network.{name}": name for name, _ in network.named_parameters()}
    judgement = validate(ChannelsLast(network), network, images, parameters=names)
    beyond = {check.explained_by for check in judgement if check.explained_by}
    assert judgement.proven and not judgement.less_accurate and beyond == {"channels-last"}


@pytest.mark.integration
def test_channels_last_explains_no_lower_precision():
    network = normalised()
    images = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    rough = ChannelsLast(network, lambda y: y.half().float())
    names = {f"network.{name}": name for name, _ in network.named_parameters()}
    judgement = validate(rough, network, images, parameters=names)
    assert judgement.passed and "float16" in {check.explained_by for check in judgement.less_accurate}


@pytest.mark.unit
def test_outputs_on_fresh_inputs_may_be_apart_by_what_the_declared_numerics_make_of_them():
    """BF16 is off by a tenth behind thirty layers, and in another order by another tenth."""
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(30)))
    truth = Truth(deep, Work(Inputs.of(tensor(16, 32))))
    of_bf16, of_fp32 = truth.own_error_in("bfloat16"), truth.own_error_in(None)
    assert of_bf16 > 0.05 and of_fp32 < 1e-4
    assert Judge(deep, truth, "bfloat16").allowed_between == pytest.approx(2 * 3e-2 + 4 * of_bf16)
    assert Judge(deep, truth).allowed_between == pytest.approx(2 * 2e-6 + 4 * of_fp32)


@pytest.mark.unit
def test_gradients_on_fresh_inputs_may_be_apart_by_what_a_rounding_of_the_numerics_makes_of_them(monkeypatch):
    """A rounding to BF16 moves them by a half behind so many layers, on some inputs; one of FP32 does not."""
    seeds = itertools.count(24)
    for module in (judge, refreshing):
        monkeypatch.setattr(module, "unguessable_seed", lambda: next(seeds))
    judgement = validate(Deep(rounds=True), Deep(rounds=False), tensor(16, 32), numerics="bfloat16")
    assert judgement.passed and judgement.less_accurate, judgement


@pytest.mark.unit
def test_its_timed_calls_are_held_to_what_it_multiplies_in():
    of_bf16, as_it_is = Deep(rounds=True), Deep(rounds=False)
    for candidate, numerics in ((of_bf16, "bfloat16"), (as_it_is, None)):
        judged = Judge(candidate, Truth(as_it_is, Work(Inputs.of(tensor(16, 32)))), numerics)
        judged.judge()
        assert judged.referee().numerics == numerics


@pytest.mark.unit
@pytest.mark.parametrize("kinds, coarsest", [
    (["", "float16", "bfloat16", "float16"], "bfloat16"), (["tf32", "channels-last"], "tf32"),
    (["channels-last"], None)])
def test_the_coarsest_precision_that_explains_an_error_counts(kinds, coarsest):
    layer = nn.Linear(4, 4)
    judged = Judge(layer, Truth(layer, Work(Inputs.of(tensor(2, 4)))))
    judged.checks = [Check(output("output"), "precision", True, True, 1e-3, 1e-6, "", kind) for kind in kinds]
    of_a_timed_call = judged.referee()
    assert of_a_timed_call.numerics == coarsest and of_a_timed_call.in_its_numerics is None


@pytest.mark.unit
@pytest.mark.parametrize("times, explained_by", [(3.9, "channels-last"), (4.1, "")])
def test_what_channels_last_explains_is_four_times_its_own_error(times, explained_by):
    truth = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error = 1e-5 * torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    standard = Standard("precision", torch.float32, float(truth.norm()), 0.0, meaning_is_known=True,
                        others=lambda of: [("channels-last", [truth + error])])
    check = standard.tensor(output("output"), [truth - times * error], [truth], [truth])
    assert (check.passed, check.explained_by) == (bool(explained_by), explained_by)


@pytest.mark.unit
@pytest.mark.parametrize("times, passes", [(3.9, True), (4.1, False)])
def test_what_channels_last_explains_is_spread_over_a_tensor(times, passes):
    """One element that is far off is a mistake, however small the whole error."""
    truth = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error = 1e-5 * torch.ones_like(truth)
    standard = Standard("precision", torch.float32, float(truth.norm()), 0.0, meaning_is_known=True,
                        others=lambda of: [("channels-last", [truth + error])])
    rest = 2e-5 * torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).clamp(-1.5, 1.5)
    rest[3, 4] = times * 1e-5
    assert standard.tensor(output("output"), [truth + rest], [truth], [truth]).passed == passes


# ------------------------------------------------------------------------------------- truths that are wrong themselves


def additive(S: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(S, S, dtype=dtype).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)


def masked_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.size(-1) ** 0.5 + additive(q.size(-2))).softmax(-1) @ v


@pytest.mark.unit
@pytest.mark.parametrize("mask", [
    additive, lambda S: torch.where(additive(S) < 0, -1e9, 0.0),
    lambda S: nn.Transformer.generate_square_subsequent_mask(S),
    lambda S: additive(S) == 0], ids=["zeros", "where", "nn.Transformer", "bool"])
@pytest.mark.parametrize("as_reference", [False, True])
def test_an_fp32_mask_beside_fp64_queries_misleads_neither_side(mask, as_reference):
    def library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.size(-2)))
    qkv = tuple(tensor(2, 4, 16, 16, seed=seed) for seed in range(3))
    pair = (masked_by_hand, library) if as_reference else (library, masked_by_hand)
    judgement = validate(*pair, qkv)
    assert judgement.passed and judgement.proven, judgement
    assert not validate(lambda q, k, v: library(q, k, v) * 1.01, masked_by_hand, qkv).passed


def another_in_fp64(x: Tensor) -> Tensor:
    return gelu(x) + (x if x.dtype == torch.float64 else 0)


@pytest.mark.unit
def test_a_truth_that_contradicts_its_reference_is_no_oracle():
    judgement = validate(gelu, another_in_fp64, LARGE)
    assert judgement.passed and "no oracle: its outputs in FP64 are" in judgement.truth
    assert not validate(lambda x: 1.5 * gelu(x), another_in_fp64, LARGE).passed


class OfMaskedRows(nn.Module):
    """A softmax in FP32 under a mask of the least number of the working dtype: in FP64 that is minus infinity there.
    Rows without any key are NaN, and put out behind it: the output is right, and its gradients are NaN.
    """

    def __init__(self, scale: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scale * self.linear(x) @ x.mT
        masked = torch.arange(len(x)) > 5
        mask = torch.zeros_like(scores).masked_fill(masked[:, None], torch.finfo(x.dtype).min)
        weights = (scores + mask).softmax(-1, dtype=torch.float32)
        return weights.masked_fill(masked[:, None], 0.0).to(x.dtype) @ x


@pytest.mark.unit
@pytest.mark.parametrize("seed", range(3))
def test_a_truth_whose_gradients_are_lost_is_no_oracle(seed):
    judgement = validate(OfMaskedRows(), OfMaskedRows(), tensor(8, 8, seed=seed))
    assert judgement.passed, judgement
    assert "no oracle: the gradient of input 0 is not finite in FP64, and finite in float32" in judgement.truth
    assert not validate(OfMaskedRows(1.01), OfMaskedRows(), tensor(8, 8, seed=seed)).passed


def as_cudnn_rounds(x: Tensor) -> Tensor:
    """Rounded to TF32 where cuDNN may, and 100 times the difference from one."""
    if x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
        x = x + (x.half().float() - x).detach()
    return 100 * (gelu(x) - 1)


@pytest.mark.unit
@pytest.mark.parametrize("allowed", [True, False])
def test_what_tf32_makes_of_outputs_contradicts_no_truth(monkeypatch, allowed):
    """cuDNN's convolutions round to it by default, and a deep network makes percents of that."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    x = 1.15 + 0.001 * torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    truth = Truth(as_cudnn_rounds, Work(Inputs.of(x)))
    assert (truth.own_error > CONTRADICTS[torch.float32]) == allowed
    assert truth.has_meaning and torch.backends.cudnn.allow_tf32 == allowed


@pytest.mark.unit
def test_a_copy_that_contradicts_its_candidate_says_nothing_of_it():
    judgement = validate(another_in_fp64, gelu, LARGE)
    assert judgement.passed and any("its FP64 copy is another function than it is itself" in note
                                    for note in judgement.notes)


@pytest.mark.unit
@pytest.mark.parametrize("nested", [True, False])
def test_what_runs_without_gradients_is_judged_as_it_runs_there(nested):
    """TransformerEncoder leaves zeros at the padding in inference alone."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    plain = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    candidate = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested).eval()
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    inputs = {"src": tensor(2, 6, 16), "src_key_padding_mask": padding}
    judgement = validate(candidate, plain, inputs)
    assert failed(judgement) == ({"output without gradients"} if nested else set())


@pytest.mark.unit
def test_no_hint_is_given_where_no_trial_fits():
    assert validate(lambda x: gelu(x) + 1e-4 * x, gelu, LARGE).hint == ""


class RateOfNoName(nn.Module):
    """Its rate of dropout is an attribute whose name says nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(16, 16), 0.3

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(self.linear(x), p=self.p, training=self.training)


@pytest.mark.integration
def test_a_compiled_module_whose_rate_of_dropout_no_attribute_shows_passes():
    reference = RateOfNoName()
    candidate = torch.compile(RateOfNoName(), backend="aot_eager")
    judgement = validate(candidate, reference, tensor(32, 16))
    assert judgement.passed and judgement.outputs_proven, judgement
    candidate.p = 0.4
    assert not validate(candidate, reference, tensor(32, 16)).passed


def _not_in_fp64(graph, inputs):
    """A backend of torch.compile whose kernels take FP32 alone, as those of compiled FlexAttention do on a GPU."""
    def run(*values):
        assert all(t.dtype != torch.float64 for t in values), "no kernel for FP64"
        return graph.forward(*values)
    return run


_compiled_sine = torch.compile(torch.sin, backend=_not_in_fp64)


class CallsACompiledFunction(nn.Module):
    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.linear, self.factor = nn.Linear(16, 16), factor

    def forward(self, x: Tensor) -> Tensor:
        return _compiled_sine(self.factor * self.linear(x))


@pytest.mark.integration
@pytest.mark.parametrize("factor, passes", [(1.0, True), (1 + 1e-6, False)])
def test_a_compiled_function_that_both_call_does_not_hide_what_they_mean(factor, passes):
    """No attribute holds it. In FP32 the factor would be within the bounds."""
    judgement = validate(CallsACompiledFunction(factor), CallsACompiledFunction(), tensor(32, 16))
    assert judgement.truth.startswith("FP64") and "no oracle" not in judgement.truth
    assert judgement.passed == passes, judgement


@pytest.mark.unit
def test_what_runs_uncompiled_for_its_meaning_alone_is_not_warned_of():
    """Where a model leaves FlexAttention uncompiled, torch says so to its author."""
    flex = "flex_attention called without torch.compile() - this will use an unfused implementation"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with uncompiled_meanwhile(nn.Linear(2, 2)):
            warnings.warn(flex, stacklevel=1)
            warnings.warn("something else", stacklevel=1)
        warnings.warn(flex, stacklevel=1)
    assert [str(each.message) for each in said] == ["something else", flex]


@pytest.mark.unit
@pytest.mark.parametrize("unreliable, passes", [("", False), (NOT_TWICE, False), (DRAWS_OTHERS, True)])
@pytest.mark.parametrize("seen, truth", [(None, [tensor(4)]), ([tensor(4)], None)])
def test_a_missing_gradient_is_left_to_the_draws_alone(seen, truth, unreliable, passes):
    """Nothing else is asked again."""
    standard = Standard("precision", torch.float32, 1.0, 1.0, unreliable=unreliable)
    check = standard.gradient(gradient_of("w"), seen, truth, truth)
    assert check.passed == passes and check.proven != passes


# ------------------------------------------------------------------------ what adds roundings to FP32 up, in FP64


class Rotary(nn.Module):
    """Attention with rotary positions, whose angles are computed in FP32 or in the dtype of what it gets."""

    def __init__(self, in_fp32: bool, factor: float = 1.0):
        super().__init__()
        self.in_fp32, self.factor = in_fp32, factor
        self.projection = nn.Linear(16, 16)
        self.register_buffer("frequencies", 10_000 ** -(torch.arange(0, 16, 2) / 16))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if self.in_fp32 else x.dtype
        positions = 32 * torch.arange(x.size(1), device=x.device, dtype=dtype)
        angles = positions[:, None] * (self.frequencies.to(dtype) * self.factor)
        cosine, sine = (t.repeat(1, 2).to(x.dtype) for t in (angles.cos(), angles.sin()))
        y = 3 * self.projection(x)
        first, second = y.chunk(2, -1)
        y = y * cosine + torch.cat([-second, first], -1) * sine
        return F.scaled_dot_product_attention(y, y, x, is_causal=True)


@pytest.mark.integration
@pytest.mark.parametrize("reference, candidate, factor, passes", [
    (True, False, 1.0, True), (False, True, 1.0, True), (True, True, 1 + 4e-6, False), (False, True, 1 + 4e-6, False)])
def test_angles_of_far_positions_are_held_against_what_fp32_makes_of_them(reference, candidate, factor, passes):
    """In FP32 an angle of 2,000 is off by a hundred times what a number near one is."""
    torch.manual_seed(0)
    rotary, other = Rotary(reference), Rotary(candidate, factor)
    other.load_state_dict(rotary.state_dict())
    judgement = validate(other, rotary, torch.randn(1, 64, 16), cotangents=1)
    assert judgement.passed == passes, judgement.failure


@pytest.mark.unit
def test_what_is_exact_in_fp32_is_not_rounded_anew():
    positions, table = torch.arange(3000), (1 / torch.arange(1.0, 3001.0)).double()
    with RoundedAnew(0):
        as_floats, cast, mask = positions.float(), table.float(), (1 - torch.ones(8, 8).tril()) * torch.finfo().min
        products = as_floats * cast
        halves = as_floats * 0.5
    assert torch.equal(as_floats, positions.to(torch.float32)) and torch.equal(cast.double(), table)
    assert torch.equal(mask, (1 - torch.ones(8, 8).tril()) * torch.finfo().min)
    off = (products - positions * table).abs() / (positions * table).clamp_min(1)
    assert 0 < off.max() < 4 * torch.finfo().eps
    assert torch.equal(halves[:256], positions[:256] * 0.5)


@pytest.mark.unit
@pytest.mark.parametrize("share, counts", [(0.9e-3, True), (1.1e-3, False)])
def test_an_output_that_moves_further_than_rounding_explains_no_other(share, counts):
    """As where a router in FP32 takes another expert: that excuses nothing."""
    exact = Observation({"output": torch.ones(8)}, forward_alone={"output": torch.ones(8)})
    moved = Observation({"output": (1 + share) * torch.ones(8)}, forward_alone={"output": (1 + share) * torch.ones(8)})
    found = further_in_all(exact, moved, exact)
    expected = moved if counts else exact
    assert torch.equal(found.outputs["output"], expected.outputs["output"])
    assert torch.equal(found.forward_alone["output"], expected.forward_alone["output"])
