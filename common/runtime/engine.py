"""Which engine step 4 runs on: Transformer Engine, or its emulation and why.

Transformer Engine is imported when that is first asked, and not before: steps 0 to 3 do without it.
"""
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..block import emulation
from ..block.config import BlockConfig
from . import machine

TRANSFORMER_ENGINE = "Transformer Engine"
DEALT_OUT: dict[str, dict[str, Any]] = {       # how both engines are asked for a rank's part of each module
    "LayerNormLinear": {"parallel_mode": "column"}, "Linear": {"parallel_mode": "row"},
    "LayerNormMLP": {"set_parallel_mode": True}, "DotProductAttention": {}}


@dataclasses.dataclass(frozen=True)
class Engine:
    """What runs a block: a library of some version, or the emulation of Transformer Engine, and why that."""
    name: str
    version: str = ""
    why_emulated: str = ""

    @property
    def is_emulated(self) -> bool:
        return bool(self.why_emulated)

    def __str__(self) -> str:
        """As cards and records name it."""
        return f"emulated ({self.why_emulated})" if self.is_emulated else f"{self.name} {self.version}".rstrip()

    @classmethod
    def of_record(cls, text: str) -> "Engine":
        """The one that a record names."""
        if emulated := re.fullmatch(r"emulated \((.*)\)", text, re.DOTALL):
            return emulation_because(emulated[1])
        versioned = re.fullmatch(r"(.+) (\d\S*)", text)
        return cls(versioned[1], versioned[2]) if versioned else cls(text)


PYTORCH = Engine("PyTorch")


def emulation_because(why: str) -> Engine:
    """Transformer Engine's emulation."""
    return Engine("emulation", why_emulated=why)


class Split:
    """An engine whose modules are this rank's parts of whole ones, which the ranks of `group` hold together."""

    def __init__(self, modules: ModuleType, group: "dist.ProcessGroup"):
        self._modules, self._group = modules, group

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._modules, name)
        return functools.partial(own, tp_group=self._group, **DEALT_OUT[name]) if name in DEALT_OUT else own


_split_over: list["dist.ProcessGroup"] = []


@contextlib.contextmanager
def split_over(group: "dist.ProcessGroup") -> Iterator[None]:
    """Blocks that are built meanwhile hold this rank's part of their heads and of the MLP's hidden units."""
    _split_over.append(group)
    try:
        yield
    finally:
        _split_over.pop()


def choose(config: BlockConfig, values: dict[str, Tensor], device: torch.device | str) -> tuple[Any, Engine]:
    """(modules, which): Transformer Engine where it can run this block on `device`, its emulation and why elsewhere.

    Raises ValueError where the block's dimensions are none that FP8 GEMMs take.
    """
    if config.amp_dtype is not None:
        config.check_fp8()
    reason = why_not(config, next(iter(values.values())).dtype, torch.device(device))
    modules: Any
    if reason:
        modules, which = emulation, emulation_because(reason)
    else:
        ask_for_cudnn_layer_norm(torch.device(device))
        modules, which = transformer_engine(), Engine(TRANSFORMER_ENGINE, version())
    return Split(modules, _split_over[-1]) if _split_over else modules, which


def of_block(block: Any) -> Engine:
    """What a block says that it runs on; PyTorch where it says nothing."""
    return getattr(block, "engine", PYTORCH)


def why_not(config: BlockConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why Transformer Engine can't run a block with parameters of `dtype` on `device`; None where it can."""
    if device.type != "cuda":
        return f"Transformer Engine needs a GPU, this is a {device.type.upper()}"
    if dtype == torch.float64:
        return "Transformer Engine has no float64"
    if error := import_error():
        return f"Transformer Engine does not import: {error}"
    if config.amp_dtype is not None:
        available, reason = transformer_engine().is_fp8_available(return_reason=True)
        if not available:
            return reason
    return None


def transformer_engine() -> ModuleType:
    """`transformer_engine.pytorch`. Raises ImportError where it does not import."""
    module, error = _imported()
    if module is None:
        raise ImportError(error)
    return module


def import_error() -> str | None:
    """Why Transformer Engine does not import, in a line; None where it does."""
    return _imported()[1]


def version() -> str:
    """Transformer Engine's, which must have been imported."""
    return sys.modules["transformer_engine"].__version__


def libraries_of(which: Engine) -> dict[str, str]:
    """Library -> version, of those besides torch that an engine brings: torchao itself.

    With Transformer Engine that is the cuDNN that it sees, which need not be torch's.
    """
    if which.name != TRANSFORMER_ENGINE:
        return {which.name: which.version} if which.version else {}
    cudnn = _cudnn_of_transformer_engine()
    return {"transformer_engine_cudnn": cudnn} if cudnn else {}


def _cudnn_of_transformer_engine() -> str | None:
    """As 91900 for 9.19.0; None where it does not say."""
    try:
        return str(importlib.import_module("transformer_engine_torch").get_cudnn_version())
    except (ImportError, AttributeError, RuntimeError):
        return None


@functools.cache
def _imported() -> tuple[ModuleType | None, str | None]:
    try:
        with one_cudnn(), warnings.catch_warnings():                # it sets filters, which would undo `hush`
            importlib.import_module("transformer_engine")
            return importlib.import_module("transformer_engine.pytorch"), None
    except Exception as error:       # an incomplete installation raises nearly anything: ImportError, OSError, ...
        return None, f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


@contextlib.contextmanager
def one_cudnn() -> Iterator[None]:
    """While Transformer Engine is imported: the cuDNN that torch has loaded is the one that it finds.

    Where a machine holds another, Transformer Engine prefers that one. Of two in a process some parts come from each,
    and attention is then another kernel, or reads memory that is not its own.
    """
    loaded = next((path for path in machine.cudnn_libraries() if path.name.startswith("libcudnn.so")), None)
    before = os.environ.get("CUDNN_HOME")
    if loaded and "transformer_engine" not in sys.modules and importlib.util.find_spec("transformer_engine"):
        _load_parts_of(loaded)
        os.environ["CUDNN_HOME"] = str(loaded.parent)              # where it looks for libcudnn.so first
    try:
        yield
    finally:
        os.environ.pop("CUDNN_HOME", None)
        if before is not None:
            os.environ["CUDNN_HOME"] = before


def _load_parts_of(cudnn: Path) -> None:
    """Load the other libraries of that cuDNN. Transformer Engine's own ask for them by name, and find them loaded."""
    def order(path: Path) -> tuple[bool, bool, str]:               # graph and ops first: the others ask for these two
        return "_graph" not in path.name, "_ops" not in path.name, path.name

    parts = cudnn.parent.glob(cudnn.name.replace("libcudnn", "libcudnn_*"))
    for part in sorted(parts, key=order):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(part), ctypes.RTLD_GLOBAL)


def ask_for_cudnn_layer_norm(device: torch.device) -> None:
    """On Hopper. It writes FP8 as Transformer Engine's own kernels do; the study of peers has rows with it and without.

    Transformer Engine's modules have no argument for it. It looks at these variables when a process first normalises;
    who has set them, to 0 say, is left alone.
    """
    if torch.cuda.get_device_capability(device) == (9, 0):
        for direction in ("FWD", "BWD"):
            os.environ.setdefault(f"NVTE_NORM_{direction}_USE_CUDNN", "1")


def fp8_state(block: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(scale, amax_history) of every FP8 module, forward and backward, in the layout that both engines share."""
    states = []
    for module in block.modules():
        meta = getattr(module, "fp8_meta", None) or {}
        for key in ("scaling_fwd", "scaling_bwd"):
            if hasattr(meta.get(key), "amax_history"):
                states.append((meta[key].scale, meta[key].amax_history))
    return states


def forget_modules() -> None:
    """Let Transformer Engine, where it was imported, forget the modules there have been.

    It keeps the FP8 state of every one, and updates all of it in every iteration.
    """
    if "transformer_engine.pytorch" in sys.modules:
        transformer_engine().quantization.FP8GlobalStateManager.reset()
