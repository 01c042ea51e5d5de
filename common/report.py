"""One run, as a printed card and as JSON lines.

The card has the same labels in the same order in every step and on every machine; nothing in it changes from run to run
unless it means something. Records follow the PyTorch OSS benchmark schema, version 3: one metric a line.
"""
import dataclasses
import math
import statistics
import uuid
from dataclasses import dataclass, field

from .config import BlockConfig, dtype_name
from .evidence import Evidence
from .timing import CACHE_STATE, Timing

MODES = ("forward", "forward+backward")
LAUNCHES = ("eager", "graph")
LAUNCH_BOUND = 0.8             # of an iteration's time: what does the work in less is held up by launches
FLOPS_FORMULA = "8BSE^2 + 4BSEF + 2BS^2E forward (causal attention counted half), twice that more backward"


def launch_bound(eager_ms: float | None, graph_ms: float | None, enqueue_ms: float | None) -> bool | None:
    """Whether more than a fifth of the time goes to launching kernels one by one; None where that is unknown.

    It does where a graph replay of the same kernels, for which the host does next to nothing, takes less than
    LAUNCH_BOUND of the time. Where there is no replay, the host's time to enqueue an iteration tells: as long as that.
    It is the weaker sign, as it is measured apart from the iteration, and host times scatter.
    """
    if eager_ms is None or (graph_ms is None and enqueue_ms is None):
        return None
    return enqueue_ms >= LAUNCH_BOUND * eager_ms if graph_ms is None else graph_ms < LAUNCH_BOUND * eager_ms


@dataclass
class Row:
    """One way of launching one pass: its samples, or why there are none."""
    timing: Timing | None = None
    reason: str = ""                     # where there is no timing
    flops: float = 0.0                   # of one iteration
    tokens: int = 0
    limit_ms: float | None = None
    flop_bound: float | None = None      # share of the matmuls' and attention's limit that FLOPs set, not bytes
    peak_bytes: int | None = None
    enqueue_ms: float | None = None      # host time to enqueue one iteration; eager rows on a GPU
    state: dict = field(default_factory=dict)      # the machine's in the midst of it, where the run's is not all of it

    @property
    def median(self) -> float | None:
        return self.timing.median if self.timing else None

    @property
    def percent_of_limit(self) -> float | None:
        return 100 * self.limit_ms / self.median if self.limit_ms and self.median else None


@dataclass
class Compilation:
    """torch.compile's price in seconds: first calls of both passes with empty caches, and again from the caches."""
    cold_s: float
    warm_s: float
    uncompiled: list[float] | None = None  # ms of the same block, forward+backward, under set_stance("force_eager")

    def pays_after(self, compiled: Timing) -> str:
        """How many forward+backwards until what compiling took is won back, in words."""
        if min(len(self.uncompiled), len(compiled.samples)) < 6:
            return "n/a: too few samples"
        if compiled.quantile(0.2) > max(self.uncompiled):
            return "never: it is not faster here"
        if compiled.quantile(0.8) >= min(self.uncompiled):
            return "n/a: the difference is within the noise"
        gain = statistics.median(self.uncompiled) - compiled.median
        return f"{_round(1e3 * self.cold_s / gain)} forward+backward calls"


@dataclass
class Report:
    """One run of one step: filled in as the run goes on, so that it can be shown at any point."""
    step: str                              # "2_sdpa"
    config: BlockConfig
    parameter_dtype: str
    facts: dict
    status: str = "ok"                     # or "failed", "skipped", "oom"
    reason: str = ""
    matmul: str = ""
    engine: str = "PyTorch"
    emulated: bool = False
    residual: str = "float32"
    autocast_off: str = ""                 # why it is, where the step would have it on
    peaks: str = "n/a"
    errors: dict[str, tuple[float, float | None]] = field(default_factory=dict)   # what -> (error, gate)
    worst_parameter: str = ""              # whose gradient is furthest off
    compilation: Compilation | None = None
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    clock: str = "n/a"
    study: str = "step"                    # who measured: a step's script, or one of benchmarks/
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])         # the same in all records of one process
    neighbours: list[str] = field(default_factory=list)
    state: dict = field(default_factory=dict)

    @property
    def autocast(self) -> str:
        """The dtype of autocast where it is in effect: from step 1 on, over FP32 parameters; "off" elsewhere."""
        on = self.config.amp_dtype and self.step[0] != "0" and self.parameter_dtype == "float32"
        return dtype_name(self.config.amp_dtype) if on else "off"


def busy(machine: dict) -> bool:
    """Whether a CPU had other work too: the last minute's load is beyond its threads by more than one."""
    return machine.get("load_average", 0.0) > machine.get("cpu_threads", math.inf) + 1


def card(r: Report) -> str:
    """The printed card, at most 100 columns wide."""
    facts, lines = r.facts, []

    def line(label: str, value: str) -> None:
        indent = f"\n{'':20}"
        lines.append(f"{label:<20}" + indent.join(_wrap(value, 80)))

    line("step", r.step)
    line("status", r.status + (f": {r.reason}" if r.reason else ""))
    if facts["device"] == "cuda":
        line("device", f"{facts['name']}, {facts['multiprocessors']} multiprocessors, {facts['memory_gib']:.0f} GiB")
    else:
        line("device", f"CPU: {facts['name']}, {facts['cpu_threads']} threads")
    line("software", ", ".join(f"{label} {facts[key] or 'n/a'}" for label, key in (
        ("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn"), ("triton", "triton"),
        ("Transformer Engine", "transformer_engine"))))
    line("shape", f"{r.config}, causal, dropout {r.config.dropout:g}")
    line("precision", f"matmuls {r.matmul or 'n/a'}; x, y and parameters {r.parameter_dtype}; autocast {r.autocast}"
                      f"{f' ({r.autocast_off})' if r.autocast_off else ''}; residual {r.residual}")
    line("engine", r.engine)
    attention = r.evidence["forward+backward"].attention if "forward+backward" in r.evidence else "n/a"
    line("attention", attention)
    line("clock", f"{r.clock}; caches {CACHE_STATE}")
    line("throttled", ", ".join(r.state["throttled"] or ["no"]) if "throttled" in r.state else
         "load beyond its threads" if facts["device"] == "cpu" and busy(r.state | facts) else "n/a")
    others = sorted({name.split(" (pid")[0] for name in r.neighbours})
    line("also on this GPU", ", ".join(others) or ("nothing" if facts["device"] == "cuda" else "n/a"))
    line("peaks", r.peaks)
    lines.append("")
    lines.append(f"{'error against FP64':<20}{'relative L2':>16}{'gate':>16}")
    for what in ("output", "branch", "input gradient", "parameter gradient"):
        error, gate = r.errors.get(what, (None, None))
        worst = f"  {r.worst_parameter}" if what == "parameter gradient" and r.worst_parameter else ""
        lines.append(f"{what:<20}{_number(error, '.1e'):>16}{_number(gate, '.1e'):>16}{worst}")
    lines.append("")
    c, both = r.compilation, r.rows.get(("forward+backward", "eager"))
    line("compile", f"cold {c.cold_s:.0f} s, warm {c.warm_s:.1f} s" if c else "n/a")
    line("compile pays after", c.pays_after(both.timing) if c and c.uncompiled and both and both.timing else "n/a")
    lines.append("")
    lines += _table(r)
    missing = sorted({row.reason for row in r.rows.values() if row.reason and not row.timing})
    line("n/a because", "; ".join(missing) or "nothing is")
    line("timing", "means nothing: Transformer Engine is emulated, only its numerics are real" if r.emulated
         else "of the real thing")
    for mode in MODES:
        seen = r.evidence.get(mode)
        line(f"{mode}", f"{seen.verdict}: {seen.because}" if seen else "n/a")
    return "\n".join(lines)


def _table(r: Report) -> list[str]:
    columns = [r.rows.get((mode, launch), Row()) for mode in MODES for launch in LAUNCHES]
    timed = [row.timing for row in columns]

    def cells(label: str, values) -> str:
        return f"{label:<20}" + "".join(f"{value:>15}" for value in values).rstrip()     # 80 columns, as a terminal has

    lines = [f"{'':<20}" + "".join(f"{mode:^30}" for mode in MODES).rstrip(), cells("", LAUNCHES * 2)]
    for label, q in (("median ms", 0.5), ("p20 ms", 0.2), ("p80 ms", 0.8)):
        lines.append(cells(label, (_number(t and t.quantile(q), ".3f") for t in timed)))
    lines.append(cells("samples", (len(t.samples) if t else "n/a" for t in timed)))
    lines.append(cells("settled", (("yes" if t.settled else "unsettled") if t else "n/a" for t in timed)))
    lines.append(cells("tokens/s", (_number(row.timing and 1e3 * row.tokens / row.timing.median, ",.0f")
                                    for row in columns)))
    lines.append(cells("TFLOP/s", (_number(row.timing and row.flops / row.timing.median / 1e9, ".2f")
                                   for row in columns)))
    lines.append(cells("limit ms", (_number(row.limit_ms, ".3f") for row in columns)))
    lines.append(cells("% of limit", (percent(row.percent_of_limit) for row in columns)))
    lines.append(cells("peak memory GiB", (_number(row.peak_bytes and row.peak_bytes / 2**30, ".2f")
                                           for row in columns)))
    lines.append(cells("enqueue ms", (_number(row.enqueue_ms, ".2f") for row in columns)))
    words = {None: "n/a", True: "launch-bound", False: "no"}
    bound = [words[launch_bound(eager.median, graph.median, eager.enqueue_ms)]
             for eager, graph in (columns[:2], columns[2:])]
    lines.append(cells("launch-bound", (bound[0], "n/a", bound[1], "n/a")))
    unit = "" if r.facts["device"] == "cuda" else " operators"
    counts = [f"{r.evidence[mode].launches}{unit}" if mode in r.evidence else "n/a" for mode in MODES]
    lines.append(cells("launches", (counts[0], "", counts[1], "")))
    return lines


def percent(value: float | None) -> str:
    """Of the limit; beyond 100 the peaks came out too low."""
    return "n/a" if value is None else f"{value:.0f} ERROR" if value > 100 else f"{value:.0f}"


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form) if math.isfinite(value) else "not finite"


def _round(value: float) -> str:
    """Two digits: more would change from run to run."""
    return f"{float(f'{value:.1e}'):,.0f}"


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word[:width]
    return lines


def record(r: Report, metric: str, unit: str, values: list[float], mode: str, **extra) -> dict:
    """One metric of this run in the PyTorch OSS benchmark schema v3. Non-finite values raise ValueError."""
    facts, config = r.facts, dataclasses.asdict(r.config)
    config["amp_dtype"] = dtype_name(r.config.amp_dtype)
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"{metric} is not finite: report it as a status")
    gpu = facts["device"] == "cuda"
    return {
        "benchmark": {"name": "transformer block", "mode": mode, "dtype": r.matmul, "extra_info": {
            "step": r.step, "status": r.status, "reason": r.reason, "config": config,
            "parameter_dtype": r.parameter_dtype, "autocast": r.autocast, "residual": r.residual, "engine": r.engine,
            "device": facts["device"], "git": facts["git"], "caches": CACHE_STATE, "study": r.study, "run": r.run}},
        "model": {"name": str(r.config), "type": "transformer block", "backend": r.step, "origins": ["seeded"]},
        "metric": {"name": metric, "benchmark_values": values, "target_value": None,
                   "extra_info": {"unit": unit} | extra},
        "runners": [{"name": facts["name"], "type": facts["device"], "gpu_info": facts["name"] if gpu else "",
                     "gpu_count": int(gpu), "gpu_mem_info": f"{facts['memory_gib']:.0f} GiB" if gpu else "",
                     "extra_info": {"driver": facts["driver"], "compute_capability": facts.get("compute_capability"),
                                    "cpu_threads": facts["cpu_threads"], "neighbours": r.neighbours} | r.state}],
        "dependencies": {name: {"version": str(facts[name])} for name in
                         ("torch", "cuda", "cudnn", "triton", "transformer_engine", "python") if facts[name]},
    }


def check_records(r: Report) -> list[dict]:
    """The errors against FP64 and the price of compilation: what is known before timing."""
    lines = [record(r, f"{what} error", "relative L2", [error], "check", gate=gate,
                    worst=r.worst_parameter if what == "parameter gradient" else None)
             for what, (error, gate) in r.errors.items() if math.isfinite(error)]
    if r.compilation:
        lines += [record(r, f"compile {kind}", "s", [seconds], "compile")
                  for kind, seconds in (("cold", r.compilation.cold_s), ("warm", r.compilation.warm_s))]
    return lines or [record(r, "status", "", [], "check")]


def row_records(r: Report, mode: str) -> list[dict]:
    """Everything measured of one pass: a line per metric and way of launching."""
    lines, seen = [], r.evidence[mode]
    for launch in LAUNCHES:
        row = r.rows.get((mode, launch))
        if row is None:
            continue
        if row.timing is None:
            lines.append(record(r, "latency", "ms", [], mode, launch=launch, status="n/a", reason=row.reason))
            continue
        t, own = row.timing, dataclasses.replace(r, state=r.state | row.state)
        lines.append(record(own, "latency", "ms", t.samples, mode, launch=launch, median=t.median, p20=t.quantile(0.2),
                            p80=t.quantile(0.8), settled=t.settled, clock=t.clock, emulated=r.emulated,
                            calibration=t.calibration))
        metrics = {"throughput": ("tokens/s", 1e3 * row.tokens / t.median if row.tokens else None),
                   "rate": ("FLOP/s", 1e3 * row.flops / t.median if row.flops else None),
                   "limit": ("ms", row.limit_ms),
                   "percent of limit": ("%", row.percent_of_limit), "peak memory": ("bytes", row.peak_bytes),
                   "enqueue": ("ms", row.enqueue_ms)}
        lines += [record(r, name, unit, [value], mode, launch=launch, emulated=r.emulated,
                         **{"rate": {"formula": FLOPS_FORMULA}, "limit": {"flop_bound": row.flop_bound}}.get(name, {}))
                  for name, (unit, value) in metrics.items() if value is not None]
    unit = "kernels" if r.facts["device"] == "cuda" else "operators"
    lines.append(record(r, "launches", unit, [seen.launches], mode, verdict=seen.verdict, because=seen.because,
                        attention=seen.attention, kernels=dict(seen.kernels)))
    return lines
