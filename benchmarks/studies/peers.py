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
import ctypes
import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.records import RESULTS
from benchmarks.records.read import Run, extra, label, paired, read, runs, shape, verdict, versions
from benchmarks.show.charts import Charts, Interval, dots_chart
from benchmarks.show.study import Options, Study, register
from benchmarks.show.tables import CASE, ERROR, JOULES, LAUNCH, MS, Column, Context, framed, joules, of_runs
from common import parameters, steps
from common.block.config import LAYER_NORM_EPS, BlockConfig, dtype_name
from common.block.precision import compile_gradient_casts, float32_matmul_precision
from common.block.traits import DELAYED, DYNAMIC, FUSED, Traits
from common.command_line import Parser
from common.measure.cases import Case, Group, block_case, step_case
from common.report.record import Record
from common.runtime import compiler, engine, rounds
from common.runtime.iteration import BOTH, MODES
from common.text import ratio, table

# What others have published of a block like this one, forward+backward; not measured here.
PUBLISHED = [
    ["plain PyTorch, FP16", "43.1 ms", "B4 S2048 E4096 F16384 H32, dropout 0.1; GPU not stated",
     "Transformer Engine, docs/examples/quickstart.ipynb"],
    ["te.TransformerLayer, FP16", "40.0 ms", "the same", "the same"],
    ["te.TransformerLayer, FP8", "28.6 ms", "the same", "the same"],
    ["torchao float8, one linear layer", "1.39 x BF16", "M 4096, K 8192, N 16384; H100", "torchao/float8/README.md"],
]


def names_of(prefixes: dict[str, str]) -> dict[str, str]:
    """Canonical name -> a library's own, from how both begin: each has a weight and a bias."""
    return {f"{ours}.{kind}": theirs + kind for ours, theirs in prefixes.items() for kind in ("weight", "bias")}


class Peer(nn.Module):
    """Another library's layer with the canonical parameters; x [B, S, E] -> [B, S, E], under autocast as a step is."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config

    @float32_matmul_precision("high")
    def __call__(self, x: Tensor) -> Tensor:
        mixed = self.config.amp_dtype is not None and x.dtype == torch.float32
        with torch.autocast(x.device.type, self.config.amp_dtype, enabled=mixed):
            return super().__call__(x)


class EncoderLayer(Peer):
    """torch.nn.TransformerEncoderLayer, pre-LN and causal."""

    parameter_names = names_of({"ln_1": "layer.norm1.", "attn.qkv": "layer.self_attn.in_proj_",
                                "attn.proj": "layer.self_attn.out_proj.", "ln_2": "layer.norm2.",
                                "mlp.fc": "layer.linear1.", "mlp.proj": "layer.linear2."})

    def __init__(self, config: BlockConfig, dtype: torch.dtype):
        super().__init__(config)
        self.layer = nn.TransformerEncoderLayer(
            config.hidden_size, config.num_heads, config.ffn_hidden_size, config.dropout,
            activation=functools.partial(F.gelu, approximate="tanh"), layer_norm_eps=LAYER_NORM_EPS, batch_first=True,
            norm_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(config.seq_len), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, src_mask=self.mask, is_causal=True)


class GPT2(Peer):
    """transformers' GPT2Block, attention by scaled_dot_product_attention."""

    parameter_names = names_of({"ln_1": "layer.ln_1.", "attn.qkv": "layer.attn.c_attn.",
                                "attn.proj": "layer.attn.c_proj.", "ln_2": "layer.ln_2.",
                                "mlp.fc": "layer.mlp.c_fc.", "mlp.proj": "layer.mlp.c_proj."})
    transposed = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")       # Conv1D: [in, out]

    def __init__(self, config: BlockConfig, dtype: torch.dtype):
        super().__init__(config)
        from transformers import GPT2Config, __version__  # optional, as all other libraries here
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block
        self.engine = f"transformers {__version__}"
        settings: dict[str, Any] = {                   # it takes more than its signature names
            "n_positions": config.seq_len, "n_embd": config.hidden_size, "n_head": config.num_heads,
            "n_inner": config.ffn_hidden_size, "layer_norm_epsilon": LAYER_NORM_EPS, "attn_pdrop": config.dropout,
            "resid_pdrop": 0.0, "attn_implementation": "sdpa"}
        self.layer = GPT2Block(GPT2Config(**settings), layer_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


class TransformerLayer(Peer):
    """Transformer Engine's layer; y is [B, S, E] in `output_dtype`. With `fp8` its weights are quantized every call.

    `tuned`: its LayerNorm is what step 4's is, else Transformer Engine's own.
    """

    parameter_names = names_of({"ln_1": "layer.self_attention.layernorm_qkv.layer_norm_",
                                "attn.qkv": "layer.self_attention.layernorm_qkv.",
                                "attn.proj": "layer.self_attention.proj.", "ln_2": "layer.layernorm_mlp.layer_norm_",
                                "mlp.fc": "layer.layernorm_mlp.fc1_", "mlp.proj": "layer.layernorm_mlp.fc2_"})
    fresh = None           # as in step 4: quantize the weights at every call

    def __init__(self, config: BlockConfig, dtype: torch.dtype, output_dtype: torch.dtype, fp8: bool,
                 tuned: bool = False):
        super().__init__(config)
        te = engine.transformer_engine()
        self.output_dtype, self.fp8, self.tuned = output_dtype, fp8, tuned
        self.engine = f"Transformer Engine {engine.version()}"
        self.recipe, self.autocast = te.quantization.DelayedScaling(), te.autocast
        self.layer = te.TransformerLayer(
            config.hidden_size, config.ffn_hidden_size, config.num_heads, layernorm_epsilon=LAYER_NORM_EPS,
            hidden_dropout=0.0, attention_dropout=config.dropout, self_attn_mask_type="causal", fuse_qkv_params=True,
            qkv_weight_interleaved=False, attn_input_format="bshd", params_dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        choose_layer_norm(self.tuned)
        with self.autocast(enabled=self.fp8, recipe=self.recipe):
            y = self.layer(x)
        return y.to(self.output_dtype)


def choose_layer_norm(tuned: bool) -> None:
    """From here on Transformer Engine normalises as step 4 has it (`tuned`), or by its own kernels.

    Its setting is one of the whole process, taken from environment variables at the first use. So each of its blocks
    here sets it whenever it is called, by the functions that override those variables; its backward finds it so.
    """
    engine.ask_for_cudnn_layer_norm(torch.device("cuda"))      # in a process without a step 4 nobody else has
    for direction, set_direction in _layer_norm_setters().items():
        set_direction(ctypes.c_bool(tuned and os.environ.get(f"NVTE_NORM_{direction}_USE_CUDNN") == "1"))


@functools.cache
def _layer_norm_setters() -> dict:
    library = ctypes.CDLL(None)            # Transformer Engine has loaded its own for all to see
    return {direction: library[f"nvte_enable_cudnn_norm_{direction.lower()}"] for direction in ("FWD", "BWD")}


# ----------------------------------------------------------------------------------------------------------- the cases


IN_16_BITS = Traits(FUSED, tf32=True, autocast=True)
IN_FP8 = Traits(FUSED, tf32=True, autocast=True, fp8=DELAYED, residual_in_16_bits=True)
OF_TORCHAO = Traits(FUSED, tf32=True, autocast=True, compiled=True, fp8=DYNAMIC)
RESIDUAL = "16-bit residual"
OTHER_LIBRARIES = ("transformers", "torchao")              # whose versions stand above the tables
OURS = tuple(step for step in steps.ALL if step.traits.compiled or step.traits.fp8)      # what peers are held against


def build_step_4(config: BlockConfig, values: dict[str, Tensor], device) -> nn.Module:
    """Step 4, whose LayerNorm is its own whatever else of Transformer Engine runs in this process."""
    block: Any = steps.load(4).build(config, values, device)
    if not engine.is_emulated(block.engine):
        block.register_forward_pre_hook(lambda *_: choose_layer_norm(True))
    return block


def build(kind: Callable, compiled: bool, config: BlockConfig, values: dict[str, Tensor], device, casts: bool = False
          ) -> nn.Module:
    """A peer with the canonical parameters, compiled in place as step 3 is where `compiled`; `casts`: as in step 4."""
    with torch.device(device):
        block = kind(config, values["mlp.fc.weight"].dtype)
    if compiled:
        compiler.compile_in_place(block)
    if casts:
        compile_gradient_casts(block)
    return parameters.load(block, values, device)


def keep_residual_in_16_bits(block: nn.Module, config: BlockConfig) -> None:
    """From here on the block's residual is in autocast's dtype, as step 4's is; y comes back in the dtype of x."""
    plain = block.forward

    def forward(x: Tensor) -> Tensor:
        return plain(x.to(config.amp_dtype)).to(x.dtype)

    block.forward = forward


def build_torchao(recipe: str, config: BlockConfig, values: dict[str, Tensor], device, residual_in_16_bits: bool = False
                  ) -> nn.Module:
    """Step 2's block, its linear layers converted to torchao's float8 training, compiled."""
    from torchao import __version__
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    block: Any = steps.load(2).build(config, values, device)
    convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(recipe))
    if residual_in_16_bits:
        keep_residual_in_16_bits(block, config)
    compiler.compile_in_place(block)
    block.engine = f"torchao {__version__}"
    return block


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


def ours(run: Run, case_runs: Sequence[Run]) -> Run | None:
    """The step that a case is held against, of the same process: that in FP8 for FP8 peers, the other one for all
    else.
    """
    fp8 = run.step is None and _in_fp8(run)
    for other in case_runs:
        same = other.info["run"] == run.info["run"] and other.info["parameter_dtype"] == run.info["parameter_dtype"]
        if other.step is not None and same and _in_fp8(other) == fp8:
            return other
    return None


def _in_fp8(run: Run) -> bool:
    return run.lines[0]["benchmark"]["dtype"] == "float8"


def _ratio(run: Run, context: Context) -> str:
    base = ours(run, context.runs)
    times = paired(run, base, context.mode) if base is not run else None
    return f"{base.step}: {ratio(times, 3)}{verdict(*times[1:])}" if base and times else ""


def eager_ratio(run: Run, case_runs: Sequence[Run], mode: str) -> Interval | None:
    """Its time to ours, both launched one by one; None where they were not timed so in the same rounds."""
    base = ours(run, case_runs)
    if base is None or base is run or run.status != "ok":
        return None
    its_samples, our_samples = run.samples(mode, "eager"), base.samples(mode, "eager")
    if not its_samples or len(its_samples) != len(our_samples):
        return None
    return rounds.paired_ratio(its_samples, our_samples)


def _eager(run: Run, context: Context) -> str:
    times = eager_ratio(run, context.runs, context.mode)
    return f"{times[0]:.3f}" if times else ""


def _attention(run: Run, context: Context) -> str:
    launches = run.find(context.mode, "launches")
    return extra(launches)["attention"].removesuffix(" attention") if launches else ""


COLUMNS = [
    CASE, ERROR, Column("attn", _attention, untimed=True), LAUNCH, MS, JOULES,
    Column("step: best launch each [95 %]", _ratio), Column("eager", _eager),
]
STATUS_OR_NOT_TIMED = Column("status", lambda run, context: run.status if run.status != "ok" or run.best(context.mode)
                             else "ok, not timed", untimed=True)
RATIOS = """Ratios are its time / ours, against the step named; above 1 ours is faster.
"eager": both launched one by one."""


def columns_of(case_runs: Sequence[Run], mode: str) -> list[Column]:
    """The status stands there only where one is not "ok", the joules where some case was metered."""
    columns = list(COLUMNS)
    if not any(joules(run, mode) for run in case_runs):
        columns.remove(JOULES)
    if not all(run.status == "ok" and run.best(mode) for run in case_runs):
        columns.insert(1, STATUS_OR_NOT_TIMED)
    return columns


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    case_runs = runs(lines)
    used: dict[str, None] = {}
    for run in case_runs:
        known = engine.libraries_of(run.info["engine"])
        used |= {f"{library} {known[library]}": None for library in OTHER_LIBRARIES if library in known}
    others = list(used)
    blocks = [f"With {', '.join(others)}." if others else ""]
    for version in dict.fromkeys(map(_version, case_runs)):
        for dtype in dict.fromkeys(run.info["parameter_dtype"] for run in case_runs):
            alike = [run for run in case_runs if run.info["parameter_dtype"] == dtype and _version(run) == version]
            for mode in MODES:
                of_mode = of_runs(columns_of(alike, mode), alike, mode, width)
                blocks.append(f"{mode}, parameters in {dtype}{version}\n\n{of_mode}")
    blocks.append(RATIOS)
    published = table(PUBLISHED, ["what", "figure", "shape and hardware", "source"], width)
    return f"{framed(lines, blocks, case_runs)}\n\nas published by others, not measured here\n\n{published}"


def _version(run: Run) -> str:
    version = versions(run.lines[0]).get("transformer_engine")
    return f", Transformer Engine {version}" if version else ""


def _ratios(lines: list[Record]) -> dict[str, dict[str, dict[str, Interval]]]:
    """Parameters' dtype and engine -> pass -> peer -> (ratio, low, high)."""
    case_runs = runs(lines)
    ratios: dict[str, dict[str, dict[str, Interval]]] = {}
    for mode in MODES:
        for run in case_runs:
            times = paired(run, ours(run, case_runs), mode) if run.step is None else None
            if times:
                group = f"{run.info['parameter_dtype']}{_version(run).replace('Transformer Engine', 'TE')}"
                name = label(run.lines[-1], engine=False, settings=False)
                ratios.setdefault(group, {}).setdefault(mode, {})[name] = times
    return ratios


def charts(lines: list[Record]) -> Charts:
    """The ratios of both passes."""
    ratios = _ratios(lines)
    if not ratios:
        return {}
    axis = "its time / ours, best launch each (16-bit against step 3, FP8 against step 4); above 1 ours is faster"
    return {"ratios": lambda: dots_chart(ratios, axis, 1.0, 1.6)}


def answer(lines: list[Record]) -> str:
    """The peer that comes nearest, forward+backward."""
    nearest = math.inf, ""
    for columns in _ratios(lines).values():
        for name, (value, _, _) in columns[BOTH].items():
            nearest = min(nearest, (value, name))
    ratio_to_ours, name = nearest
    return f"{name} comes nearest: its time is {ratio_to_ours:.2f} of ours, best launch each"


def eager_losses(path: Path) -> str:
    """Which peers are faster than ours where both are launched one by one, with FP32 parameters: a line each."""
    lines = read(path)
    case_runs = [run for run in runs(lines) if run.info["parameter_dtype"] == "float32"]
    sentences = []
    for mode in MODES:
        for run in case_runs:
            times = eager_ratio(run, case_runs, mode) if run.step is None else None
            if times and times[2] < 1:
                sentences.append(_loss(run, case_runs, mode, times[0]))
    whose = f"At {shape(lines[0])} with FP32 parameters"
    if not sentences:
        return f"{whose} no peer is faster than ours where both are launched one by one."
    return "\n".join([f"{whose}, these are faster than ours where both are launched one by one:", "", *sentences])


def _loss(run: Run, case_runs: Sequence[Run], mode: str, of_ours: float) -> str:
    base = ours(run, case_runs)
    assert base is not None
    by_best = paired(run, base, mode)
    best = f" (best launch each: {by_best[0]:.2f})" if by_best else ""
    name = label(run.lines[-1], engine=False, settings=False)
    return f"- {mode}, {name}: {of_ours:.2f} of step {base.step}'s time{best}"


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
