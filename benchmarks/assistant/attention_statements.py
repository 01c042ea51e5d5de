"""What becomes of attention's scores from one statement to the next, and which statements stay."""
import ast
import contextlib
from dataclasses import replace

from benchmarks.assistant.attention_reading import Reader, Scores
from benchmarks.assistant.source import text_of
from benchmarks.assistant.statements import (
    assigned,
    first_of_two,
    is_returned_alone,
    lines_of,
    loaded,
    needed_later,
    target_of,
)
from benchmarks.assistant.technique import NotWritten


class StatementReader:
    """Reads the statements before the product with the values, in their order."""

    def __init__(self, file: str, dimensions: int):
        self.file, self.text = file, text_of(file)
        self.reader = Reader(self.text, dimensions)
        self.kept: list[ast.stmt] = []                         # what stays, before the output's statement
        self.removed: dict[ast.stmt, int] = {}                 # and what does not, with how many masks it puts on
        self.changed: dict[ast.stmt, str] = {}                 # what stays, and asked the scores for their dtype

    def read(self, statement: ast.stmt) -> None:
        """Follow the scores through one statement. Raises NotWritten."""
        if isinstance(statement, ast.If):
            if self._conditional(statement):
                return
        elif (target := target_of(statement) or first_of_two(statement)) is not None:
            name, value = target
            scores = self.reader.value(value)
            if self.reader.output is not None:
                raise NotWritten("its output stands in an earlier statement")
            if scores is not None:
                self.reader.names[name] = scores
                self.removed[statement] = len(scores.fills) - self._fills_until_now()
                return
            self.reader.names.pop(name, None)                  # it is something else now
        self.kept.append(self._without_scores(statement))

    def _without_scores(self, statement: ast.stmt) -> ast.stmt:
        """The same, where it asks the scores for no more than their dtype or device; else as it is."""
        if not loaded(statement, None) & set(self.reader.names):
            return statement
        with contextlib.suppress(NotWritten):
            changed = self.reader.without_scores(statement)
            self.changed[statement] = ast.unparse(changed)
            return changed
        return statement

    def _fills_until_now(self) -> int:
        return sum(self.removed.values())

    def _conditional(self, statement: ast.If) -> bool:
        """Whether something under a condition is done to the scores; then what it does is under it.

        What else stands there before that stays with it.
        """
        if not any((target := target_of(each)) and target[0] in self.reader.names for each in statement.body):
            return False
        if statement.orelse:
            raise NotWritten("its scores depend on a condition that does something else, too")
        test, count, before = self.reader.words(statement.test), 0, list[str]()
        if self._caps_under(test, statement):
            return True
        for each in statement.body:
            name, value = target_of(each) or ("", None)
            scores = self.reader.names.get(name)
            if scores is None or value is None:
                if not isinstance(each, ast.Assign):
                    raise NotWritten("its scores depend on a condition that does something else, too")
                asks = loaded(each, None) & set(self.reader.names)
                as_it_is = lines_of(each, self.text.split("\n"))
                before += [ast.unparse(self.reader.without_scores(each))] if asks else as_it_is
                continue
            new = self._under(test, scores, self.reader.value(value), tuple(before))
            self.reader.names[name] = new
            count += len(new.fills) - len(scores.fills)
            before = []
        if before:
            raise NotWritten("its scores depend on a condition that does something else, too")
        self.removed[statement] = count
        return True

    def _caps_under(self, test: str, statement: ast.If) -> bool:
        """Whether all that is under the condition puts a soft cap on the scores; then they have it under that."""
        targets = [target for each in statement.body if (target := target_of(each))]
        names = {name for name, _ in targets}
        if len(names) != 1 or len(targets) < len(statement.body):
            return False
        (name,) = names
        before = self.reader.names[name]
        if before.fills or before.inside is not None:
            return False
        after: Scores | None = before
        for _, value in targets:
            after = self.reader.value(value)
            if after is None:
                break
            self.reader.names[name] = after                # what the next statement reads
        self.reader.names[name] = before
        if after is None or after.inside is None or after.fills or after.is_softmax:
            return False
        self.reader.names[name] = after.capped_under(test, before)
        self.removed[statement] = 0
        return True

    @staticmethod
    def _under(test: str, before: Scores, after: Scores | None, lines: tuple[str, ...]) -> Scores:
        """What a statement under a condition makes of the scores."""
        if after is None or after.is_softmax != before.is_softmax:
            raise NotWritten("under a condition its scores become something else")
        if (after.scales, after.inside) != (before.scales, before.inside):
            raise NotWritten("under a condition its scores become something else")
        new = [replace(fill, test=test, lines=lines) for fill in after.fills[len(before.fills):]]
        dropout = after.dropout
        if dropout != before.dropout:
            dropout = f"({dropout}) if {test} else {before.dropout or '0.0'}"
        return replace(after, fills=(*before.fills, *new), dropout=dropout)

    def returned_weights(self, last: ast.stmt, output: ast.expr) -> list[str]:
        """The names of weights that the function returns beside its output: in this model nothing uses them.

        Raises NotWritten where a statement that stays needs a name that is gone otherwise.
        """
        gone = {name for statement in self.removed for name in assigned(statement)}
        needed = needed_later(gone, self.kept, last, output, self.file)
        of_kept = {name for statement in self.kept for name in loaded(statement, None)}
        for name in needed:
            scores = self.reader.names.get(name)
            is_weights = scores is not None and scores.is_softmax and not scores.value
            if not is_weights or name in of_kept or not is_returned_alone(name, last, output, self.file):
                raise NotWritten("its scores are used for something else, too")
        return sorted(needed)
