"""When does launching, and not the kernels, set the time, and which way of launching helps?

    python -m benchmarks launches --json launches.jsonl --chart launches
    python -m benchmarks launches --tokens 128,2048 --ways "one by one,captured by hand"

The host launches kernels one by one, the GPU runs them. Whoever is slower sets the time. A CUDA graph launches all
kernels of an iteration by one call. The ways are: one by one, the whole iteration captured by hand, PyTorch's
make_graphed_callables, and torch.compile's modes. Each is timed at several numbers of tokens, in the same rounds, after
it was checked against FP64. Predicted is max(host, kernels) / replay times as fast by graph: the host's time to launch
an iteration one by one, the time in its kernels, and the time of its replay. How many graphs an iteration launched is
counted: to skip them is silent. Then parameters and inputs are changed under each way's feet. On a CPU nothing is
launched ahead: the host's own share is the time of one token.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import functools
import statistics
from collections.abc import Sequence

from benchmarks.measure.options import count, numbers
from benchmarks.records.read import Run, extra, runs, values
from benchmarks.show.charts import Charts, lines_chart
from benchmarks.show.study import Options, Study, exit_status, open_session, register, show
from benchmarks.show.tables import framed
from benchmarks.studies.launches import autotuned, changes, counting
from benchmarks.studies.launches.ways import (
    BY_HAND,
    OF_ITS_OWN,
    ONE_BY_ONE,
    REDUCE_OVERHEAD,
    STEPS,
    WAYS,
    LaunchedSubject,
    case_of,
    is_compiled,
)
from common.block.config import PRESETS, BlockConfig
from common.command_line import SIZES, Parser, tell
from common.measure.cases import Group
from common.measure.measurement import NOT_A_GPU
from common.measure.subject import Subject
from common.report.metrics import ENQUEUE
from common.report.record import Record, record
from common.report.result import Result
from common.runtime import exclusive, iteration, rounds, timing
from common.runtime.iteration import BOTH, FORWARD, LAUNCHES, MODES
from common.text import NOT_AVAILABLE, figures, ratio, table

GPU_TOKENS = (128, 512, 2048, 8192, 16384)
CPU_TOKENS, QUICK_TOKENS = (16, 64, 256, 1024, 4096), (64, 1024)
PROCESSES = 3                          # that try max-autotune, at the fewest tokens and in the middle: it takes minutes
NEAR = 0.1                             # a prediction that is off by no more is right
PREDICTED = {"right": 0.9, "best at the fewest": 4.0, "copied": 0.038}      # for one H200, before it was measured
LAUNCHED, KEPT, HOST = "graphs launched", "kept by graphs", "host"
QUICK = ("--quick leaves out: three of five numbers of tokens, torch.compile's max-autotune modes, and what happens "
         "where parameters or inputs move")
Key = tuple[int, str, int]             # step, way, tokens


# ----------------------------------------------------------------------------------------------------------- measuring


def config_at(tokens: int, base: BlockConfig) -> BlockConfig:
    """The shape with so many tokens: sequences as long as the base's, or one that is shorter. Raises ValueError."""
    seq_len = min(tokens, base.seq_len)
    if tokens % seq_len or tokens % 16:
        raise ValueError(f"--tokens {tokens}: give multiples of 16 up to {base.seq_len}, then of that")
    return base.replace(batch_size=tokens // seq_len, seq_len=seq_len)


def groups(options: Options) -> list[Group]:
    """A group for each number of tokens: all its ways are timed in the same rounds."""
    every = []
    for tokens in options.tokens:
        config = config_at(tokens, options.config)
        cases = []
        for number in options.steps:
            for way in STEPS[number]:
                wanted = way in options.ways or (way == ONE_BY_ONE and BY_HAND in options.ways)
                if wanted and (way not in autotuned.MODES_OF_IT or tokens in options.autotuned_here):
                    cases.append(case_of(number, way, config, options.device))
        profiled = 1 if options.device.type == "cuda" else 0
        every.append(Group(cases, profiled=profiled, limited=False, may_not_fit=True, timed=counted))
    return every


def run(study: Study, options: Options) -> int:
    """Time all ways, and then see what each does where something moves."""
    with exclusive.alone(options.device, study.name):
        session = open_session(study, options)
        for group in study.groups(options):
            session.measure(group)
        if not options.quick and options.processes > 1:
            changes.measure(session, options.config)
    lines = list(session.lines)
    if options.autotuned and not options.autotuned_here:
        lines += autotuned.measure(options, study.name)
    shown = show(study, options, session, lines)
    if options.quick:
        tell(QUICK)
    return shown or exit_status(of_case.status for of_case in runs(lines) if of_case.status != "skipped")


def counted(timed: Sequence[tuple[Result, Subject]], mode: str) -> list[Record]:
    """What each asked of the driver, and what its graphs keep. On a CPU the time of one token."""
    lines = []
    for result, subject in timed:
        assert isinstance(subject, LaunchedSubject)
        if subject.inputs[0].is_cuda:
            one = subject.iteration(mode)
            one.between()
            seen = counting.count(one.run)
            one.between()
            lines.append(record(result, LAUNCHED, "graphs", [seen.graphs], mode, "eager", kernels=seen.kernels,
                                copy_ms=seen.copy_ms, skipped=sorted(set(subject.skipped))))
            for launch, kept in (("eager", subject.kept.get("")), ("graph", subject.kept.get(mode))):
                if kept is not None:
                    lines.append(record(result, KEPT, "bytes", [kept], mode, launch))
        elif not is_compiled(subject):
            lines.append(record(result, HOST, "ms", [of_one_token(subject, mode)], mode, "eager"))
    return lines


def of_one_token(subject: Subject, mode: str) -> float:
    """The median time of an iteration on one token, in ms: nearly all of it is the host's own work."""
    x, dy = ([tensor.detach()[:1, :1].clone()] for tensor in (subject.inputs[0], subject.cotangents[0]))
    one = iteration.of_call(subject.call, x, dy, subject.parameters, mode)
    clock = timing.HostClock()
    clock.sample(one.run, one.between, 20)
    samples = clock.sample(one.run, one.between, 50)
    one.between()
    return statistics.median(samples)


# --------------------------------------------------------------------------------------------------------- from records


def tokens_of(run: Run) -> int:
    """Of the shape that it ran at."""
    config = run.info["config"]
    return config["batch_size"] * config["seq_len"]


def by_key(lines: list[Record]) -> dict[Key, Run]:
    """Each case's latest run, but for those of processes of their own, which are no part of the same rounds."""
    elsewhere = {of_it[0].info["run"] for of_it in autotuned.of_processes(lines)}
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


def sizes_of(of_all: dict[Key, Run]) -> list[int]:
    return sorted({tokens for _, _, tokens in of_all})


def rows_of(of_all: dict[Key, Run]) -> list[tuple[int, str]]:
    """(step, way) of every row, in order; one by one and by hand are one case."""
    present = {(number, way) for number, way, _ in of_all}
    present |= {(number, BY_HAND) for number, way in present if way == ONE_BY_ONE}
    return sorted(present, key=lambda row: (row[0], WAYS.index(row[1])))


def prediction(run: Run | None, mode: str) -> tuple[float, float, float, float, float] | None:
    """(host ms, ms in kernels, replay ms, times as fast by graph, the same as predicted); None where one is missing."""
    if run is None or run.status != "ok":
        return None
    eager, graph = run.median(mode, "eager"), run.median(mode, "graph")
    host, parts = run.figure(ENQUEUE, mode, "eager"), run.parts(mode)
    if not (eager and graph and host and parts):
        return None
    kernels = sum(parts.values()) - parts["idle"]
    return host, kernels, graph, eager / graph, max(host, kernels) / graph


def crossover(of_all: dict[Key, Run], number: int, mode: str) -> int | None:
    """The fewest tokens from which on a graph by hand buys no more than 5 %; None where that is nowhere."""
    smallest = None
    for tokens in reversed(sizes_of(of_all)):
        own, other = (samples_of(of_all, number, way, tokens, mode) for way in (ONE_BY_ONE, BY_HAND))
        if not own or not other or rounds.paired_ratio(own, other)[0] > 1.05:
            break
        smallest = tokens
    return smallest


# ------------------------------------------------------------------------------------------------------- what it shows


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    of_all = by_key(lines)
    blocks = []
    for mode in MODES:
        tables = [_times(of_all, mode, width), _predictions(of_all, mode, width), _counts(of_all, mode, width),
                  _on_cpu(of_all, mode, width)]
        blocks.append("\n\n".join([mode, *filter(None, tables)]))
    blocks += [autotuned.text(lines, width), _changes(lines, width), "\n".join(findings(of_all)), _why_not(of_all)]
    return framed(lines, blocks, [run for run in of_all.values() if run.status != "skipped"])


def _times(of_all: dict[Key, Run], mode: str, width: int | None) -> str:
    """Milliseconds, and how many times as fast as the same step one by one."""
    rows, headers = [], ["ms, by tokens"]
    for tokens in sizes_of(of_all):
        headers += [f"{tokens}", "x"]
    for number, way in rows_of(of_all):
        row = [f"step {number}, {way}"]
        for tokens in sizes_of(of_all):
            own = samples_of(of_all, number, way, tokens, mode)
            first = samples_of(of_all, number, ONE_BY_ONE, tokens, mode)
            row.append(figures(statistics.median(own)) if own else _status(of_all, number, way, tokens))
            compared = way != ONE_BY_ONE and own and len(own) == len(first)
            row.append(f"{rounds.paired_ratio(first, own)[0]:.2f}" if compared else "")
        if any(samples_of(of_all, number, way, tokens, mode) for tokens in sizes_of(of_all)):
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
    for (number, way, tokens), run in of_all.items():
        what = f"step {number}, {tokens} tokens"
        if way != ONE_BY_ONE:
            continue
        if predicted := prediction(run, mode):
            host, kernels, graph, measured, expected = predicted
            rows.append([what, *map(figures, (host, kernels, graph)), f"{expected:.2f}", f"{measured:.2f}",
                         f"{100 * (measured / expected - 1):+.0f} %"])
    headers = ["one by one", "host ms", "in kernels", "replay", "x predicted", "x measured", "off by"]
    return table(rows, headers, width) if rows else ""


def _on_cpu(of_all: dict[Key, Run], mode: str, width: int | None) -> str:
    """The host's own share, where kernels are calls that it waits for."""
    rows = []
    for (number, _, tokens), run in of_all.items():
        of_one, whole = run.value(mode, HOST, "eager"), run.median(mode, "eager")
        if of_one and whole:
            rows.append([f"step {number}, {tokens} tokens", figures(whole), figures(of_one),
                         f"{100 * of_one / whole:.0f} %"])
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


def _changes(lines: list[Record], width: int | None) -> str:
    """What each way does where something moves, and how many usual calls the first one behind it takes."""
    rows: dict[str, list[str]] = {}
    for run in runs(lines):
        line = run.find(FORWARD, changes.CHANGED)
        if not line or run.status == "skipped":
            continue
        said, taken = extra(line).get("happened") or f"failed: {run.info['reason']}", values(line)
        if len(taken) > 1 and taken[1] > 2 * taken[0]:
            said += f", the first call takes {taken[1] / taken[0]:.0f} x"
        rows.setdefault(f"step {run.step}, {run.variant['way']}", []).append(f"{run.variant['change']}: {said}")
    return "\n".join(f"{what}: {'; '.join(each)}" for what, each in rows.items())


def findings(of_all: dict[Key, Run]) -> list[str]:
    """What was predicted beside what was measured; nothing where there is no graph."""
    off = []
    for (_, way, _), run in of_all.items():
        for mode in MODES if way == ONE_BY_ONE else ():
            if predicted := prediction(run, mode):
                *_, measured, expected = predicted
                off.append(abs(measured / expected - 1))
    if not off:
        return []
    right = sum(each <= NEAR for each in off)
    found = [f"the prediction is within {100 * NEAR:.0f} % on {right} of {len(off)} points; "
             f"predicted for an H200: {100 * PREDICTED['right']:.0f} % of them"]
    fewest = sizes_of(of_all)[0]
    for number in STEPS:
        if best := best_at(of_all, number, fewest, BOTH):
            way, times = best
            hoped = f"; predicted for an H200: {PREDICTED['best at the fewest']:g}" if number == 4 else ""
            found.append(f"step {number}, {BOTH}, {fewest} tokens: {way} is {ratio(times)} times as fast as one by "
                         f"one{hoped}")
            at = crossover(of_all, number, BOTH)
            found.append(f"step {number}, {BOTH}: a graph buys no more than 5 % "
                         + (f"from {at} tokens on" if at else "nowhere here"))
    most = sizes_of(of_all)[-1]
    if (share := copied(of_all, most)) is not None:
        found.append(f"{FORWARD}, {most} tokens: to copy its input takes {100 * share:.1f} % of a call by "
                     f"{REDUCE_OVERHEAD}; predicted for an H200 at gpt2's 32768: {100 * PREDICTED['copied']:.1f} %")
    return found


def copied(of_all: dict[Key, Run], tokens: int) -> float | None:
    """The share of a forward by reduce-overhead that goes into copies which the default has not; None where unknown."""
    by_tree, default = (of_all.get((3, way, tokens)) for way in (REDUCE_OVERHEAD, ONE_BY_ONE))
    lines = [run.find(FORWARD, LAUNCHED, "eager") if run else None for run in (by_tree, default)]
    ms = by_tree.median(FORWARD, "eager") if by_tree else None
    if not all(lines) or not ms:
        return None
    of_tree, of_default = (extra(line)["copy_ms"] for line in lines if line)
    return (of_tree - of_default) / ms


def best_at(of_all: dict[Key, Run], number: int, tokens: int, mode: str
            ) -> tuple[str, tuple[float, float, float]] | None:
    """(the fastest way, its ratio and interval against one by one); None where that was not timed."""
    first = samples_of(of_all, number, ONE_BY_ONE, tokens, mode)
    if not first:
        return None
    timed = {}
    for _, way in rows_of(of_all):
        samples = samples_of(of_all, number, way, tokens, mode)
        if len(samples) == len(first):
            timed[way] = samples
    way = min(timed, key=lambda each: statistics.median(timed[each]))
    return way, rounds.paired_ratio(first, timed[way])


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
    """Forward+backward over the tokens, a chart a step: each way, and where a graph begins to buy nothing."""
    of_all, drawn = by_key(lines), {}
    for number in STEPS:
        series = {}
        for _, way in (row for row in rows_of(of_all) if row[0] == number):
            points = []
            for tokens in sizes_of(of_all):
                if samples := samples_of(of_all, number, way, tokens, BOTH):
                    points.append((float(tokens), statistics.median(samples)))
            if points:
                series[way] = points
        if series:
            at = crossover(of_all, number, BOTH)
            marks = {"a graph buys 5 % or less": float(at)} if at else {}
            drawn[f"step-{number}"] = functools.partial(lines_chart, series, "tokens", "ms, forward+backward",
                                                        f"step {number}, by way of launching", marks)
    return drawn


def answer(lines: list[Record]) -> str:
    """What the best way buys step 4 at the fewest tokens, and from where on none does."""
    of_all = by_key(lines)
    fewest = sizes_of(of_all)[0]
    best = best_at(of_all, 4, fewest, BOTH)
    if not best or best[0] == ONE_BY_ONE:
        return "see the tables"
    at = crossover(of_all, 4, BOTH)
    return (f"at {fewest} tokens {best[0]} makes step 4 {best[1][0]:.1f} times as fast, "
            + (f"from {at} on nothing" if at else "and helps at every size"))


# ------------------------------------------------------------------------------------------------------------ its flags


def named_ways(text: str) -> tuple[str, ...]:
    """"one by one,captured by hand" -> the ways. Raises ValueError."""
    named = tuple(word.strip() for word in text.split(","))
    for word in named:
        if word not in WAYS:
            raise ValueError(f"--ways {word}: there is no such way; give some of: {', '.join(WAYS)}")
    return named


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    parser.add_argument("--tokens", type=numbers, metavar="N,...", help="numbers of tokens (default: five, 128 to 16384"
                                                                        " on a GPU)")
    parser.add_argument("--ways", metavar="WAY,...", help=f"some of: {', '.join(WAYS)} (default: all)")
    parser.add_argument("--steps", type=numbers, default=tuple(STEPS), metavar="N,...", help="some of 2,3,4 (default)")
    parser.add_argument("--processes", type=count, default=PROCESSES, metavar="N",
                        help=f"that try max-autotune, whose choice is noise (default: {PROCESSES})")


def refine(options: Options) -> None:
    """Raise ValueError for tokens that make no shape and for unknown ways; set those that were not asked for."""
    on_gpu = options.device.type == "cuda"
    if not (options.preset or any(getattr(options, name) for name in SIZES)):
        small = PRESETS["gpt2" if on_gpu else "tiny"]
        options.config = small.replace(amp_dtype=options.config.amp_dtype)
    default = GPU_TOKENS if on_gpu else CPU_TOKENS
    options.tokens = tuple(sorted(set(options.tokens or (QUICK_TOKENS if options.quick else default))))
    options.ways = named_ways(options.ways) if options.ways else WAYS
    if unknown := set(options.steps) - set(STEPS):
        raise ValueError(f"--steps {min(unknown)}: give some of {', '.join(map(str, STEPS))}")
    for tokens in options.tokens:
        config_at(tokens, options.config)
    tried = not options.quick and autotuned.STEP in options.steps and set(autotuned.MODES_OF_IT) & set(options.ways)
    options.autotuned = (options.tokens[0], options.tokens[len(options.tokens) // 2]) if tried else ()
    options.autotuned_here = options.autotuned if options.processes == 1 or not on_gpu else ()
    if BY_HAND not in options.ways:
        options.launches = LAUNCHES[:1]


INTRODUCTION = """\
One iteration of a block launches some twenty to two hundred kernels. Where the host takes longer to launch them than
the GPU to run them, a graph helps, and nothing else does: no faster kernel makes up for it."""

register(Study("launches", __doc__, groups, text=text, charts=charts, answer=answer, add_arguments=add_arguments,
               run=run, refine=refine, no_chart="nothing was timed forward+backward", place=9,
               introduction=INTRODUCTION))
