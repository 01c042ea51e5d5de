"""Crossings, exponents and resumption from made-up records; the command on sizes of a second."""
import collections
import functools

import pytest
import torch
from made_records import GPU, both, made

from benchmarks import command, ladder, records, study, sweep
from benchmarks.attribution import PARTS
from common import PRESETS, parameters, report, timing

unit, integration = pytest.mark.unit, pytest.mark.integration


def point(size: int, times: dict[str, float], axis="seq_len", **more) -> list[dict]:
    """The records of one size: step -> ms of both passes."""
    config = PRESETS["tiny"].replace(**{axis: size})
    lines = [line for step, ms in times.items() for line in made(
        step, both([ms * f for f in (0.99, 1, 1.01)] * 3, [ms] * 9), run=f"{size}", config=config, facts=GPU,
        matmul="float16", **more.get(step, {}))]
    r = report.Report("sweep", config, "float32", GPU, study="sweep", run=f"{size}")
    return lines + [report.record(r, sweep.DONE, "", [], "run", axis=axis, size=size, how={})]


@unit
@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_the_exponent_is_the_power(power):
    assert sweep.exponent([(x, 7 * x**power) for x in (1, 2, 64, 128, 256)]) == pytest.approx(power)
    assert sweep.exponent([(1, 1), (2, 2)]) is None


@unit
def test_only_the_large_end_counts_for_growth():
    assert sweep.exponent([(1, 100), (2, 100), (64, 64**2), (128, 128**2), (256, 256**2)]) == pytest.approx(2)


@unit
def test_a_crossing_is_where_a_step_stays_faster():
    """Step 1 is faster from 128 on: at 32 it is too, but not at 64."""
    lines = [line for size, a, b in ((32, 2.0, 1.0), (64, 1.0, 1.2), (128, 4.0, 3.0), (256, 16.0, 8.0))
             for line in point(size, {"0_baseline": a, "1_cublas": b, "2_sdpa": b})]
    assert sweep.crossovers(sweep.points_of(lines)["seq_len"], "forward") == {
        "1_cublas": (128, []), "2_sdpa": (None, [])}
    text = sweep.text(lines)
    assert "from S = 128 on" in text and "nowhere here" in text


@unit
def test_where_launches_bound_a_step():
    """By graph replay all but the largest are much faster; there the kernels fill half of the smallest size alone."""
    lines = []
    for size, ms, replay in ((32, 1.0, 0.6), (64, 1.02, 0.61), (128, 4.0, 3.9)):
        busy = dict.fromkeys(PARTS, 0.0) | {"GEMM": 0.3 if size == 32 else 0.9 * ms, "idle": 0.1 * ms}
        more = {"0_baseline": {"parts": {"forward": busy}}}
        lines += point(size, {"0_baseline": ms}, **more)
        config = PRESETS["tiny"].replace(seq_len=size)
        lines += made("0_baseline", {("forward", "graph"): [replay] * 9}, run=f"{size}", config=config, facts=GPU,
                      matmul="float16")
    assert sweep.launch_bound(sweep.points_of(lines)["seq_len"], "forward") == {"0_baseline": ("up to 64", "up to 32")}
    assert sweep.launch_bound(sweep.points_of(point(32, {"0_baseline": 1.0}))["seq_len"], "forward") == {
        "0_baseline": ("n/a", "n/a")}


@unit
def test_memory_is_what_an_iteration_adds():
    config = PRESETS["tiny"].replace(seq_len=128)
    weights = sum(torch.Size(shape).numel() for shape in parameters.shapes(config).values())
    static = 4 * (2 * weights + 2 * config.tokens * config.hidden_size)
    (run,) = records.runs(made("0_baseline", both([1.0] * 6, [1.0] * 6), config=config, peak=static + 1000))
    assert sweep.added_memory(run, "forward+backward") == 1000


@unit
def test_attention_by_hand_is_quadratic_and_fused_is_linear():
    """Told from peaks that hold parameters, gradients, x and dy besides."""
    lines = []
    for size in (64, 128, 256):
        config = PRESETS["tiny"].replace(seq_len=size)
        weights = sum(torch.Size(shape).numel() for shape in parameters.shapes(config).values())
        static = 4 * (2 * weights + 2 * config.tokens * config.hidden_size)
        lines += point(size, {"0_baseline": size**2, "2_sdpa": size},
                       **{"0_baseline": {"peak": static + 8 * size**2}, "2_sdpa": {"peak": static + 8 * size}})
    grown = sweep.growth(sweep.points_of(lines)["seq_len"], "forward+backward", "seq_len")
    assert grown == {"0_baseline": (pytest.approx(2), pytest.approx(2)), "2_sdpa": (pytest.approx(1), pytest.approx(1))}
    assert "S^2.00" in sweep.text(lines)


@unit
def test_out_of_memory_is_a_point():
    config = PRESETS["tiny"].replace(seq_len=64)
    lines = point(32, {"0_baseline": 1.0})
    lines += made("0_baseline", {}, status="oom", reason="full", run="64", config=config, facts=GPU, matmul="float16")
    r = report.Report("sweep", config, "float32", GPU, study="sweep", run="64")
    lines.append(report.record(r, sweep.DONE, "", [], "run", axis="seq_len", size=64))
    assert [line.split() for line in sweep.text(lines).splitlines() if line.startswith("64")] == [["64", "oom"]] * 2


@unit
def test_a_pass_that_was_not_timed_says_so():
    lines = [line for line in point(32, {"0_baseline": 1.0}) if line["benchmark"]["mode"] != "forward+backward"]
    forward, backward = (line.split() for line in sweep.text(lines).splitlines() if line.startswith("32"))
    assert forward[0] == "32" and float(forward[1]) == 1 and backward == ["32", "not", "timed"]


@unit
def test_a_heading_has_a_star_for_each_size_that_differs():
    made_of = {"seq_len": "B2 S* E64 H4 D16 F256", "hidden_size": "B2 S64 E* H* D16 F*"}
    for axis, shape in made_of.items():
        lines = []
        for size in (32, 64):
            more = {"num_heads": size // 16, "ffn_hidden_size": None} if axis == "hidden_size" else {}
            config = PRESETS["tiny"].replace(**{axis: size}, **more)
            lines += made("0_baseline", both([1.0] * 9, [1.0] * 9), run=f"{size}", config=config, facts=GPU)
            r = report.Report("sweep", config, "float32", GPU, study="sweep", run=f"{size}")
            lines.append(report.record(r, sweep.DONE, "", [], "run", axis=axis, size=size))
        assert f"ms of forward by {axis} ({shape})" in sweep.text(lines)


@unit
def test_heads_keep_their_width_when_the_block_gets_wider():
    options = type("Options", (), {"config": PRESETS["gpt2"], "axes": ("hidden_size",), "values": (64, 256, 1536)})
    assert [(config.num_heads, config.ffn_hidden_size) for _, config in sweep.shapes(options)] == [
        (1, 256), (4, 1024), (24, 6144)]


@pytest.fixture
def main(monkeypatch, study_main):
    """The sweep in this process, of steps 0 and 2 alone: main(*argv) -> (status, out, err)."""
    monkeypatch.setattr(sweep, "ROWS", ("0", "2"))
    return functools.partial(study_main, sweep)


@integration
def test_an_interrupted_sweep_goes_on_where_it_stopped(main, tmp_path, monkeypatch):
    path = tmp_path / "sweep.jsonl"
    argv = ("--axis", "seq_len", "--values", "16,32,64", "--rounds", 6, "--json", path)
    built = collections.Counter()
    real = ladder.cases

    def cases(config, *rest):
        built[config.seq_len] += 1
        if config.seq_len == 64 and built[64] == 1:
            raise KeyboardInterrupt
        return real(config, *rest)
    monkeypatch.setattr(ladder, "cases", cases)
    status, out, err = main(*argv)
    assert (status, out) == (130, "") and "finished records kept" in err
    status, out, err = main(*argv)
    assert status == 0 and "2 of 3 sizes are already in" in err and built == {16: 1, 32: 1, 64: 2}
    points = sweep.points_of(records.read(path))["seq_len"]
    assert [size for size, _ in points] == [16, 32, 64]
    assert all(run.samples("forward", "eager") for _, runs in points for run in runs.values())
    status, again, _ = main(*argv, "--chart", tmp_path / "chart")
    assert status == 0 and again == out and built[64] == 2                      # nothing is measured a second time
    assert (tmp_path / "chart-seq_len.svg").exists()


@integration
def test_sizes_measured_in_another_way_are_measured_again(main, tmp_path):
    path = tmp_path / "sweep.jsonl"
    argv = ("--axis", "seq_len", "--values", "16", "--json", path)
    assert main(*argv, "--rounds", 6)[0] == 0
    status, _, err = main(*argv, "--rounds", 7)
    assert status == 0 and "0 of 1 sizes are already in" in err
    ((_, runs),) = sweep.points_of(records.read(path))["seq_len"]
    assert {len(run.samples("forward", "eager")) for run in runs.values()} == {7}


@unit
def test_only_what_was_asked_for_and_measured_this_way_is_shown():
    """A file can hold other studies, other batches, and the same shape measured in another way since."""
    how = {"rounds": 6}

    def lines(size, ms, run, **more):
        config = PRESETS["tiny"].replace(seq_len=size)
        r = report.Report("sweep", config, "float32", GPU, study="sweep", run=run)
        return made("0_baseline", both([ms] * 6, [ms] * 6), run=run, config=config, facts=GPU) + [
            report.record(r, sweep.DONE, "", [], "run", axis="seq_len", size=size, how=how | more)]
    peers = made("0_baseline", both([9.0] * 6, [9.0] * 6), run="peers", config=PRESETS["tiny"].replace(seq_len=16),
                 facts=GPU, study="peers")
    known = lines(16, 1.0, "a") + lines(32, 2.0, "a") + lines(16, 5.0, "b", seed=1) + peers
    asked = {("seq_len", str(PRESETS["tiny"].replace(seq_len=16)))}
    ((size, runs),) = sweep.points_of(sweep.of_points(known, asked, how))["seq_len"]
    assert size == 16 and runs["0_baseline"].best_ms("forward") == 1.0
    for line in known:
        line["metric"]["extra_info"].pop("how", None)                       # from before it was recorded
    assert sweep.of_points(known, asked, how) == [] and sweep.done(known, how) == set()


@integration
def test_a_size_at_which_two_axes_cross_is_measured_once_and_shown_on_both(main, tmp_path):
    path = tmp_path / "sweep.jsonl"
    assert main("--axis", "batch_size", "--values", "2", "--rounds", 6, "--json", path)[0] == 0
    shape = records.read(path)[0]["benchmark"]["extra_info"]["config"]["seq_len"]
    before = len(records.read(path))
    status, out, _ = main("--axis", "seq_len", "--values", f"{shape}", "--rounds", 6, "--json", path)
    rows = [line.split() for line in out.splitlines() if line.startswith(f"{shape} ")]
    assert status == 0 and len(rows) == 2 and all(float(cell) > 0 for row in rows for cell in row)
    added = records.read(path)[before:]
    assert {line["metric"]["name"] for line in added} == {sweep.DONE, "wall time"}


@unit
def test_what_makes_sizes_differ(monkeypatch):
    """Each of these alone: another would put two machines, or two versions of the code, into one map."""
    options = command.parse(command.parser("sweep", "doc"), ["--preset", "tiny", "--device", "cpu"])
    some = study.Study("sweep", options)
    first = sweep.way(some)
    for name in ("torch", "cuda", "driver", "transformer_engine", "cpu_threads", "git"):
        monkeypatch.setitem(some.facts, name, "another")
        assert sweep.way(some) != first
        monkeypatch.undo()
    options.config = options.config.replace(amp_dtype=torch.float16)
    assert sweep.way(some) != first


@unit
def test_a_step_that_does_not_fit_where_the_one_before_does_is_not_ahead():
    lines = point(64, {"0_baseline": 4.0, "1_cublas": 2.0}) + point(128, {"0_baseline": 8.0})
    lines += made("1_cublas", {}, status="oom", reason="full", run="128", config=PRESETS["tiny"].replace(seq_len=128),
                  facts=GPU, matmul="float16")
    assert sweep.crossovers(sweep.points_of(lines)["seq_len"], "forward") == {"1_cublas": (None, [])}


@integration
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")], ids=repr)
def test_memory_that_runs_out_in_the_rounds_is_a_point_and_the_next_size_is_measured(main, monkeypatch, error):
    real, begun = timing.calibration, []

    def calibration(device):
        begun.append(device)
        if len(begun) == 1:
            raise error
        return real(device)
    monkeypatch.setattr(timing, "calibration", calibration)
    status, out, _ = main("--axis", "seq_len", "--values", "16,32", "--rounds", 6)
    rows = [line.split() for line in out.splitlines() if line.startswith(("16 ", "32 "))]
    assert status == 0 and [row[1] for row in rows if row[0] == "16"] == ["oom"] * 2
    assert all(float(row[1]) > 0 for row in rows if row[0] == "32")


@unit
@pytest.mark.parametrize("argv, words", [
    (["--values", "1,2"], "by --axis"), (["--axis", "seq_len", "--values", "a"], "'a'"),
    (["--axis", "seq_len", "--values", "0"], "'0'"), (["--axis", "depth"], "invalid choice"),
    (["--axis", "batch_size", "--values", "99999999999"], "batch_size is 99999999999"),
])
def test_mistakes_are_one_line_and_status_two(main, argv, words):
    status, out, err = main(*argv)
    assert (status, out) == (2, "") and words in err and err.startswith("sweep: error: ") and err.count("\n") == 1


@unit
@pytest.mark.parametrize("content", ["not records\n", '{"a": 1}\n'])
def test_a_foreign_file_is_not_added_to(main, tmp_path, content):
    path = tmp_path / "mine"
    path.write_text(content)
    status, _, err = main("--axis", "seq_len", "--values", "16", "--json", path)
    assert status == 2 and "no file of records" in err and path.read_text() == content


@unit
def test_a_size_that_is_unsure_is_named_and_begins_nothing(monkeypatch):
    """Faster by the median from 32 on, where the interval of the ratio holds 1, as it does at the largest."""
    lines = []
    fast, unsure, slow = [2.0] * 9, [2.0] * 5 + [0.5] * 4, [2.0] * 4 + [0.5] * 5    # slow, its interval holds 1 too
    for size, taken in ((16, fast), (24, slow), (32, unsure), (64, fast), (128, unsure), (256, unsure)):
        config = PRESETS["tiny"].replace(seq_len=size)
        for step, samples in (("0_baseline", taken), ("1_cublas", [1.0] * 9)):
            lines += made(step, both(samples, samples), run=f"{size}", config=config, facts=GPU, matmul="float16")
        lines += point(size, {})
    crossed = sweep.crossovers(sweep.points_of(lines)["seq_len"], "forward")
    assert crossed == {"1_cublas": (64, [128, 256])} and "from S = 64 on, unsure at 128, 256" in sweep.text(lines)
    drawn = []
    monkeypatch.setattr(sweep.charts, "lines_chart", lambda *drawing: drawn.append(drawing[-1]))
    sweep.draw(lines, "stem")
    assert drawn == [{"from here on 1 is faster than the one before, unsure at 128, 256": 64}]
    lines = [line for line in lines if line["model"]["name"].split()[1] in ("S128", "S256")]
    crossed = sweep.crossovers(sweep.points_of(lines)["seq_len"], "forward")
    assert crossed == {"1_cublas": (None, [128, 256])} and "nowhere here, unsure at 128, 256" in sweep.text(lines)
    sweep.draw(lines, "stem")
    assert drawn[1:] == [{}]


@unit
def test_memory_has_no_exponent_by_width():
    lines = [line for size in (64, 128, 256) for line in point(size, {"0_baseline": size}, axis="hidden_size")]
    grown = sweep.growth(sweep.points_of(lines)["hidden_size"], "forward", "hidden_size")
    assert grown == {"0_baseline": (pytest.approx(1), None)}


@unit
def test_a_width_that_heads_do_not_fill_is_refused(capsys):
    """GPT-2's heads are 64 wide: another width would be another block."""
    with pytest.raises(SystemExit) as ended:
        sweep.main(["--device", "cpu", "--axis", "hidden_size", "--values", "128,160"])
    assert ended.value.code == 2
    assert "--values 160: heads keep their width, give multiples of 64" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        sweep.main(["--preset", "tiny", "--device", "cpu", "--axis", "hidden_size", "--values", "16"])
    assert ended.value.code == 2 and "hidden_size 16: too narrow" in capsys.readouterr().err


@unit
def test_widths_that_nobody_asked_for_are_those_that_heads_fill():
    """And a width below the heads' is one head."""
    options = command.parse(command.parser("sweep", "doc"), ["--device", "cpu", "--hidden-size", "192", "--num-heads",
                                                             "2", "--quick"])
    options.axes, options.values = ("hidden_size",), None
    with pytest.raises(ValueError, match="heads are 96 wide, give --values"):
        sweep.shapes(options)
    options.axes = ("hidden_size", "batch_size")
    assert [config.batch_size for _, config in sweep.shapes(options)] == [1, 2]
    options.axes, options.values = ("hidden_size",), (64, 96, 192)
    assert [(config.hidden_size, config.num_heads) for _, config in sweep.shapes(options)] == [(64, 1), (96, 1),
                                                                                               (192, 2)]


@unit
def test_a_sweep_of_which_nothing_could_be_measured_has_failed(monkeypatch):
    monkeypatch.setattr(sweep, "measure", lambda study, *_: study.lines.extend(
        made("0_baseline", {}, status="oom", reason="full")))
    assert sweep.main(["--preset", "tiny", "--device", "cpu", "--axis", "seq_len", "--values", "64"]) == 1
