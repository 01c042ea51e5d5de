"""Is it the same function, and which is faster? Any modules against a reference: checked, then timed in shared rounds.

    from benchmarks.study import compare
    print(compare({"eager": norm, "compiled": torch.compile(norm)}, (x,), reference=norm))
"""
import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from common import evidence, graph, harness, oracle, parameters, report, timing

from . import command

# Relative L2 error against FP64 that an output may have, by the dtype of the inputs; a gradient, three times that.
GATES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Compared:
    """One module: what came of it, its errors against FP64 (what -> relative L2), its samples by (pass, launch)."""
    name: str
    module: Callable
    gate: float
    status: str = "ok"                   # or "failed", "skipped", "oom"
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)      # ms, one a round
    no_graph: dict[str, str] = field(default_factory=dict)                         # pass -> why there is no replay
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)               # pass -> name -> launches

    def gate_of(self, what: str) -> float:
        """Of the output, or of a gradient, which passes through more roundings."""
        return self.gate if what == "output" else 3 * self.gate

    def best(self, mode: str) -> str | None:
        """The faster way of launching; None where it was not timed."""
        timed = [(statistics.median(some), launch) for (one, launch), some in self.samples.items() if one == mode]
        return min(timed)[1] if timed else None

    def best_ms(self, mode: str) -> float | None:
        """The median of the faster way of launching, in ms."""
        launch = self.best(mode)
        return statistics.median(self.samples[mode, launch]) if launch else None

    def times(self, first: "Compared", mode: str) -> tuple[float, float, float] | None:
        """(ratio, low, high): the first's time over this one's, paired by round, with its 95 % bootstrap interval."""
        launches = first.best(mode), self.best(mode)
        if None in launches:
            return None
        return timing.paired_ratio(first.samples[mode, launches[0]], self.samples[mode, launches[1]])


@dataclass
class Comparison:
    """What `compare` found; printed, it is a table."""
    results: dict[str, Compared]

    def table(self, width: int | None = None) -> str:
        """Status, error, launches and ms of every module, and how many times faster than the first it is."""
        first, rows = next(iter(self.results.values())), []
        for one in self.results.values():
            row = [one.name, one.status, f"{one.errors['output']:.1e}" if "output" in one.errors else ""]
            for mode in report.MODES:
                ratio = one.times(first, mode)
                ms = one.best_ms(mode)
                row += [command.figures(ms) if ms else "n/a",
                        "{:.2f} [{:.2f}, {:.2f}]".format(*ratio) if ratio and one is not first else "",
                        str(sum(one.kernels[mode].values())) if mode in one.kernels else ""]
            rows.append(row)
        headers = ["module", "status", "error", *(word for mode in ("forward", "f+b") for word in
                                                  (f"{mode} ms", "x first [95 %]", "launches"))]
        said = [f"{one.name}: {one.status}: {one.reason}" for one in self.results.values() if one.status != "ok"]
        return "\n".join([command.table(rows, headers, width), *said])

    __str__ = table


def compare(modules: dict[str, Callable], inputs: tuple[Tensor, ...], reference: Callable, rounds: int = 20,
            gates: dict[str, float] | None = None, seed: int = 0, say: Callable[[str], None] = lambda what: None
            ) -> Comparison:
    """Check every module against `reference` in FP64, then time those that passed, forward and forward+backward.

    `modules` (name -> module or function) take `inputs`, tensors of any shape on one device, and return one tensor;
    floating inputs get gradients. `reference` is called on FP64 copies of the inputs, a module as an FP64 copy of
    itself; gradients of parameters are compared where both have one of that name. `gates` (name -> relative L2 error)
    replaces what `GATES` has for the dtype of the inputs. On a GPU each is timed eager and as a captured graph. Where a
    module fails or does not fit, that is its status. Raises ValueError where modules or inputs can't be compared.
    """
    device = _device(modules, inputs)
    dtype = next((t.dtype for t in inputs if t.is_floating_point()), torch.float32)
    if dtype not in GATES:
        raise ValueError(f"inputs in {dtype}: give float64, float32, float16 or bfloat16")
    results = {name: Compared(name, module, (gates or {}).get(name, GATES[dtype])) for name, module in modules.items()}
    truth, dy = _truth(reference, inputs, seed)
    for one in results.values():
        say(f"checking {one.name}")
        with harness.judged(one, lambda: "it does not fit beside the inputs"):
            _check(one, inputs, truth, dy)
    for mode in report.MODES:
        _time(results, inputs, dy, mode, device, rounds, seed, say)
    return Comparison(results)


def _device(modules: dict, inputs: tuple) -> torch.device:
    if not modules:
        raise ValueError("no modules: give at least one, name -> module")
    if not inputs or not all(isinstance(t, Tensor) for t in inputs):
        raise ValueError("inputs: give a tuple of tensors")
    devices = {t.device for t in inputs}
    devices |= {p.device for m in modules.values() if isinstance(m, nn.Module) for p in m.parameters()}
    if len(devices) > 1:
        raise ValueError(f"modules and inputs are on {', '.join(sorted(map(str, devices)))}: move them to one device")
    return devices.pop()


def _truth(reference: Callable, inputs: tuple[Tensor, ...], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """(what -> FP64 tensor, the cotangent in FP64)."""
    if isinstance(reference, nn.Module):
        reference = copy.deepcopy(reference).double()
    leaves = _leaves([t.double() if t.is_floating_point() else t for t in inputs])
    y = reference(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.device)
    return _gradients(reference, leaves, y, dy), dy


def _leaves(inputs) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]


def _gradients(module: Callable, leaves: list[Tensor], y: Tensor, dy: Tensor) -> dict[str, Tensor | None]:
    """Output and gradients by name; the parameters' are cleared again."""
    y.backward(dy)
    found = {"output": y.detach()}
    found |= {f"gradient of input {n}": leaf.grad for n, leaf in enumerate(leaves) if leaf.requires_grad}
    own = {}
    if hasattr(module, "parameter_names"):                           # step 4's block
        own = parameters.named(module)
    elif isinstance(module, nn.Module):
        own = {name.removeprefix("_orig_mod."): parameter for name, parameter in module.named_parameters()}
    for name, parameter in own.items():
        found[f"gradient of {name}"] = parameter.grad
        parameter.grad = None
    return found


def _check(one: Compared, inputs: tuple[Tensor, ...], truth: dict[str, Tensor], dy: Tensor) -> None:
    """Fill in the errors; raises harness.Failed where one is over its gate."""
    leaves = _leaves(inputs)
    y = one.module(*leaves)
    if not isinstance(y, Tensor) or y.shape != truth["output"].shape:
        raise harness.Failed(f"it returns {tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__}, "
                             f"the reference a tensor {tuple(truth['output'].shape)}")
    found = _gradients(one.module, leaves, y, dy.to(y.dtype))
    one.errors = {what: oracle.relative_error(found[what], truth[what]) for what in truth if what in found}
    with torch.no_grad():                                            # as the forward is timed
        alone = oracle.relative_error(one.module(*_leaves(inputs)), truth["output"])
    one.errors["output"] = max(one.errors["output"], alone)
    for what, error in one.errors.items():
        gate = one.gate_of(what)
        if not math.isfinite(error):
            raise harness.Failed(f"the {what} is missing or not finite")
        if error > gate:
            raise harness.Failed(f"the {what} is off by {error:.1e} against FP64, the gate is {gate:.1e}")


def _time(results: dict[str, Compared], inputs: tuple[Tensor, ...], dy: Tensor, mode: str, device: torch.device,
          rounds: int, seed: int, say: Callable[[str], None]) -> None:
    runs, between = {}, {}
    for name, one in results.items():
        if one.status != "ok":
            continue
        say(f"warming up {name}, {mode}")
        with harness.judged(one, lambda: "it does not fit beside the others"):
            iteration, clear, leaves, own = _iteration(one.module, inputs, dy, mode == "forward+backward")
            for _ in range(3):
                clear()
                iteration()
            one.kernels[mode] = dict(evidence.observe(lambda i=iteration, c=clear: (c(), i()), device))
            runs[name, "eager"], between[name, "eager"] = iteration, clear
            if device.type == "cuda" and (replay := _captured(one, mode, iteration, clear, leaves, own)):
                runs[name, "graph"] = replay
        if one.status != "ok":
            runs = {where: call for where, call in runs.items() if where[0] != name}
    say(f"sampling {mode}")
    clock, timed = timing.clock_for(device), [one for one in results.values() if one.status == "ok"]
    try:
        with harness.compiled_for_good(*(one.module for one in timed)):
            timing.interleaved(runs, clock, 2, between, seed)
            taken = timing.interleaved(runs, clock, rounds, between, seed)
    except harness.Failed as error:                           # time the others without those that may be compiled again
        for one in timed:
            if harness.holds_compiled(one.module):
                one.status, one.reason = "failed", str(error)
        return _time(results, inputs, dy, mode, device, rounds, seed, say)
    for (name, launch), some in taken.items():
        results[name].samples[mode, launch] = some
        between[name, "eager"]()                              # leave no gradients behind


def _iteration(module: Callable, inputs: tuple[Tensor, ...], dy: Tensor, backward: bool):
    """(one iteration, what clears its gradients, the tensors it is called on and then those that get gradients)."""
    if not backward:
        leaves = [t.detach().clone() for t in inputs]

        def forward():
            with torch.no_grad():
                return module(*leaves)
        return forward, timing.nothing, leaves, []
    leaves = _leaves(inputs)
    own = [*leaves, *(module.parameters() if isinstance(module, nn.Module) else ())]
    cotangent: list[Tensor] = []

    def forward_backward():
        y = module(*leaves)
        if not cotangent:
            cotangent.append(dy.to(y.dtype))
        y.backward(cotangent[0])
        return y.detach()

    def clear():
        for tensor in own:
            tensor.grad = None
    return forward_backward, clear, leaves, own


def _captured(one: Compared, mode: str, iteration: Callable, clear: Callable, leaves: list[Tensor], own: list[Tensor]
              ) -> Callable | None:
    """The iteration as a CUDA graph that gives what an eager call gives on changed inputs; None with the reason."""
    static, kept = {}, [t.detach().clone() for t in leaves]
    try:
        replay = graph.capture(lambda: static.update(y=iteration()), clear)
        for tensor in leaves:
            if tensor.is_floating_point():
                tensor.detach().normal_()
        found = []
        for call in (replay, iteration):
            torch.cuda.manual_seed(0)                     # the same dropout mask, should there be dropout
            y = call()
            y = static["y"] if call is replay else y
            found.append([t.double() for t in (y, *(tensor.grad for tensor in own if tensor.grad is not None))])
            clear()
        if any(oracle.relative_error(a, b) > one.gate_of("gradient") for a, b in zip(*found, strict=True)):
            raise RuntimeError("its replay on changed inputs differs from an eager run")
        return replay
    except torch.OutOfMemoryError:
        one.no_graph[mode] = "out of memory"
    except (RuntimeError, ValueError) as error:
        one.no_graph[mode] = str(error).splitlines()[0]
        torch.cuda.synchronize()
    finally:
        for tensor, value in zip(leaves, kept, strict=True):
            tensor.detach().copy_(value)
    return None
