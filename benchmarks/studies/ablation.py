"""Whose is the speed-up? Each optimization alone, each left out, and the share of the whole that each can claim.

    python -m benchmarks ablation --json ablation.jsonl --chart ablation

Steps come in one order, and what a step gains depends on what came before it. Here every combination that exists is
built, checked against FP64 and timed in interleaved rounds: TF32, autocast, fused attention (SDPA) and torch.compile in
all sixteen, and FP8 (Transformer Engine, in place of the compiler) on top of those with autocast and without compile.
The share of an optimization is its Shapley value: the mean of the logarithm of its speed-up over all orders in which
the optimizations can be added one by one, over the logarithm of the whole. Exit status: 0 ok, 1 failed, 2 usage, 130
interrupted.
"""
import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.records.read import Run, extra, latest, runs
from benchmarks.show.charts import Charts, Interval, bars_chart
from benchmarks.show.study import Options, Study, register
from benchmarks.show.tables import ERROR, LAUNCH, LAUNCHES, MS, STATUS, Column, Context, framed, of_runs
from common import steps
from common.block.config import BlockConfig
from common.block.traits import BY_HAND, DELAYED, FUSED, Traits
from common.measure.cases import Case, Group, block_case
from common.report.record import Record
from common.runtime import compiler, machine
from common.runtime.iteration import BOTH, MODES
from common.text import table

Combination = frozenset[str]
OPTIMIZATIONS = ("TF32", "autocast", "SDPA", "compile", "FP8")
LADDERS = {"to step 3": ("TF32", "autocast", "SDPA", "compile"), "to step 4": ("TF32", "autocast", "SDPA", "FP8")}
NONE: Combination = frozenset()


# ----------------------------------------------------------------------------------------------------------- the cases


class AttentionByHand(nn.Module):
    """What stands between the projections of step 4 without fused attention; q, k, v [B, S, H, D] -> [B, S, E]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, S, H, D = q.shape
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                           # [B, H, S, D]
        scores = q @ k.mT / math.sqrt(D)                                           # [B, H, S, S]
        future = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return y.transpose(1, 2).reshape(B, S, H * D)


def combinations(tf32: bool, fp8: bool, autocast: bool = True) -> list[Combination]:
    """Every combination that exists: FP8 needs autocast, and its modules are not compiled."""
    present = {"TF32": tf32, "FP8": fp8, "autocast": autocast}
    pool = [name for name in OPTIMIZATIONS if present.get(name, True)]
    existing = []
    for count in range(len(pool) + 1):
        for picked in map(frozenset, itertools.combinations(pool, count)):
            if "FP8" not in picked or ("autocast" in picked and "compile" not in picked):
                existing.append(picked)
    return existing


def ordered(combination: Combination) -> list[str]:
    """Its optimizations in the order of the ladder."""
    return [name for name in OPTIMIZATIONS if name in combination]


def build(combination: Combination, config: BlockConfig, values: dict[str, Tensor], device) -> nn.Module:
    """A block with just these optimizations, out of the classes of the steps."""
    step = steps.load(2 if "SDPA" in combination else 1)
    if "FP8" in combination:
        step = steps.load(4)
    block: Any = step.build(config, values, device)
    if "FP8" in combination and "SDPA" not in combination:
        block.attn.core = AttentionByHand()
    block.matmul_precision = "high" if "TF32" in combination else "highest"      # in place of the step's own
    if "compile" in combination:
        compiler.compile_in_place(block)
    return block


def traits_of(combination: Combination) -> Traits:
    fp8 = "FP8" in combination
    return Traits(FUSED if "SDPA" in combination else BY_HAND, tf32="TF32" in combination,
                  autocast="autocast" in combination, compiled="compile" in combination, fp8=DELAYED if fp8 else None,
                  residual_in_16_bits=fp8)


def cases(config: BlockConfig, device: torch.device) -> list[Case]:
    """One case a combination; those that this machine lacks the means for are left out."""
    on_gpu = device.type == "cuda"
    tf32 = on_gpu and torch.cuda.is_tf32_supported()
    of_ablation = []
    for combination in combinations(tf32, on_gpu, config.amp_dtype is not None):
        own = config if "autocast" in combination else config.replace(amp_dtype=None)
        of_ablation.append(block_case("block", functools.partial(build, combination), own, traits_of(combination),
                                      device, variant={"optimizations": ordered(combination)}))
    return of_ablation


def groups(options: Options) -> list[Group]:
    """All combinations together."""
    return [Group(cases(options.config, options.device))]


def refine(options: Options) -> None:
    """Without captured graphs where need be: they keep their memory, and these are many."""
    needed = sum(case.bytes_needed for case in cases(options.config, options.device))
    if needed > 0.9 * machine.memory_total(options.device):
        options.launches = options.launches[:1]


# ---------------------------------------------------------------------------------------------------------- the shares


def samples(lines: list[Record], mode: str) -> dict[Combination, list[float]]:
    """Combination -> samples of its faster way of launching, from the latest records of those that are ok."""
    taken = {}
    for run in runs(lines):
        if run.best(mode):
            taken[frozenset(run.variant["optimizations"])] = run.samples(mode, run.best(mode))
    return taken


def medians_of(taken: Mapping[Combination, list[float]]) -> dict[Combination, float]:
    """Combination -> median ms."""
    return {combination: statistics.median(times) for combination, times in taken.items()}


def measured_of(players: Iterable[str], present: Iterable[Combination]) -> tuple[str, ...]:
    """Those of the players that are in any combination."""
    seen = frozenset().union(*present)
    return tuple(player for player in players if player in seen)


def shapley(value: Callable[[Combination], float | None], players: tuple[str, ...]) -> dict[str, float] | None:
    """Player -> mean of what it adds to `value` over all orders of joining; orders through a None are left out.

    The shares add up to value(all) - value(none). None where no order can be followed to its end.
    """
    sums, orders = dict.fromkeys(players, 0.0), 0
    for order in itertools.permutations(players):
        added = _added_in_order(value, order)
        if added is None:
            continue
        orders += 1
        for player, amount in zip(order, added, strict=True):
            sums[player] += amount
    return {player: total / orders for player, total in sums.items()} if orders else None


def _added_in_order(value: Callable[[Combination], float | None], order: tuple[str, ...]) -> list[float] | None:
    """What each player adds when it joins; None where a value on the way is."""
    added = []
    before = value(NONE)
    for count in range(1, len(order) + 1):
        after = value(frozenset(order[:count]))
        if before is None or after is None:
            return None
        added.append(after - before)
        before = after
    return added


def shares(medians: Mapping[Combination, float], players: tuple[str, ...]) -> dict[str, float] | None:
    """Player -> its share (of 1) of the logarithm of the whole speed-up.

    None where the whole was not measured, or is no speed-up of 5 % that could be shared out.
    """
    logs = {combination: -math.log(ms) for combination, ms in medians.items()}
    added = shapley(logs.get, measured_of(players, medians))
    whole = sum(added.values()) if added else 0.0
    if added is None or whole <= math.log(1.05):
        return None
    return {player: amount / whole for player, amount in added.items()}


def intervals(taken: Mapping[Combination, list[float]], players: tuple[str, ...], resamples: int = 200
              ) -> dict[str, tuple[float, float]]:
    """Player -> 95 % bootstrap interval of its share, over the rounds that all combinations were timed in.

    None of them where more than one draw in forty holds no speed-up to share out.
    """
    draw, count = random.Random(0), min(map(len, taken.values()))
    drawn: dict[str, list[float]] = {}
    for _ in range(resamples):
        picks = [draw.randrange(count) for _ in range(count)]
        medians = {}
        for combination, times in taken.items():
            medians[combination] = statistics.median(times[pick] for pick in picks)
        for player, share in (shares(medians, players) or {}).items():
            drawn.setdefault(player, []).append(share)
    sure = {}
    for player, of_player in drawn.items():
        of_player.sort()
        tail = len(of_player) // 40
        if len(of_player) >= resamples - resamples // 40:
            sure[player] = of_player[tail], of_player[-1 - tail]
    return sure


def ladders(present: Iterable[Combination]) -> dict[str, tuple[str, ...]]:
    """Those of `LADDERS` that were measured: name -> players. Where TF32 or autocast is lacking, the name says so."""
    seen: dict[str, tuple[str, ...]] = {}
    for name, players in LADDERS.items():
        missing = [player for player in players if player not in measured_of(players, present)]
        if not set(missing) - {"TF32", "autocast"}:
            seen[name + (f" without {' and '.join(missing)}" if missing else "")] = players
    return seen


# ------------------------------------------------------------------------------------------------------- what it shows


def ladder_of(taken: Mapping[Combination, list[float]], players: tuple[str, ...]) -> list[list[str]]:
    """Rows of one ladder: each optimization alone, the whole without it, its share."""
    medians = medians_of(taken)
    players = measured_of(players, medians)
    whole, share, sure = frozenset(players), shares(medians, players), intervals(taken, players)
    none_ms, whole_ms = medians.get(NONE), medians.get(whole)
    rows = []
    for player in players:
        shown = "n/a"
        if share and player in sure:
            low, high = sure[player]
            shown = f"{100 * share[player]:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"
        rows.append([player, _times(none_ms, medians.get(frozenset({player}))),
                     _times(medians.get(whole - {player}), whole_ms), shown])
    shared_out = "100 %" if share else "nothing to share out" if none_ms and whole_ms else "n/a"
    rows.append(["all", _times(none_ms, whole_ms), "", shared_out])
    return rows


def _times(before: float | None, after: float | None) -> str:
    return f"{before / after:.2f}" if before and after else "n/a"


def _times_fp32(run: Run, context: Context) -> str:
    for other in context.runs:
        if not other.variant["optimizations"]:
            return _times(other.best_ms(context.mode), run.best_ms(context.mode))
    return "n/a"


def _attention(run: Run, context: Context) -> str:
    launches = run.find(context.mode, "launches")
    return extra(launches)["attention"] if launches else ""


COLUMNS = [
    Column("optimizations", lambda run, _: " + ".join(run.variant["optimizations"]) or "FP32", untimed=True), STATUS,
    LAUNCH, MS, Column("x FP32", _times_fp32), Column("attention", _attention), LAUNCHES, ERROR,
]


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    blocks = []
    case_runs = list(latest(lines).values())
    for mode in MODES:
        taken = samples(lines, mode)
        if not taken:
            blocks.append(f"{mode}: nothing was timed")
            continue
        count = len(next(iter(taken.values())))
        blocks.append(f"{mode}: every combination, {count} rounds\n\n{of_runs(COLUMNS, case_runs, mode, width)}")
        for name, players in ladders(taken).items():
            headers = ["optimization", "alone: x FP32", "left out of all: x slower", "share of the speed-up [95 %]"]
            blocks.append(f"{mode}, the ladder {name}\n\n{table(ladder_of(taken, players), headers, width)}")
    return framed(lines, blocks, case_runs)


def _bars(lines: list[Record]) -> dict[str, dict[str, Interval]]:
    """Ladder -> optimization -> its share of forward+backward in percent, with its interval."""
    taken, bars = samples(lines, BOTH), {}
    for name, players in ladders(taken).items():
        share, sure = shares(medians_of(taken), players), intervals(taken, players)
        if share and sure:
            bars[f"the ladder {name}"] = {player: (100 * part, 100 * sure[player][0], 100 * sure[player][1])
                                          for player, part in share.items()}
    return bars


def charts(lines: list[Record]) -> Charts:
    """The shares of the speed-up of forward+backward."""
    bars = _bars(lines)
    if not bars:
        return {}
    return {"shares": lambda: bars_chart(bars, "share of the speed-up of forward+backward, %", 0)}


def answer(lines: list[Record]) -> str:
    """The largest share of the longest ladder: to step 4, where there is FP8."""
    name, bars = list(_bars(lines).items())[-1]
    share, player = max((value, player) for player, (value, _, _) in bars.items())
    return f"{player}: {share:.0f} % of the speed-up {name.removeprefix('the ladder ')}"


INTRODUCTION = """\
The H200's run has six rounds, launched eagerly."""

register(Study("ablation", __doc__, groups, text=text, charts=charts, answer=answer, refine=refine,
               no_chart="there is no speed-up of forward+backward to share out",
               place=2, introduction=INTRODUCTION))
