"""Is the ladder as fast as what a user would pick instead? The same block from other libraries, beside steps 3 and 4.

    python -m benchmarks peers --json peers.jsonl --chart peers

Every peer gets the same parameters, input and causal mask, is checked against FP64 like a step, and is timed in the
same interleaved rounds: with FP32 parameters under autocast, and with everything in 16 bits. What counts is the ratio
of the rounds, its time to ours: peers in 16 bits against step 3, FP8 peers against step 4; above 1 ours is faster. One
column has the best launch each, the next has both launched one by one ("eager"), which most users do.
Missing packages are rows with their reason. Exit status: 0 ok, 1 failed, 2 usage, 4 nothing was timed, 130 interrupted.

With FP32 parameters te.TransformerLayer returns y in 16 bits; it is timed as it is and with y cast to FP32 as in every
step. It runs as it comes: LayerNorm and GELU are Transformer Engine's own kernels, where in step 4 the one is cuDNN's
and the other rides on the matmul, and autograd casts its weights' gradients to FP32, where step 4 has compiled code do
it. In rows of its own it gets step 4's casts, and its LayerNorm too ("tuned"). Its residual is in 16 bits, as step 4's
is. torchao's, whose block is step 2's, is in the dtype of the parameters; in rows of its own it is in 16 bits too.
"""
import dataclasses
import functools
import importlib.util
from collections.abc import Callable

import torch

from benchmarks.records import RESULTS
from benchmarks.show.study import Options, Study, register
from benchmarks.studies.peers.blocks import GPT2, EncoderLayer, TransformerLayer, build, build_step_4, build_torchao
from benchmarks.studies.peers.tables import answer, charts, eager_losses, text
from common import steps
from common.block.config import BlockConfig, dtype_name
from common.block.traits import DELAYED, DYNAMIC, FUSED, Traits
from common.command_line import Parser
from common.measure.cases import Case, Group, block_case, step_case
from common.runtime import engine

# ----------------------------------------------------------------------------------------------------------- the cases


IN_16_BITS = Traits(FUSED, tf32=True, autocast=True)
IN_FP8 = Traits(FUSED, tf32=True, autocast=True, fp8=DELAYED, residual_in_16_bits=True)
OF_TORCHAO = Traits(FUSED, tf32=True, autocast=True, compiled=True, fp8=DYNAMIC)
RESIDUAL = "16-bit residual"
OURS = tuple(step for step in steps.ALL if step.traits.compiled or step.traits.fp8)      # what peers are held against


def cases(config: BlockConfig, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Ours and all peers with parameters of `dtype`."""
    def peer(name: str, variant: dict, traits: Traits, make: Callable, missing: str) -> Case:
        return block_case(name, make, config, traits, device, parameter_dtype=dtype, variant=variant, missing=missing)

    missing = missing_libraries(config, dtype, device)
    every = []
    for step in OURS:
        every.append(step_case(step, config, device, parameter_dtype=dtype,
                               build=build_step_4 if step.traits.fp8 else None))
    for compiled in (False, True):
        traits = Traits(FUSED, tf32=True, autocast=True, compiled=compiled)
        variant = {"compiled": True} if compiled else {}
        every.append(peer("nn.TransformerEncoderLayer", variant, traits,
                          functools.partial(build, EncoderLayer, compiled), ""))
        every.append(peer("GPT2Block", variant, traits, functools.partial(build, GPT2, compiled),
                          missing["transformers"]))
    for fp8, precision in ((False, "16-bit"), (True, "FP8")):
        for output in dict.fromkeys((dtype, config.amp_dtype or dtype)):
            layer = functools.partial(TransformerLayer, output_dtype=output, fp8=fp8)
            every.append(peer("te.TransformerLayer", {"precision": precision, "output": f"y in {dtype_name(output)}"},
                              IN_FP8 if fp8 else IN_16_BITS, functools.partial(build, layer, False),
                              missing["Transformer Engine"] or (missing["FP8"] if fp8 else "")))
    for tuned in (False, True) if dtype == torch.float32 else (True,):     # in 16 bits there is nothing to cast
        layer = functools.partial(TransformerLayer, output_dtype=dtype, fp8=True, tuned=tuned)
        every.append(peer("te.TransformerLayer", {"precision": "FP8", "as": "tuned" if tuned else "casts compiled"},
                          IN_FP8, functools.partial(build, layer, False, casts=True),
                          missing["Transformer Engine"] or missing["FP8"]))
    no_torchao = missing["torchao"] or missing["FP8"]
    for recipe in ("tensorwise", "rowwise"):
        make = functools.partial(build_torchao, recipe)
        every.append(peer("torchao float8", {"recipe": recipe, "compiled": True}, OF_TORCHAO, make, no_torchao))
        if dtype == torch.float32:                         # in 16 bits the residual is so already
            make = functools.partial(build_torchao, recipe, residual_in_16_bits=True)
            every.append(peer("torchao float8", {"recipe": recipe, "residual": RESIDUAL, "compiled": True},
                              dataclasses.replace(OF_TORCHAO, residual_in_16_bits=True), make, no_torchao))
    return every


def missing_libraries(config: BlockConfig, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """What peers need -> why it is not there; empty where it is."""
    no_fp8 = ""
    try:
        config.check_fp8()
    except ValueError as error:
        no_fp8 = str(error)
    no_torchao = "" if importlib.util.find_spec("torchao") else "torchao is not installed"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        no_torchao = "FP8 matmuls need a GPU of compute capability 8.9 or later"
    return {"FP8": no_fp8, "torchao": no_torchao, "Transformer Engine": engine.why_not(config, dtype, device) or "",
            "transformers": "" if importlib.util.find_spec("transformers") else "transformers is not installed"}


def groups(options: Options) -> list[Group]:
    """One group a setting: FP32 parameters under autocast, and everything in 16 bits."""
    all_groups = []
    for dtype in options.dtypes:
        every = cases(options.config, dtype, options.device)
        wanted = [case for case in every if case.step is not None or _is_wanted(case, options)]
        all_groups.append(Group(wanted, metered=True))
    return all_groups


# ------------------------------------------------------------------------------------------------------- what it shows


PARTS = {"peers eager": lambda: eager_losses(RESULTS / "h200" / "peers-gpt2")}


# ------------------------------------------------------------------------------------------------------------ its flags


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    parser.add_argument("--only", metavar="TEXT",
                        help="beside our steps only the peers whose name holds TEXT, or one of several: nn.,GPT2")
    parser.add_argument("--param-dtype", choices=("float32", "amp"),
                        help="only this setting: FP32 parameters under autocast, or everything in 16 bits")


def refine(options: Options) -> None:
    """Set `dtypes`. Raises ValueError for a part of a name that no peer has."""
    settings = {"float32": torch.float32, "amp": options.config.amp_dtype or torch.float32}
    chosen = [settings[options.param_dtype]] if options.param_dtype else list(settings.values())
    options.dtypes = list(dict.fromkeys(chosen))
    every = [case for case in cases(options.config, torch.float32, options.device) if case.step is None]
    for part in (options.only or "").split(","):
        if options.only and not (part.strip() and any(part.strip().casefold() in _name(case) for case in every)):
            known = ", ".join(sorted({case.name for case in every}))
            raise ValueError(f"--only {options.only}: no such peer; give a part of {known}")


def _name(case: Case) -> str:
    """Name and variant, as the table has them, in small letters."""
    return ", ".join([case.name, *(key if value is True else value for key, value in case.variant.items())]).casefold()


def _is_wanted(case: Case, options: Options) -> bool:
    if not options.only:
        return True
    return any(part.strip().casefold() in _name(case) for part in options.only.split(","))


INTRODUCTION = """\
In short, of what was timed on the H200 (gpt2 not with 2.9): the compiled `GPT2Block` is as fast as step 3 to within a
few percent, as the same operations under the same compiler should be. At te-tutorial so is the compiled
`nn.TransformerEncoderLayer`, but for its forward with FP32 parameters. No peer is faster but one, at gpt2 forward,
which returns y in 16 bits where ours is in FP32. In FP8 Transformer Engine's own layer comes nearest,
forward+backward with 2.9. The table of 2.9 in all 16 bits has 40 rounds, since it distinguishes small differences.
PyTorch's and transformers' peers were recorded later than the others; each is held against the steps of its own run."""

register(Study("peers", __doc__, groups, text=text, charts=charts, answer=answer, add_arguments=add_arguments,
               refine=refine, parts=PARTS, no_chart="no peer was timed beside ours",
               place=4, introduction=INTRODUCTION))
