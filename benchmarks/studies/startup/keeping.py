"""What a compiler made, kept for the next process: as a cache, as a compiled function, as a package.

Each lies in a folder with a note of what it was made for. Whoever starts from it is refused where anything else is
asked: torch itself does not look, and a static package computes something of another shape without a word.
"""
import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.startup.stack import WHOLE, Call, InTurn, Stack, compiled
from common.outcome import Failed

NONE, COLD, WARM, MEGA, AOT, PACKAGE = "no compile", "cold", "warm folder", "mega-cache", "aot_compile", "package"
WAYS = (NONE, COLD, WARM, MEGA, AOT, PACKAGE)
OF_A_CACHE = (WARM, MEGA)              # one process that compiles fills both; what they do not find, is compiled anew
NOTE, ARTIFACTS, FUNCTION, INDUCTOR = "made_for.json", "cache.bin", "function.bin", "package.pt2"


def made_for(stack: Stack, x: Tensor, with_gradients: bool) -> dict[str, Any]:
    """What must agree: shape, arithmetic, pass, software and hardware."""
    device = x.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"shape": list(x.shape), "dtype": str(x.dtype), "layers": len(stack.blocks),
            "autocast": str(stack.config.amp_dtype), "gradients": with_gradients, "torch": torch.__version__,
            "device": f"{device.type}, {name}"}


def note(folder: Path, facts: dict[str, Any]) -> None:
    (folder / NOTE).write_text(json.dumps(facts))


def check_note(folder: Path, facts: dict[str, Any]) -> None:
    """Raise Failed where what lies there was made for something else, or where nothing does."""
    try:
        known = json.loads((folder / NOTE).read_text())
    except (OSError, ValueError):
        raise Failed(f"{folder}: nothing was kept there") from None
    others = [f"{name} {known.get(name)}, not {wanted}" for name, wanted in facts.items() if known.get(name) != wanted]
    if others:
        raise Failed(f"what was kept was made for {'; '.join(others)}")


@dataclass(frozen=True)
class Kept:
    """A way of keeping: how it is made in one process, and how the next one starts from it."""
    make: Callable[[Path, Stack, str, Tensor], None]               # into a folder, once the stack ran compiled
    start: Callable[[Path, Stack, str], Call]
    missing: str = ""                                              # why this torch can't


def _no_file(folder: Path, stack: Stack, form: str, x: Tensor) -> None:
    """Inductor's folder itself is what is kept."""


def _compiled(folder: Path, stack: Stack, form: str) -> Call:
    return compiled(stack, form)


def _save_artifacts(folder: Path, stack: Stack, form: str, x: Tensor) -> None:
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise Failed("torch.compiler.save_cache_artifacts() has nothing to save")
    (folder / ARTIFACTS).write_bytes(saved[0])


def _load_artifacts(folder: Path, stack: Stack, form: str) -> Call:
    torch.compiler.load_cache_artifacts((folder / ARTIFACTS).read_bytes())
    return compiled(stack, form)


def _owners(stack: Stack, form: str) -> list[Any]:
    """What a saved function is called with, each time that it is."""
    return [stack] if form == WHOLE else list(stack.blocks)


def _forward(owner: Any, x: Tensor) -> Tensor:
    """Of a stack or a block. Autocast is inside: torch 2.11 refuses a saved function where it is outside."""
    dtype = owner.config.amp_dtype
    with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        return owner.forward(x)


def _save_function(folder: Path, stack: Stack, form: str, x: Tensor) -> None:
    if hasattr(torch._dynamo.config, "enable_aot_compile"):                    # torch 2.11 has it behind a switch
        torch._dynamo.config.enable_aot_compile = True
    compile_it: Any = torch.compile(_forward, fullgraph=True, dynamic=False)
    with torch.autocast(x.device.type, enabled=False):
        made = compile_it.aot_compile(((_owners(stack, form)[0], x), {}))
    made.save_compiled_function(str(folder / FUNCTION))


def _load_function(folder: Path, stack: Stack, form: str) -> Call:
    with open(folder / FUNCTION, "rb") as file:
        function = torch.compiler.load_compiled_function(file)              # type: ignore[attr-defined]
    in_turn = InTurn([functools.partial(function, owner) for owner in _owners(stack, form)])

    def call(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return in_turn(x)
    return call


def _save_package(folder: Path, stack: Stack, form: str, x: Tensor) -> None:
    program = torch.export.export(stack, (x,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / INDUCTOR))


def _load_package(folder: Path, stack: Stack, form: str) -> Call:
    """Torch checks no shape unless this variable is set before a package is loaded."""
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    return torch._inductor.aoti_load_package(str(folder / INDUCTOR))


def _without_aot_compile() -> str:
    has = hasattr(torch.compiler, "load_compiled_function")
    return "" if has else f"torch {torch.__version__} can't save what aot_compile made"


@functools.cache
def ways() -> dict[str, Kept]:
    """Those that keep something, by name."""
    return {WARM: Kept(_no_file, _compiled), MEGA: Kept(_save_artifacts, _load_artifacts),
            AOT: Kept(_save_function, _load_function, _without_aot_compile()),
            PACKAGE: Kept(_save_package, _load_package)}


def why_not(way: str, form: str, with_gradients: bool) -> str:
    """Why a cell of the table has no figure; "" where it is to be measured."""
    if way == PACKAGE and with_gradients:
        return "a package has no gradient"
    if way == PACKAGE and form != WHOLE:
        return "a package holds the parameters: one serves one layer"
    if way == NONE and form != WHOLE:
        return "without a compiler both are the same"
    return ways()[way].missing if way in ways() else ""
