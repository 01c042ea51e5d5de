"""What is timed: a call on tensors that was built, calibrated and checked against FP64."""
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..block import block_work, oracle, parameters
from ..block.config import BlockConfig, dtype_name
from ..block.workload import Workload
from ..outcome import Failed
from ..phases import Phase
from ..report.result import Compilation, Result
from ..runtime import compiler, engine, iteration, replay, timing
from ..runtime.iteration import BOTH, FORWARD, Iteration

CALLS_TO_CALIBRATE = 3                     # forward+backwards, after which each scale of delayed scaling has moved
REPLAY_GATES = 1e-2, 1e-2                  # of an output, of a gradient: against the same call as it is usually made
Build = Callable[[BlockConfig, dict[str, Tensor], torch.device], nn.Module]


@dataclass
class Subject:
    """A call on `inputs` that was checked, with the cotangents of its outputs and the parameters behind it."""
    call: Callable
    inputs: Sequence[Tensor]
    cotangents: Sequence[Tensor]
    parameters: Mapping[str, Tensor]
    gates: tuple[float, float]                 # relative L2 error of a replay: of an output, of a gradient
    workload: Workload | None = None           # of one call; None: it has no limit
    constants: Sequence[int] = ()              # places of the inputs that take no gradient, beside whole numbers

    def iteration(self, mode: str) -> Iteration:
        """One iteration of a pass."""
        return self.iteration_on(self.inputs, mode)

    def iteration_on(self, inputs: Sequence[Tensor], mode: str) -> Iteration:
        """The same on other inputs."""
        return iteration.of_call(self.call, inputs, self.cotangents, self.parameters, mode, self.constants)

    def proof(self) -> replay.Proof:
        """What a replay of it must pass."""
        return replay.Proof(*self.gates)

    def replay(self, mode: str, captured: Callable[[], None] = lambda: None) -> tuple[Callable | None, str]:
        """(a call that replays an iteration, "") once that is proved; (None, why there is none) elsewhere."""
        return replay.verified(self.iteration(mode), self.proof(), captured=captured)

    def between_replays(self, mode: str, replayed: Callable) -> Callable[[], None]:
        """What is called before each replay, outside of the timed region."""
        return timing.nothing

    def forget_replay(self, mode: str) -> None:
        """Let go of the graph of that pass, where something of it is kept here."""

    def refused(self) -> str:
        """What its timed calls did that they must not, the last one too; "" where nothing."""
        return ""

    def has(self, mode: str) -> bool:
        """Whether it has that pass."""
        return True

    def calls(self, mode: str) -> int:
        """How many there are in one iteration; times are per call."""
        return 1

    @property
    def own_bytes(self) -> int:
        """Bytes of its parameters, inputs and cotangents."""
        return sum(t.nbytes for t in (*self.parameters.values(), *self.inputs, *self.cotangents))


@dataclass
class BlockSubject(Subject):
    """A block with the canonical parameters: x and dy are [B, S, E]."""
    config: BlockConfig = field(kw_only=True)

    def proof(self) -> replay.Proof:
        """A replay of it must follow other weights too, but where they are kept in FP8; the residual counts apart."""
        weights: list[Tensor] = []
        if self.config.fp8_weights == "per-call":
            weights = [parameter.detach() for parameter in self.parameters.values() if parameter.ndim == 2]
        state = functools.partial(engine.fp8_state, cast(nn.Module, self.call))
        return replay.Proof(*self.gates, weights=weights, residual=self.inputs[0], fp8_state=state)


def prepare(build: Build, parameter_dtype: torch.dtype, device: torch.device, seed: int, result: Result,
            say: Callable[..., None], time_compiler: bool = True) -> BlockSubject:
    """Build a block by `build(config, values, device)`, compile, calibrate and check it; fills `result` as it goes.

    `result` holds its config and traits. `say` gets the phase, and what of it. Call `compiler.use_private_caches`
    first; the compiler's time is cold for the first block of a process alone. A block whose y is not in the dtype of
    its parameters names it in `output_dtype`. Raises Failed where the check fails, NotImplementedError with the reason
    where this machine can't run it.
    """
    config, traits = result.config, result.traits
    assert config is not None
    workload = block_work.workload(config, traits, parameter_dtype, device)
    result.matmul = workload.matmul
    result.residual = dtype_name(traits.residual(config, parameter_dtype))
    say(Phase.BUILDING)
    seed *= 3                                    # parameters, x and dy have one each, and no other run has the same
    values = {name: value.to(parameter_dtype, copy=True)
              for name, value in _seeded(config.replace(amp_dtype=None), seed).items()}
    block = build(config, values, device)
    x = _random(config, seed + 1).to(device, parameter_dtype)
    dy = _random(config, seed + 2).to(device, parameter_dtype)
    dy = dy.to(getattr(block, "output_dtype", dy.dtype))
    runs_on = engine.of_block(block)
    result.engine, result.emulated = str(runs_on), runs_on.is_emulated
    result.libraries = engine.libraries_of(runs_on)
    if compiler.holds_compiled(block) and (missing := compiler.missing(device)):
        raise NotImplementedError(missing)
    subject = BlockSubject(block, [x], [dy], dict(block.named_parameters()), oracle.GATES[result.matmul], workload,
                           config=config)
    if compiler.is_compiled(block) and time_compiler:
        say(Phase.COMPILING, "cold and warm")
        result.compilation = compilation_time(subject)
    if traits.needs_calibration(config):
        say(Phase.CALIBRATING, "FP8 scales")
        calibrate(subject)
    say(Phase.CHECKING, "against FP64")
    check(block, x, values, result)
    return subject


def _random(config: BlockConfig, seed: int) -> Tensor:
    shape = (config.batch_size, config.seq_len, config.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@functools.lru_cache(maxsize=1)                # the same for all cases of a study, and 200 million of them take seconds
def _seeded(config: BlockConfig, seed: int) -> dict[str, Tensor]:
    return parameters.seeded(config, seed)


def on_a_copy(subject: Subject, mode: str) -> Iteration:
    """An iteration on another x: what it changes, or asks gradients of, is not the one that is timed."""
    copies = [t.detach().clone() for t in subject.inputs]
    return subject.iteration_on(copies, mode)


def calibrate(subject: BlockSubject) -> None:
    """Delayed scaling starts with every scale at 1. Raises Failed if one in use still is, some calls later."""
    block = cast(Any, subject.call)
    forward_backward = on_a_copy(subject, BOTH)
    for _ in range(CALLS_TO_CALIBRATE):
        forward_backward.between()
        try:
            forward_backward.run()
        except ValueError as error:            # Transformer Engine has no kernel for FP8 attention at this shape
            if not subject.config.fp8_attention:
                raise
            raise NotImplementedError(str(error).strip().splitlines()[0]) from None
    forward_backward.between()
    if getattr(block, "fresh", None) is not None:
        block.fresh = False                    # --fp8-weights cached: from here on, the weights of the last call
    check_scales(block)


def check_scales(block: nn.Module) -> None:
    """Raise Failed where a scale in use is still 1 after `CALLS_TO_CALIBRATE`, or where none is in use."""
    in_use = False
    for scale, amax_history in engine.fp8_state(block):
        used = amax_history.amax(0) > 0        # the entries that some tensor has gone through
        in_use = in_use or bool(used.any())
        if (scale[used] == 1).any():
            raise Failed(f"an FP8 scale is still 1 after {CALLS_TO_CALIBRATE} forward+backwards: delayed scaling is "
                         "not calibrated")
    if not in_use:
        raise Failed(f"no FP8 scale is in use after {CALLS_TO_CALIBRATE} forward+backwards: delayed scaling is not "
                     "calibrated")


def compilation_time(subject: Subject) -> Compilation:
    """The time of the first calls of both passes: cold, and once more in this process from the caches that filled.

    Call `compiler.use_private_caches` first: cold means that they are empty.
    """
    seconds: list[float] = []
    for _ in ("cold", "warm"):
        torch._dynamo.reset()
        began = time.perf_counter()
        for mode in (FORWARD, BOTH):
            first_call = on_a_copy(subject, mode)
            first_call.between()
            first_call.run()
            first_call.between()
        if subject.inputs[0].is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    cold, warm = seconds
    return Compilation(cold, warm)


def check(block: nn.Module, x: Tensor, values: dict[str, Tensor], result: Result) -> None:
    """Compare with FP64 and record the errors; raise Failed where one is over its gate. Dropout is off meanwhile."""
    training = block.training
    config = cast(BlockConfig, block.config)
    block.train(training and config.dropout == 0)
    one_sequence, whole_batch = oracle.checks(block, x, values)
    block.train(training)
    kind = result.matmul
    if result.emulated and kind == "float8":
        kind = "float8, emulated"
    worse = {}                                             # name -> (error, gate) of the run that is worse
    for name in one_sequence:
        first = one_sequence[name], oracle.gate(kind, name, x, tokens=x.size(1))
        second = whole_batch[name], oracle.gate(kind, name, x, tokens=x.size(0) * x.size(1))
        worse[name] = max(first, second, key=_share_of_the_gate)
    canonical = parameters.shapes(config)
    worst = max((name for name in worse if name in canonical), key=lambda name: _share_of_the_gate(worse[name]))
    result.worst_parameter = worst
    result.errors = {"output": (worse["output"][0], None), "branch": worse["branch"],
                     "input gradient": worse["input gradient"], "parameter gradient": worse[worst]}
    for what, (error, gate) in result.errors.items():
        which = f"{what} of {result.worst_parameter}" if what == "parameter gradient" else what
        hint = ": float16 overflows beyond 65504, try --amp-dtype bfloat16" if result.matmul == "float16" else ""
        require(which, error, gate, hint)


def _share_of_the_gate(error_and_gate: tuple[float, float]) -> float:
    error, gate = error_and_gate
    return error / gate


def require(what: str, error: float, gate: float | None, hint: str = "") -> None:
    """Raise Failed unless the relative error is finite, and within its gate where it has one."""
    if not math.isfinite(error):
        raise Failed(f"the {what} is missing or not finite{hint}")
    if gate is not None and error > gate:
        raise Failed(f"the {what} is off by {error:.1e} against FP64, the gate is {gate:.1e}")
