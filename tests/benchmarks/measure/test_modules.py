"""A user's own modules: held against FP64, timed in shared rounds, told in one table."""
import math

import pytest
import torch
from torch import nn

from benchmarks.measure.bounds import BOUNDS
from benchmarks.measure.calls import named_parameters
from benchmarks.measure.checks import Check, Judgement
from benchmarks.measure.modules import Comparison, compare, record_checks
from benchmarks.measure.names import Named, gradient_of, output
from benchmarks.records import significance
from benchmarks.records.read import Run, extra, paired, verdict
from common import BlockConfig, steps
from common.report.result import Result
from common.runtime.iteration import FORWARD, LAUNCHES, MODES
from tests.helpers.blocks import case

pytestmark = pytest.mark.unit


def gelu_by_hand(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return nn.functional.gelu(x, approximate="tanh")


def small(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def checked_of(run: Run) -> dict[str, tuple[float, float]]:
    """What was checked -> (error, gate)."""
    found = {}
    for line in run.lines:
        name = line["metric"]["name"]
        if name.endswith(" error"):
            found[name.removesuffix(" error")] = line["metric"]["benchmark_values"][0], extra(line)["gate"]
    return found


CHECKED = {"output", "output without gradients", "gradient of input 0"}


def rows_of(comparison: Comparison) -> list[list[str]]:
    return [line.split() for line in str(comparison).splitlines()]


def test_functions_are_checked_and_timed_in_both_passes():
    found = compare({"by hand": gelu_by_hand, "library": gelu}, (small(8, 16),), gelu, rounds=6)
    first, second = found.results.values()
    assert (first.status, second.status) == ("ok", "ok")
    assert checked_of(first).keys() == checked_of(second).keys() == CHECKED
    for run in (first, second):
        assert all(len(run.samples(mode, "eager")) == 6 for mode in MODES)
        assert run.value(FORWARD, "launches") > 0
    ratio, low, high = paired(first, second, FORWARD)
    assert low <= ratio <= high


def test_what_was_found_is_printed_as_a_table():
    found = compare({"by hand": gelu_by_hand, "library": gelu}, (small(8, 16),), gelu, rounds=6)
    header, _, first, second = rows_of(found)
    assert " ".join(header) == ("module status worst error of held against compared forward ms x first [95 %] launches "
                                "f+b ms x first [95 %] launches")
    by_hand = found.results["by hand"]
    worst = found.judgements["by hand"].worst
    assert " ".join(first).startswith(f"by hand ok {worst.error:.1e} {worst.name} FP64 1 output, 1 gradient")
    assert first[-3] == f"{by_hand.value(FORWARD, 'launches'):.0f}"            # no ratio to itself
    assert second[:2] == ["library", "ok"] and sum(word.startswith("[") for word in second) == 2
    assert found.table(width=60).count("module") > 1                           # split where it is wider
    assert found._repr_html_().count("<tr>") == 3


def test_noise_never_reads_as_a_gain():
    """The ratio to the first has the ladder's words: the same function twice is SAME or UNSURE."""
    same = {"first": gelu, "again": lambda x: gelu(x)}
    found = compare(same, (small(8, 16),), gelu, rounds=6)
    times = paired(*found.results.values(), FORWARD)
    word = verdict(*times[1:]).strip()
    assert (word in ("SAME", "UNSURE")) == (times[1] <= 1 <= times[2]) and word in str(found)


def test_records_of_two_works_are_never_the_same_row():
    """Inputs of another shape or dtype, or a module of another width, are other rows; older records say nothing."""
    def rows(width: int, tokens: torch.Tensor) -> set:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, width), nn.Linear(width, 2))
        return set(significance.all_rows(compare({"mine": model}, tokens, model, rounds=6).results["mine"].lines))
    tokens = torch.zeros(4, 3, dtype=torch.int64)
    narrow = rows(4, tokens)
    assert narrow == rows(4, tokens)
    assert not narrow & rows(8, tokens) and not narrow & rows(4, tokens[:2]) and not narrow & rows(4, tokens.int())
    assert {where.shape for where in narrow} == {"input 0 int64 [4, 3], parameters 42"}


def test_of_hundreds_of_gradients_those_nearest_to_their_bounds_are_recorded():
    def check(of: Named, error: float, bound: float) -> Check:
        return Check(of, "precision", True, True, error, bound, "")
    checks = [check(output("output"), 1e-9, 1.0), check(gradient_of("a"), 0.1, 1.0), check(gradient_of("b"), 0.1, 0.2),
              check(gradient_of("c"), 0.3, 1.0)]
    result = Result("mine", None, "float32", {})
    record_checks(Judgement(checks, "FP64"), result, gradients=2)
    assert set(result.errors) == {"output", "gradient of b", "gradient of c"}
    record_checks(Judgement(checks, "FP64"), result)
    assert len(result.errors) == 4


def test_gradients_of_parameters_are_compared_by_name():
    torch.manual_seed(0)
    good, bad = nn.Linear(8, 4), nn.Linear(8, 4)
    bad.load_state_dict(good.state_dict())
    bad.bias.register_hook(torch.zeros_like)
    found = compare({"good": good, "bad": bad}, (small(3, 8),), good, rounds=6)
    assert found.results["good"].status == "ok"
    assert (found.results["bad"].status, found.results["bad"].samples(FORWARD, "eager")) == ("failed", [])
    assert "bad: failed: the gradient of bias is off by 1.0e+00" in str(found)
    assert good.bias.grad is None and bad.weight.grad is None                  # the check leaves nothing behind


@pytest.mark.parametrize("wrong, said", [
    (lambda x: x, "the output is off by"),
    (lambda x: gelu(x).sum(), "the output: its shape is (), the reference's (8, 16)"),
    (lambda x: (gelu(x),), "the output: it is missing; it returns output[0]"),
    (lambda x: gelu(x) + math.nan, "the output is not finite, or not where the reference is"),
    (lambda x: gelu(x.detach()) + 0 * x, "the gradient of input 0 is off by 1.0e+00"),
    (lambda x: gelu(x) if torch.is_grad_enabled() else torch.relu(x), "the output without gradients is off by"),
], ids=["another function", "another shape", "no tensor", "NaN", "no gradient", "another function without gradients"])
def test_what_is_another_function_is_not_timed(wrong, said):
    found = compare({"right": gelu, "wrong": wrong}, (small(8, 16),), gelu, rounds=6)
    right, refused = found.results["right"], found.results["wrong"]
    assert refused.status == "failed" and said in refused.info["reason"] and not refused.samples(FORWARD, "eager")
    assert right.status == "ok" and right.samples(FORWARD, "eager")
    assert f"wrong: failed: {refused.info['reason']}" in str(found).splitlines()


def test_an_error_of_a_module_is_its_row():
    def broken(x):
        raise KeyError("a library's own")
    found = compare({"broken": broken, "right": gelu}, (small(8, 16),), gelu, rounds=6).results
    assert found["broken"].status == "failed" and found["broken"].info["reason"].startswith("KeyError: ")
    assert found["right"].samples(FORWARD, "eager")


def test_what_is_compiled_again_fails_and_the_others_are_timed(fresh_dynamo):
    def changes(x):                                             # guarded on a Python value that moves
        return gelu(x) + 0 * changes.value
    changes.value = 0.0
    compiled = torch.compile(changes, backend="eager", dynamic=False)

    def moving(x):
        changes.value += 1.0
        return gelu(x)
    found = compare({"compiled": compiled, "moving": moving}, (small(4, 4),), gelu, rounds=6).results
    assert found["compiled"].status == "failed" and "compiled again" in found["compiled"].info["reason"]
    assert found["moving"].status == "ok" and len(found["moving"].samples(FORWARD, "eager")) == 6


def test_integers_among_the_inputs_get_no_gradient():
    table = nn.Embedding(10, 4)
    ways = {"lookup": lambda ids, scale: table(ids) * scale, "gather": lambda ids, scale: table.weight[ids] * scale}
    found = compare(ways, (torch.arange(6), small(6, 4)), lambda ids, scale: table.weight.double()[ids] * scale, 6)
    for run in found.results.values():
        wanted = {"output", "output without gradients", "gradient of input 1"}
        assert run.status == "ok" and wanted <= checked_of(run).keys() <= wanted | {"gradient of table.weight"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_bounds_follow_the_dtype(dtype):
    run = compare({"by hand": gelu_by_hand}, (small(64, 64, dtype=dtype),), gelu, rounds=6).results["by hand"]
    error, bound = checked_of(run)["output"]
    assert run.status == "ok" and 0 < error < bound == pytest.approx(BOUNDS[dtype][0], rel=0.01)


def test_a_gate_of_ones_own():
    found = compare({"rough": lambda x: gelu(x) * 1.01}, (small(8, 8),), gelu, rounds=6, gates={"rough": 0.02}).results
    checked = checked_of(found["rough"])
    assert found["rough"].status == "ok" and checked["output"] == (pytest.approx(0.01, rel=1e-3), 0.02)
    assert checked["gradient of input 0"][1] == pytest.approx(3 * 0.02)


@pytest.mark.parametrize("options, said", [
    ({"numerics": "fp8"}, "numerics 'fp8': give one of tf32"),
    ({"numerics": {"b": "tf32"}}, "b: there is no such module"),
    ({"gates": {"b": 1.0}}, "b: there is no such module; there are a"),
    ({"overwrites_output": ["b"]}, "b: there is no such module"),
    ({"parameters": {"w": "weight"}}, "parameters: no module has a w"),
    ({"parameters": {"weight": "w"}}, "parameters: the reference has no w"),
    ({"rounds": 0}, "rounds is 0: give 1 or more"), ({"cotangents": 0}, "cotangents is 0: give 1 or more"),
])
def test_an_option_that_names_nothing_is_an_error(options, said):
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=said):
        compare({"a": layer}, small(2, 2), layer, **options)


@pytest.mark.parametrize("modules, inputs, said", [
    ({}, (small(2),), "no modules"), ({"a": gelu}, (), "inputs: they hold no tensor"),
    ({"a": gelu}, ([1.0],), "inputs: they hold no tensor"),
    ({"a": gelu}, "x", "inputs: a str was given; give a tensor"),
    ({"a": gelu}, (small(2).to(torch.float8_e4m3fn),), "inputs in float8_e4m3fn: give float64"),
    ({"a": nn.Linear(2, 2, device="meta")}, (small(2),), "on cpu, meta: move them to one device"),
])
def test_what_can_not_be_compared_is_named(modules, inputs, said):
    with pytest.raises(ValueError, match=said):
        compare(modules, inputs, gelu)


def test_gradients_go_by_canonical_names():
    """Those of step 4's block too, whose parameters have names of their own."""
    values, x, _ = case(BlockConfig(2, 24, 32, 2, ffn_hidden_size=80))
    block, of_step_4 = (steps.load(step).build(BlockConfig(2, 24, 32, 2, ffn_hidden_size=80), values, "cpu")
                        for step in (2, 4))
    found = compare({"step 4": of_step_4}, (x,), block, rounds=6).results["step 4"]
    assert {f"gradient of {name}" for name in values} < checked_of(found).keys()


def test_a_compiled_module_has_the_names_it_had():
    module = nn.Linear(2, 2)
    assert named_parameters(torch.compile(module)).keys() == {"weight", "bias"}
    assert named_parameters(gelu) == {}


@pytest.mark.gpu
def test_on_a_gpu_a_graph_is_timed_too():
    found = compare({"by hand": gelu_by_hand, "library": gelu}, (small(512, 512).cuda(),), gelu, rounds=6).results
    for run in found.values():
        assert run.status == "ok"
        assert all(len(run.samples(mode, launch)) == 6 for mode in MODES for launch in LAUNCHES)
    assert found["by hand"].value(FORWARD, "launches") > found["library"].value(FORWARD, "launches") == 1
