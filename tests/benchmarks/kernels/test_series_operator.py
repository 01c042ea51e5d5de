"""The series as a PyTorch operation: gradients, shapes for the compiler, and what it refuses."""
import math

import pytest
import torch
from torch.library import opcheck

from benchmarks.kernels.cuda import series
from benchmarks.kernels.cuda.series_operator import attention_series, scaled_dot_product_attention

unit, integration = pytest.mark.unit, pytest.mark.integration


def by_mathematics(rung, q, k, v, causal):
    """What a rung returns, here without a GPU."""
    assert rung is series.RUNGS[-1] and not q.requires_grad
    k, v = (each.repeat_interleave(q.size(1) // k.size(1), 1) for each in (k, v))
    scores = q @ k.mT / math.sqrt(q.size(3))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1).float()


def gradients_by_mathematics(rung, q, k, v, y, log_sum, dy, causal):
    """As backward.cuh has them: inside of an operation there is no autograd."""
    assert rung is series.BACKWARD_RUNGS[-1]
    B, G, S, D = k.shape
    k_of, v_of = (each.repeat_interleave(q.size(1) // G, 1) for each in (k, v))
    p = (q @ k_of.mT / math.sqrt(D) - log_sum.unsqueeze(-1)).exp()
    if causal:
        p = p.tril()
    ds = p * (dy @ v_of.mT - (dy * y).sum(-1, keepdim=True)) / math.sqrt(D)
    of_heads = (each.reshape(B, G, -1, S, D).sum(2) for each in (ds.mT @ q, p.mT @ dy))
    return ds @ k_of, *of_heads


def by_formula(q, k, v, causal):
    k, v = (each.repeat_interleave(q.size(1) // k.size(1), 1) for each in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(series, "attention", by_mathematics)
    monkeypatch.setattr(series, "gradients", gradients_by_mathematics)


def arguments(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 40, 64), (2, 2, 40, 64), (2, 2, 40, 64)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


@integration
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_an_operation_as_torch_wants_them(causal, on_a_cpu):
    """Its schema, its fake, its autograd, and both under AOTAutograd with dynamic shapes."""
    opcheck(attention_series, (*arguments(), causal))


@unit
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_reach_q_k_and_v(causal, on_a_cpu):
    given, others = arguments(), arguments()
    dy = torch.randn(2, 4, 40, 64)
    found = torch.autograd.grad(scaled_dot_product_attention(*given, is_causal=causal), given, dy)
    right = torch.autograd.grad(by_formula(*others, causal), others, dy)
    for gradient, of_formula in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, of_formula)


@integration
def test_what_is_compiled_is_one_graph_and_the_same(on_a_cpu, fresh_dynamo):
    given, dy = arguments(), torch.randn(2, 4, 40, 64)
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*given, is_causal=True), given, dy)
    right = torch.autograd.grad(scaled_dot_product_attention(*given, is_causal=True), given, dy)
    for gradient, uncompiled in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, uncompiled)


@unit
def test_dropout_is_refused():
    with pytest.raises(ValueError, match=r"dropout_p is 0\.1: the series has no dropout"):
        scaled_dot_product_attention(*arguments(), dropout_p=0.1)


@unit
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="q is on cpu: a CUDA kernel needs a GPU"):
        scaled_dot_product_attention(*arguments(dtype=torch.float16))


@pytest.mark.gpu
@integration
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu_it_is_right_compiled_and_uncompiled(dtype, fresh_dynamo):
    given, exact = arguments("cuda", dtype), [each.double() for each in arguments("cuda")]
    exact = [each.detach().to(dtype).double().requires_grad_() for each in exact]
    dy = torch.ones(2, 4, 40, 64, dtype=dtype, device="cuda")
    right = torch.autograd.grad(by_formula(*exact, True), exact, dy.double())
    for attend in (scaled_dot_product_attention, torch.compile(scaled_dot_product_attention, fullgraph=True)):
        found = torch.autograd.grad(attend(*given, is_causal=True), given, dy)
        for gradient, of_formula in zip(found, right, strict=True):
            assert (gradient.double() - of_formula).norm() < 1e-2 * of_formula.norm()
