"""The one place that knows the scripts: loads step n by its path."""
import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
COUNT = 5


def path(step: int) -> Path:
    """The script of step `step`, 0 to 4. Raises ValueError for any other number."""
    found = list(ROOT.glob(f"{step}_*.py")) if step in range(COUNT) else []
    if len(found) != 1:
        raise ValueError(f"step {step}: give a number from 0 to {COUNT - 1}")
    return found[0]


@functools.cache
def load(step: int) -> ModuleType:
    """The module of step `step`: steps.load(2).build(config, parameters, device) builds its block."""
    source = path(step)
    spec = importlib.util.spec_from_file_location(f"step_{source.stem}", source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module           # so that what the script defines can be found by its module's name
    spec.loader.exec_module(module)
    return module
