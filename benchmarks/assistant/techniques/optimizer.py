"""An optimizer that launches several kernels for each of its operations: fused, it is one for many parameters.

A task names its optimizer: `Task(model, inputs, loss, optimizer)`.
"""
import functools
import inspect
import statistics
from typing import Any

import torch
from torch import Tensor

from benchmarks.assistant.program import Program
from benchmarks.assistant.side_by_side import WORTH_IT, milliseconds, pays
from benchmarks.assistant.technique import Found, Technique
from common.block.oracle import MODULE_GATES, relative_error
from common.runtime import rounds
from common.runtime.iteration import Iteration
from common.runtime.machine import memory_free
from common.runtime.timing import nothing
from common.text import figures

COPIES = 8                                 # of the parameters that two optimizers hold: values, gradients, two states
SHARE = 0.5                                # of the free memory that these may take
STEPS = 3                                  # after which both must have given the same


def find(program: Program) -> list[Found]:
    """The step of the task's optimizer, where it is not fused."""
    optimizer = program.optimizer
    if optimizer is None:
        return []
    name, tensors = type(optimizer).__name__, parameters_of(optimizer)
    reason = f"{name} of {len(tensors)} tensors"
    why_not = why_not_fused(optimizer)
    if why_not:
        return [Found(None, "", 1, reason, why_not)]
    if not gives_the_same(optimizer, tensors):
        return [Found(None, "", 1, reason, "fused, it gives other parameters here")]
    before, after = (works_of(optimizer, tensors, is_fused) for is_fused in (False, True))
    times = milliseconds(before, after, tensors[0].device)
    gain, (was, then) = rounds.paired_ratio(*times), map(statistics.median, times)
    fused = f"with fused=True it is {gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}] times as fast here"
    reason += f": a step takes {figures(was)} ms beside {figures(program.iteration_ms)} of the model; {fused}"
    whole = (program.iteration_ms + was) / (program.iteration_ms + then)
    return [Found(None, "", 1, reason, "" if pays(gain) and whole >= WORTH_IT else "it is not worth it")]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What it changes, as far as two more of its kind fit beside it: the ratio is theirs then."""
    every = [t for group in optimizer.param_groups for t in group["params"] if t.requires_grad]
    left = SHARE * memory_free(every[0].device) / COPIES if every else 0.0
    fitting = []
    for t in every:
        left -= t.nbytes
        if left < 0:
            break
        fitting.append(t)
    return fitting


def why_not_fused(optimizer: torch.optim.Optimizer) -> str:
    """Why there is no other form of it; "" where there is one."""
    if any(group.get("fused") for group in optimizer.param_groups):
        return "it is fused already"
    if not type(optimizer).__module__.startswith("torch.optim"):
        return "it is none of torch's"
    if "fused" not in inspect.signature(type(optimizer)).parameters:
        return "torch has no fused form of it"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable, which a fused one is not"
    return "" if parameters_of(optimizer) else "no two more of its kind fit into memory"


def gives_the_same(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> bool:
    """Whether fused it changes parameters by the same, to the rounding of their dtype."""
    results = []
    for is_fused in (False, True):
        work = works_of(optimizer, tensors, is_fused)
        for _ in range(STEPS):
            work.run()
            for t in work.reads:                           # of gradients that stay the same, no mean over steps shows
                assert t.grad is not None
                t.grad.mul_(-0.5)
        results.append([after - before for after, before in zip(work.reads, tensors, strict=True)])
    for one, other in zip(*results, strict=True):
        if relative_error(other.detach(), one.detach()) > MODULE_GATES[one.dtype][1]:
            return False
    return True


def works_of(optimizer: torch.optim.Optimizer, tensors: list[Tensor], is_fused: bool) -> Iteration:
    """A step of one like it, on copies with random gradients."""
    numbers = torch.Generator(tensors[0].device).manual_seed(0)
    copies = {id(t): t.detach().clone().requires_grad_() for t in tensors}
    for t in copies.values():
        t.grad = torch.randn(t.shape, generator=numbers, device=t.device).to(t.dtype)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = [copies[id(t)] for t in group["params"] if id(t) in copies]
        if own:
            groups.append({**group, "params": own, **form(group, is_fused)})
    make: Any = type(optimizer)
    made = make(groups)
    return Iteration(functools.partial(_step, made), nothing, list(copies.values()), {})


def form(group: dict[str, Any], is_fused: bool) -> dict[str, Any]:
    """What says so in a group of parameters."""
    return {"fused": True, "foreach": False} if is_fused else {"fused": group["fused"], "foreach": group["foreach"]}


def _step(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    optimizer.step()
    return []


TECHNIQUE = Technique("optimizer", "an optimizer's step -> fused=True", find)
