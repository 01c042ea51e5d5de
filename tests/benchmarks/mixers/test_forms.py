"""Each form of a mixer is the recurrence, forward and every gradient, in FP64; wrong ones are caught."""
import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.mixers import forms
from benchmarks.mixers.forms import Given, chunked, parallel, recurrent

unit = pytest.mark.unit
B, H, S, K, V = 2, 3, 13, 5, 4
EXACT = 1e-12                              # relative L2, of sums in FP64 in another order
DECAYS = {"constant": None, "near 1": (-1e-6, -1e-7), "near 0": (-40.0, -20.0), "of all sizes": (-5.0, -1e-3)}
FORMS = {"parallel": parallel, **{f"chunks of {size}": lambda given, state, size=size: chunked(given, state, size)
                                  for size in (1, 2, 4, 5, 13, 64)}}


def made(delta, decays="of all sizes", steps=S, seed=0):
    """Keys of a delta rule are of length 1, as they must be."""
    numbers = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, steps, size, generator=numbers, dtype=torch.float64) for size in (K, K, V))
    span = DECAYS[decays]
    g = torch.rand(B, H, steps, generator=numbers, dtype=torch.float64)
    g = span[0] + (span[1] - span[0]) * g if span else torch.tensor([0.9, 0.99, 1.0]).double().log().view(
        1, H, 1).expand(B, H, steps).clone()
    b = torch.rand(B, H, steps, generator=numbers, dtype=torch.float64) if delta else None
    return Given(q, torch.nn.functional.normalize(k, dim=-1) if delta else k, v, g, b)


def state_of(seed=1):
    return torch.randn(B, H, K, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_of(form, given, state):
    """y, the state, and the gradient of all that was given."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in vars(given).items() if value is not None}
    begun = state.clone().requires_grad_()
    y, end = form(Given(**leaves), begun)
    numbers = torch.Generator().manual_seed(2)
    dy, dend = (torch.randn(each.shape, generator=numbers, dtype=each.dtype) for each in (y, end))
    gradients = torch.autograd.grad([y, end], [*leaves.values(), begun], [dy, dend])
    return {"y": y, "state": end, **dict(zip([*leaves, "begun"], gradients, strict=True))}


def apart(form, given, state):
    expected, found = all_of(recurrent, given, state), all_of(form, given, state)
    return {name: ((found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)).item()
            for name in expected}


@unit
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_recurrence(form, decays, delta):
    found = apart(FORMS[form], made(delta, decays), state_of())
    assert max(found.values()) < EXACT, found


@unit
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("form", [recurrent, parallel, *FORMS.values()])
@pytest.mark.parametrize("cut", [1, 6, 12])
def test_two_calls_that_hand_the_state_on_are_one(form, delta, cut):
    given = made(delta)
    whole, end = form(given, None)
    parts = [Given(*(None if each is None else each[:, :, begin:behind] for each in vars(given).values()))
             for begin, behind in ((0, cut), (cut, S))]
    first, state = form(parts[0], None)
    second, last = form(parts[1], state)
    assert torch.allclose(torch.cat([first, second], 2), whole, atol=1e-12) and torch.allclose(last, end, atol=1e-12)


@unit
def test_without_decay_it_is_a_sum_and_with_a_delta_rule_it_replaces():
    given = made(False)
    y, _ = recurrent(replace(given, g=torch.zeros(B, H, S).double()))
    assert torch.allclose(y, ((given.q @ given.k.mT).tril()) @ given.v)
    key, state = torch.zeros(1, 1, 2, K).double(), None
    key[..., 0] = 1.0
    values = torch.randn(1, 1, 2, V).double()
    y, state = recurrent(Given(key, key, values, torch.zeros(1, 1, 2).double(), torch.ones(1, 1, 2).double()))
    assert torch.allclose(y, values) and torch.allclose(state[0, 0, 0], values[0, 0, 1])


@unit
@pytest.mark.parametrize("delta", [False, True])
def test_chunks_in_fp32_stay_finite_where_all_is_forgotten(delta):
    given = made(delta, "near 0", steps=200)
    given = Given(*(None if each is None else each.float() for each in vars(given).values()))
    assert all(value.isfinite().all() for value in all_of(lambda *both: chunked(*both, 64), given, state_of().float()
                                                          ).values())


ORIGINAL = forms._decay_between, forms._filled


def one_step_late(g):
    return ORIGINAL[0](g.roll(1, -1))


def with_the_future(g):
    between = ORIGINAL[0](g)
    return between + between.mT.triu(1)


def of_the_past_alone(g):
    return ORIGINAL[0](g).tril(-1)


def transposed(g):
    return ORIGINAL[0](g).mT


def that_forgets(given, count):
    filled = ORIGINAL[1](given, count)
    return replace(filled, g=torch.cat([given.g, given.g.new_full((*given.g.shape[:2], count), -1.0)], 2))


def that_writes(given, count):
    filled = ORIGINAL[1](given, count)
    return replace(filled, k=filled.k + 1, v=filled.v + 1)


MUTANTS = {"decay off by one": ("_decay_between", one_step_late), "the future": ("_decay_between", with_the_future),
           "not the step itself": ("_decay_between", of_the_past_alone), "transposed": ("_decay_between", transposed),
           "what fills a chunk decays": ("_filled", that_forgets),
           "what fills a chunk is written": ("_filled", that_writes)}


@unit
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_caught(mutant, delta, monkeypatch):
    given, state = made(delta), state_of()
    monkeypatch.setattr(forms, *MUTANTS[mutant])
    assert not max(apart(FORMS["chunks of 5"], given, state).values()) < 1e-6


@unit
@pytest.mark.parametrize("wrong", ["state not handed on", "normaliser lost", "gate after the sum"])
def test_each_wrong_form_is_caught(wrong):
    def form(given, state):
        if wrong == "state not handed on":
            parts = [chunked(Given(*(None if each is None else each[:, :, at:at + 5] for each in vars(given).values())),
                             state, 5) for at in range(0, S, 5)]
            return torch.cat([y for y, _ in parts], 2), parts[-1][1]
        if wrong == "gate after the sum":
            return chunked(replace(given, g=given.g.roll(-1, 2)), state, 5)
        return chunked(replace(given, q=given.q / math.sqrt(K)), state, 5)
    assert max(apart(form, made(False), state_of()).values()) > 1e-3


@unit
@pytest.mark.parametrize("name, shape, said", [
    ("k", (2, 3, 13, 4), "k is [2, 3, 13, 4] beside q [2, 3, 13, 5]: give [2, 3, 13, 5]"),
    ("v", (2, 3, 12, 4), "v is [2, 3, 12, 4]"), ("g", (2, 3, 13, 5), "g is [2, 3, 13, 5]"),
    ("b", (2, 13), "b is [2, 13]")])
def test_shapes_that_do_not_go_together_are_reported(name, shape, said):
    with pytest.raises(ValueError) as error:
        replace(made(True), **{name: torch.zeros(shape)})
    assert said in str(error.value)


@unit
def test_a_chunk_has_steps():
    with pytest.raises(ValueError, match="chunks of 0 steps: give a whole number from 1 on"):
        chunked(made(False), None, 0)


class _Solved(TorchDispatchMode):
    """The multiplications and additions of triangular systems, which torch's counter leaves out."""
    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "triangular" in str(func):
            *batch, rows, columns = args[1].shape
            self.flops += math.prod(batch) * rows**2 * columns
        return func(*args, **(kwargs or {}))


@unit
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_the_flops_of_chunks_are_those_that_run(chunk, delta):
    with FlopCounterMode(display=False) as counter, _Solved() as solved:
        chunked(made(delta), None, chunk)
    assert counter.get_total_flops() + solved.flops == B * H * forms.flops_of_chunked(S, K, V, delta, chunk)


@unit
@pytest.mark.parametrize("delta", [False, True])
def test_the_flops_of_the_recurrence_are_those_that_run(delta):
    """What is written is an outer product, element by element."""
    with FlopCounterMode(display=False) as counter:
        recurrent(made(delta))
    outer = 2 * S * K * V
    assert counter.get_total_flops() == B * H * (forms.flops_of_recurrent(S, K, V, delta) - outer)
