"""The block by each recipe: step 3 with its linear layers in FP8 by torch and torchao, step 4 by its recipes."""
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.recipes import layers, scaled
from benchmarks.recipes.recipe import RECIPES, Recipe
from benchmarks.studies import peers
from benchmarks.studies.peers.blocks import build_torchao
from benchmarks.studies.recipes import split
from benchmarks.studies.recipes.speed import BLOCK
from common import steps
from common.block.config import BlockConfig
from common.block.traits import DELAYED, DYNAMIC, FUSED, Traits
from common.measure.cases import Case, Group, block_case
from common.runtime import compiler

STEP_3, TORCH, TORCHAO = "step 3", "step 3, torch", "step 3, torchao"
STEP_4, FP8_ATTENTION = "step 4", "step 4, FP8 attention"
IN_TORCHAO = {"FP8 current": "tensorwise", "FP8 row": "rowwise"}
COMPILED = Traits(FUSED, tf32=True, autocast=True, compiled=True, fp8=DYNAMIC)


def by_torch(recipe: Recipe, config: BlockConfig, values: dict[str, Tensor], device: torch.device) -> nn.Module:
    """Step 2's block with its linear layers by that recipe, compiled: step 3's."""
    block = steps.load(2).build(config, values, device)
    scaled.convert(block, recipe)
    compiler.compile_in_place(block)
    return block


def by_transformer_engine(recipe: Recipe, config: BlockConfig, values: dict[str, Tensor], device: torch.device
                          ) -> nn.Module:
    """Step 4's block by that recipe."""
    block: Any = steps.load(4).build(config, values, device)
    if not config.fp8_attention:
        block.recipe = layers.recipe_of_transformer_engine(recipe, device)
    if recipe.x.block != (0, 0):                           # its library fuses no GELU with a matmul of blocks
        block.mlp.gemm_gelu_fusion = False
    return block


def cases(config: BlockConfig, chosen: Sequence[Recipe], device: torch.device) -> list[Case]:
    """All recipes by all ways, and both 16-bit formats beside them."""
    config = config.replace(amp_dtype=torch.bfloat16)
    missing = peers.missing_libraries(config, torch.float32, device)
    every = []
    for name, dtype in layers.DTYPES.items():
        step = steps.load(3)
        every.append(_case(RECIPES[name], STEP_3, step.build, config.replace(amp_dtype=dtype), step.traits, device, ""))
    for recipe in chosen:
        if recipe in layers.recipes_of(layers.TORCH):
            every.append(_case(recipe, TORCH, functools.partial(by_torch, recipe), config, COMPILED, device,
                               scaled.why_not(recipe, device) or missing["FP8"]))
        if recipe.name in IN_TORCHAO:
            build = functools.partial(build_torchao, IN_TORCHAO[recipe.name])
            every.append(_case(recipe, TORCHAO, build, config, COMPILED, device, missing["torchao"] or missing["FP8"]))
        if recipe in layers.recipes_of(layers.TE):
            every += _of_step_4(recipe, config, device, missing["Transformer Engine"] or missing["FP8"])
    return every


def _of_step_4(recipe: Recipe, config: BlockConfig, device: torch.device, missing: str) -> list[Case]:
    """By that recipe, and where it has attention in FP8 too, with it."""
    build = functools.partial(by_transformer_engine, recipe)
    traits = Traits(FUSED, tf32=True, autocast=True, fp8=DELAYED if recipe.history else DYNAMIC,
                    residual_in_16_bits=True)
    ways = {STEP_4: config}
    if recipe.history:
        ways[FP8_ATTENTION] = config.replace(fp8_attention=True)
    return [_case(recipe, way, build, of_way, traits, device, missing) for way, of_way in ways.items()]


def _case(recipe: Recipe, way: str, build: Any, config: BlockConfig, traits: Traits, device: torch.device,
          missing: str) -> Case:
    return block_case(recipe.name, build, config, traits, device, variant={"data": BLOCK, "by": way}, missing=missing)


def group(config: BlockConfig, chosen: Sequence[Recipe], device: torch.device) -> Group:
    """All of them in the same rounds."""
    on_gpu = device.type == "cuda"
    return Group(cases(config, chosen, device), watched=on_gpu, metered=on_gpu, may_not_fit=True, timed=split.records)
