"""Is the ladder as fast as what a user would pick instead? The same block from other libraries, beside steps 3 and 4.

    python -m benchmarks.peers --json peers.jsonl --chart peers

Every peer gets the same parameters, input and causal mask, is checked against FP64 like a step, and is timed in the
same interleaved rounds: with FP32 parameters under autocast, and with everything in 16 bits. What counts is the ratio
of the rounds, its time to ours: peers in 16 bits against step 3, FP8 peers against step 4; above 1 ours is faster.
Missing packages are rows with their reason. Exit status: 0 ok, 1 failed, 2 usage, 4 nothing was timed, 130 interrupted.

With FP32 parameters te.TransformerLayer returns y in 16 bits; it is timed as it is and with y cast to FP32 as in every
step. It runs as it comes: LayerNorm and GELU are Transformer Engine's own kernels, where in step 4 the one is cuDNN's
and the other rides on the matmul, and autograd casts its weights' gradients to FP32, where step 4 has compiled code do
it. In rows of its own it gets step 4's casts, and its LayerNorm too ("tuned"). Its residual is in 16 bits, as step 4's
is; torchao's, whose block is step 2's, is in the dtype of the parameters.
"""
import ctypes
import functools
import importlib.util
import os
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import BlockConfig, harness, parameters, report, steps, te_emulation
from common import device as machine
from common.config import LAYER_NORM_EPS, PRESETS, dtype_name
from common.precision import compile_gradient_casts, float32_matmul_precision

from . import charts, command, records
from .study import Case, Study, of_step_4

# What others have published of a block like this one, forward+backward; not measured here.
PUBLISHED = [
    ("plain PyTorch, FP16", "43.1 ms", "B4 S2048 E4096 F16384 H32, dropout 0.1; GPU not stated",
     "Transformer Engine, docs/examples/quickstart.ipynb"),
    ("te.TransformerLayer, FP16", "40.0 ms", "the same", "the same"),
    ("te.TransformerLayer, FP8", "28.6 ms", "the same", "the same"),
    ("torchao float8, one linear layer", "1.39 x BF16", "M 4096, K 8192, N 16384; H100", "torchao/float8/README.md"),
]


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

    parameter_names = {
        "ln_1.weight": "layer.norm1.weight", "ln_1.bias": "layer.norm1.bias",
        "attn.qkv.weight": "layer.self_attn.in_proj_weight", "attn.qkv.bias": "layer.self_attn.in_proj_bias",
        "attn.proj.weight": "layer.self_attn.out_proj.weight", "attn.proj.bias": "layer.self_attn.out_proj.bias",
        "ln_2.weight": "layer.norm2.weight", "ln_2.bias": "layer.norm2.bias",
        "mlp.fc.weight": "layer.linear1.weight", "mlp.fc.bias": "layer.linear1.bias",
        "mlp.proj.weight": "layer.linear2.weight", "mlp.proj.bias": "layer.linear2.bias",
    }

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

    parameter_names = {
        "ln_1.weight": "layer.ln_1.weight", "ln_1.bias": "layer.ln_1.bias",
        "attn.qkv.weight": "layer.attn.c_attn.weight", "attn.qkv.bias": "layer.attn.c_attn.bias",
        "attn.proj.weight": "layer.attn.c_proj.weight", "attn.proj.bias": "layer.attn.c_proj.bias",
        "ln_2.weight": "layer.ln_2.weight", "ln_2.bias": "layer.ln_2.bias",
        "mlp.fc.weight": "layer.mlp.c_fc.weight", "mlp.fc.bias": "layer.mlp.c_fc.bias",
        "mlp.proj.weight": "layer.mlp.c_proj.weight", "mlp.proj.bias": "layer.mlp.c_proj.bias",
    }
    transposed = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")       # Conv1D: [in, out]

    def __init__(self, config: BlockConfig, dtype: torch.dtype):
        super().__init__(config)
        from transformers import GPT2Config, __version__
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block
        self.engine = f"transformers {__version__}"
        self.layer = GPT2Block(GPT2Config(
            n_positions=config.seq_len, n_embd=config.hidden_size, n_head=config.num_heads,
            n_inner=config.ffn_hidden_size, layer_norm_epsilon=LAYER_NORM_EPS, attn_pdrop=config.dropout,
            resid_pdrop=0.0, attn_implementation="sdpa"), layer_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


class TransformerLayer(Peer):
    """Transformer Engine's layer; y is [B, S, E] in `output_dtype`. With `fp8` its weights are quantized every call.

    `tuned`: its LayerNorm is what step 4's is, else Transformer Engine's own.
    """

    parameter_names = {
        "ln_1.weight": "layer.self_attention.layernorm_qkv.layer_norm_weight",
        "ln_1.bias": "layer.self_attention.layernorm_qkv.layer_norm_bias",
        "attn.qkv.weight": "layer.self_attention.layernorm_qkv.weight",
        "attn.qkv.bias": "layer.self_attention.layernorm_qkv.bias",
        "attn.proj.weight": "layer.self_attention.proj.weight",
        "attn.proj.bias": "layer.self_attention.proj.bias",
        "ln_2.weight": "layer.layernorm_mlp.layer_norm_weight",
        "ln_2.bias": "layer.layernorm_mlp.layer_norm_bias",
        "mlp.fc.weight": "layer.layernorm_mlp.fc1_weight",
        "mlp.fc.bias": "layer.layernorm_mlp.fc1_bias",
        "mlp.proj.weight": "layer.layernorm_mlp.fc2_weight",
        "mlp.proj.bias": "layer.layernorm_mlp.fc2_bias",
    }
    fresh = None           # as in step 4: quantize the weights at every call

    def __init__(self, config: BlockConfig, dtype: torch.dtype, output_dtype: torch.dtype, fp8: bool,
                 tuned: bool = False):
        super().__init__(config)
        te = te_emulation.transformer_engine_pytorch
        self.output_dtype, self.fp8, self.tuned, self.residual_dtype = output_dtype, fp8, tuned, config.amp_dtype
        self.engine = f"Transformer Engine {te_emulation.transformer_engine.__version__}"
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
    for direction, set_direction in _layer_norm_setters().items():
        set_direction(ctypes.c_bool(tuned and os.environ.get(f"NVTE_NORM_{direction}_USE_CUDNN") == "1"))


@functools.cache
def _layer_norm_setters() -> dict:
    library = ctypes.CDLL(None)            # Transformer Engine has loaded its own for all to see
    return {direction: library[f"nvte_enable_cudnn_norm_{direction.lower()}"] for direction in ("FWD", "BWD")}


def build_step_4(config: BlockConfig, values: dict[str, Tensor], device) -> nn.Module:
    """Step 4, whose LayerNorm is its own whatever else of Transformer Engine runs in this process."""
    block = steps.load(4).build(config, values, device)
    if not block.engine.startswith("emulated"):
        block.register_forward_pre_hook(lambda *_: choose_layer_norm(True))
    return block


def build(kind, compiled: bool, config: BlockConfig, values: dict[str, Tensor], device, casts: bool = False
          ) -> nn.Module:
    """A peer with the canonical parameters, compiled in place as step 3 is where `compiled`; `casts`: as in step 4."""
    with torch.device(device):
        block = kind(config, values["mlp.fc.weight"].dtype)
    if compiled:
        harness.compile_in_place(block)
    if casts:
        compile_gradient_casts(block)
    return parameters.load(block, values, device)


def build_torchao(recipe: str, config: BlockConfig, values: dict[str, Tensor], device) -> nn.Module:
    """Step 2's block, its linear layers converted to torchao's float8 training, compiled."""
    from torchao import __version__
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    block = steps.load(2).build(config, values, device)
    convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(recipe))
    harness.compile_in_place(block)
    block.residual_dtype, block.engine = values["mlp.fc.weight"].dtype, f"torchao {__version__}"
    return block


def cases(config: BlockConfig, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Ours and all peers with parameters of `dtype`."""
    def case(name, build, step, its_config=config, **more):
        return Case(name, build, step, its_config, parameter_dtype=dtype, **more)
    no_transformers = "" if importlib.util.find_spec("transformers") else "transformers is not installed"
    _, engine = te_emulation.choose(PRESETS["tiny"], {name: value.to(dtype) for name, value in parameters.seeded(
        PRESETS["tiny"]).items()}, device)
    no_te = engine.removeprefix("emulated ").strip("()") if engine.startswith("emulated") else ""
    no_torchao = "" if importlib.util.find_spec("torchao") else "torchao is not installed"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        no_torchao = "FP8 matmuls need a GPU of compute capability 8.9 or later"
    no_fp8 = ""
    try:
        config.check_fp8()
    except ValueError as error:
        no_fp8 = str(error)
    found = [case(steps.path(3).stem, steps.load(3).build, 3, claims=3),
             case(steps.path(4).stem, build_step_4, 4, of_step_4(config, device), claims=4, missing=no_fp8)]
    for compiled, word in ((False, ""), (True, ", compiled")):
        found.append(case(f"nn.TransformerEncoderLayer{word}", functools.partial(build, EncoderLayer, compiled), 2))
        found.append(case(f"GPT2Block{word}", functools.partial(build, GPT2, compiled), 2, missing=no_transformers))
    for fp8, word in ((False, "16-bit"), (True, "FP8")):
        for output in dict.fromkeys((dtype, config.amp_dtype or dtype)):
            layer = functools.partial(TransformerLayer, output_dtype=output, fp8=fp8)
            found.append(case(f"te.TransformerLayer {word}, y in {dtype_name(output)}",
                              functools.partial(build, layer, False), 4 if fp8 else 2,
                              missing=no_te or (no_fp8 if fp8 else "")))
    for tuned in (False, True) if dtype == torch.float32 else (True,):     # in 16 bits there is nothing to cast
        layer = functools.partial(TransformerLayer, output_dtype=dtype, fp8=True, tuned=tuned)
        found.append(case(f"te.TransformerLayer FP8, {'tuned' if tuned else 'casts compiled'}",
                          functools.partial(build, layer, False, casts=True), 4, missing=no_te or no_fp8))
    for recipe in ("tensorwise", "rowwise"):
        found.append(case(f"torchao float8 {recipe}, compiled", functools.partial(build_torchao, recipe), 4,
                          missing=no_torchao or no_fp8))
    return found


def ours(run: records.Run, runs: list[records.Run]) -> records.Run | None:
    """The step that a peer is held against, of the same process: 4 for FP8, 3 for the rest."""
    fp8 = "FP8" in run.info["step"] or "float8" in run.info["step"]
    return next((other for other in runs if other.info["step"].startswith("4" if fp8 else "3")
                 and all(other.info[key] == run.info[key] for key in ("parameter_dtype", "run"))), None)


def text(lines: list[dict], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    runs = [run for run in records.runs(lines) if run.info["step"] != "peers"]
    others = dict.fromkeys(run.info["engine"] for run in runs
                           if run.info["engine"].startswith(("transformers ", "torchao ")))
    blocks = [records.provenance(lines), f"With {', '.join(others)}." if others else ""]
    for engine in dict.fromkeys(_engine(run) for run in runs):
        for dtype in dict.fromkeys(run.info["parameter_dtype"] for run in runs):
            for mode in report.MODES:
                rows = [_row(run, runs, mode) for run in runs
                        if run.info["parameter_dtype"] == dtype and _engine(run) == engine]
                blocks.append(f"{mode}, parameters in {dtype}{engine}\n\n" + command.table(
                    rows, ["case", "status", "error", "attn", "launch", "ms", "step: its time / ours [95 %]"], width))
    blocks.append("\n".join(records.cautions(runs)))
    blocks.append("as published by others, not measured here\n\n" + command.table(
        [list(row) for row in PUBLISHED], ["what", "figure", "shape and hardware", "source"], width))
    return "\n\n".join(filter(None, blocks))


def _engine(run: records.Run) -> str:
    version = run.lines[0]["dependencies"].get("transformer_engine", {}).get("version")
    return f", Transformer Engine {version}" if version else ""


def _row(run: records.Run, runs: list[records.Run], mode: str) -> list[str]:
    error, launch, seen = run.value("check", "branch error"), run.best(mode), run.find(mode, "launches")
    cells = [run.info["step"], run.status, f"{error:.1e}" if error else "",
             seen["metric"]["extra_info"].get("attention", "").removesuffix(" attention") if seen else ""]
    if launch is None or run.status != "ok":
        cells[1] = run.status if run.status != "ok" else "ok, not timed"
        return [*cells, "", "n/a", "n/a"]
    base = ours(run, runs)
    ratio = records.paired(run, base, mode) if base and base is not run else None
    told = ""
    if ratio:
        told = f"{base.info['step'][0]}: " + "{:.3f} [{:.3f}, {:.3f}]".format(*ratio) + records.verdict(*ratio[1:])
    return [*cells, launch, f"{run.best_ms(mode):.2f}", told]


def chart_stems(lines: list[dict], stem: str) -> list[str]:
    """The one chart that `draw` makes."""
    return [f"{stem}-ratios"] if _ratios(lines) else []


def draw(lines: list[dict], stem: str) -> None:
    """Draw `chart_stems`: the ratios of both passes."""
    if ratios := _ratios(lines):
        axis = "its time / ours (16-bit against step 3, FP8 against step 4); above 1 ours is faster"
        charts.dots_chart(ratios, f"{stem}-ratios", lines, axis, 1.0, 1.6)
    else:
        command.no_chart("peers", "no peer was timed beside ours")


def _ratios(lines: list[dict]) -> dict[str, dict[str, dict[str, tuple[float, float, float]]]]:
    """Parameters' dtype and engine -> pass -> peer -> (ratio, low, high)."""
    runs, found = records.runs(lines), {}
    own = [steps.path(number).stem for number in (3, 4)]
    for mode in report.MODES:
        for run in (run for run in runs if run.info["step"] not in own and run.best(mode)):
            base = ours(run, runs)
            if ratio := records.paired(run, base, mode) if base else None:
                group = f"{run.info['parameter_dtype']}{_engine(run).replace('Transformer Engine', 'TE')}"
                found.setdefault(group, {}).setdefault(mode, {})[run.info["step"]] = ratio
    return found


def main(argv: list[str] | None = None) -> int:
    parser = command.parser("peers", __doc__)
    parser.add_argument("--only", metavar="TEXT",
                        help="beside our steps only the peers whose name holds TEXT, or one of several: nn.,GPT2")
    parser.add_argument("--param-dtype", choices=("float32", "amp"),
                        help="only this setting: FP32 parameters under autocast, or everything in 16 bits")
    options = command.parse(parser, argv)
    settings = {"float32": torch.float32, "amp": options.config.amp_dtype or torch.float32}
    if options.param_dtype:
        settings = {options.param_dtype: settings[options.param_dtype]}
    names = {case.name for case in cases(options.config, torch.float32, options.device) if case.claims is None}
    wanted = set()
    for text_ in (options.only or "").split(","):
        named = {name for name in names if text_.strip().casefold() in name.casefold()}
        if not named or (options.only and not text_.strip()):
            command.usage(parser, f"--only {options.only}: no such peer; give a part of {', '.join(sorted(names))}")
        wanted |= named
    with command.shown_to_a_person("peers", options.output), machine.alone(options.device, "peers"):
        harness.use_private_caches()
        study = Study("peers", options)
        for dtype in dict.fromkeys(settings.values()):
            for case in cases(options.config, dtype, options.device):
                if case.claims is not None or case.name in wanted:
                    study.prepare(case)
            for mode in report.MODES:
                study.time(mode)
            study.release()
        return study.show(text, draw)


if __name__ == "__main__":
    sys.exit(main())
