"""What does each part of the block cost, and what does each way of writing it buy? The parts one by one, four ways.

    python -m benchmarks.components --json components.jsonl

The whole block, attention, MLP, LayerNorm and the QKV projection, all in 16 bits (on a CPU in FP32, since many have no
16-bit arithmetic): naive (three separate projections, attention by hand, LayerNorm and GELU from elementary
operations), tuned (fused projection, fused attention, the library's LayerNorm and GELU), the tuned one compiled, and
the best that is known (Transformer Engine's, but for LayerNorm in FP8). Each is checked against FP64, then all of a
part are timed in interleaved rounds. The limit is that of the part's own operations, as in common/roofline.py.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import math
import sys

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from common import BlockConfig, harness, oracle, parameters, report, roofline, steps, te_emulation, timing
from common import device as machine
from common.config import LAYER_NORM_EPS
from common.evidence import judge

from . import charts, command, records
from .comparison import Compared, compare
from .study import Study

WAYS = ("naive", "tuned", "compiled", "best known")
PARTS = {  # part -> (its operations in common/roofline.py, by how their names begin; how many of it a block has)
    "block": (("",), 1),
    "attention": (("qkv", "attention"), 1),
    "MLP": (("fc", "mlp"), 1),
    "LayerNorm": (("layer norms",), 2),
    "QKV projection": (("qkv",), 1),
}
FP8_GATES = dict.fromkeys(("block", "MLP", "QKV projection"), oracle.GATES["float8"][0])
FP8_GATES["attention"] = 8e-2          # two FP8 matmuls in a row, and no other branch beside it: it is at a step's gate


class NaiveLayerNorm(nn.Module):
    """LayerNorm over the last dimension from elementary operations, any shape [..., E]."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()                                   # as the library does: sums of 16-bit squares overflow
        centred = wide - wide.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return (centred * (variance + LAYER_NORM_EPS).rsqrt()).to(x.dtype) * self.weight + self.bias


class NaiveProjection(nn.Module):
    """Q, K and V by three linear layers, [B, S, E] -> [B, S, 3E]."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


class NaiveAttention(nn.Module):
    """Causal multi-head self-attention by hand, three projections, [B, S, E] -> [B, S, E]."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = NaiveProjection(config)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        q, k, v = (linear(x).view(B, S, self.num_heads, -1).transpose(1, 2)        # [B, H, S, D] each
                   for linear in (self.qkv.q, self.qkv.k, self.qkv.v))
        scores = q @ k.mT / math.sqrt(q.size(-1))                                  # [B, H, S, S]
        future = torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, S, E))


class NaiveMLP(nn.Module):
    """Two linear layers with the GELU's formula between them, [B, S, E] -> [B, S, E]."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.fc = nn.Linear(config.hidden_size, config.ffn_hidden_size)
        self.proj = nn.Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return self.proj(0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h * h * h))))


class NaiveBlock(nn.Module):
    """The block of the steps out of the naive parts."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.ln_1, self.ln_2 = NaiveLayerNorm(config), NaiveLayerNorm(config)
        self.attn, self.mlp = NaiveAttention(config), NaiveMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class LayerNorm(nn.LayerNorm):
    """torch's own with a forward outside of torch.nn: compile() in place does nothing to torch's own in torch 2.11."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Linear(nn.Linear):
    """As LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Fp8Attention(nn.Module):
    """Both projections in FP8, attention by Transformer Engine's choice of kernel, [B, S, E] -> [B, S, E]."""

    def __init__(self, config: BlockConfig, te, dtype: torch.dtype):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = te.Linear(config.hidden_size, 3 * config.hidden_size, params_dtype=dtype)
        self.split = te.utils.SplitAlongDim.apply
        self.core = te.DotProductAttention(config.num_heads, config.head_dim, attention_dropout=0.0,
                                           qkv_format="bshd", attn_mask_type="causal")
        self.proj = te.Linear(config.hidden_size, config.hidden_size, params_dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        q, k, v = self.split(self.qkv(x).view(B, S, 3 * self.num_heads, -1), 2, [self.num_heads] * 3)
        return self.proj(self.core(q, k, v))


class Fp8MLP(nn.Module):
    """Both linear layers in FP8, [B, S, E] -> [B, S, E]."""

    def __init__(self, config: BlockConfig, te, dtype: torch.dtype):
        super().__init__()
        self.fc = te.Linear(config.hidden_size, config.ffn_hidden_size, params_dtype=dtype)
        self.proj = te.Linear(config.ffn_hidden_size, config.hidden_size, params_dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


def tuned(part: str, config: BlockConfig) -> nn.Module:
    """The part as step 2 has it, with uninitialised parameters."""
    step = steps.load(2)
    return {"block": lambda: step.Block(config), "attention": lambda: step.Attention(config),
            "MLP": lambda: step.MLP(config), "LayerNorm": lambda: LayerNorm(config.hidden_size, LAYER_NORM_EPS),
            "QKV projection": lambda: Linear(config.hidden_size, 3 * config.hidden_size)}[part]()


def naive(part: str, config: BlockConfig) -> nn.Module:
    return {"block": NaiveBlock, "attention": NaiveAttention, "MLP": NaiveMLP, "LayerNorm": NaiveLayerNorm,
            "QKV projection": NaiveProjection}[part](config)


def fp8(part: str, config: BlockConfig, te, dtype: torch.dtype) -> nn.Module:
    """The part from Transformer Engine, under FP8 with delayed scaling, weights quantized at every call."""
    if part == "LayerNorm":
        return te.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS, dtype=dtype)
    E = config.hidden_size
    module = {"attention": lambda: Fp8Attention(config, te, dtype), "MLP": lambda: Fp8MLP(config, te, dtype),
              "QKV projection": lambda: te.Linear(E, 3 * E, params_dtype=dtype)}[part]()
    forward, recipe = module.forward, te.quantization.DelayedScaling()

    def forward_in_fp8(x: Tensor) -> Tensor:
        with te.autocast(enabled=True, recipe=recipe):
            return forward(x)
    module.forward = forward_in_fp8                        # not a module around it: its parameters keep their names
    return module


def values_of(part: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The canonical parameters of the part by its own names: "attn.qkv.weight" is "qkv.weight" in attention.

    The thirds of the fused projection are there too, as "q.weight", "k.weight" and "v.weight" below it.
    """
    thirds = {f"attn.qkv.{letter}.{kind}": values[f"attn.qkv.{kind}"].chunk(3)[place]
              for kind in ("weight", "bias") for place, letter in enumerate("qkv")}
    prefix = {"block": "", "attention": "attn.", "MLP": "mlp.", "LayerNorm": "ln_1.",
              "QKV projection": "attn.qkv."}[part]
    return {name.removeprefix(prefix): value for name, value in (values | thirds).items() if name.startswith(prefix)}


def load(module: nn.Module, own: dict[str, Tensor]) -> nn.Module:
    """Copy parameters into a module by name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(own[name])
    return module


def modules(part: str, config: BlockConfig, values: dict[str, Tensor], device: torch.device, dtype: torch.dtype
            ) -> tuple[dict[str, nn.Module], str]:
    """(way -> module with the canonical parameters on `device` in `dtype`, why the best known one is missing)."""
    own = {name: value.to(device, dtype) for name, value in values_of(part, values).items()}
    with torch.device(device):
        found = {"naive": naive(part, config), "tuned": tuned(part, config), "compiled": tuned(part, config)}
    found = {way: load(module.to(dtype), own) for way, module in found.items()}
    harness.compile_in_place(found["compiled"])
    typed = {name: value.to(dtype) for name, value in values.items()}
    te, engine = te_emulation.choose(config, typed, device)
    if engine.startswith("emulated"):
        return found, engine.removeprefix("emulated ").strip("()")
    if part == "block":
        found["best known"] = steps.load(4).build(config, typed, device)
    else:
        with torch.device(device):
            found["best known"] = load(fp8(part, config, te, dtype), own)
    return found, ""


def measure(study: Study, part: str, values: dict[str, Tensor]) -> None:
    """Compare the ways of one part, and write their records."""
    options = study.options
    config, device, dtype = options.config, study.device, options.config.amp_dtype or torch.float32
    study.say(f"building {part}")
    found, missing = modules(part, config, values, device, dtype)
    shape = (config.batch_size, config.seq_len, config.hidden_size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(options.seed + 1)).to(device, dtype)
    own = {name: value.to(device, torch.float64) for name, value in values_of(part, values).items()}
    reference = load(tuned(part, config.replace(amp_dtype=None)).to(device, torch.float64), own)
    if "best known" in found and part != "LayerNorm":
        _calibrate(found["best known"], x)
    gates = {"best known": FP8_GATES[part]} if part in FP8_GATES else {}
    graphs = counters["stats"]["unique_graphs"]
    result = compare(found, (x,), reference, options.rounds, gates, options.seed,
                     lambda what: study.say(f"{what}, {part}"))
    compiled = result.results["compiled"]
    if counters["stats"]["unique_graphs"] == graphs and compiled.status == "ok":
        compiled.status, compiled.reason = "failed", "torch.compile compiled nothing"
        compiled.samples.clear()
    state = {}
    if ms := result.results["tuned"].best_ms("forward"):
        with torch.no_grad():
            state = study.look(lambda: found["tuned"](x), timing.nothing, ms)
    kinds = roofline.arithmetic(config, 2, dtype, device)
    study.measure_peaks(config, kinds)
    for way in WAYS:
        one = result.results.get(way) or Compared(way, nn.Identity(), 0.0, "skipped", missing)
        study.write(_records(study, part, one, kinds if way != "best known" else None, state))


def _calibrate(module: nn.Module, x: Tensor) -> None:
    """Three forward+backwards on gradients like compare's: delayed scaling starts with every scale at 1."""
    for _ in range(3):
        y = module(x.detach().requires_grad_())
        y.backward(torch.randn_like(y))
    module.zero_grad(set_to_none=True)


def _records(study: Study, part: str, one: Compared, kinds: roofline.Arithmetic | None, state: dict) -> list[dict]:
    config = study.options.config
    dtype = config.amp_dtype or torch.float32
    r = report.Report(f"{part}, {one.name}", config, str(dtype).removeprefix("torch."), study.facts, one.status,
                      one.reason, kinds.matmul if kinds else "float8", study=study.name, run=study.run,
                      neighbours=study.neighbours, state=state)
    study.reports[r.step], r.residual = r, r.parameter_dtype
    r.errors = {what: (error, one.gate_of(what)) for what, error in one.errors.items()}
    lines = report.check_records(r)
    names, count = PARTS[part]
    for mode in report.MODES:
        for launch in report.LAUNCHES:
            if samples := one.samples.get((mode, launch)):
                row = r.rows[mode, launch] = report.Row(timing.Timing(samples, timing.is_settled(samples),
                                                                      timing.clock_for(study.device).in_rounds))
                row.tokens = config.tokens
                if kinds:
                    row.limit_ms = roofline.limit_ms(config, kinds, study.peaks, mode != "forward", names) / count
        if mode in one.kernels:
            r.evidence[mode] = judge(one.kernels[mode], None, r.matmul, study.device)
            lines += report.row_records(r, mode)
    return lines


def text(lines: list[dict], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    blocks = [records.provenance(lines)]
    runs = {run.info["step"]: run for run in records.runs(lines) if run.info["step"] != "components"}
    for mode in report.MODES:
        rows = []
        for part in PARTS:
            ways = {way: runs[f"{part}, {way}"] for way in WAYS if f"{part}, {way}" in runs}
            if ways:
                rows.append([part, *(_cell(ways.get(way), mode) for way in WAYS), *_speed_up(ways, mode)])
        blocks.append(f"{mode}: ms (percent of the part's limit)\n\n" + command.table(
            rows, ["component", *WAYS, "total speed-up", "reached by"], width))
    rows = [[name, run.status, _worst(run), *(_launches(run, mode) for mode in report.MODES)]
            for name, run in runs.items()]
    blocks.append("error against FP64, the worst of output and gradients; kernels an iteration, operators on a CPU\n\n"
                  + command.table(rows, ["component, way", "status", "error", *report.MODES], width))
    blocks.append("\n".join(records.cautions(runs.values())))
    return "\n\n".join(filter(None, blocks))


def _cell(run: records.Run | None, mode: str) -> str:
    if run is None or run.status != "ok" or not run.best(mode):
        return run.status if run and run.status != "ok" else "n/a"
    percent = run.value(mode, "percent of limit", run.best(mode))
    beyond = ", ERROR" if percent and percent > 100 else ""
    return command.figures(run.best_ms(mode)) + (f" ({percent:.0f} %{beyond})" if percent else "")


def _speed_up(ways: dict[str, records.Run], mode: str) -> tuple[str, str]:
    """The naive one's time over that of the fastest, with its interval, and which that is."""
    timed = {way: run for way, run in ways.items() if run.status == "ok" and run.best(mode)}
    if "naive" not in timed:
        return "n/a", ""
    fastest = min(timed, key=lambda way: timed[way].best_ms(mode))
    if fastest == "naive":
        return "1", "naive"
    ratio = records.paired(timed["naive"], timed[fastest], mode)
    return "{:.2f} [{:.2f}, {:.2f}]".format(*ratio), fastest


def _worst(run: records.Run) -> str:
    errors = [line["metric"]["benchmark_values"][0] for line in run.lines if line["metric"]["name"].endswith(" error")]
    return f"{max(errors):.1e}" if errors else ""


def _launches(run: records.Run, mode: str) -> str:
    value = run.value(mode, "launches")
    return "" if value is None else f"{value:.0f}"


def chart_stems(lines: list[dict], stem: str) -> list[str]:
    """The one chart that `draw` makes."""
    return [f"{stem}-speed-ups"] if _bars(lines) else []


def draw(lines: list[dict], stem: str) -> None:
    """Draw `chart_stems`: how many times faster than the naive one each way is, forward+backward."""
    if bars := _bars(lines):
        charts.bars_chart(bars, f"{stem}-speed-ups", lines, "times as fast as naive, forward+backward", 2, line_at=1)
    else:
        command.no_chart("components", "nothing was timed forward+backward beside the naive one")


def _bars(lines: list[dict]) -> dict[str, list[tuple[str, float, float, float]]]:
    runs, bars = {run.info["step"]: run for run in records.runs(lines)}, {}
    for part in PARTS:
        for way in WAYS[1:]:
            pair = [runs.get(f"{part}, {one}") for one in ("naive", way)]
            ratio = records.paired(*pair, "forward+backward") if all(pair) else None
            if ratio:
                bars.setdefault(part, []).append((way, *ratio))
    return bars


def main(argv: list[str] | None = None) -> int:
    parser = command.parser("components", __doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    options = command.parse(parser, argv)
    if options.device.type == "cpu":
        options.config = options.config.replace(amp_dtype=None)
    with command.shown_to_a_person("components", options.output), machine.alone(options.device, "components"):
        machine.refuse_beyond_memory(parameters.memory_needed(options.config, 0, options.device), options.device)
        harness.use_private_caches()
        study = Study("components", options)
        values = parameters.seeded(options.config, options.seed)
        for part in options.part or PARTS:
            measure(study, part, values)
            study.release()
        return study.show(text, draw)


if __name__ == "__main__":
    sys.exit(main())
