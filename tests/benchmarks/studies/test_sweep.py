"""Crossings, exponents and resumption from made-up records; the command on sizes of a second."""
import collections
import functools
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import studies
from benchmarks.measure import options
from benchmarks.records.read import read, runs
from benchmarks.show import study as frame
from benchmarks.studies import sweep
from common import PRESETS, parameters, steps
from common.block import memory
from common.measure.session import Session
from common.report.record import PARTS, record
from common.report.record_file import RecordFile
from common.report.result import Result
from common.runtime import rounds, timing
from common.runtime.iteration import BOTH, FORWARD, MODES
from tests.helpers.made_records import CPU_CONFIG, FACTS, GPU, both, copied, made
from tests.helpers.said import one_line

unit, integration = pytest.mark.unit, pytest.mark.integration
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = PRESETS["tiny"]
STUDY = studies.load("sweep")
ON_GPU = {"facts": GPU, "matmul": "float16", "study": "sweep"}


def end_of(config, axis: str, size: int, run: str, **extra) -> dict:
    """The record that a size is complete."""
    result = Result("", config, "float32", GPU, study="sweep", run=run, variant={"axis": axis, "size": size})
    return record(result, sweep.DONE, "", [], "run", **extra)


def point(size: int, times: dict[str, float], axis="seq_len", **more) -> list[dict]:
    """The records of one size: step -> ms of both passes."""
    config, lines = TINY.replace(**{axis: size}), []
    for step, ms in times.items():
        samples = [0.99 * ms, ms, 1.01 * ms] * 3
        lines += made(step, both(samples, [ms] * 9), run=f"{size}", config=config, **ON_GPU | more.get(step, {}))
    return [*lines, end_of(config, axis, size, f"{size}", how={})]


def points_of(lines: list[dict], axis="seq_len") -> sweep.Points:
    return sweep.points_of(lines)[axis]


def rows_beginning(out: str, *sizes: int) -> list[list[str]]:
    """The rows of the printed tables that begin with one of these sizes."""
    words = [line.split() for line in out.splitlines()]
    return [row for row in words if row and row[0] in map(str, sizes)]


def parsed(*argv: str):
    """The options of a command line."""
    parser = options.parser(STUDY.name, STUDY.doc)
    STUDY.add_arguments(parser)
    return options.parse(parser, ["--device", "cpu", *argv], STUDY.refine)


# ----------------------------------------------------------------------------------------------------- how it grows


@unit
@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_the_exponent_is_the_power(power):
    assert sweep.exponent([(x, 7 * x**power) for x in (1, 2, 64, 128, 256)]) == pytest.approx(power)
    assert sweep.exponent([(1, 1), (2, 2)]) is None


@unit
def test_only_the_large_end_counts_for_growth():
    assert sweep.exponent([(1, 100), (2, 100), (64, 64**2), (128, 128**2), (256, 256**2)]) == pytest.approx(2)


def static_bytes(config) -> int:
    """Parameters and their gradients, x and dy, all in FP32."""
    weights = sum(math.prod(shape) for shape in parameters.shapes(config).values())
    return 4 * (2 * weights + 2 * config.tokens * config.hidden_size)


@unit
def test_memory_is_what_an_iteration_adds():
    config = TINY.replace(seq_len=128)
    (run,) = runs(made("0_baseline", both([1.0] * 6, [1.0] * 6), config=config, peak=static_bytes(config) + 1000))
    assert sweep.added_memory(run, BOTH) == 1000
    weights = sum(math.prod(shape) for shape in parameters.shapes(config).values())
    assert sweep.added_memory(run, FORWARD) == 1000 + 4 * weights                      # no gradients there


@unit
def test_attention_by_hand_is_quadratic_and_fused_is_linear():
    """UserError from peaks that hold parameters, gradients, x and dy besides."""
    lines = []
    for size in (64, 128, 256):
        static = static_bytes(TINY.replace(seq_len=size))
        lines += point(size, {"0_baseline": size**2, "2_sdpa": size},
                       **{"0_baseline": {"peak": static + 8 * size**2}, "2_sdpa": {"peak": static + 8 * size}})
    grown = sweep.growth(points_of(lines), BOTH, "seq_len")
    assert grown == {"0_baseline": (pytest.approx(2), pytest.approx(2)), "2_sdpa": (pytest.approx(1), pytest.approx(1))}
    assert "S^2.00" in sweep.text(lines)


@unit
def test_memory_has_no_exponent_by_width():
    lines = []
    for size in (64, 128, 256):
        lines += point(size, {"0_baseline": size}, axis="hidden_size")
    grown = sweep.growth(points_of(lines, "hidden_size"), FORWARD, "hidden_size")
    assert grown == {"0_baseline": (pytest.approx(1), None)}


# ------------------------------------------------------------------------------------------------- where steps pay


@unit
def test_a_crossing_is_where_a_step_stays_faster():
    """Step 1 is faster from 128 on: at 32 it is too, but not at 64."""
    lines = []
    for size, before, after in ((32, 2.0, 1.0), (64, 1.0, 1.2), (128, 4.0, 3.0), (256, 16.0, 8.0)):
        lines += point(size, {"0_baseline": before, "1_cublas": after, "2_sdpa": after})
    assert sweep.crossovers(points_of(lines), FORWARD) == {"1_cublas": (128, []), "2_sdpa": (None, [])}
    text = sweep.text(lines)
    assert "from S = 128 on" in text and "nowhere here" in text


@unit
def test_a_step_that_does_not_fit_where_the_one_before_does_is_not_ahead():
    lines = point(64, {"0_baseline": 4.0, "1_cublas": 2.0}) + point(128, {"0_baseline": 8.0})
    lines += made("1_cublas", {}, status="oom", reason="full", run="128", config=TINY.replace(seq_len=128), **ON_GPU)
    assert sweep.crossovers(points_of(lines), FORWARD) == {"1_cublas": (None, [])}


FAST, SLOW = [2.0] * 9, [2.0] * 4 + [0.5] * 5              # SLOW: by its median, its interval of the ratio holds 1
UNSURE = [2.0] * 5 + [0.5] * 4                             # faster by its median, its interval holds 1


def sizes_of(taken: dict[int, list[float]]) -> list[dict]:
    """Step 0 takes these samples at each size, step 1 always 1 ms."""
    lines = []
    for size, samples in taken.items():
        config = TINY.replace(seq_len=size)
        for step, its_samples in (("0_baseline", samples), ("1_cublas", [1.0] * 9)):
            lines += made(step, both(its_samples, its_samples), run=f"{size}", config=config, **ON_GPU)
        lines += point(size, {})
    return lines


@pytest.fixture
def marks(monkeypatch) -> list[dict]:
    """What the charts mark, in place of the charts."""
    marked = []
    monkeypatch.setattr(sweep, "lines_chart", lambda *drawing: marked.append(drawing[-1]))
    return marked


@unit
def test_a_size_that_is_unsure_is_named_and_begins_nothing(marks):
    """Faster by the median from 32 on, where the interval of the ratio holds 1, as it does at the largest."""
    lines = sizes_of({16: FAST, 24: SLOW, 32: UNSURE, 64: FAST, 128: UNSURE, 256: UNSURE})
    assert sweep.crossovers(points_of(lines), FORWARD) == {"1_cublas": (64, [128, 256])}
    assert "from S = 64 on, unsure at 128, 256" in sweep.text(lines)
    sweep.charts(lines)["seq_len"]()
    assert marks == [{"from here on 1 is faster than the one before, unsure at 128, 256": 64}]


@unit
def test_where_all_sizes_are_unsure_each_is_named_and_none_marked(marks):
    lines = sizes_of({128: UNSURE, 256: UNSURE})
    assert sweep.crossovers(points_of(lines), FORWARD) == {"1_cublas": (None, [128, 256])}
    assert "nowhere here, unsure at 128, 256" in sweep.text(lines)
    sweep.charts(lines)["seq_len"]()
    assert marks == [{}]


@unit
def test_where_launches_bound_a_step():
    """By graph replay all but the largest are much faster; there the kernels fill half of the smallest size alone."""
    lines = []
    for size, ms, replay_ms in ((32, 1.0, 0.6), (64, 1.02, 0.61), (128, 4.0, 3.9)):
        busy = dict.fromkeys(PARTS, 0.0) | {"GEMM": 0.3 if size == 32 else 0.9 * ms, "idle": 0.1 * ms}
        lines += point(size, {"0_baseline": ms}, **{"0_baseline": {"parts": {FORWARD: busy}}})
        lines += made("0_baseline", {(FORWARD, "graph"): [replay_ms] * 9}, run=f"{size}",
                      config=TINY.replace(seq_len=size), **ON_GPU)
    assert sweep.launch_bound(points_of(lines), FORWARD) == {"0_baseline": ("up to 64", "up to 32")}
    unknown = sweep.launch_bound(points_of(point(32, {"0_baseline": 1.0})), FORWARD)
    assert unknown == {"0_baseline": ("n/a", "n/a")}


@unit
def test_the_answer_is_where_the_last_step_pays_by_sequence():
    lines = point(64, {"0_baseline": 1.0}, axis="hidden_size")
    for size, before, after in ((32, 1.0, 2.0), (64, 4.0, 3.0), (128, 8.0, 4.0)):
        lines += point(size, {"0_baseline": 9.0, "1_cublas": before, "2_sdpa": after})
    assert STUDY.answer(lines) == "2_sdpa pays from S = 64 on (B2 S* E64 H4 D16 F256)"
    nowhere = point(32, {"0_baseline": 1.0, "1_cublas": 2.0})
    assert STUDY.answer(nowhere) == "1_cublas pays nowhere here (B2 S32 E64 H4 D16 F256)"


@unit
def test_the_answer_is_of_forward_and_backward():
    """The forward alone pays at every size."""
    lines = []
    for size, backward_too in ((32, 4.0), (64, 2.0)):
        config = TINY.replace(seq_len=size)
        for step, forward, whole in (("0_baseline", 1.0, 3.0), ("1_cublas", 0.5, backward_too)):
            lines += made(step, both([forward] * 9, [whole] * 9), run=f"{size}", config=config, **ON_GPU)
        lines.append(end_of(config, "seq_len", size, f"{size}", how={}))
    assert sweep.crossovers(points_of(lines), FORWARD) == {"1_cublas": (32, [])}
    assert STUDY.answer(lines) == "1_cublas pays from S = 64 on (B2 S* E64 H4 D16 F256)"


# ----------------------------------------------------------------------------------------------------------- tables


@unit
def test_out_of_memory_is_a_point():
    config = TINY.replace(seq_len=64)
    lines = point(32, {"0_baseline": 1.0})
    lines += made("0_baseline", {}, status="oom", reason="full", run="64", config=config, **ON_GPU)
    lines.append(end_of(config, "seq_len", 64, "64"))
    assert rows_beginning(sweep.text(lines), 64) == [["64", "oom"]] * 2


@unit
def test_a_pass_that_was_not_timed_says_so():
    lines = [line for line in point(32, {"0_baseline": 1.0}) if line["benchmark"]["mode"] != BOTH]
    forward, backward = rows_beginning(sweep.text(lines), 32)
    assert forward[0] == "32" and float(forward[1]) == 1 and backward == ["32", "not", "timed"]


@unit
def test_a_step_that_a_size_has_not_is_not_available():
    lines = point(32, {"0_baseline": 1.0, "1_cublas": 1.0}) + point(64, {"0_baseline": 1.0})
    assert rows_beginning(sweep.text(lines), 64)[0] == ["64", "1.00", "n/a"]


@unit
@pytest.mark.parametrize("axis, shape", [("seq_len", "B2 S* E64 H4 D16 F256"), ("hidden_size", "B2 S64 E* H* D16 F*")])
def test_a_heading_has_a_star_for_each_size_that_differs(axis, shape):
    lines = []
    for size in (32, 64):
        more = {"num_heads": size // 16, "ffn_hidden_size": None} if axis == "hidden_size" else {}
        config = TINY.replace(**{axis: size}, **more)
        lines += made("0_baseline", both([1.0] * 9, [1.0] * 9), run=f"{size}", config=config, facts=GPU)
        lines.append(end_of(config, axis, size, f"{size}"))
    assert f"ms of forward by {axis} ({shape})" in sweep.text(lines)


@unit
def test_steps_stand_in_the_order_of_the_ladder():
    lines = point(32, {"2_sdpa": 1.0}) + point(64, {"4_transformer_engine": 1.0, "0_baseline": 1.0, "2_sdpa": 1.0})
    assert sweep.names_of(points_of(lines)) == ["0_baseline", "2_sdpa", "4_transformer_engine"]


@unit
def test_a_chart_an_axis_has_a_line_a_step(monkeypatch):
    drawn = []
    monkeypatch.setattr(sweep, "lines_chart", lambda *drawing: drawn.append(drawing))
    lines = point(64, {"0_baseline": 3.0}, axis="batch_size")
    for size in (32, 64):
        lines += point(size, {"0_baseline": 2.0, "1_cublas": 4.0})
    charts = sweep.charts(lines)
    assert list(charts) == ["batch_size", "seq_len"] and not drawn
    charts["seq_len"]()
    ((series, x, y, title, marked),) = drawn
    assert series == {"0_baseline": [(32, 2.0), (64, 2.0)], "1_cublas": [(32, 4.0), (64, 4.0)]} and marked == {}
    assert (x, y, title) == ("seq_len (S)", "ms, forward+backward", "a GPU, B2 S* E64 H4 D16 F256")


# ------------------------------------------------------------------------------------------------------- its sizes


@unit
def test_heads_keep_their_width_when_the_block_gets_wider():
    chosen = SimpleNamespace(config=PRESETS["gpt2"], axes=("hidden_size",), values=(64, 256, 1536))
    assert [(config.num_heads, config.ffn_hidden_size) for _, config in sweep.shapes(chosen)] == [
        (1, 256), (4, 1024), (24, 6144)]


@unit
@pytest.mark.parametrize("argv, said", [
    (["--axis", "hidden_size", "--values", "128,160"], "--values 160: heads keep their width, give multiples of 64"),
    (["--preset", "tiny", "--axis", "hidden_size", "--values", "16"], "hidden_size 16: too narrow"),
], ids=["no multiple", "too narrow"])
def test_a_width_that_heads_do_not_fill_is_refused(argv, said, capsys):
    """GPT-2's heads are 64 wide: another width would be another block."""
    with pytest.raises(SystemExit) as ended:
        frame.main(STUDY, ["--device", "cpu", *argv])
    assert ended.value.code == 2
    assert said in one_line(capsys.readouterr().err)


@unit
def test_widths_that_nobody_asked_for_are_those_that_heads_fill():
    """And a width below the heads' is one head."""
    chosen = parsed("--hidden-size", "192", "--num-heads", "2", "--quick", "--axis", "batch_size")
    chosen.axes = ("hidden_size",)
    with pytest.raises(ValueError, match="heads are 96 wide, give --values"):
        sweep.shapes(chosen)
    chosen.axes = ("hidden_size", "batch_size")
    assert [config.batch_size for _, config in sweep.shapes(chosen)] == [1, 2]
    chosen.axes, chosen.values = ("hidden_size",), (64, 96, 192)
    widths = [(config.hidden_size, config.num_heads) for _, config in sweep.shapes(chosen)]
    assert widths == [(64, 1), (96, 1), (192, 2)]


@unit
def test_without_a_shape_it_is_one_at_which_launches_matter():
    assert parsed().config.replace(amp_dtype=None) == PRESETS["cpu"].replace(amp_dtype=None)
    quick = parsed("--quick").config
    assert (quick.batch_size, quick.seq_len, quick.hidden_size, quick.num_heads) == (1, 128, 256, 4)
    assert parsed("--preset", "tiny").config.hidden_size == TINY.hidden_size
    assert parsed("--seq-len", "48").config.seq_len == 48


@unit
def test_every_size_has_all_steps_and_may_not_fit():
    """On a GPU a round of each is profiled: it tells what launches bound."""
    group, *others = sweep.groups(parsed("--preset", "tiny", "--axis", "seq_len", "--values", "16,32"))
    assert [case.name for case in group.cases] == [step.name for step in steps.ALL] and len(others) == 1
    assert group.may_not_fit and group.profiled == 0
    chosen = parsed("--preset", "tiny", "--axis", "seq_len", "--values", "16")
    chosen.device = CUDA
    assert [one.profiled for one in sweep.groups(chosen)] == [1]


@unit
def test_a_shape_that_two_axes_share_is_one_group():
    chosen = parsed("--preset", "tiny", "--quick")
    shapes = [str(config) for _, config in sweep.shapes(chosen)]
    groups = [str(group.cases[0].config) for group in sweep.groups(chosen)]
    assert len(shapes) > len(groups) == len(set(shapes)) and set(groups) == set(shapes)


# ---------------------------------------------------------------------------------------------- going on with a file


@unit
def test_only_what_was_asked_for_and_measured_this_way_is_shown():
    """A file can hold other studies, other batches, and the same shape measured in another way since."""
    how = {"rounds": 6}

    def of_size(size, ms, run, **more):
        config = TINY.replace(seq_len=size)
        lines = made("0_baseline", both([ms] * 6, [ms] * 6), run=run, config=config, facts=GPU, study="sweep")
        return [*lines, end_of(config, "seq_len", size, run, how=how | more)]
    peers = made("0_baseline", both([9.0] * 6, [9.0] * 6), run="peers", config=TINY.replace(seq_len=16), facts=GPU,
                 study="peers")
    known = of_size(16, 1.0, "a") + of_size(32, 2.0, "a") + of_size(16, 5.0, "b", seed=1) + peers
    asked = {("seq_len", str(TINY.replace(seq_len=16)))}
    ((size, by_step),) = points_of(sweep.of_points(known, asked, how))
    assert size == 16 and by_step["0_baseline"].best_ms(FORWARD) == 1.0
    older = copied(known)
    for line in older:
        line["metric"]["extra_info"].pop("how", None)                       # from before it was recorded
    assert sweep.of_points(older, asked, how) == [] and sweep.done(older, how) == set()


@unit
def test_what_makes_sizes_differ(monkeypatch):
    """Each of these alone: another would put two machines, or two versions of the code, into one map."""
    chosen = parsed("--preset", "tiny")
    session = Session("sweep", CPU, chosen.rounds)
    first = sweep.way(session, chosen)
    for name in ("torch", "cuda", "driver", "transformer_engine", "cpu_threads", "git"):
        monkeypatch.setitem(session.facts, name, "another")
        assert sweep.way(session, chosen) != first
        monkeypatch.undo()
    for name, value in (("rounds", 99), ("seed", 1), ("config", chosen.config.replace(amp_dtype=torch.float16))):
        changed = SimpleNamespace(**vars(chosen) | {name: value})
        assert sweep.way(session, changed) != first
    assert sweep.way(session, chosen) == first


@unit
def test_what_a_file_holds_of_another_machine_counts_for_nothing(tmp_path):
    path = tmp_path / "out"
    file = RecordFile(str(path))
    file.write(point(32, {"0_baseline": 1.0}))
    assert len(sweep.recorded(str(path), "a GPU")) == len(read(path))
    assert sweep.recorded(str(path), FACTS["name"]) == sweep.recorded(None, "a GPU") == []
    assert sweep.recorded(str(tmp_path / "not there"), "a GPU") == []


@unit
@pytest.mark.parametrize("content, said", [
    ("not records\n", "--json {}: it is no file of records"), ('{"a": 1}\n', "--json {}: it is no file of records"),
    ('{"benchmark": 7}\n', "{}, line 1: is no record of this suite"),
])
def test_a_foreign_file_is_not_added_to(main, tmp_path, content, said):
    path = tmp_path / "mine"
    path.write_text(content)
    status, _, err = main("--axis", "seq_len", "--values", "16", "--json", path)
    assert status == 2 and said.format(path) in one_line(err) and path.read_text() == content


@unit
def test_a_file_of_half_a_record_is_begun_anew(tmp_path):
    """A full disk left it."""
    path = tmp_path / "half"
    path.write_text('{"benchmark": {"na')
    assert parsed("--preset", "tiny", "--json", str(path)).file.count == 0
    assert path.read_text() == ""


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def main(monkeypatch, study_main):
    """The sweep in this process, of steps 0 and 2 alone: main(*argv) -> (status, out, err)."""
    monkeypatch.setattr(sweep.steps, "ALL", (steps.load(0), steps.load(2)))
    return functools.partial(study_main, "sweep")


@pytest.fixture
def measured(monkeypatch) -> collections.Counter:
    """How often each sequence length was measured."""
    count = collections.Counter()
    group_of = sweep._group

    def counted(config, chosen):
        count[config.seq_len] += 1
        return group_of(config, chosen)
    monkeypatch.setattr(sweep, "_group", counted)
    return count


@integration
def test_an_interrupted_sweep_goes_on_where_it_stopped(main, measured, ctrl_c, tmp_path):
    path = tmp_path / "sweep.jsonl"
    argv = ("--axis", "seq_len", "--values", "16,32,64", "--rounds", 6, "--json", path)
    ctrl_c(rounds, "interleaved", 14)              # a size is two rounds of warm-up and the samples, of both passes
    status, out, err = main(*argv)
    assert (status, out) == (130, "") and "finished records kept" in err and measured == {16: 1, 32: 1, 64: 1}
    status, out, err = main(*argv)
    assert status == 0 and "2 of 3 sizes are already in" in err and measured == {16: 1, 32: 1, 64: 2}
    points = points_of(read(path))
    assert [size for size, _ in points] == [16, 32, 64]
    for _, by_step in points:
        assert len(by_step) == 2 and all(run.samples(BOTH, "eager") for run in by_step.values())
    status, again, _ = main(*argv, "--chart", tmp_path / "chart")
    assert status == 0 and again == out and measured[64] == 2                   # nothing is measured a second time
    assert (tmp_path / "chart-seq_len.svg").exists()


@integration
def test_sizes_measured_in_another_way_are_measured_again(main, tmp_path):
    path = tmp_path / "sweep.jsonl"
    argv = ("--axis", "seq_len", "--values", "16", "--json", path)
    assert main(*argv, "--rounds", 6)[0] == 0
    status, _, err = main(*argv, "--rounds", 7)
    assert status == 0 and "0 of 1 sizes are already in" in err
    ((_, by_step),) = points_of(read(path))
    assert {len(run.samples(FORWARD, "eager")) for run in by_step.values()} == {7}


@integration
def test_a_size_at_which_two_axes_cross_is_measured_once(main, measured, tmp_path):
    """And shown on both."""
    path = tmp_path / "sweep.jsonl"
    assert main("--axis", "batch_size", "--values", TINY.batch_size, "--rounds", 6, "--json", path)[0] == 0
    before = len(read(path))
    status, out, _ = main("--axis", "seq_len", "--values", TINY.seq_len, "--rounds", 6, "--json", path)
    table = rows_beginning(out, TINY.seq_len)
    assert status == 0 and len(table) == 2 and all(float(cell) > 0 for row in table for cell in row)
    added = read(path)[before:]
    assert {line["metric"]["name"] for line in added} == {sweep.DONE, "wall time"}
    assert measured == {TINY.seq_len: 1}


@integration
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")], ids=repr)
def test_memory_that_runs_out_in_the_rounds_is_a_point(main, monkeypatch, error):
    """And the next size is measured."""
    calibration, begun = timing.calibration, []

    def runs_out(device):
        begun.append(device)
        if len(begun) == 1:
            raise error
        return calibration(device)
    monkeypatch.setattr(timing, "calibration", runs_out)
    status, out, _ = main("--axis", "seq_len", "--values", "16,32", "--rounds", 6)
    assert status == 0 and [row[1] for row in rows_beginning(out, 16)] == ["oom"] * 2
    assert all(float(row[1]) > 0 for row in rows_beginning(out, 32))


@unit
def test_a_sweep_of_which_nothing_could_be_measured_has_failed(main, monkeypatch):
    def full(session, group, keep=False):
        session.lines += made("0_baseline", {}, status="oom", reason="full", study="sweep", run=session.run)
    monkeypatch.setattr(Session, "measure", full)
    status, out, _ = main("--axis", "seq_len", "--values", "64")
    assert status == 1 and "0_baseline: oom: full" in out


@integration
def test_a_size_that_does_not_fit_is_no_failure(main, monkeypatch):
    """It is a point."""
    needed = memory.needed
    monkeypatch.setattr("common.measure.cases.memory.needed",
                        lambda config, *rest: 2**60 if config.seq_len == 32 else needed(config, *rest))
    status, out, _ = main("--axis", "seq_len", "--values", "16,32", "--rounds", 6)
    assert status == 0 and rows_beginning(out, 32) == [["32", "oom", "oom"]] * 2
    assert all(float(row[1]) > 0 for row in rows_beginning(out, 16))


@unit
@pytest.mark.parametrize("argv, words", [
    (["--values", "1,2"], "by --axis"), (["--axis", "seq_len", "--values", "a"], "'a'"),
    (["--axis", "seq_len", "--values", "0"], "'0'"), (["--axis", "depth"], "invalid choice"),
    (["--axis", "batch_size", "--values", "99999999999"], "batch_size is 99999999999"),
])
def test_mistakes_are_one_line_and_status_two(main, argv, words):
    status, out, err = main(*argv)
    assert (status, out) == (2, "") and words in one_line(err) and err.startswith("sweep: error: ")


@pytest.mark.unit
def test_idle_time_in_a_replay_is_no_work():
    """Counted as busy, a replay that waits for most of its time would read as bound by its kernels."""
    parts = dict.fromkeys(PARTS, 0.0) | {"GEMM": 0.3, "idle": 0.7}
    lines = []
    for size in (32, 64):
        ms = both([2.0] * 6, [2.0] * 6) | both([1.0] * 6, [1.0] * 6, "graph")
        config = CPU_CONFIG.replace(seq_len=size)
        lines += made("0_baseline", ms, config=config, study="sweep", parts=dict.fromkeys(MODES, parts), of="graph",
                      run=f"run {size}")
    points = []
    for size, run in zip((32, 64), runs(lines), strict=True):
        points.append((size, {"0_baseline": run}))
    _, by_graph = sweep.launch_bound(points, FORWARD)["0_baseline"]
    assert by_graph == "up to 64"
