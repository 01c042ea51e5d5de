"""The study of patterns: its cases and what they count, its tables and its chart from records, its command."""
import pytest
import torch

from benchmarks import studies
from benchmarks.measure import options
from benchmarks.patterns.pattern import pattern_named
from benchmarks.patterns.ways import BY_HAND, FLEX, SDPA, WAYS, Shape
from benchmarks.records.read import read
from benchmarks.studies import patterns
from benchmarks.studies.patterns import subjects, tables, tasks
from benchmarks.studies.patterns.tables import CONTROL
from common import BlockConfig
from common.report.record import record
from common.report.result import Result
from common.runtime.iteration import BOTH, FORWARD
from common.runtime.timing import Timing
from tests.helpers.made_records import GPU
from tests.helpers.said import one_line

unit, integration = pytest.mark.unit, pytest.mark.integration
CPU = torch.device("cpu")
STUDY = studies.load("patterns")
CONFIG = BlockConfig(2, 64, 64, 4, amp_dtype=None)
SHAPE = Shape(2, 4, 4, 64, 64, 16, torch.float32, CPU)


def parsed(*argv: str):
    """The options of a command line."""
    parser = options.parser(STUDY.name, STUDY.doc)
    STUDY.add_arguments(parser)
    return options.parse(parser, ["--preset", "tiny", "--device", "cpu", *argv], STUDY.refine)


# ----------------------------------------------------------------------------------------------------------- its cases


@unit
@pytest.mark.parametrize("name", [name for name in tasks.PATTERNS if name != "paged decode"])
@pytest.mark.parametrize("length", [1025, 1280])
def test_every_pattern_is_one_at_a_length(name, length):
    task = tasks.PATTERNS[name].at(length, BlockConfig(1, 2 * length, 64, 4), torch.float32, CPU)
    shape = task.shape
    assert (shape.batch, shape.heads, shape.queries, shape.width, task.length) == (2, 4, length, 16, length)
    assert shape.keys == length * (2 if name == "cross-attention" else 1)
    assert shape.kv_heads == (1 if name == "grouped queries" else 4)
    task.pattern.check(2, 4, shape.queries, shape.keys)
    causal = task.control()
    assert causal.pattern == pattern_named("causal")
    assert causal.shape == Shape(2, 4, 4, length, length, 16, torch.float32, CPU)


@unit
def test_a_decode_step_has_eight_times_the_sequences():
    task = tasks.PATTERNS["paged decode"].at(256, BlockConfig(2, 256, 64, 4), torch.float32, CPU)
    assert task.shape == Shape(16, 4, 1, 1, 256, 16, torch.float32, CPU) and task.length == 256
    full = task.control()
    assert full.shape == task.shape and not full.pattern.has_mask
    assert not full.has_backward(SDPA) and not task.has_backward(BY_HAND)


@unit
@pytest.mark.parametrize("name, length, heads, said", [
    ("paged decode", 250, 4, "S 250 is no multiple of 128, the keys of a page"),
    ("paged decode", 256, 6, "6 heads are no multiple of 4, as many as share one of keys"),
    ("grouped queries", 256, 25, "25 heads are no multiple of 4, as many as share one of keys")])
def test_what_is_no_row_says_why(name, length, heads, said):
    config = BlockConfig(1, length, 16 * heads, heads)
    with pytest.raises(ValueError, match=said):
        tasks.PATTERNS[name].at(length, config, torch.float32, CPU)
    (only,) = patterns.group(name, length, config, CPU).cases
    assert said in only.missing


@unit
def test_a_window_that_is_no_shorter_is_no_pattern_of_its_own():
    question = tasks.PATTERNS["window 256"]
    with pytest.raises(ValueError, match="a window of 256 is not shorter than S 256: it would be causal"):
        question.at(256, CONFIG, torch.float32, CPU)
    assert question.at(257, CONFIG, torch.float32, CPU).pattern.window == 256


@unit
def test_flops_are_of_the_pairs_that_are_seen():
    """Four a pair and column forward, ten more with the backward: five products in place of two."""
    def least_flops(pattern, mode):
        return tasks.PatternTask(SHAPE, pattern).least_flops(mode)
    pairs = 2 * 4 * 64 * 65 // 2
    assert least_flops(pattern_named("causal"), FORWARD) == 4 * pairs * 16
    assert least_flops(pattern_named("causal"), BOTH) == 14 * pairs * 16
    assert least_flops(pattern_named("sliding_window", window=1), FORWARD) == 4 * 2 * 4 * 64 * 16
    assert least_flops(pattern_named("key_padding", lengths=(64, 1)), FORWARD) == 4 * 4 * 64 * 65 * 16


@unit
def test_bytes_are_of_what_must_move():
    grouped = tasks.PatternTask(Shape(2, 4, 2, 64, 128, 16, torch.bfloat16, CPU), pattern_named("full"))
    q, k = 2 * 4 * 64 * 16, 2 * 2 * 128 * 16
    assert grouped.least_bytes(FORWARD) == 2 * (2 * q + 2 * k)
    assert grouped.least_bytes(BOTH) == 3 * grouped.least_bytes(FORWARD)


@unit
def test_a_decode_step_reads_the_keys_that_count():
    """Of two sequences: 256 and 192 keys."""
    task = tasks.PagedTask(Shape(2, 4, 2, 1, 256, 16, torch.bfloat16, CPU))
    keys, q = 2 * 16 * 448, 2 * 4 * 16
    assert task.least_bytes(FORWARD) == 2 * (2 * keys + 2 * q)
    assert task.least_flops(FORWARD) == 4 * 4 * 16 * 448


@unit
def test_only_a_gpu_has_a_limit():
    assert not tasks.PatternTask(SHAPE, pattern_named("causal")).workload().forward


@unit
def test_the_reason_is_that_of_the_backend_which_is_on():
    warned = ["Memory efficient kernel not used because: (Triggered internally at a.cpp:3.)",
              "Memory Efficient attention has been runtime disabled. (Triggered internally at a.cpp:4.)",
              "Flash attention kernel not used because:",
              "Flash does not\n take masks. (Triggered internally at a.cpp:3.)"]
    assert subjects.own_reason(warned) == "Flash does not take masks."


@unit
def test_a_pattern_that_is_none_at_a_length_is_one_row():
    (only,) = patterns.group("window 256", 64, CONFIG, CPU).cases
    assert "it would be causal" in only.missing
    cases = patterns.group("prefix", 64, CONFIG, CPU).cases
    assert [case.variant["way"] for case in cases] == [*WAYS, SDPA]
    assert cases[-1].name == CONTROL and cases[-1].variant["beside"] == "prefix"


@unit
def test_the_first_calls_are_what_they_take_more_than_the_second(monkeypatch):
    seconds = iter([5.0, 2.0, 1.0, 4.0])
    monkeypatch.setattr(subjects, "timed", lambda work, device: (work(), next(seconds)))
    given = [torch.ones(2, requires_grad=True)]
    assert subjects.first_calls(torch.square, given, True, CPU) == 3.0
    assert subjects.first_calls(torch.square, given, False, CPU) == 0.0


# -------------------------------------------------------------------------------------------------------- its command


@unit
@pytest.mark.parametrize("argv, lengths", [((), (512, 2048)), (("--quick",), (512,)), (("--lengths", "64"), (64,))])
def test_the_lengths_that_it_takes(argv, lengths):
    assert parsed(*argv).lengths == lengths


@unit
def test_a_quick_run_leaves_out_what_is_much_like_another():
    assert parsed().pattern is None and parsed("--quick", "--pattern", "full").pattern == ["full"]
    assert set(tasks.PATTERNS) - set(parsed("--quick").pattern) == {"full", "window 1024", "key padding"}


@unit
@pytest.mark.parametrize("argv, said", [
    (("--pattern", "windowed"), "invalid choice: 'windowed'"), (("--lengths", "0"), "'0': give whole numbers")])
def test_a_wrong_flag_is_a_line(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(*argv)
    assert ended.value.code == 2 and said in one_line(capsys.readouterr().err)


@pytest.fixture
def no_compiler(monkeypatch):
    """Ways that compile are left out: other tests compile."""
    monkeypatch.setattr("common.runtime.compiler.missing", lambda device: "no C++ compiler found: install g++")


@integration
def test_it_measures_tells_and_draws(study_main, tmp_path, no_compiler):
    named = [word for name in ("documents", "window 256", "paged decode") for word in ("--pattern", name)]
    status, out, err = study_main("patterns", *named, "--lengths", "96,128", "--rounds", "6",
                                  "--json", tmp_path / "p.jsonl", "--chart", tmp_path / "chart")
    assert status == 0, err
    lines = read(tmp_path / "p.jsonl")
    ways = tables.by_pattern(lines)[96, "documents"]
    assert ways[BY_HAND].best(FORWARD) and ways[SDPA].best(BOTH) and ways[CONTROL].best(BOTH)
    assert ways[SDPA].find("check", subjects.MASK)["metric"]["extra_info"]["kernel"]
    step = tables.by_pattern(lines)[128, "paged decode"]
    assert step[BY_HAND].best(FORWARD) and step[CONTROL].best(FORWARD) and not step[CONTROL].best(BOTH)
    assert "S 96 is no multiple of 128, the keys of a page: every way of paged decode at 96" in out
    assert "skipped: no C++ compiler found: install g++: compiled of documents at 96, documents at 128" in out
    assert "a window of 256 is not shorter than S 96: it would be causal: every way of window 256 at 96" in out
    assert tables.text(lines) in out and (tmp_path / "chart-speed.png").stat().st_size > 5000


@integration
def test_a_wrong_way_is_a_failed_row(study_main, monkeypatch, no_compiler):
    monkeypatch.setattr("benchmarks.patterns.checking.gates_of", lambda shape: (1e-5, 0.0))
    status, out, _ = study_main("patterns", "--pattern", "prefix", "--lengths", "64", "--rounds", "6")
    assert status == 1 and "failed: the gradient of q is off by" in out


# ---------------------------------------------------------------------------------------------------------- its tables


def made(name, way, forward, backward=None, *, mask_ms=0.0, beside="", status="ok", reason="", length=2048,
         rejected=None):
    """The records of one way on a GPU, of a run "one"; milliseconds of a forward and a backward."""
    variant = {"length": length, "way": way} | ({"beside": beside} if beside else {})
    r = Result(CONTROL if beside else name, CONFIG, "bfloat16", GPU, study="patterns", run="one", variant=variant,
               matmul="bfloat16", status=status, reason=reason)
    if status != "ok":
        return [record(r, "status", "", [], "check")]
    lines = [record(r, "output error", "relative L2", [2e-3], "check"),
             record(r, subjects.MASK, "ms", [mask_ms], "check", kernel="cuDNN", rejected=rejected or {}),
             record(r, subjects.FIRST_CALLS, "s", [1.5], "check")]
    for mode, ms in ((FORWARD, forward), (BOTH, backward)):
        if ms is not None:
            timed = Timing([ms] * 6, True, "fake")
            lines.append(record(r, "latency", "ms", timed.samples, mode, "eager", median=timed.median, settled=True,
                                clock="fake"))
            lines.append(record(r, "percent of limit", "%", [40.0], mode, "eager"))
    return lines


WINDOW = [
    *made("window 256", BY_HAND, 9.0, 20.0, mask_ms=1.0),
    *made("window 256", SDPA, 2.0, 6.0, mask_ms=1.0,
          rejected={"FlashAttention": "Flash Attention does not support non-null attn_mask."}),
    *made("window 256", FLEX, 0.5, 2.0, mask_ms=9.0),
    *made("window 256", "varlen", 0, status="failed", reason="the output is off by 1.4e+00"),
    *made("", SDPA, 1.0, 4.0, beside="window 256")]


@unit
def test_the_table_says_what_each_way_costs():
    rows = {line.split("  ")[0]: line for line in tables.text(WINDOW, 250).split("S 2,048\n\n")[1].splitlines()}
    assert "2.00 [2.00, 2.00]" in rows[FLEX] and rows[FLEX].endswith("2 layers")
    assert rows[BY_HAND].endswith("never") and rows["varlen"].split() == ["varlen", "failed"]
    assert "control: causal" in rows and "9.00" in rows[FLEX] and " 40 " in rows[FLEX]


@unit
@pytest.mark.parametrize("mask_ms, said", [(1.0, "1 layer"), (5.0, "1 layer"), (5.1, "2 layers"), (9.1, "3 layers")])
def test_a_mask_pays_from_so_many_layers(mask_ms, said):
    """4 ms are won a layer, 1 ms is what the dense mask takes."""
    lines = [*made("window 256", SDPA, 2.0, 6.0, mask_ms=1.0), *made("window 256", FLEX, 0.5, 2.0, mask_ms=mask_ms)]
    ways = tables.by_pattern(lines)[2048, "window 256"]
    assert tables._pays_from(ways[FLEX], ways[SDPA]) == said


@unit
def test_the_summary_names_the_fastest_of_both_passes():
    """One that has no backward is none where others have."""
    lines = [*WINDOW, *made("window 256", "compiled", 0.1)]
    (row,) = [line for line in tables.text(lines, 250).splitlines() if line.startswith("window 256  ")]
    assert row.split()[:4] == ["window", "256", "2,048", FLEX]
    assert "4.00 [4.00, 4.00]" in row                      # over the dense mask


@unit
def test_what_was_rejected_or_failed_says_why():
    said = tables.text(WINDOW, 250)
    assert ("FlashAttention can't take window 256 at 2,048: Flash Attention does not support non-null attn_mask."
            in said)
    assert "failed: the output is off by 1.4e+00: varlen of window 256 at 2,048" in said


@unit
def test_the_answer_is_of_the_longest_window():
    longer = [*made("window 256", FLEX, 0.5, 1.0, length=16384), *made("", SDPA, 10.0, 20.0, beside="window 256",
                                                                        length=16384)]
    assert tables.answer(WINDOW + longer).startswith("a window of 256 at S 16,384: 20.0 times as fast as causal")
    assert tables.answer(made("causal", SDPA, 1.0)) == "see the tables"


@unit
def test_the_chart_has_a_row_a_pattern():
    assert list(tables._speeds(WINDOW)) == ["S 2,048"]
    assert tables._speeds(WINDOW)["S 2,048"]["window 256"][FLEX] == (2.0, 2.0, 2.0)
    assert tables.charts(made("causal", SDPA, 1.0)) == {}


@unit
def test_no_gpu_names_no_rejected_backend():
    assert subjects.rejected(tasks.PatternTask(SHAPE, pattern_named("causal")),
                             [torch.zeros(2, 4, 64, 16)] * 3) == {}
