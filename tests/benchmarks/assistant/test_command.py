"""`python -m benchmarks assistant`: from the command line to the table, and what a person sees of their mistakes."""
import inspect
from types import SimpleNamespace

import pytest
import torch

from benchmarks.assistant import command
from benchmarks.assistant.optimized import Optimized
from benchmarks.assistant.technique import Advice, Found
from benchmarks.assistant.techniques import compiled, cuda_graph
from benchmarks.assistant.trials import Opportunity
from benchmarks.examples import gpt
from benchmarks.records.read import read
from benchmarks.show import charts

TINY = f"""{inspect.getsource(gpt)}

def build_tiny():
    return of_size(vocabulary=64, width=32, heads=2, layers=2, batch=2, length=16)
"""


@pytest.mark.integration
def test_from_the_command_line_to_the_table(assistant, tmp_path):
    path, lines = tmp_path / "records.jsonl", inspect.getsource(gpt).splitlines()
    (first,) = [number for number, line in enumerate(lines, 1) if "scores = q @ k" in line]
    (last,) = [number for number, line in enumerate(lines, 1) if "y = weights @ v" in line]
    status, out, err = assistant(TINY, "--json", path, "--cards", target="build_tiny")
    assert status == 0, err
    (row,) = [line for line in out.splitlines() if line.startswith("sdpa ") and " x " in line]
    assert f"my_model.py:{first}-{last}" in row and "2 x" in row
    assert row.split()[-1] in ("take", "gain")                 # how fast it is here is not for a test to say
    for words in ("forward+backward  ", "the ladder", "+ sdpa", "+ autocast", "+ compile", "write this"):
        assert words in out, out
    as_long_as_it_is = "      ", "  /", "wall time "       # code, its file, and how long each phase took here
    assert [line for line in out.splitlines() if len(line) > 100 and not line.startswith(as_long_as_it_is)] == []
    cards = out.split("\nstep ")[1:]
    assert cards[0].lstrip().startswith("as it is\n") and len(cards) == 2
    assert all("shape               input 0 int64 [2, 16], parameters " in card for card in cards), cards
    assert all("clock               n/a" not in card and "gradient of " in cards[1] for card in cards), cards
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
                                 target="build_tiny", quick=False)
    assert status == 0, err
    assert "left out of all" in out and "forward+backward" not in out
    assert "tf32" not in out and "autocast" not in out
    written = page.read_text()
    assert written.startswith("# my\\_model.py:build\\_tiny") and "(report-gains.svg)" in written
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
def test_what_another_piece_of_code_makes_needless_is_not_written():
    """The compiler's mode that captures graphs stands in place of the compiler alone."""
    found, program = Found(None, "", 1, ""), SimpleNamespace(model=torch.nn.Linear(2, 2), breaks=[], not_captured="")
    advices = [Advice(compiled.CODE), cuda_graph.TECHNIQUE.advice(program, found)]
    looked = SimpleNamespace(mode="forward", found={})
    opportunities = [Opportunity("", found, "take", advice=advice) for advice in advices]
    written = Optimized(looked, "", opportunities)._write_this()
    assert [code for _, code in written.pieces] == ['model = torch.compile(model, mode="reduce-overhead")']
