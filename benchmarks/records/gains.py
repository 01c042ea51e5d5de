"""The time saved between two steps: how much of it the profiled parts explain, and how much may stay unexplained.

Gain is the time saved between two steps, by the clock, without a profiler. It equals the gain of the parts plus what is
left unexplained.
"""
from dataclasses import dataclass

from benchmarks.records.read import Run


@dataclass(frozen=True)
class Gain:
    """The ms that `after` takes less than `before`, both attributed. Positive: `after` is faster."""
    whole: float                       # by the clock, of the samples beside the profiled iterations
    by_part: dict[str, float]
    unexplained: float                 # between the clock without a profiler and the sum of the profiled kernels
    profiling: float | None            # as much of it comes from the profiler, by the clock; None in older records
    bound: float                       # of what may be unexplained

    @property
    def warning(self) -> str:
        """EXCEEDED where what is unexplained is beyond the bound."""
        return "EXCEEDED" if abs(self.unexplained) > self.bound else ""


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
    return Gain(whole, by_part, unexplained, profiling, max(0.05 * abs(whole), 0.005 * max(ms_before, ms_after)))
