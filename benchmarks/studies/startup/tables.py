"""What the records of the study say: tables, charts and findings."""

from benchmarks.records.read import Run, case, extra, info, metric, paired, runner, runs, values
from benchmarks.show.charts import Charts, bars_chart
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.startup.cells import form_in_words, spread
from benchmarks.studies.startup.keeping import COLD, NONE, WARM, WAYS
from benchmarks.studies.startup.running import LENGTHS, PER_CALL
from benchmarks.studies.startup.stack import BY_LAYER, WHOLE
from common.report.record import Record
from common.report.result import Compilation
from common.runtime.iteration import BOTH, LAUNCHES, MODES
from common.runtime.timing import Timing
from common.text import NOT_AVAILABLE, figures, ratio, table

FIRST, KEPT, GRAPHS = "first result", "kept", "graphs"
QUICK = "--quick leaves out: the forward alone, 12 layers, mega-cache, aot_compile, package, shapes, the price per call"
Key = tuple[str, int, str, str]                        # way, layers, form, pass


def is_of_calls(line: Record) -> bool:
    """Whether it tells what a call takes once all is compiled."""
    return case(line)["variant"].get("measured") == PER_CALL


def key_of(line: Record) -> Key:
    """Which cell a record is of."""
    fields = case(line)
    variant = fields["variant"]
    return fields["name"], variant.get("layers", 0), variant.get("form", ""), line["benchmark"]["mode"]


def by_key(lines: list[Record]) -> dict[Key, Record]:
    """The record of each cell's time."""
    return {key_of(line): line for line in lines if metric(line) == FIRST}


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    of_cells = by_key(lines)
    blocks = [_times(of_cells, mode, width) for mode in MODES]
    blocks += [_kept(lines, of_cells, width), _shapes(lines, width), _per_call(lines, width),
               "\n".join(findings(lines)), _why_not(lines)]
    return framed(lines, blocks, runs(filter(is_of_calls, lines)))


def _forms(of_cells: dict[Key, Record]) -> list[tuple[int, str]]:
    """(layers, form) of the columns."""
    return list(dict.fromkeys((layers, form) for _, layers, form, _ in of_cells))


def seconds(of_cells: dict[Key, Record], key: Key) -> float | None:
    """The median of a cell; None where it was not measured."""
    line = of_cells.get(key)
    return spread(values(line))[0] if line and values(line) else None


def _times(of_cells: dict[Key, Record], mode: str, width: int | None) -> str:
    """Seconds of each way and form, and how many times as fast as cold."""
    present = [way for way in WAYS if any(key[0] == way and key[3] == mode for key in of_cells)]
    if not present:
        return ""
    rows, headers = [], ["seconds to the first result"]
    for layers, form in _forms(of_cells):
        headers += [form_in_words(layers, form), "x cold"]
    for way in present:
        row = [way]
        for layers, form in _forms(of_cells):
            row += _cell(of_cells, way, layers, form, mode)
        rows.append(row)
    return f"{mode}\n\n" + table(rows, headers, width)


def _cell(of_cells: dict[Key, Record], way: str, layers: int, form: str, mode: str) -> list[str]:
    line = of_cells.get((way, layers, form, mode))
    if line is None:
        return ["not recorded", ""]
    if not values(line):
        return [NOT_AVAILABLE if info(line)["status"] == "skipped" else info(line)["status"], ""]
    own, cold = seconds(of_cells, (way, layers, form, mode)), seconds(of_cells, (COLD, layers, form, mode))
    assert own is not None
    return [figures(own), f"{cold / own:.1f}" if cold and way not in (COLD, NONE) else ""]


def _kept(lines: list[Record], of_cells: dict[Key, Record], width: int | None) -> str:
    """What is kept, what was found of it, and how good the first result is."""
    made = {key_of(line): line for line in lines if metric(line) == KEPT}
    rows = []
    for key, line in of_cells.items():
        if not values(line):
            continue
        counted, errors = extra(line).get("counted", {}), extra(line).get("errors", {})
        way, layers, form, mode = key
        of_kept = ["", ""]
        if kept := made.get(key):
            of_kept = [figures(extra(kept)["seconds_to_make"]), figures(values(kept)[0] / 1e6)]
        counts = [str(counted.get(each, 0)) for each in ("graphs", "hits", "misses", "autograd bypasses")]
        name, (error, gate) = max(errors.items(), key=lambda item: item[1][0] / item[1][1])
        rows.append([f"{way}, {form_in_words(layers, form)}, {mode}", *of_kept, *counts,
                     f"{error:.0e} of {gate:.0e}, {name}"])
    headers = ["of which", "made in s", "kept MB", "traced", "found", "compiled", "bypassed", "worst error of its gate"]
    return table(rows, headers, width) if rows else ""


def _shapes(lines: list[Record], width: int | None) -> str:
    rows, lengths = [], list(LENGTHS)
    for line in lines:
        if metric(line) != GRAPHS:
            continue
        lengths = extra(line)["lengths"]
        counts = [f"{count:.0f}" for count in values(line)] or [NOT_AVAILABLE] * len(lengths)
        rows.append([f"dynamic={case(line)['variant']['dynamic']}", *counts,
                     figures(sum(extra(line)["seconds"])) if values(line) else NOT_AVAILABLE])
    headers = ["graphs compiled, after", *(f"S{length}" for length in lengths), "s in all"]
    return table(rows, headers, width) if rows else ""


def runs_of_calls(lines: list[Record]) -> dict[tuple[str, str], Run]:
    """(name, form) -> what a call takes."""
    timed = runs(filter(is_of_calls, lines))
    return {(run.case["name"], run.variant["form"]): run for run in timed}


def _per_call(lines: list[Record], width: int | None) -> str:
    """Milliseconds once it is compiled, and after how many calls that is paid back."""
    timed, of_cells = runs_of_calls(lines), by_key(lines)
    uncompiled, whole = timed.get((NONE, WHOLE)), timed.get(("compiled", WHOLE))
    rows = []
    for launch in LAUNCHES:
        for (name, form), of_run in timed.items():
            if launch != "eager" and not any(of_run.samples(mode, launch) for mode in MODES):
                continue                                   # nothing but a GPU has graphs
            layers = of_run.variant["layers"]
            words = [name] if name == NONE else [name, form_in_words(layers, form)]
            if launch != "eager":
                words.append(f"by {launch}")
            cold = seconds(of_cells, (COLD, layers, form, BOTH))
            rows.append([", ".join(words), *_of_a_call(of_run, whole if form == BY_LAYER else None, launch),
                         _paid_back(uncompiled, of_run, cold, launch)])
    headers = ["a call", "forward ms", "x whole", "f+b ms", "x whole", "paid back, cold"]
    return table(rows, headers, width) if rows else ""


def _of_a_call(of_run: Run, whole: Run | None, launch: str) -> list[str]:
    """Its time in either pass, each with how many times as fast as `whole` it is where that is given."""
    missing = NOT_AVAILABLE if of_run.status == "ok" else of_run.status
    found = []
    for mode in MODES:
        ms, times = of_run.median(mode, launch), paired(whole, of_run, mode, launch)
        found += [figures(ms) if ms else missing, ratio(times) if times else ""]
    return found


def _paid_back(uncompiled: Run | None, of_run: Run, cold_s: float | None, launch: str) -> str:
    """After how many calls, launched that way before and after."""
    samples, before = of_run.samples(BOTH, launch), uncompiled.samples(BOTH, launch) if uncompiled else []
    if of_run is uncompiled or not samples or not before or cold_s is None:
        return ""
    return Compilation(cold_s, None, before).pays_after(Timing(samples, True, "", {}))


def findings(lines: list[Record]) -> list[str]:
    """How much faster a warm start is, and a cold one by layer."""
    of_cells, found = by_key(lines), []
    for mode in MODES:
        for layers, form in _forms(of_cells):
            what = f"{form_in_words(layers, form)}, {mode}: warm is"
            found.append(_finding(what, of_cells, (WARM, layers, form, mode), (COLD, layers, form, mode),
                                  "times as fast as cold"))
        for layers, form in _forms(of_cells):
            if form == BY_LAYER:
                what = f"{layers} layers, {mode}, cold: by layer is"
                found.append(_finding(what, of_cells, (COLD, layers, form, mode), (COLD, layers, WHOLE, mode),
                                      "times as fast as whole"))
    return [line for line in found if line]


def _finding(what: str, of_cells: dict[Key, Record], one: Key, over: Key, words: str) -> str:
    own, other = seconds(of_cells, one), seconds(of_cells, over)
    return f"{what} {other / own:.1f} {words}" if own and other else ""


def _why_not(lines: list[Record]) -> str:
    """A line for each reason that a figure is missing."""
    reasons: dict[str, list[str]] = {}
    for line in [*by_key(lines).values(), *(line for line in lines if metric(line) == GRAPHS)]:
        if not values(line):
            status, reason = info(line)["status"], info(line)["reason"]
            words = reason if status == "skipped" else f"{status}: {reason}"
            reasons.setdefault(words, []).append(case(line)["name"])
    return "\n".join(f"n/a, {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items())


def charts(lines: list[Record]) -> Charts:
    """Seconds to the first result of forward+backward, by way of keeping: a panel a form."""
    of_cells = by_key(lines)
    bars: dict[str, dict[str, tuple[float, float, float]]] = {}
    for (way, layers, form, mode), line in of_cells.items():
        if mode == BOTH and values(line):
            bars.setdefault(form_in_words(layers, form), {})[way] = spread(values(line))
    return {"seconds": lambda: bars_chart(bars, "seconds to the first result, forward+backward", 1)} if bars else {}


def answer(lines: list[Record]) -> str:
    """What a warm folder and compiling by layer save."""
    of_cells = by_key(lines)
    layers, _ = _forms(of_cells)[-1]
    cold, warm, by_layer = (seconds(of_cells, (way, layers, form, BOTH))
                            for way, form in ((COLD, WHOLE), (WARM, WHOLE), (COLD, BY_LAYER)))
    if not (cold and warm and by_layer):
        return NO_ANSWER
    where = "" if runner(lines[0])["type"] == "cuda" else "on a CPU "
    return (f"{where}{layers} layers start in {figures(cold)} s, from a warm folder in {figures(warm)}, "
            f"by repeated layer in {figures(by_layer)}")
