"""Other libraries' layers are the same block, and are compared with their like."""
import functools
import json
import os
import re

import pytest
import torch

from benchmarks import studies
from benchmarks.records.read import runs
from benchmarks.show import study as frame
from benchmarks.studies import peers
from benchmarks.studies.peers import blocks, tables
from common import PRESETS, BlockConfig, parameters, steps
from common.block import evidence
from common.measure.session import Session
from common.runtime.iteration import BOTH, FORWARD
from tests.helpers.blocks import case, errors, worst
from tests.helpers.made_records import both, made
from tests.helpers.said import one_line

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")
STUDY = studies.load("peers")
KINDS = {"nn.TransformerEncoderLayer": blocks.EncoderLayer, "GPT2Block": blocks.GPT2, "te": blocks.TransformerLayer}
OUR_FP8 = {"precision": "FP8", "output": "y in float32"}


@pytest.fixture
def layer_norm_as_before():
    """The process normalises afterwards as it would have without the test."""
    yield
    blocks.choose_layer_norm(True)


def recorded(name: str, forward: float, backward: float, **more) -> list[dict]:
    """The records of one peer, or of a step, in milliseconds of the two passes."""
    if name == "4_transformer_engine":
        more = {"matmul": "float8"} | more
    elif name == "te.TransformerLayer":
        more = {"matmul": "float8", "variant": OUR_FP8, "traits": peers.IN_FP8} | more
    elif name == "torchao float8":
        more = {"matmul": "float8", "variant": {"recipe": "rowwise", "compiled": True},
                "traits": peers.OF_TORCHAO} | more
    return made(name, both([forward] * 6, [backward] * 6), study="peers", **more)


# ------------------------------------------------------------------------------------------------------ the same block


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
    block = blocks.build(KINDS[name], False, config, values, "cpu")
    assert max(worst(errors(block, values, x, dy))) < 1e-12
    if name == "GPT2Block":
        import transformers
        assert str(block.engine) == f"transformers {transformers.__version__}"


def test_a_peer_runs_under_autocast_as_a_step_does():
    config = BlockConfig(2, 16, 32, 2, amp_dtype=torch.bfloat16)
    values, x, dy = case(config)
    block = blocks.build(blocks.EncoderLayer, False, config, values, "cpu")
    forward, gradient = worst(errors(block, values, x, dy))
    assert 1e-4 < forward < 1e-2 and gradient < 3e-2 and block(x).dtype == torch.float32


def test_a_peer_without_autocast_computes_in_fp32():
    config = BlockConfig(2, 16, 32, 2, amp_dtype=None)
    values, x, dy = case(config)
    assert max(worst(errors(blocks.build(blocks.EncoderLayer, False, config, values, "cpu"), values, x, dy))) < 1e-5


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_peer_is_compiled_in_place_as_step_3_is(compiled, uncompiled):
    """Its parameters keep their names."""
    config = BlockConfig(2, 16, 32, 2, amp_dtype=None)
    values, x, dy = case(config)
    block = blocks.build(blocks.EncoderLayer, compiled, config, values, "cpu")
    assert (block._compiled_call_impl is not None) == compiled
    assert max(worst(errors(block, values, x, dy))) < 1e-5


@pytest.mark.transformer_engine
@pytest.mark.usefixtures("layer_norm_as_before")
@pytest.mark.parametrize("fp8, gate", [(False, 3e-3), (True, 1.8e-1)])
@pytest.mark.parametrize("output", [torch.float32, torch.float16])
def test_transformer_layer_is_the_same_block(fp8, gate, output):
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.float16)
    values, x, dy = case(config, "cuda")
    layer = functools.partial(blocks.TransformerLayer, output_dtype=output, fp8=fp8)
    block = blocks.build(layer, False, config, values, "cuda")
    for _ in range(3):
        found = errors(block, values, x, dy.to(output))
    assert max(worst(found)) < gate and block(x).dtype == output


@pytest.mark.transformer_engine
@pytest.mark.usefixtures("layer_norm_as_before")
@pytest.mark.skipif(os.environ.get("NVTE_NORM_FWD_USE_CUDNN") == "0", reason="NVTE_NORM_FWD_USE_CUDNN is 0")
def test_transformer_layer_normalises_by_its_own_kernels_or_tuned():
    """Tuned as step 4 does. One process, in any order: what the backward runs is what its forward has set, too."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("step 4 normalises by Transformer Engine's own kernels on this GPU")
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.float16)
    values, x, dy = case(config, "cuda")
    layers = [functools.partial(blocks.TransformerLayer, output_dtype=torch.float32, fp8=True, tuned=tuned)
              for tuned in (False, True)]
    own, tuned = (blocks.build(layer, False, config, values, "cuda") for layer in layers)
    step_4 = blocks.build_step_4(config, values, "cuda")

    def by_cudnn(block):
        ran = evidence.observe(lambda: block(x).backward(dy), torch.device("cuda"))
        return {direction: any(re.match(rf"ln_\w*{direction}", name) for name in ran) for direction in ("fwd", "bwd")}
    for block in (own, step_4, own, tuned, step_4):
        for _ in range(2):                                      # cuDNN builds its kernels at the first call
            block(x).backward(dy)
        expected = block is not own
        assert by_cudnn(block) == {"fwd": expected, "bwd": expected}, type(block)


@pytest.mark.gpu
@pytest.mark.parametrize("residual_in_16_bits", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_is_the_same_block(recipe, residual_in_16_bits, uncompiled):
    pytest.importorskip("torchao")
    config = BlockConfig(2, 128, 256, 4, amp_dtype=torch.bfloat16)
    values, x, dy = case(config, "cuda")
    block = blocks.build_torchao(recipe, config, values, "cuda", residual_in_16_bits)
    assert max(worst(errors(block, values, x, dy))) < 1.8e-1 and block.engine.name == "torchao"


# -------------------------------------------------------------------------------------------- compared with their like


def test_fp8_is_compared_with_step_4_and_the_rest_with_step_3():
    """Of the same dtype and of the same process."""
    lines = []
    for dtype in ("float32", "bfloat16"):
        for name, ms in (("3_compile", 4.0), ("4_transformer_engine", 2.0), ("GPT2Block", 6.0),
                         ("te.TransformerLayer", 2.2), ("torchao float8", 3.0)):
            lines += recorded(name, ms, 2 * ms, parameter_dtype=dtype)
    told = {}
    for row in STUDY.report(lines).splitlines():
        if "[" in row and "]" in row:
            told[row.split("  ")[0]] = row.split()[-5:-1]
    assert told["GPT2Block"] == ["3:", "1.500", "[1.500,", "1.500]"]
    assert told["te.TransformerLayer, FP8, y in float32"] == ["4:", "1.100", "[1.100,", "1.100]"]
    assert told["torchao float8, rowwise, compiled"][:2] == ["4:", "1.500"]
    assert told["4_transformer_engine"][:2] == ["3:", "0.500"] and "3_compile" not in told
    its_runs = runs(lines)
    for run in its_runs:
        assert tables.ours(run, its_runs).info["parameter_dtype"] == run.info["parameter_dtype"]
    (elsewhere,) = runs(recorded("GPT2Block", 6.0, 6.0, run="another"))
    assert tables.ours(elsewhere, its_runs) is None


def test_what_is_as_fast_as_ours_says_whether_that_is_sure():
    lines = recorded("3_compile", 1.0, 1.0) + recorded("GPT2Block", 1.0, 1.2)
    forward, both_passes = STUDY.report(lines).split("forward+backward, parameters")
    assert "3: 1.000 [1.000, 1.000] SAME" in forward and re.search(r"3: 1.200 \[1.200, 1.200\] +1.200\n", both_passes)


def test_the_best_launch_each_and_both_launched_one_by_one_stand_side_by_side():
    """Ours is faster by graph, and slower eager."""
    lines = []
    for name, eager, graph in (("4_transformer_engine", 4.0, 1.0), ("torchao float8", 2.0, 1.5)):
        ms = {(mode, launch): [time] * 6 for mode in (FORWARD, BOTH) for launch, time in (("eager", eager),
                                                                                       ("graph", graph))}
        variant = {} if name.startswith("4") else {"recipe": "rowwise", "compiled": True}
        lines += made(name, ms, study="peers", matmul="float8", variant=variant)
    text = STUDY.report(lines)
    assert "step: best launch each [95 %]    eager" in text
    assert re.search(r"torchao float8, rowwise, compiled .*4: 1.500 \[1.500, 1.500\] +0.500\n", text)
    assert '"eager": both launched one by one' in text


def test_eager_losses_are_said_in_a_line_each(tmp_path):
    lines = []
    for name, eager, graph in (("4_transformer_engine", 4.0, 1.0), ("torchao float8", 2.0, 1.5),
                               ("te.TransformerLayer", 8.0, 0.5)):
        ms = {(FORWARD, "eager"): [eager] * 6, (FORWARD, "graph"): [graph] * 6}
        variant = {} if name.startswith("4") else {"as": "tuned"}
        lines += made(name, ms, study="peers", matmul="float8", variant=variant)
    path = tmp_path / "peers.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said = tables.eager_losses(path).splitlines()
    assert said[0].endswith("these are faster than ours where both are launched one by one:")
    assert said[2:] == ["- forward, torchao float8, tuned: 0.50 of step 4's time (best launch each: 1.50)"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines if line["model"]["backend"][0] != "t"))
    assert tables.eager_losses(path).endswith("no peer is faster than ours where both are launched one by one.")


def test_columns_that_say_nothing_are_left_out():
    lines = recorded("3_compile", 1.0, 1.0) + recorded("GPT2Block", 1.0, 1.2)
    assert "  status" not in STUDY.report(lines) and "  J " not in STUDY.report(lines)
    lines += made("torchao float8", {}, study="peers", status="skipped", reason="torchao is not installed")
    assert "  status" in STUDY.report(lines)


@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16])
def test_a_residual_in_16_bits_is_the_same_block_and_gives_back_the_dtype_of_x(amp_dtype, uncompiled):
    config = BlockConfig(2, 16, 32, 2, amp_dtype=amp_dtype)
    values, x, dy = case(config)
    block, plain = (steps.load(2).build(config, values, "cpu") for _ in range(2))
    blocks.keep_residual_in_16_bits(block, config)
    seen = []
    block.ln_2.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    forward, gradient = worst(errors(block, values, x, dy))
    assert forward < 1e-2 and gradient < 3e-2 and block(x).dtype == torch.float32
    assert set(seen) == {amp_dtype} and not torch.equal(block(x), plain(x))


def test_there_is_a_table_for_each_dtype_and_each_transformer_engine():
    lines = recorded("3_compile", 1.0, 1.0) + recorded("3_compile", 1.0, 1.0, parameter_dtype="bfloat16")
    for line in lines[len(lines) // 2:]:
        line["dependencies"]["transformer_engine"] = {"version": "2.9.0"}
    text = STUDY.report(lines)
    assert "\nforward, parameters in float32\n" in text
    assert "\nforward, parameters in bfloat16, Transformer Engine 2.9.0\n" in text


def test_the_chart_has_the_ratios_of_both_passes(tmp_path, monkeypatch):
    """An arrow stands for what lies beyond its end."""
    figures = []
    monkeypatch.setattr("benchmarks.show.charts.save", lambda figure, stem, lines: figures.append((figure, stem)))
    lines = recorded("3_compile", 1.0, 2.0) + recorded("GPT2Block", 3.0, 1.9)
    frame.draw(STUDY, str(tmp_path / "peers"), lines)
    ((figure, stem),) = figures
    assert stem == str(tmp_path / "peers-ratios")
    expected = (("float32, forward", ">", "3.000"), (BOTH, "o", "0.950"))
    for axis, (title, marker, text) in zip(figure.axes, expected, strict=True):
        assert axis.get_title(loc="left") == title and axis.texts[0].get_text().strip() == text
        (dot,) = (line for line in axis.lines if line.get_marker() in ("o", ">"))
        left, right = axis.get_xlim()
        assert dot.get_marker() == marker and left < dot.get_xdata()[0] < right


def test_without_a_peer_there_is_no_chart(capsys, tmp_path):
    frame.draw(STUDY, str(tmp_path / "peers"), recorded("3_compile", 1.0, 2.0))
    assert capsys.readouterr().err == "peers: no chart: no peer was timed beside ours\n"


def test_the_answer_is_the_peer_that_comes_nearest():
    """Forward+backward, whatever its dtype."""
    lines = recorded("3_compile", 1.0, 2.0) + recorded("4_transformer_engine", 1.0, 2.0)
    lines += recorded("GPT2Block", 0.5, 3.0) + recorded("te.TransformerLayer", 3.0, 2.5)
    assert STUDY.answer(lines) == ("te.TransformerLayer, FP8, y in float32 comes nearest: its time is 1.25 of ours, "
                                   "best launch each")


def test_published_figures_stand_beside_as_published():
    text = STUDY.report(made("3_compile", both([1.0] * 6, [2.0] * 6)))
    assert "as published by others, not measured here" in text and "28.6 ms" in text and "quickstart.ipynb" in text


def test_versions_of_other_libraries_are_said_where_records_hold_them():
    ours = recorded("3_compile", 1.0, 2.0) + recorded("te.TransformerLayer", 1.0, 2.0,
                                                      engine="Transformer Engine 2.20.2")
    lines = ours + recorded("GPT2Block", 1.0, 2.0, engine="transformers 5.17.0")
    lines += recorded("GPT2Block", 1.0, 2.0, engine="transformers 5.17.0", variant={"compiled": True})
    lines += recorded("torchao float8", 1.0, 2.0, engine="torchao 0.18.0")
    assert "\nWith transformers 5.17.0, torchao 0.18.0.\n" in STUDY.report(lines) and "With" not in STUDY.report(ours)


def test_a_pass_that_an_interrupted_run_did_not_reach_says_so():
    lines = []
    for name in ("3_compile", "GPT2Block"):
        lines += made(name, {(FORWARD, "eager"): [1.0] * 6}, study="peers")
    forward, both_passes = STUDY.report(lines).split("forward+backward, parameters")
    assert "not timed" not in forward and both_passes.count("ok, not timed") == 2


# ----------------------------------------------------------------------------------------------------- who is there


def test_missing_packages_are_rows_with_their_reason(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    missing = {peers._name(case): case.missing for case in peers.cases(PRESETS["tiny"], torch.float32, CPU)}
    assert missing["gpt2block"] == missing["gpt2block, compiled"] == "transformers is not installed"
    assert "GPU" in missing["torchao float8, rowwise, compiled"]
    assert missing["te.transformerlayer, fp8, y in float32"] and missing["nn.transformerencoderlayer"] == ""
    assert len(missing) == 16


def test_a_shape_that_fp8_does_not_take_leaves_out_what_is_in_fp8(monkeypatch):
    monkeypatch.setattr(peers.engine, "why_not", lambda *_: None)
    missing = {peers._name(case): case.missing
               for case in peers.cases(PRESETS["tiny"].replace(seq_len=7), torch.float32, CPU)}
    assert "divisible by 16" in missing["te.transformerlayer, fp8, tuned"]
    assert "divisible by 16" in missing["4_transformer_engine"]
    assert missing["te.transformerlayer, 16-bit, y in float32"] == missing["3_compile"] == ""


def test_peers_are_held_against_the_compiled_step_and_the_one_in_fp8():
    assert list(peers.OURS) == [steps.load(3), steps.load(4)]


@pytest.fixture
def prepared(monkeypatch, study_main):
    """prepared(*argv): which cases the command would measure, (name, parameters' dtype) each."""
    def call(*argv):
        found = []
        with monkeypatch.context() as patched:
            patched.setattr(Session, "measure", lambda self, group: found.extend(group.cases))
            patched.setattr("benchmarks.show.study.show", lambda *_: 0)
            assert study_main("peers", *argv)[0] == 0
        return [(peers._name(case), case.parameter_dtype) for case in found]
    return call


def test_only_some_peers_beside_our_steps(prepared, study_main):
    encoder = ["3_compile", "4_transformer_engine", "nn.transformerencoderlayer",
               "nn.transformerencoderlayer, compiled"]
    assert [name for name, _ in prepared("--only", "encoder")] == 2 * encoder
    assert [name for name, _ in prepared("--only", "encoder", "--param-dtype", "amp")] == encoder
    assert len(prepared("--only", "nn.,GPT2", "--param-dtype", "amp")) == 6
    assert [name for name, _ in prepared("--only", "tuned", "--param-dtype", "float32")][2:] == [
        "te.transformerlayer, fp8, tuned"]
    status, _, err = study_main("peers", "--only", "llama")
    assert status == 2
    assert one_line(err).endswith("no such peer; give a part of GPT2Block, nn.TransformerEncoderLayer, "
                                  "te.TransformerLayer, torchao float8")


@pytest.mark.parametrize("only", ["", ",", "encoder,"])
def test_an_empty_part_of_a_name_picks_no_peer(only, prepared, study_main):
    if only:
        assert study_main("peers", "--only", only)[0] == 2
    else:
        assert len(prepared("--only", only)) == len(prepared())


def test_both_settings_are_groups_of_their_own(prepared):
    found = prepared()
    dtypes = [dtype for _, dtype in found]
    in_fp32 = dtypes.count(torch.float32)
    assert dtypes == in_fp32 * [torch.float32] + (len(dtypes) - in_fp32) * [torch.bfloat16]
    assert in_fp32 == 16 and 0 < len(dtypes) - in_fp32 < 14      # in 16 bits there is nothing to cast


def test_a_cpu_without_16_bit_matmuls_has_one_setting(prepared, a_cpu_without_bfloat16):
    found = prepared()
    assert len(found) == len(set(found)) and {dtype for _, dtype in found} == {torch.float32}


@pytest.mark.parametrize("dtype, mixed", [(torch.float32, True), (torch.bfloat16, False)])
def test_autocast_is_off_where_parameters_have_16_bits_already(dtype, mixed):
    """It would run LayerNorm and softmax in FP32, and so slow the peer and flatter ours, which has it off there."""
    config = BlockConfig(2, 16, 32, 2, amp_dtype=torch.bfloat16)
    values, x, _ = case(config)
    block = blocks.build(blocks.EncoderLayer, False, config, {name: t.to(dtype) for name, t in values.items()}, "cpu")
    seen = []
    block.layer.norm1.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    block(x.to(dtype))
    assert seen == [mixed]


def test_rows_that_say_casts_compiled_and_tuned_have_them(monkeypatch):
    """Else two rows of Transformer Engine's layer would measure a third one again."""
    made = []

    def layer(config, dtype, output_dtype, fp8, tuned=False):
        made.append((fp8, tuned))
        return torch.nn.Identity()
    monkeypatch.setattr(peers, "TransformerLayer", layer)
    monkeypatch.setattr(blocks, "compile_gradient_casts", lambda block: made.append("casts compiled"))
    monkeypatch.setattr(blocks.parameters, "load", lambda block, values, device: block)
    config = BlockConfig(2, 16, 32, 2, amp_dtype=torch.bfloat16)
    builds = {}
    monkeypatch.setattr(peers, "block_case", lambda name, make, *_, variant, **__: builds.setdefault(
        (name, variant.get("as")), make))
    monkeypatch.setattr(peers, "step_case", lambda *_, **__: None)
    peers.cases(config, torch.float32, torch.device("cpu"))
    for row, expected in (("casts compiled", [(True, False), "casts compiled"]),
                          ("tuned", [(True, True), "casts compiled"])):
        made.clear()
        builds["te.TransformerLayer", row](config, {"mlp.fc.weight": torch.ones(1)}, "cpu")
        assert made == expected
