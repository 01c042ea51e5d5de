"""Reading what runs have recorded: JSON lines -> runs of one case each, and the figures in them."""
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.records import schema
from benchmarks.records.files import files, text_of
from common.block.config import DTYPES, BlockConfig
from common.outcome import UserError
from common.report.metrics import ENQUEUE, SHARE, Metric
from common.report.record import OF_AN_ERROR, Record
from common.report.result import launch_bound
from common.runtime import machine, rounds
from common.runtime.engine import TRANSFORMER_ENGINE, Engine
from common.runtime.iteration import LAUNCHES
from common.runtime.peaks import SUSTAINED

PROFILED = 5                    # rounds under the profiler, at the least: of fewer, a disturbed one would tell most


class BadRecords(UserError):
    """A file that does not hold records; the message names it, and the line."""


def read(path: Path | str) -> list[Record]:
    """The records of a JSON-lines file, compressed or not, in order; of a folder those of all such files in it, in the
    order of their names.

    A last line that was cut off, by a full disk or an interruption, is left out and named on stderr. Anything else that
    is no record raises BadRecords, as do a file without records and one that can't be read.
    """
    path = Path(path)
    if not path.is_dir():
        return _read_file(path)
    records = []
    for file in files(path):
        records += _read_file(file)
    if not records:
        raise BadRecords(f"{path}: holds no *.jsonl; give a file that --json wrote, or a folder of such files")
    return records


def _read_file(path: Path) -> list[Record]:
    try:
        lines = text_of(path).splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecords(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(schema.checked(line))
        except schema.NotARecord as error:
            if number == len(lines) and not line.endswith("\n") and records:
                print(f"{path}, line {number}: cut off, left out", file=sys.stderr)
                break
            raise BadRecords(f"{path}, line {number}: {error}") from None
    if not records:
        raise BadRecords(f"{path}: holds no records; give a file that --json wrote")
    return records


# ---------------------------------------------------------------------------------------------------------- its fields


def info(record: Record) -> dict[str, Any]:
    """What a record says of its run: status, reason, config, dtypes, engine, commit."""
    return record["benchmark"]["extra_info"]


def case(record: Record) -> dict[str, Any]:
    """What a record is of: study, step, name, variant, pass, launch."""
    return info(record)["case"]


def metric(record: Record) -> str:
    return record["metric"]["name"]


def extra(record: Record) -> dict[str, Any]:
    """What stands beside a metric's values."""
    return record["metric"]["extra_info"]


def values(record: Record) -> list[float]:
    return record["metric"]["benchmark_values"]


def shape(record: Record) -> str:
    return record["model"]["name"]


def runner(record: Record) -> dict[str, Any]:
    """The machine: name, type, and beside them driver, clocks, load."""
    return record["runners"][0]


def versions(record: Record) -> dict[str, str]:
    """Library -> version."""
    return {name: library["version"] for name, library in record["dependencies"].items()}


SETTINGS = ("amp_dtype", "dropout", "parameters", "fp8_weights", "fp8_attention", "attention")     # from the config


def label(record: Record, engine: bool = True, settings: bool = True) -> str:
    """What was run, in words: the name, its variant, and which Transformer Engine."""
    fields = case(record)
    words = [fields["name"] or fields["study"]]
    for key, value in fields["variant"].items():
        if settings or key not in SETTINGS:
            words.append(_word(key, value, record))
    runs_on = Engine.of_record(info(record)["engine"])
    version = f" (TE {runs_on.version})" if engine and runs_on.name == TRANSFORMER_ENGINE else ""
    return ", ".join(filter(None, words)) + version


def _word(key: str, value: Any, record: Record) -> str:
    if key == "amp_dtype" and value == "none":
        return "TF32 alone" if record["benchmark"]["dtype"] == "tf32" else "no autocast"
    if key == "dropout":
        return f"dropout {value:g}"
    if key == "parameters":
        return "all 16-bit"
    if key == "fp8_weights":
        return f"weights {value}"
    if key == "fp8_attention":
        return "FP8 attention"
    if key == "attention":
        return f"attention by the {value}"
    if key == "size":
        return size_in_words(value)
    if isinstance(value, list):
        return " + ".join(map(str, value))
    return str(value) if value is not True else key


def size_in_words(size: list[int] | None) -> str:
    """[64, 4096] -> 64 x 4096; None -> all sizes."""
    return "all sizes" if size is None else " x ".join(map(str, size))


# -------------------------------------------------------------------------------------------------------- runs of them


@dataclass
class Run:
    """The records of one case from one process."""
    label: str
    lines: list[Record] = field(default_factory=list)

    @property
    def info(self) -> dict[str, Any]:
        """Of its last record, whose status is the final one."""
        return info(self.lines[-1])

    @property
    def case(self) -> dict[str, Any]:
        return self.info["case"]

    @property
    def step(self) -> int | None:
        """The step's number; None where it is none of the five."""
        return self.case["step"]

    @property
    def variant(self) -> dict[str, Any]:
        return self.case["variant"]

    @property
    def status(self) -> str:
        return self.info["status"]

    @property
    def shape(self) -> str:
        return shape(self.lines[0])

    @property
    def config(self) -> BlockConfig:
        """Of a block's."""
        recorded = self.info["config"]
        return BlockConfig(**recorded | {"amp_dtype": DTYPES.get(recorded["amp_dtype"])})

    def find(self, mode: str, name: str, launch: str | None = None) -> Record | None:
        """The last record of that metric, or None."""
        for line in reversed(self.lines):
            if line["benchmark"]["mode"] == mode and metric(line) == name and case(line)["launch"] == launch:
                return line
        return None

    def value(self, mode: str, name: str, launch: str | None = None) -> float | None:
        """The one value of a metric."""
        line = self.find(mode, name, launch)
        return values(line)[0] if line and values(line) else None

    def error(self, what: str) -> float | None:
        """Relative L2 against FP64; None where it was not measured, or is not finite."""
        return self.value("check", f"{what}{OF_AN_ERROR}")

    def errors(self) -> dict[str, float]:
        """The same of everything that was measured, by what it is of."""
        named = ((metric(line), values(line)) for line in self.lines if line["benchmark"]["mode"] == "check")
        return {name.removesuffix(OF_AN_ERROR): found[0] for name, found in named
                if name.endswith(OF_AN_ERROR) and found}

    def samples(self, mode: str, launch: str | None) -> list[float]:
        """Milliseconds, in the order they were taken; empty where it was not timed."""
        line = self.find(mode, "latency", launch) if launch else None
        return values(line) if line else []

    def median(self, mode: str, launch: str | None) -> float | None:
        samples = self.samples(mode, launch)
        return statistics.median(samples) if samples else None

    def best(self, mode: str) -> str | None:
        """The faster way of launching, by its median; None where neither was timed, or the run did not end well."""
        if self.status != "ok":
            return None
        timed = []
        for launch in LAUNCHES:
            if median := self.median(mode, launch):
                timed.append((median, launch))
        return min(timed)[1] if timed else None

    def best_ms(self, mode: str) -> float | None:
        """The median of the faster way of launching."""
        return self.median(mode, self.best(mode))

    def figure(self, metric: Metric, mode: str, launch: str | None = None) -> float | None:
        """Of the faster way of launching, where none is named; None where it was not recorded.

        The share of what is sustained is that of rows at the power cap alone: older records have it of all.
        """
        launch = launch or self.best(mode)
        if metric == SHARE[SUSTAINED] and self.at_power_cap(mode, launch) is False:
            return None
        return self.value(mode, metric.name, launch)

    def at_power_cap(self, mode: str, launch: str | None) -> bool | None:
        """Whether its clocks were held down by that meanwhile; None where it is not known."""
        line = self.find(mode, "latency", launch)
        return machine.at_power_cap(runner(line)["extra_info"]) if line else None

    def shown(self, metric: Metric, mode: str, launch: str | None = None) -> str:
        """The same as the card has it."""
        return metric.shown(self.figure(metric, mode, launch))

    def launch_bound(self, mode: str) -> bool | None:
        """Whether more than a fifth of the time goes to launching kernels one by one; None where that is unknown."""
        return launch_bound(self.median(mode, "eager"), self.median(mode, "graph"),
                            self.figure(ENQUEUE, mode, "eager"))

    def by_part(self, mode: str) -> dict[str, Any]:
        """What its profiled iterations gave; empty where there are none."""
        line = self.find(mode, "time by part")
        return extra(line) if line and "parts" in extra(line) else {}

    def parts(self, mode: str) -> dict[str, float] | None:
        """Milliseconds by part of an iteration, from its profiled kernels; None where it was not profiled."""
        return self.by_part(mode).get("parts")

    def attributed(self, mode: str) -> bool:
        """Whether so many rounds were profiled that the parts tell where the time goes."""
        profiled = self.by_part(mode)
        return bool(profiled) and profiled.get("rounds", PROFILED) >= PROFILED

    def profiled(self, mode: str) -> str:
        """The way of launching that was profiled: the faster one while warming up, not always that of all rounds."""
        return self.by_part(mode)["of"]

    def profiled_ms(self, mode: str) -> float:
        """By the clock, of the samples right before the profiled iterations; the median of all in older records."""
        return self.by_part(mode).get("timed") or self.median(mode, self.profiled(mode)) or math.nan

    def clocked_ms(self, mode: str) -> float | None:
        """The same by the clock while the profiler ran; None where that was not taken."""
        return self.by_part(mode).get("clocked")


def runs(lines: Iterable[Record]) -> list[Run]:
    """The runs in the order they began: a case of a process is one run, and so is each script's. Records of a whole
    process, which have no name, are in none.
    """
    by_case: dict[tuple, Run] = {}
    for line in lines:
        if case(line)["name"] is not None:
            words = label(line)
            key = words, shape(line), case(line)["study"], info(line)["run"]
            by_case.setdefault(key, Run(words)).lines.append(line)
    return list(by_case.values())


def latest(lines: Iterable[Record]) -> dict[str, Run]:
    """Label -> its latest run, in the order in which the labels first came."""
    return {run.label: run for run in runs(lines)}


def paired(a: Run | None, b: Run | None, mode: str, launch: str | None = None, launch_of_b: str | None = None
           ) -> tuple[float, float, float] | None:
    """(ratio, low, high) of a's time to b's; None where they were not interleaved.

    Both are launched that way unless b has its own, or each by its faster one where none is named.
    """
    if a is None or b is None or a.info["run"] != b.info["run"]:
        return None
    numerator = a.samples(mode, launch or a.best(mode))
    denominator = b.samples(mode, launch_of_b or launch or b.best(mode))
    if not numerator or len(numerator) != len(denominator):
        return None
    return rounds.paired_ratio(numerator, denominator)


def lies_within(gain: float, ends: tuple[float, float]) -> bool:
    """Whether a gain lies between the two ends of what was predicted; to a hundredth, which is what is shown."""
    least, most = ends
    return least - 0.005 <= gain <= most + 0.005


def miss(gain: float, ends: tuple[float, float]) -> float:
    """How far a gain is from the nearer of two ends, as a share of that end."""
    least, most = ends
    return 1 - gain / least if gain < least else max(0.0, gain / most - 1)


def verdict(low: float, high: float) -> str:
    """SAME where the interval holds 1 and stays within 5 % of it, UNSURE where it holds 1 and does not."""
    if not low <= 1 <= high:
        return ""
    return " SAME" if low >= 0.95 and high <= 1.05 else " UNSURE"
