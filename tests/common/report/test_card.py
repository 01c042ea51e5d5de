"""The card: the same labels in the same order everywhere, nothing that changes without meaning, and its figures."""
import copy
import math
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from common import PRESETS, steps
from common.block.config import dtype_name
from common.block.evidence import Evidence
from common.block.traits import amp_default
from common.block.workload import Operation, Workload
from common.measure import measurement
from common.measure.cases import Case, Group
from common.measure.session import Entry, Session
from common.measure.subject import Subject
from common.report.card import card
from common.report.result import Compilation, Result, Row
from common.runtime import timing
from common.runtime.iteration import BOTH, LAUNCHES, MODES
from common.runtime.peaks import YARDSTICKS
from common.runtime.timing import Timing
from tests.helpers.made_results import (
    CPU,
    EMULATED,
    H200,
    NO_COMPILER,
    RESULTS,
    SAMPLES,
    emulated,
    ended,
    finished,
    row,
)
from tests.helpers.said import card_value

RATES_OF_THE_LIMIT = [*(f"{name} limit" for name in YARDSTICKS), *(f"% of {name}" for name in YARDSTICKS)]

pytestmark = pytest.mark.unit

each_result = pytest.mark.parametrize("r", RESULTS.values(), ids=RESULTS.keys())
CPU_DEVICE, GPU_DEVICE = torch.device("cpu"), torch.device("cuda")


def labels(printed: str) -> list[str]:
    """What stands in the first 20 columns, where values begin; wrapped lines have nothing there."""
    found = [line[:20].rstrip() for line in printed.splitlines()]
    return [label for label in found if label]


def line_of(printed: str, label: str) -> list[str]:
    """The words of the line that begins so."""
    return next(line for line in printed.splitlines() if line.startswith(label)).split()


# ------------------------------------------------------------------------------------------------- what every card has


@each_result
def test_labels_are_the_same_in_the_same_order_everywhere(r):
    assert labels(card(r)) == labels(card(RESULTS["H200"]))


@each_result
def test_a_card_is_at_most_100_columns_wide(r):
    """Its table at most 80, as a terminal has."""
    lines = card(r).splitlines()
    table = next(place for place, line in enumerate(lines) if line.startswith("median ms"))
    assert max(map(len, lines)) <= 100 and max(map(len, lines[table - 2:table + 12])) <= 80


def test_even_a_word_without_spaces_is_kept_within_the_card():
    printed = card(ended("failed", "path " + "x" * 300))
    assert max(map(len, printed.splitlines())) <= 100


@each_result
def test_cards_of_the_same_data_are_the_same(r):
    assert card(copy.deepcopy(r)) == card(r)


@each_result
def test_nothing_in_a_card_changes_without_meaning(r):
    """No dates, times, addresses or process numbers, no commit, no digest, no card's own number."""
    printed = card(r)
    assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d|0x[0-9a-f]+|\bpid\b|/tmp/", printed)
    for fact in (CPU["git"], CPU["sources"], H200["gpu_uuid"], r.run):
        assert fact not in printed


@each_result
def test_what_is_not_known_is_said_and_nothing_is_nan(r):
    printed = card(r)
    assert not re.search(r"\b(nan|inf)\b", printed, re.IGNORECASE) and "None" not in printed
    if r.status != "ok":
        assert f"{r.status}: " in printed and "n/a" in printed


@each_result
def test_every_reason_is_on_the_card(r):
    flat = " ".join(" ".join(line[20:] for line in card(r).splitlines()).split())
    assert r.reason in flat
    for of_row in r.rows.values():
        assert of_row.timing or " ".join(of_row.reason.split()) in flat


def test_an_error_that_is_not_finite_is_a_word():
    r = ended("failed", "the output is missing or not finite")
    r.errors = {"output": (math.inf, None), "branch": (math.nan, 1e-3)}
    assert card(r).count("not finite") == 3 and "nan" not in card(r)


# ---------------------------------------------------------------------------------------------------------- upper part


def upper(printed: str) -> list[str]:
    """The lines above the first empty one."""
    return printed.split("\n\n")[0].splitlines()


def lines_of(printed: str, label: str) -> list[str]:
    """The values beside a label, a line each."""
    lines = upper(printed)
    start = next(place for place, line in enumerate(lines) if line[:20].rstrip() == label)
    values = [lines[start][20:]]
    for line in lines[start + 1:]:
        if not line.startswith(" " * 20):
            break
        values.append(line[20:])
    return values


PRECISIONS = [(torch.float32, None), (torch.float32, torch.float16), (torch.float32, torch.bfloat16),
              (torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16)]


def begun(number: int, gpu: bool, parameter_dtype=torch.float32, amp_dtype=None, why: str = "") -> Result:
    """A run of a step, as far as its command line and its build have filled it in."""
    step, config = steps.load(number), PRESETS["tiny"].replace(amp_dtype=amp_dtype)
    device = GPU_DEVICE if gpu else CPU_DEVICE
    is_emulated = number == 4 and not gpu
    return Result(
        step.name, config, dtype_name(parameter_dtype), H200 if gpu else CPU, step=number, traits=step.traits,
        matmul=step.traits.arithmetic(config, parameter_dtype, device).matmul,
        residual=dtype_name(step.traits.residual(config, parameter_dtype)),
        engine="emulated (Transformer Engine needs a GPU, this is a CPU)" if is_emulated else "PyTorch",
        emulated=is_emulated, autocast_off=why)


@pytest.fixture
def gpu_with_tf32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)


@pytest.mark.parametrize("gpu", [False, True], ids=["CPU", "GPU"])
def test_the_upper_part_has_as_many_lines_in_every_step(gpu, gpu_with_tf32):
    """Whatever the dtypes are: `diff` of two cards then shows lines beside their like."""
    counts = set()
    for number in range(len(steps.ALL)):
        for parameter_dtype, amp_dtype in PRECISIONS:
            printed = card(begun(number, gpu, parameter_dtype, amp_dtype))
            assert len(lines_of(printed, "precision")) == 2
            counts.add(len(upper(printed)))
    assert len(counts) == 1


@pytest.mark.parametrize("parameters", ["float32", "bfloat16"])
def test_precision_is_what_multiplies_and_what_is_stored(parameters):
    r = replace(begun(2, False, torch.float32, torch.bfloat16), parameter_dtype=parameters)
    autocast = "bfloat16" if parameters == "float32" else "off"
    assert lines_of(card(r), "precision") == [f"matmuls bfloat16; autocast {autocast}",
                                              f"x, y and parameters {parameters}; residual float32"]
    assert lines_of(card(ended("oom", "much")), "precision")[0] == "matmuls n/a; autocast off"


def test_why_autocast_is_off_takes_no_line_of_its_own(a_cpu_without_bfloat16):
    """Step 0 has no reason, those after it have one, and their cards have the same lines."""
    _, why = amp_default(CPU_DEVICE, steps.load(1).traits)
    for reason in (why, "--amp-dtype bfloat16 is for the later steps", "--amp-dtype float16 is for the later steps"):
        off = card(begun(1, False, why=reason))
        assert len(upper(off)) == len(upper(card(begun(0, False))))
        multiplies, _ = lines_of(off, "precision")
        assert multiplies.startswith("matmuls float32; autocast off (") and reason.split(";")[0] in multiplies


def test_the_upper_part_says_what_was_run_and_where():
    printed = card(finished(gpu=True))
    assert card_value(printed, "step") == "2_sdpa" and card_value(printed, "status") == "ok"
    assert card_value(printed, "device") == "NVIDIA H200, 132 multiprocessors, 140 GiB"
    assert card_value(printed, "software") == ("torch 2.15.0+cu132, CUDA 13.0, cuDNN 91900, triton 3.9.0, "
                                               "Transformer Engine 2.20.2+cu13.torch2.11.0")
    assert card_value(printed, "shape") == "B8 S2048 E4096 H32 D128 F16384, causal, dropout 0"
    assert card_value(printed, "engine") == "PyTorch" and card_value(printed, "attention") == "cuDNN attention"
    assert card_value(printed, "clock") == "CUDA events; caches as the previous iteration left it"
    assert card_value(printed, "sustained peaks") == "float16 660 TFLOP/s; copy 4.24 TB/s"
    assert card_value(printed, "burst peaks") == "float16 790 TFLOP/s; copy 4.30 TB/s (read + written)"
    assert card_value(printed, "data sheet peaks") == "n/a: not known here"
    assert card_value(card(finished(gpu=False)), "device") == f"CPU: {CPU['name']}, 2 threads"
    assert card_value(card(ended("skipped", NO_COMPILER)), "status") == f"skipped: {NO_COMPILER}"


# -------------------------------------------------------------------------------------------------- the machine's state


@pytest.mark.parametrize("load, threads, told", [(2.9, 2, "n/a"), (3.1, 2, "load beyond its threads"),
                                                 (9.0, 8, "n/a")])
def test_a_card_says_that_a_cpu_had_more_to_do(load, threads, told):
    busy = finished(gpu=False, facts=CPU | {"cpu_threads": threads}, state={"load_average": load})
    assert card_value(card(busy), "throttled") == told


def test_a_gpus_card_says_nothing_of_the_host():
    without_nvml = finished(gpu=True, state={"load_average": 99.0})
    assert card_value(card(without_nvml), "throttled") == "n/a"


def test_throttling_and_neighbours_are_named():
    printed = card(RESULTS["H200, throttled beside others"])
    assert card_value(printed, "throttled") == "power cap, software thermal"
    assert card_value(printed, "also on this GPU") == "python"
    printed = card(RESULTS["H200"])
    assert (card_value(printed, "throttled"), card_value(printed, "also on this GPU")) == ("no", "nothing")
    assert card_value(card(RESULTS["CPU"]), "also on this GPU") == "n/a"


# --------------------------------------------------------------------------------------------------------------- errors


def test_errors_stand_beside_their_gates():
    printed = card(finished(gpu=True))
    assert line_of(printed, "output ") == ["output", "3.0e-04", "n/a"]
    assert line_of(printed, "branch") == ["branch", "5.0e-04", "1.0e-03"]
    assert line_of(printed, "parameter gradient")[2:] == ["9.0e-04", "3.0e-03", "attn.proj.weight"]


# ---------------------------------------------------------------------------------------------------------------- table


def test_the_cards_figures_are_those_of_its_rows():
    """Worked by hand: of 7.2 ms, 1.2 TFLOP, 16384 tokens, a limit of 5 ms, 3 GiB."""
    r = finished(gpu=True)
    other = Timing([20.0, 30.0, 10.0, 40.0, 50.0, 60.0], False, "CUDA events")
    r.rows[BOTH, "eager"] = row(timing=other, flops=3e12, peak_bytes=2**29, enqueue_ms=1.5)
    r.evidence = r.evidence | {BOTH: Evidence(Counter({"a": 2}), Counter(), "proven", "")}
    figures = {line[:20].rstrip(): line[20:].split() for line in card(r).splitlines()}
    assert figures["median ms"] == ["7.200", "7.200", "35.000", "7.200"]
    assert figures["p20 ms"] == ["7.100", "7.100", "20.000", "7.100"]
    assert figures["p80 ms"] == ["7.300", "7.300", "50.000", "7.300"]
    assert figures["samples"] == ["6"] * 4 and figures["settled"] == ["yes", "yes", "unsettled", "yes"]
    assert figures["tokens/s"] == ["2,275,556", "2,275,556", "468,114", "2,275,556"]
    assert figures["TFLOP/s"] == ["166.67", "166.67", "85.71", "166.67"]
    assert figures["sustained limit"] == ["6.500"] * 4 and figures["% of sustained"] == ["90", "90", "19", "90"]
    assert figures["burst limit"] == ["5.000"] * 4 and figures["% of burst"] == ["69", "69", "14", "69"]
    assert figures["data sheet limit"] == ["3.900"] * 4 and figures["% of data sheet"] == ["54", "54", "11", "54"]
    assert figures["J/iteration"] == ["4.800"] * 4 and figures["J/1000 tokens"] == ["0.293"] * 4
    assert figures["mean W"] == ["667"] * 4
    assert figures["peak memory GiB"] == ["3.00", "3.00", "0.50", "3.00"] and figures["launches"] == ["5", "2"]
    assert figures["enqueue ms"][::2] == ["0.90", "1.50"]


def test_a_row_that_was_not_timed_is_not_available():
    figures = {line[:20].rstrip(): line[20:].split() for line in card(RESULTS["CPU"]).splitlines()}
    for label in ("median ms", "p20 ms", "p80 ms", "samples", "settled", "tokens/s", "TFLOP/s"):
        assert figures[label][1::2] == ["n/a", "n/a"] and "n/a" not in figures[label][::2]
    assert figures["launches"] == ["5", "operators", "5", "operators"]


@pytest.mark.parametrize("limit, wrong", [(7.2, False), (7.3, True), (14.4, True)])
def test_more_than_the_limit_is_shown_as_an_error(limit, wrong):
    """Faster than the machine can be: the model of the limit is wrong, not the step good."""
    r = finished(gpu=True)
    for yardstick in YARDSTICKS:
        r.rows["forward", "eager"] = row(limits={yardstick: {"matmul": limit}})
        assert ("ERROR" in line_of(card(r), f"% of {yardstick}")) == wrong


def test_energy_that_is_not_known_says_why():
    r = finished(gpu=True)
    r.rows["forward", "eager"] = row(energy=None, energy_reason="the energy counter stood still")
    printed = card(r)
    assert card_value(printed, "J/iteration") == "n/a 4.800 4.800 4.800"
    assert card_value(printed, "n/a because") == "the energy counter stood still"
    assert card_value(card(RESULTS["CPU"]), "mean W") == "n/a n/a n/a n/a"
    assert "energy" not in card_value(card(RESULTS["CPU"]), "n/a because")


def test_where_nothing_is_missing_there_is_no_reason_and_a_run_that_ended_early_names_its_status():
    whole = finished(gpu=True)
    for each in whole.rows.values():
        each.reason = each.energy_reason = ""
    assert card_value(card(whole), "n/a because") == "(none)"
    early = ended("skipped", "there is no compiler")
    assert card_value(card(early), "n/a because") == "the run did not end well: see its status"
    assert card_value(card(early), "timing") == "n/a"


def test_an_unsettled_row_says_so():
    r = finished(gpu=True)
    r.rows["forward", "graph"] = row(timing=Timing(SAMPLES, False, "CUDA events"))
    assert line_of(card(r), "settled") == ["settled", "yes", "unsettled", "yes", "yes"]


def test_a_card_says_launch_bound_of_the_eager_column():
    r = finished(gpu=True)
    r.rows["forward", "graph"] = row(timing=Timing([1.0] * 9, True, "CUDA events"))
    assert line_of(card(r), "launch-bound") == ["launch-bound", "launch-bound", "n/a", "no", "n/a"]
    assert line_of(card(RESULTS["CPU"]), "launch-bound") == ["launch-bound", *["n/a"] * 4]


@pytest.mark.parametrize("compilation, said", [
    (Compilation(14.5, 2.3, [8.2, 8.3, 8.1] * 2), "15,000 forward+backward calls"),     # 14.5 s at 1 ms a call
    (Compilation(14.5, 2.3, [7.0, 6.9] * 3), "never: it is not faster here"), (Compilation(14.5, 2.3), "n/a"),
    (None, "n/a"),
])
def test_the_price_of_compiling_is_told_in_calls(compilation, said):
    printed = card(finished(gpu=True, compilation=compilation))
    assert card_value(printed, "compile pays after") == said
    assert card_value(printed, "compile") == ("cold 14 s, warm 2.3 s" if compilation else "n/a")


# ----------------------------------------------------------------------------------------------------------- emulation


def test_of_an_emulation_there_are_times_and_no_rates():
    """Its time means nothing; a rate would be taken for one of the hardware."""
    printed = card(emulated())
    assert card_value(printed, "engine") == EMULATED
    assert card_value(printed, "median ms") == "7.200 n/a 7.200 n/a"
    for label in ("tokens/s", "TFLOP/s", *RATES_OF_THE_LIMIT):
        assert card_value(printed, label) == "n/a n/a n/a n/a"
    assert card_value(printed, "timing").startswith("means nothing: Transformer Engine is emulated")
    assert card_value(card(RESULTS["H200"]), "timing") == "measured"


OF_4_GFLOP = Workload("float32", (Operation("a", "matmul", 4e9, 1.0, "float32"),), tokens=1000)


def timed_alone(r: Result, workload: Workload | None, monkeypatch, **how) -> Result:
    """Both passes of it, by fakes of what takes time."""
    def see_kernels(subject, iteration, mode, result, trace=None):
        result.evidence[mode] = Evidence(Counter(), Counter(), "proven", "fake")
    monkeypatch.setattr(timing, "measure", lambda *_: Timing([2.0] * 6, True, "fake"))
    monkeypatch.setattr(timing, "calibration", lambda device: {})
    monkeypatch.setattr(measurement, "hold_against_limits", lambda rows, peaks: None)
    monkeypatch.setattr(measurement, "see_kernels", see_kernels)
    session = Session("step", CPU_DEVICE, timing.StopRule(), **how)
    x = torch.ones(1)
    subject = Subject(lambda x: 2 * x, [x], [x], {}, (1.0, 1.0), workload)
    entry = Entry(Case(r.name, prepare=None, traits=r.traits), r, subject)
    for mode in MODES:
        session._time_alone(entry, mode, Group([]), timing.StopRule())
    return r


@pytest.mark.parametrize("is_emulated", [False, True])
def test_a_run_gives_its_rows_a_rate_unless_it_is_emulated(is_emulated, monkeypatch):
    r = replace(begun(4, gpu=False), emulated=is_emulated)
    printed = card(timed_alone(r, None if is_emulated else OF_4_GFLOP, monkeypatch))
    rates = {label: card_value(printed, label).split() for label in ("tokens/s", "TFLOP/s")}
    expected = {"tokens/s": ["n/a"] * 4, "TFLOP/s": ["n/a"] * 4}
    if not is_emulated:
        expected = {"tokens/s": ["500,000", "n/a"] * 2, "TFLOP/s": ["2.00", "n/a"] * 2}
    assert rates == expected and r.clock == timing.HostClock.name
    assert list(r.rows) == [(mode, launch) for mode in MODES for launch in LAUNCHES]


def test_a_run_says_of_a_row_that_nobody_asked_for_why_it_is_empty(monkeypatch):
    r = timed_alone(begun(0, gpu=False), OF_4_GFLOP, monkeypatch, refused={"graph": "--launch eager"})
    assert r.rows[BOTH, "graph"] == Row(reason="--launch eager")
    assert card_value(card(r), "n/a because") == "--launch eager"


# ------------------------------------------------------------------------------------------------------------ evidence


def test_each_pass_has_its_verdict():
    r = finished(gpu=True)
    r.evidence[BOTH] = Evidence(Counter(), Counter(), "refuted", "softmax ran: a kernel")
    printed = card(r)
    assert card_value(printed, "forward") == "proven: 4 16-bit matmul, 1 cuDNN attention"
    assert card_value(printed, "forward+backward") == "refuted: softmax ran: a kernel"
    assert card_value(printed, "attention") == "by hand"                     # of the pass that has all of it
    assert card_value(card(ended("oom", "much")), "forward") == "n/a"
