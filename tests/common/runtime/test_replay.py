"""A replay is proved to be the iteration: what stands in for a graph here misses some of its work."""
import contextlib
import dataclasses
import functools
import gc
import types
import weakref

import pytest
import torch
from torch import nn

from common import BlockConfig, steps
from common.block import oracle
from common.runtime import iteration, replay
from common.runtime.iteration import BACKWARD, BOTH, FORWARD, Iteration
from tests.helpers.blocks import case, subject_of

CONFIG = BlockConfig(batch_size=2, seq_len=16, hidden_size=32, num_heads=4, amp_dtype=None)


class Replayed:
    """Step 2 on a CPU, what would be captured of it, and what stands in for the replay of its graph."""

    def __init__(self, mode: str = BOTH, **changes):
        self.values, x, dy = case(CONFIG, dtype=torch.float64)
        self.block = self.copy()
        self.block.config = CONFIG.replace(**changes)
        self.subject = subject_of(self.block, x, dy)
        self.x = x
        self.iteration = self.subject.iteration(mode)
        self.written = []                                   # what a graph would write

    def copy(self) -> nn.Module:
        """Another block with the same parameters."""
        return steps.load(2).build(CONFIG, self.values, "cpu")

    def write(self, results) -> None:
        """As a replay leaves them behind."""
        self.written[:] = results

    def replay(self) -> None:
        """One that is the iteration itself."""
        self.write(self.iteration.run())

    def prove(self, call) -> None:
        replay.prove(self.iteration, call, self.written, self.subject.proof())

    def tensors(self) -> list[torch.Tensor]:
        """Copies of the input and all parameters."""
        return [t.detach().clone() for t in (self.x, *self.block.parameters())]

    def is_as_before(self, before: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(before, self.tensors(), strict=True))


@pytest.mark.unit
@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_a_replay_that_is_the_iteration_is_accepted(mode):
    """And everything is left as it was, without gradients."""
    r = Replayed(mode)
    before = r.tensors()
    r.prove(r.replay)
    assert r.is_as_before(before)
    assert r.x.grad is None and all(p.grad is None for p in r.block.parameters())


def _weights_of_the_capture(r: Replayed):
    copy = r.copy()
    frozen = dataclasses.replace(r.subject, call=copy, parameters=dict(copy.named_parameters())).iteration(BOTH)

    def call():
        r.write(frozen.run())
        for own, its in zip(r.block.parameters(), copy.parameters(), strict=True):
            own.grad, its.grad = its.grad, None
    return call


def _input_of_the_capture(r: Replayed):
    x = r.x.detach().clone()

    def call():
        now = r.x.detach().clone()
        r.x.detach().copy_(x)
        r.replay()
        r.x.detach().copy_(now)
    return call


def _no_backward(r: Replayed):
    return lambda: r.write([r.block(r.x).detach()])


def _no_gradient_of_one(r: Replayed):
    def call():
        r.replay()
        r.block.mlp.fc.bias.grad = None
    return call


def _a_gradient_twice(r: Replayed):
    def call():
        r.replay()
        r.x.grad.mul_(2)
    return call


@pytest.mark.unit
@pytest.mark.parametrize("wrong, said", [
    (_weights_of_the_capture, "its replay on another input and weights differs"),
    (_input_of_the_capture, "its replay on another input and weights differs"),
    (_no_backward, "the gradient of .* that it replays differs"),
    (_no_gradient_of_one, r"the gradient of mlp\.fc\.bias that it replays differs"),
    (_a_gradient_twice, "the gradient of input 0 that it replays differs"),
])
def test_a_replay_that_misses_work_is_refused(wrong, said):
    r = Replayed()
    before = r.tensors()
    with pytest.raises(RuntimeError, match=said):
        r.prove(wrong(r))
    assert r.is_as_before(before)


@pytest.mark.unit
def test_of_a_forward_its_output_is_what_there_is_to_compare():
    r = Replayed(FORWARD)
    stale = r.iteration.run()
    with pytest.raises(RuntimeError, match="its replay on another input"):
        r.prove(lambda: r.write(stale))


@pytest.mark.unit
def test_the_residual_does_not_hide_a_branch_that_is_off():
    """x is a thousand times as large as the branch; a replay of which the branch is wrong differs by 1 in 1000."""
    x = torch.randn(4, 8, dtype=torch.float64)
    reads = Iteration(lambda: [x + 1e-3 * x.sin()], lambda: None, [x], {})
    wrong = []

    def call():
        wrong[:] = [x + 1e-3 * x.cos()]
    replay.prove(reads, call, wrong, replay.Proof(1e-2, 1e-2))
    with pytest.raises(RuntimeError, match="its replay on another input"):
        replay.prove(reads, call, wrong, replay.Proof(1e-2, 1e-2, residual=x))


@pytest.mark.unit
@pytest.mark.parametrize("place", [0, 1])
def test_every_output_of_an_operation_is_compared(place):
    x = torch.randn(4, 8)
    both = iteration.of_call(lambda x: (x * 2, x * 3), [x], [], {}, FORWARD)
    written = []

    def call():
        written[:] = both.run()
        written[place].zero_()
    with pytest.raises(RuntimeError, match="its replay on another input"):
        replay.prove(both, call, written, replay.Proof(1e-2, 1e-2))


@pytest.mark.unit
def test_what_is_not_finite_proves_nothing():
    """A NaN is as far from itself as from anything."""
    x = torch.ones(3)
    nothing = iteration.of_call(lambda x: x * torch.nan, [x], [], {}, FORWARD)
    written = []
    with pytest.raises(RuntimeError, match="its replay on another input"):
        replay.prove(nothing, lambda: written.__setitem__(slice(None), nothing.run()), written, replay.Proof(1.0, 1.0))


@pytest.mark.unit
@pytest.mark.parametrize("stale", [False, True])
def test_a_backward_alone_is_proved_on_another_cotangent(stale):
    """What it reads is changed as its subject says, and is itself again afterwards."""
    copies = [[torch.randn(3, 4, requires_grad=True)] for _ in range(2)]
    backward = iteration.of_copies(lambda x: x.sin(), copies, BACKWARD, seed=1)
    before = backward.reads[0].clone()
    first, written = backward.run(), []

    def call():
        written[:] = first if stale else backward.run()
    proof = replay.Proof(1e-6, 1e-6, change=lambda tensor: tensor.mul_(-0.5))
    refused = pytest.raises(RuntimeError, match="its replay on another input")
    with refused if stale else contextlib.nullcontext():
        replay.prove(backward, call, written, proof)
    assert torch.equal(backward.reads[0], before)


# ------------------------------------------------------------------------------------------------------- FP8 scales


@pytest.mark.unit
@pytest.mark.parametrize("eager, replayed, accepted", [
    ((0, 1), (0, 1), True), ((0, 1), (0,), False), ((0, 1), (), False), ((0,), (0,), True), ((), (), True),
], ids=["all in use", "one of two", "none: the graph updates other tensors", "cached weights stay", "no scale moves"])
def test_a_replay_must_move_every_scale_that_a_run_moves(eager, replayed, accepted):
    r = Replayed()
    state = types.SimpleNamespace(scale=torch.tensor([5.0, 5.0, 1.0]), amax_history=torch.tensor([[1.0, 1.0, 0.0]]))
    r.block.mlp.fp8_meta = {"scaling_fwd": state}
    plain = r.iteration.run

    def run(places):
        results = plain()
        for place in places:
            state.scale[place], state.amax_history[0, place] = 5.0, 1.0
        return results

    r.iteration = dataclasses.replace(r.iteration, run=functools.partial(run, eager))
    refused = pytest.raises(RuntimeError, match="FP8 scales do not move when it is replayed")
    with contextlib.nullcontext() if accepted else refused:
        r.prove(lambda: r.write(run(replayed)))
    assert state.scale.tolist() == [5.0, 5.0, 1.0] and state.amax_history.tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.unit
def test_scales_need_not_move_without_gradients():
    """None does in a forward alone."""
    r = Replayed(FORWARD)
    state = types.SimpleNamespace(scale=torch.full((2,), 5.0), amax_history=torch.ones(1, 2))
    r.block.mlp.fp8_meta = {"scaling_fwd": state}
    r.prove(r.replay)
    assert state.scale.tolist() == [5.0, 5.0]


@pytest.mark.unit
@pytest.mark.parametrize("fp8_weights", ["cached", "kept"])
def test_a_replay_of_kept_weights_need_not_follow_them(fp8_weights):
    r = Replayed(fp8_weights=fp8_weights)
    r.prove(_weights_of_the_capture(r))


# ----------------------------------------------------------------------------------------- what goes wrong meanwhile


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.unit
def test_an_interrupted_proof_leaves_everything_as_it_was(monkeypatch):
    r = Replayed()
    before = r.tensors()
    monkeypatch.setattr(torch.Tensor, "normal_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        r.prove(r.replay)
    assert r.is_as_before(before)
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        r.prove(interrupted)
    assert r.is_as_before(before)


@pytest.mark.unit
def test_where_memory_ends_halfway_the_weights_stay_as_they_were(monkeypatch):
    """Those that were negated get their sign back, those that were not reached keep it."""
    r = Replayed()
    before, negate, calls = r.tensors(), torch.Tensor.neg_, []

    def fails_once(tensor):
        calls.append(tensor)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("much")
        return negate(tensor)
    monkeypatch.setattr(torch.Tensor, "neg_", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        r.prove(r.replay)
    assert r.is_as_before(before) and len(calls) == 5


# ---------------------------------------------------------------------------------------------------------- verified


@pytest.fixture
def captured_as(monkeypatch):
    """captured_as(r, what): what a capture of r gives, or raises."""
    def set_up(r: Replayed, what):
        def capture(iterate, stream):
            if isinstance(what, Exception):
                raise what
            return what, r.written
        monkeypatch.setattr(replay, "capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return set_up


@pytest.mark.unit
def test_what_is_captured_and_proved_is_replayed(captured_as):
    """`captured` is told in between: the memory that a capture took is read before the proof takes more."""
    r, order = Replayed(), []

    def call():
        order.append("replay")
        r.replay()
    captured_as(r, call)
    replayed, reason = replay.verified(r.iteration, r.subject.proof(), captured=lambda: order.append("captured"))
    assert reason == "" and order == ["captured", "replay"]
    replayed()
    assert order == ["captured", "replay", "replay"]


@pytest.mark.unit
def test_what_a_graph_reads_and_writes_lives_as_long_as_its_replay(monkeypatch):
    """A graph keeps no tensor alive: what takes the memory would be read, or overwritten, by every replay."""
    read, written = torch.ones(2), [torch.ones(2)]
    alive = [weakref.ref(read), weakref.ref(written[0])]
    monkeypatch.setattr(replay, "capture", lambda *_, kept=written: (lambda: None, kept))
    iterate = Iteration(lambda kept=read: [torch.ones_like(kept)], lambda: None, [], {})
    replayed, _ = replay.verified(iterate, replay.Proof(0.1, 0.1))
    monkeypatch.undo()
    del read, written, iterate
    assert all(tensor() is not None for tensor in alive)
    del replayed
    assert all(tensor() is None for tensor in alive)


@pytest.mark.unit
@pytest.mark.parametrize("error, reason", [
    (RuntimeError("no\nmore"), "graph: no"),
    (ValueError("not in a graph\nat all"), "graph: not in a graph"),
    (torch.OutOfMemoryError("much"),
     "graph: out of memory, the eager run's tensors and the graph's do not fit together"),
])
def test_what_can_not_be_captured_is_a_reason(error, reason, captured_as):
    r, told = Replayed(), []
    captured_as(r, error)
    proof = r.subject.proof()
    assert replay.verified(r.iteration, proof, captured=lambda: told.append(1)) == (None, reason)
    assert told == []


@pytest.mark.unit
def test_what_is_captured_and_not_proved_is_a_reason(captured_as):
    r = Replayed()
    captured_as(r, _no_backward(r))
    replayed, reason = replay.verified(r.iteration, r.subject.proof())
    assert replayed is None
    assert reason.startswith("graph: the gradient of ") and reason.endswith("differs from an eager run's")


@pytest.mark.unit
def test_any_other_error_passes(captured_as):
    r = Replayed()
    captured_as(r, KeyError("no"))
    with pytest.raises(KeyError):
        replay.verified(r.iteration, r.subject.proof())


# ---------------------------------------------------------------------------------------------------------- capture


class FakeStream:
    """A stream that knows what it has waited for."""

    def __init__(self, name: str = "a new one"):
        self.name, self.waited_for = name, []

    def wait_stream(self, other) -> None:
        self.waited_for.append(other.name)


class FakeCuda:
    """What of torch.cuda a capture uses; what runs is told on which stream it did, and whether it was captured."""

    def __init__(self):
        self.streams = [FakeStream("the default")]
        self.capturing = False
        self.waits: list = []                               # modes of waiting for the GPU that were set

    def current_stream(self):
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        self.streams.append(stream)
        yield
        self.streams.pop()

    @contextlib.contextmanager
    def graph(self, graph, stream=None):
        with self.stream(stream or FakeStream("of the capture")):
            self.capturing = True
            yield
        self.capturing = False

    def set_stream(self, stream) -> None:
        self.streams.append(stream)

    def where(self) -> tuple[str, bool]:
        return self.current_stream().name, self.capturing


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("current_stream", "set_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: fake.waits.append(mode))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: "replayed"))
    return fake


def told_where(cuda: FakeCuda, told: list) -> Iteration:
    """An iteration that tells where it ran, and what came between."""
    def run():
        told.append(cuda.where())
        return [torch.ones(1)]
    return Iteration(run, lambda: told.append("between"), [], {})


@pytest.mark.unit
def test_a_capture_is_of_a_warm_iteration_on_a_stream_aside(cuda):
    told = []
    replayed, written = replay.capture(told_where(cuda, told))
    assert told == ["between", ("a new one", False)] * 3 + ["between", ("of the capture", True)]
    assert replayed() == "replayed" and torch.equal(written[0], torch.ones(1))
    assert cuda.current_stream().waited_for == ["a new one"]


@pytest.mark.unit
def test_nothing_is_captured_that_waits_for_the_gpu(cuda):
    """A capture that fails midway keeps its memory. The last warm-up finds the wait; the mode is put back."""
    def run():
        if cuda.waits == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return []
    with pytest.raises(RuntimeError, match="the host waits for the GPU"):
        replay.capture(Iteration(run, lambda: None, [], {}))
    assert cuda.waits == ["error", 0] and not cuda.capturing


@pytest.mark.unit
def test_a_backward_is_captured_on_the_stream_of_its_forward(cuda):
    """Autograd runs it there, whatever stream is current: on another one the capture would miss it."""
    told, forwards = [], FakeStream("the forward's")
    replay.capture(told_where(cuda, told), forwards)
    assert told == ["between", ("the forward's", False)] * 3 + ["between", ("the forward's", True)]
    assert forwards.waited_for == ["the default"] and cuda.current_stream().waited_for == ["the forward's"]


@pytest.mark.unit
def test_a_backward_is_proved_on_the_stream_of_its_forward(cuda):
    told, forwards = [], FakeStream("the forward's")
    iterate, written = told_where(cuda, told), []

    def call():
        told.append(cuda.where())
        written[:] = [torch.ones(1)]
    replay.prove(iterate, call, written, replay.Proof(1e-3, 1e-3), forwards)
    assert told == [("the forward's", False), "between"] * 2
    replayed, reason = replay.verified(told_where(cuda, told), replay.Proof(1e-3, 1e-3), forwards)
    assert (reason, {where for where in told if where != "between"}) == (
        "", {("the forward's", False), ("the forward's", True)}) and replayed


@pytest.mark.unit
def test_a_capture_that_fails_leaves_no_generator_capturing(cuda, monkeypatch):
    """Any later torch.randn of the process would fail; and all that follows would run on the capture's stream."""
    states = []
    generator = types.SimpleNamespace(clone_state=lambda: "a clone", graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def run():
        if cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return []
    with pytest.raises(RuntimeError, match="not permitted"):
        replay.capture(Iteration(run, lambda: None, [], {}))
    assert states == ["a clone"] and cuda.current_stream().name == "the default"


# ------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_a_graph_of_a_step_is_the_step(mode, dropout):
    """Captured and proved, and then replayed on an input that it has not seen."""
    config = CONFIG.replace(dropout=dropout)
    values, x, dy = case(config, "cuda")
    block = steps.load(1).build(config, values, "cuda")
    subject = subject_of(block, x, dy, "tf32")
    iterate = subject.iteration(mode)
    replayed, written = replay.capture(iterate)
    replay.prove(iterate, replayed, written, subject.proof())
    with torch.no_grad():
        x.copy_(dy)
    torch.cuda.manual_seed(3)
    replayed()
    y = written[0].clone()
    torch.cuda.manual_seed(3)
    (eager,) = iterate.run()
    assert oracle.relative_error(y, eager.double()) < 1e-3


@pytest.mark.gpu
@pytest.mark.integration
def test_a_graph_of_a_backward_alone_is_that_backward():
    """Captured where its forward ran: on another stream nothing would be captured, or the capture would fail."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copies = [[torch.randn(64, 64, device="cuda", requires_grad=True)] for _ in range(2)]
        backward = iteration.of_copies(lambda x: (x @ x).sin(), copies, BACKWARD, seed=1)
    replayed, written = replay.capture(backward, stream)
    proof = replay.Proof(1e-3, 1e-3, change=lambda tensor: tensor.mul_(-0.5))
    replay.prove(backward, replayed, written, proof, stream)
    with torch.cuda.stream(stream):
        backward.reads[0].fill_(0.25)
        replayed()
        first = written[0].clone()
        eager = backward.run()[0]
    torch.cuda.synchronize()
    assert first.abs().max() > 0 and oracle.relative_error(first, eager.double()) < 1e-3


@pytest.mark.gpu
@pytest.mark.integration
def test_random_numbers_are_drawn_behind_a_capture_that_failed():
    """A value that the host asks for can't be captured."""
    work = iteration.of_call(lambda x: x * x.sum().item(), [torch.ones(1, device="cuda")], [], {}, FORWARD)
    with pytest.raises(RuntimeError):
        replay.capture(work)
    assert torch.randn(8, device="cuda").isfinite().all()


@pytest.mark.gpu
@pytest.mark.integration
def test_a_graph_lives_on_when_all_workspaces_are_cleared():
    """The one captured before on its stream is gone by then, with all that it held."""
    def captured():
        x, w = torch.randn(128, 3072, device="cuda").half(), torch.randn(3072, 768, device="cuda").half()
        one = iteration.of_call(lambda x: x @ w, [x], [], {}, FORWARD)
        return one, *replay.capture(one)
    before = captured()
    work, replayed, written = captured()
    del before
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    held = [torch.zeros(2**20, device="cuda") for _ in range(64)]
    for _ in range(3):
        replayed()
    torch.cuda.synchronize()
    assert oracle.relative_error(written[0], work.run()[0].double()) < 1e-3
    assert all(not each.any() for each in held)


@pytest.mark.unit
@pytest.mark.parametrize("share, accepted", [(1e-6, True), (1e-4, False)])
def test_a_gradient_whose_true_value_is_zero_is_rounding_in_both(share, accepted):
    """Of a key's bias: both are noise, and neither is the other's."""
    weight, noise, other = torch.ones(100), torch.zeros(100), torch.zeros(100)
    noise[0], other[1] = 10 * share, 10 * share
    eager, replayed = {"weight": weight, "k.bias": noise}, {"weight": weight, "k.bias": other}
    if accepted:
        return replay._compare_gradients(replayed, eager, 1e-3)
    with pytest.raises(RuntimeError, match=r"gradient of k\.bias that it replays differs"):
        replay._compare_gradients(replayed, eager, 1e-3)


@pytest.mark.unit
@pytest.mark.parametrize("replayed", [{}, {"k.bias": torch.ones(100)}])
def test_a_gradient_of_zero_is_still_looked_at(replayed):
    """It must be there, and as small."""
    eager = {"weight": torch.ones(100), "k.bias": torch.zeros(100)}
    with pytest.raises(RuntimeError, match=r"gradient of k\.bias"):
        replay._compare_gradients({"weight": torch.ones(100)} | replayed, eager, 1e-3)
