"""What counts as a mask among floating inputs, and what takes a gradient where a module is trained."""
import math

import pytest
import torch

from benchmarks.measure.calls import Inputs, floating_masks
from benchmarks.measure.modules import subject_of
from benchmarks.measure.observing import Work
from common.runtime.iteration import BOTH

pytestmark = pytest.mark.unit

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("values, is_mask", [
    ([0.0, 1.0, 1.0], True), ([1.0, 1.0, 1.0], False), ([0.0, 0.0, 0.0], False), ([0.0, 1.0, 0.5], False),
    ([0.0, 2.0, 0.0], False), ([-1.0, 0.0, 1.0], False), ([0.0, -1e4, 0.0], True), ([0.0, -9999.0, 0.0], False),
    ([0.0, -1e4, -1.0], False), ([0.0, -1e9, 1.0], False), ([0.0, -math.inf, -3e38], True), ([-1e4, -1e4, -1e4], False),
    ([0.0, math.nan, 1.0], False), ([], False)])
def test_a_mask_is_known_by_its_values(values, is_mask):
    assert floating_masks([X, torch.tensor(values)]) == [False, is_mask]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_what_takes_no_gradient_anyway_is_no_floating_mask(dtype):
    assert floating_masks([X, torch.tensor([0, 1]).to(dtype)]) == [False, False]


def test_where_all_are_masks_they_are_the_data():
    spikes = torch.tensor([[0.0, 1.0]])
    assert floating_masks([spikes, 1 - spikes]) == [False, False]
    assert floating_masks([spikes, spikes == 1]) == [False, False]
    assert floating_masks([spikes, torch.tensor([3])]) == [True, False]
    assert Inputs.of(spikes).as_trained().args[0].requires_grad


def test_a_mask_takes_no_gradient_in_training_and_is_checked_all_the_same():
    inputs = Inputs.of({"x": X, "mask": torch.tensor([[1.0], [0.0]])})
    assert {name: t.requires_grad for name, t in inputs.as_trained().named().items()} == {
        "input x": True, "input mask": False}
    assert all(t.requires_grad for t in inputs.copies().named().values())


def test_the_timed_backward_has_no_gradient_of_a_mask():
    mask = torch.tensor([[1.0], [0.0]])
    subject = subject_of(lambda mask, x: (mask * 2, x * mask), Work(Inputs.of((mask, X))), (1.0, 1.0))
    both = subject.iteration(BOTH)
    (output,) = both.run()
    assert torch.equal(output, X * mask) and both.gradients().keys() == {"input 1"}
