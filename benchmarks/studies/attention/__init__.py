"""What does each rung of attention by hand in CUDA C++ buy, on the way to cuDNN's speed?

    python -m benchmarks attention --json attention.jsonl --chart attention
    python -m benchmarks attention --width 128 --mask causal --lengths 8192 --way "9 ping pong" --way cuDNN
    python -m benchmarks attention --pass backward

Attention, softmax(q k^T / sqrt(D)) v, in BF16: files of one idea each, ten for the forward and four for the backward,
from tiles on ordinary cores to warps that only copy and a softmax under products (benchmarks/kernels/cuda/attention),
beside the kernels of cuDNN, of FlashAttention in PyTorch, of Triton by hand and of FlexAttention. Each is held against
FP64, then all of a pass, a width, a mask and a length are timed in shared rounds. TFLOP/s count 4 S^2 D for each head,
10 S^2 D in the backward, half of it under a causal mask. The series needs nvcc and a Hopper GPU. --quick leaves out
FlexAttention and the two lengths in the middle.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import functools
import itertools
from collections.abc import Iterator

import torch

from benchmarks.kernels.cuda import series
from benchmarks.measure.options import lengths
from benchmarks.records import RESULTS
from benchmarks.records.files import file_of
from benchmarks.records.read import read
from benchmarks.show.study import Options, Study, register
from benchmarks.studies.attention import stalls, tables
from benchmarks.studies.attention.subjects import FLEX, LIBRARIES, MASKS, PASSES, RUNGS_OF, WAYS, case
from common.command_line import Parser
from common.measure.cases import Group
from common.runtime.iteration import BACKWARD, FORWARD, LAUNCHES

EAGER = LAUNCHES[:1]                       # a table marks where a forward takes no longer than its launch


def groups(options: Options) -> Iterator[Group]:
    """One for each pass, width, mask and length."""
    every = itertools.product(options.passes, options.width, options.mask, options.lengths)
    for mode, width, mask, length in every:
        size = max(1, options.config.tokens // length), options.config.hidden_size // width, length, width
        if ways := _ways(options, mode):
            cases = [case(way, mask, size, options, mode) for way in ways]
            yield Group(cases, modes=(mode,), launches=EAGER, calibrated=False, may_not_fit=True)


def _ways(options: Options, mode: str) -> list[str]:
    """Those that have that pass."""
    return [way for way in options.way if way in RUNGS_OF[mode] or way in LIBRARIES]


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    add = parser.add_argument
    add("--pass", dest="passes", choices=PASSES, action="append", help="only this one (default: both)")
    add("--way", choices=WAYS, action="append", help="only this one; may be repeated")
    add("--mask", choices=MASKS, action="append", help="only this one (default: both)")
    add("--width", type=int, choices=series.WIDTHS, action="append", help="of a head (default: both)")
    add("--lengths", type=lengths, metavar="LIST",
        help="lengths of a sequence, of as many as the shape has tokens for (default: 512,2048,8192,16384; on a CPU "
             "128,512)")


def refine(options: Options) -> None:
    """Passes, ways, masks, widths and lengths. Raises ValueError for a width that the shape can't be cut into, and
    where no way has a pass that is asked for.
    """
    on_gpu = options.device.type == "cuda"
    every = (512, 2048, 8192, 16384) if on_gpu else (128, 512)
    options.lengths = options.lengths or ((every[0], every[-1]) if options.quick else every)
    options.mask = options.mask or MASKS
    options.passes = options.passes or PASSES
    options.way = options.way or [way for way in WAYS if not options.quick or way != FLEX]
    for mode in options.passes:
        if options.passes is not PASSES and not _ways(options, mode):
            raise ValueError(f"--pass {mode}: no --way has it; give {', '.join(RUNGS_OF[mode])} or a library")
    options.config = options.config.replace(amp_dtype=torch.bfloat16 if on_gpu else None)
    E = options.config.hidden_size
    options.width = options.width or [width for width in series.WIDTHS[::-1] if E % width == 0] or [min(series.WIDTHS)]
    for head_width in options.width:
        if E % head_width:
            raise ValueError(f"--width {head_width}: the hidden size {E} is no multiple of it; give another by "
                             "--hidden-size")


def _recorded(mode: str) -> str:
    return f"```\n{tables.summary(read(file_of(RESULTS / 'h100' / 'attention-te-tutorial')), mode, 120)}\n```"


def _stalls() -> str:
    return f"```\n{stalls.text(RESULTS / 'h100' / 'attention-stalls.csv', 120)}\n```"


register(Study("attention", __doc__, groups, text=tables.text, charts=tables.charts, answer=tables.answer,
               add_arguments=add_arguments, refine=refine, compiles_anew=True, place=13,
               parts={"attention rungs": functools.partial(_recorded, FORWARD),
                      "attention backward rungs": functools.partial(_recorded, BACKWARD), "attention stalls": _stalls},
               no_chart="it takes two rungs"))
