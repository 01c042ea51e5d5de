"""What a person sees of their model, as text."""
from benchmarks.assistant.combination import Combination, Interval
from benchmarks.assistant.look import Looked
from benchmarks.assistant.optimize import Opportunity, Optimized
from benchmarks.assistant.technique import Found
from benchmarks.assistant.why import Why
from benchmarks.records.read import verdict
from common.block.config import dtype_name
from common.report.metrics import ENERGY
from common.runtime.iteration import MODES
from common.text import figures, number, ratio, table, wrap

WIDTH = 100
LINES, WORTH_A_LINE = 4, 1                     # of each kind of work at most so many, of so many percent
TO_WRITE = ("take", "different numerics", "by hand")           # verdicts after which there is something to write


def text(result: Optimized) -> str:
    """Everything, at most 100 columns wide."""
    measured = [("truth", result.truth), *(("as it is", times) for mode in MODES if (times := _times(result, mode)))]
    parts = [_model(result.looked, measured), _where(result.looked), _opportunities(result), _ladder(result),
             _write_this(result), _reasons(result), result.times]
    return "\n\n".join(filter(None, parts))


def look_text(looked: Looked) -> str:
    """What was seen, before anything is changed."""
    return "\n\n".join([_model(looked, []), _where(looked), _found(looked)])


def why_text(said: Why) -> str:
    """Where a technique applies, and what became of it."""
    lines = [f"{said.technique.name}: {said.technique.what}, on {said.looked.name}, {said.looked.mode}"]
    for found in said.found:
        count = f", {found.count} x" if found.count > 1 else ""
        place = f"{found.place.name if found.place else 'the call'}{count}: "
        lines.append(said_of("  where", place + _found_in_words(found, ""), " " * 10))
    return "\n".join([*lines, said_of("  then", said.applied, " " * 10)])


def _found_in_words(found: Found, missing: str) -> str:
    why_not = missing or found.why_not
    return f"{found.reason}{f'; not here: {why_not}' if why_not else ''}"


def _model(looked: Looked, more: list[tuple[str, str]]) -> str:
    program = looked.program
    given = ", ".join(f"{dtype_name(t.dtype)} {list(t.shape)}" for t in program.inputs.named().values())
    parts = [type(program.model).__name__, f"{looked.parameters / 1e6:,.1f} M parameters", looked.repeated,
             "compiled" if program.is_compiled else ""]
    trace = program.trace
    work = f"{trace.flops / 1e9:,.1f} GFLOP and {trace.bytes / 1e9:,.2f} GB a forward, in {len(trace.calls):,} calls"
    said = [("model", f"{looked.name}   {', '.join(filter(None, parts))}"), ("inputs", given), ("work", work), *more]
    return "\n".join(said_of(label, words, " " * 11) for label, words in said)


def _where(looked: Looked) -> str:
    """Each kind of work, and the lines that take most of it."""
    spending = looked.spending
    lines = [f"where the {figures(spending.total_ms)} ms of {looked.mode} go"]
    for kind, ms in spending.by_kind().items():
        if spending.percent(ms) >= 0.5:
            lines.append(f"  {spending.percent(ms):>3.0f} %  {kind}")
        worth = [each for each in spending.spent
                 if each.kind == kind and spending.percent(each.ms) >= WORTH_A_LINE][:LINES]
        for each in worth:
            count = f"{each.count} x" if each.count > 1 else ""
            place = each.place.name if each.place else "the backward alone"
            where = each.module or (each.place.function if each.place else "")
            lines.append(f"      {spending.percent(each.ms):>3.0f} %  {place:<24}{count:>6}  {where}".rstrip())
    return "\n".join(lines)


def _found(looked: Looked) -> str:
    """What could be done, and where."""
    lines = ["what could be done"]
    for technique, places in looked.found.items():
        for found in places:
            count = f", {found.count} x" if found.count > 1 else ""
            place = f"{found.place.name}{count}: " if found.place else ""
            said = place + _found_in_words(found, looked.missing(technique))
            lines.append(said_of(f"  {technique.name}", said, " " * 15))
    return "\n".join(lines) if len(lines) > 1 else "nothing was found that could be done"


def said_of(label: str, words: str, indent: str) -> str:
    """A label and words behind it, wrapped below each other."""
    first, *others = wrap(words, WIDTH - len(indent))
    return "\n".join([f"{label:<{len(indent)}}{first}", *(indent + line for line in others)])


def _times(result: Optimized, mode: str) -> str:
    """What was measured of the model as it is."""
    base = Combination()
    ms, percent = result.alone.ms(base, mode), result.alone.percent_of_limit(base, mode)
    if ms is None:
        return ""
    limit = f"   {percent:.0f} % of what this machine could do" if percent else ""
    return f"{mode} {figures(ms)} ms{limit}"


def _opportunities(result: Optimized) -> str:
    rows = []
    for one in result.opportunities:
        times = f"{one.count} x" if one.count > 1 else ""
        where = one.found.place.name if one.found.place else "the call"
        rows.append([one.technique, where, times, _gain(one), f"{one.error:.0e}" if one.error is not None else "",
                     one.verdict])
    if not rows:
        return "no opportunity was found"
    return table(rows, ["opportunity", "where", "", "alone, 95 %", "error", "verdict"], WIDTH, keys=2)


def _gain(one: Opportunity) -> str:
    return _interval((one.speedup, *one.interval)) if one.speedup is not None and one.interval else ""


def _interval(gain: Interval | None) -> str:
    return ratio(gain) + verdict(*gain[1:]) if gain else "n/a"


def _ladder(result: Optimized) -> str:
    """One technique more in each row."""
    measured, rows = result.together, []
    headers = ["the ladder", "ms", "together", "on top of those above", "left out of all", "% of limit", "GiB", "J"]
    if not result.ladder:
        return ""
    for combination, added in [(Combination(), None), *((added.combination, added) for added in result.ladder)]:
        row = measured.row(combination, result.mode)
        name = f"+ {added.technique.name}" if added else "as it is"
        gains = [_interval(gain) for gain in (added.together, added.gain, added.left_out)] if added else [""] * 3
        rows.append([name, figures(row.median) if row and row.median else "n/a", *gains,
                     number(measured.percent_of_limit(combination, result.mode), ".0f"),
                     number(row.peak_bytes / 2**30 if row and row.peak_bytes else None, ".2f"),
                     number(ENERGY.of(row) if row else None, ".2f")])
    kept = [place for place in range(len(headers)) if any(row[place] not in ("n/a", "") for row in rows)]
    return table([[row[place] for place in kept] for row in rows], [headers[place] for place in kept], WIDTH)


def _write_this(result: Optimized) -> str:
    written: dict[tuple, None] = {}
    for one in result.opportunities:
        if one.advice and one.verdict in TO_WRITE:
            written[str(one.advice.place or "where you call the model"), one.advice.code] = None
    lines = []
    for place, code in written:
        lines += [f"  {place}", *(f"      {line}" for line in code.splitlines())]
    return "\n".join(["write this", *lines]) if lines else ""


def _reasons(result: Optimized) -> str:
    lines = ["why"]
    for one in result.opportunities:
        place = f"{one.found.place.name}: " if one.found.place else ""
        said = "; ".join(filter(None, [one.reason, one.why]))
        if one.technique == "compile" and result.payback:
            said += f"; it pays after {result.payback}"
        lines.append(said_of(f"  {one.technique}", place + said, " " * 15))
    return "\n".join(lines) if len(lines) > 1 else ""
