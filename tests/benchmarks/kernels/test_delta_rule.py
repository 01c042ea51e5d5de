"""What steps of a chunk do to each other under a delta rule, in Triton, against a triangular system in FP64.

Without a GPU through the interpreter.
"""
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels.triton import delta_rule as module
from benchmarks.kernels.triton.delta_rule import CHUNK, delta_rule
from common.block import oracle
from tests.helpers.chunk_cases import DECAYS, GATES, TIMES_OF_A_GRADIENT
from tests.helpers.kernel_cases import DEVICE, on_a_gpu

unit = pytest.mark.unit
NAMES = "k", "v", "g", "b"


def given(S, K=16, V=32, dtype=torch.float32, decays="of all sizes", alike=0.0, B=1, H=2):
    """By name. Keys are of length 1; `alike` is the share that all have in common."""
    numbers = torch.Generator().manual_seed(0)
    k, v = (torch.randn(B, H, S, size, generator=numbers) for size in (K, V))
    k = torch.nn.functional.normalize((1 - alike) * k + alike * K**0.5 * torch.eye(K)[0], dim=-1)
    low, high = DECAYS[decays]
    g = low + (high - low) * torch.rand(B, H, S, generator=numbers)
    b = torch.rand(B, H, S, generator=numbers)
    made = {"k": k.to(dtype), "v": v.to(dtype), "g": g, "b": b}
    return {name: made[name].to(DEVICE).requires_grad_() for name in NAMES}


def solved(k, v, g, b):
    """Chunk by chunk, in the dtype that is given."""
    ws, fs = [], []
    for begin in range(0, k.size(2), CHUNK):
        part = slice(begin, begin + CHUNK)
        K, W, G, S = k[:, :, part], v[:, :, part], g[:, :, part], b[:, :, part].unsqueeze(-1)
        since = G.cumsum(-1)
        apart = (since.unsqueeze(-1) - since.unsqueeze(-2)).tril()
        system = (S * (K @ K.mT) * apart.exp()).tril(-1) + torch.eye(K.size(2), dtype=k.dtype, device=k.device)
        ws.append(torch.linalg.solve(system, S * W))
        fs.append(torch.linalg.solve(system, S * since.exp().unsqueeze(-1) * K))
    return torch.cat(ws, 2), torch.cat(fs, 2)


def results(function, tensors):
    """w, f, and the gradient of each tensor."""
    w, f = function(**tensors)
    numbers = torch.Generator().manual_seed(1)
    dw, df = (torch.randn(each.shape, generator=numbers).to(each.device).bfloat16().to(each.dtype) for each in (w, f))
    gradients = torch.autograd.grad([w, f], list(tensors.values()), [dw, df])
    return {"w": w, "f": f, **dict(zip(tensors, gradients, strict=True))}


def errors(tensors, function=delta_rule):
    exact = results(solved, {name: t.detach().double().requires_grad_() for name, t in tensors.items()})
    return {name: oracle.relative_error(value, exact[name]) for name, value in results(function, tensors).items()}


def right(found, dtype=torch.float32):
    return all(error <= GATES[dtype] * (1 if name in "wf" else TIMES_OF_A_GRADIENT) for name, error in found.items())


@unit
@pytest.mark.parametrize("S", [1, 63, 64, 65, 130])
def test_it_solves_the_system_of_each_chunk(S):
    found = errors(given(S))
    assert right(found), found


@unit
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("alike", [0.0, 0.5, 0.95])
def test_with_decays_and_keys_of_all_kinds(decays, alike):
    found = errors(given(70, decays=decays, alike=alike))
    assert right(found), found


@unit
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits(dtype):
    found = errors(given(70, dtype=dtype))
    assert right(found, dtype), found


@unit
@pytest.mark.parametrize("K, V", [(16, 16), (32, 64), (128, 16), (16, 128)])
def test_at_each_width(K, V):
    found = errors(given(66, K, V))
    assert right(found), found


@on_a_gpu
@pytest.mark.parametrize("dtype", GATES)
@pytest.mark.parametrize("width", [64, 128])
def test_at_real_sizes(width, dtype):
    found = errors(given(1000, width, width, dtype, B=2, H=4))
    assert right(found, dtype), found




@unit
@pytest.mark.parametrize("wrong", ["g of the step behind", "b after the products", "keys of another head",
                                   "one doubling less"])
def test_each_mutant_is_caught(wrong, monkeypatch):
    def function(k, v, g, b):
        if wrong == "g of the step behind":
            return delta_rule(k, v, g.roll(1, -1), b)
        if wrong == "b after the products":
            w, f = delta_rule(k, v, g, torch.ones_like(b))
            return b.unsqueeze(-1) * w, b.unsqueeze(-1) * f
        if wrong == "keys of another head":
            return delta_rule(k.roll(1, 1), v, g, b)
        return delta_rule(k, v, g, b)
    if wrong == "one doubling less":
        monkeypatch.setattr(module, "DOUBLINGS", module.DOUBLINGS - 1)
    assert max(errors(given(70, decays="near 1", alike=0.5), function).values()) > 1e-2


@unit
@pytest.mark.parametrize("name, value, said", [
    ("k", torch.zeros(1, 2, 8, 24), "K one of (16, 32, 64, 128)"), ("v", torch.zeros(1, 2, 8, 7), "V one of"),
    ("v", torch.zeros(1, 2, 9, 16), "v is"), ("g", torch.zeros(1, 2, 9), "g is"),
    ("b", torch.zeros(1, 2, 8, 1), "b is"),
    ("k", torch.zeros(1, 2, 8, 16).double(), "k is")])
def test_what_it_does_not_take_is_reported(name, value, said):
    tensors = {each: t.detach() for each, t in given(8, 16, 16).items()}
    with pytest.raises((ValueError, TypeError)) as error:
        delta_rule(**tensors | {name: value.to(DEVICE)})
    assert said in str(error.value)


@unit
def test_without_heads_there_is_nothing_to_do():
    w, f = delta_rule(**{name: t.detach() for name, t in given(8, 16, 32, H=0).items()})
    assert w.shape == (1, 0, 8, 32) and f.shape == (1, 0, 8, 16)
