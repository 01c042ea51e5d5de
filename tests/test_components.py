"""Parts of the block and a user's own modules: held against FP64, compared, told in one table."""
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import case
from torch import nn

from benchmarks import components, records
from benchmarks.study import compare
from common import BlockConfig, oracle, parameters, report

pytestmark = pytest.mark.unit
CONFIG = BlockConfig(2, 24, 32, 2, ffn_hidden_size=80)


def gelu_by_hand(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return nn.functional.gelu(x, approximate="tanh")


def small(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ----------------------------------------------------------------------------------------------------------- compare


def test_functions_are_checked_and_timed_in_both_passes():
    found = compare({"by hand": gelu_by_hand, "library": gelu}, (small(8, 16),), gelu, rounds=6)
    first, second = found.results.values()
    assert (first.status, second.status) == ("ok", "ok") and first.errors.keys() == {"output", "gradient of input 0"}
    assert all(len(one.samples[mode, "eager"]) == 6 for one in (first, second) for mode in report.MODES)
    ratio, low, high = second.times(first, "forward")
    assert low <= ratio <= high
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["module", "status", "error"] and lines[2].split()[:3] == ["by", "hand", "ok"]


def test_gradients_of_parameters_are_compared_by_name():
    torch.manual_seed(0)
    good, bad = nn.Linear(8, 4), nn.Linear(8, 4)
    bad.load_state_dict(good.state_dict())
    bad.bias.register_hook(torch.zeros_like)
    found = compare({"good": good, "bad": bad}, (small(3, 8),), good, rounds=6)
    assert found.results["good"].status == "ok"
    assert (found.results["bad"].status, found.results["bad"].samples) == ("failed", {})
    assert "gradient of bias is off by 1.0e+00" in str(found)
    assert good.bias.grad is None and bad.weight.grad is None                     # the check leaves nothing behind


@pytest.mark.parametrize("wrong, said", [
    (lambda x: x, "the output is off by"),
    (lambda x: gelu(x).sum(), "it returns (), the reference a tensor (8, 16)"),
    (lambda x: (gelu(x),), "it returns tuple, the reference a tensor"),
    (lambda x: gelu(x) + math.nan, "the output is missing or not finite"),
    (lambda x: gelu(x.detach()) + 0 * x, "the gradient of input 0 is off by 1.0e+00"),
    (lambda x: gelu(x) if torch.is_grad_enabled() else torch.relu(x), "the output is off by"),
], ids=["another function", "another shape", "no tensor", "NaN", "no gradient", "another function without gradients"])
def test_what_is_another_function_is_not_timed(wrong, said):
    found = compare({"right": gelu, "wrong": wrong}, (small(8, 16),), gelu, rounds=6).results
    assert found["wrong"].status == "failed" and said in found["wrong"].reason and not found["wrong"].samples
    assert found["right"].status == "ok" and found["right"].samples


def test_what_is_compiled_again_fails_and_the_others_are_timed(fresh_dynamo):
    calls = []

    def changes(x):                                             # guarded on a Python value that moves
        calls.append(None)
        return gelu(x) + 0 * changes.value
    changes.value = 0.0
    compiled = torch.compile(changes, backend="eager", dynamic=False)

    def moving(x):
        changes.value += 1.0
        return gelu(x)
    found = compare({"compiled": compiled, "moving": moving}, (small(4, 4),), gelu, rounds=6).results
    assert found["compiled"].status == "failed" and "compiled again" in found["compiled"].reason
    assert found["moving"].status == "ok" and len(found["moving"].samples["forward", "eager"]) == 6


def test_integers_among_the_inputs_get_no_gradient():
    table = nn.Embedding(10, 4)
    ways = {"lookup": lambda ids, scale: table(ids) * scale, "gather": lambda ids, scale: table.weight[ids] * scale}
    found = compare(ways, (torch.arange(6), small(6, 4)), lambda ids, scale: table.weight.double()[ids] * scale, 6)
    assert all(one.status == "ok" and one.errors.keys() == {"output", "gradient of input 1"}
               for one in found.results.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_gates_follow_the_dtype(dtype):
    found = compare({"by hand": gelu_by_hand}, (small(64, 64, dtype=dtype),), gelu, rounds=6).results["by hand"]
    assert found.status == "ok" and 0 < found.errors["output"] < found.gate


def test_a_gate_of_ones_own():
    found = compare({"rough": lambda x: gelu(x) * 1.01}, (small(8, 8),), gelu, rounds=6, gates={"rough": 0.02}).results
    assert found["rough"].status == "ok" and found["rough"].errors["output"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("modules, inputs, said", [
    ({}, (small(2),), "no modules"), ({"a": gelu}, (), "inputs: give a tuple of tensors"),
    ({"a": gelu}, ([1.0],), "inputs: give a tuple of tensors"),
    ({"a": gelu}, (small(2).to(torch.float8_e4m3fn),), "inputs in torch.float8_e4m3fn: give float64"),
    ({"a": nn.Linear(2, 2, device="meta")}, (small(2),), "on cpu, meta: move them to one device"),
])
def test_what_can_not_be_compared_is_named(modules, inputs, said):
    with pytest.raises(ValueError, match=said):
        compare(modules, inputs, gelu)


@pytest.mark.gpu
def test_on_a_gpu_a_graph_is_timed_too():
    found = compare({"by hand": gelu_by_hand, "library": gelu}, (small(512, 512).cuda(),), gelu, rounds=6).results
    for one in found.values():
        assert one.status == "ok" and not one.no_graph and {launch for _, launch in one.samples} == {"eager", "graph"}
    assert sum(found["by hand"].kernels["forward"].values()) > sum(found["library"].kernels["forward"].values()) == 1


# -------------------------------------------------------------------------------------------------------- components


@pytest.mark.parametrize("part", components.PARTS)
def test_naive_and_tuned_are_one_function_of_the_canonical_parameters(part):
    values, x, _ = case(CONFIG, dtype=torch.float64)
    own = components.values_of(part, values)
    naive, tuned = (components.load(kind(part, CONFIG).double(), own) for kind in (components.naive, components.tuned))
    if part in ("block", "LayerNorm"):                         # their LayerNorm is in FP32, as the library's is
        naive, x = naive.float(), x.float()
    assert oracle.relative_error(naive(x), tuned(x.double())) < 1e-6
    if part == "block":
        assert oracle.relative_error(tuned(x.double()), oracle.block(x.double(), values, CONFIG)) < 1e-12


def test_a_part_has_every_parameter_it_needs_and_no_other():
    values = parameters.seeded(CONFIG)
    for part in components.PARTS:
        own = components.values_of(part, values)
        for kind in (components.naive, components.tuned):
            assert {name for name, _ in kind(part, CONFIG).named_parameters()} <= own.keys()


def test_a_study_of_the_parts(study_main, cheap_backend, tmp_path):
    path = tmp_path / "parts.jsonl"
    status, out, err = study_main(components, "--rounds", 6, "--json", path, "--chart", tmp_path / "parts", "--part",
                                  "attention", "--part", "LayerNorm")
    assert status == 0 and "Traceback" not in err, out
    table = [line.split() for line in out.splitlines() if line.startswith(("attention ", "LayerNorm "))]
    assert len(table) == 4 and all("skipped" in row for row in table)                    # two passes; FP8 on a CPU
    assert "Transformer Engine needs a GPU" in out and (tmp_path / "parts-speed-ups.png").exists()
    lines = records.read(path)
    assert components.text(lines) in out
    runs = {run.info["step"]: run for run in records.runs(lines)}
    assert runs["attention, tuned"].value("forward", "percent of limit", "eager") > 0
    limits = [runs["attention, tuned"].value(mode, "limit", "eager") for mode in report.MODES]
    assert limits[1] > 2 * limits[0]
    assert runs["attention, tuned"].value("forward", "rate", "eager") is None        # its FLOPs are not counted
    assert runs["attention, best known"].status == "skipped"
    assert len(runs["LayerNorm, naive"].samples("forward", "eager")) == 6


def test_parts_that_this_machine_can_not_hold_are_refused_before_linux_kills_the_process(study_main, monkeypatch):
    monkeypatch.setattr(components.machine, "memory_total", lambda device: 1024)
    status, out, err = study_main(components, "--rounds", 6, "--part", "LayerNorm")
    assert (status, out) == (3, "") and "components: out of memory: about " in err and err.count("\n") == 1


@pytest.mark.parametrize("percent, cell", [(99.6, "0.400 (100 %)"), (112.6, "0.400 (113 %, ERROR)"), (None, "0.400")])
def test_a_part_beyond_its_limit_is_an_error_of_the_limit(percent, cell):
    run = SimpleNamespace(status="ok", best=lambda mode: "eager", value=lambda *_: percent, best_ms=lambda mode: 0.4)
    assert components._cell(run, "forward") == cell


def test_a_wrong_part_is_a_row_and_the_others_are_timed(study_main, monkeypatch, cheap_backend):
    monkeypatch.setattr(components.NaiveLayerNorm, "forward", lambda self, x: x * self.weight)
    status, out, _ = study_main(components, "--rounds", 6, "--part", "LayerNorm")
    assert status == 1 and "LayerNorm, naive, no autocast: failed: the output is off by" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("LayerNorm "))
    assert row[1] == "failed" and float(row[2]) > 0


def test_what_was_not_compiled_is_no_compiled_part(study_main, monkeypatch):
    monkeypatch.setattr(components.harness, "compile_in_place", lambda module: None)
    status, out, _ = study_main(components, "--rounds", 6, "--part", "LayerNorm")
    assert status == 1 and "LayerNorm, compiled, no autocast: failed: torch.compile compiled nothing" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("LayerNorm "))
    assert row.count("failed") == 1


def test_gradients_go_by_canonical_names():
    """Those of step 4's block too, whose parameters have names of their own."""
    values, x, _ = case(CONFIG)
    blocks = {step: components.steps.load(step).build(CONFIG, values, "cpu") for step in (2, 4)}
    found = compare({"step 4": blocks[4]}, (x,), blocks[2], rounds=6).results["step 4"]
    assert {f"gradient of {name}" for name in values} < found.errors.keys()


def test_an_unknown_part_is_one_line(study_main):
    status, _, err = study_main(components, "--part", "head")
    assert status == 2 and err.startswith("components: error: argument --part") and err.count("\n") == 1


@pytest.mark.transformer_engine
@pytest.mark.parametrize("part", components.PARTS)
def test_the_best_known_part_passes_its_check(part):
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.float16)
    values, device = parameters.seeded(config), torch.device("cuda")
    found, missing = components.modules(part, config, values, device, torch.float16)
    assert not missing
    x = small(2, 128, 256, dtype=torch.float16).cuda()
    if part != "LayerNorm":
        components._calibrate(found["best known"], x)
    own = {name: value.to(device, torch.float64) for name, value in components.values_of(part, values).items()}
    reference = components.load(components.tuned(part, config.replace(amp_dtype=None)).to(device, torch.float64), own)
    results = compare({"best known": found["best known"]}, (x,), reference, 6,
                      {"best known": components.FP8_GATES.get(part, 2e-3)}).results
    assert results["best known"].status == "ok", results["best known"].reason
