"""What the assistant made of the models that it was recorded on, from its records: a row a model, and predictions."""
from collections.abc import Iterable
from pathlib import Path

from benchmarks.records import AS_IT_IS, BY_HAND, RESULTS
from benchmarks.records.files import stem_of
from benchmarks.records.read import Run, extra, lies_within, metric, miss, paired, read, runs, values
from common.report.metrics import ENERGY, PEAK_MEMORY, SHARE
from common.report.record import PREDICTED, PREDICTED_MEMORY, VERDICT
from common.runtime.iteration import LAUNCHES, MODES
from common.runtime.peaks import BURST
from common.text import NOT_AVAILABLE, figures, markdown, number, ratio

EAGER = LAUNCHES[0]
NEAR = 0.15                            # of a predicted gain: one that is measured within it was predicted well


def recorded() -> list[Path]:
    """The files of records that the assistant left."""
    return sorted(RESULTS.glob("*/assistant-*.jsonl*"))


def _where(path: Path) -> str:
    """The machine and the model."""
    return f"{path.parent.name}, {stem_of(path).name.removeprefix('assistant-')}"


def models() -> str:
    """A row for each recorded model: its time as it is and with the techniques that gain, and what became of each."""
    rows = []
    for path in recorded():
        found = list(runs(read(path)))
        row = _row(found)
        if row:
            rows.append([_where(path), *row])
    if not rows:
        return "Models by their configurations: not recorded."
    return markdown(rows, ["machine, model", "pass", "ms", "fastest", "times", "% of limit", "J", "by hand, ms",
                           "of its speed", "take", "different numerics", "a person does", "unsafe"])


def _row(found: list[Run]) -> list[str] | None:
    """Of one file; None where it holds no verdicts, or nothing was timed. A run that was ended early has no ladder.

    The model as it is is launched one by one, and the fastest in whichever way is.
    """
    verdicts = [extra(line) for run in found for line in run.lines if metric(line) == VERDICT]
    as_it_is = [run for run in found if run.case["name"] == AS_IT_IS and any(run.median(mode, EAGER) for mode in MODES)]
    if not (verdicts and as_it_is):
        return None
    together = [run for run in as_it_is if run.variant["measured"] == "together"]
    before = together[-1] if together else as_it_is[0]         # the last ladder: those before had what slows it
    mode = next(mode for mode in reversed(MODES) if before.median(mode, EAGER))
    in_the_same_rounds = [run for run in found if run.variant == before.variant]
    version = next((run for run in in_the_same_rounds if run.case["name"] == BY_HAND and run.best(mode)), None)
    ms, after = min(((ms, run) for run in in_the_same_rounds if run is not version and (ms := run.best_ms(mode))),
                    key=lambda each: each[0])
    launched = after.best(mode)
    gain = paired(before, after, mode, EAGER, launched)
    share = paired(version, after, mode) if version else None
    both = (before, EAGER), (after, launched)
    return [mode, figures(before.median(mode, EAGER) or ms), figures(ms), ratio(gain) if gain else NOT_AVAILABLE,
            *(_both(run.figure(each, mode, launch) for run, launch in both) for each in (SHARE[BURST], ENERGY)),
            *([figures(version.best_ms(mode) or 0.0), ratio(share)] if version and share else [NOT_AVAILABLE] * 2),
            *(_named(verdicts, verdict) for verdict in ("take", "different numerics", "by hand", "unsafe"))]


def _both(figures_of: Iterable[float | None]) -> str:
    """Before and after."""
    return ", ".join(number(value, ".0f") for value in figures_of)


def _named(verdicts: list[dict], verdict: str) -> str:
    """The techniques that got it, each once."""
    return ", ".join(dict.fromkeys(each["technique"] for each in verdicts if each["verdict"] == verdict))


def predicted() -> str:
    """What was predicted of each technique in every recorded run of the assistant, and what it bought alone."""
    rows, misses = [], []
    for path in recorded():
        alone = {run.case["name"]: run for run in runs(read(path)) if run.variant.get("measured") == "alone"}
        for name, run in alone.items():
            prediction = _predicted(run)
            if prediction is None:
                continue
            mode, ends = prediction
            gain = paired(alone.get(AS_IT_IS), run, mode, EAGER)
            if gain:
                misses.append(0.0 if lies_within(gain[0], ends) else miss(gain[0], ends))
                rows.append([_where(path), name, f"{ends[0]:.2f} to {ends[1]:.2f}", ratio(gain),
                             f"{100 * misses[-1]:.0f} %", *_memory(run, alone.get(AS_IT_IS), mode)])
    if not rows:
        return "Predictions beside measured gains: not recorded."
    headers = ["machine, model", "technique", "predicted", "alone", "off by", "GiB less, predicted", "GiB less"]
    known = len(headers) if any(row[-1] for row in rows) else len(headers) - 2         # older records have no memory
    table = markdown([row[:known] for row in rows], headers[:known])
    held, near = sum(each == 0 for each in misses), sum(each <= NEAR for each in misses)
    within = f"{near} within {100 * NEAR:.0f} % of it"
    return f"{table}\n\n{held} of {len(rows)} gains lie where they were predicted, {within}."


def _memory(run: Run, as_it_is: Run | None, mode: str) -> tuple[str, str]:
    """(how many GiB less it should need at its peak, how many less it needs)."""
    line = run.find(mode, PREDICTED_MEMORY)
    before, after = (each.figure(PEAK_MEMORY, mode, EAGER) if each else None for each in (as_it_is, run))
    if line is None or before is None or after is None:
        return "", ""
    ends = [number(freed * PEAK_MEMORY.scale, ".2f") for freed in values(line)]
    return " to ".join(dict.fromkeys(ends)), number((before - after) * PEAK_MEMORY.scale, ".2f")


def _predicted(run: Run) -> tuple[str, tuple[float, float]] | None:
    """(the pass, how many times as fast between two ends); None where nothing was predicted of it."""
    for mode in MODES:
        line = run.find(mode, PREDICTED)
        if line:
            least, most = values(line)
            before = extra(line)["before"]
            return mode, (before / most, before / least)
    return None
