"""What does each part of the block cost, and what does each way of writing it buy? The parts one by one, four ways.

    python -m benchmarks components --json components.jsonl

The whole block, attention, MLP, LayerNorm and the QKV projection, all in 16 bits (on a CPU in FP32, since many have no
16-bit arithmetic): naive (three separate projections, attention by hand, LayerNorm and GELU from elementary
operations), tuned (fused projection, fused attention, the library's LayerNorm and GELU), the tuned one compiled, and
the best that is known (Transformer Engine's, but for LayerNorm in FP8). Each is checked against FP64, then all of a
part are timed in interleaved rounds. The limit is that of the part's own operations, as in common/block/block_work.py.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import functools
import math

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import Judge
from benchmarks.measure.modules import record_checks, subject_of
from benchmarks.measure.observing import Work
from benchmarks.measure.truth import Truth
from benchmarks.records.read import Run, paired, runs
from benchmarks.show.charts import Charts, Interval, bars_chart
from benchmarks.show.study import Options, Study, register
from benchmarks.show.tables import STATUS, WORST_ERROR, Column, Context, framed, of_runs
from common import parameters, steps
from common.block import block_work, memory, oracle
from common.block.config import LAYER_NORM_EPS, BlockConfig
from common.block.traits import BY_HAND, DELAYED, FUSED, Traits
from common.block.workload import Workload
from common.command_line import Parser
from common.measure.cases import Case, Group, Setting
from common.measure.subject import CALLS_TO_CALIBRATE, Subject
from common.outcome import Failed
from common.phases import Phase
from common.report.metrics import SHARE
from common.report.record import Record
from common.report.result import Result
from common.runtime import compiler, engine, machine
from common.runtime.iteration import BOTH, MODES
from common.runtime.peaks import BURST
from common.text import figures, number, ratio, table

WAYS = {  # how a part is written -> its traits; all compute in the dtype of their parameters
    "naive": Traits(BY_HAND),
    "tuned": Traits(FUSED),
    "compiled": Traits(FUSED, compiled=True),
    "best known": Traits(FUSED, fp8=DELAYED),
}
PARTS = {  # part -> (where it is in a block; its operations in `block_work`, as their names begin; how many)
    "block": ("", ("",), 1),
    "attention": ("attn", ("qkv", "attention"), 1),
    "MLP": ("mlp", ("fc", "mlp"), 1),
    "LayerNorm": ("ln_1", ("layer norms",), 2),
    "QKV projection": ("attn.qkv", ("qkv",), 1),
}
FP8_GATES = dict.fromkeys(("block", "MLP", "QKV projection"), oracle.GATES["float8"])
FP8_GATES["attention"] = 8e-2, 2.4e-1  # two FP8 matmuls in a row, and no other branch beside it: it is at a step's gate


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


# ------------------------------------------------------------------------------------------------------------ the parts


def uninitialised(part: str, way: str, config: BlockConfig) -> nn.Module:
    """The part of step 2's block; naive by elementary operations, and else with what can be compiled alone."""
    block = steps.load(2).module.Block(config)
    if way == "naive":
        block.ln_1, block.ln_2 = NaiveLayerNorm(config), NaiveLayerNorm(config)
        block.attn, block.mlp = NaiveAttention(config), NaiveMLP(config)
    else:
        block.ln_1 = LayerNorm(config.hidden_size, LAYER_NORM_EPS)
        block.attn.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
    return block.get_submodule(PARTS[part][0])


def fp8(part: str, config: BlockConfig, dtype: torch.dtype) -> nn.Module:
    """The part from Transformer Engine, under FP8 with delayed scaling, weights quantized at every call."""
    te = engine.transformer_engine()
    E = config.hidden_size
    if part == "LayerNorm":
        return te.LayerNorm(E, eps=LAYER_NORM_EPS, dtype=dtype)
    if part == "QKV projection":
        module = te.Linear(E, 3 * E, params_dtype=dtype)
    else:
        module = {"attention": Fp8Attention, "MLP": Fp8MLP}[part](config, te, dtype)
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
    prefix = f"{PARTS[part][0]}.".lstrip(".")
    every = dict(values)
    for kind in ("weight", "bias"):
        thirds = values[f"attn.qkv.{kind}"].chunk(3)
        every |= {f"attn.qkv.{letter}.{kind}": third for letter, third in zip("qkv", thirds, strict=True)}
    return {name.removeprefix(prefix): value for name, value in every.items() if name.startswith(prefix)}


def load(module: nn.Module, own: dict[str, Tensor]) -> nn.Module:
    """Copy parameters into a module by name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(own[name])
    return module


def made(part: str, way: str, given: "Given") -> nn.Module:
    """The part written that way, with the canonical parameters. Raises NotImplementedError where it can't be."""
    config, dtype, device = given.config, given.x.dtype, given.x.device
    own = {name: value.to(device, dtype) for name, value in values_of(part, given.values).items()}
    if way != "best known":
        with torch.device(device):
            module = uninitialised(part, way, config)
        load(module.to(dtype), own)
        if way == "compiled":
            compiler.compile_in_place(module)
        return module
    typed = {name: value.to(dtype) for name, value in given.values.items()}
    engine.choose(config, typed, device)                   # raises where FP8 can't multiply these dimensions
    if reason := engine.why_not(config, dtype, device):
        raise NotImplementedError(reason)
    if part == "block":
        return steps.load(4).build(config, typed, device)
    with torch.device(device):
        return load(fp8(part, config, dtype), own)


# ----------------------------------------------------------------------------------------------------------- the cases


class Given:
    """What all ways of one part share: the canonical parameters, x [B, S, E], and what FP64 says of it."""

    def __init__(self, part: str, config: BlockConfig, device: torch.device, seed: int):
        self.config = config
        self.values = parameters.seeded(config, seed)
        shape = (config.batch_size, config.seq_len, config.hidden_size)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))
        self.x = x.to(device, config.amp_dtype or torch.float32)
        own = {name: value.to(device, torch.float64) for name, value in values_of(part, self.values).items()}
        exact = load(uninitialised(part, "tuned", config.replace(amp_dtype=None)).to(device, torch.float64), own)
        self.work = Work(Inputs.of(self.x), cotangents=1, seed=seed)
        self.truth = Truth(exact, self.work)


_given = functools.lru_cache(maxsize=1)(Given)             # of the part that is measured; the one before is let go of


def work_of(part: str, whole: Workload) -> Workload:
    """The part's own operations."""
    _, names, count = PARTS[part]
    return whole.part(names, 1 / count)


def part_case(part: str, way: str, config: BlockConfig, device: torch.device, seed: int) -> Case:
    """One part written in one way."""
    dtype, traits = config.amp_dtype or torch.float32, WAYS[way]
    gate, of_gradients = oracle.MODULE_GATES[dtype]
    if traits.fp8 and part in FP8_GATES:
        gate, of_gradients = FP8_GATES[part]
    workload = work_of(part, block_work.workload(config, traits, dtype, device))

    def prepare(setting: Setting, result: Result) -> Subject:
        given = _given(part, config, device, seed)
        setting.say(Phase.BUILDING)
        module = made(part, way, given)
        if traits.fp8 and part != "LayerNorm":
            setting.say(Phase.CALIBRATING, "FP8 scales")
            calibrate(module, given.x)
        setting.say(Phase.CHECKING)
        graphs = counters["stats"]["unique_graphs"]
        record_checks(Judge(module, given.truth, gate=gate if traits.fp8 else None).judge(), result)
        subject = subject_of(module, given.work, (of_gradients, of_gradients))
        subject.workload = workload.part(()) if traits.fp8 else workload     # what is best known has no limit here
        if traits.compiled and counters["stats"]["unique_graphs"] == graphs:
            raise Failed("torch.compile compiled nothing")
        return subject
    return Case(part, prepare, config, traits, dtype, {"way": way}, workload=workload,
                that_fits=functools.partial(memory.that_fits, config, traits, device))


def calibrate(module: nn.Module, x: Tensor) -> None:
    """Let FP8 scales see gradients like those of the check: delayed scaling starts with every scale at 1."""
    for _ in range(CALLS_TO_CALIBRATE):
        y = module(x.detach().requires_grad_())
        y.backward(torch.randn_like(y))
    module.zero_grad(set_to_none=True)


def groups(options: Options):
    """One group a part."""
    machine.refuse_beyond_memory(memory.needed(options.config, WAYS["naive"], options.device), options.device)
    for part in options.part or PARTS:
        every = [part_case(part, way, options.config, options.device, options.seed) for way in WAYS]
        yield Group(every, calibrated=False, watched=False)


# ------------------------------------------------------------------------------------------------------- what it shows


def _ways(lines: list[Record]) -> dict[str, dict[str, Run]]:
    """Part -> way -> its run."""
    by_part: dict[str, dict[str, Run]] = {}
    for run in runs(lines):
        by_part.setdefault(run.case["name"], {})[run.variant["way"]] = run
    return {part: by_part[part] for part in PARTS if part in by_part}


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    blocks = []
    case_runs = runs(lines)
    for mode in MODES:
        rows = []
        for part, ways in _ways(lines).items():
            rows.append([part, *(_cell(ways.get(way), mode) for way in WAYS), *_speed_up(ways, mode)])
        headers = ["component", *WAYS, "total speed-up", "reached by"]
        blocks.append(f"{mode}: ms (percent of the part's limit)\n\n{table(rows, headers, width)}")
    blocks.append("error against FP64, the worst of output and gradients; kernels an iteration, operators on a CPU\n\n"
                  + of_runs(COLUMNS, case_runs, BOTH, width))
    return framed(lines, blocks, case_runs)


def _launches(mode: str) -> Column:
    def cell(run: Run, context: Context) -> str:
        launches = run.value(mode, "launches")
        return "" if launches is None else number(launches, ".0f")
    return Column(mode, cell, untimed=True)


COLUMNS = [
    Column("component, way", lambda run, _: f"{run.case['name']}, {run.variant['way']}", untimed=True), STATUS,
    WORST_ERROR, *map(_launches, MODES),
]


def _cell(run: Run | None, mode: str) -> str:
    if run is None:
        return "n/a"
    ms = run.best_ms(mode)
    if run.status != "ok" or ms is None:
        return run.status if run.status != "ok" else "n/a"
    percent = run.figure(SHARE[BURST], mode)
    beyond = ", ERROR" if percent and percent > 100 else ""
    return figures(ms) + (f" ({percent:.0f} %{beyond})" if percent else "")


def _speed_up(ways: dict[str, Run], mode: str) -> tuple[str, str]:
    """The naive one's time over that of the fastest, with its interval, and which that is."""
    timed = {way: run.best_ms(mode) for way, run in ways.items() if run.best(mode)}
    if "naive" not in timed:
        return "n/a", ""
    fastest = min(timed, key=lambda way: timed[way] or math.inf)
    times = paired(ways["naive"], ways[fastest], mode)
    return (ratio(times) if times and fastest != "naive" else "1"), fastest


def _bars(lines: list[Record]) -> dict[str, dict[str, Interval]]:
    """Part -> way -> how many times as fast as the naive one it is, forward+backward."""
    bars: dict[str, dict[str, Interval]] = {}
    for part, ways in _ways(lines).items():
        for way in WAYS:
            times = paired(ways.get("naive"), ways.get(way), BOTH) if way != "naive" else None
            if times:
                bars.setdefault(part, {})[way] = times
    return bars


def charts(lines: list[Record]) -> Charts:
    """How many times faster than the naive one each way is, forward+backward."""
    bars = _bars(lines)
    if not bars:
        return {}
    return {"speed-ups": lambda: bars_chart(bars, "times as fast as naive, forward+backward", 2, line_at=1)}


def answer(lines: list[Record]) -> str:
    """The part that gains most."""
    most = max((value, part, way) for part, bars in _bars(lines).items() for way, (value, _, _) in bars.items())
    return f"{most[1]}: {most[0]:.1f} times as fast as naive ({most[2]})"


# ------------------------------------------------------------------------------------------------------------ its flags


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")


def refine(options: Options) -> None:
    """On a CPU everything is in FP32: many have no 16-bit arithmetic."""
    if options.device.type == "cpu":
        options.config = options.config.replace(amp_dtype=None)


register(Study("components", __doc__, groups, text=text, charts=charts, answer=answer, add_arguments=add_arguments,
               refine=refine, no_chart="nothing was timed forward+backward beside the naive one",
               place=5))
