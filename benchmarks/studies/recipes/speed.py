"""What the study of recipes tells of time: layers, blocks, whose gain it is, and from which sizes on a recipe pays."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.recipes.layers import DTYPES
from benchmarks.records.read import Run, extra, paired, verdict
from benchmarks.show.tables import joules
from benchmarks.studies.recipes.split import CASTS, KINDS, MATMULS, SCALES, SPLIT
from common.report.metrics import PEAK_MEMORY, SHARE
from common.runtime.iteration import BOTH, FORWARD, MODES
from common.runtime.peaks import BURST
from common.text import NOT_AVAILABLE, figures, number, only, ratio, table

TIMED = LAYER, BLOCK, MAP, SERVED = "layer", "block", "map", "map of inference"            # what a row is of
ERRORS = ("y", "dx", "dweight", "branch", "input gradient", "parameter gradient")
SHORT, PAYS = {BOTH: "f+b", FORWARD: "forward"}, {BOTH: "pays from", FORWARD: "pays up to"}
HEADERS = ("matmuls", "attention", "casts", "amax", "rest")            # of KINDS
Times = tuple[float, float, float]         # a ratio, and its interval
SAID = """\
x BF16: how many times as fast as in BF16, in the same rounds. f+b: forward+backward. Error: the largest of y and the
gradients, against FP64; of a block that of its branch and gradients. Matmuls to rest are ms by kind of kernel (casts:
and transposes; amax: and scales). These, J and GiB are of f+b, or of the forward where there is no backward. Kernels
are profiled after the rounds; what is short of the ms the GPU has waited."""
WHOSE = """\
Share: of BF16's time that matmuls take. Promise: the gain if only they changed, which follows from this share and the
gain of matmuls (Amdahl). Measured: what is left of it. Casts to waits are ms beyond BF16's. Casts: these, transposes,
amax and scales. Rest: all other kernels, also a LayerNorm or GELU that casts on the way. Waits: the GPU is idle between
kernels."""
OF_MAP = """\
How many times as fast as in BF16, in the same rounds, at so many tokens. Pays from: the fewest tokens from which on its
interval is above 1 at all that were measured; of weights alone it pays up to the most of which this is true."""


@dataclass(frozen=True)
class Tables:
    """Of each layer and block what was measured, and whose gain it is; and the map."""
    measured: list[str]
    gained: list[str]
    mapped: list[str]

    @property
    def words(self) -> list[str]:
        """What their columns mean."""
        said = {SAID: self.measured, WHOSE: self.gained, OF_MAP: self.mapped}
        return [words for words, tables in said.items() if tables]


def tables_of(every: Sequence[Run], width: int | None) -> Tables:
    """Of everything that was timed, from its runs."""
    timed: dict[str, list[Run]] = {data: [] for data in TIMED}
    for run in every:
        if run.status == "ok" and run.variant["data"] in timed:
            timed[run.variant["data"]].append(run)
    groups = [("a layer, tokens x K x N: " + shape, alike) for shape, alike in _interleaved(timed[LAYER], size_of)]
    groups += [("a block, " + shape, alike) for shape, alike in _interleaved(timed[BLOCK], lambda run: run.shape)]
    measured = [f"{title}\n\n{_table_of(alike, width)}" for title, alike in groups]
    gained = [f"whose gain, f+b: {title}\n\n{gain}" for title, alike in groups if (gain := _whose(alike, width))]
    return Tables(measured, gained, [*_map(timed[MAP], BOTH, width), *_map(timed[SERVED], FORWARD, width)])


def blocks_of_text(every: Sequence[Run], width: int | None) -> list[str]:
    """All of it, the words below the tables."""
    tables = tables_of(every, width)
    return [*tables.measured, *tables.gained, *tables.mapped, *tables.words]


def size_of(run: Run) -> str:
    """Tokens, K and N of a layer: "16,384 x 4,096 x 12,288"."""
    return " x ".join(f"{size:,}" for size in run.variant["size"])


def _interleaved(every: Sequence[Run], shape_of: Callable[[Run], str]) -> list[tuple[str, list[Run]]]:
    """(shape, those that one process timed there): a file may hold the same shape of several."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in every:
        groups.setdefault((shape_of(run), run.info["run"]), []).append(run)
    return [(shape, alike) for (shape, _), alike in groups.items()]


def _plain(alike: Sequence[Run]) -> Run | None:
    """What the others are held against."""
    return next((run for run in alike if run.case["name"] == "BF16"), None)


def kinds(run: Run, mode: str = BOTH) -> dict[str, float]:
    """Kind of kernel -> ms in an iteration; empty where it was not profiled."""
    line = run.find(mode, SPLIT)
    return extra(line)["parts"] if line else {}


# ---------------------------------------------------------------------------------------------------------- one by one


def _table_of(alike: Sequence[Run], width: int | None) -> str:
    """Two tables, of time and of where it goes: a row for each recipe by each way to have it, no column empty."""
    both = []
    for headers, cells in ((["forward ms", "f+b ms", "x BF16 forward", "x BF16 f+b", "% of limit", "f+b %"], _times),
                           (["error", *HEADERS, "J", "GiB"], _where)):
        rows = [[run.case["name"], run.variant["by"], *cells(run, _plain(alike))] for run in alike]
        headers = ["recipe", "by", *headers]
        kept = [place for place in range(len(headers)) if place < 2 or any(row[place] for row in rows)]
        if len(kept) > 2:
            both.append(table([only(row, kept) for row in rows], only(headers, kept), width, keys=2))
    return "\n\n".join(both)


def _times(run: Run, plain: Run | None) -> list[str]:
    times = [figures(ms) if (ms := run.best_ms(mode)) else "" for mode in MODES]
    shares = [run.shown(SHARE[BURST], mode) for mode in MODES]
    forward = paired(plain, run, FORWARD) if run is not plain else None
    return [*times, _in_short(forward), _faster(plain, run, BOTH),
            *("" if share == NOT_AVAILABLE else share for share in shares)]


def _where(run: Run, plain: Run | None) -> list[str]:
    errors = [found for what in ERRORS if (found := run.error(what)) is not None]
    whole = BOTH if run.best(BOTH) else FORWARD
    spent, used, memory = kinds(run, whole), joules(run, whole), run.figure(PEAK_MEMORY, whole, "eager")
    return [f"{max(errors):.1e}" if errors else "",
            *(figures(spent[kind]) if spent.get(kind) else "" for kind in KINDS),
            "" if used is None else figures(used), "" if memory is None else number(memory * PEAK_MEMORY.scale, ".2f")]


def _faster(plain: Run | None, run: Run, mode: str) -> str:
    times = paired(plain, run, mode)
    return ratio(times) + verdict(*times[1:]) if times and run is not plain else ""


# --------------------------------------------------------------------------------------------------- whose gain is it?


def amdahl(share: float, faster: float) -> float:
    """How many times as fast a whole is where that share of its time takes so many times less."""
    return 1 / (1 - share + share / faster)


@dataclass(frozen=True)
class Gain:
    """What a recipe's matmuls promise of an iteration, and where it goes: ms beyond BF16's."""
    run: Run
    share: float                       # of BF16's time that matmuls take
    faster: float                      # how many times as fast they are
    measured: tuple[float, float, float]                   # how many times as fast the whole is, with its interval
    casts: float
    rest: float
    waits: float

    @property
    def promise(self) -> float:
        """If only matmuls changed."""
        return amdahl(self.share, self.faster)

    @property
    def beside(self) -> float:
        """ms beyond BF16's outside of matmuls."""
        return self.casts + self.rest + self.waits

    @property
    def name(self) -> str:
        """The recipe, and the way to have it."""
        return f"{self.run.case['name']} ({self.run.variant['by']})"


def gains(alike: Sequence[Run]) -> list[Gain]:
    """Of each recipe with a backward that was profiled, where BF16 was."""
    plain, found = _plain(alike), []
    if plain is None or not kinds(plain):
        return []
    before, before_ms = kinds(plain), plain.best_ms(BOTH)
    for run in alike:
        now, now_ms, times = kinds(run), run.best_ms(BOTH), paired(plain, run, BOTH)
        if run is plain or not (now.get(MATMULS) and before_ms and now_ms and times):
            continue
        casts = sum(now[kind] - before[kind] for kind in (CASTS, SCALES))
        rest = sum(now[kind] - before[kind] for kind in KINDS if kind not in (MATMULS, CASTS, SCALES))
        waits = (now_ms - sum(now.values())) - (before_ms - sum(before.values()))
        found.append(Gain(run, before[MATMULS] / before_ms, before[MATMULS] / now[MATMULS], times, casts, rest, waits))
    return found


def _whose(alike: Sequence[Run], width: int | None) -> str:
    rows = []
    for gain in gains(alike):
        added = [figures(ms, "+") for ms in (gain.casts, gain.rest, gain.waits)]
        rows.append([gain.run.case["name"], gain.run.variant["by"], f"{100 * gain.share:.0f} %", f"{gain.faster:.2f}",
                     f"{gain.promise:.2f}", ratio(gain.measured), *added])
    headers = ["recipe", "by", "share", "matmuls x", "promise", "measured", "casts", "rest", "waits"]
    return table(rows, headers, width, keys=2) if rows else ""


def in_words(every: Sequence[Run]) -> list[str]:
    """A sentence or two for each block: what FP8 promises there, and which recipes keep the most and the least."""
    sentences = []
    blocks = [run for run in every if run.status == "ok" and run.variant["data"] == BLOCK]
    for shape, alike in _interleaved(blocks, lambda run: run.shape):
        found = [gain for gain in gains(alike) if gain.run.case["name"] not in DTYPES]
        if not found:
            continue
        largest = max(found, key=lambda gain: gain.promise)
        ordered = sorted(found, key=lambda gain: -gain.measured[0])
        kept = dict.fromkeys(map(_kept, (ordered[0], ordered[-1])))
        sentences.append(f"{shape}: matmuls take {100 * largest.share:.0f} % of BF16's time and are up to "
                         f"{largest.faster:.2f} times as fast in FP8, which promises {largest.promise:.2f}. "
                         f"{'; '.join(kept)}.")
    return sentences


def _kept(gain: Gain) -> str:
    return f"{gain.name} keeps {gain.measured[0]:.2f}, with {figures(gain.beside, '+')} ms beside its matmuls"


# -------------------------------------------------------------------------------------------------------------- the map


def _map(layers: Sequence[Run], mode: str, width: int | None) -> list[str]:
    """A row for each recipe, way, K and N; a column for each number of tokens."""
    cells: dict[tuple[str, str, str], dict[int, Times]] = {}
    for _, of_shape in _interleaved(layers, size_of):
        plain = _plain(of_shape)
        for run in of_shape:
            times = paired(plain, run, mode)
            if times and run is not plain:
                tokens, k, n = run.variant["size"]
                key = run.case["name"], run.variant["by"], f"{k:,} x {n:,}"
                cells.setdefault(key, {})[tokens] = times
    if not cells:
        return []
    every = sorted({tokens for of_row in cells.values() for tokens in of_row})
    pays = pays_up_to if mode == FORWARD else pays_from
    rows = []
    for (name, way, sizes), of_row in cells.items():
        rows.append([name, way, sizes, *(_in_short(of_row.get(tokens)) for tokens in every), pays(of_row)])
    headers = [f"x BF16, {SHORT[mode]}", "by", "K x N", *(f"{tokens:,}" for tokens in every), PAYS[mode]]
    return [table(rows, headers, width, keys=3)]


def _in_short(times: Times | None) -> str:
    """Without the interval."""
    return f"{times[0]:.2f}{verdict(*times[1:])}" if times else ""


def pays_from(of_row: dict[int, Times]) -> str:
    """The fewest tokens from which on all pay, in words."""
    return length_in_words(fewest_that_pay(of_row))


def pays_up_to(of_row: dict[int, Times]) -> str:
    """The most tokens up to which all pay, in words."""
    return length_in_words(_last_that_pays(sorted(of_row.items())))


def fewest_that_pay(of_row: dict[int, Times]) -> int | None:
    """The fewest tokens from which on all are faster; None where the most are not."""
    return _last_that_pays(sorted(of_row.items(), reverse=True))


def _last_that_pays(ordered: list[tuple[int, Times]]) -> int | None:
    last = None
    for tokens, (_, low, _) in ordered:
        if low <= 1:
            break
        last = tokens
    return last


def length_in_words(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,}"
