"""What the study of recipes tells of its records: errors by data, what training ends at, a chart of outliers."""
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.recipes.checking import RANGE
from benchmarks.recipes.quantizing import bits_a_value
from benchmarks.recipes.recipe import EVERY, RECIPES
from benchmarks.records.read import Run, extra, metric, runs, values
from benchmarks.show.charts import Charts, Points, panels_chart
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.recipes import speed
from benchmarks.studies.recipes.speed import TIMED
from common.report.record import Record
from common.text import NOT_AVAILABLE, table

NORMAL, TRAINED, TRAINING = "normal", "a trained layer", "training"         # what a row is of
OUTLIERS = (1e2, 1e3, 1e4, 1e5)        # how many times as large as the other columns of x
FP32 = "FP32"                          # the name of the training that others are held against
EXPECTED, OVERFLOWS, LOSS = "expected error", "overflows", "loss"       # the metrics beside errors
LAST = 20                              # steps whose mean is what a training ends at
SIZE = 4096                            # of the square matrix whose bits a value are shown
NUMERICS = """\
Numerics only: operands are rounded as the recipe says, and multiplied in FP32. Bits a value are those of a weight of
4,096 x 4,096, its scales included."""
EXPLAINED = f"""\
what rounding explains; {RANGE[0]} to {RANGE[1]} of it pass. Between two values q apart a
number is off by q^2/12, squared and on average, and the squares of independent errors add up."""
TRAINED_AS = f"""\
The loss is the mean of the last {LAST} steps, in nats. Above FP32: of the same seed, which begins with the same
parameters and has the same batches; the mean over seeds, and the least and the most."""


def outliers_of(times: float) -> str:
    """How such data are called."""
    return f"outliers x {times:,.0f}"


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    every = list({(run.label, run.shape): run for run in runs(lines)}.values())
    looked = [run for run in every if run.variant["data"] not in (TRAINING, *TIMED)]
    timed = [run for run in every if run.variant["data"] in TIMED]
    failed = dict.fromkeys(
        f"{run.case['name']}, {run.variant.get('by', run.variant['data'])}: {run.status}: {run.info['reason']}"
        for run in every if run.status != "ok")
    accuracy = [_errors(looked, width), _gradients(looked, width), _explained(looked)]
    blocks = [*speed.blocks_of_text(timed, width), *accuracy, _trainings(every, width), "\n".join(failed),
              NUMERICS if looked else ""]
    return framed(lines, blocks, [run for run in timed if run.status == "ok"])


# ---------------------------------------------------------------------------------------------------------- the errors


def _by_recipe(looked: Sequence[Run]) -> dict[str, dict[str, Run]]:
    """Recipe -> data -> its run."""
    found: dict[str, dict[str, Run]] = {}
    for run in looked:
        found.setdefault(run.case["name"], {})[run.variant["data"]] = run
    return found


def _errors(looked: Sequence[Run], width: int | None) -> str:
    """Of y: a row for each recipe, a column for each kind of data."""
    data, rows = list(dict.fromkeys(run.variant["data"] for run in looked)), []
    for name, of_data in _by_recipe(looked).items():
        bits = bits_a_value(RECIPES[name].weight, SIZE, SIZE)
        rows.append([name, f"{bits:.4g}", *(_cell(of_data.get(each), "y") for each in data)])
    return table(rows, ["error of y, relative L2", "bits a value", *data], width) if rows else ""


def _gradients(looked: Sequence[Run], width: int | None) -> str:
    """Of dx and dweight: outliers of x change neither as they change y."""
    columns, rows = [(what, data) for what in ("dx", "dweight") for data in (NORMAL, TRAINED)], []
    for name, of_data in _by_recipe(looked).items():
        if not RECIPES[name].is_inference:
            rows.append([name, *(_cell(of_data.get(data), what) for what, data in columns)])
    headers = ["error of gradients, relative L2", *(f"{what}, {data}" for what, data in columns)]
    return table(rows, headers, width) if rows else ""


def _explained(looked: Sequence[Run]) -> str:
    """How near the errors come to those that are derived."""
    shares = [error / values(line)[0] for run in looked for line in run.lines
              if metric(line) == EXPECTED and (error := run.error(extra(line)["of"]))]
    return f"The errors are {min(shares):.2f} to {max(shares):.2f} of {EXPLAINED}" if shares else ""


def _cell(run: Run | None, what: str) -> str:
    if run is None:
        return ""
    if run.status != "ok":
        return run.status
    if any(metric(line) == OVERFLOWS and what in extra(line)["of"] for line in run.lines):
        return "overflows"
    found = run.error(what)
    return "" if found is None else f"{found:.2e}"


# -------------------------------------------------------------------------------------------------------- the training


def end_of(run: Run) -> float | None:
    """The mean loss of the last steps."""
    line = run.find("run", LOSS)
    return statistics.fmean(values(line)[-LAST:]) if line else None


def above_fp32(every: Sequence[Run]) -> dict[str, list[float]]:
    """Recipe -> by how much its loss ends above that of FP32, for each seed that both were trained from."""
    ends: dict[tuple[Any, ...], dict[str, float]] = {}
    for run in every:
        end = end_of(run)
        if run.variant["data"] == TRAINING and end is not None:
            ends.setdefault((run.variant["seed"], run.variant["steps"]), {})[run.case["name"]] = end
    found: dict[str, list[float]] = {}
    for of_seed in ends.values():
        for name, end in of_seed.items():
            if FP32 in of_seed:
                found.setdefault(name, []).append(end - of_seed[FP32])
    return found


def _trainings(every: Sequence[Run], width: int | None) -> str:
    """A row for each recipe that was trained by."""
    trained: dict[str, list[Run]] = {}
    for run in every:
        if run.variant["data"] == TRAINING:
            trained.setdefault(run.case["name"], []).append(run)
    above, rows = above_fp32(every), []
    for name, of_name in trained.items():
        ends = [end for run in of_name if (end := end_of(run)) is not None]
        steps = ", ".join(dict.fromkeys(str(run.variant["steps"]) for run in of_name))
        apart = above.get(name) if name != FP32 else None
        difference = f"{statistics.fmean(apart):+.4f} [{min(apart):+.4f}, {max(apart):+.4f}]" if apart else ""
        mean = f"{statistics.fmean(ends):.4f}" if ends else NOT_AVAILABLE
        rows.append([name, steps, str(len(ends)), mean, difference])
    if not rows:
        return ""
    least = [extra(line)["entropy"] for runs_of in trained.values() for run in runs_of
             if (line := run.find("run", LOSS))]
    headers = ["a GPT trained by", "steps", "seeds", "loss", "above FP32"]
    floor = f" The least that is possible is {least[0]:.4f}." if least else ""
    return f"{table(rows, headers, width)}\n\n{TRAINED_AS}{floor}"


# -------------------------------------------------------------------------------------------------- the chart, in short


def charts(lines: list[Record]) -> Charts:
    """The error of y by the size of outliers, a curve a recipe; 8 bits and 4 apart."""
    different = {(recipe.x, recipe.weight): recipe.name for recipe in reversed(EVERY) if not recipe.history}
    panels: dict[str, dict[str, Points]] = {}
    for run in runs(lines):
        name, times, found = run.case["name"], _times(run.variant["data"]), run.error("y")
        if times is None or found is None or name not in different.values():       # in y it is as another one
            continue
        bits = RECIPES[name].weight.format.bits
        if bits < 16:
            panels.setdefault(f"{bits} bits", {}).setdefault(name, []).append((times, found))
    if not any(len(points) > 1 for curves in panels.values() for points in curves.values()):
        return {}
    title = "error of y, relative L2, by how much larger a few columns of x are; emulated"
    return {"outliers": lambda: panels_chart(panels, "times as large", "", title, "")}


def _times(data: str) -> float | None:
    """How large its outliers are; None where it has none by construction."""
    sizes = {NORMAL: 1.0} | {outliers_of(times): times for times in OUTLIERS}
    return sizes.get(data)


def answer(lines: list[Record]) -> str:
    """What outliers cost by one scale and by many, and what 4 bits cost a training."""
    every = runs(lines)
    found = {(run.case["name"], run.variant["data"]): run.error("y") for run in every}
    largest = outliers_of(1e5)
    one, many = (found.get((name, largest)) for name in ("FP8 current", "MXFP8"))
    if one is None or many is None:
        return NO_ANSWER
    said = f"with outliers x 100,000 y is off by {100 * one:.0f} % in FP8 with one scale, {100 * many:.0f} % in MXFP8"
    above = {name: statistics.fmean(apart) for name, apart in above_fp32(every).items()}
    if "FP8 current" in above and "MXFP4" in above:
        said += f"; trained in FP8 {above['FP8 current']:+.3f} nats, in MXFP4 {above['MXFP4']:+.3f}"
    return said
