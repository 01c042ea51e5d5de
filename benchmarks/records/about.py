"""What does a file of records hold: what ran, when, where, on which sources, with which libraries?

    python -m benchmarks records ladder.jsonl
    python -m benchmarks records benchmarks/results/h200/peers-gpt2       # a folder of such files

One block for each process that wrote into the file. "sources" says whether this checkout is what ran. "rounds" says,
from the recorded offsets of the samples, whether every round was over before the next began, and in how many orders its
cases were taken. What older records lack reads 'not recorded'. Exit status: 0 ok, 2 usage, 130 interrupted.
"""
import argparse
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.records.read import case, extra, info, label, metric, read, runner, shape, versions
from common.command_line import Parser, early_ends, hush, mistakes, tell
from common.outcome import EXIT
from common.report.record import Record
from common.runtime import sources
from common.runtime.engine import TRANSFORMER_ENGINE, Engine
from common.text import figures, wrap

NOT_RECORDED = "not recorded"
LABEL, WIDTH = 12, 100                     # characters
TITLES = {"torch": "torch", "cuda": "CUDA", "cudnn": "cuDNN", "triton": "triton", "numpy": "numpy",
          "transformer_engine": "Transformer Engine", "transformer_engine_cudnn": "cuDNN as Transformer Engine sees it",
          "torchao": "torchao", "transformers": "transformers", "python": "Python"}


# ---------------------------------------------------------------------------------------------- the order of samples


@dataclass
class Series:
    """The samples of one case, pass and way of launching: the round and the offset in seconds of each."""
    name: str
    rounds: list[int]
    offsets_s: list[float]


@dataclass
class Order:
    """How the samples of cases that shared rounds followed one another."""
    series: list[Series]

    @property
    def rounds(self) -> int:
        return len(self.by_round())

    def by_round(self) -> dict[int, list[tuple[float, str]]]:
        """Round -> (offset, name) of its samples, in the order of time."""
        taken: dict[int, list[tuple[float, str]]] = {}
        for series in self.series:
            for number, offset in zip(series.rounds, series.offsets_s, strict=True):
                taken.setdefault(number, []).append((offset, series.name))
        return {number: sorted(taken[number]) for number in sorted(taken)}

    @property
    def interleaved(self) -> bool:
        """Whether each round took one sample of every case, and was over before the next began."""
        rounds = list(self.by_round().values())
        whole = all(len({name for _, name in samples}) == len(samples) == len(self.series) for samples in rounds)
        apart = all(before[-1][0] < after[0][0] for before, after in itertools.pairwise(rounds))
        return whole and apart

    @property
    def orders(self) -> int:
        """In how many different orders the rounds took their samples."""
        return len({tuple(name for _, name in samples) for samples in self.by_round().values()})


def orders(lines: Iterable[Record]) -> list[Order]:
    """Of the series of one process that were timed side by side, one Order for each set of them."""
    every = []
    for line in lines:
        taken = extra(line)
        if metric(line) == "latency" and taken.get("offsets_s") and taken.get("rounds"):
            name = f"{label(line)}, {case(line)['pass']}, {case(line)['launch']}"
            every.append(Series(name, taken["rounds"], taken["offsets_s"]))
    every.sort(key=lambda series: series.offsets_s[0])
    found: list[Order] = []
    for series in every:
        if found and series.offsets_s[0] < max(other.offsets_s[-1] for other in found[-1].series):
            found[-1].series.append(series)
        else:
            found.append(Order([series]))
    return found


# ------------------------------------------------------------------------------------------------------------ in words


def text(lines: list[Record]) -> str:
    """A block for each process."""
    by_process: dict[str, list[Record]] = {}
    for line in lines:
        by_process.setdefault(info(line)["run"], []).append(line)
    count = len(by_process)
    blocks = [f"{len(lines)} records of {count} process{'es' if count > 1 else ''}"]
    blocks += [_of_process(name, its_lines) for name, its_lines in by_process.items()]
    return "\n\n".join(blocks)


def _of_process(name: str, lines: list[Record]) -> str:
    sections = [("process", [name]), ("what ran", _what(lines)), ("when", [_when(lines)]), ("where", _where(lines)),
            ("sources", _sources(lines)), ("libraries", [_libraries(lines)]), ("rounds", _rounds(lines))]
    printed = []
    for title, sentences in sections:
        wrapped = [part for sentence in sentences for part in wrap(sentence, WIDTH - LABEL)]
        printed.append(f"{title:<{LABEL}}" + f"\n{'':{LABEL}}".join(wrapped))
    return "\n".join(printed)


def _what(lines: list[Record]) -> list[str]:
    study = case(lines[0])["study"]
    names = dict.fromkeys(label(line, engine=False) for line in lines if case(line)["name"] is not None)
    shapes = dict.fromkeys(shape(line) for line in lines if metric(line) != "wall time")
    statuses: dict[str, int] = {}
    for line in {label(line): line for line in lines if case(line)["name"] is not None}.values():
        statuses[info(line)["status"]] = statuses.get(info(line)["status"], 0) + 1
    counted = ", ".join(f"{count} {status}" for status, count in statuses.items())
    seconds = [line["metric"]["benchmark_values"][0] for line in lines if metric(line) == "wall time"]
    took = f", in {figures(seconds[-1])} s" if seconds else ""
    what = "a script" if study == "step" else f"the study {study}"
    return [f"{what}: {len(names)} case{'s' if len(names) > 1 else ''} ({counted}){took}", _some(list(names)),
            _some(list(shapes))]


def _some(names: Sequence[str], most: int = 20) -> str:
    """The names, the last of a long list counted."""
    shown = "; ".join(names[:most])
    return f"{shown}; and {len(names) - most} more" if len(names) > most else shown


def _when(lines: list[Record]) -> str:
    return info(lines[0]).get("began") or NOT_RECORDED


def _where(lines: list[Record]) -> list[str]:
    machine = runner(lines[0])
    more = machine["extra_info"]
    if machine["type"] == "cpu":
        return [f"{machine['name']}, {more.get('cpu_threads')} threads"]
    driver = more.get("driver") or NOT_RECORDED
    return [f"{machine['name']}, {machine['gpu_mem_info']}, driver {driver}",
            f"UUID {more.get('gpu_uuid') or NOT_RECORDED}; CPU {more.get('cpu_model') or NOT_RECORDED}"]


def _sources(lines: list[Record]) -> list[str]:
    """The commit, the digest, and whether this checkout has the same files."""
    commit, recorded = info(lines[0]).get("git"), info(lines[0]).get("sources")
    entries = [f"commit {commit or NOT_RECORDED}" + (" (with changes that were not committed)" if "+" in (commit or "")
                                                 else "")]
    if not recorded:
        return [*entries, f"SHA-256 {NOT_RECORDED}: this checkout can't be held against it"]
    here = sources.digest()
    if recorded == here:
        return [*entries, f"SHA-256 {recorded[:16]}: this checkout's sources match"]
    return [*entries, f"SHA-256 {recorded[:16]}: this checkout's sources differ (its own: {here[:16]})"]


def _libraries(lines: list[Record]) -> str:
    """Every version of every library in any record of the process."""
    known: dict[str, dict[str, None]] = {}
    for line in lines:
        for name, version in versions(line).items():
            known.setdefault(name, {})[version] = None
    entries = []
    for name, title in TITLES.items():
        of_name = " and ".join(known.pop(name, {}))
        if of_name or name in ("torch", "numpy"):
            entries.append(f"{title} {of_name or NOT_RECORDED}")
    has_engine = any(Engine.of_record(info(line)["engine"]).name == TRANSFORMER_ENGINE for line in lines)
    if has_engine and not any("transformer_engine_cudnn" in versions(line) for line in lines):
        entries.append(f"{TITLES['transformer_engine_cudnn']} {NOT_RECORDED}")
    entries += [f"{name} {' and '.join(each)}" for name, each in known.items()]
    return "; ".join(entries)


def _rounds(lines: list[Record]) -> list[str]:
    shared = [order for order in orders(lines) if len(order.series) > 1]
    if not shared:
        timed_in_rounds = case(lines[0])["study"] != "step"
        return [NOT_RECORDED if timed_in_rounds else "none: a script times one case after the other"]
    entries = []
    for order in shared:
        verdict = "interleaved: each took one sample of every case, and was over before the next began"
        if not order.interleaved:
            verdict = "NOT interleaved: some round lacks a case, or overlaps the next"
        entries.append(f"{order.rounds} of {len(order.series)} series, in {order.orders} different orders; {verdict}")
    return list(dict.fromkeys(entries))


# --------------------------------------------------------------------------------------------------------- the command


def parser() -> Parser:
    """The command line."""
    of_records = Parser("records", prog="python -m benchmarks records", description=__doc__,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
    of_records.add_argument("file", help="JSON lines that --json of a step or a study wrote, or a folder of them")
    return of_records


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    hush()
    options = parser().parse_args(argv)
    with early_ends("records"):
        with mistakes("records"):
            lines = read(options.file)
        tell(text(lines))
    return EXIT["ok"]
