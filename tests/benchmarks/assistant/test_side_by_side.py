"""Two pieces of a model side by side: on a GPU the host's launches do not count."""
import pytest
import torch
from torch import nn

from benchmarks.assistant import side_by_side
from common.runtime import iteration, replay
from common.runtime.iteration import BOTH, FORWARD

unit = pytest.mark.unit
DEVICE = torch.device("cuda")


def piece(device, mode=BOTH):
    layer = nn.Linear(64, 32, device=device)
    x, dy = torch.randn(16, 64, device=device), torch.randn(16, 32, device=device)
    return iteration.of_call(layer, [x], [dy], dict(layer.named_parameters()), mode)


@pytest.fixture
def timed(monkeypatch):
    """The pairs of iterations that were timed."""
    pairs = []
    monkeypatch.setattr(side_by_side, "times_as_fast", lambda *given: pairs.append(given) or (1.0, 1.0, 1.0))
    return pairs


@unit
def test_on_a_cpu_both_run_as_they_are(timed):
    before, after = piece("cpu"), piece("cpu")
    side_by_side.gain_on_device(before, after, torch.device("cpu"))
    assert timed == [(before, after, torch.device("cpu"))]


@unit
def test_where_one_can_not_be_captured_both_run_as_they_are(timed, monkeypatch):
    before, after = piece("cpu"), piece("cpu")

    def capture(given):
        if given is after:
            raise RuntimeError("the host waits for the GPU during the iteration")
        return lambda: None, []
    monkeypatch.setattr(replay, "capture", capture)
    side_by_side.gain_on_device(before, after, DEVICE)
    assert timed == [(before, after, DEVICE)]


@pytest.mark.gpu
@unit
@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_a_replay_computes_the_same(mode, timed):
    before, after = piece(DEVICE, mode), piece(DEVICE, mode)
    eager = [before.run()[0].clone(), after.run()[0].clone()]
    side_by_side.gain_on_device(before, after, DEVICE)
    [(*replayed, _)] = timed
    for work, expected in zip(replayed, eager, strict=True):
        work.run()[0].zero_()
        assert torch.equal(work.run()[0], expected)
