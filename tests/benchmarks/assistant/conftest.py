"""What the tests of the assistant share."""
import pytest


@pytest.fixture
def without_inductor(monkeypatch):
    """What Inductor would compile runs as Dynamo captured it: no test of a ladder waits for a compiler."""
    monkeypatch.setattr("benchmarks.assistant.rewriting.compile_fx", lambda module, inputs: module.forward)
