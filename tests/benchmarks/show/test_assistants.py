"""The table of the models that the assistant was recorded on, from made-up records."""
import pytest

from benchmarks.records import AS_IT_IS
from benchmarks.records.read import case, metric
from benchmarks.show import assistants
from common.report.metrics import ENERGY
from common.report.record import VERDICT, record
from common.report.result import Result
from common.runtime.iteration import BOTH
from tests.helpers.made_records import CPU_CONFIG, GPU, copied, made, write

pytestmark = pytest.mark.unit


def timed(name: str, eager: float, graph: float) -> list[dict]:
    """Each way of launching took half as many joules as milliseconds."""
    lines = copied(made(name, {(BOTH, "eager"): [eager] * 6, (BOTH, "graph"): [graph] * 6}, facts=GPU,
                        study="assistant", variant={"measured": "together"}, joules=1.0))
    ms = {"eager": eager, "graph": graph}
    for line in lines:
        if metric(line) == ENERGY.name:
            line["metric"]["benchmark_values"] = [ms[case(line)["launch"]] / 2]
    return lines


def test_a_model_as_it_is_is_launched_one_by_one_and_the_fastest_as_it_is_fastest(tmp_path, monkeypatch):
    result = Result(AS_IT_IS, CPU_CONFIG, "float32", GPU, study="assistant", run="one")
    as_it_is = timed(AS_IT_IS, 12.0, 10.0)
    as_it_is.append(record(result, VERDICT, "", [], BOTH, technique="tf32", verdict="take"))
    (tmp_path / "gpu").mkdir()
    write(tmp_path / "gpu" / "assistant-mlp.jsonl", [*as_it_is, *timed("tf32", 6.0, 4.0)])
    monkeypatch.setattr(assistants, "RESULTS", tmp_path)
    headers, _, row = ([cell.strip() for cell in line.strip("|").split("|")]
                       for line in assistants.models().splitlines())
    cells = dict(zip(headers, row, strict=True))
    assert (cells["ms"], cells["fastest"], cells["J"]) == ("12.0", "4.00", "6, 2")
    assert cells["times"].startswith("3.00 [") and cells["take"] == "tf32"
