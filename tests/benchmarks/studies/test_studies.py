"""The registry of studies, the shape that all of them have, and how any of them runs."""
import itertools
import re
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from benchmarks import studies
from benchmarks.measure import options
from benchmarks.records.provenance import provenance
from benchmarks.records.read import latest, read
from benchmarks.show import page_parts, tables
from benchmarks.show import study as frame
from benchmarks.show.charts import is_of, plt
from benchmarks.show.study import Study
from common import steps
from common.command_line import Parser
from common.measure.cases import Case, Group, step_case
from common.runtime import compiler, exclusive
from tests.helpers.made_records import both, made

unit, integration = pytest.mark.unit, pytest.mark.integration
CPU = torch.device("cpu")
OURS = ["ladder", "ablation", "sweep", "peers", "components", "fusions", "power", "judge"]
NAMES = studies.names()
TIMED = [name for name in OURS if name != "judge"]                     # the judge times nothing, and draws nothing
LINES = made("0_baseline", both([8.0] * 6, [9.0] * 6))


def cpu_records(name: str) -> list[dict]:
    """The recorded run of a study on a CPU."""
    (path,) = (path for path in page_parts.recorded(name) if path.parent.name == "cpu")
    return read(path)


def a_study(**changes) -> Study:
    fields = {"name": "made up", "doc": "What is it?\n\nMore.", "groups": lambda chosen: [],
              "columns": [tables.CASE, tables.MS]}
    return Study(**(fields | changes))


def a_figure():
    figure, axis = plt().subplots()
    axis.plot([1, 2])
    return figure


# ----------------------------------------------------------------------------------------------------------- registry


@unit
def test_the_studies_are_in_the_order_in_which_a_learner_asks():
    assert [study.name for study in studies.every()][:len(OURS)] == OURS


@unit
def test_a_study_registers_itself_under_its_modules_name(monkeypatch):
    for name in NAMES:
        study = studies.load(name)
        assert study is studies.load(name) and study.name == name
    monkeypatch.setattr(frame, "registered", {})
    study = frame.register(a_study())
    assert frame.registered == {"made up": study}


@unit
def test_a_new_study_comes_behind_the_known_ones(monkeypatch):
    """By its name."""
    there = {"zebra": a_study(name="zebra"), "antelope": a_study(name="antelope"), "sweep": studies.load("sweep"),
             "ladder": studies.load("ladder")}
    monkeypatch.setattr(studies, "names", lambda: list(there))
    monkeypatch.setattr(studies, "load", there.__getitem__)
    assert [study.name for study in studies.every()] == ["ladder", "sweep", "antelope", "zebra"]


@unit
def test_the_pages_hold_what_was_recorded_and_no_more(monkeypatch):
    """A study that is new changes no page before it is recorded."""
    monkeypatch.setattr(page_parts, "of_study", lambda study: f"what is known of {study.name}")
    new = page_parts.parts_of([*studies.every(), a_study()])
    known = page_parts.parts_of(studies.every())
    for part in ("questions", "contents", "studies"):
        assert new[part]() == known[part]() and "made up" not in new[part]()


@unit
@pytest.mark.parametrize("compiles_anew", [False, True])
def test_what_was_compiled_for_a_group_goes_with_it(monkeypatch, compiles_anew):
    done = []
    session = SimpleNamespace(measure=done.append)
    monkeypatch.setattr(frame, "open_session", lambda study, chosen: session)
    monkeypatch.setattr(frame, "show", lambda *_: 0)
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    study = a_study(groups=lambda chosen: ["first", "second"], compiles_anew=compiles_anew)
    assert frame.run_here(study, SimpleNamespace(device=CPU)) == 0
    assert done == (["first", "reset", "second", "reset"] if compiles_anew else ["first", "second"])
    assert all(studies.load(name).compiles_anew for name in ("patterns", "mixers"))


# ---------------------------------------------------------------------------------------------------------- one shape


@unit
@pytest.mark.parametrize("name", NAMES)
def test_a_study_is_a_question_with_its_command(name):
    """With it its docstring begins; below stands how to run it."""
    study = studies.load(name)
    assert study.question.endswith("?") and study.doc.splitlines()[0].startswith(study.question)
    assert f"\n    python -m benchmarks {name}" in study.doc


@unit
@pytest.mark.parametrize("name", NAMES)
def test_a_studys_flags_are_added_to_those_of_all(name):
    study = studies.load(name)
    parser = options.parser(study.name, study.doc)
    study.add_arguments(parser)
    told = parser.format_help()
    for flag in ("--preset", "--device", "--rounds", "--quick", "--seed", "--json", "--chart"):
        assert told.count(f"  {flag} ") + told.count(f"  {flag}\n") == 1
    needed = ["--ranks", "2"] if "--ranks" in told else []
    chosen = options.parse(parser, ["--preset", "tiny", "--device", "cpu", "--quick", *needed], study.refine)
    assert chosen.rounds == 6


@unit
@pytest.mark.parametrize("name", TIMED)
def test_a_studys_cases_come_in_groups(name):
    """They can be asked for without anything built."""
    study = studies.load(name)
    parser = options.parser(study.name, study.doc)
    study.add_arguments(parser)
    chosen = options.parse(parser, ["--preset", "tiny", "--device", "cpu", "--quick"], study.refine)
    first = next(iter(study.groups(chosen)))
    assert isinstance(first, Group) and all(isinstance(case, Case) for case in first.cases)


@integration
@pytest.mark.parametrize("name", [name for name in TIMED if name != "power"])      # of a CPU it has no joules to draw
def test_a_study_tells_and_draws_from_records_alone(name):
    study, lines = studies.load(name), cpu_records(name)
    told = study.report(lines, 120)
    assert told.startswith(provenance(lines)) and "\n\n" in told
    drawn = study.charts(lines)
    assert isinstance(drawn, Mapping) and drawn
    for ending, figure in drawn.items():
        assert re.fullmatch("[a-z_-]+", ending)
        assert figure().axes
        plt().close("all")


@integration
@pytest.mark.parametrize("name", TIMED)
def test_a_study_answers_from_its_first_recorded_run_in_one_line(name):
    """On a GPU, at its default shape."""
    path = page_parts.recorded(name)[0]
    answer = studies.load(name).answer(read(path))
    assert path.parent.name != "cpu" and re.search(r"\d", answer) and "\n" not in answer


@unit
def test_a_study_of_one_table_needs_columns_and_cases_alone():
    study = a_study()
    assert study.question == "What is it?"
    assert study.report(LINES) == tables.text(study.columns, LINES)
    assert study.charts(LINES) == {} and study.answer(LINES) == "see the tables"
    assert a_study(text=lambda lines, width: f"{len(lines)} {width}").report(LINES, 80) == f"{len(LINES)} 80"


# ------------------------------------------------------------------------------------------------------- how it is run


@unit
@pytest.mark.parametrize("statuses, ended", [
    ([], 0), (["ok"], 0), (["ok", "skipped"], 0), (["skipped", "skipped"], 4), (["ok", "failed"], 1), (["oom"], 1),
    (["skipped", "oom"], 1)])
def test_the_exit_status_is_that_of_the_worst_case(statuses, ended):
    assert frame.exit_status(statuses) == ended


@unit
def test_a_chart_that_nothing_can_fill_is_named(capsys, tmp_path):
    study = a_study(no_chart="it needs two")
    frame.draw(study, str(tmp_path / "a"), LINES)
    assert capsys.readouterr() == ("", "made up: no chart: it needs two\n")
    frame.draw(study, None, LINES)
    frame.draw(study, "", LINES)
    assert capsys.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


@unit
def test_a_chart_is_drawn_where_one_was_asked_for(tmp_path):
    study = a_study(charts=lambda lines: {"speed": a_figure})
    frame.draw(study, str(tmp_path / "a"), LINES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-speed.png", "a-speed.svg"]


@pytest.fixture
def run_made_up(monkeypatch, capsys, studies_in_seconds):
    """run_made_up(study, *argv) -> (exit status, stdout, stderr), on a CPU."""
    def call(study: Study, *argv):
        words = ["--preset", "tiny", "--device", "cpu", "--rounds", "6", *map(str, argv)]
        try:
            status = frame.main(study, words)
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()
    return call


@integration
def test_a_study_runs_group_by_group_and_shows_all_of_it(run_made_up, tmp_path, monkeypatch):
    """In private caches, alone on its device; the records are as they were written."""
    order = itertools.count()
    private, alone = [], exclusive.alone
    monkeypatch.setattr(compiler, "use_private_caches", lambda: private.append(next(order)))

    def is_alone(device, name):
        assert (device, name, private) == (CPU, "made up", [])
        return alone(device, name)
    monkeypatch.setattr(exclusive, "alone", is_alone)

    def groups(chosen):
        for number in (0, 2):
            yield Group([step_case(steps.load(number), chosen.config, chosen.device)])
    study = a_study(groups=groups, charts=lambda lines: {"speed": a_figure})
    status, out, err = run_made_up(study, "--json", tmp_path / "out", "--chart", tmp_path / "chart")
    lines = read(tmp_path / "out")
    assert is_of(tmp_path / "chart-speed", lines)
    assert status == 0 and private == [0] and list(latest(lines)) == ["0_baseline", "2_sdpa"]
    assert out.strip() == tables.text([tables.CASE, tables.MS], lines)
    assert len(err.splitlines()) == 2 and "\nleft over " in err


@integration
@pytest.mark.parametrize("finished", [0, 1])
def test_ctrl_c_shows_the_groups_that_are_finished(finished, run_made_up, tmp_path):
    def groups(chosen):
        for _ in range(finished):
            yield Group([step_case(steps.load(0), chosen.config, chosen.device)])
        raise KeyboardInterrupt
    status, out, err = run_made_up(a_study(groups=groups), "--json", tmp_path / "out")
    assert status == 130 and "made up: interrupted" in err
    lines = read(tmp_path / "out") if finished else []
    assert out.strip() == (tables.text([tables.CASE, tables.MS], lines) if finished else "")


@integration
def test_a_case_that_fails_fails_the_study(run_made_up):
    def groups(chosen):
        return [Group([Case("a case", lambda setting, result: 1 / 0, chosen.config)])]
    status, out, _ = run_made_up(a_study(groups=groups))
    assert status == 1 and "a case: failed: ZeroDivisionError: division by zero" in out


@unit
def test_a_study_may_run_in_a_way_of_its_own(run_made_up):
    study = a_study(run=lambda study, chosen: 4 if study.name == "made up" and chosen.rounds == 6 else 0)
    assert run_made_up(study) == (4, "", "")


@unit
@pytest.mark.parametrize("error, status, said", [
    (KeyboardInterrupt(), 130, "\nmade up: interrupted; 1 finished records kept\n"),
    (OSError(28, "No space left on device"), 1, "made up: error: [Errno 28] No space left on device\n"),
    (torch.OutOfMemoryError("no"), 3, "made up: out of memory: no; give a smaller shape\n"),
], ids=["Ctrl-C", "a full disk", "no memory"])
def test_what_ends_a_study_early_is_one_line(run_made_up, tmp_path, error, status, said, monkeypatch):
    monkeypatch.setattr("common.command_line.say_no_more", lambda: None)

    def run(study, chosen):
        chosen.file.write(LINES[:1])
        raise error
    assert run_made_up(a_study(run=run), "--json", tmp_path / "out") == (status, "", said)
    assert len(read(tmp_path / "out")) == 1


@unit
def test_ctrl_c_while_flags_are_read_is_one_line(run_made_up):
    """A study may ask there what a machine has, which can take seconds."""
    def refine(chosen):
        raise KeyboardInterrupt
    assert run_made_up(a_study(refine=refine)) == (130, "", "\nmade up: interrupted\n")


@unit
def test_a_study_refines_its_own_flags(run_made_up):
    def add_arguments(parser: Parser) -> None:
        parser.add_argument("--sizes", type=options.numbers, default=(1, 2))

    def refine(chosen):
        if len(chosen.sizes) < 2:
            raise ValueError(f"--sizes {chosen.sizes[0]}: give two")

    def run(study, chosen):
        return len(chosen.sizes)
    study = a_study(add_arguments=add_arguments, refine=refine, run=run)
    assert run_made_up(study, "--sizes", "1,2,3") == (3, "", "")
    assert run_made_up(study, "--sizes", "7") == (2, "", "made up: error: --sizes 7: give two\n")
