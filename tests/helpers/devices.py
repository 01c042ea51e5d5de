"""Where a test runs: on a CPU, and where there is one on a GPU."""
import pytest
import torch

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

CYCLES = 2_000_000               # about a millisecond: far above the resolution of an event, half a microsecond


def asleep(cycles):
    """A kernel of known length."""
    return lambda: torch.cuda._sleep(int(cycles))
