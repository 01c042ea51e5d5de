"""The command that runs every kernel by hand once more, for checkers of memory to watch."""
from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernels import __main__ as command

pytestmark = pytest.mark.unit


def test_without_a_gpu_it_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 4
    assert capsys.readouterr() == ("", "kernels: skipped: there is no GPU\n")


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_compare", interrupted)
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert (ended.value.code, *capsys.readouterr()) == (130, "", "\nkernels: interrupted\n")


@pytest.mark.parametrize("differs, status", [(0, 0), (1, 1)])
def test_bits_that_differ_fail(differs, status, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "EXPERIMENTS", {"an operation": SimpleNamespace(by_hand={"Triton": lambda: None})})
    monkeypatch.setattr(command, "_compare", lambda *_: differs)
    monkeypatch.setattr(command.series, "missing", lambda: "there is no nvcc")
    assert command.main([]) == status
