"""What the study of patterns tells of its records: a summary, a table for each pattern and length, a chart."""
import math
from collections.abc import Sequence

from benchmarks.patterns.ways import SDPA
from benchmarks.records.read import Run, extra, paired, runs, verdict
from benchmarks.show.charts import Charts, Interval, markers_chart
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.patterns.subjects import FIRST_CALLS, MASK
from common.report.metrics import SHARE
from common.report.record import Record
from common.runtime.iteration import BOTH, FORWARD, MODES
from common.runtime.peaks import BURST
from common.text import figures, only, ratio, table

CONTROL = "control"                    # plain causal attention by SDPA, in every group
SUMMARY = """The fastest way of each pattern that has a backward, and its speed: over plain causal attention of the
same sizes, and over scaled_dot_product_attention with a dense mask, each in the same rounds. f+b: forward+backward."""
PAYS = """"pays from": so many layers must share a mask until making it is won back against SDPA's dense mask, over a
forward and a backward."""

BESIDE = {CONTROL: "causal attention", SDPA: "a dense mask"}

Key = tuple[int, str]                  # length, pattern
Ways = dict[str, Run]                  # way -> its run; the control that ran beside them is one


def by_pattern(lines: list[Record]) -> dict[Key, Ways]:
    """(length, pattern) -> way -> its latest run there."""
    found: dict[Key, Ways] = {}
    for run in runs(lines):
        is_control = run.case["name"] == CONTROL
        name = run.variant["beside"] if is_control else run.case["name"]
        ways = found.setdefault((run.variant["length"], name), {})
        ways[CONTROL if is_control else run.variant["way"]] = run
    return found


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    every = by_pattern(lines)
    blocks = [_summary(every, width)]
    for (length, name), ways in every.items():
        if any(run.best(FORWARD) for run in ways.values()):
            blocks.append(f"{name}, S {length:,}\n\n{_of_ways(ways, width)}")
    blocks += [PAYS, "\n".join(_rejected(every)), "\n".join(_without_time(every))]
    return framed(lines, blocks, (run for run in runs(lines) if run.status not in ("skipped", "oom")))


# --------------------------------------------------------------------------------------------------------- the summary


def _summary(every: dict[Key, Ways], width: int | None) -> str:
    rows = []
    for (length, name), ways in every.items():
        fastest = _fastest(ways)
        if fastest is None:
            continue
        row = [name, f"{length:,}", fastest.variant["way"]]
        for against in (ways.get(CONTROL), ways.get(SDPA)):
            row += [_times(against, fastest, mode) for mode in MODES]
        rows.append(row)
    headers = ["pattern", "S", "fastest", "x causal, forward", "f+b", "x dense mask, forward", "f+b"]
    return f"{SUMMARY}\n\n{table(rows, headers, width, keys=2)}" if rows else ""


def summary(lines: list[Record], width: int | None = None) -> str:
    """The fastest way of each pattern."""
    return _summary(by_pattern(lines), width)


def _fastest(ways: Ways, modes: Sequence[str] = (BOTH, FORWARD)) -> Run | None:
    """By forward and backward together; where nobody has a backward, by the forward."""
    for mode in modes:
        timed = [(run.best_ms(mode) or math.inf, way) for way, run in ways.items() if way != CONTROL and run.best(mode)]
        if timed:
            return ways[min(timed)[1]]
    return None


def _times(against: Run | None, run: Run, mode: str) -> str:
    """How many times as fast as another, with its interval; empty where they were not timed together."""
    times = paired(against, run, mode) if against is not run else None
    return ratio(times) + verdict(*times[1:]) if times else ""


# ---------------------------------------------------------------------------------------------------------- the tables


def _of_ways(ways: Ways, width: int | None) -> str:
    """A row a way; columns in which nothing stands are left out."""
    headers = ["way", "status", "kernel", "error", "forward ms", "f+b ms", "x causal, forward", "f+b", "% of limit",
               "f+b %", "mask ms", "first calls s", "pays from"]
    rows = [_row(name, run, ways) for name, run in ways.items() if run.status != "skipped"]
    shown = [0]
    for place in range(1, len(headers)):
        if not {row[place] for row in rows} <= {"", "n/a", "ok"}:
            shown.append(place)
    return table([only(row, shown) for row in rows], only(headers, shown), width)


def _row(name: str, run: Run, ways: Ways) -> list[str]:
    times = [run.best_ms(mode) for mode in MODES]
    percents = [run.figure(SHARE[BURST], mode) for mode in MODES]
    mask_ms, first_calls = run.value("check", MASK), run.value("check", FIRST_CALLS)
    return [f"{CONTROL}: causal" if name == CONTROL else name, run.status, _kernel(run), _error(run),
            *(figures(ms) if ms else "" for ms in times),
            *(_times(ways.get(CONTROL), run, mode) for mode in MODES),
            *("" if percent is None else f"{percent:.0f}" for percent in percents),
            "" if mask_ms is None else figures(mask_ms), "" if first_calls is None else figures(first_calls),
            _pays_from(run, ways.get(SDPA))]


def _kernel(run: Run) -> str:
    line = run.find("check", MASK)
    return extra(line)["kernel"] if line else ""


def _error(run: Run) -> str:
    """The largest of outputs and gradients."""
    errors = run.errors().values()
    return f"{max(errors):.1e}" if errors else ""


def _pays_from(run: Run, dense: Run | None) -> str:
    """How many layers must share its mask; "never" where it is not faster than SDPA with a dense one."""
    if dense is None or run is dense or run.case["name"] == CONTROL:
        return ""
    own, other = run.best_ms(BOTH), dense.best_ms(BOTH)
    mask_ms, dense_ms = run.value("check", MASK), dense.value("check", MASK)
    if own is None or other is None or mask_ms is None or dense_ms is None:
        return ""
    if own >= other:
        return "never"
    layers = max(1, math.ceil((mask_ms - dense_ms) / (other - own)))
    return f"{layers:,} layer{'s' if layers > 1 else ''}"


def _rejected(every: dict[Key, Ways]) -> list[str]:
    """Why backends of SDPA could not take a pattern, a line for each reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (length, name), ways in every.items():
        line = ways[SDPA].find("check", MASK) if SDPA in ways else None
        for backend, reason in (extra(line)["rejected"] if line else {}).items():
            by_reason.setdefault((backend, reason), []).append(f"{name} at {length:,}")
    return [f"{backend} can't take {', '.join(where)}: {reason}" for (backend, reason), where in by_reason.items()]


def _without_time(every: dict[Key, Ways]) -> list[str]:
    """What was not timed, a line for each reason."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for (length, name), ways in every.items():
        for way, run in ways.items():
            if run.status != "ok":
                reason = f"{run.status}: {run.info['reason']}"
                by_reason.setdefault(reason, {}).setdefault(way, []).append(f"{name} at {length:,}")
    sentences = []
    for reason, where in by_reason.items():
        named = [f"{way} of {', '.join(patterns)}" for way, patterns in where.items()]
        sentences.append(f"{reason}: {'; '.join(named)}")
    return sentences


# ----------------------------------------------------------------------------------------------------------- the chart


def _speeds(lines: list[Record]) -> dict[str, dict[str, dict[str, Interval]]]:
    """"S 2,048" -> pattern -> way -> how many times as fast as causal attention, forward."""
    speeds: dict[str, dict[str, dict[str, Interval]]] = {}
    for (length, name), ways in by_pattern(lines).items():
        for way, run in ways.items():
            times = paired(ways.get(CONTROL), run, FORWARD) if way != CONTROL else None
            if times:
                speeds.setdefault(f"S {length:,}", {}).setdefault(name, {})[way] = times
    return speeds


def charts(lines: list[Record]) -> Charts:
    """How many times as fast as causal attention each way is, forward: a panel a length, a row a pattern."""
    speeds = _speeds(lines)
    if not speeds:
        return {}
    return {"speed": lambda: markers_chart(speeds, "times as fast as causal attention, forward", line_at=1)}


def answer(lines: list[Record]) -> str:
    """What the narrowest window buys at the longest length."""
    windows = {}
    for (length, name), ways in by_pattern(lines).items():
        if name == "window 256" and (fastest := _fastest(ways, [FORWARD])):
            windows[length] = fastest, paired(ways.get(CONTROL), fastest, FORWARD)
    if not windows:
        return NO_ANSWER
    length = max(windows)
    fastest, times = windows[length]
    if times is None:
        return NO_ANSWER
    return (f"a window of 256 at S {length:,}: {times[0]:.1f} times as fast as causal attention "
            f"({fastest.variant['way']}, forward)")
