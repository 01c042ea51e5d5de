"""Two runs against each other: clocks that differ, changes that are real, what is in one file alone; the command."""
import json
import math
import re

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.records import compare, significance
from benchmarks.records.compare import Comparison, software_differences
from benchmarks.records.significance import rows
from common.report.record import PARTS
from common.runtime import timing
from common.runtime.iteration import BOTH, FORWARD, MODES
from tests.helpers.made_processes import NOISE, STEPS, process, several
from tests.helpers.made_records import CPU_CONFIG, FACTS, both, copied, made, write
from tests.helpers.said import one_line

pytestmark = pytest.mark.unit


def every_step(factor: float) -> dict[str, float]:
    return dict.fromkeys(STEPS, factor)


def without(lines: list[dict], step: str) -> list[dict]:
    return [line for line in lines if line["model"]["backend"] != step]


def seen_of(old, new, noise=NOISE, force=False) -> Comparison:
    return compare.compare(old, new, noise, force)


def verdicts(old, new, noise=NOISE, force=False) -> list[str]:
    return [row.verdict for row in seen_of(old, new, noise, force).rows]


def columns(seen: Comparison) -> list[dict[str, str]]:
    """The printed table: of each row header -> cell, the two columns called noise apart."""
    headers, _, *lines = compare.text(seen).split("\n\n")[0].splitlines()
    names = re.split(r"\s{2,}", headers.strip())
    second = len(names) - 1 - names[::-1].index("noise")
    names[second] = "new noise"
    return [dict(zip(names, re.split(r"\s{2,}", line.strip()), strict=True)) for line in lines]


# ------------------------------------------------------------------------------------------------------------ verdicts


def test_the_same_code_is_the_same_on_nearly_every_row():
    words = []
    for seed in range(40):
        words += verdicts(process(2 * seed), process(2 * seed + 1))
    assert words.count("SAME") >= 0.95 * len(words)


def test_another_clock_is_no_change():
    assert set(verdicts(process(1), process(2, clock=1.12))) == {"SAME"}


def test_without_calibration_the_clock_looks_like_a_change():
    assert set(verdicts(process(1, calibrated=False), process(2, clock=1.12, calibrated=False))) == {"SLOWER"}


@pytest.mark.parametrize("factor, word", [(1.05, "SLOWER"), (0.95, "FASTER")])
def test_five_percent_are_seen_across_runs_and_clocks(factor, word):
    seen = seen_of(process(1), process(2, clock=0.93, slower={"2_sdpa": factor}))
    changed = {(row.where.case, row.where.mode): row.verdict for row in seen.rows if row.verdict != "SAME"}
    assert changed == {("2_sdpa", FORWARD): word, ("2_sdpa", BOTH): word}
    assert bool(seen.slower()) == (word == "SLOWER") and seen.count(word) == 2 and seen.count("SAME") == 6


def of_parts(gemm: float, ms: float, part: str, run="one") -> list[dict]:
    """A row whose time is all of one part, on a machine whose matmul takes `gemm`."""
    parts = dict.fromkeys(PARTS, 0.0) | {part: ms}
    return made("0_baseline", both([ms] * 9, [ms] * 9), matmul="float32", run=run, parts=dict.fromkeys(MODES, parts),
                calibration={"gemm": [gemm] * 9, "copy": [1.0] * 9})


def test_only_what_the_machine_is_slower_at_is_made_up_for():
    """A machine with slower matmuls and the same memory: a row of copies that takes longer is SLOWER all the same."""
    noise = []
    for number in range(5):
        noise += of_parts(1.0, 10 + 0.01 * number, "GEMM", run=str(number))
    softmax = "softmax and mask"
    assert set(verdicts(of_parts(1.0, 10.0, "GEMM"), of_parts(1.1, 11.0, "GEMM"), noise)) == {"SAME"}
    assert set(verdicts(of_parts(1.0, 10.0, softmax), of_parts(1.1, 11.0, softmax), noise)) == {"SLOWER"}
    assert set(verdicts(of_parts(1.0, 10.0, softmax), of_parts(1.1, 10.0, softmax), noise)) == {"SAME"}


def test_fp32_rows_are_held_against_fp32_matmuls():
    """Where both files have one: in older ones the only matmul is in FP16."""
    parts = dict.fromkeys(PARTS, 0.0)

    def on(fp32: float | None, ms: float, run="one") -> list[dict]:
        calibration = {"gemm": [1.0] * 9, "copy": [1.0] * 9}
        if fp32:
            calibration["gemm float32"] = [fp32] * 9
        return made("0_baseline", both([ms] * 9, [ms] * 9), matmul="float32", calibration=calibration, run=run,
                    parts=dict.fromkeys(MODES, parts | {"GEMM": ms}))
    noise = []
    for number in range(5):
        noise += on(1.0, 10 + 0.01 * number, run=str(number))
    assert set(verdicts(on(1.0, 10.0), on(1.1, 11.0), noise)) == {"SAME"}
    assert set(verdicts(on(None, 10.0), on(1.1, 11.0), noise)) == {"SLOWER"}


def test_calibrations_that_scatter_call_nothing():
    """Two scripts on a busy CPU: few samples of the matmul and of the copy, far apart, and no recorded floor."""
    def on(run, gemms, copies):
        return made("0_baseline", both([100.0] * 9, [300.0] * 9), matmul="float32", run=run,
                    calibration={"gemm": gemms, "copy": copies})
    old, new = on("old", [16.3, 24.2, 22.0, 21.5, 23.0], [5.6, 8.2, 8.0, 7.7, 7.9]), on("new", [18.5] * 5, [6.6] * 5)
    assert set(verdicts(old, new, noise=[])) == {"UNSURE"}
    assert set(verdicts(on("old", [22.0] * 5, [7.9] * 5), new, noise=[])) == {"SLOWER"}


def test_without_a_floor_nothing_small_is_called():
    seen = seen_of(process(1), process(2, slower={"2_sdpa": 1.04}), noise=[])
    assert {row.verdict for row in seen.rows} == {"UNSURE"} and not seen.slower()
    assert all(row.assumed for row in seen.rows) and seen.notes[0].startswith("?: fewer than 5 processes")
    assert all(row["noise"].endswith(" %?") and row["new noise"].endswith(" %?") for row in columns(seen))
    assert set(verdicts(process(1), process(2, slower=every_step(1.2)), noise=[])) == {"SLOWER"}


def test_several_processes_in_a_file_are_their_own_floor():
    """They ran on one machine, whose own part of the noise they share: two machines differ as one process does."""
    words = []
    for first in range(0, 100, 20):
        words += verdicts(several(first, 9), several(first + 10, 9), noise=[])
    assert words.count("SAME") >= 0.95 * len(words)
    row, *_ = seen_of(several(0, 9), several(9, 9), noise=[]).rows
    alone, *_ = seen_of(process(1), process(2), noise=several(9, 9)).rows
    assert all(own >= of_one for own, of_one in zip(row.noises, alone.noises, strict=True))


@pytest.mark.parametrize("factor", [1.0, 1.03, 1.12])
def test_it_is_the_same_difference_whichever_file_is_called_old(factor):
    """With noise so large that the times' own difference and its percentage part ways."""
    opposite = {"FASTER": "SLOWER", "SLOWER": "FASTER", "SAME": "SAME", "UNSURE": "UNSURE"}
    words = []
    for seed in range(0, 40, 2):
        one = process(seed, noise=0.08, samples=12)
        other = process(seed + 1, noise=0.08, samples=12, slower=every_step(factor), clock=0.9)
        there, back = verdicts(one, other), verdicts(other, one)
        assert [opposite[word] for word in back] == there
        words += there
    assert len(set(words)) >= 2


def test_it_is_the_same_difference_where_one_file_scatters_more():
    """Each holds a floor of its own: the larger one is that of both."""
    def file(ms, part):
        lines = []
        for number in range(5):
            lines += made("2_sdpa", both([ms * (1 + part * number)] * 9, []), run=f"{ms} {number}")
        return lines
    quiet, loud = file(11.0, 1e-4), file(10.0, 0.03)
    (there,), (back,) = seen_of(loud, quiet, noise=[]).rows, seen_of(quiet, loud, noise=[]).rows
    assert there.verdict == back.verdict == "UNSURE" and there.resolution == back.resolution


@pytest.mark.parametrize("bound, expected", [(1, "SLOWER"), (3, "UNSURE")])
def test_one_process_of_several_does_not_make_a_row_launch_bound(bound, expected):
    def file(ms, count):
        lines = []
        for number in range(5):
            enqueue = ms * (0.9 if number < count else 0.1)
            lines += made("2_sdpa", both([ms * (1 + 1e-4 * number)] * 9, []), run=f"{ms} {number}", enqueue=enqueue)
        return lines
    assert verdicts(file(10.0, bound), file(10.9, 0), noise=[]) == [expected]
    assert verdicts(file(10.0, 0), file(10.9, bound), noise=[]) == [expected]


@pytest.mark.parametrize("graph, expected", [(6.0, "UNSURE"), (7.5, "FASTER")])
def test_a_launch_bound_row_is_the_hosts_and_held_against_no_gpu(graph, expected):
    """The host of the new machine is 12 % faster at step 4's forward, its GPU as fast as the old one."""
    def file(run, host):
        ms = {(FORWARD, "eager"): [8.0 * host * (1 + 0.001 * n) for n in range(9)],
              (FORWARD, "graph"): [graph * (1 + 0.001 * n + 0.001 * (host > 1)) for n in range(9)]}
        return made("4_transformer_engine", ms, run=run, calibration={"gemm": [1.0] * 9, "copy": [1.0] * 9})
    noise = []
    for number in range(6):
        noise += file(str(number), 1 + 1e-4 * number)
    seen = seen_of(file("a", 1.0), file("b", 0.88), noise)
    found = {row.where.launch: row for row in seen.rows}
    assert found["eager"].verdict == expected and found["graph"].verdict == "SAME"
    assert found["eager"].assumed == (graph == 6.0) == any("launch-bound" in note for note in seen.notes)
    assert not found["graph"].assumed


def test_too_noisy_to_say_is_unsure():
    assert set(verdicts(process(1, noise=0.2, samples=8), process(2, noise=0.2, samples=8))) == {"UNSURE"}


def test_same_means_that_five_percent_would_have_been_seen():
    """Of a file and itself, whose difference is none: what counts is the noise."""
    def spread(part):
        samples = [10.0 * (1 + part * (n - 10) / 10) for n in range(21)]
        return made("2_sdpa", both(samples, samples))
    floor = []
    for number in range(5):
        samples = [10 + 0.001 * number] * 9
        floor += made("2_sdpa", both(samples, samples), run=str(number))
    wide, narrow = spread(0.16), spread(0.02)
    assert verdicts(narrow, narrow, noise=floor) == ["SAME"] * 2
    assert verdicts(wide, wide, noise=floor) == ["UNSURE"] * 2
    assert all(0.05 < row.resolution < 0.12 for row in seen_of(wide, wide, floor).rows)


def test_samples_of_another_way_are_compared_as_they_are():
    """The calibration of the two sides was sampled in different ways too: it says nothing of the machines, nor does a
    floor of what is left beside it.
    """
    old, new = process(1), copied(process(2))
    for line in new:
        if line["metric"]["name"] == "latency":
            extra = line["metric"]["extra_info"]
            extra["clock"] = timing.EventClock().in_rounds
            extra["calibration"] = {name: [1.2 * ms for ms in taken] for name, taken in extra["calibration"].items()}
    seen = seen_of(old, new)
    assert {row.verdict for row in seen.rows} == {"UNSURE"} and all(row.assumed for row in seen.rows)
    assert any(line.startswith("clock: ") and line.endswith("of the same work")
               for line in software_differences(old, new))


# ------------------------------------------------------------------------------------- which records of a file count


def test_the_latest_commit_of_a_file_is_judged_and_not_the_oldest():
    """One that was twice as slow, then one as fast as the old file's."""
    slow = process(2, slower=every_step(2.0), facts=FACTS | {"git": "slow"})
    equal = process(3, facts=FACTS | {"git": "equal"})
    assert set(verdicts(process(1), slow)) == {"SLOWER"}
    assert set(verdicts(process(1), slow + equal)) == {"SAME"}
    assert set(verdicts(slow + equal, process(1))) == {"SAME"}
    assert set(verdicts(process(1), equal + slow)) == {"SLOWER"}


def test_what_of_a_file_does_not_count_is_counted():
    history = []
    for number in range(5):
        history += process(number, slower=every_step(1.3 - 0.07 * number), facts=FACTS | {"git": f"commit{number}"})
    assert all(len(its_runs) == 1 for its_runs in rows(history).values())
    left_out = "left out of the {} file: 32 timings of other commits, versions, studies or clocks than the latest"
    assert left_out.format("old") in compare.text(seen_of(history, process(9), noise=[]))
    assert left_out.format("new") in compare.text(seen_of(process(9), history, noise=[]))


def test_the_same_records_twice_tell_no_more_than_once():
    once = process(1)
    assert verdicts(once, process(2), noise=once * 5) == verdicts(once, process(2), noise=once)


def test_the_notes_are_of_both_files_and_all_rows():
    """One of the rows has no floor, and it is not the last; the new file holds an older commit too."""
    older = process(3, facts=FACTS | {"git": "older"})
    notes = seen_of(process(1), older + process(2), noise=without(NOISE, "0_baseline")).notes
    assert notes[0].startswith("?: ") and notes[1].startswith("left out of the new file: 8 timings") and len(notes) == 2


def test_another_version_of_transformer_engine_is_compared_and_listed():
    sides = []
    for version in ("2.9.0", "2.20.2"):
        sides.append(process(1, engine=f"Transformer Engine {version}",
                            facts=FACTS | {"transformer_engine": version}))
    assert set(verdicts(*sides)) == {"SAME"} and len(verdicts(*sides)) == 8
    assert software_differences(*sides) == ["transformer_engine: 2.9.0 -> 2.20.2"]
    assert "differs: transformer_engine: 2.9.0 -> 2.20.2" in seen_of(*sides).notes


def test_version_differences_are_listed():
    old, new = process(1), copied(process(2))
    for line in new:
        line["dependencies"]["torch"]["version"] = "9.9"
        line["runners"][0]["extra_info"]["driver"] = "600"
    assert software_differences(old, new) == ["driver: None -> 600", "torch: 2.9 -> 9.9"]
    assert software_differences(old, old) == []
    (counted,) = copied(old[:1])
    counted["metric"]["name"] = "dram traffic"                           # of what is not compared
    counted["dependencies"]["torch"]["version"] = "1.0"
    assert software_differences(old, [*old, counted]) == []


def test_a_library_that_one_file_lacks_differs():
    lines = copied(process(2))
    for line in lines:
        del line["dependencies"]["python"]
    assert software_differences(process(1), lines) == ["python: 3.11 -> none"]
    assert software_differences(process(1), process(1) + lines) == ["python: 3.11 -> 3.11 and none"]


# -------------------------------------------------------------------------------------------- what one file has alone


def test_rows_of_one_file_alone_are_named():
    new = process(2) + made("5_more", both([1.0] * 6, [1.0] * 6))
    seen = seen_of(process(1), new)
    assert len(seen.rows) == 8 and not seen.gone and not seen.lost
    assert seen.added == [f"only in the new file: 5_more, {CPU_CONFIG}, {mode}, eager" for mode in MODES]
    assert seen_of(new, process(1)).gone == [f"only in the old file: 5_more, {CPU_CONFIG}, {mode}, eager"
                                             for mode in MODES]


@pytest.mark.parametrize("status", ["failed", "oom"])
def test_a_case_that_failed_since_is_lost_and_not_gone_too(status):
    new = without(process(2), "2_sdpa")
    assert len(seen_of(process(1), new).gone) == 2
    seen = seen_of(process(1), new + made("2_sdpa", {}, status=status, reason="why"))
    assert seen.lost == [f"LOST: 2_sdpa, {CPU_CONFIG}: why"] and not seen.gone
    assert seen_of(process(1), process(2) + made("2_sdpa", {}, status=status, reason="why", run="later")).lost


def test_a_step_that_ran_since_it_failed_is_not_lost():
    """Nor is one that did not fit in the old file either, nor one that was never ok."""
    failed = made("2_sdpa", {}, status="failed", reason="the branch is off", run="first",
                  facts=FACTS | {"git": "older"})
    assert not seen_of(process(1), failed + process(2)).lost
    large = made("0_baseline", {}, status="oom", reason="too big", config=CPU_CONFIG.replace(batch_size=9))
    assert not seen_of(process(1) + large, process(2) + large).lost
    assert not seen_of(process(1), process(2) + large).lost


def test_a_step_that_failed_in_one_of_several_processes_is_lost():
    failed = made("2_sdpa", {}, status="failed", reason="the branch is off", run="third")
    assert seen_of(process(1), process(2) + failed + process(3)).lost == [
        f"LOST: 2_sdpa, {CPU_CONFIG}: the branch is off"]


# ------------------------------------------------------------------------------------------------------------ in words


def test_raw_milliseconds_stand_beside_the_verdict():
    row, *others = columns(seen_of(process(1), process(2, clock=2.0)))
    old_ms, new_ms = float(row["old ms"]), float(row["new ms"])
    assert new_ms == pytest.approx(2 * old_ms, rel=0.02) and row["verdict"] == "SAME" and len(others) == 7
    assert float(row["difference ms"]) == pytest.approx(new_ms - old_ms, abs=0.002)
    assert abs(float(row["percent (by cal)"].removesuffix(" %"))) < 2          # the clock's doubling is made up for


def test_the_table_has_a_column_for_each_thing_that_is_reported():
    text = compare.text(seen_of(process(1), process(2)))
    headers = re.split(r"\s{2,}", text.splitlines()[0].strip())
    assert headers == ["step", "pass", "launch", "old ms", "noise", "new ms", "noise", "difference ms",
                       "percent (by cal)", "seen from", "verdict"]
    assert text.split("\n\n")[1] == "8 SAME"


def test_how_many_rows_got_which_verdict_is_reported():
    words = compare.summary(seen_of(process(1), process(2, slower={"0_baseline": 1.2, "2_sdpa": 0.8})))
    assert words == "2 FASTER, 2 SLOWER, 4 SAME"


def test_several_shapes_have_a_column():
    sides = []
    for seed in (1, 2):
        small = process(seed, config=CPU_CONFIG.replace(seq_len=32))
        sides.append(small + process(seed, config=CPU_CONFIG.replace(seq_len=64)))
    seen = seen_of(*sides, noise=[])
    assert seen.several_shapes and len(seen.rows) == 16
    assert compare.text(seen).split()[:2] == ["step", "shape"]
    assert len({row["shape"] for row in columns(seen)}) == 2
    assert not seen_of(process(1), process(2)).several_shapes


@pytest.mark.parametrize("noise", [NOISE, []], ids=["a recorded floor", "an assumed floor"])
def test_seen_from_is_the_root_of_the_sum_of_both_noises_squares(noise):
    """In the table as it is printed, whether the same runs stand on both sides or not."""
    scattered = process(7, noise=0.03, samples=9)
    for old, new in ((scattered, scattered), (process(1), scattered), (scattered, process(1))):
        seen = seen_of(old, new, noise)
        for row, told in zip(seen.rows, columns(seen), strict=True):
            assert row.resolution == pytest.approx(math.hypot(*row.noises))
            shown = [float(told[name].rstrip(" %?")) for name in ("noise", "new noise", "seen from")]
            assert shown == [round(100 * part, 1) for part in (*row.noises, row.resolution)]
            assert shown[2] == pytest.approx(math.hypot(*shown[:2]), abs=0.15)          # each is rounded


@pytest.mark.parametrize("noise", [NOISE, []], ids=["a recorded floor", "an assumed floor"])
def test_a_file_and_itself_are_told_to_be_the_same_runs(noise):
    """What its calibrations are off by cancels: both sides' noise is that of their own samples."""
    said = "Both files hold the same runs: the table tells what could be seen, and nothing of a change."
    same = seen_of(process(1), copied(process(1)), noise)
    assert said in same.notes and said in compare.text(same).splitlines()
    assert all(row.difference == 0 and row.noises[0] == row.noises[1] for row in same.rows)
    assert all(row["noise"] == row["new noise"] for row in columns(same))
    assert said not in seen_of(process(1), process(2), noise).notes


def test_files_that_share_some_runs_alone_are_not_told_to_be_the_same():
    """Neither where one of the rows is another run's, nor where one file holds a run more."""
    another = [line for line in process(2) if line["model"]["backend"] == "0_baseline"]
    for new in (without(process(1), "0_baseline") + another, process(1) + process(2)):
        seen = seen_of(process(1), new)
        assert len(seen.rows) == 8 and "the same runs" not in "".join(seen.notes)


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def main(tmp_path, capsys):
    """compare's command on two lists of records (or texts): main(old, new, *options) -> (status, stdout, stderr)."""
    def call(old, new, *options):
        paths = []
        for name, content in (("old", old), ("new", new), ("noise", NOISE)):
            path = tmp_path / name
            if isinstance(content, str):
                path.write_text(content)
            else:
                write(path, content)
            paths.append(str(path))
        old_path, new_path, noise_path = paths
        try:
            status = benchmarks.main(["compare", old_path, new_path, "--noise", noise_path, *map(str, options)])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()
    return call


def test_the_command_prints_the_table_and_what_one_file_has_alone(main):
    new = without(process(2), "2_sdpa") + made("5_more", both([1.0] * 6, []))
    status, out, err = main(process(1), new)
    seen = seen_of(process(1), new)
    assert (status, err) == (0, "")
    assert out == "\n".join([compare.text(seen), *seen.gone, *seen.added]) + "\n"


def test_a_file_may_be_a_folder_of_files(tmp_path, capsys):
    for name, first in (("old", 0), ("new", 10)):
        (tmp_path / name).mkdir()
        for seed in range(first, first + 5):
            write(tmp_path / name / f"{seed}.jsonl", process(seed))
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "\n8 SAME\n" in capsys.readouterr().out


def test_the_noise_of_a_machine_is_found_where_it_was_recorded(tmp_path, monkeypatch):
    """In files and in folders, of this GPU's name alone."""
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    (tmp_path / "here" / "noise-tiny").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    of_folder, of_file = several(0, 1), several(1, 1)
    write(tmp_path / "here" / "noise-tiny" / "1.jsonl", of_folder)
    write(tmp_path / "here" / "noise-gpt2.jsonl", of_file)
    write(tmp_path / "here" / "ladder-tiny.jsonl", several(2, 1))
    write(tmp_path / "there" / "noise-tiny.jsonl", process(3, facts=FACTS | {"name": "another CPU"}))
    found = compare.recorded_noise(process(9))
    assert {line["benchmark"]["extra_info"]["run"] for line in found} == {"run 0", "run 1"}
    assert len(found) == len(of_folder) + len(of_file)


def test_fail_above_decides_by_the_slowest_row(main):
    slower = process(2, slower={"3_compile": 1.08})
    assert main(process(1), slower)[0] == 0
    assert main(process(1), slower, "--fail-above", "5%")[0] == 1
    assert main(process(1), slower, "--fail-above", "0.2")[0] == 0
    assert main(slower, process(1), "--fail-above", "5%")[0] == 0                  # faster is no failure
    assert "3_compile, forward, eager is" in main(process(1), slower, "--fail-above", "5%")[2]


def test_a_step_that_failed_since_fails_the_gate(main):
    new = without(process(2), "2_sdpa") + made("2_sdpa", {}, status="failed", reason="the branch is off")
    status, out, _ = main(process(1), new, "--fail-above", "5%")
    assert status == 1 and re.search("LOST: 2_sdpa, B.*: the branch is off", out)
    assert main(process(1), new)[0] == 0


def test_a_gate_fails_where_rows_are_gone(main):
    new = without(process(2), "2_sdpa")
    status, out, err = main(process(1), new, "--fail-above", "5%")
    assert status == 1 and "lacks 2 rows" in err and "only in the old file: 2_sdpa" in out
    assert main(new, process(1), "--fail-above", "5%")[0] == 0 and main(process(1), new)[0] == 0


def test_a_gate_that_cannot_see_says_so(main):
    status, _, err = main(process(1), process(2, noise=0.2, samples=8), "--fail-above", "5%")
    assert status == 0 and "UNSURE of 8 of 8 rows" in err


def test_a_row_is_slower_at_its_own_shape(main):
    """The same step at a later shape does not stand in its place."""
    def both_shapes(seed, factor):
        return (process(seed, slower=every_step(factor))
                + process(seed + 1, config=CPU_CONFIG.replace(seq_len=32)))
    status, _, err = main(both_shapes(1, 1.0), both_shapes(3, 1.5), "--fail-above", "20%")
    assert status == 1 and err.count("% slower") == 8 and f"2_sdpa, {CPU_CONFIG}, forward, eager is" in err


def test_force_compares_across_machines(main):
    new = process(2, facts=FACTS | {"name": "another CPU"})
    status, _, err = main(process(1), new)
    assert status == 2 and "gpu of 0_baseline differs" in one_line(err)
    status, out, _ = main(process(1), new, "--force")
    assert status == 0 and "0_baseline" in out


def test_a_file_of_noise_that_tells_none_is_a_mistake(main, tmp_path):
    """Rather than that the recorded noise is left out without a word."""
    path = write(tmp_path / "noise.jsonl", process(7))
    status, _, err = main(process(1), process(2), "--noise", path)
    assert status == 2 and f"--noise {path}: it holds fewer than 5 processes" in one_line(err)


def test_a_file_of_noise_of_another_shape_is_a_mistake(main, tmp_path):
    other, lines = CPU_CONFIG.replace(seq_len=2 * CPU_CONFIG.seq_len), []
    for seed in range(5):
        lines += process(seed, config=other)
    path = write(tmp_path / "noise.jsonl", lines)
    status, _, err = main(process(1), process(2), "--noise", path)
    assert status == 2 and f"--noise {path}: it is of {other}, " in one_line(err)
    assert main(process(1, config=other), process(2, config=other), "--noise", path)[0] == 0


@pytest.mark.parametrize("share", ["much", "-1%", "nan", "1000%", "5"])
def test_a_share_that_is_none_is_a_mistake(main, share):
    status, out, err = main(process(1), process(2), f"--fail-above={share}")
    assert (status, out) == (2, "") and repr(share) in one_line(err)


@pytest.mark.parametrize("text, share", [("5%", 0.05), ("0.05", 0.05), ("0", 0.0), ("120%", 1.2)])
def test_a_share_is_given_in_percent_or_as_a_fraction(text, share):
    assert compare.fraction(text) == pytest.approx(share)


@pytest.mark.parametrize("content, words", [("", "holds no records"), ("{}\n", "line 1"), ("not json\n", "line 1"),
                                            (json.dumps(made("0_baseline", {})[0]) + "\n", "holds no timings")])
def test_a_bad_file_is_one_line_and_status_two(main, content, words):
    for old, new in ((content, process(1)), (process(1), content)):
        status, out, err = main(old, new)
        assert (status, out) == (2, "") and words in one_line(err) and err.startswith("compare: error: ")


def test_a_table_that_finds_the_disk_full_is_one_line(main, full_stdout):
    with full_stdout:
        status, _, err = main(process(1), process(2))
    assert status == 1 and err == "compare: error: [Errno 28] No space left on device\n"


def test_a_files_own_floor_comes_before_the_recorded_one():
    """What these machines of these days scatter by says more than what another day's did."""
    loud = []
    for number in range(6):
        loud += process(200 + number, slower=every_step(1 + 0.1 * number))
    own = significance.floors(several(0, 6))
    known = compare._known_floors(several(0, 6), process(9), loud)
    assert all(known[where] == floor < significance.floors(loud)[where] for where, floor in own.items())
