"""Libraries are called so that they compute the same mixers; what is not installed is a reason."""
import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from benchmarks.mixers import forms
from benchmarks.mixers.forms import Given
from benchmarks.mixers.mixer import MIXERS, constant_decay, errors, exact
from benchmarks.mixers.peers import FLA, MAMBA, by_steps, peer

unit = pytest.mark.unit
CPU = torch.device("cpu")
SHAPE = 2, 3, 20, 8


def turned(*tensors):
    return [each.transpose(1, 2) for each in tensors]


def chunk_retention(q, k, v):
    """As its documentation has it: [B, S, H, D], decays by head, scale 1 / sqrt(D)."""
    q, k, v = turned(q, k, v)
    y, state = forms.recurrent(Given(q * q.size(-1) ** -0.5, k, v, constant_decay(q)))
    return y.transpose(1, 2), state


def chunk_simple_gla(q, k, v, g, scale=None):
    q, k, v, g = turned(q, k, v, g)
    y, state = forms.recurrent(Given(q * (scale or q.size(-1) ** -0.5), k, v, g))
    return y.transpose(1, 2), state


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None):
    q, k, v, g, beta = turned(q, k, v, g, beta)
    y, state = forms.recurrent(Given(q * (scale or q.size(-1) ** -0.5), k, v, g, beta))
    return y.transpose(1, 2), state


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, dt_softplus=False):
    """State = exp(dt A) state + dt B x, y = C state."""
    assert dt_softplus and chunk_size == 256
    x, dt, B, C = turned(x, F.softplus(dt), B, C)
    y, _ = forms.recurrent(Given(C, B, dt.unsqueeze(-1) * x, dt * A[:, None]))
    return y.transpose(1, 2)


@pytest.fixture
def installed(monkeypatch):
    for path, function in (("fla.ops.retention", chunk_retention), ("fla.ops.simple_gla", chunk_simple_gla),
                           ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
                           ("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined)):
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        setattr(sys.modules[path], function.__name__, function)


@unit
@pytest.mark.parametrize("library, name", [(FLA, name) for name in MIXERS] + [(MAMBA, "SSD")])
def test_it_is_the_same_mixer(library, name, installed):
    mixer = MIXERS[name]
    inputs = [by_steps(each) for each in mixer.inputs(SHAPE, 0, CPU)]
    dy = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    found = errors(peer(library, mixer), mixer, inputs, dy, exact(mixer, inputs, dy))
    assert max(found.values()) < 3e-6, found


@unit
def test_its_inputs_lie_as_it_takes_them():
    turned_one = by_steps(torch.zeros(SHAPE).requires_grad_())
    assert turned_one.shape == SHAPE and turned_one.requires_grad and turned_one.is_leaf
    assert turned_one.transpose(1, 2).is_contiguous() and not turned_one.is_contiguous()


@unit
@pytest.mark.parametrize("library, module", [(FLA, "fla"), (MAMBA, "mamba_ssm")])
def test_what_is_not_installed_is_reported(library, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotImplementedError, match=f"^{library} can't be imported: "):
        peer(library, MIXERS["SSD"])


@unit
@pytest.mark.parametrize("name", ["linear attention, decay", "gated delta rule"])
def test_mamba_has_no_other_mixers(name, installed):
    with pytest.raises(NotImplementedError, match=f"mamba-ssm has no {name}"):
        peer(MAMBA, MIXERS[name])
