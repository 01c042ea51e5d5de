"""Whether two callables draw from one distribution: mean and variance of each element, and how they vary together."""
import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.examples.pairs import tensor
from benchmarks.measure import chance
from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import validate
from benchmarks.measure.names import Kind, output
from benchmarks.measure.observing import Work
from tests.helpers.deep_network import Deep

pytestmark = pytest.mark.unit


class Dropped(nn.Module):
    """Dropout inside a small network; `extra` draws first shift the random numbers."""

    def __init__(self, p: float = 0.2, extra: int = 0, drop=F.dropout):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.p, self.extra, self.drop = p, extra, drop

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(self.extra, device=x.device)
        return self.second(self.drop(self.first(x), self.p, self.training))


@pytest.mark.parametrize("extra", range(1, 31))
def test_equal_dropout_that_draws_in_another_order_passes(extra):
    judgement = validate(Dropped(extra=extra), Dropped(), tensor(8, 16, seed=extra))
    assert judgement.passed and judgement.proven, judgement


def layer_drop(x: Tensor, p: float, training: bool) -> Tensor:
    return x if float(torch.rand(())) > p else x * 0


def test_a_layer_that_is_left_out_as_a_whole_passes_in_another_order():
    drop = {"drop": layer_drop, "p": 0.5}
    right = validate(Dropped(extra=1, **drop), Dropped(**drop), tensor(8, 16))
    assert right.passed and any(check.question == "chance" for check in right.checks)


@pytest.mark.parametrize("p", [0.05, 0.95])
def test_a_layer_that_is_left_out_by_another_rate_fails(p):
    """Without dropout both still draw: how far apart they are says nothing of rounding, and hides no rate."""
    wrong = validate(Dropped(extra=1, drop=layer_drop, p=p), Dropped(drop=layer_drop, p=0.5), tensor(8, 16))
    assert {check.question for check in wrong.checks if not check.passed} == {"chance"}, wrong


def unscaled(x: Tensor, p: float, training: bool) -> Tensor:
    return x * (F.dropout(torch.ones_like(x), p, training) > 0)


def one_mask_for_all(x: Tensor, p: float, training: bool) -> Tensor:
    return x * F.dropout(torch.ones_like(x[:1]), p, training)


def on_half_of_the_columns(x: Tensor, p: float, training: bool) -> Tensor:
    """Twice the variance on one half and none on the other: the same in total."""
    half = x.size(-1) // 2
    twice = 2 * p / (1 + p)                              # p / (1 - p) is the variance of a factor
    return torch.cat([F.dropout(x[:, :half], twice, training), x[:, half:]], dim=-1)


class BackwardOfAnotherMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.p = p
        return F.dropout(x, p)

    @staticmethod
    def backward(ctx, g):
        return g, None


def mask_lost_in_backward(x: Tensor, p: float, training: bool) -> Tensor:
    return BackwardOfAnotherMask.apply(x, p)


def only_without_gradients(x: Tensor, p: float, training: bool) -> Tensor:
    return x if torch.is_grad_enabled() else F.dropout(x, p, training)


class Elementwise(Dropped):
    """Dropout last: each element of the output has a mask of its own."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(self.extra)
        return self.drop(self.first(x), self.p, self.training)


@pytest.mark.parametrize("kind", [Dropped, Elementwise])
@pytest.mark.parametrize("drop, p, found_by", [
    (F.dropout, 0.1, "variance"), (F.dropout, 0.3, "variance"), (unscaled, 0.2, "mean"),
    (one_mask_for_all, 0.2, "together"), (on_half_of_the_columns, 0.2, "variance"),
    (mask_lost_in_backward, 0.2, "gradients with dropout"), (only_without_gradients, 0.2, "gradients with dropout"),
])
def test_another_distribution_is_refused(kind, drop, p, found_by):
    judgement = validate(kind(drop=drop, p=p, extra=1), kind(), tensor(8, 16))
    failed = [check.name for check in judgement if not check.passed]
    assert failed and all("with dropout" in name for name in failed)
    assert any(found_by in name for name in failed) or kind is Dropped


def test_equal_draws_are_told_apart_by_chance_no_more_often_than_is_said():
    """Of 100 pairs of equal distributions, three statistics each, few fall below the p-value at the first look."""
    generator = torch.Generator().manual_seed(0)
    below = 0
    for _ in range(100):
        shared = torch.randn(96, 1, generator=generator, dtype=torch.float64)
        drawn = shared * torch.randn(1, 40, generator=generator, dtype=torch.float64).abs()
        drawn = drawn + torch.randn(96, 40, generator=generator, dtype=torch.float64)
        below += sum(not check.passed for check in chance.of_draws(output("output"), drawn[:48], drawn[48:]))
    assert below <= 5


@pytest.mark.parametrize("factor, passes", [(1.0, True), (1.5, False)])
def test_a_spread_on_either_side_of_what_is_reported(factor, passes):
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (torch.randn(48, 200, generator=generator, dtype=torch.float64) for _ in range(2))
    assert all(check.passed for check in chance.of_draws(output("output"), factor * theirs, ours)) == passes


def half_constant(x: Tensor, p: float, training: bool) -> Tensor:
    half = x.size(-1) // 2
    return torch.cat([F.dropout(x[:, :half], p, training), x[:, half:]], dim=-1)


def half_constant_in_bf16(x: Tensor, p: float, training: bool) -> Tensor:
    return half_constant(x.bfloat16().float() if x.dtype == torch.float32 else x, p, training)


@pytest.mark.parametrize("kind", [Dropped, Elementwise])
def test_rounding_is_no_other_distribution(kind):
    """Elements that do not vary differ by a rounding between both, in each and every draw."""
    judgement = validate(kind(drop=half_constant_in_bf16, extra=1), kind(drop=half_constant), tensor(8, 16),
                         numerics="bfloat16")
    assert judgement.passed, judgement
    noisy = validate(lambda x: x + torch.randn_like(x), lambda x: torch.randn_like(x) + x, tensor(8, 16))
    assert noisy.passed, noisy


@pytest.mark.parametrize("values, passes", [(2**8, False), (2**12, True), (2**24, True)])
def test_random_numbers_of_few_values_on_either_side(values, passes):
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (torch.rand(32, 2000, generator=generator, dtype=torch.float64) for _ in range(2))
    found = chance.of_draws(output("output"), (theirs * values).floor() / values, ours)
    assert all(check.passed for check in found) == passes


@pytest.mark.parametrize("shift, passes", [(0.0, True), (0.07, True), (0.15, False)])
def test_a_mean_on_either_side_of_what_rounding_may_move(shift, passes):
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (torch.randn(48, 4000, generator=generator, dtype=torch.float64) for _ in range(2))
    assert all(check.passed for check in chance.of_draws(output("output"), theirs + shift, ours)) == passes


@pytest.mark.parametrize("off_by, passes", [(0.1, True), (0.05, False)])
def test_a_mean_that_outputs_off_by_so_much_may_move(off_by, passes):
    """A deep network in BF16 is off by more than one rounding, with dropout as without."""
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (torch.randn(48, 4000, generator=generator, dtype=torch.float64) for _ in range(2))
    found = chance.of_draws(output("output"), theirs + 0.15, ours, off_by=off_by)
    assert all(check.passed for check in found) == passes


@pytest.mark.parametrize("factor, passes", [(1.18, True), (1.27, False)])
def test_a_spread_that_outputs_off_by_so_much_may_move(factor, passes):
    """Of dropout behind them: what is larger by a fifth spreads by a fifth more, and its variance by twice that."""
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (torch.randn(48, 4000, generator=generator, dtype=torch.float64) for _ in range(2))
    found = chance.of_draws(output("output"), factor * theirs, ours, off_by=0.1)
    assert all(check.passed for check in found) == passes


@pytest.mark.parametrize("p, passes", [(0.2, True), (0.4, False)])
def test_dropout_behind_layers_that_round(p, passes):
    judgement = validate(Deep(rounds=True, p=p), Deep(rounds=False, p=0.2), tensor(16, 32), numerics="bfloat16")
    assert max(check.error for check in judgement if check.of.kind is Kind.OUTPUT) > 0.03
    assert judgement.passed == passes, judgement


def test_draws_of_other_sizes_are_refused_in_a_line():
    with pytest.raises(ValueError, match=r"draws of \(4, 3\) and \(4, 5\)"):
        chance.of_draws(output("output"), torch.ones(4, 3), torch.ones(4, 5))


def test_a_large_output_is_looked_at_in_places_and_never_copied_whole():
    """Rows hold some elements of each tensor, however large it is."""
    module = nn.Sequential(nn.Linear(4, 4096), nn.Dropout(0.5))
    side = chance.Side(module, list(module.parameters()))
    work = Work(Inputs.of(tensor(256, 4)))
    assert [rows.shape for rows in side.rows(work, 0, with_backward=False)] == [(chance.DRAWS, chance.ELEMENTS)]
    assert sum(rows.size(1) for rows in side.rows(work, 0, with_backward=True)) <= 2 * chance.ELEMENTS


def test_a_model_in_eval_draws_nothing():
    assert not chance.draws(Dropped().eval(), Work(Inputs.of(tensor(8, 16))))
    module = copy.deepcopy(Dropped())
    assert chance.draws(module, Work(Inputs.of(tensor(8, 16))))


def normal(x: Tensor) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype)


OWN = [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()]


@pytest.mark.parametrize("noise, drawn, calls, draws", [
    (0.0, torch.zeros_like, 2, False), (1e-7, torch.sin, 2, False), (1e-5, normal, 3, True),
    (1e-7, normal, chance.SEEDS, False), (0.0, lambda x: random.random(), chance.SEEDS, False),
    (0.0, lambda x: np.random.rand(), chance.SEEDS, False), (0.0, lambda x: OWN[0].random(), chance.SEEDS, False),
    (0.0, lambda x: OWN[1].rand(), chance.SEEDS, False), (0.0, lambda x: OWN[2].random(), chance.SEEDS, False),
    (0.0, lambda x: torch.rand(1, generator=OWN[3]), chance.SEEDS, False)])
def test_what_takes_random_numbers_is_asked_with_more_seeds(noise, drawn, calls, draws):
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(x)
        return x * (1 + noise * drawn(x))
    assert chance.draws(call, Work(Inputs.of(tensor(8, 16, dtype=torch.float64)))) == draws
    assert len(seen) == calls


class RarelySkipped(nn.Module):
    """A layer that is left out in one call of ten, or by another rate."""

    def __init__(self, rate: float = 0.1, numbers: Callable[[], float] = lambda: float(torch.rand(()))):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.rate, self.numbers = nn.Linear(16, 16), rate, numbers

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and self.numbers() < self.rate else x + self.layer(x)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("numbers", [lambda: float(torch.rand(())), lambda: float(torch.rand(2)[1]), random.random])
def test_layers_that_are_rarely_left_out_are_the_same_by_other_random_numbers(numbers, seed):
    """Two seeds alone mostly give the same, of one of the two at times."""
    right = validate(RarelySkipped(numbers=numbers), RarelySkipped(), tensor(4, 16, seed=seed))
    assert right.passed and any(check.question == "chance" for check in right.checks), right


@pytest.mark.parametrize("numbers", [lambda: 1.0, random.random], ids=["takes none", "takes some"])
def test_layers_that_are_never_left_out_are_found(numbers):
    wrong = validate(RarelySkipped(0.0, numbers), RarelySkipped(0.4), tensor(4, 16))
    assert {check.question for check in wrong.checks if not check.passed} == {"chance"}, wrong


class OftenSkipped(RarelySkipped):
    """Its layer is left out in train mode and without it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.numbers() < self.rate else x + self.layer(x)


class Detached(OftenSkipped):
    """Its layer never learns its bias."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.layer.weight, self.layer.bias.detach())
        return x if self.numbers() < self.rate else x + y


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [0.1, 0.4, 0.8])
def test_a_layer_that_is_left_out_has_no_gradient_for_one_seed_alone(rate, seed):
    """Another order of random numbers leaves another layer out."""
    right = validate(OftenSkipped(rate, random.random), OftenSkipped(rate), tensor(4, 16, seed=seed))
    assert right.passed and (right.worst is None or right.worst.question != "chance"), right
    wrong = validate(OftenSkipped(0.95, random.random), OftenSkipped(0.1), tensor(4, 16, seed=seed))
    assert {check.question for check in wrong.checks if not check.passed} == {"chance"}, wrong


@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_that_no_draw_has_is_missed(seed):
    """The look at one seed leaves it to the draws."""
    wrong = validate(Detached(0.1), OftenSkipped(0.1), tensor(4, 16, seed=seed))
    assert not wrong.passed and "a gradient is there in 0 of 12 draws" in str(wrong), wrong


@pytest.mark.parametrize("theirs, ours, is_missed", [
    (0, 7, True), (7, 0, True), (0, 6, False), (6, 0, False), (1, 12, False), (0, 0, False)])
def test_how_often_a_gradient_must_be_there_to_be_missed(theirs, ours, is_missed):
    sides = ([(torch.arange(12) < count).double()[:, None]] for count in (theirs, ours))
    assert bool(chance._missing(chance._GRADIENTS, *sides)) == is_missed


@pytest.mark.parametrize("spread, tells", [(2.5, False), (5.0, True)])
def test_draws_that_vary_hardly_more_than_both_are_off_by_tell_nothing(spread, tells):
    """Rounding would move their mean and variance."""
    draws = spread * torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert bool(chance.of_draws(chance._OUTPUT, draws[:32], draws[32:], off_by=1.0)) == tells


class Attending(nn.Module):
    """Attention with dropout on its weights. Softmax leaves a key bias without effect: its gradient is all rounding."""

    def __init__(self, p: float = 0.1, dtype: torch.dtype | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.p, self.dtype = p, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            weights = (self.query(x) @ self.key(x).mT / 4).softmax(-1)
            return (F.dropout(weights, self.p, self.training) @ self.value(x)).to(x.dtype)


@pytest.mark.parametrize("dtype, numerics", [(torch.bfloat16, "bfloat16"), (None, None)])
@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_that_is_all_rounding_is_no_draw(dtype, numerics, seed):
    x = tensor(4, 16, 16, seed=seed)
    right = validate(Attending(dtype=dtype), Attending(), x, numerics=numerics)
    assert right.passed, right
    assert not validate(Attending(p=0.3, dtype=dtype), Attending(), x, numerics=numerics).passed


@pytest.mark.parametrize("theirs, ours, is_kept", [
    (1.0, 1.0, True), (1e-4, 1e-4, False), (1.0, 1e-4, True), (1e-4, 1.0, True), (1.1e-3, 1e-4, True),
    (0.9e-3, 0.9e-3, False)])
def test_what_is_less_than_rounding_of_all_gradients_is_left_out(theirs, ours, is_kept):
    """Of a norm of about 1, one in a thousand; outputs and gradients of inputs stay."""
    rows = [torch.full((4, 1), 1e-9), torch.full((4, 1), 1.0)]
    left = chance._beyond_rounding([*rows, torch.full((4, 1), theirs)], [*rows, torch.full((4, 1), ours)],
                                   [torch.zeros(1), torch.zeros(1)], 1e-3 / max(1.0, (1 + ours**2)**0.5))
    assert [len(side) for side in left] == [3 if is_kept else 2] * 2


def test_the_norm_of_all_gradients_counts_every_element():
    """Rows hold some of them: 100 elements of 1 have a norm of 10."""
    rows = [torch.ones(4, 2), torch.full((4, 2), 0.5)]
    for of_all, count in ((0.04, 2), (0.06, 1)):
        kept_ones, _ = chance._beyond_rounding(rows, rows, [torch.zeros(100), torch.zeros(1)], of_all)
        assert len(kept_ones) == count
