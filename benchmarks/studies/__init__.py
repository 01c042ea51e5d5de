"""One question a file or folder. A study says what is its own, registers itself, and is then a command and a page.

This module finds them. `benchmarks/show/study.py` has what all of them share.
"""
import importlib
import pkgutil

from benchmarks.show import study as frame
from benchmarks.show.study import Study


def names() -> list[str]:
    """The studies there are, by name; none is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Study:
    """The study of that name; its module is imported, and registers it."""
    importlib.import_module(f"{__name__}.{name}")
    return frame.registered[name]


def every() -> list[Study]:
    """All of them, in the order in which a learner would ask them, then by name."""
    return sorted(map(load, names()), key=lambda study: (study.place, study.name))
