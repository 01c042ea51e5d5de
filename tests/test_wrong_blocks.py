"""The tests test: every wrong block is caught by the FP64 gate, on the forward and on the gradients alike."""
import math

import pytest
import torch
from conftest import case, errors, on_each_device, worst
from wrong_blocks import CONFIG, RIGHT, WRONG, build, lazy

from common import oracle

FORWARD, GRADIENT = oracle.GATES["float64"]


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
def test_a_block_that_does_a_part_of_the_batch_is_caught_by_the_check_of_a_run(where):
    """It would be timed at a fraction of the work; of the one sequence that FP64 computes all is right."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    one, everywhere = oracle.checks(build(lazy(where), values), x, values)
    assert worst(one)[1] < GRADIENT and everywhere["gradient of mlp.fc.weight"] > 1e3 * GRADIENT
    assert where != "forward" or everywhere["branch"] > 1e3 * FORWARD


@pytest.mark.unit
@pytest.mark.parametrize("lazy_when", ["without gradients", "without gradients, the last for all", "input gradient"])
def test_a_block_that_does_a_part_of_the_batch_in_one_of_its_results_is_caught(lazy_when):
    """The forward is timed without gradients; each of the check's looks has a block that it alone sees."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    right = build(RIGHT[next(iter(RIGHT))], values)

    def block(x):
        if torch.is_grad_enabled():
            y = right(x)
            if lazy_when == "input gradient":
                x.register_hook(lambda dx: torch.cat((torch.zeros_like(dx[:-1]), dx[-1:])))
            return y
        if lazy_when == "without gradients":
            return torch.cat((x[:-1], right(x[-1:])))
        return right(x[-1:]).expand_as(x) if "for all" in lazy_when else right(x)
    block.config, block.zero_grad, block.named_parameters = right.config, right.zero_grad, right.named_parameters
    block.parameter_names = getattr(right, "parameter_names", {})
    found = oracle.errors(block, x, values)
    seen = "input gradient" if lazy_when == "input gradient" else "branch"
    assert found[seen] > 1e3 * GRADIENT and all(error < GRADIENT for name, error in found.items()
                                                if name not in (seen, "output"))


@pytest.mark.unit
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 8, 33])
def test_the_gradients_of_the_check_are_as_large_as_a_batchs(batch_size):
    """A coherent sum over many sequences would overflow 16 bits where no batch does; two are left over at the least."""
    config = CONFIG.replace(batch_size=batch_size, seq_len=4)
    values, x, _ = case(config, dtype=torch.float64)
    block, sizes = build(RIGHT[next(iter(RIGHT))], values), []
    block.mlp.proj.bias.register_hook(lambda gradient: sizes.append(gradient.norm().item()))
    assert max(max(found.values()) for found in oracle.checks(block, x, values)) < GRADIENT
    times = sizes[-1] / sizes[0]
    assert len(sizes) == (1 if batch_size == 1 else 2) and times == pytest.approx(round(times))
    assert batch_size == 1 or max(2, batch_size**0.5) <= times < batch_size**0.5 + 2


@pytest.mark.unit
@pytest.mark.parametrize("wrong_when", [False, True], ids=["without gradients", "with gradients"])
def test_a_block_whose_result_is_wrong_in_one_mode_alone_is_caught_by_the_check_of_a_run(wrong_when):
    """The forward is timed without gradients, of an x that asks for none: the check looks at what is timed."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    right, wrong = build(RIGHT[next(iter(RIGHT))], values), build(WRONG[next(iter(WRONG))], values)

    def block(x):
        assert x.requires_grad == torch.is_grad_enabled()
        y = right(x)
        return y + (wrong(x) - y).detach() if torch.is_grad_enabled() == wrong_when else y
    block.config, block.zero_grad, block.named_parameters = right.config, right.zero_grad, right.named_parameters
    block.parameter_names = getattr(right, "parameter_names", {})
    found = oracle.errors(block, x, values)
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

    def caught(change, plain=None):
        found = errors(build(change, values, config=config, step=1), values, x, dy)
        return found if plain is None else [what for what in found if not found[what] <= 1.25 * plain[what]]

    plain = caught(lambda block: None)
    report = {name: len(caught(change, plain)) for name, change in WRONG.items()}
    for name, count in report.items():
        print(f"{name:40} {f'caught on {count} of {len(plain)} tensors' if count else 'MISSED'}")
    record_property(f"caught in {dtype}", [name for name, count in report.items() if count])
    assert not any(caught(change, plain) for change in RIGHT.values())
    assert not report["epsilon 1e-6"], "this gate sees more than it can: is it still in half precision?"


@pytest.mark.unit
@pytest.mark.parametrize("value", [None, torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf]),
                                   torch.tensor([-math.inf, math.inf])], ids=["missing", "NaN", "inf", "-inf"])
def test_error_of_what_is_missing_or_not_finite_is_infinite(value):
    """A NaN compares as no larger than any gate: it must never get that far."""
    assert oracle.relative_error(value, torch.tensor([1.0, 2.0], dtype=torch.float64)) == math.inf


@pytest.mark.unit
def test_error_is_relative_l2():
    """A hand-made case, a right zero where the truth is zero, and anything else where it is."""
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert oracle.relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert oracle.relative_error(truth.clone(), truth) == 0
    assert oracle.relative_error(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) == 0
    assert oracle.relative_error(torch.full((2,), 1e-30), torch.zeros(2, dtype=torch.float64)) > 1


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
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_against_what_is_not_finite_is_infinite(bad):
    """Not a NaN, which no comparison with a gate or with another error would find."""
    fine, spoilt = torch.ones(2, dtype=torch.float64), torch.tensor([1.0, bad], dtype=torch.float64)
    assert oracle.relative_error(fine, spoilt) == oracle.relative_error(spoilt, fine) == math.inf
    assert oracle.relative_error(fine, fine) == 0 and oracle.relative_error(-3 * fine, fine, -3) == 0
    assert oracle.relative_error(fine, fine, 4) == pytest.approx(0.75)


@pytest.mark.unit
def test_missing_gradient_fails_the_check():
    """A parameter that took no part, a frozen one, or an input cut off from the graph."""
    values, x, _ = case(CONFIG, dtype=torch.float64)
    unused = build(WRONG["mlp.proj.bias dropped"], values)
    assert oracle.errors(unused, x, values)["gradient of mlp.proj.bias"] == math.inf
    frozen = build(lambda block: block.attn.proj.weight.requires_grad_(False), values)
    assert oracle.errors(frozen, x, values)["gradient of attn.proj.weight"] == math.inf
    cut = build(lambda block: block.register_forward_pre_hook(lambda module, args: (args[0].detach(),)), values)
    assert oracle.errors(cut, x, values)["input gradient"] == math.inf
