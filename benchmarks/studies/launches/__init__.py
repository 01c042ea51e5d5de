"""When does launching, and not the kernels, set the time, and which way of launching helps?

    python -m benchmarks launches --json launches.jsonl --chart launches
    python -m benchmarks launches --tokens 128,2048 --ways "one by one,captured by hand"

The host launches kernels one by one, the GPU runs them. Whoever is slower sets the time. A CUDA graph launches all
kernels of an iteration by one call. The ways are: one by one, the whole iteration captured by hand, PyTorch's
make_graphed_callables, and torch.compile's modes. Each is timed at several numbers of tokens, in the same rounds, after
it was checked against FP64. Predicted is max(host, kernels) / replay times as fast by graph: the host's time to launch
an iteration one by one, the time in its kernels, and the time of its replay. How many graphs an iteration launched is
counted: to skip them is silent. Then parameters and inputs are changed under each way's feet. On a CPU nothing is
launched ahead: the host's own share is the time of one token.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import statistics
from collections.abc import Sequence

import torch

from benchmarks.measure.options import count, numbers
from benchmarks.records import RESULTS
from benchmarks.records.files import file_of
from benchmarks.records.read import runs
from benchmarks.show.study import Options, Study, exit_status, open_session, register, show
from benchmarks.studies.launches import autotuned, changes, counting, tables
from benchmarks.studies.launches.counting import HOST, KEPT, LAUNCHED, OF_ONE_TOKEN
from benchmarks.studies.launches.ways import BY_HAND, COMPILED_STEP, ONE_BY_ONE, STEPS, WAYS, LaunchedSubject, case_of
from common.block.config import PRESETS, BlockConfig
from common.command_line import SIZES, Parser, tell
from common.measure.cases import Group
from common.measure.subject import Subject
from common.report.record import Record, record
from common.report.result import Result
from common.runtime import compiler, exclusive, iteration, timing
from common.runtime.iteration import LAUNCHES

GPU_TOKENS = (128, 512, 2048, 8192, 16384)
CPU_TOKENS, QUICK_TOKENS = (16, 64, 256, 1024, 4096), (64, 1024)
PROCESSES = 3                          # that try max-autotune, at the fewest tokens and at those in the middle
QUICK = ("--quick leaves out: three of five numbers of tokens, torch.compile's max-autotune modes, and what happens "
         "where parameters or inputs move")


# ----------------------------------------------------------------------------------------------------------- measuring


def config_at(tokens: int, base: BlockConfig) -> BlockConfig:
    """The shape with so many tokens: sequences as long as the base's, or one that is shorter. Raises ValueError."""
    seq_len = min(tokens, base.seq_len)
    if tokens % seq_len or tokens % 16:
        raise ValueError(f"--tokens {tokens}: give multiples of 16 up to {base.seq_len}, then of that")
    return base.replace(batch_size=tokens // seq_len, seq_len=seq_len)


def groups(options: Options) -> list[Group]:
    """A group for each number of tokens: all its ways are timed in the same rounds."""
    every = []
    profiled = 1 if options.device.type == "cuda" else 0
    for tokens in options.tokens:
        config = config_at(tokens, options.config)
        cases = [case_of(number, way, config, options.device)
                 for number in options.steps for way in ways_here(options, number, tokens)]
        if cases:
            every.append(Group(cases, profiled=profiled, limited=False, may_not_fit=True, timed=counted))
    return every


def ways_here(options: Options, number: int, tokens: int) -> list[str]:
    """Those of a step that this process times. Others time max-autotune, and the default beside it."""
    asked = {*options.ways, *([ONE_BY_ONE] if BY_HAND in options.ways else [])}
    if tokens not in options.autotuned_here:
        asked -= set(autotuned.AUTOTUNED_MODES)
    here = [way for way in STEPS[number] if way in asked]
    elsewhere = number == COMPILED_STEP and tokens in options.autotuned and not options.autotuned_here
    return [] if elsewhere and here == [ONE_BY_ONE] and BY_HAND not in options.ways else here


def run(study: Study, options: Options) -> int:
    """Time all ways, and then see what each does where something moves."""
    with exclusive.alone(options.device, study.name):
        session = open_session(study, options)
        for group in study.groups(options):
            session.measure(group)
            torch.compiler.reset()                         # its graphs would be freed amid the next group
        if not options.quick:
            changes.measure(session, options.config, options.steps, options.ways)
    lines = list(session.lines)
    if options.autotuned and not options.autotuned_here:
        lines += autotuned.measure(options, study.name)
    show(study, options, session, lines)
    if options.quick:
        tell(QUICK)
    return exit_status(of_case.status for of_case in runs(lines))


def counted(timed: Sequence[tuple[Result, Subject]], mode: str) -> list[Record]:
    """What each asked of the driver, and what its graphs keep. On a CPU the time of one token."""
    lines = []
    for result, subject in timed:
        assert isinstance(subject, LaunchedSubject)
        if subject.inputs[0].is_cuda:
            one = subject.iteration(mode)
            one.between()
            seen = counting.count(one.run)
            one.between()
            lines.append(record(result, LAUNCHED, "graphs", [seen.graphs], mode, "eager", kernels=seen.kernels,
                                copy_ms=seen.copy_ms, skipped=sorted(set(subject.skipped))))
            if subject.way == ONE_BY_ONE:
                lines.append(record(result, HOST, "ms", [counting.host_ms(one.run, one.between)], mode, "eager"))
            for launch, kept in (("eager", subject.kept.get("")), ("graph", subject.kept.get(mode))):
                if kept is not None:
                    lines.append(record(result, KEPT, "bytes", [kept], mode, launch))
        elif not compiler.holds_compiled(subject.call):
            lines.append(record(result, OF_ONE_TOKEN, "ms", [of_one_token(subject, mode)], mode, "eager"))
    return lines


def of_one_token(subject: Subject, mode: str) -> float:
    """The median time of an iteration on one token, in ms: nearly all of it is the host's own work."""
    x, dy = ([tensor.detach()[:1, :1].clone()] for tensor in (subject.inputs[0], subject.cotangents[0]))
    one = iteration.of_call(subject.call, x, dy, subject.parameters, mode)
    clock = timing.HostClock()
    clock.sample(one.run, one.between, 20)
    samples = clock.sample(one.run, one.between, 50)
    one.between()
    return statistics.median(samples)


# ------------------------------------------------------------------------------------------------------------ its flags


def named_ways(text: str) -> tuple[str, ...]:
    """"one by one,captured by hand" -> the ways. Raises ValueError."""
    named = tuple(word.strip() for word in text.split(","))
    for word in named:
        if word not in WAYS:
            raise ValueError(f"--ways {word}: there is no such way; give some of: {', '.join(WAYS)}")
    return named


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    parser.add_argument("--tokens", type=numbers, metavar="N,...", help="numbers of tokens (default: five, 128 to 16384"
                                                                        " on a GPU)")
    parser.add_argument("--ways", metavar="WAY,...", help=f"some of: {', '.join(WAYS)} (default: all)")
    parser.add_argument("--steps", type=numbers, default=tuple(STEPS), metavar="N,...", help="some of 2,3,4 (default)")
    parser.add_argument("--processes", type=count, default=PROCESSES, metavar="N",
                        help=f"that try max-autotune, whose choice is noise (default: {PROCESSES})")


def refine(options: Options) -> None:
    """Raise ValueError for tokens that make no shape and for unknown ways; set those that were not asked for."""
    on_gpu = options.device.type == "cuda"
    if not (options.preset or any(getattr(options, name) for name in SIZES)):
        small = PRESETS["gpt2" if on_gpu else "tiny"]
        options.config = small.replace(amp_dtype=options.config.amp_dtype)
    default = GPU_TOKENS if on_gpu else CPU_TOKENS
    options.tokens = tuple(sorted(set(options.tokens or (QUICK_TOKENS if options.quick else default))))
    options.ways = named_ways(options.ways) if options.ways else WAYS
    if unknown := set(options.steps) - set(STEPS):
        raise ValueError(f"--steps {min(unknown)}: give some of {', '.join(map(str, STEPS))}")
    for tokens in options.tokens:
        config_at(tokens, options.config)
    tried = not options.quick and COMPILED_STEP in options.steps and set(autotuned.AUTOTUNED_MODES) & set(options.ways)
    options.autotuned = (options.tokens[0], options.tokens[len(options.tokens) // 2]) if tried else ()
    options.autotuned_here = options.autotuned if options.processes == 1 or not on_gpu else ()
    if BY_HAND not in options.ways:
        options.launches = LAUNCHES[:1]


INTRODUCTION = """\
When launching an iteration's kernels takes longer than running them, faster kernels buy nothing. Fewer
launches do, and a graph is one."""

register(Study("launches", __doc__, groups, text=tables.text, charts=tables.charts, answer=tables.answer, run=run,
               add_arguments=add_arguments, refine=refine, no_chart="nothing was timed forward+backward", place=9,
               introduction=INTRODUCTION,
               parts={"launches when": lambda: tables.when_to_use_one(file_of(RESULTS / "h200" / "launches-gpt2"))}))
