"""The time saved between two steps: how much of it the profiled parts explain, and how much may stay unexplained.

Gain is the time saved between two steps, measured just before profiling. It equals the gain of the parts, plus what
profiling itself changes, plus what is left unexplained.
"""
from dataclasses import dataclass

from benchmarks.records.read import Run


@dataclass(frozen=True)
class Gain:
    """The ms that `after` takes less than `before`, both attributed. Positive: `after` is faster."""
    whole: float                       # by the clock, of the samples right before the profiled iterations
    by_part: dict[str, float]
    profiling: float | None            # what the whole changes by while the profiler runs; None in older records
    unexplained: float                 # between clock and kernels (with what profiling changes, where that is unknown)
    bound: float                       # of what may be unexplained

    @property
    def warning(self) -> str:
        """EXCEEDED, EXCEEDED with profiling, or nothing: whether what is unexplained is beyond the bound."""
        if abs(self.unexplained) > self.bound:
            return "EXCEEDED"
        if abs(self.unexplained + (self.profiling or 0.0)) > self.bound:
            return "EXCEEDED with profiling"
        return ""


def gain(before: Run, after: Run, mode: str) -> Gain:
    """The gain of `after`, in ms. The bound is 5 % of it, or 0.5 % of the slower one, whichever is more."""
    parts_before, parts_after = before.parts(mode) or {}, after.parts(mode) or {}
    by_part = {part: parts_before[part] - parts_after[part] for part in parts_before}
    ms_before, ms_after = before.profiled_ms(mode), after.profiled_ms(mode)
    whole = ms_before - ms_after
    unexplained = whole - (sum(parts_before.values()) - sum(parts_after.values()))
    profiling = None
    clocked_before, clocked_after = before.clocked_ms(mode), after.clocked_ms(mode)
    if clocked_before is not None and clocked_after is not None:
        profiling = whole - (clocked_before - clocked_after)
        unexplained -= profiling
    return Gain(whole, by_part, profiling, unexplained, max(0.05 * abs(whole), 0.005 * max(ms_before, ms_after)))
