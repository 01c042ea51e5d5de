"""Is a block that is spread over several GPUs still the same block, what does it move, and what does that cost?

    python -m benchmarks distributed --ranks 2 --parallel fsdp --preset tiny
    torchrun --standalone --nproc-per-node 2 -m benchmarks distributed --parallel fsdp --preset tiny

A stack of a step's blocks is spread by FSDP2 (fsdp, and hsdp on two dimensions) and by tensor parallelism (tp, with
sequence parallelism tp:2+sp), all of it torch.distributed's own. Each run is first checked in FP64 at a tiny shape, and
then in its own precision at the shape asked for: the loss, the output, the gradients of the input and of every
parameter, and one step of AdamW, each against one process in FP64 on the same global batch. batch_size is that of one
rank. Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted; of a rank that fails, that rank's.
"""
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.measure.options import count
from benchmarks.records.read import Run, extra, runs, values
from benchmarks.show.study import Options, Study, exit_status, open_session, register, show
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.distributed import launching, proof
from benchmarks.studies.distributed.layout import EXAMPLES, Layout, parsed
from benchmarks.studies.distributed.parallel import AUTOCAST, POLICY, Sharding, build, mesh_of
from benchmarks.studies.distributed.proof import BRANCH, GRADIENT, INPUT, LOSS, UPDATE
from common import steps
from common.block.config import PRESETS, BlockConfig, dtype_name
from common.command_line import Parser
from common.measure.session import Session
from common.measure.subject import require
from common.outcome import EXIT, judged
from common.phases import Phase
from common.report.record import Record, check_records
from common.report.result import Result
from common.runtime import exclusive
from common.text import NOT_AVAILABLE, table

LAYERS = 4
ERRORS = (LOSS, BRANCH, INPUT, GRADIENT, UPDATE)
SMALL = PRESETS["tiny"].replace(amp_dtype=None)            # at which FP64 is asked what the layout means
MEANING = "float64"


# ----------------------------------------------------------------------------------------------------------- measuring


def run(study: Study, options: Options) -> int:
    """As one of several ranks, or by starting them."""
    own = launching.place()
    if own is None:
        with exclusive.alone(options.device, study.name):
            return launching.start(options.ranks, words_of_rank(options.argv))
    with launching.told():
        if options.device.type == "cuda":
            torch.cuda.set_device(own.local)
        with launching.process_group(options.device, options.timeout):
            return run_as_rank(study, options, own)


def words_of_rank(argv: Sequence[str]) -> list[str]:
    """The command line without --ranks: a rank is told by its launcher how many there are."""
    words = list(argv[1:] if argv[:1] == ["distributed"] else argv)
    for place, word in enumerate(words):
        if word == "--ranks":
            return words[:place] + words[place + 2:]
        if word.startswith("--ranks="):
            return words[:place] + words[place + 1:]
    return words


def run_as_rank(study: Study, options: Options, own: launching.Place) -> int:
    """Check the layout in FP64, then in its own precision. Rank 0 records and shows it; the exit status."""
    mesh = mesh_of(options.layout, options.device)
    session = open_session(study, options) if own.rank == 0 else None
    statuses = []
    for config, dtype in ((meaning_of(options.layout), torch.float64), (options.config, torch.float32)):
        if session:
            session.say(Phase.CHECKING, f"{options.layout} in {dtype_name(dtype)}")
        result = checked(options, config, dtype, mesh, session)
        statuses.append(result.status)
        if session:
            session.write(check_records(result))
    if session is None:
        return EXIT["ok"]
    show(study, options, session)
    return exit_status(statuses)


def meaning_of(layout: Layout) -> BlockConfig:
    """The tiny shape, with at least as many heads as tensor parallelism splits, without dropout."""
    heads = math.lcm(SMALL.num_heads, layout.tensor)
    return SMALL.replace(num_heads=heads, hidden_size=16 * heads, ffn_hidden_size=None)


def checked(options: Options, config: BlockConfig, dtype: torch.dtype, mesh: DeviceMesh, session: Session | None
            ) -> Result:
    """What became of one forward, backward and optimizer step of spread blocks. Every rank must call it."""
    step, layout, sharding, layers = steps.load(options.step), options.layout, options.sharding, options.layers
    result = Result(step.name, config, dtype_name(dtype), session.facts if session else {}, step.number, step.traits,
                    study="distributed", run=session.run if session else "",
                    matmul=step.traits.arithmetic(config, dtype, options.device).matmul,
                    variant={"parallel": str(layout), "layers": layers, "precision": sharding.precision})
    with judged(result, lambda error: "out of memory: give a smaller shape"):
        truth = proof.truth_of(config, layers, layout, options.seed, options.device) if session else None
        stack = build(step, config, layers, layout, mesh, sharding, options.seed, dtype, options.device)
        found = proof.found_by(stack, config, layout, options.seed, dtype, options.device, truth)
        result.worst_parameter = found.worst_parameter
        allowed = proof.gates(result.matmul, layers)
        result.errors |= {what: (error, allowed.get(what)) for what, error in found.errors.items()}
        for what, (error, gate) in result.errors.items():
            require(what, error, gate)
    return result


# ------------------------------------------------------------------------------------------------------- what it shows


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    every = runs(lines)
    rows = []
    for of_case in every:
        variant = of_case.variant
        words = [f"step {of_case.step}", f"{variant['layers']} layers", variant["parallel"], _precision(of_case)]
        rows.append([", ".join(words), *(_error(of_case, each) for each in ERRORS), of_case.status])
    worst = [f"{_precision(of_case)}: the worst parameter gradient is of {name}"
             for of_case in every if (name := _worst_parameter(of_case))]
    reasons = [f"{of_case.variant['parallel']}, {of_case.status}: {of_case.info['reason']}"
               for of_case in every if of_case.info["reason"]]
    return framed(lines, [table(rows, ["against one process in FP64", *ERRORS, "status"], width), "\n".join(worst),
                          "\n".join(reasons)], [])


def _precision(run: Run) -> str:
    """FP64, or what 16 bits are cast to and by whom."""
    matmul = run.lines[0]["benchmark"]["dtype"]
    return matmul if run.info["parameter_dtype"] == MEANING else f"{matmul} by {run.variant['precision']}"


def _error(run: Run, what: str) -> str:
    """"6e-16 of 1e-12": the error, and its gate."""
    line = run.find("check", f"{what} error")
    if not line:
        return NOT_AVAILABLE
    gate = extra(line)["gate"]
    return f"{values(line)[0]:.0e}" + (f" of {gate:.0e}" if gate else "")


def _worst_parameter(run: Run) -> str:
    line = run.find("check", f"{GRADIENT} error")
    return extra(line)["worst"] if line else ""


def answer(lines: list[Record]) -> str:
    """How far off the worst of it is in FP64."""
    errors = [values(line)[0] for run in runs(lines) for what in (LOSS, BRANCH, INPUT, GRADIENT)
              if run.info["parameter_dtype"] == MEANING and (line := run.find("check", f"{what} error"))]
    return f"in FP64 spread and whole agree to {max(errors):.0e}" if errors else NO_ANSWER


# ------------------------------------------------------------------------------------------------------------ its flags


def add_arguments(parser: Parser) -> None:
    """Beside those of all studies."""
    add = parser.add_argument
    add("--parallel", default="fsdp", metavar="LAYOUT", help=f"how to spread it: {EXAMPLES} (default: fsdp)")
    add("--ranks", type=count, metavar="N", help="start so many processes on this machine, one a GPU where it has them")
    add("--step", type=int, default=2, choices=range(5), help="whose blocks (default: 2)")
    add("--layers", type=count, default=LAYERS, metavar="N", help=f"of the stack (default: {LAYERS})")
    add("--precision", choices=(AUTOCAST, POLICY), default=AUTOCAST,
        help="who casts to 16 bits: the block's own autocast, or FSDP's policy, LayerNorm and residual too")
    add("--timeout", type=int, default=300, metavar="S", help="seconds that a collective may wait (default: 300)")


def refine(options: Options) -> None:
    """Raise ValueError for ranks and layouts that can't be, before anything is started."""
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
    if options.timeout < 1:
        raise ValueError(f"--timeout {options.timeout}: give seconds from 1 on")
    options.layout = parsed(options.parallel, ranks)
    options.layout.check(options.config)
    options.config = options.config.replace(dropout=0.0)
    options.sharding = Sharding(options.precision)


register(Study("distributed", __doc__, lambda options: [], text=text, run=run, add_arguments=add_arguments,
               refine=refine, answer=answer, place=11))
