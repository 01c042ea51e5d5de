"""The study of fused operations: its cases and groups, what it times, its tables, its chart, its command."""
import contextlib
import functools
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import studies
from benchmarks.kernels import operations
from benchmarks.measure import options
from benchmarks.records.provenance import commits
from benchmarks.records.read import latest, read, runner, runs
from benchmarks.show import page_parts
from benchmarks.show import study as frame
from benchmarks.studies import fusions
from benchmarks.studies.fusions import subjects, tables
from benchmarks.studies.fusions.subjects import COPY, CopySubject, OperationSubject
from common import BlockConfig
from common.measure.cases import Setting
from common.report.record import record
from common.report.result import Result, Row
from common.runtime import limit, timing
from common.runtime.iteration import BACKWARD, FORWARD, LAUNCHES
from common.runtime.limit import Peaks
from common.runtime.peaks import BURST
from common.runtime.timing import Timing
from tests.helpers.made_records import FACTS, GPU
from tests.helpers.said import one_line

unit, integration = pytest.mark.unit, pytest.mark.integration
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STUDY = studies.load("fusions")
CONFIG = BlockConfig(2, 20, 48, 3, amp_dtype=None)
SIZES = {"hidden": (3, 40), "ffn": (3, 40), "scores": (2, 30, 30), "heads": (2, 3, 20, 16)}


@pytest.fixture
def no_inductor(monkeypatch, fresh_dynamo):
    """Compiled by Dynamo and AOTAutograd, to no C++: seconds instead of minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def parsed(*argv: str):
    """The options of a command line."""
    parser = options.parser(STUDY.name, STUDY.doc)
    STUDY.add_arguments(parser)
    return options.parse(parser, ["--preset", "tiny", "--device", "cpu", *argv], STUDY.refine)


def given_to(name: str) -> list[torch.Tensor]:
    experiment = operations.EXPERIMENTS[name]
    return operations.tensors(experiment, SIZES[experiment.shape], torch.float32, CPU, 0)


def subject_of(name: str, call=None, kind=OperationSubject, has_backward=True) -> OperationSubject:
    experiment = operations.EXPERIMENTS[name]
    return kind(call or experiment.plain, experiment, given_to(name), 0, has_backward)


def made(name: str, level: str, size: list[int] | None, ms: dict, *, facts=GPU, run="one", status="ok", reason="",
         percent=None, unit_="GB/s", copies=1, settled=True) -> list[dict]:
    """The records of one level at one size. `ms`: (pass, launch) -> samples; all of its rows reach `percent`."""
    dtype = "bfloat16" if facts is GPU else "float32"
    r = Result(name, CONFIG, dtype, facts, study="fusions", run=run, variant={"size": size, "level": level},
               matmul=dtype, status=status, reason=reason)
    r.errors = {"output 0": (1e-7, None), "gradient 0": (2e-7, None)} if size else {}
    lines = [record(r, f"{what} error", "relative L2", [error], "check") for what, (error, _) in r.errors.items()]
    for (mode, launch), samples in ms.items():
        timed = Timing(samples, settled, "fake")
        extra = {"median": timed.median, "settled": settled, "clock": "fake"}
        lines.append(record(r, "latency", "ms", samples, mode, launch, **extra))
        lines.append(record(r, "work rate", unit_, [1 / timed.median], mode, launch, bytes=1.0, flops=0.0,
                            copies=copies))
        if percent:
            lines.append(record(r, "percent of limit", "%", [percent[mode]], mode, launch))
        if launch == "eager":
            lines.append(record(r, "launches", "kernels", [3.0 * copies], mode))
    return lines or [record(r, "status", "", [], "check")]


def both(forward: float, backward: float | None = None, launch="eager") -> dict:
    """Samples of the two passes."""
    ms = {(FORWARD, launch): [forward] * 6}
    return ms if backward is None else ms | {(BACKWARD, launch): [backward] * 6}


def table_of(lines: list[dict], name: str, mode: str = FORWARD) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) of the printed table of an operation and a pass, cells that hold one word each."""
    told = STUDY.report(lines).split(f"\n{name}, {mode}")[1].split("\n\n")[1]
    header, _, *rows = told.splitlines()
    return header.split("  "), [row.split() for row in rows]


# --------------------------------------------------------------------------------------------------- cases and groups


@unit
@pytest.mark.parametrize("name", operations.EXPERIMENTS)
def test_an_operation_has_a_group_a_size_with_a_case_a_level(name):
    chosen = parsed("--experiment", name, "--rows", "64,128")
    first, *others = STUDY.groups(chosen)
    experiment = operations.EXPERIMENTS[name]
    for group, size in zip((first, *others), fusions.sizes(name, chosen), strict=True):
        there = [case for case in group.cases if not case.missing]
        expected = ["eager", operations.TORCHSCRIPT, "torch.compile"]
        if experiment.shape != "heads":
            expected.append(COPY)
        assert [case.variant for case in there] == [{"size": list(size), "level": level} for level in expected]
        assert {case.name for case in group.cases} == {name} and group.modes == (FORWARD, BACKWARD)
        assert all(case.step is None and case.parameter_dtype == torch.float32 for case in group.cases)
        assert not group.calibrated and not group.watched


@unit
def test_what_is_missing_is_a_case_of_the_first_size_alone():
    first, second = STUDY.groups(parsed("--experiment", "RMSNorm", "--rows", "4,8"))
    missing = {case.variant["level"]: case.missing for case in first.cases if case.missing}
    assert missing == dict.fromkeys(operations.EXPERIMENTS["RMSNorm"].by_hand, "timed on a GPU alone")
    assert all(case.variant["size"] is None for case in first.cases if case.missing)
    assert not any(case.missing for case in second.cases)


@unit
def test_without_a_choice_all_operations_are_measured_up_to_all_tokens():
    chosen = parsed()
    tokens = chosen.config.tokens
    assert chosen.rows_of_x == [tokens // 16, tokens] and chosen.config.amp_dtype is None
    assert fusions.sizes("SwiGLU", chosen) == [(rows, chosen.config.ffn_hidden_size) for rows in chosen.rows_of_x]
    chosen.device = CUDA
    STUDY.refine(chosen)
    assert chosen.rows_of_x == [max(1, tokens // part) for part in (256, 64, 16, 4, 1)]
    assert chosen.config.amp_dtype == torch.bfloat16


@unit
def test_sizes_that_come_out_the_same_are_one():
    chosen = parsed("--rows", "1,2,128")
    assert len(fusions.sizes("attention", chosen)) == 2 and len(fusions.sizes("SiLU", chosen)) == 3


@unit
def test_a_case_is_checked_and_says_what_it_is_off_by():
    chosen = parsed("--experiment", "SwiGLU", "--rows", "4")
    setting = Setting(CPU, 0, lambda *what: None, time_compiler=False)

    def prepared(call):
        result = Result("SwiGLU", chosen.config, "float32", FACTS)
        case = fusions.case("SwiGLU", "mine", call, (4, 256), chosen)
        return case.prepare(setting, result), result
    subject, result = prepared(operations.swiglu)
    assert result.errors.keys() == {"output 0", "gradient 0", "gradient 1"} and subject.has(BACKWARD)
    assert subject.has(FORWARD) and subject.x.shape == (4, 256)
    subject, result = prepared(lambda a, b: operations.swiglu(a.detach(), b.detach()))
    assert list(result.errors) == ["output 0"] and not subject.has(BACKWARD)


@unit
def test_the_copy_needs_no_check():
    chosen = parsed("--experiment", "SwiGLU", "--rows", "4")
    case = fusions.case("SwiGLU", COPY, subjects.copying(), (4, 256), chosen)
    result = Result("SwiGLU", chosen.config, "float32", FACTS)
    subject = case.prepare(Setting(CPU, 0, lambda *what: None, time_compiler=False), result)
    assert isinstance(subject, CopySubject) and result.errors == {} and not subject.x.requires_grad


# ------------------------------------------------------------------------------------------------------ what is timed


@unit
@pytest.mark.parametrize("mode", tables.PASSES)
def test_an_iteration_runs_once_on_each_copy_and_can_be_repeated(mode, monkeypatch):
    monkeypatch.setattr(OperationSubject, "calls", lambda self, mode: 3)
    subject = subject_of("SwiGLU")
    work = subject.iteration(mode)
    found, again = work.run(), work.run()
    a, b = subject.inputs
    if mode == FORWARD:
        assert len(found) == 3 and all(torch.equal(y, operations.swiglu(a, b)) for y in found)
    else:
        (dy, *_) = work.reads
        assert len(found) == 6
        for value, right in zip(found, torch.autograd.grad(operations.swiglu(a, b), (a, b), dy), strict=False):
            assert torch.equal(value, right)
    for value, repeated in zip(found, again, strict=True):
        assert torch.equal(value, repeated)
    for tensor in work.reads:
        with torch.no_grad():
            subject.proof().change(tensor)
    changed = work.run()
    assert not torch.equal(changed[0], found[0]) and torch.equal(changed[-1], found[-1])      # of the first copy alone
    assert all(t.grad is None for t in subject.inputs)


@unit
def test_copies_go_beyond_four_times_the_cache_and_are_no_more_than_64():
    subject = subject_of("SiLU")
    moved = 2 * subject.x.nbytes
    assert subject.calls(FORWARD) == 1 and not subject.is_beyond_the_cache(FORWARD)      # of a CPU's nothing is known
    on_gpu = SimpleNamespace(x=SimpleNamespace(is_cuda=True), least_bytes=lambda mode: moved)
    for caches, calls, beyond in ((1, 4, True), (16, 64, True), (17, 64, False), (1 / 9, 1, True)):
        cache = caches * moved
        on_gpu.cache = cache
        on_gpu.calls = functools.partial(OperationSubject.calls, on_gpu)
        assert on_gpu.calls(FORWARD) == calls
        assert OperationSubject.is_beyond_the_cache(on_gpu, FORWARD) == beyond


@unit
def test_a_copy_moves_as_many_bytes_as_the_operation():
    """Of a backward's bytes it is a forward, too."""
    subject = subject_of("SwiGLU", subjects.copying(), CopySubject)
    for mode, moved in ((FORWARD, 3), (BACKWARD, 5)):
        work = subject.iteration(mode)
        (copied,) = work.run()
        (source,) = work.reads
        assert source.nbytes + copied.nbytes == moved * subject.x.nbytes
        assert torch.equal(copied, source) and copied.data_ptr() != source.data_ptr()


@unit
def test_a_copy_is_written_where_the_last_one_was():
    """And not before it is asked for. Memory of its own for each source. What is not copied is told by it: the proof
    of a replay relies on that.
    """
    copying, sources = subjects.copying(), [torch.randn(40) for _ in range(3)]
    first = [copying(source) for source in sources]
    assert all(torch.equal(copy, source) for copy, source in zip(first, sources, strict=True))
    assert len({t.data_ptr() for t in (*first, *sources)}) == 6
    for source in sources:
        source.mul_(-0.5)
    assert not any(torch.equal(copy, source) for copy, source in zip(first, sources, strict=True))
    again = [copying(source) for source in sources]
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in first]
    assert all(torch.equal(copy, source) for copy, source in zip(again, sources, strict=True))


class FakeStream:
    """A stream that knows what it has waited for."""

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other) -> None:
        self.waited_for.append(other)


@unit
@pytest.mark.parametrize("kind", [OperationSubject, CopySubject])
def test_a_replay_is_made_on_the_stream_that_it_is_captured_on(kind, monkeypatch):
    """Autograd runs a backward where its forward ran: on another stream the capture would miss it. What made the
    inputs is waited for.
    """
    current, calls = ["the default"], []

    @contextlib.contextmanager
    def on_stream(aside):
        current.append(aside)
        yield
        current.pop()

    def call(x, *_):
        calls.append(current[-1])
        return x * 2

    def verified(iterate, proof, stream, captured):
        calls.append(stream)
        captured()
        return iterate.run, current[-1]
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(subjects.replay, "verified", verified)
    subject = subject_of("SiLU", call, kind)
    iterate = subject.iteration

    def iteration(mode):
        calls.append(current[-1])
        return iterate(mode)
    monkeypatch.setattr(subject, "iteration", iteration)
    _, left_on = subject.replay(BACKWARD, lambda: calls.append("captured"))
    (aside,) = {place for place in calls if place != "captured"}
    assert isinstance(aside, FakeStream) and aside.waited_for == ["the default"]
    assert calls[0] is aside and calls[-2:] == [aside, "captured"] and left_on == "the default"


@unit
def test_what_memory_limits_is_timed_in_shorter_stretches():
    attention, other = (subjects.clock_for(operations.EXPERIMENTS[name], CUDA) for name in ("attention", "SiLU"))
    usual = timing.clock_for(CUDA)
    assert (attention.settle_ms, attention.burst_ms) == (usual.settle_ms, usual.burst_ms)
    assert 0 < other.settle_ms < usual.settle_ms and 0 < other.burst_ms < usual.burst_ms
    assert f"{other.burst_ms:g} ms behind {other.settle_ms:g} ms" in other.in_rounds


# --------------------------------------------------------------------------------------------- held against the copy


def finished(levels: dict[str, dict], mode=FORWARD, name="SiLU", beyond=True, monkeypatch=None):
    """(level, launch) -> its row, and the records: of levels with ms by launch, as all are finished together."""
    timed, rows = [], {}
    for level, ms in levels.items():
        kind = CopySubject if level == COPY else OperationSubject
        subject = subject_of(name, kind=kind)
        monkeypatch.setattr(subject, "is_beyond_the_cache", lambda mode: beyond, raising=False)
        result = Result(name, CONFIG, "float32", FACTS, variant={"size": [3, 40], "level": level})
        for launch, taken in ms.items():
            rows[level, launch] = result.rows[mode, launch] = Row(Timing([taken] * 6, True, "fake") if taken else None)
        timed.append((result, subject))
    return rows, subjects.finish(timed, mode)


@unit
def test_a_level_is_held_against_the_faster_copy(monkeypatch):
    rows, _ = finished({"eager": {"eager": 4.0, "graph": 2.0}, "mine": {"eager": 1.0, "graph": None},
                        COPY: {"eager": 1.5, "graph": 1.0}}, monkeypatch=monkeypatch)
    percents = {key: row.percent_of(BURST) for key, row in rows.items()}
    assert percents == {("eager", "eager"): 25.0, ("eager", "graph"): 50.0, ("mine", "eager"): 100.0,
                        ("mine", "graph"): None, (COPY, "eager"): None, (COPY, "graph"): None}


@unit
def test_within_a_cache_and_without_a_copy_there_is_no_percentage(monkeypatch):
    rows, _ = finished({"eager": {"eager": 4.0}, COPY: {"eager": 1.0}}, beyond=False, monkeypatch=monkeypatch)
    assert rows["eager", "eager"].percent_of(BURST) is None
    rows, _ = finished({"eager": {"eager": 4.0}}, monkeypatch=monkeypatch)
    assert rows["eager", "eager"].percent_of(BURST) is None


@unit
@pytest.mark.parametrize("name, expected", [("SiLU", "GB/s"), ("attention", "TFLOP/s")])
def test_a_rate_is_of_bytes_and_attentions_of_flops(name, expected, monkeypatch):
    _, (line,) = finished({"eager": {"eager": 2.0}}, BACKWARD, name, monkeypatch=monkeypatch)
    metric, case = line["metric"], line["benchmark"]["extra_info"]["case"]
    x, experiment = given_to(name)[0], operations.EXPERIMENTS[name]
    moved, flops = (what(experiment, BACKWARD, x) for what in (operations.least_bytes, operations.least_flops))
    rate = flops / 2e-3 / 1e12 if flops else moved / 2e-3 / 1e9
    assert metric["benchmark_values"] == [pytest.approx(rate)]
    assert metric["extra_info"] == {"unit": expected, "bytes": moved, "flops": flops, "copies": 1}
    assert (metric["name"], case["pass"], case["launch"]) == ("work rate", BACKWARD, "eager")


@unit
def test_attention_is_held_against_the_matmul_rate_of_a_gpu():
    experiment, q = operations.EXPERIMENTS["attention"], given_to("attention")[0]
    flops = operations.least_flops(experiment, FORWARD, q)
    assert subjects.workload_of(experiment, q) is None                   # of a CPU nothing is known
    work = subjects.workload_of(experiment, SimpleNamespace(is_cuda=True, shape=q.shape, dtype=torch.float16))
    times = limit.ms_by_kind(work.operations(FORWARD), Peaks({"float16": 1e9}, 1.0))
    assert times == {"matmul": 0.0, "attention": pytest.approx(1e3 * flops / 1e9), "memory": 0.0}
    norm = SimpleNamespace(is_cuda=True, shape=(3, 40), dtype=torch.float16)
    assert subjects.workload_of(operations.EXPERIMENTS["RMSNorm"], norm) is None


# -------------------------------------------------------------------------------------------------------------- tables


@unit
def test_a_row_tells_size_level_error_times_rate_percent_and_kernels():
    ms = both(0.5, 1.0) | both(0.25, 2.0, launch="graph")
    lines = made("SiLU", "eager", [4, 256], ms, percent={FORWARD: 50.4, BACKWARD: 99.6}, copies=2)
    headers, (row,) = table_of(lines, "SiLU")
    assert " ".join(" ".join(headers).split()) == (
        "size level error us, eager us, graph GB/s % same kernels")
    assert row == ["4", "x", "256", "eager", "1.0e-07", "500", "250", "4.00", "50", "3"]
    _, (row,) = table_of(lines, "SiLU", BACKWARD)
    assert row[4:] == ["2.0e-07", "1,000", "2,000", "1.00", "100", "3"]


@unit
def test_columns_without_numbers_are_left_out():
    headers, rows = table_of(made("SiLU", "eager", [4, 256], both(0.5), facts=FACTS), "SiLU")
    assert "us, graph" not in headers and not any("%" in header for header in headers)
    assert any("operators" in header for header in headers) and rows[0][-1] == "3"
    text = STUDY.report(made("SiLU", "eager", [4, 256], both(0.5), facts=FACTS))
    assert "SiLU, backward" not in text and "No percentage where the tensors may stay in a cache" in text


@unit
def test_attention_is_told_in_flops_and_of_the_matmul_rate():
    lines = made("attention", "eager", [1, 2, 20, 16], both(0.5), percent={FORWARD: 40.0}, unit_="TFLOP/s")
    headers, _ = table_of(lines, "attention")
    assert " ".join(headers).split()[-5:] == ["TFLOP/s", "%", "of", "matmul", "kernels"]


@unit
def test_a_median_that_is_not_known_is_marked():
    text = STUDY.report(made("SiLU", "eager", [4, 256], both(0.5), settled=False))
    assert " 500~ " in text and "\n~ these rounds do not tell the median to 0.5 %" in text
    assert "~" not in STUDY.report(made("SiLU", "eager", [4, 256], both(0.5)))


@unit
def test_what_was_skipped_is_a_line_a_reason_and_no_row():
    lines = made("SiLU", "eager", [4, 256], both(0.5), facts=FACTS)
    for name, level, reason in (("SiLU", "Triton", "no GPU"), ("SiLU", "CUDA C++", "not written"),
                                ("SwiGLU", "Triton", "no GPU"), ("SwiGLU", "Liger", "no GPU")):
        lines += made(name, level, None, {}, facts=FACTS, status="skipped", reason=reason)
    text = STUDY.report(lines)
    assert text.endswith("\n\nskipped: no GPU: Triton of SiLU, SwiGLU; Liger of SwiGLU\n"
                         "skipped: not written: CUDA C++ of SiLU")
    assert [row[3] for row in table_of(lines, "SiLU")[1]] == ["eager"]
    assert text.count("Triton") == 1 and text.count("skipped") == 2 and "all sizes" not in text


@unit
def test_what_failed_is_a_row_and_a_caution():
    lines = made("SiLU", "eager", [4, 256], both(0.5), facts=FACTS)
    lines += made("SiLU", "mine", [4, 256], {}, facts=FACTS, status="failed", reason="output 0 is off by 1.0e-02")
    _, rows = table_of(lines, "SiLU")
    assert rows[1][:5] == ["4", "x", "256", "mine", "failed"]
    assert STUDY.report(lines).endswith("SiLU, 4 x 256, mine: failed: output 0 is off by 1.0e-02")


@unit
def test_the_summary_is_of_the_largest_size():
    lines = []
    for size, level, ms, percent in (([4, 256], "eager", 9.0, 1.0), ([4, 256], "Triton", 9.0, 1.0),
                                     ([64, 256], "eager", 4.0, 50.4), ([64, 256], "torch.compile", 2.2, 90.0),
                                     ([64, 256], "Triton", 2.0, 100.0), ([64, 256], "Liger", 3.0, 66.0)):
        lines += made("SiLU", level, size, both(ms, 2 * ms), percent={FORWARD: percent, BACKWARD: percent / 2})
    lines += made("SiLU", COPY, [64, 256], both(0.5))
    told = tables.summary(lines)
    of_same_size, of_best = told.split("\n\n% of best copy ")
    assert of_same_size.startswith("% of same-size copy at the largest size")
    assert "ran at 2.00 GB/s." in of_best
    cells = re.split(r"\s{2,}", of_best.splitlines()[-1].strip())
    assert cells == ["SiLU", "12 / 6", "23 / 11", "25 / 12", "100", "Liger 17 / 8"]
    cells = re.split(r"\s{2,}", of_same_size.splitlines()[-1].strip())
    assert cells == ["SiLU", "50 / 25", "90 / 45", "100 / 50", "1.100 / 1.100", "Liger 66 / 33", "1.500 / 1.500"]


@unit
def test_a_copy_that_stays_in_a_cache_is_not_the_best_one():
    lines = made("SiLU", "eager", [4, 256], both(1.0)) + made("SiLU", COPY, [4, 256], both(0.1))
    assert tables.best_copy(lines) is None
    lines += made("SiLU", "eager", [64, 256], both(4.0), percent={FORWARD: 50.0})
    lines += made("SiLU", COPY, [64, 256], both(2.0))
    assert tables.best_copy(lines) == 0.5


@unit
def test_a_row_tells_its_percent_of_both_copies():
    lines = made("SiLU", "eager", [64, 256], both(4.0), percent={FORWARD: 50.0})
    lines += made("SiLU", COPY, [64, 256], both(2.0))
    lines += made("SwiGLU", "eager", [64, 256], both(4.0), percent={FORWARD: 75.0})
    lines += made("SwiGLU", COPY, [64, 256], both(1.0))
    headers, (row, of_copy) = table_of(lines, "SiLU")
    assert " ".join(headers).split()[-5:] == ["%", "same", "%", "best", "kernels"]
    assert row[-3:-1] == ["50", "25"] and of_copy[-2] == "50"
    assert "% same: % of same-size copy. % best: % of best copy, of any size, which ran at 1.00 GB/s." in (
        STUDY.report(lines))


@unit
def test_without_percents_there_is_no_summary():
    assert tables.summary(made("SiLU", "eager", [4, 256], both(0.5), facts=FACTS)) == ""
    assert "best copy" not in STUDY.report(made("SiLU", "eager", [4, 256], both(0.5), facts=FACTS))


@unit
def test_the_recorded_summary_has_a_row_for_every_operation():
    recorded = [read(path) for path in page_parts.recorded("fusions")]
    of_gpu, of_cpu = (next(lines for lines in recorded if runner(lines[0])["type"] == kind) for kind in ("cuda", "cpu"))
    assert tables.summary(of_cpu) == ""
    rows = {row.split("  ")[0]: row for row in tables.summary(of_gpu).splitlines()}
    assert rows.keys() > operations.EXPERIMENTS.keys()
    largest = latest(of_gpu)["SiLU, 16384 x 16384, torch.compile"]
    percents = tables._percents(largest)
    assert percents in rows["SiLU"] and percents.count(" / ") == 1


@unit
def test_records_of_several_runs_say_which_commit_each_table_is_of():
    first = made("SiLU", "eager", [4, 256], both(0.5), facts=GPU | {"git": "1111111"})
    second = made("SwiGLU", "eager", [4, 256], both(0.5), facts=GPU | {"git": "2222222"}, run="two")
    text = STUDY.report(first + second)
    assert f"\nSiLU, forward (commit {commits(first)})\n" in text and "\nSwiGLU, forward (commit 2222222)\n" in text
    assert "\nSiLU, forward\n" in STUDY.report(first)


@unit
def test_the_chart_has_a_panel_an_operation_and_a_curve_a_level(monkeypatch):
    drawn = []
    monkeypatch.setattr(tables, "panels_chart", lambda *drawing, **more: drawn.append((drawing, more)))
    lines = made("SiLU", "eager", [1000, 1000], both(0.5)) + made("SiLU", "eager", [2000, 1000], both(0.25))
    lines += made("SiLU", COPY, [1000, 1000], both(0.2)) + made("attention", "eager", [1, 2, 20, 16], both(0.5),
                                                                unit_="TFLOP/s")
    STUDY.charts(lines)["bandwidth"]()
    (((curves, x, y, title), more),) = drawn
    assert curves == {"SiLU": {"eager": [(1.0, 2.0), (2.0, 4.0)], COPY: [(1.0, 5.0)]}}
    assert (x, y, more) == ("million elements", "GB/s, forward", {"dashed": COPY})
    assert title.startswith("a GPU, B2 S20 ")


@unit
def test_a_chart_needs_two_sizes(tmp_path, capsys):
    lines = made("SiLU", "eager", [4, 256], both(0.5))
    assert STUDY.charts(lines) == {}
    frame.draw(STUDY, str(tmp_path / "f"), lines)
    assert capsys.readouterr().err == "fusions: no chart: it needs two sizes of an experiment\n"


@unit
def test_the_answer_is_how_near_the_compiler_comes_to_a_copy():
    """At worst and at best, at the largest size; attention is held against no copy."""
    lines = []
    for name, percent in (("SiLU", 90.4), ("RMSNorm", 40.0), ("SwiGLU", 99.6), ("attention", 1.0)):
        lines += made(name, "torch.compile", [4, 256], both(0.5), percent={FORWARD: 5.0})
        lines += made(name, "torch.compile", [64, 256], both(0.5), percent={FORWARD: percent})
        lines += made(name, "Triton", [64, 256], both(0.5), percent={FORWARD: 300.0})
    assert STUDY.answer(lines) == "torch.compile reaches 40 % of a copy's speed (RMSNorm) to 100 % (SwiGLU)"


@unit
def test_where_no_percents_are_known_the_answer_says_so():
    lines = made("SiLU", "torch.compile", [4, 256], both(0.5), facts=FACTS)
    assert STUDY.answer(lines) == "not known where tensors may stay in a cache"


@unit
def test_its_parts_of_a_page_are_a_summary_and_what_was_captured():
    assert STUDY.long and STUDY.parts.keys() == {"fusions summary", "captured"}
    told = STUDY.parts["captured"]()
    assert told.startswith("```\n") and told.endswith("\n```") and "what torch.compile fused:" in told


# --------------------------------------------------------------------------------------------------------- the command


@integration
def test_the_study_on_a_cpu(study_main, no_inductor, tmp_path):
    path = tmp_path / "fusions.jsonl"
    status, out, err = study_main("fusions", "--experiment", "RMSNorm", "--rows", "4,16", "--rounds", 6, "--json", path,
                                  "--chart", tmp_path / "f")
    assert status == 0 and "Traceback" not in err, out
    lines = read(path)
    assert STUDY.report(lines) in out and (tmp_path / "f-bandwidth.png").exists()
    assert "us, eager" in out and "us, graph" not in out and "% of" not in out      # columns without numbers
    by_label = latest(lines)
    for level in ("eager", operations.TORCHSCRIPT, "torch.compile", COPY):
        run = by_label[f"RMSNorm, 16 x 64, {level}"]
        for mode in tables.PASSES:
            assert len(run.samples(mode, "eager")) == 6 and run.value(mode, "work rate", "eager") > 0
            assert run.value(mode, "percent of limit", "eager") is None          # no word on a CPU's caches
        assert run.value(FORWARD, "throughput", "eager") is None
    skipped = [run for run in runs(lines) if run.status == "skipped"]
    assert {run.variant["size"] for run in skipped} == {None}
    levels = operations.EXPERIMENTS["RMSNorm"].by_hand
    said = f"skipped: timed on a GPU alone: {'; '.join(f'{level} of RMSNorm' for level in levels)}"
    assert [line for line in out.splitlines() if "skipped" in line] == [said]            # and so no table has a row
    assert not [line for line in out.splitlines() if any(level in line for level in levels) and line != said]


@integration
def test_a_level_that_is_wrong_is_a_row_and_the_others_are_timed(study_main, no_inductor, monkeypatch):
    levels = fusions.levels

    def broken(x):
        raise KeyError("a library's own")
    monkeypatch.setattr(fusions, "levels", lambda *given: levels(*given) | {"Triton": lambda x: x * 2, "mine": broken})
    status, out, _ = study_main("fusions", "--experiment", "SiLU", "--rows", "4", "--rounds", 6)
    assert status == 1 and "SiLU, 4 x 256, Triton: failed: output 0 is off by" in out
    assert "SiLU, 4 x 256, mine: failed: KeyError: " in out
    assert any(line.split()[:5] == ["4", "x", "256", "eager", "ok"] for line in out.splitlines())


@unit
def test_rows_that_no_memory_holds_are_one_line(study_main):
    status, _, err = study_main("fusions", "--experiment", "SwiGLU", "--rows", 10**12)
    assert status == 3 and "give a smaller shape" in err
    assert one_line(err).startswith("fusions: out of memory: SwiGLU of 1000000000000 x 256: about ")


@unit
@pytest.mark.parametrize("flags, said", [
    (("--rows", "4,x"), "argument --rows: '4,x': give whole numbers such as 1,2,4"),
    (("--rows", "0"), "argument --rows"),
    (("--experiment", "dropout"), "argument --experiment: invalid choice"),
])
def test_wrong_flags_are_one_line(study_main, flags, said):
    status, _, err = study_main("fusions", *flags)
    assert status == 2 and said in one_line(err)


@integration
@pytest.mark.gpu
@pytest.mark.parametrize("name", operations.EXPERIMENTS)
def test_kernels_and_graphs_on_a_gpu(study_main, name, tmp_path):
    status, out, _ = study_main("fusions", "--device", "cuda", "--num-heads", 1, "--experiment", name, "--rows", "64",
                                "--rounds", 6, "--json", tmp_path / "f.jsonl")        # heads that are 64 wide
    assert status == 0, out
    for run in runs(read(tmp_path / "f.jsonl")):
        if run.variant["level"] in ("eager", "torch.compile", "Triton"):
            for mode in tables.PASSES:
                assert all(run.samples(mode, launch) for launch in LAUNCHES), (run.label, mode)
