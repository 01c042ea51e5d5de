"""What does each recipe of 8 and 4 bits cost in accuracy, and where do they differ?

    python -m benchmarks recipes --json recipes.jsonl --chart recipes
    python -m benchmarks recipes --recipe "FP8 current" --recipe "FP8 block 128" --seeds 1

Numerics only: operands are rounded as a recipe says, and multiplied in FP32, on any machine. First a linear layer's
three products are held against FP64: on normal numbers, with outliers among the columns of x (and weights as much
smaller, so that all columns count alike), and on what a small GPT gives to one of its layers once it is trained. Each
error must be what rounding explains: its square is to be the sum of those of the operands. Then the GPT is trained by
each recipe, from the same parameters on the same batches.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import functools
import math

import torch
from torch import Tensor, nn

from benchmarks.measure.options import count
from benchmarks.recipes import checking, tiny_gpt
from benchmarks.recipes.emulated import Linear
from benchmarks.recipes.recipe import RECIPES, Recipe
from benchmarks.show.study import Options, Study, draw, exit_status, open_session, register
from benchmarks.studies.recipes import tables
from benchmarks.studies.recipes.tables import EXPECTED, FP32, LOSS, NORMAL, OVERFLOWS, TRAINED, TRAINING, outliers_of
from common.command_line import Parser, tell
from common.measure.session import Session
from common.outcome import Failed
from common.phases import Phase
from common.report.record import Record, check_records, record
from common.report.result import Result
from common.runtime import exclusive

OUTLIERS = (1e2, 1e3, 1e4, 1e5)        # times the other columns of x
STEPS, QUICK_STEPS = 300, 60
SEEDS, QUICK_SEEDS = 3, 1
LAYER = "blocks.1.up"                  # of the GPT: the operands of this one are looked at


# -------------------------------------------------------------------------------------------------------- its accuracy


def trained_operands(seed: int, steps: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, dy) of a layer of a GPT that was trained in FP32."""
    model, _ = tiny_gpt.trained(nn.Linear, seed, steps, device)
    layer = model.get_submodule(LAYER)
    seen: dict[str, Tensor] = {}

    def keep(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        seen["x"] = given[0].detach()
        y.register_hook(lambda dy: seen.update(dy=dy.detach()))
    with layer.register_forward_hook(keep):
        [batch] = tiny_gpt.batches(seed + 1, 1)
        model.loss(batch.to(device)).backward()
    return seen["x"].flatten(0, -2), layer.get_parameter("weight").detach(), seen["dy"].flatten(0, -2)


def accuracy(recipe: Recipe, data: str, operands: tuple[Tensor, Tensor, Tensor], result: Result) -> list[Record]:
    """The records of one recipe on some data."""
    try:
        found = checking.errors(recipe, *operands)
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
    tell(study.told(session.lines))
    draw(study, options.chart, session.lines)
    session.finish(options.config)
    return exit_status(statuses)


def _measured(session: Session, options: Options) -> list[str]:
    """The status of each row."""
    device, seed = options.device, options.seed
    chosen = [RECIPES[name] for name in options.recipe or RECIPES]
    statuses = []

    def result_of(name: str, **variant) -> Result:
        return Result(name, None, "float32", session.facts, study=session.study, run=session.run, emulated=True,
                      matmul="float32", variant=variant)
    session.say(Phase.CHECKING, "a trained layer")
    data = {NORMAL: checking.operands(1.0, seed, device)}
    data |= {outliers_of(times): checking.operands(times, seed, device) for times in OUTLIERS}
    data[TRAINED] = trained_operands(seed, options.steps, device)
    for recipe in chosen:
        for name, operands in data.items():
            session.say(Phase.CHECKING, f"{recipe.name}, {name}")
            result = result_of(recipe.name, data=name)
            session.write(accuracy(recipe, name, operands, result))
            statuses.append(result.status)
    for number in range(options.seeds):
        for trained in (None, *(recipe for recipe in chosen if not recipe.is_inference)):
            name = trained.name if trained else FP32
            session.say(Phase.TRAINING, f"{name}, {number + 1} of {options.seeds}")
            result = result_of(name, data=TRAINING, seed=seed + number, steps=options.steps)
            found = losses(trained, seed + number, options.steps, device)
            if all(map(math.isfinite, found)):
                session.write([record(result, LOSS, "nats", found, "run", entropy=tiny_gpt.entropy())])
            else:
                result.status, result.reason = "failed", "the loss is not finite"
                session.write(check_records(result))
            statuses.append(result.status)
    return statuses


def add_arguments(parser: Parser) -> None:
    """Which recipes, and how long they train."""
    add = parser.add_argument
    add("--recipe", choices=RECIPES, action="append", help="only this one; may be repeated")
    add("--steps", type=count, metavar="N", help=f"of training (default: {STEPS}; with --quick {QUICK_STEPS})")
    add("--seeds", type=count, metavar="N", help=f"trainings of each (default: {SEEDS}; with --quick {QUICK_SEEDS})")


def refine(options: Options) -> None:
    """How long, where it was not said."""
    options.steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    options.seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)


register(Study("recipes", __doc__, lambda options: [], text=tables.text, charts=tables.charts, answer=tables.answer,
               run=run, add_arguments=add_arguments, refine=refine, place=10,
               no_chart="fewer than two sizes of outliers were asked"))
