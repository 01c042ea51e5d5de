"""Reading what runs have recorded: JSON lines -> runs of one case each, and the figures in them."""
import json
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common import report, timing

from .attribution import PARTS

PROFILED = 5                    # rounds under the profiler, at the least: of fewer, a disturbed one would tell most


class BadRecords(ValueError):
    """A file that does not hold records; the message names it, and the line."""


def read(path: Path | str) -> list[dict]:
    """The records of a JSON-lines file, in order.

    A last line that was cut off, by a full disk or an interruption, is left out and named on stderr. Anything else that
    is no record raises BadRecords, as do a file without records and one that can't be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecords(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_checked(json.loads(line, parse_constant=_no_number)))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            if number == len(lines) and not line.endswith("\n") and found:
                print(f"{path}, line {number}: cut off, left out", file=sys.stderr)
                break
            what = f"has no {error}" if isinstance(error, KeyError) else "is no record of this suite"
            raise BadRecords(f"{path}, line {number}: {what}; give a file that --json wrote") from None
    if not found:
        raise BadRecords(f"{path}: holds no records; give a file that --json wrote")
    return found


def _no_number(constant: str):
    """What json.loads does with NaN and Infinity, which are no JSON."""
    raise ValueError(constant)


# What is read of every record, and of what type it is.
_SHAPE = {
    "benchmark": {"mode": str, "dtype": str | None, "extra_info": {
        "step": str, "status": str, "reason": str, "engine": str, "parameter_dtype": str, "config": {
            "amp_dtype": str, "dropout": float | int, "fp8_weights": str, "fp8_attention": bool}}},
    "model": {"name": str}, "metric": {"name": str, "benchmark_values": list, "extra_info": dict},
    "dependencies": dict, "runners": list}
_RUNNER = {"name": str, "extra_info": dict}


def _has(value, shape) -> None:
    """Raise KeyError or TypeError where `value` has not that shape: a type, or a dictionary of what it must hold."""
    if not isinstance(shape, dict):
        if not isinstance(value, shape):
            raise TypeError
        return
    for key, inner in shape.items():
        _has(value[key], inner)


def _may_have(value: dict, shape: dict) -> None:
    """The same of those keys alone that are there."""
    _has(value, {key: inner for key, inner in shape.items() if key in value})


def _checked(line: dict) -> dict:
    """The line, if everything that is read of it is there, and of its type."""
    _has(line, _SHAPE)
    _has(line["runners"][0], _RUNNER)
    for library in line["dependencies"].values():
        _has(library, {"version": str})
    info, metric, extra = line["benchmark"]["extra_info"], line["metric"]["name"], line["metric"]["extra_info"]
    _may_have(info, {"study": str, "run": str})
    _may_have(extra, {"reason": str, "clock": str, "calibration": dict})
    if metric == "size done":                                                                # sweep's
        _has(extra, {"axis": str, "size": int})
    series = [line["metric"]["benchmark_values"]]
    if metric == "latency":
        if extra["launch"] not in report.LAUNCHES:
            raise ValueError
        series += extra.get("calibration", {}).values()
    if metric == "time by part" and "parts" in extra:
        _has(extra, {"parts": dict.fromkeys(PARTS, float | int), "of": str})
        series += [extra["parts"].values(), [extra.get(name) or 0.0 for name in ("clocked", "timed")]]
        if min(extra["parts"].values()) < 0 or not sum(extra["parts"].values()):
            raise ValueError
    for values in series:
        if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            raise ValueError
        if metric == "latency" and not all(value > 0 for value in values):
            raise ValueError
    return line


def label(line: dict, engine: bool = True) -> str:
    """What was run, in words: the step and whatever is not its default, with the version of Transformer Engine."""
    info = line["benchmark"]["extra_info"]
    config, words = info["config"], [info["step"]]
    default = "float16" if info.get("device", "cuda") == "cuda" else "bfloat16"
    if not info["step"].startswith("0") and config["amp_dtype"] != default:
        alone = "TF32 alone" if line["benchmark"]["dtype"] == "tf32" else "no autocast"
        words.append(alone if config["amp_dtype"] == "none" else config["amp_dtype"])
    if config["dropout"]:
        words.append(f"dropout {config['dropout']:g}")
    if info["parameter_dtype"] != "float32":
        words.append("all 16-bit")
    if config["fp8_weights"] != "per-call":
        words.append(f"weights {config['fp8_weights']}")
    if config["fp8_attention"]:
        words.append("FP8 attention")
    version = info["engine"].removeprefix("Transformer Engine ")
    return ", ".join(words) + (f" (TE {version})" if engine and version != info["engine"] else "")


@dataclass
class Run:
    """The records of one case from one process."""
    label: str
    lines: list[dict] = field(default_factory=list)

    @property
    def info(self) -> dict:
        """Of its last record, whose status is the final one: step, status, reason, config, dtypes, run."""
        return self.lines[-1]["benchmark"]["extra_info"]

    @property
    def status(self) -> str:
        return self.info["status"]

    def find(self, mode: str, metric: str, launch: str | None = None) -> dict | None:
        """The last record of that metric, or None."""
        return next((line for line in reversed(self.lines)
                     if line["benchmark"]["mode"] == mode and line["metric"]["name"] == metric
                     and line["metric"]["extra_info"].get("launch") == launch), None)

    def value(self, mode: str, metric: str, launch: str | None = None) -> float | None:
        """The one value of a metric."""
        line = self.find(mode, metric, launch)
        return line["metric"]["benchmark_values"][0] if line and line["metric"]["benchmark_values"] else None

    def samples(self, mode: str, launch: str) -> list[float]:
        """Milliseconds, in the order they were taken; empty where it was not timed."""
        line = self.find(mode, "latency", launch)
        return line["metric"]["benchmark_values"] if line else []

    def median(self, mode: str, launch: str) -> float | None:
        samples = self.samples(mode, launch)
        return statistics.median(samples) if samples else None

    def best(self, mode: str) -> str | None:
        """The faster way of launching, by its median; None where neither was timed, or the run did not end well."""
        if self.status != "ok":
            return None
        timed = [(self.median(mode, launch), launch) for launch in report.LAUNCHES if self.samples(mode, launch)]
        return min(timed)[1] if timed else None

    def parts(self, mode: str) -> dict[str, float] | None:
        """Milliseconds by part of an iteration, from its profiled kernels; None where it was not profiled."""
        line = self.find(mode, "time by part")
        return line["metric"]["extra_info"].get("parts") if line else None

    def attributed(self, mode: str) -> bool:
        """Whether so many rounds were profiled (pairs of iterations, in older records) that the parts tell where the
        time goes."""
        if not self.parts(mode):
            return False
        extra = self.find(mode, "time by part")["metric"]["extra_info"]
        return extra.get("rounds", extra.get("pairs", PROFILED)) >= PROFILED

    def profiled(self, mode: str) -> str:
        """The way of launching that was profiled: the faster one while warming up, not always that of all rounds."""
        return self.find(mode, "time by part")["metric"]["extra_info"]["of"]

    def profiled_ms(self, mode: str) -> float:
        """By the clock, of the samples right before the profiled iterations; the median of all in older records."""
        timed = self.find(mode, "time by part")["metric"]["extra_info"].get("timed")
        return timed or self.median(mode, self.profiled(mode))

    def clocked_ms(self, mode: str) -> float | None:
        """The same by the clock while the profiler ran; None where that was not taken."""
        return self.find(mode, "time by part")["metric"]["extra_info"].get("clocked")

    def launch_bound(self, mode: str) -> bool | None:
        """Whether more than a fifth of the time goes to launching kernels one by one; None where that is unknown."""
        return report.launch_bound(self.median(mode, "eager"), self.median(mode, "graph"),
                                   self.value(mode, "enqueue", "eager"))

    def best_ms(self, mode: str) -> float | None:
        """The median of the faster way of launching."""
        launch = self.best(mode)
        return self.median(mode, launch) if launch else None


def runs(lines: Iterable[dict]) -> list[Run]:
    """The runs in the order they began: a case of a process is one run, and so is each script's."""
    found: dict[tuple, Run] = {}
    for line in lines:
        info = line["benchmark"]["extra_info"]
        key = label(line), line["model"]["name"], info.get("study"), info.get("run")
        found.setdefault(key, Run(key[0])).lines.append(line)
    return list(found.values())


def latest(lines: Iterable[dict]) -> dict[str, Run]:
    """Label -> its latest run, in the order in which the labels first came."""
    found: dict[str, Run] = {}
    for run in runs(lines):
        found[run.label] = run
    return found


def cautions(found: Iterable[Run]) -> list[str]:
    """What a reader of these runs must know besides their figures, a line each: none where all is as it should be."""
    said: dict[str, None] = {}
    for run in found:
        if run.status != "ok":
            said[f"{run.label}: {run.status}: {run.info['reason']}"] = None
        said |= dict.fromkeys(unproven(run))
        for line in run.lines:
            extra, machine = line["metric"]["extra_info"], line["runners"][0]["extra_info"]
            info = line["benchmark"]["extra_info"]
            if reason := extra.get("reason"):
                said[f"{run.label}, {line['benchmark']['mode']}: {reason}"] = None
            if machine.get("throttled"):
                said[f"throttled meanwhile: {', '.join(machine['throttled'])}"] = None
            if info["device"] == "cpu" and report.busy(machine):
                said[f"the machine was busy with other work too: load {machine['load_average']:.0f}, "
                     f"{machine['cpu_threads']} threads"] = None
            if machine.get("neighbours"):
                said["other processes were on this GPU: " + ", ".join(machine["neighbours"])] = None
    return list(said)


def unproven(run: Run) -> list[str]:
    """A line for each pass of a run whose kernels do not bear its claim out."""
    seen = [line for line in run.lines if line["metric"]["name"] == "launches"]
    return [f"{run.label}, {line['benchmark']['mode']}: unproven: {line['metric']['extra_info'].get('because', '')}"
            for line in seen if line["metric"]["extra_info"].get("verdict") == "unproven"
            and not run.info["engine"].startswith("emulated")]


def paired(a: Run, b: Run, mode: str) -> tuple[float, float, float] | None:
    """(ratio, low, high) of a's time to b's, each by its faster way of launching; None where they were not interleaved.
    """
    if a.info.get("run") != b.info.get("run"):
        return None
    first, second = (run.samples(mode, run.best(mode)) if run.best(mode) else [] for run in (a, b))
    if not first or len(first) != len(second):
        return None
    return timing.paired_ratio(first, second)


def verdict(low: float, high: float) -> str:
    """SAME where the interval holds 1 and stays within 5 % of it, UNSURE where it holds 1 and does not."""
    if not low <= 1 <= high:
        return ""
    return " SAME" if low >= 0.95 and high <= 1.05 else " UNSURE"


def beside_the_parts(a: Run, b: Run, mode: str) -> tuple[float | None, float]:
    """What the difference by the clock (a less b) holds besides that of the parts, in ms: (while profiled, the rest).

    While profiled: what the difference by the clock changes by while the profiler runs; None, and in the rest, where
    the clock was not read then.
    """
    whole = a.profiled_ms(mode) - b.profiled_ms(mode)
    left = whole - (sum(a.parts(mode).values()) - sum(b.parts(mode).values()))
    watched = a.clocked_ms(mode), b.clocked_ms(mode)
    if None in watched:
        return None, left
    profiling = whole - (watched[0] - watched[1])
    return profiling, left - profiling


def bound_of_the_parts(a: Run, b: Run, mode: str) -> float:
    """How many ms of the difference of two steps may be unexplained: 5 % of it, or 0.5 % of the slower one."""
    before, after = a.profiled_ms(mode), b.profiled_ms(mode)
    return max(0.05 * abs(before - after), 0.005 * max(before, after))


def beyond_the_bound(a: Run, b: Run, mode: str) -> str:
    """What a reader of the parts of two steps is warned by: EXCEEDED, EXCEEDED with profiling, or nothing."""
    profiling, unexplained = beside_the_parts(a, b, mode)
    bound = bound_of_the_parts(a, b, mode)
    if abs(unexplained) > bound:
        return "EXCEEDED"
    return "EXCEEDED with profiling" if abs(unexplained + (profiling or 0.0)) > bound else ""


def _short(commit: str | None) -> str:
    return commit[:7] + "+" * ("+" in commit) if commit else "not recorded"


def provenance(lines: list[dict]) -> str:
    """One sentence: the machine, the versions and the commit of a set of records."""
    first = lines[0]
    found = {name: sorted({line["dependencies"].get(name, {}).get("version", "unknown") for line in lines})
             for name in dict.fromkeys(name for line in lines for name in line["dependencies"])}
    versions = ", ".join(f"{name} {' and '.join(each)}" for name, each in found.items()
                         if name not in ("transformer_engine", "python"))
    engines = [version for version in found.get("transformer_engine", ()) if version != "unknown"]
    driver = first["runners"][0]["extra_info"]["driver"]
    shapes = list(dict.fromkeys(line["model"]["name"] for line in lines if line["metric"]["name"] != "wall time"))
    shape = shapes[0] if len(shapes) == 1 else f"{len(shapes) or 'no'} shapes"
    return (f"{first['runners'][0]['name']}, {shape}; {versions}, Transformer Engine "
            f"{' and '.join(engines) or 'none'}{f', driver {driver}' if driver else ''}; "
            f"commit {commits(lines)}.")


def commits(lines: list[dict]) -> str:
    """Those that the records are of, in words."""
    found = list(dict.fromkeys(_short(line["benchmark"]["extra_info"]["git"]) for line in lines))
    return " and ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))
