"""The tests test: every wrong block is caught by the FP64 gate, on the forward and on the gradients alike.

So is every one by the check of a run, `oracle.checks`, which has FP64 compute one sequence alone.
"""
import math

import pytest
import torch

from common.block import oracle
from tests.helpers.blocks import case, errors, worst
from tests.helpers.devices import on_each_device
from tests.helpers.wrong_blocks import CONFIG, RIGHT, WRONG, build, lazy

FORWARD, GRADIENT = oracle.GATES["float64"]
A_RIGHT_ONE, A_WRONG_ONE = next(iter(RIGHT)), next(iter(WRONG))


def in_place_of(block, call):
    """`call` with what a check asks a block for besides its result."""
    call.config, call.zero_grad, call.named_parameters = block.config, block.zero_grad, block.named_parameters
    call.parameter_names = getattr(block, "parameter_names", {})
    return call


@pytest.mark.unit
@on_each_device
@pytest.mark.parametrize("name", RIGHT)
def test_right_block_passes(name, device):
    """The parts that the wrong blocks are made from are right themselves: each mistake is what is caught."""
    values, x, dy = case(CONFIG, device, torch.float64)
    forward, gradient = worst(errors(build(RIGHT[name], values, device), values, x, dy))
    assert forward < FORWARD and gradient < GRADIENT


@pytest.mark.unit
@on_each_device
@pytest.mark.parametrize("name", WRONG)
def test_wrong_block_is_caught(name, device):
    """By the forward, and again by the gradients, each by a thousand times its gate: no luck of the draw."""
    values, x, dy = case(CONFIG, device, torch.float64)
    forward, gradient = worst(errors(build(WRONG[name], values, device), values, x, dy))
    assert forward > 1e3 * FORWARD and gradient > 1e3 * GRADIENT


@pytest.mark.unit
@pytest.mark.parametrize("name", WRONG)
def test_wrong_block_is_caught_by_the_check_of_a_run(name):
    """`oracle.errors` looks at one sequence: enough to see what mixes sequences, too."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    forward, gradient = worst(oracle.errors(build(WRONG[name], values), x, values))
    assert forward > FORWARD and gradient > GRADIENT


@pytest.mark.unit
@pytest.mark.parametrize("where", ["forward", "weights' gradients"])
def test_a_block_that_does_a_part_of_the_batch_is_caught(where):
    """It would be timed at a fraction of the work; of the one sequence that FP64 computes all is right."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    one, everywhere = oracle.checks(build(lazy(where), values), x, values)
    assert worst(one)[1] < GRADIENT and everywhere["mlp.fc.weight"] > 1e3 * GRADIENT
    assert where != "forward" or everywhere["branch"] > 1e3 * FORWARD


@pytest.mark.unit
@pytest.mark.parametrize("lazy_when", ["without gradients", "without gradients, the last for all", "input gradient"])
def test_a_part_of_the_batch_in_one_result_alone_is_caught(lazy_when):
    """The forward is timed without gradients; each of the check's looks has a block that it alone sees."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    right = build(RIGHT[A_RIGHT_ONE], values)

    def last_alone(gradient):
        return torch.cat((torch.zeros_like(gradient[:-1]), gradient[-1:]))

    def block(x):
        if torch.is_grad_enabled():
            y = right(x)
            if lazy_when == "input gradient":
                x.register_hook(last_alone)
            return y
        if lazy_when == "without gradients":
            return torch.cat((x[:-1], right(x[-1:])))
        return right(x[-1:]).expand_as(x) if "for all" in lazy_when else right(x)

    found = oracle.errors(in_place_of(right, block), x, values)
    seen = "input gradient" if lazy_when == "input gradient" else "branch"
    assert found[seen] > 1e3 * GRADIENT
    assert all(error < GRADIENT for name, error in found.items() if name not in (seen, "output"))


@pytest.mark.unit
@pytest.mark.parametrize("wrong_when", [False, True], ids=["without gradients", "with gradients"])
def test_a_result_that_is_wrong_in_one_mode_alone_is_caught(wrong_when):
    """The forward is timed without gradients, of an x that asks for none: the check looks at what is timed."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    right, wrong = build(RIGHT[A_RIGHT_ONE], values), build(WRONG[A_WRONG_ONE], values)

    def block(x):
        assert x.requires_grad == torch.is_grad_enabled()
        y = right(x)
        return y + (wrong(x) - y).detach() if torch.is_grad_enabled() == wrong_when else y

    found = oracle.errors(in_place_of(right, block), x, values)
    assert found["branch"] > 1e3 * FORWARD and found["output"] > FORWARD
    assert max(error for name, error in found.items() if "gradient" in name) < GRADIENT


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_gate_is_no_substitute(dtype, record_property):
    """A gate of 1.25 times the plain block's error passes right blocks, and misses what rounding hides.

    What it catches is reported (`pytest -rP`), not required; that it misses some is why FP64 is asked at all.
    """
    config = CONFIG.replace(seq_len=48, amp_dtype=dtype)
    values, x, dy = case(config)

    def errors_of(change):
        return errors(build(change, values, config=config, step=1), values, x, dy)

    plain = errors_of(lambda block: None)

    def caught(change):
        found = errors_of(change)
        return [what for what in found if not found[what] <= 1.25 * plain[what]]

    report = {name: len(caught(change)) for name, change in WRONG.items()}
    for name, count in report.items():
        print(f"{name:40} {f'caught on {count} of {len(plain)} tensors' if count else 'MISSED'}")
    record_property(f"caught in {dtype}", [name for name, count in report.items() if count])
    assert not any(caught(change) for change in RIGHT.values())
    assert not report["epsilon 1e-6"], "this gate sees more than it can: is it still in half precision?"


class Spoil(torch.autograd.Function):
    """Passes x on; the gradient comes back with one element that is not a number."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dy.view(-1)[-1] = ctx.value          # of the last sequence, the one that a run checks
        return dy, None


@pytest.mark.unit
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["NaN", "inf"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_bad_element_fails_the_check(value, where):
    """One NaN or infinity anywhere in the block, in either pass, makes the error infinite: nothing averages it away."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    if where == "forward":
        values["mlp.proj.bias"][0] = value
    block = build(lambda block: None, values)
    if where == "backward":
        block.mlp.register_forward_hook(lambda module, args, y: Spoil.apply(y, value))
    good, _, _ = case(CONFIG, dtype=torch.float64)
    forward, gradient = worst(oracle.errors(block, x, good))
    assert {"forward": forward, "backward": gradient}[where] == math.inf


@pytest.mark.unit
def test_missing_gradient_fails_the_check():
    """A parameter that took no part, a frozen one, or an input cut off from the graph."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    unused = build(WRONG["mlp.proj.bias dropped"], values)
    assert oracle.errors(unused, x, values)["mlp.proj.bias"] == math.inf
    frozen = build(lambda block: block.attn.proj.weight.requires_grad_(False), values)
    assert oracle.errors(frozen, x, values)["attn.proj.weight"] == math.inf
    cut = build(lambda block: block.register_forward_pre_hook(lambda module, args: (args[0].detach(),)), values)
    assert oracle.errors(cut, x, values)["input gradient"] == math.inf
