"""The one place that knows the five scripts: each is a `Step`, a value with a name, a title, `build` and traits."""
import ast
import dataclasses
import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from .config import BlockConfig
from .traits import BY_HAND, DELAYED, FUSED, FUSED_IN_16_BITS, Traits

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Step:
    """One script of the ladder, or a copy of one that a user has changed."""
    number: int
    name: str                  # of its file, without .py
    traits: Traits
    path: Path

    @property
    def title(self) -> str:
        """What its docstring begins with: "the same block with fused attention"."""
        doc = ast.get_docstring(ast.parse(self.path.read_text())) or self.name
        first = doc.splitlines()[0]
        return (first.partition(": ")[2] or first).rstrip(".")

    @property
    def module(self) -> ModuleType:
        """Its script, imported; it holds the classes of the block."""
        return _module(self.path)

    def build(self, config: BlockConfig, values: dict[str, Tensor], device: torch.device | str) -> nn.Module:
        """Its block on `device`, with a copy of the canonical parameters `values` in the dtype they come in."""
        return self.module.build(config, values, device)


_BASELINE = Traits(attention=BY_HAND, claimed=True)
_CUBLAS = dataclasses.replace(_BASELINE, tf32=True, autocast=True)
_SDPA = dataclasses.replace(_CUBLAS, attention=FUSED)
_COMPILE = dataclasses.replace(_SDPA, compiled=True)
_TRANSFORMER_ENGINE = Traits(attention=FUSED_IN_16_BITS, tf32=True, autocast=True, fp8=DELAYED,
                             residual_in_16_bits=True, claimed=True)       # it has no fused attention in FP32
_TRAITS = {"0_baseline": _BASELINE, "1_cublas": _CUBLAS, "2_sdpa": _SDPA, "3_compile": _COMPILE,
           "4_transformer_engine": _TRANSFORMER_ENGINE}
ALL = tuple(Step(number, name, traits, ROOT / f"{name}.py") for number, (name, traits) in enumerate(_TRAITS.items()))

_PLACES: dict[str | None, int] = {step.name: place for place, step in enumerate(ALL)}


def place_of(name: str | None) -> int:
    """Where the step of that name stands in the ladder; behind all of them for anything else."""
    return _PLACES.get(name, len(ALL))


def load(number: int) -> Step:
    """Step `number`, 0 to 4: steps.load(2).build(config, parameters, device) builds its block.

    Raises ValueError for any other number.
    """
    if type(number) is not int or not 0 <= number < len(ALL):
        raise ValueError(f"step {number}: give a number from 0 to {len(ALL) - 1}")
    return ALL[number]


def of(script: Path) -> Step:
    """The step in that file. A copy under another name, `2_mine.py`, has the traits of the step with its number.

    Raises ValueError for a file that is neither.
    """
    for step in ALL:
        if script.name.startswith(f"{step.number}_"):
            return dataclasses.replace(step, name=script.stem, path=script.resolve())
    raise ValueError(f"{script.name}: name it after the step that it is a copy of, as {ALL[0].number}_{script.name}")


@functools.cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"step_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module           # so that what the script defines can be found by its module's name
    spec.loader.exec_module(module)
    return module
