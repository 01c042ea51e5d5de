"""The study of recipes: what it records, shows and refuses."""
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
from benchmarks.studies.recipes import tables, timed
from common.block.config import PRESETS
from common.outcome import Failed
from common.report.record import record
from common.report.result import Result
from tests.helpers.made_records import FACTS

unit, integration = pytest.mark.unit, pytest.mark.integration
STUDY = studies.load("recipes")
CPU = torch.device("cpu")
SHORT = ["--device", "cpu", "--steps", "2", "--seeds", "2"]


@integration
def test_every_recipe_is_looked_at_and_trained_by(study_main, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "OUTLIERS", (1e2, 1e5))
    path = tmp_path / "records.jsonl"
    status, out, _ = study_main("recipes", *SHORT, "--json", str(path), "--chart", str(tmp_path / "chart"))
    assert status == 0, out
    lines = read(path)
    assert STUDY.told(lines) in out and (tmp_path / "chart-outliers.png").exists()
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
    assert re.search(r"^a layer, tokens x K x N: 32 x 64 x 48 ", out, re.MULTILINE)
    rows = re.findall(r"^(BF16|FP16|FP8 current) +(16 bits|torch) .*$", out, re.MULTILINE)
    in_fp8 = [("FP8 current", "torch")] if scaled.on_a_cpu() else []
    assert rows == [("BF16", "16 bits"), ("FP16", "16 bits"), *in_fp8]
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
def test_wrong_options_are_told(wrong, study_main):
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
    shown = STUDY.told(lines)
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
