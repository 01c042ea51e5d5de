"""Two runs against each other: clocks that differ, changes that are real, files that don't go together."""
import json
import random

import pytest
import torch
from made_records import FACTS, both, made

from benchmarks import compare
from common import PRESETS

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


def verdicts(old, new, noise=NOISE, **options) -> list[str]:
    rows, _, _ = compare.compare(old, new, noise, options.get("force", False))
    return [row[-1] for row in rows]


def test_the_same_code_is_the_same_on_nearly_every_row():
    words = [word for seed in range(40) for word in verdicts(process(2 * seed), process(2 * seed + 1))]
    assert words.count("SAME") >= 0.95 * len(words)


def test_another_clock_is_no_change():
    assert set(verdicts(process(1), process(2, clock=1.12))) == {"SAME"}


def test_without_calibration_the_clock_looks_like_a_change():
    assert set(verdicts(process(1, calibrated=False), process(2, clock=1.12, calibrated=False))) == {"SLOWER"}


@pytest.mark.parametrize("factor, word", [(1.05, "SLOWER"), (0.95, "FASTER")])
def test_five_percent_are_seen_across_runs_and_clocks(factor, word):
    rows, headers, _ = compare.compare(process(1), process(2, clock=0.93, slower={"2_sdpa": factor}), NOISE, False)
    found = {(row[0], row[1]): row[-1] for row in rows}
    assert {key: value for key, value in found.items() if value != "SAME"} == {
        ("2_sdpa", "forward"): word, ("2_sdpa", "forward+backward"): word}
    assert headers[-1] == "verdict"


def test_a_floor_takes_five_processes():
    four, five = ([line for seed in range(n) for line in process(seed)] for n in (4, 5))
    assert compare.floors(four) == {}
    assert len(compare.floors(five)) == 8 and all(0.001 < floor < 0.02 for floor in compare.floors(five).values())


def test_without_a_floor_nothing_small_is_called():
    rows, _, _ = compare.compare(process(1), process(2), [], False)
    assert {row[-1] for row in rows} == {"UNSURE"} and all(row[4].endswith("?") for row in rows)
    assert set(verdicts(process(1), process(2, slower=dict.fromkeys(STEPS, 1.2)), [])) == {"SLOWER"}


def test_several_processes_in_a_file_are_their_own_floor():
    old = [line for seed in range(5) for line in process(seed)]
    new = [line for seed in range(5, 10) for line in process(seed)]
    assert set(verdicts(old, new, noise=[])) == {"SAME"}


def test_too_noisy_to_say_is_unsure():
    assert set(verdicts(process(1, noise=0.2, samples=8), process(2, noise=0.2, samples=8))) == {"UNSURE"}


def test_raw_milliseconds_stand_beside_the_verdict():
    rows, headers, _ = compare.compare(process(1), process(2, clock=2.0), NOISE, False)
    row = dict(zip(headers, rows[0], strict=False))
    assert float(row["new ms"]) == pytest.approx(2 * float(row["old ms"]), rel=0.02) and row["verdict"] == "SAME"


@pytest.mark.parametrize("name, more", [
    ("gpu", {"facts": FACTS | {"name": "another CPU"}}), ("dtype", {"matmul": "float32"}),
    ("shape", {"config": PRESETS["cpu"].replace(amp_dtype=torch.bfloat16)}),
])
def test_what_must_not_differ_is_refused_unless_forced(name, more):
    with pytest.raises(ValueError, match=f"^{name} differs: .*--force"):
        verdicts(process(1), process(2, **more))
    assert len(verdicts(process(1), process(2, **more), force=True)) == 8


def test_other_steps_are_refused():
    old, new = made("0_baseline", both([1.0] * 6, [2.0] * 6)), made("2_sdpa", both([1.0] * 6, [2.0] * 6))
    with pytest.raises(ValueError, match=r"^step differs: 0_baseline in the old, 2_sdpa in the new"):
        verdicts(old, new)
    assert len(verdicts(old, new, force=True)) == 2


def test_rows_of_one_file_alone_are_left_out():
    assert len(verdicts(process(1), process(2) + made("5_more", both([1.0] * 6, [1.0] * 6)))) == 8


def test_emulated_and_failed_rows_are_not_compared():
    lines = made("4_transformer_engine", {}, status="skipped", reason="emulated")
    assert compare.rows(lines) == {}


def test_version_differences_are_listed():
    old = process(1)
    new = json.loads(json.dumps(process(2)))
    for line in new:
        line["dependencies"]["torch"]["version"] = "9.9"
        line["runners"][0]["extra_info"]["driver"] = "600"
    assert compare.versions(old, new) == ["driver: None -> 600", "torch: 2.9 -> 9.9"]
    assert compare.versions(old, old) == []


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


@pytest.mark.parametrize("share", ["much", "-1%", "nan", "1000"])
def test_a_share_that_is_none_is_a_mistake(main, share):
    status, out, err = main(process(1), process(2), f"--fail-above={share}")
    assert (status, out) == (2, "") and repr(share) in err and err.count("\n") == 1


@pytest.mark.parametrize("content, words", [("", "holds no records"), ("{}\n", "line 1"), ("not json\n", "line 1"),
                                            (json.dumps(made("0_baseline", {})[0]) + "\n", "holds no timings")])
def test_a_bad_file_is_one_line_and_status_two(main, content, words):
    for old, new in ((content, process(1)), (process(1), content)):
        status, out, err = main(old, new)
        assert (status, out) == (2, "") and words in err and err.count("\n") == 1 and err.startswith("compare: error: ")
