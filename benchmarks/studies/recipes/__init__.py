"""What does each recipe of 8 and 4 bits cost in accuracy, and where do they differ?

    python -m benchmarks recipes --json recipes.jsonl --chart recipes
    python -m benchmarks recipes --recipe "FP8 current" --recipe "FP8 block 128" --seeds 1
    python -m benchmarks recipes --shapes 16384,4096,16384
    python -m benchmarks recipes --part blocks --preset gpt2-xl
    python -m benchmarks recipes --part map --recipe "FP8 current"

Accuracy and training are numerics only, on any machine: operands are rounded as a recipe says, and multiplied in FP32.
A linear layer's three products are held against FP64: on normal numbers, with outliers among the columns of x (and
weights as much smaller, so that all columns count alike), and on what a small GPT gives to one of its layers once it is
trained. Each error must be what rounding explains: its square is to be the sum of those of the operands. Then the GPT
is trained by each recipe, from the same parameters on the same batches.
Layers, blocks and the map multiply in hardware, by torch and by Transformer Engine. Layers, those of a block or of
--shapes, are held against FP64 in the same way, and are timed side by side. Blocks are step 3 with its linear layers in
FP8 and step 4 by each recipe, checked as a step is. For both a table says whose gain it is: what faster matmuls
promise, and what casts and waiting leave of it. The map says from how many tokens on a recipe pays, and up to how many
weights alone do. Without a GPU these parts run only where they are asked for.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import argparse
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure.options import count, numbers
from benchmarks.recipes import checking, tiny_gpt
from benchmarks.recipes.checking import Operands
from benchmarks.recipes.emulated import Linear
from benchmarks.recipes.recipe import RECIPES, Recipe
from benchmarks.records import RESULTS
from benchmarks.records.files import files
from benchmarks.records.provenance import provenance
from benchmarks.records.read import read, runs
from benchmarks.show.study import Options, Study, draw, exit_status, open_session, register
from benchmarks.studies.recipes import blocks, speed, tables, timed
from benchmarks.studies.recipes.tables import EXPECTED, FP32, LOSS, NORMAL, OUTLIERS, OVERFLOWS, TRAINED, outliers_of
from common.command_line import Parser, tell
from common.measure.session import Session
from common.outcome import Failed
from common.phases import Phase
from common.report.record import Record, check_records, record
from common.report.result import Result
from common.runtime import exclusive

STEPS, QUICK_STEPS = 300, 30
SEEDS, QUICK_SEEDS = 3, 1
WIDTH = 120                            # of a table on the page, in characters
LOOKED_AT = "blocks.1.up"              # the layer of the GPT whose operands are
PARTS = ACCURACY, LAYERS, BLOCKS, MAP, TRAINING = ("accuracy", "layers", "blocks", "map", tables.TRAINING)


# -------------------------------------------------------------------------------------------------------- its accuracy


def trained_operands(seed: int, steps: int, device: torch.device) -> tuple[Operands, Operands]:
    """What a layer of a GPT that was trained in FP32 multiplies, on two batches."""
    model, _ = tiny_gpt.trained(nn.Linear, seed, steps, device)
    layer = model.get_submodule(LOOKED_AT)
    seen: dict[str, Tensor] = {}

    def keep(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        seen["x"] = given[0].detach()
        y.register_hook(lambda dy: seen.update(dy=dy.detach()))
    found = []
    with layer.register_forward_hook(keep):
        for batch in tiny_gpt.batches(seed + 1, 2):
            model.loss(batch.to(device)).backward()
            weight = layer.get_parameter("weight").detach()
            found.append((seen["x"].flatten(0, -2), weight, seen["dy"].flatten(0, -2)))
    return found[0], found[1]


def accuracy(recipe: Recipe, before: Operands, given: Operands, result: Result) -> list[Record]:
    """The records of one recipe on some data."""
    try:
        found = checking.errors(recipe, given, before)
    except Failed as failure:
        result.status, result.reason = "failed", str(failure)
        return check_records(result)
    finite = {what: of for what, of in found.items() if math.isfinite(of.found)}
    result.errors = {what: (of.found, checking.RANGE[1] * of.expected) for what, of in finite.items()}
    lines = check_records(result) if finite else []
    lines += [record(result, EXPECTED, "relative L2", [of.expected], "check", of=what) for what, of in finite.items()]
    over = [what for what in found if what not in finite]
    return [*lines, *([record(result, OVERFLOWS, "", [], "check", of=over)] if over else [])]


# -------------------------------------------------------------------------------------------------------- its training


def losses(recipe: Recipe | None, seed: int, steps: int, device: torch.device) -> list[float]:
    """Of each step; without a recipe in FP32."""
    make = functools.partial(Linear, recipe=recipe) if recipe else nn.Linear
    return tiny_gpt.trained(make, seed, steps, device)[1]


# ----------------------------------------------------------------------------------------------------------- measuring


def run(study: Study, options: Options) -> int:
    """Everything that was asked for; the exit status."""
    with exclusive.alone(options.device, study.name):
        session = open_session(study, options)
        statuses = _measured(session, options)
    session.progress.clear()
    tell(study.report(session.lines))
    draw(study, options.chart, session.lines)
    print(session.finish(options.config), file=sys.stderr)
    return exit_status([*statuses, *(entry.result.status for entry in session.entries)])


def _measured(session: Session, options: Options) -> list[str]:
    """The status of each row that is not timed."""
    chosen = [RECIPES[name] for name in options.recipe or RECIPES]
    statuses = []
    if LAYERS in options.part:
        for shape in options.shapes or timed.shapes_of(options.config):
            session.measure(timed.group(shape, chosen, options.device))
    if BLOCKS in options.part:
        session.measure(blocks.group(options.config, chosen, options.device))
    if MAP in options.part:
        for group in timed.groups_of_map(options.shapes or options.grid, options.shapes or options.served, chosen,
                                         options.device):
            session.measure(group)
    if ACCURACY in options.part:
        statuses += _accuracies(session, options, chosen)
    if TRAINING in options.part:
        statuses += _trainings(session, options, chosen)
    return statuses


def _result(session: Session, name: str, **variant: Any) -> Result:
    return Result(name, None, "float32", session.facts, study=session.study, run=session.run, emulated=True,
                  matmul="float32", variant=variant)


def _accuracies(session: Session, options: Options, chosen: Sequence[Recipe]) -> list[str]:
    """The status of each recipe on each kind of data."""
    device, seed, statuses = options.device, options.seed, []
    session.say(Phase.TRAINING, "a layer to look at")
    sizes = {NORMAL: 1.0} | {outliers_of(times): times for times in OUTLIERS}
    data = {name: (checking.operands(times, seed + 1, device), checking.operands(times, seed, device))
            for name, times in sizes.items()}
    data[TRAINED] = trained_operands(seed, options.steps, device)
    for recipe in chosen:
        for name, (before, given) in data.items():
            session.say(Phase.CHECKING, f"{recipe.name}, {name}")
            result = _result(session, recipe.name, data=name)
            session.write(accuracy(recipe, before, given, result))
            statuses.append(result.status)
    return statuses


def _trainings(session: Session, options: Options, chosen: Sequence[Recipe]) -> list[str]:
    """The status of each training; that in FP32 is the first of each seed."""
    device, seed, statuses = options.device, options.seed, []
    for number in range(options.seeds):
        for trained in (None, *(recipe for recipe in chosen if not recipe.is_inference)):
            name = trained.name if trained else FP32
            session.say(Phase.TRAINING, f"{name}, {number + 1} of {options.seeds}")
            result = _result(session, name, data=TRAINING, seed=seed + number, steps=options.steps)
            found = losses(trained, seed + number, options.steps, device)
            if all(map(math.isfinite, found)):
                session.write([record(result, LOSS, "nats", found, "run", entropy=tiny_gpt.entropy())])
            else:
                result.status, result.reason = "failed", "the loss is not finite"
                session.write(check_records(result))
            statuses.append(result.status)
    return statuses


def shape_of(text: str) -> timed.Shape:
    """ "16384,4096,4096" -> tokens, K, N. Raises ValueError."""
    sizes = numbers(text)
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(sizes)} sizes: give tokens, inputs and outputs as M,K,N")
    return sizes[0], sizes[1], sizes[2]


def add_arguments(parser: Parser) -> None:
    """Which recipes, and how long they train."""
    add = parser.add_argument
    add("--recipe", choices=RECIPES, action="append", help="only this one; may be repeated")
    add("--part", choices=PARTS, action="append",
        help=f"only this one; may be repeated (default: {ACCURACY}, {TRAINING}, and on a GPU {LAYERS})")
    add("--shapes", type=shape_of, metavar="M,K,N", action="append",
        help=f"tokens, inputs and outputs of a layer; may be repeated (default: the four of a block, of a {MAP} a "
             f"grid); without --part {LAYERS} alone")
    add("--steps", type=count, metavar="N", help=f"of training (default: {STEPS}; with --quick {QUICK_STEPS})")
    add("--seeds", type=count, metavar="N", help=f"trainings of each (default: {SEEDS}; with --quick {QUICK_SEEDS})")


def refine(options: Options) -> None:
    """What was not said. Raises ValueError for shapes where nothing is asked for that has some."""
    on_gpu = options.device.type == "cuda"
    if options.shapes and options.part and not {LAYERS, MAP} & set(options.part):
        raise ValueError(f"--shapes are those of --part {LAYERS} or {MAP}: give one of these")
    if not options.part:
        options.part = [LAYERS] if options.shapes else [ACCURACY, TRAINING, *([LAYERS] if on_gpu else [])]
    options.grid = timed.GRID if on_gpu else timed.SMALL_GRID
    options.served = timed.GRID_SERVED if on_gpu else timed.SMALL_SERVED
    options.steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    options.seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)


def recorded_speed() -> str:
    """The tables of layers, blocks and the map, machine by machine, and below them what their columns mean."""
    paragraphs: list[str] = []
    words: list[str] = []
    for path in files(RESULTS, "*/recipes-*"):
        lines = read(path)
        found = runs(lines)
        made = speed.tables_of(found, WIDTH)
        shown = "\n\n".join([*made.measured, *made.gained, *made.mapped])
        if shown:
            paragraphs += [provenance(lines), f"```\n{shown}\n```", *speed.in_words(found)]
            words += made.words
    paragraphs = paragraphs or ["Layers, blocks and the map: not recorded."]
    return "\n\n".join([*paragraphs, *dict.fromkeys(words)])


register(Study("recipes", __doc__, lambda options: [], text=tables.text, charts=tables.charts, answer=tables.answer,
               run=run, add_arguments=add_arguments, refine=refine, place=10, parts={"recipes speed": recorded_speed},
               no_chart="fewer than two sizes of outliers were asked"))
