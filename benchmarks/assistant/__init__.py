"""The ladder on a user's own model: what to change, what it buys, whether it is still the same function."""
from benchmarks.assistant.look import Looked
from benchmarks.assistant.optimize import look, optimize, why
from benchmarks.assistant.optimized import Optimized
from benchmarks.assistant.task import ByHand, Task
from benchmarks.assistant.trials import Opportunity

__all__ = ["ByHand", "Looked", "Opportunity", "Optimized", "Task", "look", "optimize", "why"]
