"""What the study of mixers tells of its records: a table for each part and length, what pays from where, a chart."""
import math
from collections.abc import Callable, Iterable

from benchmarks.mixers import forms
from benchmarks.mixers.mixer import CHUNKS, COMPILED, MIXERS, TRITON, bytes_of_a_cache, bytes_of_a_step
from benchmarks.mixers.peers import PEERS
from benchmarks.mixers.work import crossover
from benchmarks.records.read import Run, extra, info, metric, paired, runs, values, verdict
from benchmarks.show.charts import Charts, lines_chart
from benchmarks.show.tables import NO_ANSWER, framed, joules
from benchmarks.studies.mixers.subjects import ATTENTION, BLOCK, DECODING, MIXER, NO_BACKWARD
from benchmarks.studies.recipes.speed import SHORT, Times, fewest_that_pay, length_in_words, pays_from
from common.block.config import DTYPES
from common.block.workload import COPY
from common.report.metrics import PEAK_MEMORY, SHARE
from common.report.record import Record
from common.runtime.iteration import BOTH, FORWARD, MODES
from common.runtime.limit import Peaks
from common.runtime.peaks import BURST
from common.text import figures, number, only, ratio, table

IN_CHUNKS = (CHUNKS, COMPILED, TRITON, *PEERS)             # ways whose work `benchmarks.mixers.work` predicts
SAID = """\
x attention: how many times as fast as causal attention of the same sizes, in the same rounds. f+b: forward+backward;
a forward alone keeps nothing for a backward, as a prefill does not. Error: the largest of the output and the gradients,
against the recurrence in FP64. Limit: the recurrence's products at the matmul rate of this machine, or each tensor once
at the rate of a copy."""
BLOCKS = """\
The whole block: x attention is beside step 2, or where it is compiled beside step 3. Error: the largest of the branch
and the gradients of x and of every parameter. J: joules of a forward+backward."""
DECODES = """\
A step of decoding behind so many others: a mixer reads and writes its state, attention reads its cache; by the faster
way of launching that was recorded. Error: the larger of y's and the state's. Launch-bound: at so many lengths the
time is the host's, for launching, so that x attention says little of the kernels. Bytes: the length from which on
attention moves more of them than a mixer."""
CHUNKS_SAID = """\
Forward+backward at the longest length, uncompiled. Longer chunks do more work inside, and less from chunk to chunk."""
PAYS = """\
Pays from: the shortest length from which on its interval is above 1 at all that were measured. FLOPs: the length from
which on its products are no more than attention's. Predicted, of ways in chunks of 64: from which on it takes no longer
than attention, were all products at this machine's matmul rate, or all tensors moved at the rate of a copy."""
SAME = 1.1                                 # lengths that the chart marks once

ByLength = dict[int, list[Run]]


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    mixers, blocks, steps = (_by_length(lines, part) for part in (MIXER, BLOCK, DECODING))
    shown = [*_tables("", mixers, SAID, width), *_crossover(mixers, lines, width), *_by_chunk(mixers, width),
             *_tables("block, ", blocks, BLOCKS, width), *_decoding(steps, width), _without_time(lines)]
    return framed(lines, shown, [run for run in runs(lines) if run.status == "ok"])


def _by_length(lines: list[Record], part: str) -> ByLength:
    found: ByLength = {}
    for run in runs(lines):
        if run.variant["part"] == part:
            found.setdefault(run.variant["size"][2], []).append(run)
    return dict(sorted(found.items()))


def _without_time(lines: list[Record]) -> str:
    """Why some have none, or none with a backward; a line each."""
    said = []
    for run in runs(lines):
        if run.status != "ok":
            said.append(f"{run.case['name']}, {run.variant['way']}: {run.status}: {run.info['reason']}")
        elif reason := run.variant.get(NO_BACKWARD):
            said.append(f"{run.case['name']}, {run.variant['way']}: no backward: {reason}")
    return "\n".join(dict.fromkeys(said))


# ----------------------------------------------------------------------------------------------- of one part and length


def _tables(of: str, by_length: ByLength, said: str, width: int | None) -> list[str]:
    """One for each length, and a sentence on all of them."""
    found = [f"{of}S {length:,}\n\n{_table(every, width)}" for length, every in by_length.items()]
    return [*found, said] if found else []


def _table(every: list[Run], width: int | None) -> str:
    """A row a way; columns in which nothing stands are left out."""
    headers = ["mixer", "by", "error", "forward ms", "f+b ms", "x attention forward", "x attention f+b",
               "% of limit", "f+b %", "GiB", "J"]
    rows = [_row(every, run) for run in every if run.status == "ok"]
    shown = [place for place in range(len(headers)) if place < 2 or any(row[place] for row in rows)]
    return table([only(row, shown) for row in rows], only(headers, shown), width, keys=2)


def _row(every: list[Run], run: Run) -> list[str]:
    used = joules(run, BOTH)
    name = f"{ATTENTION}, beside {run.variant['beside']}" if run.case["name"] == ATTENTION else run.case["name"]
    return [name, run.variant["way"], _error(run),
            *(figures(ms) if (ms := run.best_ms(mode)) else "" for mode in MODES),
            *(_times(every, run, mode) for mode in MODES),
            *(_percent(run, mode) for mode in MODES), _gibibytes(run), figures(used) if used else ""]


def _error(run: Run) -> str:
    """The largest of its checks."""
    found = [error for what, error in run.errors().items() if what != "output"]
    return f"{max(found):.1e}" if found else ""


def _percent(run: Run, mode: str) -> str:
    share = run.figure(SHARE[BURST], mode)
    return "" if share is None else f"{share:.0f}"


def _gibibytes(run: Run) -> str:
    memory = run.figure(PEAK_MEMORY, BOTH, "eager")
    return "" if memory is None else number(memory * PEAK_MEMORY.scale, ".2f")


def _per_token(run: Run) -> str:
    """Its peak memory in KiB: not all lengths need have as many tokens."""
    memory = run.figure(PEAK_MEMORY, BOTH, "eager")
    return "" if memory is None else figures(memory * PEAK_MEMORY.scale * 2**20 / _tokens(run))


def _tokens(run: Run) -> int:
    batch, _, length, _ = run.variant["size"]
    return batch * length


def _times(every: list[Run], run: Run, mode: str) -> str:
    times = _beside_attention(every, run, mode)
    return ratio(times) + verdict(*times[1:]) if times else ""


def _beside_attention(every: list[Run], run: Run, mode: str) -> Times | None:
    """How many times as fast as attention in its rounds, compiled where it is; None of attention itself."""
    if run.case["name"] == ATTENTION:
        return None
    for other in every:
        of = other.variant
        is_control = other.case["name"] == ATTENTION and of["beside"] == run.variant["beside"]
        if is_control and of.get("compiled") == run.variant.get("compiled") and other.info["run"] == run.info["run"]:
            return paired(other, run, mode)
    return None


# ----------------------------------------------------------------------------------------------------- over all lengths


def _crossover(by_length: ByLength, lines: list[Record], width: int | None) -> list[str]:
    """Speed beside attention's at each length; from which on it pays; and memory."""
    if len(by_length) < 2:
        return []
    blocks = [_beside_each_length(by_length, mode, width) for mode in SHORT]
    blocks += [_pays(by_length, lines, width), PAYS]
    every = _ways(by_length, lambda run: "chunk" not in run.variant)
    for title, cell in (("KiB per token, f+b", _per_token), ("error", _error)):
        rows = [[*key, *(cell(of[at]) if at in of else "" for at in by_length)] for key, of in every.items()]
        if rows := [row for row in rows if any(row[2:])]:
            blocks.append(table(rows, [title, "by", *_headers(by_length)], width, keys=2))
    return blocks


def _mixer_ways(by_length: ByLength) -> dict[tuple[str, str], dict[int, Run]]:
    return _ways(by_length, lambda run: run.case["name"] != ATTENTION and "chunk" not in run.variant)


def _beside_each_length(by_length: ByLength, mode: str, width: int | None) -> str:
    """A row a way that was timed in that mode."""
    rows = []
    for (name, way), of in _mixer_ways(by_length).items():
        if times := _all_times(by_length, of, mode):
            rows.append([name, way, *(_short(times[at][0]) if at in times else "" for at in by_length)])
    return table(rows, [f"x attention, {SHORT[mode]}", "by", *_headers(by_length)], width, keys=2)


def _pays(by_length: ByLength, lines: list[Record], width: int | None) -> str:
    """From which length on each way pays: measured, and predicted."""
    rows = []
    for (name, way), of in _mixer_ways(by_length).items():
        run = next(iter(of.values()))
        peaks, row = _peaks(lines, run), [name, way]
        for mode in SHORT:
            times = _all_times(by_length, of, mode)
            row += [pays_from(times), _predicted_in_words(run, mode == BOTH, peaks)] if times else ["", ""]
        rows.append([*row, _as_few_flops_from(run)])
    headers = [header for said in SHORT.values() for header in (f"{said} pays from", "predicted")]
    return table(rows, ["crossover", "by", *headers, "FLOPs"], width, keys=2)


def _short(times: float) -> str:
    """Of what is much slower its first digit."""
    return f"{times:.2f}" if times >= 0.1 else f"{times:.1g}"


def _headers(by_length: ByLength) -> list[str]:
    return [f"S {length:,}" for length in by_length]


def _ways(by_length: ByLength, wanted: Callable[[Run], bool]) -> dict[tuple[str, str], dict[int, Run]]:
    """(mixer, way) -> length -> its run; attention is that beside the first mixer."""
    found: dict[tuple[str, str], dict[int, Run]] = {}
    for length, every in by_length.items():
        for run in every:
            if run.status == "ok" and wanted(run):
                found.setdefault((run.case["name"], run.variant["way"]), {}).setdefault(length, run)
    return found


def _all_times(by_length: ByLength, of: dict[int, Run], mode: str) -> dict[int, Times]:
    """Length -> how many times as fast as attention."""
    found = {length: _beside_attention(by_length[length], run, mode) for length, run in of.items()}
    return {length: times for length, times in found.items() if times}


def _as_few_flops_from(run: Run) -> str:
    return length_in_words(MIXERS[run.case["name"]].as_few_flops_from(run.variant["way"], run.variant["size"][3]))


def _peaks(lines: list[Record], run: Run) -> Peaks:
    """The last that were measured in a burst where that run was."""
    rates = {extra(line)["of"]: values(line)[0] for line in lines
             if metric(line) == "peak" and extra(line)["yardstick"] == BURST and info(line)["run"] == run.info["run"]}
    return Peaks(rates, rates.pop(COPY, 0.0))


def _predicted(run: Run, backward: bool, peaks: Peaks) -> int | None:
    """From which length on; None where no length does, and of a way whose work is not known, or without peaks."""
    arithmetic = info(run.lines[-1])["parameter_dtype"]
    if not _is_predicted(run, peaks):
        return None
    itemsize = DTYPES[arithmetic].itemsize
    return crossover(MIXERS[run.case["name"]], run.variant["size"][3], itemsize, peaks, arithmetic, backward)


def _is_predicted(run: Run, peaks: Peaks) -> bool:
    measured = peaks.bandwidth and info(run.lines[-1])["parameter_dtype"] in peaks.flops
    return run.variant["way"] in IN_CHUNKS and bool(measured)


def _predicted_in_words(run: Run, backward: bool, peaks: Peaks) -> str:
    if not _is_predicted(run, peaks):
        return ""
    return length_in_words(_predicted(run, backward, peaks))


def _by_chunk(by_length: ByLength, width: int | None) -> list[str]:
    """At the longest length: which chunk is the fastest, and which has the fewest FLOPs."""
    every = by_length[max(by_length)] if by_length else []
    times: dict[str, dict[int, float]] = {}
    for run in every:
        chunk = forms.CHUNK if run.variant["way"] == CHUNKS else run.variant.get("chunk")
        if chunk and run.status == "ok" and (ms := run.best_ms(BOTH)):
            times.setdefault(run.case["name"], {})[chunk] = ms
    sizes = sorted(set().union(*times.values()))
    rows = []
    for name, of in times.items():
        _, _, steps, width_of_a_head = every[0].variant["size"]
        flops = {size: MIXERS[name].flops_by_chunks_of(size, steps, width_of_a_head) for size in of}
        rows.append([name, *(figures(of[size]) if size in of else "" for size in sizes),
                     min(of, key=of.__getitem__), min(flops, key=flops.__getitem__)])
    headers = ["f+b by chunks", *(f"of {size}, ms" for size in sizes), "fastest", "fewest FLOPs"]
    return [table(rows, headers, width), CHUNKS_SAID] if len(sizes) > 1 else []


def _decoding(by_length: ByLength, width: int | None) -> list[str]:
    """The table of a step of decoding."""
    rows, headers = [], ["a step of decoding", "by", "error"]
    for key, of in _ways(by_length, lambda run: run.case["name"] != ATTENTION).items():
        times = _all_times(by_length, of, FORWARD)
        row = [*key, f"{max(max(run.errors().values()) for run in of.values()):.1e}"]
        for length in by_length:
            ms = of[length].best_ms(FORWARD) if length in of else None
            row += [figures(ms) if ms else "", _short(times[length][0]) if length in times else ""]
        rows.append([*row, pays_from(times), _launch_bound(of.values()), _larger_cache_from(of.values())])
    for length in by_length:
        headers += [f"S {length:,} ms", "x attention"]
    return [table(rows, [*headers, "pays from", "launch-bound", "bytes"], width, keys=2), DECODES] if rows else []


def _launch_bound(every: Iterable[Run]) -> str:
    """At how many lengths the time that is shown is the host's."""
    bound = [run.best(FORWARD) == "eager" and bool(run.launch_bound(FORWARD)) for run in every]
    return f"{sum(bound)} of {len(bound)}"


def _larger_cache_from(every: Iterable[Run]) -> str:
    """For each width of a head, and each dtype of a cache."""
    caches = sorted({(run.variant["size"][3], DTYPES[run.info["parameter_dtype"]].itemsize) for run in every})
    lengths = [bytes_of_a_step(width) // bytes_of_a_cache(1, width, itemsize) for width, itemsize in caches]
    return " and ".join(f"{length:,}" for length in lengths)


def summary(lines: list[Record], width: int | None = None) -> str:
    """From which length on each way pays, alone and as a step of decoding."""
    mixers, steps = _by_length(lines, MIXER), _by_length(lines, DECODING)
    return "\n\n".join([*_crossover(mixers, lines, width), *_decoding(steps, width)])


# ------------------------------------------------------------------------------------------------- a chart, an answer


def charts(lines: list[Record]) -> Charts:
    """The time of a forward+backward per token, by length: of attention, and of each mixer by its fastest way."""
    by_length = _by_length(lines, MIXER)
    series = _fastest_by_length(by_length)
    if len(by_length) < 2 or not series:
        return {}
    title = "Each by its fastest way"
    return {"time": lambda: lines_chart(series, "S", "ns per token, forward+backward", title, _marks(by_length, lines))}


def _marks(by_length: ByLength, lines: list[Record]) -> dict[str, float]:
    """Where mixers in chunks should cross attention: those that are nearly one are marked once."""
    found: dict[str, int] = {}
    for (name, _), of in _ways(by_length, lambda run: run.variant["way"] in IN_CHUNKS).items():
        run = next(iter(of.values()))
        if length := _predicted(run, True, _peaks(lines, run)):
            found[name] = length
    groups: list[list[str]] = []
    for name in sorted(found, key=found.__getitem__):
        if groups and found[name] <= SAME * found[groups[-1][0]]:
            groups[-1].append(name)
        else:
            groups.append([name])
    if len(groups) == 1:
        return {"predicted": found[groups[0][0]]}
    return {f"predicted: {', '.join(names)}": found[names[0]] for names in groups}


def _fastest_by_length(by_length: ByLength) -> dict[str, list[tuple[float, float]]]:
    ways = _ways(by_length, lambda run: "chunk" not in run.variant)
    found: dict[str, dict[int, float]] = {}
    for (name, _), of in ways.items():
        for length, run in of.items():
            if ms := run.best_ms(BOTH):
                per_token = 1e6 * ms / _tokens(run)
                fastest = found.setdefault(name, {})
                fastest[length] = min(per_token, fastest.get(length, per_token))
    return {name: [(float(length), per_token) for length, per_token in of.items()] for name, of in found.items()}


def answer(lines: list[Record]) -> str:
    """From which length on the fastest way of each mixer pays, with its backward."""
    by_length = _by_length(lines, MIXER)
    fewest: dict[str, int | None] = {}
    for (name, _), of in _mixer_ways(by_length).items():
        times = _all_times(by_length, of, BOTH)
        if times:
            lengths = [length for length in (fewest_that_pay(times), fewest.get(name)) if length]
            fewest[name] = min(lengths, default=None)
    if not fewest:
        return NO_ANSWER
    where = "on a CPU " if runs(lines)[0].info["device"] == "cpu" else ""
    pays = [f"{name} from S {length:,}" if length else f"{name} at none up to S {max(by_length):,}"
            for name, length in sorted(fewest.items(), key=lambda each: each[1] or math.inf)]
    return f"{where}forward+backward: {'; '.join(pays)}"
