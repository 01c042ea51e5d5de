"""What `distributed` shows, from records: the proof, the account, the training, the model of time."""
from collections.abc import Sequence

from benchmarks.records.read import Run, extra, metric, runs, values
from benchmarks.show.tables import NO_ANSWER, framed
from benchmarks.studies.distributed import account, published, ring
from benchmarks.studies.distributed.proof import BRANCH, GRADIENT, INPUT, LOSS, UPDATE
from common.report.record import Record
from common.runtime.iteration import BOTH
from common.text import NOT_AVAILABLE, figures, table

ERRORS = (LOSS, BRANCH, INPUT, GRADIENT, UPDATE)
MEANING = "float64"                                        # the dtype of the parameters where FP64 proves the meaning
MOVED, KEPT = "moved", "kept"                              # the metrics: bytes of a kind of collective, bytes of a rank
LOSSES, MODEL = "loss", "step by the ring's model"         # and of each training step; seconds
SIMULATED = "simulated: in one process, on tensors without data; nothing was sent"
FROM_ONE = "compute is that of one H200, as the ladder was recorded there"


def text(lines: list[Record], width: int | None = None) -> str:
    """Everything the command prints, from records."""
    every = runs(lines)
    rows = []
    for of_case in every:
        if of_case.variant.get("simulated"):
            continue
        rows.append([_words(of_case), *(_error(of_case, each) for each in ERRORS), of_case.status])
    worst = [f"{_precision(of_case)}: the worst parameter gradient is of {name}"
             for of_case in every if (name := _worst_parameter(of_case))]
    reasons = [f"{of_case.variant['parallel']}, {of_case.status}: {of_case.info['reason']}"
               for of_case in every if of_case.info["reason"]]
    proved = table(rows, ["against one process in FP64", *ERRORS, "status"], width) if rows else ""
    simulated = SIMULATED if len(rows) < len(every) else ""
    blocks = [proved, "\n".join(worst), _account(every, width), _training(every), simulated, _model(every, width),
              "\n".join(reasons)]
    return framed(lines, blocks, [])


def _training(every: Sequence[Run]) -> str:
    """The losses of the steps."""
    said = []
    for of_case in every:
        line = of_case.find(BOTH, LOSSES)
        if line:
            begun, losses = extra(line)["begun"], values(line)
            resumed = f"resumed behind step {begun}" if begun else "from the beginning"
            each = ", ".join(f"{number}: {loss:.6f}" for number, loss in enumerate(losses, start=begun + 1))
            said.append(f"training {resumed}, the loss of each step: {each or 'there was nothing left to do'}")
    return "\n".join(said)


def _account(every: Sequence[Run], width: int | None) -> str:
    """What each of them moves and keeps."""
    rows = []
    for of_case in every:
        for line in of_case.lines:
            if metric(line) in (MOVED, KEPT):
                told, counted = extra(line), values(line)[0]
                what = told.get("kind", account.STATE)
                rows.append([f"{_words(of_case)}: {what}", str(told.get("calls", "")), f"{counted:,.0f}",
                             f"{told['formula']:,}"])
    return table(rows, ["a step of one rank", "calls", "bytes", "by formula"], width) if rows else ""


def _model(every: Sequence[Run], width: int | None) -> str:
    """Milliseconds of a step by the ring's model, and what share of it is compute."""
    rows = []
    for of_case in every:
        line = of_case.find(BOTH, MODEL)
        if line:
            told, seconds = extra(line), values(line)[0]
            rows.append([_words(of_case), *(figures(1e3 * each) for each in
                                            (told["compute"], told["gather"], told["reduce"], seconds)),
                         f"{100 * told['compute'] / seconds:.1f} %"])
    headers = [published.NO_COMMUNICATION, "compute ms", "gather, a layer", "reduce, a layer", "step ms", "compute"]
    return "\n\n".join([table(rows, headers, width), FROM_ONE, ring.CONSTANTS]) if rows else ""


def _words(run: Run) -> str:
    """Which blocks they are."""
    variant = run.variant
    words = [f"step {run.step}", f"{variant['layers']} layers", variant["parallel"], _precision(run)]
    words += [f"{name} {variant[name]}" for name in ("gathered", "prefetch", "reduced in", "divided by")
              if name in variant]
    return ", ".join([*words, "simulated"] if variant.get("simulated") else words)


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
