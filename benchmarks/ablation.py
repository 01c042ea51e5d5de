"""Whose is the speed-up? Each optimization alone, each left out, and the share of the whole that each can claim.

    python -m benchmarks.ablation --json ablation.jsonl --chart ablation

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
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from common import BlockConfig, harness, report, steps
from common import device as machine
from common.precision import float32_matmul_precision

from . import charts, command, records
from .study import Case, Study

Combination = frozenset[str]
LADDERS = {"to step 3": ("TF32", "autocast", "SDPA", "compile"), "to step 4": ("TF32", "autocast", "SDPA", "FP8")}
OPTIMIZATIONS = ("TF32", "autocast", "SDPA", "compile", "FP8")


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
    there = {"TF32": tf32, "FP8": fp8, "autocast": autocast}
    pool = [name for name in OPTIMIZATIONS if there.get(name, True)]
    every = (frozenset(some) for count in range(len(pool) + 1) for some in itertools.combinations(pool, count))
    return [some for some in every if "FP8" not in some or ("autocast" in some and "compile" not in some)]


def name_of(some: Combination) -> str:
    """FP32, or the optimizations in the order of the ladder."""
    return " + ".join(name for name in OPTIMIZATIONS if name in some) or "FP32"


def build(some: Combination, config: BlockConfig, values: dict[str, Tensor], device) -> nn.Module:
    """A block with just these optimizations, out of the classes of the steps."""
    step = 4 if "FP8" in some else 2 if "SDPA" in some else 1
    block = steps.load(step).build(config, values, device)
    if step == 4 and "SDPA" not in some:
        block.attn.core = AttentionByHand()
    precision = float32_matmul_precision("high" if "TF32" in some else "highest")
    uncovered = type(block).__call__.__wrapped__                       # without the step's own TF32 switch
    block.__class__ = type("Block", (type(block),), {"__call__": precision(uncovered)})
    if "compile" in some:
        harness.compile_in_place(block)
    return block


def cases(config: BlockConfig, device: torch.device) -> list[Case]:
    """One case a combination; those that this machine lacks the means for are left out."""
    on_gpu = device.type == "cuda"
    tf32 = on_gpu and torch.cuda.is_tf32_supported()
    found = []
    for some in combinations(tf32, on_gpu, config.amp_dtype is not None):
        step = 4 if "FP8" in some else 2 if some & {"TF32", "autocast"} else 0           # whose arithmetic it has
        found.append(Case(name_of(some), functools.partial(build, some), step,
                          config if "autocast" in some else config.replace(amp_dtype=None),
                          attention_of=2 if "SDPA" in some else 0))
    return found


def samples(lines: list[dict], mode: str) -> dict[Combination, list[float]]:
    """Combination -> samples of its faster way of launching, from the latest records of those that are ok."""
    runs = {run.info["step"]: run for run in records.runs(lines)}
    return {frozenset() if name == "FP32" else frozenset(name.split(" + ")): run.samples(mode, run.best(mode))
            for name, run in runs.items() if run.best(mode) and run.status == "ok"}


def times(lines: list[dict], mode: str) -> dict[Combination, float]:
    """Combination -> median ms of its faster way of launching."""
    return {some: statistics.median(taken) for some, taken in samples(lines, mode).items()}


def shapley(value: Callable[[Combination], float | None], players: tuple[str, ...]) -> dict[str, float] | None:
    """Player -> mean of what it adds to `value` over all orders of joining; orders through a None are left out.

    The shares add up to value(all) - value(none). None where no order can be followed to its end.
    """
    sums, orders = dict.fromkeys(players, 0.0), 0
    for order in itertools.permutations(players):
        steps_ = [value(frozenset(order[:count])) for count in range(len(order) + 1)]
        if None in steps_:
            continue
        orders += 1
        for player, before, after in zip(order, steps_, steps_[1:], strict=False):
            sums[player] += after - before
    return {player: total / orders for player, total in sums.items()} if orders else None


def shares(found: dict[Combination, float], players: tuple[str, ...]) -> dict[str, float] | None:
    """Player -> its share (of 1) of the logarithm of the whole speed-up.

    None where the whole was not measured, or is no speed-up of 5 % that could be shared out.
    """
    players = tuple(player for player in players if any(player in some for some in found))
    logs = {some: -math.log(ms) for some, ms in found.items()}
    added = shapley(logs.get, players)
    whole = sum(added.values()) if added else 0.0
    return {player: amount / whole for player, amount in added.items()} if whole > math.log(1.05) else None


def intervals(taken: dict[Combination, list[float]], players: tuple[str, ...], resamples: int = 200
              ) -> dict[str, tuple[float, float]]:
    """Player -> 95 % bootstrap interval of its share, over the rounds that all combinations were timed in.

    None of them where more than one draw in forty holds no speed-up to share out.
    """
    draw, rounds = random.Random(0), min(map(len, taken.values()))
    drawn: list[dict[str, float]] = []
    for _ in range(resamples):
        picks = [draw.randrange(rounds) for _ in range(rounds)]
        medians = {some: statistics.median(one[pick] for pick in picks) for some, one in taken.items()}
        if found := shares(medians, players):
            drawn.append(found)
    if len(drawn) < resamples - resamples // 40:
        return {}
    by_player = {player: sorted(one[player] for one in drawn) for player in drawn[0]}
    return {player: (some[len(some) // 40], some[-1 - len(some) // 40]) for player, some in by_player.items()}


def ladder_of(taken: dict[Combination, list[float]], players: tuple[str, ...]) -> list[list]:
    """Rows of one ladder: each optimization alone, the whole without it, its share."""
    found = {some: statistics.median(one) for some, one in taken.items()}
    sure = intervals(taken, players)
    players = tuple(player for player in players if any(player in some for some in found))
    whole, none, share = frozenset(players), frozenset(), shares(found, players)
    rows = []
    for player in players:
        alone, without = found.get(frozenset({player})), found.get(whole - {player})
        rows.append([player, _times(found.get(none), alone), _times(without, found.get(whole)),
                     "{:.0f} % [{:.0f}, {:.0f}]".format(*(100 * part for part in (share[player], *sure[player])))
                     if share and player in sure else "n/a"])
    rows.append(["all", _times(found.get(none), found.get(whole)), "",
                 "100 %" if share else "nothing to share out" if {none, whole} <= found.keys() else "n/a"])
    return rows


def _times(before: float | None, after: float | None) -> str:
    return f"{before / after:.2f}" if before and after else "n/a"


def ladders(found: dict[Combination, float]) -> dict[str, tuple[str, ...]]:
    """Those of `LADDERS` that were measured: name -> players. Where TF32 or autocast is lacking, the name says so."""
    seen = {}
    for name, players in LADDERS.items():
        missing = [player for player in players if not any(player in some for some in found)]
        if not set(missing) - {"TF32", "autocast"}:
            seen[name + (f" without {' and '.join(missing)}" if missing else "")] = players
    return seen


def text(lines: list[dict], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    blocks = [records.provenance(lines)]
    runs = [run for run in records.latest(lines).values() if run.info["step"] != "ablation"]
    for mode in report.MODES:
        taken, found = samples(lines, mode), times(lines, mode)
        if not found:
            blocks.append(f"{mode}: nothing was timed")
            continue
        base, rows = found.get(frozenset()), []
        for run in runs:
            ms, error = run.best_ms(mode), run.value("check", "branch error")
            launches = run.find(mode, "launches")
            seen = launches["metric"]["extra_info"]["attention"] if launches else ""
            rows.append([run.info["step"], run.status, run.best(mode) or "", f"{ms:.2f}" if ms else "n/a",
                         _times(base, ms), seen, f"{run.value(mode, 'launches'):.0f}" if launches else "",
                         f"{error:.1e}" if error else ""])
        rounds = len(next(iter(taken.values())))
        blocks.append(f"{mode}: every combination, {rounds} rounds\n\n" + command.table(
            rows, ["optimizations", "status", "launch", "ms", "x FP32", "attention", "launches", "error"], width))
        for name, players in ladders(found).items():
            blocks.append(f"{mode}, the ladder {name}\n\n" + command.table(
                ladder_of(taken, players),
                ["optimization", "alone: x FP32", "left out of all: x slower", "share of the speed-up [95 %]"], width))
    blocks.append("\n".join(records.cautions(runs)))
    return "\n\n".join(filter(None, blocks))


def chart_stems(lines: list[dict], stem: str) -> list[str]:
    """The one chart that `draw` makes."""
    return [f"{stem}-shares"] if _bars(lines) else []


def draw(lines: list[dict], stem: str) -> None:
    """Draw `chart_stems`: the shares of the speed-up of forward+backward."""
    if bars := _bars(lines):
        charts.bars_chart(bars, f"{stem}-shares", lines, "share of the speed-up of forward+backward, %", 0)
    else:
        command.no_chart("ablation", "there is no speed-up of forward+backward to share out")


def _bars(lines: list[dict]) -> dict[str, list[tuple[str, float, float, float]]]:
    taken, found, bars = samples(lines, "forward+backward"), times(lines, "forward+backward"), {}
    for name, players in ladders(found).items():
        if (share := shares(found, players)) and (sure := intervals(taken, players)):
            bars[f"the ladder {name}"] = [(player, *(100 * value for value in (part, *sure[player])))
                                          for player, part in share.items()]
    return bars


def main(argv: list[str] | None = None) -> int:
    options = command.parse(command.parser("ablation", __doc__), argv)
    with command.shown_to_a_person("ablation", options.output), machine.alone(options.device, "ablation"):
        harness.use_private_caches()
        study, every = Study("ablation", options), cases(options.config, options.device)
        needed = sum(case.memory_needed(options.device) for case in every)
        if needed > 0.9 * machine.memory_total(options.device):
            options.launches = ("eager",)                      # captured graphs keep their memory, and these are many
        for case in every:
            study.prepare(case)
        for mode in report.MODES:
            study.time(mode)
        return study.show(text, draw)


if __name__ == "__main__":
    sys.exit(main())
