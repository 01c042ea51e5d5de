"""README.md's generated parts: results, charts, diffs and the example card, from the recorded runs and the scripts.

`python -m benchmarks.ladder --readme` writes them. A part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""
import difflib
import re
from pathlib import Path

from tabulate import tabulate

from common import report, steps

from . import ablation, capture, charts, compare, components, fusion_tables, fusions, ladder, peers, records, sweep

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 120                            # characters of a table that README shows
STUDIES = {"ladder": ladder, "ablation": ablation, "sweep": sweep, "peers": peers,     # file stem begins with the name
           "components": components, "fusions": fusions}


def recorded(study: str) -> list[Path]:
    """The recorded runs of a study, results/<machine>/<study>-<shape>.jsonl: GPUs before CPUs, their default first."""
    return sorted(RESULTS.glob(f"*/{study}-*.jsonl"), key=lambda path: (
        path.parent.name == "cpu", not path.stem.endswith("te-tutorial"), path))


def scripts_table(lines: list[dict]) -> str:
    """A row per script's run: both passes in both launch modes, times the first and the previous, limit, memory, error.
    """
    found, rows = records.latest(lines), []
    found = {name: found[name] for name in sorted(found, key=lambda name: (name[0], "TF32" not in name, name))}
    plain = {name[0]: run.best_ms("forward+backward") for name, run in found.items() if "," not in name}
    first = next(iter(found.values()), None)
    for name, run in found.items():
        if not all(first.best(mode) and run.best(mode) for mode in report.MODES):
            rows.append([name] + ["n/a"] * 9)
            continue
        previous = plain.get(str(int(name[0]) - 1)) if "," not in name else None
        best = {mode: run.best(mode) for mode in report.MODES}
        rows.append([
            name, *(_ms(run.median(mode, launch)) for mode in report.MODES for launch in report.LAUNCHES),
            " / ".join(f"{first.best_ms(mode) / run.best_ms(mode):.1f}" for mode in report.MODES),
            f"{previous / run.best_ms('forward+backward'):.2f}" if previous else "",
            " / ".join(report.percent(run.value(mode, "percent of limit", best[mode])) for mode in report.MODES),
            "n/a" if (peak := run.value("forward+backward", "peak memory", "eager")) is None else f"{peak / 2**30:.1f}",
            f"{run.value('check', 'branch error'):.1e}"])
    headers = ["step", "forward ms, eager", "graph", "forward+backward ms, eager", "graph", "times the first, f / f+b",
               "times the previous, f+b", "% of limit, f / f+b", "GiB", "branch error"]
    return markdown(rows, headers)


def _ms(number: float | None) -> str:
    return "n/a" if number is None else f"{number:.2f}"


def markdown(rows: list[list], headers: list[str]) -> str:
    """A table in Markdown."""
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def studies(name: str) -> str:
    """Everything recorded of a study: where and of what, its charts, its tables folded away; of a CPU links to them."""
    blocks = []
    for path in recorded(name):
        lines = records.read(path)
        stem = path.with_suffix("").relative_to(ROOT)
        images = STUDIES[name].chart_stems(lines, str(stem))
        if path.parent.name == "cpu":
            links = [f"[{Path(image).name}]({image}.png)" for image in images] + [f"[the tables]({stem}.txt)"]
            blocks.append(f"On {records.provenance(lines)} {', '.join(links)}.")
            continue
        parts = [records.provenance(lines), *(f"![{Path(image).name}]({image}.png)" for image in images)]
        if path in _beside(name):
            parts += [f"```\n{fusion_tables.summary(lines, WIDTH)}\n```",
                      f"[The tables, every level at every size]({stem}.txt)"]
        else:
            text = STUDIES[name].text(lines, WIDTH).removeprefix(records.provenance(lines)).strip("\n")
            parts.append(f"<details><summary>The tables</summary>\n\n```\n{text}\n```\n\n</details>")
        blocks.append("\n\n".join(parts))
    return "\n\n".join(blocks) or "Not recorded yet."


def _beside(name: str) -> list[Path]:
    """The recorded runs of a study whose tables stand beside them instead of in README: a CPU's, and long ones."""
    return [path for path in recorded(name) if name == "fusions" or path.parent.name == "cpu"]


def long_tables() -> dict[Path, str]:
    """File -> text of the tables beside the records."""
    return {path.with_suffix(".txt"): study.text(records.read(path), WIDTH) + "\n"
            for name, study in STUDIES.items() for path in _beside(name)}


def _timings(lines: list[dict]) -> list[dict]:
    """Without what counts no time: the counters' runs are others, of other commits."""
    return [line for line in lines if line["metric"]["name"] != "dram traffic"]


def summary() -> str:
    """The ladder at the default shape in a row a step: what each buys, and what it costs in accuracy."""
    lines = _timings(records.read(recorded("ladder")[0]))
    found = [run for run in records.latest(lines).values() if run.best("forward+backward")]
    rows = []
    for run, before in zip(found, [None, *found], strict=False):
        ms = run.best_ms("forward+backward")
        ratio = records.paired(before, run, "forward+backward") if before else None
        rows.append([run.label, f"{run.best_ms('forward'):.2f}", f"{ms:.2f}",
                     f"{found[0].best_ms('forward+backward') / ms:.1f}",
                     "{:.2f} [{:.2f}, {:.2f}]".format(*ratio) if ratio else "",
                     f"{run.value('check', 'branch error'):.0e}"])
    headers = ["step", "forward ms", "forward+backward ms", "times the first", "times the previous [95 %]", "error"]
    return f"{records.provenance(lines)}\n\n{markdown(rows, headers)}"


def comparisons() -> str:
    """A recorded study, and the same of an earlier day in first-<the same name>: compared."""
    blocks = []
    for path in sorted(RESULTS.glob("*/first-*.jsonl")):
        second = path.with_name(path.name.removeprefix("first-"))
        old, new = _timings(records.read(path)), _timings(records.read(second))
        noise = [line for line in compare.recorded_noise(new) if line["model"]["name"] == new[0]["model"]["name"]]
        seen = compare.compare(old, new, noise, force=False)
        blocks.append(f"{records.provenance(new)} Against commit {records.commits(old)}; noise of five processes of "
                      f"commit {records.commits(noise)}.\n\n<details><summary>{compare.summary(seen)}</summary>\n\n"
                      f"```\n{compare.text(seen, WIDTH)}\n```\n\n</details>")
    return "\n\n".join(blocks) or "Not recorded yet."


def diff(a: int, b: int) -> str:
    """The lines that differ between two steps, as a unified diff without context."""
    names = steps.path(a), steps.path(b)
    texts = [path.read_text().splitlines() for path in names]
    lines = list(difflib.unified_diff(*texts, names[0].name, names[1].name, lineterm="", n=0))
    count = sum(line[0] in "+-" for line in lines[2:])
    return f"{count} lines:\n\n```diff\n" + "\n".join(lines) + "\n```"


def parts() -> dict[str, str]:
    """Name -> Markdown of every generated part."""
    h200 = RESULTS / "h200"
    found = {f"diff {a} {b}": diff(a, b) for a, b in ((0, 1), (1, 2), (2, 3), (3, 4))}
    for preset in ("te-tutorial", "gpt2"):
        lines = records.read(h200 / f"{preset}.jsonl")
        unproven = [line for run in records.latest(lines).values() for line in records.unproven(run)]
        found[f"scripts {preset}"] = "\n\n".join([records.provenance(lines), scripts_table(lines), *unproven])
    found |= {name: studies(name) for name in STUDIES}
    found["summary"] = summary()
    found["compare"] = comparisons()
    found["captured"] = f"```\n{capture.explain(h200 / 'captured', WIDTH)}\n```"
    found["card"] = f"```\n{(h200 / '2_sdpa.txt').read_text().rstrip()}\n```"
    return found


def rewrite(text: str) -> str:
    """README.md's text with every generated part replaced. Raises ValueError for a part it has no place for."""
    for name, part in parts().items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text)
        if count != 1:
            raise records.BadRecords(f"README.md has {count} places for '{name}', not one")
    return text


def stale_charts() -> list[str]:
    """The charts of recorded runs that are missing or show other records."""
    return [stem for name, study in STUDIES.items() for path in recorded(name)
            for stem in study.chart_stems(records.read(path), str(path.with_suffix("")))
            if not charts.is_of(stem, records.read(path))]


def write() -> None:
    """Rewrite README.md and the tables beside the records, and redraw the charts that are stale."""
    for name, study in STUDIES.items():
        for path in recorded(name):
            stem, lines = str(path.with_suffix("")), records.read(path)
            if not all(charts.is_of(chart, lines) for chart in study.chart_stems(lines, stem)):
                study.draw(lines, stem)
    for path, text in long_tables().items():
        path.write_text(text)
    path = ROOT / "README.md"
    path.write_text(rewrite(path.read_text()))
