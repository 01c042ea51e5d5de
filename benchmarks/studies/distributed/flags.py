"""The flags of `distributed`, and what is wrong with them as far as that is known before any process starts."""
import math
from pathlib import Path

import torch

from benchmarks.measure.options import count, numbers
from benchmarks.show.study import Options
from benchmarks.studies.distributed import checkpoints, launching
from benchmarks.studies.distributed.layout import EXAMPLES, parsed
from benchmarks.studies.distributed.sharding import AUTOCAST, POLICY, Sharding
from common import steps
from common.block.config import DTYPES
from common.block.traits import amp_default
from common.command_line import Parser, try_timeline

LAYERS, STEPS = 4, 4
REDUCED_IN = {name: DTYPES[name] for name in ("float32", "bfloat16")}


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    add = parser.add_argument
    add("--parallel", default="fsdp", metavar="LAYOUT", help=f"how to spread it: {EXAMPLES} (default: fsdp)")
    add("--ranks", type=count, metavar="N", help="start so many processes on this machine, one a GPU where it has them")
    add("--simulate", type=numbers, metavar="N,...",
        help="count in this process what the first of so many ranks would move; nothing is sent")
    add("--published", action="store_true", help="with --simulate: the model beside what others have published")
    add("--step", type=int, default=2, choices=range(5), help="whose blocks (default: 2)")
    add("--layers", type=count, default=LAYERS, metavar="N", help=f"of the stack (default: {LAYERS})")
    add("--precision", choices=(AUTOCAST, POLICY), default=AUTOCAST,
        help="who casts to 16 bits: the block's own autocast, or FSDP's policy, LayerNorm and residual too")
    add("--checkpoint", metavar="DIR", help="train some steps, save each in there, and go on from the newest")
    add("--steps", type=count, default=STEPS, metavar="N", help=f"to train up to, with --checkpoint (default: {STEPS})")
    add("--keep-gathered", action="store_true",
        help="keep gathered parameters for the backward: reshard_after_forward=False")
    add("--prefetch", type=int, default=Sharding.prefetch, metavar="N",
        help=f"layers to gather ahead, 0 for none (default: {Sharding.prefetch})")
    add("--reduce-dtype", choices=REDUCED_IN, default="float32", help="that gradients are reduced in (float32)")
    add("--divide-by", type=float, metavar="X",
        help="what reduced gradients are divided by (default: the number of batches, which gives their mean)")
    add("--profile", metavar="FILE", help="write a timeline of one forward+backward of the first rank, for Perfetto")
    add("--timeout", type=int, default=300, metavar="S", help="seconds that a collective may wait (default: 300)")


def refine(options: Options) -> None:
    """Raise ValueError for ranks and layouts that can't be, before anything is started."""
    if options.prefetch < 0:
        raise ValueError(f"--prefetch {options.prefetch}: give 0 or more layers")
    if options.divide_by is not None and not 0 < options.divide_by < math.inf:
        raise ValueError(f"--divide-by {options.divide_by}: give a number above 0")
    options.sharding = Sharding(options.precision, not options.keep_gathered, options.prefetch,
                                REDUCED_IN[options.reduce_dtype], options.divide_by)
    multiplied_on = torch.device("cuda") if options.simulate else options.device         # what is simulated is GPUs
    traits = steps.load(options.step).traits
    casts = traits.autocast or options.precision == POLICY
    amp_dtype = amp_default(multiplied_on, traits)[0] if casts else None
    options.config = options.config.replace(dropout=0.0, amp_dtype=amp_dtype)
    options.foreseen = 0
    if options.simulate:
        return _refine_simulated(options)
    try_timeline(options.profile, options.json)
    if options.published:
        raise ValueError("--published: it belongs to --simulate, whose model it judges")
    own = launching.place()
    if own and options.ranks and own.ranks != options.ranks:
        raise ValueError(f"--ranks {options.ranks}: the launcher has started {own.ranks}; leave it out")
    ranks = own.ranks if own else options.ranks
    if not ranks:
        raise ValueError("it runs as several ranks: give --ranks N, or start it by torchrun --nproc-per-node N -m "
                         "benchmarks distributed")
    if options.device.type == "cuda" and ranks > torch.cuda.device_count() and not own:
        raise ValueError(f"--ranks {ranks}: this machine has {torch.cuda.device_count()} GPUs, one a rank; give fewer, "
                         "or --device cpu")
    if own:
        launching.check_port(own)
    if options.timeout < 1:
        raise ValueError(f"--timeout {options.timeout}: give seconds from 1 on")
    options.layout = parsed(options.parallel, ranks)
    options.layout.check(options.config, steps.load(options.step))
    if options.divide_by and options.layout.shard == 1:
        raise ValueError(f"--divide-by {options.divide_by:g} --parallel {options.layout}: torch 2.14 divides twice "
                         "where no parameter is sharded; give fsdp, or leave one of them out")
    if options.checkpoint and traits.fp8:
        raise ValueError(f"--step {options.step} --checkpoint: FP8's scales are no part of a checkpoint; "
                         "give another step")
    if options.checkpoint:
        options.checkpoint = str(Path(options.checkpoint).resolve())
        options.about = checkpoints.about(options.config, options.layers, options.step, options.layout, options.seed)
        options.found = checkpoints.latest(options.checkpoint, options.about)


def _refine_simulated(options: Options) -> None:
    """Raise ValueError for what can't be simulated."""
    if options.ranks:
        raise ValueError("--simulate and --ranks: give one of them; a simulation starts no ranks")
    if options.profile:
        raise ValueError("--profile: nothing runs with --simulate; leave it out")
    traits = steps.load(options.step).traits
    if traits.fp8:
        raise ValueError(f"--step {options.step} --simulate: Transformer Engine's modules need data; its parameters "
                         "are those of step 2")
    options.layouts = [parsed(options.parallel, ranks) for ranks in options.simulate]
    for layout in options.layouts:
        layout.check(options.config, steps.load(options.step))
