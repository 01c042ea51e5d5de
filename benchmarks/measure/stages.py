"""What happens between a call and its kernel, stage by stage, for one function: what each made, and how long it took.

    from benchmarks.measure.stages import stages
    print(stages(function, x).dynamo)
"""
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import compilation_time_metrics
from torch._inductor.utils import run_and_get_code

# Torch's own clocks, each inside of the one before. Older versions have another name for the first.
WHOLE = ("_compile.compile_inner", "entire_frame_compile")
BEHIND_DYNAMO, BEHIND_AUTOGRAD = "OutputGraph.call_user_compiler", "compile_fx_inner"
COMPILERS = ("compile_file", "async_compile.wait")
_KERNEL = re.compile(r"async_compile\.(?:triton|cpp\w*)\(.*?r?'''\n?(.*?)'''", re.DOTALL)


@dataclass
class Stages:
    """What each stage made of a function, as text."""
    dynamo: str                                        # the graph of torch operations
    forward: str                                       # of ATen operations, by AOTAutograd
    backward: str                                      # "" where no input takes a gradient
    kernels: list[str]                                 # by Inductor: C++ on a CPU, Triton on a GPU
    seconds: dict[str, float] = field(default_factory=dict)            # stage -> of the first call
    later_s: float = 0.0                               # of a call afterwards


def stages(function: Callable, *inputs: Any) -> Stages:
    """Compile a function three times, up to another stage each time. It returns one tensor."""
    dynamo: list[str] = []
    forward: list[str] = []
    backward: list[str] = []
    _fresh(function, _keeping(dynamo))(*inputs)
    both = aot_autograd(fw_compiler=_keeping(forward, boxed=True), bw_compiler=_keeping(backward, boxed=True))
    y = _fresh(function, both)(*inputs)
    if y.requires_grad:
        y.sum().backward()
    torch._dynamo.reset()
    compiled = torch.compile(function)
    before = _clocks()
    began = time.perf_counter()
    _, code = run_and_get_code(compiled, *inputs)
    first_s = time.perf_counter() - began
    after = _clocks()
    seconds = _by_stage(first_s, {name: after[name] - before.get(name, 0.0) for name in after})
    began = time.perf_counter()
    compiled(*inputs)
    later_s = time.perf_counter() - began
    kernels = [kernel.strip() for text in code for kernel in _KERNEL.findall(text)]
    return Stages("\n".join(dynamo), "\n".join(forward), "\n".join(backward), kernels, seconds, later_s)


def _fresh(function: Callable, backend: Any) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend)


def _keeping(texts: list[str], boxed: bool = False) -> Callable:
    """A backend that writes the graph down, and runs it as it is. `boxed`: it gets its inputs as a list."""
    def backend(module: fx.GraphModule, inputs: Any) -> Callable:
        texts.append(readable(module))
        return make_boxed_func(module.forward) if boxed else module.forward
    return backend


def readable(module: fx.GraphModule) -> str:
    """Its code with shapes and dtypes, without comments and blank lines."""
    lines = module.print_readable(print_output=False).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.strip().startswith("#"))


def _clocks() -> dict[str, float]:
    return {name: sum(taken) for name, taken in compilation_time_metrics.items()}


def _by_stage(first_s: float, clocks: dict[str, float]) -> dict[str, float]:
    """Seconds by stage; each clock holds those behind it."""
    whole = next((clocks[name] for name in WHOLE if name in clocks), 0.0)
    behind_dynamo, inductor = clocks.get(BEHIND_DYNAMO, 0.0), clocks.get(BEHIND_AUTOGRAD, 0.0)
    compiler = sum(clocks.get(name, 0.0) for name in COMPILERS)
    return {"Dynamo": whole - behind_dynamo, "AOTAutograd": behind_dynamo - inductor, "Inductor": inductor - compiler,
            "the kernels' compiler": compiler, "the rest": first_s - whole}
