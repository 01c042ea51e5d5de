"""The study of recipes: what it records, shows and refuses."""
import json
import math
import re

import pytest
import torch
from torch import nn

from benchmarks import studies
from benchmarks.recipes import checking, emulated, layers, scaled, tiny_gpt
from benchmarks.recipes.emulated import Linear
from benchmarks.recipes.recipe import RECIPES
from benchmarks.records.read import read, runs, values
from benchmarks.studies import recipes
from benchmarks.studies.recipes import blocks, speed, split, tables, timed
from common.block import parameters
from common.block.config import PRESETS
from common.outcome import Failed
from common.report.record import record
from common.report.result import Result
from common.runtime import compiler
from tests.helpers.made_records import FACTS

unit, integration = pytest.mark.unit, pytest.mark.integration
STUDY = studies.load("recipes")
CPU = torch.device("cpu")
NO_TORCHAO = "FP8 matmuls need a GPU of "
needs_fp8 = pytest.mark.skipif(not scaled.on_a_cpu(), reason="this torch multiplies FP8 on a GPU alone")
SHORT = ["--device", "cpu", "--steps", "2", "--seeds", "2"]


@integration
def test_every_recipe_is_looked_at_and_trained_by(study_main, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "OUTLIERS", (1e2, 1e5))
    path = tmp_path / "records.jsonl"
    status, out, _ = study_main("recipes", *SHORT, "--json", str(path), "--chart", str(tmp_path / "chart"))
    assert status == 0, out
    lines = read(path)
    assert STUDY.report(lines) in out and (tmp_path / "chart-outliers.png").exists()
    for recipe in RECIPES.values():
        rows = re.findall(rf"^{re.escape(recipe.name)}  .*$", out, re.MULTILINE)
        assert len(rows) == (1 if recipe.is_inference else 3), rows
    assert "overflows" in next(row for row in out.splitlines() if row.startswith("FP16"))
    assert "in FP8 with one scale" in STUDY.answer(lines) and "in MXFP4" in STUDY.answer(lines)


@integration
def test_one_recipe_is_asked_for(study_main, tmp_path):
    status, out, _ = study_main("recipes", *SHORT, "--recipe", "NVFP4")
    assert status == 0 and "NVFP4" in out and "MXFP8" not in out and "FP32" in out


@unit
def test_an_error_that_rounding_does_not_explain_fails(study_main, monkeypatch):
    monkeypatch.setattr(emulated.Product, "value", lambda self: self.left @ self.right.T)
    status, out, _ = study_main("recipes", *SHORT, "--recipe", "BF16")
    assert status == 1 and re.search(r"BF16, normal: failed: the error of y is .*, and rounding explains", out), out


@unit
@pytest.mark.parametrize("share, fails", [(0.69, True), (0.71, False), (1.14, False), (1.16, True)])
def test_the_range_of_an_error(share, fails, monkeypatch):
    monkeypatch.setattr(checking, "error", lambda product: checking.Error(share, 1.0))
    given = checking.operands(1.0, 0, CPU)
    if not fails:
        checking.errors(RECIPES["BF16"], given)
        return
    with pytest.raises(Failed, match=r"rounding explains 7\.0e-01 to 1\.1e"):
        checking.errors(RECIPES["BF16"], given)


@unit
def test_a_loss_that_is_not_finite_fails(study_main, monkeypatch):
    monkeypatch.setattr(recipes, "losses", lambda recipe, *others: [math.nan] if recipe else [1.0])
    status, out, _ = study_main("recipes", *SHORT, "--recipe", "NVFP4")
    assert status == 1 and "NVFP4, training: failed: the loss is not finite" in out


@integration
def test_layers_are_timed_beside_16_bits(study_main, tmp_path):
    path = tmp_path / "records.jsonl"
    words = ["--device", "cpu", "--part", "layers", "--shapes", "32,64,48", "--rounds", "6", "--recipe", "FP8 current"]
    status, out, _ = study_main("recipes", *words, "--json", str(path))
    assert status == 0, out
    assert {run.status for run in runs(read(path)) if run.variant.get("by") == layers.TE} == {"skipped"}
    assert re.search(r"^a layer, tokens x K x N: 32 x 64 x 48$", out, re.MULTILINE)
    [before, _] = out.split("\nwhose gain, f+b: a layer, tokens x K x N: 32 x 64 x 48\n")
    rows = re.findall(r"^(BF16|FP16|FP8 current) +(16 bits|torch) .*$", before, re.MULTILINE)
    in_fp8 = [("FP8 current", "torch")] if scaled.on_a_cpu() else []
    assert rows == 2 * [("BF16", "16 bits"), ("FP16", "16 bits"), *in_fp8]           # of time, and where it goes
    assert "normal" not in out and "trained" not in out


@integration
def test_sizes_that_8_bits_can_not_take_are_a_line(study_main):
    words = ["--device", "cpu", "--part", "layers", "--shapes", "1,256,256", "--rounds", "6"]
    status, out, _ = study_main("recipes", *words, "--recipe", "FP8 row", "--recipe", "INT8 weights")
    why = "x has 1 rows: FP8 takes multiples of 16" if scaled.on_a_cpu() else "torch "
    assert status == 0 and f"FP8 row, torch: skipped: {why}" in out, out
    assert re.search(r"^INT8 weights +torch, weights alone ", out, re.MULTILINE), out
    words = ["--device", "cpu", "--part", "layers", "--shapes", "16,64,48", "--rounds", "6", "--recipe", "INT4 weights"]
    status, out, _ = study_main("recipes", *words)
    assert status == 0 and "weights alone: skipped: 48 x 64 does not divide into blocks of 1 x 128" in out, out


@integration
def test_a_layer_that_is_wrong_is_not_timed(study_main, monkeypatch):
    monkeypatch.setattr(layers.Plain, "forward", lambda self, x: x @ self.weight.t() * 1.01)
    words = ["--device", "cpu", "--part", "layers", "--shapes", "32,64,48", "--rounds", "6", "--recipe", "FP8 row"]
    status, out, _ = study_main("recipes", *words)
    assert status == 1 and re.search(r"BF16, 16 bits: failed: the error of y is .*, and rounding explains", out), out


@needs_fp8
@integration
def test_blocks_are_timed_beside_step_3(study_main, tmp_path, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)      # what it computes stays the same
    path = tmp_path / "records.jsonl"
    words = ["--device", "cpu", "--part", "blocks", "--preset", "tiny", "--rounds", "6", "--recipe", "FP8 current",
             "--recipe", "FP8 delayed"]
    status, out, _ = study_main("recipes", *words, "--json", str(path))
    assert status == 0, out
    assert re.search(r"^a block, B2 S64 E64 H4 D16 F256$", out, re.MULTILINE)
    rows = re.findall(r"^(BF16|FP16|FP8 current) +(step 3(?:, torch)?) +\d", out, re.MULTILINE)
    assert set(rows) == {("BF16", "step 3"), ("FP16", "step 3"), ("FP8 current", "step 3, torch")}
    assert re.search(r"^whose gain, f\+b: a block", out, re.MULTILINE)
    skipped = {run.variant["by"] for run in runs(read(path)) if run.status == "skipped"}
    assert skipped == {blocks.TORCHAO, blocks.STEP_4, blocks.FP8_ATTENTION}
    assert "FP8 delayed, step 4, FP8 attention: skipped: Transformer Engine needs a GPU" in out


@needs_fp8
@integration
def test_a_block_by_torch_is_compiled_whole():
    config = PRESETS["tiny"].replace(amp_dtype=torch.bfloat16)
    values = parameters.seeded(config, 0)
    block = blocks.by_torch(RECIPES["FP8 row"], config, values, CPU)
    assert compiler.is_compiled(block) and set(dict(block.named_parameters())) == set(values)
    block._compiled_call_impl = None
    block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    block(torch.randn(2, 64, 64, requires_grad=True)).sum().backward()
    assert block.mlp.fc.weight.grad.abs().max() > 0


@pytest.mark.gpu
@integration
def test_each_block_passes_its_check_on_a_gpu(study_main, tmp_path):
    path = tmp_path / "records.jsonl"
    status, out, _ = study_main("recipes", "--device", "cuda", "--part", "blocks", "--batch-size", "4", "--seq-len",
                                "128", "--hidden-size", "256", "--num-heads", "2", "--rounds", "6", "--json", str(path))
    assert status == 0, out
    allowed = scaled.why_not(RECIPES["FP8 block 128"], torch.device("cuda")) == ""
    found = {(run.case["name"], run.variant["by"]): run.status for run in runs(read(path))}
    assert {name for (name, way), status in found.items() if (way, status) == (blocks.TORCH, "ok")} == (
        {"FP8 current", "FP8 current, dweight in BF16", "FP8 row", "FP8 block 128"} if allowed else set())
    assert not [key for key, status in found.items() if status == "failed"]


@needs_fp8
@unit
def test_a_block_that_8_bits_can_not_take_is_a_line():
    config = PRESETS["tiny"].replace(seq_len=63)
    every = blocks.cases(config, [RECIPES["FP8 row"]], CPU)
    assert [case.missing[:26] for case in every if case.traits.fp8] == ["FP8 needs batch_size * seq", *[NO_TORCHAO]]
    assert not any(case.missing for case in every if not case.traits.fp8)


@unit
def test_each_recipe_has_a_block_by_each_way_that_has_it():
    every = blocks.cases(PRESETS["tiny"], list(RECIPES.values()), CPU)
    found = {(case.name, case.variant["by"]) for case in every}
    of_torch = {"FP8 current", "FP8 current, dweight in BF16", "FP8 row", "FP8 block 128"}
    in_te = {"FP8 delayed", "FP8 current", "FP8 block 128", "MXFP8", "NVFP4"}
    assert found == {("BF16", "step 3"), ("FP16", "step 3"), *((name, "step 3, torch") for name in of_torch),
                     *((name, "step 4") for name in in_te), ("FP8 delayed", "step 4, FP8 attention"),
                     ("FP8 current", "step 3, torchao"), ("FP8 row", "step 3, torchao")}
    [delayed] = (case for case in every if (case.name, case.variant["by"]) == ("FP8 delayed", "step 4"))
    [current] = (case for case in every if (case.name, case.variant["by"]) == ("FP8 current", "step 4"))
    assert delayed.traits.fp8 == "delayed" and current.traits.fp8 == "dynamic"
    assert all(case.config.amp_dtype == (torch.float16 if case.name == "FP16" else torch.bfloat16) for case in every)


@needs_fp8
@integration
def test_a_map_says_from_how_many_tokens_on_it_pays(study_main):
    words = ["--device", "cpu", "--part", "map", "--rounds", "6", "--recipe", "FP8 current", "--recipe", "INT8 weights"]
    status, out, _ = study_main("recipes", *words, "--shapes", "32,64,48", "--shapes", "64,64,48")
    assert status == 0 and re.search(r"^FP8 current +torch +64 x 48 +\d\.\d\d.*(never|32|64)$", out, re.MULTILINE), out
    [_, served] = out.split("x BF16, forward")
    assert re.search(r"^INT8 weights +torch, weights alone +64 x 48 +\d.*(never|32|64)$", served, re.MULTILINE), out


@unit
@pytest.mark.parametrize("lows, least", [
    ({16: 1.01, 32: 1.2}, "16"), ({16: 0.99, 32: 1.2}, "32"), ({16: 1.2, 32: 1.0}, "never"),
    ({16: 1.0, 32: 1.01}, "32"),
    ({16: 1.5, 32: 0.9, 64: 1.1}, "64")])
def test_a_recipe_pays_where_all_that_are_longer_do(lows, least):
    times = {tokens: (low + 0.1, low, low + 0.2) for tokens, low in lows.items()}
    assert speed.pays_from(times) == least
    mirrored = {-tokens: of for tokens, of in times.items()}
    assert speed.pays_up_to(mirrored).removeprefix("-") == least


@unit
def test_a_gain_is_bounded_by_its_share():
    assert speed.amdahl(1.0, 1.7) == pytest.approx(1.7) and speed.amdahl(0.0, 1.7) == 1.0
    assert speed.amdahl(0.5, 2.0) == pytest.approx(4 / 3) and speed.amdahl(0.5, 1e9) == pytest.approx(2.0)


@unit
def test_whose_gain_it_is_adds_up():
    """BF16 takes 10 ms, 8 of them in matmuls; FP8 takes 8: 4 in matmuls, 2 in casts, 1 of rest, and waits 1."""
    in_fp8 = {split.MATMULS: 4.0, split.REST: 1.0, split.CASTS: 1.5, split.SCALES: 0.5}
    lines = [*timed_rows("BF16", 10.0, {split.MATMULS: 8.0, split.REST: 1.5, split.CASTS: 0.5}),
             *timed_rows("FP8 current", 8.0, in_fp8)]
    shown = STUDY.report(lines)
    row = next(line for line in shown.splitlines() if line.startswith("FP8 current") and "%" in line)
    assert row.split()[3:9] == ["80", "%", "2.00", "1.67", "1.25", "[1.25,"], row
    assert row.split()[-3:] == ["+1.50", "-0.500", "+1.00"]


@unit
def test_what_a_block_keeps_of_a_promise_is_said():
    of_a_block = {"data": speed.BLOCK, "by": "step"}
    lines = [*timed_rows("BF16", 10.0, {split.MATMULS: 8.0}, of_a_block),
             *timed_rows("FP8 row", 10.0, {split.MATMULS: 5.0, split.CASTS: 5.0}, of_a_block),
             *timed_rows("FP8 current", 8.0, {split.MATMULS: 4.0}, of_a_block)]
    [told] = speed.in_words(runs(lines))
    assert told.endswith(": matmuls take 80 % of BF16's time and are up to 2.00 times as fast in FP8, which promises "
                         "1.67. FP8 current (step) keeps 1.25, with +2.00 ms beside its matmuls; FP8 row (step) keeps "
                         "1.00, with +3.00 ms beside its matmuls.")
    assert speed.in_words(runs(timed_rows("BF16", 10.0, {split.MATMULS: 8.0}, of_a_block))) == []


@unit
def test_a_shape_of_two_processes_is_held_against_its_own_bf16():
    of_map = {"data": speed.MAP, "by": "torch", "size": [16, 32, 48]}
    lines = [*timed_rows("BF16", 10.0, {}, of_map, run="interrupted")[1:],
             *timed_rows("BF16", 10.0, {}, of_map), *timed_rows("FP8 row", 8.0, {}, of_map)]
    [shown] = speed.tables_of(runs(lines), None).mapped
    assert re.search(r"^FP8 row +torch +32 x 48 +1\.25 +16$", shown, re.MULTILINE)


def timed_rows(name, ms, spent, variant=None, run="of_all"):
    result = Result(name, None, "bfloat16", FACTS, study="recipes", run=run,
                    variant=variant or {"data": speed.LAYER, "by": "torch", "size": [16, 32, 48]})
    parts = dict.fromkeys(split.KINDS, 0.0) | spent
    return [record(result, "latency", "ms", [ms] * 6, "forward+backward", "eager"),
            record(result, split.SPLIT, "ms", [sum(parts.values())], "forward+backward", parts=parts)]


@unit
@pytest.mark.parametrize("name, kind", [
    ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_TNT", split.MATMULS),
    ("nvjet_sm90_qqtsh_128x256_gelu_bias", split.MATMULS),
    ("cutlass::device_kernel<at::cuda::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal", split.MATMULS),
    ("aten::_scaled_mm_v2", split.MATMULS), ("aten::mm", split.MATMULS),
    ("aten::_weight_int4pack_mm_for_cpu", split.MATMULS),
    ("void at::native::tinygemm_m16n8k16_chunk_kernel", split.MATMULS),
    ("triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_t_view_5", split.CASTS),
    ("triton_red_fused__scaled_mm__to_copy_abs_amax_clamp_exp2_floor_log2_mul_reciprocal_t_view_8", split.CASTS),
    ("triton_poi_fused__to_copy_0", split.CASTS), ("triton_poi_fused_clone_t_3", split.CASTS),
    ("triton_red_fused_abs_amax_t_4", split.SCALES), ("triton_per_fused_abs_amax_1", split.SCALES),
    ("void transformer_engine::amax_kernel<8, true, float>", split.SCALES), ("aten::amax", split.SCALES),
    ("void transformer_engine::delayed_scaling_recipe::kernel_bulk(", split.SCALES),
    ("void transformer_engine::cast_transpose_fused_kernel<false, false, float, __nv_fp8_e4m3>", split.CASTS),
    ("void transformer_engine::unary_kernel<4, float, Empty, identity, __half, __nv_fp8_e5m2>", split.CASTS),
    ("void transformer_engine::block_scaled_cast_transpose_kernel", split.CASTS), ("aten::_to_copy", split.CASTS),
    ("triton_red_fused__to_copy_abs_amax_clamp_mul_native_layer_norm_0", split.REST),
    ("triton_red_fused__to_copy_abs_add_amax_gelu_view_8", split.REST), ("triton_poi_fused_add_1", split.REST),
    ("cast_transpose_fused_kernel<false, true, ..., dgelu<float, float>>", split.REST),
    ("void transformer_engine::normalization::ln_fwd_tuned_kernel<__nv_fp8_e4m3>", split.REST),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", split.ATTENTION),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", split.ATTENTION),
    ("triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy_add_permute_select_view_4", split.REST)])
def test_what_a_kernel_of_that_name_does(name, kind):
    assert split.kind_of(name) == kind


@unit
def test_the_layers_of_a_block_and_their_work():
    config = PRESETS["te-tutorial"]
    shapes = timed.shapes_of(config)
    assert shapes == [(16384, 4096, 12288), (16384, 4096, 4096), (16384, 4096, 16384), (16384, 16384, 4096)]
    of_it = timed.workload(shapes[2], RECIPES["FP8 row"], torch.device("cuda"))
    assert of_it.flops("forward") == 2 * 16384 * 4096 * 16384 and of_it.flops("forward+backward") == 6 * 16384**2 * 4096
    assert of_it.matmul == "float8" and {each.arithmetic for each in of_it.backward} == {"float8"}
    sparse, whole = (timed.workload((16, 4096, 4096), RECIPES[name], torch.device("cuda"))
                     for name in ("BF16, weights 2:4", "INT4 weights"))
    assert sparse.flops("forward+backward") == 16 * 4096**2 and not sparse.backward
    assert whole.forward[0].bytes == 4096**2 * 4.25 / 8 + 2 * 2 * 16 * 4096
    assert [each.shape for each in of_it.backward] == [(16384, 16384, 4096), (16384, 16384, 4096)]


@unit
@pytest.mark.parametrize("wrong", [
    ["--recipe", "FP7"], ["--steps", "0"], ["--seeds", "none"], ["--shapes", "16,16"], ["--part", "speed"],
    ["--shapes", "16,16,16", "--part", "accuracy"]])
def test_wrong_options_are_reported(wrong, study_main):
    status, _, said = study_main("recipes", *wrong)
    assert status == 2 and wrong[0] in said


def trainings(name, *losses, seed=0):
    result = Result(name, None, "float32", FACTS, study="recipes",
                    variant={"data": tables.TRAINING, "seed": seed, "steps": len(losses)})
    return [record(result, tables.LOSS, "nats", list(losses), "run", entropy=0.5)]


@unit
def test_a_training_is_told_by_its_last_steps_and_beside_fp32_of_its_seed():
    steps = tables.LAST
    lines = [*trainings(tables.FP32, 9.0, *[1.0] * steps), *trainings("MXFP8", 9.0, *[1.5] * steps),
             *trainings(tables.FP32, 9.0, *[2.0] * steps, seed=1), *trainings("MXFP8", 9.0, *[2.1] * steps, seed=1),
             *trainings("MXFP8", 9.0, *[7.0] * steps, seed=2)]
    shown = STUDY.report(lines)
    assert re.search(r"^FP32 +21 +2 +1\.5000 *$", shown, re.MULTILINE), shown
    assert re.search(r"^MXFP8 +21 +3 +3\.5333 +\+0\.3000 \[\+0\.1000, \+0\.5000\]$", shown, re.MULTILINE), shown
    assert "The least that is possible is 0.5000." in shown


@unit
def test_data_with_outliers_give_as_much_to_the_result():
    x, weight, _ = checking.operands(1.0, 0, CPU)
    other_x, other_weight, _ = checking.operands(1e4, 0, CPU)
    assert torch.allclose(x @ weight.T, other_x @ other_weight.T, atol=1e-3)
    assert (other_x.abs().amax(0) > 1e4).sum() == checking.OUTLIERS


# ------------------------------------------------------------------------------------------------------------- the GPT


@unit
def test_the_entropy_is_that_of_the_language():
    batch = torch.cat(list(tiny_gpt.batches(0, 40)))
    followers, likely = tiny_gpt._chain()
    places = (followers[batch[:, :-2], batch[:, 1:-1]] == batch[:, 2:, None]).float().argmax(-1)
    assert (followers[batch[:, :-2], batch[:, 1:-1]] == batch[:, 2:, None]).any(-1).all()
    assert float(-likely.log()[places].mean()) == pytest.approx(tiny_gpt.entropy(), rel=0.02)


@integration
def test_models_of_a_seed_begin_alike_and_learn():
    make = (nn.Linear, lambda width, out: Linear(width, out, RECIPES["BF16"]))
    (_, plain), (_, rounded) = (tiny_gpt.trained(each, 3, 40, CPU) for each in make)
    assert rounded[0] == pytest.approx(plain[0], rel=1e-3) and plain[-1] < 0.8 * plain[0]
    assert tiny_gpt.trained(nn.Linear, 3, 40, CPU)[1] == plain


@unit
def test_a_trained_layer_gives_what_it_was_called_with():
    before, (x, weight, dy) = recipes.trained_operands(0, 1, CPU)
    assert not torch.equal(before[0], x) and torch.equal(before[1], weight)
    tokens = tiny_gpt.BATCH * tiny_gpt.LENGTH
    assert x.shape == (tokens, tiny_gpt.WIDTH) and weight.shape == (4 * tiny_gpt.WIDTH, tiny_gpt.WIDTH)
    assert dy.shape == (tokens, 4 * tiny_gpt.WIDTH) and dy.abs().max() > 0


@unit
def test_records_of_losses_hold_each_step():
    [line] = trainings("MXFP8", 3.0, 2.0)
    assert values(line) == [3.0, 2.0]


@unit
def test_what_was_recorded_of_speed_stands_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "RESULTS", tmp_path)
    assert recipes.recorded_speed() == "Layers, blocks and the map: not recorded."
    lines = [*timed_rows("BF16", 10.0, {split.MATMULS: 8.0}), *timed_rows("FP8 current", 8.0, {split.MATMULS: 4.0})]
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "recipes-te-tutorial.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    told = recipes.recorded_speed()
    assert told.endswith(speed.WHOSE)
    assert "\n```\na layer" in told and "whose gain, f+b: a layer, tokens x K x N: 16 x 32 x 48" in told
    assert told.count(speed.SAID) == 1
