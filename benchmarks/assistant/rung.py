"""The model with some techniques applied, as the judge and the clock take it."""
import contextlib
import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from benchmarks.assistant.rewriting import rewritten
from benchmarks.assistant.technique import Plan, Technique


class Rung(nn.Module):
    """It is called as the model is, and has its parameters, under their names."""

    def __init__(self, model: nn.Module, techniques: Sequence[Technique]):
        super().__init__()
        self.techniques = tuple(techniques)
        self.plan = Plan()
        for technique in techniques:
            assert technique.apply is not None
            technique.apply(self.plan)
        self._over(_shared_copy(model) if self.plan.changes else model)

    def _over(self, model: nn.Module) -> None:
        self.module = model
        for change in self.plan.changes:
            change(model)
        call: Any = model
        if self.plan.passes or self.plan.compiles:
            call = rewritten(model, self.plan.passes, self.plan.compiles)
        vars(self)["run"] = call                               # no child: its parameters have one name each

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: Any = self.run
        with contextlib.ExitStack() as stack:
            for around in self.plan.around:
                stack.enter_context(around())
            return run(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "Rung":
        """A copy with tensors of its own. It is not compiled: it says what the rung means, not what a compiler does."""
        made = Rung.__new__(Rung)
        nn.Module.__init__(made)
        made.techniques, made.plan = self.techniques, copy.copy(self.plan)
        made.plan.compiles, made.plan.changes = False, []
        made._over(copy.deepcopy(self.module, memo))
        memo[id(self)] = made
        return made


def _shared_copy(model: nn.Module) -> nn.Module:
    """Other modules with the same parameters and buffers: ties, hooks and what is frozen stay."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in tensors})
