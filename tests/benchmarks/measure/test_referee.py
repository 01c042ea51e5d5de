"""The referee: every cheat is refused and named, honest modules are not, and everything is put back."""
import copy
import math
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.examples import cheats, pairs
from benchmarks.examples.cheats import CHEATS, Layer, given, reference_of
from benchmarks.examples.pairs import tensor
from benchmarks.measure import apart, calls, process_state, referee, refreshing
from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import validate
from benchmarks.measure.modules import compare, subject_of
from benchmarks.measure.observing import Work
from common.runtime import iteration
from common.runtime.iteration import FORWARD
from tests.helpers.cheats import SAID, is_named

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.integration
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHEATS)
def test_every_cheat_is_refused_and_named(name, device):
    cheat = CHEATS[name]
    if cheat.needs_gpu and device.type == "cpu":
        pytest.skip("streams are a GPU's")
    try:
        found = compare({"cheat": cheat.make().to(device)}, (given(device),), reference_of(name).to(device), rounds=20)
    finally:
        cheat.undo()
    run = found.results["cheat"]
    assert run.status == "failed", found
    assert is_named(name, run.info["reason"]), run.info["reason"]
    assert not any(run.samples(mode, "eager") for mode in ("forward+backward",)), "a cheat has no time"


@pytest.mark.unit
def test_every_cheat_has_its_words_and_there_are_enough():
    assert SAID.keys() == CHEATS.keys() and len(CHEATS) >= 25


@pytest.mark.unit
@pytest.mark.parametrize("call, wait, idle_wait, went_on", [
    (1e-3, 2.5e-4, 1e-5, True), (1e-3, 1.9e-4, 1e-5, False),           # 0.2 ms, where the call is short
    (1.0, 0.025, 1e-5, True), (1.0, 0.015, 1e-5, False),               # 2 % of the call, where it is long
    (1e-3, 9e-4, 8e-4, False)])                                        # the wait itself is slow
def test_a_device_went_on_where_waiting_for_it_took_longer_than_when_it_is_idle(call, wait, idle_wait, went_on):
    assert referee.left_busy(call, wait, idle_wait) is went_on


QUICK, SLOW = 1e-5, 1e-3


@pytest.mark.unit
@pytest.mark.parametrize("looks, told", [
    (3 * [(SLOW, QUICK)], [False, False, True]),                       # work is left each time
    ([(SLOW, QUICK), (SLOW, QUICK), (QUICK, QUICK), (SLOW, QUICK), (SLOW, QUICK)], 5 * [False]),       # now and then
    (12 * [(SLOW, SLOW)], 12 * [False]),                               # all waits are slow
    ([(SLOW, QUICK), (SLOW, SLOW), (SLOW, QUICK), (SLOW, QUICK)], [False, False, False, True])])       # one is slow
def test_work_is_left_on_a_stream_where_it_is_seen_thrice_in_a_row(looks, told, monkeypatch):
    """Where waiting itself is slow nothing is told, and one more look is asked for, but not without end."""
    waits = [wait for first, idle in looks for wait in (first, idle, idle, idle)]
    monkeypatch.setattr(referee, "_seconds_of", lambda wait: waits.pop(0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    watch = referee._Watch(SimpleNamespace(), FORWARD, [torch.zeros(2)], [])
    watch.began = time.perf_counter()
    found, asked = [], []
    for number in range(len(looks)):
        found.append(watch._goes_on(torch.device("cuda")))
        asked.append(watch.asks_again(number))
    assert found == told
    slow = [first == SLOW for first, _ in looks]
    assert asked == [is_slow and not all_told and number + 1 < referee.MOST_SLOW_WAITS
                     for number, (is_slow, all_told) in enumerate(zip(slow, told, strict=True))]


@pytest.mark.unit
def test_a_gradient_that_was_wrong_once_is_looked_at_three_times():
    watch = referee._Watch(SimpleNamespace(), FORWARD, [torch.zeros(2)], [])
    assert not any(watch.asks_again(number) for number in range(4))
    watch.suspected = 1
    assert [watch.asks_again(number) for number in range(4)] == [True, True, False, False]


@pytest.mark.unit
@pytest.mark.parametrize("name", ["everybody's precision lowered", "the host's clock replaced", "allclose replaced",
                                  "equality of tensors replaced"])
def test_what_a_cheat_changed_for_all_is_put_back(name):
    clock, equal, close = time.perf_counter_ns, torch.equal, torch.allclose
    try:
        assert not validate(CHEATS[name].make(), Layer(), given()).passed
        assert (time.perf_counter_ns, torch.equal, torch.allclose) == (clock, equal, close)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        CHEATS[name].undo()


# ---------------------------------------------------------------------------------------------------------- honest ones


class Precise(Layer):
    """It sets what is global, and puts it back."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return super().forward(x)
        finally:
            torch.set_float32_matmul_precision(before)


class Memoized(Layer):
    """A cache of what does not depend on the input."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "zeros"):
            self.zeros = torch.zeros(cheats.WIDTH)
        return super().forward(x) + self.zeros.to(x.dtype)


class Reuses(Layer):
    """An output buffer of its own, which a later call writes over: as it is declared."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != torch.float32:
            return super().forward(x)
        if not hasattr(self, "out"):
            self.out = torch.empty(cheats.TOKENS, cheats.WIDTH)
        return self.out.copy_(super().forward(x))


@pytest.mark.integration
@pytest.mark.parametrize("make", [Layer, Precise, Memoized, Reuses, lambda: nn.Sequential(Layer())])
def test_honest_layers_pass_and_are_timed(make):
    found = compare({"honest": make()}, (given(),), Layer(), rounds=6, overwrites_output=["honest"])
    assert found.results["honest"].status == "ok", found
    assert found.results["honest"].best_ms("forward+backward") > 0


@pytest.mark.integration
def test_other_values_are_the_references_while_they_are_timed():
    """Else a timed call would give another result than the reference's on its input."""
    torch.manual_seed(0)
    own, reference = nn.Linear(8, 8), nn.Linear(8, 8)
    before = own.weight.detach().clone()
    found = compare({"own": own}, (tensor(4, 8),), reference, rounds=6)
    assert found.results["own"].status == "ok", found
    assert torch.equal(own.weight, before)


@pytest.mark.integration
def test_dropout_tokens_and_losses_are_timed_under_the_referee():
    torch.manual_seed(0)
    reference = pairs.random(pairs.GPT(), torch.float32)
    candidate = pairs.GPT(pairs.fused)
    candidate.load_state_dict(reference.state_dict())
    drops = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
    for module, inputs, of in ((candidate, (pairs.tokens(),), reference), (drops, (tensor(16, 8),), drops)):
        found = compare({"one": module}, inputs, of, rounds=6, loss=lambda y: y.square().mean())
        assert found.results["one"].status == "ok", found


# -------------------------------------------------------------------------------------------------------- fresh inputs


@pytest.mark.unit
def test_fresh_inputs_are_others_of_the_same_kind():
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf)
    tokens, keep, lengths = torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.bool), torch.tensor([3, 4, 2])
    tensors = [tensor(3, 4), mask.clone(), tokens.clone(), keep.clone(), lengths.clone()]
    attended = (mask == 0).float()
    tensors.append(attended.clone())
    refresher = refreshing.Refresher(tensors)
    seen = set()
    for _ in range(5):
        refresher.refresh()
        x, additive, ids, kept, sizes, ones = tensors
        assert torch.equal(additive, mask) and torch.equal(ones, attended)
        assert torch.equal(ids.sort(-1).values, tokens) and not torch.equal(ids, tokens)
        assert kept.all() and torch.equal(sizes, lengths)
        seen.add(float(x.sum()))
    assert len(seen) == 5


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_mask_of_whole_numbers_stays_beside_data(dtype):
    """Shifted, padding would come first, and a causal row would see no key."""
    padded = torch.tensor([[1, 1, 1, 0]], dtype=dtype)
    for data in (tensor(3, 4), torch.arange(12).view(3, 4)):
        tensors = [data.clone(), padded.clone()]
        refreshing.Refresher(tensors).refresh()
        assert torch.equal(tensors[1], padded) and not torch.equal(tensors[0], data)
    alone = [padded.clone(), torch.tensor([3])]
    refreshing.Refresher(alone).refresh()
    assert not torch.equal(alone[0], padded), "beside no data it is the data"


@pytest.mark.unit
@pytest.mark.parametrize("shape, most", [((2, 4), 1), ((2, 7), 1), ((2, 8), 2), ((40,), 10), ((2, 1, 1, 16), 4)])
def test_ones_beside_data_are_padded_at_the_end(shape, most):
    """They may be a mask that hides nothing: of (1 - mask) * least any noise is larger than all scores."""
    tensors = [tensor(3, 4), torch.ones(shape)]
    refresher = refreshing.Refresher(tensors)
    counts = set()
    for _ in range(400):                                   # one of ten counts is missing once in 10**17 times
        refresher.refresh()
        zeros = (tensors[1] == 0).sum(-1)
        count = int(zeros.flatten()[0])
        assert (zeros == count).all() and not tensors[1][..., -count:].any() and (tensors[1][..., :-count] == 1).all()
        counts.add(count)
    assert counts == set(range(1, most + 1))


@pytest.mark.unit
@pytest.mark.parametrize("ones, others", [
    (torch.ones(2, 3), [tensor(3, 4)]), (torch.ones(2, 8), []), (torch.ones(2, 8), [torch.tensor([3])])])
def test_few_ones_or_ones_alone_get_noise(ones, others):
    tensors = [ones.clone(), *others]
    refresher = refreshing.Refresher(tensors)
    values = set()
    for _ in range(50):                                    # six of ten elements are clamped to 1: all in fifty, never
        refresher.refresh()
        values.update(tensors[0].unique().tolist())
    assert len(values) > 2 and max(values) == 1


@pytest.mark.unit
@pytest.mark.parametrize("base", [torch.randn(64, 64), torch.ones(64, 64), torch.tensor([[torch.nan, *range(63)]])])
def test_a_fresh_input_has_the_size_and_the_range_of_the_one_before(base):
    tensors = [base.clone()]
    refresher = refreshing.Refresher(tensors)
    for _ in range(5):
        refresher.refresh()
        others, largest = tensors[0].nan_to_num(), base.nan_to_num().abs().amax()
        assert not torch.equal(others, base.nan_to_num()) and others.abs().amax() <= largest
        assert 0.7 < others.norm() / base.nan_to_num().norm() < 1.05


@pytest.mark.unit
@pytest.mark.parametrize("other", [torch.tensor([3]), torch.tensor([[True, False]])])
def test_a_mask_changes_where_nothing_else_can(other):
    """Else an answer from memory would do."""
    spikes = torch.tensor([[0.0, 1.0]]).repeat(1, 100)     # some of them get another value, not all
    tensors = [spikes.clone(), other.clone()]
    refreshing.Refresher(tensors).refresh()
    assert not torch.equal(tensors[0], spikes) and torch.equal(tensors[1], other)


@pytest.mark.gpu
@pytest.mark.unit
@pytest.mark.parametrize("ahead", [1, 64])
def test_fresh_inputs_do_not_wait_for_the_gpu(ahead, monkeypatch):
    """The host would lose its lead, and each call would take as long as its launches."""
    monkeypatch.setattr(refreshing, "MOST_AHEAD", ahead)
    tensors = [tensor(64, 64).cuda(), torch.zeros(8, 8, device="cuda"), torch.arange(12, device="cuda").view(3, 4),
               torch.ones(2, 8, device="cuda")]
    refresher = refreshing.Refresher(tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            refresher.refresh()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Counts(TorchDispatchMode):
    """How often a value is read from a tensor with data."""
    reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return function(*args, **(kwargs or {}))


@pytest.mark.unit
def test_fresh_inputs_read_no_value():
    refresher = refreshing.Refresher([tensor(8, 8), torch.zeros(8, 8), torch.ones(2, 8)])
    with Counts() as counts:
        bool(torch.ones(()))
        refresher.refresh()
    assert counts.reads == 1


@pytest.mark.unit
@pytest.mark.parametrize("is_refreshed", [False, True])
def test_what_is_timed_beside_a_candidate_gets_fresh_inputs_too(is_refreshed):
    x = tensor(8, 8)
    subject = subject_of(nn.Linear(8, 8), Work(Inputs.of(x)), (0.0, 0.0), is_refreshed=is_refreshed)
    work, seen = subject.iteration(FORWARD), {}
    for _ in range(4):
        work.between()
        work.run()
        seen[subject.inputs[0].sum().item()] = None
    assert len(seen) == (4 if is_refreshed else 1) and torch.equal(x, tensor(8, 8))
    assert (work.plain is not None) == is_refreshed


@pytest.mark.unit
def test_an_input_of_zeros_gets_other_values():
    tensors = [torch.zeros(3, 4)]
    refreshing.Refresher(tensors).refresh()
    assert tensors[0].count_nonzero() == 12


@pytest.mark.unit
def test_a_reference_without_a_backward_is_a_line():
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("only in training mode")
    with pytest.raises(ValueError, match="can't be judged by: RuntimeError: only in training mode"):
        validate(F.gelu, Forward.apply, tensor(4, 4))


@pytest.mark.unit
def test_inputs_that_can_not_be_changed_are_not_asked_for():
    assert list(refreshing.fresh(calls.Inputs((torch.ones(3, dtype=torch.bool),)), 2)) == []


@pytest.mark.unit
def test_a_reference_that_has_no_answer_on_other_inputs_is_said():
    """A table that was made for the one input."""
    x = tensor(4, 4)
    total = float(x.sum())

    def table(x: Tensor) -> Tensor:
        if abs(float(x.sum()) - total) > 1e-3:
            raise ValueError("not in the table")
        return F.gelu(x)
    judgement = validate(lambda x: F.gelu(x), table, x)
    assert judgement.passed and any("not judged on fresh inputs: ValueError" in note for note in judgement.notes)


@pytest.mark.unit
def test_what_is_global_is_seen_and_named():
    before = process_state.Globals()
    assert before.changed() == ""
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    assert "cudnn.benchmark from" in before.changed() and before.changed() == ""


# ------------------------------------------------------------------------------------------------ gradients and kinks


def apart_by(share: float) -> dict[str, tuple[Tensor, Tensor]]:
    """A gradient that is off by that share of its norm, small beside the norm of all."""
    own = torch.zeros(16).index_fill(0, torch.tensor([0]), 1.0)
    return {"w": (own + share * own.roll(1), own)}


@pytest.mark.unit
@pytest.mark.parametrize("share, is_wrong", [(0.9 * apart.GROSS, False), (1.1 * apart.GROSS, True)])
def test_a_gradient_may_be_off_by_a_little(share, is_wrong):
    assert bool(apart.gradients_too_far_apart(apart_by(share), 0.0, 0.0, list)) == is_wrong


@pytest.mark.unit
@pytest.mark.parametrize("times, is_wrong", [(0.95, False), (1.05, True)])
def test_a_gradient_may_be_off_by_what_a_rounding_of_the_inputs_does_to_it(times, is_wrong):
    moves = [{"w": own} for own in ((apart_by(each)["w"][0]) for each in (0.1, 0.3, 0.2))]
    pairs = apart_by(times * apart.TIMES_MOVED * 0.3)
    assert bool(apart.gradients_too_far_apart(pairs, 0.0, 0.0, lambda: moves)) == is_wrong


@pytest.mark.unit
def test_a_gradient_is_held_where_the_references_own_is_finite():
    own = torch.ones(4)
    own[0] = math.inf
    mine = torch.ones(4)
    assert not apart.gradients_too_far_apart({"w": (mine, own)}, 0.0, 0.0, list)
    assert apart.gradients_too_far_apart({"w": (2 * mine, own)}, 0.0, 0.0, list)
    assert not apart.gradients_too_far_apart({"w": (2 * mine, own)}, 0.0, 0.0, lambda: [{"w": mine * 3}, {"w": own}])
    assert apart.gradients_too_far_apart({"w": (mine[:2], own)}, 0.0, 0.0, lambda: [{"w": own}])


@pytest.mark.integration
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["thirty ReLUs behind each other", "a mean that every call moves",
                                  "spectral normalization"])
def test_what_rounds_otherwise_before_kinks_or_has_a_state_passes(name, dtype, device):
    pair = pairs.RIGHT[name](dtype).to(device)
    found = compare({"it": pair.candidate}, pair.inputs, pair.reference, rounds=4)
    assert found.results["it"].status == "ok", found


@pytest.mark.integration
def test_a_stale_gradient_before_many_kinks_is_found():
    """In FP32, where a rounding moves none of them so far."""
    class Stale(pairs._Deep):
        first: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if x.dtype == torch.float32 and y.requires_grad:
                y.register_hook(self.stale)
            return y

        def stale(self, dy: Tensor) -> Tensor:
            self.first = dy if self.first is None else self.first
            return self.first
    pair = pairs.RIGHT["thirty ReLUs behind each other"](torch.float32)
    stale = Stale()
    stale.load_state_dict(pair.reference.state_dict())
    judgement = validate(stale, pair.reference, pair.inputs)
    assert not judgement.passed, judgement


@pytest.mark.integration
def test_whoever_is_held_against_what_changes_its_input_may_change_it_too():
    class ReluInPlace(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.relu(x, inplace=not torch.is_grad_enabled()))
    found = compare({"it": ReluInPlace()}, (given(torch.device("cpu")),), ReluInPlace(), rounds=4)
    assert found.results["it"].status == "ok", found


def rows_of(layer, x):
    """(the referee, one row that is launched as usual, what comes between two replays of another on the same x)."""
    watch = referee.Referee(lambda x: [layer(x)], [], 1e-5, 1e-5, False, [], [])
    usual = watch.watched(iteration.of_call(layer, [x], [], {}, FORWARD), [x], [], FORWARD)
    written = [torch.empty_like(layer(x))]

    def replay() -> None:
        written[0].copy_(layer(x).detach())
    return watch, usual, replay, watch.between_replays(replay, written, [x], FORWARD)


@pytest.mark.unit
def test_rows_that_share_their_inputs_are_looked_at_before_these_change():
    torch.manual_seed(0)
    watch, usual, replay, between = rows_of(nn.Linear(8, 8), torch.randn(4, 8))
    looked = []
    for _ in range(100):
        for before, run in ((usual.between, usual.run), (between, replay)):
            before()
            run()
            looked.append(watch.waiting)
    watch.look_at_last()
    assert not watch.found and len({row.mode for row in looked if row}) == 2


@pytest.mark.unit
def test_a_look_that_was_due_comes_later_where_the_call_did_not(monkeypatch):
    monkeypatch.setattr(referee, "LOOKS", 1)
    watch, usual, _, between = rows_of(cheats.Centred(), torch.randn(4, 64))
    usual.between()
    usual.run()
    usual.between()                                        # the second call is due, and does not run
    assert watch.waiting and watch.waiting.mode == FORWARD
    between()
    assert not watch.waiting
    usual.between()
    assert watch.waiting and watch.waiting.mode == FORWARD


@pytest.mark.unit
def test_a_graph_that_is_not_replayed_is_let_go_of():
    class Graph:
        def __call__(self) -> None:
            pass
    watch, graph = referee.Referee(lambda x: [x], [], 1e-5, 1e-5, False, [], []), Graph()
    watch.between_replays(graph, [torch.zeros(2)], [torch.zeros(2)], FORWARD)
    kept = weakref.ref(graph)
    del graph
    assert kept() is not None
    watch.forget_replay(FORWARD)
    assert kept() is None and not watch.last_looks


@pytest.mark.unit
@pytest.mark.parametrize("calls, found", [(-1000, ""), (cheats.CALLS, "leaves a buffer of shape (64,) as it was")])
def test_a_state_that_a_timed_call_leaves_alone_is_found(calls, found):
    candidate, reference, x = cheats.StateLeftAlone(), cheats.Centred(), given(torch.device("cpu"))
    candidate.calls = calls
    watch = referee.Referee(lambda x: [reference(x)], [], 1e-5, 1e-5, False, [(candidate.mean, reference.mean)], [])
    work = watch.watched(iteration.of_call(candidate, [x], [], {}, FORWARD), [x], [], FORWARD)
    for _ in range(3):
        work.between()
        work.run()
    watch.look_at_last()
    assert found in watch.found and bool(found) == bool(watch.found) == bool(watch.checks), watch.found
    assert not reference.mean.any(), "the reference's own state is as it was"


class Running(nn.Module):
    """Each call moves a running mean, and a second one would move it again."""

    def __init__(self, momentum: float = 0.1):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0).detach(), self.momentum)
        return 2 * x


@pytest.mark.unit
@pytest.mark.parametrize("momentum, found", [(0.1, ""), (0.3, "in another state than the reference does")])
@pytest.mark.parametrize("shares", [False, True])
def test_a_state_is_held_against_one_call_of_the_reference_however_often_that_is_asked(momentum, found, shares):
    """As where its outputs in FP32 are others, and in the declared numerics the same."""
    reference, candidate, x = Running(), Running(momentum), torch.randn(16, 8) + 3
    if shares:
        candidate.mean = reference.mean

    def rounded(x: Tensor) -> list[Tensor]:
        return [reference(x).bfloat16().float()]
    watch = referee.Referee(lambda x: [reference(x)], [], 1e-5, 1e-5, False, [(candidate.mean, reference.mean)], [],
                            in_its_numerics=rounded)
    call = iteration.of_call(lambda x: candidate(x).bfloat16().float(), [x], [], {}, FORWARD)
    work = watch.watched(call, [x], [], FORWARD)
    for _ in range(3):
        work.between()
        work.run()
    reference.mean += 100 * shares                             # another rung's call, on the buffers that all share
    watch.look_at_last()
    found = found * (not shares)
    assert found in watch.found and bool(found) == bool(watch.found), watch.found


@pytest.mark.unit
@pytest.mark.parametrize("off, found", [(5e-4, False), (5e-2, True)])
def test_a_running_mean_near_zero_is_held_against_the_norm_of_all_buffers(off, found):
    mean, variance = torch.full((8,), 1e-6), torch.ones(8)
    pairs = [(mean + off, mean), (variance.clone(), variance)]
    of_it = referee.Referee(lambda x: [x], [], 1e-3, 1e-3, False, pairs, [])
    watch = referee._Watch(of_it, FORWARD, [torch.ones(1)], [])
    watch.state, watch.expected_state = [torch.zeros(8), torch.ones(8)], [mean, variance]
    assert bool(watch._other_state([mean + off, variance])) == found


class Routed(nn.Module):
    """Each row goes to the expert with the highest score; most scores nearly tie."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))
        with torch.no_grad():
            self.router.weight.mul_(0.02)
            self.router.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        return torch.bmm(x[:, None], self.experts[scores.argmax(-1)])[:, 0] * scores.softmax(-1).amax(-1, keepdim=True)


class Autocast(Routed):
    """What it declares, and what it does with its output then."""
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.factor * super().forward(x)


class Doubled(Autocast):
    """Once it is timed: on the inputs that it was judged on it is right."""
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        self.factor = 1.0 if self.calls < cheats.CALLS else 2.0
        return super().forward(x)


@pytest.mark.integration
@pytest.mark.parametrize("kind, status", [(Autocast, "ok"), (Doubled, "failed")])
def test_in_its_numerics_a_model_may_choose_other_experts(kind, status):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (Routed()(x).sign() != Autocast()(x).sign()).any()
    found = compare({"it": kind()}, (x,), Routed(), rounds=4, numerics={"it": "bfloat16"})
    assert found.results["it"].status == status, found


@pytest.mark.integration
def test_a_state_of_other_names_leaves_values_untold():
    """Nobody knows which of its buffers stands for which: what depends on them is not compared in timed calls."""
    class Renamed(cheats.Centred):
        def __init__(self) -> None:
            super().__init__()
            del self.mean
            self.register_buffer("centre", torch.zeros(cheats.WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.centre.lerp_(x.detach().mean(0), 0.1)
            return Layer.forward(self, x - self.centre)
    found = compare({"it": Renamed()}, (given(torch.device("cpu")),), cheats.Centred(), rounds=4)
    assert found.results["it"].status == "ok", found


class Cancelling(nn.Module):
    """A sum of which little is left. Once it has been judged it may be off."""

    def __init__(self, summed=lambda x, y: (x - y).sum(), late=0.0):
        super().__init__()
        self.summed, self.late, self.calls = summed, late, 0

    def forward(self, x):
        self.calls += 1
        return self.summed(x, x.roll(1)) + 1e-2 * x.sum() + self.late * (self.calls >= cheats.CALLS)


@pytest.mark.integration
@pytest.mark.parametrize("late, status", [(0.0, "ok"), (1e-2, "failed")])
@pytest.mark.parametrize("seed", range(3))
def test_an_output_near_zero_is_held_against_what_rounding_the_inputs_does_to_it(late, status, seed):
    torch.manual_seed(seed)
    added_otherwise = Cancelling(lambda x, y: x.sum() - y.sum(), late)
    run = compare({"it": added_otherwise}, (torch.randn(64, 64),), Cancelling(), rounds=20, seed=seed).results["it"]
    assert run.status == status, run.info["reason"]


class Moving(nn.Module):
    """A sum of which little is left, times a buffer that each call changes and the backward needs."""

    def __init__(self, summed):
        super().__init__()
        self.summed = summed
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale.mul_(0.5).add_(1.0)
        return self.scale * (self.summed(x, x.roll(1)) + 1e-2 * x.sum())


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(3))
def test_the_backward_of_the_reference_runs_before_its_buffers_change_again(seed):
    torch.manual_seed(seed)
    reference, otherwise = Moving(lambda x, y: (x - y).sum()), Moving(lambda x, y: x.sum() - y.sum())
    run = compare({"it": otherwise}, (torch.randn(64, 64),), reference, rounds=20, seed=seed).results["it"]
    assert run.status == "ok", run.info["reason"]


class Checkpointed(nn.Module):
    """Half of it is computed again in the backward. Once it has been judged it is another function, where it is told to
    be: in its result, or in its gradients alone.
    """

    def __init__(self, reentrant, late=""):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.reentrant, self.late, self.calls = reentrant, late, 0

    def forward(self, x):
        self.calls += 1
        y = checkpoint(self._half, self.first(x), use_reentrant=self.reentrant)
        if not self.late or self.calls < cheats.CALLS:
            return y
        return 1.5 * y if self.late == "result" else y + 0.5 * (y - y.detach())

    def _half(self, x):
        return torch.relu(self.second(x))


@pytest.mark.integration
def test_what_is_checkpointed_reentrantly_is_timed_and_its_gradients_are_left_alone():
    """torch.autograd.grad can't go through such a graph."""
    reference = pairs.alike(Checkpointed(True), Checkpointed(True), torch.float32, tensor(8, 16)).reference
    candidate = copy.deepcopy(reference)
    found = compare({"candidate": candidate}, (tensor(8, 16),), reference, rounds=6)
    assert found.results["candidate"].status == "ok", found
    assert all(t.grad is None for t in reference.parameters())


@pytest.mark.integration
@pytest.mark.parametrize("late, said", [("result", "returned another result"), ("gradient", "left another gradient")])
def test_what_is_checkpointed_reentrantly_and_changes_once_it_is_timed_is_refused(late, said):
    reference = Checkpointed(True)
    candidate = copy.deepcopy(reference)
    candidate.late = late
    run = compare({"candidate": candidate}, (tensor(8, 16),), reference, rounds=20).results["candidate"]
    assert run.status == "failed" and said in run.info["reason"], run.info["reason"]


@pytest.mark.unit
def test_a_checkpoint_is_seen_in_a_graph_where_it_is_reentrant():
    x = tensor(8, 16).requires_grad_()
    assert referee._checkpoints_reentrantly(Checkpointed(True)(x).sum())
    assert not referee._checkpoints_reentrantly(Checkpointed(False)(x).sum())
    assert not referee._checkpoints_reentrantly(x) and not referee._checkpoints_reentrantly(x.detach())


@pytest.mark.unit
def test_the_reference_runs_on_other_inputs_only_until_all_is_explained():
    own = torch.ones(4)
    runs = []

    def moved():
        for share in (0.01, 1.0, 2.0, 4.0):
            runs.append(share)
            yield {"w": own * (1 + share)}
    assert not apart.gradients_too_far_apart({"w": (own * 2, own)}, 0.0, 0.0, moved)
    assert runs == [0.01, 1.0]
    assert apart.gradients_too_far_apart({"w": (own * 1e3, own)}, 0.0, 0.0, moved)
    assert runs == [0.01, 1.0, 0.01, 1.0, 2.0, 4.0]
    assert not apart.gradients_too_far_apart({"w": (own, own)}, 0.0, 0.0, moved) and len(runs) == 6
