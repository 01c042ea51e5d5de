"""What a run finds out of one case: its errors, its samples, its kernels, its memory. Card and records tell it."""
import statistics
import uuid
from dataclasses import dataclass, field
from typing import Any

import torch

from ..block.config import SDPA, BlockConfig, dtype_name
from ..block.evidence import Evidence
from ..block.traits import Traits
from ..runtime import machine
from ..runtime.energy import Energy
from ..runtime.peaks import BURST, SUSTAINED
from ..runtime.timing import Timing

LAUNCH_BOUND = 0.8             # of an iteration's time: what does the work in less is held up by launches


def launch_bound(eager_ms: float | None, graph_ms: float | None, enqueue_ms: float | None) -> bool | None:
    """Whether more than a fifth of the time goes to launching kernels one by one; None where that is unknown.

    It does where a graph replay of the same kernels, for which the host does next to nothing, takes less than
    LAUNCH_BOUND of the time. Where there is no replay, the host's time to enqueue an iteration tells: as long as that.
    It is the weaker sign, as it is measured apart from the iteration, and host times scatter.
    """
    if eager_ms is None:
        return None
    if graph_ms is not None:
        return graph_ms < LAUNCH_BOUND * eager_ms
    return None if enqueue_ms is None else enqueue_ms >= LAUNCH_BOUND * eager_ms


@dataclass
class Row:
    """One way of launching one pass: its samples, or why there are none."""
    timing: Timing | None = None
    reason: str = ""                     # where there is no timing
    flops: float = 0.0                   # of one iteration
    tokens: int = 0
    flop_bound: float | None = None      # share of the matmuls' and attention's limit that FLOPs set, not bytes
    limits: dict[str, dict[str, float]] = field(default_factory=dict)    # yardstick -> kind of operation -> ms
    peak_bytes: int | None = None
    enqueue_ms: float | None = None      # host time to enqueue one iteration; eager rows on a GPU
    state: dict[str, Any] = field(default_factory=dict)      # the machine's mid-run, where it is known per row
    energy: Energy | None = None
    energy_reason: str = "no GPU"        # where there is none

    @property
    def median(self) -> float | None:
        return self.timing.median if self.timing else None

    def limit_by(self, yardstick: str) -> float | None:
        """The limit in ms by the peaks of that yardstick; None where they are not known."""
        return sum(self.limits[yardstick].values()) if yardstick in self.limits else None

    def percent_of(self, yardstick: str) -> float | None:
        """How much of that limit is reached. By what is sustained it is None away from the power cap: there a row may
        well go beyond that.
        """
        if yardstick == SUSTAINED and machine.at_power_cap(self.state) is False:
            return None
        limit_ms = self.limit_by(yardstick)
        return 100 * limit_ms / self.median if limit_ms and self.median else None

    @property
    def beyond_its_limit(self) -> bool:
        """Whether it is faster than the measured peaks allow: they came out too low."""
        return max(self.percent_of(yardstick) or 0.0 for yardstick in (BURST, SUSTAINED)) > 100


@dataclass
class Compilation:
    """torch.compile's price in seconds: first calls of both passes with empty caches, and again from the caches."""
    cold_s: float
    warm_s: float | None                   # None: not measured
    uncompiled: list[float] | None = None  # ms of the same block, forward+backward, under set_stance("force_eager")

    def pays_after(self, compiled: Timing) -> str:
        """How many forward+backwards until what compiling took is won back, in words."""
        if self.uncompiled is None or min(len(self.uncompiled), len(compiled.samples)) < 6:
            return "n/a: too few samples"
        is_slower = compiled.quantile(0.2) > max(self.uncompiled)
        is_faster = compiled.quantile(0.8) < min(self.uncompiled)
        saved = statistics.median(self.uncompiled) - compiled.median
        return self.won_back(saved, is_slower=is_slower, is_faster=is_faster)

    def won_back(self, ms: float, *, is_slower: bool, is_faster: bool) -> str:
        """After how many calls that each save `ms` milliseconds, in words; neither slower nor faster: noise."""
        if is_slower:
            return "never: it is not faster here"
        if not is_faster:
            return "n/a: the difference is within the noise"
        calls = float(f"{1e3 * self.cold_s / ms:.1e}")              # two digits: more would change from run to run
        return f"{calls:,.0f} forward+backward calls"


@dataclass
class Result:
    """One case of one run: filled in as the run goes on, so that it can be shown at any point."""
    name: str                              # a step's, "2_sdpa", or whatever else was measured
    config: BlockConfig | None             # None: it is no part of the block
    parameter_dtype: str
    facts: dict[str, Any]
    step: int | None = None                # the step's number, where it is one of the five
    traits: Traits = field(default_factory=Traits)
    variant: dict[str, Any] = field(default_factory=dict)      # what tells it from other cases of its name
    work: dict[str, str] = field(default_factory=dict)         # input -> dtype and shape, where it is no block
    status: str = "ok"                     # or "failed", "skipped", "oom"
    reason: str = ""
    matmul: str = ""
    engine: str = "PyTorch"
    libraries: dict[str, str] = field(default_factory=dict)      # name -> version, of those that only this case uses
    emulated: bool = False
    residual: str = "float32"
    runs_under: str = ""                   # autocast's dtype, where no config says it
    autocast_off: str = ""                 # why it is, where the case would have it on
    peaks: dict[str, str] = field(default_factory=dict)      # yardstick -> its peaks in words
    errors: dict[str, tuple[float, float | None]] = field(default_factory=dict)   # what -> (error, gate)
    worst_parameter: str = ""              # whose gradient is furthest off
    compilation: Compilation | None = None
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)                # (pass, launch) -> row
    evidence: dict[str, Evidence] = field(default_factory=dict)                   # by pass
    clock: str = "n/a"
    study: str = "step"                    # who measured: a step's script, or one of benchmarks/
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])         # the same in all records of one process
    neighbours: list[str] = field(default_factory=list)
    slowed_percent: float = 0.0            # on purpose, to see whether that is found
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.facts["device"] == "cuda"

    @property
    def autocast(self) -> str:
        """The dtype of autocast where it is in effect, over FP32 parameters; "off" elsewhere."""
        if self.config is None:
            return self.runs_under or "off"
        if not self.traits.autocast or self.parameter_dtype != "float32":
            return "off"
        return dtype_name(self.config.amp_dtype) if self.config.amp_dtype else "off"

    @property
    def settings(self) -> dict[str, Any]:
        """What of its config is not the default: what tells two cases of one name apart, besides `variant`."""
        config = self.config
        settings: dict[str, Any] = {}
        if config is None:
            return settings
        usual = torch.float16 if self.on_gpu else torch.bfloat16
        if self.traits.autocast and config.amp_dtype != usual:
            settings["amp_dtype"] = dtype_name(config.amp_dtype)
        if config.dropout:
            settings["dropout"] = config.dropout
        if (self.step is not None or self.traits.autocast) and self.parameter_dtype != "float32":
            settings["parameters"] = self.parameter_dtype
        if config.fp8_weights != "per-call":
            settings["fp8_weights"] = config.fp8_weights
        if config.fp8_attention:
            settings["fp8_attention"] = True
        if config.attention != SDPA:
            settings["attention"] = config.attention
        return settings
