"""One run as records: one metric a line, in the PyTorch OSS benchmark schema, version 3, with a `case` of ours.

`benchmark.extra_info.case` says in fields what a record is of, so that no reader takes a name apart:

    study     who measured: "step" for a script, else a study of benchmarks/
    step      the step's number; null for anything else
    name      the step's name, or the peer's, the part's, the operation's; null for a record of the whole run
    variant   what tells it from other cases of that name: an object, empty where there is only one
    pass      "forward", "backward", "forward+backward", or null
    launch    "eager", "graph", or null
    work      of what is no block: input -> dtype and shape, and how many parameters there are
"""
import dataclasses
import math
from typing import Any

from ..block.config import dtype_name
from ..block.workload import COPY
from ..runtime.iteration import BACKWARD, LAUNCHES, MODES
from ..runtime.peaks import BURST, DATA_SHEET, SUSTAINED, MeasuredPeaks
from ..runtime.timing import CACHE_STATE
from .metrics import METRICS
from .result import Result, Row

SCHEMA = "transformer block, 2"         # 1 had names in place of a case
PARTS = ("attention", "GEMM", "softmax and mask", "normalisation and activation", "casts and copies",
         "residual and other", "idle")  # of an iteration's time, as the metric "time by part" has them
PASSES = (*MODES, BACKWARD)
LIBRARIES = ("torch", "cuda", "cudnn", "triton", "transformer_engine", "numpy", "python")

Record = dict[str, Any]

NOT_A_BLOCK = "not a block"             # the shape in a record of no work, such as a peak
PREDICTED = "predicted latency"         # of a case before it ran: between two ends
PREDICTED_MEMORY = "predicted memory"   # bytes less at the peak than of the case as it is: between two ends
VERDICT = "verdict"                     # on one technique at one place of a model
OF_AN_ERROR = " error"                  # behind what it is of: "branch error"


def record(r: Result, metric: str, unit: str, values: list[float], mode: str, launch: str | None = None,
           **extra: Any) -> Record:
    """One metric of this run. `mode` is a pass, or "check", "compile", "run". Non-finite values raise ValueError."""
    facts = r.facts
    config: dict[str, Any] = {}
    if r.config is not None:
        config = dataclasses.asdict(r.config) | {"amp_dtype": dtype_name(r.config.amp_dtype)}
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"{metric} is not finite: report it as a status")
    case = {"study": r.study, "step": r.step, "name": r.name or None, "variant": r.variant | r.settings,
            "pass": mode if mode in PASSES else None, "launch": launch}
    if r.work:
        case["work"] = r.work
    model = r.config or ", ".join(f"{name} {what}" for name, what in r.work.items()) or NOT_A_BLOCK
    info = {
        "schema": SCHEMA, "case": case, "status": r.status, "reason": r.reason, "config": config,
        "parameter_dtype": r.parameter_dtype, "autocast": r.autocast, "residual": r.residual, "engine": r.engine,
        "device": facts["device"], "git": facts["git"], "sources": facts["sources"], "caches": CACHE_STATE,
        "run": r.run, "began": facts.get("began")}
    if r.slowed_percent:
        info["slowed_percent"] = r.slowed_percent
    known = {name: facts[name] for name in LIBRARIES if facts.get(name)}
    memory = f"{facts['memory_gib']:.0f} GiB" if r.on_gpu else ""
    machine = {
        "driver": facts["driver"], "compute_capability": facts.get("compute_capability"),
        "gpu_uuid": facts["gpu_uuid"], "cpu_model": facts["cpu_model"], "cpu_threads": facts["cpu_threads"],
        "neighbours": r.neighbours}
    return {
        "benchmark": {"name": "transformer block", "mode": mode, "dtype": r.matmul, "extra_info": info},
        "model": {"name": str(model), "type": "transformer block", "backend": r.name,
                  "origins": ["seeded"]},
        "metric": {"name": metric, "benchmark_values": values, "target_value": None,
                   "extra_info": {"unit": unit} | extra},
        "runners": [{"name": facts["name"], "type": facts["device"], "gpu_info": facts["name"] if r.on_gpu else "",
                     "gpu_count": int(r.on_gpu), "gpu_mem_info": memory, "extra_info": machine | r.state}],
        "dependencies": {name: {"version": str(version)} for name, version in (known | r.libraries).items()},
    }


def check_records(r: Result) -> list[Record]:
    """The errors against FP64 and the price of compilation: what is known before timing."""
    lines = []
    for what, (error, gate) in r.errors.items():
        if math.isfinite(error):
            worst = r.worst_parameter if what == "parameter gradient" else None
            lines.append(record(r, what + OF_AN_ERROR, "relative L2", [error], "check", gate=gate, worst=worst))
    if r.compilation:
        lines.append(record(r, "compile cold", "s", [r.compilation.cold_s], "compile"))
        if r.compilation.warm_s is not None:
            lines.append(record(r, "compile warm", "s", [r.compilation.warm_s], "compile"))
    return lines or [status_record(r)]


def status_record(r: Result, mode: str = "check") -> Record:
    """How the case ended, where nothing was measured that would say so."""
    return record(r, "status", "", [], mode)


def row_records(r: Result, mode: str) -> list[Record]:
    """Everything measured of one pass: a line per metric and way of launching."""
    lines = []
    for launch in LAUNCHES:
        row = r.rows.get((mode, launch))
        if row and row.timing:
            lines += _timed(r, mode, launch, row)
        elif row:
            lines.append(record(r, "latency", "ms", [], mode, launch, status="n/a", reason=row.reason))
    seen = r.evidence[mode]
    lines.append(record(r, "launches", "kernels" if r.on_gpu else "operators", [seen.launches], mode,
                        verdict=seen.verdict, because=seen.because, attention=seen.attention,
                        kernels=dict(seen.kernels)))
    return lines


def _timed(r: Result, mode: str, launch: str, row: Row) -> list[Record]:
    timing = row.timing
    assert timing is not None
    with_state = dataclasses.replace(r, state=r.state | row.state)
    lines = [record(with_state, "latency", "ms", timing.samples, mode, launch, median=timing.median,
                    p20=timing.quantile(0.2), p80=timing.quantile(0.8), settled=timing.settled, clock=timing.clock,
                    emulated=r.emulated, calibration=timing.calibration, rounds=timing.rounds,
                    offsets_s=_rounded(timing.offsets_s))]
    for metric in METRICS:
        value = metric.of(row)
        if metric.recorded and value is not None:
            lines.append(record(r, metric.name, metric.unit, [value], mode, launch, emulated=r.emulated,
                                **metric.extra(row)))
    return lines


def peak_records(r: Result, peaks: MeasuredPeaks) -> list[Record]:
    """A line for each peak of this machine, by each yardstick, and how it was measured."""
    lines = []

    def add(yardstick: str, name: str, rate: float, **extra: Any) -> None:
        unit = "bytes/s" if name == COPY else "FLOP/s"
        lines.append(record(r, "peak", unit, [rate], "run", yardstick=yardstick, of=name, **extra))

    for name, sustained in peaks.sustained.items():
        add(SUSTAINED, name, sustained.rate, work=sustained.work.what, seconds=sustained.seconds,
            settled=sustained.settled, state=sustained.state, in_rounds=sustained.in_rounds, square=sustained.square,
            data="normal random numbers")
    of_yardsticks = {BURST: peaks.known} | ({DATA_SHEET: peaks.sheet[0]} if peaks.sheet else {})
    for yardstick, known in of_yardsticks.items():
        source = {"source": peaks.sheet[1]} if peaks.sheet and yardstick == DATA_SHEET else {}
        for name, rate in known.flops.items():
            add(yardstick, name, rate, **source)
        if known.bandwidth:
            add(yardstick, COPY, known.bandwidth, **source)
    return lines


def _rounded(offsets: list[float] | None) -> list[float] | None:
    """To microseconds."""
    return None if offsets is None else [round(offset, 6) for offset in offsets]
