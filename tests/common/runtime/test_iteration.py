"""One iteration of a pass: what it computes, what happens between two, where its gradients end."""
import pytest
import torch

from common.runtime import iteration
from common.runtime.iteration import BACKWARD, BOTH, FORWARD

pytestmark = pytest.mark.unit


def linear():
    """(a module, its input, the cotangent of its output)."""
    return torch.nn.Linear(3, 3), torch.randn(2, 3), torch.randn(2, 3)


def test_a_forward_builds_no_graph():
    module, x, dy = linear()
    forward = iteration.of_call(module, [x], [dy], dict(module.named_parameters()), FORWARD)
    forward.between()
    (y,) = forward.run()
    assert not y.requires_grad and not x.requires_grad and torch.equal(y, module(x))
    assert forward.reads == [x] and forward.gradients() == {}


def test_a_backward_reaches_every_input_and_parameter_from_nothing():
    """Again in each iteration: left behind they would be added to."""
    module, x, dy = linear()
    both = iteration.of_call(module, [x], [dy], dict(module.named_parameters()), BOTH)
    for _ in range(2):
        both.between()
        assert x.grad is None and module.weight.grad is None and module.bias.grad is None
        assert both.gradients() == {}
        (y,) = both.run()
        assert not y.requires_grad
        assert torch.equal(x.grad, dy @ module.weight) and torch.equal(module.bias.grad, dy.sum(0))
        torch.testing.assert_close(module.weight.grad, dy.T @ x)
    gradients = both.gradients()
    assert gradients.keys() == {"input 0", "weight", "bias"}
    assert gradients["weight"] is module.weight.grad and gradients["input 0"] is x.grad


def test_a_gradient_that_is_not_there_is_left_out():
    module, x, dy = linear()
    module.bias.requires_grad_(False)
    both = iteration.of_call(module, [x], [dy], dict(module.named_parameters()), BOTH)
    both.run()
    assert both.gradients().keys() == {"input 0", "weight"}


def test_of_several_inputs_the_floating_ones_take_a_gradient():
    """Indices do not; each output has its cotangent."""
    table, x = torch.randn(5, 3), torch.randn(2, 3)
    index = torch.tensor([4, 0])

    def call(table, index, x):
        return table[index], x * x
    cotangents = [torch.ones(2, 3), torch.full((2, 3), 2.0)]
    both = iteration.of_call(call, [table, index, x], cotangents, {}, BOTH)
    rows, squares = both.run()
    assert torch.equal(rows, table[index]) and torch.equal(squares, x * x)
    assert both.gradients().keys() == {"input 0", "input 2"} and not index.is_floating_point()
    assert torch.equal(x.grad, 4 * x) and table.grad.sum() == 6


def test_an_input_that_is_declared_constant_takes_no_gradient():
    mask, x = torch.tensor([1.0, 0.0, 1.0]), torch.randn(2, 3)
    both = iteration.of_call(torch.mul, [mask, x], [torch.ones(2, 3)], {}, BOTH, constants=[0])
    both.run()
    assert both.gradients().keys() == {"input 1"} and not mask.requires_grad


def copies(count: int, ask: bool) -> list[list[torch.Tensor]]:
    """The same operation's inputs, so many times, each with other numbers."""
    return [[torch.randn(4, 3, requires_grad=ask), torch.randn(3)] for _ in range(count)]


def scale(x, weight):
    """(a tensor that takes a gradient where x asks for one, another one that never does)."""
    return x * weight, x.detach().amax()


def test_a_forward_of_copies_gives_all_their_results():
    """Under no_grad; the first copy's inputs are those that a proof may change."""
    given = copies(3, ask=True)
    forward = iteration.of_copies(scale, given, FORWARD, seed=0)
    results = forward.run()
    assert len(results) == 6 and not any(y.requires_grad for y in results)
    for place, (x, weight) in enumerate(given):
        assert torch.equal(results[2 * place], x * weight) and torch.equal(results[2 * place + 1], x.amax())
    assert forward.reads == given[0] and len({y.data_ptr() for y in results}) == 6


def test_a_backward_of_copies_is_a_backward_alone():
    """Its cotangents are random, the same for the same seed, and those that a proof may change; .grad stays None."""
    given = copies(2, ask=True)
    calls = []

    def call(*inputs):
        calls.append(inputs)
        return scale(*inputs)
    backward = iteration.of_copies(call, given, BACKWARD, seed=7)
    assert len(calls) == 2
    first, second = backward.run()
    again = backward.run()
    assert len(calls) == 2, "the forward ran again"
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    (cotangent,) = backward.reads
    assert torch.equal(first, cotangent * given[0][1])
    assert all(t.grad is None for inputs in given for t in inputs)
    same, other = (iteration.of_copies(scale, given, BACKWARD, seed).reads[0] for seed in (7, 8))
    assert torch.equal(same, cotangent) and not torch.equal(other, cotangent)
    cotangent.mul_(2)
    assert torch.equal(backward.run()[0], 2 * first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_cotangent_has_the_dtype_of_its_output(dtype):
    given = [[torch.randn(4).to(dtype).requires_grad_()]]
    backward = iteration.of_copies(lambda x: x * 2, given, BACKWARD, seed=0)
    assert backward.reads[0].dtype == backward.run()[0].dtype == dtype
