"""Deep copies of any callable: tensors of its own, in another dtype, shared as before."""
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure.calls import held_by, modules_of, named_parameters
from benchmarks.measure.copying import deep_copy, shared_copy

pytestmark = pytest.mark.unit
WEIGHT = torch.eye(3).requires_grad_()
LAYER = nn.Linear(3, 3)


def with_a_global(x: Tensor) -> Tensor:
    return LAYER(x) @ WEIGHT


def even(x: Tensor, depth: int = 2) -> Tensor:
    return odd(x @ WEIGHT, depth - 1) if depth else x


def odd(x: Tensor, depth: int) -> Tensor:
    return even(LAYER(x), depth - 1) if depth else x


class Method:
    """No module: a method of it holds one."""

    def __init__(self, layer: nn.Module):
        self.layers = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)

    __call__ = forward


def closure() -> object:
    layer, weight = nn.Linear(3, 3), torch.ones(3, 3).requires_grad_()
    return lambda x: layer(x) @ weight


def of_a_list() -> object:
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]

    def call(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x
    return call


CALLS = {
    "a module": lambda: nn.Linear(3, 3), "a closure": closure, "globals": lambda: with_a_global, "a list": of_a_list,
    "a partial": lambda: functools.partial(lambda w, x: x @ w, torch.ones(3, 3).requires_grad_()),
    "a method": lambda: nn.Linear(3, 3).forward, "another's method": lambda: Method(nn.Linear(3, 3)).forward,
    "an object": lambda: Method(nn.Linear(3, 3)), "functions that call each other": lambda: even,
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_copy_in_fp64_runs_and_shares_nothing(kind):
    call = CALLS[kind]()
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    expected = call(x)
    copied = deep_copy(call, torch.float64)
    y = copied(x.double())
    assert y.dtype == torch.float64 and torch.allclose(y.float(), expected, atol=1e-5)
    y.sum().backward()
    assert all(t.grad is None for t in named_parameters(call).values())
    theirs = named_parameters(copied)
    assert theirs and theirs.keys() == named_parameters(call).keys()
    assert all(t.grad is not None and t.dtype == torch.float64 for t in theirs.values())


def test_ties_stay_ties_within_a_module_and_across_a_closure():
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    copied = deep_copy(tied, torch.float64)
    assert copied[1].weight is copied[0].weight and copied[0].weight.dtype == torch.float64
    weight = torch.ones(3, 3).requires_grad_()

    def inner(x: Tensor) -> Tensor:
        return x @ weight
    both = deep_copy(lambda x: inner(x) @ weight, torch.float64)
    assert len({id(t) for t in named_parameters(both).values()}) == 1


def test_a_forward_of_its_own_refers_to_the_copy():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: F.linear(x, layer.weight)
    copied = deep_copy(layer, torch.float64)
    copied(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad is None and copied.weight.grad is not None


def test_what_holds_no_tensor_is_returned_as_it_is():
    def plain(x: Tensor) -> Tensor:
        return F.gelu(x)
    for call in (F.gelu, torch.relu, plain, functools.partial(F.gelu)):
        assert deep_copy(call, torch.float64) is call


def test_every_module_in_lists_and_dicts_is_seen():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    layers = {"a": first, "b": [second]}
    held = held_by(lambda x: layers["a"](x))
    assert held["layers.a"] is first and first in modules_of(lambda x: layers["a"](x))


class Keeps(nn.Module):
    """Hooks that are closures over it keep what its layers were given and gave."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), {}
        self.layer.register_forward_hook(lambda module, given, output: self.seen.__setitem__("gave", output))
        self.layer.register_forward_pre_hook(self.keep)

    def keep(self, module, given):
        self.seen["given"] = given[0]

    def forward(self, x):
        self.layer(x)
        return self.seen["gave"] + self.seen["given"]


@pytest.mark.parametrize("copied", [lambda model: deep_copy(model, torch.float64), shared_copy])
def test_hooks_of_a_copy_keep_what_they_see_in_the_copy(copied):
    model = Keeps()
    x = torch.randn(2, 4)
    expected, seen = model(x), dict(model.seen)                # with its graph, which no deepcopy takes
    other = copied(model)
    given = x.to(other.layer.weight.dtype) * 2
    assert torch.equal(other(given), other.layer(given) + given)
    assert all(model.seen[name] is t for name, t in seen.items()) and torch.equal(model(x), expected)


def test_a_shared_copy_has_the_same_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.append(model[0])
    other = shared_copy(model)
    assert other is not model and other[0] is not model[0] and other[2] is other[0]
    assert all(other.get_parameter(name) is t for name, t in model.named_parameters())
    assert all(other.get_buffer(name) is t for name, t in model.named_buffers())
