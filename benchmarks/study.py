"""For a script of your own: compare modules side by side, or ask whether one is right.

    from benchmarks.study import compare, validate
"""
from benchmarks.measure.modules import Comparison, compare, validate

__all__ = ["Comparison", "compare", "validate"]
