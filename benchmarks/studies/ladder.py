"""What does each step buy, why, and how sure is that? All five steps side by side, timed in interleaved rounds.

    python -m benchmarks ladder                        # the five steps at this machine's default shape
    python -m benchmarks ladder --preset gpt2 --json gpt2.jsonl --chart gpt2

Every step is checked against FP64 before it is timed. `x previous` is the median of the ratios within one round, with
its 95 % bootstrap interval: SAME where that holds 1 and stays within 5 % of it, UNSURE where it holds 1 and does not.
Then, for each pair of neighbours, where the milliseconds went, from profiled kernels of the same run.
Exit status: 0 ok, 1 a step failed or did not fit, 2 usage, 3 out of memory in the rounds, 4 no step was
timed, 130 interrupted.
"""
import argparse
import itertools

import torch

from benchmarks.measure import counters
from benchmarks.measure.options import count
from benchmarks.measure.processes import in_turn
from benchmarks.records.gains import gain
from benchmarks.records.read import PROFILED, Run, extra, latest, paired, runs, verdict
from benchmarks.show import part_charts, tables
from benchmarks.show.charts import Charts
from benchmarks.show.study import Options, Study, draw, exit_status, open_session, register, show
from benchmarks.show.tables import Column, Context
from benchmarks.show.traffic import traffic
from common import steps
from common.block.config import BlockConfig, dtype_name
from common.command_line import Parser, tell
from common.measure.cases import Case, Group, step_case
from common.phases import Phase
from common.report.metrics import LIMIT, Metric
from common.report.record import PARTS, Record, status_record
from common.report.result import Result
from common.runtime import exclusive, machine
from common.runtime.iteration import BOTH, MODES
from common.runtime.peaks import BURST, SUSTAINED
from common.text import figures, ratio, table


def ladder_rows() -> dict[str, tuple[steps.Step, bool]]:
    """What --steps takes -> (step, whether with TF32 alone): the first step that has both shows TF32 by itself, too."""
    rows: dict[str, tuple[steps.Step, bool]] = {}
    for step in steps.ALL:
        shown_before = any(earlier.traits.tf32 for earlier, _ in rows.values())
        if step.traits.tf32 and step.traits.autocast and not shown_before:
            rows[f"{step.number}-tf32"] = step, True
        rows[str(step.number)] = step, False
    return rows


ROWS = ladder_rows()


def cases(config: BlockConfig, device: torch.device, names: tuple[str, ...] = tuple(ROWS)) -> list[Case]:
    """The rows of the ladder at that shape."""
    of_ladder = []
    for name in names:
        step, tf32_alone = ROWS[name]
        if not tf32_alone:
            of_ladder.append(step_case(step, config, device))
        elif config.amp_dtype is not None:                     # else the step has no autocast either: one row of it
            has_tf32 = device.type == "cuda" and torch.cuda.is_tf32_supported()
            missing = "" if has_tf32 else "this machine has no TF32: it would be step 0 again"
            of_ladder.append(step_case(step, config.replace(amp_dtype=None), device, missing=missing))
    return of_ladder


def groups(options: Options) -> list[Group]:
    """All rows together."""
    profiled = options.profiled or (1 if options.slow_down else PROFILED if options.quick else options.rounds)
    return [Group(cases(options.config, options.device, options.steps), profiled=profiled,
                  metered=True, sustained=True)]


# ------------------------------------------------------------------------------------------------------- how it is run


def run(study: Study, options: Options) -> int:
    """In this process, or in several: where that was asked for, and where memory does not hold all steps."""
    if options.processes > 1:
        each = [options.steps] * options.processes
    elif options.device.type == "cuda" and len(options.steps) > 1 and not holds_all(options):
        each = [(name,) for name in options.steps]
    else:
        return _in_this_process(study, options)
    lines = in_turn([_words(options, rows) for rows in each], options.file, study.name,
                    lambda place, records, status: _died(options, each[place], records, status))
    tell(study.report(lines))
    draw(study, options.chart, lines)
    return exit_status(run.status for run in runs(lines))


def _in_this_process(study: Study, options: Options) -> int:
    with exclusive.alone(options.device, study.name):
        session = open_session(study, options)
        for group in groups(options):
            session.measure(group, keep=options.counters)
        if options.counters:
            session.say(Phase.COUNTING, "DRAM traffic")
            counters.measure(session)
        return show(study, options, session)


def holds_all(options: Options) -> bool:
    """Whether all steps fit into this GPU together: each with a captured graph, which keeps its memory."""
    needed = sum(case.bytes_needed for case in cases(options.config, options.device, options.steps))
    return needed < 0.9 * machine.memory_total(options.device)


def _words(options: Options, rows: tuple[str, ...]) -> list[str]:
    """The command line of a process that measures those rows."""
    words = ["ladder", *options.argv, "--steps", ",".join(rows), "--processes", "1", "--chart", ""]
    if options.processes > 1 and not options.profiled:
        words += ["--profiled", "1"]                           # their times are what is asked for
    return words


def _died(options: Options, rows: tuple[str, ...], records: list[Record], status: int) -> list[Record]:
    """A record for each row that a process which ended early did not finish."""
    facts = machine.facts(options.device)
    case_runs = {(run.case["name"], run.info["config"]["amp_dtype"]): run for run in runs(records)}
    lines = []
    for case in cases(options.config, options.device, rows):
        assert case.config is not None
        run = case_runs.get((case.name, dtype_name(case.config.amp_dtype)))
        if run is None or (run.status == "ok" and not run.best(MODES[-1])):
            engine = run.info["engine"] if run else "PyTorch"
            result = Result(case.name, case.config, "float32", facts, case.step, case.traits, status="failed",
                            reason=f"its process ended with {status}", study="ladder", engine=engine)
            lines.append(status_record(result, "run"))
    return lines


# ------------------------------------------------------------------------------------------------------- what it shows


def short(run: Run) -> str:
    """The number of a step, and TF32 where that is all it has."""
    return f"{run.step} TF32" if run.lines[-1]["benchmark"]["dtype"] == "tf32" else str(run.step)


def _versus_previous(run: Run, context: Context) -> str:
    """The paired ratio and its interval, or the plain ratio where the two were not paired."""
    previous = context.previous(run)
    if previous is None:
        return ""
    neighbour = context.runs[context.runs.index(run) - 1]
    of_which = "" if previous is neighbour else f" (to {short(previous)})"
    times = paired(previous, run, context.mode)
    if times is None:
        before, after = previous.best_ms(context.mode), run.best_ms(context.mode)
        assert before and after
        return f"{before / after:.2f} (unpaired){of_which}"
    return ratio(times, 3) + verdict(*times[1:]) + of_which


def bound_by(run: Run, mode: str) -> str:
    """launch, memory or compute: what most of the time of the faster way of launching goes to.

    compute: matmuls and attention, as far as their FLOPs and not their bytes set the limit of this machine for them.
    """
    parts, limit = run.parts(mode), run.find(mode, LIMIT[BURST].name, run.best(mode))
    if run.best(mode) == "eager" and run.launch_bound(mode):
        return "launch"
    if parts is None or limit is None:
        return "n/a"
    whole = sum(parts.values())
    if parts["idle"] > 0.5 * whole:
        return "launch"
    computing = extra(limit)["flop_bound"] * (parts["GEMM"] + parts["attention"])
    return "compute" if computing > 0.5 * whole else "memory"


COLUMNS = [
    Column("step", lambda run, _: run.label, untimed=True), tables.STATUS, tables.LAUNCH, tables.MS, tables.QUANTILES,
    tables.TIMES_FIRST, Column("x previous [95 %]", _versus_previous), tables.RATE, tables.SUSTAINED_LIMIT,
    tables.LIMIT, tables.JOULES, tables.MHZ, tables.MEMORY, tables.LAUNCHES, tables.COMPILE, tables.ERROR,
    Column("bound by", lambda run, context: bound_by(run, context.mode)),
]


def gains(lines: list[Record], mode: str) -> tuple[list[list], list[str]]:
    """(rows, headers): for each pair of neighbours, how many ms each part gave; positive: the later step takes less.

    "gained ms" is the difference of the two by the clock without a profiler: the sum of the parts and of "unexplained".
    Both are means of the middle three fifths, of samples and of the profiled iterations beside them. "by the profiler"
    is its share in "unexplained": what the same difference changes by, by the clock, while it runs. The bound is the
    larger of 5 % of the gain and 0.5 % of the slower step; EXCEEDED where what is unexplained is beyond it. Steps of
    which fewer than five rounds were profiled have no row.
    """
    rows = []
    for before, after in itertools.pairwise(_attributed(lines, mode)):
        saved = gain(before, after, mode)
        rows.append([f"{short(before)} -> {short(after)}", f"{before.profiled(mode)}, {after.profiled(mode)}",
                     figures(saved.whole, "+"), *(figures(saved.by_part[part], "+") for part in PARTS),
                     figures(saved.unexplained, "+"),
                     "n/a" if saved.profiling is None else figures(saved.profiling, "+"),
                     f"{figures(saved.bound)} {saved.warning}".rstrip()])
    return rows, ["pair", "launch", "gained ms", *PARTS, "unexplained", "by the profiler", "bound"]


def beyond_the_limit(lines: list[Record], mode: str) -> tuple[list[list], list[str]]:
    """(rows, headers): from each step's limit to its time, in ms; a row adds up.

    "burst limit" is the time at the best rates of a moment. "power": what matmuls lose from there to the rates that
    they can sustain, in a row at the power cap. "matmuls": what they take beyond that. "attention": its kernels, beyond
    the limit at the matmuls' rate; by hand that is softmax and mask, and its matmuls are with the others. "passes": all
    other kernels, beyond the one pass of a LayerNorm. "launches": the GPU idles. "unexplained": between the clock and
    the profiled kernels.
    """
    rows = []
    for run in _attributed(lines, mode):
        of_burst, of_sustained = (_limit_by_kind(run, mode, LIMIT[yardstick]) for yardstick in (BURST, SUSTAINED))
        if run.at_power_cap(mode, run.profiled(mode)) is False:
            of_sustained = of_burst
        parts = run.parts(mode)
        if parts is None or of_burst is None or of_sustained is None:
            continue
        fused = parts["attention"] > 0
        attention_limit = of_burst["attention"]
        attention = parts["attention"] + parts["softmax and mask"] - (attention_limit if fused else 0.0)
        matmuls = parts["GEMM"] - of_sustained["matmul"] - (0.0 if fused else attention_limit)
        passes = parts["normalisation and activation"] + parts["casts and copies"] + parts["residual and other"]
        times = [sum(of_burst.values()), of_sustained["matmul"] - of_burst["matmul"], matmuls, attention,
                 passes - of_burst["memory"], parts["idle"], run.profiled_ms(mode) - sum(parts.values())]
        rows.append([short(run), run.profiled(mode), figures(times[0]), *(figures(ms, "+") for ms in times[1:]),
                     figures(sum(times))])
    return rows, ["step", "launch", "burst limit", "power", "matmuls", "attention", "passes", "launches", "unexplained",
                  "ms"]


def _limit_by_kind(run: Run, mode: str, limit: Metric) -> dict[str, float] | None:
    """Kind of operation -> ms; None where that was not recorded."""
    line = run.find(mode, limit.name, run.profiled(mode))
    return extra(line).get("by_kind") if line else None


def _attributed(lines: list[Record], mode: str) -> list[Run]:
    """The latest run of each step that is ok and profiled well enough."""
    return [run for run in latest(lines).values() if run.best(mode) and run.attributed(mode)]


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    case_runs = list(latest(lines).values())
    blocks = []
    for mode in MODES:
        blocks.append(f"{mode}\n\n{tables.of_runs(COLUMNS, case_runs, mode, width)}")
        rows, headers = gains(lines, mode)
        if rows:
            blocks.append(f"where the ms of {mode} went, step to step (+ is saved)\n\n{table(rows, headers, width)}")
        elif any(run.status == "ok" and run.parts(mode) and not run.attributed(mode) for run in case_runs):
            blocks.append(f"where the ms of {mode} went: n/a, it takes {PROFILED} profiled rounds (--profiled)")
        rows, headers = beyond_the_limit(lines, mode)
        if rows:
            blocks.append(f"from the limit to the ms of {mode} (+ is beyond it)\n\n{table(rows, headers, width)}")
        blocks.append(traffic(lines, mode, width))
    if len({run.info["run"] for run in case_runs}) > 1:
        blocks.append("Not all of these were timed in the same rounds: ratios between processes are unpaired.")
    died = [run for run in runs(lines) if run.status in ("failed", "oom")]                  # of five processes one, say
    return tables.framed(lines, blocks, [*case_runs, *died])


def charts(lines: list[Record]) -> Charts:
    """The steps at a glance; bars of each one's parts, and what each of them changes from step to step."""
    attributed = _attributed(lines, BOTH)
    if not attributed:
        return {}
    timed = [run for run in latest(lines).values() if run.best(BOTH)]
    drawn = {"steps": lambda: part_charts.limits(timed), "parts": lambda: part_charts.stacked(attributed),
             "waterfall": lambda: part_charts.waterfalls(attributed)}
    metered = [run for run in timed if tables.joules(run, BOTH)]
    if metered:
        drawn["energy"] = lambda: part_charts.energy(metered)
    return drawn


def answer(lines: list[Record]) -> str:
    """The whole ladder."""
    timed = [run for run in latest(lines).values() if run.best(BOTH)]
    times = (timed[0].best_ms(BOTH) or 0.0) / (timed[-1].best_ms(BOTH) or 1.0)
    return f"step {short(timed[-1])} is {times:.1f} times as fast as step {short(timed[0])}, forward+backward"


# ------------------------------------------------------------------------------------------------------------ its flags


def _rows_of(text_: str) -> tuple[str, ...]:
    """"0,2" -> ("0", "2"). Raises argparse.ArgumentTypeError."""
    names = tuple(text_.split(","))
    for name in names:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"no row {name!r}; give some of {','.join(ROWS)}")
    return names


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    add = parser.add_argument
    add("--steps", type=_rows_of, default=tuple(ROWS), metavar="LIST",
        help=f"which rows, of {','.join(ROWS)} (default: all)")
    add("--processes", type=count, default=1, metavar="N",
        help="run the whole N times, each in a process of its own: a noise floor for compare")
    add("--profiled", type=count, metavar="N",
        help=f"the first N rounds have iterations under the profiler, for where the ms went (default: all; {PROFILED} "
             "with --quick, 1 with --processes)")
    add("--slow-down", type=float, default=0.0, metavar="PERCENT",
        help="make every row so much slower, by a copy behind it: does compare find that?")
    add("--counters", action="store_true", help="bytes read and written in DRAM, by ncu (slow)")


def refine(options: Options) -> None:
    """Raise ValueError for flags that do not go together."""
    if not 0 <= options.slow_down <= 100:
        raise ValueError(f"--slow-down {options.slow_down:g}: give a percentage, at most 100")


register(Study("ladder", __doc__, groups, text=text, charts=charts, answer=answer, run=run,
               add_arguments=add_arguments, refine=refine,
               no_chart=f"it needs a step with {PROFILED} profiled rounds (with --processes there is one unless told)",
               place=1))
