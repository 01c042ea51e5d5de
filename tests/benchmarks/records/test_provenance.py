"""What a reader of records must know besides the figures."""
import pytest

from benchmarks.records.provenance import cautions, commits, provenance, unproven
from benchmarks.records.read import runs
from common import PRESETS
from common.report.record import NOT_A_BLOCK, record
from common.report.result import Result
from common.runtime.iteration import FORWARD
from tests.helpers.made_records import FACTS, GPU, both, copied, made

pytestmark = pytest.mark.unit


# ------------------------------------------------------------------------------------------------------------ cautions


def test_what_a_reader_must_know_besides_is_said():
    lines = copied(made("0_baseline", both([1.0] * 6, [1.0] * 6), facts=GPU))
    lines += copied(made("1_cublas", {}, status="oom", reason="80 GiB", facts=GPU))
    assert cautions(runs(lines[:3])) == []
    for line in lines:
        line["runners"][0]["extra_info"] |= {"throttled": ["power cap"], "neighbours": ["python (pid 7)"]}
    lines[0]["metric"]["extra_info"]["reason"] = "graph: not captured"
    assert cautions(runs(lines)) == [
        "0_baseline, check: graph: not captured", "throttled meanwhile: power cap",
        "other processes were on this GPU: python (pid 7)", "1_cublas, bfloat16: oom: 80 GiB"]


@pytest.mark.parametrize("facts, load, said", [
    (FACTS, 3.5, ["the machine was busy with other work too: load 4, 2 threads"]),
    (FACTS, 3.0, []), (GPU, 90.0, []),                     # a GPU's rows do not take the CPU's threads
], ids=["more than its threads", "its own load", "a GPU"])
def test_a_cpu_that_was_busy_is_named(facts, load, said):
    lines = copied(made("0_baseline", both([1.0] * 6, [])))
    for line in lines:
        line["runners"][0]["type"] = facts["device"]
        line["runners"][0]["extra_info"]["load_average"] = load
    assert cautions(runs(lines)) == said


def test_kernels_that_do_not_bear_a_claim_out_are_named_by_pass():
    lines = copied(made("3_compile", both([1.0] * 6, [1.0] * 6)))
    for line in lines:
        if line["metric"]["name"] == "launches" and line["benchmark"]["mode"] == FORWARD:
            line["metric"]["extra_info"] |= {"verdict": "unproven", "because": "57 launches, and 52 without"}
    (run,) = runs(lines)
    assert unproven(run) == cautions([run]) == ["3_compile, forward: unproven: 57 launches, and 52 without"]
    for line in lines:
        line["benchmark"]["extra_info"]["engine"] = "emulated (there is no GPU)"
    assert unproven(run) == []                             # that it is emulated says it already


# ---------------------------------------------------------------------------------------------------------- provenance


def test_provenance_names_machine_versions_and_commit():
    lines = made("0_baseline", both([1.0], [2.0]))
    assert provenance(lines) == ("a CPU, B2 S64 E64 H4 D16 F256; torch 2.9, Transformer Engine none; "
                                 "commit not recorded.")
    whole = Result("", PRESETS["gpt2"], "float32", FACTS, study="sweep")
    lines += [record(whole, "wall time", "s", [1.0], "run"), record(whole, "peak", "TFLOP/s", [1.0], "run")]
    assert ", B2 S64 E64 H4 D16 F256; " in provenance(lines)                      # that of what was measured


def test_provenance_of_a_gpu_names_its_driver():
    facts = GPU | {"transformer_engine": "2.9.0", "git": "0123456789abcdef+cafe"}
    assert provenance(made("0_baseline", both([1.0], []), facts=facts)) == (
        "a GPU, B2 S64 E64 H4 D16 F256; torch 2.9, cuda 13.0, Transformer Engine 2.9.0, driver 580; commit 0123456+.")


def test_provenance_holds_the_versions_of_all_lines():
    lines = copied(made("2_sdpa", {}))
    lines[-1]["dependencies"]["torch"]["version"] = "2.10"
    lines[-1]["dependencies"]["cudnn"] = {"version": "91900"}
    assert "; torch 2.10 and 2.9, cudnn 91900 and unknown, Transformer Engine none; " in provenance(lines)


def test_provenance_of_several_shapes_counts_them():
    lines = made("0_baseline", {}) + made("0_baseline", {}, config=PRESETS["cpu"])
    assert provenance(lines).startswith("a CPU, 2 shapes; ")


def test_a_record_of_no_work_adds_no_shape():
    lines = copied(made("0_baseline", {}))
    of_peaks = {**lines[-1], "model": {"name": NOT_A_BLOCK}}
    assert provenance([*lines, of_peaks]) == provenance(lines)
    assert provenance([of_peaks]).startswith("a CPU, not a block; ")


@pytest.mark.parametrize("gits, said", [("", ""), ("a", "a"), ("aab", "a and b"), ("abac", "a, b and c"),
                                        (" a", "not recorded and a"), (" ", "not recorded")])
def test_the_commits_of_records_are_told_in_words(gits, said):
    lines = [{"benchmark": {"extra_info": {"git": git.strip() or None}}} for git in gits]
    assert commits(lines) == said


@pytest.mark.parametrize("commit, said", [("0123456789abcdef", "0123456"), ("0123456+89abcdef", "0123456+"),
                                          ("0123456789abcdef+1a2b3c4d", "0123456+")])
def test_a_commit_is_named_short_and_whether_it_was_changed(commit, said):
    assert commits([{"benchmark": {"extra_info": {"git": commit}}}]) == said
