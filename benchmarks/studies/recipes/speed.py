"""What the study of recipes tells of time: layers, blocks, whose gain it is, and from which sizes on a recipe pays."""
from collections.abc import Callable, Sequence

from benchmarks.records.read import Run, extra, paired, verdict
from benchmarks.show.tables import joules
from benchmarks.studies.recipes.split import CASTS, KINDS, MATMULS, SCALES, SPLIT
from common.report.metrics import PEAK_MEMORY, SHARE
from common.runtime.iteration import BOTH, FORWARD, MODES
from common.runtime.peaks import BURST
from common.text import NOT_AVAILABLE, figures, number, only, ratio, table

LAYER, BLOCK, MAP = "layer", "block", "map"        # what a row is of
ERRORS = ("y", "dx", "dweight", "branch", "input gradient", "parameter gradient")
SAID = """\
Error: the largest of y and the gradients, against FP64; of a block that of its branch and gradients. x BF16: how many
times as fast as in BF16, in the same rounds. f+b: forward+backward. The ms by kind of kernel, J and GiB are of f+b, or
of the forward where there is no backward. Kernels are profiled after the rounds; what is short of the ms the GPU has
waited."""
WHOSE = """\
Share: of BF16's time that matmuls take. If only they changed: the gain that this share and the gain of matmuls leave
(Amdahl). Measured: what is left of it. Casts: these, transposes, amax and scales. Rest: all other kernels. Waits: the
GPU is idle between kernels. + is beyond BF16's."""
OF_MAP = """\
How many times as fast as in BF16, forward+backward, in the same rounds. Pays from: the fewest tokens from which on its
interval is above 1 at all that were measured."""


def blocks_of_text(every: Sequence[Run], width: int | None) -> list[str]:
    """Everything that was timed, from its runs."""
    timed: dict[str, list[Run]] = {LAYER: [], BLOCK: [], MAP: []}
    for run in every:
        if run.status == "ok" and run.variant["data"] in timed:
            timed[run.variant["data"]].append(run)
    told, gained = [], []
    for shape, of_shape in _grouped(timed[LAYER], size_of).items():
        told.append(_table_of(of_shape, "a layer, tokens x K x N: " + shape, width))
        gained.append(_whose(of_shape, "a layer, " + shape, width))
    for shape, of_shape in _grouped(timed[BLOCK], lambda run: run.shape).items():
        told.append(_table_of(of_shape, "a block, " + shape, width))
        gained.append(_whose(of_shape, "a block, " + shape, width))
    gained = list(filter(None, gained))
    mapped = _map(timed[MAP], width)
    return [*told, *([SAID] if told else []), *gained, *([WHOSE] if gained else []), *mapped]


def size_of(run: Run) -> str:
    """Tokens, K and N of a layer: "16,384 x 4,096 x 12,288"."""
    return " x ".join(f"{size:,}" for size in run.variant["size"])


def _grouped(every: Sequence[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in every:
        groups.setdefault(key(run), []).append(run)
    return groups


def _plain(alike: Sequence[Run]) -> Run | None:
    """What the others are held against."""
    return next((run for run in alike if run.case["name"] == "BF16"), None)


def kinds(run: Run, mode: str = BOTH) -> dict[str, float]:
    """Kind of kernel -> ms in an iteration; empty where it was not profiled."""
    line = run.find(mode, SPLIT)
    return extra(line)["parts"] if line else {}


# ---------------------------------------------------------------------------------------------------------- one by one


def _table_of(alike: Sequence[Run], title: str, width: int | None) -> str:
    """A row for each recipe by each way to have it; columns that hold nothing are left out."""
    headers = [title, "by", "error", "forward ms", "f+b ms", "x BF16, forward", "f+b", "% of limit", "f+b %",
               *(f"{kind} ms" for kind in KINDS), "J", "GiB"]
    rows = [_row(run, _plain(alike)) for run in alike]
    told = [place for place in range(len(headers)) if place < 2 or any(row[place] for row in rows)]
    return table([only(row, told) for row in rows], only(headers, told), width, keys=2)


def _row(run: Run, plain: Run | None) -> list[str]:
    errors = [found for what in ERRORS if (found := run.value("check", f"{what} error")) is not None]
    times = [figures(ms) if (ms := run.best_ms(mode)) else "" for mode in MODES]
    faster = [_faster(plain, run, mode) for mode in MODES]
    shares = [run.shown(SHARE[BURST], mode) for mode in MODES]
    whole = BOTH if run.best(BOTH) else FORWARD
    spent, used, memory = kinds(run, whole), joules(run, whole), run.figure(PEAK_MEMORY, whole, "eager")
    return [run.case["name"], run.variant["by"], f"{max(errors):.1e}" if errors else "", *times, *faster,
            *("" if share == NOT_AVAILABLE else share for share in shares),
            *(figures(spent[kind]) if spent.get(kind) else "" for kind in KINDS),
            "" if used is None else figures(used), "" if memory is None else number(memory * PEAK_MEMORY.scale, ".2f")]


def _faster(plain: Run | None, run: Run, mode: str) -> str:
    times = paired(plain, run, mode)
    return ratio(times) + verdict(*times[1:]) if times and run is not plain else ""


# --------------------------------------------------------------------------------------------------- whose gain is it?


def amdahl(share: float, faster: float) -> float:
    """How many times as fast a whole is where that share of its time takes so many times less."""
    return 1 / (1 - share + share / faster)


def _whose(alike: Sequence[Run], title: str, width: int | None) -> str:
    """Of each recipe with a backward: what its matmuls promise, and where that goes."""
    plain, rows = _plain(alike), []
    if plain is None or not kinds(plain):
        return ""
    before, before_ms = kinds(plain), plain.best_ms(BOTH)
    for run in alike:
        now, now_ms, times = kinds(run), run.best_ms(BOTH), paired(plain, run, BOTH)
        if run is plain or not (now.get(MATMULS) and before_ms and now_ms and times):
            continue
        share, faster = before[MATMULS] / before_ms, before[MATMULS] / now[MATMULS]
        casts = sum(now[kind] - before[kind] for kind in (CASTS, SCALES))
        rest = sum(now[kind] - before[kind] for kind in KINDS if kind not in (MATMULS, CASTS, SCALES))
        waits = (now_ms - sum(now.values())) - (before_ms - sum(before.values()))
        rows.append([run.case["name"], run.variant["by"], f"{100 * share:.0f} %", f"{faster:.2f}",
                     f"{amdahl(share, faster):.2f}", ratio(times), *(figures(ms, "+") for ms in (casts, rest, waits))])
    headers = ["whose gain, f+b: " + title, "by", "share", "matmuls x", "if only they changed", "measured", "casts ms",
               "rest ms", "waits ms"]
    return table(rows, headers, width, keys=2) if rows else ""


# -------------------------------------------------------------------------------------------------------------- the map


def _map(layers: Sequence[Run], width: int | None) -> list[str]:
    """A row for each recipe, way, K and N; a column for each number of tokens."""
    cells: dict[tuple[str, str, str], dict[int, tuple[float, float, float]]] = {}
    for of_shape in _grouped(layers, size_of).values():
        plain = _plain(of_shape)
        for run in of_shape:
            times = paired(plain, run, BOTH)
            if times and run is not plain:
                tokens, k, n = run.variant["size"]
                key = run.case["name"], run.variant["by"], f"{k:,} x {n:,}"
                cells.setdefault(key, {})[tokens] = times
    if not cells:
        return []
    every = sorted({tokens for of_row in cells.values() for tokens in of_row})
    rows = []
    for (name, way, sizes), of_row in cells.items():
        rows.append([name, way, sizes, *(_in_short(of_row.get(tokens)) for tokens in every), pays_from(of_row)])
    headers = ["x BF16, f+b", "by", "K x N", *(f"{tokens:,}" for tokens in every), "pays from"]
    return [table(rows, headers, width, keys=3), OF_MAP]


def _in_short(times: tuple[float, float, float] | None) -> str:
    """Without the interval."""
    return f"{times[0]:.2f}{verdict(*times[1:])}" if times else ""


def pays_from(of_row: dict[int, tuple[float, float, float]]) -> str:
    """Tokens -> (ratio, low, high) to the fewest from which on all pay, in words."""
    least = None
    for tokens, (_, low, _) in sorted(of_row.items(), reverse=True):
        if low <= 1:
            break
        least = tokens
    return "never" if least is None else f"{least:,}"
