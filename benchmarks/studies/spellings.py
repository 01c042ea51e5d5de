"""Which spellings of attention by hand does the assistant rewrite, and which does it write?

    python -m benchmarks spellings --count 200 --json spellings.jsonl

Attention is drawn from every combination of what people vary: how the products and the scale are spelt, the mask, the
softmax, the dropout, which of scale and mask comes first, whether queries, keys and values are projected or given. Each
is put through the technique `sdpa`: rewritten in its graph, and by the lines that the report says to write. Both are
held against it, outputs and gradients, with its optional mask and without. Exit status: 0 ok, 1 something that was
rewritten or written is another function, 2 usage, 130 interrupted.
"""
import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.assistant import pasting
from benchmarks.assistant.program import read
from benchmarks.assistant.rung import Rung
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.techniques import sdpa
from benchmarks.examples import spellings
from benchmarks.examples.spellings import Spelling
from benchmarks.measure.calls import Inputs
from benchmarks.measure.judge import validate
from benchmarks.records.provenance import provenance
from benchmarks.records.read import Run, extra, latest
from benchmarks.show.study import Options, Study, exit_status, open_session, register
from common.command_line import Parser, tell
from common.phases import Phase
from common.report.record import Record, record
from common.report.result import Result
from common.text import table

COUNT, QUICK_COUNT = 48, 16
PARTS = tuple(part.name for part in dataclasses.fields(Spelling))
HEADERS = ("what varies", "spelt", "of", "rewritten", "written", "another function")


@dataclass(frozen=True)
class Outcome:
    """What became of one spelling; "" where nothing is wrong."""
    not_rewritten: str = ""
    not_written: str = ""
    wrong: str = ""                        # it became another function, and how far off


def tried(spelling: Spelling, folder: Path) -> Outcome:
    """Rewrite one, write it, and hold both against it. The folder is new: what was read of a file is kept."""
    folder.mkdir()
    file = folder / "spelt.py"
    file.write_text(spellings.HEAD + spelling.source("Spelt"))
    model, inputs = _made(file), _inputs(spelling)
    program = read(model, Inputs.of(inputs))
    [found] = sdpa.find(program)
    if found.why_not:
        return Outcome(found.why_not, found.why_not)
    wrong = _apart(Rung(model, [sdpa.TECHNIQUE]), model, inputs)
    try:
        advice = sdpa.advice(program, found)
    except NotWritten as error:
        return Outcome("", str(error), wrong)
    assert advice is not None
    pasted = folder / "pasted.py"
    pasted.write_text(pasting.pasted(file.read_text(), [advice]))
    written = _made(pasted)
    for given in (inputs, inputs[:-1]) if spelling.mask == "optional" else (inputs,):
        wrong = wrong or _apart(written, model, given)
    return Outcome("", "", wrong)


def _made(file: Path) -> nn.Module:
    """The module of a file, always with the same parameters."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.Spelt()


def _inputs(spelling: Spelling) -> tuple[Tensor, ...]:
    """[B, S, E], or queries, keys and values [B, H, S, D]; and a mask [S, S], where one may be given."""
    numbers = torch.Generator().manual_seed(0)
    heads, length, width = spellings.HEADS, spellings.LENGTH, spellings.WIDTH
    x = torch.randn(2, length, heads * width, generator=numbers)
    qkv = tuple(torch.randn(2, heads, length, width, generator=numbers) for _ in range(3))
    mask = torch.ones(length, length).tril()
    return ((x,) if spelling.projected else qkv) + ((mask,) if spelling.mask == "optional" else ())


def _apart(candidate: Callable, reference: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    return validate(candidate, reference, inputs, cotangents=1).failure


# ------------------------------------------------------------------------------------------------------------ measuring


def run(study: Study, chosen: Options) -> int:
    """Try as many as were asked for; the exit status."""
    session = open_session(study, chosen)
    statuses = []
    with tempfile.TemporaryDirectory(prefix="spellings-") as name:
        for number, spelling in enumerate(spellings.spellings(chosen.count, chosen.seed)):
            session.say(Phase.JUDGING, f"spelling {number + 1} of {chosen.count}")
            outcome = tried(spelling, Path(name) / str(number))
            result = Result(f"spelling {number}", None, "float32", session.facts, study=session.study, run=session.run)
            if outcome.wrong:
                result.status, result.reason = "failed", outcome.wrong
            session.write([record(result, "spelling", "", [], "check", spelt=dataclasses.asdict(spelling),
                                  **dataclasses.asdict(outcome))])
            statuses.append(result.status)
    session.progress.clear()
    tell(study.report(session.lines))
    session.finish(chosen.config)
    return exit_status(statuses)


def add_arguments(parser: Parser) -> None:
    """How many."""
    parser.add_argument("--count", type=int, metavar="N",
                        help=f"spellings that are drawn (default: {COUNT}; with --quick {QUICK_COUNT})")


def refine(chosen: Options) -> None:
    """Raises ValueError for a count that can't be drawn."""
    if chosen.count is None:
        chosen.count = QUICK_COUNT if chosen.quick else COUNT
    if not 0 < chosen.count <= spellings.EVERY:
        raise ValueError(f"--count {chosen.count}: give 1 to {spellings.EVERY:,}")


# -------------------------------------------------------------------------------------------------------- what it shows


def text(lines: list[Record], width: int | None = None) -> str:
    """A row for each spelling of each part, then the reasons."""
    runs = list(latest(lines).values())
    rows = [["all", "", *_counts(runs)]]
    for part in PARTS:
        of_kind: dict[str, list[Run]] = {}
        for run in runs:
            of_kind.setdefault(str(_recorded(run)["spelt"][part]), []).append(run)
        rows += [[part.replace("_", " "), kind, *_counts(alike)] for kind, alike in sorted(of_kind.items())]
    reasons = [f"{why}: {count}" for why, count in _reasons(runs).items()]
    return "\n\n".join([provenance(lines), table(rows, list(HEADERS), width, 2), *reasons])


def _counts(runs: list[Run]) -> list[str]:
    """Of all, rewritten, written, another function."""
    found = [_outcome(run) for run in runs]
    return [str(len(found)), str(sum(not one.not_rewritten for one in found)),
            str(sum(not one.not_written for one in found)), str(sum(bool(one.wrong) for one in found))]


def _reasons(runs: list[Run]) -> dict[str, int]:
    """Why -> how often."""
    found: dict[str, int] = {}
    for outcome in map(_outcome, runs):
        for why in dict.fromkeys(filter(None, (outcome.not_rewritten, outcome.not_written, outcome.wrong))):
            found[why] = found.get(why, 0) + 1
    return found


def _outcome(run: Run) -> Outcome:
    found = _recorded(run)
    return Outcome(found["not_rewritten"], found["not_written"], found["wrong"])


def _recorded(run: Run) -> dict:
    line = run.find("check", "spelling")
    assert line is not None
    return extra(line)


def answer(lines: list[Record]) -> str:
    """How many of them."""
    count, rewritten, written, wrong = _counts(list(latest(lines).values()))
    return f"of {count} spellings {rewritten} are rewritten and {written} written, {wrong} wrongly"


register(Study("spellings", __doc__, lambda options: [], text=text, run=run, answer=answer, add_arguments=add_arguments,
               refine=refine, no_chart="a share of spellings is a row of the table", place=10))
