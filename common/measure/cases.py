"""What a study names: its cases, and which of them are timed side by side."""
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..block import block_work, memory
from ..block.config import BlockConfig
from ..block.steps import Step
from ..block.traits import Traits, amp_default
from ..block.workload import Workload
from ..report.record import Record
from ..report.result import Result
from ..runtime import timing
from ..runtime.iteration import MODES
from .subject import Build, Subject, prepare


@dataclass(frozen=True)
class Setting:
    """Where and how a case is built: the session's."""
    device: torch.device
    seed: int
    say: Callable[..., None]               # gets the phase, and what of it
    time_compiler: bool                    # nothing has been compiled yet: the first block is timed cold


@dataclass(frozen=True)
class Case:
    """One row of a study: what it is called, what it does, how it is built and checked."""
    name: str
    prepare: Callable[[Setting, Result], Subject]          # raises Failed, or NotImplementedError with the reason
    config: BlockConfig | None = None      # None: it is no part of the block
    traits: Traits = field(default_factory=Traits)
    parameter_dtype: torch.dtype = torch.float32
    variant: Mapping[str, Any] = field(default_factory=dict)    # what tells it from other cases of its name
    work: Mapping[str, str] = field(default_factory=dict)       # input -> dtype and shape, where it is no block
    step: int | None = None                # the step's number, where it is one of the five
    missing: str = ""                      # why it can't run on this machine, where that is known beforehand
    workload: Workload | None = None       # where it is known beforehand
    that_fits: Callable[[int], str] = lambda total: "give smaller inputs"      # into so many bytes, in words
    metered: Collection[str] = ()          # ways of launching that are metered, too, where its group is

    @property
    def bytes_needed(self) -> int:
        """Estimated on the high side; 0 where nothing is known."""
        return self.workload.bytes_needed if self.workload else 0


def block_case(name: str, build: Build, config: BlockConfig, traits: Traits, device: torch.device, *,
               parameter_dtype: torch.dtype = torch.float32, variant: Mapping[str, Any] | None = None,
               step: int | None = None, missing: str = "") -> Case:
    """A case whose block has the canonical parameters; it is checked against FP64 as a step is."""
    def prepare_block(setting: Setting, result: Result) -> Subject:
        return prepare(build, parameter_dtype, setting.device, setting.seed, result, setting.say,
                       setting.time_compiler)

    workload = block_work.workload(config, traits, parameter_dtype, device)
    return Case(name, prepare_block, config, traits, parameter_dtype, variant or {}, step=step, missing=missing,
                workload=workload, that_fits=functools.partial(memory.that_fits, config, traits, device))


def step_case(step: Step, config: BlockConfig, device: torch.device, *, missing: str = "",
              parameter_dtype: torch.dtype = torch.float32, build: Build | None = None) -> Case:
    """A step as its script runs it. On a CPU without 16-bit matmuls FP8 is emulated all the same, in FP32."""
    if step.traits.fp8 and not missing:
        if config.amp_dtype is None and device.type == "cpu":
            config = config.replace(amp_dtype=amp_default(device, step.traits)[0])
        try:
            config.check_fp8()
        except ValueError as error:
            missing = str(error)
    return block_case(step.name, build or step.build, config, step.traits, device, parameter_dtype=parameter_dtype,
                      step=step.number, missing=missing)


@dataclass(frozen=True)
class Group:
    """Cases that are timed in the same rounds, and how."""
    cases: Sequence[Case]
    modes: Sequence[str] = MODES
    launches: Sequence[str] | None = None  # ways of launching in rounds; None: those of the session
    profiled: int = 0                      # the first so many rounds have iterations under the profiler
    calibrated: bool = True                # a matmul and a copy take part in the rounds
    metered: bool = False                  # joules of an iteration, by the faster way of launching
    limited: bool = True                   # held against the limits of this machine
    sustained: bool = False                # limits by what the machine sustains too; all cases are then of one shape
    watched: bool = True                   # peak memory and the host's time to launch are measured, too
    times_emulation: bool = False          # though that means nothing: who shows it says so
    may_not_fit: bool = False              # memory that runs out in the rounds ends these cases, not the study
    clock: Callable[[torch.device], timing.Clock] = timing.clock_for
    timed: Callable[[list[tuple[Result, Subject]], str], list[Record]] = lambda timed, mode: []      # what it adds
