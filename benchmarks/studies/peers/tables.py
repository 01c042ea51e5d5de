"""What the records of the study say: ratios to our steps, and where ours lose."""
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records.read import Run, extra, label, paired, read, runs, shape, verdict, versions
from benchmarks.show.charts import Charts, Interval, dots_chart
from benchmarks.show.tables import CASE, ERROR, JOULES, LAUNCH, MS, Column, Context, framed, joules, of_runs
from common.report.record import Record
from common.runtime import engine, rounds
from common.runtime.iteration import BOTH, MODES
from common.text import ratio, table

# What others have published of a block like this one, forward+backward; not measured here.
PUBLISHED = [
    ["plain PyTorch, FP16", "43.1 ms", "B4 S2048 E4096 F16384 H32, dropout 0.1; GPU not stated",
     "Transformer Engine, docs/examples/quickstart.ipynb"],
    ["te.TransformerLayer, FP16", "40.0 ms", "the same", "the same"],
    ["te.TransformerLayer, FP8", "28.6 ms", "the same", "the same"],
    ["torchao float8, one linear layer", "1.39 x BF16", "M 4096, K 8192, N 16384; H100", "torchao/float8/README.md"],
]
OTHER_LIBRARIES = ("transformers", "torchao")              # whose versions stand above the tables


def ours(run: Run, case_runs: Sequence[Run]) -> Run | None:
    """The step that a case is held against, of the same process: that in FP8 for FP8 peers, the other one for all
    else.
    """
    fp8 = run.step is None and _in_fp8(run)
    for other in case_runs:
        same = other.info["run"] == run.info["run"] and other.info["parameter_dtype"] == run.info["parameter_dtype"]
        if other.step is not None and same and _in_fp8(other) == fp8:
            return other
    return None


def _in_fp8(run: Run) -> bool:
    return run.lines[0]["benchmark"]["dtype"] == "float8"


def _ratio(run: Run, context: Context) -> str:
    base = ours(run, context.runs)
    times = paired(run, base, context.mode) if base is not run else None
    return f"{base.step}: {ratio(times, 3)}{verdict(*times[1:])}" if base and times else ""


def eager_ratio(run: Run, case_runs: Sequence[Run], mode: str) -> Interval | None:
    """Its time to ours, both launched one by one; None where they were not timed so in the same rounds."""
    base = ours(run, case_runs)
    if base is None or base is run or run.status != "ok":
        return None
    its_samples, our_samples = run.samples(mode, "eager"), base.samples(mode, "eager")
    if not its_samples or len(its_samples) != len(our_samples):
        return None
    return rounds.paired_ratio(its_samples, our_samples)


def _eager(run: Run, context: Context) -> str:
    times = eager_ratio(run, context.runs, context.mode)
    return f"{times[0]:.3f}" if times else ""


def _attention(run: Run, context: Context) -> str:
    launches = run.find(context.mode, "launches")
    return extra(launches)["attention"].removesuffix(" attention") if launches else ""


RATIOS = """Ratios are its time / ours, against the step named; above 1 ours is faster.
"eager": both launched one by one."""
COLUMNS = [
    CASE, ERROR, Column("attn", _attention, untimed=True), LAUNCH, MS, JOULES,
    Column("step: best launch each [95 %]", _ratio), Column("eager", _eager),
]
STATUS_OR_NOT_TIMED = Column("status", lambda run, context: run.status if run.status != "ok" or run.best(context.mode)
                             else "ok, not timed", untimed=True)


def columns_of(case_runs: Sequence[Run], mode: str) -> list[Column]:
    """The status stands there only where one is not "ok", the joules where some case was metered."""
    columns = list(COLUMNS)
    if not any(joules(run, mode) for run in case_runs):
        columns.remove(JOULES)
    if not all(run.status == "ok" and run.best(mode) for run in case_runs):
        columns.insert(1, STATUS_OR_NOT_TIMED)
    return columns


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    case_runs = runs(lines)
    used: dict[str, None] = {}
    for run in case_runs:
        known = engine.libraries_of(engine.Engine.of_record(run.info["engine"]))
        used |= {f"{library} {known[library]}": None for library in OTHER_LIBRARIES if library in known}
    others = list(used)
    blocks = [f"With {', '.join(others)}." if others else ""]
    for version in dict.fromkeys(map(_version, case_runs)):
        for dtype in dict.fromkeys(run.info["parameter_dtype"] for run in case_runs):
            alike = [run for run in case_runs if run.info["parameter_dtype"] == dtype and _version(run) == version]
            for mode in MODES:
                of_mode = of_runs(columns_of(alike, mode), alike, mode, width)
                blocks.append(f"{mode}, parameters in {dtype}{version}\n\n{of_mode}")
    blocks.append(RATIOS)
    published = table(PUBLISHED, ["what", "figure", "shape and hardware", "source"], width)
    return f"{framed(lines, blocks, case_runs)}\n\nas published by others, not measured here\n\n{published}"


def _version(run: Run) -> str:
    version = versions(run.lines[0]).get("transformer_engine")
    return f", Transformer Engine {version}" if version else ""


def _ratios(lines: list[Record]) -> dict[str, dict[str, dict[str, Interval]]]:
    """Parameters' dtype and engine -> pass -> peer -> (ratio, low, high)."""
    case_runs = runs(lines)
    ratios: dict[str, dict[str, dict[str, Interval]]] = {}
    for mode in MODES:
        for run in case_runs:
            times = paired(run, ours(run, case_runs), mode) if run.step is None else None
            if times:
                group = f"{run.info['parameter_dtype']}{_version(run).replace('Transformer Engine', 'TE')}"
                name = label(run.lines[-1], engine=False, settings=False)
                ratios.setdefault(group, {}).setdefault(mode, {})[name] = times
    return ratios


def charts(lines: list[Record]) -> Charts:
    """The ratios of both passes."""
    ratios = _ratios(lines)
    if not ratios:
        return {}
    axis = "its time / ours, best launch each (16-bit against step 3, FP8 against step 4); above 1 ours is faster"
    return {"ratios": lambda: dots_chart(ratios, axis, 1.0, 1.6)}


def answer(lines: list[Record]) -> str:
    """The peer that comes nearest, forward+backward."""
    nearest = math.inf, ""
    for columns in _ratios(lines).values():
        for name, (value, _, _) in columns[BOTH].items():
            nearest = min(nearest, (value, name))
    ratio_to_ours, name = nearest
    return f"{name} comes nearest: its time is {ratio_to_ours:.2f} of ours, best launch each"


def eager_losses(path: Path) -> str:
    """Which peers are faster than ours where both are launched one by one, with FP32 parameters: a line each."""
    lines = read(path)
    case_runs = [run for run in runs(lines) if run.info["parameter_dtype"] == "float32"]
    sentences = []
    for mode in MODES:
        for run in case_runs:
            times = eager_ratio(run, case_runs, mode) if run.step is None else None
            if times and times[2] < 1:
                sentences.append(_loss(run, case_runs, mode, times[0]))
    whose = f"At {shape(lines[0])} with FP32 parameters"
    if not sentences:
        return f"{whose} no peer is faster than ours where both are launched one by one."
    return "\n".join([f"{whose}, these are faster than ours where both are launched one by one:", "", *sentences])


def _loss(run: Run, case_runs: Sequence[Run], mode: str, of_ours: float) -> str:
    base = ours(run, case_runs)
    assert base is not None
    by_best = paired(run, base, mode)
    best = f" (best launch each: {by_best[0]:.2f})" if by_best else ""
    name = label(run.lines[-1], engine=False, settings=False)
    return f"- {mode}, {name}: {of_ours:.2f} of step {base.step}'s time{best}"
