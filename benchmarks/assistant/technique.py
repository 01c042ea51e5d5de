"""What a technique is: where it applies in a program, what it does to a copy, and the code that a person writes."""
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.assistant.graph import Refusal, Region
from benchmarks.assistant.predicting import Basis, Freed, Prediction
from benchmarks.assistant.program import Program
from benchmarks.assistant.rewriting import Pass
from benchmarks.assistant.source import Place, imports_for
from common.block.evidence import Evidence


class NotWritten(Exception):
    """Why there is no code to write for what was found, in words."""


@dataclass(frozen=True)
class Found:
    """One place of a program where a technique applies, or why it does not."""
    place: Place | None                # None: the call of the model itself
    module: str                        # path of the modules there, "blocks.*.attn"; "" of the model itself
    count: int                         # times in one forward
    reason: str                        # what can be seen there
    why_not: str = ""                  # why it can't be applied there
    region: Region | None = None       # where it is in a graph: that, by its own type
    modules: tuple[str, ...] = ()      # that it is about, by their paths, where it is about some
    dtype: torch.dtype | None = None   # that it is about
    by_hand: str = ""                  # why no rung has it and no code is tried: a person does it
    library: str = ""                  # that does it, where several could
    is_partial: bool = False           # some of what the technique is about stays as it is

    @property
    def can_be_tried(self) -> bool:
        """Whether a rung can have it."""
        return not (self.why_not or self.by_hand)


@dataclass(frozen=True)
class Advice:
    """Code to write, in place of these lines; without a place, where the model is called."""
    code: str
    place: Place | None = None
    instead_of: str = ""               # other code, which this makes needless
    definitions: tuple[str, ...] = ()  # that its file needs behind its imports
    wraps: bool = False                # it wraps the model: what changes its modules comes before

    @property
    def imports(self) -> list[str]:
        """The lines that its file needs at the top, and does not have."""
        return imports_for("\n".join([self.code, *self.definitions]), self.place.file) if self.place else []

    @property
    def is_call(self) -> bool:
        """Whether it is how the model is called, each time."""
        return self.place is None and "output = " in self.code

    def pasted_into(self, text: str) -> str:
        """The text of a file with it, indented as the first of the lines that it replaces."""
        assert self.place is not None
        lines = text.split("\n")                         # not splitlines: a form feed ends no line of Python
        first, last = self.place.line - 1, max(self.place.line, self.place.last)
        indent = lines[first][:len(lines[first]) - len(lines[first].lstrip())]
        new = [indent + line if line else line for line in self.code.splitlines()]
        return "\n".join([*lines[:first], *new, *lines[last:]])


@dataclass
class Plan:
    """How a rung is made from the model: techniques write into it."""
    passes: list[Pass] = field(default_factory=list)                   # over every graph that Dynamo captures
    changes: list[Callable[[nn.Module], None]] = field(default_factory=list)      # to a copy of the model
    compiles: bool = False                                             # by Inductor
    matmul_precision: str | None = None                                # of FP32
    times_convolutions: bool | None = None                             # cuDNN tries its algorithms at a new shape
    autocast: torch.dtype | None = None                                # around every call
    returns_float32: bool = False                                      # an output in 16 bits is cast
    numerics: str | None = None                                        # what it then multiplies in, if that is less
    in_fp8: tuple[str, ...] = ()                                       # paths of the modules that multiply in FP8
    in_int8: tuple[str, ...] = ()                                      # and of those whose weights are in INT8
    found: Mapping[str, Sequence[Found]] = field(default_factory=dict)         # by the name of a technique

@dataclass(frozen=True)
class Technique:
    """One optimization."""
    name: str
    what: str                                                          # in a line
    launch: str = field(default="eager", kw_only=True)                 # "graph": it is no more than that
    find: Callable[[Program], Sequence[Found]]
    apply: Callable[[Plan], None] | None = None                        # None: a person must do it by hand
    advice: Callable[[Program, Found], Advice | None] = lambda program, found: None
    missing: Callable[[torch.device], str] = lambda device: ""         # why it can't run there
    fired: Callable[[Program, Evidence, Evidence], str] = lambda program, before, seen: ""     # why it did not, from
    # the kernels that ran without it and with it; "" where it did
    remark: Callable[[Program, Evidence, Evidence], str] = lambda program, before, seen: ""    # what else they show
    predict: Callable[[Basis, Sequence[Found]], Prediction | None] = lambda basis, found: None    # of all its places
    frees: Callable[[Program, Sequence[Found]], Freed | None] | None = None            # where they are no regions
    seen_alone: Callable[[Program], Sequence[tuple[str, str]]] = lambda program: ()    # (place, what running it shows)
    instead_of: str = ""                                               # another, needless where this does all of it
    for_16_bits: bool = False                                          # what is slower in FP32 may be faster there


def needless_beside(technique: Technique, found: Iterable[Found]) -> str:
    """The name of another technique, for which this one leaves nothing to do; "" where there is none."""
    return "" if any(each.is_partial for each in found) else technique.instead_of


def plan_of(techniques: Sequence[Technique], compiles: bool = False,
            found: Mapping[str, Sequence[Found]] | None = None) -> Plan:
    """What all of them write into one. `compiles`: the model came compiled; `found`: what each has found in it."""
    plan = Plan(compiles=compiles, found=found or {})
    for technique in techniques:
        assert technique.apply is not None
        technique.apply(plan)
    return plan


def found_at(region: Region, reason: str, why_not: str = "") -> Found:
    """What was found in a graph: at its lines, as often as the graph ran."""
    why_not = region.why if isinstance(region, Refusal) else why_not
    return Found(region.place, region.module, region.count, reason, why_not, region)


def unique(found: Iterable[Found]) -> list[Found]:
    """One for each place: Dynamo captures a function anew where its inputs differ."""
    merged: dict[tuple, Found] = {}
    for each in found:
        key = each.place, each.reason, each.why_not
        if key in merged:
            modules = dict.fromkeys([merged[key].module, each.module])
            each = dataclasses.replace(merged[key], count=merged[key].count + each.count, module=", ".join(modules))
        merged[key] = each
    return list(merged.values())
