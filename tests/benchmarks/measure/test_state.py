"""What a judge leaves behind, and from what state each run begins: attributes, lists, ties, generators, dtypes."""
import collections
import copy
import functools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.examples.pairs import tensor
from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import validate
from benchmarks.measure.keeping import parameters_kept, written_by
from benchmarks.measure.modules import compare
from benchmarks.measure.state import Start, State

pytestmark = pytest.mark.unit


class Remembers(nn.Linear):
    """Its forward changes whatever a module may hold."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen, self.log, self.kinds = [1.0], {"calls": 0}, {"a"}
        self.nested, self.queue = {"deep": [[0]]}, collections.deque([1])
        self.cache, self.config = torch.zeros(4), Config()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(2.0)
        self.log["calls"] += 1
        self.kinds.add("b")
        self.nested["deep"][0].append(1)
        self.queue.append(2)
        self.config.calls.append(1)
        self.config.last = "forward"
        with torch.no_grad():
            self.cache.add_(1)
        self.new_one = x.shape
        if "late" not in self._modules:
            self.late = nn.Identity()
        return self.late(super().forward(x))


class Config:
    def __init__(self) -> None:
        self.calls: list[int] = []


def held_in(module: Remembers) -> tuple:
    lists = module.seen, module.log, module.kinds, module.nested, list(module.queue), vars(module.config)
    return copy.deepcopy(lists), module.cache.clone(), sorted(vars(module)), sorted(module._modules)


@pytest.mark.parametrize("fails", [False, True])
def test_lists_new_attributes_and_objects_are_afterwards_as_they_were(fails):
    torch.manual_seed(0)
    reference = Remembers()
    candidate = copy.deepcopy(reference)
    if fails:
        candidate.register_forward_hook(lambda module, given, y: 2 * y)
    expected = held_in(reference)
    assert validate(candidate, reference, tensor(2, 4)).passed != fails
    for module in (reference, candidate):
        lists, cache, names, modules = held_in(module)
        assert (lists, names, modules) == (expected[0], expected[2], expected[3])
        assert torch.equal(cache, expected[1])


def test_a_state_sees_what_a_function_closes_over():
    layers, calls = [nn.BatchNorm1d(4)], {"number": 0}

    def call(x: Tensor) -> Tensor:
        calls["number"] += 1
        return layers[0](x)
    state = State(call)
    call(tensor(8, 4))
    state.restore()
    assert calls == {"number": 0} and int(layers[0].num_batches_tracked) == 0


class Tied(nn.Module):
    def __init__(self, ties: bool):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if ties:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("ties", [(True, False), (False, True), (True, True), (False, False)])
def test_ties_of_either_side_come_back_with_their_values(ties):
    torch.manual_seed(0)
    candidate, reference = map(Tied, ties)
    before = [{name: t.clone() for name, t in module.state_dict().items()} for module in (candidate, reference)]
    judgement = validate(candidate, reference, tensor(2, 4))
    for module, values in zip((candidate, reference), before, strict=True):
        assert all(torch.equal(t, values[name]) for name, t in module.state_dict().items())
    assert judgement.passed == (ties[0] == ties[1])
    assert (candidate.second.weight is candidate.first.weight) == ties[0]


def test_a_tied_candidate_beside_an_untied_reference_is_said():
    torch.manual_seed(0)
    judgement = validate(Tied(True), Tied(False), tensor(2, 4))
    assert any("first.weight and second.weight are one tensor here, two in the reference" in note
               for note in judgement.notes)


@pytest.mark.parametrize("returned", [
    lambda y: (y, y[:, -1]), lambda y: (y[0], y), lambda y: [y, y], lambda y: (y, y.mT),
    lambda y: (y, y.flatten()[::2])])
def test_outputs_that_share_memory_are_not_written_over(returned):
    def call(x: Tensor):
        return returned(x * 2)

    def clones(x: Tensor):
        return [t.clone() for t in returned(x * 2)]
    same_form = validate(call, call, tensor(4, 4))
    assert same_form.proven, same_form
    assert validate(lambda x: tuple(clones(x)), lambda x: tuple(call(x)), tensor(4, 4)).proven
    assert validate(lambda x: tuple(call(x)), lambda x: tuple(clones(x)), tensor(4, 4)).proven


def test_a_buffer_behind_a_view_is_still_found():
    buffer = torch.zeros(4, 4)

    def call(x: Tensor):
        y = torch.mul(x.detach(), 2, out=buffer)
        return y, y[:, -1]
    failure = validate(call, lambda x: (x.detach() * 2, x.detach()[:, -1] * 2), tensor(4, 4)).failure
    assert "a later call writes over it" in failure


# ------------------------------------------------------------------------------------------------------- random numbers


class Draws(nn.Module):
    """By a source that torch.manual_seed does not reach."""

    def __init__(self, source: str):
        super().__init__()
        self.linear, self.source = nn.Linear(4, 4), source
        self.torchs, self.pythons, self.numpys = torch.Generator(), random.Random(0), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        draw = {"python": random.random, "numpy": np.random.rand, "a generator of torch": self.of_torch,
                "a generator of Python": self.pythons.random, "a generator of numpy": self.numpys.random}[self.source]
        return self.linear(x) * (1 + float(draw()))

    def of_torch(self) -> float:
        return torch.rand(1, generator=self.torchs).item()


SOURCES = ["python", "numpy", "a generator of torch", "a generator of Python", "a generator of numpy"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_module_that_draws_by_itself_equals_itself(source):
    torch.manual_seed(0)
    module = Draws(source)
    assert validate(copy.deepcopy(module), module, tensor(4, 4)).passed
    wrong = copy.deepcopy(module)
    wrong.register_forward_hook(lambda module, given, y: 1.5 * y)
    assert not validate(wrong, module, tensor(4, 4)).outputs_proven


def test_every_source_of_random_numbers_goes_on_where_it_was():
    module = Draws("a generator of torch")

    def drawn() -> tuple:
        return (random.random(), float(np.random.rand()), float(torch.rand(1)), module.of_torch(),
                module.pythons.random(), float(module.numpys.random()))
    states = State(module)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = drawn()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    states.restore()
    validate(module, copy.deepcopy(module), tensor(4, 4))
    assert drawn() == expected


# -------------------------------------------------------------------------------------------------------------- complex


class Rotary(nn.Module):
    """Complex parameter, complex buffer, a product of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight) * self.turn


@pytest.mark.parametrize("inputs", [tensor(3, 4), torch.complex(tensor(3, 4), tensor(3, 4, seed=1))])
@pytest.mark.parametrize("change, passes", [
    (lambda y: y, True), (lambda y: y.conj(), False), (lambda y: torch.complex(y.real, 0.5 * y.imag), False)])
def test_complex_parameters_inputs_and_outputs(inputs, change, passes):
    torch.manual_seed(0)
    reference = Rotary()
    candidate = copy.deepcopy(reference)
    candidate.register_forward_hook(lambda module, given, y: change(y))
    judgement = validate(candidate, reference, inputs)
    assert judgement.passed == passes
    assert not passes or (judgement.proven and judgement.truth == "FP64"
                          and judgement.counted() == "1 output, 2 gradients")


def test_an_imaginary_part_that_loses_its_gradient_is_found():
    torch.manual_seed(0)
    reference = Rotary()
    candidate = copy.deepcopy(reference)
    candidate.weight.register_hook(lambda gradient: torch.complex(gradient.real, torch.zeros_like(gradient.real)))
    assert "gradient of weight" in validate(candidate, reference, tensor(3, 4)).failure


def test_a_buffer_that_a_call_writes_to_is_left_outside_of_any_graph():
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Linear(4, 4)
            self.register_buffer("keys", torch.zeros(2, 6, 4))

        def forward(self, x):
            self.keys[:, :x.size(1)] = self.key(x)
            return x @ self.keys[:, :x.size(1)].mT
    module = Cache()
    assert validate(copy.deepcopy(module), module, torch.randn(2, 3, 4)).passed
    assert module.keys.grad_fn is None and not module.keys.any()
    copy.deepcopy(module)                                      # torch refuses what is in a graph


class Decays(nn.Linear):
    """Its forward writes to its weight."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("make, given", [
    (lambda: nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 4)), torch.arange(10).view(2, 5)),
    (lambda: Decays(4, 4), torch.randn(3, 4))])
def test_a_parameter_that_a_call_writes_to_is_as_it_was(make, given):
    reference = make()
    candidate = copy.deepcopy(reference)
    before = [t.detach().clone() for t in reference.parameters()]
    assert validate(candidate, reference, given).passed
    compare({"it": candidate}, given, reference, rounds=2)
    for module in (reference, candidate):
        for t, value in zip(module.parameters(), before, strict=True):
            assert torch.equal(t, value)


class Follows(nn.Module):
    """An encoder whose parameters follow those of another with a momentum, as MoCo, BYOL and DINO have it."""

    def __init__(self, momentum=0.9, moves=True):
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = nn.Linear(6, 4), nn.Linear(6, 4)
        self.target.requires_grad_(False)
        self.momentum, self.moves = momentum, moves

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                if self.moves:
                    own.data = own.data * self.momentum + other.data * (1 - self.momentum)
                else:
                    own.data.mul_(self.momentum).add_(other.data, alpha=1 - self.momentum)
            follows = self.target(x)
        return self.online(x) - follows


class StandsStill(Follows):
    """It gives the same, and leaves its target as it was."""

    def forward(self, x):
        with torch.no_grad():
            weight, bias = (own * self.momentum + other * (1 - self.momentum) for own, other
                            in zip(self.target.parameters(), self.online.parameters(), strict=True))
            follows = nn.functional.linear(x, weight, bias)
        return self.online(x) - follows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moves", [True, False])
def test_an_encoder_that_follows_another_is_right(moves, dtype):
    x = torch.randn(3, 6, dtype=dtype)
    judgement = validate(Follows(moves=moves).to(dtype), Follows().to(dtype), x)
    assert judgement.passed and not judgement.notes, judgement
    assert "buffer target.weight" in {check.of.words for check in judgement}


@pytest.mark.parametrize("wrong, off", [(Follows(0.8), "output"), (StandsStill(), "buffer target.weight")])
def test_one_that_follows_otherwise_is_wrong(wrong, off):
    judgement = validate(wrong, Follows(), torch.randn(3, 6))
    assert off in {check.of.words for check in judgement if not check.passed}, judgement


def test_what_takes_other_memory_is_restored():
    model = Follows()
    before = {name: t.detach().clone() for name, t in model.named_parameters()}
    with parameters_kept(model, Inputs.of(torch.randn(3, 6))) as written:
        assert written == ["target.weight", "target.bias"]
        model(torch.randn(3, 6))
    assert all(torch.equal(t, before[name]) for name, t in model.named_parameters())


def test_what_a_call_writes_to_is_found_before_it_is_written():
    embedding = nn.Embedding(10, 4, max_norm=1.0)
    before = embedding.weight.detach().clone()
    [(written, value)] = written_by(embedding, Inputs.of(torch.arange(10)))
    assert written is embedding.weight and torch.equal(value, before) and torch.equal(written, before)
    assert not written_by(nn.Linear(4, 4), Inputs.of(torch.randn(2, 4)))


class Breaks(nn.Linear):
    """A graph break stands behind its product."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.sum().item() > 1e6:
            raise ValueError("too large")
        return x


def test_what_was_looked_at_for_its_writes_is_compiled_afterwards(fresh_dynamo):
    graphs = []

    def backend(module, example_inputs):
        graphs.append(module)
        return module.forward
    held = nn.Sequential(nn.Identity())                        # what is compiled is no child of it
    vars(held)["forward"] = torch.compile(nn.Sequential(Breaks(4, 4), Breaks(4, 4)), backend=backend)
    x = torch.randn(2, 4)
    assert not written_by(held, Inputs.of(x)) and not graphs
    held(x)
    assert graphs


def test_lazy_layers_get_their_shapes_and_keep_them():
    def made():
        return nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3))
    reference, candidate = made(), made()
    assert validate(candidate, reference, torch.randn(4, 5)).passed
    assert reference(torch.randn(2, 5)).shape == (2, 3) and type(candidate[0]) is nn.Linear
    assert compare({"it": made()}, torch.randn(4, 5), made(), rounds=2).results["it"].status == "ok"


class Drawing(nn.Module):
    """It has generators wherever a module may hold one."""

    def __init__(self) -> None:
        super().__init__()
        made = [torch.Generator() for _ in range(6)]
        self.below = nn.Module()
        self.below.own = made[0]
        self.listed, self.named, self.config = [(made[1],)], {"a": {"b": made[2]}}, Config()
        self.config.drawn_by = made[3]
        self.drawn = lambda: torch.rand(2, generator=made[4])
        self.bound = functools.partial(torch.rand, generator=made[5])
        self.made = None
        self.register_buffer("noise", torch.zeros(2))


def test_each_run_begins_from_the_same_random_numbers_wherever_they_come_from():
    module = Drawing()
    for whole in (True, False):
        generators = Start(module, whole)._generators
        assert len(generators) == 6
        assert set(map(id, generators)) == set(map(id, State(module).generators))


def test_the_start_of_what_keeps_no_state_copies_its_buffers_alone():
    """All else would be copied at each look."""
    module = Drawing()
    assert Start(module)._state is None and list(Start(module).before) == ["noise"]


@pytest.mark.parametrize("kept, change", [
    ([1], lambda hooks: hooks.append(2)), ({1}, lambda hooks: hooks.add(2)), ({"a": 1}, lambda hooks: hooks.clear())])
def test_attributes_that_are_called_hooks_may_hold_anything(kept, change):
    """Those of torch are dicts."""
    module = nn.Linear(2, 2)
    module.layer_hooks, module.no_hooks, before = kept, None, kept.copy()
    state = State(module)
    change(module.layer_hooks)
    handle = module.register_forward_hook(lambda *_: None)
    assert state.has_changed() and handle.id in module._forward_hooks
    state.restore()
    assert module.layer_hooks == before and not module._forward_hooks and not state.has_changed()
