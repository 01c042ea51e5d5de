"""The figures of a row, each named here and nowhere else: what a record calls it, what the card does, how it is shown.

Card, records, tables and `compare` go through this list. Whoever adds a figure adds it here.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..runtime.peaks import BURST, YARDSTICKS
from ..text import number, percent
from .result import Row

FLOPS_COUNTED = "of matmuls and attention, causal attention counted half; 2 for a multiplication and its addition"


@dataclass(frozen=True)
class Metric:
    """One figure of a row."""
    name: str                                              # in records
    unit: str                                              # there
    of: Callable[[Row], float | None]
    label: str                                             # on the card, in its unit
    form: str = ".3f"                                      # of the number on the card
    scale: float = 1.0                                     # from the unit of a record to that of the card
    recorded: bool = True                                  # else it stands beside another one
    compared: bool = False                                 # between two files, too: it hardly scatters
    extra: Callable[[Row], dict[str, Any]] = lambda row: {}    # what stands beside it in a record

    def shown(self, value: float | None) -> str:
        """A recorded value as the card has it; n/a for None."""
        if self.unit == "%":
            return percent(value)
        return number(None if value is None else self.scale * value, self.form)


def _per_second(amount: Callable[[Row], float]) -> Callable[[Row], float | None]:
    return lambda row: 1e3 * amount(row) / row.median if amount(row) and row.median else None


def _of_energy(what: Callable[[Row, Any], float | None]) -> Callable[[Row], float | None]:
    return lambda row: what(row, row.energy) if row.energy else None


def _limit(yardstick: str) -> Metric:
    """The time by it; "limit" by a burst, which older records have alone."""
    def extra(row: Row) -> dict[str, Any]:
        bound = {"flop_bound": row.flop_bound} if yardstick == BURST else {}
        return {"by_kind": row.limits.get(yardstick)} | bound
    name = "limit" if yardstick == BURST else f"{yardstick} limit"
    return Metric(name, "ms", lambda row: row.limit_by(yardstick), f"{yardstick} limit", extra=extra)


def _share(yardstick: str) -> Metric:
    """How much of that limit is reached."""
    return Metric(f"percent of {LIMIT[yardstick].name}", "%", lambda row: row.percent_of(yardstick),
                  f"% of {yardstick}")


def _beside_energy(row: Row) -> dict[str, Any]:
    used = row.energy
    assert used is not None
    return {"watts": used.watts, "sampled_watts": used.sampled_watts, "seconds": used.seconds,
            "joules_per_1000_tokens": PER_1000_TOKENS.of(row)}


THROUGHPUT = Metric("throughput", "tokens/s", _per_second(lambda row: row.tokens), "tokens/s", ",.0f")
RATE = Metric("rate", "FLOP/s", _per_second(lambda row: row.flops), "TFLOP/s", ".2f", 1e-12,
              extra=lambda row: {"counted": FLOPS_COUNTED})
LIMIT = {yardstick: _limit(yardstick) for yardstick in YARDSTICKS}
SHARE = {yardstick: _share(yardstick) for yardstick in YARDSTICKS}
ENERGY = Metric("energy", "J", _of_energy(lambda row, used: used.joules), "J/iteration", compared=True,
                extra=_beside_energy)
PER_1000_TOKENS = Metric("energy per 1000 tokens", "J", _of_energy(
    lambda row, used: 1e3 * used.joules / row.tokens if row.tokens else None), "J/1000 tokens", recorded=False)
POWER = Metric("power", "W", _of_energy(lambda row, used: used.watts), "mean W", ".0f", recorded=False)
PEAK_MEMORY = Metric("peak memory", "bytes", lambda row: row.peak_bytes, "peak memory GiB", ".2f", 2**-30,
                     compared=True)
ENQUEUE = Metric("enqueue", "ms", lambda row: row.enqueue_ms, "enqueue ms", ".2f")

METRICS = (THROUGHPUT, RATE, *LIMIT.values(), *SHARE.values(), ENERGY, PER_1000_TOKENS, POWER, PEAK_MEMORY, ENQUEUE)
