"""From which length on does a mixer with a state beat attention, and what does each form of it cost?

    python -m benchmarks mixers --json mixers.jsonl --chart mixers
    python -m benchmarks mixers --mixer SSD --part mixer --lengths 1024,4096

Linear attention with a constant decay (retention), SSD (Mamba-2) and the gated delta rule, in BF16 on a GPU and FP32 on
a CPU: as a loop over steps, at once (as attention, over all pairs of steps), in chunks, in chunks compiled, and in
chunks by Triton kernels; beside flash-linear-attention and mamba-ssm where they are installed. Each is held against the
recurrence in FP64, its output and every gradient. Then all of a mixer and a length are timed in shared rounds, forward
and with their backward, beside causal attention of the same sizes by scaled_dot_product_attention: alone, as the block
of the five steps with the mixer in attention's place, and as one step of decoding behind so many others, from a state
and by attention over its cache. --quick leaves out the block and retention, times loops at the shortest length alone,
and compiles SSD at the longest.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
from collections.abc import Iterable, Iterator

import torch

from benchmarks.measure.options import lengths
from benchmarks.mixers.mixer import COMPILED, LOOP, MIXERS, WAYS, Mixer
from benchmarks.mixers.peers import PEERS
from benchmarks.records import RESULTS
from benchmarks.records.files import file_of
from benchmarks.records.read import read
from benchmarks.show.study import Options, Study, register
from benchmarks.studies.mixers import tables
from benchmarks.studies.mixers.subjects import (
    BLOCK,
    COMPILED_BLOCKS,
    DECODING,
    MIXER,
    PARTS,
    STEP,
    STEP_COMPILED,
    Sizes,
    block_control,
    case,
    control,
    mixer_block_case,
    of_length,
    peer_case,
    step_case,
    step_control,
)
from common.command_line import Parser
from common.measure.cases import Case, Group
from common.runtime.iteration import FORWARD, LAUNCHES

COMPILED_IF_QUICK = "SSD"
NOT_QUICK = "linear attention, decay", BLOCK           # much like SSD; and compiling blocks takes minutes
EAGER = LAUNCHES[:1]                                   # a step of decoding is launch-bound, nothing else here is


def groups(options: Options) -> Iterator[Group]:
    """One for each mixer, length and part."""
    by_part = {MIXER: _alone, BLOCK: _in_a_block, DECODING: _decoding}
    for length in options.lengths:
        for name in options.mixer:
            for part in options.part:
                yield from by_part[part](MIXERS[name], length, options)


def _ways(mixer: Mixer, length: int, options: Options) -> list[str]:
    """Loops and the compiler take most of a run."""
    if options.way:
        return [way for way in options.way if way in WAYS]
    left_out = set()
    if options.quick and length != min(options.lengths):
        left_out.add(LOOP)
    if not _compiles(mixer, length, options):
        left_out.add(COMPILED)
    return [way for way in WAYS if way not in left_out]


def _compiles(mixer: Mixer, length: int, options: Options) -> bool:
    return not options.quick or (mixer.name == COMPILED_IF_QUICK and length == max(options.lengths))


def _alone(mixer: Mixer, length: int, options: Options) -> Iterator[Group]:
    sizes, device = Sizes.of(of_length(options.config, length)), options.device
    cases = [control(mixer, sizes), *(case(mixer, way, sizes, device) for way in _ways(mixer, length, options))]
    cases += [peer_case(mixer, name, sizes, device) for name in PEERS if name in (options.way or PEERS)]
    cases += [case(mixer, f"chunks of {size}", sizes, device, size) for size in options.chunks]
    yield Group(cases, launches=EAGER, calibrated=False, metered=device.type == "cuda", may_not_fit=True)


def _in_a_block(mixer: Mixer, length: int, options: Options) -> Iterator[Group]:
    config, device = of_length(options.config, length), options.device
    ways = [way for way in options.way or WAYS if way in WAYS]
    kinds = sorted({way in COMPILED_BLOCKS for way in ways})
    cases: list[Case] = [block_control(mixer, compiled, config, device) for compiled in kinds]
    cases += [mixer_block_case(mixer, way, config, device) for way in ways]
    yield Group(cases, launches=EAGER, calibrated=False, metered=device.type == "cuda", may_not_fit=True)


def _decoding(mixer: Mixer, length: int, options: Options) -> Iterator[Group]:
    sizes = Sizes.of(of_length(options.config, length))
    ways = (STEP, STEP_COMPILED) if _compiles(mixer, length, options) else (STEP,)
    steps = [step_control(mixer, sizes), *(step_case(mixer, way, sizes) for way in ways)]
    yield Group(steps, modes=(FORWARD,), calibrated=False, limited=False, may_not_fit=True)


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    add = parser.add_argument
    add("--mixer", choices=MIXERS, action="append", help="only this one; may be repeated")
    add("--part", choices=PARTS, action="append",
        help="the mixer alone, the block around it, or a step of decoding; may be repeated (default: all)")
    add("--way", choices=(*WAYS, *PEERS), action="append",
        help="only this way, beside attention; may be repeated (a step of decoding has its own)")
    add("--chunks", type=lengths, metavar="LIST", default=(),
        help="by chunks of so many steps, too, beside the usual ones of 64")
    add("--lengths", type=lengths, metavar="LIST",
        help="lengths of a sequence, of as many as the shape has tokens for (default: 512,2048,8192,16384; on a CPU "
             "256,1024)")


def refine(options: Options) -> None:
    """Lengths, mixers and parts."""
    options.mixer = options.mixer or _unless_quick(MIXERS, options)
    options.part = options.part or _unless_quick(PARTS, options)
    if options.part == [BLOCK] and options.way and not set(options.way) & set(WAYS):
        raise ValueError(f"--way: a block is built by {', '.join(WAYS)} alone")
    on_gpu = options.device.type == "cuda"
    options.config = options.config.replace(amp_dtype=torch.bfloat16 if on_gpu else None)
    if options.lengths is None:
        every = (512, 2048, 8192, 16384) if on_gpu else (256, 1024)
        shortest = (512, 2048) if on_gpu else (64, 256)
        options.lengths = shortest if options.quick else every
    if options.quick and not on_gpu:
        options.config = options.config.replace(batch_size=1, seq_len=min(options.lengths))


def _unless_quick(every: Iterable[str], options: Options) -> list[str]:
    return [name for name in every if not options.quick or name not in NOT_QUICK]


def _summary() -> str:
    return f"```\n{tables.summary(read(file_of(RESULTS / 'h100' / 'mixers-te-tutorial')), 120)}\n```"


register(Study("mixers", __doc__, groups, text=tables.text, charts=tables.charts, answer=tables.answer,
               add_arguments=add_arguments, refine=refine, compiles_anew=True, long=True, place=12,
               parts={"mixers summary": _summary},
               no_chart="it takes two lengths, timed with their backward"))
