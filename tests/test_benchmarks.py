"""README says what the records and scripts say; every study says what it needs."""
import json
import re

import pytest
import torch
from made_records import FACTS, both, made

from benchmarks import command, readme, records
from common import PRESETS, BlockConfig, parameters, report, steps
from common.config import DTYPES

pytestmark = pytest.mark.unit


def test_readme_is_what_the_records_and_scripts_say():
    text = (steps.ROOT / "README.md").read_text()
    assert readme.rewrite(text) == text, "run python -m benchmarks.ladder --readme"


def test_the_long_tables_are_what_the_records_say():
    for path, text in readme.long_tables().items():
        assert path.exists() and path.read_text() == text, "run python -m benchmarks.ladder --readme"


def test_the_charts_show_the_recorded_runs():
    assert readme.stale_charts() == [], "run python -m benchmarks.ladder --readme"


def test_what_a_chart_is_of_stands_below_all_else_in_it():
    """In the drawn files: to save a larger box than the layout's moves what is anchored to it."""
    paths = sorted(readme.RESULTS.glob("*/*.svg"))
    for path in paths:
        svg = path.read_text()
        height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[1])
        texts = [(style, float(y)) for style, y in
                 re.findall(r'<text style="([^"]*)"[^>]*?(?:translate\([-\d.]+ |y=")([-\d.]+)', svg)]
        caption = [y for style, y in texts if "#444444" in style]
        assert caption and max(y for style, y in texts if "#444444" not in style) < min(caption) - 6.5, path
        assert max(caption) < height - 1, path
    assert len(paths) > 10


def test_every_chart_and_file_that_readme_names_is_there():
    named = re.findall(r"\[[^]]*\]\(([^)#:]+)\)", (steps.ROOT / "README.md").read_text())
    assert named and all((steps.ROOT / name).exists() for name in named)


def test_a_place_that_is_missing_is_named():
    with pytest.raises(ValueError, match="0 places for 'diff 0 1'"):
        readme.rewrite("no markers at all")


def test_the_scripts_are_told_in_ratios():
    lines = [line for step, forward, backward, more in (
        ("0_baseline", 10, 40, {}), ("1_cublas", 5, 10, {}), ("1_cublas", 4, 20, {"parameter_dtype": "bfloat16"}))
        for line in made(step, both([forward], [backward]), run=None, study="step", **more)]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in readme.scripts_table(lines).splitlines()[2:]]
    assert [row[0] for row in rows] == ["0_baseline", "1_cublas", "1_cublas, all 16-bit"]
    assert [row[5] for row in rows] == ["1.0 / 1.0", "2.0 / 4.0", "2.5 / 2.0"]        # times the first
    assert [row[6] for row in rows] == ["", "4.00", ""]        # times the previous: of the ladder's own rows alone
    assert rows[0][1:5] == ["10.00", "n/a", "40.00", "n/a"] and rows[0][7:] == ["50 / 50", "1.0", "2.0e-07"]


def test_the_first_table_is_the_ladders_by_the_faster_way_of_launching():
    found = records.latest(records.read(readme.recorded("ladder")[0]))
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in readme.summary().splitlines()[4:]]
    assert [row[0] for row in rows] == [name for name in found if name[0].isdigit()] and len(rows) == 6
    first, last = found[rows[0][0]], found[rows[-1][0]]
    assert rows[-1][2] == f"{last.best_ms('forward+backward'):.2f}"
    assert rows[-1][3] == f"{first.best_ms('forward+backward') / last.best_ms('forward+backward'):.1f}"
    assert rows[0][4] == "" and all(re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", row[4]) for row in rows[1:])


def test_a_run_that_failed_is_a_row_of_the_scripts_table():
    lines = made("0_baseline", both([1.0], [2.0])) + made("1_cublas", {}, status="failed", reason="why")
    assert "n/a" in readme.scripts_table(lines).splitlines()[-1]


def test_provenance_names_machine_versions_and_commit():
    lines = made("0_baseline", both([1.0], [2.0]))
    assert records.provenance(lines) == ("a CPU, B2 S64 E64 H4 D16 F256; torch 2.9, Transformer Engine none; "
                                         "commit not recorded.")
    whole = report.Report("sweep", PRESETS["gpt2"], "float32", FACTS)
    lines.append(report.record(whole, "wall time", "s", [1.0], "run"))
    assert ", B2 S64 E64 H4 D16 F256; " in records.provenance(lines)                   # that of what was measured


def test_provenance_holds_the_versions_of_all_lines():
    lines = json.loads(json.dumps(made("2_sdpa", {})))
    lines[-1]["dependencies"]["torch"]["version"] = "2.10"
    lines[-1]["dependencies"]["cudnn"] = {"version": "91900"}
    assert "; torch 2.10 and 2.9, cudnn 91900 and unknown, Transformer Engine none; " in records.provenance(lines)


@pytest.mark.parametrize("name", readme.STUDIES)
def test_every_study_has_one_shape(name):
    """A docstring that asks one question and gives the command; a table and charts from records; one main."""
    study = readme.STUDIES[name]
    first = study.__doc__.splitlines()[0]
    assert "?" in first and f"python -m benchmarks.{name}" in study.__doc__ and "Exit status" in study.__doc__
    assert all(callable(getattr(study, part)) for part in ("main", "text", "chart_stems", "draw"))


def test_no_recorded_run_took_more_memory_than_was_foretold():
    """The estimate decides what fits: it is to be high, and not by ten times."""
    shares = []
    for path in sorted((steps.ROOT / "benchmarks" / "results" / "h200").glob("ladder-*.jsonl")):
        for run in records.runs(records.read(path)):
            if peak := run.value("forward+backward", "peak memory", "eager"):
                fields = {name: value for name, value in run.info["config"].items()
                          if name in BlockConfig.__dataclass_fields__}
                config = BlockConfig(**fields | {"amp_dtype": DTYPES.get(fields["amp_dtype"])})
                shares.append(peak / parameters.memory_needed(config, int(run.info["step"][0]), torch.device("cuda")))
    assert len(shares) >= 12 and min(shares) > 0.1 and max(shares) <= 1, shares


@pytest.mark.parametrize("statuses, expected", [
    ("ok", 0), ("ok skipped", 0), ("skipped skipped", 4), ("skipped failed", 1), ("ok oom", 1), ("", 0)])
def test_a_study_that_could_run_nothing_does_not_end_as_if_it_had(statuses, expected):
    assert command.exit_status(statuses.split()) == expected
