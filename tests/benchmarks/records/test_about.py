"""What a file of records says of itself: what ran, when, where, on which sources, and in which order."""
import pytest

from benchmarks.records import about
from common.block.traits import Traits
from common.runtime import sources
from common.runtime.iteration import FORWARD
from tests.helpers.made_records import GPU, both, made, write
from tests.helpers.said import one_line

pytestmark = pytest.mark.unit
OURS = GPU | {"git": "1234567", "sources": sources.digest(), "gpu_uuid": "GPU-1", "cpu_model": "a host",
              "began": "2026-11-23 10:00:00+00:00", "numpy": "2.1.0", "transformer_engine": "2.9.0"}


def told(lines: list[dict]) -> dict[str, str]:
    """Label -> what stands beside it, of the one process in these records."""
    count, block = about.text(lines).split("\n\n")
    assert count == f"{len(lines)} records of 1 process"
    beside: dict[str, str] = {}
    title = ""
    for line in block.splitlines():
        assert len(line) <= about.WIDTH
        title = line[:about.LABEL].strip() or title
        beside[title] = f"{beside.get(title, '')} {line[about.LABEL:]}".strip()
    return beside


def timed(name: str, rounds: list[int], offsets_s: list[float], launch: str = "eager", **more) -> list[dict]:
    """The records of a case whose samples were taken then."""
    lines = made(name, {(FORWARD, launch): [1.0] * len(rounds)}, **more)
    for line in lines:
        if line["metric"]["name"] == "latency":
            line["metric"]["extra_info"] |= {"rounds": rounds, "offsets_s": offsets_s}
    return lines


def test_it_says_what_ran_when_where_on_which_sources_with_which_libraries():
    lines = made("2_sdpa", both([1.0] * 6, [2.0] * 6), facts=OURS)
    lines += made("3_compile", {}, facts=OURS, status="failed", reason="no compiler")
    beside = told(lines)
    assert list(beside) == ["process", "what ran", "when", "where", "sources", "libraries", "rounds"]
    assert beside["what ran"].startswith("the study ladder: 2 cases (1 ok, 1 failed) 2_sdpa, bfloat16; "
                                              "3_compile, bfloat16 B2 S64 ")
    assert beside["when"] == "2026-11-23 10:00:00+00:00"
    assert beside["where"] == "a GPU, 80 GiB, driver 580 UUID GPU-1; CPU a host"
    assert beside["sources"] == f"commit 1234567 SHA-256 {OURS['sources'][:16]}: this checkout's sources match"
    assert beside["libraries"] == "torch 2.9; CUDA 13.0; numpy 2.1.0; Transformer Engine 2.9.0; Python 3.11"


def test_other_sources_are_said_to_differ():
    beside = told(made("2_sdpa", both([1.0] * 6, [2.0] * 6), facts=OURS | {"sources": "0" * 64, "git": "1234567+89"}))
    assert beside["sources"] == (
        "commit 1234567+89 (with changes that were not committed) SHA-256 0000000000000000: this checkout's sources "
        f"differ (its own: {sources.digest()[:16]})")


def test_what_an_older_record_lacks_is_not_recorded():
    beside = told(made("2_sdpa", both([1.0] * 6, [2.0] * 6), facts=GPU, engine="Transformer Engine 2.9.0"))
    assert beside["when"] == "not recorded" and "UUID not recorded; CPU a CPU" in beside["where"]
    assert beside["sources"] == "commit not recorded SHA-256 not recorded: this checkout can't be held against it"
    assert "numpy not recorded" in beside["libraries"]
    assert "cuDNN as Transformer Engine sees it not recorded" in beside["libraries"]


def test_a_library_that_only_one_row_uses_is_named():
    lines = made("2_sdpa", both([1.0] * 6, [2.0] * 6))
    lines += made("torchao float8", both([1.0] * 6, [2.0] * 6), engine="torchao 0.18.0", traits=Traits())
    for line in lines:
        if line["model"]["backend"] == "torchao float8":
            line["dependencies"] |= {"torchao": {"version": "0.18.0"}, "transformer_engine_cudnn": {"version": "91900"}}
    beside = told(lines)
    assert "torchao 0.18.0" in beside["libraries"]
    assert "cuDNN as Transformer Engine sees it 91900" in beside["libraries"]


def test_a_cpu_is_named_with_its_threads():
    assert told(made("2_sdpa", both([1.0] * 6, [2.0] * 6)))["where"] == "a CPU, 2 threads"


def test_samples_that_took_turns_were_interleaved():
    lines = timed("2_sdpa", [0, 1, 2], [0.0, 3.0, 4.0]) + timed("3_compile", [0, 1, 2], [1.0, 2.0, 5.0])
    assert told(lines)["rounds"] == ("3 of 2 series, in 2 different orders; interleaved: each took one sample of every "
                                     "case, and was over before the next began")


@pytest.mark.parametrize("rounds, offsets_s", [([0, 1, 2], [1.0, 3.5, 5.0]),       # its second comes late
                                               ([0, 1], [1.0, 2.0]),               # the last round lacks it
                                               ([0, 0, 1], [1.0, 1.5, 2.0])])      # one round has it twice
def test_samples_that_did_not_take_turns_are_said_not_to(rounds, offsets_s):
    lines = timed("2_sdpa", [0, 1, 2], [0.0, 2.5, 3.0]) + timed("3_compile", rounds, offsets_s)
    assert "NOT interleaved" in told(lines)["rounds"]


def test_passes_that_came_one_after_the_other_are_orders_of_their_own():
    lines = timed("2_sdpa", [0, 1], [0.0, 3.0]) + timed("3_compile", [0, 1], [1.0, 2.0])
    lines += timed("2_sdpa", [0, 1], [10.0, 13.0], "graph") + timed("3_compile", [0, 1], [11.0, 12.0], "graph")
    lines += timed("4_transformer_engine", [0, 1], [11.5, 12.5], "graph")
    assert [(order.rounds, len(order.series)) for order in about.orders(lines)] == [(2, 2), (2, 3)]
    assert "2 of 2 series" in told(lines)["rounds"] and "2 of 3 series" in told(lines)["rounds"]


def test_a_script_has_no_rounds():
    lines = made("2_sdpa", both([1.0] * 6, [2.0] * 6), study="step")
    for line in lines:
        line["metric"]["extra_info"].pop("rounds", None)
    beside = told(lines)
    assert beside["rounds"] == "none: a script times one case after the other"
    assert beside["what ran"].startswith("a script: 1 case (1 ok)")


def test_a_long_list_is_cut_and_counted():
    lines = []
    for number in range(25):
        lines += made(f"case {number}", both([1.0] * 6, [2.0] * 6), traits=Traits())
    assert told(lines)["what ran"].count("case ") == 20 and "; and 5 more" in told(lines)["what ran"]


def test_each_process_is_a_block(tmp_path, capsys):
    lines = made("2_sdpa", both([1.0] * 6, [2.0] * 6)) + made("2_sdpa", both([1.0] * 6, [2.0] * 6), run="two")
    write(tmp_path / "a.jsonl", lines)
    assert about.main([str(tmp_path / "a.jsonl")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{len(lines)} records of 2 processes\n") and out.count("process     ") == 2


def test_what_holds_no_records_is_a_mistake(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        about.main([str(tmp_path / "none.jsonl")])
    assert end.value.code == 2
    assert one_line(capsys.readouterr().err).startswith("records: error: ")
