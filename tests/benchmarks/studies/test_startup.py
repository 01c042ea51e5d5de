"""What starting costs: each process's work, what it refuses, how the figures of all are kept and shown."""
import copy
import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks import studies
from benchmarks.records.read import case, metric, read, values
from benchmarks.studies.startup import cells, keeping, running, stack
from benchmarks.studies.startup.process import Answer, Work, done
from benchmarks.studies.startup.stack import BY_LAYER, WHOLE
from common import BlockConfig
from common.block.steps import ROOT
from common.measure.session import Session
from common.outcome import Failed
from common.report.result import Result
from common.runtime import compiler
from common.runtime.iteration import BOTH, FORWARD

unit, integration = pytest.mark.unit, pytest.mark.integration
STUDY = studies.load("startup")
CPU = torch.device("cpu")
CONFIG = BlockConfig(2, 16, 32, 4, amp_dtype=None)


def work(way=keeping.NONE, form=WHOLE, mode=BOTH, layers=2, config=CONFIG, folder="", makes=False) -> Work:
    return Work(way, form, mode, layers, config, "cpu", 0, str(folder), makes)


@pytest.fixture
def uncompiled(monkeypatch, fresh_dynamo):
    """Dynamo captures, and nobody generates code."""
    torch._dynamo.utils.counters.clear()
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **how: compile_it(call, backend="eager", **how))


# ------------------------------------------------------------------------------------------------------ of one process


@unit
def test_work_travels_as_text():
    for dtype in (None, torch.bfloat16):
        one = work(config=CONFIG.replace(amp_dtype=dtype))
        assert Work.read(one.written()) == one


@integration
@pytest.mark.parametrize("mode", [FORWARD, BOTH])
@pytest.mark.parametrize("way, form", [(keeping.NONE, WHOLE), (keeping.COLD, WHOLE), (keeping.COLD, BY_LAYER)])
def test_the_first_result_is_right(way, form, mode, uncompiled):
    answer = done(work(way, form, mode))
    assert answer.status == "ok" and answer.seconds > 0, answer
    assert set(answer.errors) == ({"branch"} if mode == FORWARD else
                                  {"branch", "input gradient", "parameter gradient"})
    assert all(0 < error < 1e-6 for error, _ in answer.errors.values())
    assert answer.counted["graphs"] == (0 if way == keeping.NONE else 1)


def with_constants(block, x):
    """The block with parameters that take no gradient."""
    values = {name: value.detach() for name, value in block.named_parameters()}
    return torch.func.functional_call(block, values, x)


@integration
@pytest.mark.parametrize("mode, said, wrong", [
    (FORWARD, "branch", lambda self, x: self.blocks[0].forward(x)),
    (FORWARD, "branch", lambda self, x: self.blocks[1].forward(self.blocks[1].forward(x))),
    (BOTH, "input gradient", lambda self, x: self.blocks[1].forward(self.blocks[0].forward(x.detach()))),
    (BOTH, "parameter gradient", lambda self, x: self.blocks[1].forward(with_constants(self.blocks[0], x)))],
    ids=["a layer is missing", "one runs twice", "no input gradient", "no parameter gradient"])
def test_a_wrong_first_result_is_not_timed(mode, said, wrong, monkeypatch):
    monkeypatch.setattr(stack.Stack, "forward", wrong)
    answer = done(work(mode=mode))
    assert answer.status == "failed", answer
    assert answer.reason.startswith(f"the {said} is off by"), answer.reason


@integration
def test_a_stale_cache_is_found(monkeypatch, tmp_path):
    """It lies there, and the compiler finds nothing in it."""
    monkeypatch.setattr(keeping, "compiled", lambda of_it, form: of_it.forward)
    x, _ = stack.sample(CONFIG, 0, CPU)
    one = stack.Stack(CONFIG, 2, 0, CPU)
    keeping.note(tmp_path, keeping.made_for(one, x, True))
    answer = done(work(keeping.WARM, folder=tmp_path))
    assert answer.status == "failed" and "what was kept did not serve" in answer.reason, answer


@unit
@pytest.mark.parametrize("name, other", [("shape", [1, 16, 32]), ("torch", "2.1.0"), ("device", "cuda, NVIDIA H100"),
                                         ("autocast", "torch.float16"), ("gradients", False), ("layers", 3)])
def test_what_was_made_for_something_else_is_refused(name, other, tmp_path):
    facts = keeping.made_for(stack.Stack(CONFIG, 2, 0, CPU), torch.zeros(2, 16, 32), True)
    keeping.note(tmp_path, facts | {name: other})
    with pytest.raises(Failed, match=rf"what was kept was made for {name} "):
        keeping.check_note(tmp_path, facts)
    keeping.note(tmp_path, facts)
    keeping.check_note(tmp_path, facts)


@unit
def test_an_empty_folder_is_reported(tmp_path):
    answer = done(work(keeping.PACKAGE, mode=FORWARD, folder=tmp_path))
    assert answer.status == "failed" and "nothing was kept there" in answer.reason


@integration
@pytest.mark.skipif(bool(compiler.missing(CPU)), reason="needs a C++ compiler")
def test_a_package_serves_the_shape_that_it_was_made_for_and_no_other(tmp_path, monkeypatch):
    """Torch would compute something of another batch without a word."""
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "0")
    make = work(keeping.PACKAGE, mode=FORWARD, layers=1, folder=tmp_path, makes=True)
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):       # sooner
        assert done(make).status == "ok"
    start = dataclasses.replace(make, makes=False)
    answer = done(start)
    assert answer.status == "ok" and answer.errors["branch"][0] < 1e-6, answer
    other = dataclasses.replace(start, config=CONFIG.replace(batch_size=1))
    answer = done(other)
    assert answer.status == "failed" and "made for shape [2, 16, 32], not [1, 16, 32]" in answer.reason, answer
    note = json.loads((tmp_path / keeping.NOTE).read_text()) | {"shape": [1, 16, 32]}
    (tmp_path / keeping.NOTE).write_text(json.dumps(note))
    assert done(other).status == "failed"                      # the library itself refuses, as it is asked to check


class Multiplied(torch.nn.Linear):
    """A matmul in the place of a stack: sooner compiled."""

    def __init__(self, config):
        super().__init__(config.hidden_size, config.hidden_size)
        self.config = config


@integration
@pytest.mark.skipif(bool(compiler.missing(CPU)), reason="needs a C++ compiler")
def test_a_saved_function_starts_under_autocast(tmp_path, fresh_dynamo):
    """Torch 2.11 refuses one whose autocast is outside of it, and was not there when it was loaded."""
    config = CONFIG.replace(amp_dtype=torch.bfloat16)
    one, x = Multiplied(config), torch.randn(2, 16, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        keeping.ways()[keeping.AOT].make(tmp_path, one, WHOLE, x)
    call = keeping.ways()[keeping.AOT].start(tmp_path, one, WHOLE)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = call(x), one(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, atol=1e-2, rtol=1e-2)


# ------------------------------------------------------------------------------------------------------ of this process


@integration
def test_shapes_are_counted_and_checked(uncompiled):
    counted = {}
    for dynamic in running.DYNAMIC:
        result = Result("shapes", CONFIG, "float32", {})
        counted[dynamic] = [graphs for _, graphs, _ in running.of_shapes(CONFIG, CPU, 0, dynamic, result)]
        assert 0 < result.errors["branch"][0] < 1e-6
    assert counted[False] == [1, 2, 3, 4, 5]
    assert counted[None][:4] == [1, 2, 2, 2] and counted[True][:4] == [1, 1, 1, 1]


@integration
def test_what_a_call_takes_is_checked_and_timed(uncompiled, studies_in_seconds):
    session = Session("startup", CPU, 6)
    session.measure(running.group(CONFIG, 2))
    assert [entry.result.status for entry in session.entries] == ["ok"] * 3, session.entries
    assert all(len(entry.result.errors) == 3 for entry in session.entries)
    shown = STUDY.report(session.lines)
    assert "compiled, 2 by layer" in shown and "x whole" in shown and ", by graph" not in shown
    as_graphs = copy.deepcopy([line for line in session.lines if metric(line) == "latency"])
    for line in as_graphs:
        case(line)["launch"] = "graph"
        ms = 2.0 if case(line)["variant"]["form"] == WHOLE else 1.0
        line["metric"]["benchmark_values"] = [ms] * len(values(line))
    rows = STUDY.report(session.lines + as_graphs).splitlines()
    by_host, by_graph = [row for row in rows if row.startswith("compiled, 2 by layer")]
    assert by_graph.count("2.00 [2.00, 2.00]") == 2        # each is held against the same launch of the other
    assert "2.00 [2.00, 2.00]" not in by_host


# ----------------------------------------------------------------------------------------------------------- the table


@pytest.fixture
def processes(monkeypatch):
    """Their answers without them: cold takes 8 s, each other way 2, what is kept 9. Those asked for are listed."""
    asked = []

    def run(self, cell, kept, cache, makes):
        asked.append((str(cell), makes))
        (kept / "x").write_bytes(b"x" * 1000)
        seconds = 9.0 if makes else 8.0 if cell.way == keeping.COLD else 2.0
        return Answer(seconds=seconds, errors={"branch": (1e-7, 1e-5)}, counted={"graphs": 1})
    monkeypatch.setattr(cells.Processes, "_run", run)
    return asked


@integration
def test_the_table_of_a_quick_run(study_main, processes, tmp_path):
    path = tmp_path / "startup.jsonl"
    status, out, err = study_main("startup", "--quick", "--json", path, "--chart", tmp_path / "startup")
    assert status == 0, err
    assert re.search(r"^warm folder +2\.00 +4\.0$", out, re.MULTILINE), out
    assert "warm is 4.0 times as fast as cold" in out
    assert "--quick leaves out: the forward alone" in out
    assert (tmp_path / "startup-seconds.svg").exists()
    count = len(processes)
    status, again, _ = study_main("startup", "--quick", "--json", path)
    assert status == 0 and len(processes) == count                    # nothing is measured twice
    assert out.split("forward+backward")[1] == again.split("forward+backward")[1]
    study_main("startup", "--quick", "--json", path, "--seed", 1)
    assert len(processes) == 2 * count                                # another seed is other work


@integration
def test_the_whole_table(study_main, processes, uncompiled, tmp_path):
    path = tmp_path / "startup.jsonl"
    status, out, err = study_main("startup", "--layers", 2, "--rounds", 6, "--json", path)
    assert status == 0, err
    assert sum(not makes for _, makes in processes) == 3 * (11 + 11 + 8)
    assert sum(makes for _, makes in processes) == 3 * 2 * 2 + 2
    for said in ("a package has no gradient", "one serves one layer", "dynamic=None", "compiled, 2 by layer",
                 "2 layers, forward, cold: by layer is 1.0 times as fast as whole"):
        assert said in out, out
    assert STUDY.answer(list(read(path))).startswith("on a CPU 2 layers start in 8.00 s")


@integration
def test_a_process_that_fails_is_a_failed_cell_and_tried_again(study_main, processes, monkeypatch, tmp_path):
    path = tmp_path / "startup.jsonl"
    with monkeypatch.context() as broken:
        broken.setattr(cells.Processes, "_run", lambda self, cell, *_, **__: Answer("failed", "it broke"))
        status, out, _ = study_main("startup", "--quick", "--json", path)
        assert status == 1 and "failed: it broke" in out and "cold  " in out
    status, out, _ = study_main("startup", "--quick", "--json", path)
    assert status == 0 and "it broke" not in out and "warm is 4.0 times as fast" in out, out


@integration
def test_without_a_compiler_the_rows_are_skipped(study_main, monkeypatch, processes):
    monkeypatch.setattr(compiler, "missing", lambda device: "no C++ compiler found: install g++")
    status, out, _ = study_main("startup", "--quick")
    assert status == 4 and not processes
    assert "n/a, cold, warm folder: no C++ compiler found: install g++" in out, out


@unit
@pytest.mark.parametrize("words, said", [
    (["--layers", "1"], "give 2 or more"), (["--folder", "/proc/nowhere"], "give a folder that you can write to")])
def test_a_mistake_is_one_line(study_main, words, said):
    status, _, err = study_main("startup", *words)
    assert status == 2 and said in err and err.count("\n") == 1


@unit
def test_a_folder_of_somebody_else_is_refused(study_main, tmp_path):
    os.chmod(tmp_path, 0o777)
    status, _, err = study_main("startup", "--folder", tmp_path)
    assert status == 2 and "nobody else can" in err


@integration
def test_a_real_process_answers(tmp_path):
    of_all = cells.Processes(tmp_path, CONFIG, "cpu", 0, lambda detail: None)
    measured = of_all.measure(cells.Cell(keeping.NONE, 2, WHOLE, FORWARD), 2)
    assert measured.failed is None and len(measured.seconds) == 2 and measured.errors["branch"][0] < 1e-6


@integration
def test_the_server_has_imported_nothing_of_the_compiler():
    """That belongs to the seconds that are told."""
    code = ("import sys, benchmarks.studies.startup.process; "
            "print([name for name in ('torch._dynamo', 'torch._inductor', 'triton') if name in sys.modules])")
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@unit
def test_a_process_that_dies_says_what_it_said_last(tmp_path, monkeypatch):
    monkeypatch.setattr(cells.Work, "written", lambda self: "{")
    of_all = cells.Processes(tmp_path, CONFIG, "cpu", 0, lambda detail: None)
    measured = of_all.measure(cells.Cell(keeping.NONE, 2, WHOLE, FORWARD), 3)
    assert len(measured.answers) == 1
    assert "the process ended with status 1: json.decoder.JSONDecodeError" in measured.failed.reason


@unit
def test_every_metric_is_of_a_cell(processes, study_main, tmp_path):
    path = tmp_path / "startup.jsonl"
    study_main("startup", "--quick", "--json", path)
    assert {metric(line) for line in read(path)} == {"first result", "kept", "wall time"}
