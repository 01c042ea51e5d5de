"""Operators that somebody defined, and torch's grouped matmul: their FLOPs, and that autocast casts nothing of them."""
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.assistant.predicting import Basis
from benchmarks.assistant.program import read
from benchmarks.assistant.spending import MATMUL
from benchmarks.assistant.techniques import autocast
from benchmarks.assistant.techniques.autocast import WORTH_NAMING
from benchmarks.assistant.trace import _key_of, flops_of, trace
from benchmarks.measure.calls import Inputs

TOKENS, WIDTH, EXPERTS = 12, 8, 3
X = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("tests_of_operators::experts", mutates_args=())
def experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A matrix for each third of the rows."""
    y = x.new_zeros(x.size(0), weights.size(2))
    for rows, weight, out in zip(x.chunk(EXPERTS), weights, y.chunk(EXPERTS), strict=True):
        torch.mm(rows, weight, out=out)
    return y


@experts.register_fake
def _(x, weights):
    return x.new_empty(x.size(0), weights.size(2))


@torch.library.custom_op("tests_of_operators::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


class Experts(nn.Module):
    """A linear layer, and one whose matrices are an operator's. The head is `times` as wide."""

    def __init__(self, times=1):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, times * WIDTH)
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        y = doubled(experts(x, self.weights))
        return self.head(y)


ALL_FLOPS = 2 * TOKENS * WIDTH * WIDTH


@pytest.mark.unit
@pytest.mark.parametrize("inference", [False, True])
def test_what_multiplies_inside_is_counted(inference):
    with torch.inference_mode(inference):
        seen = trace(Experts(), Inputs.of(X))
    own, = [call for call in seen.calls if "experts" in call.name]
    assert own.flops == ALL_FLOPS and len(own.products) == EXPERTS
    assert {product.shapes[:2] for product in own.products} == {((TOKENS // EXPERTS, WIDTH), (WIDTH, WIDTH))}
    assert [call.flops for call in seen.calls if "doubled" in call.name] == [0]
    assert seen.flops == 2 * ALL_FLOPS
    assert own.bytes == 4 * (2 * TOKENS * WIDTH + EXPERTS * WIDTH * WIDTH)        # once, whatever it does inside
    assert all(product.trains_weight for product in own.products) or inference


@pytest.mark.unit
def test_what_no_plain_kernel_takes_is_called_as_it_is():
    assert _key_of(torch.ops.tests_of_operators.doubled.default, [X]) is not None
    assert _key_of(torch.ops.tests_of_operators.doubled.default, [X, torch.eye(4).to_sparse()]) is None
    assert _key_of(torch.ops.aten.mul.Tensor, [X]) is None and _key_of(torch.ops.aten.mul.Tensor, []) is None


@pytest.mark.unit
def test_its_result_is_what_a_call_gives():
    module = Experts()
    seen = []
    module.head.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().clone()))
    trace(module, Inputs.of(X))
    assert torch.equal(seen[0], 2 * experts(X, module.weights.detach()))


@pytest.mark.unit
@pytest.mark.parametrize("left, right, multiplications", [
    ((12, 8), (3, 8, 5), 12 * 8 * 5), ((3, 7, 8), (8, 12), 7 * 8 * 12),
    ((3, 7, 8), (3, 8, 5), 3 * 7 * 8 * 5), ((7, 12), (12, 5), 7 * 12 * 5)])
def test_a_grouped_matmul_counts_each_row_once(left, right, multiplications):
    operator = torch.ops.aten._grouped_mm.default
    assert flops_of(operator, (torch.empty(left), torch.empty(right)), {}, torch.empty(1)) == 2 * multiplications


@pytest.mark.unit
@pytest.mark.parametrize("dtype, times", [(torch.float32, 2), (torch.complex64, 8)])
def test_complex_numbers_are_four_multiplications_and_four_additions(dtype, times):
    left, right = torch.ones(3, 4, dtype=dtype), torch.ones(4, 5, dtype=dtype)
    assert flops_of(torch.ops.aten.mm.default, (left, right), {}, left @ right) == times * 3 * 4 * 5


@pytest.mark.unit
def test_what_autocast_casts_nothing_of_is_named():
    found, = autocast.find(read(Experts(), Inputs.of(X)))
    assert "; 50 % stay in float32, as autocast casts no operand at test_defined_operators.py:" in found.reason
    assert "model.to(torch.bfloat16)" in found.reason and len(found.stay) == 1 and found.is_partial
    whole, = autocast.find(read(nn.Linear(WIDTH, WIDTH), Inputs.of(X)))
    assert not whole.stay and not whole.is_partial


@pytest.mark.unit
@pytest.mark.parametrize("times, is_named", [(98, True), (101, False)])
def test_what_stays_is_named_from_a_percent_on(times, is_named):
    assert WORTH_NAMING == 1.0
    found, = autocast.find(read(Experts(times), Inputs.of(X)))
    assert bool(found.stay) == is_named == ("stay in float32" in found.reason)


class Spent:
    """An iteration of 100 ms of matmuls."""
    spent, total_ms = (), 100.0


@pytest.mark.unit
def test_what_stays_gains_nothing_in_the_prediction(monkeypatch):
    """Half of the FLOPs at four times the rate, instead of all of them."""
    monkeypatch.setattr(Basis, "ms_of", lambda self, kinds, places=None: 100.0 if MATMUL in kinds else 0.0)
    program = read(Experts(), Inputs.of(X))
    basis = Basis(program, Spent(), lambda arithmetic: {"float32": 1.0, "bfloat16": 4.0}[arithmetic], lambda: 1e30)
    found, = autocast.find(program)
    assert autocast.predict(basis, [found]).least_ms == 62.5
    assert autocast.predict(basis, [replace(found, stay=frozenset())]).least_ms == 25.0
