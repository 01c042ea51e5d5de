"""Two runs against each other: clocks that differ, changes that are real, files that don't go together."""
import json
import random
import re

import pytest
import torch
from made_records import CPU_CONFIG, FACTS, both, made

from benchmarks import compare
from benchmarks.attribution import PARTS
from benchmarks.significance import What, expected_ratio, floors, rows
from common import PRESETS, report, timing

pytestmark = pytest.mark.unit
STEPS = ("0_baseline", "1_cublas", "2_sdpa", "3_compile")


def process(seed: int, *, clock=1.0, slower=None, noise=0.004, samples=40, calibrated=True, **more) -> list[dict]:
    """The records of one process on a machine whose clock is `clock`: everything takes that much longer.

    Within a process samples scatter by `noise`, between processes medians do by 0.3 %. `slower`: step -> factor.
    """
    draw, lines = random.Random(seed), []

    def taken(ms):
        return [ms * clock * draw.gauss(1, noise) for _ in range(samples)]
    for number, step in enumerate(STEPS):
        bias = draw.gauss(1, 0.003) * (slower or {}).get(step, 1.0)
        ms = both(taken(8.0 / 2**number * bias), taken(24.0 / 2**number * bias))
        calibration = {"gemm": taken(1.4), "copy": taken(0.3)} if calibrated else None
        lines += made(step, ms, run=f"run {seed}", calibration=calibration, **more)
    return lines


NOISE = [line for seed in range(100, 106) for line in process(seed)]


def verdicts(old, new, noise=NOISE, force=False) -> list[str]:
    return [row[-1] for row in compare.compare(old, new, noise, force).rows]


def test_the_same_code_is_the_same_on_nearly_every_row():
    words = [word for seed in range(40) for word in verdicts(process(2 * seed), process(2 * seed + 1))]
    assert words.count("SAME") >= 0.95 * len(words)


def test_another_clock_is_no_change():
    assert set(verdicts(process(1), process(2, clock=1.12))) == {"SAME"}


def test_without_calibration_the_clock_looks_like_a_change():
    assert set(verdicts(process(1, calibrated=False), process(2, clock=1.12, calibrated=False))) == {"SLOWER"}


@pytest.mark.parametrize("factor, word", [(1.05, "SLOWER"), (0.95, "FASTER")])
def test_five_percent_are_seen_across_runs_and_clocks(factor, word):
    seen = compare.compare(process(1), process(2, clock=0.93, slower={"2_sdpa": factor}), NOISE, False)
    assert bool(seen.slower) == (word == "SLOWER")
    found = {(row[0], row[1]): row[-1] for row in seen.rows}
    assert {key: value for key, value in found.items() if value != "SAME"} == {
        ("2_sdpa", "forward"): word, ("2_sdpa", "forward+backward"): word}
    assert seen.headers[-1] == "verdict"


def test_only_what_the_machine_is_slower_at_is_made_up_for():
    """A machine with slower matmuls and the same memory: a row of copies that takes longer is SLOWER all the same."""
    def on(gemm, ms, part):
        return made("0_baseline", both([ms] * 9, [ms] * 9), matmul="float32", config=CPU_CONFIG,
                    calibration={"gemm": [gemm] * 9, "copy": [1.0] * 9},
                    parts={mode: parts | {part: ms} for mode in report.MODES})
    parts = dict.fromkeys(PARTS, 0.0)
    noise = [line for n in range(5) for line in on(1.0, 10 + 0.01 * n, "GEMM")
             if not line["benchmark"]["extra_info"].update(run=f"{n}")]
    assert set(verdicts(on(1.0, 10.0, "GEMM"), on(1.1, 11.0, "GEMM"), noise)) == {"SAME"}
    assert set(verdicts(on(1.0, 10.0, "softmax and mask"), on(1.1, 11.0, "softmax and mask"), noise)) == {"SLOWER"}
    assert set(verdicts(on(1.0, 10.0, "softmax and mask"), on(1.1, 10.0, "softmax and mask"), noise)) == {"SAME"}


def test_fp32_rows_are_held_against_fp32_matmuls():
    """Where both files have one: in older ones the only matmul is in FP16."""
    def on(fp32, ms, both_gemms=True):
        gemms = {"gemm": [1.0] * 9} | ({"gemm float32": [fp32] * 9} if both_gemms else {})
        return made("0_baseline", both([ms] * 9, [ms] * 9), matmul="float32", config=CPU_CONFIG,
                    calibration=gemms | {"copy": [1.0] * 9},
                    parts={mode: dict.fromkeys(PARTS, 0.0) | {"GEMM": ms} for mode in report.MODES})
    noise = [line for n in range(5) for line in on(1.0, 10 + 0.01 * n)
             if not line["benchmark"]["extra_info"].update(run=f"{n}")]
    assert set(verdicts(on(1.0, 10.0), on(1.1, 11.0), noise)) == {"SAME"}
    assert set(verdicts(on(1.0, 10.0, both_gemms=False), on(1.1, 11.0), noise)) == {"SLOWER"}
    row = What("2_sdpa", "forward", "eager", "shape", "float16, float32", "gpu")
    assert expected_ratio(row, *({"gemm": 1.0, "gemm float32": fp32, "copy": 1.0} for fp32 in (1, 2)), 1) == 1


def test_calibrations_that_scatter_call_nothing():
    """Two scripts on a busy CPU: few samples of the matmul and of the copy, far apart, and no recorded floor."""
    def on(gemms, copies):
        return made("0_baseline", both([100.0] * 9, [300.0] * 9), matmul="float32", config=CPU_CONFIG,
                    calibration={"gemm": gemms, "copy": copies})
    old, new = on([16.3, 24.2, 22.0, 21.5, 23.0], [5.6, 8.2, 8.0, 7.7, 7.9]), on([18.5] * 5, [6.6] * 5)
    assert set(verdicts(old, new, noise=[])) == {"UNSURE"}
    assert set(verdicts(on([22.0] * 5, [7.9] * 5), new, noise=[])) == {"SLOWER"}


def test_a_floor_takes_five_processes():
    four, five = ([line for seed in range(n) for line in process(seed)] for n in (4, 5))
    assert floors(four) == {}
    assert len(floors(five)) == 8 and all(0.001 < floor < 0.02 for floor in floors(five).values())


def test_without_a_floor_nothing_small_is_called():
    seen = compare.compare(process(1), process(2, slower={"2_sdpa": 1.04}), [], False)
    assert {row[-1] for row in seen.rows} == {"UNSURE"} and not seen.slower
    assert all(row[4].endswith("?") for row in seen.rows) and seen.notes[0].startswith("?: fewer than 5 processes")
    assert set(verdicts(process(1), process(2, slower=dict.fromkeys(STEPS, 1.2)), [])) == {"SLOWER"}


def test_several_processes_in_a_file_are_their_own_floor_and_seen_from_no_less():
    """They ran on one machine, whose own part of the noise they share: two machines differ as one process does."""
    old = [line for seed in range(9) for line in process(seed)]
    new = [line for seed in range(9, 18) for line in process(seed)]

    def nine(first):
        return [line for seed in range(first, first + 9) for line in process(seed)]
    words = [word for first in range(0, 200, 20) for word in verdicts(nine(first), nine(first + 10), noise=[])]
    assert words.count("SAME") >= 0.95 * len(words)
    row, *_ = compare.compare(old, new, [], False).rows
    alone, *_ = compare.compare(process(1), process(2), new, False).rows
    assert all(float(row[noise].split()[0]) >= float(alone[noise].split()[0]) for noise in (4, 6))


@pytest.mark.parametrize("factor", [1.0, 1.03, 1.12])
def test_it_is_the_same_difference_whichever_file_is_called_old(factor):
    """With noise so large that the times' own difference and its percentage part ways."""
    opposite = {"FASTER": "SLOWER", "SLOWER": "FASTER", "SAME": "SAME", "UNSURE": "UNSURE"}
    words = []
    for seed in range(0, 60, 2):
        sides = [process(seed, noise=0.08, samples=12), process(seed + 1, noise=0.08, samples=12,
                                                                slower=dict.fromkeys(STEPS, factor), clock=0.9)]
        there, back = compare.compare(*sides, NOISE, False).rows, compare.compare(*sides[::-1], NOISE, False).rows
        words += [row[-1] for row in there]
        assert [opposite[row[-1]] for row in back] == [row[-1] for row in there]
    assert len(set(words)) >= 2


def test_it_is_the_same_difference_where_one_file_scatters_more():
    """Each holds a floor of its own: the larger one is that of both."""
    def file(ms, part):
        return [line for n in range(5) for line in made("2_sdpa", both([ms * (1 + part * n)] * 9, []), run=f"{n}")]
    quiet, loud = file(11.0, 1e-4), file(10.0, 0.03)
    there, back = (compare.compare(*sides, [], False).rows[0] for sides in ((loud, quiet), (quiet, loud)))
    assert there[-1] == back[-1] == "UNSURE" and there[-2] == back[-2]


@pytest.mark.parametrize("bound, expected", [(1, "SLOWER"), (3, "UNSURE")])
def test_one_process_of_several_does_not_make_a_row_launch_bound(bound, expected):
    def file(ms, bound):
        return [line for n in range(5) for line in made(
            "2_sdpa", both([ms * (1 + 1e-4 * n)] * 9, []), run=f"{ms} {n}", enqueue=ms * (0.9 if n < bound else 0.1))]
    (row,) = compare.compare(file(10.0, bound), file(10.9, 0), [], False).rows
    assert row[-1] == expected
    (row,) = compare.compare(file(10.0, 0), file(10.9, bound), [], False).rows
    assert row[-1] == expected


def test_too_noisy_to_say_is_unsure():
    assert set(verdicts(process(1, noise=0.2, samples=8), process(2, noise=0.2, samples=8))) == {"UNSURE"}


def test_raw_milliseconds_stand_beside_the_verdict():
    seen = compare.compare(process(1), process(2, clock=2.0), NOISE, False)
    row = dict(zip(seen.headers, seen.rows[0], strict=False))
    assert float(row["new ms"]) == pytest.approx(2 * float(row["old ms"]), rel=0.02) and row["verdict"] == "SAME"


@pytest.mark.parametrize("name, more", [
    ("gpu", {"facts": FACTS | {"name": "another CPU"}}), ("dtype", {"matmul": "float32"}),
    ("shape", {"config": PRESETS["cpu"].replace(amp_dtype=torch.bfloat16)}),
])
def test_what_must_not_differ_is_refused_unless_forced(name, more):
    with pytest.raises(ValueError, match=f"^{name} of 0_baseline differs: .*--force"):
        verdicts(process(1), process(2, **more))
    assert len(verdicts(process(1), process(2, **more), force=True)) == 8


def test_one_step_of_another_dtype_is_refused_though_the_others_agree():
    new = [line for line in process(2) if line["model"]["backend"] != "2_sdpa"]
    new += made("2_sdpa", both([2.0] * 9, [6.0] * 9), matmul="float16", config=CPU_CONFIG)
    with pytest.raises(ValueError, match="dtype of 2_sdpa differs"):
        verdicts(process(1), new)


def test_other_steps_are_refused():
    old, new = made("0_baseline", both([1.0] * 6, [2.0] * 6)), made("2_sdpa", both([1.0] * 6, [2.0] * 6))
    with pytest.raises(ValueError, match=r"^step differs: 0_baseline in the old, 2_sdpa in the new"):
        verdicts(old, new)
    assert len(verdicts(old, new, force=True)) == 2


def test_force_does_not_guess():
    """Two steps a file, none in common; and two shapes a file, none in common: which goes with which?"""
    old = made("0_baseline", both([1.0] * 6, [2.0] * 6)) + made("1_cublas", both([1.0] * 6, [2.0] * 6))
    new = made("2_sdpa", both([1.0] * 6, [2.0] * 6)) + made("3_compile", both([1.0] * 6, [2.0] * 6))
    with pytest.raises(ValueError, match="even --force"):
        verdicts(old, new, force=True)
    old, new = ([line for size in sizes for line in made("0_baseline", both([1.0] * 6, [2.0] * 6),
                                                         config=CPU_CONFIG.replace(seq_len=size))]
                for sizes in ((32, 64), (16, 8)))
    with pytest.raises(ValueError, match="would count as the same"):
        verdicts(old, new, force=True)


def test_another_version_of_transformer_engine_is_compared_and_listed():
    sides = []
    for version in ("2.9.0", "2.20.2"):
        lines = json.loads(json.dumps(process(1)))
        for line in lines:
            line["benchmark"]["extra_info"]["engine"] = f"Transformer Engine {version}"
            line["dependencies"]["transformer_engine"] = {"version": version}
        sides.append(lines)
    assert set(verdicts(*sides)) == {"SAME"} and len(verdicts(*sides)) == 8
    assert compare.versions(*sides) == ["transformer_engine: 2.9.0 -> 2.20.2"]


def test_emulated_and_failed_rows_are_not_compared():
    fine = both([1.0] * 6, [2.0] * 6)
    assert len(rows(made("2_sdpa", fine))) == 2
    assert rows(made("2_sdpa", fine, status="failed", reason="refuted")) == {}
    lines = made("4_transformer_engine", fine)
    for line in lines:
        if line["metric"]["name"] == "latency":
            line["metric"]["extra_info"]["emulated"] = True
    assert rows(lines) == {}


def test_rows_of_one_file_alone_are_named():
    new = process(2) + made("5_more", both([1.0] * 6, [1.0] * 6))
    assert len(verdicts(process(1), new)) == 8
    seen = compare.compare(process(1), new, NOISE, False)
    assert len(seen.added) == 2 and seen.added[0].startswith("only in the new file: 5_more")
    assert not seen.gone and not seen.lost


def test_several_shapes_have_a_column():
    old, new = ([line for size in (32, 64) for line in process(seed, config=CPU_CONFIG.replace(seq_len=size))]
                for seed in (1, 2))
    seen = compare.compare(old, new, [], False)
    assert len(seen.rows) == 16 and seen.headers[1] == "shape" and len({row[1] for row in seen.rows}) == 2


@pytest.mark.parametrize("graph, expected", [(6.0, "UNSURE"), (7.5, "FASTER")])
def test_a_launch_bound_row_is_the_hosts_and_held_against_no_gpu(graph, expected):
    """The host of the new machine is 12 % faster at step 4's forward, its GPU as fast as the old one."""
    def file(run, host):
        ms = {("forward", "eager"): [8.0 * host * (1 + 0.001 * n) for n in range(9)],
              ("forward", "graph"): [graph * (1 + 0.001 * n + 0.001 * (host > 1)) for n in range(9)]}
        return made("4_transformer_engine", ms, run=run, calibration={"gemm": [1.0] * 9, "copy": [1.0] * 9})
    noise = [line for n in range(6) for line in file(str(n), 1 + 1e-4 * n)]
    seen = compare.compare(file("a", 1.0), file("b", 0.88), noise, False)
    found = {(row[1], row[2]): row for row in seen.rows}
    assert found["forward", "eager"][-1] == expected and found["forward", "graph"][-1] == "SAME"
    assert ("?" in found["forward", "eager"][4]) == (graph == 6.0) == any("launch-bound" in note for note in seen.notes)
    assert "?" not in found["forward", "graph"][4]


def test_samples_of_another_way_are_compared_as_they_are():
    """The calibration of the two sides was sampled in different ways too: it says nothing of the machines, nor does a
    floor of what is left beside it."""
    old, new = process(1), json.loads(json.dumps(process(2)))
    for line in new:
        if line["metric"]["name"] == "latency":
            extra = line["metric"]["extra_info"]
            extra["clock"] = timing.EventClock().in_rounds
            extra["calibration"] = {name: [1.2 * ms for ms in taken] for name, taken in extra["calibration"].items()}
    table = compare.compare(old, new, NOISE, False).rows
    assert {row[-1] for row in table} == {"UNSURE"} and all(row[4].endswith("?") for row in table)
    assert any(line.startswith("clock: ") and line.endswith("of the same work") for line in compare.versions(old, new))


def test_version_differences_are_listed():
    old = process(1)
    new = json.loads(json.dumps(process(2)))
    for line in new:
        line["dependencies"]["torch"]["version"] = "9.9"
        line["runners"][0]["extra_info"]["driver"] = "600"
    assert compare.versions(old, new) == ["driver: None -> 600", "torch: 2.9 -> 9.9"]
    assert compare.versions(old, old) == []
    counted = json.loads(json.dumps(old[0])) | {"metric": old[0]["metric"] | {"name": "dram traffic"}}
    counted["dependencies"]["torch"]["version"] = "1.0"                  # of what is not compared
    assert compare.versions(old, [*old, counted]) == []


@pytest.fixture
def main(tmp_path, capsys):
    """compare's command on two lists of records (or texts): main(old, new, *options) -> (status, stdout, stderr)."""
    def call(old, new, *options):
        paths = []
        for name, content in (("old", old), ("new", new), ("noise", NOISE)):
            paths.append(tmp_path / name)
            text = content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in content)
            paths[-1].write_text(text)
        try:
            status = compare.main([str(paths[0]), str(paths[1]), "--noise", str(paths[2]), *options])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()
    return call


def test_fail_above_decides_by_the_slowest_row(main):
    slower = process(2, slower={"3_compile": 1.08})
    assert main(process(1), slower)[0] == 0
    assert main(process(1), slower, "--fail-above", "5%")[0] == 1
    assert main(process(1), slower, "--fail-above", "0.2")[0] == 0
    assert main(slower, process(1), "--fail-above", "5%")[0] == 0                  # faster is no failure
    assert "3_compile, forward, eager is" in main(process(1), slower, "--fail-above", "5%")[2]


def test_a_step_that_failed_since_is_lost_and_fails(main):
    new = [line for line in process(2) if line["model"]["backend"] != "2_sdpa"]
    new += made("2_sdpa", {}, status="failed", reason="the branch is off")
    status, out, _ = main(process(1), new, "--fail-above", "5%")
    assert status == 1 and re.search("LOST: 2_sdpa, B.*: the branch is off", out)
    assert main(process(1), new)[0] == 0


def test_a_step_that_ran_since_it_failed_is_not_lost(main):
    """Nor is one that did not fit in the old file either."""
    failed = made("2_sdpa", {}, status="failed", reason="the branch is off", run="first",
                  facts=FACTS | {"git": "older"})
    assert main(process(1), failed + process(2), "--fail-above", "5%")[:1] == (0,)
    large = made("0_baseline", {}, status="oom", reason="too big", config=CPU_CONFIG.replace(batch_size=9))
    status, out, _ = main(process(1) + large, process(2) + large, "--fail-above", "5%")
    assert status == 0 and "LOST" not in out


def test_a_step_that_failed_in_one_of_several_processes_is_lost(main):
    new = process(2) + made("2_sdpa", {}, status="failed", reason="the branch is off", run="third") + process(3)
    status, out, _ = main(process(1), new, "--fail-above", "5%")
    assert status == 1 and "the branch is off" in out


@pytest.mark.parametrize("differs", ["git", "engine", "study", "clock"])
def test_what_makes_code_another(differs):
    new = json.loads(json.dumps(process(1)))
    for line in new:
        if differs != "clock":
            line["benchmark"]["extra_info"][differs] = "another"
        elif line["metric"]["name"] == "latency":
            line["metric"]["extra_info"]["clock"] = "another"
    assert all(len(runs) == 1 for runs in rows(process(2) + new).values())
    assert all(len(runs) == 2 for runs in rows(process(2) + process(1)).values())


def test_a_row_is_slower_at_its_own_shape(main):
    """The same step at a later shape does not stand in its place."""
    def both_shapes(seed, factor):
        small, large = process(seed, slower=factor), process(seed + 1)
        for line in large:
            line["model"]["name"] = line["model"]["name"].replace("S", "S9")
        return small + large
    status, _, err = main(both_shapes(1, None), both_shapes(3, dict.fromkeys(STEPS, 1.5)), "--fail-above", "20%")
    assert status == 1 and err.count("% slower") == 8


def test_a_file_of_noise_that_tells_none_is_a_mistake(main, tmp_path):
    """Rather than that the recorded noise is left out without a word."""
    path = tmp_path / "noise.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in process(7)))
    status, _, err = main(process(1), process(2), "--noise", str(path))
    assert status == 2 and f"--noise {path}: it holds fewer than 5 processes" in err


def test_a_file_of_noise_of_another_shape_is_a_mistake(main, tmp_path):
    path = tmp_path / "noise.jsonl"
    other = CPU_CONFIG.replace(seq_len=2 * CPU_CONFIG.seq_len)
    path.write_text("".join(json.dumps(line) + "\n" for seed in range(5) for line in process(seed, config=other)))
    status, _, err = main(process(1), process(2), "--noise", str(path))
    assert status == 2 and f"--noise {path}: it is of {other}, " in err and err.count("\n") == 1
    assert main(process(1, config=other), process(2, config=other), "--noise", str(path))[0] == 0


def test_processes_of_other_code_are_no_noise_and_no_rows():
    """Five commits, each slower than the one before, are not five processes of the same code."""
    history = []
    for number in range(5):
        lines = process(number, slower=dict.fromkeys(STEPS, 1.3 - 0.07 * number))
        for line in lines:
            line["benchmark"]["extra_info"]["git"] = f"commit{number}"
        history += lines
    assert all(len(runs) == 1 for runs in rows(history).values()) and not floors(history)
    assert "left out of the old file: 32 timings" in compare.text(compare.compare(history, process(9), [], False))


def test_a_gate_that_cannot_see_says_so(main):
    status, _, err = main(process(1), process(2, noise=0.2, samples=8), "--fail-above", "5%")
    assert status == 0 and "UNSURE of 8 of 8 rows" in err


def test_a_gate_fails_where_rows_are_gone(main):
    new = [line for line in process(2) if line["model"]["backend"] != "2_sdpa"]
    status, out, err = main(process(1), new, "--fail-above", "5%")
    assert status == 1 and "lacks 2 rows" in err and "only in the old file: 2_sdpa" in out
    assert main(new, process(1), "--fail-above", "5%")[0] == 0 and main(process(1), new)[0] == 0


@pytest.mark.parametrize("share", ["much", "-1%", "nan", "1000%", "5"])
def test_a_share_that_is_none_is_a_mistake(main, share):
    status, out, err = main(process(1), process(2), f"--fail-above={share}")
    assert (status, out) == (2, "") and repr(share) in err and err.count("\n") == 1


@pytest.mark.parametrize("content, words", [("", "holds no records"), ("{}\n", "line 1"), ("not json\n", "line 1"),
                                            (json.dumps(made("0_baseline", {})[0]) + "\n", "holds no timings")])
def test_a_bad_file_is_one_line_and_status_two(main, content, words):
    for old, new in ((content, process(1)), (process(1), content)):
        status, out, err = main(old, new)
        assert (status, out) == (2, "") and words in err and err.count("\n") == 1 and err.startswith("compare: error: ")


def test_a_table_that_finds_the_disk_full_is_one_line(main, full_stdout):
    with full_stdout:
        status, _, err = main(process(1), process(2))
    assert status == 1 and err == "compare: error: [Errno 28] No space left on device\n"


def test_a_process_that_stands_in_a_file_twice_is_one():
    """The same records five times are no five processes, and no floor."""
    once = process(1)
    assert all(len(found) == 1 for found in rows(once * 5).values()) and not floors(once * 5)
    assert verdicts(once, process(2), noise=once * 5) == verdicts(once, process(2), noise=once)


def test_same_means_that_five_percent_would_have_been_seen():
    """Of a file and itself, whose difference is none: what counts is the noise."""
    def spread(part):
        samples = [10.0 * (1 + part * (n - 10) / 10) for n in range(21)]
        return both(samples, samples)
    wide, narrow = made("2_sdpa", spread(0.16)), made("2_sdpa", spread(0.02))
    floor = [line for n in range(5) for line in made("2_sdpa", both([10 + 0.001 * n] * 9, [10.0 + 0.001 * n] * 9),
                                                     run=str(n))]
    assert verdicts(narrow, narrow, noise=floor) == ["SAME"] * 2
    assert verdicts(wide, wide, noise=floor) == ["UNSURE"] * 2
    seen = compare.compare(wide, wide, floor, False)
    assert all(5 < float(row[-2].split()[0]) < 12 for row in seen.rows)


def test_a_rows_floor_is_no_less_than_that_of_most_rows_of_its_shape():
    """Five processes tell one row's own spread badly."""
    def file(config):
        return [line for n in range(5) for step, part in (("0_baseline", 1e-5), ("1_cublas", 1e-3), ("2_sdpa", 1e-2))
                for line in made(step, both([10 * (1 + part * n)] * 9, [10 * (1 + part * n)] * 9), run=str(n),
                                 config=config)]
    found = {where.step: floor for where, floor in floors(file(CPU_CONFIG)).items()}
    assert found["0_baseline"] == pytest.approx(found["1_cublas"]) and found["2_sdpa"] > 9 * found["1_cublas"]


def test_a_step_that_runs_out_of_memory_since_is_lost():
    lost = compare.compare(process(1), process(2) + made("2_sdpa", {}, status="oom", reason="full", run="later"), NOISE,
                           False).lost
    assert lost == [f"LOST: 2_sdpa, {CPU_CONFIG}: full"]


def test_a_lost_row_is_not_gone_too():
    new = [line for line in process(2) if not line["benchmark"]["extra_info"]["step"].startswith("2")]
    seen = compare.compare(process(1), new + made("2_sdpa", {}, status="failed", reason="wrong"), NOISE, False)
    assert len(seen.lost) == 1 and not seen.gone
    assert len(compare.compare(process(1), new, NOISE, False).gone) == 2


def test_the_notes_are_of_both_files_and_all_rows():
    """One of the rows has no floor, and it is not the last; the new file holds an older commit too."""
    new = json.loads(json.dumps(process(3)))
    for line in new:
        line["benchmark"]["extra_info"] |= {"git": "older", "run": "older"}
    first = [line for line in NOISE if not line["benchmark"]["extra_info"]["step"].startswith("0")]
    notes = compare.compare(process(1), new + process(2), first, False).notes
    assert notes[0].startswith("?: ") and notes[1].startswith("left out of the new file: 8 timings") and len(notes) == 2
