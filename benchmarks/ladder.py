"""What does each step buy, why, and how sure is that? All five steps side by side, timed in interleaved rounds.

    python -m benchmarks.ladder                        # the five steps at this machine's default shape
    python -m benchmarks.ladder --preset gpt2 --json gpt2.jsonl --chart gpt2
    python -m benchmarks.ladder --readme               # rewrite README's tables and charts from the recorded runs

Every step is checked against FP64 before it is timed. `x previous` is the median of the ratios within one round, with
its 95 % bootstrap interval; SAME where that holds 1 and stays within 5 % of it, UNSURE where it holds 1 and does not.
Then, for each pair of neighbours, where the milliseconds went, from profiled kernels of the same run.
Exit status: 0 ok, 1 a step failed or did not fit, 2 usage, 3 out of memory in the rounds, 4 no step was
timed, 130 interrupted.
"""
import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from common import device as machine
from common import harness, report, steps
from common.config import BlockConfig, dtype_name
from common.run import EXIT

from . import charts, command, counters, records
from .attribution import IDLE, PARTS
from .records import Run
from .study import Case, Study, of_step_4

ROWS = ("0", "1-tf32", "1", "2", "3", "4")                 # what --steps takes: step 1 with TF32 alone, then autocast


def cases(config: BlockConfig, device: torch.device, names: tuple[str, ...] = ROWS) -> list[Case]:
    """The rows of the ladder at that shape."""
    found = []
    for name in names:
        step, missing = int(name[0]), ""
        alone = name.endswith("tf32")
        if alone and config.amp_dtype is None:
            continue                                           # step 1 has no autocast either: one row of it
        if alone and not (device.type == "cuda" and torch.cuda.is_tf32_supported()):
            missing = "this machine has no TF32: it would be step 0 again"
        of_row = config.replace(amp_dtype=None) if alone else config
        if step == 4:
            of_row = of_step_4(config, device)
            try:
                config.check_fp8()
            except ValueError as error:
                missing = str(error)
        found.append(Case(steps.path(step).stem, steps.load(step).build, step, of_row, claims=step, missing=missing))
    return found


def measure(options: argparse.Namespace) -> Study:
    """The study of one process that measures all of `options.steps` together."""
    study = Study("ladder", options)
    for case in cases(options.config, options.device, options.steps):
        study.prepare(case)
    for mode in report.MODES:
        study.time(mode, profiled=options.profiled or (records.PROFILED if options.quick else options.rounds))
    if options.counters:
        study.say("counting DRAM traffic")
        counters.measure(study)
    return study


def holds_all(options: argparse.Namespace) -> bool:
    """Whether all steps fit into this GPU together: each with a captured graph, which keeps its memory."""
    needed = sum(case.memory_needed(options.device) for case in cases(options.config, options.device, options.steps))
    return needed < 0.9 * machine.memory_total(options.device)


def in_processes(options: argparse.Namespace, each: list[tuple[str, ...]], argv: list[str]) -> list[dict]:
    """One process for each of `each` (which rows it measures), one after another; their records."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        for number, rows in enumerate(each):
            path = Path(folder) / f"{number}.jsonl"
            command_line = [sys.executable, "-m", "benchmarks.ladder", *argv, "--steps", ",".join(rows),
                            "--processes", "1", "--chart", "", "--json", str(path)]
            if options.processes > 1 and not options.profiled:
                command_line += ["--profiled", "1"]                      # their times are what is asked for
            status = None
            try:
                status = subprocess.run(command_line, cwd=steps.ROOT, stdout=subprocess.DEVNULL).returncode
            finally:                                                 # interrupted: what it finished is kept
                found = records.read(path) if path.exists() and path.stat().st_size else []
                if status not in (None, EXIT["ok"]):           # Python's own status for a traceback is that of "failed"
                    found += _died(options, rows, found, status)
                options.output.write(found)
                lines += found
    return lines


def _died(options: argparse.Namespace, rows: tuple[str, ...], found: list[dict], status: int) -> list[dict]:
    """A record for each row that a process which ended early did not finish."""
    facts, lines = machine.facts(options.device), []
    runs = {(run.info["step"], run.info["config"]["amp_dtype"]): run for run in records.runs(found)}
    for case in cases(options.config, options.device, rows):
        run = runs.get((case.name, dtype_name(case.config.amp_dtype)))
        if run is None or (run.status == "ok" and not run.best(report.MODES[-1])):
            r = report.Report(case.name, case.config, "float32", facts, "failed", f"its process ended with {status}",
                              study="ladder", engine=run.info["engine"] if run else "PyTorch")
            lines.append(report.record(r, "status", "", [], "run"))
    return lines


def ladder(lines: list[dict], mode: str) -> tuple[list[list], list[str]]:
    """(rows, headers) of one pass, from records of any number of runs: the latest of each step."""
    headers = ["step", "status", "launch", "ms", "p20 to p80", "x first", "x previous [95 %]", "TFLOP/s", "% limit",
               "MHz", "GiB", "launches", "compile s", "error", "bound by"]
    found = [run for run in records.latest(lines).values() if run.info["step"][0].isdigit()]
    rows, first, previous, left_out = [], None, None, False
    for run in found:
        launch = run.best(mode)
        error = run.value("check", "branch error")
        if launch is None or run.status != "ok":
            rows.append([run.label, run.status, "", *[""] * 10, f"{error:.1e}" if error else "", ""])
            left_out = True
            continue
        line = run.find(mode, "latency", launch)
        latency, machine_then = line["metric"]["extra_info"], line["runners"][0]["extra_info"]
        first = first or run
        compile_s = run.value("compile", "compile cold")
        rows.append([
            run.label, run.status, launch, _number(latency["median"], 2),
            f"{_number(latency['p20'], 2)} to {_number(latency['p80'], 2)}",
            f"{first.best_ms(mode) / run.best_ms(mode):.2f}",
            versus(previous, run, mode) + (f" (to {_short(previous)})" if left_out else "") if previous else "",
            command.figures(run.value(mode, "rate", launch) * 1e-12),
            report.percent(run.value(mode, "percent of limit", launch)),
            str(machine_then.get("sm_mhz", "n/a")),
            _number(_scaled(run.value(mode, "peak memory", "eager"), 2**-30), 1),
            _number(run.value(mode, "launches"), 0), _number(compile_s, 0), f"{error:.1e}", bound_by(run, mode)])
        previous, left_out = run, False
    return rows, headers


def versus(previous: Run, run: Run, mode: str) -> str:
    """Times the previous step: the paired ratio and its interval, or the plain ratio where the two were not paired."""
    ratio = records.paired(previous, run, mode)
    if ratio is None:
        return f"{previous.best_ms(mode) / run.best_ms(mode):.2f} (unpaired)"
    middle, low, high = ratio
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]{records.verdict(low, high)}"


def bound_by(run: Run, mode: str) -> str:
    """launch, memory or compute: what most of the time of the faster way of launching goes to.

    compute: matmuls and attention, as far as their FLOPs and not their bytes set the limit of this machine for them.
    """
    parts, limit = run.parts(mode), run.find(mode, "limit", run.best(mode))
    if run.best(mode) == "eager" and run.launch_bound(mode):
        return "launch"
    if parts is None or limit is None:
        return "n/a"
    whole, flop_bound = sum(parts.values()), limit["metric"]["extra_info"]["flop_bound"]
    if parts[IDLE] > 0.5 * whole:
        return "launch"
    return "compute" if flop_bound * (parts["GEMM"] + parts["attention"]) > 0.5 * whole else "memory"


def attribution(lines: list[dict], mode: str) -> tuple[list[list], list[str]]:
    """(rows, headers): for each pair of neighbours, how many ms each part gave; positive: the later step takes less.

    "gained ms" is the difference of the two by the clock, means of the middle three fifths of the samples before the
    profiled iterations, as the parts are of these: the sum of the parts, of "while profiled" and of "unexplained".
    "while profiled" is what the difference by the clock changes by while the profiler runs; n/a, and in what is
    unexplained, in records from before it was taken. "unexplained" is what is then left between clock and kernels. The
    bound is the larger of 5 % of the gain and 0.5 % of the slower step; EXCEEDED where what is unexplained is beyond
    it, and "EXCEEDED with profiling" where the two together are. Steps of which fewer than five rounds were profiled
    have no row.
    """
    timed = [run for run in of_steps(lines) if run.attributed(mode)]
    rows = []
    for a, b in itertools.pairwise(timed):
        before, after = a.parts(mode), b.parts(mode)
        gained = a.profiled_ms(mode) - b.profiled_ms(mode)
        profiling, unexplained = records.beside_the_parts(a, b, mode)
        rows.append([f"{_short(a)} -> {_short(b)}", f"{a.profiled(mode)}, {b.profiled(mode)}",
                     command.figures(gained, "+"),
                     *(command.figures(before[part] - after[part], "+") for part in PARTS),
                     "n/a" if profiling is None else command.figures(profiling, "+"),
                     command.figures(unexplained, "+"),
                     f"{command.figures(records.bound_of_the_parts(a, b, mode))} "
                     f"{records.beyond_the_bound(a, b, mode)}".rstrip()])
    return rows, ["pair", "launch", "gained ms", *PARTS, "while profiled", "unexplained", "bound"]


def of_steps(lines: list[dict]) -> list[Run]:
    """The latest run of each step that is ok."""
    return [run for run in records.latest(lines).values() if run.info["step"][0].isdigit() and run.status == "ok"]


def _short(run: Run) -> str:
    return run.info["step"][0] + (" TF32" if "TF32" in run.label else "")


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def text(lines: list[dict], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    found, blocks = list(records.latest(lines).values()), [records.provenance(lines)]
    for mode in report.MODES:
        blocks.append(f"{mode}\n\n" + command.table(*ladder(lines, mode), width))
        rows, headers = attribution(lines, mode)
        if rows:
            blocks.append(f"where the ms of {mode} went, step to step (+ is saved)\n\n"
                          + command.table(rows, headers, width))
        elif any(run.parts(mode) and not run.attributed(mode) for run in of_steps(lines)):
            blocks.append(f"where the ms of {mode} went: n/a, it takes {records.PROFILED} profiled rounds (--profiled)")
        if traffic := counters.table(lines, mode, width):
            blocks.append(traffic)
    if len({run.info.get("run") for run in found if run.info["step"][0].isdigit()}) > 1:
        blocks.append("Not all of these were timed in the same rounds: ratios between processes are unpaired.")
    died = [run for run in records.runs(lines) if run.status in ("failed", "oom")]          # of five processes one, say
    blocks.append("\n".join(records.cautions([*found, *died])))
    return "\n\n".join(filter(None, blocks))


def chart_stems(lines: list[dict], stem: str) -> list[str]:
    """The charts that `draw` makes of these records; none where no step was attributed."""
    return [f"{stem}-parts", f"{stem}-waterfall"] if charts.attributed(lines) else []


def draw(lines: list[dict], stem: str) -> None:
    """Draw `chart_stems`."""
    if charts.attributed(lines):
        charts.ladder(lines, stem)
    else:
        command.no_chart("ladder", f"it needs a step with {records.PROFILED} profiled rounds (with --processes there "
                                   "is one unless told)")


def rows_of(text_: str) -> tuple[str, ...]:
    """"0,2" -> ("0", "2"). Raises argparse.ArgumentTypeError."""
    found = tuple(text_.split(","))
    if unknown := [name for name in found if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"no row {unknown[0]!r}; give some of {','.join(ROWS)}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = command.parser("ladder", __doc__)
    parser.add_argument("--steps", type=rows_of, default=ROWS, metavar="LIST",
                        help=f"which rows, of {','.join(ROWS)} (default: all)")
    parser.add_argument("--processes", type=command.count, default=1, metavar="N",
                        help="run the whole N times, each in a process of its own: a noise floor for compare")
    parser.add_argument("--profiled", type=command.count, metavar="N",
                        help="the first N rounds have iterations under the profiler, for where the ms went (default: "
                             f"all; {records.PROFILED} with --quick, 1 with --processes)")
    parser.add_argument("--counters", action="store_true", help="bytes read and written in DRAM, by ncu (slow)")
    parser.add_argument("--readme", action="store_true", help="measure nothing: rewrite README.md from recorded runs")
    argv = sys.argv[1:] if argv is None else argv
    if "--readme" in argv and len(argv) > 1:
        command.usage(parser, "--readme measures nothing: give it alone")
    options = command.parse(parser, argv)
    with command.shown_to_a_person("ladder", options.output):
        if options.readme:
            from . import readme  # it draws on all studies, this one among them
            readme.write()
            return EXIT["ok"]
        harness.use_private_caches()
        study = None
        if options.processes > 1:
            lines = in_processes(options, [options.steps] * options.processes, argv)
        elif options.device.type == "cuda" and len(options.steps) > 1 and not holds_all(options):
            lines = in_processes(options, [(name,) for name in options.steps], argv)
        else:
            with machine.alone(options.device, "ladder"):
                study = measure(options)
            lines = study.lines
        if study:
            return study.show(text, draw)
        command.tell(text(lines))
        if options.chart:
            draw(lines, options.chart)
        return command.exit_status(run.status for run in records.runs(lines) if run.info["step"][0].isdigit())


if __name__ == "__main__":
    sys.exit(main())
