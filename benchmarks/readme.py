"""What do the recorded runs say? Writes README.md's generated parts: results, diffs and the example card.

    python -m benchmarks.readme            # rewrite them
    python -m benchmarks.readme --check    # exit 1 where README.md is not what the records and scripts say

A part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""
import argparse
import difflib
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

from tabulate import tabulate

from common import report, steps

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def records(path: Path) -> list[dict]:
    """The records of a JSON-lines file, in order; none where there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]     # whole lines


def runs(lines: list[dict]) -> dict[str, dict[tuple[str, str], dict]]:
    """What was run -> (mode, launch) -> metric name -> record, of the latest run of the same."""
    found: dict = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        metric = line["metric"]
        if metric["name"] == "output error":            # the first record of every run that got as far as its check
            found[label(line)] = defaultdict(dict)
        launch = metric["extra_info"].get("launch", "")
        found[label(line)][line["benchmark"]["mode"], launch][metric["name"]] = line
    return found


def label(line: dict) -> str:
    """What was run, in words: the step and whatever is not its default."""
    info = line["benchmark"]["extra_info"]
    config, words = info["config"], [info["step"]]
    if not info["step"].startswith("0") and config["amp_dtype"] != "float16":
        words.append("TF32 alone" if config["amp_dtype"] == "none" else config["amp_dtype"])
    if config["dropout"]:
        words.append(f"dropout {config['dropout']:g}")
    if info["parameter_dtype"] != "float32":
        words.append("all 16-bit")
    if config["fp8_weights"] != "per-call":
        words.append(f"weights {config['fp8_weights']}")
    if config["fp8_attention"]:
        words.append("FP8 attention")
    engine = info["engine"].removeprefix("Transformer Engine ")
    return ", ".join(words) + (f" (TE {engine})" if engine != info["engine"] else "")


def median(run: dict, mode: str, launch: str) -> float | None:
    """Median ms, or None where that was not timed."""
    latency = run.get((mode, launch), {}).get("latency")
    return latency["metric"]["extra_info"].get("median") if latency else None


def best(run: dict, mode: str) -> tuple[float | None, str]:
    """(median ms of the faster launch mode, its name)."""
    timed = [(median(run, mode, launch), launch) for launch in report.LAUNCHES if median(run, mode, launch)]
    return min(timed, default=(None, ""))


def value(run: dict, mode: str, launch: str, metric: str, default=None):
    """The one value of a metric of a row."""
    line = run.get((mode, launch), {}).get(metric)
    return line["metric"]["benchmark_values"][0] if line else default


def ladder_table(lines: list[dict]) -> str:
    """A row per run: both passes in both launch modes, times the first and the previous step, limit, memory, error."""
    found, rows = runs(lines), []
    plain = {name[0]: best(run, "forward+backward")[0] for name, run in found.items() if "," not in name}
    first = next(iter(found.values()), None)
    for name, run in found.items():
        both, _ = best(run, "forward+backward")
        if both is None or best(first, "forward+backward")[0] is None:
            rows.append([name] + ["n/a"] * 9)
            continue
        previous = plain.get(str(int(name[0]) - 1)) if "," not in name else None
        rows.append([
            name, *(_ms(median(run, mode, launch)) for mode in report.MODES for launch in report.LAUNCHES),
            " / ".join(f"{best(first, mode)[0] / best(run, mode)[0]:.1f}" for mode in report.MODES),
            f"{previous / both:.2f}" if previous else "",
            " / ".join(f"{value(run, mode, best(run, mode)[1], 'percent of limit', 0):.0f}" for mode in report.MODES),
            f"{value(run, 'forward+backward', 'eager', 'peak memory', 0) / 2**30:.1f}",
            f"{value(run, 'check', '', 'branch error', 0):.1e}"])
    headers = ["step", "forward ms, eager", "graph", "forward+backward ms, eager", "graph", "times the first, f / f+b",
               "times the previous, f+b", "% of limit, f / f+b", "GiB", "branch error"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def peers_table(lines: list[dict]) -> str:
    """Step 4 beside TransformerLayer: ms, and the paired ratio of each case to step 4 in the same interleaved run."""
    rows = []
    for line in lines:
        extra, info = line["metric"]["extra_info"], line["benchmark"]["extra_info"]
        ratio, low, high = extra["ratio_to_step_4"]
        rows.append([line["dependencies"]["transformer_engine"]["version"], info["parameter_dtype"],
                     line["benchmark"]["mode"], extra["launch"], info["step"], f"{extra['median']:.2f}",
                     f"{ratio:.3f} [{low:.3f}, {high:.3f}]"])
    headers = ["TE", "parameters", "pass", "launch", "case", "ms", "its time / step 4's"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def provenance(lines: list[dict]) -> str:
    """One sentence: the machine, the versions and the commit of a set of records."""
    if not lines:
        return "Not recorded yet."
    first = lines[0]
    versions = ", ".join(f"{name} {entry['version']}" for name, entry in first["dependencies"].items()
                         if name not in ("transformer_engine", "python"))
    engines = sorted({line["dependencies"]["transformer_engine"]["version"] for line in lines
                      if "transformer_engine" in line["dependencies"]})
    commits = dict.fromkeys(line["benchmark"]["extra_info"]["git"] or "not recorded" for line in lines)
    return (f"{first['runners'][0]['name']}, {first['model']['name']}; {versions}, Transformer Engine "
            f"{' and '.join(engines) or 'none'}, driver {first['runners'][0]['extra_info']['driver']}; "
            f"commit {' and '.join(commits)}.")


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
        lines = records(h200 / f"{preset}.jsonl")
        found[f"ladder {preset}"] = provenance(lines) + "\n\n" + ladder_table(lines)
    lines = records(h200 / "peers.jsonl")
    found["peers"] = provenance(lines) + "\n\n" + peers_table(lines)
    card = h200 / "2_sdpa.txt"
    found["card"] = f"```\n{card.read_text().rstrip() if card.exists() else 'Not recorded yet.'}\n```"
    return found


def rewrite(text: str) -> str:
    """README.md's text with every generated part replaced. Raises ValueError for a part it has no place for."""
    for name, part in parts().items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"README.md has {count} places for '{name}', not one")
    return text


def _ms(number: float | None) -> str:
    return "n/a" if number is None else f"{number:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where something would change")
    options = parser.parse_args()
    path = ROOT / "README.md"
    old = path.read_text()
    new = rewrite(old)
    if options.check:
        if new != old:
            print("README.md is not what the records and scripts say: run python -m benchmarks.readme", file=sys.stderr)
        return int(new != old)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
