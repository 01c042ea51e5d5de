"""What does a mask cost, and a bias, by every way to have it?

    python -m benchmarks patterns --json patterns.jsonl --chart patterns
    python -m benchmarks patterns --pattern "window 256" --lengths 2048,16384

Attention under each pattern (windows, a prefix, documents, padding, ALiBi, T5's bias, a soft cap, grouped queries, more
keys than queries, differential attention), and a decode step over a paged cache: by hand, by
scaled_dot_product_attention with a dense mask, the formula compiled, FlexAttention, Transformer Engine, packed
sequences and a Triton kernel, where they have it. Each is held against FP64 on a few heads. Then all of a pattern and a
length are timed in shared rounds, forward and with their backward, beside plain causal attention of the same sizes (a
decode step beside one over a full cache in one piece). What is made beforehand has columns of its own: the mask, made a
second time, and the first calls, which compile. Percent are of the limit by pairs that are seen and bytes that must
move.
`from benchmarks.patterns import attention` gives the fastest of them for a model of one's own.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.measure.options import lengths
from benchmarks.patterns import checking
from benchmarks.patterns.ways import SDPA, WAYS
from benchmarks.records import RESULTS
from benchmarks.records.files import file_of
from benchmarks.records.read import read
from benchmarks.show.study import Options, Study, register
from benchmarks.studies.patterns import tables
from benchmarks.studies.patterns.subjects import (
    Beforehand,
    PatternSubject,
    built,
    finish,
    first_calls,
    kernel_of,
    rejected,
)
from benchmarks.studies.patterns.tasks import PATTERNS, Task
from common.block.config import BlockConfig
from common.command_line import Parser
from common.measure.cases import Case, Group, Setting
from common.phases import Phase
from common.report.result import Result
from common.runtime import timing
from common.runtime.iteration import LAUNCHES

NOT_QUICK = "full", "window 1024", "key padding"       # each much like another one: compiling takes most of a quick run


# ----------------------------------------------------------------------------------------------------------- the cases


def case(name: str, way: str, task: Task, config: BlockConfig, beside: str = "", length: int | None = None) -> Case:
    """A row by one way; or the control, `beside` another row of that length."""
    def prepare(setting: Setting, result: Result) -> PatternSubject:
        has_backward = task.has_backward(way)
        setting.say(Phase.BUILDING)
        attend, mask_ms = built(way, task)
        given = task.inputs(setting.seed)
        if not has_backward:
            given = [t.detach() for t in given]
        setting.say(Phase.COMPILING)
        seen = Beforehand(mask_ms, first_calls(attend, given, has_backward, setting.device))
        setting.say(Phase.CHECKING)
        errors = task.check(attend, given, setting.seed + 1, has_backward)
        result.errors = {what: (error, None) for what, error in errors.items()}
        if way == SDPA:
            seen = replace(seen, kernel=kernel_of(attend, given, setting.device), rejected=rejected(task, given))
        with torch.no_grad():
            dy = checking.cotangent(attend(*given), setting.seed + 1)
        return PatternSubject(attend, given, task, dy, has_backward, seen)

    variant = {"length": length or task.length, "way": way} | ({"beside": beside} if beside else {})
    return Case(tables.CONTROL if beside else name, prepare, config, parameter_dtype=task.shape.dtype, variant=variant,
                workload=task.workload(), that_fits=lambda total: "give shorter ones by --lengths")


def group(name: str, length: int, config: BlockConfig, device: torch.device) -> Group:
    """All ways of a pattern at a length, and causal attention beside them; one row where it is none at that length."""
    dtype = config.amp_dtype or torch.float32
    try:
        task = PATTERNS[name].at(length, config, dtype, device)
    except ValueError as error:
        causal = PATTERNS["causal"].at(length, config, dtype, device)
        missing = replace(case(name, "every way", causal, config), workload=None, missing=str(error))
        return Group([missing])
    cases = [case(name, way, task, config) for way in WAYS]
    control = case(name, SDPA, task.control(), config, beside=name, length=length)
    return Group([*cases, control], calibrated=False, watched=False, may_not_fit=True, timed=finish, clock=_clock)


def _clock(device: torch.device) -> timing.Clock:
    """In shorter stretches than a block: there are many ways, and most of them take milliseconds."""
    clock = timing.clock_for(device)
    clock.settle_ms, clock.burst_ms = clock.settle_ms / 2, clock.burst_ms / 4
    return clock


def groups(options: Options) -> Iterator[Group]:
    """One group a pattern and length."""
    for length in options.lengths:
        for name in options.pattern or PATTERNS:
            yield group(name, length, options.config, options.device)


# ------------------------------------------------------------------------------------------------------- how it is run


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    add = parser.add_argument
    add("--pattern", choices=PATTERNS, action="append",
        help=f"only this one; may be repeated (default: all; a quick run leaves out {', '.join(NOT_QUICK)})")
    add("--lengths", type=lengths, metavar="LIST",
        help="lengths of a sequence, of as many as the shape has tokens for (default: 2048,16384; on a CPU 512,2048)")


def refine(options: Options) -> None:
    """Lengths, and on a GPU BF16: scores of FP16 would overflow under some patterns."""
    on_gpu = options.device.type == "cuda"
    options.config = options.config.replace(amp_dtype=torch.bfloat16 if on_gpu else None)
    options.launches = LAUNCHES[:1]                        # long sequences: no host holds up such kernels
    if options.quick and not options.pattern:
        options.pattern = [name for name in PATTERNS if name not in NOT_QUICK]
    if options.lengths is None:
        every = (2048, 16384) if on_gpu else (512, 2048)
        options.lengths = every[:1] if options.quick else every
    if options.quick and not on_gpu:
        options.config = options.config.replace(batch_size=1, seq_len=min(options.lengths))


def _summary() -> str:
    return f"```\n{tables.summary(read(file_of(RESULTS / 'h100' / 'patterns-te-tutorial')), 120)}\n```"


register(Study("patterns", __doc__, groups, text=tables.text, charts=tables.charts, answer=tables.answer,
               add_arguments=add_arguments, refine=refine, compiles_anew=True, long=True, place=9,
               parts={"patterns summary": _summary}, no_chart="nothing was timed beside causal attention"))
