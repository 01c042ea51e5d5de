"""What is global in this process: functions that a candidate may replace, and settings that it may change."""
import contextlib
import gc
import sys
import threading
import time
from typing import Any

import torch

_CLASSES = (torch.Tensor, torch.cuda.Event, torch.cuda.Stream, torch.Generator, torch.cuda.CUDAGraph)
_MODULES = (time, gc, torch, torch.cuda, torch.testing, torch.autograd, torch.random, threading)
_OWN = ("benchmarks.measure.", "common.runtime.", "common.measure.", "common.block.")


def _functions() -> dict[tuple[str, str], Any]:
    """(holder, name) -> what stands there now: the functions and classes that a measurement rests on."""
    found: dict[tuple[str, str], Any] = {}
    holders = [*_CLASSES, *_MODULES, *(module for name, module in list(sys.modules.items())
                                      if name.startswith(_OWN) and module is not None)]
    for holder in holders:
        label = getattr(holder, "__name__", str(holder))
        for name, value in list(vars(holder).items()):
            if callable(value) and not name.startswith("__warning"):
                found[label, name] = value
    return found


def _settings() -> dict[str, Any]:
    """What decides how precisely and in which way anything is computed."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn.allow_tf32": cudnn.allow_tf32, "cudnn.benchmark": cudnn.benchmark, "cudnn.enabled": cudnn.enabled,
        "cudnn.deterministic": cudnn.deterministic,
        "allow_fp16_reduced_precision_reduction": cuda.allow_fp16_reduced_precision_reduction,
        "allow_bf16_reduced_precision_reduction": cuda.allow_bf16_reduced_precision_reduction,
        "default dtype": torch.get_default_dtype(), "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(), "autocast": torch.is_autocast_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "flush denormal": float(torch.tensor([1e-40]) * 1) == 0.0,
        "threads": torch.get_num_threads(), "garbage collection": gc.isenabled(),
    }


def _restore_settings(before: dict[str, Any]) -> None:
    torch.set_float32_matmul_precision(before["float32_matmul_precision"])
    torch.backends.cudnn.allow_tf32 = before["cudnn.allow_tf32"]
    torch.backends.cudnn.benchmark = before["cudnn.benchmark"]
    torch.backends.cudnn.enabled = before["cudnn.enabled"]
    torch.backends.cudnn.deterministic = before["cudnn.deterministic"]
    torch.set_default_dtype(before["default dtype"])
    torch.set_grad_enabled(before["gradients"])
    torch.set_flush_denormal(before["flush denormal"])
    if torch.get_num_threads() != before["threads"]:
        torch.set_num_threads(before["threads"])
    (gc.enable if before["garbage collection"] else gc.disable)()


class Globals:
    """What is global in this process now; `changed` says what a candidate did to it, and puts it back."""

    def __init__(self) -> None:
        self.functions, self.settings = _functions(), _settings()

    def changed(self) -> str:
        """"" where nothing is; else what, in words. Functions of a module that was imported since are no change."""
        now = _functions()
        replaced = [(holder, name) for (holder, name), value in self.functions.items()
                    if now.get((holder, name)) is not value]
        settings = _settings()
        others = [f"{name} from {value} to {settings[name]}" for name, value in self.settings.items()
                  if settings[name] != value]
        for holder, name in replaced:
            owner = next((one for one in _CLASSES if one.__name__ == holder), None) or sys.modules.get(holder)
            with contextlib.suppress(Exception):
                setattr(owner, name, self.functions[holder, name])
        if others:
            _restore_settings(self.settings)
        words = [f"it replaces {holder}.{name}" for holder, name in replaced]
        return "; ".join([*words, *(f"it changes {what}" for what in others)][:3])
