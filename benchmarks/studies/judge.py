"""Which mistakes does the judge of modules find, and in which dtype?

    python -m benchmarks judge --json judge.jsonl

Every pair of `benchmarks/examples/pairs.py` is judged: modules that are right, and modules with a mistake in them. Once
by meaning, in FP64. Then by precision alone in FP32, FP16 and BF16, as if there were no FP64. What counts is the error
as a multiple of its bound: of the worst tensor, or of none where what comes back has another form. Exit status: 0 ok,
1 the judge was wrong about a pair, 2 usage, 130 interrupted.
"""
import math
from dataclasses import dataclass

import torch

from benchmarks.examples.pairs import RIGHT, WRONG, Make, Pair
from benchmarks.measure.calls import Inputs
from benchmarks.measure.checks import Check, Judgement
from benchmarks.measure.judge import Judge
from benchmarks.measure.observing import Work
from benchmarks.measure.truth import Truth
from benchmarks.records.provenance import provenance
from benchmarks.records.read import Run, extra, latest
from benchmarks.show.study import Options, Study, exit_status, open_session, register
from common.block.config import dtype_name
from common.command_line import tell
from common.measure.session import Session
from common.phases import Phase
from common.report.record import Record, record
from common.report.result import Result
from common.text import table

MEANING = "meaning"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUESTIONS = (MEANING, *map(dtype_name, DTYPES))
WRONG_ONES = """With a mistake: the error as a multiple of its bound. `form`: what failed is no such figure, but a
shape, a dtype, a missing gradient, an integer, a place that is not finite."""
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
    return finding(judgement, MEANING if meaning else "precision")


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
    session.progress.clear()
    tell(study.told(session.lines))
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
    for question, of_it in findings.items():
        values = [] if of_it.times_the_bound is None else [of_it.times_the_bound]
        session.write([record(result, f"error by {question}", "times its bound", values, "check", passed=of_it.passed,
                              tensor=of_it.tensor)])
    return result.status


# -------------------------------------------------------------------------------------------------------- what it shows


def text(lines: list[Record], width: int | None = None) -> str:
    """Both tables, from records."""
    runs = list(latest(lines).values())
    blocks = [provenance(lines)]
    for kind, title in (("wrong", WRONG_ONES), ("right", "Right ones")):
        rows = [_row(run) for run in runs if run.variant["kind"] == kind]
        blocks.append(f"{title}\n\n{table(rows, ['pair', *HEADERS.values(), 'tensor'], width)}")
    failed = [f"{run.label}: {run.info['reason']}" for run in runs if run.status != "ok"]
    return "\n\n".join([*blocks, *failed])


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
    return ", ".join(shown)


register(Study("judge", __doc__, lambda options: [], text=text, run=run, answer=answer,
               no_chart="a multiple of a bound is no bar",
               place=8))
