"""The matmul of experts in FP64: the same as torch's kernel in BF16, and an oracle for a mixture of experts."""
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.examples.pairs import tensor
from benchmarks.measure.grouped import by_matmuls, grouped_in_fp64
from benchmarks.measure.judge import validate

pytestmark = [pytest.mark.unit,
              pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped matmul")]

ENDS = torch.tensor([3, 3, 7, 16], dtype=torch.int32)                  # one group is empty


@pytest.mark.parametrize("a, b, offs", [
    ((16, 8), (4, 8, 16), ENDS), ((4, 8, 32), (32, 16), ENDS), ((8, 16), (16, 32), ENDS),
    ((4, 8, 16), (4, 16, 8), None)],
    ids=["rows", "columns", "products", "all"])
def test_each_form_is_that_of_the_kernel(a, b, offs):
    a, b = tensor(*a), tensor(*b, seed=1)
    expected = torch._grouped_mm(a.bfloat16(), b.bfloat16(), offs=offs)
    with grouped_in_fp64():
        seen = torch._grouped_mm(a.bfloat16().double(), b.bfloat16().double(), offs=offs)
    torch.testing.assert_close(seen.bfloat16(), expected, atol=2e-2, rtol=2e-2)


def test_what_no_group_has_is_zero():
    ends = torch.tensor([3, 7], dtype=torch.int32)
    assert not by_matmuls(tensor(12, 8), tensor(2, 8, 4), ends)[7:].any()
    assert not by_matmuls(tensor(2, 4, 8), tensor(8, 12), ends)[:, 7:].any()


def test_the_kernel_is_back_afterwards():
    kernel = torch._grouped_mm
    with pytest.raises(ZeroDivisionError), grouped_in_fp64():
        raise ZeroDivisionError
    assert torch._grouped_mm is kernel


class Experts(nn.Module):
    """Rows sorted by expert, each through its own matrix."""

    def __init__(self, factor: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 8, 16) / 8**0.5)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        multiply = getattr(F, "grouped_mm", torch._grouped_mm)
        return torch.relu(self.factor * multiply(x, self.weight, offs=ENDS))


@pytest.mark.parametrize("factor, passes", [(1.0, True), (1 + 1e-6, False)])
def test_a_mixture_of_experts_has_an_oracle(factor, passes):
    judgement = validate(Experts(factor), Experts(), tensor(16, 8))
    assert judgement.truth == "FP64" and judgement.passed == passes, judgement
