"""Other libraries' layers are the same block, and are compared with their like."""
import functools
import os
import re

import pytest
import torch
from conftest import case, errors, worst
from made_records import both, made

from benchmarks import charts, peers, records
from common import PRESETS, BlockConfig, evidence, parameters

pytestmark = pytest.mark.unit


@pytest.fixture
def layer_norm_as_before():
    """The process normalises afterwards as it would have without the test."""
    yield
    peers.choose_layer_norm(True)


KINDS = {"nn.TransformerEncoderLayer": peers.EncoderLayer, "GPT2Block": peers.GPT2, "te": peers.TransformerLayer}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_peer_has_every_canonical_parameter(kind):
    assert kind.parameter_names.keys() == parameters.shapes(PRESETS["tiny"]).keys()


@pytest.mark.parametrize("name", ["nn.TransformerEncoderLayer", "GPT2Block"])
def test_a_peer_is_the_same_block(name):
    """In FP64: the same parameters, causal, the same GELU, every gradient."""
    if name == "GPT2Block":
        pytest.importorskip("transformers")
    config = BlockConfig(2, 24, 32, 2, ffn_hidden_size=80)
    values, x, dy = case(config, dtype=torch.float64)
    block = peers.build(KINDS[name], False, config, values, "cpu")
    assert max(worst(errors(block, values, x, dy))) < 1e-12
    if name == "GPT2Block":
        import transformers
        assert block.engine == f"transformers {transformers.__version__}"


def test_a_peer_runs_under_autocast_as_a_step_does():
    config = BlockConfig(2, 16, 32, 2, amp_dtype=torch.bfloat16)
    values, x, dy = case(config)
    block = peers.build(peers.EncoderLayer, False, config, values, "cpu")
    forward, gradient = worst(errors(block, values, x, dy))
    assert 1e-4 < forward < 1e-2 and gradient < 3e-2 and block(x).dtype == torch.float32


@pytest.mark.transformer_engine
@pytest.mark.usefixtures("layer_norm_as_before")
@pytest.mark.parametrize("fp8, gate", [(False, 3e-3), (True, 1.8e-1)])
@pytest.mark.parametrize("output", [torch.float32, torch.float16])
def test_transformer_layer_is_the_same_block(fp8, gate, output):
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.float16)
    values, x, dy = case(config, "cuda")
    layer = functools.partial(peers.TransformerLayer, output_dtype=output, fp8=fp8)
    block = peers.build(layer, False, config, values, "cuda")
    for _ in range(3):
        found = errors(block, values, x, dy.to(output))
    assert max(worst(found)) < gate and block(x).dtype == output


@pytest.mark.transformer_engine
@pytest.mark.usefixtures("layer_norm_as_before")
@pytest.mark.skipif(os.environ.get("NVTE_NORM_FWD_USE_CUDNN") == "0", reason="NVTE_NORM_FWD_USE_CUDNN is 0")
def test_transformer_layer_normalises_by_its_own_kernels_and_tuned_as_step_4_does():
    """One process, in any order: what the backward runs is what its forward has set, too."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("step 4 normalises by Transformer Engine's own kernels on this GPU")
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.float16)
    values, x, dy = case(config, "cuda")
    layers = [functools.partial(peers.TransformerLayer, output_dtype=torch.float32, fp8=True, tuned=tuned)
              for tuned in (False, True)]
    own, tuned = (peers.build(layer, False, config, values, "cuda") for layer in layers)
    step_4 = peers.build_step_4(config, values, "cuda")

    def by_cudnn(block):
        ran = evidence.observe(lambda: block(x).backward(dy), torch.device("cuda"))
        return {direction: any(re.match(rf"ln_\w*{direction}", name) for name in ran) for direction in ("fwd", "bwd")}
    for block in (own, step_4, own, tuned, step_4):
        for _ in range(2):                                      # cuDNN builds its kernels at the first call
            block(x).backward(dy)
        expected = block is not own
        assert by_cudnn(block) == {"fwd": expected, "bwd": expected}, type(block)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_is_the_same_block(recipe, uncompiled):
    pytest.importorskip("torchao")
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.bfloat16)
    values, x, dy = case(config, "cuda")
    block = peers.build_torchao(recipe, config, values, "cuda")
    assert max(worst(errors(block, values, x, dy))) < 1.8e-1 and block.engine.startswith("torchao ")


def test_fp8_is_compared_with_step_4_and_the_rest_with_step_3():
    lines = [line for dtype in ("float32", "bfloat16") for name, ms in (
        ("3_compile", 4.0), ("4_transformer_engine", 2.0), ("GPT2Block", 6.0), ("te.TransformerLayer FP8", 2.2),
        ("torchao float8 rowwise, compiled", 3.0)) for line in made(
            name, both([ms] * 6, [2 * ms] * 6), study="peers", parameter_dtype=dtype)]
    text = peers.text(lines)
    rows = {row.split("  ")[0]: row.split()[-4:] for row in text.splitlines() if "[" in row and "]" in row}
    assert rows["GPT2Block"] == ["3:", "1.500", "[1.500,", "1.500]"]
    assert rows["te.TransformerLayer FP8"] == ["4:", "1.100", "[1.100,", "1.100]"]
    assert rows["torchao float8 rowwise, compiled"][:2] == ["4:", "1.500"]
    runs = records.runs(lines)
    assert all(peers.ours(run, runs).info["parameter_dtype"] == run.info["parameter_dtype"] for run in runs)


def test_the_chart_has_the_ratios_of_both_passes_and_an_arrow_for_what_lies_beyond(tmp_path, monkeypatch):
    lines = [line for name, forward, backward in (("3_compile", 1.0, 2.0), ("GPT2Block", 3.0, 1.9))
             for line in made(name, both([forward] * 6, [backward] * 6))]
    figures = []
    monkeypatch.setattr(charts, "save", lambda figure, stem, recorded: figures.append((figure, stem)))
    peers.draw(lines, str(tmp_path / "peers"))
    ((figure, stem),) = figures
    assert [stem] == peers.chart_stems(lines, str(tmp_path / "peers"))
    for axis, title, marker, text in zip(figure.axes, ("float32, forward", "forward+backward"), (">", "o"),
                                         ("3.000", "0.950"), strict=True):
        assert axis.get_title(loc="left") == title and axis.texts[0].get_text().strip() == text
        dots = [line for line in axis.lines if line.get_marker() in ("o", ">")]
        assert [dot.get_marker() for dot in dots] == [marker]
        left, right = axis.get_xlim()
        assert all(left < dot.get_xdata()[0] < right for dot in dots)


def test_missing_packages_are_rows_with_their_reason(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    found = {case.name: case.missing for case in peers.cases(PRESETS["tiny"], torch.float32, torch.device("cpu"))}
    assert found["GPT2Block"] == found["GPT2Block, compiled"] == "transformers is not installed"
    assert "GPU" in found["torchao float8 rowwise, compiled"] and found["te.TransformerLayer FP8, y in float32"]
    assert found["nn.TransformerEncoderLayer"] == "" and len(found) == 14


def test_published_figures_stand_beside_as_published():
    text = peers.text(made("3_compile", both([1.0] * 6, [2.0] * 6)))
    assert "as published by others, not measured here" in text and "28.6 ms" in text and "quickstart.ipynb" in text


def test_the_versions_of_other_libraries_are_said_where_records_hold_them():
    times = both([1.0] * 6, [2.0] * 6)
    ours = made("3_compile", times) + made("te.TransformerLayer FP8", times, engine="Transformer Engine 2.20.2")
    lines = ours + [line for name, engine in (("GPT2Block", "transformers 5.17.0"), ("GPT2Block, compiled",
                    "transformers 5.17.0"), ("torchao float8 rowwise, compiled", "torchao 0.18.0"))
                    for line in made(name, times, engine=engine)]
    assert "\nWith transformers 5.17.0, torchao 0.18.0.\n" in peers.text(lines) and "With" not in peers.text(ours)


def test_a_pass_that_an_interrupted_run_did_not_reach_says_so():
    text = peers.text([line for name in ("3_compile", "GPT2Block") for line in made(
        name, {("forward", "eager"): [1.0] * 6}, study="peers")])
    forward, both_passes = text.split("forward+backward, parameters")
    assert "not timed" not in forward and both_passes.count("ok, not timed") == 2


def test_only_some_peers_beside_our_steps(study_main, monkeypatch):
    monkeypatch.setattr(peers.Study, "prepare", lambda self, case: prepared.append(case.name))
    monkeypatch.setattr(peers.Study, "time", lambda self, mode: None)
    monkeypatch.setattr(peers.Study, "show", lambda self, *_: 0)
    prepared = []
    assert study_main(peers, "--only", "encoder")[0] == 0
    assert prepared == 2 * ["3_compile", "4_transformer_engine", "nn.TransformerEncoderLayer",
                            "nn.TransformerEncoderLayer, compiled"]
    prepared.clear()
    assert study_main(peers, "--only", "encoder", "--param-dtype", "amp")[0] == 0 and len(prepared) == 4
    prepared.clear()
    assert study_main(peers, "--only", "nn.,GPT2", "--param-dtype", "amp")[0] == 0 and len(prepared) == 6
    status, _, err = study_main(peers, "--only", "llama")
    assert status == 2 and "no such peer; give a part of GPT2Block, " in err and err.count("\n") == 1


def test_a_cpu_without_16_bit_matmuls_has_one_setting(study_main, monkeypatch, a_cpu_without_bfloat16):
    prepared = []
    monkeypatch.setattr(peers.Study, "prepare", lambda self, case: prepared.append((case.name, case.parameter_dtype)))
    monkeypatch.setattr(peers.Study, "time", lambda self, mode: None)
    monkeypatch.setattr(peers.Study, "show", lambda self, *_: 0)
    assert study_main(peers)[0] == 0
    assert len(prepared) == len(set(prepared)) and {dtype for _, dtype in prepared} == {torch.float32}
    config = BlockConfig(2, 16, 32, 2, amp_dtype=None)
    values, x, dy = case(config)
    assert max(worst(errors(peers.build(peers.EncoderLayer, False, config, values, "cpu"), values, x, dy))) < 1e-5
