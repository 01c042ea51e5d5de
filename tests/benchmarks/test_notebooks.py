"""The notebooks run from top to bottom, and what is recorded of them is of their cells and of no person's machine."""
import re

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from benchmarks import notebooks  # noqa: E402
from benchmarks.notebooks import command, running  # noqa: E402
from common.outcome import UserError  # noqa: E402

EACH = pytest.mark.parametrize("path", notebooks.every(), ids=lambda path: path.stem)
A_MACHINE = re.compile(r"/home/|/root/|/tmp/|/usr/|/opt/|/work/|site-packages|\.venv|pid[ -]\d+|\d\d:\d\d:\d\d")


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(output):
    return output.get("text") or "".join(map(str, output.get("data", {}).values()))


@pytest.mark.unit
@EACH
def test_it_is_recorded_whole(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    for cell in code(notebook):
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", cell.source
            for line in text_of(output).splitlines():
                assert not A_MACHINE.search(line), line


# What a lesson is run with here, in place of what it is recorded with: all its cells, and less to compute in them.
SMALLER = {"masks": ("[512, 1024, 2048, 4096]", "[512, 1024]")}


def made_smaller(path, folder):
    """A copy of a notebook, as it is run here."""
    text = path.read_text()
    recorded, smaller = SMALLER.get(path.stem, ("", ""))
    assert recorded in text
    copy = folder / path.name
    copy.write_text(text.replace(recorded, smaller))
    return copy


@pytest.mark.integration
@EACH
def test_it_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    """What it prints now is of the same form as what is recorded: another one is stale."""
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_INTERPRET"):     # the tests' own
        monkeypatch.delenv(variable, raising=False)
    recorded, now = nbformat.read(path, as_version=4), running.executed(made_smaller(path, tmp_path))
    for old, new in zip(code(recorded), code(now), strict=True):
        forms = [sorted({output.output_type for output in cell.outputs}) for cell in (old, new)]
        assert forms[0] == forms[1], new.source
        for output in new.outputs:
            assert output.output_type != "error", output


@pytest.mark.unit
def test_one_that_there_is_not_is_a_line(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["nothing"])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and "no such notebook; give one of compiler" in err and err.count("\n") == 1


@pytest.mark.unit
def test_what_it_needs_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 2 and "pip install nbclient ipykernel" in capsys.readouterr().err


@pytest.mark.integration
def test_a_cell_that_fails_is_told_and_nothing_is_written(tmp_path):
    path = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), path)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"broken.ipynb: a cell failed: ZeroDivisionError"):
        running.record(path)
    assert path.read_bytes() == before
