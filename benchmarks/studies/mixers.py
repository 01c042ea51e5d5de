"""From which length on does a mixer with a state beat attention, and what does each form of it cost?

    python -m benchmarks mixers --json mixers.jsonl
    python -m benchmarks mixers --mixer SSD --lengths 1024,4096

Linear attention with a constant decay (retention), SSD (Mamba-2) and the gated delta rule, in BF16 on a GPU and FP32 on
a CPU: as a loop over steps, at once (as attention, over all pairs of steps), in chunks, in chunks compiled, and in
chunks by Triton kernels. Each is held against the recurrence in FP64, its output and every gradient. Then all of a
mixer and a length are timed in shared rounds, forward and with their backward, beside causal attention of the same
sizes by scaled_dot_product_attention. So is one step of decoding behind as many: from a state, and by attention over
its cache. --quick compiles at the longest length alone.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure.options import numbers
from benchmarks.mixers import forms
from benchmarks.mixers.mixer import (
    AT_ONCE,
    CHUNKS,
    COMPILED,
    FORMS,
    LOOP,
    MIXERS,
    TRITON,
    Decoder,
    Mix,
    Mixer,
    bytes_of_a_cache,
    bytes_of_a_step,
    errors,
    exact,
    step_errors,
    step_of,
)
from benchmarks.records.read import Run, paired, runs, verdict
from benchmarks.show.study import Options, Study, register
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.recipes.speed import pays_from
from common.block import oracle
from common.block.config import BlockConfig, dtype_name
from common.block.workload import Workload
from common.command_line import Parser
from common.measure.cases import Case, Group, Setting
from common.measure.subject import Subject, require
from common.phases import Phase
from common.report.metrics import PEAK_MEMORY
from common.report.record import Record
from common.report.result import Result
from common.runtime import compiler
from common.runtime.iteration import BOTH, FORWARD, LAUNCHES, MODES
from common.text import figures, number, ratio, table

ATTENTION = "causal attention"
STEP, STEP_COMPILED = "a step", "a step, compiled"
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LONGEST_LOOP = 2048                        # steps
MOST_SCORES = 2**33                        # bytes of all pairs of steps
SAID = """\
x attention: how many times as fast as causal attention of the same sizes, in the same rounds. f+b: forward+backward.
Error: the largest of the output and the gradients, against the recurrence in FP64."""
DECODING = """\
A step of decoding behind so many others: a mixer reads and writes its state, attention reads its cache. Error: the
larger of y's and the state's. Bytes: the length from which on attention moves more of them than a mixer."""
CHUNKS_SAID = """\
Forward+backward at the longest length, uncompiled. Longer chunks do more work inside, and less from chunk to chunk."""
PAYS = """\
Pays from: the shortest length from which on its interval is above 1 at all that were measured, f+b. FLOPs: the length
from which on its products are no more than attention's. Where it pays later, more than products takes time."""


# ----------------------------------------------------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Sizes:
    """[B, H, S, D] of q, k and v, and their dtype."""
    batch: int
    heads: int
    length: int
    width: int
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, config: BlockConfig, length: int) -> "Sizes":
        """As many sequences as the shape has tokens for, and at least one."""
        batch = max(1, config.tokens // length)
        return cls(batch, config.num_heads, length, config.head_dim, config.amp_dtype or torch.float32)

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

    def why_not(self, way: str, device: torch.device) -> str:
        """Why it can't run there, would take too long or too much memory; "" where it would not."""
        if way == TRITON and device.type != "cuda":
            return "its Triton kernels need a GPU"
        scores = 4 * self.batch * self.heads * self.length**2
        if way == LOOP and self.length > LONGEST_LOOP:
            return f"a loop over {self.length:,} steps: it is timed up to {LONGEST_LOOP:,}"
        if way == AT_ONCE and scores > MOST_SCORES:
            return f"all pairs of steps would take {scores / 2**30:,.0f} GiB"
        return ""


def mix_by(mixer: Mixer, way: str, chunk: int | None = None) -> Mix:
    """The mixer in that form; in chunks of so many steps where that is given."""
    mix = mixer.by(FORMS[way] if chunk is None else functools.partial(forms.chunked, chunk=chunk))
    if way != COMPILED:
        return mix
    compiler.allow_many_graphs()
    return torch.compile(mix, dynamic=False)


def case(mixer: Mixer, way: str, sizes: Sizes, device: torch.device, chunk: int | None = None) -> Case:
    """A row by one way; in chunks of so many steps where that is given."""
    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        mix = mix_by(mixer, way, chunk)
        inputs = sizes.inputs(mixer, setting)
        dy = _cotangent(inputs[0], setting.seed + 1)
        setting.say(Phase.CHECKING)
        found = errors(mix, mixer, inputs, dy, _truth(mixer, sizes, setting.seed, setting.device))
        result.errors = {what: (error, sizes.gates[what != "y"]) for what, error in found.items()}
        for what, (error, gate) in result.errors.items():
            require(what, error, gate)
        return _subject(mix, inputs, dy, sizes)
    more = {} if chunk is None else {"chunk": chunk}
    return _case(mixer.name, way, sizes, prepare, mixer.name, more, sizes.why_not(way, device))


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
        return _subject(attend, inputs, _cotangent(inputs[0], setting.seed + 1), sizes)
    return _case(ATTENTION, "SDPA", sizes, prepare, mixer.name)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The library's, by the first of `BACKENDS` that takes it."""
    with sdpa_kernel(BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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
        result.errors = {what: (error, sizes.gates[0]) for what, error in found.items()}
        for what, (error, gate) in result.errors.items():
            require(what, error, gate)
        return _subject(Decoder(step, state), inputs, torch.zeros_like(inputs[0]), sizes)
    return _case(mixer.name, way, sizes, prepare, mixer.name, {"decodes": True})


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
        error = oracle.relative_error(y, weights @ values.double())
        result.errors = {"y": (error, sizes.gates[0])}
        require("y", error, sizes.gates[0])
        return _subject(attend_to_all, inputs[:3], torch.zeros_like(inputs[0]), sizes)
    return _case(ATTENTION, "SDPA", sizes, prepare, mixer.name, {"decodes": True})


def _inputs_of_a_step(mixer: Mixer, sizes: Sizes, setting: Setting) -> list[Tensor]:
    shape = sizes.batch, sizes.heads, 1, sizes.width
    return [each.detach() for each in mixer.inputs(shape, setting.seed + 1, setting.device, sizes.dtype)]


def _state_behind(mixer: Mixer, sizes: Sizes, setting: Setting) -> Tensor:
    """The state behind a whole sequence."""
    with torch.no_grad():
        return forms.chunked(mixer.given(*sizes.inputs(mixer, setting)))[1]


def _case(name: str, way: str, sizes: Sizes, prepare, beside: str, more: dict | None = None, missing: str = "") -> Case:
    variant = {"way": way, "size": list(sizes.shape), "beside": beside, **(more or {})}
    return Case(name, prepare, parameter_dtype=sizes.dtype, variant=variant, missing=missing,
                work={"q, k, v": f"{dtype_name(sizes.dtype)} {list(sizes.shape)}"},
                workload=Workload(dtype_name(sizes.dtype), tokens=sizes.batch * sizes.length),
                that_fits=lambda total: "give shorter ones by --lengths")


def _subject(mix: Mix, inputs: list[Tensor], dy: Tensor, sizes: Sizes) -> Subject:
    workload = Workload(dtype_name(sizes.dtype), tokens=sizes.batch * sizes.length)
    return Subject(mix, [each.detach() for each in inputs], [dy], {}, sizes.gates, workload)


def _cotangent(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator(like.device).manual_seed(seed), device=like.device,
                       dtype=like.dtype)


def groups(options: Options) -> Iterator[Group]:
    """One for each mixer and length."""
    for length in options.lengths:
        for name in options.mixer or MIXERS:
            mixer, sizes = MIXERS[name], Sizes.of(options.config, length)
            ways = [way for way in FORMS if way != COMPILED or not options.quick or length == max(options.lengths)]
            cases = [control(mixer, sizes), *(case(mixer, way, sizes, options.device) for way in ways)]
            cases += [case(mixer, f"chunks of {size}", sizes, options.device, size) for size in options.chunks]
            yield Group(cases, calibrated=False, limited=False, may_not_fit=True)
            steps = [step_control(mixer, sizes), *(step_case(mixer, way, sizes) for way in (STEP, STEP_COMPILED))]
            yield Group(steps, modes=(FORWARD,), calibrated=False, limited=False, may_not_fit=True)


# ---------------------------------------------------------------------------------------------------- what it tells


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records: a table for each length, and from which on each pays."""
    by_length, steps = _by_length(lines), _by_length(lines, decoding=True)
    blocks = [f"S {length:,}\n\n{_table_of(every, width)}" for length, every in by_length.items()]
    failed = dict.fromkeys(f"{run.case['name']}, {run.variant['way']}: {run.status}: {run.info['reason']}"
                           for every in (*by_length.values(), *steps.values()) for run in every if run.status != "ok")
    shown = [*blocks, SAID, *_crossover(by_length, width), *_by_chunk(by_length, width), *_decoding(steps, width),
             "\n".join(failed)]
    return framed(lines, shown, [run for run in runs(lines) if run.status == "ok"])


def _table_of(every: list[Run], width: int | None) -> str:
    rows = []
    for run in every:
        if run.status != "ok":
            continue
        found = run.errors().values()
        memory = run.figure(PEAK_MEMORY, BOTH, "eager")
        name = f"{ATTENTION}, beside {run.variant['beside']}" if run.case["name"] == ATTENTION else run.case["name"]
        rows.append([name, run.variant["way"], f"{max(found):.1e}" if found else "",
                     *(figures(ms) if (ms := run.best_ms(mode)) else "" for mode in MODES),
                     *(_times(every, run, mode) for mode in MODES),
                     "" if memory is None else number(memory * PEAK_MEMORY.scale, ".2f")])
    headers = ["mixer", "by", "error", "forward ms", "f+b ms", "x attention forward", "x attention f+b", "GiB"]
    return table(rows, headers, width, keys=2)


def _by_length(lines: list[Record], decoding: bool = False) -> dict[int, list[Run]]:
    """Those of whole sequences, or of a step of decoding."""
    found: dict[int, list[Run]] = {}
    for run in runs(lines):
        if run.variant.get("decodes", False) == decoding:
            found.setdefault(run.variant["size"][2], []).append(run)
    return found


def _decoding(by_length: dict[int, list[Run]], width: int | None) -> list[str]:
    """The table of a step of decoding, over all lengths."""
    found: dict[tuple[str, str], dict[int, Run]] = {}
    for length, every in by_length.items():
        for run in every:
            if run.status == "ok" and run.case["name"] != ATTENTION:
                found.setdefault((run.case["name"], run.variant["way"]), {})[length] = run
    if not found:
        return []
    rows, lengths = [], sorted(by_length)
    for key, of in found.items():
        times = {length: each for length, run in of.items()
                 if (each := _beside_attention(by_length[length], run, FORWARD))}
        rows.append([*key, f"{max(max(run.errors().values()) for run in of.values()):.1e}"])
        for length in lengths:
            ms = of[length].best_ms(FORWARD) if length in of else None
            rows[-1] += [figures(ms) if ms else "", f"{times[length][0]:.2f}" if length in times else ""]
        rows[-1] += [pays_from(times), _larger_cache_from(by_length)]
    headers = ["a step of decoding", "by", "error"]
    for length in lengths:
        headers += [f"S {length:,} ms", "x attention"]
    return [table(rows, [*headers, "pays from", "bytes"], width, keys=2), DECODING]


def _larger_cache_from(by_length: dict[int, list[Run]]) -> str:
    """For each width of a head, and each dtype of a cache."""
    caches = sorted({(run.variant["size"][3], getattr(torch, run.info["parameter_dtype"]).itemsize)
                     for every in by_length.values() for run in every})
    lengths = [bytes_of_a_step(width) // bytes_of_a_cache(1, width, itemsize) for width, itemsize in caches]
    return " and ".join(f"{length:,}" for length in lengths)


def _beside_attention(every: list[Run], run: Run, mode: str) -> tuple[float, float, float] | None:
    """How many times as fast as attention in its rounds, with the interval; None of attention itself."""
    attention = next((each for each in every if each.case["name"] == ATTENTION
                      and each.variant["beside"] == run.variant["beside"]), None)
    return None if run is attention else paired(attention, run, mode)


def _times(every: list[Run], run: Run, mode: str) -> str:
    times = _beside_attention(every, run, mode)
    return ratio(times) + verdict(*times[1:]) if times else ""


def _crossover(by_length: dict[int, list[Run]], width: int | None) -> list[str]:
    cells: dict[tuple[str, str], dict[int, tuple[float, float, float]]] = {}
    for length, every in by_length.items():
        for run in every:
            if "chunk" not in run.variant and (times := _beside_attention(every, run, BOTH)):
                cells.setdefault((run.case["name"], run.variant["way"]), {})[length] = times
    if not cells or len(by_length) < 2:
        return []
    lengths = sorted(by_length)
    width_of_a_head = {run.variant["size"][3] for every in by_length.values() for run in every}
    rows = []
    for (name, way), of in cells.items():
        measured = [f"{of[length][0]:.2f}" if length in of else "" for length in lengths]
        rows.append([name, way, *measured, pays_from(of), _as_few_flops_from(MIXERS[name], way, width_of_a_head)])
    headers = ["x attention, f+b", "by", *(f"S {length:,}" for length in lengths), "pays from", "FLOPs"]
    return [table(rows, headers, width, keys=2), PAYS]


def _by_chunk(by_length: dict[int, list[Run]], width: int | None) -> list[str]:
    """At the longest length: which chunk is the fastest, and which has the fewest FLOPs."""
    every = by_length[max(by_length)] if by_length else []
    times: dict[str, dict[int, float]] = {}
    for run in every:
        chunk = forms.CHUNK if run.variant["way"] == CHUNKS else run.variant.get("chunk")
        if chunk and run.status == "ok" and (ms := run.best_ms(BOTH)):
            times.setdefault(run.case["name"], {})[chunk] = ms
    sizes = sorted(set().union(*times.values()))
    rows = []
    for name, of in times.items():
        _, _, steps, width_of_a_head = every[0].variant["size"]
        flops = {size: MIXERS[name].flops_by_chunks_of(size, steps, width_of_a_head) for size in of}
        rows.append([name, *(figures(of[size]) if size in of else "" for size in sizes),
                     min(of, key=of.__getitem__), min(flops, key=flops.__getitem__)])
    headers = ["f+b by chunks", *(f"of {size}, ms" for size in sizes), "fastest", "fewest FLOPs"]
    return [table(rows, headers, width), CHUNKS_SAID] if len(sizes) > 1 else []


def _as_few_flops_from(mixer: Mixer, way: str, widths: set[int]) -> str:
    lengths = [mixer.as_few_flops_from(way, width) for width in sorted(widths)]
    return " and ".join("never" if length is None else f"{length:,}" for length in lengths)


def answer(lines: list[Record]) -> str:
    """The fastest mixer at the longest length, beside attention."""
    by_length = _by_length(lines)
    every = by_length[max(by_length)] if by_length else []
    found = [(times[0], run) for run in every if (times := _beside_attention(every, run, BOTH))]
    if not found:
        return NO_ANSWER
    faster, fastest = max(found, key=lambda each: each[0])
    where = "on a CPU " if fastest.info["device"] == "cpu" else ""
    name = f"{fastest.case['name']} ({fastest.variant['way']})"
    return (f"{where}at S {max(by_length):,} {name} is {faster:.2f} times as fast as causal attention, "
            "forward+backward")


# ------------------------------------------------------------------------------------------------------- how it is run


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    parser.add_argument("--mixer", choices=MIXERS, action="append", help="only this one; may be repeated")
    parser.add_argument("--chunks", type=numbers, metavar="LIST", default=(),
                        help="by chunks of so many steps, too, beside the usual ones of 64")
    parser.add_argument("--lengths", type=numbers, metavar="LIST",
                        help="lengths of a sequence, of as many as the shape has tokens for (default: "
                             "512,2048,8192,16384; on a CPU 256,1024)")


def refine(options: Options) -> None:
    """Lengths."""
    on_gpu = options.device.type == "cuda"
    options.config = options.config.replace(amp_dtype=torch.bfloat16 if on_gpu else None)
    options.launches = LAUNCHES[:1]
    if options.lengths is None:
        every = (512, 2048, 8192, 16384) if on_gpu else (256, 1024)
        shortest = (512, 2048) if on_gpu else (128, 256)
        options.lengths = shortest if options.quick else every
    if options.quick and not on_gpu:
        options.config = options.config.replace(batch_size=1, seq_len=min(options.lengths))


register(Study("mixers", __doc__, groups, text=text, answer=answer, add_arguments=add_arguments, refine=refine,
               compiles_anew=True, long=True, no_chart="it draws none", place=12))
