"""What becomes of cheats and of honest modules: by this suite, and by a check and a clock as they are often written."""
import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from triton.testing import do_bench

from benchmarks.examples import cheats
from benchmarks.examples.cheats import Cheat
from benchmarks.examples.pairs import RIGHT, Make, Pair
from benchmarks.measure.calls import modules_of
from benchmarks.measure.modules import compare
from common.block.config import dtype_name
from common.outcome import in_a_line
from common.runtime.iteration import BOTH

ATOL = 1e-2                                # of the common check, absolute and relative
ROUNDS = 2                                 # of an honest module, for its timed calls to be looked at
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Found:
    """What became of one cheat."""
    refused: bool
    by: str                                # what was found
    passes_allclose: bool
    times_as_fast: float | None            # as the reference, by `do_bench`; None without a GPU, or where it raised


def of_cheat(name: str, cheat: Cheat, device: torch.device) -> Found:
    """Both verdicts on one cheat; whatever it changed in this process is put back."""
    try:
        passes, times = _commonly(cheat.make, name, cheats.given(device))
    finally:
        cheat.undo()
    try:
        inputs = (cheats.given(device),)                       # others: a cheat may have changed the first ones
        compared = compare({"cheat": _on(cheat.make(), device)}, inputs, _on(cheats.reference_of(name), device))
    finally:
        cheat.undo()
    run = compared.results["cheat"]
    return Found(run.status == "failed", str(run.info["reason"]), passes, times)


def _on(module: Callable, device: torch.device) -> Callable:
    return module.to(device) if isinstance(module, nn.Module) else module


def _commonly(make: Callable[[], Callable], name: str, x: torch.Tensor) -> tuple[bool, float | None]:
    """(passes allclose once, how many times as fast as the reference by `triton.testing.do_bench`)."""
    candidate, reference = _on(make(), x.device), _on(cheats.reference_of(name), x.device)
    with torch.no_grad():
        passes = bool(torch.allclose(candidate(x), reference(x), atol=ATOL, rtol=ATOL))
        if x.device.type != "cuda":
            return passes, None
        try:
            return passes, do_bench(lambda: reference(x)) / max(do_bench(lambda: candidate(x)), 1e-9)
        except Exception:                  # it has taken the clock's own functions away
            return passes, None


# --------------------------------------------------------------------------------------------------------- honest ones


def honest(quick: bool = False) -> Iterator[tuple[str, Callable[[], Pair]]]:
    """Right modules: each in every dtype, as it is, in eval mode, wrapped, and in FP32 compiled; or fewer of them."""
    for name, make in RIGHT.items():
        for dtype in DTYPES[:1] if quick else DTYPES:
            for words, change in list(CHANGES.items())[:1] if quick else CHANGES.items():
                if change is _eval and any(isinstance(part, nn.RNNBase) for part in modules_of(make(dtype).reference)):
                    continue               # cuDNN's recurrent layers have no backward there
                yield f"{name}, {dtype_name(dtype)}{words}", functools.partial(_changed, make, dtype, change)
        yield f"{name}, compiled", functools.partial(_changed, make, torch.float32, _compiled)


def _changed(make: Make, dtype: torch.dtype, change: Callable[[Callable], Callable]) -> Pair:
    pair = make(dtype)
    both = change is _eval
    return Pair(change(pair.candidate), change(pair.reference) if both else pair.reference, pair.inputs)


def _eval(call: Callable) -> Callable:
    return call.eval() if isinstance(call, nn.Module) else call


def _compiled(call: Callable) -> Callable:
    return torch.compile(call, dynamic=False)


class Wrapper(nn.Module):
    """Calls another module with whatever it is given."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *given: Any, **by_keyword: Any) -> Any:
        return self.module(*given, **by_keyword)


def _wrapped(call: Callable) -> Callable:
    """The same behind another function, as a training script has it."""
    return Wrapper(call) if isinstance(call, nn.Module) else call


CHANGES: dict[str, Callable[[Callable], Callable]] = {
    "": lambda call: call, ", in eval mode": _eval, ", wrapped": _wrapped}


def refusal(make: Callable[[], Pair], device: torch.device) -> str:
    """Why an honest module was refused; "" where it was not."""
    pair = make().to(device)
    try:
        run = compare({"honest": pair.candidate}, pair.inputs, pair.reference, rounds=ROUNDS).results["honest"]
    except Exception as error:
        return in_a_line(error)
    finally:
        torch._dynamo.reset()              # or code that many modules share is compiled no more, after so many times
    return "" if run.status == "ok" else f"{run.status}: {run.info['reason']}"


# ------------------------------------------------------------------------------------------------------ what it costs


def seconds_of_comparing(device: torch.device, times: int = 3) -> Mapping[bool, list[float]]:
    """Wall time of `compare` on two layers, with the defences and without them, in turn."""
    x, seconds = cheats.given(device), {True: list[float](), False: list[float]()}
    reference = cheats.Layer().to(device)
    modules = {"one": copy.deepcopy(reference), "two": copy.deepcopy(reference)}
    for number in range(times + 1):
        for defended in (True, False):
            began = time.perf_counter()
            run = compare(modules, (x,), reference, defended=defended).results["one"]
            assert run.best_ms(BOTH)
            if number:                     # the first ones have what is done once
                seconds[defended].append(time.perf_counter() - began)
    return seconds
