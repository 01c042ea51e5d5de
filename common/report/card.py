"""One run as a printed card, at most 100 columns wide.

The card has the same labels in the same order in every step and on every machine; nothing in it changes from run to run
unless it means something. So a diff of two cards shows what differs.
"""
from ..block.evidence import BY_HAND
from ..runtime import machine
from ..runtime.iteration import BOTH, FORWARD, LAUNCHES, MODES
from ..runtime.peaks import YARDSTICKS
from ..runtime.timing import CACHE_STATE
from ..text import NOT_AVAILABLE, number, wrap
from .metrics import METRICS
from .result import Result, Row, launch_bound

LABEL, COLUMN = 20, 15                 # characters: with four columns 80, as a terminal has


def card(r: Result) -> str:
    """The card of a run, however far it came."""
    return "\n".join([*_setting(r), "", *_errors(r), "", *_compilation(r), "", *_table(r), *_evidence(r)])


def _line(label: str, *values: str) -> str:
    """A label, and beside it each value on a line of its own, wrapped where it is longer."""
    lines = [line for value in values for line in wrap(value, 100 - LABEL)]
    return f"{label:<{LABEL}}" + f"\n{'':{LABEL}}".join(lines)


def _setting(r: Result) -> list[str]:
    facts = r.facts
    device = f"CPU: {facts['name']}, {facts['cpu_threads']} threads"
    if r.on_gpu:
        device = f"{facts['name']}, {facts['multiprocessors']} multiprocessors, {facts['memory_gib']:.0f} GiB"
    versions = {"torch": "torch", "CUDA": "cuda", "cuDNN": "cudnn", "triton": "triton",
                "Transformer Engine": "transformer_engine"}
    software = [f"{label} {facts[key] or NOT_AVAILABLE}" for label, key in versions.items()]
    reason, _, _ = r.autocast_off.partition(";")                     # what could be done about it would take a line
    why = f" ({reason})" if reason else ""
    return [
        _line("step", r.name),
        _line("status", r.status + (f": {r.reason}" if r.reason else "")),
        _line("device", device),
        _line("software", ", ".join(software)),
        _line("shape", _shape(r)),
        _line("precision", f"matmuls {r.matmul or NOT_AVAILABLE}; autocast {r.autocast}{why}",
              f"x, y and parameters {r.parameter_dtype}; residual {r.residual}" if r.config
              else f"parameters {r.parameter_dtype}"),
        _line("engine", r.engine),
        _line("attention", _attention(r)),
        _line("clock", f"{_clock(r)}; caches {CACHE_STATE}"),
        _line("throttled", _throttled(r)),
        _line("also on this GPU", _neighbours(r)),
        *(_line(f"{yardstick} peaks", r.peaks.get(yardstick, NOT_AVAILABLE)) for yardstick in YARDSTICKS),
    ]


def _shape(r: Result) -> str:
    if r.config:
        return f"{r.config}, causal, dropout {r.config.dropout:g}"
    return ", ".join(f"{name} {words}" for name, words in r.work.items()) or NOT_AVAILABLE


def _attention(r: Result) -> str:
    """A model that nothing is claimed of may have none at all."""
    seen = r.evidence.get(BOTH) or r.evidence.get(FORWARD)
    if not seen:
        return NOT_AVAILABLE
    return seen.attention if r.config or seen.attention != BY_HAND else "no fused kernel"


def _clock(r: Result) -> str:
    return next((row.timing.clock for row in r.rows.values() if row.timing), r.clock)


def _throttled(r: Result) -> str:
    if "throttled" in r.state:
        return ", ".join(r.state["throttled"] or ["no"])
    if not r.on_gpu and machine.busy(r.state | r.facts):
        return "load beyond its threads"
    return NOT_AVAILABLE


def _neighbours(r: Result) -> str:
    names = sorted({name.split(" (pid")[0] for name in r.neighbours})       # process numbers change without meaning
    return ", ".join(names) or ("nothing" if r.on_gpu else NOT_AVAILABLE)


def _errors(r: Result) -> list[str]:
    lines = [f"{'error against FP64':<{LABEL}}{'relative L2':>16}{'gate':>16}"]
    for what in ("output", "branch", "input gradient", "parameter gradient") if r.config else r.errors:
        error, gate = r.errors.get(what, (None, None))
        worst = f"  {r.worst_parameter}" if what == "parameter gradient" and r.worst_parameter else ""
        figures = f"{number(error, '.1e'):>16}{number(gate, '.1e'):>16}{worst}"
        lines += [f"{what:<{LABEL}}{figures}"] if len(what) < LABEL else [what, f"{'':<{LABEL}}{figures}"]
    return lines


def _compilation(r: Result) -> list[str]:
    price = r.compilation
    seconds = pays_after = NOT_AVAILABLE
    if price:
        seconds = f"cold {price.cold_s:.0f} s, warm {price.warm_s:.1f} s"
        timing = r.rows.get((BOTH, "eager"), Row()).timing
        if timing and price.uncompiled:
            pays_after = price.pays_after(timing)
    return [_line("compile", seconds), _line("compile pays after", pays_after)]


def _table(r: Result) -> list[str]:
    rows = [r.rows.get((mode, launch), Row()) for mode in MODES for launch in LAUNCHES]

    def cells(label: str, values: list[str]) -> str:
        columns = "".join(f"{value:>{COLUMN}}" for value in values)
        return f"{label:<{LABEL}}{columns}".rstrip()

    def numbers(label: str, of_row, form: str) -> str:
        """A line of `of_row` of each row that was timed."""
        return cells(label, [number(of_row(row) if row.timing else None, form) for row in rows])

    heads = "".join(f"{mode:^{2 * COLUMN}}" for mode in MODES)
    unit = "" if r.on_gpu else " operators"
    bound, launches = [], []
    for mode, eager, graph in zip(MODES, rows[::2], rows[1::2], strict=True):
        held_up = launch_bound(eager.median, graph.median, eager.enqueue_ms)
        bound += [NOT_AVAILABLE if held_up is None else "launch-bound" if held_up else "no", NOT_AVAILABLE]
        launches += [f"{r.evidence[mode].launches}{unit}" if mode in r.evidence else NOT_AVAILABLE, ""]
    settled = [NOT_AVAILABLE if not row.timing else "yes" if row.timing.settled else "unsettled" for row in rows]
    return [
        f"{'':<{LABEL}}{heads}".rstrip(),
        cells("", [*LAUNCHES, *LAUNCHES]),
        numbers("median ms", lambda row: row.median, ".3f"),
        numbers("p20 ms", lambda row: row.timing.quantile(0.2), ".3f"),
        numbers("p80 ms", lambda row: row.timing.quantile(0.8), ".3f"),
        numbers("samples", lambda row: len(row.timing.samples), "d"),
        cells("settled", settled),
        *(cells(metric.label, [metric.shown(metric.of(row)) for row in rows]) for metric in METRICS),
        cells("launch-bound", bound),
        cells("launches", launches),
    ]


def _evidence(r: Result) -> list[str]:
    missing = sorted({row.reason for row in r.rows.values() if row.reason and not row.timing})
    if r.on_gpu:
        missing += sorted({row.energy_reason for row in r.rows.values() if row.timing and not row.energy})
    meaning = "means nothing: Transformer Engine is emulated, only its numerics are real"
    if r.status != "ok" and not missing:
        missing = ["the run did not end well: see its status"]
    was_timed = any(row.timing for row in r.rows.values())
    timing = meaning if r.emulated else "measured" if was_timed else NOT_AVAILABLE
    lines = [_line("n/a because", "; ".join(missing) or "(none)"), _line("timing", timing)]
    for mode in MODES:
        seen = r.evidence.get(mode)
        lines.append(_line(mode, f"{seen.verdict}: {seen.because}" if seen else NOT_AVAILABLE))
    return lines
