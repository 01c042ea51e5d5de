"""A loss that is given beside the model, with targets of its own: in FP64, under autocast, and with penalties."""
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.assistant import optimize
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import plan_of
from benchmarks.assistant.techniques import autocast
from benchmarks.measure import names
from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import Judge
from benchmarks.measure.observing import Work
from benchmarks.measure.truth import Truth

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def model(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))


def huber(output):
    """Its backward takes no two dtypes."""
    return F.huber_loss(output, TARGETS)


def huber_of_a_pair(outputs):
    return huber(outputs[0])


def huber_in_float64(output):
    return F.huber_loss(output, TARGETS.double())


def cross_entropy(output):
    return F.cross_entropy(output, TARGETS.argmax(-1))


class Pair(nn.Module):
    """It returns more than a tensor."""

    def __init__(self):
        super().__init__()
        self.inner = model()

    def forward(self, x):
        y = self.inner(x)
        return y, 2 * y


class OfAnObject:
    """A loss that keeps its targets in an attribute."""

    def __init__(self):
        self.targets = TARGETS

    def loss(self, output):
        return F.huber_loss(output, self.targets)


class ThatCantBeCopied(OfAnObject):
    def __copy__(self):
        raise TypeError("there is one of it")


class Running:
    """A loss beside a mean of those before, which it changes in place."""

    def __init__(self):
        self.mean = torch.ones(())

    def loss(self, output):
        one = F.huber_loss(output, TARGETS)
        self.mean.mul_(0.5).add_(one.detach(), alpha=0.5)
        self.mean *= 2.0
        return one / self.mean


@dataclass
class Batch:
    targets: torch.Tensor


def of_a_batch():
    batch = Batch(TARGETS)
    return lambda output: F.huber_loss(output, batch.targets)


def of_a_mapping():
    batch = UserDict(labels=[{"y": TARGETS}])
    return lambda output: F.huber_loss(output, batch["labels"][0]["y"])


def projected():
    held = Batch(TARGETS)
    return lambda output: (output @ held.targets.T).square().mean()


def program_of(module, loss):
    program = read(module, Inputs.of(X))
    program.loss = loss
    return program


@pytest.mark.unit
@pytest.mark.parametrize("loss", [
    huber, OfAnObject().loss, ThatCantBeCopied().loss, Running().loss, of_a_batch(), of_a_mapping(), projected()],
    ids=["a function", "a method", "can't be copied", "running", "of a batch", "of a mapping", "projected"])
def test_targets_are_in_fp64_where_the_truth_is(loss):
    truth = Truth(model(), Work(Inputs.of(X), loss))
    assert truth.has_meaning and 0 < truth.own_error < 1e-6
    assert TARGETS.dtype == torch.float32


@pytest.mark.unit
@pytest.mark.parametrize("change, in_place", [
    (lambda t, o: t.add_(o), True), (lambda t, o: t.__iadd__(o), True), (lambda t, o: t.__setitem__(0, o[0]), True),
    (lambda t, o: torch.maximum(t, o), False), (lambda t, o: t.__matmul__(o.T), False), (lambda t, o: t.sub(o), False)])
def test_what_a_loss_changes_in_place_is_changed(change, in_place):
    kept = torch.zeros(4, 8)

    def loss(output):
        change(kept, output.detach())
        return output.sum()
    Work(Inputs.of(X), loss).loss_of(X.double().requires_grad_(), torch.float64)
    assert kept.dtype == torch.float32 and bool(kept.any()) == in_place


def penalized(module, factor=1.0):
    """A loss with a penalty on a weight of the module."""
    return lambda output: huber(output) + factor * module[0].weight.square().sum()


@pytest.mark.unit
def test_a_penalty_on_parameters_counts_into_the_gradients_in_fp64():
    reference = model()
    truth = Truth(reference, Work(Inputs.of(X), penalized(reference)))
    weight = reference[0].weight
    of_huber, = torch.autograd.grad(huber(reference(X)), weight)
    assert truth.in_words == "FP64"
    in_fp64, = truth.exact.gradients[names.gradient_of("0.weight")]
    torch.testing.assert_close(in_fp64.float(), of_huber + 2 * weight.detach())


@pytest.mark.integration
@pytest.mark.parametrize("change, passes", [(lambda y: y, True), (lambda y: 1.0001 * y, False)], ids=["right", "wrong"])
def test_a_candidate_is_judged_by_a_loss_with_a_penalty(change, passes):
    """A rung has the model's parameters: the penalty is on them whichever of the two is called."""
    reference = model()

    class Other(nn.Sequential):
        def forward(self, x):
            return change(super().forward(x))
    work = Work(Inputs.of(X), penalized(reference))
    judgement = Judge(Other(*reference), Truth(reference, work)).judge()
    assert judgement.passed == passes and judgement.truth == "FP64"


@pytest.mark.unit
@pytest.mark.parametrize("build, loss, cast_to", [
    (model, huber, torch.float32), (model, cross_entropy, None), (model, None, None), (model, huber_in_float64, None),
    (Pair, huber_of_a_pair, None)],
    ids=["huber", "cross entropy", "no loss", "takes neither", "of a pair"])
def test_an_output_in_16_bits_is_cast_where_its_loss_takes_no_other(build, loss, cast_to):
    program = program_of(build(), loss)
    found, = autocast.find(program)
    assert found.output_too == bool(cast_to) and not found.why_not
    assert all(p.grad is None for p in program.model.parameters())
    assert plan_of([autocast.TECHNIQUE], found={"autocast": [found]}).returns_float32 == (cast_to is not None)
    code = autocast.advice(program, found).code
    assert code.endswith("model(*inputs).float()" if cast_to else "model(*inputs)")
    rung = Rung(program.model, [autocast.TECHNIQUE], found={"autocast": [found]})
    output = rung(X)[0] if build is Pair else rung(X)
    assert output.dtype == (cast_to or torch.bfloat16)


@pytest.mark.unit
def test_looking_at_a_loss_with_a_penalty_leaves_no_gradient():
    reference = model()
    found, = autocast.find(program_of(reference, penalized(reference)))
    assert found.output_too and all(p.grad is None for p in reference.parameters())


@pytest.mark.integration
def test_a_model_with_such_a_loss_gets_code_for_autocast(studies_in_seconds):
    result = optimize(model(64), (X,), quick=True, techniques=[autocast.TECHNIQUE], loss=huber)
    assert result.truth == "FP64" and not result.failures and not result.faults
    assert result.judgements["autocast"].passed
    one, = result.opportunities
    assert "the loss takes its output in FP32 alone" in one.found.reason


class InFP32Alone(nn.Linear):
    """Its kernel takes no FP64, and rounds to TF32 where that is allowed, as cuDNN's convolutions do by default."""

    def forward(self, x):
        if x.dtype == torch.float64:
            raise RuntimeError("only FP32")
        y = super().forward(x)
        return y * (1 + 5e-4) if torch.backends.cudnn.allow_tf32 else y


class WithoutTF32(InFP32Alone):
    def forward(self, x):
        return nn.Linear.forward(self, x)


class FurtherOff(InFP32Alone):
    def forward(self, x):
        return 0.99 * nn.Linear.forward(self, x)


@pytest.mark.unit
@pytest.mark.parametrize("kind, passes", [(WithoutTF32, True), (InFP32Alone, True), (FurtherOff, False)],
                         ids=lambda each: getattr(each, "__name__", str(each)))
def test_without_fp64_the_truth_is_fp32_without_tf32(kind, passes):
    torch.manual_seed(0)
    reference, candidate = InFP32Alone(8, 8), kind(8, 8)
    candidate.load_state_dict(reference.state_dict())
    truth = Truth(reference, Work(Inputs.of(X)))
    assert truth.in_words.startswith("the reference in float32, no oracle: RuntimeError: only FP32")
    assert 4e-4 < truth.own_error < 6e-4
    assert Judge(candidate, truth).judge().passed == passes
