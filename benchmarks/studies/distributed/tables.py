"""What `distributed` shows, from records: the proof, the account, the training, the model of time."""
import math
import re
import statistics
from collections.abc import Sequence

import torch

from benchmarks.records.read import Run, extra, metric, runner, runs, values
from benchmarks.show import charts as charting
from benchmarks.show.charts import Charts
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.distributed import account, modelled, published, ring
from benchmarks.studies.distributed.layout import Layout, parsed
from benchmarks.studies.distributed.proof import BRANCH, GRADIENT, INPUT, LOSS, UPDATE
from benchmarks.studies.distributed.sharding import AUTOCAST, Sharding
from benchmarks.studies.distributed.timed import Timed
from common.block import block_work
from common.report.record import OF_AN_ERROR, Record, record
from common.report.result import Result
from common.runtime import data_sheets, rounds
from common.runtime.iteration import BOTH
from common.text import NOT_AVAILABLE, figures, percent, ratio, table

ERRORS = (LOSS, BRANCH, INPUT, GRADIENT, UPDATE)
MEANING = "float64"                                        # the dtype of the parameters where FP64 proves the meaning
MOVED, KEPT = "moved", "kept"                              # the metrics: bytes of a kind of collective, bytes of a rank
LOSSES = "loss"                                            # of each training step
LATENCY, ALONE = "latency", "latency alone"                # ms by round, of spread blocks and of whole ones
EXPOSED = "exposed communication"                          # ms
FORESEEN, PEAK = "peak memory, foreseen", "peak memory"    # bytes, by the simulation and on a GPU
SIMULATED = "simulated: in one process, on tensors without data; nothing was sent"
NUMERICS = "times n/a: numerics only: ranks on a CPU share its cores, and talk by Gloo"
TIMES = """\
MFU: FLOPs of matmuls and attention (causal attention counted half, a backward twice its forward, nothing that is
computed again) over what the data sheet promises, dense. Efficiency: the time of the same blocks on one GPU alone, in
the same rounds, over that of the spread ones; where ranks share a batch, over as many times that. Exposed: only
communication went on; unions of intervals. Computation: in kernels that do not communicate, spread and alone; FSDP's
copies between a gathered buffer and its parameters are among them."""
PEAKS = """\
Foreseen: by torch's FSDPMemTracker on tensors without data; of what an operator takes for itself meanwhile it has
softmax's alone. On a GPU: torch.cuda.max_memory_allocated. n/a: what compiled blocks and
Transformer Engine's allocate is known only once they run."""
FROM_ONE = "compute is that of one H200, as the ladder was recorded there; tp's ranks split it"
NO_RECORD = "model of time n/a: no H200 was recorded at this shape; with --preset te-tutorial or gpt2 there is one"
BESIDE = "the ring's model, beside GPUs"
FROM_ALONE = "compute is what the whole blocks took alone, a third of it taken as forward; tp's ranks split it"


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    every = latest_of_each_row(lines)
    rows = []
    for of_case in every:
        if of_case.variant.get("simulated"):
            continue
        rows.append([row_name(of_case), *(_error(of_case, each) for each in ERRORS), of_case.status])
    reasons = [f"{of_case.variant['parallel']}, {of_case.status}: {of_case.info['reason']}"
               for of_case in every if of_case.info["reason"]]
    proved = table(rows, ["against one process in FP64", *ERRORS, "status"], width) if rows else ""
    simulated = SIMULATED if len(rows) < len(every) else ""
    blocks = [proved, _worst_parameters(every), _account(every, width), _peaks(every, width),
              _times(every, width), _training(every), simulated, _models(every, width), "\n".join(reasons)]
    return framed(lines, blocks, [])


def _training(every: Sequence[Run]) -> str:
    """The losses of the steps."""
    said = []
    for of_case in every:
        line = of_case.find(BOTH, LOSSES)
        if line:
            begun, losses = extra(line)["begun"], values(line)
            resumed = f"resumed behind step {begun}" if begun else "from the beginning"
            each = ", ".join(f"{number}: {loss:.6f}" for number, loss in enumerate(losses, start=begun + 1))
            said.append(f"training {resumed}, the loss of each step: {each or 'there was nothing left to do'}")
    return "\n".join(said)


def _account(every: Sequence[Run], width: int | None) -> str:
    """What each of them moves and keeps."""
    rows = []
    for of_case in every:
        for line in of_case.lines:
            if metric(line) in (MOVED, KEPT):
                more, counted = extra(line), values(line)[0]
                what = more.get("kind", account.STATE)
                rows.append([f"{row_name(of_case)}: {what}", str(more.get("calls", "")), f"{counted:,.0f}",
                             f"{more['formula']:,}"])
    return table(rows, ["a step of one rank", "calls", "bytes", "by formula"], width) if rows else ""


def records_of_time(result: Result, times: Timed, layers: int, layout: Layout, device: torch.device) -> list[Record]:
    """What the table of times is made of."""
    assert result.config
    work = block_work.workload(result.config, result.traits, torch.float32, device)
    sheet = data_sheets.data_sheet(result.facts["name"])
    flops = layers * work.flops(BOTH) / layout.ranks_of_a_batch      # those that share a batch share its work
    peak = sheet[0].flops.get(work.matmul) if sheet else None
    lines = [record(result, LATENCY, "ms", times.spread, BOTH, "eager", flops=flops, peak_flops=peak,
                    tokens=result.config.tokens / layout.ranks_of_a_batch,
                    ranks_of_a_batch=layout.ranks_of_a_batch)]
    if times.alone:
        lines.append(record(result, ALONE, "ms", times.alone, BOTH))
    lines.append(record(result, EXPOSED, "ms", [times.exposed_ms], BOTH, communication=times.communication_ms,
                        computation=times.computation_ms, computation_alone=times.computation_alone_ms))
    return lines


def records_of_peak(result: Result, peak_bytes: int) -> list[Record]:
    """What a GPU has held at once."""
    return [record(result, PEAK, "bytes", [peak_bytes], BOTH)]


def _peaks(every: Sequence[Run], width: int | None) -> str:
    """The most that a rank holds at once, as it was foreseen and as a GPU has it."""
    rows = []
    for of_case in every:
        foreseen, measured = (of_case.value(BOTH, what) for what in (FORESEEN, PEAK))
        if foreseen or measured:
            off = percent(100 * abs(foreseen - measured) / measured) if foreseen and measured else ""
            rows.append([row_name(of_case), *(figures(each / 2**30) if each else NOT_AVAILABLE
                                            for each in (foreseen, measured)), off])
    headers = ["peak memory of a training step, GiB", "foreseen", "on a GPU", "off by %"]
    return f"{table(rows, headers, width)}\n\n{PEAKS}" if rows else ""


def _times(every: Sequence[Run], width: int | None) -> str:
    """What a forward and backward takes, and what of it is waiting for other GPUs."""
    rows = []
    for of_case in every:
        timed = of_case.find(BOTH, LATENCY, "eager")
        if not timed:
            continue
        more, samples = extra(timed), values(timed)
        seconds = statistics.median(samples) / 1e3
        share = percent(100 * more["flops"] / seconds / more["peak_flops"]) if more["peak_flops"] else NOT_AVAILABLE
        talked, whole = of_case.find(BOTH, EXPOSED), efficiency_of(of_case)
        assert talked
        in_kernels = (extra(talked).get(what) for what in ("computation", "computation_alone"))
        rows.append([row_name(of_case), figures(1e3 * seconds), f"{more['tokens'] / seconds:,.0f}", share,
                     ratio(whole) if whole else "n/a: whole they do not fit", figures(extra(talked)["communication"]),
                     figures(values(talked)[0]), *(figures(each) if each else NOT_AVAILABLE for each in in_kernels)])
    headers = ["forward+backward", "ms", "tokens/s a GPU", "MFU %", "efficiency [95 %]", "communication ms",
               "exposed ms", "computation ms", "alone"]
    if rows:
        return f"{table(rows, headers, width)}\n\n{TIMES}"
    on_cpus = any(runner(line)["type"] == "cpu" for of_case in every for line in of_case.lines
                  if not of_case.variant.get("simulated"))
    return NUMERICS if on_cpus else ""


def efficiency_of(run: Run) -> tuple[float, float, float] | None:
    """(ratio, low, high) of the time of whole blocks to that of spread ones; None where one of them is missing.

    Where ranks share a batch it is a share of the time of whole ones.
    """
    timed, whole = run.find(BOTH, LATENCY, "eager"), run.find(BOTH, ALONE)
    if not timed or not whole:
        return None
    shares = [ms / extra(timed)["ranks_of_a_batch"] for ms in values(whole)]
    return rounds.paired_ratio(shares, values(timed))


def _models(every: Sequence[Run], width: int | None) -> str:
    """Milliseconds of a step by the ring's model, simulated ones apart from those that GPUs have run."""
    simulated = [run for run in every if run.variant.get("simulated")]
    recorded = modelled.recorded_layers() if simulated else {}
    shares, beside = [], []
    for run in simulated:
        if layer := recorded.get((run.case["name"], run.shape)):
            model = _modelled(run, *layer)
            shares.append([*_model_row(run, model), f"{100 * model.compute / model.step:.1f} %"])
    for run in every:
        if layer := _layer_alone(run):
            model = _modelled(run, *layer)
            took = statistics.median(run.samples(BOTH, "eager")) / 1e3
            beside.append([*_model_row(run, model), figures(1e3 * took), f"{100 * (model.step / took - 1):+.0f}"])
    headers = ["compute ms", "gather, a layer", "reduce, a layer", "waits ms", "step ms"]
    blocks = []
    if shares:
        blocks += [table(shares, [published.NO_COMMUNICATION, *headers, "compute"], width), FROM_ONE]
    if beside:
        blocks += [table(beside, [BESIDE, *headers, "took ms", "off by %"], width), FROM_ALONE]
    if blocks:
        blocks.append(ring.CONSTANTS)
    if len(shares) < len(simulated):
        blocks.append(NO_RECORD)
    return "\n\n".join(blocks)


def _model_row(run: Run, model: modelled.Modelled) -> list[str]:
    """Which blocks they are, and the model's milliseconds."""
    parts = model.compute, model.gather, model.reduce, model.waits, model.step
    return [row_name(run), *(figures(1e3 * part) for part in parts)]


def _layer_alone(run: Run) -> tuple[float, float] | None:
    """Seconds of (forward, backward) of one of the whole blocks beside which spread ones were timed."""
    whole = run.find(BOTH, ALONE)
    if not whole:
        return None
    of_layer = statistics.median(values(whole)) / 1e3 / run.variant["layers"]
    return of_layer / 3, of_layer * 2 / 3


def _modelled(run: Run, forward: float, backward: float) -> modelled.Modelled:
    """What the model says of it, from a record."""
    _, layout = laid_out(run.variant["parallel"])
    in_fp8 = run.lines[0]["benchmark"]["dtype"] == "float8"
    sharding = Sharding.of_variant(run.variant)
    return modelled.of_stack(run.config, run.variant["layers"], layout, sharding, forward, backward, in_fp8)


def _stack(run: Run) -> str:
    """Whose blocks, and how many."""
    layers = run.variant["layers"]
    return f"step {run.step}, {layers} layer{'s' * (layers > 1)}"


def row_name(run: Run) -> str:
    """Which blocks they are, and how they are spread."""
    variant = run.variant
    words = [_stack(run), variant["parallel"], _precision(run)]
    words += [f"{name} {variant[name]}" for name in ("gathered", "prefetch", "reduced in", "divided by")
              if name in variant]
    return ", ".join([*words, "simulated"] if variant.get("simulated") else words)


def _precision(run: Run) -> str:
    """FP64, or what 16 bits are cast to and by whom."""
    matmul, precision = run.lines[0]["benchmark"]["dtype"], run.variant["precision"]
    cast_to = run.info["autocast"] if precision == AUTOCAST else run.info["config"]["amp_dtype"]
    is_cast = cast_to not in ("off", "none") and run.info["parameter_dtype"] != MEANING
    return f"{matmul} by {precision}" if is_cast else matmul


def _error(run: Run, what: str) -> str:
    """"6e-16 of 1e-12": the error, and its gate."""
    line = run.find("check", what + OF_AN_ERROR)
    if not line:
        return NOT_AVAILABLE
    gate = extra(line)["gate"]
    return f"{values(line)[0]:.0e}" + (f" of {gate:.0e}" if gate else "")


def _worst_parameters(every: Sequence[Run]) -> str:
    """A line for each parameter whose gradient is the furthest off in some rows."""
    where: dict[str, list[str]] = {}
    for run in every:
        line = run.find("check", GRADIENT + OF_AN_ERROR)
        if line and extra(line)["worst"]:
            where.setdefault(extra(line)["worst"], []).append(row_name(run))
    said = [f"the worst parameter gradient is of {name}: {'; '.join(rows)}" for name, rows in where.items()]
    return f"the worst parameter gradient of every row is of {next(iter(where))}" if len(said) == 1 else "\n".join(said)


def latest_of_each_row(lines: list[Record]) -> list[Run]:
    """The latest run of each row."""
    return list({(row_name(run), run.shape): run for run in runs(lines)}.values())


def laid_out(words: str) -> tuple[int, Layout]:
    """(ranks, layout) of a record's words."""
    ranks = math.prod(int(number) for number in re.findall(r"\d+", words))
    return ranks, parsed(words, ranks)


def charts(lines: list[Record]) -> Charts:
    """By simulated ranks: what each moves in a step, and what it holds at once; a line a kind of layout."""
    moved: dict[str, charting.Points] = {}
    held: dict[str, charting.Points] = {}
    simulated = [run for run in latest_of_each_row(lines) if run.variant.get("simulated")]
    stacks = sorted({_stack(run) for run in simulated})
    for of_case in simulated:
        peak = of_case.value(BOTH, FORESEEN)
        if peak:
            ranks, layout = laid_out(of_case.variant["parallel"])
            moved_bytes = sum(values(line)[0] for line in of_case.lines if metric(line) == MOVED)
            words = [layout.kind, of_case.variant["precision"], *([_stack(of_case)] if len(stacks) > 1 else [])]
            moved.setdefault(", ".join(words), []).append((ranks, moved_bytes / 1e9))
            held.setdefault(", ".join(words), []).append((ranks, peak / 2**30))
    panels = {"GB in a step's collectives, a rank": moved, "GiB at once in a training step, a rank": held}
    if not any(len(points) > 1 for points in moved.values()):
        return {}
    title = ", ".join([*(stacks if len(stacks) == 1 else []), "simulated: no communication ran"])
    return {"ranks": lambda: charting.panels_chart(panels, "ranks", "", title, "")}


def answer(lines: list[Record]) -> str:
    """How far off the worst of it is in FP64, and how fast sharded blocks are beside those of one GPU."""
    every = latest_of_each_row(lines)
    in_fp64 = [run for run in every if run.info["parameter_dtype"] == MEANING]
    errors = [error for run in in_fp64 for what in (LOSS, BRANCH, INPUT, GRADIENT)
              if (error := run.error(what)) is not None]
    if not errors:
        return NO_ANSWER
    said = f"in FP64 spread and whole agree to {max(errors):.0e}"
    sharded = [run for run in every if laid_out(run.variant["parallel"])[1].ranks_of_a_batch == 1]
    fast = sorted(efficiency[0] for run in sharded if (efficiency := efficiency_of(run)))
    if not fast:
        return said
    least_and_most = dict.fromkeys(f"{each:.2f}" for each in (fast[0], fast[-1]))
    return f"{said}; sharded a GPU has {' to '.join(least_and_most)} of its speed alone"
