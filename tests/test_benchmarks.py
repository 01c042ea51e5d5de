"""README says what the records and scripts say; the studies run, or say why not, on any machine."""
import copy
import subprocess
import sys
from collections import Counter

import pytest
import torch

from benchmarks import peers, readme
from common import PRESETS, parameters, report, steps
from common.evidence import Evidence
from common.timing import Timing

pytestmark = pytest.mark.unit
FACTS = dict.fromkeys(("cuda", "cudnn", "driver", "triton", "transformer_engine", "git"))
FACTS |= {"device": "cpu", "name": "a CPU", "cpu_threads": 2, "torch": "2.9", "python": "3.11"}


def records(step: str, forward_ms: float, both_ms: float, **config) -> list[dict]:
    """What a run of `step` writes, with one sample a row."""
    r = report.Report(step, PRESETS["tiny"].replace(**config), "float32", FACTS, matmul="float32")
    r.errors = {"output": (1e-7, None), "branch": (2e-7, 3e-6)}
    lines = report.check_records(r)
    for mode, ms in zip(report.MODES, (forward_ms, both_ms), strict=True):
        r.rows[mode, "eager"] = report.Row(Timing([ms], True, "fake"), flops=1.0, tokens=1, limit_ms=ms / 2,
                                           peak_bytes=2**30)
        r.evidence[mode] = Evidence(Counter(), Counter(), "proven", "fake")
        lines += report.row_records(r, mode)
    return lines


def test_readme_is_what_the_records_and_scripts_say():
    text = (steps.ROOT / "README.md").read_text()
    assert readme.rewrite(text) == text, "run python -m benchmarks.readme"


def test_a_ladder_is_told_in_ratios():
    lines = records("0_baseline", 10, 40) + records("1_cublas", 5, 10) + records("1_cublas", 4, 20, amp_dtype=None)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in readme.ladder_table(lines).splitlines()[2:]]
    assert [row[0] for row in rows] == ["0_baseline", "1_cublas", "1_cublas, TF32 alone"]
    assert [row[5] for row in rows] == ["1.0 / 1.0", "2.0 / 4.0", "2.5 / 2.0"]        # times the first
    assert [row[6] for row in rows] == ["", "4.00", ""]        # times the previous: of the ladder's own rows alone
    assert rows[0][1:5] == ["10.00", "n/a", "40.00", "n/a"] and rows[0][7:] == ["50 / 50", "1.0", "2.0e-07"]


def test_a_later_run_replaces_an_earlier_one_whole():
    """Nothing of the earlier run is left where the later one failed before it got as far."""
    lines = records("2_sdpa", 1, 2) + report.check_records(copy.deepcopy(report.Report(
        "2_sdpa", PRESETS["tiny"], "float32", FACTS, errors={"output": (1e-7, None)})))
    (run,) = readme.runs(lines).values()
    assert readme.best(run, "forward") == (None, "")


@pytest.mark.parametrize("config, words", [
    ({"dropout": 0.5}, "dropout 0.5"), ({"amp_dtype": torch.bfloat16}, "bfloat16"),
    ({"fp8_weights": "kept"}, "weights kept"), ({}, ""),
])
def test_a_label_names_what_is_not_the_default(config, words):
    assert readme.label(records("2_sdpa", 1, 2, **config)[0]) == ("2_sdpa, " + words).rstrip(", ")


def test_a_half_written_line_is_left_out(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\n{"b": ')
    assert readme.records(path) == [{"a": 1}]


def test_transformer_layer_has_every_canonical_parameter():
    assert peers.TransformerLayer.parameter_names.keys() == parameters.shapes(PRESETS["tiny"]).keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_peers_say_why_they_are_skipped():
    done = subprocess.run([sys.executable, "-m", "benchmarks.peers"], cwd=steps.ROOT, capture_output=True, text=True)
    assert done.returncode == 4 and done.stdout == "" and done.stderr.startswith("peers: skipped: ")
