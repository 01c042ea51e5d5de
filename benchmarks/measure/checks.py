"""What a judge says: a check for each tensor and question, and all of them together."""
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.measure.names import Kind, Named
from common.text import table

MEANING, PRECISION = "meaning", "precision"
DRAWN = "meaning, zeros drawn"             # with other values in place of parameters that are zero and hide the rest
CHANNELS_LAST = "channels-last"            # no lower precision: the same sums, in another order


@dataclass(frozen=True)
class Check:
    """One tensor and one question. Error and bound are shares of the tensor's norm, or of that of all gradients."""
    of: Named
    question: str                          # one of those above, or "form", "chance", "fresh inputs", "timed calls"
    passed: bool                           # nothing speaks against it
    proven: bool                           # it could be decided
    error: float
    bound: float
    reason: str                            # for the bound; where it failed or could not be decided, for that
    explained_by: str = ""                 # what explains an error beyond the bound: channels-last or a lower precision

    @property
    def is_less_accurate(self) -> bool:
        """Whether a lower precision explains it."""
        return self.explained_by not in ("", CHANNELS_LAST)

    @property
    def name(self) -> str:
        """What it is of, in words."""
        return str(self.of)

    def __str__(self) -> str:
        if math.isnan(self.error) or not self.bound:
            return f"the {self.name}: {self.reason}"
        if math.isinf(self.error):
            return f"the {self.name} is not finite, or not where the reference is ({self.reason})"
        return f"the {self.name} is off by {self.error:.1e}, the bound is {self.bound:.1e} ({self.reason})"


@dataclass(frozen=True)
class Judgement:
    """All checks of one callable; printed, a table of them."""
    checks: list[Check]
    truth: str                             # what it was held against, in words
    notes: list[str] = field(default_factory=list)
    numerics: str | None = None            # that were declared
    hint: str = ""
    does_not_fit: bool = False             # it ran out of memory
    has_oracle: bool = True                # the truth is known in FP64
    truth_in_short: str = ""

    @property
    def status(self) -> str:
        """ok, unproven, failed or oom."""
        if self.does_not_fit:
            return "oom"
        return ("ok" if self.outputs_proven else "unproven") if self.passed else "failed"

    @property
    def passed(self) -> bool:
        """Nothing speaks against it."""
        return all(check.passed for check in self.checks)

    @property
    def proven(self) -> bool:
        """It passed, and every tensor could be decided."""
        return self.passed and all(check.proven for check in self.checks)

    @property
    def outputs_proven(self) -> bool:
        """It passed, and every output could be decided, and some gradient where there are any."""
        outputs = [check.proven for check in self.checks if check.of.kind is Kind.OUTPUT]
        gradients = [check.proven for check in self.checks if check.of.kind.is_gradient]
        return self.passed and all(outputs) and (any(gradients) or not gradients)

    @property
    def rounds_more(self) -> bool:
        """Whether it rounds more than the reference does, as was declared or as was seen."""
        return bool(self.numerics or self.less_accurate)

    @property
    def less_accurate(self) -> list[Check]:
        """Those that passed beyond their bound, as the meaning is right and a lower precision explains it."""
        return [check for check in self.checks if check.is_less_accurate]

    @property
    def worst(self) -> Check | None:
        """The output that failed, or the check furthest beyond its bound; else the one nearest to it. How far draws are
        apart is no error.
        """
        def nearness(check: Check) -> float:
            return math.inf if math.isnan(check.error) else check.error / check.bound if check.bound else 0.0
        failed = [check for check in self.checks if not check.passed]
        compared = failed or [check for check in self.checks if check.proven and not math.isnan(check.error)
                              and check.question != "chance"]
        outputs = [check for check in failed if check.of.kind is Kind.OUTPUT]
        return max(outputs or compared, key=nearness, default=None)

    @property
    def failure(self) -> str:
        """What failed, in a line; "" where nothing did."""
        if self.passed or self.worst is None:
            return ""
        return f"{self.worst}{f': {self.hint}' if self.hint else ''}"

    def counted(self) -> str:
        """How many tensors were decided, and of what: 1 output, 14 of 16 gradients."""
        words = []
        gradients = Kind.INPUT_GRADIENT, Kind.PARAMETER_GRADIENT
        for kind, kinds in {"output": [Kind.OUTPUT], "gradient": gradients, "buffer": [Kind.BUFFER]}.items():
            of_kind = [check for check in self.checks if check.of.kind in kinds and check.question != "chance"]
            names = {check.of.words for check in of_kind}
            undecided = {check.of.words for check in of_kind if not check.proven}
            count = f"{len(names) - len(undecided)} of {len(names)}" if undecided else str(len(names))
            if names:
                words.append(f"{count} {kind}{'s' if len(names) > 1 else ''}")
        return ", ".join(words)

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)

    def __len__(self) -> int:
        return len(self.checks)

    def __str__(self) -> str:
        rows = []
        for check in self.checks:
            verdict = "FAILED" if not check.passed else "ok" if check.proven else "unproven"
            shown = ["" if math.isnan(value) else f"{value:.1e}" for value in (check.error, check.bound)]
            rows.append([check.name, check.question, verdict, *shown, check.reason])
        head = [f"held against {self.truth}; {self.counted()}", *self.notes, *filter(None, [self.hint])]
        return "\n".join([*head, "", table(rows, ["tensor", "question", "verdict", "error", "bound", "why"])])
