"""What does power decide? The same work in other dtypes and on other data: milliseconds, watts, clocks and joules.

    python -m benchmarks power --json power.jsonl

Tensor cores that multiply without a pause draw more than a GPU may. It then lowers its clocks. How far depends on how
many bits toggle. So here the same block (step 3) and the same matmul (the first of its MLP, forward) run in several
dtypes, on several kinds of data: random (normal numbers, as in every check of this suite), initial (weights of
deviation 0.02, biases 0, gains 1, as GPT-2 begins) and zeros. Each is checked against FP64 on random data. Then all are
timed in the same rounds, launched one by one, and metered by the GPU's energy counter. Where no row ran at the power
cap, power decides nothing. A row on zeros may be reported as at the cap though it draws far less: it runs right behind
rows that are there.
Exit status: 0 ok, 1 failed, 2 usage, 130 interrupted.
"""
import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.measure.modules import Checked
from benchmarks.records.read import Run, latest, paired, runs, verdict
from benchmarks.show import tables
from benchmarks.show.charts import Charts, bars_chart
from benchmarks.show.study import Options, Study, register
from benchmarks.show.tables import Column, Context
from common import steps
from common.block import block_work, oracle
from common.block.config import BlockConfig
from common.block.traits import Arithmetic, amp_default
from common.block.workload import Workload
from common.measure.cases import Case, Group, Setting, block_case
from common.measure.subject import BlockSubject, Subject, require
from common.phases import Phase
from common.report import metrics
from common.report.record import Record, record
from common.report.result import Result
from common.runtime import pieces
from common.runtime.iteration import BOTH, FORWARD, LAUNCHES, MODES
from common.text import NOT_AVAILABLE, figures, ratio

DATA = RANDOM, INITIAL, ZEROS = ("random", "initial", "zeros")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
INITIAL_DEVIATION = 0.02               # of GPT-2's matrices (Radford et al. 2019, its published code)
BLOCK, ALONE = "block", "matmul"
CHECKED_ROWS = 256                     # of a matmul: all of them would take FP64 as long as the rest of the study


# ------------------------------------------------------------------------------------------------------------- the data


def change(subject: BlockSubject, data: str) -> None:
    """Replace the parameters and inputs of a block that was checked on random ones."""
    with torch.no_grad():
        for name, parameter in subject.parameters.items():
            if data == ZEROS:
                parameter.zero_()
            elif data == INITIAL and parameter.ndim == 2:
                parameter.normal_(std=INITIAL_DEVIATION)
            elif data == INITIAL:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        if data == ZEROS:
            for tensor in (*subject.inputs, *subject.cotangents):
                tensor.zero_()


# ------------------------------------------------------------------------------------------------------------ the cases


def case_of_block(dtype: str, data: str, config: BlockConfig, device: torch.device) -> Case:
    """Step 3 under autocast to that dtype, on that data."""
    step = steps.load(3)
    own = config.replace(amp_dtype=DTYPES[dtype])
    _, missing = amp_default(device)                       # a CPU may have no 16-bit matmuls worth the name
    of_random = block_case(BLOCK, step.build, own, step.traits, device, variant={"in": dtype, "data": data},
                           missing=missing)

    def prepare(setting: Setting, result: Result) -> Subject:
        subject = of_random.prepare(setting, result)
        assert isinstance(subject, BlockSubject)
        change(subject, data)
        return subject
    return dataclasses.replace(of_random, prepare=prepare)


def case_of_matmul(arithmetic: str, data: str, config: BlockConfig, missing: str) -> Case:
    """The first matmul of the MLP alone, in that arithmetic."""
    whole = block_work.work_in(Arithmetic(arithmetic, arithmetic, 4, 4, 4, 4), config)
    (operation,) = whole.part(("fc",)).forward
    work = Workload(arithmetic, (operation,))

    def prepare(setting: Setting, result: Result) -> Subject:
        setting.say(Phase.BUILDING)
        torch.manual_seed(setting.seed)
        m, k, n = operation.shape
        left, right = pieces.matmul_operands("forward", m, k, n, arithmetic, setting.device)
        multiply = functools.partial(pieces.multiply, dtype=arithmetic)
        setting.say(Phase.CHECKING, "against FP64")
        check(multiply(left, right), left, right, result)
        if data == ZEROS:
            left, right = torch.zeros_like(left), torch.zeros_like(right)
        return Checked(multiply, [left, right], [], {}, (1.0, 1.0), work, takes_gradient=False)
    return Case(ALONE, prepare, config, variant={"in": arithmetic, "data": data}, missing=missing, workload=work,
                that_fits=lambda total: "give a smaller shape")


def check(product: Tensor, left: Tensor, right: Tensor, result: Result) -> None:
    """Hold some rows of a product against FP64; raise Failed where they are off."""
    rows = slice(0, CHECKED_ROWS)
    exact = left[rows].to(torch.float64) @ right.to(torch.float64)
    error = oracle.relative_error(product[rows], exact)
    gate, _ = oracle.GATES[result.matmul]
    result.errors = {"output": (error, gate)}
    require("product", error, gate)


def arithmetics(device: torch.device) -> dict[str, str]:
    """What a matmul can multiply in -> why it can't on this machine."""
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    tf32 = "" if on_gpu and torch.cuda.is_tf32_supported() else "this machine has no TF32"
    fp8 = "" if capability >= (8, 9) else "this machine does not multiply FP8"
    return {"float32": "", "tf32": tf32, "float16": "", "bfloat16": "", "float8": fp8}


def groups(options: Options) -> list[Group]:
    """The block both ways first, then the matmul forward: each in rounds of its own, at its own clocks."""
    of_block = [case_of_block(dtype, data, options.config, options.device) for dtype in DTYPES for data in DATA]
    alone = []
    for arithmetic, missing in arithmetics(options.device).items():
        for data in (RANDOM, ZEROS):
            alone.append(case_of_matmul(arithmetic, data, options.config, missing))
    return [Group(of_block, metered=True, limited=False, timed=counted),
            Group(alone, [FORWARD], metered=True, limited=False, watched=False, timed=counted)]


def counted(timed: Sequence[tuple[Result, Subject]], mode: str) -> list[Record]:
    """The FLOPs of an iteration: what joules are divided by."""
    lines = []
    for result, subject in timed:
        if subject.workload:
            lines.append(record(result, "work", "FLOP", [subject.workload.flops(mode)], mode))
    return lines


def refine(options: Options) -> None:
    """Launched one by one: what a replay saves is no matter of power."""
    options.launches = LAUNCHES[:1]


# ------------------------------------------------------------------------------------------------------- what it shows


def _watts(run: Run, context: Context) -> str:
    line = run.find(context.mode, metrics.ENERGY.name, "eager")
    return f"{line['metric']['extra_info']['watts']:.0f}" if line else NOT_AVAILABLE


def joules_per_teraflop(run: Run, mode: str) -> float | None:
    """None where the work was not metered."""
    joules, work = tables.joules(run, mode), run.value(mode, "work")
    return 1e12 * joules / work if joules and work else None


def _per_teraflop(run: Run, context: Context) -> str:
    joules = joules_per_teraflop(run, context.mode)
    return NOT_AVAILABLE if joules is None else figures(joules)


def _at_cap(run: Run, context: Context) -> str:
    capped = run.at_power_cap(context.mode, "eager")
    return {None: NOT_AVAILABLE, True: "yes", False: "no"}[capped]


COLUMNS = [
    Column("work, in, data", lambda run, _: f"{run.case['name']}, {run.variant['in']}, {run.variant['data']}",
           untimed=True),
    tables.STATUS, tables.MS, tables.RATE, Column("W", _watts), tables.MHZ, Column("power cap", _at_cap), tables.JOULES,
    Column("J / 10^12 FLOPs", _per_teraflop), tables.WORST_ERROR,
]


def text(lines: list[Record], width: int | None = None) -> str:
    """A table a pass of the block, one of the matmul, and what follows."""
    timed = runs(lines)
    blocks = []
    for name, modes in ((BLOCK, MODES), (ALONE, [FORWARD])):
        of_name = [run for run in timed if run.case["name"] == name]
        for mode in modes if of_name else ():
            blocks.append(f"{name}, {mode}\n\n{tables.of_runs(COLUMNS, of_name, mode, width)}")
    blocks.append("\n".join(findings(lines)))
    return tables.framed(lines, blocks, timed)


def _by_key(lines: list[Record]) -> dict[tuple[str, str, str], Run]:
    """(work, what it multiplies in, data) -> its run."""
    return {(run.case["name"], run.variant["in"], run.variant["data"]): run for run in latest(lines).values()}


def findings(lines: list[Record]) -> list[str]:
    """What another dtype, and other data, buys where power decides; n/a where it does not."""
    by_key, found = _by_key(lines), []
    for name, mode in ((BLOCK, BOTH), (ALONE, FORWARD)):
        for before, after, data in (("float16", "bfloat16", RANDOM), ("float16", "float16", ZEROS)):
            first, second = by_key.get((name, before, RANDOM)), by_key.get((name, after, data))
            found.append(f"{name}, {mode}: {_finding(first, second, after, data, mode)}")
    return found


def _finding(first: Run | None, second: Run | None, dtype: str, data: str, mode: str) -> str:
    what = "BF16 against FP16, on random data" if data == RANDOM else f"{data} against random data, in {dtype}"
    times = paired(first, second, mode)
    if first is None or second is None or times is None:
        return f"{what}: n/a, not timed side by side"
    capped = first.at_power_cap(mode, "eager")
    if not capped:
        no_cap = "there is no power cap in the way"
        return f"{what}: n/a, {no_cap if capped is False else 'whether a power cap is in the way is not known'}"
    before, after = tables.joules(first, mode), tables.joules(second, mode)
    saved = f", {100 * (1 - after / before):.0f} % fewer joules" if before and after else ""
    return f"{what}: {ratio(times)} times as fast{verdict(*times[1:])}{saved}"


def charts(lines: list[Record]) -> Charts:
    """Joules per 10^12 FLOPs, by what is multiplied in, and on which data. FP32 would make all others small."""
    bars: dict[str, dict[str, tuple[float, float, float]]] = {}
    for run in latest(lines).values():
        joules = joules_per_teraflop(run, FORWARD)
        if joules is not None and run.variant["in"] != "float32":
            of_work = bars.setdefault(run.case["name"], {})
            of_work[f"{run.variant['in']}, {run.variant['data']}"] = (joules, joules, joules)
    return {"joules": lambda: bars_chart(bars, "J per 10^12 FLOPs, forward", 2)} if bars else {}


def answer(lines: list[Record]) -> str:
    """What the dtype decides in the whole block, and what zeros do."""
    by_key = _by_key(lines)
    before, *others = (by_key.get((BLOCK, *which)) for which in (("float16", RANDOM), ("bfloat16", RANDOM),
                                                                 ("float16", ZEROS)))
    gains = [paired(before, other, BOTH) for other in others]
    if before is None or not before.at_power_cap(BOTH, "eager") or not all(gains):
        return tables.NO_ANSWER
    bf16, zeros = (times[0] for times in gains if times)
    return f"BF16 is {bf16:.2f} times as fast as FP16, zeros are {zeros:.2f} times as fast as random numbers"


INTRODUCTION = """\
What that means: at the power cap a benchmark on zeros, or on any constant, measures another machine. BF16 has fewer
bits of mantissa than FP16, so fewer toggle, and it is a little faster where power is short. That is no reason to choose
it: its rounding is eight times as coarse. Choose a dtype by what the numbers need, and compare dtypes on data like
yours."""

register(Study("power", __doc__, groups, text=text, charts=charts, answer=answer, refine=refine,
               no_chart="nothing was metered: there is no energy counter", place=7,
               introduction=INTRODUCTION))
