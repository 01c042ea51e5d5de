"""What a person brings: a model, what it is called with, and how its output becomes a loss."""
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.assistant.repeating import refuse_growing
from benchmarks.measure.calls import Inputs, named_buffers, named_parameters, outputs_of
from benchmarks.measure.judge import check_numerics
from benchmarks.measure.keeping import kept
from benchmarks.measure.observing import Loss, Work, same_values
from benchmarks.measure.state import State
from common.block.config import dtype_name
from common.outcome import Failed, UserError, in_a_line, is_out_of_memory

FORMS = "(model, inputs), (model, inputs, loss) or a Task"
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ByHand:
    """The same model as a person wrote it for speed: it takes the same inputs and returns the same outputs.

    It shares the model's parameters, or has copies under the same names. `numerics` is what it multiplies in, where
    that is less than its dtype: "tf32", "float16", "bfloat16", "float8" or "int8".
    """
    model: nn.Module
    numerics: str | None = None


@dataclass(frozen=True)
class Task:
    """A model and the work that it is measured on.

    `inputs` are a tuple (positional values) or a dict (values by keyword) that hold tensors; or a list of such, short,
    typical and long ones: all are judged and timed, the first on the ladder, too. `loss` maps what the model returns to
    a scalar tensor; without one, its outputs get random cotangents. `optimizer` is of the model's parameters: its step
    is timed. The fastest rung of the ladder is held against what is `by_hand`.
    """
    model: nn.Module
    inputs: Any
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    by_hand: ByHand | nn.Module | None = None
    has_constant_inputs: bool = False      # the model can't run on inputs that take a gradient
    needs_gradients: bool = False          # nor without gradients: it computes some itself

    @classmethod
    def of(cls, built: Any) -> "Task":
        """From what `build()` returned. Raises UserError where that is no task."""
        if isinstance(built, Task):
            task = built
        elif isinstance(built, tuple) and len(built) in (2, 3):
            task = cls(*built)
        else:
            raise UserError(f"build() returned a {type(built).__name__}: return {FORMS}")
        if isinstance(task.by_hand, nn.Module):
            task = replace(task, by_hand=ByHand(task.by_hand))
        task._check()
        return task

    def _check(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise UserError(f"the model is a {type(self.model).__name__}: give a torch.nn.Module")
        if self.loss is not None and not callable(self.loss):
            kind = type(self.loss).__name__
            raise UserError(f"the loss is a {kind}: give a function from the output to a scalar tensor")
        self._check_by_hand()
        for inputs in (self.given, *self.others.values()):
            if inputs.dtype not in (*FLOATING, None):
                raise UserError(f"inputs in {dtype_name(inputs.dtype)}: give float64, float32, float16 or bfloat16")
            for name, t in inputs.named().items():
                if t.layout != torch.strided:
                    raise UserError(f"{name} is of layout {t.layout}: give dense inputs, and that one as a buffer")
        if len(self.devices) > 1:
            devices = ", ".join(sorted(map(str, self.devices)))
            raise UserError(f"model and inputs are on {devices}: move them to one device")

    def _check_by_hand(self) -> None:
        version = self.by_hand
        if version is None:
            return
        if not isinstance(version, ByHand) or not isinstance(version.model, nn.Module):
            kind = type(version).__name__
            raise UserError(f"by_hand is a {kind}: give a torch.nn.Module, or ByHand(module, numerics)")
        try:
            check_numerics(version.numerics)
        except ValueError as error:
            raise UserError(f"by_hand: {error}") from None

    @property
    def version_by_hand(self) -> ByHand | None:
        """What `of` has made of it."""
        assert not isinstance(self.by_hand, nn.Module)
        return self.by_hand

    @property
    def given(self) -> Inputs:
        """The inputs that are timed. Raises UserError where they hold no tensor."""
        first = self.inputs[0] if isinstance(self.inputs, list) and self.inputs else self.inputs
        return self._inputs(first)

    @property
    def others(self) -> dict[str, Inputs]:
        """All but the first: "on input 2" -> the second of several. Raises UserError where one holds no tensor."""
        more = self.inputs[1:] if isinstance(self.inputs, list) else []
        return {f"on input {number}": self._inputs(inputs) for number, inputs in enumerate(more, 2)}

    @property
    def models(self) -> list[nn.Module]:
        """The model, and the version by hand."""
        return [self.model, *([self.version_by_hand.model] if self.version_by_hand else [])]

    @property
    def devices(self) -> set[torch.device]:
        given = [t for inputs in (self.given, *self.others.values()) for t in inputs.named().values()]
        held = [t for model in self.models for t in (named_parameters(model) | named_buffers(model)).values()]
        return {t.device for t in (*given, *held)}

    def check_calls(self) -> None:
        """Call it twice. Raises UserError where its outputs can't be compared, or it changes its inputs."""
        for inputs in (self.given, *self.others.values()):
            self._check_calls_with(inputs)

    def _check_calls_with(self, inputs: Inputs) -> None:
        shapes = []
        with kept(self.model), torch.no_grad():
            for _ in range(2):
                given, state = inputs.copies(), State(self.model)
                try:
                    outputs = outputs_of(given.call(self.model))
                except Failed as error:
                    raise UserError(str(error)) from None
                shapes.append({name: tuple(t.shape) for name, t in outputs.items()})
                _refuse_changed(inputs, given)
            leaves_state = state.has_changed()                 # the second call does: the first may fill a cache
        for name in {**shapes[0], **shapes[1]}:
            first, second = (shape.get(name) for shape in shapes)
            if first != second:
                raise UserError(f"the {name} is of shape {first}, and of {second} in the next call: no two can be "
                                "compared")
        if leaves_state:
            refuse_growing(self.model, inputs)

    def refuse_shapes_by_values(self) -> None:
        """Raises UserError where the shape of an output that takes a gradient depends on the values of the inputs: each
        timed call has others, and a gradient that is given has one shape. A loss has none.
        """
        if self.loss is not None:
            return
        try:
            with kept(self.model):
                shapes = [{name: tuple(t.shape) for name, t in outputs_of(given.copies().call(self.model)).items()
                           if t.requires_grad} for given in (self.given, self.given.rolled())]
        except Exception:                                      # others may be none that it takes
            return
        for name in shapes[0].keys() & shapes[1].keys():
            first, second = (shape[name] for shape in shapes)
            if first != second:
                raise UserError(f"the {name} is of shape {first}, and of {second} for other values of the inputs: give "
                                "a loss, which makes one number of it, or take --inference")

    def as_it_can_run(self) -> "Task":
        """The same, with constant inputs where the model runs on such alone: it may set requires_grad itself.

        Where it runs with gradients alone, as one that computes a derivative of its output does, it always has them.
        """
        task = self
        if self.given.dtype is not None and not self._can_run():           # whole numbers take none
            constant = replace(self, has_constant_inputs=True)
            task = constant if constant._can_run() else self
        with_gradients = replace(task, needs_gradients=True)
        return with_gradients if not task._can_run(False) and with_gradients._can_run(False) else task

    def _can_run(self, gradients: bool = True) -> bool:
        """Whether a forward does. What does not fit may do so elsewhere."""
        try:
            with kept(self.model), torch.set_grad_enabled(gradients):
                self.given.copies().call(self.model)
        except Exception as error:
            return is_out_of_memory(error)
        return True

    def work(self, cotangents: int, seed: int, forward_only: bool = False) -> Work:
        """What is run to judge and to time it."""
        return Work(self.given, self.loss, cotangents, seed, forward_only)

    def on(self, device: torch.device) -> "Task":
        """The same model, moved in place, and inputs there. Raises UserError where it can't be moved."""
        if {one.type for one in self.devices} == {device.type}:
            return self
        try:
            model = self.model.to(device)
            if self.version_by_hand:
                self.version_by_hand.model.to(device)
        except RuntimeError as error:
            raise UserError(f"the model can't be moved to {device}: {in_a_line(error)}") from None

        def moved(t: Tensor) -> Tensor:
            return t.to(device)
        inputs = pytree.tree_map_only(Tensor, moved, self.inputs)
        return replace(self, model=model, inputs=inputs)

    def _inputs(self, given: Any) -> Inputs:
        """One call's. Raises UserError where they hold no tensor."""
        try:
            return replace(Inputs.of(given), are_constant=self.has_constant_inputs,
                           need_gradients=self.needs_gradients)
        except ValueError as error:
            raise UserError(str(error)) from None


def _refuse_changed(before: Inputs, after: Inputs) -> None:
    """Raises UserError where a call left other inputs behind."""
    own = before.named()
    for name, tensor in after.named().items():
        if not same_values(tensor, own[name]):
            raise UserError(f"the model changes {name} in place: let it work on a copy, or each call begins elsewhere")


Build = Callable[[], Any]
