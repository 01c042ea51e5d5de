"""The ladder on a user's own model: what to change, what it buys, whether it is still the same function."""
from benchmarks.assistant.optimize import Opportunity, Optimized, optimize
from benchmarks.assistant.task import Task

__all__ = ["Opportunity", "Optimized", "Task", "optimize"]
