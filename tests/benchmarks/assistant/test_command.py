"""`python -m benchmarks assistant`: from the command line to the table, and what a person sees of their mistakes."""
import inspect
import textwrap

import pytest

from benchmarks.assistant import command
from benchmarks.examples import gpt
from benchmarks.records.read import read
from benchmarks.show import charts

TINY = """
    from benchmarks.examples import gpt

    def build():
        return gpt.of_size(vocabulary=64, width=32, heads=2, layers=2, batch=2, length=16)
"""


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


@pytest.mark.integration
def test_from_the_command_line_to_the_table(assistant, tmp_path):
    path, lines = tmp_path / "records.jsonl", inspect.getsource(gpt).splitlines()
    (first,) = [number for number, line in enumerate(lines, 1) if "scores = q @ k" in line]
    (last,) = [number for number, line in enumerate(lines, 1) if "y = weights @ v" in line]
    status, out, err = assistant(TINY, "--json", path)
    assert status == 0, err
    (row,) = [line for line in out.splitlines() if line.startswith("sdpa ") and " x " in line]
    assert f"gpt.py:{first}-{last}" in row and "2 x" in row
    assert row.split()[-1] in ("take", "gain")                 # how fast it is here is not for a test to say
    for words in ("forward+backward  ", "the ladder", "+ sdpa", "+ autocast", "+ compile", "write this"):
        assert words in out, out
    assert all(len(line) <= 100 or line.startswith("      ") for line in out.splitlines())    # but for code
    infos = [record["benchmark"]["extra_info"] for record in read(path)]
    assert {"as it is", "sdpa", "autocast", "compile", "library-norm", "fused-qkv"} <= {
        info["case"]["name"] for info in infos}
    assert {info["autocast"] for info in infos if info["case"]["name"] == "autocast"} == {"bfloat16"}
    ladder = [info["case"]["name"] for info in infos if info["case"]["variant"].get("measured") == "together"]
    assert max(name.count(" + ") for name in ladder) == 4


@pytest.mark.integration
def test_in_full_each_is_also_left_out_of_all(assistant, tmp_path):
    path = tmp_path / "records.jsonl"
    page = tmp_path / "report.md"
    only = [word for name in ("sdpa", "fused-qkv", "graph-break") for word in ("--only", name)]
    status, out, err = assistant(TINY, *only, "--inference", "--rounds", 6, "--json", path, "--report", page,
                                 quick=False)
    assert status == 0, err
    assert "left out of all" in out and "forward+backward" not in out
    assert "tf32" not in out and "autocast" not in out
    written = page.read_text()
    assert written.startswith("# my\\_model.py:build") and "(report-gains.svg)" in written
    code = "```python\nif not torch.compiler.is_compiling():\n"
    for words in ("### Where the ", "| opportunity ", "| + sdpa ", code):
        assert words in written, written
    assert charts.is_of(tmp_path / "report-gains", list(read(path)))


@pytest.mark.unit
@pytest.mark.parametrize("page, said", [("report.txt", "ends in .md"), ("nowhere/report.md", "no folder")])
def test_a_report_that_could_not_be_written_is_refused_at_once(assistant, tmp_path, page, said):
    status, _, err = assistant(TINY, "--report", tmp_path / page)
    assert status == 2 and said in err and err.count("\n") == 1


@pytest.mark.unit
@pytest.mark.parametrize("target, said", [
    ("my_model.py", "give FILE:FUNCTION"), ("nowhere.py:build", "no such file"), (":build", "give FILE:FUNCTION")])
def test_what_is_no_target_is_one_line(target, said, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([target])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.unit
def test_a_missing_function_names_those_there_are(assistant):
    status, _, err = assistant("def make():\n    pass\n")
    assert status == 2 and "has no function build; it has make" in err


@pytest.mark.unit
@pytest.mark.parametrize("source, said", [
    ("def build():\n    return [][3]", ["build() of", "IndexError: list index out of range", "my_model.py:2 in build"]),
    ("def build():\n    return 3", ["build() returned a int"]),
    ("import torch\ndef build():\n    return torch.nn.Linear(2, 2), (3,)", ["hold no tensor"]),
    ("import torch\ndef build():\n    return torch.sin, (torch.ones(2),)", ["give a torch.nn.Module"]),
    ("import torch\ndef build():\n    return torch.nn.Linear(3, 2), (torch.ones(2, 2),)", ["can't be called"]),
])
def test_what_build_gets_wrong_is_told(assistant, source, said):
    status, out, err = assistant(source)
    assert status == 1 and not out
    assert all(words in err for words in said), err


@pytest.mark.unit
def test_a_file_that_can_not_be_imported_says_where(assistant):
    status, _, err = assistant("import nothing_of_that_name\ndef build():\n    pass")
    assert status == 2 and "can't be imported: ModuleNotFoundError" in err and "my_model.py:1" in err
