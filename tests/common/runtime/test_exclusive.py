"""One run at a time on a device, and the seconds that a process has been at work itself."""
import os
import threading

import pytest
import torch

from common.runtime import exclusive

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")


@pytest.fixture
def told(monkeypatch, tmp_path):
    """A lock of this test's own, and what was said meanwhile."""
    messages = []
    monkeypatch.setattr(exclusive.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(exclusive, "_waited", [])
    monkeypatch.setattr(exclusive, "print", lambda message, **_: messages.append(message), raising=False)
    return messages


def test_the_second_run_waits_until_the_first_has_ended(told, monkeypatch):
    """It says for whom, and its wait is none of its own seconds."""
    order, said = [], threading.Event()

    def tell(message, **_):
        told.append(message)
        said.set()
    monkeypatch.setattr(exclusive, "print", tell)

    def second():
        with exclusive.alone(CPU, "second"):
            order.append("second")
    waiting = threading.Thread(target=second)
    with exclusive.alone(CPU, "first"):
        waiting.start()
        assert said.wait(60)
        order.append("first")
    waiting.join(60)
    assert order == ["first", "second"]
    assert told == [f"second: waiting for first (process {os.getpid()}) on this device to end"]
    (waited,) = exclusive._waited
    assert waited >= 0


def test_a_wait_is_none_of_a_process_own_seconds(told):
    ran = exclusive.process_seconds()
    exclusive._waited.append(ran / 2)
    assert ran / 2 <= exclusive.process_seconds() < ran


def test_where_no_lock_can_be_had_it_goes_on_without(told, monkeypatch, tmp_path):
    monkeypatch.setattr(exclusive.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    with exclusive.alone(CPU, "third"), exclusive.alone(CPU, "fourth"):
        assert told == []


def test_a_lock_that_is_somebody_elses_link_is_not_followed(told, tmp_path):
    """The temporary folder is everybody's: what stands there under the lock's name may lead anywhere."""
    (tmp_path / "target").write_text("mine")
    (tmp_path / f"transformer-block-{os.getuid()}-cpu.lock").symlink_to(tmp_path / "target")
    with exclusive.alone(CPU, "a run"):
        pass
    assert (tmp_path / "target").read_text() == "mine"
