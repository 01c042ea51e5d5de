"""The switch of FP32 matmuls: each block's forward and backward in its own precision, the caller's back afterwards."""
import pytest
import torch
from torch import nn

from common import BlockConfig, parameters, steps
from common.block import oracle, precision
from common.runtime import replay
from common.runtime.iteration import BOTH
from tests.helpers.blocks import calibrate, case, subject_of
from tests.helpers.precisions import Interrupted, interrupt, interrupt_backward, watched

WIDTH = 8
each_precision = pytest.mark.parametrize("own", ["highest", "high"])


def made(own: str) -> nn.Module:
    """A block of two branches whose FP32 matmuls run in the precision `own`."""
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        @precision.float32_matmul_precision(own)
        def __call__(self, x):
            return super().__call__(x)

        def forward(self, x):
            x = x + self.attn(x)
            return x + self.mlp(x)
    return Block()


def made_and_watched(own: str):
    """(a block, precisions seen in its forward, and in its backward)."""
    block = made(own)
    return block, *watched(block, block.attn.weight)


def leaf():
    """(an input that asks for a gradient, a cotangent)."""
    return torch.randn(2, WIDTH, requires_grad=True), torch.randn(2, WIDTH)


@pytest.mark.unit
@each_precision
def test_forward_and_backward_run_in_the_blocks_own_precision(own, callers):
    """And the caller's setting is back after the call, after the backward, and after a call without gradients."""
    block, forward, backward = made_and_watched(own)
    x, dy = leaf()
    y = block(x)
    assert torch.get_float32_matmul_precision() == callers
    y.backward(dy)
    assert torch.get_float32_matmul_precision() == callers
    assert forward == [own] * 2 and backward == [own] * 3
    with torch.no_grad():
        block(x)
    assert torch.get_float32_matmul_precision() == callers
    assert forward == [own] * 4


@pytest.mark.unit
@pytest.mark.parametrize("order", [("highest", "high"), ("high", "highest"), ("highest", "high", "highest"),
                                   ("highest", "highest")], ids=" then ".join)
def test_chained_blocks_each_see_their_own_precision(order, callers):
    """One graph through blocks of several precisions: each backward in its own, and the caller's afterwards."""
    chain = [made_and_watched(own) for own in order]
    h, dy = leaf()
    for block, _, _ in chain:
        h = block(h)
        assert torch.get_float32_matmul_precision() == callers
    h.backward(dy)
    seen = [(forward, backward) for _, forward, backward in chain]
    assert seen == [([own] * 2, [own] * 3) for own in order]
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
def test_blocks_side_by_side_each_see_their_own_precision(callers):
    """Two branches of one graph, from one input to one loss."""
    pair = [made_and_watched(own) for own in ("highest", "high")]
    x, dy = leaf()
    sum(block(x) for block, _, _ in pair).backward(dy)
    assert [backward for _, _, backward in pair] == [["highest"] * 3, ["high"] * 3]
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
@each_precision
def test_gradients_of_parameters_alone_run_in_the_own_precision(own, callers):
    """An input that needs no gradient, and torch.autograd.grad in place of backward()."""
    block, _, backward = made_and_watched(own)
    x, dy = leaf()
    torch.autograd.grad(block(x.detach()), list(block.parameters()), dy)
    assert backward == [own] * 3
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
@each_precision
def test_precision_is_restored_when_the_forward_raises(own, callers):
    block = made(own)
    block.mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        block(leaf()[0])
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
@each_precision
def test_precision_is_restored_when_the_backward_raises(own, callers):
    """A KeyboardInterrupt or running out of memory in the backward leaves the process as it was, too."""
    block = made(own)
    interrupt_backward(block.attn)
    x, dy = leaf()
    with pytest.raises(Interrupted):
        block(x).backward(dy)
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
@each_precision
def test_next_backward_after_one_that_raised(own, callers):
    """What an interrupted backward left behind reaches neither the next one nor what the caller has set since."""
    broken = made(own)
    interrupt_backward(broken.attn)
    x, dy = leaf()
    torch.set_float32_matmul_precision("medium" if callers == "high" else "high")
    with pytest.raises(Interrupted):
        broken(x).backward(dy)
    torch.set_float32_matmul_precision(callers)
    block, _, backward = made_and_watched(own)
    block(x).backward(dy)
    assert backward == [own] * 3
    assert torch.get_float32_matmul_precision() == callers


@pytest.mark.unit
def test_decorated_call_keeps_its_name_and_docstring():
    @precision.float32_matmul_precision("high")
    def call(block, x):
        """What it does."""
    assert (call.__name__, call.__doc__) == ("call", "What it does.")


# ------------------------------------------------------- the casts of gradients ------------------------------------


class HalfGradient(torch.autograd.Function):
    """x @ w.T in BF16, as a library's own matmul under autocast: its gradients are in BF16."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.bfloat16() @ w.bfloat16().T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w.bfloat16(), dy.T @ x.bfloat16()


@pytest.mark.unit
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
def test_gradients_cast_by_compiled_code_are_the_same(uncompiled):
    """The first, the sum with a second, and those of the next iteration; biases are left to autograd."""
    x = torch.randn(5, 8)
    plain, cast = nn.Linear(8, 3), nn.Linear(8, 3)
    cast.load_state_dict(plain.state_dict())
    precision.compile_gradient_casts(cast)
    assert cast.weight.grad_dtype is None and cast.bias.grad_dtype == torch.float32

    def add_gradients(scale):
        for layer in (plain, cast):
            (scale * HalfGradient.apply(x, layer.weight)).sum().backward()
        assert cast.weight.grad.dtype == torch.float32
        assert torch.equal(plain.weight.grad, cast.weight.grad)

    add_gradients(1.0)
    add_gradients(0.3)
    plain.weight.grad = cast.weight.grad = None
    add_gradients(0.7)


@pytest.mark.unit
def test_the_cast_is_compiled_for_static_shapes(monkeypatch):
    """Left to itself torch compiles a second shape for all shapes, and what is timed would be that code."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append((function, options)) or function)
    block = nn.Linear(8, 3)
    precision.compile_gradient_casts(block)
    assert asked == [(torch.Tensor.float, {"dynamic": False})] and block.to_float32 is torch.Tensor.float


@pytest.mark.integration
@pytest.mark.transformer_engine
def test_gradients_of_step_4_are_the_same_without_compiled_casts(monkeypatch):
    """Eager, a sum of two, and replayed from a graph."""
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.float16)
    values, x, dy = case(config, "cuda")
    with_casts = gradients_of_step_4(config, values, x, dy, casts=True)
    monkeypatch.setattr(steps.load(4).module, "compile_gradient_casts", lambda block: None)
    without_casts = gradients_of_step_4(config, values, x, dy, casts=False)
    for with_, without in zip(with_casts, without_casts, strict=True):
        assert with_.dtype == without.dtype == torch.float32
        assert oracle.relative_error(with_, without.double()) < 2e-2          # cuDNN's attention adds up in any order


def gradients_of_step_4(config, values, x, dy, casts: bool) -> list[torch.Tensor]:
    """Every parameter's gradient of one backward, of two, and of a replay."""
    block = steps.load(4).build(config, values, "cuda")
    assert (block.attn.qkv.weight.grad_dtype is None) == casts
    calibrate(block, x, dy)
    iteration = subject_of(block, x, dy).iteration(BOTH)
    taken = []

    def take():
        taken.extend(gradient.clone() for gradient in parameters.gradients(block).values())

    iteration.between()
    iteration.run()
    take()
    iteration.run()
    take()
    replayed, _ = replay.capture(iteration)
    replayed()
    take()
    return taken
