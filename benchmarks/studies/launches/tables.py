"""What `launches` shows, from records: times by tokens, predictions, counts, charts, the answer in short."""
import functools
import statistics
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records.read import Run, extra, read, runner, runs, values
from benchmarks.show.charts import Charts, lines_chart
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.launches import autotuned, changes
from benchmarks.studies.launches.counting import HOST, KEPT, LAUNCHED, OF_ONE_TOKEN
from benchmarks.studies.launches.ways import (
    BY_HAND,
    COMPILED_STEP,
    OF_ITS_OWN,
    ONE_BY_ONE,
    REDUCE_OVERHEAD,
    STEPS,
    WAYS,
)
from common.measure.measurement import NOT_A_GPU
from common.report.record import Record
from common.runtime import rounds
from common.runtime.iteration import BOTH, FORWARD, MODES
from common.text import NOT_AVAILABLE, figures, ratio, table

NEAR = 0.1                             # a prediction that is off by no more is right
LITTLE = 1.05                          # times as fast: a graph that buys no more is not worth it
Key = tuple[int, str, int]             # step, way, tokens
Times = tuple[float, float, float]     # ratio of medians, and its 95 % interval


# --------------------------------------------------------------------------------------------------------- from records


def tokens_of(run: Run) -> int:
    """Of the shape that it ran at."""
    config = run.info["config"]
    return config["batch_size"] * config["seq_len"]


def by_key(lines: list[Record]) -> dict[Key, Run]:
    """Each case's latest run, but for those of processes of their own, which are no part of the same rounds."""
    elsewhere = {of_process[0].info["run"] for of_process in autotuned.of_processes(lines)}
    latest: dict[Key, Run] = {}
    for run in runs(lines):
        if run.step is not None and "change" not in run.variant and run.info["run"] not in elsewhere:
            latest[run.step, run.variant["way"], tokens_of(run)] = run
    return latest


def launched_by(way: str) -> tuple[str, str]:
    """(the way of the case that holds it, the session's way of launching that)."""
    return (ONE_BY_ONE, "graph") if way == BY_HAND else (way, "eager")


def samples_of(of_all: dict[Key, Run], number: int, way: str, tokens: int, mode: str) -> list[float]:
    """Milliseconds; empty where it was not timed."""
    of_case, launch = launched_by(way)
    run = of_all.get((number, of_case, tokens))
    return run.samples(mode, launch) if run and run.status == "ok" else []


def median_of(of_all: dict[Key, Run], number: int, way: str, tokens: int, mode: str) -> float | None:
    """Milliseconds; None where it was not timed."""
    samples = samples_of(of_all, number, way, tokens, mode)
    return statistics.median(samples) if samples else None


def gain_of(of_all: dict[Key, Run], number: int, way: str, tokens: int, mode: str) -> Times | None:
    """How many times as fast as one by one; None where the two were not timed in the same rounds."""
    keys = [(number, launched_by(each)[0], tokens) for each in (ONE_BY_ONE, way)]
    if any(key not in of_all for key in keys) or len({of_all[key].info["run"] for key in keys}) > 1:
        return None
    first, own = (samples_of(of_all, number, each, tokens, mode) for each in (ONE_BY_ONE, way))
    return rounds.paired_ratio(first, own) if first and len(first) == len(own) else None


def sizes_of(of_all: dict[Key, Run]) -> list[int]:
    return sorted({tokens for _, _, tokens in of_all})


def rows_of(of_all: dict[Key, Run]) -> list[tuple[int, str]]:
    """(step, way) of every row, in order; one by one and by hand are one case."""
    present = {(number, way) for number, way, _ in of_all}
    present |= {(number, BY_HAND) for number, way in present if way == ONE_BY_ONE}
    return sorted(present, key=lambda row: (row[0], WAYS.index(row[1])))


@dataclass(frozen=True)
class Prediction:
    """What a graph should buy, and what it does."""
    host_ms: float                     # to launch an iteration one by one
    kernels_ms: float                  # of the GPU in its kernels
    replay_ms: float
    measured: float                    # times as fast by graph

    @property
    def expected(self) -> float:
        return max(self.host_ms, self.kernels_ms) / self.replay_ms

    @property
    def off(self) -> float:
        """By what share the measured passes the expected."""
        return self.measured / self.expected - 1


def prediction(run: Run, mode: str) -> Prediction | None:
    """None where one of the figures is missing."""
    if run.status != "ok":
        return None
    eager, graph = run.median(mode, "eager"), run.median(mode, "graph")
    host, parts = run.value(mode, HOST, "eager"), run.parts(mode)
    if not (eager and graph and host and parts):
        return None
    return Prediction(host, sum(parts.values()) - parts["idle"], graph, eager / graph)


def predictions(of_all: dict[Key, Run], mode: str) -> Iterator[tuple[int, int, Prediction]]:
    """(step, tokens, what was predicted) of every case that has all its figures."""
    for (number, way, tokens), run in of_all.items():
        predicted = prediction(run, mode) if way == ONE_BY_ONE else None
        if predicted:
            yield number, tokens, predicted


def crossover(of_all: dict[Key, Run], number: int, mode: str) -> int | None:
    """The fewest tokens from which on a graph by hand buys next to nothing; None where that is nowhere."""
    smallest = None
    for tokens in reversed(sizes_of(of_all)):
        gain = gain_of(of_all, number, BY_HAND, tokens, mode)
        if not gain or gain[0] > LITTLE:
            break
        smallest = tokens
    return smallest


def where_it_pays(of_all: dict[Key, Run], number: int, mode: str) -> str:
    """At which sizes a graph by hand buys more than that, in words."""
    sizes, at = sizes_of(of_all), crossover(of_all, number, mode)
    if at is None:
        return f"at every size up to {sizes[-1]} tokens"
    return f"below {at} tokens" if at > sizes[0] else "nowhere"


def predicted_crossover(of_all: dict[Key, Run], number: int, mode: str) -> int | None:
    """The fewest tokens from which on the kernels take longer than the host; None where that is nowhere."""
    of_step = {tokens: each for its_number, tokens, each in predictions(of_all, mode) if its_number == number}
    smallest = None
    for tokens in sorted(of_step, reverse=True):
        if of_step[tokens].kernels_ms < of_step[tokens].host_ms:
            break
        smallest = tokens
    return smallest


# ------------------------------------------------------------------------------------------------------- what it shows


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    of_all = by_key(lines)
    blocks = []
    for mode in MODES:
        every = (_times, _predictions, _counts, _on_cpu)
        tables = [shown for each in every if (shown := each(of_all, mode, width))]
        if tables:
            blocks.append("\n\n".join([mode, *tables]))
    blocks += [autotuned.text(lines, width), _changes(lines), "\n".join(findings(of_all)), _why_not(of_all)]
    return framed(lines, blocks, [run for run in of_all.values() if run.status != "skipped"])


def _times(of_all: dict[Key, Run], mode: str, width: int | None) -> str:
    """Milliseconds, and how many times as fast as the same step one by one."""
    rows, headers = [], ["ms, by tokens"]
    for tokens in sizes_of(of_all):
        headers += [f"{tokens}", "x"]
    for number, way in rows_of(of_all):
        row, was_timed = [f"step {number}, {way}"], False
        for tokens in sizes_of(of_all):
            ms = median_of(of_all, number, way, tokens, mode)
            gain = gain_of(of_all, number, way, tokens, mode) if way != ONE_BY_ONE else None
            row += [figures(ms) if ms else _status(of_all, number, way, tokens), f"{gain[0]:.2f}" if gain else ""]
            was_timed = was_timed or ms is not None
        if was_timed:
            rows.append(row)
    return table(rows, headers, width) if rows else ""


def _status(of_all: dict[Key, Run], number: int, way: str, tokens: int) -> str:
    of_case, _ = launched_by(way)
    run = of_all.get((number, of_case, tokens))
    if run is None:
        return "-"
    return run.status if run.status in ("failed", "oom") else NOT_AVAILABLE


def _predictions(of_all: dict[Key, Run], mode: str, width: int | None) -> str:
    """The host against the kernels."""
    rows = []
    for number, tokens, each in predictions(of_all, mode):
        of_times = map(figures, (each.host_ms, each.kernels_ms, each.replay_ms))
        rows.append([f"step {number}, {tokens} tokens", *of_times, f"{each.expected:.2f}", f"{each.measured:.2f}",
                     f"{100 * each.off:+.0f} %"])
    headers = ["one by one", "host ms", "in kernels", "replay", "x predicted", "x measured", "off by"]
    return table(rows, headers, width) if rows else ""


def host_shares(of_all: dict[Key, Run], mode: str) -> list[tuple[int, int, float]]:
    """(step, tokens, share of the time that one token takes too) of what was timed on a CPU."""
    shares = []
    for (number, _, tokens), run in of_all.items():
        of_one, whole = run.value(mode, OF_ONE_TOKEN, "eager"), run.median(mode, "eager")
        if of_one and whole:
            shares.append((number, tokens, of_one / whole))
    return shares


def _on_cpu(of_all: dict[Key, Run], mode: str, width: int | None) -> str:
    """The host's own share, where kernels are calls that it waits for."""
    rows = []
    for number, tokens, share in host_shares(of_all, mode):
        ms = median_of(of_all, number, ONE_BY_ONE, tokens, mode)
        assert ms is not None
        rows.append([f"step {number}, {tokens} tokens", figures(ms), figures(share * ms), f"{100 * share:.0f} %"])
    return table(rows, ["on a CPU", "ms", "one token, ms", "the host's share"], width) if rows else ""


def _counts(of_all: dict[Key, Run], mode: str, width: int | None) -> str:
    """Calls that launch, what is copied, and the memory of the graphs."""
    rows = []
    for (number, way, tokens), run in of_all.items():
        line = run.find(mode, LAUNCHED, "eager")
        if not line:
            continue
        graphs, = values(line)
        skipped = ": skipped" if way in OF_ITS_OWN and not graphs else ""
        kept = run.value(mode, KEPT, "graph" if way == ONE_BY_ONE else "eager")
        rows.append([f"step {number}, {way}, {tokens} tokens", f"{graphs:.0f}{skipped}", str(extra(line)["kernels"]),
                     figures(extra(line)["copy_ms"]), NOT_AVAILABLE if kept is None else figures(kept / 2**20)])
    headers = ["of an iteration", "graphs", "kernels one by one", "copying ms", "graphs keep MiB"]
    return table(rows, headers, width) if rows else ""


def _changes(lines: list[Record]) -> str:
    """What each way does where something moves, and how many usual calls the first one behind it takes."""
    rows: dict[str, list[str]] = {}
    for run in runs(lines):
        line = run.find(FORWARD, changes.CHANGED)
        if not line:
            continue
        if run.status == "skipped":
            return f"n/a, what happens where parameters or inputs move: {run.info['reason']}"
        said, taken = extra(line).get("happened") or f"failed: {run.info['reason']}", values(line)
        if len(taken) > 1 and taken[1] > 2 * taken[0]:
            said += f", the first call takes {taken[1] / taken[0]:.0f} x"
        rows.setdefault(f"step {run.step}, {run.variant['way']}", []).append(f"{run.variant['change']}: {said}")
    return "\n".join(f"{what}: {'; '.join(each)}" for what, each in rows.items())


def findings(of_all: dict[Key, Run]) -> list[str]:
    """How often the prediction holds, and what graphs buy; nothing where there is no graph."""
    off = [abs(each.off) for mode in MODES for _, _, each in predictions(of_all, mode)]
    if not off:
        return []
    right = sum(each <= NEAR for each in off)
    found = [f"the prediction is within {100 * NEAR:.0f} % on {right} of {len(off)} points"]
    fewest = sizes_of(of_all)[0]
    for number in STEPS:
        if best := best_at(of_all, number, fewest, BOTH):
            way, times = best
            gained = "no way is faster than" if way == ONE_BY_ONE else f"{way} is {ratio(times)} times as fast as"
            found.append(f"step {number}, {BOTH}, {fewest} tokens: {gained} one by one")
        for mode in MODES:
            if gain_of(of_all, number, BY_HAND, fewest, mode):
                found.append(f"step {number}, {mode}: a graph buys more than 5 % {where_it_pays(of_all, number, mode)}")
    most = sizes_of(of_all)[-1]
    if (share := copied(of_all, most)) is not None:
        found.append(f"{FORWARD}, {most} tokens: to copy its input takes {100 * share:.1f} % of a call by "
                     f"{REDUCE_OVERHEAD}")
    return found


def copied(of_all: dict[Key, Run], tokens: int) -> float | None:
    """The share of a forward by reduce-overhead that goes into copies which the default has not; None where unknown."""
    by_tree, default = (of_all.get((COMPILED_STEP, way, tokens)) for way in (REDUCE_OVERHEAD, ONE_BY_ONE))
    lines = [run.find(FORWARD, LAUNCHED, "eager") if run else None for run in (by_tree, default)]
    ms = by_tree.median(FORWARD, "eager") if by_tree else None
    if not all(lines) or not ms:
        return None
    of_tree, of_default = (extra(line)["copy_ms"] for line in lines if line)
    return (of_tree - of_default) / ms


def best_at(of_all: dict[Key, Run], number: int, tokens: int, mode: str) -> tuple[str, Times] | None:
    """(the fastest way, how many times as fast as one by one); None where nothing was timed beside that."""
    gains = {way: gain for way in WAYS if (gain := gain_of(of_all, number, way, tokens, mode))}
    if not gains.keys() - {ONE_BY_ONE}:
        return None
    way = max(gains, key=lambda each: gains[each][0])
    return way, gains[way]


def _why_not(of_all: dict[Key, Run]) -> str:
    """A line for each reason that a row has no time."""
    reasons: dict[str, list[str]] = {}
    for (number, way, _), run in of_all.items():
        if run.info["reason"]:
            reasons.setdefault(run.info["reason"], []).append(f"step {number}, {way}")
        elif way == ONE_BY_ONE and run.info["device"] == "cpu":
            reasons.setdefault(NOT_A_GPU, []).append(f"step {number}, {BY_HAND}")
        line = run.find(BOTH, LAUNCHED, "eager")
        for reason in extra(line).get("skipped", ()) if line else ():
            reasons.setdefault(f"no graph: {reason}", []).append(f"step {number}, {way}")
    return "\n".join(f"n/a, {'; '.join(dict.fromkeys(what))}: {reason}" for reason, what in reasons.items())


def charts(lines: list[Record]) -> Charts:
    """Forward+backward over the tokens, a chart a step: each way, and from where on a graph buys nothing."""
    of_all, drawn = by_key(lines), {}
    for number in STEPS:
        series = {}
        for _, way in (row for row in rows_of(of_all) if row[0] == number):
            points = []
            for tokens in sizes_of(of_all):
                if ms := median_of(of_all, number, way, tokens, BOTH):
                    points.append((float(tokens), ms))
            if points:
                series[way] = points
        if series:
            marks = {}
            if at := predicted_crossover(of_all, number, BOTH):
                marks["predicted: the kernels take longer than the host"] = float(at)
            if at := crossover(of_all, number, BOTH):
                marks["measured: a graph buys 5 % or less"] = float(at)
            drawn[f"step-{number}"] = functools.partial(lines_chart, series, "tokens", "ms, forward+backward",
                                                        f"step {number}, by way of launching", marks)
    return drawn


def when_to_use_one(path: Path) -> str:
    """When to reach for a graph, in three sentences, from a GPU's records."""
    lines = read(path)
    of_all = by_key(lines)
    fewest = sizes_of(of_all)[0]
    gains = [gain_of(of_all, COMPILED_STEP, way, fewest, BOTH) for way in (BY_HAND, REDUCE_OVERHEAD)]
    by_hand, by_tree = (f"{gain[0]:.1f}" if gain else NOT_AVAILABLE for gain in gains)
    forward, both = (_where_it_pays(of_all, mode) for mode in MODES)
    gpu = runner(lines[0])["name"]
    sentences = [
        "**Use a graph** when launching an iteration takes longer than running it.",
        f"At gpt2's width on the {gpu} a graph buys more than 5 %: {FORWARD} {forward}; {BOTH} {both}.",
        f"Captured by hand it buys most, {by_hand} times for step {COMPILED_STEP} at {fewest} tokens, {BOTH}, but "
        f'nothing may move in memory; `mode="{REDUCE_OVERHEAD}"` buys {by_tree} times and follows what moves.']
    return textwrap.fill(" ".join(sentences), 120, break_on_hyphens=False)


def _where_it_pays(of_all: dict[Key, Run], mode: str) -> str:
    """Of all steps."""
    steps_of: dict[str, list[str]] = {}
    for number in STEPS:
        steps_of.setdefault(where_it_pays(of_all, number, mode), []).append(str(number))
    return ", ".join(f"{where} (step {', '.join(which)})" for where, which in steps_of.items())


def answer(lines: list[Record]) -> str:
    """What the best way buys step 4 at the fewest tokens, and from where on none does; on a CPU the host's share."""
    of_all = by_key(lines)
    if shares := host_shares(of_all, BOTH):
        (_, fewest, first), (_, most, last) = shares[0], shares[-1]
        return f"on a CPU the host takes {100 * first:.0f} % of {fewest} tokens, {100 * last:.0f} % of {most}"
    fewest = min(sizes_of(of_all), default=0)
    best = best_at(of_all, 4, fewest, BOTH)
    if not best or best[0] == ONE_BY_ONE:
        return NO_ANSWER
    at = crossover(of_all, 4, BOTH)
    return (f"at {fewest} tokens {best[0]} makes step 4 {best[1][0]:.1f} times as fast, "
            + (f"from {at} on nothing" if at else "and helps at every size"))
