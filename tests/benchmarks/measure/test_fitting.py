"""Models that do not fit in FP64: fewer samples tell the meaning, the whole batch the precision, and that is said."""
import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.examples import pairs
from benchmarks.examples.pairs import fused, gelu, random, tensor
from benchmarks.measure import fitting, truth
from benchmarks.measure.calls import Inputs
from benchmarks.measure.checks import Judgement
from benchmarks.measure.judge import validate
from benchmarks.measure.observing import Work
from benchmarks.measure.truth import free_memory, quick_collections, somebody_froze
from common.runtime import machine

pytestmark = pytest.mark.unit


@pytest.fixture
def memory(monkeypatch):
    """Sets how many bytes may be used."""
    return lambda size: monkeypatch.setattr(fitting, "memory_free", lambda device: size / fitting.SHARE)


def needed(call, inputs, share: float) -> float:
    """Bytes that a look in FP64 at such a share of the samples needs."""
    _, of_samples, of_parameters = fitting._forward(call, Work(Inputs.of(inputs)))
    return share * of_samples + of_parameters


def gpt(core=pairs.by_hand) -> nn.Module:
    torch.manual_seed(0)
    return random(pairs.GPT(core), torch.float32)


TOKENS = torch.randint(0, pairs.VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(0))


def judged(candidate, memory, share: float, reference=None, inputs=(TOKENS,), **options) -> Judgement:
    reference = reference or gpt()
    memory(needed(reference, inputs, share))
    return validate(candidate, reference, inputs, **options)


class Saved(nn.Module):
    """tanh saves its result for the backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * 2)
        self.saved = weakref.ref(y.untyped_storage())
        return y.sum()


def test_nothing_is_left_of_what_was_counted():
    call = Saved()
    assert needed(call, (torch.ones(64, 64, requires_grad=True),), 1.0) >= 8 * 64 * 64
    gc.collect()
    assert call.saved() is None


@pytest.mark.parametrize("share, samples", [(1.01, 8), (0.99, 4), (0.51, 4), (0.3, 2), (0.2, 1)])
def test_as_many_samples_as_fit_tell_the_meaning(memory, share, samples):
    judgement = judged(gpt(fused), memory, share)
    assert judgement.passed and judgement.proven, judgement
    assert judgement.truth == ("FP64" if samples == 8 else f"FP64 of {samples} of 8 samples")
    assert any(f"FP64 of {samples} of 8 samples: FP64 of all 8 needs about" in note
               for note in judgement.notes) == (samples < 8)


def test_where_not_even_one_sample_fits_a_lower_dtype_is_the_truth(memory):
    judgement = judged(gpt(fused), memory, 0.1)
    assert judgement.passed and "no oracle: FP64 of all 8 needs about 0 GiB" in judgement.truth
    assert "not even one sample fits" in judgement.truth


class Between(nn.Module):
    """Each sample depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x - x.mean(0))


def together(judgement: Judgement) -> bool:
    """Whether the fewer samples were a batch of their own."""
    return any("depend on each other: these are a batch of their own" in note for note in judgement.notes)


@pytest.mark.parametrize("share, samples", [(0.6, 4), (0.3, 2)])
def test_samples_that_depend_on_each_other_are_a_batch_of_their_own(memory, share, samples):
    judgement = judged(Between(), memory, share, Between(), tensor(8, 64))
    assert judgement.proven and judgement.truth == f"FP64 of {samples} of 8 samples" and together(judgement)


def test_nodes_of_a_graph_are_not_cut(memory):
    """Half of the rows of its neighbours do not go with half of its nodes."""
    def graph(neighbours: Tensor, nodes: Tensor) -> Tensor:
        return gelu(neighbours @ nodes)
    inputs = tensor(8, 8), tensor(8, 64)
    judgement = judged(graph, memory, 0.6, graph, inputs)
    assert judgement.passed and judgement.truth.endswith(", and its samples depend on each other")


def normalising() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
    for _ in range(3):
        module(tensor(8, 16))
    return module


@pytest.mark.parametrize("share, samples", [(0.6, 4), (0.2, 2)])
def test_batchnorm_is_judged_by_fewer_samples_and_in_train_mode_never_by_one(memory, share, samples):
    module = normalising()
    in_train = judged(copy.deepcopy(module), memory, share, module, tensor(8, 16))
    assert in_train.proven and together(in_train)
    assert in_train.truth == f"FP64 of {samples} of 8 samples"
    module.eval()
    in_eval = judged(copy.deepcopy(module), memory, share, module, tensor(8, 16))
    assert in_eval.proven and not together(in_eval)
    assert in_eval.truth == f"FP64 of {4 if share > 0.5 else 1} of 8 samples"


@pytest.mark.parametrize("change", [
    lambda norm: setattr(norm, "momentum", 0.2), lambda norm: setattr(norm, "eps", 2e-5), lambda norm: norm.eval(),
    lambda norm: norm.register_forward_hook(lambda norm, given, y: torch.cat([y[:4], 1.5 * y[4:]]))],
    ids=["momentum", "eps", "running statistics", "the other half"])
def test_a_wrong_batchnorm_is_refused_by_fewer_samples(memory, change):
    module = normalising()
    candidate = copy.deepcopy(module)
    change(candidate[1])
    assert not judged(candidate, memory, 0.6, module, tensor(8, 16)).passed


# ------------------------------------------------------------------------------------- what few samples must still find


def wrong(change) -> nn.Module:
    module = gpt(fused)
    module.register_forward_hook(lambda module, given, logits: change(logits))
    return module


@pytest.mark.parametrize("change", [
    lambda y: torch.cat([y[:4], y[4:] * 1.5]), lambda y: torch.cat([y[:-1], y[:1]]), lambda y: y.roll(1, 0),
    lambda y: y * (1 + 1e-6 * len(y)), lambda y: y if len(y) == 4 else y * 1.01,
    lambda y: y if y.dtype == torch.float64 else y * 1.001], ids=[
    "the other half", "one sample for another", "rolled", "tiny", "right at the judged size alone", "in FP64 alone"])
@pytest.mark.parametrize("share", [0.6, 0.2])
def test_what_is_wrong_is_refused_all_the_same(memory, change, share):
    assert not judged(wrong(change), memory, share).passed


@pytest.mark.parametrize("share", [0.6, 0.2])
def test_a_gradient_that_is_wrong_for_the_whole_batch_alone(memory, share):
    module = gpt(fused)
    module.wte.weight.register_hook(lambda gradient: gradient * 1.01)     # a copy in FP64 loses the hook
    judgement = judged(module, memory, share)
    assert {check.name for check in judgement if not check.passed} == {"gradient of wte.weight"}


@pytest.mark.parametrize("core", [pairs.by_hand, fused])
def test_a_loss_that_is_made_for_the_whole_batch(memory, core):
    targets = TOKENS.roll(-1, 1)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    judgement = judged(gpt(core), memory, 0.6, loss=loss)
    assert judgement.proven and "of 4 of 8 samples" in judgement.truth
    assert not judged(wrong(lambda y: y * 1.01), memory, 0.6, loss=loss).passed


def test_a_mask_beside_the_samples_is_not_cut(memory):
    mask = torch.ones(12, 12, dtype=torch.bool).tril()

    def attention(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    judgement = judged(attention, memory, 0.6, attention, {"x": tensor(8, 12, 16), "mask": mask})
    assert judgement.proven and "of 4 of 8 samples" in judgement.truth


def test_sequence_first_is_not_taken_for_a_batch(memory):
    """The first positions of causal attention stand alone; the last ones do not. Fewer are a sequence of their own."""
    def causal(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(0, 1)
    judgement = judged(causal, memory, 0.6, causal, tensor(16, 2, 8))
    assert judgement.proven and together(judgement) and judgement.truth == "FP64 of 8 of 16 samples"


# ------------------------------------------------------------------------------------------- time, and out of memory


@pytest.mark.parametrize("slow, samples", [(0.0, 8), (0.02, 4)])
def test_what_would_take_too_long_is_judged_on_fewer_samples(monkeypatch, slow, samples):
    """A clock of its own: so many seconds a sample in FP64."""
    now = [0.0]

    class Timed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            now[0] += slow * len(x) * (1.0 if x.dtype == torch.float64 else 0.1)
            return gelu(x)
    monkeypatch.setattr(fitting.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(fitting, "SECONDS", fitting.FORWARDS_OF_A_LOOK * 0.02 * 5)
    judgement = validate(Timed(), Timed(), tensor(8, 64))
    assert judgement.proven
    assert judgement.truth == ("FP64" if samples == 8 else "FP64 of 4 of 8 samples")
    if samples < 8:
        assert any("would take longer than" in note for note in judgement.notes)


@pytest.mark.parametrize("fits", [4, 1, 0])
def test_out_of_memory_in_fp64_takes_fewer_samples_and_then_another_dtype(fits):
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64 and len(x) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return gelu(x)
    judgement = validate(Large(), Large(), tensor(8, 64))
    assert judgement.passed
    assert judgement.truth == (f"FP64 of {fits} of 8 samples" if fits else
                               "the reference in float32, no oracle: out of memory")


def test_out_of_memory_of_a_candidate_is_said_and_no_traceback():
    def large(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 133 GiB")
    judgement = validate(large, gelu, tensor(4, 4))
    assert not judgement.passed and "out of memory" in judgement.failure and judgement.status == "oom"


def test_memory_that_is_free_is_some_and_no_more_than_there_is():
    device = torch.device("cpu")
    assert 0 < machine.memory_free(device) <= machine.memory_total(device)


@pytest.fixture
def nothing_frozen(monkeypatch):
    monkeypatch.setattr(truth, "somebody_froze", somebody_froze)
    count = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if count:
        gc.freeze()


def test_collections_are_quick_meanwhile_and_as_before_afterwards(nothing_frozen):
    class Cycle:
        def __init__(self):
            self.itself = self
    with quick_collections():
        assert gc.get_freeze_count() > 100_000
        made = weakref.ref(Cycle())
        free_memory()
        assert made() is None
        with quick_collections():
            pass
        assert gc.get_freeze_count() > 100_000
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("first", [0, 700, 50_000])
def test_collections_come_less_often_meanwhile_unless_somebody_decided_otherwise(nothing_frozen, first):
    before = gc.get_threshold()
    try:
        gc.set_threshold(first, 10, 10)
        with quick_collections():
            assert gc.get_threshold() == ({700: 10_000}.get(first, first), 10, 10)
        assert gc.get_threshold() == (first, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_what_somebody_froze_stays_frozen(nothing_frozen):
    gc.freeze()
    with quick_collections():
        pass
    assert gc.get_freeze_count() > 0
