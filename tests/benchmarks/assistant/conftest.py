"""What the tests of the assistant share."""
import textwrap

import pytest

from benchmarks.assistant import command


@pytest.fixture(autouse=True)
def all_on_the_ladder(monkeypatch):
    """What changes nothing is on it, too, however the machine's noise has timed it alone."""
    for bound in ("SLOWER", "WORTH_IT"):
        monkeypatch.setattr(f"benchmarks.assistant.trials.{bound}", 0.0)


@pytest.fixture
def without_inductor(monkeypatch):
    """What Inductor would compile runs as Dynamo captured it: no test of a ladder waits for a compiler."""
    monkeypatch.setattr("benchmarks.assistant.rewriting.compile_fx", lambda module, inputs: module.forward)


@pytest.fixture
def assistant(tmp_path, capsys, studies_in_seconds, without_inductor):
    """assistant(source, *options) -> (exit status, stdout, stderr), of a file with that source and its `build`."""
    def call(source, *options, target="build", quick=True):
        path = tmp_path / "my_model.py"
        path.write_text(textwrap.dedent(source))
        try:
            words = ["--quick"] * quick + [str(option) for option in options]
            status = command.main([f"{path}:{target}", "--device", "cpu", *words])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()
    return call
