"""Is a block that is spread over several GPUs still the same block, what does it move, and what does that cost?

    python -m benchmarks distributed --ranks 2 --parallel fsdp --preset tiny
    torchrun --standalone --nproc-per-node 2 -m benchmarks distributed --parallel fsdp --preset tiny
    python -m benchmarks distributed --simulate 8,64,1024 --layers 32 --parallel fsdp

A stack of a step's blocks is spread by FSDP2 (fsdp, and hsdp on two dimensions), by tensor parallelism (tp:2, and with
sequence parallelism tp:2+sp), or by fsdp and tp. batch_size is that of one rank, or of those that share a batch. Each
run is first checked in FP64 at a tiny shape, and then in its own precision at the shape asked for: loss, output, the
gradients of the input and of every parameter, and one step of AdamW, each against one process in FP64 on the same
global batch. What a step moves and what a rank keeps is counted, and must equal a closed formula to the byte;
--simulate counts it for thousands of ranks in one process. With --checkpoint it trains some steps and saves each, and
the next run goes on.
Exit status: 0 ok, 1 failed, 2 usage, 4 skipped, 130 interrupted; where a rank fails, that rank's.
"""
import contextlib
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.show.study import Options, Study, exit_status, open_session, register, show
from benchmarks.studies.distributed import (
    account,
    checkpoints,
    flags,
    launching,
    proof,
    published,
    scaling,
    simulate,
    tables,
    timed,
)
from benchmarks.studies.distributed.account import Moved
from benchmarks.studies.distributed.layout import Layout
from benchmarks.studies.distributed.parallel import Layer, Stack, build, mesh_of, seeded, share_scales
from benchmarks.studies.distributed.tables import FORESEEN, KEPT, LOSSES, MOVED
from benchmarks.studies.distributed.watch import Watch
from common import steps
from common.block import evidence
from common.block.config import PRESETS, BlockConfig, dtype_name
from common.command_line import tell
from common.measure.session import Session
from common.measure.subject import require
from common.outcome import EXIT, Failed
from common.phases import Phase
from common.report.record import Record, check_records, record
from common.report.result import Result
from common.runtime import engine, exclusive
from common.runtime.iteration import BOTH

SMALL = PRESETS["tiny"].replace(amp_dtype=None)            # at which FP64 is asked what the layout means


# ----------------------------------------------------------------------------------------------------------- measuring


def run(study: Study, options: Options) -> int:
    """As one of several ranks, or by starting them."""
    if options.simulate:
        return run_simulated(study, options)
    own = launching.place()
    if own is None:
        with exclusive.alone(options.device, study.name):
            return launching.start(options.ranks, options.argv)
    with launching.failing_in_a_line():
        if options.device.type == "cuda":
            torch.cuda.set_device(own.local)
        step = steps.load(options.step)
        if not own.rank and not step.traits.fp8:           # before there is a real group
            with contextlib.suppress(NotImplementedError):
                seen = simulate.seen_at(step, options.config, options.layers, options.layout, options.sharding)
                options.foreseen = seen.peak_bytes
        with launching.process_group(options.device, options.timeout) as watch:
            return run_as_rank(study, options, own, watch)


def run_simulated(study: Study, options: Options) -> int:
    """The account of each number of ranks; the exit status."""
    session = open_session(study, options)
    statuses = []
    for layout in options.layouts:
        session.say(Phase.COUNTING, str(layout))
        result = result_of(options, options.config, torch.float32, layout, session)
        result.variant["simulated"] = True
        which = steps.load(options.step), options.config, options.layers, layout, options.sharding
        lines: list[Record] = []
        try:
            seen = simulate.seen_at(*which)
            lines = account_records(result, seen.moved, seen.state_bytes, options, layout, torch.float32)
            lines += foreseen(result, seen.peak_bytes)
            if options.device.type == "cuda":
                session.say(Phase.OBSERVING, f"{layout}, with data")
                lines += tables.records_of_peak(result, simulate.measured_peak(*which, options.device))
        except Failed as error:
            result.status, result.reason = "failed", str(error)
        except NotImplementedError as error:
            result.status, result.reason = "skipped", str(error)
        except torch.OutOfMemoryError:
            session.note(f"{layout}: with data it does not fit on this GPU; its memory is foreseen alone")
        session.write([*check_records(result), *lines])
        statuses.append(result.status)
    show(study, options, session)
    if options.published:
        tell("\n" + published.text())
    return exit_status(statuses)


def foreseen(result: Result, peak_bytes: int) -> list[Record]:
    """The peak memory that a simulation has seen. Of compiled blocks it has not: they keep what the compiler likes."""
    return [] if result.traits.compiled else [record(result, FORESEEN, "bytes", [peak_bytes], BOTH)]


def result_of(options: Options, config: BlockConfig, dtype: torch.dtype, layout: Layout, session: Session | None
              ) -> Result:
    """An empty one, of such blocks."""
    step = steps.load(options.step)
    cast_to = options.sharding.policy(config, dtype).param_dtype or dtype
    return Result(step.name, config, dtype_name(dtype), session.facts if session else {}, step.number, step.traits,
                  study="distributed", run=session.run if session else "",
                  matmul=step.traits.arithmetic(config, cast_to, options.device).matmul,
                  variant={"parallel": str(layout), "layers": options.layers} | options.sharding.variant)


def run_as_rank(study: Study, options: Options, own: launching.Place, watch: Watch) -> int:
    """Check the layout in FP64, then in its own precision. Rank 0 records and shows it; the exit status."""
    mesh = mesh_of(options.layout, options.device)
    session = open_session(study, options) if own.rank == 0 else None
    statuses = []
    for config, dtype in ((meaning_of(options.layout), torch.float64), (options.config, torch.float32)):
        if session:
            session.say(Phase.CHECKING, f"{options.layout} in {dtype_name(dtype)}")
        result, lines, stack = checked(options, config, dtype, mesh, watch, session)
        if stack and dtype == torch.float32 and timed.agreed(result.status == "ok"):
            lines += timed_records(result, stack, options, watch, session)
        statuses.append(result.status)
        if session:
            session.write([*check_records(result), *lines])
    if options.checkpoint:
        result, lines = trained(options, mesh, watch, session)
        statuses.append(result.status)
        if session:
            session.write(lines)
    if session is None:
        return EXIT["ok"]
    show(study, options, session)
    return exit_status(statuses)


def trained(options: Options, mesh: DeviceMesh, watch: Watch, session: Session | None) -> tuple[Result, list[Record]]:
    """A few steps, from the newest checkpoint on, with one behind each. Every rank must call it."""
    layout, config = options.layout, options.config
    result = result_of(options, config, torch.float32, layout, session)
    make = seeded(steps.load(options.step), config, layout, options.seed, torch.float32, options.device, mesh)
    stack = build(make, config, options.layers, layout, mesh, options.sharding, torch.float32)
    optimizer = proof.adamw(list(stack.parameters()))
    begun = 0
    losses = []
    try:
        if options.found:
            watch.reached("loading")
            begun, path = options.found
            checkpoints.load(path, stack, optimizer)
        for step, loss in checkpoints.trained(stack, optimizer, config, layout, options.seed, begun + 1, options.steps):
            watch.reached(f"step {step}")
            losses.append(loss)
            checkpoints.save(options.checkpoint, step, stack, optimizer, options.about)
    except Failed as error:
        result.status, result.reason = "failed", str(error)
    if not session:
        return result, []
    return result, [record(result, LOSSES, "", losses, BOTH, begun=begun)]


def meaning_of(layout: Layout) -> BlockConfig:
    """The tiny shape, with at least as many heads as tensor parallelism splits, without dropout."""
    heads = math.lcm(SMALL.num_heads, layout.tensor)
    return SMALL.replace(num_heads=heads, hidden_size=16 * heads, ffn_hidden_size=None)


def checked(options: Options, config: BlockConfig, dtype: torch.dtype, mesh: DeviceMesh, watch: Watch,
            session: Session | None) -> tuple[Result, list[Record], Stack | None]:
    """What became of one forward, backward and optimizer step of spread blocks, the account, and the blocks if there
    are any. All ranks call it.
    """
    lines: list[Record] = []
    stack = None
    layout, sharding, layers = options.layout, options.sharding, options.layers
    result = result_of(options, config, dtype, layout, session)
    try:                                                   # what one rank alone meets ends the run: others wait for it
        truth = proof.truth_of(config, layers, layout, options.seed, options.device) if session else None
        watch.reached("building")
        step = steps.load(options.step)
        make = seeded(step, config, layout, options.seed, dtype, options.device, mesh)
        stack = build(make, config, layers, layout, mesh, sharding, dtype)
        divided, calibrated = sharding.divided(layout.batches), step.traits.needs_calibration(config)
        found = proof.found_by(stack, config, layout, options.seed, dtype, options.device, truth, watch.reached,
                               divided, calibrated)
        if not session:
            return result, lines, stack
        result.worst_parameter = found.worst_parameter
        runs_on = engine.of_block(stack.blocks[0])
        result.engine, result.emulated = str(runs_on), runs_on.is_emulated
        emulated = ", emulated" if result.emulated and result.matmul == "float8" else ""
        for what, gate in proof.gates(result.matmul + emulated, layers).items():
            result.errors[what] = found.errors.get(what, math.inf), gate
        for what, (error, allowed) in result.errors.items():
            require(what, error, allowed)
        lines = account_records(result, found.moved, found.state_bytes, options, layout, dtype)
    except Failed as error:
        result.status, result.reason = "failed", str(error)
    except NotImplementedError as error:
        result.status, result.reason = "skipped", str(error)
    return result, lines, stack


def timed_records(result: Result, stack: Stack, options: Options, watch: Watch, session: Session | None
                  ) -> list[Record]:
    """What a forward and backward takes on GPUs; the timeline, where one was asked for. All ranks call it."""
    config, layout, device = options.config, options.layout, options.device
    batches = proof.global_batch(config, layout, options.seed)
    x, dy = (proof.own_part(whole, config, layout, dist.get_rank()).to(device) for whole in batches)
    lines: list[Record] = []
    if device.type == "cuda":
        times = timed.timed(stack, lambda: whole_stack(options), x, dy, options.rounds, options.seed, watch.reached)
        if session:
            lines = tables.records_of_time(result, times, options.layers, layout, device)
            lines += tables.records_of_peak(result, times.peak_bytes)
    lines += foreseen(result, options.foreseen) if options.foreseen else []
    if options.profile:
        watch.reached("profiling")
        work = timed.iteration_of(stack, x, dy)
        try:
            evidence.observe(lambda: timed.run(work, 1), device, options.profile if session else None)
        except OSError as error:
            result.status, result.reason = "failed", f"--profile {options.profile}: {error.strerror}"
    return lines


def whole_stack(options: Options) -> Stack:
    """The same blocks, each whole on this device."""
    make = seeded(steps.load(options.step), options.config, Layout(), options.seed, torch.float32, options.device)
    stack = Stack([Layer(make(number)) for number in range(options.layers)])
    share_scales(stack, False)
    return stack


def account_records(result: Result, counted: dict[str, Moved], state_bytes: int, options: Options, layout: Layout,
                    dtype: torch.dtype) -> list[Record]:
    """What was moved and what is kept, beside the formula. Raises Failed where they differ."""
    assert result.config
    in_fp8 = bool(result.traits.fp8)
    expected = account.expected(result.config, options.layers, layout, options.sharding, dtype, in_fp8)
    lines = []
    for kind in dict.fromkeys([*expected, *counted]):
        moved, formula = counted.get(kind, Moved()), expected.get(kind, Moved())
        if moved != formula:
            raise Failed(f"{kind}: {moved.calls} calls of {moved.bytes:,} bytes were counted, the formula gives "
                         f"{formula.calls} of {formula.bytes:,}")
        lines.append(record(result, MOVED, "bytes", [moved.bytes], BOTH, kind=kind, calls=moved.calls,
                            formula=formula.bytes))
    kept = account.expected_state(result.config, options.layers, layout, dtype)
    if state_bytes != kept:
        raise Failed(f"{account.STATE} take {state_bytes:,} bytes, the formula gives {kept:,}")
    lines.append(record(result, KEPT, "bytes", [state_bytes], BOTH, formula=kept))
    return lines


register(Study("distributed", __doc__, lambda options: [], text=tables.text, run=run,
               charts=tables.charts, no_chart="it is of simulated ranks, of several numbers",
               add_arguments=flags.add_arguments, refine=flags.refine, answer=tables.answer,
               parts={"distributed scaling": scaling.recorded}, place=11))
