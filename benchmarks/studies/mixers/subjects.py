"""What the study of mixers times: a mixer by one way, beside attention; in a block; and a step of decoding."""
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.mixers import block, forms, work
from benchmarks.mixers.mixer import (
    AT_ONCE,
    COMPILED,
    LOOP,
    TRITON,
    Decoder,
    Mix,
    Mixer,
    errors,
    exact,
    form_of,
    output_error,
    step_errors,
    step_of,
)
from benchmarks.mixers.peers import by_steps, peer
from common import steps
from common.block import block_work, oracle, parameters
from common.block.config import BlockConfig, dtype_name
from common.block.traits import FUSED, Traits
from common.block.workload import Workload
from common.measure.cases import Case, Setting, block_case
from common.measure.subject import BlockSubject, Subject, require
from common.outcome import in_a_line, is_out_of_memory
from common.phases import Phase
from common.report.result import Result
from common.runtime import compiler
from common.runtime.iteration import FORWARD

ATTENTION = "causal attention"
STEP, STEP_COMPILED = "a step", "a step, compiled"
MIXER, BLOCK, DECODING = PARTS = ("mixer", "block", "decoding")
COMPILED_BLOCKS = COMPILED, TRITON        # of these ways a block is compiled
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NO_BACKWARD = "no backward"                # why a library refuses it here, in a variant
OUTPUTS = "y", "state"                    # what else is checked is a gradient
LONGEST_LOOP = 2048                        # steps
LONGEST_UNROLLED = 4096                    # steps of a delta rule: 64 products from chunk to chunk
MOST_SCORES = 2**33                        # bytes of all pairs of steps


@dataclass(frozen=True)
class Sizes:
    """[B, H, S, D] of q, k and v, and their dtype."""
    batch: int
    heads: int
    length: int
    width: int
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, config: BlockConfig) -> "Sizes":
        """Those inside a block."""
        return cls(config.batch_size, config.num_heads, config.seq_len, config.head_dim,
                   config.amp_dtype or torch.float32)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.length, self.width

    @property
    def gates(self) -> tuple[float, float]:
        """Of an output, and of a gradient."""
        return oracle.MODULE_GATES[self.dtype]

    def inputs(self, mixer: Mixer, setting: Setting) -> list[Tensor]:
        """Of a whole sequence."""
        return mixer.inputs(self.shape, setting.seed, setting.device, self.dtype)

    def why_not(self, mixer: Mixer, way: str, device: torch.device) -> str:
        """Why it can't run there, would take too long or too much memory; "" where it would not."""
        if way == TRITON and device.type != "cuda":
            return "its Triton kernels need a GPU"
        scores = 4 * self.batch * self.heads * self.length**2
        if way == LOOP and self.length > LONGEST_LOOP:
            return f"a loop over {self.length:,} steps: it is timed up to {LONGEST_LOOP:,}"
        if way == COMPILED and mixer.replaces and self.length > LONGEST_UNROLLED:
            return f"its graph holds a product for each chunk in a row: it is compiled up to {LONGEST_UNROLLED:,} steps"
        if way == AT_ONCE and scores > MOST_SCORES:
            return f"all pairs of steps would take {scores / 2**30:,.0f} GiB"
        return ""


def of_length(config: BlockConfig, length: int) -> BlockConfig:
    """As many sequences of that length as the shape has tokens for, and at least one."""
    return config.replace(batch_size=max(1, config.tokens // length), seq_len=length)


# ----------------------------------------------------------------------------------------------------------- the mixer


def mix_by(mixer: Mixer, way: str, chunk: int | None = None) -> Mix:
    """The mixer in that form; in chunks of so many steps where that is given."""
    mix = mixer.by(form_of(way) if chunk is None else functools.partial(forms.chunked, chunk=chunk))
    if way != COMPILED:
        return mix
    compiler.allow_many_graphs()
    return torch.compile(mix, dynamic=False)


def case(mixer: Mixer, way: str, sizes: Sizes, device: torch.device, chunk: int | None = None) -> Case:
    """A row by one way; in chunks of so many steps where that is given."""
    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        return _checked(mix_by(mixer, way, chunk), mixer, sizes.inputs(mixer, setting), sizes, setting, result)
    more = {} if chunk is None else {"chunk": chunk}
    return _case(mixer.name, way, sizes, prepare, mixer.name, more, sizes.why_not(mixer, way, device))


def peer_case(mixer: Mixer, name: str, sizes: Sizes, device: torch.device) -> Case:
    """A row by a library, whose inputs lie in memory as it takes them."""
    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        mix, inputs = peer(name, mixer), [by_steps(each) for each in sizes.inputs(mixer, setting)]
        try:
            return _checked(mix, mixer, inputs, sizes, setting, result)
        except RuntimeError as error:                      # some refuse to run their backward on some GPUs
            if isinstance(error, NotImplementedError) or is_out_of_memory(error):
                raise
            result.variant[NO_BACKWARD] = in_a_line(error)
        truth = _truth(mixer, sizes, setting.seed, setting.device)
        _require({"y": output_error(mix, inputs, truth)}, sizes, result)
        return ForwardAlone(mix, [each.detach() for each in inputs], [torch.empty_like(inputs[0])], {}, sizes.gates,
                            work.of_mixer(mixer, sizes.shape, sizes.dtype))
    missing = "" if device.type == "cuda" else "its kernels need a GPU"
    return _case(mixer.name, name, sizes, prepare, mixer.name, missing=missing)


class ForwardAlone(Subject):
    """What has no backward here."""

    def has(self, mode: str) -> bool:
        return mode == FORWARD


def _checked(mix: Mix, mixer: Mixer, inputs: list[Tensor], sizes: Sizes, setting: Setting, result: Result) -> Subject:
    """Held against FP64, its y and every gradient. Raises Failed where one is off."""
    dy = torch.empty_like(inputs[0]).copy_(_cotangent(inputs[0], setting.seed + 1))          # as the inputs lie
    setting.say(Phase.CHECKING)
    try:
        found = errors(mix, mixer, inputs, dy, _truth(mixer, sizes, setting.seed, setting.device))
    except ValueError as error:
        raise NotImplementedError(str(error)) from None
    _require(found, sizes, result)
    return _subject(mix, inputs, dy, sizes, work.of_mixer(mixer, sizes.shape, sizes.dtype))


def _require(found: dict[str, float], sizes: Sizes, result: Result) -> None:
    """Raises Failed where an error is beyond its gate."""
    output, gradient = sizes.gates
    result.errors = {what: (error, output if what in OUTPUTS else gradient) for what, error in found.items()}
    for what, (error, gate) in result.errors.items():
        require(what, error, gate)


@functools.lru_cache(maxsize=1)
def _truth(mixer: Mixer, sizes: Sizes, seed: int, device: torch.device) -> list[Tensor]:
    """Of all ways of a group."""
    inputs = mixer.inputs(sizes.shape, seed, device, sizes.dtype)
    return exact(mixer, inputs, _cotangent(inputs[0], seed + 1))


def control(mixer: Mixer, sizes: Sizes) -> Case:
    """Causal attention of the same sizes, in the rounds of that mixer."""
    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        inputs = sizes.inputs(mixer, setting)[:3]
        return _subject(attend, inputs, _cotangent(inputs[0], setting.seed + 1), sizes,
                        work.of_attention(sizes.shape, sizes.dtype))
    return _case(ATTENTION, "SDPA", sizes, prepare, mixer.name)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The library's, by the first of `BACKENDS` that takes it."""
    with sdpa_kernel(BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# --------------------------------------------------------------------------------------------------- a step of decoding


def step_case(mixer: Mixer, way: str, sizes: Sizes) -> Case:
    """One step of decoding, from a state."""
    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        inputs, state = _inputs_of_a_step(mixer, sizes, setting), _state_behind(mixer, sizes, setting)
        step = step_of(mixer)
        if way == STEP_COMPILED:
            compiler.allow_many_graphs()
            step = torch.compile(step, dynamic=False)
        setting.say(Phase.CHECKING)
        with torch.no_grad():
            found = step_errors(step, mixer, state, inputs)
        _require(found, sizes, result)
        return _subject(Decoder(step, state, torch.empty_like(state)), inputs, torch.zeros_like(inputs[0]), sizes)
    return _case(mixer.name, way, sizes, prepare, mixer.name, part=DECODING)


def step_control(mixer: Mixer, sizes: Sizes) -> Case:
    """The same step of attention: its key and value into the cache, then over all of it."""
    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        inputs = _inputs_of_a_step(mixer, sizes, setting)
        numbers = torch.Generator(setting.device).manual_seed(setting.seed)
        keys, values = (torch.randn(sizes.shape, generator=numbers, device=setting.device, dtype=sizes.dtype)
                        for _ in range(2))

        def attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[:, :, -1:], values[:, :, -1:] = k, v
            with sdpa_kernel(BACKENDS, set_priority=True):
                return F.scaled_dot_product_attention(q, keys, values)
        setting.say(Phase.CHECKING)
        y = attend_to_all(*inputs[:3])
        weights = (inputs[0].double() @ keys.double().mT / math.sqrt(sizes.width)).softmax(-1)
        _require({"y": oracle.relative_error(y, weights @ values.double())}, sizes, result)
        return _subject(attend_to_all, inputs[:3], torch.zeros_like(inputs[0]), sizes)
    return _case(ATTENTION, "SDPA", sizes, prepare, mixer.name, part=DECODING)


def _inputs_of_a_step(mixer: Mixer, sizes: Sizes, setting: Setting) -> list[Tensor]:
    shape = sizes.batch, sizes.heads, 1, sizes.width
    return [each.detach() for each in mixer.inputs(shape, setting.seed + 1, setting.device, sizes.dtype)]


def _state_behind(mixer: Mixer, sizes: Sizes, setting: Setting) -> Tensor:
    """The state behind a whole sequence."""
    with torch.no_grad():
        return forms.chunked(mixer.given(*sizes.inputs(mixer, setting)))[1]


def _case(name: str, way: str, sizes: Sizes, prepare: Callable[[Setting, Result], Subject], beside: str,
          more: dict | None = None, missing: str = "", part: str = MIXER) -> Case:
    variant = {"part": part, "way": way, "size": list(sizes.shape), "beside": beside, **(more or {})}
    return Case(name, prepare, parameter_dtype=sizes.dtype, variant=variant, missing=missing,
                work={"q, k, v": f"{dtype_name(sizes.dtype)} {list(sizes.shape)}"},
                workload=Workload(dtype_name(sizes.dtype), tokens=sizes.batch * sizes.length),
                that_fits=lambda total: "give shorter ones by --lengths")


def _subject(mix: Mix, inputs: list[Tensor], dy: Tensor, sizes: Sizes, of: Workload | None = None) -> Subject:
    of = of or Workload(dtype_name(sizes.dtype), tokens=sizes.batch * sizes.length)
    return Subject(mix, [each.detach() for each in inputs], [dy], {}, sizes.gates, of)


def _cotangent(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator(like.device).manual_seed(seed), device=like.device,
                       dtype=like.dtype)


# ----------------------------------------------------------------------------------------------------------- the block


def traits(compiled: bool) -> Traits:
    """Of step 2's block, whatever mixes its tokens; compiled or not."""
    return Traits(FUSED, tf32=True, autocast=True, compiled=compiled)


def block_control(mixer: Mixer, compiled: bool, config: BlockConfig, device: torch.device) -> Case:
    """Step 2, or step 3, which compiles it: the same block with causal attention."""
    variant = _of_block(config, mixer, "SDPA, compiled" if compiled else "SDPA", compiled)
    return block_case(ATTENTION, steps.load(3 if compiled else 2).build, config, traits(compiled), device,
                      variant=variant)


def mixer_block_case(mixer: Mixer, way: str, config: BlockConfig, device: torch.device) -> Case:
    """That block with the mixer in attention's place, by one way. By kernels it is compiled around them."""
    sizes, compiled = Sizes.of(config), way in COMPILED_BLOCKS

    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        if compiled and (missing := compiler.missing(device)):
            raise NotImplementedError(missing)
        seed = 3 * setting.seed                            # as `common.measure.subject.prepare` has them
        values = _values(config.replace(batch_size=1, seq_len=1), mixer, seed)
        built = block.build(mixer, mixer.by(form_of(way)), config, values, device)
        if compiled:
            compiler.compile_in_place(built)
        shape = config.batch_size, config.seq_len, config.hidden_size
        x, dy = (torch.randn(shape, generator=torch.Generator().manual_seed(seed + more)).to(device) for more in (1, 2))
        setting.say(Phase.CHECKING)
        check_block(built, mixer, x, values, sizes, result)
        return BlockSubject(built, [x], [dy], dict(built.named_parameters()), sizes.gates, of, config=config)
    plain = block_work.workload(config, traits(compiled), torch.float32, device)
    of = block.workload(plain, mixer, config, sizes.dtype)
    missing = sizes.why_not(mixer, way, device)
    return Case(mixer.name, prepare, config, traits(compiled), variant=_of_block(config, mixer, way, compiled),
                missing=missing, workload=of, that_fits=lambda total: "give shorter ones by --lengths")


@functools.lru_cache(maxsize=1)
def _values(config: BlockConfig, mixer: Mixer, seed: int) -> dict[str, Tensor]:
    """The parameters of all ways: 200 million of them take seconds. They depend on the widths alone."""
    return parameters.seeded(config, seed) | block.seeded(config, mixer, seed)


def _of_block(config: BlockConfig, mixer: Mixer, way: str, compiled: bool) -> dict:
    variant = {"part": BLOCK, "way": way, "size": list(Sizes.of(config).shape), "beside": mixer.name}
    return variant | ({"compiled": True} if compiled else {})


def check_block(built: nn.Module, mixer: Mixer, x: Tensor, values: dict[str, Tensor], sizes: Sizes, result: Result
                ) -> None:
    """Hold the branch, and the gradients of x and of every parameter, against FP64. Raises Failed where one is off."""
    one_sequence, whole_batch = oracle.checks(built, x, values, mix=block.truth_of(mixer))
    found = {name: max(error, whole_batch[name]) for name, error in one_sequence.items() if name != "output"}
    output, gradient = sizes.gates
    worst = max(found.keys() - {"branch", "input gradient"}, key=found.__getitem__)
    result.worst_parameter = worst
    result.errors = {"branch": (found["branch"], output), "input gradient": (found["input gradient"], gradient),
                     "parameter gradient": (found[worst], gradient)}
    for what, (error, gate) in result.errors.items():
        require(f"{what} of {worst}" if what == "parameter gradient" else what, error, gate)
