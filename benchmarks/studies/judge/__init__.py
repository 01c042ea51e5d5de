"""Which mistakes does the judge of modules find, and in which dtype?

    python -m benchmarks judge --json judge.jsonl

Every pair of `benchmarks/examples/pairs.py` is judged: modules that are right, and modules with a mistake in them. Once
by meaning, in FP64. Then by precision alone in FP32, FP16 and BF16, as if there were no FP64. What counts is the error
as a multiple of its bound: of the worst tensor, or of none where what comes back has another form.

Then `compare` gets the cheats of `benchmarks/examples/cheats.py`, beside a common check and clock (`allclose` once, and
`triton.testing.do_bench`), and more than a hundred honest modules go through `validate`. Exit status: 0 ok, 1 the judge
was wrong about one of all these, 2 usage, 130 interrupted.
"""
import math
import statistics
from dataclasses import dataclass

import torch

from benchmarks.examples.cheats import CHEATS
from benchmarks.examples.pairs import RIGHT, WRONG, Make, Pair
from benchmarks.measure.calls import Inputs
from benchmarks.measure.checks import MEANING, PRECISION, Check, Judgement
from benchmarks.measure.judge import Judge
from benchmarks.measure.observing import Work
from benchmarks.measure.truth import Truth
from benchmarks.records.provenance import provenance
from benchmarks.records.read import Run, extra, latest
from benchmarks.show.study import Options, Study, exit_status, open_session, register
from benchmarks.studies.judge import cheating
from common.block.config import dtype_name
from common.command_line import tell
from common.measure.session import Session
from common.phases import Phase
from common.report.record import Record, record, status_record
from common.report.result import Result
from common.text import table

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUESTIONS = (MEANING, *map(dtype_name, DTYPES))
WRONG_ONES = """With a mistake: the error as a multiple of its bound. `form`: what failed is no such figure, but a
shape, a dtype, a missing gradient, an integer, a place that is not finite."""
CHEATING = """Cheats, by `compare`, and by a common check and clock."""
CHEAT, HONEST, COST = "cheat", "honest modules", "wall time of compare"
QUICK = "--quick leaves out: honest modules in 16 bits, in eval mode and behind another module"
HEADERS = {MEANING: "FP64", "float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Finding:
    """What the judge says of a pair, to one question."""
    passed: bool
    tensor: str                            # the one that failed, or came nearest to its bound
    times_the_bound: float | None          # None: what failed is no figure, a shape or a gradient that is missing


def judged(pair: Pair, meaning: bool) -> Finding:
    """The finding by both questions, or by precision alone."""
    truth = Truth(pair.reference, Work(Inputs.of(pair.inputs)))
    judgement = Judge(pair.candidate, truth, meaning=meaning).judge()
    return finding(judgement, MEANING if meaning else PRECISION)


def finding(judgement: Judgement, question: str) -> Finding:
    """The worst check of a question, or of what failed besides."""
    checks = [check for check in judgement if check.question == question or not check.passed]
    worst = max(checks, key=_severity, default=None)
    if worst is None:
        return Finding(judgement.passed, "", None)
    times = worst.error / worst.bound if worst.bound else math.nan
    return Finding(judgement.passed, worst.name, times if math.isfinite(times) else None)


def _severity(check: Check) -> tuple[bool, float]:
    times = check.error / check.bound if check.bound else 0.0
    return not check.passed, math.inf if math.isnan(times) else times


# ------------------------------------------------------------------------------------------------------------ measuring


def run(study: Study, chosen: Options) -> int:
    """Judge every pair; the exit status."""
    session = open_session(study, chosen)
    statuses = []
    for kind, pairs in (("right", RIGHT), ("wrong", WRONG)):
        for name, make in pairs.items():
            session.say(Phase.JUDGING, name)
            statuses.append(_judge_pair(session, kind, name, make, chosen))
    statuses += [_judge_cheat(session, name, chosen) for name in CHEATS]
    statuses.append(_judge_honest(session, chosen))
    _measure_cost(session, chosen)
    session.progress.clear()
    tell(study.report(session.lines))
    if chosen.quick:
        tell(QUICK)
    session.finish(chosen.config)
    return exit_status(statuses)


def _judge_pair(session: Session, kind: str, name: str, make: Make, chosen: Options) -> str:
    """Write a record a question; the status of the pair: failed where both questions together are wrong about it."""
    result = Result(name, None, "float32", session.facts, variant={"kind": kind}, study=session.study, run=session.run)
    both = judged(make(torch.float32).to(chosen.device), meaning=True)
    if both.passed != (kind == "right"):
        result.status, result.reason = "failed", "it was passed" if both.passed else f"it was refused by {both.tensor}"
    findings = {MEANING: both}
    for dtype in DTYPES:
        findings[dtype_name(dtype)] = judged(make(dtype).to(chosen.device), meaning=False)
    for question, finding in findings.items():
        values = [] if finding.times_the_bound is None else [finding.times_the_bound]
        session.write([record(result, f"error by {question}", "times its bound", values, "check", passed=finding.passed,
                              tensor=finding.tensor)])
    return result.status


def _judge_cheat(session: Session, name: str, chosen: Options) -> str:
    """Write a record of a cheat; the status: failed where it was not refused."""
    session.say(Phase.JUDGING, name)
    result = Result(name, None, "float32", session.facts, variant={"kind": "cheat"}, study=session.study,
                    run=session.run)
    if CHEATS[name].needs_gpu and chosen.device.type == "cpu":
        result.status, result.reason = "skipped", "its streams are a GPU's"
        session.write([status_record(result, "check")])
        return result.status
    found = cheating.of_cheat(name, CHEATS[name], chosen.device)
    if not found.refused:
        result.status, result.reason = "failed", "it was passed"
    times = [] if found.times_as_fast is None else [found.times_as_fast]
    session.write([record(result, CHEAT, "times as fast, by do_bench", times, "check", refused=found.refused,
                          found=found.by, passes_allclose=found.passes_allclose)])
    return result.status


def _judge_honest(session: Session, chosen: Options) -> str:
    """Write how many honest modules passed, with the reasons of those that did not; failed where there are any."""
    result = Result("honest modules", None, "float32", session.facts, variant={"kind": "honest"}, study=session.study,
                    run=session.run)
    refused, count = {}, 0
    for name, make in cheating.honest(chosen.quick):
        session.say(Phase.JUDGING, name)
        count += 1
        if reason := cheating.refusal(make, chosen.device):
            refused[name] = reason
    if refused:
        result.status, result.reason = "failed", "; ".join(f"{name}: {why}" for name, why in refused.items())
    session.write([record(result, HONEST, "modules", [count - len(refused)], "check", of=count)])
    return result.status


def _measure_cost(session: Session, chosen: Options) -> None:
    session.say(Phase.JUDGING, "what the defences cost")
    result = Result("compare", None, "float32", session.facts, variant={"kind": "cost"}, study=session.study,
                    run=session.run)
    seconds = cheating.seconds_of_comparing(chosen.device)
    for defended, taken in seconds.items():
        session.write([record(result, COST, "s", taken, "check" if defended else "undefended", defended=defended)])


# -------------------------------------------------------------------------------------------------------- what it shows


def text(lines: list[Record], width: int | None = None) -> str:
    """Both tables, from records."""
    runs = list(latest(lines).values())
    blocks = [provenance(lines)]
    for kind, title in (("wrong", WRONG_ONES), ("right", "Right ones")):
        rows = [_row(run) for run in runs if run.variant["kind"] == kind]
        blocks.append(f"{title}\n\n{table(rows, ['pair', *HEADERS.values(), 'tensor'], width)}")
    blocks += _of_cheats(runs, width)
    failed = [f"{run.label}: {run.info['reason']}" for run in runs if run.status != "ok"]
    return "\n\n".join([*blocks, *failed])


def _of_cheats(runs: list[Run], width: int | None) -> list[str]:
    """The table of cheats, and a line each for honest modules and for what the defences cost."""
    rows, sentences = [], []
    for run in runs:
        kind = run.variant["kind"]
        line = run.find("check", {"cheat": CHEAT, "honest": HONEST, "cost": COST}.get(kind, ""))
        if line is None:
            continue
        values = line["metric"]["benchmark_values"]
        if kind == "cheat":
            of_clock = f", {values[0]:.1f} times as fast" if values else ""
            commonly = f"passes{of_clock}" if extra(line)["passes_allclose"] else "refused"
            rows.append([run.case["name"], extra(line)["found"] if extra(line)["refused"] else "passed", commonly])
        elif kind == "honest":
            sentences.append(f"Of {extra(line)['of']} honest modules {int(values[0])} passed.")
        elif (plain := run.find("undefended", COST)) is not None:
            share = statistics.median(values) / statistics.median(plain["metric"]["benchmark_values"]) - 1
            sentences.append(f"The defences add {100 * share:.0f} % to the wall time of `compare` on two small layers.")
    headers = ["cheat", "found by", "allclose at 1e-2 once, and do_bench"]
    return [f"{CHEATING}\n\n{table(rows, headers, width)}", *sentences] if rows else []


def _row(run: Run) -> list[str]:
    own = [_find(run, question) for question in QUESTIONS]
    return [run.case["name"], *map(_cell, own), extra(own[0])["tensor"]]


def _find(run: Run, question: str) -> Record:
    line = run.find("check", f"error by {question}")
    assert line is not None
    return line


def _cell(line: Record) -> str:
    """2e+06; `form` where it is no figure; `passes` beside what is within its bound."""
    values = line["metric"]["benchmark_values"]
    figure = f"{values[0]:.0e}" if values else "form"
    return f"{figure} passes" if extra(line)["passed"] else figure


def answer(lines: list[Record]) -> str:
    """How many of them it was right about."""
    runs = list(latest(lines).values())
    shown = []
    for kind, outcome in (("wrong", "mistakes refused"), ("right", "right modules passed")):
        of_kind = [run.status == "ok" for run in runs if run.variant["kind"] == kind]
        shown.append(f"{sum(of_kind)} of {len(of_kind)} {outcome}")
    cheats = [run for run in runs if run.variant["kind"] == "cheat" and run.status != "skipped"]
    if cheats:
        shown.append(f"{sum(run.status == 'ok' for run in cheats)} of {len(cheats)} cheats refused")
    return ", ".join(shown)


register(Study("judge", __doc__, lambda options: [], text=text, run=run, answer=answer,
               no_chart="a multiple of a bound is no bar",
               place=8))
