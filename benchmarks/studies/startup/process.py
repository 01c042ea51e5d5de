"""One process of `startup`: it makes what is kept, or it starts from that and takes the time of its first result."""
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.startup.keeping import COLD, NONE, OF_A_CACHE, check_note, made_for, note, ways
from benchmarks.studies.startup.stack import Call, InItsPrecision, Stack, compiled, errors, gates, kind_of, sample
from common import signals
from common.block.config import BlockConfig
from common.outcome import Failed, Outcome, judged
from common.runtime.iteration import BOTH, FORWARD

COUNTED = {"graphs": ("stats", "unique_graphs"), "hits": ("inductor", "fxgraph_cache_hit"),
           "misses": ("inductor", "fxgraph_cache_miss"), "autograd hits": ("aot_autograd", "autograd_cache_hit"),
           "autograd bypasses": ("aot_autograd", "autograd_cache_bypass")}
WORK, ANSWER, ERRORS = "work.json", "answer.json", "errors.txt"


@dataclass(frozen=True)
class Work:
    """What one process does."""
    way: str
    form: str                              # "whole", or "by layer"
    mode: str
    layers: int
    config: BlockConfig
    device: str
    seed: int
    folder: str                            # where that lies which is kept
    makes: bool = False                    # it makes that, and times nothing

    def written(self) -> str:
        """As JSON."""
        fields = dataclasses.asdict(self)
        fields["config"]["amp_dtype"] = str(self.config.amp_dtype).removeprefix("torch.")
        return json.dumps(fields)

    @classmethod
    def read(cls, text: str) -> "Work":
        """From JSON."""
        fields = json.loads(text)
        dtype = fields["config"]["amp_dtype"]
        fields["config"]["amp_dtype"] = None if dtype == "None" else getattr(torch, dtype)
        return cls(**fields | {"config": BlockConfig(**fields["config"])})


@dataclass
class Answer:
    """What became of it."""
    status: str = "ok"
    reason: str = ""
    seconds: float | None = None                       # until the first result, or until that was made which is kept
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)       # what -> (error, gate)
    counted: dict[str, int] = field(default_factory=dict)


def main(folder: Path, cache: Path) -> None:
    """Do the work of a file in that folder, with that folder of caches, and write the answer and what goes wrong there.
    """
    signals.end_in_order()
    with open(folder / ERRORS, "w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    answer = done(Work.read((folder / WORK).read_text()))
    (folder / ANSWER).write_text(json.dumps(dataclasses.asdict(answer)))


def done(work: Work) -> Answer:
    """The answer; what went wrong is its status and reason."""
    answer = Answer()
    outcome: Outcome = answer
    with judged(outcome, lambda error: "out of memory: give a smaller shape", foreign=True):
        _do(work, answer)
    return answer


def _do(work: Work, answer: Answer) -> None:
    device = torch.device(work.device)
    stack = Stack(work.config, work.layers, work.seed, device)
    x, dy = sample(work.config, work.seed, device)
    with _grad(work.mode):
        (x @ x.mT).sum()                                # the device and its libraries are there before anybody compiles
        facts = made_for(stack, x, work.mode == BOTH)
        if work.makes:
            answer.seconds = _make(work, stack, x, dy, facts)
            return
        began = time.perf_counter()
        call = InItsPrecision(_call(work, stack, facts), work.config)
        y = _run(call, x, dy, work.mode)
        answer.seconds = time.perf_counter() - began
    counters = torch._dynamo.utils.counters            # not before: to import Dynamo is part of what compiling costs
    answer.counted = {name: counters[group][key] for name, (group, key) in COUNTED.items()}
    _check(work, stack, x, dy, y, answer)
    misses, hits = answer.counted["misses"], answer.counted["hits"]
    if work.way in OF_A_CACHE and (misses or not hits):
        raise Failed(f"what was kept did not serve: {misses} graphs were compiled anew, {hits} were found")
    if work.way == COLD and hits:
        raise Failed(f"the cache was not empty: {hits} graphs were found")


def _call(work: Work, stack: Stack, facts: dict[str, Any]) -> Call:
    if work.way == NONE:
        return stack.forward
    if work.way == COLD:
        return compiled(stack, work.form)
    folder = Path(work.folder)
    check_note(folder, facts)
    return ways()[work.way].start(folder, stack, work.form)


def _run(call: Call, x: Tensor, dy: Tensor, mode: str) -> Tensor:
    """One forward, or forward and backward, to its end."""
    if mode == BOTH:
        x.requires_grad_()
    y = call(x)
    if mode == BOTH:
        y.backward(dy)
    if x.is_cuda:
        torch.cuda.synchronize()
    return y


def _make(work: Work, stack: Stack, x: Tensor, dy: Tensor, facts: dict[str, Any]) -> float:
    """Seconds that it took. Of caches they are those of the first, cold call."""
    folder, kept = Path(work.folder), ways()[work.way]
    began = time.perf_counter()
    if work.way in OF_A_CACHE:
        _run(InItsPrecision(compiled(stack, work.form), work.config), x, dy, work.mode)

    def make(x: Tensor) -> Tensor:
        kept.make(folder, stack, work.form, x)
        return x
    if work.mode == BOTH:
        x = x.detach().requires_grad_()
    InItsPrecision(make, work.config)(x)
    note(folder, facts)
    return time.perf_counter() - began


def _check(work: Work, stack: Stack, x: Tensor, dy: Tensor, y: Tensor, answer: Answer) -> None:
    """The first result itself, against FP64. Raises Failed."""
    allowed = gates(kind_of(work.config, x.device), work.layers)
    answer.errors = {name: (error, allowed[name])
                     for name, error in errors(stack, x, dy, y, work.mode == BOTH).items()}
    for name, (error, gate) in answer.errors.items():
        if not error <= gate:
            raise Failed(f"the {name} is off by {error:.1e} against FP64, the gate is {gate:.1e}")


@contextlib.contextmanager
def _grad(mode: str) -> Iterator[None]:
    with torch.no_grad() if mode == FORWARD else contextlib.nullcontext():
        yield
