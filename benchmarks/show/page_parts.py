"""The generated parts of the pages: tables, charts, diffs and the example card."""
import ast
import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.records import RESULTS, compare
from benchmarks.records.files import file_of, files, stem_of
from benchmarks.records.gains import gain
from benchmarks.records.provenance import commits, provenance, unproven
from benchmarks.records.read import (
    Run,
    latest,
    metric,
    paired,
    read,
    shape,
)
from benchmarks.show import assistants
from benchmarks.show.charts import Charts
from benchmarks.show.tables import NO_ANSWER, joules
from common import steps
from common.report.metrics import PEAK_MEMORY, SHARE
from common.report.record import Record
from common.runtime.iteration import BOTH, LAUNCHES, MODES
from common.runtime.peaks import BURST, SUSTAINED
from common.text import NOT_AVAILABLE, figures, markdown, number, ratio

WIDTH = 120                            # characters of a table that a page shows
REFERENCE = "h200"                     # begins the names of the machines that most was recorded on
Parts = Mapping[str, Callable[[], str]]              # name -> what makes its Markdown


class Question(Protocol):
    """What a page asks of a study."""
    @property
    def name(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def introduction(self) -> str: ...
    @property
    def long(self) -> bool: ...
    @property
    def charts(self) -> Callable[[list[Record]], Charts]: ...
    @property
    def answer(self) -> Callable[[list[Record]], str]: ...
    @property
    def parts(self) -> Parts: ...
    def report(self, lines: list[Record], width: int | None = None) -> str: ...


def recorded(name: str) -> list[Path]:
    """The recorded runs of a study, results/<machine>/<study>-<shape>: a file of records or a folder of such files.

    GPUs come before CPUs, H200s before other GPUs, the default shape before others.
    """
    def place(path: Path) -> tuple[bool, bool, bool, Path]:
        machine = path.parent.name
        return machine == "cpu", not machine.startswith(REFERENCE), not stem_of(path).name.endswith("te-tutorial"), path
    return sorted([*files(RESULTS, f"*/{name}-*"), *RESULTS.glob(f"*/{name}-*/")], key=place)


def parts_of(studies: Sequence[Question]) -> dict[str, Callable[[], str]]:
    """Name -> what makes its Markdown, of every part there is."""
    parts: dict[str, Callable[[], str]] = {
        "summary": summary, "compare": comparisons, "card": card, "attribution": attribution, "assistant": assistant,
        "assistant twice": assistant_twice, "assistant written": assistant_written,
        "assistant predicted": assistants.predicted, "assistant models": assistants.models}
    for before, after in zip(steps.ALL, steps.ALL[1:], strict=False):
        parts[f"diff {before.number} {after.number}"] = lambda a=before, b=after: diff(a, b)    # type: ignore[misc]
    for preset in ("te-tutorial", "gpt2"):
        parts[f"scripts {preset}"] = lambda preset=preset: scripts(preset)                      # type: ignore[misc]
    present = [study for study in studies if recorded(study.name)]
    parts |= {"questions": lambda: questions(present), "contents": lambda: contents(present),
              "studies": lambda: "\n\n".join(map(section, present))}
    for study in studies:
        parts.update(study.parts)
    return parts


def contents(studies: Sequence[Question]) -> str:
    """Links to what is recorded."""
    titles = ["The five scripts", *(study.name for study in studies), "compare", "captured"]
    return " ·\n".join(f"[{title}](#{title.lower().replace(' ', '-')})" for title in titles)


def section(study: Question) -> str:
    """A study's part of the page of what was recorded."""
    return "\n\n".join(filter(None, [f"## {study.name}", study.introduction, of_study(study)]))


def questions(studies: Sequence[Question]) -> str:
    """A row a study that was recorded: its question, its command, the answer in one figure, where the tables are."""
    rows = []
    for study in studies:
        answers = [study.answer(read(path)) for path in recorded(study.name)]
        first = next((answer for answer in answers if answer != NO_ANSWER), NO_ANSWER)
        rows.append([study.question, f"`python -m benchmarks {study.name}`", first,
                     f"[tables](benchmarks/results/README.md#{study.name})"])
    return markdown(rows, ["question", "command", "the answer in short", "all of it"])


def scripts(preset: str) -> str:
    """The recorded runs of the five scripts at one shape."""
    lines = read(file_of(RESULTS / "h200" / preset))
    sentences = []
    for run in latest(lines).values():
        sentences += unproven(run)
    return "\n\n".join([provenance(lines), scripts_table(lines), *sentences])


def scripts_table(lines: list[Record]) -> str:
    """A row per script's run: both passes in both launch modes, times the first and the previous, limit, memory, error.
    """
    runs = sorted(latest(lines).values(), key=_in_the_order_of_the_ladder)
    plain = {run.case["name"]: run.best_ms(BOTH) for run in runs if not run.variant}
    step_before = {after.name: before.name for before, after in itertools.pairwise(steps.ALL)}
    rows = []
    for run in runs:
        if not all(runs[0].best(mode) and run.best(mode) for mode in MODES):
            rows.append([run.label] + ["n/a"] * 11)
            continue
        own_ms, previous_ms = run.best_ms(BOTH), plain.get(step_before.get(run.case["name"]))
        medians = [number(run.median(mode, launch), ".2f") for mode in MODES for launch in LAUNCHES]
        times_first = [f"{(runs[0].best_ms(mode) or 0) / (run.best_ms(mode) or 1):.1f}" for mode in MODES]
        limits = [run.shown(SHARE[BURST], mode) for mode in MODES]
        sustained = [run.shown(SHARE[SUSTAINED], mode) for mode in MODES]
        used = joules(run, BOTH)
        rows.append([run.label, *medians, " / ".join(times_first),
                     f"{previous_ms / own_ms:.2f}" if previous_ms and own_ms and not run.variant else "",
                     " / ".join(sustained), " / ".join(limits),
                     NOT_AVAILABLE if used is None else figures(used),
                     run.shown(PEAK_MEMORY, BOTH, "eager"),
                     number(run.error("branch"), ".1e")])
    headers = ["step", "forward ms, eager", "graph", "forward+backward ms, eager", "graph", "times the first, f / f+b",
               "times the previous, f+b", "% of sustained limit, f / f+b", "% of burst limit, f / f+b", "J, f+b", "GiB",
               "branch error"]
    return markdown(rows, headers)


def _in_the_order_of_the_ladder(run: Run) -> tuple[int, bool, str]:
    """TF32 alone before a step's other ways."""
    return steps.place_of(run.case["name"]), not _tf32_alone(run), run.label


def _tf32_alone(run: Run) -> bool:
    return run.lines[-1]["benchmark"]["dtype"] == "tf32"


def of_study(study: Question) -> str:
    """Everything recorded of a study: where and of what, its charts, its tables folded away; of a CPU links to them."""
    blocks = []
    for path in recorded(study.name):
        lines = read(path)
        stem = stem_of(path).relative_to(RESULTS)
        images = [f"{stem}-{ending}" for ending in study.charts(lines)]
        if path.parent.name == "cpu":
            links = [f"[{Path(image).name}]({image}.png)" for image in images] + [f"[the tables]({stem}.txt)"]
            blocks.append(f"On {provenance(lines)} {', '.join(links)}.")
            continue
        blocks += [provenance(lines), *(f"![{Path(image).name}]({image}.png)" for image in images)]
        if study.long:
            blocks += [study.parts[f"{study.name} summary"](), f"[The tables, all of them]({stem}.txt)"]
        else:
            tables = study.report(lines, WIDTH).removeprefix(provenance(lines)).strip("\n")
            blocks.append(_folded("The tables", tables))
    return "\n\n".join(blocks)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n```\n{text}\n```\n\n</details>"


def _without_counters(lines: list[Record]) -> list[Record]:
    """The counters' runs time nothing, and are of other commits."""
    return [line for line in lines if metric(line) != "dram traffic"]


def summary() -> str:
    """The ladder at the default shape in a row a step: what each buys, and what it costs in accuracy."""
    lines = _without_counters(read(recorded("ladder")[0]))
    runs = [run for run in latest(lines).values() if run.best(BOTH)]
    first_ms = runs[0].best_ms(BOTH) or 0.0
    rows = []
    for place, run in enumerate(runs):
        ms = run.best_ms(BOTH) or 1.0
        times = paired(runs[place - 1], run, BOTH) if place else None
        rows.append([run.label, number(run.best_ms(MODES[0]), ".2f"), f"{ms:.2f}", f"{first_ms / ms:.1f}",
                     ratio(times) if times else "", *_limits_and_energy(run),
                     number(run.error("branch"), ".0e")])
    headers = ["step", "forward ms", "forward+backward ms", "times the first", "times the previous [95 %]",
               "% of sustained", "% of burst", "J", "error"]
    return f"{provenance(lines)}\n\n{markdown(rows, headers)}"


def _limits_and_energy(run: Run) -> list[str]:
    """How much of the limit it reaches, by sustained peaks and by those of a burst, and the joules of an iteration."""
    used = joules(run, BOTH)
    return [run.shown(SHARE[SUSTAINED], BOTH), run.shown(SHARE[BURST], BOTH),
            NOT_AVAILABLE if used is None else figures(used)]


def comparisons() -> str:
    """A recorded study, and the same of an earlier day in first-<the same name>: compared."""
    blocks = []
    for path in files(RESULTS, "*/first-*"):
        old = _without_counters(read(path))
        new = _without_counters(read(file_of(path.with_name(stem_of(path).name.removeprefix("first-")))))
        noise = [line for line in compare.recorded_noise(new) if shape(line) == shape(new[0])]
        seen = compare.compare(old, new, noise)
        blocks.append(f"{provenance(new)} Against commit {commits(old)}; noise of five processes of commit "
                      f"{commits(noise)}.\n\n{_folded(compare.summary(seen), compare.text(seen, WIDTH))}")
    return "\n\n".join(blocks) or "Not recorded yet."


def attribution() -> str:
    """How many gains of the recorded GPU ladders have no more unexplained than their bound, and which have."""
    within, beyond = 0, []
    for path in recorded("ladder"):
        lines = _without_counters(read(path))
        timed = [run for run in latest(lines).values() if run.best(BOTH)]
        if path.parent.name == "cpu":
            continue
        for earlier, later in itertools.pairwise(timed):
            for mode in MODES:
                if earlier.parts(mode) and later.parts(mode):
                    of_pair = gain(earlier, later, mode)
                    within += not of_pair.warning
                    if of_pair.warning:
                        beyond.append(f"- {earlier.label} -> {later.label}, {mode}, {shape(lines[0])}: "
                                      f"{of_pair.unexplained:+.3f} ms, the bound is {of_pair.bound:.3f}")
    if not within + len(beyond):
        return "Not recorded yet."
    sentence = f"Of the {within + len(beyond)} recorded pairs {within} stay within the bound."
    return sentence if not beyond else "\n".join([f"{sentence} These do not:", "", *beyond])


def diff(before: steps.Step, after: steps.Step) -> str:
    """The lines that differ between two steps, their docstrings aside."""
    old, new = _code(before.path), _code(after.path)
    lines = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if not line.startswith("@@")][2:]
    return f"{len(lines)} lines, docstrings aside:\n\n```diff\n" + "\n".join(lines) + "\n```"


def _code(path: Path) -> list[str]:
    """The lines of a script behind its docstring."""
    text = path.read_text()
    docstring = ast.parse(text).body[0]
    return text.splitlines()[docstring.end_lineno:]


def card() -> str:
    """The card of step 2 as it was printed on the H200."""
    return f"```\n{(RESULTS / 'h200' / '2_sdpa.txt').read_text().rstrip()}\n```"


def assistant() -> str:
    """What the assistant said that each technique buys on the GPT with faults, on the H200."""
    said = (RESULTS / "h200" / "assistant-gpt.txt").read_text()
    return f"```\n{_section_of(said, 'what it buys')}\n```"


def _section_of(report: str, heading: str) -> str:
    """The lines of a report below that heading."""
    return report[report.index(f"\n{heading}\n"):].strip().split("\n\n")[0].partition("\n")[2]


def assistant_written() -> str:
    """What became of both examples when all that the assistant says to write was written."""
    parts = []
    for name in ("gpt", "gpt_good"):
        said = (RESULTS / "h200" / f"assistant-{name}.txt").read_text()
        parts.append(f"{name}.py\n{_section_of(said, 'written out')}")
    return "\n".join(["```", *parts, "```"])


def assistant_twice() -> str:
    """How a second run of the assistant orders what the first distinguished."""
    rows = []
    for name in ("gpt", "gpt_good"):
        both = [file_of(RESULTS / "h200" / f"assistant-{name}{which}") for which in ("", "-again")]
        first, again = (latest(read(path)) for path in both)
        pairs = [(one[0] > 1, other[0] > 1) for a, b in itertools.combinations([*first], 2)
                if (one := _told_apart(first, a, b)) and (other := _told_apart(again, a, b))]
        alike = sum(one == other for one, other in pairs)
        rows.append([f"{name}.py", str(len(pairs)), str(alike)])
    return markdown(rows, ["example", "pairs of rungs that both runs tell apart", "in the same order"])


def _told_apart(run_of: Mapping[str, Run], a: str, b: str) -> tuple[float, float, float] | None:
    """The ratio of their times, where both were timed in the same rounds and its interval does not hold 1."""
    one, other = run_of.get(a), run_of.get(b)
    if not (one and other) or one.case["variant"] != other.case["variant"]:
        return None
    found = paired(one, other, BOTH)
    return found if found and not found[1] <= 1 <= found[2] else None
