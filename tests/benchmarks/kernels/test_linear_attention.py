"""Linear attention by chunks in Triton against its recurrence in FP64: forward, gradients, states, and what is refused.

Without a GPU through the interpreter.
"""
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels.triton import linear_attention as module
from benchmarks.kernels.triton.linear_attention import CHUNK, linear_attention
from common.block import oracle
from tests.helpers.chunk_cases import DECAYS, GATES, TIMES_OF_A_GRADIENT
from tests.helpers.kernel_cases import DEVICE, on_a_gpu

unit = pytest.mark.unit
NAMES = "q", "k", "v", "g", "state", "f"


def given(S, K=16, V=32, dtype=torch.float32, decays="of all sizes", delta=False, B=1, H=2):
    """By name. Keys are of about length 1, which keeps gradients within FP16; f is small, as such keys make it."""
    numbers = torch.Generator().manual_seed(0)
    shapes = {"q": (B, H, S, K), "k": (B, H, S, K), "v": (B, H, S, V), "state": (B, H, K, V), "f": (B, H, S, K)}
    made = {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    low, high = DECAYS[decays]
    made["g"] = low + (high - low) * torch.rand(B, H, S, generator=numbers)
    made["k"] = made["k"] / K**0.5
    made["f"] = 0.1 * made["f"]
    wide = {"g", "state"}
    return {name: made[name].to(DEVICE, torch.float32 if name in wide else dtype).requires_grad_()
            for name in NAMES if delta or name != "f"}


def recurrent(q, k, v, g, state, f=None):
    """Step by step, in the dtype that is given."""
    ys, before = [], state
    for t in range(q.size(2)):
        if t % CHUNK == 0:
            before = state
        u = v[:, :, t] if f is None else v[:, :, t] - (f[:, :, t].unsqueeze(-2) @ before).squeeze(-2)
        state = g[:, :, t, None, None].exp() * state + k[:, :, t].unsqueeze(-1) * u.unsqueeze(-2)
        ys.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(ys, 2), state


def results(function, tensors):
    """y, the state behind it, and the gradient of each tensor."""
    y, end = function(**tensors)
    numbers = torch.Generator().manual_seed(1)
    dy, dend = (torch.randn(each.shape, generator=numbers).to(each.device).bfloat16().to(each.dtype)
                for each in (y, end))
    gradients = torch.autograd.grad([y, end], list(tensors.values()), [dy, dend])
    return {"y": y, "end": end, **dict(zip(tensors, gradients, strict=True))}


def errors(tensors, function=linear_attention):
    exact = results(recurrent, {name: t.detach().double().requires_grad_() for name, t in tensors.items()})
    return {name: oracle.relative_error(value, exact[name]) for name, value in results(function, tensors).items()}


def assert_right(tensors):
    gate = GATES[tensors["q"].dtype]
    found = errors(tensors)
    outputs = {name: found.pop(name) for name in ("y", "end")}
    assert max(outputs.values()) < gate and max(found.values()) < TIMES_OF_A_GRADIENT * gate, (outputs, found)


@unit
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("S", [1, 64, 100, on_a_gpu(1000)])
def test_it_is_the_recurrence_at_any_length(S, delta):
    assert_right(given(S, delta=delta))


@unit
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_the_recurrence_in_16_bits(dtype, delta):
    assert_right(given(130, dtype=dtype, delta=delta))


@unit
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decays", DECAYS)
def test_it_is_the_recurrence_whatever_is_forgotten(decays, delta):
    """Where nearly all is, the gradients of the gates are small, and as exact."""
    assert_right(given(100, decays=decays, delta=delta))


@unit
@pytest.mark.parametrize("K, V", [(32, 16), (64, 64), (128, 16), (16, 128), on_a_gpu(64, 128), on_a_gpu(128, 128)])
def test_it_is_the_recurrence_at_each_width(K, V):
    assert_right(given(70, K, V, delta=True, H=1))


@unit
@pytest.mark.gpu
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", GATES)
@pytest.mark.parametrize("width", [64, 128])
def test_it_is_the_recurrence_at_real_sizes(width, dtype, delta):
    assert_right(given(1024, width, width, dtype, delta=delta, B=2, H=4))


@unit
def test_tensors_of_other_strides_are_taken():
    tensors = given(70)
    tensors["q"] = tensors["q"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    tensors["v"] = tensors["v"].detach().mT.contiguous().mT.requires_grad_()
    assert_right(tensors)


@unit
def test_a_state_handed_on_is_one_call():
    tensors = given(150)
    y, end = linear_attention(**tensors)
    sequences = {name: tensors[name] for name in ("q", "k", "v", "g")}
    first, state = linear_attention(**{name: t[:, :, :70] for name, t in sequences.items()}, state=tensors["state"])
    second, last = linear_attention(**{name: t[:, :, 70:] for name, t in sequences.items()}, state=state)
    assert oracle.relative_error(torch.cat([first, second], 2), y.double()) < 1e-6
    assert oracle.relative_error(last, end.double()) < 1e-6


@unit
def test_without_a_state_it_begins_with_zeros():
    tensors = given(20)
    tensors["state"] = torch.zeros_like(tensors["state"])
    expected, _ = linear_attention(**tensors)
    assert torch.equal(linear_attention(*(tensors[name] for name in ("q", "k", "v", "g")))[0], expected)


@unit
def test_no_sequence_gives_none():
    tensors = {name: t[:0] for name, t in given(20).items()}
    assert [tuple(t.shape) for t in linear_attention(**tensors)] == [(0, 2, 20, 32), (0, 2, 16, 32)]


def shifted_gate(q, k, v, g, state, f=None):
    return linear_attention(q, k, v, g.roll(1, -1), f, state)


def chunk_forgotten(q, k, v, g, state, f=None):
    begins = torch.arange(g.size(-1), device=g.device) == CHUNK
    return linear_attention(q, k, v, torch.where(begins, -100.0, g), f, state)


def state_ignored(q, k, v, g, state, f=None):
    y, end = linear_attention(q, k, v, g, f, torch.zeros_like(state))
    return y + 0 * state.sum(), end


def f_ignored(q, k, v, g, state, f=None):
    y, end = linear_attention(q, k, v, g, None, state)
    return y + 0 * f.sum(), end


@unit
@pytest.mark.parametrize("mutant", [shifted_gate, chunk_forgotten, state_ignored, f_ignored])
def test_a_wrong_one_is_far_off(mutant):
    assert max(errors(given(100, delta=True), mutant).values()) > 1e-3


@unit
@pytest.mark.parametrize("name, wrong, said", [
    ("q", torch.zeros(1, 2, 20, 24), "q is (1, 2, 20, 24): give [B, H, S, K]"),
    ("q", torch.zeros(2, 20, 16), "q is (2, 20, 16): give [B, H, S, K]"),
    ("q", torch.zeros(1, 2, 20, 16, dtype=torch.float64), "q is torch.float64: give"),
    ("k", torch.zeros(1, 2, 19, 16), "k is (1, 2, 19, 16)"),
    ("v", torch.zeros(1, 2, 20, 8), "v is (1, 2, 20, 8): give [B, H, S, V]"),
    ("v", torch.zeros(1, 1, 20, 32), "v is (1, 1, 20, 32)"),
    ("g", torch.zeros(1, 2, 20, dtype=torch.bfloat16), "give (1, 2, 20) torch.float32"),
    ("f", torch.zeros(1, 2, 20, 32), "f is (1, 2, 20, 32)"),
    ("state", torch.zeros(1, 2, 32, 16), "state is (1, 2, 32, 16)")])
def test_what_it_can_not_take_is_a_line(name, wrong, said):
    tensors = {**given(20, delta=True), name: wrong.to(DEVICE)}
    with pytest.raises(ValueError) as error:
        linear_attention(**tensors)
    assert said in str(error.value)


@unit
@pytest.mark.skipif(DEVICE == "cuda", reason="with a GPU no kernel is interpreted")
def test_without_gpu_and_interpreter_it_is_a_line(monkeypatch):
    monkeypatch.setattr(module.triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="a Triton kernel needs a GPU"):
        linear_attention(**given(20))


@pytest.mark.integration
@pytest.mark.gpu
def test_it_compiles():
    tensors = given(130, 64, 64, torch.bfloat16, delta=True)
    compiled = torch.compile(lambda **given: linear_attention(**given), fullgraph=True)
    assert max(errors(tensors, compiled).values()) < GATES[torch.bfloat16] * TIMES_OF_A_GRADIENT
