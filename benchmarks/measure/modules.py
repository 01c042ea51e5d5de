"""Is it the same function, and which is faster? Any modules against a reference: checked, then timed in shared rounds.

    from benchmarks.study import compare
    print(compare({"eager": norm, "compiled": torch.compile(norm)}, (x,), reference=norm))
"""
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.measure.cases import Case, Group, Setting
from benchmarks.measure.session import Session
from benchmarks.records.read import Run, paired, runs
from common import oracle, parameters
from common.command_line import hush
from common.iteration import MODES
from common.outcome import Failed
from common.result import Result
from common.subject import Subject, require
from common.text import figures, number, ratio, table


@dataclass(frozen=True)
class Truth:
    """What a reference gives in FP64: its output, every gradient by name, and the cotangent they belong to."""
    tensors: dict[str, Tensor]
    dy: Tensor


def truth_of(reference: Callable, inputs: Sequence[Tensor], seed: int) -> Truth:
    """Call the reference on FP64 copies of the inputs, a module as an FP64 copy of itself."""
    if isinstance(reference, nn.Module):
        reference = copy.deepcopy(reference).double()
    leaves = leaves_of([t.double() if t.is_floating_point() else t for t in inputs])
    y = reference(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.device)
    tensors = _output_and_gradients(reference, leaves, y, dy)
    return Truth({what: tensor for what, tensor in tensors.items() if tensor is not None}, dy)


def leaves_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the inputs, of which the floating ones take gradients."""
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]


def named_parameters(module: Callable) -> dict[str, Tensor]:
    """Name -> parameter; of a block with names of its own the canonical ones, of a compiled module those it had."""
    if hasattr(module, "parameter_names"):                           # step 4's block
        return dict(parameters.named(module))                        # type: ignore[arg-type]
    if isinstance(module, nn.Module):
        return {name.removeprefix("_orig_mod."): parameter for name, parameter in module.named_parameters()}
    return {}


def _output_and_gradients(module: Callable, leaves: Sequence[Tensor], y: Tensor, dy: Tensor
                          ) -> dict[str, Tensor | None]:
    """Run the backward; output and gradients by name. The parameters' are cleared again."""
    y.backward(dy)
    tensors: dict[str, Tensor | None] = {"output": y.detach()}
    for place, leaf in enumerate(leaves):
        if leaf.requires_grad:
            tensors[f"gradient of input {place}"] = leaf.grad
    for name, parameter in named_parameters(module).items():
        tensors[f"gradient of {name}"] = parameter.grad
        parameter.grad = None
    return tensors


def check(module: Callable, inputs: Sequence[Tensor], truth: Truth, gate: float, result: Result) -> torch.dtype:
    """Record the errors of output and gradients; raise Failed where one is over its gate. The dtype of the output.

    `gate` is of the output; a gradient passes through more roundings, and may have three times as much.
    """
    leaves = leaves_of(inputs)
    expected = tuple(truth.tensors["output"].shape)
    y = module(*leaves)
    if not isinstance(y, Tensor) or y.shape != expected:
        given = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise Failed(f"it returns {given}, the reference a tensor {expected}")
    tensors = _output_and_gradients(module, leaves, y, truth.dy.to(y.dtype))
    with torch.no_grad():                                            # as the forward is timed
        without_gradients = oracle.relative_error(module(*leaves_of(inputs)), truth.tensors["output"])
    for what, exact in truth.tensors.items():
        if what in tensors:
            error = oracle.relative_error(tensors[what], exact)
            if what == "output":
                error = max(error, without_gradients)
            result.errors[what] = error, gate if what == "output" else 3 * gate
    for what, (error, its_gate) in result.errors.items():
        require(what, error, its_gate)
    return y.dtype


def checked_subject(module: Callable, inputs: Sequence[Tensor], truth: Truth, gate: float, result: Result,
                    subject: Callable[..., Subject] = Subject) -> Subject:
    """What is timed of a module that passed `check`: it, on copies of `inputs`. `subject` makes it, a class of them."""
    y_dtype = check(module, inputs, truth, gate, result)
    leaves = [t.detach().clone() for t in inputs]
    return subject(module, leaves, [truth.dy.to(y_dtype)], named_parameters(module), (3 * gate, 3 * gate))


@dataclass
class Comparison:
    """What `compare` found, a run of records for each module; printed, it is a table."""
    results: dict[str, Run]

    def table(self, width: int | None = None) -> str:
        """Status, error, launches and ms of every module, and how many times faster than the first it is."""
        headers = ["module", "status", "error"]
        for mode in ("forward", "f+b"):
            headers += [f"{mode} ms", "x first [95 %]", "launches"]
        first = next(iter(self.results.values()))
        rows, said = [], []
        for name, run in self.results.items():
            row = [name, run.status, number(run.value("check", "output error"), ".1e")]
            for mode in MODES:
                times, launches = paired(first, run, mode), run.value(mode, "launches")
                row += [figures(run.best_ms(mode) or 0.0) if run.best(mode) else "n/a",
                        ratio(times) if times and run is not first else "", number(launches, ".0f")]
            rows.append(row)
            if run.status != "ok":
                said.append(f"{name}: {run.status}: {run.info['reason']}")
        return "\n".join([table(rows, headers, width), *said])

    __str__ = table


def compare(modules: dict[str, Callable], inputs: tuple[Tensor, ...], reference: Callable, rounds: int = 20,
            gates: dict[str, float] | None = None, seed: int = 0) -> Comparison:
    """Check every module against `reference` in FP64, then time those that passed, forward and forward+backward.

    `modules` (name -> module or function) take `inputs`, tensors of any shape on one device, and return one tensor;
    floating inputs get gradients. `reference` is called on FP64 copies of the inputs, a module as an FP64 copy of
    itself; gradients of parameters are compared where both have one of that name. `gates` (name -> relative L2 error)
    replaces what `oracle.MODULE_GATES` has for the dtype of the inputs. On a GPU each is timed eager and as a captured
    graph. Where a module fails or does not fit, that is its status. Raises ValueError where modules or inputs can't be
    compared.
    """
    hush()
    device = _device(modules, inputs)
    dtype = next((t.dtype for t in inputs if t.is_floating_point()), torch.float32)
    if dtype not in oracle.MODULE_GATES:
        raise ValueError(f"inputs in {dtype}: give float64, float32, float16 or bfloat16")
    truth = truth_of(reference, inputs, seed)

    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say("checking")
        gate = (gates or {}).get(result.name, oracle.MODULE_GATES[dtype])
        return checked_subject(modules[result.name], inputs, truth, gate, result)

    cases = [Case(name, prepare, parameter_dtype=dtype) for name in modules]
    session = Session("compare", device, rounds, seed)
    session.measure(Group(cases, calibrated=False, watched=False))
    session.progress.finish()
    return Comparison({run.case["name"]: run for run in runs(session.lines)})


def _device(modules: dict[str, Callable], inputs: tuple[Tensor, ...]) -> torch.device:
    """The one device of all. Raises ValueError."""
    if not modules:
        raise ValueError("no modules: give at least one, name -> module")
    if not inputs or not all(isinstance(t, Tensor) for t in inputs):
        raise ValueError("inputs: give a tuple of tensors")
    devices = {t.device for t in inputs}
    for module in modules.values():
        if isinstance(module, nn.Module):
            devices |= {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(f"modules and inputs are on {', '.join(sorted(map(str, devices)))}: move them to one device")
    return devices.pop()
