"""The model with some techniques applied, as the judge and the clock take it."""
import contextlib
import copy
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.assistant.branches import around_what_cannot_be_captured, as_uncompiled
from benchmarks.assistant.program import Program, as_written
from benchmarks.assistant.rewriting import rewritten
from benchmarks.assistant.source import innermost
from benchmarks.assistant.switches import held
from benchmarks.assistant.technique import Found, Technique, plan_of
from benchmarks.measure.copying import shared_copy
from benchmarks.measure.keeping import kept
from common.outcome import in_a_line, is_out_of_memory
from common.runtime import compiler


class Rung(nn.Module):
    """It is called as the model is, and has its parameters, under their names.

    A model that came compiled is compiled in every rung; one that is compiled in part, where its graphs are rewritten.
    `found` is what each technique has found in it, by its name; `dynamic` goes to torch.compile.
    """

    def __init__(self, model: nn.Module, techniques: Sequence[Technique], device: torch.device | None = None,
                 found: Mapping[str, Sequence[Found]] | None = None, dynamic: bool | None = False):
        super().__init__()
        self.techniques, self.dynamic = tuple(techniques), dynamic
        self.device = device or next((t.device for t in model.parameters()), torch.device("cpu"))
        self.plan = plan_of(techniques, compiler.is_compiled(model), found)
        if self.plan.passes and compiler.holds_compiled(model):        # Dynamo takes the compiled parts as written
            self.plan.compiles = True
        model = as_written(model)
        self._over(shared_copy(model) if self.plan.changes else model)

    def _over(self, model: nn.Module) -> None:
        self.module = model
        for change in self.plan.changes:
            change(model)
        call: Any = model
        if self.plan.passes or self.plan.compiles:
            call = rewritten(model, self.plan.passes, self.plan.compiles, self.dynamic)
        vars(self)["run"] = call                               # no child: its parameters have one name each
        settings = self.plan.matmul_precision, self.plan.times_convolutions
        vars(self)["in_its_settings"] = held(settings, _as_it_is)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: Any = vars(self)["in_its_settings"]
        dtype = self.plan.autocast
        is_eager = bool(self.plan.passes and not self.plan.compiles)
        with (torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext(),
              as_uncompiled() if is_eager else contextlib.nullcontext()):
            output = self._captured_in_parts(run, *args, **kwargs) if is_eager else run(self, *args, **kwargs)
        return _in_float32(output) if self.plan.returns_float32 else output

    def _captured_in_parts(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """A call whose graphs are edited, and run eagerly; what Dynamo can't capture runs as it is.

        Dynamo remembers which functions it can't capture, so a timed call raises nothing.
        """
        try:
            return run(self, *args, **kwargs)
        except torch._dynamo.exc.TorchRuntimeError:
            with around_what_cannot_be_captured():
                return run(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "Rung":
        """A copy with tensors of its own. It is not compiled: it says what the rung means, not what a compiler does."""
        made = Rung.__new__(Rung)
        nn.Module.__init__(made)
        made.device, made.techniques, made.plan = self.device, self.techniques, copy.copy(self.plan)
        made.dynamic = self.dynamic
        made.plan.compiles, made.plan.changes = False, []
        made._over(copy.deepcopy(self.module, memo))
        memo[id(self)] = made
        return made


def _as_it_is(rung: Rung, *args: Any, **kwargs: Any) -> Any:
    return rung.run(*args, **kwargs)                           # type: ignore[operator]


def _in_float32(output: Any) -> Any:
    """An output tensor in 16 bits as FP32; any other output as it is."""
    is_cast = isinstance(output, Tensor) and output.dtype in (torch.float16, torch.bfloat16)
    return output.float() if is_cast else output


def why_it_raises(program: Program, technique: Technique) -> str:
    """What the model raises with a technique, and at which line; "" where its forward runs.

    That is nobody's fault here: a view of what is laid out otherwise then, or two dtypes in one operator.
    """
    try:
        with kept(program.model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            program.inputs.copies().call(Rung(program.model, [technique]))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        place = innermost("".join(traceback.format_tb(error.__traceback__)))
        return f"{place.name if place else 'the model'} can't run so: {in_a_line(error)}"
    return ""
